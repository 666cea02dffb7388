"""Learns what the workloads of a family have in common, with errors honest enough for conformal intervals.

Selects the samples of a family from the store, fits the covariance of each quantity and scores it on configurations
that were left out. The covariance is a scikit-learn kernel here; what is found is a GpCovariance, which
gaussian_process.py evaluates without scikit-learn. The daemon imports this module in a child process only, since
scikit-learn takes a second and 50 MB.

The parameters maximize a posterior: the composite likelihood of blocks of measurements, each that of a
GaussianProcessRegressor (Varin, Reid and Firth 2011), times a log-normal belief about each parameter.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Hyperparameter, Kernel

from eelgrid_controller.profiles.features import fit_frame, locate_configuration
from eelgrid_controller.profiles.gaussian_process import (
    CONFIGURATION,
    COORDINATES,
    JITTER,
    STALE,
    WORKLOAD,
    GpCovariance,
    GpEvidence,
    GpPosterior,
    SurfaceCovariance,
    cross_covariance,
    initial_covariance,
    join_evidence,
    matern_terms,
    name_columns,
    name_factor,
    prior_variance,
    surface_covariance,
)
from eelgrid_controller.profiles.points import NothingToLearnFrom
from eelgrid_controller.profiles.store import ProfileStore
from eelgrid_controller.profiles.surfaces import (
    CONFIGURATIONS_LEAST,
    LearnedFamily,
    LearnedSurface,
    WorkloadSample,
    build_evidence,
    merge_scores,
    read_quantities,
    workload_sample,
)
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_protos.catalogue.loader import Catalogue

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
