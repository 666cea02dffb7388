"""Opportunity prices: cost of each task class elsewhere in the fleet, scarce models and the stranding weight.

Owns when and how the prices of the look-ahead are made. Must not know policies or
single tasks: it looks at states, the typical mix and the load, all of them past.

offers   for each class t, what the last of its tasks among the next HORIZON arrivals would cost elsewhere: the watts
         of the place that is left after HORIZON * w_t / W others, w_t of W the share of t, at least one, places in
         order of dP(n, t); less what it leaves there for others, as below. Class by class, as if no other came; the
         dearest if there are fewer places, 0 if there is none. So a node that is one of many good ones is worth little,
         one of the last much, and no constant has to say how much.
places   A node counts for its cheapest model, with the tasks that fit for the least watts: GPUs in use with a share
         left, or else idle ones. CPU that wakes no package, for tasks without GPU.
net      A GPU or a package that is woken leaves a share or cores for others: dP at the emptiest node that is left,
         less the part of the look-ahead of what G gains there. Else every task would find two ways to pay: in a
         cluster where all ask for half of a GPU, taking the half that is left would cost as much as waking a GPU, which
         leaves one. G depends on all offers, so that this takes ROUNDS of half steps.
refused  Where all places of a class are gone within the horizon, its next task is refused: its GPUs are worth the weight
         of stranding in a full fleet on top.
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
         are scarce, a place for several GPUs weighs nothing up to RISE, and from there in
         a straight line the weight of a full fleet: at low load, work that breaks a block
         saves power, and there are others. Where none is to spare, it begins with the given
         weight: tasks with several GPUs will need all such nodes, and small ones have room in others.
CPU      is scarce where a fleet full of the mix would ask for CPU_SCARCE of it: it runs out before the load of GPUs is at
         RISE. Then GPUs are left without CPU wherever work goes, so that stranding tells hardly one node from another, and
         fragmentation, which asks for whole tasks, weighs CPU_PART of the given weight instead of it. Stranding and scarce
         places rise from nothing to as much.
stockout is the probability that a class with several GPUs misses a place that is broken now. Such a place is back when the
         task that broke it has ended, after one mean duration. Until then N tasks of that size or larger come and as many
         leave, N being how many run, so that the places that are left wander by a deviation of sqrt(2 N). They run out on the
         way with the probability erfc(places / (2 sqrt(N))) (reflection principle), in steps of STOCKOUT_STEP thousandths.
turnover is the GPU that was given back lately for each that was taken. Where it is 1, CPU
         that a GPU lacks comes free by itself, so that stranding weighs no more than its given weight. A node
         is only empty again when all its tasks happen to be gone, so that a place for several GPUs, scarce or not,
         weighs BLOCK_PART of the given weight, rising to that of a full fleet by its class's stockout or by the square of
         the load's rise, whichever is more, and one that is almost there PART_PERMILLE of it. The mix will not ask for all
         free GPUs, but for no more than what is allocated now; and where little is free, STEADY_TOLERANCE of it is short
         enough for a model to be scarce. Between, both are mixed. Found on openb's lists at steady loads (docs/explanation/placement.md).
Quotes are made anew after HORIZON / 10 tasks came or left. Offers that moved by less
than MOVED_LEAST_W in the mean stay as they are, and the load counts in steps, so
that what is known of costs stays good: the larger the fleet, the longer.
"""

import math

import numpy as np

from eelgrid_kernels.arrays import (
    ENOUGH_BLOCKS,
    FRAGMENTATION,
    LOOKAHEAD,
    NEVER,
    NO_SPARE_BLOCKS,
    SCARCITY,
    STRANDING,
    STRANDING_WHEN_FULL,
    EngineArrays,
    FeedArrays,
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
    WHOLE,
    ModelGpus,
    compute_gain,
    fill_relief,
    package_slack,
    refresh_gain,
    summarize_model,
)

RISE_PERMILLE = 700
BLOCK_PART = 0.5
CPU_PART = 2.0
PART_PERMILLE = 500
STOCKOUT_STEP = 50
TURNOVER_SHIFT = 7  # a 128th of what came and left is forgotten at each quote
TURNOVER_STEP = 250
TOLERANCE, STEADY_TOLERANCE = 0.02, 0.001
ROUNDS = 4
PARTS = 10  # of a horizon between quotes
MOVED_LEAST_W = 10.0
LOAD_STEP = 20  # in thousandths
LEAST_W = 1e-6  # wider than any rounding, so that a bound is one
_WATTS_MOST = 8192  # dearer places count as this
_PLACES_MOST = 1 << 20  # in a node, for tasks without CPU

# What one model of the nodes of an open state offers to the mix.
OPENING = record_dtype(
    ("model", np.int64),
    ("nodes", np.int64),
    ("cpu_free", np.int64),  # milli
    ("unpacked", np.int64),  # of it, what wakes no package
    ("idle", np.int64),  # GPUs
    ("beside_milli", np.int64),  # most free on one in use
    ("shared", np.int64),  # GPUs in use with a share left
    ("shared_milli", np.int64),  # what they have left
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


@inlined_kernel
def _sum_shared(run: EngineArrays, row: int, model: int) -> tuple[int, int]:
    """GPUs of a model in a state that are in use and have a share left, and what they have left, in milli."""
    shared = milli = 0
    for slot in range(run.added_w.shape[1]):
        free = run.gpu_free[row, slot]
        if run.slot_model[run.states[row].shape_row, slot] == model and 0 < free < WHOLE:
            shared, milli = shared + 1, milli + free
    return shared, milli


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
            opening.shared, opening.shared_milli = _sum_shared(run, row, model)
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


@inlined_kernel
def _count_places(run: EngineArrays, openings: Records, i: int, t: int) -> tuple[int, int]:
    """Tasks of a class that fit in the node of an opening, for the watts of the first and in all; at least one."""
    opening, cpu, asked = openings[i], int(run.classes.cpu_milli[t]), int(run.classes.beside_milli[t])
    gpus, most = int(run.classes.gpus[t]), opening.cpu_free // cpu if cpu > 0 else _PLACES_MOST
    if gpus == 0:
        return max(1, opening.unpacked // cpu if cpu > 0 else _PLACES_MOST), max(1, most)
    beside, waking = 0, opening.idle // gpus
    if asked <= opening.beside_milli:
        beside = min(opening.shared, opening.shared_milli // asked)
    in_all = beside + waking * (WHOLE // asked if gpus == 1 else 1)
    return max(1, min(beside if beside > 0 else waking, most)), max(1, min(in_all, most))


@inlined_kernel
def _is_emptier(openings: Records, i: int, other: int) -> bool:
    """Whether an opening comes before another as the place that is left: more CPU, more GPU, fewer watts; then by model."""
    one, two = openings[i], openings[other]
    mine = (one.cpu_free, one.idle, one.beside_milli, one.unpacked, -one.open_w, -one.model)
    return bool(mine > (two.cpu_free, two.idle, two.beside_milli, two.unpacked, -two.open_w, -two.model))


@lean_kernel
def _find_left(run: EngineArrays, openings: Records, t: int, wanted: int, by_watts: Ints) -> tuple[int, int, int]:
    """The watts of the place that is left after `wanted` other tasks, its opening, -1 if none, and the places in all.

    By watts (2, W) is scratch: places, 0 before and after, and the emptiest opening that has them.
    """
    places, emptiest = by_watts[0], by_watts[1]
    least, chosen, cheap, in_all, dearest = np.inf, 0, 0, 0, 0
    for i in range(openings.shape[0]):
        added = _added_w(run, openings, i, t)
        if added < least:
            least, chosen = added, i
        if openings[i].last_of_state == 0:
            continue
        if least < np.inf:
            watts, (first, most) = min(_WATTS_MOST, int(least)), _count_places(run, openings, chosen, t)
            if places[watts] == 0 or _is_emptier(openings, chosen, emptiest[watts]):
                emptiest[watts] = chosen
            places[watts] += openings[i].nodes * first
            dearest = max(dearest, watts)
            cheap, in_all = cheap + openings[i].nodes * first, in_all + openings[i].nodes * most
        least = np.inf
    if cheap == 0:
        return 0, -1, 0
    left, found = min(wanted, cheap - 1), 0
    while places[found] <= left:
        left -= places[found]
        found += 1
    for watts in range(dearest + 1):
        places[watts] = 0
    return found, emptiest[found], in_all


@lean_kernel
def _gain_left(run: EngineArrays, openings: Records, i: int, t: int) -> float:
    """By how much a task of a class raises G of the node of an opening, weighted; it takes the freest GPU that it fits."""
    opening, classes = openings[i], run.classes
    idle, beside, unpacked = opening.idle, opening.beside_milli, opening.unpacked
    cpu, gpus, asked = int(classes.cpu_milli[t]), int(classes.gpus[t]), int(classes.beside_milli[t])
    gpus_before = ModelGpus(idle, beside, opening.open_w)
    before = compute_gain(classes, opening.model, opening.cpu_free, unpacked, gpus_before)
    if gpus > 0 and asked <= beside:
        beside -= asked
    elif gpus > 0:
        idle -= gpus
        beside = max(beside, WHOLE - asked) if gpus == 1 else beside
    while unpacked < cpu:
        unpacked += PACKAGE_MILLI
    free = opening.cpu_free - cpu
    after = compute_gain(
        classes, opening.model, free, min(free, unpacked - cpu), ModelGpus(idle, beside, opening.open_w)
    )
    return float(after - before)


@inlined_kernel
def _asked_gpus(run: EngineArrays, t: int) -> float:
    """GPUs that a class asks for, or the share of one."""
    gpus = run.classes.gpus[t]
    return float(gpus if gpus != 1.0 else run.classes.beside_milli[t] / WHOLE)


@lean_kernel
def _fill_offers(run: EngineArrays, openings: Records, quoted: Ints, by_class: Ints, by_watts: Ints) -> None:
    """Offers and places that are left, (2, C), in place; those in force are put back. By class (4, C), and by watts (2, W) of zeros, are scratch."""
    offers, places = quoted[0], quoted[1]
    scalars, weight, classes, total = run.scalars[0], run.class_weight, run.classes, max(1, run.scalars[0].mix_weight)
    left, watts, refused, in_force = by_class[0], by_class[1], by_class[2], by_class[3]
    part = min(1.0, scalars.given_weights[LOOKAHEAD])
    for t in range(offers.shape[0]):
        in_force[t], refused[t] = int(classes.offers[t]), 0
    for t in range(offers.shape[0]):
        wanted = max(1, scalars.horizon * weight[t] // total)
        watts[t], left[t], places[t] = _find_left(run, openings, t, wanted, by_watts)
        if 0 < places[t] <= wanted:
            refused[t] = int(scalars.given_weights[STRANDING_WHEN_FULL] * _asked_gpus(run, t))
        classes.offers[t] = offers[t] = watts[t] + refused[t]
    for _ in range(ROUNDS):
        for t in range(offers.shape[0]):
            if left[t] >= 0:
                net = max(0.0, watts[t] - part * _gain_left(run, openings, left[t], t) / total)
                offers[t] = (int(classes.offers[t]) + int(net) + refused[t]) // 2
        for t in range(offers.shape[0]):
            classes.offers[t] = offers[t]
    for t in range(offers.shape[0]):
        classes.offers[t] = in_force[t]


@lean_kernel
def _estimate_stockouts(run: EngineArrays, held_milli: int, stockouts: Ints) -> None:
    """Makes of the places that are left (C,), in place, how likely each class with several GPUs runs out of them, in thousandths."""
    classes, weight, total = run.classes, run.class_weight, 0.0
    for t in range(stockouts.shape[0]):
        total += weight[t] * _asked_gpus(run, t)
    for t in range(stockouts.shape[0]):
        places, larger = stockouts[t], 0.0
        stockouts[t] = 0
        if classes.gpus[t] <= 1.0:
            continue
        for other in range(stockouts.shape[0]):
            larger += weight[other] * classes.gpus[other] if classes.gpus[other] >= classes.gpus[t] else 0.0
        running = max(1.0, held_milli / WHOLE * larger / total / classes.gpus[t])
        likely = 1000.0 * math.erfc(places / (2.0 * math.sqrt(running)))
        stockouts[t] = int(likely + STOCKOUT_STEP / 2) // STOCKOUT_STEP * STOCKOUT_STEP


@lean_kernel
def _scarce(run: EngineArrays, free: Ints, turnover: int) -> int:
    """Bits of the scarce models; free (M,) is in milli-GPU, the turnover in thousandths."""
    captive, scalars = run.captive, run.scalars[0]
    all_asked, total = float(scalars.captive_milli), 0.0
    for model in range(free.shape[0]):
        total += free[model]
    asks = total + (min(total, scalars.capacity_milli - total) - total) * (turnover / 1000.0)
    best, chosen = (TOLERANCE + (STEADY_TOLERANCE - TOLERANCE) * (turnover / 1000.0)) * total, 0
    for at in range(scalars.captive_unions if all_asked > 0.0 else 0):
        models, asked = captive[at].union, 0.0
        for tied in range(scalars.captive_sets):
            if captive[tied].models & ~models == 0:
                asked += captive[tied].milli
        short = asked / all_asked * asks
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
def compute_prices(run: EngineArrays, quoted: Ints, turnover: int) -> tuple[int, int]:
    """Offers in whole watts and stockouts, (2, C), in place; returns the bits of scarce models and the load.

    Stockouts, load and turnover are in thousandths.
    """
    scalars, weight, offers = run.scalars[0], run.class_weight, quoted[0]
    free = np.empty(run.classes.wanted.shape[0] - 1, np.int64)
    load = _sum_free(run, free)
    room = np.empty(scalars.rows * run.added_w.shape[1] + 1, OPENING)
    openings = room[: _list_openings(run, room)]
    by_class, by_watts = np.empty((4, offers.shape[0]), np.int64), np.zeros((2, _WATTS_MOST + 1), np.int64)
    _fill_offers(run, openings, quoted, by_class, by_watts)
    _estimate_stockouts(run, scalars.capacity_milli - np.sum(free), quoted[1])
    moved = 0.0
    for t in range(offers.shape[0]):
        moved += weight[t] * abs(offers[t] - run.classes.offers[t])
    if scalars.shifts >= 0 and moved < MOVED_LEAST_W * scalars.mix_weight:
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
def _bound_feed(feed: FeedArrays) -> tuple[int, int]:
    """What a milli-GPU and a milli-CPU can change S by at most, in any family."""
    gpu = cpu = 0
    for family in range(feed.gpu.shape[0]):
        own_gpu = own_cpu = 0
        for t in range(feed.gpu.shape[1]):
            own_gpu += FEED_MILLI * feed.gpu[family, t]
            own_cpu += feed.cpu[family, t]
        gpu, cpu = max(gpu, own_gpu), max(cpu, own_cpu)
    return gpu, cpu


@lean_kernel
def _loosen(run: EngineArrays, spread: float, cleared: int, heavier: float, lighter_blocks: float) -> None:
    """Note by how much costs known before may be too high now.

    By the look-ahead, by models that are scarce no more, by blocks that weigh less, and by a stranding that weighs more,
    or less: a task strands at most the GPUs that its CPU feeds, and saves at most its own.
    """
    scale, weights = run.scalars[0].scale, run.scalars[0].weights
    gpu_most, cpu_most = _bound_feed(run.feed)
    for kind in range(run.kinds.shape[0]):
        asked = run.kinds[kind]
        gpu_asked = asked.gpu_count * asked.gpu_milli
        fed = gpu_most * gpu_asked if heavier > 0.0 else cpu_most * asked.cpu_milli
        loose = spread * abs(weights[LOOKAHEAD]) / scale[LOOKAHEAD] + abs(heavier) * fed / scale[STRANDING]
        loose += FEED_MILLI * lighter_blocks / scale[STRANDING]
        if asked.models & cleared:
            loose += abs(weights[SCARCITY]) * gpu_asked / scale[SCARCITY]
        asked.loose += loose + LEAST_W


@inlined_kernel
def _rise(load: int) -> float:
    """From 0 at a load of RISE to 1 at a full fleet; the load in thousandths."""
    return float(max(0, load - RISE_PERMILLE) / (1000.0 - RISE_PERMILLE))


@inlined_kernel
def _weigh_filling(run: EngineArrays) -> tuple[float, float, float]:
    """While the fleet fills, the weight of fragmentation, and those of stranding up to RISE and in a full fleet."""
    given, least = run.scalars[0].given_weights, run.scalars[0].given_weights[STRANDING]
    if run.scalars[0].cpu_scarce == 0:
        return given[FRAGMENTATION], least, given[STRANDING_WHEN_FULL]
    return max(given[FRAGMENTATION], CPU_PART * least), 0.0, CPU_PART * least


@inlined_kernel
def _weigh_terms(run: EngineArrays, load: int, turnover: int) -> tuple[float, float]:
    """The weights of fragmentation and of stranding; load and turnover in thousandths."""
    given, filling = run.scalars[0].given_weights, 1.0 - turnover / 1000.0
    fragmentation, low, full = _weigh_filling(run)
    stranding = given[STRANDING] + (low - given[STRANDING]) * filling + max(0.0, full - low) * filling * _rise(load)
    return given[FRAGMENTATION] + (fragmentation - given[FRAGMENTATION]) * filling, stranding


@inlined_kernel
def _weigh_place(run: EngineArrays, stockout: int, load: int, turnover: int) -> int:
    """What a place for several GPUs counts in stranding, in thousandths, as are stockout, load and turnover."""
    scalars, given = run.scalars[0], run.scalars[0].given_weights
    rise, steady = _rise(load), turnover / 1000.0
    low, full, stranding = BLOCK_PART * given[STRANDING], given[STRANDING_WHEN_FULL], scalars.weights[STRANDING]
    _, filling_low, filling_full = _weigh_filling(run)
    filling = filling_full * rise if scalars.block_scarcity != ENOUGH_BLOCKS else 0.0
    if scalars.block_scarcity == NO_SPARE_BLOCKS:
        filling += filling_low * (1.0 - rise)
    missed = max(stockout / 1000.0, rise * rise)
    weight = filling + (low + (full - low) * missed - filling) * steady
    return int(1000.0 * weight / stranding) if stranding > 0.0 else 0


@lean_kernel
def _price_blocks(
    run: EngineArrays, stockouts: Ints, load: int, turnover: int, stranded_before: float
) -> tuple[bool, float]:
    """Prices of places by their stockouts (C,) and those that are almost there; whether any changed, and what a node may lose at most."""
    scalars, feed, width = run.scalars[0], run.feed, run.added_w.shape[1]
    part = PART_PERMILLE * turnover // 1000
    changed, most, kept = scalars.part_permille != part, 0.0, scalars.part_permille <= part
    scalars.part_permille, scalars.priced_blocks = part, 0
    for family in range(feed.gpu.shape[0]):
        lighter = 0.0
        for place in range(feed.gpu.shape[1]):
            gpus = feed.block_gpus[family, place]
            if gpus == 0:
                break
            before = feed.block_price[family, place]
            weight = _weigh_place(run, stockouts[feed.block_class[family, place]], load, turnover)
            price = feed.block_worth[family, place] * weight
            feed.block_price[family, place] = price
            scalars.priced_blocks = 1 if price > 0 else scalars.priced_blocks
            changed |= price != before
            now = scalars.weights[STRANDING] * price if kept else 0.0
            lighter += max(0.0, stranded_before * before - now) * ((width + gpus - 1) // gpus)
        most = max(most, lighter)
    return changed, most


@lean_kernel
def apply_prices(run: EngineArrays, quoted: Ints, scarce: int, load: int, turnover: int) -> None:
    """Puts quotes (2, C) in force: costs known before are bounds from below now, where they differ from those before."""
    scalars, offers = run.scalars[0], quoted[0]
    scalars.shifts = 0
    fragmentation, stranding = _weigh_terms(run, load, turnover)
    cleared, stranded_before = scalars.scarce_models & ~scarce, scalars.weights[STRANDING]
    changed = scalars.scarce_models != scarce or stranded_before != stranding
    scalars.scarce_models = scarce
    scalars.weights[STRANDING] = stranding
    repriced, lighter_blocks = _price_blocks(run, quoted[1], load, turnover, stranded_before)
    moved, spread = False, _spread(run, offers)
    for t in range(offers.shape[0]):
        moved |= run.classes.offers[t] != offers[t]
        run.classes.offers[t] = offers[t]
    if moved:
        fill_relief(run)
    for row in range(scalars.rows if moved else 0):
        if run.states[row].root >= 0:
            refresh_gain(run, row)
    if scalars.weights[FRAGMENTATION] != fragmentation:
        scalars.weights[FRAGMENTATION] = fragmentation
        for kind in range(run.kinds.shape[0]):
            run.kinds[kind].read, run.kinds[kind].loose = NEVER, 0.0
    elif changed or repriced or moved:
        _loosen(run, spread, cleared, stranding - stranded_before, lighter_blocks)


@kernel
def update_prices(run: EngineArrays) -> bool:
    """Quotes anew where that is due; whether it was."""
    if not are_prices_due(run):
        return False
    quoted = np.zeros((2, run.classes.offers.shape[0]), np.int64)
    scalars = run.scalars[0]
    turnover = measure_turnover(scalars.came_milli, scalars.left_milli)
    scarce, load = compute_prices(run, quoted, turnover)
    apply_prices(run, quoted, scarce, load, turnover)
    scalars.came_milli -= scalars.came_milli >> TURNOVER_SHIFT
    scalars.left_milli -= scalars.left_milli >> TURNOVER_SHIFT
    return True
