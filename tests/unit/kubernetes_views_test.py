"""Pods and nodes from what an API server gives."""

import copy
import random

import pytest
from tests.builders.kubernetes import parse_manifest

from eelgrid_controller.engines.kubernetes.model.objects import (
    OwnerReference,
    PodClaim,
    PodShapeCache,
    parse_node,
    parse_pod,
)
from eelgrid_controller.engines.kubernetes.model.quantities import (
    KubernetesUnreadable,
    ResourceAmounts,
    parse_amounts,
    pod_requests,
)
from eelgrid_controller.engines.kubernetes.model.selectors import AffinityTerm, PodRelations, VolumeClaim


def box(cpu=None, gpus=None, *, name="c", policy=None, limits=None):
    asked = {**({"cpu": cpu} if cpu else {}), **({"nvidia.com/gpu": gpus} if gpus else {})}
    return {
        "name": name,
        "resources": {"requests": asked, "limits": limits},
        **({"restartPolicy": policy} if policy else {}),
    }


def test_a_bare_object_is_a_pod():
    found = parse_pod({"metadata": {"name": "a", "uid": "u", "labels": None}, "spec": None})
    assert (found.name, found.uid, found.labels, found.owner, found.gates) == ("a", "u", {}, None, ())
    assert not any([found.is_gated, found.is_terminal, found.is_deleting, found.is_ready])
    assert found.requested == ResourceAmounts()


def test_a_bare_object_is_a_node_that_is_not_ready():
    found = parse_node({"metadata": {"name": "a", "uid": "u"}})
    assert (found.is_ready, found.unready, found.pods_most) == (False, "its kubelet has not reported", None)


@pytest.mark.parametrize(
    ("found", "field"),
    [
        ({}, "metadata.uid"),
        ({"metadata": {"uid": "u"}}, "metadata.name"),
        ({"metadata": {"uid": "u", "name": "n"}, "spec": []}, "spec"),
        ({"metadata": {"uid": "u", "name": "n", "creationTimestamp": "today"}}, "metadata.creationTimestamp"),
        (
            {"metadata": {"uid": "u", "name": "n"}, "spec": {"containers": [box("much")]}},
            "resources.requests",
        ),
    ],
)
def test_what_no_server_gives_is_refused_by_field(found, field):
    with pytest.raises(KubernetesUnreadable) as caught:
        parse_pod(found)
    assert caught.value.field == field
    assert caught.value.remedy


def test_everything_that_is_kept_of_a_pod():
    found = parse_pod(
        parse_manifest("""
        metadata:
          name: llm-7d9f-x2k
          namespace: serve
          uid: 0b5c
          resourceVersion: "812"
          creationTimestamp: "2026-11-22T04:30:00Z"
          deletionTimestamp: "2026-11-22T04:31:00Z"
          labels: {eelgrid.io/managed: "true", app: llm, pod-template-hash: 7d9f}
          annotations: {eelgrid.io/rate: "12", kubectl.kubernetes.io/restartedAt: now}
          ownerReferences:
          - {apiVersion: v1, kind: ConfigMap, name: other, uid: x}
          - {apiVersion: apps/v1, kind: ReplicaSet, name: llm-7d9f, uid: r1, controller: true}
        spec:
          schedulingGates: [{name: kueue.x-k8s.io/admission}, {name: eelgrid.io/placement}]
          schedulerName: default-scheduler
          priority: 1000
          nodeSelector: {zone: a}
          schedulingGroup: {podGroupName: g1}
          resourceClaims:
          - {name: gpu, resourceClaimTemplateName: one-gpu}
          - {name: net, resourceClaimName: rail}
          affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: k}]}}
          topologySpreadConstraints: [{maxSkew: 1, whenUnsatisfiable: ScheduleAnyway}]
          volumes: [{name: v, persistentVolumeClaim: {claimName: c}}, {name: w, emptyDir: {}}]
          containers: [{name: main, ports: [{containerPort: 1}], resources: {limits: {nvidia.com/gpu: "1"}}}]
        status:
          phase: Pending
          podIP: 10.0.0.7
          resourceClaimStatuses: [{name: gpu, resourceClaimName: llm-gpu-abc}]
          conditions:
          - {type: PodScheduled, status: "False", reason: SchedulingGated, message: waits}
          - {type: Ready, status: "False"}
        """)
    )
    assert (found.namespace, found.name, found.resource_version) == ("serve", "llm-7d9f-x2k", "812")
    assert (found.created_s, found.deleted_s, found.is_deleting) == (1795321800.0, 1795321860.0, True)
    assert found.labels == {"eelgrid.io/managed": "true", "app": "llm", "pod-template-hash": "7d9f"}
    assert found.annotations == {"eelgrid.io/rate": "12"}
    assert found.owner == OwnerReference("apps/v1", "ReplicaSet", "llm-7d9f", "r1")
    assert found.owner.group == "apps"
    assert (found.is_gated, found.gates[0]) == (True, "kueue.x-k8s.io/admission")
    assert (found.priority, found.phase, found.unscheduled, found.unscheduled_message) == (
        1000,
        "Pending",
        "SchedulingGated",
        "waits",
    )
    assert found.claims == (PodClaim("gpu", "llm-gpu-abc", "one-gpu"), PodClaim("net", "rail", ""))
    assert (found.group, found.pod_ip) == ("g1", "10.0.0.7")
    assert found.relations == PodRelations(
        anti_affinity=(AffinityTerm("k", None),), claims=(VolumeClaim("c"),)
    )  # a spread that is but wished for is left out
    assert found.constraint.selector == (("zone", "a"),)
    assert found.requested == ResourceAmounts(0, 0, (("nvidia.com/gpu", 1),))


def test_a_bound_pod_says_no_reason_and_its_group_of_old_is_read():
    spec = {"nodeName": "n1", "workloadRef": {"name": "w", "podGroup": "workers", "podGroupReplicaKey": "3"}}
    status = {"phase": "Succeeded", "conditions": [{"type": "PodScheduled", "status": "True", "reason": "x"}]}
    found = parse_pod({"metadata": {"name": "a", "uid": "u"}, "spec": spec, "status": status})
    assert (found.node_name, found.unscheduled, found.group, found.is_terminal) == ("n1", "", "w/workers/3", True)


def test_equal_parts_are_kept_once():
    found = [
        parse_pod(
            {
                "metadata": {"name": f"p{number}", "uid": f"u{number}", "namespace": "x" * 40},
                "spec": {"nodeSelector": {"zone": "a"}, "containers": [box("4", "1")]},
            }
        )
        for number in range(2)
    ]
    assert found[0].constraint is found[1].constraint
    assert found[0].requested is found[1].requested
    assert found[0].namespace is found[1].namespace


def test_containers_add_up_and_an_init_container_may_need_more():
    spec = {"containers": [box("1"), box("500m")], "initContainers": [box("4", "2"), box("2")]}
    assert pod_requests(spec) == ResourceAmounts(4000, 0, (("nvidia.com/gpu", 2),))


def test_sidecars_stay_and_are_there_while_later_init_containers_run():
    spec = {
        "containers": [box("1")],
        "initContainers": [box("3"), box("1", policy="Always"), box("3", policy=None), box("1", policy="Always")],
    }
    # First 3; then the sidecar with 3; at last both sidecars with the main container.
    assert pod_requests(spec).cpu_milli == 4000
    assert pod_requests({**spec, "containers": [box("3")]}).cpu_milli == 5000


def test_overhead_and_limits_that_stand_for_requests():
    spec = {"containers": [box(limits={"cpu": "2", "memory": "1Gi"})], "overhead": {"cpu": "250m", "memory": "64Mi"}}
    assert pod_requests(spec) == ResourceAmounts(2250, 1024**3 + 64 * 1024**2)


def test_the_pods_own_cpu_stands_for_the_sum_and_devices_stay_the_containers():
    spec = {
        "containers": [box("1", "1"), box("1", "1")],
        "resources": {"requests": {"cpu": "8", "nvidia.com/gpu": "5"}, "limits": {"cpu": "9", "memory": "2Gi"}},
    }
    assert pod_requests(spec) == ResourceAmounts(8000, 2 * 1024**3, (("nvidia.com/gpu", 2),))


@pytest.mark.parametrize(("reason", "cpu_milli"), [("Deferred", 6000), ("Infeasible", 4000)])
def test_a_pod_under_resize_holds_the_most_of_what_it_may_get(reason, cpu_milli):
    status = {
        "containerStatuses": [
            {"name": "c", "resources": {"requests": {"cpu": "3"}}, "allocatedResources": {"cpu": "4"}}
        ],
        "conditions": [{"type": "PodResizePending", "reason": reason}],
    }
    assert pod_requests({"containers": [box("6")]}, status).cpu_milli == cpu_milli


def test_fractions_are_summed_before_they_are_rounded():
    assert pod_requests({"containers": [box("100500u"), box("100500u")]}).cpu_milli == 201


def test_resources_without_a_domain_or_of_kubernetes_are_no_devices():
    found = parse_amounts({"hugepages-2Mi": "1Gi", "kubernetes.io/x": "1", "pods": "9", "rdma/hca": "2", "a.b/c": "0"})
    assert found == ResourceAmounts(0, 0, (("rdma/hca", 2),))
    assert (found.count("rdma/hca"), found.count("a.b/c")) == (2, 0)


def _drawn(rng):
    """A pod of an API server with some of what shapes follow from, and some of what they do not."""
    spec = {"containers": [box(rng.choice(["100m", "2"]), rng.choice([None, "1", "8"]))]}
    status = {"phase": rng.choice(["Pending", "Running"]), "conditions": []}
    if rng.random() < 0.5:
        pin = {"key": "metadata.name", "operator": "In", "values": [f"n{rng.randrange(12)}"]}
        terms = {"nodeSelectorTerms": [{"matchFields": [pin]}]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    if rng.random() < 0.3:
        spec["nodeSelector"] = {"zone": rng.choice("ab")}
    if rng.random() < 0.3:
        running = {"name": "c", "resources": {"requests": {"cpu": rng.choice(["1", "3"])}}}
        status["containerStatuses"] = [running]
    if rng.random() < 0.3:
        reason = rng.choice(["Infeasible", "Deferred"])
        status["conditions"].append({"type": "PodResizePending", "status": "True", "reason": reason})
    if rng.random() < 0.3:
        spec["resourceClaims"] = [{"name": "g", "resourceClaimTemplateName": "t"}]
        status["resourceClaimStatuses"] = [{"name": "g", "resourceClaimName": rng.choice(["t-1", "t-2"])}]
    if rng.random() < 0.3:
        spec["volumes"] = [{"persistentVolumeClaim": {}}]
    return {"metadata": {"name": "a", "uid": str(rng.random())}, "spec": spec, "status": status}


def test_what_is_remembered_of_other_pods_changes_no_value():
    rng = random.Random(6)
    shapes = PodShapeCache()
    pods = [_drawn(rng) for _ in range(60)]
    seen = set()
    for _ in range(600):
        found = copy.deepcopy(rng.choice(pods))
        pod = parse_pod(found)
        assert parse_pod(found, shapes) == pod
        seen.add((pod.requested, pod.constraint, pod.claims, pod.relations))
    assert len(seen) > 16, "more shapes than are remembered"


def test_a_spec_that_cannot_be_read_is_refused_each_time():
    shapes = PodShapeCache()
    found = {"metadata": {"name": "a", "uid": "u"}, "spec": {"containers": [box("much")]}}
    for _ in range(2):
        with pytest.raises(KubernetesUnreadable):
            parse_pod(found, shapes)
