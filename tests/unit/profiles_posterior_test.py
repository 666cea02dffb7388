"""The arithmetic of beliefs against twins in plain linear algebra, and the search against finite differences."""

import math

import numpy as np
import pytest

from eelgrid_controller.profiles.conformal import NORMAL_90, ConformalCalibration, merge_scores, summarize_scores
from eelgrid_controller.profiles.gaussian_process import (
    STALE_NOISE,
    STALE_SHIFT,
    GpEvidence,
    GpPosterior,
    GpSites,
    SelfCovariance,
    cross_covariance,
    initial_covariance,
    maximize_likelihood,
    pack_parameters,
    prior_variance,
    unpack_parameters,
)

SCALE = 0.7


def _sites(rng, count):
    return GpSites(
        rng.normal(size=(count, 2)),
        rng.integers(0, 2, (count, 1)),
        rng.normal(size=(count, 1)),
        rng.integers(0, 3, count),
    )


def _covariance(rng):
    beliefs = initial_covariance(2, 1, 1)
    return unpack_parameters(pack_parameters(beliefs) + rng.normal(0.0, 0.5, len(pack_parameters(beliefs))), beliefs)


def _evidence(rng, count, stale=0):
    old = np.arange(count) < stale
    return GpEvidence(_sites(rng, count), rng.normal(size=count), rng.uniform(1e-4, 1e-2, count), old)


def _part(part, left, right, left_name, right_name):
    """One part of the covariance between two sites, by the formula in the module's text."""
    distance = math.sqrt(sum(((a - b) / size) ** 2 for a, b, size in zip(left, right, part.length, strict=True)))
    bent = (1.0 + math.sqrt(5) * distance + 5.0 * distance**2 / 3.0) * math.exp(-math.sqrt(5) * distance)
    steep = sum(slope * a * b for a, b, slope in zip(left, right, part.slope, strict=True))
    return (part.variance * bent + steep) * (1.0 if left_name == right_name else math.exp(-part.apart[0]))


def _twin(covariance, left, right):
    """(N, M) covariance, a pair at a time."""
    found = np.zeros((len(left.workload), len(right.workload)))
    for row in range(len(left.workload)):
        for column in range(len(right.workload)):
            names = left.names[row, 0], right.names[column, 0]
            wide = [*left.numbers[row], *left.traits[row]], [*right.numbers[column], *right.traits[column]]
            found[row, column] = _part(covariance.shared, *wide, *names)
            if left.workload[row] == right.workload[column]:
                own = _part(covariance.own, left.numbers[row], right.numbers[column], *names)
                found[row, column] += covariance.level + own
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_covariance_is_that_of_the_formula(seed):
    rng = np.random.default_rng(seed)
    covariance, left, right = _covariance(rng), _sites(rng, 7), _sites(rng, 5)
    assert cross_covariance(covariance, left, right) == pytest.approx(_twin(covariance, left, right), rel=1e-9)
    assert prior_variance(covariance, left) == pytest.approx(np.diag(_twin(covariance, left, left)), rel=1e-12)
    within = SelfCovariance(left)(covariance)
    assert within == pytest.approx(_twin(covariance, left, left) + covariance.idiosyncrasy * np.eye(7), rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_posterior_is_the_joint_normal_conditioned(seed):
    """The twin writes the joint covariance of evidence and questions down and conditions by solving."""
    rng = np.random.default_rng(seed)
    covariance, told, asked = _covariance(rng), _evidence(rng, 9, stale=3), _sites(rng, 4)
    asked = GpSites(*(np.concatenate((mine, row[4:5])) for mine, row in zip(asked, told.sites, strict=True)))
    joint = np.array([[*range(9)]]).T == 4
    cross = _twin(covariance, told.sites, asked)
    cross[:, 4] += covariance.idiosyncrasy * joint[:, 0]  # the fifth question is the fifth measurement
    stale = told.stale.astype(float)
    noise = told.noise + covariance.idiosyncrasy + (STALE_NOISE / SCALE) ** 2 * stale
    whole = (
        _twin(covariance, told.sites, told.sites) + np.diag(noise) + (STALE_SHIFT / SCALE) ** 2 * np.outer(stale, stale)
    )
    mean = cross.T @ np.linalg.solve(whole, told.values)
    variance = (
        np.diag(_twin(covariance, asked, asked) - cross.T @ np.linalg.solve(whole, cross)) + covariance.idiosyncrasy
    )
    found = GpPosterior(covariance, told, SCALE).predict_at(asked, np.array([-1, -1, -1, -1, 4]))
    assert found[0] == pytest.approx(mean, rel=1e-5, abs=1e-6)
    assert found[1] == pytest.approx(variance, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_a_difference_is_that_of_the_joint_normal(seed):
    """The twin conditions questions and base together and takes the variance of each difference."""
    rng = np.random.default_rng(seed)
    covariance, told, asked = _covariance(rng), _evidence(rng, 9, stale=3), _sites(rng, 4)
    asked = GpSites(*(np.concatenate((row[4:5], mine)) for mine, row in zip(asked, told.sites, strict=True)))
    cross = _twin(covariance, told.sites, asked)
    cross[4, 0] += covariance.idiosyncrasy  # the first question is the fifth measurement, the last one the base
    stale = told.stale.astype(float)
    noise = told.noise + covariance.idiosyncrasy + (STALE_NOISE / SCALE) ** 2 * stale
    whole = (
        _twin(covariance, told.sites, told.sites) + np.diag(noise) + (STALE_SHIFT / SCALE) ** 2 * np.outer(stale, stale)
    )
    mean = cross.T @ np.linalg.solve(whole, told.values)
    joint = _twin(covariance, asked, asked) - cross.T @ np.linalg.solve(whole, cross)
    joint += covariance.idiosyncrasy * np.eye(5)
    variance = np.diag(joint)[:-1] + joint[-1, -1] - 2.0 * joint[:-1, -1]
    found = GpPosterior(covariance, told, SCALE).predict_difference(asked, np.array([4, -1, -1, -1, -1]))
    assert found[0] == pytest.approx((mean - mean[-1])[:-1], rel=1e-5, abs=1e-6)
    assert found[1] == pytest.approx(variance, rel=1e-5, abs=1e-6)


def test_left_out_is_what_the_others_say():
    rng = np.random.default_rng(5)
    covariance, told = _covariance(rng), _evidence(rng, 10)
    posterior = GpPosterior(covariance, told, SCALE)
    error, variance = posterior.leave_one_out(np.arange(10))
    for row in range(10):
        others = told.take(np.arange(10) != row)
        mean, spread = GpPosterior(covariance, others, SCALE).predict_at(
            told.take(np.array([row])).sites, np.array([-1])
        )
        assert error[row] == pytest.approx(told.values[row] - mean[0], rel=1e-5, abs=1e-7)
        assert variance[row] == pytest.approx(spread[0] + told.noise[row], rel=1e-5)


def test_left_out_together_is_what_the_rest_says():
    rng = np.random.default_rng(6)
    covariance, told = _covariance(rng), _evidence(rng, 10)
    out = np.array([1, 4, 7])
    rest = told.take(~np.isin(np.arange(10), out))
    mean, spread = GpPosterior(covariance, rest, SCALE).predict_at(told.take(out).sites, np.full(3, -1))
    error, variance = GpPosterior(covariance, told, SCALE).leave_group_out(out)
    assert error == pytest.approx(told.values[out] - mean, rel=1e-5, abs=1e-7)
    assert variance == pytest.approx(spread + told.noise[out], rel=1e-5)


def test_the_gradient_is_that_of_finite_differences():
    rng = np.random.default_rng(7)
    covariance, sites = _covariance(rng), _sites(rng, 6)
    weights = rng.normal(size=(6, 6))
    weights = weights + weights.T
    within, row = SelfCovariance(sites), pack_parameters(covariance)
    within(covariance)
    gradient = within.gradient(weights)
    for at in range(len(row)):
        step = np.zeros(len(row))
        step[at] = 1e-5
        ends = [float((weights * within(unpack_parameters(row + way * step, covariance))).sum()) for way in (1.0, -1.0)]
        assert gradient[at] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-6)


def test_the_search_beats_its_beginning_and_stays_within_reach():
    rng = np.random.default_rng(8)
    sites = _sites(rng, 40)
    truth = unpack_parameters(pack_parameters(initial_covariance(2, 1, 1)) + 1.0, initial_covariance(2, 1, 1))
    whole = cross_covariance(truth, sites, sites) + (truth.idiosyncrasy + 1e-6) * np.eye(40)
    values = np.linalg.cholesky(whole) @ rng.normal(size=40)
    noise = np.full(40, 1e-6)

    def cost(one):
        matrix = SelfCovariance(sites)(one) + np.diag(noise)
        sign, size = np.linalg.slogdet(matrix)
        off = (pack_parameters(one) - pack_parameters(initial_covariance(2, 1, 1))) / 1.5
        return 0.5 * (sign * size + values @ np.linalg.solve(matrix, values) + off @ off)

    found = maximize_likelihood([(sites, values, noise)])
    assert cost(found) < cost(initial_covariance(2, 1, 1))
    assert np.abs(pack_parameters(found) - pack_parameters(initial_covariance(2, 1, 1))).max() <= 8.0 + 1e-9


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
