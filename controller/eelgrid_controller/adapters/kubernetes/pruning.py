"""What is held of pods, nodes, namespaces and volumes: the fields that somebody reads, and no more.

Owns which fields these are. Must not know what they mean. A pod of a real cluster has some
10 kB of JSON, most of it managed fields, environments and volumes' details.
"""

from collections.abc import Mapping
from typing import Any

from eelgrid_controller.adapters.kubernetes.port import Object
from eelgrid_controller.kubernetes.names import is_kept
from eelgrid_controller.kubernetes.scheduling_constraints import CLAIM_ANNOTATIONS, ZONE_LABELS

__all__ = ["pruned_claim", "pruned_namespace", "pruned_node", "pruned_pod", "pruned_storage_class", "pruned_volume"]

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
            {"name": one.get("name", ""), "persistentVolumeClaim": one["persistentVolumeClaim"]}
            if "persistentVolumeClaim" in one
            else {"name": one.get("name", ""), "ephemeral": {}}
            for one in spec["volumes"]
            if "persistentVolumeClaim" in one or "ephemeral" in one
        ]
    told = _some(status, _POD_STATUS)
    for part in _STATUSES:
        if status.get(part):
            told[part] = [_some(one, ("name", "resources", "allocatedResources")) for one in status[part]]
    labels = metadata.get("labels") or {}
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


def pruned_namespace(found: Object) -> Object:
    """A namespace with the labels that namespaceSelectors look at."""
    return {"metadata": _some(found["metadata"], (*_METADATA, "labels"))}


def pruned_claim(found: Object) -> Object:
    """A PersistentVolumeClaim with what `scheduling_constraints.claim_of` reads."""
    metadata, annotations = found["metadata"], found["metadata"].get("annotations") or {}
    head = _some(metadata, _METADATA) | {"annotations": _some(annotations, CLAIM_ANNOTATIONS)}
    return {"metadata": head, "spec": _some(found.get("spec") or {}, ("volumeName", "storageClassName"))}


def pruned_volume(found: Object) -> Object:
    """A PersistentVolume with what `scheduling_constraints.volume_of` reads."""
    metadata, labels = found["metadata"], found["metadata"].get("labels") or {}
    head = _some(metadata, _METADATA) | {"labels": _some(labels, ZONE_LABELS)}
    return {"metadata": head, "spec": _some(found.get("spec") or {}, ("nodeAffinity",))}


def pruned_storage_class(found: Object) -> Object:
    """A StorageClass with what `scheduling_constraints.storage_class_of` reads."""
    kept = _some(found, ("provisioner", "volumeBindingMode", "allowedTopologies"))
    return {"metadata": _some(found["metadata"], _METADATA), **kept}


def _some(found: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: found[key] for key in keys if key in found}
