"""The symbols of the simulated library that change a device, and those that tell what may be changed.

They take what the C library would take and return NVML's codes; what happens
is the operations' business. A driver branch that lacks a symbol does not have
it here. A mode change says success even where it only waits; the activation
status beside it tells, and a program whose own session has used the device
counts as one of its clients.
"""

from collections.abc import Iterable
from typing import Any

import pynvml

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.handles import Handles, Symbol, Target, behind, put, refusing
from eelgrid_agent.simulation.mig import Activation
from eelgrid_agent.simulation.node import SimulatedNode

__all__ = ["control_symbols"]

_INVALID = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
_NOT_FOUND = int(pynvml.NVML_ERROR_NOT_FOUND)
_NOT_SUPPORTED = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
_TOO_SMALL = int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
_MISMATCH = int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
_ACTIVATION = {
    Activation.DONE: 0,
    Activation.RESET_REQUIRED: int(pynvml.NVML_ERROR_RESET_REQUIRED),
    Activation.IN_USE: int(pynvml.NVML_ERROR_IN_USE),
}
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
}
_MASK_BITS = 32


def control_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    """All that the node's driver branch has, by name."""
    symbols = {
        **_mode_symbols(node, handles),
        **_instance_symbols(node, handles),
        **_power_symbols(node, handles),
        **_clock_symbols(node, handles),
        **_profile_symbols(node, handles),
    }
    branch = node.spec.driver_branch
    return {name: symbol for name, symbol in symbols.items() if _SINCE.get(name, 0) <= branch}


def _mode_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    def set_mode(gpu: SimGpu, mode: int, activation: Any) -> int:
        if mode not in (pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_ENABLE):
            return _INVALID
        own = handles.sessions > 1 or gpu.identity.uuid in handles.held
        done = node.operations.set_mode(gpu, enabled=mode == pynvml.NVML_DEVICE_MIG_ENABLE, other_sessions=own)
        return put(activation, _ACTIVATION[done])

    return {"nvmlDeviceSetMigMode": handles.on_device(refusing(set_mode), holds=False)}


def _instance_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    operations = node.operations

    def create(gpu: SimGpu, profile_id: int, ref: Any) -> int:
        instance = operations.create_instance(gpu, profile_id)
        return handles.issue(Target(gpu, gpu.generation, instance), behind(ref))

    def create_at(gpu: SimGpu, profile_id: int, placement: Any, ref: Any) -> int:
        # A struct that comes by value is no pointer; the C library would follow it.
        place = getattr(placement, "_obj", None)
        if place is None or place.size != gpu.mig.profile(profile_id).size:
            return _INVALID
        instance = operations.create_instance(gpu, profile_id, place.start)
        return handles.issue(Target(gpu, gpu.generation, instance), behind(ref))

    def destroy(target: Target) -> int:
        if target.instance is None or target.compute is not None:
            return _INVALID
        operations.destroy_instance(target.gpu, target.instance.id)
        return 0

    def create_compute(target: Target, profile_id: int, ref: Any) -> int:
        return _make_compute(target, profile_id, None, ref)

    def create_compute_at(target: Target, profile_id: int, placement: Any, ref: Any) -> int:
        place = getattr(placement, "_obj", None)
        return _INVALID if place is None else _make_compute(target, profile_id, int(place.start), ref)

    def _make_compute(target: Target, profile_id: int, start: int | None, ref: Any) -> int:
        if target.instance is None or target.compute is not None:
            return _INVALID
        compute = operations.create_compute(target.gpu, target.instance.id, profile_id, start)
        return handles.issue(Target(target.gpu, target.generation, target.instance, compute), behind(ref))

    def destroy_compute(target: Target) -> int:
        if target.instance is None or target.compute is None or target.mig_device:
            return _INVALID
        operations.destroy_compute(target.gpu, target.instance.id, target.compute.id)
        return 0

    return {
        "nvmlDeviceCreateGpuInstance": handles.on_device(refusing(create)),
        "nvmlDeviceCreateGpuInstanceWithPlacement": handles.on_device(refusing(create_at)),
        "nvmlGpuInstanceDestroy": handles.on(refusing(destroy)),
        "nvmlGpuInstanceCreateComputeInstance": handles.on(refusing(create_compute)),
        "nvmlGpuInstanceCreateComputeInstanceWithPlacement": handles.on(refusing(create_compute_at)),
        "nvmlComputeInstanceDestroy": handles.on(refusing(destroy_compute)),
    }


def _power_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    def requested(gpu: SimGpu, ref: Any) -> int:
        return put(ref, gpu.limit_mw)

    def set_limit(gpu: SimGpu, limit: Any) -> int:
        node.operations.set_power_limit(gpu, limit.value)
        return 0

    def set_limit_v2(gpu: SimGpu, ref: Any) -> int:
        value = behind(ref)
        if value.version != pynvml.nvmlPowerValue_v2:
            return _MISMATCH
        if value.powerScope != pynvml.NVML_POWER_SCOPE_GPU:
            return _NOT_SUPPORTED
        node.operations.set_power_limit(gpu, value.powerValueMw)
        return 0

    return {
        "nvmlDeviceGetPowerManagementLimit": handles.on_device(requested),
        "nvmlDeviceSetPowerManagementLimit": handles.on_device(refusing(set_limit)),
        "nvmlDeviceSetPowerManagementLimit_v2": handles.on_device(refusing(set_limit_v2)),
    }


def _clock_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
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
        "nvmlDeviceSetGpuLockedClocks": handles.on_device(refusing(lock)),
        "nvmlDeviceResetGpuLockedClocks": handles.on_device(refusing(unlock)),
        "nvmlDeviceGetSupportedMemoryClocks": handles.on_device(memory_clocks),
        "nvmlDeviceGetSupportedGraphicsClocks": handles.on_device(graphics_clocks),
    }


def _profile_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    operations = node.operations

    def offered(gpu: SimGpu, ref: Any) -> int:
        info, profiles = behind(ref), operations.offered_profiles(gpu)
        if info.version != pynvml.nvmlWorkloadPowerProfileProfilesInfo_v1:
            return _MISMATCH
        _write_mask(info.perfProfilesMask, profiles)
        for profile in profiles:
            info.perfProfile[profile].profileId = info.perfProfile[profile].priority = profile
        return 0

    def current(gpu: SimGpu, ref: Any) -> int:
        info, profiles = behind(ref), operations.offered_profiles(gpu)
        if info.version != pynvml.nvmlWorkloadPowerProfileCurrentProfiles_v1:
            return _MISMATCH
        _write_mask(info.perfProfilesMask, profiles)
        _write_mask(info.requestedProfilesMask, gpu.profiles)
        # The one of the highest priority holds, which is the lowest number.
        _write_mask(info.enforcedProfilesMask, sorted(gpu.profiles)[:1])
        return 0

    def request(gpu: SimGpu, ref: Any) -> int:
        if behind(ref).version != pynvml.nvmlWorkloadPowerProfileRequestedProfiles_v1:
            return _MISMATCH
        operations.set_profiles(gpu, gpu.profiles | _read_mask(behind(ref).requestedProfilesMask))
        return 0

    def clear(gpu: SimGpu, ref: Any) -> int:
        if behind(ref).version != pynvml.nvmlWorkloadPowerProfileRequestedProfiles_v1:
            return _MISMATCH
        operations.set_profiles(gpu, gpu.profiles - _read_mask(behind(ref).requestedProfilesMask))
        return 0

    def update(gpu: SimGpu, ref: Any) -> int:
        operation, profiles = behind(ref).operation, _read_mask(behind(ref).updateProfilesMask)
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
        f"{prefix}GetProfilesInfo": handles.on_device(refusing(offered)),
        f"{prefix}GetCurrentProfiles": handles.on_device(refusing(current)),
        f"{prefix}SetRequestedProfiles": handles.on_device(refusing(request)),
        f"{prefix}ClearRequestedProfiles": handles.on_device(refusing(clear)),
        f"{prefix}UpdateProfiles_v1": handles.on_device(refusing(update)),
    }


def _write_numbers(numbers: tuple[int, ...], count: Any, found: Any) -> int:
    """The numbers into the caller's array; too small an array learns how many there are."""
    room, behind(count).value = behind(count).value, len(numbers)
    if found is None or room < len(numbers):
        return _TOO_SMALL
    for place, number in enumerate(numbers):
        behind(found)[place] = number
    return 0


def _write_mask(mask: Any, numbers: Iterable[int]) -> None:
    for number in numbers:
        mask.mask[number // _MASK_BITS] |= 1 << number % _MASK_BITS


def _read_mask(mask: Any) -> frozenset[int]:
    bits = _MASK_BITS * len(mask.mask)
    return frozenset(number for number in range(bits) if mask.mask[number // _MASK_BITS] >> number % _MASK_BITS & 1)
