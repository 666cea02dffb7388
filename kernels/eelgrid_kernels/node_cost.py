"""Node cost: power, fragmentation, feasibility and capacity of a node, and the cost of one more replica.

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

from eelgrid_kernels.arrays import Ints, Mix, Nodes, Task
from eelgrid_kernels.compilation import lean_kernel
from eelgrid_kernels.cost_terms import CPU_PACKAGE_FULL_W, CPU_PACKAGE_IDLE_W, active_packages

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
