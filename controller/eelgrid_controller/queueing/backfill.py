"""Backfill: when running work is expected to end, what reserved starts hold, and whether work would delay one of them.

`EstimatedEnds` follows the state after each event; a `ReservedStart` is where and when a pending workload starts at the
latest, on devices, not on counts. Must not know how places are searched, nor who is promised what (core/backfill.py).

Theory (EASY backfill, Lifka, JSSPP 1995; conservative: every pending workload gets a reserved start). The reserved start of a
workload that waits for capacity is the first time at which it fits, with running work released at its expected end. Another
one may start before it if it ends before that time, or holds then what is left beside the reserved places. So with exact run
times the reserved places are free at that time, and the start is no later. What is held beside reserved starts only rises
when one of these begins, so it is checked at these times alone. A place that is held for a whole span is free in it if it fits beside
the most that others hold of each CPU, byte and GPU at any of these times (`hold_reserved`), since each is checked by itself.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice

from eelgrid_controller.queueing.runtime_estimates import (
    NEVER_NS,
    OVERRUN_TOLERANCE_NS,
    compute_end_ns,
    defer_overrun,
    estimate_runtime,
)
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event, PolicyChanged
from eelgrid_controller.state.node_allocations import (
    ContradictoryEvent,
    NodeRecord,
    list_affected_workloads,
    make_assignment,
)
from eelgrid_protos.messages import Assignment, BackfillMode, Placement, Policy, RuntimeSource, Workload, WorkloadPhase

# Conservative backfill reserves no more starts in a round; each costs a walk over the expected ends.
RESERVED_STARTS_MOST = 50
# Expected ends that a walk considers: some tens of microseconds each.
ENDS_MOST = 1024


def count_reserved_starts(policy: Policy) -> int:
    """Returns how many pending workloads may have a reserved start at once."""
    if policy.backfill is BackfillMode.CONSERVATIVE:
        return RESERVED_STARTS_MOST
    return 0 if policy.backfill is BackfillMode.NONE else 1


@dataclass(frozen=True, slots=True)
class _Run:
    """A running workload with an expected end."""

    start_ns: int
    end_ns: int
    source: RuntimeSource


class EstimatedEnds:
    """The running workloads of which an end is expected, by that end."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._runs: dict[str, _Run] = {}
        self._order: list[tuple[int, str]] = []
        self._rebuild()

    def _rebuild(self) -> None:
        self._policy = self._state.policy
        self._runs = {}
        for workload_id in self._state.live_ids:
            run = self._estimate(workload_id)
            if run is not None:
                self._runs[workload_id] = run
        self._order = sorted((run.end_ns, workload_id) for workload_id, run in self._runs.items())

    def _estimate(self, workload_id: str) -> _Run | None:
        workload = self._state.workloads.get(workload_id)
        if workload is None or workload.phase is not WorkloadPhase.PLACED:
            return None
        estimate = estimate_runtime(workload, self._state)
        if estimate is None:
            return None
        return _Run(workload.placed_ns, compute_end_ns(workload.placed_ns, estimate), estimate.source)

    def refresh(self, event: Event) -> None:
        """Follows an event that was applied."""
        if isinstance(event, PolicyChanged):
            before, after = self._policy, self._state.policy
            if (before.backfill, before.default_runtime_s) != (after.backfill, after.default_runtime_s):
                self._rebuild()
            return
        for workload_id in list_affected_workloads(event):
            new, old = self._estimate(workload_id), self._runs.pop(workload_id, None)
            if old is not None:
                del self._order[bisect_left(self._order, (old.end_ns, workload_id))]
            if new is not None:
                self._runs[workload_id] = new
                insort(self._order, (new.end_ns, workload_id))

    def get_end_ns(self, workload_id: str, now_ns: int) -> int:
        """Returns when a running workload is expected to end, as of now."""
        run = self._runs.get(workload_id)
        return NEVER_NS if run is None else defer_overrun(run.start_ns, run.end_ns, now_ns)

    def get_source(self, workload_id: str) -> RuntimeSource:
        """Returns where the expected end of a running workload comes from."""
        run = self._runs.get(workload_id)
        return RuntimeSource.UNSPECIFIED if run is None else run.source

    def is_overrunning(self, workload_id: str, now_ns: int) -> bool:
        """Returns whether a workload runs for longer than expected, beyond the tolerance."""
        run = self._runs.get(workload_id)
        return run is not None and now_ns > run.end_ns + OVERRUN_TOLERANCE_NS

    def list_ends(self, now_ns: int, most: int = ENDS_MOST) -> Iterator[tuple[int, str]]:
        """Yields at most `most` expected ends with their workloads, as of now, in order."""
        late = bisect_left(self._order, (now_ns, ""))
        overrun = sorted(
            (self.get_end_ns(workload_id, now_ns), workload_id)
            for _, workload_id in self._order[max(0, late - most) : late]
        )
        return islice(merge(overrun, self._order[late : late + most]), most)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedStart:
    """The latest start of a pending workload if run times are as expected: its places, and what ends before."""

    workload_id: str
    start_ns: int
    end_ns: int
    places: Mapping[str, tuple[Assignment, ...]]
    # The last to end first.
    waits_for: tuple[str, ...] = ()
    # Work of higher priority goes before it.
    priority: int = 0
    placements: tuple[Placement, ...] = ()
    # Of all places together.
    gpu_milli: int = 0
    # The places are promised, too, and stand in the state.
    is_kept: bool = False
    # The work itself while it is being submitted, as the state does not know it yet.
    new: Workload | None = None


def group_assignments(workload: Workload, placements: Iterable[Placement]) -> dict[str, tuple[Assignment, ...]]:
    """Returns what a workload holds at places, by node."""
    found: dict[str, list[Assignment]] = {}
    for placement in placements:
        found.setdefault(placement.node_name, []).append(make_assignment(workload, placement))
    return {name: tuple(assignments) for name, assignments in found.items()}


def sum_gpu_milli(places: Mapping[str, Iterable[Assignment]]) -> int:
    """Returns the thousandths of GPUs that assignments hold together."""
    return sum(len(one.gpu_uuids) * one.gpu_milli for assignments in places.values() for one in assignments)


def project_record(record: NodeRecord, ends: EstimatedEnds, when_ns: int, now_ns: int) -> NodeRecord:
    """Returns a copy of a node that the work has left that is expected to end by a time."""
    twin = record.copy()
    for workload_id, replica in record.assignments:
        if ends.get_end_ns(workload_id, now_ns) <= when_ns:
            twin.release(workload_id, replica)
    return twin


# Names a GPU of a node on which what comes, which the record holds, exceeds a limit on interference; empty if none.
DescribeUnbearable = Callable[[NodeRecord, Sequence[Assignment]], str]


def hold_reserved(
    record: NodeRecord, name: str, reserved: Iterable[ReservedStart], begin_ns: int, end_ns: int
) -> NodeRecord:
    """Returns a copy of a node with the most that reserved starts hold of it at any time of a span; itself without any."""
    inside = [one for one in reserved if one.start_ns < end_ns and one.end_ns > begin_ns and name in one.places]
    if not inside:
        return record
    held = record.copy()
    # What ends at a time is gone before what begins then.
    changes = sorted((time_ns, sign, number) for number, one in enumerate(inside) for time_ns, sign in _list_span(one))
    cpu_milli = memory_bytes = most_cpu_milli = most_memory_bytes = 0
    gpu_milli: dict[str, int] = {}
    most_milli: dict[str, int] = {}
    for _, sign, number in changes:
        for one in inside[number].places[name]:
            cpu_milli += sign * one.cpu_milli
            memory_bytes += sign * one.memory_bytes
            for uuid in one.gpu_uuids:
                gpu_milli[uuid] = milli = gpu_milli.get(uuid, 0) + sign * one.gpu_milli
                most_milli[uuid] = max(milli, most_milli.get(uuid, 0))
            # Their watts count, too.
            held.assignments[one.workload_id, one.replica] = one
        most_cpu_milli, most_memory_bytes = max(cpu_milli, most_cpu_milli), max(memory_bytes, most_memory_bytes)
    held.allocated_cpu_milli += most_cpu_milli
    held.allocated_memory_bytes += most_memory_bytes
    for uuid, milli in most_milli.items():
        held.gpu_milli[uuid] = held.gpu_milli.get(uuid, 0) + milli
    return held


def _list_span(one: ReservedStart) -> tuple[tuple[int, int], tuple[int, int]]:
    return (one.start_ns, 1), (one.end_ns, -1)


def find_most_gpu_milli(reserved: Iterable[ReservedStart], begin_ns: int, end_ns: int) -> int:
    """Returns the most thousandths of GPUs that reserved starts hold together at any time of a span."""
    inside = [one for one in reserved if one.start_ns < end_ns and one.end_ns > begin_ns]
    milli = most = 0
    for _, sign, number in sorted(
        (time_ns, sign, number) for number, one in enumerate(inside) for time_ns, sign in _list_span(one)
    ):
        milli += sign * inside[number].gpu_milli
        most = max(most, milli)
    return most


def is_start_free(
    nodes: Mapping[str, NodeRecord],
    ends: EstimatedEnds,
    others: Sequence[ReservedStart],
    one: ReservedStart,
    *,
    now_ns: int,
    describe_unbearable: DescribeUnbearable,
) -> bool:
    """Returns whether the places of a reserved start will be free for its span, beside those of others."""
    for name, assignments in one.places.items():
        node = nodes.get(name)
        if node is None or not node.is_schedulable:
            return False
        record = hold_reserved(project_record(node, ends, one.start_ns, now_ns), name, others, one.start_ns, one.end_ns)
        try:
            for assignment in assignments:
                if any(node.cordon_reason(gpu) for gpu in node.inventory.gpus if gpu.uuid in assignment.gpu_uuids):
                    return False
                record.allocate(assignment)
        except ContradictoryEvent:
            return False
        if describe_unbearable(record, assignments):
            return False
    return True


def find_delayed_start(
    nodes: Mapping[str, NodeRecord],
    ends: EstimatedEnds,
    reserved: Sequence[ReservedStart],
    places: Mapping[str, tuple[Assignment, ...]],
    *,
    until_ns: int,
    now_ns: int,
    describe_unbearable: DescribeUnbearable,
) -> ReservedStart | None:
    """Returns a reserved start that work would delay if it held these places from now until a time; None without any."""
    for one in reserved:
        if one.start_ns >= until_ns:
            continue
        for name in places.keys() & one.places.keys():
            record = project_record(nodes[name], ends, one.start_ns, now_ns)
            for other in reserved:
                if other.start_ns <= one.start_ns < other.end_ns:
                    for assignment in other.places.get(name, ()):
                        record.allocate_unchecked(assignment)
            try:
                for assignment in places[name]:
                    record.allocate(assignment)
            except ContradictoryEvent:
                return one
            if describe_unbearable(record, places[name]):
                return one
    return None
