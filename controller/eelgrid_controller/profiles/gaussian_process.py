"""Gaussian process of a workload family: its covariance and its posterior, in numpy and scipy alone.

The log of a quantity is a level plus a shared surface, a surface of the workload and an idiosyncratic term.
The covariance's parameters are learned elsewhere (learning.py, in a child process). A posterior here has the
numbers of scikit-learn's GaussianProcessRegressor.predict with the same kernel, and adds differences of two sites.

Sites are rows of a matrix (N, 3 + Q + T + C): the codes of workload and configuration, 1 for what was measured before
the last drift, Q coordinates, T facts about the workload (both scaled to a unit spread) and C codes of names.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular

from eelgrid_kernels.arrays import Floats, Ints

WORKLOAD, CONFIGURATION, STALE, COORDINATES = 0, 1, 2, 3  # columns of a site; coordinates are the first of Q
JITTER = 1e-9  # added to every diagonal, in scaled log units squared
STALE_SHIFT = 0.4  # spread of the unknown shift of what was measured before a drift, log units: a factor of 1.5
STALE_NOISE = 0.05  # and of what each of them may have moved besides, log units
_ROOT5 = math.sqrt(5.0)


class SurfaceCovariance(NamedTuple):
    """One of the two surfaces; variances in log units squared, lengths in units of the coordinates."""

    variance: float
    length: tuple[float, ...]  # (Q,) or (Q + T,)
    slope: tuple[float, ...]  # the same
    apart: tuple[float, ...]  # (C,)


class GpCovariance(NamedTuple):
    """What was learned about a family: see the module."""

    idiosyncrasy: float  # variance of one configuration against its neighbours, in log units squared
    level: float  # variance between workloads
    drift: float  # variance of the shift that all stale measurements have in common
    own: SurfaceCovariance
    shared: SurfaceCovariance


def initial_covariance(numbers: int, names: int, traits: int, scale: float = 1.0) -> GpCovariance:
    """What is believed before anything was learned of so many coordinates, names and facts.

    scale: log units of one scaled unit.
    """
    own = SurfaceCovariance(0.09, (2.0,) * numbers, (0.09,) * numbers, (0.7,) * names)
    wide = numbers + traits
    shared = SurfaceCovariance(0.09, (2.0,) * wide, (0.09,) * wide, (0.7,) * names)
    return GpCovariance(1e-3, 2.0, (STALE_SHIFT / scale) ** 2, own, shared)


def matern_terms(square: Floats) -> tuple[Floats, Floats]:
    """Matern 5/2 at squared distances, and -2 times its derivative by them."""
    distance = _ROOT5 * np.sqrt(square)
    decay = np.exp(-distance)
    return (1.0 + distance + (5.0 / 3.0) * square) * decay, (5.0 / 3.0) * (1.0 + distance) * decay


def name_factor(apart: tuple[float, ...], left: Floats, right: Floats) -> Floats:
    """(N, M) what names that differ leave of a covariance; left: (N, C) codes, right: (M, C)."""
    found = np.ones((len(left), len(right)))
    for column, one in enumerate(apart):
        found *= np.where(left[:, column][:, None] == right[:, column][None, :], 1.0, math.exp(-one))
    return found


def surface_covariance(surface: SurfaceCovariance, left: Floats, right: Floats, names: slice) -> Floats:
    """(N, M) covariance of one surface between two sets of sites; names: the columns of names."""
    columns = slice(COORDINATES, COORDINATES + len(surface.length))
    a, b = left[:, columns], right[:, columns]
    length: Floats = np.array(surface.length, dtype=np.float64)
    near, far = a / length, b / length
    square = (near * near).sum(1)[:, None] + (far * far).sum(1)[None, :] - 2.0 * (near @ far.T)
    matern, _ = matern_terms(np.maximum(square, 0.0))
    found: Floats = surface.variance * matern + (a * np.array(surface.slope, dtype=np.float64)) @ b.T
    return found * name_factor(surface.apart, left[:, names], right[:, names])


def name_columns(covariance: GpCovariance) -> slice:
    """The columns of names in a matrix of sites."""
    first = COORDINATES + len(covariance.shared.length)
    return slice(first, first + len(covariance.shared.apart))


def cross_covariance(covariance: GpCovariance, left: Floats, right: Floats) -> Floats:
    """(N, M) covariance of the quantity between two sets of sites, without the noise of readings."""
    names = name_columns(covariance)
    found = surface_covariance(covariance.shared, left, right, names)
    same = left[:, WORKLOAD][:, None] == right[:, WORKLOAD][None, :]
    if same.any():
        found += np.where(same, covariance.level + surface_covariance(covariance.own, left, right, names), 0.0)
    found += covariance.idiosyncrasy * (left[:, CONFIGURATION][:, None] == right[:, CONFIGURATION][None, :])
    if left[:, STALE].any() and right[:, STALE].any():
        found += covariance.drift * np.outer(left[:, STALE], right[:, STALE])
    return found


def prior_variance(covariance: GpCovariance, sites: Floats) -> Floats:
    """(N,) variance of the quantity before anything was measured: the diagonal of cross_covariance."""
    found = covariance.level + covariance.idiosyncrasy + covariance.drift * sites[:, STALE]
    for surface in (covariance.own, covariance.shared):
        coordinates = sites[:, COORDINATES : COORDINATES + len(surface.slope)]
        found = found + surface.variance + (coordinates**2) @ np.array(surface.slope, dtype=np.float64)
    return np.asarray(found, dtype=np.float64)


class GpEvidence(NamedTuple):
    """N measured sites; values and noise in scaled log units."""

    sites: Floats  # (N, 3 + Q + T + C)
    values: Floats  # (N,)
    noise: Floats  # (N,) variance of the mean of a site's readings, and of what a drift may have moved it by

    def select(self, rows: Ints | NDArray[np.bool_]) -> "GpEvidence":
        """Those rows, in that order."""
        return GpEvidence(self.sites[rows], self.values[rows], self.noise[rows])


def join_evidence(first: GpEvidence, second: GpEvidence) -> GpEvidence:
    """One set of evidence after the other."""
    return GpEvidence(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))


class GpPosterior:
    """Beliefs after N measurements, by the arithmetic of GaussianProcessRegressor.predict."""

    def __init__(self, covariance: GpCovariance, evidence: GpEvidence) -> None:
        self._covariance, self._sites = covariance, evidence.sites
        found = cross_covariance(covariance, evidence.sites, evidence.sites)
        found[np.diag_indices_from(found)] += evidence.noise + JITTER
        self._lower = cholesky(found, lower=True, overwrite_a=True, check_finite=False)
        self._weights = cho_solve((self._lower, True), evidence.values, check_finite=False)

    def predict_at(self, questions: Floats) -> tuple[Floats, Floats]:
        """(M,) mean and (M,) variance of the quantity at M sites.

        A question with the code of a measured configuration shares its idiosyncrasy. The noise of a reading is not
        in the variance.
        """
        known = cross_covariance(self._covariance, questions, self._sites)
        variance = prior_variance(self._covariance, questions) - self._explained(known)
        return known @ self._weights, np.maximum(variance, 0.0)

    def predict_difference(self, questions: Floats, base: Floats) -> tuple[Floats, Floats]:
        """(M,) mean and (M,) variance of the quantity at M sites less what it is at `base`, (1, ...), another one.

        What they have in common, such as a level that nobody measured, is in neither.
        """
        known = cross_covariance(self._covariance, questions, self._sites)
        known -= cross_covariance(self._covariance, base, self._sites)
        apart = prior_variance(self._covariance, questions) + prior_variance(self._covariance, base)
        shared = cross_covariance(self._covariance, questions, base)[:, 0]
        variance = apart - 2.0 * shared - self._explained(known)
        return known @ self._weights, np.maximum(variance, 0.0)

    def leave_one_out(self, count: int) -> tuple[Floats, Floats]:
        """Error and variance of each of the first `count` measurements as all others predict its reading.

        Rasmussen and Williams 2006, equations 5.10 to 5.12.
        """
        first = np.eye(len(self._lower))[:, :count]
        roots = solve_triangular(self._lower, first, lower=True, check_finite=False)
        variance = 1.0 / (roots * roots).sum(0)
        return self._weights[:count] * variance, variance

    def _explained(self, known: Floats) -> Floats:
        """(M,) variance that the measurements take away; known: (M, N) covariance with them."""
        root = solve_triangular(self._lower, known.T, lower=True, check_finite=False)
        return np.asarray((root * root).sum(0), dtype=np.float64)
