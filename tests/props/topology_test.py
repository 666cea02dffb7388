"""The kernels of wiring and gangs equal brute force; beyond what can be enumerated they keep their bounds.

Run with NUMBA_DISABLE_JIT=1 as well: the same code, interpreted.
"""

from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import naive_topology as naive

from eelgrid_kernels.gang import choose_linked_gpus, divide_replicas

quiet = settings(deadline=None)
# Bandwidths of real pairs: unknown, between processors, PCIe switch, one and two NVLinks.
BANDWIDTH = st.sampled_from([0, 6, 9, 12, 31, 37, 62])
# Watts in halves, so that sums are exact in any order.
WATTS = st.integers(-40, 200).map(lambda value: value / 2)


def matrix(draw, size, values=BANDWIDTH):
    links = np.zeros((size, size), np.int64)
    for one in range(size):
        for other in range(one):
            links[one, other] = links[other, one] = draw(values)
    return links


@st.composite
def nodes(draw, most=8):
    """Links of a node, the slots that fit and how many are wanted."""
    size = draw(st.integers(1, most))
    fitting = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
    return matrix(draw, size), fitting, draw(st.integers(1, len(fitting)))


def chosen(links, fitting, count):
    slots = np.zeros(count, np.int64)
    exact = choose_linked_gpus(links, np.array(fitting, np.int64), slots)
    return slots.tolist(), exact


@quiet
@given(nodes())
def test_the_best_linked_gpus_are_those_of_brute_force(case):
    links, fitting, count = case
    slots, exact = chosen(links, fitting, count)
    assert exact
    assert tuple(sorted(slots)) == naive.best_linked(links, fitting, count)


@quiet
@given(nodes())
def test_each_gpu_stands_next_to_its_best_linked_one(case):
    links, fitting, count = case
    slots, _ = chosen(links, fitting, count)
    assert slots[0] == min(slots)
    for place, (one, other) in enumerate(pairwise(slots)):
        rest = slots[place + 1 :]
        best = max(links[one, slot] for slot in rest)
        assert other == min(slot for slot in rest if links[one, slot] == best)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_beyond_enumeration_a_choice_is_valid_the_same_again_and_no_worse_than_the_first_that_fit(data):
    size = data.draw(st.integers(14, 64))
    half = size // 2
    values = iter(data.draw(st.lists(BANDWIDTH, min_size=64, max_size=64)) * 64)
    links = matrix(lambda _: next(values), size)
    fitting = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=min(13, size))))
    count = data.draw(st.integers(min(half, len(fitting) // 2), len(fitting)))
    slots, _ = chosen(links, fitting, count)
    assert len(set(slots)) == count
    assert set(slots) <= set(fitting)
    assert chosen(links, fitting, count)[0] == slots
    assert naive.worth(links, fitting, slots) >= naive.worth(links, fitting, fitting[:count])


@pytest.mark.parametrize("size", [16, 64])
def test_beyond_enumeration_cliques_are_found(size):
    """Boards of eight with NVLinks, in one box: eight GPUs come from one board, whatever is free beside them."""
    board = np.arange(size) // 8
    links = np.where(board[:, None] == board[None, :], 62, 6) * (1 - np.eye(size, dtype=np.int64))
    fitting = [slot for slot in range(size) if slot not in (0, 3)]
    slots, exact = chosen(links, fitting, 8)
    assert not exact
    assert sorted(slots) == list(range(8, 16))


@st.composite
def gangs(draw):
    """Costs by node and number of replicas, the nodes' paths in order, and a price of sharing a place."""
    count, levels, replicas = draw(st.integers(1, 5)), draw(st.integers(0, 3)), draw(st.integers(1, 5))
    part = st.sampled_from("ab")
    paths = sorted(tuple(draw(part) for _ in range(levels)) for _ in range(count))
    costs = [[0.0, *draw(st.lists(WATTS, max_size=replicas))] for _ in range(count)]
    price = [0.0, *(draw(st.lists(WATTS, min_size=replicas, max_size=replicas)))]
    return costs, paths, price


def divided(costs, paths, price):
    size = max(map(len, costs))
    table = np.array([row + [inf] * (size - len(row)) for row in costs])
    levels = len(paths[0])
    codes = [
        [sorted({path[: level + 1] for path in paths}).index(path[: level + 1]) for level in range(levels)]
        for path in paths
    ]
    counts = np.zeros(len(costs), np.int64)
    groups = np.array(codes, np.int64).reshape(len(costs), levels)
    return divide_replicas(table, groups, np.array(price), counts), counts.tolist()


@quiet
@given(gangs())
def test_the_division_of_a_gang_costs_what_the_best_of_all_costs(case):
    costs, paths, price = case
    total, counts = divided(costs, paths, price)
    best, _ = naive.least_division(costs, paths, price)
    assert total == best
    if best < inf:
        assert sum(counts) == len(price) - 1
        watts = sum(row[count] for row, count in zip(costs, counts, strict=True))
        assert watts + sum(price[held] for held in naive.places(paths, counts)) == best


@quiet
@given(gangs())
def test_a_division_exists_where_there_is_room(case):
    costs, paths, price = case
    total, _ = divided(costs, paths, price)
    assert (total < inf) == (sum(len(row) - 1 for row in costs) >= len(price) - 1)


def test_of_equal_nodes_the_first_take_the_replicas():
    total, counts = divided([[0.0, 1.0, 2.0]] * 4, [()] * 4, [0.0, 0.0, 0.0, 0.0])
    assert (total, counts) == (3.0, [2, 1, 0, 0])
