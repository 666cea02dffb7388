"""Pictures: errors and coverage of every quantity, ours beside peers, and how calibrated the intervals are.

Owns how figures are drawn. Must not know where they come from.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.models.report import CONFIDENCE_PCT, COVERED_PCT, Row
from bench.models.runs import OURS, Result
from bench.plotting import draw_figure

_NORMAL_90 = 1.6448536269514722
_SPLIT = "configuration 0.2"


def draw_summary(path: Path, rows: Sequence[Row]) -> None:
    """Median error above, coverage below; a column a quantity of a data set, configurations held out."""
    held = [row for row in rows if row.split == _SPLIT]
    cells = list(dict.fromkeys((row.data_set, row.quantity) for row in held))
    methods = list(dict.fromkeys(row.method for row in held))
    with draw_figure(path, 2, 1, size=(13, 8), grid="y", sharex=True) as (errors, covered):
        for place, method in enumerate(methods):
            mine = {(row.data_set, row.quantity): row for row in held if row.method == method}
            there = [index for index, cell in enumerate(cells) if cell in mine]
            x = np.array(there) + (place - (len(methods) - 1) / 2) * 0.8 / len(methods)
            found = [mine[cells[index]] for index in there]
            colour = "k" if method == OURS else f"C{place}"
            errors.bar(
                x, [row.figures.median_error_pct for row in found], 0.8 / len(methods), color=colour, label=method
            )
            covered.scatter(x, [row.figures.coverage_pct for row in found], color=colour, s=25)
        for index, cell in enumerate(cells):
            target = next((row.target_pct for row in held if (row.data_set, row.quantity) == cell), None)
            if target is not None:
                errors.hlines(target, index - 0.45, index + 0.45, "r", linewidth=1.2)
        errors.set_yscale("log")
        errors.set_ylabel("median error, % (red: target)")
        errors.set_title("a fifth of the configurations held out")
        errors.legend(ncols=len(methods))
        covered.axhspan(*COVERED_PCT, color="g", alpha=0.15)
        covered.axhline(CONFIDENCE_PCT, color="g", linewidth=0.8)
        covered.set_ylabel("truths within 90 % intervals, %")
        covered.set_xticks(range(len(cells)), [f"{one}\n{two}" for one, two in cells], rotation=60, fontsize=8)


def draw_calibration(path: Path, results: Sequence[Result]) -> None:
    """Share of truths within a part of the interval, against what a normal error would have there; ours alone."""
    with draw_figure(path, 1, 2, size=(12, 5.5)) as panels:
        parts = np.linspace(0.02, 2.0, 100)
        promised = np.array([2.0 * _normal_cdf(_NORMAL_90 * part) - 1.0 for part in parts])
        for panel, kind in zip(panels, (_SPLIT, "workload 1"), strict=True):
            mine = [one for one in results if one.method == OURS and one.split == kind]
            for data_set in dict.fromkeys(one.data_set for one in mine):
                for quantity in next(one.predicted for one in mine if one.data_set == data_set):
                    found = [one.predicted[quantity] for one in mine if one.data_set == data_set]
                    off = np.concatenate([np.log(one.truth / one.median) for one in found])
                    ends = np.concatenate([np.log(one.upper / one.lower) / 2.0 for one in found])
                    within = (np.abs(off)[None, :] <= parts[:, None] * ends[None, :]).mean(1)
                    panel.plot(100 * promised, 100 * within, linewidth=1, label=f"{data_set} {quantity}")
            panel.plot([0, 100], [0, 100], "k:", linewidth=0.8)
            panel.axvline(CONFIDENCE_PCT, color="g", linewidth=0.8)
            panel.set_xlabel("a normal error would lie within, %")
            panel.set_ylabel("truths that do, %")
            panel.set_title(f"{kind} (the interval promises 90 %)")
        panels[0].legend()


def _normal_cdf(z: float) -> float:
    from math import erf, sqrt

    return 0.5 * (1.0 + erf(z / sqrt(2.0)))
