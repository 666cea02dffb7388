"""The tree of power budgets (cluster, rack, node, feed), the GPUs and limits that are charged to them, and its errors.

`policy_budgets` makes the tree of a policy. GPUs that are not managed are charged with the most that they may draw: their
limit, idle power or default.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.objectives.power.power_model import PowerPlanError
from eelgrid_controller.state.policy import CLUSTER_BUDGET, BudgetHierarchy
from eelgrid_protos.messages import Inventory, Policy

BUDGETS_MOST = 100_000
_DEPTH_MOST = 16
ROUNDING_W = 1e-6  # watts by which the rounding of a sum may pass a budget


class InvalidBudget(PowerPlanError):
    """Budgets that make no tree, or a draw from a budget that is not in it."""


class BudgetTooSmall(PowerPlanError):
    """The least limits together exceed a budget by `missing_w` watts."""

    def __init__(self, budget: str, missing_w: float) -> None:
        self.budget = budget
        self.missing_w = missing_w
        super().__init__(
            f"budget {budget!r}",
            f"the least limits that the jobs' promises allow draw {missing_w:.1f} W more than it has",
            f"give it {missing_w:.1f} W more, promise its jobs a larger slowdown, or stop one of them",
        )


@dataclass(frozen=True, slots=True)
class PowerBudgetNode:
    """The most watts that all below it may draw."""

    name: str
    limit_w: float
    parent: str | None = None
    other_w: float = 0.0  # of the limit, drawn by what is not planned


@dataclass(frozen=True, slots=True)
class Holding:
    """The GPUs that one job holds on one node."""

    name: str  # job/node
    node: str
    gpus: int
    budgets: tuple[str, ...]  # the lowest they draw from
    restored_w: float | None = None  # charge of what the node puts back when its lease ends; None if it never does


class LimitSetting(NamedTuple):
    """A limit on all GPUs of a holding, and the watts that it is charged with."""

    limit_w: float  # of each GPU
    charge_w: float  # of all of them together


class BudgetTree:
    """A tree of budgets, or several; immutable."""

    def __init__(self, budgets: Iterable[PowerBudgetNode]) -> None:
        """Raises InvalidBudget for a name twice, a parent that is not there, a circle, or impossible watts."""
        self.all: tuple[PowerBudgetNode, ...] = tuple(budgets)
        self._place: Mapping[str, int] = {budget.name: place for place, budget in enumerate(self.all)}
        if len(self.all) > BUDGETS_MOST:
            raise InvalidBudget("budgets", f"{len(self.all)} budgets", f"plan at most {BUDGETS_MOST} together")
        if len(self._place) < len(self.all):
            raise InvalidBudget("name", "two budgets have the same", "give each its own, e.g. rack-3/node-12")
        for budget in self.all:
            if not (math.isfinite(budget.limit_w) and budget.limit_w >= 0.0 and 0.0 <= budget.other_w < math.inf):
                raise InvalidBudget(
                    "limit_w",
                    f"budget {budget.name!r} of {budget.limit_w} W, {budget.other_w} W of it for others",
                    "write watts, 0 or more",
                )
            if budget.parent is not None and budget.parent not in self._place:
                raise InvalidBudget(
                    "parent", f"{budget.parent!r} of budget {budget.name!r} is no budget", "add it, or leave it out"
                )
        self._chains = tuple(self._chain(budget) for budget in self.all)

    def _chain(self, budget: PowerBudgetNode) -> tuple[int, ...]:
        """Places of a budget and of all above it."""
        chain: list[int] = []
        at: PowerBudgetNode | None = budget
        while at is not None:
            chain.append(self._place[at.name])
            if len(chain) > _DEPTH_MOST:
                raise InvalidBudget(
                    "parent",
                    f"budget {budget.name!r} lies under more than {_DEPTH_MOST} others, or under itself",
                    "let each parent be nearer to the cluster",
                )
            at = None if at.parent is None else self.all[self._place[at.parent]]
        return tuple(chain)

    def __len__(self) -> int:
        return len(self.all)

    def chain_indices(self, names: Sequence[str]) -> tuple[int, ...]:
        """Places of these budgets and of all above them, each once. Raises InvalidBudget for an unknown name."""
        for name in names:
            if name not in self._place:
                raise InvalidBudget("budgets", f"{name!r} is no budget", f"draw from one of {sorted(self._place)[:8]}")
        return tuple(dict.fromkeys(place for name in names for place in self._chains[self._place[name]]))

    def count_gpus(self, shares: Iterable[tuple[Sequence[str], int]]) -> tuple[tuple[int, int], ...]:
        """GPUs in each budget by its place, of shares that name their lowest budgets and count their GPUs."""
        gpus: dict[int, int] = {}
        for names, count in shares:
            for place in self.chain_indices(names):
                gpus[place] = gpus.get(place, 0) + count
        return tuple(sorted(gpus.items()))

    def available_w(self) -> list[float]:
        """Watts of each budget that may be planned."""
        return [budget.limit_w - budget.other_w for budget in self.all]


class NodePowerDraw(NamedTuple):
    """A node, and the most that its unmanaged GPUs may draw."""

    inventory: Inventory
    other_w: float


def nearest_budgets(policy: Policy, inventory: Inventory) -> tuple[str, ...]:
    """The budget that bounds a node most nearly, or none."""
    return BudgetHierarchy(policy).budgets_above(inventory)[:1]


def policy_budgets(policy: Policy, nodes: Iterable[NodePowerDraw]) -> BudgetTree:
    """The tree; raises InvalidBudget where the policy's budgets make none."""
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
