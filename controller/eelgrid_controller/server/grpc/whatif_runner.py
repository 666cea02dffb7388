"""What-if questions, capacity plans, exported decisions and the shadow policy, run on copies of the state.

The state is copied in slices, so that a large fleet does not block the event loop.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import grpc.aio

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.server.grpc.searches import search_to_end
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.whatif.decision_record import record_decision
from eelgrid_controller.whatif.scenarios import (
    ScenarioContext,
    ShadowPolicy,
    compute_cluster_figures,
    plan_capacity,
    run_what_if,
)
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.faults import FailedPrecondition, ResourceExhausted, Unavailable
from eelgrid_protos.messages import (
    OBJECTIVES,
    ExportDecisionRequest,
    ExportDecisionResponse,
    GetShadowRequest,
    GetShadowResponse,
    PlanCapacityRequest,
    PlanCapacityResponse,
    ShadowReport,
    StartShadowRequest,
    StartShadowResponse,
    StopShadowRequest,
    StopShadowResponse,
    WhatIfRequest,
    WhatIfResponse,
    WorkloadSpec,
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Result = TypeVar("_Result")
_PART_LETTERS = 500_000
# A slice takes some 3 ms, no longer than a batch of commands (config.py).
_SLICE = 200
# The state is put back when a commit fails; a disk that fails again and again is no time for a copy.
_ATTEMPTS_MOST = 3


async def run_on_copy(
    loop: ControllerLoop, clock: Clock, finish: Callable[[Core, ClusterState], _Result]
) -> tuple[_Result, float]:
    """What `finish` makes of the core and its copy at one moment, and the longest time that the loop was held."""
    changed: set[str] = set()

    def on_commit(committed: CommitResult) -> None:
        changed.update(committed.nodes)
        changed.update(name for event in committed.events if (name := getattr(event, "node_name", "")))

    loop.listeners.append(on_commit)
    try:
        for _ in range(_ATTEMPTS_MOST):
            state = await loop.read(lambda core: core.state)
            changed.clear()
            records, held_s = await _records(loop, clock, state)
            start_s = clock.perf_s()
            core = await loop.read(lambda core: core)
            if core.state is state:
                for name in changed:
                    records.pop(name, None)
                result = finish(core, state.copy(records))
                return result, max(held_s, clock.perf_s() - start_s)
    finally:
        loop.listeners.remove(on_commit)
    raise Unavailable("the journal cannot be written, and the state is put back again and again; ask again later")


async def _records(loop: ControllerLoop, clock: Clock, state: ClusterState) -> tuple[dict[str, NodeRecord], float]:
    """Copies of the nodes' records, of different moments, and the longest time of a slice."""
    names, records, longest_s = list(state.nodes), dict[str, NodeRecord](), 0.0
    for start in range(0, len(names), _SLICE):
        await loop.read(lambda _: None)
        start_s = clock.perf_s()
        # Some may be gone since.
        records.update(
            (name, state.nodes[name].copy()) for name in names[start : start + _SLICE] if name in state.nodes
        )
        longest_s = max(longest_s, clock.perf_s() - start_s)
        await asyncio.sleep(0)
    return records, longest_s


_WAITING_MOST = 8


class WhatIfRunner:
    """Answers questions on copies, one after the other; serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(self, *, loop: ControllerLoop, catalogue: Catalogue, clock: Clock) -> None:
        self._loop = loop
        self._catalogue = catalogue
        self._clock = clock
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def what_if(self, request: WhatIfRequest, _context: Context) -> WhatIfResponse:
        """What changes would do."""
        answer, copy_s, total_s = await self._on_a_copy(lambda state, bench: run_what_if(state, request, bench))
        return replace(answer, copy_s=copy_s, total_s=total_s)

    async def plan_capacity(self, request: PlanCapacityRequest, _context: Context) -> PlanCapacityResponse:
        """How many nodes are needed."""
        answer, copy_s, total_s = await self._on_a_copy(lambda state, bench: plan_capacity(state, request, bench))
        return replace(answer, outcome=replace(answer.outcome, copy_s=copy_s, total_s=total_s))

    async def export_decision(
        self, request: ExportDecisionRequest, _context: Context
    ) -> AsyncIterator[ExportDecisionResponse]:
        """The last decision on a workload with all that it depended on, as JSON in parts."""
        journal, workload_id = self._loop.journal, request.workload_id

        def export(spec: WorkloadSpec) -> str:
            return json.dumps(
                record_decision(journal.read_history(), spec, workload_id, self._catalogue), separators=(",", ":")
            )

        async with self._admit_question():
            workload = await self._loop.read(lambda core: core.workload(workload_id))
            text = await search_to_end(lambda: export(workload.spec))
        for start in range(0, len(text), _PART_LETTERS):
            yield ExportDecisionResponse(text=text[start : start + _PART_LETTERS])

    @contextlib.asynccontextmanager
    async def _admit_question(self) -> AsyncIterator[None]:
        """One question at a time, and few that wait."""
        if self._waiting >= _WAITING_MOST:
            raise ResourceExhausted(f"{self._waiting} questions of this kind wait already; ask again later")
        self._waiting += 1
        try:
            async with self._turn:
                yield
        finally:
            self._waiting -= 1

    async def _on_a_copy(self, ask: Callable[[ClusterState, ScenarioContext], _Result]) -> tuple[_Result, float, float]:
        """The answer, the longest time in seconds that the loop was held for the copy, and all the time."""
        given_up = threading.Event()
        async with self._admit_question():
            try:
                start_s = self._clock.perf_s()
                state, held_s = await run_on_copy(self._loop, self._clock, lambda _, copied: copied)
                bench = ScenarioContext(
                    make_core=self._loop.make_core,
                    catalogue=self._catalogue,
                    now_ns=self._clock.now_ns(),
                    proceed=lambda: not given_up.is_set(),
                )
                answer = await asyncio.to_thread(ask, state, bench)
                return answer, held_s, self._clock.perf_s() - start_s
            finally:
                given_up.set()


# Events that wait for the shadow; each costs about as much as the cluster's own decision did.
_BEHIND_MOST = 50_000
_NONE = "no shadow runs; start one with StartShadow (`eelctl shadow start`)"


class ShadowRunner:
    """At most one shadow at a time; serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(self, *, loop: ControllerLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shadow")
        # Made in the thread, before anything that it follows.
        self._shadow: Future[ShadowPolicy] | None = None
        self._behind = 0
        self._why_none = _NONE
        loop.listeners.append(self._on_commit)

    def close(self) -> None:
        """End the thread; what the shadow has not followed yet is dropped."""
        self._shadow = None
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _on_commit(self, committed: CommitResult) -> None:
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

    async def start_shadow(self, request: StartShadowRequest, _context: Context) -> StartShadowResponse:
        """Let a second policy follow a copy of now; a shadow before it ends."""
        now_ns, change = self._clock.now_ns(), request.weights

        def begin(core: Core, state: ClusterState) -> None:
            weights = change.weights or OBJECTIVES[change.objective]
            policy = replace(core.state.policy, objective=change.objective or "custom", weights=weights)
            # At the moment of the copy, so that no event falls between it and the first that is followed.
            self._shadow = self._thread.submit(ShadowPolicy, state, policy, self._loop.make_core, now_ns=now_ns)

        await run_on_copy(self._loop, self._clock, begin)
        self._why_none = _NONE
        return StartShadowResponse(report=await self._report())

    async def get_shadow(self, _request: GetShadowRequest, _context: Context) -> GetShadowResponse:
        """How the second policy compares."""
        return GetShadowResponse(report=await self._report())

    async def _report(self) -> ShadowReport:
        """The cluster of now beside the shadow that has followed everything until now."""
        shadow = self._shadow
        if shadow is None:
            raise FailedPrecondition(self._why_none)
        live, workloads, revision = await self._loop.read(
            lambda core: (compute_cluster_figures(core), dict(core.state.workloads), core.state.revision)
        )
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: shadow.result().build_report(live, workloads, revision)
        )

    async def stop_shadow(self, _request: StopShadowRequest, _context: Context) -> StopShadowResponse:
        """The last report; then there is none."""
        report = await self._report()
        self._shadow = None
        return StopShadowResponse(report=report)


def _follow(shadow: Future[ShadowPolicy], events: tuple[Event, ...]) -> None:
    for event in events:
        shadow.result().follow_event(event)
