"""What predictions are judged by.

Owns the figures of one set of predictions. Must not know models or data sets.

    median_error_pct, p90_error_pct   of |median / truth - 1|
    coverage_pct                      share of truths within [lower, upper], which should be 90
    coverage_sd_pct                   spread of the coverage between seeds (or folds)
    width_pct                         median of (upper - lower) / median
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_kernels.arrays import Floats

__all__ = ["CONFIDENCE_PCT", "Figures", "Predicted", "figures"]

CONFIDENCE_PCT = 90.0


class Predicted(NamedTuple):
    """Truths beside intervals, all (N,) and in the same unit."""

    truth: Floats
    median: Floats
    lower: Floats
    upper: Floats

    @property
    def errors(self) -> Floats:
        """(N,) as shares."""
        return np.abs(self.median / self.truth - 1.0)

    @property
    def inside(self) -> Floats:
        """(N,) 1 where the interval holds the truth."""
        return ((self.lower <= self.truth) & (self.truth <= self.upper)).astype(np.float64)


class Figures(NamedTuple):
    """See the module."""

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
