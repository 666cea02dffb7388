"""What the machine of mode `dra` is told, and what it asks for.

Owns the words between it and whoever drives it: a part at an API server or a simulated
cluster. Must not know what is done with them. As with the gate's, instructions may be
carried out late, twice or never.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eelgrid_controller.kubernetes.gate_events import Failure, Key, Led, NotLed, PodGone, Recreate, Strip, Tell, Ticked
from eelgrid_controller.kubernetes.owners import Membership, Refused
from eelgrid_controller.kubernetes.views import KubeNode, Pod

__all__ = [
    "ClaimGone",
    "ClaimSeen",
    "Claimant",
    "ClassGone",
    "ClassSeen",
    "Event",
    "Failure",
    "Free",
    "FreeFailed",
    "Grant",
    "GrantFailed",
    "Granted",
    "Instruction",
    "Key",
    "Led",
    "Listed",
    "NodeGone",
    "NodeSeen",
    "NotLed",
    "PodGone",
    "PodSeen",
    "Recreate",
    "Release",
    "SliceGone",
    "SliceSeen",
    "Sliced",
    "Strip",
    "Synced",
    "Tell",
    "Ticked",
    "Write",
]  # fmt: skip

Body = Mapping[str, Any]


class Claimant(NamedTuple):
    """A pod that is placed by its claims, and whose it is; `is_released` lets it go where it cannot be kept."""

    pod: Pod
    member: Membership | Refused
    priority: int = 0
    is_released: bool = False


# Events


class PodSeen(NamedTuple):
    """A pod as it is now: on a node, or going to one (empty for nowhere); `claimant` where it is ours to place."""

    uid: str
    found: Body
    where: str
    claimant: Claimant | None = None


class NodeSeen(NamedTuple):
    """A node as it is now."""

    node: KubeNode


class NodeGone(NamedTuple):
    """A node that is no more."""

    name: str


class ClaimSeen(NamedTuple):
    """A claim as it is now."""

    found: Body


class ClaimGone(NamedTuple):
    """A claim that is no more."""

    found: Body


class SliceSeen(NamedTuple):
    """A slice as it is now."""

    name: str
    spec: Body


class SliceGone(NamedTuple):
    """A slice that is no more."""

    name: str


class ClassSeen(NamedTuple):
    """A DeviceClass as it is now."""

    found: Body


class ClassGone(NamedTuple):
    """A DeviceClass that is no more."""

    name: str


class Synced(NamedTuple):
    """All that there was has been told: pods, nodes, claims, slices, classes."""


class Listed(NamedTuple):
    """All claims, read after this term began: nothing that the leader before wrote is missing."""

    epoch: int
    claims: Sequence[Body]


class Granted(NamedTuple):
    """A grant was carried out whole, or as far as `GrantFailed` of its parts did not come before."""

    unit: str


class GrantFailed(NamedTuple):
    """A claim, or else a pod, of a grant was not written, as far as is known."""

    unit: str
    uid: str
    failure: Failure
    why: str = ""


class FreeFailed(NamedTuple):
    """A claim was not freed, as far as is known."""

    uid: str
    failure: Failure
    why: str = ""


Event = (
    PodSeen | PodGone | NodeSeen | NodeGone | ClaimSeen | ClaimGone | SliceSeen | SliceGone | ClassSeen | ClassGone | Synced | Listed
    | Led | NotLed | Granted | GrantFailed | FreeFailed | Ticked
)  # fmt: skip

# Instructions


class Write(NamedTuple):
    """A claim with its new status; its head names the version that was looked at."""

    uid: str
    key: Key
    body: Body


class Release(NamedTuple):
    """Let a pod go: note its plan, remove our gate; pin it to the node where nothing else does."""

    uid: str
    key: Key
    version: str
    node_name: str
    plan: str
    is_pinned: bool


class Grant(NamedTuple):
    """Write all of these claims, and when that is done, let all of these pods go."""

    unit: str
    epoch: int
    writes: tuple[Write, ...]
    releases: tuple[Release, ...]


class Free(NamedTuple):
    """A claim without its allocation, to be written as a grant's is."""

    uid: str
    key: Key
    body: Body
    epoch: int
    why: str


class Sliced(NamedTuple):
    """So many GPUs of a node are given by claims alone: the core has none of them to give."""

    node_name: str
    gpu_count: int


Instruction = Grant | Free | Strip | Recreate | Tell | Sliced
