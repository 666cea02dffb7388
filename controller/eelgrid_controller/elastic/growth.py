"""Who grows and who shrinks: workers for elastic jobs out of a common stock of GPUs.

Owns the question and its exact answer. Must not know nodes, or how a job is resized.

Theory. Job j runs on n workers of g_j GPUs each, with a throughput T_j(n) that was
measured and watts P_j(n). Growing is worth what it adds, marginal gain by marginal gain;
where the curves are concave a greedy choice is best, but measured curves are not (a
second node halves the gain of the ninth GPU), so the choice is made by dynamic
programming over GPUs, which is exact for any curve:

    max  sum_j v_j(n_j)     sum_j g_j n_j <= G,   n_j among the measured counts from least to most
    v_j(n) = weight_j T_j(n) / T_j(most) - price P_j(n) - [n != now] weight_j T_j(now) / T_j(most) restart_s / horizon_s

    best_j[x] = max_n best_{j-1}[x - g_j n] + v_j(n)

A resize stops the job for `restart_s`; it must pay for that within `horizon_s`, so small
gains move nothing. A job that waits may go on waiting, which is worth 0; one that runs is
stopped only where the least of all that run do not fit (it is worth STOPPED then). Time is
jobs times counts times GPUs: 1,000 jobs of 6 counts take 0.08 s on 1,000 GPUs and 0.3 s on
10,000.

Sources: marginal gain as Gandiva and Optimus (EuroSys 2018) grow jobs; the program is the
multiple-choice knapsack, Kellerer, Pferschy and Pisinger, "Knapsack Problems", chapter 11.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.elastic.refusals import ElasticRefused

__all__ = ["GPUS_MOST", "Growing", "Grown", "grow"]

GPUS_MOST = 100_000
_JOBS_MOST = 10_000
_COUNTS_MOST = 1_024  # of one job
_STOPPED = -1e6  # times the weight: far below any price of its watts


@dataclass(frozen=True, slots=True)
class Growing:
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
            raise ElasticRefused(
                "throughput_hz", f"{name!r} has {len(rates)} counts", "give workers from 1 on, measured"
            )
        if not all(0.0 < rate < math.inf for rate in rates.values()):
            raise ElasticRefused("throughput_hz", f"{name!r} has a rate that is none", "leave out what did not run")
        if self.gpus < 1 or self.now < 0 or not 0.0 < self.weight < math.inf:
            raise ElasticRefused(
                "gpus", f"{name!r}: {self.gpus} GPUs, {self.now} workers", "give 1 or more, and a weight"
            )
        if not all(0.0 <= watts < math.inf for watts in self.power_w.values()) or not 0.0 <= self.restart_s < math.inf:
            raise ElasticRefused("power_w", f"{name!r} has watts or a restart that are none", "give 0 or more")


class Grown(NamedTuple):
    """Workers of one job, and what it was worth."""

    name: str
    workers: int  # 0: it waits
    value: float
    gained_hz: float  # against now


def _value(job: Growing, workers: int, price_per_w: float, horizon_s: float) -> float:
    if workers == 0:
        return _STOPPED * job.weight if job.now > 0 else 0.0
    largest_hz = max(job.throughput_hz.values())
    value = job.weight * job.throughput_hz[workers] / largest_hz - price_per_w * job.power_w.get(workers, 0.0)
    if job.now > 0 and workers != job.now:
        now_hz = job.throughput_hz.get(job.now, 0.0)
        value -= job.weight * now_hz / largest_hz * job.restart_s / horizon_s
    return value


def grow(
    jobs: Sequence[Growing], gpus: int, *, price_per_w: float = 0.0, horizon_s: float = 3600.0
) -> tuple[Grown, ...]:
    """The workers of each job, in the order of the jobs, of the most value; exact.

    `gpus` are those that the jobs hold now and those that are free, all alike. `price_per_w` is what a watt is worth
    in the throughput of a job of weight 1. Raises ElasticRefused for more than can be searched.
    """
    if not 0 <= gpus <= GPUS_MOST or len(jobs) > _JOBS_MOST:
        raise ElasticRefused("gpus", f"{gpus} GPUs, {len(jobs)} jobs", f"at most {GPUS_MOST} and {_JOBS_MOST}")
    if not (0.0 < horizon_s < math.inf and 0.0 <= price_per_w < math.inf):
        raise ElasticRefused(
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
    left, found = int(best.argmax()), list[Grown]()
    for job, choice in zip(reversed(jobs), reversed(taken), strict=True):
        workers = int(choice[left])
        left -= job.gpus * workers
        gained_hz = job.throughput_hz.get(workers, 0.0) - job.throughput_hz.get(job.now, 0.0)
        found.append(Grown(job.name, workers, _value(job, workers, price_per_w, horizon_s), gained_hz))
    return tuple(reversed(found))
