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
"""

from typing import NamedTuple

from eelgrid_kernels.arrays import EngineArrays, Ints, Nodes
from eelgrid_kernels.compilation import inlined_kernel, lean_kernel
from eelgrid_kernels.cost_terms import fill_state_terms
from eelgrid_kernels.cpu_packages import PACKAGE_W, WHOLE, active_packages
from eelgrid_kernels.node_tree import insert_node, random_draw, remove_node


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
    """Put the nodes in rows (any length) into the states that they have in `nodes`; shape and tags are (N,)."""
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
