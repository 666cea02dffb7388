"""Deadlines of arrays: whether all elements end by one time with the slots that the array has; all or nothing.

`admit_array` searches a start for each element and changes nothing. Must not know how a start is searched or reserved
(start_search.py, backfill.py).

Theory. Elements are equal, so that their earliest starts, each beside those before it, rise with their number, and so do their
ends. Of an array with N slots the element k therefore has a slot when element k - N has ended, and no walk for an element need
look before the start of the one before it. The last end is the earliest possible end of the array in this order.
"""

from dataclasses import replace

from eelgrid_controller.core.backfill import BackfillPlanner
from eelgrid_controller.core.deadlines import PROMISED_MOST, check_deadline, check_end, get_earliest_start_ns
from eelgrid_controller.queueing.backfill import ReservedStart
from eelgrid_controller.queueing.runtime_estimates import estimate_runtime
from eelgrid_controller.state.array_elements import list_submitted
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import ArraySubmitted, WorkloadPromised
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument, ResourceExhausted
from eelgrid_protos.messages import Workload


def admit_array(
    state: ClusterState, backfill: BackfillPlanner, event: ArraySubmitted, *, may_start: bool, now_ns: int
) -> tuple[WorkloadPromised, ...]:
    """Returns the promised starts of all elements of an array that is being submitted; none without a promised deadline.

    `may_start` if nothing but capacity keeps an element from starting now. Raises InvalidArgument, which names the field, the
    earliest possible end and the remedy, and ResourceExhausted.
    """
    deadline = event.spec.deadline
    if deadline is None:
        return ()
    elements = list(list_submitted(event))
    estimate = estimate_runtime(elements[0], state)
    waiting = len(backfill.deadlines.list_pending())
    check_deadline(elements[0], estimate, waiting, now_ns)
    if deadline.best_effort:
        return ()
    if event.spec.training is not None and event.spec.training.is_elastic:
        remedy = "leave out training.replicas_most, or submit its jobs one by one"
        found = Violation("spec.deadline", "is set for an array of elastic jobs", remedy)
        raise InvalidArgument("the deadline cannot be promised", (found,))
    if waiting + len(elements) > PROMISED_MOST:
        raise ResourceExhausted(
            f"{waiting} workloads that wait have a promised deadline, and the limit is {PROMISED_MOST}, which {len(elements)} "
            "elements would exceed; submit fewer elements, or set best_effort to run it without the promise"
        )
    starts = _search_starts(backfill, elements, event.running_most or len(elements), may_start, now_ns)
    check_end(elements[0], starts[-1].end_ns if len(starts) == len(elements) else None)
    return tuple(
        WorkloadPromised(time_ns=now_ns, workload_id=one.workload_id, promise=backfill.make_kept_promise(one))
        for one in starts
    )


def _search_starts(
    backfill: BackfillPlanner, elements: list[Workload], slots: int, may_start: bool, now_ns: int
) -> list[ReservedStart]:
    """Returns the earliest start of each element beside those before it, up to the first for which none is known."""
    starts: list[ReservedStart] = []
    for number, workload in enumerate(elements):
        begin_ns = get_earliest_start_ns(workload)
        if starts:
            begin_ns = max(begin_ns, starts[-1].start_ns)
        if number >= slots:
            begin_ns = max(begin_ns, starts[number - slots].end_ns)
        found = backfill.search_admission(
            workload, now_ns, beside=starts, not_before_ns=begin_ns, is_from_now=may_start
        )
        if found is None:
            break
        starts.append(replace(found, is_kept=True))
    return starts
