"""The judge: violated windows, energy and starts of a plan, from the measured points alone.

Owns the accounts. Must not know a planner, a hull or a bound: it reads the points as
they were published and adds up.

A window is violated if the points that run do not give the demand, if one of them
breaks the objective, if more instances run than are loaded, if instances of a shape
that serve are not a whole number (unless they may idle within a window), or if what is
loaded does not fit into the pool.
Energy of what serves: watts of each point x instances x window, and for each start
`start_s` at the least admissible watts that its shape was measured at. Energy of the
pool: that, and the idle watts of every other GPU of the pool, loaded or not: one idle
power for all. Every plan begins with nothing loaded. `undivided_j` is the energy of what
serves if an instance that changed its point within a window had run all of it at the
dearer one.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bench.llm.plan import Plan, WindowPlan
from eelgrid_controller.profiles.points import Configuration, Point

__all__ = ["Accounts", "Promise", "audit"]

_NEAR = 1e-6


class Promise(NamedTuple):
    """What a service was promised, and what a start costs."""

    quantile: float
    latency_s: float
    window_s: float
    start_s: float
    may_idle: bool = False  # within a window that an instance serves


class Accounts(NamedTuple):
    """What a plan came to; energies in J, arrays a value a window."""

    violated: np.ndarray  # (T,) bool
    serving_j: float  # of what serves, and of starts
    above_idle_j: float  # the same, less what the GPUs that serve would have drawn idle
    start_j: float  # part of both
    undivided_j: float
    starts: int
    power_w: np.ndarray  # (T,) of what serves
    throughput_hz: np.ndarray  # (T,)
    loaded_gpus: Mapping[str, np.ndarray]  # (T,) by model
    tokens: float  # asked for


def _start_j(points: Sequence[Point], promise: Promise, shape: Configuration) -> float:
    watts = [
        point.power_w
        for point in points
        if replace(point.configuration, batch=0) == shape
        and point.power_w is not None
        and point.latency_s[promise.quantile] <= promise.latency_s
    ]
    return promise.start_s * min(watts)


def _undivided_w(points: Sequence[Point], window: WindowPlan) -> float:
    """Watts if every instance ran at one point: of each shape the shared ones at the dearest that they share."""
    watts, parts = 0.0, {}
    for at, instances in window.running:
        power_w, whole = points[at].power_w or 0.0, math.floor(instances + _NEAR)
        watts += whole * power_w
        shape = replace(points[at].configuration, batch=0)
        part, dearest = parts.get(shape, (0.0, 0.0))
        if instances - whole > _NEAR:
            parts[shape] = (part + instances - whole, max(dearest, power_w))
    return watts + math.fsum(math.ceil(part - _NEAR) * dearest for part, dearest in parts.values())


def _is_kept(points: Sequence[Point], promise: Promise, window: WindowPlan, demand_hz: float) -> bool:
    given_hz = math.fsum(points[at].throughput_hz * instances for at, instances in window.running)
    serving: Counter[Configuration] = Counter()
    for at, instances in window.running:
        if instances < 0.0 or (instances > 0.0 and points[at].latency_s[promise.quantile] > promise.latency_s):
            return False
        serving[replace(points[at].configuration, batch=0)] += instances  # type: ignore[assignment]
    return given_hz >= demand_hz * (1.0 - _NEAR) and all(
        (promise.may_idle or abs(count - round(count)) <= _NEAR) and count <= window.loaded.get(shape, 0) + _NEAR
        for shape, count in serving.items()
    )


def audit(
    points: Sequence[Point],
    promise: Promise,
    demand_hz: Sequence[float],
    plan: Plan,
    *,
    pool: Mapping[str, int],
    idle_w: Mapping[str, float],
) -> Accounts:
    """The accounts of a plan; `idle_w` is of one GPU by model."""
    if len(plan) != len(demand_hz):
        raise ValueError(f"{len(plan)} windows planned of {len(demand_hz)}")
    violated, power_w, throughput_hz = np.zeros(len(plan), bool), np.zeros(len(plan)), np.zeros(len(plan))
    loaded_gpus = {model: np.zeros(len(plan), int) for model in pool}
    start_j, starts, idle_j, undivided_w = 0.0, 0, 0.0, 0.0
    before: Mapping[Configuration, int] = {}
    for number, (window, asked_hz) in enumerate(zip(plan, demand_hz, strict=True)):
        for shape, count in window.loaded.items():
            loaded_gpus[shape.gpu_model][number] += count * shape.gpus
            started = max(0, count - before.get(shape, 0))
            starts += started
            start_j += started * _start_j(points, promise, shape) if started else 0.0
        before = window.loaded
        undivided_w += _undivided_w(points, window)
        for at, instances in window.running:
            watts, running = points[at].power_w, points[at].configuration
            power_w[number] += (watts or 0.0) * instances
            throughput_hz[number] += points[at].throughput_hz * instances
            idle_j += idle_w[running.gpu_model] * running.gpus * instances * promise.window_s
        fits = all(loaded_gpus[model][number] <= gpus for model, gpus in pool.items())
        violated[number] = not (fits and _is_kept(points, promise, window, asked_hz))
    serving_j = float(power_w.sum()) * promise.window_s + start_j
    tokens = math.fsum(demand_hz) * promise.window_s
    return Accounts(
        violated,
        serving_j,
        serving_j - idle_j,
        start_j,
        undivided_w * promise.window_s + start_j,
        starts,
        power_w,
        throughput_hz,
        loaded_gpus,
        tokens,
    )
