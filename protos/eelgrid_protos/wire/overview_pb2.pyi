from eelgrid_protos.wire import policy_pb2 as _policy_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttentionSeverity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTENTION_SEVERITY_UNSPECIFIED: _ClassVar[AttentionSeverity]
    ATTENTION_SEVERITY_CRITICAL: _ClassVar[AttentionSeverity]
    ATTENTION_SEVERITY_WARNING: _ClassVar[AttentionSeverity]
    ATTENTION_SEVERITY_INFO: _ClassVar[AttentionSeverity]

class AttentionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTENTION_KIND_UNSPECIFIED: _ClassVar[AttentionKind]
    ATTENTION_KIND_LOST_NODE: _ClassVar[AttentionKind]
    ATTENTION_KIND_LOST_GPU: _ClassVar[AttentionKind]
    ATTENTION_KIND_CORDONED_GPU: _ClassVar[AttentionKind]
    ATTENTION_KIND_FAILING_GPU: _ClassVar[AttentionKind]
    ATTENTION_KIND_BROKEN_PROMISE: _ClassVar[AttentionKind]
    ATTENTION_KIND_BUDGET_OVER: _ClassVar[AttentionKind]
    ATTENTION_KIND_SPENDING_OVER: _ClassVar[AttentionKind]
    ATTENTION_KIND_STUCK_LAYOUT: _ClassVar[AttentionKind]
    ATTENTION_KIND_AHEAD_OF_JOURNAL: _ClassVar[AttentionKind]
    ATTENTION_KIND_STALE_READINGS: _ClassVar[AttentionKind]
    ATTENTION_KIND_LONG_WAIT: _ClassVar[AttentionKind]
    ATTENTION_KIND_HELD_BUT_IDLE: _ClassVar[AttentionKind]
    ATTENTION_KIND_JOURNAL: _ClassVar[AttentionKind]
    ATTENTION_KIND_BUDGET_SHORT: _ClassVar[AttentionKind]
    ATTENTION_KIND_SPENDING_NEAR: _ClassVar[AttentionKind]
    ATTENTION_KIND_UNCONTROLLED_PROMISE: _ClassVar[AttentionKind]
    ATTENTION_KIND_PLAN_NOT_APPLIED: _ClassVar[AttentionKind]
    ATTENTION_KIND_LEDGER: _ClassVar[AttentionKind]
    ATTENTION_KIND_CORDONED_NODE: _ClassVar[AttentionKind]
ATTENTION_SEVERITY_UNSPECIFIED: AttentionSeverity
ATTENTION_SEVERITY_CRITICAL: AttentionSeverity
ATTENTION_SEVERITY_WARNING: AttentionSeverity
ATTENTION_SEVERITY_INFO: AttentionSeverity
ATTENTION_KIND_UNSPECIFIED: AttentionKind
ATTENTION_KIND_LOST_NODE: AttentionKind
ATTENTION_KIND_LOST_GPU: AttentionKind
ATTENTION_KIND_CORDONED_GPU: AttentionKind
ATTENTION_KIND_FAILING_GPU: AttentionKind
ATTENTION_KIND_BROKEN_PROMISE: AttentionKind
ATTENTION_KIND_BUDGET_OVER: AttentionKind
ATTENTION_KIND_SPENDING_OVER: AttentionKind
ATTENTION_KIND_STUCK_LAYOUT: AttentionKind
ATTENTION_KIND_AHEAD_OF_JOURNAL: AttentionKind
ATTENTION_KIND_STALE_READINGS: AttentionKind
ATTENTION_KIND_LONG_WAIT: AttentionKind
ATTENTION_KIND_HELD_BUT_IDLE: AttentionKind
ATTENTION_KIND_JOURNAL: AttentionKind
ATTENTION_KIND_BUDGET_SHORT: AttentionKind
ATTENTION_KIND_SPENDING_NEAR: AttentionKind
ATTENTION_KIND_UNCONTROLLED_PROMISE: AttentionKind
ATTENTION_KIND_PLAN_NOT_APPLIED: AttentionKind
ATTENTION_KIND_LEDGER: AttentionKind
ATTENTION_KIND_CORDONED_NODE: AttentionKind

class PowerOverview(_message.Message):
    __slots__ = ("measured_w", "measured_gpus", "gpus", "nodes_reporting", "nodes", "sample_age_s", "budget_w", "claimed_w", "shortfall_w", "budgets", "over_w")
    MEASURED_W_FIELD_NUMBER: _ClassVar[int]
    MEASURED_GPUS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    NODES_REPORTING_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    BUDGET_W_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_W_FIELD_NUMBER: _ClassVar[int]
    SHORTFALL_W_FIELD_NUMBER: _ClassVar[int]
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    OVER_W_FIELD_NUMBER: _ClassVar[int]
    measured_w: float
    measured_gpus: int
    gpus: int
    nodes_reporting: int
    nodes: int
    sample_age_s: float
    budget_w: float
    claimed_w: float
    shortfall_w: float
    budgets: _containers.RepeatedCompositeFieldContainer[_policy_pb2.BudgetStatus]
    over_w: float
    def __init__(self, measured_w: _Optional[float] = ..., measured_gpus: _Optional[int] = ..., gpus: _Optional[int] = ..., nodes_reporting: _Optional[int] = ..., nodes: _Optional[int] = ..., sample_age_s: _Optional[float] = ..., budget_w: _Optional[float] = ..., claimed_w: _Optional[float] = ..., shortfall_w: _Optional[float] = ..., budgets: _Optional[_Iterable[_Union[_policy_pb2.BudgetStatus, _Mapping]]] = ..., over_w: _Optional[float] = ...) -> None: ...

class TodayEnergy(_message.Message):
    __slots__ = ("begin_ns", "end_ns", "energy_j", "idle_j", "unallocated_j", "held_idle_j", "cost", "idle_cost", "currency", "carbon_g")
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    ENERGY_J_FIELD_NUMBER: _ClassVar[int]
    IDLE_J_FIELD_NUMBER: _ClassVar[int]
    UNALLOCATED_J_FIELD_NUMBER: _ClassVar[int]
    HELD_IDLE_J_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    IDLE_COST_FIELD_NUMBER: _ClassVar[int]
    CURRENCY_FIELD_NUMBER: _ClassVar[int]
    CARBON_G_FIELD_NUMBER: _ClassVar[int]
    begin_ns: int
    end_ns: int
    energy_j: float
    idle_j: float
    unallocated_j: float
    held_idle_j: float
    cost: float
    idle_cost: float
    currency: str
    carbon_g: float
    def __init__(self, begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., energy_j: _Optional[float] = ..., idle_j: _Optional[float] = ..., unallocated_j: _Optional[float] = ..., held_idle_j: _Optional[float] = ..., cost: _Optional[float] = ..., idle_cost: _Optional[float] = ..., currency: _Optional[str] = ..., carbon_g: _Optional[float] = ...) -> None: ...

class CapacityOverview(_message.Message):
    __slots__ = ("gpus", "held_milli", "free_milli", "gpus_idle", "gpus_lost", "gpus_cordoned", "nodes", "nodes_lost", "nodes_cordoned", "gpus_unreachable")
    GPUS_FIELD_NUMBER: _ClassVar[int]
    HELD_MILLI_FIELD_NUMBER: _ClassVar[int]
    FREE_MILLI_FIELD_NUMBER: _ClassVar[int]
    GPUS_IDLE_FIELD_NUMBER: _ClassVar[int]
    GPUS_LOST_FIELD_NUMBER: _ClassVar[int]
    GPUS_CORDONED_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NODES_LOST_FIELD_NUMBER: _ClassVar[int]
    NODES_CORDONED_FIELD_NUMBER: _ClassVar[int]
    GPUS_UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    gpus: int
    held_milli: int
    free_milli: int
    gpus_idle: int
    gpus_lost: int
    gpus_cordoned: int
    nodes: int
    nodes_lost: int
    nodes_cordoned: int
    gpus_unreachable: int
    def __init__(self, gpus: _Optional[int] = ..., held_milli: _Optional[int] = ..., free_milli: _Optional[int] = ..., gpus_idle: _Optional[int] = ..., gpus_lost: _Optional[int] = ..., gpus_cordoned: _Optional[int] = ..., nodes: _Optional[int] = ..., nodes_lost: _Optional[int] = ..., nodes_cordoned: _Optional[int] = ..., gpus_unreachable: _Optional[int] = ...) -> None: ...

class WaitingReason(_message.Message):
    __slots__ = ("reason", "workloads", "gpu_milli", "oldest_since_ns", "example_workload_id", "example_reason", "remedy")
    REASON_FIELD_NUMBER: _ClassVar[int]
    WORKLOADS_FIELD_NUMBER: _ClassVar[int]
    GPU_MILLI_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_WORKLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_REASON_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    workloads: int
    gpu_milli: int
    oldest_since_ns: int
    example_workload_id: str
    example_reason: str
    remedy: str
    def __init__(self, reason: _Optional[str] = ..., workloads: _Optional[int] = ..., gpu_milli: _Optional[int] = ..., oldest_since_ns: _Optional[int] = ..., example_workload_id: _Optional[str] = ..., example_reason: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class PromiseOverview(_message.Message):
    __slots__ = ("kept", "at_risk", "broken", "unknown")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    AT_RISK_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    kept: int
    at_risk: int
    broken: int
    unknown: int
    def __init__(self, kept: _Optional[int] = ..., at_risk: _Optional[int] = ..., broken: _Optional[int] = ..., unknown: _Optional[int] = ...) -> None: ...

class AttentionItem(_message.Message):
    __slots__ = ("severity", "kind", "subject", "message", "since_ns", "command")
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    severity: AttentionSeverity
    kind: AttentionKind
    subject: str
    message: str
    since_ns: int
    command: str
    def __init__(self, severity: _Optional[_Union[AttentionSeverity, str]] = ..., kind: _Optional[_Union[AttentionKind, str]] = ..., subject: _Optional[str] = ..., message: _Optional[str] = ..., since_ns: _Optional[int] = ..., command: _Optional[str] = ...) -> None: ...

class Consumer(_message.Message):
    __slots__ = ("namespace", "user", "workloads", "held_milli", "power_w", "energy_j", "cost", "gpus_idle")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    WORKLOADS_FIELD_NUMBER: _ClassVar[int]
    HELD_MILLI_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    ENERGY_J_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    GPUS_IDLE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    user: str
    workloads: int
    held_milli: int
    power_w: float
    energy_j: float
    cost: float
    gpus_idle: int
    def __init__(self, namespace: _Optional[str] = ..., user: _Optional[str] = ..., workloads: _Optional[int] = ..., held_milli: _Optional[int] = ..., power_w: _Optional[float] = ..., energy_j: _Optional[float] = ..., cost: _Optional[float] = ..., gpus_idle: _Optional[int] = ...) -> None: ...

class Overview(_message.Message):
    __slots__ = ("time_ns", "revision", "power", "today", "capacity", "waiting", "promises", "attention", "attention_total", "consumers", "consumers_total", "consumers_left_out_milli", "workloads_waiting", "workloads_placed")
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    POWER_FIELD_NUMBER: _ClassVar[int]
    TODAY_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PROMISES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_LEFT_OUT_MILLI_FIELD_NUMBER: _ClassVar[int]
    WORKLOADS_WAITING_FIELD_NUMBER: _ClassVar[int]
    WORKLOADS_PLACED_FIELD_NUMBER: _ClassVar[int]
    time_ns: int
    revision: int
    power: PowerOverview
    today: TodayEnergy
    capacity: CapacityOverview
    waiting: _containers.RepeatedCompositeFieldContainer[WaitingReason]
    promises: PromiseOverview
    attention: _containers.RepeatedCompositeFieldContainer[AttentionItem]
    attention_total: int
    consumers: _containers.RepeatedCompositeFieldContainer[Consumer]
    consumers_total: int
    consumers_left_out_milli: int
    workloads_waiting: int
    workloads_placed: int
    def __init__(self, time_ns: _Optional[int] = ..., revision: _Optional[int] = ..., power: _Optional[_Union[PowerOverview, _Mapping]] = ..., today: _Optional[_Union[TodayEnergy, _Mapping]] = ..., capacity: _Optional[_Union[CapacityOverview, _Mapping]] = ..., waiting: _Optional[_Iterable[_Union[WaitingReason, _Mapping]]] = ..., promises: _Optional[_Union[PromiseOverview, _Mapping]] = ..., attention: _Optional[_Iterable[_Union[AttentionItem, _Mapping]]] = ..., attention_total: _Optional[int] = ..., consumers: _Optional[_Iterable[_Union[Consumer, _Mapping]]] = ..., consumers_total: _Optional[int] = ..., consumers_left_out_milli: _Optional[int] = ..., workloads_waiting: _Optional[int] = ..., workloads_placed: _Optional[int] = ...) -> None: ...

class GetOverviewRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetOverviewResponse(_message.Message):
    __slots__ = ("overview",)
    OVERVIEW_FIELD_NUMBER: _ClassVar[int]
    overview: Overview
    def __init__(self, overview: _Optional[_Union[Overview, _Mapping]] = ...) -> None: ...
