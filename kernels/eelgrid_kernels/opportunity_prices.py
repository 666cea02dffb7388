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
         line to the given weight of a full fleet.
Quotes are made anew after HORIZON / 10 tasks came or left. Offers that moved by less
than MOVED_LEAST_W in the mean stay as they are, and the load counts in steps, so
that what is known of costs stays good: the larger the fleet, the longer.
"""
# ruff: noqa: PLR0917 (numba takes arguments by position)

import numpy as np

from eelgrid_kernels.arrays import (
    ASKED_CPU,
    ASKED_GPUS,
    ASKED_MILLI,
    ASKED_MODELS,
    CAPACITY,
    CAPACITY_MILLI,
    CLASS_BESIDE,
    CLASS_CPU,
    CLASS_GPUS,
    CLOSED,
    CPU,
    GIVEN,
    GPU,
    HORIZON,
    MODEL,
    MODELS,
    ROOT,
    ROWS,
    SCALE,
    SCARCE,
    SHAPE,
    SHIFTS,
    SIZE,
    TOTAL,
    WEIGHTS,
    EngineArrays,
    Floats,
    Ints,
)
from eelgrid_kernels.compilation import inlined_kernel, kernel, lean_kernel
from eelgrid_kernels.cost_terms import PACKAGES_MOST, fill_relief, refresh_gain, summarize_model
from eelgrid_kernels.cpu_packages import FEED, PACKAGE_MILLI, PACKAGE_W, package_slack

RISE_PERMILLE = 700
TOLERANCE = 0.02
PARTS = 10  # of a horizon between quotes
MOVED_LEAST_W = 10.0
LOAD_STEP = 20  # in thousandths
LEAST_W = 1e-6  # wider than any rounding, so that a bound is one
_WATTS_MOST = 8192  # dearer offers count as this


@lean_kernel
def are_prices_due(run: EngineArrays) -> bool:
    """Whether offers weigh anything, and were never made or are old."""
    given, shifts = run.rates[GIVEN], run.facts[SHIFTS]
    weighs = given[3] != 0.0 or given[4] != 0.0 or given[5] != given[2]
    return bool(weighs and (shifts < 0 or shifts >= max(1, run.facts[HORIZON] // PARTS)))


@lean_kernel
def _facets(run: EngineArrays, facets: Ints, open_w: Floats) -> int:
    """One row for each model of each open state into facets (R', 7) and open_w (R',), in place; returns how many."""
    found = 0
    for row in range(run.facts[ROWS]):
        root, shape = run.states[row, ROOT], run.states[row, SHAPE]
        if root < 0 or run.states[row, CLOSED] != 0:
            continue
        models, cpu_free = run.shapes[shape, MODELS], run.states[row, CPU]
        for model in range(run.wanted.shape[0]):
            none = models == 0 and model == run.wanted.shape[0] - 1
            if not (none or models >> model & 1):
                continue
            facets[found, 0], facets[found, 1] = model, run.nodes[root, SIZE]
            facets[found, 2], facets[found, 3] = cpu_free, package_slack(run.shapes[shape, CAPACITY], cpu_free)
            facets[found, 4], facets[found, 5], open_w[found] = summarize_model(
                run.states, run.shapes, run.added_w, row, model, -1, 0, run.kinds, -1
            )
            facets[found, 6] = 1 if none or models >> (model + 1) == 0 else 0  # the last of its state
            found += 1
    return found


@inlined_kernel
def _watts(run: EngineArrays, facets: Ints, open_w: Floats, i: int, t: int) -> float:
    """DP of a class by one model of a state; infinite where it does not fit."""
    cpu, gpus = run.classes[CLASS_CPU, t], run.classes[CLASS_GPUS, t]
    if cpu > facets[i, 2] or (gpus > 0.0 and run.wanted[facets[i, 0], t] == 0.0):
        return np.inf
    waking = min(float(PACKAGES_MOST), np.ceil(max(0.0, (cpu - facets[i, 3]) / PACKAGE_MILLI)))
    if run.classes[CLASS_BESIDE, t] <= facets[i, 5]:
        return float(PACKAGE_W * waking)
    return float(PACKAGE_W * waking + gpus * open_w[i]) if gpus <= facets[i, 4] else np.inf


@lean_kernel
def _offer(run: EngineArrays, facets: Ints, open_w: Floats, count: int, t: int, wanted: int, nodes: Ints) -> int:
    """The offer for a class after `wanted` other tasks; nodes (W,) counts them by watts, scratch."""
    nodes[:] = 0
    number, least = 0, np.inf
    for i in range(count):
        least = min(least, _watts(run, facets, open_w, i, t))
        if facets[i, 6] == 0:
            continue
        if least < np.inf:
            nodes[min(_WATTS_MOST, int(least))] += facets[i, 1]
            number += facets[i, 1]
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
def _scarce(run: EngineArrays, free: Ints) -> int:
    """Bits of the scarce models; free (M,) is in milli-GPU."""
    captive = run.captive
    sets, demands, all_asked = captive[0, 0], captive[1, 0], float(captive[2, 0])
    total = 0.0
    for model in range(free.shape[0]):
        total += free[model]
    best, chosen = TOLERANCE * total, 0
    for at in range(1, 1 + sets if all_asked > 0.0 else 1):
        models, asked = captive[0, at], 0.0
        for tied in range(1, 1 + demands):
            if captive[1, tied] & ~models == 0:
                asked += captive[2, tied]
        short = asked / all_asked * total
        for model in range(free.shape[0]):
            if models >> model & 1:
                short -= free[model]
        if short > best:
            best, chosen = short, models
    return chosen


@kernel
def compute_prices(run: EngineArrays, offers: Ints) -> tuple[int, int]:
    """Offers (C,) in whole watts, in place; returns the bits of scarce models and the load in thousandths."""
    models = run.wanted.shape[0] - 1
    free = np.zeros(models, np.int64)
    held = run.facts[CAPACITY_MILLI]
    for row in range(run.facts[ROWS]):
        root = run.states[row, ROOT]
        if root < 0:
            continue
        size, shape = run.nodes[root, SIZE], run.states[row, SHAPE]
        held -= size * run.states[row, TOTAL]
        for slot in range(run.added_w.shape[1]):
            model = run.shapes[shape, MODEL + slot]
            if model >= 0 and run.states[row, CLOSED] == 0:
                free[model] += size * run.states[row, GPU + slot]
    room = run.facts[ROWS] * run.added_w.shape[1] + 1
    facets, open_w = np.zeros((room, 7), np.int64), np.zeros(room)
    count = _facets(run, facets, open_w)
    nodes, total = np.zeros(_WATTS_MOST + 1, np.int64), 0
    for t in range(offers.shape[0]):
        total += run.captive[3, t]
    for t in range(offers.shape[0]):
        wanted = run.facts[HORIZON] * run.captive[3, t] // max(1, total)
        offers[t] = _offer(run, facets, open_w, count, t, wanted, nodes)
    moved = 0.0
    for t in range(offers.shape[0]):
        moved += run.captive[3, t] * abs(offers[t] - run.offers[t])
    if run.facts[SHIFTS] >= 0 and moved < MOVED_LEAST_W * total:
        for t in range(offers.shape[0]):
            offers[t] = int(run.offers[t])
    load = held * 1000 // max(1, run.facts[CAPACITY_MILLI])
    return _scarce(run, free), load - load % LOAD_STEP


@lean_kernel
def _spread(run: EngineArrays, offers: Ints) -> float:
    """How far apart the look-ahead of a task can be by these offers and by those in force: no class by more than its own."""
    most = 0.0
    for model in range(run.wanted.shape[0]):
        sum_ = 0.0
        for t in range(offers.shape[0]):
            sum_ += run.wanted[model, t] * abs(offers[t] - run.offers[t])
        most = max(most, sum_)
    return most


@lean_kernel
def _loosen(run: EngineArrays, spread: float, cleared: int, heavier: float) -> None:
    """Note by how much costs known before may be too high now.

    By the look-ahead, by models that are scarce no more, and by a stranding that weighs more, or less: a task strands at
    most the GPUs that its CPU feeds, and saves at most its own.
    """
    scale, weights = run.rates[SCALE], run.rates[WEIGHTS]
    for kind in range(run.kinds.shape[0]):
        asked = run.kinds[kind, ASKED_GPUS] * run.kinds[kind, ASKED_MILLI]
        fed = FEED * asked if heavier > 0.0 else run.kinds[kind, ASKED_CPU]
        loose = spread * abs(weights[3]) / scale[3] + abs(heavier) * fed / scale[2]
        if run.kinds[kind, ASKED_MODELS] & cleared:
            loose += abs(weights[4]) * asked / scale[4]
        run.loose[kind] += loose + LEAST_W


@lean_kernel
def apply_prices(run: EngineArrays, offers: Ints, scarce: int, load: int) -> None:
    """Puts quotes in force: costs known before are bounds from below now, where they differ from those before."""
    facts, given = run.facts, run.rates[GIVEN]
    facts[SHIFTS] = 0
    rise = max(0, load - RISE_PERMILLE) / (1000.0 - RISE_PERMILLE)
    stranding = given[2] + (given[5] - given[2]) * rise
    cleared, stranded_before = facts[SCARCE] & ~scarce, run.rates[WEIGHTS, 2]
    changed = facts[SCARCE] != scarce or stranded_before != stranding
    facts[SCARCE], run.rates[WEIGHTS, 2] = scarce, stranding
    moved, spread = False, _spread(run, offers)
    for t in range(offers.shape[0]):
        moved |= run.offers[t] != offers[t]
        run.offers[t] = offers[t]
    if moved:
        fill_relief(run.classes, run.wanted, run.offers, run.levels, run.relief)
    for row in range(facts[ROWS] if moved else 0):
        if run.states[row, ROOT] >= 0:
            refresh_gain(run.states, run.shapes, run.added_w, run.kinds, run.classes, run.wanted, run.offers, row)
    if changed or moved:
        _loosen(run, spread, cleared, stranding - stranded_before)


@kernel
def update_prices(run: EngineArrays) -> bool:
    """Quotes anew where that is due; whether it was."""
    if not are_prices_due(run):
        return False
    offers = np.zeros(run.offers.shape[0], np.int64)
    scarce, load = compute_prices(run, offers)
    apply_prices(run, offers, scarce, load)
    return True
