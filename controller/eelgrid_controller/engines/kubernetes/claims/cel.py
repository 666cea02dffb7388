"""The subset of CEL that device selectors use: parser and evaluator.

Anything else raises ExpressionUnreadable with its position. As in CEL a missing attribute is an error, which `&&`
absorbs beside false and `||` beside true; a device on which the whole is an error is not selected.

Sources: the CEL specification (langdef.md, "Logical Operators"); k8s.io/dynamic-resource-allocation/cel.
"""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable, QuantityUnreadable, parse_nanos

_NANOS = 10**9
_LONGEST = 10 * 1024  # the API's own bound
_DEEPEST = 40
_TOKENS = re.compile(
    r"\s*(?:(?P<text>\"(?:[^\"\\\n]|\\[\"'\\])*\"|'(?:[^'\\\n]|\\[\"'\\])*')|(?P<number>[0-9]{1,19}(?![\w.]))|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>&&|\|\||==|!=|<=|>=|[<>!()\[\],.\-]))"
)
_COMPARES: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": lambda one, other: one == other,
    "!=": lambda one, other: one != other,
    "<": lambda one, other: one < other,
    "<=": lambda one, other: one <= other,
    ">": lambda one, other: one > other,
    ">=": lambda one, other: one >= other,
}
_CALLS: Mapping[str, tuple[type, Callable[[Any, Any], Any]]] = {
    "startsWith": (str, lambda one, other: one.startswith(other)),
    "endsWith": (str, lambda one, other: one.endswith(other)),
    "contains": (str, lambda one, other: other in one),
    "compareTo": (Fraction, lambda one, other: (one > other) - (one < other)),
    "isGreaterThan": (Fraction, lambda one, other: one > other),
    "isLessThan": (Fraction, lambda one, other: one < other),
}


class ExpressionUnreadable(KubernetesUnreadable):
    """An expression, or a part of it, that is not read here; `text` is the whole."""

    def __init__(self, problem: str, text: str = "") -> None:
        self.text = text
        super().__init__("cel.expression", problem, "write it by ==, in, &&, || over device.driver and attributes")


class CelDevice(NamedTuple):
    """What an expression can see of a device; names are (domain, name), capacities are numbers."""

    driver: str
    attributes: Mapping[tuple[str, str], str | int | bool]
    capacity: Mapping[tuple[str, str], Fraction]


class _Missing(Exception):
    """What CEL calls an error: the device has no such attribute, or one of another type."""


_Node = Callable[[CelDevice], Any]


class CelSelector(NamedTuple):
    """One expression; equal for equal texts. `driver` is the one that it names, empty where it names none."""

    text: str
    driver: str
    judge: _Node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CelSelector) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def matches(self, device: CelDevice) -> bool:
        """Whether the expression holds of the device."""
        try:
            return self.judge(device) is True
        except _Missing:
            return False


@lru_cache(maxsize=1024)
def compile_selector(text: str) -> CelSelector:
    """The choice that an expression makes; raises ExpressionUnreadable."""
    if len(text) > _LONGEST:
        raise ExpressionUnreadable(f"has {len(text)} characters, and {_LONGEST} may be")
    try:
        parser = _Parser(text)
        return CelSelector(text, parser.driver_named(), parser.whole())
    except ExpressionUnreadable as error:
        raise ExpressionUnreadable(error.fault, text) from None


class _Parser:
    """Descends into one expression."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        self._at = 0
        self._depth = 0
        place = 0
        while place < len(text.rstrip()):
            found = _TOKENS.match(text, place)
            if found is None:
                raise ExpressionUnreadable(f"{text[place : place + 20].strip()!r} is not read here")
            self._tokens.append((str(found.lastgroup), found.group().strip()))
            place = found.end()

    def whole(self) -> _Node:
        """The judge of the whole."""
        judge = self._or()
        if self._at < len(self._tokens):
            raise self._unread()
        return judge

    def driver_named(self) -> str:
        """Of a conjunction, the driver that one of its parts names."""
        words, depth, found = [token for _, token in self._tokens], 0, ""
        for index, (kind, token) in enumerate(self._tokens):
            depth += (token in ("(", "[")) - (token in (")", "]")) if kind == "sign" else 0
            if depth == 0 and (kind, token) == ("sign", "||"):
                return ""
            after = self._tokens[index + 4][0] if index + 4 < len(words) else ""
            if depth == 0 and words[index : index + 4] == ["device", ".", "driver", "=="] and after == "text":
                found = found or _text(words[index + 4])
        return found

    # Tokens

    def _next(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _accept(self, *signs: str) -> str:
        if self._at < len(self._tokens) and self._tokens[self._at][0] != "text" and self._next() in signs:
            self._at += 1
            return self._tokens[self._at - 1][1]
        return ""

    def _must(self, sign: str) -> None:
        if not self._accept(sign):
            raise self._unread()

    def _name(self) -> str:
        if self._at >= len(self._tokens) or self._tokens[self._at][0] != "name":
            raise self._unread()
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _unread(self) -> ExpressionUnreadable:
        return ExpressionUnreadable(f"{self._next() or 'its end'!r} is not read there")

    # Grammar

    def _or(self) -> _Node:
        self._descend()
        parts = [self._and()]
        while self._accept("||"):
            parts.append(self._and())
        self._depth -= 1
        return _join(parts, is_or=True)

    def _and(self) -> _Node:
        parts = [self._not()]
        while self._accept("&&"):
            parts.append(self._not())
        return _join(parts, is_or=False)

    def _not(self) -> _Node:
        count = 0
        while self._accept("!"):
            count += 1
        inner = self._relation()
        return (lambda device: _truth(inner(device)) is (count % 2 == 0)) if count else inner

    def _descend(self) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ExpressionUnreadable(f"is more than {_DEEPEST} deep")

    def _relation(self) -> _Node:
        left = self._value()
        sign = self._accept(*_COMPARES, "in")
        if not sign:
            return left
        right = self._value()
        return _within(left, right) if sign == "in" else _comparison(left, right, _COMPARES[sign])

    def _value(self) -> _Node:
        found, depth = self._first(), self._depth
        while self._accept("."):
            # Each call is one more around those before.
            self._descend()
            found = self._parse_method_call(found, self._name())
        self._depth = depth
        return found

    def _parse_method_call(self, found: _Node, name: str) -> _Node:
        self._must("(")
        if name == "lowerAscii":
            self._must(")")
            return lambda device: _require_type(found(device), str).lower()
        if name not in _CALLS:
            raise ExpressionUnreadable(f"{name}() is not read here")
        kind, does = _CALLS[name]
        other = self._or()
        self._must(")")
        return lambda device: does(_require_type(found(device), kind), _require_type(other(device), kind))

    def _first(self) -> _Node:
        if self._accept("("):
            found = self._or()
            self._must(")")
            return found
        if self._accept("["):
            return self._list()
        if self._accept("-"):
            number = -int(self._literal("number"))
            return lambda _: number
        kind, token = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        if kind in ("text", "number"):
            self._at += 1
            value = _text(token) if kind == "text" else int(token)
            return lambda _: value
        return self._parse_identifier(self._name())

    def _parse_identifier(self, name: str) -> _Node:
        if name in ("true", "false"):
            return lambda _: name == "true"
        if name == "device":
            return self._device()
        if name not in ("has", "quantity"):
            raise ExpressionUnreadable(f"{name!r} is not read here")
        self._must("(")
        if name == "has":
            inner = self._or()
            self._must(")")
            return lambda device: _has(inner, device)
        try:
            amount = Fraction(parse_nanos(_text(self._literal("text")), "quantity"), _NANOS)
        except QuantityUnreadable as error:
            raise ExpressionUnreadable(error.fault) from None
        self._must(")")
        return lambda _: amount

    def _list(self) -> _Node:
        items: list[_Node] = []
        self._descend()
        while not self._accept("]"):
            items.append(self._value())
            if not self._accept(","):
                self._must("]")
                break
        self._depth -= 1
        return lambda device: [one(device) for one in items]

    def _device(self) -> _Node:
        self._must(".")
        part = self._name()
        if part == "driver":
            return lambda device: device.driver
        if part not in ("attributes", "capacity"):
            raise ExpressionUnreadable(f"device.{part} is not read here")
        self._must("[")
        domain = _text(self._literal("text"))
        self._must("]")
        is_capacity = part == "capacity"
        if self._accept("["):
            name = _text(self._literal("text"))
            self._must("]")
        elif self._accept("."):
            name = self._name()
        else:
            # The map itself, of which `in` asks for names.
            return lambda device: {key[1] for key in _part(device, is_capacity) if key[0] == domain}
        return lambda device: _found(_part(device, is_capacity), (domain, name))

    def _literal(self, kind: str) -> str:
        if self._at >= len(self._tokens) or self._tokens[self._at][0] != kind:
            raise self._unread()
        self._at += 1
        return self._tokens[self._at - 1][1]


def _part(device: CelDevice, is_capacity: bool) -> Mapping[tuple[str, str], Any]:
    return device.capacity if is_capacity else device.attributes


def _found(part: Mapping[tuple[str, str], Any], key: tuple[str, str]) -> Any:
    if key not in part:
        raise _Missing
    return part[key]


def _has(inner: _Node, device: CelDevice) -> bool:
    try:
        inner(device)
    except _Missing:
        return False
    return True


def _truth(value: Any) -> bool:
    return bool(_require_type(value, bool))


def _require_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise _Missing
    return value


def _join(parts: list[_Node], *, is_or: bool) -> _Node:
    """All parts by `&&`, or by `||`: one that decides does so beside errors."""

    def judge(device: CelDevice) -> bool:
        is_missing = False
        for part in parts:
            try:
                if _truth(part(device)) is is_or:
                    return is_or
            except _Missing:
                is_missing = True
        if is_missing:
            raise _Missing
        return not is_or

    return judge if len(parts) > 1 else parts[0]


def _comparison(left: _Node, right: _Node, compare: Callable[[Any, Any], bool]) -> _Node:
    def judge(device: CelDevice) -> bool:
        one, other = left(device), right(device)
        # CEL compares no text with a number; a bool is an int to Python alone.
        if type(one) is not type(other):
            raise _Missing
        try:
            return compare(one, other)
        except TypeError:  # of what is in two lists
            raise _Missing from None

    return judge


def _within(left: _Node, right: _Node) -> _Node:
    def judge(device: CelDevice) -> bool:
        one, every = left(device), right(device)
        if not isinstance(every, list | set):
            raise _Missing
        return any(type(one) is type(other) and one == other for other in every)

    return judge


def _text(token: str) -> str:
    return re.sub(r"\\(.)", r"\1", token[1:-1])
