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
    __slots__ = ("begin_ns", "end_ns", "group_by", "filters", "rows_most", "with_nobody")
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
    WITH_NOBODY_FIELD_NUMBER: _ClassVar[int]
    begin_ns: int
    end_ns: int
    group_by: _containers.RepeatedScalarFieldContainer[str]
    filters: _containers.ScalarMap[str, str]
    rows_most: int
    with_nobody: bool
    def __init__(self, begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., group_by: _Optional[_Iterable[str]] = ..., filters: _Optional[_Mapping[str, str]] = ..., rows_most: _Optional[int] = ..., with_nobody: bool = ...) -> None: ...

class QueryEnergyResponse(_message.Message):
    __slots__ = ("begin_ns", "end_ns", "currency", "groups", "left_out", "left_out_groups", "unallocated", "unattributed", "measured_mj", "uncertainty_mj", "uncounted_s", "revision", "damaged")
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
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
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
    revision: int
    damaged: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., currency: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[EnergyGroup, _Mapping]]] = ..., left_out: _Optional[_Union[EnergySpent, _Mapping]] = ..., left_out_groups: _Optional[int] = ..., unallocated: _Optional[_Union[EnergySpent, _Mapping]] = ..., unattributed: _Optional[_Union[EnergySpent, _Mapping]] = ..., measured_mj: _Optional[int] = ..., uncertainty_mj: _Optional[int] = ..., uncounted_s: _Optional[float] = ..., revision: _Optional[int] = ..., damaged: _Optional[_Iterable[str]] = ...) -> None: ...

class EnergyGrouping(_message.Message):
    __slots__ = ("group_by", "rows_most")
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    ROWS_MOST_FIELD_NUMBER: _ClassVar[int]
    group_by: _containers.RepeatedScalarFieldContainer[str]
    rows_most: int
    def __init__(self, group_by: _Optional[_Iterable[str]] = ..., rows_most: _Optional[int] = ...) -> None: ...

class QueryEnergyReportRequest(_message.Message):
    __slots__ = ("begin_ns", "end_ns", "filters", "groupings")
    class FiltersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    FILTERS_FIELD_NUMBER: _ClassVar[int]
    GROUPINGS_FIELD_NUMBER: _ClassVar[int]
    begin_ns: int
    end_ns: int
    filters: _containers.ScalarMap[str, str]
    groupings: _containers.RepeatedCompositeFieldContainer[EnergyGrouping]
    def __init__(self, begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., filters: _Optional[_Mapping[str, str]] = ..., groupings: _Optional[_Iterable[_Union[EnergyGrouping, _Mapping]]] = ...) -> None: ...

class QueryEnergyReportResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[QueryEnergyResponse]
    def __init__(self, answers: _Optional[_Iterable[_Union[QueryEnergyResponse, _Mapping]]] = ...) -> None: ...

class EnergyExporter(_message.Message):
    __slots__ = ("name", "since_ns", "until_ns", "changed_hours", "changed_first_ns", "changed_last_ns", "lag_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_NS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_HOURS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIRST_NS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_LAST_NS_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    since_ns: int
    until_ns: int
    changed_hours: int
    changed_first_ns: int
    changed_last_ns: int
    lag_s: float
    def __init__(self, name: _Optional[str] = ..., since_ns: _Optional[int] = ..., until_ns: _Optional[int] = ..., changed_hours: _Optional[int] = ..., changed_first_ns: _Optional[int] = ..., changed_last_ns: _Optional[int] = ..., lag_s: _Optional[float] = ...) -> None: ...

class ConfirmEnergyExportRequest(_message.Message):
    __slots__ = ("name", "begin_ns", "end_ns", "revision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    begin_ns: int
    end_ns: int
    revision: int
    def __init__(self, name: _Optional[str] = ..., begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class ConfirmEnergyExportResponse(_message.Message):
    __slots__ = ("exporter",)
    EXPORTER_FIELD_NUMBER: _ClassVar[int]
    exporter: EnergyExporter
    def __init__(self, exporter: _Optional[_Union[EnergyExporter, _Mapping]] = ...) -> None: ...

class ListEnergyExportersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEnergyExportersResponse(_message.Message):
    __slots__ = ("exporters", "settled_ns")
    EXPORTERS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_NS_FIELD_NUMBER: _ClassVar[int]
    exporters: _containers.RepeatedCompositeFieldContainer[EnergyExporter]
    settled_ns: int
    def __init__(self, exporters: _Optional[_Iterable[_Union[EnergyExporter, _Mapping]]] = ..., settled_ns: _Optional[int] = ...) -> None: ...

class RemoveEnergyExporterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveEnergyExporterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
