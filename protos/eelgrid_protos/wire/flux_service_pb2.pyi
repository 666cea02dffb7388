from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScheduleFluxRequest(_message.Message):
    __slots__ = ("topic", "payload")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    topic: str
    payload: str
    def __init__(self, topic: _Optional[str] = ..., payload: _Optional[str] = ...) -> None: ...

class ScheduleFluxResponse(_message.Message):
    __slots__ = ("topic", "payload")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    topic: str
    payload: str
    def __init__(self, topic: _Optional[str] = ..., payload: _Optional[str] = ...) -> None: ...

class AdviseFluxRequest(_message.Message):
    __slots__ = ("jobspec", "user")
    JOBSPEC_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    jobspec: str
    user: str
    def __init__(self, jobspec: _Optional[str] = ..., user: _Optional[str] = ...) -> None: ...

class AdviseFluxResponse(_message.Message):
    __slots__ = ("constraint", "reason")
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    constraint: str
    reason: str
    def __init__(self, constraint: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ListFluxSpansRequest(_message.Message):
    __slots__ = ("begin_ns", "end_ns")
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    begin_ns: int
    end_ns: int
    def __init__(self, begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ...) -> None: ...

class FluxSpan(_message.Message):
    __slots__ = ("job", "user", "hostname", "gpus", "cores", "begin_ns", "end_ns", "wait_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    user: str
    hostname: str
    gpus: _containers.RepeatedScalarFieldContainer[int]
    cores: int
    begin_ns: int
    end_ns: int
    wait_s: float
    def __init__(self, job: _Optional[str] = ..., user: _Optional[str] = ..., hostname: _Optional[str] = ..., gpus: _Optional[_Iterable[int]] = ..., cores: _Optional[int] = ..., begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ListFluxSpansResponse(_message.Message):
    __slots__ = ("spans", "omitted")
    SPANS_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[FluxSpan]
    omitted: int
    def __init__(self, spans: _Optional[_Iterable[_Union[FluxSpan, _Mapping]]] = ..., omitted: _Optional[int] = ...) -> None: ...
