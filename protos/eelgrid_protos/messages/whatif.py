"""What-if analysis, exported decisions and shadow policies; mirrored by whatif.proto."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.policy import OBJECTIVES, Weights
from eelgrid_protos.messages.workload import Candidate, GpuModel, WorkloadSpec
from eelgrid_protos.quantities import (
    Bytes,
    ClusterWatts,
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
    Range,
    Ratio,
    Seconds,
    Sentence,
    Text,
    Uint32,
    Uint64,
)

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

    change: DrainNodes | AddNodes | SetWeights | PlaceAnew | SubmitCopies | CancelWorkloads | None


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
