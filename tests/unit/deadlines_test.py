"""Deadlines with admission: what is refused and why, what is kept over rounds, and how a broken promise is told."""

import json
from dataclasses import replace

import click
import pytest
from tests.backfill_rig import S, Simulation
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.cli.deadline import describe_deadline, format_deadline, parse_deadline_ns
from eelgrid_controller.core import deadlines
from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import DeadlineBroken, WorkloadPromised, event_to_plain
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument, ResourceExhausted
from eelgrid_protos.messages import (
    BackfillMode,
    BudgetScope,
    GpuSharing,
    Interference,
    JobDeadline,
    JobDependency,
    JobSchedule,
    Policy,
    PowerBudget,
    Queue,
    QueueQuota,
    Reservation,
    TrainingPromise,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
)

HOUR = 3600


def by(end_s, **more):
    return JobDeadline(end_ns=end_s * S, **more)


def refuse(found, key="due", gpus=2, run_s=HOUR, **spec):
    """Returns the violation by which a submission is refused, and checks that nothing has changed."""
    before = found.core.state.digest()
    with pytest.raises(InvalidArgument) as refused:
        found.submit(key, gpus, run_s, **spec)
    assert found.core.state.digest() == before
    (violation,) = refused.value.violations
    return violation


def list_breaches(found):
    return [(event.workload_id, event.cause) for event in found.events if isinstance(event, DeadlineBroken)]


def run_first(run_s=HOUR, **kwargs):
    """A node whose two GPUs a job holds for an hour."""
    found = Simulation(build_node("a", gpus=2), **kwargs)
    found.submit("first", 2, run_s)
    return found


# Admission


def test_a_deadline_that_cannot_be_kept_is_refused_with_the_earliest_possible_end_and_the_remedy():
    violation = refuse(run_first(), deadline=by(2 * HOUR))
    assert violation.field == "spec.deadline.end_ns"
    assert violation.problem == (
        "is 1970-01-01 02:00:00 UTC, and the earliest possible end is 1970-01-01 02:00:01 UTC, 1 s later"
    )
    assert "best_effort" in violation.remedy
    found = run_first()
    assert found.submit("due", 2, HOUR, deadline=by(2 * HOUR + 1)).promise.start_ns == (HOUR + 1) * S


def test_work_that_could_start_now_is_refused_if_it_would_end_too_late():
    violation = refuse(Simulation(build_node("a", gpus=2)), deadline=by(HOUR))
    assert violation.field == "spec.deadline.end_ns"
    assert "1970-01-01 01:00:01 UTC" in violation.problem


def test_a_deadline_in_the_past_is_refused_even_without_a_promise():
    for more in ({}, {"best_effort": True}):
        found = run_first()
        found.advance(100)
        violation = refuse(found, deadline=by(99, **more))
        assert (violation.field, violation.problem) == (
            "spec.deadline.end_ns",
            "is 1970-01-01 00:01:39 UTC, which has passed",
        )


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("spec.expected_runtime_s", {"expected_runtime_s": None}),
        ("spec.schedule.after", {"schedule": JobSchedule(after=(JobDependency(workload_id="first"),))}),
    ],
)
def test_what_leaves_the_start_or_the_end_unknown_is_refused_with_its_field(field, spec):
    if "schedule" in spec:
        schedule = replace(spec["schedule"].after[0], condition=spec["schedule"].after[0].condition.ENDED)
        spec = {"schedule": JobSchedule(after=(schedule,))}
    violation = refuse(run_first(), deadline=by(10 * HOUR), **spec)
    assert violation.field == field
    found = run_first()
    found.submit("due", 2, HOUR, deadline=by(10 * HOUR, best_effort=True), **spec)
    assert found.core.workload("due").promise is None or field == "spec.expected_runtime_s"


def test_a_deadline_behind_work_of_which_no_end_is_known_is_refused():
    found = Simulation(build_node("a", gpus=2))
    found.submit("endless", 2, HOUR, expected_runtime_s=None)
    assert "not known when it could start" in refuse(found, deadline=by(1000 * HOUR)).problem


def test_services_have_no_deadline_and_elastic_training_needs_its_work():
    request = build_request().spec.request
    training = TrainingPromise(slowdown_most=0.1, replicas_least=1, replicas_most=2)
    for field, more in (
        ("deadline", {"kind": WorkloadKind.INFERENCE_SERVICE}),
        ("training.work", {"kind": WorkloadKind.TRAINING_JOB, "training": training}),
    ):
        spec = WorkloadSpec(name="x", request=request, deadline=by(1), **more)
        assert field in [one.field for one in spec.violations()]


def test_a_begin_time_counts_and_its_start_is_kept_while_it_is_parked():
    found = run_first()
    schedule = JobSchedule(begin_ns=3 * HOUR * S)
    assert refuse(found, deadline=by(4 * HOUR - 1), schedule=schedule).field == "spec.deadline.end_ns"
    due = found.submit("due", 2, HOUR, deadline=by(4 * HOUR), schedule=schedule)
    assert (due.promise.start_ns, due.reason.partition(":")[0]) == (3 * HOUR * S, "begin_time")
    # It would run on into the promised start.
    found.submit("long", 2, 5 * HOUR)
    found.submit("short", 2, HOUR)
    found.finish()
    found.advance(3 * HOUR)
    found.finish()
    assert (found.starts["short"], found.starts["due"]) == (HOUR + 1, 3 * HOUR)
    assert found.starts["long"] == 4 * HOUR
    assert not list_breaches(found)


def test_reservations_of_operators_count():
    away = Reservation(name="away", node_names=("a",), start_ns=HOUR * S, end_ns=5 * HOUR * S, maintenance=True)
    found = Simulation(build_node("a", gpus=2), reservations=(away,))
    assert "06:00:00" in refuse(found, run_s=HOUR, deadline=by(2 * HOUR)).problem
    assert found.submit("due", 2, HOUR, deadline=by(6 * HOUR)).promise.start_ns == 5 * HOUR * S


def test_a_dry_run_tells_the_start_that_would_be_promised_and_changes_nothing():
    found = run_first()
    before = found.core.state.digest()
    request = build_request(gpus=2, cpu=0, memory_gib=0, expected_runtime_s=60.0, deadline=by(2 * HOUR), dry_run=True)
    preview = found.core.submit(request, now_ns=found.now_s * S).result
    assert preview.promise.start_ns == (HOUR + 1) * S
    assert found.core.state.digest() == before


def test_the_number_of_promised_deadlines_is_bounded(monkeypatch):
    monkeypatch.setattr(deadlines, "PROMISED_MOST", 2)
    found = run_first()
    for number in range(2):
        found.submit(f"due{number}", 2, 60, deadline=by(10 * HOUR))
    with pytest.raises(ResourceExhausted, match="2 workloads"):
        found.submit("due2", 2, 60, deadline=by(10 * HOUR))


def test_with_queues_the_quota_that_is_free_by_then_counts():
    quota = QueueQuota(resource="gpu", nominal=2000, borrowing_limit=0)
    found = Simulation(build_node("a", gpus=4))
    queues = (Queue(name="q", quotas=(quota,)),)
    found.apply(found.core.update_policy(replace(found.core.state.policy, queues=queues), now_ns=S))
    found.submit("first", 2, HOUR, queue="q")
    # There is room at once, but no quota before an hour.
    assert "02:00:01" in refuse(found, deadline=by(HOUR + 1800), queue="q").problem
    due = found.submit("due", 2, HOUR, deadline=by(2 * HOUR + 1), queue="q")
    assert (due.promise.start_ns, due.promise.assumes) == ((HOUR + 1) * S, ("quota",))
    found.finish()
    assert found.starts["due"] == HOUR + 1


def test_watts_that_are_free_by_then_count():
    found = Simulation(build_node("a", gpus=4))
    budget = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=4 * 15.0 + 2 * 200.0)
    found.apply(found.core.update_policy(replace(found.core.state.policy, budgets=(budget,)), now_ns=S))
    first = found.submit("first", 2, HOUR)
    assert first.phase is WorkloadPhase.PLACED
    due = found.submit("due", 2, HOUR, deadline=by(3 * HOUR))
    assert due.phase is WorkloadPhase.PENDING
    assert due.promise.start_ns == (HOUR + 1) * S
    assert due.promise.assumes == ("power",)


# Promises that are kept


def test_neither_backfill_nor_an_earlier_submission_takes_the_promised_places():
    found = run_first()
    found.submit("due", 2, HOUR, deadline=by(2 * HOUR + 1))
    for number in range(6):
        found.advance(10 + number)
        found.submit(f"s{number}", 1, 2 * HOUR)
    found.finish()
    assert found.starts["due"] == HOUR + 1
    assert not list_breaches(found)


def test_a_promised_start_becomes_earlier_when_running_work_ends_early():
    found = run_first()
    found.submit("due", 2, HOUR, deadline=by(9 * HOUR))
    found.submit("next", 2, HOUR, deadline=by(9 * HOUR))
    found.now_s = 600
    found.apply(found.core.cancel("first", now_ns=600 * S))
    assert found.starts["due"] == 600
    assert found.promised["next"] == [(2 * HOUR + 1) * S, (600 + HOUR) * S]


def test_promises_outlive_the_controller_with_their_places():
    found = run_first()
    found.submit("due", 2, HOUR, deadline=by(2 * HOUR + 1))
    twin = Core(ClusterState.load(json.loads(json.dumps(found.core.state.dump()))), catalogue.load_catalogue())
    for core in (found.core, twin):
        while core.has_backlog:
            core.retry(now_ns=2 * S)
        core.submit(build_request("long", gpus=2, cpu=0, memory_gib=0, expected_runtime_s=1e5), now_ns=2 * S)
        core.cancel("first", now_ns=(HOUR + 1) * S)
        while core.has_backlog:
            core.retry(now_ns=(HOUR + 1) * S)
    # A round after the restart may quote new prices, which counts as a revision.
    assert replace(twin.workload("due"), revision=found.core.workload("due").revision) == found.core.workload("due")
    assert twin.workload("due").phase is WorkloadPhase.PLACED


def test_best_effort_reserves_nothing_and_is_told_of_no_breach():
    found = run_first()
    due = found.submit("due", 2, HOUR, deadline=by(60, best_effort=True))
    assert due.deadline_breach is None
    found.finish()
    found.advance(5 * HOUR)
    assert not list_breaches(found)
    assert describe_deadline(found.core.workload("due")) == "1970-01-01 00:01:00 UTC, missed"


# Promises that are broken


def test_an_overrun_breaks_the_promise_of_what_waits_for_it_once_and_with_its_cause():
    found = run_first()
    found.submit("due", 2, HOUR, deadline=by(2 * HOUR + 1))
    found.ends = []
    for now_s in range(HOUR, 4 * HOUR, 120):
        found.advance(now_s)
    assert list_breaches(found) == [("due", "overrun: first runs for longer than expected")]
    due = found.core.workload("due")
    assert due.deadline_breach.cause == "overrun: first runs for longer than expected"
    assert "not kept since" in describe_deadline(due)
    assert format_deadline(due.spec.deadline, HOUR * S, is_broken=True) == "in 60 min (broken)"
    # It still has the earliest start that there is.
    assert due.promise.start_ns > found.now_s * S - 10 * 60 * S
    found.apply(found.core.cancel("first", now_ns=found.now_s * S))
    assert found.core.workload("due").phase is WorkloadPhase.PLACED
    assert found.replay().digest() == found.core.state.digest()


def test_a_job_that_runs_for_longer_than_stated_breaks_its_own_promise():
    found = Simulation(build_node("a", gpus=2))
    found.submit("due", 2, HOUR, deadline=by(2 * HOUR))
    found.ends = []
    found.advance(2 * HOUR)
    assert not list_breaches(found)
    for now_s in range(2 * HOUR + 1, 3 * HOUR, 600):
        found.advance(now_s)
    assert list_breaches(found) == [("due", "overrun: it runs for longer than stated")]
    assert found.core.state.broken_deadlines == {"due"}
    assert ClusterState.load(found.core.state.dump()).broken_deadlines == {"due"}
    found.apply(found.core.cancel("due", now_ns=found.now_s * S))
    assert not found.core.state.broken_deadlines


def test_after_a_node_is_lost_starts_are_searched_elsewhere_the_earliest_deadline_first():
    found = Simulation(build_node("a", gpus=2), build_node("b", gpus=2))
    found.submit("one", 2, HOUR)
    found.submit("two", 2, 2 * HOUR)
    due = found.submit("due", 2, HOUR, deadline=by(4 * HOUR + 1))
    tight = found.submit("tight", 2, HOUR, deadline=by(3 * HOUR + 1))
    assert (due.promise.start_ns, tight.promise.start_ns) == ((HOUR + 1) * S, (2 * HOUR + 1) * S)
    lost = due.promise.placements[0].node_name
    assert tight.promise.placements[0].node_name == lost
    found.now_s = 600
    found.apply(found.core.mark_node_lost(lost, now_ns=600 * S))
    found.wake()
    assert not list_breaches(found)
    due, tight = found.core.workload("due"), found.core.workload("tight")
    assert (tight.promise.start_ns, tight.promise.cause) == ((2 * HOUR + 1) * S, "")
    assert (due.promise.start_ns, due.promise.cause) == ((3 * HOUR + 1) * S, f"node: {lost} is lost")
    left = tight.promise.placements[0].node_name
    found.apply(found.core.mark_node_lost(left, now_ns=601 * S))
    found.wake()
    assert sorted(list_breaches(found)) == [("due", f"node: {left} is lost"), ("tight", f"node: {left} is lost")]


def test_a_quota_that_other_work_took_is_the_named_cause():
    quota = QueueQuota(resource="gpu", nominal=4000, borrowing_limit=0)
    found = Simulation(build_node("a", gpus=8), build_node("b", gpus=8))
    queues = (Queue(name="q", quotas=(quota,)),)
    found.apply(found.core.update_policy(replace(found.core.state.policy, queues=queues), now_ns=S))
    found.submit("first", 2, HOUR, queue="q")
    due = found.submit("due", 4, HOUR, queue="q", deadline=by(3 * HOUR))
    assert due.promise.start_ns == (HOUR + 1) * S
    assert found.submit("thief", 2, 4 * HOUR, queue="q").phase is WorkloadPhase.PLACED
    assert "no other work takes the quota of its queue" in found.core.explain_workload("due").remedy
    found.advance(HOUR + 1)
    assert not list_breaches(found)
    found.advance(HOUR + 120)
    assert list_breaches(found) == [("due", "quota: queue q has too little gpu quota left")]
    due = found.core.workload("due")
    assert (due.promise.start_ns, due.promise.cause) == ((4 * HOUR + 1) * S, due.deadline_breach.cause)
    found.finish()
    assert found.starts["due"] == 4 * HOUR + 1


def test_a_hold_by_its_user_gives_up_the_start_and_breaks_the_promise_once_it_is_too_late():
    found = run_first()
    found.submit("due", 2, HOUR, deadline=by(3 * HOUR))
    found.apply(found.core.hold("due", user="ada", now_ns=2 * S))
    assert found.core.workload("due").promise is None
    assert not list_breaches(found)
    found.finish()
    found.advance(2 * HOUR)
    found.advance(3 * HOUR + 1)
    assert list_breaches(found) == [("due", "held: by ada")]


def test_without_kept_starts_the_journal_is_as_older_versions_read_it():
    core = build_core(build_node("a", gpus=2))
    core.submit(build_request("first", gpus=2, expected_runtime_s=60.0), now_ns=S)
    events = core.submit(build_request("next", gpus=2, expected_runtime_s=60.0), now_ns=S).events
    plain = [event_to_plain(event)[1] for event in events if isinstance(event, WorkloadPromised)]
    assert plain
    assert all(set(body["promise"]) <= {"start_ns", "waits_for", "ends", "source", "cause"} for body in plain)
    assert "deadline" not in event_to_plain(events[0])[1].get("spec", {})


def test_conservative_places_are_kept_and_given_up_with_the_mode():
    found = run_first(backfill=BackfillMode.CONSERVATIVE)
    found.submit("next", 2, HOUR)
    assert found.core.workload("next").promise.placements
    policy = replace(found.core.state.policy, backfill=BackfillMode.NONE)
    found.apply(found.core.update_policy(policy, now_ns=2 * S))
    assert found.core.workload("next").promise is None
    assert isinstance(policy, Policy)


# Commands


@pytest.mark.parametrize(
    ("text", "end_s"),
    [("+2h", 1000 + 2 * HOUR), ("2h", 1000 + 2 * HOUR), ("90m", 1000 + 5400), ("1970-01-02T00:00Z", 24 * HOUR)],
)
def test_a_deadline_is_a_span_from_now_or_a_time(text, end_s):
    assert parse_deadline_ns(text, 1000 * S) == end_s * S


@pytest.mark.parametrize("text", ["soon", "++2h", "2x", "-2h", ""])
def test_any_other_deadline_is_refused_with_its_option(text):
    with pytest.raises(click.BadParameter) as refused:
        parse_deadline_ns(text, 0)
    assert refused.value.param_hint == "--deadline"


def test_a_late_start_that_another_renewal_has_displaced_is_renewed_as_well(monkeypatch):
    """It was taken out of the reserved starts twice, which broke the core."""
    sim = Simulation(build_node("a", gpus=2))
    sim.submit("hold", 2, 10 * HOUR, expected_runtime_s=float(HOUR))
    for key, priority in (("first", 5), ("second", 1)):
        sim.submit(key, 2, HOUR, priority=priority, deadline=JobDeadline(end_ns=20 * HOUR * S))
    planner, renewed = sim.core._backfill, []
    reserve = planner.reserve_start

    def displace(workload, now_ns):
        renewed.append(workload.workload_id)
        found = reserve(workload, now_ns)
        planner._reserved = [one for one in planner._reserved if one.workload_id != "second"]
        return found

    monkeypatch.setattr(planner, "reserve_start", displace)
    assert {one.workload_id for one in planner._reserved} == {"first", "second"}
    planner._renew_late(9 * HOUR * S)
    assert renewed == ["first", "second"]


def test_a_kept_start_takes_no_gpu_of_a_model_whose_quota_is_gone_by_then():
    def declare(core, nominal, now_s=1):
        quotas = QueueQuota(resource="gpu/G2", nominal=nominal), QueueQuota(resource="gpu/T4", nominal=8000)
        policy = replace(
            core.state.policy, backfill=BackfillMode.CONSERVATIVE, queues=(Queue(name="default", quotas=quotas),)
        )
        core.update_policy(policy, now_ns=now_s * S)

    core = build_core(build_node("a", gpus=1), build_node("b", gpus=1, model="T4"))
    declare(core, 8000)
    for key, model, run_s in (("on-a", "G2", 100.0), ("on-b", "T4", 150.0)):
        core.submit(build_request(key, models=(model,), expected_runtime_s=run_s), now_ns=S)
    core.submit(build_request("any", expected_runtime_s=300.0), now_ns=S)
    core.submit(build_request("next", models=("T4",), expected_runtime_s=300.0), now_ns=S)
    core.retry_waiting(now_ns=2 * S)
    assert core.workload("any").promise.placements[0].node_name == "a"
    assert core.workload("next").promise.placements[0].node_name == "b"
    declare(core, 0, now_s=60)
    core.cancel("on-a", now_ns=101 * S)
    core.cancel("on-b", now_ns=140 * S)
    assert core.workload("next").placed_ns == 140 * S
    assert core.workload("any").phase is WorkloadPhase.PENDING


def test_a_start_that_moves_for_a_deadline_is_not_put_beside_work_that_does_not_bear_it():
    core = build_core(build_node("a", gpus=1))
    pair = Interference(load="frail", beside="loud", slowdown=0.5)
    core.update_policy(replace(core.state.policy, interference=(pair,)), now_ns=S)
    core.submit(build_request("first", expected_runtime_s=100.0), now_ns=S)
    loud, frail = GpuSharing(load="loud"), GpuSharing(load="frail", slowdown_most=0.1)
    core.submit(
        build_request("loose", milli=500, expected_runtime_s=300.0, deadline=by(900), gpu_sharing=loud), now_ns=S
    )
    core.submit(
        build_request("due", milli=300, expected_runtime_s=100.0, deadline=by(250), gpu_sharing=frail), now_ns=S
    )
    while core.has_backlog:
        core.retry(now_ns=S)
    assert {key: core.workload(key).promise.start_ns // S for key in ("due", "loose")} == {"due": 101, "loose": 201}
    assert core.workload("due").deadline_breach is None
