"""The scaler, event by event."""

import itertools
import math

import pytest

from eelgrid_controller.objectives.services.autoscaler import (
    FORECAST_RATIO_MOST,
    RESERVE_MOST,
    RESERVE_PERIOD_S,
    RESERVE_STEP,
    LoadObserved,
    RateReserve,
    RateTrend,
    ReplicaScaler,
    ReplicasReady,
    ScalerPhase,
    ScalerTick,
    ScalingLimits,
    decay_reserve,
    forecast_rate,
    raise_reserve,
    update_trend,
)
from eelgrid_controller.profiles.points import InvalidServingValue
from eelgrid_controller.profiles.queueing_model import (
    ArrivalProcess,
    QuantileObjective,
    ServiceStation,
    latency_quantile,
    least_replicas,
)


def _scaler(**limits):
    return ReplicaScaler(ScalingLimits(**limits), lambda rate_hz: math.ceil(rate_hz / 10.0))


def _steady(scaler, rate_hz, windows=40, *, begun=None, **facts):
    state = scaler.initial_state(math.ceil(rate_hz / 10.0) if begun is None else begun)
    for number in range(windows):
        state, _ = scaler.scale_replicas(state, LoadObserved(15.0 * (number + 1), rate_hz, **facts))
        state, _ = scaler.scale_replicas(state, ReplicasReady(15.0 * (number + 1), state.target))
    return state, 15.0 * windows


def test_it_rises_at_once_and_says_why():
    scaler = _scaler()
    state, at_s = _steady(scaler, 40.0)
    state, decision = scaler.scale_replicas(state, LoadObserved(at_s + 15.0, 80.0))
    assert decision.replicas >= 8
    assert decision.reason.startswith("up: ")
    assert state.phase is ScalerPhase.RISING
    state, decision = scaler.scale_replicas(state, ReplicasReady(at_s + 60.0, state.target))
    assert state.phase is ScalerPhase.STEADY
    assert "serve" in decision.reason


def test_a_rise_is_bounded_within_one_start():
    scaler = _scaler(start_s=60.0, rise=2.0)
    state, at_s = _steady(scaler, 20.0)
    first = state.target
    most = 2 * first + 2
    for number in range(1, 5):
        state, decision = scaler.scale_replicas(state, LoadObserved(at_s + 15.0 * number, 2000.0))
        assert state.target <= most
        assert f"{most} at most for now" in decision.reason
    state, _ = scaler.scale_replicas(state, LoadObserved(at_s + 90.0, 2000.0))
    assert state.target == min(64, 2 * most + 2)


def test_what_waits_is_served_beside_what_comes():
    scaler = _scaler(drain_s=30.0)
    state, at_s = _steady(scaler, 40.0)
    # The output has stalled at what four replicas give; arrivals are counted, and 1500 wait.
    state, decision = scaler.scale_replicas(
        state, LoadObserved(at_s + 15.0, 40.0, waiting=1500.0, waiting_growth=600.0)
    )
    assert state.target == 4 + 5
    assert "1500 wait" in decision.reason


def test_a_broken_promise_asks_for_one_more_a_start():
    scaler = _scaler(start_s=60.0)
    state, at_s = _steady(scaler, 40.0)
    targets = []
    for number in range(1, 9):
        state, decision = scaler.scale_replicas(state, LoadObserved(at_s + 15.0 * number, 40.0, is_promise_broken=True))
        targets.append(state.target)
        assert "the promise is broken" in decision.reason or number not in {1, 5}
    assert targets == [5] * 4 + [6] * 4


def test_it_falls_late_little_and_never_in_the_dark():
    scaler = _scaler(hold_s=60.0, cool_s=30.0, fall=0.25)
    state, at_s = _steady(scaler, 400.0)
    high = state.target
    falls = []
    for number in range(1, 41):
        state, decision = scaler.scale_replicas(state, LoadObserved(at_s + 15.0 * number, 50.0))
        falls.append((state.target, decision.reason))
    assert falls[2][0] == high  # still within the look-back
    dropped = [a - b for (a, _), (b, _) in itertools.pairwise(falls) if b < a]
    assert max(dropped) <= high // 4
    assert any(reason.startswith("down: ") for _, reason in falls)
    assert any("cooling" in reason for _, reason in falls)
    state, decision = scaler.scale_replicas(state, ScalerTick(at_s + 3000.0))
    assert state.phase is ScalerPhase.BLIND
    assert "blind" in decision.reason


def test_a_young_scaler_takes_nothing_away():
    scaler = _scaler(hold_s=300.0)
    state, _ = _steady(scaler, 10.0, windows=15, begun=30)
    assert state.target == 30
    state, _ = _steady(scaler, 10.0, windows=60, begun=30)
    assert state.target < 30


@pytest.mark.parametrize("event", [LoadObserved(10.0, math.nan), LoadObserved(10.0, -1.0), LoadObserved(15.0, 900.0)])
def test_a_window_that_is_none_changes_nothing(event):
    scaler = _scaler()
    state, _ = _steady(scaler, 40.0, windows=1)
    after, decision = scaler.scale_replicas(state, event)
    assert after == state
    assert "nothing changes" in decision.reason


def test_a_tick_in_time_is_nothing():
    scaler = _scaler()
    state, at_s = _steady(scaler, 40.0)
    assert scaler.scale_replicas(state, ScalerTick(at_s + 59.0))[0] is state
    fresh = scaler.initial_state(3)
    assert scaler.scale_replicas(fresh, ScalerTick(1e9))[0] is fresh  # nothing was ever known: nothing is stale


def test_with_the_queueing_model_the_promise_is_kept():
    """The loop closed: what the scaler asks for keeps the objective at the rate that it saw."""
    replica, promise = ServiceStation(servers=2, service_s=0.2, service_cv2=0.5), QuantileObjective(0.95, 0.6)
    scaler = ReplicaScaler(
        ScalingLimits(), lambda rate_hz: least_replicas(replica, ArrivalProcess(rate_hz), promise, most=1000)
    )
    state, at_s = scaler.initial_state(1), 0.0
    for rate_hz in (5.0, 20.0, 20.0, 20.0, 80.0, 80.0, 80.0, 80.0, 80.0, 80.0, 80.0, 80.0):
        at_s += 30.0
        state, _ = scaler.scale_replicas(state, LoadObserved(at_s, rate_hz))
    assert latency_quantile(replica.replicated(state.target), ArrivalProcess(80.0), 0.95).upper_s <= 0.6


@pytest.mark.parametrize(
    "limits",
    [{"least": 5, "most": 4}, {"hold_s": 0.0}, {"rise": 0.5}, {"fall": 0.0}, {"band": -0.1}, {"start_s": -1.0}],
)
def test_limits_that_forbid_all_change_are_refused(limits):
    with pytest.raises(InvalidServingValue):
        ScalingLimits(**limits)


def test_the_forecast_follows_a_ramp_and_keeps_a_level():
    trend = RateTrend()
    for number in range(60):
        trend = update_trend(trend, 100.0 + number, 10.0 * number)
    assert forecast_rate(trend, 60.0).rate_hz == pytest.approx(159.0 + 6.0, rel=0.03)
    for number in range(60, 120):
        trend = update_trend(trend, 159.0, 10.0 * number)
    assert forecast_rate(trend, 60.0).rate_hz == pytest.approx(159.0, rel=0.03)
    falling = trend
    for number in range(120, 150):
        falling = update_trend(falling, 159.0 - 4.0 * (number - 119), 10.0 * number)
    assert forecast_rate(falling, 600.0).rate_hz >= falling.level_hz  # a trend downward is not believed


def test_the_forecast_is_bounded_and_sees_a_step():
    trend = RateTrend()
    for number in range(30):
        trend = update_trend(trend, 10.0, 10.0 * number)
    trend = update_trend(trend, 100.0, 300.0)
    assert 100.0 <= forecast_rate(trend, 1e6).upper_hz <= FORECAST_RATIO_MOST * 100.0
    assert update_trend(trend, 5.0, 299.0) is trend
    assert forecast_rate(RateTrend(), 60.0) == (0.0, 0.0)


def test_a_broken_promise_is_answered_with_a_reserve_that_stays_when_the_burst_is_over():
    scaler = _scaler(start_s=60.0)
    state, at_s = _steady(scaler, 99.0)
    assert state.target == 10
    broken = LoadObserved(at_s + 15.0, 99.0, is_promise_broken=True)
    state, decision = scaler.scale_replicas(state, broken)
    assert state.reserve.share == RESERVE_STEP
    assert f"; {100.0 * RESERVE_STEP:.0f} % in reserve, as its promise was broken" in decision.reason
    state, decision = scaler.scale_replicas(state, LoadObserved(at_s + 1000.0, 199.0))
    assert decision.replicas >= math.ceil(19.9 * (1.0 + 0.9 * RESERVE_STEP))


def test_a_burst_raises_the_reserve_once_while_replicas_start():
    scaler = _scaler(start_s=60.0)
    state, at_s = _steady(scaler, 40.0)
    for number in range(1, 5):
        state, _ = scaler.scale_replicas(state, LoadObserved(at_s + 15.0 * number, 40.0, is_promise_broken=True))
    assert state.reserve.share == pytest.approx(RESERVE_STEP, rel=1e-3)
    state, _ = scaler.scale_replicas(state, LoadObserved(at_s + 90.0, 40.0, is_promise_broken=True))
    assert state.reserve.share == pytest.approx(2.0 * RESERVE_STEP, rel=1e-3)


def test_a_period_without_a_broken_promise_takes_one_step_of_the_reserve_away():
    once = raise_reserve(RateReserve(), 100.0)
    twice = raise_reserve(once, 200.0)
    assert decay_reserve(twice, 200.0 + RESERVE_PERIOD_S).share == pytest.approx(twice.share - RESERVE_STEP)
    assert decay_reserve(once, 100.0 + 2.0 * RESERVE_PERIOD_S).share == 0.0
    assert decay_reserve(twice, 50.0) == twice  # time that went back changes nothing


def test_the_reserve_is_bounded():
    reserve = RateReserve()
    for number in range(100):
        reserve = raise_reserve(reserve, 60.0 * number)
    assert reserve.share == RESERVE_MOST


def test_what_a_lost_replica_breaks_raises_no_reserve():
    scaler = _scaler(start_s=60.0)
    state, at_s = _steady(scaler, 40.0)
    target = state.target
    state, _ = scaler.scale_replicas(state, LoadObserved(at_s + 15.0, 40.0, is_promise_broken=True))
    assert state.reserve.share > 0.0  # nobody has seen the loss yet
    state, _ = scaler.scale_replicas(state, ReplicasReady(at_s + 20.0, target - 2))
    assert state.reserve.share == 0.0
    state, _ = scaler.scale_replicas(state, LoadObserved(at_s + 90.0, 40.0, is_promise_broken=True))
    assert state.reserve.share == 0.0  # until others serve
    state, _ = scaler.scale_replicas(state, ReplicasReady(at_s + 95.0, state.target))
    state, _ = scaler.scale_replicas(state, LoadObserved(at_s + 180.0, 40.0, is_promise_broken=True))
    assert state.reserve.share > 0.0


def test_a_service_at_its_most_replicas_gathers_no_reserve():
    scaler = _scaler(most=4)
    state, at_s = _steady(scaler, 90.0, begun=4)
    assert state.target == 4
    state, _ = scaler.scale_replicas(state, LoadObserved(at_s + 15.0, 90.0, is_promise_broken=True))
    assert state.reserve.share == 0.0
