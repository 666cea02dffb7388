"""The book of ticks: every tick that any agent took, what its devices said, and what became of it.

Owns the conservation of ticks and the truth of readings. A tick is known by its
serial, which the simulated host gives as its memory reading, so that it goes
through sampler, spool, codec, network and telemetry like any reading.

A tick is resolved when some controller took it, or when it was counted lost:
its inventory was outdated, or (in harsh weather only) the network lost its
batch and a later one came. Until then its agent holds it, or counts it dropped,
or died with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from eelgrid_agent.devices.port import Missing, RawReadings
from eelgrid_agent.devices.sampler import GPU_READINGS, SampleTick
from eelgrid_agent.node.spool import Spool
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_controller.errors import BatchRefused
from eelgrid_controller.state.telemetry import BatchReceipt, BatchVerdict, PackedTick, Telemetry
from eelgrid_protos.messages import READING_RANGES, Hello, Reading, SampleBatch
from tests.sim.broken import Broken, demand
from tests.sim.clock import Clock

__all__ = ["SERIAL", "Process", "TickBook", "TickFact"]

SERIAL = Reading.HOST_MEMORY_USED_BYTES
_SERIAL_ROW = 1

Looks = tuple[tuple[str, RawReadings], ...]


@dataclass(frozen=True, slots=True)
class TickFact:
    """One tick as it was taken."""

    serial: int
    true_ns: int
    time_ns: int
    gpus: int
    cells: Mapping[Reading, tuple[float | None, ...]]


@dataclass(slots=True)
class _Meter:
    """One device's energy since an agent first read its counter: the truth, as long as nobody reset the counter."""

    since_j: float
    counter_base_pj: int
    is_exact: bool = True
    is_reset: bool = False


@dataclass(slots=True)
class Process:
    """One life of one agent."""

    node_name: str
    incarnation: int
    spool: Spool
    unresolved: set[int] = field(default_factory=set)
    sent: dict[int, tuple[int, ...]] = field(default_factory=dict)
    reported_dropped: int = 0
    energy_j: dict[str, float] = field(default_factory=dict)
    meters: dict[str, "_Meter"] = field(default_factory=dict)

    def held(self) -> set[int]:
        """Serials in the spool."""
        waiting = {int(tick.host_values[_SERIAL_ROW]) for tick in self.spool._waiting}
        return waiting.union(*(serials_of(batch) for batch in self.spool._numbered))

    def conserve(self) -> None:
        """Every tick is resolved, held or counted dropped."""
        held = self.held()
        demand(5, len(held) == self.spool.unacknowledged_ticks, f"{self.node_name}: a tick stands in the spool twice")
        vanished = self.unresolved - held
        demand(
            5,
            len(vanished) == self.spool.dropped_total,
            f"{self.node_name}: {len(vanished)} ticks are gone, {self.spool.dropped_total} were counted dropped",
        )
        demand(
            5,
            self.reported_dropped + self.spool._dropped == self.spool.dropped_total,
            f"{self.node_name}: the batches report {self.reported_dropped} dropped ticks of {self.spool.dropped_total}",
        )


def serials_of(batch: SampleBatch) -> tuple[int, ...]:
    """The ticks of a batch."""
    return next(tuple(map(int, column.values)) for column in batch.host_columns if column.reading is SERIAL)


@dataclass(slots=True)
class _Feed:
    """What one life of the controller heard of one node."""

    incarnation: int
    sequences: dict[int, int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    latest: TickFact | None = None
    received_s: float = 0.0
    # The newest tick that has each reading, and when it was received.
    newest: dict[Reading, tuple[TickFact, float]] = field(default_factory=dict)


class TickBook:
    """See the module."""

    def __init__(self, *, is_fair: bool) -> None:
        self.is_fair = is_fair
        self.facts: dict[tuple[str, int], TickFact] = {}
        # The one that runs on each node, and every one that ever did by its incarnation.
        self.running: dict[str, Process] = {}
        self.processes: dict[int, Process] = {}
        self._feeds: WeakKeyDictionary[Telemetry, dict[str, _Feed]] = WeakKeyDictionary()
        self.taken = 0
        self.received = 0
        self.died_with_agent = 0
        self.passed_over = 0

    # The agent's side

    def began(self, process: Process) -> None:
        """An agent started."""
        self.running[process.node_name] = self.processes[process.incarnation] = process

    def took(self, device: SimulatedNode, looks: Looks, tick: SampleTick, true_ns: int) -> None:
        """A tick was taken of these looks: what was missing is absent, what was there is equal, energy is true."""
        node_name = device.spec.node_name
        process = self.running[node_name]
        cells = {reading: tuple(tick.reading(reading, gpu) for gpu in range(tick.gpus)) for reading in GPU_READINGS}
        for column in tick.riding.gpus if tick.riding is not None else ():
            cells[column.reading] = tuple(column.cell(gpu) for gpu in range(tick.gpus))
        for gpu, (uuid, raw) in enumerate(looks):
            for reading, row in cells.items():
                # Energy is the sampler's own count, and a slow look asks for more than a quick one.
                if reading not in raw.values:
                    continue
                value, bounds, got = raw.values[reading], READING_RANGES[reading], row[gpu]
                known = not isinstance(value, Missing) and bounds.low <= value <= bounds.high
                demand(6, got == (value if known else None), f"{node_name} {reading.name}: {value} became {got}")
            energy_j = cells[Reading.ENERGY_J][gpu]
            self._energy(process, uuid, raw, energy_j)
            if energy_j is not None:
                _energy_is_true(process, device, uuid, raw, energy_j)
        serial = int(tick.host_values[_SERIAL_ROW])
        self.facts[node_name, serial] = TickFact(serial, true_ns, tick.time_ns, tick.gpus, cells)
        process.unresolved.add(serial)
        self.taken += 1

    def _energy(self, process: Process, uuid: str, raw: RawReadings, energy_j: float | None) -> None:
        where = f"{process.node_name} {uuid}"
        if energy_j is None:
            demand(6, isinstance(raw.energy_counter_j, Missing), f"{where}: energy is absent though it was counted")
            return
        nothing = isinstance(raw.energy_counter_j, Missing) and isinstance(raw.values[Reading.POWER_W], Missing)
        demand(6, not nothing, f"{where}: energy {energy_j} J out of nothing")
        before_j = process.energy_j.get(uuid, 0.0)
        demand(6, energy_j >= before_j, f"{where}: energy fell from {before_j} J to {energy_j} J")
        process.energy_j[uuid] = energy_j

    def pulled(self, node_name: str, batch: SampleBatch) -> None:
        """A batch goes out, perhaps once more."""
        process, serials = self.running[node_name], serials_of(batch)
        if batch.sequence not in process.sent:
            process.reported_dropped += batch.dropped_ticks
        before = process.sent.setdefault(batch.sequence, serials)
        demand(5, before == serials, f"{node_name}: batch {batch.sequence} was sent with other ticks before")

    def died(self, node_name: str) -> None:
        """An agent died with what it held."""
        process = self.running[node_name]
        process.conserve()
        self.died_with_agent += len(process.unresolved)

    # The controller's side

    def feeds(self, telemetry: Telemetry) -> dict[str, _Feed]:
        """What one life of a controller heard, by node; a new one knows no tick."""
        return self._feeds.setdefault(telemetry, {})

    def receive(
        self, telemetry: Telemetry, hello: Hello, batch: SampleBatch, clock: Clock, *, tick: PackedTick | None = None
    ) -> BatchReceipt:
        """Hands a batch, or what an ingest process handed on of it, to the telemetry and checks what became of it."""
        name, ticks = hello.inventory.node_name, len(batch.time_ns)
        feed = self.feeds(telemetry).setdefault(name, _Feed(hello.incarnation))
        feed.incarnation = hello.incarnation
        received, lost = telemetry.tick_counts(name)
        try:
            if tick is None:
                receipt = telemetry.receive_batch(name, batch, now_s=clock.monotonic_s())
            else:
                receipt = telemetry.receive_tick(name, tick, now_s=clock.monotonic_s())
        except BatchRefused as error:
            if self.is_fair:
                raise Broken(5, f"{name}: batch {batch.sequence} was refused: {error}") from error
            self._pass_over(feed, batch.sequence)
            self._resolve(feed, serials_of(batch), is_received=False)
            raise
        received, lost = (now - then for now, then in zip(telemetry.tick_counts(name), (received, lost), strict=True))
        where = f"{name}: batch {batch.sequence} ({receipt.verdict.name})"
        if receipt.verdict is BatchVerdict.DUPLICATE:
            demand(5, (received, lost) == (0, 0), f"{where} was counted")
            demand(5, self._is_known(feed, batch), f"{where} holds ticks that were never received nor counted lost")
            return receipt
        gap = self._pass_over(feed, batch.sequence)
        demand(5, gap == 0 or not self.is_fair, f"{where} leaves {gap} out: a hole in a stream that keeps order")
        is_taken = receipt.verdict is BatchVerdict.TAKEN
        demand(5, received == (ticks if is_taken else 0), f"{where}: {received} ticks counted received of {ticks}")
        expected = batch.dropped_ticks + (0 if is_taken else ticks)
        demand(5, lost == expected or (gap > 0 and lost > 0), f"{where}: {lost} ticks counted lost, not {expected}")
        self._resolve(feed, serials_of(batch), is_received=is_taken)
        if is_taken:
            feed.received_s = clock.monotonic_s()
            self._truth(name, feed, batch)
        return receipt

    def _pass_over(self, feed: _Feed, sequence: int) -> int:
        """The batches between the last one and this, which cannot come any more: how many the telemetry can tell."""
        last = feed.sequences.get(feed.incarnation, 0)
        gap = max(0, sequence - last - 1) if last else 0
        # The first batch that a controller hears may follow others that the one before it acknowledged, or that
        # harsh weather lost: these it cannot know of.
        first = sequence - gap if last or self.is_fair else 1
        for missing in range(first, sequence):
            self._resolve(feed, self.processes[feed.incarnation].sent.get(missing, ()), is_received=False)
        feed.sequences[feed.incarnation] = max(last, sequence)
        return gap

    def _is_known(self, feed: _Feed, batch: SampleBatch) -> bool:
        unresolved = self.processes[feed.incarnation].unresolved
        return all(serial in feed.seen or serial not in unresolved for serial in serials_of(batch))

    def _resolve(self, feed: _Feed, serials: tuple[int, ...], *, is_received: bool) -> None:
        process = self.processes[feed.incarnation]
        for serial in serials:
            if serial in process.unresolved:
                process.unresolved.discard(serial)
                if is_received:
                    self.received += 1
                else:
                    self.passed_over += 1

    def _truth(self, name: str, feed: _Feed, batch: SampleBatch) -> None:
        """What was received is what was taken: each tick once, absences as absences, numbers to the last bit."""
        for index, serial in enumerate(serials_of(batch)):
            demand(5, serial not in feed.seen, f"{name}: tick {serial} was received twice")
            feed.seen.add(serial)
            fact = self.facts[name, serial]
            demand(6, fact.time_ns == batch.time_ns[index], f"{name}: tick {serial} changed its time")
            for column in batch.gpu_columns:
                row = range(index * fact.gpus, (index + 1) * fact.gpus)
                cells = tuple(column.cell(cell) for cell in row)
                demand(
                    6, cells == fact.cells[column.reading], f"{name}: {column.reading.name} of tick {serial} changed"
                )
            feed.latest = fact
            feed.newest |= {column.reading: (fact, feed.received_s) for column in batch.gpu_columns}


def _energy_is_true(process: Process, device: SimulatedNode, uuid: str, raw: RawReadings, energy_j: float) -> None:
    """What the counter counts is what is reported; an estimate across a gap may only be ahead of it."""
    gpu = device.get_device(uuid)
    true_j = gpu.energy_pj(device.monotonic_ns()) / 1e12
    meter = process.meters.get(uuid)
    if isinstance(raw.energy_counter_j, Missing):
        if meter is not None:
            meter.is_exact = False
        return
    if meter is None:
        process.meters[uuid] = _Meter(true_j - energy_j, gpu._counter_base_pj)
        return
    meter.is_reset = meter.is_reset or meter.counter_base_pj != gpu._counter_base_pj
    if meter.is_reset:
        return
    ahead_j = energy_j - (true_j - meter.since_j)
    slack_j = 0.003 + 1e-9 * true_j
    where = f"{process.node_name} {uuid}"
    demand(6, ahead_j >= -slack_j, f"{where}: {-ahead_j:.3f} J of {true_j - meter.since_j:.3f} J are missing")
    demand(6, ahead_j <= slack_j or not meter.is_exact, f"{where}: {ahead_j:.3f} J too much")
