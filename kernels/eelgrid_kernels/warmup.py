"""Warm-up: compiles every kernel into numba's cache before the first decision.

Owns one call of each kernel with the argument types that the controller uses:
numba compiles a version for each combination of types, and read-only arrays
are types of their own. What decides comes first: the kernels of moves and of the
simulator may be compiled while decisions are made. Knows nothing of results.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from eelgrid_kernels.argmin_index import choose_nodes, compute_all_costs, is_scaled, work_ahead
from eelgrid_kernels.arrays import (
    MOVE_UNIT,
    REQUEST,
    ChurnLimits,
    Floats,
    Ints,
    Mix,
    MoveNodes,
    MoveSearch,
    Nodes,
    Records,
    Task,
    TermPrices,
)
from eelgrid_kernels.baselines import EELGRID, PlacementPolicy, choose_gpus
from eelgrid_kernels.candidates import CandidateIndex, QuotedPrices, count_candidates, write_terms
from eelgrid_kernels.compilation import Kernel, compile_together, mark_cache_complete
from eelgrid_kernels.gang import choose_linked_gpus, compute_replica_costs, divide_replicas, exchange_gpus
from eelgrid_kernels.min_cost_cover import LEVEL, CoverList, CoverPieces, list_cheap_covers
from eelgrid_kernels.move_costs import node_terms, place_tasks, sum_terms
from eelgrid_kernels.move_search import GREEDY, OVERLAPS, search_moves
from eelgrid_kernels.move_setup import build_move_search, build_search_ground
from eelgrid_kernels.node_cost import (
    CONSTRAINTS,
    GPU_PLACEABLE,
    cluster_power,
    count_verdicts,
    node_fragmentation,
    node_power,
    refresh_fragmentation,
    replica_room,
)
from eelgrid_kernels.node_states import adopt_nodes
from eelgrid_kernels.opportunity_prices import apply_prices, are_prices_due, compute_prices
from eelgrid_kernels.simulation import BatchServers, simulate_queue


def _frozen(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


@cache
def _search_small() -> tuple[MoveNodes, MoveSearch]:
    """One replica on one node, which may move."""
    one, slots = np.full(1, 1000, np.int64), np.full((1, 1), 1000, np.int64)
    state, code, watts = np.full((1, 1), GPU_PLACEABLE, np.uint8), np.zeros((1, 1), np.int64), np.ones((1, 1))
    nodes = Nodes(np.ones(1, np.bool_), one, one, one, state, code, slots, watts, watts, one)
    mix = Mix(one, np.ones(1, np.int64), one, np.ones((1, 1), np.int64), one, 1000)
    requests, units = np.zeros(1, REQUEST), np.zeros(1, MOVE_UNIT)
    requests["gpu_count"], requests["gpu_milli"], requests["models"] = 1, 1000, 1
    units["end"], units["manner"] = 1, OVERLAPS
    ground = build_search_ground(nodes, mix, TermPrices(1.0, 1.0, 1.0, 1.0), requests, replicas=1)
    return ground, build_move_search(ground, ChurnLimits(1, 1000, 1.0, 1, 1), units, np.zeros((1, 1), np.int64))


def _list_small() -> tuple[CoverPieces, Floats, int, Records, CoverList]:
    """One need that one piece covers."""
    one = np.ones(1)
    covers = CoverList(np.zeros((1, 1, 1), np.int64), np.zeros((1, 1)), np.zeros(1, np.int64), np.full(1, 2.0))
    return CoverPieces(one, one, np.array([0, 1])), one, 64, np.zeros(1, LEVEL), covers


# What the program prints once a controller could decide.
COMPILED_DECIDING = "compiled: what decides"
# Machine code that kernels share.
DECIDING, OTHERS = "deciding", "others"
_Calls: TypeAlias = tuple[tuple[Callable[..., Any], Callable[[], object]], ...]


def _ignore_progress(_done: int, _total: int) -> None:
    """Nobody waits."""


def warm_kernels(
    on_progress: Callable[[int, int], None] = _ignore_progress, on_decides: Callable[[], None] = lambda: None
) -> tuple[str, ...]:
    """Compiles, or loads from the cache, every kernel; returns their names.

    Tells how many of all are done, and when those that decide are.
    """
    deciding, others = _call_deciding_kernels(), _call_other_kernels()
    total = len(deciding) + len(others)
    _warm(DECIDING, deciding, lambda done: on_progress(done, total))
    on_decides()
    _warm(OTHERS, others, lambda done: on_progress(len(deciding) + done, total))
    mark_cache_complete()
    return tuple(kernel.__name__ for kernel, _ in (*deciding, *others))


def warm_deciding_kernels() -> None:
    """Compiles, or loads from the cache, the kernels without which nothing is decided."""
    _warm(DECIDING, _call_deciding_kernels(), lambda _: None)


def _warm(name: str, calls: _Calls, on_progress: Callable[[int], None]) -> None:
    """Calls kernels, which share machine code; tells how many are done."""

    def run() -> None:
        for _, call in calls:
            call()

    kernels = [kernel for kernel, _ in calls if isinstance(kernel, Kernel)]
    # The last is done with the machine code of all.
    compile_together(name, kernels, run, lambda done: on_progress(min(done, len(calls) - 1)))
    # Anew: kernels were called interpreted for it.
    _build_small_cluster.cache_clear()
    _search_small.cache_clear()
    run()
    on_progress(len(calls))


def list_deciding_kernels() -> frozenset[Kernel]:
    """The kernels without which nothing is decided; empty without numba's compiler."""
    return frozenset(kernel for kernel, _ in _call_deciding_kernels() if isinstance(kernel, Kernel))


def _call_other_kernels() -> _Calls:
    return (
        (search_moves, lambda: search_moves(*_search_small(), GREEDY)),
        (place_tasks, lambda: place_tasks(_search_small()[0], np.zeros(1, np.int64), np.zeros(1, np.int64))),
        (node_terms, lambda: node_terms(_search_small()[0], 0)),
        (sum_terms, lambda: sum_terms(_search_small()[0], np.zeros(4))),
        (list_cheap_covers, lambda: list_cheap_covers(*_list_small())),
        (simulate_queue, lambda: simulate_queue(np.zeros(1), np.ones(1), BatchServers(1, 1, 1.0), np.zeros(1))),
    )


class _SmallCluster(NamedTuple):
    """One node, with what is asked of it."""

    nodes: Nodes
    mix: Mix
    task: Task
    allows: Ints
    candidates: CandidateIndex
    kind: int


@cache
def _build_small_cluster() -> _SmallCluster:
    one = _frozen(np.full(1, 1000, np.int64))
    slots = _frozen(np.full((1, 1), 1000, np.int64))
    watts = _frozen(np.ones((1, 1)))
    code = _frozen(np.zeros((1, 1), np.int64))
    state = _frozen(np.full((1, 1), GPU_PLACEABLE, np.uint8))
    nodes = Nodes(_frozen(np.ones(1, np.bool_)), one, one, one, state, code, slots, watts, watts, one)
    mix = Mix(one, _frozen(np.ones(1, np.int64)), one, _frozen(np.ones((1, 1), np.int64)), one, 1000)
    task = Task(1, 1, 1, 1000)
    allows = _frozen(np.ones(1, np.int64))
    candidates = CandidateIndex(nodes, mix, _frozen(np.zeros(1, np.int64)), PlacementPolicy("", EELGRID, np.ones(3)))
    return _SmallCluster(nodes, mix, task, allows, candidates, candidates.register_kind(task, allows))


def _call_deciding_kernels() -> _Calls:
    small = _build_small_cluster
    rows = np.zeros(1, np.int64)

    def count() -> None:
        nodes, _, task, allows, _, _ = small()
        count_verdicts(nodes, task, allows, np.zeros(1 + len(CONSTRAINTS), np.int64))

    def choose() -> None:
        small().candidates.best_candidates(small().kind, 0, 1)

    def ahead() -> None:
        small().candidates.work_ahead()

    def prices() -> None:
        small().candidates.compute_prices()

    return (
        (adopt_nodes, small),
        (is_scaled, small),
        (refresh_fragmentation, lambda: refresh_fragmentation(small().nodes, small().mix, rows, np.zeros(1, np.int64))),
        (replica_room, lambda: replica_room(small().nodes, small().task, small().allows, 1)),
        (node_fragmentation, lambda: node_fragmentation(small().nodes, small().mix, 0)),
        (node_power, lambda: node_power(small().nodes, 0)),
        (cluster_power, lambda: cluster_power(small().nodes)),
        (count_verdicts, count),
        (choose_nodes, choose),
        (choose_gpus, choose),
        (write_terms, choose),
        (work_ahead, ahead),
        (are_prices_due, lambda: small().candidates.is_due(-1)),
        (compute_prices, prices),
        (apply_prices, lambda: small().candidates.apply_prices(QuotedPrices([0]))),
        (compute_all_costs, lambda: small().candidates.node_costs(small().kind)),
        (count_candidates, lambda: small().candidates.count_verdicts(small().nodes, small().task, small().allows)),
        (compute_replica_costs, lambda: small().candidates.replica_costs(small().kind, rows, 1)),
        (exchange_gpus, lambda: exchange_gpus(small().nodes, 0, _frozen(np.zeros((1, 1), np.int64)), rows)),
        (
            choose_linked_gpus,
            lambda: choose_linked_gpus(_frozen(np.zeros((1, 1), np.int64)), rows, np.zeros(1, np.int64)),
        ),
        (
            divide_replicas,
            lambda: divide_replicas(np.zeros((1, 2)), np.zeros((1, 0), np.int64), np.zeros(2), np.zeros(1, np.int64)),
        ),
    )
