"""The least plan of a whole fleet: prices of places, covers of services at those prices, and what is left over.

Owns the search by column generation and its bound. Must not know where the
programme comes from.

Theory (Dantzig and Wolfe, Operations Research 8, 1960). Give every place a price
p_c >= 0 such that no pattern is worth more than its GPU costs; where GPUs are
limited, what it is worth more is the rent m of one. Each service alone then buys
its cheapest cover, the kernel's exact search, and

    sum over services of the cheapest cover  -  sum over limited pools of m N

is a bound on every plan with whole replicas. The master programme mixes the
covers found so far at least GPUs; its dual values are the next prices. It has a
row for each service and a few for places, so that its solution mixes covers for no
more services than it has other rows: a few dozen of thousands. All others are
settled, and those few are one small integer programme over all GPUs.

Services with rounding of their own (a rate of three and a bit slices) are exact in
the covers, which is why this bound is tighter than that of the programme without
whole numbers: 1.4 % on 2,000 services, docs/partition.md.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from eelgrid_controller.partition.errors import FleetTooSmall, SearchExhausted
from eelgrid_controller.partition.exact import Proof, Solution, rounded_bound, value_of
from eelgrid_controller.partition.programme import EXACT, Programme, Weights, covered, objectives, rows
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.covers import covers

__all__ = ["Prices", "fleet"]

# Of a place, by model and profile, in the unit of the first objective.
Prices = Mapping[tuple[str, str], float]

ROUNDS_MOST = 12
# Steps of one service's cover. Five sizes take about a hundred, the most seen is 3,000.
COVER_NODES_MOST = 20_000
LOOSE_MOST = 128  # services that are settled last, by one integer programme
LOOSE_NODES_MOST = 10
ENOUGH = 5e-4  # above the bound, and no more services are let loose
# Services that are let loose, in doubt or not, and whether with all their options: that only to have any plan.
_TRIES = ((16, False), (48, False), (48, True))
CLOSE = 1e-5  # a master's value this near to the bound ends the search
KEEN_MOST = 8  # cheapest options a request, among which the last services choose
LOOSE_CLOSE = 5e-5  # half a GPU in ten thousand ends the last programme
_APART = 0.02  # prices that far below the present ones give the covers that a mix needs
_LACKING = 1e3  # the cost of a GPU that is not there, in the dearest GPU that is
_WHOLE = 1e-6
_KEYS: Ints = np.cumprod(np.full(256, 6_364_136_223_846_793_005, np.int64))  # modulo 2^64: Knuth, MMIX


class _Covers(NamedTuple):
    """Distinct covers, N of them."""

    counts: Ints  # (N, K) of the demand's options, in their order
    demand: Ints  # (N,)


class _Master(NamedTuple):
    """What the mix of covers came to."""

    value: float
    share: Floats  # (N,) of each cover
    price: Floats  # (C,)


def fleet(programme: Programme, prices: Prices | None = None) -> tuple[Solution, Prices]:
    """A plan with its bound, and the prices from which a changed problem starts; raises FleetTooSmall."""
    weights, _ = objectives(programme)
    price = _first_prices(programme, weights) if prices is None else _known_prices(programme, prices)
    price, rent = _feasible(programme, weights, price)
    bound, found = _bought(programme, weights, price, rent)
    pool = [found]
    for cell in range(len(programme.cells)):
        aside = price.copy()
        aside[cell] *= 1.0 - _APART
        pool.append(_bought(programme, weights, aside, rent)[1])
    known = _distinct(programme, np.stack(pool))
    best = price
    for number in range(ROUNDS_MOST):
        known = known if number == 0 else _distinct(programme, found[None, :], known)
        master = _master(programme, weights, known)
        price, rent = _feasible(programme, weights, master.price)
        low, found = _bought(programme, weights, price, rent)
        if low > bound:
            bound, best = low, price
        if master.value - bound <= CLOSE * abs(bound):
            break
    solution = _settled(programme, weights, known, master, bound)
    proof = Proof(weights.name, value_of(weights, (solution[0], solution[1])), rounded_bound(weights, bound))
    names = [(programme.problem.pools[cell.pool].model, cell.profile) for cell in programme.cells]
    return Solution(*solution, (proof,)), dict(zip(names, best.tolist(), strict=True))


def _known_prices(programme: Programme, prices: Prices) -> Floats:
    pools = programme.problem.pools
    return np.array([prices.get((pools[cell.pool].model, cell.profile), 0.0) for cell in programme.cells], np.float64)


def _first_prices(programme: Programme, weights: Weights) -> Floats:
    """The dual values of the places in the programme without whole numbers."""
    table, low, high = rows(programme, np.ones(len(programme.rate_hz)))
    demands, cells = len(programme.rate_hz), len(programme.cells)
    costs = np.concatenate((weights.option, weights.pattern))
    above, below = table[: demands + cells], table[demands + cells :]
    result = linprog(
        np.concatenate((costs, np.full(below.shape[0], _dear(weights)))),
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


def _dear(weights: Weights) -> float:
    return _LACKING * max(1.0, float(weights.pattern.max(initial=0.0)))


def _feasible(programme: Programme, weights: Weights, price: Floats) -> tuple[Floats, Floats]:
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


def _bought(programme: Programme, weights: Weights, price: Floats, rent: Floats) -> tuple[float, Ints]:
    """The bound at these prices, and every demand's cheapest cover: replicas (O,)."""
    demands = len(programme.rate_hz)
    counts, cost, bound = np.zeros(len(programme.options), np.int64), np.zeros(demands), np.zeros(demands)
    covers(
        weights.option + programme.width * price[programme.cell], programme.throughput_hz, programme.first,
        programme.rate_hz, COVER_NODES_MOST, counts, cost, bound,
    )  # fmt: skip
    limited = np.array([pool.count or 0 for pool in programme.problem.pools], np.float64)
    return float(bound.sum() - rent @ limited), counts


def _distinct(programme: Programme, bought: Ints, known: _Covers | None = None) -> _Covers:
    """Covers (B, O) of every demand, each once, beside those known."""
    most = int(np.diff(programme.first).max())
    demands = len(programme.rate_hz)
    place = np.arange(len(programme.options)) - programme.first[programme.demand]
    table = np.zeros((bought.shape[0], demands, most + 1), np.int64)
    table[:, :, 0] = np.arange(demands)
    table[:, programme.demand, place + 1] = bought
    every = table.reshape(-1, most + 1)
    if known is not None:
        every = np.concatenate((np.column_stack((known.demand, known.counts)), every))
    # Two covers of one key would only lose one of them, which is no fault.
    _, first = np.unique(every @ _KEYS[: most + 1], return_index=True)
    every = every[first]
    return _Covers(every[:, 1:], every[:, 0])


def _uses(programme: Programme, weights: Weights, known: _Covers) -> tuple[Floats, Floats]:
    """Places (N, C) that each cover takes, and what it costs (N,) beyond its GPUs."""
    use, cost = np.zeros((len(known.demand), len(programme.cells))), np.zeros(len(known.demand))
    count = np.diff(programme.first)[known.demand]
    for place in range(known.counts.shape[1]):
        member = np.flatnonzero(count > place)
        option = programme.first[known.demand[member]] + place
        use[member, programme.cell[option]] += known.counts[member, place] * programme.width[option]
        cost[member] += known.counts[member, place] * weights.option[option]
    return use, cost


def _master(programme: Programme, weights: Weights, known: _Covers) -> _Master:
    use, cost = _uses(programme, weights, known)
    table, _, high = rows(programme, np.ones(len(programme.rate_hz)))
    options, demands, cells = len(programme.options), len(programme.rate_hz), len(programme.cells)
    gpus = table[demands:, options:]  # places, then limited pools
    number = np.arange(len(known.demand))
    chosen = sparse.csc_array((np.ones(len(number)), (known.demand, number)), shape=(demands, len(number)))
    limited = gpus.shape[0] - cells
    blocks = [[-chosen, None], [sparse.csc_array(use.T), -gpus[:cells]]]
    if limited:
        blocks = [[*row, None] for row in blocks] + [[None, gpus[cells:], -sparse.eye_array(limited)]]
    result = linprog(
        np.concatenate((cost, weights.pattern, np.full(limited, _dear(weights)))),
        A_ub=sparse.block_array(blocks, format="csc"),
        b_ub=np.concatenate((-np.ones(demands), np.zeros(cells), high[demands + cells :])),
        method="highs",
    )
    if result.x is None:
        raise SearchExhausted(f"the master programme: {result.message}", "state rates and costs of one scale")
    price = np.maximum(0.0, -result.ineqlin.marginals[demands : demands + cells])
    return _Master(float(result.fun), result.x[: len(number)], price)


def _settled(
    programme: Programme, weights: Weights, known: _Covers, master: _Master, bound: float
) -> tuple[Ints, Ints]:
    """Whole covers for those that the master decided, and one integer programme for the others."""
    demands = len(programme.rate_hz)
    order = np.lexsort((-master.share, known.demand))
    best = order[np.searchsorted(known.demand[order], np.arange(demands))]  # the largest share of each demand
    doubt = 1.0 - master.share[best]
    useful = np.minimum(programme.throughput_hz, programme.rate_hz[programme.demand])
    # Beside those in doubt the smallest: they give way to the others.
    rank = np.lexsort((programme.rate_hz / np.maximum.reduceat(useful, programme.first[:-1]), doubt <= _WHOLE))
    each = (weights.option + programme.width * master.price[programme.cell]) / useful
    cheapest = np.lexsort((each, programme.demand))
    keen = np.zeros(len(each), np.bool_)
    keen[cheapest[np.arange(len(each)) - programme.first[programme.demand] < KEEN_MOST]] = True
    result: tuple[Ints, Ints] | None = None
    lacking: dict[str, int] = {}
    for least, every in _TRIES:
        if every and result is not None:
            break
        loose = np.sort(rank[: min(LOOSE_MOST, max(least, int((doubt > _WHOLE).sum())))])
        replicas = np.zeros(len(programme.options), np.int64)
        for demand in np.setdiff1d(np.arange(demands), loose):
            first, last = programme.first[demand], programme.first[demand + 1]
            replicas[first:last] = known.counts[best[demand], : last - first]
        mine = np.flatnonzero(np.isin(programme.demand, loose) & (keen | every))
        found = _loose(programme, weights, replicas, loose, mine)
        if isinstance(found, dict):
            lacking = found
            continue
        if result is None or value_of(weights, found) < value_of(weights, result):
            result = found
        if value_of(weights, result) <= bound * (1.0 + ENOUGH) or len(loose) == demands:
            break
    if result is None:
        raise FleetTooSmall(lacking, "these are what the search lacks; add them, lower rates, or relax objectives")
    return result


def _loose(
    programme: Programme, weights: Weights, fixed: Ints, loose: Ints, mine: Ints
) -> tuple[Ints, Ints] | dict[str, int]:
    """The least plan in which the loose demands choose among the options `mine`; else the GPUs it lacks."""
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
        result = milp(
            np.concatenate((weights.option[mine], weights.pattern, np.full(len(limited), _dear(weights)))),
            integrality=np.ones(len(columns) + len(limited)),
            bounds=Bounds(0.0, np.inf),
            constraints=LinearConstraint(
                sparse.hstack((table[keep][:, columns], lacking), format="csc"), low[keep], high[keep]
            ),
            options={"mip_rel_gap": LOOSE_CLOSE, "node_limit": LOOSE_NODES_MOST},
        )
        if result.x is None:
            raise SearchExhausted(f"the last services: {result.message}", "plan parts of the fleet apart")
        values = np.rint(result.x).astype(np.int64)
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
