"""Service instances that keep a latency objective, and the power at which they serve a load.

Each instance shape runs along the concave hull of throughput over power; a load is dispatched at least power.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from eelgrid_controller.profiles.points import Configuration, InvalidServingValue, NoFeasibleConfiguration, Point
from eelgrid_controller.profiles.queueing_model import QuantileObjective

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
    idle_w: float  # of all its GPUs
    start_j: float  # energy of a start, on top of what its GPUs would draw idle

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.configuration.gpus

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

    `idle_w` is of one GPU by model. A start costs `start_s` at the least watts that the
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
    found = []
    for configuration, steps in admissible.items():
        if configuration.gpu_model not in idle_w:
            raise InvalidServingValue(
                "idle_w", f"no idle watts of {configuration.gpu_model}", "give them for every model"
            )
        idle = idle_w[configuration.gpu_model] * configuration.gpus
        start_j = start_s * min(step.power_w for step in steps)
        if part_load is PartLoad.PROPORTIONAL:
            steps.append(HullStep(0.0, idle, IDLE_POINT))
        found.append(InstanceShape(configuration, _hull(steps), idle, start_j))
    return tuple(found)


def without_power(shape: InstanceShape, start_s: float) -> InstanceShape:
    """The shape as one sees it who counts GPUs for watts: one for each."""
    best = shape.steps[-1]
    return replace(
        shape,
        steps=(HullStep(best.throughput_hz, float(shape.gpus), best.point),),
        idle_w=0.0,
        start_j=start_s * shape.gpus,
    )


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


def spread_load(shapes: Sequence[InstanceShape], serving: Sequence[int], demand_hz: float) -> InstanceLoad:
    """The same load in proportion to what each instance can give, as one shares it who knows no watts."""
    capacity_hz = math.fsum(count * shape.throughput_hz for shape, count in zip(shapes, serving, strict=True))
    share = min(1.0, demand_hz / capacity_hz) if capacity_hz > 0.0 else 0.0
    instances, throughput_hz, power_w = [], 0.0, 0.0
    for shape, count in zip(shapes, serving, strict=True):
        running = dispatch_load((shape,), (count,), count * share * shape.throughput_hz)
        instances.append(running.instances[0])
        throughput_hz += running.throughput_hz
        power_w += running.power_w
    return InstanceLoad(tuple(instances), throughput_hz, power_w)
