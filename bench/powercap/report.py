"""The figures of all policies as files and as tables to read.

Owns columns, rows and how they print. Must not know how anything was measured.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.powercap.single import Ceiling, Outcome
from bench.powercap.zeus import Run
from bench.tables import format_table, write_csv

__all__ = ["MEAN", "ClusterRow", "Row", "cluster_table", "means", "models_table", "row", "rows_table", "write"]

MEAN = "mean"


class Row(NamedTuple):
    """One policy on one job over all seeds; savings in per cent of the energy at the largest limit."""

    model: str
    workload: str
    network: str
    batch: str
    epochs: float
    policy: str
    seeds: int
    slowdown_pct: float
    slowdown_most_pct: float
    promise_kept: str  # of the seeds
    saving_pct: float  # as claimed
    saving_least_pct: float  # of the seeds
    oracle_pct: float
    oracle_share_pct: float | None
    drawn_pct: float
    in_turn_bound_pct: float
    oracle_limit_w: float | None
    main_limit_w: float | None


class ClusterRow(NamedTuple):
    """One policy on fleets of several seeds."""

    budgets: str  # one, or a tree
    level_pct: float  # of what all largest limits charge
    policy: str
    seeds: int
    throughput_pct: float  # mean over jobs and seeds of throughput kept
    bound_pct: float
    gap_pct: float  # to the bound, mean
    gap_most_pct: float
    violations: int  # budgets exceeded, in sum over seeds
    seconds: float


def row(run: Run, policy: str, outcomes: Sequence[Outcome], at_most: Ceiling) -> Row:
    """The mean over seeds."""
    saving = statistics.fmean(one.claimed for one in outcomes)
    limits = [one.main_limit_w for one in outcomes]
    return Row(
        run.model,
        run.key.workload,
        run.key.network,
        str(run.key.batch),
        run.epochs,
        policy,
        len(outcomes),
        100.0 * statistics.fmean(one.slowdown for one in outcomes),
        100.0 * max(one.slowdown for one in outcomes),
        f"{sum(one.kept for one in outcomes)}/{len(outcomes)}",
        100.0 * saving,
        100.0 * min(one.claimed for one in outcomes),
        100.0 * at_most.oracle,
        100.0 * saving / at_most.oracle if at_most.oracle > 0.0 else None,
        100.0 * statistics.fmean(one.drawn for one in outcomes),
        100.0 * at_most.in_turn,
        at_most.oracle_limit_w,
        statistics.mode(limits),
    )


def means(rows: Sequence[Row]) -> list[Row]:
    """One row for each GPU model and policy: the mean over workloads; the share is of the means."""
    found: dict[tuple[str, str], list[Row]] = {}
    for one in rows:
        found.setdefault((one.model, one.policy), []).append(one)
    made = []
    for (model, policy), group in found.items():
        kept = [[int(part) for part in one.promise_kept.split("/")] for one in group]
        saving, oracle = (
            statistics.fmean(getattr(one, name) for one in group) for name in ("saving_pct", "oracle_pct")
        )
        made.append(
            Row(
                model,
                MEAN,
                "",
                "",
                statistics.fmean(one.epochs for one in group),
                policy,
                group[0].seeds,
                statistics.fmean(one.slowdown_pct for one in group),
                max(one.slowdown_most_pct for one in group),
                f"{sum(one for one, _ in kept)}/{sum(other for _, other in kept)}",
                saving,
                statistics.fmean(one.saving_least_pct for one in group),
                oracle,
                100.0 * saving / oracle if oracle > 0.0 else None,
                statistics.fmean(one.drawn_pct for one in group),
                statistics.fmean(one.in_turn_bound_pct for one in group),
                None,
                None,
            )
        )
    return made


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def write(path: Path, rows: Iterable[NamedTuple]) -> None:
    """A line a row, named by its fields."""
    listed = list(rows)
    columns = listed[0]._fields if listed else ()
    write_csv(path, columns, ([_cell(value) for value in one] for one in listed))


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def rows_table(rows: Iterable[Row], policy: str) -> str:
    """One policy, a line a job."""
    lines = [
        {
            "model": one.model,
            "workload": one.workload,
            "batch": one.batch,
            "oracle W": _number(one.oracle_limit_w, 0),
            "ours W": _number(one.main_limit_w, 0),
            "saving %": _number(one.saving_pct),
            "oracle %": _number(one.oracle_pct),
            "share %": _number(one.oracle_share_pct, 0),
            "slower %": _number(one.slowdown_pct, 2),
            "most %": _number(one.slowdown_most_pct, 2),
            "kept": one.promise_kept,
        }
        for one in rows
        if one.policy == policy
    ]
    return format_table(None, lines, words=2)


def models_table(rows: Iterable[Row]) -> str:
    """All policies, a line a GPU model."""
    lines = [
        {
            "model": one.model,
            "policy": one.policy,
            "saving %": _number(one.saving_pct, 2),
            "oracle %": _number(one.oracle_pct, 2),
            "share %": _number(one.oracle_share_pct),
            "drawn %": _number(one.drawn_pct, 2),
            "in turn %": _number(one.in_turn_bound_pct, 2),
            "slower %": _number(one.slowdown_pct, 2),
            "most %": _number(one.slowdown_most_pct, 2),
            "kept": one.promise_kept,
        }
        for one in rows
    ]
    return format_table(None, lines, words=2)


def cluster_table(rows: Iterable[ClusterRow]) -> str:
    """All policies at all levels."""
    lines = [
        {
            "budgets": one.budgets,
            "level %": _number(one.level_pct, 0),
            "policy": one.policy,
            "throughput %": _number(one.throughput_pct, 2),
            "bound %": _number(one.bound_pct, 2),
            "gap %": _number(one.gap_pct, 3),
            "most %": _number(one.gap_most_pct, 3),
            "exceeded": str(one.violations),
            "s": _number(one.seconds, 3),
        }
        for one in rows
    ]
    return format_table(None, lines, words=3)


def sensitivity(rows: Mapping[str, Sequence[Row]], policy: str) -> str:
    """One policy under other scatter, a line each: share of the oracle by GPU model, and promises kept."""
    models = list(dict.fromkeys(one.model for group in rows.values() for one in group))
    lines = []
    for name, group in rows.items():
        mean = {one.model: one for one in means(group) if one.policy == policy}
        lines.append(
            (
                name,
                *(_number(mean[model].oracle_share_pct) if model in mean else "-" for model in models),
                _number(max(one.slowdown_most_pct for one in mean.values()), 2),
                " ".join(mean[model].promise_kept for model in models if model in mean),
            )
        )
    return format_table(("scatter of a window", *models, "slowest %", "kept"), lines, words=1)
