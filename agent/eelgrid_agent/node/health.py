"""Device health: driver events and slow readings become node events, XID counts and cordons.

XIDs 13, 31, 43, 45, 68 and 109 are application faults and must not drain a node. Counters over the life of a part
matter by their change; the first observation only sets the baseline.
"""

from collections.abc import Mapping

from eelgrid_agent.devices.port import DeviceEvent, DeviceEventKind, Missing, ReadingValue
from eelgrid_protos.messages import NodeEvent, NodeEventKind, Reading

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
MAX_XIDS = 512
_ACTIONS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer-to-peer traffic",
    4: "drain the node, then reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}
# Rises that are errors, with what they count.
_COUNTS = {
    Reading.ECC_UNCORRECTED_VOLATILE: "uncorrectable memory errors",
    Reading.REMAPPED_ROWS_UNCORRECTABLE: "memory rows remapped after uncorrectable errors",
}
_HUNG = (
    "a call to the device did not come back; it is asked now and then only: reset it, or reboot the node, if it lasts"
)
# States that call for action while they last.
_STATES = {
    Reading.ROW_REMAP_PENDING: "memory rows wait to be remapped; reset the GPU when it is free",
    Reading.ROW_REMAP_FAILED: "remapping memory rows failed; replace the GPU",
}


class HealthMonitor:
    """The devices of one node."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, Reading], float] = {}
        self._hung: set[str] = set()
        # How often each XID came, and when last, wall clock; by device and code.
        self.xids: dict[tuple[str, int], int] = {}
        self.xid_last_ns: dict[tuple[str, int], int] = {}

    def on_device_events(self, events: tuple[DeviceEvent, ...], *, wall_ns: int) -> tuple[NodeEvent, ...]:
        """What the driver announced, as events for the controller."""
        told = []
        for event in events:
            if event.kind is DeviceEventKind.XID:
                told.append(self._xid(event, wall_ns))
            elif event.kind in (DeviceEventKind.ECC_DOUBLE_BIT, DeviceEventKind.GPU_UNAVAILABLE):
                detail = event.kind.value.replace("_", " ")
                told.append(_event(NodeEventKind.HEALTH, event.gpu_uuid, f"the driver announced: {detail}", wall_ns))
            elif event.kind is DeviceEventKind.HUNG:
                self._hung.add(event.gpu_uuid)
                told.append(_event(NodeEventKind.GPU_HUNG, event.gpu_uuid, _HUNG, wall_ns))
            elif event.kind is DeviceEventKind.ANSWERS:
                self._hung.discard(event.gpu_uuid)
                told.append(_event(NodeEventKind.HEALTH, event.gpu_uuid, "over: the device answers again", wall_ns))
            elif event.kind is DeviceEventKind.MIG_CHANGED:
                detail = "the driver announced another MIG layout"
                told.append(_event(NodeEventKind.LAYOUT_CHANGED, event.gpu_uuid, detail, wall_ns))
        return tuple(told)

    def cordons(self) -> Mapping[str, str]:
        """Devices that should take no new work, and why: those that hang, and what only a reset or a repair can mend."""
        found: dict[str, str] = dict.fromkeys(self._hung, _HUNG)
        for (uuid, reading), value in self._last.items():
            if value and reading is Reading.RECOVERY_ACTION:
                found[uuid] = _describe_change(reading, 0.0, value)
            elif value and reading is Reading.ROW_REMAP_FAILED:
                found.setdefault(uuid, _STATES[reading])
        return found

    def _xid(self, event: DeviceEvent, wall_ns: int) -> NodeEvent:
        key = (event.gpu_uuid, event.code)
        if key in self.xids or len(self.xids) < MAX_XIDS:
            self.xids[key] = self.xids.get(key, 0) + 1
            self.xid_last_ns[key] = wall_ns
        fault = "an application's error" if event.code in APPLICATION_XIDS else "an error of device, driver or bus"
        where = "" if event.gpu_instance_id is None else f" in GPU instance {event.gpu_instance_id}"
        return _event(NodeEventKind.XID, event.gpu_uuid, f"XID {event.code}{where}: {fault}", wall_ns)

    def on_extended_readings(
        self, gpus: Mapping[str, Mapping[Reading, ReadingValue]], *, wall_ns: int
    ) -> tuple[NodeEvent, ...]:
        """What the slow readings reveal against the look before."""
        told = []
        for uuid, values in gpus.items():
            for reading in (*_COUNTS, *_STATES, Reading.RECOVERY_ACTION):
                value = values.get(reading)
                if value is None or isinstance(value, Missing):
                    continue
                before = self._last.get((uuid, reading))
                self._last[uuid, reading] = value
                detail = _describe_change(reading, before, value)
                if detail:
                    told.append(_event(NodeEventKind.HEALTH, uuid, detail, wall_ns))
        for key in [key for key in self._last if key[0] not in gpus]:
            del self._last[key]
        return tuple(told)


def _describe_change(reading: Reading, before: float | None, value: float) -> str:
    """The sentence for this change, empty where there is nothing to tell."""
    if reading in _COUNTS:
        rise = 0.0 if before is None else value - before
        return f"{rise:.0f} new {_COUNTS[reading]}, {value:.0f} in all" if rise > 0 else ""
    if value == (before or 0.0):
        return ""
    if reading in _STATES:
        return _STATES[reading] if value else f"over: {_STATES[reading].partition(';')[0]}"
    if not value:
        return "the driver asks for no recovery any more"
    action = _ACTIONS.get(int(value), f"recovery action {value:.0f}")
    return f"the driver asks to {action}" if int(value) in _ACTIONS else f"the driver asks for {action}"


def _event(kind: NodeEventKind, uuid: str, detail: str, wall_ns: int) -> NodeEvent:
    return NodeEvent(kind=kind, time_ns=max(0, wall_ns), gpu_uuid=uuid, detail=detail)
