"""Requests and responses of a front of several clusters (federation_service.proto)."""

from typing import Annotated

from eelgrid_protos.messages.operator import Summary
from eelgrid_protos.quantities import ClusterWatts, Identifier, Label, Many, Name, Range, Sentence, Uint32, Uint64
from eelgrid_protos.values import dataclass

# Of one front. Each is asked about each workload.
CLUSTERS_MOST = 16
ADDRESSES_MOST = 16
DECISION_LINES_MOST = 32
# Of a kilowatt hour, with the PUE; a price may be below 0.
_PRICE_MOST = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """One cluster as the front sees it now."""

    name: Name
    addresses: Annotated[tuple[Label, ...], Many(ADDRESSES_MOST)] = ()
    problem: Sentence = ""
    summary: Summary | None = None
    currency: Label = ""
    price_per_kwh: Annotated[float, Range(-_PRICE_MOST, _PRICE_MOST)] | None = None
    carbon_kg_per_kwh: Annotated[float, Range(0.0, _PRICE_MOST)] | None = None
    workloads: Uint32 = 0
    left_out: Uint64 = 0
    power_budget_w: ClusterWatts | None = None
    page_url: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListClustersRequest:
    """Asks for all clusters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListClustersResponse:
    """All clusters by name, those that do not answer among them."""

    clusters: Annotated[tuple[ClusterStatus, ...], Many(CLUSTERS_MOST)] = ()
    omitted: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedCopy:
    """A workload in one cluster."""

    cluster: Name
    phase: Label
    started: bool = False
    problem: Sentence = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetDispatchRequest:
    """Asks where a workload is."""

    workload_id: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class GetDispatchResponse:
    """Where a workload is, and why."""

    workload_id: Identifier
    chosen: Label = ""
    copies: Annotated[tuple[DispatchedCopy, ...], Many(CLUSTERS_MOST)] = ()
    decision: Annotated[tuple[Sentence, ...], Many(DECISION_LINES_MOST)] = ()
    moving_to: Label = ""
    cancelled: bool = False
    failed: bool = False
