"""What a run is judged by: curves over what has arrived, savings, allocation, gaps to the bounds.

Owns the measures of the published comparison as functions of arrays. Must not
know policies, files or how a run was made.

Theory: the curves are those of eelgrid_controller.replay.run_statistics, averaged over seeds first; then
    GRAR(x)   = mean allocated GPU / mean arrived GPU
A saving is partly work refused, at low loads too where tasks may use few models, so
the saving in watts for each allocated GPU goes with it, and those watts past x = 0.9.

Source: Lettich et al., CCGrid 2025 (arXiv 2412.17484), for EOPC and GRAR;
Weng et al., USENIX ATC'23, for the allocation of what arrived.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eelgrid_controller.replay.run_statistics import (
    GRID,
    MEAN_FIRST,
    MEAN_LAST,
    ArrivalCurves,
    compute_curves,
    empty_power_w,
    mean_curves,
    saving_mean_pct,
    saving_share,
    value_at,
)
from eelgrid_kernels.arrays import Floats

__all__ = [
    "DENSE_X",
    "GRID",
    "SAVING_X",
    "ArrivalCurves",
    "Bounds",
    "Figures",
    "compute_curves",
    "empty_power_w",
    "figures",
    "mean_bounds",
    "mean_curves",
    "saving_per_gpu_pct",
    "saving_share",
    "value_at",
]

SAVING_X = tuple(tenth / 10 for tenth in range(1, 10))
_REFUSED_MOST = 0.001  # of what has arrived
DENSE_X = (0.9, 0.95, 1.0)  # where watts per allocated GPU are given


class Bounds(NamedTuple):
    """What no policy can pass: least watts with all that arrived placed, most GPU allocated at x = 1."""

    x: Floats  # (L,)
    power_w: Floats  # (L,)
    allocated_1: float  # share of capacity


class Figures(NamedTuple):
    """The numbers of one policy on one trace; a gap is None where no bound applies."""

    saving_mean_pct: float
    saving_per_gpu_pct: float  # of watts for each allocated GPU: who refuses work saves nothing by it
    saving_pct: tuple[float, ...]  # at SAVING_X
    grar_1: float
    alloc_100_pct: float
    alloc_130_pct: float
    gpu_w: tuple[float, ...]  # watts per allocated GPU at DENSE_X; infinite where nothing is allocated
    gap_power_pct: float | None
    gap_alloc_pp: float | None


def mean_bounds(runs: Sequence[Bounds]) -> Bounds:
    """The mean over seeds; infinite at a load where no policy can place all of one of them."""
    power_w = np.mean([run.power_w for run in runs], axis=0)
    return Bounds(runs[0].x, power_w, float(np.mean([run.allocated_1 for run in runs])))


def _gap_power_pct(mine: ArrivalCurves, bounds: Bounds) -> float | None:
    """Mean of watts over the bound, in per cent of the bound, over the loads where the bound binds.

    It is of all tasks placed: where a policy refused more than a thousandth of what came, it says nothing of it.
    """
    placed = np.interp(bounds.x, GRID, mine.allocated) >= (1.0 - _REFUSED_MOST) * np.interp(
        bounds.x, GRID, mine.arrived
    )
    inside = (bounds.x >= MEAN_FIRST - 1e-9) & (bounds.x <= MEAN_LAST + 1e-9) & np.isfinite(bounds.power_w)
    inside &= placed
    if not inside.any():
        return None
    power_w = np.interp(bounds.x[inside], GRID, mine.power_w)
    return float(100.0 * np.mean(power_w / bounds.power_w[inside] - 1.0))


def _gpu_w(power_w: float, gpus: float) -> float:
    return power_w / gpus if gpus > 0.0 else math.inf


def saving_per_gpu_pct(mine: ArrivalCurves, reference: ArrivalCurves) -> float:
    """The saving in watts for each allocated GPU, in per cent, over the loads of the mean saving; nan where none is allocated.

    Watts go with the work that is taken: a policy that refuses a part of what arrives draws less for less.
    """
    between = (GRID > MEAN_FIRST - 1e-9) & (GRID < MEAN_LAST + 1e-9)
    held, theirs = mine.allocated[between], reference.allocated[between]
    if not (held.all() and theirs.all()):
        return math.nan
    saved = 1.0 - (mine.power_w[between] / held) / (reference.power_w[between] / theirs)
    return float(100.0 * saved.mean())


def figures(
    mine: ArrivalCurves, reference: ArrivalCurves, gpus: int, bounded: tuple[ArrivalCurves, Bounds] | None = None
) -> Figures:
    """Every number of a policy whose curves are the mean over seeds, on a fleet with that many GPUs.

    What is bounded are the mean curves over the seeds that the bounds are of.
    """
    saved = 100.0 * saving_share(mine, reference)
    allocated_1 = value_at(mine.allocated, 1.0)
    return Figures(
        saving_mean_pct=saving_mean_pct(mine, reference),
        saving_per_gpu_pct=saving_per_gpu_pct(mine, reference),
        saving_pct=tuple(value_at(saved, x) for x in SAVING_X),
        grar_1=allocated_1 / value_at(mine.arrived, 1.0),
        alloc_100_pct=100.0 * allocated_1,
        alloc_130_pct=100.0 * float(mine.allocated[-1]),
        gpu_w=tuple(_gpu_w(value_at(mine.power_w, x), gpus * value_at(mine.allocated, x)) for x in DENSE_X),
        gap_power_pct=None if bounded is None else _gap_power_pct(*bounded),
        gap_alloc_pp=None
        if bounded is None
        else 100.0 * (bounded[1].allocated_1 - value_at(bounded[0].allocated, 1.0)),
    )
