from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class JobArrayRequest(_message.Message):
    __slots__ = ("indexes", "parameters", "rerun_of")
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    RERUN_OF_FIELD_NUMBER: _ClassVar[int]
    indexes: str
    parameters: _containers.RepeatedScalarFieldContainer[str]
    rerun_of: str
    def __init__(self, indexes: _Optional[str] = ..., parameters: _Optional[_Iterable[str]] = ..., rerun_of: _Optional[str] = ...) -> None: ...

class ArrayElement(_message.Message):
    __slots__ = ("array_id", "index", "size", "running_most")
    ARRAY_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_MOST_FIELD_NUMBER: _ClassVar[int]
    array_id: str
    index: int
    size: int
    running_most: int
    def __init__(self, array_id: _Optional[str] = ..., index: _Optional[int] = ..., size: _Optional[int] = ..., running_most: _Optional[int] = ...) -> None: ...

class ArrayStatus(_message.Message):
    __slots__ = ("size", "pending", "placed", "succeeded", "failed", "cancelled", "running_most", "started")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_MOST_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    size: int
    pending: int
    placed: int
    succeeded: int
    failed: int
    cancelled: int
    running_most: int
    started: int
    def __init__(self, size: _Optional[int] = ..., pending: _Optional[int] = ..., placed: _Optional[int] = ..., succeeded: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., running_most: _Optional[int] = ..., started: _Optional[int] = ...) -> None: ...
