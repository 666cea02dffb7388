"""Entries of the audit log: who asked to change what, and how the call ended."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eelgrid_protos.messages import AUDIT_ARGUMENTS_MOST, AUDIT_REASON_MOST, AuditEntry
from eelgrid_protos.plain_messages import to_plain
from eelgrid_protos.roles import Caller

# Of one request, so that a policy or a thousand moves cost no more than what is kept of them.
_ITEMS_SHOWN = 8
_TEXT_MOST = 120
_DEPTH_MOST = 4

# Calls that change what the journal holds: their entries are in the commit of their events.
JOURNALLED = frozenset(
    {
        "SubmitWorkload",
        "CancelWorkload",
        "ScaleWorkload",
        "UpdatePolicy",
        "ApplyMoves",
        "ApplyPartitions",
        "RecordPoints",
        "RemoveNode",
        "ReconcileNode",
    }
)
# Calls that only tell something, often: those alike are one entry a minute.
REPORTS = frozenset({"ReportProgress", "ConfirmEnergyExport"})
# Every call that changes something; the others change what is in no journal.
AUDITED = JOURNALLED | REPORTS | {"StartShadow", "StopShadow", "RemoveEnergyExporter"}


@dataclass(frozen=True, slots=True)
class AuditedCall:
    """An operator's call: which, whose, from where and what matters of its request; no caller without TLS."""

    method: str
    caller: Caller | None
    peer: str
    arguments: str = ""

    def entry(self, *, time_ns: int, code: str, reason: str = "", calls: int = 1, revision: int = 0) -> AuditEntry:
        """What is kept of it, or of so many alike."""
        caller = self.caller
        return AuditEntry(
            time_ns=time_ns,
            subject="" if caller is None else caller.subject,
            user="" if caller is None else caller.user,
            role="" if caller is None else caller.greatest_role,
            peer=escape_line_breaks(self.peer),
            call=self.method,
            arguments=self.arguments,
            code=code,
            reason=escape_line_breaks(reason)[:AUDIT_REASON_MOST],
            calls=calls,
            revision=revision,
        )


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which entries are asked for."""

    since_ns: int = 0
    user: str = ""
    call: str = ""
    denied: bool = False


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Entries, the newest first; how many match in all, whether there are more, and how many are damaged."""

    entries: tuple[AuditEntry, ...] = ()
    total: int = 0
    next_before: int = 0
    damaged: int = 0


def is_denied(code: str) -> bool:
    """Whether a call ended so for its caller's rights."""
    return code in {"PERMISSION_DENIED", "UNAUTHENTICATED"}


def escape_line_breaks(text: str) -> str:
    """The text with nothing in it that would begin a line or move a cursor."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _submission(request: Any) -> dict[str, Any]:
    spec = request.spec
    asked = {
        "workload_id": request.workload_id,
        "name": spec.name,
        "kind": spec.kind.name.lower(),
        "namespace": spec.namespace,
        "user": spec.user,
        "queue": spec.queue,
        "replicas": spec.replicas,
        "gpu_count": spec.request.gpu_count,
        "gpu_milli": spec.request.gpu_milli,
        "priority": spec.priority,
    }
    kept = {name: value for name, value in asked.items() if value}
    return kept | ({"labels": _bound_plain(spec.labels)} if spec.labels else {})


def _count_items(field: str) -> Callable[[Any], dict[str, Any]]:
    """How many items a request has, and the first few."""

    def essence(request: Any) -> dict[str, Any]:
        items = getattr(request, field)
        return {"count": len(items), field: [_bound_plain(to_plain(item, brief=True)) for item in items[:_ITEMS_SHOWN]]}

    return essence


_ESSENCES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "SubmitWorkload": _submission,
    "RecordPoints": _count_items("points"),
}


def summarize_request(method: str, request: Any) -> str:
    """What matters of a request, as JSON of AUDIT_ARGUMENTS_MOST characters at most; longer ones are cut."""
    essence = _ESSENCES.get(method)
    plain = essence(request) if essence is not None else _bound_plain(to_plain(request, brief=True))
    text = json.dumps(plain, ensure_ascii=True, separators=(",", ":"))
    return text if len(text) <= AUDIT_ARGUMENTS_MOST else f"{text[: AUDIT_ARGUMENTS_MOST - 3]}..."


def _bound_plain(plain: Any, depth: int = 0) -> Any:
    """Plain values with the first few items of each collection, and the beginning of each text."""
    if isinstance(plain, str):
        return plain if len(plain) <= _TEXT_MOST else f"{plain[:_TEXT_MOST]}..."
    if isinstance(plain, Mapping | list | tuple):
        if depth >= _DEPTH_MOST:
            return f"({len(plain)} items)"
        if isinstance(plain, Mapping):
            kept: Any = {
                key[:_TEXT_MOST]: _bound_plain(value, depth + 1) for key, value in list(plain.items())[:_ITEMS_SHOWN]
            }
            return kept | ({"...": len(plain) - _ITEMS_SHOWN} if len(plain) > _ITEMS_SHOWN else {})
        more = [f"... {len(plain) - _ITEMS_SHOWN} more"] if len(plain) > _ITEMS_SHOWN else []
        return [*(_bound_plain(item, depth + 1) for item in plain[:_ITEMS_SHOWN]), *more]
    return plain
