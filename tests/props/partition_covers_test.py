"""The kernels' covers equal those of a table over all rates and of all choices, and bounds hold however early they are cut."""

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_kernels.min_cost_cover import (
    LEVEL,
    CoverList,
    CoverPieces,
    Covers,
    find_cheapest_covers,
    list_cheap_covers,
)

quiet = settings(deadline=None)

PIECES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=6)
NEEDS = st.lists(st.tuples(PIECES, st.integers(1, 60)), min_size=1, max_size=5)


def solved(cases, nodes_most=100_000):
    price = np.array([price for pieces, _ in cases for price, _ in pieces], np.float64)
    size = np.array([size for pieces, _ in cases for _, size in pieces], np.float64)
    first = np.cumsum([0, *(len(pieces) for pieces, _ in cases)])
    need = np.array([need for _, need in cases], np.float64)
    counts, cost, bound = np.full(len(price), -1), np.zeros(len(cases)), np.zeros(len(cases))
    find_cheapest_covers(CoverPieces(price, size, first), need, nodes_most, Covers(counts, cost, bound))
    return [
        (counts[first[row] : first[row + 1]].tolist(), float(cost[row]), float(bound[row])) for row in range(len(cases))
    ]


def cheapest(pieces, need):
    """By need: the least that 0, 1, 2 ... cost."""
    best = [0.0]
    for covered in range(1, need + 1):
        best.append(min(price + best[max(0, covered - size)] for price, size in pieces))
    return best[need]


@given(NEEDS)
@quiet
def test_the_cheapest_cover(cases):
    for (pieces, need), (counts, cost, bound) in zip(cases, solved(cases), strict=True):
        assert sum(count * size for count, (_, size) in zip(counts, pieces, strict=True)) >= need
        assert cost == sum(count * price for count, (price, _) in zip(counts, pieces, strict=True))
        assert cost == cheapest(pieces, need)
        assert cost * (1.0 - 1e-8) <= bound <= cost


@given(NEEDS, st.integers(64, 80))
@quiet
def test_a_search_that_is_cut_keeps_a_cover_and_a_bound(cases, nodes_most):
    for (pieces, need), (counts, cost, bound) in zip(cases, solved(cases, nodes_most), strict=True):
        assert sum(count * size for count, (_, size) in zip(counts, pieces, strict=True)) >= need
        assert bound <= cheapest(pieces, need) <= cost


def test_a_long_search_is_cut_with_its_bound():
    """Prices per size that are nearly equal, and a large need: bounded work."""
    pieces = [(1009, 101), (1031, 103), (1071, 107), (1091, 109), (1132, 113)]
    ((counts, cost, bound),) = solved([(pieces, 99_991)], 64)
    assert sum(count * size for count, (_, size) in zip(counts, pieces, strict=True)) >= 99_991
    assert 0.99 * cost <= bound <= cheapest(pieces, 99_991) <= cost


def test_rounding_does_not_ask_for_one_more():
    """Three times a tenth is a little more than three tenths; ten tenths summed up are a little less than one."""
    ((counts, *_),) = solved([([(1, 1)], 3)])
    assert counts == [3]
    price, size, need = np.array([1.0]), np.array([0.1]), np.array([0.3])
    counts, cost, bound = np.zeros(1, np.int64), np.zeros(1), np.zeros(1)
    find_cheapest_covers(CoverPieces(price, size, np.array([0, 1])), need, 64, Covers(counts, cost, bound))
    assert counts.tolist() == [3]


FEW_PIECES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=4)
FEW_NEEDS = st.lists(st.tuples(FEW_PIECES, st.integers(1, 12), st.integers(0, 60)), min_size=1, max_size=4)


def listed(cases, most, nodes_most=100_000):
    """Of each need, its covers with their costs, and up to where the list is complete."""
    first = np.cumsum([0, *(len(pieces) for pieces, *_ in cases)])
    price = np.array([price for pieces, *_ in cases for price, _ in pieces], np.float64)
    size = np.array([size for pieces, *_ in cases for _, size in pieces], np.float64)
    need = np.array([need for _, need, _ in cases], np.float64)
    budget = np.array([budget for *_, budget in cases], np.float64)
    widest = int(np.diff(first).max())
    covers = CoverList(
        np.full((len(cases), most, widest), -1), np.zeros((len(cases), most)), np.zeros(len(cases), np.int64), budget
    )
    list_cheap_covers(
        CoverPieces(price, size, first), need, nodes_most, np.zeros(covers.counts.shape[2], LEVEL), covers
    )
    for row, (pieces, *_) in enumerate(cases):
        number = covers.number[row]
        counts = [tuple(one[: len(pieces)].tolist()) for one in covers.counts[row, :number]]
        yield dict(zip(counts, covers.cost[row, :number].tolist(), strict=True)), float(covers.within[row])


def minimal_covers(pieces, need):
    """Every cover that needs each of its pieces, with its cost."""
    found = {}
    for counts in itertools.product(*(range(math.ceil(need / size) + 1) for _, size in pieces)):
        rest = sum(count * size for count, (_, size) in zip(counts, pieces, strict=True)) - need
        used = [size for count, (_, size) in zip(counts, pieces, strict=True) if count]
        if 0 <= rest < min(used, default=0):
            found[counts] = float(sum(count * price for count, (price, _) in zip(counts, pieces, strict=True)))
    return found


@given(FEW_NEEDS)
@quiet
def test_every_minimal_cover_within_the_budget_is_listed(cases):
    for (pieces, need, budget), (covers, within) in zip(cases, listed(cases, 2000), strict=True):
        every = minimal_covers(pieces, need)
        assert covers == {counts: cost for counts, cost in every.items() if cost < budget}
        assert within == budget


@given(FEW_NEEDS, st.integers(1, 3))
@quiet
def test_a_short_list_has_the_cheapest_covers(cases, most):
    for (pieces, need, budget), (covers, within) in zip(cases, listed(cases, most), strict=True):
        every = minimal_covers(pieces, need)
        allowed = sorted(cost for cost in every.values() if cost < budget)
        assert sorted(covers.values()) == allowed[:most]
        assert all(every[counts] == cost for counts, cost in covers.items())
        assert all(cost >= within for counts, cost in every.items() if counts not in covers)


@given(FEW_NEEDS, st.integers(1, 12))
@quiet
def test_a_list_that_is_cut_says_up_to_where_it_is_complete(cases, nodes_most):
    for (pieces, need, budget), (covers, within) in zip(cases, listed(cases, 2000, nodes_most), strict=True):
        every = minimal_covers(pieces, need)
        assert within <= budget
        assert covers.items() <= every.items()
        assert all(cost >= within for counts, cost in every.items() if counts not in covers)
