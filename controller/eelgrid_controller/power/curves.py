"""What a job does at each power limit: seconds and watts, measured where they were, shaped where they were not.

Owns curves and how points become one. Must not know promises, budgets or how
windows are measured.

Theory: what was measured stands. Between two measured limits time and power go
from one value to the other as the shape of eelgrid_controller.power.shape does,
    t(l) = t_low + (t_high - t_low) (s(l) - s(l_low)) / (s(l_high) - s(l_low))
so that they are monotone wherever the measurements are; outside the shape is
scaled to meet the nearest. Two measured neighbours that contradict the shape, a
lower limit that was faster, are noise or an effect of that job: they are believed.

A GPU is charged what its limit lets it draw, or what was measured where that is
more: boards overshoot limits near their least (Zeus's A40 drew 107 W at 100 W).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from eelgrid_controller.power.refusals import CurveRefused
from eelgrid_controller.power.shape import Shape, fit
from eelgrid_controller.profiles.points import Configuration, Point

__all__ = ["LIMITS_MOST", "AtLimit", "Curve", "from_points"]

LIMITS_MOST = 64  # of one curve
_SAME_W = 0.5  # limits nearer than this are one
_FLAT = 1e-6  # relative


@dataclass(frozen=True, slots=True)
class AtLimit:
    """A job at one limit, the same on all its GPUs."""

    limit_w: float  # of each GPU
    time_s: float  # per unit of work of the whole job
    power_w: float  # of all its GPUs
    measured: bool = True

    @property
    def energy_j(self) -> float:
        """Joules a unit of work."""
        return self.time_s * self.power_w


@dataclass(frozen=True)
class Curve:
    """A job on one GPU model over the limits that were measured, rising."""

    workload: str
    gpu_model: str
    gpus: int
    points: tuple[AtLimit, ...]

    @property
    def limits_w(self) -> tuple[float, ...]:
        """The measured limits, rising."""
        return tuple(point.limit_w for point in self.points)

    @property
    def largest(self) -> AtLimit:
        """The job with nothing held back: what slowdowns are relative to."""
        return self.points[-1]

    @cached_property
    def shape(self) -> Shape:
        """The law nearest to what was measured, of one GPU."""
        limits = np.array(self.limits_w)
        power_w = np.array([point.power_w / self.gpus for point in self.points])
        return fit(limits, np.minimum(power_w, limits), np.array([point.time_s for point in self.points]))

    def at(self, limit_w: float) -> AtLimit:
        """The job at any limit; measured where it was, else shaped. Raises CurveRefused for a limit of 0 or less."""
        if not limit_w > 0.0 or not math.isfinite(limit_w):
            raise CurveRefused("limit_w", f"{limit_w} W is no power limit", "ask for a positive number of watts")
        index = bisect_left(self.limits_w, limit_w - _SAME_W)
        if index < len(self.points) and abs(self.points[index].limit_w - limit_w) <= _SAME_W:
            return self.points[index]
        below = self.points[index - 1] if index else None
        above = self.points[index] if index < len(self.points) else None
        return self._shaped(limit_w, below, above)

    def charge_w(self, limit_w: float) -> float:
        """Watts that all GPUs together are charged with at a limit: what it allows, or what was measured above it."""
        return max(self.gpus * limit_w, self.at(limit_w).power_w)

    def _shaped(self, limit_w: float, below: AtLimit | None, above: AtLimit | None) -> AtLimit:
        """The shape, made to meet its measured neighbours."""
        time_s = _between(
            self.shape.time_s, limit_w, [(one.limit_w, one.time_s) for one in (below, above) if one is not None]
        )
        power_w = _between(
            self.shape.power_w, limit_w, [(one.limit_w, one.power_w) for one in (below, above) if one is not None]
        )
        return AtLimit(limit_w, time_s, min(power_w, self.gpus * limit_w), measured=False)


def _between(shape: Callable[[float], float], limit_w: float, known: Sequence[tuple[float, float]]) -> float:
    """What goes through one or two known (limit, value) as a shape does."""
    (low_w, low), (high_w, high) = known[0], known[-1]
    first, last = shape(low_w), shape(high_w)
    if len(known) == 1:
        return low * shape(limit_w) / first
    if abs(last - first) <= _FLAT * first:  # the shape tells nothing here
        share = (limit_w - low_w) / (high_w - low_w)
    else:
        share = (shape(limit_w) - first) / (last - first)
    return low + share * (high - low)


def _checked(point: Point) -> tuple[float, AtLimit]:
    """A point as a place on a curve; the reason where it is none."""
    limit_w, power_w = point.configuration.power_limit_w, point.power_w
    if limit_w is None:
        raise CurveRefused("power_limit_w", f"a point of {point.workload!r} has none", "name the limit it ran under")
    if power_w is None:
        raise CurveRefused("power_w", f"not measured for {point.workload!r} at {limit_w} W", "leave the point out")
    for field, value in (("power_limit_w", limit_w), ("power_w", power_w), ("throughput_hz", point.throughput_hz)):
        if not (value > 0.0 and math.isfinite(value)):
            raise CurveRefused(field, f"{value} for {point.workload!r}", "a measured one is positive and finite")
    return limit_w, AtLimit(limit_w, 1.0 / point.throughput_hz, power_w)


def _apart(points: Sequence[Point]) -> Configuration:
    """The configuration that all points share, its limit aside."""
    shared = replace(points[0].configuration, power_limit_w=None)
    for point in points:
        if point.workload != points[0].workload or replace(point.configuration, power_limit_w=None) != shared:
            raise CurveRefused(
                "points", f"{point.workload!r} in {point.configuration} is another job", "make one curve for each"
            )
    return shared


def from_points(points: Iterable[Point]) -> Curve:
    """The curve of one job from its points, which differ in the power limit only; repeated limits are averaged.

    Raises CurveRefused where there are none, too many, or a number is missing or impossible.
    """
    given = list(points)
    if not given:
        raise CurveRefused("points", "there are none", "measure the job at its largest limit at least")
    shared = _apart(given)
    found: dict[float, list[AtLimit]] = {}
    for limit_w, at in map(_checked, given):
        near = next((known for known in found if abs(known - limit_w) <= _SAME_W), limit_w)
        found.setdefault(near, []).append(at)
    if len(found) > LIMITS_MOST:
        raise CurveRefused("points", f"{len(found)} limits", f"keep the {LIMITS_MOST} that matter")
    made = (
        AtLimit(limit_w, math.fsum(one.time_s for one in same) / len(same),
                math.fsum(one.energy_j for one in same) / math.fsum(one.time_s for one in same))
        for limit_w, same in sorted(found.items())
    )  # fmt: skip
    return Curve(given[0].workload, shared.gpu_model, shared.gpus, tuple(made))
