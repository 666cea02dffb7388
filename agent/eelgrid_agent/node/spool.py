"""What the controller has not acknowledged yet: ticks that wait, and batches under way.

Owns numbering, the window, dropping and resending. Must not know the stream,
the clock or what a reading means.

Theory. A tick waits unnumbered until it is first sent; only then does it become
part of a numbered batch. So dropping the oldest waiting tick never tears a hole
into the sequence, and a numbered batch is kept until it is acknowledged: within
one incarnation sequences are contiguous, and what was dropped stands as a count
in the next batch. `_sent` counts the numbered batches that went out on this
connection; a new connection sets it back, and they go again in order.

Events ride the same order. The controller does not acknowledge them, but the
stream keeps order: an event sent before a batch has arrived when that batch is
acknowledged. Until then it is kept, and sent again on a new connection; an
event may arrive twice, never not at all within the bound.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import Generic, TypeVar

from eelgrid_agent.devices.sampler import SampleTick, build_batch
from eelgrid_protos.messages import NodeEvent, SampleBatch

# A minute at 1 Hz: 35 kB for 8 GPUs, so that a backlog drains in few messages.
BATCH_TICKS_MOST = 60
EVENTS_MOST = 256


_Value = TypeVar("_Value")


class LatestValue(Generic[_Value]):
    """Something of which only the newest counts; told once on each connection."""

    def __init__(self) -> None:
        self._value: _Value | None = None
        self._is_due = False

    def set_value(self, value: _Value) -> None:
        """A value, in the stead of what was told before."""
        self._value, self._is_due = value, True

    def mark_unsent(self) -> None:
        """A connection is new."""
        self._is_due = self._value is not None

    def pop_unsent(self) -> _Value | None:
        """What is to be sent, which then counts as sent."""
        due, self._is_due = self._is_due, False
        return self._value if due else None


class Acknowledged(Enum):
    """What an acknowledgement did."""

    NEWER = "released batches"
    STALE = "covers nothing that is still held"
    FUTURE = "covers what was never sent"


class Spool:
    """The ticks and batches of one node."""

    def __init__(self, *, window: int, ticks_most: int) -> None:
        if window < 1 or ticks_most < 1:
            raise ValueError(f"window {window} and ticks_most {ticks_most} must be at least 1")
        self._window = window
        self._ticks_most = ticks_most
        self._waiting: deque[SampleTick] = deque()
        self._numbered: deque[SampleBatch] = deque()
        self._sent = 0
        self._next_sequence = 1
        self._dropped = 0
        self.dropped_total = 0

    @property
    def waiting_ticks(self) -> int:
        """Ticks that no batch holds yet."""
        return len(self._waiting)

    @property
    def unacknowledged_ticks(self) -> int:
        """Ticks that the controller has not acknowledged."""
        return len(self._waiting) + sum(len(batch.time_ns) for batch in self._numbered)

    @property
    def in_flight(self) -> int:
        """Batches sent on this connection and not acknowledged."""
        return self._sent

    @property
    def upcoming_sequence(self) -> int:
        """Sequence of the batch that goes out next."""
        return self._numbered[self._sent].sequence if self._sent < len(self._numbered) else self._next_sequence

    @property
    def is_urgent(self) -> bool:
        """Whether a batch should go before the send interval is over: a resend or a full one."""
        return self._sent < len(self._numbered) or len(self._waiting) >= BATCH_TICKS_MOST

    def set_window(self, window: int) -> None:
        """How many batches may be under way from now on."""
        self._window = max(1, window)

    def add(self, tick: SampleTick) -> None:
        """Keeps a tick; the oldest that waits gives way when the spool is full."""
        self._waiting.append(tick)
        if len(self._waiting) > self._ticks_most:
            self._waiting.popleft()
            self._dropped += 1
            self.dropped_total += 1

    def next_batch(self) -> SampleBatch | None:
        """The batch to send now, which then counts as under way; None when the window is full or nothing waits."""
        if self._sent >= self._window:
            return None
        if self._sent < len(self._numbered):
            batch = self._numbered[self._sent]
        elif self._waiting:
            batch = build_batch(self._cut(), sequence=self._next_sequence, dropped_ticks=self._dropped)
            self._numbered.append(batch)
            self._next_sequence += 1
            self._dropped = 0
        else:
            return None
        self._sent += 1
        return batch

    def acknowledge(self, sequence: int) -> Acknowledged:
        """Releases every batch up to and including the sequence."""
        if sequence >= self._next_sequence:
            return Acknowledged.FUTURE
        released = False
        while self._numbered and self._numbered[0].sequence <= sequence:
            self._numbered.popleft()
            # It may have gone over the connection before and not yet over this one.
            self._sent = max(0, self._sent - 1)
            released = True
        return Acknowledged.NEWER if released else Acknowledged.STALE

    def resume(self, acknowledged_sequence: int) -> Acknowledged:
        """Begins a connection: what the controller does not hold goes again, oldest first.

        FUTURE means that the controller claims batches of this incarnation that were never sent; the caller must
        begin another incarnation, see `restart`.
        """
        self._sent = 0
        return self.acknowledge(acknowledged_sequence)

    def restart(self) -> None:
        """Begins another incarnation: what is held is numbered from 1 again."""
        self._numbered = deque(replace(batch, sequence=index) for index, batch in enumerate(self._numbered, start=1))
        self._next_sequence = len(self._numbered) + 1
        self._sent = 0

    def _cut(self) -> list[SampleTick]:
        """The oldest waiting ticks that fit into one batch: one generation, time not falling, no slow look or alone."""
        ticks = [self._waiting.popleft()]
        while self._waiting and len(ticks) < BATCH_TICKS_MOST:
            tick = self._waiting[0]
            if tick.riding is not None or ticks[0].riding is not None:
                break
            # Dropping may have taken the tick that opened a batch, so the times themselves decide as well.
            if tick.opens_batch or tick.generation != ticks[0].generation or tick.time_ns < ticks[-1].time_ns:
                break
            ticks.append(self._waiting.popleft())
        return ticks


class EventQueue:
    """Events until a batch behind them is acknowledged."""

    def __init__(self, *, most: int = EVENTS_MOST) -> None:
        self._most = most
        self._kept: deque[tuple[NodeEvent, int]] = deque()
        self._waiting: deque[NodeEvent] = deque()
        self.dropped_total = 0

    def __len__(self) -> int:
        return len(self._kept) + len(self._waiting)

    def __iter__(self) -> Iterator[NodeEvent]:
        yield from (event for event, _ in self._kept)
        yield from self._waiting

    def add(self, event: NodeEvent) -> None:
        """Keeps an event; the oldest gives way when the queue is full."""
        self._waiting.append(event)
        if len(self) > self._most:
            if self._kept:
                self._kept.popleft()
            else:
                self._waiting.popleft()
                self.dropped_total += 1

    def next_event(self, *, covered_by: int) -> NodeEvent | None:
        """The event to send now, ahead of the batch `covered_by`."""
        if not self._waiting:
            return None
        event = self._waiting.popleft()
        self._kept.append((event, covered_by))
        return event

    def acknowledge(self, sequence: int) -> None:
        """Forgets the events that went ahead of a batch that arrived."""
        while self._kept and self._kept[0][1] <= sequence:
            self._kept.popleft()

    def resume(self) -> None:
        """Begins a connection: events that may not have arrived go again."""
        self._waiting.extendleft(event for event, _ in reversed(self._kept))
        self._kept.clear()
