"""From a pod of the API to what mode `dra` makes of it.

Owns which pods get their devices by claims, whose they are, and where every other pod counts. Must not know what
becomes of them.
"""

from collections.abc import Mapping
from typing import Any

from eelgrid_controller.kubernetes import annotations
from eelgrid_controller.kubernetes.claim_events import Claimant, PodSeen
from eelgrid_controller.kubernetes.errors import AnnotationUnreadable, KubernetesUnreadable
from eelgrid_controller.kubernetes.holders import Holders
from eelgrid_controller.kubernetes.names import ANNOTATION_PLAN
from eelgrid_controller.kubernetes.owners import Refused, membership_of
from eelgrid_controller.kubernetes.plans import plan_for
from eelgrid_controller.kubernetes.views import Pod, is_claimant, pod_of
from eelgrid_protos.messages import WorkloadKind

__all__ = ["claimant_of", "seen_of"]

_TERMINAL = ("Succeeded", "Failed")


def seen_of(found: Mapping[str, Any], holders: Holders) -> PodSeen:
    """A pod as an event; one that cannot be read counts where it is, and is nobody's."""
    spec, metadata = found.get("spec") or {}, found["metadata"]
    claimant = None
    if spec.get("resourceClaims"):
        try:
            pod = pod_of(found)
        except KubernetesUnreadable:
            pod = None
        if pod is not None and is_claimant(pod):
            claimant = claimant_of(pod, holders)
    return PodSeen(metadata["uid"], found, _where(found), claimant)


def claimant_of(pod: Pod, holders: Holders) -> Claimant:
    """Whose a pod is, or why that cannot be said."""
    is_released = False
    try:
        is_released = annotations.on_error(pod.annotations)
        annotations.check_names(pod.annotations)
        is_training = annotations.kind(pod.annotations) is WorkloadKind.TRAINING_JOB
        asked = annotations.priority(pod.annotations)
        member = membership_of(pod, holders, is_training=is_training)
    except AnnotationUnreadable as error:
        return Claimant(pod, Refused(error.field, error.fault, error.remedy), 0, is_released)
    is_free = isinstance(member, Refused) and member.is_released
    return Claimant(pod, member, pod.priority if asked is None else asked, is_released or is_free)


def _where(found: Mapping[str, Any]) -> str:
    """The node that a pod is on or can only go to."""
    spec, status = found.get("spec") or {}, found.get("status") or {}
    if status.get("phase") in _TERMINAL:
        return ""
    if spec.get("nodeName") or spec.get("schedulingGates"):
        return str(spec.get("nodeName") or "")
    metadata = found["metadata"]
    plan = plan_for(metadata["uid"], (metadata.get("annotations") or {}).get(ANNOTATION_PLAN, ""))
    return "" if plan is None else plan.node_name
