"""Prices of places: what each service pays at them, and the bound that they make.

Owns prices that are feasible, and the bound. Must not know how prices are improved.

Theory (Dantzig and Wolfe, Operations Research 8, 1960). Give every place a price
p_c >= 0 such that no pattern is worth more than its GPU costs; where GPUs are
limited, what it is worth more is the rent m of one. Each service alone then buys
its cheapest cover, the kernel's exact search, and

    sum over services of the cheapest cover  -  sum over limited pools of m N

is a bound on every plan with whole replicas, whatever the prices. Services with
rounding of their own (a rate of three and a bit slices) are exact in the covers,
which is why this bound is tighter than that of the programme without whole numbers.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from eelgrid_controller.partition.errors import SearchExhausted
from eelgrid_controller.partition.programme import Programme, Weights, rows
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.covers import covers

__all__ = ["Bought", "Prices", "bought", "dear", "feasible", "first_prices", "known_prices", "named_prices"]

# Of a place, by model and profile, in the unit of the first objective.
Prices = Mapping[tuple[str, str], float]

# Steps of one service's cover. Five sizes take about a hundred, the most seen is 3,000.
COVER_NODES_MOST = 20_000
_LACKING = 1e3  # the cost of a GPU that is not there, in the dearest GPU that is


class Bought(NamedTuple):
    """Every demand's cheapest cover at some prices, and the bound that they make together."""

    bound: float
    replicas: Ints  # (O,)
    least: Floats  # (D,) what no cover of a demand costs less than


def named_prices(programme: Programme, price: Floats) -> Prices:
    """Prices (C,) by model and profile."""
    names = [(programme.problem.pools[cell.pool].model, cell.profile) for cell in programme.cells]
    return dict(zip(names, price.tolist(), strict=True))


def known_prices(programme: Programme, prices: Prices) -> Floats:
    """The same as (C,); a place without a price is free."""
    pools = programme.problem.pools
    return np.array([prices.get((pools[cell.pool].model, cell.profile), 0.0) for cell in programme.cells], np.float64)


def first_prices(programme: Programme, weights: Weights) -> Floats:
    """The dual values of the places in the programme without whole numbers."""
    table, low, high = rows(programme, np.ones(len(programme.rate_hz)))
    demands, cells = len(programme.rate_hz), len(programme.cells)
    costs = np.concatenate((weights.option, weights.pattern))
    above, below = table[: demands + cells], table[demands + cells :]
    result = linprog(
        np.concatenate((costs, np.full(below.shape[0], dear(weights)))),
        A_ub=sparse.block_array(
            [[-above, None], [below, -sparse.eye_array(below.shape[0])]] if below.shape[0] else [[-above]], format="csc"
        ),
        b_ub=np.concatenate((-low[: demands + cells], high[demands + cells :])),
        method="highs",
    )
    if result.x is None:
        raise SearchExhausted(f"the linear programme: {result.message}", "state rates and costs of one scale")
    marginals: Floats = result.ineqlin.marginals[demands : demands + cells]
    return np.maximum(0.0, -marginals)


def dear(weights: Weights) -> float:
    """What a GPU costs that is not there: far more than any that is."""
    return _LACKING * max(1.0, float(weights.pattern.max(initial=0.0)))


def feasible(programme: Programme, weights: Weights, price: Floats) -> tuple[Floats, Floats]:
    """Prices (C,) of which no pattern is worth more than its GPU costs, and rents (P,) of GPUs that are limited."""
    price, rent = price.copy(), np.zeros(len(programme.problem.pools))
    worth = programme.patterns @ price
    for number, pool in enumerate(programme.problem.pools):
        mine = programme.pool == number
        if not mine.any():
            continue
        if pool.count is not None:
            rent[number] = max(0.0, float((worth - weights.pattern)[mine].max()))
            continue
        over = float((worth[mine] / np.maximum(weights.pattern[mine], 1e-300)).max())
        if over > 1.0:
            here = np.array([cell.pool == number for cell in programme.cells])
            price[here] /= over
    return price, rent


def bought(programme: Programme, weights: Weights, price: Floats, rent: Floats) -> Bought:
    """What every demand buys at these prices (C,) and rents (P,)."""
    demands = len(programme.rate_hz)
    counts, cost, least = np.zeros(len(programme.options), np.int64), np.zeros(demands), np.zeros(demands)
    covers(
        weights.option + programme.width * price[programme.cell], programme.throughput_hz, programme.first,
        programme.rate_hz, COVER_NODES_MOST, counts, cost, least,
    )  # fmt: skip
    limited = np.array([pool.count or 0 for pool in programme.problem.pools], np.float64)
    return Bought(float(least.sum() - rent @ limited), counts, least)
