"""Planning times of a whole fleet: a plan from scratch, one after a few changed rates, and a change in place.

Owns the fleets and the measures. Must not know files. Services are drawn like the
scenarios (scenes.py), each with a rate whose logarithm varies by 1 (standard
deviation). `a100` is the tables as they are. `mixed` has five models with limited
counts and training jobs; ParvaGPU measured the A100 alone, so the tables of the
others are those of the A100 with throughput times and latency divided by a factor
that is made up: it says how the search fares, not what those GPUs do.

The kernel is compiled, or loaded, before anything is measured.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from bench.mig.plans import assign_plan, find_violations, pool_of_product, running_as_plan
from bench.mig.tables import MODEL, QUANTILE, SAFETY
from eelgrid_controller.partition.plan import PartitionPlan, RunningGpu, plan_partition
from eelgrid_controller.partition.problem import InferenceDemand, PartitionPool, PartitionProblem, TrainingDemand
from eelgrid_controller.partition.repartition import plan_change
from eelgrid_controller.profiles.points import Point
from eelgrid_protos.catalogue.loader import load_catalogue

__all__ = ["Row", "measured"]

CHANGED = 0.01  # of the services, whose rates change
# Product, share of the fleet, cost of a GPU, factor on the A100's speed (made up).
_MIXED = (
    ("a30", 0.2, 0.4, 0.5),
    ("a100-sxm4-80gb", 0.3, 1.0, 1.0),
    ("h100-sxm5-80gb", 0.25, 2.0, 1.7),
    ("h200-sxm-141gb", 0.15, 2.2, 1.9),
    ("b200", 0.1, 4.0, 3.0),
)
_FILLED = 0.8  # of a limited fleet's speed, that the services ask for
_JOBS_EVERY, _JOB_GPUS = 200, (1, 2, 4, 8)


class Row(NamedTuple):
    """One measurement."""

    fleet: str
    what: str  # cold, warm (from the memory of the cold plan), change (of the running fleet)
    services: int
    gpus: int
    value: float  # GPUs by their cost
    bound: float
    gap: float
    faults: int
    seconds: float
    cpu_seconds: float
    note: str


def measured(points: Sequence[Point], services: int, gpus: int, seed: int) -> Iterator[Row]:
    """Both fleets; raises PartitionError if a draw has no plan."""
    for name, problem in (
        ("a100", _alike(points, services, gpus, seed)),
        ("mixed", _mixed(points, services, gpus, seed)),
    ):
        plan_partition(_few(problem))  # compiles
        yield from _one(name, problem, seed)


def _one(name: str, problem: PartitionProblem, seed: int) -> Iterator[Row]:
    begun, cpu = time.perf_counter(), time.process_time()
    cold = plan_partition(problem)
    yield _row(name, "cold", problem, cold, (begun, cpu))
    later = _later(problem, seed)
    begun, cpu = time.perf_counter(), time.process_time()
    warm = plan_partition(later, cold.memory)
    yield _row(name, "warm", later, warm, (begun, cpu))
    fleet = _on(problem, cold)
    begun, cpu = time.perf_counter(), time.process_time()
    changed = plan_change(later, fleet, prices=None if cold.memory is None else cold.memory.prices)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu
    bound = warm.proofs[0].bound
    yield Row(
        name,
        "change",
        len(later.services),
        sum(any(True for _ in gpu.replicas()) for gpu in changed.gpus),
        changed.after,
        bound,
        (changed.after - bound) / changed.after,
        len(find_violations(later, running_as_plan(changed.gpus))),
        seconds,
        cpu_seconds,
        f"{len(changed.course.steps)} steps on {len({step.uuid for step in changed.course.steps})} GPUs",
    )


def _row(name: str, what: str, problem: PartitionProblem, found: PartitionPlan, begun: tuple[float, float]) -> Row:
    seconds, cpu_seconds = time.perf_counter() - begun[0], time.process_time() - begun[1]
    proof = found.proofs[0]
    replicas = sum(1 for gpu in found.gpus for _ in gpu.replicas())
    return Row(
        name,
        what,
        len(problem.services),
        len(found.gpus),
        proof.value,
        proof.bound,
        proof.gap,
        len(find_violations(problem, found)),
        seconds,
        cpu_seconds,
        f"{replicas} replicas",
    )


def _services(points: Sequence[Point], count: int, whole_gpus: float, seed: int) -> tuple[InferenceDemand, ...]:
    """Services whose rates ask for so many whole A100 together."""
    draw = random.Random(seed)
    by_model: dict[str, list[Point]] = {}
    for point in points:
        by_model.setdefault(point.workload, []).append(point)
    found, weights = [], []
    for number in range(count):
        model = draw.choice(sorted(by_model))
        point = draw.choice(by_model[model])
        latency_s = point.latency_s[QUANTILE] / SAFETY * math.exp(draw.uniform(math.log(1.02), math.log(4.0)))
        whole_hz = max(one.throughput_hz for one in by_model[model] if one.latency_s[QUANTILE] < SAFETY * latency_s)
        weights.append(math.exp(draw.gauss(0.0, 1.0)))
        found.append(
            InferenceDemand(
                name=f"{model}-{number}",
                workload=model,
                rate_hz=whole_hz * weights[-1],
                latency_s=latency_s,
                quantile=QUANTILE,
                safety=SAFETY,
            )
        )
    scale = whole_gpus / sum(weights)
    return tuple(replace(service, rate_hz=service.rate_hz * scale) for service in found)


def _alike(points: Sequence[Point], services: int, gpus: int, seed: int) -> PartitionProblem:
    product = next(one for one in load_catalogue().products.values() if one.model == MODEL)
    return PartitionProblem(
        services=_services(points, services, gpus, seed), points=tuple(points), pools=(pool_of_product(product),)
    )


def _mixed(points: Sequence[Point], services: int, gpus: int, seed: int) -> PartitionProblem:
    products = load_catalogue().products
    pools: list[PartitionPool] = []
    every: list[Point] = []
    for key, share, cost, factor in _MIXED:
        product = products[key]
        pools.append(pool_of_product(product, int(share * gpus), cost=cost))
        assert product.mig is not None  # all five have MIG
        for point in points:
            if point.configuration.mig_profile in product.mig.profiles:
                how = replace(point.configuration, gpu_model=product.model)
                latency_s = {quantile: value / factor for quantile, value in point.latency_s.items()}
                hz = point.throughput_hz * factor
                every.append(replace(point, configuration=how, throughput_hz=hz, latency_s=latency_s, source="made up"))
    speed = _FILLED * gpus * sum(share * factor for _, share, _, factor in _MIXED)
    jobs = tuple(
        TrainingDemand(name=f"job-{number}", gpus=_JOB_GPUS[number % 4]) for number in range(gpus // _JOBS_EVERY)
    )
    return PartitionProblem(
        services=_services(points, services, speed, seed), points=tuple(every), pools=tuple(pools), jobs=jobs
    )


def _few(problem: PartitionProblem) -> PartitionProblem:
    return replace(problem, services=problem.services[:60], jobs=())


def _later(problem: PartitionProblem, seed: int) -> PartitionProblem:
    """The same an hour later: a few rates differ by 20 % (standard deviation of the logarithm)."""
    draw = random.Random(f"later {seed}")
    changed = set(draw.sample(range(len(problem.services)), max(1, int(CHANGED * len(problem.services)))))
    return replace(
        problem,
        services=tuple(
            replace(service, rate_hz=service.rate_hz * math.exp(draw.gauss(0.0, 0.2))) if number in changed else service
            for number, service in enumerate(problem.services)
        ),
    )


def _on(problem: PartitionProblem, found: PartitionPlan) -> tuple[RunningGpu, ...]:
    """A plan on GPUs with names, some of which are spare."""
    counts: dict[str, int] = {}
    for gpu in found.gpus:
        counts[gpu.model] = counts.get(gpu.model, 0) + 1
    members = {}
    for pool in problem.pools:
        there = pool.count if pool.count is not None else counts.get(pool.model, 0) * 11 // 10
        members[pool.model] = [(f"GPU-{pool.model}-{number}", f"node-{number // 8}") for number in range(there)]
    return assign_plan(found, members)
