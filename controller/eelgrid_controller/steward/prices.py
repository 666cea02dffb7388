"""From the policy to budgets and a tariff, as the power planner has them.

Owns the tree that budgets make and what others draw below it. Must not know jobs' curves.

Theory. A budget of the policy bounds all GPUs of a cluster, a rack or a node. A rack is
any part of a node's path that a budget names, the innermost first. GPUs that are not
steered draw what they may: one that is held, its limit; one that is idle, its idle watts;
one of which neither is known, its default limit; one that is lost, nothing.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from eelgrid_controller.power.budgets import Budget, Budgets
from eelgrid_controller.power.tariff import WEEK_S, Steps, Tariff
from eelgrid_protos.messages import BudgetScope, EnergyPrices, Inventory, Policy

__all__ = ["NodeDraw", "budget_name", "budgets_of", "lowest_budgets", "tariff_of"]

_JOULES_A_KWH = 3.6e6
_MONDAY_S = 345_600.0  # 1970-01-05, the first Monday of Unix time
_CLUSTER = "cluster"


class NodeDraw(NamedTuple):
    """Where a node is, and what its GPUs that are not steered may draw."""

    inventory: Inventory
    other_w: float


def _named(policy: Policy) -> dict[tuple[BudgetScope, str], float]:
    """The tightest of each scope and name."""
    found: dict[tuple[BudgetScope, str], float] = {}
    for budget in policy.budgets:
        key = (budget.scope, budget.name)
        found[key] = min(budget.limit_w, found.get(key, budget.limit_w))
    return found


def budget_name(scope: BudgetScope, name: str) -> str:
    """What the planner calls a budget of the policy."""
    return _CLUSTER if scope is BudgetScope.CLUSTER else f"{scope.name.lower()}/{name}"


def _rack(known: Mapping[tuple[BudgetScope, str], float], inventory: Inventory) -> str | None:
    return next((part for part in reversed(inventory.topology) if (BudgetScope.RACK, part) in known), None)


def lowest_budgets(policy: Policy, inventory: Inventory) -> tuple[str, ...]:
    """The budget that bounds a node most nearly, or none."""
    known = _named(policy)
    if (BudgetScope.NODE, inventory.node_name) in known:
        return (f"node/{inventory.node_name}",)
    rack = _rack(known, inventory)
    if rack is not None:
        return (f"rack/{rack}",)
    return (_CLUSTER,) if (BudgetScope.CLUSTER, "") in known else ()


def budgets_of(policy: Policy, nodes: Iterable[NodeDraw]) -> Budgets:
    """The tree; raises BudgetRefused where the policy's budgets make none."""
    known = _named(policy)
    cluster = _CLUSTER if (BudgetScope.CLUSTER, "") in known else None
    others: dict[str, float] = {}
    parents: dict[str, str | None] = {}
    for node in nodes:
        rack = _rack(known, node.inventory)
        above = cluster if rack is None else f"rack/{rack}"
        is_named = (BudgetScope.NODE, node.inventory.node_name) in known
        if is_named:
            parents[f"node/{node.inventory.node_name}"] = above
        lowest = f"node/{node.inventory.node_name}" if is_named else above
        # A budget counts what is below it once: what others draw is told at each level on the way up.
        for name in dict.fromkeys((lowest, None if rack is None else f"rack/{rack}", cluster)):
            if name is not None:
                others[name] = others.get(name, 0.0) + node.other_w
    made = []
    for (scope, name), limit_w in sorted(known.items(), key=lambda item: (item[0][0].value, item[0][1])):
        key = budget_name(scope, name)
        parent = (
            None
            if scope is BudgetScope.CLUSTER
            else cluster
            if scope is BudgetScope.RACK
            else parents.get(key, cluster)
        )
        made.append(Budget(key, limit_w, parent, others.get(key, 0.0)))
    return Budgets(made)


def tariff_of(prices: EnergyPrices | None) -> Tariff | None:
    """What a joule costs by Unix time; None for the same at all times."""
    if prices is None:
        return None
    starts_s = tuple(60.0 * period.begins_minute for period in prices.periods)
    return Tariff(
        price=Steps(starts_s, tuple(period.price_per_kwh / _JOULES_A_KWH for period in prices.periods), WEEK_S),
        carbon=Steps(
            starts_s, tuple(1000.0 * period.carbon_kg_per_kwh / _JOULES_A_KWH for period in prices.periods), WEEK_S
        ),
        carbon_price=prices.carbon_price_per_kg / 1000.0,
        pue=Steps((0.0,), (prices.pue,), WEEK_S),
        begins_s=_MONDAY_S - 60.0 * prices.utc_offset_minutes,
    )
