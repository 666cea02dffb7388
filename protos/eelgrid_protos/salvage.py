"""What is left of a message that breaks its contract, so that one bad element does not cost the others.

Owns two ways: `omit_broken` leaves bad elements out of an answer, and `repair` gives what an
older version wrote the nearest value that is allowed, the same each time. Neither runs for a
message that obeys. Knows no wire and no log: what was left out or changed is told to the caller.
"""

import hashlib
import math
import re
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from eelgrid_protos.errors import Violation
from eelgrid_protos.quantities import Many, Range, Text
from eelgrid_protos.schema import (
    VIOLATIONS_REPORTED_MOST,
    ValueShape,
    fields_of,
    is_valid_message,
    list_value_violations,
    list_violations,
)

_Message = TypeVar("_Message")
_HASH_BYTES = 4
_SPACED = re.compile(r"[^A-Za-z0-9._/-]+")


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What is left of an answer, None where that is nothing; how much was left out, and the first reasons."""

    message: Any
    omitted: int
    reasons: tuple[Violation, ...]


def _class(message: object) -> Any:
    """The class of a message, as functools.cache's type hints want it."""
    return type(message)


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
        unchanged = len(kept) == len(value) <= most and all(map(_is, kept, value))
        return value if unchanged else tuple(kept[:most])


def _is(one: object, other: object) -> bool:
    return one is other


def omit_broken(message: Any) -> Salvaged:
    """The answer without the elements that break the contract: the innermost message of a list that is at fault.

    What is optional and broken counts as not known. Nothing is left where the fault is in the answer itself.
    """
    omission = _Omission()
    left = omission.message(message, "")
    return Salvaged(left, omission.count, tuple(omission.reasons))


def repair_text(value: str, rule: Text) -> str:
    """The nearest text that the rule allows; a name keeps what told it apart by a hash of what it was."""
    if not next(list_value_violations(ValueShape("str", str, rule), value), None):
        return value
    mark = hashlib.blake2b(value.encode(errors="surrogatepass"), digest_size=_HASH_BYTES).hexdigest()
    readable = _SPACED.sub("-", value).strip("._/-")[: max(0, rule.longest - 1 - len(mark))].rstrip("._/-")
    name = f"{readable}-{mark}" if readable else f"x-{mark}"
    printable = "".join(letter if letter.isprintable() else "?" for letter in value)[: rule.longest]
    allows_spaces = rule.pattern is None or rule.pattern.fullmatch("a b") is not None
    for candidate in (printable if allows_spaces else name, name[: rule.longest], ""):
        if not next(list_value_violations(ValueShape("str", str, rule), candidate), None):
            return candidate
    return value


def _repair_value(shape: ValueShape, value: Any) -> Any:
    rule = shape.rule
    match shape.kind:
        case "str" if isinstance(rule, Text) and isinstance(value, str):
            return repair_text(value, rule)
        case "int" | "float" if isinstance(rule, Range) and isinstance(value, int | float):
            return _clamp_number(value, rule, whole=shape.kind == "int")
        case "message" | "choice" if isinstance(value, shape.choices or shape.type):
            return repair_message(value)
        case "many" if shape.item is not None:
            item = shape.item
            return tuple(_repair_value(item, element) for element in value)
        case "mapping" if shape.key is not None and shape.item is not None:
            return {_repair_value(shape.key, key): _repair_value(shape.item, item) for key, item in value.items()}
        case _:
            return value


def _clamp_number(value: float, rule: Range, *, whole: bool) -> float:
    if not math.isfinite(value):
        return rule.low if whole or rule.low > 0.0 else max(rule.low, 0.0)
    bounded = min(max(value, rule.low), rule.high)
    return value if bounded == value else int(bounded) if whole else bounded


def repair_message(message: _Message) -> _Message:
    """The message with each text and number brought inside its rule; equal messages are repaired alike.

    What cannot be repaired by itself, such as a list too long, stays as it is: whoever sends it leaves it out.
    """
    if is_valid_message(message):
        return message
    changes = {}
    for entry in fields_of(_class(message)):
        value = getattr(message, entry.name)
        if value is not None and (repaired := _repair_value(entry.shape, value)) != value:
            changes[entry.name] = repaired
    left: Any = message
    return replace(left, **changes) if changes else message
