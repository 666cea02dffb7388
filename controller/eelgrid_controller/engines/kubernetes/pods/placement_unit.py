"""Placement units: a single pod, a gang or the pods of a service, their members and replica numbers.

Waiting members become replicas in the order of their names; a member whose plan names a replica keeps it, also after
a restart. The place of a member that ended goes to the next that comes. Members that were bound before the core knew
of the unit count as external usage.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from eelgrid_controller.engines.kubernetes.model.inference_service import SERVICE_UNIT_PREFIX, InferenceService
from eelgrid_controller.engines.kubernetes.model.objects import PlacementCondition
from eelgrid_controller.engines.kubernetes.model.well_known import GATE, RESOURCE_GPU
from eelgrid_controller.engines.kubernetes.pods.gate_events import GatePodView, ReplicaPlace
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import parse_move_note, workload_id
from eelgrid_protos.messages import ResourceRequest, WorkloadSpec


class PlacementPhase(Enum):
    """Where a unit stands with the core."""

    UNKNOWN = auto()  # the core holds nothing of it
    ASKED = auto()
    WAITING = auto()
    PLACED = auto()
    LEAVING = auto()  # the core was asked to let it go
    REFUSED = auto()


@dataclass(slots=True)
class UnitMember:
    """One pod and what was last done about it."""

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

    def update_view(self, sight: GatePodView) -> None:
        """The pod as it is now; what its people want is not read of every sight."""
        if sight.pod.resource_version != self.sight.pod.resource_version:
            # Whatever was sent against the version before has arrived, or never will.
            self.sent, self.is_noting = None, False
        self.sight = sight
        if sight.spec is not None:
            self.spec, self.size = sight.spec, sight.size

    @property
    def uid(self) -> str:
        """Its uid."""
        return self.sight.pod.uid

    def devices_of(self, place: ReplicaPlace) -> tuple[int, ...]:
        """Of a place's devices those that the pod itself asks for: a gang is planned as if all asked for the most."""
        return place.devices[: self.sight.pod.requested.count(RESOURCE_GPU)]

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or is about to be gone without having been anywhere."""
        pod = self.sight.pod
        return pod.is_terminal or (pod.is_deleting and not pod.node_name)

    @property
    def has_succeeded(self) -> bool:
        """Whether it ran, and ended well."""
        return self.sight.pod.phase == "Succeeded"

    @property
    def is_waiting(self) -> bool:
        """Whether it waits behind our gate."""
        return not self.is_over and GATE in self.sight.pod.gates

    def fits_into(self, spec: WorkloadSpec | None) -> bool:
        """Whether it holds no more than a replica of this spec."""
        if spec is None or self.sight.spec is None:
            return True
        own, other = self.sight.spec.request, spec.request
        return (
            own.cpu_milli <= other.cpu_milli
            and own.memory_bytes <= other.memory_bytes
            and own.gpu_count <= other.gpu_count
            and own.gpu_milli <= other.gpu_milli
        )

    @property
    def target_node(self) -> str:
        """The node that it is on or can only go to; empty while it is gated, free or over."""
        pod = self.sight.pod
        if pod.is_terminal or self.is_waiting:
            return ""
        return pod.node_name or self.sight.pinned


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
class PlacementUnit:
    """What is placed as one."""

    name: str
    attempt: int = 1
    stand: PlacementPhase = PlacementPhase.UNKNOWN
    members: dict[str, UnitMember] = field(default_factory=dict)
    slots: dict[int, str] = field(default_factory=dict)  # replica -> uid; a uid may be of one that went
    places: Mapping[int, ReplicaPlace] = field(default_factory=dict)
    moving: dict[int, str] = field(default_factory=dict)  # replica -> uid of the pod that stands elsewhere still
    is_stale: bool = False  # a place of it is no good: all of them are let go
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
    def active_members(self) -> list[UnitMember]:
        """Members that have not ended."""
        return [member for member in self.members.values() if not member.is_over]

    @property
    def present_members(self) -> list[UnitMember]:
        """Members that have not ended and are not about to."""
        return [member for member in self.active_members if not member.sight.pod.is_deleting]

    @property
    def waiting_members(self) -> list[UnitMember]:
        """Members behind our gate, by name."""
        found = [member for member in self.members.values() if member.is_waiting]
        return sorted(found, key=lambda member: (_natural(member.sight.key.name), member.uid))

    @property
    def size(self) -> int:
        """How many members it is to have."""
        return max((member.sight.size for member in self.members.values()), default=1)

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
