"""Reconcilers of MIG slices: pods that request slices, and taints of nodes that are being repartitioned."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.kubernetes.api.informer import Delta
from eelgrid_controller.engines.kubernetes.api.port import NODES, ObjectKey, PatchKind
from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, parse_node, parse_pod
from eelgrid_controller.engines.kubernetes.model.pod_group import IntentRefusal, PodKey
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
)
from eelgrid_controller.engines.kubernetes.pods.intent import (
    SLICE_UNIT_PREFIX,
    parse_slice_intent,
    requested_slices,
    requests_slices,
)
from eelgrid_controller.engines.kubernetes.pods.mig_slices import (
    OfferedMigSlice,
    SliceOffer,
    SlicePod,
    SlicePodScheduler,
)
from eelgrid_controller.engines.kubernetes.pods.migration import TaintTimers, is_tainted, taint_patch
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import pinned_node, plan_for_pod
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import ReconcilerContext
from eelgrid_controller.engines.kubernetes.reconcilers.pod_writer import PodWriter
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import CLUSTER_KEY, ParseCache, Reconciler, Result
from eelgrid_controller.state.mig_layouts import is_layout_complete
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import is_pool_enforced
from eelgrid_controller.state.telemetry import DeviceReport

_TICK_S = 1.0
_AT_ONCE = 8


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
        self._writes = PodWriter(
            surroundings.cluster,
            pods=lambda: engine.pods.objects,
            leads=self.leads,
            feed=self._on_write_result,
            events=engine.events,
            at_once=_AT_ONCE,
            clock=surroundings.clock,
            rng=surroundings.rng,
            log=self.log,
        )
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
                assert delta.old is not None
                if self._pods.pop(delta.old["metadata"]["uid"], None) is not None:
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
                        one, intent=parse_slice_intent(one.pod, self._around.engine.lookups.found)
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
            case RemoveGate():
                self.tasks.start_task(self._writes.remove_gate(one))
            case RecreatePod():
                self.tasks.start_task(self._writes.delete_for_recreation(one))

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
            slices, used = (None, {}) if report is None else _known(record, _uuids(report))
            yield SliceOffer(
                name, record.cpu_left_milli, record.memory_left_bytes, left, slices, used, is_awake=any(counts.values())
            )


def _uuids(report: DeviceReport) -> frozenset[str]:
    return frozenset(uuid for pod in report.held.pods for uuid in pod.device_uuids)


def _known(
    record: NodeRecord, held: frozenset[str]
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
            elif not (gpu.lost or gpu.cordon or gpu.mig_pending):
                resource = f"{RESOURCE_MIG_PREFIX}{instance.profile.replace('+', '.')}"
                free.setdefault(resource, []).append(one)
    return ({name: tuple(some) for name, some in free.items()}, used) if is_known else (None, {})


def _names_slices(found: Mapping[str, Any]) -> bool:
    """Whether a pod's JSON asks for a slice: most do not, and are not read."""
    spec = found.get("spec") or {}
    return any(map(_asks, (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))))


def _asks(container: Mapping[str, Any]) -> bool:
    resources = container.get("resources") or {}
    named: Iterable[str] = (name for part in ("limits", "requests") for name in resources.get(part) or ())
    return any(name.startswith(RESOURCE_MIG_PREFIX) for name in named)


class RepartitionTaintReconciler(Reconciler[str]):
    """Keeps new pods off nodes whose GPUs are being repartitioned, by a taint; a key is a node's name."""

    resync_s = _TICK_S

    def __init__(self, around: ReconcilerContext) -> None:
        super().__init__(around, "taints")
        self.put = 0
        self.removed = 0
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
        self.put += is_wanted
        self.removed += not is_wanted
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
