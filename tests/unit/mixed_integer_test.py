"""Mixed-integer programs: against every whole solution of small ones, without a word on standard output."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from scipy.optimize import linprog

from eelgrid_controller.partition.mixed_integer import LinearProgram, solve_mixed_integer

MOST = 4


@st.composite
def programs(draw):
    columns, rows = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    numbers = st.integers(-3, 3)
    table = [[draw(numbers) for _ in range(columns)] for _ in range(rows)]
    low = [draw(numbers) for _ in range(rows)]
    high = [value + draw(st.integers(0, 6)) for value in low]
    cost = [draw(st.integers(0, 5)) for _ in range(columns)]
    return tuple(np.array(each, np.float64) for each in (cost, table, low, high))


@given(programs())
def test_no_whole_solution_costs_less(program):
    cost, table, low, high = program
    wholes = [np.array(each, np.float64) for each in itertools.product(range(MOST + 1), repeat=len(cost))]
    allowed = [float(cost @ x) for x in wholes if ((low <= table @ x) & (table @ x <= high)).all()]
    found = solve_mixed_integer(cost, sparse.csc_array(table), low, high, most=float(MOST), nodes_most=1000)
    assert found.is_infeasible == (not allowed)
    if allowed:
        x = np.rint(found.values)
        assert np.abs(found.values - x).max() < 1e-6
        assert ((low <= table @ x) & (table @ x <= high)).all()
        assert set(x) <= set(range(MOST + 1))
        assert float(cost @ x) == min(allowed)
        assert found.bound <= min(allowed) + 1e-6
    else:
        assert found.values is None


def test_without_nodes_parts_are_allowed():
    table = sparse.csc_array(np.array([[2.0]]))
    found = solve_mixed_integer(np.array([1.0]), table, np.array([3.0]), np.array([np.inf]), nodes_most=0)
    assert found.values.tolist() == [1.5]
    assert found.bound == 1.5


def test_only_what_is_to_be_whole_is():
    table = sparse.csc_array(np.array([[2.0, 4.0]]))
    found = solve_mixed_integer(
        np.array([1.0, 3.0]), table, np.array([3.0]), np.array([np.inf]), whole=np.array([False, True]), nodes_most=10
    )
    assert found.values.tolist() == [1.5, 0.0]
    both = solve_mixed_integer(np.array([1.0, 3.0]), table, np.array([3.0]), np.array([np.inf]), nodes_most=10)
    assert both.values.tolist() == [2.0, 0.0]


@given(programs())
def test_few_cuts_change_no_optimum(program):
    cost, table, low, high = program
    matrix, limits = sparse.csc_array(table), {"most": float(MOST), "nodes_most": 1000}
    plain = solve_mixed_integer(cost, matrix, low, high, **limits)
    few = solve_mixed_integer(cost, matrix, low, high, cuts_most=1, **limits)
    assert few.is_infeasible == plain.is_infeasible
    if plain.values is not None:
        assert cost @ np.rint(few.values) == cost @ np.rint(plain.values)


@given(programs(), programs(), st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_a_linear_program_that_grows_is_solved_like_one_that_is_given_whole(program, more, others):
    cost, table, low, high = program
    rows = min(len(low), len(more[2]))
    table, low, high = table[:rows], low[:rows], high[:rows]
    added = more[1][:rows]
    grown = LinearProgram(cost, sparse.csc_array(table), low, high)
    check_linear(grown, cost, table, (low, high))
    costs = np.concatenate((cost, more[0]))
    grown.add_columns(more[0], sparse.csc_array(added))
    both = np.hstack((table, added))
    check_linear(grown, costs, both, (low, high))
    costs = np.array(others[: len(costs)], np.float64)
    grown.set_costs(costs)
    check_linear(grown, costs, both, (low, high))
    grown.set_low(0, 1.0)
    low, high = np.concatenate(([1.0], low[1:])), np.concatenate(([np.inf], high[1:]))
    check_linear(grown, costs, both, (low, high))


def check_linear(program, cost, table, limits):
    """Value, values, prices and reduced costs against SciPy's solution and against each other."""
    low, high = limits
    bounded = np.isfinite(high)
    expected = linprog(
        cost, A_ub=np.vstack((-table, table[bounded])), b_ub=np.concatenate((-low, high[bounded])), method="highs"
    )
    found = program.solve()
    assert (found is None) == (expected.x is None)
    if found is None:
        return
    np.testing.assert_allclose(found.value, expected.fun, atol=1e-6)
    np.testing.assert_allclose(cost @ found.values, found.value, atol=1e-6)
    np.testing.assert_allclose(found.reduced_cost, cost - table.T @ found.price, atol=1e-6)
    assert found.reduced_cost.min() > -1e-6


def test_the_solver_prints_nothing(capfd):
    table = sparse.csc_array(np.array([[2.0, 3.0]]))
    solve_mixed_integer(np.array([1.0, 1.0]), table, np.array([7.0]), np.array([np.inf]), nodes_most=10)
    assert capfd.readouterr() == ("", "")
