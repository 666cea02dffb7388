"""An ingest process: ends agents' streams and hands on what they say to the controller that leads.

Theory. Everything that an agent and the controller say to each other passes through unread, in order, but for batches
of samples, which are most of it. Those go as columns, a frame at a time (`frames`). An agent is sent the acknowledgement
of a batch, which renews its lease, only when the controller has said that it has the frame: a leader that is gone renews
nothing. Nothing is kept here that an agent does not have on its own disk; when this process is lost, agents connect
again, as they do after the loss of a controller, and send what was not acknowledged. When the leader is lost, agents
keep their streams, and open them for the next one (`handover`): each link numbers streams anew and knows no others, so
that nothing a former leader says has anywhere to go. Where none leads for a while, or the agent is of an older version,
the stream ends.

A change of the inventory says how later batches are to be read, so an agent's batches wait until the controller has
dealt with it. What waits for the controller is bounded; beyond it agents are not read on, and keep it at home.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc.aio

from eelgrid_controller.server.ingest.frames import FrameBuilder, take_messages
from eelgrid_controller.server.ingest.handover import StreamHandover, StreamPhase
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_protos import codec
from eelgrid_protos.certificate import PEM_PROPERTY
from eelgrid_protos.controller_addresses import ControllerAddresses
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault, NotLeader, ResourceExhausted, Unavailable, build_fault, fault_of_contract
from eelgrid_protos.messages import (
    FORWARDED_STREAMS_MOST,
    Acknowledgement,
    ConnectRequest,
    ConnectResponse,
    ForwardedMessage,
    ForwardedStream,
    ForwardRequest,
    ForwardResponse,
    ResumeRequest,
    SampleBatch,
)
from eelgrid_protos.openmetrics import MetricFamily
from eelgrid_protos.roles import peer_address
from eelgrid_protos.rpc import CONNECT_BYTES_MOST, INGEST_SERVICE, Context, Encoded, build_client
from eelgrid_protos.transport import ListenError

# Tags of fields in ConnectRequest: the field's number, and that its length follows.
_INVENTORY, _SAMPLES = b"\x12", b"\x1a"
# How long batches are gathered, and frames that the controller has not acknowledged.
_FRAME_S = 0.1
_FRAMES_MOST = 4
# A controller that says nothing to what it is told for so long is gone: a stopped process keeps its connections, and another
# may lead by now, which is to be found before agents look for another ingest process. Frames and messages are answered as
# they are read; the transaction of a checkpoint holds that up (25 to 140 ms with 10,000 nodes).
_ANSWER_WITHIN_S = 8.0
# The same where there is no other controller.
_ONLY_ANSWER_WITHIN_S = 40.0
# An agent that connects waits so long for the controller.
_LINK_WITHIN_S = 10.0
# A stream that has lost its controller, the same: longer than another takes to lead, or the same one to start again, and
# half of a plan's lease, since another ingest process may have a controller. Their openings are bounded, too.
_KEPT_S = 30.0
_HELD_BYTES_MOST = 16 * 1024 * 1024
# Messages of one agent that the controller has not dealt with, and of all that are not sent.
_UNREAD_MOST = 32
_WAITING_BYTES_MOST = 16 * 1024 * 1024
# Certificates and addresses of streams that go in one request.
_OPENED_BYTES_MOST = 1024 * 1024
# Messages for one agent that it has not read.
_UNSENT_MOST = 512
_PAUSE_S = 1.0
_CHAIN = "x509_pem_cert_chain"
_CERTIFICATE_BYTES_MOST = 64 * 1024
_RESUME_REQUEST = codec.encode_message(ConnectResponse(message=ResumeRequest(leader_within_s=_KEPT_S)))


class _AgentStream:
    """One agent's stream, with one controller after another."""

    def __init__(self, peer: str, certificate: bytes) -> None:
        self.peer = peer
        self.certificate = certificate
        self.handover = StreamHandover()
        # The link that it is on, with its number there, and the one that it has lost, while it is on none.
        self.link: LeaderLink | None = None
        self.number = 0
        self.former: LeaderLink | None = None
        # Of an opening that waits for a controller.
        self.held_bytes = 0
        self.sequence = 0
        self.unacknowledged = 0
        self.is_acknowledgement_due = False
        # Messages that the controller has not dealt with.
        self.unread = 0
        self.unsent: deque[bytes] = deque()
        self.welcomed = asyncio.Event()
        self.on_read = asyncio.Event()
        self.wake = asyncio.Event()
        self.is_over = False
        self.end: Fault | None = None

    def is_on(self, link: "LeaderLink") -> bool:
        """Whether what its agent says goes over this link."""
        return self.link is link and not self.is_over

    def close(self, fault: Fault | None) -> None:
        """Ends it; the first reason stands."""
        if not self.is_over:
            self.is_over, self.end = True, fault
        for event in (self.wake, self.on_read, self.welcomed):
            event.set()

    def leave_link(self) -> None:
        """Its controller is lost: what that one said, and was not read yet, is too; the agent is asked for another opening."""
        self.former, self.link = self.link, None
        self.sequence = self.unacknowledged = self.unread = 0
        self.is_acknowledgement_due = False
        if self.handover.phase is StreamPhase.WELCOMED:
            self.unsent.clear()
        if self.handover.lose_controller():
            self.unsent.append(_RESUME_REQUEST)
        for event in (self.wake, self.on_read, self.welcomed):
            event.set()
        self.welcomed.clear()

    def send(self, message: bytes) -> None:
        """Hands a message of the controller to the agent."""
        if len(self.unsent) >= _UNSENT_MOST:
            self.close(ResourceExhausted(f"{_UNSENT_MOST} messages wait for the agent to read them; connect again"))
            return
        if (welcome := self.handover.on_response(message)) is not None:
            self.sequence = welcome.acknowledged_sequence
            self.welcomed.set()
        self.unsent.append(message)
        self.wake.set()

    def on_batch(self, sequence: int, every: int) -> None:
        """The controller has a batch; acknowledge when it has enough."""
        self.sequence = max(self.sequence, sequence)
        self.unacknowledged += 1
        if self.unacknowledged >= every:
            self.is_acknowledgement_due = True
            self.wake.set()

    async def outgoing(self) -> AsyncIterator[bytes]:
        """What the agent is told, until the stream is over."""
        while True:
            self.wake.clear()
            while self.unsent:
                yield self.unsent.popleft()
            if self.is_over:
                break
            if self.is_acknowledgement_due:
                self.is_acknowledgement_due, self.unacknowledged = False, 0
                yield codec.encode_message(ConnectResponse(message=Acknowledgement(sequence=self.sequence)))
                continue
            await self.wake.wait()
        if self.end is not None:
            raise self.end


class LeaderLink:
    """The stream to the controller that leads, with what waits for it."""

    def __init__(
        self,
        *,
        answer_within_s: float = _ANSWER_WITHIN_S,
        lose_stream: Callable[[_AgentStream, Fault], None] = _AgentStream.close,
    ) -> None:
        """`lose_stream` is given each stream whose controller leads no more, and why."""
        self.streams: dict[int, _AgentStream] = {}
        self._lose_stream = lose_stream
        # Ends the link; set while an answer is due.
        self.deadline = asyncio.timeout(answer_within_s)
        self._answer_within_s = answer_within_s
        self.batches = 0
        self.has_room = asyncio.Event()
        self.has_room.set()
        self._numbers = 0
        # Streams of which the controller was not told yet, and those of them that ended first and have messages here.
        self._opened: dict[int, ForwardedStream] = {}
        self._untold: set[int] = set()
        self._messages: deque[ForwardedMessage] = deque()
        self._closed: list[int] = []
        self._frames = 0
        self._waiting_bytes = 0
        self._builder = FrameBuilder()
        self._due_s: float | None = None
        self._must_cut = False
        # Of frames that the controller has not acknowledged, the sequences by stream.
        self._unacknowledged: dict[int, dict[int, list[int]]] = {}
        self._every = 1
        self._wants_every_tick = False
        self._wake = asyncio.Event()
        self._is_over = False

    def open(self, peer: str, certificate: bytes) -> _AgentStream:
        """Opens an agent's stream; raises ResourceExhausted."""
        stream = _AgentStream(peer, certificate)
        self.add_stream(stream)
        return stream

    def add_stream(self, stream: _AgentStream) -> None:
        """Tells the controller of a stream; raises ResourceExhausted."""
        if len(self.streams) >= FORWARDED_STREAMS_MOST:
            raise ResourceExhausted(f"{FORWARDED_STREAMS_MOST} agents are connected here; connect to another ingest")
        self._numbers += 1
        stream.link, stream.number = self, self._numbers
        self.streams[stream.number] = stream
        self._opened[stream.number] = ForwardedStream(
            stream=stream.number, peer=stream.peer, certificate=stream.certificate
        )
        self._wake.set()

    def end_stream(self, stream: _AgentStream) -> None:
        """An agent ended its stream, or this process did."""
        if self.streams.pop(stream.number, None) is None:
            return
        if self._opened.pop(stream.number, None) is None:
            self._closed.append(stream.number)
            self._wake.set()
        elif stream.unread:
            # The controller does not read, and this agent came and went meanwhile, perhaps not for the first time.
            self._untold.add(stream.number)

    async def forward(self, stream: _AgentStream, message: bytes) -> bool:
        """Hands on a message unread; waits while the controller is behind. False if the stream left the link meanwhile."""
        if message[:1] == _INVENTORY and self._builder.sequences.get(stream.number):
            # Batches from before it go first.
            self._must_cut = True
            while self._must_cut and stream.is_on(self):
                self._wake.set()
                self.has_room.clear()
                await self.has_room.wait()
        while (stream.unread >= _UNREAD_MOST or self._waiting_bytes >= _WAITING_BYTES_MOST) and stream.is_on(self):
            await self._wait_for_room(stream)
        if not stream.is_on(self):
            return False
        self.add_message(stream, message)
        while message[:1] == _INVENTORY and stream.unread and stream.is_on(self):
            stream.on_read.clear()
            await stream.on_read.wait()
        return True

    def add_message(self, stream: _AgentStream, message: bytes) -> None:
        """Adds a message to what goes next, however much that is."""
        stream.unread += 1
        self._messages.append(ForwardedMessage(stream=stream.number, message=message))
        self._waiting_bytes += len(message)
        self._wake.set()

    async def _wait_for_room(self, stream: _AgentStream) -> None:
        if stream.unread >= _UNREAD_MOST:
            stream.on_read.clear()
            await stream.on_read.wait()
        else:
            self.has_room.clear()
            await self.has_room.wait()

    async def add_batch(self, stream: _AgentStream, batch: SampleBatch) -> bool:
        """Adds a batch to the next frame; waits while too many frames are under way. False as with `forward`."""
        while self._builder.is_full and stream.is_on(self):
            self.has_room.clear()
            await self.has_room.wait()
        if not stream.is_on(self):
            return False
        self._builder.add(stream.number, batch)
        self.batches += 1
        if self._due_s is None:
            self._due_s = asyncio.get_running_loop().time() + _FRAME_S
            self._wake.set()
        elif self._builder.is_full:
            self._wake.set()
        return True

    async def requests(self) -> AsyncIterator[ForwardRequest]:
        """What the controller is told, until the link is over."""
        running = asyncio.get_running_loop()
        while not self._is_over:
            self._wake.clear()
            is_due = self._due_s is not None and (
                self._must_cut or self._builder.is_full or running.time() >= self._due_s
            )
            if is_due and len(self._unacknowledged) < _FRAMES_MOST:
                self._expect_answer()
                yield self._cut_frame()
            elif self._opened or self._messages or self._closed:
                request = self._cut_messages()
                if request.messages:
                    self._expect_answer()
                yield request
            else:
                self._must_cut = self._must_cut and self._due_s is not None
                left_s = None if self._due_s is None or is_due else self._due_s - running.time()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._wake.wait()
            self.has_room.set()

    def _expect_answer(self) -> None:
        if self.deadline.when() is None:
            self.deadline.reschedule(asyncio.get_running_loop().time() + self._answer_within_s)

    def _cut_frame(self) -> ForwardRequest:
        builder, self._builder = self._builder, FrameBuilder(has_every_tick=self._wants_every_tick)
        self._due_s, self._must_cut = None, False
        self._frames += 1
        self._unacknowledged[self._frames] = builder.sequences
        return ForwardRequest(frame=builder.build(self._frames))

    def _cut_messages(self) -> ForwardRequest:
        opened = self._take_opened()
        if self._opened:
            # Messages of the others would come before them.
            return ForwardRequest(opened=opened)
        messages, size = take_messages(self._messages)
        self._waiting_bytes -= size
        if self._untold:
            messages = tuple(message for message in messages if message.stream not in self._untold)
        closed: list[int] = []
        if not self._messages:
            closed, self._closed = self._closed[:FORWARDED_STREAMS_MOST], self._closed[FORWARDED_STREAMS_MOST:]
            self._untold.clear()
        return ForwardRequest(opened=opened, messages=messages, closed=tuple(closed))

    def _take_opened(self) -> tuple[ForwardedStream, ...]:
        """Takes what goes in one request: ten thousand agents with certificates do not."""
        taken, size = list[ForwardedStream](), 0
        while self._opened and size < _OPENED_BYTES_MOST:
            stream = self._opened.pop(next(iter(self._opened)))
            taken.append(stream)
            size += len(stream.certificate) + len(stream.peer)
        return tuple(taken)

    def on_response(self, response: ForwardResponse) -> None:
        """The controller said something."""
        self.deadline.reschedule(None)
        self._every = max(1, response.batches_per_acknowledgement)
        if response.wants_every_tick != self._wants_every_tick:
            # With the first response, before there are streams.
            self._wants_every_tick = response.wants_every_tick
            if not self._builder.batches:
                self._builder = FrameBuilder(has_every_tick=self._wants_every_tick)
        for message in response.messages:
            if (stream := self.streams.get(message.stream)) is not None:
                stream.send(message.message)
        for acknowledged in response.frames:
            left_out = frozenset(acknowledged.left_out)
            for number, sequences in self._unacknowledged.pop(acknowledged.number, {}).items():
                stream = self.streams.get(number)
                if stream is not None and number not in left_out:
                    for sequence in sequences:
                        stream.on_batch(sequence, self._every)
            self._wake.set()
        for consumed in response.consumed:
            if (stream := self.streams.get(consumed.stream)) is not None:
                stream.unread = max(0, stream.unread - consumed.count)
                stream.on_read.set()
        for ended in response.ended:
            if (stream := self.streams.pop(ended.stream, None)) is not None:
                fault = build_fault(ended.code, ended.text, ended.details)
                if isinstance(fault, NotLeader):
                    # Agents have nothing to look for where it is: this process does.
                    self._lose_stream(stream, Unavailable(fault.message))
                else:
                    stream.close(fault)

    def close(self, fault: Fault) -> None:
        """The controller is lost."""
        self._is_over = True
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            self._lose_stream(stream, fault)
        self._wake.set()
        self.has_room.set()


class _WaitingStreams:
    """Streams that have lost their controller, each for a while."""

    def __init__(self) -> None:
        self.counts = Counter(handed_over=0, ended=0)
        self._timers: dict[_AgentStream, asyncio.TimerHandle] = {}
        self._held_bytes = 0

    def __len__(self) -> int:
        return len(self._timers)

    def add(self, stream: _AgentStream) -> None:
        """A stream begins to wait."""
        loop = asyncio.get_running_loop()
        fault = Unavailable(f"no controller was found that leads within {_KEPT_S:g} s; connect again")
        self._timers[stream] = loop.call_later(_KEPT_S, self.end, stream, fault)

    def hold(self, stream: _AgentStream) -> None:
        """The opening of a stream is here before a controller is."""
        stream.held_bytes = len(stream.handover.opening)
        self._held_bytes += stream.held_bytes
        if self._held_bytes > _HELD_BYTES_MOST:
            self.end(stream, ResourceExhausted("too much waits here for a controller that leads; connect again"))

    def list_held(self) -> list[_AgentStream]:
        """Returns those that a controller may have now."""
        return [stream for stream in self._timers if stream.handover.phase is StreamPhase.HELD]

    def end(self, stream: _AgentStream, fault: Fault) -> None:
        """A stream has waited for nothing."""
        self.counts["ended"] += 1
        self.remove(stream)
        stream.close(fault)

    def remove(self, stream: _AgentStream) -> None:
        """A stream waits no more, if it did."""
        if (timer := self._timers.pop(stream, None)) is not None:
            timer.cancel()
            self._held_bytes -= stream.held_bytes
            stream.held_bytes = 0

    def close(self, fault: Fault) -> None:
        """Ends all of them."""
        for stream in list(self._timers):
            self.end(stream, fault)


class IngestRelay:
    """Serves agents; implements `eelgrid_protos.rpc.AGENT_SERVICE` on encoded messages."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        open_channel: Callable[[str], grpc.aio.Channel],
        *,
        may_follow: Callable[[str], bool],
        log: logging.Logger,
    ) -> None:
        self.links_opened = 0
        self._batches = 0
        self._search = ControllerAddresses(addresses, may_follow=may_follow).begin_search()
        self._open_channel = open_channel
        self._log = log
        self._link: LeaderLink | None = None
        self._is_linked = asyncio.Event()
        self._waiting = _WaitingStreams()
        self._dropped = 0
        self._reason = "it has not been reached yet"
        self._is_stopping = False

    @property
    def is_linked(self) -> bool:
        """Whether a controller that leads takes what agents say."""
        return self._link is not None

    def families(self) -> Iterator[MetricFamily]:
        """What Prometheus reads of an ingest process."""
        link = self._link
        yield build_family("eelgrid_agents_connected", len(self._waiting) + (0 if link is None else len(link.streams)))
        yield build_family("eelgrid_ingest_agents_waiting", len(self._waiting))
        yield build_family("eelgrid_ingest_kept_streams_total", dict(self._waiting.counts))
        yield build_family("eelgrid_ingest_dropped_messages_total", self._dropped)
        yield build_family("eelgrid_ingest_connected", float(link is not None))
        yield build_family("eelgrid_ingest_links_total", self.links_opened)
        yield build_family("eelgrid_ingest_batches_total", self._batches + (0 if link is None else link.batches))

    async def run(self) -> None:
        """Keeps a link to the controller that leads, until cancelled."""
        while True:
            reason, leader = await self._connection()
            self._reason = reason
            pause_s = self._search.move_on(reason, leader)
            await asyncio.sleep(_PAUSE_S if pause_s is None else pause_s)

    def close(self) -> None:
        """Ends all streams."""
        self._is_stopping = True
        fault = Unavailable("the ingest process is stopping; connect to another")
        if self._link is not None:
            self._link.close(fault)
        self._waiting.close(fault)

    async def _connection(self) -> tuple[str, str]:
        """One link; returns why it ended, and whom a follower named."""
        within_s = _ANSWER_WITHIN_S if self._search.is_choice else _ONLY_ANSWER_WITHIN_S
        link, leader = LeaderLink(answer_within_s=within_s, lose_stream=self._keep_stream), ""
        try:
            channel = self._open_channel(self._search.address)
            forwarded = build_client(INGEST_SERVICE, channel).forward(link.requests())
            async with link.deadline, contextlib.aclosing(forwarded) as responses:
                async for response in responses:
                    if self._link is not link:
                        self._link = link
                        self._search.succeed()
                        self.links_opened += 1
                        self._is_linked.set()
                        self._log.info("event=linked leader=%s waiting=%d", self._search.address, len(self._waiting))
                        self._hand_over_held(link)
                    link.on_response(response)
            reason = "it ended the stream"
        except TimeoutError:
            reason = f"it did not answer within {within_s:g} s"
        except NotLeader as error:
            reason, leader = str(error), error.leader
        except (Fault, ContractError, ListenError) as error:
            reason = str(error)
        finally:
            self._is_linked.clear()
            if self._link is link:
                self._log.warning("event=unlinked leader=%s agents=%d", self._search.address, len(link.streams))
                self._batches += link.batches
                self._link = None
            link.close(Unavailable("the controller that leads was lost; connect again"))
        self._log.debug("event=link_failed leader=%s reason=%r", self._search.address, reason)
        return reason, leader

    def _keep_stream(self, stream: _AgentStream, fault: Fault) -> None:
        """Keeps a stream for the next controller, if its agent can open it again."""
        if stream.is_over or self._is_stopping or not stream.handover.is_keepable:
            stream.close(fault)
            return
        stream.leave_link()
        self._waiting.add(stream)

    def _hand_over_held(self, link: LeaderLink) -> None:
        for stream in self._waiting.list_held():
            self._move_to_link(stream, link)
            if stream.is_on(link):
                link.add_message(stream, stream.handover.hand_over())

    def _move_to_link(self, stream: _AgentStream, link: LeaderLink) -> None:
        self._waiting.remove(stream)
        try:
            link.add_stream(stream)
        except ResourceExhausted as fault:
            self._waiting.counts["ended"] += 1
            stream.close(fault)
        else:
            # Which would keep what the lost link holds.
            stream.former = None
            self._waiting.counts["handed_over"] += 1

    async def _open_stream(self, stream: _AgentStream) -> None:
        """Hands over the opening of a stream, or holds it until a controller leads that is not the one it has lost."""
        link = stream.link
        if link is None and self._link is not None and self._link is not stream.former:
            link = self._link
            self._move_to_link(stream, link)
        if link is None:
            self._waiting.hold(stream)
        else:
            await link.forward(stream, stream.handover.hand_over())

    async def _wait_for_link(self) -> LeaderLink:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINK_WITHIN_S):
                while not self._is_stopping:
                    await self._is_linked.wait()
                    if self._link is not None:
                        return self._link
        raise Unavailable(f"no controller takes what this ingest process hands on: {self._reason}; connect again")

    async def connect(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Encoded]:
        """One agent's stream."""
        link = await self._wait_for_link()
        stream = link.open(peer_address(context), _show_certificate(context))
        reader = asyncio.create_task(self._read_agent(stream, requests))
        try:
            async for message in stream.outgoing():
                yield Encoded(message)
        finally:
            stream.close(None)
            self._waiting.remove(stream)
            if stream.link is not None:
                stream.link.end_stream(stream)
            reader.cancel()

    async def _read_agent(self, stream: _AgentStream, requests: AsyncIterator[bytes]) -> None:
        """Hands on what an agent says until it stops or breaks the contract."""
        try:
            async for data in requests:
                codec.check_size("ConnectRequest", data, CONNECT_BYTES_MOST)
                if stream.is_over:
                    return
                if not stream.handover.admit_message(data):
                    self._dropped += 1
                elif stream.handover.phase is StreamPhase.HELD:
                    await self._open_stream(stream)
                elif not await _hand_on(stream, data) and not stream.is_over:
                    self._dropped += 1
        except Exception as error:  # noqa: BLE001  # the stream ends with it
            stream.close(fault_of_contract(error) if isinstance(error, ContractError) else Unavailable(str(error)))
        else:
            stream.close(None)


async def _hand_on(stream: _AgentStream, data: bytes) -> bool:
    """Hands on a message to the controller that the stream has; False if that was lost before it went."""
    link = stream.link
    if link is None:
        return False
    if data[:1] == _SAMPLES:
        await stream.welcomed.wait()
        if not stream.is_on(link):
            return False
        request = codec.decode_message(ConnectRequest, data, bytes_most=CONNECT_BYTES_MOST, is_counted=True)
        if isinstance(request.message, SampleBatch) and request.message.time_ns:
            return await link.add_batch(stream, request.message)
    return await link.forward(stream, data)


def _show_certificate(context: Any) -> bytes:
    """Returns what the agent's connection has proved to be its own, and the chain to it; empty without TLS."""
    identity = context.auth_context()
    (pem, *_) = identity.get(PEM_PROPERTY) or (b"",)
    (chain, *_) = identity.get(_CHAIN) or (b"",)
    both = pem + b"\n" + chain if pem and chain else pem
    return both if len(both) <= _CERTIFICATE_BYTES_MOST else pem
