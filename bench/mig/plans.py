"""What benches and tests of the partition planner share: pools, plans as running fleets, and a check of plans.

The check shares nothing with the search: `find_violations` judges geometry by the catalogue and admissibility by the points.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from eelgrid_controller.partition.integer_program import RATE_TOLERANCE
from eelgrid_controller.partition.plan import (
    PartitionPlan,
    PartitionReplica,
    PlannedGpu,
    PlannedInstance,
    RunningGpu,
    RunningInstance,
)
from eelgrid_controller.partition.problem import InferenceDemand, PartitionPool, PartitionProblem
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_protos.catalogue.products import Product


def pool_of_product(product: Product, count: int | None = None, *, cost: float = 1.0) -> PartitionPool:
    """The pool of a product of the catalogue; a GPU that is not in use counts as off, so it saves its idle watts."""
    idle_w = product.idle_w if product.idle_mig_w is None else product.idle_mig_w
    return PartitionPool(model=product.model, count=count, geometry=product.mig, cost=cost, held_w=idle_w)


def assign_plan(plan: PartitionPlan, uuids: Mapping[str, Iterable[tuple[str, str]]]) -> tuple[RunningGpu, ...]:
    """A plan on the GPUs of a fleet, (uuid, node) by model, in order; those beyond the plan stand empty."""
    left = {model: iter(tuple(members)) for model, members in uuids.items()}
    found = []
    for gpu in plan.gpus:
        uuid, node = next(left[gpu.model])
        standing = tuple(RunningInstance(one.profile, one.start, one.replica) for one in gpu.instances)
        found.append(RunningGpu(uuid, node, gpu.model, bool(standing), standing, gpu.whole))
    for model, members in left.items():
        found += (RunningGpu(uuid, node, model) for uuid, node in members)
    return tuple(found)


def running_as_plan(gpus: Iterable[RunningGpu]) -> PartitionPlan:
    """What of ours runs, as a plan without proofs."""
    found = []
    for gpu in gpus:
        mine = tuple(
            PlannedInstance(one.profile, one.start, one.replica) for one in gpu.instances if one.replica is not None
        )
        if mine or gpu.whole is not None:
            found.append(PlannedGpu(gpu.model, mine, gpu.whole))
    return PartitionPlan(tuple(found), ())


def find_violations(problem: PartitionProblem, plan: PartitionPlan) -> tuple[str, ...]:
    """A line for each promise that the plan breaks: geometry, latency, rates, pools, jobs."""
    return (*_places(problem, plan), *_services(problem, plan), *_jobs(problem, plan), *_pools(problem, plan))


def _places(problem: PartitionProblem, plan: PartitionPlan) -> Iterator[str]:
    pools = {pool.model: pool for pool in problem.pools}
    for number, gpu in enumerate(plan.gpus):
        where, geometry = f"GPU {number} ({gpu.model})", pools[gpu.model].geometry
        if bool(gpu.instances) == (gpu.whole is not None):
            yield f"{where}: is neither cut nor whole"
        if not gpu.instances:
            continue
        if geometry is None or any(instance.profile not in geometry.profiles for instance in gpu.instances):
            yield f"{where}: has a profile that the part lacks"
            continue
        problems = geometry.conflict([(geometry.profiles[one.profile], one.start) for one in gpu.instances])
        if problems is not None:
            yield f"{where}: {problems}"
        for instance in gpu.instances:
            how = instance.replica.configuration
            profile = geometry.profiles[instance.profile]
            if how is None or how.gpu_model != gpu.model or how.mig_profile not in (profile.key, profile.name):
                yield f"{where}: {instance.replica.owner} runs in {profile.name} as no point was measured"


def _services(problem: PartitionProblem, plan: PartitionPlan) -> Iterator[str]:
    by_owner: dict[str, list[PartitionReplica]] = {}
    for (owner, number), (replica, gpus) in _replicas(plan).items():
        by_owner.setdefault(owner, []).append(replica)
        asked = 1 if replica.configuration is None else replica.configuration.gpus
        if replica.configuration is not None and len(gpus) != asked:
            yield f"{owner}: replica {number} is on {len(gpus)} GPUs and takes {asked}"
    measured: dict[tuple[str, Configuration | None], list[Point]] = {}
    for point in problem.points:
        measured.setdefault((point.workload, point.configuration), []).append(point)
    for service in problem.services:
        mine = by_owner.get(service.name, [])
        total_hz = math.fsum(replica.throughput_hz for replica in mine)
        if total_hz < service.rate_hz * (1.0 - RATE_TOLERANCE):
            yield f"{service.name}: {total_hz:.6g} Hz serve {service.rate_hz:.6g} Hz"
        for replica in mine:
            if not _admissible(measured.get((service.workload, replica.configuration), ()), service, replica):
                yield f"{service.name}: replica {replica.number} runs as no admissible point was measured"


def _admissible(points: Iterable[Point], service: InferenceDemand, replica: PartitionReplica) -> bool:
    return any(
        point.throughput_hz == replica.throughput_hz
        and (latency_s := point.latency_s.get(service.quantile)) is not None
        and latency_s < service.limit_s
        for point in points
    )


def _jobs(problem: PartitionProblem, plan: PartitionPlan) -> Iterator[str]:
    held = {owner: gpus for (owner, _), (replica, gpus) in _replicas(plan).items() if replica.configuration is None}
    for job in problem.jobs:
        gpus = held.get(job.name, [])
        models = {gpu.model for gpu in gpus}
        if len(gpus) != job.gpus or len(models) != 1 or (job.models and not models <= set(job.models)):
            yield f"{job.name}: is on {len(gpus)} GPUs of {sorted(models)} and takes {job.gpus} of one model"


def _pools(problem: PartitionProblem, plan: PartitionPlan) -> Iterator[str]:
    counts = Counter(gpu.model for gpu in plan.gpus)
    for pool in problem.pools:
        if pool.count is not None and counts[pool.model] > pool.count:
            yield f"pool {pool.model}: {counts[pool.model]} GPUs in use and there are {pool.count}"


def _replicas(plan: PartitionPlan) -> dict[tuple[str, int], tuple[PartitionReplica, list[PlannedGpu]]]:
    """Each replica with the GPUs that it is on."""
    held: dict[tuple[str, int], tuple[PartitionReplica, list[PlannedGpu]]] = {}
    for gpu in plan.gpus:
        for replica in gpu.replicas():
            held.setdefault((replica.owner, replica.number), (replica, []))[1].append(gpu)
    return held
