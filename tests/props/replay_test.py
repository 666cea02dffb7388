"""Simulated runs on random small traces: against the twin, against capacity, and blind to what is to come."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.replay import Twin, build_scene, build_trace_node, build_trace_task

from eelgrid_controller.replay.run_statistics import compute_series, summarize_run
from eelgrid_controller.replay.simulation import (
    FINISHED,
    REFUSED,
    RUNNING,
    TO_COME,
    WAITING,
    ArrivalSchedule,
    Outage,
    TaskQueue,
    draw_outages,
)

POLICIES = st.sampled_from(
    ["fgd", "pwr", "pwr200", "bestfit", "dotprod", "gpupacking", "gpuclustering", "eelgrid", "random"]
)
MOMENTS = st.integers(0, 12).map(float)


@st.composite
def nodes(draw):
    shapes = st.tuples(st.integers(0, 4), st.sampled_from(["T4", "A100"]), st.sampled_from([2, 8, 33]))
    listed = draw(st.lists(shapes, min_size=1, max_size=4))
    listed[0] = (max(1, listed[0][0]), *listed[0][1:])  # a trace has at least one GPU
    return [
        build_trace_node(f"n{i}", gpus=gpus, model=model, vcpu=vcpu, memory_mib=60)
        for i, (gpus, model, vcpu) in enumerate(listed)
    ]


@st.composite
def tasks(draw, most=14):
    listed = []
    for index in range(draw(st.integers(1, most))):
        gpus = draw(st.sampled_from([0, 1, 1, 1, 2, 3]))
        listed.append(
            build_trace_task(
                f"t{index:02d}",
                draw(MOMENTS),
                draw(st.one_of(st.none(), st.integers(0, 9).map(float))),
                gpus=gpus,
                milli=draw(st.sampled_from([300, 500, 1000])) if gpus == 1 else 1000,
                vcpu=draw(st.sampled_from([0.5, 1, 3])),
                memory_mib=draw(st.sampled_from([1, 10, 40])),
                models=draw(st.sampled_from([(), (), ("A100",)])),
                priority=draw(st.sampled_from([0, 0, 3])),
            )
        )
    listed[0] = build_trace_task("t00", listed[0].arrival_s, 3.0)
    return listed


@st.composite
def outages(draw, count):
    found = []
    for node in range(count):
        moments = sorted(draw(st.sets(MOMENTS, max_size=4)))
        pairs = list(zip(moments[::2], [*moments[1::2], math.inf], strict=False))
        found += [Outage(node, down_s, up_s) for down_s, up_s in pairs]
    return tuple(found)


@st.composite
def worlds(draw):
    fleet = draw(nodes())
    return build_scene(fleet, draw(tasks())), draw(outages(len(fleet)))


def decisions(outcome):
    return list(
        zip(outcome.decided_s.tolist(), outcome.decided_task.tolist(), outcome.decided_node.tolist(), strict=True)
    )


@given(worlds(), POLICIES, st.integers(0, 3))
@settings(deadline=None, max_examples=150)
def test_the_same_decisions_as_asking_for_everything_every_time(world, policy, seed):
    small, down = world
    outcome, twin = small.run(policy, outages=down, end_s=25.0, seed=seed), Twin(small, policy, seed).run(down, 25.0)
    assert decisions(outcome) == twin.decided
    fates = {fate: set(np.flatnonzero(outcome.fate == fate).tolist()) for fate in range(5)}
    assert fates[TO_COME] == set()
    assert fates[FINISHED] == set(twin.finished)
    assert fates[REFUSED] == set(twin.refused)
    assert fates[WAITING] == set(twin.waiting)
    assert fates[RUNNING] == set(twin.held)
    assert outcome.restarts.sum() == len(twin.restarts)


@given(worlds(), POLICIES)
@settings(deadline=None, max_examples=100)
def test_every_task_ends_once_and_no_node_holds_more_than_it_has(world, policy):
    small, down = world
    outcome = small.run(policy, outages=down, end_s=25.0)
    sums = summarize_run(outcome, None, 1.0)
    assert sums.tasks == sums.finished + sums.running + sums.waiting + sums.refused == len(outcome.fate)
    placed = np.bincount(outcome.decided_task, minlength=len(outcome.fate))
    held = np.isin(outcome.fate, (FINISHED, RUNNING)).astype(int)
    assert (placed == held + outcome.restarts).all(), "placed once, and once more for each restart"
    fleet, specs = small.trace.fleet, small.trace.specs
    for node in range(len(fleet.model)):
        held_at = _held_on(small.schedule, outcome, node, down)
        for moment in sorted({begin for begin, _, _ in held_at}):
            there = [task for begin, end, task in held_at if begin <= moment < end]
            spec = small.schedule.spec[there]
            assert specs.cpu_milli[spec].sum() <= fleet.cpu_milli[node]
            assert specs.memory_mib[spec].sum() <= fleet.memory_mib[node]
            assert small.trace.task_milli[spec].sum() <= 1000 * fleet.gpu_count[node]
            assert not any(o.node == node and o.down_s <= moment < o.up_s for o in down)
    assert (outcome.allocated_milli >= 0).all()
    assert (outcome.power_w >= outcome.idle_w - 1e-6).all()


def _held_on(schedule, outcome, node, down):
    """From when to when each task was on a node; a failure ends all."""
    found = []
    for begin_s, task, place in decisions(outcome):
        if place == node:
            ends = [begin_s + schedule.duration_s[task]]
            ends += [outage.down_s for outage in down if outage.node == node and outage.down_s > begin_s]
            found.append((begin_s, min(ends), task))
    return found


@given(worlds(), POLICIES, st.integers(0, 12), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=150)
def test_no_decision_looks_at_what_is_to_come(world, policy, now, order):
    """Tasks after a moment come in another order, at other times, for other spells; failures after it do not come."""
    small, down = world
    plan, now_s = small.schedule, float(now)
    later = np.flatnonzero(plan.arrival_s > now_s).tolist()
    mixed = order.sample(later, len(later))
    spec, duration_s, priority, arrival_s = (
        values.copy() for values in (plan.spec, plan.duration_s, plan.priority, plan.arrival_s)
    )
    spec[later], duration_s[later], priority[later] = (
        plan.spec[mixed],
        1.0 + plan.duration_s[mixed],
        plan.priority[mixed],
    )
    arrival_s[later] += 0.5
    other = small._replace(schedule=ArrivalSchedule(spec, arrival_s, duration_s, priority))
    # What was to return, and when, is still to come, too.
    fewer = tuple(o if o.up_s <= now_s else o._replace(up_s=o.up_s + 0.25) for o in down if o.down_s <= now_s)
    before, after = (
        [decision for decision in decisions(run) if decision[0] <= now_s]
        for run in (small.run(policy, outages=down, end_s=25.0), other.run(policy, outages=fewer, end_s=99.0))
    )
    assert before == after


@given(worlds(), POLICIES)
@settings(deadline=None, max_examples=50)
def test_the_same_run_twice_is_the_same_to_the_bit(world, policy):
    small, down = world
    first, second = (small.run(policy, outages=down, end_s=25.0) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one, other)
    assert summarize_run(first, None, 1.0) == summarize_run(second, None, 1.0)
    for one, other in zip(compute_series(first, 5), compute_series(second, 5), strict=True):
        assert np.array_equal(one, other)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=30), st.sets(st.integers(0, 4)))
def test_the_queue_gives_the_first_of_some_classes(listed, asked):
    queue, left = TaskQueue(), []
    for number, (spec, priority) in enumerate(listed):
        queue.push(number, spec=spec, priority=priority)
        left.append((-priority, number, spec))
    while True:
        assert len(queue) == len(left)
        assert queue.tasks() == tuple(sorted(number for _, number, _ in left))
        assert set(queue.specs) == {spec for *_, spec in left}
        wanted = min((entry for entry in left if entry[2] in asked), default=None)
        head = queue.first(asked)
        assert head == (None if wanted is None else (wanted[2], wanted[1]))
        if wanted is None:
            return
        queue.pop(wanted[2])
        left.remove(wanted)


@given(st.integers(1, 20), st.integers(0, 99), st.sampled_from([5.0, 50.0, 5000.0]))
@settings(max_examples=50)
def test_drawn_failures_follow_one_another_and_each_node_has_its_own(count, seed, mtbf_s):
    found = draw_outages(count, 100.0, 1100.0, mtbf_s=mtbf_s, mttr_s=10.0, seed=seed)
    assert found == draw_outages(count, 100.0, 1100.0, mtbf_s=mtbf_s, mttr_s=10.0, seed=seed)
    assert draw_outages(count + 1, 100.0, 1100.0, mtbf_s=mtbf_s, mttr_s=10.0, seed=seed)[: len(found)] == found
    for node in range(count):
        mine = [outage for outage in found if outage.node == node]
        moments = [100.0, *(moment for outage in mine for moment in outage[1:])]
        assert moments == sorted(moments)
        assert all(outage.down_s < 1100.0 for outage in mine)


def test_drawn_failures_have_the_means_that_were_asked_for():
    found = draw_outages(200, 0.0, 100_000.0, mtbf_s=900.0, mttr_s=100.0, seed=1)
    assert abs(len(found) / (200 * 100_000.0 / 1000.0) - 1.0) < 0.02
    assert abs(np.mean([outage.up_s - outage.down_s for outage in found]) / 100.0 - 1.0) < 0.02
