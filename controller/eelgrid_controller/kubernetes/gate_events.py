"""What the gate is told, and what it asks for.

Owns the words between the gate and whoever drives it: the engine at an API server or a
simulated cluster. Must not know what is done with them.

Instructions may be carried out late, twice or never: the gate goes on from what it is
told, not from what it asked for. Those of one round stand in an order that matters: nodes
and what is held on them before work is ended, work is ended before other work is submitted,
and the API server is written to last.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from eelgrid_controller.kubernetes.plans import Plan
from eelgrid_controller.kubernetes.scheduling_constraints import BoundClaim, PersistentVolume, StorageClass
from eelgrid_controller.kubernetes.serving import Service
from eelgrid_controller.kubernetes.views import KubeNode, PlacementCondition, Pod
from eelgrid_controller.occupancy import Adoption, Others
from eelgrid_protos.messages import Inventory, SubmitWorkloadRequest, WorkloadSpec

__all__ = [
    "Adopt", "Annotate", "AnnotateFailed", "Cancel", "Cancelled", "Deferred", "DeleteFailed", "DevicesSeen", "Event",
    "Failure", "Grow",
    "Instruction", "Join", "Key", "Leave", "Led", "MoveOver", "NodeGone", "NodeKnown", "NodeSeen", "NodeSliced",
    "NodeUntold", "NotLed", "Occupy", "PatchDone", "PatchFailed", "Place", "Placed", "PodGone", "PodSeen", "Recall",
    "Reconsider", "Recreate", "Refused", "RelatedKnown", "RelatedSeen", "Replaces", "ReportPlacement", "ServiceGone",
    "ServiceSeen", "Sight", "Strip", "Submit", "Synced", "Tell", "Ticked", "Ungate",
]  # fmt: skip


class Key(NamedTuple):
    """The name of a pod."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """As people write it."""
        return f"{self.namespace}/{self.name}"


class Place(NamedTuple):
    """Where one replica goes; devices by index on their node, where they are known."""

    node_name: str
    devices: tuple[int, ...] = ()
    profile: str = ""


class Sight(NamedTuple):
    """A pod and what it means to the gate.

    `unit` names what is placed as one: the pod alone, or its gang of `size` members; empty for a pod that is none of
    ours, or that was given free. `spec` is what to ask the core for, where the pod still waits; `refused` says why there is none, and
    `is_released` that the pod is to go where it can. `pinned` is the one node that it may go to, empty where it is free.
    """

    pod: Pod
    unit: str = ""
    size: int = 1
    spec: WorkloadSpec | None = None
    refused: str = ""
    is_released: bool = False
    waits_for: tuple[str, ...] = ()  # gates of others that go before ours
    profile: str = ""
    pinned: str = ""
    plan: Plan | None = None

    @property
    def key(self) -> Key:
        """Its name."""
        return Key(self.pod.namespace, self.pod.name)


# Events


class PodSeen(NamedTuple):
    """A pod as it is now."""

    pod: Sight


class PodGone(NamedTuple):
    """A pod that is no more."""

    uid: str


class NodeSeen(NamedTuple):
    """A node as it is now; where it has an agent, that tells the core what the node is, which may be awaited still."""

    node: KubeNode
    has_agent: bool = False
    awaits_agent: bool = False


class NodeGone(NamedTuple):
    """A node that is no more."""

    name: str


class NodeKnown(NamedTuple):
    """The core has taken a node, or taken it anew."""

    name: str


class NodeSliced(NamedTuple):
    """So many GPUs of a node are given by claims alone; mode gate has none of them to give."""

    name: str
    gpu_count: int


class RelatedSeen(NamedTuple):
    """A namespace (its labels), a claim, a volume or a storage class as it is now; None for one that is no more."""

    kind: str  # the plural, as resources have it
    key: Key
    value: Mapping[str, str] | BoundClaim | PersistentVolume | StorageClass | None


class RelatedKnown(NamedTuple):
    """What is needed to judge pods by volumes, or by namespaces, is known as a whole, or cannot be read."""

    kind: str  # eligibility.VOLUMES or NAMESPACES
    is_readable: bool


class NodeUntold(NamedTuple):
    """The core could not be told of a node; tell it again."""

    name: str


class Synced(NamedTuple):
    """All that there was has been told: pods, nodes and what the core holds."""


class DevicesSeen(NamedTuple):
    """What pods hold on a node, as its agent says; where it `steers`, devices follow the plan."""

    node_name: str
    steers: bool
    pods: Mapping[Key, tuple[str, ...]]


class Placed(NamedTuple):
    """The core has a place for each replica; `spec` is what it knows of them."""

    workload_id: str
    places: Mapping[int, Place]
    spec: WorkloadSpec | None = None


class Deferred(NamedTuple):
    """The core has no room now."""

    workload_id: str
    reason: str


class Cancelled(NamedTuple):
    """The core holds nothing of it any more, or has ended it long ago."""

    workload_id: str


class Refused(NamedTuple):
    """The core did not do what it was asked for; where `is_taken`, because another has the workload's name."""

    workload_id: str
    why: str
    is_taken: bool = False


class ServiceSeen(NamedTuple):
    """A service as it is now."""

    service: Service


class ServiceGone(NamedTuple):
    """A service that is no more, or has no target any more."""

    unit: str


class Led(NamedTuple):
    """From now on this one leads, in this epoch; it may continue a term of its own, if nobody else led since."""

    epoch: int
    is_continued: bool = False


class NotLed(NamedTuple):
    """From now on this one leads no more; `is_led` says whether another does."""

    is_led: bool = True


class Failure(Enum):
    """Why a write did not succeed."""

    CONFLICT = auto()  # the object is another now: look again
    GONE = auto()
    INVALID = auto()  # it breaks a rule, and will do so again
    FORBIDDEN = auto()  # until somebody grants it
    BUSY = auto()  # slow, away or in trouble, after several attempts
    STALE = auto()  # not sent: this one does not lead any more, or a newer object is known


class PatchDone(NamedTuple):
    """A gate was removed."""

    uid: str


class PatchFailed(NamedTuple):
    """A gate was not removed, as far as is known; `epoch` is that in which it was asked for."""

    uid: str
    failure: Failure
    why: str = ""
    epoch: int | None = None


class AnnotateFailed(NamedTuple):
    """A pod's annotations were not written, as far as is known."""

    uid: str
    failure: Failure
    why: str = ""


class DeleteFailed(NamedTuple):
    """A pod was not deleted, as far as is known."""

    uid: str
    failure: Failure
    why: str = ""


class Ticked(NamedTuple):
    """Time has passed."""


class Replaces(NamedTuple):
    """A pod that waits comes in the stead of one of this unit, whose place is kept for it."""

    uid: str
    unit: str


class MoveOver(NamedTuple):
    """A pod of a unit, or any of it, is not being moved any more: a place that nobody has come to is let go."""

    unit: str
    uid: str = ""


Event = (
    PodSeen | PodGone | Replaces | MoveOver | NodeSeen | NodeGone | NodeKnown | NodeSliced | NodeUntold | Synced | Placed | Deferred | Cancelled | Refused | Led | NotLed
    | PatchDone | PatchFailed | AnnotateFailed | DeleteFailed | DevicesSeen | Ticked | ServiceSeen | ServiceGone
    | RelatedSeen | RelatedKnown
)  # fmt: skip

# Instructions


class Join(NamedTuple):
    """A node without an agent is there."""

    inventory: Inventory


class Leave(NamedTuple):
    """A node is no more, or its agent is to speak for it."""

    node_name: str


class Occupy(NamedTuple):
    """What others hold on a node, which demands it meets, and why nothing more may come."""

    node_name: str
    others: Others


class Submit(NamedTuple):
    """Ask the core for places."""

    request: SubmitWorkloadRequest


class Adopt(NamedTuple):
    """The core is to hold what stands, and to count it no more as what others hold; and to let go what is no more."""

    request: SubmitWorkloadRequest
    adoption: Adoption


class Recall(NamedTuple):
    """Tell of a pod again, and this time what its people want."""

    uid: str
    key: Key


class Cancel(NamedTuple):
    """The core is to let it go."""

    workload_id: str


class Grow(NamedTuple):
    """Ask the core for so many replicas of a service in all, or as many as there is room for."""

    workload_id: str
    replicas: int


class Reconsider(NamedTuple):
    """The core is to try what waits again: rules that it asks about may answer otherwise by now."""


class Ungate(NamedTuple):
    """Pin a pod to a node and remove our gate, if it still is the one that was looked at."""

    uid: str
    key: Key
    version: str
    node_name: str
    plan: str
    epoch: int


class Strip(NamedTuple):
    """Remove our gate and pin nothing; without an epoch although nobody leads."""

    uid: str
    key: Key
    version: str
    epoch: int | None
    why: str = "no leader"


class Annotate(NamedTuple):
    """Write annotations of a pod, if it still is the one that was looked at."""

    uid: str
    key: Key
    version: str
    epoch: int
    annotations: Mapping[str, str]


class Recreate(NamedTuple):
    """Delete a pod whose owner makes another in its stead, which is gated; where a version is named, only that one."""

    uid: str
    key: Key
    epoch: int
    why: str
    version: str = ""


class ReportPlacement(NamedTuple):
    """Write the condition of a pod's placement into its status."""

    uid: str
    key: Key
    condition: PlacementCondition


class Tell(NamedTuple):
    """Let people who look at a pod know."""

    uid: str
    key: Key
    text: str
    is_warning: bool = False


Instruction = (
    Join
    | Leave
    | Occupy
    | Submit
    | Adopt
    | Recall
    | Cancel
    | Grow
    | Reconsider
    | Ungate
    | Strip
    | Annotate
    | Recreate
    | ReportPlacement
    | Tell
)
