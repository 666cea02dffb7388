"""What may be asked, which options a service has, and what is told when it has none."""

from dataclasses import replace

import pytest
from bench.mig.assumed_power import ASSUMED_SOURCE, with_assumed_power
from bench.mig.plans import find_violations, pool_of_product
from tests.builders.partition import A30, A100, PRODUCTS, build_demand, build_problem, build_slice_point

from eelgrid_controller.partition.integer_program import OptimalityProof
from eelgrid_controller.partition.options import enumerate_options
from eelgrid_controller.partition.plan import (
    PartitionPlan,
    PartitionReplica,
    PlannedGpu,
    PlannedInstance,
    plan_partition,
)
from eelgrid_controller.partition.problem import (
    FleetTooSmall,
    InvalidProblem,
    PartitionObjective,
    PartitionPool,
    PartitionProblem,
    SearchExhausted,
    TrainingDemand,
    UnservableService,
)
from eelgrid_controller.profiles.points import Configuration, Point


def _asked(points, services, **fields):
    return PartitionProblem(
        services=tuple(services), points=tuple(points), pools=fields.pop("pools", (pool_of_product(A30),)), **fields
    )


def _taken(asked):
    cells, options = enumerate_options(asked)
    return [(cells[one.cell].profile, one.throughput_hz, one.point.configuration.batch) for one in options]


def test_of_each_slice_the_best_admissible_batch_and_processes():
    points = [
        build_slice_point("bert", "1g.6gb", 10, 0.010, batch=1),
        build_slice_point("bert", "1g.6gb", 20, 0.020, batch=2),
        build_slice_point("bert", "1g.6gb", 30, 0.045, batch=4),  # as long as the limit: not below it
        build_slice_point("bert", "2g.12gb", 15, 0.030, batch=8),
        build_slice_point("other", "4g.24gb", 99, 0.001),
    ]
    asked = _asked(points, [build_demand("bert", 100, 0.100, safety=0.45)])
    assert _taken(asked) == [("1g", 20.0, 2), ("2g", 15.0, 8)]


def test_where_several_suffice_alone_the_quickest():
    points = [
        build_slice_point("bert", "1g", 50, 0.030, batch=8),
        build_slice_point("bert", "1g", 40, 0.010, batch=4),
        build_slice_point("bert", "1g", 10, 0.001, batch=1),
    ]
    assert _taken(_asked(points, [build_demand("bert", 40, 1.0)])) == [("1g", 40.0, 4)]
    assert _taken(_asked(points, [build_demand("bert", 41, 1.0)])) == [("1g", 50.0, 8)]


def test_the_limit_is_no_matter_of_rounding():
    """0.45 x 20 ms is 9 ms, and 9.000000000000002 in floats: a latency of 9 ms is not below it."""
    points = [build_slice_point("bert", "1g", 10, 0.009)]
    with pytest.raises(UnservableService):
        enumerate_options(_asked(points, [build_demand("bert", 1, 0.02, safety=0.45)]))


def test_with_watts_every_point_that_no_other_beats():
    points = [
        build_slice_point("bert", "1g", 10, batch=1, power_w=10.0),
        build_slice_point("bert", "1g", 20, batch=2, power_w=30.0),
        build_slice_point("bert", "1g", 15, batch=3, power_w=30.0),  # beaten by batch 2
        build_slice_point("bert", "1g", 25, batch=4),  # nobody measured its watts
    ]
    asked = _asked(points, [build_demand("bert", 100, 1.0)], objective=PartitionObjective.WATTS)
    assert _taken(asked) == [("1g", 20.0, 2), ("1g", 10.0, 1)]


def test_what_did_not_run_or_has_no_such_latency_is_no_option():
    points = [
        build_slice_point("bert", "1g", 0.0),
        Point("bert", Configuration(A30.model, "2g"), 9.0, {0.99: 0.010}),
        build_slice_point("bert", "4g", 9),
    ]
    assert _taken(_asked(points, [build_demand("bert", 1, 1.0)])) == [("4g", 9.0, 1)]
    assert _taken(_asked(points, [build_demand("bert", 1, 1.0, quantile=0.99)])) == [("2g", 9.0, 1)]


def test_a_service_that_nothing_serves_is_reported_with_the_tightest_latency_and_a_remedy():
    points = [
        build_slice_point("bert", "1g", 10, 0.050),
        build_slice_point("bert", "4g.24gb", 10, 0.018, batch=2, processes=3),
    ]
    with pytest.raises(UnservableService) as told:
        plan_partition(_asked(points, [build_demand("bert", 1, 0.030, safety=0.45)]))
    assert (told.value.service, told.value.tightest_s) == ("bert", 0.018)
    assert str(told.value) == (
        "service bert: needs a latency below 13.5 ms (0.45 of the objective); the least measured is 18 ms on "
        "A30 4g.24gb, batch 2, 3 processes: an objective above 40 ms can be kept"
    )
    with pytest.raises(UnservableService, match="workload bert has no points; measure it"):
        plan_partition(_asked([], [build_demand("bert", 1)]))
    with pytest.raises(UnservableService, match=r"no point has a latency at 0\.9 .* quantiles 0\.5 on A30"):
        plan_partition(_asked(points, [build_demand("bert", 1, quantile=0.9)]))
    with pytest.raises(UnservableService, match="no admissible point has watts; measure them, or plan for GPUs"):
        plan_partition(_asked(points, [build_demand("bert", 1, 1.0)], objective=PartitionObjective.WATTS))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"services": (build_demand("a", 1), build_demand("a", 2))}, "services: two have one name"),
        ({"pools": (pool_of_product(A30), pool_of_product(A30, 3))}, "pools: two have one model"),
        (
            {"pools": (PartitionPool(model="x"),), "objective": PartitionObjective.WATTS},
            r"pools\[x\].held_w: is unknown",
        ),
        ({"jobs": (TrainingDemand(name="j", models=("H100",)),)}, r"jobs\[j\].models: are H100"),
        ({"jobs": (TrainingDemand(name="j"),), "objective": PartitionObjective.WATTS}, r"jobs\[j\].power_w: lacks A30"),
        (
            {"points": (build_slice_point("a", "3g", 1),), "services": (build_demand("a", 1),)},
            "points.mig_profile: A30 has no profile 3g",
        ),
        (
            {"points": (build_slice_point("a", "1g", 1, gpus=2),), "services": (build_demand("a", 1),)},
            r"points\[a\].gpus: is 2",
        ),
    ],
)
def test_what_cannot_be_meant_is_reported_by_its_field(fields, told):
    defaults = {"services": (), "points": (), "pools": (pool_of_product(A30),)}
    with pytest.raises(InvalidProblem, match=told):
        plan_partition(PartitionProblem(**{**defaults, **fields}))


@pytest.mark.parametrize(
    ("field", "value"), [("rate_hz", -1.0), ("rate_hz", float("nan")), ("latency_s", 0.0), ("safety", 1.5)]
)
def test_a_service_is_checked_alone(field, value):
    with pytest.raises(InvalidProblem, match=rf"services\[bert\].{field}: is"):
        replace(build_demand("bert", 1), **{field: value})


def test_nothing_asked_is_nothing_used():
    found = plan_partition(_asked([build_slice_point("a", "1g", 1)], [build_demand("a", 0)]))
    assert (found.gpus, found.proofs[0]) == ((), OptimalityProof("gpus", 0.0, 0.0))


def test_a_fleet_that_is_too_small_is_reported_by_what_it_lacks():
    asked = build_problem([9], [[0, 0, 3]], pools=(pool_of_product(A30, 1),))
    with pytest.raises(FleetTooSmall, match="the pools lack 2 A30; add them"):
        plan_partition(asked)


def test_a_search_without_any_plan_says_so():
    asked = build_problem([50, 60, 70], [[3, 7, 11], [2, 5, 13], [3, 6, 12]])
    with pytest.raises((SearchExhausted, FleetTooSmall)):
        plan_partition(replace(asked, pools=(pool_of_product(A30, 1),)), nodes_most=0)


def test_a_job_takes_whole_gpus_of_one_model_beside_slices():
    asked = build_problem([3], [[3, 0, 0]], pools=(pool_of_product(A30, 3), pool_of_product(A100, 2)))
    asked = replace(
        asked, jobs=(TrainingDemand(name="train", gpus=2, models=(A30.model,)), TrainingDemand(name="tune", gpus=2))
    )
    found = plan_partition(asked)
    assert find_violations(asked, found) == ()
    assert sorted((gpu.model, gpu.whole.owner if gpu.whole else "slices") for gpu in found.gpus) == [
        (A100.model, "tune"),
        (A100.model, "tune"),
        (A30.model, "slices"),
        (A30.model, "train"),
        (A30.model, "train"),
    ]


def test_a_replica_may_take_several_whole_gpus():
    points = (build_slice_point("llm", "", 10, gpus=2),)
    asked = _asked(points, [build_demand("llm", 15)])
    found = plan_partition(asked)
    assert find_violations(asked, found) == ()
    assert [(gpu.whole.owner, gpu.whole.number) for gpu in found.gpus] == [
        ("llm", 0),
        ("llm", 0),
        ("llm", 1),
        ("llm", 1),
    ]


def _plan(*gpus):
    return PartitionPlan(gpus, ())


def test_the_check_finds_what_is_wrong():
    asked = build_problem([6], [[3, 0, 0]], pools=(pool_of_product(A30, 1),), jobs=(TrainingDemand(name="train"),))
    how = Configuration(A30.model, "1g")
    good = [PartitionReplica("s0", number, 3.0, 0.0, how) for number in range(3)]
    fast = PartitionReplica("s0", 9, 30.0, 0.0, how)
    job = PartitionReplica("train", 0, 1.0, 0.0, None)
    a30, whole = A30.model, PlannedGpu(A30.model, whole=job)
    two = (PlannedInstance("1g", 0, good[0]), PlannedInstance("1g", 1, good[1]))
    fine = replace(asked, pools=(pool_of_product(A30, 2),))
    assert find_violations(fine, _plan(PlannedGpu(a30, two), whole)) == ()

    def told(*gpus, of=fine):
        return " | ".join(find_violations(of, _plan(*gpus)))

    assert "pool A30: 2 GPUs in use and there are 1" in told(PlannedGpu(a30, two), whole, of=asked)
    assert "s0: 3 Hz serve 6 Hz" in told(PlannedGpu(a30, two[:1]), whole)
    assert "train: is on 0 GPUs" in told(PlannedGpu(a30, two))
    assert "overlaps" in told(PlannedGpu(a30, (two[0], PlannedInstance("1g", 0, good[1]))), whole)
    assert "as no point was measured" in told(PlannedGpu(a30, (two[0], PlannedInstance("2g", 2, good[1]))), whole)
    assert "replica 9 runs as no admissible point" in told(PlannedGpu(a30, (PlannedInstance("1g", 0, fast),)), whole)
    assert "profile that the part lacks" in told(PlannedGpu(a30, (*two, PlannedInstance("7g", 0, good[2]))), whole)
    assert "neither cut nor whole" in told(PlannedGpu(a30, two, good[2]), whole)


def test_a_latency_that_is_too_long_now_is_found():
    asked = build_problem([3], [[3, 0, 0]])
    found = plan_partition(asked)
    later = replace(asked, services=(replace(asked.services[0], latency_s=0.001),))
    assert "no admissible point" in find_violations(later, found)[0]


def test_assumed_watts_follow_the_share_of_sms_and_say_so():
    product = PRODUCTS["a100-pcie-80gb"]
    points = (
        Point("x", Configuration(product.model, "1g"), 1.0, source="table"),
        Point("x", Configuration(product.model, "", gpus=2), 1.0),
        Point("x", Configuration(product.model, "7g"), 1.0, power_w=77.0),
        Point("x", Configuration("unknown", "1g"), 1.0),
    )
    one, whole, known, strange = with_assumed_power(points, [product])
    idle_w = product.idle_mig_w
    assert one.power_w == pytest.approx((product.busy_w - idle_w) * 14 / 98)
    assert one.source == f"table; {ASSUMED_SOURCE}"
    assert (whole.power_w, whole.source) == (2 * product.busy_w, ASSUMED_SOURCE)
    assert (known, strange) == (points[2], points[3])
    with pytest.raises(InvalidProblem, match="has no profile 5g"):
        with_assumed_power([Point("x", Configuration(product.model, "5g"), 1.0)], [product])


def test_plans_for_watts_with_the_prior():
    asked = build_problem([20, 30], [[4, 9, 19], [3, 8, 18]])
    points = with_assumed_power(asked.points, [A30])
    found = plan_partition(replace(asked, points=points, objective=PartitionObjective.WATTS))
    assert find_violations(replace(asked, points=points), found) == ()
    assert found.proven
