"""What keeps a job from starting before its turn: holds, begin times, dependencies and retries, in the core."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import check_invariants
from tests.unit.attempts_test import PROCESS, ended, job, kinds, node, report

from eelgrid_controller.core.core import Core
from eelgrid_controller.queueing.job_conditions import compute_backoff_ns
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    WorkloadCancelled,
    WorkloadDeferred,
    WorkloadEvicted,
    WorkloadHeld,
    WorkloadPlaced,
    WorkloadReleased,
    WorkloadRetried,
    event_from_plain,
    event_to_plain,
)
from eelgrid_protos import catalogue
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument
from eelgrid_protos.messages import (
    DependencyCondition,
    JobDependency,
    JobSchedule,
    Policy,
    Queue,
    WorkloadPhase,
)
from eelgrid_protos.schema import list_violations

SECOND = 10**9
SUCCEEDED, ENDED, NOT_SUCCEEDED = (
    DependencyCondition.SUCCEEDED,
    DependencyCondition.ENDED,
    DependencyCondition.NOT_SUCCEEDED,
)


def after(*keys, condition=SUCCEEDED, **schedule):
    return JobSchedule(after=tuple(JobDependency(workload_id=key, condition=condition) for key in keys), **schedule)


def submit(core, key, *, now_ns=3, hold=False, **spec):
    return core.submit(replace(job(key, **spec), hold=hold), now_ns=now_ns).result


def phase(core, key):
    return core.workload(key).phase


def reason(core, key):
    return core.workload(key).reason


def finish(core, key, code=0, now_ns=50):
    workload = core.workload(key)
    status = ended(key, code, attempt=workload.attempt)
    return report(core, status, node_name=workload.placements[0].node_name, now_ns=now_ns)


def reload(core):
    return Core(ClusterState.load(core.state.dump()), catalogue.load_catalogue())


def test_held_work_does_not_start_in_free_room_and_starts_once_it_is_released():
    core = build_core(node())
    assert submit(core, "j", hold=True, user="ana").reason == "held: by ana"
    core.retry_waiting(now_ns=4)
    assert phase(core, "j") is WorkloadPhase.PENDING
    assert core.explain_workload("j").remedy == "It is held by ana. To help: eelctl release j."
    step = core.release("j", now_ns=5)
    assert kinds(step.events) == [WorkloadReleased, WorkloadPlaced]
    assert (step.result.phase, step.result.held_by) == (WorkloadPhase.PLACED, "")
    assert core.release("j", now_ns=6).events == ()


def test_waiting_work_is_held_once_and_work_that_runs_or_has_ended_is_not():
    core = build_core(node(gpus=1))
    submit(core, "runs")
    submit(core, "waits")
    step = core.hold("waits", user="bo", now_ns=4)
    assert [type(event) for event in step.events] == [WorkloadHeld, WorkloadDeferred]
    assert step.result.reason == "held: by bo"
    assert core.hold("waits", user="cy", now_ns=5).events == ()
    with pytest.raises(FailedPrecondition, match="only pending work is held"):
        core.hold("runs", now_ns=6)
    finish(core, "runs")
    assert phase(core, "waits") is WorkloadPhase.PENDING
    with pytest.raises(FailedPrecondition, match="workload runs has ended"):
        core.hold("runs", now_ns=7)


def test_held_work_can_be_cancelled_and_a_dry_run_of_it_says_that_it_would_be_held():
    core = build_core(node())
    found = core.submit(replace(job("j", user="ana"), hold=True, dry_run=True), now_ns=2)
    assert (found.events, found.result.reason, found.result.held_by) == ((), "held: by ana", "ana")
    submit(core, "j", hold=True)
    assert core.workload("j").held_by == "an operator"
    assert core.cancel("j", now_ns=4).result.phase is WorkloadPhase.CANCELLED
    assert core.workload("j").held_by == ""


@pytest.mark.parametrize("queues", [(), (Queue(name="default"),)])
def test_a_hold_outlasts_a_restart_and_rounds_do_not_meet_what_may_not_start(queues):
    core = build_core(node(gpus=1))
    core.update_policy(replace(core.state.policy, queues=queues), now_ns=2)
    submit(core, "held", hold=True, priority=9)
    again = reload(core)
    assert again.state.digest() == core.state.digest()
    submit(again, "runs", now_ns=4)
    submit(again, "waits", now_ns=5)
    assert again.state.pending.next_tickets(None, 9) == [again.state.pending.ticket("waits")]
    assert list(again.state.pending) == ["held", "waits"]
    finish(again, "runs", now_ns=6)
    assert phase(again, "waits") is WorkloadPhase.PLACED
    assert phase(again, "held") is WorkloadPhase.PENDING
    finish(again, "waits", now_ns=7)
    assert again.release("held", now_ns=8).result.phase is WorkloadPhase.PLACED


def test_work_starts_at_its_begin_time_and_not_before():
    core = build_core(node())
    found = submit(core, "j", schedule=JobSchedule(begin_ns=60 * SECOND))
    assert found.reason == "begin_time: not before 1970-01-01 00:01:00 UTC"
    core.retry_waiting(now_ns=59 * SECOND)
    assert phase(core, "j") is WorkloadPhase.PENDING
    assert not core.is_round_due(59 * SECOND)
    assert core.is_round_due(60 * SECOND)
    core.retry_waiting(now_ns=60 * SECOND)
    assert phase(core, "j") is WorkloadPhase.PLACED
    assert not core.is_round_due(61 * SECOND)
    assert submit(core, "past", now_ns=62 * SECOND, schedule=JobSchedule(begin_ns=5)).phase is WorkloadPhase.PLACED


def test_the_state_of_a_restart_wakes_work_whose_begin_time_passed_meanwhile():
    core = build_core(node())
    submit(core, "j", schedule=JobSchedule(begin_ns=60 * SECOND))
    again = reload(core)
    assert again.is_round_due(90 * SECOND)
    again.retry_waiting(now_ns=90 * SECOND)
    assert phase(again, "j") is WorkloadPhase.PLACED


def test_a_child_starts_in_the_step_in_which_the_last_of_its_parents_succeeds():
    core = build_core(node(gpus=4))
    submit(core, "a")
    submit(core, "b")
    child = submit(core, "c", schedule=after("a", "b"))
    assert child.reason == "dependency: waits for a and 1 other to end"
    finish(core, "a")
    assert reason(core, "c") == "dependency: waits for b to end"
    step = finish(core, "b")
    assert [event.workload_id for event in step.events if isinstance(event, WorkloadPlaced)] == ["c"]


@pytest.mark.parametrize(
    ("condition", "code", "starts"),
    [
        (SUCCEEDED, 0, True),
        (SUCCEEDED, 3, False),
        (ENDED, 0, True),
        (ENDED, 3, True),
        (NOT_SUCCEEDED, 0, False),
        (NOT_SUCCEEDED, 3, True),
    ],
)
def test_a_dependency_is_met_by_the_end_that_it_names_and_by_no_other(condition, code, starts):
    core = build_core(node(gpus=4))
    submit(core, "a")
    submit(core, "c", schedule=after("a", condition=condition))
    finish(core, "a", code)
    assert phase(core, "c") is (WorkloadPhase.PLACED if starts else WorkloadPhase.CANCELLED)


def test_a_failed_dependency_ends_the_child_and_its_children_with_the_reason():
    core = build_core(node(gpus=4))
    submit(core, "a")
    submit(core, "b", schedule=after("a"))
    submit(core, "c", schedule=after("b"))
    submit(core, "cleanup", schedule=after("b", condition=ENDED))
    step = finish(core, "a", 3)
    ends = [event for event in step.events if isinstance(event, WorkloadCancelled)]
    assert [event.workload_id for event in ends] == ["b", "c"]
    assert reason(core, "b") == "dependency_failed: a failed, and this starts only if it succeeds"
    assert reason(core, "c") == "dependency_failed: b was cancelled, and this starts only if it succeeds"
    assert phase(core, "cleanup") is WorkloadPhase.PLACED
    check_invariants(core.state)


def test_a_child_of_work_that_has_failed_already_ends_as_it_is_submitted():
    core = build_core(node())
    submit(core, "a")
    finish(core, "a", 3)
    child = submit(core, "b", schedule=after("a"))
    assert (child.phase, child.reason.partition(":")[0]) == (WorkloadPhase.CANCELLED, "dependency_failed")
    assert submit(core, "c", schedule=after("a", condition=ENDED)).phase is WorkloadPhase.PLACED


def test_a_cancelled_parent_ends_what_needs_its_success_and_starts_what_does_not():
    core = build_core(node(gpus=1))
    submit(core, "runs")
    submit(core, "a")
    submit(core, "b", schedule=after("a"))
    submit(core, "c", schedule=after("a", condition=NOT_SUCCEEDED))
    core.cancel("a", now_ns=9)
    assert phase(core, "b") is WorkloadPhase.CANCELLED
    assert reason(core, "c").partition(":")[0] == "gpu_count"


@pytest.mark.parametrize(
    ("schedule", "field", "problem"),
    [
        (after("ghost"), "spec.schedule.after[0].workload_id", "is 'ghost', and there is no such workload"),
        (after("a", "ghost"), "spec.schedule.after[1].workload_id", "is 'ghost', and there is no such workload"),
        (after("pod"), "spec.schedule.after[0].condition", "is succeeded, and pod runs no process"),
        (after("self"), "spec.schedule.after[0].workload_id", "is 'self'"),
    ],
)
def test_a_dependency_that_nothing_can_meet_is_refused_with_its_field_and_remedy(schedule, field, problem):
    core = build_core(node(gpus=4))
    submit(core, "a")
    core.submit(build_request("pod"), now_ns=2)
    with pytest.raises(InvalidArgument) as refused:
        submit(core, "self", schedule=schedule)
    (violation,) = refused.value.violations
    assert violation.field == field
    assert violation.problem.startswith(problem)
    assert violation.remedy


def test_a_schedule_names_each_parent_once_and_retries_are_of_processes():
    assert [one.field for one in list_violations(after("a", "a"))] == ["after"]
    request = build_request("j", schedule=JobSchedule(retries_most=2))
    assert [one.field for one in list_violations(request)] == ["spec.schedule.retries_most"]
    unset = JobDependency(workload_id="a", condition=DependencyCondition.UNSPECIFIED)
    assert [one.field for one in list_violations(unset)] == ["condition"]


@pytest.mark.parametrize("kept", [0, 1])
def test_how_a_parent_ended_is_known_as_long_as_live_work_depends_on_it_and_then_forgotten(kept):
    core = build_core(node(gpus=1), state=ClusterState(ended_most=kept))
    submit(core, "a")
    submit(core, "b")
    submit(core, "c", schedule=after("a", "b"))
    finish(core, "a")
    finish(core, "b", now_ns=60)
    core = reload(core)
    assert core.state.workloads["a"].phase is WorkloadPhase.SUCCEEDED
    assert core.state.phases[WorkloadPhase.SUCCEEDED] == 2
    core.retry_waiting(now_ns=61)
    finish(core, "c", now_ns=70)
    assert len(core.state.workloads) == kept
    assert core.state.live_workloads == 0
    check_invariants(core.state)


def test_a_failed_attempt_is_tried_again_after_a_growing_pause_until_its_retries_are_used_up():
    core = build_core(node())
    submit(core, "j", schedule=JobSchedule(retries_most=2))
    step = finish(core, "j", 3, now_ns=SECOND)
    assert any(isinstance(event, WorkloadRetried) for event in step.events)
    found = core.workload("j")
    assert (found.phase, found.failures, found.attempts) == (WorkloadPhase.PENDING, 1, ())
    assert found.reason == "retry: attempt 1 failed: exited with 3"
    assert core.explain_workload("j").remedy == (
        "Attempt 1 failed: exited with 3. So far 1 attempt has failed; the next starts not before 1970-01-01 00:00:11 UTC. "
        "To help: wait, or cancel it."
    )
    assert not core.is_round_due(11 * SECOND - 1)
    core.retry_waiting(now_ns=11 * SECOND)
    assert (phase(core, "j"), core.workload("j").attempt) == (WorkloadPhase.PLACED, 2)
    finish(core, "j", 4, now_ns=20 * SECOND)
    assert core.workload("j").not_before_ns == 40 * SECOND
    core.retry_waiting(now_ns=40 * SECOND)
    finish(core, "j", 5, now_ns=50 * SECOND)
    assert (phase(core, "j"), reason(core, "j")) == (WorkloadPhase.FAILED, "exited with 5")
    assert (core.workload("j").failures, core.workload("j").exit_code) == (2, 5)
    check_invariants(core.state)


def test_the_back_off_doubles_up_to_six_minutes():
    waits = [compute_backoff_ns(count) // SECOND for count in (1, 2, 3, 6, 7, 100)]
    assert waits == [10, 20, 40, 320, 360, 360]


def test_success_a_cancel_and_an_eviction_count_as_no_failure():
    core = build_core(node())
    for key in ("good", "stopped"):
        submit(core, key, schedule=JobSchedule(retries_most=5))
    core.state.apply(WorkloadEvicted(time_ns=4, workload_id="good", reason="evicted: preempted"))
    assert core.workload("good").failures == 0
    core = reload(core)
    core.retry_waiting(now_ns=5)
    finish(core, "good")
    core.cancel("stopped", now_ns=60)
    finish(core, "stopped", 143, now_ns=61)
    assert (phase(core, "good"), phase(core, "stopped")) == (WorkloadPhase.SUCCEEDED, WorkloadPhase.CANCELLED)
    assert core.workload("stopped").failures == 0


def test_a_child_waits_through_the_retries_of_its_parent():
    core = build_core(node())
    submit(core, "a", schedule=JobSchedule(retries_most=1))
    submit(core, "b", schedule=after("a"))
    finish(core, "a", 3, now_ns=SECOND)
    assert phase(core, "b") is WorkloadPhase.PENDING
    core.retry_waiting(now_ns=20 * SECOND)
    finish(core, "a", 0, now_ns=30 * SECOND)
    assert phase(core, "b") is WorkloadPhase.PLACED


def test_of_several_conditions_the_first_is_named_in_a_fixed_order():
    core = build_core(node(gpus=4))
    submit(core, "a")
    submit(core, "j", hold=True, user="ana", schedule=after("a", begin_ns=90 * SECOND))
    assert reason(core, "j") == "held: by ana"
    core.release("j", now_ns=4)
    assert reason(core, "j") == "dependency: waits for a to end"
    finish(core, "a")
    assert reason(core, "j").partition(":")[0] == "begin_time"
    core.hold("j", user="bo", now_ns=91 * SECOND)
    assert reason(core, "j") == "held: by bo"
    assert core.release("j", now_ns=92 * SECOND).result.phase is WorkloadPhase.PLACED


@pytest.mark.parametrize(
    "event",
    [
        WorkloadHeld(time_ns=1, workload_id="j", user="ana"),
        WorkloadReleased(time_ns=1, workload_id="j"),
        WorkloadRetried(time_ns=1, workload_id="j", reason="retry: it failed", not_before_ns=9),
        WorkloadCancelled(time_ns=1, workload_id="j", reason="dependency_failed: a failed"),
    ],
)
def test_events_of_schedules_come_back_from_the_journal_as_they_were(event):
    assert event_from_plain(*event_to_plain(event)) == event


def test_without_a_schedule_the_journal_is_what_older_versions_read():
    assert event_to_plain(WorkloadCancelled(time_ns=1, workload_id="j"))[1] == {"time_ns": 1, "workload_id": "j"}
    core = build_core(node())
    assert "schedule" not in str([event_to_plain(event) for event in core.submit(job("j"), now_ns=2).events])
    assert Policy() == core.state.policy
    assert PROCESS.argv


def test_every_condition_outlasts_a_restart():
    core = build_core(node(gpus=8))
    submit(core, "first", hold=True)
    submit(core, "needs", schedule=after("first"))
    submit(core, "behind", schedule=after("needs"))
    submit(core, "early", schedule=JobSchedule(begin_ns=90 * SECOND))
    core = reload(core)
    core.retry_waiting(now_ns=4)
    core.release("first", now_ns=5)
    assert [key for key, one in core.state.workloads.items() if one.placements] == ["first"]
    finish(core, "first", 3)
    assert (phase(core, "needs"), phase(core, "behind")) == (WorkloadPhase.CANCELLED, WorkloadPhase.CANCELLED)


def test_work_on_a_node_that_is_removed_ends_its_children_too():
    core = build_core(build_node("a", gpus=1, runs_processes=True, agent_version="1"))
    submit(core, "a")
    submit(core, "b", schedule=after("a"))
    core.mark_node_lost("a", now_ns=5)
    core.remove_node("a", force=True, is_connected=False, now_ns=6)
    assert phase(core, "b") is WorkloadPhase.CANCELLED


def test_many_children_end_in_bounded_steps_and_none_is_left():
    core = build_core(node(gpus=1))
    submit(core, "a")
    for number in range(1200):
        submit(core, f"c{number}", schedule=after("a"))
    step = finish(core, "a", 3)
    first = [event for event in step.events if isinstance(event, WorkloadCancelled)]
    assert 0 < len(first) < 1200
    assert core.has_backlog
    while core.has_backlog:
        core.retry(now_ns=60)
    assert core.state.live_workloads == 0
    check_invariants(core.state)
