"""Units: what is placed as one, a pod alone or a gang, and which member has which place.

Owns who is a member, which of them the core was asked for, and which replica each of these
is. Must not know the API, time, or when anything is asked for.

Theory. A workload of the core has numbered replicas, a gang has pods that come and go. Those
that wait when the core is asked become its replicas, in the order of their names. A pod
whose plan says which replica it is, keeps it: so it is after a restart. The place of a member
that went or ended is the next one's that comes. Members that are bound before the core knows
of the unit (another leader began it) are no replicas: they are what others hold, and only
the rest is asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from eelgrid_controller.kubernetes.gate_events import Place, Sight
from eelgrid_controller.kubernetes.names import GATE
from eelgrid_controller.kubernetes.plans import workload_id

__all__ = ["Member", "Stand", "Unit"]


class Stand(Enum):
    """Where a unit stands with the core."""

    UNKNOWN = auto()  # the core holds nothing of it
    ASKED = auto()
    WAITING = auto()
    PLACED = auto()
    LEAVING = auto()  # the core was asked to let it go
    REFUSED = auto()


@dataclass(slots=True)
class Member:
    """One pod and what was last done about it."""

    sight: Sight
    is_patching: bool = False
    patched_version: str = ""  # the version that a patch was made against
    denied: str = ""  # why the API server will never take the patch
    told: str = ""

    @property
    def uid(self) -> str:
        """Its uid."""
        return self.sight.pod.uid

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or is about to be gone without having been anywhere."""
        pod = self.sight.pod
        return pod.is_terminal or (pod.is_going and not pod.node_name)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits behind our gate."""
        return not self.is_over and GATE in self.sight.pod.gates

    @property
    def target(self) -> str:
        """The node that it is on or can only go to; empty while it is gated, free or over."""
        pod = self.sight.pod
        if pod.is_terminal or self.is_waiting:
            return ""
        return pod.node_name or self.sight.pinned


@dataclass(slots=True)
class Unit:
    """What is placed as one."""

    name: str
    attempt: int = 1
    stand: Stand = Stand.UNKNOWN
    members: dict[str, Member] = field(default_factory=dict)
    slots: dict[int, str] = field(default_factory=dict)  # replica -> uid; a uid may be of one that went
    places: Mapping[int, Place] = field(default_factory=dict)
    is_stale: bool = False  # a place of it is no good: all of them are let go
    retry_s: float = 0.0
    refusals: int = 0

    @property
    def workload_id(self) -> str:
        """What the core knows it by."""
        return workload_id(self.name, self.attempt)

    @property
    def alive(self) -> list[Member]:
        """Members that have not ended."""
        return [member for member in self.members.values() if not member.is_over]

    @property
    def present(self) -> list[Member]:
        """Members that have not ended and are not about to."""
        return [member for member in self.alive if not member.sight.pod.is_going]

    @property
    def waiting(self) -> list[Member]:
        """Members behind our gate, by name."""
        found = [member for member in self.members.values() if member.is_waiting]
        return sorted(found, key=lambda member: (_natural(member.sight.key.name), member.uid))

    @property
    def size(self) -> int:
        """How many members it is to have."""
        return max((member.sight.size for member in self.members.values()), default=1)

    def ask(self) -> list[Member]:
        """Those that wait become the replicas that the core is asked for."""
        waiting = self.waiting
        self.slots = {replica: member.uid for replica, member in enumerate(waiting)}
        self.stand = Stand.ASKED
        return waiting

    def replica_of(self, uid: str) -> int | None:
        """Which replica a pod is."""
        return next((replica for replica, found in self.slots.items() if found == uid), None)

    def place_of(self, member: Member) -> Place | None:
        """Where a member is to be; None where it has no place."""
        replica = self.replica_of(member.uid) if self.stand is Stand.PLACED else None
        return None if replica is None else self.places.get(replica)

    def holds(self, member: Member) -> bool:
        """Whether the core counts a member where it is."""
        place = self.place_of(member)
        return place is not None and place.node_name == member.target

    def settle(self) -> None:
        """Give replicas to those whose plan names them, then places that came free to those that wait."""
        for member in self.members.values():
            plan = member.sight.plan
            if plan is not None and plan.workload == self.workload_id and not member.is_waiting and not member.is_over:
                self._take(member, plan.replica)
        free = [replica for replica in sorted(self.places) if not self._is_held(replica)]
        without = [member for member in self.waiting if self.replica_of(member.uid) is None]
        for replica, member in zip(free, without, strict=False):
            self.slots[replica] = member.uid

    def _take(self, member: Member, replica: int) -> None:
        place = self.places.get(replica)
        # Another leader's core may have used the same name for other replicas: who has a place here keeps it.
        if place is not None and place.node_name == member.target and not self._is_held(replica):
            before = self.replica_of(member.uid)
            if before is not None:
                del self.slots[before]
            self.slots[replica] = member.uid

    def _is_held(self, replica: int) -> bool:
        member = self.members.get(self.slots.get(replica, ""))
        return member is not None and not member.is_over


def _natural(name: str) -> tuple[str, int]:
    """Names that end in a number, by the number."""
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or -1) if len(name) - len(head) < 20 else -1
