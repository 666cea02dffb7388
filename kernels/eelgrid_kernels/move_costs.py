"""Costs of nodes while work comes and goes on them: the ground on which moves are searched and room is counted.

    cost(n) = w_power * P(n) + w_frag * F(n) + w_strand * S(n) - w_block * B(n)

P, F and S are those by which placement weighs an arrival (eelgrid_kernels.node_cost and cost_terms), in watts and GPUs;
B is the GPUs of a node that are wholly free, where it has at least eight such. `place_tasks` lets a stream of tasks
arrive, which is how room for future work is counted.

What one more replica of a kind adds to a node is kept for all kinds and nodes (the board), with the least of each block
of nodes, so that the cheapest node is found without a look at most of them.

Power budgets. A GPU that is allocated may draw its default limit, an idle one its idle watts, so an idle GPU may be
allocated only where every budget above it leaves the difference. What is left changes with each move anywhere below a
budget, and with it which nodes fit; so there are two boards, one of which allocates no idle GPU, and a look at the
budgets decides which of them counts for a node. Where they are exhausted, replicas still share GPUs that are in use.
"""

from typing import NamedTuple

import numpy as np

from eelgrid_kernels.arrays import Floats, Ints, MoveNodes
from eelgrid_kernels.compilation import inlined_kernel, lean_kernel, nogil_kernel
from eelgrid_kernels.cost_terms import (
    CPU_PACKAGE_FULL_W,
    CPU_PACKAGE_IDLE_W,
    STRANDED_UNIT,
    active_packages,
    served_level,
    sum_stranded,
)
from eelgrid_kernels.node_cost import GPU_ABSENT, GPU_PLACEABLE, GPU_WHOLE_MILLI

# Whole free GPUs that are a block, the usual node. Measured: four, which is easier to have, makes less room for eight.
BLOCK_LEAST = 8
BOARD_BLOCK = 64  # nodes


@lean_kernel
def _fragmented_milli(ground: MoveNodes, node: int, free_milli: int) -> int:
    """F of a node with so much free GPU times the weight of the mix, in milli-GPU."""
    groups, family = ground.groups, ground.nodes[node].family
    level, served = served_level(groups, ground.nodes[node].cpu_free), 0
    for q in range(groups.group_count[family]):
        usable = milli = 0
        for slot in range(ground.gpus.shape[1]):
            gpu = ground.gpus[node, slot]
            if gpu.state == GPU_PLACEABLE and gpu.free >= groups.gpu_milli[family, q]:
                allowed = groups.allows[family, gpu.model, q]
                usable += allowed
                milli += allowed * gpu.free
        if usable >= groups.gpu_count[family, q]:
            served += groups.weight[family, level, q] * milli
    return ground.mix_weight * free_milli - served


@lean_kernel
def node_terms(ground: MoveNodes, node: int) -> tuple[float, float, float, float]:
    """Watts, fragmented GPUs, stranded GPUs and less GPUs of blocks of a node."""
    here = ground.nodes[node]
    power_w, free_milli, whole, fragmented, stranded = 0.0, 0, 0, 0.0, 0.0
    for slot in range(ground.gpus.shape[1]):
        gpu = ground.gpus[node, slot]
        if gpu.state != GPU_ABSENT:
            power_w += gpu.busy_w if gpu.free < GPU_WHOLE_MILLI else gpu.idle_w
        if gpu.state == GPU_PLACEABLE:
            free_milli += gpu.free
            whole += gpu.free == GPU_WHOLE_MILLI
    packages, active = active_packages(here.cpu_capacity, 0), active_packages(here.cpu_capacity, here.cpu_free)
    power_w += CPU_PACKAGE_FULL_W * active + CPU_PACKAGE_IDLE_W * (packages - active)
    if free_milli > 0:
        fragmented = _fragmented_milli(ground, node, free_milli) / ground.fragmentation_scale
        stranded = sum_stranded(ground.feed, here.family, free_milli, here.cpu_free) / STRANDED_UNIT
    in_blocks = float(whole) if whole >= BLOCK_LEAST and here.available else 0.0
    return power_w, fragmented, stranded, -in_blocks


@lean_kernel
def sum_terms(ground: MoveNodes, terms: Floats) -> None:
    """The terms of all nodes into terms (4,), in place."""
    terms[:] = 0.0
    for node in range(ground.nodes.shape[0]):
        power_w, fragmented, stranded, blocks = node_terms(ground, node)
        terms[0] += power_w
        terms[1] += fragmented
        terms[2] += stranded
        terms[3] += blocks


@lean_kernel
def node_cost_w(ground: MoveNodes, node: int) -> float:
    """The potential of a node in watts-equivalent."""
    prices = ground.prices
    power_w, fragmented, stranded, blocks = node_terms(ground, node)
    use_w = prices.power * power_w + prices.fragmentation_w * fragmented
    return float(use_w + prices.stranding_w * stranded + prices.block_w * blocks)


@inlined_kernel
def book_replica(ground: MoveNodes, kind: int, node: int, slots: Ints, sign: int) -> None:
    """One replica of a kind comes to a node (sign 1) or leaves it (-1): its free amounts change in place."""
    request, here = ground.requests[kind], ground.nodes[node]
    here.cpu_free -= sign * request.cpu_milli
    here.memory_free -= sign * request.memory_bytes
    for place in range(request.gpu_count):
        ground.gpus[node, slots[place]].free -= sign * request.gpu_milli


@inlined_kernel
def _is_alike(ground: MoveNodes, node: int, slot: int, barred: int) -> bool:
    """Whether a lower slot holds a GPU that differs in nothing."""
    gpu = ground.gpus[node, slot]
    for other in range(slot):
        lower = ground.gpus[node, other]
        if (
            other != barred
            and lower.free == gpu.free
            and lower.model == gpu.model
            and lower.state == gpu.state
            and lower.busy_w == gpu.busy_w
            and lower.idle_w == gpu.idle_w
        ):
            return True
    return False


@inlined_kernel
def has_room(ground: MoveNodes, kind: int, node: int) -> bool:
    """Whether a node takes new work and has the CPU and the memory for one more of a kind."""
    request, here = ground.requests[kind], ground.nodes[node]
    fits = here.cpu_free >= request.cpu_milli and here.memory_free >= request.memory_bytes
    return bool(fits and here.available != 0)


@inlined_kernel
def gpu_fits(ground: MoveNodes, kind: int, node: int, slot: int) -> bool:
    """Whether a GPU can take the share of a kind."""
    request, gpu = ground.requests[kind], ground.gpus[node, slot]
    fits = gpu.state == GPU_PLACEABLE and gpu.free >= request.gpu_milli
    return bool(fits and request.models >> gpu.model & 1 != 0)


@inlined_kernel
def leaves_power(ground: MoveNodes, node: int, more_mw: int) -> bool:
    """Whether every budget above a node leaves so much."""
    fits = True
    for level in range(ground.budgets.shape[1]):
        budget = ground.budgets[node, level]
        if budget >= 0 and ground.left_mw[budget] < more_mw:
            fits = False
    return fits


@inlined_kernel
def may_wake(ground: MoveNodes, kind: int, node: int) -> bool:
    """Whether every budget above a node leaves what one more of a kind draws on idle GPUs."""
    return leaves_power(ground, node, ground.requests[kind].gpu_count * ground.nodes[node].rise_mw)


@inlined_kernel
def is_idle_without(ground: MoveNodes, kind: int, node: int, slot: int, sign: int) -> bool:
    """Whether nothing holds a GPU beside a replica of a kind that has come to it (sign 1), or has left it (-1)."""
    free = ground.gpus[node, slot].free + (ground.requests[kind].gpu_milli if sign > 0 else 0)
    return bool(free == GPU_WHOLE_MILLI)


@lean_kernel
def draw_power(ground: MoveNodes, node: int, more_mw: int) -> None:
    """The budgets above a node leave so much less, in place."""
    for level in range(ground.budgets.shape[1]):
        budget = ground.budgets[node, level]
        if budget >= 0:
            ground.left_mw[budget] -= more_mw


class GpuChoice(NamedTuple):
    """Which GPUs of a node a replica may take."""

    barred: int  # a slot that it may not; -1 for none
    is_waking: bool  # whether it may take idle ones


ANY_GPU = GpuChoice(-1, True)


@lean_kernel
def added_w(ground: MoveNodes, kind: int, node: int, choice: GpuChoice, slots: Ints) -> float:
    """What one more replica of a kind adds to a node, its GPUs into slots (W,); inf where it does not fit.

    A share goes to the GPU where it is cheapest; several GPUs are the first that are free, as for an arrival.
    """
    count = ground.requests[kind].gpu_count
    slots[:] = -1
    if not has_room(ground, kind, node):
        return float(np.inf)
    best_w, best_slot, taken = np.inf, -1, 0
    for slot in range(ground.gpus.shape[1] if count > 0 else 1):
        if count > 0:
            if slot == choice.barred or not gpu_fits(ground, kind, node, slot):
                continue
            if not choice.is_waking and ground.gpus[node, slot].free == GPU_WHOLE_MILLI:
                continue
            if count == 1 and _is_alike(ground, node, slot, choice.barred):
                continue
            slots[taken] = slot
            taken += count > 1
            if count > 1 and taken < count:
                continue
        book_replica(ground, kind, node, slots, 1)
        cost_w = node_cost_w(ground, node)
        book_replica(ground, kind, node, slots, -1)
        if cost_w < best_w:
            best_w, best_slot = cost_w, slot
        if count > 1:
            break
    if count == 1:
        slots[0] = best_slot
    return float(best_w - ground.nodes[node].cost_w)


@lean_kernel
def _refresh_block(ground: MoveNodes, block: int) -> None:
    """The least of a block of the board, for every kind."""
    for kind in range(ground.board_w.shape[0]):
        least_w = np.inf
        for node in range(block * BOARD_BLOCK, min(ground.nodes.shape[0], (block + 1) * BOARD_BLOCK)):
            least_w = min(least_w, ground.board_w[kind, node])
        ground.least_w[kind, block] = least_w


@lean_kernel
def _weigh_nodes(ground: MoveNodes, first: int, end: int) -> None:
    """The present potential of nodes and their columns of the board, in place."""
    for node in range(first, end):
        ground.nodes[node].cost_w = node_cost_w(ground, node)
        for kind in range(ground.board_w.shape[0]):
            ground.board_w[kind, node] = added_w(ground, kind, node, ANY_GPU, ground.slots[0])
            if ground.awake_w.shape[1]:
                ground.awake_w[kind, node] = added_w(ground, kind, node, GpuChoice(-1, False), ground.slots[0])


@lean_kernel
def weigh_column(ground: MoveNodes, node: int) -> None:
    """The present potential of a node and its column of the board, in place."""
    _weigh_nodes(ground, node, node + 1)
    _refresh_block(ground, node // BOARD_BLOCK)


@lean_kernel
def weigh_board(ground: MoveNodes) -> None:
    """Every node's potential and column of the board, in place."""
    _weigh_nodes(ground, 0, ground.nodes.shape[0])
    for block in range(ground.least_w.shape[1]):
        _refresh_block(ground, block)


@lean_kernel
def advance_clock(ground: MoveNodes) -> None:
    """Nothing is touched yet, at a new time."""
    clock = ground.clock[0]
    clock.now += 1
    clock.marked = 0


@lean_kernel
def refresh_node(ground: MoveNodes, node: int) -> None:
    """A node changed: its potential is taken anew, and its column of the board holds no longer."""
    clock, here = ground.clock[0], ground.nodes[node]
    ground.trail[clock.touches].node = node
    ground.trail[clock.touches].cost_w = here.cost_w
    clock.touches += 1
    here.cost_w = node_cost_w(ground, node)
    if here.stamp != clock.now:
        here.stamp = clock.now
        ground.marked[clock.marked] = node
        clock.marked += 1


@lean_kernel
def restore_potentials(ground: MoveNodes, mark: int) -> None:
    """The potentials as they were when the trail had the length `mark`; what was booked since is taken back already."""
    clock = ground.clock[0]
    while clock.touches > mark:
        clock.touches -= 1
        touched = ground.trail[clock.touches]
        ground.nodes[touched.node].cost_w = touched.cost_w


@lean_kernel
def find_cheapest_node(ground: MoveNodes, kind: int, home: int) -> tuple[int, float]:
    """The cheapest other node for one more of a kind, of equals the first, and what it adds; or -1."""
    best, best_w, now, is_bound = -1, np.inf, ground.clock[0].now, ground.awake_w.shape[1] > 0
    for block in range(ground.least_w.shape[1]):
        if ground.least_w[kind, block] >= best_w:
            continue
        for node in range(block * BOARD_BLOCK, min(ground.nodes.shape[0], (block + 1) * BOARD_BLOCK)):
            more_w = ground.board_w[kind, node]
            if more_w < best_w and node != home and ground.nodes[node].stamp != now:
                if is_bound and not may_wake(ground, kind, node):
                    more_w = ground.awake_w[kind, node]
                if more_w < best_w:
                    best, best_w = node, more_w
    for place in range(ground.clock[0].marked):
        node = ground.marked[place]
        if node == home:
            continue
        choice = GpuChoice(-1, may_wake(ground, kind, node))
        more_w = added_w(ground, kind, node, choice, ground.slots[0])
        if more_w < best_w or (more_w == best_w and node < best):
            best, best_w = node, more_w
    return best, float(best_w)


@nogil_kernel
def place_tasks(ground: MoveNodes, kinds: Ints, accepted: Ints) -> None:
    """Tasks of these kinds (T,) arrive one by one, each where it is cheapest; 1 or 0 into accepted (T,), in place."""
    weigh_board(ground)
    advance_clock(ground)
    for task in range(kinds.shape[0]):
        accepted[task] = 0
        node, more_w = find_cheapest_node(ground, kinds[task], -1)
        if more_w == np.inf:
            continue
        added_w(ground, kinds[task], node, ANY_GPU, ground.slots[1])
        book_replica(ground, kinds[task], node, ground.slots[1], 1)
        weigh_column(ground, node)
        accepted[task] = 1
