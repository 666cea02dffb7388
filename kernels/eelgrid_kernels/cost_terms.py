"""Cost terms of a placement: power, fragmentation, stranding, look-ahead and scarcity.

power          watts, as eelgrid_kernels.node_cost has them
fragmentation  F = sum_t f_t * frag(n, t), the same
stranding      GPUs that the free CPU can no longer feed, the same
lookahead      minus G, the watts that the next task would save here (eelgrid_kernels.cost_terms)
scarcity       GPUs taken of models that others will need (eelgrid_kernels.opportunity_prices)

Theory of F: classes that ask for equally many GPUs of the same share and that may
use the same models of a node's family differ only in their CPU. They are one
group, and the weight of those of its classes that the free CPU serves is a table
by level of CPU. With n GPUs usable to a group and u milli free on them,

    F = total weight * free - served,   served = sum_q weight[level, q] * (u_q if n_q >= count_q else 0)

so that a choice costs one pass over some 15 groups instead of up to a hundred
classes. All in whole numbers: exact, whatever the order of summation.

    G(n) = sum_t f_t * max(0, offer_t - dP(n, t))

over the classes t of the mix that fit in node n: the watts that the next arrival
saves, in the mean, if n is there for it. dP(n, t) is what t adds in n, offer_t
what it costs elsewhere in the fleet. A placement is charged what it takes away
from G, so that CPU packages and GPUs once opened are filled by what fits them.

dP is of power alone: 105 W for each CPU package that t wakes, and for GPUs
nothing where one in use has the share left, else the watts of the cheapest idle
ones; at most four packages count. Where a node has several models, the one with
the largest G speaks for it.

How much G can rise is known without a look at any class, for states that need not
be weighed exactly. Packages that wake help the classes that need more CPU than is
awake and not more than is free, each by what they cost and by its offer at most;
a GPU that wakes helps those that ask for a share of one. What is left of these
sums over all classes with at most so much CPU is a table, made with the quotes.

Everything is whole: CPU in milli, watts rounded, weights as counted. So sums are
exact in a float, in whatever order a processor's vectors add them up. The loop
over classes has no branches for that reason: some 40 ns for 35 classes.
"""

from eelgrid_kernels.arrays import (
    ASKED_CPU,
    ASKED_GPUS,
    ASKED_MILLI,
    ASKED_MODELS,
    CAPACITY,
    CLASS_BESIDE,
    CLASS_CPU,
    CLASS_GPUS,
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
    Floats,
    Ints,
)
from eelgrid_kernels.compilation import inlined_kernel, kernel_sum, lean_kernel
from eelgrid_kernels.cpu_packages import FEED, PACKAGE_MILLI, PACKAGE_W, WHOLE, active_packages, package_slack

# ruff: noqa: PLR0917 (numba takes arguments by position)


# milli beside others of a class that asks for several GPUs: more than any GPU has.
SEVERAL = 2000
PACKAGES_MOST = 4  # that count
ROUNDED_W = 1.0  # the watts of a GPU are rounded for G and not for power: a bound must hold for both


@kernel_sum
def compute_gain(
    classes: Floats,
    wanted: Floats,
    offers: Floats,
    model: int,
    cpu_free: int,
    unpacked: int,
    idle: int,
    beside: int,
    open_w: float,
) -> float:
    """G, weighted, by one model of a node: `idle` GPUs of it, each open_w when woken, and most `beside` milli in use."""
    free, first, held, share = float(cpu_free), float(unpacked), float(idle), float(beside)
    second, third, fourth = first + PACKAGE_MILLI, first + 2 * PACKAGE_MILLI, first + 3 * PACKAGE_MILLI
    sum_ = 0.0
    for t in range(offers.shape[0]):
        cpu, count = classes[CLASS_CPU, t], classes[CLASS_GPUS, t]
        cost = (PACKAGE_W if cpu > first else 0.0) + (PACKAGE_W if cpu > second else 0.0)
        cost += (PACKAGE_W if cpu > third else 0.0) + (PACKAGE_W if cpu > fourth else 0.0)
        shares = classes[CLASS_BESIDE, t] <= share
        cost += 0.0 if shares else count * open_w
        saved = offers[t] - cost
        saved = max(0.0, saved)
        saved = saved if cpu <= free else 0.0
        saved = saved if shares or count <= held else 0.0
        sum_ += wanted[model, t] * saved
    return sum_


@inlined_kernel
def summarize_model(
    states: Ints,
    shapes: Ints,
    added_w: Floats,
    row: int,
    model: int,
    slot: int,
    taken: int,
    kinds: Ints,
    kind: int,
) -> tuple[int, int, float]:
    """Idle GPUs of a model, the most milli free on one in use, and the least watts to wake one.

    After a task of a kind took its GPUs: `slot`, or, where taken > 1, the first so many that fit; kind -1 for none.
    """
    shape, idle, beside, open_w = states[row, SHAPE], 0, 0, 1e9
    milli = kinds[kind, ASKED_MILLI] if kind >= 0 else 0
    for other in range(added_w.shape[1]):
        there = shapes[shape, MODEL + other]
        if there < 0:
            continue
        free = states[row, GPU + other]
        if kind >= 0:
            several = taken > 0 and free >= milli and kinds[kind, ASKED_MODELS] >> there & 1
            if other == slot or several:
                free -= milli
                taken -= 1 if several else 0
        if there != model:
            continue
        if free == WHOLE:
            idle += 1
            open_w = min(open_w, added_w[shape, other])
        else:
            beside = max(beside, free)
    return idle, beside, float(round(open_w))


@lean_kernel
def _gain_mixed(
    states: Ints,
    shapes: Ints,
    added_w: Floats,
    kinds: Ints,
    classes: Floats,
    wanted: Floats,
    offers: Floats,
    row: int,
    models: int,
    cpu_free: int,
    unpacked: int,
    slot: int,
    several: int,
    kind: int,
) -> float:
    """`gain_after` where GPUs are of several models."""
    best = 0.0
    for model in range(wanted.shape[0] - 1):
        if models >> model & 1:
            idle, beside, open_w = summarize_model(states, shapes, added_w, row, model, slot, several, kinds, kind)
            best = max(best, compute_gain(classes, wanted, offers, model, cpu_free, unpacked, idle, beside, open_w))
    return best


@inlined_kernel
def served_level(levels: Ints, cpu_free: int) -> int:
    """How many of the sizes of CPU in the mix are at most so much."""
    level = levels[1, min(max(0, cpu_free) // 1000, levels.shape[1] - 1)]
    while levels[0, level] <= cpu_free:
        level += 1
    return int(level)


@lean_kernel
def bound_gain_rise(
    relief: Floats, levels: Ints, models: int, awake: int, cpu_left: int, packages: int, gpu_w: float
) -> float:
    """By how much G, weighted, may rise at most where a task wakes packages that it does not fill, and GPUs of gpu_w.

    awake is the CPU that worked without another package before it came, cpu_left what is free after it.
    """
    most, until = 0.0, served_level(levels, cpu_left)
    since = min(until, served_level(levels, awake))
    for model in range(relief.shape[1]):
        if not (models >> model & 1 or (models == 0 and model == relief.shape[1] - 1)):
            continue
        sum_ = packages * (relief[0, model, until] - relief[0, model, since])
        if gpu_w > 0.0:
            sum_ += min((gpu_w + ROUNDED_W) * relief[1, model, until], relief[2, model, until])
        most = max(most, sum_)
    return most


@lean_kernel
def fill_relief(classes: Floats, wanted: Floats, offers: Floats, levels: Ints, relief: Floats) -> None:
    """The sums of `rise` over the classes that each level of CPU serves into relief (3, M + 1, L), in place."""
    relief[:] = 0.0
    for t in range(offers.shape[0]):
        for level in range(relief.shape[2]):
            if level == 0 or levels[0, level - 1] < classes[CLASS_CPU, t]:
                continue
            for model in range(relief.shape[1]):
                relief[0, model, level] += wanted[model, t] * min(PACKAGE_W, offers[t])
                if classes[CLASS_GPUS, t] == 1.0:
                    relief[1, model, level] += wanted[model, t]
                    relief[2, model, level] += wanted[model, t] * offers[t]


@inlined_kernel
def gain_after(
    states: Ints,
    shapes: Ints,
    added_w: Floats,
    kinds: Ints,
    classes: Floats,
    wanted: Floats,
    offers: Floats,
    row: int,
    cpu_free: int,
    slot: int,
    kind: int,
) -> float:
    """G, weighted, of a state after a task of a kind came; kind -1 for the state as it is."""
    shape, model = states[row, SHAPE], 0
    unpacked, models = package_slack(shapes[shape, CAPACITY], cpu_free), shapes[shape, MODELS]
    several = kinds[kind, ASKED_GPUS] if kind >= 0 and kinds[kind, ASKED_GPUS] > 1 else 0
    if models & (models - 1) != 0:
        return _gain_mixed(
            states,
            shapes,
            added_w,
            kinds,
            classes,
            wanted,
            offers,
            row,
            models,
            cpu_free,
            unpacked,
            slot,
            several,
            kind,
        )
    while model < wanted.shape[0] - 1 and models >> model & 1 == 0:  # the last is for nodes without GPU
        model += 1
    idle, beside, open_w = summarize_model(states, shapes, added_w, row, model, slot, several, kinds, kind)
    return compute_gain(classes, wanted, offers, model, cpu_free, unpacked, idle, beside, open_w)


# ruff: noqa: PLR0917 (numba takes arguments by position)


TERMS = ("power", "fragmentation", "stranding", "lookahead", "scarcity")


@inlined_kernel
def _served_milli(
    states: Ints,
    groups: Ints,
    weight: Ints,
    levels: Ints,
    row: int,
    family: int,
    cpu_free: int,
    model: int,
    copies: int,
    was: int,
    now: int,
) -> int:
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


@lean_kernel
def fill_state_terms(
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
    row: int,
) -> None:
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
    states[row, SERVED] = _served_milli(states, groups, weight, levels, row, family, states[row, CPU], 0, 0, 0, 0)
    refresh_gain(states, shapes, added_w, kinds, classes, wanted, offers, row)


@inlined_kernel
def refresh_gain(
    states: Ints, shapes: Ints, added_w: Floats, kinds: Ints, classes: Floats, wanted: Floats, offers: Floats, row: int
) -> None:
    """Fill G of a state by the offers in force."""
    states[row, GAIN] = int(
        gain_after(states, shapes, added_w, kinds, classes, wanted, offers, row, states[row, CPU], -1, -1)
    )


@lean_kernel
def _served_after_several(
    states: Ints,
    shapes: Ints,
    added_w: Floats,
    kinds: Ints,
    groups: Ints,
    weight: Ints,
    levels: Ints,
    kind: int,
    row: int,
) -> int:
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
            served = _served_milli(states, groups, weight, levels, row, family, cpu_left, 0, 0, 0, 0)
    return served


@inlined_kernel
def compute_added_terms(
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
    kind: int,
    row: int,
    slot: int,
    exact: bool,
) -> tuple[float, float, float, float, float]:
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
            served = _served_milli(
                states, groups, weight, levels, row, family, cpu_left, model, count, was, was - milli
            )
        fragments = -asked * facts[WEIGHT] - (served - states[row, SERVED])
    if rates[WEIGHTS, 3] != 0.0:
        if exact:
            lost = states[row, GAIN] - gain_after(
                states, shapes, added_w, kinds, classes, wanted, offers, row, cpu_left, slot, kind
            )
        elif gpu_w + packages > 0.0:
            useful = packages - kinds[kind, ASKED_CPU] // PACKAGE_MILLI
            lost = -bound_gain_rise(
                relief, levels, shapes[shape, MODELS], package_slack(capacity, cpu_free), cpu_left, useful, gpu_w
            )
    return gpu_w + PACKAGE_W * packages, float(fragments), float(stranded), lost, float(scarce)
