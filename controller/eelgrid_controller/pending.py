"""Work that waits, in the order in which it is tried: priority first, then submission.

Owns the order and nothing else; derived from the workloads, so it is in no
checkpoint. Must not know whether anything fits.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

__all__ = ["PendingOrder", "Ticket"]

# Sorts by falling priority, then by rising number of submission.
Ticket = tuple[int, int, str]


class PendingOrder:
    """The waiting workloads; a sorted list, since even a million shifts by one in under a millisecond."""

    __slots__ = ("_places", "_tickets")

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._places: dict[str, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[str]:
        return (ticket[2] for ticket in self._tickets)

    def __contains__(self, workload_id: object) -> bool:
        return workload_id in self._places

    def copy(self) -> "PendingOrder":
        """An order that changes apart from this one."""
        twin = PendingOrder()
        twin._tickets, twin._places = self._tickets.copy(), self._places.copy()
        return twin

    def add(self, workload_id: str, *, priority: int, number: int) -> None:
        """Begins to wait."""
        ticket = (-priority, number, workload_id)
        self._places[workload_id] = ticket
        insort(self._tickets, ticket)

    def discard(self, workload_id: str) -> None:
        """Waits no more, if it did."""
        ticket = self._places.pop(workload_id, None)
        if ticket is not None:
            del self._tickets[bisect_left(self._tickets, ticket)]

    def after(self, ticket: Ticket | None, most: int) -> list[Ticket]:
        """At most `most` tickets after one, from the first on if None."""
        start = 0 if ticket is None else bisect_right(self._tickets, ticket)
        return self._tickets[start : start + most]
