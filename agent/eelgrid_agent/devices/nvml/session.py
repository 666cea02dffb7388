"""The NVML session: when it is open, which driver answers, cached handles, and the meaning of error codes.

Handles die with the session and with their device; `number` counts sessions so that no object outlives its session.
NVMLError compares by value alone (never use `== None`), and sessions are counted, so each open needs its own close.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pynvml

from eelgrid_agent.devices.port import (
    DeviceError,
    DeviceTimeout,
    DriverUnavailable,
    GpuLostError,
    Missing,
    NoPermission,
    NotSupported,
)
from eelgrid_protos.messages import AbsenceReason

SESSION_LOST_CODES = frozenset({pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
_GONE = SESSION_LOST_CODES | {
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED,
    pynvml.NVML_ERROR_GPU_NOT_FOUND,
}
_REASONS: Mapping[int, AbsenceReason] = MappingProxyType(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED: AbsenceReason.NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT: AbsenceReason.NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: AbsenceReason.NOT_SUPPORTED,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: AbsenceReason.NOT_SUPPORTED,
        pynvml.NVML_ERROR_DEPRECATED: AbsenceReason.NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION: AbsenceReason.NO_PERMISSION,
        pynvml.NVML_ERROR_TIMEOUT: AbsenceReason.TIMED_OUT,
        **dict.fromkeys(_GONE, AbsenceReason.GPU_LOST),
    }
)
# Reasons that hold for the whole device, not for one reading.
SILENT_REASONS = frozenset({AbsenceReason.GPU_LOST, AbsenceReason.TIMED_OUT})
MISSING_BY_REASON: Mapping[AbsenceReason, Missing] = MappingProxyType(
    {reason: Missing(reason) for reason in AbsenceReason}
)


class NvmlHandleSession:
    """Open while somebody needs it; handles by UUID. `ending` are told before the driver is let go."""

    def __init__(self) -> None:
        self.number = 0
        self.version = ""
        self.branch = 0
        self.handles: dict[str, Any] = {}
        self.ending: list[Callable[[], None]] = []
        self._open = False

    def open(self) -> None:
        """Opens the session where it is not open; raises DriverUnavailable."""
        if self._open:
            return
        try:
            pynvml.nvmlInit()
            self._open = True
            self.version = str(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError as error:
            self.close()
            raise DriverUnavailable(_remedy(error)) from None
        self.number += 1
        branch = self.version.split(".", maxsplit=1)[0]
        self.branch = int(branch) if branch.isdigit() else 0

    def close(self) -> None:
        """Lets the driver go; after a failure the session may be gone already."""
        if self._open:
            for tell in self.ending:
                tell()
        self.handles.clear()
        if self._open:
            self._open = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                return

    def handle(self, uuid: str) -> Any:
        """The handle of a device; raises DriverUnavailable and NVMLError."""
        handle = self.handles.get(uuid)
        if handle is None:
            self.open()
            handle = self.handles[uuid] = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return handle


def get_absence_reason(error: Any) -> AbsenceReason:
    """Why a reading is missing, by NVML's error."""
    return _REASONS.get(error.value, AbsenceReason.NOT_SAMPLED)


def make_missing(error: Any) -> Missing:
    """The absence that an error makes; raises it where the whole device is silent."""
    reason = get_absence_reason(error)
    if reason in SILENT_REASONS:
        raise error
    return MISSING_BY_REASON[reason]


def call_optional(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function says, or None where this device or driver does not say it; raises for a silent device."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if get_absence_reason(error) in SILENT_REASONS:
            raise
        return None


def make_device_error(uuid: str, error: Any) -> DeviceError:
    """The port's error for NVML's."""
    if error.value in SESSION_LOST_CODES:
        return DriverUnavailable(_remedy(error))
    match get_absence_reason(error):
        case AbsenceReason.GPU_LOST:
            return GpuLostError(f"{uuid} answers nothing any more; reset it or reboot the node")
        case AbsenceReason.TIMED_OUT:
            return DeviceTimeout(f"{uuid} did not answer in time; wait, or reset it")
        case AbsenceReason.NO_PERMISSION:
            return NoPermission(f"{uuid}: the driver refuses this user; run as root or with the mig/monitor capability")
        case AbsenceReason.NOT_SUPPORTED:
            return NotSupported(f"{uuid}: this part or its driver does not say it; go without")
        case _:
            return DeviceError(f"{uuid}: NVML says {error}; see the kernel's log")


def _remedy(error: Any) -> str:
    what = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not here; install the NVIDIA driver",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded; load it (modprobe nvidia)",
        pynvml.NVML_ERROR_NO_PERMISSION: "the driver refuses this user; give it access to /dev/nvidiactl",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "library and driver differ in version; reboot or reload the driver",
    }
    return what.get(error.value, f"NVML does not open ({error}); see the kernel's log")
