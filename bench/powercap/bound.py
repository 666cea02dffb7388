"""An independent formulation of the linear program of the cluster comparison.

Owns the bound that the table shows: one column for each job and measured limit,
one row for each job and budget, no hulls and no code of the planner's, so that a
fault in either would show.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import lil_array

from eelgrid_controller.objectives.power.budgets import BudgetTree
from eelgrid_controller.objectives.power.limit_allocation import AllocationJob

__all__ = ["most_throughput"]


def most_throughput(jobs: Sequence[AllocationJob], budgets: BudgetTree) -> float:
    """Summed normalised throughput that no limits within the budgets can pass, mixtures of limits included."""
    columns = [(index, at) for index, job in enumerate(jobs) for at in job.curve.points]
    parents = {budget.name: budget.parent for budget in budgets.all}
    rows = {name: row for row, name in enumerate(parents)}
    watts, once = lil_array((len(rows), len(columns))), lil_array((len(jobs), len(columns)))
    value = np.zeros(len(columns))
    for column, (index, at) in enumerate(columns):
        job = jobs[index]
        once[index, column] = 1.0
        value[column] = job.weight * job.curve.points[-1].time_s / at.time_s
        each = max(at.limit_w, at.power_w / job.curve.gpus)
        for share in job.shares:
            names: set[str] = set()
            for lowest in share.budgets:
                name: str | None = lowest
                while name is not None:
                    names.add(name)
                    name = parents[name]
            for name in names:
                watts[rows[name], column] += share.gpus * each
    room = [budget.limit_w - budget.other_w for budget in budgets.all]
    found = linprog(
        -value,
        A_ub=watts.tocsr(),
        b_ub=room,
        A_eq=once.tocsr(),
        b_eq=np.ones(len(jobs)),
        bounds=(0.0, 1.0),
        method="highs",
    )
    assert found.status == 0, found.message
    return float(-found.fun)
