"""Curves go through what was measured and keep the shape of physics where nothing was."""

import math
from itertools import pairwise

import numpy as np
import pytest

from eelgrid_controller.objectives.power.errors import InvalidCurve
from eelgrid_controller.objectives.power.power_model import (
    LimitPoint,
    PowerCurve,
    PowerLaw,
    fit_power_curve,
    fit_power_law,
)
from eelgrid_controller.profiles.points import Configuration, Point

LAW = PowerLaw(free_w=260.0, roundness=4.0, floor_s=10.0, clocked=0.05, steepness=3.0)
LIMITS_W = (100.0, 150.0, 200.0, 250.0, 300.0)


def point(limit_w, rate_hz=0.1, power_w=90.0, workload="train", **changes):
    at = Configuration("a40", **{"power_limit_w": limit_w, **changes})
    return Point(workload, at, rate_hz, power_w=power_w)


def lawful(limits=LIMITS_W, gpus=1):
    return PowerCurve("train", "a40", gpus, tuple(LimitPoint(w, LAW.time_s(w), gpus * LAW.power_w(w)) for w in limits))


def test_a_law_is_found_again():
    limits = np.array(LIMITS_W)
    found = fit_power_law(
        limits, np.array([LAW.power_w(w) for w in LIMITS_W]), np.array([LAW.time_s(w) for w in LIMITS_W])
    )
    for limit in np.linspace(100.0, 300.0, 41):
        assert found.power_w(limit) == pytest.approx(LAW.power_w(limit), rel=0.01)
        assert found.time_s(limit) == pytest.approx(LAW.time_s(limit), rel=0.02)


def test_what_was_measured_stands():
    curve = lawful()
    assert [curve.at(w) for w in LIMITS_W] == list(curve.points)
    assert curve.at(200.3) is curve.points[2]
    assert curve.largest == curve.points[-1]


@pytest.mark.parametrize("left_out", LIMITS_W[1:-1])
def test_a_limit_left_out_is_near_what_the_law_says(left_out):
    at = lawful([w for w in LIMITS_W if w != left_out]).at(left_out)
    assert not at.measured
    assert at.time_s == pytest.approx(LAW.time_s(left_out), rel=0.03)
    assert at.power_w == pytest.approx(LAW.power_w(left_out), rel=0.03)


@pytest.mark.parametrize("measured", [(300.0,), (150.0, 300.0), LIMITS_W])
def test_time_falls_and_power_rises_with_the_limit_and_power_is_never_above_it(measured):
    curve = lawful(measured, gpus=4)
    seen = [curve.at(float(w)) for w in np.linspace(60.0, 400.0, 341)]
    assert all(one.time_s >= other.time_s - 1e-12 for one, other in pairwise(seen))
    assert all(one.power_w <= other.power_w + 1e-12 for one, other in pairwise(seen))
    assert all(one.power_w <= 4 * one.limit_w + 1e-9 for one in seen)


@pytest.mark.parametrize("seed", range(30))
def test_the_shape_keeps_whatever_monotone_points_say(seed):
    rng = np.random.default_rng(seed)
    limits = np.sort(rng.uniform(80.0, 400.0, 5)).round(0) + np.arange(5)
    times, power = np.sort(rng.uniform(1.0, 4.0, 5))[::-1], np.minimum(limits, np.sort(rng.uniform(50.0, 400.0, 5)))
    curve = PowerCurve("t", "g", 1, tuple(map(LimitPoint, limits.tolist(), times.tolist(), power.tolist())))
    seen = [curve.interpolate(float(w)) for w in np.linspace(60.0, 500.0, 201)]
    assert all(one.time_s >= other.time_s - 1e-9 for one, other in pairwise(seen))
    assert all(one.power_w <= other.power_w + 1e-9 for one, other in pairwise(seen))
    assert all(one.power_w <= one.limit_w + 1e-9 for one in seen)


def test_between_neighbours_that_contradict_the_shape_nothing_leaves_their_values():
    curve = PowerCurve(
        "train", "a40", 1, (LimitPoint(150.0, 9.0, 80.0), LimitPoint(200.0, 10.0, 85.0), LimitPoint(250.0, 8.0, 84.0))
    )
    for limit in (160.0, 175.0, 190.0):
        assert 9.0 <= curve.interpolate(limit).time_s <= 10.0
    for limit in (210.0, 240.0):
        assert 84.0 <= curve.interpolate(limit).power_w <= 85.0


def test_a_job_that_no_limit_holds_back_stays_flat():
    curve = PowerCurve("ncf", "v100", 1, tuple(LimitPoint(w, 20.0, 38.0) for w in (100.0, 150.0, 200.0, 250.0)))
    assert curve.interpolate(125.0).time_s == pytest.approx(20.0, rel=1e-3)
    assert curve.interpolate(125.0).power_w == pytest.approx(38.0, rel=1e-3)


def test_a_gpu_is_charged_its_limit_or_what_was_measured_beyond_it():
    curve = PowerCurve("train", "a40", 2, (LimitPoint(100.0, 3.0, 214.0), LimitPoint(200.0, 1.0, 390.0)))
    assert curve.charge_w(100.0) == 214.0
    assert curve.charge_w(200.0) == 400.0


def test_points_of_one_limit_are_one():
    curve = fit_power_curve([point(200.0, 0.1, 150.0), point(200.2, 0.2, 120.0), point(100.0, 0.05, 99.0)])
    assert curve.limits_w == (100.0, 200.0)
    assert curve.largest.time_s == pytest.approx(7.5)
    assert curve.largest.energy_j == pytest.approx((1500.0 + 600.0) / 2.0)


@pytest.mark.parametrize(
    ("points", "field"),
    [
        ([], "points"),
        ([point(None)], "power_limit_w"),
        ([point(0.0)], "power_limit_w"),
        ([point(100.0, power_w=None)], "power_w"),
        ([point(100.0, power_w=math.nan)], "power_w"),
        ([point(100.0, rate_hz=0.0)], "throughput_hz"),
        ([point(100.0), point(200.0, batch=2)], "points"),
        ([point(100.0), point(200.0, workload="other")], "points"),
        ([point(100.0 + w) for w in range(65)], "points"),
    ],
)
def test_points_that_make_no_curve_are_refused_by_field(points, field):
    with pytest.raises(InvalidCurve) as refused:
        fit_power_curve(points)
    assert refused.value.field == field
    assert refused.value.remedy


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_limit_is_refused(limit):
    with pytest.raises(InvalidCurve, match="limit_w"):
        lawful().at(limit)
