"""The figures of all runs as files and as tables to read.

Owns the columns of summary.csv and penalties.csv. Must not know how a run was made.

summary.csv, a line a policy in a run or a fleet (model `all`; trace `own` has each
service on the trace of its kind):
    task, model, trace, rate      what is served and how many times the trace
    objective_ms                  of the p95 inter-token latency
    policy                        as in policies.py
    services, windows             how many services, and one-minute windows of all of them
    violated, bound_violated      windows not served as promised, by the audit; the LP's own
    energy_mj, bound_mj           of the whole pool, idle GPUs and starts counted; of the LP
    gap_pct                       the first above the second
    gap_above_idle_pct            the same less what the pool draws idle, on both sides
    gap_whole_pct                 above idle, against the bound of whole instances
    whole_above_lp_pct            that bound above the LP: what whole instances cost at least
    energy_per_token_j            energy of what serves, and starts, by tokens asked for
    undivided_pct                 what a run without a change of point within a window would add
    starts, start_pct             instances started; their share of what serves
    decision_ms                   time of a choice, mean of a window
"""

import statistics
from collections.abc import Iterable
from pathlib import Path

from bench.llm.runs import Outcome, Penalty
from bench.tables import format_table, write_csv

__all__ = ["COLUMNS", "fleet_table", "penalty_table", "service_table", "write_penalties", "write_summary"]

COLUMNS = (
    "task",
    "model",
    "trace",
    "rate",
    "objective_ms",
    "policy",
    "services",
    "windows",
    "violated",
    "bound_violated",
    "energy_mj",
    "bound_mj",
    "gap_pct",
    "gap_above_idle_pct",
    "gap_whole_pct",
    "whole_above_lp_pct",
    "energy_per_token_j",
    "undivided_pct",
    "starts",
    "start_pct",
    "decision_ms",
)
NEAR_PCT = 3.0


def _cells(run: Outcome) -> tuple[object, ...]:
    return (
        run.task,
        run.model,
        run.trace,
        f"{run.rate:g}",
        f"{run.objective_ms:g}",
        run.policy,
        run.services,
        run.windows,
        run.violated,
        run.bound_violated,
        f"{run.energy_j / 1e6:.4f}",
        f"{(run.pool_idle_j + run.bound_j) / 1e6:.4f}",
        f"{run.gap_pct:.3f}",
        f"{run.gap_above_idle_pct:.3f}",
        f"{run.gap_whole_pct:.3f}",
        f"{100.0 * (run.whole_j / run.bound_j - 1.0):.3f}",
        f"{run.serving_j / run.tokens:.5f}",
        f"{100.0 * (run.undivided_j / run.serving_j - 1.0):.3f}" if run.serving_j else "",
        run.starts,
        f"{100.0 * run.start_j / run.serving_j:.3f}" if run.serving_j else "",
        f"{1e3 * run.decision_s:.3f}",
    )


def write_summary(path: Path, runs: Iterable[Outcome]) -> None:
    """One line a policy in a run or a fleet."""
    write_csv(path, COLUMNS, map(_cells, runs))


def write_penalties(path: Path, found: Iterable[Penalty]) -> None:
    """What least latency costs, beside the published numbers."""
    write_csv(
        path,
        Penalty._fields,
        ((f"{one.objective_ms:g}", one.services, f"{one.median:.4f}", f"{one.published:g}") for one in found),
    )


def fleet_table(found: Iterable[Outcome]) -> str:
    """Every fleet: energy against the bound, and windows violated."""
    lines = [
        {
            "trace": run.trace,
            "policy": run.policy,
            "rate": f"{run.rate:g}",
            "ms": f"{run.objective_ms:g}",
            "services": str(run.services),
            "violated": str(run.violated),
            "bound": str(run.bound_violated),
            "MJ": f"{run.energy_j / 1e6:.1f}",
            "LP MJ": f"{(run.pool_idle_j + run.bound_j) / 1e6:.1f}",
            "gap %": f"{run.gap_pct:.2f}",
            "above idle %": f"{run.gap_above_idle_pct:.2f}",
            "over whole %": f"{run.gap_whole_pct:.2f}",
            "J/token": f"{run.serving_j / run.tokens:.4f}",
            "starts %": f"{100.0 * run.start_j / run.serving_j:.2f}",
            "ms/window": f"{1e3 * run.decision_s:.2f}",
        }
        for run in found
    ]
    return format_table(None, lines, 2)


def service_table(runs: Iterable[Outcome], policy: str) -> str:
    """How the gaps of single services are spread, for one policy."""
    groups: dict[tuple[str, float, float], list[Outcome]] = {}
    for run in runs:
        if run.policy == policy:
            groups.setdefault((run.trace, run.rate, run.objective_ms), []).append(run)
    header = ("trace", "rate", "ms", "services", "within 3 %", "median %", "worst %", "above idle: median %", "whole")
    lines = []
    for (trace, rate, objective_ms), group in groups.items():
        gaps = [run.gap_pct for run in group]
        lines.append(
            (
                trace,
                f"{rate:g}",
                f"{objective_ms:g}",
                str(len(group)),
                str(sum(gap <= NEAR_PCT for gap in gaps)),
                f"{statistics.median(gaps):.2f}",
                f"{max(gaps):.2f}",
                f"{statistics.median(run.gap_above_idle_pct for run in group):.2f}",
                f"{statistics.median(100.0 * (run.whole_j / run.bound_j - 1.0) for run in group):.2f}",
            )
        )
    return format_table(header, lines, 1)


def penalty_table(found: Iterable[Penalty]) -> str:
    """What least latency costs, and whether the published number is met."""
    return "\n".join(
        f"least latency costs {one.median:.2f}x the best admissible energy per token at {one.objective_ms:g} ms"
        f" (median of {one.services}; published {one.published:g},"
        f" {'met' if abs(one.median - one.published) < 0.01 else 'NOT met'})"
        for one in found
    )
