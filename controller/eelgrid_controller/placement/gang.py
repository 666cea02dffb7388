"""Gang placement: how close together or how far apart the replicas of one workload are placed.

Owns the `topology` term of the cost and the division of a gang among nodes. Must not know events, sentences or the
other terms: what one or several replicas cost on a node is computed by eelgrid_kernels.candidates.

Theory. Zones, switches, racks and nodes form a tree. Packing costs locality_w for each place used beyond the first,
at every level. Spreading costs locality_w for each pair of replicas that share a place, at every level. Both are sums
over the tree of a function, in watts, of the number of replicas in a place, since what replicas cost on one node does
not depend on other nodes. The cheapest division is therefore found exactly (eelgrid_kernels.gang), and it exists
whenever all replicas fit. Beyond WORK_MOST, packing considers only the most promising racks, and spreading, or
packing what these racks cannot hold, places replicas one by one on the node that is cheapest with the term;
docs/explanation/topology.md measures both.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.placement.snapshot import Snapshot
from eelgrid_kernels.arrays import Task
from eelgrid_kernels.candidates import CandidateIndex, NodeCandidate
from eelgrid_kernels.gang import divide_replicas
from eelgrid_kernels.node_cost import GPU_PLACEABLE
from eelgrid_protos.messages import Locality, Weights, WorkloadSpec

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# Steps of the division, 0.3 ns each: a gang of 64 on 1,213 empty nodes of 8 GPUs takes 4 million.
WORK_MOST = 50_000_000
# Also counted: a cell of the table of divisions, of 8 bytes; and one replica evaluated in a state, 1 to 2 us.
_STEPS_OF_A_CELL = 5
_STEPS_OF_A_REPLICA = 5_000


def has_locality_preference(spec: WorkloadSpec, weights: Weights) -> bool:
    """Returns whether the relative places of the replicas matter."""
    return spec.replicas > 1 and spec.locality is not Locality.UNSPECIFIED and weights.locality_w > 0.0


def _boundaries(locality: Locality, replicas: int) -> Floats:
    """Returns what 0 to R replicas in one place count for (R + 1,): the place itself, or the pairs that share it."""
    held = np.arange(replicas + 1, dtype=np.float64)
    return np.minimum(held, 1.0) if locality is Locality.PACK else held * (held - 1.0) / 2.0


class GangProblem(NamedTuple):
    """The workload, the nodes to divide it among, and the price of a further boundary."""

    snapshot: Snapshot
    spec: WorkloadSpec
    task: Task
    allows: Ints
    locality_w: float
    work_most: int


def _room(case: GangProblem, rows: Ints) -> tuple[Ints, Ints]:
    """Returns how many replicas each of these rows can hold, at most those asked: ignoring memory, and with it."""
    nodes, task = case.snapshot.nodes, case.task
    room = np.full(len(rows), case.spec.replicas, np.int64)
    if task.gpu_count > 0:
        free = nodes.gpu_free[rows]
        usable = (nodes.gpu_state[rows] == GPU_PLACEABLE) & (case.allows[nodes.gpu_model[rows]] != 0)
        room = np.minimum(room, np.where(usable, free // task.gpu_milli, 0).sum(axis=1) // task.gpu_count)
    if task.cpu_milli > 0:
        room = np.minimum(room, nodes.cpu_free[rows] // task.cpu_milli)
    by_memory = nodes.memory_free[rows] // task.memory_bytes if task.memory_bytes > 0 else room
    return room, np.minimum(room, by_memory)


def _firsts(values: Ints) -> NDArray[np.bool_]:
    """Returns whether each value is the first of its kind."""
    firsts = np.zeros(len(values), np.bool_)
    firsts[np.unique(values, return_index=True)[1]] = True
    return firsts


def _divisible(case: GangProblem, candidates: CandidateIndex, costs: Floats, groups: Ints) -> Ints:
    """Returns the rows to divide a gang among within the bound of work; none if the bound is too low.

    Returns all rows that fit, or, to pack, those of whole racks: first the racks that can hold most of the gang, of
    equals the cheapest.
    """
    rows = np.flatnonzero(np.isfinite(costs))
    replicas, levels, states = case.spec.replicas, groups.shape[1] + 1, candidates.state_numbers(rows)
    weighed, room = _room(case, rows)
    dividing = levels * (room * replicas + _STEPS_OF_A_CELL * (replicas + 1))
    weighing = _STEPS_OF_A_REPLICA * weighed
    if dividing.sum() + weighing[_firsts(states)].sum() <= case.work_most:
        return rows
    if case.spec.locality is Locality.SPREAD:
        return rows[:0]
    rank, first_w = case.snapshot.nodes.rank[rows], costs[rows]
    rack = groups[rows, -1] if levels > 1 else rank
    order = np.lexsort([rank, first_w, rack])
    begins = np.flatnonzero(np.diff(rack[order], prepend=-1))
    sizes = np.diff(begins, append=len(order))
    # How the gang would fill each rack alone, its cheapest nodes first, at the price of their first replica.
    before = np.cumsum(room[order]) - room[order]
    before -= np.repeat(before[begins], sizes)
    filled = np.minimum(room[order], np.maximum(0, replicas - before))
    held = np.add.reduceat(filled, begins)
    cost_w = np.add.reduceat(filled * first_w[order], begins)
    names = rack[order][begins]
    racks = np.lexsort([names, cost_w, -held])
    # Nodes in the same state are evaluated once, which counts for the first rack that has one.
    in_turn = np.concatenate([order[begins[one] : begins[one] + sizes[one]] for one in racks])
    work = (dividing + weighing)[in_turn] - np.where(_firsts(states[in_turn]), 0, weighing[in_turn])
    ends = np.cumsum(sizes[racks]) - 1
    kept = np.isin(rack, names[racks[np.cumsum(work)[ends] <= case.work_most]])
    return rows[kept] if int(room[kept].sum()) >= replicas else rows[:0]


class Gang:
    """One workload during placement: replicas that each node is still to receive, and the cost of the next one."""

    def __init__(self, case: GangProblem, candidates: CandidateIndex, kind: int) -> None:
        """Prepares the division; expects `candidates` up to date, and that all replicas are known to fit."""
        snapshot = case.snapshot
        self._case, self._candidates, self._kind = case, candidates, kind
        self._rank = snapshot.nodes.rank
        self._counted = _boundaries(case.spec.locality, case.spec.replicas)
        self._groups = snapshot.places.codes()
        # Each level of the network, with the nodes themselves as the innermost.
        self._levels = [*self._groups.T, np.arange(len(snapshot.names))]
        self._tallies = [np.zeros(int(level.max()) + 1, np.int64) for level in self._levels]
        self._left = self._division()
        # The first replica opens a place at every level, wherever it goes, and shares none.
        self._opened = False

    def _division(self) -> Ints | None:
        """Returns replicas by row; None if dividing even among part of the nodes would take too long."""
        costs = self._candidates.node_costs(self._kind)
        rows = _divisible(self._case, self._candidates, costs, self._groups)
        if not len(rows):
            return None
        # By place and then by name, so that the nodes of a place are adjacent and ties are resolved alike.
        rows = rows[np.lexsort([self._rank[rows], *self._groups[rows].T[::-1]])]
        counts = np.zeros(len(rows), np.int64)
        table = self._candidates.replica_costs(self._kind, rows, self._case.spec.replicas)
        divide_replicas(table, self._groups[rows], self._case.locality_w * self._counted, counts)
        left = np.zeros(len(self._rank), np.int64)
        left[rows] = counts
        return left

    def _added_boundaries(self) -> Floats:
        """Returns the boundaries that the next replica adds on each node (N,)."""
        added = np.zeros(len(self._rank))
        if self._opened:
            steps = np.diff(self._counted)
            for level, tally in zip(self._levels, self._tallies, strict=True):
                added += steps[tally[level]]
        return added

    def _cheapest(self, costs: Floats, most: int) -> list[int]:
        """Returns the `most` rows of least finite cost; of equals, the lowest rank first."""
        rows = np.flatnonzero(np.isfinite(costs))
        if len(rows) > most:
            rows = rows[costs[rows] <= np.partition(costs[rows], most - 1)[most - 1]]
        found: list[int] = rows[np.lexsort([self._rank[rows], costs[rows]])][:most].tolist()
        return found

    def place_next(self, most: int) -> list[NodeCandidate]:
        """Places the next replica; returns its candidate, then the cheapest others, each with the term as its last."""
        added = self._added_boundaries()
        costs = self._candidates.node_costs(self._kind) + self._case.locality_w * added
        chosen = self._cheapest(costs if self._left is None else np.where(self._left > 0, costs, np.inf), 1)[0]
        others = [row for row in self._cheapest(costs, most) if row != chosen]
        rows = np.array([chosen, *others][:most], np.int64)
        self._place_replica(chosen)
        found = zip(self._candidates.candidates_on(self._kind, rows), added[rows].tolist(), strict=True)
        return [one._replace(terms=(*one.terms, boundaries)) for one, boundaries in found]

    def _place_replica(self, row: int) -> None:
        """Records that the next replica is placed on a row."""
        self._opened = True
        if self._left is not None:
            self._left[row] -= 1
        for level, tally in zip(self._levels, self._tallies, strict=True):
            tally[level[row]] += 1
