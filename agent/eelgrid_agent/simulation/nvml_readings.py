"""What the simulated NVML library reads: identities, sensors, fields, links, GPM samples, processes and events.

Field numbers and entry layouts follow the simulated driver branch, including the wide process entries of branch 530.
"""

import ctypes
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pynvml

from eelgrid_agent.devices.port import DeviceEventKind, FabricState, ProcessKind
from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.nvml_handles import (
    CSymbol,
    HandleTable,
    HandleTarget,
    dereference_argument,
    get_address,
    write_handle,
    write_number,
)
from eelgrid_agent.simulation.power_curve import WorkDone
from eelgrid_agent.simulation.sensors import (
    LIMIT_FIELDS_SINCE,
    NEW_LINK_ERRORS_SINCE,
    POWER_FIELDS_SINCE,
    RECOVERY_SINCE,
    SWITCH,
    GpmActivity,
    SimClient,
    compute_activity,
    find_common_ancestor,
    find_link_end,
    list_announced_events,
)
from eelgrid_protos.messages import AccessLevel
from eelgrid_protos.values import dataclass

_INVALID = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
_NOT_SUPPORTED = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
_NO_INSTANCE = 0xFFFF_FFFF
_FIRST, _STEP = 0x7D00_0000_0000_0000, 0x100
_TYPES = {
    DeviceEventKind.ECC_SINGLE_BIT: 0x1,
    DeviceEventKind.ECC_DOUBLE_BIT: 0x2,
    DeviceEventKind.XID: 0x8,
    DeviceEventKind.MIG_CHANGED: 0x100,
    DeviceEventKind.GPU_UNAVAILABLE: 0x4000,
    DeviceEventKind.RECOVERY_ACTION: 0x8000,
}

# What a set's devices were registered for, by UUID, and by which handle.
_Registered = dict[str, tuple[int, HandleTarget]]


def build_reading_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    """All of them, by name."""
    return {
        **_handle_symbols(node, handles),
        **_product_symbols(node, handles),
        **_power_symbols(node, handles),
        **_state_symbols(node, handles),
        **_health_symbols(node, handles),
        **_field_symbols(node, handles),
        **_link_symbols(node, handles),
        **_sample_symbols(node, handles),
        **_process_symbols(node, handles),
        **_event_symbols(node, handles),
    }


def _event_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    sets: dict[int, _Registered] = {}
    addresses = count(_FIRST, _STEP)

    def supported_types(gpu: SimGpu) -> int:
        known = list_announced_events(node.spec.driver_branch)
        if gpu.mig.geometry is None:
            known -= {DeviceEventKind.MIG_CHANGED}
        return sum(_TYPES[kind] for kind in known)

    def create(ref: Any) -> int:
        if code := handles.session_code():
            return code
        if not sets:
            # Nobody listened to what came before.
            node.announcements.clear()
        address = next(addresses)
        sets[address] = {}
        write_handle(dereference_argument(ref), address)
        return 0

    def register(target: HandleTarget, types: Any, event_set: Any) -> int:
        gpu = target.gpu
        registered = sets.get(get_address(event_set))
        if registered is None:
            return _INVALID
        if target.instance is not None or types.value & ~supported_types(gpu):
            return _NOT_SUPPORTED
        registered[gpu.uuid] = (types.value, target)
        return 0

    def wait(event_set: Any, ref: Any, _timeout: Any) -> int:
        if code := handles.session_code():
            return code
        registered = sets.get(get_address(event_set))
        if registered is None:
            return _INVALID
        while node.announcements:
            told = node.announcements.popleft()
            types, target = registered.get(told.uuid, (0, None))
            if target is None or not _TYPES[told.kind] & types:
                continue
            data = dereference_argument(ref)
            data.eventType, data.eventData = _TYPES[told.kind], told.code
            data.gpuInstanceId = _NO_INSTANCE if told.gi is None else told.gi
            data.computeInstanceId = _NO_INSTANCE
            return handles.issue_handle(target, data.device)
        return int(pynvml.NVML_ERROR_TIMEOUT)

    def free(event_set: Any) -> int:
        address = get_address(event_set)
        if address not in sets:
            return _INVALID
        del sets[address]
        return 0

    return {
        "nvmlEventSetCreate": create,
        "nvmlDeviceGetSupportedEventTypes": handles.wrap_number(supported_types),
        "nvmlDeviceRegisterEvents": handles.wrap_target(register),
        "nvmlEventSetWait_v2": wait,
        "nvmlEventSetFree": free,
    }


_WIDE = int(pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG)
_NARROW = int(pynvml.NVML_VALUE_TYPE_UNSIGNED_INT)
# What NVML's units of NVLink power thresholds are called; a constant of the driver.
_LOW_POWER_UNIT = 50

# The first branch that has it, its type, and what it says for a scope.
_Field = tuple[int, int, Callable[[SimGpu, int], int | None]]


def _field_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    fields = {**_power_fields(node), **_link_fields(node), **_state_fields(node), **_moved_fields(node)}

    def values(gpu: SimGpu, count: Any, ref: Any) -> int:
        for value in dereference_argument(ref)[: count.value]:
            since, kind, ask = fields.get(value.fieldId, (0, _NARROW, None))
            if ask is None or node.spec.driver_branch < since:
                value.nvmlReturn = pynvml.NVML_ERROR_INVALID_ARGUMENT
                continue
            number = ask(gpu, value.scopeId)
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if number is None else 0
            value.valueType = kind
            if number is not None and kind == _WIDE:
                value.value.ullVal = number
            elif number is not None:
                value.value.uiVal = number
        return 0

    return {"nvmlDeviceGetFieldValues": handles.wrap_device(values)}


def _power_fields(node: SimulatedNode) -> dict[int, _Field]:
    now, sensors = node.monotonic_ns, node.get_sensors

    def instant(gpu: SimGpu, scope: int) -> int | None:
        if scope == pynvml.NVML_POWER_SCOPE_MODULE:
            return sensors(gpu).module_power_mw(now())
        if scope == pynvml.NVML_POWER_SCOPE_MEMORY:
            return sensors(gpu).memory_power_mw(now())
        return gpu.power_instant_mw(now()) if scope == pynvml.NVML_POWER_SCOPE_GPU else None

    def averaged(gpu: SimGpu, scope: int) -> int | None:
        return None if scope else sensors(gpu).power_average_mw(now())

    def enforced(gpu: SimGpu, scope: int) -> int | None:
        return None if scope else gpu.enforced_mw

    def requested(gpu: SimGpu, scope: int) -> int | None:
        return None if scope else gpu.limit_mw

    return {
        83: (0, _WIDE, lambda gpu, _scope: gpu.energy_mj(now())),
        185: (POWER_FIELDS_SINCE, _NARROW, averaged),
        186: (POWER_FIELDS_SINCE, _NARROW, instant),
        190: (LIMIT_FIELDS_SINCE, _NARROW, enforced),
        192: (LIMIT_FIELDS_SINCE, _NARROW, requested),
    }


def _link_fields(node: SimulatedNode) -> dict[int, _Field]:
    now, sensors = node.monotonic_ns, node.get_sensors

    def kib(gpu: SimGpu, link: int) -> int | None:
        return sensors(gpu).link_kib(link, now())

    def old_errors(gpu: SimGpu, _scope: int) -> int | None:
        return None if sensors(gpu).traits.new_link_errors else sensors(gpu).link_errors()

    def no_old_errors(gpu: SimGpu, _scope: int) -> int | None:
        return None if old_errors(gpu, 0) is None else 0

    def new_errors(gpu: SimGpu, link: int) -> int | None:
        traits = sensors(gpu).traits
        if not traits.new_link_errors or not 0 <= link < traits.links:
            return None
        # They all come in over the first link.
        return 0 if link else sensors(gpu).link_errors()

    def no_new_errors(gpu: SimGpu, link: int) -> int | None:
        return None if new_errors(gpu, link) is None else 0

    return {
        **dict.fromkeys((38, 45, 59), (0, _WIDE, no_old_errors)),
        52: (0, _WIDE, old_errors),
        138: (450, _WIDE, kib),
        139: (450, _WIDE, kib),
        **dict.fromkeys((206, 207, 211), (NEW_LINK_ERRORS_SINCE, _WIDE, no_new_errors)),
        208: (NEW_LINK_ERRORS_SINCE, _WIDE, new_errors),
    }


def _state_fields(node: SimulatedNode) -> dict[int, _Field]:
    now, sensors = node.monotonic_ns, node.get_sensors

    def changes_mode_at_once(gpu: SimGpu, _scope: int) -> int | None:
        return None if gpu.mig.geometry is None else int(not gpu.mig.geometry.reset_to_change_mode)

    return {
        82: (0, _NARROW, lambda gpu, _scope: sensors(gpu).memory_temperature_c(now())),
        184: (POWER_FIELDS_SINCE, _NARROW, changes_mode_at_once),
        230: (RECOVERY_SINCE, _NARROW, lambda gpu, _scope: sensors(gpu).recovery_action()),
    }


def _moved_fields(node: SimulatedNode) -> dict[int, _Field]:
    """Numbers that changed hands between branches: 199 with 200, and 251 with 269."""
    branch = node.spec.driver_branch

    def query_independent(gpu: SimGpu, _scope: int) -> int | None:
        return None if gpu.mig.geometry is None else 1

    def threshold(gpu: SimGpu, _scope: int) -> int | None:
        return _LOW_POWER_UNIT if node.get_sensors(gpu).traits.links else None

    def thermal_ns(_gpu: SimGpu, _scope: int) -> int | None:
        return 0

    def smoothing(gpu: SimGpu, _scope: int) -> int | None:
        return 0 if gpu.product.architecture == "blackwell" else None

    swapped = 555 <= branch < 565
    thermal_at_251 = 575 <= branch < 590
    return {
        199: (550, _NARROW, threshold if swapped else query_independent),
        200: (550, _NARROW, query_independent if swapped else threshold),
        251: (570, _WIDE, thermal_ns if thermal_at_251 else smoothing),
        269: (590, _WIDE, thermal_ns),
    }


_NO_PERMISSION = int(pynvml.NVML_ERROR_NO_PERMISSION)
_TOO_SMALL = int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
_NOT_FOUND = int(pynvml.NVML_ERROR_NOT_FOUND)

_DETAILS = "nvmlDeviceGetRunningProcessDetailList"
# The first driver with the list of details, which ended the wide entries.
_NARROW_AGAIN = (535, 98)


class _Entry(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _WideEntry(ctypes.Structure):
    _fields_ = (*_Entry._fields_, ("protected_memory", ctypes.c_ulonglong))


def _process_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    version = tuple(int(part) for part in node.spec.driver_version.split(".")[:2] if part.isdigit())
    layout = _WideEntry if (530,) <= version < _NARROW_AGAIN else _Entry

    def listing(kind: ProcessKind, layout: type[ctypes.Structure]) -> CSymbol:
        def running(target: HandleTarget, count: Any, buffer: Any) -> int:
            gpu, instance = target.gpu, target.instance
            if instance is not None and not target.mig_device:
                return _INVALID
            if instance is None and gpu.mig.enabled and not node.operations.has_right(AccessLevel.MIG_MONITOR):
                return _NO_PERMISSION
            clients = [client for client in node.get_sensors(gpu).clients() if client.kind is kind]
            if instance is not None:
                clients = [client for client in clients if client.gpu_instance_id == instance.id]
            return _write(clients, layout, dereference_argument(count), buffer)

        return handles.wrap_target(running)

    def confidential_memory(_target: HandleTarget, ref: Any) -> int:
        info = dereference_argument(ref)
        info.protectedMemSizeKib = info.unprotectedMemSizeKib = 0
        return 0

    def details(_target: HandleTarget, _ref: Any) -> int:
        return _NOT_SUPPORTED

    symbols = {
        "nvmlDeviceGetComputeRunningProcesses_v2": listing(ProcessKind.COMPUTE, _Entry),
        "nvmlDeviceGetGraphicsRunningProcesses_v2": listing(ProcessKind.GRAPHICS, _Entry),
        "nvmlDeviceGetComputeRunningProcesses_v3": listing(ProcessKind.COMPUTE, layout),
        "nvmlDeviceGetGraphicsRunningProcesses_v3": listing(ProcessKind.GRAPHICS, layout),
        "nvmlDeviceGetConfComputeMemSizeInfo": handles.wrap_target(confidential_memory),
        "nvmlDeviceGetProcessUtilization": handles.wrap_device(_utilization(node)),
    }
    return symbols if version < _NARROW_AGAIN else {**symbols, _DETAILS: handles.wrap_target(details)}


def _utilization(node: SimulatedNode) -> CSymbol:
    def utilization(gpu: Any, samples: Any, count: Any, last_seen: Any) -> int:
        if gpu.mig.enabled:
            return _NOT_SUPPORTED
        sensors, number = node.get_sensors(gpu), dereference_argument(count)
        clients, sampled_us = sensors.clients(), sensors.processes_sampled_us(node.monotonic_ns())
        if not clients or sampled_us <= last_seen.value:
            return _NOT_FOUND
        if samples is None or number.value < len(clients):
            number.value = len(clients)
            return _TOO_SMALL
        for sample, client in zip(dereference_argument(samples), clients, strict=False):
            sample.pid, sample.timeStamp, sample.smUtil = client.pid, sampled_us, client.sm_percent
        number.value = len(clients)
        return 0

    return utilization


def _write(clients: Sequence[SimClient], layout: type[ctypes.Structure], count: Any, buffer: Any) -> int:
    room, count.value = count.value, len(clients)
    if not clients:
        return 0
    if buffer is None or room < len(clients):
        return _TOO_SMALL
    memory = dereference_argument(buffer)
    entries = bytes(
        (layout * len(clients))(
            *(
                layout(
                    client.pid,
                    client.memory_bytes,
                    _NO_INSTANCE if client.gpu_instance_id is None else client.gpu_instance_id,
                    _NO_INSTANCE if client.compute_instance_id is None else client.compute_instance_id,
                )
                for client in clients
            )
        )
    )
    ctypes.memmove(memory, entries, min(len(entries), ctypes.sizeof(memory)))
    return 0


_MISMATCH = int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
# A caller that gives nothing back runs out of memory.
_SAMPLES_MOST = 4096
_LIBRARY_SAMPLES_FIRST, _LIBRARY_SAMPLES_STEP = 0x7E00_0000_0000_0000, 0x100


@dataclass(frozen=True, slots=True)
class _Sample:
    gpu: SimGpu
    # The life that the counters are of: the device's, or that of an instance, which is another one each time.
    life: object
    now_ns: int
    done: WorkDone

    def fits(self, other: "_Sample") -> bool:
        """Whether the other is a later one of the same."""
        return (self.gpu.uuid, self.life) == (other.gpu.uuid, other.life) and self.now_ns < other.now_ns


def _sample_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    samples: dict[int, _Sample | None] = {}
    addresses = count(_LIBRARY_SAMPLES_FIRST, _LIBRARY_SAMPLES_STEP)

    def supports(gpu: SimGpu, ref: Any) -> int:
        info = dereference_argument(ref)
        if info.version != pynvml.NVML_GPM_SUPPORT_VERSION:
            return _MISMATCH
        info.isSupportedDevice = int(node.get_sensors(gpu).has_activity)
        return 0

    def allocate(ref: Any) -> int:
        if code := handles.session_code():
            return code
        if len(samples) >= _SAMPLES_MOST:
            return int(pynvml.NVML_ERROR_MEMORY)
        address = next(addresses)
        samples[address] = None
        write_handle(dereference_argument(ref), address)
        return 0

    def free(sample: Any) -> int:
        if get_address(sample) not in samples:
            return _INVALID
        del samples[get_address(sample)]
        return 0

    def take(gpu: SimGpu, sample: Any) -> int:
        return fill(gpu, None, sample)

    def take_of_instance(gpu: SimGpu, instance_id: int, sample: Any) -> int:
        return fill(gpu, instance_id, sample) if instance_id in gpu.mig.instances else _INVALID

    def fill(gpu: SimGpu, instance_id: int | None, sample: Any) -> int:
        if not node.get_sensors(gpu).has_activity:
            return _NOT_SUPPORTED
        address, now_ns = get_address(sample), node.monotonic_ns()
        if address not in samples:
            return _INVALID
        done = gpu.work_done(now_ns) if instance_id is None else gpu.loads.instance_work_done(instance_id, now_ns)
        life = gpu.generation if instance_id is None else gpu.mig.instances[instance_id]
        samples[address] = _Sample(gpu, life, now_ns, done)
        return 0

    def metrics(ref: Any) -> int:
        request = dereference_argument(ref)
        if request.version != pynvml.NVML_GPM_METRICS_GET_VERSION:
            return _MISMATCH
        first, second = samples.get(get_address(request.sample1)), samples.get(get_address(request.sample2))
        if first is None or second is None or not first.fits(second):
            return _INVALID
        told = _metrics(compute_activity((first.now_ns, first.done), (second.now_ns, second.done)))
        for metric in request.metrics[: request.numMetrics]:
            metric.nvmlReturn = 0 if metric.metricId in told else _NOT_SUPPORTED
            metric.value = told.get(metric.metricId, 0.0)
        return 0

    return {
        "nvmlGpmQueryDeviceSupport": handles.wrap_device(supports),
        "nvmlGpmSampleAlloc": allocate,
        "nvmlGpmSampleFree": free,
        "nvmlGpmSampleGet": handles.wrap_device(take),
        "nvmlGpmMigSampleGet": handles.wrap_device(take_of_instance),
        "nvmlGpmMetricsGet": metrics,
    }


def _metrics(activity: GpmActivity) -> dict[int, float]:
    """By NVML's numbers, in per cent and MiB a second."""
    return {
        1: activity.graphics,
        2: activity.sm,
        3: activity.occupancy,
        5: activity.tensor,
        10: activity.memory,
        11: activity.fp64,
        12: activity.fp32,
        13: activity.fp16,
        20: activity.pcie_sent,
        21: activity.pcie_received,
    }


def _power_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    return {
        "nvmlDeviceGetPowerUsage": handles.wrap_number(lambda gpu: gpu.power_usage_mw(node.monotonic_ns())),
        "nvmlDeviceGetTotalEnergyConsumption": handles.wrap_number(lambda gpu: gpu.energy_mj(node.monotonic_ns())),
        "nvmlDeviceGetEnforcedPowerLimit": handles.wrap_number(lambda gpu: gpu.enforced_mw),
    }


def _state_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    def utilization(gpu: SimGpu, ref: Any) -> int:
        if gpu.percents is None:
            return _NOT_SUPPORTED
        dereference_argument(ref).gpu, dereference_argument(ref).memory = gpu.percents
        return 0

    def clock(gpu: SimGpu, kind: Any, ref: Any) -> int:
        clocks = {pynvml.NVML_CLOCK_SM: gpu.sm_clock_mhz, pynvml.NVML_CLOCK_MEM: gpu.memory_clock_mhz}
        return write_number(ref, clocks.get(kind.value))

    def temperature(gpu: SimGpu, sensor: Any, ref: Any) -> int:
        if sensor.value != pynvml.NVML_TEMPERATURE_GPU:
            return _INVALID
        return write_number(ref, gpu.temperature_c(node.monotonic_ns()))

    def temperature_v(gpu: SimGpu, ref: Any) -> int:
        info = dereference_argument(ref)
        if info.version != pynvml.nvmlTemperature_v1:
            return _MISMATCH
        info.temperature = gpu.temperature_c(node.monotonic_ns())
        return 0

    return {
        "nvmlDeviceGetUtilizationRates": handles.wrap_device(utilization),
        "nvmlDeviceGetClockInfo": handles.wrap_device(clock),
        "nvmlDeviceGetTemperature": handles.wrap_device(temperature),
        "nvmlDeviceGetTemperatureV": handles.wrap_device(temperature_v),
        "nvmlDeviceGetCurrentClocksEventReasons": handles.wrap_number(lambda gpu: gpu.event_reasons),
        "nvmlDeviceGetCurrentClocksThrottleReasons": handles.wrap_number(lambda gpu: gpu.event_reasons),
        "nvmlDeviceGetPerformanceState": handles.wrap_number(lambda gpu: node.get_sensors(gpu).performance_state()),
    }


def _health_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    def ecc_errors(gpu: SimGpu, kind: Any, counter: Any, ref: Any) -> int:
        corrected = kind.value == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        if counter.value == pynvml.NVML_VOLATILE_ECC:
            return write_number(ref, node.get_sensors(gpu).ecc_volatile(corrected=corrected))
        return write_number(ref, node.get_sensors(gpu).ecc_aggregate(corrected=corrected))

    def remapped_rows(gpu: SimGpu, *refs: Any) -> int:
        rows = node.get_sensors(gpu).remapped_rows()
        if rows is None:
            return _NOT_SUPPORTED
        for ref, number in zip(refs, rows, strict=True):
            write_number(ref, number)
        return 0

    return {
        "nvmlDeviceGetTotalEccErrors": handles.wrap_device(ecc_errors),
        "nvmlDeviceGetRemappedRows": handles.wrap_device(remapped_rows),
        "nvmlDeviceGetCurrPcieLinkGeneration": handles.wrap_number(lambda gpu: node.get_sensors(gpu).pcie_generation()),
        "nvmlDeviceGetCurrPcieLinkWidth": handles.wrap_number(lambda gpu: node.get_sensors(gpu).pcie_width()),
        "nvmlDeviceGetPcieReplayCounter": handles.wrap_number(lambda gpu: node.get_sensors(gpu).pcie_replays()),
    }


def _handle_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    def by_index(index: Any, ref: Any) -> int:
        if code := handles.session_code():
            return code
        for gpu in node.devices:
            if gpu.identity.index == index.value:
                return handles.issue_device(gpu, ref)
        return _INVALID

    def by_uuid(uuid: Any, ref: Any) -> int:
        if code := handles.session_code():
            return code
        for gpu in node.devices:
            if gpu.uuid.encode() == uuid.value:
                return handles.issue_device(gpu, ref)
        return _NOT_FOUND

    return {
        "nvmlDeviceGetHandleByIndex_v2": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetIndex": handles.wrap_number(lambda gpu: gpu.identity.index),
    }


def _product_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    def pci(gpu: SimGpu, ref: Any) -> int:
        return write_pci(gpu, dereference_argument(ref))

    def memory(target: HandleTarget, ref: Any) -> int:
        if target.instance is not None:
            return _instance_memory(node, target, dereference_argument(ref))
        # The first version counts what the driver reserves as used.
        return _memory(target.gpu, dereference_argument(ref), used=target.gpu.memory_held_bytes)

    def memory_v2(target: HandleTarget, ref: Any) -> int:
        info = dereference_argument(ref)
        if info.version != pynvml.nvmlMemory_v2:
            return _MISMATCH
        if target.instance is not None:
            return _instance_memory(node, target, info)
        info.reserved = target.gpu.memory_reserved_bytes
        return _memory(target.gpu, info, used=target.gpu.memory_used_bytes)

    def constraints(gpu: SimGpu, low: Any, high: Any) -> int:
        gpu_low, gpu_high = gpu.identity.power_limit_min_w, gpu.identity.power_limit_max_w
        if gpu_low is None or gpu_high is None:
            return _NOT_SUPPORTED
        return write_number(low, round(gpu_low * 1000.0)) or write_number(high, round(gpu_high * 1000.0))

    def memory_affinity(gpu: SimGpu, words: Any, ref: Any, scope: Any) -> int:
        near = gpu.identity.numa_node
        if near is None:
            return _NOT_SUPPORTED
        if scope.value != pynvml.NVML_AFFINITY_SCOPE_NODE or near >= 64 * words:
            return _INVALID
        for word in range(words):
            dereference_argument(ref)[word] = 1 << near % 64 if word == near // 64 else 0
        return 0

    return {
        "nvmlDeviceGetPciInfo_v3": handles.wrap_device(pci),
        "nvmlDeviceGetMemoryAffinity": handles.wrap_device(memory_affinity),
        "nvmlDeviceGetMemoryInfo": handles.wrap_target(memory),
        "nvmlDeviceGetMemoryInfo_v2": handles.wrap_target(memory_v2),
        "nvmlDeviceGetPowerManagementDefaultLimit": handles.wrap_number(
            lambda gpu: round(gpu.product.power_default_w * 1000.0)
        ),
        "nvmlDeviceGetPowerManagementLimitConstraints": handles.wrap_device(constraints),
    }


def write_pci(gpu: SimGpu, info: Any) -> int:
    """Writes a device's PCI address."""
    info.busId = gpu.identity.pci_bus_id.encode()
    domain, bus, device = gpu.identity.pci_bus_id.split(":")
    info.domain, info.bus, info.device = int(domain, 16), int(bus, 16), int(device[:2], 16)
    return 0


def _memory(gpu: SimGpu, info: Any, *, used: int) -> int:
    info.total = gpu.product.memory_bytes
    info.used = used
    info.free = gpu.product.memory_bytes - gpu.memory_held_bytes
    return 0


def _instance_memory(node: SimulatedNode, target: HandleTarget, info: Any) -> int:
    """A MIG device tells of its GPU instance; the instance's own handle is no device."""
    if not target.mig_device or target.instance is None:
        return _INVALID
    info.total, info.used = node.get_sensors(target.gpu).instance_memory(target.instance.value)
    info.free = info.total - info.used
    return 0


# An NVSwitch has a PCI address too; this one is no GPU's.
_SWITCH_BUS_ID = b"00000000:F0:00.0"


def _link_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    def common_ancestor(gpu: SimGpu, other: Any, ref: Any) -> int:
        target = handles.get_target(other)
        if target is None or target.instance is not None or target.gpu is gpu:
            return _INVALID
        return target.error_code(node) or write_number(ref, find_common_ancestor(gpu, target.gpu))

    def no_link(gpu: SimGpu) -> int:
        """What is said of a link past the last one."""
        return _INVALID if node.get_sensors(gpu).traits.links else _NOT_SUPPORTED

    def state(gpu: SimGpu, link: int, ref: Any) -> int:
        up = node.get_sensors(gpu).link_up(link)
        return no_link(gpu) if up is None else write_number(ref, int(up))

    def remote_type(gpu: SimGpu, link: int, ref: Any) -> int:
        end = find_link_end(gpu, link, node.devices)
        if end is None:
            return no_link(gpu)
        kinds = (pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)
        return write_number(ref, int(kinds[end == SWITCH]))

    def remote_pci(gpu: SimGpu, link: int, ref: Any) -> int:
        end = find_link_end(gpu, link, node.devices)
        if isinstance(end, SimGpu):
            return write_pci(end, dereference_argument(ref))
        if end is None:
            return no_link(gpu)
        dereference_argument(ref).busId = _SWITCH_BUS_ID
        return 0

    def fabric(gpu: SimGpu, ref: Any) -> int:
        info, sensors = dereference_argument(ref), node.get_sensors(gpu)
        if info.version != pynvml.nvmlGpuFabricInfo_v2:
            return _MISMATCH
        if not sensors.traits.fabric:
            return _NOT_SUPPORTED
        state = sensors.fabric_state() or int(pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED)
        has_failed = state == FabricState.FAILED
        info.state = FabricState.COMPLETED if has_failed else state
        info.status = int(pynvml.NVML_ERROR_UNKNOWN if has_failed else pynvml.NVML_SUCCESS)
        return 0

    return {
        "nvmlDeviceGetTopologyCommonAncestor": handles.wrap_device(common_ancestor),
        "nvmlDeviceGetNvLinkState": handles.wrap_device(state),
        "nvmlDeviceGetNvLinkRemoteDeviceType": handles.wrap_device(remote_type),
        "nvmlDeviceGetNvLinkRemotePciInfo_v2": handles.wrap_device(remote_pci),
        "nvmlDeviceGetGpuFabricInfoV": handles.wrap_device(fabric),
    }
