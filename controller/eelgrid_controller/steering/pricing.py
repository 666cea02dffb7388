"""What prices do to jobs: which limit a job should have now, and how much energy weighs.

Owns the horizon of a job and what it still owes of work. Must not know budgets,
commands or how a job is measured.

Theory: eelgrid_controller.power.tariff. The work of the horizon H is what the promise
asks for, less what was earned:

    MaxSlowdown(s)    (H + earned) / ((1 + s) t_0)
    Deadline          work left x H / time left,   H the horizon or the time left
"""

from eelgrid_controller.power.curves import AtLimit
from eelgrid_controller.power.promise import BestEffort, Deadline, MaxSlowdown, Promise
from eelgrid_controller.power.tariff import Schedule, Slice, Tariff, schedule

__all__ = ["Prices", "weighed"]

_FLAT = 0.02  # of the mean: prices that vary less are one price


def weighed(promise: Promise, weight: float) -> Promise:
    """The promise at a price that is `weight` times the mean; only best effort weighs energy against time."""
    if not isinstance(promise, BestEffort):
        return promise
    energy = promise.energy_weight * weight
    rest = 1.0 - promise.energy_weight
    return BestEffort(energy / (energy + rest)) if energy + rest > 0.0 else promise


class Prices:
    """A tariff and its horizon; remembers the slices of the last moment that was asked for."""

    def __init__(self, tariff: Tariff | None, horizon_s: float) -> None:
        self.tariff = tariff
        self.horizon_s = horizon_s
        self._slices: tuple[float, float, tuple[Slice, ...]] | None = None

    def per_j(self, at_s: float) -> float | None:
        """What a joule costs then; None without prices."""
        return None if self.tariff is None else self.tariff.at(at_s)

    def weight(self, at_s: float) -> float:
        """Relative to the mean of the horizon; 1 without prices."""
        if self.tariff is None:
            return 1.0
        slices = self.slices(at_s, self.horizon_s)
        mean = sum(one.seconds * one.price for one in slices) / self.horizon_s
        return max(0.0, slices[0].price / mean) if mean > 0.0 else 1.0

    def slices(self, at_s: float, horizon_s: float) -> tuple[Slice, ...]:
        """The horizon from then on, cut where the price changes; empty without prices."""
        if self.tariff is None or horizon_s <= 0.0:
            return ()
        if self._slices is None or self._slices[:2] != (at_s, horizon_s):
            self._slices = at_s, horizon_s, self.tariff.slices(at_s, horizon_s)
        return self._slices[2]

    def plan(
        self, promise: Promise, points: tuple[AtLimit, ...], at_s: float, *, base_s: float, earned_s: float,
        left: tuple[float, float],
    ) -> Schedule | None:  # fmt: skip
        """When to run at which limit; None where prices make no difference.

        `base_s` is the time of a unit of work that slowdowns are relative to, `left` the work and the seconds of a
        deadline.
        """
        horizon_s = self.horizon_s
        if isinstance(promise, MaxSlowdown):
            work = (horizon_s + earned_s) / ((1.0 + promise.share) * base_s)
        elif isinstance(promise, Deadline) and min(left) > 0.0:
            horizon_s = min(horizon_s, left[1])
            work = left[0] * horizon_s / left[1]
        else:
            return None
        slices = self.slices(at_s, horizon_s)
        prices = [one.price for one in slices]
        if len(points) < 2 or not prices:
            return None
        mean = sum(one.seconds * one.price for one in slices) / horizon_s
        if max(prices) - min(prices) <= _FLAT * abs(mean):
            return None
        return schedule(points, slices, max(0.0, work))
