"""The frontier of small fleets that one can count by hand."""

import pytest

from eelgrid_controller.profiles.points import Configuration, InvalidServingValue, NoFeasibleConfiguration, Point
from eelgrid_controller.whatif.frontier import (
    FrontierPool,
    FrontierService,
    FrontierTraining,
    RowCost,
    balanced_row,
    compute_frontier,
    efficient_rows,
)


def a_point(workload="w", model="a", *, hz=10.0, watts=200.0, latency_s=0.1, quantile=0.95, **rest):
    return Point(workload, Configuration(model, **rest), hz, {quantile: latency_s}, watts)


FLEET = {"a": FrontierPool(4, 50.0)}
ONE = (FrontierService("s", "w", 20.0, 0.95),)


@pytest.mark.parametrize("way", [{"clock_mhz": 1200}, {"label": "tp8"}, {"processes": 2}])
def test_one_job_that_runs_is_one_instance_however_often_it_was_measured(way):
    points = [
        a_point(),
        a_point("job", gpus=8, watts=5600.0),
        a_point("job", gpus=8, hz=9.8, watts=4000.0, power_limit_w=500.0),
        a_point("job", gpus=8, hz=6.0, watts=2200.0, **way),
    ]
    training = (FrontierTraining("j", "job", 9.6, ("a", 8)),)
    found = compute_frontier(points, ONE, {"a": FrontierPool(24, 50.0)}, training=training)
    (row,) = found.rows
    assert row.plan.gpus == {"a": 10}
    assert row.training_factor == pytest.approx(10.0 / 9.6)
    # Its limit is between the two at which it was measured.
    assert 400.0 + 3000.0 < row.plan.serving_w < 400.0 + 4000.0


def test_counted_by_hand():
    found = compute_frontier([a_point(batch=1), a_point(batch=2, hz=20.0, watts=300.0, latency_s=0.2)], ONE, FLEET)
    tight, loose = found.rows
    assert (tight.latency_s, tight.plan.power_w, tight.plan.serving_w) == (0.1, 2 * 200.0 + 2 * 50.0, 400.0)
    assert (loose.latency_s, loose.plan.power_w, loose.plan.serving_w) == (0.2, 300.0 + 3 * 50.0, 300.0)
    assert (tight.factor, loose.factor) == (2.0, 4.0)
    assert (tight.plan.gpus, loose.plan.gpus) == ({"a": 2}, {"a": 1})
    assert [placed.instances for placed in tight.plan.placed] == [2]
    assert (tight.mark, loose.mark) == ("performance,balanced", "energy")
    assert (found.rate_hz, found.tightest, found.objectives, found.passed_over) == (20.0, ("s", 0.1), 2, {})


def test_what_lacks_is_named_where_the_fleet_is_short():
    found = compute_frontier([a_point(), a_point(batch=2, hz=20.0, latency_s=0.2)], ONE, {"a": FrontierPool(1, 50.0)})
    short, enough = found.rows
    assert short.plan is None
    assert (short.lacks, short.binding_constraint, short.factor) == ({"a": 1}, "1 more a", 0.5)
    assert not short.is_efficient
    assert enough.plan.gpus == {"a": 1}
    assert (enough.factor, enough.lacks) == (1.0, {})


def test_a_fleet_without_gpus_lacks_them():
    (row,) = compute_frontier([a_point()], ONE, {"a": FrontierPool(0, 50.0)}).rows
    assert (row.plan, row.factor, row.lacks, row.mark) == (None, 0.0, {"a": 2}, "")


def test_the_slowest_service_sets_the_tightest_objective():
    points = [a_point("fast", latency_s=0.01), a_point("slow", latency_s=0.5), a_point("slow", hz=5.0, latency_s=0.9)]
    services = (FrontierService("f", "fast", 1.0, 0.95), FrontierService("z", "slow", 1.0, 0.95))
    found = compute_frontier(points, services, FLEET)
    assert found.tightest == ("z", 0.5)
    assert [row.latency_s for row in found.rows] == [0.5]  # 0.9 s gains nothing: beaten in its own shape


def test_each_service_has_its_own_quantile():
    point = Point("w", Configuration("a"), 30.0, {0.5: 0.1, 0.99: 0.3}, 200.0)
    assert compute_frontier([point], (FrontierService("s", "w", 1.0, 0.5),), FLEET).tightest == ("s", 0.1)
    both = (FrontierService("s", "w", 1.0, 0.5), FrontierService("t", "w", 1.0, 0.99))
    assert [row.latency_s for row in compute_frontier([point], both, FLEET).rows] == [0.3]


def test_objectives_are_thinned_evenly_with_both_ends():
    many = [a_point(batch=n, hz=10.0 + n, watts=200.0 + n, latency_s=0.1 + 0.01 * n) for n in range(50)]
    found = compute_frontier(many, ONE, FLEET, objectives_most=10)
    assert (len(found.rows), found.objectives) == (10, 50)
    assert (found.rows[0].latency_s, found.rows[-1].latency_s) == (0.1, pytest.approx(0.59))


def test_what_is_passed_over_is_counted():
    rest = [
        a_point(model="b"),
        a_point("other"),
        a_point(mig_profile="1g.10gb"),
        a_point(watts=None),
        a_point(quantile=0.5),
    ]
    found = compute_frontier([a_point(), *rest], ONE, FLEET)
    assert dict(found.passed_over) == {
        "b: not in the fleet": 1,
        "workload other: no service asks for it": 1,
        "MIG slices: whole GPUs alone are planned here": 1,
        "watts not measured": 1,
        "s: latency at quantile 0.95 not measured": 1,
    }
    assert found.rows == compute_frontier([a_point()], ONE, FLEET).rows


@pytest.mark.parametrize(
    ("points", "services", "fleet", "error", "complaint"),
    [
        (
            [a_point("v")],
            ONE,
            FLEET,
            NoFeasibleConfiguration,
            "service s: no point of w on a model of the fleet with watts",
        ),
        ([a_point(quantile=0.5)], ONE, FLEET, NoFeasibleConfiguration, "has its latency at quantile 0.95"),
        ([a_point(watts=10.0)], ONE, FLEET, InvalidServingValue, "draws 10 W, less than 50 W idle"),
        ([a_point()], (), FLEET, InvalidServingValue, "name at least one"),
        ([a_point()], ONE + ONE, FLEET, InvalidServingValue, "s is there twice"),
        ([a_point()], ONE, {"a": FrontierPool(-1, 1.0)}, InvalidServingValue, "fleet a: -1 GPUs"),
        ([a_point()], ONE, {"a": FrontierPool(1, -1.0)}, InvalidServingValue, "W idle"),
        ([a_point()] * 10_001, ONE, FLEET, InvalidServingValue, "points: over 10000"),
    ],
)
def test_what_is_refused(points, services, fleet, error, complaint):
    with pytest.raises(error, match=complaint):
        compute_frontier(points, services, fleet)


def test_a_service_that_is_none():
    with pytest.raises(InvalidServingValue, match="rate_hz of s"):
        FrontierService("s", "w", 0.0, 0.95)
    with pytest.raises(InvalidServingValue, match="quantile of s"):
        FrontierService("s", "w", 1.0, 95.0)
    with pytest.raises(InvalidServingValue, match="objectives"):
        compute_frontier([a_point()], ONE, FLEET, objectives_most=1)


def test_the_knee_of_a_curve_with_a_knee():
    knee = [RowCost(1.0, 1000.0, 1.0), RowCost(2.0, 300.0, 1.0), RowCost(10.0, 200.0, 1.0), RowCost(100.0, 100.0, 1.0)]
    assert balanced_row(knee) == 1
    assert balanced_row(knee[:1]) == 0
    bulge = [RowCost(1.0, 1000.0, 1.0), RowCost(10.0, 900.0, 1.0), RowCost(100.0, 100.0, 1.0)]
    assert balanced_row(bulge) == 0
    assert balanced_row([RowCost(1.0, 0.0, 1.0), RowCost(2.0, 0.0, 2.0)]) == 0


def test_efficient_is_what_no_other_beats():
    rows = [RowCost(1.0, 500.0, 1.0), RowCost(2.0, 500.0, 1.0), RowCost(3.0, 500.0, 2.0), RowCost(4.0, 400.0, 2.0)]
    assert efficient_rows(rows) == (True, False, True, True)
    assert efficient_rows([RowCost(1.0, 1.0, 1.0)] * 2) == (True, True)
