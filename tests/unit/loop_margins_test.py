"""The autoscaler's margins on whole days: one is changed at a time, and what it comes to is paired by seed."""

import math

import pytest
from bench.loop.margins import (
    AS_IT_IS,
    BAND,
    TRIED,
    Day,
    Margin,
    compare_margins,
    list_margins,
    present_value,
    set_margin,
)

from eelgrid_controller.objectives.services.autoscaler import (
    RateReserve,
    RateTrend,
    ScalingLimits,
    forecast_rate,
    raise_reserve,
    update_trend,
)


def _upper_hz():
    trend = RateTrend()
    for number, rate_hz in enumerate((10.0, 14.0, 11.0, 15.0)):
        trend = update_trend(trend, rate_hz, 30.0 * number)
    return forecast_rate(trend, 60.0).upper_hz


def test_a_margin_is_at_its_value_meanwhile_and_as_before_afterwards():
    present, before_hz = present_value("forecast"), _upper_hz()
    with set_margin(Margin("forecast", present + 1.0)) as band:
        assert band is None
        assert present_value("forecast") == present + 1.0
        assert _upper_hz() > before_hz
    assert (present_value("forecast"), _upper_hz()) == (present, before_hz)
    with pytest.raises(ZeroDivisionError), set_margin(Margin("reserve", 0.5)):
        _ = raise_reserve(RateReserve(), 0.0).share / 0
    assert raise_reserve(RateReserve(), 0.0).share == present_value("reserve") < 0.5


def test_the_band_is_a_services_own_and_nothing_is_changed_for_the_present():
    with set_margin(Margin(BAND, 0.2)) as band:
        assert band == 0.2
        assert present_value(BAND) == ScalingLimits().band
    with set_margin(Margin(AS_IT_IS, 0.0)) as band:
        assert band is None


def test_each_margin_is_tried_below_and_above_its_present_value():
    margins = list_margins()
    assert margins[0] == Margin(AS_IT_IS, 0.0)
    for name in TRIED:
        tried, present = [margin.value for margin in margins if margin.name == name], present_value(name)
        assert min(tried) < present < max(tried)
        assert present not in tried


def test_days_are_compared_with_the_present_of_the_same_seed():
    present, other = Margin(AS_IT_IS, 0.0), Margin(BAND, 0.2)
    days = [Day(present, 1, 100.0, 10, 1, 0), Day(present, 2, 200.0, 10, 2, 1), Day(other, 1, 110.0, 10, 0, 0)]
    assert list(compare_margins(days)) == [(present, 3, 1, 0.0, 0.0), (other, 0, 0, pytest.approx(10.0), math.inf)]
    days.append(Day(other, 2, 240.0, 10, 5, 2))
    assert list(compare_margins(days))[1] == (other, 5, 2, pytest.approx(15.0), pytest.approx(63.53, rel=1e-3))
