"""The arithmetic of beliefs against twins in plain linear algebra and in scikit-learn, and the search of parameters."""

import math

import numpy as np
import pytest
from sklearn.base import clone

from eelgrid_controller.profiles.features import FeaturePoint, fit_frame
from eelgrid_controller.profiles.gaussian_process import (
    CONFIGURATION,
    STALE,
    STALE_NOISE,
    WORKLOAD,
    GpEvidence,
    GpPosterior,
    cross_covariance,
    initial_covariance,
    prior_variance,
)
from eelgrid_controller.profiles.learning import (
    FamilyKernel,
    SurfaceKernel,
    count_parameters,
    fit_regressor,
    maximize_likelihood,
)
from eelgrid_controller.profiles.surfaces import (
    NORMAL_90,
    ConformalCalibration,
    WorkloadSample,
    build_evidence,
    merge_scores,
    summarize_scores,
)

SCALE = 0.7
NUMBERS, NAMES, TRAITS = 2, 1, 1
FIRST = 3  # column of the first coordinate


def _sites(rng, count, first=0):
    """Each of another configuration, numbered from `first`."""
    return np.column_stack(
        (
            rng.integers(0, 3, count),
            np.arange(first, first + count),
            np.zeros(count),
            rng.normal(size=(count, NUMBERS + TRAITS)),
            rng.integers(0, 2, (count, NAMES)),
        )
    ).astype(np.float64)


def _covariance(rng, numbers=NUMBERS, names=NAMES, traits=TRAITS):
    kernel = FamilyKernel.from_covariance(initial_covariance(numbers, names, traits, SCALE))
    return kernel.clone_with_theta(kernel.theta + rng.normal(0.0, 0.5, kernel.n_dims)).covariance


def _evidence(rng, count, stale=0):
    sites = _sites(rng, count)
    sites[:stale, STALE] = 1.0
    sites[:stale, CONFIGURATION] = -1.0 - sites[:stale, CONFIGURATION]
    return GpEvidence(sites, rng.normal(size=count), rng.uniform(1e-4, 1e-2, count))


def _part(part, left, right, left_name, right_name):
    """One part of the covariance between two sites, by the formula in the module's text."""
    distance = math.sqrt(sum(((a - b) / size) ** 2 for a, b, size in zip(left, right, part.length, strict=True)))
    bent = (1.0 + math.sqrt(5) * distance + 5.0 * distance**2 / 3.0) * math.exp(-math.sqrt(5) * distance)
    steep = sum(slope * a * b for a, b, slope in zip(left, right, part.slope, strict=True))
    return (part.variance * bent + steep) * (1.0 if left_name == right_name else math.exp(-part.apart[0]))


def _twin(covariance, left, right):
    """(N, M) covariance, a pair at a time."""
    found = np.zeros((len(left), len(right)))
    for row, mine in enumerate(left):
        for column, other in enumerate(right):
            found[row, column] = _part(covariance.shared, mine[3:6], other[3:6], mine[6], other[6])
            if mine[WORKLOAD] == other[WORKLOAD]:
                own = _part(covariance.own, mine[3:5], other[3:5], mine[6], other[6])
                found[row, column] += covariance.level + own
            if mine[CONFIGURATION] == other[CONFIGURATION]:
                found[row, column] += covariance.idiosyncrasy
            found[row, column] += covariance.drift * mine[STALE] * other[STALE]
    return found


def _asked(rng, told, row):
    """Four sites that were not measured, and one that was."""
    return np.concatenate((_sites(rng, 4, first=100), told.sites[row : row + 1]))


@pytest.mark.parametrize("seed", range(4))
def test_the_covariance_is_that_of_the_formula(seed):
    rng = np.random.default_rng(seed)
    covariance, left = _covariance(rng), _evidence(rng, 7, stale=2).sites
    right = np.concatenate((_sites(rng, 4, first=100), left[2:3]))
    assert cross_covariance(covariance, left, right) == pytest.approx(_twin(covariance, left, right), rel=1e-9)
    assert prior_variance(covariance, left) == pytest.approx(np.diag(_twin(covariance, left, left)), rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_posterior_is_the_joint_normal_conditioned(seed):
    """The twin writes the joint covariance of evidence and questions down and conditions by solving."""
    rng = np.random.default_rng(seed)
    covariance, told = _covariance(rng), _evidence(rng, 9, stale=3)
    asked = _asked(rng, told, 4)
    cross = _twin(covariance, told.sites, asked)
    whole = _twin(covariance, told.sites, told.sites) + np.diag(told.noise)
    mean = cross.T @ np.linalg.solve(whole, told.values)
    variance = np.diag(_twin(covariance, asked, asked) - cross.T @ np.linalg.solve(whole, cross))
    found = GpPosterior(covariance, told).predict_at(asked)
    assert found[0] == pytest.approx(mean, rel=1e-5, abs=1e-6)
    assert found[1] == pytest.approx(variance, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_a_difference_is_that_of_the_joint_normal(seed):
    """The twin conditions questions and base together and takes the variance of each difference."""
    rng = np.random.default_rng(seed)
    covariance, told = _covariance(rng), _evidence(rng, 9, stale=3)
    asked = np.concatenate((told.sites[4:5], _sites(rng, 4, first=100)))  # the first was measured, the last is the base
    cross = _twin(covariance, told.sites, asked)
    whole = _twin(covariance, told.sites, told.sites) + np.diag(told.noise)
    mean = cross.T @ np.linalg.solve(whole, told.values)
    joint = _twin(covariance, asked, asked) - cross.T @ np.linalg.solve(whole, cross)
    variance = np.diag(joint)[:-1] + joint[-1, -1] - 2.0 * joint[:-1, -1]
    found = GpPosterior(covariance, told).predict_difference(asked[:-1], asked[-1:])
    assert found[0] == pytest.approx((mean - mean[-1])[:-1], rel=1e-5, abs=1e-6)
    assert found[1] == pytest.approx(variance, rel=1e-5, abs=1e-6)


def test_a_question_shares_its_code_with_the_last_fresh_measurement_in_its_place():
    place, other = (FeaturePoint({"batch": batch}, {}) for batch in (1.0, 2.0))
    frame = fit_frame([place, other], [{}])
    values, noise = np.arange(5.0), np.full(5, 0.01)
    twice = WorkloadSample("w", {}, (place, place, other, place, other), values, noise, (0, 0, 0, 1, 1))
    found = build_evidence(frame, 0.0, 1.0, [twice, twice._replace(workload="v")])
    codes = found.sites[:, CONFIGURATION]
    assert len(set(codes)) == len(codes) == 10
    assert frame.build_sites([place, other], [{}] * 2, ["w"] * 2)[:, CONFIGURATION] == pytest.approx(
        codes[[1, 2]], abs=0.0
    )
    assert frame.build_sites([place, other], [{}] * 2, ["v"] * 2)[:, CONFIGURATION] == pytest.approx(
        codes[[6, 7]], abs=0.0
    )
    assert found.sites[:, STALE].tolist() == [0, 0, 0, 1, 1] * 2
    assert found.noise[3] == pytest.approx(0.01 + STALE_NOISE**2)


def test_left_out_is_what_the_others_say():
    rng = np.random.default_rng(5)
    covariance, told = _covariance(rng), _evidence(rng, 10)
    error, variance = GpPosterior(covariance, told).leave_one_out(7)
    assert len(error) == len(variance) == 7
    for row in range(7):
        others = told.select(np.arange(10) != row)
        mean, spread = GpPosterior(covariance, others).predict_at(told.sites[row : row + 1])
        assert error[row] == pytest.approx(told.values[row] - mean[0], rel=1e-5, abs=1e-7)
        assert variance[row] == pytest.approx(spread[0] + told.noise[row], rel=1e-5)


@pytest.mark.parametrize(("numbers", "names", "traits"), [(2, 1, 1), (1, 0, 0), (3, 2, 0), (0, 1, 2)])
def test_the_posterior_has_the_numbers_of_scikit_learn(numbers, names, traits):
    """The controller answers without scikit-learn; GaussianProcessRegressor.predict says the same to twelve digits."""
    rng = np.random.default_rng(9)
    covariance = _covariance(rng, numbers, names, traits)
    width = FIRST + numbers + traits + names
    sites = np.column_stack((rng.integers(0, 3, 40), np.arange(40), rng.normal(size=(40, numbers + traits))))
    sites = np.insert(sites, STALE, np.arange(40) < 5, axis=1)
    sites = np.hstack((sites, rng.integers(0, 2, (40, names))))
    assert sites.shape[1] == width
    sites[:5, CONFIGURATION] = -1.0 - sites[:5, CONFIGURATION]
    told = GpEvidence(sites[:30], rng.normal(size=30), rng.uniform(1e-4, 1e-2, 30))
    asked = sites[25:]  # five were measured
    mean, deviation = fit_regressor(covariance, told).predict(asked, return_std=True)
    found = GpPosterior(covariance, told).predict_at(asked)
    assert found[0] == pytest.approx(mean, rel=1e-12, abs=1e-12)
    assert np.sqrt(found[1]) == pytest.approx(deviation, rel=1e-12, abs=1e-12)


def _check_gradient(kernel, sites):
    covariance, gradient = kernel(sites, eval_gradient=True)
    assert covariance == pytest.approx(kernel(sites), rel=1e-12)
    assert gradient.shape == (len(sites), len(sites), kernel.n_dims)
    for at in range(kernel.n_dims):
        step = np.zeros(kernel.n_dims)
        step[at] = 1e-5
        ends = [kernel.clone_with_theta(kernel.theta + way * step)(sites) for way in (1.0, -1.0)]
        assert gradient[:, :, at] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("numbers", "names", "traits"), [(2, 1, 1), (1, 0, 0), (3, 2, 2)])
def test_the_gradients_are_those_of_finite_differences(numbers, names, traits):
    rng = np.random.default_rng(7)
    kernel = FamilyKernel.from_covariance(_covariance(rng, numbers, names, traits))
    sites = np.column_stack(
        (rng.integers(0, 3, 6), np.arange(6), np.arange(6) < 2, rng.normal(size=(6, numbers + traits)))
    )
    sites = np.hstack((sites, rng.integers(0, 2, (6, names))))
    for one in (kernel, kernel.own, kernel.shared):
        _check_gradient(one, sites)
        assert one.diag(sites) == pytest.approx(np.diag(one(sites)), rel=1e-12)


def test_kernels_keep_the_rules_of_scikit_learn():
    kernel = FamilyKernel.from_covariance(_covariance(np.random.default_rng(3)))
    for one in (kernel, kernel.own, SurfaceKernel()):
        twin = clone(one)
        assert twin is not one
        assert twin == one
        assert twin.get_params(deep=False).keys() == one.get_params(deep=False).keys()
        assert one.n_dims == sum(each.n_elements for each in one.hyperparameters) == len(one.bounds)
        assert (one.bounds[:, 0] < one.theta).all()
        assert (one.theta < one.bounds[:, 1]).all()
        assert one.clone_with_theta(one.theta + 1.0).theta == pytest.approx(one.theta + 1.0)
        assert not one.is_stationary()
    assert kernel.get_params()["own__variance"] == kernel.own.variance
    assert kernel.n_dims == count_parameters(kernel.covariance)
    assert FamilyKernel.from_covariance(kernel.covariance) == kernel


def test_the_search_beats_its_beginning_and_stays_within_reach():
    rng = np.random.default_rng(8)
    sites = _sites(rng, 40)
    start = FamilyKernel.from_covariance(initial_covariance(NUMBERS, NAMES, TRAITS))
    truth = start.clone_with_theta(start.theta + 1.0)
    values = np.linalg.cholesky(truth(sites) + 1e-6 * np.eye(40)) @ rng.normal(size=40)
    noise = np.full(40, 1e-6)

    def cost(one):
        kernel = FamilyKernel.from_covariance(one)
        matrix = kernel(sites) + np.diag(noise)
        sign, size = np.linalg.slogdet(matrix)
        off = (kernel.theta - start.theta) / 1.5
        return 0.5 * (sign * size + values @ np.linalg.solve(matrix, values) + off @ off)

    found = maximize_likelihood([GpEvidence(sites, values, noise)], start.covariance)
    assert cost(found) < cost(start.covariance)
    assert np.abs(FamilyKernel.from_covariance(found).theta - start.theta).max() <= 8.0 + 1e-9
    assert found.drift == start.drift


def test_a_factor_is_the_conformal_rank():
    scores = np.arange(1.0, 100.0)  # 99 of them: the 90th is exceeded by no more than a tenth
    assert summarize_scores(24, -scores, 0).interval_factor(0.9) == 90.0
    assert summarize_scores(24, np.arange(10_000.0), 0).interval_factor(0.9) == pytest.approx(9000.0, rel=0.01)


def test_few_workloads_widen_and_few_scores_are_not_believed():
    scores = np.linspace(0.0, 2.0, 60)
    plain = summarize_scores(0, scores, 0).interval_factor(0.9)
    by_groups = [summarize_scores(0, scores, groups).interval_factor(0.9) for groups in (2, 3, 6, 12, 60)]
    assert by_groups == sorted(by_groups, reverse=True)
    assert by_groups[0] == pytest.approx(plain * 6.31 / NORMAL_90)
    assert by_groups[-1] == pytest.approx(plain, rel=0.02)
    assert merge_scores([(0, scores[:10])], ()).interval_factor(0) == NORMAL_90


def test_the_largest_number_known_counts():
    calibration = merge_scores(
        [(0, np.full(30, 3.0)), (8, np.full(30, 2.0)), (24, np.full(30, 1.0)), (16, np.ones(5))], ()
    )
    assert [calibration.interval_factor(known) for known in (0, 7, 8, 23, 24, 500)] == [3.0, 3.0, 2.0, 2.0, 1.0, 1.0]
    assert (
        ConformalCalibration(calibration.scores[1:]).interval_factor(0) == 2.0
    )  # nothing was judged so: the nearest that was
