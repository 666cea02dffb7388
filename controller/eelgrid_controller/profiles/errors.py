"""Errors of profiles and of the service models built on them.

ProfileError is raised for readings and questions that cannot stand, ServingError for services that cannot be
planned as described; `field` names what is at fault.
"""

from eelgrid_controller.errors import ControllerError


class ProfileError(ControllerError):
    """What is wrong with which field, and the remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {problem}", remedy)


class ImpossibleReading(ProfileError):
    """A value that no measurement gives: not finite, or negative."""


class UnknownSlice(ProfileError):
    """A MIG profile that the GPU model does not have."""


class NothingToLearnFrom(ProfileError):
    """A family with too few measured configurations."""


class UnreadableRecord(ProfileError):
    """A journalled record that this release cannot read."""


class ServingError(ControllerError):
    """A service that cannot be planned as it is described; `field` is what is at fault."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        self._given = (field, problem, remedy)
        super().__init__(f"{field}: {problem}", remedy)

    def __reduce__(self) -> tuple[type["ServingError"], tuple[str, str, str]]:
        """What it is made of, for another process."""
        return type(self), self._given


class InvalidServingValue(ServingError):
    """A value that is none."""


class MetricsUnreadable(ServingError):
    """A page of metrics that breaks the text format; `field` is the line."""


class NoFeasibleConfiguration(ServingError):
    """No configuration keeps the objective, or none fits into the pool."""
