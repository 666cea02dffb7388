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

Everything is whole: CPU in milli, watts rounded, weights as counted. So sums are
exact in a float, in whatever order a processor's vectors add them up. The loop
over classes has no branches for that reason: some 40 ns for 35 classes.
"""
# ruff: noqa: PLR0917 (numba takes arguments by position)

from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.compiled import inlined, kernel, kernel_sum
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

__all__ = ["PACKAGES_MOST", "SEVERAL", "gain", "gain_after", "view"]

# milli beside others of a class that asks for several GPUs: more than any GPU has.
SEVERAL = 2000
PACKAGES_MOST = 4  # that count


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


@kernel
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
