"""Flux engine: serves the scheduler module's stream, has FluxScheduling decide, and carries out what it says.

Owns the session of the module, when to decide, and the calls of FluxService. Must not decide anything about a job.

Theory. Whatever the module says or the core commits makes a look due at the jobs that it is about; looks run one after
another, so that what one of them has changed is seen by the next, and what comes meanwhile shares the next. Each second there
is one at nodes and at jobs that wait for time alone. All jobs are looked at after the module has said all, when it is not
known which have changed, and every few seconds, so that a change that was missed is found. There is one session: a module
that is loaded again takes the place of the one before. What belongs to one look goes together: ends of jobs in one report,
after which the core goes over its pending work once, submissions in few commits, answers in one message. Instructions to the
core run in order; what it refuses is decided anew.
"""

import asyncio
import contextlib
import functools
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import grpc.aio

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.engines.core_port import CoreCommandPort, call_in_batches
from eelgrid_controller.engines.flux.batches import READS_BATCHES, StreamMessage, encode_payload, pack_messages
from eelgrid_controller.engines.flux.instance import WORKLOAD_PREFIX, FluxReply
from eelgrid_controller.engines.flux.resource_sets import FluxUnreadable, format_idset, format_job_id
from eelgrid_controller.engines.flux.scheduling import (
    FluxAdopt,
    FluxCommand,
    FluxEligibility,
    FluxEnd,
    FluxInstruction,
    FluxReportEnd,
    FluxScheduling,
    FluxSubmit,
    find_job_number,
)
from eelgrid_controller.engines.node_reports import RegisterNode, RemoveNode, ReportUsage, carry_out_report
from eelgrid_controller.state.events import DevicesCorrected, NodeJoined
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Aborted, Fault, InvalidArgument, NotFound
from eelgrid_protos.messages import (
    FLUX_SPANS_MOST,
    AdviseFluxRequest,
    AdviseFluxResponse,
    AttemptStatus,
    FluxSpan,
    Inventory,
    ListFluxSpansRequest,
    ListFluxSpansResponse,
    ScheduleFluxRequest,
    ScheduleFluxResponse,
    Workload,
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# How often nodes are looked at, and jobs for which it is time.
_LOOK_S = 1.0
# Seconds between looks at all jobs, and how many times as long as the last of them they are apart at least.
_FULL_EVERY_S, _FULL_TIMES = 5.0, 20.0
# Looks in a row, such as at an end, at a placement by it, and at its consequences; and after them a pause of so much of the
# time that they took, for others to have their turn and for messages to come together.
_ROUNDS_MOST = 4
_PAUSE_SHARE, _PAUSE_MOST_S = 0.1, 0.05
# Commands that are given to the core together, jobs that are submitted in one commit, each of 1 to 2 ms during which nobody
# else has a turn, and for how long one look goes on with either.
_COMMANDS_AT_ONCE, _SUBMITTED_AT_ONCE, _COMMANDING_MOST_S = 64, 16, 0.1
# Until what the core has refused is decided anew.
_REFUSED_AGAIN_S = 1.0


class _CoreView(NamedTuple):
    """Workloads of jobs, and what the core's nodes are; None if that was not asked for."""

    workloads: dict[str, Workload]
    inventories: dict[str, Inventory] | None


def _view(core: Core, workload_ids: Iterable[str] | None, *, has_nodes: bool) -> _CoreView:
    """Returns what the core holds of some workloads; None for those of all jobs."""
    state = core.state
    if workload_ids is None:
        jobs = {key: one for key, one in state.workloads.items() if key.startswith(WORKLOAD_PREFIX)}
    else:
        jobs = {key: state.workloads[key] for key in workload_ids if key in state.workloads}
    return _CoreView(jobs, {name: one.inventory for name, one in state.nodes.items()} if has_nodes else None)


class _FluxSession:
    """One stream of the module; None ends it."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[tuple[FluxReply, ...] | None] = asyncio.Queue()


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
        # By job the ids of its workloads, of jobs that the core holds.
        self._workload_ids: dict[int, set[str]] = {}
        # When nodes were last looked at, and all jobs, and how long that took.
        self._nodes_s = self._full_s = -math.inf
        self._full_takes_s = 0.0
        self._told = 0
        self._rules = FluxEligibility(self.scheduling)
        loop.eligibility.rules = self._rules
        loop.outside.own_ids.add(WORKLOAD_PREFIX)
        loop.listeners.append(self._on_commit)

    def _on_commit(self, committed: CommitResult) -> None:
        changed = self.scheduling.instance.changed
        for event in committed.events:
            workload_id: str | None = getattr(event, "workload_id", None)
            if isinstance(event, DevicesCorrected):
                changed.add_all()
            elif workload_id is None and isinstance(event, NodeJoined):
                self._nodes_s = -math.inf
            elif workload_id is None or not workload_id.startswith(WORKLOAD_PREFIX):
                continue
            elif (number := find_job_number(workload_id.partition(".")[0])) >= 0:
                self._workload_ids.setdefault(number, set()).add(workload_id)
                changed.add(number)
            else:
                changed.add_all()
            self._is_due.set()

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._is_due.wait()
            begun_s = self._clock.monotonic_s()
            for _ in range(_ROUNDS_MOST):
                await self.look()
                if not self._is_due.is_set():
                    break
            await asyncio.sleep(min(_PAUSE_MOST_S, _PAUSE_SHARE * (self._clock.monotonic_s() - begun_s)))

    async def look(self) -> None:
        """Decides once about what has changed, and carries it out."""
        self._is_due.clear()
        begun_s, now_s = self._clock.monotonic_s(), self._clock.now_ns() / 1e9
        if begun_s >= self._full_s + max(_FULL_EVERY_S, _FULL_TIMES * self._full_takes_s):
            self.scheduling.instance.changed.add_all()
        jobs, has_nodes = self.scheduling.instance.changed.take(now_s), begun_s >= self._nodes_s + _LOOK_S
        if jobs is None:
            self._full_s = begun_s
        if has_nodes:
            self._nodes_s = begun_s
        if jobs == frozenset() and not has_nodes:
            return
        found = await self._decide(jobs, now_s, has_nodes=has_nodes)
        await self._carry_out(found, now_s)
        unreadable = self.scheduling.instance.counts.unreadable + self.scheduling.instance.journal.unreadable
        if unreadable > self._told:
            self._told = unreadable
            self._log.warning("flux=partly_read left_out=%d", unreadable)

    async def _decide(self, jobs: frozenset[int] | None, now_s: float, *, has_nodes: bool) -> list[FluxInstruction]:
        """Decides about some jobs, None for all."""
        workload_ids = None if jobs is None else [key for job in jobs for key in self._workload_ids.get(job, ())]
        view = await self._loop.read(lambda core: _view(core, workload_ids, has_nodes=has_nodes))
        has_agent = frozenset(name for name in view.inventories or () if self._has_agent(name))
        begun_s = self._clock.monotonic_s()
        found = self.scheduling.decide(view.workloads, view.inventories, has_agent=has_agent, now_s=now_s, jobs=jobs)
        self._loop.eligibility.rules = self._rules if self.scheduling.has_rules() else None
        if jobs is None:
            self._workload_ids = {}
            for key in view.workloads:
                self._workload_ids.setdefault(find_job_number(key.partition(".")[0]), set()).add(key)
            self._full_takes_s = self._clock.monotonic_s() - begun_s
        return found

    async def _carry_out(self, found: Sequence[FluxInstruction], now_s: float) -> None:
        """Carries out what was decided; what there is no time for is decided anew by the next look."""
        self._reply(*(one for one in found if isinstance(one, FluxReply)))
        ends = [one for one in found if isinstance(one, FluxReportEnd)]
        commands = [one for one in found if not isinstance(one, FluxReply | FluxReportEnd | FluxSubmit)]
        submissions = [one for one in found if isinstance(one, FluxSubmit)]

        async def command(batch: Sequence[FluxCommand]) -> list[None]:
            # Each begins before the next, so that the core has them in order.
            return await asyncio.gather(*(self._command(one, now_s) for one in batch))

        async def submit(batch: Sequence[FluxSubmit]) -> list[None]:
            return await self._submit(batch, now_s)

        in_batches = functools.partial(call_in_batches, most_s=_COMMANDING_MOST_S, clock=self._clock)
        _, done = await asyncio.gather(
            self._report_ends(ends, now_s), in_batches(command, commands, size=_COMMANDS_AT_ONCE)
        )
        submitted = await in_batches(submit, submissions, size=_SUBMITTED_AT_ONCE)
        for one in (*commands[len(done) :], *submissions[len(submitted) :]):
            self._put_back(one, 0.0)

    async def _submit(self, batch: Sequence[FluxSubmit], now_s: float) -> list[None]:
        """Submits jobs to the core in one commit."""
        try:
            results = await self._loop.submit_all([one.request for one in batch])
        except Fault as error:
            results = [error] * len(batch)
        for one, result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                self._on_refusal(one, result, now_s)
        return [None] * len(batch)

    async def _report_ends(self, ends: Sequence[FluxReportEnd], now_s: float) -> None:
        """Reports how jobs have ended, all at once, after which the core goes over its pending work."""
        if not ends:
            return
        try:
            await self._loop.record_engine_attempts([one.status for one in ends])
        except (Fault, ContractError) as error:
            for one in ends:
                self._on_refusal(one, error, now_s)
            return
        self._log.info("workloads=ended count=%d first=%s", len(ends), ends[0].status.workload_id)

    async def _command(self, one: FluxCommand, now_s: float) -> None:
        try:
            match one:
                case RegisterNode() | RemoveNode() | ReportUsage():
                    await carry_out_report(one, self._loop, now_s=self._clock.monotonic_s())
                case FluxAdopt(request, adoption):
                    await self._loop.adopt(request, adoption)
                case FluxEnd(workload_id, reason):
                    self._log.info("workload=%s ended reason=%s", workload_id, reason)
                    await self._loop.cancel(workload_id)
        except (Fault, ContractError) as error:
            self._on_refusal(one, error, now_s)

    def _on_refusal(self, one: FluxCommand | FluxSubmit | FluxReportEnd, error: Exception, now_s: float) -> None:
        match one:
            case FluxAdopt(_, _, job):
                self.scheduling.instance.leave_job(job, now_s=now_s)
            case FluxSubmit(_, job) if isinstance(error, InvalidArgument | ContractError):
                # It could never be placed: others would wait behind it for nothing.
                if (reply := self.scheduling.instance.deny_job(job, str(error))) is not None:
                    self._reply(reply)
            case _:
                self._put_back(one, now_s + _REFUSED_AGAIN_S)
        if not isinstance(error, NotFound):
            self._log.warning("flux=%s refused=%s", type(one).__name__, error)

    def _put_back(self, one: FluxCommand | FluxSubmit | FluxReportEnd, at_s: float) -> None:
        """Has it decided anew, from a time on."""
        self.scheduling.reports.forget_refused(one)
        match one:
            case FluxSubmit(_, job) | FluxAdopt(_, _, job):
                self.scheduling.instance.changed.add_later(job, at_s)
            case FluxReportEnd(AttemptStatus(workload_id=key)) | FluxEnd(key):
                self.scheduling.instance.changed.add_later(find_job_number(key.partition(".")[0]), at_s)
        if not at_s:
            self._is_due.set()

    def _reply(self, *replies: FluxReply) -> None:
        if self._session is not None and replies:
            self._session.answers.put_nowait(replies)

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
            yield ScheduleFluxResponse(topic="welcome", payload=encode_payload(READS_BATCHES))
            while (replies := await session.answers.get()) is not None:
                messages = [StreamMessage(one.topic, encode_payload(one.payload)) for one in replies]
                for topic, text in pack_messages(messages) if self.scheduling.instance.reads_batches else messages:
                    yield ScheduleFluxResponse(topic=topic, payload=text)
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
                self._reply(*self.scheduling.instance.receive(request.topic, request.payload))
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
        self._loop.eligibility.rules = self._rules
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
