"""Opportunity prices: cost of each task class elsewhere in the fleet, scarce models and the stranding weight.

Owns when and how the prices of the look-ahead are made. Must not know policies or
single tasks: it looks at states, the typical mix and the load, all of them past.

offers   for each class t, the watts of the cheapest node that is left for the last
         of its tasks among the next HORIZON arrivals: with w_t of W the share of t,
         nodes in order of dP(n, t), each by its cheapest model, the offer is the one after HORIZON * w_t / W
         others. Class by class, as if no other came; the dearest if there are fewer
         nodes, 0 if there is none. So a node that is one of many good ones is worth
         little, one of the last much, and no constant has to say how much.
HORIZON  tasks that ask for SHARE of the fleet's GPU (of its CPU, if none asks for
         GPU): far enough to meet every class, near enough that the fleet is still
         the same. Saved watts on openb change by at most 0.3 pp from half to twice of it.
scarce   If the free GPUs were filled by the typical mix, some models may not suffice
         for the tasks that can use no other: a set Q of models is short by
             free GPU * (GPU asked by classes that may use models in Q alone / all GPU asked) - free GPU in Q
         The set that is short by most, and by more than TOLERANCE of the free GPU,
         is scarce: these are the dual prices, 1 and 0, of the LP that allocates the
         expected demand by model (Hall's condition names the set; the LP is a flow).
stranding weighs its given weight up to a load of RISE, and from there in a straight
         line to the given weight of a full fleet. The load is that of GPUs or of CPU,
         whichever is the higher: a fleet without CPU has no GPU to give. Where blocks
         are scarce, a place for several GPUs weighs BLOCK_PART of the given weight up to
         RISE, and from there in a straight line that of a full fleet: at low load, work
         that breaks a block saves power, and there are others.
turnover is the GPU that was given back lately for each that was taken. Where it is 1, CPU
         that a GPU lacks comes free by itself, but a node is only empty again when all
         its tasks happen to be gone. So there STEADY_PART of the weight of a full fleet
         is enough for stranding, and a place for several GPUs, scarce or not, rises by
         the square from STEADY_BLOCK_PART of the given weight to STEADY_BLOCKS times
         that of a full fleet. Of the free GPU, of which there is little
         then, STEADY_TOLERANCE is short enough for a model to be scarce. Between, both
         are mixed. Found on openb's lists at steady loads (docs/explanation/placement.md).
Quotes are made anew after HORIZON / 10 tasks came or left. Offers that moved by less
than MOVED_LEAST_W in the mean stay as they are, and the load counts in steps, so
that what is known of costs stays good: the larger the fleet, the longer.
"""

import numpy as np

from eelgrid_kernels.arrays import (
    LOOKAHEAD,
    SCARCITY,
    STRANDING,
    STRANDING_WHEN_FULL,
    EngineArrays,
    FeedArrays,
    Floats,
    Ints,
    Records,
    record_dtype,
)
from eelgrid_kernels.compilation import inlined_kernel, kernel, lean_kernel
from eelgrid_kernels.cost_terms import (
    FEED_MILLI,
    NO_KIND,
    NO_SLOT,
    PACKAGE_MILLI,
    PACKAGE_W,
    PACKAGES_MOST,
    fill_relief,
    package_slack,
    refresh_gain,
    summarize_model,
)

RISE_PERMILLE = 700
BLOCK_PART, STEADY_BLOCK_PART = 0.1, 0.5
STEADY_PART = 0.15
STEADY_BLOCKS = 4.0
TURNOVER_SHIFT = 7  # a 128th of what came and left is forgotten at each quote
TURNOVER_STEP = 250
TOLERANCE, STEADY_TOLERANCE = 0.02, 0.001
PARTS = 10  # of a horizon between quotes
MOVED_LEAST_W = 10.0
LOAD_STEP = 20  # in thousandths
LEAST_W = 1e-6  # wider than any rounding, so that a bound is one
_WATTS_MOST = 8192  # dearer offers count as this

# What one model of the nodes of an open state offers to the mix.
OPENING = record_dtype(
    ("model", np.int64),
    ("nodes", np.int64),
    ("cpu_free", np.int64),  # milli
    ("unpacked", np.int64),  # of it, what wakes no package
    ("idle", np.int64),  # GPUs
    ("beside_milli", np.int64),  # most free on one in use
    ("last_of_state", np.int64),  # 1 or 0
    ("open_w", np.float64),  # of waking a GPU
)


@inlined_kernel
def measure_turnover(came_milli: int, left_milli: int) -> int:
    """The GPU that was given back for each that was taken, in thousandths and a few steps, 1000 at most."""
    share = min(1000, left_milli * 1000 // max(1, came_milli))
    return (share + TURNOVER_STEP // 2) // TURNOVER_STEP * TURNOVER_STEP


@lean_kernel
def are_prices_due(run: EngineArrays) -> bool:
    """Whether offers weigh anything, and were never made or are old."""
    scalars, given = run.scalars[0], run.scalars[0].given_weights
    weighs = given[LOOKAHEAD] != 0.0 or given[SCARCITY] != 0.0 or given[STRANDING_WHEN_FULL] != given[STRANDING]
    return bool(weighs and (scalars.shifts < 0 or scalars.shifts >= max(1, scalars.horizon // PARTS)))


@lean_kernel
def _list_openings(run: EngineArrays, openings: Records) -> int:
    """One record for each model of each open state into openings, in place; returns how many."""
    found, models_most = 0, run.classes.wanted.shape[0]
    for row in range(run.scalars[0].rows):
        state = run.states[row]
        if state.root < 0 or state.closed != 0:
            continue
        shape = run.shapes[state.shape_row]
        for model in range(models_most):
            none = shape.models == 0 and model == models_most - 1
            if not (none or shape.models >> model & 1):
                continue
            opening, gpus = openings[found], summarize_model(run, row, model, NO_SLOT, NO_KIND)
            opening.model, opening.nodes = model, run.nodes[state.root].tree_size
            opening.cpu_free, opening.unpacked = state.cpu_free, package_slack(shape.cpu_capacity, state.cpu_free)
            opening.idle, opening.beside_milli, opening.open_w = gpus.idle, gpus.beside_milli, gpus.open_w
            opening.last_of_state = 1 if none or shape.models >> (model + 1) == 0 else 0
            found += 1
    return found


@inlined_kernel
def _added_w(run: EngineArrays, openings: Records, i: int, t: int) -> float:
    """DP of a class by one model of a state; infinite where it does not fit."""
    opening, cpu, gpus = openings[i], run.classes.cpu_milli[t], run.classes.gpus[t]
    if cpu > opening.cpu_free or (gpus > 0.0 and run.classes.wanted[opening.model, t] == 0.0):
        return np.inf
    waking = min(float(PACKAGES_MOST), np.ceil(max(0.0, (cpu - opening.unpacked) / PACKAGE_MILLI)))
    if run.classes.beside_milli[t] <= opening.beside_milli:
        return float(PACKAGE_W * waking)
    return float(PACKAGE_W * waking + gpus * opening.open_w) if gpus <= opening.idle else np.inf


@lean_kernel
def _offer(run: EngineArrays, openings: Records, t: int, wanted: int, nodes: Ints) -> int:
    """The offer for a class after `wanted` other tasks; nodes (W,) counts them by watts, scratch."""
    nodes[:] = 0
    number, least = 0, np.inf
    for i in range(openings.shape[0]):
        least = min(least, _added_w(run, openings, i, t))
        if openings[i].last_of_state == 0:
            continue
        if least < np.inf:
            nodes[min(_WATTS_MOST, int(least))] += openings[i].nodes
            number += openings[i].nodes
        least = np.inf
    if number == 0:
        return 0
    left = min(wanted, number - 1)
    watts = 0
    while nodes[watts] <= left:
        left -= nodes[watts]
        watts += 1
    return watts


@lean_kernel
def _scarce(run: EngineArrays, free: Ints, turnover: int) -> int:
    """Bits of the scarce models; free (M,) is in milli-GPU, the turnover in thousandths."""
    captive, scalars = run.captive, run.scalars[0]
    all_asked, total = float(scalars.captive_milli), 0.0
    for model in range(free.shape[0]):
        total += free[model]
    best, chosen = (TOLERANCE + (STEADY_TOLERANCE - TOLERANCE) * (turnover / 1000.0)) * total, 0
    for at in range(scalars.captive_unions if all_asked > 0.0 else 0):
        models, asked = captive[at].union, 0.0
        for tied in range(scalars.captive_sets):
            if captive[tied].models & ~models == 0:
                asked += captive[tied].milli
        short = asked / all_asked * total
        for model in range(free.shape[0]):
            if models >> model & 1:
                short -= free[model]
        if short > best:
            best, chosen = short, models
    return chosen


@lean_kernel
def _sum_free(run: EngineArrays, free: Ints) -> int:
    """Free milli-GPU of each model that takes tasks into free (M,), in place; returns the load of all nodes, in thousandths."""
    scalars = run.scalars[0]
    held, cpu_held = scalars.capacity_milli, scalars.cpu_capacity
    free[:] = 0
    for row in range(run.scalars[0].rows):
        state = run.states[row]
        if state.root < 0:
            continue
        size = run.nodes[state.root].tree_size
        held -= size * state.total_free
        cpu_held -= size * state.cpu_free
        for slot in range(run.added_w.shape[1]):
            model = run.slot_model[state.shape_row, slot]
            if model >= 0 and state.closed == 0:
                free[model] += size * run.gpu_free[row, slot]
    load = held * 1000 // max(1, scalars.capacity_milli)
    return int(max(load, cpu_held * 1000 // max(1, scalars.cpu_capacity)))


@kernel
def compute_prices(run: EngineArrays, offers: Ints, turnover: int) -> tuple[int, int]:
    """Offers (C,) in whole watts, in place; returns the bits of scarce models and the load; load and turnover in thousandths."""
    scalars, weight = run.scalars[0], run.class_weight
    free, nodes = np.empty(run.classes.wanted.shape[0] - 1, np.int64), np.empty(_WATTS_MOST + 1, np.int64)
    load = _sum_free(run, free)
    room = np.empty(scalars.rows * run.added_w.shape[1] + 1, OPENING)
    openings, total = room[: _list_openings(run, room)], 0
    for t in range(offers.shape[0]):
        total += weight[t]
    for t in range(offers.shape[0]):
        wanted = scalars.horizon * weight[t] // max(1, total)
        offers[t] = _offer(run, openings, t, wanted, nodes)
    moved = 0.0
    for t in range(offers.shape[0]):
        moved += weight[t] * abs(offers[t] - run.classes.offers[t])
    if scalars.shifts >= 0 and moved < MOVED_LEAST_W * total:
        for t in range(offers.shape[0]):
            offers[t] = int(run.classes.offers[t])
    return _scarce(run, free, turnover), load - load % LOAD_STEP


@lean_kernel
def _spread(run: EngineArrays, offers: Ints) -> float:
    """How far apart the look-ahead of a task can be by these offers and by those in force: no class by more than its own."""
    classes, most = run.classes, 0.0
    for model in range(classes.wanted.shape[0]):
        sum_ = 0.0
        for t in range(offers.shape[0]):
            sum_ += classes.wanted[model, t] * abs(offers[t] - classes.offers[t])
        most = max(most, sum_)
    return most


@lean_kernel
def _bound_feed(feed: FeedArrays, width: int) -> tuple[int, int, int]:
    """What a milli-GPU, a milli-CPU and all blocks of the widest node can change S by at most, in any family."""
    gpu = cpu = blocks = 0
    for family in range(feed.gpu.shape[0]):
        own_gpu = own_cpu = own_blocks = 0
        for t in range(feed.gpu.shape[1]):
            own_gpu += FEED_MILLI * feed.gpu[family, t]
            own_cpu += feed.cpu[family, t]
            own_blocks += feed.block_worth[family, t] * (width // max(1, feed.block_gpus[family, t]))
        gpu, cpu, blocks = max(gpu, own_gpu), max(cpu, own_cpu), max(blocks, own_blocks)
    return gpu, cpu, blocks


@lean_kernel
def _loosen(run: EngineArrays, spread: float, cleared: int, heavier: float, lighter_blocks: float) -> None:
    """Note by how much costs known before may be too high now.

    By the look-ahead, by models that are scarce no more, by blocks that weigh less, and by a stranding that weighs more,
    or less: a task strands at most the GPUs that its CPU feeds, and saves at most its own.
    """
    scale, weights = run.scalars[0].scale, run.scalars[0].weights
    gpu_most, cpu_most, blocks_most = _bound_feed(run.feed, run.added_w.shape[1])
    for kind in range(run.kinds.shape[0]):
        asked = run.kinds[kind]
        gpu_asked = asked.gpu_count * asked.gpu_milli
        fed = gpu_most * gpu_asked if heavier > 0.0 else cpu_most * asked.cpu_milli
        loose = spread * abs(weights[LOOKAHEAD]) / scale[LOOKAHEAD] + abs(heavier) * fed / scale[STRANDING]
        loose += max(0.0, lighter_blocks) * FEED_MILLI * blocks_most / scale[STRANDING]
        if asked.models & cleared:
            loose += abs(weights[SCARCITY]) * gpu_asked / scale[SCARCITY]
        asked.loose += loose + LEAST_W


@inlined_kernel
def _weigh_stranding(given: Floats, load: int, turnover: int, scarce_blocks: bool) -> tuple[float, int]:
    """The weight of stranding, and what a place for several GPUs counts in it, in thousandths; load, turnover in thousandths."""
    rise, steady = max(0, load - RISE_PERMILLE) / (1000.0 - RISE_PERMILLE), turnover / 1000.0
    least, full = given[STRANDING], given[STRANDING_WHEN_FULL]
    most = max(least, full * (1.0 - (1.0 - STEADY_PART) * steady))
    stranding, blocks = least + (most - least) * rise, 0.0
    if scarce_blocks:
        blocks = BLOCK_PART * least + (full - BLOCK_PART * least) * rise
    low = STEADY_BLOCK_PART * least
    steady_blocks = low + (STEADY_BLOCKS * full - low) * rise * rise
    blocks += (steady_blocks - blocks) * steady
    return stranding, int(1000.0 * blocks / stranding) if stranding > 0.0 else 0


@lean_kernel
def apply_prices(run: EngineArrays, offers: Ints, scarce: int, load: int, turnover: int) -> None:
    """Puts quotes in force: costs known before are bounds from below now, where they differ from those before."""
    scalars, given = run.scalars[0], run.scalars[0].given_weights
    scalars.shifts = 0
    stranding, permille = _weigh_stranding(given, load, turnover, scalars.scarce_blocks != 0)
    cleared, stranded_before = scalars.scarce_models & ~scarce, scalars.weights[STRANDING]
    changed = scalars.scarce_models != scarce or stranded_before != stranding
    scalars.scarce_models = scarce
    scalars.weights[STRANDING] = stranding
    blocks_before = stranded_before * scalars.block_permille
    changed |= permille != scalars.block_permille
    scalars.block_permille = permille
    moved, spread = False, _spread(run, offers)
    for t in range(offers.shape[0]):
        moved |= run.classes.offers[t] != offers[t]
        run.classes.offers[t] = offers[t]
    if moved:
        fill_relief(run)
    for row in range(scalars.rows if moved else 0):
        if run.states[row].root >= 0:
            refresh_gain(run, row)
    if changed or moved:
        _loosen(run, spread, cleared, stranding - stranded_before, blocks_before - stranding * permille)


@kernel
def update_prices(run: EngineArrays) -> bool:
    """Quotes anew where that is due; whether it was."""
    if not are_prices_due(run):
        return False
    offers = np.zeros(run.classes.offers.shape[0], np.int64)
    scalars = run.scalars[0]
    turnover = measure_turnover(scalars.came_milli, scalars.left_milli)
    scarce, load = compute_prices(run, offers, turnover)
    apply_prices(run, offers, scarce, load, turnover)
    scalars.came_milli -= scalars.came_milli >> TURNOVER_SHIFT
    scalars.left_milli -= scalars.left_milli >> TURNOVER_SHIFT
    return True
