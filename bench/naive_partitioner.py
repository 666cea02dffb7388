"""A slow, obvious reference for the partitioner: breadth-first search over all states of a device.

A state is the mode and, for each instance, its profile, its start and its
compute instances as a sorted tuple. `moves` says what one call may do to a
device and knows nothing of any goal; the first time that the search meets the
goal, it has met it in the fewest calls there are. `Graph` keeps every state
of a small geometry, so that the search from one layout to all others is quick.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from eelgrid_protos.catalogue.products import MigGeometry

# (profile id, start, compute profile ids)
Instance = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True)
class State:
    """The mode and what stands."""

    mig_enabled: bool
    instances: frozenset[Instance]


def fits(geometry: MigGeometry, instances: frozenset[Instance]) -> bool:
    """Whether a driver would let these stand together: said once more, slice by slice."""
    taken: set[int] = set()
    compute = 0
    counts: dict[int, int] = {}
    for profile_id, start, _ in instances:
        profile = next(p for p in geometry.profiles.values() if p.id == profile_id)
        for memory_slice in range(start, start + profile.size):
            if memory_slice in taken:
                return False
            taken.add(memory_slice)
        compute += profile.compute_slices
        counts[profile_id] = counts.get(profile_id, 0) + 1
        if counts[profile_id] > profile.most:
            return False
    return compute <= geometry.compute_slices and len(instances) <= geometry.most


def moves(geometry: MigGeometry, state: State, untouchable: frozenset[Instance]) -> Iterator[State]:
    """Every state that one call leads to."""
    if not state.instances:
        yield State(not state.mig_enabled, frozenset())
    if not state.mig_enabled:
        return
    for instance in state.instances - untouchable:
        rest = state.instances - {instance}
        profile_id, start, compute = instance
        if not compute:
            yield State(True, rest)
        for index in range(len(compute)):
            fewer = compute[:index] + compute[index + 1 :]
            yield State(True, rest | {(profile_id, start, fewer)})
        profile = next(p for p in geometry.profiles.values() if p.id == profile_id)
        slices = {ci.id: ci.compute_slices for ci in profile.compute_instances}
        for ci in profile.compute_instances:
            more = tuple(sorted((*compute, ci.id)))
            if sum(slices[i] for i in more) <= profile.compute_slices and more.count(ci.id) <= ci.most:
                yield State(True, rest | {(profile_id, start, more)})
    for profile in geometry.profiles.values():
        for start in profile.starts:
            if not any((profile.id, start) == instance[:2] for instance in state.instances):
                bigger = state.instances | {(profile.id, start, ())}
                if fits(geometry, bigger):
                    yield State(True, bigger)


def fewest(geometry: MigGeometry, start: State, goal: State, untouchable: frozenset[Instance], most: int) -> int | None:
    """The fewest calls between two states, searched from both ends; None if more than `most` or never.

    Calls can be undone one for one, so the way back from the goal is as long as the way to it.
    """
    if not untouchable <= goal.instances:
        return None
    ends: list[dict[State, int]] = [{start: 0}, {goal: 0}]
    frontiers = [[start], [goal]]
    for distance in range(most + 1):
        meeting = [ends[0][state] + ends[1][state] for state in ends[0].keys() & ends[1].keys()]
        if meeting and min(meeting) <= distance:
            return min(meeting)
        side = 0 if len(frontiers[0]) <= len(frontiers[1]) else 1
        depth = ends[side][frontiers[side][0]] + 1 if frontiers[side] else 0
        following = []
        for state in frontiers[side]:
            for after in moves(geometry, state, untouchable):
                if after not in ends[side]:
                    ends[side][after] = depth
                    following.append(after)
        frontiers[side] = following
    return None


class Graph:
    """Every state of a geometry in MIG mode, and the calls between them.

    Compute instances are whole or none here, which keeps it small enough to hold.
    """

    def __init__(self, geometry: MigGeometry) -> None:
        self.layouts = tuple(layouts(geometry))
        whole = {profile.id: (profile.whole.id,) for profile in geometry.profiles.values()}
        states = [state for layout in self.layouts for state in _states(sorted(layout), whole)]
        self._numbers = {state: number for number, state in enumerate(states)}
        # For each state: (state after, what instance the call touches).
        self._calls: list[list[tuple[int, tuple[int, int]]]] = []
        for state in states:
            calls = []
            for after in moves(geometry, State(True, state), frozenset()):
                number = self._numbers.get(after.instances)
                if after.mig_enabled and number is not None:
                    ((profile_id, start, _), *_) = state ^ after.instances
                    calls.append((number, (profile_id, start)))
            self._calls.append(calls)
        self._whole = whole

    def full(self, layout: frozenset[tuple[int, int]]) -> frozenset[Instance]:
        """A layout with all its compute instances."""
        return frozenset((profile_id, start, self._whole[profile_id]) for profile_id, start in layout)

    def distances(self, source: frozenset[Instance], untouchable: Iterable[tuple[int, int]]) -> dict[int, int]:
        """The fewest calls to every state that can be reached."""
        spared = frozenset(untouchable)
        first = self._numbers[source]
        found = {first: 0}
        waiting = deque([first])
        while waiting:
            state = waiting.popleft()
            for after, touched in self._calls[state]:
                if after not in found and touched not in spared:
                    found[after] = found[state] + 1
                    waiting.append(after)
        return found

    def number(self, instances: frozenset[Instance]) -> int:
        """The state of these instances."""
        return self._numbers[instances]


def layouts(geometry: MigGeometry) -> Iterator[frozenset[tuple[int, int]]]:
    """Every set of (profile id, start) that can stand, the empty one first."""
    places = [(profile.id, start) for profile in geometry.profiles.values() for start in profile.starts]
    waiting: list[tuple[tuple[tuple[int, int], ...], int]] = [((), 0)]
    while waiting:
        layout, following = waiting.pop()
        yield frozenset(layout)
        for index in range(following, len(places)):
            bigger = (*layout, places[index])
            if fits(geometry, frozenset((profile_id, start, ()) for profile_id, start in bigger)):
                waiting.append((bigger, index + 1))


def maximal(every: Iterable[frozenset[tuple[int, int]]]) -> list[frozenset[tuple[int, int]]]:
    """The layouts to which nothing can be added."""
    known = list(every)
    return [layout for layout in known if not any(layout < other for other in known)]


def _states(layout: list[tuple[int, int]], whole: dict[int, tuple[int, ...]]) -> Iterator[frozenset[Instance]]:
    for mask in range(1 << len(layout)):
        yield frozenset(
            (profile_id, start, whole[profile_id] if mask >> place & 1 else ())
            for place, (profile_id, start) in enumerate(layout)
        )
