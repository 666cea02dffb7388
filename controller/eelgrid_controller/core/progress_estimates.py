"""Expected run times of running jobs by what their processes report of their progress.

`ProgressEstimates` takes each report and returns an event where a job turns out to take another time than is expected.
Must not know how reports arrive, nor what expected run times are used for.

Theory. A process that is at step s of S at time t, and was at step s0 at time t0, has (S - s) (t - t0) / (s - s0) to go. The
first reports tell of its start more than of its pace, and a pace may change, so t0 is the report nearest to the middle of what
was seen of this attempt; it is told of once that was a minute. Every event costs a write and moves promised starts, so an
end counts as another only if it is a minute and a tenth of the time that is left from the one expected, and once a minute.
Of n steps one may be half done, so that a pace is known to one in n: that much more the end must differ.
Reports are thinned to a bounded number; after a restart of the controller they are collected anew, and the last event holds.
The first process speaks for a job of several.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from eelgrid_controller.queueing.runtime_estimates import compute_end_ns, estimate_runtime
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.measurement_events import RuntimeExpected
from eelgrid_protos.messages import AttemptStatus, JobProgress, Workload, WorkloadPhase

_NS = 10**9
# So long progress is seen before it says how long a job takes; and between two events of a job.
SEEN_LEAST_NS = 60 * _NS
_STEPS_LEAST = 2
_CHANGE_SHARE = 0.1
# Reports that are kept of a job, and jobs of which any are; the oldest goes first.
_REPORTS_MOST = 32
JOBS_MOST = 10_000
_RUN_S_MOST = 3e8


@dataclass(slots=True)
class _Seen:
    """Reports of one attempt, in order, at least so far apart; and when the last event was made."""

    attempt: int
    reports: list[JobProgress] = field(default_factory=list)
    apart_ns: int = _NS
    told_ns: int = 0

    def add(self, report: JobProgress) -> None:
        """Keeps a report, or leaves it out; of too many every second one goes."""
        if self.reports and report.time_ns - self.reports[-1].time_ns < self.apart_ns:
            return
        self.reports.append(report)
        if len(self.reports) > _REPORTS_MOST:
            del self.reports[1::2]
            self.apart_ns *= 2


class ProgressEstimates:
    """What was reported of the jobs of one state."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._seen: dict[str, _Seen] = {}

    def observe(self, workload: Workload, status: AttemptStatus, now_ns: int) -> RuntimeExpected | None:
        """Takes a report of a current attempt; returns an event, not yet applied, if another run time is to be expected."""
        report = status.progress
        if status.is_over:
            self._seen.pop(workload.workload_id, None)
        if report is None or status.replica or status.is_over or not _may_tell(workload):
            return None
        seen = self._seen.get(workload.workload_id)
        if seen is None or seen.attempt != status.attempt:
            seen = self._seen[workload.workload_id] = _Seen(status.attempt)
            if len(self._seen) > JOBS_MOST:
                del self._seen[next(iter(self._seen))]
        if seen.reports and not seen.reports[-1].step <= report.step <= report.total:
            seen.reports.clear()  # it began again, or counts otherwise
        seen.add(report)
        left = _compute_left(seen, report)
        if left is None or now_ns - seen.told_ns < SEEN_LEAST_NS:
            return None
        left_ns = int(min(left.seconds, _RUN_S_MOST) * _NS)
        end_ns = now_ns + left_ns
        known_ns = self._find_known_end_ns(workload)
        if abs(end_ns - known_ns) <= max(SEEN_LEAST_NS, int((_CHANGE_SHARE + 1.0 / left.steps) * left_ns)):
            return None
        seen.told_ns = now_ns
        runtime_s = max(1.0, (end_ns - workload.placed_ns) / _NS)
        return RuntimeExpected(time_ns=now_ns, workload_id=workload.workload_id, runtime_s=runtime_s)

    def _find_known_end_ns(self, workload: Workload) -> int:
        if workload.progress_runtime_s is not None:
            return workload.placed_ns + int(workload.progress_runtime_s * _NS)
        return compute_end_ns(workload.placed_ns, estimate_runtime(workload, self._state))


def _may_tell(workload: Workload) -> bool:
    """Returns whether the progress of a workload says when it ends; elastic jobs with a deadline have a measure of their own."""
    is_running = workload.phase is WorkloadPhase.PLACED and not workload.stopping_ns and workload.placed_ns > 0
    return is_running and workload.share is None


class _Left(NamedTuple):
    """The time that a job still takes, and by how many steps that is known."""

    seconds: float
    steps: int


def _compute_left(seen: _Seen, report: JobProgress) -> _Left | None:
    """Returns what is left after a report; None while too little was seen, or nothing is left to count."""
    if not 0 < report.step < report.total or not seen.reports:
        return None
    first = seen.reports[0]
    if report.time_ns - first.time_ns < SEEN_LEAST_NS:
        return None
    middle_ns = (first.time_ns + report.time_ns) // 2
    since = min(seen.reports, key=lambda one: abs(one.time_ns - middle_ns))
    steps, passed_ns = report.step - since.step, report.time_ns - since.time_ns
    if steps < _STEPS_LEAST or passed_ns <= 0:
        return None
    return _Left((report.total - report.step) * passed_ns / steps / _NS, steps)
