"""Published online placement policies, and ours, over a whole course of arrivals that never leave.

Owns the run of one policy on one fleet: filters, scores, choice, state. Must not
know what a trace is, where an order of arrivals came from or what becomes of a
course. A node's GPUs are all of one model.

A task must be placed if it fits somewhere (CPU, memory, GPU share, GPU model); the highest score wins, ties go to the
lowest rank. F, watts and our cost are those of eelgrid_kernels.placement. Scores, from what is free before the task:

MIX            a * PWR + b * FGD. PWR: int(watts before - after), scaled; FGD: int(100 * sigmoid((F before - after)
               / 1000)); each with its best GPU, the first of equals. FGD's GPU is taken, or PWR's where b = 0.
BEST_FIT       int(100 * (1 - (free CPU - asked) / 256000 - (free GPU - asked) / 16000)), scaled; tightest GPU.
DOT_PROD       int(100 * (1 - (free CPU * asked / 128000^2 + free GPU * asked / 8000^2) / 2)); tightest GPU.
GPU_PACKING    no GPU asked: 0; idle node of n GPUs: max(33 - n, n); k idle GPUs taken: max(50 - k, 33);
               fits beside others: max(100 - free % / 10, 50) of the tightest such GPU.
GPU_CLUSTERING no GPU asked: 0; of the GPU tasks there, all of this kind (share, 1 GPU, 2 GPUs, ...): 75, some: 50,
               no GPU task there: 25, else 0; plus 25 * (8000 - free GPU) // 8000; tightest GPU.
RANDOM         any node that fits, any GPU that fits.
EELGRID        -(w0 * dP + w1 * dF / 1000 + w2 * dS), GPU and node chosen together.

Scaled: (s - min) * 100 // (max - min) over the nodes that fit, 100 where all are equal. Several GPUs are whole ones,
in index order. Sources: Weng et al., USENIX ATC'23 (FGD and the first five peers); Lettich et al., CCGrid 2025 (PWR).

Theory: nodes of equal capacity, free CPU, free GPUs slot by slot and kinds held are one state, and a score is a
function of state and task; so scores are kept per kind of task and state, and only a state that is new to the kind is
weighed. Memory filters but scores nothing, so it is no part of a state: each state lists its nodes by rank.
"""

import numpy as np

from eelgrid_kernels.arrays import Ints
from eelgrid_kernels.compiled import kernel
from eelgrid_kernels.peer_arrays import Course, Run
from eelgrid_kernels.states import PACKAGE_W, WHOLE, active_packages, draw, fragmented, shift

__all__ = [
    "BEST_FIT", "DOT_PROD", "EELGRID", "GPU_CLUSTERING", "GPU_PACKING", "MIX", "RANDOM", "advance", "decide",
]  # fmt: skip

RANDOM, DOT_PROD, GPU_PACKING, GPU_CLUSTERING, BEST_FIT, MIX, EELGRID = range(7)

NOWHERE, IN_ORDER = -2, -1  # slots: does not fit; no GPU or several, in index order
CPU_SPAN, GPU_SPAN = 128_000, 8_000  # the widest node of the papers, in milli
FEED = 10  # a GPU is fed by 10 vCPU


@kernel
def _added_w(run: Run, state: int, kind: int, was: int) -> float:
    """Watts that the task adds to a node when each GPU that it takes has `was` milli free."""
    node, cpu_free = run.states.head[state], run.states.cpu_free[state]
    capacity = run.capacity.cpu_milli[node]
    packages = active_packages(capacity, cpu_free - run.kinds.cpu_milli[kind]) - active_packages(capacity, cpu_free)
    gpus = run.kinds.gpu_count[kind] if was == WHOLE else 0
    return float(PACKAGE_W * packages + gpus * (run.capacity.busy_w[node] - run.capacity.idle_w[node]))


@kernel
def _cost_w(run: Run, state: int, kind: int, added_w: float, fragments: int) -> float:
    """Our cost, given the watts added and F times mix.total added."""
    states, kinds = run.states, run.kinds
    total, cpu_free = states.gpu_total[state], states.cpu_free[state]
    asked = kinds.gpu_count[kind] * kinds.gpu_milli[kind]
    before = max(0, FEED * total - cpu_free)
    after = max(0, FEED * (total - asked) - (cpu_free - kinds.cpu_milli[kind]))
    frag_w = run.weights[1] * (fragments / (run.mix.total * 1000.0))
    return float(run.weights[0] * added_w + frag_w + run.weights[2] * ((after - before) / (FEED * 1000.0)))


@kernel
def _score_by_effect(run: Run, kind: int, state: int) -> None:
    """MIX and EELGRID: every GPU that differs is tried."""
    states, scores, kinds = run.states, run.scores, run.kinds
    count, milli = kinds.gpu_count[kind], kinds.gpu_milli[kind]
    node = states.head[state]
    cpu_left = states.cpu_free[state] - kinds.cpu_milli[kind]
    power = plain = -np.inf
    for slot in range(run.capacity.gpu_count[node] if count == 1 else 1):
        was = WHOLE if count > 1 else 0
        if count == 1:
            was = states.gpu_free[state, slot]
            alike = False
            for lower in range(slot):
                alike |= states.gpu_free[state, lower] == was
            if alike or was < milli:
                continue
        added_w = _added_w(run, state, kind, was)
        value = float(int(-added_w))
        power = max(power, value)
        if run.policy == EELGRID or run.weights[1] != 0.0:
            after = fragmented(run, state, run.capacity.model[node], cpu_left, count, was, was - milli)
            if run.policy == EELGRID:
                value = -_cost_w(run, state, kind, added_w, after - states.fragments[state])
            else:
                eased = (states.fragments[state] - after) / (run.mix.total * 1000.0)
                value = float(int(100.0 / (1.0 + np.exp(-eased))))
        if value > plain:
            plain = value
            scores.slot[kind, state] = slot if count == 1 else IN_ORDER
    scores.scaled[kind, state] = power
    scores.plain[kind, state] = plain


@kernel
def _slot(run: Run, kind: int, state: int, moment: int) -> int:
    """The fitting GPU with the least free share, or any for RANDOM; IN_ORDER unless one GPU is asked for."""
    best, least = IN_ORDER, 0
    if run.kinds.gpu_count[kind] == 1:
        for slot in range(run.capacity.gpu_count[run.states.head[state]]):
            free = run.states.gpu_free[state, slot]
            key = draw(run.seed, -1 - moment, slot) if run.policy == RANDOM else free
            if free >= run.kinds.gpu_milli[kind] and (best < 0 or key < least):
                best, least = slot, key
    return best


@kernel
def _score_by_fill(run: Run, kind: int, state: int) -> None:
    """The policies that look at how full a node is."""
    states, scores, kinds = run.states, run.scores, run.kinds
    node, cpu_free, total = states.head[state], states.cpu_free[state], states.gpu_total[state]
    count, milli, cpu = kinds.gpu_count[kind], kinds.gpu_milli[kind], kinds.cpu_milli[kind]
    slot = _slot(run, kind, state, 0)
    score = 0  # in whole numbers, so that no rounding decides
    if run.policy == BEST_FIT:
        left = (cpu_free - cpu) + CPU_SPAN // GPU_SPAN * (total - count * milli)
        score = (100 * (2 * CPU_SPAN - left)) // (2 * CPU_SPAN)
    elif run.policy == DOT_PROD:
        product = cpu_free * cpu + (CPU_SPAN // GPU_SPAN) ** 2 * total * count * milli
        score = (100 * (2 * CPU_SPAN**2 - product)) // (2 * CPU_SPAN**2)
    elif run.policy == GPU_PACKING and count > 0:
        width = run.capacity.gpu_count[node]
        if total == width * WHOLE:
            score = max(33 - width, width)
        elif count > 1 or states.gpu_free[state, slot] == WHOLE:
            score = max(50 - count, 33)
        else:
            score = max(100 - states.gpu_free[state, slot] // 100, 50)
    elif run.policy == GPU_CLUSTERING and count > 0:
        tag, tags = 1 << kinds.tag[kind], states.tags[state]
        held = 75 if tags == tag else 50 if tags & tag else 25 if tags == 0 else 0
        score = held + 25 * (GPU_SPAN - total) // GPU_SPAN
    scores.slot[kind, state] = slot
    scores.scaled[kind, state] = score
    scores.plain[kind, state] = score


@kernel
def _score(run: Run, kind: int, state: int) -> None:
    """Filter a state for a kind of task, by all but memory, and score it if it fits."""
    kinds, states = run.kinds, run.states
    node, count = states.head[state], kinds.gpu_count[kind]
    run.scores.seen[kind, state] = states.version[state]
    run.scores.slot[kind, state] = NOWHERE
    fitting, model = 0, run.capacity.model[node]
    if count > 0 and model >= 0 and kinds.allows[kind, model] != 0:
        for slot in range(run.capacity.gpu_count[node]):
            fitting += states.gpu_free[state, slot] >= kinds.gpu_milli[kind]
    if states.closed[state] or fitting < count or states.cpu_free[state] < kinds.cpu_milli[kind]:
        return
    if run.policy in {MIX, EELGRID}:
        _score_by_effect(run, kind, state)
    else:
        _score_by_fill(run, kind, state)


@kernel
def _roomy(run: Run, node: int, memory_mib: int) -> int:
    """The first of a node and those after it in its state that has the memory, or -1."""
    while node >= 0 and run.members.memory_free[node] < memory_mib:
        node = run.members.after[node]
    return node


@kernel
def _random_node(run: Run, fitting: int, memory_mib: int, moment: int) -> int:
    """The node with the highest draw; run.fitting holds one node of each state that fits."""
    best, highest = -1, -1
    for i in range(fitting):
        node = run.fitting[1, i]
        while node >= 0:
            drawn = draw(run.seed, moment, run.capacity.rank[node])
            if drawn > highest or (drawn == highest and run.capacity.rank[node] < run.capacity.rank[best]):
                best, highest = node, drawn
            node = _roomy(run, run.members.after[node], memory_mib)
    return best


@kernel
def _take(run: Run, node: int, kind: int, slot: int) -> None:
    """The GPUs that a task takes from a node into run.taken, -1 beyond the last: the slot, or whole ones in order."""
    run.taken[:] = -1
    if slot >= 0:
        run.taken[0] = slot
        return
    state, taken = run.members.state[node], 0
    for other in range(run.gpu.shape[0]):
        if taken < run.kinds.gpu_count[kind] and run.states.gpu_free[state, other] == WHOLE:
            run.taken[taken] = other
            taken += 1


@kernel
def decide(run: Run, spec: int, moment: int) -> int:
    """Place one task of a spec; returns its node, or -1 if it fits nowhere, and its GPUs in run.taken.

    moment numbers the decisions of RANDOM.
    """
    states, scores = run.states, run.scores
    kind, memory_mib = run.kinds.of_spec[spec], run.kinds.memory_mib[spec]
    fitting, low, high = 0, np.inf, -np.inf
    for state in range(states.counts[0]):
        if states.head[state] < 0:
            continue
        if scores.seen[kind, state] != states.version[state]:
            _score(run, kind, state)
        if scores.slot[kind, state] == NOWHERE:
            continue
        node = _roomy(run, states.head[state], memory_mib)
        if node >= 0:
            run.fitting[0, fitting], run.fitting[1, fitting] = state, node
            low, high = min(low, scores.scaled[kind, state]), max(high, scores.scaled[kind, state])
            fitting += 1
    best, best_score = -1, -np.inf
    for i in range(fitting):
        state, node = run.fitting[0, i], run.fitting[1, i]
        scaled = (scores.scaled[kind, state] - low) * 100.0 // (high - low) if high > low else 100.0
        score = run.blend[0] * scaled + run.blend[1] * scores.plain[kind, state]
        if score > best_score or (score == best_score and run.capacity.rank[node] < run.capacity.rank[best]):
            best, best_score = node, score
    if run.policy == RANDOM:
        best = _random_node(run, fitting, memory_mib, moment)
    if best >= 0:
        state = run.members.state[best]
        slot = _slot(run, kind, state, moment) if run.policy == RANDOM else scores.slot[kind, state]
        _take(run, best, kind, slot)
        shift(run, best, spec, run.taken, -1)
    return best


@kernel
def advance(run: Run, arrivals: Ints, course: Course, first: int, last: int) -> None:
    """Decide arrivals first..last-1 and fill the course, in place."""
    arrived, allocated = (course.arrived_milli[first - 1], course.allocated_milli[first - 1]) if first > 0 else (0, 0)
    for i in range(first, last):
        kind = run.kinds.of_spec[arrivals[i]]
        asked = run.kinds.gpu_count[kind] * run.kinds.gpu_milli[kind]
        node = decide(run, arrivals[i], i)
        arrived += asked
        if node >= 0:
            allocated += asked
        course.node[i], course.placed[i], course.power_w[i] = node, node >= 0, run.power_w[0]
        course.arrived_milli[i], course.allocated_milli[i] = arrived, allocated
