"""The shadow that runs beside the cluster: started, asked and stopped by operators.

Owns its thread and what becomes of a shadow that cannot keep up. Must not know
how it decides.

Theory: committed events are handed to one thread in order, and a report is asked
of the same thread, so that it compares the cluster of a moment with a shadow
that has followed everything up to that moment. The cluster never waits for its
shadow: one that falls too far behind is ended, and says so.
"""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from eelgrid_controller.api.copying import with_a_copy
from eelgrid_controller.clock import Clock
from eelgrid_controller.comparison import figures
from eelgrid_controller.core import Core
from eelgrid_controller.events import Event
from eelgrid_controller.loop import Committed, ControllerLoop
from eelgrid_controller.shadow import Shadow
from eelgrid_controller.state import ClusterState
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import OBJECTIVES, SetWeights, ShadowReport

__all__ = ["Shadowing"]

# Events that wait for the shadow; each costs about as much as the cluster's own decision did.
_BEHIND_MOST = 50_000
_NONE = "no shadow runs; start one with StartShadow (`eelctl shadow start`)"


class Shadowing:
    """At most one shadow at a time."""

    def __init__(self, *, loop: ControllerLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shadow")
        # Made in the thread, before anything that it follows.
        self._shadow: Future[Shadow] | None = None
        self._behind = 0
        self._why_none = _NONE
        loop.listeners.append(self._on_commit)

    def close(self) -> None:
        """End the thread; what the shadow has not followed yet is dropped."""
        self._shadow = None
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _on_commit(self, committed: Committed) -> None:
        shadow = self._shadow
        if shadow is None or not committed.events:
            return
        self._behind += len(committed.events)
        if self._behind > _BEHIND_MOST:
            self._shadow = None
            self._why_none = (
                f"the shadow was ended: {self._behind} events waited for it; start it again at a quieter time"
            )
            return
        followed = self._thread.submit(_follow, shadow, committed.events)
        loop = asyncio.get_running_loop()
        followed.add_done_callback(lambda _: loop.call_soon_threadsafe(self._caught_up, len(committed.events)))

    def _caught_up(self, events: int) -> None:
        self._behind -= events

    async def start(self, change: SetWeights) -> ShadowReport:
        """Begin with a copy of now; a shadow before it ends."""
        now_ns = self._clock.now_ns()

        def begin(core: Core, state: ClusterState) -> None:
            weights = change.weights or OBJECTIVES[change.objective]
            policy = replace(core.state.policy, objective=change.objective or "custom", weights=weights)
            # At the moment of the copy, so that no event falls between it and the first that is followed.
            self._shadow = self._thread.submit(Shadow, state, policy, self._loop.make_core, now_ns=now_ns)

        await with_a_copy(self._loop, self._clock, begin)
        self._why_none = _NONE
        return await self.report()

    async def report(self) -> ShadowReport:
        """The cluster of now beside the shadow that has followed everything until now."""
        shadow = self._shadow
        if shadow is None:
            raise FailedPrecondition(self._why_none)
        live, workloads, revision = await self._loop.read(
            lambda core: (figures(core), dict(core.state.workloads), core.state.revision)
        )
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: shadow.result().report(live, workloads, revision)
        )

    async def stop(self) -> ShadowReport:
        """The last report; then there is none."""
        report = await self.report()
        self._shadow = None
        return report


def _follow(shadow: Future[Shadow], events: tuple[Event, ...]) -> None:
    for event in events:
        shadow.result().follow(event)
