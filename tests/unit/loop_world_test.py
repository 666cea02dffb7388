"""The world of the closed loop: engines, jobs, accounts and baselines, worked by hand on small cases."""

import numpy as np
import pytest
from bench.loop.accounts import Account, Limit, Prices
from bench.loop.baselines import Baseline, Hpa, Peak, Zeus, under_cap
from bench.loop.demand import Course, Requests, course
from bench.loop.engines import BORDERS_S, Engine, Engines
from bench.loop.scene import Job, Scene, Service
from bench.loop.training import CHECKPOINT_S, Running
from tests.builders.objectives import build_metrics_window

from eelgrid_controller.objectives.power.budgets import Holding
from eelgrid_controller.objectives.power.control_events import (
    JobMeasured,
    JobStarted,
    ScaleService,
    ServiceStarted,
    ServiceWindow,
    SetPowerLimit,
)
from eelgrid_controller.objectives.power.estimates import MeasurementWindow as JobWindow
from eelgrid_controller.objectives.power.power_model import BestEffort, Deadline, LimitPoint, MaxSlowdown, PowerCurve
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_protos.catalogue.loader import load_catalogue

LEVELS = (0.5, 0.9, 0.95, 0.99)


def _point(batch, token_hz, p95_s, power_w):
    latency = dict(zip(LEVELS, (0.8 * p95_s, 0.95 * p95_s, p95_s, 1.1 * p95_s), strict=True))
    return Point("chat", Configuration("h100-sxm5-80gb", batch=batch), token_hz, latency, power_w)


POINTS = (_point(8, 800.0, 0.01, 400.0), _point(32, 2400.0, 0.02, 500.0), _point(64, 3200.0, 0.04, 600.0))
ENGINE = Engine(POINTS, 0.025, 200.0, 69.0, 1.0, 1.0)
CURVE = PowerCurve(
    "net", "v100", 1, (LimitPoint(100.0, 2.0, 100.0), LimitPoint(200.0, 1.04, 180.0), LimitPoint(250.0, 1.0, 240.0))
)


def _settled(engines, asked_hz, replicas, steps=100):
    for _ in range(steps):
        served = engines.step(np.array([asked_hz]), np.array([replicas]))
    return served


def test_an_engine_serves_what_is_asked_as_it_was_measured():
    served = _settled(Engines([ENGINE], 5.0), 2400.0, 1.0)
    assert served.tokens[0] == pytest.approx(5.0 * 2400.0, rel=1e-3)
    assert served.power_w[0] == pytest.approx(500.0, rel=0.03)
    assert served.waiting[0] == 0.0
    assert 0.5 < served.within[0] / served.tokens[0] < 1.0


def test_more_replicas_are_faster_and_each_draws_less():
    one, two = (_settled(Engines([ENGINE], 5.0), 2400.0, count) for count in (1.0, 2.0))
    assert two.within[0] > one.within[0]
    assert two.power_w[0] < one.power_w[0]


def test_overload_waits_breaks_the_promise_and_is_reported():
    engines = Engines([ENGINE], 5.0)
    served = _settled(engines, 4000.0, 1.0, 24)
    assert served.waiting[0] > 100.0
    assert served.within[0] < 0.5 * served.tokens[0]
    read = engines.metrics(0)
    assert read.seconds == 120.0
    assert read.waiting - read.waiting_before == pytest.approx(served.waiting[0])
    assert read.below[-1] == pytest.approx(read.tokens)
    assert engines.metrics(0).tokens == 0.0


def test_without_replicas_everything_waits():
    engines = Engines([ENGINE], 5.0)
    served = _settled(engines, 1000.0, 0.0, 10)
    assert served.tokens[0] == 0.0
    assert served.waiting[0] == pytest.approx(10 * 5.0 * 1000.0 / 200.0)


def test_a_slower_engine_gives_less_within_its_objective():
    engines = Engines([ENGINE], 5.0)
    before = engines.largest_within(0)[1]
    engines.become(0, 1.2)
    assert engines.largest_within(0)[1] < before / 1.2


def test_a_course_repeats_the_trace_under_a_day():
    trace = Requests(np.arange(0.0, 600.0, 0.5), np.full(1200, 100.0), 600.0)
    asked_hz = course(trace, Course(3.0, 0.25, 0.4, 0.0, 1200.0), 240, 5.0, np.random.default_rng(1))
    assert asked_hz[:6].mean() == pytest.approx(0.4 * 600.0, rel=0.05)
    assert asked_hz[117:123].mean() == pytest.approx(600.0, rel=0.05)


def _job(promise=None, gpus=2, work=100.0):
    return Job("j", CURVE, gpus, 1, 0.0, work, promise or MaxSlowdown(0.05))


def test_a_job_works_at_its_limit_and_goes_on_from_its_checkpoint():
    running = Running(_job(work=1e6))
    running.put({"n": [0, 1]}, 250.0, 0.0)
    assert not running.step(0.0, 5.0)
    assert running.done == 0.0  # it starts
    for step in range(6, 6 + round(CHECKPOINT_S / 5.0) + 10):
        running.step(5.0 * step, 5.0)
    assert running.done == pytest.approx(CHECKPOINT_S + 50.0)
    running.lost()
    assert (running.done, running.redone) == (pytest.approx(CHECKPOINT_S), pytest.approx(50.0))


def test_the_slowest_part_paces_a_gang_and_a_window_is_of_one_limit():
    running = Running(_job(work=1e6))
    running.put({"a": [0], "b": [1]}, 250.0, -100.0)
    rng = np.random.default_rng(3)
    running.read_window(rng)
    running.step(0.0, 5.0)
    assert running.read_window(rng).energy_j == pytest.approx(5.0 * 480.0, rel=0.15)
    running.set_limit("a", 100.0)
    running.step(5.0, 5.0)
    assert running.pace_s == 2.0
    assert running.read_window(rng) is None


def _scene(**changes):
    service = Service("s", POINTS, 0.025, 1, ENGINE, np.full(100, 2000.0), 1, 8, 2)
    scene = Scene(1, 100, 5.0, (), (service,), (), (), (0, 1e9, 1.0), load_catalogue())
    return scene._replace(**changes)


def _account(limits=()):
    prices = Prices((0.1,) * 12 + (0.3,) * 12, (100.0,) * 24, (1.5,) * 24)
    members = np.array([True, True])
    limits = limits or (Limit("all", 1000.0, members),)
    return Account(_scene(), prices, limits, np.array([True, False]))


def test_joules_money_and_seconds_above_a_budget():
    account = _account()
    account.power(0.0, 3600.0, np.array([600.0, 400.0]), 1.0, 2.0)
    account.power(12 * 3600.0, 3600.0, np.array([600.0, 401.0]), 1.0, 2.0)
    found = account.outcome([], 0.0)
    assert found.energy_j == pytest.approx(3600.0 * 2001.0)
    assert (found.services_j, found.training_j) == (pytest.approx(3600.0 * 1200.0), pytest.approx(3600.0 * 801.0))
    assert found.money == pytest.approx(1.5 * (1.0 * 0.1 + 1.001 * 0.3))
    assert (found.budget_s, found.budget_worst_w, found.replica_hours) == (3600.0, pytest.approx(1.0), 4.0)


def test_windows_are_violated_by_tokens_that_come_late_or_not_at_all():
    account = _account()

    def minute(at_s, tokens, within, waiting):
        for step in range(12):
            account.tokens(at_s + 5.0 * step, 5.0, *(np.array([one]) for one in (tokens, within, waiting)))

    minute(0.0, 100.0, 95.0, 0.0)
    minute(60.0, 100.0, 94.0, 0.0)
    minute(120.0, 0.0, 0.0, 0.0)
    account.failed([0], 175.0)
    minute(180.0, 0.0, 0.0, 3.0)
    found = account.outcome([], 0.0)
    assert (found.windows, found.violated, found.shadowed, found.tokens) == (4, 2, 1, 2400.0)


def _ended(promise, limit_w, took_s):
    running = Running(_job(promise))
    running.first_s, running.ended_s = 0.0, took_s
    running.done, running.working_s = 100.0, 100.0 * CURVE.interpolate(limit_w).time_s
    return running


def test_promises_of_jobs_are_counted():
    jobs = [
        _ended(MaxSlowdown(0.05), 200.0, 110.0),
        _ended(MaxSlowdown(0.05), 100.0, 210.0),
        _ended(Deadline(100.0, 150.0), 250.0, 149.0),
        _ended(Deadline(100.0, 150.0), 250.0, 152.0),
        _ended(BestEffort(1.0), 100.0, 210.0),
    ]
    found = _account().outcome(jobs, 7200.0)
    assert (found.slowed, found.slowed_of, found.late, found.late_of) == (1, 2, 1, 2)
    assert (found.worst_slowdown, found.unfinished, found.wait_hours) == (pytest.approx(1.0), 0, 2.0)


def _seen(at_s, running, waiting=0.0):
    empty = build_metrics_window(waiting=waiting, running=running, output_token_hz=1.0)
    return ServiceWindow(at_s, "s", empty)


def _begun(replicas):
    from bench.loop.telemetry import promised_of

    return ServiceStarted(0.0, "s", promised_of(_scene().services[0]), replicas)


def test_the_autoscaler_follows_its_documented_rule():
    hpa, each = Hpa(_scene()), Engines([ENGINE], 5.0).largest_within(0)[0]
    assert hpa.on(_begun(2)) == []
    assert hpa.on(_seen(30.0, 2 * each * 0.7 * 1.05)) == []  # within a tenth
    assert [one.replicas for one in hpa.on(_seen(60.0, 2 * each * 0.7 * 1.6))] == [4]  # ceil(3.2)
    assert hpa.on(_seen(90.0, each * 0.1)) == []  # the most of 300 s is kept
    assert [one.replicas for one in hpa.on(_seen(400.0, each * 0.1))] == [1]
    assert hpa.on(_seen(430.0, 0.0, waiting=1e6))[0].replicas == 5  # four more at most


def test_the_peak_stays():
    peak = Peak({"s": 5})
    assert peak.on(_begun(2)) == [ScaleService("s", 5, "the peak")]
    assert peak.on(_seen(30.0, 1e6)) == []


def test_a_cap_is_a_measured_limit():
    assert under_cap(0.8)((100.0, 200.0, 250.0)) == 200.0
    assert under_cap(0.1)((100.0, 200.0, 250.0)) == 100.0


@pytest.mark.parametrize(("promise", "best_w"), [(MaxSlowdown(0.05), 200.0), (BestEffort(0.0), 250.0)])
def test_zeus_profiles_every_limit_and_takes_the_cheapest(promise, best_w):
    driver, limit_w, at_s = Baseline(Zeus()), 250.0, 0.0
    holding = Holding("j/n", "n", 1, ("rack",))
    assert driver.opening_w(_job(promise), (holding,)) == 250.0
    driver.on(JobStarted(0.0, "j", promise, CURVE.limits_w, (holding,)))
    seen = []
    for _ in range(20):
        at_s += 30.0
        at = CURVE.interpolate(limit_w)
        for one in driver.on(JobMeasured(at_s, "j", JobWindow(limit_w, 30.0 / at.time_s, 30.0, 30.0 * at.power_w))):
            assert isinstance(one, SetPowerLimit)
            limit_w = one.limit_w
            seen.append(limit_w)
    assert seen == [200.0, 100.0, best_w]


def test_an_engine_is_what_its_points_say_at_every_border():
    table = Engines([ENGINE._replace(objective_s=0.02)], 5.0)
    _settled(table, 2400.0, 1.0)
    below = table.metrics(0).below
    assert (np.diff(below) >= -1e-6).all()
    assert len(below) == len(BORDERS_S) + 1
