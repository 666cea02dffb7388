"""The plan annotation: what was decided for a pod, on the pod itself.

Owns its text. Must not know how it gets there. Whoever takes over reads from it which work
of the core a pod is, and in which term of which leader that was said.

A plan is valid for the pod that it was written for, which it names by uid: whoever applies a running
pod's YAML again, annotations and all, gets a pod that holds nothing by it. Plans of before have no
uid. They are taken for valid where the workload's id names the pod's uid, as that of a pod alone does,
and for pods of a gang or a service: of these the core lets one alone hold each replica's place, and
all others count as what they ask for.

A workload's id is the name of its unit, and from the second attempt on `//` and the
number of the attempt: what the core has ended keeps its id for ever.
"""

import json
from hashlib import sha256
from typing import NamedTuple

__all__ = ["CLAIMED", "Plan", "attempt_of", "plan_for", "plan_of", "plan_text", "unit_name", "unit_of", "workload_id"]

# How the plans of pods that mode dra placed begin: they are no work of the core's.
CLAIMED = "claim-"
# And all whose workload's id goes on with the uid of the one pod.
_ALONE = ("pod-", CLAIMED, "slice-")
_TEXT_MOST = 16 * 1024
_AGAIN = "//"
_UNIT_MOST = 118  # what an id may have, less the attempt


class Plan(NamedTuple):
    """One pod's part of a plan; `devices` are indexes on the node."""

    epoch: int
    workload: str
    replica: int
    node_name: str
    devices: tuple[int, ...] = ()
    profile: str = ""
    uid: str = ""  # of the pod; empty in plans of before


def plan_text(plan: Plan) -> str:
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


def plan_of(text: str) -> Plan | None:
    """The plan in an annotation; None where it is none, as anybody may write there."""
    try:
        found = json.loads(text) if 0 < len(text) <= _TEXT_MOST else None
        if not isinstance(found, dict):
            return None
        return Plan(
            int(found["epoch"]), str(found["workload"]), int(found["replica"]), str(found["node"]),
            tuple(int(one) for one in found.get("devices") or ()), str(found.get("profile") or ""),
            str(found.get("uid") or ""),
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def plan_for(uid: str, text: str) -> Plan | None:
    """The plan in a pod's annotation; None also where it was written for another pod."""
    plan = plan_of(text)
    if plan is None:
        return None
    if plan.uid:
        return plan if plan.uid == uid else None
    alone = next((kind for kind in _ALONE if plan.workload.startswith(kind)), None)
    return plan if alone is None or unit_of(plan.workload) == f"{alone}{uid}" else None


def unit_name(text: str) -> str:
    """A unit's name that an attempt can be added to; what is too long or has the mark itself is hashed."""
    if len(text) <= _UNIT_MOST and _AGAIN not in text:
        return text
    return f"{text.partition('-')[0]}-{sha256(text.encode()).hexdigest()[:32]}"


def workload_id(unit: str, attempt: int) -> str:
    """What the core knows the unit's so-many-th attempt by."""
    return unit if attempt <= 1 else f"{unit}{_AGAIN}{attempt}"


def unit_of(workload: str) -> str:
    """The unit of a workload's id."""
    head, dot, tail = workload.rpartition(_AGAIN)
    return head if dot and tail.isdigit() else workload


def attempt_of(workload: str) -> int:
    """The attempt of a workload's id."""
    _, dot, tail = workload.rpartition(_AGAIN)
    return int(tail) if dot and tail.isdigit() else 1
