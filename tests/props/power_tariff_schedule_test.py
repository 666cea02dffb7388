"""Schedules against a linear program and against every choice of whole limits."""

import itertools
import math

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from eelgrid_controller.objectives.power.power_model import BestEffort, LimitPoint, weighted_promise
from eelgrid_controller.objectives.power.tariffs import EnergyTariff, PriceSlice, StepFunction, schedule_limits

POINTS = st.lists(
    st.builds(LimitPoint, st.just(200.0), st.floats(0.1, 10.0), st.floats(10.0, 1000.0)), min_size=1, max_size=5
)


@st.composite
def slices(draw, low=-2.0, most=4):
    made, at_s = [], 0.0
    for _ in range(draw(st.integers(1, most))):
        seconds = draw(st.floats(60.0, 10_000.0))
        made.append(PriceSlice(at_s, seconds, draw(st.sampled_from([low, 0.0, 0.5, 1.0, 3.0]))))
        at_s += seconds
    return tuple(made)


def _most(points, cut):
    return max(1.0 / at.time_s for at in points) * sum(one.seconds for one in cut)


def _program(points, cut, work):
    """The same question to HiGHS."""
    cost = np.array([one.price * at.power_w for one in cut for at in points])
    rate = np.array([1.0 / at.time_s for _ in cut for at in points])
    times = np.zeros((len(cut), cost.size))
    for k in range(len(cut)):
        times[k, k * len(points) : (k + 1) * len(points)] = 1.0
    return linprog(cost, A_ub=-rate[None, :], b_ub=[-work], A_eq=times, b_eq=[one.seconds for one in cut])


@settings(max_examples=150, deadline=None)
@given(POINTS, slices(), st.floats(0.0, 1.0))
def test_the_cost_is_that_of_the_linear_program_and_the_work_is_done(points, cut, share):
    work = share * _most(points, cut) * (1.0 - 1e-9)
    made = schedule_limits(points, cut, work)
    solved = _program(points, cut, work)
    assert solved.status == 0
    scale = sum(one.seconds for one in cut) * max(at.power_w for at in points)
    assert abs(made.cost - solved.fun) <= 1e-6 * scale
    assert made.work >= work * (1.0 - 1e-9)
    assert sum(0.0 < turn.share < 1.0 for turn in made.turns) <= 1
    assert [turn.slice for turn in made.turns] == list(cut)


@settings(max_examples=100, deadline=None)
@given(POINTS, slices(most=3), st.floats(0.0, 1.0))
def test_no_choice_of_whole_limits_that_does_the_work_is_cheaper(points, cut, share):
    work = share * _most(points, cut) * (1.0 - 1e-9)
    made = schedule_limits(points, cut, work)
    scale = sum(one.seconds for one in cut) * max(at.power_w for at in points)
    for choice in itertools.product(points, repeat=len(cut)):
        done = sum(one.seconds / at.time_s for one, at in zip(cut, choice, strict=True))
        if done >= work:
            cost = sum(one.price * one.seconds * at.power_w for one, at in zip(cut, choice, strict=True))
            assert made.cost <= cost + 1e-6 * scale


@settings(max_examples=100, deadline=None)
@given(POINTS, slices(), st.data())
def test_never_dearer_than_a_constant_limit_at_the_same_work(points, cut, data):
    constant = data.draw(st.sampled_from(points))
    seconds = sum(one.seconds for one in cut)
    made = schedule_limits(points, cut, seconds / constant.time_s)
    assert made.work >= seconds / constant.time_s * (1.0 - 1e-9)
    cost = sum(one.price * one.seconds for one in cut) * constant.power_w
    assert made.cost <= cost + 1e-6 * seconds * max(at.power_w for at in points)


@settings(max_examples=100, deadline=None)
@given(POINTS, slices(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_more_work_never_costs_less_and_its_price_never_falls(points, cut, one, other):
    less, more = (schedule_limits(points, cut, share * _most(points, cut)) for share in sorted((one, other)))
    assert less.cost <= more.cost + 1e-6 * max(1.0, abs(more.cost))
    assert less.work_price <= more.work_price * (1.0 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(POINTS, slices(low=0.25), st.floats(0.0, 1.0))
def test_where_energy_is_dearer_no_limit_is_faster(points, cut, share):
    made = schedule_limits(points, cut, share * _most(points, cut))
    for cheap, dear in itertools.permutations(made.turns, 2):
        if cheap.slice.price < dear.slice.price:
            assert cheap.slow.time_s <= dear.fast.time_s * (1.0 + 1e-9)


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=6), st.floats(0.0, 2e5), st.floats(600.0, 2e5))
def test_slices_cover_the_horizon_and_tell_the_price_of_every_moment(values, from_s, horizon_s):
    tariff = EnergyTariff(StepFunction(tuple(3600.0 * k for k in range(len(values))), tuple(values)), begins_s=17.0)
    cut = tariff.price_slices(from_s, horizon_s)
    assert math.isclose(sum(one.seconds for one in cut), horizon_s, rel_tol=1e-9)
    assert cut[0].begin_s == from_s
    for one in cut:
        assert tariff.price_at(one.begin_s + one.seconds / 2.0) == one.price
        assert math.isclose(one.seconds, min(one.seconds, horizon_s))
    assert all(one.price != other.price for one, other in itertools.pairwise(cut))


@given(st.floats(0.0, 1.0), st.floats(0.0, 10.0), st.floats(0.0, 10.0))
def test_energy_weighs_more_where_it_is_dearer(energy_weight, one, other):
    assume(energy_weight < 1.0 or one > 0.0)
    cheap, dear = (weighted_promise(BestEffort(energy_weight), weight).energy_weight for weight in sorted((one, other)))
    assert cheap <= dear + 1e-12
    assert math.isclose(weighted_promise(BestEffort(energy_weight), 1.0).energy_weight, energy_weight, abs_tol=1e-12)
