"""Learns what the workloads of a family have in common, with errors honest enough for conformal intervals.

Selects the samples of a family from the store, fits the covariance of each quantity and scores it on
configurations that were left out.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles import features
from eelgrid_controller.profiles.conformal import ConformalCalibration, merge_scores
from eelgrid_controller.profiles.drift import ReadingNoise
from eelgrid_controller.profiles.errors import NothingToLearnFrom
from eelgrid_controller.profiles.features import FeatureFrame, FeaturePoint, locate_configuration
from eelgrid_controller.profiles.gaussian_process import (
    GpCovariance,
    GpEvidence,
    GpPosterior,
    GpSites,
    maximize_likelihood,
    pack_parameters,
)
from eelgrid_controller.profiles.prior import log_offset
from eelgrid_controller.profiles.store import ProfileCell, ProfileStore, WorkloadProfile
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_protos.catalogue.loader import Catalogue

CONFIGURATIONS_LEAST = 6  # measured configurations, below which nothing is learned
_BLOCK, _BLOCKS = 128, 8
_JUDGED = 24  # workloads in each half, and questions for each number of known configurations
_STRANGERS = (0, 1, 3)  # configurations that are measured of a workload that the covariance never saw
_FRIENDS = (8, 16)  # and of one that it did
_DENSE = 24  # from here on each is left out of all the others
_PANEL = 192  # measurements of other workloads beside those of one that is judged
PANEL_MOST = 320  # and beside those of one that is asked for
_FLAT = 1e-6  # log units: a quantity that never changes has this spread


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


def build_evidence(
    surface_frame: FeatureFrame, centre: float, scale: float, samples: Sequence[WorkloadSample]
) -> GpEvidence:
    """The samples as arrays, one after the other."""
    places = [place for one in samples for place in one.places]
    sites = surface_frame.build_sites(
        places,
        [one.traits for one in samples for _ in one.places],
        [one.workload for one in samples for _ in one.places],
    )
    values = np.concatenate([one.values for one in samples]) if samples else np.zeros(0)
    noise = np.concatenate([one.noise for one in samples]) if samples else np.zeros(0)
    stale = np.array([old for one in samples for old in (one.stale or (False,) * len(one.places))], dtype=np.bool_)
    return GpEvidence(sites, (values - centre) / scale, noise / scale**2, stale)


def select_even_rows(counts: Sequence[int], most: int) -> list[Ints]:
    """Which rows of each of several lists to take so that there are at most `most`, as even as can be.

    Each list gives the same number if it has it, at even distances.
    """
    left, taken = most, [0] * len(counts)
    for position, index in enumerate(sorted(range(len(counts)), key=lambda one: counts[one])):
        taken[index] = min(counts[index], left // (len(counts) - position))
        left -= taken[index]
    return [
        np.unique(np.linspace(0, count - 1, share).round().astype(np.int64)) if share else np.zeros(0, dtype=np.int64)
        for count, share in zip(counts, taken, strict=True)
    ]


def _blocks(all_evidence: GpEvidence, order: Sequence[Ints], most: int) -> list[tuple[GpSites, Floats, Floats]]:
    """Rows of workloads, one workload after the other, cut into blocks."""
    rows = np.concatenate(order)[: _BLOCK * most]
    parts = np.array_split(rows, max(1, round(len(rows) / _BLOCK)))
    chosen = (all_evidence.select(part) for part in parts)
    return [(one.sites, one.values, one.noise) for one in chosen]


class _CalibrationScorer(NamedTuple):
    """Scores one workload after the other by the same covariance."""

    covariance: GpCovariance
    scale: float
    rng: np.random.Generator

    def score_known(self, mine: GpEvidence, others: GpEvidence, known: Sequence[int]) -> list[tuple[int, Floats]]:
        """With so many of its configurations known, and others too."""
        count = len(mine.values)
        shuffled = mine.select(self.rng.permutation(count))
        found = []
        for one in known:
            if count < one + 2 or one + len(others.values) == 0:
                continue
            told = join_evidence(shuffled.select(np.arange(one)), others)
            asked = shuffled.select(np.arange(one, min(count, one + _JUDGED)))
            unmeasured = np.full(len(asked.values), -1)
            mean, variance = GpPosterior(self.covariance, told, self.scale).predict_at(asked.sites, unmeasured)
            found.append((one, (asked.values - mean) / np.sqrt(variance + asked.noise)))
        return found

    def score_left_out(self, mine: GpEvidence, others: GpEvidence) -> tuple[int, Floats]:
        """With each of its configurations left out in turn."""
        count = len(mine.values)
        error, variance = GpPosterior(self.covariance, join_evidence(mine, others), self.scale).leave_one_out(
            np.arange(count)
        )
        known = max(one for one in (*_STRANGERS, *_FRIENDS, _DENSE) if one < max(count, 1))
        return known, error / np.sqrt(variance)


def join_evidence(first: GpEvidence, second: GpEvidence) -> GpEvidence:
    """One set of evidence after the other."""
    sites = GpSites(*(np.concatenate(pair) for pair in zip(first.sites, second.sites, strict=True)))
    return GpEvidence(sites, *(np.concatenate(pair) for pair in zip(first[1:], second[1:], strict=True)))


def learn_surface(samples: Sequence[WorkloadSample], seed: int) -> LearnedSurface:
    """What these workloads teach; raises NothingToLearnFrom.

    seed: of the split into halves and of which configurations are taken as known. The same
    samples and seed give the same surface.
    """
    samples = [one for one in samples if one.places]
    total = sum(len(one.places) for one in samples)
    if total < CONFIGURATIONS_LEAST:
        raise NothingToLearnFrom(
            "points", f"{total} measured configurations", f"measure at least {CONFIGURATIONS_LEAST}"
        )
    rng = np.random.default_rng(seed)
    found_frame = features.fit_frame(
        [place for one in samples for place in one.places], [one.traits for one in samples]
    )
    values = np.concatenate([one.values for one in samples])
    centre, scale = float(values.mean()), max(float(values.std()), _FLAT)
    told = build_evidence(found_frame, centre, scale, samples)
    ends = np.cumsum([len(one.places) for one in samples])
    rows = [np.arange(end - len(one.places), end) for one, end in zip(samples, ends, strict=True)]
    order = [rows[index] for index in rng.permutation(len(rows))]
    first, scores = _strangers(told, order, scale, rng) if len(order) > 1 else (None, [])
    blocks = _blocks(told, [rng.permutation(one) for one in order], _BLOCKS)
    covariance = maximize_likelihood(blocks, first)
    shares = select_even_rows([len(one) for one in rows], PANEL_MOST)
    taken = np.concatenate([one[share] for one, share in zip(rows, shares, strict=True)])
    # What was fitted makes its own errors look small, as in any regression: n / (n - p) of their variance.
    seen, fitted = sum(len(values) for _, values, _ in blocks), len(pack_parameters(covariance))
    inflation = np.sqrt(seen / (seen - min(fitted, seen / 2)))
    judge = _CalibrationScorer(covariance, scale, rng)
    for one in order[: 2 * _JUDGED]:
        mine, others = told.select(one), told.select(taken[~np.isin(taken, one)])
        judged = [*judge.score_known(mine, others, _FRIENDS), judge.score_left_out(mine, others)]
        scores += [(known, inflation * found) for known, found in judged]
    return LearnedSurface(
        found_frame,
        centre,
        scale,
        covariance,
        merge_scores(scores, _STRANGERS),
        told.select(taken),
        total,
        len(samples),
    )


def _strangers(
    told: GpEvidence, order: Sequence[Ints], scale: float, rng: np.random.Generator
) -> tuple[GpCovariance, list[tuple[int, Floats]]]:
    """Scores of workloads of each half by what was learned from the other half; the last covariance, to begin from."""
    scores: list[tuple[int, Floats]] = []
    found: GpCovariance | None = None
    for mine, theirs in ((order[::2], order[1::2]), (order[1::2], order[::2])):
        found = maximize_likelihood(_blocks(told, [rng.permutation(one) for one in mine], _BLOCKS // 2), found)
        shares = select_even_rows([len(one) for one in mine], _PANEL)
        panel = told.select(np.concatenate([one[share] for one, share in zip(mine, shares, strict=True)]))
        for one in theirs[:_JUDGED]:
            scores += _CalibrationScorer(found, scale, rng).score_known(told.select(one), panel, _STRANGERS)
    assert found is not None
    return found, scores


class LearnedFamily(NamedTuple):
    """What was learned of a family, to be journalled; reproducible from the store at `revision`."""

    family: str
    revision: int
    seed: int
    surfaces: Mapping[str, LearnedSurface]  # by quantity
    limits: Mapping[str, tuple[float, ...]]  # measured, log2 over the default, by GPU model


def reading_variance(profile: WorkloadProfile, quantity: str, stated: float = 0.0) -> float:
    """Of one reading's logarithm."""
    return max(profile.noise.get(quantity, ReadingNoise()).variance, stated * stated)


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


def learn_family(profiles: ProfileStore, family: str, catalogue: Catalogue, seed: int = 0) -> LearnedFamily:
    """Learns every quantity with enough measurements; raises NothingToLearnFrom if there is none.

    Takes seconds for a thousand configurations: work for the background, not for an event.
    """
    members = profiles.family_profiles(family)
    surfaces: dict[str, LearnedSurface] = {}
    for quantity in read_quantities(members):
        samples = [without_stale(workload_sample(profile, quantity, catalogue)[0]) for profile in members]
        if sum(len(one.places) for one in samples) >= CONFIGURATIONS_LEAST:
            surfaces[quantity] = learn_surface(samples, seed)
    if not surfaces:
        raise NothingToLearnFrom(
            "family", f"{family!r} has too few measurements", f"measure {CONFIGURATIONS_LEAST} configurations"
        )
    limits: dict[str, set[float]] = {}
    for profile in members:
        for configuration in profile.cells:
            limits.setdefault(configuration.gpu_model, set()).add(
                locate_configuration(configuration, catalogue).numbers["limit"]
            )
    found = {model: tuple(sorted(values)) for model, values in sorted(limits.items())}
    return LearnedFamily(family, profiles.revision, seed, surfaces, found)


def without_stale(one: WorkloadSample) -> WorkloadSample:
    """Without what was measured before a drift."""
    kept = [index for index, old in enumerate(one.stale) if not old]
    return WorkloadSample(
        one.workload,
        one.traits,
        tuple(one.places[index] for index in kept),
        one.values[kept],
        one.noise[kept],
    )
