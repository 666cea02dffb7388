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
# ruff: noqa: PLR0917 (numba takes arguments by position)

import numpy as np

from eelgrid_kernels.arrays import (
    ASKED_GPUS,
    ASKED_MEMORY,
    ASKED_MILLI,
    BORN,
    BOUNDED,
    ENTRIES,
    EXACT,
    LEFT,
    LOOSE,
    MEMORY,
    MOST,
    RANK,
    READ,
    RIGHT,
    ROOT,
    ROWS,
    SEED,
    STATE,
    TOUCHED,
    WEIGHTS,
    ArrivalOutcomes,
    EngineArrays,
    Floats,
    Ints,
    Shorts,
)
from eelgrid_kernels.baselines import MIX, RANDOM, choose_gpus, compute_cost_in_engine, compute_task_cost, is_bounded
from eelgrid_kernels.compilation import inlined_kernel, kernel, lean_kernel
from eelgrid_kernels.node_states import shift_task
from eelgrid_kernels.node_tree import first_roomy, random_draw
from eelgrid_kernels.opportunity_prices import update_prices

_SHIFT = 6
BLOCK = 1 << _SHIFT
LOOSE_MOST_W = 200.0  # from there on bounds are made anew rather than lowered


@lean_kernel
def is_scaled(policy: int, weights: Floats) -> bool:
    """Whether two numbers are kept, which are weighed against each other when all are known."""
    return bool(policy == MIX and weights[0] != 0.0 and weights[1] != 0.0)


@inlined_kernel
def _find_top(cost: Floats, rank: Shorts, top: Shorts, top_cost: Floats, rows: int, kind: int, block: int) -> None:
    """Look for the best row of a block anew."""
    first = block * BLOCK
    best = first
    for row in range(first + 1, min(first + BLOCK, rows)):
        if cost[kind, row] < cost[kind, best] or (
            cost[kind, row] == cost[kind, best] and rank[kind, row] < rank[kind, best]
        ):
            best = row
    top[kind, block], top_cost[kind, block] = best, cost[kind, best]


@lean_kernel
def _review(run: EngineArrays, kind: int, entry: int, entries: int, whole: bool) -> int:
    """Bring what a kind knows of the rows of these entries of the log up to date, or of all rows; returns how many."""
    nodes, states, shapes, added_w, kinds, groups = (
        run.nodes,
        run.states,
        run.shapes,
        run.added_w,
        run.kinds,
        run.groups,
    )
    weight, levels, rates, facts, log = run.weight, run.levels, run.rates, run.facts, run.log
    classes, wanted, offers = run.classes, run.wanted, run.offers
    cost, rank, scaled, top, top_cost = run.cost, run.rank, run.scaled, run.top, run.top_cost
    exact = not is_bounded(run.policy, rates)
    rows, policy, mask, reviewed = facts[ROWS], run.policy, log.shape[0] - 1, 0
    read = -1 if whole else kinds[kind, READ]
    memory, partly = kinds[kind, ASKED_MEMORY], not whole and entries < facts[ENTRIES]
    for at in range(entry, entries):
        row = at if whole else log[at & mask]
        if not whole and states[row, TOUCHED] != at:
            # Its last entry counts. Where this reading ends before that one, it must still be weighed then.
            if partly and states[row, BORN] >= read:
                cost[kind, row] = np.inf
                if top[kind, row >> _SHIFT] == row:
                    _find_top(cost, rank, top, top_cost, rows, kind, row >> _SHIFT)
            continue
        reviewed += 1
        price = np.inf
        if states[row, ROOT] >= 0:
            price = cost[kind, row]
            # Where it did not fit for memory alone it may fit now.
            if states[row, BORN] >= read or price == np.inf:
                price, power, _ = compute_task_cost(
                    states, shapes, added_w, kinds, groups, weight, levels, classes, wanted, offers, run.relief, rates,
                    facts, policy, kind, row, exact,
                )  # fmt: skip
                run.known[kind, row] = EXACT if exact else BOUNDED
                if scaled.shape[1] > 0:
                    scaled[kind, row] = power
            if price < np.inf:
                node = first_roomy(nodes, states[row, ROOT], memory, -1)
                if node >= 0:
                    rank[kind, row] = nodes[node, RANK]
                else:
                    price = np.inf
        cost[kind, row] = price
        block = row >> _SHIFT
        best = top[kind, block]
        if whole:
            if row == rows - 1 or (row + 1) >> _SHIFT != block:
                _find_top(cost, rank, top, top_cost, rows, kind, block)
        elif best == row or best >> _SHIFT != block:
            _find_top(cost, rank, top, top_cost, rows, kind, block)
        elif price < cost[kind, best] or (price == cost[kind, best] and rank[kind, row] < rank[kind, best]):
            top[kind, block], top_cost[kind, block] = row, price
    return reviewed


@lean_kernel
def _lower(run: EngineArrays, kind: int) -> None:
    """Take off all costs of a kind what new prices may have taken off: none is known exactly then."""
    loose = run.loose[kind]
    run.loose[kind] = 0.0
    for row in range(run.facts[ROWS]):
        run.cost[kind, row] -= loose
        run.known[kind, row] = LOOSE
    for block in range((run.facts[ROWS] + BLOCK - 1) >> _SHIFT):
        run.top_cost[kind, block] -= loose


@lean_kernel
def apply_log(run: EngineArrays, kind: int) -> int:
    """Read the log to its end for a kind; returns how many rows were reviewed."""
    entries, read = run.facts[ENTRIES], run.kinds[kind, READ]
    whole = read < 0 or entries - read > run.log.shape[0] or run.loose[kind] > LOOSE_MOST_W
    if whole:
        run.loose[kind] = 0.0
    elif run.loose[kind] > 0.0:
        _lower(run, kind)
    reviewed = _review(run, kind, 0 if whole else read, run.facts[ROWS] if whole else entries, whole)
    run.kinds[kind, READ] = entries
    return reviewed


@lean_kernel
def apply_log_ahead(run: EngineArrays, kind: int, most: int) -> int:
    """Read at most so many entries of the log for a kind that nobody asked for; returns how many rows were reviewed.

    For idle time: it changes no decision, only how much the kind's next one has to catch up. What is known by
    prices of before is weighed anew, all of it.
    """
    entries, read = run.facts[ENTRIES], run.kinds[kind, READ]
    if read < 0 or entries - read > run.log.shape[0]:
        return 0
    if run.loose[kind] > 0.0:
        return apply_log(run, kind)
    last = min(entries, read + most)
    reviewed = _review(run, kind, read, last, False)
    run.kinds[kind, READ] = last
    if last == entries:
        _cheapest(run, kind)
    return reviewed


@inlined_kernel
def _lowest(rank: Shorts, top: Shorts, top_cost: Floats, rows: int, kind: int) -> int:
    """The best row of the blocks' bests, or -1; it may be there by a bound."""
    best, best_cost = -1, np.inf
    for block in range((rows + BLOCK - 1) >> _SHIFT):
        cost = top_cost[kind, block]
        if cost < best_cost:
            best, best_cost = top[kind, block], cost
        elif cost == best_cost and cost < np.inf and rank[kind, top[kind, block]] < rank[kind, best]:
            best = top[kind, block]
    return best


@lean_kernel
def _cheapest(run: EngineArrays, kind: int) -> int:
    """The row with the least cost, or -1: the lowest is weighed until it is there by its cost."""
    cost, rank, top, top_cost, known, rows = run.cost, run.rank, run.top, run.top_cost, run.known, run.facts[ROWS]
    row = _lowest(rank, top, top_cost, rows, kind)
    if row < 0 or known[kind, row] == EXACT:
        return int(row)
    states, shapes, added_w, kinds, groups = run.states, run.shapes, run.added_w, run.kinds, run.groups
    weight, levels, rates, facts, relief = run.weight, run.levels, run.rates, run.facts, run.relief
    classes, wanted, offers = run.classes, run.wanted, run.offers
    while row >= 0 and known[kind, row] != EXACT:
        fresh = known[kind, row] == BOUNDED
        price, _, _ = compute_task_cost(
            states,
            shapes,
            added_w,
            kinds,
            groups,
            weight,
            levels,
            classes,
            wanted,
            offers,
            relief,
            rates,
            facts,
            run.policy,
            kind,
            row,
            fresh,
        )
        cost[kind, row] = price if fresh else max(price, cost[kind, row])
        known[kind, row] = EXACT if fresh else BOUNDED
        _find_top(cost, rank, top, top_cost, rows, kind, row >> _SHIFT)
        row = _lowest(rank, top, top_cost, rows, kind)
    return int(row)


@lean_kernel
def compute_all_costs(run: EngineArrays, kind: int) -> None:
    """Make every cost of a kind exact."""
    apply_log(run, kind)
    for row in range(run.facts[ROWS]):
        if run.known[kind, row] != EXACT and run.cost[kind, row] < np.inf:
            run.cost[kind, row], run.known[kind, row] = compute_cost_in_engine(run, kind, row, True)[0], EXACT
    for block in range((run.facts[ROWS] + BLOCK - 1) >> _SHIFT):
        _find_top(run.cost, run.rank, run.top, run.top_cost, run.facts[ROWS], kind, block)


@lean_kernel
def _span(run: EngineArrays, kind: int) -> tuple[float, float]:
    """The least and the most that is scaled, over all that fits."""
    low, high = np.inf, -np.inf
    for row in range(run.facts[ROWS]):
        if run.cost[kind, row] < np.inf:
            score = -run.scaled[kind, row]
            low, high = min(low, score), max(high, score)
    return low, high


@lean_kernel
def _cheapest_scaled(run: EngineArrays, kind: int, low: float, high: float) -> int:
    """The row with the highest mixed score, or -1."""
    cost, rank, best, best_score = run.cost, run.rank, -1, -np.inf
    for row in range(run.facts[ROWS]):
        if cost[kind, row] == np.inf:
            continue
        scaled = (-run.scaled[kind, row] - low) * 100.0 // (high - low) if high > low else 100.0
        score = run.rates[WEIGHTS, 0] * scaled - run.rates[WEIGHTS, 1] * cost[kind, row]
        if score > best_score or (score == best_score and rank[kind, row] < rank[kind, best]):
            best, best_score = row, score
    return best


@lean_kernel
def _luckier(nodes: Ints, seed: int, moment: int, one: int, other: int) -> int:
    """Of two nodes the one with the higher draw, equals by rank; -1 is none."""
    if one < 0 or other < 0:
        return max(one, other)
    mine, theirs = random_draw(seed, moment, nodes[one, RANK]), random_draw(seed, moment, nodes[other, RANK])
    first = mine > theirs or (mine == theirs and nodes[one, RANK] < nodes[other, RANK])
    return one if first else other


@lean_kernel
def _drawn_of(nodes: Ints, root: int, memory: int, seed: int, moment: int) -> int:
    """The node with the highest draw among those of a tree with the memory, or -1."""
    if root < 0 or nodes[root, MOST] < memory:
        return -1
    best = root if nodes[root, MEMORY] >= memory else -1
    for side in (LEFT, RIGHT):
        below = _drawn_of(nodes, nodes[root, side], memory, seed, moment)
        best = _luckier(nodes, seed, moment, best, below)
    return best


@lean_kernel
def _random_node(run: EngineArrays, kind: int, moment: int) -> int:
    """The node with the highest draw among all that fit, or -1."""
    nodes, states, seed, cost = run.nodes, run.states, run.facts[SEED], run.cost
    best, memory = -1, run.kinds[kind, ASKED_MEMORY]
    for row in range(run.facts[ROWS]):
        if cost[kind, row] < np.inf:
            found = _drawn_of(nodes, states[row, ROOT], memory, seed, moment)
            best = _luckier(nodes, seed, moment, best, found)
    return best


@kernel
def choose_nodes(run: EngineArrays, kind: int, moment: int, nodes: Ints) -> int:
    """The best nodes for a task, best first, into nodes (any length), in place; returns how many there are.

    moment numbers the decisions of RANDOM, which names one node only. What is asked
    for beyond the first is hidden as it is found, and shown again at the end.
    """
    apply_log(run, kind)
    found, most, cost, rank, rows = 0, nodes.shape[0], run.cost, run.rank, run.facts[ROWS]
    if run.policy == RANDOM:
        nodes[0] = _random_node(run, kind, moment)
        return 1 if nodes[0] >= 0 else 0
    scaled = is_scaled(run.policy, run.rates[WEIGHTS])
    low, high = _span(run, kind) if scaled else (0.0, 0.0)
    hidden, costs, ranks = np.empty(most, np.int64), np.empty(most), np.empty(most, np.int64)
    while found < most:
        row = _cheapest_scaled(run, kind, low, high) if scaled else _cheapest(run, kind)
        if row < 0:
            break
        root, memory = run.states[row, ROOT], run.kinds[kind, ASKED_MEMORY]
        hidden[found], costs[found], ranks[found] = row, cost[kind, row], rank[kind, row]
        nodes[found] = first_roomy(run.nodes, root, memory, ranks[found] - 1)
        found += 1
        if found == most:
            break
        following = first_roomy(run.nodes, root, memory, ranks[found - 1])
        if following >= 0:
            rank[kind, row] = run.nodes[following, RANK]
        else:
            cost[kind, row] = np.inf
        _find_top(cost, rank, run.top, run.top_cost, rows, kind, row >> _SHIFT)
    for i in range(found - 1 if most > 1 else -1, -1, -1):
        row = hidden[i]
        cost[kind, row], rank[kind, row] = costs[i], ranks[i]
        _find_top(cost, rank, run.top, run.top_cost, rows, kind, row >> _SHIFT)
    return found


@kernel
def place_task(run: EngineArrays, kind: int, moment: int) -> int:
    """Place one task; returns its node, or -1 if it fits nowhere, and its GPUs in run.taken."""
    one = np.empty(1, np.int64)
    if choose_nodes(run, kind, moment, one) == 0:
        run.taken[:] = -1
        return -1
    node = one[0]
    choose_gpus(run, kind, run.nodes[node, STATE], moment)
    shift_task(run, node, kind, run.taken, -1)
    return int(node)


@kernel
def place_arrivals(run: EngineArrays, arrivals: Ints, course: ArrivalOutcomes, first: int, last: int) -> None:
    """Decide arrivals first..last-1 and fill the course, in place."""
    arrived, allocated = (course.arrived_milli[first - 1], course.allocated_milli[first - 1]) if first > 0 else (0, 0)
    for i in range(first, last):
        update_prices(run)
        kind = arrivals[i]
        asked = run.kinds[kind, ASKED_GPUS] * run.kinds[kind, ASKED_MILLI]
        node = place_task(run, kind, i)
        arrived += asked
        if node >= 0:
            allocated += asked
        course.node[i], course.placed[i], course.power_w[i] = node, node >= 0, run.power_w[0]
        course.arrived_milli[i], course.allocated_milli[i] = arrived, allocated
