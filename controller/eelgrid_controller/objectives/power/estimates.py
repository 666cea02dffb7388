"""Estimates time and energy per unit of work at each power limit from windows and from related jobs.

Windows give means and a pooled scatter; the prior is log-normal over related jobs; both are combined by
precision. Cumulative sums of deviations detect drift.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

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


def _combine_estimates(
    seen: tuple[float, float] | None, prior: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Two (logarithm, error) pairs by their precision."""
    if seen is None or prior is None:
        return seen if prior is None else prior
    ours, theirs = seen[1] ** -2, prior[1] ** -2
    return (ours * seen[0] + theirs * prior[0]) / (ours + theirs), (ours + theirs) ** -0.5


def _from_prior(ratio: LimitRatio | None, reference: float, error: float) -> tuple[float, float] | None:
    return None if ratio is None else (math.log(reference) + ratio.mean, math.hypot(ratio.scatter, error))


def estimate_limits(
    arms: Sequence[LimitArm], reference: int, noise: WindowScatter, prior: LimitPrior | None
) -> tuple[LimitEstimate | None, ...]:
    """One for each limit; None where neither windows nor a prior say anything.

    `reference` is the limit, measured at least once, that slowdowns are relative to.
    """
    base = arms[reference]
    time_share, energy_share = noise.time_share, noise.energy_share
    base_time_s, base_energy_j = base.time_per_work, base.energy_per_work
    time_error = time_share / math.sqrt(base.windows)
    energy_error = energy_share / math.sqrt(base.windows)
    found: list[LimitEstimate | None] = []
    for index, arm in enumerate(arms):
        time = energy = None
        if arm.windows:
            root = math.sqrt(arm.windows)
            time = math.log(arm.time_per_work), time_share / root
            energy = math.log(arm.energy_per_work), energy_share / root
        if prior is not None and index != reference:
            time = _combine_estimates(time, _from_prior(prior.time[index], base_time_s, time_error))
            energy = _combine_estimates(energy, _from_prior(prior.energy[index], base_energy_j, energy_error))
        if time is None or energy is None:
            found.append(None)
            continue
        time_s = math.exp(time[0])
        ratio_error = 0.0 if index == reference else math.hypot(time[1], time_error)
        found.append(
            LimitEstimate(
                arm.limit_w,
                arm.windows,
                time_s,
                time[1],
                math.exp(energy[0]),
                energy[1],
                time_s / base_time_s,
                ratio_error,
            )
        )
    return tuple(found)
