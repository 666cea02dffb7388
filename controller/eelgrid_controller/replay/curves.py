"""What a course of arrivals came to, as curves over what has arrived.

Owns the curves and their mean. Must not know policies, files or how a run was made.

Theory: x is the GPU share that all tasks so far asked for, over the capacity of
the fleet. A run is a step per task; between steps a curve is straight, at the
same x (tasks without GPU) the last step counts, and past the last task nothing
changes. Curves are averaged over seeds first; then
    saving(x) = (P_reference(x) - P(x)) / P_reference(x)

Source: Lettich et al., CCGrid 2025 (arXiv 2412.17484), for EOPC.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from eelgrid_controller.replay.protocol import INFLATION_PERCENT, Fleet
from eelgrid_kernels.arrays import Floats, Ints
from eelgrid_kernels.packages import CORES_PER_PACKAGE, CPU_PACKAGE_IDLE_W, MILLI_PER_CORE

__all__ = [
    "GRID", "MEAN_FIRST", "MEAN_LAST", "STEPS_PER_UNIT", "Curves", "Steps", "at", "curves", "empty_power_w",
    "mean_curves", "saving", "saving_mean_pct",
]  # fmt: skip

STEPS_PER_UNIT = 200
GRID: Floats = np.arange(STEPS_PER_UNIT * INFLATION_PERCENT // 100 + 1) / STEPS_PER_UNIT  # 0:0.005:1.3


MEAN_FIRST, MEAN_LAST = 0.1, 0.8  # the saving is averaged where nobody refuses much


class Steps(Protocol):
    """What is known after each arrival; shapes (A,)."""

    @property
    def power_w(self) -> Floats:
        """Modelled watts of the whole fleet."""

    @property
    def arrived_milli(self) -> Ints:
        """GPU that the tasks so far asked for."""

    @property
    def allocated_milli(self) -> Ints:
        """GPU of those that were placed."""


class Curves(NamedTuple):
    """One run, or the mean of several, on GRID."""

    power_w: Floats  # (X,)
    allocated: Floats  # (X,) share of the fleet's GPU capacity
    arrived: Floats  # (X,) GRID, as far as tasks came


def empty_power_w(fleet: Fleet) -> float:
    """Watts of the fleet with nothing on it."""
    cores = -(-fleet.cpu_milli // MILLI_PER_CORE)
    packages = -(-cores // CORES_PER_PACKAGE)
    return float(CPU_PACKAGE_IDLE_W * packages.sum() + (fleet.gpu_count * fleet.idle_w).sum())


def curves(steps: Steps, capacity_milli: int, empty_w: float) -> Curves:
    """One run on GRID."""
    arrived = np.concatenate(([0], steps.arrived_milli))
    last = np.concatenate((arrived[1:] != arrived[:-1], [True]))  # of those at the same x
    x = arrived[last] / capacity_milli
    power_w = np.concatenate(([empty_w], steps.power_w))[last]
    allocated = np.concatenate(([0], steps.allocated_milli))[last] / capacity_milli
    return Curves(np.interp(GRID, x, power_w), np.interp(GRID, x, allocated), np.interp(GRID, x, x))


def mean_curves(runs: Sequence[Curves]) -> Curves:
    """The mean over seeds."""
    return Curves(
        np.mean([run.power_w for run in runs], axis=0),
        np.mean([run.allocated for run in runs], axis=0),
        np.mean([run.arrived for run in runs], axis=0),
    )


def at(values: Floats, x: float) -> float:
    """A curve's value at one of the points of GRID."""
    return float(values[round(x * STEPS_PER_UNIT)])


def saving(mine: Curves, reference: Curves) -> Floats:
    """(X,) watts saved as a share of the reference's."""
    return (reference.power_w - mine.power_w) / reference.power_w


def saving_mean_pct(mine: Curves, reference: Curves) -> float:
    """The saving in per cent, over the loads at which nobody refuses much."""
    half = 0.5 / STEPS_PER_UNIT  # both ends count, whatever their rounding
    between = (MEAN_FIRST - half < GRID) & (MEAN_LAST + half > GRID)
    return float((100.0 * saving(mine, reference))[between].mean())
