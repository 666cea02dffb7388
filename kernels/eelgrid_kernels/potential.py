"""What a node costs, and what one more task adds to it: the measure that moves are judged by.

    cost(n) = w_power * P(n) + w_frag * F(n) / 1000 + w_strand * S(n) - w_block * B(n)

Owns the potential of one node as a function of the node alone, in one place
(`node_terms`), and a board of what each kind of request would add to each node.
P, F and S are those whose differences eelgrid_kernels.placement weighs for an
arrival; tests hold the two together. B is of moves alone: the GPUs of n that are
wholly free, if they are at least BLOCK_LEAST. F counts what the mix cannot use, and
in a mix of small tasks it hardly sees that a large one finds no node any more.

`fill` lets a stream of tasks arrive, which is how room for future work is counted.
"""
# ruff: noqa: PLR0917 (numba takes arguments by position)

import numpy as np

from eelgrid_kernels.arrays import Floats, Ints, Mix, Nodes
from eelgrid_kernels.compiled import lean, unlocked
from eelgrid_kernels.move_arrays import Ground, Prices, Requests
from eelgrid_kernels.packages import FEED
from eelgrid_kernels.placement import GPU_PLACEABLE, GPU_WHOLE_MILLI, fragmentation, node_power

__all__ = [
    "BLOCK_LEAST", "added_w", "book", "elsewhere", "fill", "node_cost_w", "node_terms", "restore", "totals", "touch", "weigh_board",
    "weigh_column",
]  # fmt: skip


# Whole free GPUs that are a block, the usual node. Measured: four, which is easier to have, makes less room for eight.
BLOCK_LEAST = 8


@lean
def node_terms(nodes: Nodes, mix: Mix, node: int, fragments: bool) -> tuple[float, float, float, float]:
    """Watts, fragmented GPUs, stranded GPUs and less GPUs of blocks of a node; the second, the dearest, if asked for."""
    total = whole = 0
    for slot in range(nodes.gpu_state.shape[1]):
        if nodes.gpu_state[node, slot] == GPU_PLACEABLE:
            total += nodes.gpu_free[node, slot]
            whole += nodes.gpu_free[node, slot] == GPU_WHOLE_MILLI
    fragmented = fragmentation(nodes, mix, node) / (mix.total * 1000.0) if fragments else 0.0
    stranded = max(0, FEED * total - nodes.cpu_free[node]) / (FEED * 1000.0)
    in_blocks = float(whole) if whole >= BLOCK_LEAST and nodes.available[node] else 0.0
    return node_power(nodes, node), fragmented, stranded, -in_blocks


@lean
def node_cost_w(nodes: Nodes, mix: Mix, prices: Prices, node: int) -> float:
    """The potential of a node in watts-equivalent."""
    power_w, fragmented, stranded, blocks = node_terms(nodes, mix, node, prices.fragmentation_w != 0.0)
    use_w = prices.power * power_w + prices.fragmentation_w * fragmented
    return float(use_w + prices.stranding_w * stranded + prices.block_w * blocks)


@lean
def book(nodes: Nodes, requests: Requests, kind: int, node: int, slots: Ints, sign: int) -> None:
    """One replica comes to a node (sign 1) or leaves it (-1): its free amounts change in place."""
    nodes.cpu_free[node] -= sign * requests.cpu_milli[kind]
    nodes.memory_free[node] -= sign * requests.memory_bytes[kind]
    for place in range(requests.gpu_count[kind]):
        nodes.gpu_free[node, slots[place]] -= sign * requests.gpu_milli[kind]


@lean
def _holds(nodes: Nodes, requests: Requests, kind: int, node: int, slot: int) -> bool:
    return bool(
        nodes.gpu_state[node, slot] == GPU_PLACEABLE
        and requests.allows[kind, nodes.gpu_model[node, slot]] != 0
        and nodes.gpu_free[node, slot] >= requests.gpu_milli[kind]
    )


@lean
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


@lean
def added_w(ground: Ground, kind: int, node: int, barred: int, slots: Ints) -> float:
    """What one more replica of a kind adds to a node, its GPUs into slots (W,); inf where it does not fit.

    A share goes to the GPU where it is cheapest, but not to `barred`; several
    GPUs are the first that are free, as for an arrival.
    """
    nodes, requests = ground.nodes, ground.requests
    count = requests.gpu_count[kind]
    slots[:] = -1
    if (
        not nodes.available[node]
        or nodes.cpu_free[node] < requests.cpu_milli[kind]
        or nodes.memory_free[node] < requests.memory_bytes[kind]
    ):
        return float(np.inf)
    best_w, best_slot, taken = np.inf, -1, 0
    for slot in range(nodes.gpu_state.shape[1] if count > 0 else 0):
        if slot == barred or not _holds(nodes, requests, kind, node, slot):
            continue
        if count == 1 and _alike(nodes, node, slot, barred):
            continue
        slots[taken] = slot
        if count == 1:
            book(nodes, requests, kind, node, slots, 1)
            cost_w = node_cost_w(nodes, ground.mix, ground.prices, node)
            book(nodes, requests, kind, node, slots, -1)
            if cost_w < best_w:
                best_w, best_slot = cost_w, slot
            continue
        taken += 1
        if taken == count:
            break
    if count == 1:
        slots[0] = best_slot
    elif taken == count:
        book(nodes, requests, kind, node, slots, 1)
        best_w = node_cost_w(nodes, ground.mix, ground.prices, node)
        book(nodes, requests, kind, node, slots, -1)
    return float(best_w - ground.cost_w[node])


@lean
def weigh_column(ground: Ground, node: int) -> None:
    """The present potential of a node and its column of the board, in place."""
    ground.cost_w[node] = node_cost_w(ground.nodes, ground.mix, ground.prices, node)
    for kind in range(ground.board_w.shape[0]):
        ground.board_w[kind, node] = added_w(ground, kind, node, -1, ground.slots[0])


@lean
def touch(ground: Ground, node: int) -> None:
    """A node changed: its potential is taken anew, and its column of the board holds no longer."""
    ground.trail[ground.clock[1]] = node
    ground.trail_w[ground.clock[1]] = ground.cost_w[node]
    ground.clock[1] += 1
    ground.cost_w[node] = node_cost_w(ground.nodes, ground.mix, ground.prices, node)
    ground.stamp[node] = ground.clock[0]


@lean
def restore(ground: Ground, mark: int) -> None:
    """The potentials as they were when the trail had the length `mark`; what was booked since is taken back already."""
    while ground.clock[1] > mark:
        ground.clock[1] -= 1
        ground.cost_w[ground.trail[ground.clock[1]]] = ground.trail_w[ground.clock[1]]


@unlocked
def weigh_board(ground: Ground) -> None:
    """Every node's potential and column of the board, in place."""
    for node in range(ground.cost_w.shape[0]):
        weigh_column(ground, node)


@lean
def elsewhere(ground: Ground, kind: int, home: int) -> tuple[int, float]:
    """The cheapest other node for one more of a kind, of equals the one of lower rank, and what it adds; or -1."""
    best, best_w = -1, np.inf
    for node in range(ground.cost_w.shape[0]):
        if node == home:
            continue
        more_w = ground.board_w[kind, node]
        if ground.stamp[node] == ground.clock[0]:
            more_w = added_w(ground, kind, node, -1, ground.slots[0])
        ranked = more_w == best_w and best >= 0 and ground.nodes.rank[node] < ground.nodes.rank[best]
        if more_w < best_w or ranked:
            best, best_w = node, more_w
    return best, float(best_w)


@unlocked
def fill(ground: Ground, kinds: Ints, accepted: Ints) -> None:
    """Tasks of these kinds (T,) arrive one by one, each where it is cheapest; 1 or 0 into accepted (T,), in place."""
    weigh_board(ground)
    ground.clock[0] += 1
    for task in range(kinds.shape[0]):
        accepted[task] = 0
        node, more_w = elsewhere(ground, kinds[task], -1)
        if more_w == np.inf:
            continue
        added_w(ground, kinds[task], node, -1, ground.slots[1])
        book(ground.nodes, ground.requests, kinds[task], node, ground.slots[1], 1)
        weigh_column(ground, node)
        accepted[task] = 1


@lean
def totals(nodes: Nodes, mix: Mix, terms: Floats) -> None:
    """The terms of all nodes into terms (4,), in place."""
    terms[:] = 0.0
    for node in range(nodes.cpu_capacity.shape[0]):
        power_w, fragmented, stranded, blocks = node_terms(nodes, mix, node, True)
        terms[0] += power_w
        terms[1] += fragmented
        terms[2] += stranded
        terms[3] += blocks
