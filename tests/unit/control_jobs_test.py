"""Jobs under steering: searching, gangs, budgets, lost nodes and restarts."""

import itertools
import math
from dataclasses import replace

import pytest
from tests.power_fleet_rig import LIMITS_W, Fleet, law, tree
from tests.unit.control_services_test import PROMISED

from eelgrid_controller.objectives.control_cycle import ObjectiveController
from eelgrid_controller.objectives.power.bandit import MissedWindowReason
from eelgrid_controller.objectives.power.budgets import BudgetTree, Holding, PowerBudgetNode
from eelgrid_controller.objectives.power.control_events import (
    BudgetsSet,
    ControlSettings,
    ControlTick,
    JobMeasured,
    JobMissed,
    JobPast,
    JobStarted,
    LimitConfirmed,
    LimitFailed,
    LimitPhase,
    NodeLeaseExpired,
    NodeUnreachable,
    ServiceStarted,
    SetPowerLimit,
    WorkloadEnded,
)
from eelgrid_controller.objectives.power.estimates import MeasurementWindow
from eelgrid_controller.objectives.power.power_model import BestEffort, Deadline, MaxSlowdown


def even(fleet, name):
    return len(set(fleet.jobs[name].limits.values())) == 1


def test_a_job_finds_its_limit_within_its_promise_and_all_its_gpus_have_the_same():
    fleet = Fleet(scatter=0.01)
    fleet.begin("a", ["n1", "n2"])
    fleet.run(60)
    view = fleet.job("a")
    assert view.phase is LimitPhase.SETTLED
    assert (view.limit_w, even(fleet, "a")) == (250.0, True)  # 200 W would be 13 % slower
    assert fleet.slowdown("a") <= 0.1
    assert view.slowdown == pytest.approx(fleet.slowdown("a"), abs=0.02)
    energy = [law(limit_w)[0] * law(limit_w)[1] for limit_w in (250.0, 300.0)]
    assert view.saving == pytest.approx(1.0 - energy[0] / energy[1], abs=0.02)
    assert view.earned_s > 0.0
    assert view.ceiling_w is None


def test_a_driver_that_rounds_limits_down_to_whole_watts_is_searched_like_any_other():
    fleet = Fleet()
    fleet.rounded = math.floor
    limits_w = tuple(limit_w + 0.8 for limit_w in LIMITS_W)
    fleet.begin("a", ["n1", "n2"], limits_w=limits_w, held_w=(300.0, 300.0))
    fleet.run(60)
    view = fleet.job("a")
    assert (view.phase, view.limit_w, view.target_w) == (LimitPhase.SETTLED, 250.8, 250.8)
    assert set(fleet.jobs["a"].limits.values()) == {250}
    commands = [one.limit_w for one in fleet.said if isinstance(one, SetPowerLimit) and one.holding == "a/n1"]
    assert all(before != after for before, after in itertools.pairwise(commands)), "commanded again: it looked refused"


def test_windows_that_are_old_double_or_across_a_change_say_nothing():
    fleet = Fleet()
    fleet.begin("a", ["n1", "n2"])
    while not fleet.asked:
        fleet.run(1, answered=False)
    search = fleet.steering._jobs.jobs["a"].search
    limit_w = LIMITS_W[-1]
    fleet.tell(JobMeasured(fleet.now_s, "a", MeasurementWindow(limit_w, 9.0, 10.0, 9000.0)))  # twice
    fleet.answer()
    fleet.now_s += 5.0
    fleet.tell(
        JobMeasured(fleet.now_s, "a", MeasurementWindow(limit_w, 9.0, 5.0, 9000.0))
    )  # one node has changed, one not
    fleet.answer()
    fleet.now_s += 5.0
    fleet.tell(JobMeasured(fleet.now_s, "a", MeasurementWindow(limit_w, 9.0, 10.0, 9000.0)))  # began before the change
    fleet.tell(JobMeasured(fleet.now_s + 1.0, "b", MeasurementWindow(limit_w, 9.0, 1.0, 9000.0)))
    assert fleet.steering._jobs.jobs["a"].search == search
    assert sum(fleet.steering.controller_status().ignored.values()) == 4


def test_a_job_without_measurements_is_held_back_by_nothing():
    fleet = Fleet()
    fleet.begin("a", ["n1"])
    fleet.run(60)
    assert fleet.job("a").limit_w < LIMITS_W[-1]
    for _ in range(6):
        fleet.now_s += 200.0
        fleet.tell(ControlTick(fleet.now_s))
    fleet.answer_all()
    view = fleet.job("a")
    assert (view.phase, view.limit_w) == (LimitPhase.BLIND, LIMITS_W[-1])


def test_a_job_that_tells_that_it_missed_a_window_is_heard():
    fleet = Fleet()
    fleet.begin("a", ["n1"])
    fleet.run(60)
    for k in range(1, 6):
        fleet.tell(JobMissed(fleet.now_s + k, "a", MissedWindowReason.NO_POWER))
    fleet.tell(JobMissed(fleet.now_s, "a", MissedWindowReason.NO_POWER))  # old
    fleet.answer_all()
    assert fleet.job("a").limit_w == LIMITS_W[-1]
    assert sum(fleet.steering.controller_status().ignored.values()) == 1


def test_a_cut_budget_lowers_first_and_is_then_never_passed():
    fleet = Fleet(scatter=0.01)
    fleet.begin("a", ["n1", "n2"])
    fleet.begin("b", ["n1"])
    fleet.run(60)
    fleet.budget(tree(["n1", "n2"], 2000.0, 1100.0))
    assert fleet.asked
    assert all(one.limit_w < fleet.jobs[one.job].limits[one.holding] for one in fleet.asked)
    fleet.run(30)
    assert fleet.worst_w <= 1e-6
    assert max(fleet.drawn_most()["cluster"], fleet.steering.controller_status().budgets[0].claim_w) <= 1100.0
    assert even(fleet, "a")
    cluster = fleet.steering.controller_status().budgets[0]
    assert cluster.shortfall_w > 0.0  # both promises need 250 W on 6 GPUs
    assert "promises" in cluster.reason
    fleet.budget(tree(["n1", "n2"], 2000.0, 5000.0))
    fleet.run(30)
    assert fleet.steering.controller_status().budgets[0].shortfall_w == 0.0
    assert fleet.job("a").limit_w >= 250.0


def test_what_cannot_fit_gets_its_least_limits_and_that_is_reported():
    fleet = Fleet()
    fleet.begin("a", ["n1"])
    fleet.budget(tree(["n1"], 150.0, 5000.0))
    fleet.answer_all()
    assert fleet.jobs["a"].limits == {"a/n1": LIMITS_W[0]}
    node = fleet.steering.controller_status().budgets[1]
    assert (node.name, node.shortfall_w) == ("n1", 50.0)
    assert "lowest" in node.reason
    assert fleet.steering.controller_status().budgets[0].shortfall_w == 0.0


def test_one_budget_that_lacks_does_not_touch_jobs_elsewhere():
    fleet = Fleet()
    fleet.begin("a", ["n1"])
    fleet.begin("b", ["n2"])
    fleet.budget(BudgetTree([PowerBudgetNode("n1", 150.0), PowerBudgetNode("n2", 600.0)]))
    fleet.answer_all()
    assert (fleet.job("a").limit_w, fleet.job("b").limit_w) == (100.0, 300.0)
    fleet.end("a")
    fleet.run(1)
    assert [one.shortfall_w for one in fleet.steering.controller_status().budgets] == [0.0, 0.0]


def test_a_raise_waits_for_the_whole_gang_to_have_room():
    fleet = Fleet()
    fleet.budget(BudgetTree([PowerBudgetNode("n1", 600.0), PowerBudgetNode("n2", 900.0)]))
    fleet.begin("a", ["n1", "n2"], held_w=(100.0, 100.0))
    fleet.run(1)
    assert fleet.job("a").limit_w == 300.0
    fleet.end("a")
    fleet.begin("b", ["n1"])
    fleet.begin("a", ["n1", "n2"], held_w=(100.0, 100.0))  # n1 is full
    fleet.answer_all()
    assert even(fleet, "a")
    assert fleet.worst_w <= 1e-6
    fleet.now_s += 60.0
    fleet.end("b")
    fleet.run(2)
    assert fleet.jobs["a"].limits == {"a/n1": 300.0, "a/n2": 300.0}


def test_the_limit_that_a_new_job_may_begin_with():
    fleet = Fleet()
    holdings = (Holding("x/n1", "n1", 2, ("n1", "unknown")),)
    assert fleet.steering.initial_limit_w(LIMITS_W, holdings) == 300.0
    fleet.budget(tree(["n1"], 1000.0, 1000.0))
    fleet.begin("a", ["n1"])
    assert fleet.steering.initial_limit_w(LIMITS_W, holdings) == 200.0
    fleet.begin("b", ["n1"], gpus=1)
    assert fleet.steering.initial_limit_w(LIMITS_W, holdings) is None


def test_what_a_promised_job_gave_back_while_it_searches_is_kept_for_it():
    fleet, other = Fleet(scatter=0.01), Fleet(scatter=0.01)
    holdings = (Holding("x/n1", "n1", 1, ("n1",)),)
    for one, promise in ((fleet, MaxSlowdown(0.1)), (other, BestEffort(1.0))):
        one.budget(tree(["n1"], 800.0, 800.0))
        one.begin("a", ["n1"], promise=promise)
        while one.steering.controller_status().jobs[0].limit_w == 300.0:
            one.run(1)
    lower_w = fleet.job("a").limit_w
    assert fleet.job("a").phase is LimitPhase.SEARCHING
    assert (
        fleet.steering.initial_limit_w(LIMITS_W, holdings) == 200.0
    )  # of 800 W: it may go up to 300 W of each GPU again
    assert other.steering.initial_limit_w(LIMITS_W, holdings) == min(300.0, 800.0 - 2.0 * other.job("a").limit_w)
    fleet.run(60)
    assert fleet.job("a").phase is LimitPhase.SETTLED
    assert lower_w <= 250.0 == fleet.job("a").limit_w
    assert fleet.steering.initial_limit_w(LIMITS_W, holdings) == 300.0


def test_what_a_start_takes_is_on_the_clock_of_a_deadline():
    times = []
    for start_s in (0.0, 500.0):
        fleet = Fleet()
        fleet.begin("a", ["n1"], promise=Deadline(10_000.0, 5_000.0))
        fleet.now_s += start_s
        fleet.run(3)
        times.append(fleet.job("a").earned_s)
        assert fleet.job("a").slowdown == pytest.approx(0.0, abs=0.01)  # it is none of the job's own
    assert times[0] - times[1] == pytest.approx(500.0, abs=1.0)


def test_a_gang_is_paced_by_a_holding_that_refuses_and_asked_again_later():
    fleet = Fleet(ObjectiveController(ControlSettings(retry_after_s=300.0)))
    fleet.refuse = lambda one: one.node == "n2"
    fleet.begin("a", ["n1", "n2"])
    fleet.run(20)
    view = fleet.job("a")
    assert (view.phase, view.limit_w) == (LimitPhase.STUCK, 300.0)
    assert even(fleet, "a")
    commands = len(fleet.said)
    fleet.run(5)
    assert len(fleet.said) - commands <= 8  # three tries now and then, not at every window
    fleet.refuse = lambda _: False
    fleet.run(60)
    assert fleet.job("a").phase is LimitPhase.SETTLED
    assert fleet.job("a").limit_w == 250.0


def test_an_answer_that_could_not_be_read_keeps_its_claim():
    fleet = Fleet()
    fleet.budget(tree(["n1"], 900.0, 900.0))
    fleet.begin("a", ["n1"])
    while not fleet.asked:
        fleet.run(1, answered=False)
    for _ in range(3):
        one = fleet.asked.pop()
        fleet.tell(LimitFailed(fleet.now_s, one.number, None if one.number % 2 else math.nan))
    assert fleet.asked == []
    assert fleet.job("a").phase is LimitPhase.STUCK
    assert fleet.steering.controller_status().budgets[0].claim_w == 600.0


def test_a_lost_node_keeps_its_claims_and_its_lease_is_made_room_for():
    fleet = Fleet()
    fleet.budget(tree(["n1", "n2"], 2000.0, 1000.0))
    fleet.begin("b", ["n2"], held_w=(200.0,))
    fleet.begin("a", ["n1"], held_w=(200.0,), restored_w=600.0)
    fleet.answer_all()
    fleet.run(60)
    held_w = fleet.jobs["a"].limits["a/n1"]
    fleet.lose("n1")
    assert fleet.job("a").phase is LimitPhase.LOST
    fleet.run(5)
    # 600 W will be put back, so b has 400 W before that happens.
    assert fleet.jobs["b"].limits["b/n2"] <= 200.0
    fleet.lease_ends("n1")
    assert fleet.drawn_most()["cluster"] <= 1000.0
    assert fleet.jobs["a"].limits["a/n1"] == 300.0 >= held_w
    fleet.back("n1")
    fleet.run(20)
    assert fleet.worst_w <= 1e-6
    assert fleet.job("a").phase is not LimitPhase.LOST


def test_a_restart_lowers_nothing_before_it_has_measured():
    for held_w in (150.0, 287.0, 300.0):
        fleet = Fleet()
        fleet.budget(tree(["n1", "n2"], 600.0, 1200.0))
        fleet.begin("a", ["n1", "n2"], held_w=(held_w, held_w), past=JobPast(900.0, 120.0, 2.5))
        assert all(one.limit_w >= held_w for one in fleet.asked)
        assert fleet.job("a").earned_s == 2.5
        fleet.run(1)
        assert fleet.job("a").limit_w == 300.0
        fleet.run(60)
        assert fleet.job("a").limit_w == 250.0


def test_an_uneven_gang_is_made_even_at_once():
    fleet = Fleet()
    fleet.begin("a", ["n1", "n2"], held_w=(200.0, 300.0))
    assert fleet.job("a").limit_w is None
    fleet.answer_all()
    assert fleet.job("a").limit_w == 300.0


def test_a_deadline_goes_on_where_it_was():
    fleet = Fleet()
    fleet.begin("a", ["n1"], promise=Deadline(20_000.0, 3000.0), past=JobPast(10_000.0, 1000.0))
    fleet.run(60)
    assert fleet.job("a").limit_w <= 200.0  # 10,000 units at 0.2 s each would do
    assert fleet.job("a").earned_s == pytest.approx(
        2000.0 - 600.0 - (10_000.0 - fleet.jobs["a"].work) * law(300.0)[0], rel=0.02
    )


def test_a_job_may_promise_something_else_and_keeps_what_it_knows():
    fleet = Fleet()
    fleet.begin("a", ["n1"])
    fleet.run(60)
    windows = fleet.steering._jobs.jobs["a"].search.windows
    began = replace(fleet.jobs["a"].began, promise=MaxSlowdown(0.5))
    fleet.tell(began)
    assert fleet.steering._jobs.jobs["a"].search.windows == windows
    fleet.run(60)
    assert fleet.job("a").limit_w <= 150.0


def test_what_is_no_job_is_counted():
    fleet = Fleet()
    fleet.begin("a", ["n1"])
    began = fleet.jobs["a"].began
    other = Holding("b/n1", "n1", 2, ())
    wrong = [
        began,
        replace(began, name="b"),  # holdings of another
        replace(began, name="b", holdings=(other, other)),
        replace(began, name="b", holdings=()),
        replace(began, name="b", holdings=(replace(other, gpus=0),)),
        replace(began, name="b", holdings=(other,), limits_w=()),
        replace(began, name="b", holdings=(other,), limits_w=(-1.0,)),
        replace(began, name="b", holdings=(other,), held_w=(math.nan,)),
        replace(began, name="b", holdings=(other,), held_w=(1.0, 2.0)),
        replace(began, name="b", holdings=(other,), weight=math.inf),
        ServiceStarted(0.0, "a", PROMISED, 1),
        WorkloadEnded(0.0, "b"),
        NodeUnreachable(0.0, "n9"),
        NodeLeaseExpired(0.0, "n9"),
        LimitConfirmed(0.0, 77, 100.0),
        LimitFailed(0.0, 77, None),
    ]
    for event in wrong:
        assert fleet.steering.handle_event(event) == []
    assert sum(fleet.steering.controller_status().ignored.values()) == len(wrong)
    assert len(fleet.steering.controller_status().jobs) == 1


def test_a_job_that_moved_is_taken_up_again():
    fleet = Fleet()
    fleet.begin("a", ["n1"])
    fleet.run(60)
    fleet.begin("a", ["n2"])
    assert fleet.job("a").phase is LimitPhase.SEARCHING
    assert [one.name for one in fleet.steering.controller_status().jobs] == ["a"]


def test_watts_are_shared_no_more_often_than_set():
    fleet = Fleet(ObjectiveController(ControlSettings(divide_every_s=500_000.0)))
    fleet.begin("a", ["n1"], held_w=(200.0,))
    fleet.budget(tree(["n1"], 900.0, 900.0))
    fleet.begin("b", ["n1"], held_w=(100.0,), gpus=1)
    fleet.run(5)
    assert fleet.job("b").ceiling_w == 100.0  # what it was found with
    fleet.run(100)
    assert fleet.job("b").ceiling_w is None


def test_no_budgets_are_no_ceilings():
    fleet = Fleet()
    fleet.begin("a", ["n1"])
    fleet.budget(tree(["n1"], 300.0, 300.0))
    fleet.answer_all()
    assert fleet.job("a").ceiling_w == 150.0
    fleet.tell(BudgetsSet(fleet.now_s, BudgetTree(())))
    fleet.answer_all()
    assert fleet.job("a").limit_w == 300.0
    assert fleet.steering.controller_status().budgets == ()


def test_an_event_without_a_time_is_none():
    assert ObjectiveController().handle_event(JobStarted(math.inf, "a", MaxSlowdown(0.1), LIMITS_W, ())) == []


def test_a_raise_goes_with_the_reading_that_makes_room_for_it():
    fleet = Fleet()
    fleet.begin("a", ["n1"], promise=BestEffort(0.0))
    fleet.run(60)
    fleet.budget(tree(["n1"], 800.0, 800.0))
    fleet.begin("b", ["n1"], promise=BestEffort(0.0), held_w=(100.0,))
    raised = []
    for _ in range(30):  # unknown, b counts with what it holds; once it is known, watts are shared between both
        fleet.run(1, answered=False)
        while fleet.asked:
            lowered = fleet.asked[0].limit_w < fleet.jobs[fleet.asked[0].job].limits[fleet.asked[0].holding]
            raised += [one.job for one in fleet.answer() if lowered]
    assert "b" in raised
    assert fleet.job("a").limit_w + fleet.job("b").limit_w == 400.0
    assert fleet.job("b").limit_w >= 150.0


def test_an_uneven_gang_without_room_comes_down_to_its_least():
    fleet = Fleet()
    fleet.budget(BudgetTree([PowerBudgetNode("n1", 1000.0), PowerBudgetNode("n2", 900.0)]))
    fleet.begin("b", ["n1"])
    (lower,) = fleet.begin("a", ["n1", "n2"], held_w=(200.0, 300.0))
    assert (lower.holding, lower.limit_w) == ("a/n2", 200.0)
    fleet.answer_all()
    assert even(fleet, "a")


def test_boards_that_overshoot_are_charged_what_they_draw():
    fleet = Fleet()
    fleet.budget(tree(["n1"], 900.0, 900.0))
    fleet.begin("a", ["n1"], held_w=(300.0,))
    for _ in range(3):
        fleet.now_s += 10.0
        fleet.tell(JobMeasured(fleet.now_s, "a", MeasurementWindow(300.0, 100.0, 10.0, 2.0 * 330.0 * 10.0)))
    assert fleet.steering.controller_status().budgets[0].claim_w == pytest.approx(660.0)
