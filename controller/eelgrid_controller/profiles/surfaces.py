"""What is learned of a family, its conformal calibration, and the measurements that it is learned from.

A LearnedFamily comes from the process that learns (learning.py). Together with the samples of a workload it is all
that a prediction needs, and none of it needs scikit-learn. The calibration scales the model's standard deviations to
intervals with the stated coverage.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles.features import FeatureFrame, FeaturePoint, locate_configuration
from eelgrid_controller.profiles.gaussian_process import CONFIGURATION, STALE, STALE_NOISE, GpCovariance, GpEvidence
from eelgrid_controller.profiles.prior import log_offset
from eelgrid_controller.profiles.store import CELLS_MOST, ProfileCell, WorkloadProfile, reading_variance
from eelgrid_kernels.arrays import Floats
from eelgrid_protos.catalogue.loader import Catalogue

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


CONFIGURATIONS_LEAST = 6  # measured configurations, below which nothing is learned


class WorkloadSample(NamedTuple):
    """What was measured of one workload, N configurations."""

    workload: str
    traits: Mapping[str, float]
    places: tuple[FeaturePoint, ...]
    values: Floats  # (N,) natural logarithm, less what was known before
    noise: Floats  # (N,) variance of the value as it stands, log units squared
    stale: tuple[bool, ...] = ()  # measured before the last drift; () for none


class LearnedSurface(NamedTuple):
    """What was learned of one quantity of a family."""

    frame: FeatureFrame
    centre: float  # log units
    scale: float  # log units
    covariance: GpCovariance  # in scaled units
    calibration: ConformalCalibration
    panel: GpEvidence  # measurements that stand for the family, evenly of its workloads
    learned_from: int  # configurations
    workloads: int


class LearnedFamily(NamedTuple):
    """What was learned of a family, to be journalled; reproducible from the store at `revision`."""

    family: str
    revision: int
    seed: int
    surfaces: Mapping[str, LearnedSurface]  # by quantity
    limits: Mapping[str, tuple[float, ...]]  # measured, log2 over the default, by GPU model


def build_evidence(
    surface_frame: FeatureFrame, centre: float, scale: float, samples: Sequence[WorkloadSample]
) -> GpEvidence:
    """The samples as arrays, one after the other.

    A question has the code of the last fresh measurement in its place. Others there, and stale ones, have codes of
    their own: what is particular to them says nothing of a reading now.
    """
    sites = surface_frame.build_sites(
        [place for one in samples for place in one.places],
        [one.traits for one in samples for _ in one.places],
        [one.workload for one in samples for _ in one.places],
    )
    values = np.concatenate([one.values for one in samples]) if samples else np.zeros(0)
    noise = np.concatenate([one.noise for one in samples]) if samples else np.zeros(0)
    sites[:, STALE] = [old for one in samples for old in (one.stale or (False,) * len(one.places))]
    last = {code: row for row, code in enumerate(sites[:, CONFIGURATION].tolist()) if not sites[row, STALE]}
    others = np.setdiff1d(np.arange(len(sites)), np.fromiter(last.values(), dtype=np.int64))
    within = np.array([index for one in samples for index in range(len(one.places))], dtype=np.int64)
    sites[others, CONFIGURATION] += (1.0 + within[others]) / (2.0 * CELLS_MOST)
    return GpEvidence(sites, (values - centre) / scale, (noise + STALE_NOISE**2 * sites[:, STALE]) / scale**2)


def workload_sample(
    profile: WorkloadProfile, quantity: str, catalogue: Catalogue
) -> tuple[WorkloadSample, tuple[ProfileCell, ...]]:
    """What was measured of one quantity of a workload, and the cells that it is from."""
    cells = tuple(cell for cell in profile.cells.values() if quantity in cell.tallies)
    values, noise = [], []
    places = tuple(locate_configuration(cell.configuration, catalogue) for cell in cells)
    for cell, where in zip(cells, places, strict=True):
        tally = cell.tallies[quantity]
        values.append(tally.mean - log_offset(quantity, where, catalogue))
        noise.append(reading_variance(profile, quantity, tally.stated) / tally.readings)
    found = WorkloadSample(
        profile.workload.workload,
        profile.workload.traits,
        places,
        np.array(values, dtype=np.float64),
        np.array(noise, dtype=np.float64),
        tuple(profile.is_stale(cell) for cell in cells),
    )
    return found, cells


def read_quantities(profiles: Sequence[WorkloadProfile]) -> tuple[str, ...]:
    """Every quantity that was read of any of them."""
    return tuple(sorted({name for profile in profiles for cell in profile.cells.values() for name in cell.tallies}))
