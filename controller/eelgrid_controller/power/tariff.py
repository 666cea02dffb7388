"""What a joule costs at a time, and when a job should draw it.

Owns prices as functions of time, and the limits over time that do given work for the
least money. Must not know clocks, time zones, or how a limit is set.

Theory. Price, carbon intensity and PUE are steps over a period (a day, a week); a joule
at the GPU costs

    c(t) = PUE(t) (price(t) + carbon_price carbon(t))
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

from eelgrid_controller.power.refusals import PowerRefused

__all__ = ["DAY_S", "STEPS_MOST", "WEEK_S", "Steps", "Tariff", "TariffRefused"]

DAY_S = 86_400.0
WEEK_S = 604_800.0
STEPS_MOST = 10_080  # a week of minutes


class TariffRefused(PowerRefused):
    """Prices that say nothing."""


@dataclass(frozen=True, slots=True)
class Steps:
    """A value that stays until the next start, and repeats every period."""

    starts_s: tuple[float, ...]  # rising within the period; before the first the last value goes on
    values: tuple[float, ...]
    period_s: float = DAY_S

    def __post_init__(self) -> None:
        if not self.starts_s or len(self.starts_s) != len(self.values) or len(self.starts_s) > STEPS_MOST:
            raise TariffRefused(
                "starts_s", f"{len(self.starts_s)} starts of {len(self.values)} values",
                f"give 1 to {STEPS_MOST} starts and as many values",
            )  # fmt: skip
        if not 0.0 < self.period_s < math.inf:
            raise TariffRefused("period_s", f"{self.period_s}", "give seconds, e.g. 86400 for a day")
        rising = all(low < high for low, high in zip(self.starts_s, self.starts_s[1:], strict=False))
        if not (rising and self.starts_s[0] >= 0.0 and self.starts_s[-1] < self.period_s):
            raise TariffRefused("starts_s", "they do not rise within the period", "give seconds after its beginning")
        if not all(math.isfinite(value) for value in self.values):
            raise TariffRefused("values", "one is not finite", "leave unknown times at the value before")

    def at(self, at_s: float) -> float:
        """The value at a time of the period, or any number of periods later."""
        return self.values[bisect_right(self.starts_s, at_s % self.period_s) - 1]


_NOTHING, _ONE = Steps((0.0,), (0.0,)), Steps((0.0,), (1.0,))


@dataclass(frozen=True, slots=True)
class Tariff:
    """What a joule at a GPU costs; `begins_s` is when a period of all its steps begins, by the clock of the events."""

    price: Steps  # currency a joule at the meter; may be below 0
    carbon: Steps = _NOTHING  # grams a joule
    carbon_price: float = 0.0  # currency a gram
    pue: Steps = _ONE  # joules at the meter for a joule at the GPU
    begins_s: float = 0.0

    def at(self, at_s: float) -> float:
        """What a joule at a GPU costs then."""
        since_s = at_s - self.begins_s
        return self.pue.at(since_s) * (self.price.at(since_s) + self.carbon_price * self.carbon.at(since_s))
