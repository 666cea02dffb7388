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


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One reading over all ticks and devices of a batch; an absent cell holds 0.0."""

    reading: Reading
    values: Annotated[tuple[float, ...], Many(_CELLS_MOST)]
    absences: Annotated[tuple[Absence, ...], Many(16)] = ()

    def obeys(self) -> bool:
        """Whether there are no violations: columns are the hot path, and nearly all are sound."""
        values = self.values
        if not values:
            return not self.absences
        low, high = _BOUNDS.get(self.reading, _ANY)
        return (
            low <= min(values)
            and max(values) <= high
            and math.isfinite(sum(values))
            and (not self.absences or max(max(absence.cells, default=0) for absence in self.absences) < len(values))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """Consecutive ticks of one node."""

    sequence: Uint64
    inventory_generation: Uint32
    time_ns: Annotated[tuple[Nanoseconds, ...], Many(TICKS_PER_BATCH_MOST)]
    gpu_columns: Annotated[tuple[Column, ...], Many(64)] = ()
    host_columns: Annotated[tuple[Column, ...], Many(64)] = ()
    dropped_ticks: Uint64 = 0

    def violations(self) -> Iterator[Violation]:
        """Shape: columns are whole ticks, each reading once, time never falls."""
        ticks = len(self.time_ns)
        if self.sequence == 0:
            yield Violation("sequence", "is 0", "count batches from 1")
        if any(later < earlier for earlier, later in zip(self.time_ns, self.time_ns[1:], strict=False)):
            yield Violation("time_ns", "falls", "send ticks in order")
        for name, columns in (("gpu_columns", self.gpu_columns), ("host_columns", self.host_columns)):
            known = [column.reading for column in columns if column.reading is not Reading.UNSPECIFIED]
            if len(set(known)) < len(known):
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
