"""New rates on a running fleet: what stays, what changes, and whether the change is worth its cost.

Owns the choice between staying and changing. Must not know how agents do steps.

Theory: GPUs that stand alike form a kind k of n_k; u_kt of them become target t
(running.py), x_o replicas of option o run afterwards, of which h_o stay where they
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
its cost. A GPU that somebody else uses as well costs nothing more.

At fleet size the programme has the GPUs that the change is about (scope.py); all
other replicas stay.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from eelgrid_controller.partition.errors import BadProblem, FleetTooSmall
from eelgrid_controller.partition.prices import Prices, known_prices
from eelgrid_controller.partition.problem import Objective, Pool, Problem
from eelgrid_controller.partition.programme import EXACT, Programme, compiled, narrowed, objectives
from eelgrid_controller.partition.running import RunningGpu
from eelgrid_controller.partition.scope import Scope, Seen, renewed, scoped, seen
from eelgrid_controller.partition.settle import keen
from eelgrid_controller.partition.steps import Course, Create, Destroy, SetMode, Start, course
from eelgrid_controller.partition.transition import Costs, decided, kinds, made

__all__ = ["SCOPE_MOST", "Change", "Costs", "change", "worth"]

# GPUs in use that may change at once: all of a fleet this small, of a larger one as many as take a second.
SMALL_FLEET, SCOPE_MOST = 48, 24
OPTIONS_MOST = 5  # of a service: one model has five sizes
_WIDER, _WIDEST = 2, 4


class Change(NamedTuple):
    """The fleet afterwards and the way there. Costs and gains are in GPU-seconds, or joules where watts are least."""

    gpus: tuple[RunningGpu, ...]
    course: Course
    cost: float  # of the steps, once
    gain: float  # what the fleet costs less over the horizon; negative where rates ask for more
    before: float  # GPUs by their cost, or watts
    after: float


def change(
    problem: Problem,
    gpus: Sequence[RunningGpu],
    costs: Costs | None = None,
    prices: Prices | None = None,
    scope_most: int | None = None,
) -> Change:
    """The best change of these GPUs for this problem; raises Unservable, FleetTooSmall, SearchExhausted, BadProblem.

    GPUs that are held, pinned instances, training jobs that run and replicas of several GPUs stay as they are. Jobs
    of the problem that do not run yet are placed on whole GPUs. Prices of places (Plan.memory) tell the options of a
    fleet of many models that are worth looking at; without them all places of a GPU cost alike.
    """
    _check(problem, gpus)
    costs = costs or Costs()
    replicas = seen(problem, gpus)
    before = renewed(gpus, replicas)
    after: list[RunningGpu] | None = None
    if scope_most is None:
        in_use = sum(gpu.whole is not None or bool(gpu.instances) for gpu in gpus)
        scope_most = SMALL_FLEET if in_use <= SMALL_FLEET else SCOPE_MOST
    most = max(1, scope_most)
    while after is None:
        scope = scoped(problem, before, replicas, most)
        programme = _narrow(compiled(scope.problem, scope.held), scope, prices)
        found = kinds(programme, before, scope.gpus)
        try:
            changed = made(programme, before, found, decided(programme, before, found, costs))
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


def _narrow(programme: Programme, scope: Scope, prices: Prices | None) -> Programme:
    """With options that are held or among the cheapest, where models are many."""
    if len(programme.options) <= OPTIONS_MOST * len(programme.rate_hz):
        return programme
    first, _ = objectives(programme)
    cost = {int(pool): float(first.pattern[at]) for at, pool in enumerate(programme.pool)}
    pools = programme.problem.pools
    if prices is None:
        prices = {
            (pools[cell.pool].model, cell.profile): cost[cell.pool] * cell.slices / _slices_of(pools[cell.pool])
            for cell in programme.cells
        }
    keep = keen(programme, first, known_prices(programme, prices), OPTIONS_MOST)
    names = [service.name for service in programme.problem.services if service.rate_hz > 0.0]
    for number, option in enumerate(programme.options):
        if option.point is not None and option.point.configuration in scope.held.get(names[option.demand], ()):
            keep[number] = True
    return narrowed(programme, keep)


def _slices_of(pool: Pool) -> int:
    return 1 if pool.geometry is None else pool.geometry.compute_slices


def worth(problem: Problem, gpus: Sequence[RunningGpu]) -> float:
    """What the GPUs in use cost: by their price, or in watts."""
    pools = {pool.model: pool for pool in problem.pools}
    total = 0.0
    for gpu in gpus:
        replicas = tuple(gpu.replicas())
        if not replicas:
            continue
        pool = pools[gpu.model]
        total += _gpu_cost(problem, pool) if not gpu.pinned else 0.0
        if problem.objective == Objective.WATTS:
            for replica in replicas:
                several = 1 if replica.configuration is None or gpu.whole is None else replica.configuration.gpus
                total += replica.added_w / several
    return total


def _gpu_cost(problem: Problem, pool: Pool) -> float:
    return pool.cost if problem.objective == Objective.GPUS else pool.held_w or 0.0


def _account(problem: Problem, before: tuple[RunningGpu, ...], after: tuple[RunningGpu, ...], costs: Costs) -> Change:
    geometries = {pool.model: pool.geometry for pool in problem.pools}
    rate_hz = {service.name: service.rate_hz for service in problem.services}
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old is not new]
    changed_before, changed_after = [old for old, _ in pairs], [new for _, new in pairs]
    way = course(before, after, geometries, rate_hz)
    price: Mapping[type, float] = {
        Destroy: costs.destroy, Create: costs.create, Start: costs.start, SetMode: costs.mode
    }  # fmt: skip
    value = worth(problem, before)
    new_value = value - worth(problem, changed_before) + worth(problem, changed_after)
    return Change(
        gpus=after,
        course=way,
        cost=sum(price.get(type(step), 0.0) for step in way.steps),
        gain=costs.horizon_s * (value - new_value),
        before=value,
        after=new_value,
    )


def _keeps(problem: Problem, replicas: Sequence[Sequence[Seen]]) -> bool:
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
        served.get(service.name, 0.0) >= service.rate_hz * (1.0 - EXACT) for service in problem.services
    )


def _room(problem: Problem, before: Sequence[RunningGpu], after: Sequence[RunningGpu], costs: Costs) -> float:
    """What the compute slices are worth that are not in use any more."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old is not new]
    freed = _slices(problem, [old for old, _ in pairs]) - _slices(problem, [new for _, new in pairs])
    return costs.horizon_s * costs.room * freed


def _slices(problem: Problem, gpus: Sequence[RunningGpu]) -> int:
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


def _check(problem: Problem, gpus: Sequence[RunningGpu]) -> None:
    pools = {pool.model: pool for pool in problem.pools}
    if len({gpu.uuid for gpu in gpus}) < len(gpus):
        raise BadProblem("gpus", "one UUID stands twice", "list each GPU once")
    for gpu in gpus:
        ours = any(True for _ in gpu.replicas())
        if gpu.model not in pools:
            if ours:
                raise BadProblem(f"gpus[{gpu.uuid}].model", f"{gpu.model} has no pool", "add it")
            continue
        geometry = pools[gpu.model].geometry
        unknown = [one.profile for one in gpu.instances if geometry is None or one.profile not in geometry.profiles]
        if unknown:
            raise BadProblem(f"gpus[{gpu.uuid}].instances", f"has no profile {unknown[0]}", "spell it by its key")
