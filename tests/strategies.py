"""Hypothesis strategies for every message, made from the rules in its type hints."""

from functools import cache
from typing import Any

from hypothesis import strategies as st

from eelgrid_protos.quantities import Many, Range, Text
from eelgrid_protos.schema import ValueShape, fields_of, list_violations

_ITEMS_MOST = 3


def _scalar(shape: ValueShape) -> st.SearchStrategy[Any]:
    rule = shape.rule
    if shape.kind == "bool":
        return st.booleans()
    if shape.kind == "str":
        if isinstance(rule, Text) and rule.required and rule.pattern is not None:
            return st.from_regex(r"\A[a-z0-9]([a-z0-9._/-]{0,20}[a-z0-9])?\Z")
        least = 1 if isinstance(rule, Text) and rule.required else 0
        return st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=least, max_size=20)
    low, high = (rule.low, rule.high) if isinstance(rule, Range) else (0.0, 1.0)
    if shape.kind == "int":
        return st.integers(int(low), int(high))
    return st.floats(low, high, allow_nan=False).map(lambda value: value + 0.0)


def _value(shape: ValueShape) -> st.SearchStrategy[Any]:
    most = min(_ITEMS_MOST, shape.rule.most) if isinstance(shape.rule, Many) else _ITEMS_MOST
    match shape.kind:
        case "enum":
            return st.sampled_from(shape.type)
        case "message":
            return message(shape.type)
        case "choice":
            return st.one_of([message(choice) for choice in shape.choices])
        case "many":
            return st.lists(_value(shape.item), max_size=most).map(tuple)
        case "mapping":
            return st.dictionaries(st.text("abc", min_size=1, max_size=3), _value(shape.item), max_size=2)
        case _:
            return _scalar(shape)


@cache
def message(cls: Any) -> st.SearchStrategy[Any]:
    """Messages of a class that obey every rule."""
    parts = {}
    for field in fields_of(cls):
        value = _value(field.shape)
        parts[field.name] = st.none() | value if field.optional else value
    return st.builds(cls, **parts).filter(lambda made: next(list_violations(made), None) is None)
