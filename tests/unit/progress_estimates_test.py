"""What a job reports of its progress says when it ends: for promised starts, over restarts, and not too often."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.queueing.runtime_estimates import estimate_runtime
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.measurement_events import RuntimeExpected
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    BackfillMode,
    JobProgress,
    Mobility,
    ProcessSpec,
    RuntimeSource,
    WorkloadPhase,
)

S = 10**9


def build_job_core(gpus=2):
    return build_core(build_node("a", gpus=gpus, runs_processes=True))


def submit(core, key, gpus=1, *, now_s=1, limit_s=0.0, expects_s=None, **spec):
    process = ProcessSpec(argv=("true",), working_directory="/", time_limit_s=limit_s, grace_s=5.0)
    request = build_request(
        gpus=gpus, key=key, process=process, mobility=Mobility.FIXED, expected_runtime_s=expects_s, **spec
    )
    return core.submit(request, now_ns=now_s * S).result


def report(core, key, now_s, step, total=1000, *, replica=0, attempt=1, state=AttemptState.RUNNING):
    """Tells the core how far a job is; returns the run times that follow from it."""
    progress = JobProgress(step=step, total=total, time_ns=now_s * S)
    status = AttemptStatus(
        workload_id=key, replica=replica, attempt=attempt, state=state, started_ns=1 * S, progress=progress
    )
    events = core.record_attempts("a", (status,), now_ns=now_s * S).events
    return [event.runtime_s for event in events if isinstance(event, RuntimeExpected)]


def find_runtime(core, key):
    found = estimate_runtime(core.workload(key), core.state)
    return None if found is None else (found.expected_s, found.source)


def use_presumed(core):
    core.update_policy(replace(core.state.policy, backfill=BackfillMode.EASY), now_ns=S)


def test_a_job_that_nobody_knew_anything_of_is_expected_to_end_at_its_own_pace():
    core = build_job_core()
    submit(core, "job")
    told = [one for now_s in range(2, 62) for one in report(core, "job", now_s, now_s)]
    assert told == [], "the first minute says too little"
    (runtime_s,) = report(core, "job", 62, 62)
    # A step a second: 938 are left after 61 seconds.
    assert runtime_s == pytest.approx(999.0)
    assert core.workload("job").progress_runtime_s == runtime_s
    # Nothing waits for a guess unless the policy says so.
    assert find_runtime(core, "job") is None
    use_presumed(core)
    assert find_runtime(core, "job") == (runtime_s, RuntimeSource.PROGRESS)
    assert core.explain_workload("job").runtime.source is RuntimeSource.PROGRESS
    # As long as it keeps its pace nothing new is written.
    assert [one for now_s in range(63, 1000) for one in report(core, "job", now_s, now_s)] == []


def test_a_pace_that_changes_is_followed_by_its_recent_half_at_most_once_a_minute():
    core = build_job_core()
    submit(core, "job")
    step, times = 0.0, []
    for now_s in range(2, 1800):
        step += 1.0 if now_s < 600 else 0.25
        times += [(now_s, one) for one in report(core, "job", now_s, int(step), 1200)]
    assert all(after - before >= 60 for (before, _), (after, _) in pairwise(times))
    assert 3 <= len(times) <= 20
    # 600 steps at one a second, then 600 at one in four seconds.
    assert times[-1][1] == pytest.approx(3000.0, rel=0.1)


def test_noisy_reports_write_little():
    core, noise = build_job_core(), random.Random(5)
    submit(core, "job")
    times = [
        one
        for now_s in range(10, 20_000, 10)
        for one in report(core, "job", now_s, max(1, int(now_s / 20 + noise.uniform(-3, 3))), 1000)
    ]
    assert len(times) <= 8
    assert times[-1] == pytest.approx(20_000, rel=0.1)


def test_a_job_that_went_on_from_a_checkpoint_is_not_taken_for_a_quick_one():
    core = build_job_core()
    submit(core, "job")
    for now_s in range(2, 62, 10):
        report(core, "job", now_s, 900 + now_s // 10)
    (runtime_s,) = report(core, "job", 72, 907)
    assert runtime_s == pytest.approx(71.0 + 930.0, rel=0.05)


@pytest.mark.parametrize(
    "how",
    [
        {"total": 0},
        {"replica": 1},
        {"total": 5},
    ],
)
def test_what_says_nothing_of_the_end_is_left_out(how):
    core = build_job_core()
    submit(core, "job", replicas=2)
    assert not any(report(core, "job", now_s, now_s, **how) for now_s in range(2, 400))


def test_work_that_is_being_stopped_says_nothing_of_its_end():
    core = build_job_core()
    submit(core, "stopped")
    report(core, "stopped", 2, 2)
    core.cancel("stopped", now_ns=3 * S)
    assert not any(report(core, "stopped", now_s, now_s) for now_s in range(4, 400))


def test_the_time_limit_bounds_what_progress_says_and_what_the_user_expected_does_not():
    core = build_job_core()
    submit(core, "limited", limit_s=500.0)
    submit(core, "stated", expects_s=5000.0)
    for now_s in range(2, 72, 10):
        report(core, "limited", now_s, now_s)
        report(core, "stated", now_s, now_s)
    assert find_runtime(core, "limited") == (505.0, RuntimeSource.PROGRESS)
    assert find_runtime(core, "stated") == (pytest.approx(999.0), RuntimeSource.PROGRESS)


def test_a_run_that_begins_again_is_not_known_by_the_one_before():
    core = build_job_core()
    use_presumed(core)
    submit(core, "job")
    for now_s in range(2, 72, 10):
        report(core, "job", now_s, now_s)
    assert find_runtime(core, "job") is not None
    core.requeue("job", now_ns=80 * S)
    report(core, "job", 81, 81, state=AttemptState.ENDED)
    assert core.workload("job").attempt == 2
    assert find_runtime(core, "job") is None
    assert core.workload("job").progress_runtime_s is None


def test_the_run_time_is_in_a_checkpoint():
    core = build_job_core()
    use_presumed(core)
    submit(core, "job")
    for now_s in range(2, 72, 10):
        report(core, "job", now_s, now_s)
    again = ClusterState.load(core.state.dump())
    assert again.digest() == core.state.digest()
    assert estimate_runtime(again.workloads["job"], again).source is RuntimeSource.PROGRESS


@pytest.mark.parametrize("mode", [BackfillMode.UNSPECIFIED, BackfillMode.CONSERVATIVE])
def test_promised_starts_follow_what_runs_and_say_why_they_are_later(mode):
    core = build_job_core()
    core.update_policy(replace(core.state.policy, backfill=mode), now_ns=1 * S)
    submit(core, "run", 1, expects_s=2000.0)
    submit(core, "big", 2, expects_s=50.0)
    assert core.workload("big").promise.start_ns == 2001 * S
    for now_s in range(2, 72, 10):
        report(core, "run", now_s, now_s)
    while core.has_backlog or core.is_round_due(73 * S):
        core.retry_waiting(now_ns=73 * S)
    promise = core.workload("big").promise
    assert promise.start_ns == pytest.approx(1000 * S, abs=10 * S)
    assert (promise.waits_for, promise.source) == (("run",), RuntimeSource.PROGRESS)
    # It turns out to be half as quick.
    for now_s in range(100, 700, 10):
        report(core, "run", now_s, 62 + (now_s - 62) // 2)
    while core.has_backlog or core.is_round_due(701 * S):
        core.retry_waiting(now_ns=701 * S)
    promise = core.workload("big").promise
    assert promise.start_ns > 1500 * S
    assert promise.cause == "overrun: run runs for longer than expected"
    assert core.workload("big").phase is WorkloadPhase.PENDING
