"""Preemption of what an engine runs: it holds its devices until the engine says that it has ended, or runs on."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.server.metric_collectors import FleetMetrics
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.events import (
    PreemptionRefused,
    PreemptionStarted,
    WorkloadPlaced,
    WorkloadSubmitted,
    event_from_plain,
    event_to_plain,
)
from eelgrid_controller.state.node_allocations import ContradictoryEvent
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    EnforcementMode,
    Mobility,
    PoolMode,
    PreemptionReclaim,
    PreemptionWithin,
    ProcessSpec,
    Queue,
    QueuePreemption,
    QueueQuota,
    Summary,
    WorkloadKind,
    WorkloadPhase,
)
from eelgrid_protos.schema import list_violations

S = 10**9
RULES = QueuePreemption(within=PreemptionWithin.LOWER_PRIORITY, reclaim=PreemptionReclaim.NOMINAL)
PROCESS = ProcessSpec(argv=("train",), working_directory="/")


def begin(*, is_enforced=True, **nominal):
    core = build_core(build_node("a", gpus=4, pool="p", runs_processes=True, agent_version="1"))
    own = (
        Queue(name=name, parent="root", quotas=(QueueQuota(resource="gpu", nominal=1000 * gpus),), preemption=RULES)
        for name, gpus in nominal.items()
    )
    mode = EnforcementMode.ENFORCE if is_enforced else EnforcementMode.OBSERVE
    policy = replace(core.state.policy, queues=(Queue(name="root"), *own), pools=(PoolMode(pool="p", mode=mode),))
    core.update_policy(policy, now_ns=2)
    core.update_external_usage("a", ExternalUsage(traits=("k8s-1",)), now_ns=2)
    return core


def submit(core, key, queue, now_ns=3, *, gpus=1, evicted=True, **spec):
    known = {"required_traits": ("k8s-1",), "evicted_by_engine": evicted, "mobility": Mobility.FIXED, **spec}
    return core.submit(build_request(key, queue=queue, gpus=gpus, **known), now_ns=now_ns)


def started(events):
    return [one for one in events if isinstance(one, PreemptionStarted)]


def test_a_victim_of_an_engine_holds_its_gpus_until_the_engine_has_ended_it():
    core = begin(x=2, y=2)
    for key in ("y1", "y2", "y3", "y4"):
        submit(core, key, "y")
    step = submit(core, "x1", "x", 4, gpus=2)
    (start,) = started(step.events)
    assert len(start.victims) == 2
    assert [one.workload_id for one in core.list_evictions()] == sorted(start.victims)
    assert core.workload("x1").reason.startswith("preempting: waits for ")
    first, second = start.victims
    assert core.workload(first).preempted_for == "x1"
    check_invariants(core.state)
    # Nobody else gets what the first leaves.
    core.cancel(first, now_ns=5)
    submit(core, "z", "y", 6)
    assert core.workload("x1").phase is core.workload("z").phase is WorkloadPhase.PENDING
    events = core.cancel(second, now_ns=7).events
    assert [one.workload_id for one in events if isinstance(one, WorkloadPlaced)] == ["x1"]
    assert core.workload("x1").placements == start.placements
    assert core.workload(first).reason == "preempted: for x1 of queue x"
    assert not core.list_evictions()
    check_invariants(core.state)


@pytest.mark.parametrize("cause", ["opted out", "observed", "service", "no place"])
def test_who_is_no_victim(cause):
    core = begin(x=4, y=0, is_enforced=cause != "observed")
    kind = WorkloadKind.INFERENCE_SERVICE if cause == "service" else WorkloadKind.BATCH_JOB
    submit(core, "y1", "y", evicted=cause != "opted out", gpus=4, kind=kind)
    gainer = submit(core, "x1", "x", 4, gpus=2, required_traits=("k8s-2",) if cause == "no place" else ("k8s-1",))
    assert not started(gainer.events)
    assert core.workload("x1").phase is WorkloadPhase.PENDING


def test_work_of_an_engine_may_have_to_wait_for_a_process_and_the_other_way_round():
    core = begin(x=4, y=0)
    core.submit(build_request("y1", queue="y", gpus=4, process=PROCESS, mobility=Mobility.FIXED), now_ns=3)
    (start,) = started(submit(core, "x1", "x", 4, gpus=4).events)
    assert start.victims == ("y1",)
    assert core.node_plan("a").assignments[0].stop
    other = begin(x=4, y=0)
    submit(other, "y1", "y", gpus=4)
    request = build_request("x1", queue="x", gpus=4, process=PROCESS, mobility=Mobility.FIXED)
    (start,) = started(other.submit(request, now_ns=4).events)
    assert (start.victims, [one.workload_id for one in other.list_evictions()]) == (("y1",), ["y1"])


def test_what_never_preempts_waits():
    core = begin(x=4, y=0)
    submit(core, "y1", "y", gpus=4)
    assert not started(submit(core, "x1", "x", 4, gpus=4, never_preempts=True).events)


def test_a_victim_that_could_not_be_evicted_runs_on_and_is_none_for_a_while():
    core = begin(x=4, y=0)
    submit(core, "y1", "y", gpus=4)
    submit(core, "x1", "x", 4 * S, gpus=4)
    step = core.refuse_preemption("y1", "a budget forbids it", again_s=600.0, now_ns=10 * S)
    assert any(isinstance(one, PreemptionRefused) for one in step.events)
    assert not started(step.events)
    victim = core.workload("y1")
    assert (victim.phase, victim.preempted_for, victim.stopping_ns) == (WorkloadPhase.PLACED, "", 0)
    assert not len(core.state.nominations)
    assert not core.list_evictions()
    core.cancel("x1", now_ns=20 * S)
    assert not started(submit(core, "x2", "x", 21 * S, gpus=4).events)
    assert core.is_drain_due(611 * S)
    assert started(core.continue_drains(now_ns=611 * S).events)
    check_invariants(core.state)


def test_victims_that_an_engine_evicted_are_counted_and_what_its_user_cancels_is_not():
    core = begin(x=2, y=2)
    metrics = FleetMetrics(
        core=lambda: core, summary=Summary, telemetry=Telemetry(), monotonic_s=lambda: 0.0, now_ns=lambda: 0
    )

    def commit(step):
        metrics.on_commit(CommitResult(step.events, step.nodes, core.state.revision))
        return step

    for key in ("y1", "y2", "y3", "y4"):
        commit(submit(core, key, "y"))
    (start,) = started(commit(submit(core, "x1", "x", 4, gpus=2)).events)
    for key in start.victims:
        commit(core.cancel(key, now_ns=5))
    commit(core.cancel("x1", now_ns=6))
    assert metrics._changes["preempted"] == 2


def test_a_refusal_of_what_is_no_victim_changes_nothing():
    core = begin(x=4, y=0)
    submit(core, "y1", "y", gpus=4)
    assert core.refuse_preemption("y1", "why", again_s=1.0, now_ns=5).events == ()
    assert core.refuse_preemption("none", "why", again_s=1.0, now_ns=5).events == ()
    with pytest.raises(ContradictoryEvent):
        core.state.apply(PreemptionRefused(time_ns=5, workload_id="y1", reason="why"))


def test_victims_are_still_to_be_evicted_when_the_work_that_they_make_room_for_is_gone_until_that_is_refused():
    core = begin(x=4, y=0)
    submit(core, "y1", "y", gpus=4)
    submit(core, "x1", "x", 4, gpus=4)
    core.cancel("x1", now_ns=5)
    (victim,) = core.list_evictions()
    assert core.state.nominations.find_by_victim(victim.workload_id) is None
    core.refuse_preemption("y1", "nobody waits", again_s=0.0, now_ns=6)
    assert started(submit(core, "x2", "x", 2 * S, gpus=4).events)


def test_a_restarted_controller_goes_on_and_replays_are_equal():
    core = begin(x=4, y=0)
    base = json.loads(json.dumps(core.state.dump()))
    events = [*submit(core, "y1", "y", gpus=4).events, *submit(core, "x1", "x", 4, gpus=4).events]
    again = Core(ClusterState.load(json.loads(json.dumps(core.state.dump()))), catalogue.load_catalogue())
    assert [one.workload_id for one in again.list_evictions()] == ["y1"]
    events += again.refuse_preemption("y1", "why", again_s=1.0, now_ns=5).events
    twin = ClusterState.load(base)
    for event in events:
        kind, body = event_to_plain(event)
        twin.apply(event_from_plain(kind, json.loads(json.dumps(body))))
    assert twin.digest() == again.state.digest()


def test_a_submission_is_written_as_before_without_the_flag_and_a_process_may_not_have_it():
    core = begin(x=4, y=0)
    events = submit(core, "y1", "y", evicted=False).events
    (event,) = (one for one in events if isinstance(one, WorkloadSubmitted))
    assert "evicted_by_engine" not in event_to_plain(event)[1]["spec"]
    spec = replace(build_request("p", process=PROCESS, mobility=Mobility.FIXED).spec, evicted_by_engine=True)
    assert [one.field for one in list_violations(spec)] == ["evicted_by_engine"]
