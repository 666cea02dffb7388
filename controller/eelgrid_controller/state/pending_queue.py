"""The pending queue: which workloads wait, and in which order they are tried: by priority, then by submission.

Changed with the cluster state, of which it is a part that follows from the workloads. Beside it, for which queues capacity
is held, since when. Must not know why work waits.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from typing import Any

from eelgrid_protos.plain_messages import from_plain, to_plain
from eelgrid_protos.quantities import Identifier, Nanoseconds, RequiredLabel

# Sorts by falling priority, then by rising submission number.
PendingTicket = tuple[int, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldQueue:
    """A queue for which capacity is held without a start since a moment, now for this workload."""

    queue: RequiredLabel
    workload_id: Identifier
    since_ns: Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BarredQueue:
    """A queue for which capacity was held in vain, and for which none is held until a moment."""

    queue: RequiredLabel
    until_ns: Nanoseconds


class PendingQueue:
    """The pending queue: a sorted list, since even a million entries shift by one in under a millisecond.

    Work that must not start yet is parked: it waits, too, but no round meets it. That follows from the workloads and the
    time, so it is no part of the state; the index that knows both parks and unparks it.
    """

    __slots__ = ("_parked", "_places", "_tickets", "barred", "held")

    def __init__(self) -> None:
        # As of the end of the last round (core.capacity_holds).
        self.held: tuple[HeldQueue, ...] = ()
        self.barred: tuple[BarredQueue, ...] = ()
        self._tickets: list[PendingTicket] = []
        self._parked: list[PendingTicket] = []
        self._places: dict[str, PendingTicket] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return (ticket[2] for ticket in merge(self._tickets, self._parked))

    def __contains__(self, workload_id: object) -> bool:
        return workload_id in self._places

    def copy(self) -> "PendingQueue":
        """Returns an independent copy."""
        twin = PendingQueue()
        twin._tickets, twin._parked, twin._places = self._tickets.copy(), self._parked.copy(), self._places.copy()
        twin.held, twin.barred = self.held, self.barred
        return twin

    def add(self, workload_id: str, *, priority: int, number: int) -> None:
        """Adds a workload to the queue."""
        ticket = (-priority, number, workload_id)
        self._places[workload_id] = ticket
        insort(self._tickets, ticket)

    def discard(self, workload_id: str) -> None:
        """Removes a workload from the queue, if present."""
        ticket = self._places.pop(workload_id, None)
        if ticket is not None and not _remove(self._parked, ticket):
            _remove(self._tickets, ticket)

    def park(self, workload_id: str) -> None:
        """Leaves a workload of the queue out of all rounds."""
        ticket = self._places[workload_id]
        if _remove(self._tickets, ticket):
            insort(self._parked, ticket)

    def unpark(self, workload_id: str) -> bool:
        """Lets rounds try a workload of the queue; returns whether it was parked."""
        ticket = self._places[workload_id]
        if not _remove(self._parked, ticket):
            return False
        insort(self._tickets, ticket)
        return True

    def is_parked(self, workload_id: str) -> bool:
        """Returns whether a workload waits and no round tries it."""
        ticket = self._places.get(workload_id)
        return ticket is not None and _find(self._parked, ticket) is not None

    def ticket(self, workload_id: str) -> PendingTicket | None:
        """Returns where a workload is in the queue; None if it is not, or is parked."""
        return None if self._parked and self.is_parked(workload_id) else self._places.get(workload_id)

    def count_before(self, workload_id: str) -> int:
        """Returns how many workloads are tried before one that is in the queue."""
        return bisect_left(self._tickets, self._places[workload_id])

    def goes_first(self, priority: int) -> bool:
        """Returns whether work of this priority that is submitted now is tried before all that waits."""
        return not self._tickets or self._tickets[0][0] > -priority

    def next_tickets(self, ticket: PendingTicket | None, most: int) -> list[PendingTicket]:
        """Returns at most `most` tickets after a given one, from the first if None; none of parked work."""
        start = 0 if ticket is None else bisect_right(self._tickets, ticket)
        return self._tickets[start : start + most]

    def dump_holds(self) -> dict[str, Any]:
        """Dumps for which queues capacity is held, and may not be, as plain values; empty if there are none."""
        return {
            key: [to_plain(one) for one in rows] for key, rows in (("held", self.held), ("barred", self.barred)) if rows
        }

    def load_holds(self, plain: Mapping[str, Any]) -> None:
        """Loads these from a checkpoint."""
        self.held = tuple(from_plain(HeldQueue, row, trusted=True) for row in plain.get("held", ()))
        self.barred = tuple(from_plain(BarredQueue, row, trusted=True) for row in plain.get("barred", ()))


def _find(tickets: list[PendingTicket], ticket: PendingTicket) -> int | None:
    place = bisect_left(tickets, ticket)
    return place if place < len(tickets) and tickets[place] == ticket else None


def _remove(tickets: list[PendingTicket], ticket: PendingTicket) -> bool:
    place = _find(tickets, ticket)
    if place is None:
        return False
    del tickets[place]
    return True
