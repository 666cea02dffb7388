"""Events that the claim allocator consumes, and instructions that it returns.

Instructions may be carried out late, twice or never.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, Pod
from eelgrid_controller.engines.kubernetes.model.pod_group import GangMembership, IntentRefusal, PodKey
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    GateTicked,
    LeadershipAcquired,
    LeadershipLost,
    PodDeleted,
    RecordEvent,
    RecreatePod,
    RemoveGate,
    WriteFailure,
)

Body = Mapping[str, Any]


class Claimant(NamedTuple):
    """A pod that is placed by its claims, and whose it is; `is_released` lets it go where it cannot be kept."""

    pod: Pod
    member: GangMembership | IntentRefusal
    priority: int = 0
    is_released: bool = False


# Events


class ClaimPodUpdated(NamedTuple):
    """A pod as it is now: on a node, or going to one (empty for nowhere); `claimant` where it is ours to place."""

    uid: str
    found: Body
    where: str
    claimant: Claimant | None = None


class ClaimNodeUpdated(NamedTuple):
    """A node was added or changed."""

    node: KubeNode


class ClaimNodeDeleted(NamedTuple):
    """A node was deleted."""

    name: str


class ClaimUpdated(NamedTuple):
    """A claim was added or changed."""

    found: Body


class ClaimDeleted(NamedTuple):
    """A claim was deleted."""

    found: Body


class ResourceSliceUpdated(NamedTuple):
    """A slice as it is now."""

    name: str
    spec: Body


class ResourceSliceDeleted(NamedTuple):
    """A ResourceSlice was deleted."""

    name: str


class DeviceClassUpdated(NamedTuple):
    """A DeviceClass as it is now."""

    found: Body


class DeviceClassDeleted(NamedTuple):
    """A DeviceClass was deleted."""

    name: str


class ClaimsSynced(NamedTuple):
    """All that there was has been told: pods, nodes, claims, slices, classes."""


class ClaimsListed(NamedTuple):
    """All claims, read after this term began: nothing that the leader before wrote is missing."""

    epoch: int
    claims: Sequence[Body]


class GrantWritten(NamedTuple):
    """A grant was carried out whole, or as far as `GrantFailed` of its parts did not come before."""

    unit: str


class GrantFailed(NamedTuple):
    """A claim, or else a pod, of a grant was not written, as far as is known."""

    unit: str
    uid: str
    failure: WriteFailure
    why: str = ""


class DeallocationFailed(NamedTuple):
    """A claim was not freed, as far as is known."""

    uid: str
    failure: WriteFailure
    why: str = ""


ClaimEvent = (
    ClaimPodUpdated
    | PodDeleted
    | ClaimNodeUpdated
    | ClaimNodeDeleted
    | ClaimUpdated
    | ClaimDeleted
    | ResourceSliceUpdated
    | ResourceSliceDeleted
    | DeviceClassUpdated
    | DeviceClassDeleted
    | ClaimsSynced
    | ClaimsListed
    | LeadershipAcquired
    | LeadershipLost
    | GrantWritten
    | GrantFailed
    | DeallocationFailed
    | GateTicked
)

# Instructions


class ClaimStatusWrite(NamedTuple):
    """A claim with its new status; its head names the version that was looked at."""

    uid: str
    key: PodKey
    body: Body


class PodRelease(NamedTuple):
    """Let a pod go: note its plan, remove our gate; pin it to the node where nothing else does."""

    uid: str
    key: PodKey
    version: str
    node_name: str
    plan: str
    is_pinned: bool


class ClaimGrant(NamedTuple):
    """Write all of these claims, and when that is done, let all of these pods go."""

    unit: str
    epoch: int
    writes: tuple[ClaimStatusWrite, ...]
    releases: tuple[PodRelease, ...]


class ClaimDeallocation(NamedTuple):
    """A claim without its allocation, to be written as a grant's is."""

    uid: str
    key: PodKey
    body: Body
    epoch: int
    why: str


class ClaimGpusReported(NamedTuple):
    """So many GPUs of a node are given by claims alone: the core has none of them to give."""

    node_name: str
    gpu_count: int


ClaimInstruction = ClaimGrant | ClaimDeallocation | RemoveGate | RecreatePod | RecordEvent | ClaimGpusReported
