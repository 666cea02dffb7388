"""Chooses the number of workers of elastic jobs from a common stock of GPUs.

Job j runs on n workers of g_j GPUs with a measured throughput T_j(n) and power P_j(n). The allocation of most value is
found exactly; resizes that do not pay for their restart within the horizon are left out. `ElasticObserver` prepares the
jobs of a cluster and lets no job be resized more often than once in the horizon.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.objectives.observation import ClusterObservation, gpu_models_of
from eelgrid_controller.objectives.power.control_events import ScaleService
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.queueing.elastic_shares import find_least_share, measure_scaling
from eelgrid_protos.messages import Workload


class InvalidElasticJob(ControllerError):
    """A field that cannot be planned with."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {problem}", remedy)


ELASTIC_GPUS_MOST = 100_000
_JOBS_MOST = 10_000
_COUNTS_MOST = 1_024  # of one job
_STOPPED = -1e6  # times the weight: far below any price of its watts


@dataclass(frozen=True, slots=True)
class GrowableJob:
    """A job whose number of workers may change."""

    name: str
    throughput_hz: Mapping[int, float]  # by workers, as measured; the counts that it may have
    gpus: int = 1  # of each worker
    now: int = 0  # workers that it has; 0 while it waits
    weight: float = 1.0
    power_w: Mapping[int, float] = field(default_factory=dict)  # by workers; a count without one draws nothing
    restart_s: float = 0.0  # that a resize costs

    def __post_init__(self) -> None:
        """Refuse what says nothing."""
        name, rates = self.name, self.throughput_hz
        if not 1 <= len(rates) <= _COUNTS_MOST or min(rates) < 1:
            raise InvalidElasticJob(
                "throughput_hz", f"{name!r} has {len(rates)} counts", "give workers from 1 on, measured"
            )
        if not all(0.0 < rate < math.inf for rate in rates.values()):
            raise InvalidElasticJob(
                "throughput_hz", f"{name!r} has a rate that is not positive", "leave out what did not run"
            )
        if self.gpus < 1 or self.now < 0 or not 0.0 < self.weight < math.inf:
            raise InvalidElasticJob(
                "gpus", f"{name!r}: {self.gpus} GPUs, {self.now} workers", "give 1 or more, and a weight"
            )
        if not all(0.0 <= watts < math.inf for watts in self.power_w.values()) or not 0.0 <= self.restart_s < math.inf:
            raise InvalidElasticJob(
                "power_w", f"{name!r} has negative or infinite watts or restart time", "give 0 or more"
            )


class WorkerAllocation(NamedTuple):
    """Workers of one job, and what it was worth."""

    name: str
    workers: int  # 0: it waits
    value: float
    gained_hz: float  # against now


def _value(job: GrowableJob, workers: int, price_per_w: float, horizon_s: float) -> float:
    if workers == 0:
        return _STOPPED * job.weight if job.now > 0 else 0.0
    largest_hz = max(job.throughput_hz.values())
    value = job.weight * job.throughput_hz[workers] / largest_hz - price_per_w * job.power_w.get(workers, 0.0)
    if job.now > 0 and workers != job.now:
        now_hz = job.throughput_hz.get(job.now, 0.0)
        value -= job.weight * now_hz / largest_hz * job.restart_s / horizon_s
    return value


def allocate_workers(
    jobs: Sequence[GrowableJob], gpus: int, *, price_per_w: float = 0.0, horizon_s: float = 3600.0
) -> tuple[WorkerAllocation, ...]:
    """The workers of each job, in the order of the jobs, of the most value; exact.

    `gpus` are those that the jobs hold now and those that are free, all alike. `price_per_w` is what a watt is worth
    in the throughput of a job of weight 1. Raises InvalidElasticJob for more than can be searched.
    """
    if not 0 <= gpus <= ELASTIC_GPUS_MOST or len(jobs) > _JOBS_MOST:
        raise InvalidElasticJob(
            "gpus", f"{gpus} GPUs, {len(jobs)} jobs", f"at most {ELASTIC_GPUS_MOST} and {_JOBS_MOST}"
        )
    if not (0.0 < horizon_s < math.inf and 0.0 <= price_per_w < math.inf):
        raise InvalidElasticJob(
            "horizon_s", f"{horizon_s} s at {price_per_w}", "give a time above 0 and a price from 0 on"
        )
    best = np.zeros(gpus + 1)
    taken: list[NDArray[np.int32]] = []
    for job in jobs:
        new, choice = best + _value(job, 0, price_per_w, horizon_s), np.zeros(gpus + 1, np.int32)
        for workers in sorted(job.throughput_hz):
            need = job.gpus * workers
            if need > gpus:
                break
            tried = best[: gpus + 1 - need] + _value(job, workers, price_per_w, horizon_s)
            better = tried > new[need:]
            new[need:][better] = tried[better]
            choice[need:][better] = workers
        best = new
        taken.append(choice)
    left, found = int(best.argmax()), list[WorkerAllocation]()
    for job, choice in zip(reversed(jobs), reversed(taken), strict=True):
        workers = int(choice[left])
        left -= job.gpus * workers
        gained_hz = job.throughput_hz.get(workers, 0.0) - job.throughput_hz.get(job.now, 0.0)
        found.append(WorkerAllocation(job.name, workers, _value(job, workers, price_per_w, horizon_s), gained_hz))
    return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """A job as it stands."""

    name: str
    gpu_model: str
    gpus: int  # of a replica
    replicas: int  # now
    least: int
    most: int
    points: Sequence[Point]  # of its profile
    restart_s: float = 0.0
    weight: float = 1.0


class ElasticResize(NamedTuple):
    """What should be, and why."""

    name: str
    replicas: int
    reason: str


def scaling_curve(job: ElasticJob) -> tuple[dict[int, float], dict[int, float]]:
    """Throughput in Hz and watts by replicas, where measured."""
    return measure_scaling(job.points, job.gpu_model, job.gpus, least=job.least, most=job.most)


def plan_resizes(
    jobs: Iterable[ElasticJob], free: Mapping[str, int], *, price_per_w: float = 0.0, horizon_s: float = 3600.0
) -> tuple[ElasticResize, ...]:
    """The resizes that pay within the horizon, those that shrink first; `free` are GPUs by model that nobody holds."""
    stocks: dict[str, list[tuple[ElasticJob, GrowableJob]]] = {}
    for job in jobs:
        rates, watts = scaling_curve(job)
        if job.replicas in rates and len(rates) > 1:
            growing = GrowableJob(
                job.name,
                rates,
                gpus=job.gpus,
                now=job.replicas,
                weight=job.weight,
                power_w=watts,
                restart_s=job.restart_s,
            )
            stocks.setdefault(job.gpu_model, []).append((job, growing))
    made: list[ElasticResize] = []
    for model, stock in stocks.items():
        held = sum(job.gpus * job.replicas for job, _ in stock)
        growing_jobs = [growing for _, growing in stock]
        found = allocate_workers(growing_jobs, held + free.get(model, 0), price_per_w=price_per_w, horizon_s=horizon_s)
        for (job, growing), one in zip(stock, found, strict=True):
            if one.workers not in {0, job.replicas}:
                share = 100.0 * one.gained_hz / growing.throughput_hz[job.replicas]
                made.append(
                    ElasticResize(job.name, one.workers, f"{share:+.0f} % throughput on {one.workers} replicas")
                )
    now = {job.name: job.replicas for stock in stocks.values() for job, _ in stock}
    return tuple(sorted(made, key=lambda one: (one.replicas > now[one.name], one.name)))


class ElasticObserver:
    """Remembers when each job was last resized."""

    def __init__(self, *, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._since_s: dict[str, tuple[int, float]] = {}  # replicas, and since when

    def plan_resizes(self, jobs: Mapping[str, Workload], world: ClusterObservation) -> tuple[ScaleService, ...]:
        """What should change, where free GPUs were counted in this cycle; those that shrink come first."""
        elastic = {name: job for name, job in jobs.items() if job.spec.training and job.spec.training.is_elastic}
        for name, job in elastic.items():
            if self._since_s.get(name, (0, 0.0))[0] != len(job.placements):
                began_s = job.placed_ns / 1e9 if name not in self._since_s else world.at_s
                self._since_s[name] = len(job.placements), began_s
        self._since_s = {name: since for name, since in self._since_s.items() if name in elastic}
        if world.free is None:
            return ()
        taking_part = [
            made
            for name, job in sorted(elastic.items())
            if world.at_s - self._since_s[name][1] >= self._horizon_s and (made := _elastic(job, world)) is not None
        ]
        found: tuple[ElasticResize, ...] = plan_resizes(taking_part, world.free, horizon_s=self._horizon_s)
        return tuple(ScaleService(one.name, one.replicas, one.reason) for one in found)


def _elastic(job: Workload, world: ClusterObservation) -> ElasticJob | None:
    """The job as the planner sees it; None for one that stands on several models."""
    training = job.spec.training
    assert training is not None, "elastic jobs have a promise"
    models = gpu_models_of(job, world)
    if len(models) != 1:
        return None
    return ElasticJob(
        job.workload_id,
        next(iter(models)),
        gpus=job.spec.request.gpu_count,
        replicas=len(job.placements),
        least=training.replicas_least if job.share is None else find_least_share(job, int(world.at_s * 1e9)),
        most=training.replicas_most,
        points=world.points.get(training.profile, ()),
        restart_s=training.restart_s,
    )
