"""How the replicas of one workload stand to each other: near or apart, as it asked.

Owns the term `topology` of a cost and the division of a gang among nodes. Must
not know how a single replica is weighed: that is handed in as `Weigh`.

Theory. Zones, switches, racks and nodes are a tree. To pack costs locality_w
for each place used beyond the first, at every level: a further node in the rack
one unit, the first node of another rack two. To spread costs locality_w for each
pair of replicas that share a place, at every level. Both are sums over the tree
of a price of how many replicas a place holds, and so are watts, since what
replicas cost on one node does not depend on other nodes. The cheapest division
is therefore found exactly (eelgrid_kernels.gang), and it exists whenever there
is room for all. Past WORK_MOST steps, replicas go one by one to the node that is
cheapest with the term: how far that falls short is measured in docs/topology.md.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.snapshot import Snapshot
from eelgrid_kernels import FITS, Board, Task, divide
from eelgrid_protos.messages import Locality, Weights, WorkloadSpec

__all__ = ["WORK_MOST", "Case", "Gang", "wishes"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# Weighs these rows of a snapshot anew into the board.
Weigh = Callable[[Snapshot, Ints, Board], object]
# Steps of dividing, some 20 ms: a gang of 64 on 1,213 nodes of 8 GPUs takes 2 million.
WORK_MOST = 20_000_000
# Steps for each cell of the table of divisions, which is 8 bytes; and for each node weighed, which takes about 1 us.
_STEPS_OF_A_CELL = 5
_STEPS_OF_A_NODE = 400


def wishes(spec: WorkloadSpec, weights: Weights) -> bool:
    """Whether it matters where the replicas stand to each other."""
    return spec.replicas > 1 and spec.locality is not Locality.UNSPECIFIED and weights.locality_w > 0.0


def _prices(locality: Locality, replicas: int, locality_w: float) -> Floats:
    """Watts of a place that holds 0 to R replicas."""
    held = np.arange(replicas + 1, dtype=np.float64)
    return locality_w * (np.minimum(held, 1.0) if locality is Locality.PACK else held * (held - 1.0) / 2.0)


class Case(NamedTuple):
    """What is to be placed where: a snapshot, its board for this task, and the way to bring rows of it up to date."""

    snapshot: Snapshot
    spec: WorkloadSpec
    locality_w: float
    task: Task
    allows: Ints
    board: Board
    weigh: Weigh
    work_most: int = WORK_MOST


def _costs(case: Case) -> tuple[Ints, Floats] | None:
    """The rows that fit, and what 0 to S replicas cost on each (N, S+1), infinite beyond its room; None if too many."""
    rows = np.flatnonzero(case.board.verdict == FITS)
    trial = case.snapshot.copy()
    columns = [np.zeros(len(rows))]
    here, weighed = case.board, 0
    while len(columns) <= case.spec.replicas:
        fits = here.verdict[rows] == FITS
        if not fits.any():
            break
        columns.append(np.where(fits, columns[-1] + here.cost_w[rows], np.inf))
        weighed += int(fits.sum())
        if weighed * _STEPS_OF_A_NODE > case.work_most:
            return None
        trial.take_each(here, case.task, case.allows, rows[fits])
        here = Board._make(array.copy() for array in here)
        case.weigh(trial.snapshot, rows[fits], here)
    return rows, np.column_stack(columns)


class Gang:
    """One workload being placed: how many replicas each node is still to take, and what the next one costs there."""

    def __init__(self, case: Case) -> None:
        snapshot, replicas = case.snapshot, case.spec.replicas
        self._rank = snapshot.nodes.rank
        self._prices = _prices(case.spec.locality, replicas, case.locality_w)
        # Of the next replica in a place that holds 0 to R - 1.
        self._added_w = np.diff(self._prices)
        self._groups = snapshot.places.codes()
        # Each level of the network, and the nodes themselves as the innermost.
        self._levels = [*self._groups.T, np.arange(len(snapshot.names))]
        self._tallies = [np.zeros(int(level.max()) + 1, np.int64) for level in self._levels]
        self._left = self._division(case)
        # The first replica opens a place at every level, wherever it goes, and shares none.
        self._opened = False

    @property
    def exact(self) -> bool:
        """Whether the replicas go where all of them together cost least."""
        return self._left is not None

    def _division(self, case: Case) -> Ints | None:
        """Replicas by row; None where it would take too long to know."""
        replicas = case.spec.replicas
        fitting = int((case.board.verdict == FITS).sum())
        if fitting * (replicas + 1) * len(self._levels) * _STEPS_OF_A_CELL > case.work_most:
            return None
        found = _costs(case)
        if found is None:
            return None
        rows, costs = found
        room = int(np.isfinite(costs[:, 1:]).sum())
        if room * replicas * len(self._levels) > case.work_most:
            return None
        # By place and then by name, so that a group stands together and equal divisions are one.
        order = np.lexsort([self._rank[rows], *self._groups[rows].T[::-1]])
        counts = np.zeros(len(rows), np.int64)
        divide(costs[order], self._groups[rows[order]], self._prices, counts)
        left = np.zeros(len(case.snapshot.names), np.int64)
        left[rows[order]] = counts
        return left

    def terms_w(self) -> Floats:
        """What the next replica adds to the term on each node (N,)."""
        terms_w = np.zeros(len(self._rank))
        if self._opened:
            for level, tally in zip(self._levels, self._tallies, strict=True):
                terms_w += self._added_w[tally[level]]
        return terms_w

    def next_row(self, board: Board, terms_w: Floats) -> int:
        """The node of the next replica: the cheapest that is still to take one; of equals, that of the lowest rank."""
        open_ = board.verdict == FITS
        if self._left is not None:
            open_ &= self._left > 0
        rows = np.flatnonzero(open_)
        costs_w = board.cost_w[rows] + terms_w[rows]
        least = rows[costs_w == costs_w.min()]
        return int(least[self._rank[least].argmin()])

    def take(self, row: int) -> None:
        """The next replica went there."""
        self._opened = True
        if self._left is not None:
            self._left[row] -= 1
        for level, tally in zip(self._levels, self._tallies, strict=True):
            tally[level[row]] += 1
