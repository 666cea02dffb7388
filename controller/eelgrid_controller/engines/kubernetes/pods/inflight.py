"""Pods that were released and are not bound yet: one unit per lane, and a watchdog for stuck pods.

A lane is a node and a resource whose devices follow the plan; only one unit may be under way to it, or a kubelet could
mix up pods. A pinned pod that stays unschedulable for `unbound_s` is due for recreation, with exponential backoff for
each owner.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class DeviceLane(NamedTuple):
    """A node and a resource."""

    node_name: str
    resource: str


class _Flight(NamedTuple):
    unit: str
    name: tuple[str, str]  # of the pod: namespace and name
    since_s: float


_NONE: Mapping[str, _Flight] = {}


class InflightPods:
    """Released pods that have not reported their devices yet, on nodes whose plugin follows the plan."""

    def __init__(self, *, most_s: float) -> None:
        self.most_s = most_s
        self.landed = 0
        self.overdue = 0
        self._steered: set[str] = set()
        self._on: dict[DeviceLane, dict[str, _Flight]] = {}  # by uid
        self._lanes: dict[str, set[DeviceLane]] = {}  # of each uid; more than one where a pod was sent elsewhere since
        self._queued: dict[DeviceLane, dict[str, None]] = {}  # units

    def __len__(self) -> int:
        """How many pods are under way."""
        return len(self._lanes)

    def can_start(self, unit: str, lanes: Iterable[DeviceLane]) -> bool:
        """Whether nobody else is under way there; who may not is named again when a lane is free."""
        blocked = [lane for lane in lanes if any(one.unit != unit for one in self._on.get(lane, _NONE).values())]
        for lane in blocked:
            self._queued.setdefault(lane, {})[unit] = None
        return not blocked

    def record_start(self, unit: str, uid: str, name: tuple[str, str], lane: DeviceLane, at_s: float) -> None:
        """A pod was let go to a node."""
        if lane.node_name in self._steered:
            self._on.setdefault(lane, {})[uid] = _Flight(unit, name, at_s)
            self._lanes.setdefault(uid, set()).add(lane)

    def is_under_way(self, uid: str) -> bool:
        """Whether a pod was let go to a node that says which devices pods got."""
        return uid in self._lanes

    def set_steered(self, node_name: str, *, is_so: bool) -> Iterator[str]:
        """Whether plans choose devices on a node; the units to look at again."""
        if is_so:
            self._steered.add(node_name)
            return
        self._steered.discard(node_name)
        for lane in [lane for lane in self._on if lane.node_name == node_name]:
            for uid in list(self._on[lane]):
                yield from self._end(uid, lane)

    def on_devices_reported(self, node_name: str, names: Collection[tuple[str, str]]) -> Iterator[str]:
        """A node says that these pods hold devices; the units to look at again."""
        for lane in [lane for lane in self._on if lane.node_name == node_name]:
            for uid in [uid for uid, one in self._on[lane].items() if one.name in names]:
                self.landed += 1
                yield from self._end(uid, lane)

    def record_end(self, uid: str) -> Iterator[str]:
        """A pod is under way no more, however that came; the units to look at again."""
        for lane in list(self._lanes.get(uid, ())):
            yield from self._end(uid, lane)

    def expire_overdue(self, at_s: float) -> Iterator[str]:
        """Pods that are under way for too long are so no more; the units to look at again."""
        for lane, flights in list(self._on.items()):
            for uid in [uid for uid, one in flights.items() if at_s - one.since_s >= self.most_s]:
                self.overdue += 1
                yield from self._end(uid, lane)

    def _end(self, uid: str, lane: DeviceLane) -> Iterator[str]:
        lanes = self._lanes[uid]
        lanes.discard(lane)
        if not lanes:
            del self._lanes[uid]
        left = self._on[lane]
        del left[uid]
        if not left:
            del self._on[lane]
            yield from self._queued.pop(lane, ())


_OWNERS_MOST = 10_000


@dataclass(slots=True)
class _Owner:
    times: int  # rounds so far
    round_s: float  # when the last one began
    last_s: float  # when one of its pods was last made anew


class UnboundPodWatchdog:
    """Pinned pods that cannot be scheduled, and since when."""

    def __init__(self, *, unbound_s: float, most_s: float = 3600.0) -> None:
        self.unbound_s = unbound_s
        self.most_s = most_s
        self._since_s: dict[str, float] = {}  # uid -> first said to be unschedulable
        self._owners: dict[str, _Owner] = {}

    def __len__(self) -> int:
        """How many pods wait."""
        return len(self._since_s)

    def watch_pod(self, uid: str, at_s: float) -> None:
        """A pinned pod cannot be scheduled."""
        self._since_s.setdefault(uid, at_s)

    def forget_pod(self, uid: str) -> None:
        """The pod is bound, deleted, or schedulable again."""
        self._since_s.pop(uid, None)

    def restart_wait(self, uid: str, at_s: float) -> None:
        """What was done about it has not helped; it is overdue after another wait."""
        if uid in self._since_s:
            self._since_s[uid] = at_s

    def overdue_pods(self, at_s: float) -> Iterator[tuple[str, float]]:
        """Pods that have waited for `unbound_s`, and for how long."""
        for uid, since_s in list(self._since_s.items()):
            if at_s - since_s >= self.unbound_s:
                yield uid, at_s - since_s

    def may_recreate(self, owner: str, waited_s: float, at_s: float) -> bool:
        """Whether a pod of the owner has waited long enough, seen how often its pods were made anew."""
        found = self._owners.get(owner)
        if found is None:
            return True
        rounds = found.times - 1 if _is_of(found, at_s - waited_s) else found.times
        return waited_s >= min(self.most_s, self.unbound_s * 2.0**rounds)

    def record_recreation(self, owner: str, waited_s: float, at_s: float) -> None:
        """A pod of the owner is made anew now, after it waited so long."""
        found = self._owners.pop(owner, None)
        if found is not None and _is_of(found, at_s - waited_s):
            found.last_s = at_s
            self._owners[owner] = found
            return
        times = 0 if found is None or at_s - found.last_s > 2.0 * self.most_s else found.times
        if len(self._owners) >= _OWNERS_MOST:
            del self._owners[next(iter(self._owners))]
        self._owners[owner] = _Owner(min(times + 1, 20), at_s, at_s)


def _is_of(owner: _Owner, since_s: float) -> bool:
    """Whether what waits since then is of the owner's last round: whoever is stuck later is of the next."""
    return since_s < owner.round_s
