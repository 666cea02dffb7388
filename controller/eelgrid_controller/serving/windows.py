"""Which instances serve the next window, from a pool that services share.

Owns the choice of a window and what is kept loaded after it. Must not know where a
demand comes from, nor time: a window is what it is called with.

Theory. Of service i and shape s, m are the instances that serve, new those that must
be started for it, lambda the instances at step j of the hull. One program a window:
    min  sum (power_sj - idle_s) lambda_sj + start_j_s / (K seconds) new_s
    s.t. sum_j lambda_sj = m_s,   sum T_sj lambda_sj >= demand of i,
         new_s >= m_s - loaded_s, sum gpus_s m_s <= pool of the model,   m whole
Watts above idle, because a GPU of the pool that serves nothing draws its idle watts
whoever holds it. A start is spread over K windows: it is bought for longer than one,
and how long nobody knows. What served within the last `hold` windows stays loaded:
starting anew costs more than keeping it, which costs nothing but the room; room that
another needs is given up, the largest instances first.

Solved by HiGHS (scipy); the lambdas are then set by the greedy walk of instances.py,
so that the demand is met to the last digit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import coo_array  # type: ignore[import-untyped]

from eelgrid_controller.serving.errors import NothingFits, Unusable
from eelgrid_controller.serving.instances import Running, Shape, dispatch

__all__ = ["AMORTISED", "HOLD", "Ask", "Loaded", "chosen", "kept", "serve"]

AMORTISED = 10  # windows that pay for a start
HOLD = 15  # windows that an instance stays loaded after it served
_GAP = 1e-5  # relative, of the program
_SECONDS_MOST = 10.0  # of one program; the best so far is taken then
_SURE = 1e-9  # relative: what rounding may take of a demand


class Ask(NamedTuple):
    """One service in one window."""

    shapes: tuple[Shape, ...]
    demand_hz: float
    loaded: tuple[int, ...]  # instances by shape


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is loaded and when it last served: instances by shape that served in each of the last windows."""

    served: tuple[tuple[int, ...], ...]
    instances: tuple[int, ...]


class _Columns(NamedTuple):
    """Where the variables of a service and shape lie: serving, new, then a lambda for each step."""

    ask: int
    shape: int
    first: int


def _program(
    asks: Sequence[Ask], pool: Mapping[str, int], window_s: float, amortised: int
) -> tuple[np.ndarray, LinearConstraint, np.ndarray, list[_Columns]]:
    """Costs, constraints, which variables are whole, and where each shape's variables lie."""
    columns, cost, whole = [], [], []
    rows: list[tuple[int, int, float]] = []  # row, column, coefficient
    low: list[float] = []
    high: list[float] = []
    models = {model: number for number, model in enumerate(pool)}
    low += [0.0] * len(models)
    high += [float(pool[model]) for model in models]
    for number, ask in enumerate(asks):
        demand_row = len(low)
        low.append(1.0 if ask.demand_hz > 0.0 else 0.0)  # in units of the demand, for the solver's tolerances
        high.append(np.inf)
        for place, (shape, loaded) in enumerate(zip(ask.shapes, ask.loaded, strict=True)):
            first = len(cost)
            columns.append(_Columns(number, place, first))
            model = shape.configuration.gpu_model
            if model not in models:
                raise Unusable("pool", f"no {model} in it", "say how many GPUs of each model there are")
            cost += [0.0, shape.start_j / (amortised * window_s)]
            whole += [1, 0]
            rows.append((models[model], first, float(shape.gpus)))
            equal, started = len(low), len(low) + 1
            low += [0.0, -float(loaded)]
            high += [0.0, np.inf]
            rows += [(equal, first, -1.0), (started, first + 1, 1.0), (started, first, -1.0)]
            for at, step in enumerate(shape.steps):
                cost.append(step.power_w - shape.idle_w)
                whole.append(0)
                rows.append((equal, first + 2 + at, 1.0))
                rows.append((demand_row, first + 2 + at, step.throughput_hz / max(ask.demand_hz, 1e-12)))
    row, column, value = zip(*rows, strict=True)
    matrix = coo_array((value, (row, column)), shape=(len(low), len(cost))).tocsr()
    return np.array(cost), LinearConstraint(matrix, np.array(low), np.array(high)), np.array(whole), columns


def chosen(
    asks: Sequence[Ask], pool: Mapping[str, int], *, window_s: float, amortised: int = AMORTISED
) -> tuple[tuple[int, ...], ...]:
    """The instances that serve, by service and shape; NothingFits if the pool cannot give all demands."""
    serving = [[0] * len(ask.shapes) for ask in asks]
    asking = [number for number, ask in enumerate(asks) if ask.demand_hz > 0.0]
    if asking:
        some = [asks[number] for number in asking]
        cost, constraints, whole, columns = _program(some, pool, window_s, amortised)
        found = milp(
            cost,
            constraints=constraints,
            integrality=whole,
            bounds=Bounds(0.0, np.inf),
            options={"mip_rel_gap": _GAP, "time_limit": _SECONDS_MOST},
        )
        if found.x is None:
            raise NothingFits("pool", "no instances of it give the demand", "add GPUs, or admit less")
        for place in columns:
            serving[asking[place.ask]][place.shape] = round(float(found.x[place.first]))
    for ask, counts in zip(asks, serving, strict=True):
        most_hz = sum(shape.throughput_hz * count for shape, count in zip(ask.shapes, counts, strict=True))
        if most_hz < ask.demand_hz * (1.0 - _SURE):
            raise NothingFits("pool", "the solver's answer lacks throughput", "report this: it is a fault")
    return tuple(map(tuple, serving))


def kept(before: Loaded, serving: Sequence[int], *, hold: int = HOLD) -> Loaded:
    """What stays loaded: of each shape the most that served in one of the last `hold` windows."""
    served = (*before.served, tuple(serving))[-hold:]
    return Loaded(served, tuple(max(counts) for counts in zip(*served, strict=True)))


def _evicted(
    asks: Sequence[Ask], after: list[Loaded], serving: Sequence[Sequence[int]], pool: Mapping[str, int]
) -> None:
    """Gives up idle instances, the largest first, until what is loaded fits into the pool; in place."""
    for model, gpus in pool.items():
        places = [
            (ask.shapes[place].gpus, number, place)
            for number, ask in enumerate(asks)
            for place in range(len(ask.shapes))
            if ask.shapes[place].configuration.gpu_model == model
        ]
        over = sum(size * after[number].instances[place] for size, number, place in places) - gpus
        for size, number, place in sorted(places, reverse=True):
            idle = after[number].instances[place] - serving[number][place]
            gone = min(idle, -(-over // size)) if over > 0 else 0
            if gone > 0:
                counts = list(after[number].instances)
                counts[place] -= gone
                # Forgotten too, or the next window would load it again.
                served = tuple(
                    tuple(min(count, most) for count, most in zip(row, counts, strict=True))
                    for row in after[number].served
                )
                after[number] = Loaded(served, tuple(counts))
                over -= gone * size


def serve(
    asks: Sequence[Ask],
    before: Sequence[Loaded],
    pool: Mapping[str, int],
    *,
    window_s: float,
    hold: int = HOLD,
    amortised: int = AMORTISED,
) -> tuple[tuple[Running, ...], tuple[Loaded, ...]]:
    """One window of all services: how each runs, and what is loaded in it and after it."""
    serving = chosen(asks, pool, window_s=window_s, amortised=amortised)
    after = [kept(loaded, counts, hold=hold) for loaded, counts in zip(before, serving, strict=True)]
    _evicted(asks, after, serving, pool)
    running = tuple(dispatch(ask.shapes, counts, ask.demand_hz) for ask, counts in zip(asks, serving, strict=True))
    return running, tuple(after)
