"""What one call to the core comes to.

Owns the value. Must not know calls.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from eelgrid_controller.events import Event

__all__ = ["Step"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Step(Generic[_Result]):
    """Events to make durable, in order; the answer; and the nodes whose plan changed."""

    events: tuple[Event, ...]
    result: _Result
    nodes: frozenset[str]
