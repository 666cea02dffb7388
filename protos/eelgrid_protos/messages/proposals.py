"""Proposals: what a change would do, and which change would be best, asked for and applied.

What-if analysis, exported decisions and shadow policies (whatif.proto); moves of running work (moves.proto); MIG
layouts of partitioned pools (partition.proto).
"""

from collections.abc import Iterator
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.explanation import Candidate
from eelgrid_protos.messages.plan import GpuLayout, Slice
from eelgrid_protos.messages.policy import OBJECTIVES, PowerBudget, Weights
from eelgrid_protos.messages.workload import GpuModel, Placement, WorkloadSpec
from eelgrid_protos.quantities import (
    Bytes,
    ClusterWatts,
    CostWatts,
    Count,
    CpuMilli,
    GpuMilli,
    Identifier,
    Label,
    Many,
    Milli,
    Name,
    Nanoseconds,
    OpenEnum,
    PageToken,
    Range,
    Ratio,
    Seconds,
    Sentence,
    Text,
    Uint32,
    Uint64,
)
from eelgrid_protos.values import dataclass

CHANGES_MOST = 64
# Nodes and copies of one change; whatif.py bounds their sum.
IMAGINED_NODES_MOST = 10_000
COPIES_MOST = 10_000
DIFFERENCES_MOST = 10_000

Changes = Annotated[tuple["WhatIfChange", ...], Many(CHANGES_MOST)]
Places = Annotated[tuple[Name, ...], Many(8)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """A kind of node: like an existing one, or with a GPU of the catalogue."""

    like_node: Label = ""
    gpu: Label = ""
    gpu_count: Annotated[int, Range(0, 64)] = 0
    cpu_milli: CpuMilli = 0
    memory_bytes: Bytes = 0

    def violations(self) -> Iterator[Violation]:
        """Checks that exactly one of the two is given, completely."""
        if self.like_node and (self.gpu or self.gpu_count or self.cpu_milli or self.memory_bytes):
            yield Violation("like_node", "stands beside a description", "name a node, or describe one")
        if not self.like_node and bool(self.gpu) != bool(self.gpu_count):
            yield Violation("gpu", "and gpu_count go together", "give both, or neither for a node without GPUs")
        if not (self.like_node or self.gpu or self.cpu_milli):
            yield Violation("cpu_milli", "the node would have nothing", "name a node, a GPU or the CPUs")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainNodes:
    """Takes nodes out of service; with `remove` their watts are subtracted, too."""

    node_names: Annotated[tuple[Name, ...], Many(IMAGINED_NODES_MOST)]
    remove: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AddNodes:
    """Adds equal nodes."""

    shape: NodeShape
    count: Annotated[int, Range(1, IMAGINED_NODES_MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetWeights:
    """Puts other weights in force."""

    objective: Label = ""
    weights: Weights | None = None

    def violations(self) -> Iterator[Violation]:
        """Checks that either a name or numbers are given."""
        if self.weights is None and self.objective not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            yield Violation("objective", f"is {self.objective!r}", f"use one of {known}, or give weights")
        if self.weights is not None and self.objective:
            yield Violation("objective", "stands beside weights", "keep one of the two")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPowerBudgets:
    """Puts power budgets in the place of all that are in force."""

    budgets: Annotated[tuple[PowerBudget, ...], Many(100_000)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceAnew:
    """Places all work again from an empty cluster, in the order of submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCopies:
    """Submits a workload, once or several times."""

    spec: WorkloadSpec
    copies: Annotated[int, Range(1, COPIES_MOST)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelWorkloads:
    """Ends workloads."""

    workload_ids: Annotated[tuple[Identifier, ...], Many(IMAGINED_NODES_MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfChange:
    """One change of a sequence; None for one of a newer version."""

    change: DrainNodes | AddNodes | SetWeights | PlaceAnew | SubmitCopies | CancelWorkloads | SetPowerBudgets | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFigures:
    """The totals of a real or hypothetical cluster."""

    nodes_ready: Uint32 = 0
    gpus: Uint32 = 0
    allocated_gpu_milli: Milli = 0
    cpu_milli: Milli = 0
    allocated_cpu_milli: Milli = 0
    placed: Uint32 = 0
    pending: Uint32 = 0
    modelled_power_w: ClusterWatts = 0.0
    fragmented_gpu_milli: Milli = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRoom:
    """How many more tasks of a typical class would fit."""

    cpu_milli: CpuMilli = 0
    gpu_count: Annotated[int, Range(0, 64)] = 0
    gpu_milli: GpuMilli = 0
    gpu_models: Annotated[tuple[GpuModel, ...], Many(64)] = ()
    share: Ratio = 0.0
    before: Uint64 = 0
    after: Uint64 = 0


class ImaginedOutcome(OpenEnum):
    """The effect of the changes on a workload."""

    UNSPECIFIED = 0
    PLACED = 1
    MOVED = 2
    DISPLACED = 3
    WAITS = 4
    REFUSED = 5
    CANCELLED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeCount:
    """How many workloads have one outcome."""

    outcome: ImaginedOutcome
    workloads: Uint32


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadDifference:
    """One workload that the changes affect; `candidate` is the place of its first replica."""

    workload_id: Identifier
    name: Name
    outcome: ImaginedOutcome
    nodes_before: Places = ()
    nodes_after: Places = ()
    reason: Sentence = ""
    candidate: Candidate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfRequest:
    """Changes in order, and how many differences to list; 0 means 100."""

    changes: Changes
    differences_most: Annotated[int, Range(0, DIFFERENCES_MOST)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfResponse:
    """The predicted effect of the changes."""

    before: ClusterFigures
    after: ClusterFigures
    rooms: Annotated[tuple[ClassRoom, ...], Many(64)] = ()
    counts: Annotated[tuple[OutcomeCount, ...], Many(16)] = ()
    differences: Annotated[tuple[WorkloadDifference, ...], Many(DIFFERENCES_MOST)] = ()
    revision: Uint64 = 0
    complete: bool = True
    copy_s: Seconds = 0.0
    total_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCapacityRequest:
    """Asks how many nodes of a shape are needed for what the changes submit, or for all pending work."""

    changes: Changes = ()
    shape: NodeShape
    nodes_most: Annotated[int, Range(0, IMAGINED_NODES_MOST)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCapacityResponse:
    """The number of nodes, and the totals of the cluster with them."""

    nodes: Uint32 | None
    outcome: WhatIfResponse
    wanted: Count = 0
    waiting_with_one_less: Count = 0
    trials: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportDecisionRequest:
    """Names a workload whose last decision is exported."""

    workload_id: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportDecisionResponse:
    """A part of a decision's file."""

    text: Annotated[str, Text(1_000_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowReport:
    """The cluster compared with the result of another policy."""

    objective: Label = ""
    weights: Weights
    started_ns: Nanoseconds = 0
    started_revision: Uint64 = 0
    revision: Uint64 = 0
    events: Uint64 = 0
    live: ClusterFigures
    shadow: ClusterFigures
    alike: Uint32 = 0
    elsewhere: Uint32 = 0
    live_alone: Uint32 = 0
    shadow_alone: Uint32 = 0
    neither: Uint32 = 0
    differences: Annotated[tuple[WorkloadDifference, ...], Many(100)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartShadowRequest:
    """Starts a second policy in parallel to the one in force."""

    weights: SetWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class StartShadowResponse:
    """The shadow at its start."""

    report: ShadowReport


@dataclass(frozen=True, slots=True, kw_only=True)
class GetShadowRequest:
    """Asks for the comparison with the shadow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetShadowResponse:
    """The comparison with the shadow."""

    report: ShadowReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StopShadowRequest:
    """Ends the shadow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopShadowResponse:
    """The final comparison with the shadow."""

    report: ShadowReport


# Defaults of a request. A minute loads a model's weights again, or a checkpoint; an hour is about the least that a task
# of the public traces still runs once it has run for a while.
RESTART_S, HORIZON_S, MOVES_RATIO = 60.0, 3600.0, 0.05
MOVES_MOST = 10_000

# Sums of watts are weighted, and a gain may be a loss.
GoalWeight = Annotated[float, Range(0.0, 1e6)]
Gpus = Annotated[float, Range(0.0, 1e9)]
RestartSeconds = Annotated[float, Range(0.0, 86_400.0, "s")]
HorizonSeconds = Annotated[float, Range(1.0, 31_536_000.0, "s")]


class MoveGoal(OpenEnum):
    """What moves are to improve."""

    UNSPECIFIED = 0
    POWER = 1
    ROOM = 2
    BALANCED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalWeights:
    """The price of each term of the cost under a goal."""

    power: GoalWeight
    fragmentation_w: GoalWeight
    stranding_w: GoalWeight
    block_w: GoalWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMove:
    """One replica from its place to another; the candidates are its costs there and here."""

    source: Placement
    target: Placement
    candidates: Annotated[tuple[Candidate, ...], Many(2)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One step: replicas of one workload that move together."""

    workload_id: Identifier
    name: Label = ""
    replicas: Annotated[tuple[ReplicaMove, ...], Many(MOVES_MOST)]
    release_first: bool = False
    power_w: CostWatts = 0.0
    restart_w: CostWatts = 0.0
    gain_w: CostWatts = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFit:
    """How many more tasks of one class would fit at once."""

    cpu_milli: CpuMilli
    gpu_count: Count
    gpu_milli: GpuMilli
    gpu_models: Annotated[tuple[GpuModel, ...], Many(64)] = ()
    tasks: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The whole cluster before or after the moves, by the model."""

    power_w: CostWatts
    fragmented_gpus: Gpus
    stranded_gpus: Gpus
    cost_w: CostWatts
    typical_tasks: Uint32
    typical_gpu_milli: Uint64
    largest: Annotated[tuple[ClassFit, ...], Many(16)] = ()
    block_gpus: Gpus = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """An ordered sequence of moves, each feasible in its turn, and their gains."""

    recommendation_id: Identifier
    revision: Uint64
    goal: MoveGoal
    weights: GoalWeights
    moves: Annotated[tuple[Move, ...], Many(MOVES_MOST)] = ()
    before: Standing
    after: Standing
    gain_w: CostWatts
    restart_w: CostWatts
    running: Uint32
    movable: Uint32
    moving: Uint32
    moving_gpu_milli: Uint64
    moves_most: Uint32
    gpu_milli_most: Uint64
    restart_s: RestartSeconds
    horizon_s: HorizonSeconds
    typical_asked_tasks: Uint32
    typical_asked_gpu_milli: Uint64
    nodes_considered: Uint32
    gain_most_w: CostWatts | None = None
    saved_most_w: CostWatts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendMovesRequest:
    """Asks for moves within a budget; omitted fields have defaults."""

    goal: MoveGoal = MoveGoal.UNSPECIFIED
    moves_most: Uint32 = 0
    moves_ratio: Ratio = 0.0
    gpu_ratio: Ratio = 0.0
    restart_s: RestartSeconds | None = None
    horizon_s: HorizonSeconds | None = None

    def violations(self) -> Iterator[Violation]:
        """Checks that the recommendation fits into one message."""
        if self.moves_most > MOVES_MOST:
            yield Violation("moves_most", f"is {self.moves_most}", f"ask for at most {MOVES_MOST} and repeat")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendMovesResponse:
    """The recommended moves."""

    recommendation: Recommendation


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyMovesRequest:
    """Names the recommendation to execute."""

    recommendation_id: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyMovesResponse:
    """The moves that were made."""

    moved: Uint32
    revision: Uint64
    modelled_power_w: CostWatts


GpuSeconds = Annotated[float, Range(-1e15, 1e15)]
RateHz = Annotated[float, Range(0.0, 1e12, "Hz")]
Share = Annotated[float, Range(0.0, 1.0)]


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
