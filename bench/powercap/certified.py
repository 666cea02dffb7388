"""The allocation of power limits with a bound on the optimum, which the daemon does without.

The linear-programming relaxation over concave hulls (HiGHS) gives the bound and prices, from which the climb and the
local search of the product begin again; small cases are solved exactly.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from eelgrid_controller.objectives.power.budgets import ROUNDING_W, BudgetTree
from eelgrid_controller.objectives.power.limit_allocation import (
    AllocationGoal,
    AllocationJob,
    Knapsack,
    LimitAllocation,
    budget_usage_w,
    build_knapsack,
    concave_hull,
    grant_limits,
    greedy_choice,
    improve_choice,
    total_value,
)

_MADE = 1.0 - 1e-7


_NODES_MOST = 10_000


class LpRelaxation(NamedTuple):
    """What the linear program says."""

    bound: float
    prices: tuple[float, ...]  # value of a watt, by budget
    chosen: tuple[int, ...]  # every job at the last step that is made in full


def _budget_rows(sack: Knapsack, jobs: npt.NDArray[np.int64], watts: npt.NDArray[np.float64]) -> csr_array:
    """(budgets, columns): what each column of a job draws from each budget per unit."""
    entries = [
        (budget, column, gpus * watts[column])
        for column, job in enumerate(jobs)
        for budget, gpus in sack.draws[int(job)]
    ]
    shape = (len(sack.room_w), len(jobs))
    if not entries:
        return csr_array(shape)
    rows, columns, drawn = (np.array(part) for part in zip(*entries, strict=True))
    return csr_array((drawn, (rows, columns)), shape=shape)


def solve_relaxation(sack: Knapsack) -> LpRelaxation | None:
    """The relaxation's bound, prices and rounding; None where HiGHS gives no answer.

    The least watts must fit, which `division.least` checks.
    """
    steps = [
        (job, low, high)
        for job, options in enumerate(sack.options)
        for corners in (concave_hull(options),)
        for low, high in pairwise(corners)
    ]
    base = [0] * len(sack.options)
    worth = math.fsum(options[0].value for options in sack.options)
    left = np.array(sack.room_w) - np.array(budget_usage_w(sack, base))
    if not steps:
        return LpRelaxation(worth, (0.0,) * len(left), tuple(base))
    jobs = np.array([job for job, _, _ in steps])
    watts = np.array([sack.options[job][high].watts - sack.options[job][low].watts for job, low, high in steps])
    value = np.array([sack.options[job][high].value - sack.options[job][low].value for job, low, high in steps])
    found = linprog(
        -value, A_ub=_budget_rows(sack, jobs, watts), b_ub=np.maximum(left, 0.0), bounds=(0.0, 1.0), method="highs"
    )
    if found.status != 0:
        return None
    for (job, low, high), made in zip(steps, found.x, strict=True):
        if made >= _MADE and base[job] == low:
            base[job] = high
    prices = tuple(float(max(0.0, -price)) for price in found.ineqlin.marginals)
    return LpRelaxation(worth - float(found.fun), prices, tuple(base))


def solve_exact(sack: Knapsack, gap: float = 1e-6) -> tuple[int, ...] | None:
    """The best choice within a relative gap, for small cases; None where the search hit its node limit."""
    columns = [(job, place) for job, options in enumerate(sack.options) for place in range(len(options))]
    if not columns:
        return ()
    jobs = np.array([job for job, _ in columns])
    once = csr_array((np.ones(len(columns)), (jobs, np.arange(len(columns)))), shape=(len(sack.options), len(columns)))
    watts = np.array([sack.options[job][place].watts for job, place in columns])
    found = milp(
        -np.array([sack.options[job][place].value for job, place in columns]),
        integrality=np.ones(len(columns)),
        bounds=Bounds(0.0, 1.0),
        constraints=[
            LinearConstraint(_budget_rows(sack, jobs, watts), -np.inf, np.array(sack.room_w)),
            LinearConstraint(once, 1.0, 1.0),
        ],
        options={"node_limit": _NODES_MOST, "mip_rel_gap": gap},
    )
    if found.status != 0 or found.x is None:
        return None
    chosen = [0] * len(sack.options)
    for (job, place), taken in zip(columns, found.x, strict=True):
        if taken > 0.5:
            chosen[job] = place
    return tuple(chosen)


_NEAR = 2e-3  # of the bound: near enough not to search on


_SMALL = 400  # options of all jobs up to which the exact program is tried


def is_feasible(sack: Knapsack, chosen: Sequence[int]) -> bool:
    """Whether no budget is exceeded, rounding aside."""
    return all(used <= room + ROUNDING_W for used, room in zip(budget_usage_w(sack, chosen), sack.room_w, strict=True))


def _best(sack: Knapsack) -> tuple[list[int], float | None]:
    """The better of the climb and the rounded relaxation; small cases exactly."""
    chosen = improve_choice(sack, greedy_choice(sack))
    relaxed = solve_relaxation(sack)
    if relaxed is None:
        return chosen, None
    enough = relaxed.bound - _NEAR * abs(relaxed.bound)
    for prices in (None, relaxed.prices):
        if total_value(sack, chosen) < enough:
            start = list(relaxed.chosen) if prices is None else greedy_choice(sack, prices)
            chosen = max(chosen, improve_choice(sack, start), key=lambda one: total_value(sack, one))
    if total_value(sack, chosen) < enough and sum(map(len, sack.options)) <= _SMALL:
        solved = solve_exact(sack)
        if solved is not None and is_feasible(sack, solved):
            chosen = max(chosen, list(solved), key=lambda one: total_value(sack, one))
    return chosen, relaxed.bound


class CertifiedAllocation(NamedTuple):
    """A limit for every job, and how good that can be at most."""

    found: LimitAllocation
    bound: float | None  # no division is worth more; None where the relaxation gave no answer


def allocate_certified(jobs: Sequence[AllocationJob], budgets: BudgetTree, want: AllocationGoal) -> CertifiedAllocation:
    """One limit for each job within every budget and promise, and the bound; raises as `allocate_limits` does."""
    sack = build_knapsack(jobs, budgets, want)
    chosen, bound = _best(sack)
    return CertifiedAllocation(grant_limits(jobs, sack, chosen), bound)
