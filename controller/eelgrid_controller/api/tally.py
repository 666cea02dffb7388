"""Sums over all nodes, kept up to date node by node.

Owns what each node adds to them. Must not know telemetry.

Theory. A summary is asked for several times a second and few nodes change in between, so a node
is counted anew when the cluster's mirror lists its row among the changed (`Snapshot.changes`, whose
list is another one whenever everything is stale: a node joined, or another state stands behind it).
Sums are of whole numbers: what is taken back is what was added, and nothing drifts.
"""

from collections import Counter
from typing import NamedTuple

from eelgrid_controller.core import Core
from eelgrid_controller.state import NodeRecord
from eelgrid_protos.messages import NodeState

__all__ = ["Tally"]


class _Part(NamedTuple):
    """What one node adds; (model, GPUs, milli-GPU held) for each of its models."""

    is_lost: bool
    cpu_milli: int
    allocated_cpu_milli: int
    models: tuple[tuple[str, int, int], ...]


class Tally:
    """Sums of one controller's nodes as they are now; `follow` before they are read again."""

    def __init__(self, core: Core) -> None:
        snapshot, nodes = core.snapshot(), core.state.nodes
        self.lost = self.cpu_milli = self.allocated_cpu_milli = 0
        # By model; one of which no GPU is left is not there.
        self.gpus: Counter[str] = Counter()
        self.held_milli: Counter[str] = Counter()
        self._changes, self._read = snapshot.changes, len(snapshot.changes)
        self._parts = [_part(nodes[name]) for name in snapshot.names]
        for part in self._parts:
            self._add(part, 1)

    def follow(self, core: Core) -> bool:
        """Counts the nodes anew that changed since the last time; False where that cannot be told: begin anew."""
        snapshot, nodes = core.snapshot(), core.state.nodes
        if self._changes is not snapshot.changes:
            return False
        for row in set(snapshot.changes[self._read :]):
            self._add(self._parts[row], -1)
            self._parts[row] = _part(nodes[snapshot.names[row]])
            self._add(self._parts[row], 1)
        self._read = len(snapshot.changes)
        return True

    def _add(self, part: _Part, sign: int) -> None:
        self.lost += sign * part.is_lost
        self.cpu_milli += sign * part.cpu_milli
        self.allocated_cpu_milli += sign * part.allocated_cpu_milli
        for model, gpus, held_milli in part.models:
            self.gpus[model] += sign * gpus
            self.held_milli[model] += sign * held_milli
            if not self.gpus[model]:
                del self.gpus[model], self.held_milli[model]


def _part(record: NodeRecord) -> _Part:
    inventory, held = record.inventory, record.gpu_milli
    models: dict[str, tuple[int, int]] = {}
    for gpu in inventory.gpus:
        gpus, held_milli = models.get(gpu.model, (0, 0))
        models[gpu.model] = gpus + 1, held_milli + held.get(gpu.uuid, 0)
    return _Part(
        record.state is NodeState.LOST, inventory.cpu_milli, record.allocated_cpu_milli,
        tuple((model, gpus, held_milli) for model, (gpus, held_milli) in models.items()),
    )  # fmt: skip
