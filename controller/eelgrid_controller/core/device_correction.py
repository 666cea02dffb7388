"""Device correction: replaces planned GPUs of replicas by those that the engine says they hold, as one event.

Owns the check against the node allocations and the event. Must not know how the devices were found out, and
applies nothing: the core does.

Theory. On a node whose devices a kubelet assigns, a plan is a wish. What a replica really holds counts: for
its power limit, its energy and for what may be placed next. So a report is accepted as a whole, since two
replicas may have swapped devices; it is refused only where it contradicts other allocations. A node that was
described by its engine alone has device names made up from their indexes; when its agent joins, replicas are
renamed to the real devices at the same indexes in the same step: in between, the real ones would look free.
"""

from collections.abc import Mapping

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import CorrectedReplica, DevicesCorrected
from eelgrid_controller.state.node_allocations import ContradictoryEvent, NodeRecord
from eelgrid_controller.state.replica_changes import apply_device_correction
from eelgrid_protos.faults import FailedPrecondition, NotFound
from eelgrid_protos.messages import Inventory, Placement


class CorrectionRefused(FailedPrecondition):
    """What is said of devices contradicts what else is held there."""


def plan_device_correction(
    state: ClusterState, node_name: str, held: Mapping[tuple[str, int], tuple[str, ...]], *, now_ns: int
) -> DevicesCorrected | None:
    """The event after which these replicas hold these GPUs of the node, None if they do already.

    `held` is by workload and replica. Raises NotFound, and CorrectionRefused where it cannot be so.
    """
    record = state.nodes.get(node_name)
    if record is None:
        raise NotFound(f"no node is called {node_name!r}; list nodes to see the names")
    index_of = {gpu.uuid: gpu.index for gpu in record.inventory.gpus}
    found = []
    for (workload_id, replica), uuids in sorted(held.items()):
        assignment = record.assignments.get((workload_id, replica))
        if assignment is None:
            raise CorrectionRefused(f"replica {replica} of {workload_id} is not on {node_name}; look again")
        strange = [uuid for uuid in uuids if uuid not in index_of]
        if strange:
            raise CorrectionRefused(f"{node_name} has no GPU {strange[0]}; wait for its inventory")
        if set(uuids) == set(assignment.gpu_uuids):
            continue
        ordered = sorted(uuids, key=index_of.__getitem__)
        placement = Placement(
            replica=replica,
            node_name=node_name,
            gpu_uuids=tuple(ordered),
            gpu_indexes=tuple(index_of[uuid] for uuid in ordered),
        )
        found.append(CorrectedReplica(workload_id=workload_id, placement=placement))
    if not found:
        return None
    event = DevicesCorrected(time_ns=now_ns, node_name=node_name, replicas=tuple(found))
    try:
        apply_device_correction(state.workloads, record.copy(), event)
    except ContradictoryEvent as error:
        raise CorrectionRefused(f"{error}; nothing was corrected") from error
    return event


def plan_device_renaming(
    state: ClusterState, record: NodeRecord, before: Inventory, *, now_ns: int
) -> DevicesCorrected | None:
    """The event after which replicas hold the node's real devices at the indexes of made-up ones; None without any.

    `record` has the agent's inventory already. A replica whose devices are not all there keeps what it held.
    """
    inventory = record.inventory
    if before.agent_version or not inventory.agent_version:
        return None
    index_of = {gpu.uuid: gpu.index for gpu in before.gpus}
    uuid_at = {gpu.index: gpu.uuid for gpu in inventory.gpus if not gpu.mig_enabled and gpu.uuid not in record.layouts}
    found = []
    for (workload_id, replica), assignment in sorted(record.assignments.items()):
        indexes = [index_of.get(uuid) for uuid in assignment.gpu_uuids]
        if assignment.gpu_instance is not None or not indexes or any(index not in uuid_at for index in indexes):
            continue
        known = [index for index in indexes if index is not None]
        placement = Placement(
            replica=replica,
            node_name=inventory.node_name,
            gpu_uuids=tuple(uuid_at[index] for index in known),
            gpu_indexes=tuple(known),
        )
        found.append(CorrectedReplica(workload_id=workload_id, placement=placement))
    if not found:
        return None
    event = DevicesCorrected(time_ns=now_ns, node_name=inventory.node_name, replicas=tuple(found))
    try:
        apply_device_correction(state.workloads, record.copy(), event)
    except ContradictoryEvent:
        return None
    return event
