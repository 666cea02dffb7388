"""Errors of profiles, in one tree.

ProfileError            what was told or asked cannot stand; `field` names it, the message says what to do
├── ImpossibleReading   a value that no measurement gives
├── UnknownSlice        a MIG profile that the GPU model does not have
├── NothingToLearnFrom  a family with too few measured configurations
└── UnreadableRecord    a journalled record that this release cannot read
"""

from eelgrid_controller.errors import ControllerError

__all__ = ["ImpossibleReading", "NothingToLearnFrom", "ProfileError", "UnknownSlice", "UnreadableRecord"]


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
