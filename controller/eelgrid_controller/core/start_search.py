"""Searches when and where pending work could start, as running work ends and other reserved starts begin and end.

`StartSearch` walks the expected ends of one state on copies of the node records. Owns no reservation and changes nothing. Must
not know who is promised what, nor in which order work is tried.

Theory. Capacity grows only when running work or a reserved start ends, or a reservation of operators begins or ends; so the
earliest start is at one of these times. At each the work is counted first, beside the most that others hold at once in its
span; only where it fits by count are its places searched, on the nodes as they would be then: devices, CPU and memory, models,
traits, reservations, and the watts of budgets that are free by then. With queues, the quota that is free by then is checked too:
without the work that has ended, and with that which starts before.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import merge
from itertools import groupby

from eelgrid_controller.placement.placer import AlteredNodes, WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.placement.snapshot import RoomCount
from eelgrid_controller.queueing.admission import QueueHold, QueueIndex
from eelgrid_controller.queueing.backfill import (
    ENDS_MOST,
    EstimatedEnds,
    ReservedStart,
    find_most_gpu_milli,
    group_assignments,
    hold_reserved,
    sum_gpu_milli,
)
from eelgrid_controller.queueing.reservations import list_boundaries, list_closed_nodes
from eelgrid_controller.queueing.runtime_estimates import compute_end_ns, estimate_runtime
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadScaled
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_protos.messages import Assignment, Placement, Workload, WorkloadSpec
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# Whole searches for the places of one reserved start; each takes milliseconds.
_SEARCHES_MOST = 4
# Times that a walk considers beside those of other reserved starts, which change what is held at each.
TIMES_BESIDE_MOST = 64
_WALK_SEARCHES = 4


def _has_free_gpus(record: NodeRecord, spec: WorkloadSpec) -> bool:
    """Returns whether a node has the sum of what one replica asks of GPUs."""
    request = spec.request
    return _count_free_milli(record) >= request.gpu_count * request.gpu_milli


def _count_free_milli(record: NodeRecord) -> int:
    """Returns the thousandths of a node's GPUs that no running work holds, whatever keeps them from being used."""
    return GPU_MILLI_WHOLE * len(record.inventory.gpus) - record.allocated_gpu_milli


def _count_milli(spec: WorkloadSpec) -> int:
    """Returns the thousandths of GPUs that a workload asks for."""
    return spec.replicas * spec.request.gpu_count * spec.request.gpu_milli


def order_parts(parts: Iterable[Workload]) -> list[Workload]:
    """Orders the parts of a gang as they are placed, the hardest first: the most of a node, then the most replicas."""

    def key(part: Workload) -> tuple[int, int, int]:
        request = part.spec.request
        return -request.gpu_count * request.gpu_milli, -request.cpu_milli, -part.spec.replicas

    return sorted(parts, key=key)


def _join_starts(first: ReservedStart, starts: Sequence[ReservedStart]) -> ReservedStart:
    """Returns the start of a gang, in the name of its first part; until the last part ends, it holds the places of all."""
    places: dict[str, tuple[Assignment, ...]] = {}
    for one in starts:
        for name, assignments in one.places.items():
            places[name] = (*places.get(name, ()), *assignments)
    waits_for = dict.fromkeys(key for one in starts for key in one.waits_for)
    return replace(
        first,
        end_ns=max(one.end_ns for one in starts),
        places=places,
        waits_for=tuple(waits_for),
        # They are of several workloads.
        placements=(),
        gpu_milli=sum(one.gpu_milli for one in starts),
    )


class StartSearch:
    """Searches of starts on one state."""

    def __init__(self, state: ClusterState, placer: WorkloadPlacer, queues: QueueIndex, ends: EstimatedEnds) -> None:
        self._state, self._placer, self._queues, self._ends = state, placer, queues, ends

    def find_start(
        self,
        workload: Workload,
        others: Sequence[ReservedStart],
        now_ns: int,
        *,
        not_before_ns: int = 0,
        before_ns: int | None = None,
        freed: Sequence[WorkloadScaled] = (),
        is_from_now: bool = False,
        times_most: int = TIMES_BESIDE_MOST,
        searches_most: int = _SEARCHES_MOST,
    ) -> ReservedStart | None:
        """Walks the expected ends until a workload fits beside others; None if it does not by any that is considered.

        The start is after `now_ns`, or at it with `is_from_now`, not before `not_before_ns`, and before `before_ns` if that
        is given. The replicas that `freed` releases are thought gone; the rest of these workloads counts as endless.
        """
        expected = list(self._list_times(others, freed, now_ns, not_before_ns, is_from_now=is_from_now))
        if not expected or (before_ns is not None and expected[0][0] >= before_ns):
            return None
        # The walk takes as long as a search, beside other reserved starts as long as some.
        self._placer.searches += _WALK_SEARCHES if others else 1
        room = self._placer.begin_room_count(workload.spec, workload.workload_id)
        records = self._release_replicas(freed, room)
        estimate = estimate_runtime(workload, self._state)
        by_node: dict[str, list[ReservedStart]] = {}
        for one in others:
            for name in one.places:
                by_node.setdefault(name, []).append(one)
        # An upper bound of what is free, which is cheap: only where it suffices, nodes are looked at.
        nodes = (records.get(name, record) for name, record in self._state.nodes.items())
        free_milli = sum(map(_count_free_milli, nodes)) if others else 0
        wanted_milli = _count_milli(workload.spec)
        times = searches = 0
        ended: list[str] = []
        for when_ns, group in groupby(expected, key=lambda item: item[0]):
            if before_ns is not None and when_ns >= before_ns:
                return None
            for _, key in group:
                if key:
                    ended.append(key)
                    free_milli += _count_milli(self._state.workloads[key].spec)
                    for name in self.release(records, key):
                        # Room only grows here, so that a node without enough free GPUs has none, as before.
                        if _has_free_gpus(records[name], workload.spec):
                            room.update_node(name, records[name])
            times += when_ns >= not_before_ns
            if searches >= searches_most or (others and times > times_most):
                return None
            end_ns = compute_end_ns(when_ns, estimate)
            closed = list_closed_nodes(self._state, workload, when_ns)
            if when_ns < not_before_ns or room.count(closed) < workload.spec.replicas:
                continue
            if others and free_milli - find_most_gpu_milli(others, when_ns, end_ns) < wanted_milli:
                continue
            then = self._hold_others(records, room, by_node, when_ns, end_ns) if others else records
            if others and not self._has_room(room, records, then, closed, workload.spec.replicas):
                continue
            spec = self._admit(workload, ended, others, when_ns, end_ns)
            if spec is None:
                continue
            searches += 1
            self._placer.searches += 1
            altered = AlteredNodes(then, coming=tuple(one.new for one in others if one.new is not None))
            decision = self._placer.decide_on_altered(altered, spec, workload.workload_id, closed)
            if decision.placements:
                return self._make_start(workload, decision.placements, when_ns, end_ns, ended)
        return None

    def _release_replicas(self, freed: Sequence[WorkloadScaled], room: RoomCount) -> dict[str, NodeRecord]:
        """Returns copies of the nodes on which some replicas are released, without these, and counts their room."""
        records: dict[str, NodeRecord] = {}
        for event in freed:
            for placement in self._state.workloads[event.workload_id].placements:
                if placement.replica in event.released:
                    name = placement.node_name
                    if name not in records:
                        records[name] = self._state.nodes[name].copy()
                    records[name].release(event.workload_id, placement.replica)
        for name, record in records.items():
            room.update_node(name, record)
        return records

    def find_gang_start(
        self, parts: Sequence[Workload], others: Sequence[ReservedStart], now_ns: int
    ) -> ReservedStart | None:
        """Walks the expected ends until all parts of a gang fit together beside others, as `find_start` does for one workload.

        The start is that of the first part, with the places of all.
        """
        records: dict[str, NodeRecord] = {}
        self._placer.searches += _WALK_SEARCHES
        rooms = [self._placer.begin_room_count(part.spec, part.workload_id) for part in parts]
        free_milli = sum(map(_count_free_milli, self._state.nodes.values()))
        wanted_milli = sum(_count_milli(part.spec) for part in parts)
        searches = 0
        ended: list[str] = []
        times = groupby(self._list_times(others, (), now_ns, 0, is_from_now=False), key=lambda item: item[0])
        for number, (when_ns, group) in enumerate(times):
            if number >= TIMES_BESIDE_MOST or searches >= _SEARCHES_MOST:
                return None
            for _, key in group:
                if key:
                    ended.append(key)
                    free_milli += _count_milli(self._state.workloads[key].spec)
                    for name in self.release(records, key):
                        for room in rooms:
                            room.update_node(name, records[name])
            if free_milli - find_most_gpu_milli(others, when_ns, when_ns + 1) < wanted_milli:
                continue
            closed = [list_closed_nodes(self._state, part, when_ns) for part in parts]
            if any(room.count(no) < part.spec.replicas for room, no, part in zip(rooms, closed, parts, strict=True)):
                continue
            searches += 1
            found = self._place_gang(parts, closed, dict(records), others, when_ns, ended=ended)
            if found is not None:
                return found
        return None

    def _place_gang(
        self,
        parts: Sequence[Workload],
        closed: Sequence[frozenset[str]],
        records: dict[str, NodeRecord],
        others: Sequence[ReservedStart],
        when_ns: int,
        *,
        ended: list[str],
    ) -> ReservedStart | None:
        """Places the parts of a gang at a time, the hardest first, each on nodes that those before it have; None if one lacks room."""
        starts: dict[str, ReservedStart] = {}
        starting: list[tuple[str, tuple[Placement, ...]]] = []
        closed_to = {part.workload_id: names for part, names in zip(parts, closed, strict=True)}
        for part in order_parts(parts):
            end_ns = compute_end_ns(when_ns, estimate_runtime(part, self._state))
            then = dict(records)
            for name in frozenset[str]().union(*(one.places for one in others)):
                then[name] = hold_reserved(records.get(name) or self._state.nodes[name], name, others, when_ns, end_ns)
            spec = self._admit(part, ended, others, when_ns, end_ns, beside=starting)
            if spec is None:
                return None
            self._placer.searches += 1
            decision = self._placer.decide_on_altered(
                AlteredNodes(then), spec, part.workload_id, closed_to[part.workload_id]
            )
            if not decision.placements:
                return None
            found = self._make_start(part, decision.placements, when_ns, end_ns, ended)
            for name, assignments in found.places.items():
                records[name] = (records.get(name) or self._state.nodes[name]).copy()
                for assignment in assignments:
                    records[name].allocate_unchecked(assignment)
            starts[part.workload_id] = found
            starting.append((part.workload_id, decision.placements))
        return _join_starts(starts[parts[0].workload_id], list(starts.values()))

    def search_places(
        self, records: Mapping[str, NodeRecord], workload: Workload, when_ns: int, *, coming: Workload
    ) -> PlacementDecision:
        """Decides where a workload would go at a time, with nodes as they would be then; `coming` is on them, and may be new."""
        self._placer.searches += 1
        closed = list_closed_nodes(self._state, workload, when_ns)
        altered = AlteredNodes(records, coming=(coming,))
        return self._placer.decide_on_altered(altered, workload.spec, workload.workload_id, closed)

    def release(self, records: dict[str, NodeRecord], workload_id: str) -> list[str]:
        """Releases a running workload on copies of its nodes' records; returns their names."""
        names = []
        for placement in self._state.workloads[workload_id].placements:
            name = placement.node_name
            if name not in records:
                records[name] = self._state.nodes[name].copy()
            records[name].release(workload_id, placement.replica)
            names.append(name)
        return names

    def _list_times(
        self,
        others: Sequence[ReservedStart],
        freed: Sequence[WorkloadScaled],
        now_ns: int,
        not_before_ns: int,
        *,
        is_from_now: bool,
    ) -> Iterator[tuple[int, str]]:
        """Yields the times at which capacity is expected to become free, with the workload that ends, in order."""
        boundaries = {time_ns for time_ns in list_boundaries(self._state.policy.reservations) if time_ns > now_ns}
        boundaries |= {one.end_ns for one in others if one.end_ns > now_ns}
        boundaries |= {not_before_ns} if not_before_ns > now_ns else {now_ns} if is_from_now else set()
        shrunk = {event.workload_id for event in freed}
        ends = (one for one in self._ends.list_ends(now_ns, ENDS_MOST) if one[1] not in shrunk)
        return merge(ends, ((time_ns, "") for time_ns in sorted(boundaries)))

    def _hold_others(
        self,
        records: Mapping[str, NodeRecord],
        room: RoomCount,
        by_node: Mapping[str, Sequence[ReservedStart]],
        begin_ns: int,
        end_ns: int,
    ) -> dict[str, NodeRecord]:
        """Returns records with the most that others hold at any time of a span, where there is room."""
        found = dict(records)
        for name, others in by_node.items():
            if room.has_room(name):
                before = found.get(name) or self._state.nodes[name]
                held = hold_reserved(before, name, others, begin_ns, end_ns)
                if held is not before:
                    found[name] = held
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

    def _admit(
        self,
        workload: Workload,
        ended: Sequence[str],
        others: Sequence[ReservedStart],
        begin_ns: int,
        end_ns: int,
        *,
        beside: Sequence[tuple[str, tuple[Placement, ...]]] = (),
    ) -> WorkloadSpec | None:
        """Returns what the queue of a workload lets start at a time, if some work has ended, beside what starts with it.

        None if nothing.
        """
        if not self._queues.is_active:
            return workload.spec
        starting = [
            *beside,
            *(
                (one.workload_id, one.placements)
                for one in others
                if one.placements and one.start_ns < end_ns and one.end_ns > begin_ns
            ),
        ]
        admitted = self._queues.admit_without(
            workload.spec,
            lambda: self._placer.snapshot().models,
            ended,
            workload_id=workload.workload_id,
            starting=starting,
        )
        return None if isinstance(admitted, QueueHold) else admitted

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
            priority=workload.spec.priority,
            placements=placements,
            gpu_milli=sum_gpu_milli(places),
            new=None if workload.workload_id in self._state.workloads else workload,
        )
