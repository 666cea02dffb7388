"""Plans equal brute force on small problems, keep every promise on any, and the fleet's search agrees with the proven."""

from dataclasses import replace

import pytest
from bench.mig.plans import find_violations, pool_of_product
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests import naive_partition
from tests.builders import partition
from tests.builders.partition import A30, A100, PRODUCTS, build_problem, build_slice_point

from eelgrid_controller.partition.column_generation import solve_fleet
from eelgrid_controller.partition.integer_program import build_program, objective_value, objective_weights, solve_exact
from eelgrid_controller.partition.plan import build_plan, plan_partition
from eelgrid_controller.partition.problem import FleetTooSmall, PartitionObjective, TrainingDemand

quiet = settings(deadline=None, max_examples=40)
few = settings(deadline=None, max_examples=25)


@st.composite
def small(draw, product=A30, services=3):
    """Rates and throughputs; every service has one profile at least."""
    keys = partition.KEYS[product.key]
    count = draw(st.integers(1, services))
    throughputs = [[draw(st.integers(0, 9)) for _ in keys] for _ in range(count)]
    for row in throughputs:
        row[draw(st.integers(0, len(keys) - 1))] = draw(st.integers(1, 9))
    # Up to five pieces of the smallest size, so that covers are few.
    rates = [draw(st.integers(1, min(4 * max(row), 5 * min(filter(None, row))))) for row in throughputs]
    return rates, throughputs


def hungry(asked):
    """The same with watts, of which there are to be least: 5 W a slice in use, and one for each request a second."""
    points = tuple(replace(one, power_w=5.0 + one.throughput_hz) for one in asked.points)
    return replace(asked, points=points, objective=PartitionObjective.WATTS)


@given(small())
@quiet
def test_least_gpus_then_least_slices_on_four_slices(case):
    found = plan_partition(build_problem(*case))
    assert [proof.value for proof in found.proofs] == list(naive_partition.find_least(*case))
    assert [proof.gap for proof in found.proofs] == [0.0, 0.0]
    assert found.proven


@given(small(A100, 2))
@few
def test_least_gpus_then_least_slices_on_seven_slices(case):
    found = plan_partition(build_problem(*case, product=A100))
    assert tuple(proof.value for proof in found.proofs) == naive_partition.find_least(*case, product=A100)


@given(small(services=4), st.booleans())
@quiet
def test_any_plan_keeps_every_promise(case, watts):
    asked = hungry(build_problem(*case)) if watts else build_problem(*case)
    found = plan_partition(asked)
    assert find_violations(asked, found) == ()
    # Said once more without the checker: the rates, and no two instances of a GPU on one memory slice.
    for service in asked.services:
        mine = [one for gpu in found.gpus for one in gpu.replicas() if one.owner == service.name]
        assert sum(one.throughput_hz for one in mine) >= service.rate_hz
    legal = naive_partition.list_layouts(A30.mig.key, partition.KEYS[A30.key])
    for gpu in found.gpus:
        assert frozenset((one.profile, one.start) for one in gpu.instances) in legal


@given(small(services=4), st.booleans())
@few
def test_the_search_of_a_fleet_agrees_with_the_proven_optimum(case, watts):
    asked = hungry(build_problem(*case)) if watts else build_problem(*case)
    programme = build_program(asked)
    proven, (found, memory) = solve_exact(programme), solve_fleet(programme)
    best = proven.proofs[0].value
    one_gpu = 40.0 if watts else 1.0
    assert found.proofs[0].bound <= best <= found.proofs[0].value <= best + one_gpu
    assert find_violations(asked, build_plan(programme, found)) == ()
    # A restart on the same problem is as good, and its bound holds, too.
    again, _ = solve_fleet(programme, memory)
    assert again.proofs[0].bound <= best <= again.proofs[0].value <= best + one_gpu


@given(small(services=3), small(services=3))
@few
def test_a_restart_after_other_rates_keeps_every_promise(case, other):
    asked = build_problem(*case)
    _, memory = solve_fleet(build_program(asked))
    later = build_problem(*other)
    found, _ = solve_fleet(build_program(later), memory)
    best = plan_partition(later).proofs[0].value
    assert found.proofs[0].bound <= best <= found.proofs[0].value
    assert find_violations(later, build_plan(build_program(later), found)) == ()


@given(small(services=3), st.integers(0, 3), st.integers(0, 2))
@few
def test_models_jobs_and_limits_together(case, a30s, jobs):
    """Two models, of which one is limited: the plan stays inside, and no other count of it would have been better."""
    rates, throughputs = case
    asked = build_problem(rates, throughputs)
    faster = [
        replace(
            one,
            throughput_hz=2.0 * one.throughput_hz,
            configuration=replace(one.configuration, gpu_model=A100.model, mig_profile="3g"),
        )
        for one in asked.points
        if one.configuration.mig_profile == "2g"
    ]
    asked = replace(
        asked,
        points=(*asked.points, *faster),
        pools=(pool_of_product(A30, a30s), pool_of_product(A100, cost=2.0)),
        jobs=tuple(TrainingDemand(name=f"job-{number}", gpus=1 + number) for number in range(jobs)),
    )
    servable = {one.workload for one in faster}
    assume(a30s > 0 or all(service.name in servable for service in asked.services))
    missing = {}
    try:
        found = plan_partition(asked)
    except FleetTooSmall as small_fleet:
        missing = small_fleet.missing
    if missing:
        more = pool_of_product(A30, a30s + missing[A30.model])
        found = plan_partition(replace(asked, pools=(more, asked.pools[1])))
        assert sum(gpu.model == A30.model for gpu in found.gpus) == more.count
        return
    assert find_violations(asked, found) == ()
    cost = sum({A30.model: 1.0, A100.model: 2.0}[gpu.model] for gpu in found.gpus)
    assert cost == pytest.approx(found.proofs[0].value)
    programme = build_program(asked)
    other, _ = solve_fleet(programme)
    assert other.proofs[0].bound <= cost * (1.0 + 1e-9)
    assert find_violations(asked, build_plan(programme, other)) == ()


def test_the_least_watts_are_the_least_of_all_plans():
    """By hand: 1g 5 Hz 10 W, 2g 12 Hz 15 W, 4g 20 Hz 60 W, 32 W for each GPU; 24 Hz want two of 2g on one GPU."""
    points = (
        build_slice_point("s0", "1g", 5, power_w=10.0),
        build_slice_point("s0", "2g", 12, power_w=15.0),
        build_slice_point("s0", "4g", 20, power_w=60.0),
    )
    asked = replace(build_problem([24], [[5, 12, 20]]), points=points, objective=PartitionObjective.WATTS)
    found = plan_partition(asked)
    assert [(proof.objective, proof.value) for proof in found.proofs] == [("watts", 32.0 + 30.0), ("gpus", 1.0)]
    assert found.proven


def test_watts_and_gpus_may_want_different_plans():
    """A slow and thrifty model against a fast and hungry one."""
    thrifty, hungry = PRODUCTS["a30"], PRODUCTS["b200"]
    points = (
        build_slice_point("s0", "4g", 10, product=thrifty, power_w=100.0),
        build_slice_point("s0", "7g", 100, product=hungry, power_w=900.0),
    )
    asked = replace(
        build_problem([20], [[0, 0, 10]]), points=points, pools=(pool_of_product(thrifty), pool_of_product(hungry))
    )
    least_gpus, least_watts = plan_partition(asked), plan_partition(replace(asked, objective=PartitionObjective.WATTS))
    assert [gpu.model for gpu in least_gpus.gpus] == [hungry.model]
    assert [gpu.model for gpu in least_watts.gpus] == [thrifty.model] * 2
    programme = build_program(replace(asked, objective=PartitionObjective.WATTS))
    watts, _ = objective_weights(programme)
    found = solve_exact(programme)
    assert (
        objective_value(watts, (found.replicas, found.gpus))
        == found.proofs[0].value
        == 2 * (thrifty.idle_mig_w + 100.0)
    )
