"""The device port over NVML: order of calls, identities, access rights, driver events, GPM and silent devices.

One thread uses it. A lost device or a timeout ends a read at once; devices stay listed once they were seen. Devices are
identified by UUID, never by index. Access rights follow from CAP_SYS_ADMIN and the files of
/proc/driver/nvidia/capabilities, and are confirmed by the driver. One event set serves all devices of a session;
events that are pending when the session ends are kept for the next call.

GPU performance monitoring (GPM) gives activity ratios from hardware counters of Hopper and newer parts. A reading
covers the time between two samples; two samples less than 100 ms apart give nothing. A GPU instance is sampled through
its parent. Samples are driver memory and are freed before the session ends.
"""

import ctypes
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import pynvml

from eelgrid_agent.devices.nvml.mig import InstanceReader, list_mig_devices
from eelgrid_agent.devices.nvml.readings import (
    ProcessReader,
    SourceReader,
    build_fast_sources,
    build_slow_sources,
    filter_implausible,
    read_topology,
)
from eelgrid_agent.devices.nvml.session import (
    MISSING_BY_REASON,
    SESSION_LOST_CODES,
    SILENT_REASONS,
    NvmlHandleSession,
    call_optional,
    get_absence_reason,
    make_device_error,
    make_missing,
)
from eelgrid_agent.devices.port import (
    FAST_VALUE_READINGS,
    INSTANCE_READINGS,
    SLOW_READINGS,
    DeviceEvent,
    DeviceEventKind,
    DeviceLink,
    DriverUnavailable,
    GpuProcess,
    InstanceReadings,
    RawReadings,
    ReadingValue,
    UnknownGpu,
    include_silent_gpus,
)
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.catalogue.products import model_name
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, AbsenceReason, AccessLevel, Gpu, GpuInstance, Reading
from eelgrid_protos.quantities import watts_from_milliwatts
from eelgrid_protos.values import dataclass

_APART_LEAST_NS = 100_000_000
_PERCENT, _MIB = 1.0 / 100.0, float(2**20)
# Counters and clock are read one after the other: a full share may come out a little over.
_OVER_MOST = 1.05
GPM_METRICS: Mapping[Reading, tuple[int, float]] = {
    Reading.GRAPHICS_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL, _PERCENT),
    Reading.SM_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_SM_UTIL, _PERCENT),
    Reading.SM_OCCUPANCY_RATIO: (pynvml.NVML_GPM_METRIC_SM_OCCUPANCY, _PERCENT),
    Reading.TENSOR_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, _PERCENT),
    Reading.MEMORY_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, _PERCENT),
    Reading.FP16_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_FP16_UTIL, _PERCENT),
    Reading.FP32_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_FP32_UTIL, _PERCENT),
    Reading.FP64_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_FP64_UTIL, _PERCENT),
    Reading.PCIE_SENT_BYTES_PER_S: (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, _MIB),
    Reading.PCIE_RECEIVED_BYTES_PER_S: (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, _MIB),
}


@dataclass(frozen=True, slots=True)
class _Sample:
    taken_ns: int
    sample: Any


class GpmSampler:
    """The samples of one session; the second key is the GPU instance, or None for the device."""

    def __init__(self, monotonic_ns: Callable[[], int]) -> None:
        self._monotonic_ns = monotonic_ns
        self._supported: dict[str, bool] = {}
        self._samples: dict[tuple[str, int | None], _Sample] = {}
        self._request = pynvml.c_nvmlGpmMetricsGet_t()

    def read(self, handle: Any, uuid: str, instance_id: int | None) -> dict[Reading, ReadingValue]:
        """Activity since the call before; raises NVMLError when the device is silent."""
        try:
            if not self._is_supported(handle, uuid):
                return _nothing(AbsenceReason.NOT_SUPPORTED)
            key, now_ns = (uuid, instance_id), self._monotonic_ns()
            before = self._samples.get(key)
            if before is not None and now_ns - before.taken_ns < _APART_LEAST_NS:
                return _nothing(AbsenceReason.NOT_SAMPLED)
            self._samples[key] = _Sample(now_ns, _take(handle, instance_id))
        except pynvml.NVMLError as error:
            reason = get_absence_reason(error)
            if reason in SILENT_REASONS:
                raise
            return _nothing(reason)
        if before is None:
            return _nothing(AbsenceReason.NOT_SAMPLED)
        try:
            return self._between(before.sample, self._samples[key].sample)
        finally:
            _give_back(before.sample)

    def retain_instances(self, uuid: str, instance_ids: frozenset[int]) -> None:
        """Gives back the samples of a device's instances other than these."""
        gone = [key for key in self._samples if key[0] == uuid and key[1] is not None and key[1] not in instance_ids]
        for key in gone:
            _give_back(self._samples.pop(key).sample)

    def release_samples(self) -> None:
        """Gives everything back; the next samples are the first ones."""
        for kept in self._samples.values():
            _give_back(kept.sample)
        self._samples.clear()
        self._supported.clear()

    def _is_supported(self, handle: Any, uuid: str) -> bool:
        if uuid not in self._supported:
            self._supported[uuid] = bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
        return self._supported[uuid]

    def _between(self, first: Any, second: Any) -> dict[Reading, ReadingValue]:
        request = self._request
        request.version, request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_METRICS)
        request.sample1, request.sample2 = first, second
        for place, (metric, _) in enumerate(GPM_METRICS.values()):
            request.metrics[place].metricId = metric
        try:
            pynvml.nvmlGpmMetricsGet(request)
        except pynvml.NVMLError:
            # The device was reset between the two samples.
            return _nothing(AbsenceReason.NOT_SAMPLED)
        values: dict[Reading, ReadingValue] = {}
        for place, (reading, (_, unit)) in enumerate(GPM_METRICS.items()):
            metric = request.metrics[place]
            number = float(metric.value) * unit
            if metric.nvmlReturn or not math.isfinite(number):
                values[reading] = MISSING_BY_REASON[AbsenceReason.NOT_SUPPORTED]
            elif unit == _PERCENT and 1.0 < number <= _OVER_MOST:
                values[reading] = 1.0
            else:
                values[reading] = filter_implausible(reading, number)
        return values


def _take(handle: Any, instance_id: int | None) -> Any:
    sample = pynvml.nvmlGpmSampleAlloc()
    try:
        if instance_id is None:
            pynvml.nvmlGpmSampleGet(handle, sample)
        else:
            pynvml.nvmlGpmMigSampleGet(handle, instance_id, sample)
    except pynvml.NVMLError:
        _give_back(sample)
        raise
    return sample


def _give_back(sample: Any) -> None:
    try:
        pynvml.nvmlGpmSampleFree(sample)
    except pynvml.NVMLError:
        # The driver went, and its memory with it.
        return


def _nothing(reason: AbsenceReason) -> dict[Reading, ReadingValue]:
    return dict.fromkeys(GPM_METRICS, MISSING_BY_REASON[reason])


_SYS_ADMIN = 1 << 21
_STATUS = Path("/proc/self/status")
_CAPABILITIES = Path("/proc/driver/nvidia/capabilities/mig")


def read_process_rights(status: Path = _STATUS, capabilities: Path = _CAPABILITIES) -> AccessLevel:
    """What the kernel would let this process do."""
    if _effective(status) & _SYS_ADMIN:
        return AccessLevel.ROOT
    if os.access(capabilities / "config", os.R_OK):
        return AccessLevel.MIG_CONFIG
    if os.access(capabilities / "monitor", os.R_OK):
        return AccessLevel.MIG_MONITOR
    return AccessLevel.READ_ONLY


def confirm_access(rights: AccessLevel, sliced: Iterable[Any]) -> AccessLevel:
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


_KINDS = {
    pynvml.nvmlEventTypeXidCriticalError: DeviceEventKind.XID,
    pynvml.nvmlEventTypeSingleBitEccError: DeviceEventKind.ECC_SINGLE_BIT,
    pynvml.nvmlEventTypeDoubleBitEccError: DeviceEventKind.ECC_DOUBLE_BIT,
    pynvml.nvmlEventMigConfigChange: DeviceEventKind.MIG_CHANGED,
    pynvml.nvmlEventTypeGpuUnavailableError: DeviceEventKind.GPU_UNAVAILABLE,
    pynvml.nvmlEventTypeGpuRecoveryAction: DeviceEventKind.RECOVERY_ACTION,
}
_WANTED = sum(_KINDS)
_CODED = frozenset({DeviceEventKind.XID, DeviceEventKind.RECOVERY_ACTION})
_NO_INSTANCE = 0xFFFF_FFFF
# A device in trouble may announce without end.
_TAKEN_MOST = 1024


class EventListener:
    """The event set of a session."""

    def __init__(self) -> None:
        self.listening = False
        self._set: Any = None
        self._uuids: dict[int, str] = {}
        self._kept: list[DeviceEvent] = []

    def register_devices(self, handles: Mapping[str, Any]) -> None:
        """Registers the devices that are not registered yet."""
        self.listening = True
        known = set(self._uuids.values())
        for uuid, handle in handles.items():
            if uuid in known:
                continue
            try:
                if self._set is None:
                    self._set = pynvml.nvmlEventSetCreate()
                supported = pynvml.nvmlDeviceGetSupportedEventTypes(handle) & _WANTED
                if supported:
                    pynvml.nvmlDeviceRegisterEvents(handle, supported, self._set)
            except pynvml.NVMLError:
                # It announces nothing, or does not answer now; it is tried again with its next handle.
                continue
            self._uuids[_address(handle)] = uuid

    def drain_events(self) -> tuple[DeviceEvent, ...]:
        """What was announced since the call before."""
        self._drain()
        taken, self._kept = tuple(self._kept), []
        return taken

    def close_session(self) -> None:
        """Ends with the session: pending events are kept and the event set is freed."""
        if self._set is None:
            return
        self._drain()
        self._uuids.clear()
        given, self._set = self._set, None
        try:
            pynvml.nvmlEventSetFree(given)
        except pynvml.NVMLError:
            # The driver went, and the set with it.
            return

    def reset(self) -> None:
        """Discards pending events and listens no more."""
        self.listening = False
        self._kept = []

    def _drain(self) -> None:
        while self._set is not None and len(self._kept) < _TAKEN_MOST:
            try:
                data = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError:
                # A time-out is the end of the queue; any other error will show where devices are read.
                return
            kind, uuid = _KINDS.get(data.eventType), self._uuids.get(_address(data.device))
            if kind is None or uuid is None:
                continue
            instance = None if data.gpuInstanceId == _NO_INSTANCE else int(data.gpuInstanceId)
            code = int(data.eventData) if kind in _CODED else 0
            self._kept.append(DeviceEvent(kind=kind, gpu_uuid=uuid, code=code, gpu_instance_id=instance))


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


# Linux on x86 is built for up to 1,024 NUMA nodes; machines with GPUs have at most some dozens.
_NUMA_WORDS = 4


def identify_gpu(handle: Any, index: int, *, models: Mapping[str, str], instances: InstanceReader) -> Gpu:
    """One device; `models` renames products. Raises NVMLError when it does not answer."""
    uuid, name = str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle))
    memory = call_optional(pynvml.nvmlDeviceGetMemoryInfo, handle)
    memory_bytes = 0 if memory is None else int(memory.total)
    product = load_catalogue().find_product(name, memory_bytes or None)
    pci = call_optional(pynvml.nvmlDeviceGetPciInfo, handle)
    default_mw = call_optional(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
    low_mw, high_mw = call_optional(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, handle) or (None, None)
    mode = call_optional(pynvml.nvmlDeviceGetMigMode, handle)
    enabled, pending = (0, 0) if mode is None else mode
    return Gpu(
        uuid=uuid,
        index=index,
        product=name,
        model=models.get(name) or (product.model if product else model_name(name)),
        pci_bus_id="" if pci is None else str(pci.busId),
        catalogue_key=product.key if product else "",
        memory_bytes=memory_bytes,
        power_limit_default_w=None if default_mw is None else watts_from_milliwatts(default_mw),
        power_limit_min_w=None if low_mw is None else watts_from_milliwatts(low_mw),
        power_limit_max_w=None if high_mw is None else watts_from_milliwatts(high_mw),
        mig_capable=mode is not None,
        mig_enabled=enabled == pynvml.NVML_DEVICE_MIG_ENABLE,
        mig_pending=enabled != pending,
        gpu_instances=instances.read_instances(handle, uuid, product) if enabled else (),
        numa_node=_numa_node(handle),
    )


def _numa_node(handle: Any) -> int | None:
    """The one NUMA node that is near; nvmlDeviceGetNumaNodeId is another thing, the node that a GPU's own memory is."""
    words = call_optional(pynvml.nvmlDeviceGetMemoryAffinity, handle, _NUMA_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE)
    if words is None:
        return None
    near = [node for node in range(64 * _NUMA_WORDS) if words[node // 64] >> node % 64 & 1]
    return near[0] if len(near) == 1 else None


_Answer = TypeVar("_Answer")
# Answers of a handle whose session has not seen the device come back.
_STALE = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNINITIALIZED})


class NvmlDevice:
    """The devices of this machine.

    `models` renames products, by the name that NVML prints, to what workloads
    ask for; by default that is the catalogue's name, or the product's own.
    `visit` is called with a device's index before a listing asks it, and passes
    it over by saying False: a device that hangs must not hang the others.
    `rights` is what the kernel would let this process do.
    """

    def __init__(
        self,
        models: Mapping[str, str] | None = None,
        *,
        visit: Callable[[int], bool] = lambda _index: True,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        rights: Callable[[], AccessLevel] = read_process_rights,
    ) -> None:
        self._visit = visit
        self._models = dict(models or {})
        self._rights = rights
        self._session = NvmlHandleSession()
        self._seen: dict[str, Gpu] = {}
        self._lost = False
        self._quick = self._slow = SourceReader(())
        self._ways_of = 0
        self._instances = InstanceReader()
        self._activity = GpmSampler(monotonic_ns)
        self._processes = ProcessReader()
        self._events = EventListener()
        self._session.ending += [self._events.close_session, self._activity.release_samples, self._instances.reset]

    def driver_version(self) -> str:
        """The driver's version; raises DriverUnavailable."""
        self._open_session()
        return self._session.version

    def access(self) -> AccessLevel:
        """What the kernel allows this process to do and the driver does not deny; raises DriverUnavailable."""
        self._require_listing()
        sliced = [uuid for uuid, gpu in self._seen.items() if gpu.mig_enabled]
        handles = self._session.handles
        return confirm_access(self._rights(), [handles[uuid] for uuid in sliced if uuid in handles])

    def gpus(self) -> tuple[Gpu, ...]:
        """Every device that answers or answered before, by index; raises DriverUnavailable."""
        if self._lost:
            self._end()
        self._open_session()
        found: dict[str, Gpu] = {}
        handles = self._session.handles
        handles.clear()
        for index in range(self._count()):
            if not self._visit(index):
                continue
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                gpu = identify_gpu(handle, index, models=self._models, instances=self._instances)
            except pynvml.NVMLError as error:
                # What was seen of it before still stands.
                self._lost = self._lost or get_absence_reason(error) is AbsenceReason.GPU_LOST
                continue
            found[gpu.uuid] = gpu
            handles[gpu.uuid] = handle
        self._seen = found = include_silent_gpus(found, self._seen)
        if self._events.listening:
            self._events.register_devices(handles)
        return tuple(sorted(found.values(), key=lambda gpu: gpu.index))

    def read(self, uuid: str) -> RawReadings:
        """One look at one device; raises UnknownGpu, and DriverUnavailable before it was ever seen."""

        def look(handle: Any) -> dict[Reading, ReadingValue]:
            # Which ways there are is known only once the session is open.
            return self._quick.read(handle)

        values = self._read_device(uuid, FAST_VALUE_READINGS, look)
        return RawReadings(energy_counter_j=values.pop(Reading.ENERGY_J, values[Reading.POWER_W]), values=values)

    def read_slow(self, uuid: str) -> Mapping[Reading, ReadingValue]:
        """Reads what is expensive or changes seldom."""

        def look(handle: Any) -> dict[Reading, ReadingValue]:
            values = {**self._slow.read(handle), **self._activity.read(handle, uuid, None)}
            values[Reading.PROCESSES] = self._process_count(handle)
            return values

        return MappingProxyType(self._read_device(uuid, SLOW_READINGS, look))

    def read_instances(self, uuid: str) -> tuple[InstanceReadings, ...]:
        """A look at each GPU instance, by id."""

        def look(handle: Any) -> tuple[InstanceReadings, ...]:
            if not _is_mig_enabled(handle):
                self._activity.retain_instances(uuid, frozenset())
                return ()
            product = load_catalogue().find_product(self._seen[uuid].product, self._seen[uuid].memory_bytes or None)
            held = self._instances.read_instances(handle, uuid, product)
            self._activity.retain_instances(uuid, frozenset(instance.id for instance in held))
            devices = {instance_id: device for (instance_id, _), device in list_mig_devices(handle).items()}
            return tuple(self._instance(handle, uuid, instance, devices.get(instance.id)) for instance in held)

        return self._on(uuid, look)

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Who has a context on the device."""
        return self._on(
            uuid, lambda handle: self._processes.read_processes(handle, uuid, shares=not _is_mig_enabled(handle))
        )

    def topology(self) -> tuple[DeviceLink, ...]:
        """Every pair of devices that answer, once."""
        return read_topology(self.gpus(), self._session.handles)

    def take_events(self) -> tuple[DeviceEvent, ...]:
        """Returns the events since the call before; the first call starts listening."""
        self._require_listing()
        self._events.register_devices(self._session.handles)
        return self._events.drain_events()

    def close(self) -> None:
        """Ends the session and forgets the devices."""
        self._end()
        self._events.reset()
        self._processes.reset()
        self._seen = {}

    # For whoever shares the session

    def handle(self, uuid: str) -> Any:
        """NVML's handle of a device; raises DriverUnavailable and NVMLError."""
        self._open_session()
        return self._session.handle(uuid)

    def release_session(self) -> None:
        """Ends the session, since it makes this program a client of its devices; the next call opens another."""
        self._end()

    def _open_session(self) -> None:
        self._session.open()
        if self._ways_of != self._session.number:
            self._ways_of = self._session.number
            self._quick = SourceReader(build_fast_sources(self._session.branch))
            self._slow = SourceReader(build_slow_sources(self._session.branch))

    def _end(self) -> None:
        self._session.close()
        self._lost = False

    def _count(self) -> int:
        """How many devices the driver has; raises DeviceError where it went since the session was opened."""
        try:
            return min(int(pynvml.nvmlDeviceGetCount()), GPUS_PER_NODE_MOST)
        except pynvml.NVMLError as error:
            self._end()
            raise make_device_error("NVML", error) from None

    def _require_listing(self) -> None:
        """Sees that the driver is there and that devices were listed once; raises DriverUnavailable."""
        self._open_session()
        if not self._seen:
            self.gpus()
        self._count()

    def _known(self, uuid: str) -> None:
        if uuid not in self._seen:
            self.gpus()
            if uuid not in self._seen:
                raise UnknownGpu(f"this machine has no GPU {uuid}; list its GPUs")

    def _read_device(
        self, uuid: str, readings: tuple[Reading, ...], look: Callable[[Any], dict[Reading, ReadingValue]]
    ) -> dict[Reading, ReadingValue]:
        """A look at one device; all of `readings` are Missing where it does not answer."""
        self._known(uuid)
        try:
            return look(self.handle(uuid))
        except DriverUnavailable:
            reason = AbsenceReason.GPU_LOST
        except pynvml.NVMLError as error:
            reason = self._silence(uuid, error)
        return dict.fromkeys(readings, MISSING_BY_REASON[reason])

    def _on(self, uuid: str, act: Callable[[Any], _Answer]) -> _Answer:
        """What a device answers, or the port's error; a device that came back is found again, once."""
        self._known(uuid)
        try:
            try:
                return act(self.handle(uuid))
            except pynvml.NVMLError as error:
                if error.value not in _STALE:
                    raise
                self._silence(uuid, error)
            return act(self.handle(uuid))
        except pynvml.NVMLError as error:
            self._silence(uuid, error)
            raise make_device_error(uuid, error) from None

    def _silence(self, uuid: str, error: Any) -> AbsenceReason:
        """Takes note of a device that does not answer; why, as an absence."""
        reason = get_absence_reason(error)
        if reason is not AbsenceReason.GPU_LOST:
            return reason if reason in SILENT_REASONS else AbsenceReason.GPU_LOST
        self._session.handles.pop(uuid, None)
        self._lost = True
        if error.value in SESSION_LOST_CODES:
            self._end()
        return reason

    def _instance(self, handle: Any, uuid: str, held: GpuInstance, device: Any) -> InstanceReadings:
        used: ReadingValue = MISSING_BY_REASON[AbsenceReason.NOT_SUPPORTED]
        if device is not None:
            # Without a compute instance there is no handle to ask; with several, each tells of the whole instance.
            info = call_optional(pynvml.nvmlDeviceGetMemoryInfo, device)
            used = used if info is None else filter_implausible(Reading.MEMORY_USED_BYTES, float(info.used))
        activity = self._activity.read(handle, uuid, held.id)
        values = {reading: activity.get(reading, used) for reading in INSTANCE_READINGS}
        return InstanceReadings(gpu_instance_id=held.id, values=values)

    def _process_count(self, handle: Any) -> ReadingValue:
        try:
            return float(self._processes.count_processes(handle))
        except pynvml.NVMLError as error:
            return make_missing(error)


def _is_mig_enabled(handle: Any) -> bool:
    mode = call_optional(pynvml.nvmlDeviceGetMigMode, handle)
    return mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE
