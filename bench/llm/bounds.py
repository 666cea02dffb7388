"""What no plan can pass: the LP with fractional instances, and whole instances a window at a time.

Owns the bounds. Must not know a policy.

LP. All windows at once, nothing rounded, the future known: for each shape s and window
t the instances loaded n_st and started u_st >= n_st - n_s,t-1 (nothing is loaded before),
and for each admissible point i of the shape the instances x_it that run there:
    min sum c_i window_s x_it + start_j_s u_st
    s.t. sum_i x_it <= n_st,  sum T_i x_it >= demand_t,  sum gpus_s n_st <= pool
with c_i the watts of the point above idle: the pool draws its idle watts in any case,
and they are added to both sides. A window that the pool cannot serve even so is violated
by the bound; its demand is then what the pool can give.

Whole instances. The least that a window costs with whole instances and no start cost,
summed over the windows, and the starts without which the dearest window cannot be
served: a bound for all plans of whole instances. It tells how much of a gap to the LP is
the price of whole instances, which nobody can save.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from bench.llm.audit import Promise
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.whatif.instances import InstanceShape, ServiceDemand, choose_instances, dispatch_load

__all__ = ["Bound", "lp_bound", "whole_bound"]


class Bound(NamedTuple):
    """The least energy above idle in J."""

    above_idle_j: float
    violated: int  # windows that even fractional instances cannot serve


class _Admissible(NamedTuple):
    points: list[Point]
    shapes: list[Configuration]
    of: list[int]  # shape of each point
    start_j: np.ndarray  # by shape


def _admissible(points: Sequence[Point], promise: Promise) -> _Admissible:
    some = [point for point in points if point.latency_s[promise.quantile] <= promise.latency_s]
    shapes = list(dict.fromkeys(replace(point.configuration, batch=0) for point in some))
    of = [shapes.index(replace(point.configuration, batch=0)) for point in some]
    least = [min(p.power_w or 0.0 for p, s in zip(some, of, strict=True) if s == at) for at in range(len(shapes))]
    return _Admissible(some, shapes, of, promise.start_s * np.array(least))


def _least(
    some: _Admissible, cost_w: np.ndarray, demand_hz: np.ndarray, pool: Mapping[str, int], window_s: float
) -> float:
    """The optimum of the program; variables of a window: n and u by shape, then x by point."""
    shapes, count, windows = len(some.shapes), len(some.points), len(demand_hz)
    wide = 2 * shapes + count
    cost = np.tile(np.concatenate([np.zeros(shapes), some.start_j, cost_w * window_s]), windows)
    rows: list[tuple[int, int, float]] = []
    limits: list[float] = []
    for t in range(windows):
        at = t * wide
        for s in range(shapes):
            rows.append((len(limits), at + s, -1.0))
            rows += [(len(limits), at + 2 * shapes + i, 1.0) for i in range(count) if some.of[i] == s]
            limits.append(0.0)
            rows += [(len(limits), at + s, 1.0), (len(limits), at + shapes + s, -1.0)]
            if t:
                rows.append((len(limits), at - wide + s, -1.0))
            limits.append(0.0)
        if demand_hz[t] > 0.0:
            rows += [
                (len(limits), at + 2 * shapes + i, -p.throughput_hz / demand_hz[t]) for i, p in enumerate(some.points)
            ]
            limits.append(-1.0)
        for model, gpus in pool.items():
            rows += [(len(limits), at + s, float(h.gpus)) for s, h in enumerate(some.shapes) if h.gpu_model == model]
            limits.append(float(gpus))
    row, column, value = zip(*rows, strict=True)
    matrix = coo_array((value, (row, column)), shape=(len(limits), wide * windows)).tocsr()
    found = linprog(cost, A_ub=matrix, b_ub=limits, method="highs")
    if found.x is None:
        raise ArithmeticError(f"no optimum: {found.message}")
    return float(found.fun)


def _most_hz(some: _Admissible, pool: Mapping[str, int]) -> float:
    """The most that fractional instances of the whole pool give."""
    best: dict[str, float] = {}
    for point in some.points:
        running = point.configuration
        best[running.gpu_model] = max(best.get(running.gpu_model, 0.0), point.throughput_hz / running.gpus)
    return sum(gpus * best.get(model, 0.0) for model, gpus in pool.items())


def lp_bound(
    points: Sequence[Point],
    promise: Promise,
    demand_hz: np.ndarray,
    *,
    pool: Mapping[str, int],
    idle_w: Mapping[str, float],
) -> Bound:
    """The least energy with fractional instances and the future known, starts included."""
    some = _admissible(points, promise)
    most_hz = _most_hz(some, pool)
    served_hz = np.minimum(demand_hz, most_hz)
    watts = np.array([point.power_w or 0.0 for point in some.points])
    idle = np.array([idle_w[point.configuration.gpu_model] * point.configuration.gpus for point in some.points])
    return Bound(
        _least(some, watts - idle, served_hz, pool, promise.window_s),
        int((demand_hz > most_hz * (1.0 + 1e-9)).sum()),
    )


def whole_bound(
    shapes: Sequence[InstanceShape], demand_hz: np.ndarray, pool: Mapping[str, int], window_s: float
) -> float:
    """Least energy above idle in J of whole instances, each window for itself; starts as far as none can do without.

    Whoever serves the peak has started instances that give it: at least the peak times
    the least start energy per throughput.
    """
    free = tuple(replace(shape, start_j=0.0) for shape in shapes)
    nothing = (0,) * len(free)
    total_j = float(demand_hz.max()) * min(shape.start_j / shape.throughput_hz for shape in shapes)
    for asked_hz in map(float, demand_hz):
        (serving,) = choose_instances([ServiceDemand(free, asked_hz, nothing)], pool, window_s=window_s)
        idle_w = sum(shape.idle_w * count for shape, count in zip(shapes, serving, strict=True))
        total_j += (dispatch_load(free, serving, asked_hz).power_w - idle_w) * window_s
    return total_j
