"""Which GPUs of a chosen node a task takes, where their links differ.

Owns when the choice is by links at all: whole GPUs, on a node whose links are
known and unlike. Elsewhere the first that fit are taken, in the order of their
index. Must not know how a node is chosen; the choice is eelgrid_kernels.wiring's.
"""

from eelgrid_controller.snapshot import Snapshot
from eelgrid_kernels import CANDIDATES_MOST, GPU_WHOLE_MILLI, Choice, Task, rewire

__all__ = ["choose_slots"]


def choose_slots(snapshot: Snapshot, task: Task, choice: Choice, fitting: int) -> None:
    """Exchanges the GPUs of each candidate for alike ones that are better linked, in place; no cost changes."""
    if task.gpu_count == 0 or task.gpu_milli != GPU_WHOLE_MILLI:
        return
    for rank in range(min(fitting, CANDIDATES_MOST)):
        row = int(choice.node[rank])
        links = snapshot.devices[row].links
        if links is not None:
            rewire(snapshot.nodes, row, links, choice.slots[rank, : task.gpu_count])
