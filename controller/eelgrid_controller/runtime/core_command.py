"""One change of the cluster state that somebody asked for, from its call to its answer.

Owns what a command carries and how its caller is answered. Must not know the queue, nor when it is written to disk
(`loop`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommandOrigin, CoreStep
from eelgrid_controller.errors import ControllerError, JournalFenced
from eelgrid_controller.runtime.audit_log import AuditedCall
from eelgrid_protos.faults import Fault, Internal, NotLeader, Unavailable
from eelgrid_protos.messages import AuditEntry


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


def describe_end(error: Exception) -> Fault:
    """Returns what the callers of a batch are told that ended this process."""
    if isinstance(error, JournalFenced) and error.is_certain:
        # Only what surely was not written may be asked of the other leader without looking first.
        return NotLeader(str(error), leader=error.leader)
    if isinstance(error, ControllerError):
        return Unavailable(str(error))
    return Internal("a fault in the controller, which ends; its log has the details, and whether this is done")
