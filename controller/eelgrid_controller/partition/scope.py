"""Which GPUs of a running fleet a change is about, and what is left to serve there.

Owns that choice, and what each running replica is worth by what is known now. Must
not know targets or steps.

Theory: a service is at fault if its replicas fall short of its rate, if one of them
could go, if one is no longer admissible, or if it is asked for no more. GPUs are
taken by the replicas at fault on them, then by their free compute slices: those
are where room is made and where a GPU can be emptied. All that runs elsewhere
stays; what it serves is no part of the question.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from eelgrid_controller.partition.options import Held
from eelgrid_controller.partition.plan import Replica
from eelgrid_controller.partition.problem import Pool, Problem
from eelgrid_controller.partition.programme import EXACT
from eelgrid_controller.partition.running import RunningGpu
from eelgrid_controller.profiles.points import Configuration, Point

__all__ = ["Scope", "Seen", "is_fixed", "renewed", "scoped", "seen"]

EMPTY_MOST = 64  # of one model: GPUs without anything are alike


class Seen(NamedTuple):
    """A replica on one GPU, and what of it is on that GPU by what is known now; 0 if it may not run so."""

    replica: Replica
    throughput_hz: float

    @property
    def is_job(self) -> bool:
        """Whether it is a training job, whose throughput says nothing."""
        return self.replica.configuration is None


class Scope(NamedTuple):
    """GPUs by position, what they have to serve, and how their replicas run now."""

    gpus: tuple[int, ...]
    problem: Problem
    held: Held
    complete: bool  # whether every GPU that could change is in it


def seen(problem: Problem, gpus: Sequence[RunningGpu]) -> tuple[tuple[Seen, ...], ...]:
    """The replicas of each GPU."""
    services = {service.name: service for service in problem.services}
    points: dict[tuple[str, Configuration], list[Point]] = {}
    for point in problem.points:
        points.setdefault((point.workload, point.configuration), []).append(point)

    def known_hz(owner: str, how: Configuration | None) -> float:
        service = services.get(owner)
        if service is None or how is None:
            return 0.0
        admissible = (
            point.throughput_hz
            for point in points.get((service.workload, how), ())
            if point.latency_s.get(service.quantile, math.inf) < service.limit_s
        )
        return max(admissible, default=0.0) / how.gpus

    # Thousands of replicas share a configuration, and to hash one takes longer than to know it again.
    memory: dict[tuple[str, int], float] = {}
    found = []
    for gpu in gpus:
        here = []
        replicas = [one.replica for one in gpu.instances if one.replica is not None]
        for replica in replicas if gpu.whole is None else (*replicas, gpu.whole):
            key = replica.owner, id(replica.configuration)
            if key not in memory:
                memory[key] = known_hz(replica.owner, replica.configuration)
            here.append(Seen(replica, memory[key]))
        found.append(tuple(here))
    return tuple(found)


def renewed(gpus: Sequence[RunningGpu], replicas: Sequence[Sequence[Seen]]) -> tuple[RunningGpu, ...]:
    """The same GPUs, each admissible replica with the throughput that is known now."""
    return tuple(
        _renewed(gpu, here) if any(_is_old(one) for one in here) else gpu
        for gpu, here in zip(gpus, replicas, strict=True)
    )


def is_fixed(gpu: RunningGpu, pools: Mapping[str, Pool]) -> bool:
    """Whether a GPU is left alone: held, of no pool, or under a training job or a replica of several GPUs."""
    whole = gpu.whole
    several = whole is not None and (whole.configuration is None or whole.configuration.gpus > 1)
    return gpu.held or several or gpu.model not in pools


def scoped(problem: Problem, gpus: Sequence[RunningGpu], replicas: Sequence[Sequence[Seen]], most: int) -> Scope:
    """The GPUs that a change is about, in their order; at most so many that are in use."""
    pools = {pool.model: pool for pool in problem.pools}
    faulty = _faulty(problem, replicas)
    ranked: list[tuple[int, int, int]] = []
    chosen: list[int] = []
    empty: dict[str, int] = {}
    for number, gpu in enumerate(gpus):
        if is_fixed(gpu, pools):
            continue
        if not gpu.instances and gpu.whole is None:
            empty[gpu.model] = empty.get(gpu.model, 0) + 1
            chosen += [number] if empty[gpu.model] <= EMPTY_MOST else []
            continue
        bad = sum(one.replica.owner in faulty or one.throughput_hz == 0.0 for one in replicas[number])
        ranked.append((-bad, -_free(gpu, pools[gpu.model]), number))
    ranked.sort()
    chosen = sorted(chosen + [number for *_, number in ranked[:most]])
    complete = len(ranked) <= most and all(count <= EMPTY_MOST for count in empty.values())
    left, held = _left(problem, replicas, chosen)
    return Scope(tuple(chosen), left, held, complete)


def _faulty(problem: Problem, replicas: Sequence[Sequence[Seen]]) -> set[str]:
    """Services of which a replica could go."""
    served: dict[str, float] = {}
    smallest: dict[str, float] = {}
    for here in replicas:
        for one in here:
            if not one.is_job:
                owner, hz = one.replica.owner, one.throughput_hz
                served[owner] = served.get(owner, 0.0) + hz
                smallest[owner] = min(smallest.get(owner, hz), hz)
    rate_hz = {service.name: service.rate_hz for service in problem.services}
    return {owner for owner in served if served[owner] - rate_hz.get(owner, 0.0) >= smallest[owner]}


def _left(problem: Problem, replicas: Sequence[Sequence[Seen]], chosen: Sequence[int]) -> tuple[Problem, Held]:
    """What is left to serve when all that runs on other GPUs goes on."""
    inside = set(chosen)
    outside_hz: dict[str, float] = {}
    held: dict[str, set[Configuration]] = {}
    jobs = set()
    for number, here in enumerate(replicas):
        for one in here:
            owner, how = one.replica.owner, one.replica.configuration
            if how is None:
                jobs.add(owner)
            elif number in inside:
                held.setdefault(owner, set()).add(how)
            else:
                outside_hz[owner] = outside_hz.get(owner, 0.0) + one.throughput_hz
    services = []
    for service in problem.services:
        left_hz = service.rate_hz - outside_hz.get(service.name, 0.0)
        if left_hz > service.rate_hz * EXACT:
            services.append(replace(service, rate_hz=left_hz))
    left = replace(
        problem,
        services=tuple(services),
        jobs=tuple(job for job in problem.jobs if job.name not in jobs),
        pools=tuple(replace(pool, count=None) for pool in problem.pools),
    )
    return left, {owner: frozenset(configurations) for owner, configurations in held.items()}


def _free(gpu: RunningGpu, pool: Pool) -> int:
    """Compute slices without a replica."""
    if gpu.whole is not None or pool.geometry is None:
        return 0
    profiles = pool.geometry.profiles
    taken = sum(profiles[one.profile].compute_slices for one in gpu.instances if one.replica is not None or one.pinned)
    return pool.geometry.compute_slices - taken


def _is_old(one: Seen) -> bool:
    how = one.replica.configuration
    return how is not None and one.throughput_hz not in (0.0, one.replica.throughput_hz / how.gpus)


def _renewed(gpu: RunningGpu, here: Sequence[Seen]) -> RunningGpu:
    now = {
        one.replica: one.replica._replace(throughput_hz=one.throughput_hz * one.replica.configuration.gpus)
        for one in here
        if one.replica.configuration is not None and _is_old(one)
    }
    instances = tuple(
        one if one.replica is None else one._replace(replica=now.get(one.replica, one.replica)) for one in gpu.instances
    )
    return gpu._replace(instances=instances, whole=None if gpu.whole is None else now.get(gpu.whole, gpu.whole))
