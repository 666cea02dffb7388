from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GangPart(_message.Message):
    __slots__ = ("name", "parts", "parts_least")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PARTS_LEAST_FIELD_NUMBER: _ClassVar[int]
    name: str
    parts: int
    parts_least: int
    def __init__(self, name: _Optional[str] = ..., parts: _Optional[int] = ..., parts_least: _Optional[int] = ...) -> None: ...
