"""Places given to pods at their admission, before the API server has created them.

A reservation is a member of the gate that nobody has seen yet, under a uid of ours; the plan in the pod's annotations
names it, so that the pod is known when the watch shows it. A creation may fail after the answer (quota, another webhook,
a client that gave up), which nobody reports: a reservation whose pod is not seen in time is given back.

So that creations that fail hold little, each namespace has a window of reservations whose pods were not seen yet. It
grows by one with each pod that comes, and falls to one with each that does not, as congestion windows do.

    pending --no certain place--> declined
    pending --a place--> given       --the pod is seen--> over
    pending --too late--> abandoned  --the pod is seen--> over: it waits for its place as any other, or is bound to it
                          both       --not seen in time--> over, window of one
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from eelgrid_controller.engines.kubernetes.model.objects import Pod

# Answers are used at once or, after the webhook's timeout, never; what is left is one write to etcd.
RESERVED_S = 20.0
MAX_RESERVATIONS = 1024
FIRST_WINDOW = 32
MAX_WINDOW = 512
MAX_NAMESPACES = 10_000
# Reviews that wait for a place at once. Halved where their time runs out, since so many cannot be answered within it;
# then it grows again by one for each time that as many were answered.
MAX_PENDING = 32
HALVED_EVERY_S = 0.5
# After a pod found no room: until another is tried at its admission. Those in between are placed when they are seen.
FULL_S = 1.0


@dataclass(slots=True)
class _Reservation:
    namespace: str
    due_s: float | None = None  # when it is over without its pod; None while it is pending


@dataclass(slots=True)
class _Window:
    size: int = FIRST_WINDOW
    used: int = 0


@dataclass(slots=True, kw_only=True)
class AdmissionCounts:
    """What became of reservations, since the start."""

    pinned: int = 0  # pods that were given a node
    declined: int = 0  # pods for which none was certain
    late: int = 0  # pods whose review's time ran out
    confirmed: int = 0  # pods that came
    expired: int = 0  # pods that did not
    changed: int = 0  # pods that came with other requests than were planned

    def as_mapping(self) -> Mapping[str, int]:
        """By name."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class AdmissionPins:
    """The reservations of one gate, by uid of the pod that is to come."""

    counts: AdmissionCounts = field(default_factory=AdmissionCounts)
    _reservations: dict[str, _Reservation] = field(default_factory=dict)
    _pending: dict[str, None] = field(default_factory=dict)
    _windows: dict[str, _Window] = field(default_factory=dict)
    _expected: dict[str, float] = field(default_factory=dict)  # units of a controller before, and until when
    _full_until_s: float = 0.0
    _pending_most: float = MAX_PENDING
    _halved_s: float = -HALVED_EVERY_S

    def __contains__(self, uid: str) -> bool:
        return uid in self._reservations

    def __len__(self) -> int:
        return len(self._reservations)

    @property
    def pending(self) -> list[str]:
        """Pods whose review waits for an answer."""
        return list(self._pending)

    def may_begin(self, namespace: str, at_s: float) -> bool:
        """Whether one more pod of a namespace may be placed at its admission."""
        if (
            len(self._reservations) >= MAX_RESERVATIONS
            or len(self._pending) >= int(self._pending_most)
            or at_s < self._full_until_s
        ):
            return False
        window = self._windows.get(namespace)
        return window is None or window.used < window.size

    def begin(self, uid: str, namespace: str) -> None:
        """A pod is being admitted."""
        self._reservations[uid] = _Reservation(namespace)
        self._pending[uid] = None
        if namespace not in self._windows and len(self._windows) >= MAX_NAMESPACES:
            self._forget_window()
        self._windows.setdefault(namespace, _Window()).used += 1

    def give(self, uid: str, at_s: float) -> None:
        """It is answered with its place."""
        self._pending.pop(uid, None)
        self._reservations[uid].due_s = at_s + RESERVED_S
        self.counts.pinned += 1
        self._pending_most = min(MAX_PENDING, self._pending_most + 1.0 / self._pending_most)

    def decline(self, uid: str, at_s: float, *, is_full: bool) -> None:
        """It is answered without; `is_full` says that there was no room."""
        self.counts.declined += 1
        if is_full:
            self._full_until_s = at_s + FULL_S
        self._end(uid)

    def abandon(self, uid: str, at_s: float) -> None:
        """Nobody waits for the answer any more; the pod comes without a node, and takes what was decided for it."""
        if self._reservations.get(uid) is None:
            return
        self.counts.late += 1
        self._pending.pop(uid, None)
        self._reservations[uid].due_s = at_s + RESERVED_S
        if at_s - self._halved_s >= HALVED_EVERY_S:
            self._pending_most, self._halved_s = max(1.0, self._pending_most / 2.0), at_s

    def is_pending(self, uid: str) -> bool:
        """Whether a review waits for the answer."""
        return uid in self._pending

    def drop(self, uid: str) -> None:
        """There is no place for it any more."""
        self._end(uid)

    def confirm(self, uid: str) -> None:
        """The pod was seen."""
        window = self._end(uid)
        window.size = min(MAX_WINDOW, window.size + 1)
        self.counts.confirmed += 1

    def expire_overdue(self, at_s: float) -> Iterator[str]:
        """Ends reservations whose pods have not come, and yields them."""
        for uid, one in list(self._reservations.items()):
            if one.due_s is not None and one.due_s <= at_s:
                self._end(uid).size = 1
                self.counts.expired += 1
                yield uid

    # Units that the core has from before this gate was there

    def expect(self, unit: str, at_s: float) -> None:
        """A unit has a place and no pod: its pod may have been admitted a moment ago."""
        self._expected[unit] = at_s + RESERVED_S

    def is_expected(self, unit: str) -> bool:
        """Whether a unit's place is kept although nobody has seen its pod."""
        return unit in self._expected

    def stop_expecting(self, unit: str) -> None:
        """Its pod was seen."""
        self._expected.pop(unit, None)

    def expire_expected(self, at_s: float) -> Iterable[str]:
        """Units whose pods have not come."""
        overdue = [unit for unit, due_s in self._expected.items() if due_s <= at_s]
        for unit in overdue:
            del self._expected[unit]
        return overdue

    def _end(self, uid: str) -> _Window:
        self._pending.pop(uid, None)
        window = self._windows.get(self._reservations.pop(uid).namespace, _Window())
        window.used -= 1
        return window

    def _forget_window(self) -> None:
        """Forgets the oldest of those that nobody uses; with all in use, their reservations bound how many there are."""
        unused = next((name for name, window in self._windows.items() if window.used <= 0), None)
        if unused is not None:
            del self._windows[unused]


def describe_change(planned: Pod, seen: Pod) -> str:
    """What a pod requests other than was planned for it; empty where nothing."""
    before, after = planned.requested, seen.requested
    if before == after:
        return ""
    extended = sorted({name for name, _ in (*before.extended, *after.extended)})
    pairs = [
        ("cpu", f"{before.cpu_milli}m", f"{after.cpu_milli}m"),
        ("memory", str(before.memory_bytes), str(after.memory_bytes)),
        *((name, str(before.count(name)), str(after.count(name))) for name in extended),
    ]
    return ", ".join(f"{name} {now} instead of {then}" for name, then, now in pairs if now != then)
