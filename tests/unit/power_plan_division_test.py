"""Watts divided among jobs: the optimum on small cases, within every budget, with a bound that holds."""

from itertools import pairwise, product

import numpy as np
import pytest

from eelgrid_controller.power.budgets import Budget, Budgets
from eelgrid_controller.power.curves import AtLimit, Curve
from eelgrid_controller.power.division import Option, ascending, climb, hull, repaired, used_w, value_of, within
from eelgrid_controller.power.planner import Job, Share, Want, divide, knapsack
from eelgrid_controller.power.promise import BestEffort, Deadline, MaxSlowdown
from eelgrid_controller.power.refusals import BudgetRefused, BudgetTooSmall, PromiseRefused
from eelgrid_controller.power.relaxation import exact, relax

LIMITS_W = (100.0, 150.0, 200.0, 250.0)


def curve(rng, gpus):
    times = np.sort(rng.uniform(1.0, 2.5, len(LIMITS_W)))[::-1]
    power = np.sort(rng.uniform(60.0, 110.0, len(LIMITS_W))) * np.array(LIMITS_W) / 110.0
    points = (AtLimit(w, float(t), float(p) * gpus) for w, t, p in zip(LIMITS_W, times, power, strict=True))
    return Curve("t", "g", gpus, tuple(points))


def case(seed, jobs=4, room=None, promise=BestEffort(0.0)):  # noqa: B008
    """Jobs on two nodes with a feed across them; some gangs lie on both."""
    rng = np.random.default_rng(seed)
    made = []
    for at in range(jobs):
        gpus = int(rng.integers(1, 4))
        node = int(rng.integers(2))
        shares = (Share((f"n{node}", "feed"), gpus),)
        if gpus > 1 and rng.random() < 0.4:
            shares = (Share((f"n{node}", "feed"), 1), Share((f"n{1 - node}",), gpus - 1))
        made.append(Job(f"j{at}", curve(rng, gpus), shares, float(rng.uniform(0.5, 2.0)), promise))
    least = {"row": 0.0, "n0": 0.0, "n1": 0.0, "feed": 0.0}
    for job in made:
        for share in job.shares:
            for name in {*share.budgets, "row"}:
                least[name] += 100.0 * share.gpus
    watts = {name: low * float(rng.uniform(1.0, 2.0) if room is None else room) for name, low in least.items()}
    budgets = [Budget("row", watts["row"])]
    budgets += [Budget(node, watts[node], "row", 5.0 if room is None else 0.0) for node in ("n0", "n1")]
    budgets.append(Budget("feed", watts["feed"]))
    if room is None:
        budgets[1:3] = [Budget(one.name, one.limit_w + 5.0, "row", 5.0) for one in budgets[1:3]]
    return made, Budgets(budgets)


def brute(sack):
    """Every division there is."""
    every = product(*(range(len(options)) for options in sack.options))
    return max(value_of(sack, chosen) for chosen in every if within(sack, chosen))


@pytest.mark.parametrize("want", Want)
@pytest.mark.parametrize("seed", range(15))
def test_small_cases_are_solved_exactly_and_the_bound_holds(seed, want):
    jobs, budgets = case(seed)
    sack = knapsack(jobs, budgets, want)
    best = brute(sack)
    division = divide(jobs, budgets, want)
    assert division.bound >= best - 1e-7
    near = 2e-3 * abs(division.bound)  # the search stops there
    assert division.value >= best - near - 1e-9
    assert value_of(sack, exact(sack)) == pytest.approx(best, abs=1e-6)
    assert all(used <= room + 1e-5 for used, room in zip(division.used_w, budgets.room_w(), strict=True))


@pytest.mark.parametrize("seed", range(25))
def test_the_climb_alone_is_within_all_budgets_and_repair_only_helps(seed):
    jobs, budgets = case(seed, jobs=8)
    sack = knapsack(jobs, budgets, Want.THROUGHPUT)
    first = climb(sack)
    better = repaired(sack, first)
    priced = repaired(sack, climb(sack, relax(sack).prices))
    for chosen in (first, better, priced, list(relax(sack).chosen)):
        assert within(sack, chosen)
    assert value_of(sack, first) <= value_of(sack, better) + 1e-12 <= relax(sack).bound + 1e-6


def test_more_watts_never_lose_throughput_at_the_bound_and_all_fit_when_there_are_enough():
    jobs, _ = case(3, jobs=10)
    bounds, values = [], []
    for room in (1.0, 1.2, 1.5, 2.0, 2.5):
        division = divide(jobs, case(3, jobs=10, room=room)[1], Want.THROUGHPUT)
        bounds.append(division.bound)
        values.append(division.value)
    assert bounds == sorted(bounds)
    assert values[-1] == pytest.approx(sum(job.weight for job in jobs))
    assert values[0] < values[-1]


def test_the_order_of_jobs_does_not_matter_to_the_value():
    jobs, budgets = case(5, jobs=9)
    forth = divide(jobs, budgets, Want.THROUGHPUT)
    back = divide(jobs[::-1], budgets, Want.THROUGHPUT)
    assert forth.value == pytest.approx(back.value, rel=2e-3)
    assert forth.bound == pytest.approx(back.bound)


def test_energy_is_saved_within_promises_only():
    jobs, budgets = case(7, jobs=6, room=2.5, promise=MaxSlowdown(0.15))
    for given in divide(jobs, budgets, Want.ENERGY).given:
        assert given.throughput >= 1.0 / 1.15 - 1e-9
        assert given.energy <= 1.0 + 1e-9


def test_the_budget_that_lacks_most_is_named_with_its_watts_and_a_remedy():
    jobs, budgets = case(1, room=1.0)
    tight = Budgets(
        [Budget(one.name, one.limit_w - (30.0 if one.name == "n1" else 0.0), one.parent) for one in budgets.all]
    )
    with pytest.raises(BudgetTooSmall) as refused:
        divide(jobs, tight, Want.THROUGHPUT)
    assert refused.value.budget == "n1"
    assert refused.value.missing_w == pytest.approx(30.0)
    assert "30.0 W more" in refused.value.remedy


def test_a_promise_that_no_budget_can_hold_is_refused_too():
    jobs, budgets = case(2, room=1.0, promise=MaxSlowdown(0.0))
    with pytest.raises(BudgetTooSmall):
        divide(jobs, budgets, Want.THROUGHPUT)


def test_options_that_draw_more_and_give_no_more_are_dropped():
    options = [Option(2.0, 5.0, 2.0), Option(1.0, 5.0, 1.0), Option(3.0, 4.0, 3.0), Option(4.0, 6.0, 4.0)]
    assert [one.limit_w for one in ascending(options)] == [1.0, 4.0]


def test_a_hull_has_falling_slopes_and_nothing_above_it():
    rng = np.random.default_rng(0)
    for _ in range(50):
        options = ascending([Option(float(w), float(v), 0.0) for w, v in rng.uniform(0.0, 9.0, (8, 2))])
        corners = [options[place] for place in hull(options)]
        slopes = [(b.value - a.value) / (b.watts - a.watts) for a, b in pairwise(corners)]
        assert slopes == sorted(slopes, reverse=True)
        line = np.interp([o.watts for o in options], [c.watts for c in corners], [c.value for c in corners])
        assert all(option.value <= at + 1e-9 for option, at in zip(options, line, strict=True))


def test_nothing_to_divide():
    division = divide([], Budgets([Budget("row", 10.0)]), Want.THROUGHPUT)
    assert (division.given, division.value, division.bound, division.used_w) == ((), 0.0, 0.0, (0.0,))


def test_a_gpu_under_a_budget_twice_counts_once():
    budgets = Budgets([Budget("row", 9.0), Budget("n", 9.0, "row"), Budget("feed", 9.0, "row")])
    assert sorted(budgets.all[place].name for place in budgets.above(("n", "feed"))) == ["feed", "n", "row"]


@pytest.mark.parametrize(
    ("budgets", "field"),
    [
        ([Budget("a", 1.0), Budget("a", 2.0)], "name"),
        ([Budget("a", 1.0, "b")], "parent"),
        ([Budget("a", 1.0, "b"), Budget("b", 1.0, "a")], "parent"),
        ([Budget("a", -1.0)], "limit_w"),
        ([Budget("a", float("nan"))], "limit_w"),
        ([Budget("a", 1.0, other_w=-1.0)], "limit_w"),
    ],
)
def test_budgets_that_make_no_tree_are_refused(budgets, field):
    with pytest.raises(BudgetRefused) as refused:
        Budgets(budgets)
    assert refused.value.field == field


def test_jobs_and_budgets_that_do_not_fit_together_are_refused():
    rng = np.random.default_rng(0)
    budgets = Budgets([Budget("row", 1000.0)])
    for job, field in (
        (Job("j", curve(rng, 2), (Share(("row",), 1),)), "shares"),
        (Job("j", curve(rng, 1), (Share(("rack",), 1),)), "budgets"),
        (Job("j", curve(rng, 1), (Share(("row",), 1),), weight=0.0), "weight"),
    ):
        with pytest.raises(BudgetRefused) as refused:
            divide([job], budgets, Want.THROUGHPUT)
        assert refused.value.field == field
    slow = Curve("t", "g", 1, (AtLimit(100.0, 1.0, 90.0), AtLimit(200.0, 2.0, 150.0)))
    only = Job("j", Curve("t", "g", 1, slow.points[1:]), (Share(("row",), 1),), promise=MaxSlowdown(0.0))
    assert divide([only], budgets, Want.THROUGHPUT).given[0].limit_w == 200.0
    with pytest.raises(PromiseRefused):
        divide([Job("j", slow, (Share(("row",), 1),), promise=Deadline(10.0, 1.0))], budgets, Want.THROUGHPUT)


def test_used_watts_are_those_of_the_options():
    jobs, budgets = case(4)
    division = divide(jobs, budgets, Want.THROUGHPUT)
    drawn = dict.fromkeys(("row", "n0", "n1", "feed"), 0.0)
    for job, given in zip(jobs, division.given, strict=True):
        for share in job.shares:
            for name in {*share.budgets, "row"}:
                drawn[name] += share.gpus * given.charge_w
    assert list(drawn.values()) == pytest.approx(list(division.used_w))
    assert used_w(knapsack(jobs, budgets, Want.THROUGHPUT), [0] * len(jobs))[0] > 0.0
