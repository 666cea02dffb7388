"""Deadlines that are admitted because other promised starts move: what moves, what never does, and that all still hold."""

import json
from dataclasses import replace
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backfill_rig import S, Simulation
from tests.builders.cluster import build_node, build_request
from tests.naive_backfill import NaiveDeadlines
from tests.state_invariants import check_invariants

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import DeadlineBroken, PromisesMoved
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import JobDeadline, JobSchedule

UNIT_S = 100


def submit(found, key, gpus, run, due, **spec):
    """Submits a job with a deadline, in units of time from the first second on; returns whether it was admitted."""
    try:
        found.submit(key, gpus, run * UNIT_S, deadline=JobDeadline(end_ns=(1 + due * UNIT_S) * S), **spec)
    except InvalidArgument:
        return False
    return True


def run_first(gpus=1, run=1):
    found = Simulation(build_node("a", gpus=gpus))
    found.submit("first", gpus, run * UNIT_S)
    return found


def list_events(found, kind):
    return [event for event in found.events if isinstance(event, kind)]


def test_a_later_deadline_gives_way_to_an_earlier_one_in_one_event_that_names_the_cause():
    found = run_first()
    assert submit(found, "relaxed", 1, 4, 10)
    assert submit(found, "urgent", 1, 2, 4)
    (moved,) = list_events(found, PromisesMoved)
    assert [one.workload_id for one in moved.starts] == ["relaxed"]
    promise = found.core.workload("relaxed").promise
    assert promise.start_ns == (1 + 3 * UNIT_S) * S
    assert promise.cause == "admission: moved for urgent, and still ends by its deadline"
    found.finish()
    assert found.starts == {"first": 1, "urgent": 1 + UNIT_S, "relaxed": 1 + 3 * UNIT_S}
    assert not list_events(found, DeadlineBroken)
    state = found.replay()
    assert state.digest() == found.core.state.digest()
    assert ClusterState.load(json.loads(json.dumps(state.dump()))).digest() == state.digest()


def test_nothing_moves_if_a_promise_would_break_or_for_a_dry_run():
    found = run_first()
    assert submit(found, "tight", 1, 4, 5)
    before = found.core.state.digest()
    assert not submit(found, "urgent", 1, 2, 4)
    assert found.core.state.digest() == before
    found = run_first()
    assert submit(found, "relaxed", 1, 4, 10)
    before = found.core.state.digest()
    request = build_request("urgent", gpus=1, cpu=0, memory_gib=0, dry_run=True, expected_runtime_s=2.0 * UNIT_S)
    spec = replace(request.spec, deadline=JobDeadline(end_ns=(1 + 4 * UNIT_S) * S))
    step = found.core.submit(replace(request, spec=spec), now_ns=found.now_s * S)
    assert (step.events, step.result.promise.start_ns) == ((), (1 + UNIT_S) * S)
    assert found.core.state.digest() == before


def test_promises_of_higher_priority_and_begin_times_stay():
    found = run_first()
    assert submit(found, "high", 1, 4, 10, priority=5)
    assert not submit(found, "urgent", 1, 2, 4)
    found = run_first()
    assert submit(found, "later", 1, 2, 10, schedule=JobSchedule(begin_ns=(1 + 2 * UNIT_S) * S))
    assert submit(found, "urgent", 1, 3, 4)
    found.finish()
    found.advance(20 * UNIT_S)
    assert found.starts["later"] == 1 + 4 * UNIT_S
    assert not list_events(found, DeadlineBroken)


def test_a_promise_takes_other_gpus_where_that_makes_room():
    found = Simulation(build_node("a", gpus=2), build_node("b", gpus=2))
    found.submit("one", 2, 1 * UNIT_S)
    found.submit("two", 2, 2 * UNIT_S)
    # On the node that is free first; the other one would do.
    assert submit(found, "small", 1, 1, 9)
    assert submit(found, "large", 2, 8, 9)
    found.finish()
    assert not list_events(found, DeadlineBroken)


def find_order(jobs):
    """Whether any order of whole-machine jobs, one after the other, keeps all deadlines; each has a run time and a deadline."""
    for order in permutations(jobs):
        at, fits = 1, True
        for run, due in order:
            at += run
            fits &= at <= due
        if fits:
            return True
    return False


@given(
    jobs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), min_size=1, max_size=6),
    gpus=st.integers(1, 3),
)
@settings(deadline=None, max_examples=60)
def test_jobs_of_all_gpus_are_admitted_if_any_order_keeps_all_deadlines(jobs, gpus):
    found, admitted = run_first(gpus), {}
    for number, (run, due) in enumerate(jobs):
        wanted = find_order([*admitted.values(), (run, due)])
        key = f"j{number}"
        assert submit(found, key, gpus, run, due) == wanted
        if wanted:
            admitted[key] = run, due
    found.finish()
    assert set(found.starts) == {"first", *admitted}
    for key, (run, due) in admitted.items():
        assert found.starts[key] + run * UNIT_S <= 1 + due * UNIT_S
    assert not list_events(found, DeadlineBroken)


@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 20), st.booleans()),
        min_size=1,
        max_size=14,
    ),
    nodes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=60)
def test_whatever_moves_every_admitted_deadline_is_met_and_a_later_start_has_a_cause(jobs, nodes):
    found = Simulation(*(build_node(f"n{i}", gpus=gpus) for i, gpus in enumerate(nodes)))
    due_s, twin = {}, NaiveDeadlines(sum(nodes))
    for number, (gap, most, run, within, has_deadline) in enumerate(jobs):
        found.advance(found.now_s + gap * UNIT_S)
        key, gpus = f"j{number:02}", min(most, max(nodes))
        if not has_deadline:
            found.submit(key, gpus, run * UNIT_S)
            continue
        deadline = JobDeadline(end_ns=(found.now_s + within * UNIT_S) * S)
        try:
            found.submit(key, gpus, run * UNIT_S, deadline=deadline)
        except InvalidArgument:
            del found.specs[key]
            continue
        due_s[key] = found.now_s + within * UNIT_S
        twin.held = list_held(found, due_s)
        assert all(twin.free(at, at + 1) >= 0 for start, end, _ in twin.held for at in range(start, end))
    for event in list_events(found, PromisesMoved):
        for one in event.starts:
            assert one.promise.start_ns // S + found.specs[one.workload_id] <= due_s[one.workload_id]
    for until_s in range(found.now_s, found.now_s + 150 * UNIT_S, UNIT_S):
        found.advance(until_s)
    assert set(due_s) <= set(found.starts)
    assert all(found.starts[key] + found.specs[key] <= one for key, one in due_s.items())
    assert not list_events(found, DeadlineBroken)
    check_invariants(found.core.state)
    assert found.replay().digest() == found.core.state.digest()


def list_held(found, due_s):
    """Starts and ends of the admitted jobs that have not ended, with their GPUs, in units of time."""
    held = []
    for key in due_s:
        one = found.core.workload(key)
        if not one.phase.is_ended:
            begun_ns = one.placed_ns if one.promise is None else one.promise.start_ns
            start = (begun_ns // S - 1) // UNIT_S
            held.append((start, start + found.specs[key] // UNIT_S, one.spec.request.gpu_count))
    return held
