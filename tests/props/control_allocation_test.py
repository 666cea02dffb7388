"""Ceilings: within every budget or said, wishes first, and who gives way in which order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.power_fleet_rig import LIMITS_W, law

from eelgrid_controller.objectives.power.budget_allocation import AllocationRequest, allocate_budgets
from eelgrid_controller.objectives.power.budgets import BudgetTree, PowerBudgetNode
from eelgrid_controller.objectives.power.limit_allocation import AllocationGoal
from eelgrid_controller.objectives.power.power_model import BestEffort, Deadline, LimitPoint, MaxSlowdown, PowerCurve

FALLING = tuple(reversed(LIMITS_W))
PROMISES = (MaxSlowdown(0.0), MaxSlowdown(0.15), BestEffort(0.3), Deadline(100.0, 12.0), Deadline(100.0, 1.0))


def asking(name="a", gpus=2, node="n1", *, wish_w=300.0, held_w=300.0, known=True, promise=PROMISES[1], owes=False):
    points = tuple(LimitPoint(limit_w, law(limit_w)[0], gpus * law(limit_w)[1]) for limit_w in LIMITS_W)
    curve = PowerCurve(name, "", gpus, points) if known else None
    return AllocationRequest(name, wish_w, held_w, FALLING, FALLING, (((node,), gpus),), curve, promise, 1.0, owes)


@st.composite
def jobs(draw):
    limits = st.sampled_from(LIMITS_W)
    return [
        asking(
            f"j{k}",
            draw(st.integers(1, 4)),
            draw(st.sampled_from(["n1", "n2"])),
            wish_w=draw(limits),
            held_w=draw(limits),
            known=draw(st.booleans()),
            promise=draw(st.sampled_from(PROMISES)),
            owes=draw(st.booleans()),
        )
        for k in range(draw(st.integers(1, 5)))
    ]


def charged(one, ceiling_w):
    return sum(count for _, count in one.gpus) * (FALLING[0] if ceiling_w is None else ceiling_w)


@settings(max_examples=150, deadline=None)
@given(jobs(), st.floats(0.0, 3000.0), st.floats(0.0, 2000.0), st.floats(0.0, 500.0), st.sampled_from(AllocationGoal))
def test_ceilings_add_up_to_no_more_than_a_budget_or_all_are_least_and_it_is_reported(
    many, cluster_w, node_w, fixed_w, want
):
    budgets = BudgetTree(
        [PowerBudgetNode("c", cluster_w), PowerBudgetNode("n1", node_w, "c"), PowerBudgetNode("n2", node_w, "c")]
    )
    shared = allocate_budgets(many, budgets, (fixed_w, fixed_w, 0.0), want)
    for budget, fixed in zip(budgets.all, (fixed_w, fixed_w, 0.0), strict=True):
        mine = [one for one in many if budget.name == "c" or one.gpus[0][0] == (budget.name,)]
        drawn = sum(charged(one, shared.ceilings_w[one.name]) for one in mine) + fixed
        if drawn > budget.limit_w + 1e-6:
            assert all(shared.ceilings_w[one.name] == FALLING[-1] for one in mine)
            assert shared.shortfalls[budget.name].watts == pytest.approx(drawn - budget.limit_w)
        elif "least" in (short.reason if (short := shared.shortfalls.get(budget.name)) else ""):
            assert drawn >= budget.limit_w - 1e-6


@settings(max_examples=100, deadline=None)
@given(jobs(), st.sampled_from(AllocationGoal))
def test_wishes_that_fit_are_granted(many, want):
    room_w = sum(charged(one, one.wish_w) for one in many)
    shared = allocate_budgets(
        many, BudgetTree([PowerBudgetNode("n1", room_w), PowerBudgetNode("n2", room_w)]), (0.0, 0.0), want
    )
    assert shared.shortfalls == {}
    assert all(shared.ceilings_w[one.name] is None or shared.ceilings_w[one.name] >= one.wish_w for one in many)


def one_budget(many, watts, want=AllocationGoal.THROUGHPUT):
    return allocate_budgets(many, BudgetTree([PowerBudgetNode("n1", watts)]), (0.0,), want)


def test_known_jobs_give_way_before_unknown_ones():
    shared = one_budget([asking("a", promise=BestEffort(0.0)), asking("b", known=False)], 1000.0)
    assert shared == ({"a": 200.0, "b": None}, {})


def test_unknown_jobs_give_way_before_promises():
    shared = one_budget([asking("a", promise=MaxSlowdown(0.15)), asking("b", known=False)], 700.0)
    assert shared.ceilings_w["a"] == 200.0  # 13 % slower
    assert shared.ceilings_w["b"] == 150.0
    assert shared.shortfalls == {}


def test_promises_give_way_last_and_that_is_reported():
    shared = one_budget([asking("a"), asking("b")], 700.0)
    assert sorted(shared.ceilings_w.values()) == [150.0, 200.0]
    assert shared.shortfalls["n1"].watts == 100.0


def test_what_is_left_goes_to_those_that_owe_time_then_to_those_that_search():
    low = {"wish_w": 150.0}
    shared = one_budget([asking("a", **low), asking("b", known=False, **low), asking("c", owes=True, **low)], 1200.0)
    assert shared.ceilings_w == {"a": 150.0, "b": 150.0, "c": None}
    shared = one_budget([asking("a", **low), asking("b", known=False, **low), asking("c", **low)], 1200.0)
    assert shared.ceilings_w == {"a": 150.0, "b": None, "c": 150.0}
