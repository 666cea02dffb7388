"""The curve conditioned on windows: the profile without any, the live curve with many, monotone, never out of bounds."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_controller.objectives.services.live_curve import (
    KNOTS_MOST,
    LOG_BOUND,
    CurvePosterior,
    CurveReading,
    condition_curve,
    curve_departure,
    curve_knots,
    start_posterior,
)
from eelgrid_controller.objectives.services.service_model import (
    ServiceCalibration,
    TokenCurve,
    TokenDemand,
    TokenService,
    calibration_factor,
)
from eelgrid_controller.profiles.queueing_model import QuantileObjective

SEQUENCES = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
CURVE = TokenCurve(
    SEQUENCES,
    (700.0, 1300.0, 2300.0, 3800.0, 5600.0, 7000.0),
    {0.5: (0.009, 0.010, 0.012, 0.015, 0.021, 0.034), 0.95: (0.012, 0.013, 0.016, 0.021, 0.030, 0.049)},
)
MODEL = TokenService(CURVE, TokenDemand(0.0, 200.0), QuantileObjective(0.95, 0.05))
OFF = st.floats(-0.15, 0.15)
SHAPES = st.lists(st.tuples(OFF, OFF), min_size=len(SEQUENCES), max_size=len(SEQUENCES))
LOGS = st.floats(-LOG_BOUND, LOG_BOUND)


def _range(ends: tuple[float, float]) -> tuple[float, float]:
    return min(ends), max(ends)


READINGS = st.builds(
    CurveReading,
    sequences=st.floats(0.1, 300.0),
    log_rate=LOGS | st.none(),
    rate_error=st.floats(0.001, 0.5),
    latency_at=st.floats(0.1, 300.0),
    log_latency=st.tuples(LOGS, LOGS).map(_range) | LOGS.map(lambda one: (one, one)) | st.none(),
    latency_error=st.floats(0.001, 0.5),
)
STEPS = st.lists(st.tuples(READINGS, st.floats(-60.0, 100_000.0)), max_size=25)


def _exact(at: int, shape: list[tuple[float, float]]) -> CurveReading:
    """A window at a measured concurrency of an engine that is off by `shape`."""
    rate, latency = shape[at]
    return CurveReading(SEQUENCES[at], rate, 0.03, SEQUENCES[at], (latency, latency), 0.02)


def _played(steps: list[tuple[CurveReading, float]]) -> tuple[CurvePosterior, float]:
    known, now_s = start_posterior(SEQUENCES, 0.0), 0.0
    for reading, gap_s in steps:
        now_s += gap_s
        known = condition_curve(known, reading, now_s)
    return known, now_s


@settings(deadline=None)
@given(st.floats(0.0, 1e7))
def test_without_a_window_the_curve_is_the_profile(now_s):
    live = curve_departure(start_posterior(SEQUENCES, 0.0), (1.0, *SEQUENCES, 1000.0), now_s)
    assert (live.log_rate == 0.0).all()
    assert (live.log_latency == 0.0).all()
    assert (live.rate_sd > 0.1).all()
    model, factor = MODEL.calibrated(ServiceCalibration(), now_s)
    assert model is MODEL
    assert factor == calibration_factor(ServiceCalibration(), now_s)


@settings(deadline=None, max_examples=20)
@given(SHAPES)
def test_with_many_windows_the_curve_is_the_live_one(shape):
    known = start_posterior(SEQUENCES, 0.0)
    for number in range(240):
        known = condition_curve(known, _exact(number % len(SEQUENCES), shape), 30.0 * number)
    live = curve_departure(known, SEQUENCES, 30.0 * 240)
    assert np.abs(live.log_rate - [rate for rate, _ in shape]).max() < 0.02
    assert np.abs(live.log_latency - [latency for _, latency in shape]).max() < 0.02
    assert live.rate_sd.max() < 0.02
    assert live.latency_sd.max() < 0.02


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_whatever_is_read_it_stays_finite_bounded_and_monotone(steps):
    known, now_s = _played(steps)
    covariance = np.array(known.covariance).reshape(len(known.mean), -1)
    assert np.isfinite(known.mean).all()
    assert np.linalg.eigvalsh(covariance).min() > -1e-6
    assert abs(known.log_factor) <= LOG_BOUND
    calibration = ServiceCalibration(known.at_s, known.log_factor, known.error, 1, known)
    model, factor = MODEL.calibrated(calibration, now_s)
    assert all(low <= high for low, high in pairwise(model.curve.token_hz))
    for times in model.curve.inter_token_s.values():
        assert all(0.0 < low <= high for low, high in pairwise(times))
    needed = [model.needed_replicas(rate_hz, factor, 500) for rate_hz in (0.0, 1.0, 5.0, 25.0, 125.0, 625.0)]
    assert needed == sorted(needed)


@settings(deadline=None, max_examples=60)
@given(STEPS, READINGS)
def test_the_same_windows_give_the_same_state(steps, reading):
    assert _played([*steps, (reading, 30.0)]) == _played([*steps, (reading, 30.0)])


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_what_is_known_goes_back_to_the_profile(steps):
    known, now_s = _played(steps)
    start = curve_departure(start_posterior(SEQUENCES, 0.0), SEQUENCES, 0.0)
    later = curve_departure(known, SEQUENCES, max(now_s, known.at_s) + 1e8)
    assert later.log_rate == pytest.approx(0.0, abs=1e-6)
    assert later.latency_sd == pytest.approx(start.latency_sd, rel=1e-6)


@settings(deadline=None)
@given(st.floats(-0.5, -1e-3), st.floats(1e-3, 0.5), st.floats(1.0, 256.0))
def test_a_range_that_explains_what_is_expected_moves_nothing_and_says_nothing_twice(low, high, sequences):
    reading = CurveReading(sequences, None, 0.0, sequences, (low, high), 0.02)
    once = condition_curve(start_posterior(SEQUENCES, 0.0), reading, 0.0)
    twice = condition_curve(once, reading, 0.0)
    assert once.mean == pytest.approx((0.0,) * len(once.mean), abs=1e-9)
    assert np.allclose(once.covariance, twice.covariance, atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(
    st.floats(-0.1, 0.1), st.floats(-0.05, 0.05), st.floats(-0.03, 0.03), st.permutations(range(5)), st.integers(0, 99)
)
def test_a_smooth_error_is_predicted_no_worse_than_by_a_factor(constant, tilt, bend, visited, seed):
    """A factor follows the newest load alone and knows nothing of the others."""
    rng = np.random.default_rng(seed)
    x = np.linspace(-1.0, 1.0, len(SEQUENCES))
    truth = constant + tilt * x + bend * x**2
    known, factor = start_posterior(SEQUENCES, 0.0), 0.0
    for number, at in enumerate(np.repeat(visited[:3], 20)):
        seen = float(truth[at] + 0.01 * rng.standard_normal())
        known = condition_curve(known, CurveReading(SEQUENCES[at], seen, 0.03), 30.0 * number)
        factor += 0.46 * (seen - factor)
    live = curve_departure(known, SEQUENCES, 30.0 * 60)
    by_curve = math.sqrt(float(np.mean((live.log_rate - truth) ** 2)))
    by_factor = math.sqrt(float(np.mean((factor - truth) ** 2)))
    assert by_curve <= by_factor + 0.01


def test_a_service_that_becomes_slower_is_followed_within_minutes():
    """Its shape is well known by then, so all of it is slowness."""
    known = start_posterior(SEQUENCES, 0.0)
    for number in range(200):
        at = SEQUENCES[number // 10 % 5]
        known = condition_curve(known, CurveReading(at, 0.0, 0.03), 30.0 * number)
    for number in range(200, 210):
        known = condition_curve(known, CurveReading(SEQUENCES[2], -0.12, 0.03), 30.0 * number)
    assert known.log_factor > 0.08
    live = curve_departure(known, SEQUENCES[:5], 30.0 * 210)
    assert live.log_rate == pytest.approx(-0.12, abs=0.04)


def test_knots_are_the_measured_ones_and_no_more_than_the_bound():
    assert curve_knots(SEQUENCES) == SEQUENCES
    many = curve_knots([float(one) for one in range(1, 1001)])
    assert len(many) == KNOTS_MOST
    assert (many[0], many[-1]) == (1.0, 1000.0)
    assert all(low < high for low, high in pairwise(many))
