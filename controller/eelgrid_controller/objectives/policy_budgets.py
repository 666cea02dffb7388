"""Turns the policy's budgets and prices into a budget tree and a tariff, and previews other budgets.

GPUs that are not managed are charged with the most that they may draw: their limit, idle power or default.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from eelgrid_controller.objectives.power.budgets import BudgetTree, PowerBudgetNode
from eelgrid_controller.objectives.power.control_events import BudgetPreview, PreviewedJob
from eelgrid_controller.objectives.power.tariffs import WEEK_S, EnergyTariff, StepFunction
from eelgrid_controller.state.policy import CLUSTER_BUDGET, BudgetHierarchy, make_budget_key
from eelgrid_protos.messages import (
    BudgetStatus,
    EnergyPrices,
    ImagineBudgetsResponse,
    Inventory,
    JobStatus,
    Policy,
    Workload,
)

_JOULES_A_KWH = 3.6e6
_MONDAY_S = 345_600.0  # 1970-01-05, the first Monday of Unix time


class NodePowerDraw(NamedTuple):
    """Where a node is, what its GPUs that are not steered may draw, and what all of them were read to draw."""

    inventory: Inventory
    other_w: float
    power_w: float = 0.0
    unread: int = 0  # GPUs without a fresh reading


def nearest_budgets(policy: Policy, inventory: Inventory) -> tuple[str, ...]:
    """The budget that bounds a node most nearly, or none."""
    return BudgetHierarchy(policy).budgets_above(inventory)[:1]


def policy_budgets(policy: Policy, nodes: Iterable[NodePowerDraw]) -> BudgetTree:
    """The tree; raises BudgetRefused where the policy's budgets make none."""
    places = BudgetHierarchy(policy)
    others: dict[str, float] = {}
    parents: dict[str, str] = {}
    for node in nodes:
        # A budget counts what is below it once: what others draw is told at each level on the way up.
        above = places.budgets_above(node.inventory)
        parents.update(itertools.pairwise(above))
        for key in above:
            others[key] = others.get(key, 0.0) + node.other_w
    top = CLUSTER_BUDGET if CLUSTER_BUDGET in places.limits_w else None
    return BudgetTree(
        PowerBudgetNode(key, places.limits_w[key], None if key == top else parents.get(key, top), others.get(key, 0.0))
        for key in sorted(places.limits_w, key=_depth)
    )


def _depth(key: str) -> tuple[int, str]:
    """The cluster first, then racks, then nodes."""
    return (0 if key == CLUSTER_BUDGET else 1 if key.startswith("rack/") else 2), key


def policy_tariff(prices: EnergyPrices | None) -> EnergyTariff | None:
    """What a joule costs by Unix time; None for the same at all times."""
    if prices is None:
        return None
    starts_s = tuple(60.0 * period.begins_minute for period in prices.periods)
    return EnergyTariff(
        price=StepFunction(starts_s, tuple(period.price_per_kwh / _JOULES_A_KWH for period in prices.periods), WEEK_S),
        carbon=StepFunction(
            starts_s, tuple(1000.0 * period.carbon_kg_per_kwh / _JOULES_A_KWH for period in prices.periods), WEEK_S
        ),
        carbon_price=prices.carbon_price_per_kg / 1000.0,
        pue=StepFunction((0.0,), (prices.pue,), WEEK_S),
        begins_s=_MONDAY_S - 60.0 * prices.utc_offset_minutes,
    )


_UNKNOWN = "its curve is not known yet: what it would lose is not either"


class BudgetEvaluator(Protocol):
    """What is needed of the steering."""

    def evaluate_budgets(self, budgets: BudgetTree, lowest: Mapping[str, tuple[str, ...]]) -> BudgetPreview:
        """The limits that jobs would have under other budgets."""


def evaluate_policy_budgets(
    steering: BudgetEvaluator,
    policy: Policy,
    draws: Sequence[NodePowerDraw],
    gpus: Mapping[str, Mapping[str, int]],
    workloads: Mapping[str, Workload],
) -> ImagineBudgetsResponse:
    """The answer for a policy's budgets; `gpus` are those of each job by node. Raises BudgetRefused."""
    budgets = policy_budgets(policy, draws)
    lowest = {one.inventory.node_name: nearest_budgets(policy, one.inventory) for one in draws}
    found: BudgetPreview = steering.evaluate_budgets(budgets, lowest)
    claimed = {one.name: one.other_w for one in budgets.all}
    for job in found.jobs:
        for node, count in gpus.get(job.name, {}).items():
            for place in budgets.chain_indices(lowest.get(node, ())):
                claimed[budgets.all[place].name] += count * job.limit_w
    return ImagineBudgetsResponse(
        jobs=tuple(_budget_status(job, workloads[job.name]) for job in found.jobs if job.name in workloads),
        budgets=tuple(
            BudgetStatus(
                budget=budget,
                claimed_w=claimed[make_budget_key(budget.scope, budget.name)],
                shortfall_w=found.shortfalls.get(make_budget_key(budget.scope, budget.name), (0.0, ""))[0],
            )
            for budget in policy.budgets
        ),
    )


def _budget_status(job: PreviewedJob, workload: Workload) -> JobStatus:
    return JobStatus(
        workload_id=job.name,
        name=workload.spec.name,
        phase="imagined",
        power_limit_w=job.limit_w,
        slowdown=job.slowdown,
        saving=job.saving,
        reason=_UNKNOWN if job.slowdown is None else "",
        is_advice=True,
    )


class BudgetUsage(NamedTuple):
    """Watts of the GPUs that were read, and how many were not."""

    power_w: float = 0.0
    unread: int = 0


def budget_usage(policy: Policy, nodes: Iterable[NodePowerDraw]) -> Mapping[str, BudgetUsage]:
    """By budget, on every level; raises BudgetRefused where the policy's budgets make no tree."""
    known = list(nodes)
    budgets = policy_budgets(policy, known)
    found = dict.fromkeys((one.name for one in budgets.all), BudgetUsage())
    for node in known:
        for place in budgets.chain_indices(nearest_budgets(policy, node.inventory)):
            name = budgets.all[place].name
            before = found[name]
            found[name] = BudgetUsage(before.power_w + node.power_w, before.unread + node.unread)
    return found
