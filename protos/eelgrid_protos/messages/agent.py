"""Messages of agents: the stream to the controller and the queries of NodeService.

The agent opens with Hello; the controller answers Welcome. Batches are
acknowledged by sequence, cumulatively; at most `window` are under way. Either
side may meet a message of a newer minor version: its `message` is None, and it
is passed over.
"""

from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.messages.energy import (
    DeviceEnergy,
    EnergyAcknowledgement,
    EnergyAnomaly,
    EnergyStatus,
    EnergyWindow,
    OwnedEnergy,
)
from eelgrid_protos.messages.node import Inventory, NodeEvent
from eelgrid_protos.messages.plan import Assignment, NodePlan, PlanApplied
from eelgrid_protos.messages.policy import IntervalSeconds
from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST, SampleBatch
from eelgrid_protos.quantities import Identifier, Label, Many, PlanEpoch, Range, Seconds, Uint32, Uint64

# Eight GPUs in seven slices are 56; a kubelet runs some hundreds of pods.
PODS_WITH_DEVICES_MOST = 1024
# A node whose agent stays away for a minute is lost anyway.
RECONNECT_SPREAD_S_MOST = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAssignments:
    """What an agent holds by the plan in force."""

    assignments: Annotated[tuple[Assignment, ...], Many(4096)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Opens a stream; sequences count within the incarnation."""

    incarnation: Uint64
    inventory: Inventory
    plan_epoch: PlanEpoch = 0
    held: HeldAssignments | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Opens a stream in the stead of Hello, where the node is as the controller knows it, by the inventory's digest."""

    incarnation: Uint64
    node_name: Identifier
    plan_epoch: PlanEpoch = 0
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


# Devices that are there and that are gone; then what the agent keeps. All rows at their longest fit into a message.
ENERGY_DEVICES_MOST = 2 * GPUS_PER_NODE_MOST
ENERGY_OWNERS_MOST = 2000
ENERGY_RECENT_MOST = 2048
ENERGY_ANOMALIES_MOST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GetInventoryRequest:
    """Names a node; empty means the only one."""

    node_name: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetInventoryResponse:
    """The node as it is."""

    inventory: Inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSamplesRequest:
    """Names a node; empty means the only one."""

    node_name: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSamplesResponse:
    """The newest tick and its age; no batch before the first tick."""

    samples: SampleBatch | None = None
    age_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodePlanRequest:
    """Names a node; empty means the only one."""

    node_name: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodePlanResponse:
    """The plan in force, what became of it and how long its lease still runs."""

    plan: NodePlan | None = None
    applied: PlanApplied | None = None
    lease_left_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodeEnergyRequest:
    """Names a node; empty means the only one."""

    node_name: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodeEnergyResponse:
    """Whose the node's joules are: owners' totals since the agent began, and the last interval by process.

    Without KNOWN there are no rows; `rows_left_out` is how many there was no room for.
    """

    devices: Annotated[tuple[DeviceEnergy, ...], Many(ENERGY_DEVICES_MOST)] = ()
    owners: Annotated[tuple[OwnedEnergy, ...], Many(ENERGY_OWNERS_MOST)] = ()
    recent: Annotated[tuple[OwnedEnergy, ...], Many(ENERGY_RECENT_MOST)] = ()
    anomalies: Annotated[tuple[EnergyAnomaly, ...], Many(ENERGY_ANOMALIES_MOST)] = ()
    status: EnergyStatus = EnergyStatus.UNSPECIFIED
    rows_left_out: Uint32 = 0
