from eelgrid_protos.wire import queue_pb2 as _queue_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnforcementMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENFORCEMENT_MODE_UNSPECIFIED: _ClassVar[EnforcementMode]
    ENFORCEMENT_MODE_OBSERVE: _ClassVar[EnforcementMode]
    ENFORCEMENT_MODE_ENFORCE: _ClassVar[EnforcementMode]

class BudgetScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUDGET_SCOPE_UNSPECIFIED: _ClassVar[BudgetScope]
    BUDGET_SCOPE_CLUSTER: _ClassVar[BudgetScope]
    BUDGET_SCOPE_RACK: _ClassVar[BudgetScope]
    BUDGET_SCOPE_NODE: _ClassVar[BudgetScope]

class SpendingScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPENDING_SCOPE_UNSPECIFIED: _ClassVar[SpendingScope]
    SPENDING_SCOPE_NAMESPACE: _ClassVar[SpendingScope]
    SPENDING_SCOPE_USER: _ClassVar[SpendingScope]
    SPENDING_SCOPE_QUEUE: _ClassVar[SpendingScope]
    SPENDING_SCOPE_LABEL: _ClassVar[SpendingScope]

class SpendingQuantity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPENDING_QUANTITY_UNSPECIFIED: _ClassVar[SpendingQuantity]
    SPENDING_QUANTITY_GPU_TIME: _ClassVar[SpendingQuantity]
    SPENDING_QUANTITY_ENERGY: _ClassVar[SpendingQuantity]
    SPENDING_QUANTITY_MONEY: _ClassVar[SpendingQuantity]
    SPENDING_QUANTITY_CARBON: _ClassVar[SpendingQuantity]

class SpendingPeriod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPENDING_PERIOD_UNSPECIFIED: _ClassVar[SpendingPeriod]
    SPENDING_PERIOD_DAY: _ClassVar[SpendingPeriod]
    SPENDING_PERIOD_WEEK: _ClassVar[SpendingPeriod]
    SPENDING_PERIOD_MONTH: _ClassVar[SpendingPeriod]
ENFORCEMENT_MODE_UNSPECIFIED: EnforcementMode
ENFORCEMENT_MODE_OBSERVE: EnforcementMode
ENFORCEMENT_MODE_ENFORCE: EnforcementMode
BUDGET_SCOPE_UNSPECIFIED: BudgetScope
BUDGET_SCOPE_CLUSTER: BudgetScope
BUDGET_SCOPE_RACK: BudgetScope
BUDGET_SCOPE_NODE: BudgetScope
SPENDING_SCOPE_UNSPECIFIED: SpendingScope
SPENDING_SCOPE_NAMESPACE: SpendingScope
SPENDING_SCOPE_USER: SpendingScope
SPENDING_SCOPE_QUEUE: SpendingScope
SPENDING_SCOPE_LABEL: SpendingScope
SPENDING_QUANTITY_UNSPECIFIED: SpendingQuantity
SPENDING_QUANTITY_GPU_TIME: SpendingQuantity
SPENDING_QUANTITY_ENERGY: SpendingQuantity
SPENDING_QUANTITY_MONEY: SpendingQuantity
SPENDING_QUANTITY_CARBON: SpendingQuantity
SPENDING_PERIOD_UNSPECIFIED: SpendingPeriod
SPENDING_PERIOD_DAY: SpendingPeriod
SPENDING_PERIOD_WEEK: SpendingPeriod
SPENDING_PERIOD_MONTH: SpendingPeriod

class Weights(_message.Message):
    __slots__ = ("power", "fragmentation_w", "stranding_w", "lookahead", "scarcity_w", "stranding_full_w", "locality_w")
    POWER_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTATION_W_FIELD_NUMBER: _ClassVar[int]
    STRANDING_W_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    SCARCITY_W_FIELD_NUMBER: _ClassVar[int]
    STRANDING_FULL_W_FIELD_NUMBER: _ClassVar[int]
    LOCALITY_W_FIELD_NUMBER: _ClassVar[int]
    power: float
    fragmentation_w: float
    stranding_w: float
    lookahead: float
    scarcity_w: float
    stranding_full_w: float
    locality_w: float
    def __init__(self, power: _Optional[float] = ..., fragmentation_w: _Optional[float] = ..., stranding_w: _Optional[float] = ..., lookahead: _Optional[float] = ..., scarcity_w: _Optional[float] = ..., stranding_full_w: _Optional[float] = ..., locality_w: _Optional[float] = ...) -> None: ...

class PoolMode(_message.Message):
    __slots__ = ("pool", "mode", "partitioned")
    POOL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONED_FIELD_NUMBER: _ClassVar[int]
    pool: str
    mode: EnforcementMode
    partitioned: bool
    def __init__(self, pool: _Optional[str] = ..., mode: _Optional[_Union[EnforcementMode, str]] = ..., partitioned: bool = ...) -> None: ...

class PowerBudget(_message.Message):
    __slots__ = ("scope", "name", "limit_w")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMIT_W_FIELD_NUMBER: _ClassVar[int]
    scope: BudgetScope
    name: str
    limit_w: float
    def __init__(self, scope: _Optional[_Union[BudgetScope, str]] = ..., name: _Optional[str] = ..., limit_w: _Optional[float] = ...) -> None: ...

class BudgetStatus(_message.Message):
    __slots__ = ("budget", "claimed_w", "shortfall_w", "measured_w", "measured_gpus", "gpus")
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_W_FIELD_NUMBER: _ClassVar[int]
    SHORTFALL_W_FIELD_NUMBER: _ClassVar[int]
    MEASURED_W_FIELD_NUMBER: _ClassVar[int]
    MEASURED_GPUS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    budget: PowerBudget
    claimed_w: float
    shortfall_w: float
    measured_w: float
    measured_gpus: int
    gpus: int
    def __init__(self, budget: _Optional[_Union[PowerBudget, _Mapping]] = ..., claimed_w: _Optional[float] = ..., shortfall_w: _Optional[float] = ..., measured_w: _Optional[float] = ..., measured_gpus: _Optional[int] = ..., gpus: _Optional[int] = ...) -> None: ...

class PricePeriod(_message.Message):
    __slots__ = ("begins_minute", "price_per_kwh", "carbon_kg_per_kwh")
    BEGINS_MINUTE_FIELD_NUMBER: _ClassVar[int]
    PRICE_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    CARBON_KG_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    begins_minute: int
    price_per_kwh: float
    carbon_kg_per_kwh: float
    def __init__(self, begins_minute: _Optional[int] = ..., price_per_kwh: _Optional[float] = ..., carbon_kg_per_kwh: _Optional[float] = ...) -> None: ...

class EnergyPrices(_message.Message):
    __slots__ = ("currency", "periods", "pue", "carbon_price_per_kg", "utc_offset_minutes")
    CURRENCY_FIELD_NUMBER: _ClassVar[int]
    PERIODS_FIELD_NUMBER: _ClassVar[int]
    PUE_FIELD_NUMBER: _ClassVar[int]
    CARBON_PRICE_PER_KG_FIELD_NUMBER: _ClassVar[int]
    UTC_OFFSET_MINUTES_FIELD_NUMBER: _ClassVar[int]
    currency: str
    periods: _containers.RepeatedCompositeFieldContainer[PricePeriod]
    pue: float
    carbon_price_per_kg: float
    utc_offset_minutes: int
    def __init__(self, currency: _Optional[str] = ..., periods: _Optional[_Iterable[_Union[PricePeriod, _Mapping]]] = ..., pue: _Optional[float] = ..., carbon_price_per_kg: _Optional[float] = ..., utc_offset_minutes: _Optional[int] = ...) -> None: ...

class SpendingLimit(_message.Message):
    __slots__ = ("scope", "name", "label", "quantity", "most", "period", "warn_ratio", "mode", "stops")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    QUANTITY_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    WARN_RATIO_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    scope: SpendingScope
    name: str
    label: str
    quantity: SpendingQuantity
    most: float
    period: SpendingPeriod
    warn_ratio: float
    mode: EnforcementMode
    stops: bool
    def __init__(self, scope: _Optional[_Union[SpendingScope, str]] = ..., name: _Optional[str] = ..., label: _Optional[str] = ..., quantity: _Optional[_Union[SpendingQuantity, str]] = ..., most: _Optional[float] = ..., period: _Optional[_Union[SpendingPeriod, str]] = ..., warn_ratio: _Optional[float] = ..., mode: _Optional[_Union[EnforcementMode, str]] = ..., stops: bool = ...) -> None: ...

class PriorityClass(_message.Message):
    __slots__ = ("name", "priority", "never_preempts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NEVER_PREEMPTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    priority: int
    never_preempts: bool
    def __init__(self, name: _Optional[str] = ..., priority: _Optional[int] = ..., never_preempts: bool = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("revision", "objective", "weights", "pools", "lease_s", "send_interval_s", "sample_interval_s", "placement", "budgets", "prices", "spending", "queues", "queue_half_life_s", "queue_age_limit_s", "backfill", "default_runtime_s", "reservations", "priority_classes", "capacity_hold_s", "interference", "shared_slowdown_most")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    SEND_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    PRICES_FIELD_NUMBER: _ClassVar[int]
    SPENDING_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_HALF_LIFE_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_AGE_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    BACKFILL_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_RUNTIME_S_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_CLASSES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_HOLD_S_FIELD_NUMBER: _ClassVar[int]
    INTERFERENCE_FIELD_NUMBER: _ClassVar[int]
    SHARED_SLOWDOWN_MOST_FIELD_NUMBER: _ClassVar[int]
    revision: int
    objective: str
    weights: Weights
    pools: _containers.RepeatedCompositeFieldContainer[PoolMode]
    lease_s: float
    send_interval_s: float
    sample_interval_s: float
    placement: str
    budgets: _containers.RepeatedCompositeFieldContainer[PowerBudget]
    prices: EnergyPrices
    spending: _containers.RepeatedCompositeFieldContainer[SpendingLimit]
    queues: _containers.RepeatedCompositeFieldContainer[_queue_pb2.Queue]
    queue_half_life_s: float
    queue_age_limit_s: float
    backfill: _queue_pb2.BackfillMode
    default_runtime_s: float
    reservations: _containers.RepeatedCompositeFieldContainer[_queue_pb2.Reservation]
    priority_classes: _containers.RepeatedCompositeFieldContainer[PriorityClass]
    capacity_hold_s: float
    interference: _containers.RepeatedCompositeFieldContainer[Interference]
    shared_slowdown_most: float
    def __init__(self, revision: _Optional[int] = ..., objective: _Optional[str] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[PoolMode, _Mapping]]] = ..., lease_s: _Optional[float] = ..., send_interval_s: _Optional[float] = ..., sample_interval_s: _Optional[float] = ..., placement: _Optional[str] = ..., budgets: _Optional[_Iterable[_Union[PowerBudget, _Mapping]]] = ..., prices: _Optional[_Union[EnergyPrices, _Mapping]] = ..., spending: _Optional[_Iterable[_Union[SpendingLimit, _Mapping]]] = ..., queues: _Optional[_Iterable[_Union[_queue_pb2.Queue, _Mapping]]] = ..., queue_half_life_s: _Optional[float] = ..., queue_age_limit_s: _Optional[float] = ..., backfill: _Optional[_Union[_queue_pb2.BackfillMode, str]] = ..., default_runtime_s: _Optional[float] = ..., reservations: _Optional[_Iterable[_Union[_queue_pb2.Reservation, _Mapping]]] = ..., priority_classes: _Optional[_Iterable[_Union[PriorityClass, _Mapping]]] = ..., capacity_hold_s: _Optional[float] = ..., interference: _Optional[_Iterable[_Union[Interference, _Mapping]]] = ..., shared_slowdown_most: _Optional[float] = ...) -> None: ...

class Interference(_message.Message):
    __slots__ = ("load", "beside", "slowdown")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_FIELD_NUMBER: _ClassVar[int]
    load: str
    beside: str
    slowdown: float
    def __init__(self, load: _Optional[str] = ..., beside: _Optional[str] = ..., slowdown: _Optional[float] = ...) -> None: ...

class MeasuredInterference(_message.Message):
    __slots__ = ("load", "beside", "slowdown", "slowdown_least", "slowdown_largest", "jobs")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_LEAST_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_LARGEST_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    load: str
    beside: str
    slowdown: float
    slowdown_least: float
    slowdown_largest: float
    jobs: int
    def __init__(self, load: _Optional[str] = ..., beside: _Optional[str] = ..., slowdown: _Optional[float] = ..., slowdown_least: _Optional[float] = ..., slowdown_largest: _Optional[float] = ..., jobs: _Optional[int] = ...) -> None: ...
