"""Held-device reconciler: compares the devices that pods hold with the plan and corrects the core."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from eelgrid_controller.engines.kubernetes.api.informer import Delta
from eelgrid_controller.engines.kubernetes.api.port import ObjectKey
from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey, unit_of
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_WRONG_DEVICES
from eelgrid_controller.engines.kubernetes.pods.device_consistency import ReplicaDevices, ReplicaKey, plan_repair
from eelgrid_controller.engines.kubernetes.pods.gate import Gate
from eelgrid_controller.engines.kubernetes.pods.gate_events import DevicesReported, RecordEvent, RecreatePod
from eelgrid_controller.engines.kubernetes.pods.inflight import UnboundPodWatchdog
from eelgrid_controller.engines.kubernetes.pods.placement_unit import UnitMember
from eelgrid_controller.engines.kubernetes.reconcilers.core_commands import is_gate_workload
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import ReconcilerContext
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import Reconciler, Result
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.telemetry import DeviceReport
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import HeldDevices

_TICK_S = 1.0
_ALL_AGAIN_S = 30.0
_SETTLE_S = 20.0


class HeldDeviceReconciler(Reconciler[str]):
    """Compares the devices that pods hold with the plan, and points the core at what they hold; a key is a node's name.

    Counters are of this process.
    """

    resync_s = _TICK_S

    def __init__(self, surroundings: ReconcilerContext) -> None:
        super().__init__(surroundings, "devices")
        self.reports = 0
        self.corrected = 0  # replicas that were pointed at what they hold
        self.refused = 0
        self.wrong = 0  # pods that hold other devices than planned, now, and cannot be put right
        self.recreated = 0
        self._around = surroundings
        self._gate: Gate | None = None
        self._all_again_s = 0.0  # when all nodes are compared again
        self._first_s: dict[str, float] = {}  # uid -> first seen; 0 where it was bound already
        self._hopeless: dict[str, dict[str, float]] = {}  # node -> uid -> since
        self._told: dict[str, str] = {}  # uid -> what
        self._watchdog = UnboundPodWatchdog(unbound_s=_SETTLE_S)
        surroundings.devices.listeners.append(self._on_nodes)
        surroundings.engine.add_pod_listener(self._pods)

    def is_ready(self) -> bool:
        """While this one leads, and the gate knows all pods and all reports."""
        gate = self._around.engine.gate
        return super().is_ready() and gate.is_synced and gate is self._gate

    def _on_nodes(self, node_name: str, report: DeviceReport) -> None:
        self.reports += 1
        self._around.engine.feed(_devices_event(node_name, report.held))
        self.queue.add(node_name)

    def _pods(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.new is None:
                self._first_s.pop(delta.uid, None)
                self._told.pop(delta.uid, None)
            elif delta.uid not in self._first_s:
                is_bound = bool(delta.new["spec"].get("nodeName"))
                self._first_s[delta.uid] = 0.0 if is_bound else self.clock.monotonic_s()

    async def start(self, _: asyncio.TaskGroup) -> None:
        """Pods are the engine's; reports are there already."""
        self.resync()

    def resync(self) -> None:
        """Tell a gate that began again what nodes reported, and compare all nodes from time to time."""
        newest = self._around.devices.newest
        if self._around.engine.gate is not self._gate:
            self._gate = self._around.engine.gate
            for name, report in newest.items():
                self._around.engine.feed(_devices_event(name, report.held))
        now_s = self.clock.monotonic_s()
        if now_s >= self._all_again_s:
            self._all_again_s = now_s + _ALL_AGAIN_S
            for name in newest:
                self.queue.add(name)

    async def reconcile(self, key: str) -> Result | None:
        """Compare one node's plan with what its pods hold."""
        await self._compare(key)
        self.wrong = sum(map(len, self._hopeless.values()))
        return None

    async def _compare(self, node_name: str) -> None:
        record = self._around.loop.core.state.nodes.get(node_name)
        report = self._around.devices.newest.get(node_name)
        if record is None or report is None:
            self._hopeless.pop(node_name, None)
            return
        members = dict(self._members(record))
        standing, strangers = self._standing(record, report, members)
        devices = [gpu.uuid for gpu in record.inventory.gpus if not gpu.mig_enabled]
        found = plan_repair(standing, strangers, devices)
        if found.pointed:
            await self._point(node_name, found.pointed, standing)
        await self._despair(node_name, {members[key].uid: (members[key], why) for key, why in found.hopeless.items()})

    def _members(self, record: NodeRecord) -> Iterator[tuple[ReplicaKey, UnitMember]]:
        """The pod of each replica that has one here."""
        gate = self._around.engine.gate
        for workload_id, replica in record.assignments:
            unit = gate.units.get(unit_of(workload_id)) if is_gate_workload(workload_id) else None
            if unit is not None and unit.workload_id == workload_id:
                member = unit.members.get(unit.slots.get(replica, ""))
                if member is not None:
                    yield (workload_id, replica), member

    def _standing(
        self, record: NodeRecord, report: DeviceReport, members: Mapping[ReplicaKey, UnitMember]
    ) -> tuple[dict[ReplicaKey, ReplicaDevices], list[str]]:
        held = {PodKey(one.namespace, one.pod): frozenset(one.device_uuids) for one in report.held.pods}
        standing = {}
        for key, assignment in record.assignments.items():
            if not assignment.gpu_uuids or assignment.gpu_instance is not None:
                continue
            member, seen = members.get(key), None
            if member is not None and report.at_s >= self._first_s.get(member.uid, float("inf")):
                # Its binding may be known to its kubelet before it is to us.
                is_there = member.sight.pod.node_name in ("", record.inventory.node_name)
                seen = held.get(member.sight.key) if is_there else None
            standing[key] = ReplicaDevices(frozenset(assignment.gpu_uuids), seen, is_given=member is not None)
        ours = {member.sight.key for member in members.values()}
        strangers = [
            uuid
            for key, uuids in held.items()
            # A pod that is not known any more is a word out of date.
            if key not in ours and ObjectKey(*key) in self._around.engine.pods.objects
            for uuid in uuids
        ]
        return standing, strangers

    async def _point(
        self,
        node_name: str,
        pointed: Mapping[ReplicaKey, tuple[str, ...]],
        standing: Mapping[ReplicaKey, ReplicaDevices],
    ) -> None:
        try:
            await self._around.loop.correct_devices(node_name, pointed)
        except (Fault, ContractError) as error:
            # The state has moved on; the node's next word, or the next look at all, decides anew.
            self.refused += 1
            self.log.warning("node=%s corrected=no error=%s", node_name, error)
            return
        for (workload_id, replica), uuids in pointed.items():
            self.corrected += 1
            self.log.info(
                "node=%s workload=%s replica=%d devices=%s planned=%s seen=%s",
                node_name,
                workload_id,
                replica,
                ",".join(uuids),
                ",".join(sorted(standing[workload_id, replica].planned)),
                "yes" if standing[workload_id, replica].held else "no",
            )

    async def _despair(self, node_name: str, hopeless: Mapping[str, tuple[UnitMember, str]]) -> None:
        """Report pods with wrong devices once it lasts, and recreate those whose users want that."""
        now_s = self.clock.monotonic_s()
        before = self._hopeless.pop(node_name, {})
        since = {uid: before.get(uid, now_s) for uid in hopeless}
        if since:
            self._hopeless[node_name] = since
        for uid, (member, why) in hopeless.items():
            if now_s - since[uid] < _SETTLE_S:
                continue
            text = f"cannot have its planned devices: {why}"
            if self._told.get(uid) != text:
                self._told[uid] = text
                self._around.engine.writes.record_event(RecordEvent(uid, member.sight.key, text, is_warning=True))
            await self._recreate(member, text, now_s - since[uid], now_s)

    async def _recreate(self, member: UnitMember, why: str, waited_s: float, now_s: float) -> None:
        pod, term = member.sight.pod, self.term()
        wants = pod.annotations.get(ANNOTATION_WRONG_DEVICES) == "recreate"
        if not wants or pod.owner is None or term is None or pod.is_deleting or not pod.node_name:
            return
        if not self._watchdog.may_recreate(pod.owner.uid, waited_s, now_s):
            return
        self._watchdog.record_recreation(pod.owner.uid, waited_s, now_s)
        self.recreated += 1
        await self._around.engine.writes.delete_for_recreation(RecreatePod(pod.uid, member.sight.key, term.epoch, why))


def _devices_event(node_name: str, held: HeldDevices) -> DevicesReported:
    return DevicesReported(
        node_name, held.steers, {PodKey(one.namespace, one.pod): one.device_uuids for one in held.pods}
    )
