"""A quantile read from a histogram is a range of factors: it holds, bounds and frees the correction."""

import math

import pytest

from eelgrid_controller.serving.correction import Correction, Sample, factor, learned, sampled, slowness
from eelgrid_controller.serving.live import Live, LiveQuantile, Window
from eelgrid_controller.serving.models import Tokens
from eelgrid_controller.serving.sizing import Objective
from eelgrid_controller.serving.stations import Arrivals, Station
from eelgrid_controller.serving.tokens import Curve, TokenDemand

VLLM_S = (0.01, 0.025, 0.05, 0.075, math.inf)
CURVE = Curve((8.0, 16.0, 32.0, 64.0), (1000.0, 1900.0, 3300.0, 5000.0), {0.95: (0.008, 0.010, 0.013, 0.018)})


def _service(objective_s=0.025):
    return Tokens(CURVE, TokenDemand(0.0, 200.0), Objective(0.95, objective_s))


def _window(token_hz, counts):
    live = Live(VLLM_S, counts)
    return Window(
        30.0, None, None, live, None, None, token_hz / 200.0, token_hz / 200.0, 0.0, 0.0, 10.0, token_hz, None
    )


def test_a_profile_within_its_bucket_is_not_taught_that_it_is_slow():
    """True p95 of 11 ms, read in a straight line between 10 and 25 ms, seems to be 24."""
    model, correction = _service(), Correction()
    window = _window(2600.0, (5.0, 100_000.0, 100_000.0, 100_000.0, 100_000.0))
    assert model.live(window).value_s > 0.024
    for number in range(200):
        correction = learned(correction, model.steady(window, 1), 30.0 * number)
    known = factor(correction, 6000.0)
    assert known.value == pytest.approx(1.0)
    assert known.error <= 0.15 + 1e-9


@pytest.mark.parametrize(
    ("start", "end"),
    [(0.7, 0.9), (1.0, 1.0), (2.0, 1.3)],
)
def test_a_factor_outside_goes_to_the_nearer_end_and_one_inside_stays(start, end):
    correction = Correction(0.0, math.log(start), 0.1, 5)
    for number in range(60):
        correction = learned(correction, Sample(0.9, 0.0, most=1.3), 30.0 * (number + 1))
    assert factor(correction, 1800.0).value == pytest.approx(end, rel=1e-3)


def test_a_factor_that_explains_what_is_seen_does_not_fade():
    correction = Correction(0.0, math.log(1.3), 0.1, 5)
    for number in range(120):
        correction = learned(correction, Sample(1.2, 0.0, most=2.0), 30.0 * (number + 1))
    assert factor(correction, 3600.0).value == pytest.approx(1.3)


def test_a_narrow_range_makes_it_sure():
    wide = narrow = Correction()
    for number in range(40):
        wide = learned(wide, Sample(0.5, 0.0, most=2.0), 30.0 * (number + 1))
        narrow = learned(narrow, Sample(0.98, 0.0, most=1.02), 30.0 * (number + 1))
    assert factor(wide, 1200.0).error == pytest.approx(0.15)
    assert factor(narrow, 1200.0).error < 0.03


def test_the_range_is_that_of_the_bucket():
    live = Live((0.1, 0.2, math.inf), (50.0, 100.0, 100.0)).quantile(0.9)
    assert live.bucket_s == (0.1, 0.2)
    station = Station(servers=4, service_s=0.05, service_cv2=0.5)
    sample = slowness(station, Arrivals(20.0), 0.9, live)
    assert sample.factor < sample.most
    for border_s, found in zip(live.bucket_s, (sample.factor, sample.most), strict=True):
        alone = slowness(station, Arrivals(20.0), 0.9, LiveQuantile(border_s, 1e6, 0.0))
        assert found == pytest.approx(alone.factor, rel=2e-3)


def test_nothing_read_is_no_sample():
    assert sampled(lambda _: 1.0, 0.95, None) is None


def test_a_bucket_above_the_objective_is_a_broken_promise():
    """Read in a straight line it may seem to be in time by less than half a bucket."""
    window = _window(5000.0, (0.0, 94_000.0, 100_000.0, 100_000.0, 100_000.0))
    assert _service().live(window).value_s * (1.0 - _service().live(window).resolution) < 0.025
    assert _service().is_late(window)
    assert not _service(0.05).is_late(window)
