"""The symbols of the simulated library that read one sensor each."""

from typing import Any

import pynvml

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.handles import Handles, Symbol, behind, put
from eelgrid_agent.simulation.node import SimulatedNode

__all__ = ["sensor_symbols"]

_INVALID = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
_MISMATCH = int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
_NOT_SUPPORTED = int(pynvml.NVML_ERROR_NOT_SUPPORTED)


def sensor_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    """All of them, by name."""
    return {**_power_symbols(node, handles), **_state_symbols(node, handles), **_health_symbols(node, handles)}


def _power_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    def power(gpu: SimGpu, ref: Any) -> int:
        return put(ref, gpu.power_usage_mw(node.monotonic_ns()))

    def energy(gpu: SimGpu, ref: Any) -> int:
        return put(ref, gpu.energy_mj(node.monotonic_ns()))

    def limit(gpu: SimGpu, ref: Any) -> int:
        return put(ref, gpu.enforced_mw)

    return {
        "nvmlDeviceGetPowerUsage": handles.on_device(power),
        "nvmlDeviceGetTotalEnergyConsumption": handles.on_device(energy),
        "nvmlDeviceGetEnforcedPowerLimit": handles.on_device(limit),
    }


def _state_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    def utilization(gpu: SimGpu, ref: Any) -> int:
        if gpu.percents is None:
            return _NOT_SUPPORTED
        behind(ref).gpu, behind(ref).memory = gpu.percents
        return 0

    def clock(gpu: SimGpu, kind: Any, ref: Any) -> int:
        clocks = {pynvml.NVML_CLOCK_SM: gpu.sm_clock_mhz, pynvml.NVML_CLOCK_MEM: gpu.memory_clock_mhz}
        return put(ref, clocks.get(kind.value))

    def temperature(gpu: SimGpu, sensor: Any, ref: Any) -> int:
        if sensor.value != pynvml.NVML_TEMPERATURE_GPU:
            return _INVALID
        return put(ref, gpu.temperature_c(node.monotonic_ns()))

    def temperature_v(gpu: SimGpu, ref: Any) -> int:
        info = behind(ref)
        if info.version != pynvml.nvmlTemperature_v1:
            return _MISMATCH
        info.temperature = gpu.temperature_c(node.monotonic_ns())
        return 0

    def reasons(gpu: SimGpu, ref: Any) -> int:
        return put(ref, gpu.event_reasons)

    def performance_state(gpu: SimGpu, ref: Any) -> int:
        return put(ref, node.sensors(gpu).performance_state())

    return {
        "nvmlDeviceGetUtilizationRates": handles.on_device(utilization),
        "nvmlDeviceGetClockInfo": handles.on_device(clock),
        "nvmlDeviceGetTemperature": handles.on_device(temperature),
        "nvmlDeviceGetTemperatureV": handles.on_device(temperature_v),
        "nvmlDeviceGetCurrentClocksEventReasons": handles.on_device(reasons),
        "nvmlDeviceGetCurrentClocksThrottleReasons": handles.on_device(reasons),
        "nvmlDeviceGetPerformanceState": handles.on_device(performance_state),
    }


def _health_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    def ecc_errors(gpu: SimGpu, kind: Any, counter: Any, ref: Any) -> int:
        corrected = kind.value == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        if counter.value == pynvml.NVML_VOLATILE_ECC:
            return put(ref, node.sensors(gpu).ecc_volatile(corrected=corrected))
        return put(ref, node.sensors(gpu).ecc_aggregate(corrected=corrected))

    def remapped_rows(gpu: SimGpu, *refs: Any) -> int:
        rows = node.sensors(gpu).remapped_rows()
        if rows is None:
            return _NOT_SUPPORTED
        for ref, number in zip(refs, rows, strict=True):
            put(ref, number)
        return 0

    def pcie_generation(gpu: SimGpu, ref: Any) -> int:
        return put(ref, node.sensors(gpu).pcie_generation())

    def pcie_width(gpu: SimGpu, ref: Any) -> int:
        return put(ref, node.sensors(gpu).pcie_width())

    def pcie_replays(gpu: SimGpu, ref: Any) -> int:
        return put(ref, node.sensors(gpu).pcie_replays())

    return {
        "nvmlDeviceGetTotalEccErrors": handles.on_device(ecc_errors),
        "nvmlDeviceGetRemappedRows": handles.on_device(remapped_rows),
        "nvmlDeviceGetCurrPcieLinkGeneration": handles.on_device(pcie_generation),
        "nvmlDeviceGetCurrPcieLinkWidth": handles.on_device(pcie_width),
        "nvmlDeviceGetPcieReplayCounter": handles.on_device(pcie_replays),
    }
