"""The `amdsmi` session: import, init and shutdown, and the port errors for its status codes.

The binding prints and then raises KeyError where the library is missing. Status codes are read by number, which
6.3 and 7.0 share.
"""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from eelgrid_agent.devices.port import (
    DeviceError,
    DeviceInUse,
    DeviceTimeout,
    DriverUnavailable,
    GpuLostError,
    NoPermission,
    NotSupported,
    OutOfRange,
)
from eelgrid_protos.messages import AbsenceReason

# Status codes of amdsmi.h.
INVALID, NOT_SUPPORTED, NOT_YET_IMPLEMENTED, NO_SYMBOL = 1, 2, 3, 5
TIMEOUT, NO_PERMISSION, OUT_OF_BOUNDS = 8, 10, 17
NO_DIRECTORY, BUSY, NOT_FOUND, NOT_INITIALIZED, NOT_LOADED = 20, 30, 31, 32, 34
NO_DATA, NO_DRIVER, NO_FILE, NO_SETTING = 40, 51, 52, 55

_GONE = frozenset({NOT_FOUND, NOT_INITIALIZED, NOT_LOADED, NO_DRIVER})
_REASONS: Mapping[int, AbsenceReason] = MappingProxyType(
    {
        **dict.fromkeys(
            (INVALID, NOT_SUPPORTED, NOT_YET_IMPLEMENTED, NO_SYMBOL, NO_DIRECTORY, NO_DATA, NO_FILE, NO_SETTING),
            AbsenceReason.NOT_SUPPORTED,
        ),
        **dict.fromkeys(_GONE, AbsenceReason.GPU_LOST),
        TIMEOUT: AbsenceReason.TIMED_OUT,
        NO_PERMISSION: AbsenceReason.NO_PERMISSION,
    }
)
_ERRORS: Mapping[int, tuple[type[DeviceError], str]] = MappingProxyType(
    {
        INVALID: (OutOfRange, "the device does not take this value; ask for its limits"),
        OUT_OF_BOUNDS: (OutOfRange, "the device does not take this value; ask for its limits"),
        NO_PERMISSION: (NoPermission, "the driver refuses this user; run as root"),
        TIMEOUT: (DeviceTimeout, "the call did not come back in time; wait, and reset the device if it lasts"),
        BUSY: (DeviceInUse, "a process holds the device; stop it first"),
        NOT_FOUND: (GpuLostError, "the device answers nothing any more; reset it or reboot the node"),
        NOT_INITIALIZED: (DriverUnavailable, "the session is gone; ask again"),
        NOT_LOADED: (DriverUnavailable, "the amdgpu driver is not loaded; load it (modprobe amdgpu)"),
        NO_DRIVER: (DriverUnavailable, "the amdgpu driver is not loaded; load it (modprobe amdgpu)"),
    }
)


def load_binding() -> Any:
    """The binding of this machine; raises DriverUnavailable where there is none."""
    try:
        return importlib.import_module("amdsmi")
    except (ImportError, KeyError, OSError, AttributeError) as error:
        raise DriverUnavailable(
            f"amdsmi cannot be used ({error}); install ROCm's amd-smi-lib and the extra eelgrid[amd]"
        ) from None


def get_status(error: Any) -> int | None:
    """The status in an exception of the binding; None where the binding itself refused."""
    code = getattr(error, "err_code", None)
    return abs(int(code)) if isinstance(code, int) else None


def get_absence_reason(error: Any) -> AbsenceReason:
    """Why a reading is missing."""
    return _REASONS.get(get_status(error) or 0, AbsenceReason.NOT_SAMPLED)


def is_device_lost(error: Any) -> bool:
    """Whether the device, or all of them, are not there any more."""
    return get_status(error) in _GONE


def make_device_error(error: Any) -> DeviceError:
    """The port's error for an exception of the binding."""
    status = get_status(error)
    known = _ERRORS.get(status or 0)
    if known is not None:
        kind, remedy = known
        return kind(remedy)
    if get_absence_reason(error) is AbsenceReason.NOT_SUPPORTED:
        return NotSupported("this part, its mode or its driver cannot do this; see `amd-smi static`")
    return DeviceError(f"the driver failed with status {status}; see the kernel's log")


class AmdSession:
    """One session with the library; `smi` is the binding."""

    def __init__(self, smi: Any) -> None:
        self.smi = smi
        self._open = False

    def open(self) -> None:
        """Opens it if it is not; raises DriverUnavailable."""
        if self._open:
            return
        try:
            self.smi.amdsmi_init()
        except self.smi.AmdSmiException as error:
            status = get_status(error)
            known = _ERRORS.get(status or 0)
            remedy = known[1] if known else f"amdsmi does not open (status {status}); see the kernel's log"
            raise DriverUnavailable(remedy) from None
        self._open = True

    def close(self) -> None:
        """Lets the driver go; after a failure the session may be gone already."""
        if not self._open:
            return
        self._open = False
        try:
            self.smi.amdsmi_shut_down()
        except self.smi.AmdSmiException:
            return
