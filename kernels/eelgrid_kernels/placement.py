"""Where one task goes: every node and GPU weighed by one cost in watts.

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
dS  GPUs stranded: S(n) = max(0, 10 vCPU * free GPU - free CPU) / 10 vCPU, the
    free GPUs that the node's free CPU can no longer feed.

F is kept as an integer, sum over classes of weight * frag with whole weights,
so that it is exact and two equal nodes cost the same to the last bit. Ties go
to the lowest rank (by name, so that the order of joining decides nothing), then GPU.
"""
# ruff: noqa: PLR0917 (numba takes arguments by position)

import numpy as np

from eelgrid_kernels.arrays import Board, Choice, Ints, Mix, Nodes, Prices, Task
from eelgrid_kernels.compiled import kernel

CANDIDATES_MOST = 4
CLASSES_MOST = 64
GPU_SLOTS_MOST = 64
GPU_WHOLE_MILLI = 1000
# What a GPU slot holds; a partitioned device (MIG) is there but takes no task of this planner.
GPU_ABSENT, GPU_PLACEABLE, GPU_PARTITIONED = 0, 1, 2
# A node counts under the first that fails. Verdict 0 is a node that fits, verdict i + 1 is constraint i.
CONSTRAINTS = ("unavailable", "gpu_model", "gpu_mig", "gpu_count", "gpu_share", "cpu", "memory")
FITS, UNAVAILABLE, GPU_MODEL, GPU_MIG, GPU_COUNT, GPU_SHARE, CPU, MEMORY = range(8)

MILLI_PER_CORE = 2000  # a core is two vCPU
CORES_PER_PACKAGE = 16
CPU_PACKAGE_IDLE_W = 15.0
CPU_PACKAGE_FULL_W = 120.0
# A GPU is fed by 10 vCPU: the same number in milli-CPU per milli-GPU.
FEED = 10


@kernel
def _active_packages(cpu_capacity: int, cpu_free: int) -> int:
    """CPU packages with at least one working core; milli-CPU in."""
    cores = (cpu_capacity + MILLI_PER_CORE - 1) // MILLI_PER_CORE
    working = cores - cpu_free // MILLI_PER_CORE
    return (working + CORES_PER_PACKAGE - 1) // CORES_PER_PACKAGE


@kernel
def node_power(nodes: Nodes, node: int) -> float:
    """Modelled watts of one node; every GPU that is present counts, partitioned ones too."""
    power_w = 0.0
    for slot in range(nodes.gpu_state.shape[1]):
        if nodes.gpu_state[node, slot] != GPU_ABSENT:
            held = nodes.gpu_free[node, slot] < GPU_WHOLE_MILLI
            power_w += nodes.gpu_busy_w[node, slot] if held else nodes.gpu_idle_w[node, slot]
    packages = _active_packages(nodes.cpu_capacity[node], 0)
    active = _active_packages(nodes.cpu_capacity[node], nodes.cpu_free[node])
    return float(power_w + CPU_PACKAGE_FULL_W * active + CPU_PACKAGE_IDLE_W * (packages - active))


@kernel
def cluster_power(nodes: Nodes) -> float:
    """Modelled watts of all nodes, lost ones too: their work may well run on."""
    power_w = 0.0
    for node in range(nodes.cpu_capacity.shape[0]):
        power_w += node_power(nodes, node)
    return power_w


@kernel
def _shift(mix: Mix, usable: Ints, waste: Ints, model: int, was: int, now: int) -> None:
    """Move one GPU of a model from `was` to `now` milli free; usable and waste (C,) change in place."""
    for t in range(usable.shape[0]):
        allowed = mix.allows[model, t]
        before = allowed if was >= mix.gpu_milli[t] else 0
        after = allowed if now >= mix.gpu_milli[t] else 0
        usable[t] += after - before
        waste[t] += (1 - after) * now - (1 - before) * was


@kernel
def _survey(nodes: Nodes, mix: Mix, node: int, usable: Ints, waste: Ints) -> int:
    """Usable GPUs and unusable free milli-GPU by class into usable and waste (C,), in place; returns all free."""
    usable[:] = 0
    waste[:] = 0
    total = 0
    slot = 0
    width = nodes.gpu_state.shape[1]
    while slot < width:
        free, model = nodes.gpu_free[node, slot], nodes.gpu_model[node, slot]
        counts = nodes.gpu_state[node, slot] == GPU_PLACEABLE and free > 0
        slot += 1
        if not counts:
            continue
        copies = 1  # neighbours are mostly alike: a run of equal GPUs is weighed at once
        while (
            slot < width
            and nodes.gpu_state[node, slot] == GPU_PLACEABLE
            and nodes.gpu_free[node, slot] == free
            and nodes.gpu_model[node, slot] == model
        ):
            copies += 1
            slot += 1
        total += copies * free
        for t in range(usable.shape[0]):
            fits = mix.allows[model, t] if free >= mix.gpu_milli[t] else 0
            usable[t] += copies * fits
            waste[t] += copies * (1 - fits) * free
    return total


@kernel
def _fragments(mix: Mix, usable: Ints, waste: Ints, cpu_free: int, total: int, model: int, was: int, now: int) -> int:
    """F, weighted, of a surveyed node after one GPU of `model` moves from `was` to `now` milli free."""
    total += now - was
    sum_ = 0
    for t in range(usable.shape[0]):
        allowed = mix.allows[model, t]
        before = allowed if was >= mix.gpu_milli[t] else 0
        after = allowed if now >= mix.gpu_milli[t] else 0
        enough = usable[t] - before + after >= mix.gpu_count[t]
        served = enough & (mix.gpu_count[t] > 0) & (mix.cpu_milli[t] <= cpu_free)
        wasted = waste[t] + (1 - after) * now - (1 - before) * was
        sum_ += mix.weight[t] * (wasted if served else total)
    return sum_


@kernel
def fragmentation(nodes: Nodes, mix: Mix, node: int) -> int:
    """F of one node times mix.total, in milli-GPU."""
    usable = np.empty(mix.weight.shape[0], np.int64)
    waste = np.empty(mix.weight.shape[0], np.int64)
    total = _survey(nodes, mix, node, usable, waste)
    return int(_fragments(mix, usable, waste, nodes.cpu_free[node], total, 0, 0, 0))


@kernel
def refresh_fragmentation(nodes: Nodes, mix: Mix, rows: Ints, fragments: Ints) -> None:
    """Put `fragmentation` of the nodes in rows into fragments (N,), in place."""
    for node in rows:
        fragments[node] = fragmentation(nodes, mix, node)


@kernel
def verdict(nodes: Nodes, task: Task, allows: Ints, node: int) -> int:
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


@kernel
def _holds(nodes: Nodes, task: Task, allows: Ints, node: int, slot: int) -> bool:
    """Whether the GPU in the slot can take the task's share."""
    return bool(
        nodes.gpu_state[node, slot] == GPU_PLACEABLE
        and allows[nodes.gpu_model[node, slot]] != 0
        and nodes.gpu_free[node, slot] >= task.gpu_milli
    )


@kernel
def _like_an_earlier(nodes: Nodes, node: int, slot: int) -> bool:
    """Whether a lower slot holds a GPU that differs in nothing."""
    for other in range(slot):
        if (
            nodes.gpu_free[node, other] == nodes.gpu_free[node, slot]
            and nodes.gpu_model[node, other] == nodes.gpu_model[node, slot]
            and nodes.gpu_state[node, other] == nodes.gpu_state[node, slot]
            and nodes.gpu_idle_w[node, other] == nodes.gpu_idle_w[node, slot]
            and nodes.gpu_busy_w[node, other] == nodes.gpu_busy_w[node, slot]
        ):
            return True
    return False


@kernel
def _weigh(
    nodes: Nodes, mix: Mix, fragments: Ints, task: Task, allows: Ints, prices: Prices, node: int,
    usable: Ints, waste: Ints, board: Board,
) -> None:  # fmt: skip
    """Put the best choice on a node that fits into the board, in place; usable and waste (C,) are scratch."""
    cpu_free = nodes.cpu_free[node]
    cpu_left = cpu_free - task.cpu_milli
    capacity = nodes.cpu_capacity[node]
    total = _survey(nodes, mix, node, usable, waste)
    stranded = max(0, FEED * total - cpu_free)
    stranded_after = max(0, FEED * (total - task.gpu_count * task.gpu_milli) - cpu_left)
    strand_w = prices.stranding_w * ((stranded_after - stranded) / (FEED * 1000.0))
    packages = _active_packages(capacity, cpu_left) - _active_packages(capacity, cpu_free)
    cpu_w = (CPU_PACKAGE_FULL_W - CPU_PACKAGE_IDLE_W) * packages
    scale = mix.total * 1000.0
    gpu_w = 0.0
    taken = 0
    board.cost_w[node] = np.inf
    for slot in range(nodes.gpu_state.shape[1] if task.gpu_count > 0 else 1):
        model = was = now = 0
        if task.gpu_count > 0:
            alike = task.gpu_count == 1 and _like_an_earlier(nodes, node, slot)
            if alike or not _holds(nodes, task, allows, node, slot):
                continue
            model, was = nodes.gpu_model[node, slot], nodes.gpu_free[node, slot]
            now = was - task.gpu_milli
            added_w = nodes.gpu_busy_w[node, slot] - nodes.gpu_idle_w[node, slot]
            gpu_w = (gpu_w if task.gpu_count > 1 else 0.0) + (added_w if was == GPU_WHOLE_MILLI else 0.0)
            taken += 1
            if task.gpu_count > 1 and taken < task.gpu_count:
                _shift(mix, usable, waste, model, was, now)
                total += now - was
                continue
        after = _fragments(mix, usable, waste, cpu_left, total, model, was, now)
        power_w = prices.power * (gpu_w + cpu_w)
        frag_w = prices.fragmentation_w * ((after - fragments[node]) / scale)
        cost_w = power_w + frag_w + strand_w
        if cost_w < board.cost_w[node]:
            board.cost_w[node] = cost_w
            board.slot[node] = slot
            board.terms_w[node, 0] = power_w
            board.terms_w[node, 1] = frag_w
            board.terms_w[node, 2] = strand_w
        if task.gpu_count != 1:
            break


@kernel
def _before(nodes: Nodes, board: Board, one: int, other: int) -> bool:
    """Whether one is cheaper, or as cheap and of lower rank."""
    gap_w = board.cost_w[one] - board.cost_w[other]
    return bool(gap_w < 0.0 or (gap_w == 0.0 and nodes.rank[one] < nodes.rank[other]))


@kernel
def _select(nodes: Nodes, task: Task, allows: Ints, board: Board, choice: Choice) -> int:
    """The K cheapest nodes of the board and the counts of the others into choice, in place; returns how many fit."""
    most = choice.node.shape[0]
    choice.removed[:] = 0
    choice.node[:] = -1
    choice.slots[:] = -1
    fitting = 0
    for node in range(board.verdict.shape[0]):
        if board.verdict[node] != FITS:
            choice.removed[board.verdict[node] - 1] += 1
            continue
        # Insertion into a list that stays sorted.
        place = min(fitting, most)
        while place > 0 and _before(nodes, board, node, choice.node[place - 1]):
            if place < most:
                choice.node[place] = choice.node[place - 1]
            place -= 1
        if place < most:
            choice.node[place] = node
        fitting += 1
    for rank in range(min(fitting, most)):
        node = choice.node[rank]
        choice.cost_w[rank] = board.cost_w[node]
        choice.terms_w[rank, :] = board.terms_w[node, :]
        if task.gpu_count == 1:
            choice.slots[rank, 0] = board.slot[node]
            continue
        taken = 0
        for slot in range(nodes.gpu_state.shape[1]):
            if taken < task.gpu_count and _holds(nodes, task, allows, node, slot):
                choice.slots[rank, taken] = slot
                taken += 1
    return fitting


@kernel
def best_candidates(
    nodes: Nodes, mix: Mix, fragments: Ints, task: Task, allows: Ints, prices: Prices, rows: Ints, board: Board,
    choice: Choice,
) -> int:  # fmt: skip
    """The K best nodes for one task, at most one choice on each; returns how many nodes fit.

    Weighs the nodes in rows (any length) into the board, then picks from the whole
    board, so that who kept the board of the same task weighs only the nodes that
    changed. fragments (N,) holds `fragmentation` of every node for this mix. allows
    (M,) is 1 for each model that the task may use. board and choice change in place.
    A task with several GPUs takes fully free GPUs in index order.
    """
    usable = np.empty(mix.weight.shape[0], np.int64)
    waste = np.empty(mix.weight.shape[0], np.int64)
    for node in rows:
        found = verdict(nodes, task, allows, node)
        board.verdict[node] = found
        if found == FITS:
            _weigh(nodes, mix, fragments, task, allows, prices, node, usable, waste, board)
    return int(_select(nodes, task, allows, board, choice))


@kernel
def count_verdicts(nodes: Nodes, task: Task, allows: Ints, counts: Ints) -> None:
    """Nodes by verdict into counts (8,), in place."""
    counts[:] = 0
    for node in range(nodes.rank.shape[0]):
        counts[verdict(nodes, task, allows, node)] += 1


@kernel
def replica_room(nodes: Nodes, task: Task, allows: Ints, most: int) -> int:
    """How many equal tasks fit at once, counting no further than `most`; exact, since equal tasks pack in any order."""
    room = 0
    for node in range(nodes.cpu_capacity.shape[0]):
        if verdict(nodes, task, allows, node) != FITS:
            continue
        here = most
        if task.gpu_count > 0:
            shares = 0
            for slot in range(nodes.gpu_state.shape[1]):
                if _holds(nodes, task, allows, node, slot):
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
