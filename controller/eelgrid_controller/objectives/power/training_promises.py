"""Promises of training jobs, and the limit or mixture of limits that keeps one for the least energy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eelgrid_controller.objectives.power.errors import InvalidPromise
from eelgrid_controller.objectives.power.power_model import LimitPoint, PowerCurve

_HAIR = 1e-9  # relative: a promise met exactly is met


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


@dataclass(frozen=True, slots=True)
class LimitMixture:
    """Two limits in turn; `share` of the work is done at `slow`."""

    slow: LimitPoint
    fast: LimitPoint
    share: float

    @property
    def time_s(self) -> float:
        """Seconds a unit of work, in the mean."""
        return self.share * self.slow.time_s + (1.0 - self.share) * self.fast.time_s

    @property
    def energy_j(self) -> float:
        """Joules a unit of work, in the mean."""
        return self.share * self.slow.energy_j + (1.0 - self.share) * self.fast.energy_j


def _pace_s(curve: PowerCurve, promise: TrainingPromise) -> float:
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

    Raises PromiseRefused where not even the fastest limit keeps it.
    """
    options = _options(curve, limits_w)
    pace_s = _pace_s(curve, promise)
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


def choose_mixture(
    curve: PowerCurve, promise: MaxSlowdown | Deadline, limits_w: Sequence[float] | None = None
) -> LimitMixture:
    """The two limits that in turn keep the promise for the least energy; both the same where one is best alone.

    Exact: with one constraint on time, an optimum of the linear program has at most two limits.
    """
    options = _options(curve, limits_w)
    pace_s = _pace_s(curve, promise)
    fast = [at for at in options if at.time_s <= pace_s * (1.0 + _HAIR)]
    if not fast:
        raise _too_slow(curve, pace_s, min(options, key=lambda at: at.time_s))
    alone = min(fast, key=lambda at: (at.energy_j, -at.limit_w))
    best = LimitMixture(alone, alone, 1.0)
    for quick in fast:
        for slow in options:
            if slow.time_s > pace_s * (1.0 + _HAIR):
                tried = LimitMixture(slow, quick, max(0.0, (pace_s - quick.time_s) / (slow.time_s - quick.time_s)))
                best = min(best, tried, key=lambda one: one.energy_j)
    return best
