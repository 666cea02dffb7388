"""Service instances that keep a latency objective: the power at which they serve a load, and which of a pool serve it.

Each instance shape runs along the concave hull of throughput over power; a load is dispatched at least power. One
service alone is solved exactly by branch and bound; services that compete for a short pool, or share partitioned GPUs,
are solved together as a mixed-integer program (HiGHS).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.partition.mixed_integer import solve_mixed_integer
from eelgrid_controller.profiles.points import Configuration, InvalidServingValue, NoFeasibleConfiguration, Point
from eelgrid_controller.profiles.queueing_model import QuantileObjective
from eelgrid_controller.whatif.slice_layouts import (
    NO_LAYOUTS,
    PoolLayouts,
    SliceKind,
    count_partitioned,
    cover_slices,
    list_layout_columns,
    most_slices,
)
from eelgrid_kernels.arrays import Floats

if TYPE_CHECKING:
    from scipy import sparse

IDLE_POINT = -1


class PartLoad(Enum):
    """What an instance draws that has less to do than at its first point."""

    MEASURED = "measured"
    PROPORTIONAL = "proportional"


class HullStep(NamedTuple):
    """One point of a hull; `point` is its place among the points that were given, IDLE that of no one."""

    throughput_hz: float
    power_w: float
    point: int


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """What an instance is started as, and the hull that it runs along."""

    configuration: Configuration  # batch is that of no one point: 0
    steps: tuple[HullStep, ...]  # throughput and watts rise, watts per added token too
    idle_w: float  # of all its GPUs; 0 for a slice, whose watts are what it adds
    start_j: float  # energy of a start, on top of what its GPUs would draw idle

    @property
    def gpus(self) -> int:
        """Whole GPUs of one instance; 0 for a slice."""
        return 0 if self.configuration.mig_profile else self.configuration.gpus

    @property
    def slice_kind(self) -> SliceKind | None:
        """The slice that one instance takes; None where it takes whole GPUs."""
        where = self.configuration
        return SliceKind(where.gpu_model, where.mig_profile) if where.mig_profile else None

    @property
    def throughput_hz(self) -> float:
        """The most that one instance gives within the objective."""
        return self.steps[-1].throughput_hz


class InstanceLoad(NamedTuple):
    """How a load is served: instances at each step of each shape, in whole and one divided in time."""

    instances: tuple[tuple[float, ...], ...]
    throughput_hz: float
    power_w: float  # of the instances that serve


def _same(point: Point) -> Configuration:
    return replace(point.configuration, batch=0)


def _hull(steps: Iterable[HullStep]) -> tuple[HullStep, ...]:
    """The lower right hull: from the least watts on, watts per added token rising."""
    kept: list[HullStep] = []
    for step in sorted(steps, key=lambda one: (one.power_w, -one.throughput_hz)):
        if kept and step.throughput_hz <= kept[-1].throughput_hz:
            continue
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) >= _slope(kept[-1], step):
            kept.pop()
        kept.append(step)
    return tuple(kept)


def _slope(low: HullStep, high: HullStep) -> float:
    """Joules of an added token."""
    return (high.power_w - low.power_w) / (high.throughput_hz - low.throughput_hz)


def feasible_shapes(
    points: Sequence[Point],
    objective: QuantileObjective,
    *,
    idle_w: Mapping[str, float],
    start_s: float,
    part_load: PartLoad = PartLoad.MEASURED,
) -> tuple[InstanceShape, ...]:
    """The shapes with an admissible point, in the order of their first; NoFeasibleConfiguration if there is none.

    `idle_w` is of one GPU by model, and is not part of the watts of slices. A start costs `start_s` at the least watts that the
    shape was measured at. A point without watts, or without this quantile, is passed over.
    """
    if start_s < 0.0:
        raise InvalidServingValue("start_s", f"{start_s} s", "give 0 or more")
    admissible: dict[Configuration, list[HullStep]] = {}
    for index, point in enumerate(points):
        latency_s = point.latency_s.get(objective.quantile)
        if latency_s is None or point.power_w is None or point.throughput_hz <= 0.0:
            continue
        if latency_s <= objective.latency_s:
            step = HullStep(point.throughput_hz, point.power_w, index)
            admissible.setdefault(_same(point), []).append(step)
    if not admissible:
        raise NoFeasibleConfiguration(
            "latency_s",
            f"no measured configuration keeps {objective.latency_s:g} s at quantile {objective.quantile:g}",
            "relax the objective, or measure faster configurations",
        )
    return _build_shapes(admissible, idle_w, start_s, part_load)


def training_shapes(points: Sequence[Point], idle_w: Mapping[str, float]) -> tuple[InstanceShape, ...]:
    """The shapes of a training job, which may change its power limit while it runs, and may end before others do.

    So one shape has the points at all limits, and part of the time its GPUs may be idle.
    """
    steps: dict[Configuration, list[HullStep]] = {}
    for index, point in enumerate(points):
        if point.power_w is not None and point.throughput_hz > 0.0:
            shape = replace(_same(point), power_limit_w=None)
            steps.setdefault(shape, []).append(HullStep(point.throughput_hz, point.power_w, index))
    return _build_shapes(steps, idle_w, 0.0, PartLoad.PROPORTIONAL)


def _build_shapes(
    steps_of: Mapping[Configuration, list[HullStep]], idle_w: Mapping[str, float], start_s: float, part_load: PartLoad
) -> tuple[InstanceShape, ...]:
    found = []
    for configuration, steps in steps_of.items():
        if configuration.gpu_model not in idle_w:
            raise InvalidServingValue(
                "idle_w", f"no idle watts of {configuration.gpu_model}", "give them for every model"
            )
        idle = 0.0 if configuration.mig_profile else idle_w[configuration.gpu_model] * configuration.gpus
        start_j = start_s * min(step.power_w for step in steps)
        if part_load is PartLoad.PROPORTIONAL:
            steps.append(HullStep(0.0, idle, IDLE_POINT))
        found.append(InstanceShape(configuration, _hull(steps), idle, start_j))
    return tuple(found)


def dispatch_load(shapes: Sequence[InstanceShape], serving: Sequence[int], demand_hz: float) -> InstanceLoad:
    """Least watts at which `serving` instances of each shape give the demand, or all that they can."""
    instances = [[0.0] * len(shape.steps) for shape in shapes]
    throughput_hz = power_w = 0.0
    segments: list[tuple[float, int, int]] = []
    for number, (shape, count) in enumerate(zip(shapes, serving, strict=True)):
        if count:
            instances[number][0] = float(count)
            throughput_hz += count * shape.steps[0].throughput_hz
            power_w += count * shape.steps[0].power_w
            segments += [
                (_slope(shape.steps[at], shape.steps[at + 1]), number, at) for at in range(len(shape.steps) - 1)
            ]
    for slope, number, at in sorted(segments):
        if throughput_hz >= demand_hz:
            break
        count = serving[number]
        gain_hz = shapes[number].steps[at + 1].throughput_hz - shapes[number].steps[at].throughput_hz
        moved = min(float(count), (demand_hz - throughput_hz) / gain_hz)
        instances[number][at] -= moved
        instances[number][at + 1] += moved
        throughput_hz += moved * gain_hz
        power_w += moved * gain_hz * slope
    return InstanceLoad(tuple(map(tuple, instances)), throughput_hz, power_w)


_GAP = 1e-5  # relative, of the program
_NODES_MOST = 2_000  # of one program, the best so far is taken then; seconds would give another answer elsewhere
_LEAST = 1e-3  # of what an instance gives; a smaller demand counts as this
_SURE = 1e-9  # relative: what rounding may take of a demand


class ServiceDemand(NamedTuple):
    """One service in one window."""

    shapes: tuple[InstanceShape, ...]
    demand_hz: float
    loaded: tuple[int, ...]  # instances by shape
    only_loaded: bool = False  # nothing can be started for this window


class _Columns(NamedTuple):
    """Where the variables of a service and shape lie: serving, new, then a lambda for each step."""

    ask: int
    shape: int
    first: int


class _Program(NamedTuple):
    cost: Floats
    table: "sparse.csc_array"
    low: Floats
    high: Floats
    most: Floats
    whole: NDArray[np.bool_]
    columns: list[_Columns]


def list_slice_kinds(shapes: Iterable[InstanceShape]) -> list[SliceKind]:
    """The kinds of slices that shapes take, each once."""
    return list(dict.fromkeys(kind for shape in shapes if (kind := shape.slice_kind) is not None))


def _build_program(
    asks: Sequence[ServiceDemand], pool: Mapping[str, int], layouts: PoolLayouts, payback_s: float
) -> _Program:
    """The program of a window; what a start takes in joules is spread over `payback_s`."""
    from scipy.sparse import coo_array

    columns: list[_Columns] = []
    cost: list[float] = []
    whole: list[int] = []
    most: list[float] = []
    rows: list[tuple[int, int, float]] = []  # row, column, coefficient
    low: list[float] = []
    high: list[float] = []
    models = {model: number for number, model in enumerate(pool)}
    low += [0.0] * len(models)
    high += [float(pool[model]) for model in models]
    kinds = {
        kind: len(low) + at for at, kind in enumerate(list_slice_kinds(shape for ask in asks for shape in ask.shapes))
    }
    low += [0.0] * len(kinds)
    high += [np.inf] * len(kinds)
    for number, ask in enumerate(asks):
        demand_row = len(low)
        # In units of the demand, for the solver's tolerances; so little is asked for that nothing gives less.
        unit_hz = max(ask.demand_hz, _LEAST * min(shape.throughput_hz for shape in ask.shapes))
        low.append(1.0)
        high.append(np.inf)
        for place, (shape, loaded) in enumerate(zip(ask.shapes, ask.loaded, strict=True)):
            first = len(cost)
            columns.append(_Columns(number, place, first))
            model = shape.configuration.gpu_model
            if model not in models:
                raise InvalidServingValue("pool", f"no {model} in it", "say how many GPUs of each model there are")
            cost += [0.0, shape.start_j / payback_s]
            whole += [1, 0]
            most += [float(loaded) if ask.only_loaded else np.inf, np.inf]
            kind = shape.slice_kind
            rows.append((models[model], first, float(shape.gpus)) if kind is None else (kinds[kind], first, -1.0))
            equal, started = len(low), len(low) + 1
            low += [0.0, -float(loaded)]
            high += [0.0, np.inf]
            rows += [(equal, first, -1.0), (started, first + 1, 1.0), (started, first, -1.0)]
            for at, step in enumerate(shape.steps):
                cost.append(step.power_w - shape.idle_w)
                whole.append(0)
                most.append(np.inf)
                rows.append((equal, first + 2 + at, 1.0))
                rows.append((demand_row, first + 2 + at, step.throughput_hz / unit_hz))
    for layout in list_layout_columns(layouts, kinds):
        rows.append((models[layout.gpu_model], len(cost), 1.0))
        rows += [(kinds[kind], len(cost), float(count)) for kind, count in layout.slices.items() if count]
        cost.append(layout.mig_w)
        whole.append(1)
        most.append(np.inf)
    row, column, value = zip(*rows, strict=True)
    table = coo_array((value, (row, column)), shape=(len(low), len(cost))).tocsc()
    return _Program(
        np.array(cost), table, np.array(low), np.array(high), np.array(most), np.array(whole, np.bool_), columns
    )


def solve_joint(
    asks: Sequence[ServiceDemand],
    pool: Mapping[str, int],
    window_s: float,
    amortised: int,
    layouts: PoolLayouts = NO_LAYOUTS,
) -> tuple[tuple[int, ...], ...]:
    """All services in one program, where the pool is short or partitioned GPUs cost more than their slices."""
    serving = [[0] * len(ask.shapes) for ask in asks]
    asking = [number for number, ask in enumerate(asks) if ask.demand_hz > 0.0]
    program = _build_program([asks[number] for number in asking], pool, layouts, amortised * window_s)
    found = solve_mixed_integer(
        program.cost,
        program.table,
        program.low,
        program.high,
        most=program.most,
        whole=program.whole,
        gap=_GAP,
        nodes_most=_NODES_MOST,
    ).values
    if found is None:
        raise NoFeasibleConfiguration("pool", "no instances of it give the demand", "add GPUs, or admit less")
    for place in program.columns:
        serving[asking[place.ask]][place.shape] = round(float(found[place.first]))
    for ask, counts in zip(asks, serving, strict=True):
        most_hz = math.fsum(shape.throughput_hz * count for shape, count in zip(ask.shapes, counts, strict=True))
        if most_hz < ask.demand_hz * (1.0 - _SURE):
            raise NoFeasibleConfiguration("pool", "the solver's answer lacks throughput", "report this: it is a fault")
    return tuple(map(tuple, serving))


SEARCH_GAP = 1e-6  # relative
SEARCH_NODES_MOST = 20_000


class InstanceChoice(NamedTuple):
    """Instances by shape and their cost; `is_optimal` is false if the search was cut short."""

    serving: tuple[int, ...]
    cost_w: float
    is_optimal: bool


class _Kind(NamedTuple):
    """A shape as the search sees it: watts above idle."""

    place: int
    base_w: float  # of one instance at the first step
    base_hz: float
    segments: tuple[tuple[float, float], ...]  # watts per Hz and Hz of each, rising
    most_hz: float
    start_w: float  # a start, spread over the windows that pay for it
    loaded: int
    most: int  # instances
    ratio: float  # least watts per Hz of a fractional instance that is loaded


class _Fixed(NamedTuple):
    """What is decided so far."""

    cost_w: float
    given_hz: float
    segments: tuple[tuple[float, float], ...]  # rising in watts per Hz


def _kinds(
    shapes: Sequence[InstanceShape],
    demand_hz: float,
    loaded: Sequence[int],
    start_w: Sequence[float],
    most: Sequence[int],
) -> list[_Kind]:
    found = []
    for place, shape in enumerate(shapes):
        steps, running = shape.steps, [step for step in shape.steps if step.throughput_hz > 0.0]
        segments = tuple(
            (
                (high.power_w - low.power_w) / (high.throughput_hz - low.throughput_hz),
                high.throughput_hz - low.throughput_hz,
            )
            for low, high in pairwise(steps)
        )
        found.append(
            _Kind(
                place,
                steps[0].power_w - shape.idle_w,
                steps[0].throughput_hz,
                segments,
                shape.throughput_hz,
                start_w[place],
                loaded[place],
                min(most[place], math.ceil(demand_hz / running[0].throughput_hz)),
                min((step.power_w - shape.idle_w) / step.throughput_hz for step in running),
            )
        )
    return sorted(found, key=lambda kind: kind.ratio)


def _with(fixed: _Fixed, kind: _Kind, count: int) -> _Fixed:
    if count == 0:
        return fixed
    added = tuple((slope, count * width_hz) for slope, width_hz in kind.segments)
    return _Fixed(
        fixed.cost_w + count * kind.base_w + max(0, count - kind.loaded) * kind.start_w,
        fixed.given_hz + count * kind.base_hz,
        tuple(sorted((*fixed.segments, *added))) if fixed.segments else added,
    )


def _bound(fixed: _Fixed, demand_hz: float, ratio: float) -> float:
    """The least cost if the rest may come at `ratio` watts per Hz; infinite if it may not and does not suffice."""
    cost_w, lacking_hz = fixed.cost_w, demand_hz - fixed.given_hz
    for slope, width_hz in fixed.segments:
        if lacking_hz <= 0.0 or slope >= ratio:
            break
        taken_hz = min(lacking_hz, width_hz)
        cost_w += slope * taken_hz
        lacking_hz -= taken_hz
    if lacking_hz > demand_hz * 1e-12:
        cost_w += ratio * lacking_hz  # infinite without a shape that follows
    return cost_w


class _InstanceSearch:
    def __init__(self, kinds: list[_Kind], demand_hz: float) -> None:
        self.kinds = kinds
        self.demand_hz = demand_hz
        # The least watts per Hz of all shapes from each on; the last has none after it.
        self.ratios = [min((kind.ratio for kind in kinds[at:]), default=math.inf) for at in range(len(kinds) + 1)]
        self.best_w = math.inf
        self.best: tuple[int, ...] = ()
        self.nodes = 0

    def _outward(self, fixed: _Fixed, at: int) -> Iterator[tuple[float, _Fixed, int]]:
        """Counts of a shape from the least bound outward, as long as they may be better."""
        kind, ratio = self.kinds[at], self.ratios[at + 1]

        def bounded(count: int) -> tuple[float, _Fixed]:
            self.nodes += 1
            node = _with(fixed, kind, count)
            return _bound(node, self.demand_hz, ratio), node

        lacking_hz = self.demand_hz - fixed.given_hz - math.fsum(width_hz for _, width_hz in fixed.segments)
        least = 0
        if math.isinf(ratio):
            # What is within rounding of the demand lacks nothing.
            least = max(0, math.ceil((lacking_hz - self.demand_hz * 1e-12) / kind.most_hz))
        low, high = least, kind.most
        if low > high:
            return
        while low < high:  # the bound is convex in the count
            middle = (low + high) // 2
            if bounded(middle)[0] <= bounded(middle + 1)[0]:
                high = middle
            else:
                low = middle + 1
        yield (*bounded(low), low)
        up, down = low + 1, low - 1
        rising, falling = up <= kind.most, down >= least
        while rising or falling:
            if rising:
                value, node = bounded(up)
                rising = value < self.best_w * (1.0 - SEARCH_GAP) and up < kind.most
                if value < self.best_w * (1.0 - SEARCH_GAP):
                    yield value, node, up
                up += 1
            if falling:
                value, node = bounded(down)
                falling = value < self.best_w * (1.0 - SEARCH_GAP) and down > least
                if value < self.best_w * (1.0 - SEARCH_GAP):
                    yield value, node, down
                down -= 1

    def descend(self, fixed: _Fixed, at: int, counts: tuple[int, ...]) -> None:
        if at == len(self.kinds) - 1:
            value, _, count = next(self._outward(fixed, at), (math.inf, fixed, 0))
            if value < self.best_w:
                self.best_w, self.best = value, (*counts, count)
            return
        for value, node, count in self._outward(fixed, at):
            if self.nodes > SEARCH_NODES_MOST:
                return
            if value < self.best_w * (1.0 - SEARCH_GAP):
                self.descend(node, at + 1, (*counts, count))


def search_instances(
    shapes: Sequence[InstanceShape],
    demand_hz: float,
    *,
    loaded: Sequence[int],
    start_w: Sequence[float],
    most: Sequence[int],
) -> InstanceChoice | None:
    """The cheapest instances that give the demand, watts above idle; None if `most` of each do not suffice.

    `start_w` is what one start of each shape costs the window, in W.
    """
    if demand_hz <= 0.0:
        return InstanceChoice((0,) * len(shapes), 0.0, is_optimal=True)
    kinds = _kinds(shapes, demand_hz, loaded, start_w, most)
    search = _InstanceSearch(kinds, demand_hz)
    search.descend(_Fixed(0.0, 0.0, ()), 0, ())
    if not search.best:
        return None
    serving = [0] * len(shapes)
    for kind, count in zip(kinds, search.best, strict=True):
        serving[kind.place] = count
    return InstanceChoice(tuple(serving), search.best_w, search.nodes <= SEARCH_NODES_MOST)


START_WINDOWS = 10  # windows that pay for a start


def choose_instances(
    asks: Sequence[ServiceDemand],
    pool: Mapping[str, int],
    *,
    window_s: float,
    amortised: int = START_WINDOWS,
    layouts: PoolLayouts = NO_LAYOUTS,
) -> tuple[tuple[int, ...], ...]:
    """The instances that serve, by service and shape; NoFeasibleConfiguration if the pool cannot give all demands.

    `layouts` is of the models of which shapes take slices.
    """
    each = [_alone(ask, pool, layouts, amortised * window_s) for ask in asks]
    if all(serving is not None for serving in each):
        found = tuple(serving for serving in each if serving is not None)
        if _fits(asks, found, pool, layouts):
            return found  # the best of each is the best of all
    return solve_joint(asks, pool, window_s, amortised, layouts)


def most_instances(shape: InstanceShape, pool: Mapping[str, int], layouts: PoolLayouts) -> int:
    """How many instances of a shape the pool has room for; raises InvalidServingValue for a model that it lacks."""
    model = shape.configuration.gpu_model
    if model not in pool:
        raise InvalidServingValue("pool", f"no {model} in it", "say how many GPUs of each model there are")
    kind = shape.slice_kind
    return pool[model] // shape.gpus if kind is None else pool[model] * most_slices(layouts, kind)


def _alone(
    ask: ServiceDemand, pool: Mapping[str, int], layouts: PoolLayouts, payback_s: float
) -> tuple[int, ...] | None:
    """The best of one service, if no other wanted the pool and slices cost no more than they add."""
    most = []
    for shape, loaded in zip(ask.shapes, ask.loaded, strict=True):
        room = most_instances(shape, pool, layouts)
        most.append(min(room, loaded) if ask.only_loaded else room)
    start_w = [shape.start_j / payback_s for shape in ask.shapes]
    found = search_instances(ask.shapes, ask.demand_hz, loaded=ask.loaded, start_w=start_w, most=most)
    return None if found is None else found.serving


def count_slices(asks: Sequence[ServiceDemand], serving: Sequence[Sequence[int]]) -> dict[SliceKind, int]:
    """The slices that instances take."""
    found: dict[SliceKind, int] = {}
    for ask, counts in zip(asks, serving, strict=True):
        for shape, count in zip(ask.shapes, counts, strict=True):
            kind = shape.slice_kind
            if kind is not None and count:
                found[kind] = found.get(kind, 0) + count
    return found


def _fits(
    asks: Sequence[ServiceDemand], serving: Sequence[Sequence[int]], pool: Mapping[str, int], layouts: PoolLayouts
) -> bool:
    """Whether the pool has room for the instances, and their slices cost no more than they add."""
    used = dict.fromkeys(pool, 0)
    for ask, counts in zip(asks, serving, strict=True):
        for shape, count in zip(ask.shapes, counts, strict=True):
            used[shape.configuration.gpu_model] += count * shape.gpus
    if any(used[model] > gpus for model, gpus in pool.items()):
        return False
    slices = count_slices(asks, serving)
    if any(layouts[kind.gpu_model].mig_w > 0.0 for kind in slices):
        return False
    partitioned = count_partitioned(cover_slices(layouts, slices))
    return all(used[model] + partitioned.get(model, 0) <= gpus for model, gpus in pool.items())
