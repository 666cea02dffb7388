"""The policy: which pools are enforced or partitioned, which power budgets apply to a node, and its validation.

Reads a policy's pools (an agent that names none is in `default`), names power budgets by key (`cluster`, `rack/NAME`, `node/NAME`), finds the chain of budgets
above a node, and checks the rules between the fields of a new policy. Must not know the power that is drawn.

Theory: a budget bounds all GPUs of a cluster, a rack or a node. A rack is any part of a node's path that a
budget names, the innermost first; of two budgets of one place the tighter is in force.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

from eelgrid_controller.state.journal import omit_defaults
from eelgrid_controller.state.spending import spending_key
from eelgrid_kernels.baselines import find_policy
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import Aborted, InvalidArgument
from eelgrid_protos.messages import (
    OBJECTIVES,
    QUEUE_DEPTH_MOST,
    BudgetScope,
    EnforcementMode,
    Inventory,
    Policy,
    PowerBudget,
    PreemptionReclaim,
    Queue,
    SpendingQuantity,
    Weights,
    resolve_pool,
)
from eelgrid_protos.plain_messages import to_plain

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
    """Caches a function by the identity of its argument; results are shared and must not be changed."""

    @lru_cache(maxsize=_MOST)
    def remembered(itself: _Itself[_Of]) -> _Made:
        return make(itself.held)

    return lambda of: remembered(_Itself(of))


CLUSTER_BUDGET = "cluster"


def make_budget_key(scope: BudgetScope, name: str) -> str:
    """Returns the planner's key of a budget."""
    return CLUSTER_BUDGET if scope is BudgetScope.CLUSTER else f"{scope.name.lower()}/{name}"


def describe_budget(key: str) -> str:
    """Formats a budget key for a sentence: the cluster, rack r1, node n7."""
    return "the cluster" if key == CLUSTER_BUDGET else key.replace("/", " ", 1)


@cache_by_identity
def _limits_w(budgets: tuple[PowerBudget, ...]) -> Mapping[str, float]:
    """Returns the tightest budget of each place; computed once per policy, since it is needed for each node."""
    found: dict[str, float] = {}
    for budget in budgets:
        key = make_budget_key(budget.scope, budget.name)
        found[key] = min(budget.limit_w, found.get(key, budget.limit_w))
    return found


class BudgetHierarchy:
    """The budgets of one policy."""

    def __init__(self, policy: Policy) -> None:
        self.limits_w = _limits_w(policy.budgets)

    def budgets_above(self, inventory: Inventory) -> tuple[str, ...]:
        """Returns the keys of the budgets that the node's GPUs draw from, the nearest first."""
        racks = (f"rack/{part}" for part in reversed(inventory.topology))
        rack = next((key for key in racks if key in self.limits_w), "")
        return tuple(key for key in (f"node/{inventory.node_name}", rack, CLUSTER_BUDGET) if key in self.limits_w)


def is_pool_enforced(policy: Policy, pool: str) -> bool:
    """Returns whether the operator allows agents of the pool to change settings of their nodes."""
    name = resolve_pool(pool)
    return any(entry.pool == name and entry.mode is EnforcementMode.ENFORCE for entry in policy.pools)


def is_pool_partitioned(policy: Policy, pool: str) -> bool:
    """Returns whether the partition planner manages the pool's MIG GPUs."""
    name = resolve_pool(pool)
    return any(entry.pool == name and entry.partitioned for entry in policy.pools)


@cache_by_identity
def _of_nodes(budgets: tuple[PowerBudget, ...]) -> Mapping[str, float]:
    return {budget.name: budget.limit_w for budget in budgets if budget.scope is BudgetScope.NODE}


def get_node_budgets_w(policy: Policy) -> Mapping[str, float]:
    """Returns the power budgets of nodes, in watts by node name; the mapping is shared."""
    return _of_nodes(policy.budgets)


_OBJECTIVE_CUSTOM = "custom"
# What named objectives weighed in earlier versions. Their journals have these, and stay in force until an objective is set.
_FORMER_WEIGHTS: Mapping[str, tuple[Weights, ...]] = {
    "energy": (
        Weights(power=1.0, fragmentation_w=0.0, stranding_w=50.0, lookahead=0.7),
        Weights(power=1.0, fragmentation_w=0.0, stranding_w=50.0, lookahead=0.8),
        Weights(power=1.0, fragmentation_w=0.0, stranding_w=50.0, lookahead=0.8, stranding_full_w=500.0),
    ),
    "balanced": (
        Weights(
            power=1.0, fragmentation_w=0.0, stranding_w=50.0, lookahead=0.7, scarcity_w=500.0, stranding_full_w=1000.0
        ),
        Weights(
            power=1.0, fragmentation_w=0.0, stranding_w=100.0, lookahead=0.8, scarcity_w=500.0, stranding_full_w=2000.0
        ),
    ),
}


def revise_policy(current: Policy, asked: Policy) -> Policy:
    """Returns the policy with its new revision; raises Aborted unless it names the revision in force, and InvalidArgument."""
    if asked.revision != current.revision:
        raise Aborted(
            f"the policy in force is revision {current.revision}, not {asked.revision}; read it again, repeat "
            "the change on it and send it with its revision"
        )
    broken = find_policy_violations(asked)
    if broken:
        raise InvalidArgument("the policy contradicts itself", broken)
    return replace(asked, revision=current.revision + 1)


def find_policy_violations(policy: Policy) -> tuple[Violation, ...]:
    """Lists the contradictions in a policy, each with its remedy."""
    found = []
    known = (*OBJECTIVES, _OBJECTIVE_CUSTOM)
    if policy.objective not in known:
        found.append(Violation("policy.objective", f"is {policy.objective!r}", f"use one of {', '.join(known)}"))
    elif policy.objective in OBJECTIVES and policy.weights not in (
        OBJECTIVES[policy.objective],
        *_FORMER_WEIGHTS.get(policy.objective, ()),
    ):
        found.append(
            Violation(
                "policy.weights",
                f"are not those of the objective {policy.objective}",
                f"set objective to {_OBJECTIVE_CUSTOM} for weights of your own",
            )
        )
    try:
        find_policy(policy.placement)
    except ValueError as error:
        problem, remedy = str(error).split("; ", 1)
        found.append(Violation("policy.placement", problem, remedy))
    if len({entry.pool for entry in policy.pools}) < len(policy.pools):
        found.append(Violation("policy.pools", "name one pool twice", "give each pool one mode"))
    if len({(budget.scope, budget.name) for budget in policy.budgets}) < len(policy.budgets):
        found.append(Violation("policy.budgets", "bound one place twice", "give each cluster, rack and node one limit"))
    if len(set(map(spending_key, policy.spending))) < len(policy.spending):
        found.append(
            Violation(
                "policy.spending",
                "limit the same spending twice",
                "give each namespace, user, queue and label one limit of a quantity in a period",
            )
        )
    if len({one.name for one in policy.priority_classes}) < len(policy.priority_classes):
        found.append(Violation("policy.priority_classes", "name one class twice", "give each name one priority"))
    if len({(one.load, one.beside) for one in policy.interference}) < len(policy.interference):
        found.append(
            Violation("policy.interference", "name one pair twice", "give each load one slowdown beside another")
        )
    found += find_queue_violations(policy.queues)
    if len({one.name for one in policy.reservations}) < len(policy.reservations):
        found.append(Violation("policy.reservations", "have one name twice", "give each reservation a name of its own"))
    if policy.prices is None:
        found += (
            Violation(
                f"policy.spending[{index}].quantity",
                f"is {limit.quantity.name.lower()}, and there are no prices",
                "give prices with eelctl policy set --prices, or limit gpu_time or energy",
            )
            for index, limit in enumerate(policy.spending)
            if limit.quantity in (SpendingQuantity.MONEY, SpendingQuantity.CARBON)
        )
    return tuple(found)


def find_queue_violations(queues: tuple[Queue, ...]) -> list[Violation]:
    """Lists what is wrong with the tree of queues: names, parents, circles and depth."""
    found = list[Violation]()
    parents = dict[str, str]()
    for index, queue in enumerate(queues):
        if queue.name in parents:
            found.append(
                Violation(
                    f"policy.queues[{index}].name", f"names {queue.name} again", "give each queue a name of its own"
                )
            )
        parents[queue.name] = queue.parent
    depths = {"": 0}
    for index, queue in enumerate(queues):
        path, name = dict[str, None](), queue.name
        while name not in depths and name in parents and name not in path:
            path[name] = None
            name = parents[name]
        field = f"policy.queues[{index}].parent"
        if name in path:
            found.append(
                Violation(field, f"of {queue.name} is below {queue.name} itself", "name a queue that is not below it")
            )
            depths |= dict.fromkeys(path, 0)
            continue
        if name not in depths:
            known = ", ".join(list(parents)[:8])
            found.append(
                Violation(field, f"is {name!r}, which no queue is called", f"declare it, or use one of {known}")
            )
        for depth, below in enumerate(reversed(path), depths.get(name, 0) + 1):
            depths[below] = depth
        if depths[queue.name] > QUEUE_DEPTH_MOST:
            found.append(
                Violation(
                    field,
                    f"puts {queue.name} at depth {depths[queue.name]}",
                    f"nest queues at most {QUEUE_DEPTH_MOST} deep",
                )
            )
    return found or _find_mixed_reclaims(queues, parents)


def _find_mixed_reclaims(queues: tuple[Queue, ...], parents: Mapping[str, str]) -> list[Violation]:
    """Lists the queues that reclaim by another measure than others of their tree: what one takes the other would take back."""
    found, first = list[Violation](), dict[str, PreemptionReclaim]()
    for index, queue in enumerate(queues):
        reclaim = PreemptionReclaim.UNSPECIFIED if queue.preemption is None else queue.preemption.reclaim
        if reclaim in (PreemptionReclaim.FAIR_SHARE, PreemptionReclaim.PAST_USE):
            root = queue.name
            while parents[root]:
                root = parents[root]
            if first.setdefault(root, reclaim) is not reclaim:
                field = f"policy.queues[{index}].preemption.reclaim"
                problem = (
                    f"is {reclaim.name.lower()}, and another queue of the tree of {root} has {first[root].name.lower()}"
                )
                found.append(Violation(field, problem, "use one of the two, or nominal, in a tree"))
    return found


def changes_starts(before: Policy, after: Policy) -> bool:
    """Returns whether pending work may start under one policy that waits under the other, spending limits aside."""
    of_time = "backfill", "default_runtime_s", "reservations", "capacity_hold_s"
    names = ("budgets", "queues", *of_time, "interference", "shared_slowdown_most")
    if any(getattr(before, name) != getattr(after, name) for name in names):
        return True
    # Agents of enforced pools keep the budgets of their nodes by themselves.
    return bool(after.budgets) and before.pools != after.pools


def policy_to_plain(policy: Policy) -> dict[str, Any]:
    """Returns a policy for the journal; without queues nothing of them, as in the format that older versions read.

    So it is with backfill and reservations.
    """
    plain: dict[str, Any] = to_plain(policy)
    default = Policy()
    queues = () if policy.queues else ("queues", "queue_half_life_s", "queue_age_limit_s")
    for name in (*queues, "backfill", "reservations", "priority_classes", "interference"):
        if getattr(policy, name) == getattr(default, name):
            del plain[name]
    for row, limit in zip(plain.get("spending", ()), policy.spending, strict=False):
        omit_defaults(row, limit, ("stops",))
    for row, reservation in zip(plain.get("reservations", ()), policy.reservations, strict=False):
        omit_defaults(row, reservation, ("gpus", "gpu_models", "lacking_gpus", "change_cause"))
    for row, queue in zip(plain.get("queues", ()), policy.queues, strict=False):
        if queue.preemption is None:
            row.pop("preemption", None)
        else:
            omit_defaults(row["preemption"], queue.preemption, ("horizon_s", "delay_s"))
    return plain
