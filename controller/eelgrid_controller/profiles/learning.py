"""Learns what the workloads of a family have in common, with errors honest enough for conformal intervals.

Selects the samples of a family from the store, fits the covariance of each quantity and scores it on configurations
that were left out. It imports scikit-learn, so the daemon imports it in a child process only.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles.conformal import merge_scores
from eelgrid_controller.profiles.errors import NothingToLearnFrom
from eelgrid_controller.profiles.family_kernel import count_parameters, maximize_likelihood
from eelgrid_controller.profiles.features import fit_frame, locate_configuration
from eelgrid_controller.profiles.gaussian_process import (
    GpCovariance,
    GpEvidence,
    GpPosterior,
    initial_covariance,
    join_evidence,
)
from eelgrid_controller.profiles.store import ProfileStore
from eelgrid_controller.profiles.surfaces import (
    CONFIGURATIONS_LEAST,
    LearnedFamily,
    LearnedSurface,
    WorkloadSample,
    build_evidence,
    read_quantities,
    workload_sample,
)
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_protos.catalogue.loader import Catalogue

_BLOCK, _BLOCKS = 128, 8
_JUDGED = 24  # workloads in each half, and questions for each number of known configurations
_STRANGERS = (0, 1, 3)  # configurations that are measured of a workload that the covariance never saw
_FRIENDS = (8, 16)  # and of one that it did
_DENSE = 24  # from here on each is left out of all the others
_PANEL = 192  # measurements of other workloads beside those of one that is judged
PANEL_MOST = 320  # and beside those of one that is asked for
_FLAT = 1e-6  # log units: a quantity that never changes has this spread


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


def _blocks(all_evidence: GpEvidence, order: Sequence[Ints], most: int) -> list[GpEvidence]:
    """Rows of workloads, one workload after the other, cut into blocks."""
    rows = np.concatenate(order)[: _BLOCK * most]
    return [all_evidence.select(part) for part in np.array_split(rows, max(1, round(len(rows) / _BLOCK)))]


class _CalibrationScorer(NamedTuple):
    """Scores one workload after the other by the same covariance."""

    covariance: GpCovariance
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
            mean, variance = GpPosterior(self.covariance, told).predict_at(asked.sites)
            found.append((one, (asked.values - mean) / np.sqrt(variance + asked.noise)))
        return found

    def score_left_out(self, mine: GpEvidence, others: GpEvidence) -> tuple[int, Floats]:
        """With each of its configurations left out in turn."""
        count = len(mine.values)
        error, variance = GpPosterior(self.covariance, join_evidence(mine, others)).leave_one_out(count)
        known = max(one for one in (*_STRANGERS, *_FRIENDS, _DENSE) if one < max(count, 1))
        return known, error / np.sqrt(variance)


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
    frame = fit_frame([place for one in samples for place in one.places], [one.traits for one in samples])
    values = np.concatenate([one.values for one in samples])
    centre, scale = float(values.mean()), max(float(values.std()), _FLAT)
    told = build_evidence(frame, centre, scale, samples)
    ends = np.cumsum([len(one.places) for one in samples])
    rows = [np.arange(end - len(one.places), end) for one, end in zip(samples, ends, strict=True)]
    order = [rows[index] for index in rng.permutation(len(rows))]
    first = initial_covariance(len(frame.numbers), len(frame.names), len(frame.traits), scale)
    scores: list[tuple[int, Floats]] = []
    if len(order) > 1:
        first, scores = _strangers(told, order, first, rng)
    blocks = _blocks(told, [rng.permutation(one) for one in order], _BLOCKS)
    covariance = maximize_likelihood(blocks, first)
    shares = select_even_rows([len(one) for one in rows], PANEL_MOST)
    taken = np.concatenate([one[share] for one, share in zip(rows, shares, strict=True)])
    # What was fitted makes its own errors look small, as in any regression: n / (n - p) of their variance.
    seen, fitted = sum(len(one.values) for one in blocks), count_parameters(covariance)
    inflation = np.sqrt(seen / (seen - min(fitted, seen / 2)))
    judge = _CalibrationScorer(covariance, rng)
    for one in order[: 2 * _JUDGED]:
        mine, others = told.select(one), told.select(taken[~np.isin(taken, one)])
        judged = [*judge.score_known(mine, others, _FRIENDS), judge.score_left_out(mine, others)]
        scores += [(known, inflation * found) for known, found in judged]
    return LearnedSurface(
        frame, centre, scale, covariance, merge_scores(scores, _STRANGERS), told.select(taken), total, len(samples)
    )


def _strangers(
    told: GpEvidence, order: Sequence[Ints], first: GpCovariance, rng: np.random.Generator
) -> tuple[GpCovariance, list[tuple[int, Floats]]]:
    """Scores of workloads of each half by what was learned from the other half; the last covariance, to begin from."""
    scores: list[tuple[int, Floats]] = []
    found = first
    for mine, theirs in ((order[::2], order[1::2]), (order[1::2], order[::2])):
        found = maximize_likelihood(_blocks(told, [rng.permutation(one) for one in mine], _BLOCKS // 2), found)
        shares = select_even_rows([len(one) for one in mine], _PANEL)
        panel = told.select(np.concatenate([one[share] for one, share in zip(mine, shares, strict=True)]))
        for one in theirs[:_JUDGED]:
            scores += _CalibrationScorer(found, rng).score_known(told.select(one), panel, _STRANGERS)
    return found, scores


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
