"""What a device is: product, memory, limits, PCI address, MIG mode and layout, as the driver says.

It owns the translation of identities; a device that does not answer is an
error here, and what to make of that is its caller's to say.
"""

from collections.abc import Mapping
from typing import Any

import pynvml

from eelgrid_agent.nvml.mig import InstanceReader
from eelgrid_agent.nvml.session import ask
from eelgrid_protos.catalogue import load, model_name
from eelgrid_protos.messages import Gpu
from eelgrid_protos.quantities import watts_from_milliwatts

__all__ = ["identify"]

# Linux on x86 is built for up to 1,024 NUMA nodes; machines with GPUs have at most some dozens.
_NUMA_WORDS = 4


def identify(handle: Any, index: int, *, models: Mapping[str, str], instances: InstanceReader) -> Gpu:
    """One device; `models` renames products. Raises NVMLError when it does not answer."""
    uuid, name = str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle))
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    memory_bytes = 0 if memory is None else int(memory.total)
    product = load().find(name, memory_bytes or None)
    pci = ask(pynvml.nvmlDeviceGetPciInfo, handle)
    default_mw = ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
    low_mw, high_mw = ask(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, handle) or (None, None)
    mode = ask(pynvml.nvmlDeviceGetMigMode, handle)
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
        gpu_instances=instances.read(handle, uuid, product) if enabled else (),
        numa_node=_numa_node(handle),
    )


def _numa_node(handle: Any) -> int | None:
    """The one NUMA node that is near; nvmlDeviceGetNumaNodeId is another thing, the node that a GPU's own memory is."""
    words = ask(pynvml.nvmlDeviceGetMemoryAffinity, handle, _NUMA_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE)
    if words is None:
        return None
    near = [node for node in range(64 * _NUMA_WORDS) if words[node // 64] >> node % 64 & 1]
    return near[0] if len(near) == 1 else None
