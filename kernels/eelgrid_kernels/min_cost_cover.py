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


class _Effort(NamedTuple):
    """How far the search for one need goes."""

    nodes_most: int
    equal: float  # share by which a cover has to be cheaper than the dearest of a full list to be searched for
    only_minimal: bool  # covers that need each of their pieces


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
def _search(levels: Records, need: float, row: int, covers: CoverList, effort: _Effort) -> None:
    """The cheapest covers of one need within its budget, as many as fit."""
    most, dearest, share = covers.cost.shape[1], covers.within[row], 1.0 - effort.equal
    levels[0].left, levels[0].spent = need, 0.0
    levels[0].pieces = math.ceil(need / levels[0].piece_size * (1.0 - EXACT))
    number, worst, level = 0, 0, 0
    for _ in range(effort.nodes_most):
        here = levels[level]
        cost = here.spent + here.pieces * here.price
        rest = here.left - here.pieces * here.piece_size
        if rest <= EXACT * need:
            smallest = np.inf
            for at in range(level + 1):
                if levels[at].pieces > 0 and levels[at].piece_size < smallest:
                    smallest = levels[at].piece_size
            is_minimal = rest + smallest > EXACT * need  # it needs each of its pieces
            if cost < dearest and (is_minimal or not effort.only_minimal):
                put = worst
                if number < most:
                    put = number
                    number += 1
                covers.cost[row, put] = cost
                for at in range(levels.shape[0]):
                    covers.counts[row, put, levels[at].place] = levels[at].pieces if at <= level else 0
                if number == most:
                    worst = 0
                    for at in range(1, most):
                        if covers.cost[row, at] > covers.cost[row, worst]:
                            worst = at
                    dearest = covers.cost[row, worst]
        elif level + 1 < levels.shape[0] and cost + rest * levels[level + 1].price_per_size < dearest * share:
            level += 1
            levels[level].left, levels[level].spent = rest, cost
            levels[level].pieces = math.ceil(rest / levels[level].piece_size * (1.0 - EXACT))
            continue
        else:
            here.pieces = 0
        while level >= 0 and levels[level].pieces == 0:
            level -= 1
        if level < 0:
            covers.number[row], covers.within[row] = number, dearest * share
            return
        levels[level].pieces -= 1
    covers.number[row], covers.within[row] = number, min(_unsearched(levels, level, need), dearest * share)


@kernel
def find_cheapest_covers(pieces: CoverPieces, need: Floats, nodes_most: int, covers: Covers) -> None:
    """The cheapest cover of every need (S,) > 0, in the unit of the pieces' size, into covers, in place.

    bound <= the cost of the best cover <= cost; they are equal to 1e-9 unless nodes_most, at least 64, cut the search.
    """
    widest = 0
    for row in range(need.shape[0]):
        widest = max(widest, pieces.first[row + 1] - pieces.first[row])
    levels, effort = np.zeros(widest, LEVEL), _Effort(nodes_most, EQUAL, False)
    one = CoverList(np.zeros((1, 1, widest), np.int64), np.zeros((1, 1)), np.zeros(1, np.int64), np.zeros(1))
    for row in range(need.shape[0]):
        first, options = pieces.first[row], pieces.first[row + 1] - pieces.first[row]
        one.cost[0, 0], one.within[0] = np.inf, np.inf
        _fill_levels(pieces, row, levels[:options])
        _search(levels[:options], need[row], 0, one, effort)
        covers.cost[row], covers.bound[row] = one.cost[0, 0], one.within[0]
        for place in range(options):
            covers.counts[first + place] = one.counts[0, 0, place]


@kernel
def list_cheap_covers(pieces: CoverPieces, need: Floats, nodes_most: int, levels: Records, covers: CoverList) -> None:
    """The cheapest covers of every need (S,) > 0, as many as fit, into covers, in place.

    Only minimal covers, those that need each of their pieces, and of a cost below `within`, which is a need's budget
    beforehand. After nodes_most steps the search for a need is cut. `levels` (K,) of LEVEL is what it works with.
    """
    effort = _Effort(nodes_most, 0.0, True)
    for row in range(need.shape[0]):
        own = levels[: pieces.first[row + 1] - pieces.first[row]]
        _fill_levels(pieces, row, own)
        _search(own, need[row], row, covers, effort)
