"""The bound that holds for any use of limits in turn: the best mixture of two limits of a known curve."""

from dataclasses import dataclass

from eelgrid_controller.objectives.power.power_model import LimitPoint, MaxSlowdown, PowerCurve

_ROUNDING = 1e-9  # relative: a promise met exactly is met


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


def choose_mixture(curve: PowerCurve, promise: MaxSlowdown) -> LimitMixture:
    """The two limits that in turn keep a promise for the least energy; both the same where one is best alone.

    Exact: with one constraint on time, an optimum of the linear program has at most two limits.
    """
    pace_s = (1.0 + promise.share) * curve.largest.time_s
    fast = [at for at in curve.points if at.time_s <= pace_s * (1.0 + _ROUNDING)]
    alone = min(fast, key=lambda at: (at.energy_j, -at.limit_w))
    best = LimitMixture(alone, alone, 1.0)
    for quick in fast:
        for slow in curve.points:
            if slow.time_s > pace_s * (1.0 + _ROUNDING):
                tried = LimitMixture(slow, quick, max(0.0, (pace_s - quick.time_s) / (slow.time_s - quick.time_s)))
                best = min(best, tried, key=lambda one: one.energy_j)
    return best
