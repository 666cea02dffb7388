"""The figures of all policies as files and as a table to read.

Owns the columns of summary.csv, savings.csv, runs.csv, curves.csv, joint.csv and
published.csv, and the printed tables. Must not know how anything was measured.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.openb.joint import JointGap
from bench.openb.lines import Moved, Timed
from bench.openb.measure import DENSE_X, SAVING_X, Bounds, Figures
from bench.openb.published import Distance
from bench.tables import format_table, write_csv
from eelgrid_controller.replay.run_statistics import GRID, ArrivalCurves

__all__ = [
    "Row",
    "RunRow",
    "published_table",
    "table",
    "write_bounds",
    "write_curves",
    "write_joint",
    "write_published",
    "write_runs",
    "write_savings",
    "write_summary",
]

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
    gap_joint_pct: float | None = None  # mean watts over the joint LP's, see bench.openb.joint
    moved: Moved | None = None
    timed: Timed | None = None

    @property
    def saving_moved_pct(self) -> float | None:
        """The mean saving with what moves gain."""
        return None if self.moved is None else self.figures.saving_mean_pct + self.moved.gain_pct


class RunRow(NamedTuple):
    """One run; the saving is against the mean of the reference over all seeds."""

    trace: str
    policy: str
    seed: int
    saving_mean_pct: float
    saving_per_gpu_pct: float
    alloc_100_pct: float
    alloc_130_pct: float
    placed: int
    arrived: int
    run_s: float
    idle_mean_us: float  # between decisions: quotes, and kinds weighed by them


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def write_summary(path: Path, rows: Iterable[Row]) -> None:
    """One line a policy and trace; the cell of a gap is empty where no bound was computed."""
    write_csv(
        path,
        None,
        (
            {
                "trace": row.trace,
                "policy": row.policy,
                "seeds": row.seeds,
                "saving_mean_pct": _cell(row.figures.saving_mean_pct, 3),
                "saving_per_gpu_pct": _cell(row.figures.saving_per_gpu_pct, 3),
                "grar_1": _cell(row.figures.grar_1, 5),
                "alloc_100_pct": _cell(row.figures.alloc_100_pct, 3),
                "alloc_130_pct": _cell(row.figures.alloc_130_pct, 3),
                "gap_power_pct": _cell(row.figures.gap_power_pct, 3),
                "gap_alloc_pp": _cell(row.figures.gap_alloc_pp, 3),
                "gap_joint_pct": _cell(row.gap_joint_pct, 3),
                "moves": _cell(row.moved and row.moved.moves, 1),
                "saving_moved_pct": _cell(row.saving_moved_pct, 3),
                "over_idle_kwh": _cell(row.timed and row.timed.energy_kwh, 3),
                "saving_kwh_pct": _cell(row.timed and row.timed.saving_pct, 3),
                "decision_p50_us": _cell(row.decision_p50_us, 2),
                "decision_p99_us": _cell(row.decision_p99_us, 2),
            }
            for row in rows
        ),
    )


def write_savings(path: Path, rows: Iterable[Row]) -> None:
    """Saving at each load, and watts per allocated GPU where the fleet is nearly full."""
    write_csv(
        path,
        _SAVINGS_COLUMNS,
        (
            (row.trace, row.policy, *(f"{value:.3f}" for value in (*row.figures.saving_pct, *row.figures.gpu_w)))
            for row in rows
        ),
    )


def write_runs(path: Path, rows: Iterable[RunRow]) -> None:
    """One line a run, for the spread over seeds."""
    write_csv(
        path,
        RunRow._fields,
        (
            (*row[:3], *(f"{value:.3f}" for value in row[3:7]), *row[7:9], *(f"{value:.3f}" for value in row[9:]))
            for row in rows
        ),
    )


def write_curves(path: Path, curves: Iterable[tuple[str, str, ArrivalCurves]]) -> None:
    """Watts and allocation at every point of the grid, mean over seeds."""
    write_csv(
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
    write_csv(
        path,
        ("trace", "seed", "x", "power_w_least", "alloc_100_pct_most"),
        (
            (trace, seed, f"{x:.2f}", f"{power_w:.1f}", f"{100.0 * bounds.allocated_1:.3f}")
            for trace, seed, bounds in found
            for x, power_w in zip(bounds.x, bounds.power_w, strict=True)
        ),
    )


def write_joint(path: Path, gaps: Iterable[JointGap]) -> None:
    """Mean watts of each policy beside the joint LP's, one line an order of arrivals."""
    write_csv(
        path,
        ("trace", "policy", "seed", "power_w", "power_w_least", "gap_joint_pct"),
        ((*gap[:3], f"{gap.power_w:.1f}", f"{gap.power_w_least:.1f}", f"{gap.gap_pct:.3f}") for gap in gaps),
    )


def write_published(path: Path, found: Iterable[Distance]) -> None:
    """Every published number beside ours."""
    write_csv(
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


def table(rows: Iterable[Row]) -> str:
    """What one wants to see at once: per cent, GRAR, watts a GPU, gaps and microseconds."""
    lines = [
        {
            "trace": row.trace,
            "policy": row.policy,
            "seeds": row.seeds,
            "saving": _cell(row.figures.saving_mean_pct, 2),
            "per GPU": _cell(row.figures.saving_per_gpu_pct, 2),
            **{f".{round(10 * x)}": _cell(value, 1) for x, value in zip(SAVING_X, row.figures.saving_pct, strict=True)},
            "GRAR": _cell(row.figures.grar_1, 4),
            "at 100": _cell(row.figures.alloc_100_pct, 2),
            "at 130": _cell(row.figures.alloc_130_pct, 2),
            **{f"W/GPU {x:g}": _cell(value, 1) for x, value in zip(DENSE_X, row.figures.gpu_w, strict=True)},
            "gap W": _cell(row.figures.gap_power_pct, 2) or "-",
            "gap GPU": _cell(row.figures.gap_alloc_pp, 2) or "-",
            "gap joint": _cell(row.gap_joint_pct, 2) or "-",
            "moves": _cell(row.moved and row.moved.moves, 0) or "-",
            "moved": _cell(row.saving_moved_pct, 2) or "-",
            "kWh": _cell(row.timed and row.timed.energy_kwh, 0) or "-",
            "of kWh": _cell(row.timed and row.timed.saving_pct, 2) or "-",
            "p50 us": _cell(row.decision_p50_us, 1),
            "p99 us": _cell(row.decision_p99_us, 1),
        }
        for row in rows
    ]
    return format_table(None, lines, words=2)


def published_table(found: Sequence[Distance]) -> str:
    """The distance to every published number, and how many are near enough."""
    lines = [
        {
            "trace": one.published.trace,
            "policy": one.published.policy,
            "metric": one.published.metric,
            "x": f"{one.published.x:.2f}",
            "published": f"{one.published.value:.2f}",
            "ours": f"{one.ours:.2f}",
            "pp": f"{one.pp:+.2f}",
            "allowed": f"{one.allowed_pp:g}",
            "": "" if one.near else "FAR",
        }
        for one in found
    ]
    near = sum(one.near for one in found)
    return f"{format_table(None, lines, words=3)}\n{near} of {len(found)} published numbers are near enough"
