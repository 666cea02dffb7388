"""Estimates time and energy per unit of work at each power limit from windows, former runs and related jobs.

Windows give means and a pooled scatter; the prior of the ratios between limits is log-normal, over related jobs, by a
model or from former runs of the same job; both are combined by precision. Cumulative sums of deviations detect drift.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from eelgrid_controller.objectives.power.power_model import PowerCurve

OUTLIER_SCATTERS = 4.0  # scatters
_TRUSTED = 3  # windows of a limit before its mean judges the next one


class MeasurementWindow(NamedTuple):
    """One stretch of a job at one limit, the same on all its GPUs."""

    limit_w: float  # of each GPU, as read back
    work: float  # units done: steps, samples, epochs
    time_s: float
    energy_j: float  # of all its GPUs


class WindowScatter(NamedTuple):
    """Squared relative deviations of windows from their limit's mean, pooled over limits."""

    time_sum: float
    energy_sum: float
    windows: float

    @classmethod
    def prior(cls, time_share: float, energy_share: float, windows: float) -> "WindowScatter":
        """What is believed before the first window: relative scatters, and how many windows that is worth."""
        return cls(time_share**2 * windows, energy_share**2 * windows, windows)

    @property
    def time_share(self) -> float:
        """Relative scatter of one window's time per unit of work."""
        return math.sqrt(self.time_sum / self.windows)

    @property
    def energy_share(self) -> float:
        """Relative scatter of one window's energy per unit of work."""
        return math.sqrt(self.energy_sum / self.windows)

    def with_deviation(self, time: float, energy: float, before: int) -> "WindowScatter":
        """One more window, off its limit's mean of `before` windows by these relative deviations."""
        fair = before / (before + 1.0)  # the mean is uncertain, too
        return WindowScatter(
            self.time_sum + time * time * fair, self.energy_sum + energy * energy * fair, self.windows + 1.0
        )


class LimitArm(NamedTuple):
    """What was seen at one limit since the job last changed."""

    limit_w: float
    windows: int = 0
    work: float = 0.0
    time_s: float = 0.0
    energy_j: float = 0.0

    @property
    def time_per_work(self) -> float:
        """Seconds a unit of work; only after a window."""
        return self.time_s / self.work

    @property
    def energy_per_work(self) -> float:
        """Joules a unit of work; only after a window."""
        return self.energy_j / self.work

    @property
    def power_w(self) -> float:
        """Mean watts of all the job's GPUs; only after a window."""
        return self.energy_j / self.time_s

    def deviations(self, window: MeasurementWindow) -> tuple[float, float] | None:
        """Relative deviations of a window's time and energy per unit of work from the means; None before there are."""
        if self.windows == 0:
            return None
        return (
            window.time_s / window.work / self.time_per_work - 1.0,
            window.energy_j / window.work / self.energy_per_work - 1.0,
        )

    def clip_outlier(self, window: MeasurementWindow, noise: WindowScatter) -> MeasurementWindow:
        """The window as it counts: outliers are pulled in."""
        off = self.deviations(window)
        if off is None or self.windows < _TRUSTED:
            return window
        time_most, energy_most = OUTLIER_SCATTERS * noise.time_share, OUTLIER_SCATTERS * noise.energy_share
        time, energy = (max(-most, min(most, one)) for one, most in zip(off, (time_most, energy_most), strict=True))
        return window._replace(
            time_s=window.work * self.time_per_work * (1.0 + time),
            energy_j=window.work * self.energy_per_work * (1.0 + energy),
        )

    def with_window(self, window: MeasurementWindow) -> "LimitArm":
        """The sums with one more window."""
        return LimitArm(
            self.limit_w,
            self.windows + 1,
            self.work + window.work,
            self.time_s + window.time_s,
            self.energy_j + window.energy_j,
        )


class LimitHistory(NamedTuple):
    """What a job did at each limit before a search knew of it, and how far its windows scattered."""

    arms: tuple[LimitArm, ...] = ()
    noise: WindowScatter | None = None


class WindowDrift(NamedTuple):
    """Cumulative sums of deviations beyond what scatter explains; up and down, of time and of energy."""

    slower: float = 0.0
    faster: float = 0.0
    dearer: float = 0.0
    cheaper: float = 0.0

    def with_deviation(self, time: float, energy: float, allowed: float) -> "WindowDrift":
        """One more window, its deviations in scatters; `allowed` of them are not counted."""
        time, energy = (max(-OUTLIER_SCATTERS, min(OUTLIER_SCATTERS, one)) for one in (time, energy))
        return WindowDrift(
            max(0.0, self.slower + time - allowed),
            max(0.0, self.faster - time - allowed),
            max(0.0, self.dearer + energy - allowed),
            max(0.0, self.cheaper - energy - allowed),
        )


_ALIKE = 0.15  # of the logarithm of watts
_FLOOR = 0.02
_FEW = 0.10  # scatter of one relative alone
_RELATIVES_MOST = 256


class LimitRatio(NamedTuple):
    """A limit against the largest: mean and scatter of the logarithm."""

    mean: float
    scatter: float


class LimitPrior(NamedTuple):
    """For each limit, time and energy of the same work; None where nothing is known."""

    time: tuple[LimitRatio | None, ...]
    energy: tuple[LimitRatio | None, ...]
    is_measured: bool = False  # on former runs of the same job, not by a model or on other jobs


def _pool_ratios(values: Sequence[tuple[float, float]]) -> LimitRatio | None:
    """From (weight, logarithm) pairs."""
    total = math.fsum(weight for weight, _ in values)
    if total <= 1e-6:
        return None
    mean = math.fsum(weight * value for weight, value in values) / total
    spread = math.fsum(weight * (value - mean) ** 2 for weight, value in values) / total
    count = total * total / math.fsum(weight * weight for weight, _ in values)
    return LimitRatio(mean, math.sqrt(spread + _FLOOR**2 + _FEW**2 / count))


def prior_from_relatives(
    relatives: Sequence[PowerCurve], limits_w: Sequence[float], power_w: float | None
) -> LimitPrior:
    """The prior at falling limits of one GPU; `power_w` is what a GPU of the job draws at the largest, if known.

    Relatives are curves of other jobs on the same GPU model; at most 256 of them count.
    """
    time: list[LimitRatio | None] = []
    energy: list[LimitRatio | None] = []
    for limit_w in limits_w:
        times, energies = [], []
        for curve in relatives[:_RELATIVES_MOST]:
            largest, at = curve.interpolate(limits_w[0]), curve.interpolate(limit_w)
            off = 0.0 if power_w is None else math.log(largest.power_w / curve.gpus / power_w)
            weight = math.exp(-0.5 * (off / _ALIKE) ** 2)
            times.append((weight, math.log(at.time_s / largest.time_s)))
            energies.append((weight, math.log(at.energy_j / largest.energy_j)))
        time.append(_pool_ratios(times))
        energy.append(_pool_ratios(energies))
    return LimitPrior(tuple(time), tuple(energy))


class LimitEstimate(NamedTuple):
    """One limit as far as is known; errors are relative, one standard deviation."""

    limit_w: float
    windows: int
    time_s: float  # per unit of work
    time_error: float
    energy_j: float  # per unit of work
    energy_error: float
    ratio: float  # time over the reference's
    ratio_error: float

    @property
    def power_w(self) -> float:
        """Mean watts of all the job's GPUs."""
        return self.energy_j / self.time_s


_Normal: TypeAlias = tuple[float, float]  # mean and variance of a logarithm


def _combine_normals(one: _Normal, other: _Normal) -> _Normal:
    """Two independent estimates of one value, by their precision."""
    total = one[1] + other[1]
    return (one[0] * other[1] + other[0] * one[1]) / total, one[1] * other[1] / total


def _estimate_values(
    seen: Sequence[_Normal | None], ratios: Sequence[_Normal | None], reference: int
) -> list[tuple[_Normal, _Normal] | None]:
    """Values at all limits, and their ratios to the reference's, from windows and what is known of the ratios.

    With logarithms value = level + ratio, windows at any limit whose ratio is known tell of the level, and so of every
    other limit: the posterior of a normal model with independent ratios and a flat prior of the level. What is known of
    one limit is combined with what all the others say of the level. The reference has windows, and a ratio of nothing.
    """
    precision = weighted = 0.0
    levels: list[_Normal] = []  # precision that each limit adds, and mean times precision
    for value, ratio in zip(seen, ratios, strict=True):
        adds = 0.0 if value is None or ratio is None else 1.0 / (value[1] + ratio[1])
        mean = 0.0 if value is None or ratio is None else value[0] - ratio[0]
        levels.append((adds, adds * mean))
        precision, weighted = precision + adds, weighted + adds * mean
    found: list[tuple[_Normal, _Normal] | None] = []
    for index, (value, ratio, (adds, moved)) in enumerate(zip(seen, ratios, levels, strict=True)):
        if index == reference:
            found.append(((weighted / precision, 1.0 / precision), (0.0, 0.0)))
            continue
        level, variance = (weighted - moved) / (precision - adds), 1.0 / (precision - adds)  # by all the others
        if value is None:
            found.append(None if ratio is None else ((level + ratio[0], variance + ratio[1]), ratio))
            continue
        against = value[0] - level, value[1] + variance
        if ratio is None:
            found.append((value, against))
            continue
        told = level + ratio[0], variance + ratio[1]
        found.append((_combine_normals(value, told), _combine_normals(against, ratio)))
    return found


def estimate_limits(
    arms: Sequence[LimitArm], reference: int, noise: WindowScatter, prior: LimitPrior | None
) -> tuple[LimitEstimate | None, ...]:
    """One for each limit; None where neither windows nor a prior say anything.

    `reference` is the limit, measured at least once, that slowdowns are relative to.
    """

    def estimate(
        value: Callable[[LimitArm], float], error: float, ratios: Sequence[LimitRatio | None]
    ) -> list[tuple[_Normal, _Normal] | None]:
        expected = [None if one is None else (one.mean, one.scatter * one.scatter) for one in ratios]
        expected[reference] = (0.0, 0.0)
        measured = [(math.log(value(arm)), error**2 / arm.windows) if arm.windows else None for arm in arms]
        return _estimate_values(measured, expected, reference)

    nothing = (None,) * len(arms)
    time_ratios, energy_ratios = (nothing, nothing) if prior is None else (prior.time, prior.energy)
    times = estimate(lambda arm: arm.time_per_work, noise.time_share, time_ratios)
    energies = estimate(lambda arm: arm.energy_per_work, noise.energy_share, energy_ratios)
    found: list[LimitEstimate | None] = []
    for arm, time, energy in zip(arms, times, energies, strict=True):
        if time is None or energy is None:
            found.append(None)
            continue
        (time_log, time_variance), (ratio_log, ratio_variance) = time
        energy_log, energy_variance = energy[0]
        found.append(
            LimitEstimate(
                arm.limit_w,
                arm.windows,
                math.exp(time_log),
                math.sqrt(time_variance),
                math.exp(energy_log),
                math.sqrt(energy_variance),
                math.exp(ratio_log),
                math.sqrt(ratio_variance),
            )
        )
    return tuple(found)


RUNS_DIFFER = 0.015  # scatter of a limit's ratio between two runs of one job


def prior_from_estimates(
    found: Sequence[LimitEstimate | None], reference: int, scatter: float, *, is_measured: bool = False
) -> LimitPrior:
    """What to expect of ratios that may differ by a relative `scatter` from those that were found.

    `reference` is the limit that they are relative to; it was measured.
    """
    base = found[reference]
    assert base is not None, "the reference was measured"

    def ratio(one: LimitEstimate | None, *, energy: bool) -> LimitRatio | None:
        if one is None:
            return None
        value = one.energy_j / base.energy_j if energy else one.ratio
        error = math.hypot(one.energy_error, base.energy_error) if energy else one.ratio_error
        return LimitRatio(math.log(value), math.hypot(error, scatter))

    return LimitPrior(
        tuple(ratio(one, energy=False) for one in found), tuple(ratio(one, energy=True) for one in found), is_measured
    )
