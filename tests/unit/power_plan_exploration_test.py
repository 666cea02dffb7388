"""One job's search for its limit: events in, limits out."""

import math

import numpy as np
import pytest

from eelgrid_controller.objectives.power.bandit import (
    BanditSettings,
    CeilingSet,
    MissedWindowReason,
    PickReason,
    PriorSet,
    WindowMissed,
    limit_estimates,
    start_search,
    step_search,
)
from eelgrid_controller.objectives.power.estimates import LimitPrior, LimitRatio, MeasurementWindow
from eelgrid_controller.objectives.power.power_model import (
    BestEffort,
    Deadline,
    InvalidCurve,
    LimitPoint,
    MaxSlowdown,
    PowerCurve,
    PowerLaw,
    choose_limit,
)

LIMITS_W = (100.0, 150.0, 200.0, 250.0, 300.0)
LAW = PowerLaw(free_w=280.0, roundness=4.0, floor_s=10.0, clocked=0.06, steepness=3.0)
FIVE = MaxSlowdown(0.05)


def lawful(law=LAW, scale=1.0, gpus=1):
    return PowerCurve(
        "t", "g", gpus, tuple(LimitPoint(w, scale * law.time_s(w), gpus * law.power_w(w)) for w in LIMITS_W)
    )


class Run:
    """A job under exploration, windows of ten seconds, true accounts beside."""

    def __init__(self, curve, promise=FIVE, noise=0.0, seed=0, **given):
        self.curve, self.noise, self.rng = curve, noise, np.random.default_rng(seed)
        self.state, self.decision = start_search(curve.limits_w, promise, gpus=curve.gpus, **given)
        self.work = self.time_s = self.energy_j = 0.0
        self.limits = []

    def window(self, curve=None, limit_w=None):
        at = (curve or self.curve).interpolate(limit_w or self.decision.limit_w)
        work = 10.0 / at.time_s
        self.work, self.time_s, self.energy_j = self.work + work, self.time_s + 10.0, self.energy_j + work * at.energy_j
        self.limits.append(at.limit_w)
        time, power = 1.0 + self.noise * self.rng.standard_normal(2)
        return MeasurementWindow(at.limit_w, work, 10.0 * time, 10.0 * time * at.power_w * power)

    def go(self, windows, curve=None):
        for _ in range(windows):
            self.state, self.decision = step_search(self.state, self.window(curve))
        return self

    def event(self, event):
        self.state, self.decision = step_search(self.state, event)
        return self.decision

    @property
    def slowdown(self):
        return self.time_s / self.work / self.curve.largest.time_s - 1.0


def test_it_starts_at_the_largest_limit_and_goes_down_in_order():
    run = Run(lawful())
    assert run.decision.limit_w == 300.0
    run.go(40)
    firsts = list(dict.fromkeys(run.limits))
    assert firsts == sorted(firsts, reverse=True)
    assert run.limits[:3] == [300.0] * 3


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02])
def test_it_settles_on_the_best_limit_within_the_promise(noise):
    run = Run(lawful(), noise=noise).go(400)
    best = choose_limit(run.curve, FIVE).at.limit_w
    assert run.decision.limit_w == best
    assert run.limits[-100:].count(best) > 90
    assert run.slowdown <= 0.05


def test_without_noise_the_promise_holds_at_every_moment():
    run = Run(lawful())
    for _ in range(200):
        run.go(1)
        assert run.slowdown <= 0.05 + 1e-9


def test_same_events_same_answers():
    one, other = Run(lawful(), noise=0.02), Run(lawful(), noise=0.02)
    assert one.go(100).limits == other.go(100).limits
    assert one.state == other.state


def test_what_is_known_is_reported_with_its_error():
    run = Run(lawful(), noise=0.01).go(300)
    for standing in limit_estimates(run.state):
        if standing is not None:
            truth = run.curve.interpolate(standing.limit_w)
            assert abs(standing.time_s / truth.time_s - 1.0) <= 4.0 * standing.time_error
            assert abs(standing.energy_j / truth.energy_j - 1.0) <= 4.0 * standing.energy_error
    assert limit_estimates(Run(lawful()).state) == (None,) * 5


def test_missing_measurements_hold_nothing_back():
    run = Run(lawful()).go(200)
    assert run.decision.settled
    for _ in range(4):
        assert run.event(WindowMissed(MissedWindowReason.NO_POWER)).why is not PickReason.BLIND
    decision = run.event(WindowMissed(MissedWindowReason.NO_POWER))
    assert (decision.limit_w, decision.why, decision.refused) == (300.0, PickReason.BLIND, MissedWindowReason.NO_POWER)
    run.go(3)
    assert run.decision.limit_w == choose_limit(run.curve, FIVE).at.limit_w


@pytest.mark.parametrize(
    ("window", "reason"),
    [
        (MeasurementWindow(300.0, 0.0, 10.0, 5.0), MissedWindowReason.NO_PROGRESS),
        (MeasurementWindow(300.0, math.nan, 10.0, 5.0), MissedWindowReason.NO_PROGRESS),
        (MeasurementWindow(300.0, 1.0, 10.0, 0.0), MissedWindowReason.NO_POWER),
        (MeasurementWindow(300.0, 1.0, math.inf, 5.0), MissedWindowReason.IMPOSSIBLE),
        (MeasurementWindow(275.0, 1.0, 10.0, 5.0), MissedWindowReason.OTHER_LIMIT),
    ],
)
def test_a_window_that_says_nothing_is_refused_with_its_reason(window, reason):
    run = Run(lawful())
    before = run.state.arms
    assert run.event(window).refused is reason
    assert run.state.arms == before


def test_a_limit_that_was_not_obeyed_counts_where_it_really_was():
    run = Run(lawful())
    while run.decision.limit_w == 300.0:
        run.go(1)
    before = run.state.arms[0].windows
    run.event(run.window(limit_w=300.0))
    assert run.state.arms[0].windows == before + 1
    assert run.state.arms[1].windows == 0


def test_a_ceiling_is_never_passed_and_goes_away_again():
    run = Run(lawful()).go(30)
    assert run.event(CeilingSet(210.0)).limit_w <= 200.0
    for _ in range(30):
        run.go(1)
        assert run.decision.limit_w <= 200.0
    run.event(CeilingSet(None))
    run.go(60)
    assert run.decision.limit_w == choose_limit(run.curve, FIVE).at.limit_w
    assert run.event(CeilingSet(50.0)).limit_w == 100.0


def test_one_stall_changes_nothing_for_long():
    run = Run(lawful(), noise=0.01).go(200)
    best, phase = run.decision.limit_w, run.state.phase
    stalled = run.window()
    run.event(stalled._replace(work=stalled.work / 20.0, energy_j=stalled.energy_j / 3.0))
    run.go(20)
    assert (run.decision.limit_w, run.state.phase) == (best, phase)


def test_a_job_that_changes_is_searched_again_and_boundedly():
    light = PowerLaw(free_w=150.0, roundness=6.0, floor_s=10.0, clocked=0.05, steepness=3.0)
    run = Run(lawful(), noise=0.01).go(300)
    assert run.decision.limit_w == choose_limit(run.curve, FIVE).at.limit_w
    run.go(300, curve=lawful(light))
    assert run.state.phase == 1
    assert run.decision.limit_w == choose_limit(lawful(light), FIVE).at.limit_w
    for turn in range(40):  # it changes every 20 windows now
        run.go(20, curve=lawful() if turn % 2 else lawful(light))
    assert run.state.phase <= 1 + math.log2((1400) / 16)


def test_relatives_shorten_the_search():
    alike = [PowerLaw(LAW.free_w * f, 4.0, 7.0, 0.06, 3.0) for f in (0.95, 1.0, 1.06)]
    best = choose_limit(lawful(), FIVE).at.limit_w
    cold, warm = Run(lawful(), noise=0.02), Run(lawful(), noise=0.02, relatives=[lawful(law) for law in alike])
    assert warm.go(40).limits.count(best) > cold.go(40).limits.count(best)
    assert set(warm.limits) < set(LIMITS_W)  # what relatives rule out is not even tried
    assert warm.go(300).decision.limit_w == best


def test_relatives_that_mislead_are_outvoted():
    other = PowerLaw(LAW.free_w, 4.0, 7.0, 0.001, 1.0)  # hardly slowed by any limit
    run = Run(lawful(), noise=0.02, relatives=[lawful(other)] * 3).go(500)
    assert run.decision.limit_w == choose_limit(lawful(), FIVE).at.limit_w
    assert run.slowdown <= 0.05


def test_a_deadline_is_met_with_little_energy():
    curve = lawful()
    promise = Deadline(work=200.0, time_s=200.0 * curve.largest.time_s * 1.15)
    run = Run(curve, promise, noise=0.01)
    while run.work < promise.work:
        run.go(1)
    assert run.time_s <= promise.time_s
    assert run.energy_j < 0.9 * run.work * curve.largest.energy_j


def test_a_deadline_out_of_reach_runs_at_full_speed():
    curve = lawful()
    run = Run(curve, Deadline(100.0, 50.0 * curve.largest.time_s)).go(60)
    assert set(run.limits) == {300.0}
    assert run.decision.why is PickReason.REPAY


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_best_effort_weighs_energy_against_time(weight):
    promise = BestEffort(weight)
    run = Run(lawful(), promise, noise=0.01).go(300)
    assert run.decision.limit_w == choose_limit(run.curve, promise).at.limit_w


def test_two_limits_in_turn_save_more_within_the_same_promise():
    alone, in_turn = Run(lawful(), noise=0.01), Run(lawful(), noise=0.01, manner=BanditSettings(alternate=True))
    alone.go(600)
    in_turn.go(600)
    assert in_turn.slowdown <= 0.05
    assert in_turn.energy_j / in_turn.work < alone.energy_j / alone.work
    assert len({*in_turn.limits[-50:]}) > 1


def test_a_gang_is_judged_by_all_its_gpus():
    one, four = Run(lawful()).go(100), Run(lawful(gpus=4)).go(100)
    assert one.limits == four.limits


def test_one_limit_is_settled_at_once():
    state, decision = start_search([200.0], FIVE)
    assert decision.settled
    assert step_search(state, MeasurementWindow(200.0, 1.0, 1.0, 100.0))[1].limit_w == 200.0


@pytest.mark.parametrize(("limits", "gpus"), [([], 1), ([0.0], 1), ([math.nan, 1.0], 1), ([1.0], 0), (range(1, 70), 1)])
def test_what_makes_no_sense_is_refused(limits, gpus):
    with pytest.raises(InvalidCurve):
        start_search([float(one) for one in limits], FIVE, gpus=gpus)


def foreseen(curve, scatter=0.05, off=0.0):
    """A prior of the curve itself, every limit off by so many log units of time."""
    falling = [curve.interpolate(limit_w) for limit_w in reversed(curve.limits_w)]
    time = tuple(
        LimitRatio(math.log(at.time_s / falling[0].time_s) + (off if at is not falling[0] else 0.0), scatter)
        for at in falling
    )
    energy = tuple(LimitRatio(math.log(at.energy_j / falling[0].energy_j), scatter) for at in falling)
    return LimitPrior(time, energy)


def test_what_is_foreseen_counts_once_the_largest_limit_is_measured_and_can_be_taken_back():
    run = Run(lawful())
    prior = foreseen(run.curve)
    run.state, run.decision = step_search(run.state, PriorSet(prior))
    assert run.state.prior is None
    assert limit_estimates(run.state) == (None,) * 5
    while run.state.prior is None:
        run.state, run.decision = step_search(run.state, run.window())
    assert run.state.prior == prior
    assert all(one is not None for one in limit_estimates(run.state))
    taken, _ = step_search(run.state, PriorSet(None))
    assert taken.prior is None
    assert taken.foreseen is None


def test_a_prior_of_other_limits_is_no_prior():
    run = Run(lawful())
    short = LimitPrior((LimitRatio(0.0, 0.1),), (LimitRatio(0.0, 0.1),))
    assert step_search(run.state, PriorSet(short))[0].foreseen is None


def test_with_the_curve_foreseen_fewer_windows_are_spent_on_limits_that_are_not_kept():
    spent = {}
    for name in ("cold", "foreseen"):
        run = Run(lawful(), noise=0.01, seed=3)
        if name == "foreseen":
            run.state, run.decision = step_search(run.state, PriorSet(foreseen(run.curve)))
        for _ in range(120):
            run.state, run.decision = step_search(run.state, run.window())
        assert run.decision.settled
        spent[name] = sum(limit_w != run.decision.limit_w for limit_w in run.limits)
    assert spent["foreseen"] <= spent["cold"]


def test_a_prior_that_is_far_off_does_not_break_the_promise():
    run = Run(lawful(), noise=0.01, seed=4)
    run.state, run.decision = step_search(run.state, PriorSet(foreseen(run.curve, scatter=0.02, off=-0.3)))
    for _ in range(300):
        run.state, run.decision = step_search(run.state, run.window())
    base_s = run.curve.largest.time_s
    assert run.time_s / (run.work * base_s) - 1.0 <= 0.05 + 10.0 / run.time_s + 0.01
