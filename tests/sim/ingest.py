"""Ingest processes between agents and the controller, transcribed from `eelgrid_controller.server.ingest`.

Owns both ends of the link: the process that agents connect to, and the controller's side, which serves each agent's stream
by the same sessions as one that comes directly. Frames are the real ones (`frames.py`), with every tick, by which the
observer knows them. A process keeps nothing: when it or its link ends, so do its agents' streams.

In harsh weather a frame or its acknowledgement may be lost, which no stream does; a link is given up when a frame is not
acknowledged in time.
"""

from collections import deque
from collections.abc import Callable, Sequence

from eelgrid_controller.errors import BatchRefused
from eelgrid_controller.server.ingest.frames import FrameBuilder, unpack_block
from eelgrid_controller.server.ingest.relay import _FRAME_S, _FRAMES_MOST, _INVENTORY, _SAMPLES, _UNREAD_MOST, _WELCOME
from eelgrid_controller.state.telemetry import PackedTick
from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.controller_addresses import order_addresses
from eelgrid_protos.messages import (
    Acknowledgement,
    ConnectRequest,
    ConnectResponse,
    ConsumedMessages,
    EndedStream,
    ForwardedMessage,
    ForwardedStream,
    ForwardRequest,
    ForwardResponse,
    FrameAcknowledgement,
    SampleBatch,
    TickFrame,
)
from tests.sim.agent import Agent
from tests.sim.clock import seconds
from tests.sim.controller import Controller
from tests.sim.faults import Faults
from tests.sim.network import AGENT, CONTROLLER, Connection, End, Network
from tests.sim.sessions import Session, Sessions
from tests.sim.timeline import Timeline

__all__ = ["IngestAgent", "IngestFaults", "IngestProcess", "serve_links"]

_NAME = "ingest-"
_LINK_AGAIN_S = 1.0
_FRAME_WITHIN_S = 45.0


class _AgentEnd:
    """One agent's stream at an ingest process."""

    def __init__(self, owner: "IngestProcess", connection: Connection, number: int) -> None:
        self._owner = owner
        self._connection = connection
        self._inbox: deque[bytes] = deque()
        self._is_changing = False
        self.number = number
        self.is_welcomed = self.is_over = False
        self.sequence = self.unacknowledged = self.unread = 0

    def received(self, data: bytes) -> None:
        """The agent's next message."""
        self._inbox.append(data)
        self.pump()

    def closed(self, reason: str) -> None:
        """The agent is gone."""
        del reason
        if not self.is_over:
            self.is_over = True
            self._owner.agent_left(self)

    def close(self, reason: str) -> None:
        """Ends it from here."""
        if not self.is_over:
            self.is_over = True
            self._connection.close(CONTROLLER, reason)

    def tell(self, data: bytes) -> None:
        """A message for the agent."""
        self._connection.send(CONTROLLER, data)
        if data[:1] == _WELCOME:
            self.is_welcomed = True
            self.pump()

    def on_batch(self, sequence: int, every: int) -> None:
        """The controller has a batch."""
        self.sequence = max(self.sequence, sequence)
        self.unacknowledged += 1
        if self.unacknowledged >= every:
            self.unacknowledged = 0
            self._connection.send(
                CONTROLLER, encode_message(ConnectResponse(message=Acknowledgement(sequence=self.sequence)))
            )

    def on_consumed(self, count: int) -> None:
        """The controller has dealt with messages."""
        self.unread = max(0, self.unread - count)
        self.pump()

    def pump(self) -> None:
        """Hands on what may go now."""
        while self._inbox and not self.is_over:
            data = self._inbox[0]
            is_sample = data[:1] == _SAMPLES
            if self._is_changing and self.unread:
                return
            self._is_changing = False
            if self.unread >= _UNREAD_MOST or (is_sample and not self.is_welcomed):
                return
            self._inbox.popleft()
            if is_sample:
                message = decode_message(ConnectRequest, data, is_counted=True).message
                if isinstance(message, SampleBatch):
                    self._owner.add_batch(self, message)
                continue
            if data[:1] == _INVENTORY:
                # Batches from before it go first.
                self._owner.cut_frame()
                self._is_changing = True
            self.unread += 1
            self._owner.send(ForwardRequest(messages=(ForwardedMessage(stream=self.number, message=data),)))


class IngestProcess:
    """One ingest process: start it, crash it."""

    builder_type: type[FrameBuilder] = FrameBuilder

    def __init__(self, timeline: Timeline, network: Network, number: int, *, controller: str) -> None:
        self.name = self.address = f"{_NAME}{number}"
        self.is_running = False
        self.links = 0
        self._timeline = timeline
        self._network = network
        self._controller = controller
        self._life = 0
        self._numbers = 0
        self._forget_link()

    def _forget_link(self) -> None:
        self.is_linked = False
        self._link: Connection | None = None
        self._streams: dict[int, _AgentEnd] = {}
        self._builder = self.builder_type(has_every_tick=True)
        self._frames = 0
        self._unacknowledged: dict[int, dict[int, list[int]]] = {}
        self._every = 1

    def start(self) -> None:
        """The process starts, unless it runs."""
        if not self.is_running:
            self.is_running = True
            self._life += 1
            self._network.listeners[self.address] = self._accept
            self._open_link()

    def crash(self) -> None:
        """The process dies at once; the kernel ends its streams."""
        if not self.is_running:
            return
        self.is_running = False
        self._life += 1
        self._network.listeners.pop(self.address, None)
        if self._link is not None:
            self._link.close(AGENT, "connection reset")
        for stream in self._streams.values():
            stream.is_over = True
        for connection in self._network.connections:
            if connection.address == self.address:
                connection.close(CONTROLLER, "connection reset")
        self._forget_link()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        life = self._life
        self._timeline.after(seconds(delay_s), lambda: action() if life == self._life else None)

    # The link

    def _open_link(self) -> None:
        self._link = self._network.connect(self.name, self, self._controller)

    def received(self, data: bytes) -> None:
        """The controller's next message."""
        response = decode_message(ForwardResponse, data)
        if not self.is_linked:
            self.is_linked = True
            self.links += 1
        self._every = max(1, response.batches_per_acknowledgement)
        for message in response.messages:
            if (stream := self._streams.get(message.stream)) is not None:
                stream.tell(message.message)
        for acknowledged in response.frames:
            self._on_frame(acknowledged)
        for consumed in response.consumed:
            if (stream := self._streams.get(consumed.stream)) is not None:
                stream.on_consumed(consumed.count)
        for ended in response.ended:
            if (stream := self._streams.pop(ended.stream, None)) is not None:
                stream.close(ended.text)

    def _on_frame(self, acknowledged: FrameAcknowledgement) -> None:
        for number, sequences in self._unacknowledged.pop(acknowledged.number, {}).items():
            stream = self._streams.get(number)
            if stream is not None and number not in acknowledged.left_out:
                for sequence in sequences:
                    stream.on_batch(sequence, self._every)
        if self._builder.batches and len(self._unacknowledged) < _FRAMES_MOST:
            self.cut_frame()

    def closed(self, reason: str) -> None:
        """The link is lost: every agent connects again."""
        self._timeline.note(f"{self.name} link lost reason={reason}")
        streams = list(self._streams.values())
        self._forget_link()
        for stream in streams:
            stream.close("the controller was lost")
        self._later(_LINK_AGAIN_S, self._open_link)

    def send(self, request: ForwardRequest) -> None:
        """Tells the controller."""
        if self._link is not None:
            self._link.send(AGENT, encode_message(request))

    # Agents

    def _accept(self, connection: Connection) -> End:
        self._numbers += 1
        stream = _AgentEnd(self, connection, self._numbers)
        if self.is_linked:
            self._streams[stream.number] = stream
            self.send(ForwardRequest(opened=(ForwardedStream(stream=stream.number),)))
        else:
            # Not before it is the connection's end.
            self._later(0.0, lambda: stream.close("no controller takes what this process hands on"))
        return stream

    def agent_left(self, stream: _AgentEnd) -> None:
        """An agent ended its stream."""
        if self._streams.pop(stream.number, None) is not None:
            self.send(ForwardRequest(closed=(stream.number,)))

    def add_batch(self, stream: _AgentEnd, batch: SampleBatch) -> None:
        """Adds a batch to the next frame."""
        if stream.number not in self._streams:
            return
        self._builder.add(stream.number, batch)
        if self._builder.batches == 1:
            self._later(_FRAME_S, self._on_frame_due)

    def _on_frame_due(self) -> None:
        if len(self._unacknowledged) < _FRAMES_MOST:
            self.cut_frame()

    def cut_frame(self) -> None:
        """Sends what was gathered."""
        if not self._builder.batches:
            return
        builder, self._builder = self._builder, self.builder_type(has_every_tick=True)
        self._frames += 1
        number, link = self._frames, self._link
        self._unacknowledged[number] = builder.sequences
        self.send(ForwardRequest(frame=builder.build(number)))
        self._later(_FRAME_WITHIN_S, lambda: self._check_frame(link, number))

    def _check_frame(self, link: Connection | None, number: int) -> None:
        if link is self._link and link is not None and number in self._unacknowledged:
            link.close(AGENT, "a frame was not acknowledged")
            self.closed("a frame was not acknowledged")


# The controller's side


class _ForwardedConnection:
    """What a session has of a stream that ends at an ingest process."""

    def __init__(self, link: "_LinkEnd", number: int) -> None:
        self._link = link
        self.number = number

    def send(self, side: int, data: bytes) -> None:
        """Tells the agent."""
        assert side == CONTROLLER
        self._link.tell(ForwardResponse(messages=(ForwardedMessage(stream=self.number, message=data),)))

    def close(self, side: int, reason: str) -> None:
        """The session ends."""
        assert side == CONTROLLER
        self._link.end_stream(self.number, reason)


class _ForwardedSession(Session):
    """One agent's stream; says what it has dealt with."""

    def __init__(self, owner: Sessions, link: "_LinkEnd", number: int) -> None:
        super().__init__(owner, _ForwardedConnection(link, number))  # type: ignore[arg-type]
        self._link, self._number = link, number
        self._delivered = self._consumed = 0

    def received(self, data: bytes) -> None:
        """The next message."""
        self._delivered += 1
        super().received(data)

    def _take(self) -> None:
        super()._take()
        dealt_with = self._delivered - len(self._inbox) - self._is_taking
        if dealt_with > self._consumed and not self.is_over:
            count, self._consumed = dealt_with - self._consumed, dealt_with
            self._link.tell(ForwardResponse(consumed=(ConsumedMessages(stream=self._number, count=count),)))

    def receive_tick(self, tick: PackedTick) -> bool:
        """Receives a batch of a frame; False if it is left out."""
        if self.is_over or not self.is_welcomed or self.hello is None:
            return False
        try:
            self._life.ledger.receive(self._life.telemetry, self.hello, tick.to_batch(), self._life.clock, tick=tick)
        except BatchRefused as error:
            self._accuse(str(error))
            return False
        return True


class _LinkEnd:
    """The link of one ingest process at the controller."""

    def __init__(self, sessions: Sessions, connection: Connection) -> None:
        self._sessions = sessions
        self._connection = connection
        self._streams: dict[int, _ForwardedSession] = {}
        sessions.life.later(0, lambda: self.tell(ForwardResponse()))

    def received(self, data: bytes) -> None:
        """What the ingest process says."""
        if self._sessions.life.is_dead:
            return
        request = decode_message(ForwardRequest, data)
        for opened in request.opened:
            if opened.stream not in self._streams:
                self._streams[opened.stream] = _ForwardedSession(self._sessions, self, opened.stream)
        for message in request.messages:
            if (session := self._streams.get(message.stream)) is not None:
                session.received(message.message)
        if request.frame is not None:
            self._receive(request.frame)
        for number in request.closed:
            if (session := self._streams.pop(number, None)) is not None:
                session.end("the agent ended its stream")

    def _receive(self, frame: TickFrame) -> None:
        left_out = dict[int, None]()
        for block in frame.blocks:
            unpacked = unpack_block(block)
            left_out.update(dict.fromkeys(unpacked.out_of_range))
            for number, tick in unpacked.ticks:
                session = self._streams.get(number)
                if session is None or not session.receive_tick(tick):
                    left_out[number] = None
        self.tell(ForwardResponse(frames=(FrameAcknowledgement(number=frame.number, left_out=tuple(left_out)),)))

    def closed(self, reason: str) -> None:
        """The ingest process is gone."""
        streams, self._streams = self._streams, {}
        for session in streams.values():
            session.end(reason)

    def end_stream(self, number: int, reason: str) -> None:
        """The controller ended a stream."""
        if self._streams.pop(number, None) is not None:
            self.tell(ForwardResponse(ended=(EndedStream(stream=number, code=14, text=reason[:200]),)))

    def tell(self, response: ForwardResponse) -> None:
        """Tells the ingest process."""
        every = next((one.ack_every for one in self._streams.values() if one.is_welcomed), 1)
        told = ForwardResponse(
            batches_per_acknowledgement=every,
            messages=response.messages,
            ended=response.ended,
            frames=response.frames,
            consumed=response.consumed,
        )
        self._connection.send(CONTROLLER, encode_message(told))


def serve_links(controller: Controller) -> None:
    """Lets the controller serve ingest processes besides agents."""
    serve_agent = controller.accept

    def accept(connection: Connection) -> End:
        return (
            _LinkEnd(controller.sessions, connection) if connection.name.startswith(_NAME) else serve_agent(connection)
        )

    controller.accept = accept  # type: ignore[method-assign]


class IngestAgent(Agent):
    """A machine whose agent knows ingest processes."""

    ingests: Sequence[str] = ()

    @property
    def address(self) -> str:  # type: ignore[override]
        """The one that is tried next."""
        order = order_addresses(self.ingests, self.name)
        return order[self._failures % len(order)]


class IngestFaults(Faults):
    """What goes wrong with ingest processes, besides what does anyway."""

    ingests: Sequence[IngestProcess] = ()

    def begin(self) -> None:
        """See `Faults`."""
        if self.crash_ingest.__name__ not in {kind.__name__ for _, kind in self._kinds}:
            self._kinds += ((10, self.crash_ingest), (6, self.break_link), (6, self.partition_link))
        super().begin()

    def heal(self) -> None:
        """See `Faults`."""
        super().heal()
        for ingest in self.ingests:
            ingest.start()

    def _ingest(self, what: str) -> IngestProcess:
        ingest = self._rng.choice(self.ingests)
        self._timeline.note(f"fault: {what} {ingest.name}")
        return ingest

    def crash_ingest(self) -> None:
        """An ingest process dies, and is started again."""
        ingest = self._ingest("crash_ingest")
        ingest.crash()
        self._end(15.0, ingest.start)

    def break_link(self) -> None:
        """The stream between an ingest process and the controller breaks."""
        self._network.snap(self._ingest("break_link").name, "connection reset")

    def partition_link(self) -> None:
        """The controller cannot be reached from an ingest process."""
        ingest = self._ingest("partition_link")
        self._network.partition(ingest.name, self._timeline.draw_ns(self._rng.choice((seconds(5), seconds(90)))))
