"""Token promises on curves worked out by hand."""

import math

import pytest

from eelgrid_controller.objectives.services.service_model import (
    CURVE_ERROR,
    TokenDemand,
    inter_token_latency,
    least_instances,
    token_curve,
)
from eelgrid_controller.profiles.points import Configuration, InvalidServingValue, NoFeasibleConfiguration, Point
from eelgrid_controller.profiles.queueing_model import QuantileObjective, SlownessFactor


def _point(batch, token_hz, p95_s, p50_s=None):
    latency_s = {0.95: p95_s} | ({0.5: p50_s} if p50_s else {})
    return Point("m", Configuration("h100", batch=batch), throughput_hz=token_hz, latency_s=latency_s, power_w=400.0)


POINTS = [_point(100, 4000.0, 0.030), _point(4, 400.0, 0.010), _point(16, 1200.0, 0.015), _point(200, 3900.0, 0.050)]


def test_a_curve_leaves_out_what_gives_no_more():
    curve = token_curve(POINTS)
    assert curve.sequences == (4.0, 16.0, 100.0)
    assert curve.token_hz == (400.0, 1200.0, 4000.0)
    assert curve.inter_token_s == {0.95: (0.010, 0.015, 0.030)}


def test_a_quantile_that_falls_with_concurrency_is_raised():
    curve = token_curve([_point(4, 400.0, 0.020), _point(16, 1200.0, 0.015), _point(32, 2000.0, 0.040)])
    assert curve.inter_token_s[0.95] == (0.020, 0.020, 0.040)


def test_the_inter_token_latency_is_read_a_deviation_above_the_mean():
    curve = token_curve(POINTS)
    found = inter_token_latency(curve, 1200.0, 0.95)  # 16 at once, 20 a deviation above
    assert found.value_s == pytest.approx(0.015 + (0.030 - 0.015) * 4.0 / 84.0)
    assert found.error == CURVE_ERROR
    assert inter_token_latency(curve, 4000.0, 0.95).value_s == 0.030  # the engine admits no more than the last
    assert inter_token_latency(curve, 4001.0, 0.95).value_s == math.inf
    assert inter_token_latency(curve, 1.0, 0.95).value_s >= 0.010  # nothing was measured below the first


def test_least_instances_keep_the_promise():
    curve, demand = token_curve(POINTS), TokenDemand(request_hz=100.0, output_tokens=100.0)
    between = QuantileObjective(0.95, 0.025)
    enough = least_instances(curve, demand, between, most=50)
    assert inter_token_latency(curve, demand.token_hz / enough, 0.95).upper_s <= 0.025
    assert inter_token_latency(curve, demand.token_hz / (enough - 1), 0.95).upper_s > 0.025
    assert least_instances(curve, demand, between, most=50, factor=SlownessFactor(1.2, 0.1)) > enough


def test_what_cannot_be_promised():
    curve, demand = token_curve(POINTS), TokenDemand(request_hz=100.0, output_tokens=100.0)
    with pytest.raises(NoFeasibleConfiguration):
        least_instances(curve, demand, QuantileObjective(0.95, 0.005), most=50)
    with pytest.raises(InvalidServingValue, match=r"0\.99 was not measured; take one of 0\.95"):
        inter_token_latency(curve, 1.0, 0.99)
    with pytest.raises(InvalidServingValue, match="points"):
        token_curve([])
    with pytest.raises(InvalidServingValue, match="quantile"):
        token_curve([_point(1, 10.0, 0.01), Point("m", Configuration("h100", batch=2), 20.0, {0.5: 0.01})])
