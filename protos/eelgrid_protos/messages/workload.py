"""Workloads: what users run, where it is placed and why; mirrored by workload.proto."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.plan import Slice
from eelgrid_protos.messages.promise import ServicePromise, TrainingPromise
from eelgrid_protos.quantities import (
    GPU_MILLI_WHOLE,
    Bytes,
    CostWatts,
    Count,
    CpuMilli,
    GpuMilli,
    Identifier,
    Label,
    Many,
    Name,
    Nanoseconds,
    OpenEnum,
    Range,
    RequiredLabel,
    Sentence,
    Uint64,
    Watts,
)

GpuModel = RequiredLabel
Priority = Annotated[int, Range(-1_000_000, 1_000_000)]
Replicas = Annotated[int, Range(1, 10_000)]


class WorkloadKind(OpenEnum):
    """The kind of a workload, which decides how it is measured."""

    UNSPECIFIED = 0
    INFERENCE_SERVICE = 1
    TRAINING_JOB = 2
    BATCH_JOB = 3


class Locality(OpenEnum):
    """Preferred distance between the replicas of a workload; UNSPECIFIED is no preference."""

    UNSPECIFIED = 0
    PACK = 1
    SPREAD = 2


_KINDS = ", ".join(kind.name.lower() for kind in WorkloadKind if kind)


class WorkloadPhase(OpenEnum):
    """Phase of a workload's life."""

    UNSPECIFIED = 0
    PENDING = 1
    PLACED = 2
    CANCELLED = 3


class Mobility(OpenEnum):
    """How a running workload may be moved by an operator; unspecified means movable."""

    UNSPECIFIED = 0
    FIXED = 1
    MOVABLE = 2
    RESTARTABLE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """What one replica requests on one node."""

    cpu_milli: CpuMilli = 0
    memory_bytes: Bytes = 0
    gpu_count: Annotated[int, Range(0, 64)] = 0
    gpu_milli: GpuMilli = 0
    gpu_models: Annotated[tuple[GpuModel, ...], Many(64)] = ()

    def violations(self) -> Iterator[Violation]:
        """Checks that a share is of one GPU; several GPUs are allocated whole."""
        if self.gpu_count == 0 and self.gpu_milli != 0:
            yield Violation("gpu_milli", "asks for a share of no GPU", "set gpu_count to 1 or gpu_milli to 0")
        if self.gpu_count == 0 and self.gpu_models:
            yield Violation("gpu_models", "names a model but asks for no GPU", "set gpu_count or drop gpu_models")
        if self.gpu_count >= 1 and self.gpu_milli == 0:
            yield Violation("gpu_milli", "is 0 with a gpu_count", "set gpu_milli to 1000 for whole GPUs")
        if self.gpu_count > 1 and self.gpu_milli not in (0, GPU_MILLI_WHOLE):
            yield Violation("gpu_milli", "is a share of several GPUs", "set gpu_milli to 1000 or gpu_count to 1")
        if self.cpu_milli == 0 and self.memory_bytes == 0 and self.gpu_count == 0:
            yield Violation("cpu_milli", "the request asks for nothing", "ask for CPU, memory or a GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """What a user requests."""

    name: Name
    request: ResourceRequest
    kind: WorkloadKind = WorkloadKind.BATCH_JOB
    replicas: Replicas = 1
    namespace: Label = "default"
    user: Label = ""
    queue: Label = ""
    priority: Priority = 0
    labels: Annotated[Mapping[Label, Label], Many(64)] = field(default_factory=dict)
    locality: Locality = Locality.UNSPECIFIED
    mobility: Mobility = Mobility.UNSPECIFIED
    service: ServicePromise | None = None
    training: TrainingPromise | None = None
    required_traits: Annotated[tuple[Label, ...], Many(16)] = ()

    def violations(self) -> Iterator[Violation]:
        """Checks that the kind is set, since it decides how a workload is measured, and that the objective matches it."""
        if self.kind is WorkloadKind.UNSPECIFIED:
            yield Violation("kind", "is not set or not known here", "choose one of " + _KINDS)
        if self.service is not None:
            if self.kind is not WorkloadKind.INFERENCE_SERVICE:
                yield Violation("service", "is a promise to another kind", "set kind to inference_service or drop it")
            if not self.service.replicas_least <= self.replicas <= self.service.replicas_most:
                yield Violation(
                    "replicas",
                    f"is {self.replicas}, outside of {self.service.replicas_least} to {self.service.replicas_most}",
                    "begin within replicas_least and replicas_most",
                )
            if self.service.slices and self.request.gpu_count != 1:
                yield Violation("request.gpu_count", f"is {self.request.gpu_count} with slices", "ask for 1 GPU")
        if self.training is not None:
            if self.kind is not WorkloadKind.TRAINING_JOB:
                yield Violation("training", "is a promise to another kind", "set kind to training_job or drop it")
            if self.training.is_elastic and not (
                self.training.replicas_least <= self.replicas <= self.training.replicas_most
            ):
                yield Violation(
                    "replicas",
                    f"is {self.replicas}, outside of {self.training.replicas_least} to {self.training.replicas_most}",
                    "begin within replicas_least and replicas_most",
                )
            if self.request.gpu_milli != GPU_MILLI_WHOLE:
                yield Violation("training", "needs whole GPUs", "set gpu_milli to 1000, since a limit is of a GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The place of one replica."""

    replica: Count
    node_name: Name
    gpu_uuids: Annotated[tuple[Identifier, ...], Many(64)] = ()
    gpu_indexes: Annotated[tuple[Count, ...], Many(64)] = ()
    gpu_instance: Slice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One accepted submission."""

    workload_id: Identifier
    spec: WorkloadSpec
    phase: WorkloadPhase
    reason: Sentence = ""
    placements: Annotated[tuple[Placement, ...], Many(10_000)] = ()
    submitted_ns: Nanoseconds = 0
    placed_ns: Nanoseconds = 0
    ended_ns: Nanoseconds = 0
    revision: Uint64 = 0
    power_limit_w: Watts | None = None
    replicas_begun: Annotated[int, Range(0, 10_000)] = 0
    # The user of the certificate that submitted it; it belongs to this user, or else to spec.user.
    owner: Label = ""


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
