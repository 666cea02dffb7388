"""A partition problem as arrays: which places a GPU can be cut into, which options fill them, what each costs.

Owns the translation and the rows and columns of the integer programme. Must not
know how it is solved or what a GPU is called.

Theory, the pattern formulation. x_o replicas of option o (of demand d(o), on
places of cell c(o), w_o of them), y_q GPUs cut by pattern q, which holds a_qc
places of cell c:

    sum of t_o x_o over the options of d  >= r_d     every rate
    sum_q a_qc y_q - sum of w_o x_o over the options on c  >= 0     places
    sum of y_q over the patterns of pool p  <= N_p     GPUs that there are
    least  sum_q cost_q y_q,  then slices in use (or watts, then cost)

A training job is a demand of 1 whose options have throughput 1 and take whole
GPUs. A replica that alone does more than all the rate counts as the rate: the
whole-number solutions are the same, the bound without whole numbers is tighter.

Source: Gilmore and Gomory, Operations Research 9, 1961, for patterns.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from eelgrid_controller.partition.geometry import Tiling, maximal, tiling
from eelgrid_controller.partition.options import NONE_HELD, WHOLE, Cell, Held, Known, Option, options_of
from eelgrid_controller.partition.problem import Objective, Problem
from eelgrid_kernels.arrays import Floats, Ints

__all__ = ["EXACT", "Programme", "Weights", "compiled", "covered", "narrowed", "objectives", "rows"]

# A rate is met to this share of itself: the rounding of a sum of throughputs, nothing else.
EXACT = 1e-12


class Programme(NamedTuple):
    """D demands, O options, C cells, Q patterns, P pools."""

    problem: Problem
    cells: tuple[Cell, ...]
    options: tuple[Option, ...]  # by demand
    first: Ints  # (D+1,) options of demand d are first[d] ... first[d+1] - 1
    demand: Ints  # (O,)
    cell: Ints  # (O,)
    width: Ints  # (O,)
    throughput_hz: Floats  # (O,)
    rate_hz: Floats  # (D,)
    patterns: Ints  # (Q, C) places
    pool: Ints  # (Q,)
    tilings: tuple[Tiling | None, ...]  # by pool; None where nothing uses a slice


class Weights(NamedTuple):
    """What a replica of each option costs (O,) and a GPU of each pattern (Q,)."""

    name: str
    option: Floats
    pattern: Floats


def compiled(problem: Problem, held: Held = NONE_HELD, known: Known | None = None) -> Programme:
    """The problem's arrays; raises Unservable, BadProblem. What is held, what is known: options_of."""
    cells, options = options_of(problem, held, known)
    tilings = []
    rows: list[tuple[int, tuple[int, ...]]] = []
    for number, pool in enumerate(problem.pools):
        here = {cell.profile: index for index, cell in enumerate(cells) if cell.pool == number}
        keys = [key for key in here if key != WHOLE]
        plan = tiling(pool.geometry, keys) if pool.geometry is not None and keys else None
        tilings.append(plan)
        if WHOLE in here:
            rows.append((number, tuple(int(index == here[WHOLE]) for index in range(len(cells)))))
        for counts in maximal(plan.places) if plan is not None else ():
            places = {here[key]: count for key, count in zip(plan.keys, counts, strict=True)} if plan else {}
            rows.append((number, tuple(places.get(index, 0) for index in range(len(cells)))))
    demand = np.array([option.demand for option in options], np.int64)
    rates = [service.rate_hz for service in problem.services if service.rate_hz > 0.0]
    rate_hz = np.array([*rates, *(1.0 for _ in problem.jobs)], np.float64)
    return Programme(
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


def narrowed(programme: Programme, keep: NDArray[np.bool_]) -> Programme:
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


def objectives(programme: Programme) -> tuple[Weights, Weights]:
    """What is to be least, and then at that."""
    pools = programme.problem.pools
    slices = np.array([programme.cells[option.cell].slices * option.width for option in programme.options], np.float64)
    jobs = np.array([option.point is None for option in programme.options], np.bool_)
    gpus = Weights(
        "gpus",
        np.zeros(len(programme.options)),
        np.array([pools[number].cost for number in programme.pool], np.float64),
    )
    if programme.problem.objective == Objective.GPUS:
        return gpus, Weights("slices", np.where(jobs, 0.0, slices), np.zeros(len(programme.pool)))
    added_w = np.array([option.added_w for option in programme.options], np.float64)
    held_w = np.array([pools[number].held_w for number in programme.pool], np.float64)
    return Weights("watts", added_w, held_w), gpus


def covered(programme: Programme, replicas: Ints) -> Floats:
    """Throughput of every demand (D,) with these replicas (O,), in hertz."""
    found = np.zeros(len(programme.rate_hz))
    np.add.at(found, programme.demand, programme.throughput_hz * replicas)
    return found


def rows(programme: Programme, asked: Floats) -> tuple[sparse.csc_array, Floats, Floats]:
    """Rows over [x (O,) | y (Q,)] with their lowest and highest values: rates, places, pools that are limited.

    asked (D,) is what each rate row demands as a share of the rate: 1, or a little more where rounding fell short.
    """
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
