"""The planner: where the replicas of one workload go, on one snapshot.

Owns the sequence of one decision: room for all replicas or none, then the
cheapest place for each in turn on a copy. Must not know events or words: it
returns a `Decision`, which core.py makes into events and explain.py into
sentences. The arithmetic is eelgrid_kernels.placement.

Theory: replicas are equal, so how many fit does not depend on the order or on
the cost; `replica_room` is exact and a workload that is begun can be finished.
A board of weighed nodes is kept for each recent kind of task, and only nodes
that changed since are weighed again; a planner without that memory decides the
same. There is no look-ahead and no reservation: smaller work may overtake
larger work that waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.events import EXPLAINED_REPLICAS_MOST
from eelgrid_controller.gang import WORK_MOST, together, wishes
from eelgrid_controller.slots import best_linked
from eelgrid_controller.snapshot import Snapshot
from eelgrid_kernels import (
    CANDIDATES_MOST,
    CONSTRAINTS,
    GPU_SLOTS_MOST,
    Board,
    Choice,
    Nodes,
    Prices,
    Task,
    best_candidates,
    replica_room,
)
from eelgrid_protos.messages import (
    Candidate,
    CostTerm,
    Placement,
    Removal,
    ReplicaExplanation,
    ResourceRequest,
    Weights,
    WorkloadSpec,
)

__all__ = ["TERMS", "Decision", "Planner"]

Ints = NDArray[np.int64]
TERMS = ("power", "fragmentation", "stranding")
# Bytes of a board for each node; boards are kept up to a sum.
_BOARD_BYTES = 41
_BOARDS_BYTES_MOST = 64 * 1024 * 1024
_BOARDS_MOST = 128
# Past this share of stale rows it is as cheap to weigh all.
_STALE_SHARE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The outcome for one workload: a place for every replica, or none and what stood in the way."""

    placements: tuple[Placement, ...]
    explanation: tuple[ReplicaExplanation, ...]
    # How many replicas there is room for, counted no further than asked.
    room: int
    # Nodes by first failing constraint, for the replica that found no place; empty when placed.
    removals: tuple[Removal, ...] = ()


@dataclass(slots=True)
class _Kept:
    board: Board
    era: int
    read: int


class _Call(NamedTuple):
    """The part of a kernel's arguments that stays the same for all replicas."""

    task: Task
    allows: Ints
    prices: Prices


def _task(request: ResourceRequest) -> Task:
    return Task(request.cpu_milli, request.memory_bytes, request.gpu_count, request.gpu_milli)


def _new_board(rows: int) -> Board:
    return Board(np.zeros(rows, np.int8), np.zeros(rows, np.int64), np.zeros(rows), np.zeros((rows, len(TERMS))))


class Planner:
    """Decides; its memory is a cache and changes no decision."""

    def __init__(self, *, gang_work_most: int = WORK_MOST) -> None:
        self._gang_work_most = gang_work_most
        self._kept: dict[tuple[Task, tuple[str, ...], Prices], _Kept] = {}
        self._choice = Choice(
            np.zeros(CANDIDATES_MOST, np.int64), np.zeros((CANDIDATES_MOST, GPU_SLOTS_MOST), np.int64),
            np.zeros(CANDIDATES_MOST), np.zeros((CANDIDATES_MOST, len(TERMS))), np.zeros(len(CONSTRAINTS), np.int64),
        )  # fmt: skip

    def decide(self, snapshot: Snapshot, spec: WorkloadSpec, weights: Weights) -> Decision:
        """All replicas or none."""
        task = _task(spec.request)
        prices = Prices(float(weights.power), float(weights.fragmentation_w), float(weights.stranding_w))
        call = _Call(task, snapshot.allows(spec.request.gpu_models), prices)
        board, rows = self._board(snapshot, (task, spec.request.gpu_models, prices))
        fitting = self._weigh(snapshot, call, rows, board)
        room = min(1, fitting)
        if spec.replicas > 1 and fitting:
            room = int(replica_room(snapshot.nodes, task, call.allows, spec.replicas))
        if room < spec.replicas:
            return self._no_room(snapshot, fitting, room)
        if wishes(spec, weights):
            gang = together(snapshot, spec, weights, task, call.allows, self._gang_work_most)
            return Decision(placements=gang[0], explanation=gang[1], room=room)
        first = self._place(snapshot, task, 0)
        placements, explanation = [first[0]], [self._explained(snapshot, 0, fitting)]
        if spec.replicas > 1:
            trial = snapshot.copy()
            board = Board._make(array.copy() for array in board)
            for replica in range(1, spec.replicas):
                rows = trial.take(*first[1:], task)
                fitting = self._weigh(trial.snapshot, call, rows, board)
                assert fitting, "replica_room is exact"
                first = self._place(trial.snapshot, task, replica)
                placements.append(first[0])
                if replica < EXPLAINED_REPLICAS_MOST:
                    explanation.append(self._explained(trial.snapshot, replica, fitting))
        return Decision(placements=tuple(placements), explanation=tuple(explanation), room=room)

    def _no_room(self, snapshot: Snapshot, fitting: int, room: int) -> Decision:
        explained = self._explained(snapshot, 0, fitting)
        return Decision(placements=(), explanation=(explained,), room=room, removals=explained.removals)

    def room_when_empty(self, nodes: Nodes, snapshot: Snapshot, spec: WorkloadSpec) -> tuple[int, tuple[Removal, ...]]:
        """How many replicas `nodes`, an emptied cluster, could hold, and what removes the others."""
        call = _Call(_task(spec.request), snapshot.allows(spec.request.gpu_models), Prices(0.0, 0.0, 0.0))
        rows = np.arange(len(snapshot.names))
        best_candidates(nodes, snapshot.mix, snapshot.fragments, *call, rows, _new_board(len(rows)), self._choice)
        return int(replica_room(nodes, call.task, call.allows, spec.replicas)), self._removals()

    def _board(self, snapshot: Snapshot, key: tuple[Task, tuple[str, ...], Prices]) -> tuple[Board, Ints]:
        """The board of this kind of task and the rows that must be weighed anew."""
        count, now = len(snapshot.names), len(snapshot.changes)
        kept = self._kept.pop(key, None)
        if kept is None or kept.era != snapshot.era:
            kept = _Kept(_new_board(count), snapshot.era, 0)
            rows = np.arange(count)
        else:
            stale = snapshot.changes[kept.read :]
            fresh = len(stale) * _STALE_SHARE <= count
            rows = np.array(sorted(set(stale)), np.int64) if fresh else np.arange(count)
        kept.read = now
        self._kept[key] = kept
        most = max(1, min(_BOARDS_MOST, _BOARDS_BYTES_MOST // (_BOARD_BYTES * max(1, count))))
        while len(self._kept) > most:
            del self._kept[next(iter(self._kept))]
        return kept.board, rows

    def _weigh(self, snapshot: Snapshot, call: _Call, rows: Ints, board: Board) -> int:
        nodes, mix, fragments = snapshot.nodes, snapshot.mix, snapshot.fragments
        fitting = int(best_candidates(nodes, mix, fragments, *call, rows, board, self._choice))
        for rank, row in enumerate(self._choice.node[: min(fitting, CANDIDATES_MOST)].tolist()):
            slots = self._choice.slots[rank, : call.task.gpu_count]
            slots[:] = best_linked(snapshot, call.task, row, slots.tolist())
        return fitting

    def _slots(self, rank: int, count: int) -> list[int]:
        slots: list[int] = self._choice.slots[rank, :count].tolist()
        return slots

    def _place(self, snapshot: Snapshot, task: Task, replica: int) -> tuple[Placement, int, Sequence[int]]:
        row = int(self._choice.node[0])
        slots = self._slots(0, task.gpu_count)
        devices = snapshot.devices[row]
        placement = Placement(
            replica=replica,
            node_name=snapshot.names[row],
            gpu_uuids=tuple(devices.uuids[slot] for slot in slots),
            gpu_indexes=tuple(devices.indexes[slot] for slot in slots),
        )
        return placement, row, slots

    def _removals(self) -> tuple[Removal, ...]:
        counts = self._choice.removed.tolist()
        return tuple(
            Removal(constraint=name, nodes=count) for name, count in zip(CONSTRAINTS, counts, strict=True) if count
        )

    def _explained(self, snapshot: Snapshot, replica: int, fitting: int) -> ReplicaExplanation:
        choice = self._choice
        candidates = []
        ranks = min(fitting, CANDIDATES_MOST)
        for rank, (row, cost_w, terms_w) in enumerate(
            zip(choice.node[:ranks].tolist(), choice.cost_w.tolist(), choice.terms_w.tolist(), strict=False)
        ):
            indexes = snapshot.devices[row].indexes
            slots = [slot for slot in choice.slots[rank].tolist() if slot >= 0]
            candidates.append(
                Candidate(
                    node_name=snapshot.names[row],
                    gpu_indexes=tuple(indexes[slot] for slot in slots),
                    cost_w=cost_w,
                    terms=tuple(CostTerm(name=name, cost_w=term) for name, term in zip(TERMS, terms_w, strict=True)),
                )
            )
        return ReplicaExplanation(
            replica=replica, candidates=tuple(candidates), feasible_nodes=fitting, removals=self._removals()
        )
