"""Attempts of work that an engine runs: reported as one for all replicas, and the core ends the work as they ended."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.events import WorkloadPlaced, event_from_plain, event_to_plain
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    EnforcementMode,
    Mobility,
    PoolMode,
    PreemptionReclaim,
    ProcessSpec,
    Queue,
    QueuePreemption,
    QueueQuota,
    WorkloadPhase,
)

TRAITS = {"required_traits": ("slurm/partition/main",), "evicted_by_engine": True}


def begin(*nodes):
    core = build_core(*(nodes or (build_node("a", gpus=4, pool="p"),)))
    for name in core.state.nodes:
        core.update_external_usage(name, ExternalUsage(traits=TRAITS["required_traits"]), now_ns=2)
    return core


def submit(core, key, now_ns=3, *, gpus=1, **spec):
    return core.submit(build_request(key, gpus=gpus, **TRAITS, **spec), now_ns=now_ns)


def report(core, key, now_ns=9, **changes):
    workload = core.workload(key)
    known = {"replica": 0, "attempt": workload.attempt, "state": AttemptState.ENDED, "exit_code": 0, "ended_ns": 8}
    status = AttemptStatus(workload_id=key, **{**known, **changes})
    return core.record_attempts(None, (status,), now_ns=now_ns)


@pytest.mark.parametrize(
    ("changes", "phase", "reason", "code"),
    [
        ({}, WorkloadPhase.SUCCEEDED, "", 0),
        ({"exit_code": 3}, WorkloadPhase.FAILED, "exited with 3", 3),
        ({"exit_code": None, "signal": 11}, WorkloadPhase.FAILED, "ended by SIGSEGV", 139),
        (
            {"exit_code": None, "state": AttemptState.LOST, "reason": "its node failed"},
            WorkloadPhase.FAILED, "lost: its node failed", 1,
        ),
    ],
    ids=["succeeded", "exit code", "signal", "lost"],
)  # fmt: skip
def test_work_of_an_engine_ends_as_its_one_attempt_ended(changes, phase, reason, code):
    core = begin(build_node("a", gpus=1), build_node("b", gpus=1))
    submit(core, "pair", replicas=2)
    submit(core, "next")
    assert report(core, "pair", state=AttemptState.RUNNING, exit_code=None, started_ns=4).result == 0
    step = report(core, "pair", started_ns=4, **changes)
    ended = core.workload("pair")
    assert (ended.phase, ended.reason, ended.exit_code) == (phase, reason, code)
    assert [one.workload_id for one in step.events if isinstance(one, WorkloadPlaced)] == ["next"]
    check_invariants(core.state)


def test_reports_of_an_engine_and_of_an_agent_are_told_apart():
    core = build_core(build_node("a", gpus=4, runs_processes=True, agent_version="1"))
    core.update_external_usage("a", ExternalUsage(traits=TRAITS["required_traits"]), now_ns=2)
    submit(core, "theirs")
    process = ProcessSpec(argv=("train",), working_directory="/")
    core.submit(build_request("ours", process=process, mobility=Mobility.FIXED), now_ns=3)
    status = AttemptStatus(workload_id="theirs", replica=0, attempt=0, state=AttemptState.ENDED, exit_code=0)
    # An agent says nothing of what an engine runs, nor an engine of an agent's processes, nor anybody of other attempts.
    assert core.record_attempts("a", (status,), now_ns=5).result == 1
    assert core.record_attempts(None, (replace(status, workload_id="ours"),), now_ns=5).result == 1
    assert report(core, "theirs", attempt=2).result == report(core, "theirs", replica=1).result == 1
    assert {core.workload(key).phase for key in ("theirs", "ours")} == {WorkloadPhase.PLACED}
    assert report(core, "theirs").result == 0
    assert core.workload("theirs").phase is WorkloadPhase.SUCCEEDED


def test_work_that_its_engine_cancelled_has_its_reason():
    core = begin()
    submit(core, "w")
    core.cancel("w", reason="cancelled in Slurm", now_ns=5)
    assert (core.workload("w").phase, core.workload("w").reason) == (WorkloadPhase.CANCELLED, "cancelled in Slurm")


def test_a_victim_that_its_engine_requeued_returns_to_the_queue_with_its_id_and_a_replay_is_equal():
    core = begin()
    rules = QueuePreemption(reclaim=PreemptionReclaim.NOMINAL)
    own = [
        Queue(name=name, parent="root", quotas=(QueueQuota(resource="gpu", nominal=gpus),), preemption=rules)
        for name, gpus in (("x", 4000), ("y", 0))
    ]
    pools = (PoolMode(pool="p", mode=EnforcementMode.ENFORCE),)
    core.update_policy(replace(core.state.policy, queues=(Queue(name="root"), *own), pools=pools), now_ns=2)
    base = json.loads(json.dumps(core.state.dump()))
    events = [*submit(core, "victim", gpus=4, queue="y").events, *submit(core, "gainer", 4, gpus=4, queue="x").events]
    assert [one.workload_id for one in core.list_evictions()] == ["victim"]
    step = report(core, "victim", exit_code=None, signal=15, reason="requeued in Slurm")
    events += step.events
    assert core.workload("gainer").phase is WorkloadPhase.PLACED
    waits = core.workload("victim")
    assert (waits.phase, waits.submitted_ns, waits.preemptions) == (WorkloadPhase.PENDING, 3, 1)
    events += report(core, "gainer").events
    assert core.workload("victim").phase is WorkloadPhase.PLACED
    assert core.workload("victim").attempts == ()
    events += report(core, "victim").events
    assert core.workload("victim").phase is WorkloadPhase.SUCCEEDED
    check_invariants(core.state)
    twin = ClusterState.load(base)
    for event in events:
        kind, body = event_to_plain(event)
        twin.apply(event_from_plain(kind, json.loads(json.dumps(body))))
    assert twin.digest() == core.state.digest()
    assert Core(ClusterState.load(json.loads(json.dumps(twin.dump()))), catalogue.load_catalogue()).state.digest()
