"""Reconcilers of MIG slices: pods that request slices, and taints of nodes that are being repartitioned."""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.kubernetes.api.elector import is_of
from eelgrid_controller.engines.kubernetes.api.errors import ClusterError
from eelgrid_controller.engines.kubernetes.api.object_store import Delta
from eelgrid_controller.engines.kubernetes.api.retry import BackgroundTasks
from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, parse_node, parse_pod
from eelgrid_controller.engines.kubernetes.model.owners import IntentRefusal
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_PLAN,
    RESOURCE_MIG_PREFIX,
    TAINT_REPARTITION,
)
from eelgrid_controller.engines.kubernetes.pods.disruption import TaintTimers, is_tainted, taint_patch
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    DeleteFailed,
    GateEvent,
    GateInstruction,
    PatchFailed,
    PodKey,
    RecordEvent,
    RecreatePod,
    RemoveGate,
    UngatePod,
)
from eelgrid_controller.engines.kubernetes.pods.mig_slices import (
    SLICE_UNIT_PREFIX,
    OfferedMigSlice,
    SliceOffer,
    SlicePod,
    SlicePodScheduler,
    parse_slice_intent,
    requested_slices,
    requests_slices,
)
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import pinned_node, plan_for_pod
from eelgrid_controller.engines.kubernetes.reconcilers.move_writer import MoveWriter
from eelgrid_controller.engines.kubernetes.reconcilers.pod_writer import PodWriter
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import ReconcilerContext
from eelgrid_controller.state.mig_layouts import is_layout_complete
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import is_pool_enforced
from eelgrid_controller.state.telemetry import DeviceReport

_LOOK_S = 0.2
_TICK_S = 1.0
_AT_ONCE = 8


class SlicePodReconciler:
    """See the module."""

    def __init__(self, surroundings: ReconcilerContext) -> None:
        engine, settings = surroundings.engine, surroundings.engine.settings
        engine.leaves_slices = True
        self.machine = SlicePodScheduler(unbound_s=settings.gate.unbound_s, flight_s=settings.gate.flight_s)
        self._around = surroundings
        self._pods: dict[str, SlicePod] = {}
        self._nodes: dict[str, tuple[str, KubeNode]] = {}  # with the version that was read
        self._wake = asyncio.Event()
        self._under_way = BackgroundTasks(surroundings.log, "slices")
        self._writes = PodWriter(
            surroundings.cluster,
            pods=lambda: engine.pods.objects,
            leads=self._leads,
            feed=self._on_write_result,
            identity=surroundings.identity,
            at_once=_AT_ONCE,
            clock=surroundings.clock,
            rng=surroundings.rng,
            log=surroundings.log,
        )
        engine.add_pod_listener(self._on_pods)
        surroundings.devices.listeners.append(self._on_device_report)

    def _leads(self, epoch: int) -> bool:
        return is_of(self._around.elector.term(), epoch)

    def _on_write_result(self, event: GateEvent) -> None:
        """What came of a write; deletions are repeated by the machine's own watchdog."""
        if isinstance(event, PatchFailed):
            self.machine.on_failure(event.uid, event.failure, self._around.clock.monotonic_s())
        if not isinstance(event, DeleteFailed):
            self._wake.set()

    def _on_device_report(self, node_name: str, report: DeviceReport) -> None:
        held = {PodKey(one.namespace, one.pod): one.device_uuids for one in report.held.pods}
        self.machine.on_devices_reported(node_name, held, steers=report.held.steers)
        self._wake.set()

    def _on_pods(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.new is None:
                assert delta.old is not None
                if self._pods.pop(delta.old["metadata"]["uid"], None) is not None:
                    self._wake.set()
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
        self._wake.set()

    async def run(self) -> None:
        """Place them until cancelled."""
        try:
            while True:
                term = self._around.elector.term()
                if term is not None and self._around.engine.gate.is_synced and self._pods:
                    self._schedule_pods(term.epoch)
                self._wake.clear()
                await asyncio.sleep(_LOOK_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await self._wake.wait()
        finally:
            await self._under_way.end()

    def _schedule_pods(self, epoch: int) -> None:
        is_waiting = False
        for uid, one in self._pods.items():
            if one.is_waiting:
                is_waiting = True
                if one.intent is None or (isinstance(one.intent, IntentRefusal) and one.intent.needs is not None):
                    # Owners are looked up by the engine, which was told of them by the same pod.
                    self._pods[uid] = one._replace(
                        intent=parse_slice_intent(one.pod, self._around.engine.lookups.found)
                    )
        nodes = self._offering() if is_waiting else {}
        told = self.machine.schedule_pods(
            self._pods, nodes, self._offers(nodes), epoch, self._around.clock.monotonic_s()
        )
        for instruction in told:
            self._do(instruction)

    def _do(self, one: GateInstruction) -> None:
        match one:
            case RecordEvent():
                self._around.log.info("pod=%s told=%s", one.key, one.text)
                self._around.engine.writes.record_event(one)
            case UngatePod():
                self._around.log.info("pod=%s node=%s plan=%s", one.key, one.node_name, one.plan)
                self._under_way.start_task(self._writes.ungate(one))
            case RemoveGate():
                self._under_way.start_task(self._writes.remove_gate(one))
            case RecreatePod():
                self._under_way.start_task(self._writes.delete_for_recreation(one))

    # What is on offer

    def _offering(self) -> dict[str, KubeNode]:
        """Nodes with slices, read once for each version."""
        found = {}
        for key, node in self._around.engine.nodes.objects.items():
            allocatable = (node.get("status") or {}).get("allocatable") or {}
            if not any(name.startswith(RESOURCE_MIG_PREFIX) for name in allocatable):
                continue
            version = node["metadata"].get("resourceVersion", "")
            read = self._nodes.get(key.name)
            if read is None or read[0] != version:
                try:
                    read = self._nodes[key.name] = version, parse_node(node)
                except KubernetesUnreadable:
                    continue
            found[key.name] = read[1]
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


_TURN_S = 1.0


class RepartitionTaintReconciler:
    """The ability; a part."""

    def __init__(self, around: ReconcilerContext) -> None:
        self.put = 0
        self.removed = 0
        self._around = around
        self._writes = MoveWriter(around)
        self._taints = TaintTimers()

    async def run(self) -> None:
        """Keep taints as they should be until cancelled."""
        while True:
            await asyncio.sleep(_TURN_S)
            if self._around.elector.term() is not None and self._around.engine.nodes.is_synced:
                await self._run_cycle()

    async def _run_cycle(self) -> None:
        around = self._around
        nodes = {key.name: node for key, node in around.engine.nodes.objects.items()}
        wanted = {name: why for name, why in nodes_with_pending_layout(around.loop.core).items() if name in nodes}
        tainted = {name for name, node in nodes.items() if is_tainted(node)}
        now_s = around.clock.monotonic_s()
        for name, is_wanted in self._taints.taint_changes(wanted, tainted, now_s).items():
            body = taint_patch(nodes[name], wanted=is_wanted)
            if not body:
                continue
            try:
                await self._writes.patch_node(name, body)
            except ClusterError as error:  # another wrote the list, or we may not: looked at anew next time
                around.log.warning("node=%s taint=%s written=no error=%s", name, is_wanted, error)
                continue
            self.put += is_wanted
            self.removed += not is_wanted
            held = around.engine.gate.others.used_gpus(name)
            foreign = f"; others hold {held} GPUs there, which stay" if held else ""
            text = f"{TAINT_REPARTITION}: no new pods until {wanted[name]}{foreign}" if is_wanted else ""
            if self._taints.is_timed_out(name, now_s):
                text = (
                    f"{TAINT_REPARTITION} removed after {self._taints.most_s:g} s: {wanted.get(name, '')} has not come"
                )
            await self._writes.record_event(
                "Node", PodKey("", name), name, text or f"{TAINT_REPARTITION} removed: its GPUs stand"
            )


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
            found[name] = f"GPU {', '.join(missing)} is cut as planned"
    return found
