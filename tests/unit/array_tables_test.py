"""A table of arrays reads and writes like the tuple that it is of, and never outlives or changes its arrays' layout."""

import copy
import pickle
from typing import NamedTuple

import numba
import numpy as np
import pytest

from eelgrid_kernels.array_tables import ArrayTable
from eelgrid_kernels.compilation import Kernel


class _Inner(NamedTuple):
    ranks: np.ndarray
    share: float


class Inner(_Inner, ArrayTable):
    """A part of another."""


class _Outer(NamedTuple):
    first: np.ndarray
    inner: Inner
    number: int
    grid: np.ndarray


class Outer(_Outer, ArrayTable):
    """A table with a part."""


class Twin(_Outer, ArrayTable):
    """As long as the other."""


def build(cls=Outer, rows=2):
    inner = Inner(np.arange(3, dtype=np.int32), 0.25)
    return cls(np.arange(4.0), inner, 7, np.arange(3 * rows).reshape(rows, 3))


def add_up(run, row):
    """Reads every field and writes through two of them."""
    inner = run.inner
    run.grid[row, 1] += inner.ranks[2]
    run.first[0] = run.grid[row, 2] * inner.share
    return run.number + run.grid.shape[0] * run.grid.shape[1] + run.first[3]


needs_compiler = pytest.mark.skipif(numba.config.DISABLE_JIT, reason="without its compiler numba sees no table")


@needs_compiler
def test_a_kernel_reads_and_writes_a_table_as_it_does_the_tuple():
    kernel, compiled, interpreted = Kernel(add_up, {"_nrt": False}), build(), build()
    assert kernel(compiled, 1) == add_up(interpreted, 1)
    assert compiled.grid.tolist() == interpreted.grid.tolist() == [[0, 1, 2], [3, 6, 5]]
    assert compiled.first.tolist() == interpreted.first.tolist() == [1.25, 1.0, 2.0, 3.0]
    assert kernel(build(rows=5), 4) == add_up(build(rows=5), 4)
    assert len(kernel.entry.overloads) == 1, "one version for any size"


@needs_compiler
def test_tables_of_equal_length_are_told_apart_by_their_class():
    kernel = Kernel(add_up, {})
    assert kernel(build(), 0) == kernel(build(Twin), 0)
    assert [str(types[0]) for types in kernel.entry.overloads] == ["Outer", "Twin"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_a_table_of_its_own(copied):
    one = build(Outer)
    before = one.table.tobytes()
    other = copied(one)
    assert "table" not in vars(other)
    assert other._replace(first=np.zeros(9)).table.tobytes() != before
    assert one.table.tobytes() == before


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("first", np.arange(8.0)[::2], "not contiguous"),
        ("first", np.arange(4), "int64.* and .*float64"),
        ("grid", np.arange(6), "1\\).* and .*2\\)"),
        ("number", 1.5, "float.* and .*int"),
        ("number", "7", "no table can hold"),
    ],
)
def test_arrays_of_another_layout_are_refused(field, value, why):
    assert build().table is not None
    with pytest.raises(TypeError, match=rf"Outer\.{field} is .*{why}"):
        _ = build()._replace(**{field: value}).table


@needs_compiler
def test_a_call_past_kernels_is_told_to_take_the_table():
    with pytest.raises(TypeError, match=r"takes Outer\.table"):
        numba.njit(add_up)(build(), 0)
