"""Allocates power budgets to jobs: a ceiling for the power limit of each.

If all desired limits fit they are granted; otherwise limits are chosen by limit_allocation among those that
keep each promise. A task is a frozen value and can be solved in another thread.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.objectives.power.bandit import CeilingSet, LimitDecision, LimitSearch, can_afford, step_search
from eelgrid_controller.objectives.power.budgets import ROUNDING_W, BudgetTree, PowerBudgetNode
from eelgrid_controller.objectives.power.limit_allocation import (
    AllocationGoal,
    AllocationJob,
    BudgetShare,
    allocate_limits,
)
from eelgrid_controller.objectives.power.power_model import (
    BestEffort,
    LimitPoint,
    PowerCurve,
    PowerPlanError,
    TrainingPromise,
    is_higher_limit,
    is_same_limit,
    promised_pace_s,
)

_HAIR = 1e-9  # relative: a promise met exactly is met
_SLOWS = 0.5  # power of the ratio of limits; measured jobs lie between 0 and 1
_POINTS = 3  # of a curve whose shape is believed
_BINDS = 0.9  # of a limit drawn
_PROMISES = "the limits that keep all promises exceed the budget: promises give way"
_LEAST = "even the lowest limits, with GPUs that cannot be changed, exceed the budget"
_TIME_ONLY = BestEffort(0.0)


class AllocationRequest(NamedTuple):
    """A job that shares budgets with others."""

    name: str
    wish_w: float  # of each GPU
    held_w: float  # the largest that a GPU of it may have now
    limits_w: tuple[float, ...]  # that may be set, falling
    charges_w: tuple[float, ...]  # of each GPU at each of them
    gpus: tuple[tuple[tuple[str, ...], int], ...]  # that can be changed, with the lowest budgets they draw from
    curve: PowerCurve | None  # of the whole job; None while it is unknown
    promise: TrainingPromise  # for what is left of the job
    weight: float
    owes: bool  # time, by its promise


class BudgetShortfall(NamedTuple):
    """Watts that a budget lacks, and what that means."""

    watts: float
    reason: str


class BudgetAllocation(NamedTuple):
    """Ceilings by job, None for no bound, and shortfalls by budget."""

    ceilings_w: dict[str, float | None]
    shortfalls: dict[str, BudgetShortfall]


class _Option(NamedTuple):
    limit_w: float
    charge_w: float  # of each GPU
    time_s: float
    power_w: float  # of each GPU


class _Allocation:
    """One allocation: jobs, their options, and what is free."""

    def __init__(self, asking: Sequence[AllocationRequest], budgets: BudgetTree, fixed_w: Sequence[float]) -> None:
        self.asking = asking
        self.budgets = budgets
        self.room = [room - fixed for room, fixed in zip(budgets.available_w(), fixed_w, strict=True)]
        self.draws = [budgets.count_gpus(one.gpus) for one in asking]

    def shortages_w(self, charges_w: Sequence[float]) -> list[float]:
        """Watts above the room of each budget, if each GPU of each job is charged so; negative where some are left."""
        used: list[list[float]] = [[] for _ in self.room]
        for draws, charge_w in zip(self.draws, charges_w, strict=True):
            for place, gpus in draws:
                used[place].append(gpus * charge_w)
        return [math.fsum(one) - room for one, room in zip(used, self.room, strict=True)]

    def affected_jobs(self, lacks: Sequence[float]) -> list[bool]:
        """Jobs that draw from a budget that lacks."""
        return [any(lacks[place] > ROUNDING_W for place, _ in draws) for draws in self.draws]

    def allocate_options(self, want: AllocationGoal, shortfalls: dict[str, BudgetShortfall]) -> list[_Option]:
        """One option for each job by `allocate_limits`; fills in what budgets lack."""
        options = [_feasible_options(one) if one.curve is not None else _held(one) for one in self.asking]
        for relax in (_unknown, _any):
            lacks = self.shortages_w([min(one.charge_w for one in each) for each in options])
            if max(lacks, default=0.0) <= ROUNDING_W:
                break
            if relax is _any:
                self._record_shortfalls(lacks, _PROMISES, shortfalls)
            touched = self.affected_jobs(lacks)
            options = [
                relax(one, each) if hit else each for one, each, hit in zip(self.asking, options, touched, strict=True)
            ]
        lacks = self.shortages_w([min(one.charge_w for one in each) for each in options])
        self._record_shortfalls(lacks, _LEAST, shortfalls)
        room = [max(0.0, free, free + lack) for free, lack in zip(self.room, lacks, strict=True)]
        return self._allocate_within(options, room, want)

    def _record_shortfalls(self, lacks: Sequence[float], reason: str, shortfalls: dict[str, BudgetShortfall]) -> None:
        for budget, lack in zip(self.budgets.all, lacks, strict=True):
            if lack > ROUNDING_W:
                shortfalls[budget.name] = BudgetShortfall(lack, reason)

    def _allocate_within(
        self, options: Sequence[Sequence[_Option]], room: Sequence[float], want: AllocationGoal
    ) -> list[_Option]:
        jobs = [_job(one, each, want) for one, each in zip(self.asking, options, strict=True)]
        free = BudgetTree(
            PowerBudgetNode(one.name, watts, one.parent) for one, watts in zip(self.budgets.all, room, strict=True)
        )
        try:
            given = allocate_limits(jobs, free, want).given
        except PowerPlanError:  # rounding at a room that is exactly the least
            return [min(each, key=lambda one: one.charge_w) for each in options]
        return [
            next(one for one in each if is_same_limit(one.limit_w, got.limit_w))
            for each, got in zip(options, given, strict=True)
        ]


def allocate_budgets(
    asking: Sequence[AllocationRequest], budgets: BudgetTree, fixed_w: Sequence[float], want: AllocationGoal
) -> BudgetAllocation:
    """Ceilings within every budget; `fixed_w` is what each budget gives to GPUs that cannot be changed."""
    case = _Allocation(asking, budgets, fixed_w)
    shortfalls: dict[str, BudgetShortfall] = {}
    chosen = [_at(one, one.wish_w) for one in asking]
    if max(case.shortages_w([one.charge_w for one in chosen]), default=0.0) > ROUNDING_W:
        chosen = case.allocate_options(want, shortfalls)
    left = [-lack for lack in case.shortages_w([one.charge_w for one in chosen])]
    ceilings: dict[str, float | None] = {}
    order = sorted(range(len(asking)), key=lambda at: (not asking[at].owes, asking[at].curve is not None, at))
    for at in order:
        one, draws, now = asking[at], case.draws[at], chosen[at]
        for limit_w, charge_w in zip(one.limits_w, one.charges_w, strict=True):
            more = charge_w - now.charge_w
            if not is_higher_limit(limit_w, now.limit_w) or all(
                gpus * more <= left[place] + ROUNDING_W for place, gpus in draws
            ):
                break
        if is_higher_limit(limit_w, now.limit_w):
            for place, gpus in draws:
                left[place] -= gpus * more
        else:
            limit_w = now.limit_w
        ceilings[one.name] = limit_w if is_higher_limit(one.limits_w[0], limit_w) else None
    return BudgetAllocation(ceilings, shortfalls)


def _nearest(one: AllocationRequest, limit_w: float) -> int:
    return min(range(len(one.limits_w)), key=lambda at: (abs(one.limits_w[at] - limit_w), at))


def _at(one: AllocationRequest, limit_w: float) -> _Option:
    """One of the job's limits; its charge, and its time as far as that matters."""
    at = _nearest(one, limit_w)
    limit_w, charge_w = one.limits_w[at], one.charges_w[at]
    if one.curve is None:
        return _Option(limit_w, charge_w, (one.limits_w[0] / limit_w) ** _SLOWS, limit_w)
    found = _estimate_point(one.curve, limit_w)
    return _Option(limit_w, charge_w, found.time_s, min(charge_w, found.power_w / one.curve.gpus))


def _estimate_point(curve: PowerCurve, limit_w: float) -> LimitPoint:
    """The job at a limit. A shape says nothing above the largest measured limit if that binds, nor by two points."""
    low, top = curve.points[0], curve.largest
    inside = not is_higher_limit(low.limit_w, limit_w) and not is_higher_limit(limit_w, top.limit_w)
    if inside or (limit_w < low.limit_w and len(curve.points) >= _POINTS):
        return curve.interpolate(limit_w)
    near = top if limit_w > top.limit_w else low
    drawn_w = near.power_w / curve.gpus
    if limit_w > near.limit_w and drawn_w < _BINDS * near.limit_w:
        return LimitPoint(limit_w, near.time_s, near.power_w, measured=False)
    if limit_w < near.limit_w and drawn_w <= limit_w:
        return LimitPoint(limit_w, near.time_s, near.power_w, measured=False)
    return LimitPoint(limit_w, near.time_s * (drawn_w / limit_w) ** _SLOWS, curve.gpus * limit_w, measured=False)


def _options_up_to(one: AllocationRequest) -> list[float]:
    """Limits up to the wish, falling."""
    return [limit_w for limit_w in one.limits_w if not is_higher_limit(limit_w, one.wish_w)] or [one.limits_w[-1]]


def _feasible_options(one: AllocationRequest) -> list[_Option]:
    """Limits up to the wish that keep the promise; all up to the wish where none does."""
    curve, upto = one.curve, _options_up_to(one)
    assert curve is not None, "it is known"
    options = [_at(one, limit_w) for limit_w in upto]
    pace_s = promised_pace_s(curve, one.promise)
    return [at for at in options if at.time_s <= pace_s * (1.0 + _HAIR)] or options


def _held(one: AllocationRequest) -> list[_Option]:
    return [_at(one, min(one.held_w, one.wish_w))]


def _unknown(one: AllocationRequest, options: list[_Option]) -> list[_Option]:
    """An unknown job may be lowered; a known one stays as it was."""
    return _any(one, options) if one.curve is None else options


def _any(one: AllocationRequest, _: list[_Option]) -> list[_Option]:
    return [_at(one, limit_w) for limit_w in _options_up_to(one)]


def _job(one: AllocationRequest, options: Sequence[_Option], want: AllocationGoal) -> AllocationJob:
    """The job as the planner sees it: its options alone, worth what they keep of the largest limit's throughput."""
    gpus = sum(count for _, count in one.gpus)
    rising = sorted(options, key=lambda option: option.limit_w)
    top, first = rising[-1], _at(one, one.limits_w[0])
    scale = first.time_s / top.time_s
    if want is AllocationGoal.ENERGY:
        scale = top.time_s * top.power_w / (first.time_s * first.power_w)
    points = tuple(LimitPoint(at.limit_w, at.time_s, gpus * at.power_w) for at in rising)
    shares = tuple(BudgetShare(names, count) for names, count in one.gpus)
    return AllocationJob(one.name, PowerCurve(one.name, "", gpus, points), shares, one.weight * scale, _TIME_ONLY)


_RUN = 8  # windows


@dataclass(frozen=True, slots=True)
class LimitTarget:
    """The limit that a job should have, and why."""

    limit_w: float
    reason: str


def choose_target(
    search: LimitSearch, decision: LimitDecision, dear: LimitPoint | None, target_w: float
) -> LimitTarget:
    """The search's limit, or once it has settled that of the prices."""
    aim = LimitTarget(decision.limit_w, decision.why.value)
    if dear is None or not decision.settled or is_same_limit(dear.limit_w, aim.limit_w):
        return aim
    if dear.limit_w > aim.limit_w:
        return LimitTarget(dear.limit_w, "energy is cheap now: a faster limit earns time for when it is expensive")
    ahead = _RUN if is_higher_limit(target_w, dear.limit_w) else 1
    if can_afford(search, dear.limit_w, ahead):
        return LimitTarget(dear.limit_w, "energy is expensive now: earned time is spent at a slower limit")
    return aim


@dataclass(frozen=True, slots=True)
class DesiredLimit:
    """What a job would run at without budgets, to be worked out anywhere: all of it is frozen."""

    search: LimitSearch
    decision: LimitDecision | None  # None where a ceiling hides it
    dear: LimitPoint | None  # what prices ask for now
    target_w: float

    def compute_limit_w(self) -> float:
        """The limit of each GPU."""
        decision = self.decision or step_search(self.search, CeilingSet(None))[1]
        return choose_target(self.search, decision, self.dear, self.target_w).limit_w


class AllocationTask(NamedTuple):
    """Who shares which budgets; `wishes` are in the order of `asking`, whose own wishes are not worked out yet."""

    asking: tuple[AllocationRequest, ...]
    wishes: tuple[DesiredLimit, ...]
    budgets: BudgetTree
    fixed_w: tuple[float, ...]  # what each budget gives to GPUs that cannot be changed
    want: AllocationGoal


def _desired_limits(problem: AllocationTask) -> tuple[AllocationRequest, ...]:
    """The jobs with what each would run at without budgets."""
    return tuple(
        one._replace(wish_w=wish.compute_limit_w()) for one, wish in zip(problem.asking, problem.wishes, strict=True)
    )


def _allocate(asking: Sequence[AllocationRequest], problem: AllocationTask) -> BudgetAllocation:
    return allocate_budgets([one for one in asking if one.gpus], problem.budgets, problem.fixed_w, problem.want)


def solve_allocation(problem: AllocationTask) -> BudgetAllocation:
    """Ceilings of all jobs that have a GPU which can be changed, and what budgets lack."""
    return _allocate(_desired_limits(problem), problem)


def preview_limits(problem: AllocationTask) -> BudgetAllocation:
    """The limit of every job, a wish or what budgets allow, in the place of a ceiling."""
    asking = _desired_limits(problem)
    found = _allocate(asking, problem)
    limits_w = {one.name: min(one.wish_w, found.ceilings_w.get(one.name) or one.wish_w) for one in asking}
    return BudgetAllocation(dict(limits_w), found.shortfalls)
