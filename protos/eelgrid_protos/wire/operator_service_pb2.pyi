from eelgrid_protos.wire import audit_pb2 as _audit_pb2
from eelgrid_protos.wire import job_array_pb2 as _job_array_pb2
from eelgrid_protos.wire import ledger_pb2 as _ledger_pb2
from eelgrid_protos.wire import moves_pb2 as _moves_pb2
from eelgrid_protos.wire import node_pb2 as _node_pb2
from eelgrid_protos.wire import overview_pb2 as _overview_pb2
from eelgrid_protos.wire import partition_pb2 as _partition_pb2
from eelgrid_protos.wire import plan_pb2 as _plan_pb2
from eelgrid_protos.wire import policy_pb2 as _policy_pb2
from eelgrid_protos.wire import profile_pb2 as _profile_pb2
from eelgrid_protos.wire import promise_pb2 as _promise_pb2
from eelgrid_protos.wire import queue_pb2 as _queue_pb2
from eelgrid_protos.wire import spending_pb2 as _spending_pb2
from eelgrid_protos.wire import whatif_pb2 as _whatif_pb2
from eelgrid_protos.wire import workload_pb2 as _workload_pb2
from google.api import annotations_pb2 as _annotations_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_READY: _ClassVar[NodeState]
    NODE_STATE_LOST: _ClassVar[NodeState]

class DrainOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAIN_OUTCOME_UNSPECIFIED: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_MOVES: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_FINISHES: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_REQUEUED: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_STAYS: _ClassVar[DrainOutcome]
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_READY: NodeState
NODE_STATE_LOST: NodeState
DRAIN_OUTCOME_UNSPECIFIED: DrainOutcome
DRAIN_OUTCOME_MOVES: DrainOutcome
DRAIN_OUTCOME_FINISHES: DrainOutcome
DRAIN_OUTCOME_REQUEUED: DrainOutcome
DRAIN_OUTCOME_STAYS: DrainOutcome

class WhoAmIRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WhoAmIResponse(_message.Message):
    __slots__ = ("subject", "roles", "node_names", "roles_demanded", "not_after_ns", "user", "rights", "controller_version")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    NODE_NAMES_FIELD_NUMBER: _ClassVar[int]
    ROLES_DEMANDED_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_NS_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_VERSION_FIELD_NUMBER: _ClassVar[int]
    subject: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    node_names: _containers.RepeatedScalarFieldContainer[str]
    roles_demanded: bool
    not_after_ns: int
    user: str
    rights: _containers.RepeatedScalarFieldContainer[str]
    controller_version: str
    def __init__(self, subject: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., node_names: _Optional[_Iterable[str]] = ..., roles_demanded: bool = ..., not_after_ns: _Optional[int] = ..., user: _Optional[str] = ..., rights: _Optional[_Iterable[str]] = ..., controller_version: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("inventory", "state", "allocated_cpu_milli", "allocated_memory_bytes", "allocated_gpu_milli", "workloads", "power_w", "sample_age_s", "plan_epoch", "applied_epoch", "samples_received", "samples_lost", "ahead_epoch", "unknown_workload_ids", "cordons")
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_CPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    WORKLOADS_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    PLAN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    APPLIED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_LOST_FIELD_NUMBER: _ClassVar[int]
    AHEAD_EPOCH_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_WORKLOAD_IDS_FIELD_NUMBER: _ClassVar[int]
    CORDONS_FIELD_NUMBER: _ClassVar[int]
    inventory: _node_pb2.Inventory
    state: NodeState
    allocated_cpu_milli: int
    allocated_memory_bytes: int
    allocated_gpu_milli: int
    workloads: int
    power_w: float
    sample_age_s: float
    plan_epoch: int
    applied_epoch: int
    samples_received: int
    samples_lost: int
    ahead_epoch: int
    unknown_workload_ids: _containers.RepeatedScalarFieldContainer[str]
    cordons: _containers.RepeatedCompositeFieldContainer[CordonStatus]
    def __init__(self, inventory: _Optional[_Union[_node_pb2.Inventory, _Mapping]] = ..., state: _Optional[_Union[NodeState, str]] = ..., allocated_cpu_milli: _Optional[int] = ..., allocated_memory_bytes: _Optional[int] = ..., allocated_gpu_milli: _Optional[int] = ..., workloads: _Optional[int] = ..., power_w: _Optional[float] = ..., sample_age_s: _Optional[float] = ..., plan_epoch: _Optional[int] = ..., applied_epoch: _Optional[int] = ..., samples_received: _Optional[int] = ..., samples_lost: _Optional[int] = ..., ahead_epoch: _Optional[int] = ..., unknown_workload_ids: _Optional[_Iterable[str]] = ..., cordons: _Optional[_Iterable[_Union[CordonStatus, _Mapping]]] = ...) -> None: ...

class CordonStatus(_message.Message):
    __slots__ = ("gpu_uuid", "reason", "user", "since_ns", "workloads", "draining", "deadline_ns", "force")
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    WORKLOADS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    gpu_uuid: str
    reason: str
    user: str
    since_ns: int
    workloads: int
    draining: bool
    deadline_ns: int
    force: bool
    def __init__(self, gpu_uuid: _Optional[str] = ..., reason: _Optional[str] = ..., user: _Optional[str] = ..., since_ns: _Optional[int] = ..., workloads: _Optional[int] = ..., draining: bool = ..., deadline_ns: _Optional[int] = ..., force: bool = ...) -> None: ...

class GpuHolder(_message.Message):
    __slots__ = ("workload_id", "name", "user")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    name: str
    user: str
    def __init__(self, workload_id: _Optional[str] = ..., name: _Optional[str] = ..., user: _Optional[str] = ...) -> None: ...

class GpuStatus(_message.Message):
    __slots__ = ("node_name", "gpu", "node_state", "allocated_milli", "workload_ids", "power_w", "energy_j", "utilization_ratio", "memory_used_bytes", "temperature_c", "sample_age_s", "holders", "cordons")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    NODE_STATE_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_MILLI_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_IDS_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    ENERGY_J_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_RATIO_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    CORDONS_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    gpu: _node_pb2.Gpu
    node_state: NodeState
    allocated_milli: int
    workload_ids: _containers.RepeatedScalarFieldContainer[str]
    power_w: float
    energy_j: float
    utilization_ratio: float
    memory_used_bytes: int
    temperature_c: float
    sample_age_s: float
    holders: _containers.RepeatedCompositeFieldContainer[GpuHolder]
    cordons: _containers.RepeatedCompositeFieldContainer[CordonStatus]
    def __init__(self, node_name: _Optional[str] = ..., gpu: _Optional[_Union[_node_pb2.Gpu, _Mapping]] = ..., node_state: _Optional[_Union[NodeState, str]] = ..., allocated_milli: _Optional[int] = ..., workload_ids: _Optional[_Iterable[str]] = ..., power_w: _Optional[float] = ..., energy_j: _Optional[float] = ..., utilization_ratio: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., temperature_c: _Optional[float] = ..., sample_age_s: _Optional[float] = ..., holders: _Optional[_Iterable[_Union[GpuHolder, _Mapping]]] = ..., cordons: _Optional[_Iterable[_Union[CordonStatus, _Mapping]]] = ...) -> None: ...

class ReasonCount(_message.Message):
    __slots__ = ("reason", "workloads")
    REASON_FIELD_NUMBER: _ClassVar[int]
    WORKLOADS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    workloads: int
    def __init__(self, reason: _Optional[str] = ..., workloads: _Optional[int] = ...) -> None: ...

class ModelSummary(_message.Message):
    __slots__ = ("model", "gpus", "allocated_gpu_milli", "measured_power_w")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    MEASURED_POWER_W_FIELD_NUMBER: _ClassVar[int]
    model: str
    gpus: int
    allocated_gpu_milli: int
    measured_power_w: float
    def __init__(self, model: _Optional[str] = ..., gpus: _Optional[int] = ..., allocated_gpu_milli: _Optional[int] = ..., measured_power_w: _Optional[float] = ...) -> None: ...

class Summary(_message.Message):
    __slots__ = ("time_ns", "nodes_ready", "nodes_lost", "gpus", "allocated_gpu_milli", "cpu_milli", "allocated_cpu_milli", "pending", "placed", "cancelled", "refused", "pending_reasons", "modelled_power_w", "measured_power_w", "measured_gpus", "samples_received", "samples_lost", "decision_p50_s", "decision_p99_s", "decisions", "models", "revision", "gpus_lost", "oldest_pending_ns")
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    NODES_READY_FIELD_NUMBER: _ClassVar[int]
    NODES_LOST_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    CPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_CPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PENDING_REASONS_FIELD_NUMBER: _ClassVar[int]
    MODELLED_POWER_W_FIELD_NUMBER: _ClassVar[int]
    MEASURED_POWER_W_FIELD_NUMBER: _ClassVar[int]
    MEASURED_GPUS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_LOST_FIELD_NUMBER: _ClassVar[int]
    DECISION_P50_S_FIELD_NUMBER: _ClassVar[int]
    DECISION_P99_S_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    GPUS_LOST_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PENDING_NS_FIELD_NUMBER: _ClassVar[int]
    time_ns: int
    nodes_ready: int
    nodes_lost: int
    gpus: int
    allocated_gpu_milli: int
    cpu_milli: int
    allocated_cpu_milli: int
    pending: int
    placed: int
    cancelled: int
    refused: int
    pending_reasons: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    modelled_power_w: float
    measured_power_w: float
    measured_gpus: int
    samples_received: int
    samples_lost: int
    decision_p50_s: float
    decision_p99_s: float
    decisions: int
    models: _containers.RepeatedCompositeFieldContainer[ModelSummary]
    revision: int
    gpus_lost: int
    oldest_pending_ns: int
    def __init__(self, time_ns: _Optional[int] = ..., nodes_ready: _Optional[int] = ..., nodes_lost: _Optional[int] = ..., gpus: _Optional[int] = ..., allocated_gpu_milli: _Optional[int] = ..., cpu_milli: _Optional[int] = ..., allocated_cpu_milli: _Optional[int] = ..., pending: _Optional[int] = ..., placed: _Optional[int] = ..., cancelled: _Optional[int] = ..., refused: _Optional[int] = ..., pending_reasons: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., modelled_power_w: _Optional[float] = ..., measured_power_w: _Optional[float] = ..., measured_gpus: _Optional[int] = ..., samples_received: _Optional[int] = ..., samples_lost: _Optional[int] = ..., decision_p50_s: _Optional[float] = ..., decision_p99_s: _Optional[float] = ..., decisions: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelSummary, _Mapping]]] = ..., revision: _Optional[int] = ..., gpus_lost: _Optional[int] = ..., oldest_pending_ns: _Optional[int] = ...) -> None: ...

class GetSummaryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSummaryResponse(_message.Message):
    __slots__ = ("summary",)
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    summary: Summary
    def __init__(self, summary: _Optional[_Union[Summary, _Mapping]] = ...) -> None: ...

class WatchSummaryRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class WatchSummaryResponse(_message.Message):
    __slots__ = ("summary",)
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    summary: Summary
    def __init__(self, summary: _Optional[_Union[Summary, _Mapping]] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "states", "pool", "gpu_model", "name_contains")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    GPU_MODEL_FIELD_NUMBER: _ClassVar[int]
    NAME_CONTAINS_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    states: _containers.RepeatedScalarFieldContainer[NodeState]
    pool: str
    gpu_model: str
    name_contains: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., states: _Optional[_Iterable[_Union[NodeState, str]]] = ..., pool: _Optional[str] = ..., gpu_model: _Optional[str] = ..., name_contains: _Optional[str] = ...) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes", "next_page_token", "total", "omitted")
    NODES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    next_page_token: str
    total: int
    omitted: int
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ..., omitted: _Optional[int] = ...) -> None: ...

class ReconcileNodeRequest(_message.Message):
    __slots__ = ("node_name",)
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    def __init__(self, node_name: _Optional[str] = ...) -> None: ...

class ReconcileNodeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ...) -> None: ...

class ListGpusRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "node_name", "gpu_model", "min_free_milli")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    GPU_MODEL_FIELD_NUMBER: _ClassVar[int]
    MIN_FREE_MILLI_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    node_name: str
    gpu_model: str
    min_free_milli: int
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., node_name: _Optional[str] = ..., gpu_model: _Optional[str] = ..., min_free_milli: _Optional[int] = ...) -> None: ...

class ListGpusResponse(_message.Message):
    __slots__ = ("gpus", "next_page_token", "total", "omitted")
    GPUS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    gpus: _containers.RepeatedCompositeFieldContainer[GpuStatus]
    next_page_token: str
    total: int
    omitted: int
    def __init__(self, gpus: _Optional[_Iterable[_Union[GpuStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ..., omitted: _Optional[int] = ...) -> None: ...

class SubmitWorkloadRequest(_message.Message):
    __slots__ = ("spec", "workload_id", "dry_run", "hold", "array", "cancelled")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    spec: _workload_pb2.WorkloadSpec
    workload_id: str
    dry_run: bool
    hold: bool
    array: _job_array_pb2.JobArrayRequest
    cancelled: bool
    def __init__(self, spec: _Optional[_Union[_workload_pb2.WorkloadSpec, _Mapping]] = ..., workload_id: _Optional[str] = ..., dry_run: bool = ..., hold: bool = ..., array: _Optional[_Union[_job_array_pb2.JobArrayRequest, _Mapping]] = ..., cancelled: bool = ...) -> None: ...

class SubmitWorkloadResponse(_message.Message):
    __slots__ = ("workload",)
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    workload: _workload_pb2.Workload
    def __init__(self, workload: _Optional[_Union[_workload_pb2.Workload, _Mapping]] = ...) -> None: ...

class GetWorkloadRequest(_message.Message):
    __slots__ = ("workload_id",)
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    def __init__(self, workload_id: _Optional[str] = ...) -> None: ...

class GetWorkloadResponse(_message.Message):
    __slots__ = ("workload",)
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    workload: _workload_pb2.Workload
    def __init__(self, workload: _Optional[_Union[_workload_pb2.Workload, _Mapping]] = ...) -> None: ...

class ListWorkloadsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "phases", "namespace", "user", "queue", "node_name", "name_contains", "queue_positions", "array_id", "whole_arrays", "view")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    NAME_CONTAINS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ARRAY_ID_FIELD_NUMBER: _ClassVar[int]
    WHOLE_ARRAYS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    phases: _containers.RepeatedScalarFieldContainer[_workload_pb2.WorkloadPhase]
    namespace: str
    user: str
    queue: str
    node_name: str
    name_contains: str
    queue_positions: bool
    array_id: str
    whole_arrays: bool
    view: _workload_pb2.WorkloadView
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., phases: _Optional[_Iterable[_Union[_workload_pb2.WorkloadPhase, str]]] = ..., namespace: _Optional[str] = ..., user: _Optional[str] = ..., queue: _Optional[str] = ..., node_name: _Optional[str] = ..., name_contains: _Optional[str] = ..., queue_positions: bool = ..., array_id: _Optional[str] = ..., whole_arrays: bool = ..., view: _Optional[_Union[_workload_pb2.WorkloadView, str]] = ...) -> None: ...

class ListWorkloadsResponse(_message.Message):
    __slots__ = ("workloads", "next_page_token", "total", "omitted", "summaries")
    WORKLOADS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    SUMMARIES_FIELD_NUMBER: _ClassVar[int]
    workloads: _containers.RepeatedCompositeFieldContainer[_workload_pb2.Workload]
    next_page_token: str
    total: int
    omitted: int
    summaries: _containers.RepeatedCompositeFieldContainer[_workload_pb2.WorkloadSummary]
    def __init__(self, workloads: _Optional[_Iterable[_Union[_workload_pb2.Workload, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ..., omitted: _Optional[int] = ..., summaries: _Optional[_Iterable[_Union[_workload_pb2.WorkloadSummary, _Mapping]]] = ...) -> None: ...

class WatchWorkloadsRequest(_message.Message):
    __slots__ = ("after_revision",)
    AFTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    after_revision: int
    def __init__(self, after_revision: _Optional[int] = ...) -> None: ...

class WatchWorkloadsResponse(_message.Message):
    __slots__ = ("workload",)
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    workload: _workload_pb2.Workload
    def __init__(self, workload: _Optional[_Union[_workload_pb2.Workload, _Mapping]] = ...) -> None: ...

class CancelWorkloadRequest(_message.Message):
    __slots__ = ("workload_id",)
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    def __init__(self, workload_id: _Optional[str] = ...) -> None: ...

class CancelWorkloadResponse(_message.Message):
    __slots__ = ("workload",)
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    workload: _workload_pb2.Workload
    def __init__(self, workload: _Optional[_Union[_workload_pb2.Workload, _Mapping]] = ...) -> None: ...

class ReadLogsRequest(_message.Message):
    __slots__ = ("workload_id", "replica", "tail_lines", "offset", "follow", "attempt")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TAIL_LINES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    replica: int
    tail_lines: int
    offset: int
    follow: bool
    attempt: int
    def __init__(self, workload_id: _Optional[str] = ..., replica: _Optional[int] = ..., tail_lines: _Optional[int] = ..., offset: _Optional[int] = ..., follow: bool = ..., attempt: _Optional[int] = ...) -> None: ...

class ReadLogsResponse(_message.Message):
    __slots__ = ("text", "next_offset")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    text: str
    next_offset: int
    def __init__(self, text: _Optional[str] = ..., next_offset: _Optional[int] = ...) -> None: ...

class AttachOpening(_message.Message):
    __slots__ = ("workload_id", "replica", "tail_lines", "offset", "attempt", "sends_input")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TAIL_LINES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SENDS_INPUT_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    replica: int
    tail_lines: int
    offset: int
    attempt: int
    sends_input: bool
    def __init__(self, workload_id: _Optional[str] = ..., replica: _Optional[int] = ..., tail_lines: _Optional[int] = ..., offset: _Optional[int] = ..., attempt: _Optional[int] = ..., sends_input: bool = ...) -> None: ...

class AttachInput(_message.Message):
    __slots__ = ("data", "is_end", "size")
    DATA_FIELD_NUMBER: _ClassVar[int]
    IS_END_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    is_end: bool
    size: _plan_pb2.TerminalSize
    def __init__(self, data: _Optional[bytes] = ..., is_end: bool = ..., size: _Optional[_Union[_plan_pb2.TerminalSize, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("opening", "input")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    opening: AttachOpening
    input: AttachInput
    def __init__(self, opening: _Optional[_Union[AttachOpening, _Mapping]] = ..., input: _Optional[_Union[AttachInput, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("data", "next_offset", "attempt", "inputs_taken", "input_problem")
    DATA_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INPUTS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    INPUT_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    next_offset: int
    attempt: int
    inputs_taken: int
    input_problem: str
    def __init__(self, data: _Optional[bytes] = ..., next_offset: _Optional[int] = ..., attempt: _Optional[int] = ..., inputs_taken: _Optional[int] = ..., input_problem: _Optional[str] = ...) -> None: ...

class ExplainWorkloadRequest(_message.Message):
    __slots__ = ("workload_id",)
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    def __init__(self, workload_id: _Optional[str] = ...) -> None: ...

class ExplainWorkloadResponse(_message.Message):
    __slots__ = ("explanation",)
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    explanation: _workload_pb2.Explanation
    def __init__(self, explanation: _Optional[_Union[_workload_pb2.Explanation, _Mapping]] = ...) -> None: ...

class PlanStatus(_message.Message):
    __slots__ = ("plan", "applied")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.NodePlan
    applied: _plan_pb2.PlanApplied
    def __init__(self, plan: _Optional[_Union[_plan_pb2.NodePlan, _Mapping]] = ..., applied: _Optional[_Union[_plan_pb2.PlanApplied, _Mapping]] = ...) -> None: ...

class ListPlansRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "node_name")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    node_name: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., node_name: _Optional[str] = ...) -> None: ...

class ListPlansResponse(_message.Message):
    __slots__ = ("plans", "next_page_token", "total", "omitted")
    PLANS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    plans: _containers.RepeatedCompositeFieldContainer[PlanStatus]
    next_page_token: str
    total: int
    omitted: int
    def __init__(self, plans: _Optional[_Iterable[_Union[PlanStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ..., omitted: _Optional[int] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: _policy_pb2.Policy
    def __init__(self, policy: _Optional[_Union[_policy_pb2.Policy, _Mapping]] = ...) -> None: ...

class UpdatePolicyRequest(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: _policy_pb2.Policy
    def __init__(self, policy: _Optional[_Union[_policy_pb2.Policy, _Mapping]] = ...) -> None: ...

class UpdatePolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: _policy_pb2.Policy
    def __init__(self, policy: _Optional[_Union[_policy_pb2.Policy, _Mapping]] = ...) -> None: ...

class ListInterferenceRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListInterferenceResponse(_message.Message):
    __slots__ = ("pairs", "next_page_token", "total", "omitted")
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    pairs: _containers.RepeatedCompositeFieldContainer[_policy_pb2.MeasuredInterference]
    next_page_token: str
    total: int
    omitted: int
    def __init__(self, pairs: _Optional[_Iterable[_Union[_policy_pb2.MeasuredInterference, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ..., omitted: _Optional[int] = ...) -> None: ...

class ListQueuesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListQueuesResponse(_message.Message):
    __slots__ = ("queues", "next_page_token", "total", "omitted")
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    queues: _containers.RepeatedCompositeFieldContainer[_queue_pb2.QueueStatus]
    next_page_token: str
    total: int
    omitted: int
    def __init__(self, queues: _Optional[_Iterable[_Union[_queue_pb2.QueueStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ..., omitted: _Optional[int] = ...) -> None: ...

class MoveToQueueRequest(_message.Message):
    __slots__ = ("workload_id", "queue")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    queue: str
    def __init__(self, workload_id: _Optional[str] = ..., queue: _Optional[str] = ...) -> None: ...

class MoveToQueueResponse(_message.Message):
    __slots__ = ("workload",)
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    workload: _workload_pb2.Workload
    def __init__(self, workload: _Optional[_Union[_workload_pb2.Workload, _Mapping]] = ...) -> None: ...

class HoldWorkloadRequest(_message.Message):
    __slots__ = ("workload_id",)
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    def __init__(self, workload_id: _Optional[str] = ...) -> None: ...

class HoldWorkloadResponse(_message.Message):
    __slots__ = ("workload",)
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    workload: _workload_pb2.Workload
    def __init__(self, workload: _Optional[_Union[_workload_pb2.Workload, _Mapping]] = ...) -> None: ...

class ReleaseWorkloadRequest(_message.Message):
    __slots__ = ("workload_id",)
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    def __init__(self, workload_id: _Optional[str] = ...) -> None: ...

class ReleaseWorkloadResponse(_message.Message):
    __slots__ = ("workload",)
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    workload: _workload_pb2.Workload
    def __init__(self, workload: _Optional[_Union[_workload_pb2.Workload, _Mapping]] = ...) -> None: ...

class RequeueWorkloadRequest(_message.Message):
    __slots__ = ("workload_id", "reason", "hold")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    reason: str
    hold: bool
    def __init__(self, workload_id: _Optional[str] = ..., reason: _Optional[str] = ..., hold: bool = ...) -> None: ...

class RequeueWorkloadResponse(_message.Message):
    __slots__ = ("workload",)
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    workload: _workload_pb2.Workload
    def __init__(self, workload: _Optional[_Union[_workload_pb2.Workload, _Mapping]] = ...) -> None: ...

class ScaleWorkloadRequest(_message.Message):
    __slots__ = ("workload_id", "replicas")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    replicas: int
    def __init__(self, workload_id: _Optional[str] = ..., replicas: _Optional[int] = ...) -> None: ...

class ScaleWorkloadResponse(_message.Message):
    __slots__ = ("workload",)
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    workload: _workload_pb2.Workload
    def __init__(self, workload: _Optional[_Union[_workload_pb2.Workload, _Mapping]] = ...) -> None: ...

class RecordPointsRequest(_message.Message):
    __slots__ = ("points",)
    POINTS_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[_profile_pb2.MeasuredPoint]
    def __init__(self, points: _Optional[_Iterable[_Union[_profile_pb2.MeasuredPoint, _Mapping]]] = ...) -> None: ...

class RecordPointsResponse(_message.Message):
    __slots__ = ("recorded",)
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    recorded: int
    def __init__(self, recorded: _Optional[int] = ...) -> None: ...

class ListPointsRequest(_message.Message):
    __slots__ = ("profile", "page_size", "page_token")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    profile: str
    page_size: int
    page_token: str
    def __init__(self, profile: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListPointsResponse(_message.Message):
    __slots__ = ("points", "next_page_token", "total", "omitted")
    POINTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[_profile_pb2.MeasuredPoint]
    next_page_token: str
    total: int
    omitted: int
    def __init__(self, points: _Optional[_Iterable[_Union[_profile_pb2.MeasuredPoint, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ..., omitted: _Optional[int] = ...) -> None: ...

class ReportProgressRequest(_message.Message):
    __slots__ = ("workload_id", "work_done")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    WORK_DONE_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    work_done: float
    def __init__(self, workload_id: _Optional[str] = ..., work_done: _Optional[float] = ...) -> None: ...

class ReportProgressResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPromisesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ServiceStatus(_message.Message):
    __slots__ = ("workload_id", "name", "replicas_serving", "replicas_wanted", "phase", "arrived_hz", "objective_s", "live_s", "modelled_s", "slowness", "slowness_error", "reason", "is_advice", "start_s", "is_start_measured", "load_target")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_SERVING_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_WANTED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_HZ_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    LIVE_S_FIELD_NUMBER: _ClassVar[int]
    MODELLED_S_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_ERROR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_ADVICE_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    IS_START_MEASURED_FIELD_NUMBER: _ClassVar[int]
    LOAD_TARGET_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    name: str
    replicas_serving: int
    replicas_wanted: int
    phase: str
    arrived_hz: float
    objective_s: float
    live_s: float
    modelled_s: float
    slowness: float
    slowness_error: float
    reason: str
    is_advice: bool
    start_s: float
    is_start_measured: bool
    load_target: _promise_pb2.LoadTarget
    def __init__(self, workload_id: _Optional[str] = ..., name: _Optional[str] = ..., replicas_serving: _Optional[int] = ..., replicas_wanted: _Optional[int] = ..., phase: _Optional[str] = ..., arrived_hz: _Optional[float] = ..., objective_s: _Optional[float] = ..., live_s: _Optional[float] = ..., modelled_s: _Optional[float] = ..., slowness: _Optional[float] = ..., slowness_error: _Optional[float] = ..., reason: _Optional[str] = ..., is_advice: bool = ..., start_s: _Optional[float] = ..., is_start_measured: bool = ..., load_target: _Optional[_Union[_promise_pb2.LoadTarget, _Mapping]] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("workload_id", "name", "phase", "power_limit_w", "slowdown", "saving", "reason", "is_advice")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_W_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_FIELD_NUMBER: _ClassVar[int]
    SAVING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_ADVICE_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    name: str
    phase: str
    power_limit_w: float
    slowdown: float
    saving: float
    reason: str
    is_advice: bool
    def __init__(self, workload_id: _Optional[str] = ..., name: _Optional[str] = ..., phase: _Optional[str] = ..., power_limit_w: _Optional[float] = ..., slowdown: _Optional[float] = ..., saving: _Optional[float] = ..., reason: _Optional[str] = ..., is_advice: bool = ...) -> None: ...

class ListPromisesResponse(_message.Message):
    __slots__ = ("services", "jobs", "budgets", "price_ratio", "next_page_token", "total", "omitted")
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    PRICE_RATIO_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    services: _containers.RepeatedCompositeFieldContainer[ServiceStatus]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    budgets: _containers.RepeatedCompositeFieldContainer[_policy_pb2.BudgetStatus]
    price_ratio: float
    next_page_token: str
    total: int
    omitted: int
    def __init__(self, services: _Optional[_Iterable[_Union[ServiceStatus, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ..., budgets: _Optional[_Iterable[_Union[_policy_pb2.BudgetStatus, _Mapping]]] = ..., price_ratio: _Optional[float] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ..., omitted: _Optional[int] = ...) -> None: ...

class ImagineBudgetsRequest(_message.Message):
    __slots__ = ("budgets",)
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    budgets: _containers.RepeatedCompositeFieldContainer[_policy_pb2.PowerBudget]
    def __init__(self, budgets: _Optional[_Iterable[_Union[_policy_pb2.PowerBudget, _Mapping]]] = ...) -> None: ...

class ImagineBudgetsResponse(_message.Message):
    __slots__ = ("jobs", "budgets")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    budgets: _containers.RepeatedCompositeFieldContainer[_policy_pb2.BudgetStatus]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ..., budgets: _Optional[_Iterable[_Union[_policy_pb2.BudgetStatus, _Mapping]]] = ...) -> None: ...

class RemoveNodeRequest(_message.Message):
    __slots__ = ("node_name", "force", "dry_run")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    force: bool
    dry_run: bool
    def __init__(self, node_name: _Optional[str] = ..., force: bool = ..., dry_run: bool = ...) -> None: ...

class RemoveNodeResponse(_message.Message):
    __slots__ = ("ended", "shrunk", "connected")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    SHRUNK_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    ended: _containers.RepeatedScalarFieldContainer[str]
    shrunk: _containers.RepeatedScalarFieldContainer[str]
    connected: bool
    def __init__(self, ended: _Optional[_Iterable[str]] = ..., shrunk: _Optional[_Iterable[str]] = ..., connected: bool = ...) -> None: ...

class CordonNodeRequest(_message.Message):
    __slots__ = ("node_name", "gpus", "reason")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    gpus: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, node_name: _Optional[str] = ..., gpus: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class CordonNodeResponse(_message.Message):
    __slots__ = ("node", "was_cordoned")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WAS_CORDONED_FIELD_NUMBER: _ClassVar[int]
    node: Node
    was_cordoned: bool
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., was_cordoned: bool = ...) -> None: ...

class UncordonNodeRequest(_message.Message):
    __slots__ = ("node_name", "gpus")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    gpus: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_name: _Optional[str] = ..., gpus: _Optional[_Iterable[str]] = ...) -> None: ...

class UncordonNodeResponse(_message.Message):
    __slots__ = ("node", "was_cordoned")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WAS_CORDONED_FIELD_NUMBER: _ClassVar[int]
    node: Node
    was_cordoned: bool
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., was_cordoned: bool = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("node_name", "gpus", "reason", "grace_s", "force", "dry_run")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    gpus: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    grace_s: float
    force: bool
    dry_run: bool
    def __init__(self, node_name: _Optional[str] = ..., gpus: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., grace_s: _Optional[float] = ..., force: bool = ..., dry_run: bool = ...) -> None: ...

class DrainNodeResponse(_message.Message):
    __slots__ = ("node", "workloads")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WORKLOADS_FIELD_NUMBER: _ClassVar[int]
    node: Node
    workloads: _containers.RepeatedCompositeFieldContainer[DrainedWorkload]
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., workloads: _Optional[_Iterable[_Union[DrainedWorkload, _Mapping]]] = ...) -> None: ...

class DrainedWorkload(_message.Message):
    __slots__ = ("workload_id", "name", "user", "replicas", "outcome", "node_names", "reason")
    WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NODE_NAMES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    workload_id: str
    name: str
    user: str
    replicas: _containers.RepeatedScalarFieldContainer[int]
    outcome: DrainOutcome
    node_names: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, workload_id: _Optional[str] = ..., name: _Optional[str] = ..., user: _Optional[str] = ..., replicas: _Optional[_Iterable[int]] = ..., outcome: _Optional[_Union[DrainOutcome, str]] = ..., node_names: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...
