"""Flux engine: serves the scheduler module's stream, has FluxScheduling decide, and carries out what it says.

Owns the session of the module, when to decide, and the calls of FluxService. Must not decide anything about a job.

Theory. Whatever the module says or the core commits makes one look due; looks run one after another, so that what one of
them has changed is seen by the next. A look costs a walk over all jobs, and what comes meanwhile shares the next. Besides
there is one each second, for what waits for time alone. There is one session: a module that is loaded again takes the place
of the one before. Instructions to the core run in order; what it refuses is decided anew.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.engines.core_port import CoreCommandPort
from eelgrid_controller.engines.flux.instance import WORKLOAD_PREFIX, FluxReply
from eelgrid_controller.engines.flux.resource_sets import FluxUnreadable, format_idset, format_job_id
from eelgrid_controller.engines.flux.scheduling import (
    FluxAdopt,
    FluxEligibility,
    FluxEnd,
    FluxInstruction,
    FluxReportEnd,
    FluxScheduling,
    FluxSubmit,
)
from eelgrid_controller.engines.node_reports import RegisterNode, RemoveNode, ReportUsage, carry_out_report
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Aborted, Fault, InvalidArgument, NotFound
from eelgrid_protos.messages import (
    FLUX_SPANS_MOST,
    AdviseFluxRequest,
    AdviseFluxResponse,
    FluxSpan,
    Inventory,
    ListFluxSpansRequest,
    ListFluxSpansResponse,
    ScheduleFluxRequest,
    ScheduleFluxResponse,
    Workload,
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_LOOK_S = 1.0
# After each look, of the time that it took.
_PAUSE_SHARE, _PAUSE_MOST_S = 0.5, 0.25


def _view(core: Core) -> tuple[dict[str, Workload], dict[str, Inventory]]:
    """Returns the jobs that the core holds, and what its nodes are."""
    state = core.state
    jobs = {key: one for key, one in state.workloads.items() if key.startswith(WORKLOAD_PREFIX)}
    return jobs, {name: record.inventory for name, record in state.nodes.items()}


class _FluxSession:
    """One stream of the module; None ends it."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[FluxReply | None] = asyncio.Queue()


class FluxEngine:
    """Schedules the jobs of one Flux instance by one core."""

    def __init__(
        self, *, loop: CoreCommandPort, has_agent: Callable[[str], bool], clock: Clock, log: logging.Logger
    ) -> None:
        """`has_agent` says of a node whether an agent speaks for it."""
        self.scheduling = FluxScheduling()
        self._loop, self._has_agent, self._clock, self._log = loop, has_agent, clock, log
        self._session: _FluxSession | None = None
        self._is_due = asyncio.Event()
        self._told = 0
        loop.eligibility.rules = FluxEligibility(self.scheduling)
        loop.listeners.append(self._on_commit)

    def _on_commit(self, committed: CommitResult) -> None:
        if any(getattr(event, "workload_id", "").startswith(WORKLOAD_PREFIX) for event in committed.events):
            self._is_due.set()

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._is_due.wait()
            begun_s = self._clock.monotonic_s()
            await self.look()
            # A look goes over all jobs: events that come meanwhile share the next one, and others have their turn.
            await asyncio.sleep(min(_PAUSE_MOST_S, _PAUSE_SHARE * (self._clock.monotonic_s() - begun_s)))

    async def look(self) -> None:
        """Decides once, and carries it out."""
        self._is_due.clear()
        workloads, inventories = await self._loop.read(_view)
        now_s = self._clock.now_ns() / 1e9
        has_agent = frozenset(name for name in inventories if self._has_agent(name))
        found = self.scheduling.decide(workloads, inventories, has_agent=has_agent, now_s=now_s)
        for one in found:
            await self._command(one, now_s)
        unreadable = self.scheduling.instance.counts.unreadable + self.scheduling.instance.journal.unreadable
        if unreadable > self._told:
            self._told = unreadable
            self._log.warning("flux=partly_read left_out=%d", unreadable)

    async def _command(self, one: FluxInstruction, now_s: float) -> None:
        try:
            match one:
                case FluxReply():
                    self._reply(one)
                case RegisterNode() | RemoveNode() | ReportUsage():
                    await carry_out_report(one, self._loop, now_s=self._clock.monotonic_s())
                case FluxSubmit(request):
                    await self._loop.submit(request)
                case FluxAdopt(request, adoption):
                    await self._loop.adopt(request, adoption)
                case FluxReportEnd(status):
                    self._log.info("workload=%s ended exit_code=%s", status.workload_id, status.exit_code)
                    await self._loop.record_engine_attempts((status,))
                case FluxEnd(workload_id, reason):
                    self._log.info("workload=%s ended reason=%s", workload_id, reason)
                    await self._loop.cancel(workload_id)
        except (Fault, ContractError) as error:
            self._on_refusal(one, error, now_s)

    def _on_refusal(self, one: FluxInstruction, error: Exception, now_s: float) -> None:
        self.scheduling.reports.forget_refused(one)
        match one:
            case FluxAdopt(_, _, job):
                self.scheduling.instance.leave_job(job, now_s=now_s)
            case FluxSubmit(_, job) if isinstance(error, InvalidArgument | ContractError):
                # It could never be placed: others would wait behind it for nothing.
                if (reply := self.scheduling.instance.deny_job(job, str(error))) is not None:
                    self._reply(reply)
        if not isinstance(error, NotFound):
            self._log.warning("flux=%s refused=%s", type(one).__name__, error)

    def _reply(self, reply: FluxReply) -> None:
        if self._session is not None:
            self._session.answers.put_nowait(reply)

    # FluxService

    async def schedule_flux(
        self, requests: AsyncIterator[ScheduleFluxRequest], context: Context
    ) -> AsyncIterator[ScheduleFluxResponse]:
        """Serves one stream of the module; raises Aborted when another takes its place."""
        del context
        session, before = _FluxSession(), self._session
        if before is not None:
            before.answers.put_nowait(None)
            self.scheduling.instance.end_session()
        self._session = session
        self._log.info("flux=connected")
        reading = asyncio.create_task(self._read(session, requests))
        try:
            yield ScheduleFluxResponse(topic="welcome")
            while (reply := await session.answers.get()) is not None:
                yield ScheduleFluxResponse(topic=reply.topic, payload=json.dumps(reply.payload, separators=(",", ":")))
            if self._session is not session:
                raise Aborted("another scheduler module has connected; only one may schedule an instance")
        finally:
            reading.cancel()
            if self._session is session:
                self._session = None
                self.scheduling.instance.end_session()
                self._log.warning("flux=disconnected")

    async def _read(self, session: _FluxSession, requests: AsyncIterator[ScheduleFluxRequest]) -> None:
        try:
            async for request in requests:
                if self._session is not session:
                    return
                for reply in self.scheduling.instance.receive(request.topic, request.payload):
                    self._reply(reply)
                self._is_due.set()
        except (Fault, ContractError, grpc.RpcError) as error:
            self._log.warning("flux=unread error=%s", error)
        finally:
            session.answers.put_nowait(None)

    async def advise_flux(self, request: AdviseFluxRequest, context: Context) -> AdviseFluxResponse:
        """Answers where a job would be placed now, without placing it; raises InvalidArgument for no jobspec."""
        del context
        try:
            asked = self.scheduling.ask_advice(request.jobspec, request.user)
        except FluxUnreadable as error:
            raise InvalidArgument(f"jobspec: {error}") from None
        try:
            preview = await self._loop.submit(asked)
        except InvalidArgument as error:
            return AdviseFluxResponse(reason=str(error))
        finally:
            self.scheduling.end_advice(asked.workload_id)
        ranks = self.scheduling.list_ranks(one.node_name for one in preview.placements)
        if not ranks:
            return AdviseFluxResponse(reason=preview.reason or "it fits nowhere now")
        return AdviseFluxResponse(constraint=json.dumps({"ranks": [format_idset(ranks)]}))

    async def list_flux_spans(self, request: ListFluxSpansRequest, context: Context) -> ListFluxSpansResponse:
        """Lists what jobs held in a period."""
        del context
        journal = self.scheduling.instance.journal
        spans = journal.list_spans(request.begin_ns / 1e9, (request.end_ns or self._clock.now_ns()) / 1e9)
        kept = spans[-FLUX_SPANS_MOST:]
        return ListFluxSpansResponse(
            spans=tuple(
                FluxSpan(
                    job=format_job_id(one.job),
                    user=one.user,
                    hostname=one.hostname,
                    gpus=tuple(sorted(one.gpus)),
                    cores=len(one.cores),
                    begin_ns=round(one.begin_s * 1e9),
                    end_ns=round(one.end_s * 1e9),
                    wait_s=journal.jobs[one.job].wait_s if one.job in journal.jobs else 0.0,
                )
                for one in kept
            ),
            omitted=len(spans) - len(kept),
        )
