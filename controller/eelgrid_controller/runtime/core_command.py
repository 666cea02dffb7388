"""One change of the cluster state that somebody asked for, from its call to its answer.

Owns what a command carries, how its caller is answered, and what must come before any of them. Must not know the queue,
nor when it is written to disk (`loop`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.nodes import WithdrawnPlans, plan_controller_start
from eelgrid_controller.core.steps import CommandOrigin, CoreStep
from eelgrid_controller.errors import ControllerError, JournalFenced
from eelgrid_controller.runtime.audit_log import AuditedCall
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.journal import Journal
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


class PrecedingChanges:
    """What the journal must have before any other change: that a controller started, and what a failed write withdrew.

    An agent may hold more than this journal knows: if the journal was rolled back, only the agent can tell. An engine
    that lists its running work reports it without being asked.
    """

    def __init__(self, journal: Journal, *, asks_agents: bool) -> None:
        self.is_begun = False
        self._journal = journal
        self._asks_agents = asks_agents
        self._withdrawn = WithdrawnPlans()

    def begin(self, state: ClusterState) -> None:
        """Begins with a recovered state, whose journal may need no event of this start."""
        self.is_begun = not plan_controller_start(
            state,
            self._journal.lost,
            timeline=self._journal.term.timeline,
            asks_agents=self._asks_agents,
            now_ns=0,
        )

    def record_failure(self, failed: ClusterState, recovered: ClusterState) -> None:
        """Records that a write failed; only another database server can still have it when it was removed."""
        if self._journal.is_remote:
            self._withdrawn.record_failure(failed, recovered)

    def make_command(self, asked_s: float) -> CoreCommand | None:
        """Makes the command that has to come first, None if nothing has to."""
        epoch, begins = self._withdrawn.plan_epoch, not self.is_begun
        if not (epoch or begins):
            return None
        lost = self._journal.lost

        def apply(core: Core, now_ns: int) -> CoreStep[None]:
            steps = [core.withdraw_plans(epoch, now_ns=now_ns)] if epoch else []
            if begins:
                timeline = self._journal.term.timeline
                steps.append(
                    core.record_controller_start(
                        now_ns=now_ns, lost=lost, timeline=timeline, asks_agents=self._asks_agents
                    )
                )
            return CoreStep(tuple(event for step in steps for event in step.events), None, frozenset())

        def on_answer(answer: asyncio.Future[Any]) -> None:
            if answer.exception() is None:
                self.is_begun = self.is_begun or begins
                self._withdrawn.record_commit(epoch)

        answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(on_answer)
        return CoreCommand(apply, answer, asked_s=asked_s)


def describe_end(error: Exception) -> Fault:
    """Returns what the callers of a batch are told that ended this process."""
    if isinstance(error, JournalFenced) and error.is_certain:
        # Only what surely was not written may be asked of the other leader without looking first.
        return NotLeader(str(error), leader=error.leader)
    if isinstance(error, ControllerError):
        return Unavailable(str(error))
    return Internal("a fault in the controller, which ends; its log has the details, and whether this is done")


def change_nothing(_core: Core, _now_ns: int) -> CoreStep[None]:
    """Applies a command that is about its audit entries, or about being first."""
    return CoreStep((), None, frozenset())
