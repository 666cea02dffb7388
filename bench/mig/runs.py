"""One scenario planned by us and by the peers, each judged by the raw tables.

Owns what is measured of a scenario. Must not know files of results or pictures.
`seconds` is the wall time from the points to the plan with its places, `cpu_seconds` the processor time;
reading the tables is not in them, judging is not either.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bench.mig.judge import Placed, violations
from bench.mig.peers import PEERS, Choice, Demand, planned
from bench.mig.plans import pool_of_product
from bench.mig.tables import MODEL, QUANTILE, SAFETY, Scenario
from eelgrid_controller.partition.integer_program import OptimalityProof
from eelgrid_controller.partition.plan import PartitionPlan, plan_partition
from eelgrid_controller.partition.problem import InferenceDemand, PartitionProblem, UnservableService
from eelgrid_controller.profiles.points import Point
from eelgrid_protos.catalogue.loader import load_catalogue

__all__ = ["Result", "Standing", "problem_of", "run"]


class Standing(NamedTuple):
    """A plan by its measures."""

    gpus: int
    slices: int
    violations: int


class Result(NamedTuple):
    """One scenario."""

    scenario: str
    services: int
    ours: Standing
    proofs: tuple[OptimalityProof, ...]
    seconds: float
    cpu_seconds: float
    placed: tuple[Placed, ...]
    told: tuple[str, ...]  # violations and services that nothing serves, in words
    peers: Mapping[str, Standing]

    @property
    def bound_gpus(self) -> int:
        """What no plan can go below."""
        return round(self.proofs[0].bound)


def problem_of(scenario: Scenario, points: Sequence[Point]) -> PartitionProblem:
    """A scenario on as many A100-SXM4-80GB as it needs."""
    product = next(one for one in load_catalogue().products.values() if one.model == MODEL)
    services = tuple(
        InferenceDemand(
            name=one.model,
            workload=one.model,
            rate_hz=one.rate_hz,
            latency_s=one.latency_s,
            quantile=QUANTILE,
            safety=SAFETY,
        )
        for one in scenario.services
    )
    return PartitionProblem(services=services, points=tuple(points), pools=(pool_of_product(product),))


def run(scenario: Scenario, points: Sequence[Point], profiles: Path) -> Result:
    """Plans and judges; a service that nothing serves is left out, told, and counts as a violation."""
    problem = problem_of(scenario, points)
    told: list[str] = []
    begun, cpu_begun = time.perf_counter(), time.process_time()
    while True:
        try:
            found = plan_partition(problem)
        except UnservableService as unservable:
            told.append(str(unservable))
            left = tuple(service for service in problem.services if service.name != unservable.service)
            problem = replace(problem, services=left)
            continue
        break
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    placed = _placed(found)
    faults = violations(scenario.services, placed, profiles)
    told += [fault for fault in faults if not any(fault.split(":")[0] in one for one in told)]
    demands = [_demand(service, problem) for service in problem.services]
    served = [one for one in scenario.services if one.model in {service.name for service in problem.services}]
    peers = {}
    for name, peer in PEERS.items():
        theirs = planned(peer, demands)
        peers[name] = Standing(*_size(theirs), len(violations(served, theirs, profiles)))
    return Result(
        scenario.name,
        len(scenario.services),
        Standing(*_size(placed), len(told)),
        found.proofs,
        seconds,
        cpu_seconds,
        placed,
        tuple(told),
        peers,
    )


def _placed(found: PartitionPlan) -> tuple[Placed, ...]:
    placed = []
    for number, gpu in enumerate(found.gpus):
        for one in gpu.instances:
            how = one.replica.configuration
            assert how is not None  # there are no training jobs here
            slices = int(one.profile.removesuffix("g"))
            placed.append(Placed(number, one.start, slices, one.replica.owner, how.batch, how.processes))
    return tuple(placed)


def _size(placed: Sequence[Placed]) -> tuple[int, int]:
    return len({one.gpu for one in placed}), sum(one.slices for one in placed)


def _demand(service: InferenceDemand, problem: PartitionProblem) -> Demand:
    """What the peers choose from: the admissible configuration of most throughput on each size."""
    best: dict[int, Choice] = {}
    for point in problem.points:
        how = point.configuration
        if point.workload != service.workload or point.latency_s[QUANTILE] >= service.limit_s:
            continue
        slices = int(how.mig_profile.removesuffix("g"))
        if slices not in best or point.throughput_hz > best[slices].throughput_hz:
            best[slices] = Choice(slices, point.throughput_hz, how.batch, how.processes)
    return Demand(service.name, service.rate_hz, best)
