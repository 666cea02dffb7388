from eelgrid_protos.wire import policy_pb2 as _policy_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpendingStatus(_message.Message):
    __slots__ = ("limit", "begin_ns", "end_ns", "spent", "forecast", "over_since_ns", "waiting")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    OVER_SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    limit: _policy_pb2.SpendingLimit
    begin_ns: int
    end_ns: int
    spent: float
    forecast: float
    over_since_ns: int
    waiting: int
    def __init__(self, limit: _Optional[_Union[_policy_pb2.SpendingLimit, _Mapping]] = ..., begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., spent: _Optional[float] = ..., forecast: _Optional[float] = ..., over_since_ns: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class ListSpendingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSpendingResponse(_message.Message):
    __slots__ = ("limits", "currency", "utc_offset_minutes")
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CURRENCY_FIELD_NUMBER: _ClassVar[int]
    UTC_OFFSET_MINUTES_FIELD_NUMBER: _ClassVar[int]
    limits: _containers.RepeatedCompositeFieldContainer[SpendingStatus]
    currency: str
    utc_offset_minutes: int
    def __init__(self, limits: _Optional[_Iterable[_Union[SpendingStatus, _Mapping]]] = ..., currency: _Optional[str] = ..., utc_offset_minutes: _Optional[int] = ...) -> None: ...
