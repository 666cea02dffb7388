"""Solves linear and mixed-integer programs by HiGHS, with what SciPy's `milp` and `linprog` cannot be told.

That is which heuristics to run, how many cuts to keep, and that a program has grown by some columns since it was solved
last. No solution is given to start from: HiGHS 1.16 may call a start optimal that its presolve has mapped to another value.

Owns the solver's options. Must not know what a program is about.
"""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

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


class LinearResult(NamedTuple):
    """The optimum of a linear program of N columns and M rows."""

    value: float
    values: Floats  # (N,)
    reduced_cost: Floats  # (N,)
    price: Floats  # (M,) by how much the value rises with the bound of a row


def solve_mixed_integer(
    cost: Floats,
    table: "sparse.csc_array",
    low: Floats,
    high: Floats,
    *,
    least: Floats | float = 0.0,
    most: Floats | float = np.inf,
    whole: NDArray[np.bool_] | None = None,
    gap: float = 0.0,
    nodes_most: int,
    cuts_most: int | None = None,
) -> MixedIntegerResult:
    """Whole numbers x from `least` (N,) to `most` (N,) of least cost (N,) within low <= table @ x <= high (M,).

    `whole` (N,) says which are to be whole numbers, all of them if it is None. The search ends within `gap` of the
    least, relative, or after so many nodes; with none at all the program without whole numbers is solved.
    `cuts_most` is about how many cuts the solver keeps: fewer than it does by itself save time where the relaxation is
    near.
    """
    from highspy import HighsModelStatus, HighsVarType, SolutionStatus

    program = _build_program(cost, table, low, high, (least, most))
    if nodes_most > 0:
        kinds = np.ones(len(cost), np.bool_) if whole is None else whole
        program.integrality_ = [HighsVarType.kInteger if each else HighsVarType.kContinuous for each in kinds]
    options: dict[str, float] = {"mip_rel_gap": gap, "mip_max_nodes": nodes_most}
    if cuts_most is not None:
        options["mip_pool_soft_limit"] = cuts_most
    solver = _pass_program(program, options)
    solver.run()
    info, status = solver.getInfo(), solver.getModelStatus()
    found = info.primal_solution_status == SolutionStatus.kSolutionStatusFeasible.value
    return MixedIntegerResult(
        np.array(solver.getSolution().col_value) if found else None,
        float(info.mip_dual_bound if nodes_most > 0 else info.objective_function_value),
        status in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible),
    )


class LinearProgram:
    """Numbers x >= 0 of least cost (N,) within low <= table @ x <= high (M,), for more and more columns N."""

    def __init__(self, cost: Floats, table: "sparse.csc_array", low: Floats, high: Floats) -> None:
        self._solver = _pass_program(_build_program(cost, table, low, high, (0.0, np.inf)), {})

    def add_columns(self, cost: Floats, table: "sparse.csc_array") -> None:
        """Columns N to N + K - 1, with their entries (M, K) in the rows."""
        count = len(cost)
        self._solver.addCols(
            count, cost, np.zeros(count), np.full(count, np.inf),
            table.nnz, table.indptr[:-1].astype(np.int32), table.indices.astype(np.int32), table.data,
        )  # fmt: skip

    def set_costs(self, cost: Floats) -> None:
        """Other costs (N,) of all columns."""
        self._solver.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)

    def set_low(self, row: int, low: float) -> None:
        """Another least value of a row, which has no most."""
        self._solver.changeRowBounds(row, low, np.inf)

    def solve(self) -> LinearResult | None:
        """The optimum, from that of the columns before; None if nothing is within the rows."""
        from highspy import HighsModelStatus

        self._solver.run()
        if self._solver.getModelStatus() != HighsModelStatus.kOptimal:
            return None
        found = self._solver.getSolution()
        return LinearResult(
            float(self._solver.getInfo().objective_function_value),
            np.array(found.col_value),
            np.array(found.col_dual),
            np.array(found.row_dual),
        )


def _build_program(
    cost: Floats,
    table: "sparse.csc_array",
    low: Floats,
    high: Floats,
    bounds: tuple[Floats | float, Floats | float],
) -> "highspy.HighsLp":
    from highspy import HighsLp, MatrixFormat

    program = HighsLp()
    program.num_row_, program.num_col_ = table.shape
    program.col_cost_ = cost
    program.col_lower_, program.col_upper_ = (
        np.array(np.broadcast_to(bound, cost.shape), np.float64) for bound in bounds
    )
    program.row_lower_, program.row_upper_ = low, high
    program.a_matrix_.format_ = MatrixFormat.kColwise
    program.a_matrix_.start_, program.a_matrix_.index_ = table.indptr, table.indices
    program.a_matrix_.value_ = table.data
    return program


def _pass_program(program: "highspy.HighsLp", options: Mapping[str, float]) -> "highspy.Highs":
    """A solver that holds the program."""
    solver = _load_solver()()
    for name, value in {**_OPTIONS, **options}.items():
        solver.setOptionValue(name, value)
    solver.passModel(program)
    return solver


@cache
def _load_solver() -> "type[highspy.Highs]":
    """HiGHS without the line that 1.16.0 prints as soon as it is constructed."""
    import highspy  # 0.1 s, and rarely needed

    class QuietSolver(highspy.Highs):
        def enableCallbacks(self) -> None:  # noqa: N802  # its own name
            self.silent()
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    return QuietSolver
