"""The covariance of a family as scikit-learn kernels, and the search of its parameters.

Only the process that learns imports this module, since scikit-learn takes a second and 50 MB. What it finds is a
GpCovariance, which gaussian_process.py evaluates without scikit-learn.

The parameters maximize a posterior: the composite likelihood of blocks of measurements, each that of a
GaussianProcessRegressor (Varin, Reid and Firth 2011), times a log-normal belief about each parameter.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Hyperparameter, Kernel

from eelgrid_controller.profiles.gaussian_process import (
    CONFIGURATION,
    COORDINATES,
    JITTER,
    STALE,
    WORKLOAD,
    GpCovariance,
    GpEvidence,
    SurfaceCovariance,
    cross_covariance,
    initial_covariance,
    matern_terms,
    name_columns,
    name_factor,
    prior_variance,
    surface_covariance,
)
from eelgrid_kernels.arrays import Floats

STEPS_MOST = 40  # of a search
_SPREAD = 1.5  # of a parameter's logarithm around its start
_REACH = 8.0  # no parameter's logarithm goes further from its start
_LOG_ROOT_2PI = 0.5 * math.log(2.0 * math.pi)
_IMPOSSIBLE = 1e12  # cost of parameters whose matrix is none


def _positive(name: str, count: int, start: float) -> Hyperparameter:
    """So many positive parameters that are searched around their start."""
    return Hyperparameter(name, "numeric", (start * np.exp(-_REACH), start * np.exp(_REACH)), count)


class SurfaceKernel(Kernel):  # type: ignore[misc]  # scikit-learn has no types
    """(v matern_5/2(r) + sum_j slope_j x_j x'_j) exp(-sum_c apart_c [name_c differs]).

    r is the distance with a length for each coordinate. Coordinates are the columns of X from COORDINATES on, as many
    as there are lengths; names: the first column of names and the one after the last.
    """

    def __init__(
        self,
        variance: float = 0.09,
        length: tuple[float, ...] = (),
        slope: tuple[float, ...] = (),
        apart: tuple[float, ...] = (),
        names: tuple[int, int] = (COORDINATES, COORDINATES),
    ) -> None:
        self.variance = variance
        self.length = length
        self.slope = slope
        self.apart = apart
        self.names = names

    @property
    def covariance(self) -> SurfaceCovariance:
        """The parameters as plain values."""
        return SurfaceCovariance(self.variance, self.length, self.slope, self.apart)

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002  # scikit-learn's signature
        """The arguments of the constructor."""
        return {**self.covariance._asdict(), "names": self.names}

    @property
    def hyperparameters(self) -> list[Hyperparameter]:
        """What is searched, in the order of theta: variance, lengths, slopes, weights of names."""
        rows = (("length", self.length, 2.0), ("slope", self.slope, 0.09), ("apart", self.apart, 0.7))
        found = [_positive(name, len(row), start) for name, row, start in rows if row]
        return [_positive("variance", 1, 0.09), *found]

    @property
    def theta(self) -> Floats:
        """(P,) natural logarithms of the parameters."""
        return np.log(np.array([self.variance, *self.length, *self.slope, *self.apart], dtype=np.float64))

    @theta.setter
    def theta(self, theta: Floats) -> None:
        values = np.exp(theta).tolist()
        count = len(self.length)
        self.variance = values[0]
        self.length, self.slope = tuple(values[1 : 1 + count]), tuple(values[1 + count : 1 + 2 * count])
        self.apart = tuple(values[1 + 2 * count :])

    def __call__(self, X: Floats, Y: Floats | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803
        """(N, M) covariance; with eval_gradient, of X alone, also (N, N, P) by the logarithm of each parameter."""
        if eval_gradient:
            gradient = np.empty((self.n_dims, len(X), len(X)))
            return self.fill_gradient(X, gradient), gradient.T
        return surface_covariance(self.covariance, X, X if Y is None else Y, slice(*self.names))

    def fill_gradient(self, X: Floats, out: Floats, mask: Floats | None = None) -> Floats:  # noqa: N803
        """(N, N) covariance; writes its gradient to out, (P, N, N) in the order of theta. mask: factor of both."""
        surface, names = self.covariance, X[:, slice(*self.names)]
        count = len(surface.length)
        length, slope, apart = out[1 : 1 + count], out[1 + count : 1 + 2 * count], out[1 + 2 * count :]
        coordinates = X[:, COORDINATES : COORDINATES + count].T
        alike = name_factor(surface.apart, names, names)
        if mask is not None:
            alike *= mask
        for row, (x, one) in enumerate(zip(coordinates, surface.length, strict=True)):
            off = np.subtract.outer(x / one, x / one)
            np.multiply(off, off, out=length[row])
        matern, steep = matern_terms(length.sum(0))
        length *= surface.variance * steep * alike
        for row, (x, one) in enumerate(zip(coordinates, surface.slope, strict=True)):
            np.multiply(np.multiply.outer(one * x, x), alike, out=slope[row])
        np.multiply(surface.variance * matern, alike, out=out[0])
        found = out[0] + slope.sum(0)
        for row, (code, one) in enumerate(zip(names.T, surface.apart, strict=True)):
            np.multiply(found, -one * np.not_equal.outer(code, code), out=apart[row])
        return np.asarray(found, dtype=np.float64)

    def diag(self, X: Floats) -> Floats:  # noqa: N803
        """(N,) variance of each site."""
        coordinates = X[:, COORDINATES : COORDINATES + len(self.slope)]
        return np.asarray(self.variance + (coordinates**2) @ np.array(self.slope, dtype=np.float64), dtype=np.float64)

    def is_stationary(self) -> bool:
        """Slopes count from the origin."""
        return False


class FamilyKernel(Kernel):  # type: ignore[misc]  # scikit-learn has no types
    """A shared surface, and between sites of one workload a level and a surface of its own, on rows of sites.

    idiosyncrasy: variance of a configuration, which sites with its code share.
    drift: variance that stale sites share, which is not searched.
    """

    def __init__(
        self, idiosyncrasy: float, level: float, drift: float, own: SurfaceKernel, shared: SurfaceKernel
    ) -> None:
        self.idiosyncrasy = idiosyncrasy
        self.level = level
        self.drift = drift
        self.own = own
        self.shared = shared

    @classmethod
    def from_covariance(cls, covariance: GpCovariance) -> "FamilyKernel":
        """The kernel with these parameters."""
        columns = name_columns(covariance)
        own, shared = (
            SurfaceKernel(*one, names=(columns.start, columns.stop)) for one in (covariance.own, covariance.shared)
        )
        return cls(covariance.idiosyncrasy, covariance.level, covariance.drift, own, shared)

    @property
    def covariance(self) -> GpCovariance:
        """The parameters as plain values."""
        return GpCovariance(self.idiosyncrasy, self.level, self.drift, self.own.covariance, self.shared.covariance)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor; with deep also those of the surfaces, as own__variance."""
        surfaces = {"own": self.own, "shared": self.shared}
        found = {"idiosyncrasy": self.idiosyncrasy, "level": self.level, "drift": self.drift, **surfaces}
        for name, surface in surfaces.items() if deep else ():
            found.update({f"{name}__{key}": value for key, value in surface.get_params().items()})
        return found

    @property
    def hyperparameters(self) -> list[Hyperparameter]:
        """What is searched, in the order of theta: idiosyncrasy, level, the workload's surface, the shared one."""
        return [
            _positive("idiosyncrasy", 1, 1e-3),
            _positive("level", 1, 2.0),
            *(
                Hyperparameter(f"{name}__{one.name}", one.value_type, one.bounds, one.n_elements)
                for name, surface in (("own", self.own), ("shared", self.shared))
                for one in surface.hyperparameters
            ),
        ]

    @property
    def theta(self) -> Floats:
        """(P,) natural logarithms of the parameters."""
        return np.concatenate((np.log([self.idiosyncrasy, self.level]), self.own.theta, self.shared.theta))

    @theta.setter
    def theta(self, theta: Floats) -> None:
        self.idiosyncrasy, self.level = np.exp(theta[:2]).tolist()
        own = self.own.n_dims
        self.own.theta, self.shared.theta = theta[2 : 2 + own], theta[2 + own :]

    def __call__(self, X: Floats, Y: Floats | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803
        """(N, M) covariance; with eval_gradient, of X alone, also (N, N, P) by the logarithm of each parameter."""
        if not eval_gradient:
            return cross_covariance(self.covariance, X, X if Y is None else Y)
        split = 2 + self.own.n_dims
        gradient = np.empty((split + self.shared.n_dims, len(X), len(X)))
        np.multiply(self.idiosyncrasy, np.equal.outer(X[:, CONFIGURATION], X[:, CONFIGURATION]), out=gradient[0])
        same = np.equal.outer(X[:, WORKLOAD], X[:, WORKLOAD]).astype(np.float64)
        np.multiply(self.level, same, out=gradient[1])
        found = gradient[0] + gradient[1] + self.drift * np.outer(X[:, STALE], X[:, STALE])
        found += self.own.fill_gradient(X, gradient[2:split], same)
        found += self.shared.fill_gradient(X, gradient[split:])
        return found, gradient.T  # each plane is symmetric

    def diag(self, X: Floats) -> Floats:  # noqa: N803
        """(N,) variance of each site."""
        return prior_variance(self.covariance, X)

    def is_stationary(self) -> bool:
        """Slopes count from the origin."""
        return False


def count_parameters(covariance: GpCovariance) -> int:
    """How many parameters are searched."""
    return int(FamilyKernel.from_covariance(covariance).n_dims)


def fit_regressor(covariance: GpCovariance, evidence: GpEvidence) -> GaussianProcessRegressor:
    """The regressor with these parameters after these measurements; raises LinAlgError where their matrix is none."""
    kernel = FamilyKernel.from_covariance(covariance)
    regressor = GaussianProcessRegressor(kernel, alpha=evidence.noise + JITTER, optimizer=None, copy_X_train=False)
    return regressor.fit(evidence.sites, evidence.values)


def maximize_likelihood(blocks: Sequence[GpEvidence], first: GpCovariance) -> GpCovariance:
    """The most probable covariance, searched by L-BFGS within STEPS_MOST steps.

    blocks: values in log units scaled to zero mean and a unit spread over all blocks, noise in the same.
    first: where to begin; the result depends on it no more than the search is rough.
    """
    own, wide = len(first.own.length), len(first.shared.length)
    start = initial_covariance(own, len(first.own.apart), wide - own)
    kernel = FamilyKernel.from_covariance(start._replace(drift=first.drift))
    centre = kernel.theta
    regressors = [fit_regressor(kernel.covariance, block) for block in blocks]

    def cost(theta: Floats) -> tuple[float, Floats]:
        off = (theta - centre) / _SPREAD
        total, gradient = 0.5 * float(off @ off), off / _SPREAD
        for one, block in zip(regressors, blocks, strict=True):
            likelihood, slope = one.log_marginal_likelihood(theta, eval_gradient=True, clone_kernel=False)
            if not np.isfinite(likelihood):
                return _IMPOSSIBLE, np.zeros_like(theta)
            constant = _LOG_ROOT_2PI * len(block.values)  # left out: the search stops by the relative fall of the cost
            total, gradient = total - likelihood - constant, gradient - slope
        return total, gradient

    begin = FamilyKernel.from_covariance(first).theta
    found = minimize(cost, begin, jac=True, method="L-BFGS-B", bounds=kernel.bounds, options={"maxiter": STEPS_MOST})
    kernel.theta = np.asarray(found.x, dtype=np.float64)
    return kernel.covariance
