"""The cluster state: nodes, workloads, policy, learned demand and the pending queue, as a function of the events.

Owns every durable fact and the one function that changes them, `ClusterState.apply`; with it the order of pending
work (priority, then submission) and the stored explanations of placed replicas. Must not know how decisions are made: it applies outcomes and refuses only those that contradict the state
(ContradictoryEvent). No time and no numpy: the arrays of the planner are derived from this.

Theory: revision n is the state after n events. `dump` holds what cannot be derived; the allocations of each node
follow from the placements, and the pending queue from the workloads, so they can never disagree after `load`. Equal
event sequences give equal digests.

    PENDING --WorkloadPlaced, PartitionsPlanned--> PLACED
    PENDING, PLACED --WorkloadCancelled--> CANCELLED
    PENDING --WorkloadQueueChanged, WorkloadPromised, PromisesMoved, WorkloadHeld, WorkloadReleased--> PENDING
    PENDING, PLACED --DeadlineBroken, WorkloadShareChanged--> as it was
    PENDING, PLACED --PreemptionStarted--> as it was, and its victims that must be told to end PLACED until they have
    PLACED --PreemptionRefused--> PLACED, a victim that an engine evicts and that runs on
    PLACED --WorkloadEvicted, WorkloadRetried--> PENDING
    PLACED, or PENDING if its start is lost --WorkloadCompleted--> SUCCEEDED, FAILED, CANCELLED
    PLACED --WorkloadMoved, WorkloadScaled, WorkloadLimited, PartitionsPlanned, DevicesCorrected--> PLACED
    PLACED --AttemptStarted, AttemptEnded, WorkloadStopping--> PLACED
"""

from collections import Counter, deque
from collections.abc import KeysView, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self, assert_never

from eelgrid_controller.state.array_elements import ArrayElements, list_submitted
from eelgrid_controller.state.attempts import (
    apply_attempt,
    find_outcome,
    holds_until_stopped,
    must_stop,
    recover_attempts,
    return_to_queue,
)
from eelgrid_controller.state.deadline_changes import DeadlineEvent, apply_deadline_event
from eelgrid_controller.state.demand import Demand, PriceMarket
from eelgrid_controller.state.drawn_ids import DRAWN_ONLY, read_drawn_number
from eelgrid_controller.state.events import (
    ArraySubmitted,
    AttemptEnded,
    AttemptStarted,
    CapacityHoldsChanged,
    DeadlineBroken,
    DevicesCorrected,
    Event,
    GpuLost,
    GpuReturned,
    NodeCordoned,
    NodeJoined,
    NodeLost,
    NodeOccupied,
    NodesRemoved,
    NodeUncordoned,
    PartitionsPlanned,
    PolicyChanged,
    PreemptionRefused,
    PreemptionStarted,
    PricesQuoted,
    PromisesMoved,
    SpendingJudged,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadDeferred,
    WorkloadEvicted,
    WorkloadHeld,
    WorkloadLimited,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadPromised,
    WorkloadQueueChanged,
    WorkloadReleased,
    WorkloadRetried,
    WorkloadScaled,
    WorkloadStopping,
    WorkloadSubmitted,
)
from eelgrid_controller.state.explanation_store import ExplanationStore
from eelgrid_controller.state.gangs import JobGangs
from eelgrid_controller.state.interruptions import InterruptionHistory
from eelgrid_controller.state.job_dependencies import DependentWorkloads
from eelgrid_controller.state.journal import JournalSanitizer, digest_of
from eelgrid_controller.state.journal_losses import JournalLosses
from eelgrid_controller.state.measurement_events import (
    PointsMeasured,
    RuntimeExpected,
    StartsMeasured,
    WorkloadShareChanged,
)
from eelgrid_controller.state.measurements import MeasuredPoints, ReplicaStarts, make_job_profile_name
from eelgrid_controller.state.node_allocations import (
    ContradictoryEvent,
    DurableNode,
    NodeRecord,
    apply_device_correction,
    apply_move,
    apply_partition_plan,
    apply_policy,
    apply_scaling,
    is_sliced,
    list_affected_workloads,
    list_involved_nodes,
    list_rechargeable_workloads,
    make_assignment,
    reallocate_replicas,
    reallocate_slices,
)
from eelgrid_controller.state.nominations import Nominations
from eelgrid_controller.state.pending_queue import PendingQueue
from eelgrid_controller.state.policy import is_pool_enforced, is_pool_partitioned, policy_to_plain
from eelgrid_controller.state.queue_usage import QueueUsageState, count_spent_milli
from eelgrid_controller.state.runtime_history import RuntimeHistory
from eelgrid_controller.state.spending import SpendingState
from eelgrid_controller.state.state_dump import StateDump
from eelgrid_controller.state.takeover_events import (
    ControllerStarted,
    JournalRolledBack,
    LossEvent,
    NodeAhead,
    NodeHeard,
    NodeReconciled,
    PlansWithdrawn,
    StartsResumed,
)
from eelgrid_controller.state.waiting_changes import WaitingEvent, apply_waiting_event
from eelgrid_protos.messages import Placement, Policy, Workload, WorkloadPhase

# Ended workloads kept for queries; the first to end is the first to be removed.
ENDED_WORKLOADS_MOST = 100_000
_FORMAT = 1


class ClusterState:
    """The durable state of the controller; may be read freely, but is changed through `apply` only."""

    def __init__(self, *, policy: Policy | None = None, ended_most: int = ENDED_WORKLOADS_MOST) -> None:
        self.revision = 0
        self.policy = policy or Policy()
        self.nodes: dict[str, NodeRecord] = {}
        self.workloads: dict[str, Workload] = {}
        self.explanations = ExplanationStore()
        self.pending = PendingQueue()
        self.demand = Demand()
        self.market = PriceMarket()
        self.points = MeasuredPoints()
        self.starts = ReplicaStarts()
        self.spending = SpendingState(count_spent_milli)
        self.queue_usage = QueueUsageState()
        self.runtimes = RuntimeHistory()
        self.interruptions = InterruptionHistory()
        self.nominations = Nominations()
        # Number of submissions so far; the next generated id is w-<next_number>.
        self.submissions = 0
        self.next_number = 1
        self.losses = JournalLosses()
        # Nodes whose agents have not reported since the controller started.
        self.doubted: set[str] = set()
        # Nodes that are drained, or of which GPUs are, or have lost GPUs; lost ones that end their processes.
        self.draining: set[str] = set()
        # Live workloads whose promised deadline is not kept.
        self.broken_deadlines: set[str] = set()
        # The submission number of each live workload, by which it waits.
        self._numbers: dict[str, int] = {}
        self._ended: deque[str] = deque()
        # Live work by what it depends on, and ended work beyond `_ended` that is kept for it.
        self.dependents = DependentWorkloads()
        self.arrays = ArrayElements()
        self.gangs = JobGangs()
        self._kept: set[str] = set()
        # By phase; as many as `_ended` and `_kept`.
        self._ended_counts: Counter[WorkloadPhase] = Counter()
        self._ended_most = ended_most

    @property
    def awaits_agents(self) -> bool:
        """Whether agents that may be there have not said since the controller started what they hold."""
        return self.losses.withholds_starts or self.awaits_known_agents

    @property
    def awaits_known_agents(self) -> bool:
        """Whether an agent of a ready node has not reported since the controller started: what it holds is unknown."""
        return any((one := self.nodes[name]).is_ready and not one.is_reported for name in self.doubted)

    def copy(self, records: Mapping[str, NodeRecord] = MappingProxyType({})) -> Self:
        """Returns an independent state with these copies of records; immutable values are shared."""
        twin: Self = copy(self)
        twin.nodes = {name: records.get(name) or record.copy() for name, record in self.nodes.items()}
        twin.workloads, twin.explanations = self.workloads.copy(), self.explanations.copy()
        twin.pending, twin.demand, twin._ended = self.pending.copy(), self.demand.copy(), self._ended.copy()
        twin.market, twin.points, twin.spending = self.market.copy(), self.points.copy(), self.spending.copy()
        twin.queue_usage, twin.runtimes = self.queue_usage.copy(), self.runtimes.copy()
        twin.nominations, twin.interruptions = self.nominations.copy(), self.interruptions.copy()
        twin.broken_deadlines = self.broken_deadlines.copy()
        twin.losses, twin.starts = self.losses.copy(), self.starts.copy()
        twin.draining, twin._numbers, twin.doubted = self.draining.copy(), self._numbers.copy(), self.doubted.copy()
        twin._ended_counts = self._ended_counts.copy()
        twin.dependents, twin.arrays, twin._kept = self.dependents.copy(), self.arrays.copy(), self._kept.copy()
        twin.gangs = self.gangs.copy()
        return twin

    def requeue_workload(self, workload_id: str, *, number: int) -> None:
        """Puts a live workload into the pending queue under a number of the caller; for copies only.

        The event for this, WorkloadEvicted, keeps the order of submissions.
        """
        workload = self.workloads[workload_id]
        for placement in workload.placements:
            self.nodes[placement.node_name].release(workload_id, placement.replica)
        self.explanations.forget_workload(workload_id)
        self.workloads[workload_id] = replace(workload, phase=WorkloadPhase.PENDING, placements=(), placed_ns=0)
        self.queue_usage.update_charges(self.policy, (workload_id,), self.workloads, self.nodes, 0)
        self.pending.discard(workload_id)
        self.pending.add(workload_id, priority=workload.spec.priority, number=number)

    @property
    def live_ids(self) -> KeysView[str]:
        """The ids of pending and placed workloads, in the order of their submission."""
        return self._numbers.keys()

    @property
    def live_workloads(self) -> int:
        """Number of pending and placed workloads."""
        return len(self.workloads) - len(self._ended) - len(self._kept)

    @property
    def phases(self) -> dict[WorkloadPhase, int]:
        """Number of workloads by phase."""
        waiting = len(self.pending)
        return {
            WorkloadPhase.PENDING: waiting,
            WorkloadPhase.PLACED: self.live_workloads - waiting,
            **{phase: self._ended_counts[phase] for phase in WorkloadPhase if phase.is_ended},
        }

    def apply(self, event: Event) -> frozenset[str]:
        """Applies an event; returns the nodes on which something changed. Raises ContradictoryEvent."""
        touched = frozenset[str]()
        match event:
            case WorkloadSubmitted() | ArraySubmitted():
                touched = self._apply_submitted(event)
            case WorkloadPlaced():
                touched = self._apply_placed(event)
            case WorkloadMoved():
                touched = self._restood(*apply_move(self.workloads.get(event.workload_id), event), event)
            case WorkloadDeferred() | WorkloadQueueChanged() | WorkloadPromised() | WorkloadHeld() | WorkloadReleased():
                touched = self._apply_waiting(event)
            case DeadlineBroken() | WorkloadShareChanged() | PromisesMoved() | RuntimeExpected():
                touched = self._apply_deadline_event(event)
            case PreemptionStarted():
                touched = self._apply_preemption(event)
            case PreemptionRefused():
                touched = self._apply_refusal(event)
            case WorkloadCancelled():
                touched = self._apply_cancelled(event)
            case NodeJoined():
                touched = self._apply_joined(event)
            case NodeLost():
                touched = self._apply_lost(event)
            case NodesRemoved():
                touched = self._apply_removed(event)
            case NodeOccupied():
                self._node(event.node_name).others = event.others
                touched = frozenset((event.node_name,))
            case GpuLost() | GpuReturned():
                touched = self._apply_gpu_change(event)
            case PolicyChanged():
                touched = self._policy_changed(event)
            case PricesQuoted():
                touched = self._apply_priced(event)
            case WorkloadScaled():
                touched = self._restood(*apply_scaling(self.workloads.get(event.workload_id), event), event)
                self.nominations.note_scaling(event)
            case WorkloadLimited():
                touched = self._apply_limited(event)
            case PointsMeasured():
                self.points.add_points(event.points)
            case StartsMeasured():
                self.starts.add_starts(event.starts)
            case CapacityHoldsChanged():
                self.pending.held, self.pending.barred = event.held, event.barred
            case PartitionsPlanned():
                touched = self._apply_partitioned(event)
            case DevicesCorrected():
                touched = self._apply_corrected(event)
            case SpendingJudged():
                self.spending.set_overspent(event.over)
            case NodeCordoned() | NodeUncordoned():
                touched = self._apply_cordon(event)
            case WorkloadEvicted() | WorkloadRetried():
                touched = self._apply_evicted(event)
            case WorkloadStopping() | AttemptStarted() | AttemptEnded() | WorkloadCompleted():
                touched = self._apply_process_event(event)
            case NodeAhead() | NodeReconciled() | NodeHeard():
                touched = self._apply_reconciled(event)
            case ControllerStarted() | JournalRolledBack() | PlansWithdrawn() | StartsResumed():
                touched = self._apply_loss(event)
            case _:
                assert_never(event)
        self.revision += 1
        self._update_usage(event)
        return touched

    def _update_usage(self, event: Event) -> None:
        """Counts what workloads hold after an event, for spending limits and queues, and their interruptions."""
        self.interruptions.observe(event, self.policy, self.workloads, self.nodes)
        self.spending.update_held(list_affected_workloads(event), self.workloads, event.time_ns)
        if self.policy.queues:
            ids = list_rechargeable_workloads(event, self.nodes)
            self.queue_usage.update_charges(self.policy, ids, self.workloads, self.nodes, event.time_ns)

    def _node(self, name: str) -> NodeRecord:
        record = self.nodes.get(name)
        if record is None:
            raise ContradictoryEvent(f"node {name} never joined")
        return record

    def _waiting(self, workload_id: str) -> Workload:
        if workload_id not in self.pending:
            raise ContradictoryEvent(f"workload {workload_id} does not wait")
        return self.workloads[workload_id]

    def _apply_submitted(self, event: WorkloadSubmitted | ArraySubmitted) -> frozenset[str]:
        key = event.workload_id if isinstance(event, WorkloadSubmitted) else event.array_id
        found = list(list_submitted(event))
        taken = next((one for one in (key, *(one.workload_id for one in found)) if self.is_known(one)), None)
        if taken is not None:
            raise ContradictoryEvent(f"workload {taken} is there already")
        mix = self.demand.mix
        for workload in found:
            self._add_submitted(workload)
        if self.demand.mix is not mix:
            self.market.invalidate()
        number = read_drawn_number(key)
        if number < DRAWN_ONLY.start or number == self.next_number:
            self.next_number = max(self.next_number, number + 1)
        return frozenset()

    def _add_submitted(self, workload: Workload) -> None:
        key, spec = workload.workload_id, workload.spec
        self.workloads[key] = workload = replace(workload, revision=self.revision + 1)
        self.submissions += 1
        self._numbers[key] = self.submissions
        self.pending.add(key, priority=spec.priority, number=self.submissions)
        self.dependents.add(workload)
        self.arrays.add(workload)
        self.gangs.add(workload)
        if not is_sliced(workload):  # placed by the partition planner, so no demand on unpartitioned GPUs
            self.demand.observe(spec.request, spec.replicas)

    def is_known(self, workload_id: str) -> bool:
        """Returns whether a workload or an array has this id."""
        return workload_id in self.workloads or workload_id in self.arrays

    def find_workload(self, workload_id: str) -> Workload | None:
        """Returns the workload of an id, or an array as a whole; None if neither has it."""
        found = self.workloads.get(workload_id)
        return self.arrays.summarize(workload_id, self.workloads) if found is None else found

    def _apply_waiting(self, event: WaitingEvent) -> frozenset[str]:
        before = self._waiting(event.workload_id)
        if isinstance(event, WorkloadDeferred | WorkloadQueueChanged | WorkloadHeld):
            self.nominations.end(event.workload_id)
        self.workloads[event.workload_id] = replace(apply_waiting_event(before, event), revision=self.revision + 1)
        return frozenset()

    def _apply_deadline_event(self, event: DeadlineEvent) -> frozenset[str]:
        for after in apply_deadline_event(self.workloads, event):
            self.workloads[after.workload_id] = replace(after, revision=self.revision + 1)
        if isinstance(event, DeadlineBroken):
            self.broken_deadlines.add(event.workload_id)
        return frozenset()

    def _apply_placed(self, event: WorkloadPlaced) -> frozenset[str]:
        key = event.workload_id
        workload = self._waiting(key)
        if [placement.replica for placement in event.placements] != list(range(workload.spec.replicas)):
            raise ContradictoryEvent(f"workload {key}: the placements are not one for each replica")
        reallocate_replicas(self.nodes, workload, (), event.placements)
        self.pending.discard(key)
        self.runtimes.record_start(self.policy, workload, self.points)
        self.nominations.end(key)
        self.explanations.put(key, event.explanation)
        self.workloads[key] = replace(
            workload,
            phase=WorkloadPhase.PLACED,
            reason="",
            placements=event.placements,
            placed_ns=event.time_ns,
            revision=self.revision + 1,
            attempt=workload.attempt + (workload.spec.process is not None),
            promise=None,
            not_before_ns=0,
            power_limit_w=event.power_limit_w,
            limit_before_start=event.power_limit_w is not None,
        )
        return self._bump_plans(workload, event.placements, ())

    def _restood(
        self, after: Workload, before: Sequence[Placement], event: WorkloadMoved | WorkloadScaled
    ) -> frozenset[str]:
        """Removes some replicas from their places and adds new ones; all others stay where they are."""
        reallocate_replicas(self.nodes, after, before, event.placements)
        self.explanations.put(after.workload_id, event.explanation, (item.replica for item in before))
        self.workloads[after.workload_id] = replace(after, revision=self.revision + 1)
        return self._bump_plans(after, event.placements, before)

    def _apply_partitioned(self, event: PartitionsPlanned) -> frozenset[str]:
        after = apply_partition_plan(self.workloads, event)
        # On copies first, so that an impossible event changes nothing.
        copies = {name: self._node(name).copy() for name in list_involved_nodes(self.workloads, after, event)}
        reallocate_slices(copies, self.workloads, after, event)
        touched = reallocate_slices(self.nodes, self.workloads, after, event)
        for key, workload in after.items():
            self.pending.discard(key)
            self.nominations.end(key)
            self.workloads[key] = replace(workload, revision=self.revision + 1)
        return self._bump_epochs(touched)

    def _apply_corrected(self, event: DevicesCorrected) -> frozenset[str]:
        for key, workload in apply_device_correction(self.workloads, self._node(event.node_name), event).items():
            self.workloads[key] = replace(workload, revision=self.revision + 1)
        return self._bump_epochs(frozenset(one.placement.node_name for one in event.replicas))

    def _apply_limited(self, event: WorkloadLimited) -> frozenset[str]:
        workload = self.workloads.get(event.workload_id)
        if workload is None or workload.phase is not WorkloadPhase.PLACED:
            raise ContradictoryEvent(f"workload {event.workload_id} does not run")
        self.workloads[event.workload_id] = replace(
            workload, power_limit_w=event.power_limit_w, revision=self.revision + 1
        )
        return self._bump_epochs(frozenset(placement.node_name for placement in workload.placements))

    def _bump_plans(self, workload: Workload, came: Sequence[Placement], left: Sequence[Placement]) -> frozenset[str]:
        self.market.count_task_changes(workload.spec.request, len(came), len(left))
        return self._bump_epochs(frozenset(placement.node_name for placement in (*came, *left)))

    def _bump_epochs(self, names: frozenset[str]) -> frozenset[str]:
        for name in names:
            self.nodes[name].advance_plan(self.losses.withdrawn_epoch)
        return names

    def _apply_cancelled(self, event: WorkloadCancelled) -> frozenset[str]:
        workload = self.workloads.get(event.workload_id)
        if workload is None or workload.phase.is_ended:
            raise ContradictoryEvent(f"workload {event.workload_id} is not there or has ended")
        # What an engine has evicted has ended for the reason for which it had to.
        is_evicted = bool(workload.preempted_for) and workload.spec.evicted_by_engine
        reason = event.reason or (workload.reason if is_evicted else "")
        return self._end_workload(workload, WorkloadPhase.CANCELLED, reason, event.time_ns)

    def _end_workload(self, workload: Workload, phase: WorkloadPhase, reason: str, now_ns: int) -> frozenset[str]:
        """Frees everything that a workload holds, for good."""
        key = workload.workload_id
        self.gangs.note_end(workload, self.workloads)
        self.pending.discard(key)
        self.broken_deadlines.discard(key)
        self.nominations.end(key)
        self.explanations.forget_workload(key)
        self.points.forget_profile(make_job_profile_name(key))
        self.starts.forget(key)
        self.runtimes.record_end(self.policy, workload, phase, now_ns)
        # One of which the start was lost holds nothing here.
        held = workload.placements if workload.phase is WorkloadPhase.PLACED else ()
        for placement in held:
            self.nodes[placement.node_name].release(key, placement.replica)
        self.workloads[key] = replace(
            workload,
            phase=phase,
            reason=reason,
            ended_ns=now_ns,
            revision=self.revision + 1,
            promise=None,
            preempted_for="",
            held_by="",
        )
        self._numbers.pop(key, None)
        self._ended.append(key)
        self._ended_counts[phase] += 1
        self.arrays.note_end(workload, phase)
        needed_less = self.dependents.discard(workload)
        if workload.spec.array is not None and not self.arrays.is_live(workload.spec.array.array_id):
            needed_less.append(workload.spec.array.array_id)
        for parent in needed_less:
            for one in self.arrays.list_elements(parent) or (parent,):
                if one in self._kept and not self._is_needed(one):
                    self._kept.discard(one)
                    self._forget_workload(one)
        while len(self._ended) > self._ended_most:
            oldest = self._ended.popleft()
            if self._is_needed(oldest):
                self._kept.add(oldest)
            else:
                self._forget_workload(oldest)
        return self._bump_plans(workload, (), held)

    def _is_needed(self, workload_id: str) -> bool:
        """Returns whether live work depends on ended work or on its array, or the array is live."""
        array = self.workloads[workload_id].spec.array
        in_array = array is not None and (self.arrays.is_live(array.array_id) or array.array_id in self.dependents)
        return in_array or workload_id in self.dependents

    def _forget_workload(self, workload_id: str) -> None:
        workload = self.workloads.pop(workload_id)
        self.arrays.forget(workload)
        self._ended_counts[workload.phase] -= 1

    def _apply_process_event(
        self, event: WorkloadStopping | AttemptStarted | AttemptEnded | WorkloadCompleted
    ) -> frozenset[str]:
        match event:
            case WorkloadStopping():
                return self._apply_stopping(event)
            case WorkloadCompleted():
                return self._apply_ended(event)
            case _:
                return self._apply_attempt(event)

    def _apply_stopping(self, event: WorkloadStopping) -> frozenset[str]:
        workload = self._running(event.workload_id)
        # Its user may cancel what is being preempted.
        if workload.stopping_ns and not workload.returns_to_queue:
            raise ContradictoryEvent(f"workload {event.workload_id} is being stopped already")
        workload = replace(workload, held_by=event.held_by)
        return self._stop_processes(workload, event.reason, event.time_ns, requeuing=event.requeues)

    def _stop_processes(
        self, workload: Workload, reason: str, now_ns: int, *, preempted_for: str = "", requeuing: bool = False
    ) -> frozenset[str]:
        self.workloads[workload.workload_id] = replace(
            workload,
            stopping_ns=max(1, now_ns),
            reason=reason,
            preempted_for=preempted_for,
            requeuing=requeuing,
            revision=self.revision + 1,
        )
        return self._bump_epochs(frozenset(placement.node_name for placement in workload.placements))

    def _apply_preemption(self, event: PreemptionStarted) -> frozenset[str]:
        gainer, names = self.nominations.check(event, self.workloads), frozenset[str]()
        for place in event.placements:
            self._node(place.node_name)
        for victim in (self.workloads[key] for key in event.victims):
            if holds_until_stopped(victim.spec):
                names |= self._stop_processes(victim, event.reason, event.time_ns, preempted_for=event.workload_id)
        self.nominations.begin(event)
        if gainer.phase is WorkloadPhase.PENDING:
            gainer = replace(gainer, reason=event.waits)
        self.workloads[gainer.workload_id] = replace(gainer, revision=self.revision + 1)
        return names

    def _apply_refusal(self, event: PreemptionRefused) -> frozenset[str]:
        workload = self.workloads.get(event.workload_id)
        if workload is None or not workload.preempted_for or not workload.spec.evicted_by_engine:
            raise ContradictoryEvent(f"workload {event.workload_id} is no victim that an engine evicts")
        self.nominations.end(workload.preempted_for)
        self.workloads[event.workload_id] = replace(
            workload, stopping_ns=0, reason="", preempted_for="", revision=self.revision + 1
        )
        return self._bump_epochs(frozenset(placement.node_name for placement in workload.placements))

    def _apply_attempt(self, event: AttemptStarted | AttemptEnded) -> frozenset[str]:
        before = self._placed(event.workload_id)
        after = apply_attempt(before, event)
        self.workloads[event.workload_id] = replace(after, revision=self.revision + 1)
        if must_stop(after) == must_stop(before):
            return frozenset()
        return self._bump_epochs(frozenset(placement.node_name for placement in after.placements))

    def _apply_ended(self, event: WorkloadCompleted) -> frozenset[str]:
        key, recovered = event.workload_id, event.recovered
        workload = recover_attempts(self._waiting(key), recovered) if recovered else self._placed(key)
        if not event.phase.is_ended or find_outcome(workload) is None:
            raise ContradictoryEvent(f"processes of workload {event.workload_id} may still run")
        return self._end_workload(workload, event.phase, event.reason, event.time_ns)

    def _placed(self, workload_id: str) -> Workload:
        workload = self.workloads.get(workload_id)
        if workload is None or workload.phase is not WorkloadPhase.PLACED:
            raise ContradictoryEvent(f"workload {workload_id} is not placed, and so has no attempt")
        return workload

    def _running(self, workload_id: str) -> Workload:
        """Returns a placed workload with a process."""
        workload = self._placed(workload_id)
        if workload.spec.process is None:
            raise ContradictoryEvent(f"workload {workload_id} runs no process")
        return workload

    def _apply_evicted(self, event: WorkloadEvicted | WorkloadRetried) -> frozenset[str]:
        key = event.workload_id
        workload = self.workloads.get(key)
        if workload is None or workload.phase is not WorkloadPhase.PLACED:
            raise ContradictoryEvent(f"workload {key} does not run")
        if isinstance(event, WorkloadRetried) and find_outcome(self._running(key)) is None:
            raise ContradictoryEvent(f"processes of workload {key} may still run")
        for placement in workload.placements:
            self.nodes[placement.node_name].release(key, placement.replica)
        self.explanations.forget_workload(key)
        self.nominations.end(key)
        self.runtimes.forget_start(key)
        self.workloads[key] = replace(return_to_queue(workload, event), revision=self.revision + 1)
        self.pending.add(key, priority=workload.spec.priority, number=self._numbers[key])
        return self._bump_plans(workload, (), workload.placements)

    def _apply_cordon(self, event: NodeCordoned | NodeUncordoned) -> frozenset[str]:
        record = self._node(event.node_name)
        record.apply_cordon(event)
        self._note_drain(record)
        return frozenset((event.node_name,))

    def _note_drain(self, record: NodeRecord) -> None:
        (self.draining.add if record.is_draining else self.draining.discard)(record.inventory.node_name)

    def _apply_joined(self, event: NodeJoined) -> frozenset[str]:
        name, pool, record = event.inventory.node_name, event.inventory.pool, self.nodes.get(event.inventory.node_name)
        self.market.request_refresh()
        if record is None:
            record = self.nodes[name] = NodeRecord(inventory=event.inventory, withheld=self.losses.withholds_starts)
            if event.is_doubted:
                record.doubt_plan()
                self.doubted.add(name)
            record.update_inventory(event.inventory, event.time_ns)
            record.set_partitioned(partitioned=is_pool_partitioned(self.policy, pool))
        else:
            before = is_pool_enforced(self.policy, record.inventory.pool), record.slice_devices()
            record.update_inventory(event.inventory, event.time_ns)
            turned = record.set_partitioned(partitioned=is_pool_partitioned(self.policy, pool))
            if turned or (is_pool_enforced(self.policy, pool), record.slice_devices()) != before:
                record.advance_plan(self.losses.withdrawn_epoch)
        if event.plan_epoch > record.plan_epoch:
            record.advance_plan(max(event.plan_epoch, self.losses.withdrawn_epoch))
        self._note_drain(record)
        return frozenset((name,))

    def _apply_loss(self, event: LossEvent) -> frozenset[str]:
        self.next_number += self.losses.apply(event)
        withheld = self.losses.withholds_starts
        names = {name for name, record in self.nodes.items() if record.withheld != withheld}
        for name in names:
            self.nodes[name].withheld = withheld
        if isinstance(event, ControllerStarted):
            for name, record in self.nodes.items():
                if record.inventory.agent_version:
                    record.doubt_plan()
                    self.doubted.add(name)
            names |= self.doubted
        return frozenset(names)

    def _apply_reconciled(self, event: NodeAhead | NodeReconciled | NodeHeard) -> frozenset[str]:
        record = self._node(event.node_name)
        record.doubted_epoch = None
        self.doubted.discard(event.node_name)
        if not isinstance(event, NodeHeard):
            before = record.unknown_runs
            record.reconcile(event, above=self.losses.withdrawn_epoch)
            self.losses.change_unknown_runs(event.node_name, before, record.unknown_runs)
        return frozenset((event.node_name,))

    def _apply_lost(self, event: NodeLost) -> frozenset[str]:
        record = self._node(event.node_name)
        record.mark_lost(event.time_ns)
        self._note_drain(record)
        self.nominations.end_on((event.node_name,))
        return frozenset((event.node_name,))

    def _apply_removed(self, event: NodesRemoved) -> frozenset[str]:
        for name in event.node_names:
            if self._node(name).assignments:
                raise ContradictoryEvent(f"node {name} holds work and cannot be removed")
        self.nominations.end_on(event.node_names)
        for name in event.node_names:
            self.losses.change_unknown_runs(name, self.nodes.pop(name).unknown_runs, ())
            self.doubted.discard(name)
            self.draining.discard(name)
        self.market.request_refresh()
        return frozenset(event.node_names)

    def _apply_gpu_change(self, event: GpuLost | GpuReturned) -> frozenset[str]:
        record = self._node(event.node_name)
        if isinstance(event, GpuLost):
            record.mark_gpu_lost(event.gpu_uuid, event.time_ns)
            self.nominations.end_on((event.node_name,), event.gpu_uuid)
        else:
            record.mark_gpu_returned(event.gpu_uuid)
        self._note_drain(record)
        return frozenset((event.node_name,))

    def _policy_changed(self, event: PolicyChanged) -> frozenset[str]:
        before, self.policy = self.policy, event.policy
        self.spending.set_limits(event.policy, self.workloads, event.time_ns)
        self.queue_usage.set_policy(before, event.policy, self.workloads, self.nodes, event.time_ns)
        self.runtimes.set_policy(event.policy)
        return apply_policy(self.nodes, before, event.policy, above=self.losses.withdrawn_epoch)

    def _apply_priced(self, event: PricesQuoted) -> frozenset[str]:
        if len(event.offers_w) != len(self.demand.mix):
            raise ContradictoryEvent(f"{len(event.offers_w)} offers for a mix of {len(self.demand.mix)} classes")
        self.market.set_prices(event.quotes)
        return frozenset()

    def begin_dump(self) -> StateDump:
        """Takes over everything that `load` needs as it is at this revision, to be made plain while events go on."""
        dump = StateDump(self.revision)
        dump.add_values(format=_FORMAT, revision=self.revision, ended_most=self._ended_most, market=self.market.dump())
        dump.add_values(policy=policy_to_plain(self.policy), submissions=self.submissions, next_number=self.next_number)
        dump.add_list("ended", list(self._ended), str)
        dump.add_later("demand", self.demand.copy().dump)
        dump.add_list("nodes", [record.take_durable() for record in self.nodes.values()], DurableNode.dump)
        dump.add_list("workloads", list(self.workloads.values()))
        dump.add_mapping("explanations", self.explanations.dump())
        dump.add_list("points", self.points.copy().list_points())
        dump.add_later("spending", self.spending.copy().dump)
        dump.add_values(**self.losses.dump())
        if self.policy.queues:
            dump.add_later("queue_usage", self.queue_usage.copy().dump)
        dump.add_later("runtimes", self.runtimes.copy().dump, is_kept_empty=False)
        dump.add_later("interruptions", self.interruptions.copy().dump, is_kept_empty=False)
        dump.add_later("nominations", self.nominations.copy().dump, is_kept_empty=False)
        dump.add_later("gangs", self.gangs.copy().dump, is_kept_empty=False)
        dump.add_later("starts", self.starts.copy().dump, is_kept_empty=False)
        dump.add_later("capacity_holds", self.pending.copy().dump_holds, is_kept_empty=False)
        return dump

    def dump(self) -> dict[str, Any]:
        """Dumps everything that `load` needs, as plain JSON values."""
        return self.begin_dump().collect()

    @classmethod
    def load(cls, plain: Mapping[str, Any], healer: JournalSanitizer | None = None) -> Self:
        """Loads the state from a checkpoint; raises ValueError or KeyError for a foreign one."""
        healer = healer or JournalSanitizer()
        if plain.get("format") != _FORMAT:
            raise ValueError(f"checkpoint format {plain.get('format')!r}; this version reads format {_FORMAT}")
        state = cls(policy=healer.read(Policy, plain["policy"]), ended_most=plain["ended_most"])
        state.revision, state.submissions = plain["revision"], plain["submissions"]
        state.next_number = plain["next_number"]
        state.losses = JournalLosses.load(plain)
        state._ended.extend(map(healer.identifier, plain["ended"]))
        state.demand = Demand.load(plain["demand"])
        if "market" in plain:  # absent from older checkpoints
            state.market = PriceMarket.load(plain["market"])
        state.points = MeasuredPoints.load(plain.get("points", ()))
        for record in (NodeRecord.load(row, healer) for row in plain["nodes"]):
            record.partitioned = is_pool_partitioned(state.policy, record.inventory.pool)
            state.nodes[record.inventory.node_name] = record
            record.withheld = state.losses.withholds_starts
            state.losses.change_unknown_runs(record.inventory.node_name, (), record.unknown_runs)
            if not record.is_reported:
                state.doubted.add(record.inventory.node_name)
            state._note_drain(record)
        state._load_workloads(plain, healer)
        state.spending = SpendingState.load(plain.get("spending", {}), state.policy, state.workloads, count_spent_milli)
        past = plain.get("queue_usage", ())
        state.queue_usage = QueueUsageState.load(past, state.policy, state.workloads, state.nodes)
        state.runtimes = RuntimeHistory.load(plain.get("runtimes", {}))
        state.interruptions = InterruptionHistory.load(plain.get("interruptions", {}))
        state.nominations = Nominations.load(plain.get("nominations", ()))
        state.starts = ReplicaStarts.load(plain.get("starts", ()))
        state.pending.load_holds(plain.get("capacity_holds", {}))
        return state

    def _load_workloads(self, plain: Mapping[str, Any], healer: JournalSanitizer) -> None:
        # Submission numbers are only compared, so they may restart at the first workload that is kept.
        first = self.submissions - len(plain["workloads"])
        ended = set(self._ended)
        for number, row in enumerate(plain["workloads"], first + 1):
            workload = healer.read(Workload, row)
            self.workloads[workload.workload_id] = workload
            self.arrays.add(workload)
            if workload.phase.is_ended:
                self._ended_counts[workload.phase] += 1
                if workload.workload_id not in ended:
                    self._kept.add(workload.workload_id)
            else:
                self._numbers[workload.workload_id] = number
                self.dependents.add(workload)
                self.gangs.add(workload)
                if workload.deadline_breach is not None:
                    self.broken_deadlines.add(workload.workload_id)
            if workload.phase is WorkloadPhase.PENDING:
                self.pending.add(workload.workload_id, priority=workload.spec.priority, number=number)
            elif workload.phase is WorkloadPhase.PLACED:
                for placement in workload.placements:
                    record = self._node(placement.node_name)
                    record.allocate_unchecked(make_assignment(workload, placement))
        self.gangs.load(plain.get("gangs", ()), self.workloads, healer)
        self.explanations = ExplanationStore(
            {healer.identifier(key): text for key, text in plain["explanations"].items()}
        )
        for record in self.nodes.values():
            record.update_overcommitted()

    def digest(self, dumped: Mapping[str, Any] | None = None) -> str:
        """Computes a hash of the whole state: equal histories have equal digests. `dumped` is a current dump, if at hand."""
        return digest_of(dumped or self.dump())
