"""Ingest processes between agents and the controller, transcribed from `eelgrid_controller.server.ingest`.

Owns both ends of the link: the process that agents connect to, and the controller's side, which serves each agent's stream
by the same sessions as one that comes directly. Frames are the real ones (`frames.py`), with every tick, by which the
observer knows them. A process keeps nothing but streams: when its link ends, agents open theirs for the next one, by the
real state machine (`handover.py`), and those of older agents end.

In harsh weather a frame or its acknowledgement may be lost, which no stream does; a link is given up when a frame is not
acknowledged in time.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from eelgrid_controller.errors import BatchRefused
from eelgrid_controller.server.ingest.frames import FrameBuilder, unpack_block
from eelgrid_controller.server.ingest.handover import StreamHandover, StreamPhase
from eelgrid_controller.server.ingest.relay import (
    _ANSWER_WITHIN_S,
    _FRAME_S,
    _FRAMES_MOST,
    _INVENTORY,
    _KEPT_S,
    _LINK_WITHIN_S,
    _ONLY_ANSWER_WITHIN_S,
    _PAUSE_S,
    _RESUME_REQUEST,
    _SAMPLES,
    _UNREAD_MOST,
)
from eelgrid_controller.state.telemetry import PackedTick
from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.controller_addresses import ControllerAddresses, order_addresses
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
from tests.sim.clock import Clock, seconds
from tests.sim.controller import Controller
from tests.sim.faults import Faults
from tests.sim.network import AGENT, CONTROLLER, Connection, End, Network
from tests.sim.process import PausableProcess
from tests.sim.sessions import Session, Sessions
from tests.sim.timeline import Timeline

__all__ = ["IngestAgent", "IngestFaults", "IngestProcess", "serve_links"]

_NAME = "ingest-"
_FRAME_WITHIN_S = 45.0
# Of agents whose streams end with the link.
_OLDER_P = 0.2


class _AgentEnd:
    """One agent's stream at an ingest process."""

    def __init__(self, owner: "IngestProcess", connection: Connection) -> None:
        self._owner = owner
        self._connection = connection
        self._inbox: deque[bytes] = deque()
        self._is_changing = False
        # By which the controller knows it; 0 while no controller does.
        self.number = 0
        self.handover = StreamHandover()
        # Of the links that it lost.
        self.losses = 0
        self.is_over = False
        self.sequence = self.unacknowledged = self.unread = 0
        owner.enter(lambda: owner.admit(self))

    def received(self, data: bytes) -> None:
        """The agent's next message."""
        self._owner.enter(lambda: self._receive(data))

    def _receive(self, data: bytes) -> None:
        self._inbox.append(data)
        self.pump()

    def closed(self, reason: str) -> None:
        """The agent is gone."""
        del reason
        self._owner.enter(self._leave)

    def _leave(self) -> None:
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
        welcome = self.handover.on_response(data)
        self._connection.send(CONTROLLER, data)
        if welcome is not None:
            self.sequence = welcome.acknowledged_sequence
            self.pump()

    def leave_link(self) -> None:
        """Its controller is lost: the agent opens it for the next one."""
        self.losses += 1
        self.number = self.sequence = self.unacknowledged = self.unread = 0
        self._is_changing = False
        if self.handover.lose_controller():
            self._connection.send(CONTROLLER, _RESUME_REQUEST)
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
        while self._inbox and not self.is_over and (self.number or self.losses):
            data = self._inbox[0]
            is_sample = data[:1] == _SAMPLES
            if self._is_changing and self.unread:
                return
            self._is_changing = False
            is_early = is_sample and self.handover.phase is StreamPhase.HANDED
            if self.unread >= _UNREAD_MOST or is_early:
                return
            self._inbox.popleft()
            if not self.handover.admit_message(data):
                self._owner.dropped += 1
                continue
            if self.handover.phase is StreamPhase.HELD:
                self._owner.hand_over(self)
                continue
            if is_sample:
                message = decode_message(ConnectRequest, data, is_counted=True).message
                if isinstance(message, SampleBatch):
                    self._owner.add_batch(self, message)
                continue
            if data[:1] == _INVENTORY:
                # Batches from before it go first.
                self._owner.cut_frame()
                self._is_changing = True
            self.forward(data)

    def forward(self, data: bytes) -> None:
        """Hands a message to the controller."""
        self.unread += 1
        self._owner.send(ForwardRequest(messages=(ForwardedMessage(stream=self.number, message=data),)))


class _LeaderEnd:
    """The end of one link at an ingest process; what comes on it after the next one was opened is not heard."""

    def __init__(self, process: "IngestProcess") -> None:
        self._process = process

    def received(self, data: bytes) -> None:
        """The controller's next message."""
        self._process.enter(lambda: self._process.hear(data) if self._process.is_end(self) else None)

    def closed(self, reason: str) -> None:
        """The controller is gone."""
        self._process.enter(lambda: self._process.lose_link(reason) if self._process.is_end(self) else None)


class IngestProcess(PausableProcess):
    """One ingest process: start it, stop it, crash it. It looks for the controller that leads among several."""

    builder_type: type[FrameBuilder] = FrameBuilder
    end_type: type[_AgentEnd] = _AgentEnd

    def __init__(self, timeline: Timeline, network: Network, number: int, *, controllers: Sequence[str]) -> None:
        self.name = self.address = f"{_NAME}{number}"
        self.title = f"ingest {self.name}"
        self.links = 0
        # Of kept streams: messages for a controller that was lost, and streams that went to another.
        self.dropped = self.handed_over = 0
        self.timeline = timeline
        self.clock = Clock(lambda: timeline.now_ns)
        self._network = network
        self._controllers = controllers
        self._numbers = 0
        self._kept: list[_AgentEnd] = []
        self._forget_link()

    def _forget_link(self) -> None:
        self.is_linked = False
        self._link: Connection | None = None
        self._end: _LeaderEnd | None = None
        self._streams: dict[int, _AgentEnd] = {}
        # Agents that wait for a link.
        self._waiting_agents: list[_AgentEnd] = []
        self._builder = self.builder_type(has_every_tick=True)
        self._frames = 0
        self._unacknowledged: dict[int, dict[int, list[int]]] = {}
        self._every = 1
        # Of answers of the controller: whether one is due, and which.
        self._is_answer_due = False
        self._answers = 0

    @property
    def holds_frames(self) -> bool:
        """Whether frames are under way that the controller has not acknowledged."""
        return bool(self._unacknowledged)

    @property
    def holds_streams(self) -> bool:
        """Whether a controller has welcomed agents here."""
        return any(stream.handover.phase is StreamPhase.WELCOMED for stream in self._streams.values())

    def start(self) -> None:
        """The process starts, unless it runs."""
        if not self.is_running:
            self._begin()
            self._search = ControllerAddresses(self._controllers).begin_search()
            self._network.listeners[self.address] = lambda connection: self.end_type(self, connection)
            self._open_link()

    def crash(self) -> None:
        """The process dies at once; the kernel ends its streams."""
        if not self.is_running:
            return
        self._die()
        self._network.listeners.pop(self.address, None)
        if self._link is not None:
            self._link.close(AGENT, "connection reset")
        for stream in (*self._streams.values(), *self._waiting_agents, *self._kept):
            stream.is_over = True
        self._kept.clear()
        for connection in self._network.connections:
            if connection.address == self.address:
                connection.close(CONTROLLER, "connection reset")
        self._forget_link()

    # The link

    def _open_link(self) -> None:
        self._end = _LeaderEnd(self)
        self._link = self._network.connect(self.name, self._end, self._search.address)
        self._expect_answer()

    def is_end(self, end: _LeaderEnd) -> bool:
        """Whether this is the end of the link that is in use."""
        return end is self._end

    def _expect_answer(self) -> None:
        if not self._is_answer_due:
            self._is_answer_due = True
            link, answers = self._link, self._answers
            within_s = _ANSWER_WITHIN_S if self._search.is_choice else _ONLY_ANSWER_WITHIN_S
            self.later(seconds(within_s), lambda: self._check_answer(link, answers))

    def _check_answer(self, link: Connection | None, answers: int) -> None:
        if self._is_answer_due and answers == self._answers:
            self._give_up(link, "it did not answer in time")

    def _give_up(self, link: Connection | None, reason: str) -> None:
        if link is self._link and link is not None:
            link.close(AGENT, reason)
            self.lose_link(reason)

    def hear(self, data: bytes) -> None:
        """The controller's next message."""
        response = decode_message(ForwardResponse, data)
        self._is_answer_due = False
        self._answers += 1
        if not self.is_linked:
            self.is_linked = True
            self.links += 1
            self._search.succeed()
            self.timeline.note(f"{self.name} linked leader={self._search.address}")
            waiting, self._waiting_agents = self._waiting_agents, []
            for stream in waiting:
                self._open_stream(stream)
            for stream in [one for one in self._kept if one.handover.phase is StreamPhase.HELD]:
                self.hand_over(stream)
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

    def lose_link(self, reason: str) -> None:
        """The link is lost: every agent that used it opens its stream again, or connects again."""
        self.timeline.note(f"{self.name} link lost leader={self._search.address} reason={reason}")
        streams, waiting = list(self._streams.values()), self._waiting_agents
        self._forget_link()
        self._waiting_agents = waiting
        for stream in streams:
            self._keep(stream)
        pause_s = self._search.move_on(reason, jitter=self.timeline.rng.random)
        self.later(seconds(_PAUSE_S if pause_s is None else pause_s), self._open_link)

    def send(self, request: ForwardRequest) -> None:
        """Tells the controller."""
        if request.messages or request.frame is not None:
            self._expect_answer()
        if self._link is not None:
            self._link.send(AGENT, encode_message(request))

    # Agents

    def _keep(self, stream: _AgentEnd) -> None:
        if not stream.handover.is_keepable:
            stream.close("the controller was lost")
            return
        self._kept.append(stream)
        stream.leave_link()
        losses = stream.losses
        self.later(seconds(_KEPT_S), lambda: self._end_kept(stream, losses))

    def _end_kept(self, stream: _AgentEnd, losses: int) -> None:
        if stream in self._kept and stream.losses == losses:
            self._kept.remove(stream)
            stream.close("no controller leads")

    def hand_over(self, stream: _AgentEnd) -> None:
        """Hands the opening of a stream to the controller, or holds it until there is one."""
        if not stream.number and self.is_linked:
            self._kept.remove(stream)
            self.handed_over += 1
            self._tell_of_stream(stream)
        if stream.number:
            stream.forward(stream.handover.hand_over())

    def admit(self, stream: _AgentEnd) -> None:
        """An agent connects; it waits a while for a controller."""
        if self.is_linked:
            self._open_stream(stream)
            return
        self._waiting_agents.append(stream)
        self.later(seconds(_LINK_WITHIN_S), lambda: self._refuse(stream))

    def _refuse(self, stream: _AgentEnd) -> None:
        if not stream.number:
            stream.close("no controller takes what this process hands on")

    def _open_stream(self, stream: _AgentEnd) -> None:
        if not stream.is_over:
            self._tell_of_stream(stream)
            stream.pump()

    def _tell_of_stream(self, stream: _AgentEnd) -> None:
        self._numbers += 1
        stream.number = self._numbers
        self._streams[stream.number] = stream
        self.send(ForwardRequest(opened=(ForwardedStream(stream=stream.number),)))

    def agent_left(self, stream: _AgentEnd) -> None:
        """An agent ended its stream."""
        if stream in self._kept:
            self._kept.remove(stream)
        if self._streams.pop(stream.number, None) is not None:
            self.send(ForwardRequest(closed=(stream.number,)))

    def add_batch(self, stream: _AgentEnd, batch: SampleBatch) -> None:
        """Adds a batch to the next frame."""
        if stream.number not in self._streams:
            return
        self._builder.add(stream.number, batch)
        if self._builder.batches == 1:
            self.later(seconds(_FRAME_S), self._on_frame_due)

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
        self.later(seconds(_FRAME_WITHIN_S), lambda: self._check_frame(link, number))

    def _check_frame(self, link: Connection | None, number: int) -> None:
        if number in self._unacknowledged:
            self._give_up(link, "a frame was not acknowledged")


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
    """One agent's stream; says what it has dealt with. Mixed into the sessions of agents that come directly."""

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
        self._confirm_claim()
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
        self._session_type = type("_Session", (_ForwardedSession, sessions.session_type), {})
        sessions.life.later(0, lambda: self.tell(ForwardResponse()))

    def received(self, data: bytes) -> None:
        """What the ingest process says."""
        if self._sessions.life.is_dead:
            return
        request = decode_message(ForwardRequest, data)
        for opened in request.opened:
            if opened.stream not in self._streams:
                self._streams[opened.stream] = self._session_type(self._sessions, self, opened.stream)
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

    def __init__(self, timeline: Timeline, *positional: Any, **named: Any) -> None:
        super().__init__(timeline, *positional, **named)
        self.is_older = timeline.chance(_OLDER_P)

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
            self._kinds += (
                (10, self.crash_ingest),
                (6, self.pause_ingest),
                (6, self.break_link),
                (6, self.partition_link),
            )
        super().begin()

    def heal(self) -> None:
        """See `Faults`."""
        super().heal()
        for ingest in self.ingests:
            ingest.continue_process()
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

    def pause_ingest(self) -> None:
        """An ingest process is stopped, for longer than agents and the controller wait for it, or for less."""
        ingest = self._ingest("pause_ingest")
        ingest.stop_process()
        self._end(self._rng.choice((3.0, 40.0)), ingest.continue_process)

    def break_link(self) -> None:
        """The stream between an ingest process and the controller breaks."""
        self._network.snap(self._ingest("break_link").name, "connection reset")

    def partition_link(self) -> None:
        """The controller cannot be reached from an ingest process."""
        ingest = self._ingest("partition_link")
        self._network.partition(ingest.name, self._timeline.draw_ns(self._rng.choice((seconds(5), seconds(90)))))
