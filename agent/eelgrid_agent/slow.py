"""The slow look: what is dear to ask or seldom changes, and how it rides to the controller.

Owns what one slow look holds and its columns. Must not know who asks or when.

Theory. A slow look is for this machine first: metrics, attribution and health
are made of it every few seconds. The controller gets one now and then, as
extra columns of an ordinary tick, which then is a batch of its own, since all
columns of a batch have its ticks. A reading that no device offers has no
column: absence everywhere for one lasting reason is not worth the bytes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from eelgrid_agent.device import (
    INSTANCE_READINGS,
    SLOW_READINGS,
    Device,
    DeviceError,
    DeviceEvent,
    GpuProcess,
    InstanceReadings,
    Missing,
    NoPermission,
    NotSupported,
    RawReadings,
    Value,
)
from eelgrid_protos.messages import READING_RANGES, Absence, AbsenceReason, Column, Inventory, Reading

__all__ = ["RIDING_READINGS", "SLOW_HOST_READINGS", "RidingColumns", "SlowLook", "riding_columns", "take_slow_look"]

# Quick readings that the controller needs only now and then ride with the slow ones.
RIDING_READINGS = (Reading.POWER_AVERAGE_W, Reading.MEMORY_UTILIZATION_RATIO, *SLOW_READINGS)
SLOW_HOST_READINGS = (
    Reading.HOST_CPU_ENERGY_J, Reading.HOST_MEMORY_ENERGY_J, Reading.HOST_DISK_READ_BYTES,
    Reading.HOST_DISK_WRITTEN_BYTES, Reading.HOST_NETWORK_RECEIVED_BYTES, Reading.HOST_NETWORK_SENT_BYTES,
)  # fmt: skip

_NOT_SAMPLED = Missing(AbsenceReason.NOT_SAMPLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLook:
    """What every device and the host said, by UUID; a device that could not be asked is left out."""

    monotonic_ns: int
    wall_ns: int
    gpus: Mapping[str, Mapping[Reading, Value]] = field(default_factory=dict)
    instances: Mapping[str, tuple[InstanceReadings, ...]] = field(default_factory=dict)
    # None where the driver does not tell who holds the device.
    processes: Mapping[str, tuple[GpuProcess, ...] | None] = field(default_factory=dict)
    events: tuple[DeviceEvent, ...] = ()
    host: Mapping[Reading, Value] = field(default_factory=dict)


def take_slow_look(device: Device, uuids: Iterable[str]) -> SlowLook:
    """Asks everything that is dear; may block. Times and host are the caller's to add."""
    gpus, instances, processes = {}, {}, {}
    for uuid in uuids:
        try:
            gpus[uuid] = device.read_slow(uuid)
            instances[uuid] = device.read_instances(uuid)
            processes[uuid] = _processes(device, uuid)
        except DeviceError:
            # Quick looks tell of a lost device; here it is only left out.
            continue
    try:
        events = device.take_events()
    except DeviceError:
        events = ()
    return SlowLook(monotonic_ns=0, wall_ns=0, gpus=gpus, instances=instances, processes=processes, events=events)


def _processes(device: Device, uuid: str) -> tuple[GpuProcess, ...] | None:
    try:
        return device.processes(uuid)
    except (NoPermission, NotSupported):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RidingColumns:
    """Columns that one tick carries besides its own."""

    gpus: tuple[Column, ...] = ()
    instances: tuple[Column, ...] = ()
    host: tuple[Column, ...] = ()


def riding_columns(look: SlowLook, quick: Mapping[str, RawReadings], inventory: Inventory) -> RidingColumns:
    """The slow look as columns in the order of the inventory."""
    rows: list[Mapping[Reading, Value]] = []
    for gpu in inventory.gpus:
        raw = quick.get(gpu.uuid)
        rows.append({**(raw.values if raw else {}), **look.gpus.get(gpu.uuid, {})})
    parts: list[Mapping[Reading, Value]] = []
    for gpu in inventory.gpus:
        seen = {found.gpu_instance_id: found.values for found in look.instances.get(gpu.uuid, ())}
        parts.extend(seen.get(instance.id, {}) for instance in gpu.gpu_instances)
    return RidingColumns(
        gpus=_columns(RIDING_READINGS, rows),
        instances=_columns(INSTANCE_READINGS, parts),
        host=_columns(SLOW_HOST_READINGS, [look.host]),
    )


def _columns(readings: Iterable[Reading], rows: list[Mapping[Reading, Value]]) -> tuple[Column, ...]:
    columns = []
    for reading in readings:
        bounds = READING_RANGES[reading]
        values: list[float] = []
        absences: dict[AbsenceReason, list[int]] = {}
        for cell, row in enumerate(rows):
            value = row.get(reading, _NOT_SAMPLED)
            if not isinstance(value, Missing) and not bounds.low <= value <= bounds.high:
                value = Missing(AbsenceReason.IMPLAUSIBLE)
            if isinstance(value, Missing):
                absences.setdefault(value.reason, []).append(cell)
                value = 0.0
            values.append(value)
        if len(absences.get(AbsenceReason.NOT_SUPPORTED, ())) + len(absences.get(AbsenceReason.NOT_SAMPLED, ())) < len(
            rows
        ):
            missing = tuple(Absence(reason=reason, cells=tuple(cells)) for reason, cells in absences.items())
            columns.append(Column(reading=reading, values=tuple(values), absences=missing))
    return tuple(columns)
