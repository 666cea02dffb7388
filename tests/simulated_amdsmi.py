"""A simulated `amdsmi` binding over simulated devices: its names, dictionaries, exceptions and quirks.

It takes the place of the module in the adapter. The part resembles an MI300X; `old` answers as release 6.3.
Numbers come from the data sheet and are assumed where it is silent.
"""

# The functions are those of amdsmi and are documented there.

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any
from uuid import UUID, uuid5

from eelgrid_agent.devices.amd.session import (
    INVALID,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_INITIALIZED,
    NOT_LOADED,
    NOT_SUPPORTED,
    TIMEOUT,
)
from eelgrid_agent.simulation.gpu import SimGpu, SimHealth
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, SpecError
from eelgrid_protos.catalogue.products import PowerSensor, Product, SensorClass
from eelgrid_protos.quantities import MIB

_SENSOR = PowerSensor(period_ms=1, window_ms=1, kind="assumed")
MI300X = Product(
    key="mi300x",
    nvml_names=("AMD Instinct MI300X OAM",),
    model="MI300X",
    architecture="cdna3",
    compute_capability="",
    form_factor="oam",
    memory_bytes=192 * 1024 * MIB,
    idle_w=140.0,
    busy_w=750.0,
    power_default_w=750.0,
    power_min_w=0.0,
    power_max_w=750.0,
    idle_mig_w=None,
    sm_clock_min_mhz=132,
    sm_clock_max_mhz=2100,
    sm_clock_step_mhz=1.0,
    memory_clock_mhz=1300,
    memory_clock_idle_mhz=900,
    memory_bandwidth_gb_s=5300.0,
    sm_count=304,
    sensor=SensorClass(instant=_SENSOR, usage=_SENSOR, averaged=False),
    mig=None,
    kinds={},
)
_SPACE = UUID("0a2d8e0c-7b7c-5c0e-9d0f-3f1f6c1f4f0e")
_STEP_UJ = 15.259  # of the energy counter on MI200 and MI300
_LINKS = 7
_PARTS = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4, "CPX": 8}


class _AmdSmiError(Exception):
    """The binding's root."""


class _LibraryError(_AmdSmiError):
    """The library returned a status."""

    def __init__(self, err_code: int) -> None:
        self.err_code = err_code
        super().__init__(f"Error code:\n\t{err_code} | AMDSMI_STATUS")


class _ParameterError(_AmdSmiError):
    """The binding refused an argument; there is no status."""

    def __init__(self) -> None:
        self.err_code = None
        super().__init__("Invalid parameter")


class AmdHandle:
    """A pointer of the library: one part of one device."""

    def __init__(self, gpu: SimGpu, part: int) -> None:
        self.gpu = gpu
        self.part = part


class _Clocks(IntEnum):
    SYS = 0
    GFX = 0
    MEM = 4


class _Temperatures(IntEnum):
    EDGE = 0
    HOTSPOT = 1
    JUNCTION = 1
    VRAM = 2
    HBM_0 = 3


class _Metrics(IntEnum):
    CURRENT = 0


class _Levels(IntEnum):
    AUTO = 0


class _Links(IntEnum):
    AMDSMI_LINK_TYPE_INTERNAL = 0
    AMDSMI_LINK_TYPE_XGMI = 1
    AMDSMI_LINK_TYPE_PCIE = 2


class _OldLinks(IntEnum):
    UNDEFINED = 0
    PCIEXPRESS = 1
    XGMI = 2


class SimulatedAmdSmi:
    """The binding; `gpus` devices, of which `old` answers as 6.3 did and `stall` is what a hung one does."""

    AmdSmiException = _AmdSmiError
    AmdSmiLibraryException = _LibraryError
    AmdSmiParameterException = _ParameterError
    AmdSmiClkType = _Clocks
    AmdSmiTemperatureType = _Temperatures
    AmdSmiTemperatureMetric = _Metrics
    AmdSmiDevPerfLevel = _Levels

    def __init__(
        self,
        gpus: int,
        *,
        monotonic_ns: Callable[[], int],
        old: bool = False,
        root: bool = True,
        mode: str = "SPX",
        stall: Callable[[], None] = lambda: None,
    ) -> None:
        self._monotonic_ns = monotonic_ns
        self._old = old
        self._stall = stall
        self.root = root
        self.mode = mode
        self.driver_loaded = True
        self.sessions = 0
        self.processes: dict[int, list[tuple[int, int]]] = {}
        self._capped_ms: dict[int, float] = {}
        self._asked_ns = monotonic_ns()
        if old:
            self.AmdSmiIoLinkType = _OldLinks
        else:
            self.AmdSmiLinkType = _Links
        self.devices = tuple(
            SimGpu(
                GpuSpec(product=MI300X.key), MI300X, uuid=uuid5(_SPACE, str(index)), index=index, now_ns=monotonic_ns()
            )
            for index in range(gpus)
        )
        self._loads: dict[int, GpuLoad] = {}

    # What a test does to it

    def set_load(self, index: int, load: GpuLoad) -> None:
        """What runs on a device from now on."""
        self._count_capped()
        self._loads[index] = load
        self.devices[index].set_load(load, self._monotonic_ns())

    def uuid(self, index: int) -> str:
        """The device's own name: of its serial, so that its parts share it."""
        return str(uuid5(_SPACE, str(index)))

    # The binding: session and identity

    def amdsmi_init(self) -> None:
        if not self.driver_loaded:
            raise _LibraryError(NOT_LOADED)
        self.sessions += 1

    def amdsmi_shut_down(self) -> None:
        if self.sessions == 0:
            raise _LibraryError(NOT_INITIALIZED)
        self.sessions -= 1

    def amdsmi_get_processor_handles(self) -> list[AmdHandle]:
        self._session()
        present = [gpu for gpu in self.devices if gpu.health is not SimHealth.LOST]
        return [AmdHandle(gpu, part) for gpu in present for part in range(_PARTS[self.mode])]

    def amdsmi_get_lib_version(self) -> Mapping[str, Any]:
        self._session()
        return {"major": 26, "minor": 0, "release": 2, "build": "26.0.2"}

    def amdsmi_get_gpu_device_uuid(self, handle: AmdHandle) -> str:
        return self.uuid(self._gpu(handle).identity.index)

    def amdsmi_get_gpu_device_bdf(self, handle: AmdHandle) -> str:
        return f"0000:{0x10 + self._gpu(handle).identity.index:02x}:00.{handle.part}"

    def amdsmi_get_gpu_asic_info(self, handle: AmdHandle) -> Mapping[str, Any]:
        self._gpu(handle)
        return {"market_name": "N/A" if self._old else "AMD Instinct MI300X OAM", "vendor_id": "0x1002"}

    def amdsmi_get_gpu_board_info(self, handle: AmdHandle) -> Mapping[str, Any]:
        self._gpu(handle)
        return {"product_name": "AMD Instinct MI300X OAM", "model_number": "N/A"}

    def amdsmi_get_gpu_driver_info(self, handle: AmdHandle) -> Mapping[str, Any]:
        self._gpu(handle)
        return {"driver_name": "amdgpu", "driver_version": "6.12.12", "driver_date": "N/A"}

    def amdsmi_get_gpu_compute_partition(self, handle: AmdHandle) -> str:
        self._gpu(handle)
        return self.mode

    def amdsmi_get_gpu_memory_partition(self, handle: AmdHandle) -> str:
        self._gpu(handle)
        return "NPS1"

    # The binding: readings

    def amdsmi_get_power_info(self, handle: AmdHandle) -> Mapping[str, Any]:
        power_w = self._gpu(handle).power_instant_mw(self._monotonic_ns()) // 1000
        return {
            "socket_power": power_w,
            "current_socket_power": power_w,
            "average_socket_power": "N/A",
            "gfx_voltage": "N/A",
            "power_limit": 750_000_000,
        }

    def amdsmi_get_energy_count(self, handle: AmdHandle) -> Mapping[str, Any]:
        energy_mj = self._gpu(handle).energy_mj(self._monotonic_ns()) or 0
        name = "power" if self._old else "energy_accumulator"
        return {name: int(energy_mj * 1000 / _STEP_UJ), "counter_resolution": _STEP_UJ, "timestamp": 1}

    def amdsmi_get_gpu_activity(self, handle: AmdHandle) -> Mapping[str, Any]:
        share = self._loads.get(self._gpu(handle).identity.index, GpuLoad()).utilization_ratio
        return {"gfx_activity": round(100 * share), "umc_activity": round(40 * share), "mm_activity": "N/A"}

    def amdsmi_get_gpu_vram_usage(self, handle: AmdHandle) -> Mapping[str, Any]:
        gpu = self._gpu(handle)
        return {"vram_total": gpu.product.memory_bytes // MIB, "vram_used": gpu.memory_used_bytes // MIB}

    def amdsmi_get_clock_info(self, handle: AmdHandle, clock_type: _Clocks) -> Mapping[str, Any]:
        gpu = self._gpu(handle)
        if not isinstance(clock_type, _Clocks):
            raise _ParameterError
        graphics = clock_type is _Clocks.GFX
        clock_mhz = gpu.sm_clock_mhz if graphics else gpu.memory_clock_mhz
        low, high = (132, 2100) if graphics else (900, 1300)
        return {"cur_clk" if self._old else "clk": clock_mhz, "min_clk": low, "max_clk": high, "clk_locked": "N/A"}

    def amdsmi_get_temp_metric(self, handle: AmdHandle, sensor_type: _Temperatures, metric: _Metrics) -> int:
        gpu = self._gpu(handle)
        if not isinstance(sensor_type, _Temperatures) or not isinstance(metric, _Metrics):
            raise _ParameterError
        if sensor_type not in (_Temperatures.HOTSPOT, _Temperatures.VRAM):
            raise _LibraryError(NOT_SUPPORTED)
        return gpu.temperature_c(self._monotonic_ns())

    def amdsmi_get_power_cap_info(self, handle: AmdHandle) -> Mapping[str, Any]:
        gpu = self._gpu(handle)
        return {
            "power_cap": gpu.limit_mw * 1000,
            "default_power_cap": 750_000_000,
            "dpm_cap": 0,
            "min_power_cap": 0,
            "max_power_cap": 750_000_000,
        }

    def amdsmi_get_gpu_total_ecc_count(self, handle: AmdHandle) -> Mapping[str, Any]:
        self._gpu(handle)
        return {"correctable_count": 3, "uncorrectable_count": 0, "deferred_count": 0}

    def amdsmi_get_gpu_bad_page_info(self, handle: AmdHandle) -> list[Mapping[str, Any]]:
        self._gpu(handle)
        return [{"value": 0, "page_address": 4096, "page_size": 4096, "status": "RESERVED"}]

    def amdsmi_get_pcie_info(self, handle: AmdHandle) -> Mapping[str, Any]:
        self._gpu(handle)
        metric = {"pcie_width": 16, "pcie_speed": 32_000, "pcie_bandwidth": "N/A", "pcie_replay_count": 2**64 - 1}
        return {"pcie_static": {"max_pcie_width": 16, "slot_type": "OAM"}, "pcie_metric": metric}

    def amdsmi_get_gpu_metrics_info(self, handle: AmdHandle) -> Mapping[str, Any]:
        gpu = self._gpu(handle)
        self._count_capped()
        return {
            "ppt_residency_acc": int(self._capped_ms.get(gpu.identity.index, 0.0)),
            "socket_thm_residency_acc": 0,
            "vr_thm_residency_acc": 0,
            "hbm_thm_residency_acc": "N/A",
            "prochot_residency_acc": 0,
            "throttle_status": "N/A",
            "xgmi_read_data_acc": [1000] * _LINKS + ["N/A"],
            "xgmi_write_data_acc": [2000] * _LINKS + ["N/A"],
        }

    def amdsmi_get_gpu_xgmi_link_status(self, handle: AmdHandle) -> Mapping[str, Any]:
        self._gpu(handle)
        return {"status": ["U"] * _LINKS + ["X"], "total_links": _LINKS + 1}

    def amdsmi_get_gpu_process_list(self, handle: AmdHandle) -> list[Mapping[str, Any]]:
        found = self.processes.get(self._gpu(handle).identity.index, ())
        return [
            {
                "name": "N/A",
                "pid": pid,
                "mem": memory,
                "engine_usage": {"gfx": 0, "enc": 0},
                "memory_usage": {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": memory},
                "cu_occupancy": "N/A",
            }
            for pid, memory in found
        ]

    def amdsmi_topo_get_numa_node_number(self, handle: AmdHandle) -> int:
        return self._gpu(handle).identity.index // 4

    def amdsmi_topo_get_link_type(self, src: AmdHandle, dst: AmdHandle) -> Mapping[str, Any]:
        self._gpu(src)
        self._gpu(dst)
        return {"hops": 1, "type": 2 if self._old else 1}

    # The binding: changes

    def amdsmi_set_power_cap(self, handle: AmdHandle, sensor_ind: int, cap: int) -> None:
        gpu = self._writable(handle)
        if not isinstance(cap, int) or sensor_ind != 0:
            raise _ParameterError
        try:
            gpu.limit_power(cap / 1e6, self._monotonic_ns())
        except SpecError:
            raise _LibraryError(INVALID) from None

    def amdsmi_set_gpu_clk_limit(self, handle: AmdHandle, clk_type: str, limit_type: str, value: int) -> None:
        gpu = self._writable(handle)
        if (clk_type, limit_type) not in (("sclk", "min"), ("sclk", "max")):
            raise _ParameterError
        low, high = gpu.locked_mhz or (132, 2100)
        low, high = (value, high) if limit_type == "min" else (low, value)
        if not 132 <= low <= high <= 2100:
            raise _LibraryError(INVALID)
        gpu.lock_clocks((low, high), self._monotonic_ns())

    def amdsmi_set_gpu_perf_level(self, handle: AmdHandle, perf_level: _Levels) -> None:
        gpu = self._writable(handle)
        if perf_level is _Levels.AUTO:
            gpu.lock_clocks(None, self._monotonic_ns())

    # How it gets there

    def _session(self) -> None:
        if self.sessions == 0:
            raise _LibraryError(NOT_INITIALIZED)
        if not self.driver_loaded:
            raise _LibraryError(NOT_LOADED)

    def _gpu(self, handle: AmdHandle) -> SimGpu:
        """The device of a handle; raises as the binding does."""
        if not isinstance(handle, AmdHandle):
            raise _ParameterError
        self._session()
        if handle.gpu.health is SimHealth.LOST:
            raise _LibraryError(NOT_FOUND)
        if handle.gpu.health is SimHealth.HUNG:
            self._stall()
            raise _LibraryError(TIMEOUT)
        return handle.gpu

    def _writable(self, handle: AmdHandle) -> SimGpu:
        gpu = self._gpu(handle)
        if not self.root:
            raise _LibraryError(NO_PERMISSION)
        return gpu

    def _count_capped(self) -> None:
        """Residency of the power limit, in the milliseconds since this was last asked."""
        now_ns = self._monotonic_ns()
        elapsed_ms, self._asked_ns = (now_ns - self._asked_ns) / 1e6, now_ns
        for gpu in self.devices:
            if gpu.event_reasons & 0x4:
                index = gpu.identity.index
                self._capped_ms[index] = self._capped_ms.get(index, 0.0) + elapsed_ms
