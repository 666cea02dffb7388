"""Deadlines of arrays: all elements end in time with the slots of the array, or nothing is submitted."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backfill_rig import S, Simulation
from tests.builders.cluster import build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core import array_deadlines
from eelgrid_controller.state.events import ArraySubmitted, DeadlineBroken
from eelgrid_protos.faults import InvalidArgument, ResourceExhausted
from eelgrid_protos.messages import (
    DependencyCondition,
    JobArrayRequest,
    JobDeadline,
    JobDependency,
    JobSchedule,
    WorkloadPhase,
)

UNIT_S = 100


def submit_array(found, key, indexes, gpus, run_s, deadline_s, *, dry_run=False, **spec):
    """Submits an array; the simulation ends its elements after their run time."""
    request = build_request(key, name=key, gpus=gpus, cpu=0, memory_gib=0, expected_runtime_s=float(run_s), **spec)
    deadline = JobDeadline(end_ns=deadline_s * S)
    request = replace(
        request,
        spec=replace(request.spec, deadline=deadline),
        array=JobArrayRequest(indexes=indexes),
        dry_run=dry_run,
    )
    for index in range(200):
        found.specs[f"{key}_{index}"] = run_s
    return found.apply(found.core.submit(request, now_ns=found.now_s * S))


def find_starts(found, key):
    return [start for name, start in sorted(found.starts.items()) if name.startswith(f"{key}_")]


def list_breaches(found):
    return [event for event in found.events if isinstance(event, DeadlineBroken)]


def find_last_end(found, key):
    return max(found.core.state.workloads[one].ended_ns for one in found.core.state.arrays.list_elements(key)) // S


@pytest.mark.parametrize(("indexes", "rounds"), [("0-7", 2), ("0-7%4", 2), ("0-7%2", 4), ("0-7%3", 3), ("0", 1)])
def test_an_array_is_admitted_if_its_last_element_ends_in_time_with_its_slots(indexes, rounds):
    for late_s in (1, 0):
        found = Simulation(build_node("a", gpus=4))
        deadline_s = 1 + rounds * UNIT_S - late_s
        if late_s:
            before = found.core.state.digest()
            with pytest.raises(InvalidArgument) as refused:
                submit_array(found, "all", indexes, 1, UNIT_S, deadline_s)
            (violation,) = refused.value.violations
            assert violation.field == "spec.deadline.end_ns"
            assert "1 s later" in violation.problem
            assert found.core.state.digest() == before
            continue
        submit_array(found, "all", indexes, 1, UNIT_S, deadline_s)
        found.finish()
        assert find_last_end(found, "all") == deadline_s
        assert not list_breaches(found)
        assert found.replay().digest() == found.core.state.digest()
        check_invariants(found.core.state)


def test_elements_keep_the_promise_of_their_array_while_other_work_is_submitted():
    found = Simulation(build_node("a", gpus=2))
    found.submit("first", 2, 3 * UNIT_S)
    submit_array(found, "all", "0-3%2", 1, UNIT_S, 1 + 5 * UNIT_S)
    for number in range(4):
        found.submit(f"other{number}", 1, 5 * UNIT_S)
    found.finish()
    assert find_last_end(found, "all") == 1 + 5 * UNIT_S
    assert not list_breaches(found)


def test_nothing_of_an_array_is_submitted_by_a_dry_run_or_if_it_is_refused():
    found = Simulation(build_node("a", gpus=2))
    before = found.core.state.digest()
    assert submit_array(found, "all", "0-3", 1, UNIT_S, 500, dry_run=True).events == ()
    with pytest.raises(InvalidArgument, match="earliest possible end"):
        submit_array(found, "all", "0-3", 1, UNIT_S, 200, dry_run=True)
    assert found.core.state.digest() == before
    assert not [event for event in found.events if isinstance(event, ArraySubmitted)]


def test_what_leaves_the_end_of_an_array_unknown_is_refused_with_its_field():
    found = Simulation(build_node("a", gpus=2))
    found.submit("first", 2, UNIT_S)
    after = JobDependency(workload_id="first", condition=DependencyCondition.ENDED)
    with pytest.raises(InvalidArgument) as refused:
        submit_array(found, "all", "0-3", 1, UNIT_S, 10_000, schedule=JobSchedule(after=(after,)))
    assert refused.value.violations[0].field == "spec.schedule.after"
    found.submit("endless", 1, UNIT_S, expected_runtime_s=None)
    array_deadlines_most = array_deadlines.PROMISED_MOST
    with pytest.raises(ResourceExhausted, match="submit fewer elements"):
        submit_array(found, "all", f"0-{array_deadlines_most}", 1, UNIT_S, 10**6)


def test_an_array_that_begins_later_has_its_starts_from_then_on():
    found = Simulation(build_node("a", gpus=2))
    schedule = JobSchedule(begin_ns=500 * S)
    submit_array(found, "all", "0-3", 1, UNIT_S, 700, schedule=schedule)
    found.submit("long", 2, 1000)
    for now_s in (400, 500, 600, 700, 2000):
        found.advance(now_s)
    assert [found.starts[f"all_{index}"] for index in range(4)] == [500, 500, 600, 600]
    found.finish()
    assert not list_breaches(found)


@given(
    gpus=st.integers(1, 4),
    size=st.integers(1, 9),
    slots=st.integers(0, 4),
    run=st.integers(1, 5),
    within=st.integers(1, 30),
    first=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), max_size=3),
    others=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), max_size=5),
)
@settings(deadline=None, max_examples=80)
def test_admission_of_an_array_of_single_gpus_is_what_a_slow_twin_finds_and_every_element_is_in_time(
    gpus, size, slots, run, within, first, others
):
    found = Simulation(*(build_node(f"n{i}", gpus=1) for i in range(gpus)))
    free = [0] * gpus
    for number, (replicas, took) in enumerate(first):
        wanted = min(replicas, gpus)
        if sum(at == 0 for at in free) >= wanted:
            found.submit(f"first{number}", 1, took * UNIT_S, replicas=wanted)
            for _ in range(wanted):
                free[free.index(0)] = took
    # In turn, each element takes the GPU that is free first, when there is a slot.
    ends = []
    for number in range(size):
        at = min(free)
        if slots and number >= slots:
            at = max(at, sorted(ends)[number - slots])
        free[free.index(min(free))] = at + run
        ends.append(at + run)
    indexes = f"0-{size - 1}" + (f"%{slots}" if slots else "")
    deadline_s = 1 + within * UNIT_S
    try:
        submit_array(found, "all", indexes, 1, run * UNIT_S, deadline_s)
    except InvalidArgument:
        assert max(ends) > within
        return
    assert max(ends) <= within
    for number, (replicas, took) in enumerate(others):
        found.submit(f"other{number}", 1, took * UNIT_S, replicas=min(replicas, gpus))
    found.finish()
    assert find_last_end(found, "all") <= deadline_s
    assert not list_breaches(found)
    assert all(one.phase is WorkloadPhase.CANCELLED for one in found.core.state.workloads.values())
    check_invariants(found.core.state)
    assert found.replay().digest() == found.core.state.digest()
