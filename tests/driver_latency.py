"""Measured latencies of driver calls, for a simulated driver that is as slow as a real one."""

from collections.abc import Callable, Mapping

_SENSOR_S = 2.5e-6
_MEMORY_S = 11.6e-6
_POWER_S = 365e-6
_PROCESSES_S = 4.491e-3
_MIG_WALK_S = 50e-3
_MIG_CHANGE_S = 1.0

CALL_LATENCY_S: Mapping[str, float] = {
    "nvmlDeviceGetUtilizationRates": _SENSOR_S,
    "nvmlDeviceGetClockInfo": _SENSOR_S,
    "nvmlDeviceGetTemperature": _SENSOR_S,
    "nvmlDeviceGetTemperatureV": _SENSOR_S,
    "nvmlDeviceGetMemoryInfo": _MEMORY_S,
    "nvmlDeviceGetMemoryInfo_v2": _MEMORY_S,
    "nvmlDeviceGetPowerUsage": _POWER_S,
    "nvmlDeviceGetFieldValues": _POWER_S,
    "nvmlDeviceGetTotalEnergyConsumption": _POWER_S,
    **dict.fromkeys(
        (f"nvmlDeviceGet{kind}RunningProcesses_v{version}" for kind in ("Compute", "Graphics") for version in (2, 3)),
        _PROCESSES_S,
    ),
    "nvmlDeviceGetGpuInstances": _MIG_WALK_S,
    "nvmlGpuInstanceGetComputeInstances": _MIG_WALK_S,
    **dict.fromkeys(
        (
            "nvmlDeviceCreateGpuInstance",
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            "nvmlGpuInstanceDestroy",
            "nvmlGpuInstanceCreateComputeInstance",
            "nvmlComputeInstanceDestroy",
            "nvmlDeviceSetMigMode",
        ),
        _MIG_CHANGE_S,
    ),
    "read": 3 * _POWER_S + _MEMORY_S + 5 * _SENSOR_S,
    "read_slow": 6 * _POWER_S + 2 * _PROCESSES_S,
    "processes": 2 * _PROCESSES_S,
    "read_instances": _MIG_WALK_S,
    **dict.fromkeys(
        (
            "set_mig_mode",
            "create_gpu_instance",
            "destroy_gpu_instance",
            "create_compute_instance",
            "destroy_compute_instance",
        ),
        _MIG_CHANGE_S,
    ),
}


def make_call_latency(
    wait: Callable[[float], None], *, scale: float = 1.0, least_s: float = 1e-6
) -> Callable[[str], None]:
    """What `Faults.slow_calls` takes: `wait` is given the seconds that a call takes, times `scale`."""

    def pause(call: str) -> None:
        wait(CALL_LATENCY_S.get(call, least_s) * scale)

    return pause
