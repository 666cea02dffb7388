"""A quantile read from a histogram is a range of factors: it holds, bounds and frees the correction."""

import math
from dataclasses import replace

import pytest
from tests.builders.objectives import build_metrics_window

from eelgrid_controller.objectives.services.autoscaler import (
    AutoscalerTarget,
    ScalingLimits,
    on_ready_replicas,
    on_window,
    start_autoscaler,
)
from eelgrid_controller.objectives.services.service_metrics import LiveDistribution, LiveQuantile
from eelgrid_controller.objectives.services.service_model import (
    FACTOR_BOUND,
    ServiceCalibration,
    SlownessSample,
    TokenCurve,
    TokenDemand,
    TokenService,
    calibration_factor,
    inter_token_latency,
    sample_quantile,
    sample_slowness,
    token_rate_hz,
    update_calibration,
)
from eelgrid_controller.profiles.queueing_model import ArrivalProcess, QuantileObjective, ServiceStation

VLLM_S = (0.01, 0.025, 0.05, 0.075, math.inf)
CURVE = TokenCurve((8.0, 16.0, 32.0, 64.0), (1000.0, 1900.0, 3300.0, 5000.0), {0.95: (0.008, 0.010, 0.013, 0.018)})


def _service(objective_s=0.025):
    return TokenService(CURVE, TokenDemand(0.0, 200.0), QuantileObjective(0.95, objective_s))


def _window(token_hz, counts, sum_s=None):
    live = LiveDistribution(VLLM_S, counts, sum_s=sum_s)
    return build_metrics_window(token_hz / 200.0, inter_token=live, running=10.0, output_token_hz=token_hz)


def test_a_profile_within_its_bucket_is_not_taught_that_it_is_slow():
    """True p95 of 11 ms, read in a straight line between 10 and 25 ms, seems to be 24."""
    model, correction = _service(), ServiceCalibration()
    window = _window(2600.0, (5.0, 100_000.0, 100_000.0, 100_000.0, 100_000.0))
    assert model.live_quantile(window).value_s > 0.024
    for number in range(200):
        correction = update_calibration(correction, model.sample_steady(window, 1), 30.0 * number)
    known = calibration_factor(correction, 6000.0)
    assert known.value == pytest.approx(1.0)
    assert known.error <= 0.15 + 1e-9


@pytest.mark.parametrize(
    ("start", "end"),
    [(0.7, 0.9), (1.0, 1.0), (2.0, 1.3)],
)
def test_a_factor_outside_goes_to_the_nearer_end_and_one_inside_stays(start, end):
    correction = ServiceCalibration(0.0, math.log(start), 0.1, 5)
    for number in range(60):
        correction = update_calibration(correction, SlownessSample(0.9, 0.0, most=1.3), 30.0 * (number + 1))
    assert calibration_factor(correction, 1800.0).value == pytest.approx(end, rel=1e-3)


def test_a_factor_that_explains_what_is_seen_does_not_fade():
    correction = ServiceCalibration(0.0, math.log(1.3), 0.1, 5)
    for number in range(120):
        correction = update_calibration(correction, SlownessSample(1.2, 0.0, most=2.0), 30.0 * (number + 1))
    assert calibration_factor(correction, 3600.0).value == pytest.approx(1.3)


def test_a_narrow_range_makes_it_sure():
    wide = narrow = ServiceCalibration()
    for number in range(40):
        wide = update_calibration(wide, SlownessSample(0.5, 0.0, most=2.0), 30.0 * (number + 1))
        narrow = update_calibration(narrow, SlownessSample(0.98, 0.0, most=1.02), 30.0 * (number + 1))
    assert calibration_factor(wide, 1200.0).error == pytest.approx(0.15)
    assert calibration_factor(narrow, 1200.0).error < 0.03


def test_the_range_is_that_of_the_bucket():
    live = LiveDistribution((0.1, 0.2, math.inf), (50.0, 100.0, 100.0)).quantile(0.9)
    assert live.bucket_s == (0.1, 0.2)
    station = ServiceStation(servers=4, service_s=0.05, service_cv2=0.5)
    sample = sample_slowness(station, ArrivalProcess(20.0), 0.9, live)
    assert sample.factor < sample.most
    for border_s, found in zip(live.bucket_s, (sample.factor, sample.most), strict=True):
        alone = sample_slowness(station, ArrivalProcess(20.0), 0.9, LiveQuantile(border_s, 1e6, 0.0))
        assert found == pytest.approx(alone.factor, rel=2e-3)


def test_nothing_read_is_no_sample():
    assert sample_quantile(lambda _: 1.0, 0.95, None) is None


def test_a_bucket_above_the_objective_is_a_broken_promise():
    """Read in a straight line it may seem to be in time by less than half a bucket."""
    window = _window(5000.0, (0.0, 94_000.0, 100_000.0, 100_000.0, 100_000.0))
    assert _service().live_quantile(window).value_s * (1.0 - _service().live_quantile(window).resolution) < 0.025
    assert _service().is_late(window)
    assert not _service(0.05).is_late(window)


def _slow_window(slow, held):
    """An engine that is so much slower and holds so many sequences; all its tokens in the bucket of its p95."""
    token_hz = token_rate_hz(CURVE, held) / slow
    p95_s = slow * inter_token_latency(CURVE, slow * token_hz, 0.95).value_s
    counts = tuple(0.0 if border_s < p95_s else 100_000.0 for border_s in VLLM_S)
    return _window(token_hz, counts, sum_s=counts[-1] * held / token_hz)


@pytest.mark.parametrize("slow", [0.9, 1.0, 1.1, 1.3])
@pytest.mark.parametrize("held", [4.0, 16.0, 40.0])
def test_the_mean_reports_within_a_bucket_how_slow_an_engine_is(slow, held):
    reading = _service().read_curve(_slow_window(slow, held), 1)
    assert reading.sequences == pytest.approx(held)
    assert reading.log_rate == pytest.approx(-math.log(slow))
    low, high = reading.log_latency
    assert low <= math.log(slow) <= high


def _mean_window(counts):
    """16 sequences, as the profile says, and tokens in other buckets."""
    token_hz = token_rate_hz(CURVE, 16.0)
    return _window(token_hz, counts, sum_s=counts[-1] * 16.0 / token_hz)


def test_a_bucket_without_a_measured_level_bounds_the_quantile():
    p95_s = 0.010 + 4.0 / 16.0 * 0.003  # at 20 sequences
    late = _service().read_curve(_mean_window((5.0, 5.0, 100_000.0, 100_000.0, 100_000.0)), 1)
    assert late.log_latency == pytest.approx((math.log(0.025 / p95_s), math.log(FACTOR_BOUND)))
    early = _service().read_curve(_mean_window((100_000.0,) * 5), 1)
    assert early.log_latency == pytest.approx((-math.log(FACTOR_BOUND), math.log(0.01 / p95_s)))


def test_the_share_up_to_a_border_reports_the_quantile_by_the_measured_levels():
    """97 % within 25 ms, where the profile's p97 is half way between its p95 and its p99."""
    times = {0.95: (0.020,) * 4, 0.99: (0.024,) * 4}
    model = TokenService(replace(CURVE, inter_token_s=times), TokenDemand(0.0, 200.0), QuantileObjective(0.95, 0.025))
    reading = model.read_curve(_mean_window((10.0, 97_000.0, 100_000.0, 100_000.0, 100_000.0)), 1)
    assert reading.log_latency == pytest.approx((math.log(0.025 / 0.022),) * 2)


def test_in_overload_the_tokens_are_the_rate_of_the_most_sequences():
    window = replace(_window(4000.0, (0.0, 0.0, 1e5, 1e5, 1e5), sum_s=6e3), waiting=500.0, waiting_growth=300.0)
    reading = _service().read_curve(window, 1)
    assert (reading.sequences, reading.log_latency) == (64.0, None)
    assert reading.log_rate == pytest.approx(math.log(4000.0 / 5000.0))


def test_servers_without_a_mean_are_calibrated_by_a_factor():
    calibration = _service().calibrate(ServiceCalibration(), _window(2600.0, (5.0, 1e5, 1e5, 1e5, 1e5)), 1, 30.0)
    assert calibration.curve is None
    assert calibration.samples == 1


def test_windows_make_the_curve_sure_and_a_window_without_a_mean_changes_nothing():
    """Nine sequences and 97 % of the tokens within the objective, which is a border: as the profile says."""
    times = {0.95: (0.008, 0.010, 0.013, 0.018), 0.99: (0.0096, 0.012, 0.0156, 0.0216)}
    usual, promised = TokenDemand(0.0, 200.0), QuantileObjective(0.95, 0.010)
    model, known = TokenService(replace(CURVE, inter_token_s=times), usual, promised), ServiceCalibration()
    token_hz = token_rate_hz(CURVE, 9.0)
    window = _window(token_hz, (97_222.0, 1e5, 1e5, 1e5, 1e5), sum_s=1e5 * 9.0 / token_hz)
    rates_hz = (50.0, 400.0)
    first = [model.needed_replicas(rate_hz, calibration_factor(known, 0.0), 500) for rate_hz in rates_hz]
    for number in range(40):
        known = model.calibrate(known, window, 1, 30.0 * number)
    assert known.log_factor == pytest.approx(0.0, abs=1e-3)
    sure, factor = model.calibrated(known, 1200.0)
    later = [sure.needed_replicas(rate_hz, factor, 500) for rate_hz in rates_hz]
    assert all(now < before for now, before in zip(later, first, strict=True))
    assert model.calibrate(known, _window(2600.0, (5.0, 1e5, 1e5, 1e5, 1e5)), 1, 1230.0) == known


def test_a_curve_with_other_points_is_learned_anew():
    known = _service().calibrate(ServiceCalibration(), _slow_window(1.3, 24.0), 1, 30.0)
    other = replace(
        _service(), curve=TokenCurve(CURVE.sequences[1:], CURVE.token_hz[1:], {0.95: (0.010, 0.013, 0.018)})
    )
    assert other.calibrated(known, 60.0)[0] is other
    assert other.calibrate(known, _slow_window(1.0, 24.0), 1, 60.0).curve.knots == CURVE.sequences[1:]


def _watched(replicas=4):
    promised = AutoscalerTarget(_service(), ScalingLimits(most=20, start_s=30.0))
    watch = start_autoscaler(promised, replicas)
    for number in range(1, 9):
        watch, _ = on_window(promised, watch, _of(watch.state.ready, 1.0), 30.0 * number)
    return promised, watch


def _of(replicas, slow):
    """A window of so many replicas."""
    one = _slow_window(slow, 20.0)
    return replace(one, output_token_hz=one.output_token_hz * replicas, arrived_hz=one.arrived_hz * replicas)


def test_a_window_in_which_replicas_came_says_nothing_of_the_profile():
    promised, watch = _watched()
    watch = on_ready_replicas(promised, watch, 5, 250.0)
    across, _ = on_window(promised, watch, _of(3, 1.0), 270.0)
    assert across.correction == watch.correction
    after, _ = on_window(promised, across, _of(5, 1.3), 300.0)
    assert after.correction.log_factor > watch.correction.log_factor


def test_what_was_seen_while_replicas_were_lost_is_unlearned():
    promised, watch = _watched()
    before = watch.correction
    watch, _ = on_window(promised, watch, _of(4, 1.5), 270.0)  # two of four are gone, and nobody knows
    assert watch.correction.log_factor > before.log_factor
    assert on_ready_replicas(promised, watch, 2, 280.0).correction == before
    assert on_ready_replicas(promised, watch, 2, 400.0).correction == watch.correction  # that was long ago
    assert on_ready_replicas(promised, watch, 5, 280.0).correction == watch.correction  # one more is no loss
