"""Replans a running fleet for new rates: what stays, what changes, and whether the change pays for itself.

Theory: GPUs in the same state form a class k of n_k; u_kt of them become target t
(`GpuTarget`), x_o replicas of option o run afterwards, of which h_o stay where they
run now, b_c places of cell c are made:

    sum of t_o x_o  >= r_d - what runs elsewhere                        every rate
    sum_kt places_tc u_kt  >= sum of w_o x_o over the options on c      places
    h_o <= replicas of o that targets keep,   h_o <= x_o
    b_c >= sum of w_o x_o over c  -  places that targets keep
    sum_t u_kt = n_k
    least  H (cost of GPUs or watts, and `room` for each compute slice in use)
           + destroy * instances that go + create * b + start * (x - h) + mode * modes

H is the time in which a change must have paid. Doing nothing is a solution wherever
it keeps every rate, so that a repartition is chosen only if its gain over H exceeds
its cost. A GPU that is also used by something else costs nothing more.

Scope. At fleet size the program has only the GPUs that the change is about; all other
replicas stay. A service is affected if its replicas fall short of its rate, if one of them
could go or is no longer admissible, or if it is not wanted any more. GPUs are taken by the
affected replicas on them, then by their free compute slices: those are where room can be
made and a GPU can be emptied.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from eelgrid_controller.partition.change_program import TransitionCosts
from eelgrid_controller.partition.column_generation import Prices, cheapest_options, prices_to_array
from eelgrid_controller.partition.integer_program import (
    RATE_TOLERANCE,
    IntegerProgram,
    build_program,
    objective_weights,
    restrict_options,
)
from eelgrid_controller.partition.options import HeldConfigurations
from eelgrid_controller.partition.plan import PartitionReplica, RunningGpu
from eelgrid_controller.partition.problem import (
    FleetTooSmall,
    InvalidProblem,
    PartitionObjective,
    PartitionPool,
    PartitionProblem,
)
from eelgrid_controller.partition.transition import (
    CreateStep,
    DestroyStep,
    SetModeStep,
    StartStep,
    StepSequence,
    apply_transition,
    classify_gpus,
    decide_transition,
    order_steps,
)
from eelgrid_controller.profiles.points import Configuration, Point

EMPTY_MOST = 64  # of one model: GPUs without anything are alike


class ObservedReplica(NamedTuple):
    """A replica on one GPU, and what of it is on that GPU by what is known now; 0 if it may not run so."""

    replica: PartitionReplica
    throughput_hz: float

    @property
    def is_job(self) -> bool:
        """Whether it is a training job, whose throughput says nothing."""
        return self.replica.configuration is None


class ChangeScope(NamedTuple):
    """GPUs by position, what they have to serve, and how their replicas run now."""

    gpus: tuple[int, ...]
    problem: PartitionProblem
    held: HeldConfigurations
    complete: bool  # whether every GPU that could change is in it


def observe_replicas(problem: PartitionProblem, gpus: Sequence[RunningGpu]) -> tuple[tuple[ObservedReplica, ...], ...]:
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
            here.append(ObservedReplica(replica, memory[key]))
        found.append(tuple(here))
    return tuple(found)


def refresh_throughputs(
    gpus: Sequence[RunningGpu], replicas: Sequence[Sequence[ObservedReplica]]
) -> tuple[RunningGpu, ...]:
    """The same GPUs, each admissible replica with the throughput that is known now."""
    return tuple(
        _with_observed_rates(gpu, here) if any(_is_old(one) for one in here) else gpu
        for gpu, here in zip(gpus, replicas, strict=True)
    )


def is_fixed(gpu: RunningGpu, pools: Mapping[str, PartitionPool]) -> bool:
    """Whether a GPU is left alone: held, of no pool, or under a training job or a replica of several GPUs."""
    whole = gpu.whole
    several = whole is not None and (whole.configuration is None or whole.configuration.gpus > 1)
    return gpu.held or several or gpu.model not in pools


def select_scope(
    problem: PartitionProblem, gpus: Sequence[RunningGpu], replicas: Sequence[Sequence[ObservedReplica]], most: int
) -> ChangeScope:
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
    return ChangeScope(tuple(chosen), left, held, complete)


def _faulty(problem: PartitionProblem, replicas: Sequence[Sequence[ObservedReplica]]) -> set[str]:
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


def _left(
    problem: PartitionProblem, replicas: Sequence[Sequence[ObservedReplica]], chosen: Sequence[int]
) -> tuple[PartitionProblem, HeldConfigurations]:
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
        if left_hz > service.rate_hz * RATE_TOLERANCE:
            services.append(replace(service, rate_hz=left_hz))
    left = replace(
        problem,
        services=tuple(services),
        jobs=tuple(job for job in problem.jobs if job.name not in jobs),
        pools=tuple(replace(pool, count=None) for pool in problem.pools),
    )
    return left, {owner: frozenset(configurations) for owner, configurations in held.items()}


def _free(gpu: RunningGpu, pool: PartitionPool) -> int:
    """Compute slices without a replica."""
    if gpu.whole is not None or pool.geometry is None:
        return 0
    profiles = pool.geometry.profiles
    taken = sum(profiles[one.profile].compute_slices for one in gpu.instances if one.replica is not None or one.pinned)
    return pool.geometry.compute_slices - taken


def _is_old(one: ObservedReplica) -> bool:
    how = one.replica.configuration
    return how is not None and one.throughput_hz not in (0.0, one.replica.throughput_hz / how.gpus)


def _with_observed_rates(gpu: RunningGpu, here: Sequence[ObservedReplica]) -> RunningGpu:
    now = {
        one.replica: one.replica._replace(throughput_hz=one.throughput_hz * one.replica.configuration.gpus)
        for one in here
        if one.replica.configuration is not None and _is_old(one)
    }
    instances = tuple(
        one if one.replica is None else one._replace(replica=now.get(one.replica, one.replica)) for one in gpu.instances
    )
    return gpu._replace(instances=instances, whole=None if gpu.whole is None else now.get(gpu.whole, gpu.whole))


# GPUs in use that may change at once: all of a fleet this small, of a larger one as many as take a second.
SMALL_FLEET, SCOPE_MOST = 48, 24
OPTIONS_MOST = 5  # of a service: one model has five sizes
_WIDER, _WIDEST = 2, 4


class PartitionChange(NamedTuple):
    """The fleet afterwards and the way there. Costs and gains are in GPU-seconds, or joules where watts are least."""

    gpus: tuple[RunningGpu, ...]
    course: StepSequence
    cost: float  # of the steps, once
    gain: float  # what the fleet costs less over the horizon; negative where rates ask for more
    before: float  # GPUs by their cost, or watts
    after: float


def plan_change(
    problem: PartitionProblem,
    gpus: Sequence[RunningGpu],
    costs: TransitionCosts | None = None,
    prices: Prices | None = None,
    scope_most: int | None = None,
) -> PartitionChange:
    """The best change of these GPUs for this problem; raises UnservableService, FleetTooSmall, SearchExhausted, InvalidProblem.

    GPUs that are held, pinned instances, training jobs that run and replicas of several GPUs stay as they are. Jobs
    of the problem that do not run yet are placed on whole GPUs. Prices of places (Plan.memory) tell the options of a
    fleet of many models that are worth looking at; without them all places of a GPU cost alike.
    """
    _check(problem, gpus)
    costs = costs or TransitionCosts()
    replicas = observe_replicas(problem, gpus)
    before = refresh_throughputs(gpus, replicas)
    after: list[RunningGpu] | None = None
    if scope_most is None:
        in_use = sum(gpu.whole is not None or bool(gpu.instances) for gpu in gpus)
        scope_most = SMALL_FLEET if in_use <= SMALL_FLEET else SCOPE_MOST
    most = max(1, scope_most)
    while after is None:
        scope = select_scope(problem, before, replicas, most)
        programme = _narrow(build_program(scope.problem, scope.held), scope, prices)
        found = classify_gpus(programme, before, scope.gpus)
        try:
            changed = apply_transition(programme, before, found, decide_transition(programme, before, found, costs))
        except FleetTooSmall:
            if scope.complete or most >= _WIDEST * max(1, scope_most):
                raise
            most *= _WIDER  # room may be on GPUs that were left out
            continue
        after = [changed.get(position, gpu) for position, gpu in enumerate(before)]
    result = _account(problem, before, tuple(after), costs)
    staying = _keeps(problem, replicas)
    if staying and result.gain + _room(problem, before, tuple(after), costs) <= result.cost:
        return _account(problem, before, before, costs)
    return result


def _narrow(programme: IntegerProgram, scope: ChangeScope, prices: Prices | None) -> IntegerProgram:
    """With options that are held or among the cheapest, where models are many."""
    if len(programme.options) <= OPTIONS_MOST * len(programme.rate_hz):
        return programme
    first, _ = objective_weights(programme)
    cost = {int(pool): float(first.pattern[at]) for at, pool in enumerate(programme.pool)}
    pools = programme.problem.pools
    if prices is None:
        prices = {
            (pools[cell.pool].model, cell.profile): cost[cell.pool] * cell.slices / _slices_of(pools[cell.pool])
            for cell in programme.cells
        }
    keep = cheapest_options(programme, first, prices_to_array(programme, prices), OPTIONS_MOST)
    names = [service.name for service in programme.problem.services if service.rate_hz > 0.0]
    for number, option in enumerate(programme.options):
        if option.point is not None and option.point.configuration in scope.held.get(names[option.demand], ()):
            keep[number] = True
    return restrict_options(programme, keep)


def _slices_of(pool: PartitionPool) -> int:
    return 1 if pool.geometry is None else pool.geometry.compute_slices


def fleet_cost(problem: PartitionProblem, gpus: Sequence[RunningGpu]) -> float:
    """What the GPUs in use cost: by their price, or in watts."""
    pools = {pool.model: pool for pool in problem.pools}
    total = 0.0
    for gpu in gpus:
        replicas = tuple(gpu.replicas())
        if not replicas:
            continue
        pool = pools[gpu.model]
        total += _gpu_cost(problem, pool) if not gpu.pinned else 0.0
        if problem.objective == PartitionObjective.WATTS:
            for replica in replicas:
                several = 1 if replica.configuration is None or gpu.whole is None else replica.configuration.gpus
                total += replica.added_w / several
    return total


def _gpu_cost(problem: PartitionProblem, pool: PartitionPool) -> float:
    return pool.cost if problem.objective == PartitionObjective.GPUS else pool.held_w or 0.0


def _account(
    problem: PartitionProblem, before: tuple[RunningGpu, ...], after: tuple[RunningGpu, ...], costs: TransitionCosts
) -> PartitionChange:
    geometries = {pool.model: pool.geometry for pool in problem.pools}
    rate_hz = {service.name: service.rate_hz for service in problem.services}
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old is not new]
    changed_before, changed_after = [old for old, _ in pairs], [new for _, new in pairs]
    way = order_steps(before, after, geometries, rate_hz)
    price: Mapping[type, float] = {
        DestroyStep: costs.destroy,
        CreateStep: costs.create,
        StartStep: costs.start,
        SetModeStep: costs.mode,
    }
    value = fleet_cost(problem, before)
    new_value = value - fleet_cost(problem, changed_before) + fleet_cost(problem, changed_after)
    return PartitionChange(
        gpus=after,
        course=way,
        cost=sum(price.get(type(step), 0.0) for step in way.steps),
        gain=costs.horizon_s * (value - new_value),
        before=value,
        after=new_value,
    )


def _keeps(problem: PartitionProblem, replicas: Sequence[Sequence[ObservedReplica]]) -> bool:
    """Whether every rate and every job is served as it runs now, and nothing runs that may not."""
    served: dict[str, float] = {}
    jobs = set()
    for one in (one for here in replicas for one in here):
        if one.is_job:
            jobs.add(one.replica.owner)
        elif one.throughput_hz == 0.0:
            return False
        served[one.replica.owner] = served.get(one.replica.owner, 0.0) + one.throughput_hz
    return all(job.name in jobs for job in problem.jobs) and all(
        served.get(service.name, 0.0) >= service.rate_hz * (1.0 - RATE_TOLERANCE) for service in problem.services
    )


def _room(
    problem: PartitionProblem, before: Sequence[RunningGpu], after: Sequence[RunningGpu], costs: TransitionCosts
) -> float:
    """What the compute slices are worth that are not in use any more."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old is not new]
    freed = _slices(problem, [old for old, _ in pairs]) - _slices(problem, [new for _, new in pairs])
    return costs.horizon_s * costs.room * freed


def _slices(problem: PartitionProblem, gpus: Sequence[RunningGpu]) -> int:
    geometries = {pool.model: pool.geometry for pool in problem.pools}
    total = 0
    for gpu in gpus:
        geometry = geometries.get(gpu.model)
        for one in gpu.instances:
            if one.replica is not None and geometry is not None:
                total += geometry.profiles[one.profile].compute_slices
        if gpu.whole is not None:
            total += 1 if geometry is None else geometry.compute_slices
    return total


def _check(problem: PartitionProblem, gpus: Sequence[RunningGpu]) -> None:
    pools = {pool.model: pool for pool in problem.pools}
    if len({gpu.uuid for gpu in gpus}) < len(gpus):
        raise InvalidProblem("gpus", "one UUID stands twice", "list each GPU once")
    for gpu in gpus:
        ours = any(True for _ in gpu.replicas())
        if gpu.model not in pools:
            if ours:
                raise InvalidProblem(f"gpus[{gpu.uuid}].model", f"{gpu.model} has no pool", "add it")
            continue
        geometry = pools[gpu.model].geometry
        unknown = [one.profile for one in gpu.instances if geometry is None or one.profile not in geometry.profiles]
        if unknown:
            raise InvalidProblem(f"gpus[{gpu.uuid}].instances", f"has no profile {unknown[0]}", "spell it by its key")
