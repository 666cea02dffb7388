"""Backfill as decisions and events: reserved starts of pending work, what may start beside them, and what is promised.

`BackfillPlanner` holds the reserved starts of the round that is under way, and of the last one, which hold between rounds. Must
not know how a start is searched (start_search.py), nor in which order work is tried.

Theory. The first workload of a round that waits for capacity gets a reserved start (easy), or each up to a bound
(conservative), and each whose deadline was promised at its submission. Work behind it that would delay it by its expected end is
placed on nodes without reserved places; else, for easy backfill, the reserved start is searched anew beside it; else it waits.

The start of easy backfill is made anew in each round. The others are kept with their places, which stand in the state: a round
begins with those that are still free, the highest priority and then the earliest start first, and only searches an earlier start
for each. So a kept start becomes later only if its places are not free then: for a node that is lost or closed, for work that
runs longer than expected, or for work of higher priority. A workload that may start, and finds other places only where it would
delay others, goes to its own. What was promised changes only by an event: when it becomes known, when it becomes earlier, and
when it becomes later, with the cause. A change of up to the tolerance of an overrun is none.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from eelgrid_controller.core.deadlines import (
    DeadlineIndex,
    check_deadline,
    check_end,
    get_earliest_start_ns,
    meets_deadline,
)
from eelgrid_controller.core.promise_moves import find_delay_cause, plan_moves
from eelgrid_controller.core.reserved_nodes import choose_reserved_nodes, renew_reserved_nodes
from eelgrid_controller.core.start_search import StartSearch
from eelgrid_controller.placement.placer import NO_NODES, NO_RECORDS, WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.queueing.admission import QueueIndex
from eelgrid_controller.queueing.backfill import (
    EstimatedEnds,
    ReservedStart,
    count_reserved_starts,
    find_delayed_start,
    group_assignments,
    is_start_free,
    sum_gpu_milli,
)
from eelgrid_controller.queueing.elastic_shares import list_enough
from eelgrid_controller.queueing.reservations import (
    list_boundaries,
    list_closed_nodes,
    list_closing_reservations,
)
from eelgrid_controller.queueing.runtime_estimates import (
    OVERRUN_TOLERANCE_NS,
    STATED_SOURCES,
    compute_end_ns,
    estimate_runtime,
)
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.demand import OpportunityPrices
from eelgrid_controller.state.events import (
    DevicesCorrected,
    Event,
    GpuLost,
    GpuReturned,
    MovedStart,
    NodeCordoned,
    NodeJoined,
    NodeLost,
    NodeOccupied,
    NodesRemoved,
    NodeUncordoned,
    PartitionsPlanned,
    PolicyChanged,
    PromisesMoved,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadEvicted,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadPromised,
    WorkloadRetried,
    WorkloadScaled,
)
from eelgrid_controller.state.measurement_events import RuntimeExpected, WorkloadShareChanged
from eelgrid_controller.state.node_allocations import ContradictoryEvent, NodeRecord
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_controller.state.runtime_history import uses_presumed_runtimes
from eelgrid_controller.state.takeover_events import NodeHeard, NodeReconciled, StartsResumed
from eelgrid_protos.messages import (
    PROMISE_ENDS_MOST,
    BackfillMode,
    Policy,
    RuntimeSource,
    StartPromise,
    Workload,
    WorkloadSpec,
)

BACKFILL_REASON = PendingConstraint.BACKFILL.describe()
# How often in a round a reserved start may be searched anew beside work that would delay it.
_REPLANS_MOST = 64
# Kept starts that are searched anew at the beginning or end of a round, since their places are not free or they are late.
_RENEWED_MOST = 16
# Times and searches for what is asked of at its submission.
_ADMISSION_TIMES_MOST, _ADMISSION_SEARCHES_MOST = 256, 16
# Jobs that give back what they do not need, at one admission.
_RELEASES_MOST = 16
# Events by which nodes may have more room than was expected.
_WITH_CAPACITY = (
    NodeJoined,
    RuntimeExpected,
    NodeHeard,
    NodeOccupied,
    NodeReconciled,
    NodeUncordoned,
    GpuReturned,
    DevicesCorrected,
    PartitionsPlanned,
    PolicyChanged,
    StartsResumed,
    WorkloadMoved,
    WorkloadScaled,
)


def describe_reserved(name: str) -> str:
    """Returns the reason of work that a reservation of nodes keeps waiting."""
    return PendingConstraint.RESERVATION.describe("held", reservation=name)


class BackfillPlanner:
    """The reserved starts of one state's pending work."""

    def __init__(self, state: ClusterState, placer: WorkloadPlacer, queues: QueueIndex) -> None:
        self._state, self._placer, self._queues = state, placer, queues
        self.ends = EstimatedEnds(state)
        self._searcher = StartSearch(state, placer, queues, self.ends)
        self.deadlines = DeadlineIndex(state)
        # Of the round under way, or of the last one.
        self._reserved: list[ReservedStart] = []
        # Of the round before: they hold between rounds until the new one has made others, and tell why a start moved.
        self._before: dict[str, ReservedStart] = {}
        self._in_round = False
        self._is_full = False
        self._is_known = True
        # A kept start may be none any more: the next round looks.
        self._is_stale = False
        self._displaced: set[str] = set()  # by another start in this round, and not tried since
        # Something became free that was not expected to, so that kept starts may become earlier: before this round, and since.
        self._may_improve, self._has_freed = True, True
        self._replans = 0
        self._promised = {key for key in state.pending if state.workloads[key].promise is not None}
        # Reservations of a number of GPUs may have lost nodes; a new core cannot know.
        self._has_lost_nodes = any(one.gpus for one in state.policy.reservations)
        # What running jobs could give back for work that would be refused.
        self.list_releases: Callable[[int], list[WorkloadScaled]] = lambda _: []
        # When a round last began: what reservations closed by time before it has been tried.
        self._begun_ns = 0

    def refresh(self, event: Event) -> None:
        """Follows an event that was applied."""
        self._has_freed |= self._frees_early(event)
        self._has_lost_nodes |= self._may_renew_nodes(event)
        self.ends.refresh(event)
        self.deadlines.refresh(event)
        match event:
            case WorkloadPromised():
                (self._promised.discard if event.promise is None else self._promised.add)(event.workload_id)
                if self._find_own(event.workload_id) is None:
                    kept = self._make_kept(self._state.workloads[event.workload_id], event.time_ns)
                    self._reserved += [] if kept is None else [kept]
            case PromisesMoved():
                moved = [self._make_kept(self._state.workloads[one.workload_id], event.time_ns) for one in event.starts]
                new = {one.workload_id: one for one in moved if one is not None}
                self._reserved = [new.pop(one.workload_id, one) for one in self._reserved]
            case RuntimeExpected():
                # Starts wait for other ends than they did.
                self._is_stale |= bool(self._reserved)
            case NodeLost() | GpuLost() | NodeCordoned():
                self._is_stale |= any(event.node_name in one.places for one in self._reserved if one.is_kept)
            case NodesRemoved():
                names = set(event.node_names)
                self._is_stale |= any(names & one.places.keys() for one in self._reserved if one.is_kept)
            case _:
                return

    def _frees_early(self, event: Event) -> bool:
        """Returns whether an event may let a kept start become earlier: it frees what was expected to be held for longer."""
        match event:
            case WorkloadCancelled() | WorkloadCompleted() | WorkloadEvicted() | WorkloadRetried():
                expected_ns = self.ends.get_end_ns(event.workload_id, event.time_ns)
                return expected_ns > event.time_ns + OVERRUN_TOLERANCE_NS
            case WorkloadPlaced():
                own = self._find_own(event.workload_id)
                return own is not None and own.start_ns > event.time_ns + OVERRUN_TOLERANCE_NS
            case WorkloadPromised():
                return event.promise is None
            case _:
                return isinstance(event, _WITH_CAPACITY)

    def is_round_due(self, now_ns: int) -> bool:
        """Returns whether pending work must be tried because time has passed, or a promise may be broken.

        So it is when a reservation begins or ends, when a promise is due, and when a deadline has passed.
        """
        if self._in_round:
            return False
        if self.deadlines.is_due(now_ns):
            return True
        if not len(self._state.pending):
            return False
        boundaries = list_boundaries(self._state.policy.reservations)
        if self._is_stale or bisect_right(boundaries, now_ns) > bisect_right(boundaries, self._begun_ns):
            return True
        late_ns = (one.start_ns + OVERRUN_TOLERANCE_NS for one in self._reserved)
        if any(self._begun_ns < time_ns < now_ns for time_ns in late_ns):
            return True
        return any(one.is_kept and self._begun_ns < one.start_ns <= now_ns for one in self._reserved)

    def begin_round(self, now_ns: int) -> list[Event]:
        """Begins a round over all pending work: starts are reserved anew, or kept; returns events, not yet applied."""
        self._before = {one.workload_id: one for one in self._reserved}
        self._replans, self._begun_ns = 0, now_ns
        self._displaced.clear()
        self._in_round, self._is_stale = True, False
        self._may_improve, self._has_freed = self._has_freed, False
        # After a start agents come back one by one: until all have, it is not known what fits, and no promise changes.
        self._is_known = not self._state.awaits_agents
        kept = self._list_kept(now_ns)
        if not self._is_known:
            self._reserved = list({one.workload_id: one for one in (*kept, *self._before.values())}.values())
            self._is_full = True
            return []
        self._reserved = []
        bears = self._placer.describe_unbearable
        for one in kept:
            workload = self._state.workloads[one.workload_id]
            closed = list_closed_nodes(self._state, workload, one.start_ns)
            if closed.isdisjoint(one.places) and is_start_free(
                self._state.nodes, self.ends, self._reserved, one, now_ns=now_ns, describe_unbearable=bears
            ):
                self._reserved.append(one)
        self._is_full = self._has_all_starts()
        return self._renew_deadlines(now_ns)

    def end_round(self, now_ns: int) -> list[Event]:
        """Ends a round; returns events, not yet applied: which starts are promised no more, and which deadlines are broken."""
        events = [*self._renew_late(now_ns), *self._renew_displaced(now_ns)] if self._is_known else []
        self._in_round = False
        if not self._is_known:
            return []
        kept = {one.workload_id for one in self._reserved}
        gone = sorted(self._promised - kept)
        self._promised &= kept
        events += [WorkloadPromised(time_ns=now_ns, workload_id=key) for key in gone if key in self._state.pending]
        reserved = {one.workload_id: one for one in self._reserved}
        return [*events, *self.deadlines.list_breaches(reserved, self.ends, now_ns, self._find_cause)]

    def choose_reserved_nodes(self, policy: Policy, now_ns: int) -> Policy:
        """Returns a policy with the nodes of reservations that state a number of GPUs; raises InvalidArgument."""
        kept = [one for one in self._list_in_force(is_round=False) if one.is_kept]
        return choose_reserved_nodes(self._state, self._placer, self.ends, kept, policy, now_ns=now_ns)

    def renew_reserved_nodes(self, now_ns: int) -> tuple[PolicyChanged, ...]:
        """Returns the event by which reservations of a number of GPUs get other nodes for those that were lost or closed."""
        if not self._has_lost_nodes or self._state.awaits_agents:
            return ()
        self._has_lost_nodes = False
        kept = [one for one in self._list_in_force(is_round=False) if one.is_kept]
        policy = renew_reserved_nodes(self._state, self.ends, kept, now_ns=now_ns)
        if policy is None:
            return ()
        return (PolicyChanged(time_ns=now_ns, policy=replace(policy, revision=policy.revision + 1)),)

    def _may_renew_nodes(self, event: Event) -> bool:
        """Returns whether a reservation of a number of GPUs may have lost a node by an event, or find what it lacks."""
        reservations = [one for one in self._state.policy.reservations if one.gpus]
        if not reservations:
            return False
        if isinstance(event, NodeLost | NodeCordoned | NodesRemoved | GpuLost):
            return True
        return any(one.lacking_gpus for one in reservations) and self._frees_early(event)

    def _has_all_starts(self) -> bool:
        """Returns whether no more starts are reserved than those of deadlines."""
        most, workloads = count_reserved_starts(self._state.policy), self._state.workloads
        return most <= sum(not workloads[one.workload_id].spec.has_promised_deadline for one in self._reserved)

    def _find_own(self, workload_id: str) -> ReservedStart | None:
        return next((one for one in self._reserved if one.workload_id == workload_id), None)

    def _is_kept(self, workload: Workload) -> bool:
        """Returns whether a reserved start is kept over rounds, with its places."""
        if self._state.gangs.find_bound(workload, self._state.workloads) is not None:
            # A promise has the places of one workload.
            return False
        is_conservative = self._state.policy.backfill is BackfillMode.CONSERVATIVE
        return workload.spec.has_promised_deadline or is_conservative

    def _make_kept(self, workload: Workload, now_ns: int) -> ReservedStart | None:
        """Returns the kept start of a pending workload, as of now; None if it has none."""
        promise = workload.promise
        if promise is None or not promise.placements or not self._is_kept(workload) or workload.held_by:
            return None
        start_ns = max(promise.start_ns, now_ns)
        places = group_assignments(workload, promise.placements)
        return ReservedStart(
            workload_id=workload.workload_id,
            start_ns=start_ns,
            end_ns=compute_end_ns(start_ns, estimate_runtime(workload, self._state)),
            places=places,
            gpu_milli=sum_gpu_milli(places),
            waits_for=promise.waits_for,
            priority=workload.spec.priority,
            placements=promise.placements,
            is_kept=True,
        )

    def _list_kept(self, now_ns: int) -> list[ReservedStart]:
        """Returns the kept starts, the highest priority and then the earliest promise first."""
        waiting = (self._state.workloads[key] for key in self._promised if key in self._state.pending)
        found = [(one.promise, kept) for one in waiting if (kept := self._make_kept(one, now_ns)) is not None]
        found.sort(key=lambda pair: (-pair[1].priority, pair[0].start_ns if pair[0] else 0, pair[1].workload_id))
        return [kept for _, kept in found]

    def _renew_deadlines(self, now_ns: int) -> list[Event]:
        """Searches a start for work with a promised deadline that has none any more, the earliest deadline first."""
        events: list[Event] = []
        reserved = {one.workload_id for one in self._reserved}
        missing = [one for one in self.deadlines.list_pending() if one.workload_id not in reserved and not one.held_by]
        for workload in missing[:_RENEWED_MOST]:
            events += self._reserve_share(workload, now_ns) or self.reserve_start(workload, now_ns)
        return events

    def _reserve_share(self, workload: Workload, now_ns: int) -> list[Event]:
        """Reserves a start of an elastic job with the fewest replicas with which it still ends in time; none if none do."""
        share = workload.share
        if share is None:
            return []
        others = [one for one in self._reserved if one.workload_id in self._state.pending]
        binding = [one for one in others if one.priority >= workload.spec.priority]
        begin_ns = get_earliest_start_ns(workload)
        for count in list_enough(workload, max(now_ns, begin_ns)):
            resized = replace(share, replicas=count)
            one = replace(workload, share=resized, spec=replace(workload.spec, replicas=count), promise=None)
            found = self._searcher.find_start(one, binding, now_ns, not_before_ns=begin_ns)
            if found is None or not meets_deadline(workload, found):
                continue
            if count == workload.spec.replicas:
                return []
            found = replace(found, is_kept=True)
            self._reserved = [*others, found]
            if len(binding) < len(others):
                self._drop_displaced(found, now_ns)
            changed = WorkloadShareChanged(time_ns=now_ns, workload_id=workload.workload_id, share=resized)
            promise = self._make_promise(found, cause=self._find_cause(workload, now_ns))
            return [changed, WorkloadPromised(time_ns=now_ns, workload_id=workload.workload_id, promise=promise)]
        return []

    def _renew_displaced(self, now_ns: int) -> list[Event]:
        """Searches another start for work whose turn in the round was before it was displaced, the highest priority first."""
        events: list[Event] = []
        while len(events) < _RENEWED_MOST and (waiting := self._displaced.intersection(self._state.pending)):
            found = (self._state.workloads[key] for key in waiting)
            self._is_full = self._has_all_starts()
            events += self.reserve_start(min(found, key=lambda one: (-one.spec.priority, one.workload_id)), now_ns)
        return events

    def _renew_late(self, now_ns: int) -> list[Event]:
        """Searches another start for work that was promised one by now and has not started, such as for want of quota."""
        events: list[Event] = []
        for one in [found for found in self._reserved if found.is_kept and found.workload_id in self._state.pending]:
            workload = self._state.workloads[one.workload_id]
            promise = workload.promise
            is_late = promise is not None and promise.start_ns + OVERRUN_TOLERANCE_NS < now_ns
            if is_late and len(events) < _RENEWED_MOST and workload.workload_id not in self._state.nominations:
                # A start that was renewed before may have displaced it, or moved it.
                self._reserved = [other for other in self._reserved if other.workload_id != one.workload_id]
                events += self.reserve_start(workload, now_ns)
        return events

    def reserves_for(self, workload: Workload) -> bool:
        """Returns whether a workload that waits for capacity gets a reserved start in this round, or an earlier one."""
        return self.reserves_more or (self._in_round and self._is_known and self.holds_start(workload))

    @property
    def reserves_more(self) -> bool:
        """Whether work that no start is kept for gets a reserved start in this round."""
        return self._in_round and self._is_known and not self._is_full

    def holds_start(self, workload: Workload) -> bool:
        """Returns whether a start is kept for a workload, so that others of its kind may wait where it does not."""
        is_kept = workload.promise is not None and bool(workload.promise.placements)
        return is_kept or workload.spec.has_promised_deadline

    def list_closed_nodes(self, workload: Workload, now_ns: int) -> frozenset[str]:
        """Returns the nodes on which reservations let a workload not start now."""
        return list_closed_nodes(self._state, workload, now_ns)

    def get_term(self, kind: Hashable, workload: Workload) -> Hashable:
        """Returns a kind of request with what makes equal requests differ where they would delay others: the run time."""
        estimate = estimate_runtime(workload, self._state)
        return kind, None if estimate is None else estimate.expected_s

    def may_skip_equals(self, workload: Workload) -> bool:
        """Returns whether work of the same request, user and stated run time has the same reason to wait."""
        if self.reserves_for(workload):
            return False
        estimate = estimate_runtime(workload, self._state)
        is_stated = estimate is not None and estimate.source in STATED_SOURCES
        return is_stated or not self._reserved or not uses_presumed_runtimes(self._state.policy)

    def decide(
        self,
        workload: Workload,
        spec: WorkloadSpec,
        now_ns: int,
        quotes: OpportunityPrices | None = None,
        *,
        closed: frozenset[str] = NO_NODES,
        is_round: bool = False,
        altered: Mapping[str, NodeRecord] = NO_RECORDS,
    ) -> PlacementDecision:
        """Decides where a pending workload starts now, on none of the closed nodes, and so that it delays no reserved start.

        `spec` is what its queue lets start. Within a round only those reserved starts count that were made before. `altered` are
        records that nodes have once what starts with it, or is nominated, has.
        """
        key = workload.workload_id

        def place(closed: frozenset[str]) -> PlacementDecision:
            return self._placer.decide_placement(
                spec, quotes, workload_id=key, closed=closed, altered=altered, is_start=True
            )

        decision = place(closed)
        if not decision.placements:
            if closed and place(NO_NODES).placements:
                name = next(iter(list_closing_reservations(self._state, workload, now_ns))).name
                return replace(decision, withheld=describe_reserved(name))
            return decision
        gang = self._state.gangs.find_bound(workload, self._state.workloads)
        mine = (key,) if gang is None else gang.live
        reserved = [one for one in self._list_in_force(is_round=is_round) if one.workload_id not in mine]
        if not reserved:
            return decision
        until_ns = compute_end_ns(now_ns, estimate_runtime(workload, self._state))
        if not self._delays(workload, decision, reserved, until_ns, now_ns, altered=altered):
            return decision
        names = frozenset(name for one in reserved if one.start_ns < until_ns for name in one.places)
        elsewhere = place(closed | names)
        if elsewhere.placements:
            return elsewhere
        if not altered and self._goes_before(workload, decision, reserved, until_ns, now_ns):
            return decision
        may_replan = len(reserved) == 1 and not reserved[0].is_kept and not altered
        if may_replan and self._replan(reserved[0], workload, decision, now_ns):
            return decision
        own = self._find_own(key)
        kept = (
            None if own is None else self._decide_on_own(replace(workload, spec=spec), own, reserved, until_ns, now_ns)
        )
        if kept is not None:
            return kept
        return PlacementDecision(
            placements=(), explanation=decision.explanation, room=decision.room, withheld=BACKFILL_REASON
        )

    def _goes_before(
        self,
        workload: Workload,
        decision: PlacementDecision,
        reserved: list[ReservedStart],
        until_ns: int,
        now_ns: int,
    ) -> bool:
        """Returns whether a workload delays only kept starts of lower priority; these are searched anew in the next round."""
        binding = [one for one in reserved if not one.is_kept or one.priority >= workload.spec.priority]
        if len(binding) == len(reserved) or self._delays(workload, decision, binding, until_ns, now_ns):
            return False
        self._is_stale = True
        return True

    def _decide_on_own(
        self, workload: Workload, own: ReservedStart, reserved: list[ReservedStart], until_ns: int, now_ns: int
    ) -> PlacementDecision | None:
        """Returns the start of a workload, as its queue admits it, on the places kept for it; None if it may not start there now."""
        decision = PlacementDecision(placements=own.placements, explanation=(), room=workload.spec.replicas)
        if not own.is_kept or self._delays(workload, decision, reserved, until_ns, now_ns):
            return None
        if not list_closed_nodes(self._state, workload, now_ns).isdisjoint(own.places):
            return None
        if not self._placer.is_open_to(workload.spec, workload.workload_id, own.placements):
            return None
        if self._placer.allowance.has_budgets and self._placer.allowance.list_exceeded_budgets(own.placements):
            return None
        try:
            for name, assignments in own.places.items():
                record = self._state.nodes[name].copy()
                for assignment in assignments:
                    record.allocate(assignment)
                if self._placer.describe_unbearable(record, assignments):
                    return None
        except ContradictoryEvent:
            return None
        return decision

    def _list_in_force(self, *, is_round: bool) -> list[ReservedStart]:
        """Returns the reserved starts of work that still waits; until a round has made others, those before it hold."""
        found = self._reserved
        if self._in_round and not is_round and not self._is_full:
            mine = {one.workload_id for one in found}
            found = [*found, *(one for one in self._before.values() if not one.is_kept and one.workload_id not in mine)]
        return [one for one in found if one.workload_id in self._state.pending]

    def _list_binding(self, workload: Workload) -> list[ReservedStart]:
        """Returns the reserved starts that go before a workload that is being submitted."""
        return [one for one in self._list_in_force(is_round=False) if one.priority >= workload.spec.priority]

    def _delays(
        self,
        workload: Workload,
        decision: PlacementDecision,
        reserved: list[ReservedStart],
        until_ns: int,
        now_ns: int,
        *,
        altered: Mapping[str, NodeRecord] = NO_RECORDS,
    ) -> bool:
        places = group_assignments(workload, decision.placements)
        # What starts with it counts as if it never ended.
        nodes = (
            {name: altered.get(name) or self._state.nodes[name] for name in places} if altered else self._state.nodes
        )
        bears = partial(self._placer.describe_unbearable, load=workload.spec.shared_load)
        found = find_delayed_start(
            nodes, self.ends, reserved, places, until_ns=until_ns, now_ns=now_ns, describe_unbearable=bears
        )
        return found is not None

    def delays_first(
        self, workload: Workload, decision: PlacementDecision, altered: Mapping[str, NodeRecord], now_ns: int
    ) -> bool:
        """Returns whether work for which others make room would delay a reserved start of its queue that goes before it."""
        queue, least = self._queues.find_leaf(workload.spec), workload.spec.priority
        first = [
            one
            for one in self._list_in_force(is_round=self._in_round)
            if (one.priority, one.is_kept) > (least, False) and one.workload_id != workload.workload_id
            if self._queues.find_leaf(self._state.workloads[one.workload_id].spec) == queue
        ]
        if not first:
            return False
        until_ns = compute_end_ns(now_ns, estimate_runtime(workload, self._state))
        return self._delays(workload, decision, first, until_ns, now_ns, altered=altered)

    def _replan(self, reserved: ReservedStart, workload: Workload, decision: PlacementDecision, now_ns: int) -> bool:
        """Searches other places at the same time for a reserved start, beside work that would delay it where it is."""
        first = self._state.workloads[reserved.workload_id]
        is_gang = self._state.gangs.find_bound(first, self._state.workloads) is not None
        if is_gang or self._replans >= _REPLANS_MOST:
            return False
        self._replans += 1
        records: dict[str, NodeRecord] = {}
        for end_ns, key in self.ends.list_ends(now_ns):
            if end_ns > reserved.start_ns:
                break
            self._searcher.release(records, key)
        for name, assignments in group_assignments(workload, decision.placements).items():
            record = records.get(name) or self._state.nodes[name].copy()
            records[name] = record
            for assignment in assignments:
                record.allocate_unchecked(assignment)
        found = self._searcher.search_places(records, first, reserved.start_ns, coming=workload)
        if not found.placements:
            return False
        new = replace(reserved, places=group_assignments(first, found.placements), placements=found.placements)
        self._reserved = [new if one is reserved else one for one in self._reserved]
        if self._before.get(first.workload_id) is reserved:
            self._before[first.workload_id] = new
        return True

    def reserve_start(self, workload: Workload, now_ns: int) -> list[Event]:
        """Reserves the start of a workload that waits for capacity; returns the event that promises it, if that is news.

        A start that is kept for it only becomes earlier. That of a gang is reserved for its first part.
        """
        gang = self._state.gangs.find_bound(workload, self._state.workloads)
        own = self._find_own(workload.workload_id)
        self._displaced.discard(workload.workload_id)
        if own is not None and not (self._may_improve or self._has_freed):
            return []
        others = [one for one in self._reserved if one is not own and one.workload_id in self._state.pending]
        binding = [one for one in others if one.priority >= workload.spec.priority]
        if own is None and not workload.spec.has_promised_deadline:
            if self._is_full:
                return []
            # Of easy backfill the first decides, whether an end is expected that lets it start or not.
            self._is_full = count_reserved_starts(self._state.policy) == 1
        before_ns = None if own is None else own.start_ns - OVERRUN_TOLERANCE_NS
        if gang is not None:
            # Whole, in the name of this part.
            others = [one for one in others if one.workload_id not in gang.live]
            binding = [one for one in binding if one.workload_id not in gang.live]
            parts = [self._state.workloads[key] for key in gang.list_required()]
            found = self._searcher.find_gang_start(parts, binding, now_ns)
        else:
            found = self._searcher.find_start(
                workload, binding, now_ns, not_before_ns=get_earliest_start_ns(workload), before_ns=before_ns
            )
        if found is None:
            # What is promised for a deadline is withdrawn at the end of the round, with the cause.
            is_left = own is not None or workload.spec.has_promised_deadline
            return [] if is_left else self._withdraw(workload, now_ns)
        found = replace(found, is_kept=self._is_kept(workload))
        self._reserved = [*others, found]
        self._has_freed |= own is not None
        if len(binding) < len(others):
            self._drop_displaced(found, now_ns)
        self._is_full |= self._has_all_starts()
        return self._promise(workload, found, now_ns)

    def _drop_displaced(self, new: ReservedStart, now_ns: int) -> None:
        """Drops the starts of lower priority that a new one leaves no room; they are searched anew in their turn, or by the end."""
        lower = [one for one in self._reserved if one.priority < new.priority]
        left = [one for one in self._reserved if one.priority >= new.priority]
        bears = self._placer.describe_unbearable
        for one in lower:
            if is_start_free(self._state.nodes, self.ends, left, one, now_ns=now_ns, describe_unbearable=bears):
                left.append(one)
        dropped = {one.workload_id for one in self._reserved}.difference(one.workload_id for one in left)
        self._displaced |= dropped
        self._is_stale |= bool(dropped) and not self._in_round
        self._reserved = left

    def reserve_first(self, workload: Workload, now_ns: int) -> list[Event]:
        """Reserves the start of a workload that was just submitted, waits for capacity, and goes before all others."""
        if self._in_round or self._state.pending.count_before(workload.workload_id):
            return []
        if workload.spec.has_promised_deadline:
            return []
        events: list[Event] = []
        if self._state.policy.backfill is not BackfillMode.CONSERVATIVE:
            for one in self._list_in_force(is_round=False):
                events += [] if one.is_kept else self._withdraw(self._state.workloads[one.workload_id], now_ns)
            self._is_stale |= bool(events)  # where it would have delayed these it may start now
            self._reserved = [one for one in self._reserved if one.is_kept]
            self._before = {}
        self._is_full = self._has_all_starts()
        return events + self.reserve_start(workload, now_ns)

    def admit_deadline(
        self, workload: Workload, decision: PlacementDecision, now_ns: int
    ) -> tuple[WorkloadScaled | PromisesMoved | WorkloadPromised, ...]:
        """Decides whether the deadline of work that is being submitted can be promised; returns the promise of its start, last.

        Before it, what grown jobs give back, or how other promised starts move. Nothing is promised to work that starts now, and to work without such a deadline.
        Raises InvalidArgument, which names the field, the earliest possible end and the remedy, and ResourceExhausted.
        """
        spec = workload.spec
        estimate = estimate_runtime(workload, self._state)
        if spec.deadline is not None:
            check_deadline(workload, estimate, len(self.deadlines.list_pending()), now_ns)
        if not spec.has_promised_deadline:
            return ()
        if decision.placements:
            check_end(workload, compute_end_ns(now_ns, estimate))
            return ()
        found, freed = self.find_promised_start(workload, decision, now_ns)
        if decision.hold is None and not meets_deadline(workload, found):
            moved = self._move_promises(workload, decision, now_ns)
            if moved is not None:
                return moved
        check_end(workload, None if found is None else found.end_ns)
        assert found is not None
        promise = self.make_kept_promise(found)
        return (*freed, WorkloadPromised(time_ns=now_ns, workload_id=workload.workload_id, promise=promise))

    def _move_promises(
        self, workload: Workload, decision: PlacementDecision, now_ns: int
    ) -> tuple[PromisesMoved | WorkloadPromised, ...] | None:
        """Returns the events by which other promised starts make room for work that would be refused; None if they cannot."""
        may_start = not decision.withheld or decision.withheld == BACKFILL_REASON

        def search(one: Workload, others: Sequence[ReservedStart]) -> ReservedStart | None:
            return self._searcher.find_start(
                one,
                others,
                now_ns,
                not_before_ns=get_earliest_start_ns(one),
                is_from_now=may_start,
                searches_most=_ADMISSION_SEARCHES_MOST,
            )

        planned = plan_moves(self._state, workload, self._list_binding(workload), search)
        if planned is None:
            return None
        own, others = planned
        key = workload.workload_id
        starts = tuple(self._move_start(one, key) for one in others)
        promised = WorkloadPromised(time_ns=now_ns, workload_id=key, promise=self.make_kept_promise(own))
        return (*((PromisesMoved(time_ns=now_ns, starts=starts),) if starts else ()), promised)

    def _move_start(self, found: ReservedStart, for_id: str) -> MovedStart:
        """Returns what is promised to work whose start moves for another's deadline; one that is later says why."""
        before = self._state.workloads[found.workload_id].promise
        is_later = before is not None and found.start_ns > before.start_ns + OVERRUN_TOLERANCE_NS
        cause = f"admission: moved for {for_id}, and still ends by its deadline" if is_later else ""
        promise = self._make_promise(replace(found, is_kept=True), cause=cause)
        return MovedStart(workload_id=found.workload_id, promise=promise)

    def find_promised_start(
        self, workload: Workload, decision: PlacementDecision, now_ns: int
    ) -> tuple[ReservedStart | None, tuple[WorkloadScaled, ...]]:
        """Returns the earliest start of work that is being submitted, and what grown jobs give back for it.

        They give nothing back where it ends by its deadline anyway. None if no start is known.
        """
        found = None if decision.hold is not None else self.search_admission(workload, now_ns)
        if decision.hold is not None or meets_deadline(workload, found):
            return found, ()
        is_waiting = bool(decision.withheld) or decision.queue_hold is not None
        freed = () if is_waiting else tuple(self.list_releases(now_ns)[:_RELEASES_MOST])
        then = self.search_admission(workload, now_ns, freed=freed) if freed else None
        if not meets_deadline(workload, then):
            return found, ()
        for one in freed:
            # What is not needed stays.
            fewer = tuple(other for other in freed if other is not one)
            without = self.search_admission(workload, now_ns, freed=fewer)
            if meets_deadline(workload, without):
                then, freed = without, fewer
        return then, freed

    def search_admission(
        self,
        workload: Workload,
        now_ns: int,
        *,
        freed: tuple[WorkloadScaled, ...] = (),
        beside: Sequence[ReservedStart] = (),
        not_before_ns: int = 0,
        is_from_now: bool = False,
    ) -> ReservedStart | None:
        """Returns the earliest start of work that is being submitted beside all that go before it, and others; None if unknown."""
        return self._searcher.find_start(
            workload,
            [*self._list_binding(workload), *beside],
            now_ns,
            not_before_ns=max(not_before_ns, get_earliest_start_ns(workload)),
            freed=freed,
            is_from_now=is_from_now or bool(freed),
            times_most=_ADMISSION_TIMES_MOST,
            searches_most=_ADMISSION_SEARCHES_MOST,
        )

    def make_kept_promise(self, found: ReservedStart) -> StartPromise:
        """Returns what is promised to work whose start was searched at its submission."""
        return self._make_promise(replace(found, is_kept=True), cause="")

    def list_reserved_nodes(self) -> frozenset[str]:
        """Returns the nodes on which starts are reserved."""
        return frozenset(name for one in self._list_in_force(is_round=False) for name in one.places)

    def _promise(self, workload: Workload, found: ReservedStart, now_ns: int) -> list[Event]:
        before, placements = workload.promise, found.placements if found.is_kept else ()
        is_same = before is not None and abs(found.start_ns - before.start_ns) <= OVERRUN_TOLERANCE_NS
        if before is not None and is_same and before.placements == placements:
            return []
        is_later = before is not None and found.start_ns > before.start_ns and not is_same
        promise = self._make_promise(found, cause=self._find_cause(workload, now_ns) if is_later else "")
        if before is not None and is_same:
            # Other places at the same time.
            promise = replace(promise, start_ns=min(before.start_ns, found.start_ns), cause=before.cause)
        return [WorkloadPromised(time_ns=now_ns, workload_id=workload.workload_id, promise=promise)]

    def _make_promise(self, found: ReservedStart, cause: str) -> StartPromise:
        source = self.ends.get_source(found.waits_for[0]) if found.waits_for else RuntimeSource.UNSPECIFIED
        assumes = [
            *(["quota"] if self._queues.is_active else []),
            *(["power"] if self._placer.allowance.has_budgets else []),
        ]
        return StartPromise(
            start_ns=found.start_ns,
            waits_for=found.waits_for[:PROMISE_ENDS_MOST],
            ends=len(found.waits_for),
            source=source,
            cause=cause,
            placements=found.placements if found.is_kept else (),
            assumes=tuple(assumes),
        )

    def _withdraw(self, workload: Workload, now_ns: int) -> list[Event]:
        if workload.promise is None:
            return []
        return [WorkloadPromised(time_ns=now_ns, workload_id=workload.workload_id)]

    def _find_cause(self, workload: Workload, now_ns: int) -> str:
        """Returns why a promised start has become later: the constraint's name, a colon and a sentence."""
        before = self._before.get(workload.workload_id)
        return find_delay_cause(self._state, self.ends, workload, before, now_ns)
