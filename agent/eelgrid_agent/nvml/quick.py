"""The quick readings: a few microseconds each, asked at every tick.

Owns which calls they are and their units. Power is the instant field where the
driver has it; before that the plain call, which newer parts average.
"""

from typing import Any

import pynvml

from eelgrid_agent.nvml.fields import Field, field_id, field_value
from eelgrid_agent.nvml.ways import Source, Way
from eelgrid_protos.messages import Reading
from eelgrid_protos.quantities import joules_from_millijoules, watts_from_milliwatts

__all__ = ["power_field", "quick_sources"]


def quick_sources(branch: int) -> tuple[Source, ...]:
    """How FAST_READINGS are had from this driver branch; ENERGY_J is the device's own counter."""
    return (
        Source((Reading.ENERGY_J,), (_energy,)),
        Source((Reading.POWER_W,), (*power_field(Field.POWER_INSTANT, branch), _usage)),
        Source((Reading.POWER_AVERAGE_W,), power_field(Field.POWER_AVERAGE, branch)),
        Source((Reading.UTILIZATION_RATIO, Reading.MEMORY_UTILIZATION_RATIO), (_utilization,)),
        Source((Reading.MEMORY_USED_BYTES,), (_memory_v2, _memory)),
        Source((Reading.SM_CLOCK_MHZ,), (_sm_clock,)),
        Source((Reading.MEMORY_CLOCK_MHZ,), (_memory_clock,)),
        Source((Reading.TEMPERATURE_C,), (_temperature_v, _temperature)),
        Source((Reading.POWER_LIMIT_W,), (_limit,)),
        Source((Reading.EVENT_REASONS_MASK,), (_reasons, _throttle_reasons)),
    )


def power_field(field: Field, branch: int, scope: int = 0) -> tuple[Way, ...]:
    """The way to a field in milliwatts, or none where the branch lacks it."""
    number = field_id(field, branch)
    if number is None:
        return ()

    def ask(handle: Any) -> tuple[float]:
        return (watts_from_milliwatts(field_value(handle, number, scope)),)

    return (ask,)


def _energy(handle: Any) -> tuple[float]:
    return (joules_from_millijoules(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)),)


def _usage(handle: Any) -> tuple[float]:
    return (watts_from_milliwatts(pynvml.nvmlDeviceGetPowerUsage(handle)),)


def _utilization(handle: Any) -> tuple[float, float]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return float(rates.gpu) / 100.0, float(rates.memory) / 100.0


def _memory_v2(handle: Any) -> tuple[float]:
    # The second version leaves out what the driver reserves.
    return (float(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used),)


def _memory(handle: Any) -> tuple[float]:
    return (float(pynvml.nvmlDeviceGetMemoryInfo(handle).used),)


def _sm_clock(handle: Any) -> tuple[float]:
    return (float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),)


def _memory_clock(handle: Any) -> tuple[float]:
    return (float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),)


def _temperature_v(handle: Any) -> tuple[float]:
    return (float(pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU)),)


def _temperature(handle: Any) -> tuple[float]:
    return (float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),)


def _limit(handle: Any) -> tuple[float]:
    return (watts_from_milliwatts(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)),)


def _reasons(handle: Any) -> tuple[float]:
    return (float(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),)


def _throttle_reasons(handle: Any) -> tuple[float]:
    return (float(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),)
