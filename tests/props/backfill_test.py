"""Backfill by simulation with exact run times: promises are kept, nobody starves, and a slow twin decides the same."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backfill_rig import S, Simulation
from tests.builders.cluster import build_node, build_request
from tests.naive_backfill import NaiveEasy
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.queueing.reservations import is_reserved_for, list_reserved_nodes
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadPlaced
from eelgrid_protos import catalogue
from eelgrid_protos.messages import BackfillMode, Reservation, WorkloadPhase

EASY, NONE, CONSERVATIVE = BackfillMode.EASY, BackfillMode.NONE, BackfillMode.CONSERVATIVE


JOBS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 9), st.integers(0, 1)), min_size=1, max_size=25
)


def run_jobs(simulation, jobs, most):
    for number, (gap_s, gpus, run_s, priority) in enumerate(jobs):
        simulation.advance(simulation.now_s + gap_s)
        simulation.submit(f"j{number}", min(gpus, most), run_s, priority=priority)


@given(jobs=JOBS, nodes=st.lists(st.integers(1, 4), min_size=1, max_size=3), mode=st.sampled_from([EASY, CONSERVATIVE]))
@settings(deadline=None, max_examples=60)
def test_with_exact_run_times_the_first_never_starts_after_it_was_promised_and_everything_starts(jobs, nodes, mode):
    found = Simulation(*(build_node(f"n{i}", gpus=gpus) for i, gpus in enumerate(nodes)), backfill=mode)
    # Of one priority: a more urgent one is a cause for a promise to move.
    run_jobs(found, [(*job[:3], 0) for job in jobs], max(nodes))
    found.finish()
    assert set(found.starts) == set(found.specs)
    # Of conservative backfill the starts of those behind the first are made anew in each round.
    for key, promised in found.promised.items() if mode is EASY else ():
        assert promised == sorted(promised, reverse=True), f"{key} was promised a later start"
        assert found.starts[key] * S <= promised[-1]
    check_invariants(found.core.state)
    state = found.replay()
    assert state.digest() == found.core.state.digest()
    assert ClusterState.load(json.loads(json.dumps(state.dump()))).digest() == state.digest()


@given(jobs=JOBS, gpus=st.integers(2, 6), is_whole=st.booleans())
@settings(deadline=None, max_examples=80)
def test_easy_backfill_decides_as_a_slow_twin_on_counts_of_equal_gpus(jobs, gpus, is_whole):
    nodes = [build_node("a", gpus=gpus)] if is_whole else [build_node(f"n{i}", gpus=1) for i in range(gpus)]
    found, twin = Simulation(*nodes), NaiveEasy(gpus)
    starts = {}

    def note(now_s):
        starts.update(dict.fromkeys(twin.decide(now_s), now_s))

    def advance(until_s):
        while twin.running and min(end for _, end in twin.running.values()) <= until_s:
            now_s, key = min((end, key) for key, (_, end) in twin.running.items())
            del twin.running[key]
            note(now_s)

    for number, (gap_s, most, run_s, _) in enumerate(jobs):
        wanted = min(most, gpus)
        until_s = found.now_s + gap_s
        found.advance(until_s)
        advance(until_s)
        shape = {"gpus": wanted} if is_whole else {"gpus": 1, "replicas": wanted}
        found.submit(f"j{number:02}", run_s=run_s, **shape)
        twin.waiting.append((f"j{number:02}", wanted, run_s))
        note(until_s)
    found.finish()
    advance(10**9)
    assert found.starts == starts


@given(jobs=JOBS, nodes=st.lists(st.integers(1, 4), min_size=1, max_size=3), mode=st.sampled_from([EASY, CONSERVATIVE]))
@settings(deadline=None, max_examples=50)
def test_work_that_fits_waits_only_for_a_named_reason(jobs, nodes, mode):
    found = Simulation(*(build_node(f"n{i}", gpus=gpus) for i, gpus in enumerate(nodes)), backfill=mode)
    core = found.core
    for number, (gap_s, gpus, run_s, priority) in enumerate(jobs):
        found.advance(found.now_s + gap_s)
        found.submit(f"j{number}", min(gpus, max(nodes)), run_s, priority=priority)
        for key in core.state.pending:
            fits = bool(core._chooser.decide_placement(core.workload(key).spec, workload_id=key).placements)
            assert not fits or core.workload(key).reason.startswith("backfill: "), core.workload(key)


def run_stream(mode):
    """A job of all GPUs behind a stream of small ones that never leave all of them free."""
    found = Simulation(build_node("a", gpus=2), backfill=mode)
    found.submit("s0", 1, 10)
    found.submit("big", 2, 10)
    for number in range(1, 40):
        found.advance(1 + 5 * number)
        found.submit(f"s{number}", 1, 10)
    return found


def test_a_big_job_starves_behind_a_stream_of_small_ones_without_backfill_and_starts_as_promised_with_it():
    assert "big" not in run_stream(NONE).starts
    for mode in (BackfillMode.UNSPECIFIED, EASY, CONSERVATIVE):
        found = run_stream(mode)
        assert found.promised["big"] == [11 * S]
        assert found.starts["big"] == 11


SPANS = st.lists(
    st.tuples(st.integers(2, 30), st.integers(1, 12), st.sampled_from("ab"), st.sampled_from(["ada", "", "none"])),
    min_size=1,
    max_size=3,
)


@given(jobs=JOBS, spans=SPANS, stated=st.lists(st.booleans(), min_size=25, max_size=25))
@settings(deadline=None, max_examples=60)
def test_reservations_are_never_violated_and_all_work_starts_after_them(jobs, spans, stated):
    reservations = tuple(
        Reservation(
            name=f"r{number}",
            node_names=(node,),
            start_ns=start_s * S,
            end_ns=(start_s + length_s) * S,
            users=() if user == "none" or not user else (user,),
            maintenance=user == "none",
        )
        for number, (start_s, length_s, node, user) in enumerate(spans)
    )
    found = Simulation(build_node("a", gpus=2), build_node("b", gpus=2), reservations=reservations)
    state = found.core.state
    for number, (gap_s, gpus, run_s, _) in enumerate(jobs):
        found.advance(found.now_s + gap_s)
        user = "ada" if number % 3 == 0 else "bob"
        more = {} if stated[number] else {"expected_runtime_s": None}
        found.submit(f"j{number}", min(gpus, 2), run_s, user=user, **more)
    for until_s in range(found.now_s, 60):
        found.advance(until_s)
    found.finish()
    assert set(found.starts) == set(found.specs)
    nodes = {
        event.workload_id: event.placements[0].node_name for event in found.events if isinstance(event, WorkloadPlaced)
    }
    for key, start_s in found.starts.items():
        workload = state.workloads[key]
        for one in reservations:
            if nodes[key] not in list_reserved_nodes(one, state.nodes):
                continue
            may_begin = one.start_ns <= start_s * S and is_reserved_for(state, one, workload)
            is_clear = start_s * S >= one.end_ns or (start_s + found.specs[key]) * S <= one.start_ns
            if workload.spec.expected_runtime_s is None:
                is_clear = start_s * S >= one.end_ns
            assert may_begin or is_clear, (key, one)
    assert found.replay().digest() == state.digest()


def test_a_core_from_the_journal_decides_as_the_one_that_wrote_it():
    found = run_stream(EASY)
    twin = Core(found.replay(), catalogue.load_catalogue())
    for core in (found.core, twin):
        while core.has_backlog:
            core.retry(now_ns=found.now_s * S)
        core.submit(build_request("next", gpus=2, expected_runtime_s=5.0), now_ns=found.now_s * S)
        core.submit(build_request("small", gpus=1, expected_runtime_s=500.0), now_ns=found.now_s * S)
    # A round after the restart may quote new prices, which counts as a revision.
    small = found.core.workload("small")
    assert replace(twin.workload("small"), revision=small.revision) == small
    assert twin.workload("next").phase is WorkloadPhase.PENDING
