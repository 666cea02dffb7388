"""AMD devices behind both ports: listing, the table of readings, power cap and graphics clock range.

One thread uses it. Partitions (DPX, QPX, CPX) have a handle and share a board, so one device is listed per board and
its watts count once. AMD partitions are not MIG: every MIG method raises NotSupported.

The table says which `amdsmi` call holds which reading, under which name and in which unit; the names of releases 6.3
and 7.0 are both read. Missing numbers are "N/A" or the largest number of their width. Power is in watts, caps are in
microwatts, memory is in MiB, and the energy counter counts steps of `counter_resolution` microjoules. Throttle reasons
come from residency counters that rose since the last read. `amdsmi_get_violation_status` (sleeps 100 ms) and
`amdsmi_get_gpu_pci_throughput` (1 s) are not called because they block.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from types import MappingProxyType
from typing import Any, NoReturn

from eelgrid_agent.devices.amd.session import AmdSession, get_absence_reason, is_device_lost, make_device_error
from eelgrid_agent.devices.port import (
    FAST_VALUE_READINGS,
    SLOW_READINGS,
    DeviceEvent,
    DeviceLink,
    DeviceTimeout,
    DriverUnavailable,
    GpuLostError,
    GpuProcess,
    InstanceReadings,
    Missing,
    ModeChange,
    NotSupported,
    OutOfRange,
    PowerSettings,
    ProcessKind,
    RawReadings,
    ReadingValue,
    UnknownGpu,
    make_silent_readings,
)
from eelgrid_protos.catalogue.products import MigGeometry, model_name
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, READING_RANGES, AbsenceReason, AccessLevel, Gpu, Reading
from eelgrid_protos.quantities import MIB
from eelgrid_protos.values import dataclass

_SENTINELS = frozenset({0xFFFF, 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF})
_MISSING = {reason: Missing(reason) for reason in AbsenceReason}
_NOT_SUPPORTED = _MISSING[AbsenceReason.NOT_SUPPORTED]
_IMPLAUSIBLE = _MISSING[AbsenceReason.IMPLAUSIBLE]
_SMALLEST_SENTINEL = 0xFFFF

# Residency counters, and what NVML's bits call a clock held down for that cause.
_CAUSES: Mapping[str, int] = MappingProxyType(
    {
        "ppt_residency_acc": 0x4,  # software power cap
        "socket_thm_residency_acc": 0x20,  # software thermal slowdown
        "vr_thm_residency_acc": 0x40,  # hardware thermal slowdown
        "hbm_thm_residency_acc": 0x40,
        "prochot_residency_acc": 0x48,  # hardware slowdown, thermal
    }
)
_PCIE_GENERATIONS = MappingProxyType({2500: 1, 5000: 2, 8000: 3, 16_000: 4, 32_000: 5, 64_000: 6})

AmdCall = Callable[[Any, Any], Any]


def find_number(answer: Any, *names: str) -> float | None:
    """The first of these fields that holds a number; None where none does."""
    for name in names:
        value = answer.get(name) if isinstance(answer, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value >= _SMALLEST_SENTINEL and value in _SENTINELS:
            continue
        return float(value)
    return None


def _plausible(reading: Reading, value: float | None) -> ReadingValue:
    if value is None:
        return _NOT_SUPPORTED
    bounds = READING_RANGES[reading]
    return float(value) if bounds.low <= value <= bounds.high else _IMPLAUSIBLE


@dataclass(frozen=True, slots=True)
class AmdSource:
    """One call and the readings in its answer; a reading that no source holds is not supported."""

    ask: AmdCall
    readings: Mapping[Reading, Callable[[Any], float | None]]

    def values(self, answer: Any) -> Iterable[tuple[Reading, ReadingValue]]:
        """The readings, each within its range or missing."""
        return [(reading, _plausible(reading, take(answer))) for reading, take in self.readings.items()]


def _scaled(scale: float, *names: str) -> Callable[[Any], float | None]:
    def take(answer: Any) -> float | None:
        value = find_number(answer, *names)
        return None if value is None else value * scale

    return take


def _plain(answer: Any) -> float | None:
    return find_number({"": answer}, "")


def _temperature(*kinds: str) -> AmdCall:
    """The first of these sensors that the part has: MI300 has no edge sensor."""

    def ask(smi: Any, handle: Any) -> Any:
        *others, last = kinds
        metric = smi.AmdSmiTemperatureMetric.CURRENT
        for kind in others:
            try:
                return smi.amdsmi_get_temp_metric(handle, smi.AmdSmiTemperatureType[kind], metric)
            except smi.AmdSmiLibraryException as error:
                if error.err_code not in (1, 2):
                    raise
        return smi.amdsmi_get_temp_metric(handle, smi.AmdSmiTemperatureType[last], metric)

    return ask


def _clock(kind: str) -> AmdCall:
    return lambda smi, handle: smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType[kind])


def _generation(answer: Any) -> float | None:
    speed = find_number(answer.get("pcie_metric"), "pcie_speed")
    return None if speed is None else _PCIE_GENERATIONS.get(int(speed))


def _links_up(answer: Any) -> float | None:
    status = answer.get("status")
    return float(status.count("U")) if isinstance(status, list) else None


def _summed(name: str) -> Callable[[Any], float | None]:
    """Links are counted in kilobytes; those that the part lacks hold no number."""

    def take(answer: Any) -> float | None:
        parts = [find_number({"": part}, "") for part in answer.get(name, ()) if not isinstance(part, str)]
        present = [part for part in parts if part is not None]
        return 1000.0 * sum(present) if present else None

    return take


def _pages(*states: str) -> Callable[[Any], float | None]:
    """Retired pages in these states."""
    return lambda pages: float(sum(str(page.get("status", "")).upper() in states for page in pages))


def _is_any(take: Callable[[Any], float | None]) -> Callable[[Any], float | None]:
    return lambda answer: float(bool(take(answer)))


FAST_SOURCES: tuple[AmdSource, ...] = (
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_power_info(handle),
        {
            Reading.POWER_W: _scaled(1.0, "current_socket_power", "average_socket_power"),
            Reading.POWER_AVERAGE_W: _scaled(1.0, "average_socket_power"),
        },
    ),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_gpu_activity(handle),
        {
            Reading.UTILIZATION_RATIO: _scaled(0.01, "gfx_activity"),
            Reading.MEMORY_UTILIZATION_RATIO: _scaled(0.01, "umc_activity"),
        },
    ),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_gpu_vram_usage(handle),
        {Reading.MEMORY_USED_BYTES: _scaled(MIB, "vram_used")},
    ),
    AmdSource(_clock("GFX"), {Reading.SM_CLOCK_MHZ: _scaled(1.0, "clk", "cur_clk")}),
    AmdSource(_clock("MEM"), {Reading.MEMORY_CLOCK_MHZ: _scaled(1.0, "clk", "cur_clk")}),
    AmdSource(_temperature("EDGE", "HOTSPOT"), {Reading.TEMPERATURE_C: _plain}),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_power_cap_info(handle), {Reading.POWER_LIMIT_W: _scaled(1e-6, "power_cap")}
    ),
)
SLOW_SOURCES: tuple[AmdSource, ...] = (
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_power_cap_info(handle),
        {Reading.POWER_LIMIT_REQUESTED_W: _scaled(1e-6, "power_cap")},
    ),
    AmdSource(_temperature("VRAM", "HBM_0"), {Reading.MEMORY_TEMPERATURE_C: _plain}),
    AmdSource(
        # Counted since the driver was loaded, which NVML calls volatile.
        lambda smi, handle: smi.amdsmi_get_gpu_total_ecc_count(handle),
        {
            Reading.ECC_CORRECTED_VOLATILE: _scaled(1.0, "correctable_count"),
            Reading.ECC_UNCORRECTED_VOLATILE: _scaled(1.0, "uncorrectable_count"),
        },
    ),
    AmdSource(
        # A retired page is what a remapped row is elsewhere.
        lambda smi, handle: smi.amdsmi_get_gpu_bad_page_info(handle),
        {
            Reading.REMAPPED_ROWS_UNCORRECTABLE: _pages("RESERVED"),
            Reading.ROW_REMAP_PENDING: _is_any(_pages("PENDING")),
            Reading.ROW_REMAP_FAILED: _is_any(_pages("UNRESERVABLE")),
        },
    ),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_pcie_info(handle),
        {
            Reading.PCIE_LINK_GENERATION: _generation,
            Reading.PCIE_LINK_WIDTH: lambda answer: find_number(answer.get("pcie_metric"), "pcie_width"),
            Reading.PCIE_REPLAYS: lambda answer: find_number(answer.get("pcie_metric"), "pcie_replay_count"),
        },
    ),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_gpu_metrics_info(handle),
        {
            Reading.NVLINK_SENT_BYTES: _summed("xgmi_write_data_acc"),
            Reading.NVLINK_RECEIVED_BYTES: _summed("xgmi_read_data_acc"),
        },
    ),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_gpu_xgmi_link_status(handle), {Reading.NVLINK_ACTIVE_LINKS: _links_up}
    ),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_gpu_process_list(handle),
        {Reading.PROCESSES: lambda answer: float(len({process["pid"] for process in answer}))},
    ),
)
assert {reading for source in SLOW_SOURCES for reading in source.readings} <= set(SLOW_READINGS)


def read_energy_j(answer: Any) -> ReadingValue:
    """The energy counter."""
    count, step_uj = find_number(answer, "energy_accumulator", "power"), find_number(answer, "counter_resolution")
    return _plausible(Reading.ENERGY_J, None if count is None or step_uj is None else count * step_uj * 1e-6)


def read_residencies(answer: Any) -> Mapping[str, float]:
    """The residency counters of a metrics table that the part has."""
    found = {name: find_number(answer, name) for name in _CAUSES}
    return {name: value for name, value in found.items() if value is not None}


def compute_reasons_mask(before: Mapping[str, float], now: Mapping[str, float]) -> float:
    """Returns the throttle reasons whose counters rose."""
    mask = 0
    for name, value in now.items():
        if value > before.get(name, value):
            mask |= _CAUSES[name]
    return float(mask)


_SILENT = frozenset({AbsenceReason.GPU_LOST, AbsenceReason.TIMED_OUT})
# NVML's words for how near two devices are.
_SAME_NODE, _SYSTEM = 40, 50


class AmdDevice:
    """The device port over `amdsmi`; `visit` is called before a listing asks a device and may pass it over."""

    def __init__(
        self, smi: Any, *, visit: Callable[[int], bool] = lambda _index: True, user_id: Callable[[], int] = os.geteuid
    ) -> None:
        self._smi = smi
        self._visit = visit
        self._user_id = user_id
        self._session = AmdSession(smi)
        self._handles: dict[str, Any] = {}
        self._seen: dict[str, Gpu] = {}
        self._residencies: dict[str, Mapping[str, float]] = {}
        # Places that timed out in the last listing: these devices hang and are not lost.
        self._late: set[int] = set()
        self._lost = False

    def driver_version(self) -> str:
        """The version of the amdgpu driver, or of the library where no device reports one; raises DriverUnavailable."""
        if not self._handles:
            self.gpus()
        for handle in self._handles.values():
            try:
                version = str(self._smi.amdsmi_get_gpu_driver_info(handle)["driver_version"])
            except self._smi.AmdSmiException as error:
                self._drop_handles(error)
                continue
            if version != "N/A":
                return version
        self._session.open()
        try:
            library = self._smi.amdsmi_get_lib_version()
        except self._smi.AmdSmiException as error:
            raise DriverUnavailable(str(make_device_error(error))) from None
        return f"amdsmi {library['major']}.{library['minor']}"

    def access(self) -> AccessLevel:
        """The driver allows root to change devices and everybody to read them."""
        return AccessLevel.ROOT if self._user_id() == 0 else AccessLevel.READ_ONLY

    def gpus(self) -> tuple[Gpu, ...]:
        """Every board that answers or answered before, by index; raises DriverUnavailable."""
        if self._lost:
            self._end()
        self._session.open()
        try:
            handles = list(self._smi.amdsmi_get_processor_handles())
        except self._smi.AmdSmiException as error:
            self._end()
            raise DriverUnavailable(str(make_device_error(error))) from None
        found: dict[str, Gpu] = {}
        self._handles.clear()
        self._late.clear()
        for place, handle in enumerate(handles[:GPUS_PER_NODE_MOST]):
            if not self._visit(place):
                continue
            try:
                gpu = self._identify(handle, place)
            except self._smi.AmdSmiException as error:
                self._lost = self._lost or is_device_lost(error)
                if get_absence_reason(error) is AbsenceReason.TIMED_OUT:
                    self._late.add(place)
                continue
            if gpu.uuid not in found:
                found[gpu.uuid] = gpu
                self._handles[gpu.uuid] = handle
        self._seen = _number_devices(found, self._seen)
        return tuple(sorted(self._seen.values(), key=lambda gpu: gpu.index))

    def read(self, uuid: str) -> RawReadings:
        """One quick look; raises UnknownGpu."""
        values: dict[Reading, ReadingValue] = dict.fromkeys(FAST_VALUE_READINGS, _NOT_SUPPORTED)
        try:
            handle = self.handle(uuid)
            counter = self._query(lambda smi, handle: smi.amdsmi_get_energy_count(handle), handle)
            energy: ReadingValue = counter if isinstance(counter, Missing) else read_energy_j(counter)
            self._fill(values, FAST_SOURCES, handle)
            values[Reading.EVENT_REASONS_MASK] = self._reasons(uuid, handle)
        except _Silence as silence:
            return make_silent_readings(silence.reason)
        return RawReadings(energy_counter_j=energy, values=values)

    def read_slow(self, uuid: str) -> Mapping[Reading, ReadingValue]:
        """Reads what is expensive or changes seldom; raises UnknownGpu."""
        values: dict[Reading, ReadingValue] = dict.fromkeys(SLOW_READINGS, Missing(AbsenceReason.NOT_SUPPORTED))
        try:
            self._fill(values, SLOW_SOURCES, self.handle(uuid))
        except _Silence as silence:
            return dict.fromkeys(SLOW_READINGS, Missing(silence.reason))
        return values

    def read_instances(self, uuid: str) -> tuple[InstanceReadings, ...]:
        """None: parts of an AMD device are no instances with readings; raises UnknownGpu."""
        self._known(uuid)
        return ()

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Who computes on the device, by pid; raises UnknownGpu, NoPermission, NotSupported."""
        found = self.call(uuid, lambda smi, handle: smi.amdsmi_get_gpu_process_list(handle))
        processes: dict[int, GpuProcess] = {}
        for one in found:
            memory_bytes = find_number(one.get("memory_usage"), "vram_mem")
            memory_bytes = find_number(one, "mem") if memory_bytes is None else memory_bytes
            processes[int(one["pid"])] = GpuProcess(
                pid=int(one["pid"]),
                kind=ProcessKind.COMPUTE,
                memory_bytes=None if memory_bytes is None else int(memory_bytes),
            )
        return tuple(sorted(processes.values(), key=lambda process: process.pid))

    def topology(self) -> tuple[DeviceLink, ...]:
        """Every pair of devices; XGMI counts as NVLink does."""
        if not self._handles:
            self.gpus()
        links = []
        for one, other in combinations(sorted(self._handles), 2):
            try:
                links.append(self._link(one, other))
            except self._smi.AmdSmiException:
                # The driver tells nothing of a pair with a lost device.
                continue
        return tuple(links)

    def take_events(self) -> tuple[DeviceEvent, ...]:
        """None: what the driver announces (faults of pages, migrations) is no event of the port."""
        return ()

    def close(self) -> None:
        """Ends the session and forgets the devices."""
        self._end()
        self._seen = {}

    # For AmdControl, and beside the port

    def handle(self, uuid: str) -> Any:
        """The device's handle; raises UnknownGpu, and _Silence for one that was seen and is gone."""
        self._known(uuid)
        handle = self._handles.get(uuid)
        if handle is None:
            try:
                self.gpus()
            except DriverUnavailable:
                raise _Silence(AbsenceReason.GPU_LOST) from None
            handle = self._handles.get(uuid)
        if handle is None:
            late = self._seen[uuid].index in self._late
            raise _Silence(AbsenceReason.TIMED_OUT if late else AbsenceReason.GPU_LOST)
        return handle

    def call(self, uuid: str, ask: Callable[[Any, Any], Any]) -> Any:
        """One call of the binding about one device; raises the port's errors."""
        try:
            return ask(self._smi, self.handle(uuid))
        except self._smi.AmdSmiException as error:
            self._drop_handles(error)
            raise make_device_error(error) from None
        except _Silence as silence:
            if silence.reason is AbsenceReason.TIMED_OUT:
                raise DeviceTimeout(f"{uuid} did not answer in time; wait, or reset it") from None
            raise

    def _known(self, uuid: str) -> None:
        if uuid not in self._seen:
            self.gpus()
            if uuid not in self._seen:
                raise UnknownGpu(f"this machine has no GPU {uuid}; list its GPUs")

    def _query(self, ask: Callable[[Any, Any], Any], handle: Any) -> Any:
        """An answer or why it is missing; raises _Silence when the whole device says nothing."""
        try:
            return ask(self._smi, handle)
        except self._smi.AmdSmiException as error:
            reason = get_absence_reason(error)
            if reason in _SILENT:
                self._drop_handles(error)
                raise _Silence(reason) from None
            return Missing(reason)
        except AttributeError:
            # An older binding lacks the function.
            return Missing(AbsenceReason.NOT_SUPPORTED)

    def _fill(self, values: dict[Reading, ReadingValue], sources: tuple[AmdSource, ...], handle: Any) -> None:
        for source in sources:
            answer = self._query(source.ask, handle)
            if isinstance(answer, Missing):
                values.update(dict.fromkeys(source.readings, answer))
            else:
                values.update(source.values(answer))

    def _reasons(self, uuid: str, handle: Any) -> ReadingValue:
        answer = self._query(lambda smi, handle: smi.amdsmi_get_gpu_metrics_info(handle), handle)
        if isinstance(answer, Missing):
            return answer
        now, before = read_residencies(answer), self._residencies.get(uuid)
        if not now:
            return Missing(AbsenceReason.NOT_SUPPORTED)
        self._residencies[uuid] = now
        return Missing(AbsenceReason.NOT_SAMPLED) if before is None else compute_reasons_mask(before, now)

    def _identify(self, handle: Any, place: int) -> Gpu:
        uuid = str(self._smi.amdsmi_get_gpu_device_uuid(handle))
        asic = self._or_nothing("amdsmi_get_gpu_asic_info", handle)
        board = self._or_nothing("amdsmi_get_gpu_board_info", handle)
        memory = self._or_nothing("amdsmi_get_gpu_vram_usage", handle)
        caps = self._or_nothing("amdsmi_get_power_cap_info", handle)
        names = (asic.get("market_name"), board.get("product_name"))
        product = next((str(name) for name in names if name not in (None, "", "N/A")), "AMD GPU")
        memory_mib = find_number(memory, "vram_total")
        return Gpu(
            uuid=uuid,
            index=place,
            product=product,
            # "AMD Instinct MI300X OAM" is what workloads call MI300X.
            model=model_name(product.removeprefix("AMD ").removeprefix("Instinct ").removesuffix(" OAM")),
            pci_bus_id=str(self._smi.amdsmi_get_gpu_device_bdf(handle)),
            memory_bytes=0 if memory_mib is None else int(memory_mib) * MIB,
            power_limit_default_w=_watts(caps, "default_power_cap"),
            power_limit_min_w=_watts(caps, "min_power_cap"),
            power_limit_max_w=_watts(caps, "max_power_cap"),
            numa_node=self._numa_node(handle),
        )

    def _numa_node(self, handle: Any) -> int | None:
        """The nearest NUMA node; the library says -1 where the kernel names none."""
        try:
            node = int(self._smi.amdsmi_topo_get_numa_node_number(handle))
        except self._smi.AmdSmiException as error:
            if get_absence_reason(error) in _SILENT:
                raise
            return None
        return node if node >= 0 else None

    def _or_nothing(self, name: str, handle: Any) -> Mapping[str, Any]:
        """What a call says, or nothing where this device does not say it."""
        try:
            answer: Mapping[str, Any] = getattr(self._smi, name)(handle)
        except self._smi.AmdSmiException as error:
            if get_absence_reason(error) in _SILENT:
                raise
            return {}
        return answer

    def _link(self, one: str, other: str) -> DeviceLink:
        smi, ends = self._smi, (self._handles[one], self._handles[other])
        nodes = {smi.amdsmi_topo_get_numa_node_number(handle) for handle in ends}
        link = smi.amdsmi_topo_get_link_type(*ends)["type"]
        # The enumeration was renamed and renumbered in 7.0.
        xgmi = smi.AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI if hasattr(smi, "AmdSmiLinkType") else smi.AmdSmiIoLinkType.XGMI
        return DeviceLink(
            one=one, other=other, ancestor=_SAME_NODE if len(nodes) == 1 else _SYSTEM, nvlinks=int(link == int(xgmi))
        )

    def _drop_handles(self, error: Any) -> None:
        """After this error, the handles are found anew."""
        if is_device_lost(error):
            self._lost = True
            self._handles.clear()

    def _end(self) -> None:
        self._handles.clear()
        self._residencies.clear()
        self._lost = False
        self._session.close()


class _Silence(GpuLostError):
    """The whole device says nothing."""

    def __init__(self, reason: AbsenceReason) -> None:
        self.reason = reason
        super().__init__("the device answers nothing any more; reset it or reboot the node")


def _number_devices(found: Mapping[str, Gpu], seen: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """All devices; one that was seen keeps its index, since the library counts past a lost device."""
    merged = dict(seen)
    for uuid, gpu in found.items():
        if uuid in seen:
            merged[uuid] = replace(gpu, index=seen[uuid].index)
            continue
        taken = {other.index for other in merged.values()}
        free = (index for index in (gpu.index, *range(GPUS_PER_NODE_MOST)) if index not in taken)
        index = next(free, None)
        if index is not None:
            merged[uuid] = replace(gpu, index=index)
    return merged


def _watts(caps: Mapping[str, Any], name: str) -> float | None:
    cap_uw = find_number(caps, name)
    return None if cap_uw is None else cap_uw / 1e6


_SENSOR = 0


class AmdControl:
    """The control port over `amdsmi`; shares the reader's session and handles."""

    def __init__(self, device: AmdDevice) -> None:
        self._device = device

    def power_settings(self, uuid: str) -> PowerSettings:
        """Caps and the graphics clock as they are now."""
        caps = self._device.call(uuid, lambda smi, handle: smi.amdsmi_get_power_cap_info(handle))
        clock = self._device.call(uuid, _graphics_clock)
        watts = {
            name: _watts(caps, name) for name in ("power_cap", "default_power_cap", "min_power_cap", "max_power_cap")
        }
        clock_mhz = find_number(clock, "clk", "cur_clk")
        return PowerSettings(
            requested_w=watts["power_cap"],
            enforced_w=watts["power_cap"],
            default_w=watts["default_power_cap"],
            min_w=watts["min_power_cap"],
            max_w=watts["max_power_cap"],
            sm_clock_mhz=None if clock_mhz is None else int(clock_mhz),
        )

    def set_power_limit(self, uuid: str, limit_w: float) -> None:
        """Asks for a cap; raises OutOfRange, also where the driver would clamp it silently."""
        settings = self.power_settings(uuid)
        low_w, high_w = settings.min_w or 0.0, settings.max_w
        if limit_w < low_w or (high_w is not None and limit_w > high_w):
            raise OutOfRange(f"{limit_w:g} W is not in [{low_w:g}, {high_w or 0.0:g}] W; choose a limit inside")
        cap_uw = round(limit_w * 1e6)
        self._device.call(uuid, lambda smi, handle: smi.amdsmi_set_power_cap(handle, _SENSOR, cap_uw))

    def lock_sm_clocks(self, uuid: str, min_mhz: int, max_mhz: int) -> None:
        """Keeps the graphics clock inside."""
        clock = self._device.call(uuid, _graphics_clock)
        low_mhz, high_mhz = find_number(clock, "min_clk"), find_number(clock, "max_clk")
        if min_mhz > max_mhz or (high_mhz is not None and max_mhz > high_mhz):
            raise OutOfRange(
                f"[{min_mhz}, {max_mhz}] MHz is not in [{low_mhz or 0:g}, {high_mhz or 0:g}] MHz; choose inside"
            )
        # The upper end first: a lower end above the upper one that stands is refused.
        self._device.call(uuid, lambda smi, handle: smi.amdsmi_set_gpu_clk_limit(handle, "sclk", "max", max_mhz))
        self._device.call(uuid, lambda smi, handle: smi.amdsmi_set_gpu_clk_limit(handle, "sclk", "min", min_mhz))

    def unlock_sm_clocks(self, uuid: str) -> None:
        """Lets the driver choose the clock again."""
        self._device.call(uuid, lambda smi, handle: smi.amdsmi_set_gpu_perf_level(handle, smi.AmdSmiDevPerfLevel.AUTO))

    def set_power_profile(self, uuid: str, profile: int | None) -> None:
        """There are none of the port's kind."""
        self._refuse(uuid, f"workload power profile {profile}")

    def mig_geometry(self, uuid: str) -> MigGeometry:
        """Raises NotSupported: AMD devices have no MIG."""
        self._refuse(uuid, "MIG")

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> ModeChange:
        """There is no such mode."""
        self._refuse(uuid, f"MIG mode {enabled}")

    def create_gpu_instance(self, uuid: str, profile_id: int, start: int) -> int:
        """There are no instances."""
        self._refuse(uuid, f"MIG profile {profile_id} at {start}")

    def destroy_gpu_instance(self, uuid: str, instance_id: int) -> None:
        """There are no instances."""
        self._refuse(uuid, f"MIG instance {instance_id}")

    def create_compute_instance(self, uuid: str, instance_id: int, profile_id: int) -> int:
        """There are no instances."""
        self._refuse(uuid, f"MIG instance {instance_id}, profile {profile_id}")

    def destroy_compute_instance(self, uuid: str, instance_id: int, compute_id: int) -> None:
        """There are no instances."""
        self._refuse(uuid, f"MIG instance {instance_id}/{compute_id}")

    def _refuse(self, uuid: str, what: str) -> NoReturn:
        self._device.read_instances(uuid)  # an unknown device is told first
        raise NotSupported(f"an AMD device has no {what}; request whole devices")


def _graphics_clock(smi: Any, handle: Any) -> Any:
    return smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)
