"""The codec: messages to bytes and back, validated both ways.

Owns the only contact with generated code: a message class of ours and the protobuf message of the same name hold
fields of the same names, and each class gets one pair of functions, built when it is first used. Unknown fields,
unknown enumeration values and unknown variants of a one-of are ignored, so that a newer minor version can be read.
Must not know sockets.

Sizes are checked before they cost anything: the bytes first, then, in a large request, how many elements each list
has, by walking tags and lengths until one has too many; and again on the parsed message, before objects are made of
its elements. Two bytes can encode one more element, which takes some 180 bytes in protobuf and two thousand in Python
(measured on Gpu).
"""

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError

from eelgrid_protos import wire
from eelgrid_protos.errors import CONTRACT_BROKEN, InvalidMessage, MalformedMessage, Violation
from eelgrid_protos.quantities import Many
from eelgrid_protos.schema import SchemaField, ValueShape, check_message, compile_when_called, fields_of
from eelgrid_protos.values import dataclass
from eelgrid_protos.wire import MODULE_OF_NAME

# Bound of an answer; the request of each call has a bound of its own (rpc.RpcMethod).
MESSAGE_BYTES_MOST = 16 * 1024 * 1024
# Protobuf parses anything smaller in 10 ms and 6 MB (measured on elements of 2 bytes): walking it would cost more.
_COUNTED_FROM_BYTES = 64 * 1024

_Message = TypeVar("_Message")


def file_descriptors() -> tuple[FileDescriptor, ...]:
    """Returns the descriptors of every file of the contract, for tests and transcoding."""
    return tuple(_wire_module(name).DESCRIPTOR for name in dict.fromkeys(MODULE_OF_NAME.values()))


def load_service(name: str) -> None:
    """Loads the descriptors of a service and of all that it uses, for reflection; its name is without the package."""
    _wire_module(MODULE_OF_NAME[name])


def _wire_module(name: str) -> ModuleType:
    """Returns a module of generated code, which is loaded when it is first asked for."""
    return import_module(f"{wire.__name__}.{name}")


@cache
def _wire_class(cls: type) -> Any:
    module = MODULE_OF_NAME.get(cls.__name__)
    if module is None:
        raise TypeError(f"{cls.__name__} is no message of the contract")
    return getattr(_wire_module(module), cls.__name__)


@cache
def _variants(owner: type, oneof: str) -> dict[str, str]:
    """Returns the field name of each message name in a one-of."""
    return {entry.message_type.name: entry.name for entry in _wire_class(owner).DESCRIPTOR.oneofs_by_name[oneof].fields}


def _decoder(shape: ValueShape, value: str, scope: dict[str, Any]) -> str:
    """Returns the source of our value, given the source of protobuf's."""
    match shape.kind:
        case "message":
            name = f"read_{shape.type.__name__}"
            compile_when_called(scope, name, partial(_reader, shape.type))
            return f"{name}({value})"
        case "enum":
            name = f"member_of_{shape.type.__name__}"
            scope[name] = {int(member): member for member in shape.type}.get
            scope[f"{name}_unknown"] = shape.type(0)
            return f"{name}({value}, {name}_unknown)"
        case "many":
            assert shape.item is not None
            item = _decoder(shape.item, "item", scope)
            return f"tuple({value})" if item == "item" else f"(tuple([{item} for item in {value}]) if {value} else ())"
        case "mapping":
            return f"dict({value})"
        case _:
            return value


def _encoder(shape: ValueShape, value: str, scope: dict[str, Any]) -> str:
    """Returns the source of what protobuf accepts for a value of this shape."""
    match shape.kind:
        case "message":
            name = f"write_{shape.type.__name__}"
            compile_when_called(scope, name, partial(_writer, shape.type))
            return f"{name}({value})"
        case "enum":
            return f"int({value})"
        case "many":
            assert shape.item is not None
            item = _encoder(shape.item, "item", scope)
            return value if item == "item" else f"[{item} for item in {value}]"
        case _:
            return value


@cache
def _writer(cls: Any) -> Callable[[Any], Any]:
    """Returns a function from our message to the protobuf message, generated as `_reader` is.

    What a field has when it is absent is not written, unless the field has presence.
    """
    descriptor = _wire_class(cls).DESCRIPTOR
    scope: dict[str, Any] = {"wire": _wire_class(cls), "writer": _writer}
    lines = []
    for entry in fields_of(cls):
        name = entry.name
        if entry.shape.kind == "choice":
            scope[f"variants_{name}"] = _variants(cls, name)
            is_there, key, value = "is not None", f"variants_{name}[type(value).__name__]", "writer(type(value))(value)"
        else:
            is_there = "is not None" if descriptor.fields_by_name[name].has_presence else ""
            key, value = repr(name), _encoder(entry.shape, "value", scope)
        lines.append(f" value = message.{name}\n if value {is_there}: values[{key}] = {value}\n")
    exec(f"def write(message):\n values = {{}}\n{''.join(lines)} return wire(**values)", scope)  # noqa: S102  # as above
    writer: Callable[[Any], Any] = scope["write"]
    return writer


@cache
def _reader(cls: Any) -> Callable[[Any], Any]:
    """Returns a function from the protobuf message to ours, generated field by field as dataclasses generates __init__.

    Thousands of messages a second are read by it; a loop over fields costs twice as much (measured on a batch of 11
    columns: 65 against 30 us).
    """
    descriptor = _wire_class(cls).DESCRIPTOR
    scope: dict[str, Any] = {"cls": cls}
    arguments = []
    for entry in fields_of(cls):
        name = entry.name
        value = _decoder(entry.shape, f"wire.{name}", scope)
        if entry.shape.kind == "choice":
            scope[f"choose_{name}"] = _chooser(entry)
            value = f"choose_{name}(wire)"
        elif descriptor.fields_by_name[name].has_presence:
            scope[f"absent_{name}"] = None if entry.optional or entry.required else _default(cls, name)
            value = f"{value} if wire.HasField({name!r}) else absent_{name}"
        most = _most(entry.shape)
        if most is not None:
            scope[f"refuse_{name}"] = _refuse_count(cls, name, most)
            value = f"{value} if len(wire.{name}) <= {most} else refuse_{name}(wire.{name})"
        arguments.append(f"{name}={value}")
    exec(f"def read(wire): return cls({', '.join(arguments)})", scope)  # noqa: S102  # names are our own fields
    reader: Callable[[Any], Any] = scope["read"]
    return reader


def _most(shape: ValueShape) -> int | None:
    """Returns the maximum number of elements of a list or a mapping; None for other shapes."""
    return shape.rule.most if shape.kind in ("many", "mapping") and isinstance(shape.rule, Many) else None


def _too_many(cls: Any, path: str, most: int, count: str) -> InvalidMessage:
    return InvalidMessage(
        f"{cls.__name__} {CONTRACT_BROKEN}", (Violation(path, f"holds {count} items", f"send at most {most}"),)
    )


def _refuse_count(cls: Any, name: str, most: int) -> Callable[[Any], NoReturn]:
    def refuse(values: Any) -> NoReturn:
        raise _too_many(cls, name, most, str(len(values)))

    return refuse


@dataclass(frozen=True, slots=True)
class _Counted:
    """A field whose elements are counted, or whose message may contain such fields."""

    name: str
    most: int | None
    inner: Any
    is_repeated: bool


@cache
def _counted_fields(cls: Any) -> dict[int, _Counted]:
    """Returns the fields to count of a message class, by field number."""
    numbers = _wire_class(cls).DESCRIPTOR.fields_by_name
    found: dict[int, _Counted] = {}
    for entry in fields_of(cls):
        shape = entry.shape
        if shape.kind == "choice":
            fields_of_variants = {name: numbers[field] for name, field in _variants(cls, entry.name).items()}
            for choice in shape.choices:
                field = fields_of_variants[choice.__name__]
                found[field.number] = _Counted(entry.name, None, choice, False)
        elif shape.kind == "message":
            found[numbers[entry.name].number] = _Counted(entry.name, None, shape.type, False)
        elif shape.kind in ("many", "mapping"):
            inner = shape.item.type if shape.item is not None and shape.item.kind == "message" else None
            found[numbers[entry.name].number] = _Counted(entry.name, _most(shape), inner, True)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Reads a varint; returns the number and the offset after it. Raises IndexError at the end of the data."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


@dataclass(frozen=True, slots=True)
class _ElementCount:
    """Walks the bytes of one message; raises InvalidMessage at the first list with too many elements.

    Bytes that are not a message are left to protobuf to refuse.
    """

    root: Any
    data: bytes

    def walk(self, cls: Any, span: tuple[int, int], counts: dict[int, Any], path: str = "") -> None:
        """Counts elements in one message, and in the messages inside it.

        `counts` has elements by field number, and for a message that is not an element the counts inside it, since
        bytes may hold it in several pieces, which protobuf merges.
        """
        at, end = span
        known = _counted_fields(cls)
        while at < end:
            number, begin, at = self._next(at)
            field = known.get(number)
            if field is None:
                continue
            where = f"{path}.{field.name}" if path else field.name
            if field.is_repeated:
                counts[number] = counts.get(number, 0) + 1
                if field.most is not None and counts[number] > field.most:
                    raise _too_many(self.root, where, field.most, f"more than {field.most}")
            if field.inner is not None and begin:
                inner = {} if field.is_repeated else counts.setdefault(-number, {})
                self.walk(field.inner, (begin, min(at, end)), inner, where)

    def _next(self, at: int) -> tuple[int, int, int]:
        """Returns a field's number, start (0 unless length-delimited) and end; raises IndexError if there is none."""
        tag, at = _varint(self.data, at)
        match tag & 7:
            case 0:
                return tag >> 3, 0, _varint(self.data, at)[1]
            case 1:
                return tag >> 3, 0, at + 8
            case 2:
                length, begin = _varint(self.data, at)
                return tag >> 3, begin, begin + length
            case 5:
                return tag >> 3, 0, at + 4
            case _:
                raise IndexError(at)


def _check_counts(cls: Any, data: bytes) -> None:
    try:
        _ElementCount(cls, data).walk(cls, (0, len(data)), {})
    except IndexError:
        # Truncated, or of a wire type that we never write: protobuf reports it in its own words.
        return


def _default(cls: Any, name: str) -> Any:
    """Returns the value of a field that is absent on the wire."""
    entry = next(entry for entry in fields(cls) if entry.name == name)
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def _chooser(entry: SchemaField) -> Callable[[Any], Any]:
    """Returns a reader of the variant that is set; it returns None for one that this version does not know."""
    classes = {cls.__name__: cls for cls in entry.shape.choices}
    name = entry.name

    def choose(wire: Any) -> Any:
        field = wire.WhichOneof(name)
        if field is None:
            return None
        variant = getattr(wire, field)
        cls = classes.get(variant.DESCRIPTOR.name)
        return None if cls is None else _reader(cls)(variant)

    return choose


def _to_wire(message: object) -> Any:
    kind: Any = type(message)
    return _writer(kind)(message)


def encode_message(message: object) -> bytes:
    """Encodes a message; raises InvalidMessage if it breaks a rule."""
    check_message(message)
    data: bytes = _to_wire(message).SerializeToString()
    return data


def digest_message(message: object) -> str:
    """Computes a SHA-256 digest of a message: equal for equal messages of equal versions, on both sides."""
    import hashlib

    # The order of maps on the wire is undefined otherwise.
    return hashlib.sha256(_to_wire(message).SerializeToString(deterministic=True)).hexdigest()


def encode_element(owner: type, field: str, element: object) -> bytes:
    """Encodes one element of a list of its owner; raises InvalidMessage if it breaks a rule.

    The bytes of an owner with that list empty, followed by the bytes of its elements, are the complete message, since
    protobuf merges pieces. So a listing is encoded once, while its size is tracked.
    """
    check_message(element)
    data: bytes = _wire_class(owner)(**{field: [_to_wire(element)]}).SerializeToString()
    return data


def check_size(name: str, data: bytes, bytes_most: int) -> None:
    """Raises MalformedMessage if the bytes are more than a message may have."""
    if len(data) > bytes_most:
        violation = Violation("", f"{len(data)} bytes long", f"send at most {bytes_most} bytes")
        raise MalformedMessage(f"{name} is too large", (violation,))


def decode_message(
    cls: type[_Message], data: bytes, *, bytes_most: int = MESSAGE_BYTES_MOST, is_counted: bool = False
) -> _Message:
    """Decodes a message; raises MalformedMessage or InvalidMessage, which name the field and the reason.

    `is_counted` is for messages of other processes: elements are counted before any object is made of them.
    """
    check_size(cls.__name__, data, bytes_most)
    kind: Any = cls
    if is_counted and len(data) > _COUNTED_FROM_BYTES:
        _check_counts(kind, data)
    try:
        wire = _wire_class(kind).FromString(data)
    except DecodeError as error:
        raise MalformedMessage(
            f"not a {cls.__name__}", (Violation("", str(error), f"send an eelgrid.v1.{cls.__name__}"),)
        ) from error
    try:
        message: _Message = _reader(kind)(wire)
    except InvalidMessage:
        # Reports the complete path; the reader knows only the name of the field.
        _check_counts(kind, data)
        raise
    check_message(message)
    return message
