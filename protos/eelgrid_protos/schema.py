"""Schemas of messages: reads type hints into shapes, checks values against them, and salvages broken messages.

A `ValueShape` is what the type hint of a dataclass field says (Annotated rules, optional, repeated, mapping, one-of),
read once and kept. codec.py and plain_messages.py both build on it, so that bytes, JSON and YAML obey the same rules.

A message that breaks its rules is salvaged so that one bad element does not cost the others: `omit_broken` leaves bad
elements out of an answer, and `repair_message` gives what an older version wrote the nearest value that is allowed,
the same each time. The caller learns what was left out or changed. Knows nothing of protobuf, sockets or logs.
"""

import itertools
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import IntEnum
from functools import cache, partial
from typing import Any, TypeVar

from eelgrid_protos.errors import CONTRACT_BROKEN, InvalidMessage, Violation
from eelgrid_protos.quantities import Many, Range, Rule, Text
from eelgrid_protos.values import dataclass

_Message = TypeVar("_Message")
# A person reads a few, and the answer carries 64 (faults.status_details); a message may break as many as it has elements.
VIOLATIONS_REPORTED_MOST = 64
# Of the mark that tells a repaired name from others, and what it may not hold.
_HASH_BYTES = 4
_SPACED = re.compile(r"[^A-Za-z0-9._/-]+")


@dataclass(frozen=True, slots=True)
class ValueShape:
    """One value: `kind` is int, float, str, bool, bytes, enum, message, many, mapping or choice."""

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


_SCALARS = {int: "int", float: "float", str: "str", bool: "bool", bytes: "bytes"}


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
    """Returns the fields of a message class, in order."""
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
    """Yields every rule that one value breaks."""
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
        case "bytes":
            if not isinstance(value, bytes):
                yield Violation("", f"is {type(value).__name__}, not bytes", "give bytes")
            elif isinstance(rule, Many) and len(value) > rule.most:
                yield Violation("", f"has {len(value)} bytes", f"send at most {rule.most}")


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
    """Yields every rule that a message breaks, with the path of the field."""
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


def compile_when_called(scope: dict[str, Any], name: str, compile_function: Callable[[], Callable[[Any], Any]]) -> None:
    """Puts a function of one argument into the scope of generated code that is compiled when it is first called.

    A message may hold a hundred kinds of others, and most calls carry three: a command need not wait for the rest.
    """

    def call_first(value: Any) -> Any:
        scope[name] = compile_function()
        return scope[name](value)

    scope[name] = call_first


def _keep(scope: dict[str, Any], value: Any) -> str:
    """Returns the name under which generated source finds a value."""
    name = f"k{len(scope)}"
    scope[name] = value
    return name


def _scalar_source(shape: ValueShape, value: str, scope: dict[str, Any]) -> str:
    rule, cls = shape.rule, shape.type.__name__
    if isinstance(rule, Range):
        # The exact type is the fast case; NaN fails both comparisons.
        return f"type({value}) is {cls} and {_keep(scope, rule.low)} <= {value} <= {_keep(scope, rule.high)}"
    assert isinstance(rule, Text)
    text = f"type({value}) is str and len({value}) <= {rule.longest}"
    if rule.pattern is not None:
        # A pattern speaks of what is there; whether it must be there is said apart.
        match = _keep(scope, rule.pattern.fullmatch)
        return f"{text} and ({match}({value}) is not None if {value} else {not rule.required})"
    return f"{text} and {value}" if rule.required else text


def _source(shape: ValueShape, value: str, scope: dict[str, Any]) -> str | None:
    """Returns the source of a test that is true only of values without violations; None where nothing can be wrong."""
    most = shape.rule.most if isinstance(shape.rule, Many) else 2**31
    match shape.kind:
        case "int" | "float" | "str":
            return None if shape.rule is None else _scalar_source(shape, value, scope)
        case "enum":
            return f"type({value}) is {_keep(scope, shape.type)}"
        case "message":
            test = f"obeying_{shape.type.__name__}"
            compile_when_called(scope, test, partial(_obeying, shape.type))
            return f"type({value}) is {_keep(scope, shape.type)} and {test}({value})"
        case "choice":
            chosen, test = _keep(scope, shape.choices), _keep(scope, _obeying)
            return f"isinstance({value}, {chosen}) and {test}(type({value}))({value})"
        case "bytes":
            return f"type({value}) is bytes and len({value}) <= {most}"
        case "many" | "mapping":
            tests = [f"{value} is not None and len({value}) <= {most}"]
            for part, parts in ((shape.key, value), (shape.item, f"{value}.values()" if shape.key else value)):
                each = None if part is None else _source(part, "item", scope)
                if each is not None:
                    tests.append(f"all([{each} for item in {parts}])")
            return " and ".join(tests)
        case _:
            return None


@cache
def _obeying(cls: Any) -> Callable[[Any], bool]:
    """The quick test of a whole message, generated as `dataclasses` generates __init__: thousands a second are read.

    Closures field by field take about twice as long (measured on Workload: 29 to 39 against 18 us).
    """
    obeys: Callable[[Any], bool] | None = getattr(cls, "obeys", None)
    if obeys is not None:
        return obeys
    scope: dict[str, Any] = {}
    lines = []
    for entry in fields_of(cls):
        source = _source(entry.shape, "value", scope)
        if source is not None:
            absent = "value is not None and " if entry.optional else ""
            lines.append(f" value = message.{entry.name}\n if {absent}not ({source}): return False\n")
    across = "next(message.violations(), None) is None" if hasattr(cls, "violations") else "True"
    exec(f"def obeying(message):\n{''.join(lines)} return {across}", scope)  # noqa: S102  # names are our own fields
    test_message: Callable[[Any], bool] = scope["obeying"]
    return test_message


def is_valid_message(message: Any) -> bool:
    """Returns whether a message breaks no rule; fast if it breaks none."""
    return _obeying(_class(message))(message) or next(list_violations(message), None) is None


def check_message(message: Any) -> None:
    """Checks a message against its rules; raises InvalidMessage, which names the broken ones."""
    if _obeying(_class(message))(message):
        return
    found = tuple(itertools.islice(list_violations(message), VIOLATIONS_REPORTED_MOST))
    if found:
        raise InvalidMessage(f"{type(message).__name__} {CONTRACT_BROKEN}", found)


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What is left of an answer, None if nothing; how many parts were omitted, and the first reasons."""

    message: Any
    omitted: int
    reasons: tuple[Violation, ...]


class _Omission:
    """One answer being looked through."""

    def __init__(self) -> None:
        self.count = 0
        self.reasons: list[Violation] = []

    def lose(self, found: Violation, path: str) -> None:
        """One part is left out."""
        self.count += 1
        if len(self.reasons) < VIOLATIONS_REPORTED_MOST:
            self.reasons.append(found.under(path) if path else found)

    def message(self, message: Any, path: str) -> Any:
        """The message without its broken parts; None where it is broken itself, which has then been told."""
        if is_valid_message(message):
            return message
        changes: dict[str, Any] = {}
        for entry in fields_of(_class(message)):
            value, at = getattr(message, entry.name), f"{path}.{entry.name}" if path else entry.name
            if value is None:
                if not entry.optional:
                    self.lose(Violation("", "is missing", "set it"), at)
                    return None
                continue
            kept = self._value(entry.shape, value, at)
            if kept is None and not entry.optional:
                return None
            if kept is not value:
                changes[entry.name] = kept
        left = replace(message, **changes) if changes else message
        found = next(list_violations(left), None)
        if found is None:
            return left
        self.lose(found, path)
        return None

    def _value(self, shape: ValueShape, value: Any, path: str) -> Any:
        """The value without broken elements; None where the rest of it is broken."""
        if shape.kind in ("message", "choice"):
            if isinstance(value, shape.choices or shape.type):
                return self.message(value, path)
            self.lose(Violation("", f"is {type(value).__name__}", "give the message that the contract names"), path)
            return None
        if shape.kind == "many" and shape.item is not None and shape.item.kind in ("message", "choice"):
            return self._elements(shape, shape.item, value, path)
        found = next(list_value_violations(shape, value), None)
        if found is None:
            return value
        self.lose(found, path)
        return None

    def _elements(self, shape: ValueShape, item: ValueShape, value: Any, path: str) -> Any:
        kept = [
            left
            for index, element in enumerate(value)
            if (left := self._value(item, element, f"{path}[{index}]")) is not None
        ]
        most = shape.rule.most if isinstance(shape.rule, Many) else len(kept)
        for _ in kept[most:]:
            self.lose(Violation("", f"holds {len(value)} items", f"send at most {most}"), path)
        unchanged = len(kept) == len(value) <= most and all(map(operator.is_, kept, value))
        return value if unchanged else tuple(kept[:most])


def omit_broken(message: Any) -> Salvaged:
    """Omits the elements of an answer that break the contract: the innermost message of a list that is at fault.

    What is optional and broken counts as not known. Nothing is left where the fault is in the answer itself.
    """
    omission = _Omission()
    left = omission.message(message, "")
    return Salvaged(left, omission.count, tuple(omission.reasons))


def repair_text(value: str, rule: Text) -> str:
    """Returns the nearest text that the rule allows; a repaired name has a hash of the original, so it stays distinct."""
    if not next(list_value_violations(ValueShape("str", str, rule), value), None):
        return value
    import hashlib

    mark = hashlib.blake2b(value.encode(errors="surrogatepass"), digest_size=_HASH_BYTES).hexdigest()
    readable = _SPACED.sub("-", value).strip("._/-")[: max(0, rule.longest - 1 - len(mark))].rstrip("._/-")
    name = f"{readable}-{mark}" if readable else f"x-{mark}"
    printable = "".join(letter if letter.isprintable() else "?" for letter in value)[: rule.longest]
    allows_spaces = rule.pattern is None or rule.pattern.fullmatch("a b") is not None
    for candidate in (printable if allows_spaces else name, name[: rule.longest], ""):
        if not next(list_value_violations(ValueShape("str", str, rule), candidate), None):
            return candidate
    return value


def _repaired(shape: ValueShape, value: Any) -> Any:
    rule = shape.rule
    match shape.kind:
        case "str" if isinstance(rule, Text) and isinstance(value, str):
            return repair_text(value, rule)
        case "int" | "float" if isinstance(rule, Range) and isinstance(value, int | float):
            return _clamped(value, rule, whole=shape.kind == "int")
        case "message" | "choice" if isinstance(value, shape.choices or shape.type):
            return repair_message(value)
        case "many" if shape.item is not None:
            item = shape.item
            return tuple(_repaired(item, element) for element in value)
        case "mapping" if shape.key is not None and shape.item is not None:
            return {_repaired(shape.key, key): _repaired(shape.item, item) for key, item in value.items()}
        case _:
            return value


def _clamped(value: float, rule: Range, *, whole: bool) -> float:
    if not math.isfinite(value):
        return rule.low if whole or rule.low > 0.0 else max(rule.low, 0.0)
    bounded = min(max(value, rule.low), rule.high)
    return value if bounded == value else int(bounded) if whole else bounded


def repair_message(message: _Message) -> _Message:
    """Returns the message with each text and number inside its rule; equal messages are repaired alike.

    What cannot be repaired by itself, such as a list that is too long, stays as it is: the sender omits it.
    """
    if is_valid_message(message):
        return message
    changes = {}
    for entry in fields_of(_class(message)):
        value = getattr(message, entry.name)
        if value is not None and (repaired := _repaired(entry.shape, value)) != value:
            changes[entry.name] = repaired
    left: Any = message
    return replace(left, **changes) if changes else message
