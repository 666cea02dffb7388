"""Intervals that hold what they promise: conformal prediction on honest errors.

Owns the factor from a model's own standard deviation to an interval. Must not know the model.

Theory: let s_i = |error_i| / deviation_i be the scores of n configurations that the model had
not seen. The factor for confidence p is the ceil((n + 1) p)-th smallest score; if a new
configuration is exchangeable with the n, the interval +- factor * deviation contains it with
probability at least p, whatever the model got wrong about its deviation. How wrong that is
depends on how much was measured of a workload, so there is a set of scores for each of a
few numbers of measured configurations, and the largest number not above what is known counts.

Source: Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005; Lei et al.,
"Distribution-Free Predictive Inference for Regression", JASA 2018 (section 5.2, scaled scores).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from eelgrid_kernels.arrays import Floats

__all__ = ["CONFIDENCE", "NORMAL_90", "Calibration", "Scores", "merged", "scores_of"]

CONFIDENCE = 0.9
_KEPT = 199  # quantiles that stand for all scores: 0.5 % steps
_FEWEST = 20  # scores, below which the normal distribution is believed instead
NORMAL_90 = 1.6448536269514722  # of 90 %
_NORMAL_OF = {0.5: 0.6744897501960817, 0.8: 1.2815515655446004, 0.9: NORMAL_90, 0.95: 1.959963984540054}


class Scores(NamedTuple):
    """Quantiles of the scores where at least `known` configurations of the workload were measured."""

    known: int
    count: int  # of scores behind them
    quantiles: tuple[float, ...]  # ascending; all scores if there are at most _KEPT


def scores_of(known: int, scores: Floats) -> Scores:
    """Keeps what is needed of the scores."""
    ordered = np.sort(np.abs(scores))
    if len(ordered) > _KEPT:
        ranks = np.ceil(np.arange(1, _KEPT + 1) * (len(ordered) + 1) / (_KEPT + 1)).astype(np.int64)
        ordered = ordered[np.minimum(ranks, len(ordered)) - 1]
    return Scores(known, len(scores), tuple(float(score) for score in ordered))


class Calibration(NamedTuple):
    """Scores by how much was known, ascending in `known`."""

    scores: tuple[Scores, ...]

    def factor(self, known: int, confidence: float = CONFIDENCE) -> float:
        """How many of the model's deviations an interval of this confidence reaches either way."""
        fitting = [one for one in self.scores if one.count >= _FEWEST]
        if not fitting:
            return _normal(confidence)
        chosen = max((one for one in fitting if one.known <= known), key=lambda one: one.known, default=fitting[0])
        rank = math.ceil((len(chosen.quantiles) + 1) * confidence)
        return chosen.quantiles[min(rank, len(chosen.quantiles)) - 1]


def _normal(confidence: float) -> float:
    near = min(_NORMAL_OF, key=lambda one: abs(one - confidence))
    return _NORMAL_OF[near]


def merged(parts: Iterable[tuple[int, Floats]]) -> Calibration:
    """One calibration of (known, scores) from several sources."""
    found: dict[int, list[Floats]] = {}
    for known, scores in parts:
        found.setdefault(known, []).append(scores)
    return Calibration(tuple(scores_of(known, np.concatenate(found[known])) for known in sorted(found)))
