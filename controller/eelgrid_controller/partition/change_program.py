"""The integer program of a change, over covers instead of replicas: its bound by column generation, then its best columns.

Owns the program's rows and columns, and the search. Must not know GPUs, instances or how a target comes about.

Theory (Dantzig and Wolfe, Operations Research 8, 1960). The rows are those of repartition.py, but the replicas x of a
demand d are a mix of its minimal covers, of which it takes one:

    x_o = sum over covers j of d of  n_jo l_j,   sum_j l_j = 1

Solutions in whole numbers are the same: a replica more than the rate asks for is of no use. The linear relaxation is much
nearer to them: over replicas, each service may give up the fraction of a replica by which it is above its rate, and take
a fraction of a new one where it is below; over covers it may not.

1. Column generation. The relaxation is solved over some covers, and grows by those that its prices make worth more than
   they cost (`list_cheap_covers`), until there are none. Its value is a bound on every change. The covers of one
   demand that no list mentions cost at least what `within` says, so that the bound holds wherever rounds are cut.
2. Restriction. In a solution cheaper than bound + t, no column has a reduced cost above t. So the program of
   the columns up to t is all that matters if its optimum is within t of the bound; it has about a hundred targets and as
   many covers, and takes the solver some hundredths of a second. If its optimum is further away, it is solved
   once more with more columns. A demand with very many covers so near to the best, because it takes dozens of replicas,
   has its replicas chosen one by one in it.

Source: reduced costs and enumeration as in Baldacci, Christofides and Mingozzi, Mathematical Programming 115, 2008.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.partition.integer_program import (
    RATE_TOLERANCE,
    IntegerProgram,
    demand_throughput,
    objective_weights,
    round_bound_up,
)
from eelgrid_controller.partition.mixed_integer import LinearProgram, LinearResult, solve_mixed_integer
from eelgrid_controller.partition.options import WHOLE
from eelgrid_controller.partition.problem import SearchExhausted
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.min_cost_cover import LEVEL, CoverList, CoverPieces, list_cheap_covers

if TYPE_CHECKING:
    # Imported where it solves: a controller that partitions nothing starts half a second sooner, and 40 MB smaller.
    from scipy import sparse


class TransitionCosts(NamedTuple):
    """What a change costs once, in GPU-seconds, or joules where watts are least; `room` is in GPUs or watts.

    An instance comes or goes in about a second, a model loads in half a minute, a mode takes a reset.
    """

    horizon_s: float = 3600.0
    destroy: float = 1.0
    create: float = 1.0
    start: float = 30.0
    mode: float = 60.0
    room: float = 1e-3  # what a compute slice that is not in use is worth


class TargetColumns(NamedTuple):
    """A column for each class of GPUs and target, T of them."""

    size: Floats  # (K,) GPUs of each class
    kind: Ints  # (T,)
    places: Floats  # (T, C) kept or made
    kept: Floats  # (T, C) kept
    runs: Floats  # (T, O) replicas that could stay
    gpu: Floats  # (T,) what the GPU in use costs; nothing where somebody else is on it
    change: Floats  # (T,) what destroying and modes cost


class ChangeSolution(NamedTuple):
    """GPUs that take each target, replicas of each option that run afterwards, and of these, those that stay."""

    taken: Ints  # (T,)
    replicas: Ints  # (O,)
    held: Ints  # (O,)
    value: float
    bound: float  # what no change costs less than


class _Rows(NamedTuple):
    """M rows, and the columns that are there from the beginning."""

    # (M, ...) targets, then replicas that stay, places that are made, demands that are not served
    table: "sparse.csc_array"
    cost: Floats
    low: Floats  # (M,)
    high: Floats
    option: Floats  # (M, O) what one replica has in each row
    option_cost: Floats  # (O,)
    least: int  # the row of what GPUs, or watts, cost
    demand: int  # the row of the first demand; they are the last rows


class _CoverColumns(NamedTuple):
    """Covers, N of them."""

    demand: Ints  # (N,)
    counts: Ints  # (N, O) replicas


class _Effort(NamedTuple):
    """How far a restricted program goes: columns up to a reduced cost, so many at most, and nodes of the solver."""

    above: float  # of a reduced cost; in the tables below, as a share of the bound
    targets: int
    covers: int
    nodes: int


# Steps of the search for one demand's covers. Five sizes take some hundred.
_STEPS_MOST = 200_000
_ROUNDS_MOST = 40
# Covers of a demand that the relaxation starts with, that a round adds, and that a restricted program has at most.
_SEEDS, _ADDED, _LISTED_MOST = 4, 4, 160
# The second is made if the first leaves a gap, the third if that may be a GPU, the others if those before find no solution.
# On 156 changes of `bench.mig --changes`, the slowest among them, 10 nodes instead of 2 changed none; half as many columns
# again took a third longer, with changes .001 % cheaper.
_EFFORTS = (_Effort(1e-3, 90, 60, 2), _Effort(4e-3, 150, 110, 2))
_NODES_BY_COLUMNS = 2000  # of a small program: so many by its columns
_LARGER_EFFORTS = (_Effort(2e-2, 300, 240, 50), _Effort(np.inf, 600, 480, 100), _Effort(np.inf, 2000, 2000, 500))
_MISSING = 1e3  # the cost of a demand that is not served, in that of the dearest column
_ROUNDING = 1e-9
_TOLERANCE = 1e-7  # HiGHS's, of a row
_CUTS_MOST = 10
_LOOSE = 30  # covers of one demand in a restricted program; with more, its replicas are chosen one by one
_TIGHTER = 1e-5  # ten times what HiGHS may miss a row by
CLOSE = 5e-4  # of the value: a change so near to its bound is good enough
_GAP = 2e-4  # of a restricted program


def solve_change(
    programme: IntegerProgram, columns: TargetColumns, costs: TransitionCosts, least: Callable[[], float]
) -> ChangeSolution:
    """The change of least cost; raises FleetTooSmall, SearchExhausted.

    `least` tells what GPUs, or watts, cost at least, and raises FleetTooSmall if there are too few of them; it takes a
    search of its own, and is asked only where the relaxation does not tell it.
    """
    relaxation = _Relaxation(programme, _build_rows(programme, columns, costs), len(columns.kind))
    first, _ = objective_weights(programme)
    far = 0.5 * costs.horizon_s * float(first.pattern.min())  # half a GPU: a gap above that may be one too many
    known = relaxation.solve_first(columns.gpu, first.option)
    best: ChangeSolution | None = None
    if known is not None:
        known = round_bound_up(first, known)
        relaxation.require(known)
        best = _search(programme, columns, relaxation, far)
        if best is not None and best.value - best.bound <= max(far, CLOSE * abs(best.value)):
            return best
    try:
        exact = least()
    except SearchExhausted:
        if best is not None:
            return best
        raise
    if known is None or exact > known * (1.0 + _ROUNDING):
        relaxation.require(exact)
        best = _search(programme, columns, relaxation, far, best)
    if best is None:
        raise SearchExhausted(f"no change among {_LARGER_EFFORTS[-1].targets} targets", "let fewer GPUs change at once")
    return best


def _search(
    programme: IntegerProgram,
    columns: TargetColumns,
    relaxation: "_Relaxation",
    far: float,
    best: ChangeSolution | None = None,
) -> ChangeSolution | None:
    """The best solution of the restricted programs, or what is known to be as good; None if there is none.

    A gap above `far` is worth one more program.
    """
    result, bound = relaxation.solve()
    for number, effort in enumerate((*_EFFORTS, *_LARGER_EFFORTS)):
        once_more = number == len(_EFFORTS) and best is not None and best.value - bound > far
        if best is not None and number >= len(_EFFORTS) and not once_more:
            break
        # Nothing that a better solution has costs more than the gap.
        limits = effort._replace(above=effort.above * abs(bound) if best is None else best.value - bound)
        restriction = _restrict(programme, relaxation, result, limits, best)
        found, proven = _solve_restricted(programme, columns, relaxation.rows, restriction)
        if found is not None and (best is None or found.value < best.value):
            best = found
        enough = max(CLOSE * abs(bound), restriction.complete if proven else 0.0)
        if best is not None and best.value - bound <= enough:
            break
    return None if best is None else best._replace(bound=bound)


def _build_rows(programme: IntegerProgram, columns: TargetColumns, costs: TransitionCosts) -> _Rows:
    from scipy import sparse

    first, _ = objective_weights(programme)
    options, cells, demands = len(programme.options), len(programme.cells), len(programme.rate_hz)
    stay = np.flatnonzero(columns.runs.any(axis=0))
    use = np.zeros((cells, options))
    use[programme.cell, np.arange(options)] = programme.width
    one = np.eye(options)[stay]
    classes = sparse.csc_array(
        (np.ones(len(columns.kind)), (columns.kind, np.arange(len(columns.kind)))),
        shape=(len(columns.size), len(columns.kind)),
    )
    minus = -sparse.eye_array(len(stay))
    table = sparse.block_array(
        [
            [sparse.csc_array(columns.places.T), None, None, None],
            [sparse.csc_array(columns.runs[:, stay].T), minus, None, None],
            [None, minus, None, None],
            [sparse.csc_array(columns.kept.T), None, sparse.eye_array(cells), None],
            [sparse.csc_array(columns.gpu[None, :]), None, None, None],
            [classes, None, None, None],
            [None, None, None, sparse.eye_array(demands)],
        ],
        format="csc",
    )
    nothing = np.zeros(2 * cells + 2 * len(stay) + 1)
    low = np.concatenate((nothing, columns.size, np.ones(demands)))
    high = np.concatenate((np.full(len(nothing), np.inf), columns.size, np.ones(demands)))
    slices = np.array([programme.cells[cell].slices for cell in programme.cell], np.float64) * programme.width
    option = np.concatenate(
        (-use, np.zeros_like(one), one, -use, first.option[None, :], np.zeros((len(columns.size) + demands, options)))
    )
    cost = (
        costs.horizon_s * columns.gpu + columns.change,
        np.full(len(stay), -costs.start),
        np.array([0.0 if cell.profile == WHOLE else costs.create for cell in programme.cells]),
    )
    option_cost = costs.horizon_s * (first.option + costs.room * slices) + costs.start
    missing = np.full(demands, _missing_cost(programme, np.concatenate(cost), option_cost))
    return _Rows(
        table, np.concatenate((*cost, missing)), low, high, option, option_cost, len(nothing) - 1, len(low) - demands
    )


def _missing_cost(programme: IntegerProgram, cost: Floats, option_cost: Floats) -> float:
    """More than serving a demand ever costs."""
    most = float((option_cost * _pieces(programme)).max())
    return _MISSING * max(1.0, float(np.abs(cost).max()), most)


def _pieces(programme: IntegerProgram) -> Floats:
    """Replicas of each option (O,) that serve the whole rate alone."""
    return np.ceil(programme.rate_hz[programme.demand] / programme.throughput_hz)


class _Relaxation:
    """The linear program over covers, which grows by those that its prices ask for."""

    def __init__(self, programme: IntegerProgram, rows: _Rows, targets: int) -> None:
        self._programme = programme
        self.rows, self.targets = rows, targets
        self._program = LinearProgram(rows.cost, rows.table, rows.low, rows.high)
        self._covers: list[_CoverColumns] = []
        self._add(_seed_covers(programme, rows))

    def solve_first(self, cost: Floats, option_cost: Floats) -> float | None:
        """What GPUs, or watts, cost at least, whatever the change costs; None if not even parts of GPUs suffice.

        cost (T,) is that of the targets.
        """
        rows, demands = self.rows, len(self._programme.rate_hz)
        costs = np.zeros(len(rows.cost))
        costs[: len(cost)] = cost
        costs[-demands:] = _missing_cost(self._programme, cost, option_cost)
        self._set_costs(rows._replace(cost=costs, option_cost=option_cost))
        found, bound = self.solve()
        self._set_costs(rows)
        missing = found.values[len(rows.cost) - demands : len(rows.cost)]
        return bound if missing.max() < _TOLERANCE else None

    def require(self, least: float) -> None:
        """From now on GPUs, or watts, cost at least that much."""
        low = self.rows.low.copy()
        low[self.rows.least] = least * (1.0 - RATE_TOLERANCE)
        self._program.set_low(self.rows.least, float(low[self.rows.least]))
        self.rows = self.rows._replace(low=low)

    def solve(self) -> tuple[LinearResult, float]:
        """The optimum, and a bound on every solution in whole numbers."""
        bound, found = -np.inf, self._solve_known()
        for _ in range(_ROUNDS_MOST):
            added, missed = _price_covers(self._programme, self.rows, found)
            bound = max(bound, found.value + missed)
            if len(added.demand) == 0 or found.value - bound <= _ROUNDING * abs(found.value):
                break
            self._add(added)
            found = self._solve_known()
        return found, bound

    def find_used_covers(self, result: LinearResult) -> _CoverColumns:
        """The covers that the optimum uses."""
        known = _join_covers(*self._covers)
        used = result.values[len(self.rows.cost) :] > _ROUNDING
        return _CoverColumns(known.demand[used], known.counts[used])

    def _solve_known(self) -> LinearResult:
        found = self._program.solve()
        if found is None:
            raise SearchExhausted("a change's relaxation has no optimum", "state rates and costs of one scale")
        return found

    def _add(self, covers: _CoverColumns) -> None:
        self._covers.append(covers)
        self._program.add_columns(*_cover_columns(self.rows, covers))

    def _set_costs(self, rows: _Rows) -> None:
        self.rows = rows
        covers = [one.counts @ rows.option_cost for one in self._covers]
        self._program.set_costs(np.concatenate((rows.cost, *covers)))


def _join_covers(*parts: _CoverColumns) -> _CoverColumns:
    return _CoverColumns(
        np.concatenate([one.demand for one in parts]), np.concatenate([one.counts for one in parts], axis=0)
    )


def _split_replicas(programme: IntegerProgram, replicas: Ints) -> _CoverColumns:
    """The cover of each demand."""
    every = np.arange(len(programme.rate_hz))
    return _CoverColumns(every, np.where(programme.demand == every[:, None], replicas, 0))


def _cover_columns(rows: _Rows, covers: _CoverColumns) -> "tuple[Floats, sparse.csc_array]":
    """Cost (N,) and entries (M, N) of covers."""
    from scipy import sparse

    entries = rows.option @ covers.counts.T.astype(np.float64)
    entries[rows.demand + covers.demand, np.arange(len(covers.demand))] = 1.0
    return covers.counts @ rows.option_cost, sparse.csc_array(entries)


def _seed_covers(programme: IntegerProgram, rows: _Rows) -> _CoverColumns:
    """For each demand the cheapest covers at equal prices of slices."""
    first, _ = objective_weights(programme)
    gpu = {int(pool): float(first.pattern[at]) for at, pool in enumerate(programme.pool)}
    share = np.array([gpu[cell.pool] * cell.slices for cell in programme.cells])
    price = rows.option_cost + programme.width * share[programme.cell]
    return _list_covers(programme, price, np.full(len(programme.rate_hz), np.inf), _SEEDS)[0]


def _list_covers(
    programme: IntegerProgram, price: Floats, budget: Floats, most: int
) -> tuple[_CoverColumns, Floats, Floats]:
    """The cheapest covers by prices of replicas (O,) within budgets (D,), their costs, and up to where that is all (D,)."""
    demands = len(programme.rate_hz)
    widest = int(np.diff(programme.first).max())
    covers = CoverList(
        np.zeros((demands, most, widest), np.int64),
        np.zeros((demands, most)),
        np.zeros(demands, np.int64),
        budget.copy(),
    )
    pieces = CoverPieces(np.maximum(price, 0.0), programme.throughput_hz, programme.first)
    list_cheap_covers(pieces, programme.rate_hz, _STEPS_MOST, np.zeros(widest, LEVEL), covers)
    demand, at = np.nonzero(np.arange(most) < covers.number[:, None])
    counts = np.zeros((len(demand), len(programme.options)), np.int64)
    place = np.arange(len(programme.options)) - programme.first[programme.demand]
    mine = programme.demand == demand[:, None]
    counts[mine] = covers.counts[demand[:, None], at[:, None], place[None, :]][mine]
    return _CoverColumns(demand, counts), covers.cost[demand, at], covers.within


def _read_prices(rows: _Rows, found: LinearResult) -> tuple[Floats, Floats, float]:
    """What a replica of each option costs (O,) and a demand pays (D,), and a difference of them that is rounding."""
    value = found.price[rows.demand :]
    price = rows.option_cost - rows.option.T @ found.price
    return price, value, _ROUNDING * max(1.0, float(np.abs(value).max()))


def _price_covers(programme: IntegerProgram, rows: _Rows, found: LinearResult) -> tuple[_CoverColumns, float]:
    """Covers of a reduced cost below 0, and the sum over demands of the least reduced cost, 0 at the most."""
    price, value, tiny = _read_prices(rows, found)
    covers, cost, within = _list_covers(programme, price, value - tiny, _ADDED)
    least = np.minimum(within - value, 0.0)
    np.minimum.at(least, covers.demand, cost - value[covers.demand])
    return covers, float(least.sum()) - _overpriced(programme, price)


def _overpriced(programme: IntegerProgram, price: Floats) -> float:
    """What covers cost less at most, all together, than `_list_covers` says, where a price below nothing is nothing."""
    return float((np.maximum(-price, 0.0) * _pieces(programme)).sum())


def _rank_covers(
    programme: IntegerProgram, rows: _Rows, result: LinearResult, used: _CoverColumns, limits: tuple[float, int]
) -> tuple[_CoverColumns, float]:
    """The covers in use, then those of least reduced cost, up to the first limit, so many at most; up to where that is all."""
    above, most = limits
    price, value, tiny = _read_prices(rows, result)
    covers, _, within = _list_covers(programme, price, value + above + tiny, min(most, _LISTED_MOST))
    demand = np.concatenate((used.demand, covers.demand))
    counts, first = np.unique(np.concatenate((used.counts, covers.counts)), axis=0, return_index=True)
    reduced = counts @ price - value[demand[first]]
    order = np.lexsort((first, reduced, first >= len(used.demand)))
    complete = float(min((within - value).min(), reduced[order[most:]].min(initial=np.inf)))
    kept = np.sort(order[:most])
    return _CoverColumns(demand[first[kept]], counts[kept]), complete - _overpriced(programme, price)


def _rank_targets(reduced: Floats, used: NDArray[np.bool_], above: float, most: int) -> tuple[Ints, float]:
    """Likewise the targets, by their reduced costs (T,)."""
    order = np.lexsort((reduced, ~used))
    kept = order[:most][reduced[order[:most]] <= above]
    complete = float(reduced[order[most:]].min(initial=above))
    return np.sort(kept), complete


class _Restriction(NamedTuple):
    """Targets and covers of a restricted program, the gap within which no others matter, and nodes of the solver."""

    targets: Ints
    covers: _CoverColumns
    loose: Ints  # demands of too many covers, whose replicas are chosen one by one
    complete: float
    nodes: int


def _restrict(
    programme: IntegerProgram,
    relaxation: _Relaxation,
    result: LinearResult,
    effort: _Effort,
    best: ChangeSolution | None,
) -> _Restriction:
    """The columns that the relaxation or the best solution uses, then those of least reduced cost."""
    targets = relaxation.targets
    used, covers = result.values[:targets] > _ROUNDING, relaxation.find_used_covers(result)
    if best is not None:
        used |= best.taken > 0
        covers = _join_covers(covers, _split_replicas(programme, best.replicas))
    keep, complete = _rank_targets(result.reduced_cost[:targets], used, effort.above, effort.targets)
    covers, others = _rank_covers(programme, relaxation.rows, result, covers, (effort.above, effort.covers))
    numbers = np.bincount(covers.demand, minlength=len(programme.rate_hz))
    loose = np.flatnonzero(numbers > _LOOSE)
    settled = ~np.isin(covers.demand, loose)
    covers = _CoverColumns(covers.demand[settled], covers.counts[settled])
    return _Restriction(keep, covers, loose, min(complete, others), effort.nodes)


def _option_columns(
    programme: IntegerProgram, rows: _Rows, loose: Ints, asked: float
) -> "tuple[Ints, Floats, sparse.csc_array, Floats, Floats]":
    """Options of loose demands, their costs and entries, and the rows' limits, of which demands' are rates now."""
    from scipy import sparse

    options = np.flatnonzero(np.isin(programme.demand, loose))
    entries = rows.option[:, options].copy()
    share = programme.throughput_hz[options] / programme.rate_hz[programme.demand[options]]
    entries[rows.demand + programme.demand[options], np.arange(len(options))] = np.minimum(share, 1.0)
    low, high = rows.low.copy(), rows.high.copy()
    low[rows.demand + loose], high[rows.demand + loose] = asked, np.inf
    return options, rows.option_cost[options], sparse.csc_array(entries), low, high


def _solve_restricted(
    programme: IntegerProgram,
    columns: TargetColumns,
    rows: _Rows,
    restriction: _Restriction,
) -> tuple[ChangeSolution | None, bool]:
    """The best solution of these columns, and whether the solver has nearly proven it; None where there is none."""
    from scipy import sparse

    keep, covers = restriction.targets, restriction.covers
    targets, demands = len(columns.kind), len(programme.rate_hz)
    others = rows.table.shape[1] - targets - demands
    chosen = np.concatenate((keep, np.arange(targets, targets + others)))
    cover_cost, cover_table = _cover_columns(rows, covers)
    for asked in (1.0, 1.0 + _TIGHTER):
        options, option_cost, option_table, low, high = _option_columns(programme, rows, restriction.loose, asked)
        cost = np.concatenate((rows.cost[chosen], cover_cost, option_cost))
        whole = np.ones(len(cost), np.bool_)
        whole[len(keep) : len(chosen)] = False
        found = solve_mixed_integer(
            cost,
            sparse.hstack((rows.table[:, chosen], cover_table, option_table), format="csc"),
            low,
            high,
            whole=whole,
            gap=_GAP,
            nodes_most=max(restriction.nodes, _NODES_BY_COLUMNS // len(cost)),
            cuts_most=_CUTS_MOST,
        )
        if found.values is None:
            return None, False
        values = np.where(whole, np.rint(found.values), found.values)
        taken = np.zeros(targets, np.int64)
        taken[keep] = values[: len(keep)].astype(np.int64)
        replicas = values[len(chosen) : len(chosen) + len(cover_cost)].astype(np.int64) @ covers.counts
        replicas[options] += values[len(chosen) + len(cover_cost) :].astype(np.int64)
        if (demand_throughput(programme, replicas) >= programme.rate_hz * (1.0 - RATE_TOLERANCE)).all():
            break
    else:
        return None, False
    held = np.minimum(replicas, np.rint(taken @ columns.runs).astype(np.int64))
    value = float(cost @ values)
    return ChangeSolution(taken, replicas, held, value, -np.inf), value - found.bound <= CLOSE * abs(value)
