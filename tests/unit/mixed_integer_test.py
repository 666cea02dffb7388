"""Mixed-integer programs: against every whole solution of small ones, without a word on standard output."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from eelgrid_controller.partition.mixed_integer import solve_mixed_integer

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


def test_the_solver_prints_nothing(capfd):
    table = sparse.csc_array(np.array([[2.0, 3.0]]))
    solve_mixed_integer(np.array([1.0, 1.0]), table, np.array([7.0]), np.array([np.inf]), nodes_most=10)
    assert capfd.readouterr() == ("", "")
