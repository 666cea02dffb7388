"""Node cost: power, fragmentation, feasibility and capacity of a node, and the cost of one more replica.

    cost(n) = w_power * P(n) + w_frag * F(n) / 1000 + w_strand * S(n) - w_block * B(n)

`place_tasks` lets a stream of tasks arrive, which is how room for future work is counted.

    cost = w_power * dP + w_frag * dF / 1000 + w_strand * dS

dP  watts added. A GPU draws its full power once any share of it is held, else
    its idle power. CPUs are priced as packages of 16 cores = 32 vCPU at 15 W
    idle and 120 W active: with capacity and free CPU in vCPU,
    cores = ceil(capacity / 2), working = cores - floor(free / 2),
    P = 120 * ceil(working / 16) + 15 * (ceil(cores / 16) - ceil(working / 16)).
    (Lettich et al., CCGrid 2025, arXiv 2412.17484, section on the power model.)
dF  fragmentation added, in thousandths of a GPU: F(n) = sum_t f_t * frag(n, t)
    over the classes t of the typical mix. frag is all free GPU of n if t asks for
    no GPU, or n lacks the CPU, or fewer than t's number of GPUs are usable; else
    the free GPU that t cannot use. A GPU is usable to t if its model is allowed
    and its free share is large enough. (Weng et al., USENIX ATC'23, section 4.)
dS  GPUs stranded, S(n) of eelgrid_kernels.cost_terms: the free GPUs that the node's
    free CPU cannot feed, in the mean over the classes of the mix by their demand.

F is kept as an integer, sum over classes of weight * frag with whole weights,
so that it is exact and two equal nodes cost the same to the last bit. Ties go
to the lowest rank (by name, so that the order of joining decides nothing), then GPU.
"""

import numpy as np

from eelgrid_kernels.arrays import Floats, Ints, Mix, MoveNodes, Nodes, ReplicaRequests, Task, TermPrices
from eelgrid_kernels.compilation import inlined_kernel, lean_kernel, nogil_kernel
from eelgrid_kernels.cost_terms import (
    CPU_PACKAGE_FULL_W,
    CPU_PACKAGE_IDLE_W,
    FEED_MILLI,
    FEED_SHARE,
    STRANDED_UNIT,
    active_packages,
)

CANDIDATES_MOST = 4
CLASSES_MOST = 64
GPU_SLOTS_MOST = 64
GPU_WHOLE_MILLI = 1000
# What a GPU slot holds; a partitioned device (MIG) is there but takes no task of this planner.
GPU_ABSENT, GPU_PLACEABLE, GPU_PARTITIONED = 0, 1, 2
# A node counts under the first that fails. Verdict 0 is a node that fits, verdict i + 1 is constraint i.
CONSTRAINTS = ("unavailable", "gpu_model", "gpu_mig", "gpu_count", "gpu_share", "cpu", "memory")
FITS, UNAVAILABLE, GPU_MODEL, GPU_MIG, GPU_COUNT, GPU_SHARE, CPU, MEMORY = range(8)


@lean_kernel
def node_power(nodes: Nodes, node: int) -> float:
    """Modelled watts of one node; every GPU that is present counts, partitioned ones too."""
    power_w = 0.0
    for slot in range(nodes.gpu_state.shape[1]):
        if nodes.gpu_state[node, slot] != GPU_ABSENT:
            held = nodes.gpu_free[node, slot] < GPU_WHOLE_MILLI
            power_w += nodes.gpu_busy_w[node, slot] if held else nodes.gpu_idle_w[node, slot]
    packages = active_packages(nodes.cpu_capacity[node], 0)
    active = active_packages(nodes.cpu_capacity[node], nodes.cpu_free[node])
    return float(power_w + CPU_PACKAGE_FULL_W * active + CPU_PACKAGE_IDLE_W * (packages - active))


@lean_kernel
def cluster_power(nodes: Nodes) -> float:
    """Modelled watts of all nodes, lost ones too: their work may well run on."""
    power_w = 0.0
    for node in range(nodes.cpu_capacity.shape[0]):
        power_w += node_power(nodes, node)
    return power_w


@lean_kernel
def node_fragmentation(nodes: Nodes, mix: Mix, node: int) -> int:
    """F of one node times mix.total, in milli-GPU."""
    sum_ = 0
    for t in range(mix.weight.shape[0]):
        usable = waste = total = 0
        for slot in range(nodes.gpu_state.shape[1]):
            free = nodes.gpu_free[node, slot] if nodes.gpu_state[node, slot] == GPU_PLACEABLE else 0
            total += free
            if free > 0 and free >= mix.gpu_milli[t] and mix.allows[nodes.gpu_model[node, slot], t] != 0:
                usable += 1
            else:
                waste += free
        served = mix.gpu_count[t] > 0 and usable >= mix.gpu_count[t] and mix.cpu_milli[t] <= nodes.cpu_free[node]
        sum_ += mix.weight[t] * (waste if served else total)
    return sum_


@lean_kernel
def refresh_fragmentation(nodes: Nodes, mix: Mix, rows: Ints, fragments: Ints) -> None:
    """Put `fragmentation` of the nodes in rows into fragments (N,), in place."""
    for node in rows:
        fragments[node] = node_fragmentation(nodes, mix, node)


@lean_kernel
def node_verdict(nodes: Nodes, task: Task, allows: Ints, node: int) -> int:
    """FITS or the first constraint that fails."""
    if not nodes.available[node]:
        return UNAVAILABLE
    if task.gpu_count > 0:
        present = allowed = partitioned = fitting = 0
        for slot in range(nodes.gpu_state.shape[1]):
            if nodes.gpu_state[node, slot] == GPU_ABSENT:
                continue
            present += 1
            if allows[nodes.gpu_model[node, slot]] == 0:
                continue
            if nodes.gpu_state[node, slot] == GPU_PARTITIONED:
                partitioned += 1
                continue
            allowed += 1
            if nodes.gpu_free[node, slot] >= task.gpu_milli:
                fitting += 1
        if present > 0 and allowed + partitioned == 0:
            return GPU_MODEL
        if allowed < task.gpu_count:
            return GPU_MIG if allowed + partitioned >= task.gpu_count else GPU_COUNT
        if fitting < task.gpu_count:
            return GPU_COUNT if task.gpu_milli == GPU_WHOLE_MILLI else GPU_SHARE
    if nodes.cpu_free[node] < task.cpu_milli:
        return CPU
    return FITS if nodes.memory_free[node] >= task.memory_bytes else MEMORY


@lean_kernel
def _gpu_fits_task(nodes: Nodes, task: Task, allows: Ints, node: int, slot: int) -> bool:
    """Whether the GPU in the slot can take the task's share."""
    return bool(
        nodes.gpu_state[node, slot] == GPU_PLACEABLE
        and allows[nodes.gpu_model[node, slot]] != 0
        and nodes.gpu_free[node, slot] >= task.gpu_milli
    )


@lean_kernel
def count_verdicts(nodes: Nodes, task: Task, allows: Ints, counts: Ints) -> None:
    """Nodes by verdict into counts (8,), in place."""
    counts[:] = 0
    for node in range(nodes.rank.shape[0]):
        counts[node_verdict(nodes, task, allows, node)] += 1


@lean_kernel
def replica_room(nodes: Nodes, task: Task, allows: Ints, most: int) -> int:
    """How many equal tasks fit at once, counting no further than `most`; exact, since equal tasks pack in any order."""
    room = 0
    for node in range(nodes.cpu_capacity.shape[0]):
        if node_verdict(nodes, task, allows, node) != FITS:
            continue
        here = most
        if task.gpu_count > 0:
            shares = 0
            for slot in range(nodes.gpu_state.shape[1]):
                if _gpu_fits_task(nodes, task, allows, node, slot):
                    shares += nodes.gpu_free[node, slot] // task.gpu_milli
            here = min(here, shares // task.gpu_count)
        if task.cpu_milli > 0:
            here = min(here, nodes.cpu_free[node] // task.cpu_milli)
        if task.memory_bytes > 0:
            here = min(here, nodes.memory_free[node] // task.memory_bytes)
        room += here
        if room >= most:
            return most
    return room


@inlined_kernel
def feed_share(asked: int, total: int) -> int:
    """A class's share of the demand for GPU, rounded, in FEED_SHARE."""
    return (2 * FEED_SHARE * asked + total) // (2 * total)


@inlined_kernel
def feed_by_cpu(share: int, gpu_milli: int, cpu_milli: int) -> int:
    """What a milli-CPU feeds of a class that asks for so much GPU and CPU, by its share, in thousandths of a milli-GPU."""
    return max(1, share * gpu_milli * FEED_MILLI // cpu_milli)


@inlined_kernel
def _is_served(nodes: Nodes, mix: Mix, node: int, t: int) -> bool:
    """Whether some GPU of the node that takes tasks is of a model that a GPU class may use."""
    if mix.gpu_count[t] > 0:
        for slot in range(nodes.gpu_state.shape[1]):
            if nodes.gpu_state[node, slot] == GPU_PLACEABLE and mix.allows[nodes.gpu_model[node, slot], t] != 0:
                return True
    return False


@lean_kernel
def stranded_gpus(nodes: Nodes, mix: Mix, node: int, gpu_free: int) -> float:
    """S of a node with so much free milli-GPU."""
    total = sum_ = 0
    for t in range(mix.weight.shape[0] if gpu_free > 0 else 0):
        if _is_served(nodes, mix, node, t):
            total += mix.weight[t] * mix.gpu_count[t] * mix.gpu_milli[t]
    for t in range(mix.weight.shape[0] if total > 0 else 0):
        if mix.cpu_milli[t] > 0 and _is_served(nodes, mix, node, t):
            asked = mix.gpu_count[t] * mix.gpu_milli[t]
            share = feed_share(mix.weight[t] * asked, total)
            fed = feed_by_cpu(share, asked, mix.cpu_milli[t]) * nodes.cpu_free[node]
            sum_ += max(0, FEED_MILLI * share * gpu_free - fed)
    return sum_ / STRANDED_UNIT


# Whole free GPUs that are a block, the usual node. Measured: four, which is easier to have, makes less room for eight.
BLOCK_LEAST = 8


@lean_kernel
def node_terms(nodes: Nodes, mix: Mix, node: int, fragments: bool) -> tuple[float, float, float, float]:
    """Watts, fragmented GPUs, stranded GPUs and less GPUs of blocks of a node; the second, the dearest, if asked for."""
    total = whole = 0
    for slot in range(nodes.gpu_state.shape[1]):
        if nodes.gpu_state[node, slot] == GPU_PLACEABLE:
            total += nodes.gpu_free[node, slot]
            whole += nodes.gpu_free[node, slot] == GPU_WHOLE_MILLI
    fragmented = node_fragmentation(nodes, mix, node) / (mix.total * 1000.0) if fragments else 0.0
    stranded = stranded_gpus(nodes, mix, node, total)
    in_blocks = float(whole) if whole >= BLOCK_LEAST and nodes.available[node] else 0.0
    return node_power(nodes, node), fragmented, stranded, -in_blocks


@lean_kernel
def node_cost_w(nodes: Nodes, mix: Mix, prices: TermPrices, node: int) -> float:
    """The potential of a node in watts-equivalent."""
    power_w, fragmented, stranded, blocks = node_terms(nodes, mix, node, prices.fragmentation_w != 0.0)
    use_w = prices.power * power_w + prices.fragmentation_w * fragmented
    return float(use_w + prices.stranding_w * stranded + prices.block_w * blocks)


@inlined_kernel
def task_of_kind(requests: ReplicaRequests, kind: int) -> Task:
    """What one replica of a kind asks for."""
    return Task(
        requests.cpu_milli[kind], requests.memory_bytes[kind], requests.gpu_count[kind], requests.gpu_milli[kind]
    )


@inlined_kernel
def book_replica(nodes: Nodes, task: Task, node: int, slots: Ints, sign: int) -> None:
    """One replica comes to a node (sign 1) or leaves it (-1): its free amounts change in place."""
    nodes.cpu_free[node] -= sign * task.cpu_milli
    nodes.memory_free[node] -= sign * task.memory_bytes
    for place in range(task.gpu_count):
        nodes.gpu_free[node, slots[place]] -= sign * task.gpu_milli


@lean_kernel
def _gpu_fits_request(nodes: Nodes, requests: ReplicaRequests, kind: int, node: int, slot: int) -> bool:
    return bool(
        nodes.gpu_state[node, slot] == GPU_PLACEABLE
        and requests.allows[kind, nodes.gpu_model[node, slot]] != 0
        and nodes.gpu_free[node, slot] >= requests.gpu_milli[kind]
    )


@lean_kernel
def _alike(nodes: Nodes, node: int, slot: int, barred: int) -> bool:
    """Whether a lower slot holds a GPU that differs in nothing."""
    for other in range(slot):
        if (
            other != barred
            and nodes.gpu_free[node, other] == nodes.gpu_free[node, slot]
            and nodes.gpu_model[node, other] == nodes.gpu_model[node, slot]
            and nodes.gpu_state[node, other] == nodes.gpu_state[node, slot]
            and nodes.gpu_busy_w[node, other] == nodes.gpu_busy_w[node, slot]
            and nodes.gpu_idle_w[node, other] == nodes.gpu_idle_w[node, slot]
        ):
            return True
    return False


@lean_kernel
def added_w(ground: MoveNodes, kind: int, node: int, barred: int, slots: Ints) -> float:
    """What one more replica of a kind adds to a node, its GPUs into slots (W,); inf where it does not fit.

    A share goes to the GPU where it is cheapest, but not to `barred`; several
    GPUs are the first that are free, as for an arrival.
    """
    nodes, requests, task = ground.nodes, ground.requests, task_of_kind(ground.requests, kind)
    count = task.gpu_count
    slots[:] = -1
    if (
        not nodes.available[node]
        or nodes.cpu_free[node] < task.cpu_milli
        or nodes.memory_free[node] < task.memory_bytes
    ):
        return float(np.inf)
    best_w, best_slot, taken = np.inf, -1, 0
    for slot in range(nodes.gpu_state.shape[1] if count > 0 else 0):
        if slot == barred or not _gpu_fits_request(nodes, requests, kind, node, slot):
            continue
        if count == 1 and _alike(nodes, node, slot, barred):
            continue
        slots[taken] = slot
        if count == 1:
            book_replica(nodes, task, node, slots, 1)
            cost_w = node_cost_w(nodes, ground.mix, ground.prices, node)
            book_replica(nodes, task, node, slots, -1)
            if cost_w < best_w:
                best_w, best_slot = cost_w, slot
            continue
        taken += 1
        if taken == count:
            break
    if count == 1:
        slots[0] = best_slot
    elif taken == count:
        book_replica(nodes, task, node, slots, 1)
        best_w = node_cost_w(nodes, ground.mix, ground.prices, node)
        book_replica(nodes, task, node, slots, -1)
    return float(best_w - ground.cost_w[node])


@lean_kernel
def weigh_column(ground: MoveNodes, node: int) -> None:
    """The present potential of a node and its column of the board, in place."""
    ground.cost_w[node] = node_cost_w(ground.nodes, ground.mix, ground.prices, node)
    for kind in range(ground.board_w.shape[0]):
        ground.board_w[kind, node] = added_w(ground, kind, node, -1, ground.slots[0])


@lean_kernel
def refresh_node(ground: MoveNodes, node: int) -> None:
    """A node changed: its potential is taken anew, and its column of the board holds no longer."""
    clock = ground.clock[0]
    ground.trail[clock.touches] = node
    ground.trail_w[clock.touches] = ground.cost_w[node]
    clock.touches += 1
    ground.cost_w[node] = node_cost_w(ground.nodes, ground.mix, ground.prices, node)
    ground.stamp[node] = clock.now


@lean_kernel
def restore_potentials(ground: MoveNodes, mark: int) -> None:
    """The potentials as they were when the trail had the length `mark`; what was booked since is taken back already."""
    clock = ground.clock[0]
    while clock.touches > mark:
        clock.touches -= 1
        ground.cost_w[ground.trail[clock.touches]] = ground.trail_w[clock.touches]


@nogil_kernel
def weigh_board(ground: MoveNodes) -> None:
    """Every node's potential and column of the board, in place."""
    for node in range(ground.cost_w.shape[0]):
        weigh_column(ground, node)


@lean_kernel
def find_cheapest_node(ground: MoveNodes, kind: int, home: int) -> tuple[int, float]:
    """The cheapest other node for one more of a kind, of equals the one of lower rank, and what it adds; or -1."""
    best, best_w = -1, np.inf
    for node in range(ground.cost_w.shape[0]):
        if node == home:
            continue
        more_w = ground.board_w[kind, node]
        if ground.stamp[node] == ground.clock[0].now:
            more_w = added_w(ground, kind, node, -1, ground.slots[0])
        ranked = more_w == best_w and best >= 0 and ground.nodes.rank[node] < ground.nodes.rank[best]
        if more_w < best_w or ranked:
            best, best_w = node, more_w
    return best, float(best_w)


@nogil_kernel
def place_tasks(ground: MoveNodes, kinds: Ints, accepted: Ints) -> None:
    """Tasks of these kinds (T,) arrive one by one, each where it is cheapest; 1 or 0 into accepted (T,), in place."""
    weigh_board(ground)
    ground.clock[0].now += 1
    for task in range(kinds.shape[0]):
        accepted[task] = 0
        node, more_w = find_cheapest_node(ground, kinds[task], -1)
        if more_w == np.inf:
            continue
        added_w(ground, kinds[task], node, -1, ground.slots[1])
        book_replica(ground.nodes, task_of_kind(ground.requests, kinds[task]), node, ground.slots[1], 1)
        weigh_column(ground, node)
        accepted[task] = 1


@lean_kernel
def sum_terms(nodes: Nodes, mix: Mix, terms: Floats) -> None:
    """The terms of all nodes into terms (4,), in place."""
    terms[:] = 0.0
    for node in range(nodes.cpu_capacity.shape[0]):
        power_w, fragmented, stranded, blocks = node_terms(nodes, mix, node, True)
        terms[0] += power_w
        terms[1] += fragmented
        terms[2] += stranded
        terms[3] += blocks
