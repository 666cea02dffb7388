"""What runs came to as tables, and the files that they are written to: CSV, or Parquet where pyarrow is.

Owns columns and files. Must not know how a run was made or what is printed.
Units stand in the names of columns; energy leaves SI here, as kWh. A file is
written aside and renamed, so that a reader never sees half of it.
"""

import csv
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from eelgrid_controller.errors import import_library
from eelgrid_controller.replay.policy_comparison import ArrivalRunResult, TimedRunResult
from eelgrid_controller.replay.run_statistics import GRID, JOULES_PER_KWH, mean_curves, saving_mean_pct, value_at
from eelgrid_protos.safe_text import escape_csv_cell

TableCell = str | int | float


class TableFormat(Enum):
    """The files to write."""

    CSV = "csv"
    PARQUET = "parquet"


class ResultTable(NamedTuple):
    """Rows under titles."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]


def _table(name: str, rows: Iterable[dict[str, TableCell]]) -> ResultTable:
    every = list(rows)
    return ResultTable(name, tuple(every[0]), tuple(tuple(row.values()) for row in every))


def _times_row(trace: str, run: TimedRunResult) -> dict[str, TableCell]:
    sums = run.summary
    gpu_h = sums.gpu_s / 3600.0
    energy_kwh = sums.energy_j / JOULES_PER_KWH
    return {
        "trace": trace,
        "policy": run.policy,
        "seed": run.seed,
        "span_h": sums.span_s / 3600.0,
        "energy_kwh": energy_kwh,
        "energy_over_idle_kwh": sums.energy_over_idle_j / JOULES_PER_KWH,
        "kwh_per_gpu_h": energy_kwh / gpu_h if gpu_h else 0.0,
        "cost": sums.cost,
        "carbon_kg": sums.carbon_kg,
        "wait_mean_s": sums.wait_mean_s,
        "wait_p95_s": sums.wait_p95_s,
        "gpus_allocated_mean": sums.gpus_mean,
        "gpus_allocated_peak": sums.gpus_peak,
        "gpu_h": gpu_h,
        "lost_gpu_h": sums.lost_gpu_s / 3600.0,
        "tasks": sums.tasks,
        "finished": sums.finished,
        "running": sums.running,
        "waiting": sums.waiting,
        "refused": sums.refused,
        "restarts": sums.restarts,
    }


def times_summary(trace: str, runs: Sequence[TimedRunResult]) -> ResultTable:
    """A row for each run."""
    return _table("summary", (_times_row(trace, run) for run in runs))


def times_series(runs: Sequence[TimedRunResult]) -> ResultTable:
    """A row for each stretch of each run; each value is its mean over the stretch."""
    columns = ("policy", "seed", "from_s", "power_w", "gpus_allocated", "waiting", "running", "nodes_away")
    rows = (
        (run.policy, run.seed, *values)
        for run in runs
        for values in zip(*(column.tolist() for column in run.series), strict=True)
    )
    return ResultTable("series", columns, tuple(rows))


def _arrivals_row(trace: str, run: ArrivalRunResult, reference: str, saved_pct: float) -> dict[str, TableCell]:
    allocated_1 = value_at(run.curves.allocated, 1.0)
    return {
        "trace": trace,
        "policy": run.policy,
        "seed": run.seed,
        "reference": reference,
        "saving_mean_pct": saved_pct,
        "grar_1": allocated_1 / value_at(run.curves.arrived, 1.0),
        "alloc_100_pct": 100.0 * allocated_1,
        "alloc_130_pct": 100.0 * float(run.curves.allocated[-1]),
        "power_half_w": value_at(run.curves.power_w, 0.5),
        "power_full_w": value_at(run.curves.power_w, 1.0),
        "tasks": run.tasks,
        "placed": run.placed,
        "refused": run.tasks - run.placed,
    }


def arrivals_summary(trace: str, runs: Sequence[ArrivalRunResult]) -> ResultTable:
    """A row for each run; watts are saved against the mean of the first policy's runs."""
    reference = runs[0].policy
    theirs = mean_curves([run.curves for run in runs if run.policy == reference])
    return _table(
        "summary", (_arrivals_row(trace, run, reference, saving_mean_pct(run.curves, theirs)) for run in runs)
    )


def arrivals_series(runs: Sequence[ArrivalRunResult]) -> ResultTable:
    """A row for each load of each run."""
    columns = ("policy", "seed", "arrived_share", "power_w", "allocated_share")
    rows = (
        (run.policy, run.seed, float(x), float(power_w), float(share))
        for run in runs
        for x, power_w, share in zip(GRID, run.curves.power_w, run.curves.allocated, strict=True)
    )
    return ResultTable("series", columns, tuple(rows))


def _write_csv(path: Path, table: ResultTable) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(table.columns)
        out.writerows(
            [f"{cell:.10g}" if isinstance(cell, float) else escape_csv_cell(cell) for cell in row] for row in table.rows
        )


def _parquet_writer() -> Callable[[Path, ResultTable], None]:
    arrow: Any = import_library("pyarrow", "--format parquet", "'eelgrid[parquet]', or take --format csv")
    parquet: Any = import_library("pyarrow.parquet", "--format parquet", "'eelgrid[parquet]', or take --format csv")

    def write(path: Path, table: ResultTable) -> None:
        columns = zip(*table.rows, strict=True) if table.rows else ((),) * len(table.columns)
        parquet.write_table(arrow.table(dict(zip(table.columns, map(list, columns), strict=True))), path)

    return write


def table_writer(wanted: TableFormat) -> Callable[[Path, ResultTable], Path]:
    """What writes a table into a folder and gives the file; raises LibraryMissing, before any work is done."""
    write = _write_csv if wanted is TableFormat.CSV else _parquet_writer()

    def into(folder: Path, table: ResultTable) -> Path:
        path = folder / f"{table.name}.{wanted.value}"
        aside = path.with_suffix(".part")
        write(aside, table)
        return aside.replace(path)

    return into
