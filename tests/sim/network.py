"""The network between machines: streams of bytes that are delayed, cut, broken, and in harsh weather worse.

Owns what happens to messages under way. Must not know what the bytes mean.

Two kinds of weather. Fair: a stream keeps order and completeness as TCP does,
until it breaks, and then everything under way is lost, of which the sender
learns nothing. Harsh: single messages are dropped, duplicated and put out of
order besides, which no TCP does, so that nothing rests on it.

A partition holds back what is sent within it, as a sender's kernel does; ends
that wait longer than the keepalive give the stream up, each by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tests.sim.clock import seconds

__all__ = ["AGENT", "CONTROLLER", "KEEPALIVE_NS", "Connection", "End", "Network", "Weather"]

# As in eelgrid_protos.transport: asked after 30 s of silence, given up 10 s later.
KEEPALIVE_NS = seconds(40)
AGENT, CONTROLLER = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How bad it is; probabilities are for one message."""

    delay_ns_most: int = seconds(0.02)
    slow_p: float = 0.01
    slow_ns_most: int = seconds(2)
    drop_p: float = 0.0
    duplicate_p: float = 0.0
    reorder_p: float = 0.0


class End(Protocol):
    """Whoever holds one end of a stream."""

    def received(self, data: bytes) -> None:
        """The next message."""

    def closed(self, reason: str) -> None:
        """The other end is gone, or the stream broke; said once."""


class Connection:
    """One stream; side 0 is the agent's, side 1 the controller's."""

    def __init__(self, network: "Network", name: str, agent: End, address: str = "") -> None:
        self.network = network
        self.name = name
        # Of the controller.
        self.address = address
        self._ends: list[End | None] = [agent, None]
        self._arrives_ns = [0, 0]

    @property
    def is_over(self) -> bool:
        """Whether neither end holds it any more."""
        return self._ends == [None, None]

    def accept(self, controller: End) -> None:
        """The controller takes its end."""
        self._ends[CONTROLLER] = controller

    def send(self, side: int, data: bytes) -> None:
        """From the end `side` to the other; nothing happens on an end that was closed."""
        if self._ends[side] is not None:
            self.network.carry(self, 1 - side, data)

    def close(self, side: int, reason: str) -> None:
        """This end lets go; the other hears of it behind all that was sent before."""
        if self._ends[side] is None:
            return
        self._ends[side] = None
        self.network.schedule(self, 1 - side, lambda: self._tell(1 - side, reason))

    def abandon(self, side: int) -> None:
        """This end is gone without a word, as when its machine lost its power."""
        self._ends[side] = None

    def snap(self, reason: str) -> None:
        """The stream breaks: all that is under way is lost, and both ends hear of it."""
        for side in (AGENT, CONTROLLER):
            self._tell(side, reason)

    def arrive(self, side: int, data: bytes) -> None:
        """Delivery to an end, if it is still there."""
        end = self._ends[side]
        if end is not None:
            end.received(data)

    def arrival_ns(self, side: int, earliest_ns: int) -> int:
        """A moment not before anything that was sent before in this direction."""
        self._arrives_ns[side] = max(self._arrives_ns[side], earliest_ns)
        return self._arrives_ns[side]

    def _tell(self, side: int, reason: str) -> None:
        end, self._ends[side] = self._ends[side], None
        if end is not None:
            end.closed(reason)


class Timeline(Protocol):
    """What the network needs of the world."""

    now_ns: int

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Runs the action then."""

    def chance(self, probability: float) -> bool:
        """A draw."""

    def draw_ns(self, most_ns: int) -> int:
        """A draw."""

    def mark(self, data: bytes) -> None:
        """Puts bytes into the trace."""


class Network:
    """See the module."""

    def __init__(self, timeline: Timeline, weather: Weather) -> None:
        self._timeline = timeline
        self.weather = weather
        self._cut_until_ns: dict[str, int] = {}
        self.connections: list[Connection] = []
        # By address: takes a new connection; nobody is there where no process listens.
        self.listeners: dict[str, Callable[[Connection], End]] = {}
        self.messages = 0
        self.bytes = 0

    def connect(self, name: str, agent: End, address: str = "") -> Connection:
        """Opens a stream from the agent of a node; whether it was accepted turns out later."""
        connection = Connection(self, name, agent, address)
        self.connections = [known for known in self.connections if not known.is_over]
        self.connections.append(connection)
        self.schedule(connection, CONTROLLER, lambda: self._offer(connection))
        return connection

    def carry(self, connection: Connection, side: int, data: bytes) -> None:
        """One message towards an end."""
        weather, timeline = self.weather, self._timeline
        timeline.mark(data)
        self.messages += 1
        self.bytes += len(data)
        if weather.drop_p and timeline.chance(weather.drop_p):
            return
        self.schedule(connection, side, lambda: connection.arrive(side, data))
        if weather.duplicate_p and timeline.chance(weather.duplicate_p):
            self.schedule(connection, side, lambda: connection.arrive(side, data))

    def schedule(self, connection: Connection, side: int, action: Callable[[], None]) -> None:
        """Runs the action when what is sent now arrives."""
        weather, timeline = self.weather, self._timeline
        slow = timeline.chance(weather.slow_p)
        delay_ns = timeline.draw_ns(weather.slow_ns_most if slow else weather.delay_ns_most)
        leaves_ns = max(timeline.now_ns, self._cut_until_ns.get(connection.name, 0))
        if weather.reorder_p and timeline.chance(weather.reorder_p):
            arrives_ns = leaves_ns + delay_ns + timeline.draw_ns(weather.slow_ns_most)
        else:
            arrives_ns = connection.arrival_ns(side, leaves_ns + delay_ns)
        timeline.after(arrives_ns - timeline.now_ns, action)

    def partition(self, name: str, duration_ns: int) -> None:
        """Nothing gets from or to a node for that time."""
        self._cut_until_ns[name] = max(self._cut_until_ns.get(name, 0), self._timeline.now_ns + duration_ns)
        if duration_ns > KEEPALIVE_NS:
            for connection in self.connections:
                if connection.name == name:
                    self._timeline.after(KEEPALIVE_NS, lambda gone=connection: gone.snap("keepalive timed out"))

    def clear(self) -> None:
        """Every partition is over for what is sent from now on."""
        self._cut_until_ns.clear()

    def snap(self, name: str, reason: str) -> None:
        """Every stream of a node breaks."""
        for connection in self.connections:
            if connection.name == name:
                connection.snap(reason)

    def _offer(self, connection: Connection) -> None:
        listener = self.listeners.get(connection.address)
        if listener is None:
            self.schedule(connection, AGENT, lambda: connection.snap("connection refused"))
        else:
            connection.accept(listener(connection))
