"""The codec: messages to bytes and back, validated both ways.

Owns the only contact with generated code: a message class of ours and the
protobuf message of the same name hold fields of the same names, and each class
gets one pair of functions, built when it is first used. Unknown fields,
unknown enumeration values and unknown variants of a one-of are passed over, so
that a newer minor version can be read. Knows no socket.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError

from eelgrid_protos.errors import MalformedMessage, Violation
from eelgrid_protos.schema import Field, Shape, check, fields_of
from eelgrid_protos.wire import (
    agent_service_pb2,
    node_pb2,
    node_service_pb2,
    operator_service_pb2,
    plan_pb2,
    policy_pb2,
    workload_pb2,
)

__all__ = ["MESSAGE_BYTES_MOST", "decode", "encode", "file_descriptors"]

MESSAGE_BYTES_MOST = 16 * 1024 * 1024

_MODULES: tuple[ModuleType, ...] = (
    node_pb2,
    plan_pb2,
    workload_pb2,
    policy_pb2,
    agent_service_pb2,
    operator_service_pb2,
    node_service_pb2,
)
_Message = TypeVar("_Message")


def file_descriptors() -> tuple[FileDescriptor, ...]:
    """Descriptors of every file of the contract, for tests and reflection."""
    return tuple(module.DESCRIPTOR for module in _MODULES)


@cache
def _wire_class(cls: type) -> Any:
    for module in _MODULES:
        found = getattr(module, cls.__name__, None)
        if found is not None:
            return found
    raise TypeError(f"{cls.__name__} is no message of the contract")


@cache
def _variants(owner: type, oneof: str) -> dict[str, str]:
    """Message name to field name, for one one-of."""
    return {entry.message_type.name: entry.name for entry in _wire_class(owner).DESCRIPTOR.oneofs_by_name[oneof].fields}


def _encoder(shape: Shape) -> Callable[[Any], Any] | None:
    """None where the value goes to protobuf as it is."""
    match shape.kind:
        case "message":
            return _to_wire
        case "enum":
            return int
        case "many":
            assert shape.item is not None
            item = _encoder(shape.item)
            return None if item is None else lambda values: [item(value) for value in values]
        case _:
            return None


def _decoder(shape: Shape) -> Callable[[Any], Any] | None:
    match shape.kind:
        case "message":
            cls = shape.type
            return lambda wire: _from_wire(cls, wire)
        case "enum":
            return shape.type  # type: ignore[no-any-return]
        case "many":
            assert shape.item is not None
            item = _decoder(shape.item)
            return tuple if item is None else lambda values: tuple([item(value) for value in values])
        case "mapping":
            return dict
        case _:
            return None


@cache
def _encoders(cls: type) -> tuple[tuple[str, Callable[[Any], Any] | None, bool], ...]:
    return tuple((entry.name, _encoder(entry.shape), entry.shape.kind == "choice") for entry in fields_of(cls))


@cache
def _decoders(cls: type) -> tuple[tuple[Field, Callable[[Any], Any] | None, bool], ...]:
    """Each field, its decoder and whether the wire can tell that it is unset."""
    descriptor = _wire_class(cls).DESCRIPTOR
    rows = []
    for entry in fields_of(cls):
        presence = entry.shape.kind != "choice" and descriptor.fields_by_name[entry.name].has_presence
        rows.append((entry, _decoder(entry.shape), presence))
    return tuple(rows)


def _to_wire(message: Any) -> Any:
    cls: Any = type(message)
    values = {}
    for name, encoder, choice in _encoders(cls):
        value = getattr(message, name)
        if value is None:
            continue
        if choice:
            values[_variants(cls, name)[type(value).__name__]] = _to_wire(value)
        else:
            values[name] = value if encoder is None else encoder(value)
    return _wire_class(cls)(**values)


def _from_wire(cls: Any, wire: Any) -> Any:
    values: dict[str, Any] = {}
    for entry, decoder, presence in _decoders(cls):
        name = entry.name
        if entry.shape.kind == "choice":
            values[name] = _chosen(wire, name, entry.shape)
        elif not presence or wire.HasField(name):
            value = getattr(wire, name)
            values[name] = value if decoder is None else decoder(value)
        elif entry.optional or entry.required:
            values[name] = None
    return cls(**values)


def _chosen(wire: Any, name: str, shape: Shape) -> Any:
    field = wire.WhichOneof(name)
    if field is None:
        return None
    variant = getattr(wire, field)
    for cls in shape.choices:
        if cls.__name__ == variant.DESCRIPTOR.name:
            return _from_wire(cls, variant)
    return None


def encode(message: object) -> bytes:
    """The bytes of a message; raises InvalidMessage where it breaks a rule."""
    check(message)
    data: bytes = _to_wire(message).SerializeToString()
    return data


def decode(cls: type[_Message], data: bytes) -> _Message:
    """The message in the bytes; raises MalformedMessage or InvalidMessage, each naming what and why."""
    if len(data) > MESSAGE_BYTES_MOST:
        problem = f"{len(data)} bytes long"
        raise MalformedMessage(
            f"{cls.__name__} is too large", (Violation("", problem, f"send at most {MESSAGE_BYTES_MOST} bytes"),)
        )
    kind: Any = cls
    try:
        wire = _wire_class(kind).FromString(data)
    except DecodeError as error:
        raise MalformedMessage(
            f"not a {cls.__name__}", (Violation("", str(error), f"send an eelgrid.v1.{cls.__name__}"),)
        ) from error
    message: _Message = _from_wire(kind, wire)
    check(message)
    return message
