"""Fleets of a few equal nodes with a few kinds of task, as most clusters are.

Owns which fleets and mixes. Must not know policies or how a run is made.

The openb fleet has 1,213 nodes of seven models, and its lists have dozens of kinds of task, so that a policy can be
good on all of them and poor where all tasks are alike. Here each of the commonest kinds of node of the list stands
alone, in fleets of NODES of them, with tasks of each of the MIXES; those that no node of it holds are left out.
Source of the nodes: openb 2023 (Weng et al., USENIX ATC'23).
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from eelgrid_controller.replay.openb import TraceNode, TraceTask
from eelgrid_controller.replay.openb_protocol import TraceArrays, build_trace
from eelgrid_protos.quantities import MIB

COMMONEST = 3  # kinds of node
NODES = (2, 4, 8)
# Of a hundred tasks so many ask for: milli-CPU, GPUs, milli of each GPU.
MIXES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "half": ((100, 4_000, 1, 500),),
    "third": ((100, 4_000, 1, 300),),
    "one": ((100, 6_000, 1, 1000),),
    "half-one": ((50, 4_000, 1, 500), (50, 8_000, 1, 1000)),
    "cpu-one": ((60, 4_000, 0, 0), (40, 8_000, 1, 1000)),
    "all": ((40, 4_000, 1, 250), (40, 8_000, 1, 1000), (15, 16_000, 2, 1000), (5, 64_000, 8, 1000)),
}


def _shape(node: TraceNode) -> tuple[str, int, int, int]:
    return node.gpu_model, node.gpu_count, node.cpu_milli, node.memory_bytes


def _list_tasks(mix: str) -> tuple[TraceTask, ...]:
    return tuple(
        TraceTask(name=f"task-{place}-{i:03d}", cpu_milli=cpu, memory_bytes=MIB, gpu_count=count, gpu_milli=milli)
        for place, (share, cpu, count, milli) in enumerate(MIXES[mix])
        for i in range(share)
    )


def build_alike_traces(nodes: Sequence[TraceNode]) -> Iterator[TraceArrays]:
    """Each fleet with each mix, named model, GPUs, nodes and mix."""
    with_gpu = [node for node in nodes if node.gpu_count]
    for shape, _ in Counter(map(_shape, with_gpu)).most_common(COMMONEST):
        alike = [node for node in with_gpu if _shape(node) == shape]
        for count in NODES:
            for mix in MIXES:
                tasks = _list_tasks(mix)
                if len(alike) >= count and max(task.gpu_count for task in tasks) <= alike[0].gpu_count:
                    yield build_trace(f"{shape[0]}-{shape[1]}x{count}-{mix}", tuple(alike[:count]), tasks)
