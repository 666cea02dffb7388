"""The simulated NVML library: a node's devices under the real binding, as the C library stands there.

`install` puts an object into the binding whose attributes are plain functions
named as C symbols. They get the very ctypes arguments that the C library
would, check struct versions, write through the reference and return NVML's
codes; a symbol that the simulated driver's branch lacks is no attribute. So
everything above the C interface is the real thing: structs, version stamps,
exceptions, and the binding's own faults.

Handles are numbers that nothing follows. A handle from before a device was
lost stays dead when the device comes back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pynvml

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.handles import Handles, Symbol, behind, fill, put
from eelgrid_agent.simulation.library_mig import mig_symbols
from eelgrid_agent.simulation.node import SimulatedNode

__all__ = ["install", "installed", "uninstall"]

# The driver branch that first had a symbol; those before all are left out.
_SINCE = {
    "nvmlDeviceGetMemoryInfo_v2": 510,
    "nvmlDeviceGetGpuInstanceProfileInfoV": 510,
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV": 510,
    "nvmlDeviceGetCurrentClocksEventReasons": 535,
    "nvmlDeviceGetTemperatureV": 570,
}
_POWER_FIELDS_SINCE = 525
_LIMIT_FIELDS_SINCE = 535


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
    handles = Handles(node)
    symbols: dict[str, Symbol] = {
        **_session_symbols(node, handles),
        **_identity_symbols(node, handles),
        **_sensor_symbols(node, handles),
        **_field_symbols(node, handles),
        **mig_symbols(handles, privileged=privileged),
    }
    branch = node.spec.driver_branch
    return SimpleNamespace(**{name: symbol for name, symbol in symbols.items() if _SINCE.get(name, 0) <= branch})


def _session_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    def init(_flags: Any) -> int:
        if not node.driver_loaded:
            return int(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        handles.sessions += 1
        return 0

    def shutdown() -> int:
        if handles.sessions == 0:
            return int(pynvml.NVML_ERROR_UNINITIALIZED)
        handles.sessions -= 1
        return 0

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


def _identity_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    def by_index(index: Any, ref: Any) -> int:
        if code := handles.session():
            return code
        if index.value >= len(node.devices):
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return handles.issue_device(node.devices[index.value], ref)

    def by_uuid(uuid: Any, ref: Any) -> int:
        if code := handles.session():
            return code
        for gpu in node.devices:
            if gpu.identity.uuid.encode() == uuid.value:
                return handles.issue_device(gpu, ref)
        return int(pynvml.NVML_ERROR_NOT_FOUND)

    def index(gpu: SimGpu, ref: Any) -> int:
        return put(ref, gpu.identity.index)

    def pci(gpu: SimGpu, ref: Any) -> int:
        info = behind(ref)
        info.busId = gpu.identity.pci_bus_id.encode()
        domain, bus, device = gpu.identity.pci_bus_id.split(":")
        info.domain, info.bus, info.device = int(domain, 16), int(bus, 16), int(device[:2], 16)
        return 0

    def memory(gpu: SimGpu, ref: Any) -> int:
        # The first version counts what the driver reserves as used.
        return _memory(gpu, behind(ref), used=gpu.memory_held_bytes)

    def memory_v2(gpu: SimGpu, ref: Any) -> int:
        info = behind(ref)
        if info.version != pynvml.nvmlMemory_v2:
            return int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        info.reserved = gpu.memory_reserved_bytes
        return _memory(gpu, info, used=gpu.memory_used_bytes)

    def default_limit(gpu: SimGpu, ref: Any) -> int:
        return put(ref, round(gpu.product.power_default_w * 1000.0))

    def constraints(gpu: SimGpu, low: Any, high: Any) -> int:
        gpu_low, gpu_high = gpu.identity.power_limit_min_w, gpu.identity.power_limit_max_w
        if gpu_low is None or gpu_high is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return put(low, round(gpu_low * 1000.0)) or put(high, round(gpu_high * 1000.0))

    return {
        "nvmlDeviceGetHandleByIndex_v2": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetIndex": handles.on_device(index),
        "nvmlDeviceGetPciInfo_v3": handles.on_device(pci),
        "nvmlDeviceGetMemoryInfo": handles.on_device(memory),
        "nvmlDeviceGetMemoryInfo_v2": handles.on_device(memory_v2),
        "nvmlDeviceGetPowerManagementDefaultLimit": handles.on_device(default_limit),
        "nvmlDeviceGetPowerManagementLimitConstraints": handles.on_device(constraints),
    }


def _memory(gpu: SimGpu, info: Any, *, used: int) -> int:
    info.total = gpu.product.memory_bytes
    info.used = used
    info.free = gpu.product.memory_bytes - gpu.memory_held_bytes
    return 0


def _sensor_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    def power(gpu: SimGpu, ref: Any) -> int:
        return put(ref, gpu.power_usage_mw(node.monotonic_ns()))

    def energy(gpu: SimGpu, ref: Any) -> int:
        return put(ref, gpu.energy_mj(node.monotonic_ns()))

    def limit(gpu: SimGpu, ref: Any) -> int:
        return put(ref, gpu.limit_mw)

    def utilization(gpu: SimGpu, ref: Any) -> int:
        percent = gpu.utilization_percent
        if percent is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        behind(ref).gpu = percent
        behind(ref).memory = percent
        return 0

    def clock(gpu: SimGpu, kind: Any, ref: Any) -> int:
        clocks = {pynvml.NVML_CLOCK_SM: gpu.sm_clock_mhz, pynvml.NVML_CLOCK_MEM: gpu.memory_clock_mhz}
        return put(ref, clocks.get(kind.value))

    def temperature(gpu: SimGpu, sensor: Any, ref: Any) -> int:
        if sensor.value != pynvml.NVML_TEMPERATURE_GPU:
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return put(ref, gpu.temperature_c(node.monotonic_ns()))

    def temperature_v(gpu: SimGpu, ref: Any) -> int:
        info = behind(ref)
        if info.version != pynvml.nvmlTemperature_v1:
            return int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        info.temperature = gpu.temperature_c(node.monotonic_ns())
        return 0

    def reasons(gpu: SimGpu, ref: Any) -> int:
        return put(ref, gpu.event_reasons)

    return {
        "nvmlDeviceGetPowerUsage": handles.on_device(power),
        "nvmlDeviceGetTotalEnergyConsumption": handles.on_device(energy),
        "nvmlDeviceGetEnforcedPowerLimit": handles.on_device(limit),
        "nvmlDeviceGetPowerManagementLimit": handles.on_device(limit),
        "nvmlDeviceGetUtilizationRates": handles.on_device(utilization),
        "nvmlDeviceGetClockInfo": handles.on_device(clock),
        "nvmlDeviceGetTemperature": handles.on_device(temperature),
        "nvmlDeviceGetTemperatureV": handles.on_device(temperature_v),
        "nvmlDeviceGetCurrentClocksEventReasons": handles.on_device(reasons),
        "nvmlDeviceGetCurrentClocksThrottleReasons": handles.on_device(reasons),
    }


def _field_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    def averaged(gpu: SimGpu) -> int | None:
        return gpu.power_usage_mw(node.monotonic_ns()) if gpu.product.sensor.averaged else None

    wide, narrow = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
    fields: dict[int, tuple[int, int, Callable[[SimGpu], int | None]]] = {
        pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: (0, wide, lambda gpu: gpu.energy_mj(node.monotonic_ns())),
        pynvml.NVML_FI_DEV_POWER_AVERAGE: (_POWER_FIELDS_SINCE, narrow, averaged),
        pynvml.NVML_FI_DEV_POWER_INSTANT: (
            _POWER_FIELDS_SINCE, narrow, lambda gpu: gpu.power_instant_mw(node.monotonic_ns())
        ),
        pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT: (_LIMIT_FIELDS_SINCE, narrow, lambda gpu: gpu.limit_mw),
    }  # fmt: skip

    def values(gpu: SimGpu, count: Any, ref: Any) -> int:
        for value in behind(ref)[: count.value]:
            since, kind, ask = fields.get(value.fieldId, (0, narrow, None))
            if ask is None or node.spec.driver_branch < since:
                value.nvmlReturn = pynvml.NVML_ERROR_INVALID_ARGUMENT
                continue
            number = ask(gpu) if value.scopeId == 0 else None
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if number is None else 0
            value.valueType = kind
            if number is not None and kind == wide:
                value.value.ullVal = number
            elif number is not None:
                value.value.uiVal = number
        return 0

    return {"nvmlDeviceGetFieldValues": handles.on_device(values)}
