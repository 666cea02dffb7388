"""Token promises on curves worked out by hand."""

import math

import pytest

from eelgrid_controller.objectives.services.service_model import (
    CURVE_ERROR,
    PrefillCost,
    TokenDemand,
    first_token_latency,
    inter_token_latency,
    least_instances,
    token_curve,
)
from eelgrid_controller.profiles.points import Configuration, InvalidServingValue, NoFeasibleConfiguration, Point
from eelgrid_controller.profiles.queueing_model import QuantileObjective, SlownessFactor, erlang_c


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


def test_the_first_token_is_unknown_without_the_cost_of_a_prompt():
    demand = TokenDemand(request_hz=2.0, output_tokens=200.0)
    found = first_token_latency(token_curve(POINTS), demand, 1, 0.95, None)
    assert found.estimate is None
    assert "not measured" in found.why_none


def test_the_first_token_waits_for_a_place_and_its_prompt():
    """Few requests: no wait; the prompt and a step remain."""
    curve, prefill = token_curve(POINTS), PrefillCost(token_s=1e-4, fixed_s=0.01)
    few = TokenDemand(request_hz=0.5, output_tokens=100.0, context_tokens=1000.0, context_cv2=0.0)
    assert first_token_latency(curve, few, 1, 0.95, prefill).estimate.value_s == pytest.approx(
        0.01 + 0.1 + 4 / 400, rel=1e-6
    )
    # Nearly all places taken: 100 sequences, each held for 400 tokens x 25 ms.
    many = few._replace(request_hz=9.9, output_tokens=400.0)
    crowded = first_token_latency(curve, many, 1, 0.95, prefill).estimate.value_s
    assert crowded > 0.12
    assert erlang_c(100, 9.9 * 400 * 0.025) > 0.05
    assert first_token_latency(curve, many._replace(request_hz=11.0), 1, 0.95, prefill).estimate.value_s == math.inf
    assert first_token_latency(curve, many, 2, 0.95, prefill).estimate.value_s < crowded


def test_least_instances_keep_both_promises():
    curve, demand = token_curve(POINTS), TokenDemand(request_hz=100.0, output_tokens=100.0)
    between = QuantileObjective(0.95, 0.025)
    enough = least_instances(curve, demand, between, most=50)
    assert inter_token_latency(curve, demand.token_hz / enough, 0.95).upper_s <= 0.025
    assert inter_token_latency(curve, demand.token_hz / (enough - 1), 0.95).upper_s > 0.025
    assert least_instances(curve, demand, between, most=50, factor=SlownessFactor(1.2, 0.1)) > enough
    both = least_instances(
        curve,
        demand,
        between,
        most=50,
        first_token_objective=QuantileObjective(0.95, 0.05),
        prefill=PrefillCost(1e-4, 0.01),
    )
    assert both >= enough


def test_what_cannot_be_promised():
    curve, demand = token_curve(POINTS), TokenDemand(request_hz=100.0, output_tokens=100.0)
    with pytest.raises(NoFeasibleConfiguration):
        least_instances(curve, demand, QuantileObjective(0.95, 0.005), most=50)
    with pytest.raises(InvalidServingValue, match="prefill"):
        least_instances(
            curve, demand, QuantileObjective(0.95, 0.1), most=50, first_token_objective=QuantileObjective(0.95, 1.0)
        )
    with pytest.raises(InvalidServingValue, match=r"0\.99 was not measured; take one of 0\.95"):
        inter_token_latency(curve, 1.0, 0.99)
    with pytest.raises(InvalidServingValue, match="points"):
        token_curve([])
    with pytest.raises(InvalidServingValue, match="quantile"):
        token_curve([_point(1, 10.0, 0.01), Point("m", Configuration("h100", batch=2), 20.0, {0.5: 0.01})])
