"""Objects of Kubernetes for tests: pods as the projects' controllers make them, written small."""

import itertools

import yaml

from eelgrid_controller.engines.kubernetes.model.objects import parse_node, parse_pod
from eelgrid_controller.engines.kubernetes.model.pod_group import ObjectRef, parse_owner_template

_UIDS = itertools.count(1)


def manifest(text):
    """One object in YAML."""
    return yaml.safe_load(text)


def pod(*, gpus=1, labels=None, annotations=None, owner=None, requests=None, name="p-0", **spec):
    """A pod of one container; `owner` is (apiVersion, kind, name, uid)."""
    asked = {"cpu": "4", "memory": "16Gi", **({"nvidia.com/gpu": str(gpus)} if gpus else {}), **(requests or {})}
    metadata = {
        "name": name,
        "namespace": "ml",
        "uid": f"uid-{next(_UIDS)}",
        "creationTimestamp": "2026-11-22T04:00:00Z",
        "labels": labels,
        "annotations": annotations,
    }
    if owner is not None:
        keys = ("apiVersion", "kind", "name", "uid")
        metadata["ownerReferences"] = [{**dict(zip(keys, owner, strict=True)), "controller": True}]
    gates = [{"name": "eelgrid.io/placement"}]
    containers = [{"name": "main", "resources": {"requests": asked}}]
    return parse_pod({"metadata": metadata, "spec": {"containers": containers, "schedulingGates": gates, **spec}})


def node(name="n1", *, gpus=8, allocatable=None, ready="True", labels=None, **spec):
    """A node with H100s, as a kubelet and GPU feature discovery describe it."""
    amounts = {"cpu": "96", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": str(gpus)}
    known = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
    return parse_node(
        {
            "metadata": {"name": name, "uid": f"uid-{name}", "labels": {**known, **(labels or {})}},
            "spec": spec,
            "status": {
                "capacity": amounts,
                "allocatable": {**amounts, **(allocatable or {})},
                "conditions": [{"type": "Ready", "status": ready, "message": "kubelet stopped posting"}],
                "nodeInfo": {"bootID": "boot-1"},
            },
        }
    )


def held(group, text):
    """An object above pods, as lookups find it: its ref and what it says."""
    found = manifest(text)
    ref = ObjectRef(group, found["kind"], found["metadata"]["namespace"], found["metadata"]["name"])
    return {ref: parse_owner_template(ref, found)}
