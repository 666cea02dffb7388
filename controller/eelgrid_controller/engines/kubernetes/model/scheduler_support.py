"""Which pods Eelgrid may bind itself: those of whose rules none is left for kube-scheduler to judge.

Nobody checks a binding: a rule that is not known here would be broken silently. Fields are therefore allowed by name,
and a pod with any other, also of a Kubernetes newer than this, takes the gate and is bound by kube-scheduler.

Sources: kubernetes v1.36 pkg/scheduler/framework/plugins (nodeports, noderesources, nodevolumelimits, volumebinding,
volumerestrictions, dynamicresources, gangscheduling, nodedeclaredfeatures).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from eelgrid_controller.engines.kubernetes.model.well_known import SCHEDULER

# By which a pruned pod's spec keeps what `find_unsupported_field` said of the whole one.
UNSUPPORTED_FIELD = "eelgrid.io/unsupported"
_SPEC = frozenset(
    {
        "activeDeadlineSeconds",
        "affinity",
        "automountServiceAccountToken",
        "containers",
        "dnsConfig",
        "dnsPolicy",
        "enableServiceLinks",
        "hostAliases",
        "hostIPC",
        "hostNetwork",
        "hostPID",
        "hostname",
        "imagePullSecrets",
        "initContainers",
        "nodeName",
        "nodeSelector",
        "overhead",
        "preemptionPolicy",
        "priority",
        "priorityClassName",
        "readinessGates",
        "resources",
        "restartPolicy",
        "runtimeClassName",
        "schedulerName",
        "schedulingGates",
        "securityContext",
        "serviceAccount",
        "serviceAccountName",
        "setHostnameAsFQDN",
        "shareProcessNamespace",
        "subdomain",
        "terminationGracePeriodSeconds",
        "tolerations",
        "topologySpreadConstraints",
        "volumes",
    }
)
_CONTAINER = frozenset(
    {
        "args",
        "command",
        "env",
        "envFrom",
        "image",
        "imagePullPolicy",
        "lifecycle",
        "livenessProbe",
        "name",
        "ports",
        "readinessProbe",
        "resources",
        "restartPolicy",
        "securityContext",
        "startupProbe",
        "stdin",
        "stdinOnce",
        "terminationMessagePath",
        "terminationMessagePolicy",
        "tty",
        "volumeMounts",
        "workingDir",
    }
)
# Volumes that any node can mount, as many as there are.
_VOLUMES = frozenset(
    {"configMap", "downwardAPI", "emptyDir", "hostPath", "image", "name", "nfs", "projected", "secret"}
)
# What the core counts on a node; other amounts are known to kube-scheduler alone.
_AMOUNTS = frozenset({"amd.com/gpu", "cpu", "memory", "nvidia.com/gpu"})


def awaits_binding(pod: Mapping[str, Any]) -> bool:
    """Whether a pod as the API server has it waits for our scheduler."""
    spec = pod.get("spec") or {}
    return spec.get("schedulerName") == SCHEDULER and not spec.get("nodeName")


def find_unsupported_field(spec: Mapping[str, Any]) -> str:
    """The first field of a pod's spec that keeps Eelgrid from binding it; empty where none does."""
    return next(_find_fields(spec), "")


def _find_fields(spec: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"spec.{key}" for key in _unknown_keys(spec, _SPEC))
    for volume in spec.get("volumes") or ():
        yield from (f"spec.volumes[{volume.get('name')}].{key}" for key in _unknown_keys(volume, _VOLUMES))
    for spread in spec.get("topologySpreadConstraints") or ():
        if (spread.get("minDomains") or 1) > 1:
            yield "spec.topologySpreadConstraints.minDomains"
    yield from _find_amounts("spec.resources", spec.get("resources") or {})
    for part in ("containers", "initContainers"):
        for container in spec.get(part) or ():
            path = f"spec.{part}[{container.get('name')}]"
            yield from (f"{path}.{key}" for key in _unknown_keys(container, _CONTAINER))
            ports = container.get("ports") or ()
            if any(port.get("hostPort") for port in ports) or (ports and spec.get("hostNetwork")):
                yield f"{path}.ports.hostPort"
            yield from _find_amounts(f"{path}.resources", container.get("resources") or {})


def _find_amounts(path: str, resources: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{path}.{key}" for key in _unknown_keys(resources, ("limits", "requests")))
    for part in ("limits", "requests"):
        for name in sorted((resources.get(part) or {}).keys() - _AMOUNTS):
            yield f"{path}.{part}.{name}"


def _unknown_keys(found: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Keys that say something and are not known; null and empty lists say nothing, but an empty object may."""
    kept = frozenset(known)
    return sorted(key for key, value in found.items() if key not in kept and value not in (None, "", False, []))
