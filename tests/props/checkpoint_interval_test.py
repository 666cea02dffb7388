"""Checkpoint intervals against the best of a simulated curve, and interruption counts against a slow sum of all of them."""

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_controller.queueing.checkpoint_interval import compute_checkpoint_interval
from eelgrid_controller.state.interruptions import HALF_LIFE_S, InterruptionCount

S = 10**9


def expect_waste(interval_s, cost_s, between_s):
    """Time of one segment with its checkpoint and all repetitions, over its work, less 1: for exponential interruptions."""
    return between_s * math.expm1((interval_s + cost_s) / between_s) / interval_s - 1.0


def find_least_waste(cost_s, between_s):
    low, high = 1e-9 * between_s, 50.0 * between_s
    for _ in range(200):
        left, right = low + 0.382 * (high - low), low + 0.618 * (high - low)
        if expect_waste(left, cost_s, between_s) < expect_waste(right, cost_s, between_s):
            high = right
        else:
            low = left
    return expect_waste(low, cost_s, between_s)


@given(between_s=st.floats(1.0, 1e8), ratio=st.floats(1e-6, 30.0))
@settings(deadline=None, max_examples=300)
def test_the_interval_wastes_at_most_one_percent_more_than_the_best(between_s, ratio):
    cost_s = ratio * between_s
    waste = expect_waste(compute_checkpoint_interval(cost_s, between_s), cost_s, between_s)
    assert waste <= 1.01 * find_least_waste(cost_s, between_s) + 1e-12


def simulate_waste(interval_s, cost_s, between_s, work_s, generator):
    """Plays a job that is interrupted at random, loses what it did since its last checkpoint, and begins that again."""
    passed_s, done_s, next_s = 0.0, 0.0, generator.expovariate(1.0 / between_s)
    while done_s < work_s:
        segment_s = interval_s + cost_s
        if passed_s + segment_s <= next_s:
            passed_s, done_s = passed_s + segment_s, done_s + interval_s
        else:
            passed_s, next_s = next_s, next_s + generator.expovariate(1.0 / between_s)
    return passed_s / done_s - 1.0


@pytest.mark.parametrize(("cost_s", "between_s"), [(30.0, 3600.0), (5.0, 600.0)])
def test_the_curve_is_that_of_jobs_that_are_played(cost_s, between_s):
    best = compute_checkpoint_interval(cost_s, between_s)
    for interval_s in (0.5 * best, best, 2.0 * best):
        played = simulate_waste(interval_s, cost_s, between_s, 40_000 * interval_s, random.Random(7))
        assert played == pytest.approx(expect_waste(interval_s, cost_s, between_s), rel=0.05)


@dataclass
class SlowCount:
    """Every interruption and every stretch of running, summed with its weight when it is asked."""

    events: list = field(default_factory=list)
    stretches: list = field(default_factory=list)

    def at(self, now_s):
        def weigh(time_s):
            return 2.0 ** (-(now_s - time_s) / HALF_LIFE_S)

        exposure_s = sum(
            rate * HALF_LIFE_S / math.log(2.0) * (weigh(end_s) - weigh(start_s))
            for start_s, end_s, rate in self.stretches
        )
        return sum(map(weigh, self.events)), exposure_s


@given(
    steps=st.lists(
        st.tuples(st.floats(0.0, 3e6), st.integers(0, 2), st.sampled_from([-1, 0, 1, 4])), min_size=1, max_size=20
    )
)
@settings(deadline=None, max_examples=200)
def test_counts_equal_a_slow_sum_however_often_they_are_read(steps):
    count, slow, now_s, running = InterruptionCount(0), SlowCount(), 0.0, 0
    for passed_s, events, change in steps:
        slow.stretches.append((now_s, now_s + passed_s, running))
        now_s += passed_s
        # Reading in between changes nothing.
        count = count.advance(int((now_s - passed_s / 2) * S)).advance(int(now_s * S))
        slow.events += [now_s] * events
        running = max(0, running + change)
        count = InterruptionCount(count.at_ns, count.events + events, count.exposure_s, running)
    events, exposure_s = slow.at(now_s)
    assert count.events == pytest.approx(events, rel=1e-6, abs=1e-9)
    assert count.exposure_s == pytest.approx(exposure_s, rel=1e-6, abs=1e-3)
    assert count.estimate_rate_hz(86_400.0) == pytest.approx((1.0 + events) / (86_400.0 + exposure_s), rel=1e-6)
