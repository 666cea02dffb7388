"""The nodes of a fleet by the state that they are in, and how a task comes and goes.

Owns the table of states: which nodes are in each, what was surveyed of it, and
the four changes that a node may undergo. Must not know policies or scores.

Theory: nodes of equal capacity, free CPU, free GPUs slot by slot, kinds of GPU
task held and availability are one state. Memory filters but scores nothing, so
it is no part of a state: each state lists its nodes by rank. A task that leaves
is one that came with the sign turned, so that a node goes back to the state it
came from. An unavailable node is in a state that no task fits.
"""

# ruff: noqa: PLR0917 (numba takes arguments by position)

from eelgrid_kernels.arrays import Ints
from eelgrid_kernels.compiled import kernel
from eelgrid_kernels.peer_arrays import Run

__all__ = ["PACKAGE_W", "WHOLE", "active_packages", "draw", "fragmented", "set_available", "settle", "shift"]

WHOLE = 1000  # milli-GPU
MILLI_PER_CORE, CORES_PER_PACKAGE, PACKAGE_W = 2000, 16, 105.0  # 120 W active, 15 W idle


@kernel
def active_packages(cpu_capacity: int, cpu_free: int) -> int:
    """CPU packages with at least one working core; milli-CPU in."""
    cores = (cpu_capacity + MILLI_PER_CORE - 1) // MILLI_PER_CORE
    working = cores - cpu_free // MILLI_PER_CORE
    return (working + CORES_PER_PACKAGE - 1) // CORES_PER_PACKAGE


@kernel
def _survey(run: Run, state: int, model: int) -> None:
    """Fill usable, waste, gpu_total and fragments of a new state."""
    states, mix = run.states, run.mix
    total = states.gpu_total[state] = states.gpu_free[state].sum()
    for t in range(mix.weight.shape[0]):
        usable = usable_milli = 0
        if total > 0 and mix.allows[model, t] != 0:
            for slot in range(run.gpu.shape[0]):
                free = states.gpu_free[state, slot]
                if free > 0 and free >= mix.gpu_milli[t]:
                    usable += 1
                    usable_milli += free
        states.usable[state, t] = usable
        states.waste[state, t] = total - usable_milli
    states.fragments[state] = fragmented(run, state, model, states.cpu_free[state], 0, 0, 0)


@kernel
def fragmented(run: Run, state: int, model: int, cpu_free: int, copies: int, was: int, now: int) -> int:
    """F, times mix.total, of a state after that many of its GPUs go from `was` to `now` milli free."""
    mix, states = run.mix, run.states
    total = states.gpu_total[state] + copies * (now - was)
    row = max(model, 0)
    sum_ = 0
    for t in range(mix.weight.shape[0]):
        allowed = mix.allows[row, t]
        before = allowed if was >= mix.gpu_milli[t] else 0
        after = allowed if now >= mix.gpu_milli[t] else 0
        enough = states.usable[state, t] + copies * (after - before) >= mix.gpu_count[t]
        served = enough & (mix.gpu_count[t] > 0) & (mix.cpu_milli[t] <= cpu_free)
        wasted = states.waste[state, t] + copies * ((1 - after) * now - (1 - before) * was)
        sum_ += mix.weight[t] * (wasted if served else total)
    return sum_


@kernel
def draw(seed: int, moment: int, thing: int) -> int:
    """A number that looks random, from three; 32 bits in 64, so that no product overflows."""
    value = seed
    for part in (moment, thing):
        value ^= part
        for _ in range(2):
            value = ((value ^ (value >> 15)) * 0x2545F491) & 0xFFFFFFFF
            value = ((value ^ (value >> 13)) * 0x3C6EF35F) & 0xFFFFFFFF
        value ^= value >> 16
    return int(value)


@kernel
def _bucket(run: Run, shape: int, cpu_free: int, tags: int) -> int:
    """Where the state with the GPUs of run.gpu hangs."""
    value = draw(shape, cpu_free, tags & 0xFFFFFFFF)
    for free in run.gpu:
        value = (value * 1009 + free) & 0xFFFFFFFF
    return int((value ^ (value >> 16)) & (run.states.bucket.shape[0] - 1))


@kernel
def _enter(run: Run, node: int, cpu_free: int, tags: int, closed: int) -> None:
    """Put a node into the state with the GPUs of run.gpu, a new one if there is none."""
    states, shape = run.states, run.capacity.shape[node]
    bucket = _bucket(run, shape, cpu_free, tags)
    state = states.bucket[bucket]
    while state >= 0:
        same = run.capacity.shape[states.head[state]] == shape
        same &= states.cpu_free[state] == cpu_free and states.tags[state] == tags and states.closed[state] == closed
        for slot in range(run.gpu.shape[0]):
            same &= states.gpu_free[state, slot] == run.gpu[slot]
        if same:
            break
        state = states.chain[state]
    if state < 0:
        reused = 1 if states.counts[1] > 0 else 0
        state = states.spare[states.counts[1] - 1] if reused else states.counts[0]
        states.counts[reused] += 1 - 2 * reused
        states.version[state] += 1
        states.cpu_free[state], states.tags[state], states.closed[state] = cpu_free, tags, closed
        states.gpu_free[state, :] = run.gpu
        states.chain[state], states.bucket[bucket] = states.bucket[bucket], state
        states.head[state] = -1
        _survey(run, state, run.capacity.model[node])
    before, here = -1, states.head[state]
    while here >= 0 and run.capacity.rank[here] < run.capacity.rank[node]:
        before, here = here, run.members.after[here]
    run.members.state[node], run.members.after[node] = state, here
    if before < 0:
        states.head[state] = node
    else:
        run.members.after[before] = node


@kernel
def _leave(run: Run, node: int) -> None:
    """Take a node out of its state, and the state out of its bucket if it was the last."""
    states, members, state = run.states, run.members, run.members.state[node]
    before, here = -1, states.head[state]
    while here != node:
        before, here = here, members.after[here]
    if before >= 0:
        members.after[before] = members.after[node]
    else:
        states.head[state] = members.after[node]
    if states.head[state] >= 0:
        return
    run.gpu[:] = states.gpu_free[state, :]
    bucket = _bucket(run, run.capacity.shape[node], states.cpu_free[state], states.tags[state])
    if states.bucket[bucket] == state:
        states.bucket[bucket] = states.chain[state]
    else:
        other = states.bucket[bucket]
        while states.chain[other] != state:
            other = states.chain[other]
        states.chain[other] = states.chain[state]
    states.spare[states.counts[1]] = state
    states.counts[1] += 1


@kernel
def settle(run: Run, nodes: Ints) -> None:
    """Put empty nodes into their states; quickest from the highest rank down."""
    for node in nodes:
        run.gpu[:] = 0
        run.gpu[: run.capacity.gpu_count[node]] = WHOLE
        _enter(run, node, run.capacity.cpu_milli[node], 0, 0)


@kernel
def _move(run: Run, node: int, cpu_free: int, tags: int, closed: int) -> None:
    """Take a node from its state to the one with these values and the GPUs of run.gpu."""
    for slot in range(run.gpu.shape[0]):
        run.kept[slot] = run.gpu[slot]
    _leave(run, node)
    for slot in range(run.gpu.shape[0]):
        run.gpu[slot] = run.kept[slot]
    _enter(run, node, cpu_free, tags, closed)


@kernel
def shift(run: Run, node: int, spec: int, slots: Ints, sign: int) -> None:
    """A task of a spec comes to a node, sign -1, or leaves it, +1; slots are its GPUs, those below 0 none."""
    states, members, kinds, state = run.states, run.members, run.kinds, run.members.state[node]
    kind, capacity = kinds.of_spec[spec], run.capacity.cpu_milli[node]
    before, after = states.cpu_free[state], states.cpu_free[state] + sign * kinds.cpu_milli[kind]
    run.gpu[:] = states.gpu_free[state, :]
    held = 0
    for slot in slots:
        if slot >= 0:
            held -= run.gpu[slot] < WHOLE
            run.gpu[slot] += sign * kinds.gpu_milli[kind]
            held += run.gpu[slot] < WHOLE
    packages = active_packages(capacity, after) - active_packages(capacity, before)
    run.power_w[0] += PACKAGE_W * packages + held * (run.capacity.busy_w[node] - run.capacity.idle_w[node])
    members.memory_free[node] += sign * kinds.memory_mib[spec]
    tags, tag = states.tags[state], kinds.tag[kind]
    if run.tagged and tag >= 0:
        members.held[node, tag] -= sign
        tags = tags | (1 << tag) if members.held[node, tag] > 0 else tags & ~(1 << tag)
    _move(run, node, after, tags, states.closed[state])


@kernel
def set_available(run: Run, node: int, available: bool) -> None:
    """Whether a node takes new tasks; what it holds stays."""
    state = run.members.state[node]
    run.gpu[:] = run.states.gpu_free[state, :]
    _move(run, node, run.states.cpu_free[state], run.states.tags[state], 0 if available else 1)
