"""Who gets how many watts: one limit for each job, within every budget.

Owns what is asked and answered, and the search for an answer. Must not know how
curves were learned, nor how limits are set.

Theory: a multiple-choice knapsack with a row for each budget. Job j takes one of
its limits o at a charge of g_jb w_jo watts in budget b, g_jb its GPUs there:

    max  sum_j v_jo       one o for each j,  sum_j g_jb w_jo <= room_b for each b

with v = weight t_0 / t (throughput that is kept) or -weight e / e_0 (energy that
is spent), over the limits that the job's promise allows. Options that draw more
and give no more are dropped. Start from the least watts, climb the concave hulls
by value per watt (optimal for the relaxation where budgets are nested, up to one
job a budget), then repair: fill what room is left, and trade a step down of one
job for a step up of another. `eelgrid_controller.power.relaxation` gives the
bound by linear programming, prices and a second start; the better answer stays.

Sources: Sinha and Zoltners, Operations Research 27 (1979), for the hulls;
Federgruen and Groenevelt, Operations Research 34 (1986), for nested budgets.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.power.refusals import BudgetTooSmall

__all__ = ["Knapsack", "Option", "ascending", "climb", "hull", "least", "repaired", "used_w", "value_of", "within"]

_HAIR_W = 1e-6  # watts: what rounding may add
_ROUNDS_MOST = 4
_TRADES_MOST = 400  # steps up for which a trade is sought, a round


class Option(NamedTuple):
    """A limit as the knapsack sees it."""

    watts: float  # that a GPU of the job is charged with
    value: float
    limit_w: float


class Knapsack(NamedTuple):
    """Jobs' options, rising in watts and value, and what they draw from."""

    options: tuple[tuple[Option, ...], ...]  # by job
    draws: tuple[tuple[tuple[int, int], ...], ...]  # by job: (budget, GPUs)
    room_w: tuple[float, ...]  # by budget
    names: tuple[str, ...]  # of budgets


def ascending(options: Sequence[Option]) -> tuple[Option, ...]:
    """Without those that draw no less than another and give no more."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda one: (one.watts, -one.value)):
        if not kept or option.value > kept[-1].value:
            kept.append(option)
    return tuple(kept)


def hull(options: Sequence[Option]) -> list[int]:
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


def used_w(sack: Knapsack, chosen: Sequence[int]) -> list[float]:
    """Watts drawn from each budget."""
    used = [0.0] * len(sack.room_w)
    for options, draws, place in zip(sack.options, sack.draws, chosen, strict=True):
        for budget, gpus in draws:
            used[budget] += gpus * options[place].watts
    return used


def value_of(sack: Knapsack, chosen: Sequence[int]) -> float:
    """What a choice is worth."""
    return math.fsum(options[place].value for options, place in zip(sack.options, chosen, strict=True))


def within(sack: Knapsack, chosen: Sequence[int]) -> bool:
    """Whether no budget is exceeded, rounding aside."""
    return all(used <= room + _HAIR_W for used, room in zip(used_w(sack, chosen), sack.room_w, strict=True))


def least(sack: Knapsack) -> list[int]:
    """The least watts for every job. Raises BudgetTooSmall, naming the budget that lacks most, if they are too many."""
    chosen = [0] * len(sack.options)
    lacks = [used - room for used, room in zip(used_w(sack, chosen), sack.room_w, strict=True)]
    if lacks and max(lacks) > _HAIR_W:
        worst = lacks.index(max(lacks))
        raise BudgetTooSmall(sack.names[worst], lacks[worst])
    return chosen


class _Search:
    """A choice that is being improved; every method leaves it within all budgets."""

    def __init__(self, sack: Knapsack, chosen: Sequence[int]) -> None:
        self.sack = sack
        self.chosen = list(chosen)
        used = used_w(sack, chosen)
        self.left = [room - drawn + _HAIR_W for room, drawn in zip(sack.room_w, used, strict=True)]

    def fits(self, job: int, place: int) -> bool:
        more = self.sack.options[job][place].watts - self.sack.options[job][self.chosen[job]].watts
        return all(gpus * more <= self.left[budget] for budget, gpus in self.sack.draws[job])

    def take(self, job: int, place: int) -> None:
        more = self.sack.options[job][place].watts - self.sack.options[job][self.chosen[job]].watts
        for budget, gpus in self.sack.draws[job]:
            self.left[budget] -= gpus * more
        self.chosen[job] = place

    def gain(self, job: int, place: int) -> float:
        options = self.sack.options[job]
        return options[place].value - options[self.chosen[job]].value

    def fill(self) -> None:
        """Steps up that fit, the most valuable first; options rise, so the last that fits is the best of a job."""
        heap = [(-gain, job, place) for job in range(len(self.chosen)) for gain, place in self._best(job)]
        heapq.heapify(heap)
        while heap:
            _, job, place = heapq.heappop(heap)
            if place <= self.chosen[job]:
                continue
            if self.fits(job, place):
                self.take(job, place)
                continue
            for gain, lower in self._best(job):
                heapq.heappush(heap, (-gain, job, lower))

    def _best(self, job: int) -> list[tuple[float, int]]:
        for place in range(len(self.sack.options[job]) - 1, self.chosen[job], -1):
            if self.fits(job, place):
                return [(self.gain(job, place), place)]
        return []

    def trade(self) -> bool:
        """Steps up that do not fit, each paid for by a step down of one other job; whether there was any."""
        ups = [
            (self.gain(job, place), job, place)
            for job in range(len(self.chosen))
            for place in range(self.chosen[job] + 1, len(self.sack.options[job]))
        ]
        ups.sort(key=lambda up: (-up[0], up[1], up[2]))
        downs = _Downs(self)
        traded = False
        for gain, job, place in ups[:_TRADES_MOST]:
            if place <= self.chosen[job] or self.gain(job, place) < gain:
                continue
            other = downs.cheapest(job, place, gain)
            if other is not None:
                self.take(*other)
                self.take(job, place)
                downs.forget(job, other[0])
                traded = True
        return traded


class _Downs:
    """Every step down that there is, as arrays."""

    def __init__(self, search: _Search) -> None:
        self.search = search
        rows = [
            (job, place, -search.gain(job, place), options[search.chosen[job]].watts - options[place].watts)
            for job, options in enumerate(search.sack.options)
            for place in range(search.chosen[job])
        ]
        self.job = np.array([row[0] for row in rows], dtype=np.int64)
        self.place = np.array([row[1] for row in rows], dtype=np.int64)
        self.loss = np.array([row[2] for row in rows])
        self.freed_w = np.array([row[3] for row in rows])  # of each GPU
        self._gpus: dict[int, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}

    def forget(self, *jobs: int) -> None:
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

    def cheapest(self, job: int, place: int, gain: float) -> tuple[int, int] | None:
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


def climb(sack: Knapsack, prices: Sequence[float] | None = None) -> list[int]:
    """From the least watts up the hulls, by value per priced watt, as far as budgets go.

    `prices` are what a watt of each budget is worth; without them every GPU's watt counts once.
    Raises BudgetTooSmall as `least` does.
    """
    search = _Search(sack, least(sack))
    hulls = [hull(options) for options in sack.options]
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
            search.take(job, hulls[job][rung + 1])
            push(job, rung + 1)
    return search.chosen


def repaired(sack: Knapsack, chosen: Sequence[int]) -> list[int]:
    """A choice within all budgets, no worse: filled, and traded a bounded number of times."""
    search = _Search(sack, chosen)
    search.fill()
    for _ in range(_ROUNDS_MOST):
        if not search.trade():
            break
        search.fill()
    return search.chosen
