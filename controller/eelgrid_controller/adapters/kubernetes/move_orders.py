"""Which moves are asked for: by the core, which moved a place, by drained nodes, by GPUs that are lost.

Owns the way from these to orders. Must not know what becomes of an order.
"""

import logging
from collections.abc import Iterator, Mapping

from eelgrid_controller.adapters.kubernetes.engine import Engine
from eelgrid_controller.core import Core
from eelgrid_controller.events import WorkloadMoved
from eelgrid_controller.kubernetes.annotations import duration_s
from eelgrid_controller.kubernetes.draining import Drained, is_drained
from eelgrid_controller.kubernetes.errors import AnnotationUnreadable
from eelgrid_controller.kubernetes.gangs import Member, Unit
from eelgrid_controller.kubernetes.moving import Going, Manner, Order, goes_alone, manner_of, mobility_of
from eelgrid_controller.kubernetes.names import ANNOTATION_CHECKPOINT_GRACE
from eelgrid_controller.kubernetes.plans import unit_of
from eelgrid_controller.kubernetes.serving import Mode
from eelgrid_controller.modes import enforces

__all__ = ["MoveOrders"]

_WAITS_S = 10.0  # for the gate to hear of a place that the core moved


class MoveOrders:
    """Orders, from what the gate, the core and nodes are at this moment."""

    def __init__(self, engine: Engine, log: logging.Logger) -> None:
        self._engine = engine
        self._log = log
        self._moved: dict[str, float] = {}  # workload -> until when its unit is waited for
        self._back: dict[str, int] = {}  # moves that were taken back by us

    def heard(self, event: WorkloadMoved, now_s: float) -> None:
        """The core has moved places."""
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

    def takes_back(self, workload_id: str) -> None:
        """The next move of this work is one that is taken back, and no order."""
        self._back[workload_id] = self._back.get(workload_id, 0) + 1
        self._moved.pop(workload_id, None)

    def took_nothing_back(self, workload_id: str) -> None:
        """That was refused."""
        self._back.pop(workload_id, None)

    def of_core(self, core: Core, now_s: float) -> Iterator[Order]:
        """What the core has moved, as soon as the gate knows of it."""
        for name, until_s in list(self._moved.items()):
            unit = self._engine.gate.units.get(unit_of(name))
            if unit is not None and unit.elastic is not None:
                del self._moved[name]  # looked at by its pods
            elif unit is not None and unit.workload_id == name and unit.moving:
                del self._moved[name]
                yield from self._of_unit(core, unit)
            elif now_s > until_s:
                del self._moved[name]
                self._log.warning("workload=%s moved=no reason=no pod of it stands where it was", name)

    def _of_unit(self, core: Core, unit: Unit) -> Iterator[Order]:
        for uid in unit.moving.values():
            member = unit.members.get(uid)
            if member is None:
                continue
            order = self._order(core, unit, member, unit.workload_id, "an operator's order")
            if order is not None:
                yield order
                if order.manner is Manner.EVICT:
                    return

    def _order(self, core: Core, unit: Unit, member: Member, workload_id: str, cause: str) -> Order | None:
        """The order for a pod, or for its whole gang; None where it is never moved."""
        pod = member.sight.pod
        found = core.state.workloads.get(unit.workload_id)
        mobility = found.spec.mobility if found is not None else mobility_of(pod)
        manner = manner_of(mobility, pod.owner.kind if pod.owner is not None else "")
        if manner is None or pod.owner is None:
            return None
        service = unit.elastic.service if unit.elastic is not None else None
        if service is not None and service.mode is Mode.ENFORCE:
            manner = Manner.EVICT  # how many there are is the service's, and one more would be taken for another's word
        gang = (
            [member] if goes_alone(unit.name, manner) or unit.size == 1 else [one for one in unit.alive if one.target]
        )
        goes = tuple(self._going(unit, one, workload_id) for one in gang)
        grace_s = max(_grace_s(one.sight.pod.annotations) for one in gang)
        return Order(
            unit.name, workload_id, manner, goes, pod.owner.kind, pod.owner.name, pod.owner.uid, grace_s, cause
        )

    def _going(self, unit: Unit, member: Member, workload_id: str) -> Going:
        key, uid = member.sight.key, member.uid
        replica = next((replica for replica, found in unit.moving.items() if found == uid), None)
        if replica is None or not workload_id:
            return Going(uid, key, unit.replica_of(uid) or 0, member.target)
        return Going(uid, key, replica, member.target, unit.places[replica].node_name)

    # Without a place that is kept

    def of_services(self, core: Core) -> Iterator[Order]:
        """Pods of services that stand where their places were: the next pod that comes gets the new one."""
        for unit in self._engine.gate.units.values():
            for uid in sorted(unit.elastic.moved & unit.members.keys()) if unit.elastic is not None else ():
                order = self._order(core, unit, unit.members[uid], "", "an operator's order")
                if order is not None:
                    yield order

    def of_nodes(self, core: Core) -> tuple[list[Order], dict[str, Drained]]:
        """What is to leave drained nodes, and how far each is."""
        drained = {key.name for key, node in self._engine.nodes.objects.items() if is_drained(node)}
        if not drained:
            return [], {}
        orders: dict[str, Order] = {}
        leaving: dict[str, int] = dict.fromkeys(drained, 0)
        staying: dict[str, list[str]] = {name: [] for name in drained}
        for unit in self._engine.gate.units.values():
            for member in unit.members.values():
                if member.target not in drained or member.is_over:
                    continue
                order = self._leaving(core, unit, member)
                if isinstance(order, str):
                    staying[member.target].append(f"{member.sight.key} ({order})")
                    continue
                leaving[member.target] += 1
                orders[order.name] = order
        found = {
            name: Drained(leaving[name], tuple(sorted(staying[name])), self._foreign(name)) for name in sorted(drained)
        }
        return list(orders.values()), found

    def _leaving(self, core: Core, unit: Unit, member: Member) -> Order | str:
        if not self.is_enforced(core, member.target):
            return "its pool is only observed"
        order = self._order(core, unit, member, "", "its node is drained")
        if order is None:
            return "fixed"
        if order.manner is Manner.SURGE and unit.size > 1:
            return "its service has to be scaled"
        return order

    def _foreign(self, node_name: str) -> int:
        """GPUs that pods of others hold on a node."""
        managed = (
            member.sight.pod.requested.count("nvidia.com/gpu")
            for unit in self._engine.gate.units.values()
            for member in unit.members.values()
            if member.target == node_name and not unit.holds(member)
        )
        return max(0, self._engine.gate.others.gpus(node_name) - sum(managed))

    def of_lost(self, core: Core) -> Iterator[Order]:
        """What runs on GPUs that are lost."""
        for record in core.state.nodes.values():
            if not record.lost_gpus:
                continue
            for (workload_id, replica), held in record.assignments.items():
                unit = self._engine.gate.units.get(unit_of(workload_id))
                if unit is None or unit.workload_id != workload_id or not record.lost_gpus & set(held.gpu_uuids):
                    continue
                member = unit.members.get(unit.slots.get(replica, ""))
                if member is not None and member.sight.pod.node_name and self.is_enforced(core, member.target):
                    order = self._order(core, unit, member, "", "its GPU is lost")
                    if order is not None:
                        yield order

    def is_enforced(self, core: Core, node_name: str) -> bool:
        """Whether anything may be moved from or to a node."""
        record = core.state.nodes.get(node_name)
        return record is not None and enforces(core.state.policy, record.inventory.pool)


def _grace_s(annotations: Mapping[str, str]) -> float:
    try:
        return duration_s(annotations, ANNOTATION_CHECKPOINT_GRACE) or 0.0
    except AnnotationUnreadable:
        return 0.0
