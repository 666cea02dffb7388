"""NVML readings: sources with fallbacks, field ids by driver branch, and the processes on a device.

A source gives some readings at once through one of several methods, best first. A method whose symbol the driver
lacks is dropped for the session; one that the device does not support gives way to the next. A silent device ends
the read at once. Some field ids moved between driver branches. PCIe throughput is left out because the call blocks
20 ms per direction. Source: the headers of 17 releases of nvidia-ml-py (11.450 to 13.615).

Process lists cost milliseconds. Drivers of branch 530 and early 535 write entries of 32 bytes instead of 24 under the
same symbol; the presence of neighbouring symbols tells them apart. The SM share of a process is the mean of the samples
since the last read; there is none on the first read or under MIG.
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

import pynvml

from eelgrid_agent.devices.nvml.session import MISSING_BY_REASON, SILENT_REASONS, call_optional, get_absence_reason
from eelgrid_agent.devices.port import DeviceLink, FabricState, GpuProcess, ProcessKind, ReadingValue
from eelgrid_protos.messages import READING_RANGES, AbsenceReason, Gpu, Reading

_NO_INSTANCE = 0xFFFF_FFFF
_NOT_AVAILABLE = 2**64 - 1
# The binding's own calls grow a buffer too, but never look twice.
_TRIES = 3
_ENTRIES_MOST = 4096
_SYMBOLS = {
    ProcessKind.COMPUTE: ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    ProcessKind.GRAPHICS: ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
}


class _Wide(ctypes.Structure):
    """An entry of branch 530 and of early 535."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
        ("usedGpuCcProtectedMemory", ctypes.c_ulonglong),
    )


class ProcessReader:
    """The process lists of one driver, and where each device's samples were at the look before."""

    def __init__(self) -> None:
        self._seen_us: dict[str, int] = {}

    def reset(self) -> None:
        """The next look is the first."""
        self._seen_us.clear()

    def count_processes(self, handle: Any) -> int:
        """How many processes there are; raises NVMLError."""
        return len({entry.pid for entry in self._entries(handle)})

    def read_processes(self, handle: Any, uuid: str, *, shares: bool) -> tuple[GpuProcess, ...]:
        """The processes by pid, with their shares of SM time where asked for; raises NVMLError."""
        entries = self._entries(handle)
        ratios = self._ratios(handle, uuid) if shares and entries else {}
        return tuple(
            GpuProcess(
                pid=entry.pid,
                kind=entry.kind,
                memory_bytes=entry.memory_bytes,
                gpu_instance_id=entry.gpu_instance_id,
                compute_instance_id=entry.compute_instance_id,
                sm_ratio=ratios.get(entry.pid),
            )
            for entry in entries
        )

    def _entries(self, handle: Any) -> list[GpuProcess]:
        """Compute before graphics: a process that does both counts once."""
        found: dict[tuple[int, int | None, int | None], GpuProcess] = {}
        for kind in ProcessKind:
            for entry in _listed(handle, kind):
                found.setdefault((entry.pid, entry.gpu_instance_id, entry.compute_instance_id), entry)
        return [found[key] for key in sorted(found, key=lambda key: (key[0], key[1] or 0, key[2] or 0))]

    def _ratios(self, handle: Any, uuid: str) -> dict[int, float]:
        """Shares by pid over the samples that are newer than the look before."""
        before_us = self._seen_us.get(uuid)
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(handle, before_us or 0)
        except pynvml.NVMLError as error:
            # No samples is NOT_FOUND here, or the binding's error for a success with none.
            if error.value != pynvml.NVML_ERROR_NOT_FOUND and get_absence_reason(error) in SILENT_REASONS:
                raise
            return {}
        shares: dict[int, list[int]] = {}
        for sample in samples:
            if sample.pid and sample.timeStamp > (before_us or 0):
                shares.setdefault(int(sample.pid), []).append(int(sample.smUtil))
        if samples:
            newest_us = max(int(sample.timeStamp) for sample in samples)
            self._seen_us[uuid] = max(newest_us, before_us or 0)
        if before_us is None:
            return {}
        return {pid: min(sum(values) / len(values) / 100.0, 1.0) for pid, values in shares.items()}


def _listed(handle: Any, kind: ProcessKind) -> list[GpuProcess]:
    """One list; raises NVMLError."""
    newest, older = (_symbol(name) for name in _SYMBOLS[kind])
    call, layout = newest or older, pynvml.c_nvmlProcessInfo_v2_t
    if call is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    if newest is not None and _entries_are_wide():
        layout = _Wide
    return [_entry(raw, kind) for raw in _filled(call, handle, layout)]


def _filled(call: Callable[..., int], handle: Any, layout: Any) -> list[Any]:
    """The entries, in a buffer that is large enough for those that come meanwhile."""
    count = ctypes.c_uint(0)
    code = call(handle, ctypes.byref(count), None)
    for _ in range(_TRIES):
        if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
            break
        count.value = min(count.value * 2 + 5, _ENTRIES_MOST)
        buffer = (layout * count.value)()
        code = call(handle, ctypes.byref(count), buffer)
        if code == pynvml.NVML_SUCCESS:
            return list(buffer[: count.value])
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
    return []


def _entry(raw: Any, kind: ProcessKind) -> GpuProcess:
    return GpuProcess(
        pid=int(raw.pid),
        kind=kind,
        memory_bytes=None if raw.usedGpuMemory == _NOT_AVAILABLE else int(raw.usedGpuMemory),
        gpu_instance_id=None if raw.gpuInstanceId == _NO_INSTANCE else int(raw.gpuInstanceId),
        compute_instance_id=None if raw.computeInstanceId == _NO_INSTANCE else int(raw.computeInstanceId),
    )


def _entries_are_wide() -> bool:
    confidential = _symbol("nvmlDeviceGetConfComputeMemSizeInfo") is not None
    return confidential and _symbol("nvmlDeviceGetRunningProcessDetailList") is None


def _symbol(name: str) -> Callable[..., int] | None:
    """A function of the library, which the binding has no way to ask for where it has no such layout."""
    try:
        function: Callable[..., int] = pynvml._nvmlGetFunctionPointer(name)  # noqa: SLF001
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return None
    return function


_FOREVER = 10**6


class NvmlField(Enum):
    """A field by meaning."""

    NVLINK_CRC_FLIT_ERRORS = "crc flit errors of all links"
    NVLINK_CRC_DATA_ERRORS = "crc data errors of all links"
    NVLINK_REPLAY_ERRORS = "replay errors of all links"
    NVLINK_RECOVERY_ERRORS = "recovery errors of all links"
    MEMORY_TEMPERATURE = "memory temperature"
    NVLINK_SENT_KIB = "data sent over a link"
    NVLINK_RECEIVED_KIB = "data received over a link"
    MIG_WITHOUT_RESET = "MIG mode changes without a reset"
    POWER_AVERAGE = "averaged power"
    POWER_INSTANT = "instant power"
    POWER_LIMIT = "enforced limit"
    POWER_LIMIT_REQUESTED = "requested limit"
    MIG_QUERY_INDEPENDENT = "queries do not depend on MIG mode"
    NVLINK_MALFORMED = "malformed packets of a link"
    NVLINK_OVERRUNS = "buffer overruns of a link"
    NVLINK_RECEIVE_ERRORS = "receive errors of a link"
    NVLINK_INTEGRITY_ERRORS = "integrity errors of a link"
    RECOVERY_ACTION = "recovery action"
    SW_THERMAL_SLOWDOWN = "time in software thermal slowdown"


# (first branch, first branch that it is no longer for, id), in no order.
_IDS: Mapping[NvmlField, tuple[tuple[int, int, int], ...]] = MappingProxyType({
    NvmlField.NVLINK_CRC_FLIT_ERRORS: ((0, _FOREVER, 38),),
    NvmlField.NVLINK_CRC_DATA_ERRORS: ((0, _FOREVER, 45),),
    NvmlField.NVLINK_REPLAY_ERRORS: ((0, _FOREVER, 52),),
    NvmlField.NVLINK_RECOVERY_ERRORS: ((0, _FOREVER, 59),),
    NvmlField.MEMORY_TEMPERATURE: ((0, _FOREVER, 82),),
    NvmlField.NVLINK_SENT_KIB: ((450, _FOREVER, 138),),
    NvmlField.NVLINK_RECEIVED_KIB: ((450, _FOREVER, 139),),
    NvmlField.MIG_WITHOUT_RESET: ((525, _FOREVER, 184),),
    NvmlField.POWER_AVERAGE: ((525, _FOREVER, 185),),
    NvmlField.POWER_INSTANT: ((525, _FOREVER, 186),),
    NvmlField.POWER_LIMIT: ((535, _FOREVER, 190),),
    NvmlField.POWER_LIMIT_REQUESTED: ((535, _FOREVER, 192),),
    NvmlField.MIG_QUERY_INDEPENDENT: ((550, 555, 199), (555, 565, 200), (565, _FOREVER, 199)),
    NvmlField.NVLINK_MALFORMED: ((550, _FOREVER, 206),),
    NvmlField.NVLINK_OVERRUNS: ((550, _FOREVER, 207),),
    NvmlField.NVLINK_RECEIVE_ERRORS: ((550, _FOREVER, 208),),
    NvmlField.NVLINK_INTEGRITY_ERRORS: ((550, _FOREVER, 211),),
    NvmlField.RECOVERY_ACTION: ((570, _FOREVER, 230),),
    # In 570 this number is another field, and in 590 it is that one again.
    NvmlField.SW_THERMAL_SLOWDOWN: ((575, 590, 251), (590, _FOREVER, 269)),
})  # fmt: skip


def get_field_id(field: NvmlField, branch: int) -> int | None:
    """The id of a field in a driver branch, or None where it has none."""
    return next((number for since, until, number in _IDS[field] if since <= branch < until), None)


def read_field_value(handle: Any, number: int, scope: int = 0) -> int:
    """One field; raises NVMLError."""
    return _number(pynvml.nvmlDeviceGetFieldValues(handle, [(number, scope)])[0])


def read_field_values(handle: Any, asked: Sequence[tuple[int, int]]) -> list[int | None]:
    """Fields as (id, scope) in one call; None is one that does not answer."""
    values = pynvml.nvmlDeviceGetFieldValues(handle, list(asked))
    return [None if value.nvmlReturn else _number(value) for value in values]


def _number(value: Any) -> int:
    if value.nvmlReturn:
        raise pynvml.NVMLError(value.nvmlReturn)
    if value.valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT:
        return int(value.value.uiVal)
    if value.valueType == pynvml.NVML_VALUE_TYPE_SIGNED_INT:
        return int(value.value.siVal)
    if value.valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT:
        return int(value.value.usVal)
    if value.valueType == pynvml.NVML_VALUE_TYPE_DOUBLE:
        return int(value.value.dVal)
    return int(value.value.ullVal)


# What a way says for each reading of its source; None is what the device does not have.
ReadMethod = Callable[[Any], Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class NvmlSource:
    """Readings that come together, and the ways to have them."""

    readings: tuple[Reading, ...]
    ways: tuple[ReadMethod, ...]


class SourceReader:
    """The sources of one session."""

    def __init__(self, sources: Iterable[NvmlSource]) -> None:
        self._sources = list(sources)

    def read(self, handle: Any) -> dict[Reading, ReadingValue]:
        """All readings of a device; raises NVMLError when it is silent."""
        values: dict[Reading, ReadingValue] = {}
        for place, source in enumerate(self._sources):
            reason = AbsenceReason.NOT_SUPPORTED
            for way in source.ways:
                try:
                    said = way(handle)
                except pynvml.NVMLError as error:
                    reason = get_absence_reason(error)
                    if reason in SILENT_REASONS:
                        raise
                    if error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                        kept = tuple(other for other in self._sources[place].ways if other is not way)
                        self._sources[place] = NvmlSource(source.readings, kept)
                    if reason is not AbsenceReason.NOT_SUPPORTED:
                        break
                else:
                    values.update(zip(source.readings, map(filter_implausible, source.readings, said), strict=True))
                    break
            for reading in source.readings:
                values.setdefault(reading, MISSING_BY_REASON[reason])
        return values


def filter_implausible(reading: Reading, value: float | None) -> ReadingValue:
    """A reading, unless it is a sentinel or a spike, which sensors are known to return."""
    if value is None:
        return MISSING_BY_REASON[AbsenceReason.NOT_SUPPORTED]
    bounds = READING_RANGES[reading]
    return value if bounds.low <= value <= bounds.high else MISSING_BY_REASON[AbsenceReason.IMPLAUSIBLE]


_LINKS_MOST = int(pynvml.NVML_NVLINK_MAX_LINKS)
_KIB = 1024.0
# NVML counts power and energy in thousandths.
_MILLI = 1000.0
_OLD_ERRORS = (
    NvmlField.NVLINK_CRC_FLIT_ERRORS,
    NvmlField.NVLINK_CRC_DATA_ERRORS,
    NvmlField.NVLINK_REPLAY_ERRORS,
    NvmlField.NVLINK_RECOVERY_ERRORS,
)
_NEW_ERRORS = (
    NvmlField.NVLINK_MALFORMED,
    NvmlField.NVLINK_OVERRUNS,
    NvmlField.NVLINK_RECEIVE_ERRORS,
    NvmlField.NVLINK_INTEGRITY_ERRORS,
)


def build_link_sources(branch: int) -> tuple[NvmlSource, ...]:
    """How the NVLink readings are had from this driver branch."""
    sent, received = (
        get_field_id(NvmlField.NVLINK_SENT_KIB, branch),
        get_field_id(NvmlField.NVLINK_RECEIVED_KIB, branch),
    )
    moved = () if sent is None or received is None else (_traffic(sent, received),)
    new = [number for number in (get_field_id(name, branch) for name in _NEW_ERRORS) if number is not None]
    old = [number for number in (get_field_id(name, branch) for name in _OLD_ERRORS) if number is not None]
    return (
        NvmlSource((Reading.NVLINK_SENT_BYTES, Reading.NVLINK_RECEIVED_BYTES), moved),
        NvmlSource((Reading.NVLINK_ACTIVE_LINKS,), (_active_links,)),
        NvmlSource((Reading.NVLINK_ERRORS,), (_error_totals(old), *((_error_counts(new),) if new else ()))),
    )


def _traffic(sent: int, received: int) -> ReadMethod:
    def walk(handle: Any) -> tuple[float, float]:
        asked = [(number, link) for link in range(_LINKS_MOST) for number in (sent, received)]
        values = read_field_values(handle, asked)
        totals, links = [0, 0], 0
        for pair in zip(values[::2], values[1::2], strict=True):
            if pair[0] is None or pair[1] is None:
                break
            totals, links = [totals[0] + pair[0], totals[1] + pair[1]], links + 1
        if not links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return totals[0] * _KIB, totals[1] * _KIB

    return walk


def _active_links(handle: Any) -> tuple[float]:
    active = 0
    for link in range(_LINKS_MOST):
        state = call_optional(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            if link == 0:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            break
        active += bool(state)
    return (float(active),)


def _error_totals(numbers: Sequence[int]) -> ReadMethod:
    def total(handle: Any) -> tuple[float]:
        return (_sum(read_field_values(handle, [(number, 0) for number in numbers])),)

    return total


def _error_counts(numbers: Sequence[int]) -> ReadMethod:
    def count(handle: Any) -> tuple[float]:
        asked = [(number, link) for link in range(_LINKS_MOST) for number in numbers]
        return (_sum(read_field_values(handle, asked)),)

    return count


def _sum(values: Sequence[int | None]) -> float:
    known = [value for value in values if value is not None]
    if not known:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return float(sum(known))


@dataclass(slots=True)
class _Ends:
    """How many active links of a device end at a switch, and at each other device by PCI address."""

    switches: int = 0
    devices: dict[str, int] = field(default_factory=dict)


def read_topology(gpus: Sequence[Gpu], handles: Mapping[str, Any]) -> tuple[DeviceLink, ...]:
    """Every pair of the devices that answer, once, in the order given."""
    ends: dict[str, _Ends] = {}
    for gpu in gpus:
        try:
            if gpu.uuid in handles:
                ends[gpu.uuid] = _ends(handles[gpu.uuid])
        except pynvml.NVMLError:
            # A silent device has no neighbours.
            continue
    answering = [gpu for gpu in gpus if gpu.uuid in ends]
    links = []
    for place, one in enumerate(answering):
        for other in answering[place + 1 :]:
            try:
                level = pynvml.nvmlDeviceGetTopologyCommonAncestor(handles[one.uuid], handles[other.uuid])
            except pynvml.NVMLError:
                # The driver does not tell, or one of the two fell silent.
                continue
            mine, yours = ends[one.uuid], ends[other.uuid]
            between = mine.devices.get(_address(other.pci_bus_id), 0) or min(mine.switches, yours.switches)
            links.append(DeviceLink(one=one.uuid, other=other.uuid, ancestor=int(level), nvlinks=between))
    return tuple(links)


def _ends(handle: Any) -> _Ends:
    """Where the active links end; raises NVMLError when the device is silent."""
    found = _Ends()
    for link in range(_LINKS_MOST):
        state = call_optional(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break
        if not state:
            continue
        if (
            call_optional(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
            == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        ):
            found.switches += 1
            continue
        try:
            address = _address(str(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
        except pynvml.NVMLError as error:
            if get_absence_reason(error) in SILENT_REASONS:
                raise
            continue
        found.devices[address] = found.devices.get(address, 0) + 1
    return found


def _address(bus_id: str) -> str:
    """A PCI address without its domain's leading zeros, which not every call writes."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain.lstrip('0') or '0'}:{rest}"


def build_fast_sources(branch: int) -> tuple[NvmlSource, ...]:
    """How FAST_READINGS are had from this driver branch; ENERGY_J is the device's own counter."""
    return (
        NvmlSource((Reading.ENERGY_J,), (_number_of("nvmlDeviceGetTotalEnergyConsumption", per=_MILLI),)),
        NvmlSource(
            (Reading.POWER_W,),
            (
                *build_field(NvmlField.POWER_INSTANT, branch, per=_MILLI),
                _number_of("nvmlDeviceGetPowerUsage", per=_MILLI),
            ),
        ),
        NvmlSource((Reading.POWER_AVERAGE_W,), build_field(NvmlField.POWER_AVERAGE, branch, per=_MILLI)),
        NvmlSource((Reading.UTILIZATION_RATIO, Reading.MEMORY_UTILIZATION_RATIO), (_utilization,)),
        NvmlSource((Reading.MEMORY_USED_BYTES,), (_memory_v2, _memory)),
        NvmlSource((Reading.SM_CLOCK_MHZ,), (_number_of("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),)),
        NvmlSource((Reading.MEMORY_CLOCK_MHZ,), (_number_of("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),)),
        NvmlSource(
            (Reading.TEMPERATURE_C,),
            (
                _number_of("nvmlDeviceGetTemperatureV", pynvml.NVML_TEMPERATURE_GPU),
                _number_of("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
            ),
        ),
        NvmlSource((Reading.POWER_LIMIT_W,), (_number_of("nvmlDeviceGetEnforcedPowerLimit", per=_MILLI),)),
        NvmlSource(
            (Reading.EVENT_REASONS_MASK,),
            (
                _number_of("nvmlDeviceGetCurrentClocksEventReasons"),
                _number_of("nvmlDeviceGetCurrentClocksThrottleReasons"),
            ),
        ),
    )


def build_field(field: NvmlField, branch: int, scope: int = 0, *, per: float = 1.0) -> tuple[ReadMethod, ...]:
    """The way to a field, of which `per` are one of the reading's unit; none where the branch lacks it."""
    number = get_field_id(field, branch)
    if number is None:
        return ()

    def ask(handle: Any) -> tuple[float]:
        return (read_field_value(handle, number, scope) / per,)

    return (ask,)


def _number_of(name: str, *arguments: int, per: float = 1.0) -> ReadMethod:
    """One call of the binding that answers one number; `per` of it are one of the reading's unit."""

    def ask(handle: Any) -> tuple[float]:
        return (getattr(pynvml, name)(handle, *arguments) / per,)

    return ask


def _utilization(handle: Any) -> tuple[float, float]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return float(rates.gpu) / 100.0, float(rates.memory) / 100.0


def _memory_v2(handle: Any) -> tuple[float]:
    # The second version leaves out what the driver reserves.
    return (float(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used),)


def _memory(handle: Any) -> tuple[float]:
    return (float(pynvml.nvmlDeviceGetMemoryInfo(handle).used),)


_ROWS = (
    Reading.REMAPPED_ROWS_CORRECTABLE,
    Reading.REMAPPED_ROWS_UNCORRECTABLE,
    Reading.ROW_REMAP_PENDING,
    Reading.ROW_REMAP_FAILED,
)


def build_slow_sources(branch: int) -> tuple[NvmlSource, ...]:
    """How SLOW_READINGS are had from this driver branch, but for activity and processes."""
    corrected, uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    volatile, aggregate = pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC
    errors = "nvmlDeviceGetTotalEccErrors"
    module, memory = pynvml.NVML_POWER_SCOPE_MODULE, pynvml.NVML_POWER_SCOPE_MEMORY
    return (
        NvmlSource(
            (Reading.POWER_LIMIT_REQUESTED_W,),
            (
                *build_field(NvmlField.POWER_LIMIT_REQUESTED, branch, per=_MILLI),
                _number_of("nvmlDeviceGetPowerManagementLimit", per=_MILLI),
            ),
        ),
        NvmlSource((Reading.MEMORY_POWER_W,), build_field(NvmlField.POWER_INSTANT, branch, memory, per=_MILLI)),
        NvmlSource((Reading.MODULE_POWER_W,), build_field(NvmlField.POWER_INSTANT, branch, module, per=_MILLI)),
        NvmlSource((Reading.MEMORY_TEMPERATURE_C,), build_field(NvmlField.MEMORY_TEMPERATURE, branch)),
        NvmlSource((Reading.MEMORY_RESERVED_BYTES,), (_read_reserved_memory,)),
        NvmlSource((Reading.ECC_CORRECTED_VOLATILE,), (_number_of(errors, corrected, volatile),)),
        NvmlSource((Reading.ECC_UNCORRECTED_VOLATILE,), (_number_of(errors, uncorrected, volatile),)),
        NvmlSource((Reading.ECC_CORRECTED_AGGREGATE,), (_number_of(errors, corrected, aggregate),)),
        NvmlSource((Reading.ECC_UNCORRECTED_AGGREGATE,), (_number_of(errors, uncorrected, aggregate),)),
        NvmlSource(_ROWS, (_rows,)),
        NvmlSource((Reading.RECOVERY_ACTION,), build_field(NvmlField.RECOVERY_ACTION, branch)),
        NvmlSource((Reading.PCIE_LINK_GENERATION,), (_number_of("nvmlDeviceGetCurrPcieLinkGeneration"),)),
        NvmlSource((Reading.PCIE_LINK_WIDTH,), (_number_of("nvmlDeviceGetCurrPcieLinkWidth"),)),
        NvmlSource((Reading.PCIE_REPLAYS,), (_number_of("nvmlDeviceGetPcieReplayCounter"),)),
        NvmlSource((Reading.FABRIC_STATE,), (_fabric,)),
        NvmlSource((Reading.PERFORMANCE_STATE,), (_performance_state,)),
        *build_link_sources(branch),
    )


def _read_reserved_memory(handle: Any) -> tuple[float]:
    return (float(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).reserved),)


def _rows(handle: Any) -> tuple[float, ...]:
    return tuple(float(number) for number in pynvml.nvmlDeviceGetRemappedRows(handle))


def _fabric(handle: Any) -> tuple[float | None]:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    if info.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return (None,)
    # The status is that of a registration which is over.
    has_failed = info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status != pynvml.NVML_SUCCESS
    return (float(FabricState.FAILED if has_failed else info.state),)


def _performance_state(handle: Any) -> tuple[float | None]:
    state = pynvml.nvmlDeviceGetPerformanceState(handle)
    return (None if state == pynvml.NVML_PSTATE_UNKNOWN else float(state),)
