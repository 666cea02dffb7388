"""Headroom: how much more of the expected task mix would fit after a placement.

Owns the stream of typical tasks that is tried, and the largest classes, each as if it arrived alone. Must not know
moves or workloads: nodes and a mix in, counts out. The nodes that it fills are copies.

Theory: the number of free GPUs says little, since a share may be too small or its CPU used up. So tasks in the
proportions of the mix arrive until they have requested as much GPU as is free, each is placed where it is cheapest,
and those that fit are counted. The order is fixed (smooth weighted round robin), so that two placements of the same
work are tried with the same stream.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.state.demand import TaskClass
from eelgrid_kernels.arrays import CLOCK, Mix, MoveNodes, Nodes, ReplicaRequests, Task, TermPrices
from eelgrid_kernels.node_cost import GPU_PLACEABLE, place_tasks, replica_room

Ints = NDArray[np.int64]
# Tasks of a stream; at a microsecond for each node and class, a second for a thousand nodes.
STREAM_MOST = 4096
LARGEST_MOST = 4
_COUNT_MOST = 1_000_000
# Prices by which the stream is placed, whatever goal the moves have, so that headroom is always the same measure.
_ARRIVALS = TermPrices(power=1.0, fragmentation_w=80.0, stranding_w=200.0, block_w=0.0)


class Headroom(NamedTuple):
    """Number of typical tasks that fit, and the GPU share that they hold in thousandths."""

    tasks: int
    gpu_milli: int


def _own(nodes: Nodes) -> Nodes:
    """Returns a writable copy of what the kernels change, in one array type for their compiler."""
    return Nodes._make(np.array(array, order="C") for array in nodes)


def copy_mix(mix: Mix) -> Mix:
    """Returns a copy of the mix in one array type, whoever created it."""
    return Mix(
        cpu_milli=np.array(mix.cpu_milli, np.int64),
        gpu_count=np.array(mix.gpu_count, np.int64),
        gpu_milli=np.array(mix.gpu_milli, np.int64),
        allows=np.array(mix.allows, np.int64, order="C"),
        weight=np.array(mix.weight, np.int64),
        total=mix.total,
    )


def build_search_ground(
    nodes: Nodes, mix: Mix, prices: TermPrices, requests: ReplicaRequests, *, replicas: int = 0
) -> MoveNodes:
    """Returns working arrays for a search on a copy of the nodes, in which `replicas` replicas may move."""
    count, width = nodes.gpu_state.shape
    most = int(max(1, width, *requests.gpu_count.tolist()))
    return MoveNodes(
        nodes=_own(nodes),
        mix=copy_mix(mix),
        prices=TermPrices(*(float(price) for price in prices)),
        requests=requests,
        cost_w=np.zeros(count),
        board_w=np.zeros((len(requests.cpu_milli), count)),
        stamp=np.zeros(count, np.int64),
        clock=np.zeros(1, CLOCK),
        trail=np.zeros(4 * replicas + 4, np.int64),
        trail_w=np.zeros(4 * replicas + 4),
        slots=np.zeros((2, most), np.int64),
    )


def generate_task_stream(nodes: Nodes, mix: Mix) -> Ints:
    """Returns arriving classes (T,) in order: as much GPU as is free on open nodes, at most STREAM_MOST tasks."""
    placeable = (nodes.gpu_state == GPU_PLACEABLE) & nodes.available[:, None]
    free_milli = int(nodes.gpu_free[placeable].sum())
    asked = mix.gpu_count * mix.gpu_milli
    if not len(mix.weight) or not asked.any():
        return np.zeros(0, np.int64)
    credit = np.zeros(len(mix.weight), np.int64)
    chosen: list[int] = []
    while free_milli > 0 and len(chosen) < STREAM_MOST:
        credit += mix.weight
        kind = int(np.argmax(credit))
        credit[kind] -= mix.total
        chosen.append(kind)
        free_milli -= int(asked[kind])
    return np.array(chosen, np.int64)


def measure_headroom(nodes: Nodes, mix: Mix, kinds: Ints) -> Headroom:
    """Measures how much of a stream of classes (T,) fits on these nodes."""
    asked = mix.gpu_count * mix.gpu_milli
    requests = ReplicaRequests(
        cpu_milli=np.array(mix.cpu_milli, np.int64),
        # The mix does not include memory.
        memory_bytes=np.zeros(len(mix.weight), np.int64),
        gpu_count=np.array(mix.gpu_count, np.int64),
        gpu_milli=np.array(mix.gpu_milli, np.int64),
        allows=np.array(mix.allows.T, np.int64, order="C"),
    )
    accepted = np.zeros(len(kinds), np.int64)
    if len(kinds):
        place_tasks(build_search_ground(nodes, mix, _ARRIVALS, requests), kinds, accepted)
    return Headroom(int(accepted.sum()), int((accepted * asked[kinds]).sum()))


def select_largest_classes(counts: Mapping[TaskClass, int]) -> tuple[TaskClass, ...]:
    """Returns, for each of the largest sizes in GPUs ever requested, the most frequent class of that size."""
    sizes: dict[int, TaskClass] = {}
    for task, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        size = task.gpu_count * task.gpu_milli
        if size:
            sizes.setdefault(size, task)
    return tuple(sizes[size] for size in sorted(sizes, reverse=True)[:LARGEST_MOST])


def count_fitting_tasks(nodes: Nodes, models: Mapping[str, int], task: TaskClass, most: int = _COUNT_MOST) -> int:
    """Returns how many tasks of one class fit at once, counted up to `most`, if nothing else arrives."""
    allowed = [not task.gpu_models or model in task.gpu_models for model in models] or [True]
    wanted = Task(task.cpu_milli, 0, task.gpu_count, task.gpu_milli)
    return int(replica_room(nodes, wanted, np.array(allowed, np.int64), most))
