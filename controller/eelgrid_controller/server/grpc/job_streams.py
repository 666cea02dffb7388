"""Streams of jobs: what a process writes, and what is written to it, relayed between a client and the node's agent.

Owns who may read and write, how a reader moves from one attempt of a job to the next, and the bounds of both. Must not
know how an agent reads or passes on; it is asked by `AgentService`, which has one stream to it for everything.

Nothing is kept here. Output is in a file of the node, so a reader continues after a lost connection where it was. Input
is in no file: a chunk is sent on when the one before was taken, and what was sent when the agent went away is not sent
again, since it may have arrived.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.core.core import Core
from eelgrid_controller.runtime.audit_log import AuditedCall
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.server.grpc.agent_service import AgentService
from eelgrid_controller.server.grpc.authorization import DescribeCall
from eelgrid_controller.server.grpc.operator_service import WorkloadChanges
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from eelgrid_protos.messages import (
    AttachInput,
    AttachOpening,
    AttachRequest,
    AttachResponse,
    InputChunk,
    LogChunk,
    LogRequest,
    ReadLogsRequest,
    ReadLogsResponse,
    StandardInput,
    Workload,
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# Called once a client has attached: the call's path, and its opening.
RecordAttach: TypeAlias = Callable[[str, Context, object, None], Awaitable[None]]
_STREAMS_MOST = 1000
_ATTACHED_MOST = 16
# How long an agent waits for output that a reader follows, and how soon one that is away is asked again.
_WAIT_S = 10.0
_AGAIN_S = 0.5
_OPENING_WITHIN_S = 10.0
# A process starts in milliseconds, or waits for its GPU.
_EARLY_FIRST_S, _EARLY_LONGEST_S = 0.02, 1.0
# What a slow client has not read yet; each has 16 kB at the most.
_RESPONSES_MOST = 4
# Agents that are asked at once for the output of an earlier attempt.
_ASKED_AT_ONCE = 64


@dataclass(slots=True)
class _Reading:
    """What a client reads: a process, which of its attempts, and from where."""

    workload_id: str
    replica: int
    attempt: int
    offset: int
    tail_lines: int | None
    is_followed: bool
    is_raw: bool = False
    # Of the workload, which had none before it was found.
    owner: str = ""


class JobStreamService:
    """Serves a part of `eelgrid_protos.rpc.OPERATOR_SERVICE`."""

    def __init__(
        self,
        *,
        loop: ControllerLoop,
        agents: AgentService,
        changes: WorkloadChanges,
        call_of: DescribeCall,
        on_attach: RecordAttach,
    ) -> None:
        self._loop, self._agents, self._changes = loop, agents, changes
        self._call_of, self._on_attach = call_of, on_attach
        self._closing = asyncio.Event()
        self._streams = 0
        # By workload and replica.
        self._attached: Counter[tuple[str, int]] = Counter()

    def close(self) -> None:
        """Ends every stream, so that the server can stop at once."""
        self._closing.set()

    async def read_logs(self, request: ReadLogsRequest, context: Context) -> AsyncIterator[ReadLogsResponse]:
        """The output of a process of the caller's own; raises NotFound, and FailedPrecondition without one."""
        call = self._call_of("ReadLogs", request, context)
        reading = _Reading(
            request.workload_id, request.replica, request.attempt, request.offset, request.tail_lines, request.follow
        )
        with self._count_stream():
            async for chunk in self._read(reading, call):
                if chunk.text:
                    yield ReadLogsResponse(text=chunk.text, next_offset=chunk.next_offset)

    async def attach(self, requests: AsyncIterator[AttachRequest], context: Context) -> AsyncIterator[AttachResponse]:
        """Output of a process of the caller's own as it comes, and input to it; raises as ReadLogs does."""
        opening = await _receive_opening(requests)
        call = self._call_of("Attach", opening, context)
        reading = _Reading(
            opening.workload_id,
            opening.replica,
            opening.attempt,
            opening.offset,
            opening.tail_lines,
            is_followed=True,
            is_raw=True,
        )
        workload = await self._loop.read(lambda core: self._find_workload(core, reading, call))
        _check_input(workload, opening)
        with self._count_stream(), self._count_attached((opening.workload_id, opening.replica)):
            await self._on_attach("/Attach", context, opening, None)
            responses: asyncio.Queue[AttachResponse | Exception | None] = asyncio.Queue(_RESPONSES_MOST)
            tasks = [asyncio.create_task(_run(responses, self._send_output(responses, reading, call)))]
            if opening.sends_input:
                passing = self._pass_input(responses, requests, reading, call)
                tasks.append(asyncio.create_task(_run(responses, passing, ends=False)))
            try:
                while (response := await responses.get()) is not None:
                    if isinstance(response, Exception):
                        raise response
                    yield response
            finally:
                for task in tasks:
                    task.cancel()

    async def _send_output(
        self, responses: "asyncio.Queue[AttachResponse | Exception | None]", reading: _Reading, call: AuditedCall
    ) -> None:
        async for chunk in self._read(reading, call):
            if chunk.data:
                await responses.put(
                    AttachResponse(data=chunk.data, next_offset=chunk.next_offset, attempt=reading.attempt)
                )

    async def _pass_input(
        self,
        responses: "asyncio.Queue[AttachResponse | Exception | None]",
        requests: AsyncIterator[AttachRequest],
        reading: _Reading,
        call: AuditedCall,
    ) -> None:
        """Passes input on, each message once the one before was taken; before all, nothing, to find the process."""
        problem = await self._write(AttachInput(), reading, call)
        taken = 0
        async for request in requests:
            if not isinstance(request.message, AttachInput):
                raise InvalidArgument(
                    "the stream was opened already", (Violation("opening", "comes twice", "send input"),)
                )
            if not problem:
                problem = await self._write(request.message, reading, call)
            taken += not problem
            await responses.put(AttachResponse(inputs_taken=taken, input_problem=problem))

    async def _write(self, part: AttachInput, reading: _Reading, call: AuditedCall) -> str:
        """Writes to the attempt that runs, or will; returns why it cannot. Raises Unavailable if the agent goes away."""
        pause_s = _EARLY_FIRST_S
        while not self._closing.is_set():
            workload = await self._loop.read(lambda core: self._find_workload(core, reading, call))
            node_name = _place_of(workload, reading.replica)
            if not node_name:
                if workload.phase.is_ended:
                    return "the process has ended"
                await self._changes.wait_change()
                continue
            result = await self._agents.write_input(
                node_name,
                InputChunk(
                    request_id=0,
                    workload_id=reading.workload_id,
                    replica=reading.replica,
                    attempt=workload.attempt,
                    data=part.data,
                    is_end=part.is_end,
                    size=part.size,
                ),
            )
            if not result.is_early:
                return result.problem
            await asyncio.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _EARLY_LONGEST_S)
        raise Unavailable("the controller is stopping; attach again when it is back")

    async def _read(self, reading: _Reading, call: AuditedCall) -> AsyncIterator[LogChunk]:
        """Output from where a reader is, to the end of the job if it is followed; moves `reading` on."""
        is_pinned = reading.attempt > 0
        node_name = ""
        while not self._closing.is_set():
            workload = await self._loop.read(lambda core: self._find_workload(core, reading, call))
            if not node_name:
                node_name = await self._find_node(workload, reading)
                if not node_name:
                    await self._changes.wait_change()
                    continue
            is_past = workload.phase.is_ended or workload.attempt != reading.attempt or not workload.placements
            try:
                chunk = await self._agents.read_log(node_name, _log_request(reading))
            except Unavailable:
                if not reading.is_followed or is_past:
                    raise
                await asyncio.sleep(_AGAIN_S)
                continue
            if chunk.problem:
                if not reading.is_followed or is_past:
                    raise NotFound(f"there is no output of {reading.workload_id}: {chunk.problem}")
                continue
            reading.offset, reading.tail_lines = chunk.next_offset, None
            yield chunk
            if chunk.is_end and reading.is_followed and not is_pinned and await self._runs_again(reading):
                node_name, reading.attempt, reading.offset = "", 0, 0
            elif chunk.is_end or not (chunk.text or chunk.data or reading.is_followed):
                return
        raise Unavailable("the controller is stopping; read the output again when it is back")

    async def _find_node(self, workload: Workload, reading: _Reading) -> str:
        """Returns who has the output, and settles the attempt; empty while a follower waits for the start."""
        place = _place_of(workload, reading.replica)
        if place and reading.attempt in (0, workload.attempt):
            reading.attempt = workload.attempt
            return place
        if reading.attempt == 0 and reading.is_followed and not workload.phase.is_ended:
            return ""
        attempt = reading.attempt or workload.attempt
        if attempt == 0:
            state = "never started" if workload.phase.is_ended else "has not started"
            raise NotFound(f"there is no output of {workload.workload_id}: it {state}")
        reading.attempt = attempt
        return await self._find_keeper(reading)

    async def _find_keeper(self, reading: _Reading) -> str:
        """Finds the agent that keeps output of an attempt that is over, by asking; raises NotFound."""

        def list_nodes(core: Core) -> list[str]:
            records = core.state.nodes.items()
            return [name for name, record in records if record.inventory.runs_processes]

        names = [name for name in await self._loop.read(list_nodes) if self._agents.is_connected(name)]
        request = replace(_log_request(reading), wait_s=0.0)

        async def ask(name: str) -> str:
            try:
                return "" if (await self._agents.read_log(name, request)).problem else name
            except (Unavailable, ResourceExhausted):
                return ""

        for begin in range(0, len(names), _ASKED_AT_ONCE):
            found = await asyncio.gather(*map(ask, names[begin : begin + _ASKED_AT_ONCE]))
            if name := next(filter(None, found), ""):
                return name
        raise NotFound(
            f"there is no output of attempt {reading.attempt} of {reading.workload_id}: no node that is here keeps it"
        )

    async def _runs_again(self, reading: _Reading) -> bool:
        """Waits while it is not known whether a process that ended runs again; returns whether it has a later attempt."""
        attempt = reading.attempt
        while not self._closing.is_set():
            now = await self._loop.read(lambda core: core.state.workloads.get(reading.workload_id))
            if now is None or now.phase.is_ended or now.attempt > attempt:
                return now is not None and now.attempt > attempt
            # Of several processes the others may run for long.
            if now.placements and now.spec.replicas > 1 and not now.returns_to_queue:
                return False
            await self._changes.wait_change()
        return False

    def _find_workload(self, core: Core, reading: _Reading, call: AuditedCall) -> Workload:
        """The workload, if it has such a process and it is the caller's."""
        workload = core.workload(reading.workload_id)
        self._loop.check_owner(core, reading.workload_id, call)
        if workload.spec.process is None:
            raise FailedPrecondition(
                f"workload {workload.workload_id} has no process: another engine runs it, and has its output"
            )
        if reading.replica >= workload.spec.replicas:
            problem = f"is {reading.replica}, and the workload has {workload.spec.replicas}"
            raise InvalidArgument("there is no such replica", (Violation("replica", problem, "count them from 0"),))
        if reading.attempt > workload.attempt:
            problem = f"is {reading.attempt}, and {workload.attempt} have begun"
            raise InvalidArgument("there is no such attempt", (Violation("attempt", problem, "count them from 1"),))
        reading.owner = workload.owner
        return workload

    @contextmanager
    def _count_stream(self) -> Iterator[None]:
        if self._streams >= _STREAMS_MOST:
            raise ResourceExhausted(f"{_STREAMS_MOST} streams of jobs are open; end some")
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    @contextmanager
    def _count_attached(self, process: tuple[str, int]) -> Iterator[None]:
        if self._attached[process] >= _ATTACHED_MOST:
            raise ResourceExhausted(
                f"{_ATTACHED_MOST} clients are attached to {process[0]}; detach one, or read its logs"
            )
        self._attached[process] += 1
        try:
            yield
        finally:
            self._attached[process] -= 1
            if not self._attached[process]:
                del self._attached[process]


async def _receive_opening(requests: AsyncIterator[AttachRequest]) -> AttachOpening:
    try:
        async with asyncio.timeout(_OPENING_WITHIN_S):
            first = await anext(aiter(requests), None)
    except TimeoutError:
        first = None
    if first is None or not isinstance(first.message, AttachOpening):
        raise InvalidArgument("nothing says what to attach to", (Violation("opening", "is missing", "send it first"),))
    return first.message


def _check_input(workload: Workload, opening: AttachOpening) -> None:
    process = workload.spec.process
    if opening.sends_input and process is not None and process.standard_input is StandardInput.UNSPECIFIED:
        raise FailedPrecondition(
            f"workload {workload.workload_id} has no standard input; attach to its output only, or start it with "
            "`eelctl run --interactive` or `--pty`"
        )


async def _run(
    responses: "asyncio.Queue[AttachResponse | Exception | None]", work: Awaitable[None], *, ends: bool = True
) -> None:
    """Runs one direction of a stream; its failure ends the stream, and so does its end if it is the output."""
    try:
        await work
    except Exception as error:  # noqa: BLE001  # the stream ends with it; rpc turns it into a status
        await responses.put(error)
    else:
        if ends:
            await responses.put(None)


def _place_of(workload: Workload, replica: int) -> str:
    place = workload.find_place(replica)
    return "" if place is None else place.node_name


def _log_request(reading: _Reading) -> LogRequest:
    return LogRequest(
        request_id=0,
        workload_id=reading.workload_id,
        replica=reading.replica,
        attempt=reading.attempt,
        offset=reading.offset,
        tail_lines=reading.tail_lines,
        wait_s=_WAIT_S if reading.is_followed else 0.0,
        raw=reading.is_raw,
        owner=reading.owner,
    )
