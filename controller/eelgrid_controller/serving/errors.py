"""Errors of serving, in one tree.

ServingError                 a service cannot be planned as it is described
├── Unusable                 a value that is none: the message names the field and what it may be
├── MetricsUnreadable        a page of metrics that is not in Prometheus' text format
└── NothingFits              no configuration keeps the objective, or the pool is too small
"""

from eelgrid_controller.errors import ControllerError

__all__ = ["MetricsUnreadable", "NothingFits", "ServingError", "Unusable"]


class ServingError(ControllerError):
    """A service that cannot be planned as it is described; `field` is what is at fault."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        self._given = (field, problem, remedy)
        super().__init__(f"{field}: {problem}", remedy)

    def __reduce__(self) -> tuple[type["ServingError"], tuple[str, str, str]]:
        """What it is made of, for another process."""
        return type(self), self._given


class Unusable(ServingError):
    """A value that is none."""


class MetricsUnreadable(ServingError):
    """A page of metrics that breaks the text format; `field` is the line."""


class NothingFits(ServingError):
    """No configuration keeps the objective, or none fits into the pool."""
