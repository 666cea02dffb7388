"""The figures of all policies as files and as a table to read.

Owns the columns of summary.csv, savings.csv, runs.csv, curves.csv and
published.csv, and the printed tables. Must not know how anything was measured.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.openb.measure import DENSE_X, SAVING_X, Bounds, Figures
from bench.openb.published import Distance
from eelgrid_controller.replay.run_statistics import GRID, ArrivalCurves

__all__ = [
    "SUMMARY_COLUMNS",
    "Row",
    "RunRow",
    "published_table",
    "table",
    "write_bounds",
    "write_curves",
    "write_published",
    "write_runs",
    "write_savings",
    "write_summary",
]

SUMMARY_COLUMNS = (
    "trace",
    "policy",
    "seeds",
    "saving_mean_pct",
    "grar_1",
    "alloc_100_pct",
    "alloc_130_pct",
    "gap_power_pct",
    "gap_alloc_pp",
    "decision_p50_us",
    "decision_p99_us",
)
_SAVINGS_COLUMNS = (
    "trace",
    "policy",
    *(f"saving_pct_at_{x:.1f}" for x in SAVING_X),
    *(f"w_per_allocated_gpu_at_{x:.2f}" for x in DENSE_X),
)


class Row(NamedTuple):
    """One policy on one trace over all seeds."""

    trace: str
    policy: str
    seeds: int
    figures: Figures
    decision_p50_us: float
    decision_p99_us: float


class RunRow(NamedTuple):
    """One run; the saving is against the mean of the reference over all seeds."""

    trace: str
    policy: str
    seed: int
    saving_mean_pct: float
    alloc_100_pct: float
    alloc_130_pct: float
    placed: int
    arrived: int
    run_s: float
    idle_mean_us: float  # between decisions: quotes, and kinds weighed by them


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def _summary_cells(row: Row) -> tuple[str, ...]:
    figures = row.figures
    return (
        row.trace,
        row.policy,
        str(row.seeds),
        _cell(figures.saving_mean_pct, 3),
        _cell(figures.grar_1, 5),
        _cell(figures.alloc_100_pct, 3),
        _cell(figures.alloc_130_pct, 3),
        _cell(figures.gap_power_pct, 3),
        _cell(figures.gap_alloc_pp, 3),
        _cell(row.decision_p50_us, 2),
        _cell(row.decision_p99_us, 2),
    )


def write_summary(path: Path, rows: Iterable[Row]) -> None:
    """One line a policy and trace; the cell of a gap is empty where no bound was computed."""
    _write(path, SUMMARY_COLUMNS, map(_summary_cells, rows))


def write_savings(path: Path, rows: Iterable[Row]) -> None:
    """Saving at each load, and watts per allocated GPU where the fleet is nearly full."""
    _write(
        path,
        _SAVINGS_COLUMNS,
        (
            (row.trace, row.policy, *(f"{value:.3f}" for value in (*row.figures.saving_pct, *row.figures.gpu_w)))
            for row in rows
        ),
    )


def write_runs(path: Path, rows: Iterable[RunRow]) -> None:
    """One line a run, for the spread over seeds."""
    _write(
        path,
        RunRow._fields,
        (
            (*row[:3], *(f"{value:.3f}" for value in row[3:6]), *row[6:8], *(f"{value:.3f}" for value in row[8:]))
            for row in rows
        ),
    )


def write_curves(path: Path, curves: Iterable[tuple[str, str, ArrivalCurves]]) -> None:
    """Watts and allocation at every point of the grid, mean over seeds."""
    _write(
        path,
        ("trace", "policy", "x", "power_w", "allocated_pct"),
        (
            (trace, policy, f"{x:.3f}", f"{power_w:.1f}", f"{100.0 * allocated:.3f}")
            for trace, policy, mean in curves
            for x, power_w, allocated in zip(GRID, mean.power_w, mean.allocated, strict=True)
        ),
    )


def write_bounds(path: Path, found: Iterable[tuple[str, int, Bounds]]) -> None:
    """Least watts at each load, infinite where not all can be placed, and the most that can be allocated at 1."""
    _write(
        path,
        ("trace", "seed", "x", "power_w_least", "alloc_100_pct_most"),
        (
            (trace, seed, f"{x:.2f}", f"{power_w:.1f}", f"{100.0 * bounds.allocated_1:.3f}")
            for trace, seed, bounds in found
            for x, power_w in zip(bounds.x, bounds.power_w, strict=True)
        ),
    )


def write_published(path: Path, found: Iterable[Distance]) -> None:
    """Every published number beside ours."""
    _write(
        path,
        ("trace", "policy", "metric", "x", "published", "ours", "difference_pp", "allowed_pp", "near", "source"),
        (
            (
                *one.published[:3],
                f"{one.published.x:.2f}",
                f"{one.published.value:.3f}",
                f"{one.ours:.3f}",
                f"{one.pp:+.3f}",
                one.allowed_pp,
                "yes" if one.near else "no",
                one.published.source,
            )
            for one in found
        ),
    )


def _aligned(header: Sequence[str], lines: Sequence[Sequence[str]], words: int) -> str:
    """Text in columns; the first `words` columns are words, the others numbers."""
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
    texts = []
    for line in (header, *lines):
        cells = [
            cell.ljust(width) if column < words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def table(rows: Iterable[Row]) -> str:
    """What one wants to see at once: per cent, GRAR, watts a GPU, gaps and microseconds."""
    header = (
        "trace",
        "policy",
        "seeds",
        "saving",
        *(f".{round(10 * x)}" for x in SAVING_X),
        "GRAR",
        "at 100",
        "at 130",
        *(f"W/GPU {x:g}" for x in DENSE_X),
        "gap W",
        "gap GPU",
        "p50 us",
        "p99 us",
    )
    lines = [
        (
            row.trace,
            row.policy,
            str(row.seeds),
            _cell(row.figures.saving_mean_pct, 2),
            *(_cell(value, 1) for value in row.figures.saving_pct),
            _cell(row.figures.grar_1, 4),
            _cell(row.figures.alloc_100_pct, 2),
            _cell(row.figures.alloc_130_pct, 2),
            *(_cell(value, 1) for value in row.figures.gpu_w),
            _cell(row.figures.gap_power_pct, 2) or "-",
            _cell(row.figures.gap_alloc_pp, 2) or "-",
            _cell(row.decision_p50_us, 1),
            _cell(row.decision_p99_us, 1),
        )
        for row in rows
    ]
    return _aligned(header, lines, words=2)


def published_table(found: Sequence[Distance]) -> str:
    """The distance to every published number, and how many are near enough."""
    lines = [
        (
            one.published.trace,
            one.published.policy,
            one.published.metric,
            f"{one.published.x:.2f}",
            f"{one.published.value:.2f}",
            f"{one.ours:.2f}",
            f"{one.pp:+.2f}",
            f"{one.allowed_pp:g}",
            "" if one.near else "FAR",
        )
        for one in found
    ]
    header = ("trace", "policy", "metric", "x", "published", "ours", "pp", "allowed", "")
    near = sum(one.near for one in found)
    return f"{_aligned(header, lines, words=3)}\n{near} of {len(found)} published numbers are near enough"
