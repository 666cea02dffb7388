"""Which GPUs of a chosen node a task takes, where their links differ.

Owns when the choice is by links at all: whole GPUs, on a node whose links are
known and unlike. Elsewhere the first that fit are taken, in the order of their
index. Must not know how a node is chosen; the choice is eelgrid_kernels.wiring's.
"""

from collections.abc import Sequence

import numpy as np

from eelgrid_controller.snapshot import Snapshot
from eelgrid_kernels import GPU_WHOLE_MILLI, Task, rewire

__all__ = ["best_linked"]


def best_linked(snapshot: Snapshot, task: Task, row: int, slots: Sequence[int]) -> Sequence[int]:
    """These GPUs of a node, or as many alike ones that are better linked; no cost changes."""
    links = snapshot.devices[row].links
    if links is None or not slots or task.gpu_milli != GPU_WHOLE_MILLI:
        return slots
    found = np.array(slots, np.int64)
    rewire(snapshot.nodes, row, links, found)
    linked: list[int] = found.tolist()
    return linked
