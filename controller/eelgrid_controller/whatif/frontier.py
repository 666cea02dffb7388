"""Sweeps latency objectives of a described fleet: least power and largest load for each, and the marked rows.

`performance` is the tightest objective, `energy` the tightest of least power, `balanced` the knee between.
Capacity is the largest common factor on all rates. Training jobs have a rate and no latency: beside services that keep an
objective the fleet does so much work for them, at so many watts. Instances take whole GPUs or MIG slices; a GPU with
slices holds nothing else.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles.points import Configuration, InvalidServingValue, NoFeasibleConfiguration, Point
from eelgrid_controller.profiles.queueing_model import QuantileObjective
from eelgrid_controller.whatif.capacity import (
    CAPACITY_GAP,
    CapacityLoad,
    CapacityResult,
    largest_factor,
    missing_gpus,
)
from eelgrid_controller.whatif.instances import (
    ServiceDemand,
    choose_instances,
    count_slices,
    dispatch_load,
    feasible_shapes,
    training_shapes,
)
from eelgrid_controller.whatif.slice_layouts import (
    PartitionedGpus,
    PoolLayouts,
    build_slice_layouts,
    count_partitioned,
    cover_slices,
    find_slice_problem,
)
from eelgrid_protos.catalogue.products import MigGeometry

_COUNT_MOST = 100_000  # GPUs of one model
_RATE_MOST_HZ = 1e12


@dataclass(frozen=True, slots=True)
class FrontierPool:
    """The GPUs of one model: how many, what an idle one draws, and how it can be partitioned."""

    count: int
    idle_w: float
    geometry: MigGeometry | None = None  # None where it cannot
    idle_mig_w: float | None = None  # of an idle one with MIG on; None for the same

    @property
    def partitioned_w(self) -> float:
        """What a partitioned GPU draws before any slice is in use."""
        return self.idle_w if self.idle_mig_w is None else self.idle_mig_w


@dataclass(frozen=True, slots=True)
class FrontierService:
    """What a service is, how much is asked of it, and at which quantile its latency counts."""

    name: str
    workload: str
    rate_hz: float
    quantile: float

    def __post_init__(self) -> None:
        if not 0.0 < self.rate_hz <= _RATE_MOST_HZ:
            raise InvalidServingValue(
                f"rate_hz of {self.name}", f"{self.rate_hz} Hz", "give more than 0: leave out what is idle"
            )
        if not 0.0 < self.quantile < 1.0:
            raise InvalidServingValue(
                f"quantile of {self.name}", f"{self.quantile}", "give a share between 0 and 1, 0.95 for p95"
            )


@dataclass(frozen=True, slots=True)
class FrontierTraining:
    """Training jobs of one kind, and how much of their work is to be done in a second; or one job that runs."""

    name: str
    workload: str
    rate_hz: float
    runs_on: tuple[str, int] | None = None  # GPU model and GPUs of the one job

    def __post_init__(self) -> None:
        if not 0.0 < self.rate_hz <= _RATE_MOST_HZ:
            raise InvalidServingValue(
                f"rate_hz of {self.name}", f"{self.rate_hz} Hz", "give more than 0: leave out what is not to be done"
            )


class UsablePoints(NamedTuple):
    """The points of each service and of the training jobs, and how many others were passed over for which reason."""

    points: tuple[tuple[Point, ...], ...]
    training: tuple[tuple[Point, ...], ...]
    passed_over: Mapping[str, int]


def _flaw(point: Point, asked: set[str], fleet: Mapping[str, FrontierPool]) -> str | None:
    """Why no service can use this point."""
    configuration = point.configuration
    if point.workload not in asked:
        return f"workload {point.workload}: no service asks for it"
    if configuration.gpu_model not in fleet:
        return f"{configuration.gpu_model}: not in the fleet"
    pool = fleet[configuration.gpu_model]
    if configuration.mig_profile:
        if problem := find_slice_problem(configuration, pool.geometry):
            return f"{configuration.mig_profile}: {problem.problem}"
        if configuration.power_limit_w is not None or configuration.clock_mhz is not None:
            return "MIG slices at a power limit or locked clock: these are set for whole GPUs; measure at the default"
    if point.power_w is None:
        return "watts not measured"
    if configuration.mig_profile:
        return None  # what it adds to an idle GPU
    idle_w = pool.idle_w * configuration.gpus
    if point.power_w < idle_w:
        raise InvalidServingValue(
            "power_w",
            f"{point.workload} on {configuration.gpus} x {configuration.gpu_model} draws {point.power_w:g} W, "
            f"less than {idle_w:g} W idle",
            "correct the point, or give idle_w with the fleet",
        )
    return None


def _name_slice(point: Point, fleet: Mapping[str, FrontierPool]) -> Point:
    """The point with the printed name of its MIG profile, which may be given by the catalogue's key."""
    where = point.configuration
    geometry = fleet[where.gpu_model].geometry
    profile = geometry.profile(where.mig_profile) if geometry is not None and where.mig_profile else None
    if profile is None or profile.name == where.mig_profile:
        return point
    return replace(point, configuration=replace(where, mig_profile=profile.name))


def _find_layouts(known: UsablePoints, fleet: Mapping[str, FrontierPool]) -> PoolLayouts:
    """The layouts of the models of which slices were measured."""
    profiles: dict[str, set[str]] = {}
    for where in (point.configuration for mine in (*known.points, *known.training) for point in mine):
        if where.mig_profile:
            profiles.setdefault(where.gpu_model, set()).add(where.mig_profile)
    found = {}
    for model, pool in fleet.items():
        if model in profiles and pool.geometry is not None:
            found[model] = build_slice_layouts(pool.geometry, profiles[model], pool.partitioned_w - pool.idle_w)
    return found


def is_measured_on(point: Point, runs_on: tuple[str, int]) -> bool:
    """Whether a point is of whole GPUs of this model and number, with their watts."""
    where = point.configuration
    return (where.gpu_model, where.gpus) == runs_on and not where.mig_profile and point.power_w is not None


def _select_training_points(job: FrontierTraining, points: Iterable[Point]) -> tuple[Point, ...]:
    """The points at which training can run: of a job that runs, in its fastest way, at all limits of its power."""
    mine = [point for point in points if point.workload == job.workload]
    if job.runs_on is None:
        return tuple(mine)
    mine = [point for point in mine if is_measured_on(point, job.runs_on)]
    fastest = max(mine, key=lambda one: one.throughput_hz, default=None)
    return tuple(one for one in mine if fastest is not None and _way(one) == _way(fastest))


def _way(point: Point) -> tuple[int, int | None, str]:
    return point.configuration.processes, point.configuration.clock_mhz, point.configuration.label


def select_usable_points(
    points: Sequence[Point],
    services: Sequence[FrontierService],
    fleet: Mapping[str, FrontierPool],
    training: Sequence[FrontierTraining] = (),
) -> UsablePoints:
    """The points that each can run at; raises InvalidServingValue, and NoFeasibleConfiguration for one that has none."""
    if not services:
        raise InvalidServingValue("services", "none", "name at least one")
    names = [*(service.name for service in services), *(job.name for job in training)]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise InvalidServingValue("services", f"{repeated[0]} is there twice", "give each its own name")
    for model, gpus in fleet.items():
        if not 0 <= gpus.count <= _COUNT_MOST:
            raise InvalidServingValue(f"fleet {model}", f"{gpus.count} GPUs", f"give 0 to {_COUNT_MOST}")
        if gpus.idle_w < 0.0:
            raise InvalidServingValue(f"fleet {model}", f"{gpus.idle_w:g} W idle", "give 0 or more")
        if gpus.partitioned_w < gpus.idle_w:
            raise InvalidServingValue(
                f"fleet {model}",
                f"{gpus.partitioned_w:g} W idle with MIG on, less than {gpus.idle_w:g} W without",
                "correct idle_w or idle_mig_w",
            )
    asked = {service.workload for service in services} | {job.workload for job in training}
    flaws = [_flaw(point, asked, fleet) for point in points]
    passed = Counter(flaw for flaw in flaws if flaw is not None)
    sound = [_name_slice(point, fleet) for point, flaw in zip(points, flaws, strict=True) if flaw is None]
    found = []
    for service in services:
        mine = tuple(p for p in sound if p.workload == service.workload)
        timed = tuple(p for p in mine if p.latency_s.get(service.quantile) is not None)
        if not timed:
            raise NoFeasibleConfiguration(
                f"service {service.name}",
                f"no point of {service.workload} on a model of the fleet"
                + (f" has its latency at quantile {service.quantile:g}" if mine else " with watts"),
                "measure one, or correct the workload, the quantile or the fleet",
            )
        if len(mine) > len(timed):
            passed[f"{service.name}: latency at quantile {service.quantile:g} not measured"] = len(mine) - len(timed)
        found.append(timed)
    trained = []
    for job in training:
        trained.append(_select_training_points(job, sound))
        if not trained[-1]:
            raise NoFeasibleConfiguration(
                f"training {job.name}",
                f"no point of {job.workload} on a model of the fleet with watts",
                "measure one, or correct the workload or the fleet",
            )
        most_hz = max(point.throughput_hz for point in trained[-1])
        if job.runs_on is not None and job.rate_hz > most_hz:
            raise NoFeasibleConfiguration(
                f"training {job.name}",
                f"one job does at most {most_hz:g} a second",
                f"ask for less than {job.rate_hz:g}",
            )
    return UsablePoints(tuple(found), tuple(trained), dict(passed))


_SAME = 1e-9  # relative: rounding


class RowCost(NamedTuple):
    """What a row is worth; less latency and power, and larger factors are better."""

    latency_s: float
    power_w: float
    factor: float
    training_factor: float = 0.0


def _beats(one: RowCost, other: RowCost) -> bool:
    """No worse in all, better in one, by more than rounding."""
    no_worse = (
        one.latency_s <= other.latency_s
        and one.power_w <= other.power_w * (1.0 + _SAME)
        and one.factor >= other.factor * (1.0 - _SAME)
        and one.training_factor >= other.training_factor * (1.0 - _SAME)
    )
    return no_worse and (
        one.latency_s < other.latency_s
        or one.power_w < other.power_w * (1.0 - _SAME)
        or one.factor > other.factor * (1.0 + _SAME)
        or one.training_factor > other.training_factor * (1.0 + _SAME)
    )


def efficient_rows(rows: Sequence[RowCost]) -> tuple[bool, ...]:
    """Which rows no other beats."""
    return tuple(not any(_beats(other, one) for other in rows) for one in rows)


def balanced_row(rows: Sequence[RowCost]) -> int:
    """The place of the knee among rows, one or more, whose latency rises and whose watts do not; see above."""
    if any(row.latency_s <= 0.0 or row.power_w <= 0.0 for row in rows):
        return 0  # no logarithm: a fleet that draws nothing has nothing to trade
    least_w = min(row.power_w for row in rows)
    last = next(place for place, row in enumerate(rows) if row.power_w <= least_w * (1.0 + _SAME))
    wide, high = (math.log(max(a, b) / min(a, b)) for a, b in zip(rows[0][:2], rows[last][:2], strict=True))
    if not (wide > 0.0 and high > 0.0):
        return 0
    below = [
        1.0 - math.log(row.latency_s / rows[0].latency_s) / wide - math.log(row.power_w / rows[last].power_w) / high
        for row in rows[: last + 1]
    ]
    most = max(below)
    if most <= _SAME:
        return 0
    return next(place for place, depth in enumerate(below) if depth >= most - _SAME)


OBJECTIVES_MOST = 200
POINTS_MOST = 10_000
SERVICES_MOST = 1_000
_SOLVED = 1e-5  # relative: how near the best the solvers come; a smaller gain is none


@dataclass(frozen=True, slots=True)
class PlacedInstances:
    """Instances of a service that are started alike; `configuration.batch` is that of no one point: 0."""

    service: str  # or the training jobs
    configuration: Configuration
    instances: int


@dataclass(frozen=True, slots=True)
class FrontierPlan:
    """What serves all rates at an objective, and trains."""

    power_w: float  # of the fleet, unused GPUs idle
    serving_w: float  # of the GPUs that serve or train
    gpus: Mapping[str, int]  # that serve or train, by model; partitioned ones among them
    placed: tuple[PlacedInstances, ...]
    partitioned: tuple[PartitionedGpus, ...] = ()

    @property
    def partitioned_gpus(self) -> Mapping[str, int]:
        """The number of partitioned GPUs by model."""
        return count_partitioned(self.partitioned)


@dataclass(frozen=True, slots=True)
class FrontierRow:
    """One objective; `plan` is None where the fleet does not carry the rates, and `lacks` says what it takes."""

    latency_s: float
    factor: float  # the largest on all rates of services
    plan: FrontierPlan | None
    lacks: Mapping[str, int]  # GPUs by model
    is_efficient: bool = False
    mark: str = ""  # weightings whose choice this is
    training_factor: float = 0.0  # the largest on all rates of training, beside services at their rates

    @property
    def binding_constraint(self) -> str:
        """Why the rates are not carried."""
        return ", ".join(f"{count} more {model}" for model, count in self.lacks.items())


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What the fleet draws if training is done at a factor of its rates, beside services that keep an objective."""

    latency_s: float
    factor: float
    power_w: float


@dataclass(frozen=True, slots=True)
class Frontier:
    """The rows by latency, rising, and what lies beside them."""

    rows: tuple[FrontierRow, ...]
    rate_hz: float  # of all services
    tightest: tuple[str, float]  # the service whose fastest point is the slowest, and its latency in s
    objectives: int  # at which the choice can change; more than rows if they were thinned out
    passed_over: Mapping[str, int]  # points, by reason
    training_hz: float = 0.0  # of all training jobs
    training: tuple[TrainingStep, ...] = ()  # at each marked objective, by factor, rising


def _unbeaten(points: Sequence[Point], quantile: float) -> set[float]:
    """Latencies at which a shape gains something."""
    shapes: dict[Configuration, list[tuple[float, float, float]]] = {}
    for point in points:
        row = (point.latency_s[quantile], point.power_w or 0.0, -point.throughput_hz)
        shapes.setdefault(replace(point.configuration, batch=0), []).append(row)
    found = set()
    for rows in shapes.values():
        kept = np.empty((len(rows), 2))
        size = 0
        for latency_s, *worth in sorted(rows):
            if not np.any(np.all(kept[:size] <= worth, axis=1)):
                kept[size] = worth
                size += 1
                found.add(latency_s)
    return found


def _thin_values(values: Sequence[float], most: int) -> list[float]:
    """At most so many, evenly by their place, the ends among them."""
    if len(values) <= most:
        return list(values)
    places = {round(number * (len(values) - 1) / (most - 1)) for number in range(most)}
    return [values[place] for place in sorted(places)]


def _plan(
    names: Sequence[str],
    loads: Sequence[CapacityLoad],
    fleet: Mapping[str, FrontierPool],
    layouts: PoolLayouts,
    carried: CapacityResult,
) -> FrontierPlan | None:
    """The least watts at which all rates are served, or None."""
    asks = [
        ServiceDemand(load.shapes, load.rate_hz, (0,) * len(load.shapes))
        if (most := load.instances_most) is None
        else ServiceDemand(load.shapes, load.rate_hz, (most,) * len(load.shapes), only_loaded=True)
        for load in loads
    ]
    try:
        pool = {model: gpus.count for model, gpus in fleet.items()}
        serving = choose_instances(asks, pool, window_s=1.0, amortised=1, layouts=layouts)
    except NoFeasibleConfiguration:
        if carried.factor < 1.0:
            return None
        serving = carried.instances  # on the border, where two solvers round differently
    used = dict.fromkeys(fleet, 0)
    placed = []
    for name, load, counts in zip(names, loads, serving, strict=True):
        for shape, count in zip(load.shapes, counts, strict=True):
            used[shape.configuration.gpu_model] += shape.gpus * count
            if count:
                placed.append(PlacedInstances(name, shape.configuration, count))
    partitioned = cover_slices(layouts, count_slices(asks, serving))
    watts = [
        dispatch_load(ask.shapes, counts, ask.demand_hz).power_w for ask, counts in zip(asks, serving, strict=True)
    ]
    for model, count in count_partitioned(partitioned).items():
        used[model] += count
        watts.append(count * fleet[model].partitioned_w)
    serving_w = math.fsum(watts)
    unused_w = math.fsum((gpus.count - used[model]) * gpus.idle_w for model, gpus in fleet.items())
    in_use = {model: count for model, count in used.items() if count}
    return FrontierPlan(serving_w + unused_w, serving_w, in_use, tuple(placed), partitioned)


def _mark_rows(rows: Sequence[FrontierRow]) -> tuple[FrontierRow, ...]:
    """The rows with what is efficient and whose choice they are."""
    feasible = [(place, row.plan) for place, row in enumerate(rows) if row.plan is not None]
    if not feasible:
        return tuple(rows)
    worth = [
        RowCost(rows[place].latency_s, plan.power_w, rows[place].factor, rows[place].training_factor)
        for place, plan in feasible
    ]
    marks: dict[int, list[str]] = {}
    least_w = min(one.power_w for one in worth)
    cheapest = next(number for number, one in enumerate(worth) if one.power_w <= least_w)
    for number, name in ((0, "performance"), (balanced_row(worth), "balanced"), (cheapest, "energy")):
        marks.setdefault(feasible[number][0], []).append(name)
    best = {place for (place, _), is_best in zip(feasible, efficient_rows(worth), strict=True) if is_best}
    return tuple(
        replace(row, is_efficient=place in best, mark=",".join(marks.get(place, ()))) for place, row in enumerate(rows)
    )


_TRAINING_STEPS = 8  # of the way to what the fleet can do


class _Sweep:
    """The objectives of one fleet, one after another, tightest first."""

    def __init__(
        self,
        known: UsablePoints,
        services: Sequence[FrontierService],
        training: Sequence[FrontierTraining],
        fleet: Mapping[str, FrontierPool],
    ) -> None:
        self._known, self._services, self._fleet = known, services, fleet
        self._pool = {model: gpus.count for model, gpus in fleet.items()}
        self._idle_w = {model: gpus.idle_w for model, gpus in fleet.items()}
        self._layouts = _find_layouts(known, fleet)
        self._names = [*(service.name for service in services), *(job.name for job in training)]
        self._training = [
            CapacityLoad(job.rate_hz, training_shapes(mine, self._idle_w), None if job.runs_on is None else 1)
            for job, mine in zip(training, known.training, strict=True)
        ]
        self.rows: list[FrontierRow] = []
        self._best, self._best_training = CapacityResult(0.0, ()), 0.0
        self._before: list[CapacityLoad] = []

    def _list_loads(self, latency_s: float) -> list[CapacityLoad]:
        return [
            CapacityLoad(
                service.rate_hz,
                feasible_shapes(mine, QuantileObjective(service.quantile, latency_s), idle_w=self._idle_w, start_s=0.0),
            )
            for service, mine in zip(self._services, self._known.points, strict=True)
        ]

    def add_row(self, latency_s: float) -> None:
        """Adds the row of an objective, looser than those before."""
        loads = self._list_loads(latency_s)
        if self.rows and loads == self._before:
            self.rows.append(replace(self.rows[-1], latency_s=latency_s))
            return
        self._before = loads
        carried = largest_factor(loads, self._pool, self._training, self._layouts)
        if carried.factor > self._best.factor * (1.0 + CAPACITY_GAP):
            self._best = carried
        plan = _plan(self._names, [*loads, *self._training], self._fleet, self._layouts, carried)
        held = self.rows[-1].plan if self.rows else None
        if held is not None and (plan is None or plan.power_w >= held.power_w * (1.0 - _SOLVED)):
            plan = held
        factor = self._best.factor if plan is None else max(self._best.factor, 1.0)
        if self._training:
            most = largest_factor(self._training, self._pool, loads, self._layouts).factor
            self._best_training = max(self._best_training, most, 0.0 if plan is None else 1.0)
        lacks = {} if plan is not None else missing_gpus([*loads, *self._training], self._pool, self._layouts)
        self.rows.append(FrontierRow(latency_s, factor, plan, lacks, training_factor=self._best_training))

    def trace_training(self, row: FrontierRow) -> Iterator[TrainingStep]:
        """Yields what the fleet draws at an objective by how much is trained, from nothing to all that it can do."""
        services = self._list_loads(row.latency_s)
        least_w = 0.0
        for step in range(_TRAINING_STEPS + 1):
            factor = row.training_factor * (1.0 - CAPACITY_GAP) * step / _TRAINING_STEPS
            some = [load._replace(rate_hz=load.rate_hz * factor) for load in self._training] if step else []
            names = self._names[: len(services) + len(some)]
            plan = _plan(names, [*services, *some], self._fleet, self._layouts, CapacityResult(0.0, ()))
            if plan is not None:
                least_w = max(least_w, plan.power_w)
                yield TrainingStep(row.latency_s, factor, least_w)


def compute_frontier(
    points: Sequence[Point],
    services: Sequence[FrontierService],
    fleet: Mapping[str, FrontierPool],
    *,
    training: Sequence[FrontierTraining] = (),
    objectives_most: int = OBJECTIVES_MOST,
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> Frontier:
    """Energy against latency against throughput of these services, and training jobs, on this fleet.

    `tell` is called before each objective with how many are done and how many there are.
    Raises InvalidServingValue for a value that is none, NoFeasibleConfiguration for what has no point.
    """
    if len(points) > POINTS_MOST or len(services) + len(training) > SERVICES_MOST:
        what, most = ("points", POINTS_MOST) if len(points) > POINTS_MOST else ("services", SERVICES_MOST)
        raise InvalidServingValue(what, f"over {most}", "leave out what cannot be chosen")
    if not 2 <= objectives_most <= OBJECTIVES_MOST:
        raise InvalidServingValue("objectives", f"{objectives_most}", f"give 2 to {OBJECTIVES_MOST}")
    known = select_usable_points(points, services, fleet, training)
    least_s = [
        min(p.latency_s[service.quantile] for p in mine) for service, mine in zip(services, known.points, strict=True)
    ]
    slowest = max(range(len(services)), key=least_s.__getitem__)
    changes = {least_s[slowest]}.union(
        *(_unbeaten(mine, service.quantile) for service, mine in zip(services, known.points, strict=True))
    )
    every = sorted(latency_s for latency_s in changes if latency_s >= least_s[slowest])
    sweep = _Sweep(known, services, training, fleet)
    taken = _thin_values(every, objectives_most)
    for done, latency_s in enumerate(taken):
        tell(done, len(taken))
        sweep.add_row(latency_s)
    rows = _mark_rows(sweep.rows)
    return Frontier(
        rows,
        math.fsum(s.rate_hz for s in services),
        (services[slowest].name, least_s[slowest]),
        len(every),
        known.passed_over,
        math.fsum(job.rate_hz for job in training),
        tuple(step for row in rows if row.mark and training for step in sweep.trace_training(row)),
    )
