"""The policies that are compared: ours, ours without foresight of the window, ours blind to energy, four baselines.

Owns what each chooses. Must not know accounts or bounds: a plan is judged by audit.py.

What each knows. `eelgrid`, `blind` and `most-throughput` know the demand of the window
that they choose for and all before it, never the future: that is the protocol's "choose
per window", and it stands for a forecast one start ahead that is right. `causal` knows
the windows before it alone, and the mean rate, which a service states. The three that are sized once know the peak of the whole
hour beforehand, which favours them.

    peak-latency      enough instances of the configuration of least latency for the peak
    peak-throughput   the same of the configuration of most throughput
    spread            instances of every shape in turn until they give the peak
    most-throughput   each window enough instances of the configuration of most throughput
    blind             the same planner with one watt for every GPU
All of them keep the objective, and their load runs on the same curves as ours: an
instance with less to do runs at a smaller admissible point of its shape. What they do
not do is choose by watts: a load is shared in proportion to what instances can give.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bench.llm.audit import Promise
from bench.llm.instances import (
    HOLD_WINDOWS,
    LoadedInstances,
    retain_instances,
    serve_window,
    spread_load,
    without_power,
)
from bench.llm.plan import Plan, WindowPlan
from eelgrid_controller.profiles.points import NoFeasibleConfiguration, Point
from eelgrid_controller.profiles.queueing_model import QuantileObjective
from eelgrid_controller.whatif.instances import (
    IDLE_POINT,
    InstanceLoad,
    InstanceShape,
    PartLoad,
    ServiceDemand,
    choose_instances,
    dispatch_load,
    feasible_shapes,
)

__all__ = ["POLICIES", "Case", "case_of"]

HEADROOM = 1.25  # of the most in the last HOLD windows; what `causal` is ready for


class Case(NamedTuple):
    """One service under one promise."""

    points: tuple[Point, ...]
    shapes: tuple[InstanceShape, ...]
    promise: Promise
    pool: Mapping[str, int]
    idle_w: Mapping[str, float]


def case_of(points: Sequence[Point], promise: Promise, pool: Mapping[str, int], idle_w: Mapping[str, float]) -> Case:
    """The case; NothingFits where no measured configuration keeps the promise."""
    return Case(tuple(points), _shapes(points, promise, idle_w), promise, pool, idle_w)


def _shapes(points: Sequence[Point], promise: Promise, idle_w: Mapping[str, float]) -> tuple[InstanceShape, ...]:
    part_load = PartLoad.PROPORTIONAL if promise.may_idle else PartLoad.MEASURED
    objective = QuantileObjective(promise.quantile, promise.latency_s)
    return feasible_shapes(points, objective, idle_w=idle_w, start_s=promise.start_s, part_load=part_load)


def _window(shapes: Sequence[InstanceShape], loaded: Sequence[int], running: InstanceLoad) -> WindowPlan:
    return WindowPlan(
        {shape.configuration: count for shape, count in zip(shapes, loaded, strict=True) if count},
        tuple(
            (step.point, instances)
            for shape, at in zip(shapes, running.instances, strict=True)
            for step, instances in zip(shape.steps, at, strict=True)
            if instances > 0.0 and step.point != IDLE_POINT
        ),
    )


def _eelgrid(case: Case, demand_hz: np.ndarray) -> Plan:
    loaded = LoadedInstances((), (0,) * len(case.shapes))
    plan = []
    for asked_hz in map(float, demand_hz):
        ask = ServiceDemand(case.shapes, asked_hz, loaded.instances)
        (running,), (loaded,) = serve_window([ask], [loaded], case.pool, window_s=case.promise.window_s)
        plan.append(_window(case.shapes, loaded.instances, running))
    return tuple(plan)


def _ready(case: Case, ready_hz: float, loaded: LoadedInstances) -> LoadedInstances:
    ask = ServiceDemand(case.shapes, ready_hz, loaded.instances)
    return serve_window([ask], [loaded], case.pool, window_s=case.promise.window_s)[1][0]


def _causal(case: Case, demand_hz: np.ndarray) -> Plan:
    """Instances for HEADROOM x the most of the last windows and the stated rate; the window runs on what is loaded.

    Where the pool is too small for the headroom, it is left out.
    """
    loaded = LoadedInstances((), (0,) * len(case.shapes))
    stated_hz = float(demand_hz.mean())
    plan = []
    for number, asked_hz in enumerate(map(float, demand_hz)):
        seen_hz = max(stated_hz, *map(float, demand_hz[max(0, number - HOLD_WINDOWS) : number]), 0.0)
        try:
            loaded = _ready(case, HEADROOM * seen_hz, loaded)
        except NoFeasibleConfiguration:
            loaded = _ready(case, seen_hz, loaded)
        try:
            (serving,) = choose_instances(
                [ServiceDemand(case.shapes, asked_hz, loaded.instances, only_loaded=True)],
                case.pool,
                window_s=case.promise.window_s,
            )
        except NoFeasibleConfiguration:
            serving = loaded.instances  # all they can give; the audit counts the window as violated
        plan.append(_window(case.shapes, loaded.instances, dispatch_load(case.shapes, serving, asked_hz)))
    return tuple(plan)


def _blind(case: Case, demand_hz: np.ndarray) -> Plan:
    unseeing = tuple(without_power(shape, case.promise.start_s) for shape in case.shapes)
    loaded = LoadedInstances((), (0,) * len(case.shapes))
    plan = []
    for asked_hz in map(float, demand_hz):
        (serving,) = choose_instances(
            [ServiceDemand(unseeing, asked_hz, loaded.instances)], case.pool, window_s=case.promise.window_s
        )
        loaded = retain_instances(loaded, serving)
        plan.append(_window(case.shapes, loaded.instances, spread_load(case.shapes, serving, asked_hz)))
    return tuple(plan)


def _up_to(case: Case, at: int) -> InstanceShape:
    """The shape of a point with no more sequences at once than the point has."""
    wanted = case.points[at].configuration
    lesser = [
        point
        if replace(point.configuration, batch=0) == replace(wanted, batch=0)
        and point.configuration.batch <= wanted.batch
        else replace(point, power_w=None)
        for point in case.points
    ]
    (shape,) = _shapes(lesser, case.promise, case.idle_w)
    return shape


def _admissible(case: Case) -> list[int]:
    return [
        at for at, point in enumerate(case.points) if point.latency_s[case.promise.quantile] <= case.promise.latency_s
    ]


def _sized(shape: InstanceShape, demand_hz: np.ndarray) -> Plan:
    """Enough for the peak, all the time."""
    count = max(1, math.ceil(float(demand_hz.max()) / shape.throughput_hz))
    return tuple(
        _window((shape,), (count,), spread_load((shape,), (count if asked_hz > 0.0 else 0,), asked_hz))
        for asked_hz in map(float, demand_hz)
    )


def _peak_latency(case: Case, demand_hz: np.ndarray) -> Plan:
    fastest = min(_admissible(case), key=lambda at: case.points[at].latency_s[case.promise.quantile])
    return _sized(_up_to(case, fastest), demand_hz)


def _largest(case: Case) -> InstanceShape:
    return _up_to(case, max(_admissible(case), key=lambda at: case.points[at].throughput_hz))


def _peak_throughput(case: Case, demand_hz: np.ndarray) -> Plan:
    return _sized(_largest(case), demand_hz)


def _spread(case: Case, demand_hz: np.ndarray) -> Plan:
    counts = [0] * len(case.shapes)
    given_hz = 0.0
    for place in itertools.cycle(range(len(case.shapes))):
        if given_hz >= demand_hz.max():
            break
        counts[place] += 1
        given_hz += case.shapes[place].throughput_hz
    nothing = (0,) * len(counts)
    return tuple(
        _window(case.shapes, counts, spread_load(case.shapes, counts if asked_hz > 0.0 else nothing, asked_hz))
        for asked_hz in map(float, demand_hz)
    )


def _most_throughput(case: Case, demand_hz: np.ndarray) -> Plan:
    shape = _largest(case)
    plan = []
    for asked_hz in map(float, demand_hz):
        count = math.ceil(asked_hz / shape.throughput_hz)
        plan.append(_window((shape,), (count,), spread_load((shape,), (count,), asked_hz)))
    return tuple(plan)


POLICIES: Mapping[str, Callable[[Case, np.ndarray], Plan]] = {
    "eelgrid": _eelgrid,
    "causal": _causal,
    "blind": _blind,
    "most-throughput": _most_throughput,
    "peak-throughput": _peak_throughput,
    "peak-latency": _peak_latency,
    "spread": _spread,
}
