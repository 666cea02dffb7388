"""One process of the controller: the real core, telemetry, presence and recovery under a transcribed loop.

Owns what `eelgrid_controller.runtime.loop` owns: commands are queued, applied, on disk,
and only then answered. Here each of the three is an event of its own, so that
a crash can come between any two of them. When the process dies, nothing of
this object is used again but its journal.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.nodes import WithdrawnPlans
from eelgrid_controller.core.recovery import RecoveredState, encode_entries, recover_state
from eelgrid_controller.errors import JournalError, JournalFull, LostEntries
from eelgrid_controller.runtime.withheld_starts import WithheldStarts
from eelgrid_controller.state.agent_liveness import AgentLiveness
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event, UnreadableEvent
from eelgrid_controller.state.journal import Checkpoint
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault, Internal, ResourceExhausted, Unavailable
from eelgrid_protos.messages import NodeState
from tests.sim.broken import Broken
from tests.sim.clock import Clock, seconds
from tests.sim.disk import Unreliable
from tests.sim.ledger import Ledger
from tests.sim.timeline import Timeline

__all__ = ["Committed", "Life"]

AWAY_GRACE_S = 10.0
RESTART_GRACE_S = 30.0
_LOG = logging.getLogger("eelgrid.simulation")
_LOG.disabled = True
PROBE_EVERY_S = 1.0
CHECKPOINT_EVENTS = 25
_BATCH_MOST = 8
_TURN_NS = seconds(0.002)
_COMMIT_NS = seconds(0.02)
_TICK_NS = seconds(1)

Answer = Callable[[Any, Exception | None], None]
Apply = Callable[[Core, int], Any]


@dataclass(frozen=True, slots=True)
class Committed:
    """What one commit made true."""

    nodes: frozenset[str]


@dataclass(slots=True)
class _Command:
    apply: Apply
    answer: Answer
    # Whether it is written to the audit log, if it is accepted.
    is_audited: bool = False
    outcome: Any = None
    fault: Exception | None = None


class Life:
    """See the module."""

    telemetry_type: type[Telemetry] = Telemetry

    def __init__(self, timeline: Timeline, clock: Clock, journal: Unreliable, ledger: Ledger) -> None:
        self.timeline = timeline
        self.clock = clock
        self.journal = journal
        self.ledger = ledger
        self.listeners: list[Callable[[Committed], None]] = []
        self.presence = AgentLiveness()
        self.is_dead = False
        self.is_settled = True
        self._queue: deque[_Command] = deque()
        self._readers: list[Callable[[], None]] = []
        self._is_busy = False
        self._now_ns = 0
        self._journal_fault: Fault | None = None
        self._probe_at_s = 0.0
        self._since_checkpoint = 0
        self._withdrawn = WithdrawnPlans()
        self._withheld = WithheldStarts(_LOG)
        self._withheld.begin(clock.monotonic_s() + RESTART_GRACE_S)
        self.core: Core
        self._adopt(recover_state(journal, ClusterState))
        self.telemetry = self.telemetry_type(send_interval_s=self.core.state.policy.send_interval_s)
        for name, node in self.core.state.nodes.items():
            if node.state is NodeState.READY:
                self.presence.mark_disconnected(name, deadline_s=clock.monotonic_s() + RESTART_GRACE_S)
        self._begin(journal.lost)
        self.later(_TICK_NS, self._tick)

    def _begin(self, lost: LostEntries | None) -> None:
        """The first command of all; it is given again until the disk takes it."""

        def check(_: Any, fault: Exception | None) -> None:
            if fault is not None:
                self.later(seconds(PROBE_EVERY_S), lambda: self._begin(lost))

        timeline = self.journal.term.timeline
        self.command(
            lambda core, now_ns: core.record_controller_start(now_ns=now_ns, lost=lost, timeline=timeline), check
        )

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Runs the action after a while, unless the process has died by then."""
        self.timeline.after(self.clock.true_delay_ns(delay_ns), lambda: None if self.is_dead else action())

    def read(self, view: Callable[[], None]) -> None:
        """Runs the view at a moment when all that it sees is on disk."""
        if self.is_settled:
            view()
        else:
            self._readers.append(view)

    def command(self, apply: Apply, answer: Answer, *, is_audited: bool = False) -> None:
        """Queues a change."""
        self._queue.append(_Command(apply, answer, is_audited))
        self._wake()

    # The owner

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self.later(self.timeline.draw_ns(_TURN_NS), self._turn)

    def _turn(self) -> None:
        if self.core.has_backlog and self._journal_fault is None:
            self._queue.append(_Command(lambda core, now_ns: core.retry(now_ns=now_ns), _ignore))
        if self._journal_fault is not None and not self._can_write():
            while self._queue:
                self._queue.popleft().answer(None, self._journal_fault)
            self._is_busy = False
            return
        self.is_settled = False
        self._withdraw_plans()
        batch = self._apply_batch()
        events = [event for command in batch if command.fault is None for event in command.outcome.events]
        self._begun(batch)
        if events:
            self.later(self.timeline.draw_ns(_COMMIT_NS), lambda: self._commit(batch, events))
        else:
            self._answer_unwritten(batch)

    def _withdraw_plans(self) -> None:
        """See `eelgrid_controller.runtime.core_command.PrecedingChanges`."""
        if epoch := self._withdrawn.plan_epoch:

            def check(_: Any, fault: Exception | None) -> None:
                if fault is None:
                    self._withdrawn.record_commit(epoch)

            self._queue.appendleft(_Command(lambda core, now_ns: core.withdraw_plans(epoch, now_ns=now_ns), check))

    def _answer_unwritten(self, batch: list[_Command]) -> None:
        """Nothing is to be written but the audit log, which is not simulated."""
        self._finish(batch, None)

    def _begun(self, batch: list[_Command]) -> None:
        """Nothing is told to anybody before the commit; a planted fault does otherwise."""

    def _apply_batch(self) -> list[_Command]:
        batch: list[_Command] = []
        most = self.timeline.rng.randint(1, _BATCH_MOST)
        while self._queue and len(batch) < most:
            command = self._queue.popleft()
            batch.append(command)
            # A clock may be set back; what came first is told by revisions alone.
            self._now_ns = max(0, self.clock.wall_ns())
            revision = self.core.state.revision
            try:
                command.outcome = command.apply(self.core, self._now_ns)
            except (Fault, ContractError) as error:
                command.fault = error
            except UnreadableEvent as error:
                command.fault = Internal("this would write what could not be read back, so nothing was done")
                if self.core.state.revision != revision:
                    raise Broken(3, f"half of a step was done: {error}") from error
        return batch

    def _commit(self, batch: list[_Command], events: list[Event]) -> None:
        entries = encode_entries(events)
        try:
            last = self.journal.append(entries)
        except JournalError as error:
            self._undo(batch, error)
            return
        self.ledger.committed(entries)
        self._go_on(batch, len(events), last)

    def _undo(self, batch: list[_Command], error: JournalError) -> None:
        """Nothing of the batch is on disk: the state is read anew."""
        self._probe_at_s = self.clock.monotonic_s() + PROBE_EVERY_S
        self._journal_fault = _fault_of(error)
        failed = self.core.state
        self._adopt(recover_state(self.journal, ClusterState))
        if self.journal.is_remote:
            self._withdrawn.record_failure(failed, self.core.state)
        self.ledger.recovered(self.core.state)
        self.later(self.timeline.draw_ns(_TURN_NS), lambda: self._finish(batch, self._journal_fault))

    def _go_on(self, batch: list[_Command], events: int, last: int) -> None:
        """The batch is on disk."""
        assert last == self.core.state.revision, "journal and state count the same events"
        self._since_checkpoint += events
        self.later(self.timeline.draw_ns(_TURN_NS), lambda: self._finish(batch, None))

    def _finish(self, batch: list[_Command], fault: Fault | None) -> None:
        self.is_settled = True
        nodes: frozenset[str] = frozenset()
        for command in batch:
            error = command.fault or fault
            if error is None:
                nodes |= command.outcome.nodes
                command.answer(command.outcome.result, None)
            else:
                command.answer(None, error)
        if fault is None:
            for listener in self.listeners:
                listener(Committed(nodes))
        readers, self._readers = self._readers, []
        for view in readers:
            view()
        self._is_busy = False
        if self._queue or self.core.has_backlog:
            self._wake()
        elif self._since_checkpoint >= CHECKPOINT_EVENTS:
            self._checkpoint()

    def _can_write(self) -> bool:
        if self.clock.monotonic_s() < self._probe_at_s:
            return False
        self._probe_at_s = self.clock.monotonic_s() + PROBE_EVERY_S
        try:
            self.journal.probe()
        except JournalError as error:
            self._journal_fault = _fault_of(error)
            return False
        self._journal_fault = None
        return True

    def _adopt(self, recovered: RecoveredState) -> None:
        self.core = Core(recovered.state, load_catalogue(), joins_doubted=self.journal.is_remote)
        self._since_checkpoint = recovered.replayed

    def _checkpoint(self) -> None:
        state = self.core.state
        self._since_checkpoint = 0
        try:
            self.journal.write_checkpoint(Checkpoint(state.revision, state.dump(), state.digest()))
        except JournalError:
            # Entries are still there.
            return
        self.timeline.note(f"controller checkpoint revision={state.revision}")

    def _tick(self) -> None:
        if self._journal_fault is not None and not self._is_busy and self._can_write() and self.core.has_backlog:
            # It recovers without any call.
            self._wake()
        for name in self.presence.pop_expired(now_s=self.clock.monotonic_s()):
            self._lose(name)
        if self.core.is_drain_due(self.clock.wall_ns()):
            self.command(lambda core, now_ns: core.continue_drains(now_ns=now_ns), _ignore)
        if self._withheld.is_resumption_due(self.core.state, self.clock.monotonic_s()):
            self.command(lambda core, now_ns: core.resume_starts(now_ns=now_ns), _ignore)
        self.later(_TICK_NS, self._tick)

    def _lose(self, name: str) -> None:
        if name not in self.core.state.nodes:
            return

        def check(_: Any, fault: Exception | None) -> None:
            if fault is not None:
                self.presence.schedule_recheck(name, deadline_s=self.clock.monotonic_s() + PROBE_EVERY_S)

        self.command(lambda core, now_ns: core.mark_node_lost(name, now_ns=now_ns), check)


def _ignore(_: Any, fault: Exception | None) -> None:
    """Nobody waits for this answer."""


def _fault_of(error: JournalError) -> Fault:
    return ResourceExhausted(str(error)) if isinstance(error, JournalFull) else Unavailable(str(error))
