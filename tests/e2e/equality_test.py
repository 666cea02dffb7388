"""What the processes decided is what the pure core decides: the journal's inputs fed to a Core give its outcomes."""

from dataclasses import replace

import numba
from tests.builders.cluster import build_request
from tests.e2e.processes import metric, pages, small_trace, trace_fleet, without_power
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.recovery import recover_state
from eelgrid_controller.replay.openb import submission_of_task
from eelgrid_controller.runtime.sqlite_journal import open_journal
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    GpuLost,
    GpuReturned,
    NodeJoined,
    NodeLost,
    PolicyChanged,
    PricesQuoted,
    WorkloadCancelled,
    WorkloadDeferred,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadSubmitted,
    event_from_plain,
    event_to_plain,
)
from eelgrid_controller.state.takeover_events import ControllerStarted, NodeHeard
from eelgrid_protos import catalogue
from eelgrid_protos.messages import OBJECTIVES, CancelWorkloadRequest, ListWorkloadsRequest, SubmitWorkloadRequest

NODES = 24
# Nodes are lost soon, so that the journal has them lost and back.
CONTROLLER = ("--away-grace", "0.5", "--restart-grace", "120")


def own(name, **spec):
    """A workload whose id the controller draws."""
    return build_request(name=name, cpu=2, memory_gib=4, milli=500, **spec)


def play(cluster):
    """A life with everything in it that operators and agents can do to the state; the workloads as the API has them."""
    trace = small_trace(cluster.folder, nodes=NODES, tasks=260)
    requests = [submission_of_task(task) for task in trace.tasks]
    operators = cluster.operators
    controller = cluster.controller(*CONTROLLER)
    file = trace_fleet(cluster.folder / "fleet.json", trace.nodes)
    fleet = cluster.agent(file)
    cluster.until_ready(NODES)
    cluster.submit(requests[:140])
    for request in requests[5:140:9]:
        operators.cancel_workload(CancelWorkloadRequest(workload_id=request.workload_id), timeout=5.0)
    cluster.set_policy(objective="energy", weights=OBJECTIVES["energy"], lease_s=30.0)
    cluster.submit(requests[140:180])
    fleet.kill()
    cluster.until_ready(0)
    cluster.submit(requests[180:210])
    cluster.agent(file)
    cluster.until_ready(NODES)
    controller.kill()
    controller = cluster.controller(*CONTROLLER)
    cluster.set_policy(objective="custom", weights=replace(OBJECTIVES["balanced"], power=3.0))
    for priority, replicas in ((0, 1), (5, 3), (-5, 40), (9, 2)):
        operators.submit_workload(own(f"own-{priority}", priority=priority, replicas=replicas), timeout=10.0)
    cluster.submit(requests[210:])
    for request in requests[0:200:11]:
        operators.cancel_workload(CancelWorkloadRequest(workload_id=request.workload_id), timeout=5.0)
    # What waits for agents is placed as they come back.
    cluster.until(lambda: metric(cluster.metrics, "eelgrid_agents_connected") == NODES, within_s=60.0)
    shown = pages(operators.list_workloads, ListWorkloadsRequest(), "workloads")
    assert controller.stop() == 0
    return [without_power(workload) for workload in shown]


def feed(core, event):
    """The call that the input came from; None for an outcome, which only a call can bring about."""
    match event:
        case WorkloadSubmitted():
            drawn = event.workload_id.startswith("w-")
            request = SubmitWorkloadRequest(spec=event.spec, workload_id="" if drawn else event.workload_id)
            return core.submit(request, now_ns=event.time_ns)
        case WorkloadCancelled():
            return core.cancel(event.workload_id, now_ns=event.time_ns)
        case NodeJoined():
            return core.register_node(event.inventory, plan_epoch=event.plan_epoch, now_ns=event.time_ns)
        case ControllerStarted():
            return core.record_controller_start(now_ns=event.time_ns)
        case NodeHeard():
            return core.register_node(core.state.nodes[event.node_name].inventory, now_ns=event.time_ns)
        case NodeLost():
            return core.mark_node_lost(event.node_name, now_ns=event.time_ns)
        case GpuLost():
            return core.mark_gpu_lost(event.node_name, event.gpu_uuid, now_ns=event.time_ns)
        case GpuReturned():
            return core.mark_gpu_returned(event.node_name, event.gpu_uuid, now_ns=event.time_ns)
        case PolicyChanged():
            return core.update_policy(replace(event.policy, revision=event.policy.revision - 1), now_ns=event.time_ns)
        case WorkloadPlaced() | WorkloadDeferred() | WorkloadMoved() | PricesQuoted():
            return None


def test_placements_through_grpc_equal_those_of_the_pure_core(cluster):
    assert not numba.config.DISABLE_JIT, "the controller compiles its kernels, so must this process"
    shown = play(cluster)
    journal = open_journal(cluster.data, new_cluster_id="unused")
    try:
        events = [event_from_plain(entry.kind, entry.body) for _, entry in journal.entries_after(0)]
        recovered = recover_state(journal, ClusterState).state
    finally:
        journal.close()
    kinds = {type(event) for event in events}
    assert kinds >= {
        NodeJoined,
        NodeLost,
        PolicyChanged,
        WorkloadSubmitted,
        WorkloadPlaced,
        WorkloadDeferred,
        WorkloadCancelled,
    }
    core = Core(ClusterState(), catalogue.load_catalogue())
    position = 0
    while position < len(events):
        # Prices are quoted by the call that comes after them, at its moment, or by a round of tries.
        cause = next((event for event in events[position:] if not isinstance(event, PricesQuoted)), events[position])
        if isinstance(cause, ControllerStarted):
            # Another process, which begins with a round of tries.
            core = Core(core.state, catalogue.load_catalogue())
        step = feed(core, cause) if cause.time_ns == events[position].time_ns else None
        while step is None or not (step.events or step.result):
            # The rest of a round of tries, which may find nothing to say for a while.
            assert core.has_backlog, f"entry {position + 1} is an outcome that no call brought about"
            step = core.retry(now_ns=events[position].time_ns)
        assert step is not None, f"entry {position + 1} is an outcome that no call brought about"
        expected = events[position : position + len(step.events)]
        decided = [event_to_plain(event) for event in step.events]
        assert decided == [event_to_plain(event) for event in expected], f"entry {position + 1}"
        position += len(step.events)
    assert [w.placements for w in core.state.workloads.values()] == [w.placements for w in shown]
    assert list(core.state.workloads.values()) == shown
    assert core.state.digest() == recovered.digest()
    check_invariants(core.state)
