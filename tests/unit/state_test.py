"""The state takes outcomes, refuses contradictions, and comes back from its dump."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import InvariantBroken, check_invariants

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.demand import CLASSES_KEPT_MOST, MIX_CLASSES_MOST, Demand
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.events import (
    GpuLost,
    NodeJoined,
    NodeLost,
    PolicyChanged,
    UnknownKind,
    WorkloadCancelled,
    WorkloadDeferred,
    WorkloadPlaced,
    WorkloadSubmitted,
    event_from_plain,
    event_to_plain,
)
from eelgrid_controller.state.node_allocations import ContradictoryEvent
from eelgrid_protos.messages import (
    EnforcementMode,
    NodeState,
    Placement,
    Policy,
    PoolMode,
    ResourceRequest,
    WorkloadPhase,
)


def joined(*inventories, **options):
    state = ClusterState(**options)
    for inventory in inventories:
        state.apply(NodeJoined(time_ns=1, inventory=inventory))
    return state


def submitted(key="w-1", **wanted):
    return WorkloadSubmitted(time_ns=2, workload_id=key, spec=build_request(**{"gpus": 0, **wanted}).spec)


def placed(key="w-1", name="a", uuids=("GPU-a-0",), replica=0):
    spot = Placement(replica=replica, node_name=name, gpu_uuids=uuids, gpu_indexes=tuple(range(len(uuids))))
    return WorkloadPlaced(time_ns=3, workload_id=key, placements=(spot,))


def test_a_workload_goes_from_pending_to_placed_to_cancelled():
    state = joined(build_node("a"))
    state.apply(submitted(gpus=1))
    assert (state.workloads["w-1"].phase, state.live_workloads, list(state.pending)) == (
        WorkloadPhase.PENDING,
        1,
        ["w-1"],
    )
    assert state.apply(placed()) == {"a"}
    record = state.nodes["a"]
    assert (record.allocated_cpu_milli, record.gpu_milli, record.plan_epoch) == (1000, {"GPU-a-0": 1000}, 1)
    assert list(record.holders("GPU-a-0")) == ["w-1"]
    check_invariants(state)
    assert state.apply(WorkloadCancelled(time_ns=4, workload_id="w-1")) == {"a"}
    assert (record.allocated_gpu_milli, record.assignments, record.plan_epoch, state.live_workloads) == (0, {}, 2, 0)
    assert state.workloads["w-1"].revision == state.revision == 4
    assert state.phases[WorkloadPhase.CANCELLED] == 1
    check_invariants(state)


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (placed("w-9"), "does not wait"),
        (placed(name="b"), "never joined"),
        (placed(uuids=("GPU-x",)), "gone, lost or partitioned"),
        (placed(uuids=("GPU-a-0", "GPU-a-0")), "twice"),
        (placed(replica=1), "not one for each replica"),
        (submitted("w-1"), "there already"),
        (WorkloadCancelled(time_ns=3, workload_id="w-9"), "not there"),
        (WorkloadDeferred(time_ns=3, workload_id="w-9", reason="cpu: x"), "does not wait"),
        (NodeLost(time_ns=3, node_name="z"), "never joined"),
        (GpuLost(time_ns=3, node_name="a", gpu_uuid="GPU-z"), "has no GPU"),
    ],
)
def test_an_event_that_contradicts_the_state_is_refused_and_changes_nothing(event, problem):
    state = joined(build_node("a"))
    state.apply(submitted(gpus=1))
    before = state.digest()
    with pytest.raises(ContradictoryEvent, match=problem):
        state.apply(event)
    assert state.digest() == before
    check_invariants(state)


@pytest.mark.parametrize(
    ("wanted", "problem"), [({"gpus": 1}, "held already"), ({"cpu": 96}, "CPU"), ({"memory_gib": 384}, "memory")]
)
def test_nothing_is_held_twice(wanted, problem):
    state = joined(build_node("a"))
    state.apply(submitted(gpus=1))
    state.apply(placed())
    state.apply(submitted("w-2", **wanted))
    before = state.digest()
    with pytest.raises(ContradictoryEvent, match=problem):
        state.apply(placed("w-2", uuids=("GPU-a-0",) if "gpus" in wanted else ()))
    assert state.digest() == before


def test_a_lost_node_keeps_its_work_and_takes_nothing():
    state = joined(build_node("a"))
    state.apply(submitted(gpus=1))
    state.apply(placed())
    state.apply(NodeLost(time_ns=5, node_name="a"))
    assert state.nodes["a"].state is NodeState.LOST
    assert state.nodes["a"].gpu_milli == {"GPU-a-0": 1000}
    state.apply(submitted("w-2", gpus=1))
    with pytest.raises(ContradictoryEvent, match="lost"):
        state.apply(placed("w-2", uuids=("GPU-a-1",)))


def test_a_gpu_that_vanished_keeps_what_it_holds_and_is_whole_again_when_it_returns():
    state = joined(build_node("a"))
    state.apply(submitted(gpus=1))
    state.apply(placed())
    state.apply(NodeJoined(time_ns=5, inventory=replace(build_node("a"), gpus=build_node("a").gpus[1:])))
    assert state.nodes["a"].gpu_milli == {"GPU-a-0": 1000}
    check_invariants(state)
    again = ClusterState.load(json.loads(json.dumps(state.dump())))
    assert again.digest() == state.digest()
    check_invariants(again)
    state.apply(NodeJoined(time_ns=6, inventory=build_node("a")))
    assert list(state.nodes["a"].holders("GPU-a-0")) == ["w-1"]


def test_a_node_may_come_back_smaller_than_what_runs_on_it():
    state = joined(build_node("a"))
    state.apply(submitted(cpu=50))
    state.apply(placed(uuids=()))
    state.apply(NodeJoined(time_ns=5, inventory=build_node("a", cpu=10)))
    assert state.nodes["a"].overcommitted
    check_invariants(state)
    state.apply(WorkloadCancelled(time_ns=6, workload_id="w-1"))
    assert not state.nodes["a"].overcommitted


def test_validate_finds_what_it_is_there_to_find():
    for spoil in (
        lambda record: record.gpu_milli.update({"GPU-a-0": 2000}),
        lambda record: setattr(record, "allocated_cpu_milli", 7),
        lambda record: record.assignments.clear(),
        lambda record: setattr(record, "overcommitted", True),
    ):
        state = joined(build_node("a"))
        state.apply(submitted(gpus=1))
        state.apply(placed())
        spoil(state.nodes["a"])
        with pytest.raises(InvariantBroken):
            check_invariants(state)


def test_the_oldest_ended_workloads_are_forgotten():
    state = joined(build_node("a"), ended_most=2)
    for number in range(1, 5):
        state.apply(submitted(f"w-{number}"))
        state.apply(WorkloadCancelled(time_ns=3, workload_id=f"w-{number}"))
    assert list(state.workloads) == ["w-3", "w-4"]
    assert state.next_number == 5
    check_invariants(state)


def test_a_policy_change_raises_the_epoch_of_the_nodes_that_it_touches():
    state = joined(build_node("a", pool="x"), build_node("b", pool="y"))
    policy = Policy(pools=(PoolMode(pool="x", mode=EnforcementMode.ENFORCE),))
    assert state.apply(PolicyChanged(time_ns=2, policy=policy)) == {"a"}
    assert (state.nodes["a"].plan_epoch, state.nodes["b"].plan_epoch) == (1, 0)
    assert state.apply(PolicyChanged(time_ns=3, policy=replace(policy, lease_s=9.0))) == {"a", "b"}
    # Leaving the pool is a change of mode too.
    state.apply(NodeJoined(time_ns=4, inventory=build_node("a", pool="y")))
    assert state.nodes["a"].plan_epoch == 3


def test_every_event_comes_back_from_its_plain_shape():
    core = build_core(build_node("a", gpus=8))
    steps = [
        core.submit(build_request(gpus=2, replicas=2), now_ns=2),
        core.submit(build_request(gpus=8), now_ns=3),
        core.mark_gpu_lost("a", "GPU-a-7", now_ns=4),
        core.mark_gpu_returned("a", "GPU-a-7", now_ns=5),
        core.update_policy(Policy(lease_s=7.0), now_ns=6),
        core.cancel("w-1", now_ns=7),
        core.update_external_usage("a", ExternalUsage(cpu_milli=5, traits=("t",), closed="cordoned"), now_ns=7),
        core.mark_node_lost("a", now_ns=8),
        core.register_node(build_node("a"), now_ns=9),
    ]
    events = [event for step in steps for event in step.events]
    assert len({type(event) for event in events}) == 11
    for event in events:
        kind, body = event_to_plain(event)
        assert event_from_plain(kind, json.loads(json.dumps(body))) == event


def test_an_unknown_kind_and_a_broken_body_are_told_apart():
    with pytest.raises(UnknownKind):
        event_from_plain("node_melted", {})
    with pytest.raises(ValueError, match="missing"):
        event_from_plain("node_lost", {"time_ns": 1})
    body = {"time_ns": 1, "workload_id": "w", "placements": [], "explanation": [[1, 2]]}
    with pytest.raises(ValueError, match="unpack"):
        event_from_plain("workload_placed", body)
    with pytest.raises(ValueError, match="cannot be read"):
        event_from_plain("workload_placed", body | {"explanation": [5]})


def test_a_foreign_checkpoint_is_refused():
    with pytest.raises(ValueError, match="format"):
        ClusterState.load({"format": 99})


def test_the_mix_covers_what_is_typical_and_forgets_the_rare():
    demand = Demand()
    for number in range(1000):
        demand.observe(ResourceRequest(cpu_milli=1000 if number % 50 else 2000 + number), 1)
    assert [task.cpu_milli for task, _ in demand.mix] == [1000]
    for number in range(CLASSES_KEPT_MOST * 2):
        demand.observe(ResourceRequest(cpu_milli=5000 + number), 1)
    assert len(demand.counts) <= CLASSES_KEPT_MOST
    assert len(demand.mix) <= MIX_CLASSES_MOST
    assert demand.mix[0][0].cpu_milli == 1000
    again = Demand.load(json.loads(json.dumps(demand.dump())))
    assert (again.counts, again.mix, again.refresh_at) == (demand.counts, demand.mix, demand.refresh_at)


def test_the_mix_is_drawn_again_each_time_the_tasks_grow_by_a_twentieth():
    demand, draws, before = Demand(), 0, None
    for _ in range(2000):
        demand.observe(ResourceRequest(cpu_milli=1000), 1)
        draws += demand.mix is not before
        before = demand.mix
    # 40 times one by one up to 40 tasks, then about 14 times for each doubling.
    assert 90 < draws < 130
