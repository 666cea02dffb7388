"""Work that finds no room under best fit, by what it asks for.

Owns the queues, and whether a node could take any of it. Must not know how a place is chosen.

Theory. What waits fits nowhere, so that only a node that gained room can let it begin, and
replicas that ask for the same stand or fall together: a node is looked at once for each kind
of request, however much work of that kind waits.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from eelgrid_protos.messages import ResourceRequest

__all__ = ["Entry", "Kind", "Room", "Waiting"]


class Kind(NamedTuple):
    """Equal work: where one entry of a kind finds no room, none does."""

    request: ResourceRequest
    traits: tuple[str, ...]
    replicas: int


class Entry(NamedTuple):
    """Replicas of one workload that begin together; sorts by falling priority, then by arrival."""

    rank: int  # minus the priority
    number: int
    replicas: tuple[int, ...]
    key: str


class Room(NamedTuple):
    """What is free on one node."""

    cpu_milli: int
    memory_bytes: int
    gpus: tuple[tuple[str, int], ...]  # model and free thousandths of each that takes work
    traits: frozenset[str]

    def fits(self, kind: Kind) -> bool:
        """Whether one replica fits."""
        asked = kind.request
        if asked.cpu_milli > self.cpu_milli or asked.memory_bytes > self.memory_bytes:
            return False
        if not self.traits.issuperset(kind.traits):
            return False
        if not asked.gpu_count:
            return True
        models, share = asked.gpu_models, asked.gpu_milli
        fitting = sum(free >= share and (not models or model in models) for model, free in self.gpus)
        return fitting >= asked.gpu_count


class Waiting:
    """The entries, each kind in its order."""

    def __init__(self) -> None:
        self._queues: dict[Kind, list[Entry]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, kind: Kind) -> bool:
        return kind in self._queues

    def add(self, kind: Kind, entry: Entry) -> None:
        """Begins to wait."""
        insort(self._queues.setdefault(kind, []), entry)

    def discard(self, kind: Kind, entry: Entry) -> None:
        """Waits no more."""
        queue = self._queues[kind]
        del queue[bisect_left(queue, entry)]
        if not queue:
            del self._queues[kind]

    def first(self, kind: Kind) -> Entry | None:
        """The next of a kind."""
        queue = self._queues.get(kind)
        return queue[0] if queue else None

    def heads(self, rooms: Iterable[Room] | None) -> Iterator[tuple[Entry, Kind]]:
        """The next of each kind of which one replica fits in any of the rooms; of all kinds for None."""
        known = None if rooms is None else list(rooms)
        for kind, queue in self._queues.items():
            if known is None or any(room.fits(kind) for room in known):
                yield queue[0], kind
