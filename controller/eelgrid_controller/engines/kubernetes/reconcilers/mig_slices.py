"""MIG slices: which node and which existing slices each pod that requests some gets, and taints of nodes in repartition.

The node is taken on which the fewest GPUs are woken, then the one whose GPUs keep the least free; slices come from
the fullest GPU in use first. The agent's device plugin uses the same rule.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.kubernetes.api.informer import Delta
from eelgrid_controller.engines.kubernetes.api.port import NODES, ObjectKey, PatchKind
from eelgrid_controller.engines.kubernetes.model.node_affinity import find_unmet_rule
from eelgrid_controller.engines.kubernetes.model.node_inventory import closed_reason
from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, Pod, parse_node, parse_pod
from eelgrid_controller.engines.kubernetes.model.pod_group import GroupMember, IntentRefusal, PodKey
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.model.status_reporting import EventReference
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_PLAN,
    RESOURCE_MIG_PREFIX,
    TAINT_REPARTITION,
)
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    DeleteFailed,
    GateEvent,
    GateInstruction,
    PatchFailed,
    RecordEvent,
    RecreatePod,
    RemoveGate,
    UngatePod,
    WriteFailure,
)
from eelgrid_controller.engines.kubernetes.pods.inflight import DeviceLane, InflightPods, UnboundPodWatchdog
from eelgrid_controller.engines.kubernetes.pods.intent import (
    SLICE_UNIT_PREFIX,
    WorkloadIntent,
    parse_slice_intent,
    requested_slices,
    requests_slices,
)
from eelgrid_controller.engines.kubernetes.pods.migration import TaintTimers, is_tainted, taint_patch
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import PodPlan, format_plan, pinned_node, plan_for_pod
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import ReconcilerContext
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import CLUSTER_KEY, ParseCache, Reconciler, Result
from eelgrid_controller.engines.kubernetes.reconcilers.writers import PodWriter
from eelgrid_controller.state.mig_layouts import is_layout_complete
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import is_pool_enforced
from eelgrid_controller.state.telemetry import DeviceReport


class OfferedMigSlice(NamedTuple):
    """A MIG slice that exists; `size` in memory slices."""

    uuid: str
    gpu_index: int
    start: int
    size: int


class SliceOffer(NamedTuple):
    """What a node has left, by resource; `slices` only where they are known, `used` are memory slices held by GPU."""

    node_name: str
    cpu_milli: int
    memory_bytes: int
    left: Mapping[str, int]
    slices: Mapping[str, Sequence[OfferedMigSlice]] | None = None
    used: Mapping[int, int] = {}
    is_awake: bool = False


class SlicePlacement(NamedTuple):
    """Where a pod goes; the slices are empty where the node's plugin chooses."""

    node_name: str
    slices: tuple[OfferedMigSlice, ...] = ()


def choose_slices(
    wanted: Sequence[tuple[str, int]], cpu_milli: int, memory_bytes: int, offers: Iterable[SliceOffer]
) -> SlicePlacement | None:
    """The place for one pod, None without any; `wanted` are counts by resource."""
    best: tuple[tuple[int, int, str], SlicePlacement] | None = None
    for offer in offers:
        if cpu_milli > max(0, offer.cpu_milli) or memory_bytes > max(0, offer.memory_bytes):
            continue
        if any(offer.left.get(resource, 0) < count for resource, count in wanted):
            continue
        found = _on(wanted, offer)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else best[1]


def select_fullest(free: Sequence[OfferedMigSlice], used: Mapping[int, int], count: int) -> tuple[OfferedMigSlice, ...]:
    """So many of the free slices: on GPUs in use first, the fullest of them; fewer where there are fewer."""
    left = sorted(free, key=lambda one: (one.gpu_index, one.start))
    held = dict(used)
    chosen: list[OfferedMigSlice] = []
    while left and len(chosen) < count:
        room = Counter(one.gpu_index for one in left)
        most = count - len(chosen)

        def order(one: OfferedMigSlice, room: Counter[int] = room, most: int = most) -> tuple[bool, int, int, int, int]:
            is_asleep = one.gpu_index not in held
            gain = min(room[one.gpu_index], most) if is_asleep else 0
            return is_asleep, -gain, -held.get(one.gpu_index, 0), one.gpu_index, one.start

        best = min(left, key=order)
        chosen.append(best)
        left.remove(best)
        held[best.gpu_index] = held.get(best.gpu_index, 0) + best.size
    return tuple(chosen)


def _on(wanted: Sequence[tuple[str, int]], offer: SliceOffer) -> tuple[tuple[int, int, str], SlicePlacement] | None:
    """The choice on one node and its rank: GPUs woken, memory slices left free on its GPUs, name."""
    if offer.slices is None:
        spare = sum(offer.left.values()) - sum(count for _, count in wanted)
        return (0 if offer.is_awake else 1, spare, offer.node_name), SlicePlacement(offer.node_name)
    used = dict(offer.used)
    chosen: list[OfferedMigSlice] = []
    for resource, count in wanted:
        found = select_fullest(offer.slices.get(resource, ()), used, count)
        if len(found) < count:
            return None
        chosen += found
        for one in found:
            used[one.gpu_index] = used.get(one.gpu_index, 0) + one.size
    on = {one.gpu_index for one in chosen}
    taken = {one.uuid for one in chosen}
    spare = sum(
        one.size for some in offer.slices.values() for one in some if one.gpu_index in on and one.uuid not in taken
    )
    return (len(on - offer.used.keys()), spare, offer.node_name), SlicePlacement(offer.node_name, tuple(chosen))


_RESERVED_S = 3.0  # after which what stands on a node is counted there by everybody
_RETRY_S = {WriteFailure.FORBIDDEN: 60.0, WriteFailure.INVALID: 300.0, WriteFailure.BUSY: 5.0}


@dataclass(frozen=True, slots=True)
class SlicePod(GroupMember):
    """A pod that asks for slices, always a group of its own, and what its people want where it still waits for us."""

    found: Pod
    pin: str = ""
    intent: WorkloadIntent | IntentRefusal | None = None

    @property
    def pod(self) -> Pod:
        """The pod as it was seen last."""
        return self.found

    @property
    def pinned(self) -> str:
        """The one node that its affinity allows; empty for any."""
        return self.pin


@dataclass(slots=True)
class _Given:
    """A place that was given; since when the pod was seen to stand there."""

    key: PodKey
    choice: SlicePlacement
    version: str
    stands_s: float | None = None


class SlicePodScheduler:
    """All of them; see the module."""

    def __init__(self, *, unbound_s: float, flight_s: float) -> None:
        self.flights = InflightPods(most_s=flight_s)
        self._watchdog = UnboundPodWatchdog(unbound_s=unbound_s)
        self._given: dict[str, _Given] = {}
        self._later: dict[str, float] = {}  # uid -> not before
        self._told: dict[str, str] = {}

    def on_failure(self, uid: str, failure: WriteFailure, at_s: float) -> None:
        """A pod was not let go."""
        self._given.pop(uid, None)
        list(self.flights.record_end(uid))
        self._later[uid] = at_s + _RETRY_S.get(failure, 1.0)

    def on_devices_reported(self, node_name: str, held: Mapping[PodKey, tuple[str, ...]], *, steers: bool) -> None:
        """A node says what its pods hold: what they were given is not held back for them any more."""
        list(self.flights.set_steered(node_name, is_so=steers))
        list(self.flights.on_devices_reported(node_name, held))
        for uid, given in list(self._given.items()):
            if given.choice.node_name == node_name and given.stands_s is not None and given.key in held:
                del self._given[uid]

    def schedule_pods(
        self,
        pods: Mapping[str, SlicePod],
        nodes: Mapping[str, KubeNode],
        offers: Iterable[SliceOffer],
        epoch: int,
        at_s: float,
    ) -> list[GateInstruction]:
        """What is to be done now; `offers` take no account of what was given and is not seen yet."""
        self._forget_missing(pods, at_s)
        list(self.flights.expire_overdue(at_s))
        open_ = {one.node_name: one for one in offers if one.node_name in nodes}
        for uid, given in self._given.items():
            name = given.choice.node_name
            if uid in pods and name in open_:
                open_[name] = _less(open_[name], pods[uid].pod, given, pods[uid].target_node)
        right: dict[object, list[str]] = {}
        told = list(self._overdue(pods, epoch, at_s))
        waiting = [one for one in pods.values() if one.is_waiting and one.pod.uid not in self._given]
        for one in sorted(waiting, key=lambda it: (-it.pod.priority, it.pod.created_s or 0.0, it.pod.name)):
            if self._later.get(one.pod.uid, 0.0) > at_s:
                continue
            if one.pod.constraint not in right:
                right[one.pod.constraint] = [
                    name
                    for name in open_
                    if not closed_reason(nodes[name]) and not find_unmet_rule(one.pod.constraint, nodes[name])
                ]
            told += self._schedule_pod(one, open_, right[one.pod.constraint], epoch, at_s)
        return told

    def _schedule_pod(
        self, one: SlicePod, offers: dict[str, SliceOffer], right: list[str], epoch: int, at_s: float
    ) -> Iterator[GateInstruction]:
        pod, intent = one.pod, one.intent
        key = PodKey(pod.namespace, pod.name)
        if not isinstance(intent, WorkloadIntent):
            if intent is None or intent.needs is not None:
                return
            if intent.is_released:
                self._later[pod.uid] = at_s + _RETRY_S[WriteFailure.BUSY]
                yield RemoveGate(pod.uid, key, pod.resource_version, epoch, str(intent))
                return
            yield from self._event_if_new(one, f"not placed: {intent}", is_warning=True)
            return
        if intent.waits_for:
            yield from self._event_if_new(one, f"waits for other scheduling gates: {', '.join(intent.waits_for)}")
            return
        wanted = requested_slices(pod)
        unit = f"{SLICE_UNIT_PREFIX}{pod.uid}"
        free = [
            offers[name]
            for name in right
            if self.flights.can_start(unit, (DeviceLane(name, resource) for resource, _ in wanted))
        ]
        choice = choose_slices(wanted, pod.requested.cpu_milli, pod.requested.memory_bytes, free)
        if choice is None:
            if len(free) == len(right):
                text = ", ".join(f"{count} of {name}" for name, count in wanted)
                yield from self._event_if_new(
                    one, f"waits: no node that it may use has the CPU, the memory and {text} free"
                )
            return
        for resource, _ in wanted:
            self.flights.record_start(unit, pod.uid, key, DeviceLane(choice.node_name, resource), at_s)
        given = self._given[pod.uid] = _Given(key, choice, pod.resource_version)
        offers[choice.node_name] = _less(offers[choice.node_name], pod, given, "")
        plan = PodPlan(
            epoch,
            unit,
            0,
            choice.node_name,
            tuple(it.gpu_index for it in choice.slices),
            wanted[0][0].removeprefix(RESOURCE_MIG_PREFIX),
            pod.uid,
        )
        yield UngatePod(pod.uid, key, pod.resource_version, choice.node_name, format_plan(plan), epoch)

    def _forget_missing(self, pods: Mapping[str, SlicePod], at_s: float) -> None:
        for uid in [uid for uid in self._told if uid not in pods]:
            del self._told[uid]
        for uid in [uid for uid in self._later if uid not in pods]:
            del self._later[uid]
        for uid, given in list(self._given.items()):
            one = pods.get(uid)
            if one is None or one.pod.is_terminal:
                list(self.flights.record_end(uid))
                del self._given[uid]
            elif one.target_node == given.choice.node_name:
                given.stands_s = at_s if given.stands_s is None else given.stands_s
                # Its slices are its own until its node has said which it has.
                if at_s - given.stands_s >= max(_RESERVED_S, self.flights.most_s):
                    del self._given[uid]
            elif one.is_waiting and one.pod.resource_version != given.version:
                del self._given[uid]  # somebody changed it, so our patch was refused

    def _overdue(self, pods: Mapping[str, SlicePod], epoch: int, at_s: float) -> Iterator[GateInstruction]:
        for uid, one in pods.items():
            is_stuck = bool(one.pinned) and not one.pod.node_name and one.pod.unscheduled == "Unschedulable"
            if is_stuck and not one.pod.gates and not one.pod.is_deleting:
                self._watchdog.watch_pod(uid, at_s)
            else:
                self._watchdog.forget_pod(uid)
        for uid, waited_s in self._watchdog.overdue_pods(at_s):
            if uid not in pods:
                self._watchdog.forget_pod(uid)
                continue
            one = pods[uid]
            why = f"{one.pinned} does not take it: {one.pod.unscheduled_message or 'it cannot be scheduled there'}"
            if one.pod.owner is None:
                yield from self._event_if_new(
                    one, f"{why}; it has no controller, so delete it and create it again", is_warning=True
                )
            elif self._watchdog.may_recreate(one.pod.owner.uid, waited_s, at_s):
                self._watchdog.record_recreation(one.pod.owner.uid, waited_s, at_s)
                self._watchdog.restart_wait(uid, at_s)
                yield from self._event_if_new(one, f"recreated: {why}", is_warning=True)
                yield RecreatePod(uid, one.key, epoch, why)

    def _event_if_new(self, one: SlicePod, text: str, *, is_warning: bool = False) -> Iterator[RecordEvent]:
        if self._told.get(one.pod.uid) != text:
            self._told[one.pod.uid] = text
            yield RecordEvent(one.pod.uid, one.key, text, is_warning)


def _less(offer: SliceOffer, pod: Pod, given: _Given, target: str) -> SliceOffer:
    """An offer without what was given of it; what a pod that stands there is counted for already is left alone."""
    taken = {one.uuid for one in given.choice.slices}
    slices = offer.slices and {
        name: tuple(one for one in some if one.uuid not in taken) for name, some in offer.slices.items()
    }
    used = dict(offer.used)
    for some in (offer.slices or {}).values():
        for one in some:
            if one.uuid in taken:
                used[one.gpu_index] = used.get(one.gpu_index, 0) + one.size
    left = dict(offer.left)
    if not target:
        for resource, count in requested_slices(pod):
            left[resource] = left.get(resource, 0) - count
    is_counted = target != "" and given.stands_s is not None
    cpu_milli = 0 if is_counted else pod.requested.cpu_milli
    memory_bytes = 0 if is_counted else pod.requested.memory_bytes
    return offer._replace(
        cpu_milli=offer.cpu_milli - cpu_milli,
        memory_bytes=offer.memory_bytes - memory_bytes,
        left=left,
        slices=slices,
        used=used,
        is_awake=True,
    )


_TICK_S = 1.0


class SlicePodReconciler(Reconciler[str]):
    """Places pods that request MIG slices on nodes that have them."""

    rest_s = 0.2

    def __init__(self, surroundings: ReconcilerContext) -> None:
        super().__init__(surroundings, "slices")
        engine, settings = surroundings.engine, surroundings.engine.settings
        engine.leaves_slices = True
        self.machine = SlicePodScheduler(unbound_s=settings.gate.unbound_s, flight_s=settings.gate.flight_s)
        self._around = surroundings
        self._pods: dict[str, SlicePod] = {}
        self._nodes: ParseCache[ObjectKey, KubeNode] = ParseCache(parse_node)
        self._writes = PodWriter(self, pods=lambda: engine.pods.objects, feed=self._on_write_result)
        engine.add_pod_listener(self._on_pods)
        surroundings.devices.listeners.append(self._on_device_report)

    def is_ready(self) -> bool:
        """While this one leads and knows all pods."""
        return super().is_ready() and self._around.engine.gate.is_synced

    async def start(self, _: asyncio.TaskGroup) -> None:
        """Pods and nodes are the engine's."""
        self.queue.add(CLUSTER_KEY)

    def _on_write_result(self, event: GateEvent) -> None:
        """Take the result of a write; deletions are repeated by the machine's own watchdog."""
        if isinstance(event, PatchFailed):
            self.machine.on_failure(event.uid, event.failure, self.clock.monotonic_s())
        if not isinstance(event, DeleteFailed):
            self.queue.add(CLUSTER_KEY)

    def _on_device_report(self, node_name: str, report: DeviceReport) -> None:
        held = {PodKey(one.namespace, one.pod): one.device_uuids for one in report.held.pods}
        self.machine.on_devices_reported(node_name, held, steers=report.held.steers)
        self.queue.add(CLUSTER_KEY)

    def _on_pods(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.new is None:
                if self._pods.pop(delta.uid, None) is not None:
                    self.queue.add(CLUSTER_KEY)
            elif _names_slices(delta.new):
                self._pod(delta.new)

    def _pod(self, found: Mapping[str, Any]) -> None:
        try:
            pod = parse_pod(found)
        except KubernetesUnreadable:
            return  # told by the engine
        plan = plan_for_pod(pod.uid, pod.annotations.get(ANNOTATION_PLAN, ""))
        is_ours = plan is not None and plan.workload.startswith(SLICE_UNIT_PREFIX)
        if not requests_slices(pod):
            return
        self._pods[pod.uid] = SlicePod(pod, pinned_node(found) if is_ours else "")
        self.queue.add(CLUSTER_KEY)

    async def reconcile(self, _: str) -> Result | None:
        """Look at all pods that ask for slices: those that wait, and those that are under way."""
        term = self.term()
        if term is not None and self._pods:
            self._schedule_pods(term.epoch)
        return Result(_TICK_S)

    def _schedule_pods(self, epoch: int) -> None:
        is_waiting = False
        for uid, one in self._pods.items():
            if one.is_waiting:
                is_waiting = True
                if one.intent is None or (isinstance(one.intent, IntentRefusal) and one.intent.needs is not None):
                    # Owners are looked up by the engine, which was told of them by the same pod.
                    self._pods[uid] = replace(
                        one,
                        intent=parse_slice_intent(
                            one.pod, self._around.engine.lookups.found, self._around.engine.queue_labels
                        ),
                    )
        nodes = self._offering() if is_waiting else {}
        told = self.machine.schedule_pods(self._pods, nodes, self._offers(nodes), epoch, self.clock.monotonic_s())
        for instruction in told:
            self._do(instruction)

    def _do(self, one: GateInstruction) -> None:
        match one:
            case RecordEvent():
                self.log.info("pod=%s event=%s", one.key, one.text)
                self._around.engine.writes.record_event(one)
            case UngatePod():
                self.log.info("pod=%s node=%s plan=%s", one.key, one.node_name, one.plan)
                self.tasks.start_task(self._writes.ungate(one))
            case RemoveGate() | RecreatePod():
                self.tasks.start_task(self._writes.execute_instruction(one))

    # What is on offer

    def _offering(self) -> dict[str, KubeNode]:
        """Nodes that offer MIG slices, parsed."""
        found, nodes = {}, self._around.engine.nodes.objects
        self._nodes.retain(nodes.keys())
        for key, node in nodes.items():
            allocatable = (node.get("status") or {}).get("allocatable") or {}
            if not any(name.startswith(RESOURCE_MIG_PREFIX) for name in allocatable):
                continue
            parsed = self._nodes.get(key, node)
            if parsed is not None:
                found[key.name] = parsed
        return found

    def _offers(self, nodes: Mapping[str, KubeNode]) -> Iterator[SliceOffer]:
        held: dict[str, dict[str, int]] = {}
        for one in self._pods.values():
            if one.target_node in nodes:
                counts = held.setdefault(one.target_node, {})
                for resource, count in requested_slices(one.pod):
                    counts[resource] = counts.get(resource, 0) + count
        records = self._around.loop.core.state.nodes
        for name, node in nodes.items():
            record = records.get(name)
            if record is None or not record.is_ready or record.others.closed:
                continue
            counts = held.get(name, {})
            left = {
                resource: count - counts.get(resource, 0)
                for resource, count in node.allocatable.extended
                if resource.startswith(RESOURCE_MIG_PREFIX)
            }
            report = self._around.devices.newest.get(name)
            held_uuids = {uuid for pod in report.held.pods for uuid in pod.device_uuids} if report else set()
            slices, used = _known(record, held_uuids) if report else (None, {})
            yield SliceOffer(
                name, record.cpu_left_milli, record.memory_left_bytes, left, slices, used, is_awake=any(counts.values())
            )


def _known(
    record: NodeRecord, held: Collection[str]
) -> tuple[dict[str, tuple[OfferedMigSlice, ...]] | None, dict[int, int]]:
    """The free slices of a node by resource, and the memory slices in use by GPU; None where no instance is known."""
    free: dict[str, list[OfferedMigSlice]] = {}
    used: dict[int, int] = {}
    is_known = False
    for gpu in record.inventory.gpus:
        for instance in gpu.gpu_instances if gpu.mig_enabled else ():
            # An instance that is cut further is no device.
            if len(instance.compute_instances) != 1 or not instance.compute_instances[0].uuid:
                continue
            is_known = True
            one = OfferedMigSlice(instance.compute_instances[0].uuid, gpu.index, instance.start, instance.size)
            if one.uuid in held:
                used[gpu.index] = used.get(gpu.index, 0) + one.size
            elif not (gpu.lost or record.cordon_reason(gpu) or gpu.mig_pending):
                resource = f"{RESOURCE_MIG_PREFIX}{instance.profile.replace('+', '.')}"
                free.setdefault(resource, []).append(one)
    return ({name: tuple(some) for name, some in free.items()}, used) if is_known else (None, {})


def _names_slices(found: Mapping[str, Any]) -> bool:
    """Whether a pod's JSON asks for a slice: most do not, and are not read."""
    spec = found.get("spec") or {}
    containers = (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
    resources = (one.get("resources") or {} for one in containers)
    named = (name for one in resources for part in ("limits", "requests") for name in one.get(part) or ())
    return any(name.startswith(RESOURCE_MIG_PREFIX) for name in named)


class RepartitionTaintReconciler(Reconciler[str]):
    """Keeps new pods off nodes whose GPUs are being repartitioned, by a taint; a key is a node's name."""

    resync_s = _TICK_S

    def __init__(self, around: ReconcilerContext) -> None:
        super().__init__(around, "taints")
        self._around = around
        self._taints = TaintTimers()
        self._wanted: dict[str, str] = {}  # node -> the layout that it waits for
        self._due: dict[str, bool] = {}  # node -> whether its taint is to be put there or removed

    def reset(self) -> None:
        """Forget which nodes are due; the next resync finds them again."""
        self._due.clear()

    def is_ready(self) -> bool:
        """While this one leads and knows all nodes."""
        return super().is_ready() and self._around.engine.nodes.is_synced

    def resync(self) -> None:
        """Compare all nodes with the layouts that the core wants."""
        if not self.is_ready():
            return
        nodes = {key.name: node for key, node in self._around.engine.nodes.objects.items()}
        pending = nodes_with_pending_layout(self._around.loop.core)
        self._wanted = {name: why for name, why in pending.items() if name in nodes}
        tainted = {name for name, node in nodes.items() if is_tainted(node)}
        due = self._taints.taint_changes(self._wanted, tainted, self.clock.monotonic_s())
        for name, is_wanted in due.items():
            if self._due.get(name) is not is_wanted:  # else it is in the queue, perhaps after a failure
                self.queue.add(name)
        self._due = due

    async def reconcile(self, key: str) -> Result | None:
        """Put the taint on a node, or remove it."""
        node, is_wanted = self._around.engine.nodes.objects.get(ObjectKey("", key)), self._due.get(key)
        body = [] if node is None or is_wanted is None else taint_patch(node, wanted=is_wanted)
        if body:
            await self.write(lambda: self.cluster.patch(NODES, key, body, PatchKind.JSON))
        self._due.pop(key, None)
        if not body or is_wanted is None:
            return None
        text = self._taint_text(key, is_wanted=is_wanted)
        self.log.info("node=%s event=%s", key, text)
        self.events.record(
            EventReference("v1", "Node", "", key, key), text, is_warning=False, action="Moving", reason="EelgridMove"
        )
        return None

    def _taint_text(self, name: str, *, is_wanted: bool) -> str:
        if self._taints.is_timed_out(name, self.clock.monotonic_s()):
            missing = self._wanted.get(name, "")
            return f"{TAINT_REPARTITION} removed after {self._taints.most_s:g} s without reaching: {missing}"
        if not is_wanted:
            return f"{TAINT_REPARTITION} removed: its GPUs are partitioned as planned"
        held = self._around.engine.gate.others.used_gpus(name)
        foreign = f"; other pods keep {held} GPUs there" if held else ""
        return f"{TAINT_REPARTITION}: no new pods until {self._wanted[name]}{foreign}"


def nodes_with_pending_layout(core: Core) -> dict[str, str]:
    """Nodes where a layout is wanted that does not stand, and which."""
    found = {}
    for name, record in core.state.nodes.items():
        if not record.layouts or not is_pool_enforced(core.state.policy, record.inventory.pool):
            continue
        laid_out = ((gpu, record.layouts.get(gpu.uuid)) for gpu in record.inventory.gpus)
        missing = [
            str(gpu.index) for gpu, layout in laid_out if layout is not None and not is_layout_complete(gpu, layout)
        ]
        if missing:
            found[name] = f"GPU {', '.join(missing)} is partitioned as planned"
    return found
