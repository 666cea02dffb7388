"""Processes with a context on a device, by NVML's process lists.

The lists cost milliseconds. Drivers of branch 530 and early 535 write entries of 32 bytes instead of 24 under the
same symbol; the symbols next to it tell them apart. A process's SM share is the mean of the samples since the last
read; there is none on the first read or under MIG.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml

from eelgrid_agent.devices.nvml.session import SILENT_REASONS, get_absence_reason
from eelgrid_agent.devices.port import GpuProcess, ProcessKind

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
            for entry in _list_processes(handle, kind):
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


def _list_processes(handle: Any, kind: ProcessKind) -> list[GpuProcess]:
    """One list; raises NVMLError."""
    newest, older = (_symbol(name) for name in _SYMBOLS[kind])
    call, layout = newest or older, pynvml.c_nvmlProcessInfo_v2_t
    if call is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    if newest is not None and _entries_are_wide():
        layout = _Wide
    return [_entry(raw, kind) for raw in _fill_buffer(call, handle, layout)]


def _fill_buffer(call: Callable[..., int], handle: Any, layout: Any) -> list[Any]:
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
