"""The MIG symbols of the simulated library: profiles, instances and their handles, as NVML numbers them.

Two numberings meet here, as in NVML: a profile is asked for by its enumeration
and answers with its id, which every other call takes. What changes a device
lives in library_control.
"""

from collections.abc import Callable
from typing import Any

import pynvml

from eelgrid_agent.simulation.branches import profiles_end
from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.handles import Handles, Symbol, Target, behind, fill, put, refusing
from eelgrid_agent.simulation.mig import Refusal, Refused, SimCompute, SimInstance
from eelgrid_agent.simulation.operations import Operations
from eelgrid_protos.catalogue import CiProfile, GiProfile
from eelgrid_protos.messages import AccessLevel

__all__ = ["mig_symbols"]

_INVALID = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
_NOT_FOUND = int(pynvml.NVML_ERROR_NOT_FOUND)
_NOT_SUPPORTED = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
_MISMATCH = int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)

# NVML's enumeration of compute instance profiles by slices; the one of a double-memory instance has its own.
_CI_ENUMS = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
_CI_REV1_ID = 7
_CI_REV1_ENUM = 7


def mig_symbols(handles: Handles, operations: Operations, *, branch: int, privileged: bool) -> dict[str, Symbol]:
    """All of them, by name; without `privileged` nobody may walk instances, whatever their rights."""

    def config() -> None:
        if not (privileged and operations.may(AccessLevel.MIG_CONFIG)):
            raise Refused(Refusal.NO_PERMISSION)

    return {
        **_profile_symbols(handles, profiles_end(branch)),
        **_placement_symbols(handles, config),
        **_walk_symbols(handles, config),
        **_device_symbols(handles),
    }


def _profile_symbols(handles: Handles, end: int) -> dict[str, Symbol]:
    """Those of a driver that numbers GPU instance profiles up to `end`."""

    def profile_of(gpu: SimGpu, enum: int) -> GiProfile | None:
        profiles = gpu.mig.geometry.profiles.values() if gpu.mig.geometry else ()
        return next((profile for profile in profiles if profile.enum == enum), None)

    def ci_of(instance: SimInstance, enum: int) -> CiProfile | None:
        return next((ci for ci in instance.profile.compute_instances if _ci_enum(ci) == enum), None)

    def gi_profile(gpu: SimGpu, enum: int, ref: Any) -> int:
        if not 0 <= enum < end:
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

    def ci_profile(target: Target, enum: int, engine: int, ref: Any) -> int:
        if target.instance is None or not 0 <= enum < pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT:
            return _INVALID
        profile = ci_of(target.instance, enum)
        if profile is None or engine != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
            return _NOT_SUPPORTED
        info = behind(ref)
        info.id, info.sliceCount, info.instanceCount = profile.id, profile.compute_slices, profile.most
        info.multiprocessorCount = profile.sm_count or 0
        return 0

    def ci_profile_v(target: Target, enum: int, engine: int, ref: Any) -> int:
        if behind(ref).version != pynvml.nvmlComputeInstanceProfileInfo_v2:
            return _MISMATCH
        code = ci_profile(target, enum, engine, ref)
        if not code and target.instance is not None and (profile := ci_of(target.instance, enum)) is not None:
            behind(ref).name = f"MIG {_part_name(target.instance, profile)}".encode()
        return code

    return {
        "nvmlDeviceGetGpuInstanceProfileInfo": handles.on_device(gi_profile),
        "nvmlDeviceGetGpuInstanceProfileInfoV": handles.on_device(gi_profile_v),
        "nvmlGpuInstanceGetComputeInstanceProfileInfo": handles.on(ci_profile),
        "nvmlGpuInstanceGetComputeInstanceProfileInfoV": handles.on(ci_profile_v),
    }


def _placement_symbols(handles: Handles, config: Callable[[], None]) -> dict[str, Symbol]:
    def placements(gpu: SimGpu, profile_id: int, found: Any, count: Any) -> int:
        # What is occupied does not matter, nor whether MIG is on.
        config()
        profile = gpu.mig.profile(profile_id)
        return _write_spans(profile.starts, profile.size, found, count)

    def remaining(gpu: SimGpu, profile_id: int, ref: Any) -> int:
        config()
        return put(ref, gpu.mig.remaining(profile_id))

    def ci_placements(target: Target, profile_id: int, found: Any, count: Any) -> int:
        config()
        profile = _gpu_instance(target).profile_by_id(profile_id)
        return _write_spans(profile.starts, profile.compute_slices, found, count)

    def ci_remaining(target: Target, profile_id: int, ref: Any) -> int:
        config()
        instance = _gpu_instance(target)
        profile = instance.profile_by_id(profile_id)
        return put(ref, len(instance.free_starts(profile)))

    return {
        "nvmlDeviceGetGpuInstancePossiblePlacements_v2": handles.on_device(refusing(placements)),
        "nvmlDeviceGetGpuInstanceRemainingCapacity": handles.on_device(refusing(remaining)),
        "nvmlGpuInstanceGetComputeInstancePossiblePlacements": handles.on(refusing(ci_placements)),
        "nvmlGpuInstanceGetComputeInstanceRemainingCapacity": handles.on(refusing(ci_remaining)),
    }


def _walk_symbols(handles: Handles, config: Callable[[], None]) -> dict[str, Symbol]:
    def gpu_instances(gpu: SimGpu, profile_id: int, found: Any, count: Any) -> int:
        config()
        if not gpu.mig.enabled:
            return _NOT_SUPPORTED
        held = [instance for _, instance in sorted(gpu.mig.instances.items()) if instance.profile.id == profile_id]
        for place, instance in enumerate(held):
            _issue_into(handles, Target(gpu, gpu.generation, instance), found, place)
        return put(count, len(held))

    def gpu_instance_by_id(gpu: SimGpu, instance_id: int, ref: Any) -> int:
        config()
        return handles.issue(Target(gpu, gpu.generation, gpu.mig.instance(instance_id)), behind(ref))

    def gpu_instance_info(target: Target, ref: Any) -> int:
        instance, info = _gpu_instance(target), behind(ref)
        info.id, info.profileId = instance.id, instance.profile.id
        info.placement.start, info.placement.size = instance.start, instance.profile.size
        return handles.issue(Target(target.gpu, target.generation), info.device)

    def compute_instances(target: Target, profile_id: int, found: Any, count: Any) -> int:
        instance = _gpu_instance(target)
        config()
        held = [child for _, child in sorted(instance.compute.items()) if child.profile.id == profile_id]
        for place, child in enumerate(held):
            _issue_into(handles, Target(target.gpu, target.generation, instance, child), found, place)
        return put(count, len(held))

    def compute_instance_by_id(target: Target, compute_id: int, ref: Any) -> int:
        instance = _gpu_instance(target)
        config()
        child = target.gpu.mig.compute(instance.id, compute_id)
        return handles.issue(Target(target.gpu, target.generation, instance, child), behind(ref))

    def compute_instance_info(target: Target, ref: Any) -> int:
        if target.compute is None or target.mig_device:
            return _INVALID
        child, info = target.compute, behind(ref)
        info.id, info.profileId = child.id, child.profile.id
        info.placement.start, info.placement.size = child.start, child.profile.compute_slices
        return handles.issue(Target(target.gpu, target.generation), info.device) or handles.issue(
            Target(target.gpu, target.generation, target.instance), info.gpuInstance
        )

    return {
        "nvmlDeviceGetGpuInstances": handles.on_device(refusing(gpu_instances)),
        "nvmlDeviceGetGpuInstanceById": handles.on_device(refusing(gpu_instance_by_id)),
        "nvmlGpuInstanceGetInfo": handles.on(refusing(gpu_instance_info)),
        "nvmlGpuInstanceGetComputeInstances": handles.on(refusing(compute_instances)),
        "nvmlGpuInstanceGetComputeInstanceById": handles.on(refusing(compute_instance_by_id)),
        "nvmlComputeInstanceGetInfo_v2": handles.on(compute_instance_info),
    }


def _device_symbols(handles: Handles) -> dict[str, Symbol]:
    """What answers for devices and MIG devices alike."""

    def mode(gpu: SimGpu, current: Any, pending: Any) -> int:
        if gpu.product.mig is None:
            return _NOT_SUPPORTED
        return put(current, int(gpu.mig.enabled)) or put(pending, int(gpu.mig.pending))

    def most(gpu: SimGpu, ref: Any) -> int:
        return put(ref, gpu.mig.geometry.most if gpu.mig.geometry and gpu.mig_enabled else 0)

    def by_index(gpu: SimGpu, index: Any, ref: Any) -> int:
        found = [
            (held, child) for _, held in sorted(gpu.mig.instances.items()) for _, child in sorted(held.compute.items())
        ]
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
        suffix = _device_name(target.instance, target.compute)
        return fill(buffer, length, target.gpu.identity.product + suffix)

    return {
        "nvmlDeviceGetMigMode": handles.on_device(mode, holds=False),
        "nvmlDeviceGetMaxMigDeviceCount": handles.on_device(most),
        "nvmlDeviceGetMigDeviceHandleByIndex": handles.on_device(by_index),
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": handles.on(parent),
        "nvmlDeviceIsMigDeviceHandle": handles.on(is_mig),
        "nvmlDeviceGetGpuInstanceId": handles.on(instance_id),
        "nvmlDeviceGetComputeInstanceId": handles.on(compute_id),
        "nvmlDeviceGetUUID": handles.on(uuid),
        "nvmlDeviceGetName": handles.on(name),
    }


def _gpu_instance(target: Target) -> SimInstance:
    """The GPU instance that a handle stands for; raises Refused where it stands for anything else."""
    if target.instance is None or target.compute is not None or target.mig_device:
        raise Refused(Refusal.INVALID)
    return target.instance


def _write_spans(starts: tuple[int, ...], size: int, found: Any, count: Any) -> int:
    """The places into the caller's array, or only their number where there is none.

    The number is an answer and no question: the array is taken to be large enough, as the C library takes it.
    """
    behind(count).value = len(starts)
    for place, start in enumerate(starts if found else ()):
        behind(found)[place].start, behind(found)[place].size = start, size
    return 0


def _ci_enum(profile: CiProfile) -> int:
    return _CI_REV1_ENUM if profile.id == _CI_REV1_ID else _CI_ENUMS[profile.compute_slices]


def _part_name(instance: SimInstance, profile: CiProfile) -> str:
    """3g.20gb, or 1c.3g.20gb for a part of it."""
    part = "" if profile == instance.profile.whole else f"{profile.compute_slices}c."
    return f"{part}{instance.profile.name}"


def _device_name(instance: SimInstance | None, compute: SimCompute | None) -> str:
    """What follows the device's name."""
    return "" if instance is None or compute is None else f" MIG {_part_name(instance, compute.profile)}"


def _issue_into(handles: Handles, target: Target, found: Any, place: int) -> None:
    """Writes a handle into the caller's array."""
    array = behind(found)
    slot = type(array[place])()
    handles.issue(target, slot)
    array[place] = slot
