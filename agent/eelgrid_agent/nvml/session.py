"""The one session with NVML: when it is open, which driver answers, and whose handles are known.

Handles die with the session and with their device. `number` counts sessions,
so that whatever was made in one is never used in another. It decides nothing
about what an error means for a reading; `reason_of` only sorts codes.

Traps of the binding that are met here: NVMLError compares by value alone
(never `== None`), and a session is counted, so each begin has its own end.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pynvml

from eelgrid_agent.device import (
    DeviceError,
    DeviceTimeout,
    DriverUnavailable,
    GpuLost,
    Missing,
    NoPermission,
    NotSupported,
)
from eelgrid_protos.messages import AbsenceReason

__all__ = ["MISSING", "SESSION_GONE", "SILENT", "Session", "ask", "device_error", "missing", "reason_of"]

SESSION_GONE = frozenset({pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
_GONE = SESSION_GONE | {
    pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED,
    pynvml.NVML_ERROR_GPU_NOT_FOUND,
}  # fmt: skip
_REASONS: Mapping[int, AbsenceReason] = MappingProxyType({
    pynvml.NVML_ERROR_NOT_SUPPORTED: AbsenceReason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: AbsenceReason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: AbsenceReason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: AbsenceReason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_DEPRECATED: AbsenceReason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION: AbsenceReason.NO_PERMISSION,
    pynvml.NVML_ERROR_TIMEOUT: AbsenceReason.TIMED_OUT,
    **dict.fromkeys(_GONE, AbsenceReason.GPU_LOST),
})  # fmt: skip
# Reasons that hold for the whole device, not for one reading.
SILENT = frozenset({AbsenceReason.GPU_LOST, AbsenceReason.TIMED_OUT})
MISSING: Mapping[AbsenceReason, Missing] = MappingProxyType({reason: Missing(reason) for reason in AbsenceReason})


class Session:
    """Open while somebody needs it; handles by UUID. `ending` are told before the driver is let go."""

    def __init__(self) -> None:
        self.number = 0
        self.version = ""
        self.branch = 0
        self.handles: dict[str, Any] = {}
        self.ending: list[Callable[[], None]] = []
        self._open = False

    def begin(self) -> None:
        """Opens the session where it is not open; raises DriverUnavailable."""
        if self._open:
            return
        try:
            pynvml.nvmlInit()
            self._open = True
            self.version = str(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError as error:
            self.end()
            raise DriverUnavailable(_remedy(error)) from None
        self.number += 1
        branch = self.version.split(".", maxsplit=1)[0]
        self.branch = int(branch) if branch.isdigit() else 0

    def end(self) -> None:
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
            self.begin()
            handle = self.handles[uuid] = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return handle


def reason_of(error: Any) -> AbsenceReason:
    """Why a reading is missing, by NVML's error."""
    return _REASONS.get(error.value, AbsenceReason.NOT_SAMPLED)


def missing(error: Any) -> Missing:
    """The absence that an error makes; raises it where the whole device is silent."""
    reason = reason_of(error)
    if reason in SILENT:
        raise error
    return MISSING[reason]


def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function says, or None where this device or driver does not say it; raises for a silent device."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if reason_of(error) in SILENT:
            raise
        return None


def device_error(uuid: str, error: Any) -> DeviceError:
    """The port's error for NVML's."""
    if error.value in SESSION_GONE:
        return DriverUnavailable(_remedy(error))
    match reason_of(error):
        case AbsenceReason.GPU_LOST:
            return GpuLost(f"{uuid} answers nothing any more; reset it or reboot the node")
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
