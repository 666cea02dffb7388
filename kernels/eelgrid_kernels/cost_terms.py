"""Cost terms of a placement: power, fragmentation, stranding, look-ahead and scarcity.

power          watts, as eelgrid_kernels.node_cost has them
fragmentation  F = sum_t f_t * frag(n, t), the same
stranding      GPUs that the free CPU cannot feed, and places for several GPUs where they are scarce
lookahead      minus G, the watts that the next task would save here (eelgrid_kernels.cost_terms)
scarcity       GPUs taken of models that others will need (eelgrid_kernels.opportunity_prices)
unused         U, the watts of what is awake in the node and left unused

Theory of F: classes that ask for equally many GPUs of the same share and that may
use the same models of a node's family differ only in their CPU. They are one
group, and the weight of those of its classes that the free CPU serves is a table
by level of CPU. With n GPUs usable to a group and u milli free on them,

    F = total weight * free - served,   served = sum_q weight[level, q] * (u_q if n_q >= count_q else 0)

so that a choice costs one pass over some 15 groups instead of up to a hundred
classes. All in whole numbers: exact, whatever the order of summation.

Theory of S: how much CPU a GPU needs is what the tasks need that will use it. If the
free GPU g of a node were given to one class t, with r_t of CPU for each GPU, the free
CPU c would leave max(0, g - c / r_t) of it without any; the mean over the classes that
the node's models serve, each by its share d_t of the demand for GPU, is

    S(n) = sum_t d_t max(0, g - c / r_t)

so that no constant says how much CPU feeds a GPU: nodes with CPU in plenty strand
nothing, and the nearer c comes to what the hungriest classes need, the dearer it is.
The places that a node has for classes with several GPUs count besides, each class by
its own price b_t (eelgrid_kernels.opportunity_prices):

    S(n) - sum_t b_t d_t k_t (floor(x_t) + part (x_t - floor(x_t))^4)
    x_t = min(idle GPUs / k_t, c / cpu_t)                                  over classes with k_t > 1

Where tasks end, a node that misses little for a place will have it if nothing else comes: the fourth power lets few
nodes carry the small tasks, and the others run empty.

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

    U(n) = 105 W * (free CPU that wakes no package) / 32 vCPU + sum of free_g * (busy_g - idle_g) over GPUs in use

A placement is charged a part of U of the node as it leaves it. It is no potential, and nothing is paid back to a node
that had more before: of nodes that cost nearly the same, the one that is filled best takes the task, and the others
stay for tasks that fit them. G cannot say so, since it looks at one task.

Everything is whole: CPU in milli, watts rounded, weights as counted. So sums are
exact in a float, in whatever order a processor's vectors add them up. The loop
over classes has no branches for that reason: some 40 ns for 35 classes.

CPU packages: a core is two vCPU, a package 16 cores; a package with any working
core draws 120 W, else 15 W. Source: Lettich et al., CCGrid 2025 (arXiv 2412.17484),
section on the power model.
"""

from typing import Any, NamedTuple

import numpy as np

from eelgrid_kernels.arrays import FRAGMENTATION, LOOKAHEAD, ClassArrays, EngineArrays, FeedArrays, GroupArrays
from eelgrid_kernels.compilation import inlined_kernel, kernel_sum, lean_kernel

WHOLE = 1000  # milli-GPU
MILLI_PER_CORE, CORES_PER_PACKAGE = 2000, 16
CPU_PACKAGE_IDLE_W, CPU_PACKAGE_FULL_W = 15.0, 120.0
PACKAGE_W = CPU_PACKAGE_FULL_W - CPU_PACKAGE_IDLE_W  # that waking one adds
PACKAGE_MILLI = MILLI_PER_CORE * CORES_PER_PACKAGE
FEED_SHARE = 10_000  # all demand for GPU, which the classes have shares of
BLOCK_PARTS = 16  # of a place for several GPUs
FEED_MILLI = 1000  # what a milli-CPU feeds is in thousandths
STRANDED_UNIT = float(FEED_SHARE * FEED_MILLI * WHOLE)  # of the term, in a GPU


@inlined_kernel
def active_packages(cpu_capacity: int, cpu_free: int) -> int:
    """CPU packages with at least one working core; milli-CPU in."""
    cores = (cpu_capacity + MILLI_PER_CORE - 1) // MILLI_PER_CORE
    working = cores - cpu_free // MILLI_PER_CORE
    return (working + CORES_PER_PACKAGE - 1) // CORES_PER_PACKAGE


@inlined_kernel
def package_slack(cpu_capacity: int, cpu_free: int) -> int:
    """Free milli-CPU that can be taken before another package wakes."""
    cores = (cpu_capacity + MILLI_PER_CORE - 1) // MILLI_PER_CORE
    asleep = max(0, cores - CORES_PER_PACKAGE * active_packages(cpu_capacity, cpu_free))
    return cpu_free - MILLI_PER_CORE * asleep


TERMS = ("power", "fragmentation", "stranding", "lookahead", "scarcity", "unused")
# milli beside others of a class that asks for several GPUs: more than any GPU has.
SEVERAL = 2000
PACKAGES_MOST = 4  # that count
MILLIWATTS = 1000  # in a watt
# The weight of U by that of the look-ahead: too little to outweigh a GPU or a package. From half to twice of it, watts
# on openb are the same.
UNUSED_SHARE = 1.0 / 20.0
PACKAGE_MW = int(PACKAGE_W)  # of a milli-CPU, times PACKAGE_CPUS
PACKAGE_CPUS = PACKAGE_MILLI // 1000  # vCPU of a package, a power of two
ROUNDED_W = 1.0  # the watts of a GPU are rounded for G and not for power: a bound must hold for both
# A state as it is. Typed, since numba compiles another version of a function for every literal that it is handed.
NO_KIND: Any = np.int64(-1)
NO_SLOT: Any = np.int64(-1)


class ModelGpus(NamedTuple):
    """The GPUs of one model in a node."""

    idle: int
    beside_milli: int  # the most that is free on one in use
    open_w: float  # the least that waking one adds, rounded


class SharedTerms(NamedTuple):
    """What a task of a kind adds in a state whichever GPUs it takes."""

    kind: int
    row: int  # of states
    packages: int  # that wake
    stranded: int  # GPU that the free CPU does not feed, without places for several GPUs
    unused_mw: int  # U after it, by the GPUs as they are


class FreeShareChange(NamedTuple):
    """So many GPUs of a model go from one free amount to another, in milli."""

    model: int
    copies: int
    was: int
    becomes: int


NO_CHANGE = FreeShareChange(0, 0, 0, 0)


@kernel_sum
def compute_gain(classes: ClassArrays, model: int, cpu_free: int, unpacked: int, gpus: ModelGpus) -> float:
    """G, weighted, by one model of a node with so much free CPU, `unpacked` of it in packages that are awake."""
    free, first, held, share = float(cpu_free), float(unpacked), float(gpus.idle), float(gpus.beside_milli)
    second, third, fourth = first + PACKAGE_MILLI, first + 2 * PACKAGE_MILLI, first + 3 * PACKAGE_MILLI
    sum_ = 0.0
    for t in range(classes.offers.shape[0]):
        cpu, count = classes.cpu_milli[t], classes.gpus[t]
        cost = (PACKAGE_W if cpu > first else 0.0) + (PACKAGE_W if cpu > second else 0.0)
        cost += (PACKAGE_W if cpu > third else 0.0) + (PACKAGE_W if cpu > fourth else 0.0)
        shares = classes.beside_milli[t] <= share
        cost += 0.0 if shares else count * gpus.open_w
        saved = classes.offers[t] - cost
        saved = max(0.0, saved)
        saved = saved if cpu <= free else 0.0
        saved = saved if shares or count <= held else 0.0
        sum_ += classes.wanted[model, t] * saved
    return sum_


@inlined_kernel
def summarize_model(run: EngineArrays, row: int, model: int, slot: int, kind: int) -> ModelGpus:
    """The GPUs of a model in a state, after a task of a kind took its own.

    Those are `slot`, or, where it asks for several, the first so many that fit; none for NO_KIND.
    """
    shape, idle, beside, open_w = run.states[row].shape_row, 0, 0, 1e9
    milli = run.kinds[kind].gpu_milli if kind >= 0 else 0
    taken = run.kinds[kind].gpu_count if kind >= 0 and run.kinds[kind].gpu_count > 1 else 0
    for other in range(run.added_w.shape[1]):
        there = run.slot_model[shape, other]
        if there < 0:
            continue
        free = run.gpu_free[row, other]
        if kind >= 0:
            several = taken > 0 and free >= milli and run.kinds[kind].models >> there & 1
            if other == slot or several:
                free -= milli
                taken -= 1 if several else 0
        if there != model:
            continue
        if free == WHOLE:
            idle += 1
            open_w = min(open_w, run.added_w[shape, other])
        else:
            beside = max(beside, free)
    return ModelGpus(idle, beside, float(round(open_w)))


@lean_kernel
def _gain_mixed(run: EngineArrays, row: int, cpu_free: int, slot: int, kind: int) -> float:
    """`gain_after` where GPUs are of several models."""
    shape, best = run.shapes[run.states[row].shape_row], 0.0
    unpacked = package_slack(shape.cpu_capacity, cpu_free)
    for model in range(run.classes.wanted.shape[0] - 1):
        if shape.models >> model & 1:
            gpus = summarize_model(run, row, model, slot, kind)
            best = max(best, compute_gain(run.classes, model, cpu_free, unpacked, gpus))
    return best


@inlined_kernel
def sum_stranded(feed: FeedArrays, family: int, gpu_free: int, cpu_free: int) -> int:
    """S of a node of a family with so much free milli-GPU and milli-CPU, in the unit of the term."""
    sum_ = 0
    for t in range(feed.gpu.shape[1]):
        short = FEED_MILLI * feed.gpu[family, t] * gpu_free - feed.cpu[family, t] * cpu_free
        if short <= 0:  # those beyond need less CPU
            break
        sum_ += short
    return sum_


@lean_kernel
def price_blocks(run: EngineArrays, family: int, idle: int, cpu_free: int) -> int:
    """What the places of a node of a family for classes with several GPUs count in S, with one that is almost there."""
    feed, sum_ = run.feed, 0
    for t in range(feed.block_gpus.shape[1]):
        gpus, cpu, price = feed.block_gpus[family, t], feed.block_cpu[family, t], feed.block_price[family, t]
        if gpus == 0:
            break
        parts = idle * BLOCK_PARTS // gpus
        if cpu > 0:
            parts = min(parts, cpu_free * BLOCK_PARTS // cpu)
        places, rest = parts // BLOCK_PARTS, parts % BLOCK_PARTS
        almost = run.scalars[0].part_permille * rest * rest * rest * rest // BLOCK_PARTS**4
        sum_ += price * places + price * almost // 1000
    return int(sum_)


@inlined_kernel
def _taken_blocks(run: EngineArrays, row: int, cpu_left: int, opened: int) -> int:
    """What a task adds to S by the places for several GPUs that it takes, leaving so much CPU and opening so many GPUs."""
    state = run.states[row]
    if run.scalars[0].priced_blocks == 0 or state.idle == 0:
        return 0
    family = run.shapes[state.shape_row].family
    before = price_blocks(run, family, state.idle, state.cpu_free)
    after = price_blocks(run, family, state.idle - opened, cpu_left)
    return int(FEED_MILLI * (before - after))


@inlined_kernel
def served_level(groups: GroupArrays, cpu_free: int) -> int:
    """How many of the sizes of CPU in the mix are at most so much."""
    level = groups.quick_level[min(max(0, cpu_free) // 1000, groups.quick_level.shape[0] - 1)]
    while groups.cpu_sizes[level] <= cpu_free:
        level += 1
    return int(level)


@inlined_kernel
def bound_gain_rise(run: EngineArrays, row: int, cpu_left: int, packages: int, gpu_w: float) -> float:
    """By how much G, weighted, may rise at most where a task wakes packages that it does not fill, and GPUs of gpu_w.

    cpu_left is what is free after it.
    """
    state = run.states[row]
    shape = run.shapes[state.shape_row]
    most, until = 0.0, served_level(run.groups, cpu_left)
    since = min(until, served_level(run.groups, package_slack(shape.cpu_capacity, state.cpu_free)))
    for model in range(run.relief.shape[0]):
        if not (shape.models >> model & 1 or (shape.models == 0 and model == run.relief.shape[0] - 1)):
            continue
        relief = run.relief[model, until]
        sum_ = packages * (relief.package_w - run.relief[model, since].package_w)
        if gpu_w > 0.0:
            sum_ += min((gpu_w + ROUNDED_W) * relief.sharing, relief.sharing_w)
        most = max(most, sum_)
    return most


@lean_kernel
def fill_relief(run: EngineArrays) -> None:
    """The sums of `bound_gain_rise` over the classes that each level of CPU serves, in place."""
    classes = run.classes
    for model in range(run.relief.shape[0]):
        for level in range(run.relief.shape[1]):
            relief = run.relief[model, level]
            relief.package_w = relief.sharing = relief.sharing_w = 0.0
            for t in range(classes.offers.shape[0]):
                if level == 0 or run.groups.cpu_sizes[level - 1] < classes.cpu_milli[t]:
                    continue
                relief.package_w += classes.wanted[model, t] * min(PACKAGE_W, classes.offers[t])
                if classes.gpus[t] == 1.0:
                    relief.sharing += classes.wanted[model, t]
                    relief.sharing_w += classes.wanted[model, t] * classes.offers[t]


@inlined_kernel
def gain_after(run: EngineArrays, row: int, cpu_free: int, slot: int, kind: int) -> float:
    """G, weighted, of a state after a task of a kind came; NO_KIND for the state as it is."""
    shape, model = run.shapes[run.states[row].shape_row], 0
    if shape.models & (shape.models - 1) != 0:
        return _gain_mixed(run, row, cpu_free, slot, kind)
    # The last model is for nodes without GPU.
    while model < run.classes.wanted.shape[0] - 1 and shape.models >> model & 1 == 0:
        model += 1
    gpus = summarize_model(run, row, model, slot, kind)
    return compute_gain(run.classes, model, cpu_free, package_slack(shape.cpu_capacity, cpu_free), gpus)


@inlined_kernel
def _served_milli(run: EngineArrays, row: int, cpu_free: int, change: FreeShareChange) -> int:
    """Weighted milli-GPU that the mix can use with so much free CPU after a change of GPUs."""
    groups, family = run.groups, run.shapes[run.states[row].shape_row].family
    level = served_level(groups, cpu_free)
    sum_ = 0
    for q in range(groups.group_count[family]):
        allowed, milli = groups.allows[family, change.model, q], groups.gpu_milli[family, q]
        before = allowed if change.was >= milli else 0
        after = allowed if change.becomes >= milli else 0
        usable = run.usable[row, q].gpus + change.copies * (after - before)
        free = run.usable[row, q].milli + change.copies * (after * change.becomes - before * change.was)
        sum_ += groups.weight[family, level, q] * (free if usable >= groups.gpu_count[family, q] else 0)
    return sum_


@inlined_kernel
def _is_like_another(run: EngineArrays, row: int, slot: int, options: int) -> bool:
    """Whether one of the slots listed so far differs in nothing."""
    shape, alike = run.states[row].shape_row, False
    for lower in range(options):
        other = run.distinct_slots[row, lower]
        alike |= (
            run.gpu_free[row, other] == run.gpu_free[row, slot]
            and run.slot_model[shape, other] == run.slot_model[shape, slot]
            and run.added_w[shape, other] == run.added_w[shape, slot]
        )
    return alike


@lean_kernel
def fill_state_terms(run: EngineArrays, row: int) -> None:
    """Fill what a new state's free CPU and GPUs imply, in place."""
    state, groups = run.states[row], run.groups
    family = run.shapes[state.shape_row].family
    for q in range(run.usable.shape[1]):
        run.usable[row, q].gpus = run.usable[row, q].milli = 0
    total = options = most = idle = unused_mw = 0
    for slot in range(run.added_w.shape[1]):
        model, free = run.slot_model[state.shape_row, slot], run.gpu_free[row, slot]
        if model < 0:
            continue
        total += free
        idle += 1 if free == WHOLE else 0
        unused_mw += 0 if free == WHOLE else free * int(run.added_w[state.shape_row, slot])
        most = max(most, free)
        if not _is_like_another(run, row, slot, options):
            run.distinct_slots[row, options] = slot
            options += 1
        for q in range(groups.group_count[family] if free > 0 else 0):
            if groups.allows[family, model, q] != 0 and free >= groups.gpu_milli[family, q]:
                run.usable[row, q].gpus += 1
                run.usable[row, q].milli += free
    state.options, state.total_free, state.most_free = options, total, most
    state.idle, state.unused_mw = idle, unused_mw
    state.stranded = sum_stranded(run.feed, family, total, state.cpu_free)
    state.served = _served_milli(run, row, state.cpu_free, NO_CHANGE)
    refresh_gain(run, row)


@inlined_kernel
def refresh_gain(run: EngineArrays, row: int) -> None:
    """Fill G of a state by the offers in force."""
    run.states[row].gain = int(gain_after(run, row, run.states[row].cpu_free, NO_SLOT, NO_KIND))


@lean_kernel
def _served_after_several(run: EngineArrays, kind: int, row: int) -> int:
    """`_served` after a task took several GPUs of several models; their change is undone before it returns."""
    state, asked, groups = run.states[row], run.kinds[kind], run.groups
    family, milli, served = run.shapes[state.shape_row].family, asked.gpu_milli, 0
    for sign in (1, -1):
        taken = 0
        for slot in range(run.added_w.shape[1]):
            model, free = run.slot_model[state.shape_row, slot], run.gpu_free[row, slot]
            if taken == asked.gpu_count or model < 0 or free < milli:
                continue
            if not asked.models >> model & 1:
                continue
            taken += 1
            for q in range(groups.group_count[family]):
                allowed, needs = groups.allows[family, model, q], groups.gpu_milli[family, q]
                before = allowed if free >= needs else 0
                after = allowed if free - milli >= needs else 0
                run.usable[row, q].gpus += sign * (after - before)
                run.usable[row, q].milli += sign * (after * (free - milli) - before * free)
        if sign > 0:
            served = _served_milli(run, row, state.cpu_free - asked.cpu_milli, NO_CHANGE)
    return served


@inlined_kernel
def compute_shared_terms(run: EngineArrays, kind: int, row: int) -> SharedTerms:
    """What a task adds in a state where it fits, whichever GPUs it takes."""
    state, asked = run.states[row], run.kinds[kind]
    shape, cpu_left = run.shapes[state.shape_row], state.cpu_free - asked.cpu_milli
    gpu_left = state.total_free - asked.gpu_count * asked.gpu_milli
    packages = active_packages(shape.cpu_capacity, cpu_left) - active_packages(shape.cpu_capacity, state.cpu_free)
    stranded = sum_stranded(run.feed, shape.family, gpu_left, cpu_left) - state.stranded
    cpu_mw = PACKAGE_MW * package_slack(shape.cpu_capacity, cpu_left) // PACKAGE_CPUS
    return SharedTerms(kind, row, packages, stranded, state.unused_mw + cpu_mw)


@inlined_kernel
def compute_added_terms(
    run: EngineArrays, shared: SharedTerms, slot: int, exact: bool
) -> tuple[float, float, float, float, float, float]:
    """What a task adds to each term (J,), unscaled; slot is its GPU if it asks for one.

    Several GPUs are the first that fit. Terms that take a look at the mix are 0 where they weigh nothing. Where
    exact is not asked for, the look-ahead is the least that it can be by the watts added. The last term is U itself.
    """
    kind, row, scalars = shared.kind, shared.row, run.scalars[0]
    state, asked = run.states[row], run.kinds[kind]
    shape, shape_row = run.shapes[state.shape_row], state.shape_row
    count, milli, cpu_left = asked.gpu_count, asked.gpu_milli, state.cpu_free - asked.cpu_milli
    gpu_w, model, was, several, scarce, opened, unused_mw = 0.0, 0, 0, False, 0, 0, shared.unused_mw
    if count == 1:
        model, was = run.slot_model[shape_row, slot], run.gpu_free[row, slot]
        gpu_w = run.added_w[shape_row, slot] if was == WHOLE else 0.0
        opened = 1 if was == WHOLE else 0
        unused_mw += (opened * WHOLE - milli) * int(run.added_w[shape_row, slot])
        scarce = milli * (scalars.scarce_models >> model & 1)
    elif count > 1:
        several = shape.models & (shape.models - 1) != 0 or milli < WHOLE
        taken = 0
        for other in range(run.added_w.shape[1]):
            model = max(0, run.slot_model[shape_row, other])
            fits = run.slot_model[shape_row, other] >= 0 and run.gpu_free[row, other] >= milli
            if fits and asked.models >> model & 1:
                is_idle = 1 if run.gpu_free[row, other] == WHOLE else 0
                gpu_w += is_idle * run.added_w[shape_row, other]
                opened += is_idle
                unused_mw += (is_idle * WHOLE - milli) * int(run.added_w[shape_row, other])
                scarce += milli * (scalars.scarce_models >> model & 1)
                taken += 1
                if taken == count:
                    break
        was = WHOLE
    fragments, lost = 0, 0.0
    stranded = shared.stranded + _taken_blocks(run, row, cpu_left, opened)
    if scalars.weights[FRAGMENTATION] != 0.0:
        if several:
            served = _served_after_several(run, kind, row)
        else:
            served = _served_milli(run, row, cpu_left, FreeShareChange(model, count, was, was - milli))
        fragments = -count * milli * scalars.mix_weight - (served - state.served)
    if scalars.weights[LOOKAHEAD] != 0.0:
        if exact:
            lost = state.gain - gain_after(run, row, cpu_left, slot, kind)
        elif gpu_w + shared.packages > 0.0:
            useful = shared.packages - asked.cpu_milli // PACKAGE_MILLI
            lost = -bound_gain_rise(run, row, cpu_left, useful, gpu_w)
    added_w = gpu_w + PACKAGE_W * shared.packages
    return added_w, float(fragments), float(stranded), lost, float(scarce), float(unused_mw)
