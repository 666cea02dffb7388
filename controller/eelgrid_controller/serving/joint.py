"""The instances of all services in one program: for a pool that is short.

Owns the program of windows.py and its solving by HiGHS (scipy). Must not know what
stays loaded, nor when a pool is short.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eelgrid_controller.serving.errors import NothingFits, Unusable
from eelgrid_controller.serving.instances import Shape
from eelgrid_kernels.arrays import Floats

__all__ = ["Ask", "together"]

_GAP = 1e-5  # relative, of the program
_SECONDS_MOST = 10.0  # of one program; the best so far is taken then
_LEAST = 1e-3  # of what an instance gives; a smaller demand counts as this
_SURE = 1e-9  # relative: what rounding may take of a demand


class Ask(NamedTuple):
    """One service in one window."""

    shapes: tuple[Shape, ...]
    demand_hz: float
    loaded: tuple[int, ...]  # instances by shape
    only_loaded: bool = False  # nothing can be started for this window


class _Columns(NamedTuple):
    """Where the variables of a service and shape lie: serving, new, then a lambda for each step."""

    ask: int
    shape: int
    first: int


class _Program(NamedTuple):
    cost: Floats
    constraints: Any
    whole: Floats
    bounds: Any
    columns: list[_Columns]


def _program(asks: Sequence[Ask], pool: Mapping[str, int], window_s: float, amortised: int) -> _Program:
    """The program of a window."""
    from scipy.optimize import Bounds, LinearConstraint
    from scipy.sparse import coo_array

    columns: list[_Columns] = []
    cost: list[float] = []
    whole: list[int] = []
    most: list[float] = []
    rows: list[tuple[int, int, float]] = []  # row, column, coefficient
    low: list[float] = []
    high: list[float] = []
    models = {model: number for number, model in enumerate(pool)}
    low += [0.0] * len(models)
    high += [float(pool[model]) for model in models]
    for number, ask in enumerate(asks):
        demand_row = len(low)
        # In units of the demand, for the solver's tolerances; so little is asked for that nothing gives less.
        unit_hz = max(ask.demand_hz, _LEAST * min(shape.throughput_hz for shape in ask.shapes))
        low.append(1.0)
        high.append(np.inf)
        for place, (shape, loaded) in enumerate(zip(ask.shapes, ask.loaded, strict=True)):
            first = len(cost)
            columns.append(_Columns(number, place, first))
            model = shape.configuration.gpu_model
            if model not in models:
                raise Unusable("pool", f"no {model} in it", "say how many GPUs of each model there are")
            cost += [0.0, shape.start_j / (amortised * window_s)]
            whole += [1, 0]
            most += [float(loaded) if ask.only_loaded else np.inf, np.inf]
            rows.append((models[model], first, float(shape.gpus)))
            equal, started = len(low), len(low) + 1
            low += [0.0, -float(loaded)]
            high += [0.0, np.inf]
            rows += [(equal, first, -1.0), (started, first + 1, 1.0), (started, first, -1.0)]
            for at, step in enumerate(shape.steps):
                cost.append(step.power_w - shape.idle_w)
                whole.append(0)
                most.append(np.inf)
                rows.append((equal, first + 2 + at, 1.0))
                rows.append((demand_row, first + 2 + at, step.throughput_hz / unit_hz))
    row, column, value = zip(*rows, strict=True)
    matrix = coo_array((value, (row, column)), shape=(len(low), len(cost))).tocsr()
    rows_within = LinearConstraint(matrix, np.array(low), np.array(high))
    return _Program(np.array(cost), rows_within, np.array(whole), Bounds(0.0, np.array(most)), columns)


def together(
    asks: Sequence[Ask], pool: Mapping[str, int], window_s: float, amortised: int
) -> tuple[tuple[int, ...], ...]:
    """All services in one program, where the pool is short."""
    from scipy.optimize import milp  # half a second to import, and rarely needed

    serving = [[0] * len(ask.shapes) for ask in asks]
    asking = [number for number, ask in enumerate(asks) if ask.demand_hz > 0.0]
    program = _program([asks[number] for number in asking], pool, window_s, amortised)
    found = milp(
        program.cost,
        constraints=program.constraints,
        integrality=program.whole,
        bounds=program.bounds,
        options={"mip_rel_gap": _GAP, "time_limit": _SECONDS_MOST},
    )
    if found.x is None:
        raise NothingFits("pool", "no instances of it give the demand", "add GPUs, or admit less")
    for place in program.columns:
        serving[asking[place.ask]][place.shape] = round(float(found.x[place.first]))
    for ask, counts in zip(asks, serving, strict=True):
        most_hz = math.fsum(shape.throughput_hz * count for shape, count in zip(ask.shapes, counts, strict=True))
        if most_hz < ask.demand_hz * (1.0 - _SURE):
            raise NothingFits("pool", "the solver's answer lacks throughput", "report this: it is a fault")
    return tuple(map(tuple, serving))
