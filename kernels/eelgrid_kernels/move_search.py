"""Move search: chains of moves that lower the cost of the cluster by more than their restarts cost.

    gain = sum_n cost(n before) - sum_n cost(n after) - sum_moved restart_w

The cost of a node is that of eelgrid_kernels.node_cost, so that a move is judged
by the measure by which work is placed.

Theory. A single move seldom gains: a GPU keeps its watts until the last task has
left it. So the neighbourhood is a chain: empty one GPU, one node, or one node's
CPU packages, unit by unit, each to where it is cheapest; or move one unit. Of a
chain only its best beginning is kept. Chains are taken by net gain for the share
of the budget that they use (greedy for a knapsack), re-weighed when they come to
the top (lazy: a stale worth that no longer leads waits), until none gains. A unit
moves once. Ejection chains: F. Glover, Discrete Applied Mathematics 65, 1996.

Each move is feasible when its turn comes, with the old place still held (OVERLAPS),
or, where the unit allows it, given up first (RELEASES; that helps on its own node).
Moves are in the order of the log, so what an earlier one freed a later one may use.
"""

from typing import NamedTuple

import numpy as np

from eelgrid_kernels.arrays import Floats, MoveNodes, MoveSearch
from eelgrid_kernels.compilation import kernel, lean_kernel, nogil_kernel
from eelgrid_kernels.node_cost import (
    added_w,
    book_replica,
    find_cheapest_node,
    node_cost_w,
    refresh_node,
    restore_potentials,
    task_of_kind,
    weigh_column,
)

STAYS, OVERLAPS, RELEASES = 0, 1, 2
# Less than this is rounding, not a gain.
GAIN_LEAST_W = 1e-6
# A worth must beat the next best by more than rounding to be re-weighed for it.
_SLACK = 1e-9
# Times that every node's chains are weighed from the beginning, and weighings for each node between.
_ROUNDS_MOST = 8
_WEIGHINGS_MOST = 64


class Ejection(NamedTuple):
    """A unit that makes room for a chain before it."""

    unit: int  # -1 for none
    gain_w: float


NOT_EJECTED = Ejection(-1, 0.0)


@lean_kernel
def _move_at_home(ground: MoveNodes, search: MoveSearch, unit: int, than_w: float) -> bool:
    """Move a share to another GPU of its node where that leaves the node cheaper than `than_w`; True if it moved."""
    nodes, units = ground.nodes, search.units
    kind, home, item = units.kind[unit], units.home[unit], units.first[unit]
    here, task = units.slots[item], task_of_kind(ground.requests, kind)
    if units.manner[unit] == OVERLAPS and (
        nodes.cpu_free[home] < task.cpu_milli or nodes.memory_free[home] < task.memory_bytes
    ):
        return False
    book_replica(nodes, task, home, here, -1)
    left_w = ground.cost_w[home]
    ground.cost_w[home] = 0.0
    whole_w = added_w(ground, kind, home, here[0], ground.slots[0])
    ground.cost_w[home] = left_w
    if whole_w >= than_w - _SLACK:
        book_replica(nodes, task, home, here, 1)
        return False
    search.to_node[item] = home
    for place in range(ground.slots.shape[1]):
        search.to_slots[item, place] = ground.slots[0, place]
    book_replica(nodes, task, home, search.to_slots[item], 1)
    refresh_node(ground, home)
    return True


@lean_kernel
def _move(ground: MoveNodes, search: MoveSearch, unit: int, stays_home: bool) -> float:
    """Move a unit to where it is cheapest, in place; returns what the cost grows by, inf (and no change) if it cannot.

    With `stays_home` a share may go to another GPU of its own node.
    """
    nodes, units = ground.nodes, search.units
    kind, home, first, end = units.kind[unit], units.home[unit], units.first[unit], units.first[unit + 1]
    before_w, task = ground.cost_w[home], task_of_kind(ground.requests, kind)
    for item in range(first, end):  # what it costs that the home is left
        book_replica(nodes, task, home, units.slots[item], -1)
    left_w = node_cost_w(nodes, ground.mix, ground.prices, home)
    for item in range(first, end):
        book_replica(nodes, task, home, units.slots[item], 1)
    grown_w = left_w - before_w
    for item in range(first, end):
        target, more_w = find_cheapest_node(ground, kind, home)
        shares = stays_home and end - first == 1 and task.gpu_count == 1
        if shares and _move_at_home(ground, search, unit, left_w + more_w):
            return float(ground.cost_w[home] - before_w)
        if target < 0:
            for back in range(first, item):
                book_replica(nodes, task, search.to_node[back], search.to_slots[back], -1)
                refresh_node(ground, search.to_node[back])
            return float(np.inf)
        added_w(ground, kind, target, -1, ground.slots[1])
        search.to_node[item] = target
        for place in range(ground.slots.shape[1]):
            search.to_slots[item, place] = ground.slots[1, place]
        book_replica(nodes, task, target, search.to_slots[item], 1)
        refresh_node(ground, target)
        grown_w += more_w
    for item in range(first, end):
        book_replica(nodes, task, home, units.slots[item], -1)
    refresh_node(ground, home)
    return float(grown_w)


@lean_kernel
def _take_back(ground: MoveNodes, search: MoveSearch, unit: int) -> None:
    """What is free as before the unit moved; the potentials are for `restore`."""
    units, task = search.units, task_of_kind(ground.requests, search.units.kind[unit])
    for item in range(units.first[unit], units.first[unit + 1]):
        book_replica(ground.nodes, task, search.to_node[item], search.to_slots[item], -1)
        book_replica(ground.nodes, task, units.home[unit], units.slots[item], 1)


@lean_kernel
def _size(ground: MoveNodes, search: MoveSearch, unit: int, by_cpu: bool) -> int:
    """What a chain takes first: GPU before CPU, or CPU alone."""
    kind = search.units.kind[unit]
    count = search.units.first[unit + 1] - search.units.first[unit]
    cpu = count * ground.requests.cpu_milli[kind]
    if by_cpu:
        return int(cpu)
    return int(count * ground.requests.gpu_count[kind] * ground.requests.gpu_milli[kind] * 1_000_000 + cpu)


@lean_kernel
def _line_up(ground: MoveNodes, search: MoveSearch, node: int, chain: int) -> None:
    """Put the units of a chain of a node into the queue, largest first.

    Chain 0 to G - 1 empties a GPU, G the node by GPU, G + 1 the node by CPU, and
    G + 2 + k moves the k-th unit of the node alone.
    """
    width = ground.nodes.gpu_state.shape[1]
    length = 0
    for index in range(search.at[node], search.at[node + 1]):
        unit = search.listed[index]
        if search.moved[unit] or search.units.manner[unit] == STAYS:
            continue
        if chain >= width + 2 and index - search.at[node] != chain - width - 2:
            continue
        if chain < width:
            found = False
            for item in range(search.units.first[unit], search.units.first[unit + 1]):
                for place in range(search.units.slots.shape[1]):
                    found |= search.units.slots[item, place] == chain
            if not found:
                continue
        place = length
        size = _size(ground, search, unit, chain == width + 1)
        while place > 0 and _size(ground, search, search.queue[place - 1], chain == width + 1) < size:
            search.queue[place] = search.queue[place - 1]
            place -= 1
        search.queue[place] = unit
        length += 1
    search.progress[0].queued = length


@lean_kernel
def _spent(ground: MoveNodes, search: MoveSearch, unit: int, replicas: int, milli: int) -> tuple[int, int]:
    """The sums of what moves with one unit more."""
    kind = search.units.kind[unit]
    count = search.units.first[unit + 1] - search.units.first[unit]
    each = ground.requests.gpu_count[kind] * ground.requests.gpu_milli[kind]
    return int(replicas + count), int(milli + count * each)


@lean_kernel
def _try_chain(ground: MoveNodes, search: MoveSearch, chain: int, most: int, ejection: Ejection) -> tuple[float, int]:
    """Move up to `most` units of the queue; returns the best worth on the way and after how many; what moved, stays moved.

    Worth is net watts by the larger share of the budget; -inf where nothing gained.
    """
    limits, progress, gain_w = search.limits, search.progress[0], ejection.gain_w
    width = ground.nodes.gpu_state.shape[1]
    best, best_after, done = -np.inf, 0, 0
    replicas, milli = progress.replicas, progress.gpu_milli
    if ejection.unit >= 0:
        replicas, milli = _spent(ground, search, ejection.unit, replicas, milli)
    for place in range(progress.queued):
        unit = search.queue[place]
        more, more_milli = _spent(ground, search, unit, replicas, milli)
        if done == most or more > limits.replicas or more_milli > limits.gpu_milli:
            break
        grown_w = _move(ground, search, unit, chain < width or chain >= width + 2)
        if grown_w == np.inf:
            continue
        search.queue[done] = unit
        done += 1
        replicas, milli = more, more_milli
        gain_w -= grown_w + search.units.restart_w[unit]
        share = (replicas - progress.replicas) / max(1, limits.replicas)
        share = max(share, (milli - progress.gpu_milli) / max(1, limits.gpu_milli))
        worth = gain_w / share**limits.thrift
        if gain_w > GAIN_LEAST_W and worth > best:
            best, best_after = worth, done
    if done < progress.queued:
        search.queue[done] = -1
    return float(best), best_after


@lean_kernel
def _undo(ground: MoveNodes, search: MoveSearch, mark: int) -> None:
    """Take back the moves of the queue, the last first, from where it breaks off."""
    done = 0
    while done < search.progress[0].queued and search.queue[done] >= 0:
        done += 1
    for index in range(done - 1, -1, -1):
        _take_back(ground, search, search.queue[index])
    restore_potentials(ground, mark)


@lean_kernel
def _weigh_chains(ground: MoveNodes, search: MoveSearch, node: int, ejection: Ejection) -> None:
    """The worth of the node's best chain, which chain and how much of it, in place; nothing is moved."""
    search.worth[node] = -np.inf
    homely = search.at[node + 1] - search.at[node]
    for chain in range(ground.nodes.gpu_state.shape[1] + 2 + homely if homely else 0):
        _line_up(ground, search, node, chain)
        queued = search.progress[0].queued
        if queued == 0:
            continue
        if ejection.unit < 0:  # else what the ejected unit touched stays marked
            ground.clock[0].now += 1
        mark = ground.clock[0].touches
        worth, after = _try_chain(ground, search, chain, queued, ejection)
        _undo(ground, search, mark)
        if worth > search.worth[node]:
            search.worth[node] = worth
            search.chain[node], search.chain_units[node] = chain, after


@lean_kernel
def _settle(ground: MoveNodes, search: MoveSearch, unit: int) -> None:
    """A unit has moved for good."""
    progress = search.progress[0]
    search.log[progress.steps] = unit
    progress.steps += 1
    search.moved[unit] = True
    progress.replicas, progress.gpu_milli = _spent(ground, search, unit, progress.replicas, progress.gpu_milli)


@kernel
def _commit(ground: MoveNodes, search: MoveSearch, node: int, ejected: int) -> None:
    """Move the node's best chain for good, and before it a unit that makes room, -1 for none."""
    clock = ground.clock[0]
    clock.now += 1
    clock.touches = 0
    if ejected >= 0:
        _move(ground, search, ejected, False)
        _settle(ground, search, ejected)
    after = search.chain_units[node]
    _line_up(ground, search, node, search.chain[node])
    _try_chain(ground, search, search.chain[node], after, NOT_EJECTED)
    for done in range(after):
        _settle(ground, search, search.queue[done])
    clock.touches = 0
    touched = np.flatnonzero(ground.stamp == clock.now)
    for index in range(touched.shape[0]):
        weigh_column(ground, int(touched[index]))
    for index in range(touched.shape[0]):
        _weigh_chains(ground, search, int(touched[index]), NOT_EJECTED)


@kernel
def _leaders(worth: Floats) -> tuple[int, float]:
    """The node of the highest worth, and the second highest worth."""
    first, second_worth = 0, -np.inf
    for node in range(1, worth.shape[0]):
        if worth[node] > worth[first]:
            second_worth, first = worth[first], node
        elif worth[node] > second_worth:
            second_worth = worth[node]
    return first, float(second_worth)


@kernel
def _eject(ground: MoveNodes, search: MoveSearch, floor: float) -> None:
    """The best chain after one unit elsewhere has made room, moved for good if its worth is above the floor."""
    best, best_unit, best_node, best_chain, best_after = floor, -1, -1, -1, 0
    # The costliest nodes first: there is most to gain.
    for node in np.argsort(-ground.cost_w, kind="mergesort"):
        if search.at[node] == search.at[node + 1]:
            continue
        worth, chain, after = search.worth[node], search.chain[node], search.chain_units[node]
        for unit in range(search.moved.shape[0]):
            stays = search.moved[unit] or search.units.manner[unit] == STAYS
            if stays:
                continue
            if search.progress[0].ejections >= search.limits.ejections:
                break
            search.progress[0].ejections += 1
            ground.clock[0].now += 1
            grown_w = _move(ground, search, unit, False)
            if grown_w == np.inf:
                restore_potentials(ground, 0)
                continue
            search.moved[unit] = True
            _weigh_chains(ground, search, node, Ejection(unit, -grown_w - search.units.restart_w[unit]))
            search.moved[unit] = False
            _take_back(ground, search, unit)
            restore_potentials(ground, 0)
            if search.worth[node] > best:
                best, best_unit, best_node = search.worth[node], unit, node
                best_chain, best_after = search.chain[node], search.chain_units[node]
        search.worth[node], search.chain[node], search.chain_units[node] = worth, chain, after
    if best_unit >= 0:
        search.chain[best_node], search.chain_units[best_node] = best_chain, best_after
        _commit(ground, search, best_node, best_unit)


@nogil_kernel
def search_moves(ground: MoveNodes, search: MoveSearch) -> int:
    """Search for moves: the units in order into the log, their places into to_node and to_slots; returns how many.

    The board must have been weighed (`weigh_board`): searches from the same ground may share the work.
    """
    count, progress = ground.cost_w.shape[0], search.progress[0]
    for _ in range(_ROUNDS_MOST if count else 0):
        for node in range(count):
            _weigh_chains(ground, search, node, NOT_EJECTED)
        begun = progress.steps
        for _ in range(_WEIGHINGS_MOST * count):
            node, second = _leaders(search.worth)
            if search.worth[node] == -np.inf:
                break
            _weigh_chains(ground, search, node, NOT_EJECTED)
            if search.worth[node] > 0.0 and search.worth[node] >= second - _SLACK:
                before = progress.steps
                if search.limits.deep:
                    _eject(ground, search, search.worth[node])
                if progress.steps == before:
                    _commit(ground, search, node, -1)
        if progress.steps == begun:
            _eject(ground, search, 0.0)
        if progress.steps == begun or progress.replicas >= search.limits.replicas:
            break
    return int(progress.steps)
