"""Device ids of kubelets, claims and prologs become places on this node's devices.

Owns every spelling of a device that the field uses. Must not know who holds
it; it is handed the inventory.

Spellings: `GPU-uuid`, `GPU-uuid::N` (a time-slicing or MPS replica), `MIG-uuid`,
`MIG-uuid::N`, `MIG-GPU-uuid/GI/CI` (drivers before 470), `nvidiaN` and
`nvidiaN/giM` (GKE), `nvidiaN/vgpuM` (GKE replicas), `gpu-N`,
`gpu-N-mig-PROFILE-START-SIZE` and `gpu-N-mig-NAME-PROFILE-START` (NVIDIA's DRA
driver), `N` and `N.GI` (the mapping folder of a Slurm prolog). Numbers of
devices are the kernel's minors; they are taken for the driver's indices, which
is so on a machine whose devices all belong to one driver.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from eelgrid_protos.messages import Gpu, GpuInstance

__all__ = ["Place", "find_claimed", "find_device", "find_mapped"]

_REPLICA = re.compile(r"^(.+)::\d+$")
_OLD_MIG = re.compile(r"^MIG-(GPU-[0-9a-f-]+)/(\d+)/(\d+)$")
_GKE = re.compile(r"^nvidia(\d+)(?:/(?:gi(\d+)|vgpu\d+))?$")
_CLAIMED = re.compile(r"^gpu-(\d+)(?:-mig-(?:(\d+)-(\d+)-(\d+)|[a-z0-9-]*?[a-z][a-z0-9]*-(\d+)-(\d+)))?$")
_MAPPED = re.compile(r"^(\d{1,3})(?:\.(\d{1,3}))?$")


@dataclass(frozen=True, slots=True)
class Place:
    """A device, or one of its GPU instances."""

    gpu_uuid: str
    gpu_instance_id: int | None = None


def find_device(device_id: str, gpus: Iterable[Gpu]) -> Place | None:
    """The place that a device plugin's id means; None for a device that this node does not have."""
    replica = _REPLICA.match(device_id)
    plain = replica[1] if replica else device_id
    old, gke = _OLD_MIG.match(plain), _GKE.match(plain)
    for gpu in gpus:
        if plain == gpu.uuid:
            return Place(gpu.uuid)
        if old is not None and old[1] == gpu.uuid:
            return _instance_place(gpu, int(old[2]))
        if gke is not None and int(gke[1]) == gpu.index:
            return _instance_place(gpu, int(gke[2])) if gke[2] else Place(gpu.uuid)
        for instance in gpu.gpu_instances:
            if any(compute.uuid == plain for compute in instance.compute_instances if compute.uuid):
                return Place(gpu.uuid, instance.id)
    return None


def find_claimed(device: str, gpus: Iterable[Gpu]) -> Place | None:
    """The place that a device name of NVIDIA's DRA driver means."""
    found = _CLAIMED.match(device)
    if found is None:
        return None
    gpu = next((gpu for gpu in gpus if gpu.index == int(found[1])), None)
    if gpu is None:
        return None
    profile, start = found[2] or found[5], found[3] or found[6]
    if profile is None:
        return Place(gpu.uuid)
    held = next((one for one in gpu.gpu_instances if (one.profile_id, one.start) == (int(profile), int(start))), None)
    return None if held is None else Place(gpu.uuid, held.id)


def find_mapped(name: str, gpus: Iterable[Gpu]) -> Place | None:
    """The place that a file of a prolog's mapping folder is named for."""
    found = _MAPPED.match(name)
    gpu = None if found is None else next((gpu for gpu in gpus if gpu.index == int(found[1])), None)
    if found is None or gpu is None:
        return None
    return _instance_place(gpu, int(found[2])) if found[2] else Place(gpu.uuid)


def _instance_place(gpu: Gpu, instance_id: int) -> Place | None:
    """Only what stands: an id of before a new layout is nobody's place."""
    held: GpuInstance | None = next((one for one in gpu.gpu_instances if one.id == instance_id), None)
    return None if held is None else Place(gpu.uuid, held.id)
