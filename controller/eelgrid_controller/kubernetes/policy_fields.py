"""The fields of the core's policy that objects of Kubernetes may name, one by one.

Owns their names, how each is read from a policy and put into one, and their plain form.
Must not know objects, nor who wants which value.

Theory. A policy is taken as a map from fields to values, absent where it says nothing:
`objective` (with its weights), `placement`, `prices`, `pool/NAME`, and `budget/` with the
place as budgets are called (budget_places.py). So each can be taken over and given back
alone, and whatever no field here names stays as it is.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from eelgrid_controller.budget_places import budget_name, budget_words
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import BudgetScope, EnergyPrices, Policy, PoolMode, PowerBudget, Weights
from eelgrid_protos.plain import from_plain, to_plain

__all__ = [
    "OBJECTIVE", "PLACEMENT", "PRICES", "Aim", "Value", "budget_field", "field_words", "place_of", "plain_of", "pool_field",
    "value_from", "values_of", "with_values",
]  # fmt: skip

OBJECTIVE = "objective"
PLACEMENT = "placement"
PRICES = "prices"
_POOL = "pool/"
_BUDGET = "budget/"


class Aim(NamedTuple):
    """An objective and the weights that it means."""

    objective: str
    weights: Weights


# What a field says; None where the policy says nothing of it.
Value = Aim | str | EnergyPrices | PoolMode | float | None


def pool_field(pool: str) -> str:
    """The mode of a pool."""
    return _POOL + pool


def budget_field(scope: BudgetScope, name: str) -> str:
    """The budget of a place, in watts."""
    return _BUDGET + budget_name(scope, name)


def place_of(field: str) -> str | None:
    """What the planner calls the budget of a field; None where the field is no budget."""
    return field.removeprefix(_BUDGET) if field.startswith(_BUDGET) else None


def field_words(field: str) -> str:
    """The field in a sentence."""
    place = place_of(field)
    return field.replace("/", " ", 1) if place is None else f"the budget of {budget_words(place)}"


def values_of(policy: Policy) -> dict[str, Value]:
    """All that a policy says."""
    found: dict[str, Value] = {
        OBJECTIVE: Aim(policy.objective, policy.weights),
        PLACEMENT: policy.placement,
        PRICES: policy.prices,
    }
    found.update({pool_field(one.pool): one for one in policy.pools})
    found.update({budget_field(one.scope, one.name): one.limit_w for one in policy.budgets})
    return found


def with_values(policy: Policy, changed: Mapping[str, Value]) -> Policy:
    """The policy with these fields; None takes a pool, a budget or the prices away. What is not named keeps its order."""
    pools = {pool_field(one.pool): one for one in policy.pools}
    budgets = {budget_field(one.scope, one.name): one for one in policy.budgets}
    more: dict[str, Any] = {}
    for field, value in changed.items():
        if isinstance(value, Aim):
            more.update(objective=value.objective, weights=value.weights)
        elif field == PLACEMENT:
            more[PLACEMENT] = value
        elif field == PRICES:
            more[PRICES] = value
        elif isinstance(value, PoolMode):
            pools[field] = value
        elif isinstance(value, float):
            budgets[field] = _budget(field, value)
        else:
            pools.pop(field, None)
            budgets.pop(field, None)
    return replace(policy, pools=tuple(pools.values()), budgets=tuple(budgets.values()), **more)


def plain_of(value: Value) -> Any:
    """A value as JSON carries it."""
    match value:
        case Aim(objective, weights):
            return {"objective": objective, "weights": to_plain(weights)}
        case EnergyPrices() | PoolMode():
            return to_plain(value)
    return value


def value_from(field: str, plain: Any) -> Value:
    """The value of a field from its plain form; raises ValueError where it is none."""
    try:
        if plain is None and field not in (OBJECTIVE, PLACEMENT):
            return None
        if field == OBJECTIVE:
            return Aim(str(plain["objective"]), from_plain(Weights, plain["weights"]))
        if field == PRICES:
            return from_plain(EnergyPrices, plain)
        if field.startswith(_POOL):
            return from_plain(PoolMode, plain)
        if field.startswith(_BUDGET):
            return _budget(field, float(plain)).limit_w
    except (ContractError, TypeError, KeyError) as error:
        raise ValueError(f"{field}: {error}") from error
    if field != PLACEMENT or not isinstance(plain, str):
        raise ValueError(f"{field}: is no field of a policy")
    return plain


def _budget(field: str, limit_w: float) -> PowerBudget:
    scope, _, name = field.removeprefix(_BUDGET).partition("/")
    return PowerBudget(scope=BudgetScope[scope.upper()], name=name, limit_w=limit_w)
