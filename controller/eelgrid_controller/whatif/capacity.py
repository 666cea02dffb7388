"""Capacity of a pool: the largest common factor on the rates of some loads that it carries, and the GPUs that it lacks.

A load has shapes of whole GPUs or of MIG slices; instances and layouts are whole numbers of one program (HiGHS). Of the
shapes that take the same place, only the one with the most throughput counts.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.partition.mixed_integer import solve_mixed_integer
from eelgrid_controller.profiles.points import NoFeasibleConfiguration
from eelgrid_controller.whatif.instances import InstanceShape, list_slice_kinds, most_instances
from eelgrid_controller.whatif.slice_layouts import (
    NO_LAYOUTS,
    LayoutColumn,
    PoolLayouts,
    list_layout_columns,
)
from eelgrid_kernels.arrays import Floats

CAPACITY_GAP = 1e-4  # relative
_NODES_MOST = 1_000  # of one program: a limit in seconds would give another answer on another machine


class CapacityLoad(NamedTuple):
    """A service with the shapes that keep its objective, or training jobs with theirs."""

    rate_hz: float
    shapes: tuple[InstanceShape, ...]
    instances_most: int | None = None  # of each shape


class CapacityResult(NamedTuple):
    """The largest factor and the instances that give it, by service and shape."""

    factor: float
    instances: tuple[tuple[int, ...], ...]


class _Column(NamedTuple):
    load: int
    place: int  # of the shape among those of its load
    shape: InstanceShape
    instances_most: int | None

    @property
    def throughput_hz(self) -> float:
        return self.shape.throughput_hz


def _columns(loads: Sequence[CapacityLoad]) -> list[_Column]:
    """The shapes that count."""
    found: list[_Column] = []
    for number, load in enumerate(loads):
        best: dict[tuple[str, int, str], _Column] = {}
        for place, shape in enumerate(load.shapes):
            where = shape.configuration
            key = where.gpu_model, where.gpus, where.mig_profile
            if key not in best or shape.throughput_hz > best[key].throughput_hz:
                best[key] = _Column(number, place, shape, load.instances_most)
        found += best.values()
    return found


class _Rows(NamedTuple):
    """The rows of loads, of GPUs by model and of slices by kind, over instances by column and GPUs by pattern."""

    matrix: Floats
    low: Floats  # without those of the loads
    high: Floats

    def solve(
        self,
        beside: Floats,
        cost: Sequence[float],
        loads_low: Sequence[float],
        *,
        whole: NDArray[np.bool_],
        most: Sequence[float],
    ) -> Floats | None:
        """The best values with the further columns `beside`, or None; every load is at `loads_low` at least."""
        from scipy import sparse

        padded = np.vstack([beside, np.zeros((len(self.matrix) - len(beside), beside.shape[1]))])
        return solve_mixed_integer(
            np.array(cost),
            sparse.csc_array(np.hstack([self.matrix, padded])),
            np.concatenate([loads_low, self.low]),
            np.concatenate([np.full(len(loads_low), np.inf), self.high]),
            most=np.array(most),
            whole=whole,
            gap=CAPACITY_GAP,
            nodes_most=_NODES_MOST,
        ).values


def _build_rows(
    columns: Sequence[_Column],
    loads: Sequence[CapacityLoad],
    pool: Mapping[str, int],
    patterns: Sequence[LayoutColumn],
    unit: float,
) -> _Rows:
    """What each instance gives its load, in rates times `unit`, and the GPUs or slices that it takes."""
    kinds = list_slice_kinds(column.shape for column in columns)
    matrix = np.zeros((len(loads) + len(pool) + len(kinds), len(columns) + len(patterns)))
    models = {model: len(loads) + number for number, model in enumerate(pool)}
    slices = {kind: len(loads) + len(pool) + number for number, kind in enumerate(kinds)}
    for at, column in enumerate(columns):
        matrix[column.load, at] = column.throughput_hz / (loads[column.load].rate_hz * unit)
        kind = column.shape.slice_kind
        if kind is None:
            matrix[models[column.shape.configuration.gpu_model], at] = column.shape.gpus
        else:
            matrix[slices[kind], at] = -1.0
    for at, pattern in enumerate(patterns, len(columns)):
        matrix[models[pattern.gpu_model], at] = 1.0
        for kind, count in pattern.slices.items():
            matrix[slices[kind], at] = count
    low = np.array([-np.inf] * len(pool) + [0.0] * len(kinds))
    return _Rows(matrix, low, np.array([*map(float, pool.values()), *([np.inf] * len(kinds))]))


def _list_patterns(columns: Sequence[_Column], layouts: PoolLayouts) -> list[LayoutColumn]:
    return list_layout_columns(layouts, list_slice_kinds(column.shape for column in columns))


def _factor(loads: Sequence[CapacityLoad], instances: Sequence[Sequence[int]]) -> float:
    """The factor on all rates that these instances give."""
    return min(
        math.fsum(shape.throughput_hz * count for shape, count in zip(load.shapes, counts, strict=True)) / load.rate_hz
        for load, counts in zip(loads, instances, strict=True)
    )


def _largest_alone(
    loads: Sequence[CapacityLoad], columns: Sequence[_Column], most: Sequence[int], pool: Mapping[str, int]
) -> float:
    """A factor that some load cannot exceed, if each had the whole pool for each of its shapes."""
    alone = [0.0] * len(loads)
    for column, count in zip(columns, most, strict=True):
        if column.load < len(loads):
            is_free = column.instances_most is None and column.shape.slice_kind is None
            instances = pool[column.shape.configuration.gpu_model] / column.shape.gpus if is_free else count
            alone[column.load] += column.throughput_hz * instances / loads[column.load].rate_hz
    return min(alone, default=0.0)


def largest_factor(
    loads: Sequence[CapacityLoad],
    pool: Mapping[str, int],
    fixed: Sequence[CapacityLoad] = (),
    layouts: PoolLayouts = NO_LAYOUTS,
) -> CapacityResult:
    """The largest factor on all rates beside others that are carried as they are; 0 with no instances if there is none.

    The instances are of the loads, then of the fixed ones. `layouts` is of the models of which shapes take slices.
    """
    every = (*loads, *fixed)
    instances = [[0] * len(load.shapes) for load in every]
    nothing = CapacityResult(0.0, tuple(map(tuple, instances)))
    columns = [column for column in _columns(every) if most_instances(column.shape, pool, layouts)]
    rooms = [most_instances(column.shape, pool, layouts) for column in columns]
    most = [
        room if column.instances_most is None else min(room, column.instances_most)
        for column, room in zip(columns, rooms, strict=True)
    ]
    unit = _largest_alone(loads, columns, most, pool)
    if unit <= 0.0:
        return nothing
    patterns = _list_patterns(columns, layouts)
    whole_count = len(columns) + len(patterns)
    found = _build_rows(columns, every, pool, patterns, unit).solve(
        np.concatenate([-np.ones(len(loads)), np.zeros(len(fixed))])[:, None],
        [0.0] * whole_count + [-1.0],
        [0.0] * len(loads) + [1.0 / unit] * len(fixed),
        whole=np.array([True] * whole_count + [False]),
        most=[*map(float, most), *(float(pool[pattern.gpu_model]) for pattern in patterns), 1.0],
    )
    if found is None:
        return nothing
    for column, count in zip(columns, found, strict=False):
        instances[column.load][column.place] = round(float(count))
    return CapacityResult(_factor(loads, instances[: len(loads)]), tuple(map(tuple, instances)))


def missing_gpus(
    loads: Sequence[CapacityLoad], pool: Mapping[str, int], layouts: PoolLayouts = NO_LAYOUTS
) -> Mapping[str, int]:
    """The fewest GPUs that must be added, by model, so that all rates are carried."""
    columns = _columns(loads)
    patterns = _list_patterns(columns, layouts)
    added = np.vstack([np.zeros((len(loads), len(pool))), -np.eye(len(pool))])
    # Of the same number, the models that are named first, so that the answer is one.
    prices = [1.0 + CAPACITY_GAP * place for place in range(len(pool))]
    bounds = [np.inf if column.instances_most is None else float(column.instances_most) for column in columns]
    most = [*bounds, *([np.inf] * (len(patterns) + len(pool)))]
    found = _build_rows(columns, loads, pool, patterns, 1.0).solve(
        added,
        [0.0] * (len(columns) + len(patterns)) + prices,
        [1.0] * len(loads),
        whole=np.ones(len(most), np.bool_),
        most=most,
    )
    if found is None:
        raise NoFeasibleConfiguration("fleet", "the solver found no number of GPUs", "report this: it is a fault")
    gpus = (round(float(value)) for value in found[len(columns) + len(patterns) :])
    return {model: number for model, number in zip(pool, gpus, strict=True) if number}
