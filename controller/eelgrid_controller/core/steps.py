"""What the core answers and what observers of its commits are given: steps, commits, and where a command came from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from eelgrid_controller.state.events import Event

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class CoreStep(Generic[_Result]):
    """Result of a step: events to make durable, in order, the answer, and the nodes whose plan changed."""

    events: tuple[Event, ...]
    result: _Result
    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The result of one commit: its events, the nodes that changed, and the new revision."""

    events: tuple[Event, ...]
    nodes: frozenset[str]
    revision: int


@dataclass(frozen=True, slots=True)
class CommandOrigin:
    """Origin of a command for observers: when the call arrived, and the caller's trace context as W3C headers."""

    arrived_ns: int
    headers: Mapping[str, str]
