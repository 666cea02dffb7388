from eelgrid_protos.wire import gang_pb2 as _gang_pb2
from eelgrid_protos.wire import job_array_pb2 as _job_array_pb2
from eelgrid_protos.wire import plan_pb2 as _plan_pb2
from eelgrid_protos.wire import promise_pb2 as _promise_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkloadKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKLOAD_KIND_UNSPECIFIED: _ClassVar[WorkloadKind]
    WORKLOAD_KIND_INFERENCE_SERVICE: _ClassVar[WorkloadKind]
    WORKLOAD_KIND_TRAINING_JOB: _ClassVar[WorkloadKind]
    WORKLOAD_KIND_BATCH_JOB: _ClassVar[WorkloadKind]

class Locality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOCALITY_UNSPECIFIED: _ClassVar[Locality]
    LOCALITY_PACK: _ClassVar[Locality]
    LOCALITY_SPREAD: _ClassVar[Locality]

class Mobility(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MOBILITY_UNSPECIFIED: _ClassVar[Mobility]
    MOBILITY_FIXED: _ClassVar[Mobility]
    MOBILITY_MOVABLE: _ClassVar[Mobility]
    MOBILITY_RESTARTABLE: _ClassVar[Mobility]

class DependencyCondition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEPENDENCY_CONDITION_UNSPECIFIED: _ClassVar[DependencyCondition]
    DEPENDENCY_CONDITION_SUCCEEDED: _ClassVar[DependencyCondition]
    DEPENDENCY_CONDITION_ENDED: _ClassVar[DependencyCondition]
    DEPENDENCY_CONDITION_NOT_SUCCEEDED: _ClassVar[DependencyCondition]

class RuntimeSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUNTIME_SOURCE_UNSPECIFIED: _ClassVar[RuntimeSource]
    RUNTIME_SOURCE_USER: _ClassVar[RuntimeSource]
    RUNTIME_SOURCE_TIME_LIMIT: _ClassVar[RuntimeSource]
    RUNTIME_SOURCE_HISTORY: _ClassVar[RuntimeSource]
    RUNTIME_SOURCE_DEFAULT: _ClassVar[RuntimeSource]
    RUNTIME_SOURCE_PROFILE: _ClassVar[RuntimeSource]
    RUNTIME_SOURCE_PROGRESS: _ClassVar[RuntimeSource]

class CheckpointCostSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECKPOINT_COST_SOURCE_UNSPECIFIED: _ClassVar[CheckpointCostSource]
    CHECKPOINT_COST_SOURCE_THIS_RUN: _ClassVar[CheckpointCostSource]
    CHECKPOINT_COST_SOURCE_EARLIER_RUNS: _ClassVar[CheckpointCostSource]

class WorkloadPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKLOAD_PHASE_UNSPECIFIED: _ClassVar[WorkloadPhase]
    WORKLOAD_PHASE_PENDING: _ClassVar[WorkloadPhase]
    WORKLOAD_PHASE_PLACED: _ClassVar[WorkloadPhase]
    WORKLOAD_PHASE_CANCELLED: _ClassVar[WorkloadPhase]
    WORKLOAD_PHASE_SUCCEEDED: _ClassVar[WorkloadPhase]
    WORKLOAD_PHASE_FAILED: _ClassVar[WorkloadPhase]

class WorkloadView(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKLOAD_VIEW_UNSPECIFIED: _ClassVar[WorkloadView]
    WORKLOAD_VIEW_FULL: _ClassVar[WorkloadView]
    WORKLOAD_VIEW_SUMMARY: _ClassVar[WorkloadView]
WORKLOAD_KIND_UNSPECIFIED: WorkloadKind
WORKLOAD_KIND_INFERENCE_SERVICE: WorkloadKind
WORKLOAD_KIND_TRAINING_JOB: WorkloadKind
WORKLOAD_KIND_BATCH_JOB: WorkloadKind
LOCALITY_UNSPECIFIED: Locality
LOCALITY_PACK: Locality
LOCALITY_SPREAD: Locality
MOBILITY_UNSPECIFIED: Mobility
MOBILITY_FIXED: Mobility
MOBILITY_MOVABLE: Mobility
MOBILITY_RESTARTABLE: Mobility
DEPENDENCY_CONDITION_UNSPECIFIED: DependencyCondition
DEPENDENCY_CONDITION_SUCCEEDED: DependencyCondition
DEPENDENCY_CONDITION_ENDED: DependencyCondition
DEPENDENCY_CONDITION_NOT_SUCCEEDED: DependencyCondition
RUNTIME_SOURCE_UNSPECIFIED: RuntimeSource
RUNTIME_SOURCE_USER: RuntimeSource
RUNTIME_SOURCE_TIME_LIMIT: RuntimeSource
RUNTIME_SOURCE_HISTORY: RuntimeSource
RUNTIME_SOURCE_DEFAULT: RuntimeSource
RUNTIME_SOURCE_PROFILE: RuntimeSource
RUNTIME_SOURCE_PROGRESS: RuntimeSource
CHECKPOINT_COST_SOURCE_UNSPECIFIED: CheckpointCostSource
CHECKPOINT_COST_SOURCE_THIS_RUN: CheckpointCostSource
CHECKPOINT_COST_SOURCE_EARLIER_RUNS: CheckpointCostSource
WORKLOAD_PHASE_UNSPECIFIED: WorkloadPhase
WORKLOAD_PHASE_PENDING: WorkloadPhase
WORKLOAD_PHASE_PLACED: WorkloadPhase
WORKLOAD_PHASE_CANCELLED: WorkloadPhase
WORKLOAD_PHASE_SUCCEEDED: WorkloadPhase
WORKLOAD_PHASE_FAILED: WorkloadPhase
WORKLOAD_VIEW_UNSPECIFIED: WorkloadView
WORKLOAD_VIEW_FULL: WorkloadView
WORKLOAD_VIEW_SUMMARY: WorkloadView

class ResourceRequest(_message.Message):
    __slots__ = ("cpu_milli", "memory_bytes", "gpu_count", "gpu_milli", "gpu_models")
    CPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_COUNT_FIELD_NUMBER: _ClassVar[int]
    GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    GPU_MODELS_FIELD_NUMBER: _ClassVar[int]
    cpu_milli: int
    memory_bytes: int
    gpu_count: int
    gpu_milli: int
    gpu_models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cpu_milli: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., gpu_count: _Optional[int] = ..., gpu_milli: _Optional[int] = ..., gpu_models: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkloadSpec(_message.Message):
    __slots__ = ("name", "namespace", "user", "queue", "kind", "replicas", "request", "priority", "labels", "locality", "mobility", "service", "training", "required_traits", "process", "never_preempts", "priority_class", "evicted_by_engine", "expected_runtime_s", "schedule", "array", "deadline", "gang", "gpu_preference", "model_data", "gpu_sharing")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    LOCALITY_FIELD_NUMBER: _ClassVar[int]
    MOBILITY_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_TRAITS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    NEVER_PREEMPTS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_CLASS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BY_ENGINE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_RUNTIME_S_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    GANG_FIELD_NUMBER: _ClassVar[int]
    GPU_PREFERENCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_DATA_FIELD_NUMBER: _ClassVar[int]
    GPU_SHARING_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: str
    user: str
    queue: str
    kind: WorkloadKind
    replicas: int
    request: ResourceRequest
    priority: int
    labels: _containers.ScalarMap[str, str]
    locality: Locality
    mobility: Mobility
    service: _promise_pb2.ServicePromise
    training: _promise_pb2.TrainingPromise
    required_traits: _containers.RepeatedScalarFieldContainer[str]
    process: _plan_pb2.ProcessSpec
    never_preempts: bool
    priority_class: str
    evicted_by_engine: bool
    expected_runtime_s: float
    schedule: JobSchedule
    array: _job_array_pb2.ArrayElement
    deadline: JobDeadline
    gang: _gang_pb2.GangPart
    gpu_preference: GpuPreference
    model_data: ModelData
    gpu_sharing: GpuSharing
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[str] = ..., user: _Optional[str] = ..., queue: _Optional[str] = ..., kind: _Optional[_Union[WorkloadKind, str]] = ..., replicas: _Optional[int] = ..., request: _Optional[_Union[ResourceRequest, _Mapping]] = ..., priority: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ..., locality: _Optional[_Union[Locality, str]] = ..., mobility: _Optional[_Union[Mobility, str]] = ..., service: _Optional[_Union[_promise_pb2.ServicePromise, _Mapping]] = ..., training: _Optional[_Union[_promise_pb2.TrainingPromise, _Mapping]] = ..., required_traits: _Optional[_Iterable[str]] = ..., process: _Optional[_Union[_plan_pb2.ProcessSpec, _Mapping]] = ..., never_preempts: bool = ..., priority_class: _Optional[str] = ..., evicted_by_engine: bool = ..., expected_runtime_s: _Optional[float] = ..., schedule: _Optional[_Union[JobSchedule, _Mapping]] = ..., array: _Optional[_Union[_job_array_pb2.ArrayElement, _Mapping]] = ..., deadline: _Optional[_Union[JobDeadline, _Mapping]] = ..., gang: _Optional[_Union[_gang_pb2.GangPart, _Mapping]] = ..., gpu_preference: _Optional[_Union[GpuPreference, _Mapping]] = ..., model_data: _Optional[_Union[ModelData, _Mapping]] = ..., gpu_sharing: _Optional[_Union[GpuSharing, _Mapping]] = ...) -> None: ...

class GpuSharing(_message.Message):
    __slots__ = ("load", "slowdown_most")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_MOST_FIELD_NUMBER: _ClassVar[int]
    load: str
    slowdown_most: float
    def __init__(self, load: _Optional[str] = ..., slowdown_most: _Optional[float] = ...) -> None: ...

class ModelData(_message.Message):
    __slots__ = ("data_names", "worth_w")
    DATA_NAMES_FIELD_NUMBER: _ClassVar[int]
    WORTH_W_FIELD_NUMBER: _ClassVar[int]
    data_names: _containers.RepeatedScalarFieldContainer[str]
    worth_w: float
    def __init__(self, data_names: _Optional[_Iterable[str]] = ..., worth_w: _Optional[float] = ...) -> None: ...

class GpuPreference(_message.Message):
    __slots__ = ("models", "worth_w")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    WORTH_W_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedScalarFieldContainer[str]
    worth_w: float
    def __init__(self, models: _Optional[_Iterable[str]] = ..., worth_w: _Optional[float] = ...) -> None: ...

class JobDeadline(_message.Message):
    __slots__ = ("end_ns", "best_effort")
    END_NS_FIELD_NUMBER: _ClassVar[int]
    BEST_EFFORT_FIELD_NUMBER: _ClassVar[int]
    end_ns: int
    best_effort: bool
    def __init__(self, end_ns: _Optional[int] = ..., best_effort: bool = ...) -> None: ...

class DeadlineBreach(_message.Message):
    __slots__ = ("time_ns", "cause")
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    time_ns: int
    cause: str
    def __init__(self, time_ns: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class JobDependency(_message.Message):
    __slots__ = ("workload_id", "condition", "each")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    condition: DependencyCondition
    each: bool
    def __init__(self, workload_id: _Optional[str] = ..., condition: _Optional[_Union[DependencyCondition, str]] = ..., each: bool = ...) -> None: ...

class JobSchedule(_message.Message):
    __slots__ = ("begin_ns", "after", "retries_most", "no_requeue")
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    RETRIES_MOST_FIELD_NUMBER: _ClassVar[int]
    NO_REQUEUE_FIELD_NUMBER: _ClassVar[int]
    begin_ns: int
    after: _containers.RepeatedCompositeFieldContainer[JobDependency]
    retries_most: int
    no_requeue: bool
    def __init__(self, begin_ns: _Optional[int] = ..., after: _Optional[_Iterable[_Union[JobDependency, _Mapping]]] = ..., retries_most: _Optional[int] = ..., no_requeue: bool = ...) -> None: ...

class RuntimeEstimate(_message.Message):
    __slots__ = ("expected_s", "source")
    EXPECTED_S_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    expected_s: float
    source: RuntimeSource
    def __init__(self, expected_s: _Optional[float] = ..., source: _Optional[_Union[RuntimeSource, str]] = ...) -> None: ...

class CheckpointAdvice(_message.Message):
    __slots__ = ("interval_s", "cost_s", "cost_source", "mean_between_s", "queue", "queue_interruptions", "queue_job_s", "pool", "pool_losses", "pool_gpu_s")
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    COST_SOURCE_FIELD_NUMBER: _ClassVar[int]
    MEAN_BETWEEN_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_INTERRUPTIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_JOB_S_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    POOL_LOSSES_FIELD_NUMBER: _ClassVar[int]
    POOL_GPU_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    cost_s: float
    cost_source: CheckpointCostSource
    mean_between_s: float
    queue: str
    queue_interruptions: float
    queue_job_s: float
    pool: str
    pool_losses: float
    pool_gpu_s: float
    def __init__(self, interval_s: _Optional[float] = ..., cost_s: _Optional[float] = ..., cost_source: _Optional[_Union[CheckpointCostSource, str]] = ..., mean_between_s: _Optional[float] = ..., queue: _Optional[str] = ..., queue_interruptions: _Optional[float] = ..., queue_job_s: _Optional[float] = ..., pool: _Optional[str] = ..., pool_losses: _Optional[float] = ..., pool_gpu_s: _Optional[float] = ...) -> None: ...

class StartPromise(_message.Message):
    __slots__ = ("start_ns", "waits_for", "ends", "source", "cause", "placements", "assumes")
    START_NS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    ASSUMES_FIELD_NUMBER: _ClassVar[int]
    start_ns: int
    waits_for: _containers.RepeatedScalarFieldContainer[str]
    ends: int
    source: RuntimeSource
    cause: str
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    assumes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, start_ns: _Optional[int] = ..., waits_for: _Optional[_Iterable[str]] = ..., ends: _Optional[int] = ..., source: _Optional[_Union[RuntimeSource, str]] = ..., cause: _Optional[str] = ..., placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., assumes: _Optional[_Iterable[str]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("replica", "node_name", "gpu_uuids", "gpu_indexes", "gpu_instance")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    GPU_UUIDS_FIELD_NUMBER: _ClassVar[int]
    GPU_INDEXES_FIELD_NUMBER: _ClassVar[int]
    GPU_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    replica: int
    node_name: str
    gpu_uuids: _containers.RepeatedScalarFieldContainer[str]
    gpu_indexes: _containers.RepeatedScalarFieldContainer[int]
    gpu_instance: _plan_pb2.Slice
    def __init__(self, replica: _Optional[int] = ..., node_name: _Optional[str] = ..., gpu_uuids: _Optional[_Iterable[str]] = ..., gpu_indexes: _Optional[_Iterable[int]] = ..., gpu_instance: _Optional[_Union[_plan_pb2.Slice, _Mapping]] = ...) -> None: ...

class Workload(_message.Message):
    __slots__ = ("workload_id", "spec", "phase", "reason", "placements", "submitted_ns", "placed_ns", "ended_ns", "revision", "power_limit_w", "replicas_begun", "owner", "lost_replicas", "power_w", "attempt", "attempts", "stopping_ns", "preempted_for", "preemptions", "promise", "queue_position", "held_by", "failures", "not_before_ns", "array", "deadline_breach", "checkpoint_advice", "progress", "share", "expected_start_ns", "requeuing", "node_faults", "progress_runtime_s", "limit_before_start")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_NS_FIELD_NUMBER: _ClassVar[int]
    PLACED_NS_FIELD_NUMBER: _ClassVar[int]
    ENDED_NS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_W_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LOST_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    STOPPING_NS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FOR_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMISE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_NS_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_BREACH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ADVICE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_START_NS_FIELD_NUMBER: _ClassVar[int]
    REQUEUING_FIELD_NUMBER: _ClassVar[int]
    NODE_FAULTS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_RUNTIME_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BEFORE_START_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    spec: WorkloadSpec
    phase: WorkloadPhase
    reason: str
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    submitted_ns: int
    placed_ns: int
    ended_ns: int
    revision: int
    power_limit_w: float
    replicas_begun: int
    owner: str
    lost_replicas: _containers.RepeatedScalarFieldContainer[int]
    power_w: float
    attempt: int
    attempts: _containers.RepeatedCompositeFieldContainer[_plan_pb2.AttemptStatus]
    stopping_ns: int
    preempted_for: str
    preemptions: int
    promise: StartPromise
    queue_position: int
    held_by: str
    failures: int
    not_before_ns: int
    array: _job_array_pb2.ArrayStatus
    deadline_breach: DeadlineBreach
    checkpoint_advice: CheckpointAdvice
    progress: _plan_pb2.JobProgress
    share: ElasticShare
    expected_start_ns: int
    requeuing: bool
    node_faults: int
    progress_runtime_s: float
    limit_before_start: bool
    def __init__(self, workload_id: _Optional[str] = ..., spec: _Optional[_Union[WorkloadSpec, _Mapping]] = ..., phase: _Optional[_Union[WorkloadPhase, str]] = ..., reason: _Optional[str] = ..., placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., submitted_ns: _Optional[int] = ..., placed_ns: _Optional[int] = ..., ended_ns: _Optional[int] = ..., revision: _Optional[int] = ..., power_limit_w: _Optional[float] = ..., replicas_begun: _Optional[int] = ..., owner: _Optional[str] = ..., lost_replicas: _Optional[_Iterable[int]] = ..., power_w: _Optional[float] = ..., attempt: _Optional[int] = ..., attempts: _Optional[_Iterable[_Union[_plan_pb2.AttemptStatus, _Mapping]]] = ..., stopping_ns: _Optional[int] = ..., preempted_for: _Optional[str] = ..., preemptions: _Optional[int] = ..., promise: _Optional[_Union[StartPromise, _Mapping]] = ..., queue_position: _Optional[int] = ..., held_by: _Optional[str] = ..., failures: _Optional[int] = ..., not_before_ns: _Optional[int] = ..., array: _Optional[_Union[_job_array_pb2.ArrayStatus, _Mapping]] = ..., deadline_breach: _Optional[_Union[DeadlineBreach, _Mapping]] = ..., checkpoint_advice: _Optional[_Union[CheckpointAdvice, _Mapping]] = ..., progress: _Optional[_Union[_plan_pb2.JobProgress, _Mapping]] = ..., share: _Optional[_Union[ElasticShare, _Mapping]] = ..., expected_start_ns: _Optional[int] = ..., requeuing: bool = ..., node_faults: _Optional[int] = ..., progress_runtime_s: _Optional[float] = ..., limit_before_start: bool = ...) -> None: ...

class ElasticShare(_message.Message):
    __slots__ = ("replicas", "replicas_asked", "rates", "work_done", "at_ns", "pace", "gpu_models_asked")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_ASKED_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    WORK_DONE_FIELD_NUMBER: _ClassVar[int]
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    GPU_MODELS_ASKED_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    replicas_asked: int
    rates: _containers.RepeatedCompositeFieldContainer[ScalingRate]
    work_done: float
    at_ns: int
    pace: float
    gpu_models_asked: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, replicas: _Optional[int] = ..., replicas_asked: _Optional[int] = ..., rates: _Optional[_Iterable[_Union[ScalingRate, _Mapping]]] = ..., work_done: _Optional[float] = ..., at_ns: _Optional[int] = ..., pace: _Optional[float] = ..., gpu_models_asked: _Optional[_Iterable[str]] = ...) -> None: ...

class ScalingRate(_message.Message):
    __slots__ = ("replicas", "rate_hz")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    RATE_HZ_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    rate_hz: float
    def __init__(self, replicas: _Optional[int] = ..., rate_hz: _Optional[float] = ...) -> None: ...

class WorkloadSummary(_message.Message):
    __slots__ = ("workload_id", "name", "namespace", "user", "owner", "queue", "priority", "kind", "phase", "reason", "replicas", "request", "submitted_ns", "started_ns", "stopping_ns", "ended_ns", "runs_processes", "processes_reported", "exit_code", "progress", "array", "promised_start_ns", "deadline", "deadline_broken", "queue_position")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_NS_FIELD_NUMBER: _ClassVar[int]
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    STOPPING_NS_FIELD_NUMBER: _ClassVar[int]
    ENDED_NS_FIELD_NUMBER: _ClassVar[int]
    RUNS_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_REPORTED_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    PROMISED_START_NS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_BROKEN_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    name: str
    namespace: str
    user: str
    owner: str
    queue: str
    priority: int
    kind: WorkloadKind
    phase: WorkloadPhase
    reason: str
    replicas: int
    request: ResourceRequest
    submitted_ns: int
    started_ns: int
    stopping_ns: int
    ended_ns: int
    runs_processes: bool
    processes_reported: int
    exit_code: int
    progress: _plan_pb2.JobProgress
    array: _job_array_pb2.ArrayStatus
    promised_start_ns: int
    deadline: JobDeadline
    deadline_broken: bool
    queue_position: int
    def __init__(self, workload_id: _Optional[str] = ..., name: _Optional[str] = ..., namespace: _Optional[str] = ..., user: _Optional[str] = ..., owner: _Optional[str] = ..., queue: _Optional[str] = ..., priority: _Optional[int] = ..., kind: _Optional[_Union[WorkloadKind, str]] = ..., phase: _Optional[_Union[WorkloadPhase, str]] = ..., reason: _Optional[str] = ..., replicas: _Optional[int] = ..., request: _Optional[_Union[ResourceRequest, _Mapping]] = ..., submitted_ns: _Optional[int] = ..., started_ns: _Optional[int] = ..., stopping_ns: _Optional[int] = ..., ended_ns: _Optional[int] = ..., runs_processes: bool = ..., processes_reported: _Optional[int] = ..., exit_code: _Optional[int] = ..., progress: _Optional[_Union[_plan_pb2.JobProgress, _Mapping]] = ..., array: _Optional[_Union[_job_array_pb2.ArrayStatus, _Mapping]] = ..., promised_start_ns: _Optional[int] = ..., deadline: _Optional[_Union[JobDeadline, _Mapping]] = ..., deadline_broken: bool = ..., queue_position: _Optional[int] = ...) -> None: ...

class CostTerm(_message.Message):
    __slots__ = ("name", "cost_w")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COST_W_FIELD_NUMBER: _ClassVar[int]
    name: str
    cost_w: float
    def __init__(self, name: _Optional[str] = ..., cost_w: _Optional[float] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("node_name", "gpu_indexes", "cost_w", "terms")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    GPU_INDEXES_FIELD_NUMBER: _ClassVar[int]
    COST_W_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    gpu_indexes: _containers.RepeatedScalarFieldContainer[int]
    cost_w: float
    terms: _containers.RepeatedCompositeFieldContainer[CostTerm]
    def __init__(self, node_name: _Optional[str] = ..., gpu_indexes: _Optional[_Iterable[int]] = ..., cost_w: _Optional[float] = ..., terms: _Optional[_Iterable[_Union[CostTerm, _Mapping]]] = ...) -> None: ...

class Removal(_message.Message):
    __slots__ = ("constraint", "nodes")
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    constraint: str
    nodes: int
    def __init__(self, constraint: _Optional[str] = ..., nodes: _Optional[int] = ...) -> None: ...

class ReplicaExplanation(_message.Message):
    __slots__ = ("replica", "candidates", "feasible_nodes", "removals")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    FEASIBLE_NODES_FIELD_NUMBER: _ClassVar[int]
    REMOVALS_FIELD_NUMBER: _ClassVar[int]
    replica: int
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    feasible_nodes: int
    removals: _containers.RepeatedCompositeFieldContainer[Removal]
    def __init__(self, replica: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., feasible_nodes: _Optional[int] = ..., removals: _Optional[_Iterable[_Union[Removal, _Mapping]]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("workload", "replicas", "remedy", "constraint", "runtime")
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    workload: Workload
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaExplanation]
    remedy: str
    constraint: str
    runtime: RuntimeEstimate
    def __init__(self, workload: _Optional[_Union[Workload, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaExplanation, _Mapping]]] = ..., remedy: _Optional[str] = ..., constraint: _Optional[str] = ..., runtime: _Optional[_Union[RuntimeEstimate, _Mapping]] = ...) -> None: ...
