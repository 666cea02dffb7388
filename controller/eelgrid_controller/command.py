"""A command that waits for its turn: what it does to the core, what came of it, and who waits for the answer.

Owns the answer, which is given once, and not to a caller who has gone. Must not
know when a command's turn comes or when its answer may be given: loop.py does.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eelgrid_controller.core import Core, Step
from eelgrid_controller.events import Event

__all__ = ["Command", "Committed", "Origin"]


@dataclass(frozen=True, slots=True)
class Committed:
    """What one commit made true."""

    events: tuple[Event, ...]
    nodes: frozenset[str]
    revision: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Whence a command came: when the call arrived, and the caller's trace context as W3C's headers, for observers."""

    arrived_ns: int
    headers: Mapping[str, str]


@dataclass(slots=True)
class Command:
    """One change that somebody asked for; `fault` is why it was refused."""

    apply: Callable[[Core, int], Step[Any]]
    answer: asyncio.Future[Any]
    is_decision: bool = False
    # On the monotonic clock.
    asked_s: float = 0.0
    origin: Origin | None = None
    outcome: Any = None
    fault: Exception | None = None

    def tell(self, result: Any = None, *, fault: Exception | None = None) -> None:
        """Answers the caller, who may have gone."""
        if self.answer.done():
            return
        if fault is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(fault)
