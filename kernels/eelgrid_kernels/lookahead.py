"""What the next task would find in a state: the look-ahead over the typical mix.

Owns the gain of a class of task in a state and its sum over the mix. Must not
know how offers come about (eelgrid_kernels.quotes), nor what a placement is.

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
# ruff: noqa: PLR0917 (numba takes arguments by position)

from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.compiled import inlined, kernel_sum, lean
from eelgrid_kernels.packages import PACKAGE_MILLI, PACKAGE_W, WHOLE, slack
from eelgrid_kernels.peer_arrays import (
    ASKED_GPUS,
    ASKED_MILLI,
    ASKED_MODELS,
    CAPACITY,
    CLASS_BESIDE,
    CLASS_CPU,
    CLASS_GPUS,
    GPU,
    MODEL,
    MODELS,
    SHAPE,
)

__all__ = ["PACKAGES_MOST", "ROUNDED_W", "SEVERAL", "gain", "gain_after", "relieve", "rise", "served_level", "view"]

# milli beside others of a class that asks for several GPUs: more than any GPU has.
SEVERAL = 2000
PACKAGES_MOST = 4  # that count
ROUNDED_W = 1.0  # the watts of a GPU are rounded for G and not for power: a bound must hold for both


@kernel_sum
def gain(
    classes: Floats, wanted: Floats, offers: Floats, model: int, cpu_free: int, unpacked: int, idle: int, beside: int,
    open_w: float,
) -> float:  # fmt: skip
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


@inlined
def view(
    states: Ints, shapes: Ints, added_w: Floats, row: int, model: int, slot: int, taken: int, kinds: Ints, kind: int,
) -> tuple[int, int, float]:  # fmt: skip
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


@lean
def _gain_mixed(
    states: Ints, shapes: Ints, added_w: Floats, kinds: Ints, classes: Floats, wanted: Floats, offers: Floats, row: int,
    models: int, cpu_free: int, unpacked: int, slot: int, several: int, kind: int,
) -> float:  # fmt: skip
    """`gain_after` where GPUs are of several models."""
    best = 0.0
    for model in range(wanted.shape[0] - 1):
        if models >> model & 1:
            idle, beside, open_w = view(states, shapes, added_w, row, model, slot, several, kinds, kind)
            best = max(best, gain(classes, wanted, offers, model, cpu_free, unpacked, idle, beside, open_w))
    return best


@inlined
def served_level(levels: Ints, cpu_free: int) -> int:
    """How many of the sizes of CPU in the mix are at most so much."""
    level = levels[1, min(max(0, cpu_free) // 1000, levels.shape[1] - 1)]
    while levels[0, level] <= cpu_free:
        level += 1
    return int(level)


@lean
def rise(relief: Floats, levels: Ints, models: int, awake: int, cpu_left: int, packages: int, gpu_w: float) -> float:
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


@lean
def relieve(classes: Floats, wanted: Floats, offers: Floats, levels: Ints, relief: Floats) -> None:
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


@inlined
def gain_after(
    states: Ints, shapes: Ints, added_w: Floats, kinds: Ints, classes: Floats, wanted: Floats, offers: Floats, row: int,
    cpu_free: int, slot: int, kind: int,
) -> float:  # fmt: skip
    """G, weighted, of a state after a task of a kind came; kind -1 for the state as it is."""
    shape, model = states[row, SHAPE], 0
    unpacked, models = slack(shapes[shape, CAPACITY], cpu_free), shapes[shape, MODELS]
    several = kinds[kind, ASKED_GPUS] if kind >= 0 and kinds[kind, ASKED_GPUS] > 1 else 0
    if models & (models - 1) != 0:
        return _gain_mixed(
            states, shapes, added_w, kinds, classes, wanted, offers, row, models, cpu_free, unpacked, slot, several, kind,
        )  # fmt: skip
    while model < wanted.shape[0] - 1 and models >> model & 1 == 0:  # the last is for nodes without GPU
        model += 1
    idle, beside, open_w = view(states, shapes, added_w, row, model, slot, several, kinds, kind)
    return gain(classes, wanted, offers, model, cpu_free, unpacked, idle, beside, open_w)
