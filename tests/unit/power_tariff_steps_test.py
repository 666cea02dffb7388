"""Prices as functions of time, and small schedules that can be worked out by hand."""

import math

import pytest

from eelgrid_controller.objectives.power.power_model import LimitPoint
from eelgrid_controller.objectives.power.tariffs import (
    DAY_S,
    WEEK_S,
    EnergyTariff,
    InvalidTariff,
    PriceHorizon,
    PriceSlice,
    StepFunction,
    schedule_limits,
)

SLOW, FAST = LimitPoint(150.0, 2.0, 150.0), LimitPoint(300.0, 1.0, 400.0)  # 0.5 and 1 units a second


def test_a_value_stays_until_the_next_start_and_repeats():
    steps = StepFunction((0.0, 3600.0), (1.0, 2.0))
    assert [steps.value_at(at_s) for at_s in (0.0, 3599.0, 3600.0, DAY_S - 1.0, DAY_S, -1.0)] == [
        1.0,
        1.0,
        2.0,
        2.0,
        1.0,
        2.0,
    ]


def test_before_the_first_start_the_last_value_goes_on():
    assert StepFunction((60.0,), (7.0,), WEEK_S).value_at(0.0) == 7.0


@pytest.mark.parametrize(
    ("starts_s", "values", "period_s", "field"),
    [
        ((), (), DAY_S, "starts_s"),
        ((0.0,), (1.0, 2.0), DAY_S, "starts_s"),
        ((0.0, 30.0), (1.0, 2.0), DAY_S, "starts_s"),
        ((0.0, DAY_S), (1.0, 2.0), DAY_S, "starts_s"),
        ((-1.0,), (1.0,), DAY_S, "starts_s"),
        ((0.0,), (math.nan,), DAY_S, "values"),
        ((0.0,), (1.0,), 1.0, "period_s"),
    ],
)
def test_steps_that_say_nothing_are_refused(starts_s, values, period_s, field):
    with pytest.raises(InvalidTariff) as refused:
        StepFunction(starts_s, values, period_s)
    assert refused.value.field == field


def test_carbon_and_pue_are_part_of_a_joule():
    tariff = EnergyTariff(
        StepFunction((0.0,), (2.0,)), StepFunction((0.0,), (3.0,)), carbon_price=0.5, pue=StepFunction((0.0,), (1.2,))
    )
    assert tariff.price_at(0.0) == pytest.approx(1.2 * (2.0 + 0.5 * 3.0))


def test_a_period_may_begin_at_any_time():
    tariff = EnergyTariff(StepFunction((0.0, 3600.0), (1.0, 2.0)), begins_s=100.0)
    assert [tariff.price_at(at_s) for at_s in (99.0, 100.0, 3700.0)] == [2.0, 1.0, 2.0]


def test_slices_are_cut_where_the_cost_changes_and_nowhere_else():
    tariff = EnergyTariff(
        StepFunction((0.0, 3600.0, 7200.0), (1.0, 1.0, 2.0)), pue=StepFunction((0.0, 43_200.0), (1.0, 2.0))
    )
    assert tariff.price_slices(1800.0, DAY_S) == (
        PriceSlice(1800.0, 5400.0, 1.0),
        PriceSlice(7200.0, 36_000.0, 2.0),
        PriceSlice(43_200.0, 43_200.0, 4.0),
        PriceSlice(86_400.0, 1800.0, 1.0),
    )


def test_the_weight_is_relative_to_the_mean_of_what_comes():
    prices = PriceHorizon(EnergyTariff(StepFunction((0.0, 43_200.0), (1.0, 3.0))), DAY_S)
    assert (prices.price_weight(0.0), prices.price_weight(50_000.0)) == (0.5, 1.5)
    assert PriceHorizon(EnergyTariff(StepFunction((0.0,), (0.0,))), DAY_S).price_weight(0.0) == 1.0
    assert (
        PriceHorizon(EnergyTariff(StepFunction((0.0, 60.0), (5.0, -1.0))), DAY_S).price_weight(0.0) == 1.0
    )  # the mean is below 0
    assert PriceHorizon(EnergyTariff(StepFunction((0.0, 60.0), (-1.0, 5.0))), DAY_S).price_weight(0.0) == 0.0


def test_work_is_done_where_energy_is_cheap():
    cheap, dear = PriceSlice(0.0, 100.0, 1.0), PriceSlice(100.0, 100.0, 3.0)
    made = schedule_limits((SLOW, FAST), (cheap, dear), 150.0)
    assert [(turn.fast, turn.slow) for turn in made.turns] == [(FAST, FAST), (SLOW, SLOW)]
    assert (made.work, made.cost) == (150.0, 100.0 * 400.0 + 3.0 * 100.0 * 150.0)
    assert (made.point_at(0.0), made.point_at(100.0), made.point_at(200.0), made.point_at(-1.0)) == (
        FAST,
        SLOW,
        None,
        None,
    )


def test_one_slice_is_divided_where_the_work_ends_in_it():
    made = schedule_limits((SLOW, FAST), (PriceSlice(0.0, 100.0, 1.0), PriceSlice(100.0, 100.0, 3.0)), 125.0)
    assert [turn.share for turn in made.turns] == [0.5, 0.0]
    assert (made.turns[0].point_at(49.0), made.turns[0].point_at(51.0)) == (FAST, SLOW)
    assert made.work == pytest.approx(125.0)
    assert made.work_price == pytest.approx((400.0 - 150.0) / 0.5)


def test_no_work_is_the_least_power_and_too_much_the_fastest():
    slices = (PriceSlice(0.0, 100.0, 1.0),)
    assert schedule_limits((SLOW, FAST), slices, 0.0).turns[0].slow == SLOW
    most = schedule_limits((SLOW, FAST), slices, 1e9)
    assert (most.turns[0].slow, most.work, most.work_price) == (FAST, 100.0, math.inf)


def test_a_price_below_0_draws_what_it_can():
    hungry = LimitPoint(400.0, 1.5, 500.0)  # slower, and draws more
    slices = (PriceSlice(0.0, 10.0, -1.0), PriceSlice(10.0, 10.0, 0.0), PriceSlice(20.0, 10.0, 1.0))
    assert [turn.slow for turn in schedule_limits((SLOW, FAST, hungry), slices, 0.0).turns] == [hungry, FAST, SLOW]


def test_a_limit_that_is_dearer_and_slower_is_never_run():
    poor = LimitPoint(200.0, 1.9, 300.0)
    made = schedule_limits((SLOW, poor, FAST), (PriceSlice(0.0, 100.0, 1.0),), 75.0)
    assert {made.turns[0].slow, made.turns[0].fast} == {SLOW, FAST}
