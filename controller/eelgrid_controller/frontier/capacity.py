"""How much a fleet can carry: the largest common factor on all rates, and the GPUs that lack.

Owns two programs of whole instances, solved by HiGHS (scipy). Must not know watts.

Theory. T_is is the most that an instance of shape s gives service i within the
objective, r_i the rate, m_is whole instances, N the GPUs of a model:
    max f     s.t.  sum_s T_is m_is >= f r_i,   sum gpus_s m_is <= N
    min sum x s.t.  sum_s T_is m_is >= r_i,     sum gpus_s m_is <= N + x,  x whole
Of shapes with the same model and number of GPUs only the one that gives most counts.
f is in units of what the fleet would give a service that had it alone, which bounds it.
The answer's f is counted anew from the whole instances, so it can be had; it is within
`GAP` of the largest unless the solver met its limit of nodes, and then the best so far.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eelgrid_controller.serving.errors import NothingFits
from eelgrid_controller.serving.instances import Shape

__all__ = ["GAP", "Carried", "Load", "lacking", "largest_factor"]

GAP = 1e-4  # relative
_NODES_MOST = 1_000  # of one program: a limit in seconds would give another answer on another machine


class Load(NamedTuple):
    """A service with the shapes that keep its objective."""

    rate_hz: float
    shapes: tuple[Shape, ...]


class Carried(NamedTuple):
    """The largest factor and the instances that give it, by service and shape."""

    factor: float
    instances: tuple[tuple[int, ...], ...]


class _Column(NamedTuple):
    load: int
    shape: int
    model: str
    gpus: int
    throughput_hz: float


def _columns(loads: Sequence[Load]) -> list[_Column]:
    """The shapes that count."""
    found: list[_Column] = []
    for number, load in enumerate(loads):
        best: dict[tuple[str, int], _Column] = {}
        for place, shape in enumerate(load.shapes):
            key = shape.configuration.gpu_model, shape.gpus
            if key not in best or shape.throughput_hz > best[key].throughput_hz:
                best[key] = _Column(number, place, *key, shape.throughput_hz)
        found += best.values()
    return found


def _solved(cost: Any, matrix: Any, low: Any, high: Any, *, whole: Any, most: Any) -> Any:
    """The variables of the best answer, or None."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    return milp(
        cost,
        constraints=LinearConstraint(matrix, low, high),
        integrality=whole,
        bounds=Bounds(0.0, most),
        options={"mip_rel_gap": GAP, "node_limit": _NODES_MOST},
    ).x


def _rows(columns: Sequence[_Column], loads: Sequence[Load], pool: Mapping[str, int], unit: float) -> Any:
    """What each instance gives its service, in rates times `unit`, then the GPUs that it takes of each model."""
    matrix = np.zeros((len(loads) + len(pool), len(columns)))
    models = {model: len(loads) + number for number, model in enumerate(pool)}
    for at, column in enumerate(columns):
        matrix[column.load, at] = column.throughput_hz / (loads[column.load].rate_hz * unit)
        matrix[models[column.model], at] = column.gpus
    return matrix


def _factor(loads: Sequence[Load], instances: Sequence[Sequence[int]]) -> float:
    """The factor on all rates that these instances give."""
    return min(
        math.fsum(shape.throughput_hz * count for shape, count in zip(load.shapes, counts, strict=True)) / load.rate_hz
        for load, counts in zip(loads, instances, strict=True)
    )


def largest_factor(loads: Sequence[Load], pool: Mapping[str, int]) -> Carried:
    """The largest factor on all rates; 0 with no instances where a service has no room for a single one."""
    instances = [[0] * len(load.shapes) for load in loads]
    nothing = Carried(0.0, tuple(map(tuple, instances)))
    columns = [column for column in _columns(loads) if column.gpus <= pool[column.model]]
    alone = [0.0] * len(loads)
    for column in columns:
        per_gpu_hz = column.throughput_hz / column.gpus / loads[column.load].rate_hz
        alone[column.load] += per_gpu_hz * pool[column.model]
    unit = min(alone, default=0.0)
    if unit <= 0.0:
        return nothing
    rows = _rows(columns, loads, pool, unit)
    factor = np.concatenate([-np.ones(len(loads)), np.zeros(len(pool))])[:, None]
    low = np.array([0.0] * len(loads) + [-np.inf] * len(pool))
    high = np.array([np.inf] * len(loads) + [float(gpus) for gpus in pool.values()])
    cost = np.array([0.0] * len(columns) + [-1.0])
    whole = np.array([1] * len(columns) + [0])
    most = np.array([float(pool[column.model] // column.gpus) for column in columns] + [1.0])
    found = _solved(cost, np.hstack([rows, factor]), low, high, whole=whole, most=most)
    if found is None:
        return nothing
    for column, count in zip(columns, found, strict=False):
        instances[column.load][column.shape] = round(float(count))
    return Carried(_factor(loads, instances), tuple(map(tuple, instances)))


def lacking(loads: Sequence[Load], pool: Mapping[str, int]) -> Mapping[str, int]:
    """The fewest GPUs that must be added, by model, so that all rates are carried."""
    columns = _columns(loads)
    rows = _rows(columns, loads, pool, 1.0)
    added = np.vstack([np.zeros((len(loads), len(pool))), -np.eye(len(pool))])
    low = np.array([1.0] * len(loads) + [-np.inf] * len(pool))
    high = np.array([np.inf] * len(loads) + [float(gpus) for gpus in pool.values()])
    # Of the same number, the models that are named first, so that the answer is one.
    cost = np.array([0.0] * len(columns) + [1.0 + GAP * place for place in range(len(pool))])
    count = len(columns) + len(pool)
    found = _solved(cost, np.hstack([rows, added]), low, high, whole=np.ones(count), most=np.full(count, np.inf))
    if found is None:
        raise NothingFits("fleet", "the solver found no number of GPUs", "report this: it is a fault")
    gpus = (round(float(value)) for value in found[len(columns) :])
    return {model: number for model, number in zip(pool, gpus, strict=True) if number}
