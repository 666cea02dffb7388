from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PreemptionWithin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREEMPTION_WITHIN_UNSPECIFIED: _ClassVar[PreemptionWithin]
    PREEMPTION_WITHIN_LOWER_PRIORITY: _ClassVar[PreemptionWithin]

class PreemptionReclaim(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREEMPTION_RECLAIM_UNSPECIFIED: _ClassVar[PreemptionReclaim]
    PREEMPTION_RECLAIM_NOMINAL: _ClassVar[PreemptionReclaim]
    PREEMPTION_RECLAIM_FAIR_SHARE: _ClassVar[PreemptionReclaim]
    PREEMPTION_RECLAIM_PAST_USE: _ClassVar[PreemptionReclaim]

class PreemptionVictims(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREEMPTION_VICTIMS_UNSPECIFIED: _ClassVar[PreemptionVictims]
    PREEMPTION_VICTIMS_NONE: _ClassVar[PreemptionVictims]
    PREEMPTION_VICTIMS_ALL: _ClassVar[PreemptionVictims]

class BackfillMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BACKFILL_MODE_UNSPECIFIED: _ClassVar[BackfillMode]
    BACKFILL_MODE_NONE: _ClassVar[BackfillMode]
    BACKFILL_MODE_EASY: _ClassVar[BackfillMode]
    BACKFILL_MODE_CONSERVATIVE: _ClassVar[BackfillMode]
PREEMPTION_WITHIN_UNSPECIFIED: PreemptionWithin
PREEMPTION_WITHIN_LOWER_PRIORITY: PreemptionWithin
PREEMPTION_RECLAIM_UNSPECIFIED: PreemptionReclaim
PREEMPTION_RECLAIM_NOMINAL: PreemptionReclaim
PREEMPTION_RECLAIM_FAIR_SHARE: PreemptionReclaim
PREEMPTION_RECLAIM_PAST_USE: PreemptionReclaim
PREEMPTION_VICTIMS_UNSPECIFIED: PreemptionVictims
PREEMPTION_VICTIMS_NONE: PreemptionVictims
PREEMPTION_VICTIMS_ALL: PreemptionVictims
BACKFILL_MODE_UNSPECIFIED: BackfillMode
BACKFILL_MODE_NONE: BackfillMode
BACKFILL_MODE_EASY: BackfillMode
BACKFILL_MODE_CONSERVATIVE: BackfillMode

class QueueQuota(_message.Message):
    __slots__ = ("resource", "nominal", "borrowing_limit", "lending_limit", "usage_limit")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    NOMINAL_FIELD_NUMBER: _ClassVar[int]
    BORROWING_LIMIT_FIELD_NUMBER: _ClassVar[int]
    LENDING_LIMIT_FIELD_NUMBER: _ClassVar[int]
    USAGE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    resource: str
    nominal: int
    borrowing_limit: int
    lending_limit: int
    usage_limit: int
    def __init__(self, resource: _Optional[str] = ..., nominal: _Optional[int] = ..., borrowing_limit: _Optional[int] = ..., lending_limit: _Optional[int] = ..., usage_limit: _Optional[int] = ...) -> None: ...

class QueuePreemption(_message.Message):
    __slots__ = ("within", "reclaim", "victims", "min_runtime_s", "horizon_s", "delay_s")
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    RECLAIM_FIELD_NUMBER: _ClassVar[int]
    VICTIMS_FIELD_NUMBER: _ClassVar[int]
    MIN_RUNTIME_S_FIELD_NUMBER: _ClassVar[int]
    HORIZON_S_FIELD_NUMBER: _ClassVar[int]
    DELAY_S_FIELD_NUMBER: _ClassVar[int]
    within: PreemptionWithin
    reclaim: PreemptionReclaim
    victims: PreemptionVictims
    min_runtime_s: float
    horizon_s: float
    delay_s: float
    def __init__(self, within: _Optional[_Union[PreemptionWithin, str]] = ..., reclaim: _Optional[_Union[PreemptionReclaim, str]] = ..., victims: _Optional[_Union[PreemptionVictims, str]] = ..., min_runtime_s: _Optional[float] = ..., horizon_s: _Optional[float] = ..., delay_s: _Optional[float] = ...) -> None: ...

class Queue(_message.Message):
    __slots__ = ("name", "parent", "weight", "quotas", "users", "namespaces", "preemption")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    parent: str
    weight: float
    quotas: _containers.RepeatedCompositeFieldContainer[QueueQuota]
    users: _containers.RepeatedScalarFieldContainer[str]
    namespaces: _containers.RepeatedScalarFieldContainer[str]
    preemption: QueuePreemption
    def __init__(self, name: _Optional[str] = ..., parent: _Optional[str] = ..., weight: _Optional[float] = ..., quotas: _Optional[_Iterable[_Union[QueueQuota, _Mapping]]] = ..., users: _Optional[_Iterable[str]] = ..., namespaces: _Optional[_Iterable[str]] = ..., preemption: _Optional[_Union[QueuePreemption, _Mapping]] = ...) -> None: ...

class QueueUsage(_message.Message):
    __slots__ = ("resource", "quota", "used", "borrowed", "lent", "usage_most")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    BORROWED_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    USAGE_MOST_FIELD_NUMBER: _ClassVar[int]
    resource: str
    quota: int
    used: int
    borrowed: int
    lent: int
    usage_most: int
    def __init__(self, resource: _Optional[str] = ..., quota: _Optional[int] = ..., used: _Optional[int] = ..., borrowed: _Optional[int] = ..., lent: _Optional[int] = ..., usage_most: _Optional[int] = ...) -> None: ...

class QueueStatus(_message.Message):
    __slots__ = ("queue", "usage", "weighted_share", "weighted_usage", "running", "waiting")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_SHARE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_USAGE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    queue: Queue
    usage: _containers.RepeatedCompositeFieldContainer[QueueUsage]
    weighted_share: float
    weighted_usage: float
    running: int
    waiting: int
    def __init__(self, queue: _Optional[_Union[Queue, _Mapping]] = ..., usage: _Optional[_Iterable[_Union[QueueUsage, _Mapping]]] = ..., weighted_share: _Optional[float] = ..., weighted_usage: _Optional[float] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("name", "node_names", "pool", "start_ns", "end_ns", "users", "queue", "maintenance", "gpus", "gpu_models", "lacking_gpus", "change_cause")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NODE_NAMES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAINTENANCE_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    GPU_MODELS_FIELD_NUMBER: _ClassVar[int]
    LACKING_GPUS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_CAUSE_FIELD_NUMBER: _ClassVar[int]
    name: str
    node_names: _containers.RepeatedScalarFieldContainer[str]
    pool: str
    start_ns: int
    end_ns: int
    users: _containers.RepeatedScalarFieldContainer[str]
    queue: str
    maintenance: bool
    gpus: int
    gpu_models: _containers.RepeatedScalarFieldContainer[str]
    lacking_gpus: int
    change_cause: str
    def __init__(self, name: _Optional[str] = ..., node_names: _Optional[_Iterable[str]] = ..., pool: _Optional[str] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., users: _Optional[_Iterable[str]] = ..., queue: _Optional[str] = ..., maintenance: bool = ..., gpus: _Optional[int] = ..., gpu_models: _Optional[_Iterable[str]] = ..., lacking_gpus: _Optional[int] = ..., change_cause: _Optional[str] = ...) -> None: ...
