"""Energy prices over time, and the schedule of power limits that does given work at the least cost.

A joule costs c(t) = PUE(t) (price(t) + carbon_price carbon(t)), each a step function that repeats. `PriceHorizon` weighs
the price of the moment against the mean of a horizon, and plans a job's limits over it.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from eelgrid_controller.objectives.power.power_model import (
    Deadline,
    LimitPoint,
    MaxSlowdown,
    PowerPlanError,
    TrainingPromise,
)
from eelgrid_protos.messages import EnergyPrices

DAY_S = 86_400.0
WEEK_S = 604_800.0
_MONDAY_S = 345_600.0  # 1970-01-05, the first Monday of Unix time
_JOULES_A_KWH = 3.6e6
STEPS_MOST = 10_080  # a week of minutes
_APART_S = 60.0  # of two steps: a day has at most 1,440 slices of each
_HAIR = 1e-9  # relative


class InvalidTariff(PowerPlanError):
    """Prices that say nothing."""


@dataclass(frozen=True, slots=True)
class StepFunction:
    """A value that stays until the next start, and repeats every period."""

    starts_s: tuple[float, ...]  # rising within the period; before the first the last value goes on
    values: tuple[float, ...]
    period_s: float = DAY_S

    def __post_init__(self) -> None:
        if not self.starts_s or len(self.starts_s) != len(self.values) or len(self.starts_s) > STEPS_MOST:
            raise InvalidTariff(
                "starts_s",
                f"{len(self.starts_s)} starts of {len(self.values)} values",
                f"give 1 to {STEPS_MOST} starts and as many values",
            )
        if not _APART_S <= self.period_s < math.inf:
            raise InvalidTariff("period_s", f"{self.period_s}", "give seconds, e.g. 86400 for a day")
        rising = all(high - low >= _APART_S for low, high in zip(self.starts_s, self.starts_s[1:], strict=False))
        if not (rising and self.starts_s[0] >= 0.0 and self.starts_s[-1] < self.period_s):
            raise InvalidTariff("starts_s", "they do not rise by a minute each within the period", "give seconds of it")
        if not all(math.isfinite(value) for value in self.values):
            raise InvalidTariff("values", "one is not finite", "leave unknown times at the value before")

    def value_at(self, at_s: float) -> float:
        """The value at a time of the period, or any number of periods later."""
        return self.values[bisect_right(self.starts_s, at_s % self.period_s) - 1]

    def breakpoints(self, from_s: float, until_s: float) -> Iterator[float]:
        """The starts between two times, in order."""
        period = math.floor(from_s / self.period_s)
        while period * self.period_s < until_s:
            for start_s in self.starts_s:
                if from_s < period * self.period_s + start_s < until_s:
                    yield period * self.period_s + start_s
            period += 1


_NOTHING, _ONE = StepFunction((0.0,), (0.0,)), StepFunction((0.0,), (1.0,))


@dataclass(frozen=True, slots=True)
class EnergyTariff:
    """What a joule at a GPU costs; `begins_s` is when a period of all its steps begins, by the clock of the events."""

    price: StepFunction  # currency a joule at the meter; may be below 0
    carbon: StepFunction = _NOTHING  # grams a joule
    carbon_price: float = 0.0  # currency a gram
    pue: StepFunction = _ONE  # joules at the meter for a joule at the GPU
    begins_s: float = 0.0

    def price_at(self, at_s: float) -> float:
        """What a joule at a GPU costs then."""
        since_s = at_s - self.begins_s
        return self.pue.value_at(since_s) * (
            self.price.value_at(since_s) + self.carbon_price * self.carbon.value_at(since_s)
        )

    def price_slices(self, from_s: float, horizon_s: float) -> tuple["PriceSlice", ...]:
        """The horizon cut where the cost changes."""
        until_s = from_s + horizon_s
        cuts = {from_s, until_s}
        for steps in (self.price, self.carbon, self.pue):
            if len(steps.starts_s) > 1:
                cuts |= {
                    self.begins_s + at_s for at_s in steps.breakpoints(from_s - self.begins_s, until_s - self.begins_s)
                }
        ends = sorted(cuts)
        made: list[PriceSlice] = []
        for begin_s, end_s in pairwise(ends):
            price = self.price_at(0.5 * (begin_s + end_s))
            if made and made[-1].price == price:
                made[-1] = made[-1]._replace(seconds=end_s - made[-1].begin_s)
            else:
                made.append(PriceSlice(begin_s, end_s - begin_s, price))
        return tuple(made)


def policy_tariff(prices: EnergyPrices | None) -> EnergyTariff | None:
    """What a joule costs by Unix time; None for the same at all times."""
    if prices is None:
        return None
    starts_s = tuple(60.0 * period.begins_minute for period in prices.periods)
    return EnergyTariff(
        price=StepFunction(starts_s, tuple(period.price_per_kwh / _JOULES_A_KWH for period in prices.periods), WEEK_S),
        carbon=StepFunction(
            starts_s, tuple(1000.0 * period.carbon_kg_per_kwh / _JOULES_A_KWH for period in prices.periods), WEEK_S
        ),
        carbon_price=prices.carbon_price_per_kg / 1000.0,
        pue=StepFunction((0.0,), (prices.pue,), WEEK_S),
        begins_s=_MONDAY_S - 60.0 * prices.utc_offset_minutes,
    )


class PriceSlice(NamedTuple):
    """A stretch of time at one price."""

    begin_s: float
    seconds: float
    price: float  # currency a joule


class ScheduledSlice(NamedTuple):
    """What a job should do in a slice: the first `share` of it at `fast`, the rest at `slow`."""

    slice: PriceSlice
    fast: LimitPoint
    slow: LimitPoint
    share: float

    def point_at(self, at_s: float) -> LimitPoint:
        """What it should do at a time of the slice."""
        return self.fast if at_s < self.slice.begin_s + self.share * self.slice.seconds else self.slow


@dataclass(frozen=True, slots=True)
class LimitSchedule:
    """The turns of a horizon, what they cost and do."""

    turns: tuple[ScheduledSlice, ...]
    cost: float  # currency
    work: float  # units
    work_price: (
        float  # currency: what one unit more would cost; 0 where work is free, infinite where no more can be done
    )

    def point_at(self, at_s: float) -> LimitPoint | None:
        """What should be done then; None outside the horizon."""
        place = bisect_right([turn.slice.begin_s for turn in self.turns], at_s) - 1
        if place < 0 or at_s >= self.turns[place].slice.begin_s + self.turns[place].slice.seconds:
            return None
        return self.turns[place].point_at(at_s)


def efficient_points(points: Sequence[LimitPoint], sign: int) -> tuple[LimitPoint, ...]:
    """The limits that are worth running at a price of this sign, work a second rising: first the cheapest.

    They are the lower convex hull of (work a second, price x watts), from its least cost on. Every step along it costs
    more a unit of work than the one before.
    """
    rising = sorted(points, key=lambda at: (1.0 / at.time_s, -sign * at.power_w))
    hull: list[LimitPoint] = []
    for at in rising:
        while hull and (
            _rate(hull[-1]) == _rate(at)
            or (len(hull) > 1 and _slope(hull[-2], hull[-1], sign) >= _slope(hull[-1], at, sign))
        ):
            hull.pop()
        hull.append(at)
    cheapest = min(range(len(hull)), key=lambda place: (sign * hull[place].power_w, -place))
    return tuple(hull[cheapest:])


def _rate(at: LimitPoint) -> float:
    return 1.0 / at.time_s


def _slope(low: LimitPoint, high: LimitPoint, sign: int) -> float:
    return sign * (high.power_w - low.power_w) / (_rate(high) - _rate(low))


def schedule_limits(points: Sequence[LimitPoint], slices: Sequence[PriceSlice], work: float) -> LimitSchedule:
    """The limits over time that do the work for the least money; all that can be done where that is too little.

    Exact, see above; at most one slice is divided. `points` are at least one, with times and watts above 0.
    """
    paths = {sign: efficient_points(points, sign) for sign in {_sign(one.price) for one in slices}}
    places = [0] * len(slices)
    shares = [0.0] * len(slices)  # of the next step
    done = math.fsum(one.seconds * _rate(paths[_sign(one.price)][0]) for one in slices)
    steps = sorted(
        (abs(one.price) * _slope(low, high, _sign(one.price)), at, place)
        for at, one in enumerate(slices)
        for place, (low, high) in enumerate(pairwise(paths[_sign(one.price)]))
    )
    work_price = 0.0
    for price, at, place in steps:
        if done >= work:
            break
        path = paths[_sign(slices[at].price)]
        more = slices[at].seconds * (_rate(path[place + 1]) - _rate(path[place]))
        work_price = price
        if more > work - done:
            places[at], shares[at] = place, (work - done) / more
            done = work
        else:
            places[at] = place + 1
            done += more
    if done < work * (1.0 - _HAIR):
        work_price = math.inf
    turns = []
    for at, one in enumerate(slices):
        path = paths[_sign(one.price)]
        slow = path[places[at]]
        fast = path[places[at] + 1] if shares[at] > 0.0 else slow
        turns.append(ScheduledSlice(one, fast, slow, shares[at]))
    cost = math.fsum(
        turn.slice.price
        * turn.slice.seconds
        * (turn.share * turn.fast.power_w + (1.0 - turn.share) * turn.slow.power_w)
        for turn in turns
    )
    total = math.fsum(
        turn.slice.seconds * (turn.share * _rate(turn.fast) + (1.0 - turn.share) * _rate(turn.slow)) for turn in turns
    )
    return LimitSchedule(tuple(turns), cost, total, work_price)


def _sign(price: float) -> int:
    return (price > 0.0) - (price < 0.0)


_FLAT = 0.02  # of the mean: prices that vary less are one price


class PriceHorizon:
    """A tariff and its horizon; remembers the slices of the last moment that was asked for."""

    def __init__(self, tariff: EnergyTariff | None, horizon_s: float) -> None:
        self.tariff = tariff
        self.horizon_s = horizon_s
        self._slices: tuple[float, float, tuple[PriceSlice, ...]] | None = None

    def price_per_j(self, at_s: float) -> float | None:
        """What a joule costs then; None without prices."""
        return None if self.tariff is None else self.tariff.price_at(at_s)

    def price_weight(self, at_s: float) -> float:
        """Relative to the mean of the horizon; 1 without prices."""
        if self.tariff is None:
            return 1.0
        slices = self.price_slices(at_s, self.horizon_s)
        mean = sum(one.seconds * one.price for one in slices) / self.horizon_s
        return max(0.0, slices[0].price / mean) if mean > 0.0 else 1.0

    def price_slices(self, at_s: float, horizon_s: float) -> tuple[PriceSlice, ...]:
        """The horizon from then on, cut where the price changes; empty without prices."""
        if self.tariff is None or horizon_s <= 0.0:
            return ()
        if self._slices is None or self._slices[:2] != (at_s, horizon_s):
            self._slices = at_s, horizon_s, self.tariff.price_slices(at_s, horizon_s)
        return self._slices[2]

    def schedule_limits(
        self,
        promise: TrainingPromise,
        points: tuple[LimitPoint, ...],
        at_s: float,
        *,
        base_s: float,
        earned_s: float,
        left: tuple[float, float],
    ) -> LimitSchedule | None:
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
        slices = self.price_slices(at_s, horizon_s)
        prices = [one.price for one in slices]
        if len(points) < 2 or not prices:
            return None
        mean = sum(one.seconds * one.price for one in slices) / horizon_s
        if max(prices) - min(prices) <= _FLAT * abs(mean):
            return None
        return schedule_limits(points, slices, max(0.0, work))
