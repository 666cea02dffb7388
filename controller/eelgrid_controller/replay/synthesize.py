"""A trace with the openb trace's marginals, for machines without the trace.

Owns the marginals (marginals.json: how often each node shape and each task
class occurs in the published node list and `default` task list) and how rows
are drawn from them. Must not know files elsewhere, the network or a clock: the
seed is an argument, and equal seeds give equal traces.

Theory: counts are restated exactly, so capacity, demand, the size of every
class and the mix of models equal the published trace's; only the order of
arrival is drawn. What depends on order (which task meets a full cluster) is
therefore like the published trace's, not equal to it: what uses a generated
trace says so. Quality-of-service classes are left out.
"""

import json
import random
from importlib import resources

from eelgrid_controller.replay.openb import NodeRow, TaskRow
from eelgrid_protos.quantities import MIB

__all__ = ["SEED", "synthesize"]

SEED = 42


def synthesize(seed: int = SEED) -> tuple[tuple[NodeRow, ...], tuple[TaskRow, ...]]:
    """All 1,213 nodes and 8,152 tasks, named as in the trace, in an order drawn from the seed."""
    marginals = json.loads(resources.files(__package__).joinpath("marginals.json").read_text("utf-8"))
    order = random.Random(seed)  # noqa: S311 - a shuffle, not a secret
    shapes = [shape for count, *shape in marginals["nodes"] for _ in range(count)]
    classes = [task for count, *task in marginals["tasks"] for _ in range(count)]
    order.shuffle(shapes)
    order.shuffle(classes)
    nodes = tuple(
        NodeRow(
            name=f"openb-node-{index:04d}",
            cpu_milli=cpu_milli,
            memory_bytes=memory_mib * MIB,
            gpu_count=gpus,
            gpu_model=model,
        )
        for index, (cpu_milli, memory_mib, gpus, model) in enumerate(shapes)
    )
    tasks = tuple(
        TaskRow(
            name=f"openb-pod-{index:04d}",
            cpu_milli=cpu_milli,
            memory_bytes=memory_mib * MIB,
            gpu_count=gpus,
            gpu_milli=gpu_milli,
        )
        for index, (cpu_milli, memory_mib, gpus, gpu_milli) in enumerate(classes)
    )
    return nodes, tasks
