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

import math
from typing import NamedTuple

import numpy as np

from eelgrid_kernels.arrays import Floats, Ints, Records, record_dtype
from eelgrid_kernels.compilation import kernel

# Rounding of sums of a few dozen floats; a need is met to this share of itself.
EXACT = 1e-12
# A cover that is cheaper by less than this share is no better: equal prices would be searched for ever.
EQUAL = 1e-9

# A level of the search: one sort of piece.
LEVEL = record_dtype(
    ("price", np.float64),
    ("piece_size", np.float64),
    ("price_per_size", np.float64),
    ("left", np.float64),  # to cover before it
    ("spent", np.float64),  # before it
    ("pieces", np.int64),  # on the path under way
    ("best_pieces", np.int64),  # in the cheapest cover found
)


class CoverPieces(NamedTuple):
    """What may be bought for each need."""

    price: Floats  # (O,) >= 0
    size: Floats  # (O,) > 0
    first: Ints  # (S + 1,) need s may use the options first[s] to first[s + 1] - 1, at least one


class Covers(NamedTuple):
    """The cheapest cover of every need."""

    counts: Ints  # (O,) pieces of each option
    cost: Floats  # (S,)
    bound: Floats  # (S,) the least that any cover costs


@kernel
def _unsearched(levels: Records, level: int, need: float) -> float:
    """The least that any cover costs which the search had not come to: the next one at each level of its path."""
    low = np.inf
    for at in range(level + 1):
        here = levels[at]
        fewer = here.pieces - (1 if at < level else 0)
        rest = here.left - fewer * here.piece_size
        cost = here.spent + fewer * here.price
        if fewer >= 0 and rest <= EXACT * need:
            low = min(low, cost)
        elif fewer >= 0 and at + 1 < levels.shape[0]:
            low = min(low, cost + rest * levels[at + 1].price_per_size)
    return low


@kernel
def _cover(levels: Records, need: float, nodes_most: int) -> tuple[float, float]:
    """Cost of the cheapest cover found, and the least that any costs; best_pieces in place."""
    levels[0].left, levels[0].spent = need, 0.0
    levels[0].pieces = math.ceil(need / levels[0].piece_size * (1.0 - EXACT))
    cheapest, level = np.inf, 0
    for _ in range(nodes_most):
        here = levels[level]
        cost = here.spent + here.pieces * here.price
        rest = here.left - here.pieces * here.piece_size
        if rest <= EXACT * need:
            if cost < cheapest:
                cheapest = cost
                for at in range(levels.shape[0]):
                    levels[at].best_pieces = levels[at].pieces if at <= level else 0
        elif level + 1 < levels.shape[0] and cost + rest * levels[level + 1].price_per_size < cheapest * (1.0 - EQUAL):
            level += 1
            levels[level].left, levels[level].spent = rest, cost
            levels[level].pieces = math.ceil(rest / levels[level].piece_size * (1.0 - EXACT))
            continue
        else:
            here.pieces = 0
        while level >= 0 and levels[level].pieces == 0:
            level -= 1
        if level < 0:
            return cheapest, cheapest * (1.0 - EQUAL)
        levels[level].pieces -= 1
    return cheapest, min(_unsearched(levels, level, need), cheapest * (1.0 - EQUAL))


@kernel
def find_cheapest_covers(pieces: CoverPieces, need: Floats, nodes_most: int, covers: Covers) -> None:
    """The cheapest cover of every need (S,) > 0, in the unit of the pieces' size, into covers, in place.

    bound <= the cost of the best cover <= cost; they are equal to 1e-9 unless nodes_most, at least 64, cut the search.
    """
    widest = 0
    for row in range(need.shape[0]):
        widest = max(widest, pieces.first[row + 1] - pieces.first[row])
    levels, order = np.zeros(widest, LEVEL), np.zeros(widest, np.int64)
    each = np.zeros(widest)
    for row in range(need.shape[0]):
        first, options = pieces.first[row], pieces.first[row + 1] - pieces.first[row]
        for place in range(options):  # by rising price per size; equals as they came
            option = first + place
            mine, at = pieces.price[option] / pieces.size[option], place
            while at > 0 and each[at - 1] > mine:
                each[at], order[at] = each[at - 1], order[at - 1]
                at -= 1
            each[at], order[at] = mine, option
        for at in range(options):
            level = levels[at]
            level.price, level.piece_size = pieces.price[order[at]], pieces.size[order[at]]
            level.price_per_size = each[at]
        covers.cost[row], covers.bound[row] = _cover(levels[:options], need[row], nodes_most)
        for at in range(options):
            covers.counts[order[at]] = levels[at].best_pieces
