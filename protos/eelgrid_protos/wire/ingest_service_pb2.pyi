from eelgrid_protos.wire import node_pb2 as _node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ForwardedStream(_message.Message):
    __slots__ = ("stream", "peer", "certificate")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    stream: int
    peer: str
    certificate: bytes
    def __init__(self, stream: _Optional[int] = ..., peer: _Optional[str] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class ForwardedMessage(_message.Message):
    __slots__ = ("stream", "message")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    stream: int
    message: bytes
    def __init__(self, stream: _Optional[int] = ..., message: _Optional[bytes] = ...) -> None: ...

class TickBlock(_message.Message):
    __slots__ = ("readings", "host_readings", "devices", "batches", "values", "idle", "earlier_times", "earlier_values")
    READINGS_FIELD_NUMBER: _ClassVar[int]
    HOST_READINGS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    EARLIER_TIMES_FIELD_NUMBER: _ClassVar[int]
    EARLIER_VALUES_FIELD_NUMBER: _ClassVar[int]
    readings: _containers.RepeatedScalarFieldContainer[_node_pb2.Reading]
    host_readings: _containers.RepeatedScalarFieldContainer[_node_pb2.Reading]
    devices: int
    batches: bytes
    values: bytes
    idle: bytes
    earlier_times: bytes
    earlier_values: bytes
    def __init__(self, readings: _Optional[_Iterable[_Union[_node_pb2.Reading, str]]] = ..., host_readings: _Optional[_Iterable[_Union[_node_pb2.Reading, str]]] = ..., devices: _Optional[int] = ..., batches: _Optional[bytes] = ..., values: _Optional[bytes] = ..., idle: _Optional[bytes] = ..., earlier_times: _Optional[bytes] = ..., earlier_values: _Optional[bytes] = ...) -> None: ...

class TickFrame(_message.Message):
    __slots__ = ("number", "blocks")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    number: int
    blocks: _containers.RepeatedCompositeFieldContainer[TickBlock]
    def __init__(self, number: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[TickBlock, _Mapping]]] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("opened", "messages", "frame", "closed")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    opened: _containers.RepeatedCompositeFieldContainer[ForwardedStream]
    messages: _containers.RepeatedCompositeFieldContainer[ForwardedMessage]
    frame: TickFrame
    closed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, opened: _Optional[_Iterable[_Union[ForwardedStream, _Mapping]]] = ..., messages: _Optional[_Iterable[_Union[ForwardedMessage, _Mapping]]] = ..., frame: _Optional[_Union[TickFrame, _Mapping]] = ..., closed: _Optional[_Iterable[int]] = ...) -> None: ...

class EndedStream(_message.Message):
    __slots__ = ("stream", "code", "text", "details")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    stream: int
    code: int
    text: str
    details: bytes
    def __init__(self, stream: _Optional[int] = ..., code: _Optional[int] = ..., text: _Optional[str] = ..., details: _Optional[bytes] = ...) -> None: ...

class FrameAcknowledgement(_message.Message):
    __slots__ = ("number", "left_out")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    number: int
    left_out: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., left_out: _Optional[_Iterable[int]] = ...) -> None: ...

class ConsumedMessages(_message.Message):
    __slots__ = ("stream", "count")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    stream: int
    count: int
    def __init__(self, stream: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class ForwardResponse(_message.Message):
    __slots__ = ("batches_per_acknowledgement", "messages", "ended", "frames", "consumed", "wants_every_tick")
    BATCHES_PER_ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    WANTS_EVERY_TICK_FIELD_NUMBER: _ClassVar[int]
    batches_per_acknowledgement: int
    messages: _containers.RepeatedCompositeFieldContainer[ForwardedMessage]
    ended: _containers.RepeatedCompositeFieldContainer[EndedStream]
    frames: _containers.RepeatedCompositeFieldContainer[FrameAcknowledgement]
    consumed: _containers.RepeatedCompositeFieldContainer[ConsumedMessages]
    wants_every_tick: bool
    def __init__(self, batches_per_acknowledgement: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[ForwardedMessage, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[EndedStream, _Mapping]]] = ..., frames: _Optional[_Iterable[_Union[FrameAcknowledgement, _Mapping]]] = ..., consumed: _Optional[_Iterable[_Union[ConsumedMessages, _Mapping]]] = ..., wants_every_tick: bool = ...) -> None: ...
