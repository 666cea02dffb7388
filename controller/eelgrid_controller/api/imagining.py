"""What-if, capacity plans and decisions as files: questions that take a copy and a while.

Owns where they are answered: the copy is taken on the loop, in slices
(copying.py), and everything else runs in a thread on that copy, so that the live
cluster goes on deciding. Must not know what is tried.

Theory: with one question after the other in one thread, and no more than a few
waiting, operators who ask cannot take the machine from those who submit. Who
hangs up is not worked for any longer.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeVar

from eelgrid_controller.api.copying import with_a_copy
from eelgrid_controller.clock import Clock
from eelgrid_controller.decision import document_of
from eelgrid_controller.loop import ControllerLoop
from eelgrid_controller.state import ClusterState
from eelgrid_controller.whatif import Workbench, plan_capacity, what_if
from eelgrid_protos.catalogue import Catalogue
from eelgrid_protos.faults import ResourceExhausted
from eelgrid_protos.messages import (
    PlanCapacityRequest,
    PlanCapacityResponse,
    WhatIfRequest,
    WhatIfResponse,
    WorkloadSpec,
)

__all__ = ["Imagining"]

_Result = TypeVar("_Result")
_WAITING_MOST = 8


class Imagining:
    """Answers questions on copies, one after the other."""

    def __init__(self, *, loop: ControllerLoop, catalogue: Catalogue, clock: Clock) -> None:
        self._loop = loop
        self._catalogue = catalogue
        self._clock = clock
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def what_if(self, request: WhatIfRequest) -> WhatIfResponse:
        """What the changes would do."""
        answer, copy_s, total_s = await self._on_a_copy(lambda state, bench: what_if(state, request, bench))
        return replace(answer, copy_s=copy_s, total_s=total_s)

    async def plan_capacity(self, request: PlanCapacityRequest) -> PlanCapacityResponse:
        """How many nodes are needed."""
        answer, copy_s, total_s = await self._on_a_copy(lambda state, bench: plan_capacity(state, request, bench))
        return replace(answer, outcome=replace(answer.outcome, copy_s=copy_s, total_s=total_s))

    async def export_decision(self, workload_id: str) -> str:
        """The last decision on a workload with all that it depended on, as JSON."""
        journal = self._loop.journal

        def export(spec: WorkloadSpec) -> str:
            return json.dumps(document_of(journal.past(), spec, workload_id, self._catalogue), separators=(",", ":"))

        async with self._admitted():
            workload = await self._loop.read(lambda core: core.workload(workload_id))
            return await asyncio.to_thread(export, workload.spec)

    @contextlib.asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """One question at a time, and few that wait."""
        if self._waiting >= _WAITING_MOST:
            raise ResourceExhausted(f"{self._waiting} questions of this kind wait already; ask again later")
        self._waiting += 1
        try:
            async with self._turn:
                yield
        finally:
            self._waiting -= 1

    async def _on_a_copy(self, ask: Callable[[ClusterState, Workbench], _Result]) -> tuple[_Result, float, float]:
        """The answer, the longest time in seconds that the loop was held for the copy, and all the time."""
        given_up = threading.Event()
        async with self._admitted():
            try:
                start_s = self._clock.perf_s()
                state, held_s = await with_a_copy(self._loop, self._clock, lambda _, copied: copied)
                bench = Workbench(
                    make_core=self._loop.make_core,
                    catalogue=self._catalogue,
                    now_ns=self._clock.now_ns(),
                    proceed=lambda: not given_up.is_set(),
                )
                answer = await asyncio.to_thread(ask, state, bench)
                return answer, held_s, self._clock.perf_s() - start_s
            finally:
                given_up.set()
