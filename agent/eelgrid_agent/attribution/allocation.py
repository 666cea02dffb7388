"""Who holds which device, whatever it does with it.

Owns what an allocation is and which of several sources is believed. Must not
know how a source is asked.

Theory. Allocation and use are different facts and are kept apart. Several
sources may speak of one device: our plan places a workload, whose pod the
kubelet then lists, in which Slurm may run a job. They name one holder from the
outside in, so for each device the innermost source that says anything speaks
alone; adding them up would charge one holder twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from eelgrid_agent.attribution.device_ids import Place, find_claimed, find_device
from eelgrid_agent.attribution.owner import Owner, OwnerKind
from eelgrid_protos.kubelet import ContainerDevices
from eelgrid_protos.messages import Assignment, Gpu

__all__ = ["Allocation", "AllocationSource", "believed", "plan_allocations", "pod_allocations"]

# NVIDIA's DRA driver; others name their devices differently.
_DRA_DRIVER = "gpu.nvidia.com"


class AllocationSource(IntEnum):
    """Who says so; the higher one is the inner one."""

    PLAN = 1
    POD_RESOURCES = 2
    SLURM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One holder of a place; `shares` counts the replicas of a shared device that it holds."""

    place: Place
    owner: Owner
    source: AllocationSource
    shares: int = 1


def believed(allocations: Iterable[Allocation]) -> tuple[Allocation, ...]:
    """Of each device, what the innermost source says."""
    kept = tuple(allocations)
    best: dict[str, AllocationSource] = {}
    for allocation in kept:
        uuid = allocation.place.gpu_uuid
        best[uuid] = max(best.get(uuid, allocation.source), allocation.source)
    return tuple(allocation for allocation in kept if allocation.source is best[allocation.place.gpu_uuid])


def pod_allocations(containers: Iterable[ContainerDevices], gpus: Iterable[Gpu]) -> tuple[Allocation, ...]:
    """What the kubelet gave to containers; ids of other devices than ours are passed over, whatever their resource."""
    devices = tuple(gpus)
    shares: dict[tuple[Place, Owner], int] = {}
    for one in containers:
        owner = Owner(kind=OwnerKind.POD, namespace=one.namespace, pod=one.pod, container=one.container)
        places = [find_device(device_id, devices) for _, device_id in one.devices]
        places += [find_claimed(claim.device, devices) for claim in one.claimed if claim.driver == _DRA_DRIVER]
        for place in places:
            if place is not None:
                shares[place, owner] = shares.get((place, owner), 0) + 1
    return tuple(
        Allocation(place=place, owner=owner, source=AllocationSource.POD_RESOURCES, shares=count)
        for (place, owner), count in shares.items()
    )


def plan_allocations(assignments: Iterable[Assignment], gpus: Iterable[Gpu]) -> tuple[Allocation, ...]:
    """What the plan in force gives to workloads; `gpu_milli` of a shared device counts as its shares."""
    devices = tuple(gpus)
    found = []
    for assignment in assignments:
        owner = Owner(kind=OwnerKind.WORKLOAD, workload=assignment.workload_id)
        for uuid in assignment.gpu_uuids:
            place = find_device(uuid, devices)
            if place is not None:
                shares = max(1, assignment.gpu_milli)
                found.append(Allocation(place=place, owner=owner, source=AllocationSource.PLAN, shares=shares))
    return tuple(found)
