"""Covering knapsack: the cheapest MIG slices whose throughput covers a service's rate.

    least  sum_k price_k x_k    such that  sum_k size_k x_k >= need,   x whole numbers

Owns this one search, for many needs at once: for the cheapest cover of each, and for all that are cheap enough. Must not
know services, slices or where prices come from.

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
    ("place", np.int64),  # among the need's options
)


class CoverPieces(NamedTuple):
    """What may be bought for each need."""

    price: Floats  # (O,) >= 0
    size: Floats  # (O,) > 0
    first: Ints  # (S + 1,) need s may use the options first[s] to first[s + 1] - 1, at least one


class CoverList(NamedTuple):
    """Covers of every need, M of each at most."""

    counts: Ints  # (S, M, K) pieces of the need's options, in their order
    cost: Floats  # (S, M)
    number: Ints  # (S,) covers found
    within: Floats  # (S,) every other minimal cover costs at least this


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
        if fewer >= 0 and here.left - fewer * here.piece_size <= EXACT * need:
            low = min(low, here.spent + fewer * here.price)
            fewer -= 1  # one less leaves something to the next piece, which may cost less
        if fewer >= 0 and at + 1 < levels.shape[0]:
            rest = here.left - fewer * here.piece_size
            low = min(low, here.spent + fewer * here.price + rest * levels[at + 1].price_per_size)
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
def _fill_levels(pieces: CoverPieces, row: int, levels: Records) -> None:
    """The options of a need by rising price per size; equals as they came."""
    first = pieces.first[row]
    for place in range(levels.shape[0]):
        mine, at = pieces.price[first + place] / pieces.size[first + place], place
        while at > 0 and levels[at - 1].price_per_size > mine:
            levels[at].price_per_size, levels[at].place = levels[at - 1].price_per_size, levels[at - 1].place
            at -= 1
        levels[at].price_per_size, levels[at].place = mine, place
    for at in range(levels.shape[0]):
        option = first + levels[at].place
        levels[at].price, levels[at].piece_size = pieces.price[option], pieces.size[option]


@kernel
def find_cheapest_covers(pieces: CoverPieces, need: Floats, nodes_most: int, covers: Covers) -> None:
    """The cheapest cover of every need (S,) > 0, in the unit of the pieces' size, into covers, in place.

    bound <= the cost of the best cover <= cost; they are equal to 1e-9 unless nodes_most, at least 64, cut the search.
    """
    widest = 0
    for row in range(need.shape[0]):
        widest = max(widest, pieces.first[row + 1] - pieces.first[row])
    levels = np.zeros(widest, LEVEL)
    for row in range(need.shape[0]):
        first, options = pieces.first[row], pieces.first[row + 1] - pieces.first[row]
        _fill_levels(pieces, row, levels[:options])
        covers.cost[row], covers.bound[row] = _cover(levels[:options], need[row], nodes_most)
        for at in range(options):
            covers.counts[first + levels[at].place] = levels[at].best_pieces


@kernel
def _list(levels: Records, need: float, nodes_most: int, row: int, covers: CoverList) -> None:
    """The cheapest minimal covers of one need within its budget."""
    most, budget = covers.cost.shape[1], covers.within[row]
    levels[0].left, levels[0].spent = need, 0.0
    levels[0].pieces = math.ceil(need / levels[0].piece_size * (1.0 - EXACT))
    number, worst, level = 0, 0, 0
    for _ in range(nodes_most):
        here = levels[level]
        cost = here.spent + here.pieces * here.price
        rest = here.left - here.pieces * here.piece_size
        if rest <= EXACT * need:
            smallest = np.inf
            for at in range(level + 1):
                if levels[at].pieces > 0 and levels[at].piece_size < smallest:
                    smallest = levels[at].piece_size
            if cost < budget and rest + smallest > EXACT * need:  # it needs each of its pieces
                put = worst
                if number < most:
                    put = number
                    number += 1
                covers.cost[row, put] = cost
                for at in range(levels.shape[0]):
                    covers.counts[row, put, levels[at].place] = levels[at].pieces if at <= level else 0
                if number == most:  # from here on only what is cheaper than the dearest of the list
                    worst = 0
                    for at in range(1, most):
                        if covers.cost[row, at] > covers.cost[row, worst]:
                            worst = at
                    budget = covers.cost[row, worst]
        elif level + 1 < levels.shape[0] and cost + rest * levels[level + 1].price_per_size < budget:
            level += 1
            levels[level].left, levels[level].spent = rest, cost
            levels[level].pieces = math.ceil(rest / levels[level].piece_size * (1.0 - EXACT))
            continue
        else:
            here.pieces = 0
        while level >= 0 and levels[level].pieces == 0:
            level -= 1
        if level < 0:
            covers.number[row], covers.within[row] = number, budget
            return
        levels[level].pieces -= 1
    covers.number[row], covers.within[row] = number, min(_unsearched(levels, level, need), budget)


@kernel
def list_cheap_covers(pieces: CoverPieces, need: Floats, nodes_most: int, levels: Records, covers: CoverList) -> None:
    """The cheapest covers of every need (S,) > 0, as many as fit, into covers, in place.

    Only minimal covers, those that need each of their pieces, and of a cost below `within`, which is a need's budget
    beforehand. After nodes_most steps the search for a need is cut. `levels` (K,) of LEVEL is what it works with.
    """
    for row in range(need.shape[0]):
        own = levels[: pieces.first[row + 1] - pieces.first[row]]
        _fill_levels(pieces, row, own)
        _list(own, need[row], nodes_most, row, covers)
