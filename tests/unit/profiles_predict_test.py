"""Answers: what they rest on, what they must not contradict, and why one is missing."""

import math

import numpy as np
import pytest
from tests.builders.profiles import (
    A100,
    FAMILY,
    STRANGER,
    apply_law,
    build_lawful_point,
    learn_laws,
    measure_store,
    read_catalogue,
)

from eelgrid_controller.profiles import prediction, prior
from eelgrid_controller.profiles.features import locate_configuration
from eelgrid_controller.profiles.learning import learn_family
from eelgrid_controller.profiles.points import (
    POWER,
    THROUGHPUT,
    Configuration,
    EstimateBasis,
    ImpossibleReading,
    NothingToLearnFrom,
    Point,
    ProfileEstimate,
    UnknownSlice,
    latency_quantity,
)
from eelgrid_controller.profiles.prediction import (
    ProfilePredictor,
    build_grid,
    clip_power,
    fits_memory,
    interpolate_grid,
    monotone_latencies,
)
from eelgrid_controller.profiles.store import ProfileReading, ProfileStore

WHOLE = Configuration(A100, batch=16)


def _predictor(profiles=None):
    return ProfilePredictor(profiles or measure_store(), {FAMILY: learn_laws()}, read_catalogue())


def _ask(workload, how, profiles=None):
    return _predictor(profiles).predict(workload, [how])[0]


def test_what_was_measured_comes_back():
    how = Configuration(A100, "2g", batch=16)
    found = _ask("middle", how)
    assert found.throughput_hz.basis is EstimateBasis.MEASURED
    assert found.throughput_hz.median == pytest.approx(build_lawful_point("middle", how).throughput_hz, rel=0.02)
    assert set(found.latency_s) == {0.5, 0.99}
    assert found.fits


def test_between_measurements_it_is_near_the_law():
    for how, share in (
        (Configuration(A100, batch=8, power_limit_w=400.0), 1.0),
        (Configuration(A100, batch=32, power_limit_w=350.0), 1.0),
        (Configuration(A100, "2g", batch=8), 2 / 7),
    ):
        found = _ask("large", how)
        rate_hz, watts = apply_law(6.0, share, how.batch, how.power_limit_w or 400.0)
        assert found.throughput_hz.basis is EstimateBasis.INTERPOLATED
        assert found.throughput_hz.median == pytest.approx(rate_hz, rel=0.08)
        assert found.throughput_hz.lower < rate_hz < found.throughput_hz.upper
        if not how.mig_profile:
            assert found.power_w.median == pytest.approx(watts, rel=0.08)


def test_a_stranger_borrows_and_is_less_certain():
    known, strange = _ask("middle", WHOLE), _ask(STRANGER, WHOLE)
    assert strange.throughput_hz.basis is EstimateBasis.BORROWED
    assert strange.throughput_hz.upper / strange.throughput_hz.lower > 2.0
    assert strange.throughput_hz.upper / strange.throughput_hz.lower > (
        known.throughput_hz.upper / known.throughput_hz.lower
    )


def test_readings_of_a_stranger_narrow_its_answers():
    told = measure_store()
    widths = []
    for second, how in enumerate((WHOLE, Configuration(A100, "2g", batch=4), Configuration(A100, batch=64))):
        told = told.with_reading(ProfileReading(build_lawful_point(STRANGER, how), 100.0 + second))
        found = _ask(STRANGER, Configuration(A100, "3g", batch=16), told).throughput_hz
        widths.append(found.upper / found.lower)
    assert widths[-1] < widths[0]
    assert found.median == pytest.approx(
        build_lawful_point(STRANGER, Configuration(A100, "3g", batch=16)).throughput_hz, rel=0.15
    )


def test_a_family_of_which_nothing_is_known_has_the_catalogues_watts():
    found = ProfilePredictor(ProfileStore(), {}, read_catalogue()).predict("new", [WHOLE, Configuration("unheard-of")])
    assert found[0].power_w.basis is EstimateBasis.PRIOR
    assert found[0].power_w[1] < found[0].power_w.median < found[0].power_w.upper <= 400.0
    assert found[0].throughput_hz is None
    assert "measure" in found[0].missing[THROUGHPUT]
    assert set(found[1].missing) == {POWER, THROUGHPUT}


def test_a_direction_that_nobody_measured_is_the_priors():
    """The family knows no clock, so no clock is answered; it knows slices and limits."""
    found = _ask("middle", Configuration(A100, batch=16, clock_mhz=900))
    assert found.throughput_hz is None
    assert "clock" in found.missing[THROUGHPUT]
    told = ProfileStore()
    for batch in (1, 2, 4, 8, 16, 32, 64):
        told = told.with_reading(ProfileReading(build_lawful_point("middle", Configuration(A100, batch=batch)), 0.0))
    alone = ProfilePredictor(told, {"default": learn_family(told, "default", read_catalogue())}, read_catalogue())
    full, low = alone.predict("middle", [WHOLE, Configuration(A100, batch=16, power_limit_w=200.0)])
    assert low.power_w.basis is EstimateBasis.PRIOR
    assert low.power_w.median == pytest.approx(full.power_w.median * prior.limit_ratio(POWER, 0.5).median, rel=1e-6)
    assert low.power_w.upper / low.power_w.lower > full.power_w.upper / full.power_w.lower


def test_a_drift_widens_what_was_measured_before_it():
    told = measure_store()
    for second in range(40):
        how = Configuration(A100, batch=(1, 4)[second % 2], power_limit_w=400.0)
        told = told.with_reading(ProfileReading(build_lawful_point("large", how), 100.0 + second))
    before = _ask("large", Configuration(A100, "2g", batch=16), told).throughput_hz
    for second in range(12):
        told = told.with_reading(
            ProfileReading(
                build_lawful_point("large", Configuration(A100, batch=4, power_limit_w=400.0), -0.3), 200.0 + second
            )
        )
    assert told.profiles["large"].epoch == 1
    after = _ask("large", Configuration(A100, "2g", batch=16), told).throughput_hz
    assert before.basis is EstimateBasis.MEASURED
    assert after.basis is EstimateBasis.INTERPOLATED
    assert after.median == pytest.approx(before.median * math.exp(-0.3), rel=0.1)
    assert after.upper / after.lower > before.upper / before.lower


def test_a_first_reading_is_recorded_with_what_was_expected():
    new, old = Configuration(A100, batch=8), Configuration(A100, "2g", batch=16)
    found = _predictor().build_reading(build_lawful_point("middle", new), 5.0)
    assert set(found.expected) == {POWER, THROUGHPUT, latency_quantity(0.5), latency_quantity(0.99)}
    assert found.expected[THROUGHPUT].mean == pytest.approx(
        math.log(build_lawful_point("middle", new).throughput_hz), abs=0.1
    )
    assert _predictor().build_reading(build_lawful_point("middle", old), 5.0).expected == {}
    assert _predictor().build_reading(build_lawful_point("nobody", old), 5.0).expected == {}


def test_a_cache_changes_no_answer(monkeypatch):
    asked = [Configuration(A100, batch=batch) for batch in (2, 8, 32)]
    fresh = {name: _predictor().predict(name, asked) for name in ("small", "large")}
    monkeypatch.setitem(vars(prediction), "_NUMBERS_MOST", 1)
    one = _predictor()
    assert [one.predict(name, asked) for name in ("small", "large", "small")] == [
        fresh["small"],
        fresh["large"],
        fresh["small"],
    ]
    later = one.with_profiles(
        measure_store().with_reading(ProfileReading(build_lawful_point("middle", WHOLE, 0.5), 9.0))
    )
    assert later.predict("small", asked) == fresh["small"]


def test_too_little_teaches_nothing():
    told = ProfileStore().with_reading(ProfileReading(build_lawful_point("small", WHOLE), 0.0))
    with pytest.raises(NothingToLearnFrom, match="measure 6 configurations") as caught:
        learn_family(told, "default", read_catalogue())
    assert caught.value.field == "family"


@pytest.mark.parametrize(
    ("how", "error", "field"),
    [
        (Configuration(A100, "9g.1tb"), UnknownSlice, "mig_profile"),
        (Configuration("unheard-of", "9g"), UnknownSlice, "mig_profile"),
        (Configuration(A100, gpus=0), ImpossibleReading, "gpus"),
        (Configuration(A100, batch=0), ImpossibleReading, "batch"),
        (Configuration(A100, processes=-1), ImpossibleReading, "processes"),
        (Configuration(A100, power_limit_w=math.nan), ImpossibleReading, "power_limit_w"),
        (Configuration(A100, clock_mhz=0), ImpossibleReading, "clock_mhz"),
    ],
)
def test_an_impossible_configuration_names_field_and_remedy(how, error, field):
    with pytest.raises(error) as caught:
        _predictor().predict("small", [how])
    assert caught.value.field == field
    assert caught.value.remedy in str(caught.value)


def test_places_are_logarithms_over_the_whole_part():
    found = locate_configuration(
        Configuration(A100, "1g", batch=8, processes=2, power_limit_w=200.0, label="tp4 eager mode=fast"),
        read_catalogue(),
    )
    numbers = found.numbers
    assert numbers["compute"] == pytest.approx(math.log2(1 / 7))
    assert numbers["memory"] == pytest.approx(-3.0)
    assert (numbers["batch"], numbers["processes"], numbers["limit"]) == pytest.approx((3.0, 1.0, -1.0))
    assert numbers["load"] == pytest.approx(4.0 + math.log2(7))
    assert numbers["label.tp"] == 2.0
    assert found.names == {"gpu_model": A100, "label": "eager", "label.mode": "fast"}


def test_a_lattice_reads_its_own_places_exactly_and_lines_between():
    where = locate_configuration(Configuration(A100, "2g", batch=8), read_catalogue())
    found = build_grid(where, (-1.0,), frozenset(("compute", "memory", "limit")), read_catalogue())
    values = np.arange(float(len(found.places))).reshape(len(found.slices), -1)
    for index, one in enumerate(found.places):
        assert interpolate_grid(found, values, one) == pytest.approx(float(index), abs=1e-6)
    low, high = found.limits[:2]
    between = locate_configuration(
        Configuration(A100, "2g", batch=8, power_limit_w=400.0 * 2 ** ((low + high) / 2)), read_catalogue()
    )
    row = found.locate(between)[0]
    assert interpolate_grid(found, values, between) == pytest.approx((values[row, 0] + values[row, 1]) / 2)


def test_watts_stay_between_idle_and_limit_unless_they_were_measured():
    wild = ProfileEstimate(900.0, 5.0, 2000.0, EstimateBasis.BORROWED)
    at = Configuration("a40", gpus=2, power_limit_w=250.0)
    found = clip_power(wild, at, read_catalogue())
    assert found.median == found.upper == pytest.approx(1.05 * 250.0 * 2)
    assert 5.0 < found.lower < 300.0
    assert clip_power(wild._replace(basis=EstimateBasis.MEASURED), at, read_catalogue()).median == 900.0
    assert clip_power(wild, Configuration(A100, "1g"), read_catalogue()) == wild


def test_latencies_rise_with_their_quantile():
    found = monotone_latencies(
        {
            0.99: ProfileEstimate(1.0, 0.5, 2.0, EstimateBasis.BORROWED),
            0.5: ProfileEstimate(1.5, 0.6, 1.9, EstimateBasis.MEASURED),
        }
    )
    assert list(found) == [0.5, 0.99]
    assert found[0.99][:3] == (1.5, 0.6, 2.0)


def test_what_did_not_run_does_not_run_with_less_room():
    told = ProfileStore()
    for how, rate_hz in ((Configuration(A100, "1g", batch=16), 0.0), (Configuration(A100, "3g", batch=16), 5.0)):
        told = told.with_reading(ProfileReading(Point("w", how, rate_hz), 0.0))
    profile = told.profiles["w"]

    def asked(mig_profile, batch, model=A100):
        return fits_memory(profile, Configuration(model, mig_profile, batch=batch), read_catalogue())

    assert [asked("1g", 16), asked("1g", 64), asked("1g", 4)] == [False, False, None]
    assert [asked("3g", 16), asked("7g", 8), asked("3g", 32)] == [True, True, None]
    assert asked("3g", 16, "a100-sxm4-40gb") is None
