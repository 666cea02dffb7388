"""Makes room for a deadline by moving promised starts: all of them and the new one are planned anew, and every promise must hold.

`plan_moves` is a search without effect. Must not know how a start is searched or reserved (start_search.py, backfill.py).

Theory. Kept starts stay where they are, so that work may be refused that would fit if they took other GPUs or other times. A new
plan gives each in turn its earliest start beside those before it. By the earliest deadline first (EDF) a plan on one machine
fails only if every order does; on devices and for gangs it is a heuristic, so that the smallest laxity (the deadline less the run
time) is tried too. A plan in which all end by their deadlines is a proof, whatever order made it; otherwise nothing moves.
"""

from collections.abc import Callable, Sequence

from eelgrid_controller.core.deadlines import get_deadline_ns, meets_deadline
from eelgrid_controller.queueing.backfill import ReservedStart
from eelgrid_controller.queueing.runtime_estimates import compute_end_ns, estimate_runtime
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_protos.messages import Workload

# Starts that one admission may move: each costs a walk or two of some milliseconds.
MOVED_MOST = 12

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
