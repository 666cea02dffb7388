"""The tree of power budgets (cluster, rack, node, feed), the GPUs and limits that are charged to them, and its errors."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.objectives.power.power_model import PowerPlanError

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

    def available_w(self) -> list[float]:
        """Watts of each budget that may be planned."""
        return [budget.limit_w - budget.other_w for budget in self.all]
