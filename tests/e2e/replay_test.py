"""A trace submitted while processes are killed: nothing lost, nothing placed twice, nothing beyond capacity."""

import json
from collections import Counter

from tests.e2e.processes import metric, pages, small_trace, trace_fleet, without_power
from tests.state_invariants import check_invariants

from eelgrid_controller.core.recovery import recover_state
from eelgrid_controller.replay.openb import submission_of_task
from eelgrid_controller.runtime.sqlite_journal import open_journal
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadCancelled, WorkloadPlaced, WorkloadSubmitted, event_from_plain
from eelgrid_protos.messages import (
    ApplyStatus,
    GetNodePlanRequest,
    ListNodesRequest,
    ListPlansRequest,
    ListWorkloadsRequest,
    NodeState,
    WorkloadPhase,
)

NODES, TASKS = 60, 400
# Some seconds of work for one submitter, so that it is still at it when the controller is killed.
LONG = 1600
# Agents are away for as long as the controller is; their back-off may then hold them off for some seconds more.
CONTROLLER = ("--restart-grace", "120", "--away-grace", "60")
BACK_S = 60.0


def begin(cluster, trace):
    """A controller and a fleet in which every node is ready and sends twice a second."""
    controller = cluster.controller(*CONTROLLER)
    cluster.set_policy(sample_interval_s=0.5, send_interval_s=0.5)
    fleet = cluster.agent(trace_fleet(cluster.folder / "fleet.json", trace.nodes))
    cluster.until_ready(NODES)
    return controller, fleet


def read_one_moment(cluster):
    """Workloads and nodes as of one moment: what waits goes on being placed while agents come back."""

    def unchanged():
        before = pages(cluster.operators.list_workloads, ListWorkloadsRequest(), "workloads")
        nodes = pages(cluster.operators.list_nodes, ListNodesRequest(), "nodes")
        after = pages(cluster.operators.list_workloads, ListWorkloadsRequest(), "workloads")
        same = list(map(without_power, before)) == list(map(without_power, after))
        return (list(map(without_power, after)), nodes) if same else None

    return cluster.until(unchanged, within_s=BACK_S, what="nothing is placed between two looks")


def check_accounts(cluster, requests, report, answers):
    """What the API shows adds up, and is what was answered; the workloads and nodes."""
    workloads, nodes = read_one_moment(cluster)
    refused = {refusal.workload_id for refusal in report.refusals}
    assert Counter(w.workload_id for w in workloads) == Counter(r.workload_id for r in requests) - Counter(refused)
    assert report.done == TASKS == len(workloads) + len(refused)
    specs, standing = {r.workload_id: r.spec for r in requests}, {w.workload_id: w for w in workloads}
    for answer in answers:
        now = standing[answer.workload_id]
        assert (now.spec, now.submitted_ns) == (specs[answer.workload_id], answer.submitted_ns)
        if answer.phase is WorkloadPhase.PLACED:
            assert now == without_power(answer), "what was placed has moved"
    inventories = {node.inventory.node_name: node.inventory for node in nodes}
    milli, cpu, memory = Counter(), Counter(), Counter()
    for workload in workloads:
        assert workload.phase in {WorkloadPhase.PLACED, WorkloadPhase.PENDING}
        want, spec = workload.spec.request, workload.spec
        placed = workload.phase is WorkloadPhase.PLACED
        assert [p.replica for p in workload.placements] == (list(range(spec.replicas)) if placed else [])
        for placement in workload.placements:
            inventory = inventories[placement.node_name]
            cpu[placement.node_name] += want.cpu_milli
            memory[placement.node_name] += want.memory_bytes
            models = {gpu.uuid: gpu.model for gpu in inventory.gpus}
            assert len(set(placement.gpu_uuids)) == want.gpu_count
            assert not want.gpu_models or {models[uuid] for uuid in placement.gpu_uuids} <= set(want.gpu_models)
            milli.update(dict.fromkeys(placement.gpu_uuids, want.gpu_milli))
    assert all(held <= 1000 for held in milli.values())
    for node in nodes:
        name, inventory = node.inventory.node_name, node.inventory
        assert cpu[name] == node.allocated_cpu_milli <= inventory.cpu_milli
        assert memory[name] == node.allocated_memory_bytes <= inventory.memory_bytes
        assert sum(milli[gpu.uuid] for gpu in inventory.gpus) == node.allocated_gpu_milli
    assert sum(milli.values()) > 500 * sum(len(i.gpus) for i in inventories.values()), "the load is no load"
    return workloads, nodes


def check_plans(cluster, fleet, workloads):
    """Every agent is back and holds exactly what was placed on its node."""

    def applied():
        plans = pages(cluster.operators.list_plans, ListPlansRequest(), "plans")
        behind = [p for p in plans if p.plan.epoch and (p.applied is None or p.applied.epoch != p.plan.epoch)]
        return plans if len(plans) == NODES and not behind else None

    plans = cluster.until(applied, within_s=BACK_S, what="every plan is applied")
    cluster.until(lambda: metric(cluster.metrics, "eelgrid_agents_connected") == NODES, within_s=BACK_S)
    wanted = {
        (p.node_name, w.workload_id, p.replica, p.gpu_uuids, w.spec.request.cpu_milli)
        for w in workloads
        for p in w.placements
    }
    planned = [
        (s.plan.node_name, a.workload_id, a.replica, a.gpu_uuids, a.cpu_milli)
        for s in plans
        for a in s.plan.assignments
    ]
    assert len(planned) == len(wanted)
    assert set(planned) == wanted
    node_api = cluster.node_api(fleet)
    for status in plans:
        if status.plan.epoch:
            assert status.applied.status is ApplyStatus.APPLIED
            held = node_api.get_node_plan(GetNodePlanRequest(node_name=status.plan.node_name), timeout=5.0)
            assert (held.plan, held.applied) == (status.plan, status.applied)


def received(cluster):
    """Ticks received and lost, exactly as of now; a summary may be a fifth of a second old."""
    nodes = pages(cluster.operators.list_nodes, ListNodesRequest(), "nodes")
    return sum(node.samples_received for node in nodes), sum(node.samples_lost for node in nodes)


def taken(cluster, fleet):
    """Ticks that a fleet has taken."""
    return metric(cluster.agents[fleet]["metrics"], "eelgrid_agent_samples_total")


def check_samples(cluster, fleet, *, elsewhere=0, before=0):
    """Every tick comes and none twice.

    At most `elsewhere` ticks of this fleet went to an earlier controller; `before` came from an earlier fleet.
    """
    agent = cluster.agents[fleet]["metrics"]
    owed = taken(cluster, fleet) - elsewhere
    cluster.until(lambda: received(cluster)[0] - before >= owed, what=f"{owed:.0f} ticks are received")
    count, lost = received(cluster)
    assert count - before <= taken(cluster, fleet), "a tick was counted twice"
    assert lost == metric(agent, "eelgrid_agent_dropped_samples_total") == 0
    cluster.until(lambda: cluster.summary().samples_received >= count, what="the summary has caught up")
    cluster.until(lambda: metric(cluster.metrics, "eelgrid_samples_received_total") >= count)
    late = cluster.summary()
    assert (late.samples_received <= received(cluster)[0], late.samples_lost) == (True, 0)
    assert metric(cluster.metrics, "eelgrid_samples_lost_total") == 0


def check_journal(cluster, controller, workloads, nodes):
    """The journal, replayed from its first entry and from its checkpoint, gives what the API showed."""
    assert controller.stop() == 0
    journal = open_journal(cluster.data, new_cluster_id="unused")
    try:
        entries = [event_from_plain(entry.kind, entry.body) for _, entry in journal.entries_after(0)]
        recovered = recover_state(journal, ClusterState)
    finally:
        journal.close()
    replayed = ClusterState()
    for event in entries:
        replayed.apply(event)
    check_invariants(replayed)
    assert replayed.digest() == recovered.state.digest()
    assert recovered.checkpoint_seq == replayed.revision == len(entries), "a clean stop leaves a checkpoint of all"
    assert list(replayed.workloads.values()) == workloads
    for node in nodes:
        record = replayed.nodes[node.inventory.node_name]
        assert (record.inventory, record.state, record.plan_epoch) == (node.inventory, node.state, node.plan_epoch)
        assert node.state is NodeState.READY
    submitted = Counter(event.workload_id for event in entries if isinstance(event, WorkloadSubmitted))
    placed = Counter(event.workload_id for event in entries if isinstance(event, WorkloadPlaced))
    assert submitted == Counter(w.workload_id for w in workloads)
    assert placed == Counter(w.workload_id for w in workloads if w.phase is WorkloadPhase.PLACED)
    assert not any(isinstance(event, WorkloadCancelled) for event in entries)


def test_the_controller_is_killed_twice_in_the_middle(cluster):
    trace = small_trace(cluster.folder, nodes=NODES, tasks=TASKS)
    requests = [submission_of_task(task) for task in trace.tasks]
    controllers = []
    controller, fleet = begin(cluster, trace)
    controllers.append(controller)
    gone = []

    def kill_and_restart():
        controllers[-1].kill()
        gone.append(taken(cluster, fleet))
        controllers.append(cluster.begin_controller(*CONTROLLER))

    report, answers = cluster.submit(requests, {130: kill_and_restart, 270: kill_and_restart})
    assert len(controllers) == 3
    assert report.repeats >= 2
    cluster.answers()
    # Nothing new goes to a node before its agent is back, so some of the work waited for that.
    cluster.until(lambda: metric(cluster.metrics, "eelgrid_agents_connected") == NODES, within_s=BACK_S)
    workloads, _ = check_accounts(cluster, requests, report, answers)
    check_plans(cluster, fleet, workloads)
    check_samples(cluster, fleet, elsewhere=gone[-1])
    # What agents said meanwhile moved nothing.
    again, nodes = check_accounts(cluster, requests, report, answers)
    assert again == workloads
    check_journal(cluster, controllers[-1], workloads, nodes)


def test_the_fleet_is_killed_in_the_middle_and_comes_back(cluster):
    trace = small_trace(cluster.folder, nodes=NODES, tasks=TASKS)
    requests = [submission_of_task(task) for task in trace.tasks]
    controller, first = begin(cluster, trace)
    file = cluster.folder / "fleet.json"

    sure = taken(cluster, first)
    cluster.until(lambda: received(cluster)[0] >= sure, what=f"{sure:.0f} ticks are received")
    report, answers = cluster.submit(requests, {200: first.kill})
    assert report.repeats == 0, "the controller answers whatever the agents do"
    cluster.until(lambda: metric(cluster.metrics, "eelgrid_agents_connected") == 0, what="every stream has ended")
    before, lost = received(cluster)
    assert before >= sure
    assert lost == 0, "what died with the fleet was never sent, and cannot be told"
    workloads, _ = check_accounts(cluster, requests, report, answers)

    second = cluster.agent(file)
    check_plans(cluster, second, workloads)
    check_samples(cluster, second, before=before)
    again, nodes = check_accounts(cluster, requests, report, answers)
    assert again == workloads
    check_journal(cluster, controller, workloads, nodes)


def test_eelctl_replay_goes_on_where_a_killed_controller_left_off(cluster):
    trace = small_trace(cluster.folder, nodes=NODES, tasks=LONG)
    lines = [f"{t.name},{t.cpu_milli},{t.memory_bytes >> 20},{t.gpu_count},{t.gpu_milli}" for t in trace.tasks]
    tasks = cluster.folder / "tasks.csv"
    tasks.write_text("\n".join(["name,cpu_milli,memory_mib,num_gpu,gpu_milli", *lines]))
    first = cluster.controller()
    replay = cluster.run(
        "replay", *cluster.eelctl_command("replay", "--yes", "--pods", tasks, "--in-flight", 2, "-o", "json")
    )
    # No node is there yet, so that everything waits.
    cluster.until(lambda: cluster.summary().pending >= LONG // 8, what="an eighth is submitted")
    first.kill()
    assert replay.process.poll() is None, "the replay was over before the controller was killed"
    second = cluster.begin_controller()
    assert replay.ended(within_s=60.0) == 0, replay.text()
    figures = json.loads(replay.text()[replay.text().index("{") :])
    assert (figures["tasks"], figures["pending"], figures["placed"], figures["refused"]) == (LONG, LONG, 0, 0)
    assert figures["repeats"] >= 1
    cluster.answers()
    workloads = pages(cluster.operators.list_workloads, ListWorkloadsRequest(), "workloads")
    assert sorted(w.workload_id for w in workloads) == sorted(task.name for task in trace.tasks)
    check_journal(cluster, second, workloads, ())
