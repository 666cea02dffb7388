"""Telemetry: the newest tick of every node, lost ticks, applied plans, and sums of fresh power.

Owns the sequence of each agent's batches, the rule of what counts as fresh, and the newest power of all nodes as
arrays. Must not know streams, clocks (times are arguments: `now_s` is monotonic, `now_ns` is wall time) or placement.

Theory: receiving must be cheap, reading may cost more. A batch is stored as received; its last tick is extracted on
first use, which for the sums is about once a second. A batch changes one node and a summary reads all of them, so
powers are written into arrays (a row is a node, a cell is a node's watts of one model) and summed by numpy. History
belongs in a time series database. Counters are in ticks. A tick is lost when the agent says so (`dropped_ticks`), or
when its batch never arrived; gaps are counted only within one incarnation of an agent, and only after its first
batch, since a restarted controller begins in the middle of a stream.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import repeat
from struct import unpack
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.errors import SequenceJump, UnknownGeneration, WrongWidth
from eelgrid_protos.messages import (
    Absence,
    AbsenceReason,
    AttemptStatus,
    Column,
    HeldDevices,
    Inventory,
    JobProgress,
    PlanApplied,
    Reading,
    SampleBatch,
)


class DeviceReport(NamedTuple):
    """The devices held on a node as its agent reported them, and the monotonic time of receipt."""

    held: HeldDevices
    at_s: float


class DeviceReports:
    """Stores the latest device report of each node; a silent node keeps its last one."""

    def __init__(self, *, monotonic_s: Callable[[], float]) -> None:
        self.newest: dict[str, DeviceReport] = {}
        self.listeners: list[Callable[[str, DeviceReport], None]] = []
        self._monotonic_s = monotonic_s

    def record_report(self, node_name: str, held: HeldDevices) -> None:
        """Stores a report of an agent."""
        report = self.newest[node_name] = DeviceReport(held, self._monotonic_s())
        for listener in self.listeners:
            listener(node_name, report)


# Jobs whose last word is kept; the oldest goes first.
PROGRESS_MOST = 10_000


class ProgressReports:
    """The newest progress that processes reported of themselves, by workload, for whoever looks at it."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, JobProgress] = OrderedDict()

    def get(self, workload_id: str) -> JobProgress | None:
        """Returns the newest report of a workload's processes."""
        return self._newest.get(workload_id)

    def record(self, status: AttemptStatus) -> None:
        """Stores what an attempt reported, unless another replica's report is newer."""
        known, progress = self._newest.get(status.workload_id), status.progress
        if progress is not None and (known is None or progress.time_ns >= known.time_ns):
            self._newest[status.workload_id] = progress
            self._newest.move_to_end(status.workload_id)
            if len(self._newest) > PROGRESS_MOST:
                self._newest.popitem(last=False)


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_LEAST = 64


class PowerReadings(NamedTuple):
    """Power of all nodes at one moment: ages by node (N,), NaN before the first tick; all else by fresh cell (C,)."""

    names: Sequence[str]
    models: Sequence[str]
    age_s: Floats
    row: Ints
    model: Ints
    power_w: Floats
    # Devices with a reading, at least one.
    gpus: Ints


class NewestPower:
    """Stores the newest power of each node in arrays; the row of a removed node is empty until a new node reuses it."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._free: list[int] = []
        self._models: list[str] = []
        self._model_ids: dict[str, int] = {}
        self._received_s = np.full(_LEAST, np.nan)
        self._time_ns = np.zeros(_LEAST, np.int64)
        # The same of the newest tick with power: other readings may come in batches of their own.
        self._read_s = np.full(_LEAST, np.nan)
        self._read_ns = np.zeros(_LEAST, np.int64)
        self._cells = 0
        self._row = np.zeros(_LEAST, np.int64)
        self._model = np.zeros(_LEAST, np.int64)
        self._power_w = np.zeros(_LEAST)
        self._gpus = np.zeros(_LEAST, np.int64)
        # By row: the cell of each model, and the cells that are free.
        self._at: list[dict[str, int]] = []
        self._spare: list[list[int]] = []

    def add_node(self, name: str) -> int:
        """Adds a node without readings; returns its row."""
        if self._free:
            row = self._free.pop()
            self._names[row] = name
            return row
        row = len(self._names)
        self._names.append(name)
        self._at.append({})
        self._spare.append([])
        if row == len(self._time_ns):
            self._received_s = np.concatenate([self._received_s, np.full(row, np.nan)])
            self._time_ns = np.concatenate([self._time_ns, np.zeros(row, np.int64)])
            self._read_s = np.concatenate([self._read_s, np.full(row, np.nan)])
            self._read_ns = np.concatenate([self._read_ns, np.zeros(row, np.int64)])
        return row

    def set_age(self, row: int, *, received_s: float, time_ns: int) -> None:
        """Notes a tick of a node without power; the power that was read before stays as old as it is."""
        self._received_s[row], self._time_ns[row] = received_s, time_ns

    def set_readings(
        self, row: int, power: Sequence[tuple[str, float, int]], *, received_s: float, time_ns: int
    ) -> None:
        """Replaces the readings of a node: (model, watts, devices read), each model once."""
        self._received_s[row], self._time_ns[row] = received_s, time_ns
        self._read_s[row], self._read_ns[row] = received_s, time_ns
        at = self._at[row]
        if len(at) != len(power) or any(model not in at for model, _, _ in power):
            self._release(row)
        for model, power_w, gpus in power:
            cell = at[model] if model in at else self._cell(row, model)
            self._power_w[cell], self._gpus[cell] = power_w, gpus

    def remove_node(self, row: int) -> None:
        """Removes a node; the next new node reuses its row."""
        self.clear_readings(row)
        self._names[row] = ""
        self._free.append(row)

    def clear_readings(self, row: int) -> None:
        """Clears the readings of a node, which have become invalid, as before the first tick."""
        self._received_s[row] = self._read_s[row] = np.nan
        self._release(row)

    def readings(self, *, now_s: float, now_ns: int, fresh_s: float) -> PowerReadings:
        """Returns ages as defined by `Telemetry.age_s`, and the cells of nodes no older than `fresh_s`."""
        nodes, cells = len(self._names), self._cells
        ages_s, read_ages_s = (
            np.maximum(np.maximum(now_s - received_s[:nodes], (now_ns - time_ns[:nodes]) / 1e9), 0.0)
            for received_s, time_ns in ((self._received_s, self._time_ns), (self._read_s, self._read_ns))
        )
        kept = np.nonzero((read_ages_s <= fresh_s)[self._row[:cells]] & (self._gpus[:cells] > 0))[0]
        return PowerReadings(
            names=self._names,
            models=self._models,
            age_s=ages_s,
            row=self._row[kept],
            model=self._model[kept],
            power_w=self._power_w[kept],
            gpus=self._gpus[kept],
        )

    def _release(self, row: int) -> None:
        at = self._at[row]
        for cell in at.values():
            self._gpus[cell] = 0
        self._spare[row] += at.values()
        at.clear()

    def _cell(self, row: int, model: str) -> int:
        cell = self._spare[row].pop() if self._spare[row] else self._new_cell()
        self._row[cell] = row
        self._model[cell] = self._model_ids.setdefault(model, len(self._models))
        if self._model[cell] == len(self._models):
            self._models.append(model)
        self._at[row][model] = cell
        return cell

    def _new_cell(self) -> int:
        cell = self._cells
        if cell == len(self._gpus):
            self._row, self._model, self._gpus = (
                np.concatenate([one, np.zeros(cell, np.int64)]) for one in (self._row, self._model, self._gpus)
            )
            self._power_w = np.concatenate([self._power_w, np.zeros(cell)])
        self._cells += 1
        return cell


# At one batch every 0.1 s a million batches are more than a day: no spool holds that.
SEQUENCE_JUMP_MOST = 1_000_000
# The last tick of a larger batch is extracted at once, so that storing it whole cannot take much memory.
_TICKS_KEPT_MOST = 16
_COUNT_MOST = 2**53
# Utilization up to this counts as idle: a context that polls the device shows as 1 %.
_IDLE_RATIO = 0.02
_PAST_MOST = 4
# Agents send these every five minutes (SLOW_SENT_S), in a batch of its own; two may be lost on the way.
_SELDOM_READINGS = frozenset(reading for reading in Reading if Reading.POWER_AVERAGE_W <= reading <= Reading.PROCESSES)
_SELDOM_FRESH_S = 1000.0


class BatchVerdict(Enum):
    """How a batch was handled; every verdict is acknowledged."""

    TAKEN = auto()
    # Received before: resent after a lost acknowledgement.
    DUPLICATE = auto()
    # From before the inventory changed: its columns can no longer be interpreted, and its ticks count as lost.
    OUTDATED = auto()


@dataclass(frozen=True, slots=True)
class BatchReceipt:
    """The verdict on a batch, and the last sequence up to which the agent's batches are acknowledged."""

    verdict: BatchVerdict
    sequence: int


@dataclass(frozen=True, slots=True)
class GpuReadings:
    """Newest readings of one device; None if a reading is missing."""

    power_w: float | None = None
    energy_j: float | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    temperature_c: float | None = None


_NO_READINGS = GpuReadings()


@dataclass(frozen=True, slots=True)
class NodeTick:
    """One tick of a node: each kind of reading over its devices, in inventory order."""

    time_ns: int
    gpus: Mapping[Reading, tuple[float | None, ...]]
    power_w: float | None

    def gpu(self, position: int) -> GpuReadings:
        """Returns the readings of the device at this position of the inventory."""

        def cell(reading: Reading) -> float | None:
            values = self.gpus.get(reading)
            return None if values is None or position >= len(values) else values[position]

        memory = cell(Reading.MEMORY_USED_BYTES)
        return GpuReadings(
            power_w=cell(Reading.POWER_W),
            energy_j=cell(Reading.ENERGY_J),
            utilization_ratio=cell(Reading.UTILIZATION_RATIO),
            memory_used_bytes=None if memory is None else int(memory),
            temperature_c=cell(Reading.TEMPERATURE_C),
        )


@dataclass(frozen=True, slots=True)
class PowerSums:
    """Sums of fresh power, and the number of devices that they cover."""

    power_w: float
    gpus: int
    by_model: Mapping[str, float]


class PackedTick(NamedTuple):
    """The last tick of a batch, as an ingest process hands it on, with what else of the batch is used."""

    inventory_generation: int
    sequence: int
    dropped_ticks: int
    first_ns: int
    last_ns: int
    ticks: int
    kinds: tuple[Reading, ...]
    host_kinds: tuple[Reading, ...]
    devices: int
    # Doubles, little-endian: each kind of each device, then each of the host; NaN where there is none.
    values: bytes
    # Watts of all devices, and how many tell theirs; None if power is no kind of it.
    power: tuple[float, int] | None
    # By device whether no tick of the batch shows utilization; None if that is no kind of it.
    idle: bytes | None
    # Where every tick was wanted: the times of those before the last, and their values, tick by tick as `values`.
    earlier: tuple[tuple[int, ...], bytes] | None = None

    def to_tick(self) -> NodeTick:
        """Extracts the tick."""
        return _make_tick(self.last_ns, self.gpus())

    def gpus(self) -> dict[Reading, tuple[float | None, ...]]:
        """Returns the readings of devices by kind."""
        found = tuple(None if value != value else value for value in _unpack(self.values))  # noqa: PLR0124  # NaN
        return {kind: found[at * self.devices : (at + 1) * self.devices] for at, kind in enumerate(self.kinds)}

    def to_batch(self) -> SampleBatch:
        """Returns the batch with every tick that is here; a missing reading has lost its reason."""
        times_ns, earlier = self.earlier or ((), b"")
        ticks = (*times_ns, self.last_ns)
        found, at, columns = _unpack(earlier) + _unpack(self.values), 0, list[Column]()
        row = len(found) // len(ticks)
        widths = (*zip(self.kinds, repeat(self.devices)), *zip(self.host_kinds, repeat(1)))
        for kind, width in widths:
            cells = tuple(found[start + cell] for start in range(at, len(found), row) for cell in range(width))
            gone = tuple(cell for cell, value in enumerate(cells) if value != value)  # noqa: PLR0124  # NaN
            absences = (Absence(reason=AbsenceReason.UNSPECIFIED, cells=gone),) if gone else ()
            shown = tuple(0.0 if value != value else value for value in cells) if gone else cells  # noqa: PLR0124
            columns.append(Column(reading=kind, values=shown, absences=absences))
            at += width
        return SampleBatch(
            sequence=self.sequence,
            inventory_generation=self.inventory_generation,
            dropped_ticks=self.dropped_ticks,
            time_ns=ticks,
            gpu_columns=tuple(columns[: len(self.kinds)]),
            host_columns=tuple(columns[len(self.kinds) :]),
        )


def _unpack(values: bytes) -> tuple[float, ...]:
    return unpack(f"<{len(values) // 8}d", values)


class _EarlierReadings(NamedTuple):
    """Readings of an earlier batch of kinds that no later one has, and when it was received."""

    received_s: float
    time_ns: int
    gpus: Mapping[Reading, tuple[float | None, ...]]


@dataclass(slots=True)
class _Feed:
    """State of one node's stream of batches."""

    incarnation: int
    generation: int
    models: tuple[str, ...]
    positions: Mapping[str, int]
    # Row in NewestPower.
    row: int
    # 0 before the first batch of the incarnation.
    sequence: int = 0
    received: int = 0
    lost: int = 0
    batch: SampleBatch | PackedTick | None = None
    tick: NodeTick | None = None
    time_ns: int = 0
    # Kinds of the newest batch, and the newest readings of the other kinds.
    kinds: tuple[Reading, ...] = ()
    earlier: tuple[_EarlierReadings, ...] = ()
    # The newest tick with what is valid of the earlier readings, and of what it was made.
    merged: tuple[tuple[object, ...], NodeTick] | None = None
    # By position: the time since which every tick showed no utilization; None if the newest one did, or is unknown.
    idle_since_ns: tuple[int | None, ...] = ()
    applied: PlanApplied | None = None
    received_s: float = field(default=float("-inf"))
    # Last sequences of earlier incarnations: batches of a dead agent may arrive after its successor's Hello, and must
    # not make the successor's batches count twice.
    past: dict[int, int] = field(default_factory=dict)


def last_tick(column: Column, ticks: int) -> tuple[float | None, ...]:
    """Returns the values of a column's last tick."""
    width = len(column.values) // ticks
    start = width * (ticks - 1)
    values: tuple[float | None, ...] = column.values[start:]
    if not column.absences:
        return values
    gone = {cell - start for absence in column.absences for cell in absence.cells if cell >= start}
    return tuple(None if position in gone else value for position, value in enumerate(values)) if gone else values


def _power(batch: SampleBatch, models: tuple[str, ...]) -> tuple[tuple[str, float, int], ...]:
    """Sums the watts of the batch's last tick by model, on receipt, so that a summary need not extract every batch."""
    column = next((column for column in batch.gpu_columns if column.reading is Reading.POWER_W), None)
    if column is None:
        return ()
    return _sum_by_model(models, last_tick(column, len(batch.time_ns)))


def _sum_by_model(models: tuple[str, ...], watts: Sequence[float | None]) -> tuple[tuple[str, float, int], ...]:
    """Returns the watts of devices by model, and of how many."""
    sums: dict[str, tuple[float, int]] = {}
    for model, power_w in zip(models, watts, strict=False):
        if power_w is not None:
            total, count = sums.get(model, (0.0, 0))
            sums[model] = (total + power_w, count + 1)
    return tuple((model, total, count) for model, (total, count) in sums.items())


def _tick_power(tick: PackedTick, models: tuple[str, ...]) -> tuple[tuple[str, float, int], ...]:
    """Returns the watts of a tick by model, as `_power`; of one model they are summed already."""
    assert tick.power is not None
    power_w, count = tick.power
    if len(set(models)) == 1:
        return ((models[0], power_w, count),) if count else ()
    return _sum_by_model(models, tick.gpus()[Reading.POWER_W])


def _cut(batch: SampleBatch | PackedTick) -> NodeTick:
    """Extracts the batch's last tick."""
    if isinstance(batch, PackedTick):
        return batch.to_tick()
    ticks = len(batch.time_ns)
    return _make_tick(batch.time_ns[-1], {column.reading: last_tick(column, ticks) for column in batch.gpu_columns})


def _make_tick(time_ns: int, gpus: Mapping[Reading, tuple[float | None, ...]]) -> NodeTick:
    known = [power_w for power_w in gpus.get(Reading.POWER_W, ()) if power_w is not None]
    return NodeTick(time_ns=time_ns, gpus=gpus, power_w=sum(known) if known else None)


def _keep_earlier(feed: _Feed, kinds: tuple[Reading, ...], now_s: float) -> tuple[_EarlierReadings, ...]:
    """Returns the newest readings of the kinds that a new batch does not have."""
    found = feed.earlier
    if not set(feed.kinds) <= set(kinds):
        tick = _newest_tick(feed)
        found = (*found, _EarlierReadings(feed.received_s, feed.time_ns, {} if tick is None else tick.gpus))
    kept = []
    for one in found:
        gpus = {kind: values for kind, values in one.gpus.items() if kind not in kinds}
        if gpus and now_s - one.received_s <= _SELDOM_FRESH_S:
            kept.append(one if len(gpus) == len(one.gpus) else one._replace(gpus=gpus))
    return tuple(kept)


def _newest_tick(feed: _Feed) -> NodeTick | None:
    """Returns the last tick of the newest batch, which is extracted on first use."""
    if feed.batch is not None:
        feed.tick = _cut(feed.batch)
        feed.batch = None
    return feed.tick


def find_idle_devices(batch: SampleBatch, devices: int) -> tuple[bool, ...] | None:
    """Returns by position whether no tick of the batch shows utilization; None if the batch does not have it."""
    column = next((one for one in batch.gpu_columns if one.reading is Reading.UTILIZATION_RATIO), None)
    if column is None:
        # Expensive readings come in batches of their own, without utilization.
        return None
    absent = {cell % devices for absence in column.absences for cell in absence.cells}
    return tuple(
        position not in absent and max(column.values[position::devices]) <= _IDLE_RATIO for position in range(devices)
    )


def _idle_since(is_idle: Sequence[int] | None, first_ns: int, before: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Returns by position since when a device shows no utilization, with a batch's ticks after those before it."""
    if is_idle is None:
        return before
    known = before or (None,) * len(is_idle)
    return tuple(
        (first_ns if since is None else since) if idle else None for idle, since in zip(is_idle, known, strict=True)
    )


class Telemetry:
    """Receives the batches of all nodes; a reading older than `fresh_s` is not used as a current one."""

    def __init__(self, *, send_interval_s: float = 5.0) -> None:
        self._feeds: dict[str, _Feed] = {}
        self._newest = NewestPower()
        self.progress = ProgressReports()
        self.received = 0
        self.lost = 0
        self.duplicates = 0
        self.fresh_s = 0.0
        self.set_send_interval(send_interval_s)

    def set_send_interval(self, send_interval_s: float) -> None:
        """Derives `fresh_s` from the agents' send interval: three intervals, plus five seconds of transmission."""
        self.fresh_s = 3.0 * send_interval_s + 5.0

    def open_stream(self, inventory: Inventory, incarnation: int) -> int:
        """Opens an agent's stream; returns the last received sequence of its incarnation, 0 if none."""
        feed = self._feeds.get(inventory.node_name)
        if feed is None:
            feed = _Feed(incarnation, inventory.generation, (), {}, self._newest.add_node(inventory.node_name))
            self._feeds[inventory.node_name] = feed
        elif feed.incarnation != incarnation:
            feed.past[feed.incarnation] = feed.sequence
            feed.incarnation, feed.sequence = incarnation, feed.past.pop(incarnation, 0)
            while len(feed.past) > _PAST_MOST:
                del feed.past[next(iter(feed.past))]
        self._describe(feed, inventory)
        return feed.sequence

    def forget_node(self, node_name: str) -> None:
        """Removes a node."""
        feed = self._feeds.pop(node_name, None)
        if feed is not None:
            self._newest.remove_node(feed.row)

    def update_inventory(self, inventory: Inventory) -> None:
        """Replaces a node's inventory; columns of earlier generations can no longer be read."""
        self._describe(self._feeds[inventory.node_name], inventory)

    def _describe(self, feed: _Feed, inventory: Inventory) -> None:
        positions = {gpu.uuid: position for position, gpu in enumerate(inventory.gpus)}
        if (feed.generation, feed.positions) != (inventory.generation, positions):
            feed.batch = feed.tick = feed.merged = None
            feed.kinds, feed.earlier = (), ()
            feed.idle_since_ns = ()
            self._newest.clear_readings(feed.row)
        feed.generation = inventory.generation
        feed.models = tuple(gpu.model for gpu in inventory.gpus)
        feed.positions = positions

    def receive_batch(self, node_name: str, batch: SampleBatch, *, now_s: float) -> BatchReceipt:
        """Receives a batch; raises BatchRefused, after which the same batch counts as received."""
        feed, ticks = self._feeds[node_name], len(batch.time_ns)
        width = len(batch.gpu_columns[0].values) // max(1, ticks) if batch.gpu_columns else None
        receipt = self._check_order(feed, batch, ticks, width)
        if receipt.verdict is BatchVerdict.TAKEN and ticks:
            kinds = tuple(column.reading for column in batch.gpu_columns)
            idle = find_idle_devices(batch, len(feed.models)) if feed.models else None
            power = _power(batch, feed.models) if Reading.POWER_W in kinds else None
            self._store(feed, kinds, batch.time_ns, idle=idle, power=power, now_s=now_s)
            feed.batch, feed.tick = (batch, None) if ticks <= _TICKS_KEPT_MOST else (None, _cut(batch))
        return receipt

    def receive_tick(self, node_name: str, tick: PackedTick, *, now_s: float) -> BatchReceipt:
        """Receives a batch of which the last tick was handed on, as `receive_batch`."""
        feed = self._feeds[node_name]
        receipt = self._check_order(feed, tick, tick.ticks, tick.devices if tick.kinds else None)
        if receipt.verdict is BatchVerdict.TAKEN:
            power = None if tick.power is None else _tick_power(tick, feed.models)
            self._store(feed, tick.kinds, (tick.first_ns, tick.last_ns), idle=tick.idle, power=power, now_s=now_s)
            feed.batch, feed.tick = tick, None
        return receipt

    def _check_order(self, feed: _Feed, batch: SampleBatch | PackedTick, ticks: int, width: int | None) -> BatchReceipt:
        """Counts a batch; raises BatchRefused. `width` is its values a tick, None without readings of devices."""
        if batch.sequence <= feed.sequence:
            self.duplicates += 1
            return BatchReceipt(BatchVerdict.DUPLICATE, feed.sequence)
        missing = batch.sequence - feed.sequence - 1 if feed.sequence else 0
        if missing > SEQUENCE_JUMP_MOST:
            raise SequenceJump(
                "samples.sequence",
                f"jumps from {feed.sequence} to {batch.sequence}",
                "count batches up by one, or draw a new incarnation",
            )
        feed.sequence = batch.sequence
        lost = batch.dropped_ticks or missing * ticks
        if batch.inventory_generation != feed.generation or (width is not None and width != len(feed.models)):
            self._count_lost(feed, lost + ticks)
            return self._contradiction(feed, batch, width or 0)
        if lost:
            self._count_lost(feed, lost)
        self.received += ticks
        feed.received += ticks
        return BatchReceipt(BatchVerdict.TAKEN, batch.sequence)

    def _store(
        self,
        feed: _Feed,
        kinds: tuple[Reading, ...],
        times_ns: Sequence[int],
        *,
        idle: Sequence[int] | None,
        power: tuple[tuple[str, float, int], ...] | None,
        now_s: float,
    ) -> None:
        """Stores what is used of a batch before its tick is."""
        if feed.earlier or kinds != feed.kinds:
            feed.earlier, feed.kinds = _keep_earlier(feed, kinds, now_s), kinds
        feed.time_ns = times_ns[-1]
        feed.received_s = now_s
        feed.idle_since_ns = _idle_since(idle, times_ns[0], feed.idle_since_ns)
        if power is not None:
            self._newest.set_readings(feed.row, power, received_s=now_s, time_ns=feed.time_ns)
        else:
            self._newest.set_age(feed.row, received_s=now_s, time_ns=feed.time_ns)

    def _contradiction(self, feed: _Feed, batch: SampleBatch | PackedTick, width: int) -> BatchReceipt:
        if batch.inventory_generation < feed.generation:
            return BatchReceipt(BatchVerdict.OUTDATED, batch.sequence)
        if batch.inventory_generation > feed.generation:
            raise UnknownGeneration(
                "samples.inventory_generation",
                f"is {batch.inventory_generation}, but the inventory sent last is of generation {feed.generation}",
                "send the new inventory before its samples",
            )
        raise WrongWidth(
            "samples.gpu_columns",
            f"hold {width} values a tick, but the inventory of generation {feed.generation} lists "
            f"{len(feed.models)} GPUs",
            "send one value for each GPU of the inventory and each tick",
        )

    def _count_lost(self, feed: _Feed, ticks: int) -> None:
        feed.lost = min(_COUNT_MOST, feed.lost + ticks)
        self.lost = min(_COUNT_MOST, self.lost + ticks)

    def record_plan_applied(self, node_name: str, applied: PlanApplied) -> None:
        """Records the node's result of applying a plan; a result of an older plan than the last is ignored."""
        feed = self._feeds[node_name]
        if feed.applied is None or applied.epoch >= feed.applied.epoch:
            feed.applied = applied

    def plan_applied(self, node_name: str) -> PlanApplied | None:
        """Returns the last result of applying a plan that the node reported; None before the first."""
        feed = self._feeds.get(node_name)
        return feed.applied if feed else None

    def tick_counts(self, node_name: str) -> tuple[int, int]:
        """Returns the numbers of ticks received from the node, and lost."""
        feed = self._feeds.get(node_name)
        return (feed.received, feed.lost) if feed else (0, 0)

    def idle_since_ns(self, node_name: str) -> tuple[int | None, ...]:
        """Returns, by position in the inventory, since when a device shows no utilization; None if it works or is unknown.

        The tuple is empty before the first reading of the utilization.
        """
        feed = self._feeds.get(node_name)
        return feed.idle_since_ns if feed else ()

    def age_s(self, node_name: str, *, now_s: float, now_ns: int) -> float | None:
        """Returns the age of the newest tick; None before the first.

        It is the greater of the time since receipt and the time since the tick by the node's clock. A resent spool is
        old although it has just arrived; a node whose clock runs ahead does not appear younger.
        """
        feed = self._feeds.get(node_name)
        if feed is None or (feed.tick is None and feed.batch is None):
            return None
        return max(0.0, now_s - feed.received_s, (now_ns - feed.time_ns) / 1e9)

    def readings(self, *, now_s: float, now_ns: int) -> PowerReadings:
        """Returns, for every node with an agent, its age as defined by `age_s`, and its fresh power by model."""
        return self._newest.readings(now_s=now_s, now_ns=now_ns, fresh_s=self.fresh_s)

    def latest_tick(self, node_name: str) -> NodeTick | None:
        """Returns the newest tick, however old, with its own readings only; see `age_s`."""
        feed = self._feeds.get(node_name)
        return None if feed is None else _newest_tick(feed)

    def fresh_tick(self, node_name: str, *, now_s: float, now_ns: int) -> NodeTick | None:
        """Returns the newest tick if it is fresh, else None; with the newest readings of each kind that are still valid.

        A reading is valid until its own kind is reported again or it is too old: `fresh_s`, and more for kinds that
        agents send once in some minutes. The same object is returned as long as nothing changes.
        """
        age_s = self.age_s(node_name, now_s=now_s, now_ns=now_ns)
        if age_s is None or age_s > self.fresh_s:
            return None
        feed = self._feeds[node_name]
        tick = _newest_tick(feed)
        if tick is None or not feed.earlier:
            return tick
        valid = tuple(
            (kind, values)
            for one in feed.earlier
            for kind, values in one.gpus.items()
            if max(now_s - one.received_s, (now_ns - one.time_ns) / 1e9)
            <= (_SELDOM_FRESH_S if kind in _SELDOM_READINGS else self.fresh_s)
        )
        made_of = (id(tick), feed.received_s, *(kind for kind, _ in valid))
        if feed.merged is None or feed.merged[0] != made_of:
            gpus = dict(valid) | dict(tick.gpus)
            known = [power_w for power_w in gpus.get(Reading.POWER_W, ()) if power_w is not None]
            feed.merged = made_of, replace(tick, gpus=gpus, power_w=sum(known) if known else None)
        return feed.merged[1]

    def gpu(self, node_name: str, uuid: str, *, now_s: float, now_ns: int) -> GpuReadings:
        """Returns the fresh readings of one device."""
        tick = self.fresh_tick(node_name, now_s=now_s, now_ns=now_ns)
        position = self._feeds[node_name].positions.get(uuid) if tick else None
        return _NO_READINGS if tick is None or position is None else tick.gpu(position)

    def fresh_power(self, *, now_s: float, now_ns: int) -> PowerSums:
        """Returns the fresh power of the whole cluster."""
        found = self.readings(now_s=now_s, now_ns=now_ns)
        counts = np.bincount(found.model, found.gpus, len(found.models)).tolist()
        sums = np.bincount(found.model, found.power_w, len(found.models)).tolist()
        by_model = {model: power_w for model, power_w, count in zip(found.models, sums, counts, strict=True) if count}
        return PowerSums(power_w=sum(by_model.values()), gpus=int(sum(counts)), by_model=by_model)
