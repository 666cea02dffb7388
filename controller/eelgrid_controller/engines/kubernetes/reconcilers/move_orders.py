"""Move orders: which moves are due (core, drained nodes, lost GPUs), and places requested or restored for them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.kubernetes.model.annotations import parse_duration_s
from eelgrid_controller.engines.kubernetes.model.inference_service import ServiceMode
from eelgrid_controller.engines.kubernetes.model.objects import Pod
from eelgrid_controller.engines.kubernetes.model.pod_group import unit_of
from eelgrid_controller.engines.kubernetes.model.quantities import AnnotationUnreadable
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_CHECKPOINT_GRACE, ANNOTATION_PLAN
from eelgrid_controller.engines.kubernetes.pods.migration import (
    DrainProgress,
    MoveMethod,
    MoveOrder,
    MovingPod,
    is_drain_requested,
    mobility_of,
    move_method_of,
    moves_alone,
)
from eelgrid_controller.engines.kubernetes.pods.placement_unit import PlacementUnit, UnitMember
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import plan_for_pod
from eelgrid_controller.engines.kubernetes.reconcilers.core_commands import CoreCommandPort
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import GateEngine
from eelgrid_controller.state.events import WorkloadMoved
from eelgrid_controller.state.policy import is_pool_enforced
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import Move, Placement, ReplicaMove, SubmitWorkloadRequest, WorkloadPhase

_WAITS_S = 10.0  # for the gate to hear of a place that the core moved


class MoveOrders:
    """Finds the moves that are due, from the gate, the core and the nodes."""

    def __init__(self, engine: GateEngine, log: logging.Logger) -> None:
        self._engine = engine
        self._log = log
        self._moved: dict[str, float] = {}  # workload -> until when its unit is waited for
        self._back: dict[str, int] = {}  # moves that were taken back by us

    def on_moved(self, event: WorkloadMoved, now_s: float) -> None:
        """Note that the core has moved places of a workload."""
        name = event.workload_id
        if self._back.get(name):
            self._back[name] -= 1
            if not self._back[name]:
                del self._back[name]
            return
        self._moved[name] = now_s + _WAITS_S

    def is_new(self, workload_id: str) -> bool:
        """Whether the core has moved it and nobody has asked yet what is to be done."""
        return workload_id in self._moved

    def expect_reversal(self, workload_id: str) -> None:
        """The next move of this work is one that is taken back, and no order."""
        self._back[workload_id] = self._back.get(workload_id, 0) + 1
        self._moved.pop(workload_id, None)

    def cancel_reversal(self, workload_id: str) -> None:
        """Taking the move back was refused."""
        self._back.pop(workload_id, None)

    def orders_from_core(self, core: Core, now_s: float) -> Iterator[MoveOrder]:
        """Orders for what the core has moved, as soon as the gate knows of it."""
        for name, until_s in list(self._moved.items()):
            unit = self._engine.gate.units.get(unit_of(name))
            if unit is not None and unit.elastic is not None:
                del self._moved[name]  # looked at by its pods
            elif unit is not None and unit.workload_id == name and unit.moving:
                del self._moved[name]
                yield from self._of_unit(core, unit)
            elif now_s > until_s:
                del self._moved[name]
                self._log.warning("workload=%s moved=no reason=none of its pods is at its former place", name)

    def _of_unit(self, core: Core, unit: PlacementUnit) -> Iterator[MoveOrder]:
        for uid in unit.moving.values():
            member = unit.members.get(uid)
            if member is None:
                continue
            order = self._make_order(core, unit, member, unit.workload_id, "requested by an operator")
            if order is not None:
                yield order
                if order.manner is MoveMethod.EVICT:
                    return

    def _make_order(
        self, core: Core, unit: PlacementUnit, member: UnitMember, workload_id: str, cause: str
    ) -> MoveOrder | None:
        """The order for a pod, or for its whole gang; None where it is never moved."""
        pod = member.sight.pod
        found = core.state.workloads.get(unit.workload_id)
        mobility = found.spec.mobility if found is not None else mobility_of(pod)
        manner = move_method_of(mobility, pod.owner.kind if pod.owner is not None else "")
        if manner is None or pod.owner is None:
            return None
        service = unit.elastic.service if unit.elastic is not None else None
        if service is not None and service.mode is ServiceMode.ENFORCE:
            manner = (
                MoveMethod.EVICT
            )  # how many there are is the service's, and one more would be taken for another's word
        gang = (
            [member]
            if moves_alone(unit.name, manner) or unit.size == 1
            else [one for one in unit.active_members if one.target_node]
        )
        goes = tuple(self._going(unit, one, workload_id) for one in gang)
        grace_s = max(_grace_s(one.sight.pod.annotations) for one in gang)
        return MoveOrder(
            unit.name, workload_id, manner, goes, pod.owner.kind, pod.owner.name, pod.owner.uid, grace_s, cause
        )

    def _going(self, unit: PlacementUnit, member: UnitMember, workload_id: str) -> MovingPod:
        key, uid = member.sight.key, member.uid
        replica = next((replica for replica, found in unit.moving.items() if found == uid), None)
        if replica is None or not workload_id:
            return MovingPod(uid, key, unit.replica_of(uid) or 0, member.target_node)
        return MovingPod(uid, key, replica, member.target_node, unit.places[replica].node_name)

    # Without a place that is kept

    def orders_from_services(self, core: Core) -> Iterator[MoveOrder]:
        """Pods of services that stand where their places were: the next pod that comes gets the new one."""
        for unit in self._engine.gate.units.values():
            for uid in sorted(unit.elastic.moved & unit.members.keys()) if unit.elastic is not None else ():
                order = self._make_order(core, unit, unit.members[uid], "", "requested by an operator")
                if order is not None:
                    yield order

    def orders_from_drained_nodes(self, core: Core) -> tuple[list[MoveOrder], dict[str, DrainProgress]]:
        """Orders for pods on drained nodes, and the progress of each drain."""
        drained = {key.name for key, node in self._engine.nodes.objects.items() if is_drain_requested(node)}
        if not drained:
            return [], {}
        orders: dict[str, MoveOrder] = {}
        leaving: dict[str, int] = dict.fromkeys(drained, 0)
        staying: dict[str, list[str]] = {name: [] for name in drained}
        for unit in self._engine.gate.units.values():
            for member in unit.members.values():
                if member.target_node not in drained or member.is_over:
                    continue
                order = self._leaving(core, unit, member)
                if isinstance(order, str):
                    staying[member.target_node].append(f"{member.sight.key} ({order})")
                    continue
                leaving[member.target_node] += 1
                orders[order.name] = order
        found = {
            name: DrainProgress(leaving[name], tuple(sorted(staying[name])), self._foreign(name))
            for name in sorted(drained)
        }
        return list(orders.values()), found

    def _leaving(self, core: Core, unit: PlacementUnit, member: UnitMember) -> MoveOrder | str:
        if not self.is_enforced(core, member.target_node):
            return "its pool is observe-only"
        order = self._make_order(core, unit, member, "", "its node is drained")
        if order is None:
            return "fixed"
        if order.manner is MoveMethod.SURGE and unit.size > 1:
            return "its service has to be scaled"
        return order

    def _foreign(self, node_name: str) -> int:
        """GPUs that pods placed by others hold on a node."""
        managed = (
            member.sight.pod.requested.count("nvidia.com/gpu")
            for unit in self._engine.gate.units.values()
            for member in unit.members.values()
            if member.target_node == node_name and not unit.holds_member(member)
        )
        return max(0, self._engine.gate.others.used_gpus(node_name) - sum(managed))

    def orders_from_lost_gpus(self, core: Core) -> Iterator[MoveOrder]:
        """Orders for pods that run on lost GPUs."""
        for record in core.state.nodes.values():
            if not record.lost_gpus:
                continue
            for (workload_id, replica), held in record.assignments.items():
                unit = self._engine.gate.units.get(unit_of(workload_id))
                if unit is None or unit.workload_id != workload_id or not record.lost_gpus & set(held.gpu_uuids):
                    continue
                member = unit.members.get(unit.slots.get(replica, ""))
                if member is not None and member.sight.pod.node_name and self.is_enforced(core, member.target_node):
                    order = self._make_order(core, unit, member, "", "its GPU is lost")
                    if order is not None:
                        yield order

    def is_enforced(self, core: Core, node_name: str) -> bool:
        """Whether anything may be moved from or to a node."""
        record = core.state.nodes.get(node_name)
        return record is not None and is_pool_enforced(core.state.policy, record.inventory.pool)


def _grace_s(annotations: Mapping[str, str]) -> float:
    try:
        return parse_duration_s(annotations, ANNOTATION_CHECKPOINT_GRACE) or 0.0
    except AnnotationUnreadable:
        return 0.0


async def has_room(loop: CoreCommandPort, order: MoveOrder) -> bool:
    """Whether the core would find a place for the pod that comes; a gang makes room for itself by going."""
    found = loop.core.state.workloads.get(order.unit)
    if found is None or len(order.goes) > 1:
        return True
    spec = replace(found.spec, replicas=1)
    try:
        would = await loop.submit(SubmitWorkloadRequest(spec=spec, dry_run=True))
    except (Fault, ContractError):
        return False
    return would.phase is WorkloadPhase.PLACED


async def restore_places(
    loop: CoreCommandPort, orders: MoveOrders, order: MoveOrder, pods: Sequence[Pod], log: logging.Logger
) -> bool:
    """Move the places of pods that did not go back to where they stand; where they cannot be had they are let go."""
    moves = _back(loop.core, order, pods)
    if moves is None:
        return False
    orders.expect_reversal(order.workload)
    try:
        await loop.apply_moves((moves,), is_back=True)
    except (Fault, ContractError) as error:
        orders.cancel_reversal(order.workload)
        log.info("workload=%s restored=no error=%s", order.workload, error)
        return False
    return True


def _back(core: Core, order: MoveOrder, pods: Sequence[Pod]) -> Move | None:
    workload = core.state.workloads.get(order.workload)
    if workload is None or workload.phase is not WorkloadPhase.PLACED:
        return None
    here = {pod.uid: pod for pod in pods}
    places = {place.replica: place for place in workload.placements}
    replicas = []
    for going in order.goes:
        source, pod = places.get(going.replica), here.get(going.uid)
        if source is None or pod is None or not going.to or source.node_name != going.to:
            continue
        plan = plan_for_pod(pod.uid, pod.annotations.get(ANNOTATION_PLAN, ""))
        record = core.state.nodes.get(pod.node_name)
        if plan is None or record is None or plan.node_name != pod.node_name:
            return None
        uuids = {gpu.index: gpu.uuid for gpu in record.inventory.gpus}
        if not set(plan.devices) <= set(uuids) or len(plan.devices) != len(source.gpu_uuids):
            return None
        target = Placement(
            replica=going.replica,
            node_name=pod.node_name,
            gpu_uuids=tuple(uuids[index] for index in plan.devices),
            gpu_indexes=plan.devices,
        )
        replicas.append(ReplicaMove(source=source, target=target))
    return Move(workload_id=order.workload, replicas=tuple(replicas)) if replicas else None
