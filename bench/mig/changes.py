"""Changes of a plan in force: the rate of one service differs, and the GPUs that run the plan are changed for it.

Owns the drawn rates and the clock. Must not know files. Each service of a scenario in turn gets another rate, whose
logarithm differs by 0.2 (standard deviation); half as many GPUs as the plan uses stand empty, four
at least. The change is compared with a plan from nothing for the new rates: `bound` is what no plan can go below.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from bench.mig.plans import assign_plan, find_violations, running_as_plan
from bench.mig.runs import problem_of
from bench.mig.tables import Scenario
from eelgrid_controller.partition.plan import RunningGpu, plan_partition
from eelgrid_controller.partition.problem import PartitionProblem
from eelgrid_controller.partition.repartition import plan_change
from eelgrid_controller.profiles.points import Point

__all__ = ["RATE_SIGMA", "Change", "measure_changes"]

RATE_SIGMA = 0.2
_SPARE_SHARE, _SPARE_LEAST = 2, 4
_NODE_GPUS = 8


class Change(NamedTuple):
    """One change of a running plan."""

    scenario: str
    service: str
    rate_factor: float
    gpus_before: int
    gpus: float  # by their cost, afterwards
    bound: float
    steps: int
    cost_gpu_s: float  # of the steps
    violations: int
    seconds: float
    cpu_seconds: float


def measure_changes(scenarios: Sequence[Scenario], points: Sequence[Point], seed: int) -> Iterator[Change]:
    """Each service of each scenario in turn, from the same plan; raises PartitionError if a draw has no plan.

    The first plan is changed once before the clock runs, which loads the solver and the kernels as a controller does when
    it starts.
    """
    for at, scenario in enumerate(scenarios):
        problem = problem_of(scenario, points)
        fleet = _run_plan(problem)
        if at == 0:
            plan_change(problem, fleet)
        draw = random.Random(f"changes {seed} {scenario.name}")
        for number, service in enumerate(problem.services):
            factor = math.exp(draw.gauss(0.0, RATE_SIGMA))
            changed = replace(service, rate_hz=service.rate_hz * factor)
            services = (*problem.services[:number], changed, *problem.services[number + 1 :])
            yield _measure(scenario.name, number, factor, replace(problem, services=services), fleet)


def _run_plan(problem: PartitionProblem) -> tuple[RunningGpu, ...]:
    """The plan of a problem on GPUs with names, some of which are spare."""
    plan = plan_partition(problem)
    (pool,) = problem.pools
    count = len(plan.gpus) + max(_SPARE_LEAST, len(plan.gpus) // _SPARE_SHARE)
    return assign_plan(plan, {pool.model: [(f"gpu-{at}", f"node-{at // _NODE_GPUS}") for at in range(count)]})


def _measure(
    scenario: str, number: int, factor: float, problem: PartitionProblem, fleet: tuple[RunningGpu, ...]
) -> Change:
    begun, cpu_begun = time.perf_counter(), time.process_time()
    found = plan_change(problem, fleet)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    return Change(
        scenario,
        problem.services[number].name,
        factor,
        sum(any(True for _ in gpu.replicas()) for gpu in fleet),
        found.after,
        plan_partition(problem).proofs[0].bound,
        len(found.course.steps),
        found.cost,
        len(find_violations(problem, running_as_plan(found.gpus))),
        seconds,
        cpu_seconds,
    )
