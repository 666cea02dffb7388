"""PowerPolicy objects: what each wants, how all of them are merged into one policy, and the status of each.

Every value of an object is validated by the contract's rules; an object with any fault is refused as a whole. A budget
by node selector is one budget for each matching node.

Objects decide the fields that they name, `eelctl policy` all others. Of budgets of one place the tightest counts, of
other fields the oldest object's value. A field's former value is recorded and restored when no object names it. Watts
in a status change only by POWER_NOISE of the budget or when they cross it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model.node_affinity import matches_labels
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable, parse_time
from eelgrid_controller.engines.kubernetes.model.selectors import LabelSelector, SelectorRequirement
from eelgrid_controller.engines.kubernetes.model.status_reporting import ConditionSet
from eelgrid_controller.state.policy import CLUSTER_BUDGET, describe_budget, make_budget_key
from eelgrid_protos.errors import ContractError, InvalidMessage, Violation
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
    """The planner's name of the budget of a field; None where the field is not a budget."""
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
    for name, value in changed.items():
        if isinstance(value, ObjectiveValue):
            more.update(objective=value.objective, weights=value.weights)
        elif name == PLACEMENT_FIELD:
            more[PLACEMENT_FIELD] = value
        elif name == PRICES_FIELD:
            more[PRICES_FIELD] = value
        elif isinstance(value, PoolMode):
            pools[name] = value
        elif isinstance(value, float):
            budgets[name] = _budget(name, value)
        else:
            pools.pop(name, None)
            budgets.pop(name, None)
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


class SelectorBudget(NamedTuple):
    """A budget for each node that a selector takes."""

    selector: LabelSelector
    limit_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerPolicySpec:
    """The spec of one object: the fields that it names, and their values."""

    uid: str
    name: str
    created_s: int
    generation: int
    values: Mapping[str, PolicyValue]
    selections: tuple[SelectorBudget, ...] = ()

    def resolve_fields(self, nodes: Mapping[str, Mapping[str, str]]) -> dict[str, PolicyValue]:
        """The policy values that it asks for, given the labels of these nodes."""
        found = dict(self.values)
        for selection in self.selections:
            for name, labels in nodes.items():
                if matches_labels(selection.selector, labels):
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


def _selector(found: Any, path: str) -> LabelSelector:
    labels = found.get("matchLabels") or {} if isinstance(found, Mapping) else None
    rows = found.get("matchExpressions") or [] if isinstance(found, Mapping) else None
    if not isinstance(labels, Mapping) or not isinstance(rows, list) or not (labels or rows):
        # An empty one would take every node: whoever means that writes a label that all of them have.
        raise KubernetesUnreadable(path, "selects nothing", "write matchLabels: {key: value} or matchExpressions")
    lines = [SelectorRequirement(str(key), "In", (str(value),)) for key, value in labels.items()]
    for row in rows:
        operator = row.get("operator") if isinstance(row, Mapping) else None
        values = tuple(map(str, row.get("values") or ())) if isinstance(row, Mapping) else ()
        if operator not in _OPERATORS or not row.get("key") or (operator in ("In", "NotIn")) != bool(values):
            raise KubernetesUnreadable(
                f"{path}.matchExpressions", f"has {row!r}", "write {key: K, operator: In, values: [V]}, or Exists"
            )
        lines.append(SelectorRequirement(str(row["key"]), operator, values))
    if len(lines) > _LINES_MOST:
        raise KubernetesUnreadable(path, f"has {len(lines)} lines", f"use {_LINES_MOST} at most")
    return LabelSelector(tuple(lines))


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


MAX_POLICIES = 256
_FIELDS_MOST = {"pool/": 1_000, "budget/": 100_000}


class FieldRecord(NamedTuple):
    """A field that objects hold: what it was before them, and which of its values are theirs."""

    former: PolicyValue
    puts: tuple[PolicyValue, ...]


@dataclass(frozen=True, slots=True)
class PolicyRecords:
    """What has to outlive a process: former values, and the last readable version of each object."""

    records: Mapping[str, FieldRecord] = field(default_factory=dict)
    good: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # uid -> the object, as far as it is read


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """The outcome for one object; `order` is what it is taken for, None where it was never readable."""

    found: Mapping[str, Any]
    order: PowerPolicySpec | None
    fault: str = ""  # why what it says now is not taken
    values: Mapping[str, PolicyValue] = field(default_factory=dict)  # all that it wants, by field
    held: frozenset[str] = frozenset()  # fields in force as it wants them
    tighter: Mapping[str, str] = field(default_factory=dict)  # places of which another object's budget is tighter
    beaten: Mapping[str, str] = field(default_factory=dict)  # other fields, by the name of the older object


class PolicyDecision(NamedTuple):
    """The policy to put in force, the records to save before and after that, and the outcome for each object."""

    policy: Policy
    ahead: PolicyRecords
    after: PolicyRecords
    standings: tuple[PolicyOutcome, ...]


class PowerPolicyMerger:
    """Reads objects once each; all else is a function of what is given."""

    def __init__(self, violations: Callable[[Policy], Sequence[Violation]]) -> None:
        """`violations` says what contradicts itself in a policy."""
        self._violations = violations
        self._read: dict[tuple[str, int], PowerPolicySpec | str] = {}

    def merge_policies(
        self,
        objects: Iterable[Mapping[str, Any]],
        nodes: Mapping[str, Mapping[str, str]],
        policy: Policy,
        memory: PolicyRecords,
    ) -> PolicyDecision:
        """Merge objects into a policy, given the labels of nodes, the policy in force and the records."""
        known = [one for one in objects if not one["metadata"].get("deletionTimestamp")]
        standings = [self._standing(one, nodes, memory) for one in sorted(known, key=_age)]
        self._read = {key: self._read[key] for key in map(_version, known) if key in self._read}
        values, standings = _merged(_bounded(standings))
        wanted, ahead, after = _settled(policy, values, memory.records)
        good = {one.order.uid: _brief(one, memory) for one in standings if one.order is not None}
        return PolicyDecision(wanted, PolicyRecords(ahead, good), PolicyRecords(after, good), tuple(standings))

    def _standing(
        self, found: Mapping[str, Any], nodes: Mapping[str, Mapping[str, str]], memory: PolicyRecords
    ) -> PolicyOutcome:
        order, fault = self._parse_object(found), ""
        if isinstance(order, str):
            fault, last = order, memory.good.get(found["metadata"]["uid"])
            order = self._parse_object(last) if last is not None else ""
        if isinstance(order, str):
            return PolicyOutcome(found=found, order=None, fault=fault)
        return PolicyOutcome(found=found, order=order, fault=fault, values=order.resolve_fields(nodes))

    def _parse_object(self, found: Mapping[str, Any]) -> PowerPolicySpec | str:
        """The values that the object asks for, or why it was refused."""
        key = _version(found)
        if key not in self._read:
            self._read[key] = self._fresh(found)
        return self._read[key]

    def _fresh(self, found: Mapping[str, Any]) -> PowerPolicySpec | str:
        try:
            order = parse_power_policy(found)
        except KubernetesUnreadable as error:
            return str(error)
        broken = self._violations(replace_values(Policy(), order.values))
        return str(broken[0].under("spec")).replace("spec.policy.", "spec.") if broken else order


def _bounded(standings: Sequence[PolicyOutcome]) -> list[PolicyOutcome]:
    """Objects, the oldest first, as far as the policy has room for them."""
    names: dict[str, set[str]] = {kind: set() for kind in _FIELDS_MOST}
    found = []
    for number, one in enumerate(standings):
        fault = f"is one too many; {MAX_POLICIES} objects are read, the oldest" if number >= MAX_POLICIES else ""
        for kind, most in _FIELDS_MOST.items():
            more = {key for key in one.values if key.startswith(kind)}
            if not fault and len(names[kind] | more) > most:
                fault = f"makes the objects name more than {most} {kind[:-1]}s together; name fewer"
        if fault:
            found.append(PolicyOutcome(found=one.found, order=None, fault=fault))
            continue
        for kind, known in names.items():
            known.update(key for key in one.values if key.startswith(kind))
        found.append(one)
    return found


def _merged(standings: Sequence[PolicyOutcome]) -> tuple[dict[str, PolicyValue], list[PolicyOutcome]]:
    """The value of each field that any object names, and how each object fares; the oldest come first."""
    values: dict[str, PolicyValue] = {}
    of: dict[str, PolicyOutcome] = {}
    for one in standings:
        for key, value in one.values.items():
            before = values.get(key)
            if key not in values or (isinstance(value, float) and isinstance(before, float) and value < before):
                values[key], of[key] = value, one
    told = []
    for one in standings:
        lost = {key: _name(of[key]) for key, value in one.values.items() if value != values[key]}
        told.append(
            replace(
                one,
                held=frozenset(one.values.keys() - lost.keys()),
                tighter={key: name for key, name in lost.items() if budget_place_of(key) is not None},
                beaten={key: name for key, name in lost.items() if budget_place_of(key) is None},
            )
        )
    return values, told


def _settled(
    policy: Policy, values: Mapping[str, PolicyValue], records: Mapping[str, FieldRecord]
) -> tuple[Policy, dict[str, FieldRecord], dict[str, FieldRecord]]:
    """The policy with these values and with what was before where there is none any more; records before and after."""
    now = policy_values(policy)
    changed: dict[str, PolicyValue] = {}
    ahead: dict[str, FieldRecord] = {}
    after: dict[str, FieldRecord] = {}
    for key, value in values.items():
        current, record = now.get(key), records.get(key)
        if record is not None and any(_is_same(current, put) for put in record.puts):
            former, puts = record.former, (value,) if _is_same(current, value) else (current, value)
        else:
            former, puts = _kept(current), (value,)
        ahead[key], after[key] = FieldRecord(former, puts), FieldRecord(former, (value,))
        if not _is_same(current, value):
            changed[key] = value
    for key, record in records.items():
        if key in values:
            continue
        ahead[key] = record
        current = now.get(key)
        if any(_is_same(current, put) for put in record.puts) and not _is_same(current, record.former):
            changed[key] = _kept(record.former)
    return (replace_values(policy, changed) if changed else policy), ahead, after


def _is_same(one: PolicyValue, other: PolicyValue) -> bool:
    # What a named objective weighs may differ between versions of the controller.
    return _kept(one) == _kept(other)


def _kept(value: PolicyValue) -> PolicyValue:
    if isinstance(value, ObjectiveValue) and value.objective in OBJECTIVES:
        return ObjectiveValue(value.objective, OBJECTIVES[value.objective])
    return value


def _brief(one: PolicyOutcome, memory: PolicyRecords) -> Mapping[str, Any]:
    """What was read last of an object that is good, by itself or by what it said before."""
    metadata = one.found["metadata"]
    if one.fault:
        return memory.good[metadata["uid"]]
    kept = {key: metadata[key] for key in ("uid", "name", "creationTimestamp", "generation") if key in metadata}
    return {"metadata": kept, "spec": one.found.get("spec") or {}}


def _age(found: Mapping[str, Any]) -> tuple[str, str, str]:
    metadata = found["metadata"]
    # Texts of one form and one zone: their order is that of time.
    return str(metadata.get("creationTimestamp") or ""), str(metadata["name"]), str(metadata["uid"])


def _version(found: Mapping[str, Any]) -> tuple[str, int]:
    metadata = found["metadata"]
    return str(metadata["uid"]), int(metadata.get("generation") or 0)


def _name(one: PolicyOutcome) -> str:
    return str(one.found["metadata"]["name"])


ACCEPTED = "Accepted"
IN_FORCE = "InForce"
WITHIN_BUDGET = "WithinBudget"
CONFLICTING = "Conflicting"

POWER_NOISE = 0.02
MAX_SHOWN = 256  # budgets and fields
_NAMED_MOST = 5
_SCOPES = {"cluster": "Cluster", "rack": "Rack", "node": "Node"}


class PlacePower(NamedTuple):
    """Power drawn by the GPUs of a place that were measured, and how many were not."""

    power_w: float
    unread: int = 0


class AppliedPolicy(NamedTuple):
    """The policy in force, and why it is not the one that objects want."""

    revision: int
    limits_w: Mapping[str, float]  # by place
    fault: str = ""


class _Shown(NamedTuple):
    place: str
    limit_w: float  # in force, which another object may have made tighter
    power_w: int | None  # None where nothing was read
    unread: int


def build_policy_status(
    one: PolicyOutcome, applied: AppliedPolicy, draws: Mapping[str, PlacePower], *, at_ns: int
) -> dict[str, Any]:
    """The status of an object now; the same as before where nothing is worth telling."""
    metadata, before = one.found["metadata"], one.found.get("status") or {}
    wanted = {place: value for place, value in _budget_limits(one).items() if place in applied.limits_w}
    places = sorted(wanted, key=lambda place: (place != CLUSTER_BUDGET, not place.startswith("rack/"), place))
    shown = [_shown(place, applied.limits_w[place], draws.get(place), before) for place in places]
    rows = [_row(found, one, wanted[found.place]) for found in shown[:MAX_SHOWN]]
    generation = int(metadata.get("generation") or 0)
    conditions = ConditionSet.from_json(before.get("conditions")).retain(
        (ACCEPTED, IN_FORCE, WITHIN_BUDGET, CONFLICTING)
    )
    for type_, said in (
        (ACCEPTED, _accepted(one)),
        (IN_FORCE, _in_force(one, applied)),
        (CONFLICTING, _conflicting(one)),
        (WITHIN_BUDGET, _within(shown)),
    ):
        if said is None:
            conditions = conditions.without(type_)
        else:
            conditions = conditions.with_condition(type_, *said, generation=generation, at_ns=at_ns)
    told: dict[str, Any] = {
        "observedGeneration": generation,
        "revision": applied.revision,
        "inForce": [] if applied.fault else list(_words(one))[:MAX_SHOWN],
        "budgets": rows,
        "conditions": conditions.to_json(),
    }
    if len(shown) > len(rows):
        told["budgetsNotShown"] = len(shown) - len(rows)
    whole = _whole(shown)
    if whole is not None:
        told["powerWatts"], told["headroomWatts"] = whole
    return told


def _budget_limits(one: PolicyOutcome) -> dict[str, float]:
    return {
        place: value
        for key, value in one.values.items()
        if (place := budget_place_of(key)) is not None and isinstance(value, float)
    }


def _shown(place: str, limit_w: float, draw: PlacePower | None, before: Mapping[str, Any]) -> _Shown:
    if draw is None:
        return _Shown(place, limit_w, None, 0)
    power_w = round(draw.power_w)
    last_w = next((row.get("powerWatts") for row in before.get("budgets") or () if _place(row) == place), None)
    if (
        isinstance(last_w, int)
        and abs(last_w - power_w) <= POWER_NOISE * limit_w
        and (last_w > limit_w) == (power_w > limit_w)
    ):
        power_w = last_w
    return _Shown(place, limit_w, power_w, draw.unread)


def _place(row: Mapping[str, Any]) -> str:
    scope = str(row.get("scope", "")).lower()
    return CLUSTER_BUDGET if scope == CLUSTER_BUDGET else f"{scope}/{row.get('name', '')}"


def _row(found: _Shown, one: PolicyOutcome, wanted_w: float) -> dict[str, Any]:
    scope, _, name = found.place.partition("/")
    row: dict[str, Any] = {"scope": _SCOPES[scope], "limitWatts": round(wanted_w)}
    if name:
        row["name"] = name
    if found.limit_w != wanted_w:
        row["inForceWatts"] = round(found.limit_w)
        row["inForceBy"] = next((by for key, by in one.tighter.items() if budget_place_of(key) == found.place), "")
    if found.power_w is not None:
        row["powerWatts"] = found.power_w
        row["headroomWatts"] = round(found.limit_w) - found.power_w
        if found.unread:
            row["unreadGpus"] = found.unread
    return row


def _whole(shown: Sequence[_Shown]) -> tuple[int, int] | None:
    """Watts and headroom of all that the object bounds: of the cluster, else of its racks, else of its nodes."""
    for head in (CLUSTER_BUDGET, "rack/", "node/"):
        level = [one for one in shown if one.place.startswith(head)]
        if level:
            read = [one for one in level if one.power_w is not None]
            drawn_w = sum(one.power_w or 0 for one in read)
            return (drawn_w, round(sum(one.limit_w for one in level)) - drawn_w) if len(read) == len(level) else None
    return None


# What conditions say: status, reason and message.


def _accepted(one: PolicyOutcome) -> tuple[bool | None, str, str]:
    if one.fault:
        return False, "Invalid", one.fault
    count = len(one.values)
    nodes = sum(key.startswith("budget/node/") for key in one.values)
    if one.order is not None and one.order.selections and not nodes:
        return True, "NoNodeSelected", "is read, and no node has the labels of its node selectors"
    return True, "Valid", f"names {_count(count, 'field')} of the policy"


def _in_force(one: PolicyOutcome, applied: AppliedPolicy) -> tuple[bool | None, str, str]:
    if one.order is None:
        return False, "NotAccepted", "no generation of it could be read; see Accepted"
    if applied.fault:
        return False, "NotApplied", applied.fault
    if one.fault:
        return True, "EarlierGeneration", f"generation {one.order.generation} is in force, the last that could be read"
    lost = len(one.values) - len(one.held)
    if not one.values:
        return True, "NothingNamed", "names nothing, so nothing is changed"
    if not one.held:
        return False, "Overruled", "nothing of it is in force; see Conflicting, and budgets in its status"
    if lost:
        return True, "InPart", f"{len(one.held)} of {len(one.values)} fields are in force, {lost} by other objects"
    return True, "Whole", "all that it names is in force"


def _conflicting(one: PolicyOutcome) -> tuple[bool | None, str, str]:
    if not one.beaten:
        return False, "NoConflict", "no older object names the same field differently"
    named = [f"{describe_field(key)} is that of {by}" for key, by in sorted(one.beaten.items())]
    more = f", and {len(named) - _NAMED_MOST} more" if len(named) > _NAMED_MOST else ""
    text = f"{', '.join(named[:_NAMED_MOST])}{more}: the older object counts; name each in one object alone"
    return True, "OlderObjectCounts", text


def _within(shown: Sequence[_Shown]) -> tuple[bool | None, str, str] | None:
    if not shown:
        return None
    over = [one for one in shown if one.power_w is not None and one.power_w > one.limit_w]
    if over:
        worst = max(over, key=lambda one: (one.power_w or 0) - one.limit_w)
        rest = f"; {_count(len(over) - 1, 'other budget')} are passed, too" if len(over) > 1 else ""
        text = f"{describe_budget(worst.place)} draws {worst.power_w:,} W of {worst.limit_w:,.0f} W{rest}"
        return False, "Passed", text
    unread = [one for one in shown if one.power_w is None]
    if unread:
        return None, "NotMeasured", f"nothing was read yet below {_count(len(unread), 'budget')}"
    partly = [one for one in shown if one.unread]
    if partly:
        most = max(partly, key=lambda one: one.unread)
        text = f"{_count(most.unread, 'GPU')} of {describe_budget(most.place)} are not read: they have no agent, or it is away"
        return None, "PartlyMeasured", text
    least = min(shown, key=lambda one: (one.limit_w - (one.power_w or 0)) / max(one.limit_w, 1.0))
    return True, "Kept", f"the fullest is {describe_budget(least.place)}: {least.power_w:,} W of {least.limit_w:,.0f} W"


def _words(one: PolicyOutcome) -> Iterator[str]:
    """Fields in force that are no budgets, each with its value."""
    for key in sorted(one.held):
        if budget_place_of(key) is None:
            yield f"{describe_field(key)}: {_value_words(one.values[key])}"


def _value_words(value: PolicyValue) -> str:
    match value:
        case ObjectiveValue(objective, _):
            return objective
        case PoolMode():
            return value.mode.name.lower() + (", partitioned" if value.partitioned else "")
        case EnergyPrices():
            return f"{value.currency}, {_count(len(value.periods), 'period')} a week, PUE {value.pue:g}"
    return str(value)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
