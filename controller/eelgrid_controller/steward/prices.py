"""From the policy to budgets and a tariff, as the power planner has them.

Owns the tree that budgets make and what others draw below it. Must not know jobs' curves.

Theory. GPUs that are not steered draw what they may: one that is held, its limit; one that
is idle, its idle watts; one of which neither is known, its default limit; one that is lost,
nothing.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from eelgrid_controller.budget_places import CLUSTER, BudgetPlaces
from eelgrid_controller.power.budgets import Budget, Budgets
from eelgrid_controller.power.tariff import WEEK_S, Steps, Tariff
from eelgrid_protos.messages import EnergyPrices, Inventory, Policy

__all__ = ["NodeDraw", "budgets_of", "lowest_budgets", "tariff_of"]

_JOULES_A_KWH = 3.6e6
_MONDAY_S = 345_600.0  # 1970-01-05, the first Monday of Unix time


class NodeDraw(NamedTuple):
    """Where a node is, what its GPUs that are not steered may draw, and what all of them were read to draw."""

    inventory: Inventory
    other_w: float
    power_w: float = 0.0
    unread: int = 0  # GPUs without a fresh reading


def lowest_budgets(policy: Policy, inventory: Inventory) -> tuple[str, ...]:
    """The budget that bounds a node most nearly, or none."""
    return BudgetPlaces(policy).above(inventory)[:1]


def budgets_of(policy: Policy, nodes: Iterable[NodeDraw]) -> Budgets:
    """The tree; raises BudgetRefused where the policy's budgets make none."""
    places = BudgetPlaces(policy)
    others: dict[str, float] = {}
    parents: dict[str, str] = {}
    for node in nodes:
        # A budget counts what is below it once: what others draw is told at each level on the way up.
        above = places.above(node.inventory)
        parents.update(itertools.pairwise(above))
        for key in above:
            others[key] = others.get(key, 0.0) + node.other_w
    top = CLUSTER if CLUSTER in places.limits_w else None
    return Budgets(
        Budget(key, places.limits_w[key], None if key == top else parents.get(key, top), others.get(key, 0.0))
        for key in sorted(places.limits_w, key=_depth)
    )


def _depth(key: str) -> tuple[int, str]:
    """The cluster first, then racks, then nodes."""
    return (0 if key == CLUSTER else 1 if key.startswith("rack/") else 2), key


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
