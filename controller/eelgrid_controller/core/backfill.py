"""Backfill as decisions and events: reserved starts of pending work, what may start beside them, and what is promised.

`BackfillPlanner` holds the reserved starts of the round that is under way, and of the last one, which hold between rounds.
It searches places through the placer, within the reservations of operators, too. Must not know in which order work is tried,
nor quotas.

Theory. The first workload of a round that waits for capacity gets a reserved start (easy), or each up to a bound
(conservative): the expected ends of running work are walked in order, on copies of the node records, until it fits by count;
then its places are searched on the nodes as they would be. Work behind it that would delay it by its expected end is placed
on nodes without reserved places; else, for easy backfill, the reserved start is searched anew beside it; else it waits. Reserved
starts are derived, and made anew in each round; what was promised is a fact of the state, and changes only by an event: when
it becomes known, when it becomes earlier, and when it becomes later, with the cause. A change of up to the tolerance of an overrun
is none.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from heapq import merge
from itertools import groupby

from eelgrid_controller.placement.placer import NO_NODES, AlteredNodes, WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.placement.snapshot import RoomCount
from eelgrid_controller.queueing.backfill import (
    ENDS_MOST,
    EstimatedEnds,
    ReservedStart,
    count_reserved_starts,
    find_delayed_start,
    group_assignments,
)
from eelgrid_controller.queueing.reservations import list_boundaries, list_closed_nodes, list_closing_reservations
from eelgrid_controller.queueing.runtime_estimates import OVERRUN_TOLERANCE_NS, compute_end_ns, estimate_runtime
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.demand import OpportunityPrices
from eelgrid_controller.state.events import Event, WorkloadPromised
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_controller.state.runtime_history import uses_presumed_runtimes
from eelgrid_protos.messages import (
    PROMISE_ENDS_MOST,
    BackfillMode,
    Placement,
    RuntimeSource,
    StartPromise,
    Workload,
    WorkloadSpec,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

BACKFILL_REASON = PendingConstraint.BACKFILL.describe()
# Whole searches for the places of one reserved start; each takes milliseconds.
_SEARCHES_MOST = 4
# Times that a walk considers beside those of other reserved starts, which change what is held at each.
_TIMES_BESIDE_MOST = 64
_WALK_SEARCHES = 4
# How often in a round a reserved start may be searched anew beside work that would delay it.
_REPLANS_MOST = 64


def describe_reserved(name: str) -> str:
    """Returns the reason of work that a reservation of nodes keeps waiting."""
    return PendingConstraint.RESERVATION.describe("held", reservation=name)


def _has_free_gpus(record: NodeRecord, spec: WorkloadSpec) -> bool:
    """Returns whether a node has the sum of what one replica asks of GPUs."""
    request = spec.request
    free_milli = GPU_MILLI_WHOLE * len(record.inventory.gpus) - sum(record.gpu_milli.values())
    return free_milli >= request.gpu_count * request.gpu_milli


class BackfillPlanner:
    """The reserved starts of one state's pending work."""

    def __init__(self, state: ClusterState, placer: WorkloadPlacer) -> None:
        self._state, self._placer = state, placer
        self.ends = EstimatedEnds(state)
        # Of the round under way, or of the last one.
        self._reserved: list[ReservedStart] = []
        # Of the round before: they hold between rounds until the new one has made others, and tell why a start moved.
        self._before: dict[str, ReservedStart] = {}
        self._in_round = False
        self._is_full = False
        self._is_known = True
        self._replans = 0
        self._promised = {key for key in state.pending if state.workloads[key].promise is not None}
        # When a round last began: what reservations closed by time before it has been tried.
        self._begun_ns = 0

    def refresh(self, event: Event) -> None:
        """Follows an event that was applied."""
        self.ends.refresh(event)
        if isinstance(event, WorkloadPromised):
            (self._promised.discard if event.promise is None else self._promised.add)(event.workload_id)

    def is_round_due(self, now_ns: int) -> bool:
        """Returns whether pending work must be tried because time has passed: a reservation began or ended, or a promise is due."""
        if not len(self._state.pending) or self._in_round:
            return False
        boundaries = list_boundaries(self._state.policy.reservations)
        if bisect_right(boundaries, now_ns) > bisect_right(boundaries, self._begun_ns):
            return True
        late_ns = (one.start_ns + OVERRUN_TOLERANCE_NS for one in self._reserved)
        return any(self._begun_ns < time_ns < now_ns for time_ns in late_ns)

    def begin_round(self, now_ns: int) -> None:
        """Begins a round over all pending work: starts are reserved anew."""
        self._before = {one.workload_id: one for one in self._reserved}
        self._reserved, self._replans, self._begun_ns = [], 0, now_ns
        self._in_round, self._is_full = True, count_reserved_starts(self._state.policy) == 0
        # After a start agents come back one by one: until all have, it is not known what fits, and no promise changes.
        self._is_known = all(one.is_reported or not one.is_ready for one in self._state.nodes.values())
        if not self._is_known:
            self._reserved, self._is_full = list(self._before.values()), True

    def end_round(self, now_ns: int) -> list[Event]:
        """Ends a round; returns the events by which what has no reserved start any more is promised none, not yet applied."""
        self._in_round = False
        if not self._is_known:
            return []
        kept = {one.workload_id for one in self._reserved}
        gone = sorted(self._promised - kept)
        self._promised &= kept
        return [WorkloadPromised(time_ns=now_ns, workload_id=key) for key in gone if key in self._state.pending]

    @property
    def reserves_more(self) -> bool:
        """Whether a workload that waits for capacity would get a reserved start in this round."""
        return self._in_round and not self._is_full

    def list_closed_nodes(self, workload: Workload, now_ns: int) -> frozenset[str]:
        """Returns the nodes on which reservations let a workload not start now."""
        return list_closed_nodes(self._state, workload, now_ns)

    def get_term(self, kind: Hashable, workload: Workload) -> Hashable:
        """Returns a kind of request with what makes equal requests differ where they would delay others: the run time."""
        estimate = estimate_runtime(workload, self._state.policy, self._state.runtimes)
        return kind, None if estimate is None else estimate.expected_s

    def may_skip_equals(self, workload: Workload) -> bool:
        """Returns whether work of the same request, user and stated run time has the same reason to wait."""
        if self.reserves_more:
            return False
        estimate = estimate_runtime(workload, self._state.policy, self._state.runtimes)
        is_stated = estimate is not None and estimate.source in (RuntimeSource.USER, RuntimeSource.TIME_LIMIT)
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
    ) -> PlacementDecision:
        """Decides where a pending workload starts now, on none of the closed nodes, and so that it delays no reserved start.

        `spec` is what its queue lets start. Within a round only those reserved starts count that were made before.
        """
        key = workload.workload_id
        decision = self._placer.decide_placement(spec, quotes, workload_id=key, closed=closed)
        if not decision.placements:
            if closed and self._placer.decide_placement(spec, quotes, workload_id=key).placements:
                name = next(iter(list_closing_reservations(self._state, workload, now_ns))).name
                return replace(decision, withheld=describe_reserved(name))
            return decision
        reserved = [one for one in self._list_in_force(is_round=is_round) if one.workload_id != key]
        if not reserved:
            return decision
        until_ns = compute_end_ns(now_ns, estimate_runtime(workload, self._state.policy, self._state.runtimes))
        if not self._delays(workload, decision, reserved, until_ns, now_ns):
            return decision
        names = frozenset(name for one in reserved if one.start_ns < until_ns for name in one.places)
        elsewhere = self._placer.decide_placement(spec, quotes, workload_id=key, closed=closed | names)
        if elsewhere.placements:
            return elsewhere
        if len(reserved) == 1 and self._replan(reserved[0], workload, decision, now_ns):
            return decision
        return PlacementDecision(
            placements=(), explanation=decision.explanation, room=decision.room, withheld=BACKFILL_REASON
        )

    def _list_in_force(self, *, is_round: bool) -> list[ReservedStart]:
        """Returns the reserved starts of work that still waits; until a round has made others, those before it hold."""
        found = self._reserved
        if self._in_round and not is_round and not found:
            found = list(self._before.values())
        return [one for one in found if one.workload_id in self._state.pending]

    def _delays(
        self, workload: Workload, decision: PlacementDecision, reserved: list[ReservedStart], until_ns: int, now_ns: int
    ) -> bool:
        places = group_assignments(workload, decision.placements)
        found = find_delayed_start(self._state.nodes, self.ends, reserved, places, until_ns=until_ns, now_ns=now_ns)
        return found is not None

    def _replan(self, reserved: ReservedStart, workload: Workload, decision: PlacementDecision, now_ns: int) -> bool:
        """Searches other places at the same time for a reserved start, beside work that would delay it where it is."""
        first = self._state.workloads[reserved.workload_id]
        if self._replans >= _REPLANS_MOST:
            return False
        self._replans += 1
        records: dict[str, NodeRecord] = {}
        for end_ns, key in self.ends.list_ends(now_ns):
            if end_ns > reserved.start_ns:
                break
            self._release(records, key)
        for name, assignments in group_assignments(workload, decision.placements).items():
            record = records.get(name) or self._state.nodes[name].copy()
            records[name] = record
            for assignment in assignments:
                record.allocate_unchecked(assignment)
        found = self._search(records, first, reserved.start_ns)
        if not found.placements:
            return False
        new = replace(reserved, places=group_assignments(first, found.placements))
        self._reserved = [new if one is reserved else one for one in self._reserved]
        if self._before.get(first.workload_id) is reserved:
            self._before[first.workload_id] = new
        return True

    def _release(self, records: dict[str, NodeRecord], workload_id: str) -> list[str]:
        """Releases a running workload on copies of its nodes' records; returns their names."""
        names = []
        for placement in self._state.workloads[workload_id].placements:
            name = placement.node_name
            if name not in records:
                records[name] = self._state.nodes[name].copy()
            records[name].release(workload_id, placement.replica)
            names.append(name)
        return names

    def _search(self, records: Mapping[str, NodeRecord], workload: Workload, when_ns: int) -> PlacementDecision:
        """Decides where a workload would go at a time, with nodes as they would be then."""
        self._placer.searches += 1
        closed = list_closed_nodes(self._state, workload, when_ns)
        return self._placer.decide_on_altered(AlteredNodes(records), workload.spec, workload.workload_id, closed)

    def reserve_start(self, workload: Workload, now_ns: int) -> list[Event]:
        """Reserves the start of a workload that waits for capacity; returns the event that promises it, if that is news."""
        most = count_reserved_starts(self._state.policy)
        if self._is_full or not most:
            return []
        # Of easy backfill the first decides, whether an end is expected that lets it start or not.
        self._is_full = most == 1
        found = self._find_start(workload, now_ns)
        if found is None:
            return self._withdraw(workload, now_ns)
        self._reserved.append(found)
        self._is_full |= len(self._reserved) >= most
        return self._promise(workload, found, now_ns)

    def reserve_first(self, workload: Workload, now_ns: int) -> list[Event]:
        """Reserves the start of a workload that was just submitted, waits for capacity, and goes before all others."""
        if self._in_round or self._state.pending.count_before(workload.workload_id):
            return []
        events: list[Event] = []
        if self._state.policy.backfill is not BackfillMode.CONSERVATIVE:
            for one in self._list_in_force(is_round=False):
                events += self._withdraw(self._state.workloads[one.workload_id], now_ns)
            self._before, self._reserved = {}, []
        self._is_full = count_reserved_starts(self._state.policy) <= len(self._reserved)
        return events + self.reserve_start(workload, now_ns)

    def _find_start(self, workload: Workload, now_ns: int) -> ReservedStart | None:
        """Walks the expected ends until a workload fits; None if it does not by any that is considered."""
        expected = list(self._list_times(now_ns))
        if not expected:
            return None
        records: dict[str, NodeRecord] = {}
        # The walk takes as long as a search, beside other reserved starts as long as some.
        self._placer.searches += _WALK_SEARCHES if self._reserved else 1
        room = self._placer.begin_room_count(workload.spec, workload.workload_id)
        others = self._reserved
        times = searches = 0
        ended: list[str] = []
        for when_ns, group in groupby(expected, key=lambda item: item[0]):
            for _, key in group:
                if key:
                    ended.append(key)
                    for name in self._release(records, key):
                        # Room only grows here, so that a node without enough free GPUs has none, as before.
                        if _has_free_gpus(records[name], workload.spec):
                            room.update_node(name, records[name])
            times += 1
            if searches >= _SEARCHES_MOST or (others and times > _TIMES_BESIDE_MOST):
                return None
            end_ns = compute_end_ns(when_ns, estimate_runtime(workload, self._state.policy, self._state.runtimes))
            closed = list_closed_nodes(self._state, workload, when_ns)
            if room.count(closed) < workload.spec.replicas:
                continue
            then = self._add_reserved(records, room, when_ns, end_ns) if others else records
            if others and not self._has_room(room, records, then, closed, workload.spec.replicas):
                continue
            searches += 1
            decision = self._search(then, workload, when_ns)
            if decision.placements:
                return self._make_start(workload, decision.placements, when_ns, end_ns, ended)
        return None

    def _list_times(self, now_ns: int) -> Iterator[tuple[int, str]]:
        """Yields the times at which capacity is expected to become free, with the workload that ends, in order."""
        boundaries = ((time_ns, "") for time_ns in list_boundaries(self._state.policy.reservations) if time_ns > now_ns)
        reserved = sorted((one.end_ns, "") for one in self._reserved if one.end_ns > now_ns)
        return merge(self.ends.list_ends(now_ns, ENDS_MOST), boundaries, reserved)

    def _add_reserved(
        self, records: Mapping[str, NodeRecord], room: RoomCount, begin_ns: int, end_ns: int
    ) -> dict[str, NodeRecord]:
        """Returns records with everything allocated that reserved starts hold at any time of a span, where there is room."""
        found = dict(records)
        copied: set[str] = set()
        for one in self._reserved:
            if one.start_ns >= end_ns or one.end_ns <= begin_ns:
                continue
            for name, assignments in one.places.items():
                if not room.has_room(name):
                    continue
                if name not in copied:
                    copied.add(name)
                    found[name] = (found.get(name) or self._state.nodes[name]).copy()
                for assignment in assignments:
                    found[name].allocate_unchecked(assignment)
        return found

    def _has_room(
        self,
        room: RoomCount,
        records: Mapping[str, NodeRecord],
        then: Mapping[str, NodeRecord],
        closed: frozenset[str],
        replicas: int,
    ) -> bool:
        """Returns whether a workload fits by count beside what others hold; the count is as before afterwards."""
        changed = [name for name, record in then.items() if records.get(name) is not record]
        for name in changed:
            room.update_node(name, then[name])
        fits = room.count(closed) >= replicas
        for name in changed:
            room.update_node(name, records.get(name) or self._state.nodes[name])
        return fits

    def _make_start(
        self, workload: Workload, placements: tuple[Placement, ...], start_ns: int, end_ns: int, ended: list[str]
    ) -> ReservedStart:
        places = group_assignments(workload, placements)
        on_places = [
            key
            for key in reversed(ended)
            if any(one.node_name in places for one in self._state.workloads[key].placements)
        ]
        return ReservedStart(
            workload_id=workload.workload_id,
            start_ns=start_ns,
            end_ns=end_ns,
            places=places,
            waits_for=tuple(on_places),
        )

    def _promise(self, workload: Workload, found: ReservedStart, now_ns: int) -> list[Event]:
        before = workload.promise
        if before is not None and abs(found.start_ns - before.start_ns) <= OVERRUN_TOLERANCE_NS:
            return []
        is_later = before is not None and found.start_ns > before.start_ns
        source = self.ends.get_source(found.waits_for[0]) if found.waits_for else RuntimeSource.UNSPECIFIED
        promise = StartPromise(
            start_ns=found.start_ns,
            waits_for=found.waits_for[:PROMISE_ENDS_MOST],
            ends=len(found.waits_for),
            source=source,
            cause=self._find_cause(workload, now_ns) if is_later else "",
        )
        return [WorkloadPromised(time_ns=now_ns, workload_id=workload.workload_id, promise=promise)]

    def _withdraw(self, workload: Workload, now_ns: int) -> list[Event]:
        if workload.promise is None:
            return []
        return [WorkloadPromised(time_ns=now_ns, workload_id=workload.workload_id)]

    def _find_cause(self, workload: Workload, now_ns: int) -> str:
        """Returns why a promised start has become later: the constraint's name, a colon and a sentence."""
        promise, before = workload.promise, self._before.get(workload.workload_id)
        for key in promise.waits_for if promise is not None else ():
            if self.ends.is_overrunning(key, now_ns):
                return f"overrun: {key} runs for longer than expected"
        names = [] if before is None else sorted(before.places)
        for name in names:
            record = self._state.nodes.get(name)
            if record is None or not record.is_ready:
                return f"node: {name} is lost"
            if record.cordon is not None:
                return f"node: {name} is {record.cordon_reason()}"
            if not record.is_schedulable:
                return f"node: {name} takes no work"
        closed = [
            one.name
            for one in list_closing_reservations(self._state, workload, 0 if before is None else before.start_ns)
        ]
        if closed:
            return f"reservation: {closed[0]} holds nodes that it would have started on"
        return "order: work that goes before it has started, or running work has grown or moved"
