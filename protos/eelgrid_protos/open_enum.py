"""Enumerations of the wire that a newer minor version may extend."""

from enum import IntEnum
from typing import Self

__all__ = ["OpenEnum"]


class OpenEnum(IntEnum):
    """An enumeration whose unknown numbers read as UNSPECIFIED (0), as protobuf asks of readers."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(0)
        return None
