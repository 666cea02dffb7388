"""The frontier of small fleets that one can count by hand."""

import pytest

from eelgrid_controller.profiles.points import Configuration, InvalidServingValue, NoFeasibleConfiguration, Point
from eelgrid_controller.profiles.queueing_model import QuantileObjective
from eelgrid_controller.whatif.frontier import (
    FrontierPool,
    FrontierService,
    FrontierTraining,
    RowCost,
    balanced_row,
    compute_frontier,
    efficient_rows,
)
from eelgrid_controller.whatif.instances import ServiceDemand, choose_instances, feasible_shapes
from eelgrid_controller.whatif.slice_layouts import build_slice_layouts
from eelgrid_protos.catalogue import load_catalogue


def a_point(workload="w", model="a", *, hz=10.0, watts=200.0, latency_s=0.1, quantile=0.95, **rest):
    return Point(workload, Configuration(model, **rest), hz, {quantile: latency_s}, watts)


FLEET = {"a": FrontierPool(4, 50.0)}
ONE = (FrontierService("s", "w", 20.0, 0.95),)
# A four-slice part: four of 1g, two of 2g, or one of 4g.
A30 = load_catalogue().products["a30"].mig
SLICED = {"a": FrontierPool(4, 50.0, A30, 60.0)}


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
        "1g.10gb: no MIG layout of a is known": 1,
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
        ([a_point()], ONE, {"a": FrontierPool(1, 50.0, A30, 40.0)}, InvalidServingValue, "40 W idle with MIG on"),
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


def a_slice(profile="1g.6gb", *, hz=5.0, watts=20.0, **rest):
    return a_point(hz=hz, watts=watts, mig_profile=profile, **rest)


def test_slices_are_counted_by_hand():
    """Four slices on one GPU: what they add, what the GPU draws with MIG on, and three idle ones."""
    (row,) = compute_frontier([a_point(), a_slice()], ONE, SLICED).rows
    assert (row.plan.power_w, row.plan.serving_w) == (4 * 20.0 + 60.0 + 3 * 50.0, 4 * 20.0 + 60.0)
    assert (row.plan.gpus, row.factor) == ({"a": 1}, 4.0)
    ((service, where, instances),) = ((one.service, one.configuration, one.instances) for one in row.plan.placed)
    assert (service, where.mig_profile, instances) == ("s", "1g.6gb", 4)
    ((model, slices, gpus),) = ((one.gpu_model, one.slices, one.gpus) for one in row.plan.partitioned)
    assert (model, slices, gpus) == ("a", {"1g.6gb": 4}, 1)


def test_a_partitioned_gpu_that_is_hardly_used_costs_more_than_a_whole_one():
    """One slice would add 20 W to a GPU that draws 10 W more with MIG on; a whole GPU draws 25 W more than idle."""
    one = (FrontierService("s", "w", 5.0, 0.95),)
    (row,) = compute_frontier([a_point(watts=75.0), a_slice()], one, SLICED).rows
    assert (row.plan.power_w, row.plan.partitioned) == (4 * 50.0 + 25.0, ())
    free = {"a": FrontierPool(4, 50.0, A30)}
    (row,) = compute_frontier([a_point(watts=75.0), a_slice()], one, free).rows
    assert row.plan.power_w == 4 * 50.0 + 20.0


def test_a_gpu_holds_a_valid_layout_and_nothing_beside_it():
    points = [a_point("v"), a_slice("2g.12gb", hz=10.0), a_slice(), a_slice("4g.24gb", hz=1.0)]
    services = (*ONE, FrontierService("t", "v", 10.0, 0.95))
    (row,) = compute_frontier(points, services, {"a": FrontierPool(2, 50.0, A30)}).rows
    assert row.plan.gpus == {"a": 2}
    assert [(dict(one.slices), one.gpus) for one in row.plan.partitioned] == [({"2g.12gb": 2}, 1)]
    (short,) = compute_frontier(points, services, {"a": FrontierPool(1, 50.0, A30)}).rows
    assert (short.plan, short.lacks) == (None, {"a": 1})
    assert short.factor == 0.0  # the one GPU serves either of them


def test_what_lacks_is_whole_gpus_where_services_need_slices():
    (row,) = compute_frontier(
        [a_slice()], (FrontierService("s", "w", 45.0, 0.95),), {"a": FrontierPool(1, 50.0, A30)}
    ).rows
    assert (row.factor, row.lacks) == (20.0 / 45.0, {"a": 2})  # nine slices, four of them on one GPU


def test_a_profile_may_be_given_by_its_key():
    named, keyed = (compute_frontier([a_slice(name)], ONE, SLICED) for name in ("1g.6gb", "1g"))
    assert named == keyed


def test_training_may_run_on_a_slice():
    training = (FrontierTraining("t", "job", 4.0),)
    job = a_point("job", hz=4.0, watts=30.0, mig_profile="2g.12gb")
    (row,) = compute_frontier([a_slice("2g.12gb", hz=20.0), job], ONE, SLICED, training=training).rows
    assert row.plan.power_w == 20.0 + 30.0 + 60.0 + 3 * 50.0
    assert row.plan.gpus == {"a": 1}
    assert row.training_factor == 7.0  # the other slices of four GPUs


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        (a_slice("3g.20gb"), "3g.20gb: a has no profile 3g.20gb"),
        (a_slice(gpus=2), "1g.6gb: 2 of 1g.6gb, but a process sees one slice"),
        (a_slice(power_limit_w=100.0), "MIG slices at a power limit or locked clock"),
        (a_slice(clock_mhz=900), "MIG slices at a power limit or locked clock"),
        (a_slice(watts=None), "watts not measured"),
    ],
)
def test_slices_that_cannot_be_used_are_counted(point, reason):
    found = compute_frontier([a_point(), point], ONE, SLICED)
    ((told, count),) = found.passed_over.items()
    assert count == 1
    assert told.startswith(reason)
    assert found.rows == compute_frontier([a_point()], ONE, SLICED).rows


def test_slices_without_layouts_are_refused():
    shapes = feasible_shapes([a_slice()], QuantileObjective(0.95, 1.0), idle_w={"a": 50.0}, start_s=0.0)
    asks = [ServiceDemand(shapes, 20.0, (0,))]
    with pytest.raises(InvalidServingValue, match=r"none of a has 1g\.6gb"):
        choose_instances(asks, {"a": 1}, window_s=1.0)
    layouts = {"a": build_slice_layouts(A30, ["1g.6gb"], 0.0)}
    assert choose_instances(asks, {"a": 1}, window_s=1.0, layouts=layouts) == ((4,),)
