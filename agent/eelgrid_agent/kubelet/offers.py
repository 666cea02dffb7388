"""Which devices are offered under which resource name.

Owns the names and what is whole, cut or not to be given. Must not know sockets or plans.

Theory. A GPU without MIG is one device of `nvidia.com/gpu`. One that is cut offers each GPU
instance whose one compute instance takes all of it, under the name of its profile, as
NVIDIA's plugin does with the strategy `mixed`: `nvidia.com/mig-1g.10gb`, `+` spelled as `.`.
An instance that is cut further holds several compute instances and is no device here. A GPU
between two modes offers nothing: what the kubelet would give away may be gone a second later.
A device that is lost or cordoned is offered as unhealthy: pods that hold it run on, no other
gets it. Ids are the driver's UUIDs, so they mean the same to PodResources and to NVML.
"""

from collections.abc import Iterable, Mapping

from eelgrid_protos.device_plugin import OfferedDevice
from eelgrid_protos.messages import Gpu, GpuInstance

__all__ = ["by_place", "mig_resource", "offers_of", "slices_of", "whole_resource"]


def whole_resource(domain: str) -> str:
    """The name of whole GPUs."""
    return f"{domain}/gpu"


def mig_resource(domain: str, profile: str) -> str:
    """The name of slices of one profile."""
    return f"{domain}/mig-{profile.replace('+', '.')}"


def offers_of(gpus: Iterable[Gpu], domain: str) -> dict[str, tuple[OfferedDevice, ...]]:
    """The devices by resource name, in order of GPU index and start."""
    found: dict[str, list[OfferedDevice]] = {}
    for gpu in sorted(gpus, key=lambda gpu: gpu.index):
        is_healthy = not (gpu.lost or gpu.cordon)
        if gpu.mig_pending:
            continue
        if not gpu.mig_enabled:
            found.setdefault(whole_resource(domain), []).append(_device(gpu.uuid, gpu, is_healthy=is_healthy))
            continue
        for instance in sorted(gpu.gpu_instances, key=lambda one: one.start):
            uuid = _whole_instance(instance)
            if uuid:
                devices = found.setdefault(mig_resource(domain, instance.profile), [])
                devices.append(_device(uuid, gpu, is_healthy=is_healthy))
    return {name: tuple(devices) for name, devices in found.items()}


def by_place(gpus: Iterable[Gpu]) -> Mapping[str, int]:
    """The index of the GPU that each device is on, by the device's id."""
    found: dict[str, int] = {}
    for gpu in gpus:
        found[gpu.uuid] = gpu.index
        found.update({uuid: gpu.index for one in gpu.gpu_instances if (uuid := _whole_instance(one))})
    return found


def slices_of(gpus: Iterable[Gpu]) -> Mapping[str, int]:
    """How many memory slices each slice has, by the device's id; in order of GPU index and start."""
    return {
        uuid: one.size
        for gpu in sorted(gpus, key=lambda gpu: gpu.index)
        for one in sorted(gpu.gpu_instances, key=lambda one: one.start)
        if (uuid := _whole_instance(one))
    }


def _whole_instance(instance: GpuInstance) -> str:
    """The UUID of the compute instance that is the whole of a GPU instance; empty where there is none."""
    parts = instance.compute_instances
    return parts[0].uuid if len(parts) == 1 else ""


def _device(uuid: str, gpu: Gpu, *, is_healthy: bool) -> OfferedDevice:
    return OfferedDevice(device_id=uuid, is_healthy=is_healthy, numa_node=gpu.numa_node)
