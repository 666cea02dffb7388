"""The slow readings that are one call each: power by scope, errors, rows, PCIe, fabric, state.

Owns which calls they are and their units. PCIe throughput is not here: its
call blocks for 20 ms and direction, and hardware counters give the same.
"""

import ctypes
from typing import Any

import pynvml

from eelgrid_agent.nvml.fields import Field, field_id, field_value
from eelgrid_agent.nvml.links import link_sources
from eelgrid_agent.nvml.quick import power_field
from eelgrid_agent.nvml.ways import Source, Way
from eelgrid_protos.messages import Reading
from eelgrid_protos.quantities import watts_from_milliwatts

__all__ = ["slow_sources"]

_ROWS = (
    Reading.REMAPPED_ROWS_CORRECTABLE, Reading.REMAPPED_ROWS_UNCORRECTABLE, Reading.ROW_REMAP_PENDING,
    Reading.ROW_REMAP_FAILED,
)  # fmt: skip


def slow_sources(branch: int) -> tuple[Source, ...]:
    """How SLOW_READINGS are had from this driver branch, but for activity and processes."""
    corrected, uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    volatile, aggregate = pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC
    module, memory = pynvml.NVML_POWER_SCOPE_MODULE, pynvml.NVML_POWER_SCOPE_MEMORY
    return (
        Source((Reading.POWER_LIMIT_REQUESTED_W,), (*power_field(Field.POWER_LIMIT_REQUESTED, branch), _requested)),
        Source((Reading.MEMORY_POWER_W,), power_field(Field.POWER_INSTANT, branch, memory)),
        Source((Reading.MODULE_POWER_W,), power_field(Field.POWER_INSTANT, branch, module)),
        Source((Reading.MEMORY_TEMPERATURE_C,), _plain(Field.MEMORY_TEMPERATURE, branch)),
        Source((Reading.MEMORY_RESERVED_BYTES,), (_reserved,)),
        Source((Reading.ECC_CORRECTED_VOLATILE,), (_errors(corrected, volatile),)),
        Source((Reading.ECC_UNCORRECTED_VOLATILE,), (_errors(uncorrected, volatile),)),
        Source((Reading.ECC_CORRECTED_AGGREGATE,), (_errors(corrected, aggregate),)),
        Source((Reading.ECC_UNCORRECTED_AGGREGATE,), (_errors(uncorrected, aggregate),)),
        Source(_ROWS, (_rows,)),
        Source((Reading.RECOVERY_ACTION,), _plain(Field.RECOVERY_ACTION, branch)),
        Source((Reading.PCIE_LINK_GENERATION,), (_pcie_generation,)),
        Source((Reading.PCIE_LINK_WIDTH,), (_pcie_width,)),
        Source((Reading.PCIE_REPLAYS,), (_pcie_replays,)),
        Source((Reading.FABRIC_STATE,), (_fabric,)),
        Source((Reading.PERFORMANCE_STATE,), (_performance_state,)),
        *link_sources(branch),
    )


def _plain(field: Field, branch: int) -> tuple[Way, ...]:
    number = field_id(field, branch)
    if number is None:
        return ()

    def ask(handle: Any) -> tuple[float]:
        return (float(field_value(handle, number)),)

    return (ask,)


def _errors(kind: int, counter: int) -> Way:
    def ask(handle: Any) -> tuple[float]:
        return (float(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter)),)

    return ask


def _requested(handle: Any) -> tuple[float]:
    return (watts_from_milliwatts(pynvml.nvmlDeviceGetPowerManagementLimit(handle)),)


def _reserved(handle: Any) -> tuple[float]:
    return (float(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).reserved),)


def _rows(handle: Any) -> tuple[float, ...]:
    return tuple(float(number) for number in pynvml.nvmlDeviceGetRemappedRows(handle))


def _pcie_generation(handle: Any) -> tuple[float]:
    return (float(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),)


def _pcie_width(handle: Any) -> tuple[float]:
    return (float(pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),)


def _pcie_replays(handle: Any) -> tuple[float]:
    return (float(pynvml.nvmlDeviceGetPcieReplayCounter(handle)),)


def _fabric(handle: Any) -> tuple[float | None]:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return (None if info.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED else float(info.state),)


def _performance_state(handle: Any) -> tuple[float | None]:
    state = pynvml.nvmlDeviceGetPerformanceState(handle)
    return (None if state == pynvml.NVML_PSTATE_UNKNOWN else float(state),)
