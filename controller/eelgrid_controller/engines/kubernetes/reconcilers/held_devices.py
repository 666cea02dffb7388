"""Held-device reconciler: compares the devices that pods hold with the plan and corrects the core."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence

from eelgrid_controller.engines.kubernetes.api.object_store import Delta
from eelgrid_controller.engines.kubernetes.api.port import ObjectKey
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_WRONG_DEVICES
from eelgrid_controller.engines.kubernetes.pods.device_consistency import ReplicaDevices, ReplicaKey, plan_repair
from eelgrid_controller.engines.kubernetes.pods.gate import Gate
from eelgrid_controller.engines.kubernetes.pods.gate_events import DevicesReported, PodKey, RecordEvent, RecreatePod
from eelgrid_controller.engines.kubernetes.pods.inflight import UnboundPodWatchdog
from eelgrid_controller.engines.kubernetes.pods.placement_unit import UnitMember
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import unit_of
from eelgrid_controller.engines.kubernetes.reconcilers.core_commands import is_gate_workload
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import ReconcilerContext
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.telemetry import DeviceReport
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import HeldDevices

_TICK_S = 1.0
_SOON_S = 0.05
_ALL_AGAIN_S = 30.0
_SETTLE_S = 20.0
_NODES_A_TURN = 256


class HeldDeviceReconciler:
    """See the module; counters are of this process."""

    def __init__(self, surroundings: ReconcilerContext) -> None:
        self.reports = 0
        self.corrected = 0  # replicas that were pointed at what they hold
        self.refused = 0
        self.wrong = 0  # pods that hold other devices than planned, now, and cannot be put right
        self.recreated = 0
        self._around = surroundings
        self._clock = surroundings.clock
        self._gate: Gate | None = None
        self._marked: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._first_s: dict[str, float] = {}  # uid -> first seen; 0 where it was bound already
        self._hopeless: dict[str, dict[str, float]] = {}  # node -> uid -> since
        self._told: dict[str, str] = {}  # uid -> what
        self._watchdog = UnboundPodWatchdog(unbound_s=_SETTLE_S)
        surroundings.devices.listeners.append(self._on_nodes)
        surroundings.engine.add_pod_listener(self._pods)

    def _on_nodes(self, node_name: str, report: DeviceReport) -> None:
        self.reports += 1
        self._around.engine.feed(_devices_event(node_name, report.held))
        self._marked[node_name] = None
        self._wake.set()

    def _pods(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.new is None:
                assert delta.old is not None
                uid = delta.old["metadata"]["uid"]
                self._first_s.pop(uid, None)
                self._told.pop(uid, None)
            elif (uid := delta.new["metadata"]["uid"]) not in self._first_s:
                is_bound = bool(delta.new["spec"].get("nodeName"))
                self._first_s[uid] = 0.0 if is_bound else self._clock.monotonic_s()

    async def run(self) -> None:
        """Compare until cancelled."""
        again_s = 0.0
        while True:
            if self._around.engine.gate is not self._gate:
                # A gate that was made anew has heard nothing.
                self._gate = self._around.engine.gate
                for name, report in self._around.devices.newest.items():
                    self._around.engine.feed(_devices_event(name, report.held))
            now_s = self._clock.monotonic_s()
            if now_s >= again_s:
                self._marked.update(dict.fromkeys(self._around.devices.newest))
                again_s = now_s + _ALL_AGAIN_S
            is_leading = self._around.elector.term() is not None and self._gate.is_synced
            if is_leading:
                for name in list(self._marked)[:_NODES_A_TURN]:
                    del self._marked[name]
                    await self._compare(name)
            self.wrong = sum(map(len, self._hopeless.values()))
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SOON_S if self._marked and is_leading else _TICK_S):
                    await self._wake.wait()

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
            self._around.log.warning("node=%s corrected=no error=%s", node_name, error)
            return
        for (workload_id, replica), uuids in pointed.items():
            self.corrected += 1
            self._around.log.info(
                "node=%s workload=%s replica=%d devices=%s planned=%s seen=%s",
                node_name,
                workload_id,
                replica,
                ",".join(uuids),
                ",".join(sorted(standing[workload_id, replica].planned)),
                "yes" if standing[workload_id, replica].held else "no",
            )

    async def _despair(self, node_name: str, hopeless: Mapping[str, tuple[UnitMember, str]]) -> None:
        """What cannot be put right: told when it lasts, and made anew where its people want that."""
        now_s = self._clock.monotonic_s()
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
        pod, term = member.sight.pod, self._around.elector.term()
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
