"""Nodes without an agent, what others hold there, and why one is closed."""

import pytest
from tests.builders.kubernetes import build_node_model, build_pod_model

from eelgrid_controller.engines.kubernetes.model.node_affinity import find_unmet_rule, is_tolerated, trait_name
from eelgrid_controller.engines.kubernetes.model.node_inventory import (
    closed_reason,
    external_usage_on,
    inventory_of,
    pool_of,
    product_of,
)
from eelgrid_controller.engines.kubernetes.model.objects import parse_pod
from eelgrid_controller.engines.kubernetes.model.selectors import Taint, Toleration, parse_constraint
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_protos.schema import check_message


def running(name="a", *, node_name="n1", phase="Running", containers=None, **metadata):
    containers = containers or [{"name": "c", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}]
    return parse_pod(
        {
            "metadata": {"name": name, "uid": name, **metadata},
            "spec": {"nodeName": node_name, "containers": containers, "overhead": {"cpu": "100m"}},
            "status": {"phase": phase},
        }
    )


def test_a_node_is_read_with_what_the_catalogue_knows():
    found = inventory_of(
        build_node_model(
            gpus=2,
            allocatable={"cpu": "95500m"},
            labels={
                "topology.kubernetes.io/zone": "z1",
                "topology.kubernetes.io/region": "r1",
                "eks.amazonaws.com/nodegroup": "p5",
                "nvidia.com/cuda.driver.major": "580",
                "nvidia.com/cuda.driver.minor": "65",
            },
        )
    )
    check_message(found)
    assert (found.cpu_milli, found.memory_bytes, found.boot_id) == (95500, 1024**4, "boot-1")
    assert (found.pool, found.topology, found.driver_version) == ("p5", ("r1", "z1"), "580.65")
    assert [(gpu.uuid, gpu.index) for gpu in found.gpus] == [("n1/gpu-0", 0), ("n1/gpu-1", 1)]
    gpu = found.gpus[0]
    assert (gpu.model, gpu.product, gpu.catalogue_key) == (
        "H100-80GB-HBM3",
        "NVIDIA H100 80GB HBM3",
        "h100-sxm5-80gb",
    )
    assert (gpu.power_limit_default_w, gpu.power_limit_min_w, gpu.power_limit_max_w) == (700.0, 200.0, 700.0)
    assert gpu.memory_bytes == 81559 * 1024**2
    assert not gpu.mig_capable


def test_a_product_that_nobody_knows_has_its_label_as_model_and_no_watts():
    found = inventory_of(
        build_node_model(labels={"nvidia.com/gpu.product": "NVIDIA-Z9000", "nvidia.com/gpu.memory": "much"})
    )
    check_message(found)
    gpu = found.gpus[0]
    assert (gpu.model, gpu.catalogue_key, gpu.power_limit_default_w, gpu.memory_bytes) == ("Z9000", "", None, 0)


def test_memory_tells_products_of_one_name_apart():
    assert product_of(build_node_model(labels={"nvidia.com/gpu.memory": "1024"})) is None
    assert (
        product_of(
            build_node_model(labels={"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.memory": "15360"})
        ).key
        == "t4"
    )


def test_a_long_node_name_still_gives_identifiers():
    found = inventory_of(build_node_model("n" * 63 + "." + "m" * 63 + ".x" * 10))
    check_message(found)
    assert len({gpu.uuid for gpu in found.gpus}) == 8


def test_a_node_without_gpus_has_none():
    found = inventory_of(build_node_model(gpus=0, labels={"nvidia.com/gpu.sharing-strategy": "mps"}))
    assert found.gpus == ()
    assert closed_reason(build_node_model(gpus=0, labels={"nvidia.com/gpu.sharing-strategy": "mps"})) == ""


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({"nvidia.com/gpu.sharing-strategy": "time-slicing"}, "its GPUs are shared"),
        ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"}, "MIG's single strategy"),
    ],
)
def test_tickets_to_gpus_are_no_inventory(labels, reason):
    assert inventory_of(build_node_model(labels=labels)) is None
    assert reason in closed_reason(build_node_model(labels=labels))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        ({"unschedulable": True}, "the node is cordoned"),
        ({"ready": "Unknown"}, "the node is not ready: kubelet stopped posting"),
        ({"labels": {"nvidia.com/mig.config.state": "pending"}}, "mig-manager is at work"),
        ({"labels": {"nvidia.com/mig.config.state": "rebooting"}}, "mig-manager is at work"),
        ({"labels": {"nvidia.com/mig.config.state": "success", "eelgrid.io/mig-owner": "mig-manager"}}, ""),
    ],
)
def test_why_a_node_is_closed(fields, reason):
    found = closed_reason(build_node_model(**fields))
    assert found.startswith(reason) if reason else found == ""
    assert external_usage_on(build_node_model(**fields), []).closed == found


def test_our_label_of_a_pool_goes_before_the_clouds():
    assert pool_of(build_node_model(labels={"eelgrid.io/pool": "a", "karpenter.sh/nodepool": "b"})) == "a"


def test_others_hold_what_they_ask_for_until_they_are_gone():
    gpu = {"name": "c", "resources": {"requests": {"cpu": "2", "nvidia.com/gpu": "3"}}}
    found = external_usage_on(
        build_node_model(allocatable={"nvidia.com/gpu": "7"}),
        [
            running("a"),
            running("going", deletionTimestamp="2026-11-22T04:00:00Z"),
            running("ended", phase="Succeeded"),
            running("failed", phase="Failed"),
            running("elsewhere", node_name="n2"),
            running("with-gpus", containers=[gpu]),
        ],
    )
    # Three GPUs asked for, and one that fell out of allocatable.
    assert found == ExternalUsage(cpu_milli=1100 + 1100 + 2100, memory_bytes=2 * 1024**3, gpu_count=3 + 1)


def test_a_kubelet_takes_so_many_pods_and_no_more():
    full = build_node_model(allocatable={"pods": "3"})
    assert external_usage_on(full, [running("a"), running("b")]).closed == ""
    assert external_usage_on(full, [running("a"), running("b"), running("c")]).closed == "3 pods are there and 3 may be"


def test_why_a_node_is_not_right_for_a_pod():
    tainted = build_node_model(taints=[{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}])
    assert (
        find_unmet_rule(build_pod_model().constraint, tainted)
        == "taint nvidia.com/gpu=present:NoSchedule is not tolerated"
    )
    assert (
        find_unmet_rule(
            build_pod_model(tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}]).constraint, tainted
        )
        == ""
    )
    assert (
        find_unmet_rule(build_pod_model(nodeSelector={"zone": "a"}).constraint, build_node_model())
        == "nodeSelector zone=a does not hold"
    )
    assert (
        find_unmet_rule(build_pod_model(requests={"rdma/hca": "1"}).constraint, build_node_model())
        == "rdma/hca is there 0 times and 1 are asked for"
    )
    assert (
        find_unmet_rule(
            build_pod_model(requests={"rdma/hca": "1"}).constraint, build_node_model(allocatable={"rdma/hca": "4"})
        )
        == ""
    )
    assert find_unmet_rule(build_pod_model().constraint, build_node_model(unschedulable=True)) == "the node is cordoned"


def test_a_pin_is_by_name_and_not_fooled_by_a_hostname():
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    pinned = build_pod_model(affinity={"nodeAffinity": required}).constraint
    assert find_unmet_rule(pinned, build_node_model("n1")) == ""
    assert find_unmet_rule(pinned, build_node_model("n2", labels={"kubernetes.io/hostname": "n1"})) == (
        "no term of the required node affinity holds"
    )


def test_a_trait_is_short_stable_and_empty_where_any_node_will_do():
    plain, picky = build_pod_model().constraint, build_pod_model(nodeSelector={"zone": "a"}).constraint
    taint = Taint("t", "", "NoSchedule")
    assert trait_name(plain, []) == trait_name(plain, [Taint("t", "", "PreferNoSchedule")]) == ""
    assert trait_name(plain, [taint]) == trait_name(plain) == "k8s:ec4622ba457cec83"
    assert trait_name(picky, []) == trait_name(parse_constraint({"nodeSelector": {"zone": "a"}}))
    assert trait_name(picky, []) != trait_name(plain)
    assert is_tolerated([Toleration("", "Exists", "", "")], taint)
    assert trait_name(build_pod_model(tolerations=[{"operator": "Exists"}]).constraint, [taint]) == ""


@pytest.mark.parametrize("operator", ["Lt", "Gt"])
def test_a_toleration_that_compares_meets_no_taint(operator):
    toleration = Toleration("t", operator, "5", "")
    assert not any(is_tolerated([toleration], Taint("t", value, "NoSchedule")) for value in ("4", "5", "6"))


def test_a_bound_that_stands_there_twice_holds_nowhere():
    line = {"key": "a", "operator": "Gt", "values": ["1", "1"]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [line]}]}}
    twice = build_pod_model(affinity={"nodeAffinity": required}).constraint
    assert find_unmet_rule(twice, build_node_model(labels={"a": "2"})) == "no term of the required node affinity holds"
