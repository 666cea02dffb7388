"""What the driver announces by itself: XIDs, memory errors, MIG changes, and that a device is to be recovered.

One event set for all devices of a session; each is registered for what it
supports, and a driver or part that announces nothing is passed over. Waiting
takes no time. What is pending when the session ends is kept for the next
call, and what comes before a device is registered is lost, as NVML has it.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import pynvml

from eelgrid_agent.device import DeviceEvent, DeviceEventKind

__all__ = ["Events"]

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


class Events:
    """The event set of a session."""

    def __init__(self) -> None:
        self.listening = False
        self._set: Any = None
        self._uuids: dict[int, str] = {}
        self._kept: list[DeviceEvent] = []

    def listen(self, handles: Mapping[str, Any]) -> None:
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

    def take(self) -> tuple[DeviceEvent, ...]:
        """What was announced since the call before."""
        self._drain()
        taken, self._kept = tuple(self._kept), []
        return taken

    def end(self) -> None:
        """The session ends: what is pending is kept, the set is given back."""
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

    def forget(self) -> None:
        """Nobody listens any more."""
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
