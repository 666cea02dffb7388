"""Allocates power limits to many jobs under many budgets.

A multiple-choice knapsack with one row per budget: a greedy climb over concave hulls, then a local search.
`bench/powercap/certified.py` has the bound of its linear relaxation.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from eelgrid_controller.objectives.power.budgets import ROUNDING_W, BudgetTooSmall, BudgetTree, InvalidBudget
from eelgrid_controller.objectives.power.power_model import BestEffort, PowerCurve, TrainingPromise, choose_limit

_ROUNDS_MOST = 4
_TRADES_MOST = 400  # steps up for which a trade is sought, a round


class KnapsackOption(NamedTuple):
    """A limit as the knapsack sees it."""

    watts: float  # that a GPU of the job is charged with
    value: float
    limit_w: float


class Knapsack(NamedTuple):
    """Jobs' options, rising in watts and value, and what they draw from."""

    options: tuple[tuple[KnapsackOption, ...], ...]  # by job
    draws: tuple[tuple[tuple[int, int], ...], ...]  # by job: (budget, GPUs)
    room_w: tuple[float, ...]  # by budget
    names: tuple[str, ...]  # of budgets


def drop_dominated(options: Sequence[KnapsackOption]) -> tuple[KnapsackOption, ...]:
    """Without those that draw no less than another and give no more."""
    kept: list[KnapsackOption] = []
    for option in sorted(options, key=lambda one: (one.watts, -one.value)):
        if not kept or option.value > kept[-1].value:
            kept.append(option)
    return tuple(kept)


def concave_hull(options: Sequence[KnapsackOption]) -> list[int]:
    """Places on the concave hull of value over watts, the first and the last among them."""
    kept: list[int] = []
    for place, option in enumerate(options):
        while len(kept) > 1:
            low, mid = options[kept[-2]], options[kept[-1]]
            if (mid.value - low.value) * (option.watts - mid.watts) > (option.value - mid.value) * (
                mid.watts - low.watts
            ):
                break
            kept.pop()
        kept.append(place)
    return kept


def budget_usage_w(sack: Knapsack, chosen: Sequence[int]) -> list[float]:
    """Watts drawn from each budget."""
    used = [0.0] * len(sack.room_w)
    for options, draws, place in zip(sack.options, sack.draws, chosen, strict=True):
        for budget, gpus in draws:
            used[budget] += gpus * options[place].watts
    return used


def total_value(sack: Knapsack, chosen: Sequence[int]) -> float:
    """What a choice is worth."""
    return math.fsum(options[place].value for options, place in zip(sack.options, chosen, strict=True))


def least_choice(sack: Knapsack) -> list[int]:
    """The least watts for every job. Raises BudgetTooSmall, naming the budget that lacks most, if they are too many."""
    chosen = [0] * len(sack.options)
    lacks = [used - room for used, room in zip(budget_usage_w(sack, chosen), sack.room_w, strict=True)]
    if lacks and max(lacks) > ROUNDING_W:
        worst = lacks.index(max(lacks))
        raise BudgetTooSmall(sack.names[worst], lacks[worst])
    return chosen


class _LocalSearch:
    """A choice that is being improved; every method leaves it within all budgets."""

    def __init__(self, sack: Knapsack, chosen: Sequence[int]) -> None:
        self.sack = sack
        self.chosen = list(chosen)
        used = budget_usage_w(sack, chosen)
        self.left = [room - drawn + ROUNDING_W for room, drawn in zip(sack.room_w, used, strict=True)]

    def fits(self, job: int, place: int) -> bool:
        more = self.sack.options[job][place].watts - self.sack.options[job][self.chosen[job]].watts
        return all(gpus * more <= self.left[budget] for budget, gpus in self.sack.draws[job])

    def set_option(self, job: int, place: int) -> None:
        more = self.sack.options[job][place].watts - self.sack.options[job][self.chosen[job]].watts
        for budget, gpus in self.sack.draws[job]:
            self.left[budget] -= gpus * more
        self.chosen[job] = place

    def upgrade_gain(self, job: int, place: int) -> float:
        options = self.sack.options[job]
        return options[place].value - options[self.chosen[job]].value

    def fill_upgrades(self) -> None:
        """Steps up that fit, the most valuable first; options rise, so the last that fits is the best of a job."""
        heap = [(-gain, job, place) for job in range(len(self.chosen)) for gain, place in self._best(job)]
        heapq.heapify(heap)
        while heap:
            _, job, place = heapq.heappop(heap)
            if place <= self.chosen[job]:
                continue
            if self.fits(job, place):
                self.set_option(job, place)
                continue
            for gain, lower in self._best(job):
                heapq.heappush(heap, (-gain, job, lower))

    def _best(self, job: int) -> list[tuple[float, int]]:
        for place in range(len(self.sack.options[job]) - 1, self.chosen[job], -1):
            if self.fits(job, place):
                return [(self.upgrade_gain(job, place), place)]
        return []

    def trade_upgrade(self) -> bool:
        """Steps up that do not fit, each paid for by a step down of one other job; whether there was any."""
        ups = [
            (self.upgrade_gain(job, place), job, place)
            for job in range(len(self.chosen))
            for place in range(self.chosen[job] + 1, len(self.sack.options[job]))
        ]
        ups.sort(key=lambda up: (-up[0], up[1], up[2]))
        downs = _Downgrades(self)
        traded = False
        for gain, job, place in ups[:_TRADES_MOST]:
            if place <= self.chosen[job] or self.upgrade_gain(job, place) < gain:
                continue
            other = downs.cheapest_downgrade(job, place, gain)
            if other is not None:
                self.set_option(*other)
                self.set_option(job, place)
                downs.drop_jobs(job, other[0])
                traded = True
        return traded


class _Downgrades:
    """Every step down that there is, as arrays."""

    def __init__(self, search: _LocalSearch) -> None:
        self.search = search
        rows = [
            (job, place, -search.upgrade_gain(job, place), options[search.chosen[job]].watts - options[place].watts)
            for job, options in enumerate(search.sack.options)
            for place in range(search.chosen[job])
        ]
        self.job = np.array([row[0] for row in rows], dtype=np.int64)
        self.place = np.array([row[1] for row in rows], dtype=np.int64)
        self.loss = np.array([row[2] for row in rows])
        self.freed_w = np.array([row[3] for row in rows])  # of each GPU
        self._gpus: dict[int, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}

    def drop_jobs(self, *jobs: int) -> None:
        """These jobs have moved: their steps are others now, and are not offered again this round."""
        self.loss[np.isin(self.job, jobs)] = math.inf

    def _drawn(self, budget: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """GPUs of each step's job in a budget, looked up once a budget."""
        if budget not in self._gpus:
            by_job = np.zeros(len(self.search.chosen))
            for job, draws in enumerate(self.search.sack.draws):
                by_job[job] = dict(draws).get(budget, 0)
            self._gpus[budget] = by_job[self.job]
        return self._gpus[budget]

    def cheapest_downgrade(self, job: int, place: int, gain: float) -> tuple[int, int] | None:
        """The step down of another job that loses least, less than `gain`, and makes the step up fit."""
        search = self.search
        options = search.sack.options[job]
        more = options[place].watts - options[search.chosen[job]].watts
        enough = (self.loss < gain - 1e-12) & (self.job != job)
        for budget, gpus in search.sack.draws[job]:
            lack = gpus * more - search.left[budget]
            if lack > 0.0:
                enough &= self.freed_w * self._drawn(budget) >= lack
        found = np.flatnonzero(enough)
        if not len(found):
            return None
        best = found[int(self.loss[found].argmin())]
        return int(self.job[best]), int(self.place[best])


def greedy_choice(sack: Knapsack, prices: Sequence[float] | None = None) -> list[int]:
    """From the least watts up the hulls, by value per priced watt, as far as budgets go.

    `prices` are what a watt of each budget is worth; without them every GPU's watt counts once.
    Raises BudgetTooSmall as `least` does.
    """
    search = _LocalSearch(sack, least_choice(sack))
    hulls = [concave_hull(options) for options in sack.options]
    heap: list[tuple[float, int, int]] = []

    def push(job: int, rung: int) -> None:
        if rung + 1 < len(hulls[job]):
            low, high = sack.options[job][hulls[job][rung]], sack.options[job][hulls[job][rung + 1]]
            weighed = [gpus * (1.0 if prices is None else prices[budget]) for budget, gpus in sack.draws[job]]
            price = max(weighed, default=1.0) if prices is None else math.fsum(weighed)
            cost = max(price, 1e-12) * (high.watts - low.watts)
            heapq.heappush(heap, (-(high.value - low.value) / cost, job, rung))

    for job in range(len(hulls)):
        push(job, 0)
    while heap:
        _, job, rung = heapq.heappop(heap)
        if search.fits(job, hulls[job][rung + 1]):
            search.set_option(job, hulls[job][rung + 1])
            push(job, rung + 1)
    return search.chosen


def improve_choice(sack: Knapsack, chosen: Sequence[int]) -> list[int]:
    """A choice within all budgets, no worse: filled, and traded a bounded number of times."""
    search = _LocalSearch(sack, chosen)
    search.fill_upgrades()
    for _ in range(_ROUNDS_MOST):
        if not search.trade_upgrade():
            break
        search.fill_upgrades()
    return search.chosen


_NONE = BestEffort(0.0)


class AllocationGoal(Enum):
    """What an allocation maximizes."""

    THROUGHPUT = "the least weighted throughput lost"
    ENERGY = "the least weighted energy for the same work"


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """GPUs of a job that draw from the same lowest budgets, e.g. a node and a feed."""

    budgets: tuple[str, ...]
    gpus: int


@dataclass(frozen=True, slots=True)
class AllocationJob:
    """A job with its curve, where it runs, and what it was promised."""

    name: str
    curve: PowerCurve  # measured limits are its options
    shares: tuple[BudgetShare, ...]
    weight: float = 1.0
    promise: TrainingPromise = _NONE


@dataclass(frozen=True, slots=True)
class GrantedLimit:
    """One job's limit and what it keeps."""

    job: str
    limit_w: float  # of each of its GPUs
    charge_w: float  # of each of its GPUs
    throughput: float  # as a share of the largest limit's
    energy: float  # of the same work, as a share of the largest limit's


@dataclass(frozen=True, slots=True)
class LimitAllocation:
    """A limit for every job, what they are worth together, and what they draw."""

    given: tuple[GrantedLimit, ...]  # in the order of the jobs
    value: float
    used_w: tuple[float, ...]  # by budget


def _options(job: AllocationJob, want: AllocationGoal) -> tuple[KnapsackOption, ...]:
    """The limits that the job's promise allows, as the knapsack sees them."""
    choice = choose_limit(job.curve, job.promise)
    largest = job.curve.largest
    return drop_dominated(
        [
            KnapsackOption(
                job.curve.charge_w(at.limit_w) / job.curve.gpus,
                job.weight
                * (
                    largest.time_s / at.time_s if want is AllocationGoal.THROUGHPUT else -at.energy_j / largest.energy_j
                ),
                at.limit_w,
            )
            for at in (choice.at, *choice.beaten)
        ]
    )


def _draws(job: AllocationJob, budgets: BudgetTree) -> tuple[tuple[int, int], ...]:
    """GPUs of a job in each budget. Raises InvalidBudget where shares and curve disagree."""
    if any(share.gpus < 1 for share in job.shares) or sum(share.gpus for share in job.shares) != job.curve.gpus:
        raise InvalidBudget(
            "shares",
            f"{job.name!r} has {job.curve.gpus} GPUs and shares of {[share.gpus for share in job.shares]}",
            "name the budgets of every GPU of the job once",
        )
    return budgets.count_gpus((share.budgets, share.gpus) for share in job.shares)


def build_knapsack(jobs: Sequence[AllocationJob], budgets: BudgetTree, want: AllocationGoal) -> Knapsack:
    """The question as numbers. Raises InvalidPromise and InvalidBudget for what cannot be asked."""
    for job in jobs:
        if not (0.0 < job.weight < math.inf):
            raise InvalidBudget("weight", f"{job.weight} of {job.name!r}", "weights are positive and finite")
    return Knapsack(
        tuple(_options(job, want) for job in jobs),
        tuple(_draws(job, budgets) for job in jobs),
        tuple(budgets.available_w()),
        tuple(budget.name for budget in budgets.all),
    )


def grant_limits(jobs: Sequence[AllocationJob], sack: Knapsack, chosen: Sequence[int]) -> LimitAllocation:
    """A choice of the knapsack as limits of the jobs that it was built from."""
    given = []
    for job, options, place in zip(jobs, sack.options, chosen, strict=True):
        option, largest = options[place], job.curve.largest
        at = job.curve.interpolate(option.limit_w)
        given.append(
            GrantedLimit(
                job.name, option.limit_w, option.watts, largest.time_s / at.time_s, at.energy_j / largest.energy_j
            )
        )
    return LimitAllocation(tuple(given), total_value(sack, chosen), tuple(budget_usage_w(sack, chosen)))


def allocate_limits(jobs: Sequence[AllocationJob], budgets: BudgetTree, want: AllocationGoal) -> LimitAllocation:
    """One limit for each job within every budget and promise.

    Raises BudgetTooSmall where even the least limits exceed a budget, InvalidPromise where no limit keeps a
    promise, InvalidBudget where jobs and budgets do not fit together.
    """
    sack = build_knapsack(jobs, budgets, want)
    return grant_limits(jobs, sack, improve_choice(sack, greedy_choice(sack)))
