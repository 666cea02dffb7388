"""Messages of agents: the stream to the controller and the queries of NodeService.

The agent opens with Hello; the controller answers Welcome. Batches are acknowledged by sequence, cumulatively; at
most `window` are in flight. Either side may receive a message of a newer minor version: its `message` is None, and it
is ignored.
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
# A node whose agent is away for a minute is lost anyway.
RECONNECT_SPREAD_S_MOST = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAssignments:
    """What an agent holds under the plan in force."""

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
    """Opens a stream without an inventory, if the controller has the one with this digest."""

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
    """Answers Hello or Resume with the last batch of this incarnation that the controller holds."""

    acknowledged_sequence: Uint64
    cadence: Cadence
    # The next stream may be opened by Resume.
    resumes: bool = False
    # After this stream ends, agents spread their reconnects over this interval.
    reconnect_spread_s: Annotated[float, Range(0.0, RECONNECT_SPREAD_S_MOST, "s")] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloReceived:
    """Confirms Hello or Resume; Welcome follows, after another Hello if `inventory_wanted`."""

    inventory_wanted: bool = False
    ahead: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """Covers every batch up to and including the sequence, and renews the plan's lease."""

    sequence: Uint64


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDevices:
    """Devices of all containers of one pod: UUIDs of whole GPUs, and of the compute instances of MIG slices."""

    namespace: Label
    pod: Label
    device_uuids: Annotated[tuple[Identifier, ...], Many(512)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDevices:
    """Devices held by the pods of a node, as its kubelet reports; replaces the previous report.

    Sent again after each allocation. If the agent `steers`, it is the device plugin, and devices follow the plan.
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


# Present and removed devices; the other bounds are those of the agent. All rows at their longest fit into a message.
ENERGY_DEVICES_MOST = 2 * GPUS_PER_NODE_MOST
ENERGY_OWNERS_MOST = 2000
ENERGY_RECENT_MOST = 2048
ENERGY_ANOMALIES_MOST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GetInventoryRequest:
    """Names a node; an empty name means the only one."""

    node_name: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetInventoryResponse:
    """The inventory of the node."""

    inventory: Inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSamplesRequest:
    """Names a node; an empty name means the only one."""

    node_name: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSamplesResponse:
    """The newest tick and its age; no batch before the first tick."""

    samples: SampleBatch | None = None
    age_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodePlanRequest:
    """Names a node; an empty name means the only one."""

    node_name: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodePlanResponse:
    """The plan in force, the result of applying it, and how long its lease still runs."""

    plan: NodePlan | None = None
    applied: PlanApplied | None = None
    lease_left_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodeEnergyRequest:
    """Names a node; an empty name means the only one."""

    node_name: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNodeEnergyResponse:
    """Energy of a node by owner: totals since the agent started, and the last interval by process.

    Unless the status is KNOWN there are no rows; `rows_left_out` is the number of rows that did not fit.
    """

    devices: Annotated[tuple[DeviceEnergy, ...], Many(ENERGY_DEVICES_MOST)] = ()
    owners: Annotated[tuple[OwnedEnergy, ...], Many(ENERGY_OWNERS_MOST)] = ()
    recent: Annotated[tuple[OwnedEnergy, ...], Many(ENERGY_RECENT_MOST)] = ()
    anomalies: Annotated[tuple[EnergyAnomaly, ...], Many(ENERGY_ANOMALIES_MOST)] = ()
    status: EnergyStatus = EnergyStatus.UNSPECIFIED
    rows_left_out: Uint32 = 0
