"""Sums over all nodes that the steward needs now and then: what others may draw, and what is free.

Owns how often they are made, and that the event loop rests in between. Must not know what
they are for.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from eelgrid_controller.clock import Clock
from eelgrid_controller.core import Core
from eelgrid_controller.steward.prices import NodeDraw
from eelgrid_controller.steward.views import draw_of, free_of, power_of
from eelgrid_controller.telemetry import Telemetry
from eelgrid_protos.catalogue import Catalogue
from eelgrid_protos.messages import Policy, Workload

__all__ = ["Reads", "Sums", "slices"]

_Result = TypeVar("_Result")
_SLICE = 256  # workloads or nodes that are read in one go: about a millisecond


class Reads(Protocol):
    """What is needed of the controller's loop."""

    async def read(self, view: Callable[[Core], _Result]) -> _Result:
        """What `view` makes of the core."""


def slices(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """So many at a time as are read in a millisecond."""
    for start in range(0, len(names), _SLICE):
        yield names[start : start + _SLICE]


class Sums:
    """Remembers when each sum was made last."""

    def __init__(
        self, loop: Reads, telemetry: Telemetry, catalogue: Catalogue, *, every_s: float, clock: Clock
    ) -> None:
        self._loop, self._telemetry, self._catalogue = loop, telemetry, catalogue
        self._every_s, self._clock, self._monotonic_s = every_s, clock, clock.monotonic_s
        self._policy_seen = -1
        self._drawn_s = self._freed_s = float("-inf")

    async def draws(self, policy: Policy, unsteered: Container[str]) -> tuple[NodeDraw, ...] | None:
        """What is not steered may draw so much; None while that was summed a moment ago."""
        now_s = self._monotonic_s()
        if policy.revision == self._policy_seen and (not policy.budgets or now_s - self._drawn_s < self._every_s):
            return None
        self._policy_seen, self._drawn_s = policy.revision, now_s
        return await self.all(unsteered) if policy.budgets else ()

    async def all(self, unsteered: Container[str]) -> tuple[NodeDraw, ...]:
        """The same of every node, now."""
        made: list[NodeDraw] = []
        for names in slices(await self._loop.read(lambda core: list(core.state.nodes))):
            found = await self._loop.read(
                lambda core, names=names: [
                    draw_of(core, name, unsteered, self._catalogue) for name in names if name in core.state.nodes
                ]  # type: ignore[misc]
            )
            now_s, now_ns = self._clock.monotonic_s(), self._clock.now_ns()
            for draw in found:
                power_w, unread = power_of(self._telemetry, draw.inventory, now_s=now_s, now_ns=now_ns)
                made.append(draw._replace(power_w=power_w, unread=unread))
            await asyncio.sleep(0)
        return tuple(made)

    async def free(self, workloads: Iterable[Workload]) -> dict[str, int] | None:
        """GPUs that elastic jobs could have, by model; None while that was counted a moment ago."""
        now_s = self._monotonic_s()
        is_wanted = any(one.spec.training is not None and one.spec.training.is_elastic for one in workloads)
        if not is_wanted or now_s - self._freed_s < self._every_s:
            return None
        self._freed_s = now_s
        total = Counter[str]()
        names = await self._loop.read(lambda core: [] if len(core.state.pending) else list(core.state.nodes))
        for some in slices(names):
            parts = await self._loop.read(
                lambda core, some=some: [free_of(core, name) for name in some if name in core.state.nodes]  # type: ignore[misc]
            )
            for found in parts:
                total.update(found)
            await asyncio.sleep(0)
        return dict(total)
