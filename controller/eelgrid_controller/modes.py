"""What the operator allows in a pool: whether its agents act, and whether its GPUs are the partition planner's.

Owns the reading of a policy's pools. Must not know nodes.
"""

from collections.abc import Mapping

from eelgrid_controller.remembered import by_identity
from eelgrid_protos.messages import BudgetScope, EnforcementMode, Policy, PowerBudget

__all__ = ["enforces", "node_budgets_w", "partitions"]


def enforces(policy: Policy, pool: str) -> bool:
    """Whether agents of the pool may change their nodes; no more unless the operator said so."""
    return any(entry.pool == pool and entry.mode is EnforcementMode.ENFORCE for entry in policy.pools)


def partitions(policy: Policy, pool: str) -> bool:
    """Whether the partition planner has the pool's GPUs that can be cut."""
    return any(entry.pool == pool and entry.partitioned for entry in policy.pools)


@by_identity
def _of_nodes(budgets: tuple[PowerBudget, ...]) -> Mapping[str, float]:
    return {budget.name: budget.limit_w for budget in budgets if budget.scope is BudgetScope.NODE}


def node_budgets_w(policy: Policy) -> Mapping[str, float]:
    """What the GPUs of single nodes may draw together, by node; the mapping is shared."""
    return _of_nodes(policy.budgets)
