"""Deadlines by simulation with exact run times: what is admitted is kept, what is refused cannot be, and a slow twin agrees."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backfill_rig import S, Simulation
from tests.builders.cluster import build_node
from tests.naive_backfill import NaiveDeadlines
from tests.state_invariants import check_invariants

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import DeadlineBroken, PromisesMoved
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import BackfillMode, JobDeadline, Queue

# Moments are so far apart that a change of one is more than the tolerance.
UNIT_S = 100
EASY, CONSERVATIVE = BackfillMode.EASY, BackfillMode.CONSERVATIVE
JOBS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 9), st.integers(1, 25)), min_size=1, max_size=25
)


def submit(found, key, gpus, run, within, **spec):
    """Submits a job with a deadline, in units of time from now; returns whether it was admitted."""
    deadline = JobDeadline(end_ns=(found.now_s + within * UNIT_S) * S)
    try:
        found.submit(key, gpus, run * UNIT_S, deadline=deadline, **spec)
    except InvalidArgument:
        return False
    return True


def list_breaches(found):
    return [event for event in found.events if isinstance(event, DeadlineBroken)]


@given(jobs=JOBS, gpus=st.integers(2, 6), is_whole=st.booleans())
@settings(deadline=None, max_examples=60)
def test_admission_promises_no_start_that_counts_of_equal_gpus_do_not_allow(jobs, gpus, is_whole):
    """A job may be refused that would fit if others took other GPUs; never the reverse, whatever has moved for it."""
    nodes = [build_node("a", gpus=gpus)] if is_whole else [build_node(f"n{i}", gpus=1) for i in range(gpus)]
    found, asked = Simulation(*nodes), {}
    for number, (gap, most, run, within) in enumerate(jobs):
        found.advance(found.now_s + gap * UNIT_S)
        now, wanted, key = (found.now_s - 1) // UNIT_S, min(most, gpus), f"j{number:02}"
        twin = NaiveDeadlines(gpus)
        twin.held = [(start, start + took, held) for start, took, held in list_booked(found, asked)]
        shape = {"gpus": wanted} if is_whole else {"gpus": 1, "replicas": wanted}
        moves = len(list_moved(found))
        if submit(found, key, run=run, within=within, **shape):
            start = find_booked(found, key)
            assert start <= now + within - run
            assert len(list_moved(found)) > moves or twin.find_start(now, wanted, run) <= start
            twin.held = [(begin, begin + took, held) for begin, took, held in list_booked(found, asked)]
            assert twin.free(start, start + run) >= wanted
            asked[key] = run, wanted
    found.finish()
    assert set(found.starts) == set(asked)
    assert not list_breaches(found)


def list_moved(found):
    return [one.workload_id for event in found.events if isinstance(event, PromisesMoved) for one in event.starts]


def find_booked(found, key):
    """When a job started, or is promised to, in units of time."""
    promise = found.core.workload(key).promise
    return ((found.starts[key] if promise is None else promise.start_ns // S) - 1) // UNIT_S


def list_booked(found, asked):
    return [(find_booked(found, key), *shape) for key, shape in asked.items()]


@given(jobs=JOBS, gpus=st.integers(1, 6), is_whole=st.booleans())
@settings(deadline=None, max_examples=60)
def test_jobs_of_all_gpus_are_admitted_wherever_a_slow_twin_finds_room_beside_what_is_promised(jobs, gpus, is_whole):
    """More is admitted where promises move (tests/unit/promise_moves_test.py); whatever is admitted is in time."""
    nodes = [build_node("a", gpus=gpus)] if is_whole else [build_node(f"n{i}", gpus=1) for i in range(gpus)]
    found, asked, due = Simulation(*nodes), {}, {}
    for number, (gap, _, run, within) in enumerate(jobs):
        found.advance(found.now_s + gap * UNIT_S)
        now, key = (found.now_s - 1) // UNIT_S, f"j{number:02}"
        twin = NaiveDeadlines(gpus)
        twin.held = [(begin, begin + took, held) for begin, took, held in list_booked(found, asked)]
        start, moves = twin.find_start(now, gpus, run), len(list_moved(found))
        shape = {"gpus": gpus} if is_whole else {"gpus": 1, "replicas": gpus}
        is_admitted = submit(found, key, run=run, within=within, **shape)
        assert is_admitted == (start + run <= now + within or len(list_moved(found)) > moves)
        if is_admitted:
            asked[key], due[key] = (run, gpus), found.now_s + within * UNIT_S
    found.finish()
    assert set(found.starts) == set(asked)
    assert all(found.starts[key] + run * UNIT_S <= due[key] for key, (run, _) in asked.items())
    assert not list_breaches(found)


@given(
    jobs=JOBS,
    nodes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    mode=st.sampled_from([EASY, CONSERVATIVE]),
    has_deadline=st.lists(st.booleans(), min_size=25, max_size=25),
)
@settings(deadline=None, max_examples=60)
def test_admitted_jobs_meet_their_deadline_among_work_without_one_and_everything_starts(
    jobs, nodes, mode, has_deadline
):
    found = Simulation(*(build_node(f"n{i}", gpus=gpus) for i, gpus in enumerate(nodes)), backfill=mode)
    deadlines = {}
    for number, (gap, gpus, run, within) in enumerate(jobs):
        found.advance(found.now_s + gap * UNIT_S)
        key, wanted = f"j{number}", min(gpus, max(nodes))
        if not has_deadline[number]:
            found.submit(key, wanted, run * UNIT_S)
        elif submit(found, key, wanted, run, within):
            deadlines[key] = found.now_s + within * UNIT_S
        else:
            del found.specs[key]
    for until_s in range(found.now_s, found.now_s + 300 * UNIT_S, UNIT_S):
        found.advance(until_s)
    assert set(found.starts) == set(found.specs)
    for key, deadline_s in deadlines.items():
        assert found.starts[key] + found.specs[key] <= deadline_s
        promised = found.promised.get(key, [])
        assert key in list_moved(found) or promised == sorted(promised, reverse=True)
    assert not list_breaches(found)
    check_invariants(found.core.state)
    state = found.replay()
    assert state.digest() == found.core.state.digest()
    assert ClusterState.load(json.loads(json.dumps(state.dump()))).digest() == state.digest()


@given(chance=st.randoms(use_true_random=False), has_queues=st.booleans())
@settings(deadline=None, max_examples=20)
def test_no_conservative_promise_becomes_later_while_nothing_runs_for_longer_than_stated(chance, has_queues):
    nodes = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
    found = Simulation(*(build_node(f"n{i}", gpus=gpus) for i, gpus in enumerate(nodes)), backfill=CONSERVATIVE)
    if has_queues:
        # Fair share changes the order in which work is tried, and early ends what is free.
        queues = (Queue(name="a"), Queue(name="b"))
        found.apply(found.core.update_policy(replace(found.core.state.policy, queues=queues), now_ns=S))
    for number in range(25):
        found.advance(found.now_s + chance.randint(0, 2) * UNIT_S)
        stated_s, more = chance.randint(1, 9) * UNIT_S, {"queue": chance.choice("ab")} if has_queues else {}
        ran_s = max(UNIT_S, stated_s // chance.randint(1, 4))
        gpus = min(chance.randint(1, 4), max(nodes))
        found.submit(f"j{number}", gpus, ran_s, expected_runtime_s=float(stated_s), **more)
    found.finish()
    assert set(found.starts) == set(found.specs)
    for key, promised in found.promised.items():
        assert promised == sorted(promised, reverse=True), f"{key} was promised a later start"
        assert found.starts[key] * S <= promised[-1]
    check_invariants(found.core.state)


@pytest.mark.parametrize("priority", [0, 5])
def test_a_promised_start_is_pushed_later_by_more_urgent_work_alone(priority):
    found = Simulation(build_node("a", gpus=2))
    found.submit("first", 2, 3 * UNIT_S)
    assert submit(found, "due", 2, 2, 5)
    assert found.promised["due"] == [(1 + 3 * UNIT_S) * S]
    found.submit("other", 2, 4 * UNIT_S, priority=priority)
    found.wake()
    found.finish()
    assert [event.cause.partition(":")[0] for event in list_breaches(found)] == (["order"] if priority else [])
    assert found.starts["due"] == 1 + (7 if priority else 3) * UNIT_S
