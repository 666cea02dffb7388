"""Device allocations: which owner holds which device, and how kubelet, DRA and Slurm device ids are resolved.

Allocation and use are different facts and are kept apart. Several sources may name a holder of one device: the plan
places a workload, the kubelet lists its pod, and Slurm may run a job inside. They are nested, so for each device only
the innermost source that names anyone counts; adding them up would charge one holder twice.

Forms of ids: `GPU-uuid`, `GPU-uuid::N` (a time-slicing or MPS replica), `MIG-uuid`, `MIG-uuid::N`,
`MIG-GPU-uuid/GI/CI` (drivers before 470), `nvidiaN` and `nvidiaN/giM` (GKE), `nvidiaN/vgpuM` (GKE replicas), `gpu-N`,
`gpu-N-mig-PROFILE-START-SIZE` and `gpu-N-mig-NAME-PROFILE-START` (NVIDIA's DRA driver), `N` and `N.GI` (the mapping
folder of a Slurm prolog). Device numbers are the kernel's minors, taken as the driver's indices: the two agree on a
machine whose devices all belong to one driver.
"""

import re
from collections.abc import Iterable
from enum import IntEnum

from eelgrid_agent.energy.accounts import UsageOwner, UsageOwnerKind
from eelgrid_protos.kubelet_api import ContainerDevices
from eelgrid_protos.messages import Assignment, Gpu, GpuInstance
from eelgrid_protos.values import dataclass

_REPLICA = re.compile(r"^(.+)::\d+$")
_OLD_MIG = re.compile(r"^MIG-(GPU-[0-9a-f-]+)/(\d+)/(\d+)$")
_GKE = re.compile(r"^nvidia(\d+)(?:/(?:gi(\d+)|vgpu\d+))?$")
_CLAIMED = re.compile(r"^gpu-(\d+)(?:-mig-(?:(\d+)-(\d+)-(\d+)|[a-z0-9-]*?[a-z][a-z0-9]*-(\d+)-(\d+)))?$")
_MAPPED = re.compile(r"^(\d{1,3})(?:\.(\d{1,3}))?$")


@dataclass(frozen=True, slots=True)
class DeviceReference:
    """A device, or one of its GPU instances."""

    gpu_uuid: str
    gpu_instance_id: int | None = None


def find_device(device_id: str, gpus: Iterable[Gpu]) -> DeviceReference | None:
    """Returns the device or instance of a device plugin's id; None for a device that this node does not have."""
    replica = _REPLICA.match(device_id)
    plain = replica[1] if replica else device_id
    old, gke = _OLD_MIG.match(plain), _GKE.match(plain)
    for gpu in gpus:
        if plain == gpu.uuid:
            return DeviceReference(gpu.uuid)
        if old is not None and old[1] == gpu.uuid:
            return _instance_place(gpu, int(old[2]))
        if gke is not None and int(gke[1]) == gpu.index:
            return _instance_place(gpu, int(gke[2])) if gke[2] else DeviceReference(gpu.uuid)
        for instance in gpu.gpu_instances:
            if any(compute.uuid == plain for compute in instance.compute_instances if compute.uuid):
                return DeviceReference(gpu.uuid, instance.id)
    return None


def find_claimed_device(device: str, gpus: Iterable[Gpu]) -> DeviceReference | None:
    """Returns the device or instance of a device name of NVIDIA's DRA driver."""
    found = _CLAIMED.match(device)
    if found is None:
        return None
    gpu = next((gpu for gpu in gpus if gpu.index == int(found[1])), None)
    if gpu is None:
        return None
    profile, start = found[2] or found[5], found[3] or found[6]
    if profile is None:
        return DeviceReference(gpu.uuid)
    held = next((one for one in gpu.gpu_instances if (one.profile_id, one.start) == (int(profile), int(start))), None)
    return None if held is None else DeviceReference(gpu.uuid, held.id)


def find_mapped_device(name: str, gpus: Iterable[Gpu]) -> DeviceReference | None:
    """Returns the device or instance after which a file of a prolog's mapping folder is named."""
    found = _MAPPED.match(name)
    gpu = None if found is None else next((gpu for gpu in gpus if gpu.index == int(found[1])), None)
    if found is None or gpu is None:
        return None
    return _instance_place(gpu, int(found[2])) if found[2] else DeviceReference(gpu.uuid)


def _instance_place(gpu: Gpu, instance_id: int) -> DeviceReference | None:
    """Only what stands: an id of before a new layout is nobody's place."""
    held: GpuInstance | None = next((one for one in gpu.gpu_instances if one.id == instance_id), None)
    return None if held is None else DeviceReference(gpu.uuid, held.id)


# NVIDIA's DRA driver; others name their devices differently.
_DRA_DRIVER = "gpu.nvidia.com"


class AllocationSource(IntEnum):
    """The source of an allocation; a higher value is nested deeper."""

    PLAN = 1
    POD_RESOURCES = 2
    SLURM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAllocation:
    """One holder of a place; `shares` counts the replicas of a shared device that it holds."""

    place: DeviceReference
    owner: UsageOwner
    source: AllocationSource
    shares: int = 1


def select_innermost(allocations: Iterable[DeviceAllocation]) -> tuple[DeviceAllocation, ...]:
    """Returns, for each device, the allocations of the innermost source."""
    kept = tuple(allocations)
    best: dict[str, AllocationSource] = {}
    for allocation in kept:
        uuid = allocation.place.gpu_uuid
        best[uuid] = max(best.get(uuid, allocation.source), allocation.source)
    return tuple(allocation for allocation in kept if allocation.source is best[allocation.place.gpu_uuid])


def map_pod_allocations(containers: Iterable[ContainerDevices], gpus: Iterable[Gpu]) -> tuple[DeviceAllocation, ...]:
    """Returns what the kubelet allocated to containers; ids of other devices are skipped, whatever their resource."""
    devices = tuple(gpus)
    shares: dict[tuple[DeviceReference, UsageOwner], int] = {}
    for one in containers:
        owner = UsageOwner(kind=UsageOwnerKind.POD, namespace=one.namespace, pod=one.pod, container=one.container)
        places = [find_device(device_id, devices) for _, device_id in one.devices]
        places += [find_claimed_device(claim.device, devices) for claim in one.claimed if claim.driver == _DRA_DRIVER]
        for place in places:
            if place is not None:
                shares[place, owner] = shares.get((place, owner), 0) + 1
    return tuple(
        DeviceAllocation(place=place, owner=owner, source=AllocationSource.POD_RESOURCES, shares=count)
        for (place, owner), count in shares.items()
    )


def map_plan_allocations(assignments: Iterable[Assignment], gpus: Iterable[Gpu]) -> tuple[DeviceAllocation, ...]:
    """Returns what the plan in force allocates to workloads; `gpu_milli` of a shared device counts as its shares."""
    devices = tuple(gpus)
    found = []
    for assignment in assignments:
        owner = UsageOwner(kind=UsageOwnerKind.WORKLOAD, workload=assignment.workload_id)
        for uuid in assignment.gpu_uuids:
            place = find_device(uuid, devices)
            if place is not None:
                shares = max(1, assignment.gpu_milli)
                found.append(DeviceAllocation(place=place, owner=owner, source=AllocationSource.PLAN, shares=shares))
    return tuple(found)
