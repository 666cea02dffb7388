"""The simulated NVML library: a node's devices under the real binding, as the C library stands there.

`install` puts an object into the binding whose attributes are plain functions
named as C symbols. They get the very ctypes arguments that the C library
would, check struct versions, write through the reference and return NVML's
codes; a symbol that the simulated driver's branch lacks is no attribute. So
everything above the C interface is the real thing: structs, version stamps,
exceptions, and the binding's own faults. Each topic has a file of its own.

Handles are numbers that nothing follows. A handle from before a device was
lost stays dead when the device comes back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pynvml

from eelgrid_agent.simulation.handles import Handles, Symbol, fill, put
from eelgrid_agent.simulation.library_control import control_symbols
from eelgrid_agent.simulation.library_events import event_symbols
from eelgrid_agent.simulation.library_fields import field_symbols
from eelgrid_agent.simulation.library_identity import identity_symbols
from eelgrid_agent.simulation.library_links import link_symbols
from eelgrid_agent.simulation.library_mig import mig_symbols
from eelgrid_agent.simulation.library_processes import process_symbols
from eelgrid_agent.simulation.library_samples import sample_symbols
from eelgrid_agent.simulation.library_sensors import sensor_symbols
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.sensors import FABRIC_SINCE, GPM_SINCE, RESERVED_SINCE

__all__ = ["install", "installed", "uninstall"]

# The driver branch that first had a symbol; those before all are left out.
_SINCE = {
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2": 470,
    "nvmlDeviceGetNvLinkRemoteDeviceType": 470,
    "nvmlDeviceGetMemoryInfo_v2": RESERVED_SINCE,
    "nvmlDeviceGetComputeRunningProcesses_v3": 510,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": 510,
    "nvmlDeviceGetGpuInstanceProfileInfoV": 510,
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV": 510,
    "nvmlGpuInstanceGetComputeInstancePossiblePlacements": 525,
    **dict.fromkeys(
        ("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleFree", "nvmlGpmSampleGet",
         "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet"),
        GPM_SINCE,
    ),
    "nvmlDeviceGetConfComputeMemSizeInfo": 530,
    "nvmlDeviceGetCurrentClocksEventReasons": 535,
    "nvmlDeviceGetGpuFabricInfoV": FABRIC_SINCE,
    "nvmlDeviceGetTemperatureV": 570,
}  # fmt: skip


def install(node: SimulatedNode, *, privileged: bool = True) -> None:
    """Puts the node's devices under the binding of this process; `privileged` is the right to walk instances."""
    if pynvml._nvmlLib_refcount > 0:  # noqa: SLF001 - the binding has no other way to ask
        raise RuntimeError("an NVML session is open in this process; close it before simulating one")
    uninstall()
    pynvml.nvmlLib = _library(node, privileged=privileged)


def uninstall() -> None:
    """Leaves the binding as it was before anybody used it."""
    pynvml.nvmlLib = None
    pynvml._nvmlLib_refcount = 0  # noqa: SLF001
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001


@contextmanager
def installed(node: SimulatedNode, *, privileged: bool = True) -> Iterator[None]:
    """The simulated library, for as long as the block runs."""
    install(node, privileged=privileged)
    try:
        yield
    finally:
        uninstall()


def _library(node: SimulatedNode, *, privileged: bool) -> SimpleNamespace:
    handles, branch = Handles(node), node.spec.driver_branch
    symbols: dict[str, Symbol] = {
        **_session_symbols(node, handles),
        **identity_symbols(node, handles),
        **sensor_symbols(node, handles),
        **field_symbols(node, handles),
        **link_symbols(node, handles),
        **sample_symbols(node, handles),
        **process_symbols(node, handles),
        **event_symbols(node, handles),
        **mig_symbols(handles, node.operations, branch=branch, privileged=privileged),
        **control_symbols(node, handles),
    }
    for name, symbol in symbols.items():
        # A symbol goes by the C name alone: whoever makes calls slow goes by it.
        symbol.__name__ = name
    return SimpleNamespace(**{name: symbol for name, symbol in symbols.items() if _SINCE.get(name, 0) <= branch})


def _session_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
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
        return handles.session() or fill(buffer, length, node.spec.driver_version)

    def count(ref: Any) -> int:
        return handles.session() or put(ref, len(node.devices))

    return {
        "nvmlInitWithFlags": init,
        "nvmlShutdown": shutdown,
        "nvmlErrorString": error_string,
        "nvmlSystemGetDriverVersion": driver_version,
        "nvmlDeviceGetCount_v2": count,
    }
