"""Questions and answers of one node's own API: mirrored by node_service.proto."""

from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.messages.energy import DeviceEnergy, EnergyAnomaly, EnergyStatus, OwnedEnergy
from eelgrid_protos.messages.node import Inventory
from eelgrid_protos.messages.plan import NodePlan, PlanApplied
from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST, SampleBatch
from eelgrid_protos.quantities import Label, Many, Seconds, Uint32

__all__ = [
    "ENERGY_ANOMALIES_MOST", "ENERGY_DEVICES_MOST", "ENERGY_OWNERS_MOST", "ENERGY_RECENT_MOST",
    "GetInventoryRequest", "GetInventoryResponse", "GetNodeEnergyRequest", "GetNodeEnergyResponse",
    "GetNodePlanRequest", "GetNodePlanResponse", "GetSamplesRequest", "GetSamplesResponse",
]  # fmt: skip

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
