"""The plan and move annotations of a pod, and the patches that write them with the pin and the gate's removal.

A plan is valid for the pod whose uid it names. A gated pod's affinity may only be narrowed, so the pin goes into EACH
required term as `matchFields: metadata.name`. Pin, plan and the gate's removal are one merge patch; resource version
and uid in it make a stale write fail with 409.

Sources: KEP-3838; kubernetes pkg/apis/core/validation, validateNodeAffinityMutation.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model.pod_group import unit_of
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_MOVE, ANNOTATION_PLAN, GATE

_MAX_MOVE_NOTE_LENGTH = 8 * 1024
_LATEST_S = 253_402_300_800.0  # the year 10000, for which Kubernetes has no time


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveNote:
    """One pod's move; times are seconds since 1970, texts are empty where nothing is to be said."""

    uid: str  # of the pod that goes
    pod: str = ""
    unit: str = ""
    workload: str = ""  # whose replica has its new place; empty where the core looks for one when the new pod comes
    replica: int = 0
    to: str = ""
    owner: str = ""  # the controller's uid, of which the new pod will be
    deployment: str = ""  # the name
    replicas: int = 0  # before
    since_s: float = 0.0
    evict_s: float = 0.0
    step: str = ""  # surge, shrink, undo; of the pod: told, cost
    step_s: float = 0.0
    cost: str = ""  # the pod's own deletion cost before
    cause: str = ""


_TYPES = {one.name: one.type for one in fields(MoveNote)}


def format_move_note(note: MoveNote) -> str:
    """The annotation; what is as by default is left out."""
    whole = asdict(note)
    kept = {name: whole[name] for name in whole if name == "uid" or whole[name] not in ("", 0)}
    return json.dumps(kept, separators=(",", ":"))


def parse_move_note(annotations: Mapping[str, str]) -> MoveNote | None:
    """The note in an object's annotations; None where there is none that can be read, as anybody may write there."""
    text = annotations.get(ANNOTATION_MOVE, "")
    try:
        found = json.loads(text) if 0 < len(text) <= _MAX_MOVE_NOTE_LENGTH else None
        if not isinstance(found, dict) or not found.get("uid"):
            return None
        note = MoveNote(**{name: _CASTS[str(_TYPES[name])](found[name]) for name in _TYPES if name in found})
        return note if all(0.0 <= at_s < _LATEST_S for at_s in (note.since_s, note.evict_s, note.step_s)) else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


_CASTS = {"<class 'str'>": str, "<class 'int'>": int, "<class 'float'>": float}


_FIELD = "metadata.name"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def ungating_patch(pod: Mapping[str, Any], node_name: str, plan: str) -> dict[str, Any]:
    """A merge patch that pins a pod, notes its plan and removes our gate; `pod` is the newest JSON of it."""
    body = gate_removal_patch(pod)
    body["metadata"]["annotations"] = {ANNOTATION_PLAN: plan}
    terms = [_with_pin(term, node_name) for term in _terms(pod)] or [_with_pin({}, node_name, is_new=True)]
    body["spec"]["affinity"] = {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": terms}}}
    return body


def gate_removal_patch(pod: Mapping[str, Any]) -> dict[str, Any]:
    """A merge patch that removes our gate and keeps those of others."""
    metadata = pod["metadata"]
    gates = [gate for gate in pod["spec"].get("schedulingGates") or () if gate["name"] != GATE]
    return {
        "metadata": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]},
        "spec": {"schedulingGates": gates or None},
    }


def annotation_patch(pod: Mapping[str, Any], annotations: Mapping[str, str]) -> dict[str, Any]:
    """A merge patch that writes these annotations of just this version of a pod."""
    metadata = pod["metadata"]
    head = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
    return {"metadata": {**head, "annotations": dict(annotations)}}


def pinned_node(pod: Mapping[str, Any]) -> str:
    """The one node that every term of a pod's required affinity names; empty where there is none."""
    names = {_pin(term) for term in _terms(pod) if term}
    return names.pop() if len(names) == 1 else ""


def unpin_spec(spec: Mapping[str, Any], node_name: str) -> dict[str, Any]:
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


# How the plans of pods that mode dra placed begin: they are no work of the core's.
CLAIM_WORKLOAD_PREFIX = "claim-"
# How the plan of a pod begins that was placed at its admission, when nobody knew its uid; a random part follows.
ADMITTED_UID_PREFIX = "admitted-"
_ADMITTED_WORKLOAD_PREFIX = f"pod-{ADMITTED_UID_PREFIX}"
# And all whose workload's id goes on with the uid of the one pod.
_ALONE = ("pod-", CLAIM_WORKLOAD_PREFIX, "slice-")
_MAX_PLAN_LENGTH = 16 * 1024


class PodPlan(NamedTuple):
    """One pod's part of a plan; `devices` are indexes on the node."""

    epoch: int
    workload: str
    replica: int
    node_name: str
    devices: tuple[int, ...] = ()
    profile: str = ""
    uid: str = ""  # of the pod; empty in plans of before


def format_plan(plan: PodPlan) -> str:
    """The annotation."""
    return json.dumps(
        {
            "plan": f"{plan.epoch}/{plan.workload}",
            "epoch": plan.epoch,
            "workload": plan.workload,
            "replica": plan.replica,
            "node": plan.node_name,
            "devices": list(plan.devices),
            "profile": plan.profile,
            "uid": plan.uid,
        },
        separators=(",", ":"),
    )


def parse_plan(text: str) -> PodPlan | None:
    """The plan in an annotation; None where it is none, as anybody may write there."""
    try:
        found = json.loads(text) if 0 < len(text) <= _MAX_PLAN_LENGTH else None
        if not isinstance(found, dict):
            return None
        return PodPlan(
            int(found["epoch"]),
            str(found["workload"]),
            int(found["replica"]),
            str(found["node"]),
            tuple(int(one) for one in found.get("devices") or ()),
            str(found.get("profile") or ""),
            str(found.get("uid") or ""),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def reserved_uid(unit: str) -> str:
    """The uid under which a unit's place was reserved before its pod had one; empty for all other units."""
    return unit.removeprefix("pod-") if unit.startswith(_ADMITTED_WORKLOAD_PREFIX) else ""


def plan_for_pod(uid: str, text: str) -> PodPlan | None:
    """The plan in a pod's annotation; None also where it was written for another pod."""
    plan = parse_plan(text)
    if plan is None:
        return None
    if plan.uid.startswith(ADMITTED_UID_PREFIX):
        return plan  # whose it is, the gate knows
    if plan.uid:
        return plan if plan.uid == uid else None
    alone = next((kind for kind in _ALONE if plan.workload.startswith(kind)), None)
    return plan if alone is None or unit_of(plan.workload) == f"{alone}{uid}" else None
