"""Solves mixed-integer linear programs by HiGHS, with what SciPy's `milp` cannot be told: which heuristics to run.

Owns the solver's options. Must not know what a program is about.
"""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eelgrid_kernels.arrays import Floats

if TYPE_CHECKING:
    # Imported where it solves: a controller that partitions nothing starts sooner, and smaller.
    import highspy
    from scipy import sparse

# Chosen on the programs of `bench.mig --changes`, whose slowest took 2.5 times as long with the solver's defaults and came
# out as good: sub-programs around the relaxation (RENS), restarts and full strong branching are what took the time.
_OPTIONS: Mapping[str, bool | int] = {
    "output_flag": False,
    "threads": 1,  # the caller's own, so that results do not depend on the machine
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_allow_restart": False,
    "mip_detect_symmetry": False,
    "mip_pscost_minreliable": 0,
}


class MixedIntegerResult(NamedTuple):
    """The best solution within the nodes; `values` is None where none was found."""

    values: Floats | None  # (N,)
    bound: float  # what no solution can go below
    is_infeasible: bool


def solve_mixed_integer(
    cost: Floats,
    table: "sparse.csc_array",
    low: Floats,
    high: Floats,
    *,
    most: Floats | float = np.inf,
    gap: float = 0.0,
    nodes_most: int,
) -> MixedIntegerResult:
    """Whole numbers x from 0 to `most` (N,) of least cost (N,) within low <= table @ x <= high (M,).

    The search ends within `gap` of the least, relative, or after so many nodes; with none at all the program without
    whole numbers is solved.
    """
    from highspy import HighsLp, HighsModelStatus, HighsVarType, MatrixFormat, SolutionStatus

    solver = _load_solver()()
    options = {**_OPTIONS, "mip_rel_gap": gap, "mip_max_nodes": nodes_most}
    for name, value in options.items():
        solver.setOptionValue(name, value)
    program = HighsLp()
    program.num_row_, program.num_col_ = table.shape
    program.col_cost_, program.col_lower_ = cost, np.zeros(len(cost))
    program.col_upper_ = np.array(np.broadcast_to(most, cost.shape), np.float64)
    program.row_lower_, program.row_upper_ = low, high
    program.a_matrix_.format_ = MatrixFormat.kColwise
    program.a_matrix_.start_, program.a_matrix_.index_ = table.indptr, table.indices
    program.a_matrix_.value_ = table.data
    if nodes_most > 0:
        program.integrality_ = [HighsVarType.kInteger] * len(cost)
    solver.passModel(program)
    solver.run()
    info, status = solver.getInfo(), solver.getModelStatus()
    found = info.primal_solution_status == SolutionStatus.kSolutionStatusFeasible.value
    return MixedIntegerResult(
        np.array(solver.getSolution().col_value) if found else None,
        float(info.mip_dual_bound if nodes_most > 0 else info.objective_function_value),
        status in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible),
    )


@cache
def _load_solver() -> "type[highspy.Highs]":
    """HiGHS without the line that 1.16.0 prints as soon as it is constructed."""
    import highspy  # 0.1 s, and rarely needed

    class QuietSolver(highspy.Highs):
        def enableCallbacks(self) -> None:  # noqa: N802  # its own name
            self.silent()
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    return QuietSolver
