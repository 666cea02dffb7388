from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AuditEntry(_message.Message):
    __slots__ = ("number", "time_ns", "subject", "user", "role", "peer", "call", "arguments", "code", "reason", "calls", "revision")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    number: int
    time_ns: int
    subject: str
    user: str
    role: str
    peer: str
    call: str
    arguments: str
    code: str
    reason: str
    calls: int
    revision: int
    def __init__(self, number: _Optional[int] = ..., time_ns: _Optional[int] = ..., subject: _Optional[str] = ..., user: _Optional[str] = ..., role: _Optional[str] = ..., peer: _Optional[str] = ..., call: _Optional[str] = ..., arguments: _Optional[str] = ..., code: _Optional[str] = ..., reason: _Optional[str] = ..., calls: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...

class ListAuditEntriesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "since_ns", "user", "call", "denied")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    DENIED_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    since_ns: int
    user: str
    call: str
    denied: bool
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., since_ns: _Optional[int] = ..., user: _Optional[str] = ..., call: _Optional[str] = ..., denied: bool = ...) -> None: ...

class ListAuditEntriesResponse(_message.Message):
    __slots__ = ("entries", "next_page_token", "total", "damaged", "omitted")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AuditEntry]
    next_page_token: str
    total: int
    damaged: int
    omitted: int
    def __init__(self, entries: _Optional[_Iterable[_Union[AuditEntry, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ..., damaged: _Optional[int] = ..., omitted: _Optional[int] = ...) -> None: ...
