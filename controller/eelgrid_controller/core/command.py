"""A command in the loop's queue: the change to apply to the core, its outcome and the caller that waits for it.

Owns the answer, which is given once, and only to a caller that still waits. Must not know when a command runs or when
its answer may be given: the loop decides both.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eelgrid_controller.core.core import Core, CoreStep
from eelgrid_controller.state.audit_entries import AuditedCall
from eelgrid_controller.state.events import Event
from eelgrid_protos.messages import AuditEntry


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The result of one commit: its events, the nodes that changed, and the new revision."""

    events: tuple[Event, ...]
    nodes: frozenset[str]
    revision: int


@dataclass(frozen=True, slots=True)
class CommandOrigin:
    """Origin of a command for observers: when the call arrived, and the caller's trace context as W3C headers."""

    arrived_ns: int
    headers: Mapping[str, str]


@dataclass(slots=True)
class CoreCommand:
    """One requested change; `fault` is the reason if it was refused."""

    apply: Callable[[Core, int], CoreStep[Any]]
    answer: asyncio.Future[Any]
    is_decision: bool = False
    # When it was queued, on the monotonic clock.
    asked_s: float = 0.0
    origin: CommandOrigin | None = None
    # The operator's call behind it, for the audit log; None for commands of this process itself.
    call: AuditedCall | None = None
    # Further audit entries that are written to disk with it.
    entries: tuple[AuditEntry, ...] = ()
    outcome: Any = None
    fault: Exception | None = None
    # Wall time when it was applied.
    turn_ns: int = 0

    def audit_entries(self, revision: int) -> tuple[AuditEntry, ...]:
        """Returns the audit entries of an accepted command; the authorizer records refusals."""
        if self.fault is not None:
            return ()
        if self.call is None:
            return self.entries
        return (self.call.entry(time_ns=self.turn_ns, code="OK", revision=revision), *self.entries)

    def resolve(self, result: Any = None, *, fault: Exception | None = None) -> None:
        """Answers the caller, unless it no longer waits."""
        if self.answer.done():
            return
        if fault is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(fault)
