"""Events that the gate consumes, and instructions that it returns.

Instructions may be carried out late, twice or never. Their order within a round matters: nodes and external usage
first, work is ended before other work is submitted, and the API server is written to last.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from eelgrid_controller.engines.kubernetes.model.inference_service import InferenceService
from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, PlacementCondition, Pod
from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import PodPlan
from eelgrid_controller.engines.kubernetes.pods.topology_constraints import BoundClaim, PersistentVolume, StorageClass
from eelgrid_controller.engines.node_reports import RegisterNode, RemoveNode, ReportUsage
from eelgrid_controller.state.engine_reports import Adoption
from eelgrid_protos.messages import SubmitWorkloadRequest, WorkloadSpec


class ReplicaPlace(NamedTuple):
    """Where one replica goes; devices by index on their node, where they are known."""

    node_name: str
    devices: tuple[int, ...] = ()
    profile: str = ""


class GatePodView(NamedTuple):
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
    pinned: str = ""
    plan: PodPlan | None = None

    @property
    def key(self) -> PodKey:
        """Namespace and name."""
        return PodKey(self.pod.namespace, self.pod.name)


# Events


class PodUpdated(NamedTuple):
    """A pod as it is now."""

    pod: GatePodView


class PodAdmitted(NamedTuple):
    """A pod that the API server is about to create, under a uid of ours; it is placed now, or when it is seen."""

    pod: GatePodView


class AdmissionAbandoned(NamedTuple):
    """Nobody waits any more for the place of a pod that was being admitted."""

    uid: str


class PodDeleted(NamedTuple):
    """A pod was deleted."""

    uid: str


class KubeNodeUpdated(NamedTuple):
    """A node as it is now; where it has an agent, that tells the core what the node is, which may be awaited still."""

    node: KubeNode
    has_agent: bool = False
    awaits_agent: bool = False


class KubeNodeDeleted(NamedTuple):
    """A node was deleted."""

    name: str


class NodeAcknowledged(NamedTuple):
    """The core has registered a node, or registered it again."""

    name: str


class ClaimGpusUpdated(NamedTuple):
    """So many GPUs of a node are given by claims alone; mode gate has none of them to give."""

    name: str
    gpu_count: int


class RelatedUpdated(NamedTuple):
    """A namespace (its labels), a claim, a volume or a storage class as it is now; None for one that is no more."""

    kind: str  # the plural, as resources have it
    key: PodKey
    value: Mapping[str, str] | BoundClaim | PersistentVolume | StorageClass | None


class RelatedSynced(NamedTuple):
    """What is needed to judge pods by volumes, or by namespaces, is known as a whole, or cannot be read."""

    kind: str  # eligibility.VOLUMES or NAMESPACES
    is_readable: bool


class NodeReportFailed(NamedTuple):
    """A report about a node failed; repeat it."""

    name: str


class GateSynced(NamedTuple):
    """All that there was has been told: pods, nodes and what the core holds."""


class DevicesReported(NamedTuple):
    """What pods hold on a node, as its agent says; where it `steers`, devices follow the plan."""

    node_name: str
    steers: bool
    pods: Mapping[PodKey, tuple[str, ...]]


class UnitPlaced(NamedTuple):
    """The core has a place for each replica, `spec` is what it knows of them; `is_preempted` as after UnitPreempted."""

    workload_id: str
    places: Mapping[int, ReplicaPlace]
    spec: WorkloadSpec | None = None
    is_preempted: bool = False


class UnitDeferred(NamedTuple):
    """The core has no room now."""

    workload_id: str
    reason: str


class UnitCancelled(NamedTuple):
    """The core holds nothing of it any more, or has ended it long ago."""

    workload_id: str


class UnitPreempted(NamedTuple):
    """Its pods are to go, to make room: nobody comes to its places, and they are let go when the last pod has."""

    workload_id: str


class UnitRefused(NamedTuple):
    """The core did not do what it was asked for; where `is_taken`, because another has the workload's name."""

    workload_id: str
    why: str
    is_taken: bool = False


class InferenceServiceUpdated(NamedTuple):
    """A service as it is now."""

    service: InferenceService


class InferenceServiceDeleted(NamedTuple):
    """A service was deleted, or lost its target."""

    unit: str


class LeadershipAcquired(NamedTuple):
    """From now on this one leads, in this epoch; it may continue a term of its own, if nobody else led since."""

    epoch: int
    is_continued: bool = False


class LeadershipLost(NamedTuple):
    """From now on this one leads no more; `is_led` says whether another does."""

    is_led: bool = True


class WriteFailure(Enum):
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
    failure: WriteFailure
    why: str = ""
    epoch: int | None = None


class AnnotateFailed(NamedTuple):
    """A pod's annotations were not written, as far as is known."""

    uid: str
    failure: WriteFailure
    why: str = ""


class DeleteFailed(NamedTuple):
    """A pod was not deleted, as far as is known."""

    uid: str
    failure: WriteFailure
    why: str = ""


class GateTicked(NamedTuple):
    """Time has passed; waits may be over."""


class ReplacementStarted(NamedTuple):
    """A pod that waits comes in the stead of one of this unit, whose place is kept for it."""

    uid: str
    unit: str


class MoveFinished(NamedTuple):
    """A pod of a unit, or any of it, is not being moved any more: a place that nobody has come to is let go."""

    unit: str
    uid: str = ""


GateEvent = (
    PodUpdated
    | PodAdmitted
    | AdmissionAbandoned
    | PodDeleted
    | ReplacementStarted
    | MoveFinished
    | KubeNodeUpdated
    | KubeNodeDeleted
    | NodeAcknowledged
    | ClaimGpusUpdated
    | NodeReportFailed
    | GateSynced
    | UnitPlaced
    | UnitDeferred
    | UnitCancelled
    | UnitPreempted
    | UnitRefused
    | LeadershipAcquired
    | LeadershipLost
    | PatchDone
    | PatchFailed
    | AnnotateFailed
    | DeleteFailed
    | DevicesReported
    | GateTicked
    | InferenceServiceUpdated
    | InferenceServiceDeleted
    | RelatedUpdated
    | RelatedSynced
)

# Instructions


class SubmitUnit(NamedTuple):
    """Ask the core for places."""

    request: SubmitWorkloadRequest


class AdoptUnit(NamedTuple):
    """The core is to hold what stands, and to count it no more as what others hold; and to let go what is no more."""

    request: SubmitWorkloadRequest
    adoption: Adoption


class RereadPod(NamedTuple):
    """Feed a pod again, with the intent of its users."""

    uid: str
    key: PodKey


class CancelUnit(NamedTuple):
    """The core is to let it go; `reason` is what operators read of it then."""

    workload_id: str
    reason: str = ""


class ScaleUnit(NamedTuple):
    """Ask the core for so many replicas of a service in all, or as many as there is room for."""

    workload_id: str
    replicas: int


class RetryPending(NamedTuple):
    """The core is to try what waits again: rules that it asks about may answer otherwise by now."""


class UngatePod(NamedTuple):
    """Pin a pod to a node and remove our gate, if it still is the one that was looked at."""

    uid: str
    key: PodKey
    version: str
    node_name: str
    plan: str
    epoch: int


class BindPod(NamedTuple):
    """Bind a pod that names our scheduler to a node, if it still is the one that was looked at."""

    uid: str
    key: PodKey
    version: str
    node_name: str
    plan: str
    epoch: int


class PinAdmitted(NamedTuple):
    """Answer the review of a pod that is being admitted with its node and its plan."""

    uid: str
    node_name: str
    plan: str
    epoch: int


class DeclineAdmitted(NamedTuple):
    """Answer it without: it is placed when it is seen."""

    uid: str


class RemoveGate(NamedTuple):
    """Remove our gate and pin nothing; without an epoch although nobody leads."""

    uid: str
    key: PodKey
    version: str
    epoch: int | None
    why: str = "no leader"


class AnnotatePod(NamedTuple):
    """Write annotations of a pod, if it still is the one that was looked at."""

    uid: str
    key: PodKey
    version: str
    epoch: int
    annotations: Mapping[str, str]


class RecreatePod(NamedTuple):
    """Delete a pod whose owner makes another in its stead, which is gated; where a version is named, only that one."""

    uid: str
    key: PodKey
    epoch: int
    why: str
    version: str = ""


class ReportPlacement(NamedTuple):
    """Write the condition of a pod's placement into its status."""

    uid: str
    key: PodKey
    condition: PlacementCondition


class RecordEvent(NamedTuple):
    """Record an Event about a pod."""

    uid: str
    key: PodKey
    text: str
    is_warning: bool = False


GateInstruction = (
    RegisterNode
    | RemoveNode
    | ReportUsage
    | SubmitUnit
    | AdoptUnit
    | RereadPod
    | CancelUnit
    | ScaleUnit
    | RetryPending
    | UngatePod
    | BindPod
    | PinAdmitted
    | DeclineAdmitted
    | RemoveGate
    | AnnotatePod
    | RecreatePod
    | ReportPlacement
    | RecordEvent
)
