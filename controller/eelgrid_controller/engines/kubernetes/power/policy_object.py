"""A PowerPolicy object: the fields of the policy that it names, and the values that it wants.

Every value is validated by the contract's rules; an object with any fault is refused as a whole. A budget by node
selector is one budget for each matching node.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable, parse_time
from eelgrid_controller.state.policy import describe_budget, make_budget_key
from eelgrid_protos.errors import ContractError, InvalidMessage
from eelgrid_protos.messages import OBJECTIVES, BudgetScope, EnergyPrices, Policy, PoolMode, PowerBudget, Weights
from eelgrid_protos.plain_messages import from_plain, to_plain

OBJECTIVE_FIELD = "objective"
PLACEMENT_FIELD = "placement"
PRICES_FIELD = "prices"
_POOL = "pool/"
_BUDGET = "budget/"


class ObjectiveValue(NamedTuple):
    """An objective and the weights that it means."""

    objective: str
    weights: Weights


# What a field says; None where the policy says nothing of it.
PolicyValue = ObjectiveValue | str | EnergyPrices | PoolMode | float | None


def pool_field(pool: str) -> str:
    """The mode of a pool."""
    return _POOL + pool


def budget_field(scope: BudgetScope, name: str) -> str:
    """The budget of a place, in watts."""
    return _BUDGET + make_budget_key(scope, name)


def budget_place_of(field: str) -> str | None:
    """What the planner calls the budget of a field; None where the field is no budget."""
    return field.removeprefix(_BUDGET) if field.startswith(_BUDGET) else None


def describe_field(field: str) -> str:
    """The field in a sentence."""
    place = budget_place_of(field)
    return field.replace("/", " ", 1) if place is None else f"the budget of {describe_budget(place)}"


def policy_values(policy: Policy) -> dict[str, PolicyValue]:
    """All that a policy says."""
    found: dict[str, PolicyValue] = {
        OBJECTIVE_FIELD: ObjectiveValue(policy.objective, policy.weights),
        PLACEMENT_FIELD: policy.placement,
        PRICES_FIELD: policy.prices,
    }
    found.update({pool_field(one.pool): one for one in policy.pools})
    found.update({budget_field(one.scope, one.name): one.limit_w for one in policy.budgets})
    return found


def replace_values(policy: Policy, changed: Mapping[str, PolicyValue]) -> Policy:
    """The policy with these fields; None takes a pool, a budget or the prices away. What is not named keeps its order."""
    pools = {pool_field(one.pool): one for one in policy.pools}
    budgets = {budget_field(one.scope, one.name): one for one in policy.budgets}
    more: dict[str, Any] = {}
    for field, value in changed.items():
        if isinstance(value, ObjectiveValue):
            more.update(objective=value.objective, weights=value.weights)
        elif field == PLACEMENT_FIELD:
            more[PLACEMENT_FIELD] = value
        elif field == PRICES_FIELD:
            more[PRICES_FIELD] = value
        elif isinstance(value, PoolMode):
            pools[field] = value
        elif isinstance(value, float):
            budgets[field] = _budget(field, value)
        else:
            pools.pop(field, None)
            budgets.pop(field, None)
    return replace(policy, pools=tuple(pools.values()), budgets=tuple(budgets.values()), **more)


def encode_value(value: PolicyValue) -> Any:
    """A value as JSON carries it."""
    match value:
        case ObjectiveValue(objective, weights):
            return {"objective": objective, "weights": to_plain(weights)}
        case EnergyPrices() | PoolMode():
            return to_plain(value)
    return value


def decode_value(field: str, plain: Any) -> PolicyValue:
    """The value of a field from its plain form; raises ValueError where it is none."""
    try:
        if plain is None and field not in (OBJECTIVE_FIELD, PLACEMENT_FIELD):
            return None
        if field == OBJECTIVE_FIELD:
            return ObjectiveValue(str(plain["objective"]), from_plain(Weights, plain["weights"]))
        if field == PRICES_FIELD:
            return from_plain(EnergyPrices, plain)
        if field.startswith(_POOL):
            return from_plain(PoolMode, plain)
        if field.startswith(_BUDGET):
            return _budget(field, float(plain)).limit_w
    except (ContractError, TypeError, KeyError) as error:
        raise ValueError(f"{field}: {error}") from error
    if field != PLACEMENT_FIELD or not isinstance(plain, str):
        raise ValueError(f"{field}: is no field of a policy")
    return plain


def _budget(field: str, limit_w: float) -> PowerBudget:
    scope, _, name = field.removeprefix(_BUDGET).partition("/")
    return PowerBudget(scope=BudgetScope[scope.upper()], name=name, limit_w=limit_w)


MAX_BUDGETS = 10_000
_POOLS_MOST = 1_000
_LINES_MOST = 32  # of a selector
_TIME = re.compile(r"(?:(mon|tue|wed|thu|fri|sat|sun) )?([01][0-9]|2[0-3]):([0-5][0-9])")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES = 24 * 60
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
_UNDERSCORED = re.compile(r"_([a-z])")
_PRICES = {
    "currency": "currency",
    "pue": "pue",
    "carbonPricePerKg": "carbon_price_per_kg",
    "utcOffsetMinutes": "utc_offset_minutes",
}
_PERIOD = {"pricePerKwh": "price_per_kwh", "carbonKgPerKwh": "carbon_kg_per_kwh"}


class PowerNodeSelector(NamedTuple):
    """Labels that a node has: a key, an operator as in label selectors, and values; all lines have to hold."""

    lines: tuple[tuple[str, str, tuple[str, ...]], ...]

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels is meant."""
        return all(_holds(labels.get(key), operator, values) for key, operator, values in self.lines)


class SelectorBudget(NamedTuple):
    """A budget for each node that a selector takes."""

    selector: PowerNodeSelector
    limit_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerPolicySpec:
    """One object: what it names, and what it is to be."""

    uid: str
    name: str
    created_s: int
    generation: int
    values: Mapping[str, PolicyValue]
    selections: tuple[SelectorBudget, ...] = ()

    @property
    def age_key(self) -> tuple[int, str, str]:
        """The oldest is the least; of two of one second the first by name."""
        return self.created_s, self.name, self.uid

    def resolve_fields(self, nodes: Mapping[str, Mapping[str, str]]) -> dict[str, PolicyValue]:
        """What it wants of the policy while these nodes, with their labels, are there."""
        found = dict(self.values)
        for selection in self.selections:
            for name, labels in nodes.items():
                if selection.selector.matches(labels):
                    field = budget_field(BudgetScope.NODE, name)
                    before = found.get(field)
                    is_tighter = not isinstance(before, float) or selection.limit_w < before
                    found[field] = selection.limit_w if is_tighter else before
        return found


def parse_power_policy(found: Mapping[str, Any]) -> PowerPolicySpec:
    """The object's order; raises KubernetesUnreadable naming the field."""
    metadata, spec = found["metadata"], found.get("spec") or {}
    if not isinstance(spec, Mapping):
        raise KubernetesUnreadable("spec", "is no object", "write spec: {budgets: [...]}")
    values: dict[str, PolicyValue] = {}
    if spec.get("objective") is not None:
        objective = spec["objective"]
        if objective not in OBJECTIVES:
            raise KubernetesUnreadable("spec.objective", f"is {objective!r}", f"use one of {', '.join(OBJECTIVES)}")
        values[OBJECTIVE_FIELD] = ObjectiveValue(objective, OBJECTIVES[objective])
    if spec.get("placement") is not None:
        values[PLACEMENT_FIELD] = _text(spec["placement"], "spec.placement")
    if spec.get("prices") is not None:
        values[PRICES_FIELD] = _prices(spec["prices"])
    values |= _pools(_rows(spec, "pools", _POOLS_MOST))
    budgets, selections = _budgets(_rows(spec, "budgets", MAX_BUDGETS))
    return PowerPolicySpec(
        uid=str(metadata["uid"]),
        name=str(metadata["name"]),
        created_s=parse_time(metadata.get("creationTimestamp")) or 0,
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


def _pools(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, PolicyValue]:
    found: dict[str, PolicyValue] = {}
    for path, row in rows:
        if row.get("mode") not in ("Observe", "Enforce"):
            raise KubernetesUnreadable(f"{path}.mode", f"is {row.get('mode')!r}", "use Observe or Enforce")
        plain = {"pool": row.get("name"), "mode": row["mode"].lower(), "partitioned": row.get("partitioned", False)}
        pool = _read(PoolMode, plain, path, {"pool": "name"})
        if found.setdefault(pool_field(pool.pool), pool) is not pool:
            raise KubernetesUnreadable(f"{path}.name", f"names pool {pool.pool} again", "give each pool one entry")
    return found


def _budgets(
    rows: Sequence[tuple[str, Mapping[str, Any]]],
) -> tuple[dict[str, PolicyValue], tuple[SelectorBudget, ...]]:
    found: dict[str, PolicyValue] = {}
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
            selections.append(SelectorBudget(_selector(selector, f"{path}.nodeSelector"), float(row["limitWatts"])))
            continue
        plain = {"scope": row["scope"].lower(), "name": row.get("name") or "", "limit_w": float(row["limitWatts"])}
        budget = _read(PowerBudget, plain, path, {"limit_w": "limitWatts"})
        field = budget_field(budget.scope, budget.name)
        if field in found:
            place = make_budget_key(budget.scope, budget.name)
            raise KubernetesUnreadable(path, f"bounds {place} again", "give each place one limit")
        found[field] = budget.limit_w
    return found, tuple(selections)


def _selector(found: Any, path: str) -> PowerNodeSelector:
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
    return PowerNodeSelector(tuple(lines))


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
                periods[begins] = {"begins_minute": begins} | _rename_fields(row, _PERIOD, path, {"from"})
    plain = {
        **_rename_fields(found, _PRICES, "spec.prices", {"periods"}),
        "periods": [periods[at] for at in sorted(periods)],
    }
    prices: EnergyPrices = _read(EnergyPrices, plain, "spec.prices", {})
    return prices


def _rename_fields(found: Mapping[str, Any], names: Mapping[str, str], path: str, others: set[str]) -> dict[str, Any]:
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
