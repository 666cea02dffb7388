"""What the power planner refuses, and why.

Owns the tree of its errors. Must not know how anything is computed.

ControllerError
└── PowerRefused            what was asked for cannot be planned; `field` is at fault
    ├── CurveRefused        points that make no curve
    ├── PromiseRefused      a promise that no limit can keep, or that says nothing
    ├── BudgetRefused       budgets that make no tree, or a draw from none of them
    └── BudgetTooSmall      the least that may be drawn is more than a budget allows
"""

from eelgrid_controller.errors import ControllerError

__all__ = ["BudgetRefused", "BudgetTooSmall", "CurveRefused", "PowerRefused", "PromiseRefused"]


class PowerRefused(ControllerError):
    """What cannot be planned; `field` is the one at fault."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {problem}", remedy)


class CurveRefused(PowerRefused):
    """Points that make no curve."""


class PromiseRefused(PowerRefused):
    """A promise that no limit can keep, or that says nothing."""


class BudgetRefused(PowerRefused):
    """Budgets that make no tree, or a draw from a budget that is not in it."""


class BudgetTooSmall(PowerRefused):
    """The least limits together exceed a budget by `missing_w` watts."""

    def __init__(self, budget: str, missing_w: float) -> None:
        self.budget = budget
        self.missing_w = missing_w
        super().__init__(
            f"budget {budget!r}",
            f"the least limits that the jobs' promises allow draw {missing_w:.1f} W more than it has",
            f"give it {missing_w:.1f} W more, promise its jobs a larger slowdown, or stop one of them",
        )
