"""What is held of pods and nodes: the fields that somebody reads, and no more.

Owns which fields these are. Must not know what they mean. A pod of a real cluster has some
10 kB of JSON, most of it managed fields, environments and volumes' details.
"""

from collections.abc import Mapping
from typing import Any

from eelgrid_controller.adapters.kubernetes.port import Object
from eelgrid_controller.kubernetes.names import is_kept

__all__ = ["pruned_node", "pruned_pod"]

_METADATA = (
    "name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "ownerReferences",
)  # fmt: skip
_POD_SPEC = (
    "schedulingGates", "affinity", "nodeSelector", "tolerations", "nodeName", "schedulerName", "priority", "overhead",
    "resources", "resourceClaims", "schedulingGroup", "workloadRef", "topologySpreadConstraints",
)  # fmt: skip
_POD_STATUS = ("phase", "reason", "conditions", "podIP", "resourceClaimStatuses", "resources", "allocatedResources")
_STATUSES = ("containerStatuses", "initContainerStatuses")
_MIRROR = "kubernetes.io/config.mirror"


def pruned_pod(found: Object) -> Object:
    """A pod with what `views.pod_of` and `patches.ungating` read."""
    metadata, spec, status = found["metadata"], found.get("spec") or {}, found.get("status") or {}
    kept = _some(spec, _POD_SPEC)
    for part in ("containers", "initContainers"):
        if spec.get(part):
            kept[part] = [_some(one, ("name", "resources", "restartPolicy", "ports")) for one in spec[part]]
    if spec.get("volumes"):
        kept["volumes"] = [
            {key: {} for key in one if key != "name"}
            for one in spec["volumes"]
            if "persistentVolumeClaim" in one or "ephemeral" in one
        ]
    told = _some(status, _POD_STATUS)
    for part in _STATUSES:
        if status.get(part):
            told[part] = [_some(one, ("name", "resources", "allocatedResources")) for one in status[part]]
    labels = {key: value for key, value in (metadata.get("labels") or {}).items() if is_kept(key)}
    annotations = {
        key: value for key, value in (metadata.get("annotations") or {}).items() if is_kept(key) or key == _MIRROR
    }
    head = _some(metadata, _METADATA) | {"labels": labels, "annotations": annotations}
    return {"metadata": head, "spec": kept, "status": told}


def pruned_node(found: Object) -> Object:
    """A node with what `views.node_of` reads."""
    metadata, status = found["metadata"], found.get("status") or {}
    told = _some(status, ("allocatable", "capacity"))
    told["conditions"] = [one for one in status.get("conditions") or () if one.get("type") == "Ready"]
    told["nodeInfo"] = _some(status.get("nodeInfo") or {}, ("bootID",))
    return {
        "metadata": _some(metadata, (*_METADATA, "labels", "annotations")),
        "spec": _some(found.get("spec") or {}, ("taints", "unschedulable")),
        "status": told,
    }


def _some(found: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: found[key] for key in keys if key in found}
