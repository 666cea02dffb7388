"""Slow, obvious twins of the kernels: the formulas of eelgrid_kernels.node_cost said once more, in plain Python.

Nothing here is clever: every class, GPU and node is looked at anew each time.
"""

import math
from dataclasses import dataclass, field, replace

VCPU_MILLI = 1000
PACKAGE_CORES = 16


@dataclass
class Gpu:
    model: int
    free: int
    idle_w: float
    busy_w: float
    partitioned: bool = False


@dataclass
class Node:
    cpu_capacity: int
    cpu_free: int
    memory_free: int
    # By slot; None is an empty slot.
    gpus: list[Gpu | None]
    available: bool = True
    # Order among equals.
    rank: int = 0


@dataclass
class Task:
    cpu_milli: int
    memory_bytes: int
    gpu_count: int
    gpu_milli: int
    models: set[int] | None = None

    def allows(self, gpu: Gpu) -> bool:
        return self.models is None or gpu.model in self.models


@dataclass
class Class:
    task: Task
    weight: int


@dataclass
class Found:
    node: int
    slots: list[int]
    cost_w: float
    terms_w: tuple[float, float, float]


@dataclass
class Result:
    candidates: list[Found]
    feasible: int
    removed: dict[str, int] = field(default_factory=dict)


def package_power(capacity_milli: int, free_milli: int) -> float:
    """benchmarks: cores = ceil(cap/2), working = cores - floor(left/2), 16 cores a package, 15/120 W."""
    cores = math.ceil(capacity_milli / VCPU_MILLI / 2)
    working = cores - math.floor(free_milli / VCPU_MILLI / 2)
    packages, active = math.ceil(cores / PACKAGE_CORES), math.ceil(working / PACKAGE_CORES)
    return 120.0 * active + 15.0 * (packages - active)


def node_power(node: Node) -> float:
    gpus = sum((gpu.busy_w if gpu.free < 1000 else gpu.idle_w) for gpu in node.gpus if gpu)
    return gpus + package_power(node.cpu_capacity, node.cpu_free)


def placeable(node: Node) -> list[Gpu]:
    return [gpu for gpu in node.gpus if gpu and not gpu.partitioned]


def class_fragment(node: Node, task: Task) -> int:
    """frag(n, t) of FGD: free milli-GPU of the node that the class cannot use."""
    free = sum(gpu.free for gpu in placeable(node))
    if task.gpu_count == 0 or task.cpu_milli > node.cpu_free:
        return free
    usable = [gpu for gpu in placeable(node) if task.allows(gpu) and gpu.free >= task.gpu_milli]
    if len(usable) < task.gpu_count:
        return free
    return free - sum(gpu.free for gpu in usable)


def fragmentation(node: Node, mix: list[Class]) -> int:
    return sum(entry.weight * class_fragment(node, entry.task) for entry in mix)


FEED_SHARE, FEED_MILLI, STRANDED_UNIT = 10_000, 1000, 1e10


def demand(entry: Class) -> int:
    return entry.weight * entry.task.gpu_count * entry.task.gpu_milli


def share(asked: int, total: int) -> int:
    """Of all demand, in ten-thousandths, rounded half up."""
    return (2 * FEED_SHARE * asked + total) // (2 * total)


def starved(node: Node, mix: list[Class]) -> int:
    """If each class alone had the free GPU: what the free CPU would leave of it, by the share of demand."""
    free = sum(gpu.free for gpu in placeable(node))
    served = [entry for entry in mix if demand(entry) and any(entry.task.allows(gpu) for gpu in placeable(node))]
    left = 0
    for entry in served:
        asked, cpu = entry.task.gpu_count * entry.task.gpu_milli, entry.task.cpu_milli
        part = share(demand(entry), sum(map(demand, served)))
        if cpu:
            left += max(0, FEED_MILLI * part * free - max(1, part * asked * FEED_MILLI // cpu) * node.cpu_free)
    return left


def stranded(node: Node, mix: list[Class]) -> float:
    """GPUs that the node's free CPU cannot feed."""
    return starved(node, mix) / STRANDED_UNIT


def placed(node: Node, slots: list[int], task: Task) -> Node:
    gpus = [
        replace(gpu, free=gpu.free - task.gpu_milli) if gpu and slot in slots else gpu
        for slot, gpu in enumerate(node.gpus)
    ]
    return replace(
        node,
        cpu_free=node.cpu_free - task.cpu_milli,
        memory_free=node.memory_free - task.memory_bytes,
        gpus=gpus,
    )


def verdict(node: Node, task: Task) -> str | None:
    """The first constraint that fails."""
    if not node.available:
        return "unavailable"
    if task.gpu_count:
        there = [gpu for gpu in node.gpus if gpu]
        allowed = [gpu for gpu in there if task.allows(gpu)]
        whole = [gpu for gpu in allowed if not gpu.partitioned]
        if there and not allowed:
            return "gpu_model"
        if len(whole) < task.gpu_count:
            return "gpu_mig" if len(allowed) >= task.gpu_count else "gpu_count"
        if sum(gpu.free >= task.gpu_milli for gpu in whole) < task.gpu_count:
            return "gpu_count" if task.gpu_milli == 1000 else "gpu_share"
    if task.cpu_milli > node.cpu_free:
        return "cpu"
    return "memory" if task.memory_bytes > node.memory_free else None


def choices(node: Node, task: Task) -> list[list[int]]:
    """Every choice of GPUs that is weighed: one GPU each, or the first of those that are free."""
    fitting = [
        slot
        for slot, gpu in enumerate(node.gpus)
        if gpu and not gpu.partitioned and task.allows(gpu) and gpu.free >= task.gpu_milli
    ]
    if task.gpu_count == 0:
        return [[]]
    if task.gpu_count == 1:
        return [[slot] for slot in fitting]
    return [fitting[: task.gpu_count]]


def cost(node: Node, slots: list[int], task: Task, mix: list[Class], prices: tuple[float, float, float]):
    after = placed(node, slots, task)
    total = max(1, sum(entry.weight for entry in mix))
    gpu_w = 0.0
    for slot in slots:
        if node.gpus[slot].free == 1000:
            gpu_w += node.gpus[slot].busy_w - node.gpus[slot].idle_w
    added_w = gpu_w + package_power(node.cpu_capacity, after.cpu_free) - package_power(node.cpu_capacity, node.cpu_free)
    fragments = (fragmentation(after, mix) - fragmentation(node, mix)) / (total * 1000.0)
    terms = (
        prices[0] * added_w,
        prices[1] * fragments,
        prices[2] * (starved(after, mix) - starved(node, mix)) / STRANDED_UNIT,
    )
    return sum(terms), terms


def best_candidates(nodes: list[Node], task: Task, mix: list[Class], prices, most: int = 4) -> Result:
    result = Result([], 0)
    for index, node in enumerate(nodes):
        problem = verdict(node, task)
        if problem:
            result.removed[problem] = result.removed.get(problem, 0) + 1
            continue
        result.feasible += 1
        weighed = [Found(index, slots, *cost(node, slots, task, mix, prices)) for slots in choices(node, task)]
        result.candidates.append(min(weighed, key=lambda found: found.cost_w))
    result.candidates.sort(key=lambda found: (found.cost_w, nodes[found.node].rank))
    del result.candidates[most:]
    return result


def replica_room(nodes: list[Node], task: Task, most: int) -> int:
    """Puts one after the other wherever it fits first."""
    nodes = list(nodes)
    for count in range(most):
        index = next((index for index, node in enumerate(nodes) if verdict(node, task) is None), None)
        if index is None:
            return count
        nodes[index] = placed(nodes[index], choices(nodes[index], task)[0], task)
    return most
