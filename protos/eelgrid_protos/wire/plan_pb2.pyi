from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StandardInput(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STANDARD_INPUT_UNSPECIFIED: _ClassVar[StandardInput]
    STANDARD_INPUT_PIPE: _ClassVar[StandardInput]
    STANDARD_INPUT_TERMINAL: _ClassVar[StandardInput]

class AttemptState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTEMPT_STATE_UNSPECIFIED: _ClassVar[AttemptState]
    ATTEMPT_STATE_RUNNING: _ClassVar[AttemptState]
    ATTEMPT_STATE_ENDED: _ClassVar[AttemptState]
    ATTEMPT_STATE_LOST: _ClassVar[AttemptState]

class ApplyStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    APPLY_STATUS_UNSPECIFIED: _ClassVar[ApplyStatus]
    APPLY_STATUS_APPLIED: _ClassVar[ApplyStatus]
    APPLY_STATUS_OBSERVED: _ClassVar[ApplyStatus]
    APPLY_STATUS_REFUSED: _ClassVar[ApplyStatus]
    APPLY_STATUS_FAILED: _ClassVar[ApplyStatus]
STANDARD_INPUT_UNSPECIFIED: StandardInput
STANDARD_INPUT_PIPE: StandardInput
STANDARD_INPUT_TERMINAL: StandardInput
ATTEMPT_STATE_UNSPECIFIED: AttemptState
ATTEMPT_STATE_RUNNING: AttemptState
ATTEMPT_STATE_ENDED: AttemptState
ATTEMPT_STATE_LOST: AttemptState
APPLY_STATUS_UNSPECIFIED: ApplyStatus
APPLY_STATUS_APPLIED: ApplyStatus
APPLY_STATUS_OBSERVED: ApplyStatus
APPLY_STATUS_REFUSED: ApplyStatus
APPLY_STATUS_FAILED: ApplyStatus

class Slice(_message.Message):
    __slots__ = ("profile", "start", "batch", "processes", "label", "gpu_milli")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    profile: str
    start: int
    batch: int
    processes: int
    label: str
    gpu_milli: int
    def __init__(self, profile: _Optional[str] = ..., start: _Optional[int] = ..., batch: _Optional[int] = ..., processes: _Optional[int] = ..., label: _Optional[str] = ..., gpu_milli: _Optional[int] = ...) -> None: ...

class TerminalSize(_message.Message):
    __slots__ = ("rows", "columns")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    columns: int
    def __init__(self, rows: _Optional[int] = ..., columns: _Optional[int] = ...) -> None: ...

class ProcessSpec(_message.Message):
    __slots__ = ("argv", "environment", "working_directory", "stop_signal", "grace_s", "time_limit_s", "log_bytes_most", "element_variables", "standard_input", "terminal_size", "warn_signal", "warn_before_s")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ElementVariablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ARGV_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    WORKING_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    STOP_SIGNAL_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    LOG_BYTES_MOST_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_VARIABLES_FIELD_NUMBER: _ClassVar[int]
    STANDARD_INPUT_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    WARN_SIGNAL_FIELD_NUMBER: _ClassVar[int]
    WARN_BEFORE_S_FIELD_NUMBER: _ClassVar[int]
    argv: _containers.RepeatedScalarFieldContainer[str]
    environment: _containers.ScalarMap[str, str]
    working_directory: str
    stop_signal: str
    grace_s: float
    time_limit_s: float
    log_bytes_most: int
    element_variables: _containers.ScalarMap[str, str]
    standard_input: StandardInput
    terminal_size: TerminalSize
    warn_signal: str
    warn_before_s: float
    def __init__(self, argv: _Optional[_Iterable[str]] = ..., environment: _Optional[_Mapping[str, str]] = ..., working_directory: _Optional[str] = ..., stop_signal: _Optional[str] = ..., grace_s: _Optional[float] = ..., time_limit_s: _Optional[float] = ..., log_bytes_most: _Optional[int] = ..., element_variables: _Optional[_Mapping[str, str]] = ..., standard_input: _Optional[_Union[StandardInput, str]] = ..., terminal_size: _Optional[_Union[TerminalSize, _Mapping]] = ..., warn_signal: _Optional[str] = ..., warn_before_s: _Optional[float] = ...) -> None: ...

class AttemptStatus(_message.Message):
    __slots__ = ("workload_id", "replica", "attempt", "state", "exit_code", "signal", "reason", "started_ns", "ended_ns", "checkpointed_ns", "checkpoint_s", "gpu_held", "progress", "process_digest", "node_fault")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    ENDED_NS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTED_NS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_S_FIELD_NUMBER: _ClassVar[int]
    GPU_HELD_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NODE_FAULT_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    replica: int
    attempt: int
    state: AttemptState
    exit_code: int
    signal: int
    reason: str
    started_ns: int
    ended_ns: int
    checkpointed_ns: int
    checkpoint_s: float
    gpu_held: bool
    progress: JobProgress
    process_digest: str
    node_fault: str
    def __init__(self, workload_id: _Optional[str] = ..., replica: _Optional[int] = ..., attempt: _Optional[int] = ..., state: _Optional[_Union[AttemptState, str]] = ..., exit_code: _Optional[int] = ..., signal: _Optional[int] = ..., reason: _Optional[str] = ..., started_ns: _Optional[int] = ..., ended_ns: _Optional[int] = ..., checkpointed_ns: _Optional[int] = ..., checkpoint_s: _Optional[float] = ..., gpu_held: bool = ..., progress: _Optional[_Union[JobProgress, _Mapping]] = ..., process_digest: _Optional[str] = ..., node_fault: _Optional[str] = ...) -> None: ...

class JobProgress(_message.Message):
    __slots__ = ("step", "total", "metric", "time_ns")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    step: int
    total: int
    metric: float
    time_ns: int
    def __init__(self, step: _Optional[int] = ..., total: _Optional[int] = ..., metric: _Optional[float] = ..., time_ns: _Optional[int] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("workload_id", "replica", "gpu_uuids", "gpu_milli", "cpu_milli", "memory_bytes", "gpu_instance", "process", "attempt", "replicas", "stop", "checkpoint_interval_s", "interrupted_every_s", "limit_before_start", "run_as")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    GPU_UUIDS_FIELD_NUMBER: _ClassVar[int]
    GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    CPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTED_EVERY_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BEFORE_START_FIELD_NUMBER: _ClassVar[int]
    RUN_AS_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    replica: int
    gpu_uuids: _containers.RepeatedScalarFieldContainer[str]
    gpu_milli: int
    cpu_milli: int
    memory_bytes: int
    gpu_instance: Slice
    process: ProcessSpec
    attempt: int
    replicas: int
    stop: bool
    checkpoint_interval_s: float
    interrupted_every_s: float
    limit_before_start: bool
    run_as: str
    def __init__(self, workload_id: _Optional[str] = ..., replica: _Optional[int] = ..., gpu_uuids: _Optional[_Iterable[str]] = ..., gpu_milli: _Optional[int] = ..., cpu_milli: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., gpu_instance: _Optional[_Union[Slice, _Mapping]] = ..., process: _Optional[_Union[ProcessSpec, _Mapping]] = ..., attempt: _Optional[int] = ..., replicas: _Optional[int] = ..., stop: bool = ..., checkpoint_interval_s: _Optional[float] = ..., interrupted_every_s: _Optional[float] = ..., limit_before_start: bool = ..., run_as: _Optional[str] = ...) -> None: ...

class GpuSetting(_message.Message):
    __slots__ = ("gpu_uuid", "power_limit_w", "sm_clock_min_mhz", "sm_clock_max_mhz", "power_profile")
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_W_FIELD_NUMBER: _ClassVar[int]
    SM_CLOCK_MIN_MHZ_FIELD_NUMBER: _ClassVar[int]
    SM_CLOCK_MAX_MHZ_FIELD_NUMBER: _ClassVar[int]
    POWER_PROFILE_FIELD_NUMBER: _ClassVar[int]
    gpu_uuid: str
    power_limit_w: float
    sm_clock_min_mhz: int
    sm_clock_max_mhz: int
    power_profile: int
    def __init__(self, gpu_uuid: _Optional[str] = ..., power_limit_w: _Optional[float] = ..., sm_clock_min_mhz: _Optional[int] = ..., sm_clock_max_mhz: _Optional[int] = ..., power_profile: _Optional[int] = ...) -> None: ...

class WantedInstance(_message.Message):
    __slots__ = ("profile", "start", "compute_slices")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SLICES_FIELD_NUMBER: _ClassVar[int]
    profile: str
    start: int
    compute_slices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, profile: _Optional[str] = ..., start: _Optional[int] = ..., compute_slices: _Optional[_Iterable[int]] = ...) -> None: ...

class GpuLayout(_message.Message):
    __slots__ = ("gpu_uuid", "mig_enabled", "instances")
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    MIG_ENABLED_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    gpu_uuid: str
    mig_enabled: bool
    instances: _containers.RepeatedCompositeFieldContainer[WantedInstance]
    def __init__(self, gpu_uuid: _Optional[str] = ..., mig_enabled: bool = ..., instances: _Optional[_Iterable[_Union[WantedInstance, _Mapping]]] = ...) -> None: ...

class NodePlan(_message.Message):
    __slots__ = ("node_name", "epoch", "lease_s", "enforce", "assignments", "gpu_settings", "gpu_layouts", "power_budget_w")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ENFORCE_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    GPU_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    GPU_LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    POWER_BUDGET_W_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    epoch: int
    lease_s: float
    enforce: bool
    assignments: _containers.RepeatedCompositeFieldContainer[Assignment]
    gpu_settings: _containers.RepeatedCompositeFieldContainer[GpuSetting]
    gpu_layouts: _containers.RepeatedCompositeFieldContainer[GpuLayout]
    power_budget_w: float
    def __init__(self, node_name: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_s: _Optional[float] = ..., enforce: bool = ..., assignments: _Optional[_Iterable[_Union[Assignment, _Mapping]]] = ..., gpu_settings: _Optional[_Iterable[_Union[GpuSetting, _Mapping]]] = ..., gpu_layouts: _Optional[_Iterable[_Union[GpuLayout, _Mapping]]] = ..., power_budget_w: _Optional[float] = ...) -> None: ...

class ApplyResult(_message.Message):
    __slots__ = ("subject", "status", "detail", "power_limit_w", "rule")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_W_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    subject: str
    status: ApplyStatus
    detail: str
    power_limit_w: float
    rule: str
    def __init__(self, subject: _Optional[str] = ..., status: _Optional[_Union[ApplyStatus, str]] = ..., detail: _Optional[str] = ..., power_limit_w: _Optional[float] = ..., rule: _Optional[str] = ...) -> None: ...

class PlanApplied(_message.Message):
    __slots__ = ("epoch", "status", "results")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    status: ApplyStatus
    results: _containers.RepeatedCompositeFieldContainer[ApplyResult]
    def __init__(self, epoch: _Optional[int] = ..., status: _Optional[_Union[ApplyStatus, str]] = ..., results: _Optional[_Iterable[_Union[ApplyResult, _Mapping]]] = ...) -> None: ...
