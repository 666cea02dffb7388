"""Fleet-wide partition plans by column generation: dual prices of places, covers and rounding.

Prices (Dantzig and Wolfe, Operations Research 8, 1960). Give every place a price
p_c >= 0 such that no pattern is worth more than its GPU costs; where GPUs are
limited, the excess is the rent m of one. Each service alone then buys its cheapest
cover (an exact search in the kernel), and

    sum over services of the cheapest cover  -  sum over limited pools of m N

is a lower bound on every integer plan, whatever the prices. It is tighter than the
linear relaxation, since the covers are integral.

Search. The master program mixes the covers found so far at the fewest GPUs; its dual
values are the next prices. It has one row per service and a few for places, so that its
solution mixes covers for a few dozen of thousands of services. All others are settled.

Rounding. Demands whose cover is settled take places; the loose ones choose among their
cheapest options together with the patterns of all GPUs, in one small integer program. Counts of
patterns are in the hundreds and the relaxation is near, so integers are searched in a box
around it (0.3 s where the whole range takes 4, with gaps no larger), and in the whole range
only if the box has no solution. After proximity search: Fischetti and Monaci, Journal of
Heuristics 20, 2014.

Warm start. A restart keeps the prices, which still give a bound, the options of every service
that did not change, and each cover that still serves its rate at hardly more than the cheapest;
the others are loose. If that does not come near the bound, the search starts from scratch.

Sources: Dantzig and Wolfe, 1960; Gilmore and Gomory, 1961.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.partition.integer_program import (
    RATE_TOLERANCE,
    IntegerProgram,
    ObjectiveWeights,
    OptimalityProof,
    ProgramSolution,
    constraint_rows,
    demand_throughput,
    missing_gpu_columns,
    objective_value,
    objective_weights,
    round_bound_up,
)
from eelgrid_controller.partition.mixed_integer import LinearProgram, solve_mixed_integer
from eelgrid_controller.partition.options import KnownOptions, remember_options
from eelgrid_controller.partition.problem import FleetTooSmall, SearchExhausted
from eelgrid_controller.profiles.points import Configuration
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.min_cost_cover import CoverPieces, Covers, find_cheapest_covers

if TYPE_CHECKING:
    from scipy import sparse

# Of a place, by model and profile, in the unit of the first objective.
Prices = Mapping[tuple[str, str], float]

# Steps of one service's cover. Five sizes take about a hundred, the most seen is 3,000.
COVER_NODES_MOST = 20_000
_LACKING = 1e3  # the cost of a GPU that is not there, in the dearest GPU that is


class PricedCovers(NamedTuple):
    """Every demand's cheapest cover at some prices, and the bound that they make together."""

    bound: float
    replicas: Ints  # (O,)
    least: Floats  # (D,) what no cover of a demand costs less than


def name_prices(programme: IntegerProgram, price: Floats) -> Prices:
    """Prices (C,) by model and profile."""
    names = [(programme.problem.pools[cell.pool].model, cell.profile) for cell in programme.cells]
    return dict(zip(names, price.tolist(), strict=True))


def prices_to_array(programme: IntegerProgram, prices: Prices) -> Floats:
    """The same as (C,); a place without a price is free."""
    pools = programme.problem.pools
    return np.array([prices.get((pools[cell.pool].model, cell.profile), 0.0) for cell in programme.cells], np.float64)


def initial_prices(programme: IntegerProgram, weights: ObjectiveWeights) -> Floats:
    """The dual values of the places in the programme without whole numbers."""
    from scipy import sparse

    table, low, high = constraint_rows(programme, np.ones(len(programme.rate_hz)))
    places = len(programme.rate_hz) + np.arange(len(programme.cells))
    lacking = missing_gpu_columns(table.shape[0], places[-1] + 1)
    cost = np.concatenate((weights.option, weights.pattern, np.full(lacking.shape[1], missing_gpu_cost(weights))))
    found = LinearProgram(cost, sparse.hstack((table, lacking), format="csc"), low, high).solve()
    if found is None:
        raise SearchExhausted("the linear programme has no optimum", "state rates and costs of one scale")
    return np.maximum(0.0, found.price[places])


def missing_gpu_cost(weights: ObjectiveWeights) -> float:
    """What a GPU costs that is not there: far more than any that is."""
    return _LACKING * max(1.0, float(weights.pattern.max(initial=0.0)))


def make_feasible(programme: IntegerProgram, weights: ObjectiveWeights, price: Floats) -> tuple[Floats, Floats]:
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


def price_covers(programme: IntegerProgram, weights: ObjectiveWeights, price: Floats, rent: Floats) -> PricedCovers:
    """What every demand buys at these prices (C,) and rents (P,)."""
    demands = len(programme.rate_hz)
    covers = Covers(np.zeros(len(programme.options), np.int64), np.zeros(demands), np.zeros(demands))
    asked = weights.option + programme.width * price[programme.cell]
    pieces = CoverPieces(asked, programme.throughput_hz, programme.first)
    find_cheapest_covers(pieces, programme.rate_hz, COVER_NODES_MOST, covers)
    limited = np.array([pool.count or 0 for pool in programme.problem.pools], np.float64)
    return PricedCovers(float(covers.bound.sum() - rent @ limited), covers.counts, covers.bound)


LOOSE_MOST = 128
LOOSE_NODES_MOST = 10
BOX_HALF_WIDTH = 1.0
CHEAPEST_OPTIONS_MOST = 5  # options of a demand among which it chooses
ENOUGH = 5e-4  # above the bound, and no more demands are let loose


class SettlementAttempt(NamedTuple):
    """How many demands are loose at least, and whether with all their options: that only to have any plan."""

    least: int
    every: bool = False
    close: float = 5e-5  # half a GPU in ten thousand ends it


class SettlementStart(NamedTuple):
    """What the last programme starts from."""

    replicas: Ints  # (O,) covers of all
    order: Ints  # (D,) in which demands are let loose
    price: Floats  # (C,) by which they choose options
    bound: float  # that is to be reached


def cheapest_options(
    programme: IntegerProgram, weights: ObjectiveWeights, price: Floats, most: int = CHEAPEST_OPTIONS_MOST
) -> NDArray[np.bool_]:
    """Which options (O,) are among the cheapest of their demand by what a request costs at these prices (C,)."""
    useful = np.minimum(programme.throughput_hz, programme.rate_hz[programme.demand])
    each = (weights.option + programme.width * price[programme.cell]) / useful
    order = np.lexsort((each, programme.demand))
    found = np.zeros(len(each), np.bool_)
    found[order[np.arange(len(each)) - programme.first[programme.demand] < most]] = True
    return found


def order_smallest_first(programme: IntegerProgram, doubtful: NDArray[np.bool_]) -> Ints:
    """Demands (D,) in the order in which they are let loose: those in doubt, then those of fewest replicas."""
    useful = np.minimum(programme.throughput_hz, programme.rate_hz[programme.demand])
    return np.lexsort((programme.rate_hz / np.maximum.reduceat(useful, programme.first[:-1]), ~doubtful))


def settle_demands(
    programme: IntegerProgram, weights: ObjectiveWeights, start: SettlementStart, tries: Sequence[SettlementAttempt]
) -> tuple[Ints, Ints]:
    """Replicas (O,) and patterns (Q,): those given, but for the first demands in order; raises FleetTooSmall.

    The first try that comes near enough to the bound counts, else the best.
    """
    best = cheapest_options(programme, weights, start.price)
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
        if result is None or objective_value(weights, found) < objective_value(weights, result):
            result = found
        if objective_value(weights, result) <= start.bound * (1.0 + ENOUGH) or len(loose) == len(programme.rate_hz):
            break
    if result is None:
        raise FleetTooSmall(lacking, "these are what the search lacks; add them, lower rates, or relax objectives")
    return result


def _least(cost: Floats, table: "sparse.csc_array", low: Floats, high: Floats, *, lacking: int, close: float) -> Ints:
    """Whole numbers of least cost; the last `lacking` say what is short. Raises SearchExhausted."""
    relaxed = LinearProgram(cost, table, low, high).solve()
    if relaxed is not None:
        values, first = relaxed.values, len(cost) - lacking
        if values[first:].any():
            # Not even parts of GPUs suffice, so whole ones do not.
            return np.concatenate((np.zeros(first, np.int64), np.ceil(values[first:]).astype(np.int64)))
        near = solve_mixed_integer(
            cost,
            table,
            low,
            high,
            least=np.maximum(0.0, np.floor(values) - BOX_HALF_WIDTH),
            most=np.ceil(values) + BOX_HALF_WIDTH,
            gap=close,
            nodes_most=LOOSE_NODES_MOST,
        ).values
        if near is not None and not np.rint(near[first:]).any():
            return np.rint(near).astype(np.int64)
    found = solve_mixed_integer(cost, table, low, high, gap=close, nodes_most=LOOSE_NODES_MOST).values
    if found is None:
        raise SearchExhausted("the last services: no solution was found", "plan parts of the fleet apart")
    return np.rint(found).astype(np.int64)


def _loose(
    programme: IntegerProgram, weights: ObjectiveWeights, fixed: Ints, free: tuple[Ints, Ints], close: float
) -> tuple[Ints, Ints] | dict[str, int]:
    """The least plan in which some demands choose among some options, both given; else the GPUs it lacks."""
    from scipy import sparse

    loose, mine = free
    options, demands, cells = len(programme.options), len(programme.rate_hz), len(programme.cells)
    used = np.bincount(programme.cell, fixed * programme.width, cells)
    limited = [number for number, pool in enumerate(programme.problem.pools) if pool.count is not None]
    asked = np.ones(demands)
    while True:
        table, low, high = constraint_rows(programme, asked)
        low[demands : demands + cells] += used
        keep = np.concatenate((loose, np.arange(demands, table.shape[0])))
        columns = np.concatenate((mine, np.arange(options, table.shape[1])))
        lacking = missing_gpu_columns(len(keep), len(loose) + cells)
        values = _least(
            np.concatenate((weights.option[mine], weights.pattern, np.full(len(limited), missing_gpu_cost(weights)))),
            sparse.hstack((table[keep][:, columns], lacking), format="csc"),
            low[keep],
            high[keep],
            lacking=len(limited),
            close=close,
        )
        short = values[len(columns) :]
        if short.any():
            models = [programme.problem.pools[number].model for number in limited]
            return {model: int(count) for model, count in zip(models, short, strict=True) if count}
        replicas = fixed.copy()
        replicas[mine] = values[: len(mine)]
        missed = demand_throughput(programme, replicas) < programme.rate_hz * (1.0 - RATE_TOLERANCE)
        if not missed.any():
            return replicas, values[len(mine) : len(columns)]
        if asked.max() > 1.0 + 4e-5:
            raise SearchExhausted("rates are missed by the solver's rounding", "state them with fewer digits")
        asked[missed] += 1e-5


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


class WarmStart(NamedTuple):
    """What a plan knew, from which one for a like problem starts."""

    prices: Prices
    # By service or job: configurations, or the model that a job is on, with the number of replicas.
    covers: Mapping[str, tuple[tuple[Configuration | str, int], ...]]
    known: KnownOptions | None = None


class _Covers(NamedTuple):
    """Distinct covers, N of them."""

    counts: Ints  # (N, K) of the demand's options, in their order
    demand: Ints  # (N,)


class _Master(NamedTuple):
    """What the mix of covers came to."""

    value: float
    share: Floats  # (N,) of each cover
    price: Floats  # (C,)


def solve_fleet(programme: IntegerProgram, memory: WarmStart | None = None) -> tuple[ProgramSolution, WarmStart]:
    """A plan with its bound, and what a changed problem starts from; raises FleetTooSmall, SearchExhausted."""
    weights, _ = objective_weights(programme)
    found = None if memory is None else _resolve_warm(programme, weights, memory)
    bound, price, result = _solve_cold(programme, weights) if found is None else found
    proof = OptimalityProof(weights.name, objective_value(weights, result), round_bound_up(weights, bound))
    known = remember_options(programme.problem, programme.cells, programme.options)
    memory = WarmStart(name_prices(programme, price), _named_covers(programme, result[0]), known)
    return ProgramSolution(*result, (proof,)), memory


def _resolve_warm(
    programme: IntegerProgram, weights: ObjectiveWeights, memory: WarmStart
) -> tuple[float, Floats, tuple[Ints, Ints]] | None:
    """Bound, prices and counts that a few changes make of a plan; None if they are not good enough."""
    price, rent = make_feasible(programme, weights, prices_to_array(programme, memory.prices))
    found = price_covers(programme, weights, price, rent)
    before = _known_covers(programme, memory)
    cost = np.zeros(len(programme.rate_hz))
    np.add.at(cost, programme.demand, before * (weights.option + programme.width * price[programme.cell]))
    serves = demand_throughput(programme, before) >= programme.rate_hz * (1.0 - RATE_TOLERANCE)
    kept = serves & (cost <= found.least * (1.0 + KEPT))
    replicas = np.where(kept[programme.demand], before, found.replicas)
    order = order_smallest_first(programme, ~kept)
    try:
        tries = tuple(
            SettlementAttempt(max(4, min(int((~kept).sum()), _CHANGED_MOST) + beside), close=_RESTART_CLOSE)
            for beside in _BESIDE
        )
        result = settle_demands(programme, weights, SettlementStart(replicas, order, price, found.bound), tries)
    except FleetTooSmall:
        return None
    enough = objective_value(weights, result) <= found.bound * (1.0 + _RESTART_ENOUGH)
    return (found.bound, price, result) if enough else None


def _solve_cold(programme: IntegerProgram, weights: ObjectiveWeights) -> tuple[float, Floats, tuple[Ints, Ints]]:
    """Bound, prices and counts from nothing."""
    price, rent = make_feasible(programme, weights, initial_prices(programme, weights))
    found = price_covers(programme, weights, price, rent)
    bound, best = found.bound, price
    pool = [found.replicas]
    for cell in range(len(programme.cells)):
        aside = price.copy()
        aside[cell] *= 1.0 - APART
        pool.append(price_covers(programme, weights, aside, rent).replicas)
    known = _distinct(programme, np.stack(pool))
    for number in range(ROUNDS_MOST):
        known = known if number == 0 else _distinct(programme, found.replicas[None, :], known)
        master = _master(programme, weights, known)
        price, rent = make_feasible(programme, weights, master.price)
        found = price_covers(programme, weights, price, rent)
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
    tries = (
        SettlementAttempt(max(16, doubts)),
        SettlementAttempt(max(48, doubts)),
        SettlementAttempt(max(48, doubts), every=True),
    )
    start = SettlementStart(replicas, order_smallest_first(programme, doubtful), master.price, bound)
    return bound, best, settle_demands(programme, weights, start, tries)


def _owners(programme: IntegerProgram) -> list[str]:
    """The name of each demand."""
    problem = programme.problem
    return [service.name for service in problem.services if service.rate_hz > 0.0] + [job.name for job in problem.jobs]


def _what(programme: IntegerProgram, option: int) -> Configuration | str:
    """A replica's configuration, or the model that a job is on."""
    one = programme.options[option]
    if one.point is not None:
        return one.point.configuration
    return programme.problem.pools[programme.cells[one.cell].pool].model


def _named_covers(programme: IntegerProgram, replicas: Ints) -> dict[str, tuple[tuple[Configuration | str, int], ...]]:
    owners = _owners(programme)
    found: dict[str, tuple[tuple[Configuration | str, int], ...]] = {}
    for option in replicas.nonzero()[0].tolist():
        owner = owners[programme.options[option].demand]
        found[owner] = (*found.get(owner, ()), (_what(programme, option), int(replicas[option])))
    return found


def _known_covers(programme: IntegerProgram, memory: WarmStart) -> Ints:
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


def _distinct(programme: IntegerProgram, bought: Ints, known: _Covers | None = None) -> _Covers:
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


def _uses(programme: IntegerProgram, weights: ObjectiveWeights, known: _Covers) -> tuple[Floats, Floats]:
    """Places (N, C) that each cover takes, and what it costs (N,) beyond its GPUs."""
    use, cost = np.zeros((len(known.demand), len(programme.cells))), np.zeros(len(known.demand))
    count = np.diff(programme.first)[known.demand]
    for place in range(known.counts.shape[1]):
        member = np.flatnonzero(count > place)
        option = programme.first[known.demand[member]] + place
        use[member, programme.cell[option]] += known.counts[member, place] * programme.width[option]
        cost[member] += known.counts[member, place] * weights.option[option]
    return use, cost


def _master(programme: IntegerProgram, weights: ObjectiveWeights, known: _Covers) -> _Master:
    from scipy import sparse

    use, cost = _uses(programme, weights, known)
    table, low, high = constraint_rows(programme, np.ones(len(programme.rate_hz)))
    options, demands, number = len(programme.options), len(programme.rate_hz), np.arange(len(known.demand))
    places = demands + np.arange(len(programme.cells))
    chosen = sparse.csc_array((np.ones(len(number)), (known.demand, number)), shape=(demands, len(number)))
    limited = sparse.csc_array((table.shape[0] - places[-1] - 1, len(number)))
    covers = sparse.vstack((chosen, sparse.csc_array(-use.T), limited))
    lacking = missing_gpu_columns(table.shape[0], places[-1] + 1)
    found = LinearProgram(
        np.concatenate((cost, weights.pattern, np.full(lacking.shape[1], missing_gpu_cost(weights)))),
        sparse.hstack((covers, table[:, options:], lacking), format="csc"),
        low,
        high,
    ).solve()
    if found is None:
        raise SearchExhausted("the master programme has no optimum", "state rates and costs of one scale")
    return _Master(found.value, found.values[: len(number)], np.maximum(0.0, found.price[places]))
