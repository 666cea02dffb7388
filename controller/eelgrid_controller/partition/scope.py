"""Which GPUs of a running fleet a change is about, and what is left to serve there.

Owns that choice, and what each running replica is worth by what is known now. Must
not know targets or steps.

Theory: a service is at fault if its replicas fall short of its rate, if one of them
could go, if one is no longer admissible, or if it is asked for no more. GPUs are
taken by the replicas at fault on them, then by their free compute slices: those
are where room is made and where a GPU can be emptied. All that runs elsewhere
stays; what it serves is no part of the question.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from eelgrid_controller.partition.options import Held
from eelgrid_controller.partition.plan import Replica
from eelgrid_controller.partition.problem import Pool, Problem
from eelgrid_controller.partition.programme import EXACT
from eelgrid_controller.partition.running import RunningGpu
from eelgrid_controller.profiles.points import Configuration

__all__ = ["Known", "Scope", "is_fixed", "known_hz", "renewed", "scoped"]

EMPTY_MOST = 64  # of one model: GPUs without anything are alike
# Throughput of a service's replica in a configuration; 0 where it may not run so.
Known = Mapping[tuple[str, Configuration | None], float]


class Scope(NamedTuple):
    """GPUs by position, what they have to serve, and how their replicas run now."""

    gpus: tuple[int, ...]
    problem: Problem
    held: Held
    whole: bool  # whether every GPU that could change is in it


def known_hz(problem: Problem, gpus: Sequence[RunningGpu]) -> Known:
    """What every running replica is worth, by the points and the objectives as they are now."""
    services = {service.name: service for service in problem.services}
    points: dict[tuple[str, Configuration | None], list[tuple[float, float, float]]] = {}
    for point in problem.points:
        measured = ((quantile, latency_s, point.throughput_hz) for quantile, latency_s in point.latency_s.items())
        points.setdefault((point.workload, point.configuration), []).extend(measured)
    found: dict[tuple[str, Configuration | None], float] = {}
    for replica in _replicas(gpus):
        key = replica.owner, replica.configuration
        service = services.get(replica.owner)
        if key in found or replica.configuration is None:
            continue
        measured_here = points.get((service.workload, replica.configuration), ()) if service is not None else ()
        found[key] = max(
            (hz for quantile, latency_s, hz in measured_here
             if service is not None and quantile == service.quantile and latency_s < service.limit_s),
            default=0.0,
        )  # fmt: skip
    return found


def renewed(gpus: Sequence[RunningGpu], known: Known) -> tuple[RunningGpu, ...]:
    """The same GPUs, each admissible replica with the throughput that is known now."""
    return tuple(_renewed(gpu, known) if _is_old(gpu, known) else gpu for gpu in gpus)


def is_fixed(gpu: RunningGpu, pools: Mapping[str, Pool]) -> bool:
    """Whether a GPU is left alone: held, of no pool, or under a training job or a replica of several GPUs."""
    whole = gpu.whole
    several = whole is not None and (whole.configuration is None or whole.configuration.gpus > 1)
    return gpu.held or several or gpu.model not in pools


def scoped(problem: Problem, gpus: Sequence[RunningGpu], known: Known, most: int) -> Scope:
    """The GPUs that a change is about, in their order; at most so many that are in use."""
    pools = {pool.model: pool for pool in problem.pools}
    rate_hz = {service.name: service.rate_hz for service in problem.services}
    faulty = _faulty(gpus, known, rate_hz)
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
        bad = sum(
            replica.owner in faulty or not known[replica.owner, replica.configuration] for replica in gpu.replicas()
        )
        ranked.append((-bad, -_free(gpu, pools[gpu.model]), number))
    ranked.sort()
    chosen = sorted(chosen + [number for *_, number in ranked[:most]])
    return Scope(
        tuple(chosen), *_left(problem, gpus, chosen, known), all(count <= EMPTY_MOST for count in empty.values())
        and len(ranked) <= most,
    )  # fmt: skip


def _faulty(gpus: Sequence[RunningGpu], known: Known, rate_hz: Mapping[str, float]) -> set[str]:
    served: dict[str, float] = {}
    smallest: dict[str, float] = {}
    for replica in _replicas(gpus):
        if replica.configuration is not None:
            hz = known[replica.owner, replica.configuration]
            served[replica.owner] = served.get(replica.owner, 0.0) + hz
            smallest[replica.owner] = min(smallest.get(replica.owner, hz), hz)
    return {owner for owner in served if served[owner] - rate_hz.get(owner, 0.0) >= smallest[owner]}


def _left(problem: Problem, gpus: Sequence[RunningGpu], chosen: Sequence[int], known: Known) -> tuple[Problem, Held]:
    """What is left to serve when all that runs on other GPUs goes on."""
    inside = set(chosen)
    outside_hz: dict[str, float] = {}
    held: dict[str, set[Configuration]] = {}
    jobs = set()
    for number, gpu in enumerate(gpus):
        for replica in gpu.replicas():
            how = replica.configuration
            if how is None:
                jobs.add(replica.owner)
            elif number in inside:
                held.setdefault(replica.owner, set()).add(how)
            else:
                # A replica of several GPUs counts once, on each of them its share.
                part_hz = known[replica.owner, how] / (how.gpus if gpu.whole is not None else 1)
                outside_hz[replica.owner] = outside_hz.get(replica.owner, 0.0) + part_hz
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


def _replicas(gpus: Sequence[RunningGpu]) -> Iterator[Replica]:
    for gpu in gpus:
        yield from gpu.replicas()


def _is_old(gpu: RunningGpu, known: Known) -> bool:
    for replica in gpu.replicas():
        hz = known.get((replica.owner, replica.configuration), 0.0)
        if hz not in (0.0, replica.throughput_hz):
            return True
    return False


def _renewed(gpu: RunningGpu, known: Known) -> RunningGpu:
    def now(replica: Replica | None) -> Replica | None:
        hz = 0.0 if replica is None else known.get((replica.owner, replica.configuration), 0.0)
        return replica._replace(throughput_hz=hz) if replica is not None and hz > 0.0 else replica

    return gpu._replace(
        instances=tuple(one._replace(replica=now(one.replica)) for one in gpu.instances), whole=now(gpu.whole)
    )
