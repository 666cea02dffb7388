"""Watts divided among jobs: the optimum on small cases, within every budget, with a bound that holds."""

from itertools import pairwise, product

import numpy as np
import pytest
from bench.powercap.certified import allocate_certified, is_feasible, solve_exact, solve_relaxation

from eelgrid_controller.objectives.power.budgets import BudgetTooSmall, BudgetTree, InvalidBudget, PowerBudgetNode
from eelgrid_controller.objectives.power.limit_allocation import (
    AllocationGoal,
    AllocationJob,
    BudgetShare,
    KnapsackOption,
    allocate_limits,
    budget_usage_w,
    build_knapsack,
    concave_hull,
    drop_dominated,
    greedy_choice,
    improve_choice,
    total_value,
)
from eelgrid_controller.objectives.power.power_model import (
    BestEffort,
    Deadline,
    InvalidPromise,
    LimitPoint,
    MaxSlowdown,
    PowerCurve,
)

LIMITS_W = (100.0, 150.0, 200.0, 250.0)


def curve(rng, gpus):
    times = np.sort(rng.uniform(1.0, 2.5, len(LIMITS_W)))[::-1]
    power = np.sort(rng.uniform(60.0, 110.0, len(LIMITS_W))) * np.array(LIMITS_W) / 110.0
    points = (LimitPoint(w, float(t), float(p) * gpus) for w, t, p in zip(LIMITS_W, times, power, strict=True))
    return PowerCurve("t", "g", gpus, tuple(points))


def case(seed, jobs=4, room=None, promise=BestEffort(0.0)):  # noqa: B008
    """Jobs on two nodes with a feed across them; some gangs lie on both."""
    rng = np.random.default_rng(seed)
    made = []
    for at in range(jobs):
        gpus = int(rng.integers(1, 4))
        node = int(rng.integers(2))
        shares = (BudgetShare((f"n{node}", "feed"), gpus),)
        if gpus > 1 and rng.random() < 0.4:
            shares = (BudgetShare((f"n{node}", "feed"), 1), BudgetShare((f"n{1 - node}",), gpus - 1))
        made.append(AllocationJob(f"j{at}", curve(rng, gpus), shares, float(rng.uniform(0.5, 2.0)), promise))
    least = {"row": 0.0, "n0": 0.0, "n1": 0.0, "feed": 0.0}
    for job in made:
        for share in job.shares:
            for name in {*share.budgets, "row"}:
                least[name] += 100.0 * share.gpus
    watts = {name: low * float(rng.uniform(1.0, 2.0) if room is None else room) for name, low in least.items()}
    budgets = [PowerBudgetNode("row", watts["row"])]
    budgets += [PowerBudgetNode(node, watts[node], "row", 5.0 if room is None else 0.0) for node in ("n0", "n1")]
    budgets.append(PowerBudgetNode("feed", watts["feed"]))
    if room is None:
        budgets[1:3] = [PowerBudgetNode(one.name, one.limit_w + 5.0, "row", 5.0) for one in budgets[1:3]]
    return made, BudgetTree(budgets)


def brute(sack):
    """Every division there is."""
    every = product(*(range(len(options)) for options in sack.options))
    return max(total_value(sack, chosen) for chosen in every if is_feasible(sack, chosen))


@pytest.mark.parametrize("want", AllocationGoal)
@pytest.mark.parametrize("seed", range(15))
def test_small_cases_are_solved_exactly_and_the_bound_holds(seed, want):
    jobs, budgets = case(seed)
    sack = build_knapsack(jobs, budgets, want)
    best = brute(sack)
    division, bound = allocate_certified(jobs, budgets, want)
    assert bound >= best - 1e-7
    near = 2e-3 * abs(bound)  # the search stops there
    assert division.value >= best - near - 1e-9
    assert total_value(sack, solve_exact(sack)) == pytest.approx(best, abs=1e-6)
    assert all(used <= room + 1e-5 for used, room in zip(division.used_w, budgets.available_w(), strict=True))


@pytest.mark.parametrize("seed", range(25))
def test_the_climb_alone_is_within_all_budgets_and_repair_only_helps(seed):
    jobs, budgets = case(seed, jobs=8)
    sack = build_knapsack(jobs, budgets, AllocationGoal.THROUGHPUT)
    first = greedy_choice(sack)
    better = improve_choice(sack, first)
    priced = improve_choice(sack, greedy_choice(sack, solve_relaxation(sack).prices))
    for chosen in (first, better, priced, list(solve_relaxation(sack).chosen)):
        assert is_feasible(sack, chosen)
    assert total_value(sack, first) <= total_value(sack, better) + 1e-12 <= solve_relaxation(sack).bound + 1e-6


def test_more_watts_never_lose_throughput_at_the_bound_and_all_fit_when_there_are_enough():
    jobs, _ = case(3, jobs=10)
    bounds, values = [], []
    for room in (1.0, 1.2, 1.5, 2.0, 2.5):
        division, bound = allocate_certified(jobs, case(3, jobs=10, room=room)[1], AllocationGoal.THROUGHPUT)
        bounds.append(bound)
        values.append(division.value)
    assert bounds == sorted(bounds)
    assert values[-1] == pytest.approx(sum(job.weight for job in jobs))
    assert values[0] < values[-1]


def test_the_order_of_jobs_does_not_matter_to_the_value():
    jobs, budgets = case(5, jobs=9)
    forth = allocate_certified(jobs, budgets, AllocationGoal.THROUGHPUT)
    back = allocate_certified(jobs[::-1], budgets, AllocationGoal.THROUGHPUT)
    assert forth.found.value == pytest.approx(back.found.value, rel=2e-3)
    assert forth.bound == pytest.approx(back.bound)


def test_energy_is_saved_within_promises_only():
    jobs, budgets = case(7, jobs=6, room=2.5, promise=MaxSlowdown(0.15))
    for given in allocate_limits(jobs, budgets, AllocationGoal.ENERGY).given:
        assert given.throughput >= 1.0 / 1.15 - 1e-9
        assert given.energy <= 1.0 + 1e-9


def test_the_budget_that_lacks_most_is_named_with_its_watts_and_a_remedy():
    jobs, budgets = case(1, room=1.0)
    tight = BudgetTree(
        [
            PowerBudgetNode(one.name, one.limit_w - (30.0 if one.name == "n1" else 0.0), one.parent)
            for one in budgets.all
        ]
    )
    with pytest.raises(BudgetTooSmall) as refused:
        allocate_limits(jobs, tight, AllocationGoal.THROUGHPUT)
    assert refused.value.budget == "n1"
    assert refused.value.missing_w == pytest.approx(30.0)
    assert "30.0 W more" in refused.value.remedy


def test_a_promise_that_no_budget_can_hold_is_refused_too():
    jobs, budgets = case(2, room=1.0, promise=MaxSlowdown(0.0))
    with pytest.raises(BudgetTooSmall):
        allocate_limits(jobs, budgets, AllocationGoal.THROUGHPUT)


def test_options_that_draw_more_and_give_no_more_are_dropped():
    options = [
        KnapsackOption(2.0, 5.0, 2.0),
        KnapsackOption(1.0, 5.0, 1.0),
        KnapsackOption(3.0, 4.0, 3.0),
        KnapsackOption(4.0, 6.0, 4.0),
    ]
    assert [one.limit_w for one in drop_dominated(options)] == [1.0, 4.0]


def test_a_hull_has_falling_slopes_and_nothing_above_it():
    rng = np.random.default_rng(0)
    for _ in range(50):
        options = drop_dominated([KnapsackOption(float(w), float(v), 0.0) for w, v in rng.uniform(0.0, 9.0, (8, 2))])
        corners = [options[place] for place in concave_hull(options)]
        slopes = [(b.value - a.value) / (b.watts - a.watts) for a, b in pairwise(corners)]
        assert slopes == sorted(slopes, reverse=True)
        line = np.interp([o.watts for o in options], [c.watts for c in corners], [c.value for c in corners])
        assert all(option.value <= at + 1e-9 for option, at in zip(options, line, strict=True))


def test_nothing_to_divide():
    division, bound = allocate_certified([], BudgetTree([PowerBudgetNode("row", 10.0)]), AllocationGoal.THROUGHPUT)
    assert (division.given, division.value, bound, division.used_w) == ((), 0.0, 0.0, (0.0,))


def test_a_gpu_under_a_budget_twice_counts_once():
    budgets = BudgetTree(
        [PowerBudgetNode("row", 9.0), PowerBudgetNode("n", 9.0, "row"), PowerBudgetNode("feed", 9.0, "row")]
    )
    assert sorted(budgets.all[place].name for place in budgets.chain_indices(("n", "feed"))) == ["feed", "n", "row"]


@pytest.mark.parametrize(
    ("budgets", "field"),
    [
        ([PowerBudgetNode("a", 1.0), PowerBudgetNode("a", 2.0)], "name"),
        ([PowerBudgetNode("a", 1.0, "b")], "parent"),
        ([PowerBudgetNode("a", 1.0, "b"), PowerBudgetNode("b", 1.0, "a")], "parent"),
        ([PowerBudgetNode("a", -1.0)], "limit_w"),
        ([PowerBudgetNode("a", float("nan"))], "limit_w"),
        ([PowerBudgetNode("a", 1.0, other_w=-1.0)], "limit_w"),
    ],
)
def test_budgets_that_make_no_tree_are_refused(budgets, field):
    with pytest.raises(InvalidBudget) as refused:
        BudgetTree(budgets)
    assert refused.value.field == field


def test_jobs_and_budgets_that_do_not_fit_together_are_refused():
    rng = np.random.default_rng(0)
    budgets = BudgetTree([PowerBudgetNode("row", 1000.0)])
    for job, field in (
        (AllocationJob("j", curve(rng, 2), (BudgetShare(("row",), 1),)), "shares"),
        (AllocationJob("j", curve(rng, 1), (BudgetShare(("rack",), 1),)), "budgets"),
        (AllocationJob("j", curve(rng, 1), (BudgetShare(("row",), 1),), weight=0.0), "weight"),
    ):
        with pytest.raises(InvalidBudget) as refused:
            allocate_limits([job], budgets, AllocationGoal.THROUGHPUT)
        assert refused.value.field == field
    slow = PowerCurve("t", "g", 1, (LimitPoint(100.0, 1.0, 90.0), LimitPoint(200.0, 2.0, 150.0)))
    only = AllocationJob(
        "j", PowerCurve("t", "g", 1, slow.points[1:]), (BudgetShare(("row",), 1),), promise=MaxSlowdown(0.0)
    )
    assert allocate_limits([only], budgets, AllocationGoal.THROUGHPUT).given[0].limit_w == 200.0
    with pytest.raises(InvalidPromise):
        allocate_limits(
            [AllocationJob("j", slow, (BudgetShare(("row",), 1),), promise=Deadline(10.0, 1.0))],
            budgets,
            AllocationGoal.THROUGHPUT,
        )


def test_used_watts_are_those_of_the_options():
    jobs, budgets = case(4)
    division = allocate_limits(jobs, budgets, AllocationGoal.THROUGHPUT)
    drawn = dict.fromkeys(("row", "n0", "n1", "feed"), 0.0)
    for job, given in zip(jobs, division.given, strict=True):
        for share in job.shares:
            for name in {*share.budgets, "row"}:
                drawn[name] += share.gpus * given.charge_w
    assert list(drawn.values()) == pytest.approx(list(division.used_w))
    assert budget_usage_w(build_knapsack(jobs, budgets, AllocationGoal.THROUGHPUT), [0] * len(jobs))[0] > 0.0
