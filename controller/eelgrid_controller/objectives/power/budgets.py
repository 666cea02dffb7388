"""The tree of power budgets (cluster, rack, node, feed) and the power that is charged to each."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eelgrid_controller.objectives.power.errors import InvalidBudget

BUDGETS_MOST = 100_000
_DEPTH_MOST = 16


@dataclass(frozen=True, slots=True)
class PowerBudgetNode:
    """The most watts that all below it may draw."""

    name: str
    limit_w: float
    parent: str | None = None
    other_w: float = 0.0  # of the limit, drawn by what is not planned


class BudgetTree:
    """A tree of budgets, or several; immutable."""

    def __init__(self, budgets: Iterable[PowerBudgetNode]) -> None:
        """Raises BudgetRefused for a name twice, a parent that is not there, a circle, or impossible watts."""
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
        """Places of these budgets and of all above them, each once. Raises BudgetRefused for a name that is none."""
        for name in names:
            if name not in self._place:
                raise InvalidBudget("budgets", f"{name!r} is no budget", f"draw from one of {sorted(self._place)[:8]}")
        return tuple(dict.fromkeys(place for name in names for place in self._chains[self._place[name]]))

    def available_w(self) -> list[float]:
        """Watts of each budget that may be planned."""
        return [budget.limit_w - budget.other_w for budget in self.all]
