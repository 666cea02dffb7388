"""Pods that ask for MIG slices, driven: pods, nodes, the core's room and agents' words go in, patches go out.

Owns what is gathered for each look, and how its writes are sent. Must not know which pod
goes where: `kubernetes/slice_pods.py` does.

Theory. A look gathers everything anew from what is held anyway: pods from the engine's
informer, room for CPU and memory from the core (which counts these pods as what others hold),
slices from the inventories and words of agents, and where there is no agent from what the API
server says is allocatable. It is made while somebody waits, not more often than each
`look_s`. Its writes are the gate's own kind, with the gate's preconditions.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from eelgrid_controller.adapters.device_reports import DeviceReport
from eelgrid_controller.adapters.kubernetes.abilities import Surroundings
from eelgrid_controller.adapters.kubernetes.elector import is_of
from eelgrid_controller.adapters.kubernetes.held import Delta
from eelgrid_controller.adapters.kubernetes.under_way import UnderWay
from eelgrid_controller.adapters.kubernetes.writes import Writes
from eelgrid_controller.kubernetes.errors import KubernetesUnreadable
from eelgrid_controller.kubernetes.gate_events import (
    DeleteFailed,
    Event,
    Instruction,
    Key,
    PatchFailed,
    Recreate,
    Strip,
    Tell,
    Ungate,
)
from eelgrid_controller.kubernetes.intent import Refused
from eelgrid_controller.kubernetes.names import ANNOTATION_PLAN, RESOURCE_MIG_PREFIX
from eelgrid_controller.kubernetes.patches import pinned_node
from eelgrid_controller.kubernetes.plans import plan_for
from eelgrid_controller.kubernetes.slice_pods import (
    SLICE_UNIT,
    SlicePod,
    SlicePods,
    asks_for_slices,
    slice_intent,
    slices_wanted,
)
from eelgrid_controller.kubernetes.slices_on_offer import Offer, Slice
from eelgrid_controller.kubernetes.views import KubeNode, node_of, pod_of
from eelgrid_controller.ledger import NodeRecord

__all__ = ["SlicesPart"]

_LOOK_S = 0.2
_TICK_S = 1.0
_AT_ONCE = 8


class SlicesPart:
    """See the module."""

    def __init__(self, surroundings: Surroundings) -> None:
        engine, settings = surroundings.engine, surroundings.engine.settings
        engine.leaves_slices = True
        self.machine = SlicePods(unbound_s=settings.gate.unbound_s, flight_s=settings.gate.flight_s)
        self._around = surroundings
        self._pods: dict[str, SlicePod] = {}
        self._nodes: dict[str, tuple[str, KubeNode]] = {}  # with the version that was read
        self._wake = asyncio.Event()
        self._under_way = UnderWay(surroundings.log, "slices")
        self._writes = Writes(
            surroundings.cluster, pods=lambda: engine.pods.objects, leads=self._leads, feed=self._fed,
            identity=surroundings.identity, at_once=_AT_ONCE, clock=surroundings.clock, rng=surroundings.rng,
            log=surroundings.log,
        )  # fmt: skip
        engine.hear_pods(self._heard_pods)
        surroundings.devices.listeners.append(self._heard_node)

    def _leads(self, epoch: int) -> bool:
        return is_of(self._around.elector.term(), epoch)

    def _fed(self, event: Event) -> None:
        """What came of a write; deletions are repeated by the machine's own watchdog."""
        if isinstance(event, PatchFailed):
            self.machine.failed(event.uid, event.failure, self._around.clock.monotonic_s())
        if not isinstance(event, DeleteFailed):
            self._wake.set()

    def _heard_node(self, node_name: str, report: DeviceReport) -> None:
        held = {Key(one.namespace, one.pod): one.device_uuids for one in report.held.pods}
        self.machine.seen(node_name, held, steers=report.held.steers)
        self._wake.set()

    def _heard_pods(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.new is None:
                assert delta.old is not None
                if self._pods.pop(delta.old["metadata"]["uid"], None) is not None:
                    self._wake.set()
            elif _names_slices(delta.new):
                self._pod(delta.new)

    def _pod(self, found: Mapping[str, Any]) -> None:
        try:
            pod = pod_of(found)
        except KubernetesUnreadable:
            return  # told by the engine
        plan = plan_for(pod.uid, pod.annotations.get(ANNOTATION_PLAN, ""))
        is_ours = plan is not None and plan.workload.startswith(SLICE_UNIT)
        if not asks_for_slices(pod):
            return
        self._pods[pod.uid] = SlicePod(pod, pinned_node(found) if is_ours else "")
        self._wake.set()

    async def run(self) -> None:
        """Place them until cancelled."""
        try:
            while True:
                term = self._around.elector.term()
                if term is not None and self._around.engine.gate.is_synced and self._pods:
                    self._look(term.epoch)
                self._wake.clear()
                await asyncio.sleep(_LOOK_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await self._wake.wait()
        finally:
            await self._under_way.end()

    def _look(self, epoch: int) -> None:
        is_waiting = False
        for uid, one in self._pods.items():
            if one.is_waiting:
                is_waiting = True
                if one.intent is None or (isinstance(one.intent, Refused) and one.intent.needs is not None):
                    # Owners are looked up by the engine, which was told of them by the same pod.
                    self._pods[uid] = one._replace(intent=slice_intent(one.pod, self._around.engine.lookups.found))
        nodes = self._offering() if is_waiting else {}
        told = self.machine.take(self._pods, nodes, self._offers(nodes), epoch, self._around.clock.monotonic_s())
        for instruction in told:
            self._do(instruction)

    def _do(self, one: Instruction) -> None:
        match one:
            case Tell():
                self._around.log.info("pod=%s told=%s", one.key, one.text)
                self._around.engine.writes.tell(one)
            case Ungate():
                self._around.log.info("pod=%s node=%s plan=%s", one.key, one.node_name, one.plan)
                self._under_way.begin(self._writes.ungate(one))
            case Strip():
                self._under_way.begin(self._writes.strip(one))
            case Recreate():
                self._under_way.begin(self._writes.recreate(one))

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
                    read = self._nodes[key.name] = version, node_of(node)
                except KubernetesUnreadable:
                    continue
            found[key.name] = read[1]
        return found

    def _offers(self, nodes: Mapping[str, KubeNode]) -> Iterator[Offer]:
        held: dict[str, dict[str, int]] = {}
        for one in self._pods.values():
            if one.target in nodes:
                counts = held.setdefault(one.target, {})
                for resource, count in slices_wanted(one.pod):
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
            yield Offer(
                name, record.cpu_left_milli, record.memory_left_bytes, left, slices, used, is_awake=any(counts.values())
            )


def _uuids(report: DeviceReport) -> frozenset[str]:
    return frozenset(uuid for pod in report.held.pods for uuid in pod.device_uuids)


def _known(record: NodeRecord, held: frozenset[str]) -> tuple[dict[str, tuple[Slice, ...]] | None, dict[int, int]]:
    """The free slices of a node by resource, and the memory slices in use by GPU; None where no instance is known."""
    free: dict[str, list[Slice]] = {}
    used: dict[int, int] = {}
    is_known = False
    for gpu in record.inventory.gpus:
        for instance in gpu.gpu_instances if gpu.mig_enabled else ():
            # An instance that is cut further is no device.
            if len(instance.compute_instances) != 1 or not instance.compute_instances[0].uuid:
                continue
            is_known = True
            one = Slice(instance.compute_instances[0].uuid, gpu.index, instance.start, instance.size)
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
