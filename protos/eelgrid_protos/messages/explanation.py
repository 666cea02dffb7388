"""Explanations: why a workload is placed where it is, or pending; mirrored by workload.proto."""

from typing import Annotated

from eelgrid_protos.messages.workload import RuntimeEstimate, Workload
from eelgrid_protos.quantities import CostWatts, Count, Label, Many, Name, Sentence
from eelgrid_protos.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTerm:
    """One part of a cost, in watts-equivalent."""

    name: Label
    cost_w: CostWatts


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One place that was evaluated."""

    node_name: Name
    gpu_indexes: Annotated[tuple[Count, ...], Many(64)]
    cost_w: CostWatts
    terms: Annotated[tuple[CostTerm, ...], Many(16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """How many nodes one constraint ruled out."""

    constraint: Label
    nodes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaExplanation:
    """Why one replica was placed where it is, or why it could not be; best candidate first."""

    replica: Count
    candidates: Annotated[tuple[Candidate, ...], Many(16)]
    feasible_nodes: Count
    removals: Annotated[tuple[Removal, ...], Many(16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a workload is placed where it is, or pending."""

    workload: Workload
    replicas: Annotated[tuple[ReplicaExplanation, ...], Many(10_000)] = ()
    remedy: Sentence = ""
    constraint: Label = ""
    runtime: RuntimeEstimate | None = None
