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
# ruff: noqa: PLR0917 (numba takes arguments by position)

import numpy as np
from numpy.typing import NDArray

from eelgrid_kernels.arrays import (
    ASKED_CPU,
    ASKED_MEMORY,
    ASKED_MILLI,
    BORN,
    CAPACITY,
    CHAIN,
    CLOSED,
    CPU,
    ENTRIES,
    GPU,
    MEMORY,
    MODEL,
    NODE_SHAPE,
    ROOT,
    ROWS,
    SHAPE,
    SHIFTS,
    SPARE,
    STATE,
    TAG,
    TAGS,
    TOUCHED,
    EngineArrays,
    Ints,
)
from eelgrid_kernels.compilation import lean_kernel
from eelgrid_kernels.cost_terms import fill_state_terms
from eelgrid_kernels.cpu_packages import PACKAGE_W, WHOLE, active_packages
from eelgrid_kernels.node_tree import insert_node, random_draw, remove_node


@lean_kernel
def _note(states: Ints, log: Ints, facts: Ints, row: int) -> None:
    """Log that a row changed."""
    entry = facts[ENTRIES]
    log[entry & (log.shape[0] - 1)] = row
    states[row, TOUCHED] = entry
    facts[ENTRIES] = entry + 1


@lean_kernel
def _bucket(gpu: Ints, buckets: int, shape: int, cpu_free: int, tags: int) -> int:
    """Where the state with these GPUs hangs."""
    value = random_draw(shape, cpu_free, tags & 0xFFFFFFFF)
    for free in gpu:
        value = (value * 1009 + free) & 0xFFFFFFFF
    return int((value ^ (value >> 16)) & (buckets - 1))


@lean_kernel
def _find(states: Ints, gpu: Ints, first: int, shape: int, cpu_free: int, tags: int, closed: int) -> int:
    """The row of a state in the chain that begins with `first`, or -1."""
    row = first
    while row >= 0:
        same = states[row, SHAPE] == shape and states[row, CPU] == cpu_free
        same &= states[row, TAGS] == tags and states[row, CLOSED] == closed
        for slot in range(gpu.shape[0]):
            same &= states[row, GPU + slot] == gpu[slot]
        if same:
            break
        row = states[row, CHAIN]
    return row


@lean_kernel
def enter_state(run: EngineArrays, node: int, cpu_free: int, tags: int, closed: int) -> None:
    """Put a node into the state with the GPUs of run.gpu, a new one if there is none."""
    nodes, states, facts, gpu, shape = run.nodes, run.states, run.facts, run.gpu, run.nodes[node, NODE_SHAPE]
    bucket = _bucket(gpu, run.bucket.shape[0], shape, cpu_free, tags)
    row = _find(states, gpu, run.bucket[bucket], shape, cpu_free, tags, closed)
    if row < 0:
        if facts[SPARE] > 0:
            facts[SPARE] -= 1
            row = run.spare[facts[SPARE]]
        else:
            row = facts[ROWS]
            facts[ROWS] += 1
        states[row, SHAPE], states[row, CPU] = shape, cpu_free
        states[row, TAGS], states[row, CLOSED] = tags, closed
        for slot in range(gpu.shape[0]):
            states[row, GPU + slot] = gpu[slot]
        states[row, CHAIN], run.bucket[bucket] = run.bucket[bucket], row
        states[row, ROOT], states[row, BORN] = -1, facts[ENTRIES]
        fill_state_terms(
            states,
            run.shapes,
            run.added_w,
            run.kinds,
            run.groups,
            run.weight,
            run.levels,
            run.classes,
            run.wanted,
            run.offers,
            row,
        )
    nodes[node, STATE] = row
    states[row, ROOT] = insert_node(nodes, states[row, ROOT], node)
    _note(states, run.log, facts, row)


@lean_kernel
def leave_state(run: EngineArrays, node: int) -> None:
    """Take a node out of its state, and the state out of its bucket if it was the last; run.gpu has its GPUs then."""
    nodes, states, gpu, row = run.nodes, run.states, run.gpu, run.nodes[node, STATE]
    for slot in range(gpu.shape[0]):
        gpu[slot] = states[row, GPU + slot]
    nodes[node, STATE] = -1
    states[row, ROOT] = remove_node(nodes, states[row, ROOT], node)
    _note(states, run.log, run.facts, row)
    if states[row, ROOT] >= 0:
        return
    bucket = _bucket(gpu, run.bucket.shape[0], states[row, SHAPE], states[row, CPU], states[row, TAGS])
    if run.bucket[bucket] == row:
        run.bucket[bucket] = states[row, CHAIN]
    else:
        other = run.bucket[bucket]
        while states[other, CHAIN] != row:
            other = states[other, CHAIN]
        states[other, CHAIN] = states[row, CHAIN]
    run.spare[run.facts[SPARE]] = row
    run.facts[SPARE] += 1


@lean_kernel
def settle_nodes(run: EngineArrays, rows: Ints) -> None:
    """Put empty nodes into their states."""
    for node in rows:
        shape = run.nodes[node, NODE_SHAPE]
        for slot in range(run.gpu.shape[0]):
            run.gpu[slot] = WHOLE if run.shapes[shape, MODEL + slot] >= 0 else 0
        enter_state(run, node, run.shapes[shape, CAPACITY], 0, 0)


@lean_kernel
def adopt_nodes(
    run: EngineArrays,
    rows: Ints,
    shape: Ints,
    cpu_free: Ints,
    memory_free: Ints,
    gpu_free: Ints,
    tags: Ints,
    available: NDArray[np.bool_],
) -> None:
    """Put the nodes in rows (any length) into the states that these columns (N,), gpu_free (N, G), say."""
    for node in rows:
        if run.nodes[node, STATE] >= 0:
            leave_state(run, node)
        run.nodes[node, NODE_SHAPE], run.nodes[node, MEMORY] = shape[node], memory_free[node]
        for slot in range(run.gpu.shape[0]):
            run.gpu[slot] = gpu_free[node, slot] if run.shapes[shape[node], MODEL + slot] >= 0 else 0
        enter_state(run, node, cpu_free[node], tags[node], 0 if available[node] else 1)


@lean_kernel
def shift_task(run: EngineArrays, node: int, kind: int, slots: Ints, sign: int) -> None:
    """A task of a kind comes to a node, sign -1, or leaves it, +1; slots are its GPUs, those below 0 none."""
    states, kinds, gpu, row = run.states, run.kinds, run.gpu, run.nodes[node, STATE]
    shape, before, tags, closed = states[row, SHAPE], states[row, CPU], states[row, TAGS], states[row, CLOSED]
    after, capacity = before + sign * kinds[kind, ASKED_CPU], run.shapes[shape, CAPACITY]
    if run.facts[SHIFTS] >= 0:
        run.facts[SHIFTS] += 1
    leave_state(run, node)
    run.power_w[0] += PACKAGE_W * (active_packages(capacity, after) - active_packages(capacity, before))
    for slot in slots:
        if slot >= 0:
            held = 1 if gpu[slot] < WHOLE else 0
            gpu[slot] += sign * kinds[kind, ASKED_MILLI]
            run.power_w[0] += ((1 if gpu[slot] < WHOLE else 0) - held) * run.added_w[shape, slot]
    run.nodes[node, MEMORY] += sign * kinds[kind, ASKED_MEMORY]
    tag = kinds[kind, TAG]
    if run.held.shape[1] > 0 and tag >= 0:
        run.held[node, tag] -= sign
        tags = tags | (1 << tag) if run.held[node, tag] > 0 else tags & ~(1 << tag)
    enter_state(run, node, after, tags, closed)


@lean_kernel
def set_node_available(run: EngineArrays, node: int, available: bool) -> None:
    """Whether a node takes new tasks; what it holds stays."""
    row = run.nodes[node, STATE]
    cpu_free, tags = run.states[row, CPU], run.states[row, TAGS]
    leave_state(run, node)
    enter_state(run, node, cpu_free, tags, 0 if available else 1)
