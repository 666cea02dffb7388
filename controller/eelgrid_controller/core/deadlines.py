"""Deadlines of jobs: what must be stated for a promise, when one is refused, which are due, and why one is broken.

`DeadlineIndex` follows the live workloads of one state whose deadline was promised. Must not know how starts are searched or
reserved (core/start_search.py, core/backfill.py).

Theory (admission control of ElasticFlow, ASPLOS 2023, for jobs of fixed size). At submission the earliest start is searched in the
profile of future capacity: the expected ends of running work, the starts that are reserved already, and reservations. If the job
ends by its deadline from there on, that start is reserved in every round; else the job is refused, with the earliest end. As no
reserved start is moved for another one, with run times as stated every promise is kept, whatever is admitted later. A promise is
broken at most once, with the cause: when its reserved start becomes too late, or when the deadline passes.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

from eelgrid_controller.formatting import format_age, format_time
from eelgrid_controller.queueing.backfill import EstimatedEnds, ReservedStart
from eelgrid_controller.queueing.runtime_estimates import (
    NEVER_NS,
    OVERRUN_TOLERANCE_NS,
    STATED_SOURCES,
    compute_end_ns,
    estimate_runtime,
)
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    DeadlineBroken,
    Event,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadPromised,
    WorkloadSubmitted,
)
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument, ResourceExhausted
from eelgrid_protos.messages import RuntimeEstimate, StartPromise, Workload, WorkloadPhase

# Pending workloads with a promised deadline; each is looked at in every round.
PROMISED_MOST = 128
_S = 10**9
_FIELD = "spec.deadline.end_ns"
_BEST_EFFORT = "or set best_effort to run it without the promise"


# A start that is reserved is too late, or none is known.
_LATE = "start"
FindCause = Callable[[Workload, int], str]


def _refuse(field: str, problem: str, remedy: str) -> NoReturn:
    raise InvalidArgument("the deadline cannot be promised", (Violation(field, problem, remedy),))


def check_deadline(workload: Workload, estimate: RuntimeEstimate | None, promised: int, now_ns: int) -> None:
    """Checks what a deadline needs before any capacity counts; raises InvalidArgument, which names the field.

    `promised` is how many pending workloads have a promised deadline; raises ResourceExhausted if they are too many.
    """
    deadline, schedule = workload.spec.deadline, workload.spec.schedule
    if deadline is None:
        return
    if deadline.end_ns <= now_ns:
        _refuse(_FIELD, f"is {format_time(deadline.end_ns)}, which has passed", "set a later one")
    if deadline.best_effort:
        return
    if estimate is None or estimate.source not in STATED_SOURCES:
        remedy = f"say how long it runs (--expect), set a time limit, {_BEST_EFFORT}"
        _refuse("spec.expected_runtime_s", "is not stated, nor is a time limit", remedy)
    if workload.held_by:
        _refuse("hold", "is set, so that nobody knows when it may start", f"submit it without --hold, {_BEST_EFFORT}")
    if schedule is not None and schedule.after:
        remedy = f"leave the dependencies out, {_BEST_EFFORT}"
        _refuse("spec.schedule.after", "is set, so that nobody knows when it may start", remedy)
    if promised >= PROMISED_MOST:
        raise ResourceExhausted(
            f"{promised} workloads that wait have a promised deadline, which is the limit; wait for one to start, {_BEST_EFFORT}"
        )


def check_end(workload: Workload, end_ns: int | None) -> None:
    """Checks that the earliest possible end, None if no start is known, is by the deadline; raises InvalidArgument."""
    deadline = workload.spec.deadline
    if deadline is None or (end_ns is not None and end_ns <= deadline.end_ns):
        return
    text = format_time(deadline.end_ns)
    if end_ns is None:
        problem = f"is {text}, and it is not known when it could start: not enough of what runs states when it ends"
        _refuse(_FIELD, problem, f"wait for running work to end, {_BEST_EFFORT}")
    late = format_age((end_ns - deadline.end_ns) / 1e9)
    # Rounded up, so that what is shown can be kept.
    problem = f"is {text}, and the earliest possible end is {format_time(end_ns + _S - 1)}, {late} later"
    _refuse(_FIELD, problem, f"set it to that time or later, {_BEST_EFFORT}")


def get_deadline_ns(workload: Workload) -> int:
    """Returns by when a workload is to have ended; NEVER_NS without a deadline."""
    return NEVER_NS if workload.spec.deadline is None else workload.spec.deadline.end_ns


def meets_deadline(workload: Workload, start: ReservedStart | None) -> bool:
    """Returns whether a start is known from which a workload ends by its deadline."""
    return start is not None and start.end_ns <= get_deadline_ns(workload)


def get_promise(events: Sequence[Event]) -> StartPromise | None:
    """Returns the promise at the end of the events of an admission; None without any."""
    return events[-1].promise if events and isinstance(events[-1], WorkloadPromised) else None


class DeadlineIndex:
    """The live workloads of one state whose deadline was promised, by that deadline."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._live: set[str] = set()
        # Deadlines that nothing was said of yet; an entry counts as long as its workload is live and keeps its promise.
        self._times: list[tuple[int, str]] = []
        for key in state.live_ids:
            self._add(key)

    def _add(self, workload_id: str) -> None:
        workload = self._state.workloads[workload_id]
        deadline = workload.spec.deadline
        if deadline is not None and not deadline.best_effort and not workload.phase.is_ended:
            self._live.add(workload_id)
            heapq.heappush(self._times, (deadline.end_ns, workload_id))

    def refresh(self, event: Event) -> None:
        """Follows an event that was applied."""
        match event:
            case WorkloadSubmitted():
                self._add(event.workload_id)
            case WorkloadCancelled() | WorkloadCompleted():
                self._live.discard(event.workload_id)
            case _:
                return

    def is_due(self, now_ns: int) -> bool:
        """Returns whether a promised deadline has passed of which nothing was said."""
        while self._times and not self._keeps(self._times[0][1]):
            heapq.heappop(self._times)
        return bool(self._times) and self._times[0][0] < now_ns

    def _keeps(self, workload_id: str) -> bool:
        return workload_id in self._live and self._state.workloads[workload_id].deadline_breach is None

    def list_live(self) -> list[Workload]:
        """Returns the live workloads with a promised deadline, by id."""
        return [self._state.workloads[key] for key in sorted(self._live)]

    def list_pending(self) -> list[Workload]:
        """Returns the pending workloads with a promised deadline: the highest priority, then the earliest deadline first."""
        found = [self._state.workloads[key] for key in self._live if key in self._state.pending]
        return sorted(found, key=lambda one: (-one.spec.priority, get_deadline_ns(one), one.workload_id))

    def list_breaches(
        self, reserved: Mapping[str, ReservedStart], ends: EstimatedEnds, now_ns: int, find_cause: FindCause
    ) -> Iterator[DeadlineBroken]:
        """Yields an event for each promise that is broken as of now and was not before.

        `find_cause` says why a promised start has become later.
        """
        for key in sorted(self._live):
            workload = self._state.workloads[key]
            if workload.deadline_breach is None:
                cause = self._find_breach(workload, reserved.get(key), ends, now_ns)
                if cause == _LATE:
                    promise, is_reserved = workload.promise, key in reserved
                    known = promise.cause if promise is not None and is_reserved else ""
                    cause = known or (workload.reason if promise is None else find_cause(workload, now_ns))
                if cause:
                    yield DeadlineBroken(time_ns=now_ns, workload_id=key, cause=cause)

    def _find_breach(self, workload: Workload, start: ReservedStart | None, ends: EstimatedEnds, now_ns: int) -> str:
        """Returns why a promised deadline is not kept: the name of the cause, a colon and a sentence; empty if it is."""
        deadline_ns = get_deadline_ns(workload)
        estimate = estimate_runtime(workload, self._state)
        if workload.phase is WorkloadPhase.PLACED:
            if max(now_ns, ends.get_end_ns(workload.workload_id, now_ns)) <= deadline_ns:
                return ""
            lost = [one.node_name for one in workload.placements if not self._state.nodes[one.node_name].is_ready]
            if lost:
                return f"node: {lost[0]} is lost"
            if workload.share is not None:
                return "progress: it is slower than its profile says, and more replicas were not to be had"
            if compute_end_ns(workload.placed_ns, estimate) > deadline_ns:
                return "start: it started later than promised"
            return "overrun: it runs for longer than stated"
        if now_ns <= deadline_ns:
            if start is not None and start.end_ns <= deadline_ns + OVERRUN_TOLERANCE_NS:
                return ""
            is_parked = self._state.pending.is_parked(workload.workload_id)
            begin_ns = max(now_ns, get_earliest_start_ns(workload))
            if start is None and is_parked and compute_end_ns(begin_ns, estimate) <= deadline_ns:
                return ""
        if workload.held_by or workload.not_before_ns:
            return workload.reason
        return _LATE


def get_earliest_start_ns(workload: Workload) -> int:
    """Returns before when a workload may not start by its begin time and its failed attempts; 0 for at once."""
    begin_ns = 0 if workload.spec.schedule is None else workload.spec.schedule.begin_ns
    return max(begin_ns, workload.not_before_ns)
