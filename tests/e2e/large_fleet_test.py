"""A fleet as large as the published trace's: 1,213 nodes of one agent process join, are read and get work.

A bounded run of what the demo does: what costs too much by node shows here as a node that never becomes ready.
"""

from tests.e2e.processes import pages, small_trace, trace_fleet

from eelgrid_controller.replay.openb import submission_of_task
from eelgrid_protos.messages import ListNodesRequest, WorkloadPhase

NODES, TASKS = 1213, 100
# Some seconds on a quiet machine.
JOINED_S = 240.0


def test_a_fleet_of_the_size_of_the_trace_joins_is_read_and_gets_work(cluster):
    trace = small_trace(cluster.folder, nodes=NODES, tasks=TASKS)
    assert len(trace.nodes) == NODES
    cluster.controller()
    cluster.agent(trace_fleet(cluster.folder / "fleet.json", trace.nodes))
    cluster.until(lambda: cluster.summary().nodes_ready == NODES, within_s=JOINED_S, what="every node joins")
    report, answers = cluster.submit([submission_of_task(task) for task in trace.tasks])
    assert (report.done, len(report.refusals)) == (TASKS, 0)
    assert {answer.phase for answer in answers} == {WorkloadPhase.PLACED}

    def all_read():
        nodes = pages(cluster.operators.list_nodes, ListNodesRequest(), "nodes")
        with_gpus = [node for node in nodes if node.inventory.gpus]
        return len(nodes) == NODES and all(node.power_w > 0.0 for node in with_gpus)

    cluster.until(all_read, within_s=JOINED_S, what="the power of every node with GPUs is known")
    assert cluster.summary().samples_lost == 0
