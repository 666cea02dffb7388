"""The MIG symbols of the simulated library: profiles, instances and their handles, as NVML numbers them.

Two numberings meet here, as in NVML: a profile is asked for by its enumeration
and answers with its id, which every other call takes.
"""

from typing import Any

import pynvml

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.handles import Handles, Symbol, Target, behind, fill, put
from eelgrid_protos.catalogue import CiProfile, GiProfile
from eelgrid_protos.messages import ComputeInstance, GpuInstance

__all__ = ["mig_symbols"]

_INVALID = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
_NO_PERMISSION = int(pynvml.NVML_ERROR_NO_PERMISSION)
_NOT_FOUND = int(pynvml.NVML_ERROR_NOT_FOUND)
_NOT_SUPPORTED = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
_MISMATCH = int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)

# NVML's enumeration of compute instance profiles by slices; the one of a double-memory instance has its own.
_CI_ENUMS = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
_CI_REV1_ID = 7
_CI_REV1_ENUM = 7


def mig_symbols(handles: Handles, *, privileged: bool) -> dict[str, Symbol]:
    """All of them, by name."""
    return {**_profile_symbols(handles), **_walk_symbols(handles, privileged), **_device_symbols(handles)}


def _profile_symbols(handles: Handles) -> dict[str, Symbol]:
    def profile_of(gpu: SimGpu, enum: int) -> GiProfile | None:
        profiles = gpu.product.mig.profiles.values() if gpu.product.mig else ()
        return next((profile for profile in profiles if profile.enum == enum), None)

    def gi_profile(gpu: SimGpu, enum: int, ref: Any) -> int:
        if not 0 <= enum < pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT:
            return _INVALID
        profile = profile_of(gpu, enum)
        if profile is None:
            return _NOT_SUPPORTED
        info = behind(ref)
        info.id, info.sliceCount, info.instanceCount = profile.id, profile.compute_slices, profile.most
        info.multiprocessorCount, info.memorySizeMB = profile.sm_count or 0, profile.memory_mib or 0
        engines = profile.engines or (0, 0, 0, 0, 0)
        info.copyEngineCount, info.decoderCount, info.encoderCount, info.jpegCount, info.ofaCount = engines
        return 0

    def gi_profile_v(gpu: SimGpu, enum: int, ref: Any) -> int:
        if behind(ref).version != pynvml.nvmlGpuInstanceProfileInfo_v2:
            return _MISMATCH
        code = gi_profile(gpu, enum, ref)
        profile = profile_of(gpu, enum)
        if profile is not None:
            behind(ref).name = f"MIG {profile.name}".encode()
        return code

    def placements(gpu: SimGpu, profile_id: int, found: Any, count: Any) -> int:
        profile = gpu.product.mig.profile_by_id(profile_id) if gpu.product.mig else None
        if profile is None:
            return _NOT_SUPPORTED
        behind(count).value = len(profile.starts)
        for place, start in enumerate(profile.starts if found else ()):
            behind(found)[place].start, behind(found)[place].size = start, profile.size
        return 0

    def ci_profile(target: Target, enum: int, engine: int, ref: Any) -> int:
        if target.instance is None or not 0 <= enum < pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT:
            return _INVALID
        known = _compute_profiles(target.gpu, target.instance)
        profile = next((ci for ci in known if _ci_enum(ci) == enum), None)
        if profile is None or engine != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
            return _NOT_SUPPORTED
        info = behind(ref)
        info.id, info.sliceCount, info.instanceCount = profile.id, profile.compute_slices, profile.most
        info.multiprocessorCount = profile.sm_count or 0
        return 0

    return {
        "nvmlDeviceGetGpuInstanceProfileInfo": handles.on_device(gi_profile),
        "nvmlDeviceGetGpuInstanceProfileInfoV": handles.on_device(gi_profile_v),
        "nvmlDeviceGetGpuInstancePossiblePlacements_v2": handles.on_device(placements),
        "nvmlGpuInstanceGetComputeInstanceProfileInfo": handles.on(ci_profile),
    }


def _walk_symbols(handles: Handles, privileged: bool) -> dict[str, Symbol]:
    def gpu_instances(gpu: SimGpu, profile_id: int, found: Any, count: Any) -> int:
        if not privileged:
            return _NO_PERMISSION
        if not gpu.mig_enabled:
            return _NOT_SUPPORTED
        held = [instance for instance in gpu.identity.gpu_instances if instance.profile_id == profile_id]
        for place, instance in enumerate(held):
            _issue_into(handles, Target(gpu, gpu.generation, instance), found, place)
        return put(count, len(held))

    def gpu_instance_info(target: Target, ref: Any) -> int:
        if target.instance is None or target.mig_device:
            return _INVALID
        info = behind(ref)
        info.id, info.profileId = target.instance.id, target.instance.profile_id
        info.placement.start, info.placement.size = target.instance.start, target.instance.size
        handles.issue(Target(target.gpu, target.generation), info.device)
        return 0

    def compute_instances(target: Target, profile_id: int, found: Any, count: Any) -> int:
        if target.instance is None or target.mig_device:
            return _INVALID
        if not privileged:
            return _NO_PERMISSION
        held = [child for child in target.instance.compute_instances if child.profile_id == profile_id]
        for place, child in enumerate(held):
            _issue_into(handles, Target(target.gpu, target.generation, target.instance, child), found, place)
        return put(count, len(held))

    def compute_instance_info(target: Target, ref: Any) -> int:
        if target.compute is None or target.mig_device:
            return _INVALID
        behind(ref).id, behind(ref).profileId = target.compute.id, target.compute.profile_id
        return 0

    return {
        "nvmlDeviceGetGpuInstances": handles.on_device(gpu_instances),
        "nvmlGpuInstanceGetInfo": handles.on(gpu_instance_info),
        "nvmlGpuInstanceGetComputeInstances": handles.on(compute_instances),
        "nvmlComputeInstanceGetInfo_v2": handles.on(compute_instance_info),
    }


def _device_symbols(handles: Handles) -> dict[str, Symbol]:
    """What answers for devices and MIG devices alike."""

    def mode(gpu: SimGpu, current: Any, pending: Any) -> int:
        if gpu.product.mig is None:
            return _NOT_SUPPORTED
        return put(current, int(gpu.mig_enabled)) or put(pending, int(gpu.mig_enabled))

    def most(gpu: SimGpu, ref: Any) -> int:
        return put(ref, gpu.product.mig.most if gpu.product.mig and gpu.mig_enabled else 0)

    def by_index(gpu: SimGpu, index: Any, ref: Any) -> int:
        found = [(held, child) for held in gpu.identity.gpu_instances for child in held.compute_instances]
        if index.value >= len(found):
            return _NOT_FOUND
        instance, child = found[index.value]
        return handles.issue(Target(gpu, gpu.generation, instance, child, mig_device=True), behind(ref))

    def parent(target: Target, ref: Any) -> int:
        return handles.issue(Target(target.gpu, target.generation), behind(ref))

    def is_mig(target: Target, ref: Any) -> int:
        return put(ref, int(target.mig_device))

    def instance_id(target: Target, ref: Any) -> int:
        return put(ref, target.instance.id if target.instance else None)

    def compute_id(target: Target, ref: Any) -> int:
        return put(ref, target.compute.id if target.compute else None)

    def uuid(target: Target, buffer: Any, length: Any) -> int:
        return fill(buffer, length, target.compute.uuid if target.compute else target.gpu.identity.uuid)

    def name(target: Target, buffer: Any, length: Any) -> int:
        suffix = _device_name(target.gpu, target.instance, target.compute)
        return fill(buffer, length, target.gpu.identity.product + suffix)

    return {
        "nvmlDeviceGetMigMode": handles.on_device(mode),
        "nvmlDeviceGetMaxMigDeviceCount": handles.on_device(most),
        "nvmlDeviceGetMigDeviceHandleByIndex": handles.on_device(by_index),
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": handles.on(parent),
        "nvmlDeviceIsMigDeviceHandle": handles.on(is_mig),
        "nvmlDeviceGetGpuInstanceId": handles.on(instance_id),
        "nvmlDeviceGetComputeInstanceId": handles.on(compute_id),
        "nvmlDeviceGetUUID": handles.on(uuid),
        "nvmlDeviceGetName": handles.on(name),
    }


def _compute_profiles(gpu: SimGpu, instance: GpuInstance) -> tuple[CiProfile, ...]:
    profile = gpu.product.mig.profile_by_id(instance.profile_id) if gpu.product.mig else None
    return profile.compute_instances if profile else ()


def _ci_enum(profile: CiProfile) -> int:
    return _CI_REV1_ENUM if profile.id == _CI_REV1_ID else _CI_ENUMS[profile.compute_slices]


def _device_name(gpu: SimGpu, instance: GpuInstance | None, compute: ComputeInstance | None) -> str:
    """What follows the device's name: "MIG 3g.20gb", or "MIG 1c.3g.20gb" for a part of it."""
    if instance is None or compute is None:
        return ""
    profiles = _compute_profiles(gpu, instance)
    slices = next(ci.compute_slices for ci in profiles if ci.id == compute.profile_id)
    part = "" if slices == max(ci.compute_slices for ci in profiles) else f"{slices}c."
    return f" MIG {part}{instance.profile}"


def _issue_into(handles: Handles, target: Target, found: Any, place: int) -> None:
    """Writes a handle into the caller's array."""
    array = behind(found)
    slot = type(array[place])()
    handles.issue(target, slot)
    array[place] = slot
