"""Forecasts as the steward has them: told what is measured, asked by the desk, ended with it.

Owns which points are read from the core, and when: a profile at a time, when something was
measured. Must not know what is made of them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from eelgrid_controller.clock import Clock
from eelgrid_controller.core import Core
from eelgrid_controller.measured import OWN
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.profiles.safe_side import POINTS_MOST
from eelgrid_controller.steward.forecasts import Forecast, Forecasts, Learner, Question
from eelgrid_controller.steward.foreseen import Foreseen
from eelgrid_controller.steward.learner import ChildLearner
from eelgrid_protos.catalogue import Catalogue

__all__ = ["Telling"]

_Result = TypeVar("_Result")
_PROFILES_MOST = 1024
_WANTED_MOST = 64  # profiles that others than promised workloads ask for


class _Reads(Protocol):
    async def read(self, view: Callable[[Core], _Result]) -> _Result:
        """What `view` makes of the core."""


class Telling:
    """Tells forecasts what is measured; used from the event loop but for `turned`."""

    def __init__(
        self, loop: _Reads, catalogue: Catalogue, *, learner: Learner | None, clock: Clock, log: logging.Logger
    ) -> None:
        self.forecasts = Forecasts(
            catalogue, learner=learner or ChildLearner(), monotonic_s=clock.monotonic_s, log=log
        )  # fmt: skip
        self.foreseen = Foreseen(self.forecasts)
        self._loop = loop
        self._seen: tuple[int, frozenset[str]] | None = None
        self._wanted: dict[str, None] = {}

    def ask(self, question: Question) -> Forecast | None:
        """A prediction for somebody beside the desk, who asks again until there is one; no plan is withdrawn by it."""
        self._wanted.pop(question.profile, None)
        self._wanted[question.profile] = None
        if len(self._wanted) > _WANTED_MOST:
            self._wanted.pop(next(iter(self._wanted)))
        return self.forecasts.ask(question)

    async def look(self, promised: Iterable[str]) -> None:
        """Reads what changed since the last time; profiles of promised workloads first, POINTS_MOST points at most."""
        first = frozenset((*promised, *self._wanted))
        if not first:
            return
        revision, names = await self._loop.read(lambda core: (core.state.points.revision, _shared(core.state.points)))
        if (revision, first) == self._seen:
            return
        found: dict[str, tuple[Point, ...]] = {}
        left = POINTS_MOST
        for name in (*sorted(first.intersection(names)), *(one for one in names if one not in first)):
            of = await self._loop.read(lambda core, name=name: core.state.points.get(name, ()))  # type: ignore[misc]
            if len(of) <= left:
                found[name] = of
                left -= len(of)
            if left <= 0 or len(found) >= _PROFILES_MOST:
                break
            await asyncio.sleep(0)
        self.forecasts.tell(found)
        self._seen = revision, first


def _shared(profiles: Iterable[str]) -> list[str]:
    """Without those of single jobs, which their profiles' points say as well."""
    return [name for name in profiles if not name.startswith(OWN)]
