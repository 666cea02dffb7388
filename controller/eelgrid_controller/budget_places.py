"""Where the policy's power budgets apply: which of them a node's GPUs draw from.

Owns their names, `cluster`, `rack/NAME` and `node/NAME`, and the chain above a node. Must
not know watts that are drawn.

Theory: a budget bounds all GPUs of a cluster, a rack or a node. A rack is any part of a
node's path that a budget names, the innermost first; of two budgets of one place the
tighter is in force.
"""

from collections.abc import Mapping

from eelgrid_controller.remembered import by_identity
from eelgrid_protos.messages import BudgetScope, Inventory, Policy, PowerBudget

__all__ = ["CLUSTER", "BudgetPlaces", "budget_name", "budget_words"]

CLUSTER = "cluster"


def budget_name(scope: BudgetScope, name: str) -> str:
    """What the planner calls a budget of the policy."""
    return CLUSTER if scope is BudgetScope.CLUSTER else f"{scope.name.lower()}/{name}"


def budget_words(key: str) -> str:
    """The same in a sentence: the cluster, rack r1, node n7."""
    return "the cluster" if key == CLUSTER else key.replace("/", " ", 1)


@by_identity
def _limits_w(budgets: tuple[PowerBudget, ...]) -> Mapping[str, float]:
    """The tightest of each place; made once a policy, for it is asked for of each node."""
    found: dict[str, float] = {}
    for budget in budgets:
        key = budget_name(budget.scope, budget.name)
        found[key] = min(budget.limit_w, found.get(key, budget.limit_w))
    return found


class BudgetPlaces:
    """The budgets of one policy."""

    def __init__(self, policy: Policy) -> None:
        self.limits_w = _limits_w(policy.budgets)

    def rack(self, inventory: Inventory) -> str | None:
        """The name of the innermost rack of a node that has a budget."""
        return next((part for part in reversed(inventory.topology) if f"rack/{part}" in self.limits_w), None)

    def above(self, inventory: Inventory) -> tuple[str, ...]:
        """The budgets that the node's GPUs draw from, the nearest first."""
        rack = self.rack(inventory)
        chain = (f"node/{inventory.node_name}", None if rack is None else f"rack/{rack}", CLUSTER)
        return tuple(key for key in chain if key is not None and key in self.limits_w)
