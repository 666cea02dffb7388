"""The arrays of the search for moves, by name, shape, dtype and unit.

Owns types alone, like arrays.py. A unit is what moves at once: one replica, or
those replicas of a gang that stand on one node; all replicas of a unit ask for
the same. I replicas of U units, sorted by unit; R kinds of request; W is the
most GPUs that one request asks for, at least 1.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_kernels.arrays import Floats, Ints, Mix, Nodes

__all__ = ["Ground", "Limits", "Prices", "Requests", "Search", "Units"]


class Prices(NamedTuple):
    """What a goal pays for each term of a node's cost."""

    power: float  # watts per watt
    fragmentation_w: float  # watts per fragmented GPU
    stranding_w: float  # watts per stranded GPU
    block_w: float  # watts that a free GPU of a block is worth


class Requests(NamedTuple):
    """What replicas ask for, by kind."""

    cpu_milli: Ints  # (R,)
    memory_bytes: Ints  # (R,)
    gpu_count: Ints  # (R,)
    gpu_milli: Ints  # (R,) of each GPU
    allows: Ints  # (R, M) 1 where the model may be used


class Units(NamedTuple):
    """What runs, and how it may move."""

    kind: Ints  # (U,)
    first: Ints  # (U + 1,) unit u has the replicas first[u] to first[u + 1] - 1
    home: Ints  # (U,) node on which all of its replicas stand
    manner: NDArray[np.uint8]  # (U,) STAYS, OVERLAPS or RELEASES
    restart_w: Floats  # (U,) what moving it costs, in watts-equivalent
    slots: Ints  # (I, W) GPUs of each replica at home, -1 beyond the last


class Limits(NamedTuple):
    """The churn budget, and how dear it is held."""

    replicas: int  # that may move
    gpu_milli: int  # that may move
    thrift: float  # 0 takes the chain of the largest gain first, 1 that of the largest gain for its share of the budget
    deep: bool  # whether chains for which another unit makes room are weighed from the beginning, or only in the end
    ejections: int  # of such chains, the most that are weighed in one search


class Ground(NamedTuple):
    """The nodes while work comes and goes on them; mix, prices and requests are only read, the rest changes."""

    nodes: Nodes  # what is free changes
    mix: Mix
    prices: Prices
    requests: Requests
    cost_w: Floats  # (N,) present potential of each node
    board_w: Floats  # (R, N) what the potential gains by one more of the kind, inf where it does not fit
    stamp: Ints  # (N,) when the node was last touched: at the present clock, its column of the board is stale
    clock: Ints  # (2,) the present moment; touches since the trail began
    trail: Ints  # (L,) nodes touched, in order; L is enough for every replica to come and go twice
    trail_w: Floats  # (L,) what they cost before
    slots: Ints  # (2, W) scratch


class Search(NamedTuple):
    """A search under way; units, limits, at and listed are only read, the rest changes."""

    units: Units
    limits: Limits
    at: Ints  # (N + 1,) node n is home to listed[at[n]] to listed[at[n + 1] - 1]
    listed: Ints  # (U,) units by home
    spent: Ints  # (3,) replicas and milli-GPU moved for good; ejections weighed
    moved: NDArray[np.bool_]  # (U,)
    to_node: Ints  # (I,)
    to_slots: Ints  # (I, W)
    queue: Ints  # (Q,) units of the chain under way; Q is the most that one node is home to, at least 1
    worth: Floats  # (N,) the best chain of each node: net watts by the share of the budget that it takes
    chain: Ints  # (N, 2) that chain and how much of it
