"""The symbols of the simulated library that tell what a device is: handles, addresses, memory and limits."""

from typing import Any

import pynvml

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.handles import Handles, Symbol, Target, behind, put
from eelgrid_agent.simulation.node import SimulatedNode

__all__ = ["identity_symbols", "write_pci"]


def identity_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    """All of them, by name."""
    return {**_handle_symbols(node, handles), **_product_symbols(node, handles)}


def _handle_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    def by_index(index: Any, ref: Any) -> int:
        if code := handles.session():
            return code
        for gpu in node.devices:
            if gpu.identity.index == index.value:
                return handles.issue_device(gpu, ref)
        return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def by_uuid(uuid: Any, ref: Any) -> int:
        if code := handles.session():
            return code
        for gpu in node.devices:
            if gpu.uuid.encode() == uuid.value:
                return handles.issue_device(gpu, ref)
        return int(pynvml.NVML_ERROR_NOT_FOUND)

    def index(gpu: SimGpu, ref: Any) -> int:
        return put(ref, gpu.identity.index)

    return {
        "nvmlDeviceGetHandleByIndex_v2": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetIndex": handles.on_device(index),
    }


def _product_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    def pci(gpu: SimGpu, ref: Any) -> int:
        return write_pci(gpu, behind(ref))

    def memory(target: Target, ref: Any) -> int:
        if target.instance is not None:
            return _instance_memory(node, target, behind(ref))
        # The first version counts what the driver reserves as used.
        return _memory(target.gpu, behind(ref), used=target.gpu.memory_held_bytes)

    def memory_v2(target: Target, ref: Any) -> int:
        info = behind(ref)
        if info.version != pynvml.nvmlMemory_v2:
            return int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        if target.instance is not None:
            return _instance_memory(node, target, info)
        info.reserved = target.gpu.memory_reserved_bytes
        return _memory(target.gpu, info, used=target.gpu.memory_used_bytes)

    def default_limit(gpu: SimGpu, ref: Any) -> int:
        return put(ref, round(gpu.product.power_default_w * 1000.0))

    def constraints(gpu: SimGpu, low: Any, high: Any) -> int:
        gpu_low, gpu_high = gpu.identity.power_limit_min_w, gpu.identity.power_limit_max_w
        if gpu_low is None or gpu_high is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return put(low, round(gpu_low * 1000.0)) or put(high, round(gpu_high * 1000.0))

    def memory_affinity(gpu: SimGpu, words: Any, ref: Any, scope: Any) -> int:
        near = gpu.identity.numa_node
        if near is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if scope.value != pynvml.NVML_AFFINITY_SCOPE_NODE or near >= 64 * words:
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for word in range(words):
            behind(ref)[word] = 1 << near % 64 if word == near // 64 else 0
        return 0

    return {
        "nvmlDeviceGetPciInfo_v3": handles.on_device(pci),
        "nvmlDeviceGetMemoryAffinity": handles.on_device(memory_affinity),
        "nvmlDeviceGetMemoryInfo": handles.on(memory),
        "nvmlDeviceGetMemoryInfo_v2": handles.on(memory_v2),
        "nvmlDeviceGetPowerManagementDefaultLimit": handles.on_device(default_limit),
        "nvmlDeviceGetPowerManagementLimitConstraints": handles.on_device(constraints),
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


def _instance_memory(node: SimulatedNode, target: Target, info: Any) -> int:
    """A MIG device tells of its GPU instance; the instance's own handle is no device."""
    if not target.mig_device or target.instance is None:
        return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    info.total, info.used = node.sensors(target.gpu).instance_memory(target.instance.value)
    info.free = info.total - info.used
    return 0
