"""The simulated NVML library under the real binding: sessions, control and MIG; what it reads is in nvml_readings.

`install_library` puts an object into the binding whose attributes are functions named as C symbols; a symbol that
the simulated driver branch lacks is no attribute. Handles of a lost device stay dead when it returns. A mode change
reports success even where it only waits. Profiles are asked for by enumeration and answer with the id that every other
call takes.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pynvml

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.mig import DriverRefusal, DriverRefused, ModeActivation, SimCompute, SimInstance
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.nvml_handles import (
    CSymbol,
    HandleTable,
    HandleTarget,
    dereference_argument,
    translate_refusals,
    write_number,
    write_text,
)
from eelgrid_agent.simulation.nvml_readings import build_reading_symbols
from eelgrid_agent.simulation.operations import DeviceOperations
from eelgrid_agent.simulation.sensors import FABRIC_SINCE, GPM_SINCE, RESERVED_SINCE
from eelgrid_agent.simulation.spec import get_profile_id_end
from eelgrid_protos.catalogue.products import CiProfile, GiProfile
from eelgrid_protos.messages import AccessLevel

_INVALID = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
_NOT_FOUND = int(pynvml.NVML_ERROR_NOT_FOUND)
_NOT_SUPPORTED = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
_TOO_SMALL = int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
_MISMATCH = int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
_ACTIVATION = {
    ModeActivation.DONE: 0,
    ModeActivation.RESET_REQUIRED: int(pynvml.NVML_ERROR_RESET_REQUIRED),
    ModeActivation.IN_USE: int(pynvml.NVML_ERROR_IN_USE),
}
_MASK_BITS = 32


def _control_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    return {
        **_mode_symbols(node, handles),
        **_instance_symbols(node, handles),
        **_power_symbols(node, handles),
        **_clock_symbols(node, handles),
        **_profile_symbols(node, handles),
    }


def _mode_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    def set_mode(gpu: SimGpu, mode: int, activation: Any) -> int:
        if mode not in (pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_ENABLE):
            return _INVALID
        own = handles.sessions > 1 or gpu.identity.uuid in handles.held
        done = node.operations.set_mode(gpu, enabled=mode == pynvml.NVML_DEVICE_MIG_ENABLE, other_sessions=own)
        return write_number(activation, _ACTIVATION[done])

    return {"nvmlDeviceSetMigMode": handles.wrap_device(translate_refusals(set_mode), holds=False)}


def _instance_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    operations = node.operations

    def create(gpu: SimGpu, profile_id: int, ref: Any) -> int:
        instance = operations.create_instance(gpu, profile_id)
        return handles.issue_handle(HandleTarget(gpu, gpu.generation, instance), dereference_argument(ref))

    def create_at(gpu: SimGpu, profile_id: int, placement: Any, ref: Any) -> int:
        # A struct that comes by value is no pointer; the C library would follow it.
        place = getattr(placement, "_obj", None)
        if place is None or place.size != gpu.mig.get_profile(profile_id).size:
            return _INVALID
        instance = operations.create_instance(gpu, profile_id, place.start)
        return handles.issue_handle(HandleTarget(gpu, gpu.generation, instance), dereference_argument(ref))

    def destroy(target: HandleTarget) -> int:
        if target.instance is None or target.compute is not None:
            return _INVALID
        operations.destroy_instance(target.gpu, target.instance.id)
        return 0

    def create_compute(target: HandleTarget, profile_id: int, ref: Any) -> int:
        return _make_compute(target, profile_id, None, ref)

    def create_compute_at(target: HandleTarget, profile_id: int, placement: Any, ref: Any) -> int:
        place = getattr(placement, "_obj", None)
        return _INVALID if place is None else _make_compute(target, profile_id, int(place.start), ref)

    def _make_compute(target: HandleTarget, profile_id: int, start: int | None, ref: Any) -> int:
        if target.instance is None or target.compute is not None:
            return _INVALID
        compute = operations.create_compute(target.gpu, target.instance.id, profile_id, start)
        return handles.issue_handle(
            HandleTarget(target.gpu, target.generation, target.instance, compute), dereference_argument(ref)
        )

    def destroy_compute(target: HandleTarget) -> int:
        if target.instance is None or target.compute is None or target.mig_device:
            return _INVALID
        operations.destroy_compute(target.gpu, target.instance.id, target.compute.id)
        return 0

    return {
        "nvmlDeviceCreateGpuInstance": handles.wrap_device(translate_refusals(create)),
        "nvmlDeviceCreateGpuInstanceWithPlacement": handles.wrap_device(translate_refusals(create_at)),
        "nvmlGpuInstanceDestroy": handles.wrap_target(translate_refusals(destroy)),
        "nvmlGpuInstanceCreateComputeInstance": handles.wrap_target(translate_refusals(create_compute)),
        "nvmlGpuInstanceCreateComputeInstanceWithPlacement": handles.wrap_target(translate_refusals(create_compute_at)),
        "nvmlComputeInstanceDestroy": handles.wrap_target(translate_refusals(destroy_compute)),
    }


def _power_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    def set_limit(gpu: SimGpu, limit: Any) -> int:
        node.operations.set_power_limit(gpu, limit.value)
        return 0

    def set_limit_v2(gpu: SimGpu, ref: Any) -> int:
        value = dereference_argument(ref)
        if value.version != pynvml.nvmlPowerValue_v2:
            return _MISMATCH
        if value.powerScope != pynvml.NVML_POWER_SCOPE_GPU:
            return _NOT_SUPPORTED
        node.operations.set_power_limit(gpu, value.powerValueMw)
        return 0

    return {
        "nvmlDeviceGetPowerManagementLimit": handles.wrap_number(lambda gpu: gpu.limit_mw),
        "nvmlDeviceSetPowerManagementLimit": handles.wrap_device(translate_refusals(set_limit)),
        "nvmlDeviceSetPowerManagementLimit_v2": handles.wrap_device(translate_refusals(set_limit_v2)),
    }


def _clock_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    def lock(gpu: SimGpu, low: Any, high: Any) -> int:
        node.operations.lock_clocks(gpu, (low.value, high.value))
        return 0

    def unlock(gpu: SimGpu) -> int:
        node.operations.lock_clocks(gpu, None)
        return 0

    def memory_clocks(gpu: SimGpu, count: Any, found: Any) -> int:
        return _write_numbers((gpu.product.memory_clock_mhz,), count, found)

    def graphics_clocks(gpu: SimGpu, memory: Any, count: Any, found: Any) -> int:
        if memory.value != gpu.product.memory_clock_mhz:
            return _NOT_FOUND
        return _write_numbers(tuple(reversed(gpu.sm_clocks_mhz)), count, found)

    return {
        "nvmlDeviceSetGpuLockedClocks": handles.wrap_device(translate_refusals(lock)),
        "nvmlDeviceResetGpuLockedClocks": handles.wrap_device(translate_refusals(unlock)),
        "nvmlDeviceGetSupportedMemoryClocks": handles.wrap_device(memory_clocks),
        "nvmlDeviceGetSupportedGraphicsClocks": handles.wrap_device(graphics_clocks),
    }


def _profile_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    operations = node.operations

    def offered(gpu: SimGpu, ref: Any) -> int:
        info, profiles = dereference_argument(ref), operations.supported_profiles(gpu)
        if info.version != pynvml.nvmlWorkloadPowerProfileProfilesInfo_v1:
            return _MISMATCH
        _write_mask(info.perfProfilesMask, profiles)
        for profile in profiles:
            info.perfProfile[profile].profileId = info.perfProfile[profile].priority = profile
        return 0

    def current(gpu: SimGpu, ref: Any) -> int:
        info, profiles = dereference_argument(ref), operations.supported_profiles(gpu)
        if info.version != pynvml.nvmlWorkloadPowerProfileCurrentProfiles_v1:
            return _MISMATCH
        _write_mask(info.perfProfilesMask, profiles)
        _write_mask(info.requestedProfilesMask, gpu.profiles)
        # The one of the highest priority holds, which is the lowest number.
        _write_mask(info.enforcedProfilesMask, sorted(gpu.profiles)[:1])
        return 0

    def request(gpu: SimGpu, ref: Any) -> int:
        if dereference_argument(ref).version != pynvml.nvmlWorkloadPowerProfileRequestedProfiles_v1:
            return _MISMATCH
        operations.set_profiles(gpu, gpu.profiles | _read_mask(dereference_argument(ref).requestedProfilesMask))
        return 0

    def clear(gpu: SimGpu, ref: Any) -> int:
        if dereference_argument(ref).version != pynvml.nvmlWorkloadPowerProfileRequestedProfiles_v1:
            return _MISMATCH
        operations.set_profiles(gpu, gpu.profiles - _read_mask(dereference_argument(ref).requestedProfilesMask))
        return 0

    def update(gpu: SimGpu, ref: Any) -> int:
        operation, profiles = (
            dereference_argument(ref).operation,
            _read_mask(dereference_argument(ref).updateProfilesMask),
        )
        wanted = {
            pynvml.NVML_POWER_PROFILE_OPERATION_CLEAR: gpu.profiles - profiles,
            pynvml.NVML_POWER_PROFILE_OPERATION_SET: gpu.profiles | profiles,
            pynvml.NVML_POWER_PROFILE_OPERATION_SET_AND_OVERWRITE: profiles,
        }.get(operation)
        if wanted is None:
            return _INVALID
        operations.set_profiles(gpu, wanted)
        return 0

    prefix = "nvmlDeviceWorkloadPowerProfile"
    return {
        f"{prefix}GetProfilesInfo": handles.wrap_device(translate_refusals(offered)),
        f"{prefix}GetCurrentProfiles": handles.wrap_device(translate_refusals(current)),
        f"{prefix}SetRequestedProfiles": handles.wrap_device(translate_refusals(request)),
        f"{prefix}ClearRequestedProfiles": handles.wrap_device(translate_refusals(clear)),
        f"{prefix}UpdateProfiles_v1": handles.wrap_device(translate_refusals(update)),
    }


def _write_numbers(numbers: tuple[int, ...], count: Any, found: Any) -> int:
    """The numbers into the caller's array; too small an array learns how many there are."""
    room, dereference_argument(count).value = dereference_argument(count).value, len(numbers)
    if found is None or room < len(numbers):
        return _TOO_SMALL
    for place, number in enumerate(numbers):
        dereference_argument(found)[place] = number
    return 0


def _write_mask(mask: Any, numbers: Iterable[int]) -> None:
    for number in numbers:
        mask.mask[number // _MASK_BITS] |= 1 << number % _MASK_BITS


def _read_mask(mask: Any) -> frozenset[int]:
    bits = _MASK_BITS * len(mask.mask)
    return frozenset(number for number in range(bits) if mask.mask[number // _MASK_BITS] >> number % _MASK_BITS & 1)


# NVML's enumeration of compute instance profiles by slices; the one of a double-memory instance has its own.
_CI_ENUMS = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
_CI_REV1_ID = 7
_CI_REV1_ENUM = 7


def _mig_symbols(
    handles: HandleTable, operations: DeviceOperations, *, branch: int, privileged: bool
) -> dict[str, CSymbol]:
    """Builds the MIG symbols by name; without `privileged` no caller may list instances, whatever its rights."""

    def config() -> None:
        if not (privileged and operations.has_right(AccessLevel.MIG_CONFIG)):
            raise DriverRefused(DriverRefusal.NO_PERMISSION)

    return {
        **_mig_profile_symbols(handles, get_profile_id_end(branch)),
        **_placement_symbols(handles, config),
        **_walk_symbols(handles, config),
        **_device_symbols(handles),
    }


def _mig_profile_symbols(handles: HandleTable, end: int) -> dict[str, CSymbol]:
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
        info = dereference_argument(ref)
        info.id, info.sliceCount, info.instanceCount = profile.id, profile.compute_slices, profile.most
        info.multiprocessorCount, info.memorySizeMB = profile.sm_count or 0, profile.memory_mib or 0
        engines = profile.engines or (0, 0, 0, 0, 0)
        info.copyEngineCount, info.decoderCount, info.encoderCount, info.jpegCount, info.ofaCount = engines
        return 0

    def gi_profile_v(gpu: SimGpu, enum: int, ref: Any) -> int:
        if dereference_argument(ref).version != pynvml.nvmlGpuInstanceProfileInfo_v2:
            return _MISMATCH
        code = gi_profile(gpu, enum, ref)
        profile = profile_of(gpu, enum)
        if profile is not None:
            dereference_argument(ref).name = f"MIG {profile.name}".encode()
        return code

    def ci_profile(target: HandleTarget, enum: int, engine: int, ref: Any) -> int:
        if target.instance is None or not 0 <= enum < pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT:
            return _INVALID
        profile = ci_of(target.instance, enum)
        if profile is None or engine != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
            return _NOT_SUPPORTED
        info = dereference_argument(ref)
        info.id, info.sliceCount, info.instanceCount = profile.id, profile.compute_slices, profile.most
        info.multiprocessorCount = profile.sm_count or 0
        return 0

    def ci_profile_v(target: HandleTarget, enum: int, engine: int, ref: Any) -> int:
        if dereference_argument(ref).version != pynvml.nvmlComputeInstanceProfileInfo_v2:
            return _MISMATCH
        code = ci_profile(target, enum, engine, ref)
        if not code and target.instance is not None and (profile := ci_of(target.instance, enum)) is not None:
            dereference_argument(ref).name = f"MIG {_part_name(target.instance, profile)}".encode()
        return code

    return {
        "nvmlDeviceGetGpuInstanceProfileInfo": handles.wrap_device(gi_profile),
        "nvmlDeviceGetGpuInstanceProfileInfoV": handles.wrap_device(gi_profile_v),
        "nvmlGpuInstanceGetComputeInstanceProfileInfo": handles.wrap_target(ci_profile),
        "nvmlGpuInstanceGetComputeInstanceProfileInfoV": handles.wrap_target(ci_profile_v),
    }


def _placement_symbols(handles: HandleTable, config: Callable[[], None]) -> dict[str, CSymbol]:
    def placements(gpu: SimGpu, profile_id: int, found: Any, count: Any) -> int:
        # What is occupied does not matter, nor whether MIG is on.
        config()
        profile = gpu.mig.get_profile(profile_id)
        return _write_spans(profile.starts, profile.size, found, count)

    def remaining(gpu: SimGpu, profile_id: int, ref: Any) -> int:
        config()
        return write_number(ref, gpu.mig.count_remaining(profile_id))

    def ci_placements(target: HandleTarget, profile_id: int, found: Any, count: Any) -> int:
        config()
        profile = _gpu_instance(target).get_profile(profile_id)
        return _write_spans(profile.starts, profile.compute_slices, found, count)

    def ci_remaining(target: HandleTarget, profile_id: int, ref: Any) -> int:
        config()
        instance = _gpu_instance(target)
        profile = instance.get_profile(profile_id)
        return write_number(ref, len(instance.list_free_starts(profile)))

    return {
        "nvmlDeviceGetGpuInstancePossiblePlacements_v2": handles.wrap_device(translate_refusals(placements)),
        "nvmlDeviceGetGpuInstanceRemainingCapacity": handles.wrap_device(translate_refusals(remaining)),
        "nvmlGpuInstanceGetComputeInstancePossiblePlacements": handles.wrap_target(translate_refusals(ci_placements)),
        "nvmlGpuInstanceGetComputeInstanceRemainingCapacity": handles.wrap_target(translate_refusals(ci_remaining)),
    }


def _walk_symbols(handles: HandleTable, config: Callable[[], None]) -> dict[str, CSymbol]:
    def gpu_instances(gpu: SimGpu, profile_id: int, found: Any, count: Any) -> int:
        config()
        if not gpu.mig.enabled:
            return _NOT_SUPPORTED
        held = [instance for _, instance in sorted(gpu.mig.instances.items()) if instance.profile.id == profile_id]
        for place, instance in enumerate(held):
            _issue_into(handles, HandleTarget(gpu, gpu.generation, instance), found, place)
        return write_number(count, len(held))

    def gpu_instance_by_id(gpu: SimGpu, instance_id: int, ref: Any) -> int:
        config()
        return handles.issue_handle(
            HandleTarget(gpu, gpu.generation, gpu.mig.get_instance(instance_id)), dereference_argument(ref)
        )

    def gpu_instance_info(target: HandleTarget, ref: Any) -> int:
        instance, info = _gpu_instance(target), dereference_argument(ref)
        info.id, info.profileId = instance.id, instance.profile.id
        info.placement.start, info.placement.size = instance.start, instance.profile.size
        return handles.issue_handle(HandleTarget(target.gpu, target.generation), info.device)

    def compute_instances(target: HandleTarget, profile_id: int, found: Any, count: Any) -> int:
        instance = _gpu_instance(target)
        config()
        held = [child for _, child in sorted(instance.compute.items()) if child.profile.id == profile_id]
        for place, child in enumerate(held):
            _issue_into(handles, HandleTarget(target.gpu, target.generation, instance, child), found, place)
        return write_number(count, len(held))

    def compute_instance_by_id(target: HandleTarget, compute_id: int, ref: Any) -> int:
        instance = _gpu_instance(target)
        config()
        child = target.gpu.mig.get_compute(instance.id, compute_id)
        return handles.issue_handle(
            HandleTarget(target.gpu, target.generation, instance, child), dereference_argument(ref)
        )

    def compute_instance_info(target: HandleTarget, ref: Any) -> int:
        if target.compute is None or target.mig_device:
            return _INVALID
        child, info = target.compute, dereference_argument(ref)
        info.id, info.profileId = child.id, child.profile.id
        info.placement.start, info.placement.size = child.start, child.profile.compute_slices
        return handles.issue_handle(HandleTarget(target.gpu, target.generation), info.device) or handles.issue_handle(
            HandleTarget(target.gpu, target.generation, target.instance), info.gpuInstance
        )

    return {
        "nvmlDeviceGetGpuInstances": handles.wrap_device(translate_refusals(gpu_instances)),
        "nvmlDeviceGetGpuInstanceById": handles.wrap_device(translate_refusals(gpu_instance_by_id)),
        "nvmlGpuInstanceGetInfo": handles.wrap_target(translate_refusals(gpu_instance_info)),
        "nvmlGpuInstanceGetComputeInstances": handles.wrap_target(translate_refusals(compute_instances)),
        "nvmlGpuInstanceGetComputeInstanceById": handles.wrap_target(translate_refusals(compute_instance_by_id)),
        "nvmlComputeInstanceGetInfo_v2": handles.wrap_target(compute_instance_info),
    }


def _device_symbols(handles: HandleTable) -> dict[str, CSymbol]:
    """What answers for devices and MIG devices alike."""

    def mode(gpu: SimGpu, current: Any, pending: Any) -> int:
        if gpu.product.mig is None:
            return _NOT_SUPPORTED
        return write_number(current, int(gpu.mig.enabled)) or write_number(pending, int(gpu.mig.pending))

    def by_index(gpu: SimGpu, index: Any, ref: Any) -> int:
        found = [
            (held, child) for _, held in sorted(gpu.mig.instances.items()) for _, child in sorted(held.compute.items())
        ]
        if index.value >= len(found):
            return _NOT_FOUND
        instance, child = found[index.value]
        return handles.issue_handle(
            HandleTarget(gpu, gpu.generation, instance, child, mig_device=True), dereference_argument(ref)
        )

    def parent(target: HandleTarget, ref: Any) -> int:
        return handles.issue_handle(HandleTarget(target.gpu, target.generation), dereference_argument(ref))

    def is_mig(target: HandleTarget, ref: Any) -> int:
        return write_number(ref, int(target.mig_device))

    def instance_id(target: HandleTarget, ref: Any) -> int:
        return write_number(ref, target.instance.id if target.instance else None)

    def compute_id(target: HandleTarget, ref: Any) -> int:
        return write_number(ref, target.compute.id if target.compute else None)

    def uuid(target: HandleTarget, buffer: Any, length: Any) -> int:
        return write_text(buffer, length, target.compute.uuid if target.compute else target.gpu.identity.uuid)

    def name(target: HandleTarget, buffer: Any, length: Any) -> int:
        suffix = _device_name(target.instance, target.compute)
        return write_text(buffer, length, target.gpu.identity.product + suffix)

    return {
        "nvmlDeviceGetMigMode": handles.wrap_device(mode, holds=False),
        "nvmlDeviceGetMaxMigDeviceCount": handles.wrap_number(
            lambda gpu: gpu.mig.geometry.most if gpu.mig.geometry and gpu.mig_enabled else 0
        ),
        "nvmlDeviceGetMigDeviceHandleByIndex": handles.wrap_device(by_index),
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": handles.wrap_target(parent),
        "nvmlDeviceIsMigDeviceHandle": handles.wrap_target(is_mig),
        "nvmlDeviceGetGpuInstanceId": handles.wrap_target(instance_id),
        "nvmlDeviceGetComputeInstanceId": handles.wrap_target(compute_id),
        "nvmlDeviceGetUUID": handles.wrap_target(uuid),
        "nvmlDeviceGetName": handles.wrap_target(name),
    }


def _gpu_instance(target: HandleTarget) -> SimInstance:
    """The GPU instance that a handle stands for; raises DriverRefused where it stands for anything else."""
    if target.instance is None or target.compute is not None or target.mig_device:
        raise DriverRefused(DriverRefusal.INVALID)
    return target.instance


def _write_spans(starts: tuple[int, ...], size: int, found: Any, count: Any) -> int:
    """The places into the caller's array, or only their number where there is none.

    The number is an answer and no question: the array is taken to be large enough, as the C library takes it.
    """
    dereference_argument(count).value = len(starts)
    for place, start in enumerate(starts if found else ()):
        dereference_argument(found)[place].start, dereference_argument(found)[place].size = start, size
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


def _issue_into(handles: HandleTable, target: HandleTarget, found: Any, place: int) -> None:
    """Writes a handle into the caller's array."""
    array = dereference_argument(found)
    slot = type(array[place])()
    handles.issue_handle(target, slot)
    array[place] = slot


# The driver branch that first had a symbol; those before all are left out.
_SINCE = {
    "nvmlDeviceCreateGpuInstanceWithPlacement": 460,
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": 525,
    "nvmlDeviceSetPowerManagementLimit_v2": 535,
    "nvmlDeviceWorkloadPowerProfileGetProfilesInfo": 570,
    "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles": 570,
    "nvmlDeviceWorkloadPowerProfileSetRequestedProfiles": 570,
    "nvmlDeviceWorkloadPowerProfileClearRequestedProfiles": 570,
    "nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1": 590,
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2": 470,
    "nvmlDeviceGetNvLinkRemoteDeviceType": 470,
    "nvmlDeviceGetMemoryInfo_v2": RESERVED_SINCE,
    "nvmlDeviceGetComputeRunningProcesses_v3": 510,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": 510,
    "nvmlDeviceGetGpuInstanceProfileInfoV": 510,
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV": 510,
    "nvmlGpuInstanceGetComputeInstancePossiblePlacements": 525,
    **dict.fromkeys(
        (
            "nvmlGpmQueryDeviceSupport",
            "nvmlGpmSampleAlloc",
            "nvmlGpmSampleFree",
            "nvmlGpmSampleGet",
            "nvmlGpmMigSampleGet",
            "nvmlGpmMetricsGet",
        ),
        GPM_SINCE,
    ),
    "nvmlDeviceGetConfComputeMemSizeInfo": 530,
    "nvmlDeviceGetCurrentClocksEventReasons": 535,
    "nvmlDeviceGetGpuFabricInfoV": FABRIC_SINCE,
    "nvmlDeviceGetTemperatureV": 570,
}


def install_library(node: SimulatedNode, *, privileged: bool = True) -> None:
    """Puts the node's devices under the binding of this process; `privileged` is the right to walk instances."""
    if pynvml._nvmlLib_refcount > 0:  # noqa: SLF001 - the binding has no other way to ask
        raise RuntimeError("an NVML session is open in this process; close it before simulating one")
    uninstall_library()
    pynvml.nvmlLib = _library(node, privileged=privileged)


def uninstall_library() -> None:
    """Leaves the binding as it was before anybody used it."""
    pynvml.nvmlLib = None
    pynvml._nvmlLib_refcount = 0  # noqa: SLF001
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001


@contextmanager
def installed_library(node: SimulatedNode, *, privileged: bool = True) -> Iterator[None]:
    """The simulated library, for as long as the block runs."""
    install_library(node, privileged=privileged)
    try:
        yield
    finally:
        uninstall_library()


def _library(node: SimulatedNode, *, privileged: bool) -> SimpleNamespace:
    handles, branch = HandleTable(node), node.spec.driver_branch
    symbols: dict[str, CSymbol] = {
        **_session_symbols(node, handles),
        **build_reading_symbols(node, handles),
        **_mig_symbols(handles, node.operations, branch=branch, privileged=privileged),
        **_control_symbols(node, handles),
    }
    for name, symbol in symbols.items():
        # A symbol goes by the C name alone: whoever makes calls slow goes by it.
        symbol.__name__ = name
    return SimpleNamespace(**{name: symbol for name, symbol in symbols.items() if _SINCE.get(name, 0) <= branch})


def _session_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    def init(_flags: Any) -> int:
        if not node.driver_loaded:
            return int(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        handles.sessions += 1
        return 0

    def shutdown() -> int:
        return handles.end_session()

    def error_string(code: Any) -> bytes:
        return b"Simulated error %d" % code

    def driver_version(buffer: Any, length: Any) -> int:
        return handles.session_code() or write_text(buffer, length, node.spec.driver_version)

    def count(ref: Any) -> int:
        return handles.session_code() or write_number(ref, len(node.devices))

    return {
        "nvmlInitWithFlags": init,
        "nvmlShutdown": shutdown,
        "nvmlErrorString": error_string,
        "nvmlSystemGetDriverVersion": driver_version,
        "nvmlDeviceGetCount_v2": count,
    }
