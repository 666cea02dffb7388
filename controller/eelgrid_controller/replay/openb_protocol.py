"""The protocol of the published openb comparison as arrays: tasks, fleet, watts, orders.

Tasks are classes (Specs) and every arrival is the number of its class. The tasks in order of their names are shuffled
by the seed. If they request less GPU than INFLATION_PERCENT of the fleet, tasks drawn uniformly with replacement follow
until the next would exceed it; if more, random ones are removed until the rest does not. The typical mix, which is all
that a policy may know beforehand, is the most frequent (CPU, GPU share, GPU count, models) that cover 95 % of the
trace's tasks. Draws are the raw words of PCG64, which numpy keeps the same in every version.

Source: Weng et al., USENIX ATC'23 (FGD), and its simulator; the watts, Lettich et al., CCGrid 2025 (arXiv 2412.17484),
where every CPU is priced as one product.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from eelgrid_controller.replay.csv_reader import TraceMalformed, TraceTooLarge
from eelgrid_controller.replay.openb import GPU_WATTS, NODE_LIST, TraceNode, TraceTask
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.engine_setup import COVERED_PERCENT
from eelgrid_protos.quantities import GPU_MILLI_WHOLE, MIB

INFLATION_PERCENT = 130
SEEDS = tuple(range(42, 52))  # those of the published results
ARRIVALS_MOST = 4_000_000
_SHUFFLE, _SAMPLE, _REMOVE, _NODES = range(4)  # each purpose draws from a stream of its own


class TaskSpecs(NamedTuple):
    """What a task of each class asks for."""

    cpu_milli: Ints  # (S,)
    memory_mib: Ints  # (S,)
    gpu_count: Ints  # (S,)
    gpu_milli: Ints  # (S,) of each GPU
    allows: Ints  # (S, M) 1 where the model may be used


class TraceFleet(NamedTuple):
    """The empty nodes; all GPUs of a node are of one model."""

    cpu_milli: Ints  # (N,)
    memory_mib: Ints  # (N,)
    gpu_count: Ints  # (N,)
    model: Ints  # (N,) index into the models, -1 without GPU
    idle_w: Floats  # (N,) of one GPU, 0 without
    busy_w: Floats  # (N,)

    @property
    def gpu_milli(self) -> int:
        """All GPU capacity."""
        return int(self.gpu_count.sum()) * GPU_MILLI_WHOLE


class TypicalMix(NamedTuple):
    """The mix that a policy may know; memory is of no account in it."""

    spec: Ints  # (C,) one class with this CPU, GPU and these models, whatever its memory
    weight: Ints  # (C,) tasks of the trace, not yet divided by their sum


class TraceArrays(NamedTuple):
    """A task list on a fleet, before any seed."""

    name: str
    specs: TaskSpecs
    task_spec: Ints  # (T,) class of each task, in order of the tasks' names
    fleet: TraceFleet
    models: tuple[str, ...]
    typical: TypicalMix

    @property
    def task_milli(self) -> Ints:
        """(S,) GPU that a task of each class asks for in all."""
        return self.specs.gpu_count * self.specs.gpu_milli


def build_trace(name: str, nodes: tuple[TraceNode, ...], tasks: tuple[TraceTask, ...]) -> TraceArrays:
    """Rows as arrays; classes are numbered in the order of what they ask for."""
    models = tuple(sorted({node.gpu_model for node in nodes if node.gpu_count}))
    fleet = _fleet(nodes, models)
    ordered = [_class(task) for task in sorted(tasks, key=lambda task: task.name)]
    kinds = sorted(set(ordered))
    number = {kind: spec for spec, kind in enumerate(kinds)}
    cpu_milli, gpu_milli, gpu_count, allowed, memory_mib = zip(*kinds, strict=True)
    specs = TaskSpecs(
        cpu_milli=np.array(cpu_milli, np.int64),
        memory_mib=np.array(memory_mib, np.int64),
        gpu_count=np.array(gpu_count, np.int64),
        gpu_milli=np.array(gpu_milli, np.int64),
        allows=np.array([[not names or m in names for m in models] for names in allowed], np.int64).reshape(
            len(kinds), len(models)
        ),
    )
    task_spec = np.array([number[kind] for kind in ordered], np.int64)
    if not (specs.gpu_count.any() and fleet.gpu_count.any()):
        raise TraceMalformed(f"trace {name}", "asks for no GPU, or its fleet has none", "give lists with GPUs")
    return TraceArrays(name, specs, task_spec, fleet, models, _typical(ordered, number))


_Class = tuple[int, int, int, tuple[str, ...], int]


def _class(task: TraceTask) -> _Class:
    """What a task asks for; the order of its models is of no account. Memory last: the mix leaves it out."""
    memory_mib = task.memory_bytes // MIB
    return task.cpu_milli, task.gpu_milli, task.gpu_count, tuple(sorted(task.gpu_models)), memory_mib


def _fleet(nodes: tuple[TraceNode, ...], models: tuple[str, ...]) -> TraceFleet:
    watts = [_watts(node) for node in nodes]
    return TraceFleet(
        cpu_milli=np.array([node.cpu_milli for node in nodes], np.int64),
        memory_mib=np.array([node.memory_bytes // MIB for node in nodes], np.int64),
        gpu_count=np.array([node.gpu_count for node in nodes], np.int64),
        model=np.array([models.index(node.gpu_model) if node.gpu_count else -1 for node in nodes], np.int64),
        idle_w=np.array([idle_w for idle_w, _ in watts], np.float64),
        busy_w=np.array([busy_w for _, busy_w in watts], np.float64),
    )


def _watts(node: TraceNode) -> tuple[float, float]:
    """Idle and full watts of each of its GPUs: its own where it brings some."""
    if not node.gpu_count:
        return 0.0, 0.0
    if node.gpu_idle_w is not None and node.gpu_full_w is not None:
        return node.gpu_idle_w, node.gpu_full_w
    if node.gpu_model not in GPU_WATTS:
        place = f"{NODE_LIST}, node {node.name}, column model"
        known = ", ".join(sorted(GPU_WATTS))
        raise TraceMalformed(place, f"{node.gpu_model!r} has no watts in this comparison", f"write one of {known}")
    return GPU_WATTS[node.gpu_model]


def _typical(ordered: list[_Class], number: dict[_Class, int]) -> TypicalMix:
    """The most frequent classes, memory left out, until they cover enough; equals in order of what they ask for."""
    counts = Counter(kind[:-1] for kind in ordered)
    any_memory = {kind[:-1]: spec for kind, spec in reversed(number.items())}
    chosen, weights, covered = [], [], 0
    for kind, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        chosen.append(any_memory[kind])
        weights.append(count)
        covered += count
        if 100 * covered >= COVERED_PERCENT * len(ordered):
            break
    return TypicalMix(np.array(chosen, np.int64), np.array(weights, np.int64))


def _bits(seed: int, purpose: int) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence((seed, purpose)))


def _shuffle(bits: np.random.PCG64, count: int) -> Ints:
    """A random order of `count` things."""
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64)


def arrival_order(trace: TraceArrays, seed: int) -> Ints:
    """(A,) the class of each task in order of arrival."""
    order = trace.task_spec[_shuffle(_bits(seed, _SHUFFLE), len(trace.task_spec))]
    demand, most = trace.task_milli, INFLATION_PERCENT * trace.fleet.gpu_milli // 100
    asked = int(demand[order].sum())
    if asked > most:
        thinned = _thin_order(order, demand, asked - most, _bits(seed, _REMOVE))
        if not demand[thinned].any():
            remedy = "give a larger fleet or smaller tasks"
            raise TraceMalformed(f"trace {trace.name}", "has tasks larger than all of its fleet", remedy)
        return thinned
    return np.concatenate((order, _sample_tasks(trace, most - asked, ARRIVALS_MOST - len(order), _bits(seed, _SAMPLE))))


def _thin_order(order: Ints, demand: Ints, excess: int, bits: np.random.PCG64) -> Ints:
    """The order without the fewest random tasks that ask for at least the excess."""
    victims = _shuffle(bits, len(order))
    gone = 1 + int(np.searchsorted(np.cumsum(demand[order[victims]]), excess))
    kept = np.ones(len(order), np.bool_)
    kept[victims[:gone]] = False
    return order[kept]


def _sample_tasks(trace: TraceArrays, room: int, most: int, bits: np.random.PCG64) -> Ints:
    """Tasks drawn from the trace, up to the one that would ask for more than the room."""
    drawn, demand, tasks, count = [], trace.task_milli, len(trace.task_spec), 0
    while True:
        # A word modulo the tasks favours some of them by one part in 2**44.
        batch = trace.task_spec[(bits.random_raw(4096) % np.uint64(tasks)).astype(np.int64)]
        total = np.cumsum(demand[batch])
        fitting = int(np.searchsorted(total, room, side="right"))
        drawn.append(batch[:fitting])
        count += fitting
        if fitting < len(batch):
            return np.concatenate(drawn)
        if count > most:
            raise TraceTooLarge(f"trace {trace.name}", f"needs over {ARRIVALS_MOST} tasks", "take a smaller fleet")
        room -= int(total[-1])


def node_order(trace: TraceArrays, seed: int) -> Ints:
    """(N,) the rank of each node among equals, the lowest first: one order for the whole run."""
    count = len(trace.fleet.gpu_count)
    rank = np.empty(count, np.int64)
    rank[_shuffle(_bits(seed, _NODES), count)] = np.arange(count)
    return rank
