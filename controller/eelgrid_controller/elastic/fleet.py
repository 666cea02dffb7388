"""Elastic jobs of a fleet: from what runs and what was measured to the resizes that pay.

Owns which points stand for a job, and the stock of each GPU model. Must not know how a
job is resized, nor when.

A job's counts are those for which its profile has a point on the model that it runs on:
a point of replicas x GPUs of a replica, at the default limit, of the largest throughput.
Without a point at its present count it is left alone: nobody knows what would be gained.
Each model's GPUs are one stock: those that its elastic jobs hold, and those that are free.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.elastic.growth import Growing, grow
from eelgrid_controller.profiles.points import Point

__all__ = ["Elastic", "Resize", "curve_of", "resized"]


@dataclass(frozen=True, slots=True)
class Elastic:
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


class Resize(NamedTuple):
    """What should be, and why."""

    name: str
    replicas: int
    reason: str


def curve_of(job: Elastic) -> tuple[dict[int, float], dict[int, float]]:
    """Throughput in Hz and watts by replicas, where measured."""
    rates: dict[int, float] = {}
    watts: dict[int, float] = {}
    for point in job.points:
        running = point.configuration
        replicas, rest = divmod(running.gpus, job.gpus)
        usable = running.gpu_model == job.gpu_model and running.power_limit_w is None and not running.mig_profile
        if not usable or rest or not job.least <= replicas <= job.most:
            continue
        if point.throughput_hz > rates.get(replicas, 0.0):
            rates[replicas] = point.throughput_hz
            if point.power_w is not None:
                watts[replicas] = point.power_w
    return rates, watts


def resized(
    jobs: Iterable[Elastic], free: Mapping[str, int], *, price_per_w: float = 0.0, horizon_s: float = 3600.0
) -> tuple[Resize, ...]:
    """The resizes that pay within the horizon, those that shrink first; `free` are GPUs by model that nobody holds."""
    stocks: dict[str, list[tuple[Elastic, Growing]]] = {}
    for job in jobs:
        rates, watts = curve_of(job)
        if job.replicas in rates and len(rates) > 1:
            growing = Growing(
                job.name, rates, gpus=job.gpus, now=job.replicas, weight=job.weight, power_w=watts,
                restart_s=job.restart_s,
            )  # fmt: skip
            stocks.setdefault(job.gpu_model, []).append((job, growing))
    made: list[Resize] = []
    for model, stock in stocks.items():
        held = sum(job.gpus * job.replicas for job, _ in stock)
        growing_jobs = [growing for _, growing in stock]
        found = grow(growing_jobs, held + free.get(model, 0), price_per_w=price_per_w, horizon_s=horizon_s)
        for (job, growing), one in zip(stock, found, strict=True):
            if one.workers not in {0, job.replicas}:
                share = 100.0 * one.gained_hz / growing.throughput_hz[job.replicas]
                made.append(Resize(job.name, one.workers, f"{share:+.0f} % throughput on {one.workers} replicas"))
    now = {job.name: job.replicas for stock in stocks.values() for job, _ in stock}
    return tuple(sorted(made, key=lambda one: (one.replicas > now[one.name], one.name)))
