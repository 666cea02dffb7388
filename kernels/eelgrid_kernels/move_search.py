"""Move search: chains of moves that lower the cost of the cluster by more than their restarts cost.

    gain = sum_n cost(n before) - sum_n cost(n after) - sum_moved restart_w

The cost of a node is that of eelgrid_kernels.move_costs, so that a move is judged
by the measure by which work is placed.

Theory. A single move seldom gains: a GPU keeps its watts until the last task has
left it. So the neighbourhood is a chain: empty one GPU, one node, or one node's
CPU packages, unit by unit, each to where it is cheapest; or move one unit. Of a
chain only its best beginning is kept. Chains are taken by net gain for the share
of the budget that they use (greedy for a knapsack), re-weighed when they come to
the top (lazy: a stale worth that no longer leads waits), until none gains. A unit
moves once. Ejection chains: F. Glover, Discrete Applied Mathematics 65, 1996.

Where there are few sequences of moves, all are tried, and the best is known to be.
Of two moves that neither need each other nor share a target, one order is enough,
unless there are power budgets.

Each move is feasible when its turn comes, with the old place still held (OVERLAPS),
or, where the unit allows it, given up first (RELEASES; that helps on its own node).
Moves are in the order of the log, so what an earlier one freed a later one may use.
The same holds for the watts of power budgets.
"""

from typing import NamedTuple

import numpy as np

from eelgrid_kernels.arrays import MoveNodes, MoveSearch, Records
from eelgrid_kernels.compilation import inlined_kernel, lean_kernel, nogil_kernel
from eelgrid_kernels.move_costs import (
    GpuChoice,
    added_w,
    advance_clock,
    book_replica,
    draw_power,
    find_cheapest_node,
    gpu_fits,
    has_room,
    is_idle_without,
    leaves_power,
    may_wake,
    node_cost_w,
    refresh_node,
    restore_potentials,
    weigh_board,
    weigh_column,
)
from eelgrid_kernels.node_cost import GPU_WHOLE_MILLI

STAYS, OVERLAPS, RELEASES = 0, 1, 2
# Ways to search: the board alone is weighed; chains with ejections only in the end; or from the beginning; every
# sequence there is.
WEIGH, GREEDY, DEEP, EVERY = range(4)
# Less than this is rounding, not a gain.
GAIN_LEAST_W = 1e-6
# A worth must beat the next best by more than rounding to be re-weighed for it.
_SLACK = 1e-9
# Times that every node's chains are weighed from the beginning, and weighings for each node between.
_ROUNDS_MOST = 8
_WEIGHINGS_MOST = 64
# Units of a node whose chains are compared with one another: as many as a number has bits.
_COMPARED_MOST = 62


class Ejection(NamedTuple):
    """A unit that makes room for a chain before it."""

    unit: int  # -1 for none
    gain_w: float


NOT_EJECTED = Ejection(-1, 0.0)


@lean_kernel
def _book_unit(ground: MoveNodes, search: MoveSearch, unit: int, sign: int) -> None:
    """The replicas of a unit come back to their home (sign 1) or leave it (-1)."""
    moving = search.units[unit]
    for item in range(moving.first, moving.end):
        book_replica(ground, moving.kind, moving.home, search.slots[item], sign)
        for place in range(ground.requests[moving.kind].gpu_count if ground.budgets.shape[1] else 0):
            slot = search.slots[item, place]
            if is_idle_without(ground, moving.kind, moving.home, slot, sign):
                draw_power(ground, moving.home, sign * ground.gpus[moving.home, slot].fall_mw)


@lean_kernel
def _book_target(ground: MoveNodes, search: MoveSearch, kind: int, item: int, sign: int) -> None:
    """A replica comes to where it moves (sign 1) or leaves there (-1)."""
    node = search.to_node[item]
    book_replica(ground, kind, node, search.to_slots[item], sign)
    for place in range(ground.requests[kind].gpu_count if ground.budgets.shape[1] else 0):
        slot = search.to_slots[item, place]
        if is_idle_without(ground, kind, node, slot, sign):
            draw_power(ground, node, sign * ground.gpus[node, slot].rise_mw)


@lean_kernel
def _move_at_home(ground: MoveNodes, search: MoveSearch, unit: int, than_w: float) -> bool:
    """Move a share to another GPU of its node where that leaves the node cheaper than `than_w`; True if it moved."""
    moving = search.units[unit]
    kind, home, item = moving.kind, moving.home, moving.first
    here = ground.nodes[home]
    if moving.manner == OVERLAPS and not has_room(ground, kind, home):
        return False
    choice = GpuChoice(search.slots[item, 0], may_wake(ground, kind, home))
    _book_unit(ground, search, unit, -1)
    left_w, here.cost_w = here.cost_w, 0.0
    whole_w = added_w(ground, kind, home, choice, ground.slots[0])
    here.cost_w = left_w
    if whole_w >= than_w - _SLACK:
        _book_unit(ground, search, unit, 1)
        return False
    search.to_node[item] = home
    for place in range(ground.slots.shape[1]):
        search.to_slots[item, place] = ground.slots[0, place]
    _book_target(ground, search, kind, item, 1)
    refresh_node(ground, home)
    return True


@lean_kernel
def _move(ground: MoveNodes, search: MoveSearch, unit: int, stays_home: bool) -> float:
    """Move a unit to where it is cheapest, in place; returns what the cost grows by, inf (and no change) if it cannot.

    With `stays_home` a share may go to another GPU of its own node.
    """
    moving = search.units[unit]
    kind, home, first, end = moving.kind, moving.home, moving.first, moving.end
    before_w = ground.nodes[home].cost_w
    _book_unit(ground, search, unit, -1)  # what it costs that the home is left
    left_w = node_cost_w(ground, home)
    _book_unit(ground, search, unit, 1)
    grown_w = left_w - before_w
    for item in range(first, end):
        target, more_w = find_cheapest_node(ground, kind, home)
        shares = stays_home and end - first == 1 and ground.requests[kind].gpu_count == 1
        if shares and _move_at_home(ground, search, unit, left_w + more_w):
            return float(ground.nodes[home].cost_w - before_w)
        if target < 0:
            for back in range(first, item):
                _book_target(ground, search, kind, back, -1)
                refresh_node(ground, search.to_node[back])
            return float(np.inf)
        added_w(ground, kind, target, GpuChoice(-1, may_wake(ground, kind, target)), ground.slots[1])
        search.to_node[item] = target
        for place in range(ground.slots.shape[1]):
            search.to_slots[item, place] = ground.slots[1, place]
        _book_target(ground, search, kind, item, 1)
        refresh_node(ground, target)
        grown_w += more_w
    _book_unit(ground, search, unit, -1)
    refresh_node(ground, home)
    return float(grown_w)


@lean_kernel
def _take_back(ground: MoveNodes, search: MoveSearch, unit: int) -> None:
    """What is free as before the unit moved; the potentials are for `restore`."""
    moving = search.units[unit]
    for item in range(moving.first, moving.end):
        _book_target(ground, search, moving.kind, item, -1)
    _book_unit(ground, search, unit, 1)


@inlined_kernel
def _size(ground: MoveNodes, search: MoveSearch, unit: int, by_cpu: bool) -> int:
    """What a chain takes first: GPU before CPU, or CPU alone."""
    moving = search.units[unit]
    request, count = ground.requests[moving.kind], moving.end - moving.first
    cpu = count * request.cpu_milli
    return int(cpu if by_cpu else count * request.gpu_count * request.gpu_milli * 1_000_000 + cpu)


@inlined_kernel
def _holds(search: MoveSearch, unit: int, slot: int) -> bool:
    """Whether a replica of the unit is on a GPU."""
    for item in range(search.units[unit].first, search.units[unit].end):
        for place in range(search.slots.shape[1]):
            if search.slots[item, place] == slot:
                return True
    return False


@lean_kernel
def _line_up(ground: MoveNodes, search: MoveSearch, node: int, chain: int) -> int:
    """Put the units of a chain of a node into the queue, largest first; returns them as bits, 0 where they are too many.

    Chain 0 to G - 1 empties a GPU, G the node by GPU, G + 1 the node by CPU, and
    G + 2 + k moves the k-th unit of the node alone.
    """
    width, first, end = ground.gpus.shape[1], search.chains[node].first, search.chains[node].end
    length = bits = 0
    for index in range(first, end):
        unit = search.listed[index]
        if search.units[unit].moved or search.units[unit].manner == STAYS:
            continue
        if chain >= width + 2 and index - first != chain - width - 2:
            continue
        if chain < width and not _holds(search, unit, chain):
            continue
        place = length
        size = _size(ground, search, unit, chain == width + 1)
        while place > 0 and _size(ground, search, search.queue[0, place - 1], chain == width + 1) < size:
            search.queue[0, place] = search.queue[0, place - 1]
            place -= 1
        search.queue[0, place] = unit
        length += 1
        bits |= 1 << (index - first) if end - first <= _COMPARED_MOST else 0
    search.progress[0].queued = length
    return bits


@lean_kernel
def _is_new_chain(ground: MoveNodes, search: MoveSearch, chain: int, bits: int, seen: int) -> bool:
    """Whether the queue differs from those of the node that were weighed; `seen` of them emptied a GPU or moved one unit."""
    width, queued = ground.gpus.shape[1], search.progress[0].queued
    if chain == width:  # kept for the next, which may be in the same order
        for place in range(queued):
            search.queue[1, place] = search.queue[0, place]
        return True
    if chain == width + 1:
        differs = False
        for place in range(queued):
            differs |= search.queue[1, place] != search.queue[0, place]
        return bool(differs)
    is_known = False
    for place in range(seen):
        is_known |= search.seen[place] == bits and bits != 0
    search.seen[seen] = bits
    return not is_known


@inlined_kernel
def _spent(ground: MoveNodes, search: MoveSearch, unit: int, replicas: int, milli: int) -> tuple[int, int]:
    """The sums of what moves with one unit more."""
    moving = search.units[unit]
    request, count = ground.requests[moving.kind], moving.end - moving.first
    return int(replicas + count), int(milli + count * request.gpu_count * request.gpu_milli)


@lean_kernel
def _try_chain(ground: MoveNodes, search: MoveSearch, chain: int, most: int, ejection: Ejection) -> tuple[float, int]:
    """Move up to `most` units of the queue; returns the best worth on the way and after how many; what moved, stays moved.

    Worth is net watts by the larger share of the budget; -inf where nothing gained.
    """
    limits, progress, gain_w = search.limits, search.progress[0], ejection.gain_w
    width = ground.gpus.shape[1]
    best, best_after, done = -np.inf, 0, 0
    replicas, milli = progress.replicas, progress.gpu_milli
    if ejection.unit >= 0:
        replicas, milli = _spent(ground, search, ejection.unit, replicas, milli)
    for place in range(progress.queued):
        unit = search.queue[0, place]
        more, more_milli = _spent(ground, search, unit, replicas, milli)
        if done == most or more > limits.replicas or more_milli > limits.gpu_milli:
            break
        grown_w = _move(ground, search, unit, chain < width or chain >= width + 2)
        if grown_w == np.inf:
            continue
        search.queue[0, done] = unit
        done += 1
        replicas, milli = more, more_milli
        gain_w -= grown_w + search.units[unit].restart_w
        share = (replicas - progress.replicas) / max(1, limits.replicas)
        share = max(share, (milli - progress.gpu_milli) / max(1, limits.gpu_milli))
        worth = gain_w / share**limits.thrift
        if gain_w > GAIN_LEAST_W and worth > best:
            best, best_after = worth, done
    if done < progress.queued:
        search.queue[0, done] = -1
    return float(best), best_after


@lean_kernel
def _undo(ground: MoveNodes, search: MoveSearch, mark: int) -> None:
    """Take back the moves of the queue, the last first, from where it breaks off."""
    done = 0
    while done < search.progress[0].queued and search.queue[0, done] >= 0:
        done += 1
    for index in range(done - 1, -1, -1):
        _take_back(ground, search, search.queue[0, index])
    restore_potentials(ground, mark)


@lean_kernel
def _weigh_chains(ground: MoveNodes, search: MoveSearch, node: int, ejection: Ejection) -> None:
    """The worth of the node's best chain, which chain and how much of it, in place; nothing is moved."""
    best, width, seen = search.chains[node], ground.gpus.shape[1], 0
    best.worth = -np.inf
    homely = best.end - best.first
    for chain in range(width + 2 + homely if homely else 0):
        bits = _line_up(ground, search, node, chain)
        queued = search.progress[0].queued
        if queued == 0 or not _is_new_chain(ground, search, chain, bits, seen):
            continue
        seen += chain != width and chain != width + 1
        if ejection.unit < 0:  # else what the ejected unit touched stays marked
            advance_clock(ground)
        mark = ground.clock[0].touches
        worth, after = _try_chain(ground, search, chain, queued, ejection)
        _undo(ground, search, mark)
        if worth > best.worth:
            best.worth, best.chain, best.units = worth, chain, after


@lean_kernel
def _settle(ground: MoveNodes, search: MoveSearch, unit: int) -> None:
    """A unit has moved for good."""
    progress = search.progress[0]
    search.log[progress.steps] = unit
    progress.steps += 1
    search.units[unit].moved = 1
    progress.replicas, progress.gpu_milli = _spent(ground, search, unit, progress.replicas, progress.gpu_milli)


@lean_kernel
def _commit(ground: MoveNodes, search: MoveSearch, node: int, ejected: int) -> None:
    """Move the node's best chain for good, and before it a unit that makes room, -1 for none."""
    clock = ground.clock[0]
    advance_clock(ground)
    clock.touches = 0
    if ejected >= 0:
        _move(ground, search, ejected, False)
        _settle(ground, search, ejected)
    after = search.chains[node].units
    _line_up(ground, search, node, search.chains[node].chain)
    _try_chain(ground, search, search.chains[node].chain, after, NOT_EJECTED)
    for done in range(after):
        _settle(ground, search, search.queue[0, done])
    clock.touches, touched = 0, clock.marked
    for place in range(touched):  # weighing chains marks other nodes
        search.touched[place] = ground.marked[place]
        weigh_column(ground, search.touched[place])
    for place in range(touched):
        _weigh_chains(ground, search, search.touched[place], NOT_EJECTED)


@lean_kernel
def _leaders(chains: Records) -> tuple[int, float]:
    """The node of the highest worth, and the second highest worth."""
    first, second_worth = 0, -np.inf
    for node in range(1, chains.shape[0]):
        worth = chains[node].worth
        if worth > chains[first].worth:
            second_worth, first = chains[first].worth, node
        elif worth > second_worth:
            second_worth = worth
    return first, float(second_worth)


@lean_kernel
def _weigh_ejected(ground: MoveNodes, search: MoveSearch, node: int, unit: int) -> None:
    """The worth of the node's best chain after a unit has made room, in place; nothing is moved."""
    advance_clock(ground)
    search.chains[node].worth = -np.inf
    grown_w = _move(ground, search, unit, False)
    if grown_w != np.inf:
        search.units[unit].moved = 1
        _weigh_chains(ground, search, node, Ejection(unit, -grown_w - search.units[unit].restart_w))
        search.units[unit].moved = 0
        _take_back(ground, search, unit)
    restore_potentials(ground, 0)


@lean_kernel
def _next_costly(ground: MoveNodes, than: int) -> int:
    """The costliest node that is cheaper than a node, of equals the next; the costliest of all after -1, or -1."""
    found = -1
    for node in range(ground.nodes.shape[0]):
        cost_w = ground.nodes[node].cost_w
        if than >= 0 and (cost_w > ground.nodes[than].cost_w or (cost_w == ground.nodes[than].cost_w and node <= than)):
            continue
        if found < 0 or cost_w > ground.nodes[found].cost_w:
            found = node
    return found


@lean_kernel
def _eject(ground: MoveNodes, search: MoveSearch, floor: float) -> None:
    """The best chain after one unit elsewhere has made room, moved for good if its worth is above the floor."""
    best, best_unit, best_node, best_chain, best_after = floor, -1, -1, -1, 0
    node = -1
    for _ in range(ground.nodes.shape[0]):
        node = _next_costly(ground, node)  # there is most to gain
        if search.progress[0].ejections >= search.limits.ejections:
            break
        own = search.chains[node]
        if own.first == own.end:
            continue
        worth, chain, after = own.worth, own.chain, own.units
        for unit in range(search.units.shape[0]):
            if search.units[unit].moved or search.units[unit].manner == STAYS:
                continue
            if search.progress[0].ejections >= search.limits.ejections:
                break
            search.progress[0].ejections += 1
            _weigh_ejected(ground, search, node, unit)
            if own.worth > best:
                best, best_unit, best_node = own.worth, unit, node
                best_chain, best_after = own.chain, own.units
        own.worth, own.chain, own.units = worth, chain, after
    if best_unit >= 0:
        search.chains[best_node].chain, search.chains[best_node].units = best_chain, best_after
        _commit(ground, search, best_node, best_unit)


@lean_kernel
def _search_chains(ground: MoveNodes, search: MoveSearch, is_deep: bool) -> None:
    """Take chains until none gains."""
    count, progress = ground.nodes.shape[0], search.progress[0]
    for _ in range(_ROUNDS_MOST if count else 0):
        for node in range(count):
            _weigh_chains(ground, search, node, NOT_EJECTED)
        begun = progress.steps
        for _ in range(_WEIGHINGS_MOST * count):
            node, second = _leaders(search.chains)
            if search.chains[node].worth == -np.inf:
                break
            _weigh_chains(ground, search, node, NOT_EJECTED)
            worth = search.chains[node].worth
            if worth > 0.0 and worth >= second - _SLACK:
                before = progress.steps
                if is_deep:
                    _eject(ground, search, worth)
                if progress.steps == before:
                    _commit(ground, search, node, -1)
        if progress.steps == begun:
            _eject(ground, search, 0.0)
        if progress.steps == begun or progress.replicas >= search.limits.replicas:
            break


@lean_kernel
def _has_power(ground: MoveNodes, node: int, bits: int) -> bool:
    """Whether the budgets above a node leave what these GPUs of it draw once they are allocated."""
    rise_mw = 0
    for slot in range(ground.gpus.shape[1]):
        gpu = ground.gpus[node, slot]
        rise_mw += gpu.rise_mw if bits >> slot & 1 and gpu.free == GPU_WHOLE_MILLI else 0
    return bool(rise_mw == 0 or leaves_power(ground, node, rise_mw))


@lean_kernel
def _next_gpus(ground: MoveNodes, kind: int, node: int, last: int) -> int:
    """The next choice of GPUs of a node for one replica, as bits; -1 where there is none. `last` is -1 for the first."""
    count, width = ground.requests[kind].gpu_count, ground.gpus.shape[1]
    if last < 0 and not has_room(ground, kind, node):
        return -1
    if count == 0:
        return 0 if last < 0 else -1
    bits = (1 << count) - 1
    if last > 0:  # the next larger number with as many bits
        low = last & -last
        ripple = last + low
        bits = ripple | ((last ^ ripple) // low) >> 2
    while bits < 1 << width:
        fits = True
        for slot in range(width):
            if bits >> slot & 1 and not gpu_fits(ground, kind, node, slot):
                fits = False
        if fits and _has_power(ground, node, bits):
            return int(bits)
        low = bits & -bits
        ripple = bits + low
        bits = ripple | ((bits ^ ripple) // low) >> 2
    return -1


@lean_kernel
def _place_frame(ground: MoveNodes, search: MoveSearch, frame: int) -> None:
    """Put the replica of a frame where it says."""
    here, place = search.frames[frame], 0
    search.to_node[here.replica] = here.node
    for slot in range(ground.gpus.shape[1]):
        if here.gpus >> slot & 1:
            search.to_slots[here.replica, place] = slot
            place += 1
    _book_target(ground, search, search.units[here.unit].kind, here.replica, 1)


@lean_kernel
def _remove_frame(ground: MoveNodes, search: MoveSearch, frame: int) -> None:
    """Take the replica of a frame away again, and bring its unit home if it was the last."""
    here = search.frames[frame]
    moving = search.units[here.unit]
    if here.replica == moving.end - 1:
        if moving.manner == OVERLAPS:
            _book_unit(ground, search, here.unit, 1)
        restore_potentials(ground, here.touches)
    _book_target(ground, search, moving.kind, here.replica, -1)


@lean_kernel
def _is_other_order(ground: MoveNodes, search: MoveSearch, frame: int) -> bool:
    """Whether the last two moves could have been made the other way round, which is tried as well.

    Under power budgets it is not asked: what one move frees another may draw wherever it goes.
    """
    if frame == 0 or ground.budgets.shape[1]:
        return False
    one, two = search.frames[frame - 1], search.frames[frame]
    before, after = search.units[one.unit], search.units[two.unit]
    single = before.end - before.first == 1 and after.end - after.first == 1
    apart = two.node != before.home
    return bool(single and apart and two.unit < one.unit and two.node != one.node)


@lean_kernel
def _finish_unit(ground: MoveNodes, search: MoveSearch, frame: int) -> float:
    """The last replica of a unit is placed: the home is left; returns what is gained so far."""
    here = search.frames[frame]
    moving, gain_w = search.units[here.unit], here.gain_w - search.units[here.unit].restart_w
    if moving.manner == OVERLAPS:
        _book_unit(ground, search, here.unit, -1)
    for item in range(moving.first - 1, moving.end):
        node = moving.home if item < moving.first else search.to_node[item]
        before_w = ground.nodes[node].cost_w
        refresh_node(ground, node)
        gain_w += before_w - ground.nodes[node].cost_w
    return float(gain_w)


@lean_kernel
def _keep_best(search: MoveSearch, frames: int, gain_w: float) -> None:
    """Note the sequence of so many frames as the best."""
    progress = search.progress[0]
    progress.gain_w, progress.steps = gain_w, 0
    for frame in range(frames):
        here = search.frames[frame]
        search.best[frame, 0], search.best[frame, 1] = here.replica, here.node
        for place in range(search.to_slots.shape[1]):
            search.best[frame, 2 + place] = search.to_slots[here.replica, place]
        if here.replica == search.units[here.unit].end - 1:
            search.log[progress.steps] = here.unit
            progress.steps += 1
    if frames < search.best.shape[0]:
        search.best[frames, 0] = -1


@lean_kernel
def _open_frame(ground: MoveNodes, search: MoveSearch, frame: int, unit: int, gain_w: float) -> bool:
    """Begin to try units from `unit` on after the frames before; False where none may move within the budget."""
    here = search.frames[frame]
    replicas = milli = 0
    if frame > 0:
        last = search.frames[frame - 1]
        replicas, milli = _spent(ground, search, last.unit, last.replicas, last.gpu_milli)
    for candidate in range(unit, search.units.shape[0]):
        moving = search.units[candidate]
        more, more_milli = _spent(ground, search, candidate, replicas, milli)
        if moving.moved or moving.manner == STAYS:
            continue
        if more > search.limits.replicas or more_milli > search.limits.gpu_milli:
            continue
        here.unit, here.replica, here.node, here.gpus, here.gain_w = candidate, moving.first, 0, -1, gain_w
        here.replicas, here.gpu_milli, here.touches = replicas, milli, ground.clock[0].touches
        moving.moved = 1
        if moving.manner == RELEASES:
            _book_unit(ground, search, candidate, -1)
        return True
    return False


@lean_kernel
def _close_frame(ground: MoveNodes, search: MoveSearch, frame: int) -> None:
    """A unit has been tried everywhere: it is at home again."""
    unit = search.frames[frame].unit
    search.units[unit].moved = 0
    if search.units[unit].manner == RELEASES:
        _book_unit(ground, search, unit, 1)


@lean_kernel
def _advance_frame(ground: MoveNodes, search: MoveSearch, frame: int) -> bool:
    """Place the replica of a frame in the next way there is; False where there is none."""
    here = search.frames[frame]
    kind = search.units[here.unit].kind
    while here.node < ground.nodes.shape[0]:
        here.gpus = _next_gpus(ground, kind, here.node, here.gpus)
        if here.gpus >= 0:
            _place_frame(ground, search, frame)
            return True
        here.node += 1
    return False


@lean_kernel
def _search_every(ground: MoveNodes, search: MoveSearch) -> None:
    """Try every sequence of moves, up to so many moves; the best into the log, progress.tried within the limit if all were."""
    progress, top = search.progress[0], 0
    progress.gain_w = GAIN_LEAST_W
    opened = _open_frame(ground, search, 0, 0, 0.0)
    while opened and progress.tried <= search.limits.tries:
        here = search.frames[top]
        moving = search.units[here.unit]
        advance_clock(ground)
        if not _advance_frame(ground, search, top):
            if here.replica > moving.first:  # the replica before it goes on
                top -= 1
                _remove_frame(ground, search, top)
                continue
            _close_frame(ground, search, top)
            if not _open_frame(ground, search, top, here.unit + 1, here.gain_w):
                top -= 1
                opened = top >= 0
                if opened:
                    _remove_frame(ground, search, top)
            continue
        progress.tried += 1
        if here.replica < moving.end - 1:
            after = search.frames[top + 1]
            after.unit, after.replica, after.node, after.gpus, after.gain_w = (
                here.unit,
                here.replica + 1,
                0,
                -1,
                here.gain_w,
            )
            after.replicas, after.gpu_milli, after.touches = here.replicas, here.gpu_milli, here.touches
            top += 1
            continue
        gain_w = _finish_unit(ground, search, top)
        if gain_w > progress.gain_w + GAIN_LEAST_W:
            _keep_best(search, top + 1, gain_w)
        if _is_other_order(ground, search, top) or not _open_frame(ground, search, top + 1, 0, gain_w):
            _remove_frame(ground, search, top)
            continue
        top += 1


@lean_kernel
def _restore_best(search: MoveSearch) -> None:
    """The places of the best sequence into to_node and to_slots."""
    for row in range(search.best.shape[0]):
        item = search.best[row, 0]
        if item < 0:
            break
        search.to_node[item] = search.best[row, 1]
        for place in range(search.to_slots.shape[1]):
            search.to_slots[item, place] = search.best[row, 2 + place]


@nogil_kernel
def search_moves(ground: MoveNodes, search: MoveSearch, way: int) -> int:
    """Search for moves: the units in order into the log, their places into to_node and to_slots; returns how many.

    The board must have been weighed by a call with WEIGH: searches from the same ground may share that.
    """
    if way == WEIGH:
        weigh_board(ground)
    elif way == EVERY:
        _search_every(ground, search)
        _restore_best(search)
    else:
        _search_chains(ground, search, way == DEEP)
    return int(search.progress[0].steps)
