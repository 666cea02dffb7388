"""Questions and answers of one node's own API: mirrored by node_service.proto."""

from dataclasses import dataclass

from eelgrid_protos.messages.node import Inventory, SampleBatch
from eelgrid_protos.messages.plan import NodePlan, PlanApplied
from eelgrid_protos.quantities import Label, Seconds

__all__ = [
    "GetInventoryRequest", "GetInventoryResponse", "GetNodePlanRequest", "GetNodePlanResponse", "GetSamplesRequest",
    "GetSamplesResponse",
]  # fmt: skip


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
