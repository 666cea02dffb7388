"""What a policy hands over to be judged.

Owns the values alone, so that the audit need not import a planner.
"""

from collections.abc import Mapping
from typing import NamedTuple

from eelgrid_controller.profiles.points import Configuration

__all__ = ["Plan", "WindowPlan"]


class WindowPlan(NamedTuple):
    """One window: instances loaded by shape (a configuration with batch 0), and instances at each point by its place."""

    loaded: Mapping[Configuration, int]
    running: tuple[tuple[int, float], ...]


Plan = tuple[WindowPlan, ...]
