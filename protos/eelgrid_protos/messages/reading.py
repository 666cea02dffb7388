"""Sensor readings: readings by name, columns of them, and batches of ticks; mirrored by node.proto.

Columns hold readings tick by tick and, within a tick, device by device; a missing reading is an absence with a
reason, never a number.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.quantities import BOARD_POWER_MOST_W, Many, Nanoseconds, OpenEnum, Range, Uint32, Uint64
from eelgrid_protos.values import dataclass

GPUS_PER_NODE_MOST = 64
INSTANCES_PER_GPU_MOST = 16
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
    POWER_AVERAGE_W = 10
    MEMORY_UTILIZATION_RATIO = 11
    POWER_LIMIT_REQUESTED_W = 12
    MEMORY_TEMPERATURE_C = 13
    MEMORY_RESERVED_BYTES = 14
    MEMORY_POWER_W = 15
    MODULE_POWER_W = 16
    ECC_CORRECTED_VOLATILE = 17
    ECC_UNCORRECTED_VOLATILE = 18
    ECC_CORRECTED_AGGREGATE = 19
    ECC_UNCORRECTED_AGGREGATE = 20
    REMAPPED_ROWS_CORRECTABLE = 21
    REMAPPED_ROWS_UNCORRECTABLE = 22
    ROW_REMAP_PENDING = 23
    ROW_REMAP_FAILED = 24
    RECOVERY_ACTION = 25
    PCIE_LINK_GENERATION = 26
    PCIE_LINK_WIDTH = 27
    PCIE_REPLAYS = 28
    PCIE_SENT_BYTES_PER_S = 29
    PCIE_RECEIVED_BYTES_PER_S = 30
    NVLINK_SENT_BYTES = 31
    NVLINK_RECEIVED_BYTES = 32
    NVLINK_ACTIVE_LINKS = 33
    NVLINK_ERRORS = 34
    FABRIC_STATE = 35
    GRAPHICS_ACTIVITY_RATIO = 36
    SM_ACTIVITY_RATIO = 37
    SM_OCCUPANCY_RATIO = 38
    TENSOR_ACTIVITY_RATIO = 39
    MEMORY_ACTIVITY_RATIO = 40
    FP16_ACTIVITY_RATIO = 41
    FP32_ACTIVITY_RATIO = 42
    FP64_ACTIVITY_RATIO = 43
    PERFORMANCE_STATE = 44
    PROCESSES = 45
    HOST_CPU_UTILIZATION_RATIO = 64
    HOST_MEMORY_USED_BYTES = 65
    HOST_CPU_ENERGY_J = 66
    HOST_MEMORY_ENERGY_J = 67
    HOST_DISK_READ_BYTES = 68
    HOST_DISK_WRITTEN_BYTES = 69
    HOST_NETWORK_RECEIVED_BYTES = 70
    HOST_NETWORK_SENT_BYTES = 71


_RATIO = Range(0.0, 1.0)
# Counters are exact in a double up to here.
_COUNT = Range(0.0, 2.0**53)
_POWER = Range(0.0, BOARD_POWER_MOST_W, "W")
_CLOCK = Range(0.0, 20_000.0, "MHz")
_TEMPERATURE = Range(-60.0, 250.0, "°C")
_MEMORY = Range(0.0, 2.0**50, "bytes")
_ENERGY = Range(0.0, 1e14, "J")
_TRAFFIC = Range(0.0, 2.0**60, "bytes")
_FLAG = Range(0.0, 1.0)

READING_RANGES: Mapping[Reading, Range] = {
    Reading.POWER_W: _POWER,
    Reading.ENERGY_J: _ENERGY,
    Reading.UTILIZATION_RATIO: _RATIO,
    Reading.MEMORY_USED_BYTES: _MEMORY,
    Reading.SM_CLOCK_MHZ: _CLOCK,
    Reading.MEMORY_CLOCK_MHZ: Range(0.0, 50_000.0, "MHz"),
    Reading.TEMPERATURE_C: _TEMPERATURE,
    Reading.POWER_LIMIT_W: _POWER,
    Reading.EVENT_REASONS_MASK: _COUNT,
    Reading.POWER_AVERAGE_W: _POWER,
    Reading.MEMORY_UTILIZATION_RATIO: _RATIO,
    Reading.POWER_LIMIT_REQUESTED_W: _POWER,
    Reading.MEMORY_TEMPERATURE_C: _TEMPERATURE,
    Reading.MEMORY_RESERVED_BYTES: _MEMORY,
    Reading.MEMORY_POWER_W: _POWER,
    Reading.MODULE_POWER_W: _POWER,
    Reading.ECC_CORRECTED_VOLATILE: _COUNT,
    Reading.ECC_UNCORRECTED_VOLATILE: _COUNT,
    Reading.ECC_CORRECTED_AGGREGATE: _COUNT,
    Reading.ECC_UNCORRECTED_AGGREGATE: _COUNT,
    Reading.REMAPPED_ROWS_CORRECTABLE: _COUNT,
    Reading.REMAPPED_ROWS_UNCORRECTABLE: _COUNT,
    Reading.ROW_REMAP_PENDING: _FLAG,
    Reading.ROW_REMAP_FAILED: _FLAG,
    Reading.RECOVERY_ACTION: Range(0.0, 255.0),
    Reading.PCIE_LINK_GENERATION: Range(0.0, 16.0),
    Reading.PCIE_LINK_WIDTH: Range(0.0, 64.0),
    Reading.PCIE_REPLAYS: _COUNT,
    Reading.PCIE_SENT_BYTES_PER_S: Range(0.0, 1e13, "bytes/s"),
    Reading.PCIE_RECEIVED_BYTES_PER_S: Range(0.0, 1e13, "bytes/s"),
    Reading.NVLINK_SENT_BYTES: _TRAFFIC,
    Reading.NVLINK_RECEIVED_BYTES: _TRAFFIC,
    Reading.NVLINK_ACTIVE_LINKS: Range(0.0, 256.0),
    Reading.NVLINK_ERRORS: _COUNT,
    Reading.FABRIC_STATE: Range(0.0, 255.0),
    Reading.GRAPHICS_ACTIVITY_RATIO: _RATIO,
    Reading.SM_ACTIVITY_RATIO: _RATIO,
    Reading.SM_OCCUPANCY_RATIO: _RATIO,
    Reading.TENSOR_ACTIVITY_RATIO: _RATIO,
    Reading.MEMORY_ACTIVITY_RATIO: _RATIO,
    Reading.FP16_ACTIVITY_RATIO: _RATIO,
    Reading.FP32_ACTIVITY_RATIO: _RATIO,
    Reading.FP64_ACTIVITY_RATIO: _RATIO,
    Reading.PERFORMANCE_STATE: Range(0.0, 32.0),
    Reading.PROCESSES: _COUNT,
    Reading.HOST_CPU_UTILIZATION_RATIO: _RATIO,
    Reading.HOST_MEMORY_USED_BYTES: _MEMORY,
    Reading.HOST_CPU_ENERGY_J: _ENERGY,
    Reading.HOST_MEMORY_ENERGY_J: _ENERGY,
    Reading.HOST_DISK_READ_BYTES: _TRAFFIC,
    Reading.HOST_DISK_WRITTEN_BYTES: _TRAFFIC,
    Reading.HOST_NETWORK_RECEIVED_BYTES: _TRAFFIC,
    Reading.HOST_NETWORK_SENT_BYTES: _TRAFFIC,
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
    """Cells of a column without a value, and the reason."""

    reason: AbsenceReason
    cells: Annotated[tuple[Uint32, ...], Many(_CELLS_MOST)]


def _is_sound(absence: Absence, width: int) -> bool:
    """Returns whether an absence is valid in a column of this width."""
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
        """Returns whether the column is valid, in one pass: columns are the hot path, and nearly all are valid."""
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
        """Checks ranges and absences."""
        # A reading of a newer version has no known range, but no reading is ever infinite or NaN.
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
        """Returns the value at `index`, or None if it is absent."""
        if any(index in absence.cells for absence in self.absences):
            return None
        return self.values[index]


def _are_distinct(columns: tuple[Column, ...]) -> bool:
    """Returns whether no reading repeats; those unknown to this version all look alike and are ignored."""
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
    instance_columns: Annotated[tuple[Column, ...], Many(_COLUMNS_MOST)] = ()

    def obeys(self) -> bool:
        """Returns whether `violations` would find nothing, in one pass over each column."""
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
            and not self.instance_columns
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
        """Checks the shape: columns are whole ticks, no reading repeats, time never falls."""
        ticks = len(self.time_ns)
        if self.sequence == 0:
            yield Violation("sequence", "is 0", "count batches from 1")
        if any(later < earlier for earlier, later in zip(self.time_ns, self.time_ns[1:], strict=False)):
            yield Violation("time_ns", "falls", "send ticks in order")
        for name, columns in (
            ("gpu_columns", self.gpu_columns),
            ("host_columns", self.host_columns),
            ("instance_columns", self.instance_columns),
        ):
            if not _are_distinct(columns):
                yield Violation(name, "holds one reading twice", "send each reading in one column")
            widths = {len(column.values) for column in columns}
            if len(widths) > 1 or any(not ticks or width % ticks for width in widths):
                yield Violation(name, "columns are not whole ticks of equal width", "send ticks x devices values")
        if any(len(column.values) != ticks for column in self.host_columns):
            yield Violation("host_columns", "a host column is not one value a tick", "send one value a tick")
