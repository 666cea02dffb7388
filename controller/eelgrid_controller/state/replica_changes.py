"""Replica changes: what moves, scaling, device corrections and partition plans do to placed workloads.

Owns the workload after each such event, and what the event may not do. Must not know whether there is room:
state.node_allocations checks that.
"""

from collections.abc import Mapping
from dataclasses import replace

from eelgrid_controller.state.events import (
    DevicesCorrected,
    Event,
    PartitionsPlanned,
    WorkloadCancelled,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadScaled,
)
from eelgrid_controller.state.node_allocations import ContradictoryEvent, NodeRecord, make_assignment
from eelgrid_protos.messages import Placement, Workload, WorkloadPhase
from eelgrid_protos.quantities import GPU_MILLI_WHOLE


def list_affected_workloads(event: Event) -> tuple[str, ...]:
    """The workloads that may hold more or less after an event."""
    match event:
        case WorkloadPlaced() | WorkloadScaled() | WorkloadCancelled():
            return (event.workload_id,)
        case PartitionsPlanned():
            return event.workload_ids
        case _:
            return ()


def apply_move(workload: Workload | None, event: WorkloadMoved) -> tuple[Workload, list[Placement]]:
    """The workload and the places that it leaves; raises ContradictoryEvent."""
    moving = {placement.replica for placement in event.placements}
    before = [item for item in workload.placements if item.replica in moving] if workload else []
    if workload is None or not moving or len(before) != len(event.placements):
        raise ContradictoryEvent(f"workload {event.workload_id} has no such replicas placed")
    return _at(workload, before, event.placements), before


def apply_scaling(workload: Workload | None, event: WorkloadScaled) -> tuple[Workload, list[Placement]]:
    """The workload and the places that it leaves; raises ContradictoryEvent."""
    if workload is None or workload.phase is not WorkloadPhase.PLACED:
        raise ContradictoryEvent(f"workload {event.workload_id} does not run")
    there, gone = {item.replica for item in workload.placements}, set(event.released)
    new = {item.replica for item in event.placements}
    if not there >= gone or there & new or len(gone) < len(event.released) or len(new) < len(event.placements):
        raise ContradictoryEvent(f"workload {event.workload_id} has other replicas than are taken or added")
    replicas = len(there) - len(gone) + len(new)
    if replicas < 1:
        raise ContradictoryEvent(f"workload {event.workload_id} would be left without replicas")
    before = [item for item in workload.placements if item.replica in gone]
    begun = workload.replicas_begun or workload.spec.replicas
    counted = replace(workload, spec=replace(workload.spec, replicas=replicas), replicas_begun=begun)
    return _at(counted, before, event.placements), before


def apply_device_correction(
    workloads: Mapping[str, Workload], record: NodeRecord, event: DevicesCorrected
) -> dict[str, Workload]:
    """The workloads as they are afterwards, with the node's ledger; raises ContradictoryEvent, and nothing has changed.

    What the engine says is so: a cordon, a lost device or what others are taken to hold is no objection.
    """
    after: dict[str, Workload] = {}
    seen: set[tuple[str, int]] = set()
    ledger = record.copy()
    for one in event.replicas:
        key, replica = one.workload_id, one.placement.replica
        workload = after.get(key) or workloads.get(key)
        before = None if workload is None else next((it for it in workload.placements if it.replica == replica), None)
        if workload is None or before is None or before.gpu_instance is not None or (key, replica) in seen:
            raise ContradictoryEvent(f"replica {replica} of {key} holds no GPUs, or is corrected twice")
        if before.node_name != event.node_name or len(before.gpu_uuids) != len(one.placement.gpu_uuids):
            raise ContradictoryEvent(f"replica {replica} of {key} is on another node, or of another size")
        seen.add((key, replica))
        after[key] = _at(workload, [before], (one.placement,))
        ledger.release(key, replica)
    for one in event.replicas:
        assignment = make_assignment(after[one.workload_id], one.placement)
        for uuid in assignment.gpu_uuids:
            gpu = ledger.gpu(uuid)
            if gpu is None or gpu.mig_enabled or uuid in ledger.layouts:
                raise ContradictoryEvent(f"GPU {uuid} of {event.node_name} is gone or partitioned")
            if ledger.gpu_milli.get(uuid, 0) + assignment.gpu_milli > GPU_MILLI_WHOLE:
                raise ContradictoryEvent(f"GPU {uuid} of {event.node_name} is held by {next(ledger.holders(uuid), '')}")
        ledger.allocate_unchecked(assignment)
    for key, replica in seen:
        record.release(key, replica)
    for one in event.replicas:
        record.allocate_unchecked(make_assignment(after[one.workload_id], one.placement))
    record.update_overcommitted()
    return after


def is_sliced(workload: Workload) -> bool:
    """Whether the partition planner places its replicas."""
    return workload.spec.service is not None and workload.spec.service.slices


def apply_partition_plan(workloads: Mapping[str, Workload], event: PartitionsPlanned) -> dict[str, Workload]:
    """The services as they are afterwards; raises ContradictoryEvent."""
    found = {}
    for service in event.services:
        workload = workloads.get(service.workload_id)
        replicas = [item.replica for item in service.placements]
        if workload is None or workload.phase is WorkloadPhase.CANCELLED or not is_sliced(workload):
            raise ContradictoryEvent(f"workload {service.workload_id} is not there, or takes no slices")
        if not replicas or replicas != sorted(set(replicas)) or service.workload_id in found:
            raise ContradictoryEvent(f"workload {service.workload_id}: the placements are not one for each replica")
        if any(item.gpu_instance is None for item in service.placements):
            raise ContradictoryEvent(f"workload {service.workload_id}: a placement names no slice")
        begun = workload.replicas_begun or workload.spec.replicas
        found[service.workload_id] = replace(
            workload,
            spec=replace(workload.spec, replicas=len(replicas)),
            replicas_begun=begun,
            phase=WorkloadPhase.PLACED,
            reason="",
            placements=service.placements,
            placed_ns=workload.placed_ns or event.time_ns,
        )
    return found


def list_involved_nodes(
    before: Mapping[str, Workload], after: Mapping[str, Workload], event: PartitionsPlanned
) -> set[str]:
    """The nodes of all layouts, and of all places of the services."""
    found = {item.node_name for item in event.layouts}
    return found.union(item.node_name for key in after for item in (*before[key].placements, *after[key].placements))


def reallocate_slices(
    nodes: Mapping[str, NodeRecord],
    before: Mapping[str, Workload],
    after: Mapping[str, Workload],
    event: PartitionsPlanned,
) -> frozenset[str]:
    """Takes services from slices to slices and wants layouts, on records that may be half changed where it raises.

    Returns the nodes that something changed on; raises ContradictoryEvent.
    """
    touched = {planned.node_name for planned in event.layouts}
    for key, workload in after.items():
        stay = set(workload.placements).intersection(before[key].placements)
        for placement in before[key].placements:
            if placement not in stay:
                nodes[placement.node_name].release(key, placement.replica)
                touched.add(placement.node_name)
    for planned in event.layouts:
        nodes[planned.node_name].set_layout(planned.layout)
    for key, workload in after.items():
        stay = set(before[key].placements).intersection(workload.placements)
        for placement in workload.placements:
            if placement not in stay:
                nodes[placement.node_name].allocate(make_assignment(workload, placement))
                touched.add(placement.node_name)
    return frozenset(touched)


def _at(workload: Workload, before: list[Placement], after: tuple[Placement, ...]) -> Workload:
    gone = {item.replica for item in before}
    stay = [item for item in workload.placements if item.replica not in gone]
    return replace(workload, placements=tuple(sorted([*stay, *after], key=lambda item: item.replica)))
