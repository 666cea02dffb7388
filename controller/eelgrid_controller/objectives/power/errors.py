"""Errors of power planning, in one tree below PowerPlanError."""

from eelgrid_controller.errors import ControllerError


class PowerPlanError(ControllerError):
    """What cannot be planned; `field` is the one at fault."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {problem}", remedy)


class InvalidCurve(PowerPlanError):
    """Points that make no curve."""


class InvalidPromise(PowerPlanError):
    """A promise that no limit can keep, or that says nothing."""


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
