"""Slices by real processes: a service waits, a plan is shown and applied, the agent cuts its GPUs and is told who sits where."""

import json

import pytest
from tests.builders.partition import build_slice_points, build_sliced_service
from tests.e2e.processes import Cluster, fleet_of, metric

from eelgrid_controller.partition.recommendation import recommend_partitions
from eelgrid_controller.partition.survey import PartitionSurvey
from eelgrid_protos.messages import (
    ApplyStatus,
    GetInventoryRequest,
    GetNodePlanRequest,
    ListPartitionsRequest,
    ListPlansRequest,
    RecordPointsRequest,
    SubmitWorkloadResponse,
    WorkloadPhase,
)

NODE = {
    "name": "m-0",
    "cpu_milli": 64_000,
    "memory_bytes": 2**38,
    "pool": "mig",
    # With MIG on, since an A100 takes a reset to change that.
    "gpus": [{"product": "a100-sxm4-40gb", "count": 2, "mig": []}],
}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """The planner's parts are imported and compiled before anybody waits for them."""
    assert recommend_partitions(PartitionSurvey(revision=0, seats=(), services=())).stages == ()


@pytest.fixture
def cluster(tmp_path):
    """A node of two A100s in a pool that the partition planner has, and points of one profile."""
    with Cluster(tmp_path) as found:
        found.controller()
        found.node = found.agent(fleet_of(tmp_path / "fleet.json", (NODE,)))
        found.until_ready(1)
        said = found.eelctl("policy", "set", "--yes", "--pool-mode", "mig=enforce", "--partition", "mig=on").stdout
        assert "enforce, MIG GPUs managed by the partition planner" in said
        found.operators.record_points(RecordPointsRequest(points=tuple(build_slice_points())), timeout=10.0)
        yield found


def submitted(cluster, key, rate_hz) -> SubmitWorkloadResponse:
    return cluster.operators.submit_workload(build_sliced_service(key, rate_hz), timeout=10.0).workload


def standing(cluster):
    """Profile and start of every instance of the agent's GPUs, and the UUIDs of their devices."""
    inventory = cluster.node_api(cluster.node).get_inventory(GetInventoryRequest(), timeout=10.0).inventory
    places = {(gpu.index, one.profile, one.start) for gpu in inventory.gpus for one in gpu.gpu_instances}
    devices = {
        child.uuid
        for gpu in inventory.gpus
        for one in gpu.gpu_instances
        for child in one.compute_instances
        if child.uuid
    }
    return places, devices


def sitting(cluster):
    """What the plan of the node says of replicas, and what its agent said to it."""
    (status,) = cluster.operators.list_plans(ListPlansRequest(), timeout=10.0).plans
    return status.plan, status.applied


def test_a_service_is_served_by_slices_that_its_plan_made(cluster):
    waits = submitted(cluster, "bert", 30.0)
    assert (waits.phase, waits.reason) == (WorkloadPhase.PENDING, "partitions: waits for the partition planner")
    assert "eelctl partition plan" in cluster.eelctl("explain", "bert").stdout
    table = cluster.eelctl("partition", "plan").stdout
    assert "empty" in table
    assert "bert in " in table
    assert standing(cluster) == (set(), set()), "asking changes nothing"
    key = table.split()[-1]
    shown = cluster.eelctl("partition", "apply", key, "--yes", "--wait", 30).stdout
    assert "not yet" not in shown
    workload = json.loads(cluster.eelctl("get", "bert", "-o", "json").stdout)
    assert workload["phase"] == "placed"
    wanted = {
        (place["gpu_indexes"][0], place["gpu_instance"]["profile"], place["gpu_instance"].get("start", 0))
        for place in workload["placements"]
    }
    places, devices = standing(cluster)
    assert wanted <= places
    # The plan names the devices that the agent made, and the agent holds them.
    cluster.until(lambda: len(sitting(cluster)[0].assignments) == len(wanted), what="the plan names the slices")
    plan, _ = sitting(cluster)
    assert {item.gpu_uuids[0] for item in plan.assignments} <= devices
    assert all(item.gpu_instance is not None for item in plan.assignments)
    cluster.until(
        lambda: (
            (said := sitting(cluster)[1]) is not None
            and said.epoch == sitting(cluster)[0].epoch
            and said.status is ApplyStatus.APPLIED
        ),
        what="the agent holds its plan",
    )
    mine = cluster.node_api(cluster.node).get_node_plan(GetNodePlanRequest(), timeout=10.0).plan
    assert mine.assignments == plan.assignments
    # Once applied it is gone.
    cluster.eelctl("partition", "apply", key, "--yes", code=4)
    assert "Nothing to change" in cluster.eelctl("partition", "apply", "--yes").stdout
    # All of it comes back with the controller.
    (controller,) = [child for child in cluster.children if child.name.startswith("controller")]
    controller.kill()
    cluster.controller()
    # Nothing new goes to the node before its agent is back.
    cluster.until(lambda: metric(cluster.metrics, "eelgrid_agents_connected") == 1, what="the agent is back")
    again = cluster.operators.list_partitions(ListPartitionsRequest(), timeout=10.0)
    assert [gpu.stands for gpu in again.gpus if gpu.wanted is not None] == [True] * len({index for index, *_ in wanted})
    # A second service, and the first one leaves: what stands is used again.
    submitted(cluster, "t5", 30.0)
    cluster.eelctl("partition", "apply", "--yes", "--wait", 30)
    cluster.eelctl("cancel", "bert")
    cluster.until(lambda: {item.workload_id for item in sitting(cluster)[0].assignments} == {"t5"}, what="t5 stays")
    before = standing(cluster)
    submitted(cluster, "gpt", 30.0)
    cluster.eelctl("partition", "apply", "--yes", "--wait", 30)
    assert standing(cluster) == before
