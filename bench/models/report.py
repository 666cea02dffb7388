"""Figures and tables of prediction results. Must not know models.

summary.csv, a line a family of workloads, quantity, split and method:
    data_set, quantity   as in docs/explanation/profiles.md
    split                configuration 0.2: so large a share of configurations held out, their workloads known;
                         workload K: whole workloads held out, K configurations of each given back; gpu: known
                         workloads on a GPU model that others of the family were measured on
    method               eelgrid, or a peer of bench/models/peers.py
    runs                 seeds, or folds
    points               held-out truths over all runs
    unanswered           questions, in addition to `points`, answered by a reason instead (peers answer everything)
    median_error_pct, p90_error_pct   of |median / truth - 1|
    coverage_pct         share of truths within [lower, upper], which should be CONFIDENCE_PCT
    coverage_sd_pct      spread of the coverage between seeds (or folds)
    width_pct            median of (upper - lower) / median
    fit_s                seconds to learn all quantities, the mean of the runs
    answer_ms            milliseconds for each configuration and quantity; empty where it is part of fit_s
    target_pct           what median_error_pct should stay under; empty where there is no target
    meets                error: the error is within the target; coverage: 88 to 92 %; both; none; empty for peers
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.models.runs import OURS, Predicted, Result
from bench.tables import format_table

CONFIDENCE_PCT = 90.0
COVERED_PCT = (88.0, 92.0)
_LATENCIES = ("latency", "itl_", "time_per_epoch", "iteration_time")
COLUMNS = (
    "data_set",
    "quantity",
    "split",
    "method",
    "runs",
    "points",
    "unanswered",
    "median_error_pct",
    "p90_error_pct",
    "coverage_pct",
    "coverage_sd_pct",
    "width_pct",
    "fit_s",
    "answer_ms",
    "target_pct",
    "meets",
)


class Figures(NamedTuple):
    """Of one set of predictions; see the module."""

    points: int
    median_error_pct: float
    p90_error_pct: float
    coverage_pct: float
    coverage_sd_pct: float
    width_pct: float


def figures(parts: Sequence[Predicted]) -> Figures:
    """All parts together, a part a seed or a fold."""
    errors = np.concatenate([part.errors for part in parts])
    inside = np.concatenate([part.inside for part in parts])
    widths = np.concatenate([(part.upper - part.lower) / part.median for part in parts])
    between = np.array([part.inside.mean() for part in parts])
    return Figures(
        len(errors),
        100.0 * float(np.median(errors)),
        100.0 * float(np.quantile(errors, 0.9)),
        100.0 * float(inside.mean()),
        100.0 * float(between.std()),
        100.0 * float(np.median(widths)),
    )


class Row(NamedTuple):
    """One line of the summary."""

    data_set: str
    quantity: str
    split: str
    method: str
    runs: int
    unanswered: int
    figures: Figures
    fit_s: float
    answer_ms: float | None
    target_pct: float | None

    @property
    def meets(self) -> str:
        """Which of the two targets it meets."""
        if self.method != OURS or self.target_pct is None:
            return ""
        error = self.figures.median_error_pct < self.target_pct
        covered = COVERED_PCT[0] <= self.figures.coverage_pct <= COVERED_PCT[1]
        return {(True, True): "both", (True, False): "error", (False, True): "coverage"}.get((error, covered), "none")


def _target_pct(quantity: str, split: str) -> float | None:
    """Under 5 % of power and 10 % of latency on configurations not seen, a fifth of them held out."""
    if split != "configuration 0.2":
        return None
    if quantity == "power":
        return 5.0
    return 10.0 if any(part in quantity for part in _LATENCIES) else None


def rows(results: Sequence[Result]) -> list[Row]:
    """All results of one kind together."""
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for one in results:
        for quantity in one.predicted:
            groups.setdefault((one.data_set, quantity, one.split, one.method), []).append(one)
    return [_row(key, runs) for key, runs in groups.items()]


def _row(key: tuple[str, str, str, str], runs: Sequence[Result]) -> Row:
    _, quantity, split, method = key
    judged = figures([one.predicted[quantity] for one in runs])
    fit_s = sum(one.fit_s for one in runs) / len(runs)
    answer_ms = 1e3 * sum(one.answer_s for one in runs) / len(runs) if method == OURS else None
    unanswered = sum(one.unanswered.get(quantity, 0) for one in runs)
    return Row(*key, len(runs), unanswered, judged, fit_s, answer_ms, _target_pct(quantity, split))


def csv_rows(found: Sequence[Row]) -> list[tuple[object, ...]]:
    """As in the file."""
    return [_csv_row(row) for row in found]


def _csv_row(row: Row) -> tuple[object, ...]:
    errors = (f"{value:.2f}" for value in row.figures[1:])
    answer_ms = "" if row.answer_ms is None else f"{row.answer_ms:.3f}"
    target = "" if row.target_pct is None else row.target_pct
    return (*row[:5], row.figures.points, row.unanswered, *errors, f"{row.fit_s:.2f}", answer_ms, target, row.meets)


def table(found: Sequence[Row]) -> str:
    """As text, ours and each peer's median error side by side."""
    header = (
        "data set",
        "quantity",
        "split",
        "points",
        "unanswered",
        "error %",
        "p90 %",
        "covered %",
        "width %",
        "meets",
        "peers: error % (covered %)",
    )
    lines = []
    for row in found:
        if row.method != OURS:
            continue
        others = [
            f"{one.method} {one.figures.median_error_pct:.1f} ({one.figures.coverage_pct:.0f})"
            for one in found
            if (one.data_set, one.quantity, one.split) == row[:3] and one.method != OURS
        ]
        value = row.figures
        numbers = [f"{one:.1f}" for one in (value.median_error_pct, value.p90_error_pct, value.coverage_pct)]
        lines.append(
            (
                *row[:3],
                str(value.points),
                str(row.unanswered),
                *numbers,
                f"{value.width_pct:.1f}",
                row.meets or "-",
                ", ".join(others),
            )
        )
    return format_table(header, lines, 3)
