"""Covering knapsack: the cheapest MIG slices whose throughput covers a service's rate.

    least  sum_k price_k x_k    such that  sum_k size_k x_k >= need,   x whole numbers

Owns this one search, for many needs at once. Must not know services, slices or
where prices come from.

Theory: the covering knapsack. Pieces are taken in the order of price per size, e_k
rising, as many as could be used first, then fewer. With a level's count fixed,
what is left costs at least e of the next level times it, and that bound rises as
the count falls, since the next piece is dearer: where it reaches the best cover
known, the level is done. Five sizes take a hundred steps. The search is cut after
`nodes_most` steps; the bound then is the least over what was not searched, so that
it holds whatever the cut.

Source: Martello and Toth, Knapsack Problems, Wiley 1990, chapters 2 and 3 (branch
and bound in the order of efficiency), turned from packing to covering.
"""

# ruff: noqa: PLR0917 (numba takes arguments by position)

import math

import numpy as np

from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.compilation import kernel

# Rounding of sums of a few dozen floats; a need is met to this share of itself.
EXACT = 1e-12
# A cover that is cheaper by less than this share is no better: equal prices would be searched for ever.
EQUAL = 1e-9
# Rows of a level: price and size of its piece, price per size; what is left to cover and was spent before it.
PRICE, SIZE, EACH, LEFT, SPENT = range(5)


@kernel
def _unsearched(levels: Floats, count: Ints, level: int, pieces: int, need: float) -> float:
    """The least that any cover costs which the search had not come to: the next one at each level of its path."""
    low = np.inf
    for at in range(level + 1):
        fewer = count[at] - (1 if at < level else 0)
        rest = levels[LEFT, at] - fewer * levels[SIZE, at]
        cost = levels[SPENT, at] + fewer * levels[PRICE, at]
        if fewer >= 0 and rest <= EXACT * need:
            low = min(low, cost)
        elif fewer >= 0 and at + 1 < pieces:
            low = min(low, cost + rest * levels[EACH, at + 1])
    return low


@kernel
def _cover(levels: Floats, pieces: int, need: float, nodes_most: int, count: Ints, best: Ints) -> tuple[float, float]:
    """Cost of the cheapest cover found, and the least that any costs; counts by level into best in place."""
    levels[LEFT, 0], levels[SPENT, 0] = need, 0.0
    count[0] = math.ceil(need / levels[SIZE, 0] * (1.0 - EXACT))
    cheapest, level = np.inf, 0
    for _ in range(nodes_most):
        cost = levels[SPENT, level] + count[level] * levels[PRICE, level]
        rest = levels[LEFT, level] - count[level] * levels[SIZE, level]
        if rest <= EXACT * need:
            if cost < cheapest:
                cheapest = cost
                for at in range(pieces):
                    best[at] = count[at] if at <= level else 0
        elif level + 1 < pieces and cost + rest * levels[EACH, level + 1] < cheapest * (1.0 - EQUAL):
            level += 1
            levels[LEFT, level], levels[SPENT, level] = rest, cost
            count[level] = math.ceil(rest / levels[SIZE, level] * (1.0 - EXACT))
            continue
        else:
            count[level] = 0
        while level >= 0 and count[level] == 0:
            level -= 1
        if level < 0:
            return cheapest, cheapest * (1.0 - EQUAL)
        count[level] -= 1
    return cheapest, min(_unsearched(levels, count, level, pieces, need), cheapest * (1.0 - EQUAL))


@kernel
def find_cheapest_covers(
    price: Floats, size: Floats, first: Ints, need: Floats, nodes_most: int, counts: Ints, cost: Floats, bound: Floats
) -> None:
    """The cheapest cover of every need: counts (O,), cost (S,) and bound (S,) in place.

    price (O,) >= 0 and size (O,) > 0 of pieces; those of need s are first[s] to first[s + 1], at least one. need (S,)
    > 0 in the unit of size. bound <= the cost of the best cover <= cost; they are equal to 1e-9 unless nodes_most,
    at least 64, cut the search.
    """
    widest = 0
    for row in range(need.shape[0]):
        widest = max(widest, first[row + 1] - first[row])
    levels = np.zeros((5, widest))
    order, count, best = np.zeros(widest, np.int64), np.zeros(widest, np.int64), np.zeros(widest, np.int64)
    for row in range(need.shape[0]):
        pieces = first[row + 1] - first[row]
        for place in range(pieces):  # by rising price per size; equals as they came
            option = first[row] + place
            each, at = price[option] / size[option], place
            while at > 0 and levels[EACH, at - 1] > each:
                levels[EACH, at], order[at] = levels[EACH, at - 1], order[at - 1]
                at -= 1
            levels[EACH, at], order[at] = each, option
        for at in range(pieces):
            levels[PRICE, at], levels[SIZE, at] = price[order[at]], size[order[at]]
        cost[row], bound[row] = _cover(levels, pieces, need[row], nodes_most, count, best)
        for at in range(pieces):
            counts[order[at]] = best[at]
