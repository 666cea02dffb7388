"""The shipped rules in a faster life: every span of time in them is so many times shorter.

Owns which numbers of a rule are times: `for`, `interval`, ranges, offsets, and what a
metric in seconds is compared with. All else stays: watts, ratios and counts are not faster.
A recorded value that stands for a minute (`sum_over_time(...) * 60`) still stands for one,
for it is recorded so many times more often; a day's joules come together in a day of the
faster life. What it does not understand it refuses, so that no time is left as it was.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["NotUnderstood", "compressed", "compressed_expression"]

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+)(ms|s|m|h|d)")
_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<string>'[^']*'|"[^"]*")|(?P<range>\[[^\]]*\])|(?P<duration>\d+(?:ms|[smhdwy])[\w]*)
    |(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)(?![\w.])|(?P<name>[A-Za-z_:][\w:]*)
    |(?P<compared>==|!=|<=|>=|<|>)(?!~)|(?P<matched>=~|!~|=)|(?P<sign>[-+*/(){},])""",
    re.VERBOSE,
)
# Words of PromQL that neither take nor give a time.
_WORDS = frozenset(
    [
        "sum",
        "max",
        "min",
        "avg",
        "count",
        "rate",
        "increase",
        "sum_over_time",
        "avg_over_time",
        "absent",
        "abs",
        "time",
        "by",
        "on",
        "group_left",
        "and",
        "or",
        "unless",
        "offset",
    ]
)
_RULE = frozenset({"alert", "record", "expr", "for", "labels", "annotations"})
_GROUP = frozenset({"name", "interval", "rules"})


class NotUnderstood(ValueError):
    """A part of the rules of which it is not known whether it is a time."""


class _Token(NamedTuple):
    kind: str
    text: str


def compressed(document: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The document of rules, `factor` times faster; raises NotUnderstood."""
    _known(document, {"groups"}, "the file")
    return {"groups": [_group(group, factor) for group in document["groups"]]}


def compressed_expression(expression: str, factor: float) -> str:
    """One expression; raises NotUnderstood."""
    tokens = list(_tokens(expression))
    seconds = sum(token.kind == "name" and token.text.endswith("_seconds") for token in tokens)
    found = scaled = 0
    previous = _Token("", "")
    out = []
    for at, token in enumerate(tokens):
        text = token.text
        if token.kind == "range":
            text = f"[{_shorter(text[1:-1], factor)}]"
        elif token.kind == "duration":
            if previous != ("name", "offset"):
                raise NotUnderstood(f"{text} is after no offset in {expression!r}")
            text = _shorter(text, factor)
        elif token.kind == "number" and _compared_with_seconds(tokens, at):
            scaled += 1
            text = f"{float(text) / factor:.9g}"
        if token.kind != "space":
            found += token.kind == "name" and token.text == "time"
            previous = token
        out.append(text)
    if scaled != seconds:
        raise NotUnderstood(f"seconds that are not compared with a number at once in {expression!r}")
    if found > scaled:
        raise NotUnderstood(f"time() that is not compared in {expression!r}")
    return "".join(out)


def _group(group: Mapping[str, Any], factor: float) -> dict[str, Any]:
    _known(group, _GROUP, group.get("name", "a group"))
    out = dict(group, rules=[_rule(rule, factor) for rule in group["rules"]])
    if "interval" in group:
        out["interval"] = _shorter(group["interval"], factor)
    return out


def _rule(rule: Mapping[str, Any], factor: float) -> dict[str, Any]:
    _known(rule, _RULE, rule.get("alert") or rule.get("record"))
    out = dict(rule, expr=compressed_expression(rule["expr"], factor))
    if "for" in rule:
        out["for"] = _shorter(rule["for"], factor)
    return out


def _known(found: Mapping[str, Any], known: frozenset[str] | set[str], where: object) -> None:
    if strange := found.keys() - known:
        raise NotUnderstood(f"{where} has {', '.join(sorted(strange))}")


def _shorter(duration: str, factor: float) -> str:
    parts = _DURATION.findall(duration)
    if not parts or "".join(map("".join, parts)) != duration:
        raise NotUnderstood(f"{duration!r} is no duration")
    length_ms = round(sum(int(number) * _UNITS_MS[unit] for number, unit in parts) / factor)
    if length_ms < 1:
        raise NotUnderstood(f"{duration} is nothing when it is {factor:g} times shorter")
    return f"{length_ms}ms"


def _tokens(expression: str) -> Iterator[_Token]:
    at = 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise NotUnderstood(f"{expression[at : at + 20]!r} in {expression!r}")
        kind = str(match.lastgroup)
        if kind == "name":
            _check_name(match[0], expression)
        yield _Token(kind, match[0])
        at = match.end()


def _check_name(name: str, expression: str) -> None:
    # Metrics and recorded series of ours; labels are one word.
    if name.startswith("eelgrid_") or name in _WORDS or re.fullmatch(r"\w+:eelgrid_\w+:\w+", name):
        if name.endswith("_seconds_total"):
            raise NotUnderstood(f"{name} in {expression!r} counts seconds")
        return
    if "_" in name or ":" in name or re.search(rf"\b{name}\s*\(", expression):
        raise NotUnderstood(f"{name} in {expression!r}")


def _compared_with_seconds(tokens: list[_Token], at: int) -> bool:
    """Whether the number there follows a comparison, and that a metric in seconds with or without a selector."""
    before = [token for token in tokens[:at] if token.kind != "space"]
    if not before or before.pop().kind != "compared":
        return False
    if before and before[-1].text == "}":
        while before.pop().text != "{":
            pass
    return bool(before) and before[-1].kind == "name" and before[-1].text.endswith("_seconds")
