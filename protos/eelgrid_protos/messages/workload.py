"""Workloads: what users run, what it is promised, where it is placed and why; mirrored by workload.proto.

What services and jobs are promised is in `promise`; the calls about it scale work, record measured points (profile.proto)
and progress, and list status.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.elastic_share import ElasticShare
from eelgrid_protos.messages.gang import GangPart
from eelgrid_protos.messages.job_array import ArrayElement, ArrayStatus
from eelgrid_protos.messages.job_schedule import JobDeadline, JobSchedule
from eelgrid_protos.messages.plan import AttemptStatus, JobProgress, ProcessSpec, Slice
from eelgrid_protos.messages.policy import PowerBudget, Priority, RuntimeSeconds, Slowdown
from eelgrid_protos.messages.promise import LoadTarget, ServicePromise, TrainingPromise
from eelgrid_protos.quantities import (
    GPU_MILLI_WHOLE,
    Bytes,
    ClusterWatts,
    Count,
    CpuMilli,
    GpuMilli,
    Identifier,
    Label,
    Many,
    Megahertz,
    Name,
    Nanoseconds,
    OpenEnum,
    PageToken,
    Range,
    RequiredLabel,
    Seconds,
    Sentence,
    Uint32,
    Uint64,
    Watts,
)
from eelgrid_protos.values import dataclass

# Each report changes the workload, which lists them all.
PROCESSES_MOST = 512
GpuModel = RequiredLabel
Replicas = Annotated[int, Range(1, 10_000)]


# Workloads that a promise names of those that end before it.
PROMISE_ENDS_MOST = 8


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
    SUCCEEDED = 4
    FAILED = 5

    @property
    def is_ended(self) -> bool:
        """Returns whether the workload holds nothing any more and never will."""
        return self in (WorkloadPhase.CANCELLED, WorkloadPhase.SUCCEEDED, WorkloadPhase.FAILED)


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

    @property
    def is_share(self) -> bool:
        """Whether it asks for a part of a GPU, beside others."""
        return self.gpu_count == 1 and 0 < self.gpu_milli < GPU_MILLI_WHOLE

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
class GpuPreference:
    """The GPU models that a workload had rather than others; without `worth_w`, wherever they have room."""

    models: Annotated[tuple[GpuModel, ...], Many(64)] = ()
    worth_w: Watts | None = None

    def violations(self) -> Iterator[Violation]:
        """Checks that it names models."""
        if not self.models:
            yield Violation("models", "is empty", "name the GPU models that are preferred, or leave out the preference")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSharing:
    """The load that a workload puts on a GPU that it shares, and by how much others may slow it down; None is the policy's limit."""

    load: Label = ""
    slowdown_most: Slowdown | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelData:
    """The model data that a workload loads; without `worth_w`, it goes to nodes that have all of it wherever they have room."""

    data_names: Annotated[tuple[RequiredLabel, ...], Many(16)] = ()
    worth_w: Watts | None = None

    def violations(self) -> Iterator[Violation]:
        """Checks that something is named."""
        if not self.data_names:
            yield Violation("data_names", "is empty", "name the model data that it loads, or leave them out")


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
    process: ProcessSpec | None = None
    never_preempts: bool = False
    priority_class: Label = ""
    # An engine stops it if it has to make room, and whoever made it submits it anew; set by engines.
    evicted_by_engine: bool = False
    # How long its user expects it to run; nothing ends for it.
    expected_runtime_s: RuntimeSeconds | None = None
    # What keeps it from starting before its turn.
    schedule: JobSchedule | None = None
    # Which element of which array it is; the controller sets it.
    array: ArrayElement | None = None
    deadline: JobDeadline | None = None
    gang: GangPart | None = None
    gpu_preference: GpuPreference | None = None
    model_data: ModelData | None = None
    gpu_sharing: GpuSharing | None = None

    @property
    def may_run_again(self) -> bool:
        """Whether it may start a second time by itself, after something other than its program ended it."""
        return self.schedule is None or not self.schedule.no_requeue

    @property
    def shared_load(self) -> GpuSharing | None:
        """What it puts on a GPU that it shares, by the name of the load or of a service's profile; None if it shares none."""
        if not self.request.is_share:
            return None
        sharing = self.gpu_sharing or GpuSharing()
        profile = "" if self.service is None else self.service.profile
        return sharing if sharing.load or not profile else replace(sharing, load=profile)

    @property
    def has_promised_deadline(self) -> bool:
        """Whether it is accepted only if its deadline can be kept."""
        return self.deadline is not None and not self.deadline.best_effort

    def violations(self) -> Iterator[Violation]:
        """Checks that the kind is set, since it decides how a workload is measured, and that the objective matches it."""
        if self.kind is WorkloadKind.UNSPECIFIED:
            yield Violation("kind", "is not set or not known here", "choose one of " + _KINDS)
        if self.service is not None:
            if self.kind is not WorkloadKind.INFERENCE_SERVICE:
                yield Violation("service", "is a promise to another kind", "set kind to inference_service or drop it")
            yield from self._check_replicas(self.service)
            if self.service.slices and self.request.gpu_count != 1:
                yield Violation("request.gpu_count", f"is {self.request.gpu_count} with slices", "ask for 1 GPU")
        if self.training is not None:
            if self.kind is not WorkloadKind.TRAINING_JOB:
                yield Violation("training", "is a promise to another kind", "set kind to training_job or drop it")
            if self.training.is_elastic:
                yield from self._check_replicas(self.training)
            if self.request.gpu_milli != GPU_MILLI_WHOLE:
                yield Violation("training", "needs whole GPUs", "set gpu_milli to 1000, since a limit is of a GPU")
        if self.deadline is not None:
            if self.kind is WorkloadKind.INFERENCE_SERVICE:
                yield Violation("deadline", "is set for a service, which does not end", "leave it out")
            if not self.deadline.best_effort and self.training and self.training.is_elastic and not self.training.work:
                remedy = "set it to the units of work that must be done, or leave out training.replicas_most"
                yield Violation("training.work", "is not set, and elastic training has a deadline", remedy)
        if self.gpu_preference is not None and not self.request.gpu_count:
            yield Violation(
                "gpu_preference.models", "names a model but the request asks for no GPU", "set gpu_count or drop it"
            )
        if self.gpu_sharing is not None and not self.request.is_share:
            yield Violation(
                "gpu_sharing", "is set, but no share of a GPU is asked for", "ask for a share of one, or drop it"
            )
        if self.gang is not None:
            is_sliced = self.service is not None and self.service.slices
            yield from self.gang.check_part(has_deadline=self.has_promised_deadline, is_sliced=is_sliced)
        if self.process is not None:
            yield from self._check_process()
        elif self.schedule is not None and self.schedule.retries_most:
            remedy = "leave it out: only attempts of processes that agents run are counted"
            yield Violation("schedule.retries_most", "is set without a process", remedy)
        elif self.schedule is not None and self.schedule.no_requeue:
            remedy = "leave it out, or set mobility to fixed"
            yield Violation("schedule.no_requeue", "is set without a process", remedy)

    def _check_process(self) -> Iterator[Violation]:
        """Checks that nothing is asked of a process that agents cannot do yet."""
        if self.kind is WorkloadKind.INFERENCE_SERVICE:
            yield Violation("kind", "is inference_service with a process", "choose batch_job or training_job")
        if self.training is not None and self.training.is_elastic:
            yield Violation("training.replicas_most", "is set with a process", "leave it out: a process keeps its size")
        if self.mobility is not Mobility.FIXED:
            yield Violation("mobility", "is not fixed with a process", "set it to fixed: a process cannot move")
        if self.replicas > PROCESSES_MOST:
            yield Violation("replicas", f"is {self.replicas} with a process", f"ask for {PROCESSES_MOST} at the most")
        if self.required_traits:
            yield Violation("required_traits", "are set with a process", "leave them out: they are of another engine")
        if self.evicted_by_engine:
            yield Violation("evicted_by_engine", "is set with a process", "leave it out: it is of another engine")

    def _check_replicas(self, promise: ServicePromise | TrainingPromise) -> Iterator[Violation]:
        least, most = promise.replicas_least, promise.replicas_most
        if not least <= self.replicas <= most:
            remedy = "begin within replicas_least and replicas_most"
            yield Violation("replicas", f"is {self.replicas}, outside of {least} to {most}", remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The place of one replica."""

    replica: Count
    node_name: Name
    gpu_uuids: Annotated[tuple[Identifier, ...], Many(64)] = ()
    gpu_indexes: Annotated[tuple[Count, ...], Many(64)] = ()
    gpu_instance: Slice | None = None


class RuntimeSource(OpenEnum):
    """Where an expected run time comes from; the stated ones go before what is only presumed."""

    UNSPECIFIED = 0
    USER = 1
    TIME_LIMIT = 2
    HISTORY = 3
    DEFAULT = 4
    PROFILE = 5
    PROGRESS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeEstimate:
    """How long a workload is expected to run from its start."""

    expected_s: RuntimeSeconds
    source: RuntimeSource


class CheckpointCostSource(OpenEnum):
    """Where the cost of a checkpoint comes from."""

    UNSPECIFIED = 0
    THIS_RUN = 1
    EARLIER_RUNS = 2


# Weighted sums over many jobs.
_Total = Annotated[float, Range(0.0, 1e15)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAdvice:
    """How often a running job should save, and what that is computed from; no interval if the cost is not known.

    Interruptions and times are sums of which what is a month old counts half.
    """

    interval_s: Seconds = 0.0
    cost_s: Seconds = 0.0
    cost_source: CheckpointCostSource = CheckpointCostSource.UNSPECIFIED
    mean_between_s: Seconds = 0.0
    queue: Label = ""
    queue_interruptions: _Total = 0.0
    queue_job_s: _Total = 0.0
    pool: Label = ""
    pool_losses: _Total = 0.0
    pool_gpu_s: _Total = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPromise:
    """By when a pending workload starts if run times are as expected, and what ends before; the last to end first."""

    start_ns: Nanoseconds
    waits_for: Annotated[tuple[Identifier, ...], Many(PROMISE_ENDS_MOST)] = ()
    ends: Count = 0
    # Of the last that ends.
    source: RuntimeSource = RuntimeSource.UNSPECIFIED
    # Why it is later than promised before.
    cause: Sentence = ""
    # The places that are reserved for it from then on; empty where they are chosen anew in each round.
    placements: Annotated[tuple[Placement, ...], Many(10_000)] = ()
    # What it takes for granted beside run times: quota, power.
    assumes: Annotated[tuple[Label, ...], Many(4)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineBreach:
    """Why a promised deadline is not kept, and when that became known."""

    time_ns: Nanoseconds
    cause: Sentence


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
    # Replicas of which a GPU is lost now; only in answers, never kept.
    lost_replicas: Annotated[tuple[Count, ...], Many(10_000)] = ()
    # The measured watts of its GPUs, of a shared GPU in proportion to what it holds of all that is held; absent without a
    # fresh reading of each; only in answers, never kept.
    power_w: ClusterWatts | None = None
    # How often it was placed, if it runs processes; and those of that attempt that were reported, by replica.
    attempt: Uint32 = 0
    attempts: Annotated[tuple[AttemptStatus, ...], Many(PROCESSES_MOST)] = ()
    # When its processes were told to end.
    stopping_ns: Nanoseconds = 0
    preempted_for: Label = ""
    preemptions: Uint32 = 0
    promise: StartPromise | None = None
    # Its place in the order in which pending work is tried, from 1; only in answers that were asked for it, never kept.
    queue_position: Uint32 = 0
    # Who holds it back, if it is pending and held.
    held_by: Label = ""
    # How many of its attempts failed and were followed by another; and when the next may start.
    failures: Count = 0
    not_before_ns: Nanoseconds = 0
    # Of an array as a whole, with the spec of its first element; only in answers, never kept.
    array: ArrayStatus | None = None
    deadline_breach: DeadlineBreach | None = None
    # How often it should save; only in answers to calls for one workload, never kept.
    checkpoint_advice: CheckpointAdvice | None = None
    # The newest report of its processes; only in answers, never kept.
    progress: JobProgress | None = None
    # Of an elastic job with a promised deadline.
    share: ElasticShare | None = None
    # When it is expected to start; only in answers to dry runs, 0 if nobody knows.
    expected_start_ns: Nanoseconds = 0
    # It returns to the queue when its processes have been stopped.
    requeuing: bool = False
    # How many of its attempts ended since their node failed, and were followed by another.
    node_faults: Count = 0
    # How long this run takes in all, by what its first process reports of its progress; None while that is not known.
    progress_runtime_s: Seconds | None = None
    # Its processes start only once the power limit is in force on their GPUs: a budget never holds their default limits.
    limit_before_start: bool = False

    def find_place(self, replica: int) -> Placement | None:
        """Returns where a replica is; None if it is nowhere."""
        return next((place for place in self.placements if place.replica == replica), None)

    @property
    def returns_to_queue(self) -> bool:
        """Returns whether its processes are being stopped so that it waits again, instead of ending."""
        return bool(self.preempted_for) or self.requeuing

    @property
    def exit_code(self) -> int | None:
        """Returns the exit code of its processes as a shell has it, of the first that failed; None while it runs."""
        if not self.phase.is_ended or not self.attempts:
            return None
        failed = (one for one in sorted(self.attempts, key=lambda one: one.ended_ns) if not one.is_success)
        one = next(failed, self.attempts[0])
        return 128 + one.signal if one.signal else 1 if one.exit_code is None else one.exit_code


POINTS_A_CALL_MOST = 1000

Whole = Annotated[int, Range(1, 100_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileLatency:
    """One quantile of a measured latency."""

    quantile: Annotated[float, Range(0.0, 1.0)]
    latency_s: Annotated[float, Range(0.0, 1e6, "s")]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    """One workload in one configuration; None for quantities that were not measured."""

    profile: RequiredLabel
    gpu_model: RequiredLabel
    throughput_hz: Annotated[float, Range(0.0, 1e12, "Hz")]
    mig_profile: Label = ""
    gpus: Whole = 1
    batch: Whole = 1
    processes: Whole = 1
    power_limit_w: Watts | None = None
    clock_mhz: Megahertz | None = None
    label: Label = ""
    latencies: Annotated[tuple[QuantileLatency, ...], Many(16)] = ()
    power_w: Watts | None = None
    memory_bytes: Bytes | None = None
    source: Label = ""

    def violations(self) -> Iterator[Violation]:
        """Checks that latencies rise with their quantile."""
        if self.throughput_hz <= 0.0:
            yield Violation("throughput_hz", "is 0", "leave out points that did not run")
        ordered = sorted(self.latencies, key=lambda one: one.quantile)
        pairs = list(itertools.pairwise(ordered))
        if any(low.quantile == high.quantile for low, high in pairs):
            yield Violation("latencies", "name one quantile twice", "give each quantile once")
        if any(low.latency_s > high.latency_s for low, high in pairs):
            yield Violation("latencies", "fall with the quantile", "a higher quantile is no lower latency")


Share = Annotated[float, Range(-1e6, 1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWorkloadRequest:
    """Scales a workload to `replicas`, or as close as capacity allows."""

    workload_id: Identifier
    replicas: Annotated[int, Range(1, 10_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWorkloadResponse:
    """The workload after scaling."""

    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPointsRequest:
    """Points to store; a later point of the same configuration replaces the earlier one."""

    points: Annotated[tuple[MeasuredPoint, ...], Many(POINTS_A_CALL_MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPointsResponse:
    """How many points are new or changed."""

    recorded: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPointsRequest:
    """Asks for a page of points by profile and configuration; an empty profile means all."""

    profile: Label = ""
    page_size: Uint32 = 0
    page_token: PageToken = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPointsResponse:
    """A page of points."""

    points: Annotated[tuple[MeasuredPoint, ...], Many(POINTS_A_CALL_MOST)] = ()
    next_page_token: PageToken = ""
    total: Uint32 = 0
    omitted: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportProgressRequest:
    """Units of work done since the job started."""

    workload_id: Identifier
    work_done: Annotated[float, Range(0.0, 1e18)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportProgressResponse:
    """The progress was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPromisesRequest:
    """Asks for a page of services by id, then of jobs by id, then of budgets; a page size of 0 means as many as fit."""

    page_size: Uint32 = 0
    page_token: PageToken = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """How a service meets its latency objectives, or follows its load."""

    workload_id: Identifier
    name: Label
    replicas_serving: Count = 0
    replicas_wanted: Count = 0
    phase: Label = ""
    arrived_hz: Annotated[float, Range(0.0, 1e12, "Hz")] | None = None
    objective_s: Seconds = 0.0
    live_s: Seconds | None = None
    modelled_s: Seconds | None = None
    slowness: Annotated[float, Range(0.0, 1e6)] = 1.0
    slowness_error: Annotated[float, Range(0.0, 1e6)] = 0.0
    reason: Sentence = ""
    is_advice: bool = False
    # Of its next replica, until it serves; as its promise states unless it was measured.
    start_s: Seconds = 0.0
    is_start_measured: bool = False
    load_target: LoadTarget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """How a job meets its speed objective."""

    workload_id: Identifier
    name: Label
    phase: Label = ""
    power_limit_w: Watts | None = None
    slowdown: Share | None = None
    saving: Share | None = None
    reason: Sentence = ""
    is_advice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStatus:
    """A power budget, what its GPUs draw, and the claims on it."""

    budget: PowerBudget
    claimed_w: ClusterWatts = 0.0
    shortfall_w: ClusterWatts = 0.0
    measured_w: ClusterWatts | None = None
    measured_gpus: Uint32 = 0
    gpus: Uint32 = 0

    @property
    def over_w(self) -> float:
        """Returns by how much the measured draw exceeds the budget; 0 where it does not, or nothing is read."""
        return max(0.0, (self.measured_w or 0.0) - self.budget.limit_w)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPromisesResponse:
    """Whether services and jobs meet their objectives, and the claims on budgets."""

    services: Annotated[tuple[ServiceStatus, ...], Many(100_000)] = ()
    jobs: Annotated[tuple[JobStatus, ...], Many(100_000)] = ()
    budgets: Annotated[tuple[BudgetStatus, ...], Many(100_000)] = ()
    price_ratio: Annotated[float, Range(0.0, 1e9)] = 1.0
    next_page_token: PageToken = ""
    total: Uint32 = 0
    omitted: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagineBudgetsRequest:
    """Budgets to try in place of those in force."""

    budgets: Annotated[tuple[PowerBudget, ...], Many(100_000)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagineBudgetsResponse:
    """What jobs would get under the budgets."""

    jobs: Annotated[tuple[JobStatus, ...], Many(100_000)] = ()
    budgets: Annotated[tuple[BudgetStatus, ...], Many(100_000)] = ()
