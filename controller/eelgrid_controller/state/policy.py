"""Policy readings: which pools are enforced or partitioned, and which power budgets apply to a node.

Owns the reading of a policy's pools, the keys of power budgets (`cluster`, `rack/NAME`, `node/NAME`) and the
chain of budgets above a node. Must not know watts that are drawn.

Theory: a budget bounds all GPUs of a cluster, a rack or a node. A rack is any part of a node's path that a
budget names, the innermost first; of two budgets of one place the tighter is in force.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Generic, TypeVar

from eelgrid_protos.messages import BudgetScope, EnforcementMode, Inventory, Policy, PowerBudget

_Of = TypeVar("_Of")
_Made = TypeVar("_Made")
_MOST = 8  # of each: the policy, the one before, a few that are only imagined


class _Itself(Generic[_Of]):
    """Equal to what holds the same object."""

    __slots__ = ("held",)

    def __init__(self, held: _Of) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.held is other.held


def cache_by_identity(make: Callable[[_Of], _Made]) -> Callable[[_Of], _Made]:
    """The same function, made once for each object; what it gives is shared and must not be changed."""

    @lru_cache(maxsize=_MOST)
    def remembered(itself: _Itself[_Of]) -> _Made:
        return make(itself.held)

    return lambda of: remembered(_Itself(of))


CLUSTER_BUDGET = "cluster"


def make_budget_key(scope: BudgetScope, name: str) -> str:
    """What the planner calls a budget of the policy."""
    return CLUSTER_BUDGET if scope is BudgetScope.CLUSTER else f"{scope.name.lower()}/{name}"


def describe_budget(key: str) -> str:
    """The same in a sentence: the cluster, rack r1, node n7."""
    return "the cluster" if key == CLUSTER_BUDGET else key.replace("/", " ", 1)


@cache_by_identity
def _limits_w(budgets: tuple[PowerBudget, ...]) -> Mapping[str, float]:
    """The tightest of each place; made once a policy, for it is asked for of each node."""
    found: dict[str, float] = {}
    for budget in budgets:
        key = make_budget_key(budget.scope, budget.name)
        found[key] = min(budget.limit_w, found.get(key, budget.limit_w))
    return found


class BudgetHierarchy:
    """The budgets of one policy."""

    def __init__(self, policy: Policy) -> None:
        self.limits_w = _limits_w(policy.budgets)

    def find_rack(self, inventory: Inventory) -> str | None:
        """The name of the innermost rack of a node that has a budget."""
        return next((part for part in reversed(inventory.topology) if f"rack/{part}" in self.limits_w), None)

    def budgets_above(self, inventory: Inventory) -> tuple[str, ...]:
        """The budgets that the node's GPUs draw from, the nearest first."""
        rack = self.find_rack(inventory)
        chain = (f"node/{inventory.node_name}", None if rack is None else f"rack/{rack}", CLUSTER_BUDGET)
        return tuple(key for key in chain if key is not None and key in self.limits_w)


def is_pool_enforced(policy: Policy, pool: str) -> bool:
    """Whether agents of the pool may change their nodes; no more unless the operator said so."""
    return any(entry.pool == pool and entry.mode is EnforcementMode.ENFORCE for entry in policy.pools)


def is_pool_partitioned(policy: Policy, pool: str) -> bool:
    """Whether the partition planner has the pool's GPUs that can be cut."""
    return any(entry.pool == pool and entry.partitioned for entry in policy.pools)


@cache_by_identity
def _of_nodes(budgets: tuple[PowerBudget, ...]) -> Mapping[str, float]:
    return {budget.name: budget.limit_w for budget in budgets if budget.scope is BudgetScope.NODE}


def get_node_budgets_w(policy: Policy) -> Mapping[str, float]:
    """What the GPUs of single nodes may draw together, by node; the mapping is shared."""
    return _of_nodes(policy.budgets)
