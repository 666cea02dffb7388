"""The store, reading by reading: cells, drift, what goes when there is too much, and what is refused."""

import math

import numpy as np
import pytest

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.profiles import store as stores
from eelgrid_controller.profiles.points import (
    POWER,
    THROUGHPUT,
    Configuration,
    ImpossibleReading,
    Point,
    latency_quantile_of,
    latency_quantity,
    log_quantities,
)
from eelgrid_controller.profiles.store import (
    CELLS_MOST,
    CUSUM_THRESHOLD,
    PRIOR_NOISE,
    PRIOR_READINGS,
    RESIDUAL_CLIP,
    DriftTest,
    ExpectedReading,
    ProfiledWorkload,
    ProfileReading,
    ProfileStore,
    ReadingNoise,
    recursive_residual,
    update_drift_test,
)


def _point(rate_hz=100.0, watts=None, batch=1, source="telemetry", **more):
    return Point("w", Configuration("a40", batch=batch), rate_hz, power_w=watts, source=source, **more)


def _told(points, start=None):
    found = start or ProfileStore()
    for second, point in enumerate(points):
        found = found.with_reading(ProfileReading(point, float(second)))
    return found


def test_a_cell_is_the_mean_of_its_readings():
    profile = _told([_point(100.0, 200.0), _point(400.0), _point(100.0, batch=2, source="bench")]).profiles["w"]
    cell = profile.cells[Configuration("a40")]
    assert math.exp(cell.tallies[THROUGHPUT].mean) == pytest.approx(200.0)
    assert (cell.tallies[THROUGHPUT].readings, cell.tallies[POWER].readings) == (2, 1)
    assert (len(profile.cells), profile.readings) == (2, 3)
    assert [(one.last_s, one.sources) for one in profile.cells.values()] == [
        (1.0, {"telemetry": 2}),
        (2.0, {"bench": 1}),
    ]


def test_a_change_of_level_begins_a_new_epoch_with_the_readings_that_told():
    rng = np.random.default_rng(1)
    before = [_point(100.0 * math.exp(rng.normal(0.0, 0.01)), batch=1 + n % 2) for n in range(60)]
    after = [_point(80.0 * math.exp(rng.normal(0.0, 0.01)), batch=1) for _ in range(12)]
    quiet = _told(before)
    assert quiet.profiles["w"].epoch == 0
    profile = quiet.profiles["w"]
    for second, point in enumerate(after):
        profile = (quiet := quiet.with_reading(ProfileReading(point, 100.0 + second))).profiles["w"]
    assert profile.epoch == 1
    [(at_s, which)] = profile.drifts
    assert 100.0 <= at_s <= 110.0
    assert which == THROUGHPUT
    new, old = profile.cells[Configuration("a40")], profile.cells[Configuration("a40", batch=2)]
    assert math.exp(new.tallies[THROUGHPUT].mean) == pytest.approx(80.0, rel=0.02)
    assert profile.is_stale(old)
    assert not profile.is_stale(new)
    assert [profile.is_stale(one) for one in profile.cells.values()].count(True) == 1


def test_one_wild_reading_is_no_drift():
    points = [_point(100.0 + 0.1 * (n % 3)) for n in range(40)]
    assert _told([*points, _point(5000.0), *points]).profiles["w"].epoch == 0


def test_a_first_reading_against_what_was_expected_counts_and_its_error_is_kept():
    found = ProfileStore()
    for number in range(12):
        expected = {THROUGHPUT: ExpectedReading(math.log(100.0), 0.05)}
        found = found.with_reading(ProfileReading(_point(150.0, batch=2**number), float(number), expected))
    profile = found.profiles["w"]
    assert profile.epoch >= 1  # 8 deviations off, again and again
    assert profile.errors[THROUGHPUT] == pytest.approx([math.log(1.5)] * len(profile.errors[THROUGHPUT]))


def test_what_did_not_run_is_kept_as_that():
    cell = _told([_point(0.0)]).profiles["w"].cells[Configuration("a40")]
    assert (cell.runs, cell.tallies) == (False, {})


def test_the_longest_unread_cell_goes():
    found = _told([_point(batch=1 + n) for n in range(CELLS_MOST + 3)]).profiles["w"].cells
    assert len(found) == CELLS_MOST
    assert Configuration("a40", batch=3) not in found
    assert Configuration("a40", batch=4) in found


def test_the_longest_unread_workload_goes(monkeypatch):
    monkeypatch.setitem(vars(stores), "WORKLOADS_MOST", 3)
    found = ProfileStore()
    for name in ("a", "b", "c", "a", "d"):
        found = found.with_reading(ProfileReading(Point(name, Configuration("a40"), 1.0), 0.0))
    assert list(found.profiles) == ["c", "a", "d"]


def test_sources_have_a_limit():
    cell = _told([_point(source=f"source {n}") for n in range(40)]).profiles["w"].cells[Configuration("a40")]
    assert len(cell.sources) == 17
    assert sum(cell.sources.values()) == 40


def test_facts_about_a_known_workload_do_not_forget_it():
    found = _told([_point()]).with_workload(ProfiledWorkload("w", "llm", {"active": 3.0}))
    assert [one.workload.workload for one in found.family_profiles("llm")] == ["w"]
    assert found.profiles["w"].readings == 1
    assert found.revision == 2


@pytest.mark.parametrize(
    ("point", "field", "remedy"),
    [
        (_point(math.nan), "throughput_hz", "leave out"),
        (_point(-1.0), "throughput_hz", "leave out"),
        (_point(1.0, math.inf), "power_w", "leave out"),
        (_point(1.0, 0.0), "power_w", "leave out"),
        (_point(1.0, latency_s={0.5: -1.0}), "latency_s@0.5", "leave out"),
        (_point(1.0, latency_s={1.5: 1.0}), "latency_s", "0.99"),
        (_point(1.0, latency_s={n / 10: 1.0 for n in range(1, 10)}), "latency_s", "8"),
    ],
)
def test_an_impossible_reading_names_field_and_remedy(point, field, remedy):
    with pytest.raises(ImpossibleReading, match=remedy) as caught:
        ProfileStore().with_reading(ProfileReading(point, 0.0))
    assert caught.value.field == field
    assert field in str(caught.value)
    assert isinstance(caught.value, ControllerError)


def test_names_of_quantities_go_both_ways():
    assert latency_quantile_of(latency_quantity(0.99)) == 0.99
    assert latency_quantile_of(POWER) is None
    assert set(log_quantities(_point(2.0, 3.0, latency_s={0.5: 1.0}, memory_bytes=7))) == {
        THROUGHPUT,
        POWER,
        "latency_s@0.5",
        "memory_bytes",
    }


def test_noise_is_learned_from_what_was_stated():
    noise = ReadingNoise()
    assert noise.variance == pytest.approx(PRIOR_NOISE**2)
    for score in np.random.default_rng(1).normal(size=400):
        true = score * 0.02 / math.sqrt(noise.variance)  # readings scatter by 2 %
        noise = noise.with_residual(true)
    assert math.sqrt(noise.variance) == pytest.approx(0.02, rel=0.25)
    assert noise.readings == 400
    assert PRIOR_READINGS < 400


def test_the_sums_by_hand():
    assert recursive_residual(1.2, 1.0, 3, 0.03) == pytest.approx(0.2 / math.sqrt(0.04))
    watch = update_drift_test(DriftTest(), 10.0)
    assert (watch.up, watch.up_run, watch.down) == (RESIDUAL_CLIP - 0.5, 1, 0.0)
    watch = update_drift_test(watch, 0.5)
    assert (watch.up, watch.up_run, watch.changed) == (RESIDUAL_CLIP - 0.5, 2, False)
    for _ in range(3):
        watch = update_drift_test(watch, 3.0)
    assert watch.up > CUSUM_THRESHOLD
    assert watch.changed
    assert watch.change_length == 5
    assert update_drift_test(DriftTest(up=0.2, up_run=4), -1.0).up_run == 0
