"""What other jobs on the same GPU model say about a job that was never measured.

Owns the prior of an unknown curve. Must not know windows or which limit comes next.

Theory: relative to the largest limit, a limit's time and energy are log-normal
over jobs. Jobs that draw the same share of the limit alike bend alike, so each
relative weighs exp(-(ln(p_j / p))^2 / 2 h^2) once the job's own watts p at the
largest limit are known, h = 0.15, and all weigh the same before. The scatter of
a prior is that of its relatives plus FLOOR, which is what two runs of one job
may differ by, and is wider where few relatives count.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from eelgrid_controller.power.curves import Curve

__all__ = ["Prior", "Ratio", "from_relatives"]

_ALIKE = 0.15  # of the logarithm of watts
_FLOOR = 0.02
_FEW = 0.10  # scatter of one relative alone
_RELATIVES_MOST = 256


class Ratio(NamedTuple):
    """A limit against the largest: mean and scatter of the logarithm."""

    mean: float
    scatter: float


class Prior(NamedTuple):
    """For each limit, time and energy of the same work; None where nothing is known."""

    time: tuple[Ratio | None, ...]
    energy: tuple[Ratio | None, ...]


def _pooled(values: Sequence[tuple[float, float]]) -> Ratio | None:
    """From (weight, logarithm) pairs."""
    total = math.fsum(weight for weight, _ in values)
    if total <= 1e-6:
        return None
    mean = math.fsum(weight * value for weight, value in values) / total
    spread = math.fsum(weight * (value - mean) ** 2 for weight, value in values) / total
    count = total * total / math.fsum(weight * weight for weight, _ in values)
    return Ratio(mean, math.sqrt(spread + _FLOOR**2 + _FEW**2 / count))


def from_relatives(relatives: Sequence[Curve], limits_w: Sequence[float], power_w: float | None) -> Prior:
    """The prior at falling limits of one GPU; `power_w` is what a GPU of the job draws at the largest, if known.

    Relatives are curves of other jobs on the same GPU model; at most 256 of them count.
    """
    time: list[Ratio | None] = []
    energy: list[Ratio | None] = []
    for limit_w in limits_w:
        times, energies = [], []
        for curve in relatives[:_RELATIVES_MOST]:
            largest, at = curve.at(limits_w[0]), curve.at(limit_w)
            off = 0.0 if power_w is None else math.log(largest.power_w / curve.gpus / power_w)
            weight = math.exp(-0.5 * (off / _ALIKE) ** 2)
            times.append((weight, math.log(at.time_s / largest.time_s)))
            energies.append((weight, math.log(at.energy_j / largest.energy_j)))
        time.append(_pooled(times))
        energy.append(_pooled(energies))
    return Prior(tuple(time), tuple(energy))
