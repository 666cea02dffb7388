"""Changes to devices through NVML: power limits, clocks, workload power profiles, MIG mode and instances.

Translates and decides nothing; every NVML error becomes an error of the port with a remedy. Shares the reader's
session; a device that was lost and returned is found again by one new session. The `_v2` power setter hides
NO_PERMISSION, so the first version is used; mode changes are read back; the own session is released before a change
that needs a reset; the placement is always explicit. Power profiles are replaced in one call from branch 590 on, in
two from 570 on.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import pynvml

from eelgrid_agent.devices.nvml.device import NvmlDevice
from eelgrid_agent.devices.nvml.mig import get_profile_size, is_resetless, read_geometry
from eelgrid_agent.devices.port import (
    DeviceError,
    DeviceInUse,
    DeviceTimeout,
    DriverUnavailable,
    GpuLostError,
    InsufficientResources,
    ModeChange,
    NoPermission,
    NotSupported,
    OutOfRange,
    PowerSettings,
    UnknownGpu,
    UnknownInstance,
)
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.quantities import watts_from_milliwatts

_BITS = 32


class NvmlPowerProfiles:
    """Those of one device."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def supported_profiles(self) -> tuple[int, ...]:
        """The profiles of the part, by number."""
        info = pynvml.c_nvmlWorkloadPowerProfileProfilesInfo_v1_t()
        pynvml.nvmlDeviceWorkloadPowerProfileGetProfilesInfo(self._handle, ctypes.byref(info))
        return _numbers(info.perfProfilesMask)

    def enforced_profile(self) -> int | None:
        """The one that holds; of several, the first."""
        return min(_numbers(self._current().enforcedProfilesMask), default=None)

    def request_profile(self, profile: int | None) -> None:
        """Requests this profile and no other, or none at all."""
        try:
            self._replace(profile)
        except pynvml.NVMLError_FunctionNotFound:
            self._clear_and_set(profile)

    def _replace(self, profile: int | None) -> None:
        update = pynvml.c_nvmlWorkloadPowerProfileUpdateProfiles_v1_t()
        if profile is None:
            update.operation = pynvml.NVML_POWER_PROFILE_OPERATION_CLEAR
            update.updateProfilesMask = self._current().requestedProfilesMask
        else:
            update.operation = pynvml.NVML_POWER_PROFILE_OPERATION_SET_AND_OVERWRITE
            _mark(update.updateProfilesMask, profile)
        pynvml.nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1(self._handle, ctypes.byref(update))

    def _clear_and_set(self, profile: int | None) -> None:
        before = pynvml.c_nvmlWorkloadPowerProfileRequestedProfiles_v1_t()
        before.requestedProfilesMask = self._current().requestedProfilesMask
        pynvml.nvmlDeviceWorkloadPowerProfileClearRequestedProfiles(self._handle, ctypes.byref(before))
        if profile is not None:
            wanted = pynvml.c_nvmlWorkloadPowerProfileRequestedProfiles_v1_t()
            _mark(wanted.requestedProfilesMask, profile)
            pynvml.nvmlDeviceWorkloadPowerProfileSetRequestedProfiles(self._handle, ctypes.byref(wanted))

    def _current(self) -> Any:
        current = pynvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
        pynvml.nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(self._handle, ctypes.byref(current))
        return current


def _numbers(mask: Any) -> tuple[int, ...]:
    words = tuple(mask.mask)
    return tuple(number for number in range(_BITS * len(words)) if words[number // _BITS] >> number % _BITS & 1)


def _mark(mask: Any, number: int) -> None:
    mask.mask[number // _BITS] |= 1 << number % _BITS


_NO_DRIVER = "NVML does not answer; see that the NVIDIA driver is loaded (modprobe nvidia) and that nvidia-smi works"
_LOST = "the device answers nothing any more; reset it (nvidia-smi --gpu-reset) or reboot the node"
_SILENT = "the call did not come back in time; wait, and reset the device if it lasts"
_CANNOT = "this part, its mode or its driver cannot do this; see its settings and the driver's version"
_REFUSED = "the driver refuses this user; run as root, or with CAP_SYS_ADMIN and the mig/config capability"
_HELD = "a client, a process or an instance uses it; stop what `nvidia-smi` and `fuser /dev/nvidia*` list"
_NO_ROOM = "the driver has no room, or the place is occupied; read the layout back"
_NOT_THERE = "there is no such instance; read the layout back"
_OUTSIDE = "the device does not take this value; ask for its limits"

_ERRORS = MappingProxyType(
    {
        pynvml.NVML_ERROR_UNINITIALIZED: (DriverUnavailable, _NO_DRIVER),
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (DriverUnavailable, _NO_DRIVER),
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (DriverUnavailable, _NO_DRIVER),
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (DriverUnavailable, _NO_DRIVER),
        pynvml.NVML_ERROR_GPU_IS_LOST: (GpuLostError, _LOST),
        pynvml.NVML_ERROR_GPU_NOT_FOUND: (GpuLostError, _LOST),
        pynvml.NVML_ERROR_RESET_REQUIRED: (GpuLostError, _LOST),
        pynvml.NVML_ERROR_TIMEOUT: (DeviceTimeout, _SILENT),
        pynvml.NVML_ERROR_NOT_SUPPORTED: (NotSupported, _CANNOT),
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: (NotSupported, _CANNOT),
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: (NotSupported, _CANNOT),
        pynvml.NVML_ERROR_DEPRECATED: (NotSupported, _CANNOT),
        pynvml.NVML_ERROR_NO_PERMISSION: (NoPermission, _REFUSED),
        pynvml.NVML_ERROR_IN_USE: (DeviceInUse, _HELD),
        pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: (InsufficientResources, _NO_ROOM),
        pynvml.NVML_ERROR_NOT_FOUND: (UnknownInstance, _NOT_THERE),
        pynvml.NVML_ERROR_INVALID_ARGUMENT: (OutOfRange, _OUTSIDE),
    }
)
# Milliwatts in 32 bits. Clocks from NVML_CLOCK_LIMIT_ID_RANGE_START on are names and no megahertz.
_WATTS_MOST = 2**32 / 1000.0
_NOT_HERE = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT})
# Answers of a handle whose session has not seen the device come back.
_STALE = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNINITIALIZED})
# What one setting may lack while the others are there.
_UNTOLD = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
        pynvml.NVML_ERROR_NOT_FOUND,
    }
)

_Answer = TypeVar("_Answer")


class NvmlControl:
    """The control port over NVML."""

    def __init__(self, session: NvmlDevice) -> None:
        self._session = session

    # Power and clocks

    def power_settings(self, uuid: str) -> PowerSettings:
        """Limits and clocks as they are now."""

        def look(handle: Any) -> PowerSettings:
            low, high = _query_optional(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, handle) or (None, None)
            profiles = NvmlPowerProfiles(handle)
            offered = _query_optional(profiles.supported_profiles) or ()
            return PowerSettings(
                requested_w=_watts(_query_optional(pynvml.nvmlDeviceGetPowerManagementLimit, handle)),
                enforced_w=_watts(_query_optional(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
                default_w=_watts(_query_optional(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
                min_w=_watts(low),
                max_w=_watts(high),
                sm_clock_mhz=_query_optional(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
                sm_clocks_mhz=_query_optional(_sm_clocks, handle) or (),
                power_profiles=offered,
                power_profile=_query_optional(profiles.enforced_profile) if offered else None,
            )

        return self._on(uuid, look)

    def set_power_limit(self, uuid: str, limit_w: float) -> None:
        """Asks for a limit."""
        if not 0.0 < limit_w < _WATTS_MOST:
            raise OutOfRange(f"{uuid}: {limit_w:g} W is not a valid limit; read the device's limits")
        limit_mw = round(limit_w * 1000.0)
        self._on(uuid, lambda handle: pynvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw))

    def lock_sm_clocks(self, uuid: str, min_mhz: int, max_mhz: int) -> None:
        """Keeps the SM clock inside."""
        if not 0 < min_mhz <= max_mhz < pynvml.NVML_CLOCK_LIMIT_ID_RANGE_START:
            raise OutOfRange(f"{uuid}: there are no clocks from {min_mhz} to {max_mhz} MHz; read its clock steps")
        self._on(uuid, lambda handle: pynvml.nvmlDeviceSetGpuLockedClocks(handle, min_mhz, max_mhz))

    def unlock_sm_clocks(self, uuid: str) -> None:
        """Unlocks the SM clock, which the driver then chooses."""
        self._on(uuid, pynvml.nvmlDeviceResetGpuLockedClocks)

    def set_power_profile(self, uuid: str, profile: int | None) -> None:
        """Asks for a workload power profile, or for none."""

        def ask(handle: Any) -> None:
            profiles = NvmlPowerProfiles(handle)
            if profile is not None and profile not in profiles.supported_profiles():
                raise OutOfRange(f"{uuid}: there is no power profile {profile}; read its settings")
            profiles.request_profile(profile)

        self._on(uuid, ask)

    # MIG

    def mig_geometry(self, uuid: str) -> MigGeometry:
        """The profiles and placements that the driver offers on this device."""
        return self._on(uuid, read_geometry)

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> ModeChange:
        """Asks for the mode in a session of its own; where clients hold the device, the request is taken back."""
        wanted = pynvml.NVML_DEVICE_MIG_ENABLE if enabled else pynvml.NVML_DEVICE_MIG_DISABLE
        current, pending = self._on(uuid, pynvml.nvmlDeviceGetMigMode)
        if current == pending == wanted:
            return ModeChange.DONE
        if not self._on(uuid, is_resetless):
            self._session.release_session()
        with _translate_errors(uuid), _own_session():
            handle = _find_handle(uuid)
            activation = pynvml.nvmlDeviceSetMigMode(handle, wanted)
            # The status is only a hint of why; what counts is what is read back.
            now, waiting = pynvml.nvmlDeviceGetMigMode(_find_handle(uuid))
            if now == waiting == wanted:
                return ModeChange.DONE
            if activation == pynvml.NVML_ERROR_IN_USE:
                try:
                    pynvml.nvmlDeviceSetMigMode(handle, pending)
                except pynvml.NVMLError as error:
                    raise DeviceInUse(f"{uuid}: MIG mode: {_HELD}; the request stays pending ({error})") from None
                raise DeviceInUse(f"{uuid}: MIG mode: {_HELD}")
            if waiting == wanted:
                return ModeChange.PENDING
            raise DeviceError(f"{uuid}: the driver accepted the MIG mode and reports another; see the kernel's log")

    def create_gpu_instance(self, uuid: str, profile_id: int, start: int) -> int:
        """Makes an instance at exactly this place; returns its id."""

        def make(handle: Any) -> int:
            place = pynvml.c_nvmlGpuInstancePlacement_t(start=start, size=get_profile_size(handle, profile_id))
            made = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile_id, ctypes.byref(place))
            return int(pynvml.nvmlGpuInstanceGetInfo(made).id)

        return self._on(uuid, make)

    def destroy_gpu_instance(self, uuid: str, instance_id: int) -> None:
        """Removes an instance."""

        def destroy(handle: Any) -> None:
            pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(handle, instance_id))

        self._on(uuid, destroy)

    def create_compute_instance(self, uuid: str, instance_id: int, profile_id: int) -> int:
        """Makes a compute instance; returns its id."""

        def make(handle: Any) -> int:
            instance = pynvml.nvmlDeviceGetGpuInstanceById(handle, instance_id)
            made = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, profile_id)
            return int(pynvml.nvmlComputeInstanceGetInfo_v2(made).id)

        return self._on(uuid, make)

    def destroy_compute_instance(self, uuid: str, instance_id: int, compute_id: int) -> None:
        """Removes a compute instance."""

        def destroy(handle: Any) -> None:
            instance = pynvml.nvmlDeviceGetGpuInstanceById(handle, instance_id)
            pynvml.nvmlComputeInstanceDestroy(pynvml.nvmlGpuInstanceGetComputeInstanceById(instance, compute_id))

        self._on(uuid, destroy)

    def _on(self, uuid: str, act: Callable[[Any], _Answer]) -> _Answer:
        """What an act on a device's handle gives, with NVML's errors as the port's."""
        with _translate_errors(uuid):
            try:
                return self._once(uuid, act)
            except pynvml.NVMLError as error:
                if error.value not in _STALE:
                    raise
            self._session.release_session()
            return self._once(uuid, act)

    def _once(self, uuid: str, act: Callable[[Any], _Answer]) -> _Answer:
        handle = self._handle(uuid)
        try:
            return act(handle)
        except pynvml.NVMLError_FunctionNotFound:
            # The binding says so without asking the device, which may be lost: that is the greater news.
            pynvml.nvmlDeviceGetIndex(handle)
            raise

    def _handle(self, uuid: str) -> Any:
        try:
            return self._session.handle(uuid)
        except pynvml.NVMLError as error:
            if error.value in _NOT_HERE:
                raise _unknown(uuid) from None
            raise


def _find_handle(uuid: str) -> Any:
    """A handle outside of the shared session."""
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:
        if error.value in _NOT_HERE:
            raise _unknown(uuid) from None
        raise


def _unknown(uuid: str) -> UnknownGpu:
    return UnknownGpu(f"this machine has no GPU {uuid}; list its GPUs")


@contextmanager
def _own_session() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


@contextmanager
def _translate_errors(uuid: str) -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        kind, remedy = _ERRORS.get(error.value, (DeviceError, f"NVML reports {error}; see the kernel's log"))
        raise kind(f"{uuid}: {remedy}") from None


def _query_optional(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function says, or None where this device, driver or user is not told; raises for the whole device."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _UNTOLD:
            return None
        raise


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else watts_from_milliwatts(milliwatts)


def _sm_clocks(handle: Any) -> tuple[int, ...]:
    """The steps of the SM clock at the highest memory clock, lowest first."""
    memory = max(pynvml.nvmlDeviceGetSupportedMemoryClocks(handle), default=None)
    return () if memory is None else tuple(sorted(pynvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory)))
