"""The bound on what a division of watts can be worth, by linear programming.

Owns the relaxation, its prices and its rounding, and the exact program for small
cases. Must not know where options come from.

Theory: with jobs allowed mixtures of limits the knapsack is a linear program over
the hulls alone. A hull is concave, so a job's steps up it fill in order and each
step is one bounded variable y of watts a GPU:

    max  sum_js slope_js y_js     sum_j g_jb (w_j0 + sum_s y_js) <= room_b,  0 <= y_js <= step_js

Its value bounds every division from above; its dual prices say what a watt of
each budget is worth; a vertex of it has at most as many steps half made as
budgets that bind, so that leaving those out gives a division within all budgets
and not far below the bound.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from eelgrid_controller.power.division import Knapsack, hull, used_w

__all__ = ["Relaxed", "exact", "relax"]

_MADE = 1.0 - 1e-7
_NODES_MOST = 10_000


class Relaxed(NamedTuple):
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


def relax(sack: Knapsack) -> Relaxed | None:
    """The relaxation's bound, prices and rounding; None where HiGHS gives no answer.

    The least watts must fit, which `division.least` checks.
    """
    steps = [
        (job, low, high)
        for job, options in enumerate(sack.options)
        for corners in (hull(options),)
        for low, high in pairwise(corners)
    ]
    base = [0] * len(sack.options)
    worth = math.fsum(options[0].value for options in sack.options)
    left = np.array(sack.room_w) - np.array(used_w(sack, base))
    if not steps:
        return Relaxed(worth, (0.0,) * len(left), tuple(base))
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
    return Relaxed(worth - float(found.fun), prices, tuple(base))


def exact(sack: Knapsack, gap: float = 1e-6) -> tuple[int, ...] | None:
    """The best division, within a relative gap, for small cases; None where the search did not end in its nodes."""
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
