"""What measurements say about the model itself: scatter of windows, and the shape at limits left out.

Owns both measures. Must not know policies.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.powercap.zeus import Sweep
from eelgrid_controller.objectives.power.power_model import PowerCurve

__all__ = ["HeldOut", "Scatter", "held_out", "scatter"]


class Scatter(NamedTuple):
    """How far one sweep is off a monotone curve, root mean square, each point's freedom aside."""

    name: str
    shortest_s: float
    time: float
    power: float


class HeldOut(NamedTuple):
    """Relative errors at measured limits that were left out of a curve."""

    points: int
    time_median: float
    time_p90: float
    power_median: float
    power_p90: float
    line_time_median: float  # of a straight line between the neighbours
    line_time_p90: float


def _monotone(values: Sequence[float]) -> list[float]:
    """The nearest rising sequence, by pooling adjacent violators."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (one, m), (other, n) = blocks[-2:]
            blocks[-2:] = [((one * m + other * n) / (m + n), m + n)]
    return [value for value, count in blocks for _ in range(count)]


def _off(values: Sequence[float]) -> float:
    logs = [math.log(value) for value in values]
    fitted = _monotone(logs)
    free = max(1, len(logs) - len(set(fitted)))
    return math.sqrt(sum((one - other) ** 2 for one, other in zip(logs, fitted, strict=True)) / free)


def scatter(sweeps: Iterable[Sweep]) -> list[Scatter]:
    """One for each sweep; limits fall, so time must rise and power fall."""
    return [
        Scatter(
            sweep.name,
            min(sweep.time_s),
            _off(sweep.time_s),
            _off([sweep.time_s[i] / sweep.energy_j[i] for i in range(len(sweep.time_s))]),
        )
        for sweep in sweeps
    ]


def held_out(curves: Iterable[PowerCurve]) -> HeldOut:
    """Every measured limit between two others left out in turn, and asked of the curve of the rest."""
    times, powers, lines = [], [], []
    for curve in curves:
        for place in range(1, len(curve.points) - 1):
            truth, low, high = (curve.points[place + step] for step in (0, -1, 1))
            rest = PowerCurve(
                curve.workload, curve.gpu_model, curve.gpus, (*curve.points[:place], *curve.points[place + 1 :])
            )
            at = rest.interpolate(truth.limit_w)
            share = (truth.limit_w - low.limit_w) / (high.limit_w - low.limit_w)
            times.append(abs(at.time_s / truth.time_s - 1.0))
            powers.append(abs(at.power_w / truth.power_w - 1.0))
            lines.append(abs((low.time_s + share * (high.time_s - low.time_s)) / truth.time_s - 1.0))
    tenths = [statistics.quantiles(errors, n=10) for errors in (times, powers, lines)]
    return HeldOut(
        len(times),
        statistics.median(times),
        tenths[0][8],
        statistics.median(powers),
        tenths[1][8],
        statistics.median(lines),
        tenths[2][8],
    )
