"""What budgets allow each job: a ceiling for its limit.

Owns how known and unknown jobs share watts. Must not know explorations, commands or time.

Theory. Each job wishes for a limit: what it would run at if there were no budgets. If all
wishes fit, they are granted. If not, limits are divided by eelgrid_controller.power.planner
over the limits up to the wish that keep the promise; a job whose curve is unknown counts
with the limit that it holds. Where even the least of these exceed a budget, its jobs give
way in this order, and what is missing is said:

    1. unknown jobs may be lowered; they are taken to slow as (largest / limit)^1/2, as
       known ones are beyond the limits that were measured
    2. promises are no longer kept; budgets come first
    3. all jobs of the budget have their least limits, and it is still exceeded

What is left then raises ceilings, first of jobs that owe time, then of those that search:
a ceiling is more than a wish where there is room, so that jobs can move on their own. The
sum of what all ceilings are charged with is within every budget, case 3 aside.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from eelgrid_controller.power.budgets import Budget, Budgets
from eelgrid_controller.power.curves import AtLimit, Curve
from eelgrid_controller.power.planner import Job, Share, Want, divide
from eelgrid_controller.power.promise import BestEffort, Deadline, MaxSlowdown, Promise
from eelgrid_controller.power.refusals import PowerRefused

__all__ = ["Asking", "Shared", "Shortfall", "share"]

_HAIR_W = 1e-6
_SAME_W = 0.5
_HAIR = 1e-9  # relative: a promise met exactly is met
_SLOWS = 0.5  # power of the ratio of limits; measured jobs lie between 0 and 1
_POINTS = 3  # of a curve whose shape is believed
_BINDS = 0.9  # of a limit drawn
_PROMISES = "the limits that keep all promises draw more: promises give way"
_LEAST = "even the least limits, and what cannot be changed, draw more"
_TIME_ONLY = BestEffort(0.0)


class Asking(NamedTuple):
    """A job that shares."""

    name: str
    wish_w: float  # of each GPU
    held_w: float  # the largest that a GPU of it may have now
    limits_w: tuple[float, ...]  # that may be set, falling
    charges_w: tuple[float, ...]  # of each GPU at each of them
    gpus: tuple[tuple[tuple[str, ...], int], ...]  # that can be changed, with the lowest budgets they draw from
    curve: Curve | None  # of the whole job; None while it is unknown
    promise: Promise  # for what is left of the job
    weight: float
    owes: bool  # time, by its promise


class Shortfall(NamedTuple):
    """Watts that a budget lacks, and what that means."""

    watts: float
    reason: str


class Shared(NamedTuple):
    """Ceilings by job, None for no bound, and shortfalls by budget."""

    ceilings_w: dict[str, float | None]
    shortfalls: dict[str, Shortfall]


class _Option(NamedTuple):
    limit_w: float
    charge_w: float  # of each GPU
    time_s: float
    power_w: float  # of each GPU


class _Case:
    """One division: jobs, what they may have, and what is free."""

    def __init__(self, asking: Sequence[Asking], budgets: Budgets, fixed_w: Sequence[float]) -> None:
        self.asking = asking
        self.budgets = budgets
        self.room = [room - fixed for room, fixed in zip(budgets.room_w(), fixed_w, strict=True)]
        self.draws = [_draws(one, budgets) for one in asking]

    def lacks(self, charges_w: Sequence[float]) -> list[float]:
        """Watts above the room of each budget, if each GPU of each job is charged so; negative where some are left."""
        used: list[list[float]] = [[] for _ in self.room]
        for draws, charge_w in zip(self.draws, charges_w, strict=True):
            for place, gpus in draws:
                used[place].append(gpus * charge_w)
        return [math.fsum(one) - room for one, room in zip(used, self.room, strict=True)]

    def touched(self, lacks: Sequence[float]) -> list[bool]:
        """Jobs that draw from a budget that lacks."""
        return [any(lacks[place] > _HAIR_W for place, _ in draws) for draws in self.draws]

    def granted(self, want: Want, shortfalls: dict[str, Shortfall]) -> list[_Option]:
        """One option for each job by a division; what is short is written down."""
        options = [_promised(one) if one.curve is not None else _held(one) for one in self.asking]
        for relax in (_unknown, _any):
            lacks = self.lacks([min(one.charge_w for one in each) for each in options])
            if max(lacks, default=0.0) <= _HAIR_W:
                break
            if relax is _any:
                self._note(lacks, _PROMISES, shortfalls)
            touched = self.touched(lacks)
            options = [relax(one, each) if hit else each
                       for one, each, hit in zip(self.asking, options, touched, strict=True)]  # fmt: skip
        lacks = self.lacks([min(one.charge_w for one in each) for each in options])
        self._note(lacks, _LEAST, shortfalls)
        room = [max(0.0, free, free + lack) for free, lack in zip(self.room, lacks, strict=True)]
        return self._divided(options, room, want)

    def _note(self, lacks: Sequence[float], reason: str, shortfalls: dict[str, Shortfall]) -> None:
        for budget, lack in zip(self.budgets.all, lacks, strict=True):
            if lack > _HAIR_W:
                shortfalls[budget.name] = Shortfall(lack, reason)

    def _divided(self, options: Sequence[Sequence[_Option]], room: Sequence[float], want: Want) -> list[_Option]:
        jobs = [_job(one, each, want) for one, each in zip(self.asking, options, strict=True)]
        free = Budgets(Budget(one.name, watts, one.parent) for one, watts in zip(self.budgets.all, room, strict=True))
        try:
            given = divide(jobs, free, want, certify=False).given
        except PowerRefused:  # rounding at a room that is exactly the least
            return [min(each, key=lambda one: one.charge_w) for each in options]
        return [
            next(one for one in each if abs(one.limit_w - got.limit_w) <= _SAME_W)
            for each, got in zip(options, given, strict=True)
        ]


def share(asking: Sequence[Asking], budgets: Budgets, fixed_w: Sequence[float], want: Want) -> Shared:
    """Ceilings within every budget; `fixed_w` is what each budget gives to GPUs that cannot be changed."""
    case = _Case(asking, budgets, fixed_w)
    shortfalls: dict[str, Shortfall] = {}
    chosen = [_at(one, one.wish_w) for one in asking]
    if max(case.lacks([one.charge_w for one in chosen]), default=0.0) > _HAIR_W:
        chosen = case.granted(want, shortfalls)
    left = [-lack for lack in case.lacks([one.charge_w for one in chosen])]
    ceilings: dict[str, float | None] = {}
    order = sorted(range(len(asking)), key=lambda at: (not asking[at].owes, asking[at].curve is not None, at))
    for at in order:
        one, draws, now = asking[at], case.draws[at], chosen[at]
        for limit_w, charge_w in zip(one.limits_w, one.charges_w, strict=True):
            more = charge_w - now.charge_w
            if limit_w <= now.limit_w + _SAME_W or all(gpus * more <= left[place] + _HAIR_W for place, gpus in draws):
                break
        if limit_w > now.limit_w + _SAME_W:
            for place, gpus in draws:
                left[place] -= gpus * more
        else:
            limit_w = now.limit_w
        ceilings[one.name] = None if limit_w >= one.limits_w[0] - _SAME_W else limit_w
    return Shared(ceilings, shortfalls)


def _draws(one: Asking, budgets: Budgets) -> tuple[tuple[int, int], ...]:
    gpus: dict[int, int] = {}
    for names, count in one.gpus:
        for place in budgets.above(names):
            gpus[place] = gpus.get(place, 0) + count
    return tuple(sorted(gpus.items()))


def _nearest(one: Asking, limit_w: float) -> int:
    return min(range(len(one.limits_w)), key=lambda at: (abs(one.limits_w[at] - limit_w), at))


def _at(one: Asking, limit_w: float) -> _Option:
    """One of the job's limits; its charge, and its time as far as that matters."""
    at = _nearest(one, limit_w)
    limit_w, charge_w = one.limits_w[at], one.charges_w[at]
    if one.curve is None:
        return _Option(limit_w, charge_w, (one.limits_w[0] / limit_w) ** _SLOWS, limit_w)
    found = _estimated(one.curve, limit_w)
    return _Option(limit_w, charge_w, found.time_s, min(charge_w, found.power_w / one.curve.gpus))


def _estimated(curve: Curve, limit_w: float) -> AtLimit:
    """The job at a limit. A shape says nothing above the largest measured limit if that binds, nor by two points."""
    low, top = curve.points[0], curve.largest
    inside = low.limit_w - _SAME_W <= limit_w <= top.limit_w + _SAME_W
    if inside or (limit_w < low.limit_w and len(curve.points) >= _POINTS):
        return curve.at(limit_w)
    near = top if limit_w > top.limit_w else low
    drawn_w = near.power_w / curve.gpus
    if limit_w > near.limit_w and drawn_w < _BINDS * near.limit_w:
        return AtLimit(limit_w, near.time_s, near.power_w, measured=False)
    if limit_w < near.limit_w and drawn_w <= limit_w:
        return AtLimit(limit_w, near.time_s, near.power_w, measured=False)
    return AtLimit(limit_w, near.time_s * (drawn_w / limit_w) ** _SLOWS, curve.gpus * limit_w, measured=False)


def _upto(one: Asking) -> list[float]:
    """Limits up to the wish, falling."""
    return [limit_w for limit_w in one.limits_w if limit_w <= one.wish_w + _SAME_W] or [one.limits_w[-1]]


def _promised(one: Asking) -> list[_Option]:
    """Limits up to the wish that keep the promise; all up to the wish where none does."""
    curve, upto = one.curve, _upto(one)
    assert curve is not None, "it is known"
    options = [_at(one, limit_w) for limit_w in upto]
    pace_s = math.inf
    if isinstance(one.promise, MaxSlowdown):
        pace_s = (1.0 + one.promise.share) * curve.largest.time_s
    elif isinstance(one.promise, Deadline):
        pace_s = one.promise.time_s / one.promise.work
    return [at for at in options if at.time_s <= pace_s * (1.0 + _HAIR)] or options


def _held(one: Asking) -> list[_Option]:
    return [_at(one, min(one.held_w, one.wish_w))]


def _unknown(one: Asking, options: list[_Option]) -> list[_Option]:
    """An unknown job may be lowered; a known one stays as it was."""
    return _any(one, options) if one.curve is None else options


def _any(one: Asking, _: list[_Option]) -> list[_Option]:
    return [_at(one, limit_w) for limit_w in _upto(one)]


def _job(one: Asking, options: Sequence[_Option], want: Want) -> Job:
    """The job as the planner sees it: its options alone, worth what they keep of the largest limit's throughput."""
    gpus = sum(count for _, count in one.gpus)
    rising = sorted(options, key=lambda option: option.limit_w)
    top, first = rising[-1], _at(one, one.limits_w[0])
    scale = first.time_s / top.time_s
    if want is Want.ENERGY:
        scale = top.time_s * top.power_w / (first.time_s * first.power_w)
    points = tuple(AtLimit(at.limit_w, at.time_s, gpus * at.power_w) for at in rising)
    shares = tuple(Share(names, count) for names, count in one.gpus)
    return Job(one.name, Curve(one.name, "", gpus, points), shares, one.weight * scale, _TIME_ONLY)
