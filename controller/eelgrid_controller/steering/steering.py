"""Steering: events of a fleet in, instructions out.

Owns which part an event goes to, and what is counted as ignored. Must not know how
services scale, jobs search or watts are shared: its parts do.

Synchronous, deterministic and bounded: the same events give the same instructions.
Nothing is raised for an event that is old, unknown, twice or impossible.
"""

import math
from collections import Counter

from eelgrid_controller.steering.events import (
    Ended,
    Event,
    Instruction,
    Scale,
    ServiceBegan,
    ServiceServing,
    ServiceWindow,
    Ticked,
)  # fmt: skip
from eelgrid_controller.steering.services import Services
from eelgrid_controller.steering.settings import Settings
from eelgrid_controller.steering.standing import Standing

__all__ = ["Steering"]


class Steering:
    """One fleet's services and jobs."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._now_s = -math.inf
        self._services = Services(self.settings)
        self._ignored: Counter[str] = Counter()

    def on(self, event: Event) -> list[Instruction]:
        """What should be done after an event."""
        if not math.isfinite(event.at_s):
            return self._ignore("a time that is none")
        self._now_s = max(self._now_s, event.at_s)
        made: list[Instruction] | None = None
        match event:
            case ServiceBegan():
                made = _wide(self._services.began(event))
            case ServiceWindow():
                made = _wide(self._services.window(event))
            case ServiceServing():
                made = _wide(self._services.serving(event))
            case Ended():
                made = [] if self._services.ended(event.name) else None
            case Ticked():
                made = _wide(self._services.ticked(event.at_s))
            case _:
                made = None
        return self._ignore(type(event).__name__) if made is None else made

    def standing(self) -> Standing:
        """How everything stands."""
        return Standing(
            at_s=self._now_s,
            services=tuple(self._services.standing(self._now_s)),
            jobs=(),
            budgets=(),
            price_per_j=None,
            price_weight=1.0,
            ignored=dict(sorted(self._ignored.items())),
        )

    def _ignore(self, why: str) -> list[Instruction]:
        self._ignored[why] += 1
        return []


def _wide(made: list[Scale] | None) -> list[Instruction] | None:
    return None if made is None else list(made)
