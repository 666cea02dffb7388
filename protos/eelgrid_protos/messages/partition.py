"""MIG layouts of partitioned pools, recommended and applied: mirrored by partition.proto."""

from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.messages.plan import GpuLayout, Slice
from eelgrid_protos.quantities import Count, Identifier, Label, Many, Name, PageToken, Range, Sentence, Uint32, Uint64

Gpus = Annotated[float, Range(0.0, 1e9)]
GpuSeconds = Annotated[float, Range(-1e15, 1e15)]
RateHz = Annotated[float, Range(0.0, 1e12, "Hz")]
Share = Annotated[float, Range(0.0, 1.0)]
HorizonSeconds = Annotated[float, Range(1.0, 31_536_000.0, "s")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """One replica on a partitioned GPU."""

    workload_id: Identifier
    name: Label
    replica: Count
    slice: Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedGpu:
    """One GPU before and after a change; `held` is the reason if it cannot change."""

    node_name: Name
    gpu_index: Count
    model: Label
    before: GpuLayout
    after: GpuLayout
    residents_before: Annotated[tuple[Resident, ...], Many(16)] = ()
    residents: Annotated[tuple[Resident, ...], Many(16)] = ()
    held: Sentence = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedService:
    """What a service can serve within its objective, before and after a change and at the minimum during it."""

    workload_id: Identifier
    name: Label
    rate_hz: RateHz
    before_hz: RateHz = 0.0
    after_hz: RateHz = 0.0
    replicas_before: Count = 0
    replicas: Count = 0
    lowest_share: Share = 1.0
    problem: Sentence = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecommendation:
    """A change of the GPUs of all partitioned pools; gain and cost are in GPU-seconds."""

    recommendation_id: Identifier
    revision: Uint64
    gpus: Annotated[tuple[PartitionedGpu, ...], Many(100_000)] = ()
    services: Annotated[tuple[PartitionedService, ...], Many(100_000)] = ()
    gpus_before: Gpus = 0.0
    gpus_after: Gpus = 0.0
    gain: GpuSeconds = 0.0
    cost: GpuSeconds = 0.0
    horizon_s: HorizonSeconds
    stages: Uint32 = 0
    gpus_ready: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendPartitionsRequest:
    """Asks for the best change; by default it must pay off in an hour."""

    horizon_s: HorizonSeconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendPartitionsResponse:
    """The recommended change."""

    recommendation: PartitionRecommendation


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyPartitionsRequest:
    """Names the recommendation to execute."""

    recommendation_id: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyPartitionsResponse:
    """Confirms the first stage; the others follow as the GPUs reach its layouts."""

    revision: Uint64
    stages_left: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPartitionsRequest:
    """Asks for a page of partitioned GPUs by node and index; a page size of 0 means as many as fit."""

    page_size: Uint32 = 0
    page_token: PageToken = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """One partitioned GPU; `problem` is its agent's report if the layout was not applied."""

    node_name: Name
    gpu_index: Count
    model: Label
    wanted: GpuLayout | None = None
    stands: bool = False
    residents: Annotated[tuple[Resident, ...], Many(16)] = ()
    problem: Sentence = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPartitionsResponse:
    """Every partitioned GPU, and the change in progress."""

    gpus: Annotated[tuple[PartitionStatus, ...], Many(100_000)] = ()
    stages_left: Uint32 = 0
    waits_for: Sentence = ""
    next_page_token: PageToken = ""
    total: Uint32 = 0
    omitted: Uint32 = 0
