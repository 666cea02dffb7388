"""Past use of queues and users at a moment, and what it will be: who has used more for its weight, and until when.

Owns the sums of decayed use over a tree of queues, and the rule by which past use entitles waiting work to the place of
running work of another queue. Must not know quotas, nor who waits.

Theory. Past use decays with a half-life h (state.queue_usage). A queue that uses at the rate r has, a time t from now, the
use U q + r h / ln 2 (1 - q) with q = 2^(-t/h): linear in q, so that the moment at which two queues are even is found in
closed form. Use is dominant, the largest over the resources of use over capacity, and is divided by the queue's weight.

Work of a queue is to make room for waiting work of another queue if the former has used more for its weight, and still
would have at the end of a horizon through which that work were gone and the waiting work ran. So for one resource an
exchange moves the shares toward each other for the whole horizon, and while neither starts or loses other work the two queues
cannot change back before its end: then the loser would have to have used more than the gainer. The horizon of an
exchange is H times twice the gainer's part of both weights, so that what each gets is even by weight, and also a queue
of little weight gets its turns; it is never shorter than what an admission is charged with, or the charge alone would
turn the exchange back at once. Two queues of equal weight that need a whole pool each change when the difference of
their use, in parts of what the pool gives for ever, is
2^(H/h) - 1, and after the time T = H + h log2(1 / (2 - 2^(H/h))), 2 H for H much less than h, it is the opposite. So the times
for which they have held the pool differ by one turn at the most. Work that can be divided changes hands in parts: near a
difference of 0 the rule is that of present shares, and both queues keep one half.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.queueing.quota import QuotaTree
from eelgrid_controller.state.queue_usage import ADMISSION_CHARGE_S, DecayedUsage, ResourceVector

_NS = 1e9
_LN2 = math.log(2.0)
_HORIZONS_IN_HALF_LIFE = 16.0
# Of the moment at which a condition begins to hold, so that it holds when it is tried.
_LATER = 1.0 - 1e-9


def compute_dominant_use(use: ResourceVector, capacity: ResourceVector) -> float:
    """Returns the largest part of a capacity that is used; resources without capacity do not count."""
    return max((one / most for one, most in zip(use, capacity, strict=True) if most), default=0.0)


class PastUse:
    """Past use at a moment, over the capacity, of queues with those below them, and of their users."""

    def __init__(
        self,
        tree: QuotaTree,
        history: Callable[[], Mapping[tuple[str, str], DecayedUsage]],
        capacity: ResourceVector,
        *,
        now_ns: int,
        half_life_s: float,
    ) -> None:
        self._tree, self._history, self._capacity = tree, history, capacity
        self._now_ns, self._half_life_s = now_ns, half_life_s
        # By queue and user: the use, and the rate at which it grows. In one order, so that sums are the same after a restart.
        self._known: dict[tuple[str, str], tuple[ResourceVector, ResourceVector]] = {}
        known = [(key, one) for key, one in sorted(history().items()) if key[0] in tree.numbers]
        left = np.array([one.compute_left(now_ns, half_life_s) for _, one in known])[:, None]
        totals, rates = (
            np.array(rows, np.float64).reshape(len(known), len(capacity))
            for rows in ([one.total for _, one in known], [one.rate for _, one in known])
        )
        uses = totals * left + rates * (half_life_s / _LN2 * (1.0 - left)) if known else totals
        numbers = [tree.numbers[queue] for (queue, _), _ in known]
        self._sums, self._rates = (self._sum_below(numbers, rows) for rows in (uses, rates))
        for (key, one), use in zip(known, uses.tolist(), strict=True):
            self._known[key] = tuple(use), one.rate

    def _sum_below(self, numbers: list[int], rows: NDArray[np.float64]) -> list[list[float]]:
        """Returns the sums of rows by queue, of all queues below it."""
        sums = np.zeros((len(self._tree.queues), len(self._capacity)))
        np.add.at(sums, numbers, rows)
        found: list[list[float]] = sums.tolist()
        for number in range(len(found) - 1, -1, -1):
            parent = self._tree.parents[number]
            if parent >= 0:
                above = found[parent]
                for place, amount in enumerate(found[number]):
                    above[place] += amount
        return found

    def refresh(self, queue: str, user: str) -> None:
        """Updates the sums after the use of a user of a queue has changed."""
        key = queue, user
        history = self._history().get(key)
        number = self._tree.numbers.get(queue, -1)
        if history is None or number < 0:
            return
        new = history.at(self._now_ns, self._half_life_s), history.rate
        old = self._known.get(key, ((0.0,) * len(history.rate),) * 2)
        self._known[key] = new
        while number >= 0:
            for sums, now, before in zip((self._sums[number], self._rates[number]), new, old, strict=True):
                for place, (one, other) in enumerate(zip(now, before, strict=True)):
                    sums[place] += one - other
            number = self._tree.parents[number]

    def of_queue(self, number: int) -> float:
        """Returns the dominant past use of a queue."""
        return compute_dominant_use(tuple(self._sums[number]), self._capacity)

    def of_user(self, number: int, user: str) -> float:
        """Returns the dominant past use of a user of a queue."""
        name = self._tree.queues[number].name if number < len(self._tree.queues) else ""
        known = self._known.get((name, user))
        return 0.0 if known is None else compute_dominant_use(known[0], self._capacity)

    def list_weighted(self, number: int) -> ResourceVector:
        """Returns the past use of a queue over the capacity and its weight, in seconds, by resource."""
        return self._scale(number, self._sums[number])

    def list_weighted_rates(self, number: int) -> ResourceVector:
        """Returns what a queue uses now over the capacity and its weight, by resource."""
        return self._scale(number, self._rates[number])

    def list_planned_rates(self, number: int) -> ResourceVector:
        """Like `list_weighted_rates`, of what a queue uses in the tree, to which work was added that does not run."""
        return self._scale(number, self._tree.list_used(number))

    def compute_weight_part(self, number: int, other: int) -> float:
        """Returns the part of a queue's weight in that of itself and another."""
        weight, more = (self._tree.queues[one].weight for one in (number, other))
        return weight / (weight + more)

    def _scale(self, number: int, amounts: ResourceVector | list[float]) -> ResourceVector:
        weight = self._tree.queues[number].weight
        return tuple(one / most / weight if most else 0.0 for one, most in zip(amounts, self._capacity, strict=True))


class UseExchange:
    """Whether waiting work of one queue may take the place of work of another, by past use, and from when on.

    In both questions the tree is without the running work and with the waiting work.
    """

    def __init__(self, past: PastUse, *, half_life_s: float, horizon_s: float) -> None:
        self._past, self._half_life_s = past, half_life_s
        self.horizon_s = max(horizon_s or half_life_s / _HORIZONS_IN_HALF_LIFE, ADMISSION_CHARGE_S)
        # What a rate of 1 for ever adds up to.
        self._full_s = half_life_s / _LN2

    def is_due(self, mine: int, theirs: int) -> bool:
        """Returns whether a queue has used more than another for its weight, and would have after the horizon."""
        ours, other = self._past.list_weighted(mine), self._past.list_weighted(theirs)
        if max(other) <= max(ours):
            return False
        left = self._left_after(mine, theirs)
        return max(self._project(theirs, other, left)) >= max(self._project(mine, ours, left))

    def _left_after(self, mine: int, theirs: int) -> float:
        """Returns which part of a use is left after the horizon of an exchange."""
        horizon_s = 2.0 * self._past.compute_weight_part(mine, theirs) * self.horizon_s
        return float(2.0 ** (-max(horizon_s, ADMISSION_CHARGE_S) / self._half_life_s))

    def _project(self, number: int, use: ResourceVector, left: float) -> ResourceVector:
        rates, gain_s = self._past.list_planned_rates(number), self._full_s * (1.0 - left)
        return tuple(one * left + rate * gain_s for one, rate in zip(use, rates, strict=True))

    def find_wait_s(self, mine: int, theirs: int) -> float | None:
        """Returns after how many seconds an exchange will be due if nothing else changes; None if never."""
        # Use as linear functions of q = 2^(-t/h), now and after the horizon: pairs of a constant and a slope.
        left = self._left_after(mine, theirs)
        gain_s = self._full_s * (1.0 - left)
        now = [self._list_lines(number) for number in (mine, theirs)]
        then = [
            [
                (constant * left + rate * gain_s, slope * left)
                for (constant, slope), rate in zip(lines, self._past.list_planned_rates(number), strict=True)
            ]
            for number, lines in zip((mine, theirs), now, strict=True)
        ]
        # At once, where both are even and part; else where two lines cross.
        roots = {1.0} | {
            (a - c) / (d - b)
            for ours, other in (now, then)
            for a, b in ours
            for c, d in other
            if b != d and 0.0 < (a - c) / (d - b) < 1.0
        }
        for at in (root * _LATER for root in sorted(roots, reverse=True)):
            ours, other, ours_then, other_then = (max(a + b * at for a, b in lines) for lines in (*now, *then))
            if other > ours and other_then >= ours_then:
                return -self._half_life_s * math.log2(at)
        return None

    def _list_lines(self, number: int) -> list[tuple[float, float]]:
        """Returns the use of a queue by resource as r h / ln 2 + (U - r h / ln 2) q."""
        uses, rates = self._past.list_weighted(number), self._past.list_weighted_rates(number)
        return [(rate * self._full_s, use - rate * self._full_s) for use, rate in zip(uses, rates, strict=True)]
