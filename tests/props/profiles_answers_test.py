"""What must hold of every answer: order along slices and limits, intervals around middles, what was measured inside."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression
from tests.builders.profiles import (
    A100,
    FAMILY,
    SIZES,
    STRANGER,
    build_lawful_point,
    learn_laws,
    list_configurations,
    measure_store,
    read_catalogue,
)

from eelgrid_controller.profiles.features import FeaturePoint, SliceShare
from eelgrid_controller.profiles.points import Configuration, EstimateBasis, Point, ProfileEstimate
from eelgrid_controller.profiles.prediction import (
    PredictionGrid,
    ProfilePredictor,
    clip_power,
    interpolate_grid,
    monotone_surface,
)
from eelgrid_controller.profiles.profile_service import ProfileService, decode_record, encode_record
from eelgrid_controller.profiles.store import ProfileReading, ProfileStore

quiet = settings(deadline=None, max_examples=40)
WORKLOADS = st.sampled_from([*SIZES, STRANGER])
BATCHES = st.integers(1, 128)
PROFILES = ("1g", "2g", "3g", "4g", "7g")
VALUES = st.floats(-5.0, 5.0)


def _predictor(told=None):
    return ProfilePredictor(told or measure_store(), {FAMILY: learn_laws()}, read_catalogue())


@st.composite
def told_more(draw):
    """The family with some more readings, which need not follow any law."""
    found = measure_store()
    for second in range(draw(st.integers(0, 6))):
        how = draw(
            st.sampled_from(list(list_configurations())) | st.builds(Configuration, st.just(A100), batch=BATCHES)
        )
        one = build_lawful_point(draw(WORKLOADS), how, draw(st.floats(-0.5, 0.5)))
        found = found.with_reading(ProfileReading(one, 1000.0 + second))
    return found


def _sorted(estimates, way):
    for earlier, later in itertools.pairwise(estimates):
        assert way * math.log(later.median / earlier.median) >= -1e-9


@quiet
@given(told_more(), WORKLOADS, BATCHES)
def test_a_larger_slice_is_never_slower(told, workload, batch):
    asked = [Configuration(A100, profile, batch=batch) for profile in PROFILES]
    found = _predictor(told).predict(workload, asked)
    _sorted([one.throughput_hz for one in found], 1)
    for quantile in (0.5, 0.99):
        _sorted([one.latency_s[quantile] for one in found], -1)


@quiet
@given(told_more(), WORKLOADS, BATCHES, st.lists(st.floats(150.0, 400.0), min_size=2, max_size=6))
def test_a_higher_limit_is_never_slower_nor_draws_less(told, workload, batch, limits):
    asked = [Configuration(A100, batch=batch, power_limit_w=limit) for limit in sorted(limits)]
    found = _predictor(told).predict(workload, asked)
    _sorted([one.throughput_hz for one in found], 1)
    _sorted([one.power_w for one in found], 1)


@quiet
@given(told_more(), WORKLOADS, BATCHES, st.none() | st.floats(120.0, 400.0))
def test_an_interval_holds_its_middle_and_watts_what_the_part_can_draw(told, workload, batch, limit):
    found = _predictor(told).predict(workload, [Configuration(A100, batch=batch, power_limit_w=limit)])[0]
    for one in (found.throughput_hz, found.power_w, *found.latency_s.values()):
        assert 0.0 < one.lower <= one.median <= one.upper < math.inf
    assert found.latency_s[0.5].median <= found.latency_s[0.99].median
    if found.power_w.basis is not EstimateBasis.MEASURED:
        assert found.power_w.upper <= 1.25 * (limit or 400.0) + 1e-6


@quiet
@given(st.floats(50.0, 400.0), st.lists(st.floats(80.0, 300.0), min_size=2, max_size=6))
def test_what_a_limit_allows_never_falls_with_it(watts, limits):
    """Also where the lowest limits, which are held badly, end."""
    wild = ProfileEstimate(watts, watts, watts, EstimateBasis.BORROWED)
    found = [
        clip_power(wild, Configuration("a40", power_limit_w=one), read_catalogue()).median for one in sorted(limits)
    ]
    assert found == sorted(found)


@quiet
@given(WORKLOADS, st.sampled_from(list(list_configurations())), st.integers(1, 5), st.floats(-0.02, 0.02))
def test_an_interval_holds_what_was_measured_by_the_laws(workload, how, times, off):
    """Readings within the noise and in the order that physics asks for lie in their own intervals."""
    told = measure_store()
    level = build_lawful_point(workload, how, off if workload == STRANGER else 0.0)
    for second in range(times):
        told = told.with_reading(ProfileReading(level, 2000.0 + second))
    found = _predictor(told).predict(workload, [how])[0]
    assert found.throughput_hz.basis is EstimateBasis.MEASURED
    assert found.throughput_hz.lower <= level.throughput_hz <= found.throughput_hz.upper
    if level.power_w is not None:
        assert found.power_w.lower <= level.power_w <= found.power_w.upper


@quiet
@given(WORKLOADS, BATCHES, st.lists(BATCHES, max_size=8))
def test_an_answer_does_not_depend_on_what_else_is_asked(workload, batch, others):
    asked = [Configuration(A100, batch=one) for one in (*others, batch)]
    together, alone = _predictor().predict(workload, asked)[-1], _predictor().predict(workload, asked[-1:])[0]
    for one, other in ((together.throughput_hz, alone.throughput_hz), (together.power_w, alone.power_w)):
        assert one[:3] == pytest.approx(other[:3], rel=1e-6)


@quiet
@given(st.permutations(range(12)))
def test_without_a_drift_the_order_of_readings_does_not_matter(order):
    """Two readings of six configurations: the same cells, counts and, to the last digits, means and answers."""
    hows = list(list_configurations())[:6]
    readings = [ProfileReading(build_lawful_point(STRANGER, hows[n % 6], 0.003 * (n // 6)), 500.0) for n in range(12)]
    plain, shuffled = measure_store(), measure_store()
    for number, place in enumerate(order):
        plain, shuffled = plain.with_reading(readings[number]), shuffled.with_reading(readings[place])
    one, other = plain.profiles[STRANGER], shuffled.profiles[STRANGER]
    assert (one.readings, set(one.cells)) == (other.readings, set(other.cells))
    for how, cell in one.cells.items():
        for name, tally in cell.tallies.items():
            assert tally.readings == other.cells[how].tallies[name].readings == 2
            assert tally.mean == pytest.approx(other.cells[how].tallies[name].mean, abs=1e-12)
    asked = [Configuration(A100, batch=8), hows[0]]
    for mine, theirs in zip(*(_predictor(told).predict(STRANGER, asked) for told in (plain, shuffled)), strict=True):
        assert mine.throughput_hz.median == pytest.approx(theirs.throughput_hz.median, rel=1e-3)


@st.composite
def points(draw):
    """Any point that can be measured, and some that did not run."""
    how = Configuration(
        draw(st.sampled_from([A100, "a40", "unheard-of"])),
        "",
        draw(st.integers(1, 8)),
        draw(BATCHES),
        draw(st.integers(1, 3)),
        draw(st.none() | st.floats(1.0, 1000.0)),
        draw(st.none() | st.integers(1, 2000)),
        draw(st.sampled_from(["", "tp4", "optimizer=adam eager"])),
    )
    positive = st.floats(1e-6, 1e9)
    return Point(
        draw(st.sampled_from(["a", "b"])),
        how,
        draw(st.just(0.0) | positive),
        draw(st.dictionaries(st.sampled_from([0.5, 0.99]), positive)),
        draw(st.none() | positive),
        draw(st.none() | st.integers(1, 2**40)),
        draw(st.text(max_size=3)),
    )


@quiet
@given(st.lists(points(), max_size=12))
def test_a_store_comes_back_from_its_record(given_points):
    held = ProfileService(read_catalogue())
    for second, one in enumerate(given_points):
        held.observe(one, float(second))
    assert decode_record(json.loads(json.dumps(encode_record(held.snapshot())))) == held.snapshot()
    assert sum(one.readings for one in held.snapshot().profiles.values()) == len(given_points)


@quiet
@given(st.lists(points(), min_size=1, max_size=12))
def test_sources_and_configurations_are_conserved(given_points):
    told = ProfileStore()
    for second, one in enumerate(given_points):
        told = told.with_reading(ProfileReading(one, float(second)))
    for name, profile in told.profiles.items():
        mine = [one for one in given_points if one.workload == name]
        assert set(profile.cells) == {one.configuration for one in mine}
        if profile.epoch == 0:
            assert sum(sum(cell.sources.values()) for cell in profile.cells.values()) == len(mine)


def _nearest(values, weights):
    """The least squares by its minimax formula: max over left ends of the min over right ends of the mean."""
    count = len(values)
    return [
        max(
            min(np.average(values[left : right + 1], weights=weights[left : right + 1]) for right in range(at, count))
            for left in range(at + 1)
        )
        for at in range(count)
    ]


@quiet
@given(st.lists(st.tuples(VALUES, st.floats(0.1, 10.0)), min_size=1, max_size=8))
def test_pooling_is_the_minimax_formula(pairs):
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    [found] = monotone_surface(values[np.newaxis], weights[np.newaxis], 1)
    assert found == pytest.approx(np.array(_nearest(values, weights)), abs=1e-9)


@quiet
@given(
    st.lists(st.tuples(VALUES, st.floats(0.1, 10.0)), min_size=2, max_size=9),
    st.sampled_from([1, -1]),
    st.floats(-3.0, 12.0),
)
def test_one_row_of_a_grid_answers_as_isotonic_regression_of_scikit_learn(pairs, way, at):
    """The same fit, the same straight lines between limits, and the ends beyond them."""
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    limits = np.arange(len(values), dtype=np.float64)
    model = IsotonicRegression(increasing=way > 0, out_of_bounds="clip").fit(limits, values, sample_weight=weights)
    grid = PredictionGrid((SliceShare("", 1.0, 1.0),), tuple(limits.tolist()), ())
    found = monotone_surface(values[np.newaxis], weights[np.newaxis], way)
    assert found[0] == pytest.approx(model.predict(limits), abs=1e-9)
    place = FeaturePoint({"compute": 0.0, "memory": 0.0, "limit": at}, {})
    assert interpolate_grid(grid, found, place) == pytest.approx(model.predict([at])[0], abs=1e-7)


@quiet
@given(st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False), st.sampled_from([1, -1]))
def test_a_lattice_is_ordered_both_ways_and_keeps_what_is_in_order(rows, columns, random, way):
    values = np.array([[random.uniform(-1, 1) for _ in range(columns)] for _ in range(rows)])
    weights = np.array([[random.uniform(0.1, 10) for _ in range(columns)] for _ in range(rows)])
    found = monotone_surface(values, weights, way)
    assert (way * np.diff(found, axis=0) >= -1e-12).all()
    assert (way * np.diff(found, axis=1) >= -1e-12).all()
    assert monotone_surface(found, weights, way) == pytest.approx(found, abs=1e-12)
