"""Gangs of several parts: whether and where all required parts of a gang start, decided in one step.

`GangStarts` decides on the state as it is and changes nothing; a round applies what it decides, part by part, in the same step.
Owns what makes a submission contradict its gang. Must not know in which order work is tried (core.retry_rounds), nor what
keeps a part from starting whatever the capacity (queueing.job_conditions).

Theory. The required parts are decided one after the other, the one with the most GPUs on a node first, each on the nodes and
quotas as they are once those before it have started. Only if all of them have a place anything starts, and then the other parts
that fit start with them. Nothing is kept for a part of a gang that does not start, so two gangs never wait for each other: of
two that each fit alone, the first in the order starts. If a part lacks room that those before it may have taken, it is decided
first, a few times; so where parts compete for places a gang may wait though some other choice of places would do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eelgrid_controller.core.backfill import BackfillPlanner
from eelgrid_controller.core.capacity_holds import CapacityHolds
from eelgrid_controller.core.start_search import order_parts
from eelgrid_controller.formatting import format_time
from eelgrid_controller.placement.explanations import describe_pending_reason
from eelgrid_controller.placement.placer import NO_NODES, WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.queueing.admission import (
    QueueHold,
    QueueIndex,
    describe_queue_hold,
    format_resource_amount,
)
from eelgrid_controller.queueing.runtime_estimates import estimate_runtime
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.gangs import JobGang
from eelgrid_controller.state.node_allocations import ContradictoryEvent, NodeRecord, make_assignment
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_controller.state.queue_usage import count_request
from eelgrid_controller.state.spending import spending_reason
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import Explanation, Placement, Workload, WorkloadSpec
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# Orders of the required parts that are tried in one decision.
_ORDERS_MOST = 4


@dataclass(frozen=True, slots=True)
class PartStart:
    """Where one part of a gang starts, and what its queue lets start."""

    workload: Workload
    spec: WorkloadSpec
    decision: PlacementDecision


@dataclass(frozen=True, slots=True)
class GangDecision:
    """The parts of a gang that start in this step; if none does, why, and which part lacks what the gang waits for."""

    starts: tuple[PartStart, ...] = ()
    reason: str = ""
    lacking: str = ""
    # Whether it waits for capacity alone, so that a start may be reserved for it.
    waits_for_capacity: bool = False


def check_gang(state: ClusterState, workload: Workload) -> None:
    """Checks that a workload that is submitted fits its gang; raises InvalidArgument, which names the field and the remedy."""
    part, gang = workload.spec.gang, state.gangs.find(workload)
    if part is None or gang is None:
        return
    violation = None
    stated = (
        ("parts", part.parts, gang.part.parts),
        ("parts_least", part.required_parts, gang.part.required_parts),
    )
    for field, mine, theirs in stated:
        if violation is None and mine != theirs:
            remedy = f"give {theirs}, as its other parts do, or another name"
            violation = Violation(f"spec.gang.{field}", f"is {mine}, and gang {part.name} has {theirs}", remedy)
    if violation is None and (not gang.missing or not gang.is_bound(state.workloads)):
        problem = f"is {part.name}, which has its {part.parts} parts: {', '.join(gang.live)}"
        remedy = "choose another name, or wait until all of them have ended"
        violation = Violation("spec.gang", problem, remedy)
    if violation is not None:
        raise InvalidArgument("the workload is no part of that gang", (violation,))
    if gang.missing == 1:
        _check_capacity(state, workload, gang)


def _check_capacity(state: ClusterState, last: Workload, gang: JobGang) -> None:
    """Checks that all nodes together have what the parts ask for that must start together; raises InvalidArgument."""
    parts = [*(state.workloads[key] for key in gang.live), last][: gang.part.required_parts]
    inventories = [record.inventory for record in state.nodes.values()]
    if not inventories:
        return
    totals = {
        "gpu": GPU_MILLI_WHOLE * sum(len(one.gpus) for one in inventories),
        "cpu": sum(one.cpu_milli for one in inventories),
        "memory": sum(one.memory_bytes for one in inventories),
    }
    wanted = [count_request(part.spec) for part in parts]
    for resource, total in totals.items():
        amount = sum(amounts.get(resource, 0) for amounts in wanted)
        if amount > total:
            problem = (
                f"needs {format_resource_amount(resource, amount)} for the parts of gang {gang.part.name} that start "
                f"together, and all nodes together have {format_resource_amount(resource, total)}"
            )
            violation = Violation("spec.gang", problem, "ask for less in its parts, or let fewer start together")
            raise InvalidArgument("no cluster of these nodes could ever hold this gang", (violation,))


class GangStarts:
    """Decides the starts of gangs on one state."""

    def __init__(
        self,
        state: ClusterState,
        placer: WorkloadPlacer,
        queues: QueueIndex,
        backfill: BackfillPlanner,
        holds: CapacityHolds,
    ) -> None:
        self._state, self._placer, self._queues = state, placer, queues
        self._backfill, self._holds = backfill, holds

    def find_bound(self, workload: Workload) -> JobGang | None:
        """Returns the gang with whose other parts a waiting workload starts; None if it starts on its own."""
        return None if workload.spec.gang is None else self._state.gangs.find_bound(workload, self._state.workloads)

    def decide(self, gang: JobGang, now_ns: int) -> GangDecision:
        """Decides which parts of a gang start now, and where: all that are required, or none."""
        required = gang.list_required()
        waiting = next((key for key in required if not self._may_start(key)), None)
        if waiting is not None or gang.missing:
            reason = PendingConstraint.GANG.describe("part", part=waiting or "", gang=gang.part.name)
            return GangDecision(reason=reason, lacking=waiting or required[0])
        order = [part.workload_id for part in order_parts(self._state.workloads[key] for key in required)]
        first: GangDecision | None = None
        for _ in range(_ORDERS_MOST):
            found = self._decide_in_order(order, now_ns)
            first = first or found
            if found.starts:
                return found
            if not found.waits_for_capacity or found.lacking == order[0]:
                break
            # The others may have taken the only places that would do.
            order = [found.lacking, *(key for key in order if key != found.lacking)]
        assert first is not None
        return first

    def _decide_in_order(self, order: Sequence[str], now_ns: int) -> GangDecision:
        """Decides the required parts in this order, and then the others of the gang as they fit."""
        trial = _GangTrial(self._state)
        for key in order:
            problem = self._decide_part(key, trial, now_ns)
            if problem is not None:
                return problem
        gang = self._state.gangs.find(self._state.workloads[order[0]])
        for key in gang.live if gang is not None else ():
            if key not in order and self._may_start(key):
                self._decide_part(key, trial, now_ns)
        return GangDecision(tuple(trial.starts))

    def explain(self, workload: Workload, gang: JobGang, now_ns: int) -> Explanation:
        """Explains a part that may start with its gang and does not: which part lacks what."""
        found, name = self.decide(gang, now_ns), gang.part.name
        runtime = estimate_runtime(workload, self._state)
        if found.starts:
            remedy = f"There is room for gang {name} by now; it is placed when waiting work is next tried."
            return Explanation(workload=workload, remedy=remedy, runtime=runtime)
        constraint, _, sentence = found.reason.partition(": ")
        which = "this" if found.lacking == workload.workload_id else found.lacking
        remedy = (
            f"It starts with the other parts of gang {name}, of which {gang.part.required_parts} must start together, and "
            f"{which} waits: {sentence}. To help: wait for work to end, or eelctl explain {found.lacking}."
        )
        promise = self._state.workloads[gang.list_required()[0]].promise
        if promise is not None:
            remedy += f" The gang is promised to start by {format_time(promise.start_ns)}."
        return Explanation(workload=workload, remedy=remedy, constraint=constraint, runtime=runtime)

    def _may_start(self, workload_id: str) -> bool:
        """Returns whether a part waits, and nothing but quota and capacity keeps it from starting."""
        state = self._state
        if workload_id not in state.pending or state.pending.is_parked(workload_id):
            return False
        return state.nominations.find_by_victim(workload_id) is None and workload_id not in state.nominations

    def _decide_part(self, workload_id: str, trial: "_GangTrial", now_ns: int) -> GangDecision | None:
        """Decides where a part goes once those of the trial have started, and adds it to them; returns why it may not."""
        workload = self._state.workloads[workload_id]
        spec = workload.spec
        hold = self._state.spending.blocking_limit(spec)
        if hold is not None:
            return GangDecision(reason=spending_reason(hold), lacking=workload_id)
        if self._queues.is_active:
            admitted = self._queues.admit_without(
                spec, self._list_models, workload_id=workload_id, starting=trial.list_starting()
            )
            if isinstance(admitted, QueueHold):
                return GangDecision(reason=describe_queue_hold(admitted), lacking=workload_id)
            spec = admitted
        closed = self._backfill.list_closed_nodes(workload, now_ns)
        decision = self._holds.decide(
            workload, spec, now_ns, closed=closed or NO_NODES, is_round=True, altered=trial.records
        )
        if decision.placements and not trial.add(PartStart(workload, spec, decision)):
            reason = PendingConstraint.UNAVAILABLE.describe("refused")
            return GangDecision(reason=reason, lacking=workload_id)
        if decision.placements:
            return None
        reason = describe_pending_reason(spec.request, decision)
        # Watts are not what the ends of work are known to free.
        return GangDecision(
            reason=reason, lacking=workload_id, waits_for_capacity=decision.lack is None and decision.hold is None
        )

    def _list_models(self) -> Iterable[str]:
        return self._placer.snapshot().models


class _GangTrial:
    """The parts of a gang that would start, and the nodes as they are then."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.starts: list[PartStart] = []
        # What is nominated is not free for a gang either.
        self.records: dict[str, NodeRecord] = {}
        if len(state.nominations):
            self.records = state.nominations.hold_on(state.nodes, state.workloads)

    def list_starting(self) -> list[tuple[str, tuple[Placement, ...]]]:
        """Lists the parts with their places."""
        return [(one.workload.workload_id, one.decision.placements) for one in self.starts]

    def add(self, start: PartStart) -> bool:
        """Adds a part that starts; returns whether its nodes take it."""
        changed: dict[str, NodeRecord] = {}
        try:
            for place in start.decision.placements:
                name = place.node_name
                if name not in changed:
                    changed[name] = (self.records.get(name) or self._state.nodes[name]).copy()
                changed[name].allocate(make_assignment(start.workload, place))
        except ContradictoryEvent:
            return False
        self.records |= changed
        self.starts.append(start)
        return True
