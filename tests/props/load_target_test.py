"""Replicas that follow a load, against whatever comes: the fewest that carry it, and none that waits for long."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.objectives import build_metrics_window

from eelgrid_controller.objectives.services.autoscaler import (
    AutoscalerTarget,
    ScalingLimits,
    on_ready_replicas,
    on_window,
    start_autoscaler,
)
from eelgrid_controller.objectives.services.service_model import UNCORRECTED, LoadService
from eelgrid_protos.messages import LoadMetric

WINDOW_S, TOKENS = 15.0, 100.0
LOADS = st.just(0.0) | st.floats(1e-6, 1e6)
MOST = 40


@given(
    LOADS,
    LOADS,
    st.floats(1e-3, 1e5),
    st.integers(1, 1000),
    st.sampled_from([*LoadMetric][1:]),
)
@settings(deadline=None)
def test_the_fewest_replicas_carry_a_load_and_more_load_never_needs_fewer(load, other, each, most, metric):
    service = LoadService(metric, each)
    few = service.needed_replicas(load, UNCORRECTED, most)
    assert few == most or few * each >= load * (1.0 - 1e-8)
    assert few == 0 or (few - 1) * each < load
    least, largest = sorted((load, other))
    assert service.needed_replicas(least, UNCORRECTED, most) <= service.needed_replicas(largest, UNCORRECTED, most)


@given(
    rates=st.lists(st.floats(0.0, 60.0), min_size=1, max_size=6),
    metric=st.sampled_from([LoadMetric.REQUESTS, LoadMetric.TOKENS, LoadMetric.IN_FLIGHT]),
    share=st.floats(0.3, 1.5),
)
@settings(deadline=None, max_examples=25)
def test_whatever_comes_the_number_settles_at_the_load_and_nothing_waits(rates, metric, share):
    """Replicas of 4 requests a second, which take 2 s each: 8 at once. `share` of that is the target of each.

    Above 1 no replica can give what is asked of it, and of tokens and requests only those that wait tell.
    """
    capacity_hz, took_s = 4.0, 2.0
    each = (
        share
        * capacity_hz
        * {LoadMetric.REQUESTS: 1.0, LoadMetric.TOKENS: TOKENS, LoadMetric.IN_FLIGHT: took_s}[metric]
    )
    promised = AutoscalerTarget(
        LoadService(metric, each), ScalingLimits(most=MOST, start_s=WINDOW_S, hold_s=120.0, cool_s=15.0)
    )
    watch, replicas, waiting, now_s = start_autoscaler(promised, 1), 1, 0.0, 0.0
    for rate_hz in rates:
        for _ in range(300):
            now_s += WINDOW_S
            before = waiting
            served_hz = min(replicas * capacity_hz, rate_hz + waiting / WINDOW_S)
            waiting = max(0.0, waiting + (rate_hz - served_hz) * WINDOW_S)
            window = build_metrics_window(
                rate_hz,
                seconds=WINDOW_S,
                waiting=waiting,
                growth=waiting - before,
                finished_hz=served_hz,
                running=served_hz * took_s,
                output_token_hz=served_hz * TOKENS,
            )
            watch, advice = on_window(promised, watch, window, now_s)
            replicas = advice.decision.replicas
            watch = on_ready_replicas(promised, watch, replicas, now_s)
        needed = max(1.0, rate_hz / capacity_hz / share)
        assert replicas >= min(MOST, math.floor(max(1.0, rate_hz / capacity_hz)))
        # Where a replica can give what it is to carry with some room, nothing waits, and few are too many.
        assert replicas <= min(MOST, math.ceil(needed * 1.25) + 1) or share > 0.9
        assert waiting < 1.0 or share > 0.9
