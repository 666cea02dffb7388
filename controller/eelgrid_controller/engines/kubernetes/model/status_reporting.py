"""Status conditions and Events (events.k8s.io/v1) with the limits that the API server enforces.

`lastTransitionTime` changes only with the status, so that setting an equal condition gives an equal value and no
write. Malformed conditions in an object are dropped.

Sources: k8s.io/apimachinery/pkg/apis/meta/v1/types.go, Condition; KEP 1623;
kubernetes pkg/apis/core/validation/events.go.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from eelgrid_controller.engines.kubernetes.model.quantities import format_micro_time, format_time, parse_time

MAX_CONDITIONS = 16
# Kubernetes takes 32,768; nobody reads more than this in a terminal.
MAX_MESSAGE_LENGTH = 1024
_TYPE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9./_-]{0,314}[A-Za-z0-9])?")
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,1022}[A-Za-z0-9_])?")
_STATUSES: dict[str, bool | None] = {"True": True, "False": False, "Unknown": None}
_TEXTS = {status: text for text, status in _STATUSES.items()}
_NS = 1_000_000_000
_LAST_S = 253_402_300_799  # the end of the year 9999, beyond which there is no text
_CUT = " ..."


@dataclass(frozen=True, slots=True)
class StatusCondition:
    """One condition; `status` is None where it is not known, `since_s` counts seconds since 1970."""

    type: str
    status: bool | None
    reason: str
    message: str
    generation: int  # of the object that was looked at
    since_s: int

    def to_json(self) -> dict[str, Any]:
        """As it stands in a status."""
        return {
            "type": self.type,
            "status": _TEXTS[self.status],
            "reason": self.reason,
            "message": self.message,
            "observedGeneration": self.generation,
            "lastTransitionTime": format_time(self.since_s),
        }


@dataclass(frozen=True, slots=True)
class ConditionSet:
    """All conditions of one object, in the order in which they came."""

    items: tuple[StatusCondition, ...] = ()

    def __iter__(self) -> Iterator[StatusCondition]:
        """Each condition."""
        return iter(self.items)

    def get(self, type: str) -> StatusCondition | None:  # noqa: A002  # the API's word
        """The condition of a type."""
        return next((one for one in self.items if one.type == type), None)

    def is_true(self, type: str) -> bool:  # noqa: A002
        """Whether a condition is there and holds."""
        found = self.get(type)
        return found is not None and found.status is True

    def with_condition(
        self,
        type: str,  # noqa: A002
        status: bool | None,
        reason: str,
        message: str,
        *,
        generation: int,
        at_ns: int,
    ) -> Self:
        """With this condition; `at_ns` (nanoseconds since 1970) counts where its status is another than before.

        A message that is too long is cut. Raises ValueError for a type or a reason that Kubernetes does not take, and
        for a condition beyond CONDITIONS_MOST: both are mistakes of the program, never of an object.
        """
        if not _TYPE.fullmatch(type):
            raise ValueError(f"type {type!r} is no name of a condition; use letters, such as WithinBudget")
        if not _REASON.fullmatch(reason):
            raise ValueError(f"reason {reason!r} of {type} is no reason; use one word of letters, such as RoomLeft")
        before = self.get(type)
        since_s = min(max(at_ns // _NS, 0), _LAST_S)
        if before is not None and before.status is status:
            since_s = before.since_s
        now = StatusCondition(type, status, reason, _cut(message), max(generation, 0), since_s)
        if before is not None:
            return replace(self, items=tuple(now if one is before else one for one in self.items))
        if len(self.items) >= MAX_CONDITIONS:
            raise ValueError(f"condition {type} is one too many; an object has {MAX_CONDITIONS} at most")
        return replace(self, items=(*self.items, now))

    def without(self, *types: str) -> Self:
        """Without the conditions of these types."""
        return replace(self, items=tuple(one for one in self.items if one.type not in types))

    def retain(self, types: Iterable[str]) -> Self:
        """With the conditions of these types alone: what an older version wrote and nobody keeps is dropped."""
        kept = frozenset(types)
        return replace(self, items=tuple(one for one in self.items if one.type in kept))

    def to_json(self) -> list[dict[str, Any]]:
        """As they stand in a status."""
        return [one.to_json() for one in self.items]

    @classmethod
    def from_json(cls, found: object) -> Self:
        """The conditions in a status; what is none, or is there twice, is dropped."""
        kept: dict[str, StatusCondition] = {}
        for one in found if isinstance(found, list) else ():
            condition = _read(one)
            if condition is not None and len(kept) < MAX_CONDITIONS:
                kept.setdefault(condition.type, condition)
        return cls(tuple(kept.values()))


def _read(found: object) -> StatusCondition | None:
    if not isinstance(found, dict):
        return None
    type_, reason, message = found.get("type"), found.get("reason"), found.get("message", "")
    status, generation = found.get("status"), found.get("observedGeneration", 0)
    since_s = parse_time(found.get("lastTransitionTime"))
    if not (isinstance(type_, str) and isinstance(reason, str) and isinstance(message, str)):
        return None
    if not (_TYPE.fullmatch(type_) and _REASON.fullmatch(reason)) or not isinstance(status, str):
        return None
    if status not in _STATUSES or since_s is None or not 0 <= since_s <= _LAST_S:
        return None
    is_whole = isinstance(generation, int) and not isinstance(generation, bool) and generation >= 0
    return StatusCondition(type_, _STATUSES[status], reason, _cut(message), generation if is_whole else 0, since_s)


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_LENGTH else message[: MAX_MESSAGE_LENGTH - len(_CUT)] + _CUT


_NOTE_MOST = 1_000
_WORD_MOST = 128
_NAME_MOST = 200  # and the time behind it


class EventReference(NamedTuple):
    """The object that an Event is about; without a namespace for one of the whole cluster."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


def build_event(
    about: EventReference, text: str, *, is_warning: bool, reason: str, action: str, identity: str, now_ns: int
) -> dict[str, Any]:
    """The Event, to be created in its own `metadata.namespace`; `identity` is of this process."""
    regarding = {"apiVersion": about.api_version, "kind": about.kind, "name": about.name, "uid": about.uid}
    return {
        # Those of cluster-wide objects lie in `default`.
        "metadata": {"name": f"{about.name[:_NAME_MOST]}.{now_ns:x}", "namespace": about.namespace or "default"},
        "eventTime": format_micro_time(now_ns),
        "type": "Warning" if is_warning else "Normal",
        "reason": reason[:_WORD_MOST],
        "action": action,
        "note": text[:_NOTE_MOST],
        "reportingController": "eelgrid.io/controller",
        "reportingInstance": identity[:_WORD_MOST],
        "regarding": {**regarding, "namespace": about.namespace} if about.namespace else regarding,
    }
