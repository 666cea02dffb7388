"""Plain messages: conversion of messages to and from dictionaries for JSON, YAML and the journal.

Translates between frozen dataclasses of annotated fields and dictionaries of
plain values: enumerations by lower-case name, tuples as lists, bytes in base64, absent optional
fields omitted, fields at their default omitted on request. Reading is strict
where the wire is lenient: an unknown key is a typing error and is named. Knows
no file and no format.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar

from eelgrid_protos.errors import InvalidMessage, Violation
from eelgrid_protos.schema import ValueShape, check_message, fields_of

_Message = TypeVar("_Message")


@cache
def _defaults(cls: Any) -> dict[str, Any]:
    """Defaults by field name; a field without one is missing here."""
    found = {}
    for entry in fields(cls):
        if entry.default is not MISSING:
            found[entry.name] = entry.default
        elif entry.default_factory is not MISSING:
            found[entry.name] = entry.default_factory()
    return found


def _plain(shape: ValueShape, value: Any, *, brief: bool) -> Any:
    match shape.kind:
        case "message":
            return to_plain(value, brief=brief)
        case "choice":
            return {type(value).__name__: to_plain(value, brief=brief)}
        case "enum":
            return value.name.lower()
        case "many":
            assert shape.item is not None
            if shape.item.kind in ("int", "float", "str", "bool"):
                return list(value)
            return [_plain(shape.item, item, brief=brief) for item in value]
        case "mapping":
            return dict(value)
        case "bytes":
            return base64.b64encode(value).decode("ascii")
        case _:
            return value


def to_plain(message: object, *, brief: bool = False) -> dict[str, Any]:
    """Converts a message into a dictionary; `brief` omits fields at their default."""
    cls: Any = type(message)
    defaults = _defaults(cls) if brief else {}
    result: dict[str, Any] = {}
    for entry in fields_of(cls):
        value = getattr(message, entry.name)
        if value is None or (brief and entry.name in defaults and defaults[entry.name] == value):
            continue
        result[entry.name] = _plain(entry.shape, value, brief=brief)
    return result


def digest_plain(plain: Mapping[str, Any]) -> str:
    """Computes a SHA-256 digest of a message's brief plain form, in hexadecimal.

    Equal for equal messages, also of versions with more fields, which are absent where they have their defaults.
    """
    # OpenSSL costs an agent memory that may never need this.
    import hashlib

    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _fail(path: str, problem: str, remedy: str) -> InvalidMessage:
    return InvalidMessage("cannot read this", (Violation(path, problem, remedy),))


def _value(shape: ValueShape, plain: Any, path: str) -> Any:
    match shape.kind:
        case "message":
            return _read(shape.type, plain, path)
        case "choice":
            return _choice(shape, plain, path)
        case "enum":
            members = {member.name.lower(): member for member in shape.type}
            if isinstance(plain, str) and plain.lower() in members:
                return members[plain.lower()]
            raise _fail(path, f"is {plain!r}", f"use one of {', '.join(members)}")
        case "many":
            assert shape.item is not None
            if not isinstance(plain, list | tuple):
                raise _fail(path, f"is {type(plain).__name__}", "give a list")
            return tuple(_value(shape.item, item, f"{path}[{index}]") for index, item in enumerate(plain))
        case "mapping":
            if not isinstance(plain, Mapping) or not all(isinstance(key, str) for key in plain):
                raise _fail(path, f"is {type(plain).__name__}", "give a mapping of text to text")
            return dict(plain)
        case "bytes":
            try:
                return base64.b64decode(plain, validate=True)
            except (TypeError, ValueError):
                raise _fail(path, f"is {plain!r}", "give bytes in base64") from None
        case "float" if isinstance(plain, int) and not isinstance(plain, bool):
            return float(plain)
        case _:
            if not isinstance(plain, shape.type) or (shape.kind != "bool" and isinstance(plain, bool)):
                raise _fail(path, f"is {plain!r}", f"give a value of type {shape.kind}")
            return plain


def _choice(shape: ValueShape, plain: Any, path: str) -> Any:
    names = {cls.__name__: cls for cls in shape.choices}
    if not isinstance(plain, Mapping) or len(plain) != 1 or next(iter(plain)) not in names:
        raise _fail(path, "is none of the variants", f"use one of {', '.join(names)}")
    ((name, body),) = plain.items()
    return _read(names[name], body, path)


def _read(cls: Any, plain: Any, path: str) -> Any:
    if not isinstance(plain, Mapping):
        raise _fail(path, f"is {type(plain).__name__}", f"give a mapping with the fields of {cls.__name__}")
    known = {entry.name: entry for entry in fields_of(cls)}
    prefix = f"{path}." if path else ""
    for key in plain:
        if key not in known:
            raise _fail(f"{prefix}{key}", "is no field here", f"use one of {', '.join(known)}")
    values: dict[str, Any] = {}
    for name, entry in known.items():
        if plain.get(name) is not None:
            values[name] = _value(entry.shape, plain[name], prefix + name)
        elif entry.optional and entry.required:
            values[name] = None
        elif entry.required:
            raise _fail(prefix + name, "is missing", "set it")
    return cls(**values)


def from_plain(cls: type[_Message], plain: Mapping[str, Any], *, trusted: bool = False) -> _Message:
    """Converts a dictionary into a message; raises InvalidMessage, which names the field.

    `trusted` skips the ranges for what this program wrote itself and a checksum
    guards, such as journal records.
    """
    message: _Message = _read(cls, plain, "")
    if not trusted:
        check_message(message)
    return message
