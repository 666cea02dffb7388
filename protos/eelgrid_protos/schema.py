"""Shapes: what the type hints of a message say, read once and kept.

Owns the reading of dataclass fields (Annotated rules, optional, repeated,
mapping, one-of) into `Shape` values, and the check of a value against its
rules. codec.py and plain_messages.py both build on it, so that bytes, JSON and YAML obey
the same rules. Knows nothing of protobuf.
"""

import itertools
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import IntEnum
from functools import cache
from typing import Any

from eelgrid_protos.errors import InvalidMessage, Violation
from eelgrid_protos.quantities import Many, Range, Rule, Text

# A person reads a few, and the answer carries 64 (faults.status_details); a message may break as many as it has elements.
VIOLATIONS_REPORTED_MOST = 64


@dataclass(frozen=True, slots=True)
class ValueShape:
    """One value: `kind` is int, float, str, bool, enum, message, many, mapping or choice."""

    kind: str
    type: Any
    rule: Rule | None = None
    item: "ValueShape | None" = None
    choices: tuple[type, ...] = ()
    # Of a mapping.
    key: "ValueShape | None" = None


@dataclass(frozen=True, slots=True)
class SchemaField:
    """One field of a message."""

    name: str
    shape: ValueShape
    optional: bool
    required: bool


_SCALARS = {int: "int", float: "float", str: "str", bool: "bool"}


def _class(message: object) -> Any:
    """The class of a message, as functools.cache's type hints want it."""
    return type(message)


def _shape(hint: Any, rule: Rule | None = None) -> ValueShape:
    if typing.get_origin(hint) is typing.Annotated:
        inner, *annotations = typing.get_args(hint)
        rules = [item for item in annotations if isinstance(item, Range | Text | Many)]
        return _shape(inner, rules[-1] if rules else rule)
    if hint in _SCALARS:
        return ValueShape(_SCALARS[hint], hint, rule)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return ValueShape("enum", hint)
    if is_dataclass(hint):
        return ValueShape("message", hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return ValueShape("many", tuple, rule, _shape(arguments[0]))
    if origin is Mapping:
        return ValueShape("mapping", dict, rule, _shape(arguments[1]), key=_shape(arguments[0]))
    if origin in (types.UnionType, typing.Union) and all(is_dataclass(argument) for argument in arguments):
        return ValueShape("choice", None, choices=arguments)
    raise TypeError(f"no shape for {hint!r}")


@cache
def fields_of(cls: Any) -> tuple[SchemaField, ...]:
    """The fields of a message class, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    result = []
    for entry in fields(cls):
        hint = hints[entry.name]
        optional = False
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            arguments = [argument for argument in typing.get_args(hint) if argument is not type(None)]
            optional = len(arguments) < len(typing.get_args(hint))
            hint = arguments[0] if len(arguments) == 1 else typing.Union[tuple(arguments)]  # noqa: UP007
        required = entry.default is MISSING and entry.default_factory is MISSING
        result.append(SchemaField(entry.name, _shape(hint), optional, required))
    return tuple(result)


def _number(value: Any, rule: Range, *, whole: bool) -> Iterator[Violation]:
    unit = f" {rule.unit}" if rule.unit else ""
    right = isinstance(value, int) if whole else isinstance(value, int | float)
    if not right or isinstance(value, bool):
        yield Violation("", f"is {value!r}, not a {'whole ' if whole else ''}number", f"give a number{unit}")
    elif not math.isfinite(value) or not rule.low <= value <= rule.high:
        yield Violation("", f"is {value!r}, outside [{rule.low:g}, {rule.high:g}]{unit}", "give a value inside")


def _text(value: Any, rule: Text) -> Iterator[Violation]:
    if not isinstance(value, str):
        yield Violation("", f"is {type(value).__name__}, not text", "give text")
    elif not value:
        if rule.required:
            yield Violation("", "is empty", "give a value")
    elif len(value) > rule.longest:
        yield Violation("", f"has {len(value)} characters", f"use at most {rule.longest}")
    elif rule.pattern is not None and not rule.pattern.fullmatch(value):
        yield Violation("", f"is {value[:80]!r}", f"use {rule.shape}")


def list_value_violations(shape: ValueShape, value: Any) -> Iterator[Violation]:
    """Every rule that one value breaks."""
    rule = shape.rule
    match shape.kind:
        case "int" | "float" if isinstance(rule, Range):
            yield from _number(value, rule, whole=shape.kind == "int")
        case "str" if isinstance(rule, Text):
            yield from _text(value, rule)
        case "enum":
            if not isinstance(value, shape.type):
                yield Violation("", f"is {value!r}", f"use one of {[member.name for member in shape.type]}")
        case "message" | "choice":
            if not isinstance(value, shape.choices or shape.type):
                yield Violation("", f"is {type(value).__name__}", "give the message that the contract names")
            else:
                yield from list_violations(value)
        case "many" | "mapping":
            yield from _collection(shape, value)


def _collection(shape: ValueShape, value: Any) -> Iterator[Violation]:
    if isinstance(shape.rule, Many) and len(value) > shape.rule.most:
        yield Violation("", f"holds {len(value)} items", f"send at most {shape.rule.most}")
        return
    if shape.key is not None:
        for key in value:
            for violation in list_value_violations(shape.key, key):
                yield Violation(f"[{str(key)[:80]!r}]", f"as a key {violation.problem}", violation.remedy)
    item = shape.item
    if item is None or (item.rule is None and item.kind in ("int", "float", "str", "bool")):
        return
    pairs = value.items() if shape.kind == "mapping" else enumerate(value)
    for key, entry in pairs:
        for violation in list_value_violations(item, entry):
            yield violation.under(f"[{key}]")


def list_violations(message: Any) -> Iterator[Violation]:
    """Every rule that a message breaks, with the path of the field."""
    for entry in fields_of(_class(message)):
        value = getattr(message, entry.name)
        if value is None:
            if not entry.optional:
                yield Violation(entry.name, "is missing", "set it")
            continue
        for violation in list_value_violations(entry.shape, value):
            yield violation.under(entry.name)
    across = getattr(message, "violations", None)
    if across is not None:
        yield from across()


def _obeys_scalar(shape: ValueShape) -> Callable[[Any], bool]:
    rule, cls = shape.rule, shape.type
    if isinstance(rule, Range):
        low, high = rule.low, rule.high
        # The exact type is the fast case; NaN fails both comparisons.
        return lambda value: type(value) is cls and low <= value <= high
    assert isinstance(rule, Text)
    longest, required, pattern = rule.longest, rule.required, rule.pattern
    if pattern is not None:
        match = pattern.fullmatch
        # A pattern speaks of what is there; whether it must be there is said apart.
        return lambda value: (
            type(value) is str and len(value) <= longest and (match(value) is not None if value else not required)
        )
    return lambda value: type(value) is str and len(value) <= longest and (bool(value) or not required)


def _obeys(shape: ValueShape) -> Callable[[Any], bool] | None:
    """A quick test that is true only of values without violations; None where nothing can be wrong."""
    match shape.kind:
        case "int" | "float" | "str":
            return None if shape.rule is None else _obeys_scalar(shape)
        case "enum":
            enumeration = shape.type
            return lambda value: type(value) is enumeration
        case "message" | "choice":
            return lambda value: isinstance(value, shape.choices or shape.type) and _obeying(_class(value))(value)
        case "many":
            assert shape.item is not None
            most = shape.rule.most if isinstance(shape.rule, Many) else 2**31
            item = _obeys(shape.item)
            if item is None:
                return lambda values: len(values) <= most
            return lambda values: len(values) <= most and all(map(item, values))
        case "mapping":
            return _obeys_mapping(shape)
        case _:
            return None


def _obeys_mapping(shape: ValueShape) -> Callable[[Any], bool]:
    assert shape.item is not None
    assert shape.key is not None
    most = shape.rule.most if isinstance(shape.rule, Many) else 2**31
    key, item = _obeys(shape.key), _obeys(shape.item)
    return lambda values: (
        len(values) <= most
        and (key is None or all(map(key, values)))
        and (item is None or all(map(item, values.values())))
    )


@cache
def _obeying(cls: Any) -> Callable[[Any], bool]:
    """The quick test of a whole message: the hot path decodes thousands a second."""
    tests = [(entry.name, entry.optional, _obeys(entry.shape)) for entry in fields_of(cls)]
    rows = [(name, optional, test) for name, optional, test in tests if test is not None]
    obeys: Callable[[Any], bool] | None = getattr(cls, "obeys", None)
    if obeys is not None:
        return obeys
    across = hasattr(cls, "violations")

    def obeying(message: Any) -> bool:
        for name, optional, test in rows:
            value = getattr(message, name)
            if value is None:
                if optional:
                    continue
                return False
            if not test(value):
                return False
        return not across or next(message.violations(), None) is None

    return obeying


def is_valid_message(message: Any) -> bool:
    """Whether a message breaks no rule; quick where it does not."""
    return _obeying(_class(message))(message) or next(list_violations(message), None) is None


def check_message(message: Any) -> None:
    """Raises InvalidMessage, naming broken rules, unless the message obeys them all."""
    if _obeying(_class(message))(message):
        return
    found = tuple(itertools.islice(list_violations(message), VIOLATIONS_REPORTED_MOST))
    if found:
        raise InvalidMessage(f"{type(message).__name__} breaks the contract", found)
