"""Whole covers for most demands, and one integer programme over all GPUs for the rest.

Owns that last programme. Must not know why a demand is among the rest.

Theory: demands whose cover is settled take places; those that are loose choose
among their cheapest options at the present prices, together with the patterns of
all GPUs, so that the patterns fit what is taken and the loose ones fill what is
left over. A loose demand that is small gives way to large ones.

Counts of patterns are in the hundreds and the solution without whole numbers is near, so
the whole numbers are looked for beside it: in a box of BESIDE more and less, in which the
solver fixes most of them at once (0.3 s where the whole range takes 4, and gaps no larger).
Only where there is none in the box is the whole range searched. After proximity search:
Fischetti and Monaci, Journal of Heuristics 20, 2014.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from eelgrid_controller.partition.errors import FleetTooSmall, SearchExhausted
from eelgrid_controller.partition.exact import value_of
from eelgrid_controller.partition.prices import dear
from eelgrid_controller.partition.programme import EXACT, Programme, Weights, covered, rows
from eelgrid_kernels.arrays import Floats, Ints

__all__ = ["ENOUGH", "Start", "Try", "keen", "settled", "smallest_first"]

LOOSE_MOST = 128
LOOSE_NODES_MOST = 10
BESIDE = 1.0
KEEN_MOST = 5  # options of a demand among which it chooses
ENOUGH = 5e-4  # above the bound, and no more demands are let loose


class Try(NamedTuple):
    """How many demands are loose at least, and whether with all their options: that only to have any plan."""

    least: int
    every: bool = False
    close: float = 5e-5  # half a GPU in ten thousand ends it


class Start(NamedTuple):
    """What the last programme starts from."""

    replicas: Ints  # (O,) covers of all
    order: Ints  # (D,) in which demands are let loose
    price: Floats  # (C,) by which they choose options
    bound: float  # that is to be reached


def keen(programme: Programme, weights: Weights, price: Floats, most: int = KEEN_MOST) -> NDArray[np.bool_]:
    """Which options (O,) are among the cheapest of their demand by what a request costs at these prices (C,)."""
    useful = np.minimum(programme.throughput_hz, programme.rate_hz[programme.demand])
    each = (weights.option + programme.width * price[programme.cell]) / useful
    order = np.lexsort((each, programme.demand))
    found = np.zeros(len(each), np.bool_)
    found[order[np.arange(len(each)) - programme.first[programme.demand] < most]] = True
    return found


def smallest_first(programme: Programme, doubtful: NDArray[np.bool_]) -> Ints:
    """Demands (D,) in the order in which they are let loose: those in doubt, then those of fewest replicas."""
    useful = np.minimum(programme.throughput_hz, programme.rate_hz[programme.demand])
    return np.lexsort((programme.rate_hz / np.maximum.reduceat(useful, programme.first[:-1]), ~doubtful))


def settled(programme: Programme, weights: Weights, start: Start, tries: Sequence[Try]) -> tuple[Ints, Ints]:
    """Replicas (O,) and patterns (Q,): those given, but for the first demands in order; raises FleetTooSmall.

    The first try that comes near enough to the bound counts, else the best.
    """
    best = keen(programme, weights, start.price)
    result: tuple[Ints, Ints] | None = None
    lacking: dict[str, int] = {}
    for one in tries:
        if one.every and result is not None:
            break
        loose = np.sort(start.order[: min(LOOSE_MOST, one.least)])
        free = np.isin(programme.demand, loose)
        mine = np.flatnonzero(free & (best | one.every))
        found = _loose(programme, weights, np.where(free, 0, start.replicas), (loose, mine), one.close)
        if isinstance(found, dict):
            lacking = found
            continue
        if result is None or value_of(weights, found) < value_of(weights, result):
            result = found
        if value_of(weights, result) <= start.bound * (1.0 + ENOUGH) or len(loose) == len(programme.rate_hz):
            break
    if result is None:
        raise FleetTooSmall(lacking, "these are what the search lacks; add them, lower rates, or relax objectives")
    return result


def _least(cost: Floats, rows_: LinearConstraint, lacking: int, close: float) -> Ints:
    """Whole numbers of least cost; the last `lacking` say what is short. Raises SearchExhausted."""
    options = {"mip_rel_gap": close, "node_limit": LOOSE_NODES_MOST}

    def whole(found: Floats) -> Ints:
        return np.asarray(np.rint(found), np.int64)

    relaxed = milp(cost, integrality=np.zeros(len(cost)), bounds=Bounds(0.0, np.inf), constraints=rows_)
    short = np.zeros(0) if relaxed.x is None else relaxed.x[len(cost) - lacking :]
    if short.any():
        # Not even parts of GPUs suffice, so whole ones do not.
        return np.concatenate((np.zeros(len(cost) - lacking, np.int64), np.ceil(short).astype(np.int64)))
    if relaxed.x is not None:
        box = Bounds(np.maximum(0.0, np.floor(relaxed.x) - BESIDE), np.ceil(relaxed.x) + BESIDE)
        near = milp(cost, integrality=np.ones(len(cost)), bounds=box, constraints=rows_, options=options)
        if near.x is not None and not np.rint(near.x[len(cost) - lacking :]).any():
            return whole(near.x)
    result = milp(cost, integrality=np.ones(len(cost)), bounds=Bounds(0.0, np.inf), constraints=rows_, options=options)
    if result.x is None:
        raise SearchExhausted(f"the last services: {result.message}", "plan parts of the fleet apart")
    return whole(result.x)


def _loose(
    programme: Programme, weights: Weights, fixed: Ints, free: tuple[Ints, Ints], close: float
) -> tuple[Ints, Ints] | dict[str, int]:
    """The least plan in which some demands choose among some options, both given; else the GPUs it lacks."""
    loose, mine = free
    options, demands, cells = len(programme.options), len(programme.rate_hz), len(programme.cells)
    used = np.bincount(programme.cell, fixed * programme.width, cells)
    limited = [number for number, pool in enumerate(programme.problem.pools) if pool.count is not None]
    asked = np.ones(demands)
    while True:
        table, low, high = rows(programme, asked)
        low[demands : demands + cells] += used
        keep = np.concatenate((loose, np.arange(demands, table.shape[0])))
        columns = np.concatenate((mine, np.arange(options, table.shape[1])))
        lacking = sparse.csc_array(
            (np.full(len(limited), -1.0), (len(loose) + cells + np.arange(len(limited)), np.arange(len(limited)))),
            shape=(len(keep), len(limited)),
        )
        values = _least(
            np.concatenate((weights.option[mine], weights.pattern, np.full(len(limited), dear(weights)))),
            LinearConstraint(sparse.hstack((table[keep][:, columns], lacking), format="csc"), low[keep], high[keep]),
            len(limited),
            close,
        )
        short = values[len(columns) :]
        if short.any():
            models = [programme.problem.pools[number].model for number in limited]
            return {model: int(count) for model, count in zip(models, short, strict=True) if count}
        replicas = fixed.copy()
        replicas[mine] = values[: len(mine)]
        missed = covered(programme, replicas) < programme.rate_hz * (1.0 - EXACT)
        if not missed.any():
            return replicas, values[len(mine) : len(columns)]
        if asked.max() > 1.0 + 4e-5:
            raise SearchExhausted("rates are missed by the solver's rounding", "state them with fewer digits")
        asked[missed] += 1e-5
