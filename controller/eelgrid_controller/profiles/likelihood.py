"""The covariance that makes what was measured most probable.

Owns the search over parameters. Must not know configurations or units, nor keep
anything: the result is a value that the caller may write down, so that a replay need
not search again.

Theory: measurements come in blocks b that are taken as independent (a composite likelihood):
    -log p = sum_b (y_b' K_b^-1 y_b + log |K_b|) / 2 + sum_p ((log theta_p - log theta_0p) / spread)^2 / 2
where theta_0 is `covariance.start` and spread is a factor of e^1.5 either way: with few
points the beliefs stand, with many they are forgotten. L-BFGS on the gradient
    d(-log p) / d log theta_p = sum_b tr((K_b^-1 - K_b^-1 y_b y_b' K_b^-1) dK_b/d log theta_p) / 2 + ...
A step costs N^3 for a block of N and N^2 for each parameter: eight blocks of 128 cost a
sixtieth of one of 1,024, and their errors on the measured data sets are those of larger blocks.

Source: Rasmussen and Williams 2006, equation 5.9; Varin, Reid and Firth, "An overview of
composite likelihood methods", Statistica Sinica 2011.
"""

from collections.abc import Sequence

import numpy as np

from eelgrid_controller.profiles.covariance import Covariance, Sites, Within, packed, start, unpacked
from eelgrid_kernels.arrays import Floats

__all__ = ["STEPS_MOST", "most_probable"]

STEPS_MOST = 40
_SPREAD = 1.5  # of a parameter's logarithm around its start
_REACH = 8.0  # no parameter goes further from its start
_IMPOSSIBLE = 1e12
_JITTER = 1e-9


def most_probable(blocks: Sequence[tuple[Sites, Floats, Floats]], first: Covariance | None = None) -> Covariance:
    """The most probable covariance.

    blocks: sites, (N,) values and (N,) noise variances; values in log units scaled to zero mean
        and a unit spread over all blocks, variances in the same.
    first: where to begin; the result depends on it no more than the search is rough.
    """
    from scipy.optimize import minimize  # a third of a second: only who learns pays it

    sites = blocks[0][0]
    beliefs = start(sites.numbers.shape[1], sites.names.shape[1], sites.traits.shape[1])
    centre = packed(beliefs)
    within = [Within(one) for one, _, _ in blocks]

    def cost(row: Floats) -> tuple[float, Floats]:
        covariance = unpacked(row, beliefs)
        off = (row - centre) / _SPREAD
        total, gradient = 0.5 * float(off @ off), off / _SPREAD
        for shaped, (_, values, noise) in zip(within, blocks, strict=True):
            found = _block(shaped, covariance, values, noise)
            if found is None:
                return _IMPOSSIBLE, np.zeros_like(row)
            total, gradient = total + found[0], gradient + found[1]
        return total, gradient

    bounds = [(float(middle) - _REACH, float(middle) + _REACH) for middle in centre]
    begin = centre if first is None else packed(first)
    found = minimize(cost, begin, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": STEPS_MOST})
    return unpacked(np.asarray(found.x, dtype=np.float64), beliefs)


def _block(within: Within, covariance: Covariance, values: Floats, noise: Floats) -> tuple[float, Floats] | None:
    """Minus the log likelihood of a block and its gradient; None where the matrix is not one."""
    found = within(covariance)
    found[np.diag_indices_from(found)] += noise + _JITTER
    try:
        lower = np.linalg.cholesky(found)
    except np.linalg.LinAlgError:
        return None
    inverse_lower = np.linalg.inv(lower)
    inverse = inverse_lower.T @ inverse_lower
    weights = inverse @ values
    gradient = 0.5 * within.gradient(inverse - np.outer(weights, weights))
    return 0.5 * float(values @ weights) + float(np.log(np.diag(lower)).sum()), gradient
