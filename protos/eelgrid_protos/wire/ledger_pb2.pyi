from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnergySpent(_message.Message):
    __slots__ = ("bare_idle_mj", "context_idle_mj", "active_mj", "cost", "carbon_g")
    BARE_IDLE_MJ_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_IDLE_MJ_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_MJ_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    CARBON_G_FIELD_NUMBER: _ClassVar[int]
    bare_idle_mj: int
    context_idle_mj: int
    active_mj: int
    cost: float
    carbon_g: float
    def __init__(self, bare_idle_mj: _Optional[int] = ..., context_idle_mj: _Optional[int] = ..., active_mj: _Optional[int] = ..., cost: _Optional[float] = ..., carbon_g: _Optional[float] = ...) -> None: ...

class EnergyWork(_message.Message):
    __slots__ = ("unit", "amount", "counted_s", "missed_s", "energy_per_unit_j")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    COUNTED_S_FIELD_NUMBER: _ClassVar[int]
    MISSED_S_FIELD_NUMBER: _ClassVar[int]
    ENERGY_PER_UNIT_J_FIELD_NUMBER: _ClassVar[int]
    unit: str
    amount: float
    counted_s: float
    missed_s: float
    energy_per_unit_j: float
    def __init__(self, unit: _Optional[str] = ..., amount: _Optional[float] = ..., counted_s: _Optional[float] = ..., missed_s: _Optional[float] = ..., energy_per_unit_j: _Optional[float] = ...) -> None: ...

class EnergyGroup(_message.Message):
    __slots__ = ("values", "spent", "work")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    spent: EnergySpent
    work: _containers.RepeatedCompositeFieldContainer[EnergyWork]
    def __init__(self, values: _Optional[_Iterable[str]] = ..., spent: _Optional[_Union[EnergySpent, _Mapping]] = ..., work: _Optional[_Iterable[_Union[EnergyWork, _Mapping]]] = ...) -> None: ...

class QueryEnergyRequest(_message.Message):
    __slots__ = ("begin_ns", "end_ns", "group_by", "filters", "rows_most")
    class FiltersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    FILTERS_FIELD_NUMBER: _ClassVar[int]
    ROWS_MOST_FIELD_NUMBER: _ClassVar[int]
    begin_ns: int
    end_ns: int
    group_by: _containers.RepeatedScalarFieldContainer[str]
    filters: _containers.ScalarMap[str, str]
    rows_most: int
    def __init__(self, begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., group_by: _Optional[_Iterable[str]] = ..., filters: _Optional[_Mapping[str, str]] = ..., rows_most: _Optional[int] = ...) -> None: ...

class QueryEnergyResponse(_message.Message):
    __slots__ = ("begin_ns", "end_ns", "currency", "groups", "left_out", "left_out_groups", "unallocated", "unattributed", "measured_mj", "uncertainty_mj", "uncounted_s")
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    CURRENCY_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_GROUPS_FIELD_NUMBER: _ClassVar[int]
    UNALLOCATED_FIELD_NUMBER: _ClassVar[int]
    UNATTRIBUTED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_MJ_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_MJ_FIELD_NUMBER: _ClassVar[int]
    UNCOUNTED_S_FIELD_NUMBER: _ClassVar[int]
    begin_ns: int
    end_ns: int
    currency: str
    groups: _containers.RepeatedCompositeFieldContainer[EnergyGroup]
    left_out: EnergySpent
    left_out_groups: int
    unallocated: EnergySpent
    unattributed: EnergySpent
    measured_mj: int
    uncertainty_mj: int
    uncounted_s: float
    def __init__(self, begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., currency: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[EnergyGroup, _Mapping]]] = ..., left_out: _Optional[_Union[EnergySpent, _Mapping]] = ..., left_out_groups: _Optional[int] = ..., unallocated: _Optional[_Union[EnergySpent, _Mapping]] = ..., unattributed: _Optional[_Union[EnergySpent, _Mapping]] = ..., measured_mj: _Optional[int] = ..., uncertainty_mj: _Optional[int] = ..., uncounted_s: _Optional[float] = ...) -> None: ...
