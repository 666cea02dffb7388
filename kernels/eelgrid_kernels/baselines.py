"""Placement policies by name: published baselines and eelgrid's own, as cost and GPU choice in a node state.

A task must be placed if it fits somewhere (CPU, memory, GPU share, GPU model); the highest score wins, ties go to the
lowest rank. F, watts and stranding are those of eelgrid_kernels.cost_terms. Scores, from what is free before the task:

MIX            a * PWR + b * FGD. PWR: int(watts before - after), scaled; FGD: int(100 * sigmoid((F before - after)
               / 1000)); each with its best GPU, the first of equals. FGD's GPU is taken, or PWR's where b = 0.
BEST_FIT       int(100 * (1 - (free CPU - asked) / 256000 - (free GPU - asked) / 16000)), scaled; tightest GPU.
DOT_PROD       int(100 * (1 - (free CPU * asked / 128000^2 + free GPU * asked / 8000^2) / 2)); tightest GPU.
GPU_PACKING    no GPU asked: 0; idle node of n GPUs: max(33 - n, n); k idle GPUs taken: max(50 - k, 33);
               fits beside others: max(100 - free % / 10, 50) of the tightest such GPU.
GPU_CLUSTERING no GPU asked: 0; of the GPU tasks there, all of this kind (share, 1 GPU, 2 GPUs, ...): 75, some: 50,
               no GPU task there: 25, else 0; plus 25 * (8000 - free GPU) // 8000; tightest GPU.
RANDOM         any node that fits, any GPU that fits.
EELGRID        minus the weighted sum of what the task adds to each term, GPU and node chosen together.

Scaled: (s - min) * 100 // (max - min) over the nodes that fit, 100 where all are equal. Several GPUs are whole ones,
in index order. Sources: Weng et al., USENIX ATC'23 (FGD and the first five peers); Lettich et al., CCGrid 2025 (PWR).

Inside, a cost is minus the score, so that the lowest is best. Where one component alone counts, scaling it changes no
order, so only real mixes are scaled.

`pwrA` is PWR with weight A and FGD with 1000 - A, for any whole A from 1 to 999;
the mixes that Lettich et al. (CCGrid 2025) publish are listed. `eelgrid` weighs,
unless it is given other weights: a watt as 1; fragmentation not at all, since the
look-ahead sees what it sees; a GPU that its node's CPU can no longer feed as 50 W,
and as up to 1,000 W when the fleet is fuller than 70 %; a watt that the next task
would have saved as 0.7; a GPU of a scarce model as 500 W. docs/model.md has the why.
"""

import re
from typing import NamedTuple

import numpy as np

from eelgrid_kernels.arrays import (
    ASKED_CPU,
    ASKED_GPUS,
    ASKED_MILLI,
    ASKED_MODELS,
    CLOSED,
    CPU,
    GPU,
    MODEL,
    MODELS,
    MOST_FREE,
    OPTIONS,
    SCALE,
    SEED,
    SHAPE,
    TAG,
    TAGS,
    TOTAL,
    WEIGHTS,
    WIDTH,
    EngineArrays,
    Floats,
    Ints,
)
from eelgrid_kernels.compilation import inlined_kernel, lean_kernel
from eelgrid_kernels.cost_terms import compute_added_terms
from eelgrid_kernels.cpu_packages import WHOLE
from eelgrid_kernels.node_tree import random_draw

# ruff: noqa: PLR0917 (numba takes arguments by position)


RANDOM, DOT_PROD, GPU_PACKING, GPU_CLUSTERING, BEST_FIT, MIX, EELGRID = range(7)

IN_ORDER = -1  # slot of a task with no GPU or several, which are taken in index order
CPU_SPAN, GPU_SPAN = 128_000, 8_000  # the widest node of the papers, in milli


@inlined_kernel
def _tightest(states: Ints, shapes: Ints, kinds: Ints, kind: int, row: int) -> int:
    """The fitting GPU with the least free share; IN_ORDER unless one GPU is asked for."""
    best, least = IN_ORDER, 0
    for slot in range(shapes.shape[1] - MODEL if kinds[kind, ASKED_GPUS] == 1 else 0):
        free, model = states[row, GPU + slot], shapes[states[row, SHAPE], MODEL + slot]
        if model < 0 or free < kinds[kind, ASKED_MILLI] or not kinds[kind, ASKED_MODELS] >> model & 1:
            continue
        if best < 0 or free < least:
            best, least = slot, free
    return best


@lean_kernel
def _random_slot(run: EngineArrays, kind: int, row: int, moment: int) -> int:
    """Any fitting GPU."""
    best, highest = IN_ORDER, 0
    for slot in range(run.gpu.shape[0]):
        free, model = run.states[row, GPU + slot], run.shapes[run.states[row, SHAPE], MODEL + slot]
        if model < 0 or free < run.kinds[kind, ASKED_MILLI] or not run.kinds[kind, ASKED_MODELS] >> model & 1:
            continue
        drawn = random_draw(run.facts[SEED], -1 - moment, slot)
        if best < 0 or drawn < highest:
            best, highest = slot, drawn
    return best


@inlined_kernel
def _by_effect(
    states: Ints,
    shapes: Ints,
    added_w: Floats,
    kinds: Ints,
    groups: Ints,
    weight: Ints,
    levels: Ints,
    classes: Floats,
    wanted: Floats,
    offers: Floats,
    relief: Floats,
    rates: Floats,
    facts: Ints,
    policy: int,
    kind: int,
    row: int,
    exact: bool,
) -> tuple[float, float, int]:
    """MIX and EELGRID: every GPU that differs is tried."""
    shape, slots = states[row, SHAPE], added_w.shape[1]
    count, milli, models = kinds[kind, ASKED_GPUS], kinds[kind, ASKED_MILLI], kinds[kind, ASKED_MODELS]
    best, power, chosen = np.inf, np.inf, IN_ORDER
    for option in range(states[row, OPTIONS] if count == 1 else 1):
        slot = IN_ORDER
        if count == 1:
            slot = states[row, GPU + slots + option]
            if states[row, GPU + slot] < milli or not models >> shapes[shape, MODEL + slot] & 1:
                continue
        terms = compute_added_terms(
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
            kind,
            row,
            slot,
            exact,
        )
        if policy == EELGRID:
            cost = 0.0
            for term in range(len(terms)):
                cost += rates[WEIGHTS, term] * (terms[term] / rates[SCALE, term])
        else:
            added_power = -float(int(-terms[0]))
            power = min(power, added_power)
            eased = -terms[1] / rates[SCALE, 1]
            cost = added_power if rates[WEIGHTS, 1] == 0.0 else -float(int(100.0 / (1.0 + np.exp(-eased))))
        if cost < best:
            best, chosen = cost, slot
    return best, power, chosen


@inlined_kernel
def _by_fill(states: Ints, shapes: Ints, kinds: Ints, policy: int, kind: int, row: int) -> tuple[float, float, int]:
    """The policies that look at how full a node is."""
    cpu_free, total = states[row, CPU], states[row, TOTAL]
    count, milli, cpu = kinds[kind, ASKED_GPUS], kinds[kind, ASKED_MILLI], kinds[kind, ASKED_CPU]
    slot = _tightest(states, shapes, kinds, kind, row)
    score = 0  # in whole numbers, so that no rounding decides
    if policy == BEST_FIT:
        left = (cpu_free - cpu) + CPU_SPAN // GPU_SPAN * (total - count * milli)
        score = (100 * (2 * CPU_SPAN - left)) // (2 * CPU_SPAN)
    elif policy == DOT_PROD:
        product = cpu_free * cpu + (CPU_SPAN // GPU_SPAN) ** 2 * total * count * milli
        score = (100 * (2 * CPU_SPAN**2 - product)) // (2 * CPU_SPAN**2)
    elif policy == GPU_PACKING and count > 0:
        width = shapes[states[row, SHAPE], WIDTH]
        if total == width * WHOLE:
            score = max(33 - width, width)
        elif count > 1 or states[row, GPU + slot] == WHOLE:
            score = max(50 - count, 33)
        else:
            score = max(100 - states[row, GPU + slot] // 100, 50)
    elif policy == GPU_CLUSTERING and count > 0:
        tag, tags = 1 << kinds[kind, TAG], states[row, TAGS]
        held = 75 if tags == tag else 50 if tags & tag else 25 if tags == 0 else 0
        score = held + 25 * (GPU_SPAN - total) // GPU_SPAN
    return -float(score), 0.0, slot


@inlined_kernel
def task_fits(states: Ints, shapes: Ints, kinds: Ints, kind: int, row: int) -> bool:
    """Whether a task fits in a state, by all but memory."""
    count, milli, models = kinds[kind, ASKED_GPUS], kinds[kind, ASKED_MILLI], kinds[kind, ASKED_MODELS]
    if states[row, CLOSED] != 0 or states[row, CPU] < kinds[kind, ASKED_CPU]:
        return False
    if count == 0:
        return True
    shape = states[row, SHAPE]
    if states[row, MOST_FREE] < milli or shapes[shape, MODELS] & models == 0 or states[row, TOTAL] < count * milli:
        return False
    fitting = 0
    for slot in range(shapes.shape[1] - MODEL):
        model = shapes[shape, MODEL + slot]
        fitting += 1 if model >= 0 and states[row, GPU + slot] >= milli and models >> model & 1 else 0
    return bool(fitting >= count)


@inlined_kernel
def compute_task_cost(
    states: Ints,
    shapes: Ints,
    added_w: Floats,
    kinds: Ints,
    groups: Ints,
    weight: Ints,
    levels: Ints,
    classes: Floats,
    wanted: Floats,
    offers: Floats,
    relief: Floats,
    rates: Floats,
    facts: Ints,
    policy: int,
    kind: int,
    row: int,
    exact: bool,
) -> tuple[float, float, int]:
    """The cost of a task in a state, what of it is scaled, and the GPU; infinite where it does not fit.

    Where exact is not asked for, a cost with a look-ahead is bounded from below instead, and the GPU means nothing.
    """
    if not task_fits(states, shapes, kinds, kind, row):
        return np.inf, np.inf, IN_ORDER
    if policy == MIX or policy == EELGRID:  # noqa: PLR1714, SIM109 (a set would be made anew at each call)
        return _by_effect(
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
            policy,
            kind,
            row,
            exact,
        )
    return _by_fill(states, shapes, kinds, policy, kind, row)


@inlined_kernel
def is_bounded(policy: int, rates: Floats) -> bool:
    """Whether `weigh` can be asked for a bound that is cheaper than the cost."""
    return bool(policy == EELGRID and rates[WEIGHTS, 3] != 0.0)


@lean_kernel
def compute_cost_in_engine(run: EngineArrays, kind: int, row: int, exact: bool) -> tuple[float, float, int]:
    """`weigh` in a run, where it is not hot: code of its own, so that the compiler makes it once."""
    return compute_task_cost(
        run.states,
        run.shapes,
        run.added_w,
        run.kinds,
        run.groups,
        run.weight,
        run.levels,
        run.classes,
        run.wanted,
        run.offers,
        run.relief,
        run.rates,
        run.facts,
        run.policy,
        kind,
        row,
        exact,
    )


@lean_kernel
def choose_gpus(run: EngineArrays, kind: int, row: int, moment: int) -> None:
    """The GPUs that a task takes in a state where it fits into run.taken, -1 beyond the last."""
    kinds, taken = run.kinds, run.taken
    taken[:] = -1
    count, models = kinds[kind, ASKED_GPUS], kinds[kind, ASKED_MODELS]
    if count == 1:
        if run.policy == RANDOM:
            taken[0] = _random_slot(run, kind, row, moment)
            return
        taken[0] = compute_cost_in_engine(run, kind, row, True)[2]
        return
    found, shape = 0, run.states[row, SHAPE]
    for slot in range(run.gpu.shape[0] if count > 0 else 0):
        model = run.shapes[shape, MODEL + slot]
        fitting = model >= 0 and run.states[row, GPU + slot] >= kinds[kind, ASKED_MILLI]
        if found < count and fitting and models >> model & 1:
            taken[found] = slot
            found += 1


_MIX_TOTAL = 1000
_PUBLISHED_MIXES = (500, 300, 200, 100, 50, 25)


class PlacementPolicy(NamedTuple):
    """What a run is given."""

    name: str
    code: int
    weights: Floats


def _mix(power: int) -> tuple[int, tuple[float, ...]]:
    return MIX, (float(power), float(_MIX_TOTAL - power))


_KNOWN: dict[str, tuple[int, tuple[float, ...]]] = {
    "random": (RANDOM, ()),
    "dotprod": (DOT_PROD, ()),
    "gpupacking": (GPU_PACKING, ()),
    "gpuclustering": (GPU_CLUSTERING, ()),
    "bestfit": (BEST_FIT, ()),
    "fgd": _mix(0),
    "pwr": _mix(_MIX_TOTAL),
    **{f"pwr{power}": _mix(power) for power in _PUBLISHED_MIXES},
    "eelgrid": (EELGRID, (1.0, 0.0, 50.0, 0.7, 500.0, 1000.0)),
}


def policy_names() -> tuple[str, ...]:
    """The policies that have been published, and ours."""
    return tuple(_KNOWN)


def find_policy(name: str) -> PlacementPolicy:
    """The policy of that name, any mix of PWR and FGD among them."""
    found = _KNOWN.get(name)
    if found is None:
        mixed = re.fullmatch(r"pwr([1-9][0-9]{0,2})", name, re.ASCII)
        if not mixed:
            known = ", ".join(policy_names())
            raise ValueError(f"there is no policy {name!r}; take one of {known}, or pwrA with A from 1 to 999")
        found = _mix(int(mixed[1]))
    return PlacementPolicy(name, found[0], np.array(found[1], np.float64))
