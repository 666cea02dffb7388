"""Transitions of a unit: the core's answers, pinning, failed writes, recreation, and the placement condition.

Each step returns the instruction and records on the unit or member that it was given, so that it is not repeated.
The condition is written when its status or reason changes; a new message alone only from time to time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.engines.kubernetes.model.objects import PlacementCondition
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    CancelUnit,
    GateInstruction,
    RecordEvent,
    RecreatePod,
    RemoveGate,
    UngatePod,
    UnitCancelled,
    UnitDeferred,
    UnitPlaced,
    UnitRefused,
    WriteFailure,
)
from eelgrid_controller.engines.kubernetes.pods.inflight import UnboundPodWatchdog
from eelgrid_controller.engines.kubernetes.pods.placement_unit import PlacementPhase, PlacementUnit, UnitMember
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import PodPlan, format_plan
from eelgrid_controller.engines.kubernetes.scheduling.eligibility import EligibleNodes


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """How long things may take, and what may be done."""

    unbound_s: float = 30.0  # that kube-scheduler may call a pinned pod unschedulable
    retry_s: float = 15.0  # after which what the core refused is asked again
    conflict_s: float = 2.0  # for the newer object to come by itself
    busy_s: float = 5.0
    forbidden_s: float = 60.0
    flight_s: float = 15.0  # for a node to say which devices a pod got, before the next goes there
    open_s: float | None = None  # without any leader, after which gates are removed without a plan
    moves: bool = False  # somebody moves pods: a place that the core moved is kept for the pod to come


class FailureResponse(NamedTuple):
    """For how long the write is left alone, None where the pod is to be looked at now; and what is told."""

    wait_s: float | None
    text: str = ""


def on_patch_failure(member: UnitMember, failure: WriteFailure, why: str, settings: GateSettings) -> FailureResponse:
    """A gate was not removed: what becomes of the pod."""
    if failure is WriteFailure.INVALID:
        member.denied = why or "the API server refuses the pin"
        member.is_patching = False
        return FailureResponse(None, f"cannot be pinned: {member.denied}")
    is_newer = member.sight.pod.resource_version != member.patched_version
    if failure in (WriteFailure.CONFLICT, WriteFailure.STALE) and is_newer:
        member.is_patching = False
        return FailureResponse(None)
    if failure is WriteFailure.FORBIDDEN:
        return FailureResponse(settings.forbidden_s, f"cannot be pinned: {why}")
    return FailureResponse(settings.busy_s if failure is WriteFailure.BUSY else settings.conflict_s)


CoreAnswer = UnitPlaced | UnitDeferred | UnitCancelled | UnitRefused


class AnswerNotice(NamedTuple):
    """What is told to who waits for the unit."""

    text: str
    is_warning: bool = False


def apply_answer(unit: PlacementUnit, answer: CoreAnswer, at_s: float, settings: GateSettings) -> AnswerNotice | None:
    """The unit as it stands now; what was refused is asked again later."""
    match answer:
        case UnitPlaced(_, places, spec):
            unit.no_node = ""
            if unit.stand is not PlacementPhase.LEAVING:
                unit.set_places(places, spec, moves=settings.moves)
        case UnitDeferred(reason=reason):
            if unit.stand not in (PlacementPhase.LEAVING, PlacementPhase.PLACED):
                unit.stand, unit.places, unit.why = PlacementPhase.WAITING, {}, reason
                return AnswerNotice(f"waits: {reason}")
        case UnitCancelled():
            unit.stand, unit.places, unit.slots = PlacementPhase.UNKNOWN, {}, {}
            unit.attempt += 1
            unit.release_command()
        case UnitRefused(why=why, is_taken=is_taken):
            if unit.stand is PlacementPhase.ASKED:
                return _on_refused(unit, why, at_s, settings.retry_s, is_taken=is_taken)
            unit.release_command()
    return None


def _on_refused(unit: PlacementUnit, why: str, at_s: float, retry_s: float, *, is_taken: bool) -> AnswerNotice | None:
    if is_taken:
        unit.attempt += 1
    unit.stand, unit.slots, unit.why = PlacementPhase.REFUSED, {}, why
    unit.release_command()
    unit.refusals += 1
    unit.retry_s = at_s + (0.0 if is_taken else retry_s * min(unit.refusals, 20))
    return None if is_taken else AnswerNotice(f"not accepted: {why}", is_warning=True)


def release_unit(unit: PlacementUnit) -> list[GateInstruction]:
    """The core is to let the unit go, whole."""
    unit.stand, unit.is_stale = PlacementPhase.LEAVING, False
    unit.moving.clear()
    return [CancelUnit(unit.workload_id)]


def pin_member(unit: PlacementUnit, replica: int, member: UnitMember, epoch: int) -> UngatePod:
    """A member goes to its place."""
    place = member.sent = unit.places[replica]
    # What differs from this later was changed by the core, not by another leader.
    devices = member.devices_of(place)
    member.agreed = tuple(sorted(devices))
    _patching(member)
    plan = PodPlan(epoch, unit.workload_id, replica, place.node_name, devices, place.profile, member.uid)
    return UngatePod(member.uid, member.sight.key, member.patched_version, place.node_name, format_plan(plan), epoch)


def ungate_member(member: UnitMember, epoch: int) -> RemoveGate:
    """A member goes where it can."""
    _patching(member)
    return RemoveGate(member.uid, member.sight.key, member.patched_version, epoch, member.sight.refused)


def leave_to_scheduler(members: Iterable[UnitMember], why: str, epoch: int) -> list[GateInstruction]:
    """Members that only kube-scheduler can judge go where it puts them."""
    told: list[GateInstruction] = []
    for member in members:
        if not member.is_patching:
            _patching(member)
            told.append(record_event(member, f"left to kube-scheduler: {why}"))
            told.append(RemoveGate(member.uid, member.sight.key, member.patched_version, epoch, why))
    return told


def register_members(unit: PlacementUnit, members: Sequence[UnitMember], rules: EligibleNodes) -> None:
    """The core is about to be asked for these, by replica; where traits do not say enough, it asks back."""
    pods = [member.sight.pod for member in members]
    is_judged = any(not member.has_trait for member in members) or any(map(rules.needs_evaluation, pods))
    rules.register_workload(unit.workload_id, pods, is_judged=is_judged)


def _patching(member: UnitMember) -> None:
    member.is_patching, member.patched_version = True, member.sight.pod.resource_version


def foreign_gates(member: UnitMember) -> list[str]:
    """Gates beside ours that have to go first."""
    return [gate for gate in member.sight.pod.gates if gate in member.sight.waits_for]


def report_foreign_gates(member: UnitMember) -> RecordEvent:
    """Which those are, for people."""
    return record_event(member, f"waits for the gates of others: {', '.join(foreign_gates(member))}")


def record_event(member: UnitMember, text: str, *, is_warning: bool = False) -> RecordEvent:
    """A word about a member, for people."""
    return RecordEvent(member.uid, member.sight.key, text, is_warning)


# Seconds between two writes for one pod that change the words alone, and until a write that is not seen is repeated.
MESSAGE_UPDATE_S = 30.0
PLACED = "Placed"
LEFT_TO_SCHEDULER = "LeftToKubeScheduler"
INVALID_ANNOTATION = "InvalidAnnotation"
INVALID_POD = "InvalidPod"
PIN_DENIED = "PinDenied"
WAITS_FOR_GATES = "WaitsForOtherGates"
WAITS_FOR_GANG = "WaitsForGang"
WAITS_FOR_VOLUME = "WaitsForVolume"
NO_NODE = "NoEligibleNode"
NO_ROOM = "NoRoom"
NO_POWER = "NoPowerBudget"
SPENDING_LIMIT = "SpendingLimitReached"
NOT_ACCEPTED = "NotAccepted"
PLACEMENT_REASONS = (
    PLACED,
    LEFT_TO_SCHEDULER,
    INVALID_ANNOTATION,
    INVALID_POD,
    PIN_DENIED,
    WAITS_FOR_GATES,
    WAITS_FOR_GANG,
    WAITS_FOR_VOLUME,
    NO_NODE,
    NO_ROOM,
    NO_POWER,
    SPENDING_LIMIT,
    NOT_ACCEPTED,
)
# By how the core's reason begins; all others are for want of room.
_BY_CONSTRAINT: Mapping[str, str] = {"traits": NO_NODE, "budget": NO_POWER, "spending": SPENDING_LIMIT}
# Kubernetes takes 32,768; nobody reads more than this in a terminal.
_MESSAGE_MOST = 1024


def placement_condition(
    unit: PlacementUnit, member: UnitMember, *, is_whole: bool, why: str = ""
) -> PlacementCondition | None:
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
    if gates := foreign_gates(member):
        return _condition(WAITS_FOR_GATES, f"waits for the gates of others: {', '.join(gates)}")
    if not is_whole and len(pod.gates) > 0:
        return _condition(WAITS_FOR_GANG, f"{len(unit.present_members)} of {unit.size} members of its gang are here")
    if unit.stand is PlacementPhase.REFUSED:
        return _condition(NOT_ACCEPTED, unit.why)
    if unit.stand is PlacementPhase.WAITING:
        if why:
            return _condition(WAITS_FOR_VOLUME if why.startswith("persistentvolume") else NO_NODE, why)
        return _condition(_BY_CONSTRAINT.get(unit.why.partition(":")[0], NO_ROOM), unit.why)
    return None


def left_condition(member: UnitMember, why: str) -> PlacementCondition:
    """Of a pod whose gate was removed without a place."""
    if member.sight.refused:
        found = placement_condition(PlacementUnit(""), member, is_whole=True)
        if found is not None:
            return found
    return _condition(LEFT_TO_SCHEDULER, f"left to kube-scheduler: {why}")


def is_condition_due(member: UnitMember, wanted: PlacementCondition, at_s: float) -> bool:
    """Whether a condition is to be written for a pod."""
    is_recent = member.reported is not None and at_s - member.reported_s < MESSAGE_UPDATE_S
    known = member.reported if is_recent else member.sight.pod.placement
    if known is None or (known.is_true, known.reason) != (wanted.is_true, wanted.reason):
        return True
    return known.message != wanted.message and not is_recent


def _condition(reason: str, message: str) -> PlacementCondition:
    return PlacementCondition(reason == PLACED, reason, message[:_MESSAGE_MOST])


def recreate_unit(
    unit: PlacementUnit, member: UnitMember, watchdog: UnboundPodWatchdog, epoch: int, *, waited_s: float, at_s: float
) -> Iterator[RecreatePod | RecordEvent]:
    """A pinned pod cannot be scheduled: it and its gang are made anew, or people hear of it."""
    gang = unit.active_members if unit.size > 1 else [member]
    pod = member.sight.pod
    why = f"pinned to {member.sight.pinned}, where kube-scheduler cannot put it: {pod.unscheduled_message}"
    if any(one.sight.pod.owner is None for one in gang):
        watchdog.restart_wait(member.uid, at_s)
        yield RecordEvent(member.uid, member.sight.key, f"{why}; delete it and create it again", is_warning=True)
        return
    owner = unit.name if unit.size > 1 else pod.owner.uid if pod.owner is not None else ""
    if not watchdog.may_recreate(owner, waited_s, at_s):
        return
    watchdog.record_recreation(owner, waited_s, at_s)
    unit.reject_place(member, why)
    for one in gang:
        watchdog.restart_wait(one.uid, at_s)
        if not one.sight.pod.is_deleting and not one.is_waiting:
            yield RecordEvent(one.uid, one.sight.key, f"made anew: {why}", is_warning=True)
            # Of this version alone: one that has been bound meanwhile runs.
            yield RecreatePod(one.uid, one.sight.key, epoch, why, one.sight.pod.resource_version)
