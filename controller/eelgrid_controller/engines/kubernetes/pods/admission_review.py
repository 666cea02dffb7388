"""Decides an AdmissionReview: which new pods get the scheduling gate, or our scheduler's name, as a JSON patch.

The same rules as the chart's MutatingAdmissionPolicy has in CEL. A pod that cannot be read is admitted with a warning.
A pod that gets our scheduler's name is a candidate for a node at once (`pin_candidate`); whether there is one is
decided elsewhere.

Source: https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/ .
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.model.scheduler_support import find_unsupported_field
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_ON_ERROR,
    ANNOTATION_PLAN,
    GATE,
    LABEL_MANAGED,
    MANAGED,
    SCHEDULER,
    TAINT_MANAGED,
)

_VERSION = "admission.k8s.io/v1"
_UNMANAGED = "false"
# Owners that choose the node themselves.
_BINDING_OWNERS = frozenset({"DaemonSet", "Node"})
_MIRRORS = ("kubernetes.io/config.mirror", "kubernetes.io/config.source")
_DEFAULT_SCHEDULER = "default-scheduler"
# With the slash of the name as JSON pointers have it.
_PLAN_PATH = f"/metadata/annotations/{ANNOTATION_PLAN.replace('/', '~1')}"
_TOLERATION = {"key": TAINT_MANAGED, "operator": "Exists", "effect": "NoSchedule"}
# Longer ones are cut by the API server.
_WARNING_MOST = 250
_UID_MOST = 256


@dataclass(frozen=True, slots=True)
class GateRules:
    """What the chart's `gate` says."""

    prefixes: tuple[str, ...] = ("nvidia.com/gpu", "nvidia.com/mig-", "amd.com/gpu")
    excluded: frozenset[str] = frozenset({"kube-system", "kube-public", "kube-node-lease"})
    tolerates: bool = True
    binds: bool = False  # pods that need nothing of kube-scheduler get our scheduler's name instead of the gate


class ReviewOutcome(Enum):
    """What became of a review."""

    GATED = "gated"
    SCHEDULED = "scheduled"  # it has our scheduler's name
    PINNED = "pinned"  # and its node
    LEFT = "left"  # none of ours, or one that has its gate already
    UNREAD = "unread"


class AdmissionPin(NamedTuple):
    """The node of a pod that is being admitted, and its plan as the annotation has it.

    Without a node the plan names what was asked for and is not decided yet: the pod is bound when it is.
    """

    node_name: str
    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionResponse:
    """What is answered to a review."""

    answer: ReviewOutcome
    uid: str  # of the review
    patch: tuple[Mapping[str, Any], ...] = ()
    warning: str = ""
    # The pod as it will be created, where its node may be set in the same answer.
    candidate: Mapping[str, Any] | None = None

    @property
    def review(self) -> dict[str, Any]:
        """The review to send back."""
        response: dict[str, Any] = {"uid": self.uid, "allowed": True}
        if self.warning:
            response["warnings"] = [self.warning]
        if self.patch:
            response["patchType"] = "JSONPatch"
            response["patch"] = base64.b64encode(json.dumps(self.patch).encode()).decode()
        return {"apiVersion": _VERSION, "kind": "AdmissionReview", "response": response}


def pin_candidate(admitted: AdmissionResponse, pin: AdmissionPin) -> AdmissionResponse:
    """The answer with the node and the plan of its candidate."""
    assert admitted.candidate is not None
    annotations = admitted.candidate["metadata"].get("annotations")
    noted: dict[str, Any] = (
        {"path": _PLAN_PATH, "value": pin.plan}
        if annotations
        else {"path": "/metadata/annotations", "value": {ANNOTATION_PLAN: pin.plan}}
    )
    patch = (*admitted.patch, {"op": "add", **noted})
    if not pin.node_name:
        return replace(admitted, answer=ReviewOutcome.SCHEDULED, patch=patch)
    node = {"op": "add", "path": "/spec/nodeName", "value": pin.node_name}
    return replace(admitted, answer=ReviewOutcome.PINNED, patch=(*patch, node))


def review_uid(review: Any) -> str:
    """By which the API server knows its question; raises KubernetesUnreadable where this is no AdmissionReview."""
    if not isinstance(review, Mapping) or review.get("kind") != "AdmissionReview":
        raise KubernetesUnreadable("kind", "is no AdmissionReview", "post one of admission.k8s.io/v1")
    if review.get("apiVersion") != _VERSION:
        raise KubernetesUnreadable(
            "apiVersion", f"is not {_VERSION}", f"say admissionReviewVersions: [{_VERSION[-2:]}]"
        )
    request = review.get("request")
    uid = request.get("uid") if isinstance(request, Mapping) else None
    if not isinstance(uid, str) or not 0 < len(uid) <= _UID_MOST:
        raise KubernetesUnreadable("request.uid", "is missing", "send the request as the API server makes it")
    return uid


def review_pod(review: Any, rules: GateRules, *, is_opted_in: bool) -> AdmissionResponse:
    """The answer, which always allows the pod; `is_opted_in` says that its namespace has the label.

    Raises KubernetesUnreadable where there is nothing that could be answered.
    """
    uid = review_uid(review)
    try:
        return _decide(uid, review["request"], rules, is_opted_in=is_opted_in)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Of a shape that no API server sends: named as it is met, for each field has its own fault.
        told = f"eelgrid: the pod could not be read ({error}); it goes by without a scheduling gate"
        return AdmissionResponse(answer=ReviewOutcome.UNREAD, uid=uid, warning=told[:_WARNING_MOST])


def _decide(uid: str, request: Mapping[str, Any], rules: GateRules, *, is_opted_in: bool) -> AdmissionResponse:
    """The answer for a request that can be read."""
    kind = request["kind"]
    left = AdmissionResponse(answer=ReviewOutcome.LEFT, uid=uid)
    if (kind["group"], kind["kind"], request["operation"], request.get("subResource") or "") != (
        "",
        "Pod",
        "CREATE",
        "",
    ):
        return left
    pod = request["object"]
    namespace = request.get("namespace") or pod["metadata"].get("namespace") or ""
    if namespace in rules.excluded or not _is_ours(pod, rules, is_opted_in=is_opted_in):
        return left
    spec = pod["spec"]
    answer, patch, candidate = ReviewOutcome.LEFT, list[Mapping[str, Any]](), None
    named = spec.get("schedulerName") or _DEFAULT_SCHEDULER
    is_gated = any(gate["name"] == GATE for gate in spec.get("schedulingGates") or ())
    is_bindable = rules.binds and named in (_DEFAULT_SCHEDULER, SCHEDULER) and not is_gated and _is_bindable(pod)
    if is_bindable and named == _DEFAULT_SCHEDULER:
        answer = ReviewOutcome.SCHEDULED
        patch.append({"op": "add", "path": "/spec/schedulerName", "value": SCHEDULER})
    elif not is_gated and not (rules.binds and named == SCHEDULER):
        answer = ReviewOutcome.GATED
        patch.append(_append_operation("schedulingGates", spec, {"name": GATE}))
    tolerations = list(spec.get("tolerations") or ())
    if rules.tolerates and not any(one.get("key") == TAINT_MANAGED for one in tolerations):
        answer = ReviewOutcome.GATED if answer is ReviewOutcome.LEFT else answer
        patch.append(_append_operation("tolerations", spec, _TOLERATION))
        tolerations.append(_TOLERATION)
    # A dry run creates nothing that a node could be kept for; a pod with a node may have no gates.
    if is_bindable and not request.get("dryRun") and not spec.get("schedulingGates"):
        candidate = {
            "metadata": {**pod["metadata"], "namespace": namespace},
            "spec": {**spec, "schedulerName": SCHEDULER, "tolerations": tolerations},
        }
    return AdmissionResponse(answer=answer, uid=uid, patch=tuple(patch), candidate=candidate)


def _is_bindable(pod: Mapping[str, Any]) -> bool:
    """Whether nothing of a pod needs kube-scheduler; `on-error: schedule` does, since a scheduler's name is for ever."""
    annotations = pod["metadata"].get("annotations") or {}
    return ANNOTATION_ON_ERROR not in annotations and not find_unsupported_field(pod["spec"])


def _append_operation(field: str, spec: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    if spec.get(field):
        return {"op": "add", "path": f"/spec/{field}/-", "value": value}
    return {"op": "add", "path": f"/spec/{field}", "value": [value]}


def _is_ours(pod: Mapping[str, Any], rules: GateRules, *, is_opted_in: bool) -> bool:
    metadata, spec = pod["metadata"], pod["spec"]
    if spec.get("nodeName") or any(one["kind"] in _BINDING_OWNERS for one in metadata.get("ownerReferences") or ()):
        return False
    if any(mirror in (metadata.get("annotations") or {}) for mirror in _MIRRORS):
        return False
    said = (metadata.get("labels") or {}).get(LABEL_MANAGED)
    if said == MANAGED:
        return True
    return said != _UNMANAGED and is_opted_in and _asks_for_devices(spec, rules.prefixes)


def _asks_for_devices(spec: Mapping[str, Any], prefixes: tuple[str, ...]) -> bool:
    containers = [*spec["containers"], *(spec.get("initContainers") or ())]
    return bool(spec.get("resourceClaims")) or any(
        name.startswith(prefixes) for one in containers for name in (one.get("resources") or {}).get("limits") or ()
    )
