"""Pods under way to devices that a plan chose: one unit at a time on each lane.

Owns which lanes are steered, who is under way on each, and who waits for it. Must not know
pods, patches or plans.

Theory. A kubelet asks its device plugin for devices without a word of whose they are; so
that "the next pod" is the planned one, only one unit may be on its way to a lane, which is a
node and a resource. It has landed when the node says which devices its pods hold, or is gone,
or after `most_s`, since a node that says nothing must not stop others for ever. A unit that
goes to several nodes goes when all its lanes are free, and takes them at once: nobody holds
one lane while it waits for another. Pods of one unit go together, as a gang has to; they ask
for the same, so whichever has whose devices is put right afterwards. Lanes of nodes whose
devices somebody else gives away are no lanes.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

__all__ = ["Flights", "Lane"]


class Lane(NamedTuple):
    """A node and a resource."""

    node_name: str
    resource: str


class _Flight(NamedTuple):
    unit: str
    name: tuple[str, str]  # of the pod: namespace and name
    since_s: float


_NONE: Mapping[str, _Flight] = {}


class Flights:
    """Who is under way, on the nodes where that matters."""

    def __init__(self, *, most_s: float) -> None:
        self.most_s = most_s
        self.landed = 0
        self.overdue = 0
        self._steered: set[str] = set()
        self._on: dict[Lane, dict[str, _Flight]] = {}  # by uid
        self._lanes: dict[str, set[Lane]] = {}  # of each uid; more than one where a pod was sent elsewhere since
        self._queued: dict[Lane, dict[str, None]] = {}  # units

    def __len__(self) -> int:
        """How many pods are under way."""
        return len(self._lanes)

    def may_go(self, unit: str, lanes: Iterable[Lane]) -> bool:
        """Whether nobody else is under way there; who may not is named again when a lane is free."""
        blocked = [lane for lane in lanes if any(one.unit != unit for one in self._on.get(lane, _NONE).values())]
        for lane in blocked:
            self._queued.setdefault(lane, {})[unit] = None
        return not blocked

    def begun(self, unit: str, uid: str, name: tuple[str, str], lane: Lane, at_s: float) -> None:
        """A pod was let go to a node."""
        if lane.node_name in self._steered:
            self._on.setdefault(lane, {})[uid] = _Flight(unit, name, at_s)
            self._lanes.setdefault(uid, set()).add(lane)

    def steered(self, node_name: str, *, is_so: bool) -> Iterator[str]:
        """Whether plans choose devices on a node; the units to look at again."""
        if is_so:
            self._steered.add(node_name)
            return
        self._steered.discard(node_name)
        for lane in [lane for lane in self._on if lane.node_name == node_name]:
            for uid in list(self._on[lane]):
                yield from self._end(uid, lane)

    def seen(self, node_name: str, names: Collection[tuple[str, str]]) -> Iterator[str]:
        """A node says that these pods hold devices; the units to look at again."""
        for lane in [lane for lane in self._on if lane.node_name == node_name]:
            for uid in [uid for uid, one in self._on[lane].items() if one.name in names]:
                self.landed += 1
                yield from self._end(uid, lane)

    def ended(self, uid: str) -> Iterator[str]:
        """A pod is under way no more, however that came; the units to look at again."""
        for lane in list(self._lanes.get(uid, ())):
            yield from self._end(uid, lane)

    def expired(self, at_s: float) -> Iterator[str]:
        """Pods that are under way for too long are so no more; the units to look at again."""
        for lane, flights in list(self._on.items()):
            for uid in [uid for uid, one in flights.items() if at_s - one.since_s >= self.most_s]:
                self.overdue += 1
                yield from self._end(uid, lane)

    def _end(self, uid: str, lane: Lane) -> Iterator[str]:
        lanes = self._lanes[uid]
        lanes.discard(lane)
        if not lanes:
            del self._lanes[uid]
        left = self._on[lane]
        del left[uid]
        if not left:
            del self._on[lane]
            yield from self._queued.pop(lane, ())
