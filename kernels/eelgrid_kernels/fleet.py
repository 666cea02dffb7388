"""A fleet under one policy: tasks come and go, nodes fail and return.

Owns the run's arrays behind five verbs, for whoever plays a trace or asks "what
if". Must not know time, names of nodes or what a task is for.

    fleet = Fleet(columns, specs, typical, rank, MIX, np.array([0.0, 1000.0]))
    node, slots = fleet.place(spec, moment)     # node -1: it fits nowhere
    fleet.release(node, spec, slots)            # exactly as if it had never come
"""
# ruff: noqa: PLR0917 (the columns of a run come one by one, as kernels take them)

from collections.abc import Sequence
from typing import Any

import numpy as np

from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.best import decide, tend
from eelgrid_kernels.course import FleetColumns, SpecColumns, prepare
from eelgrid_kernels.peer_arrays import CPU, GPU, MEMORY, NODE_SHAPE, STATE, WIDTH, Run
from eelgrid_kernels.states import set_available, shift

__all__ = ["Fleet"]


def _copied(value: Any) -> Any:
    """Arrays of a tree of tuples, copied."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return type(value)(*map(_copied, value)) if isinstance(value, tuple) else value


class Fleet:
    """Nodes by number, as the columns list them; tasks by the number of their spec."""

    def __init__(
        self,
        columns: FleetColumns,
        specs: SpecColumns,
        typical: tuple[Ints, Ints],
        rank: Ints,
        policy: int,
        weights: Floats,
    ) -> None:
        self._run = prepare(columns, specs, typical, rank, policy, weights)
        self._turn = 0

    def place(self, spec: int, moment: int = 0) -> tuple[int, tuple[int, ...]]:
        """The node and its GPUs for a task, which it then holds; node -1 if it fits nowhere.

        moment numbers the decisions of RANDOM; no other policy heeds it.
        """
        node = int(decide(self._run, spec, moment))
        if node < 0:
            return node, ()
        return node, tuple(slot for slot in self._run.taken.tolist() if slot >= 0)

    def put(self, node: int, spec: int, slots: Sequence[int]) -> None:
        """Books a task on a node and GPUs chosen elsewhere; the caller knows that it fits."""
        shift(self._run, node, spec, np.array(slots, np.int64), -1)

    def release(self, node: int, spec: int, slots: Sequence[int]) -> None:
        """Takes a task off the node and GPUs that it was placed on; unavailable nodes let go, too."""
        shift(self._run, node, spec, np.array(slots, np.int64), 1)

    def set_available(self, node: int, available: bool) -> None:
        """Whether the node takes new tasks; what it holds stays and draws its watts until it is released."""
        set_available(self._run, node, available)

    def tend(self, most: int) -> None:
        """Idle work, bounded: one kind of task, each in turn, reads at most so many changes ahead of its next task.

        It changes no decision, only how long the next one of a rare kind takes.
        """
        tend(self._run, self._turn, most)
        self._turn = (self._turn + 1) % max(1, len(self._run.kinds))

    @property
    def power_w(self) -> float:
        """Modelled watts of all nodes."""
        return float(self._run.power_w[0])

    def free(self, node: int) -> tuple[int, int, tuple[int, ...]]:
        """CPU milli, memory MiB and milli of each GPU slot that nobody holds."""
        run = self._run
        row = run.states[run.nodes[node, STATE]]
        width = int(run.shapes[run.nodes[node, NODE_SHAPE], WIDTH])
        return int(row[CPU]), int(run.nodes[node, MEMORY]), tuple(row[GPU : GPU + width].tolist())

    @property
    def run(self) -> Run:
        """The arrays, for the kernels of eelgrid_kernels.best."""
        return self._run

    def copy(self) -> "Fleet":
        """A fleet in the same state that goes its own way."""
        other = object.__new__(Fleet)
        other._run, other._turn = _copied(self._run), self._turn
        return other
