"""What the core is told of nodes: those without an agent, what others hold on each, and which demands each meets.

Owns the pods that Eelgrid did not place, by node, and what was last told. Must not know why
a pod is another's.

Theory. A node is told anew when what it is, what others hold on it, or the demands that
pods make, have changed, and then as a whole; so it does not matter what was lost before. Devices
that plans name are told by name, so that nothing else is taken for them. A node whose agent has
not said yet what it has is told as closed.
Each set of demands has a trait of its own (constraints.py), as long as there are slots: a node
is told a bounded number of traits, of which one namespace, and one user in it, has a share.
Slots that no pod uses any more go first. Pods without a slot lose nothing but speed: which
nodes will do for them is asked when they are placed (eligibility.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from eelgrid_controller import occupancy
from eelgrid_controller.kubernetes.annotations import user_of
from eelgrid_controller.kubernetes.constraints import Constraint, trait, traits_of
from eelgrid_controller.kubernetes.eligibility import EligibleNodes
from eelgrid_controller.kubernetes.gate_events import Join, Leave, Occupy, Place
from eelgrid_controller.kubernetes.names import RESOURCE_GPU
from eelgrid_controller.kubernetes.nodes import inventory_of, occupied
from eelgrid_controller.kubernetes.planned_devices import PlannedDevices
from eelgrid_controller.kubernetes.selectors import unpinned
from eelgrid_controller.kubernetes.views import KubeNode, Pod
from eelgrid_protos.messages import Inventory

__all__ = ["TRAITS_MOST", "TRAITS_PER_NAMESPACE_MOST", "TRAITS_PER_USER_MOST", "Others", "TraitSlots"]

# Each is evaluated on each node when it comes, and is in the journal once for each node that has it.
TRAITS_MOST = 200
_AWAITED = "its agent has not said yet what the node has"
# So that nobody's pods make everybody else's slow: a quarter for a namespace, a tenth for one of its users.
TRAITS_PER_NAMESPACE_MOST = 50
TRAITS_PER_USER_MOST = 20


@dataclass(slots=True)
class _Slot:
    constraint: Constraint
    namespace: str
    user: str
    uses: int = 0


class TraitSlots:
    """The sets of demands that nodes are told traits of, each charged to who first made it."""

    def __init__(self) -> None:
        self._slots: dict[str, _Slot] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._slots)

    @property
    def constraints(self) -> list[Constraint]:
        """The demands."""
        return [slot.constraint for slot in self._slots.values()]

    def take(self, constraint: Constraint, namespace: str, user: str) -> tuple[str, bool]:
        """The trait of these demands, empty where there is no slot for it, and whether it is new."""
        found = trait(constraint)
        slot = self._slots.get(found)
        is_new = slot is None
        if slot is None:
            if not self._has_room(namespace, user):
                return "", False
            slot = self._slots[found] = _Slot(constraint, namespace, user)
        slot.uses += 1
        return found, is_new

    def release(self, found: str) -> None:
        """A pod has no use for its trait any more."""
        slot = self._slots.get(found)
        if slot is not None:
            slot.uses -= 1

    def _has_room(self, namespace: str, user: str) -> bool:
        """Whether there is a slot for these, once those that nobody uses are evicted."""
        charged = [(found, slot) for found, slot in self._slots.items() if slot.namespace == namespace]
        own = [(found, slot) for found, slot in charged if slot.user == user]
        shares = (
            (own, TRAITS_PER_USER_MOST),
            (charged, TRAITS_PER_NAMESPACE_MOST),
            (list(self._slots.items()), TRAITS_MOST),
        )
        for share, most in shares:
            if sum(found in self._slots for found, _ in share) < most:
                continue
            unused = next((found for found, slot in share if not slot.uses and found in self._slots), None)
            if unused is None:
                return False
            del self._slots[unused]
        return True


class Others:
    """Nodes, and what is on them that is not ours."""

    def __init__(self) -> None:
        self.planned = PlannedDevices()
        self._nodes: dict[str, KubeNode] = {}
        self._devices: dict[str, tuple[int, ...]] = {}  # by uid, of pods that are counted here
        self._awaited: set[str] = set()  # nodes whose agents have not said yet what these have
        self._pods: dict[str, dict[str, Pod]] = {}  # by node and uid
        self._where: dict[str, str] = {}  # uid -> node
        self._agents: set[str] = set()
        self._known: set[str] = set()  # the core knows them
        self._sliced: dict[str, int] = {}  # GPUs that claims alone give
        self._joined: dict[str, Inventory] = {}  # as told
        self._told: dict[str, occupancy.Others] = {}
        self._dirty: dict[str, bool] = {}  # whether to be told even where it is as it was told
        self._gone: dict[str, None] = {}
        self.rules = EligibleNodes()
        self.slots = TraitSlots()  # of pods that wait, or that may move
        self._stays: dict[str, str] = {}  # the trait of each that may move, by uid

    def node(self, node: KubeNode, *, has_agent: bool, awaits_agent: bool = False) -> None:
        """A node as it is now."""
        (self._awaited.add if awaits_agent else self._awaited.discard)(node.name)
        self._nodes[node.name] = node
        self.rules.set_node(node)
        self._gone.pop(node.name, None)
        (self._agents.add if has_agent else self._agents.discard)(node.name)
        self._mark(node.name)

    def node_gone(self, name: str) -> None:
        """A node that is no more."""
        if self._nodes.pop(name, None) is not None:
            self.rules.remove_node(name)
            self._gone[name] = None
            self._dirty.pop(name, None)

    def known(self, name: str) -> None:
        """The core has taken a node: what it was told of it before may be lost."""
        if name not in self._joined or name in self._agents:
            self._told.pop(name, None)
            self._mark(name)
        self._known.add(name)

    def untold(self, name: str) -> None:
        """The core could not be told; it is told again."""
        self._joined.pop(name, None)
        self._told.pop(name, None)
        self._mark(name)

    def knows(self, name: str) -> bool:
        """Whether the core was told of a node and of what others hold there."""
        return name in self._nodes and name in self._told

    def has_agent(self, name: str) -> bool:
        """Whether an agent speaks for a node."""
        return name in self._agents

    def sliced(self, name: str, gpu_count: int) -> None:
        """So many GPUs of a node are given by claims: to the core they are another's, used or not."""
        self._sliced[name] = gpu_count
        self._mark(name)

    def is_open(self, name: str) -> bool:
        """Whether more may be placed on a node now, room apart."""
        told = self._told.get(name)
        return name in self._nodes and told is not None and not told.closed

    def moved(self, before: Iterable[Place], after: Iterable[Place]) -> None:
        """The core counts what leaves these places as what others hold, until it is told what they do hold."""
        for name in {one.node_name for one in before} - {one.node_name for one in after}:
            self._mark(name, again=True)

    def gpu_room(self, name: str, *, without: str) -> int:
        """How many GPUs of a node no pod holds or is on its way to, beside the one with this uid."""
        node = self._nodes.get(name)
        there = 0 if node is None else node.allocatable.count(RESOURCE_GPU)
        return there - self.planned.gpus(name, without=without)

    def gpus(self, name: str) -> int:
        """How many GPUs others hold on a node."""
        told = self._told.get(name)
        return 0 if told is None else told.gpu_count

    def put(self, pod: Pod, node_name: str, devices: tuple[int, ...] = ()) -> None:
        """A pod that the core does not hold is on a node, or can only go there; nowhere, where that is empty.

        One that the core took over from among them it counts no more by itself: it is told of the rest also where
        another like it has come in the meantime.
        """
        before = self._where.get(pod.uid, "")
        if before and before != node_name:
            self._pods[before].pop(pod.uid, None)
            self._mark(before, again=True)
        if not node_name:
            self._where.pop(pod.uid, None)
            self._devices.pop(pod.uid, None)
            return
        held = self._pods.setdefault(node_name, {})
        old = held.get(pod.uid)
        # What is pinned to a node holds its place there already.
        held[pod.uid] = pod if pod.node_name else replace(pod, node_name=node_name)
        self._where[pod.uid] = node_name
        is_other = self._devices.get(pod.uid, ()) != devices
        self._devices[pod.uid] = devices
        if is_other or old is None or old.requested != pod.requested or old.is_terminal != pod.is_terminal:
            self._mark(node_name)

    def remove(self, uid: str) -> None:
        """A pod that is no more, or is ours now."""
        self.release(self._stays.pop(uid, ""))
        before = self._where.pop(uid, "")
        self._devices.pop(uid, None)
        if before:
            self._pods[before].pop(uid, None)
            self._mark(before, again=True)

    def stays(self, pod: Pod) -> None:
        """A pod that stands may move: nobody can say where to, unless it is known which nodes meet its demands."""
        if pod.uid not in self._stays:
            self._stays[pod.uid] = self.want(pod, unpinned(pod.constraint))

    def want(self, pod: Pod, constraint: Constraint) -> str:
        """A pod waits with these demands; the trait that says so, empty where there is no slot for it."""
        found, is_new = self.slots.take(constraint, pod.namespace, user_of(pod.annotations, pod.labels))
        if is_new:
            for name in self._nodes:
                self._mark(name)
        return found

    def release(self, found: str) -> None:
        """A pod waits no more."""
        self.slots.release(found)

    def flush(self) -> Iterator[Join | Leave | Occupy]:
        """What the core does not know yet."""
        dirty, self._dirty = self._dirty, {}
        gone, self._gone = self._gone, {}
        for name in gone:
            self._told.pop(name, None)
            self._known.discard(name)
            if self._joined.pop(name, None) is not None:
                yield Leave(name)
        for name, again in dirty.items():
            node = self._nodes.get(name)
            if node is not None:
                yield from self._tell(node, again=again)
            elif name in self._known and self._told.get(name) != occupancy.NOBODY:
                # Of the core's nodes one that this cluster does not have: no pod can be there.
                self._told[name] = occupancy.NOBODY
                yield Occupy(name, occupancy.NOBODY)

    def _mark(self, name: str, *, again: bool = False) -> None:
        self._dirty[name] = again or self._dirty.get(name, False)

    def _tell(self, node: KubeNode, *, again: bool) -> Iterator[Join | Occupy]:
        name = node.name
        if name in self._agents:
            self._joined.pop(name, None)
        else:
            inventory = inventory_of(node)
            if inventory is not None and self._joined.get(name) != inventory:
                self._joined[name] = inventory
                self._told.pop(name, None)
                self._known.add(name)
                yield Join(inventory)
        if name not in self._known:
            return
        held = occupied(node, self._pods.get(name, {}).values())
        traits = tuple(sorted(traits_of(node, self.slots.constraints)))
        named = {index for uid in self._pods.get(name, ()) for index in self._devices.get(uid, ())}
        told = replace(
            held,
            gpu_count=max(held.gpu_count, self._sliced.get(name, 0)),
            gpu_indexes=tuple(sorted(named)),
            traits=traits,
            closed=held.closed or (_AWAITED if name in self._awaited else ""),
        )
        if again or self._told.get(name) != told:
            self._told[name] = told
            yield Occupy(name, told)
