"""Compiling every kernel ahead of the first decision, into numba's cache.

Owns one call of each kernel with the argument types that the controller uses:
numba compiles a version for each combination of types, and read-only arrays
are types of their own. Knows nothing of results.
"""

import numpy as np

from eelgrid_kernels.arrays import Mix, Nodes, Task
from eelgrid_kernels.best import choose, weigh_all
from eelgrid_kernels.candidates import Candidates
from eelgrid_kernels.gang import divide, repeat
from eelgrid_kernels.peers import EELGRID
from eelgrid_kernels.placement import (
    CONSTRAINTS,
    GPU_PLACEABLE,
    cluster_power,
    count_verdicts,
    fragmentation,
    node_power,
    refresh_fragmentation,
    replica_room,
)
from eelgrid_kernels.played import play
from eelgrid_kernels.quotes import put, quote
from eelgrid_kernels.states import adopt
from eelgrid_kernels.wiring import choose_linked, rewire

__all__ = ["warm"]


def _frozen(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def warm() -> tuple[str, ...]:
    """Compiles, or loads from the cache, every kernel; returns their names."""
    one = _frozen(np.full(1, 1000, np.int64))
    slots = _frozen(np.full((1, 1), 1000, np.int64))
    watts = _frozen(np.ones((1, 1)))
    code = _frozen(np.zeros((1, 1), np.int64))
    state = _frozen(np.full((1, 1), GPU_PLACEABLE, np.uint8))
    nodes = Nodes(_frozen(np.ones(1, np.bool_)), one, one, one, state, code, slots, watts, watts, one)
    mix = Mix(one, _frozen(np.ones(1, np.int64)), one, _frozen(np.ones((1, 1), np.int64)), one, 1000)
    task = Task(1, 1, 1, 1000)
    allows = _frozen(np.ones(1, np.int64))
    fragments, rows = np.zeros(1, np.int64), np.zeros(1, np.int64)
    refresh_fragmentation(nodes, mix, rows, fragments)
    replica_room(nodes, task, allows, 1)
    fragmentation(nodes, mix, 0)
    node_power(nodes, 0)
    cluster_power(nodes)
    count_verdicts(nodes, task, allows, np.zeros(1 + len(CONSTRAINTS), np.int64))
    candidates = Candidates(nodes, mix, _frozen(np.zeros(1, np.int64)), EELGRID, np.ones(3))
    kind = candidates.kind(task, allows)
    candidates.best(kind, 0, 1)
    candidates.is_due(-1)
    candidates.put(*candidates.quote())
    candidates.costs(kind)
    candidates.verdicts(nodes, task, allows)
    candidates.several(kind, rows, 1)
    rewire(nodes, 0, code, np.zeros(1, np.int64))
    choose_linked(code, rows, np.zeros(1, np.int64))
    divide(np.zeros((1, 2)), np.zeros((1, 0), np.int64), np.zeros(2), np.zeros(1, np.int64))
    play(np.zeros(1), np.ones(1), 1, 1, 1.0, np.zeros(1))
    kernels = (
        choose,
        weigh_all,
        quote,
        put,
        adopt,
        count_verdicts,
        refresh_fragmentation,
        replica_room,
        fragmentation,
        node_power,
        cluster_power,
        choose_linked,
        rewire,
        repeat,
        divide,
        play,
    )
    return tuple(kernel.__name__ for kernel in kernels)
