"""The least plan, proven: the integer programme by branch and cut.

Owns the two solves, one after the other, and their certificate. Must not know
where the programme comes from.

Theory: least of the first objective; then least of the second among the solutions
that keep the first's value. HiGHS tells the bound below which no solution lies;
where costs are whole numbers it rounds up, and equal to the value it is a proof.
A solver's rows hold to about 1e-6: every rate is checked anew with the
whole-number solution, and a row that relied on the tolerance is asked for 1e-5
more. The bound stays that of the rows as they were, which are looser. The search
is cut by nodes, not by seconds, so that equal problems have equal plans.

Source: Huangfu and Hall, Mathematical Programming Computation 10, 2018 (HiGHS).
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp

from eelgrid_controller.partition.errors import FleetTooSmall, SearchExhausted
from eelgrid_controller.partition.programme import EXACT, Programme, Weights, covered, objectives, rows
from eelgrid_kernels.arrays import Floats, Ints

__all__ = [
    "FIRST_NODES_MOST",
    "Proof",
    "Solution",
    "exact",
    "least",
    "missing",
    "rounded_bound",
    "too_small",
    "value_of",
]

# Nodes of the two searches with up to 55 options, fewer in proportion with more. Of 300 drawn scenarios the first took
# 1,158 at most and one in nearly all; the second was cut in 35, and says so by its gap.
FIRST_NODES_MOST, SECOND_NODES_MOST, _OPTIONS = 2000, 200, 55
_OPTIMAL, _CUT, _INFEASIBLE = 0, 1, 2
_TIGHTER = 1e-5  # ten times what HiGHS may miss a row by
_ROUNDS_MOST = 4
_WHOLE = 1e-6  # a bound this little above a whole number is that number
_UNITS = 1000  # costs are looked at to the third digit


class Proof(NamedTuple):
    """One objective: its value, and what no plan can go below."""

    objective: str
    value: float
    bound: float

    @property
    def gap(self) -> float:
        """Share of the value by which it may be above the least."""
        return 0.0 if self.value <= self.bound else (self.value - self.bound) / self.value


class Solution(NamedTuple):
    """Replicas of each option, GPUs of each pattern, and what is proven of them."""

    replicas: Ints  # (O,)
    gpus: Ints  # (Q,)
    proofs: tuple[Proof, ...]


def exact(programme: Programme, nodes_most: int = FIRST_NODES_MOST) -> Solution:
    """The least plan, or the best within the nodes with its bound; raises FleetTooSmall, SearchExhausted."""
    first, second = objectives(programme)
    if not programme.options:  # nobody asks for anything
        nothing = np.zeros(0, np.int64), np.zeros(len(programme.pool), np.int64)
        return Solution(*nothing, (Proof(first.name, 0.0, 0.0), Proof(second.name, 0.0, 0.0)))
    share = min(1.0, _OPTIONS / len(programme.options))
    found, bound = least(programme, first, (), max(1, math.ceil(nodes_most * share)))
    kept = value_of(first, found)
    proof = Proof(first.name, kept, bound)
    try:
        better, second_bound = least(
            programme, second, ((first, kept),), max(1, math.ceil(min(nodes_most, SECOND_NODES_MOST) * share))
        )
    except SearchExhausted:
        relaxed = _solve(programme, second, ((first, kept),), np.ones(len(programme.rate_hz)), 0)
        low = 0.0 if relaxed.x is None else rounded_bound(second, float(relaxed.fun))
        return Solution(*found, (proof, Proof(second.name, value_of(second, found), low)))
    if value_of(second, better) > value_of(second, found):
        better = found
    # The rounding of a sum of floats: the second solve may keep the first value to the last bits only.
    first_proof = Proof(first.name, min(kept, value_of(first, better)), bound)
    return Solution(*better, (first_proof, Proof(second.name, value_of(second, better), second_bound)))


def value_of(weights: Weights, found: tuple[Ints, Ints]) -> float:
    """What a solution costs."""
    return float(weights.option @ found[0] + weights.pattern @ found[1])


def least(
    programme: Programme, weights: Weights, kept: tuple[tuple[Weights, float], ...], nodes_most: int
) -> tuple[tuple[Ints, Ints], float]:
    """The least of one objective that keeps the values of others, and its bound."""
    asked = np.ones(len(programme.rate_hz))
    bound = 0.0
    for number in range(_ROUNDS_MOST):
        result = _solve(programme, weights, kept, asked, nodes_most)
        if result.status == _INFEASIBLE and number == 0:
            raise too_small(programme)
        if number == 0:
            bound = rounded_bound(weights, max(0.0, float(result.mip_dual_bound or 0.0)))
        if result.x is None:
            remedy = "allow more, or plan parts of the fleet apart"
            raise SearchExhausted(f"no plan within {nodes_most} nodes", remedy)
        options = len(programme.options)
        values = np.rint(result.x).astype(np.int64)
        found = values[:options], values[options:]
        short = covered(programme, found[0]) < programme.rate_hz * (1.0 - EXACT)
        if not short.any():
            return found, bound
        asked[short] = 1.0 + _TIGHTER
    raise SearchExhausted("rates are missed by the solver's rounding", "state them with fewer digits")


def _solve(
    programme: Programme, weights: Weights, kept: tuple[tuple[Weights, float], ...], asked: Floats, nodes_most: int
) -> OptimizeResult:
    """HiGHS on the programme; with no nodes at all on the one without whole numbers."""
    table, low, high = rows(programme, asked)
    most = np.concatenate((_replicas_most(programme), np.full(len(programme.pool), np.inf)))
    for other, value in kept:
        row = np.concatenate((other.option, other.pattern))
        table = sparse.vstack((table, sparse.csc_array(row[None, :])), format="csc")
        low, high = np.append(low, -np.inf), np.append(high, value * (1.0 + 1e-9) + 1e-9)
    return milp(
        np.concatenate((weights.option, weights.pattern)),
        integrality=np.full(table.shape[1], int(nodes_most > 0)),
        bounds=Bounds(0.0, most),
        constraints=LinearConstraint(table, low, high),
        options={"mip_rel_gap": 0.0, "node_limit": nodes_most},
    )


def _replicas_most(programme: Programme) -> Floats:
    """More of one option than serve the whole rate are of no use."""
    return np.ceil(programme.rate_hz[programme.demand] / programme.throughput_hz * (1.0 + _TIGHTER))


def rounded_bound(weights: Weights, bound: float) -> float:
    """The bound, rounded up to the next sum of costs where these are multiples of one unit, as 1 or 0.2 is."""
    scaled = np.concatenate((weights.option, weights.pattern)) * _UNITS
    whole = np.rint(scaled)
    unit = int(np.gcd.reduce(whole.astype(np.int64))) if np.abs(scaled - whole).max(initial=0.0) < _WHOLE else 0
    if unit == 0:
        return bound
    return math.ceil((bound - _WHOLE * max(1.0, abs(bound))) * _UNITS / unit) * unit / _UNITS


def too_small(programme: Programme) -> FleetTooSmall:
    """What the limited pools lack: fewest GPUs that would do."""
    lacking = missing(programme)
    if not lacking:
        lacking = {pool.model: 1 for pool in programme.problem.pools if pool.count is not None}
    return FleetTooSmall(lacking, "add them or other models, ask for lower rates, or relax objectives")


def missing(programme: Programme) -> dict[str, int]:
    """Fewest GPUs beyond the pools' that would serve everything, by model."""
    table, low, high = rows(programme, np.ones(len(programme.rate_hz)))
    limited = [number for number, pool in enumerate(programme.problem.pools) if pool.count is not None]
    above = len(programme.rate_hz) + len(programme.cells)
    more = sparse.csc_array(
        (np.full(len(limited), -1.0), (np.arange(above, above + len(limited)), np.arange(len(limited)))),
        shape=(table.shape[0], len(limited)),
    )
    wide = sparse.hstack((table, more), format="csc")
    result = milp(
        np.concatenate((np.zeros(table.shape[1]), np.ones(len(limited)))),
        integrality=np.ones(wide.shape[1]),
        bounds=Bounds(0.0, np.inf),
        constraints=LinearConstraint(wide, low, high),
        options={"mip_rel_gap": 0.0, "node_limit": SECOND_NODES_MOST},
    )
    if result.x is None:
        return {}
    counts = np.rint(result.x[table.shape[1] :]).astype(np.int64)
    names = [programme.problem.pools[number].model for number in limited]
    return {name: int(count) for name, count in zip(names, counts, strict=True) if count > 0}
