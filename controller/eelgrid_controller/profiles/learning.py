"""What the workloads of a family have in common in one quantity, learned from what was measured.

Owns the choice of what to learn from, and the honest errors that intervals rest on. Must not
know where measurements come from, nor keep anything: a Surface is a value to be journalled.

Theory: the covariance is learned on blocks of whole workloads, since what tells how one workload
bends are its own neighbouring points. For intervals, the workloads are split in two halves;
what is learned from one half alone predicts each workload of the other, first with nothing of
it measured, then with 1, 3, 8 and 16 of its configurations, then each left out of all the
others. No score has seen the workload that it judges, neither in the covariance nor in the evidence.
A family of one workload is judged by what it learned from itself.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles import frame as frames
from eelgrid_controller.profiles.axes import Place
from eelgrid_controller.profiles.calibration import Calibration, merged
from eelgrid_controller.profiles.covariance import Covariance, Sites, packed
from eelgrid_controller.profiles.errors import NothingToLearnFrom
from eelgrid_controller.profiles.frame import Frame
from eelgrid_controller.profiles.likelihood import most_probable
from eelgrid_controller.profiles.posterior import Evidence, Posterior
from eelgrid_kernels.arrays import Floats, Ints

__all__ = ["FEWEST", "PANEL_MOST", "Sample", "Surface", "evidence", "joined", "learn", "spread_out"]

FEWEST = 6  # measured configurations, below which nothing is learned
_BLOCK, _BLOCKS = 128, 8
_JUDGED = 24  # workloads in each half, and questions for each number of known configurations
_STRANGERS = (0, 1, 3)  # configurations that are measured of a workload that the covariance never saw
_FRIENDS = (8, 16)  # and of one that it did
_DENSE = 24  # from here on each is left out of all the others
_PANEL = 192  # measurements of other workloads beside those of one that is judged
PANEL_MOST = 320  # and beside those of one that is asked for
_FLAT = 1e-6  # log units: a quantity that never changes has this spread


class Sample(NamedTuple):
    """What was measured of one workload, N configurations."""

    workload: str
    traits: Mapping[str, float]
    places: tuple[Place, ...]
    values: Floats  # (N,) natural logarithm, less what was known before
    noise: Floats  # (N,) variance of the value as it stands, log units squared
    stale: tuple[bool, ...] = ()  # measured before the last drift; () for none


class Surface(NamedTuple):
    """What was learned of one quantity of a family."""

    frame: Frame
    centre: float  # log units
    scale: float  # log units
    covariance: Covariance  # in scaled units
    calibration: Calibration
    panel: Evidence  # measurements that stand for the family, evenly of its workloads
    learned_from: int  # configurations
    workloads: int


def evidence(surface_frame: Frame, centre: float, scale: float, samples: Sequence[Sample]) -> Evidence:
    """The samples as arrays, one after the other."""
    places = [place for one in samples for place in one.places]
    sites = surface_frame.sites(
        places,
        [one.traits for one in samples for _ in one.places],
        [one.workload for one in samples for _ in one.places],
    )
    values = np.concatenate([one.values for one in samples]) if samples else np.zeros(0)
    noise = np.concatenate([one.noise for one in samples]) if samples else np.zeros(0)
    stale = np.array([old for one in samples for old in (one.stale or (False,) * len(one.places))], dtype=np.bool_)
    return Evidence(sites, (values - centre) / scale, noise / scale**2, stale)


def spread_out(counts: Sequence[int], most: int) -> list[Ints]:
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


def _blocks(all_evidence: Evidence, order: Sequence[Ints], most: int) -> list[tuple[Sites, Floats, Floats]]:
    """Rows of workloads, one workload after the other, cut into blocks."""
    rows = np.concatenate(order)[: _BLOCK * most]
    parts = np.array_split(rows, max(1, round(len(rows) / _BLOCK)))
    chosen = (all_evidence.take(part) for part in parts)
    return [(one.sites, one.values, one.noise) for one in chosen]


class _Judge(NamedTuple):
    """Scores one workload after the other by the same covariance."""

    covariance: Covariance
    scale: float
    rng: np.random.Generator

    def told(self, mine: Evidence, others: Evidence, known: Sequence[int]) -> list[tuple[int, Floats]]:
        """With so many of its configurations known, and others too."""
        count = len(mine.values)
        shuffled = mine.take(self.rng.permutation(count))
        found = []
        for one in known:
            if count < one + 2 or one + len(others.values) == 0:
                continue
            told = joined(shuffled.take(np.arange(one)), others)
            asked = shuffled.take(np.arange(one, min(count, one + _JUDGED)))
            unmeasured = np.full(len(asked.values), -1)
            mean, variance = Posterior(self.covariance, told, self.scale).at(asked.sites, unmeasured)
            found.append((one, (asked.values - mean) / np.sqrt(variance + asked.noise)))
        return found

    def left_out(self, mine: Evidence, others: Evidence) -> tuple[int, Floats]:
        """With each of its configurations left out in turn."""
        count = len(mine.values)
        error, variance = Posterior(self.covariance, joined(mine, others), self.scale).left_out(np.arange(count))
        known = max(one for one in (*_STRANGERS, *_FRIENDS, _DENSE) if one < max(count, 1))
        return known, error / np.sqrt(variance)


def joined(first: Evidence, second: Evidence) -> Evidence:
    """One set of evidence after the other."""
    sites = Sites(*(np.concatenate(pair) for pair in zip(first.sites, second.sites, strict=True)))
    return Evidence(sites, *(np.concatenate(pair) for pair in zip(first[1:], second[1:], strict=True)))


def learn(samples: Sequence[Sample], seed: int) -> Surface:
    """What these workloads teach; raises NothingToLearnFrom.

    seed: of the split into halves and of which configurations are taken as known. The same
    samples and seed give the same surface.
    """
    samples = [one for one in samples if one.places]
    total = sum(len(one.places) for one in samples)
    if total < FEWEST:
        raise NothingToLearnFrom("points", f"{total} measured configurations", f"measure at least {FEWEST}")
    rng = np.random.default_rng(seed)
    found_frame = frames.fit([place for one in samples for place in one.places], [one.traits for one in samples])
    values = np.concatenate([one.values for one in samples])
    centre, scale = float(values.mean()), max(float(values.std()), _FLAT)
    told = evidence(found_frame, centre, scale, samples)
    ends = np.cumsum([len(one.places) for one in samples])
    rows = [np.arange(end - len(one.places), end) for one, end in zip(samples, ends, strict=True)]
    order = [rows[index] for index in rng.permutation(len(rows))]
    first, scores = _strangers(told, order, scale, rng) if len(order) > 1 else (None, [])
    blocks = _blocks(told, [rng.permutation(one) for one in order], _BLOCKS)
    covariance = most_probable(blocks, first)
    shares = spread_out([len(one) for one in rows], PANEL_MOST)
    taken = np.concatenate([one[share] for one, share in zip(rows, shares, strict=True)])
    # What was fitted makes its own errors look small, as in any regression: n / (n - p) of their variance.
    seen, fitted = sum(len(values) for _, values, _ in blocks), len(packed(covariance))
    inflation = np.sqrt(seen / (seen - min(fitted, seen / 2)))
    judge = _Judge(covariance, scale, rng)
    for one in order[: 2 * _JUDGED]:
        mine, others = told.take(one), told.take(taken[~np.isin(taken, one)])
        judged = [*judge.told(mine, others, _FRIENDS), judge.left_out(mine, others)]
        scores += [(known, inflation * found) for known, found in judged]
    return Surface(
        found_frame, centre, scale, covariance, merged(scores, _STRANGERS), told.take(taken), total, len(samples)
    )


def _strangers(
    told: Evidence, order: Sequence[Ints], scale: float, rng: np.random.Generator
) -> tuple[Covariance, list[tuple[int, Floats]]]:
    """Scores of workloads of each half by what was learned from the other half; the last covariance, to begin from."""
    scores: list[tuple[int, Floats]] = []
    found: Covariance | None = None
    for mine, theirs in ((order[::2], order[1::2]), (order[1::2], order[::2])):
        found = most_probable(_blocks(told, [rng.permutation(one) for one in mine], _BLOCKS // 2), found)
        shares = spread_out([len(one) for one in mine], _PANEL)
        panel = told.take(np.concatenate([one[share] for one, share in zip(mine, shares, strict=True)]))
        for one in theirs[:_JUDGED]:
            scores += _Judge(found, scale, rng).told(told.take(one), panel, _STRANGERS)
    assert found is not None
    return found, scores
