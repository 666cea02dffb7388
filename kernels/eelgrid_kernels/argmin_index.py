"""Argmin index: the cheapest state for each kind of task without scanning all nodes, updated from a change log.

Owns what is kept of each kind of task: its cost in each state and the best of
each block of states. Must not know how a cost comes about (eelgrid_kernels.baselines)
nor how nodes change (eelgrid_kernels.node_states).

Theory: a cost is a function of kind and state, so it stands as long as both do.
The log of states names what changed; when a kind is asked for, it reads what it
has not read yet, weighs the states that are new to it, asks again for the first
node with enough memory in those whose nodes changed, and repairs the best of
their blocks of 64. The cheapest of all is then the best of the blocks' bests: for
100,000 nodes some 1,000 numbers side by side. So a decision costs what changed
since the last task of its kind, which is about the number of kinds and not of
nodes. Equals are decided by the lowest rank of their first node with the memory.

A real mix of PWR and FGD is scaled by the least and the most over all that fits,
so that its two numbers are kept and read in a row, two passes, for every state
ever used; RANDOM draws for every node that fits.
"""

import numpy as np

from eelgrid_kernels.arrays import (
    BOUNDED,
    EXACT,
    FRAGMENTATION,
    LOOSE,
    POWER,
    ArrivalOutcomes,
    CostIndex,
    EngineArrays,
    Ints,
    Records,
)
from eelgrid_kernels.baselines import MIX, RANDOM, choose_gpus, compute_exact_cost, compute_task_cost, is_bounded
from eelgrid_kernels.compilation import inlined_kernel, kernel, kernel_least, lean_kernel
from eelgrid_kernels.node_states import first_roomy, random_draw, shift_task
from eelgrid_kernels.opportunity_prices import update_prices

_SHIFT = 6
BLOCK = 1 << _SHIFT
_RANKS_MOST = 1 << 62  # beyond any rank with the place in a block
LOOSE_MOST_W = 200.0  # from there on bounds are made anew rather than lowered


@inlined_kernel
def is_scaled(policy: int, power: float, fragmentation: float) -> bool:
    """Whether a policy with these weights keeps two numbers, which are weighed against each other when all are known."""
    return bool(policy == MIX and power != 0.0 and fragmentation != 0.0)


@inlined_kernel
def _is_cheaper(index: CostIndex, kind: int, row: int, other: int) -> bool:
    """Whether a row comes before another: by its cost, equals by rank."""
    mine, theirs = index.cost[kind, row], index.cost[kind, other]
    return bool(mine < theirs or (mine == theirs and index.rank[kind, row] < index.rank[kind, other]))


@kernel_least
def _find_top(run: EngineArrays, kind: int, block: int) -> None:
    """Look for the best row of a block anew: without branches, so that several rows are compared at once."""
    first, index = block * BLOCK, run.cost_index
    last, least, lowest = min(first + BLOCK, run.scalars[0].rows), np.inf, _RANKS_MOST
    costs, ranks = index.cost[kind, first:last], index.rank[kind, first:last]
    for place in range(costs.shape[0]):
        least = min(least, costs[place])
    for place in range(costs.shape[0]):
        ranked = (int(ranks[place]) << _SHIFT) + place
        lowest = min(lowest, ranked if costs[place] == least else _RANKS_MOST)
    index.top[kind, block], index.top_cost[kind, block] = first + (lowest & (BLOCK - 1)), least


@inlined_kernel
def _weigh_again(run: EngineArrays, kind: int, row: int, read: int, exact: bool) -> float:
    """The cost of a row whose nodes changed since the kind has read the log; infinite where it does not fit."""
    state, index, price = run.states[row], run.cost_index, np.inf
    if state.root < 0:
        return price
    price = index.cost[kind, row]
    # Where it did not fit for memory alone it may fit now.
    if state.born >= read or price == np.inf:
        price, power, _ = compute_task_cost(run, kind, row, exact)
        index.known[kind, row] = EXACT if exact else BOUNDED
        if index.scaled.shape[1] > 0:
            index.scaled[kind, row] = power
    if price < np.inf:
        node = first_roomy(run.nodes, state.root, run.kinds[kind].memory, -1)
        if node < 0:
            return np.inf
        index.rank[kind, row] = run.nodes[node].rank
    return price


@lean_kernel
def _review(run: EngineArrays, kind: int, entry: int, entries: int, whole: bool) -> int:
    """Bring what a kind knows of the rows of these entries of the log up to date, or of all rows; returns how many."""
    index, exact, mask, reviewed = run.cost_index, not is_bounded(run), run.log.shape[0] - 1, 0
    rows, read = run.scalars[0].rows, -1 if whole else run.kinds[kind].read
    partly = not whole and entries < run.scalars[0].log_entries
    for at in range(entry, entries):
        row = at if whole else run.log[at & mask]
        block = row >> _SHIFT
        if not whole and run.states[row].touched != at:
            # Its last entry counts. Where this reading ends before that one, it must still be weighed then.
            if partly and run.states[row].born >= read:
                index.cost[kind, row] = np.inf
                if index.top[kind, block] == row:
                    _find_top(run, kind, block)
            continue
        reviewed += 1
        index.cost[kind, row] = _weigh_again(run, kind, row, read, exact)
        best = index.top[kind, block]
        if whole:
            if row == rows - 1 or (row + 1) >> _SHIFT != block:
                _find_top(run, kind, block)
        elif best == row or best >> _SHIFT != block:
            _find_top(run, kind, block)
        elif _is_cheaper(index, kind, row, best):
            index.top[kind, block], index.top_cost[kind, block] = row, index.cost[kind, row]
    return reviewed


@lean_kernel
def _lower(run: EngineArrays, kind: int) -> None:
    """Take off all costs of a kind what new prices may have taken off: none is known exactly then."""
    loose, index, rows = run.kinds[kind].loose, run.cost_index, run.scalars[0].rows
    run.kinds[kind].loose = 0.0
    for row in range(rows):
        index.cost[kind, row] -= loose
        index.known[kind, row] = LOOSE
    for block in range((rows + BLOCK - 1) >> _SHIFT):
        index.top_cost[kind, block] -= loose


@lean_kernel
def apply_log(run: EngineArrays, kind: int) -> int:
    """Read the log to its end for a kind; returns how many rows were reviewed."""
    asked, entries, rows = run.kinds[kind], run.scalars[0].log_entries, run.scalars[0].rows
    whole = asked.read < 0 or entries - asked.read > run.log.shape[0] or asked.loose > LOOSE_MOST_W
    if whole:
        asked.loose = 0.0
    elif asked.loose > 0.0:
        _lower(run, kind)
    reviewed = _review(run, kind, 0 if whole else asked.read, rows if whole else entries, whole)
    asked.read = entries
    return reviewed


@lean_kernel
def apply_log_ahead(run: EngineArrays, kind: int, most: int) -> int:
    """Read at most so many entries of the log for a kind that nobody asked for; returns how many rows were reviewed.

    For idle time: it changes no decision, only how much the kind's next one has to catch up. What is known by
    prices of before is weighed anew, all of it, and the cheapest row exactly.
    """
    asked, entries = run.kinds[kind], run.scalars[0].log_entries
    if asked.read < 0 or entries - asked.read > run.log.shape[0]:
        return 0
    if asked.loose > 0.0:
        reviewed = apply_log(run, kind)
        _cheapest(run, kind)
        return reviewed
    last = min(entries, asked.read + most)
    reviewed = _review(run, kind, asked.read, last, False)
    asked.read = last
    if last == entries:
        _cheapest(run, kind)
    return reviewed


@inlined_kernel
def _lowest(run: EngineArrays, kind: int) -> int:
    """The best row of the blocks' bests, or -1; it may be there by a bound."""
    index, best, best_cost = run.cost_index, -1, np.inf
    for block in range((run.scalars[0].rows + BLOCK - 1) >> _SHIFT):
        cost = index.top_cost[kind, block]
        if cost < best_cost:
            best, best_cost = index.top[kind, block], cost
        elif cost == best_cost and cost < np.inf and index.rank[kind, index.top[kind, block]] < index.rank[kind, best]:
            best = index.top[kind, block]
    return best


@lean_kernel
def _cheapest(run: EngineArrays, kind: int) -> int:
    """The row with the least cost, or -1: the lowest is weighed until it is there by its cost."""
    index, row = run.cost_index, _lowest(run, kind)
    while row >= 0 and index.known[kind, row] != EXACT:
        fresh = index.known[kind, row] == BOUNDED
        price, _, _ = compute_task_cost(run, kind, row, fresh)
        index.cost[kind, row] = price if fresh else max(price, index.cost[kind, row])
        index.known[kind, row] = EXACT if fresh else BOUNDED
        _find_top(run, kind, row >> _SHIFT)
        row = _lowest(run, kind)
    return int(row)


@kernel
def work_ahead(run: EngineArrays, turn: int, least: int, most: int) -> int:
    """Idle work, bounded: one kind that has at least so many changes to catch up with reads at most so many.

    Returns the kind to go on with, or -1 if none has anything left. From `turn` on, kinds known by prices of before
    come first, since they take longest. Kinds that were never asked for, or long ago, wait until they are. It changes
    no decision.
    """
    kinds, entries, chosen = run.kinds.shape[0], run.scalars[0].log_entries, -1
    for at in range(kinds):
        asked = run.kinds[(turn + at) % kinds]
        if asked.read < 0 or entries - asked.read > run.log.shape[0]:
            continue
        if asked.loose > 0.0:
            chosen = (turn + at) % kinds
            break
        if chosen < 0 and entries - asked.read >= least:
            chosen = (turn + at) % kinds
    if chosen < 0:
        return -1
    apply_log_ahead(run, chosen, most)
    return int((chosen + 1) % kinds)


@lean_kernel
def compute_all_costs(run: EngineArrays, kind: int) -> None:
    """Make every cost of a kind exact."""
    apply_log(run, kind)
    index, rows = run.cost_index, run.scalars[0].rows
    for row in range(rows):
        if index.known[kind, row] != EXACT and index.cost[kind, row] < np.inf:
            index.cost[kind, row], index.known[kind, row] = compute_exact_cost(run, kind, row)[0], EXACT
    for block in range((rows + BLOCK - 1) >> _SHIFT):
        _find_top(run, kind, block)


@lean_kernel
def _span(run: EngineArrays, kind: int) -> tuple[float, float]:
    """The least and the most that is scaled, over all that fits."""
    low, high = np.inf, -np.inf
    for row in range(run.scalars[0].rows):
        if run.cost_index.cost[kind, row] < np.inf:
            score = -run.cost_index.scaled[kind, row]
            low, high = min(low, score), max(high, score)
    return low, high


@lean_kernel
def _cheapest_scaled(run: EngineArrays, kind: int, low: float, high: float) -> int:
    """The row with the highest mixed score, or -1."""
    index, best, best_score = run.cost_index, -1, -np.inf
    weights = run.scalars[0].weights
    for row in range(run.scalars[0].rows):
        if index.cost[kind, row] == np.inf:
            continue
        scaled = (-index.scaled[kind, row] - low) * 100.0 // (high - low) if high > low else 100.0
        score = weights[POWER] * scaled - weights[FRAGMENTATION] * index.cost[kind, row]
        if score > best_score or (score == best_score and index.rank[kind, row] < index.rank[kind, best]):
            best, best_score = row, score
    return best


@lean_kernel
def _luckier(nodes: Records, seed: int, moment: int, one: int, other: int) -> int:
    """Of two nodes the one with the higher draw, equals by rank; -1 is none."""
    if one < 0 or other < 0:
        return max(one, other)
    mine, theirs = random_draw(seed, moment, nodes[one].rank), random_draw(seed, moment, nodes[other].rank)
    first = mine > theirs or (mine == theirs and nodes[one].rank < nodes[other].rank)
    return one if first else other


@lean_kernel
def _drawn_of(nodes: Records, root: int, memory: int, seed: int, moment: int) -> int:
    """The node with the highest draw among those of a tree with the memory, or -1."""
    if root < 0 or nodes[root].most_memory < memory:
        return -1
    best = root if nodes[root].memory >= memory else -1
    for child in (nodes[root].left, nodes[root].right):
        below = _drawn_of(nodes, child, memory, seed, moment)
        best = _luckier(nodes, seed, moment, best, below)
    return best


@lean_kernel
def _random_node(run: EngineArrays, kind: int, moment: int) -> int:
    """The node with the highest draw among all that fit, or -1."""
    nodes, seed = run.nodes, run.scalars[0].seed
    best, memory = -1, run.kinds[kind].memory
    for row in range(run.scalars[0].rows):
        if run.cost_index.cost[kind, row] < np.inf:
            found = _drawn_of(nodes, run.states[row].root, memory, seed, moment)
            best = _luckier(nodes, seed, moment, best, found)
    return best


@kernel
def choose_nodes(run: EngineArrays, kind: int, moment: int, nodes: Ints) -> int:
    """The best nodes for a task, best first, into nodes (any length), in place; returns how many there are.

    moment numbers the decisions of RANDOM, which names one node only. What is asked
    for beyond the first is hidden as it is found, and shown again at the end.
    """
    apply_log(run, kind)
    found, most, cost, rank, scalars = 0, nodes.shape[0], run.cost_index.cost, run.cost_index.rank, run.scalars[0]
    if scalars.policy == RANDOM:
        nodes[0] = _random_node(run, kind, moment)
        return 1 if nodes[0] >= 0 else 0
    scaled = is_scaled(scalars.policy, scalars.weights[POWER], scalars.weights[FRAGMENTATION])
    low, high = _span(run, kind) if scaled else (0.0, 0.0)
    hidden, costs, ranks = np.empty(most, np.int64), np.empty(most), np.empty(most, np.int64)
    while found < most:
        row = _cheapest_scaled(run, kind, low, high) if scaled else _cheapest(run, kind)
        if row < 0:
            break
        root, memory = run.states[row].root, run.kinds[kind].memory
        hidden[found], costs[found], ranks[found] = row, cost[kind, row], rank[kind, row]
        nodes[found] = first_roomy(run.nodes, root, memory, ranks[found] - 1)
        found += 1
        if found == most:
            break
        following = first_roomy(run.nodes, root, memory, ranks[found - 1])
        if following >= 0:
            rank[kind, row] = run.nodes[following].rank
        else:
            cost[kind, row] = np.inf
        _find_top(run, kind, row >> _SHIFT)
    for i in range(found - 1 if most > 1 else -1, -1, -1):
        row = hidden[i]
        cost[kind, row], rank[kind, row] = costs[i], ranks[i]
        _find_top(run, kind, row >> _SHIFT)
    return found


@kernel
def place_task(run: EngineArrays, kind: int, moment: int) -> int:
    """Place one task; returns its node, or -1 if it fits nowhere, and its GPUs in run.taken."""
    one = np.empty(1, np.int64)
    if choose_nodes(run, kind, moment, one) == 0:
        run.taken[:] = -1
        return -1
    node = one[0]
    choose_gpus(run, kind, run.nodes[node].state, moment)
    shift_task(run, node, kind, run.taken, -1)
    return int(node)


@kernel
def place_arrivals(run: EngineArrays, arrivals: Ints, course: ArrivalOutcomes, first: int, last: int) -> None:
    """Decide arrivals first..last-1 and fill the course, in place."""
    arrived, allocated = (course.arrived_milli[first - 1], course.allocated_milli[first - 1]) if first > 0 else (0, 0)
    for i in range(first, last):
        update_prices(run)
        kind = arrivals[i]
        asked = run.kinds[kind].gpu_count * run.kinds[kind].gpu_milli
        node = place_task(run, kind, i)
        arrived += asked
        if node >= 0:
            allocated += asked
        course.node[i], course.placed[i], course.power_w[i] = node, node >= 0, run.scalars[0].power_w
        course.arrived_milli[i], course.allocated_milli[i] = arrived, allocated
