"""What windows of a running job say about each limit: means, their errors, and whether the job has changed.

Owns the sums. Must not know promises or which limit comes next.

Theory: a window at limit i did work u in d seconds with E joules. Time and energy
per unit of work are t_i = sum d / sum u and e_i = sum E / sum u. The relative
scatter s of one window is pooled over all limits, since it comes from the job
and not from the limit; it starts from a prior worth a few windows and the error
of a mean of n windows is s / sqrt(n). A window further than OUTLIER scatters
from its limit's mean counts as that far: a checkpoint or a stall says nothing of
the limit. Changes are found by two-sided cumulative sums (Page, Biometrika 1954)
of the standardised deviations of time and of power.
"""

import math
from typing import NamedTuple

__all__ = ["Arm", "Drift", "Noise", "Shown", "Window"]

OUTLIER = 4.0  # scatters
_TRUSTED = 3  # windows of a limit before its mean judges the next one


class Window(NamedTuple):
    """One stretch of a job at one limit, the same on all its GPUs."""

    limit_w: float  # of each GPU, as read back
    work: float  # units done: steps, samples, epochs
    time_s: float
    energy_j: float  # of all its GPUs


class Noise(NamedTuple):
    """Squared relative deviations of windows from their limit's mean, pooled over limits."""

    time_sum: float
    energy_sum: float
    windows: float

    @classmethod
    def prior(cls, time_share: float, energy_share: float, windows: float) -> "Noise":
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

    def with_deviation(self, time: float, energy: float, before: int) -> "Noise":
        """One more window, off its limit's mean of `before` windows by these relative deviations."""
        fair = before / (before + 1.0)  # the mean is uncertain, too
        return Noise(self.time_sum + time * time * fair, self.energy_sum + energy * energy * fair, self.windows + 1.0)


class Arm(NamedTuple):
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

    def deviations(self, window: Window) -> tuple[float, float] | None:
        """Relative deviations of a window's time and energy per unit of work from the means; None before there are."""
        if self.windows == 0:
            return None
        return (
            window.time_s / window.work / self.time_per_work - 1.0,
            window.energy_j / window.work / self.energy_per_work - 1.0,
        )

    def tamed(self, window: Window, noise: Noise) -> Window:
        """The window as it counts: outliers are pulled in."""
        off = self.deviations(window)
        if off is None or self.windows < _TRUSTED:
            return window
        time_most, energy_most = OUTLIER * noise.time_share, OUTLIER * noise.energy_share
        time, energy = (max(-most, min(most, one)) for one, most in zip(off, (time_most, energy_most), strict=True))
        return window._replace(
            time_s=window.work * self.time_per_work * (1.0 + time),
            energy_j=window.work * self.energy_per_work * (1.0 + energy),
        )

    def with_window(self, window: Window) -> "Arm":
        """The sums with one more window."""
        return Arm(
            self.limit_w,
            self.windows + 1,
            self.work + window.work,
            self.time_s + window.time_s,
            self.energy_j + window.energy_j,
        )


class Shown(NamedTuple):
    """What a job did at each limit before a search knew of it, and how far its windows scattered."""

    arms: tuple[Arm, ...] = ()
    noise: Noise | None = None


class Drift(NamedTuple):
    """Cumulative sums of deviations beyond what scatter explains; up and down, of time and of energy."""

    slower: float = 0.0
    faster: float = 0.0
    dearer: float = 0.0
    cheaper: float = 0.0

    def with_deviation(self, time: float, energy: float, allowed: float) -> "Drift":
        """One more window, its deviations in scatters; `allowed` of them are not counted."""
        time, energy = (max(-OUTLIER, min(OUTLIER, one)) for one in (time, energy))
        return Drift(
            max(0.0, self.slower + time - allowed),
            max(0.0, self.faster - time - allowed),
            max(0.0, self.dearer + energy - allowed),
            max(0.0, self.cheaper - energy - allowed),
        )
