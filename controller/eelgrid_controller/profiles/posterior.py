"""What measurements say of configurations that were not measured.

Owns the arithmetic of one set of evidence: mean and variance elsewhere, and what each
measurement would have been believed to be without itself. Must not know configurations,
quantities or units.

Theory: with K the covariance of N measured sites, their readings' noise on the diagonal,
    mean(x) = k(x)' K^-1 y        variance(x) = k(x, x) - k(x)' K^-1 k(x)
A question about a measured configuration shares that configuration's idiosyncrasy, so the
answer there is the measurement itself, within the noise of its readings. Left out, one
measurement and a set B of them would be off by
    y_i - mean_-i = (K^-1 y)_i / K^-1_ii           with variance 1 / K^-1_ii
    y_B - mean_-B = (K^-1_BB)^-1 (K^-1 y)_B        with covariance (K^-1_BB)^-1
so that honest errors cost one inverse. Time is N^3, memory N^2 doubles; the caller bounds N.
Measurements from before a drift count with one unknown shift in common and a noise of
their own: they tell the shape, not the level.

Source: Rasmussen and Williams 2006, equations 2.23 to 2.26 and 5.10 to 5.12; for sets,
Ginsbourger and Schaerer, "Fast calculation of Gaussian process multiple-fold
cross-validation residuals", 2021 (arXiv 2101.03108).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.profiles.covariance import Covariance, Sites, between, prior_variance
from eelgrid_kernels.arrays import Floats, Ints

__all__ = ["STALE_NOISE", "STALE_SHIFT", "Evidence", "Posterior"]

STALE_SHIFT = 0.4  # spread of the unknown shift of what was measured before a drift, log units: a factor of 1.5
STALE_NOISE = 0.05  # and of what each of them may have moved besides, log units
_JITTER = 1e-9


class Evidence(NamedTuple):
    """N measured sites; values and noise in scaled log units."""

    sites: Sites
    values: Floats  # (N,)
    noise: Floats  # (N,) variance of the mean of a site's readings
    stale: NDArray[np.bool_]  # (N,) measured before the last drift

    def take(self, rows: Ints | NDArray[np.bool_]) -> "Evidence":
        """Those rows, in that order."""
        return Evidence(self.sites.take(rows), self.values[rows], self.noise[rows], self.stale[rows])


class Posterior:
    """Beliefs after N measurements; `scale` is the log units of one scaled unit."""

    def __init__(self, covariance: Covariance, evidence: Evidence, scale: float) -> None:
        self._covariance, self._evidence = covariance, evidence
        found = between(covariance, evidence.sites, evidence.sites)
        stale = evidence.stale.astype(np.float64)
        found += (STALE_SHIFT / scale) ** 2 * np.outer(stale, stale)
        found[np.diag_indices_from(found)] += (
            covariance.idiosyncrasy + evidence.noise + (STALE_NOISE / scale) ** 2 * stale + _JITTER
        )
        lower_inverse = np.linalg.inv(np.linalg.cholesky(found))
        self._inverse = lower_inverse.T @ lower_inverse
        self._weights = self._inverse @ evidence.values

    def at(self, questions: Sites, measured: Ints) -> tuple[Floats, Floats]:
        """(M,) mean and (M,) variance of the quantity at M questions.

        measured: (M,) row of the evidence that is the same configuration, or -1.
        The noise of a reading is not in the variance.
        """
        known = between(self._covariance, questions, self._evidence.sites)
        rows = np.flatnonzero(measured >= 0)
        known[rows, measured[rows]] += self._covariance.idiosyncrasy
        mean = known @ self._weights
        variance = prior_variance(self._covariance, questions) + self._covariance.idiosyncrasy
        variance = variance - ((known @ self._inverse) * known).sum(1)
        return mean, np.maximum(variance, 0.0)

    def difference(self, sites: Sites, measured: Ints) -> tuple[Floats, Floats]:
        """(M,) mean and (M,) variance of the quantity at M sites less what it is at one more, the last.

        What they have in common, such as a level that nobody measured, is in neither. measured: (M + 1,) as in `at`.
        None of the M is the last one.
        """
        known = between(self._covariance, sites, self._evidence.sites)
        rows = np.flatnonzero(measured >= 0)
        known[rows, measured[rows]] += self._covariance.idiosyncrasy
        known = known[:-1] - known[-1]
        apart = prior_variance(self._covariance, sites) + self._covariance.idiosyncrasy
        base = sites.take(np.array([len(measured) - 1]))
        shared = between(self._covariance, sites, base)[:-1, 0]
        variance = apart[:-1] + apart[-1] - 2.0 * shared - ((known @ self._inverse) * known).sum(1)
        return known @ self._weights, np.maximum(variance, 0.0)

    def left_out(self, rows: Ints) -> tuple[Floats, Floats]:
        """Error and variance of each of these rows as the others predict its reading."""
        variance = 1.0 / self._inverse[rows, rows]
        return self._weights[rows] * variance, variance

    def left_out_together(self, rows: Ints) -> tuple[Floats, Floats]:
        """The same with all of these rows left out at once."""
        covariance = np.linalg.inv(self._inverse[np.ix_(rows, rows)])
        return covariance @ self._weights[rows], np.diag(covariance).copy()
