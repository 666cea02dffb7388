"""The client library for Ray: what it asks the controller for, and what it makes of the answer. Needs no Ray."""

from dataclasses import replace

import pytest

from eelgrid import ray
from eelgrid.errors import FailedPreconditionError, InvalidSettingsError
from eelgrid_protos.messages import (
    ComputeInstance,
    Gpu,
    GpuInstance,
    Inventory,
    Node,
    NodeState,
    Placement,
    Slice,
    Workload,
    WorkloadPhase,
)

PLACE = Placement(replica=0, node_name="n1", gpu_uuids=("u0", "u1"), gpu_indexes=(0, 1))
SELECTOR = {"eelgrid.io/node": "n1"}
CUT = Gpu(
    uuid="u0", index=0, product="A100", model="A100", mig_enabled=True,
    gpu_instances=tuple(
        GpuInstance(
            id=number, profile_id=19, profile="1g.10gb", start=number, size=1,
            compute_instances=(ComputeInstance(id=0, uuid=f"MIG-{number}"),),
        )
        for number in range(2)
    ),
)  # fmt: skip


def build_workload(**asked):
    return Workload(workload_id="w", spec=ray.build_spec(**asked), phase=WorkloadPhase.PLACED, submitted_ns=1)


def test_a_request_requires_nodes_of_ray_and_the_labels_that_it_names():
    spec = ray.build_spec(replicas=2, gpus=2, cpus=0.5, labels={"rack": "r1"}, user="alice")
    assert (spec.replicas, spec.request.gpu_count, spec.request.gpu_milli, spec.request.cpu_milli) == (2, 2, 1000, 500)
    assert spec.required_traits == ("ray/node", "ray/label/rack=r1")
    assert (spec.user, spec.labels) == ("alice", {"ray/origin": "client"})
    assert ray.build_spec(gpus=0).request.gpu_milli == 0


def test_a_share_of_a_gpu_is_asked_for_as_such_and_one_of_several_is_refused():
    assert (ray.build_spec(gpus=0.25).request.gpu_count, ray.build_spec(gpus=0.25).request.gpu_milli) == (1, 250)
    with pytest.raises(InvalidSettingsError, match="whole number"):
        ray.build_spec(gpus=1.5)


def test_whole_gpus_and_shares_become_a_bundle_and_the_workload_is_named():
    found = ray.describe_replica(build_workload(gpus=2, cpus=4, memory_bytes=2**30), PLACE, SELECTOR, {})
    assert found.bundle == {"CPU": 4.0, "memory": 2.0**30, "GPU": 2.0}
    assert (found.label_selector, found.env_vars) == (SELECTOR, {"EELGRID_WORKLOAD_ID": "w"})
    assert ray.describe_replica(build_workload(gpus=0.5), PLACE, SELECTOR, {}).bundle == {"CPU": 1.0, "GPU": 0.5}


def test_a_slice_becomes_a_resource_of_its_profile_and_its_device_is_named_by_uuid():
    place = replace(PLACE, gpu_uuids=("u0",), gpu_instance=Slice(profile="1g.10gb", start=1))
    found = ray.describe_replica(build_workload(gpus=1), place, SELECTOR, {"u0": CUT})
    assert found.bundle == {"CPU": 1.0, "mig_1g_10gb": 1.0}
    assert found.env_vars["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    with pytest.raises(FailedPreconditionError, match="not cut yet"):
        ray.describe_replica(build_workload(gpus=1), replace(place, gpu_uuids=("u9",)), SELECTOR, {"u0": CUT})


def test_a_node_is_selected_by_its_label_else_by_its_name_and_a_dead_one_never():
    labelled = {"Alive": True, "NodeID": "a" * 56, "NodeName": "10.0.0.1", "Labels": SELECTOR}
    plain = {"Alive": True, "NodeID": "b" * 56, "NodeName": "n1", "Labels": {}}
    assert ray.select_node("n1", [plain, labelled]) == SELECTOR
    assert ray.select_node("n1", [plain]) == {"ray.io/node-id": "b" * 56}
    assert ray.select_node("ray-bbbbbbbbbbbb", [plain]) == {"ray.io/node-id": "b" * 56}
    with pytest.raises(FailedPreconditionError, match="--labels eelgrid"):
        ray.select_node("n1", [{**plain, "Alive": False}])


def test_recommended_options_name_the_node_its_gpus_and_its_slices():
    whole = Gpu(uuid="u1", index=1, product="A100", model="A100")
    inventory = Inventory(node_name="n1", cpu_milli=8000, memory_bytes=2**36, gpus=(CUT, whole), pool="a")
    assert ray.recommend_start(Node(inventory=inventory, state=NodeState.READY)) == [
        "--labels", "eelgrid.io/node=n1,eelgrid.io/gpu-model=A100,eelgrid.io/pool=a",
        "--num-gpus", "1", "--resources", '{"mig_1g_10gb": 2}',
    ]  # fmt: skip


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(FailedPreconditionError, match="pip install ray"):
        ray.describe_replicas(None, build_workload())
