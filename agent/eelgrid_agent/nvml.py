"""The devices of this machine, through NVML; with nvml_mig the only caller of the binding.

NVML's milliwatts, millijoules, per cents and bytes become SI here, and its
errors become absences with a reason or a DeviceError. One thread uses it, for
NVML serialises calls anyway; handles are kept, and no call that is known to be
slow (process lists, fans, PCIe throughput) is made.

A reading is asked for in ways, best first: a way whose symbol the driver lacks
is forgotten for the session, one that the device does not support gives way to
the next. A lost device ends the look at once, as does one that times out: a
caller's deadline then waits for one call and not for nine. What was seen once
stays listed by `gpus()`, which opens a new session when a device was lost.

Traps of the binding that are met here: NVMLError compares by value alone
(never `== None`); a struct goes by reference; field ids are read off two that
never moved between driver branches.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pynvml

from eelgrid_agent.device import DriverUnavailable, Missing, RawReadings, UnknownGpu, Value
from eelgrid_agent.nvml_mig import InstanceReader
from eelgrid_protos.catalogue import load, model_name
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, READING_RANGES, AbsenceReason, Gpu, Reading
from eelgrid_protos.quantities import joules_from_millijoules, watts_from_milliwatts

__all__ = ["NvmlDevice"]

# Field 186, the instant power, came with this branch.
_FIELDS_SINCE = 525
_NVML_SUCCESS = 0

_GONE = frozenset({
    pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND,
})  # fmt: skip
_SESSION_GONE = frozenset({pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
_REASONS: Mapping[int, AbsenceReason] = MappingProxyType({
    pynvml.NVML_ERROR_NOT_SUPPORTED: AbsenceReason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: AbsenceReason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: AbsenceReason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: AbsenceReason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_DEPRECATED: AbsenceReason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION: AbsenceReason.NO_PERMISSION,
    pynvml.NVML_ERROR_TIMEOUT: AbsenceReason.TIMED_OUT,
    **dict.fromkeys(_GONE, AbsenceReason.GPU_LOST),
})  # fmt: skip
# Reasons that hold for the whole device, not for one reading.
_SILENT = frozenset({AbsenceReason.GPU_LOST, AbsenceReason.TIMED_OUT})

_Way = Callable[[Any], float]


class NvmlDevice:
    """The device port over NVML.

    `models` renames products, by the name that NVML prints, to what workloads
    ask for; by default that is the catalogue's name, or the product's own.
    """

    def __init__(self, models: Mapping[str, str] | None = None) -> None:
        self._models = dict(models or {})
        self._open = False
        self._version = ""
        self._handles: dict[str, Any] = {}
        self._seen: dict[str, Gpu] = {}
        self._lost = False
        self._ways: dict[Reading, tuple[_Way, ...]] = {}
        self._instances = InstanceReader()

    def driver_version(self) -> str:
        """The driver's version; raises DriverUnavailable."""
        self._begin()
        return self._version

    def gpus(self) -> tuple[Gpu, ...]:
        """Every device that answers or answered before, by index; raises DriverUnavailable."""
        if self._lost:
            # A session does not see a device come back.
            self._end()
        self._begin()
        found: dict[str, Gpu] = {}
        self._handles.clear()
        try:
            count = min(pynvml.nvmlDeviceGetCount(), GPUS_PER_NODE_MOST)
        except pynvml.NVMLError as error:
            self._end()
            raise DriverUnavailable(_remedy(error)) from None
        for index in range(count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                gpu = self._identify(handle, index)
            except pynvml.NVMLError as error:
                # What was seen of it before still stands.
                self._lost = self._lost or error.value in _GONE
                continue
            found[gpu.uuid] = gpu
            self._handles[gpu.uuid] = handle
        taken = {gpu.index for gpu in found.values()}
        found.update({uuid: gpu for uuid, gpu in self._seen.items() if uuid not in found and gpu.index not in taken})
        self._seen = found
        return tuple(sorted(found.values(), key=lambda gpu: gpu.index))

    def read(self, uuid: str) -> RawReadings:
        """One look at one device; raises UnknownGpu, and DriverUnavailable before it was ever seen."""
        if uuid not in self._seen:
            self.gpus()
            if uuid not in self._seen:
                raise UnknownGpu(f"this machine has no GPU {uuid}; list its GPUs")
        handle = self._handles.get(uuid)
        try:
            if handle is None:
                self._begin()
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                self._handles[uuid] = handle
            energy_j = self._measure(Reading.ENERGY_J, handle)
            values = {reading: self._measure(reading, handle) for reading in _VALUES}
        except DriverUnavailable:
            return _NOTHING[AbsenceReason.GPU_LOST]
        except pynvml.NVMLError as error:
            return self._silence(uuid, error)
        return RawReadings(energy_counter_j=energy_j, values=values)

    def close(self) -> None:
        """Ends the session and forgets the devices."""
        self._end()
        self._seen = {}

    def _begin(self) -> None:
        if self._open:
            return
        try:
            pynvml.nvmlInit()
            self._open = True
            self._version = str(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError as error:
            self._end()
            raise DriverUnavailable(_remedy(error)) from None
        branch = self._version.split(".", maxsplit=1)[0]
        instant = branch.isdigit() and int(branch) >= _FIELDS_SINCE
        self._ways = {**_WAYS, Reading.POWER_W: (_instant_w, _usage_w) if instant else (_usage_w,)}

    def _end(self) -> None:
        """Lets the driver go; after a failure the session may be gone already."""
        self._handles.clear()
        self._instances.forget()
        self._lost = False
        if self._open:
            self._open = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                return

    def _silence(self, uuid: str, error: Any) -> RawReadings:
        """The look at a device that does not answer."""
        reason = _REASONS.get(error.value, AbsenceReason.NOT_SAMPLED)
        if reason is AbsenceReason.TIMED_OUT:
            return _NOTHING[reason]
        self._handles.pop(uuid, None)
        self._lost = True
        if error.value in _SESSION_GONE:
            self._end()
        return _NOTHING[AbsenceReason.GPU_LOST]

    def _measure(self, reading: Reading, handle: Any) -> Value:
        """One reading; raises NVMLError when the whole device is silent."""
        reason = AbsenceReason.NOT_SUPPORTED
        for way in self._ways[reading]:
            try:
                value = way(handle)
            except pynvml.NVMLError as error:
                reason = _REASONS.get(error.value, AbsenceReason.NOT_SAMPLED)
                if reason in _SILENT:
                    raise
                if error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    self._ways[reading] = tuple(other for other in self._ways[reading] if other is not way)
                if reason is not AbsenceReason.NOT_SUPPORTED:
                    break
            else:
                bounds = READING_RANGES[reading]
                # Sensors are known to return sentinels and spikes.
                return value if bounds.low <= value <= bounds.high else _IMPLAUSIBLE
        return _MISSING[reason]

    def _identify(self, handle: Any, index: int) -> Gpu:
        uuid, name = str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle))
        memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
        memory_bytes = 0 if memory is None else int(memory.total)
        product = load().find(name, memory_bytes or None)
        pci = _ask(pynvml.nvmlDeviceGetPciInfo, handle)
        default_mw = _ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
        low_mw, high_mw = _ask(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, handle) or (None, None)
        mode = _ask(pynvml.nvmlDeviceGetMigMode, handle)
        enabled, pending = (0, 0) if mode is None else mode
        return Gpu(
            uuid=uuid,
            index=index,
            product=name,
            model=self._models.get(name) or (product.model if product else model_name(name)),
            pci_bus_id="" if pci is None else str(pci.busId),
            catalogue_key=product.key if product else "",
            memory_bytes=memory_bytes,
            power_limit_default_w=None if default_mw is None else watts_from_milliwatts(default_mw),
            power_limit_min_w=None if low_mw is None else watts_from_milliwatts(low_mw),
            power_limit_max_w=None if high_mw is None else watts_from_milliwatts(high_mw),
            mig_capable=mode is not None,
            mig_enabled=enabled == pynvml.NVML_DEVICE_MIG_ENABLE,
            mig_pending=enabled != pending,
            gpu_instances=self._instances.read(handle, uuid, product) if enabled else (),
        )


def _ask(function: Callable[..., Any], handle: Any) -> Any:
    """What a function says, or None where this device or driver does not say it."""
    try:
        return function(handle)
    except pynvml.NVMLError as error:
        if _REASONS.get(error.value) in _SILENT:
            raise
        return None


def _remedy(error: Any) -> str:
    what = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not here; install the NVIDIA driver",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded; load it (modprobe nvidia)",
        pynvml.NVML_ERROR_NO_PERMISSION: "the driver refuses this user; give it access to /dev/nvidiactl",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "library and driver differ in version; reboot or reload the driver",
    }
    return what.get(error.value, f"NVML does not open ({error}); see the kernel's log")


def _field(handle: Any, field: int) -> int:
    value = pynvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    if value.nvmlReturn != _NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    number = value.value
    if value.valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT:
        return int(number.uiVal)
    return int(number.ullVal)


def _instant_w(handle: Any) -> float:
    return watts_from_milliwatts(_field(handle, pynvml.NVML_FI_DEV_POWER_INSTANT))


def _usage_w(handle: Any) -> float:
    return watts_from_milliwatts(pynvml.nvmlDeviceGetPowerUsage(handle))


def _energy_j(handle: Any) -> float:
    return joules_from_millijoules(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))


def _utilization_ratio(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0


def _memory_v2_bytes(handle: Any) -> float:
    # The second version leaves out what the driver reserves.
    return float(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)


def _memory_bytes(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def _sm_clock_mhz(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))


def _memory_clock_mhz(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM))


def _temperature_v_c(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU))


def _temperature_c(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))


def _limit_w(handle: Any) -> float:
    return watts_from_milliwatts(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))


def _reasons_mask(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))


def _throttle_mask(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


# How each reading is had, best way first; power depends on the driver.
_WAYS: Mapping[Reading, tuple[_Way, ...]] = MappingProxyType({
    Reading.ENERGY_J: (_energy_j,),
    Reading.UTILIZATION_RATIO: (_utilization_ratio,),
    Reading.MEMORY_USED_BYTES: (_memory_v2_bytes, _memory_bytes),
    Reading.SM_CLOCK_MHZ: (_sm_clock_mhz,),
    Reading.MEMORY_CLOCK_MHZ: (_memory_clock_mhz,),
    Reading.TEMPERATURE_C: (_temperature_v_c, _temperature_c),
    Reading.POWER_LIMIT_W: (_limit_w,),
    Reading.EVENT_REASONS_MASK: (_reasons_mask, _throttle_mask),
})  # fmt: skip
_VALUES: tuple[Reading, ...] = (Reading.POWER_W, *(reading for reading in _WAYS if reading is not Reading.ENERGY_J))
_MISSING: Mapping[AbsenceReason, Missing] = MappingProxyType({reason: Missing(reason) for reason in AbsenceReason})
_IMPLAUSIBLE = _MISSING[AbsenceReason.IMPLAUSIBLE]
_NOTHING: Mapping[AbsenceReason, RawReadings] = MappingProxyType({
    reason: RawReadings(
        energy_counter_j=_MISSING[reason],
        values=MappingProxyType(dict.fromkeys(_VALUES, _MISSING[reason])),
    )
    for reason in _SILENT
})  # fmt: skip
