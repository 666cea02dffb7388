"""Workload power profiles as NVML has them: bit masks in structs, asked for one by one.

Drivers from branch 590 on replace the whole request in one call; those from
570 on clear and set in two, and the ones before have none. Whoever calls sees
NVML's errors.
"""

import ctypes
from typing import Any

import pynvml

__all__ = ["PowerProfiles"]

_BITS = 32


class PowerProfiles:
    """Those of one device."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def offered(self) -> tuple[int, ...]:
        """The profiles of the part, by number."""
        info = pynvml.c_nvmlWorkloadPowerProfileProfilesInfo_v1_t()
        pynvml.nvmlDeviceWorkloadPowerProfileGetProfilesInfo(self._handle, ctypes.byref(info))
        return _numbers(info.perfProfilesMask)

    def enforced(self) -> int | None:
        """The one that holds; of several, the first."""
        return min(_numbers(self._current().enforcedProfilesMask), default=None)

    def ask_for(self, profile: int | None) -> None:
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
