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
look-ahead sees what it sees; a GPU that its node's CPU can no longer feed as 100 W,
and as up to 2,000 W when the fleet is fuller than 70 %; a watt that the next task
would have saved as 1; a GPU of a scarce model as 500 W; a watt that is left awake
and unused as 0.05. docs/explanation/placement.md has the why.
"""

import re
from typing import NamedTuple

import numpy as np

from eelgrid_kernels.arrays import FRAGMENTATION, LOOKAHEAD, EngineArrays, Floats
from eelgrid_kernels.compilation import inlined_kernel, lean_kernel
from eelgrid_kernels.cost_terms import WHOLE, compute_added_terms, compute_shared_terms
from eelgrid_kernels.node_states import random_draw

RANDOM, DOT_PROD, GPU_PACKING, GPU_CLUSTERING, BEST_FIT, MIX, EELGRID = range(7)

IN_ORDER = -1  # slot of a task with no GPU or several, which are taken in index order
CPU_SPAN, GPU_SPAN = 128_000, 8_000  # the widest node of the papers, in milli
# Constants: for a power in a kernel numba compiles a function of its own.
_CPU_SQUARED, _CPU_OVER_GPU_SQUARED = CPU_SPAN**2, (CPU_SPAN // GPU_SPAN) ** 2


@inlined_kernel
def _fits_slot(run: EngineArrays, kind: int, row: int, slot: int) -> bool:
    """Whether a GPU has what a task asks of one."""
    asked, model = run.kinds[kind], run.slot_model[run.states[row].shape_row, slot]
    return bool(model >= 0 and run.gpu_free[row, slot] >= asked.gpu_milli and asked.models >> model & 1)


@inlined_kernel
def _tightest(run: EngineArrays, kind: int, row: int) -> int:
    """The fitting GPU with the least free share; IN_ORDER unless one GPU is asked for."""
    best, least = IN_ORDER, 0
    for slot in range(run.gpu_free.shape[1] if run.kinds[kind].gpu_count == 1 else 0):
        free = run.gpu_free[row, slot]
        if _fits_slot(run, kind, row, slot) and (best < 0 or free < least):
            best, least = slot, free
    return best


@lean_kernel
def _random_slot(run: EngineArrays, kind: int, row: int, moment: int) -> int:
    """Any fitting GPU."""
    best, highest = IN_ORDER, 0
    for slot in range(run.gpu_free.shape[1]):
        if not _fits_slot(run, kind, row, slot):
            continue
        drawn = random_draw(run.scalars[0].seed, -1 - moment, slot)
        if best < 0 or drawn < highest:
            best, highest = slot, drawn
    return best


@inlined_kernel
def _by_effect(run: EngineArrays, kind: int, row: int, exact: bool) -> tuple[float, float, int]:
    """MIX and EELGRID: every GPU that differs is tried."""
    scalars, count = run.scalars[0], run.kinds[kind].gpu_count
    best, power, chosen, shared = np.inf, np.inf, IN_ORDER, compute_shared_terms(run, kind, row)
    shape, tried = run.states[row].shape_row, IN_ORDER  # GPU in use of the bound before
    for option in range(run.states[row].options if count == 1 else 1):
        slot = IN_ORDER
        if count == 1:
            slot = run.distinct_slots[row, option]
            if not _fits_slot(run, kind, row, slot):
                continue
            if not exact and run.gpu_free[row, slot] < WHOLE and scalars.weights[FRAGMENTATION] == 0.0:
                alike = tried >= 0 and run.slot_model[shape, slot] == run.slot_model[shape, tried]
                if alike and run.added_w[shape, slot] == run.added_w[shape, tried]:
                    continue  # what is free on a GPU in use makes no difference to a bound
                tried = slot
        terms = compute_added_terms(run, shared, slot, exact)
        if scalars.policy == EELGRID:
            cost = 0.0
            for term in range(len(terms)):
                cost += scalars.weights[term] * (terms[term] / scalars.scale[term])
        else:
            added_power = -float(int(-terms[0]))
            power = min(power, added_power)
            eased = -terms[1] / scalars.scale[FRAGMENTATION]
            alone = scalars.weights[FRAGMENTATION] == 0.0
            cost = added_power if alone else -float(int(100.0 / (1.0 + np.exp(-eased))))
        if cost < best:
            best, chosen = cost, slot
    return best, power, chosen


@lean_kernel
def _by_fill(run: EngineArrays, kind: int, row: int) -> tuple[float, float, int]:
    """The policies that look at how full a node is."""
    policy, state, asked = run.scalars[0].policy, run.states[row], run.kinds[kind]
    total, count = state.total_free, asked.gpu_count
    slot = _tightest(run, kind, row)
    score = 0  # in whole numbers, so that no rounding decides
    if policy == BEST_FIT:
        left = (state.cpu_free - asked.cpu_milli) + CPU_SPAN // GPU_SPAN * (total - count * asked.gpu_milli)
        score = (100 * (2 * CPU_SPAN - left)) // (2 * CPU_SPAN)
    elif policy == DOT_PROD:
        product = state.cpu_free * asked.cpu_milli + _CPU_OVER_GPU_SQUARED * total * count * asked.gpu_milli
        score = (100 * (2 * _CPU_SQUARED - product)) // (2 * _CPU_SQUARED)
    elif policy == GPU_PACKING and count > 0:
        width = run.shapes[state.shape_row].width
        if total == width * WHOLE:
            score = max(33 - width, width)
        elif count > 1 or run.gpu_free[row, slot] == WHOLE:
            score = max(50 - count, 33)
        else:
            score = max(100 - run.gpu_free[row, slot] // 100, 50)
    elif policy == GPU_CLUSTERING and count > 0:
        tag, tags = 1 << asked.tag, state.tags
        held = 75 if tags == tag else 50 if tags & tag else 25 if tags == 0 else 0
        score = held + 25 * (GPU_SPAN - total) // GPU_SPAN
    return -float(score), 0.0, slot


@inlined_kernel
def task_fits(run: EngineArrays, kind: int, row: int) -> bool:
    """Whether a task fits in a state, by all but memory."""
    state, asked = run.states[row], run.kinds[kind]
    if state.closed != 0 or state.cpu_free < asked.cpu_milli:
        return False
    if asked.gpu_count == 0:
        return True
    if state.most_free < asked.gpu_milli or state.total_free < asked.gpu_count * asked.gpu_milli:
        return False
    if run.shapes[state.shape_row].models & asked.models == 0:
        return False
    fitting = 0
    for slot in range(run.gpu_free.shape[1]):
        fitting += 1 if _fits_slot(run, kind, row, slot) else 0
    return bool(fitting >= asked.gpu_count)


@inlined_kernel
def compute_task_cost(run: EngineArrays, kind: int, row: int, exact: bool) -> tuple[float, float, int]:
    """The cost of a task in a state, what of it is scaled, and the GPU; infinite where it does not fit.

    Where exact is not asked for, a cost with a look-ahead is bounded from below instead, and the GPU means nothing.
    """
    if not task_fits(run, kind, row):
        return np.inf, np.inf, IN_ORDER
    policy = run.scalars[0].policy
    if policy == MIX or policy == EELGRID:  # noqa: PLR1714, SIM109 (a set would be made anew at each call)
        return _by_effect(run, kind, row, exact)
    return _by_fill(run, kind, row)


@inlined_kernel
def is_bounded(run: EngineArrays) -> bool:
    """Whether `compute_task_cost` can be asked for a bound that is cheaper than the cost."""
    return bool(run.scalars[0].policy == EELGRID and run.scalars[0].weights[LOOKAHEAD] != 0.0)


@lean_kernel
def compute_exact_cost(run: EngineArrays, kind: int, row: int) -> tuple[float, float, int]:
    """`compute_task_cost` where it is not hot: code of its own, so that the compiler makes it once."""
    return compute_task_cost(run, kind, row, True)


@lean_kernel
def choose_gpus(run: EngineArrays, kind: int, row: int, moment: int) -> None:
    """The GPUs that a task takes in a state where it fits into run.taken, -1 beyond the last."""
    count, taken = run.kinds[kind].gpu_count, run.taken
    taken[:] = -1
    if count == 1:
        if run.scalars[0].policy == RANDOM:
            taken[0] = _random_slot(run, kind, row, moment)
            return
        taken[0] = compute_exact_cost(run, kind, row)[2]
        return
    found = 0
    for slot in range(run.gpu_free.shape[1] if count > 0 else 0):
        if found < count and _fits_slot(run, kind, row, slot):
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
    "eelgrid": (EELGRID, (1.0, 0.0, 100.0, 1.0, 500.0, 0.05, 2000.0)),
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
