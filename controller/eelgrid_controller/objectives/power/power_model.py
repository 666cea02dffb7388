"""Models the power and time of a job over its power limit, and finds the limit that keeps its promise for the least energy.

Measured points are kept; between and beyond them the fitted power law gives the shape.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.profiles.points import Configuration, Point

FloatArray = npt.NDArray[np.float64]

# The middle of what fits the 24 baseline curves of Zeus (NSDI'23): `python -m bench.powercap` prints the spread.
USUAL_ROUNDNESS, USUAL_STEEPNESS, USUAL_CLOCKED = 4.0, 3.0, 0.05
_ROUNDNESS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 24.0)
_STEEPNESS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FREE_STEPS = 60


class PowerPlanError(ControllerError):
    """What cannot be planned; `field` is the one at fault."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {problem}", remedy)


class InvalidCurve(PowerPlanError):
    """Points that make no curve."""


class PowerLaw(NamedTuple):
    """One job's law on one GPU model."""

    free_w: float  # p: watts of a GPU without a limit
    roundness: float  # m
    floor_s: float  # t_floor: seconds a unit of work without a limit
    clocked: float  # a: the part of the time that grows
    steepness: float  # b

    def power_w(self, limit_w: float) -> float:
        """Watts of a GPU at a limit."""
        ratio = limit_w / self.free_w
        return self.free_w * ratio * float((1.0 + ratio**self.roundness) ** (-1.0 / self.roundness))

    def time_s(self, limit_w: float) -> float:
        """Seconds a unit of work at a limit."""
        lack = self.free_w / self.power_w(limit_w)
        return self.floor_s * (1.0 + self.clocked * float(lack**self.steepness - 1.0))


def _power(limits_w: FloatArray, power_w: FloatArray) -> tuple[float, float]:
    """The unlimited watts and the roundness with the least relative error."""
    roundness = _ROUNDNESS if len(limits_w) > 2 else (USUAL_ROUNDNESS,)
    # A GPU held at its limit may want any more; one that is not held tells what it wants.
    free = np.linspace(power_w.max(), 1.6 * max(float(limits_w.max()), float(power_w.max())), _FREE_STEPS)
    m = np.array(roundness)[None, :, None]
    ratio = limits_w / free[:, None, None]
    seen = limits_w / (1.0 + ratio**m) ** (1.0 / m)  # (free, roundness, K)
    error = ((seen / power_w - 1.0) ** 2).sum(axis=2)
    p, index = np.unravel_index(int(error.argmin()), error.shape)
    return float(free[p]), roundness[int(index)]


def _linear(lack: FloatArray, time_s: FloatArray) -> tuple[float, float, float]:
    """Error, floor and growth of t = floor + growth * lack, both at least 0, by relative errors."""
    weight = 1.0 / time_s
    columns = np.stack([weight, lack * weight], axis=1)
    (floor, growth), *_ = np.linalg.lstsq(columns, np.ones(len(lack)), rcond=None)
    if growth < 0.0 or floor <= 0.0:
        floor, growth = (float(weight.sum() / (weight**2).sum()), 0.0)
    error = float(((columns @ np.array([floor, growth]) - 1.0) ** 2).sum())
    return error, float(floor), float(growth)


def fit_power_law(limits_w: FloatArray, power_w: FloatArray, time_s: FloatArray) -> PowerLaw:
    """The law nearest to measured points; shapes (K,), K at least 1, all positive, watts of one GPU."""
    free_w, roundness = _power(limits_w, power_w)
    bare = PowerLaw(free_w, roundness, 1.0, 0.0, 1.0)
    lack = free_w / np.array([bare.power_w(float(one)) for one in limits_w])
    if len(limits_w) < 3 or float(lack.max()) < 1.02:  # nothing to tell how time grows
        grown = 1.0 + USUAL_CLOCKED * (lack**USUAL_STEEPNESS - 1.0)
        return PowerLaw(free_w, roundness, float(np.mean(time_s / grown)), USUAL_CLOCKED, USUAL_STEEPNESS)
    tried = [(*_linear(lack**b - 1.0, time_s), b) for b in _STEEPNESS]
    _, floor, growth, steepness = min(tried)
    return PowerLaw(free_w, roundness, floor, growth / floor, steepness)


LIMITS_MOST = 64  # of one curve

# Limits that are less than this apart are the same limit. Drivers round to a tenth of a watt or to a whole watt, so
# what is read back may be off by nearly a watt; the agent reports a limit as applied within the same distance
# (`GuardLimits.tolerance_w`). The limits that are tried lie 25 W apart, those that a person sets at least 1 W.
SAME_LIMIT_W = 1.0
_FLAT = 1e-6  # relative


def is_same_limit(one_w: float, other_w: float) -> bool:
    """Whether two power limits of a GPU, wanted or read back, are the same limit."""
    return abs(one_w - other_w) < SAME_LIMIT_W


def is_higher_limit(one_w: float, other_w: float) -> bool:
    """Whether a power limit of a GPU is another one than `other_w`, and above it."""
    return one_w - other_w >= SAME_LIMIT_W


@dataclass(frozen=True, slots=True)
class LimitPoint:
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
class PowerCurve:
    """A job on one GPU model over the limits that were measured, rising."""

    workload: str
    gpu_model: str
    gpus: int
    points: tuple[LimitPoint, ...]

    @property
    def limits_w(self) -> tuple[float, ...]:
        """The measured limits, rising."""
        return tuple(point.limit_w for point in self.points)

    @property
    def largest(self) -> LimitPoint:
        """The job with nothing held back: what slowdowns are relative to."""
        return self.points[-1]

    @cached_property
    def shape(self) -> PowerLaw:
        """The law nearest to what was measured, of one GPU."""
        limits = np.array(self.limits_w)
        power_w = np.array([point.power_w / self.gpus for point in self.points])
        return fit_power_law(limits, np.minimum(power_w, limits), np.array([point.time_s for point in self.points]))

    def interpolate(self, limit_w: float) -> LimitPoint:
        """The job at any limit; measured where it was, else shaped. Raises InvalidCurve for a limit of 0 or less."""
        if not limit_w > 0.0 or not math.isfinite(limit_w):
            raise InvalidCurve("limit_w", f"{limit_w} W is no power limit", "ask for a positive number of watts")
        index = bisect_right(self.limits_w, limit_w - SAME_LIMIT_W)
        if index < len(self.points) and is_same_limit(self.points[index].limit_w, limit_w):
            return self.points[index]
        below = self.points[index - 1] if index else None
        above = self.points[index] if index < len(self.points) else None
        return self._shape_point(limit_w, below, above)

    def charge_w(self, limit_w: float) -> float:
        """Watts that all GPUs together are charged with at a limit: what it allows, or what was measured above it."""
        return max(self.gpus * limit_w, self.interpolate(limit_w).power_w)

    def _shape_point(self, limit_w: float, below: LimitPoint | None, above: LimitPoint | None) -> LimitPoint:
        """The shape, made to meet its measured neighbours."""
        time_s = _between(
            self.shape.time_s, limit_w, [(one.limit_w, one.time_s) for one in (below, above) if one is not None]
        )
        power_w = _between(
            self.shape.power_w, limit_w, [(one.limit_w, one.power_w) for one in (below, above) if one is not None]
        )
        return LimitPoint(limit_w, time_s, min(power_w, self.gpus * limit_w), measured=False)


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


def _check_point(point: Point) -> tuple[float, LimitPoint]:
    """A point's limit and what it measured there; raises InvalidCurve where it is incomplete."""
    limit_w, power_w = point.configuration.power_limit_w, point.power_w
    if limit_w is None:
        raise InvalidCurve("power_limit_w", f"a point of {point.workload!r} has none", "name the limit it ran under")
    if power_w is None:
        raise InvalidCurve("power_w", f"not measured for {point.workload!r} at {limit_w} W", "leave the point out")
    for field, value in (("power_limit_w", limit_w), ("power_w", power_w), ("throughput_hz", point.throughput_hz)):
        if not (value > 0.0 and math.isfinite(value)):
            raise InvalidCurve(field, f"{value} for {point.workload!r}", "a measured one is positive and finite")
    return limit_w, LimitPoint(limit_w, 1.0 / point.throughput_hz, power_w)


def _apart(points: Sequence[Point]) -> Configuration:
    """The configuration that all points share, its limit aside."""
    shared = replace(points[0].configuration, power_limit_w=None)
    for point in points:
        if point.workload != points[0].workload or replace(point.configuration, power_limit_w=None) != shared:
            raise InvalidCurve(
                "points", f"{point.workload!r} in {point.configuration} is another job", "make one curve for each"
            )
    return shared


def fit_power_curve(points: Iterable[Point]) -> PowerCurve:
    """The curve of one job from its points, which differ in the power limit only; repeated limits are averaged.

    Raises InvalidCurve where there are none, too many, or a number is missing or impossible.
    """
    given = list(points)
    if not given:
        raise InvalidCurve("points", "there are none", "measure the job at its largest limit at least")
    shared = _apart(given)
    found: dict[float, list[LimitPoint]] = {}
    for limit_w, at in map(_check_point, given):
        near = next((known for known in found if is_same_limit(known, limit_w)), limit_w)
        found.setdefault(near, []).append(at)
    if len(found) > LIMITS_MOST:
        raise InvalidCurve("points", f"{len(found)} limits", f"keep the {LIMITS_MOST} that matter")
    made = (
        LimitPoint(
            limit_w,
            math.fsum(one.time_s for one in same) / len(same),
            math.fsum(one.energy_j for one in same) / math.fsum(one.time_s for one in same),
        )
        for limit_w, same in sorted(found.items())
    )
    return PowerCurve(given[0].workload, shared.gpu_model, shared.gpus, tuple(made))


_HAIR = 1e-9  # relative: a promise met exactly is met


class InvalidPromise(PowerPlanError):
    """A promise that no limit can keep, or that says nothing."""


@dataclass(frozen=True, slots=True)
class MaxSlowdown:
    """At most this much more time for the whole job than at the largest limit, e.g. 0.05."""

    share: float

    def __post_init__(self) -> None:
        if not (0.0 <= self.share < math.inf):
            raise InvalidPromise("share", f"a slowdown of {self.share}", "write 0.05 for 5 % more time")


@dataclass(frozen=True, slots=True)
class Deadline:
    """So much work in so much time, both counted from the beginning of the job."""

    work: float  # units
    time_s: float

    def __post_init__(self) -> None:
        if not (0.0 < self.work < math.inf and 0.0 < self.time_s < math.inf):
            raise InvalidPromise("deadline", f"{self.work} units in {self.time_s} s", "both are positive and finite")


@dataclass(frozen=True, slots=True)
class BestEffort:
    """No promise; energy weighs this much against time, from 0 to 1."""

    energy_weight: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.energy_weight <= 1.0:
            raise InvalidPromise("energy_weight", f"{self.energy_weight}", "take 0 for time only, up to 1 for energy")


TrainingPromise = MaxSlowdown | Deadline | BestEffort


@dataclass(frozen=True, slots=True)
class LimitChoice:
    """One limit for all GPUs of a job, what it does, and the allowed alternatives that it beat."""

    at: LimitPoint
    slowdown: float  # time over the largest limit's, less one
    saving: float  # energy of the same work, as a share of the largest limit's
    beaten: tuple[LimitPoint, ...]  # best first
    barred: tuple[LimitPoint, ...]  # they would break the promise


def promised_pace_s(curve: PowerCurve, promise: TrainingPromise) -> float:
    """The most seconds that a unit of work may take."""
    if isinstance(promise, MaxSlowdown):
        return (1.0 + promise.share) * curve.largest.time_s
    if isinstance(promise, Deadline):
        return promise.time_s / promise.work
    return math.inf


def _cost(curve: PowerCurve, promise: TrainingPromise, at: LimitPoint) -> float:
    weight = promise.energy_weight if isinstance(promise, BestEffort) else 1.0
    return weight * at.energy_j / curve.largest.energy_j + (1.0 - weight) * at.time_s / curve.largest.time_s


def _options(curve: PowerCurve, limits_w: Sequence[float] | None) -> tuple[LimitPoint, ...]:
    if limits_w is None:
        return curve.points
    if not limits_w:
        raise InvalidPromise("limits_w", "no limit to choose from", "leave it out to choose from the measured ones")
    return tuple(curve.interpolate(limit_w) for limit_w in limits_w)


def _too_slow(curve: PowerCurve, pace_s: float, fastest: LimitPoint) -> InvalidPromise:
    return InvalidPromise(
        "promise",
        f"{curve.workload!r} needs {fastest.time_s:.6g} s a unit of work at {fastest.limit_w:g} W, its fastest limit, "
        f"and was promised {pace_s:.6g} s",
        f"allow {100.0 * (fastest.time_s / pace_s - 1.0):.1f} % more time, or give it faster GPUs",
    )


def choose_limit(curve: PowerCurve, promise: TrainingPromise, limits_w: Sequence[float] | None = None) -> LimitChoice:
    """The limit of least cost that keeps the promise, among the measured limits or those given.

    Raises InvalidPromise where not even the fastest limit keeps it.
    """
    options = _options(curve, limits_w)
    pace_s = promised_pace_s(curve, promise)
    kept = [at for at in options if at.time_s <= pace_s * (1.0 + _HAIR)]
    if not kept:
        raise _too_slow(curve, pace_s, min(options, key=lambda at: at.time_s))
    first, *rest = sorted(kept, key=lambda at: (_cost(curve, promise, at), -at.limit_w))
    largest = curve.largest
    return LimitChoice(
        first,
        first.time_s / largest.time_s - 1.0,
        1.0 - first.energy_j / largest.energy_j,
        tuple(rest),
        tuple(at for at in options if at.time_s > pace_s * (1.0 + _HAIR)),
    )


def weighted_promise(promise: TrainingPromise, weight: float) -> TrainingPromise:
    """The promise at a price that is `weight` times the mean; only best effort weighs energy against time."""
    if not isinstance(promise, BestEffort):
        return promise
    energy = promise.energy_weight * weight
    rest = 1.0 - promise.energy_weight
    return BestEffort(energy / (energy + rest)) if energy + rest > 0.0 else promise
