"""Move orders: which pods are to move, or to go, and how.

Found in what the core has moved, in drained nodes and GPUs, and in lost GPUs. Must not know how a move is carried out
(`reconcilers.moves`), nor which of several goes first (`pods.migration.MoveQueue`).
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.core_port import CoreCommandPort
from eelgrid_controller.engines.kubernetes.model.inference_service import ServiceMode
from eelgrid_controller.engines.kubernetes.model.pod_group import unit_of
from eelgrid_controller.engines.kubernetes.pods.migration import (
    DrainProgress,
    MoveMethod,
    MoveOrder,
    MovingPod,
    checkpoint_grace_s,
    is_drain_requested,
    mobility_of,
    move_method_of,
    moves_alone,
)
from eelgrid_controller.engines.kubernetes.pods.placement_unit import PlacementUnit, UnitMember
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import GateEngine
from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_controller.state.events import WorkloadMoved
from eelgrid_controller.state.policy import is_pool_enforced
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import SubmitWorkloadRequest, WorkloadPhase

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
            # How many there are is the service's, and one more would be taken for another's word.
            manner = MoveMethod.EVICT
        gang = _find_gang(unit, member, is_alone=moves_alone(unit.name, manner))
        goes = tuple(self._going(unit, one, workload_id) for one in gang)
        grace_s = max(checkpoint_grace_s(one.sight.pod.annotations) for one in gang)
        return MoveOrder(
            unit.name, workload_id, manner, goes, pod.owner.kind, pod.owner.name, pod.owner.uid, grace_s, cause
        )

    def _make_forced(
        self, core: Core, unit: PlacementUnit, member: UnitMember, terms: DrainTerms, cause: str
    ) -> MoveOrder | None:
        """The order for a pod whose drain's grace is over: it goes, though there is no room elsewhere."""
        owner = member.sight.pod.owner
        order = self._make_order(core, unit, member, "", cause)
        if owner is None or (order is None and not terms.force):
            return None
        is_alone = order is not None and moves_alone(unit.name, MoveMethod.EVICT)
        gang = _find_gang(unit, member, is_alone=is_alone)
        return MoveOrder(
            unit=unit.name,
            workload="",
            manner=MoveMethod.EVICT,
            goes=tuple(self._going(unit, one, "") for one in gang),
            owner_kind=owner.kind,
            owner_name=owner.name,
            owner_uid=owner.uid,
            grace_s=max(checkpoint_grace_s(one.sight.pod.annotations) for one in gang),
            cause=f"{cause}, and the grace is over",
            is_forced=True,
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

    def orders_from_drained_nodes(self, core: Core, now_ns: int) -> tuple[list[MoveOrder], dict[str, DrainProgress]]:
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
                record = core.state.nodes.get(member.target_node)
                cordon = None if record is None else record.cordon
                terms = cordon.drain if cordon is not None else None
                order = self._leaving(core, unit, member, terms, now_ns)
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

    def _leaving(
        self, core: Core, unit: PlacementUnit, member: UnitMember, terms: DrainTerms | None, now_ns: int
    ) -> MoveOrder | str:
        if not self.is_enforced(core, member.target_node):
            return "its pool is observe-only"
        cause = "its node is drained"
        if (
            terms is not None
            and terms.is_over(now_ns)
            and (order := self._make_forced(core, unit, member, terms, cause))
        ):
            return order
        order = self._make_order(core, unit, member, "", cause)
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

    def orders_from_gpus(self, core: Core, now_ns: int) -> Iterator[MoveOrder]:
        """Orders for pods that run on GPUs that are lost, or that operators drain by themselves."""
        for record in core.state.nodes.values():
            drained = {uuid for uuid, cordon in record.gpu_cordons.items() if cordon.drain is not None}
            left = record.lost_gpus | drained
            if not left:
                continue
            for (workload_id, replica), held in record.assignments.items():
                unit = self._engine.gate.units.get(unit_of(workload_id))
                if unit is None or unit.workload_id != workload_id or left.isdisjoint(held.gpu_uuids):
                    continue
                member = unit.members.get(unit.slots.get(replica, ""))
                if member is not None and member.sight.pod.node_name and self.is_enforced(core, member.target_node):
                    cause = "its GPU is drained" if record.lost_gpus.isdisjoint(held.gpu_uuids) else "its GPU is lost"
                    over = record.drain_terms(held)
                    order = None
                    if over is not None and over[0].is_over(now_ns):
                        order = self._make_forced(core, unit, member, over[0], cause)
                    order = order or self._make_order(core, unit, member, "", cause)
                    if order is not None:
                        yield order

    def is_enforced(self, core: Core, node_name: str) -> bool:
        """Whether anything may be moved from or to a node."""
        record = core.state.nodes.get(node_name)
        return record is not None and is_pool_enforced(core.state.policy, record.inventory.pool)


def _find_gang(unit: PlacementUnit, member: UnitMember, *, is_alone: bool) -> list[UnitMember]:
    """Returns who goes with a pod: nobody, or all of its unit that have a place."""
    return [member] if is_alone or unit.size == 1 else [one for one in unit.active_members if one.target_node]


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
