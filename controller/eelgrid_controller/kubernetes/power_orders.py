"""A PowerPolicy object as it is written: which fields of the policy it names, and what it wants them to be.

Owns the reading of one object. Must not know other objects, the policy in force or watts.

Theory. What the schema refuses never comes here, but a schema may be older than this, and
some rules it cannot say. So every value is read by the contract's own rules, and an object
with any fault is not read at all: half of an order is another order. A budget by a node
selector is one budget for each node that has these labels, now and later.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eelgrid_controller.budget_places import budget_name
from eelgrid_controller.kubernetes.errors import KubernetesUnreadable
from eelgrid_controller.kubernetes.policy_fields import (
    OBJECTIVE,
    PLACEMENT,
    PRICES,
    Aim,
    Value,
    budget_field,
    pool_field,
)
from eelgrid_controller.kubernetes.times import stamp_of
from eelgrid_protos.errors import InvalidMessage
from eelgrid_protos.messages import OBJECTIVES, BudgetScope, EnergyPrices, PoolMode, PowerBudget
from eelgrid_protos.plain import from_plain

__all__ = ["BUDGETS_MOST", "Order", "Selection", "Selector", "order_of"]

BUDGETS_MOST = 10_000
_POOLS_MOST = 1_000
_LINES_MOST = 32  # of a selector
_TIME = re.compile(r"(?:(mon|tue|wed|thu|fri|sat|sun) )?([01][0-9]|2[0-3]):([0-5][0-9])")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES = 24 * 60
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
_UNDERSCORED = re.compile(r"_([a-z])")
_PRICES = {"currency": "currency", "pue": "pue", "carbonPricePerKg": "carbon_price_per_kg",
           "utcOffsetMinutes": "utc_offset_minutes"}  # fmt: skip
_PERIOD = {"pricePerKwh": "price_per_kwh", "carbonKgPerKwh": "carbon_kg_per_kwh"}


class Selector(NamedTuple):
    """Labels that a node has: a key, an operator as in label selectors, and values; all lines have to hold."""

    lines: tuple[tuple[str, str, tuple[str, ...]], ...]

    def takes(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels is meant."""
        return all(_holds(labels.get(key), operator, values) for key, operator, values in self.lines)


class Selection(NamedTuple):
    """A budget for each node that a selector takes."""

    selector: Selector
    limit_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One object: what it names, and what it is to be."""

    uid: str
    name: str
    created_s: int
    generation: int
    values: Mapping[str, Value]
    selections: tuple[Selection, ...] = ()

    @property
    def age(self) -> tuple[int, str, str]:
        """The oldest is the least; of two of one second the first by name."""
        return self.created_s, self.name, self.uid

    def on(self, nodes: Mapping[str, Mapping[str, str]]) -> dict[str, Value]:
        """What it wants of the policy while these nodes, with their labels, are there."""
        found = dict(self.values)
        for selection in self.selections:
            for name, labels in nodes.items():
                if selection.selector.takes(labels):
                    field = budget_field(BudgetScope.NODE, name)
                    before = found.get(field)
                    is_tighter = not isinstance(before, float) or selection.limit_w < before
                    found[field] = selection.limit_w if is_tighter else before
        return found


def order_of(found: Mapping[str, Any]) -> Order:
    """The object's order; raises KubernetesUnreadable naming the field."""
    metadata, spec = found["metadata"], found.get("spec") or {}
    if not isinstance(spec, Mapping):
        raise KubernetesUnreadable("spec", "is no object", "write spec: {budgets: [...]}")
    values: dict[str, Value] = {}
    if spec.get("objective") is not None:
        objective = spec["objective"]
        if objective not in OBJECTIVES:
            raise KubernetesUnreadable("spec.objective", f"is {objective!r}", f"use one of {', '.join(OBJECTIVES)}")
        values[OBJECTIVE] = Aim(objective, OBJECTIVES[objective])
    if spec.get("placement") is not None:
        values[PLACEMENT] = _text(spec["placement"], "spec.placement")
    if spec.get("prices") is not None:
        values[PRICES] = _prices(spec["prices"])
    values |= _pools(_rows(spec, "pools", _POOLS_MOST))
    budgets, selections = _budgets(_rows(spec, "budgets", BUDGETS_MOST))
    return Order(
        uid=str(metadata["uid"]),
        name=str(metadata["name"]),
        created_s=stamp_of(metadata.get("creationTimestamp")) or 0,
        generation=int(metadata.get("generation") or 0),
        values=values | budgets,
        selections=selections,
    )


def _rows(spec: Mapping[str, Any], key: str, most: int) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """A list of the spec, each with its path."""
    rows = spec.get(key) or []
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise KubernetesUnreadable(f"spec.{key}", "is no list of objects", "write one object for each entry")
    if len(rows) > most:
        raise KubernetesUnreadable(f"spec.{key}", f"has {len(rows)} entries", f"name {most} at most")
    return [(f"spec.{key}[{number}]", row) for number, row in enumerate(rows)]


def _pools(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for path, row in rows:
        if row.get("mode") not in ("Observe", "Enforce"):
            raise KubernetesUnreadable(f"{path}.mode", f"is {row.get('mode')!r}", "use Observe or Enforce")
        plain = {"pool": row.get("name"), "mode": row["mode"].lower(), "partitioned": row.get("partitioned", False)}
        pool = _read(PoolMode, plain, path, {"pool": "name"})
        if found.setdefault(pool_field(pool.pool), pool) is not pool:
            raise KubernetesUnreadable(f"{path}.name", f"names pool {pool.pool} again", "give each pool one entry")
    return found


def _budgets(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[dict[str, Value], tuple[Selection, ...]]:
    found: dict[str, Value] = {}
    selections = []
    for path, row in rows:
        if row.get("scope") not in ("Cluster", "Rack", "Node"):
            raise KubernetesUnreadable(f"{path}.scope", f"is {row.get('scope')!r}", "use Cluster, Rack or Node")
        if isinstance(row.get("limitWatts"), bool) or not isinstance(row.get("limitWatts"), int | float):
            raise KubernetesUnreadable(f"{path}.limitWatts", "is no number", "give watts, such as 20000")
        selector = row.get("nodeSelector")
        if selector is not None:
            if row["scope"] != "Node" or row.get("name"):
                raise KubernetesUnreadable(
                    f"{path}.nodeSelector", "stands beside a name or another scope", "use it with scope Node alone"
                )
            selections.append(Selection(_selector(selector, f"{path}.nodeSelector"), float(row["limitWatts"])))
            continue
        plain = {"scope": row["scope"].lower(), "name": row.get("name") or "", "limit_w": float(row["limitWatts"])}
        budget = _read(PowerBudget, plain, path, {"limit_w": "limitWatts"})
        field = budget_field(budget.scope, budget.name)
        if field in found:
            place = budget_name(budget.scope, budget.name)
            raise KubernetesUnreadable(path, f"bounds {place} again", "give each place one limit")
        found[field] = budget.limit_w
    return found, tuple(selections)


def _selector(found: Any, path: str) -> Selector:
    labels = found.get("matchLabels") or {} if isinstance(found, Mapping) else None
    rows = found.get("matchExpressions") or [] if isinstance(found, Mapping) else None
    if not isinstance(labels, Mapping) or not isinstance(rows, list) or not (labels or rows):
        # An empty one would take every node: whoever means that writes a label that all of them have.
        raise KubernetesUnreadable(path, "selects nothing", "write matchLabels: {key: value} or matchExpressions")
    lines: list[tuple[str, str, tuple[str, ...]]] = [(str(key), "In", (str(value),)) for key, value in labels.items()]
    for row in rows:
        operator = row.get("operator") if isinstance(row, Mapping) else None
        values = tuple(map(str, row.get("values") or ())) if isinstance(row, Mapping) else ()
        if operator not in _OPERATORS or not row.get("key") or (operator in ("In", "NotIn")) != bool(values):
            raise KubernetesUnreadable(
                f"{path}.matchExpressions", f"has {row!r}", "write {key: K, operator: In, values: [V]}, or Exists"
            )
        lines.append((str(row["key"]), operator, values))
    if len(lines) > _LINES_MOST:
        raise KubernetesUnreadable(path, f"has {len(lines)} lines", f"use {_LINES_MOST} at most")
    return Selector(tuple(lines))


def _holds(label: str | None, operator: str, values: tuple[str, ...]) -> bool:
    match operator:
        case "In":
            return label in values
        case "NotIn":
            return label not in values
        case "Exists":
            return label is not None
    return label is None


def _prices(found: Any) -> EnergyPrices:
    rows = found.get("periods") if isinstance(found, Mapping) else None
    if not isinstance(rows, list):
        raise KubernetesUnreadable(
            "spec.prices", "has no periods", "write periods: [{from: '07:00', pricePerKwh: 0.25}]"
        )
    periods: dict[int, dict[str, Any]] = {}
    for number, row in enumerate(rows):
        path = f"spec.prices.periods[{number}]"
        match = _TIME.fullmatch(str(row.get("from"))) if isinstance(row, Mapping) else None
        if match is None:
            raise KubernetesUnreadable(f"{path}.from", "is no time of day", "write '07:00', or 'sat 07:00'")
        minute = 60 * int(match[2]) + int(match[3])
        days = range(7) if match[1] is None else (_DAYS.index(match[1]),)
        for begins in (day * _DAY_MINUTES + minute for day in days):
            # A time with a day is an exception to the same time on every day, wherever it stands.
            if match[1] is not None or begins not in periods:
                periods[begins] = {"begins_minute": begins} | _renamed(row, _PERIOD, path, {"from"})
    plain = {**_renamed(found, _PRICES, "spec.prices", {"periods"}), "periods": [periods[at] for at in sorted(periods)]}
    prices: EnergyPrices = _read(EnergyPrices, plain, "spec.prices", {})
    return prices


def _renamed(found: Mapping[str, Any], names: Mapping[str, str], path: str, others: set[str]) -> dict[str, Any]:
    unknown = sorted(found.keys() - names.keys() - others)
    if unknown:
        raise KubernetesUnreadable(f"{path}.{unknown[0]}", "is not known", f"use {', '.join(names)}")
    return {names[key]: value for key, value in found.items() if key in names and value is not None}


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise KubernetesUnreadable(path, "is no text", "write a name")
    return value


def _read(shape: type[Any], plain: Mapping[str, Any], path: str, names: Mapping[str, str]) -> Any:
    """A message by the contract's rules; a fault in the words of the object."""
    try:
        return from_plain(shape, plain)
    except InvalidMessage as error:
        one = error.violations[0]
        field = names.get(one.field) or _UNDERSCORED.sub(lambda match: match[1].upper(), one.field)
        whole = f"{path}.{field}" if field else path
        raise KubernetesUnreadable(whole.replace(".[", "["), one.problem, one.remedy) from None
