"""The MIG layout of a device as NVML reads it back.

A GPU instance without a compute instance has no MIG handle, so instances are
walked by profile: NVML's enumeration of profiles gives the profile ids that
the other calls take, and those differ. The names are the driver's, since they
change between drivers. Without the right to walk instances (it takes the
mig/config capability), the MIG handles still show every instance that a
process could open; its span then follows from its id.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import pynvml

from eelgrid_protos.catalogue import Product, gi_span
from eelgrid_protos.messages import ComputeInstance, GpuInstance

__all__ = ["InstanceReader", "mig_devices"]

_FULL_ENUM = pynvml.NVML_GPU_INSTANCE_PROFILE_7_SLICE


@dataclass(frozen=True, slots=True)
class _Profile:
    """A GPU instance profile of one device; `enum` is NVML's own number for asking, `id` for everything else."""

    enum: int
    id: int
    name: str
    most: int


class InstanceReader:
    """Reads layouts; what cannot change while the driver stays is kept."""

    def __init__(self) -> None:
        self._profiles: dict[str, tuple[_Profile, ...]] = {}
        self._compute: dict[tuple[str, int], tuple[tuple[int, int], ...]] = {}

    def forget(self) -> None:
        """Another driver may print other names."""
        self._profiles.clear()
        self._compute.clear()

    def read(self, handle: Any, uuid: str, product: Product | None) -> tuple[GpuInstance, ...]:
        """The GPU instances of a device in MIG mode, by id; raises NVMLError when the device does not answer."""
        if uuid not in self._profiles:
            self._profiles[uuid] = _gi_profiles(handle, product)
        devices = mig_devices(handle)
        try:
            found = [
                self._instance(instance, uuid, profile, devices)
                for profile in self._profiles[uuid]
                for instance in _gpu_instances(handle, profile)
            ]
        except pynvml.NVMLError_NoPermission:
            found = _seen_from_outside(devices, self._profiles[uuid])
        return tuple(sorted(found, key=lambda instance: instance.id))

    def _instance(
        self, instance: Any, uuid: str, profile: _Profile, devices: dict[tuple[int, int], Any]
    ) -> GpuInstance:
        info = pynvml.nvmlGpuInstanceGetInfo(instance)
        key = (uuid, profile.id)
        if key not in self._compute:
            self._compute[key] = _ci_profiles(instance)
        compute = []
        for profile_id, most in self._compute[key]:
            for child in _compute_instances(instance, profile_id, most):
                found = pynvml.nvmlComputeInstanceGetInfo_v2(child)
                device = devices.get((info.id, found.id))
                compute.append(
                    ComputeInstance(
                        id=found.id,
                        profile_id=profile_id,
                        uuid="" if device is None else str(pynvml.nvmlDeviceGetUUID(device)),
                        start=found.placement.start,
                        size=found.placement.size,
                    )
                )
        return GpuInstance(
            id=info.id,
            profile_id=profile.id,
            profile=profile.name,
            start=info.placement.start,
            size=info.placement.size,
            compute_instances=tuple(sorted(compute, key=lambda child: child.id)),
        )


def _gi_profiles(handle: Any, product: Product | None) -> tuple[_Profile, ...]:
    profiles = []
    for enum in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info, name = _gi_profile(handle, enum, product)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            # A hole in this part's profiles, or past the end of an older driver's.
            continue
        profiles.append(_Profile(enum=enum, id=info.id, name=name, most=info.instanceCount))
    return tuple(profiles)


def _gi_profile(handle: Any, enum: int, product: Product | None) -> tuple[Any, str]:
    """NVML's description of a profile and its printed name; drivers before 510 print none."""
    try:
        info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum, version=2)
    except pynvml.NVMLError_FunctionNotFound:
        info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum, version=1)
        known = product.mig.profile_by_id(info.id) if product and product.mig else None
        return info, known.name if known else f"profile-{info.id}"
    return info, str(info.name).removeprefix("MIG ")


def _gpu_instances(handle: Any, profile: _Profile) -> list[Any]:
    found, count = (pynvml.c_nvmlGpuInstance_t * profile.most)(), ctypes.c_uint()
    pynvml.nvmlDeviceGetGpuInstances(handle, profile.id, found, ctypes.byref(count))
    return list(found[: count.value])


def _compute_instances(instance: Any, profile_id: int, most: int) -> list[Any]:
    found, count = (pynvml.c_nvmlComputeInstance_t * most)(), ctypes.c_uint()
    pynvml.nvmlGpuInstanceGetComputeInstances(instance, profile_id, found, ctypes.byref(count))
    return list(found[: count.value])


def _ci_profiles(instance: Any) -> tuple[tuple[int, int], ...]:
    """Profile id and most instances of each compute instance profile."""
    shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
    found = []
    for enum in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, enum, shared, version=1)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            continue
        found.append((int(info.id), int(info.instanceCount)))
    return tuple(found)


def mig_devices(handle: Any) -> dict[tuple[int, int], Any]:
    """MIG handles by the ids of their GPU instance and compute instance."""
    devices = {}
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError_NotFound:
            continue
        key = (pynvml.nvmlDeviceGetGpuInstanceId(device), pynvml.nvmlDeviceGetComputeInstanceId(device))
        devices[key] = device
    return devices


def _seen_from_outside(devices: dict[tuple[int, int], Any], profiles: tuple[_Profile, ...]) -> list[GpuInstance]:
    """The layout by MIG handles: "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb" tells the profile, the id tells the span."""
    slices = 8 if any(profile.enum == _FULL_ENUM for profile in profiles) else 4
    by_name = {profile.name: profile for profile in profiles}
    names: dict[int, str] = {}
    compute: dict[int, list[ComputeInstance]] = {}
    for (number, part), device in sorted(devices.items()):
        name = str(pynvml.nvmlDeviceGetName(device)).rpartition("MIG ")[2]
        # The compute part ("1c.") is there only when it is not the whole instance.
        names[number] = name.partition("c.")[2] or name
        mig_uuid = str(pynvml.nvmlDeviceGetUUID(device))
        compute.setdefault(number, []).append(ComputeInstance(id=part, uuid=mig_uuid))
    found = []
    for number, name in names.items():
        start, size = gi_span(number, slices)
        profile = by_name.get(name)
        found.append(
            GpuInstance(
                id=number,
                profile_id=profile.id if profile else 0,
                profile=name,
                start=start,
                size=size,
                compute_instances=tuple(compute[number]),
            )
        )
    return found
