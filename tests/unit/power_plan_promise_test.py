"""The limit chosen on a known curve, against everything that could be chosen."""

import numpy as np
import pytest
from bench.powercap.mixture import choose_mixture
from scipy.optimize import linprog

from eelgrid_controller.objectives.power.power_model import (
    BestEffort,
    Deadline,
    InvalidPromise,
    LimitPoint,
    MaxSlowdown,
    PowerCurve,
    choose_limit,
)


def curve(seed):
    """Any points at all: what is chosen may not lean on a shape."""
    rng = np.random.default_rng(seed)
    limits = np.sort(rng.choice(np.arange(100.0, 400.0, 5.0), int(rng.integers(1, 9)), replace=False))
    return PowerCurve(
        "t", "g", 2, tuple(LimitPoint(float(w), rng.uniform(1.0, 2.0), rng.uniform(50.0, w)) for w in limits)
    )


PROMISES = [
    *(MaxSlowdown(share) for share in (0.0, 0.05, 0.3)),
    *(BestEffort(weight) for weight in (0.0, 0.3, 1.0)),
    Deadline(10.0, 17.0),
]


def naive(points, promise):
    """Every limit looked at."""
    last = points[-1]
    if isinstance(promise, MaxSlowdown):
        kept = [at for at in points if at.time_s <= (1.0 + promise.share) * last.time_s]
        return min(at.time_s * at.power_w for at in kept) if kept else None
    if isinstance(promise, Deadline):
        kept = [at for at in points if at.time_s * promise.work <= promise.time_s]
        return min(at.time_s * at.power_w for at in kept) if kept else None
    weight = promise.energy_weight
    return min(weight * at.energy_j / last.energy_j + (1.0 - weight) * at.time_s / last.time_s for at in points)


@pytest.mark.parametrize("promise", PROMISES, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_best_of_all_limits(promise, seed):
    made = curve(seed)
    best = naive(made.points, promise)
    if best is None:
        with pytest.raises(InvalidPromise, match="more time"):
            choose_limit(made, promise)
        return
    choice = choose_limit(made, promise)
    if isinstance(promise, BestEffort):
        weight, last = promise.energy_weight, made.largest
        cost = weight * choice.at.energy_j / last.energy_j + (1.0 - weight) * choice.at.time_s / last.time_s
    else:
        cost = choice.at.energy_j
    assert cost == pytest.approx(best)
    assert {choice.at, *choice.beaten, *choice.barred} == set(made.points)


@pytest.mark.parametrize("seed", range(20))
def test_two_limits_in_turn_reach_the_linear_program(seed):
    made = curve(seed)
    share = 0.1
    mixed = choose_mixture(made, MaxSlowdown(share))
    energy, time = ([getattr(at, name) for at in made.points] for name in ("energy_j", "time_s"))
    bound = linprog(
        energy, A_ub=[time], b_ub=[(1.0 + share) * made.largest.time_s], A_eq=[np.ones(len(time))], b_eq=[1.0]
    )
    assert mixed.energy_j == pytest.approx(bound.fun)
    assert mixed.time_s <= (1.0 + share) * made.largest.time_s * (1.0 + 1e-9)
    assert 0.0 <= mixed.share <= 1.0


def test_more_slowdown_never_costs_energy():
    for seed in range(20):
        made = curve(seed)
        energies = [choose_limit(made, MaxSlowdown(share)).at.energy_j for share in (0.0, 0.02, 0.05, 0.2, 1.0)]
        assert energies == sorted(energies, reverse=True)
        assert choose_mixture(made, MaxSlowdown(0.05)).energy_j <= energies[2] + 1e-12


def test_a_limit_that_was_not_measured_may_be_offered():
    made = PowerCurve("t", "g", 1, (LimitPoint(100.0, 2.0, 95.0), LimitPoint(200.0, 1.0, 190.0)))
    choice = choose_limit(made, MaxSlowdown(0.5), [100.0, 150.0, 200.0])
    assert choice.at.limit_w in {150.0, 200.0}
    assert choice.slowdown <= 0.5
    with pytest.raises(InvalidPromise, match="limits_w"):
        choose_limit(made, MaxSlowdown(0.5), [])


@pytest.mark.parametrize(
    "make",
    [
        lambda: MaxSlowdown(-0.1),
        lambda: MaxSlowdown(float("inf")),
        lambda: Deadline(0.0, 1.0),
        lambda: Deadline(1.0, float("nan")),
        lambda: BestEffort(1.1),
    ],
)
def test_promises_that_say_nothing_are_refused(make):
    with pytest.raises(InvalidPromise):
        make()
