"""Node states: nodes grouped by equal free resources, with a log of changes.

Owns the table of states and the log of what changed in it. Must not know
policies or scores.

Theory: nodes of equal shape, free CPU, free GPUs slot by slot, tags held and
availability are one state, and what a task costs there is a function of state
and task. Memory filters but costs nothing, so it is no part of a state. A task
that leaves is one that came with the sign turned, so that a node goes back to
the state it came from. An unavailable node is in a state that no task fits.
Who keeps something per state reads the log: it names each row that is new or
whose nodes are others than before.

The nodes of a state are a treap (Aragon and Seidel, FOCS 1989), ordered by rank
and searchable by free memory: a search tree by rank and a heap by a number drawn from the node's number, so that its shape depends on its nodes
alone and its depth is logarithmic, whoever came first. Each node keeps how many
are below it and the most and the least of their memory, so that a search skips
what is too small and a count what is all alike.
"""

from typing import NamedTuple

from eelgrid_kernels.arrays import EngineArrays, Ints, Nodes, Records
from eelgrid_kernels.compilation import inlined_kernel, lean_kernel
from eelgrid_kernels.cost_terms import PACKAGE_W, WHOLE, active_packages, fill_state_terms


@lean_kernel
def random_draw(seed: int, moment: int, thing: int) -> int:
    """A number that looks random, from three; 32 bits in 64, so that no product overflows."""
    value = seed
    for part in (moment, thing):
        value ^= part
        for _ in range(2):
            value = ((value ^ (value >> 15)) * 0x2545F491) & 0xFFFFFFFF
            value = ((value ^ (value >> 13)) * 0x3C6EF35F) & 0xFFFFFFFF
        value ^= value >> 16
    return int(value)


@inlined_kernel
def _above(one: int, other: int) -> bool:
    mine, theirs = random_draw(0, 1, one), random_draw(0, 1, other)
    return mine > theirs or (mine == theirs and one > other)


@inlined_kernel
def _sum_up(nodes: Records, node: int) -> None:
    root = nodes[node]
    most = least = root.memory
    size = 1
    for child in (root.left, root.right):
        if child >= 0:
            below = nodes[child]
            most, least = max(most, below.most_memory), min(least, below.least_memory)
            size += below.tree_size
    root.most_memory, root.least_memory, root.tree_size = most, least, size


@lean_kernel
def _split(nodes: Records, root: int, rank: int) -> tuple[int, int]:
    """The trees of the nodes below that rank and of the others."""
    if root < 0:
        return -1, -1
    if nodes[root].rank < rank:
        lower, upper = _split(nodes, nodes[root].right, rank)
        nodes[root].right = lower
        _sum_up(nodes, root)
        return root, upper
    lower, upper = _split(nodes, nodes[root].left, rank)
    nodes[root].left = upper
    _sum_up(nodes, root)
    return lower, root


@lean_kernel
def _join(nodes: Records, lower: int, upper: int) -> int:
    """One tree of two, all ranks of the first below those of the second."""
    if lower < 0:
        return upper
    if upper < 0:
        return lower
    if _above(lower, upper):
        nodes[lower].right = _join(nodes, nodes[lower].right, upper)
        _sum_up(nodes, lower)
        return lower
    nodes[upper].left = _join(nodes, lower, nodes[upper].left)
    _sum_up(nodes, upper)
    return upper


@lean_kernel
def insert_node(nodes: Records, root: int, node: int) -> int:
    """The root of a tree to which a node was added."""
    if root < 0 or _above(node, root):
        nodes[node].left, nodes[node].right = _split(nodes, root, nodes[node].rank)
        _sum_up(nodes, node)
        return node
    if nodes[node].rank < nodes[root].rank:
        nodes[root].left = insert_node(nodes, nodes[root].left, node)
    else:
        nodes[root].right = insert_node(nodes, nodes[root].right, node)
    _sum_up(nodes, root)
    return root


@lean_kernel
def remove_node(nodes: Records, root: int, node: int) -> int:
    """The root of a tree from which a node was taken, -1 if it was the last."""
    if root == node:
        return _join(nodes, nodes[node].left, nodes[node].right)
    if nodes[node].rank < nodes[root].rank:
        nodes[root].left = remove_node(nodes, nodes[root].left, node)
    else:
        nodes[root].right = remove_node(nodes, nodes[root].right, node)
    _sum_up(nodes, root)
    return root


@lean_kernel
def first_roomy(nodes: Records, root: int, memory: int, past: int) -> int:
    """The node of lowest rank above `past` that has the memory, or -1."""
    if root < 0 or nodes[root].most_memory < memory:
        return -1
    if nodes[root].rank > past:
        found = first_roomy(nodes, nodes[root].left, memory, past)
        if found >= 0:
            return found
        if nodes[root].memory >= memory:
            return root
    return first_roomy(nodes, nodes[root].right, memory, past)


@lean_kernel
def count_roomy(nodes: Records, root: int, memory: int) -> int:
    """How many nodes have the memory."""
    if root < 0 or nodes[root].most_memory < memory:
        return 0
    if nodes[root].least_memory >= memory:
        return int(nodes[root].tree_size)
    mine = 1 if nodes[root].memory >= memory else 0
    return mine + count_roomy(nodes, nodes[root].left, memory) + count_roomy(nodes, nodes[root].right, memory)


class StateKey(NamedTuple):
    """What the nodes of a state have in common, beside what is free on each GPU."""

    shape_row: int
    cpu_free: int
    tags: int
    closed: int


@inlined_kernel
def _note(run: EngineArrays, row: int) -> None:
    """Log that a row changed."""
    scalars = run.scalars[0]
    run.log[scalars.log_entries & (run.log.shape[0] - 1)] = row
    run.states[row].touched = scalars.log_entries
    scalars.log_entries += 1


@inlined_kernel
def _bucket(run: EngineArrays, key: StateKey) -> int:
    """Where the state with these and the GPUs of run.gpu hangs."""
    value = random_draw(key.shape_row, key.cpu_free, key.tags & 0xFFFFFFFF)
    for free in run.gpu:
        value = (value * 1009 + free) & 0xFFFFFFFF
    return int((value ^ (value >> 16)) & (run.bucket.shape[0] - 1))


@inlined_kernel
def _find(run: EngineArrays, row: int, key: StateKey) -> int:
    """The row of the state with these and the GPUs of run.gpu in the chain that begins with this row, or -1."""
    while row >= 0:
        state = run.states[row]
        same = state.shape_row == key.shape_row and state.cpu_free == key.cpu_free
        same &= state.tags == key.tags and state.closed == key.closed
        for slot in range(run.gpu.shape[0]):
            same &= run.gpu_free[row, slot] == run.gpu[slot]
        if same:
            break
        row = state.next_row
    return row


@inlined_kernel
def _take_row(run: EngineArrays) -> int:
    """A row that no state has."""
    scalars = run.scalars[0]
    if scalars.spare_rows > 0:
        scalars.spare_rows -= 1
        return int(run.spare[scalars.spare_rows])
    scalars.rows += 1
    return int(scalars.rows - 1)


@lean_kernel
def enter_state(run: EngineArrays, node: int, cpu_free: int, tags: int, closed: int) -> None:
    """Put a node into the state with the GPUs of run.gpu, a new one if there is none."""
    key = StateKey(run.nodes[node].shape_row, cpu_free, tags, closed)
    bucket = _bucket(run, key)
    row = _find(run, run.bucket[bucket], key)
    if row < 0:
        row = _take_row(run)
        state = run.states[row]
        state.shape_row, state.cpu_free, state.tags, state.closed = key
        for slot in range(run.gpu.shape[0]):
            run.gpu_free[row, slot] = run.gpu[slot]
        state.next_row, run.bucket[bucket] = run.bucket[bucket], row
        state.root, state.born = -1, run.scalars[0].log_entries
        fill_state_terms(run, row)
    run.nodes[node].state = row
    run.states[row].root = insert_node(run.nodes, run.states[row].root, node)
    _note(run, row)


@lean_kernel
def leave_state(run: EngineArrays, node: int) -> None:
    """Take a node out of its state, and the state out of its bucket if it was the last; run.gpu has its GPUs then."""
    row = run.nodes[node].state
    state = run.states[row]
    for slot in range(run.gpu.shape[0]):
        run.gpu[slot] = run.gpu_free[row, slot]
    run.nodes[node].state = -1
    state.root = remove_node(run.nodes, state.root, node)
    _note(run, row)
    if state.root >= 0:
        return
    bucket = _bucket(run, StateKey(state.shape_row, state.cpu_free, state.tags, state.closed))
    if run.bucket[bucket] == row:
        run.bucket[bucket] = state.next_row
    else:
        other = run.bucket[bucket]
        while run.states[other].next_row != row:
            other = run.states[other].next_row
        run.states[other].next_row = state.next_row
    scalars = run.scalars[0]
    run.spare[scalars.spare_rows] = row
    scalars.spare_rows += 1


@lean_kernel
def settle_nodes(run: EngineArrays, rows: Ints) -> None:
    """Put empty nodes into their states."""
    for node in rows:
        shape = run.nodes[node].shape_row
        for slot in range(run.gpu.shape[0]):
            run.gpu[slot] = WHOLE if run.slot_model[shape, slot] >= 0 else 0
        enter_state(run, node, run.shapes[shape].cpu_capacity, 0, 0)


@lean_kernel
def adopt_nodes(run: EngineArrays, nodes: Nodes, rows: Ints, shape: Ints, tags: Ints) -> None:
    """Put the nodes in rows (any length) into the states that they have in `nodes`; shape and tags are (N,).

    After a change of the mix every state is filled by the new one first.
    """
    for row in range(run.scalars[0].rows if run.scalars[0].stale_states != 0 else 0):
        if run.states[row].root >= 0:
            fill_state_terms(run, row)
    run.scalars[0].stale_states = 0
    for node in rows:
        if run.nodes[node].state >= 0:
            leave_state(run, node)
        run.nodes[node].shape_row, run.nodes[node].memory = shape[node], nodes.memory_free[node]
        for slot in range(run.gpu.shape[0]):
            run.gpu[slot] = nodes.gpu_free[node, slot] if run.slot_model[shape[node], slot] >= 0 else 0
        enter_state(run, node, nodes.cpu_free[node], tags[node], 0 if nodes.available[node] else 1)


@lean_kernel
def shift_task(run: EngineArrays, node: int, kind: int, slots: Ints, sign: int) -> None:
    """A task of a kind comes to a node, sign -1, or leaves it, +1; slots are its GPUs, those below 0 none."""
    state, asked, scalars, gpu = run.states[run.nodes[node].state], run.kinds[kind], run.scalars[0], run.gpu
    shape, before, tags, closed = state.shape_row, state.cpu_free, state.tags, state.closed
    after, capacity = before + sign * asked.cpu_milli, run.shapes[shape].cpu_capacity
    if scalars.shifts >= 0:
        scalars.shifts += 1
    if sign < 0:
        scalars.came_milli += asked.gpu_count * asked.gpu_milli
    else:
        scalars.left_milli += asked.gpu_count * asked.gpu_milli
    leave_state(run, node)
    scalars.power_w += PACKAGE_W * (active_packages(capacity, after) - active_packages(capacity, before))
    for slot in slots:
        if slot >= 0:
            held = 1 if gpu[slot] < WHOLE else 0
            gpu[slot] += sign * asked.gpu_milli
            scalars.power_w += ((1 if gpu[slot] < WHOLE else 0) - held) * run.added_w[shape, slot]
    run.nodes[node].memory += sign * asked.memory
    tag = asked.tag
    if run.held.shape[1] > 0 and tag >= 0:
        run.held[node, tag] -= sign
        tags = tags | (1 << tag) if run.held[node, tag] > 0 else tags & ~(1 << tag)
    enter_state(run, node, after, tags, closed)


@lean_kernel
def set_node_available(run: EngineArrays, node: int, available: bool) -> None:
    """Whether a node takes new tasks; what it holds stays."""
    state = run.states[run.nodes[node].state]
    cpu_free, tags = state.cpu_free, state.tags
    leave_state(run, node)
    enter_state(run, node, cpu_free, tags, 0 if available else 1)
