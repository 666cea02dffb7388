"""The terms of the cost: potentials of a node's state, and what a task adds to each.

Owns what a term is and how it is computed, from the state before and the change.
Must not know policies, weights or how states are found. Who adds a term adds its
name, its scale (eelgrid_kernels.build) and a line in `added`.

power          watts, as eelgrid_kernels.placement has them
fragmentation  F = sum_t f_t * frag(n, t), the same
stranding      GPUs that the free CPU can no longer feed, the same
lookahead      minus G, the watts that the next task would save here (eelgrid_kernels.lookahead)
scarcity       GPUs taken of models that others will need (eelgrid_kernels.quotes)

Theory of F: classes that ask for equally many GPUs of the same share and that may
use the same models of a node's family differ only in their CPU. They are one
group, and the weight of those of its classes that the free CPU serves is a table
by level of CPU. With n GPUs usable to a group and u milli free on them,

    F = total weight * free - served,   served = sum_q weight[level, q] * (u_q if n_q >= count_q else 0)

so that a choice costs one pass over some 15 groups instead of up to a hundred
classes. All in whole numbers: exact, whatever the order of summation.
"""
# ruff: noqa: PLR0917 (numba takes arguments by position)

from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.compiled import inlined, lean
from eelgrid_kernels.lookahead import gain_after, rise, served_level
from eelgrid_kernels.packages import FEED, PACKAGE_MILLI, PACKAGE_W, WHOLE, active_packages, slack
from eelgrid_kernels.peer_arrays import (
    ASKED_CPU,
    ASKED_GPUS,
    ASKED_MILLI,
    ASKED_MODELS,
    CAPACITY,
    CPU,
    FAMILY,
    GAIN,
    GPU,
    GROUP_ALLOWS,
    GROUP_COUNT,
    GROUP_MILLI,
    GROUPS,
    MODEL,
    MODELS,
    MOST_FREE,
    OPTIONS,
    SCARCE,
    SERVED,
    SHAPE,
    TOTAL,
    WEIGHT,
    WEIGHTS,
)  # fmt: skip

__all__ = ["TERMS", "added", "regain", "survey"]

TERMS = ("power", "fragmentation", "stranding", "lookahead", "scarcity")


@inlined
def _served(
    states: Ints, groups: Ints, weight: Ints, levels: Ints, row: int, family: int, cpu_free: int, model: int,
    copies: int, was: int, now: int,
) -> int:  # fmt: skip
    """Weighted milli-GPU that the mix can use after that many GPUs of a model go from `was` to `now` milli free."""
    level = served_level(levels, cpu_free)
    width = groups.shape[2]
    usable_at = states.shape[1] - 2 * width
    milli_at = usable_at + width
    sum_ = 0
    for q in range(groups[family, GROUPS, 0]):
        allowed, milli = groups[family, GROUP_ALLOWS + model, q], groups[family, GROUP_MILLI, q]
        before = allowed if was >= milli else 0
        after = allowed if now >= milli else 0
        usable = states[row, usable_at + q] + copies * (after - before)
        free = states[row, milli_at + q] + copies * (after * now - before * was)
        sum_ += weight[family, level, q] * (free if usable >= groups[family, GROUP_COUNT, q] else 0)
    return sum_


@lean
def survey(
    states: Ints, shapes: Ints, added_w: Floats, kinds: Ints, groups: Ints, weight: Ints, levels: Ints, classes: Floats,
    wanted: Floats, offers: Floats, row: int,
) -> None:  # fmt: skip
    """Fill what a new state's free CPU and GPUs imply, in place."""
    shape, slots, width = states[row, SHAPE], added_w.shape[1], groups.shape[2]
    family = shapes[shape, FAMILY]
    option_at, usable_at = GPU + slots, GPU + 2 * slots
    states[row, usable_at:] = 0
    total = options = most = 0
    for slot in range(slots):
        model, free = shapes[shape, MODEL + slot], states[row, GPU + slot]
        if model < 0:
            continue
        total += free
        most = max(most, free)
        alike = False
        for lower in range(options):
            other = states[row, option_at + lower]
            alike |= (
                states[row, GPU + other] == free
                and shapes[shape, MODEL + other] == model
                and added_w[shape, other] == added_w[shape, slot]
            )
        if not alike:
            states[row, option_at + options] = slot
            options += 1
        for q in range(groups[family, GROUPS, 0] if free > 0 else 0):
            if groups[family, GROUP_ALLOWS + model, q] != 0 and free >= groups[family, GROUP_MILLI, q]:
                states[row, usable_at + q] += 1
                states[row, usable_at + width + q] += free
    states[row, OPTIONS], states[row, TOTAL], states[row, MOST_FREE] = options, total, most
    states[row, SERVED] = _served(states, groups, weight, levels, row, family, states[row, CPU], 0, 0, 0, 0)
    regain(states, shapes, added_w, kinds, classes, wanted, offers, row)


@inlined
def regain(
    states: Ints, shapes: Ints, added_w: Floats, kinds: Ints, classes: Floats, wanted: Floats, offers: Floats, row: int
) -> None:
    """Fill G of a state by the offers in force."""
    states[row, GAIN] = int(
        gain_after(states, shapes, added_w, kinds, classes, wanted, offers, row, states[row, CPU], -1, -1)
    )


@lean
def _served_after_several(
    states: Ints, shapes: Ints, added_w: Floats, kinds: Ints, groups: Ints, weight: Ints, levels: Ints, kind: int,
    row: int,
) -> int:  # fmt: skip
    """`_served` after a task took several GPUs of several models; their change is undone before it returns."""
    shape, width, milli = states[row, SHAPE], groups.shape[2], kinds[kind, ASKED_MILLI]
    family, usable_at = shapes[shape, FAMILY], states.shape[1] - 2 * width
    served = 0
    for sign in (1, -1):
        taken = 0
        for slot in range(added_w.shape[1]):
            model, free = shapes[shape, MODEL + slot], states[row, GPU + slot]
            if taken == kinds[kind, ASKED_GPUS] or model < 0 or free < milli:
                continue
            if not kinds[kind, ASKED_MODELS] >> model & 1:
                continue
            taken += 1
            for q in range(groups[family, GROUPS, 0]):
                allowed, needs = groups[family, GROUP_ALLOWS + model, q], groups[family, GROUP_MILLI, q]
                before = allowed if free >= needs else 0
                after = allowed if free - milli >= needs else 0
                states[row, usable_at + q] += sign * (after - before)
                states[row, usable_at + width + q] += sign * (after * (free - milli) - before * free)
        if sign > 0:
            cpu_left = states[row, CPU] - kinds[kind, ASKED_CPU]
            served = _served(states, groups, weight, levels, row, family, cpu_left, 0, 0, 0, 0)
    return served


@inlined
def added(
    states: Ints, shapes: Ints, added_w: Floats, kinds: Ints, groups: Ints, weight: Ints, levels: Ints,
    classes: Floats, wanted: Floats, offers: Floats, relief: Floats, rates: Floats, facts: Ints, kind: int, row: int,
    slot: int, exact: bool,
) -> tuple[float, float, float, float, float]:  # fmt: skip
    """What a task adds to each term (J,) in a state where it fits, unscaled; slot is its GPU if it asks for one.

    Several GPUs are the first that fit. Terms that take a look at the mix are 0 where they weigh nothing. Where
    exact is not asked for, the look-ahead is the least that it can be by the watts added.
    """
    shape, cpu_free, total = states[row, SHAPE], states[row, CPU], states[row, TOTAL]
    family, capacity = shapes[shape, FAMILY], shapes[shape, CAPACITY]
    count, milli, cpu_left = kinds[kind, ASKED_GPUS], kinds[kind, ASKED_MILLI], cpu_free - kinds[kind, ASKED_CPU]
    gpu_w, model, was, several, scarce = 0.0, 0, 0, False, 0
    if count == 1:
        model, was = shapes[shape, MODEL + slot], states[row, GPU + slot]
        gpu_w = added_w[shape, slot] if was == WHOLE else 0.0
        scarce = milli * (facts[SCARCE] >> model & 1)
    elif count > 1:
        several = shapes[shape, MODELS] & (shapes[shape, MODELS] - 1) != 0 or milli < WHOLE
        taken = 0
        for other in range(added_w.shape[1]):
            model = max(0, shapes[shape, MODEL + other])
            fits = shapes[shape, MODEL + other] >= 0 and states[row, GPU + other] >= milli
            if fits and kinds[kind, ASKED_MODELS] >> model & 1:
                gpu_w += added_w[shape, other] if states[row, GPU + other] == WHOLE else 0.0
                scarce += milli * (facts[SCARCE] >> model & 1)
                taken += 1
                if taken == count:
                    break
        was = WHOLE
    packages = active_packages(capacity, cpu_left) - active_packages(capacity, cpu_free)
    asked, fragments, lost = count * milli, 0, 0.0
    stranded = max(0, FEED * (total - asked) - cpu_left) - max(0, FEED * total - cpu_free)
    if rates[WEIGHTS, 1] != 0.0:
        if several:
            served = _served_after_several(states, shapes, added_w, kinds, groups, weight, levels, kind, row)
        else:
            served = _served(states, groups, weight, levels, row, family, cpu_left, model, count, was, was - milli)
        fragments = -asked * facts[WEIGHT] - (served - states[row, SERVED])
    if rates[WEIGHTS, 3] != 0.0:
        if exact:
            lost = states[row, GAIN] - gain_after(
                states, shapes, added_w, kinds, classes, wanted, offers, row, cpu_left, slot, kind
            )
        elif gpu_w + packages > 0.0:
            useful = packages - kinds[kind, ASKED_CPU] // PACKAGE_MILLI
            lost = -rise(relief, levels, shapes[shape, MODELS], slack(capacity, cpu_free), cpu_left, useful, gpu_w)
    return gpu_w + PACKAGE_W * packages, float(fragments), float(stranded), lost, float(scarce)
