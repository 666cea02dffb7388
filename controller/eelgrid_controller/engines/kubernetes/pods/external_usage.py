"""External usage of each node: pods that Eelgrid did not place, the devices that plans name, and node traits.

A node is reported as a whole whenever it, its external usage or its traits changed. Traits are bounded, with a share
for each namespace and user; pods without one are judged by eligibility instead. Where two plans name one device, the
pod comes first whose place the core holds there, then the one of the older term.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from eelgrid_controller.engines.kubernetes.model.annotations import user_of
from eelgrid_controller.engines.kubernetes.model.node_affinity import trait_name, traits_of
from eelgrid_controller.engines.kubernetes.model.node_inventory import external_usage_on, inventory_of
from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, Pod
from eelgrid_controller.engines.kubernetes.model.quantities import NO_AMOUNTS, ResourceAmounts
from eelgrid_controller.engines.kubernetes.model.selectors import NodeConstraint, remove_pin_terms
from eelgrid_controller.engines.kubernetes.model.well_known import RESOURCE_GPU, RESOURCES_GPU
from eelgrid_controller.engines.kubernetes.pods.eligibility import EligibleNodes
from eelgrid_controller.engines.kubernetes.pods.gate_events import ReplicaPlace
from eelgrid_controller.engines.node_reports import RegisterNode, RemoveNode, ReportUsage
from eelgrid_controller.state import engine_reports
from eelgrid_protos.messages import Inventory


class PlannedPod(NamedTuple):
    """One pod on a node; `devices` are those that its plan names there."""

    node_name: str
    gpu_count: int
    devices: tuple[int, ...] = ()
    epoch: int = 0  # of its plan
    is_held: bool = False  # by the core, at these devices
    is_moving: bool = False  # the core holds others for it: its plan, or the core, is about to change
    requested: ResourceAmounts = NO_AMOUNTS


class PlannedDevices:
    """All nodes."""

    def __init__(self) -> None:
        self._on: dict[str, dict[str, PlannedPod]] = {}  # by node and uid
        self._where: dict[str, str] = {}  # uid -> node

    def put_pod(self, uid: str, pod: PlannedPod | None) -> Iterator[str]:
        """A pod is there now, or nowhere; the uids of others that name devices which it names, or named before."""
        where = self._where.get(uid)
        before = None if where is None else self._on[where].get(uid)
        if before == pod:
            return
        if where is not None:
            del self._on[where][uid]
            del self._where[uid]
        if pod is not None and pod.node_name:
            self._on.setdefault(pod.node_name, {})[uid] = pod
            self._where[uid] = pod.node_name
        for one in (before, pod):
            if one is not None:
                yield from [other for other, _ in self._sharing(one.node_name, one.devices, uid)]

    def planned_devices_of(self, uid: str) -> tuple[int, ...]:
        """The devices that a pod's plan names, in order, if no pod that comes before it names one of them."""
        found = self._on.get(self._where.get(uid, ""), {}).get(uid)
        if found is None or not found.devices:
            return ()
        rank = _rank(uid, found)
        is_first = all(rank < _rank(other, one) for other, one in self._sharing(found.node_name, found.devices, uid))
        return tuple(sorted(found.devices)) if is_first else ()

    def find_rival(self, node_name: str, devices: Iterable[int], uid: str) -> PlannedPod | None:
        """A pod whose plan names one of these devices, too."""
        return next((one for _, one in self._sharing(node_name, devices, uid)), None)

    def count_gpus(self, node_name: str, *, without: str) -> int:
        """How many GPUs pods hold on a node, or will, beside this one."""
        return sum(one.gpu_count for uid, one in self._on.get(node_name, {}).items() if uid != without)

    def node_of(self, uid: str) -> str:
        """Where a pod is, or will be; empty for nowhere."""
        return self._where.get(uid, "")

    def count_pods(self, node_name: str) -> int:
        """How many pods are on a node, or will be."""
        return len(self._on.get(node_name, {}))

    def pods_on(self, node_name: str, *, without: str) -> list[PlannedPod]:
        """Pods that are on a node, or will be, beside this one."""
        return [one for uid, one in self._on.get(node_name, {}).items() if uid != without]

    def _sharing(self, node_name: str, devices: Iterable[int], uid: str) -> Iterator[tuple[str, PlannedPod]]:
        wanted = set(devices)
        if wanted:
            for other, one in self._on.get(node_name, {}).items():
                if other != uid and not wanted.isdisjoint(one.devices):
                    yield other, one


def _rank(uid: str, pod: PlannedPod) -> tuple[bool, int, str]:
    return (not pod.is_held, pod.epoch, uid)


# Each is evaluated on each node when it comes, and is in the journal once for each node that has it.
MAX_TRAITS = 200
# What a report may say of a node.
_CPU_MILLI_MOST, _MEMORY_BYTES_MOST, _GPUS_MOST = 10_000_000, 2**50, 1_000_000
_FULL = "as many pods are there as its kubelet takes"
_AWAITED = "its agent has not said yet what the node has"
# So that nobody's pods make everybody else's slow: a quarter for a namespace, a tenth for one of its users.
MAX_TRAITS_PER_NAMESPACE = 50
MAX_TRAITS_PER_USER = 20


@dataclass(slots=True)
class _Slot:
    constraint: NodeConstraint
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
    def constraints(self) -> list[NodeConstraint]:
        """The demands."""
        return [slot.constraint for slot in self._slots.values()]

    def acquire(self, constraint: NodeConstraint, namespace: str, user: str) -> tuple[str, bool]:
        """The trait of these demands, empty where there is no slot for it, and whether it is new."""
        found = trait_name(constraint)
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
            (own, MAX_TRAITS_PER_USER),
            (charged, MAX_TRAITS_PER_NAMESPACE),
            (list(self._slots.items()), MAX_TRAITS),
        )
        for share, most in shares:
            if sum(found in self._slots for found, _ in share) < most:
                continue
            unused = next((found for found, slot in share if not slot.uses and found in self._slots), None)
            if unused is None:
                return False
            del self._slots[unused]
        return True


class ExternalUsageTracker:
    """Nodes, and the usage on them that Eelgrid did not place."""

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
        self._told: dict[str, engine_reports.ExternalUsage] = {}
        self._dirty: dict[str, bool] = {}  # whether to be told even where it is as it was told
        self._gone: dict[str, None] = {}
        self.rules = EligibleNodes()
        self.slots = TraitSlots()  # of pods that wait, or that may move
        self._stays: dict[str, str] = {}  # the trait of each that may move, by uid

    def update_node(self, node: KubeNode, *, has_agent: bool, awaits_agent: bool = False) -> None:
        """A node was added or changed."""
        (self._awaited.add if awaits_agent else self._awaited.discard)(node.name)
        self._nodes[node.name] = node
        self.rules.set_node(node)
        self._gone.pop(node.name, None)
        (self._agents.add if has_agent else self._agents.discard)(node.name)
        self._mark(node.name)

    def remove_node(self, name: str) -> None:
        """A node was deleted."""
        if self._nodes.pop(name, None) is not None:
            self.rules.remove_node(name)
            self._gone[name] = None
            self._dirty.pop(name, None)

    def on_node_acknowledged(self, name: str) -> None:
        """The core has taken a node: what it was told of it before may be lost."""
        if name not in self._joined or name in self._agents:
            self._told.pop(name, None)
            self._mark(name)
        self._known.add(name)

    def on_report_failed(self, name: str) -> None:
        """The report failed; it is repeated."""
        self._joined.pop(name, None)
        self._told.pop(name, None)
        self._mark(name)

    def is_reported(self, name: str) -> bool:
        """Whether the core was told of a node and of what others hold there."""
        return name in self._nodes and name in self._told

    def set_claim_gpus(self, name: str, gpu_count: int) -> None:
        """So many GPUs of a node are given by claims: to the core they are another's, used or not."""
        self._sliced[name] = gpu_count
        self._mark(name)

    def is_open(self, name: str, *, uid: str = "") -> bool:
        """Whether more may be placed on a node now, room apart; a pod that is counted there does not close it to itself."""
        told = self._told.get(name)
        if told is None or name not in self._nodes:
            return False
        return not told.closed or (told.closed == _FULL and bool(uid) and self.planned.node_of(uid) == name)

    def on_places_changed(self, before: Iterable[ReplicaPlace], after: Iterable[ReplicaPlace]) -> None:
        """The core counts what leaves these places as what others hold, until it is told what they do hold."""
        for name in {one.node_name for one in before} - {one.node_name for one in after}:
            self._mark(name, again=True)

    def free_gpus(self, name: str, *, without: str) -> int:
        """How many GPUs of a node no pod holds or is on its way to, beside the one with this uid."""
        node = self._nodes.get(name)
        there = 0 if node is None else node.allocatable.count(RESOURCE_GPU)
        return there - self.planned.count_gpus(name, without=without)

    def put_planned(self, uid: str, planned: PlannedPod | None) -> Iterator[str]:
        """A pod holds this now; the uids of others whose plans name the same devices."""
        before = self.planned.node_of(uid)
        names = {before, "" if planned is None else planned.node_name} - {""}
        were_full = {name for name in names if self._is_full(name)}
        shared = list(self.planned.put_pod(uid, planned))
        for name in names:
            if self._is_full(name) is not (name in were_full):
                self._mark(name)
        return iter(shared)

    def _is_full(self, name: str) -> bool:
        node = self._nodes.get(name)
        return node is not None and node.pods_most is not None and self.planned.count_pods(name) >= node.pods_most

    def has_room(self, pod: Pod, node_name: str, beside: Sequence[Pod] = ()) -> bool:
        """Whether a node has room for a pod by what all pods of the API server request there, and these `beside`."""
        node = self._nodes.get(node_name)
        if node is None:
            return False
        held = [one.requested for one in self.planned.pods_on(node_name, without=pod.uid)]
        held += [pod.requested, *(one.requested for one in beside)]
        there = node.allocatable
        return (
            (node.pods_most is None or len(held) <= node.pods_most)
            and sum(one.cpu_milli for one in held) <= there.cpu_milli
            and sum(one.memory_bytes for one in held) <= there.memory_bytes
            and all(
                sum(one.count(name) for one in held) <= there.count(name)
                for name in RESOURCES_GPU
                if pod.requested.count(name)
            )
        )

    def used_gpus(self, name: str) -> int:
        """GPUs that pods placed by others hold on a node."""
        told = self._told.get(name)
        return 0 if told is None else told.gpu_count

    def put_pod(self, pod: Pod, node_name: str, devices: tuple[int, ...] = ()) -> None:
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

    def remove_pod(self, uid: str) -> None:
        """A pod was deleted, or is placed by Eelgrid now."""
        self.release_demand(self._stays.pop(uid, ""))
        before = self._where.pop(uid, "")
        self._devices.pop(uid, None)
        if before:
            self._pods[before].pop(uid, None)
            self._mark(before, again=True)

    def register_mobile_pod(self, pod: Pod) -> None:
        """A pod that stands may move: nobody can say where to, unless it is known which nodes meet its demands."""
        if pod.uid not in self._stays:
            self._stays[pod.uid] = self.register_demand(pod, remove_pin_terms(pod.constraint))

    def register_demand(self, pod: Pod, constraint: NodeConstraint) -> str:
        """A pod waits with these demands; the trait that says so, empty where there is no slot for it."""
        found, is_new = self.slots.acquire(constraint, pod.namespace, user_of(pod.annotations, pod.labels))
        if is_new:
            for name in self._nodes:
                self._mark(name)
        return found

    def release_demand(self, found: str) -> None:
        """A pod does not wait any longer."""
        self.slots.release(found)

    def flush_reports(self) -> Iterator[RegisterNode | RemoveNode | ReportUsage]:
        """What the core does not know yet."""
        dirty, self._dirty = self._dirty, {}
        gone, self._gone = self._gone, {}
        for name in gone:
            self._told.pop(name, None)
            self._known.discard(name)
            if self._joined.pop(name, None) is not None:
                yield RemoveNode(name)
        for name, again in dirty.items():
            node = self._nodes.get(name)
            if node is not None:
                yield from self._report_node(node, again=again)
            elif name in self._known and self._told.get(name) != engine_reports.NO_EXTERNAL_USAGE:
                # Of the core's nodes one that this cluster does not have: no pod can be there.
                self._told[name] = engine_reports.NO_EXTERNAL_USAGE
                yield ReportUsage(name, engine_reports.NO_EXTERNAL_USAGE)

    def _mark(self, name: str, *, again: bool = False) -> None:
        self._dirty[name] = again or self._dirty.get(name, False)

    def _report_node(self, node: KubeNode, *, again: bool) -> Iterator[RegisterNode | ReportUsage]:
        name = node.name
        if name in self._agents:
            self._joined.pop(name, None)
        else:
            inventory = inventory_of(node)
            if inventory is not None and self._joined.get(name) != inventory:
                self._joined[name] = inventory
                self._told.pop(name, None)
                self._known.add(name)
                yield RegisterNode(inventory)
        if name not in self._known:
            return
        held = external_usage_on(node, self._pods.get(name, {}).values())
        if name in self._agents:
            # Agents tell what a machine has, the kubelet what of it pods may have.
            held = replace(
                held,
                cpu_milli=held.cpu_milli + max(0, node.capacity.cpu_milli - node.allocatable.cpu_milli),
                memory_bytes=held.memory_bytes + max(0, node.capacity.memory_bytes - node.allocatable.memory_bytes),
            )
        traits = tuple(sorted(traits_of(node, self.slots.constraints)))
        named = {index for uid in self._pods.get(name, ()) for index in self._devices.get(uid, ())}
        # Of pods that ask for more than any node has, as much as the core takes: the rest of the report is true all the same.
        told = replace(
            held,
            cpu_milli=min(held.cpu_milli, _CPU_MILLI_MOST),
            memory_bytes=min(held.memory_bytes, _MEMORY_BYTES_MOST),
            gpu_count=min(max(held.gpu_count, self._sliced.get(name, 0)), _GPUS_MOST),
            gpu_indexes=tuple(sorted(named)),
            traits=traits,
            closed=held.closed or (_AWAITED if name in self._awaited else "") or (_FULL if self._is_full(name) else ""),
        )
        if again or self._told.get(name) != told:
            self._told[name] = told
            yield ReportUsage(name, told)
