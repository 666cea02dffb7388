"""How alike two measurements are: the covariance of a family of workloads on one quantity.

Owns the covariance and its derivatives, on arrays. Must not know configurations, units
or what a workload is beyond a code.

Theory: the logarithm of a quantity of workload w at coordinates x is
    y_w(x) = level_w + shared(x, t_w) + own_w(x) + idiosyncrasy of (w, x)
four independent Gaussian processes with zero mean. `level_w` is one number a workload;
`shared` is what all workloads of the family have in common, and may go by facts t_w about
the workload; `own_w` is where a workload departs from the others. `shared` and `own` each
have
    k(x, x') = (variance * matern(r) + sum_j slope_j x_j x'_j) * exp(-sum_c apart_c [x_c != x'_c])
    r^2 = sum_j ((x_j - x'_j) / length_j)^2
    matern(r) = (1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r)
The slopes make power laws cheap to believe, so that what lies past the measurements goes on
as it went; the matern bends them. A name that differs (another GPU model) weakens what one
measurement says of the other by a factor that is learned.

Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006: chapter 4
for the covariances, section 5.4.1 for the gradient of the marginal likelihood; Duvenaud,
Nickisch and Rasmussen, "Additive Gaussian Processes", NIPS 2011, for sums of parts.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_kernels.arrays import Floats, Ints

__all__ = ["Covariance", "Part", "Sites", "Within", "between", "packed", "prior_variance", "start", "unpacked"]

_ROOT5 = math.sqrt(5.0)


class Sites(NamedTuple):
    """N measurements or questions, as numbers."""

    numbers: Floats  # (N, Q) coordinates, scaled to a unit spread
    names: Ints  # (N, C) codes; equal codes are equal names
    traits: Floats  # (N, T) facts about the workload, scaled
    workload: Ints  # (N,) code

    def take(self, rows: Ints | NDArray[np.bool_]) -> "Sites":
        """Those rows, in that order."""
        return Sites(self.numbers[rows], self.names[rows], self.traits[rows], self.workload[rows])


class Part(NamedTuple):
    """One of the two surfaces; variances in log units squared, lengths in units of the coordinates."""

    variance: float
    length: tuple[float, ...]  # (Q,) or (Q + T,)
    slope: tuple[float, ...]  # the same
    apart: tuple[float, ...]  # (C,)


class Covariance(NamedTuple):
    """What was learned about a family: see the module."""

    idiosyncrasy: float  # variance of one configuration against its neighbours, in log units squared
    level: float  # variance between workloads
    own: Part
    shared: Part


def start(numbers: int, names: int, traits: int) -> Covariance:
    """What is believed before anything was learned; the quantity is scaled to a unit spread."""
    own = Part(0.09, (2.0,) * numbers, (0.09,) * numbers, (0.7,) * names)
    wide = numbers + traits
    return Covariance(1e-3, 2.0, own, Part(0.09, (2.0,) * wide, (0.09,) * wide, (0.7,) * names))


def packed(covariance: Covariance) -> Floats:
    """The parameters in a row, as logarithms."""
    own, shared = covariance.own, covariance.shared
    row = [covariance.idiosyncrasy, covariance.level]
    for part in (own, shared):
        row += [part.variance, *part.length, *part.slope, *part.apart]
    return np.log(np.array(row, dtype=np.float64))


def unpacked(row: Floats, like: Covariance) -> Covariance:
    """The inverse of packed; `like` says how many there are of each."""
    values = [float(value) for value in np.exp(row)]
    parts = []
    at = 2
    for part in (like.own, like.shared):
        wide, names = len(part.length), len(part.apart)
        ends = (at + 1, at + 1 + wide, at + 1 + 2 * wide, at + 1 + 2 * wide + names)
        parts.append(
            Part(
                values[at],
                tuple(values[ends[0] : ends[1]]),
                tuple(values[ends[1] : ends[2]]),
                tuple(values[ends[2] : ends[3]]),
            )
        )
        at = ends[3]
    return Covariance(values[0], values[1], *parts)


def _matern(square: Floats) -> Floats:
    distance = _ROOT5 * np.sqrt(square)
    return (1.0 + distance + (5.0 / 3.0) * square) * np.exp(-distance)


def _surface(part: Part, left: Floats, right: Floats, left_names: Ints, right_names: Ints) -> Floats:
    """(N, M) covariance of one part."""
    length: Floats = np.array(part.length)
    slope: Floats = np.array(part.slope)
    a, b = left / length, right / length
    square = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2.0 * (a @ b.T)
    found: Floats = part.variance * _matern(np.maximum(square, 0.0)) + (left * slope) @ right.T
    for column, apart in enumerate(part.apart):
        found *= np.where(left_names[:, column][:, None] == right_names[:, column][None, :], 1.0, np.exp(-apart))
    return found


def between(covariance: Covariance, left: Sites, right: Sites) -> Floats:
    """(N, M) covariance of what is smooth; the idiosyncrasy of equal sites is the caller's to add."""
    wide_left = np.hstack((left.numbers, left.traits))
    wide_right = np.hstack((right.numbers, right.traits))
    found = _surface(covariance.shared, wide_left, wide_right, left.names, right.names)
    same = left.workload[:, None] == right.workload[None, :]
    if same.any():
        own = _surface(covariance.own, left.numbers, right.numbers, left.names, right.names)
        found += np.where(same, covariance.level + own, 0.0)
    return found


def prior_variance(covariance: Covariance, sites: Sites) -> Floats:
    """(N,) variance of what is smooth before anything was measured: the diagonal of between."""
    wide = np.hstack((sites.numbers, sites.traits))
    own, shared = covariance.own, covariance.shared
    found = covariance.level + own.variance + shared.variance
    return np.asarray(
        found + (sites.numbers**2) @ np.array(own.slope) + (wide**2) @ np.array(shared.slope), dtype=np.float64
    )


class Within:
    """The covariance of N sites with themselves and its gradient, for many parameters on the same sites."""

    def __init__(self, sites: Sites) -> None:
        wide = np.hstack((sites.numbers, sites.traits)).T
        self._count = len(sites.workload)
        self._low = rows, columns = np.tril_indices(self._count)  # all is symmetric: half of the pairs are enough
        self._same = (sites.workload[rows] == sites.workload[columns]).astype(np.float64)
        # One row a column of the sites, a pair in each place: sums over them are products of a matrix and a vector.
        self._squares = (wide[:, rows] - wide[:, columns]) ** 2
        self._products = wide[:, rows] * wide[:, columns]
        names = sites.names.T
        self._differ = (names[:, rows] != names[:, columns]).astype(np.float64)
        self._parts: list[tuple[Part, Floats, Floats, Floats, Floats]] = []

    def _part(self, part: Part, mask: Floats | None) -> Floats:
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

    def __call__(self, covariance: Covariance) -> Floats:
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
