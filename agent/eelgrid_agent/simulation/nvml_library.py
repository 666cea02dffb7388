"""The simulated NVML library under the real binding: sessions, identities, memory, PCIe and NVLink topology.

`install_library` puts an object into the binding whose attributes are functions named as C symbols; a symbol that
the simulated driver branch lacks is no attribute. Handles of a lost device stay dead when it returns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pynvml

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.nvml_control import build_control_symbols, build_mig_symbols
from eelgrid_agent.simulation.nvml_handles import (
    CSymbol,
    HandleTable,
    HandleTarget,
    dereference_argument,
    write_number,
    write_text,
)
from eelgrid_agent.simulation.nvml_readings import (
    build_event_symbols,
    build_field_symbols,
    build_process_symbols,
    build_sample_symbols,
    build_sensor_symbols,
)
from eelgrid_agent.simulation.sensors import (
    FABRIC_SINCE,
    GPM_SINCE,
    RESERVED_SINCE,
    SWITCH,
    find_common_ancestor,
    find_link_end,
)


def build_identity_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    """All of them, by name."""
    return {**_handle_symbols(node, handles), **_product_symbols(node, handles)}


def _handle_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    def by_index(index: Any, ref: Any) -> int:
        if code := handles.session_code():
            return code
        for gpu in node.devices:
            if gpu.identity.index == index.value:
                return handles.issue_device(gpu, ref)
        return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def by_uuid(uuid: Any, ref: Any) -> int:
        if code := handles.session_code():
            return code
        for gpu in node.devices:
            if gpu.uuid.encode() == uuid.value:
                return handles.issue_device(gpu, ref)
        return int(pynvml.NVML_ERROR_NOT_FOUND)

    def index(gpu: SimGpu, ref: Any) -> int:
        return write_number(ref, gpu.identity.index)

    return {
        "nvmlDeviceGetHandleByIndex_v2": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetIndex": handles.wrap_device(index),
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
            return int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        if target.instance is not None:
            return _instance_memory(node, target, info)
        info.reserved = target.gpu.memory_reserved_bytes
        return _memory(target.gpu, info, used=target.gpu.memory_used_bytes)

    def default_limit(gpu: SimGpu, ref: Any) -> int:
        return write_number(ref, round(gpu.product.power_default_w * 1000.0))

    def constraints(gpu: SimGpu, low: Any, high: Any) -> int:
        gpu_low, gpu_high = gpu.identity.power_limit_min_w, gpu.identity.power_limit_max_w
        if gpu_low is None or gpu_high is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return write_number(low, round(gpu_low * 1000.0)) or write_number(high, round(gpu_high * 1000.0))

    def memory_affinity(gpu: SimGpu, words: Any, ref: Any, scope: Any) -> int:
        near = gpu.identity.numa_node
        if near is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if scope.value != pynvml.NVML_AFFINITY_SCOPE_NODE or near >= 64 * words:
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for word in range(words):
            dereference_argument(ref)[word] = 1 << near % 64 if word == near // 64 else 0
        return 0

    return {
        "nvmlDeviceGetPciInfo_v3": handles.wrap_device(pci),
        "nvmlDeviceGetMemoryAffinity": handles.wrap_device(memory_affinity),
        "nvmlDeviceGetMemoryInfo": handles.wrap_target(memory),
        "nvmlDeviceGetMemoryInfo_v2": handles.wrap_target(memory_v2),
        "nvmlDeviceGetPowerManagementDefaultLimit": handles.wrap_device(default_limit),
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
        return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    info.total, info.used = node.get_sensors(target.gpu).instance_memory(target.instance.value)
    info.free = info.total - info.used
    return 0


_INVALID = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
_NOT_SUPPORTED = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
_MISMATCH = int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
# An NVSwitch has a PCI address too; this one is no GPU's.
_SWITCH_BUS_ID = b"00000000:F0:00.0"


def build_link_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    """All of them, by name."""

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
        info.state = sensors.fabric_state() or int(pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED)
        return 0

    return {
        "nvmlDeviceGetTopologyCommonAncestor": handles.wrap_device(common_ancestor),
        "nvmlDeviceGetNvLinkState": handles.wrap_device(state),
        "nvmlDeviceGetNvLinkRemoteDeviceType": handles.wrap_device(remote_type),
        "nvmlDeviceGetNvLinkRemotePciInfo_v2": handles.wrap_device(remote_pci),
        "nvmlDeviceGetGpuFabricInfoV": handles.wrap_device(fabric),
    }


# The driver branch that first had a symbol; those before all are left out.
_SINCE = {
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2": 470,
    "nvmlDeviceGetNvLinkRemoteDeviceType": 470,
    "nvmlDeviceGetMemoryInfo_v2": RESERVED_SINCE,
    "nvmlDeviceGetComputeRunningProcesses_v3": 510,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": 510,
    "nvmlDeviceGetGpuInstanceProfileInfoV": 510,
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV": 510,
    "nvmlGpuInstanceGetComputeInstancePossiblePlacements": 525,
    **dict.fromkeys(
        (
            "nvmlGpmQueryDeviceSupport",
            "nvmlGpmSampleAlloc",
            "nvmlGpmSampleFree",
            "nvmlGpmSampleGet",
            "nvmlGpmMigSampleGet",
            "nvmlGpmMetricsGet",
        ),
        GPM_SINCE,
    ),
    "nvmlDeviceGetConfComputeMemSizeInfo": 530,
    "nvmlDeviceGetCurrentClocksEventReasons": 535,
    "nvmlDeviceGetGpuFabricInfoV": FABRIC_SINCE,
    "nvmlDeviceGetTemperatureV": 570,
}


def install_library(node: SimulatedNode, *, privileged: bool = True) -> None:
    """Puts the node's devices under the binding of this process; `privileged` is the right to walk instances."""
    if pynvml._nvmlLib_refcount > 0:  # noqa: SLF001 - the binding has no other way to ask
        raise RuntimeError("an NVML session is open in this process; close it before simulating one")
    uninstall_library()
    pynvml.nvmlLib = _library(node, privileged=privileged)


def uninstall_library() -> None:
    """Leaves the binding as it was before anybody used it."""
    pynvml.nvmlLib = None
    pynvml._nvmlLib_refcount = 0  # noqa: SLF001
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001


@contextmanager
def installed_library(node: SimulatedNode, *, privileged: bool = True) -> Iterator[None]:
    """The simulated library, for as long as the block runs."""
    install_library(node, privileged=privileged)
    try:
        yield
    finally:
        uninstall_library()


def _library(node: SimulatedNode, *, privileged: bool) -> SimpleNamespace:
    handles, branch = HandleTable(node), node.spec.driver_branch
    symbols: dict[str, CSymbol] = {
        **_session_symbols(node, handles),
        **build_identity_symbols(node, handles),
        **build_sensor_symbols(node, handles),
        **build_field_symbols(node, handles),
        **build_link_symbols(node, handles),
        **build_sample_symbols(node, handles),
        **build_process_symbols(node, handles),
        **build_event_symbols(node, handles),
        **build_mig_symbols(handles, node.operations, branch=branch, privileged=privileged),
        **build_control_symbols(node, handles),
    }
    for name, symbol in symbols.items():
        # A symbol goes by the C name alone: whoever makes calls slow goes by it.
        symbol.__name__ = name
    return SimpleNamespace(**{name: symbol for name, symbol in symbols.items() if _SINCE.get(name, 0) <= branch})


def _session_symbols(node: SimulatedNode, handles: HandleTable) -> dict[str, CSymbol]:
    def init(_flags: Any) -> int:
        if not node.driver_loaded:
            return int(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        handles.sessions += 1
        return 0

    def shutdown() -> int:
        return handles.end_session()

    def error_string(code: Any) -> bytes:
        return b"Simulated error %d" % code

    def driver_version(buffer: Any, length: Any) -> int:
        return handles.session_code() or write_text(buffer, length, node.spec.driver_version)

    def count(ref: Any) -> int:
        return handles.session_code() or write_number(ref, len(node.devices))

    return {
        "nvmlInitWithFlags": init,
        "nvmlShutdown": shutdown,
        "nvmlErrorString": error_string,
        "nvmlSystemGetDriverVersion": driver_version,
        "nvmlDeviceGetCount_v2": count,
    }
