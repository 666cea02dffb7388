"""Elastic jobs with deadlines in simulated time: every admitted one meets it, and a slow twin on counts agrees."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backfill_rig import S
from tests.builders.cluster import build_node
from tests.elastic_rig import ElasticSimulation
from tests.state_invariants import check_invariants

from eelgrid_controller.queueing.elastic_shares import ScalingCurve, make_curve, thin_curve
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import DeadlineBroken, PromisesMoved, WorkloadScaled
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import JobDeadline

# More than the tolerance of an overrun.
UNIT_S = 100
RATES = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(
    lambda gains: {count + 1: 10 + sum(gains[: count + 1]) for count in range(len(gains))}
)
JOBS = st.lists(
    st.tuples(st.integers(0, 4), RATES, st.integers(1, 120), st.integers(1, 12), st.integers(0, 9)),
    min_size=1,
    max_size=12,
)


def submit(found, key, rates, work, within):
    try:
        found.submit_elastic(key, rates, work * UNIT_S, found.now_s + within * UNIT_S)
    except InvalidArgument:
        return False
    return True


def list_breaches(found):
    return [event for event in found.events if isinstance(event, DeadlineBroken)]


def admit_by_counts(found, gpus, rates, work, within):
    """The fewest workers on which a job ends in time from some moment on, by counts of GPUs over time; None if none do."""
    held = []
    for one in found.core.state.workloads.values():
        if one.phase.is_ended or one.share is None:
            continue
        begun = one.placed_ns if one.placements else one.promise.start_ns
        # A job that was scaled has done some of its work at another rate.
        since = max(begun, one.share.at_ns)
        run_s = (one.spec.training.work - one.share.work_done) / next(
            rate.rate_hz for rate in one.share.rates if rate.replicas == one.spec.replicas
        )
        held.append((begun, since + int(run_s * S), one.spec.replicas))
    now, due = found.now_s * S, (found.now_s + within * UNIT_S) * S
    for count in sorted(rates):
        run = int(work * UNIT_S / rates[count] * S)
        for start in sorted({now, *(end for _, end, _ in held if end > now)}):
            moments = [start, *(begin for begin, _, _ in held if start < begin < start + run)]
            most = max(sum(size for begin, end, size in held if begin <= at < end) for at in moments)
            if start + run <= due and most + count <= gpus:
                return count
    return None


@given(jobs=JOBS, gpus=st.integers(1, 6))
@settings(deadline=None, max_examples=60)
def test_admission_gives_no_less_than_a_slow_twin_on_counts_finds_enough_and_keeps_every_deadline(jobs, gpus):
    """The twin may start a job on any GPU at any time, so that it finds room where kept places leave none; never the reverse.

    But where others make room, by giving back what they do not need or by starting elsewhere, that is not compared.
    """
    found, deadlines = ElasticSimulation(*(build_node(f"n{i}", gpus=1) for i in range(gpus))), {}
    for number, (gap, rates, work, within, _) in enumerate(jobs):
        found.advance(found.now_s + gap * UNIT_S)
        key = f"j{number:02}"
        # A number of workers counts only if it gains something.
        useful = {count: rate for count, rate in rates.items() if count == 1 or rate > rates[count - 1]}
        wanted = admit_by_counts(found, gpus, useful, work, within)
        waits = len(found.core.state.pending)
        deadline_s, before = found.now_s + within * UNIT_S, len(found.events)
        if submit(found, key, rates, work, within):
            deadlines[key] = deadline_s
            # The twin leaves every other job as it is.
            if not any(isinstance(event, PromisesMoved | WorkloadScaled) for event in found.events[before:]):
                assert wanted is not None
                assert wanted <= found.replica_count(key)
        else:
            assert wanted is None or waits
    found.advance(found.now_s + 100 * UNIT_S)
    assert set(found.ended) == set(deadlines)
    assert all(found.ended[key] <= deadline_s for key, deadline_s in deadlines.items())
    assert not list_breaches(found)


@given(jobs=JOBS, nodes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
@settings(deadline=None, max_examples=60)
def test_admitted_deadlines_are_met_among_work_without_one_while_spare_gpus_come_and_go(jobs, nodes):
    found = ElasticSimulation(*(build_node(f"n{i}", gpus=gpus) for i, gpus in enumerate(nodes)))
    deadlines, fixed = {}, {}
    for number, (gap, rates, work, within, change) in enumerate(jobs):
        found.advance(found.now_s + gap * UNIT_S)
        key, deadline_s = f"j{number:02}", found.now_s + within * UNIT_S
        if change == 0:
            found.submit(key, 1, work * 10)
        elif change == 1:
            try:
                found.submit(key, 1, work * 10, deadline=JobDeadline(end_ns=deadline_s * S))
                fixed[key] = deadline_s - work * 10
            except InvalidArgument:
                pass
        elif submit(found, key, rates, work, within):
            deadlines[key] = deadline_s
        for one in found.list_elastic():
            # The planner that grows jobs, and one that takes GPUs away, ask for anything within bounds.
            training = one.spec.training
            wanted = min(training.replicas_most, max(training.replicas_least, change))
            try:
                found.scale(one.workload_id, wanted)
            except InvalidArgument:
                assert wanted < one.spec.replicas
    found.advance(found.now_s + 300 * UNIT_S)
    assert set(found.ended) == set(deadlines)
    assert all(found.ended[key] <= deadline_s for key, deadline_s in deadlines.items())
    assert all(found.starts[key] <= start_s for key, start_s in fixed.items())
    assert not list_breaches(found)
    check_invariants(found.core.state)
    state = found.replay()
    assert state.digest() == found.core.state.digest()
    assert ClusterState.load(json.loads(json.dumps(state.dump()))).digest() == state.digest()


@given(
    rates=st.dictionaries(st.integers(1, 100), st.floats(0.1, 100.0), min_size=1, max_size=60), most=st.integers(2, 8)
)
def test_a_curve_has_the_sizes_that_are_faster_than_all_below_and_a_thinner_one_the_ends_of_it(rates, most):
    curve = make_curve(rates)
    faster = [count for count in rates if all(rates[other] < rates[count] for other in rates if other < count)]
    assert list(curve.workers) == sorted(faster)
    for count in range(1, 101):
        below = [rates[other] for other in rates if other <= count]
        expected = max(below) if below else rates[min(rates)] * count / min(rates)
        assert curve.get_rate_hz(count) == expected
    thin = thin_curve(curve, most)
    assert isinstance(thin, ScalingCurve)
    assert set(thin.workers) <= set(curve.workers)
    assert len(thin.workers) == min(most, len(curve.workers))
    assert {thin.workers[0], thin.workers[-1]} == {curve.workers[0], curve.workers[-1]}
