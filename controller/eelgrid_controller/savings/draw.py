"""The watts of nodes as if certain work, and what others hold there, were all that runs on them.

Owns the sums of that work by node and GPU. Must not know whose plan it is, nor which work
counts. The model is `eelgrid_kernels.node_power`, the planner's own (docs/explanation/placement.md).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from eelgrid_controller.ledger import NodeRecord
from eelgrid_controller.snapshot import Mirror, Snapshot
from eelgrid_kernels import GPU_ABSENT, GPU_WHOLE_MILLI, Nodes, node_power

__all__ = ["Draw", "Place"]


class Place(NamedTuple):
    """Where a replica stands and what it holds of each GPU there."""

    node_name: str
    gpu_uuids: tuple[str, ...]
    gpu_milli: int


class Draw:
    """Of the nodes of a mirror; their records say what others hold."""

    def __init__(self, mirror: Mirror, records: Mapping[str, NodeRecord]) -> None:
        self.power_w = 0.0
        self._mirror, self._records = mirror, records
        # Milli-CPU, and thousandths by UUID, never 0.
        self._cpu_milli: dict[str, int] = {}
        self._gpu_milli: dict[str, dict[str, int]] = {}
        self._node_w = np.zeros(0)
        self._snapshot: Snapshot | None = None
        self._arrays = (np.zeros(0, np.int64), np.zeros((0, 0), np.int64))
        self._nodes: Nodes
        self._stale: set[str] = set()
        self.settle()

    def shift(self, place: Place, cpu_milli: int, sign: int) -> None:
        """Counts a replica in or out, by the sign."""
        name = place.node_name
        self._stale.add(name)
        self._cpu_milli[name] = self._cpu_milli.get(name, 0) + sign * cpu_milli
        held = self._gpu_milli.setdefault(name, {})
        for uuid in place.gpu_uuids:
            left = held.get(uuid, 0) + sign * place.gpu_milli
            if left:
                held[uuid] = left
            else:
                held.pop(uuid, None)

    def turned(self, name: str) -> None:
        """A node is another than it was."""
        self._stale.add(name)

    def gpus_w(self, place: Place) -> Iterator[tuple[float, float]]:
        """Idle and full watts of each GPU of a place that is still there."""
        snapshot, row = self._mirror.snapshot(), self._mirror.row(place.node_name)
        uuids, nodes = snapshot.devices[row].uuids, snapshot.nodes
        for slot in [uuids.index(uuid) for uuid in place.gpu_uuids if uuid in uuids]:
            if nodes.gpu_state[row, slot] != GPU_ABSENT:
                yield float(nodes.gpu_idle_w[row, slot]), float(nodes.gpu_busy_w[row, slot])

    def settle(self) -> None:
        """Brings `power_w` up to date, after the mirror."""
        snapshot = self._mirror.snapshot()
        if snapshot is not self._snapshot:
            self._take(snapshot)
        for name in self._stale:
            self._weigh(name, snapshot)
        self._stale.clear()
        self.power_w = float(self._node_w.sum())

    def _take(self, snapshot: Snapshot) -> None:
        shape = snapshot.nodes.gpu_free.shape
        cpu_free, gpu_free = self._arrays
        if gpu_free.shape != shape:
            # Only by nodes that come: whole blocks at a time are not worth the words.
            rows = len(self._node_w)
            cpu_free, gpu_free = np.zeros(shape[0], np.int64), np.zeros(shape, np.int64)
            cpu_free[:rows] = self._arrays[0]
            gpu_free[:rows, : self._arrays[1].shape[1]] = self._arrays[1]
            self._node_w = np.concatenate([self._node_w, np.zeros(shape[0] - rows)])
            self._arrays = cpu_free, gpu_free
            self._stale.update(snapshot.names[rows:])
        views = cpu_free.view(), gpu_free.view()
        for view in views:
            view.flags.writeable = False  # as the kernel was compiled for
        self._nodes = snapshot.nodes._replace(cpu_free=views[0], gpu_free=views[1])
        self._snapshot = snapshot

    def _weigh(self, name: str, snapshot: Snapshot) -> None:
        record, row = self._records[name], self._mirror.row(name)
        others, held = record.others, self._gpu_milli.get(name, {})
        cpu_free, gpu_free = self._arrays
        cpu_free[row] = max(0, record.inventory.cpu_milli - others.cpu_milli - self._cpu_milli.get(name, 0))
        free = [GPU_WHOLE_MILLI - held.get(uuid, 0) for uuid in snapshot.devices[row].uuids]
        if others.gpu_count:  # the highest indexes of what is not held, as the ledger takes it
            for slot in [slot for slot, milli in enumerate(free) if milli == GPU_WHOLE_MILLI][-others.gpu_count :]:
                free[slot] = 0
        gpu_free[row, : len(free)] = free
        self._node_w[row] = node_power(self._nodes, row)
