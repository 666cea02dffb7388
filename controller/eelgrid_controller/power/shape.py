"""The shape that physics gives a job's power and time over the power limit.

Owns the law and its fit. Must not know which limits were measured for what.

Theory. Without a limit the job draws p watts a GPU. A limit l far above p does
nothing, one far below is what the board draws, and between them the job's own
ups and downs round the corner:

    P(l) = l p / (l^m + p^m)^(1/m)                <= min(l, p), rising in l

Less power is a lower clock. The part of the time that the clock governs grows
with the power that is missing, the rest (memory, network, input) does not:

    t(l) = t_floor (1 + a ((p / P(l))^b - 1))     falling in l, with a floor and a knee

p and m are fitted to power, t_floor, a and b to time, by least squares of
relative errors over a fixed grid of p, m and b (for a given b the law is linear
in t_floor and t_floor a). m and b of the grid cover what Zeus's tables of four
GPU models show; with fewer points than parameters the usual values stand.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Shape", "fit"]

Floats = npt.NDArray[np.float64]

# The middle of what fits the 24 baseline curves of Zeus (NSDI'23): `python -m bench.powercap` prints the spread.
USUAL_ROUNDNESS, USUAL_STEEPNESS, USUAL_CLOCKED = 4.0, 3.0, 0.05
_ROUNDNESS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 24.0)
_STEEPNESS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FREE_STEPS = 60


class Shape(NamedTuple):
    """One job's law on one GPU model."""

    free_w: float  # p: watts of a GPU without a limit
    roundness: float  # m
    floor_s: float  # t_floor: seconds a unit of work without a limit
    clocked: float  # a: the part of the time that grows
    steepness: float  # b

    def power_w(self, limit_w: float) -> float:
        """Watts of a GPU at a limit."""
        ratio = limit_w / self.free_w
        return self.free_w * ratio * float((1.0 + ratio**self.roundness) ** (-1.0 / self.roundness))

    def time_s(self, limit_w: float) -> float:
        """Seconds a unit of work at a limit."""
        lack = self.free_w / self.power_w(limit_w)
        return self.floor_s * (1.0 + self.clocked * float(lack**self.steepness - 1.0))


def _power(limits_w: Floats, power_w: Floats) -> tuple[float, float]:
    """The unlimited watts and the roundness with the least relative error."""
    roundness = _ROUNDNESS if len(limits_w) > 2 else (USUAL_ROUNDNESS,)
    # A GPU held at its limit may want any more; one that is not held tells what it wants.
    free = np.linspace(power_w.max(), 1.6 * max(float(limits_w.max()), float(power_w.max())), _FREE_STEPS)
    m = np.array(roundness)[None, :, None]
    ratio = limits_w / free[:, None, None]
    seen = limits_w / (1.0 + ratio**m) ** (1.0 / m)  # (free, roundness, K)
    error = ((seen / power_w - 1.0) ** 2).sum(axis=2)
    p, index = np.unravel_index(int(error.argmin()), error.shape)
    return float(free[p]), roundness[int(index)]


def _linear(lack: Floats, time_s: Floats) -> tuple[float, float, float]:
    """Error, floor and growth of t = floor + growth * lack, both at least 0, by relative errors."""
    weight = 1.0 / time_s
    columns = np.stack([weight, lack * weight], axis=1)
    (floor, growth), *_ = np.linalg.lstsq(columns, np.ones(len(lack)), rcond=None)
    if growth < 0.0 or floor <= 0.0:
        floor, growth = (float(weight.sum() / (weight**2).sum()), 0.0)
    error = float(((columns @ np.array([floor, growth]) - 1.0) ** 2).sum())
    return error, float(floor), float(growth)


def fit(limits_w: Floats, power_w: Floats, time_s: Floats) -> Shape:
    """The law nearest to measured points; shapes (K,), K at least 1, all positive, watts of one GPU."""
    free_w, roundness = _power(limits_w, power_w)
    bare = Shape(free_w, roundness, 1.0, 0.0, 1.0)
    lack = free_w / np.array([bare.power_w(float(one)) for one in limits_w])
    if len(limits_w) < 3 or float(lack.max()) < 1.02:  # nothing to tell how time grows
        grown = 1.0 + USUAL_CLOCKED * (lack**USUAL_STEEPNESS - 1.0)
        return Shape(free_w, roundness, float(np.mean(time_s / grown)), USUAL_CLOCKED, USUAL_STEEPNESS)
    tried = [(*_linear(lack**b - 1.0, time_s), b) for b in _STEEPNESS]
    _, floor, growth, steepness = min(tried)
    return Shape(free_w, roundness, floor, growth / floor, steepness)
