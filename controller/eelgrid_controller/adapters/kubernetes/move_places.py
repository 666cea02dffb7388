"""Places of the core that moves ask for, or give back.

Owns these two questions. Must not know pods' steps.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

from eelgrid_controller.adapters.kubernetes.asked import Commands
from eelgrid_controller.adapters.kubernetes.move_orders import MoveOrders
from eelgrid_controller.core import Core
from eelgrid_controller.kubernetes.moving import Order
from eelgrid_controller.kubernetes.names import ANNOTATION_PLAN
from eelgrid_controller.kubernetes.plans import plan_for
from eelgrid_controller.kubernetes.views import Pod
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import (
    Move,
    Placement,
    ReplicaMove,
    SubmitWorkloadRequest,
    WorkloadPhase,
)

__all__ = ["has_room", "put_back"]


async def has_room(loop: Commands, order: Order) -> bool:
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


async def put_back(loop: Commands, orders: MoveOrders, order: Order, pods: Sequence[Pod], log: logging.Logger) -> bool:
    """Move the places of pods that did not go back to where they stand; where they cannot be had they are let go."""
    moves = _back(loop.core, order, pods)
    if moves is None:
        return False
    orders.takes_back(order.workload)
    try:
        await loop.apply_moves((moves,), is_back=True)
    except (Fault, ContractError) as error:
        orders.took_nothing_back(order.workload)
        log.info("workload=%s back=no error=%s", order.workload, error)
        return False
    return True


def _back(core: Core, order: Order, pods: Sequence[Pod]) -> Move | None:
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
        plan = plan_for(pod.uid, pod.annotations.get(ANNOTATION_PLAN, ""))
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
