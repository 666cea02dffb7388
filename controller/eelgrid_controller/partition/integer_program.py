"""The partition problem as an integer program, and its solution by branch and cut with a proven bound.

Theory, the pattern formulation. x_o replicas of option o (of demand d(o), on
places of cell c(o), w_o of them), y_q GPUs cut by pattern q, which holds a_qc
places of cell c:

    sum of t_o x_o over the options of d  >= r_d     every rate
    sum_q a_qc y_q - sum of w_o x_o over the options on c  >= 0     places
    sum of y_q over the patterns of pool p  <= N_p     available GPUs
    least  sum_q cost_q y_q,  then slices in use (or watts, then cost)

A training job is a demand of 1 whose options have throughput 1 and take whole
GPUs. A replica that alone exceeds the whole rate counts as the rate: the integer
solutions are the same and the linear relaxation is tighter.

The first objective is minimised, then the second among the solutions that keep the
first's value. HiGHS returns a lower bound; where costs are whole numbers it is rounded
up, and if it equals the value it is a proof. The solver's rows hold to about 1e-6, so
every rate is checked again on the integer solution, and a row that relied on the tolerance
is tightened by 1e-5. The search is limited by nodes, not by seconds, so that equal
problems have equal plans.

Sources: Gilmore and Gomory, Operations Research 9, 1961, for patterns; Huangfu and
Hall, Mathematical Programming Computation 10, 2018 (HiGHS).
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.partition.geometry import Tiling, build_tiling, maximal_multisets
from eelgrid_controller.partition.mixed_integer import MixedIntegerResult, solve_mixed_integer
from eelgrid_controller.partition.options import (
    NO_HELD_CONFIGURATIONS,
    WHOLE,
    HeldConfigurations,
    KnownOptions,
    PlacementCell,
    ReplicaOption,
    enumerate_options,
)
from eelgrid_controller.partition.problem import FleetTooSmall, PartitionObjective, PartitionProblem, SearchExhausted
from eelgrid_kernels.arrays import Floats, Ints

if TYPE_CHECKING:
    # Imported where it solves: a controller that partitions nothing starts half a second sooner, and 40 MB smaller.
    from scipy import sparse

# A rate is met to this share of itself: the rounding of a sum of throughputs, nothing else.
RATE_TOLERANCE = 1e-12


class IntegerProgram(NamedTuple):
    """D demands, O options, C cells, Q patterns, P pools."""

    problem: PartitionProblem
    cells: tuple[PlacementCell, ...]
    options: tuple[ReplicaOption, ...]  # by demand
    first: Ints  # (D+1,) options of demand d are first[d] ... first[d+1] - 1
    demand: Ints  # (O,)
    cell: Ints  # (O,)
    width: Ints  # (O,)
    throughput_hz: Floats  # (O,)
    rate_hz: Floats  # (D,)
    patterns: Ints  # (Q, C) places
    pool: Ints  # (Q,)
    tilings: tuple[Tiling | None, ...]  # by pool; None where nothing uses a slice


class ObjectiveWeights(NamedTuple):
    """What a replica of each option costs (O,) and a GPU of each pattern (Q,)."""

    name: str
    option: Floats
    pattern: Floats


def build_program(
    problem: PartitionProblem, held: HeldConfigurations = NO_HELD_CONFIGURATIONS, known: KnownOptions | None = None
) -> IntegerProgram:
    """The problem's arrays; raises UnservableService, InvalidProblem. What is held, what is known: options_of."""
    cells, options = enumerate_options(problem, held, known)
    tilings = []
    rows: list[tuple[int, tuple[int, ...]]] = []
    for number, pool in enumerate(problem.pools):
        here = {cell.profile: index for index, cell in enumerate(cells) if cell.pool == number}
        keys = [key for key in here if key != WHOLE]
        plan = build_tiling(pool.geometry, keys) if pool.geometry is not None and keys else None
        tilings.append(plan)
        if WHOLE in here:
            rows.append((number, tuple(int(index == here[WHOLE]) for index in range(len(cells)))))
        for counts in maximal_multisets(plan.places) if plan is not None else ():
            places = {here[key]: count for key, count in zip(plan.keys, counts, strict=True)} if plan else {}
            rows.append((number, tuple(places.get(index, 0) for index in range(len(cells)))))
    demand = np.array([option.demand for option in options], np.int64)
    rates = [service.rate_hz for service in problem.services if service.rate_hz > 0.0]
    rate_hz = np.array([*rates, *(1.0 for _ in problem.jobs)], np.float64)
    return IntegerProgram(
        problem=problem,
        cells=cells,
        options=options,
        first=np.searchsorted(demand, np.arange(len(rate_hz) + 1)),
        demand=demand,
        cell=np.array([option.cell for option in options], np.int64),
        width=np.array([option.width for option in options], np.int64),
        throughput_hz=np.array([option.throughput_hz for option in options], np.float64),
        rate_hz=rate_hz,
        patterns=np.array([counts for _, counts in rows], np.int64).reshape(len(rows), len(cells)),
        pool=np.array([number for number, _ in rows], np.int64),
        tilings=tuple(tilings),
    )


def restrict_options(programme: IntegerProgram, keep: NDArray[np.bool_]) -> IntegerProgram:
    """The same with these options (O,) only; every demand keeps one at least."""
    demand = programme.demand[keep]
    return programme._replace(
        options=tuple(option for option, kept in zip(programme.options, keep, strict=True) if kept),
        first=np.searchsorted(demand, np.arange(len(programme.rate_hz) + 1)),
        demand=demand,
        cell=programme.cell[keep],
        width=programme.width[keep],
        throughput_hz=programme.throughput_hz[keep],
    )


def objective_weights(programme: IntegerProgram) -> tuple[ObjectiveWeights, ObjectiveWeights]:
    """What is to be least, and then at that."""
    pools = programme.problem.pools
    slices = np.array([programme.cells[option.cell].slices * option.width for option in programme.options], np.float64)
    jobs = np.array([option.point is None for option in programme.options], np.bool_)
    gpus = ObjectiveWeights(
        "gpus",
        np.zeros(len(programme.options)),
        np.array([pools[number].cost for number in programme.pool], np.float64),
    )
    if programme.problem.objective == PartitionObjective.GPUS:
        return gpus, ObjectiveWeights("slices", np.where(jobs, 0.0, slices), np.zeros(len(programme.pool)))
    added_w = np.array([option.added_w for option in programme.options], np.float64)
    held_w = np.array([pools[number].held_w for number in programme.pool], np.float64)
    return ObjectiveWeights("watts", added_w, held_w), gpus


def demand_throughput(programme: IntegerProgram, replicas: Ints) -> Floats:
    """Throughput of every demand (D,) with these replicas (O,), in hertz."""
    found = np.zeros(len(programme.rate_hz))
    np.add.at(found, programme.demand, programme.throughput_hz * replicas)
    return found


def constraint_rows(programme: IntegerProgram, asked: Floats) -> "tuple[sparse.csc_array, Floats, Floats]":
    """Rows over [x (O,) | y (Q,)] with their lowest and highest values: rates, places, pools that are limited.

    asked (D,) is what each rate row demands as a share of the rate: 1, or a little more where rounding fell short.
    """
    from scipy import sparse

    options, demands, cells = len(programme.options), len(programme.rate_hz), len(programme.cells)
    every = np.arange(options)
    share = np.minimum(programme.throughput_hz / programme.rate_hz[programme.demand], 1.0)
    limited = [number for number, pool in enumerate(programme.problem.pools) if pool.count is not None]
    members = np.array([programme.pool == number for number in limited], np.float64).reshape(
        len(limited), len(programme.pool)
    )
    table = sparse.block_array(
        [
            [sparse.csc_array((share, (programme.demand, every)), shape=(demands, options)), None],
            [
                sparse.csc_array(
                    (-programme.width.astype(np.float64), (programme.cell, every)), shape=(cells, options)
                ),
                sparse.csc_array(programme.patterns.T.astype(np.float64)),
            ],
            [None, sparse.csc_array(members)],
        ],
        format="csc",
    )
    counts = [float(programme.problem.pools[number].count or 0) for number in limited]
    low = np.concatenate((asked, np.zeros(cells), np.full(len(limited), -np.inf)))
    high = np.concatenate((np.full(demands + cells, np.inf), counts))
    return table, low, high


# Nodes of each of the two searches with up to 55 options, fewer in proportion with more. Both objectives of 148 scenarios
# (`bench.mig --random`, seeds 1 to 3) were proven within them, in .83 s of processor time at the most; with 200 nodes for
# the second, in about as much, eight were not.
NODES_MOST, _OPTIONS = 2000, 55
# To say what a fleet lacks.
_LACK_NODES_MOST = 200
_TIGHTER = 1e-5  # ten times what HiGHS may miss a row by
_ROUNDS_MOST = 4
_WHOLE = 1e-6  # a bound this little above a whole number is that number
_UNITS = 1000  # costs are looked at to the third digit


class OptimalityProof(NamedTuple):
    """One objective: its value, and what no plan can go below."""

    objective: str
    value: float
    bound: float

    @property
    def gap(self) -> float:
        """Share of the value by which it may be above the least."""
        return 0.0 if self.value <= self.bound else (self.value - self.bound) / self.value


class ProgramSolution(NamedTuple):
    """Replicas of each option, GPUs of each pattern, and what is proven of them."""

    replicas: Ints  # (O,)
    gpus: Ints  # (Q,)
    proofs: tuple[OptimalityProof, ...]


def solve_exact(programme: IntegerProgram, nodes_most: int = NODES_MOST) -> ProgramSolution:
    """The least plan, or the best within the nodes with its bound; raises FleetTooSmall, SearchExhausted."""
    first, second = objective_weights(programme)
    if not programme.options:  # nobody asks for anything
        nothing = np.zeros(0, np.int64), np.zeros(len(programme.pool), np.int64)
        return ProgramSolution(
            *nothing, (OptimalityProof(first.name, 0.0, 0.0), OptimalityProof(second.name, 0.0, 0.0))
        )
    share = min(1.0, _OPTIONS / len(programme.options))
    found, bound = minimize_objective(programme, first, (), max(1, math.ceil(nodes_most * share)))
    kept = objective_value(first, found)
    proof = OptimalityProof(first.name, kept, bound)
    try:
        better, second_bound = minimize_objective(
            programme, second, ((first, kept),), max(1, math.ceil(nodes_most * share))
        )
    except SearchExhausted:
        relaxed = _solve(programme, second, ((first, kept),), np.ones(len(programme.rate_hz)), 0)
        low = 0.0 if relaxed.values is None else round_bound_up(second, relaxed.bound)
        return ProgramSolution(*found, (proof, OptimalityProof(second.name, objective_value(second, found), low)))
    if objective_value(second, better) > objective_value(second, found):
        better = found
    # The rounding of a sum of floats: the second solve may keep the first value to the last bits only.
    first_proof = OptimalityProof(first.name, min(kept, objective_value(first, better)), bound)
    return ProgramSolution(
        *better, (first_proof, OptimalityProof(second.name, objective_value(second, better), second_bound))
    )


def objective_value(weights: ObjectiveWeights, found: tuple[Ints, Ints]) -> float:
    """What a solution costs."""
    return float(weights.option @ found[0] + weights.pattern @ found[1])


def minimize_objective(
    programme: IntegerProgram,
    weights: ObjectiveWeights,
    kept: tuple[tuple[ObjectiveWeights, float], ...],
    nodes_most: int,
) -> tuple[tuple[Ints, Ints], float]:
    """The least of one objective that keeps the values of others, and its bound."""
    asked = np.ones(len(programme.rate_hz))
    bound = 0.0
    for number in range(_ROUNDS_MOST):
        result = _solve(programme, weights, kept, asked, nodes_most)
        if result.is_infeasible and number == 0:
            raise fleet_too_small_error(programme)
        if number == 0:
            bound = round_bound_up(weights, max(0.0, result.bound))
        if result.values is None:
            remedy = "allow more, or plan parts of the fleet apart"
            raise SearchExhausted(f"no plan within {nodes_most} nodes", remedy)
        options = len(programme.options)
        values = np.rint(result.values).astype(np.int64)
        found = values[:options], values[options:]
        short = demand_throughput(programme, found[0]) < programme.rate_hz * (1.0 - RATE_TOLERANCE)
        if not short.any():
            return found, bound
        asked[short] = 1.0 + _TIGHTER
    raise SearchExhausted("rates are missed by the solver's rounding", "state them with fewer digits")


def _solve(
    programme: IntegerProgram,
    weights: ObjectiveWeights,
    kept: tuple[tuple[ObjectiveWeights, float], ...],
    asked: Floats,
    nodes_most: int,
) -> MixedIntegerResult:
    """The programme solved; with no nodes at all the one without whole numbers."""
    from scipy import sparse

    table, low, high = constraint_rows(programme, asked)
    most = np.concatenate((_replicas_most(programme), np.full(len(programme.pool), np.inf)))
    for other, value in kept:
        row = np.concatenate((other.option, other.pattern))
        table = sparse.vstack((table, sparse.csc_array(row[None, :])), format="csc")
        low, high = np.append(low, -np.inf), np.append(high, value * (1.0 + 1e-9) + 1e-9)
    return solve_mixed_integer(
        np.concatenate((weights.option, weights.pattern)), table, low, high, most=most, nodes_most=nodes_most
    )


def _replicas_most(programme: IntegerProgram) -> Floats:
    """More of one option than serve the whole rate are of no use."""
    return np.ceil(programme.rate_hz[programme.demand] / programme.throughput_hz * (1.0 + _TIGHTER))


def round_bound_up(weights: ObjectiveWeights, bound: float) -> float:
    """The bound, rounded up to the next sum of costs where these are multiples of one unit, as 1 or 0.2 is."""
    scaled = np.concatenate((weights.option, weights.pattern)) * _UNITS
    whole = np.rint(scaled)
    unit = int(np.gcd.reduce(whole.astype(np.int64))) if np.abs(scaled - whole).max(initial=0.0) < _WHOLE else 0
    if unit == 0:
        return bound
    return math.ceil((bound - _WHOLE * max(1.0, abs(bound))) * _UNITS / unit) * unit / _UNITS


def fleet_too_small_error(programme: IntegerProgram) -> FleetTooSmall:
    """What the limited pools lack: fewest GPUs that would do."""
    lacking = missing_gpus(programme)
    if not lacking:
        lacking = {pool.model: 1 for pool in programme.problem.pools if pool.count is not None}
    return FleetTooSmall(lacking, "add them or other models, ask for lower rates, or relax objectives")


def missing_gpu_columns(rows: int, first: int) -> "sparse.csc_array":
    """GPUs of limited pools that are not there: a column for each row from the first of these rows on."""
    from scipy import sparse

    lacking = np.arange(rows - first)
    return sparse.csc_array((np.full(len(lacking), -1.0), (first + lacking, lacking)), shape=(rows, len(lacking)))


def missing_gpus(programme: IntegerProgram) -> dict[str, int]:
    """Fewest GPUs beyond the pools' that would serve everything, by model."""
    from scipy import sparse

    table, low, high = constraint_rows(programme, np.ones(len(programme.rate_hz)))
    limited = [number for number, pool in enumerate(programme.problem.pools) if pool.count is not None]
    above = len(programme.rate_hz) + len(programme.cells)
    more = missing_gpu_columns(table.shape[0], above)
    wide = sparse.hstack((table, more), format="csc")
    cost = np.concatenate((np.zeros(table.shape[1]), np.ones(len(limited))))
    result = solve_mixed_integer(cost, wide, low, high, nodes_most=_LACK_NODES_MOST)
    if result.values is None:
        return {}
    counts = np.rint(result.values[table.shape[1] :]).astype(np.int64)
    names = [programme.problem.pools[number].model for number in limited]
    return {name: int(count) for name, count in zip(names, counts, strict=True) if count > 0}
