"""The patch that lets a pod go to one node.

Owns the shape of that patch. Must not know why a pod goes where it goes, or who sends it.

Theory. A gated pod may be narrowed and nothing else: where it has required node affinity,
each of its terms may be added to but none may be added (terms are alternatives, so a new
one would widen); where it has none, one may be set. A pin therefore goes into EACH term, as
`matchFields: metadata.name`, which is the node object's own name, while the label
kubernetes.io/hostname is only what somebody wrote. Pin, plan and the gate's removal are one
merge patch: no moment exists in which the pod is free and not pinned. A merge patch
replaces lists whole, so the terms are those of the object whose resource version stands in
the patch; another version refuses it (409), as does another pod of the same name (uid).
An empty term matches nothing and cannot be added to; it is left as it is.

Sources: KEP-3838; kubernetes `pkg/apis/core/validation`, validateNodeAffinityMutation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from eelgrid_controller.kubernetes.names import ANNOTATION_PLAN, GATE

__all__ = ["annotating", "pinned_node", "stripping", "ungating", "unpinned"]

_FIELD = "metadata.name"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def ungating(pod: Mapping[str, Any], node_name: str, plan: str) -> dict[str, Any]:
    """A merge patch that pins a pod, notes its plan and removes our gate; `pod` is the newest JSON of it."""
    body = stripping(pod)
    body["metadata"]["annotations"] = {ANNOTATION_PLAN: plan}
    terms = [_with_pin(term, node_name) for term in _terms(pod)] or [_with_pin({}, node_name, is_new=True)]
    body["spec"]["affinity"] = {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": terms}}}
    return body


def stripping(pod: Mapping[str, Any]) -> dict[str, Any]:
    """A merge patch that removes our gate and keeps those of others."""
    metadata = pod["metadata"]
    gates = [gate for gate in pod["spec"].get("schedulingGates") or () if gate["name"] != GATE]
    return {
        "metadata": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]},
        "spec": {"schedulingGates": gates or None},
    }


def annotating(pod: Mapping[str, Any], annotations: Mapping[str, str]) -> dict[str, Any]:
    """A merge patch that writes these annotations of just this version of a pod."""
    metadata = pod["metadata"]
    head = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
    return {"metadata": {**head, "annotations": dict(annotations)}}


def pinned_node(pod: Mapping[str, Any]) -> str:
    """The one node that every term of a pod's required affinity names; empty where there is none."""
    names = {_pin(term) for term in _terms(pod) if term}
    return names.pop() if len(names) == 1 else ""


def unpinned(spec: Mapping[str, Any], node_name: str) -> dict[str, Any]:
    """A pod's spec as it was before our pin to a node: what its people demand of nodes."""
    affinity = dict(spec.get("affinity") or {})
    node_affinity = dict(affinity.get("nodeAffinity") or {})
    terms = []
    for term in (node_affinity.pop(_REQUIRED, None) or {}).get("nodeSelectorTerms") or ():
        fields = [one for one in term.get("matchFields") or () if one != _pinning(node_name)]
        left = {key: value for key, value in term.items() if key != "matchFields"} | (
            {"matchFields": fields} if fields else {}
        )
        terms += [left] if left else []
    if terms:
        node_affinity[_REQUIRED] = {"nodeSelectorTerms": terms}
    affinity["nodeAffinity"] = node_affinity
    return {**spec, "affinity": affinity}


def _pinning(node_name: str) -> dict[str, Any]:
    return {"key": _FIELD, "operator": "In", "values": [node_name]}


def _terms(pod: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    return (affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or ()


def _with_pin(term: Mapping[str, Any], node_name: str, *, is_new: bool = False) -> dict[str, Any]:
    if not term and not is_new:
        return {}
    pin = _pinning(node_name)
    fields = list(term.get("matchFields") or ())
    return {**term, "matchFields": fields if pin in fields else [*fields, pin]}


def _pin(term: Mapping[str, Any]) -> str:
    for found in reversed(term.get("matchFields") or ()):
        if found.get("key") == _FIELD and found.get("operator") == "In" and len(found.get("values") or ()) == 1:
            return str(found["values"][0])
    return ""
