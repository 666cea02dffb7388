"""How much this process may do with the driver, without trying anything that would change it.

The kernel module lets a process set limits and modes that has CAP_SYS_ADMIN,
and lets it walk or make GPU instances that can read the matching file of
/proc/driver/nvidia/capabilities. In a container either may be there and still
lead nowhere, so the driver is asked as well, by a question that needs the
right to configure instances.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pynvml

from eelgrid_protos.messages import AccessLevel

__all__ = ["access_by_driver", "rights_of_process"]

_SYS_ADMIN = 1 << 21
_STATUS = Path("/proc/self/status")
_CAPABILITIES = Path("/proc/driver/nvidia/capabilities/mig")


def rights_of_process(status: Path = _STATUS, capabilities: Path = _CAPABILITIES) -> AccessLevel:
    """What the kernel would let this process do."""
    if _effective(status) & _SYS_ADMIN:
        return AccessLevel.ROOT
    if os.access(capabilities / "config", os.R_OK):
        return AccessLevel.MIG_CONFIG
    if os.access(capabilities / "monitor", os.R_OK):
        return AccessLevel.MIG_MONITOR
    return AccessLevel.READ_ONLY


def access_by_driver(rights: AccessLevel, sliced: Iterable[Any]) -> AccessLevel:
    """The level that the driver confirms: walking the instances of a device in MIG mode takes MIG_CONFIG."""
    for handle in sliced:
        try:
            pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, _any_profile(handle))
        except pynvml.NVMLError_NoPermission:
            return min(rights, AccessLevel.MIG_MONITOR)
        except pynvml.NVMLError:
            # It says something else, which is no word on rights.
            continue
    return rights


def _any_profile(handle: Any) -> int:
    for enum in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            return int(pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum, version=1).id)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            continue
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _effective(status: Path) -> int:
    """The effective capabilities by the kernel's own file; 0 where there is none."""
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    found = next((line for line in lines if line.startswith("CapEff:")), "CapEff: 0")
    try:
        return int(found.split()[1], 16)
    except ValueError:
        return 0
