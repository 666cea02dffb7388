"""The least plan of a whole fleet: prices of places, covers of services at those prices, and what is left over.

Owns the search by column generation, and the restart from a plan for a like
problem. Must not know where the programme comes from.

Theory: the master programme mixes the covers found so far at least GPUs; its dual
values are the next prices (prices.py). It has a row for each service and a few for
places, so that its solution mixes covers for no more services than it has other
rows: a few dozen of thousands. All others are settled, and those few are one small
integer programme over all GPUs (settle.py).

A restart keeps the prices, which still make a bound, the options of every service that
did not change, and the cover of every service that still serves its rate at hardly more than
the cheapest; the others are loose. Only if that does not come near the bound, the search
begins anew.

Source: Dantzig and Wolfe, Operations Research 8, 1960; Gilmore and Gomory, 1961.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from eelgrid_controller.partition.errors import FleetTooSmall, SearchExhausted
from eelgrid_controller.partition.exact import Proof, Solution, rounded_bound, value_of
from eelgrid_controller.partition.options import Known, known_of
from eelgrid_controller.partition.prices import (
    Prices,
    bought,
    dear,
    feasible,
    first_prices,
    known_prices,
    named_prices,
)
from eelgrid_controller.partition.programme import EXACT, Programme, Weights, covered, objectives, rows
from eelgrid_controller.partition.settle import Start, Try, settled, smallest_first
from eelgrid_controller.profiles.points import Configuration
from eelgrid_kernels.arrays import Floats, Ints

__all__ = ["Memory", "fleet"]

ROUNDS_MOST = 12
CLOSE = 1e-5  # a master's value this near to the bound ends the search
APART = 0.02  # prices that far below the present ones give the covers that a mix needs
KEPT = 5e-3  # a cover that costs at most that much more than the cheapest is kept in a restart
_RESTART_CLOSE = 5e-5
# The bound of a restart is by the prices of before, up to 3e-4 below what a search anew would prove.
_RESTART_ENOUGH = 1e-3
# Services that a restart lets loose, one try after the other: some of those that changed, most, and more beside them.
_CHANGED_MOST, _BESIDE = 24, (-14, -4, 8, 32)
_WHOLE = 1e-6
_FACTOR = np.int64(6_364_136_223_846_793_005)  # of a hash modulo 2^64: Knuth, MMIX


class Memory(NamedTuple):
    """What a plan knew, from which one for a like problem starts."""

    prices: Prices
    # By service or job: configurations, or the model that a job is on, with the number of replicas.
    covers: Mapping[str, tuple[tuple[Configuration | str, int], ...]]
    known: Known | None = None


class _Covers(NamedTuple):
    """Distinct covers, N of them."""

    counts: Ints  # (N, K) of the demand's options, in their order
    demand: Ints  # (N,)


class _Master(NamedTuple):
    """What the mix of covers came to."""

    value: float
    share: Floats  # (N,) of each cover
    price: Floats  # (C,)


def fleet(programme: Programme, memory: Memory | None = None) -> tuple[Solution, Memory]:
    """A plan with its bound, and what a changed problem starts from; raises FleetTooSmall, SearchExhausted."""
    weights, _ = objectives(programme)
    found = None if memory is None else _restarted(programme, weights, memory)
    bound, price, result = _generated(programme, weights) if found is None else found
    proof = Proof(weights.name, value_of(weights, result), rounded_bound(weights, bound))
    known = known_of(programme.problem, programme.cells, programme.options)
    memory = Memory(named_prices(programme, price), _named_covers(programme, result[0]), known)
    return Solution(*result, (proof,)), memory


def _restarted(
    programme: Programme, weights: Weights, memory: Memory
) -> tuple[float, Floats, tuple[Ints, Ints]] | None:
    """Bound, prices and counts that a few changes make of a plan; None if they are not good enough."""
    price, rent = feasible(programme, weights, known_prices(programme, memory.prices))
    found = bought(programme, weights, price, rent)
    before = _known_covers(programme, memory)
    cost = np.zeros(len(programme.rate_hz))
    np.add.at(cost, programme.demand, before * (weights.option + programme.width * price[programme.cell]))
    serves = covered(programme, before) >= programme.rate_hz * (1.0 - EXACT)
    kept = serves & (cost <= found.least * (1.0 + KEPT))
    replicas = np.where(kept[programme.demand], before, found.replicas)
    order = smallest_first(programme, ~kept)
    try:
        tries = tuple(
            Try(max(4, min(int((~kept).sum()), _CHANGED_MOST) + beside), close=_RESTART_CLOSE) for beside in _BESIDE
        )
        result = settled(programme, weights, Start(replicas, order, price, found.bound), tries)
    except FleetTooSmall:
        return None
    enough = value_of(weights, result) <= found.bound * (1.0 + _RESTART_ENOUGH)
    return (found.bound, price, result) if enough else None


def _generated(programme: Programme, weights: Weights) -> tuple[float, Floats, tuple[Ints, Ints]]:
    """Bound, prices and counts from nothing."""
    price, rent = feasible(programme, weights, first_prices(programme, weights))
    found = bought(programme, weights, price, rent)
    bound, best = found.bound, price
    pool = [found.replicas]
    for cell in range(len(programme.cells)):
        aside = price.copy()
        aside[cell] *= 1.0 - APART
        pool.append(bought(programme, weights, aside, rent).replicas)
    known = _distinct(programme, np.stack(pool))
    for number in range(ROUNDS_MOST):
        known = known if number == 0 else _distinct(programme, found.replicas[None, :], known)
        master = _master(programme, weights, known)
        price, rent = feasible(programme, weights, master.price)
        found = bought(programme, weights, price, rent)
        if found.bound > bound:
            bound, best = found.bound, price
        if master.value - bound <= CLOSE * abs(bound):
            break
    order = np.lexsort((-master.share, known.demand))
    largest = order[np.searchsorted(known.demand[order], np.arange(len(programme.rate_hz)))]
    doubtful = master.share[largest] < 1.0 - _WHOLE
    place = np.arange(len(programme.options)) - programme.first[programme.demand]
    replicas = known.counts[largest[programme.demand], place]
    doubts = int(doubtful.sum())
    tries = (Try(max(16, doubts)), Try(max(48, doubts)), Try(max(48, doubts), every=True))
    start = Start(replicas, smallest_first(programme, doubtful), master.price, bound)
    return bound, best, settled(programme, weights, start, tries)


def _owners(programme: Programme) -> list[str]:
    """The name of each demand."""
    problem = programme.problem
    return [service.name for service in problem.services if service.rate_hz > 0.0] + [job.name for job in problem.jobs]


def _what(programme: Programme, option: int) -> Configuration | str:
    """A replica's configuration, or the model that a job is on."""
    one = programme.options[option]
    if one.point is not None:
        return one.point.configuration
    return programme.problem.pools[programme.cells[one.cell].pool].model


def _named_covers(programme: Programme, replicas: Ints) -> dict[str, tuple[tuple[Configuration | str, int], ...]]:
    owners = _owners(programme)
    found: dict[str, tuple[tuple[Configuration | str, int], ...]] = {}
    for option in replicas.nonzero()[0].tolist():
        owner = owners[programme.options[option].demand]
        found[owner] = (*found.get(owner, ()), (_what(programme, option), int(replicas[option])))
    return found


def _known_covers(programme: Programme, memory: Memory) -> Ints:
    """The replicas (O,) of before, where their options are still there."""
    found = np.zeros(len(programme.options), np.int64)
    for demand, owner in enumerate(_owners(programme)):
        known = memory.covers.get(owner, ())
        for option in range(programme.first[demand], programme.first[demand + 1]) if known else ():
            what = _what(programme, option)
            for other, count in known:
                # To compare configurations takes far longer than to see that they are one.
                if other is what or other == what:
                    found[option] = count
    return found


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
    _, first = np.unique(every @ np.cumprod(np.full(most + 1, _FACTOR)), return_index=True)
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
        np.concatenate((cost, weights.pattern, np.full(limited, dear(weights)))),
        A_ub=sparse.block_array(blocks, format="csc"),
        b_ub=np.concatenate((-np.ones(demands), np.zeros(cells), high[demands + cells :])),
        method="highs",
    )
    if result.x is None:
        raise SearchExhausted(f"the master programme: {result.message}", "state rates and costs of one scale")
    price = np.maximum(0.0, -result.ineqlin.marginals[demands : demands + cells])
    return _Master(float(result.fun), result.x[: len(number)], price)
