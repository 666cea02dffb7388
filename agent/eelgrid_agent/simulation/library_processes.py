"""The process lists of the simulated library, in the layout of the simulated driver.

Drivers of branch 530 and of early 535 write entries of 32 bytes under the
symbol under which others write 24. As the C library does, this one writes its
own layout, whatever the caller took it for; only past the end of the caller's
memory it does not write.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import pynvml

from eelgrid_agent.device import ProcessKind
from eelgrid_agent.simulation.handles import Handles, Symbol, Target, behind
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.sensors import Client
from eelgrid_protos.messages import AccessLevel

__all__ = ["process_symbols"]

_INVALID = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
_NOT_SUPPORTED = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
_NO_PERMISSION = int(pynvml.NVML_ERROR_NO_PERMISSION)
_TOO_SMALL = int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
_NOT_FOUND = int(pynvml.NVML_ERROR_NOT_FOUND)
_NO_INSTANCE = 0xFFFF_FFFF
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


def process_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    """All of them, by name."""
    version = tuple(int(part) for part in node.spec.driver_version.split(".")[:2] if part.isdigit())
    layout = _WideEntry if (530,) <= version < _NARROW_AGAIN else _Entry

    def listing(kind: ProcessKind, layout: type[ctypes.Structure]) -> Symbol:
        def running(target: Target, count: Any, buffer: Any) -> int:
            gpu, instance = target.gpu, target.instance
            if instance is not None and not target.mig_device:
                return _INVALID
            if instance is None and gpu.mig.enabled and not node.operations.may(AccessLevel.MIG_MONITOR):
                return _NO_PERMISSION
            clients = [client for client in node.sensors(gpu).clients() if client.kind is kind]
            if instance is not None:
                clients = [client for client in clients if client.gpu_instance_id == instance.id]
            return _write(clients, layout, behind(count), buffer)

        return handles.on(running)

    def confidential_memory(_target: Target, ref: Any) -> int:
        info = behind(ref)
        info.protectedMemSizeKib = info.unprotectedMemSizeKib = 0
        return 0

    def details(_target: Target, _ref: Any) -> int:
        return _NOT_SUPPORTED

    symbols = {
        "nvmlDeviceGetComputeRunningProcesses_v2": listing(ProcessKind.COMPUTE, _Entry),
        "nvmlDeviceGetGraphicsRunningProcesses_v2": listing(ProcessKind.GRAPHICS, _Entry),
        "nvmlDeviceGetComputeRunningProcesses_v3": listing(ProcessKind.COMPUTE, layout),
        "nvmlDeviceGetGraphicsRunningProcesses_v3": listing(ProcessKind.GRAPHICS, layout),
        "nvmlDeviceGetConfComputeMemSizeInfo": handles.on(confidential_memory),
        "nvmlDeviceGetProcessUtilization": handles.on_device(_utilization(node)),
    }
    return symbols if version < _NARROW_AGAIN else {**symbols, _DETAILS: handles.on(details)}


def _utilization(node: SimulatedNode) -> Symbol:
    def utilization(gpu: Any, samples: Any, count: Any, last_seen: Any) -> int:
        if gpu.mig.enabled:
            return _NOT_SUPPORTED
        sensors, number = node.sensors(gpu), behind(count)
        clients, sampled_us = sensors.clients(), sensors.processes_sampled_us(node.monotonic_ns())
        if not clients or sampled_us <= last_seen.value:
            return _NOT_FOUND
        if samples is None or number.value < len(clients):
            number.value = len(clients)
            return _TOO_SMALL
        for sample, client in zip(behind(samples), clients, strict=False):
            sample.pid, sample.timeStamp, sample.smUtil = client.pid, sampled_us, client.sm_percent
        number.value = len(clients)
        return 0

    return utilization


def _write(clients: Sequence[Client], layout: type[ctypes.Structure], count: Any, buffer: Any) -> int:
    room, count.value = count.value, len(clients)
    if not clients:
        return 0
    if buffer is None or room < len(clients):
        return _TOO_SMALL
    memory = behind(buffer)
    entries = bytes((layout * len(clients))(*(
        layout(
            client.pid, client.memory_bytes,
            _NO_INSTANCE if client.gpu_instance_id is None else client.gpu_instance_id,
            _NO_INSTANCE if client.compute_instance_id is None else client.compute_instance_id,
        )
        for client in clients
    )))  # fmt: skip
    ctypes.memmove(memory, entries, min(len(entries), ctypes.sizeof(memory)))
    return 0
