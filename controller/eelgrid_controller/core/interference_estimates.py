"""How far loads that share a GPU slow each other down, measured from the progress of running jobs.

`InterferenceEstimates` observes each report of a job and lists what was measured of each pair of loads. Must not know how
reports arrive, nor what pairs are used for: estimates are in memory alone, begin anew with the controller, and change no
decision unless an operator adopts them into the policy.

Theory. A job that was at step a at time t, and at step b at time u, made b - a steps in u - t, whatever it was beside. Steps
and times are summed apart for a GPU of its own and for each single neighbour. Once both paces are known, its slowdown beside
that neighbour is pace alone / pace beside - 1, and at least 0, as in state/interference.py. Comparing a job with itself
leaves out what differs between jobs of one load: their share, GPU, model and batch.

An interval counts if the same work, in the same attempts, held the GPU at its beginning and its end. Reports are some seconds
older than what the state says of neighbours at their arrival, so the first interval after a change is left out as well. Of n
steps one may be half done, so that a pace is known to one in n: 20 steps leave an error of a twentieth. A pair has the median
over owners of the median over each one's jobs, which neither one job with phases of its own moves nor one user, who names
loads and reports steps at will.

The first two minutes of a job, in which it loads its data and compiles, and those of its neighbour are left out: they would
make its own pace too slow, and the neighbour's load too small.

Jobs of several processes are left out, since their pace is that of the slowest, wherever that is. Neighbours count to their
end, also while they idle, which makes an estimate too small. What changes a job's pace otherwise
(a phase of its own, a power limit) is told from neighbours only by the median over jobs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeAlias, TypeVar

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.interference import is_shared
from eelgrid_protos.messages import (
    ANY_LOAD,
    SLOWDOWN_MOST,
    AttemptStatus,
    JobProgress,
    MeasuredInterference,
    Workload,
    WorkloadPhase,
)

_NS = 10**9
# Of each of the two paces.
OBSERVED_LEAST_NS = 60 * _NS
STEPS_LEAST = 20
# From the start of a job and of its neighbour on.
WARM_UP_NS = 120 * _NS
# Jobs of which intervals are kept, pairs, jobs of a pair, and loads beside which one job was; the oldest goes first.
JOBS_MOST = 10_000
PAIRS_MOST = 1_000
JOBS_PER_PAIR_MOST = 32
_LOADS_PER_JOB_MOST = 32

_Key = TypeVar("_Key")
# Loads without a name of their own; none is measured.
_UNNAMED = ("", ANY_LOAD)
# Workload, replica and attempt of each that holds a share of the same GPU.
_Neighbours: TypeAlias = tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class _Pace:
    """Steps, and the nanoseconds that they took."""

    steps: int = 0
    passed_ns: int = 0

    @property
    def is_known(self) -> bool:
        return self.steps >= STEPS_LEAST and self.passed_ns >= OBSERVED_LEAST_NS


@dataclass(slots=True)
class _JobPaces:
    """What was observed of one attempt on one GPU, its newest report, and who was beside it then."""

    attempt: int
    gpu_uuid: str
    newest: JobProgress
    neighbours: _Neighbours
    # The report before had the same neighbours.
    is_settled: bool = False
    alone: _Pace = field(default_factory=_Pace)
    beside: dict[str, _Pace] = field(default_factory=dict)

    def is_continued(self, attempt: int, gpu_uuid: str, report: JobProgress) -> bool:
        """Returns whether a report goes on where the newest one was: not of another run, and in the same count."""
        newest = self.newest
        return (
            (self.attempt, self.gpu_uuid, newest.total) == (attempt, gpu_uuid, report.total)
            and newest.step <= report.step
            and newest.time_ns <= report.time_ns
        )

    def find_pace(self, load: str | None) -> _Pace:
        """Returns the pace beside a load, or with None alone."""
        if load is None:
            return self.alone
        if load not in self.beside and len(self.beside) >= _LOADS_PER_JOB_MOST:
            del self.beside[next(iter(self.beside))]
        return self.beside.setdefault(load, _Pace())


class _Measured(NamedTuple):
    """What a job measured, and whose job it was."""

    owner: str
    slowdown: float


class InterferenceEstimates:
    """Slowdowns of pairs of loads on the GPUs of one state."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._jobs: dict[str, _JobPaces] = {}
        # By pair: the slowdown that each job measured and whose it is, the one measured last at the end; pairs likewise.
        self._pairs: dict[tuple[str, str], dict[str, _Measured]] = {}

    def observe(self, workload: Workload, status: AttemptStatus) -> None:
        """Takes a report of a current attempt."""
        sharing, report, workload_id = workload.spec.shared_load, status.progress, workload.workload_id
        if sharing is None or sharing.load in _UNNAMED or workload.spec.replicas != 1:
            return
        if status.is_over or workload.phase is not WorkloadPhase.PLACED or workload.stopping_ns:
            self._jobs.pop(workload_id, None)
            return
        found = None if report is None else self._find_neighbours(workload)
        if report is None or found is None:
            return
        gpu_uuid, neighbours = found
        job = self._jobs.get(workload_id)
        if job is None or not job.is_continued(status.attempt, gpu_uuid, report):
            self._jobs.pop(workload_id, None)
            self._jobs[workload_id] = _JobPaces(status.attempt, gpu_uuid, report, neighbours)
            if len(self._jobs) > JOBS_MOST:
                del self._jobs[next(iter(self._jobs))]
            return
        if report.time_ns > job.newest.time_ns:
            self._add_interval(workload_id, sharing.load, job, report, neighbours)

    def list_measured(self) -> list[MeasuredInterference]:
        """Lists the pairs that were measured, by their loads."""
        return [
            MeasuredInterference(
                load=load,
                beside=beside,
                slowdown=_compute_median(jobs.values()),
                slowdown_least=min(one.slowdown for one in jobs.values()),
                slowdown_largest=max(one.slowdown for one in jobs.values()),
                jobs=len(jobs),
            )
            for (load, beside), jobs in sorted(self._pairs.items())
        ]

    def _find_neighbours(self, workload: Workload) -> tuple[str, _Neighbours] | None:
        """Returns the GPU of a job of one process, and who else holds shares of it; None if it has no share now."""
        record = self._state.nodes.get(workload.placements[0].node_name) if workload.placements else None
        own = None if record is None else record.assignments.get((workload.workload_id, workload.placements[0].replica))
        if record is None or own is None or not own.gpu_uuids or own.gpu_instance is not None:
            return None
        uuid = own.gpu_uuids[0]
        if record.gpu_milli.get(uuid) == own.gpu_milli:
            return uuid, ()
        workloads = self._state.workloads
        return uuid, tuple(
            sorted(
                (key, replica, workloads[key].attempt if key in workloads else 0)
                for (key, replica), one in record.assignments.items()
                if one is not own and is_shared(one) and one.gpu_uuids[0] == uuid
            )
        )

    def _add_interval(
        self, workload_id: str, load: str, job: _JobPaces, report: JobProgress, neighbours: _Neighbours
    ) -> None:
        """Counts the steps since the newest report if the same work was beside the job, and renews its estimate."""
        newest, is_same = job.newest, job.neighbours == neighbours
        is_same = is_same and all(
            self._is_warm(key, newest.time_ns) for key in (workload_id, *(one[0] for one in neighbours))
        )
        is_counted = is_same and job.is_settled
        job.newest, job.neighbours, job.is_settled = report, neighbours, is_same
        if not is_counted or len(neighbours) > 1:
            return
        beside = self._find_load(neighbours[0][0]) if neighbours else None
        if beside in _UNNAMED:
            return
        pace = job.find_pace(beside)
        pace.steps += report.step - newest.step
        pace.passed_ns += report.time_ns - newest.time_ns
        if job.alone.is_known:
            changed = job.beside.items() if beside is None else ((beside, pace),)
            for name, one in changed:
                if one.is_known:
                    self._keep((load, name), workload_id, _compute_slowdown(job.alone, one))

    def _is_warm(self, workload_id: str, at_ns: int) -> bool:
        """Returns whether all processes of work had begun long enough before a moment; of work without any, the work."""
        workload = self._state.workloads.get(workload_id)
        if workload is None:
            return False
        begun_ns = [one.started_ns for one in workload.attempts]
        if workload.spec.process is None:
            begun_ns = [workload.placed_ns]
        return bool(begun_ns) and at_ns - max(begun_ns) >= WARM_UP_NS

    def _find_load(self, workload_id: str) -> str:
        """Returns the name of the load of a neighbour; empty if it has none."""
        workload = self._state.workloads.get(workload_id)
        sharing = None if workload is None else workload.spec.shared_load
        return "" if sharing is None else sharing.load

    def _keep(self, pair: tuple[str, str], workload_id: str, slowdown: float) -> None:
        """Keeps what a job measured; of too many the oldest goes of whoever has most of them, so that nobody pushes others out."""
        workload = self._state.workloads.get(workload_id)
        owner = "" if workload is None else workload.owner or workload.spec.user
        if pair not in self._pairs and len(self._pairs) >= PAIRS_MOST:
            owners = {known: {one.owner for one in jobs.values()} for known, jobs in self._pairs.items()}
            del self._pairs[
                _find_oldest({known: next(iter(those)) for known, those in owners.items() if len(those) == 1})
                or next(iter(self._pairs))
            ]
        jobs = self._pairs[pair] = self._pairs.pop(pair, {})
        jobs.pop(workload_id, None)
        jobs[workload_id] = _Measured(owner, slowdown)
        if len(jobs) > JOBS_PER_PAIR_MOST:
            del jobs[_find_oldest({key: one.owner for key, one in jobs.items()}) or workload_id]


def _find_oldest(owners: Mapping[_Key, str]) -> _Key | None:
    """Returns the first key of the owner who has most of them; None without any."""
    most = Counter(owners.values()).most_common(1)
    return next((key for key, owner in owners.items() if owner == most[0][0]), None)


def _compute_median(jobs: Iterable[_Measured]) -> float:
    """Computes the median over owners of the median over each one's jobs: whoever runs many jobs counts once."""
    by_owner: dict[str, list[float]] = {}
    for one in jobs:
        by_owner.setdefault(one.owner, []).append(one.slowdown)
    return median(map(median, by_owner.values()))


def _compute_slowdown(alone: _Pace, beside: _Pace) -> float:
    """Computes by how much longer a step takes beside a load than alone, as a part of its time alone; at least 0."""
    slowdown = alone.steps * beside.passed_ns / (alone.passed_ns * beside.steps) - 1.0
    return min(max(slowdown, 0.0), SLOWDOWN_MOST)
