"""How the replicas of one workload stand to each other: near or apart, as it asked.

Owns the term `topology` of a cost, the division of a gang among nodes and the
decision for such a gang. Must not know events or words. What a replica costs on
a node is eelgrid_kernels.placement's to say.

Theory. Zones, switches, racks and nodes are a tree. To pack costs locality_w
for each place used beyond the first, at every level: a further node in the rack
one unit, the first node of another rack two. To spread costs locality_w for each
pair of replicas that share a place, at every level. Both are sums over the tree
of a price of how many replicas a place holds, and so are watts, since what
replicas cost on one node does not depend on other nodes. The cheapest division
is therefore found exactly (eelgrid_kernels.gang), and it exists whenever there
is room for all. Past WORK_MOST, packing looks among the most promising racks
alone, and spreading, or packing what these racks cannot hold, sends replicas one
by one to the node that is cheapest with the term; docs/topology.md measures both.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.events import EXPLAINED_REPLICAS_MOST
from eelgrid_controller.slots import best_linked
from eelgrid_controller.snapshot import Snapshot
from eelgrid_kernels import (
    CANDIDATES_MOST,
    CONSTRAINTS,
    FITS,
    GPU_PLACEABLE,
    GPU_SLOTS_MOST,
    Board,
    Choice,
    Prices,
    Task,
    best_candidates,
    divide,
)
from eelgrid_protos.messages import (
    Candidate,
    CostTerm,
    Locality,
    Placement,
    Removal,
    ReplicaExplanation,
    Weights,
    WorkloadSpec,
)

__all__ = ["WORK_MOST", "together", "wishes"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_TERMS = ("power", "fragmentation", "stranding", "topology")
_NO_ROWS = np.zeros(0, np.int64)
# Steps of dividing, some 50 ms: a gang of 64 on 1,213 empty nodes of 8 GPUs takes 9 million.
WORK_MOST = 10_000_000
# Counted besides: a cell of the table of divisions, which is 8 bytes; a node weighed, which takes about 1 us.
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
    """What is to be placed where: a snapshot, and its board for this task."""

    snapshot: Snapshot
    spec: WorkloadSpec
    weights: Weights
    task: Task
    allows: Ints
    board: Board
    choice: Choice
    work_most: int

    def weigh(self, snapshot: Snapshot, rows: Ints, board: Board) -> int:
        """Weighs these rows of a snapshot anew into a board and fills the choice; how many nodes fit."""
        weights = self.weights
        prices = Prices(float(weights.power), float(weights.fragmentation_w), float(weights.stranding_w))
        nodes, mix, fragments = snapshot.nodes, snapshot.mix, snapshot.fragments
        call = (self.task, self.allows, prices, rows, board, self.choice)
        return int(best_candidates(nodes, mix, fragments, *call))


def _room(case: Case, rows: Ints) -> Ints:
    """How many replicas each of these rows can hold, counted no further than asked."""
    nodes, task = case.snapshot.nodes, case.task
    room = np.full(len(rows), case.spec.replicas, np.int64)
    if task.gpu_count > 0:
        free = nodes.gpu_free[rows]
        usable = (nodes.gpu_state[rows] == GPU_PLACEABLE) & (case.allows[nodes.gpu_model[rows]] != 0)
        room = np.minimum(room, np.where(usable, free // task.gpu_milli, 0).sum(axis=1) // task.gpu_count)
    for free, each in ((nodes.cpu_free, task.cpu_milli), (nodes.memory_free, task.memory_bytes)):
        if each > 0:
            room = np.minimum(room, free[rows] // each)
    return room


def _divisible(case: Case, rows: Ints, groups: Ints) -> Ints:
    """The rows to divide a gang among within the bound of work; none where that would not do.

    All of them, or, to pack, whole racks: first those that can hold most of the gang, of these the cheapest.
    """
    replicas, levels = case.spec.replicas, groups.shape[1] + 1
    room = _room(case, rows)
    work = room * (_STEPS_OF_A_NODE + replicas * levels) + _STEPS_OF_A_CELL * (replicas + 1) * levels
    if work.sum() <= case.work_most:
        return rows
    if case.spec.locality is Locality.SPREAD:
        return rows[:0]
    rank, first_w = case.snapshot.nodes.rank[rows], case.board.cost_w[rows]
    rack = groups[rows, -1] if levels > 1 else rank
    order = np.lexsort([rank, first_w, rack])
    begins = np.flatnonzero(np.diff(rack[order], prepend=-1))
    # How the gang would fill each rack alone, its cheapest nodes first, at the price of their first replica.
    before = np.cumsum(room[order]) - room[order]
    before -= np.repeat(before[begins], np.diff(begins, append=len(order)))
    filled = np.minimum(room[order], np.maximum(0, replicas - before))
    held = np.add.reduceat(filled, begins)
    cost_w = np.add.reduceat(filled * first_w[order], begins)
    names = rack[order][begins]
    racks = np.lexsort([names, cost_w, -held])
    within = np.cumsum(np.add.reduceat(work[order], begins)[racks]) <= case.work_most
    kept = np.isin(rack, names[racks[within]])
    return rows[kept] if int(room[kept].sum()) >= replicas else rows[:0]


def _costs(case: Case, rows: Ints) -> Floats:
    """What 0 to S replicas cost on each of the rows (N, S+1), infinite beyond its room."""
    trial = case.snapshot.copy()
    columns = [np.zeros(len(rows))]
    here = case.board
    while len(columns) <= case.spec.replicas:
        fits = here.verdict[rows] == FITS
        if not fits.any():
            break
        columns.append(np.where(fits, columns[-1] + here.cost_w[rows], np.inf))
        trial.take_each(here, case.task, case.allows, rows[fits])
        here = Board._make(array.copy() for array in here)
        case.weigh(trial.snapshot, rows[fits], here)
    return np.column_stack(columns)


class Gang:
    """One workload being placed: how many replicas each node is still to take, and what the next one costs there."""

    def __init__(self, case: Case) -> None:
        snapshot, replicas = case.snapshot, case.spec.replicas
        self._rank = snapshot.nodes.rank
        self._prices = _prices(case.spec.locality, replicas, case.weights.locality_w)
        # Of the next replica in a place that holds 0 to R - 1.
        self._added_w = np.diff(self._prices)
        self._groups = snapshot.places.codes()
        # Each level of the network, and the nodes themselves as the innermost.
        self._levels = [*self._groups.T, np.arange(len(snapshot.names))]
        self._tallies = [np.zeros(int(level.max()) + 1, np.int64) for level in self._levels]
        self._left = self._division(case)
        # The first replica opens a place at every level, wherever it goes, and shares none.
        self._opened = False

    def _division(self, case: Case) -> Ints | None:
        """Replicas by row; None where even a part of the nodes would take too long."""
        rows = _divisible(case, np.flatnonzero(case.board.verdict == FITS), self._groups)
        if not len(rows):
            return None
        # By place and then by name, so that a group stands together and equal divisions are one.
        rows = rows[np.lexsort([self._rank[rows], *self._groups[rows].T[::-1]])]
        counts = np.zeros(len(rows), np.int64)
        divide(_costs(case, rows), self._groups[rows], self._prices, counts)
        left = np.zeros(len(case.snapshot.names), np.int64)
        left[rows] = counts
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


def together(  # noqa: PLR0917  # what a decision is made of
    snapshot: Snapshot, spec: WorkloadSpec, weights: Weights, task: Task, allows: Ints, work_most: int = WORK_MOST
) -> tuple[tuple[Placement, ...], tuple[ReplicaExplanation, ...]]:
    """All replicas of a workload that minds where they stand to each other; there must be room for them."""
    count, terms = len(snapshot.names), len(_TERMS) - 1
    board = Board(np.zeros(count, np.int8), np.zeros(count, np.int64), np.zeros(count), np.zeros((count, terms)))
    choice = Choice(
        np.zeros(CANDIDATES_MOST, np.int64), np.zeros((CANDIDATES_MOST, GPU_SLOTS_MOST), np.int64),
        np.zeros(CANDIDATES_MOST), np.zeros((CANDIDATES_MOST, terms)), np.zeros(len(CONSTRAINTS), np.int64),
    )  # fmt: skip
    case = Case(snapshot, spec, weights, task, allows, board, choice, work_most)
    case.weigh(snapshot, np.arange(count), board)
    gang, trial = Gang(case), snapshot.copy()
    placements, explanation = [], []
    for replica in range(spec.replicas):
        terms_w = gang.terms_w()
        row = gang.next_row(board, terms_w)
        # The candidates by cost with the term, what the gang decided before all others.
        ranked = board._replace(cost_w=board.cost_w + terms_w)
        chosen_w = float(ranked.cost_w[row])
        ranked.cost_w[row] = -np.inf
        fitting = case.weigh(trial.snapshot, _NO_ROWS, ranked)
        choice.cost_w[0] = chosen_w
        found = _candidates(case, trial.snapshot, terms_w, min(fitting, CANDIDATES_MOST))
        slots = best_linked(trial.snapshot, task, row, choice.slots[0, : task.gpu_count].tolist())
        placements.append(
            Placement(
                replica=replica,
                node_name=snapshot.names[row],
                gpu_uuids=tuple(snapshot.devices[row].uuids[slot] for slot in slots),
                gpu_indexes=found[0].gpu_indexes,
            )
        )
        if replica < EXPLAINED_REPLICAS_MOST:
            named = zip(CONSTRAINTS, choice.removed.tolist(), strict=True)
            removals = tuple(Removal(constraint=name, nodes=nodes) for name, nodes in named if nodes)
            explanation.append(
                ReplicaExplanation(replica=replica, candidates=found, feasible_nodes=fitting, removals=removals)
            )
        gang.take(row)
        case.weigh(trial.snapshot, trial.take(row, slots, task), board)
    return tuple(placements), tuple(explanation)


def _candidates(case: Case, snapshot: Snapshot, topology_w: Floats, ranks: int) -> tuple[Candidate, ...]:
    """What the choice holds, best first, each with its terms."""
    choice, found = case.choice, []
    for rank, row in enumerate(choice.node[:ranks].tolist()):
        slots = best_linked(snapshot, case.task, row, choice.slots[rank, : case.task.gpu_count].tolist())
        terms_w = (*choice.terms_w[rank].tolist(), float(topology_w[row]))
        found.append(
            Candidate(
                node_name=snapshot.names[row],
                gpu_indexes=tuple(snapshot.devices[row].indexes[slot] for slot in slots),
                cost_w=float(choice.cost_w[rank]),
                terms=tuple(CostTerm(name=name, cost_w=term) for name, term in zip(_TERMS, terms_w, strict=True)),
            )
        )
    return tuple(found)
