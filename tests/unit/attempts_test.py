"""Processes of workloads in the core: what agents are told and report, and when a workload ends and frees its GPUs."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request, drop_quotes
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.server.metric_collectors import IdleGaps
from eelgrid_controller.state.attempts import describe_start_hold
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_controller.state.events import (
    AttemptEnded,
    AttemptStarted,
    WorkloadCompleted,
    WorkloadEvicted,
    WorkloadPlaced,
    WorkloadStopping,
    WorkloadSubmitted,
    event_from_plain,
    event_to_plain,
)
from eelgrid_controller.state.node_allocations import ContradictoryEvent
from eelgrid_protos import catalogue
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    DrainOutcome,
    JobProgress,
    Mobility,
    ProcessSpec,
    StandardInput,
    WorkloadKind,
    WorkloadPhase,
)
from eelgrid_protos.schema import list_violations

PROCESS = ProcessSpec(argv=("python", "train.py"), environment={"A": "b"}, working_directory="/home/ann")


def node(name="a", *, gpus=2, runs=True):
    return build_node(name, gpus=gpus, runs_processes=runs, agent_version="1")


def job(key, *, gpus=1, process=PROCESS, mobility=Mobility.FIXED, **spec):
    return build_request(key, gpus=gpus, process=process, mobility=mobility, **spec)


def running(key, replica=0, attempt=1, started_ns=10):
    return AttemptStatus(
        workload_id=key, replica=replica, attempt=attempt, state=AttemptState.RUNNING, started_ns=started_ns
    )


def ended(key, code=0, replica=0, ended_ns=20, **known):
    begun = replace(running(key, replica), state=AttemptState.ENDED, ended_ns=ended_ns, exit_code=code)
    return replace(begun, **known)


def test_the_idle_gap_of_a_gpu_counts_only_while_the_next_job_waits():
    core = build_core(node(gpus=1))
    seen = []
    gaps = IdleGaps(lambda: core, seen.append)

    def commit(step):
        gaps.on_commit(CommitResult(step.events, step.nodes, core.state.revision))

    for key, submitted_ns in (("first", 1), ("second", 2)):
        commit(core.submit(job(key), now_ns=submitted_ns))
    commit(report(core, running("first", started_ns=10), now_ns=20))
    commit(report(core, ended("first", ended_ns=1_000_000_000), now_ns=30))
    commit(report(core, running("second", started_ns=1_040_000_000), now_ns=40))
    assert seen == [0.04]
    commit(report(core, ended("second", ended_ns=2_000_000_000), now_ns=50))
    commit(core.submit(job("third"), now_ns=5_000_000_000))
    # So short that only its end is reported.
    commit(report(core, replace(ended("third", ended_ns=5_030_000_000), started_ns=5_020_000_000), now_ns=60))
    assert seen == [0.04, 0.02]


def test_a_placed_job_whose_gpu_another_process_holds_is_explained_by_that():
    core = build_core(node(gpus=1))
    core.submit(job("w"), now_ns=1)
    workload, record = core.state.workloads["w"], core.state.nodes["a"]
    assert describe_start_hold(workload, {"a": record}) == ""
    held = replace(record.inventory.gpus[0], cordon="held by process 7 (eve, miner)")
    core.register_node(replace(record.inventory, gpus=(held,)), now_ns=2)
    assert describe_start_hold(workload, core.state.nodes) == (
        "replica 0 has not started: GPU 0 of a is held by process 7 (eve, miner)"
    )
    report(core, running("w"))
    assert describe_start_hold(core.state.workloads["w"], core.state.nodes) == ""


def cordon_gpu(core, name, index, text):
    """Another's process holds a GPU, as its agent says."""
    inventory = core.state.nodes[name].inventory
    gpus = tuple(replace(gpu, cordon=text if gpu.index == index else gpu.cordon) for gpu in inventory.gpus)
    return core.register_node(replace(inventory, gpus=gpus), now_ns=2)


def test_a_job_that_never_began_since_another_holds_its_gpu_starts_on_a_free_one_and_it_is_no_failure():
    core = build_core(node(gpus=2))
    core.submit(job("w"), now_ns=1)
    taken = core.state.workloads["w"].placements[0].gpu_indexes[0]
    cordon_gpu(core, "a", taken, "held by process 7 (eve, miner)")
    held = ended("w", None, reason="its GPU is held by process 7 (eve, miner)", gpu_held=True)
    step = report(core, replace(held, started_ns=0))
    assert kinds(step.events) == [AttemptEnded, WorkloadEvicted, WorkloadPlaced]
    now = core.state.workloads["w"]
    assert (now.phase, now.attempt, now.failures, now.preemptions) == (WorkloadPhase.PLACED, 2, 0, 0)
    assert now.placements[0].gpu_indexes == (1 - taken,)
    check_invariants(core.state)


def test_a_job_that_never_began_waits_in_the_queue_where_no_other_gpu_is_free():
    core = build_core(node(gpus=1))
    core.submit(job("w"), now_ns=1)
    cordon_gpu(core, "a", 0, "held by process 7 (eve, miner)")
    report(core, ended("w", None, reason="its GPU is held by process 7 (eve, miner)", gpu_held=True))
    assert core.state.workloads["w"].phase is WorkloadPhase.PENDING
    # It starts when the other has gone.
    cordon_gpu(core, "a", 0, "")
    assert core.state.workloads["w"].phase is WorkloadPhase.PLACED
    # Cancelled meanwhile it ends.
    core.cancel("w", now_ns=60)
    report(core, replace(ended("w", None, gpu_held=True, reason="its GPU is held"), attempt=2))
    assert core.state.workloads["w"].phase is WorkloadPhase.CANCELLED


def test_what_a_process_says_of_its_progress_is_in_no_event():
    core = build_core(node(gpus=1))
    core.submit(job("w"), now_ns=1)
    step = report(core, replace(running("w"), progress=JobProgress(step=1, total=9, time_ns=5)))
    (event,) = step.events
    assert event.status.progress is None
    assert "progress" not in event_to_plain(event)[1]["status"]
    assert core.state.workloads["w"].attempts[0].progress is None


def test_the_journal_has_what_is_new_of_processes_only_where_it_is_used():
    core = build_core(node(gpus=2))
    plain = next(one for one in core.submit(job("w"), now_ns=1).events if isinstance(one, WorkloadSubmitted))
    newer = {"standard_input", "terminal_size", "warn_signal", "warn_before_s"}
    assert newer.isdisjoint(event_to_plain(plain)[1]["spec"]["process"])
    process = replace(PROCESS, standard_input=StandardInput.TERMINAL, warn_signal="USR1", warn_before_s=60.0)
    used = next(
        one for one in core.submit(job("v", process=process), now_ns=2).events if isinstance(one, WorkloadSubmitted)
    )
    kind, body = event_to_plain(used)
    assert event_from_plain(kind, body) == used
    assert body["spec"]["process"]["standard_input"] == "terminal"
    began = report(core, running("w")).events[0]
    assert {"gpu_held", "progress", "checkpointed_ns"}.isdisjoint(event_to_plain(began)[1]["status"])


def test_only_an_owner_who_proved_it_is_told_to_the_agent():
    core = build_core(node(gpus=2))
    core.submit(job("w", user="ann"), now_ns=1, owner="ann")
    core.submit(job("v", user="bob"), now_ns=2)
    assert {item.workload_id: item.run_as for item in core.node_plan("a").assignments} == {"w": "ann", "v": ""}


def report(core, *statuses, node_name="a", now_ns=50):
    return core.record_attempts(node_name, statuses, now_ns=now_ns)


def kinds(events):
    return [type(event) for event in drop_quotes(events)]


def test_a_plan_has_the_command_the_attempt_and_the_number_of_replicas():
    core = build_core(node())
    core.submit(job("j"), now_ns=2)
    core.submit(build_request("other"), now_ns=3)
    by_key = {item.workload_id: item for item in core.node_plan("a").assignments}
    assert (by_key["j"].process, by_key["j"].attempt, by_key["j"].replicas, by_key["j"].stop) == (PROCESS, 1, 1, False)
    assert (by_key["other"].process, by_key["other"].attempt) == (None, 0)


def test_a_process_that_exited_with_0_ends_its_workload_and_starts_the_next_in_the_same_step():
    core = build_core(node(gpus=1))
    core.submit(job("first"), now_ns=2)
    core.submit(job("second"), now_ns=3)
    assert kinds(report(core, running("first")).events) == [AttemptStarted]
    assert report(core, running("first")).events == ()
    epoch = core.state.nodes["a"].plan_epoch
    step = report(core, ended("first"))
    assert kinds(step.events) == [AttemptEnded, WorkloadCompleted, WorkloadPlaced]
    assert core.workload("first").phase is WorkloadPhase.SUCCEEDED
    assert core.workload("first").exit_code == 0
    assert core.state.nodes["a"].plan_epoch > epoch
    assert [item.workload_id for item in core.node_plan("a").assignments] == ["second"]
    check_invariants(core.state)


@pytest.mark.parametrize(
    ("status", "reason", "code"),
    [
        (ended("j", 3), "exited with 3", 3),
        (ended("j", None, signal=9, reason="out of memory"), "ended by SIGKILL: out of memory", 137),
        (ended("j", 127, reason="cannot run 'x': not found"), "exited with 127: cannot run 'x': not found", 127),
        (ended("j", None, state=AttemptState.LOST, reason="it is gone"), "lost: it is gone", 1),
        (ended("j", 0, reason="time limit of 5 s"), "exited with 0: time limit of 5 s", 0),
    ],
)
def test_a_process_that_failed_fails_its_workload_with_the_reason(status, reason, code):
    core = build_core(node())
    core.submit(job("j"), now_ns=2)
    report(core, status)
    workload = core.workload("j")
    assert (workload.phase, workload.reason, workload.exit_code) == (WorkloadPhase.FAILED, reason, code)
    assert core.state.phases[WorkloadPhase.FAILED] == 1
    assert core.state.live_workloads == 0


def test_reports_of_another_attempt_another_node_or_another_engine_change_nothing_and_are_counted():
    core = build_core(node(), node("b"))
    core.submit(job("j"), now_ns=2)
    core.submit(build_request("served"), now_ns=2)
    place = core.workload("j").placements[0].node_name
    other = "b" if place == "a" else "a"
    stale = (ended("gone"), ended("served"), replace(ended("j"), attempt=2), ended("j", replica=1))
    step = report(core, *stale, node_name=place)
    assert (step.result, step.events) == (4, ())
    assert report(core, ended("j"), node_name=other).result == 1
    assert core.workload("j").phase is WorkloadPhase.PLACED
    assert report(core, ended("j"), node_name=place).result == 0
    assert report(core, ended("j"), node_name=place).result == 1


def test_a_cancelled_process_holds_its_gpu_until_its_end_was_reported():
    core = build_core(node(gpus=1))
    core.submit(job("j"), now_ns=2)
    core.submit(job("next"), now_ns=3)
    report(core, running("j"))
    step = core.cancel("j", now_ns=60)
    assert kinds(step.events) == [WorkloadStopping]
    assert step.nodes == {"a"}
    assert core.cancel("j", now_ns=61).events == ()
    assert [item.stop for item in core.node_plan("a").assignments] == [True]
    assert core.workload("next").phase is WorkloadPhase.PENDING
    report(core, ended("j", None, signal=15, reason="stopped"))
    assert core.workload("j").phase is WorkloadPhase.CANCELLED
    assert core.workload("next").phase is WorkloadPhase.PLACED


def test_a_process_that_succeeded_before_its_stop_arrived_succeeded():
    core = build_core(node())
    core.submit(job("j"), now_ns=2)
    core.cancel("j", now_ns=3)
    report(core, ended("j"))
    assert core.workload("j").phase is WorkloadPhase.SUCCEEDED


def test_one_failing_replica_stops_the_others_and_the_gang_frees_its_gpus_together():
    core = build_core(node("a", gpus=1), node("b", gpus=1))
    core.submit(job("gang", replicas=2, kind=WorkloadKind.TRAINING_JOB), now_ns=2)
    at = {place.replica: place.node_name for place in core.workload("gang").placements}
    report(core, running("gang", 0), node_name=at[0])
    report(core, running("gang", 1), node_name=at[1])
    step = report(core, ended("gang", 7, replica=1), node_name=at[1])
    assert kinds(step.events) == [AttemptEnded]
    assert step.nodes == {"a", "b"}
    assert core.node_plan(at[0]).assignments[0].stop
    assert core.submit(job("next"), now_ns=70).result.phase is WorkloadPhase.PENDING
    report(core, ended("gang", None, replica=0, signal=15, reason="stopped", ended_ns=30), node_name=at[0])
    workload = core.workload("gang")
    assert (workload.phase, workload.reason, workload.exit_code) == (
        WorkloadPhase.FAILED,
        "replica 1: exited with 7",
        7,
    )
    assert core.workload("next").phase is WorkloadPhase.PLACED
    check_invariants(core.state)


def test_work_with_a_process_goes_only_to_agents_that_run_processes():
    core = build_core(node("a", runs=False))
    waiting = core.submit(job("j"), now_ns=2).result
    assert waiting.reason == "processes: no agent of a node that would do runs processes"
    assert "--run-processes" in core.explain_workload("j").remedy
    assert core.submit(build_request("other"), now_ns=3).result.phase is WorkloadPhase.PLACED
    core.register_node(node("b"), now_ns=4)
    assert [place.node_name for place in core.workload("j").placements] == ["b"]
    core.register_node(node("a"), now_ns=5)
    assert core.submit(job("k", gpus=2), now_ns=6).result.reason.startswith("gpu_count")


def test_a_process_is_not_moved_or_scaled_and_finishes_under_a_drain_without_a_grace():
    core = build_core(node("a", gpus=2), node("b", gpus=2))
    core.submit(job("j"), now_ns=2)
    name = core.workload("j").placements[0].node_name
    with pytest.raises(FailedPrecondition, match="runs processes"):
        core.scale("j", 2, now_ns=3)
    (found,) = core.preview_drain(name, (), DrainTerms(force=True), now_ns=100)
    assert found.outcome is DrainOutcome.FINISHES
    core.cordon_node(name, drain=DrainTerms(force=True), now_ns=100)
    while core.is_drain_due(200):
        core.continue_drains(now_ns=200)
    assert core.workload("j").phase is WorkloadPhase.PLACED


def test_the_state_of_processes_survives_a_checkpoint_and_a_replay():
    core, events = build_core(node(gpus=2)), []
    twin = build_core(node(gpus=2))
    for step in (
        core.submit(job("a"), now_ns=2),
        core.submit(job("b"), now_ns=3),
        report(core, running("a"), running("b")),
        core.cancel("b", now_ns=60),
        report(core, ended("a", 4)),
    ):
        events += step.events
    for event in events:
        kind, body = event_to_plain(event)
        twin.state.apply(event_from_plain(kind, body))
    assert twin.state.digest() == core.state.digest()
    again = ClusterState.load(core.state.dump())
    assert again.digest() == core.state.digest()
    assert again.phases == core.state.phases
    restarted = Core(again, catalogue.load_catalogue())
    assert [item.stop for item in restarted.node_plan("a").assignments] == [True]
    report(restarted, ended("b", None, signal=15))
    assert restarted.workload("b").phase is WorkloadPhase.CANCELLED


def test_events_that_contradict_the_state_are_refused():
    core = build_core(node())
    core.submit(job("j"), now_ns=2)
    core.submit(build_request("served"), now_ns=2)
    end = WorkloadCompleted(time_ns=5, workload_id="j", phase=WorkloadPhase.SUCCEEDED)
    for event in (
        end,
        WorkloadStopping(time_ns=5, workload_id="served", reason="cancelled"),
        AttemptEnded(time_ns=5, workload_id="j", status=replace(ended("j"), attempt=2)),
        AttemptStarted(time_ns=5, workload_id="j", status=running("j", replica=3)),
    ):
        with pytest.raises(ContradictoryEvent):
            core.state.apply(event)
    report(core, ended("j"))
    with pytest.raises(ContradictoryEvent):
        core.state.apply(end)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"process": replace(PROCESS, argv=())}, "process.argv"),
        ({"process": replace(PROCESS, working_directory="here")}, "process.working_directory"),
        ({"process": replace(PROCESS, stop_signal="STOP")}, "process.stop_signal"),
        ({"process": replace(PROCESS, time_limit_s=-1.0)}, "process.time_limit_s"),
        ({"process": replace(PROCESS, environment={"CUDA_VISIBLE_DEVICES": "0"})}, "process.environment"),
        ({"process": replace(PROCESS, environment={"A": "x" * 32_000, "B": "x" * 32_768})}, None),
        ({"process": replace(PROCESS, environment={f"V{n}": "x" * 30_000 for n in range(3)})}, "process.environment"),
        ({"mobility": Mobility.MOVABLE}, "mobility"),
        ({"kind": WorkloadKind.INFERENCE_SERVICE}, "kind"),
        ({"replicas": 513}, "replicas"),
    ],
)
def test_a_process_that_cannot_be_run_is_refused_by_its_field(change, field):
    spec = replace(job("j").spec, **change)
    fields = [violation.field for violation in list_violations(spec)]
    assert fields == ([] if field is None else [field])
