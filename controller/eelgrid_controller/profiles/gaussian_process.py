"""Gaussian process of a workload family: covariance, maximum likelihood of its parameters, and posterior.

The log of a quantity is a level plus a shared surface, a surface of the workload and an idiosyncratic term.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_kernels.arrays import Floats, Ints

_ROOT5 = math.sqrt(5.0)


class GpSites(NamedTuple):
    """N measurements or questions, as numbers."""

    numbers: Floats  # (N, Q) coordinates, scaled to a unit spread
    names: Ints  # (N, C) codes; equal codes are equal names
    traits: Floats  # (N, T) facts about the workload, scaled
    workload: Ints  # (N,) code

    def select(self, rows: Ints | NDArray[np.bool_]) -> "GpSites":
        """Those rows, in that order."""
        return GpSites(self.numbers[rows], self.names[rows], self.traits[rows], self.workload[rows])


class SurfaceKernel(NamedTuple):
    """One of the two surfaces; variances in log units squared, lengths in units of the coordinates."""

    variance: float
    length: tuple[float, ...]  # (Q,) or (Q + T,)
    slope: tuple[float, ...]  # the same
    apart: tuple[float, ...]  # (C,)


class GpCovariance(NamedTuple):
    """What was learned about a family: see the module."""

    idiosyncrasy: float  # variance of one configuration against its neighbours, in log units squared
    level: float  # variance between workloads
    own: SurfaceKernel
    shared: SurfaceKernel


def initial_covariance(numbers: int, names: int, traits: int) -> GpCovariance:
    """What is believed before anything was learned; the quantity is scaled to a unit spread."""
    own = SurfaceKernel(0.09, (2.0,) * numbers, (0.09,) * numbers, (0.7,) * names)
    wide = numbers + traits
    return GpCovariance(1e-3, 2.0, own, SurfaceKernel(0.09, (2.0,) * wide, (0.09,) * wide, (0.7,) * names))


def pack_parameters(covariance: GpCovariance) -> Floats:
    """The parameters in a row, as logarithms."""
    own, shared = covariance.own, covariance.shared
    row = [covariance.idiosyncrasy, covariance.level]
    for part in (own, shared):
        row += [part.variance, *part.length, *part.slope, *part.apart]
    return np.log(np.array(row, dtype=np.float64))


def unpack_parameters(row: Floats, like: GpCovariance) -> GpCovariance:
    """The inverse of packed; `like` says how many there are of each."""
    values = [float(value) for value in np.exp(row)]
    parts = []
    at = 2
    for part in (like.own, like.shared):
        wide, names = len(part.length), len(part.apart)
        ends = (at + 1, at + 1 + wide, at + 1 + 2 * wide, at + 1 + 2 * wide + names)
        parts.append(
            SurfaceKernel(
                values[at],
                tuple(values[ends[0] : ends[1]]),
                tuple(values[ends[1] : ends[2]]),
                tuple(values[ends[2] : ends[3]]),
            )
        )
        at = ends[3]
    return GpCovariance(values[0], values[1], *parts)


def _matern(square: Floats) -> Floats:
    distance = _ROOT5 * np.sqrt(square)
    return (1.0 + distance + (5.0 / 3.0) * square) * np.exp(-distance)


def _surface(part: SurfaceKernel, left: Floats, right: Floats, left_names: Ints, right_names: Ints) -> Floats:
    """(N, M) covariance of one part."""
    length: Floats = np.array(part.length)
    slope: Floats = np.array(part.slope)
    a, b = left / length, right / length
    square = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2.0 * (a @ b.T)
    found: Floats = part.variance * _matern(np.maximum(square, 0.0)) + (left * slope) @ right.T
    for column, apart in enumerate(part.apart):
        found *= np.where(left_names[:, column][:, None] == right_names[:, column][None, :], 1.0, np.exp(-apart))
    return found


def cross_covariance(covariance: GpCovariance, left: GpSites, right: GpSites) -> Floats:
    """(N, M) covariance of what is smooth; the idiosyncrasy of equal sites is the caller's to add."""
    wide_left = np.hstack((left.numbers, left.traits))
    wide_right = np.hstack((right.numbers, right.traits))
    found = _surface(covariance.shared, wide_left, wide_right, left.names, right.names)
    same = left.workload[:, None] == right.workload[None, :]
    if same.any():
        own = _surface(covariance.own, left.numbers, right.numbers, left.names, right.names)
        found += np.where(same, covariance.level + own, 0.0)
    return found


def prior_variance(covariance: GpCovariance, sites: GpSites) -> Floats:
    """(N,) variance of what is smooth before anything was measured: the diagonal of between."""
    wide = np.hstack((sites.numbers, sites.traits))
    own, shared = covariance.own, covariance.shared
    found = covariance.level + own.variance + shared.variance
    return np.asarray(
        found + (sites.numbers**2) @ np.array(own.slope) + (wide**2) @ np.array(shared.slope), dtype=np.float64
    )


class SelfCovariance:
    """The covariance of N sites with themselves and its gradient, for many parameters on the same sites."""

    def __init__(self, sites: GpSites) -> None:
        wide = np.hstack((sites.numbers, sites.traits)).T
        self._count = len(sites.workload)
        self._low = rows, columns = np.tril_indices(self._count)  # all is symmetric: half of the pairs are enough
        self._same = (sites.workload[rows] == sites.workload[columns]).astype(np.float64)
        # One row a column of the sites, a pair in each place: sums over them are products of a matrix and a vector.
        self._squares = (wide[:, rows] - wide[:, columns]) ** 2
        self._products = wide[:, rows] * wide[:, columns]
        names = sites.names.T
        self._differ = (names[:, rows] != names[:, columns]).astype(np.float64)
        self._parts: list[tuple[SurfaceKernel, Floats, Floats, Floats, Floats]] = []

    def _part(self, part: SurfaceKernel, mask: Floats | None) -> Floats:
        wide = len(part.length)
        square = (1.0 / np.array(part.length) ** 2) @ self._squares[:wide] if wide else np.zeros(len(self._same))
        distance = _ROOT5 * np.sqrt(square)
        decay = np.exp(-distance)
        alike = np.exp(-(np.array(part.apart) @ self._differ)) if part.apart else np.ones_like(decay)
        if mask is not None:
            alike *= mask
        bent = part.variance * (1.0 + distance + (5.0 / 3.0) * square) * decay * alike
        steep = part.variance * (5.0 / 3.0) * (1.0 + distance) * decay * alike  # -2 d bent / d square
        found = bent + (np.array(part.slope) @ self._products[:wide]) * alike
        self._parts.append((part, found, bent, steep, alike))
        return found

    def __call__(self, covariance: GpCovariance) -> Floats:
        """(N, N)."""
        self._parts = []
        self._level = covariance.level
        self._idiosyncrasy = covariance.idiosyncrasy
        found = self._part(covariance.own, self._same) + self._part(covariance.shared, None)
        found += covariance.level * self._same
        square = np.empty((self._count, self._count))
        square[self._low] = found
        square[self._low[::-1]] = found
        square[np.diag_indices_from(square)] += covariance.idiosyncrasy
        return square

    def gradient(self, weights: Floats) -> Floats:
        """sum_ij weights_ij dK_ij / d log parameter, in the order of packed, where it was called last."""
        flat = weights[self._low] + weights[self._low[::-1]]
        flat[self._low[0] == self._low[1]] *= 0.5
        found = [self._idiosyncrasy * float(np.trace(weights)), self._level * float(flat @ self._same)]
        for part, whole, bent, steep, alike in self._parts:
            wide = len(part.length)
            found.append(float(flat @ bent))
            found += list((self._squares[:wide] @ (flat * steep)) / np.array(part.length) ** 2)
            found += list((self._products[:wide] @ (flat * alike)) * np.array(part.slope))
            found += list(-(self._differ @ (flat * whole)) * np.array(part.apart)) if part.apart else []
        return np.array(found, dtype=np.float64)


STEPS_MOST = 40
_SPREAD = 1.5  # of a parameter's logarithm around its start
_REACH = 8.0  # no parameter goes further from its start
_IMPOSSIBLE = 1e12
_FIT_JITTER = 1e-9


def maximize_likelihood(
    blocks: Sequence[tuple[GpSites, Floats, Floats]], first: GpCovariance | None = None
) -> GpCovariance:
    """The most probable covariance.

    blocks: sites, (N,) values and (N,) noise variances; values in log units scaled to zero mean
        and a unit spread over all blocks, variances in the same.
    first: where to begin; the result depends on it no more than the search is rough.
    """
    from scipy.optimize import minimize  # a third of a second: only who learns pays it

    sites = blocks[0][0]
    beliefs = initial_covariance(sites.numbers.shape[1], sites.names.shape[1], sites.traits.shape[1])
    centre = pack_parameters(beliefs)
    within = [SelfCovariance(one) for one, _, _ in blocks]

    def cost(row: Floats) -> tuple[float, Floats]:
        covariance = unpack_parameters(row, beliefs)
        off = (row - centre) / _SPREAD
        total, gradient = 0.5 * float(off @ off), off / _SPREAD
        for shaped, (_, values, noise) in zip(within, blocks, strict=True):
            found = _block(shaped, covariance, values, noise)
            if found is None:
                return _IMPOSSIBLE, np.zeros_like(row)
            total, gradient = total + found[0], gradient + found[1]
        return total, gradient

    bounds = [(float(middle) - _REACH, float(middle) + _REACH) for middle in centre]
    begin = centre if first is None else pack_parameters(first)
    found = minimize(cost, begin, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": STEPS_MOST})
    return unpack_parameters(np.asarray(found.x, dtype=np.float64), beliefs)


def _block(
    within: SelfCovariance, covariance: GpCovariance, values: Floats, noise: Floats
) -> tuple[float, Floats] | None:
    """Minus the log likelihood of a block and its gradient; None where the matrix is not one."""
    found = within(covariance)
    found[np.diag_indices_from(found)] += noise + _FIT_JITTER
    try:
        lower = np.linalg.cholesky(found)
    except np.linalg.LinAlgError:
        return None
    inverse_lower = np.linalg.inv(lower)
    inverse = inverse_lower.T @ inverse_lower
    weights = inverse @ values
    gradient = 0.5 * within.gradient(inverse - np.outer(weights, weights))
    return 0.5 * float(values @ weights) + float(np.log(np.diag(lower)).sum()), gradient


STALE_SHIFT = 0.4  # spread of the unknown shift of what was measured before a drift, log units: a factor of 1.5
STALE_NOISE = 0.05  # and of what each of them may have moved besides, log units
_JITTER = 1e-9


class GpEvidence(NamedTuple):
    """N measured sites; values and noise in scaled log units."""

    sites: GpSites
    values: Floats  # (N,)
    noise: Floats  # (N,) variance of the mean of a site's readings
    stale: NDArray[np.bool_]  # (N,) measured before the last drift

    def select(self, rows: Ints | NDArray[np.bool_]) -> "GpEvidence":
        """Those rows, in that order."""
        return GpEvidence(self.sites.select(rows), self.values[rows], self.noise[rows], self.stale[rows])


class GpPosterior:
    """Beliefs after N measurements; `scale` is the log units of one scaled unit."""

    def __init__(self, covariance: GpCovariance, evidence: GpEvidence, scale: float) -> None:
        self._covariance, self._evidence = covariance, evidence
        found = cross_covariance(covariance, evidence.sites, evidence.sites)
        stale = evidence.stale.astype(np.float64)
        found += (STALE_SHIFT / scale) ** 2 * np.outer(stale, stale)
        found[np.diag_indices_from(found)] += (
            covariance.idiosyncrasy + evidence.noise + (STALE_NOISE / scale) ** 2 * stale + _JITTER
        )
        lower_inverse = np.linalg.inv(np.linalg.cholesky(found))
        self._inverse = lower_inverse.T @ lower_inverse
        self._weights = self._inverse @ evidence.values

    def predict_at(self, questions: GpSites, measured: Ints) -> tuple[Floats, Floats]:
        """(M,) mean and (M,) variance of the quantity at M questions.

        measured: (M,) row of the evidence that is the same configuration, or -1.
        The noise of a reading is not in the variance.
        """
        known = cross_covariance(self._covariance, questions, self._evidence.sites)
        rows = np.flatnonzero(measured >= 0)
        known[rows, measured[rows]] += self._covariance.idiosyncrasy
        mean = known @ self._weights
        variance = prior_variance(self._covariance, questions) + self._covariance.idiosyncrasy
        variance = variance - ((known @ self._inverse) * known).sum(1)
        return mean, np.maximum(variance, 0.0)

    def predict_difference(self, sites: GpSites, measured: Ints) -> tuple[Floats, Floats]:
        """(M,) mean and (M,) variance of the quantity at M sites less what it is at one more, the last.

        What they have in common, such as a level that nobody measured, is in neither. measured: (M + 1,) as in `at`.
        None of the M is the last one.
        """
        known = cross_covariance(self._covariance, sites, self._evidence.sites)
        rows = np.flatnonzero(measured >= 0)
        known[rows, measured[rows]] += self._covariance.idiosyncrasy
        known = known[:-1] - known[-1]
        apart = prior_variance(self._covariance, sites) + self._covariance.idiosyncrasy
        base = sites.select(np.array([len(measured) - 1]))
        shared = cross_covariance(self._covariance, sites, base)[:-1, 0]
        variance = apart[:-1] + apart[-1] - 2.0 * shared - ((known @ self._inverse) * known).sum(1)
        return known @ self._weights, np.maximum(variance, 0.0)

    def leave_one_out(self, rows: Ints) -> tuple[Floats, Floats]:
        """Error and variance of each of these rows as the others predict its reading."""
        variance = 1.0 / self._inverse[rows, rows]
        return self._weights[rows] * variance, variance

    def leave_group_out(self, rows: Ints) -> tuple[Floats, Floats]:
        """The same with all of these rows left out at once."""
        covariance = np.linalg.inv(self._inverse[np.ix_(rows, rows)])
        return covariance @ self._weights[rows], np.diag(covariance).copy()
