"""A command in the loop's queue: the change to apply to the core, its outcome and the caller who waits for it.

Owns the answer, which is given once, and not to a caller who has gone. Must not know when a command runs or
when its answer may be given: the loop decides both.
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
    """What one commit made true."""

    events: tuple[Event, ...]
    nodes: frozenset[str]
    revision: int


@dataclass(frozen=True, slots=True)
class CommandOrigin:
    """Whence a command came: when the call arrived, and the caller's trace context as W3C's headers, for observers."""

    arrived_ns: int
    headers: Mapping[str, str]


@dataclass(slots=True)
class CoreCommand:
    """One change that somebody asked for; `fault` is why it was refused."""

    apply: Callable[[Core, int], CoreStep[Any]]
    answer: asyncio.Future[Any]
    is_decision: bool = False
    # On the monotonic clock.
    asked_s: float = 0.0
    origin: CommandOrigin | None = None
    # The operator's call behind it, for the audit log; None for what this process asks of itself.
    call: AuditedCall | None = None
    # Further entries of the audit log that are to be on disk with it.
    entries: tuple[AuditEntry, ...] = ()
    outcome: Any = None
    fault: Exception | None = None
    # When its turn came.
    turn_ns: int = 0

    def audit_entries(self, revision: int) -> tuple[AuditEntry, ...]:
        """What the audit log keeps of it, if it was accepted; refusals are the door's to tell."""
        if self.fault is not None:
            return ()
        if self.call is None:
            return self.entries
        return (self.call.entry(time_ns=self.turn_ns, code="OK", revision=revision), *self.entries)

    def resolve(self, result: Any = None, *, fault: Exception | None = None) -> None:
        """Answers the caller, who may have gone."""
        if self.answer.done():
            return
        if fault is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(fault)
