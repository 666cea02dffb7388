"""Conformal calibration: scales the model's standard deviations to intervals with the stated coverage."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from eelgrid_kernels.arrays import Floats

CONFIDENCE = 0.9
NORMAL_90 = 1.6448536269514722  # deviations either way that hold 90 % of a normal distribution
_KEPT = 199  # quantiles that stand for all scores: 0.5 % steps
_FEWEST = 20  # scores, below which a neighbouring set is taken
_STUDENT_90 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)  # by degrees of freedom, from 1


class ConformityScores(NamedTuple):
    """Quantiles of the scores where at least `known` configurations of the workload were measured."""

    known: int
    total: int  # scores behind them
    groups: int  # workloads that count instead of scores; 0 where scores do
    quantiles: tuple[float, ...]  # ascending; all scores if there are at most _KEPT

    def interval_factor(self, confidence: float) -> float:
        """The conformal quantile, widened for few groups."""
        rank = math.ceil((len(self.quantiles) + 1) * confidence)
        found = self.quantiles[min(rank, len(self.quantiles)) - 1]
        if not self.groups:
            return found
        freedom = max(self.groups - 1, 1)
        student = _STUDENT_90[freedom - 1] if freedom <= len(_STUDENT_90) else NORMAL_90 * (1.0 + 1.0 / freedom)
        return found * student / NORMAL_90


def summarize_scores(known: int, scores: Floats, groups: int) -> ConformityScores:
    """Keeps what is needed of the scores."""
    ordered = np.sort(np.abs(scores))
    if len(ordered) > _KEPT:
        ranks = np.ceil(np.arange(1, _KEPT + 1) * (len(ordered) + 1) / (_KEPT + 1)).astype(np.int64)
        ordered = ordered[np.minimum(ranks, len(ordered)) - 1]
    return ConformityScores(known, len(scores), groups, tuple(float(score) for score in ordered))


class ConformalCalibration(NamedTuple):
    """Scores by how much was known, ascending in `known`."""

    scores: tuple[ConformityScores, ...]

    def interval_factor(self, known: int, confidence: float = CONFIDENCE) -> float:
        """How many of the model's deviations an interval of this confidence reaches either way.

        Without any set of enough scores it is that of a normal distribution at 90 %.
        """
        fitting = [one for one in self.scores if one.total >= _FEWEST]
        if not fitting:
            return NORMAL_90
        below = [one for one in fitting if one.known <= known]
        return (below[-1] if below else fitting[0]).interval_factor(confidence)


def merge_scores(parts: Iterable[tuple[int, Floats]], strangers: Iterable[int]) -> ConformalCalibration:
    """One calibration of (known, scores) of many workloads.

    strangers: the numbers of known configurations at which workloads count, not scores.
    """
    found: dict[int, list[Floats]] = {}
    for known, scores in parts:
        found.setdefault(known, []).append(scores)
    few = set(strangers)
    return ConformalCalibration(
        tuple(
            summarize_scores(known, np.concatenate(found[known]), len(found[known]) if known in few else 0)
            for known in sorted(found)
        )
    )
