"""Deadlines of elastic jobs: the share that is admitted, what grown jobs give back, and what measured progress changes."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_node
from tests.elastic_rig import MODEL, ElasticSimulation, S
from tests.state_invariants import check_invariants

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import DeadlineBroken, WorkloadScaled
from eelgrid_controller.state.measurement_events import WorkloadShareChanged
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import JobDeadline, WorkloadPhase

RATES = {1: 1.0, 2: 1.8, 4: 3.0}
HOUR = 3600


def simulate(gpus=4):
    return ElasticSimulation(build_node("a", gpus=gpus))


def list_breaches(found):
    return [(event.workload_id, event.cause) for event in found.events if isinstance(event, DeadlineBroken)]


def check_replay(found):
    state = found.replay()
    assert state.digest() == found.core.state.digest()
    assert ClusterState.load(json.loads(json.dumps(state.dump()))).digest() == state.digest()
    check_invariants(found.core.state)


@pytest.mark.parametrize(("within_s", "replicas"), [(1000, 1), (999, 2), (556, 2), (555, 4), (334, 4)])
def test_a_job_gets_the_fewest_replicas_with_which_it_meets_its_deadline(within_s, replicas):
    found = simulate()
    job = found.submit_elastic("due", RATES, 1000, 1 + within_s)
    assert (job.phase, job.spec.replicas, job.share.replicas) == (WorkloadPhase.PLACED, replicas, replicas)
    found.advance(2000)
    assert found.ended["due"] <= 1 + within_s
    assert not list_breaches(found)
    check_replay(found)


def test_a_deadline_that_no_share_meets_is_refused_with_the_earliest_end_of_all_shares():
    found = simulate()
    with pytest.raises(InvalidArgument) as refused:
        found.submit_elastic("due", RATES, 1000, 301)
    (violation,) = refused.value.violations
    assert (violation.field, "00:05:35 UTC" in violation.problem) == ("spec.deadline.end_ns", True)


def test_without_measured_rates_or_work_the_deadline_is_refused_and_the_remedy_says_what_to_state():
    found = simulate()
    job = found.submit_elastic("other", RATES, 10, 10_000)
    training = replace(job.spec.training, profile="unknown")
    spec = replace(job.spec, training=training, replicas=1)
    with pytest.raises(InvalidArgument) as refused:
        found.submit("due", 1, HOUR, kind=spec.kind, training=training, deadline=spec.deadline)
    (violation,) = refused.value.violations
    assert violation.field == "spec.training.profile"
    assert "profile import" in violation.remedy
    without = replace(spec, training=replace(training, work=0.0))
    assert [one.field for one in without.violations()] == ["training.work"]
    best = replace(without, deadline=JobDeadline(end_ns=1, best_effort=True))
    assert list(best.violations()) == []


def test_a_repeated_submission_is_the_one_that_was_admitted_whatever_size_it_was_given():
    found = simulate()
    first = found.submit_elastic("due", RATES, 1000, 400)
    again = found.submit_elastic("due", RATES, 1000, 400)
    assert (again.spec.replicas, again.revision) == (4, first.revision)


def test_a_job_that_waits_has_its_share_reserved_and_is_not_delayed_by_others():
    found = simulate()
    found.submit("first", 4, 500)
    job = found.submit_elastic("due", RATES, 1000, 1 + 500 + 556)
    assert (job.spec.replicas, job.promise.start_ns, len(job.promise.placements)) == (2, 501 * S, 2)
    found.submit("long", 4, HOUR)
    found.advance(600)
    assert found.core.workload("due").phase is WorkloadPhase.PLACED
    found.advance(2000)
    assert found.ended["due"] <= 1 + 500 + 556
    check_replay(found)


def test_a_grown_job_gives_back_what_it_does_not_need_for_a_job_that_would_be_refused():
    found = simulate()
    found.submit_elastic("grown", RATES, 1000, 1200)
    found.scale("grown", 4)
    found.submit_elastic("due", RATES, 1000, 1 + 560)
    assert (found.replica_count("grown"), found.replica_count("due")) == (1, 2)
    assert found.core.workload("due").phase is WorkloadPhase.PLACED
    found.advance(3000)
    assert found.ended["grown"] <= 1200
    assert found.ended["due"] <= 561
    check_replay(found)


def test_a_grown_job_keeps_what_is_not_needed_and_gives_nothing_for_a_job_that_is_refused_all_the_same():
    found = ElasticSimulation(build_node("a", gpus=2), build_node("b", gpus=2))
    found.submit_elastic("one", {1: 1.0, 2: 1.8}, 1000, 1500)
    found.submit_elastic("two", {1: 1.0, 2: 1.8}, 1000, 1500)
    found.scale("one", 2)
    found.scale("two", 2)
    with pytest.raises(InvalidArgument):
        found.submit_elastic("late", RATES, 1000, 200)
    assert (found.replica_count("one"), found.replica_count("two")) == (2, 2)
    found.submit_elastic("due", {1: 1.0}, 400, 1 + 401)
    assert sorted((found.replica_count("one"), found.replica_count("two"))) == [1, 2]
    check_replay(found)


def test_a_job_with_a_deadline_is_not_shrunk_below_its_share():
    found = simulate()
    found.submit_elastic("due", RATES, 1000, 1 + 560)
    with pytest.raises(InvalidArgument, match="promised otherwise"):
        found.scale("due", 1)
    found.scale("due", 4)
    found.advance(300)
    # What is left is done by one replica now.
    found.scale("due", 1)
    found.advance(3000)
    assert found.ended["due"] <= 561


def test_progress_that_is_slower_than_the_profile_makes_a_job_grow_before_it_is_late():
    found = simulate()
    found.submit_elastic("due", RATES, 1000, 1 + 560)
    found.advance(101)
    # 1.8 a second were expected.
    found.report("due", 150)
    (share,) = [event.share for event in found.events if isinstance(event, WorkloadShareChanged)]
    assert share.pace == pytest.approx(1.5 / 1.8)
    assert found.replica_count("due") == 4
    found.advance(3000)
    assert found.ended["due"] <= 561
    assert not list_breaches(found)
    check_replay(found)


def test_a_job_that_is_slower_and_finds_no_more_gpus_breaks_its_promise_with_that_cause():
    found = simulate()
    found.submit_elastic("due", RATES, 1000, 1 + 560)
    found.submit("other", 2, HOUR)
    found.advance(101)
    found.report("due", 100)
    assert list_breaches(found) == [
        ("due", "progress: it is slower than its profile says, and more replicas were not to be had")
    ]
    check_replay(found)


def test_progress_is_news_once_a_minute_and_of_jobs_with_a_share_alone():
    found = simulate()
    found.submit_elastic("due", RATES, 1000, 1 + 560)
    found.submit("other", 1, HOUR)
    found.advance(30)
    found.report("due", 50)
    found.report("other", 50)
    assert not [event for event in found.events if isinstance(event, WorkloadShareChanged)]


def test_work_that_grows_takes_no_place_that_was_promised():
    found = simulate()
    found.submit("first", 2, 500)
    found.submit_elastic("grown", {1: 1.0, 2: 1.8}, 1000, 2000)
    found.submit("due", 3, 100, deadline=JobDeadline(end_ns=700 * S))
    found.scale("grown", 2)
    assert not [event for event in found.events if isinstance(event, WorkloadScaled)]
    found.advance(3000)
    assert found.starts["due"] <= 600
    assert not list_breaches(found)


def test_of_several_models_one_with_known_rates_is_chosen_and_kept():
    found = ElasticSimulation(build_node("a", gpus=2, model="G1"), build_node("b", gpus=2, model=MODEL))
    job = found.submit_elastic("due", {1: 1.0, 2: 1.8}, 1000, 2000)
    assert job.spec.request.gpu_models == (MODEL,)
    assert {one.node_name for one in job.placements} == {"b"}


def test_a_job_that_loses_its_start_is_given_the_size_with_which_it_still_ends_in_time():
    found = ElasticSimulation(build_node("a", gpus=1), build_node("b", gpus=4))
    found.submit("first", 1, 300)
    found.submit("other", 4, 600, priority=1)
    job = found.submit_elastic("due", RATES, 1000, 1 + 1350)
    assert (job.spec.replicas, job.promise.start_ns) == (1, 301 * S)
    found.apply(found.core.cordon_node("a", now_ns=found.now_s * S))
    found.wake()
    job = found.core.workload("due")
    assert (job.spec.replicas, job.promise.start_ns, job.promise.cause) == (2, 601 * S, "node: a is cordoned")
    found.advance(3000)
    assert found.ended["due"] <= 1351
    assert not list_breaches(found)
    check_replay(found)
