"""Changes of a running fleet: the least of all there are on two GPUs, legal at every step, and never at what is not ours."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from bench.mig.plans import assign_plan, find_violations, pool_of_product, running_as_plan
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests import naive_partition
from tests.builders import partition
from tests.builders.partition import A30, A100, build_problem
from tests.naive_partition import group_steps_by_gpu
from tests.props.partition_plan_test import small

from eelgrid_agent.enforce.mig.layout import resolve_layout
from eelgrid_agent.enforce.mig.partitioner import plan_steps
from eelgrid_controller.partition.change_program import CLOSE, TransitionCosts
from eelgrid_controller.partition.integer_program import build_program
from eelgrid_controller.partition.plan import PartitionReplica, RunningGpu, RunningInstance, plan_partition
from eelgrid_controller.partition.problem import FleetTooSmall, TrainingDemand
from eelgrid_controller.partition.repartition import fleet_cost, observe_replicas, plan_change, select_scope
from eelgrid_controller.partition.transition import (
    CreateStep,
    DestroyStep,
    DrainStep,
    SetModeStep,
    StartStep,
    apply_steps,
    classify_gpus,
    decide_transition,
)
from eelgrid_controller.profiles.points import Configuration
from eelgrid_protos.messages import ComputeInstance, Gpu, GpuInstance

few = settings(deadline=None, max_examples=25)
GPUS = 2
KEYS = partition.KEYS["a30"]
LAYOUTS = naive_partition.list_layouts("a30-24gb", KEYS)
COSTS = TransitionCosts(horizon_s=100.0, destroy=1.0, create=2.0, start=7.0, mode=11.0, room=0.01)
FREE = TransitionCosts(horizon_s=100.0, destroy=0.0, create=0.0, start=0.0, mode=0.0, room=0.01)


@st.composite
def fleets(draw, throughputs, gpus=GPUS, product=A30):
    """GPUs with any layout, in whose instances services run, or nothing, or something that is not ours."""
    found, number = [], 0
    for gpu in range(gpus):
        standing = []
        for profile, start in sorted(draw(st.sampled_from(LAYOUTS)), key=lambda part: part[1]):
            owner = draw(st.integers(-2, len(throughputs) - 1))
            hz = throughputs[owner][KEYS.index(profile)] if owner >= 0 else 0
            replica = None
            if hz:
                number += 1
                how = Configuration(product.model, profile)
                replica = PartitionReplica(f"s{owner}", number, float(hz), 0.0, how)
            standing.append(RunningInstance(profile, start, replica, pinned=owner == -2))
        mode = bool(standing) or draw(st.booleans())
        found.append(RunningGpu(f"GPU-{gpu}", "node", product.model, mode, tuple(standing)))
    return tuple(found)


@st.composite
def scenes(draw, services=2):
    rates, throughputs = draw(small(services=services))
    return build_problem(rates, throughputs), draw(fleets(throughputs))


def outcomes(gpu, services, throughputs, costs):
    """(cost, served by each service) of every state that one GPU could have afterwards."""
    was = {(one.profile, one.start): one for one in gpu.instances}
    pinned = {place for place, one in was.items() if one.pinned}
    yield 0.0, (0.0,) * services  # left as it stands, without replicas
    for layout in LAYOUTS:
        if not pinned <= layout:
            continue
        places = sorted(layout - pinned)
        for owners in itertools.product(range(-1, services), repeat=len(places)):
            served = [0.0] * services
            cost = costs.destroy * len(was.keys() - layout) + costs.create * len(layout - was.keys())
            cost += costs.mode * (bool(layout) and not gpu.mig_enabled)
            slices = 0
            for (profile, start), owner in zip(places, owners, strict=True):
                if owner < 0:
                    continue
                served[owner] += throughputs[owner][KEYS.index(profile)]
                slices += A30.mig.profiles[profile].compute_slices
                old = was.get((profile, start))
                stays = old is not None and old.replica is not None and old.replica.owner == f"s{owner}"
                cost += 0.0 if stays else costs.start
            if any(
                throughputs[owner][KEYS.index(place[0])] == 0
                for place, owner in zip(places, owners, strict=True)
                if owner >= 0
            ):
                continue
            used = any(owner >= 0 for owner in owners) and not pinned
            yield cost + costs.horizon_s * (used + costs.room * slices), tuple(served)


def least(asked, gpus, throughputs, costs):
    """The cheapest of all pairs of states that serve the rates; infinite if none does."""
    rates = [service.rate_hz for service in asked.services]
    best = {}
    for gpu in gpus:
        mine = {}
        for cost, served in outcomes(gpu, len(rates), throughputs, costs):
            mine[served] = min(cost, mine.get(served, np.inf))
        pairs = best or {(): 0.0}
        best = {}
        for (known, spent), (served, cost) in itertools.product(pairs.items(), mine.items()):
            total = (
                served
                if not known
                else tuple(min(a + b, rate) for a, b, rate in zip(known, served, rates, strict=True))
            )
            total = tuple(min(a, rate) for a, rate in zip(total, rates, strict=True))
            best[total] = min(spent + cost, best.get(total, np.inf))
    return best.get(tuple(rates), np.inf)


def throughputs_of(asked):
    table = {}
    for one in asked.points:
        table.setdefault(one.workload, dict.fromkeys(KEYS, 0))[one.configuration.mig_profile] = one.throughput_hz
    return [[table[service.name][key] for key in KEYS] for service in asked.services]


def spent(asked, gpus, found, costs):
    """What a change comes to, by its steps and by what stands afterwards."""
    slices = sum(
        A30.mig.profiles[one.profile].compute_slices
        for gpu in found.gpus
        for one in gpu.instances
        if one.replica is not None
    )
    kinds = {
        DestroyStep: costs.destroy,
        CreateStep: costs.create,
        StartStep: costs.start,
        SetModeStep: costs.mode,
        DrainStep: 0.0,
    }
    once = sum(kinds[type(step)] for step in found.course.steps)
    assert once == pytest.approx(found.cost)
    return once + costs.horizon_s * (fleet_cost(asked, found.gpus) + costs.room * slices)


@given(scenes())
@few
def test_no_other_state_of_two_gpus_is_cheaper(scene):
    asked, gpus = scene
    best = least(asked, gpus, throughputs_of(asked), COSTS)
    try:
        found = plan_change(asked, gpus, COSTS)
    except FleetTooSmall:
        assert best == np.inf
        return
    assert best * (1.0 - 1e-9) <= spent(asked, gpus, found, COSTS) <= best * (1.0 + CLOSE) + 1e-6


@given(scenes())
@few
def test_no_change_costs_less_than_its_bound(scene):
    asked, gpus = scene
    best = least(asked, gpus, throughputs_of(asked), COSTS)
    assume(best < np.inf)
    replicas = observe_replicas(asked, gpus)
    scope = select_scope(asked, gpus, replicas, GPUS)
    programme = build_program(scope.problem, scope.held)
    found = decide_transition(programme, gpus, classify_gpus(programme, gpus, scope.gpus), COSTS)
    assert found.bound <= best + 1e-6
    assert spent(asked, gpus, plan_change(asked, gpus, COSTS), COSTS) <= found.value * (1.0 + 1e-9)


@given(scenes(services=3))
@few
def test_every_step_is_legal_and_nothing_foreign_is_touched(scene):
    asked, gpus = scene
    try:
        found = plan_change(asked, gpus, COSTS)
    except FleetTooSmall:
        assume(False)
    geometry = A30.mig
    assert find_violations(asked, running_as_plan(found.gpus)) == ()
    now = {gpu.uuid: gpu for gpu in gpus}
    for step, gpu in apply_steps(gpus, found.course.steps):
        before = now[gpu.uuid]
        stood = {(one.profile, one.start): one for one in before.instances}
        parts = [(geometry.profiles[one.profile], one.start) for one in gpu.instances]
        assert geometry.conflict(parts) is None
        assert gpu.mig_enabled or not gpu.instances
        match step:
            case DestroyStep(profile=profile, start=start):
                assert stood[profile, start].replica is None
                assert not stood[profile, start].pinned
            case DrainStep(start=start, replica=replica):
                assert replica in before.replicas()
                assert not any(one.pinned for one in before.instances if one.start == start)
            case StartStep(start=start):
                assert any(one.start == start and one.replica is None and not one.pinned for one in before.instances)
            case SetModeStep():
                assert not before.instances
                assert before.whole is None
        now[gpu.uuid] = gpu
    assert tuple(now.values()) == found.gpus
    for old, new in zip(gpus, found.gpus, strict=True):
        assert {one for one in old.instances if one.pinned} == {one for one in new.instances if one.pinned}


def _device(gpu, geometry):
    """A GPU as an agent lists it."""
    instances = [
        GpuInstance(
            id=geometry.gi_id(one.start, profile.size),
            profile_id=profile.id,
            profile=profile.name,
            start=one.start,
            size=profile.size,
            compute_instances=(ComputeInstance(id=0, profile_id=profile.whole.id),),
        )
        for one in gpu.instances
        for profile in (geometry.profiles[one.profile],)
    ]
    return Gpu(
        uuid=gpu.uuid,
        index=0,
        product="",
        model=gpu.model,
        mig_capable=True,
        mig_enabled=gpu.mig_enabled,
        gpu_instances=tuple(instances),
    )


@given(scenes(services=3))
@few
def test_agents_do_what_is_ordered_without_touching_what_is_busy(scene):
    """Each layout through the agent's own partitioner, which refuses to touch a busy or foreign instance."""
    asked, gpus = scene
    try:
        found = plan_change(asked, gpus, COSTS)
    except FleetTooSmall:
        assume(False)
    geometry = A30.mig
    now = {gpu.uuid: gpu for gpu in gpus}
    given_out = []
    for order in group_steps_by_gpu(gpus, found.course.steps, {A30.model: geometry}):
        drains = [step for step in order.steps if isinstance(step, DrainStep)]
        drained = [now[order.uuid], *(gpu for _, gpu in apply_steps([now[order.uuid]], drains))][-1]
        for _, after in apply_steps([now[order.uuid]], order.steps):
            now[order.uuid] = after
        given_out += order.steps
        if order.layout is None:
            continue
        busy = {
            geometry.gi_id(one.start, geometry.profiles[one.profile].size)
            for one in drained.instances
            if one.replica is not None or one.pinned
        }
        layout = resolve_layout(order.layout, geometry)
        calls = [type(call).__name__ for call in plan_steps(geometry, _device(drained, geometry), layout, busy=busy)]
        assert calls.count("CreateGpuInstance") == sum(isinstance(step, CreateStep) for step in order.steps)
        assert calls.count("DestroyGpuInstance") == sum(isinstance(step, DestroyStep) for step in order.steps)
        assert {part.start for part in layout.parts} == {one.start for one in now[order.uuid].instances}
    assert tuple(given_out) == found.course.steps
    assert tuple(now.values()) == found.gpus


@given(small(services=3))
@few
def test_nothing_changes_where_nothing_is_to_be_gained(case):
    asked = build_problem(*case)
    gpus = assign_plan(plan_partition(asked), {A30.model: [(f"GPU-{number}", "node") for number in range(40)]})
    found = plan_change(asked, gpus)
    assert found.course.steps == ()
    assert found.gpus == gpus


@given(small(services=3), small(services=3))
@few
def test_with_free_changes_the_least_plan_is_reached(case, other):
    asked, later = build_problem(*case), build_problem(*other)
    gpus = assign_plan(plan_partition(asked), {A30.model: [(f"GPU-{number}", "node") for number in range(40)]})
    found = plan_change(later, gpus, FREE)
    assert find_violations(later, running_as_plan(found.gpus)) == ()
    assert found.after == plan_partition(later).proofs[0].value


@given(small(services=3), st.integers(0, 2))
@few
def test_dear_changes_are_made_only_where_a_rate_asks_for_them(case, which):
    """One rate rises; with changes dearer than any gain, no replica that runs is moved or drained."""
    rates, throughputs = case
    assume(which < len(rates))
    asked = build_problem(rates, throughputs)
    gpus = assign_plan(plan_partition(asked), {A30.model: [(f"GPU-{number}", "node") for number in range(40)]})
    more = build_problem([rate * (2 if number == which else 1) for number, rate in enumerate(rates)], throughputs)
    dear = TransitionCosts(horizon_s=1.0, destroy=1e3, create=1.0, start=1e3, mode=1.0, room=0.0)
    found = plan_change(more, gpus, dear)
    assert find_violations(more, running_as_plan(found.gpus)) == ()
    assert not any(isinstance(step, DestroyStep) for step in found.course.steps)
    assert {step.replica.owner for step in found.course.steps if isinstance(step, StartStep)} <= {f"s{which}"}


def test_a_repartition_waits_until_its_gain_exceeds_its_cost():
    """By hand: two GPUs, each with one 1g in use; on one there is room for both. A move costs a create and a start."""
    asked = build_problem([6], [[3, 0, 0]], pools=(pool_of_product(A30),))
    how = Configuration(A30.model, "1g")
    gpus = tuple(
        RunningGpu(
            f"GPU-{number}",
            "node",
            A30.model,
            True,
            (RunningInstance("1g", 0, PartitionReplica("s0", number, 3.0, 0.0, how)),),
        )
        for number in range(2)
    )
    costs = TransitionCosts(horizon_s=10.0, destroy=1.0, create=2.0, start=9.0, mode=0.0, room=0.0)
    assert plan_change(asked, gpus, costs).course.steps == ()
    longer = costs._replace(horizon_s=12.0)
    found = plan_change(asked, gpus, longer)
    assert (found.before, found.after, found.cost, found.gain) == (2.0, 1.0, 11.0, 12.0)
    assert [type(step) for step in found.course.steps] == [CreateStep, StartStep, DrainStep]
    assert found.course.lowest == {}


def test_what_falls_below_its_rate_on_the_way_is_reported():
    """A whole GPU must be emptied before the other size can be made: nothing is left of the service meanwhile."""
    asked = build_problem([8], [[0, 0, 9]], pools=(pool_of_product(A30),))
    how = Configuration(A30.model, "2g")
    gpus = (
        RunningGpu(
            "GPU-0", "node", A30.model, True, (RunningInstance("2g", 0, PartitionReplica("s0", 0, 8.0, 0.0, how)),)
        ),
    )
    found = plan_change(asked, gpus)
    assert [type(step).__name__ for step in found.course.steps] == [
        "DrainStep",
        "DestroyStep",
        "CreateStep",
        "StartStep",
    ]
    assert found.course.lowest == {"s0": 0.0}


def test_a_running_job_stays_and_a_new_one_gets_whole_gpus():
    asked = build_problem([3], [[3, 0, 0]], pools=(pool_of_product(A30), pool_of_product(A100)))
    job = PartitionReplica("old", 0, 1.0, 0.0, None)
    gpus = (
        RunningGpu("GPU-0", "node", A30.model, whole=job),
        RunningGpu("GPU-1", "node", A30.model, True, (RunningInstance("4g", 0),)),
        RunningGpu("GPU-2", "node", A30.model, True, (RunningInstance("1g", 0, pinned=True),)),
        RunningGpu("GPU-3", "node", A30.model, held=True),
    )
    asked = replace(asked, jobs=(TrainingDemand(name="old"), TrainingDemand(name="new")))
    found = plan_change(asked, gpus)
    assert found.gpus[0] == gpus[0]
    assert found.gpus[1].whole.owner == "new"
    assert [(one.start, one.replica and one.replica.owner) for one in found.gpus[2].instances] == [(0, None), (1, "s0")]
    assert found.gpus[3] == gpus[3]
    assert find_violations(asked, running_as_plan(found.gpus)) == ()


def test_a_large_fleet_changes_where_the_change_is():
    """Of forty services one changes; most of what runs is not looked at, and stays."""
    asked = build_problem([20] * 40, [[5, 9, 19]] * 40, pools=(pool_of_product(A30),))
    gpus = assign_plan(plan_partition(asked), {A30.model: [(f"GPU-{number}", "node") for number in range(80)]})
    later = replace(asked, services=(replace(asked.services[0], rate_hz=40.0), *asked.services[1:]))
    found = plan_change(later, gpus, scope_most=4)
    assert find_violations(later, running_as_plan(found.gpus)) == ()
    assert len({step.uuid for step in found.course.steps}) <= 5
    assert found.after <= found.before + 2
