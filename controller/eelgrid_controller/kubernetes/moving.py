"""Moves of running pods: which are asked for, which may begin now, and which new pod comes in whose stead.

Owns orders, the bounds on how much moves at once, and the claims of new pods on kept places.
Must not know the steps of one move (`surging.py`, `evicting.py`), nor how anything is written.

Theory. An order is asked for by the core, which has moved a place (then that place is kept,
and the pod that comes in the stead of the old one gets it), or by a drain (then the core
finds a place when the new pod comes). What is asked for twice is asked for once. Moves begin
in the order of asking, at most so many at once, so many an hour, one at a time for each
owner; a pod that came by a move stays for a while. What is fixed, or stands in a pool that
is only observed, is never moved: people hear what would be.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from eelgrid_controller.kubernetes.gate_events import Key
from eelgrid_controller.kubernetes.move_notes import Note
from eelgrid_controller.kubernetes.names import ANNOTATION_CHECKPOINT_GRACE, ANNOTATION_MOVED_AT
from eelgrid_controller.kubernetes.serving import UNIT_PREFIX
from eelgrid_controller.kubernetes.views import Pod
from eelgrid_protos.messages import Mobility

__all__ = ["Bounds", "Going", "Manner", "Mover", "Order", "goes_alone", "manner_of", "mobility_of", "order_of"]

_ORDERS_MOST = 4_096
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much may move."""

    at_once: int = 4  # of one owner: one
    per_hour: int = 60
    again_s: float = 600.0  # until a pod that came by a move may move again
    wait_s: float = 3600.0  # for its turn; what waits longer gives its place back
    gang_most: int = 256
    grace_most_s: float = 3600.0


class Manner(Enum):
    """How a pod is moved."""

    SURGE = auto()
    EVICT = auto()


class Going(NamedTuple):
    """One pod that is to go, and the node where its replica has its place now; empty where none is kept."""

    uid: str
    key: Key
    replica: int
    node_name: str
    to: str = ""


def goes_alone(unit: str, manner: Manner) -> bool:
    """Whether a pod is moved without the others of its unit: services are no gangs."""
    return manner is Manner.SURGE or unit.startswith(UNIT_PREFIX)


class Order(NamedTuple):
    """One move: a pod alone, or a gang as a whole."""

    unit: str
    workload: str  # empty where no place is kept
    manner: Manner
    goes: tuple[Going, ...]
    owner_kind: str
    owner_name: str
    owner_uid: str
    grace_s: float = 0.0
    cause: str = "an operator's order"

    @property
    def name(self) -> str:
        """What it is known by: whatever asks for these pods to go asks for the same."""
        return f"{self.unit}#{self.goes[0].uid}" if goes_alone(self.unit, self.manner) else self.unit


def manner_of(mobility: Mobility, owner_kind: str) -> Manner | None:
    """How what has this mobility is moved; None for what stays."""
    if mobility is Mobility.FIXED or not owner_kind:
        return None
    if mobility is Mobility.RESTARTABLE:
        return Manner.EVICT
    return Manner.SURGE if owner_kind == "ReplicaSet" else None


def mobility_of(pod: Pod) -> Mobility:
    """How its owner lets a pod go that another leader placed, so that nobody here knows what was asked for it."""
    kind = pod.owner.kind if pod.owner is not None else ""
    if kind == "ReplicaSet":
        return Mobility.MOVABLE
    is_saved = ANNOTATION_CHECKPOINT_GRACE in pod.annotations
    return Mobility.RESTARTABLE if kind == "StatefulSet" or (kind and is_saved) else Mobility.FIXED


def order_of(note: Note, pod: Pod, cause: str = "the leader before began it") -> Order:
    """The order behind the note of a make-before-break that another process began."""
    owner = pod.owner
    return Order(
        note.unit, note.workload, Manner.EVICT if note.evict_s else Manner.SURGE,
        (Going(note.uid, Key(pod.namespace, pod.name), note.replica, pod.node_name, note.to),),
        owner.kind if owner else "", owner.name if owner else "", note.owner, 0.0, cause,
    )  # fmt: skip


class Mover:
    """Orders, from being asked for to their end."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.waiting: dict[str, Order] = {}
        self.running: dict[str, Order] = {}
        self.begun = 0
        self.done = 0
        self.failed = 0
        self._offered_s: dict[str, float] = {}
        self._starts_s: deque[float] = deque()
        self._expected: dict[str, list[tuple[Order, Going]]] = {}  # by the owner of the pod to come
        self._claims: dict[str, tuple[Order, Going]] = {}  # uid of a pod that came -> in whose stead

    def knows(self, order: Order) -> bool:
        """Whether the same is asked for, or under way."""
        return order.name in self.waiting or order.name in self.running

    def offer(self, order: Order, now_s: float) -> bool:
        """Ask for a move; False if it is asked for already, or too many are."""
        if self.knows(order) or len(self.waiting) >= _ORDERS_MOST:
            return False
        self.waiting[order.name] = order
        self._offered_s[order.name] = now_s
        return True

    def withdraw(self, name: str) -> None:
        """What has not begun is not asked for any more."""
        self.waiting.pop(name, None)
        self._offered_s.pop(name, None)

    def late(self, now_s: float) -> list[Order]:
        """Orders that have waited for too long."""
        return [one for one in self.waiting.values() if now_s - self._offered_s[one.name] > self.bounds.wait_s]

    def due(self, pods: Callable[[str], Pod | None], now_s: float) -> Iterable[Order]:
        """Orders that may begin now; each counts as begun when it is given."""
        while self._starts_s and now_s - self._starts_s[0] >= _HOUR_S:
            self._starts_s.popleft()
        owners = {order.owner_uid for order in self.running.values()}
        for order in list(self.waiting.values()):
            if len(self.running) >= self.bounds.at_once or len(self._starts_s) >= self.bounds.per_hour:
                return
            if order.owner_uid in owners or self.rests(order, pods, now_s):
                continue
            owners.add(order.owner_uid)
            self._starts_s.append(now_s)
            self.begin(order)
            yield order

    def rests(self, order: Order, pods: Callable[[str], Pod | None], now_s: float) -> bool:
        """Whether one of its pods came by a move a short while ago."""
        for going in order.goes:
            pod = pods(going.uid)
            came_s = _number(pod.annotations.get(ANNOTATION_MOVED_AT, "")) if pod is not None else None
            if came_s is not None and 0.0 <= now_s - came_s < self.bounds.again_s:
                return True
        return False

    def begin(self, order: Order) -> None:
        """A move is under way: pods that come in the stead of its own may claim the kept places."""
        self.withdraw(order.name)
        self.running[order.name] = order
        self.begun += 1
        if order.workload and len(order.goes) == 1:
            self._expected.setdefault(order.owner_uid, []).append((order, order.goes[0]))

    def end(self, order: Order, *, is_done: bool) -> None:
        """A move has ended."""
        if self.running.pop(order.name, None) is None:
            return
        self.done += is_done
        self.failed += not is_done
        left = [one for one in self._expected.pop(order.owner_uid, ()) if one[0].name != order.name]
        if left:
            self._expected[order.owner_uid] = left
        for uid in [uid for uid, one in self._claims.items() if one[0].name == order.name]:
            del self._claims[uid]

    def claim(self, pod: Pod) -> str:
        """The unit whose kept place a pod that is new and waits comes to; empty where there is none."""
        if pod.owner is None or not pod.is_gated or pod.is_going or pod.uid in self._claims:
            return ""
        expected = self._expected.get(pod.owner.uid, [])
        for index, (order, going) in enumerate(expected):
            # A StatefulSet makes the pod of the same name again; whoever else makes pods makes any.
            is_named = order.owner_kind != "StatefulSet" or pod.name == going.key.name
            if pod.uid != going.uid and is_named:
                self._claims[pod.uid] = expected.pop(index)
                return order.unit
        return ""

    def gone(self, uid: str) -> None:
        """A pod is no more; a place that it had claimed may be claimed again."""
        claimed = self._claims.pop(uid, None)
        if claimed is not None and claimed[0].name in self.running:
            self._expected.setdefault(claimed[0].owner_uid, []).append(claimed)

    def claimed_by(self, order: Order) -> list[str]:
        """Uids of the pods that came in the stead of an order's."""
        return [uid for uid, one in self._claims.items() if one[0].name == order.name]


def _number(text: str) -> float | None:
    try:
        return float(text) if 0 < len(text) < 32 else None
    except ValueError:
        return None
