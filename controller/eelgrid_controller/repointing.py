"""Correcting devices: what an engine says that replicas hold, against the state as it is now, as one event.

Owns the check and the event. Must not know how it was found out, nor apply anything: core.py
does.

Theory. On a node whose devices a kubelet gives away, a plan is a wish. What a replica really
holds is what counts: for its power limit, for its energy and for who may come next. So what
is told is taken, all at once, since two replicas may have got each other's devices; only
where it cannot be true beside what others hold it is refused, and nothing has changed.

A node that was taken from its engine's word has devices with names made up from their indexes.
When its agent comes with the real names, what is held there is pointed at the devices with these
indexes in the same step: in between, the real ones would look free.
"""

from collections.abc import Mapping

from eelgrid_controller.events import CorrectedReplica, DevicesCorrected
from eelgrid_controller.ledger import ContradictoryEvent, NodeRecord
from eelgrid_controller.replicas import corrected
from eelgrid_controller.state import ClusterState
from eelgrid_protos.faults import FailedPrecondition, NotFound
from eelgrid_protos.messages import Inventory, Placement

__all__ = ["CorrectionRefused", "correction", "renaming"]


class CorrectionRefused(FailedPrecondition):
    """What is said of devices contradicts what else is held there."""


def correction(
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
            replica=replica, node_name=node_name, gpu_uuids=tuple(ordered),
            gpu_indexes=tuple(index_of[uuid] for uuid in ordered),
        )  # fmt: skip
        found.append(CorrectedReplica(workload_id=workload_id, placement=placement))
    if not found:
        return None
    event = DevicesCorrected(time_ns=now_ns, node_name=node_name, replicas=tuple(found))
    try:
        corrected(state.workloads, record.copy(), event)
    except ContradictoryEvent as error:
        raise CorrectionRefused(f"{error}; nothing was corrected") from error
    return event


def renaming(state: ClusterState, record: NodeRecord, before: Inventory, *, now_ns: int) -> DevicesCorrected | None:
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
            replica=replica, node_name=inventory.node_name, gpu_uuids=tuple(uuid_at[index] for index in known),
            gpu_indexes=tuple(known),
        )  # fmt: skip
        found.append(CorrectedReplica(workload_id=workload_id, placement=placement))
    if not found:
        return None
    event = DevicesCorrected(time_ns=now_ns, node_name=inventory.node_name, replicas=tuple(found))
    try:
        corrected(state.workloads, record.copy(), event)
    except ContradictoryEvent:
        return None
    return event
