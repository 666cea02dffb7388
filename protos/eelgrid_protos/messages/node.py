"""What a node is and what its sensors say: frozen values, mirrored by node.proto.

Columns hold readings tick by tick and, within a tick, device by device; a
missing reading is None with a reason, never a number.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.open_enum import OpenEnum
from eelgrid_protos.quantities import (
    Bytes,
    Count,
    CpuMilli,
    Identifier,
    Label,
    Many,
    Name,
    Nanoseconds,
    Range,
    Sentence,
    Uint32,
    Uint64,
    Watts,
)  # fmt: skip

__all__ = [
    "GPUS_PER_NODE_MOST", "READING_RANGES", "TICKS_PER_BATCH_MOST",
    "Absence", "AbsenceReason", "Column", "ComputeInstance", "Gpu", "GpuInstance", "Inventory",
    "NodeEvent", "NodeEventKind", "Reading", "SampleBatch",
]  # fmt: skip

GPUS_PER_NODE_MOST = 64
TICKS_PER_BATCH_MOST = 600
_CELLS_MOST = GPUS_PER_NODE_MOST * TICKS_PER_BATCH_MOST
_ABSENCES_MOST = 16
_COLUMNS_MOST = 64
_INTS = {int}


class Reading(OpenEnum):
    """One sensor; see node.proto for what each means."""

    UNSPECIFIED = 0
    POWER_W = 1
    ENERGY_J = 2
    UTILIZATION_RATIO = 3
    MEMORY_USED_BYTES = 4
    SM_CLOCK_MHZ = 5
    MEMORY_CLOCK_MHZ = 6
    TEMPERATURE_C = 7
    POWER_LIMIT_W = 8
    EVENT_REASONS_MASK = 9
    HOST_CPU_UTILIZATION_RATIO = 64
    HOST_MEMORY_USED_BYTES = 65


READING_RANGES: Mapping[Reading, Range] = {
    Reading.POWER_W: Range(0.0, 20_000.0, "W"),
    Reading.ENERGY_J: Range(0.0, 1e14, "J"),
    Reading.UTILIZATION_RATIO: Range(0.0, 1.0),
    Reading.MEMORY_USED_BYTES: Range(0.0, 2.0**50, "bytes"),
    Reading.SM_CLOCK_MHZ: Range(0.0, 20_000.0, "MHz"),
    Reading.MEMORY_CLOCK_MHZ: Range(0.0, 50_000.0, "MHz"),
    Reading.TEMPERATURE_C: Range(-60.0, 250.0, "°C"),
    Reading.POWER_LIMIT_W: Range(0.0, 20_000.0, "W"),
    Reading.EVENT_REASONS_MASK: Range(0.0, 2.0**53),
    Reading.HOST_CPU_UTILIZATION_RATIO: Range(0.0, 1.0),
    Reading.HOST_MEMORY_USED_BYTES: Range(0.0, 2.0**50, "bytes"),
}
_BOUNDS = {reading: (bounds.low, bounds.high) for reading, bounds in READING_RANGES.items()}
_ANY = (-1e300, 1e300)


class AbsenceReason(OpenEnum):
    """Why a reading is missing."""

    UNSPECIFIED = 0
    NOT_SUPPORTED = 1
    NO_PERMISSION = 2
    GPU_LOST = 3
    TIMED_OUT = 4
    IMPLAUSIBLE = 5
    NOT_SAMPLED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Cells of a column that hold no value, and why."""

    reason: AbsenceReason
    cells: Annotated[tuple[Uint32, ...], Many(_CELLS_MOST)]


def _is_sound(absence: Absence, width: int) -> bool:
    """Whether an absence obeys the rules in a column of this width."""
    cells = absence.cells
    return (
        type(absence.reason) is AbsenceReason
        and {*map(type, cells), int} == _INTS
        and (not cells or (min(cells) >= 0 and max(cells) < width))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One reading over all ticks and devices of a batch; an absent cell holds 0.0."""

    reading: Reading
    values: Annotated[tuple[float, ...], Many(_CELLS_MOST)]
    absences: Annotated[tuple[Absence, ...], Many(_ABSENCES_MOST)] = ()

    def obeys(self) -> bool:
        """Whether nothing is wrong, in one pass: columns are the hot path, and nearly all are sound."""
        values, width = self.values, len(self.values)
        if not 0 < width <= _CELLS_MOST or type(self.reading) is not Reading:
            return not width and not self.absences and type(self.reading) is Reading
        low, high = _BOUNDS.get(self.reading, _ANY)
        return (
            low <= min(values)
            and max(values) <= high
            and math.isfinite(sum(values))
            and len(self.absences) <= _ABSENCES_MOST
            and all(_is_sound(absence, width) for absence in self.absences)
        )

    def violations(self) -> Iterator[Violation]:
        """Range and presence."""
        # A reading of a newer version has no range here, but no reading is ever infinite or NaN.
        low, high = _BOUNDS.get(self.reading, _ANY)
        if not all(low <= value <= high for value in self.values):
            unit = READING_RANGES[self.reading].unit if self.reading in READING_RANGES else ""
            yield Violation(
                "values",
                f"{self.reading.name} holds a value that is not finite or not in [{low:g}, {high:g}] {unit}".rstrip(),
                "mark a missing reading as an absence and convert to the unit in the name",
            )
        for absence in self.absences:
            if any(cell >= len(self.values) for cell in absence.cells):
                yield Violation("absences", "a cell lies outside the column", "count cells from 0 in tick order")

    def cell(self, index: int) -> float | None:
        """The value at `index`, or None where it is absent."""
        if any(index in absence.cells for absence in self.absences):
            return None
        return self.values[index]


def _are_distinct(columns: tuple[Column, ...]) -> bool:
    """Whether no reading comes twice; those that this version does not know are all alike to it."""
    known = [column.reading for column in columns if column.reading is not Reading.UNSPECIFIED]
    return len(set(known)) == len(known)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """Consecutive ticks of one node."""

    sequence: Uint64
    inventory_generation: Uint32
    time_ns: Annotated[tuple[Nanoseconds, ...], Many(TICKS_PER_BATCH_MOST)]
    gpu_columns: Annotated[tuple[Column, ...], Many(_COLUMNS_MOST)] = ()
    host_columns: Annotated[tuple[Column, ...], Many(_COLUMNS_MOST)] = ()
    dropped_ticks: Uint64 = 0

    def obeys(self) -> bool:
        """Whether nothing is wrong, as `violations` would say, in one pass over each column."""
        times, gpus, hosts = self.time_ns, self.gpu_columns, self.host_columns
        ticks = len(times)
        if not (
            {type(self.sequence), type(self.inventory_generation), type(self.dropped_ticks), *map(type, times)} == _INTS
            and 0 < self.sequence < 2**64
            and 0 <= self.inventory_generation < 2**32
            and 0 <= self.dropped_ticks < 2**64
            and 0 < ticks <= TICKS_PER_BATCH_MOST
            and times[0] >= 0
            and times[-1] < 2**63
            and len(gpus) <= _COLUMNS_MOST
            and len(hosts) <= _COLUMNS_MOST
        ):
            return False
        width = len(gpus[0].values) if gpus else 0
        return (
            width % ticks == 0
            and (ticks == 1 or list(times) == sorted(times))
            and all(column.obeys() and len(column.values) == width for column in gpus)
            and all(column.obeys() and len(column.values) == ticks for column in hosts)
            and _are_distinct(gpus)
            and _are_distinct(hosts)
        )

    def violations(self) -> Iterator[Violation]:
        """Shape: columns are whole ticks, each reading once, time never falls."""
        ticks = len(self.time_ns)
        if self.sequence == 0:
            yield Violation("sequence", "is 0", "count batches from 1")
        if any(later < earlier for earlier, later in zip(self.time_ns, self.time_ns[1:], strict=False)):
            yield Violation("time_ns", "falls", "send ticks in order")
        for name, columns in (("gpu_columns", self.gpu_columns), ("host_columns", self.host_columns)):
            if not _are_distinct(columns):
                yield Violation(name, "holds one reading twice", "send each reading in one column")
            widths = {len(column.values) for column in columns}
            if len(widths) > 1 or any(not ticks or width % ticks for width in widths):
                yield Violation(name, "columns are not whole ticks of equal width", "send ticks x devices values")
        if any(len(column.values) != ticks for column in self.host_columns):
            yield Violation("host_columns", "a host column is not one value a tick", "send one value a tick")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInstance:
    """The part of a GPU instance that a process opens."""

    id: Uint32
    profile_id: Uint32 = 0
    uuid: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInstance:
    """One MIG slice as it was read back, on memory slices [start, start + size)."""

    id: Uint32
    profile_id: Uint32
    profile: Label  # such as 1g.5gb+me: no name of ours
    start: Count
    size: Count
    compute_instances: Annotated[tuple[ComputeInstance, ...], Many(8)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device; `model` is the name that workloads ask for."""

    uuid: Identifier
    index: Count
    product: Label
    model: Name
    pci_bus_id: Label = ""
    catalogue_key: Label = ""
    memory_bytes: Bytes = 0
    power_limit_default_w: Watts | None = None
    power_limit_min_w: Watts | None = None
    power_limit_max_w: Watts | None = None
    mig_capable: bool = False
    mig_enabled: bool = False
    mig_pending: bool = False
    gpu_instances: Annotated[tuple[GpuInstance, ...], Many(16)] = ()
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """One node."""

    node_name: Name
    cpu_milli: CpuMilli
    memory_bytes: Bytes
    generation: Uint32 = 1
    agent_version: Label = ""
    boot_id: Label = ""
    driver_version: Label = ""
    pool: Label = ""
    labels: Annotated[Mapping[Label, Label], Many(64)] = field(default_factory=dict)
    gpus: Annotated[tuple[Gpu, ...], Many(GPUS_PER_NODE_MOST)] = ()
    simulated: bool = False

    def violations(self) -> Iterator[Violation]:
        """Devices are told apart by UUID and by index."""
        for attribute in ("uuid", "index"):
            if len({getattr(gpu, attribute) for gpu in self.gpus}) < len(self.gpus):
                yield Violation("gpus", f"two devices share one {attribute}", "list each device once")


class NodeEventKind(OpenEnum):
    """What befell a node or a device."""

    UNSPECIFIED = 0
    GPU_LOST = 1
    GPU_RETURNED = 2
    COUNTER_RESET = 3
    CLOCK_STEP = 4
    SAMPLES_DROPPED = 5
    LEASE_EXPIRED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """Something that the controller should hear at once."""

    kind: NodeEventKind
    time_ns: Nanoseconds
    gpu_uuid: Label = ""
    detail: Sentence = ""
