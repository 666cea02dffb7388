"""What planners ask of predictions and take of them, and ratios between configurations."""

import math
from dataclasses import replace

import pytest
from tests.builders.profiles import A100, FAMILY, SIZES, build_lawful_point, learn_laws, measure_store, read_catalogue

from eelgrid_controller.objectives.forecasts import (
    INTERVAL_RATIO_MOST,
    QUESTIONS_PER_PROFILE_MOST,
    SERVED,
    TRAINED,
    build_store,
    candidate_configurations,
    conservative_point,
    profile_family,
    usual_configuration,
)
from eelgrid_controller.profiles.points import (
    POWER,
    THROUGHPUT,
    Configuration,
    EstimateBasis,
    Point,
    ProfileEstimate,
    ProfilePrediction,
)
from eelgrid_controller.profiles.prediction import ProfilePredictor

HOW = Configuration("g", batch=4)


def estimate(median, factor=1.2, basis=EstimateBasis.INTERPOLATED):
    return ProfileEstimate(median, median / factor, median * factor, basis)


def prediction(**changes):
    whole = ProfilePrediction(
        HOW, estimate(100.0), estimate(200.0), None, {0.5: estimate(0.04), 0.95: estimate(0.05)}, None
    )
    return replace(whole, **changes)


def test_the_safe_side_is_less_throughput_more_latency_and_more_watts():
    found = conservative_point("w", prediction())
    assert found.point.throughput_hz == pytest.approx(100.0 / 1.2)
    assert found.point.latency_s == pytest.approx({0.5: 0.048, 0.95: 0.06})
    assert found.point.power_w == pytest.approx(240.0)
    assert found.point.source == "predicted"
    assert (found.point.workload, found.point.configuration) == ("w", HOW)
    assert found.throughput_hz.median == 100.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"throughput_hz": None, "missing": {"throughput_hz": "nobody was there"}}, "nobody was there"),
        ({"latency_s": {}}, "no latency"),
        ({"throughput_hz": estimate(100.0, basis=EstimateBasis.PRIOR)}, "never varied"),
        ({"latency_s": {0.95: estimate(0.05, 1.01 * INTERVAL_RATIO_MOST)}}, "too wide"),
    ],
)
def test_what_is_none_to_plan_with_says_why(changes, words):
    assert words in conservative_point("w", prediction(**changes))


def test_asked_are_the_ways_that_the_profile_ran_on_as_many_gpus_elsewhere():
    ran = [
        Point("w", Configuration("a", batch=batch, gpus=gpus, power_limit_w=limit_w), 1.0)
        for batch in (8, 2)
        for gpus in (1, 2)
        for limit_w in (None, 200.0)
    ]
    slices = [Point("w", Configuration("a", "1g", batch=64), 1.0)]
    failed = [Point("w", Configuration("a", batch=128), 0.0)]
    assert candidate_configurations([*ran, *slices, *failed], "g", 1, None) == (
        Configuration("g", batch=2),
        Configuration("g", batch=8),
    )
    assert candidate_configurations(ran, "g", 2, 150.0)[0] == Configuration("g", batch=2, gpus=2, power_limit_w=150.0)
    assert candidate_configurations(ran, "g", 4, None) == ()
    many = [Point("w", Configuration("a", batch=batch), 1.0) for batch in range(1, 200)]
    assert len(candidate_configurations(many, "g", 1, None)) == QUESTIONS_PER_PROFILE_MOST


def test_the_usual_way_is_the_one_with_most_points():
    ran = [
        Point("w", Configuration("a", batch=batch, power_limit_w=100.0 + at), 1.0, power_w=90.0)
        for batch in (1, 8)
        for at in range(batch)
    ]
    assert usual_configuration(ran, "g", 4) == Configuration("g", batch=8, gpus=4)
    assert usual_configuration([replace(ran[0], power_w=None)], "g", 1) is None


def test_families_are_those_with_latencies_and_those_without():
    served = [Point("s", HOW, 1.0, {0.5: 0.1})]
    trained = [Point("t", HOW, 1.0)]
    assert (profile_family(served), profile_family(trained)) == (SERVED, TRAINED)
    found = build_store({"s": served, "t": trained})
    assert {name: one.workload.family for name, one in found.profiles.items()} == {"s": SERVED, "t": TRAINED}


def test_of_too_many_points_the_first_profiles_count_whole_and_what_cannot_be_is_left_out():
    ten = [Point("a", replace(HOW, batch=batch), 1.0) for batch in range(1, 11)]
    told = {"a": ten, "b": [replace(one, workload="b") for one in ten], "c": [replace(ten[0], workload="c")]}
    assert build_store(told, 15).profiles.keys() == {"a", "c"}
    wrong = [*ten[:2], replace(ten[2], throughput_hz=math.nan)]
    assert len(build_store({"a": wrong}).profiles["a"].cells) == 2


def test_a_ratio_is_nearer_than_two_predictions_and_one_of_the_base_itself():
    predictor = ProfilePredictor(measure_store(), {FAMILY: learn_laws()}, read_catalogue())
    base = Configuration(A100, batch=8, power_limit_w=400.0)
    asked_for = [base, *(replace(base, power_limit_w=limit_w) for limit_w in (340.0, 280.0, 220.0))]
    for workload in (*SIZES, "stranger"):
        for name, of in ((THROUGHPUT, lambda one: one.throughput_hz), (POWER, lambda one: one.power_w)):
            found = predictor.predict_ratios(workload, name, asked_for, base)
            assert found[0] == (0.0, 0.0)
            for how, ratio in zip(asked_for[1:], found[1:], strict=True):
                truth = math.log(of(build_lawful_point(workload, how)) / of(build_lawful_point(workload, base)))
                assert ratio.mean == pytest.approx(truth, abs=0.1)
                alone = of(predictor.predict(workload, [how])[0])
                assert 0.0 < ratio.half < math.log(alone.upper / alone.lower)


def test_a_ratio_along_what_nobody_varied_is_none():
    predictor = ProfilePredictor(measure_store(), {FAMILY: learn_laws()}, read_catalogue())
    base = Configuration(A100, batch=8)
    assert "processes" in predictor.predict_ratios("small", THROUGHPUT, [replace(base, processes=2)], base)
    assert "nothing was learned" in predictor.predict_ratios("unknown", THROUGHPUT, [base], base)
