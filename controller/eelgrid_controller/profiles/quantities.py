"""The quantities of a profile, by name, and a point as their logarithms.

Owns the names. Must not know how a quantity is predicted.

All are positive and are learned as natural logarithms: an error is then a share, an
interval can never reach zero, and power laws are straight lines.
"""

import math
from collections.abc import Mapping

from eelgrid_controller.profiles.errors import ImpossibleReading
from eelgrid_controller.profiles.points import Point

__all__ = ["MEMORY", "POWER", "THROUGHPUT", "latency", "logs", "quantile_of"]

POWER = "power_w"
THROUGHPUT = "throughput_hz"
MEMORY = "memory_bytes"
_LATENCY = "latency_s@"
_QUANTILES_MOST = 8


def latency(quantile: float) -> str:
    """The name of the latency at a quantile between 0 and 1: latency_s@0.99."""
    if not 0.0 < quantile < 1.0:
        raise ImpossibleReading(
            "latency_s", f"the quantile {quantile} is not between 0 and 1", "write 0.99 for the p99"
        )
    return f"{_LATENCY}{quantile:g}"


def quantile_of(quantity: str) -> float | None:
    """The quantile of a latency's name; None for what is no latency."""
    return float(quantity.removeprefix(_LATENCY)) if quantity.startswith(_LATENCY) else None


def logs(point: Point) -> Mapping[str, float]:
    """What was measured, by quantity, as natural logarithms; nothing for a configuration that did not run.

    A throughput of zero says that the workload does not run in this configuration (it does not
    fit in memory); then no other number of the point means anything. Raises ImpossibleReading.
    """
    named: dict[str, float | None] = {
        THROUGHPUT: point.throughput_hz,
        POWER: point.power_w,
        MEMORY: None if point.memory_bytes is None else float(point.memory_bytes),
    }
    if len(point.latency_s) > _QUANTILES_MOST:
        raise ImpossibleReading(
            "latency_s",
            f"has {len(point.latency_s)} quantiles",
            f"give the {_QUANTILES_MOST} that promises are made at",
        )
    named.update({latency(quantile): value for quantile, value in point.latency_s.items()})
    for name, value in named.items():
        if value is not None and not (math.isfinite(value) and value >= 0.0):
            raise ImpossibleReading(name, f"{value} is no measurement", "leave out what was not measured")
    if not point.throughput_hz:
        return {}
    for name, value in named.items():
        if value == 0.0:
            raise ImpossibleReading(name, "is zero although work was done", "leave out what was not measured")
    return {name: math.log(value) for name, value in named.items() if value is not None}
