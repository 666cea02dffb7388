"""Drawn mixes: task lists made of a published list's tasks, in proportions that a seed draws.

Owns the proportions and how a list is drawn from them. Must not know policies or how a run is made.

Theory: figures of six lists say how a policy does on these six. Here each of four proportions is uniform in a range:

    cpu_only     of all tasks, those without GPU                     0 to 60 %
    several      of the GPU tasks, those that ask for several GPUs   0 to 50 %
    shared       of the tasks with one GPU, those that ask for a share of it   0 to 100 %
    constrained  of the GPU tasks, those that name models            0 to 40 %

and each task is one of the default list of its sort, drawn with replacement: what one
task asks for stays what some task asked for. The models that a task names are those of
a task with as many GPUs in the list gpuspec33. As many tasks are drawn as the default list has.
Mix `i` of a seed depends on the seed and on `i` alone.

Source: openb 2023 (Weng et al., USENIX ATC'23), whose own variants change one proportion at a time.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from eelgrid_controller.replay.csv_reader import TraceMalformed
from eelgrid_controller.replay.openb import TraceNode, TraceTask
from eelgrid_controller.replay.openb_protocol import TraceArrays, build_trace
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

SEEDS_APART = 1000  # first arrivals of two seeds of mixes
BASE, NAMING = "default", "gpuspec33"  # the lists that tasks and named models are drawn from
CPU_ONLY_MOST, SEVERAL_MOST, SHARED_MOST, CONSTRAINED_MOST = 0.6, 0.5, 1.0, 0.4


class Proportions(NamedTuple):
    """What a mix is drawn by, each from 0 to 1."""

    cpu_only: float  # of all tasks
    several: float  # of the GPU tasks
    shared: float  # of the tasks with one GPU
    constrained: float  # of the GPU tasks


class TaskPools(NamedTuple):
    """Tasks of the published lists by sort, and the sets of models that tasks name, by their number of GPUs."""

    cpu_only: Sequence[TraceTask]
    several: Sequence[TraceTask]
    shared: Sequence[TraceTask]
    whole: Sequence[TraceTask]
    named: dict[int, list[tuple[str, ...]]]
    tasks: int  # of a drawn list


def build_pools(base: Sequence[TraceTask], naming: Sequence[TraceTask]) -> TaskPools:
    """The tasks to draw from; raises TraceMalformed where a sort is missing."""
    one = [task for task in base if task.gpu_count == 1]
    sorts = {
        "without GPU": [task for task in base if not task.gpu_count],
        "with several GPUs": [task for task in base if task.gpu_count > 1],
        "with a share of a GPU": [task for task in one if task.gpu_milli < GPU_MILLI_WHOLE],
        "with one whole GPU": [task for task in one if task.gpu_milli == GPU_MILLI_WHOLE],
    }
    for sort, found in sorts.items():
        if not found:
            raise TraceMalformed(f"trace {BASE}", f"has no task {sort} to draw", "give the published list")
    named: dict[int, list[tuple[str, ...]]] = {}
    for task in naming:
        if task.gpu_models:
            named.setdefault(task.gpu_count, []).append(task.gpu_models)
    return TaskPools(*sorts.values(), named, len(base))


def draw_proportions(seed: int, number: int) -> Proportions:
    """Those of the mix of that number."""
    drawn = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, number)))).random(4)
    most = (CPU_ONLY_MOST, SEVERAL_MOST, SHARED_MOST, CONSTRAINED_MOST)
    return Proportions(*(float(share * limit) for share, limit in zip(drawn, most, strict=True)))


def draw_tasks(pools: TaskPools, proportions: Proportions, seed: int, number: int) -> tuple[TraceTask, ...]:
    """The list of the mix of that number, each task by a name of its own."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, number, 1))))
    drawn = []
    for i, (sort, which, naming, name) in enumerate(generator.random((pools.tasks, 4)).tolist()):
        pool, has_gpu = _pool(pools, proportions, sort)
        task = pool[int(which * len(pool))]
        named = pools.named.get(task.gpu_count, []) if has_gpu and naming < proportions.constrained else []
        models = named[int(name * len(named))] if named else ()
        drawn.append(replace(task, name=f"task-{i:05d}", gpu_models=models))
    return tuple(drawn)


def draw_mix(nodes: tuple[TraceNode, ...], pools: TaskPools, seed: int, number: int) -> TraceArrays:
    """The mix of that number on a fleet."""
    return build_trace(f"mix-{number}", nodes, draw_tasks(pools, draw_proportions(seed, number), seed, number))


def _pool(pools: TaskPools, proportions: Proportions, sort: float) -> tuple[Sequence[TraceTask], bool]:
    """The pool that a number from 0 to 1 falls to, and whether its tasks have a GPU."""
    if sort < proportions.cpu_only:
        return pools.cpu_only, False
    place = (sort - proportions.cpu_only) / (1.0 - proportions.cpu_only)
    if place < proportions.several:
        return pools.several, True
    place = (place - proportions.several) / (1.0 - proportions.several)
    return (pools.shared if place < proportions.shared else pools.whole), True
