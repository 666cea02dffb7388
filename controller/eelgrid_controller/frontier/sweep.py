"""The frontier: for each latency objective the least watts of the fleet, and the most that it can carry.

Owns the objectives, the order of the work and the rows. Must not know files, tables
or pictures.

Theory. One objective L holds for all services, each at its own quantile. Service i
may run at its points of latency <= L (serving/instances.py), so the choice can change
at measured latencies alone, and only at those of a point that is not beaten in its own
shape by one of no more latency and watts and no less throughput. Least watts for whole
instances in a shared fleet are those of serving/windows.py with starts that cost
nothing. A looser objective allows what a tighter one does: an answer that would
be worse (the solver's are within a gap of the best) is replaced by the tighter one, so
watts never rise and the factor never falls along the rows.
The watts of a row are those of the whole fleet, unused GPUs idle.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eelgrid_controller.frontier.capacity import GAP, Carried, Load, lacking, largest_factor
from eelgrid_controller.frontier.described import Gpus, Service, usable
from eelgrid_controller.frontier.marks import Worth, balanced, efficient
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.serving.errors import NothingFits, Unusable
from eelgrid_controller.serving.instances import Shape, dispatch, shapes_of
from eelgrid_controller.serving.sizing import Objective
from eelgrid_controller.serving.windows import Ask, chosen

__all__ = ["OBJECTIVES_MOST", "POINTS_MOST", "Frontier", "Placed", "Plan", "Row", "frontier"]

OBJECTIVES_MOST = 200
POINTS_MOST = 10_000
SERVICES_MOST = 1_000
_SOLVED = 1e-5  # relative: how near the best the solvers come; a smaller gain is none


@dataclass(frozen=True, slots=True)
class Placed:
    """Instances of a service that are started alike; `configuration.batch` is that of no one point: 0."""

    service: str
    configuration: Configuration
    instances: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What serves all rates at an objective."""

    power_w: float  # of the fleet, unused GPUs idle
    serving_w: float  # of the GPUs that serve
    gpus: Mapping[str, int]  # that serve, by model
    placed: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One objective; `plan` is None where the fleet does not carry the rates, and `lacks` says what it takes."""

    latency_s: float
    factor: float  # the largest on all rates
    plan: Plan | None
    lacks: Mapping[str, int]  # GPUs by model
    is_efficient: bool = False
    mark: str = ""  # weightings whose choice this is

    @property
    def binds(self) -> str:
        """Why the rates are not carried."""
        return ", ".join(f"{count} more {model}" for model, count in self.lacks.items())


@dataclass(frozen=True, slots=True)
class Frontier:
    """The rows by latency, rising, and what lies beside them."""

    rows: tuple[Row, ...]
    rate_hz: float  # of all services
    tightest: tuple[str, float]  # the service whose fastest point is the slowest, and its latency in s
    objectives: int  # at which the choice can change; more than rows if they were thinned out
    passed_over: Mapping[str, int]  # points, by reason


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


def _thinned(values: Sequence[float], most: int) -> list[float]:
    """At most so many, evenly by their place, the ends among them."""
    if len(values) <= most:
        return list(values)
    places = {round(number * (len(values) - 1) / (most - 1)) for number in range(most)}
    return [values[place] for place in sorted(places)]


def _plan(
    services: Sequence[Service], shapes: Sequence[tuple[Shape, ...]], fleet: Mapping[str, Gpus], carried: Carried
) -> Plan | None:
    """The least watts at which all rates are served, or None."""
    asks = [Ask(some, service.rate_hz, (0,) * len(some)) for service, some in zip(services, shapes, strict=True)]
    try:
        serving = chosen(asks, {model: gpus.count for model, gpus in fleet.items()}, window_s=1.0, amortised=1)
    except NothingFits:
        if carried.factor < 1.0:
            return None
        serving = carried.instances  # on the border, where two solvers round differently
    used = dict.fromkeys(fleet, 0)
    placed = []
    for service, some, counts in zip(services, shapes, serving, strict=True):
        for shape, count in zip(some, counts, strict=True):
            used[shape.configuration.gpu_model] += shape.gpus * count
            if count:
                placed.append(Placed(service.name, shape.configuration, count))
    serving_w = math.fsum(
        dispatch(ask.shapes, counts, ask.demand_hz).power_w for ask, counts in zip(asks, serving, strict=True)
    )
    unused_w = math.fsum((gpus.count - used[model]) * gpus.idle_w for model, gpus in fleet.items())
    return Plan(serving_w + unused_w, serving_w, {model: n for model, n in used.items() if n}, tuple(placed))


def _marked(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows with what is efficient and whose choice they are."""
    feasible = [(place, row.plan) for place, row in enumerate(rows) if row.plan is not None]
    if not feasible:
        return tuple(rows)
    worth = [Worth(rows[place].latency_s, plan.power_w, rows[place].factor) for place, plan in feasible]
    marks: dict[int, list[str]] = {}
    least_w = min(one.power_w for one in worth)
    cheapest = next(number for number, one in enumerate(worth) if one.power_w <= least_w)
    for number, name in ((0, "performance"), (balanced(worth), "balanced"), (cheapest, "energy")):
        marks.setdefault(feasible[number][0], []).append(name)
    best = {place for (place, _), is_best in zip(feasible, efficient(worth), strict=True) if is_best}
    return tuple(
        replace(row, is_efficient=place in best, mark=",".join(marks.get(place, ()))) for place, row in enumerate(rows)
    )


def frontier(
    points: Sequence[Point],
    services: Sequence[Service],
    fleet: Mapping[str, Gpus],
    *,
    objectives_most: int = OBJECTIVES_MOST,
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> Frontier:
    """Energy against latency against throughput of these services on this fleet.

    `tell` is called before each objective with how many are done and how many there are.
    Raises Unusable for a value that is none, NothingFits for a service without a point.
    """
    if len(points) > POINTS_MOST or len(services) > SERVICES_MOST:
        what, most = ("points", POINTS_MOST) if len(points) > POINTS_MOST else ("services", SERVICES_MOST)
        raise Unusable(what, f"over {most}", "leave out what cannot be chosen")
    if not 2 <= objectives_most <= OBJECTIVES_MOST:
        raise Unusable("objectives", f"{objectives_most}", f"give 2 to {OBJECTIVES_MOST}")
    known = usable(points, services, fleet)
    pool = {model: gpus.count for model, gpus in fleet.items()}
    idle_w = {model: gpus.idle_w for model, gpus in fleet.items()}
    least_s = [
        min(p.latency_s[service.quantile] for p in mine) for service, mine in zip(services, known.points, strict=True)
    ]
    slowest = max(range(len(services)), key=least_s.__getitem__)
    changes = {least_s[slowest]}.union(
        *(_unbeaten(mine, service.quantile) for service, mine in zip(services, known.points, strict=True))
    )
    every = sorted(latency_s for latency_s in changes if latency_s >= least_s[slowest])
    rows: list[Row] = []
    best = Carried(0.0, ())
    before: list[tuple[Shape, ...]] = []
    taken = _thinned(every, objectives_most)
    for done, latency_s in enumerate(taken):
        tell(done, len(taken))
        shapes = [
            shapes_of(mine, Objective(service.quantile, latency_s), idle_w=idle_w, start_s=0.0)
            for service, mine in zip(services, known.points, strict=True)
        ]
        if rows and shapes == before:
            rows.append(replace(rows[-1], latency_s=latency_s))
            continue
        before = shapes
        loads = [Load(service.rate_hz, some) for service, some in zip(services, shapes, strict=True)]
        carried = largest_factor(loads, pool)
        if carried.factor > best.factor * (1.0 + GAP):
            best = carried
        plan = _plan(services, shapes, fleet, carried)
        held = rows[-1].plan if rows else None
        if held is not None and (plan is None or plan.power_w >= held.power_w * (1.0 - _SOLVED)):
            plan = held
        factor = best.factor if plan is None else max(best.factor, 1.0)
        rows.append(Row(latency_s, factor, plan, {} if plan is not None else lacking(loads, pool)))
    return Frontier(
        _marked(rows), math.fsum(s.rate_hz for s in services), (services[slowest].name, least_s[slowest]),
        len(every), known.passed_over,
    )  # fmt: skip
