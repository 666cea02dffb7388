"""The stream between one agent and the controller: mirrored by agent_service.proto.

The agent opens with Hello; the controller answers Welcome. Batches are
acknowledged by sequence, cumulatively; at most `window` are under way. Either
side may meet a message of a newer minor version: its `message` is None, and it
is passed over.
"""

from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.messages.energy import EnergyAcknowledgement, EnergyWindow
from eelgrid_protos.messages.node import Inventory, NodeEvent
from eelgrid_protos.messages.plan import NodePlan, PlanApplied
from eelgrid_protos.messages.policy import IntervalSeconds
from eelgrid_protos.messages.reading import SampleBatch
from eelgrid_protos.quantities import Identifier, Label, Many, Range, Uint32, Uint64

__all__ = [
    "PODS_WITH_DEVICES_MOST",
    "RECONNECT_SPREAD_S_MOST",
    "Acknowledgement",
    "Cadence",
    "ConnectRequest",
    "ConnectResponse",
    "HeldDevices",
    "Hello",
    "HelloReceived",
    "PodDevices",
    "Resume",
    "Welcome",
]  # fmt: skip

# Eight GPUs in seven slices are 56; a kubelet runs some hundreds of pods.
PODS_WITH_DEVICES_MOST = 1024
# A node whose agent stays away for a minute is lost anyway.
RECONNECT_SPREAD_S_MOST = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Opens a stream; sequences count within the incarnation."""

    incarnation: Uint64
    inventory: Inventory
    plan_epoch: Uint64 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Opens a stream in the stead of Hello, where the node is as the controller knows it, by the inventory's digest."""

    incarnation: Uint64
    node_name: Identifier
    plan_epoch: Uint64 = 0
    inventory_digest: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How the agent samples and sends."""

    sample_interval_s: IntervalSeconds = 1.0
    send_interval_s: IntervalSeconds = 5.0
    window: Annotated[int, Range(1, 1024)] = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answers Hello with the last batch of this incarnation that the controller holds."""

    acknowledged_sequence: Uint64
    cadence: Cadence
    # The next stream may be opened by Resume.
    resumes: bool = False
    # When this stream ends, agents come back spread over so long.
    reconnect_spread_s: Annotated[float, Range(0.0, RECONNECT_SPREAD_S_MOST, "s")] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloReceived:
    """Hello or Resume has come, and Welcome will follow; before it, Hello where the inventory is wanted."""

    inventory_wanted: bool = False
    ahead: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """Covers every batch up to and including the sequence, and renews the plan's lease."""

    sequence: Uint64


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDevices:
    """What all containers of one pod hold: UUIDs of whole GPUs, and of the compute instances of MIG slices."""

    namespace: Label
    pod: Label
    device_uuids: Annotated[tuple[Identifier, ...], Many(512)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDevices:
    """What the pods of a node hold, as its kubelet says, in the stead of what was said before.

    Said anew after each allocation. Where the agent `steers`, it is the device plugin, and devices follow the plan.
    """

    steers: bool = False
    pods: Annotated[tuple[PodDevices, ...], Many(PODS_WITH_DEVICES_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectRequest:
    """One message from the agent."""

    message: Hello | Inventory | SampleBatch | NodeEvent | PlanApplied | EnergyWindow | HeldDevices | Resume | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectResponse:
    """One message to the agent."""

    message: Welcome | Acknowledgement | NodePlan | Cadence | EnergyAcknowledgement | HelloReceived | None
