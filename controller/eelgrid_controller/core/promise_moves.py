"""Promised starts that move: to make room for a deadline, where every promise must still hold, and why one has become later.

`plan_moves` is a search without effect; `find_delay_cause` names what delayed a start. Must not know how a start is searched or reserved (start_search.py, backfill.py).

Theory. Kept starts stay where they are, so that work may be refused that would fit if they took other GPUs or other times. A new
plan gives each in turn its earliest start beside those before it. By the earliest deadline first (EDF) a plan on one machine
fails only if every order does; on devices and for gangs it is a heuristic, so that the smallest laxity (the deadline less the run
time) is tried too. A plan in which all end by their deadlines is a proof, whatever order made it; otherwise nothing moves.
"""

from collections.abc import Callable, Sequence

from eelgrid_controller.core.deadlines import get_deadline_ns, meets_deadline
from eelgrid_controller.queueing.backfill import EstimatedEnds, ReservedStart
from eelgrid_controller.queueing.reservations import list_closing_reservations
from eelgrid_controller.queueing.runtime_estimates import OVERRUN_TOLERANCE_NS, compute_end_ns, estimate_runtime
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_protos.messages import Workload

# Starts that one admission may move: each costs a walk or two of some milliseconds.
MOVED_MOST = 12
# What keeps work waiting whatever capacity is reserved for it.
_LIMITS = frozenset(
    {PendingConstraint.QUOTA, PendingConstraint.MAX_QUOTA, PendingConstraint.BUDGET, PendingConstraint.SPENDING}
)

SearchStart = Callable[[Workload, Sequence[ReservedStart]], ReservedStart | None]


def plan_moves(
    state: ClusterState, workload: Workload, binding: Sequence[ReservedStart], search: SearchStart
) -> tuple[ReservedStart, tuple[ReservedStart, ...]] | None:
    """Returns a start of new work by its deadline, and the starts that have moved for it; None if no order makes room.

    `binding` are the starts that go before it; those of its own priority may move that still end by their deadlines.
    """
    movable = [one for one in binding if _may_move(state.workloads[one.workload_id], one, workload)]
    movable = sorted(movable, key=lambda one: (-get_deadline_ns(state.workloads[one.workload_id]), one.workload_id))[
        :MOVED_MOST
    ]
    if not movable:
        return None
    moving = {one.workload_id: one for one in movable}
    fixed = [one for one in binding if one.workload_id not in moving]
    waiting = [workload, *(state.workloads[key] for key in moving)]
    own_run_ns = compute_end_ns(0, estimate_runtime(workload, state))
    run_ns = {key: one.end_ns - one.start_ns for key, one in moving.items()} | {workload.workload_id: own_run_ns}
    by_deadline = sorted(waiting, key=lambda one: (get_deadline_ns(one), one.workload_id))
    by_laxity = sorted(waiting, key=lambda one: (get_deadline_ns(one) - run_ns[one.workload_id], one.workload_id))
    for order in (by_deadline, by_laxity):
        planned: dict[str, ReservedStart] = {}
        for one in order:
            found = search(one, [*fixed, *planned.values()])
            if found is None or not meets_deadline(one, found):
                break
            planned[one.workload_id] = found
        else:
            own = planned.pop(workload.workload_id)
            moved = (found for key, found in planned.items() if not _is_same(found, moving[key]))
            return own, tuple(moved)
    return None


def _may_move(waiting: Workload, start: ReservedStart, workload: Workload) -> bool:
    """Returns whether a kept start may move: it has a deadline, and no slot of an array to wait for."""
    array = waiting.spec.array
    is_free = array is None or not array.running_most
    return (
        start.is_kept
        and is_free
        and waiting.spec.has_promised_deadline
        and waiting.deadline_breach is None
        and waiting.spec.priority == workload.spec.priority
    )


def _is_same(found: ReservedStart, before: ReservedStart) -> bool:
    return found.start_ns == before.start_ns and found.placements == before.placements


def find_delay_cause(
    state: ClusterState, ends: EstimatedEnds, workload: Workload, before: ReservedStart | None, now_ns: int
) -> str:
    """Returns why a promised start has become later: the constraint's name, a colon and a sentence."""
    promise = workload.promise
    for key in promise.waits_for if promise is not None else ():
        if ends.is_overrunning(key, now_ns) or _is_slower(state, ends, key, workload, now_ns):
            return f"overrun: {key} runs for longer than expected"
    if workload.reason.partition(":")[0] in _LIMITS:
        return workload.reason
    places = [] if promise is None else [one.node_name for one in promise.placements]
    names = sorted({*places, *([] if before is None else before.places)})
    for name in names:
        record = state.nodes.get(name)
        if record is None or not record.is_ready:
            return f"node: {name} is lost"
        if record.cordon is not None:
            return f"node: {name} is {record.cordon_reason()}"
        if not record.is_schedulable:
            return f"node: {name} takes no work"
    closed = [one.name for one in list_closing_reservations(state, workload, 0 if before is None else before.start_ns)]
    if closed:
        return f"reservation: {closed[0]} holds nodes that it would have started on"
    return "order: work that goes before it has started, or running work has grown or moved"


def _is_slower(state: ClusterState, ends: EstimatedEnds, workload_id: str, waiting: Workload, now_ns: int) -> bool:
    """Returns whether a job whose pace is measured ends later than the start that waits for it was promised."""
    running, promise = state.workloads.get(workload_id), waiting.promise
    if running is None or promise is None or (running.share is None and running.progress_runtime_s is None):
        return False
    return ends.get_end_ns(workload_id, now_ns) > promise.start_ns + OVERRUN_TOLERANCE_NS
