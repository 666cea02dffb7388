"""What must hold of every page and every window; and of what a correction makes of them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_controller.objectives.services.service_metrics import (
    LiveDistribution,
    LiveQuantile,
    ScrapePair,
    generic_names,
    parse_exposition,
    service_window,
)
from eelgrid_controller.objectives.services.service_model import (
    FACTOR_BOUND,
    HALF_LIFE_S,
    PRIOR_ERROR,
    ServiceCalibration,
    SlownessSample,
    calibration_factor,
    is_at_bound,
    sample_saturation,
    sample_slowness,
    update_calibration,
)
from eelgrid_controller.profiles.queueing_model import ArrivalProcess, ServiceStation, latency_quantile

NAMES = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,12}", fullmatch=True)
LABELS = st.dictionaries(
    st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True),
    st.text(
        st.characters(blacklist_categories=("Cs",), blacklist_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"),
        max_size=12,
    ),
    max_size=3,
)
VALUES = st.floats(allow_nan=False) | st.integers(-(10**9), 10**9).map(float)


def _escaped(text):
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(NAMES, LABELS, VALUES), max_size=12))
def test_what_is_written_is_read(samples):
    lines = []
    for name, labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        shown = {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, repr(value))
        lines.append(f"{name}{{{inside}}} {shown}" if labels else f"{name} {shown}")
    page = parse_exposition("\n".join(lines), 0.0)
    found = sorted((s.name, s.labels, s.value) for each in page.samples.values() for s in each)
    assert found == sorted((name, tuple(sorted(labels.items())), value) for name, labels, value in samples)


BUCKETS = st.lists(st.integers(0, 50), min_size=3, max_size=6)


def _page(gains, at_s):
    total, lines = 0, []
    for number, gain in enumerate(gains):
        total += gain
        border = "+Inf" if number == len(gains) - 1 else f"{0.1 * 2**number:g}"
        lines.append(f'h_bucket{{le="{border}"}} {total}')
    return parse_exposition("\n".join([*lines, f"h_count {total}"]), at_s)


@given(BUCKETS, st.data())
def test_a_window_holds_what_was_added(before, data):
    added = data.draw(st.lists(st.integers(0, 50), min_size=len(before), max_size=len(before)))
    after = [one + more for one, more in zip(before, added, strict=True)]
    found = service_window(generic_names("h"), [ScrapePair(_page(before, 0.0), _page(after, 2.0))])
    assert found.finished_hz == pytest.approx(sum(added) / 2.0)
    assert found.response.count == sum(added)
    rising = [sum(added[: n + 1]) for n in range(len(added))]
    assert list(found.response.counts) == rising


@given(BUCKETS, st.sampled_from([0.5, 0.9, 0.95]))
def test_a_quantile_lies_in_the_bucket_of_its_rank(gains, level):
    borders = (*(0.1 * 2**n for n in range(len(gains) - 1)), math.inf)
    counts = tuple(float(sum(gains[: n + 1])) for n in range(len(gains)))
    found = LiveDistribution(borders, counts).quantile(level)
    if counts[-1] < max(20, 1 / (1 - level)):
        assert found is None
        return
    at = next(n for n, count in enumerate(counts) if count >= level * counts[-1])
    assert (borders[at - 1] if at else 0.0) <= found.value_s <= borders[at]
    assert found.is_least == (at == len(borders) - 1)


@given(st.lists(st.integers(0, 60), min_size=4, max_size=4).filter(lambda gains: sum(gains[:-1]) > 40))
def test_quantiles_rise_with_their_level(gains):
    counts = tuple(float(sum(gains[: n + 1])) for n in range(4))
    live = LiveDistribution((0.1, 0.2, 0.4, math.inf), counts)
    found = [live.quantile(level) for level in (0.5, 0.7, 0.9, 0.95)]
    values = [one.value_s for one in found if one is not None]
    assert values == sorted(values)


SAMPLES = st.builds(SlownessSample, factor=st.floats(1e-3, 1e3), error=st.floats(0.0, 2.0), is_least=st.booleans())
STEPS = st.lists(st.tuples(SAMPLES | st.none(), st.floats(0.1, 300.0)), max_size=30)
STATION = ServiceStation(servers=4, service_s=0.2, service_cv2=0.5)


@given(STEPS)
def test_a_correction_is_bounded_and_fades(steps):
    known, now_s = ServiceCalibration(), 0.0
    for sample, gap_s in steps:
        now_s += gap_s
        known = update_calibration(known, sample, now_s)
        found = calibration_factor(known, now_s)
        assert found.value * (1 + 1e-12) >= 1.0 / FACTOR_BOUND
        assert found.value <= FACTOR_BOUND * (1 + 1e-12)
        assert 0.0 <= found.error <= 1.0
    soon, later, never = (
        calibration_factor(known, known.at_s + gap_s) for gap_s in (0.0, HALF_LIFE_S, 100 * HALF_LIFE_S)
    )
    assert math.log(later.value) == pytest.approx(math.log(soon.value) / 2, abs=1e-12)
    assert never.value == pytest.approx(1.0)
    assert never.error == pytest.approx(PRIOR_ERROR)


@settings(deadline=None, max_examples=20)
@given(st.floats(0.3, 3.5), st.sampled_from([0.5, 0.95, 0.99]), st.floats(0.0, 0.25))
def test_a_service_that_is_always_slower_by_the_same_is_learned(slow, quantile, load):
    arrivals = ArrivalProcess(load * STATION.capacity_hz)
    live_s = latency_quantile(STATION.slowed(slow), arrivals, quantile).value_s
    known = ServiceCalibration()
    for number in range(30):
        sample = sample_slowness(STATION, arrivals, quantile, LiveQuantile(live_s, 1e5, 0.0))
        known = update_calibration(known, sample, 10.0 * number)
    found = calibration_factor(known, 290.0)
    assert found.value == pytest.approx(slow, rel=0.02)
    assert found.error < PRIOR_ERROR
    assert not is_at_bound(known)


@given(st.floats(0.01, 10.0))
def test_an_open_bucket_only_raises(value):
    before = update_calibration(ServiceCalibration(), SlownessSample(1.5, 0.0), 1.0)
    after = update_calibration(before, SlownessSample(value, 0.0, is_least=True), 1.0)
    assert calibration_factor(after, 1.0).value >= calibration_factor(before, 1.0).value


def test_nothing_is_learned_from_nothing():
    known = ServiceCalibration()
    assert update_calibration(known, None, 5.0) is known
    assert sample_slowness(STATION, ArrivalProcess(1.0), 0.5, None) is None
    assert sample_slowness(STATION, ArrivalProcess(1.0), 0.5, LiveQuantile(0.0, 50.0, 0.0)) is None
    assert sample_saturation(STATION.capacity_hz, 0.0) is None


def test_in_overload_the_output_is_the_capacity():
    assert sample_saturation(STATION.capacity_hz, STATION.capacity_hz / 1.7).factor == pytest.approx(1.7)
    assert sample_saturation(STATION.capacity_hz, 1e-9).factor == FACTOR_BOUND


def test_few_and_coarse_samples_move_it_less():
    quantile, arrivals = 0.95, ArrivalProcess(0.0)
    live_s = 2.0 * latency_quantile(STATION, arrivals, quantile).value_s
    seen = [LiveQuantile(live_s, 1e5, 0.0), LiveQuantile(live_s, 40.0, 0.0), LiveQuantile(live_s, 1e5, 0.5)]
    sure, few, coarse = (
        update_calibration(ServiceCalibration(), sample_slowness(STATION, arrivals, quantile, one), 1.0) for one in seen
    )
    assert sure.log_factor > few.log_factor > 0.0
    assert sure.log_factor > coarse.log_factor > 0.0
    far = ServiceCalibration()
    for number in range(60):
        far = update_calibration(
            far, sample_slowness(STATION, arrivals, quantile, LiveQuantile(50.0, 1e6, 0.0)), float(number)
        )
    assert is_at_bound(far)
