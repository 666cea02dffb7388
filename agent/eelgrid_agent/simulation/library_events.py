"""The event sets of the simulated library: what the node announces, given to who registered for it.

A set hears only of what its devices were registered for, and only from then
on. Time does not pass while a caller waits: an empty queue is a time-out.
"""

from itertools import count
from typing import Any

import pynvml

from eelgrid_agent.device import DeviceEventKind
from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.handles import Handles, Symbol, Target, address_of, behind, point, put
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.sensors import announced_by

__all__ = ["event_symbols"]

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
_Registered = dict[str, tuple[int, Target]]


def event_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    """All of them, by name."""
    sets: dict[int, _Registered] = {}
    addresses = count(_FIRST, _STEP)

    def supported_types(gpu: SimGpu) -> int:
        known = announced_by(node.spec.driver_branch)
        if gpu.mig.geometry is None:
            known -= {DeviceEventKind.MIG_CHANGED}
        return sum(_TYPES[kind] for kind in known)

    def create(ref: Any) -> int:
        if code := handles.session():
            return code
        if not sets:
            # Nobody listened to what came before.
            node.announcements.clear()
        address = next(addresses)
        sets[address] = {}
        point(behind(ref), address)
        return 0

    def supported(gpu: SimGpu, ref: Any) -> int:
        return put(ref, supported_types(gpu))

    def register(target: Target, types: Any, event_set: Any) -> int:
        gpu = target.gpu
        registered = sets.get(address_of(event_set))
        if registered is None:
            return _INVALID
        if target.instance is not None or types.value & ~supported_types(gpu):
            return _NOT_SUPPORTED
        registered[gpu.uuid] = (types.value, target)
        return 0

    def wait(event_set: Any, ref: Any, _timeout: Any) -> int:
        if code := handles.session():
            return code
        registered = sets.get(address_of(event_set))
        if registered is None:
            return _INVALID
        while node.announcements:
            told = node.announcements.popleft()
            types, target = registered.get(told.uuid, (0, None))
            if target is None or not _TYPES[told.kind] & types:
                continue
            data = behind(ref)
            data.eventType, data.eventData = _TYPES[told.kind], told.code
            data.gpuInstanceId = _NO_INSTANCE if told.gi is None else told.gi
            data.computeInstanceId = _NO_INSTANCE
            return handles.issue(target, data.device)
        return int(pynvml.NVML_ERROR_TIMEOUT)

    def free(event_set: Any) -> int:
        address = address_of(event_set)
        if address not in sets:
            return _INVALID
        del sets[address]
        return 0

    return {
        "nvmlEventSetCreate": create,
        "nvmlDeviceGetSupportedEventTypes": handles.on_device(supported),
        "nvmlDeviceRegisterEvents": handles.on(register),
        "nvmlEventSetWait_v2": wait,
        "nvmlEventSetFree": free,
    }
