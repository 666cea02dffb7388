"""The condition names.CONDITION_PLACEMENT of a pod: whether it was placed, and why not.

Owns the reasons, which are a bounded set, and when a condition is due to be written. Must not know how it
is written. Pure; time is an argument.

Theory. Events about a pod expire after an hour; a condition stays. It is written when its status or
reason changes, and for new words alone only now and then. What stands in the pod's status is the
truth: a write that was lost is found missing and made again. States that last for one answer of the
core have no condition of their own, so that a pod which is placed at once gets one write.
"""

from collections.abc import Mapping

from eelgrid_controller.kubernetes.gangs import Member, Stand, Unit
from eelgrid_controller.kubernetes.unit_steps import others_gates
from eelgrid_controller.kubernetes.views import PlacementCondition

__all__ = ["REASONS", "REWORDED_S", "is_due", "left_condition", "placement_condition"]

# Seconds between two writes for one pod that change the words alone, and until a write that is not seen is repeated.
REWORDED_S = 30.0
PLACED = "Placed"
LEFT = "LeftToKubeScheduler"
INVALID_ANNOTATION = "InvalidAnnotation"
INVALID_POD = "InvalidPod"
PIN_DENIED = "PinDenied"
WAITS_FOR_GATES = "WaitsForOtherGates"
WAITS_FOR_GANG = "WaitsForGang"
WAITS_FOR_VOLUME = "WaitsForVolume"
NO_NODE = "NoEligibleNode"
NO_ROOM = "NoRoom"
NO_POWER = "NoPowerBudget"
SPENT = "SpendingLimitReached"
NOT_ACCEPTED = "NotAccepted"
REASONS = (
    PLACED, LEFT, INVALID_ANNOTATION, INVALID_POD, PIN_DENIED, WAITS_FOR_GATES, WAITS_FOR_GANG, WAITS_FOR_VOLUME, NO_NODE, NO_ROOM, NO_POWER,
    SPENT, NOT_ACCEPTED,
)  # fmt: skip
# By how the core's reason begins; all others are for want of room.
_BY_CONSTRAINT: Mapping[str, str] = {"traits": NO_NODE, "budget": NO_POWER, "spending": SPENT}
# Kubernetes takes 32,768; nobody reads more than this in a terminal.
_MESSAGE_MOST = 1024


def placement_condition(unit: Unit, member: Member, *, is_whole: bool, why: str = "") -> PlacementCondition | None:
    """What is to stand in a pod's status now; None where that is about to change.

    `is_whole` says that all of its unit are there, `why` that no node is eligible, in words.
    """
    pod = member.sight.pod
    if not member.is_waiting:
        is_placed = member.sight.plan is not None and member.sight.pinned and not member.is_over
        return _condition(PLACED, f"planned on node {member.sight.pinned}") if is_placed else None
    if member.sight.refused:
        # Only annotations have a domain in their name.
        is_annotation = "/" in member.sight.refused.partition(":")[0]
        return _condition(INVALID_ANNOTATION if is_annotation else INVALID_POD, member.sight.refused)
    if member.denied:
        return _condition(PIN_DENIED, member.denied)
    if gates := others_gates(member):
        return _condition(WAITS_FOR_GATES, f"waits for the gates of others: {', '.join(gates)}")
    if not is_whole and len(pod.gates) > 0:
        return _condition(WAITS_FOR_GANG, f"{len(unit.present)} of {unit.size} members of its gang are here")
    if unit.stand is Stand.REFUSED:
        return _condition(NOT_ACCEPTED, unit.why)
    if unit.stand is Stand.WAITING:
        if why:
            return _condition(WAITS_FOR_VOLUME if why.startswith("persistentvolume") else NO_NODE, why)
        return _condition(_BY_CONSTRAINT.get(unit.why.partition(":")[0], NO_ROOM), unit.why)
    return None


def left_condition(member: Member, why: str) -> PlacementCondition:
    """Of a pod whose gate was removed without a place."""
    if member.sight.refused:
        found = placement_condition(Unit(""), member, is_whole=True)
        if found is not None:
            return found
    return _condition(LEFT, f"left to kube-scheduler: {why}")


def is_due(member: Member, wanted: PlacementCondition, at_s: float) -> bool:
    """Whether a condition is to be written for a pod."""
    is_recent = member.reported is not None and at_s - member.reported_s < REWORDED_S
    known = member.reported if is_recent else member.sight.pod.placement
    if known is None or (known.is_true, known.reason) != (wanted.is_true, wanted.reason):
        return True
    return known.message != wanted.message and not is_recent


def _condition(reason: str, message: str) -> PlacementCondition:
    return PlacementCondition(reason == PLACED, reason, message[:_MESSAGE_MOST])
