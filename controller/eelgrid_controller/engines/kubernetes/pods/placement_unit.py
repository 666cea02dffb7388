"""Placement units: the pod groups that the gate places, their members and replica numbers, and their transitions.

A unit is a single pod, a gang or the pods of a service. Waiting members become replicas in the order of their names; a
member whose plan names a replica keeps it, also after a restart. The place of a member that ended goes to the next that
comes. Members that were bound before the core knew of the unit count as external usage.

A transition (the core's answer, pinning, a failed write, recreation, the placement condition) returns the instruction
and records on the unit or member that it was given, so that it is not repeated. The condition is written when its
status or reason changes; a new message alone only from time to time.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

from eelgrid_controller.engines.kubernetes.model.inference_service import SERVICE_UNIT_PREFIX, InferenceService
from eelgrid_controller.engines.kubernetes.model.objects import PlacementCondition, Pod
from eelgrid_controller.engines.kubernetes.model.pod_group import (
    GroupMember,
    PodGroup,
    find_target_node,
    is_pod_over,
    workload_id,
)
from eelgrid_controller.engines.kubernetes.model.well_known import RESOURCE_GPU
from eelgrid_controller.engines.kubernetes.pods.eligibility import EligibleNodes
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    BindPod,
    CancelUnit,
    GateInstruction,
    GatePodView,
    RecordEvent,
    RecreatePod,
    RemoveGate,
    ReplicaPlace,
    UngatePod,
    UnitCancelled,
    UnitDeferred,
    UnitPlaced,
    UnitPreempted,
    UnitRefused,
    WriteFailure,
)
from eelgrid_controller.engines.kubernetes.pods.inflight import UnboundPodWatchdog
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import PodPlan, format_plan, parse_move_note
from eelgrid_protos.messages import ResourceRequest, WorkloadSpec


class PlacementPhase(Enum):
    """State of a unit's workload in the core."""

    UNKNOWN = auto()  # the core holds nothing of it
    ASKED = auto()
    WAITING = auto()
    PLACED = auto()
    LEAVING = auto()  # the core was asked to let it go
    REFUSED = auto()


@dataclass(slots=True)
class UnitMember(GroupMember):
    """A pod that the gate places, and what was last done about it."""

    sight: GatePodView
    is_patching: bool = False
    patched_version: str = ""  # the version that a patch was made against
    spec: WorkloadSpec | None = None  # what its people want, as last read
    size: int = 1  # of its unit, as last read
    is_recalled: bool = False  # it was asked for again
    sent: ReplicaPlace | None = None  # where a pin was sent to that may arrive yet
    agreed: tuple[int, ...] | None = None  # the devices that its plan and the core last had in common
    is_noting: bool = False  # its annotations are being written
    denied: str = ""  # why the API server will never take the patch
    has_trait: bool = True  # nodes are told the trait of its demands
    told: str = ""
    reported: PlacementCondition | None = None  # the last that was asked to be written
    reported_s: float = 0.0
    # As GroupMember says them of the pod; each is asked for dozens of times for each look at a unit.
    is_over: bool = field(init=False)
    is_waiting: bool = field(init=False)
    target_node: str = field(init=False)

    def __post_init__(self) -> None:
        """Derive what depends on the pod alone."""
        self._derive()

    def _derive(self) -> None:
        pod = self.sight.pod
        self.is_over = is_pod_over(pod)
        self.is_waiting = pod.awaits_placement and not self.is_over
        self.target_node = find_target_node(pod, self.sight.pinned)

    def update_view(self, sight: GatePodView) -> None:
        """The pod as it is now; what its people want is not read of every sight."""
        if sight.pod.resource_version != self.sight.pod.resource_version:
            # Whatever was sent against the version before has arrived, or never will.
            self.sent, self.is_noting = None, False
        self.sight = sight
        self._derive()
        if sight.spec is not None:
            self.spec, self.size = sight.spec, sight.size

    @property
    def pod(self) -> Pod:
        """The pod as the gate saw it last."""
        return self.sight.pod

    @property
    def min_members(self) -> int:
        """The size of its gang as its annotations or owners say."""
        return self.sight.size

    @property
    def pinned(self) -> str:
        """The one node that its affinity allows; empty for any."""
        return self.sight.pinned

    def devices_of(self, place: ReplicaPlace) -> tuple[int, ...]:
        """Of a place's devices those that the pod itself asks for: a gang is planned as if all asked for the most."""
        return place.devices[: self.sight.pod.requested.count(RESOURCE_GPU)]

    @property
    def has_succeeded(self) -> bool:
        """Whether it ran, and ended well."""
        return self.sight.pod.phase == "Succeeded"

    def fits_into(self, spec: WorkloadSpec | None) -> bool:
        """Whether it requests at most what a replica of this spec does."""
        if spec is None or self.sight.spec is None:
            return True
        own, other = self.sight.spec.request, spec.request
        return (
            own.cpu_milli <= other.cpu_milli
            and own.memory_bytes <= other.memory_bytes
            and own.gpu_count <= other.gpu_count
            and own.gpu_milli <= other.gpu_milli
        )


@dataclass(slots=True)
class ServiceUnitState:
    """What is known of the pods of a service beside what is known of any unit."""

    service: InferenceService | None = None
    spec: WorkloadSpec | None = None  # as the core has it, of one replica
    vacant: dict[int, float] = field(default_factory=dict)  # places without a pod, since when
    let_go: dict[str, float | None] = field(default_factory=dict)  # pods whose place was taken from them, since when
    moved: set[str] = field(default_factory=set)  # of these, pods whose place is on another node now
    extra: int = 0  # places for pods that come beside others while the target is rolled over
    is_asked: bool = False  # a command is under way
    is_growing: bool = False
    is_restless: bool = False  # time alone may change what is to be done
    again_s: float = 0.0

    def on_placed(self, before: int, now: int, spec: WorkloadSpec | None) -> None:
        """The core has so many places instead of so many before."""
        wanted = None if self.service is None else self.service.wanted
        beyond = 0 if wanted is None else max(0, now - wanted)
        if self.is_growing:
            self.extra = beyond
        elif self.is_asked:
            self.extra = min(self.extra, beyond)
        elif now != before:
            # Somebody said how many there are to be, and meant all of them.
            self.extra = 0
        self.is_asked = self.is_growing = False
        if spec is not None:
            self.spec = replace(spec, replicas=1)

    def permanent_places(self, places: int) -> int:
        """The places that are not for the time of a rollover alone."""
        wanted = None if self.service is None else self.service.wanted
        return places if wanted is None else places - min(self.extra, max(0, places - wanted))


@dataclass(slots=True)
class PlacementUnit(PodGroup[UnitMember]):
    """A group that the gate asks the core to place, and where it stands with the core."""

    attempt: int = 1
    stand: PlacementPhase = PlacementPhase.UNKNOWN
    slots: dict[int, str] = field(default_factory=dict)  # replica -> uid; a uid may be of one that went
    places: Mapping[int, ReplicaPlace] = field(default_factory=dict)
    moving: dict[int, str] = field(default_factory=dict)  # replica -> uid of the pod that stands elsewhere still
    is_stale: bool = False  # a place of it is no good: all of them are let go
    is_preempted: bool = False  # its pods make room: its places wait for the last of them to go
    retry_s: float = 0.0
    refusals: int = 0
    collisions: int = 0  # in a row: places that were given up since others' plans name them
    no_node: str = ""  # why no node will do, where the core asks back
    why: str = ""  # what the core said last: why it waits, or was refused
    blocked_s: float | None = None  # since when a plan that is about to change stands in its way
    elastic: ServiceUnitState | None = None

    def __post_init__(self) -> None:
        """The unit of a service is elastic from its beginning."""
        if self.name.startswith(SERVICE_UNIT_PREFIX):
            self.elastic = ServiceUnitState()

    @property
    def workload_id(self) -> str:
        """What the core knows it by."""
        return workload_id(self.name, self.attempt)

    @property
    def lacks_traits(self) -> bool:
        """Whether the core said that no node is right for it, room apart."""
        return self.why.startswith("traits:")

    @property
    def waiting_members(self) -> list[UnitMember]:
        """Members behind our gate, by name."""
        found = [member for member in self.members.values() if member.is_waiting]
        return sorted(found, key=lambda member: (_natural(member.sight.key.name), member.uid))

    def assign_replicas(self) -> list[UnitMember]:
        """Those that wait become the replicas that the core is asked for."""
        waiting = self.waiting_members
        self.slots = {replica: member.uid for replica, member in enumerate(waiting)}
        self.stand = PlacementPhase.ASKED
        return waiting

    def replica_of(self, uid: str) -> int | None:
        """Which replica a pod is."""
        return next((replica for replica, found in self.slots.items() if found == uid), None)

    def place_of(self, member: UnitMember) -> ReplicaPlace | None:
        """Where a member is to be; None where it has no place."""
        replica = self.replica_of(member.uid) if self.stand is PlacementPhase.PLACED else None
        return None if replica is None else self.places.get(replica)

    def held_place(self, member: UnitMember) -> ReplicaPlace | None:
        """The place at which the core counts a member where it is, or where it was sent; None where it does not."""
        place = self.place_of(member)
        target = member.target_node or (member.sent.node_name if member.sent is not None else "")
        return place if place is not None and place.node_name == target else None

    def holds_member(self, member: UnitMember) -> bool:
        """Whether the core counts a member where it is."""
        return self.held_place(member) is not None

    def set_places(self, places: Mapping[int, ReplicaPlace], spec: WorkloadSpec | None, *, moves: bool) -> None:
        """The core has these places; where pods are `moves`d, those for which it has another now are."""
        before = len(self.places) if self.stand is PlacementPhase.PLACED else 0
        if moves and self.elastic is None:
            self._shift(places)
        self.stand, self.places, self.refusals = PlacementPhase.PLACED, dict(places), 0
        if self.elastic is not None:
            self.elastic.on_placed(before, len(places), spec)
        self.settle_places()

    def _shift(self, places: Mapping[int, ReplicaPlace]) -> None:
        """The core's places are others now: which pods stand where their replicas were before, and are to be moved."""
        for member in self.members.values():
            before = self.place_of(member)
            replica = self.replica_of(member.uid)
            if before is not None and replica is not None and before.node_name == member.target_node:
                if replica in places and places[replica].node_name != member.target_node:
                    del self.slots[replica]
                    self.moving[replica] = member.uid
            elif (
                note := parse_move_note(member.sight.pod.annotations)
            ) is not None and note.workload == self.workload_id:
                place = places.get(note.replica)
                if place is not None and place.node_name == note.to != member.target_node and not member.is_over:
                    self.moving[note.replica] = member.uid

    def agrees_with(self, answer: "CoreAnswer") -> bool:
        """Whether an answer changes nothing: what a command has done is told by its commit, too."""
        return (
            isinstance(answer, UnitPlaced)
            and self.elastic is None
            and self.stand is PlacementPhase.PLACED
            and (self.is_preempted, self.places) == (answer.is_preempted, answer.places)
        )

    def cancel_move(self, uid: str) -> None:
        """A pod is not being moved any more, or none of it where no uid is given."""
        self.moving = {replica: found for replica, found in self.moving.items() if uid and found != uid}

    def release_command(self) -> None:
        """No command about it is under way any more."""
        if self.elastic is not None:
            self.elastic.is_asked = self.elastic.is_growing = False

    def reject_place(self, member: UnitMember, why: str) -> None:
        """The place of a member is no good: all let theirs go, where all stand or fall together."""
        if self.elastic is None:
            self.is_stale = self.stand is PlacementPhase.PLACED
            return
        replica = self.replica_of(member.uid)
        member.denied = why
        if replica is not None:
            del self.slots[replica]
            self.elastic.vacant[replica] = -math.inf

    def settle_places(self) -> None:
        """Give replicas to those whose plan names them, then places that came free to those that wait."""
        if self.is_preempted:
            return
        if self.elastic is not None:
            self._forget_places(self.elastic)
        for member in self.members.values():
            plan = member.sight.plan
            if plan is not None and plan.workload == self.workload_id and not member.is_waiting and not member.is_over:
                self._adopt_member(member, plan.replica)
        if self.elastic is not None:
            self._settle_by_node(self.elastic)
        free = self._stay([replica for replica in sorted(self.places) if not self._is_held(replica)])
        without = [member for member in self.waiting_members if self.replica_of(member.uid) is None]
        if self.elastic is not None:
            without = [member for member in without if member.fits_into(self.elastic.spec)]
        for replica, member in zip(free, without, strict=False):
            self.slots[replica] = member.uid
            if self.elastic is not None:
                self.elastic.let_go.pop(member.uid, None)

    def _forget_places(self, elastic: ServiceUnitState) -> None:
        """Places that are no more, or are elsewhere than their pods by now."""
        elastic.let_go = {uid: since_s for uid, since_s in elastic.let_go.items() if uid in self.members}
        elastic.moved &= elastic.let_go.keys()
        for replica, uid in list(self.slots.items()):
            member, place = self.members.get(uid), self.places.get(replica)
            is_there = member is not None and not member.is_over
            if not is_there or member is None:
                del self.slots[replica]
            elif place is None or (member.target_node and member.target_node != place.node_name):
                del self.slots[replica]
                elastic.let_go[uid] = None
                if place is not None:
                    elastic.moved.add(uid)

    def _settle_by_node(self, elastic: ServiceUnitState) -> None:
        """Pods of a service are alike: any that stands where a place is, has it."""
        held, free = set(self.slots.values()), dict[str, list[int]]()
        for replica in sorted(self.places.keys() - self.slots.keys()):
            free.setdefault(self.places[replica].node_name, []).append(replica)
        for member in self.members.values() if free else ():
            fits = free.get(member.target_node, [])
            if not fits or member.is_over or member.uid in held or member.uid in elastic.let_go:
                continue
            if not member.fits_into(elastic.spec):
                continue
            plan = member.sight.plan
            devices = () if plan is None else plan.devices
            chosen = min(fits, key=lambda one: (self.places[one].devices != devices, one))
            fits.remove(chosen)
            self.slots[chosen] = member.uid

    def _adopt_member(self, member: UnitMember, replica: int) -> None:
        place = self.places.get(replica)
        # Another leader's core may have used the same name for other replicas: who has a place here keeps it.
        if place is not None and place.node_name == member.target_node and not self._is_held(replica):
            before = self.replica_of(member.uid)
            if before is not None:
                del self.slots[before]
            self.slots[replica] = member.uid

    def _stay(self, free: list[int]) -> list[int]:
        """Who stands where a place is that nobody has, has it, whatever its plan calls it; the places that are left.

        Only where there is a place for each member and none waits for one: otherwise some were never asked for.
        """
        alive = self.active_members
        if len(alive) != len(self.places) or any(member.is_waiting for member in alive):
            return free
        held = set(self.slots.values())
        standing = {member.uid: member.target_node for member in alive if member.uid not in held}
        left: list[int] = []
        for replica in free:
            node = self.places[replica].node_name
            found = next((uid for uid, target in standing.items() if target == node), None)
            if found is None:
                left.append(replica)
            else:
                self.slots[replica] = found
                del standing[found]
        return left

    def _is_held(self, replica: int) -> bool:
        member = self.members.get(self.slots.get(replica, ""))
        return member is not None and not member.is_over


def _natural(name: str) -> tuple[str, int]:
    """Names that end in a number, by the number."""
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or -1) if len(name) - len(head) < 20 else -1


_TRAITS_MOST = 16


def merge_member_specs(specs: Sequence[WorkloadSpec], traits: Iterable[str]) -> WorkloadSpec:
    """The first's, with a replica for each; members that ask for different amounts each get the most of any."""
    most = specs[0].request
    for spec in specs[1:]:
        most = _most(most, spec.request)
    return replace(
        specs[0], request=most, replicas=len(specs), required_traits=tuple(sorted(set(traits))[:_TRAITS_MOST])
    )


def _most(one: ResourceRequest, other: ResourceRequest) -> ResourceRequest:
    if one == other:
        return one
    return replace(
        one if one.gpu_count else other,
        cpu_milli=max(one.cpu_milli, other.cpu_milli),
        memory_bytes=max(one.memory_bytes, other.memory_bytes),
        gpu_count=max(one.gpu_count, other.gpu_count),
        gpu_milli=max(one.gpu_milli, other.gpu_milli),
    )


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
    binds: bool = False  # pods that name our scheduler are bound by us
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


CoreAnswer = UnitPlaced | UnitDeferred | UnitCancelled | UnitPreempted | UnitRefused


class AnswerNotice(NamedTuple):
    """What an Event says to the pods that wait for the unit."""

    text: str
    is_warning: bool = False


def apply_answer(unit: PlacementUnit, answer: CoreAnswer, at_s: float, settings: GateSettings) -> AnswerNotice | None:
    """Update a unit by the core's answer; a refused unit is submitted again later."""
    match answer:
        case UnitPlaced(_, places, spec, is_preempted):
            unit.no_node, unit.is_preempted = "", is_preempted
            if unit.stand is not PlacementPhase.LEAVING:
                unit.set_places(places, spec, moves=settings.moves)
        case UnitDeferred(reason=reason):
            if unit.stand not in (PlacementPhase.LEAVING, PlacementPhase.PLACED):
                unit.stand, unit.places, unit.why = PlacementPhase.WAITING, {}, reason
                return AnswerNotice(f"waits: {reason}")
        case UnitPreempted():
            unit.is_preempted = unit.stand is PlacementPhase.PLACED
        case UnitCancelled():
            unit.stand, unit.places, unit.slots = PlacementPhase.UNKNOWN, {}, {}
            unit.is_preempted = False
            unit.attempt += 1
            unit.release_command()
        case UnitRefused(why=why, is_taken=is_taken):
            if unit.stand is PlacementPhase.ASKED:
                return _refused(unit, why, at_s, settings.retry_s, is_taken=is_taken)
            unit.release_command()
    return None


def _refused(unit: PlacementUnit, why: str, at_s: float, retry_s: float, *, is_taken: bool) -> AnswerNotice | None:
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
    return [CancelUnit(unit.workload_id, _describe_end(unit))]


def _describe_end(unit: PlacementUnit) -> str:
    """How the pods of a unit have ended; empty where some have not."""
    members = unit.members.values()
    if not members or not all(member.is_over for member in members):
        return ""
    failed = sum(not member.has_succeeded for member in members)
    return f"{failed} of {len(members)} pods did not succeed" if failed else "all pods succeeded"


def pin_member(unit: PlacementUnit, replica: int, member: UnitMember, epoch: int) -> UngatePod | BindPod:
    """A member goes to its place."""
    place = member.sent = unit.places[replica]
    # What differs from this later was changed by the core, not by another leader.
    devices = member.devices_of(place)
    member.agreed = tuple(sorted(devices))
    _patching(member)
    plan = PodPlan(epoch, unit.workload_id, replica, place.node_name, devices, place.profile, member.uid)
    kind = BindPod if member.sight.pod.is_bound_by_us else UngatePod
    return kind(member.uid, member.sight.key, member.patched_version, place.node_name, format_plan(plan), epoch)


def ungate_member(member: UnitMember, epoch: int) -> RemoveGate:
    """A member goes where it can."""
    _patching(member)
    return RemoveGate(member.uid, member.sight.key, member.patched_version, epoch, member.sight.refused)


def leave_to_scheduler(
    unit: PlacementUnit, members: Sequence[UnitMember], why: str, epoch: int, at_s: float
) -> list[GateInstruction]:
    """Members that only kube-scheduler can judge go where it puts them; those that name our scheduler wait."""
    if own := [member for member in members if member.sight.pod.is_bound_by_us]:
        unit.stand, unit.why, unit.retry_s = PlacementPhase.REFUSED, why, at_s + JUDGED_AGAIN_S
        return [record_event(own[0], f"cannot be bound: {why}", is_warning=True)]
    told: list[GateInstruction] = []
    for member in members:
        if not member.is_patching:
            _patching(member)
            told.append(record_event(member, f"left to kube-scheduler: {why}"))
            told.append(RemoveGate(member.uid, member.sight.key, member.patched_version, epoch, why))
    return told


# Until a pod that names our scheduler, and that it could not judge, is judged again.
JUDGED_AGAIN_S = 15.0


def register_members(unit: PlacementUnit, members: Sequence[UnitMember], rules: EligibleNodes) -> None:
    """The core is about to be asked for these, by replica; where traits do not say enough, it asks back."""
    pods = [member.sight.pod for member in members]
    is_judged = any(not member.has_trait for member in members) or any(map(rules.needs_evaluation, pods))
    rules.register_workload(unit.workload_id, pods, is_judged=is_judged)


def _patching(member: UnitMember) -> None:
    member.is_patching, member.patched_version = True, member.sight.pod.resource_version


def foreign_gates(member: UnitMember) -> list[str]:
    """Scheduling gates of others, which have to be removed first."""
    return [gate for gate in member.sight.pod.gates if gate in member.sight.waits_for]


def report_foreign_gates(member: UnitMember) -> RecordEvent:
    """An Event that names the scheduling gates of others."""
    return record_event(member, f"waits for other scheduling gates: {', '.join(foreign_gates(member))}")


def record_event(member: UnitMember, text: str, *, is_warning: bool = False) -> RecordEvent:
    """The instruction to record an Event about a member."""
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
NO_QUOTA = "NoQuota"
NOT_ACCEPTED = "NotAccepted"
# By how the core's reason begins; all others are for want of room.
_BY_CONSTRAINT: Mapping[str, str] = {
    "traits": NO_NODE,
    "budget": NO_POWER,
    "spending": SPENDING_LIMIT,
    "queue": NO_QUOTA,
    "quota": NO_QUOTA,
    "max_quota": NO_QUOTA,
}
# Kubernetes takes 32,768; nobody reads more than this in a terminal.
_MESSAGE_MOST = 1024


def placement_condition(
    unit: PlacementUnit, member: UnitMember, *, is_whole: bool, why: str = ""
) -> PlacementCondition | None:
    """The condition for a pod's status now; None where it is about to change.

    `is_whole` says that all of its unit are there, `why` that no node is eligible, in words.
    """
    pod = member.sight.pod
    if not member.is_waiting:
        # Of a pod that we bound PodScheduled says it, unless ours has said something else.
        is_told = bool(member.sight.pinned) or (pod.is_bound_by_us and pod.placement is not None)
        is_placed = member.sight.plan is not None and is_told and not member.is_over
        return _condition(PLACED, f"planned on node {member.target_node}") if is_placed else None
    if member.sight.refused:
        # Only annotations have a domain in their name.
        is_annotation = "/" in member.sight.refused.partition(":")[0]
        return _condition(INVALID_ANNOTATION if is_annotation else INVALID_POD, member.sight.refused)
    if member.denied:
        return _condition(PIN_DENIED, member.denied)
    if gates := foreign_gates(member):
        return _condition(WAITS_FOR_GATES, f"waits for other scheduling gates: {', '.join(gates)}")
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
    """The condition of a pod whose gate was removed without a place."""
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
            yield RecordEvent(one.uid, one.sight.key, f"recreated: {why}", is_warning=True)
            # Of this version alone: one that has been bound meanwhile runs.
            yield RecreatePod(one.uid, one.sight.key, epoch, why, one.sight.pod.resource_version)
