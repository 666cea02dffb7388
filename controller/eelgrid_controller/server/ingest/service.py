"""IngestService: agents whose streams end at ingest processes, at the controller that leads.

Theory. Each of those streams is served by the same handler as one that comes directly, with a context that shows the
agent's own certificate and address: roles, node names, limits, terms, plans and the audit log know no difference. An
ingest process is believed that a certificate was proved in a handshake, and nothing else: a certificate has to be of
our authority, and what breaks a rule ends the stream of that agent alone. Batches come as columns and go to the
telemetry of the stream that is open for the node; those of any other stream are left out and counted.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc.aio

from eelgrid_controller.server.grpc.agent_service import AgentService, AgentSession
from eelgrid_controller.server.grpc.authorization import Authorizer
from eelgrid_controller.server.ingest.frames import (
    MESSAGES_ONCE_MOST,
    BlockMalformed,
    list_streams,
    take_messages,
    unpack_block,
)
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_protos.certificate import PEM_PROPERTY, is_signed_by
from eelgrid_protos.faults import DETAILS_KEY, Fault, ResourceExhausted, status_details
from eelgrid_protos.file_reloader import FileReloader, WatchFile
from eelgrid_protos.messages import (
    FORWARDED_STREAMS_MOST,
    ConsumedMessages,
    EndedStream,
    ForwardedMessage,
    ForwardedStream,
    ForwardRequest,
    ForwardResponse,
    FrameAcknowledgement,
    TickFrame,
)
from eelgrid_protos.openmetrics import MetricFamily
from eelgrid_protos.roles import Caller, Role, RoleRefused, peer_address
from eelgrid_protos.rpc import AGENT_SERVICE, Context
from eelgrid_protos.transport import TlsFiles

_LINKS_MOST = 64
# Messages of one stream that were not dealt with: an ingest process sends half as many.
_UNREAD_MOST = 64
# Bytes for one ingest process that it has not read.
_UNSENT_BYTES_MOST = 8 * 1024 * 1024
_MESSAGE_BYTES_MOST = 4 * 1024 * 1024
_TEXT_MOST = 2000
# Consumption is told when a stream has nothing left, or this many.
_CONSUMED_MOST = 16
# Calls a handler as gRPC does, with encoded messages.
ConnectHandler = Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]


class _StreamAborted(Exception):
    """A handler ended a forwarded stream with a status."""


class _ForwardedContext:
    """What handlers read of a call: of an agent whose stream ends at an ingest process."""

    def __init__(self, opened: ForwardedStream, *, certificate: bytes | None) -> None:
        """`certificate` is None where connections have none."""
        self.session: AgentSession | None = None
        self.ended: EndedStream | None = None
        self._number = opened.stream
        self._peer = opened.peer
        self._identity = {} if certificate is None else {PEM_PROPERTY: (certificate,)}

    def peer(self) -> str:
        """The agent's address."""
        return self._peer

    def auth_context(self) -> Mapping[str, tuple[bytes, ...]]:
        """The agent's certificate."""
        return self._identity

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Nothing."""
        return ()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> NoReturn:
        """Ends the stream with a status."""
        self.ended = EndedStream(
            stream=self._number,
            code=code.value[0],
            text=details[:_TEXT_MOST],
            details=dict(trailing_metadata).get(DETAILS_KEY, b""),
        )
        raise _StreamAborted


class _ForwardedStreamState:
    """One agent's stream: what came of it, and the task that serves it."""

    def __init__(self, number: int, context: _ForwardedContext) -> None:
        self.number = number
        self.context = context
        self.unread: deque[bytes] = deque()
        self.consumed = 0
        self.has_more = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class _IngestLink:
    """The stream of one ingest process."""

    def __init__(self, service: "IngestService") -> None:
        self.streams: dict[int, _ForwardedStreamState] = {}
        self._service = service
        self._messages: deque[ForwardedMessage] = deque()
        self._ended: list[EndedStream] = []
        self._frames: list[FrameAcknowledgement] = []
        self._consumed: list[ConsumedMessages] = []
        self._unsent_bytes = 0
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self.fault: Exception | None = None
        self.is_over = False

    async def read(self, requests: AsyncIterator[ForwardRequest]) -> None:
        """Takes what the ingest process says until it stops."""
        try:
            async for request in requests:
                for opened in request.opened:
                    self._open(opened)
                for message in request.messages:
                    self._deliver(message)
                if request.frame is not None:
                    self._receive(request.frame)
                for number in request.closed:
                    self._close(number)
        except Exception as error:  # noqa: BLE001  # the link ends with it; rpc turns it into a status
            self.fault = error
        self.is_over = True
        self._wake.set()

    def _open(self, opened: ForwardedStream) -> None:
        if opened.stream in self.streams or len(self.streams) >= FORWARDED_STREAMS_MOST:
            self._service.omitted["stream"] += 1
            return
        certificate = self._service.check_certificate(opened.certificate)
        stream = _ForwardedStreamState(opened.stream, _ForwardedContext(opened, certificate=certificate))
        self.streams[opened.stream] = stream
        stream.task = asyncio.create_task(self._serve(stream))

    def _deliver(self, message: ForwardedMessage) -> None:
        stream = self.streams.get(message.stream)
        if stream is None:
            # Of one that has just ended, as a rule.
            self._service.omitted["message"] += 1
            return
        if len(stream.unread) >= _UNREAD_MOST:
            self._service.omitted["message"] += 1
            fault = ResourceExhausted(f"{_UNREAD_MOST} messages of the agent wait already; connect again")
            self._end(stream, _describe_end(stream.number, fault))
            return
        stream.unread.append(message.message)
        stream.has_more.set()

    def _close(self, number: int) -> None:
        """The agent ended its stream."""
        stream = self.streams.pop(number, None)
        if stream is not None and stream.task is not None:
            stream.task.cancel()

    def _end(self, stream: _ForwardedStreamState, ended: EndedStream) -> None:
        """Ends a stream from here."""
        if self.streams.pop(stream.number, None) is not None:
            self._ended.append(ended)
            self._wake.set()
            if stream.task is not None:
                stream.task.cancel()

    def _receive(self, frame: TickFrame) -> None:
        service, left_out = self._service, dict[int, None]()
        for block in frame.blocks:
            try:
                unpacked = unpack_block(block)
            except BlockMalformed:
                streams = list(list_streams(block))
                service.omitted["batch"] += max(1, len(streams))
                left_out.update(dict.fromkeys(streams))
                continue
            service.omitted["batch"] += len(unpacked.out_of_range)
            left_out.update(dict.fromkeys(unpacked.out_of_range))
            for number, tick in unpacked.ticks:
                stream = self.streams.get(number)
                session = None if stream is None else stream.context.session
                if session is None or not service.agents.receive_tick(session, tick):
                    service.omitted["batch"] += 1
                    left_out[number] = None
                else:
                    service.batches += 1
        self._frames.append(
            FrameAcknowledgement(number=frame.number, left_out=tuple(left_out)[:FORWARDED_STREAMS_MOST])
        )
        self._wake.set()

    async def _requests(self, stream: _ForwardedStreamState) -> AsyncIterator[bytes]:
        """What the agent says, as its handler reads it; what was read before counts as dealt with."""
        while True:
            while stream.unread:
                yield stream.unread.popleft()
                stream.consumed += 1
                if not stream.unread or stream.consumed >= _CONSUMED_MOST:
                    self._consumed.append(ConsumedMessages(stream=stream.number, count=stream.consumed))
                    stream.consumed = 0
                    self._wake.set()
            stream.has_more.clear()
            await stream.has_more.wait()

    async def _serve(self, stream: _ForwardedStreamState) -> None:
        """Runs the handler of one stream."""
        ended = EndedStream(stream=stream.number)
        try:
            answers = self._service.connect(self._requests(stream), stream.context)
            async with contextlib.aclosing(answers):  # type: ignore[type-var]
                async for data in answers:
                    if len(data) > _MESSAGE_BYTES_MOST:
                        raise ResourceExhausted(f"a message of {len(data)} bytes is too long for an ingest process")
                    while self._unsent_bytes >= _UNSENT_BYTES_MOST:
                        self._has_room.clear()
                        await self._has_room.wait()
                    self._messages.append(ForwardedMessage(stream=stream.number, message=data))
                    self._unsent_bytes += len(data)
                    self._wake.set()
        except _StreamAborted:
            ended = stream.context.ended or ended
        except Fault as fault:
            ended = _describe_end(stream.number, fault)
        finally:
            stream.task = None
            self._end(stream, ended)

    async def outgoing(self) -> AsyncIterator[ForwardResponse]:
        """What the ingest process is told, until it ends."""
        yield self._cut()
        while not self.is_over:
            self._wake.clear()
            if self._messages or self._ended or self._frames or self._consumed:
                yield self._cut()
                self._has_room.set()
            else:
                await self._wake.wait()
        if self.fault is not None:
            raise self.fault

    def _cut(self) -> ForwardResponse:
        messages, size = take_messages(self._messages)
        self._unsent_bytes -= size
        frames, self._frames = self._frames, []
        consumed, self._consumed = self._consumed[:MESSAGES_ONCE_MOST], self._consumed[MESSAGES_ONCE_MOST:]
        ended: list[EndedStream] = []
        if not self._messages:
            # After all that they were told.
            ended, self._ended = self._ended[:MESSAGES_ONCE_MOST], self._ended[MESSAGES_ONCE_MOST:]
        return ForwardResponse(
            batches_per_acknowledgement=self._service.agents.ack_every,
            wants_every_tick=bool(self._service.agents.batch_listeners),
            messages=messages,
            ended=tuple(ended),
            frames=tuple(frames),
            consumed=tuple(consumed),
        )

    async def close(self) -> None:
        """Ends all streams."""
        self.is_over = True
        streams, self.streams = list(self.streams.values()), {}
        tasks = [stream.task for stream in streams if stream.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _describe_end(number: int, fault: Fault) -> EndedStream:
    return EndedStream(
        stream=number, code=fault.code.value[0], text=fault.message[:_TEXT_MOST], details=status_details(fault)
    )


class IngestService:
    """Serves ingest processes; implements `eelgrid_protos.rpc.INGEST_SERVICE`."""

    def __init__(
        self,
        agents: AgentService,
        connect: ConnectHandler,
        *,
        caller_of: Callable[[Context], Caller] | None,
        authority: Callable[[], bytes] | None,
        log: logging.Logger,
    ) -> None:
        """`connect` serves one agent's stream; `caller_of` and `authority` (PEM) are None without TLS."""
        self.agents = agents
        self.connect = connect
        self.batches = 0
        self.omitted: Counter[str] = Counter(batch=0, message=0, stream=0)
        self._caller_of = caller_of
        self._authority = authority
        self._log = log
        self._links: set[_IngestLink] = set()
        agents.welcome_listeners.append(_attach_session)

    def families(self) -> Iterator[MetricFamily]:
        """What Prometheus reads of ingest processes at the controller."""
        yield build_family("eelgrid_ingest_processes", len(self._links))
        yield build_family("eelgrid_ingest_agents_connected", sum(len(link.streams) for link in self._links))
        yield build_family("eelgrid_ingest_received_batches_total", self.batches)
        yield build_family("eelgrid_ingest_refused_total", dict(self.omitted))

    def check_certificate(self, shown: bytes) -> bytes | None:
        """Returns the certificate that an agent is known by; an empty one, which has no role, if it is not of our authority."""
        if self._authority is None:
            return None
        return shown if shown and is_signed_by(shown, self._authority()) else b""

    async def forward(
        self, requests: AsyncIterator[ForwardRequest], context: Context
    ) -> AsyncIterator[ForwardResponse]:
        """One ingest process."""
        if self._caller_of is not None:
            caller = self._caller_of(context)
            if not caller.has_role(Role.INGEST):
                # Also where certificates without a role may do everything: it would speak for every agent.
                raise RoleRefused(
                    caller,
                    "Forward",
                    Role.INGEST.value,
                    words="needs the role ingest",
                    problem=caller.description,
                    remedy="use one with the organization eelgrid:ingest, or have this one granted it (--grant)",
                )
        if len(self._links) >= _LINKS_MOST:
            raise ResourceExhausted(f"{_LINKS_MOST} ingest processes are connected; connect later")
        link = _IngestLink(self)
        self._links.add(link)
        # Asked now: of a call that has ended gRPC cannot tell it.
        peer = peer_address(context)
        self._log.info("event=ingest_connected peer=%s", peer)
        reader = asyncio.create_task(link.read(requests))
        try:
            async for response in link.outgoing():
                yield response
        finally:
            self._links.discard(link)
            reader.cancel()
            self._log.info("event=ingest_gone peer=%s agents=%d", peer, len(link.streams))
            await link.close()


def build_ingest_service(
    agents: AgentService,
    handler: grpc.GenericRpcHandler,
    *,
    keeper: Authorizer | None,
    tls: TlsFiles | None,
    log: logging.Logger,
) -> IngestService:
    """Builds the service of a controller whose agents that come directly are served by `handler`."""
    details: Any = SimpleNamespace(method=AGENT_SERVICE.path(AGENT_SERVICE.methods[0]), invocation_metadata=())
    found: Any = handler.service(details)
    return IngestService(
        agents,
        found.stream_stream,
        caller_of=None if keeper is None else keeper.identify_caller,
        authority=None if tls is None else _read_authority(tls, log),
        log=log,
    )


def _read_authority(tls: TlsFiles, log: logging.Logger) -> Callable[[], bytes]:
    def load(watch: WatchFile) -> bytes:
        watch(tls.authority)
        return tls.authority.read_bytes()

    return FileReloader(load, name="ingest_authority", log=log).refresh


def _attach_session(context: object, session: AgentSession) -> None:
    """Lets batches of an agent that was welcomed in."""
    if isinstance(context, _ForwardedContext):
        context.session = session
