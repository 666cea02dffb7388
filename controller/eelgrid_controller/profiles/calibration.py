"""Intervals that hold what they promise: conformal prediction on honest errors.

Owns the factor from a model's own standard deviation to an interval. Must not know the model.

Theory: let s_i = |error_i| / deviation_i be the scores of n configurations that the model had
not seen. The factor for confidence p is the ceil((n + 1) p)-th smallest score; if a new
configuration is exchangeable with the n, the interval +- factor * deviation contains it with
probability at least p, whatever the model got wrong about its deviation. How wrong that is
depends on how much was measured of a workload, so there is a set of scores for each of a
few numbers of measured configurations, and the largest number not above what is known counts.

Where little of a workload is known, its error is mostly one number, the same for all its
configurations, and n scores of G workloads are hardly more than G. For these the factor is
widened by what Student's distribution with G - 1 degrees of freedom asks over the normal.

Source: Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005; Lei et al.,
"Distribution-Free Predictive Inference for Regression", JASA 2018 (section 5.2, scaled scores);
Dunn, Wasserman and Ramdas, "Distribution-Free Prediction Sets for Two-Layer Hierarchical
Models", JASA 2023, for why groups count.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from eelgrid_kernels.arrays import Floats

__all__ = ["CONFIDENCE", "NORMAL_90", "Calibration", "Scores", "merged", "scores_of"]

CONFIDENCE = 0.9
NORMAL_90 = 1.6448536269514722  # deviations either way that hold 90 % of a normal distribution
_KEPT = 199  # quantiles that stand for all scores: 0.5 % steps
_FEWEST = 20  # scores, below which a neighbouring set is taken
_STUDENT_90 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)  # by degrees of freedom, from 1


class Scores(NamedTuple):
    """Quantiles of the scores where at least `known` configurations of the workload were measured."""

    known: int
    total: int  # scores behind them
    groups: int  # workloads that count instead of scores; 0 where scores do
    quantiles: tuple[float, ...]  # ascending; all scores if there are at most _KEPT

    def factor(self, confidence: float) -> float:
        """The conformal quantile, widened for few groups."""
        rank = math.ceil((len(self.quantiles) + 1) * confidence)
        found = self.quantiles[min(rank, len(self.quantiles)) - 1]
        if not self.groups:
            return found
        freedom = max(self.groups - 1, 1)
        student = _STUDENT_90[freedom - 1] if freedom <= len(_STUDENT_90) else NORMAL_90 * (1.0 + 1.0 / freedom)
        return found * student / NORMAL_90


def scores_of(known: int, scores: Floats, groups: int) -> Scores:
    """Keeps what is needed of the scores."""
    ordered = np.sort(np.abs(scores))
    if len(ordered) > _KEPT:
        ranks = np.ceil(np.arange(1, _KEPT + 1) * (len(ordered) + 1) / (_KEPT + 1)).astype(np.int64)
        ordered = ordered[np.minimum(ranks, len(ordered)) - 1]
    return Scores(known, len(scores), groups, tuple(float(score) for score in ordered))


class Calibration(NamedTuple):
    """Scores by how much was known, ascending in `known`."""

    scores: tuple[Scores, ...]

    def factor(self, known: int, confidence: float = CONFIDENCE) -> float:
        """How many of the model's deviations an interval of this confidence reaches either way.

        Without any set of enough scores it is that of a normal distribution at 90 %.
        """
        fitting = [one for one in self.scores if one.total >= _FEWEST]
        if not fitting:
            return NORMAL_90
        below = [one for one in fitting if one.known <= known]
        return (below[-1] if below else fitting[0]).factor(confidence)


def merged(parts: Iterable[tuple[int, Floats]], strangers: Iterable[int]) -> Calibration:
    """One calibration of (known, scores) of many workloads.

    strangers: the numbers of known configurations at which workloads count, not scores.
    """
    found: dict[int, list[Floats]] = {}
    for known, scores in parts:
        found.setdefault(known, []).append(scores)
    few = set(strangers)
    return Calibration(
        tuple(
            scores_of(known, np.concatenate(found[known]), len(found[known]) if known in few else 0)
            for known in sorted(found)
        )
    )
