"""Authorization and audit of calls: who may call, and who asked to change what.

`Authorizer` identifies callers by their certificates and checks their roles; `CallerService` serves WhoAmI.
`AuditTrail` turns operators' calls into entries and merges repeated refusals; `AuditService` serves ListAuditEntries.
`DescribeCall` is the port by which the other services describe a call for the trail.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc.aio

from eelgrid_controller.clock import Clock
from eelgrid_controller.errors import ControllerConfigError, JournalError
from eelgrid_controller.runtime.access_control import LIVE_PAGE_PATH, REQUIRED_ROLES, check_call_role, show_workload
from eelgrid_controller.runtime.audit_log import (
    AUDITED,
    JOURNALLED,
    REPORTS,
    AuditedCall,
    AuditedJournal,
    AuditFilter,
    is_denied,
    summarize_request,
)
from eelgrid_controller.runtime.config import ControllerConfig
from eelgrid_controller.server.grpc.pagination import next_page_token, parse_page_request
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_protos import __version__
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault, Unavailable
from eelgrid_protos.local_users import create_proofs_folder
from eelgrid_protos.log_lines import RateLimitedLog
from eelgrid_protos.messages import (
    CALLER_NODES_MOST,
    AuditEntry,
    ListAuditEntriesRequest,
    ListAuditEntriesResponse,
    WhoAmIRequest,
    WhoAmIResponse,
    Workload,
)
from eelgrid_protos.openmetrics import MetricFamily
from eelgrid_protos.roles import (
    Caller,
    CallerReader,
    LocalUserReader,
    Role,
    RoleRefused,
    RoleRules,
    check_node,
    peer_address,
)

if TYPE_CHECKING:
    # Ingest processes authorize callers, too, and have no core.
    from eelgrid_controller.runtime.loop import ControllerLoop

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_REFUSALS_EVERY_S = 60.0
_ROLELESS_EVERY_S = 3600.0


class Authorizer:
    """Lets callers in whose connections are under mutual TLS, or who prove that they are users of this machine."""

    def __init__(self, rules: RoleRules, *, clock: Clock, log: logging.Logger, proofs: Path | None = None) -> None:
        self.rules = rules
        self._clock = clock
        self._log = RateLimitedLog(log, clock.monotonic_s)
        # Here rather than in the first call, which would wait for 0.1 s of importing.
        import cryptography.x509  # noqa: F401

        self._callers = CallerReader(rules)
        self._local_users = None if proofs is None else LocalUserReader(proofs, rules)
        self._refused: Counter[tuple[str, str]] = Counter()
        self._roleless: Counter[str] = Counter()

    def authorize_call(self, path: str, context: Context) -> None:
        """Before each call; raises RoleRefused."""
        self._admit(path, self.identify_caller(context))

    def authorize_node(self, node_name: str, context: Context) -> None:
        """When an agent has said for which node it speaks; raises RoleRefused."""
        try:
            check_node(self.identify_caller(context), node_name)
        except RoleRefused as refusal:
            self.count_refusal(refusal)
            raise

    def authorize_viewer(self, der: bytes | None) -> None:
        """Before each answer of the live page, by the connection's certificate; raises RoleRefused."""
        self._admit(LIVE_PAGE_PATH, self._callers.read_caller(der or b""))

    def identify_caller(self, context: Context) -> Caller:
        """Whoever calls."""
        return (self._local_users or self._callers).identify_caller(context)

    def families(self) -> Iterator[MetricFamily]:
        """What the page of metrics tells."""
        yield build_family("eelgrid_calls_refused_total", dict(self._refused))
        yield build_family("eelgrid_calls_without_role_total", dict(self._roleless))

    def _admit(self, path: str, caller: Caller) -> None:
        try:
            is_by_role = check_call_role(caller, path, self.rules, now_s=self._clock.now_ns() / 1e9)
        except RoleRefused as refusal:
            self.count_refusal(refusal)
            raise
        if not is_by_role:
            needs = REQUIRED_ROLES.get(path)
            word = "admin" if needs is None else needs.value
            self._roleless[word] += 1
            self._log.warn(
                ("let in", word),
                _ROLELESS_EVERY_S,
                "call=%s certificate=%r role=none action=let_in remedy='give it O=eelgrid:%s, then --roles require'",
                path.rpartition("/")[2],
                caller.subject,
                word,
            )

    def count_refusal(self, refusal: RoleRefused) -> None:
        """A caller was refused, here or by whoever looked closer."""
        key = refusal.caller.greatest_role, refusal.needs
        self._refused[key] += 1
        self._log.warn(
            key,
            _REFUSALS_EVERY_S,
            "call=%s certificate=%r roles=%s needs=%s action=refused",
            refusal.method,
            refusal.caller.subject,
            key[0],
            refusal.needs,
        )


_NAME_MOST = 253
# RFC 5280 writes 9999-12-31 for a certificate that never ends, which is more nanoseconds than the contract has.
_NS_MOST = 2**63 - 1


def open_authorizer(config: ControllerConfig, clock: Clock, log: logging.Logger) -> Authorizer:
    """Prepares authorization of callers by the roles of their certificates, or as local users; raises ControllerConfigError."""
    if not config.roles.demanded:
        log.warning(
            "roles=permit warning=a certificate without a role may everything "
            "remedy='give certificates roles (docs/how-to/tls-and-roles.md), then say --roles require'"
        )
    proofs = None
    if config.local_users:
        try:
            proofs = create_proofs_folder(config.listen)
        except OSError as error:
            path = error.filename or config.listen
            raise ControllerConfigError(f"--local-users cannot use {path}: {error.strerror}", "remove it") from error
    return Authorizer(config.roles, clock=clock, log=log, proofs=proofs)


# A workload as somebody may see it.
WorkloadFilter: TypeAlias = Callable[[Workload], Workload]
ViewFor: TypeAlias = Callable[[Context], WorkloadFilter]


class CallerService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`, and shows callers what they may see; `caller_of` is None without TLS."""

    def __init__(self, caller_of: Callable[[Context], Caller] | None, *, demanded: bool) -> None:
        self._caller_of = caller_of
        self._demanded = demanded

    def view_for(self, context: Context) -> WorkloadFilter:
        """Returns what leaves of a workload what the caller may see."""
        caller = None if self._caller_of is None else self._caller_of(context)
        return lambda workload: show_workload(caller, workload, demanded=self._demanded)

    async def who_am_i(self, _request: WhoAmIRequest, context: Context) -> WhoAmIResponse:
        """Whose the caller's certificate is, and what it may."""
        if self._caller_of is None:
            return WhoAmIResponse(roles=tuple(role.value for role in Role), controller_version=__version__)
        caller = self._caller_of(context)
        return WhoAmIResponse(
            subject=caller.subject,
            roles=tuple(role.value for role in Role if role in caller.roles),
            node_names=tuple(name[:_NAME_MOST] for name in sorted(caller.nodes)[:CALLER_NODES_MOST]),
            roles_demanded=self._demanded,
            not_after_ns=int(min(max(0.0, caller.ends_s) * 1e9, _NS_MOST)),
            user=caller.user,
            rights=tuple(f"{kind}:{name}" for kind, name in sorted(caller.rights) if kind != "user"),
            controller_version=__version__,
        )


# The call behind a request, by its name.
DescribeCall: TypeAlias = Callable[[str, object, Context], AuditedCall]


_WRITE_EVERY_S = 1.0
# Calls alike within so long are one entry more.
_ALIKE_S = 60.0
# Sorts of refused calls that are told apart: each is some 300 bytes for a minute.
_SORTS_MOST = 1024
# Entries that wait while the disk takes nothing; what is beyond is counted alone.
_WAITING_MOST = 4096
_CANCELLED = "its caller went away before the answer, and it may have been done"
# What callers are called that are told apart no more.
_OTHERS = "(others)"


@dataclass(slots=True)
class _RepeatedRefusal:
    """Calls of one sort since the last entry about them."""

    until_s: float
    call: AuditedCall
    reason: str = ""
    calls: int = 0


class AuditTrail:
    """Of one controller; `caller_of` is None where there is no TLS."""

    def __init__(
        self,
        *,
        loop: "ControllerLoop",
        clock: Clock,
        log: logging.Logger,
        caller_of: Callable[[Context], Caller] | None,
        count_refusal: Callable[[RoleRefused], None] = lambda _: None,
    ) -> None:
        self._loop, self._clock, self._log = loop, clock, log
        self._caller_of = caller_of
        self._count_refusal = count_refusal
        self._alike: dict[tuple[str, str, str], _RepeatedRefusal] = {}
        self._waiting: list[AuditEntry] = []
        self._counts: Counter[str] = Counter(accepted=0, refused=0)
        self._unwritten = 0

    def describe_call(self, method: str, request: object, context: Context) -> AuditedCall:
        """An operator's call, with what matters of it."""
        return replace(self._unread(method, context), arguments=summarize_request(method, request))

    def families(self) -> Iterator[MetricFamily]:
        """What the page of metrics tells."""
        yield build_family("eelgrid_audit_events_total", dict(self._counts))
        yield build_family("eelgrid_audit_events_lost_total", self._unwritten)

    async def on_call_end(
        self, path: str, context: Context, request: object | None, error: BaseException | None
    ) -> None:
        """How a call ended, before it is answered; raises Fault where what it did is to be on disk and is not."""
        method = path.rpartition("/")[2]
        if error is None:
            if method in AUDITED and request is not None:
                await self._on_accepted(method, request, context)
            return
        if isinstance(error, asyncio.CancelledError):
            # What is journalled has its entry where it was done.
            if method in AUDITED - JOURNALLED and request is not None:
                self._record_call(self.describe_call(method, request, context), "CANCELLED", _CANCELLED)
            return
        if isinstance(error, RoleRefused) and request is not None:
            # Refused by whoever looked closer than the door.
            self._count_refusal(error)
        code = _code_of(error)
        if method in AUDITED or is_denied(code):
            call = self._unread(method, context) if request is None else self.describe_call(method, request, context)
            self._counts["refused"] += 1
            self._record_call(call, code, str(error))

    async def run(self) -> None:
        """Writes what gathered, until cancelled."""
        while True:
            await asyncio.sleep(_WRITE_EVERY_S)
            await self.write()

    async def write(self) -> None:
        """Writes what has gathered; what cannot be written now is tried again."""
        self._ripen()
        entries, self._waiting = self._waiting, []
        if entries:
            # Of everybody: they are written also where whoever lists them goes away.
            await asyncio.shield(self._write_entries(entries))

    async def _write_entries(self, entries: list[AuditEntry]) -> None:
        try:
            await self._loop.audit(entries)
        except Fault as error:
            self._log.debug("audit=later entries=%d reason=%s", len(entries), error)
            for entry in entries:
                self._enqueue(entry)

    def _unread(self, method: str, context: Context) -> AuditedCall:
        caller = None if self._caller_of is None else self._caller_of(context)
        return AuditedCall(method, caller, peer_address(context))

    async def _on_accepted(self, method: str, request: Any, context: Context) -> None:
        if getattr(request, "dry_run", False):
            return
        self._counts["accepted"] += 1
        if method in JOURNALLED:
            return
        call = self.describe_call(method, request, context)
        if method in REPORTS:
            self._record_call(call, "OK", "")
        else:
            await self._loop.audit((call.entry(time_ns=self._clock.now_ns(), code="OK"),))

    def _record_call(self, call: AuditedCall, code: str, reason: str) -> None:
        """An entry now, or one call more for the next."""
        who = call.peer.rpartition(":")[0] if call.caller is None else call.caller.subject
        key = who, call.method, code
        if key not in self._alike and len(self._alike) >= _SORTS_MOST:
            key, call = (_OTHERS, "", code), AuditedCall(_OTHERS, None, _OTHERS)
        now_s = self._clock.monotonic_s()
        found = self._alike.get(key)
        if found is None:
            self._alike[key] = _RepeatedRefusal(now_s + _ALIKE_S, call)
            self._enqueue(call.entry(time_ns=self._clock.now_ns(), code=code, reason=reason))
            return
        found.call, found.reason, found.calls = call, reason, found.calls + 1

    def _ripen(self) -> None:
        """Entries of calls that were counted for long enough."""
        now_s = self._clock.monotonic_s()
        for key, found in list(self._alike.items()):
            if now_s < found.until_s:
                continue
            if not found.calls:
                del self._alike[key]
                continue
            self._enqueue(
                found.call.entry(time_ns=self._clock.now_ns(), code=key[2], reason=found.reason, calls=found.calls)
            )
            found.until_s, found.calls = now_s + _ALIKE_S, 0

    def _enqueue(self, entry: AuditEntry) -> None:
        if len(self._waiting) < _WAITING_MOST:
            self._waiting.append(entry)
        else:
            self._unwritten += entry.calls


def _code_of(error: BaseException) -> str:
    """The status that the caller gets."""
    if isinstance(error, ContractError):
        return "INVALID_ARGUMENT"
    return error.code.name if isinstance(error, Fault) else "INTERNAL"


class AuditService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(self, *, journal: AuditedJournal, trail: AuditTrail) -> None:
        self._journal = journal
        self._trail = trail

    async def list_audit_entries(self, request: ListAuditEntriesRequest, _context: Context) -> ListAuditEntriesResponse:
        """Who asked to change what, the newest first; raises InvalidArgument and Unavailable."""
        size, after = parse_page_request(request)
        before = after[0] if after and isinstance(after[0], int) else None
        wanted = AuditFilter(request.since_ns, request.user, request.call, request.denied)
        await self._trail.write()
        try:
            page = await asyncio.to_thread(self._journal.read_audit_page, wanted, size=size, before=before)
        except JournalError as error:
            raise Unavailable(str(error)) from error
        return ListAuditEntriesResponse(
            entries=page.entries,
            next_page_token=next_page_token(request, (page.next_before,)) if page.next_before else "",
            total=page.total,
            damaged=page.damaged,
        )
