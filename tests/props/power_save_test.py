"""Power saving: at most twice the offline optimum, whatever comes; the optimum by levels is the optimum of the pool."""

import math
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eelgrid_controller.objectives.power.power_save import (
    NodeActivity,
    NodePool,
    NodePower,
    PowerChanges,
    SleepCosts,
    choose_nodes,
    find_base_stock,
    find_best_timer_s,
)

# 100 W are saved, and a transition costs as much as 60 s.
COSTS = SleepCosts(idle_w=120.0, sleep_w=20.0, transition_j=6000.0, wake_s=30.0)
NODES = 4
# How many nodes are in use, and for how long: short, about the break-even, and long.
DEMANDS = st.lists(
    st.tuples(st.integers(0, NODES), st.one_of(st.floats(0.01, 20.0), st.floats(50.0, 70.0), st.floats(100.0, 900.0))),
    min_size=1,
    max_size=24,
)


class Misled(NodePool):
    """A pool whose forecasts are drawn at random, or are as wrong as they can be."""

    __slots__ = ("chance",)

    def _timer_s(self, place):
        return self.chance.choice((0.0, 0.0, 1.0, 30.0, 59.0, 60.0))


def play(pool, demands):
    """Runs a pool over demands with exact timers; returns when it ended."""
    now_s = 0.0
    for busy, length_s in demands:
        pool.update(now_s, nodes=NODES, busy=busy)
        end_s = now_s + length_s
        for _ in range(200):
            due_s = pool.next_due_s(now_s)
            # A timer that the account cannot pay is asked again, as somebody who looks now and then would.
            now_s = due_s if due_s > now_s else now_s + 0.5
            if now_s >= end_s:
                break
            pool.update(now_s, nodes=NODES, busy=busy)
        now_s = end_s
    return now_s


def find_optimum_j(demands):
    """The least energy above sleep by trying every number of awake nodes in every stretch, without levels or gaps."""

    @cache
    def least_j(place, awake):
        if place == len(demands):
            return 0.0
        busy, length_s = demands[place]
        found = []
        for now_awake in range(busy, NODES + 1):
            # A transition is paid when a node falls asleep: those that sleep at the end sleep on.
            slept = max(0, awake - now_awake)
            kept_j = COSTS.saved_w * length_s * (now_awake - busy)
            found.append(COSTS.transition_j * slept + kept_j + least_j(place + 1, now_awake))
        return min(found)

    return least_j(0, NODES)


@given(DEMANDS)
def test_the_optimum_of_levels_is_that_of_all_choices(demands):
    pool = NodePool(COSTS, learns=False)
    end_s = play(pool, demands)
    assert pool.account(end_s).optimum_j == pytest.approx(find_optimum_j(tuple(demands)))


@given(DEMANDS)
def test_the_break_even_timer_spends_at_most_twice_the_optimum(demands):
    pool = NodePool(COSTS, learns=False)
    account = pool.account(play(pool, demands))
    assert account.spent_j <= 2.0 * account.optimum_j + 1e-6
    assert account.warm_j == pytest.approx(0.0, abs=1e-6)


def test_the_bound_of_two_is_reached_and_not_beaten_by_luck():
    pool = NodePool(COSTS, learns=False)
    account = pool.account(play(pool, [(0, 60.001), (NODES, 1.0)] * 5))
    assert account.spent_j / account.optimum_j == pytest.approx(2.0, rel=0.001)


@given(DEMANDS, st.integers(0, 2**32), st.sampled_from([0.0, 6000.0, 24_000.0]), st.integers(0, 2))
def test_no_forecast_however_wrong_costs_more_than_twice_the_optimum_and_the_allowance(
    demands, seed, allowance_j, warm_nodes
):
    pool = Misled(COSTS, allowance_j=allowance_j, warm_nodes=warm_nodes)
    pool.chance = random.Random(seed)
    now_s = 0.0
    for busy, length_s in demands:
        pool.update(now_s, nodes=NODES, busy=busy)
        steps = 25
        for _ in range(steps):
            now_s += length_s / steps
            pool.update(now_s, nodes=NODES, busy=busy)
            account = pool.account(now_s)
            assert account.spent_j <= 2.0 * account.optimum_j + allowance_j + 1e-6


def test_long_gaps_teach_to_sleep_at_once_and_short_ones_to_wait():
    pool = NodePool(COSTS, allowance_j=NODES * COSTS.transition_j)
    end_s = play(pool, [(0, 5000.0), (NODES, 1.0)] * 30)
    account = pool.account(end_s)
    assert account.spent_j <= 1.15 * account.optimum_j
    short = NodePool(COSTS, allowance_j=NODES * COSTS.transition_j)
    account = short.account(play(short, [(0, 20.0), (NODES, 1.0)] * 30))
    assert account.sleeps == 0
    assert account.spent_j == pytest.approx(account.optimum_j)


@given(st.lists(st.floats(0.0, 200.0), min_size=1, max_size=30))
def test_no_timer_would_have_been_better_than_the_best(lengths_s):
    def cost(timer_s):
        return sum(length if length <= timer_s else timer_s + 60.0 for length in lengths_s)

    best_s = find_best_timer_s(lengths_s, 60.0)
    assert 0.0 <= best_s <= 60.0
    assert all(cost(best_s) <= cost(tried / 4.0) + 1e-6 for tried in range(241))


def test_warm_nodes_never_sleep_and_are_outside_the_account():
    pool = NodePool(COSTS, warm_nodes=2, learns=False)
    play(pool, [(0, 1000.0)])
    assert pool.awake_nodes == 2
    account = pool.account(1000.0)
    assert account.spent_j <= 2.0 * account.optimum_j
    assert account.warm_j == pytest.approx(2 * 100.0 * (1000.0 - 60.0))


def test_the_warm_pool_is_filled_again_as_soon_as_work_takes_of_it():
    pool = NodePool(COSTS, warm_nodes=1, learns=False)
    play(pool, [(0, 1000.0)])
    assert pool.awake_nodes == 1
    assert pool.update(1000.0, nodes=NODES, busy=1) == 2
    before_j = pool.account(1000.0)
    # It is awake beside the account, for one break-even at least.
    assert before_j.warm_j == pytest.approx(940.0 * 100.0 + COSTS.transition_j)
    assert pool.update(1050.0, nodes=NODES, busy=0) == 2
    assert pool.next_due_s(1050.0) == 1060.0
    assert pool.update(1060.0, nodes=NODES, busy=0) == 1
    after_j = pool.account(1060.0)
    assert after_j.warm_j - before_j.warm_j == pytest.approx(60.0 * 100.0)
    assert after_j.spent_j <= 2.0 * after_j.optimum_j


def test_the_warm_pool_is_what_past_starts_have_taken_within_a_wake_up():
    rises = [1] * 90 + [2] * 8 + [3] * 2
    assert [find_base_stock(rises, share) for share in (None, 0.5, 0.1, 0.05, 0.02, 0.0)] == [0, 1, 2, 2, 3, 3]
    assert find_base_stock([], 0.1) == 0
    pool = NodePool(COSTS, waiting_share=0.0, learns=False)
    pool.update(0.0, nodes=NODES, busy=0)
    pool.update(100.0, nodes=NODES, busy=1)
    pool.update(110.0, nodes=NODES, busy=2)  # two within the 30 s that a wake-up takes
    pool.update(200.0, nodes=NODES, busy=0)
    pool.update(1000.0, nodes=NODES, busy=0)
    assert pool.awake_nodes == 2


def test_nodes_that_sleep_already_are_taken_over_as_they_are():
    pool = NodePool(COSTS, learns=False)
    pool.adopt(500.0, asleep=3)
    assert pool.update(500.0, nodes=NODES, busy=0) == 1
    assert pool.update(560.0, nodes=NODES, busy=0) == 0
    account = pool.account(9000.0)
    assert account.spent_j <= 2.0 * account.optimum_j


def test_what_is_wanted_is_awake_at_once_and_more_than_there_is_waits():
    pool = NodePool(COSTS, learns=False)
    play(pool, [(0, 1000.0)])
    assert pool.awake_nodes == 0
    assert pool.update(1000.0, nodes=NODES, busy=3) == 3
    assert pool.update(1001.0, nodes=NODES, busy=99) == NODES
    # One node was taken out of service, and comes back.
    assert pool.update(1002.0, nodes=NODES - 1, busy=3) == 3
    assert pool.update(1003.0, nodes=NODES, busy=3) == NODES
    assert pool.next_due_s(1003.0) == 1063.0


@pytest.mark.parametrize(
    "broken",
    [{"idle_w": 20.0}, {"sleep_w": -1.0}, {"transition_j": 0.0}, {"transition_j": math.nan}, {"wake_s": -1.0}],
)
def test_numbers_that_no_node_has_are_refused(broken):
    with pytest.raises(ValueError, match="must be"):
        SleepCosts(**{"idle_w": 120.0, "sleep_w": 20.0, "transition_j": 6000.0, "wake_s": 30.0, **broken})


def node(name, power=NodePower.AWAKE, idle_since_s=None):
    return NodeActivity(name=name, power=power, idle_since_s=idle_since_s)


def test_the_longest_idle_sleeps_and_a_node_in_use_never_does():
    nodes = [node("a"), node("b", idle_since_s=20.0), node("c", idle_since_s=10.0), node("d", NodePower.WAKING, 0.0)]
    assert choose_nodes(nodes, 3) == PowerChanges(sleep=("c",))
    assert choose_nodes(nodes, 0) == PowerChanges(sleep=("c", "b"))
    assert choose_nodes(nodes, 4) == PowerChanges()


def test_what_wakes_already_counts_and_what_falls_asleep_cannot_be_called_back():
    nodes = [
        node("a"),
        node("b", NodePower.WAKING, 0.0),
        node("c", NodePower.FALLING_ASLEEP, 0.0),
        node("d", NodePower.ASLEEP, 0.0),
        node("e", NodePower.ASLEEP, 0.0),
    ]
    assert choose_nodes(nodes, 3) == PowerChanges(wake=("d",))
    assert choose_nodes(nodes, 9) == PowerChanges(wake=("d", "e"))
