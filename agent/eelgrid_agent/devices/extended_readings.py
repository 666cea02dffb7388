"""Extended readings: expensive or rarely changing values of all devices, and their columns in a tick.

Metrics, attribution and health use them every few seconds. The controller receives them less often, as extra columns
of an ordinary tick that then forms a batch of its own. A reading that no device offers has no column.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from eelgrid_agent.devices.port import (
    INSTANCE_READINGS,
    SLOW_READINGS,
    DeviceError,
    DeviceEvent,
    DevicePort,
    GpuProcess,
    InstanceReadings,
    Missing,
    NoPermission,
    NotSupported,
    RawReadings,
    ReadingValue,
)
from eelgrid_protos.messages import READING_RANGES, Absence, AbsenceReason, Column, Inventory, Reading

# Quick readings that the controller needs only now and then ride with the slow ones.
EXTENDED_COLUMN_READINGS = (Reading.POWER_AVERAGE_W, Reading.MEMORY_UTILIZATION_RATIO, *SLOW_READINGS)
SLOW_HOST_READINGS = (
    Reading.HOST_CPU_ENERGY_J,
    Reading.HOST_MEMORY_ENERGY_J,
    Reading.HOST_DISK_READ_BYTES,
    Reading.HOST_DISK_WRITTEN_BYTES,
    Reading.HOST_NETWORK_RECEIVED_BYTES,
    Reading.HOST_NETWORK_SENT_BYTES,
)

_NOT_SAMPLED = Missing(AbsenceReason.NOT_SAMPLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendedReadings:
    """What every device and the host said, by UUID; a device that could not be asked is left out."""

    monotonic_ns: int
    wall_ns: int
    gpus: Mapping[str, Mapping[Reading, ReadingValue]] = field(default_factory=dict)
    instances: Mapping[str, tuple[InstanceReadings, ...]] = field(default_factory=dict)
    # None where the driver does not tell who holds the device.
    processes: Mapping[str, tuple[GpuProcess, ...] | None] = field(default_factory=dict)
    events: tuple[DeviceEvent, ...] = ()
    host: Mapping[Reading, ReadingValue] = field(default_factory=dict)


def read_extended_readings(device: DevicePort, uuids: Iterable[str]) -> ExtendedReadings:
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
    return ExtendedReadings(
        monotonic_ns=0, wall_ns=0, gpus=gpus, instances=instances, processes=processes, events=events
    )


def _processes(device: DevicePort, uuid: str) -> tuple[GpuProcess, ...] | None:
    try:
        return device.processes(uuid)
    except (NoPermission, NotSupported):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendedColumns:
    """Columns that one tick carries besides its own."""

    gpus: tuple[Column, ...] = ()
    instances: tuple[Column, ...] = ()
    host: tuple[Column, ...] = ()


def build_extended_columns(
    look: ExtendedReadings, quick: Mapping[str, RawReadings], inventory: Inventory
) -> ExtendedColumns:
    """The slow look as columns in the order of the inventory."""
    rows: list[Mapping[Reading, ReadingValue]] = []
    for gpu in inventory.gpus:
        raw = quick.get(gpu.uuid)
        rows.append({**(raw.values if raw else {}), **look.gpus.get(gpu.uuid, {})})
    parts: list[Mapping[Reading, ReadingValue]] = []
    for gpu in inventory.gpus:
        seen = {found.gpu_instance_id: found.values for found in look.instances.get(gpu.uuid, ())}
        parts.extend(seen.get(instance.id, {}) for instance in gpu.gpu_instances)
    return ExtendedColumns(
        gpus=_columns(EXTENDED_COLUMN_READINGS, rows),
        instances=_columns(INSTANCE_READINGS, parts),
        host=_columns(SLOW_HOST_READINGS, [look.host]),
    )


def _columns(readings: Iterable[Reading], rows: list[Mapping[Reading, ReadingValue]]) -> tuple[Column, ...]:
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
