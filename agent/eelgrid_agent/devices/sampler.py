"""The sampler: turns consecutive readings of a node's devices into ticks, and ticks into sample batches.

It defines what readings mean over time: energy that never falls, times that never fall within a batch, absences
instead of numbers, and the events that a change of readings reveals. Time is an argument, and where readings come from
and where ticks go is left to the caller.

ENERGY_J is anchored at the last counter value seen and the total at that moment: a later counter value gives the exact
total over any gap. While the counter is missing, power is integrated by the trapezoid rule over the monotonic clock;
when the counter returns, the anchor corrects the estimate, and the total waits rather than fall. A counter that fell
was reset with its driver: the interval is estimated from power, and is at least what the new counter holds. A gap too
long to integrate is left out; its cell is absent and its seconds are summed in `uncounted_s`. A clock that was set back
opens a new batch, so that the ticks on both sides keep their times.

Extended readings are expensive or rarely changing values, read every few seconds for metrics, attribution and health.
The controller receives them less often, as extra columns of an ordinary tick, which then forms a batch of its own. A
reading that no device offers has no column.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from itertools import chain

from eelgrid_agent.devices.port import (
    FAST_READINGS,
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
from eelgrid_protos.messages import (
    GPUS_PER_NODE_MOST,
    READING_RANGES,
    Absence,
    AbsenceReason,
    Column,
    Inventory,
    NodeEvent,
    NodeEventKind,
    Reading,
    SampleBatch,
)
from eelgrid_protos.values import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendedReadings:
    """Extended readings of every device and the host, by UUID; a device that could not be read is left out."""

    monotonic_ns: int
    wall_ns: int
    gpus: Mapping[str, Mapping[Reading, ReadingValue]] = field(default_factory=dict)
    instances: Mapping[str, tuple[InstanceReadings, ...]] = field(default_factory=dict)
    # None where the driver does not tell who holds the device.
    processes: Mapping[str, tuple[GpuProcess, ...] | None] = field(default_factory=dict)
    events: tuple[DeviceEvent, ...] = ()
    host: Mapping[Reading, ReadingValue] = field(default_factory=dict)


class ExtendedReader:
    """Reads all expensive values of one node, device by device; each read may block."""

    def __init__(self, device: DevicePort) -> None:
        self._device = device
        self._gpus: dict[str, Mapping[Reading, ReadingValue]] = {}
        self._instances: dict[str, tuple[InstanceReadings, ...]] = {}
        self._processes: dict[str, tuple[GpuProcess, ...] | None] = {}

    def read_gpu(self, uuid: str) -> None:
        """Reads one device; one that does not answer is left out, as quick looks tell of a lost one."""
        try:
            self._gpus[uuid] = self._device.read_slow(uuid)
            self._instances[uuid] = self._device.read_instances(uuid)
            self._processes[uuid] = _processes(self._device, uuid)
        except DeviceError:
            return

    def finish(self) -> ExtendedReadings:
        """Returns what was read, with the events since the last time. Times and host are for the caller to add."""
        try:
            events = self._device.take_events()
        except DeviceError:
            events = ()
        return ExtendedReadings(
            monotonic_ns=0,
            wall_ns=0,
            gpus=self._gpus,
            instances=self._instances,
            processes=self._processes,
            events=events,
        )


def read_extended_readings(device: DevicePort, uuids: Iterable[str]) -> ExtendedReadings:
    """Reads all expensive values; may block. Times and host are for the caller to add."""
    reader = ExtendedReader(device)
    for uuid in uuids:
        reader.read_gpu(uuid)
    return reader.finish()


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


GPU_READINGS = tuple(reading for reading in FAST_READINGS if reading not in EXTENDED_COLUMN_READINGS)
HOST_READINGS = (Reading.HOST_CPU_UTILIZATION_RATIO, Reading.HOST_MEMORY_USED_BYTES)

# Longest stretch over which two power readings may stand for what lies between.
GAP_S_LEAST = 10.0
GAP_INTERVALS = 3.0
# A jump of wall against monotonic clock above this is a step; NTP slews 0.5 ms a second.
CLOCK_STEP_NS = 500_000_000
# Devices present and departed whose totals are kept.
METERS_MOST = 2 * GPUS_PER_NODE_MOST
# A counter may be some refresh periods (about 100 ms) behind the power that fed it.
COUNTER_LAG_S = 1.0

_POWER_W_MOST = READING_RANGES[Reading.POWER_W].high
_COUNTER_J_MOST = READING_RANGES[Reading.ENERGY_J].high
_WALL_NS_MOST = 2**63 - 1
_ENERGY_ROW = GPU_READINGS.index(Reading.ENERGY_J)
_DEVICE_ROWS = tuple(
    (row, reading, READING_RANGES[reading].low, READING_RANGES[reading].high)
    for row, reading in enumerate(GPU_READINGS)
    if reading is not Reading.ENERGY_J
)
_NOTHING = ExtendedColumns()
_NOT_SAMPLED = Missing(AbsenceReason.NOT_SAMPLED)
_IMPLAUSIBLE = Missing(AbsenceReason.IMPLAUSIBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """Readings of every device and the host at one moment; GPUs in the order of the inventory."""

    wall_ns: int
    monotonic_ns: int
    generation: int
    gpus: Sequence[tuple[str, RawReadings]]
    host: Mapping[Reading, ReadingValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTick:
    """One moment of a batch; values row by row as in GPU_READINGS, and in a row device by device.

    Arrays keep a spooled tick at 8 bytes a value.
    """

    time_ns: int
    generation: int
    gpus: int
    gpu_values: "array[float]"
    gpu_absences: tuple[tuple[int, AbsenceReason], ...]
    host_values: "array[float]"
    host_absences: tuple[tuple[int, AbsenceReason], ...]
    opens_batch: bool = False
    # Set on the tick that takes a slow look along; it is a batch of its own.
    riding: ExtendedColumns | None = None

    def reading(self, reading: Reading, gpu: int) -> float | None:
        """One GPU's value, or None where it is absent."""
        position = GPU_READINGS.index(reading) * self.gpus + gpu
        if any(position == absent for absent, _ in self.gpu_absences):
            return None
        return self.gpu_values[position]


@dataclass(frozen=True, slots=True, kw_only=True)
class TickObservation:
    """A tick and what the look revealed."""

    tick: SampleTick
    events: tuple[NodeEvent, ...]


class _EnergyMeter:
    """Joules of one GPU since the agent began to count; see the theory above."""

    __slots__ = (
        "_anchor_counter_j",
        "_anchor_ns",
        "_anchor_total_j",
        "_power_ns",
        "_power_w",
        "total_j",
        "uncounted_s",
    )

    def __init__(self) -> None:
        self.total_j = 0.0
        self.uncounted_s = 0.0
        self._anchor_counter_j: float | None = None
        self._anchor_total_j = 0.0
        self._anchor_ns = 0
        self._power_w: float | None = None
        self._power_ns = 0

    def observe(
        self, counter: ReadingValue, power: ReadingValue, now_ns: int, gap_s_most: float
    ) -> tuple[ReadingValue, str]:
        """The total now, or why it is unknown; and what befell the counter, if anything did."""
        integrated_j, gap_s = self._integrate(power, now_ns, gap_s_most)
        if isinstance(counter, Missing):
            if gap_s:
                self.uncounted_s += gap_s
                return _NOT_SAMPLED, ""
            if isinstance(power, Missing):
                return counter, ""
            self.total_j += integrated_j
            return self.total_j, ""
        befell = ""
        if self._anchor_counter_j is None:
            self.total_j += integrated_j
            exact_j = self.total_j
        else:
            rise_j = counter - self._anchor_counter_j
            elapsed_s = (now_ns - self._anchor_ns) / 1e9
            possible_j = _POWER_W_MOST * (elapsed_s + COUNTER_LAG_S)
            if 0.0 <= rise_j <= possible_j:
                exact_j = self._anchor_total_j + rise_j
            else:
                befell = f"the energy counter went from {self._anchor_counter_j:.3f} J to {counter:.3f} J in {elapsed_s:.1f} s"
                exact_j = self.total_j + integrated_j
                if rise_j < 0.0 and counter <= possible_j:
                    exact_j = max(exact_j, self._anchor_total_j + counter)
                self.uncounted_s += gap_s
            self.total_j = max(self.total_j, exact_j)
        self._anchor_counter_j, self._anchor_total_j, self._anchor_ns = counter, exact_j, now_ns
        return self.total_j, befell

    def _integrate(self, power: ReadingValue, now_ns: int, gap_s_most: float) -> tuple[float, float]:
        """Joules since the last power reading, and the seconds that are too many to integrate."""
        if isinstance(power, Missing):
            return 0.0, 0.0
        before_w, before_ns = self._power_w, self._power_ns
        self._power_w, self._power_ns = power, now_ns
        if before_w is None:
            return 0.0, 0.0
        elapsed_s = (now_ns - before_ns) / 1e9
        if elapsed_s > gap_s_most:
            return 0.0, elapsed_s
        return max(elapsed_s, 0.0) * (before_w + power) / 2.0, 0.0


class Sampler:
    """The readings of one node over time."""

    def __init__(self, *, sample_interval_s: float) -> None:
        self._meters: dict[str, _EnergyMeter] = {}
        self._lost: set[str] = set()
        self._last_time_ns = 0
        self._clock_offset_ns: int | None = None
        self._gap_s_most = GAP_S_LEAST
        # Device-seconds whose energy is in no total.
        self.uncounted_s = 0.0
        self.set_interval(sample_interval_s)

    def set_interval(self, sample_interval_s: float) -> None:
        """Longer intervals may be integrated over longer gaps."""
        self._gap_s_most = max(GAP_S_LEAST, GAP_INTERVALS * sample_interval_s)

    def observe(self, look: NodeSample, *, riding: ExtendedColumns | None = None) -> TickObservation:
        """Returns the tick of this sample and the events since the one before.

        The columns of `riding` are added to the tick.
        """
        events: list[NodeEvent] = []
        time_ns, opens_batch = self._time(look, events)
        gpus = len(look.gpus)
        values = array("d", bytes(8 * gpus * len(GPU_READINGS)))
        absences: list[tuple[int, AbsenceReason]] = []
        for column, (uuid, raw) in enumerate(look.gpus):
            lost = answered = False
            power: ReadingValue = _NOT_SAMPLED
            for row, reading, low, high in _DEVICE_ROWS:
                value = raw.values.get(reading, _NOT_SAMPLED)
                if not isinstance(value, Missing):
                    answered = True
                    if low <= value <= high:
                        values[row * gpus + column] = value
                    else:  # also NaN, which compares to nothing
                        value = _IMPLAUSIBLE
                if isinstance(value, Missing):
                    absences.append((row * gpus + column, value.reason))
                    lost = lost or value.reason is AbsenceReason.GPU_LOST
                if row == 0:
                    power = value
            counter = raw.energy_counter_j
            if not isinstance(counter, Missing) and not 0.0 <= counter <= _COUNTER_J_MOST:
                counter = _IMPLAUSIBLE
            meter = self._meters.get(uuid)
            if meter is None:
                meter = self._meters[uuid] = _EnergyMeter()
            uncounted_s = meter.uncounted_s
            energy, befell = meter.observe(counter, power, look.monotonic_ns, self._gap_s_most)
            self.uncounted_s += meter.uncounted_s - uncounted_s
            if isinstance(energy, Missing):
                absences.append((_ENERGY_ROW * gpus + column, energy.reason))
            else:
                values[_ENERGY_ROW * gpus + column] = min(energy, _COUNTER_J_MOST)
            if befell:
                events.append(_event(NodeEventKind.COUNTER_RESET, time_ns, uuid, befell))
            # A device that times out neither is lost nor came back.
            if lost and uuid not in self._lost:
                self._record_transition(uuid, time_ns, events, lost=True)
            elif self._lost and answered and not lost and uuid in self._lost:
                self._record_transition(uuid, time_ns, events, lost=False)
        self._on_departure(look, events, time_ns)
        host_values, host_absences = _host_row(look.host)
        tick = SampleTick(
            time_ns=time_ns,
            generation=look.generation,
            gpus=gpus,
            gpu_values=values,
            gpu_absences=tuple(absences),
            host_values=host_values,
            host_absences=host_absences,
            opens_batch=opens_batch,
            riding=riding,
        )
        return TickObservation(tick=tick, events=tuple(events))

    @property
    def uncounted_by_gpu(self) -> Mapping[str, float]:
        """Seconds of each device whose energy is in no total."""
        return {uuid: meter.uncounted_s for uuid, meter in self._meters.items()}

    @property
    def lost_gpus(self) -> frozenset[str]:
        """Devices that answer nothing now."""
        return frozenset(self._lost)

    def _record_transition(self, uuid: str, time_ns: int, events: list[NodeEvent], *, lost: bool) -> None:
        if lost:
            self._lost.add(uuid)
            events.append(_event(NodeEventKind.GPU_LOST, time_ns, uuid, "the device answers nothing any more"))
        else:
            self._lost.discard(uuid)
            events.append(_event(NodeEventKind.GPU_RETURNED, time_ns, uuid, "the device answers again"))

    def _on_departure(self, look: NodeSample, events: list[NodeEvent], time_ns: int) -> None:
        """A device that left the inventory is lost; its meter waits for it, within a bound, so that no total falls."""
        if len(self._meters) == len(look.gpus):
            return
        present = {uuid for uuid, _ in look.gpus}
        for uuid in self._meters.keys() - present - self._lost:
            self._record_transition(uuid, time_ns, events, lost=True)
        for uuid in list(self._meters.keys() - present)[: max(0, len(self._meters) - METERS_MOST)]:
            del self._meters[uuid]
            self._lost.discard(uuid)

    def _time(self, look: NodeSample, events: list[NodeEvent]) -> tuple[int, bool]:
        """The tick's time, and whether the clock was set back before it."""
        wall_ns = min(max(look.wall_ns, 0), _WALL_NS_MOST)
        offset_ns = look.wall_ns - look.monotonic_ns
        before_ns, self._clock_offset_ns = self._clock_offset_ns, offset_ns
        step_ns = 0 if before_ns is None else offset_ns - before_ns
        stepped = abs(step_ns) > CLOCK_STEP_NS
        if stepped:
            direction = "ahead" if step_ns > 0 else "back"
            detail = f"the wall clock was set {direction} by {abs(step_ns) / 1e9:.3f} s"
            events.append(_event(NodeEventKind.CLOCK_STEP, wall_ns, "", detail))
        back = wall_ns < self._last_time_ns
        if back and not stepped:
            wall_ns, back = self._last_time_ns, False
        self._last_time_ns = wall_ns
        return wall_ns, back


def _host_row(host: Mapping[Reading, ReadingValue]) -> "tuple[array[float], tuple[tuple[int, AbsenceReason], ...]]":
    values = array("d", bytes(8 * len(HOST_READINGS)))
    absences = []
    for row, reading in enumerate(HOST_READINGS):
        value = host.get(reading, _NOT_SAMPLED)
        if not isinstance(value, Missing):
            bounds = READING_RANGES[reading]
            if bounds.low <= value <= bounds.high:
                values[row] = value
                continue
            value = _IMPLAUSIBLE
        absences.append((row, value.reason))
    return values, tuple(absences)


def _event(kind: NodeEventKind, time_ns: int, uuid: str, detail: str) -> NodeEvent:
    return NodeEvent(kind=kind, time_ns=time_ns, gpu_uuid=uuid, detail=detail)


def build_batch(ticks: Sequence[SampleTick], *, sequence: int, dropped_ticks: int) -> SampleBatch:
    """Ticks of one generation as one batch; times must not fall."""
    gpus = ticks[0].gpus
    gpu_columns = tuple(
        Column(
            reading=reading,
            values=tuple(chain.from_iterable(tick.gpu_values[row * gpus : (row + 1) * gpus] for tick in ticks)),
            absences=_absences([tick.gpu_absences for tick in ticks], row, gpus),
        )
        for row, reading in enumerate(GPU_READINGS)
    )
    host_columns = tuple(
        Column(
            reading=reading,
            values=tuple(tick.host_values[row] for tick in ticks),
            absences=_absences([tick.host_absences for tick in ticks], row, 1),
        )
        for row, reading in enumerate(HOST_READINGS)
    )
    riding = ticks[0].riding if len(ticks) == 1 and ticks[0].riding is not None else _NOTHING
    return SampleBatch(
        sequence=sequence,
        inventory_generation=ticks[0].generation,
        time_ns=tuple(tick.time_ns for tick in ticks),
        gpu_columns=gpu_columns + riding.gpus if gpus else (),
        host_columns=host_columns + riding.host,
        instance_columns=riding.instances,
        dropped_ticks=dropped_ticks,
    )


def _absences(ticks: Sequence[tuple[tuple[int, AbsenceReason], ...]], row: int, width: int) -> tuple[Absence, ...]:
    """The absent cells of one row over all ticks, grouped by reason."""
    if not any(ticks):
        return ()
    cells: dict[AbsenceReason, list[int]] = {}
    for index, absences in enumerate(ticks):
        for position, reason in absences:
            if row * width <= position < (row + 1) * width:
                cells.setdefault(reason, []).append(index * width + position - row * width)
    return tuple(Absence(reason=reason, cells=tuple(found)) for reason, found in cells.items())
