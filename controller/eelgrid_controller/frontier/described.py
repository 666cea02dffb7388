"""What is asked for: services with their rates, and a fleet of GPUs; and what is passed over.

Owns these values and the choice of points that can be used at all. Must not know how
they were written down, nor what is done with them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.profiles.points import Point
from eelgrid_controller.serving.errors import NothingFits, Unusable

__all__ = ["Gpus", "Service", "Usable", "usable"]

_COUNT_MOST = 100_000  # GPUs of one model
_RATE_MOST_HZ = 1e12


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of one model: how many, and what an idle one draws."""

    count: int
    idle_w: float


@dataclass(frozen=True, slots=True)
class Service:
    """What a service is, how much is asked of it, and at which quantile its latency counts."""

    name: str
    workload: str
    rate_hz: float
    quantile: float

    def __post_init__(self) -> None:
        if not 0.0 < self.rate_hz <= _RATE_MOST_HZ:
            raise Unusable(f"rate_hz of {self.name}", f"{self.rate_hz} Hz", "give more than 0: leave out what is idle")
        if not 0.0 < self.quantile < 1.0:
            raise Unusable(f"quantile of {self.name}", f"{self.quantile}", "give a share between 0 and 1, 0.95 for p95")


class Usable(NamedTuple):
    """The points of each service, and how many others were passed over for which reason."""

    points: tuple[tuple[Point, ...], ...]
    passed_over: Mapping[str, int]


def _flaw(point: Point, asked: set[str], fleet: Mapping[str, Gpus]) -> str | None:
    """Why no service can use this point."""
    configuration = point.configuration
    if point.workload not in asked:
        return f"workload {point.workload}: no service asks for it"
    if configuration.gpu_model not in fleet:
        return f"{configuration.gpu_model}: not in the fleet"
    if configuration.mig_profile:
        return "MIG slices: whole GPUs alone are planned here"
    if point.power_w is None:
        return "watts not measured"
    idle_w = fleet[configuration.gpu_model].idle_w * configuration.gpus
    if point.power_w < idle_w:
        raise Unusable(
            "power_w",
            f"{point.workload} on {configuration.gpus} x {configuration.gpu_model} draws {point.power_w:g} W, "
            f"less than {idle_w:g} W idle",
            "correct the point, or give idle_w with the fleet",
        )
    return None


def usable(points: Sequence[Point], services: Sequence[Service], fleet: Mapping[str, Gpus]) -> Usable:
    """The points that each service can run at; raises Unusable, and NothingFits for a service that has none."""
    if not services:
        raise Unusable("services", "none", "name at least one")
    names = [service.name for service in services]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise Unusable("services", f"{repeated[0]} is there twice", "give each its own name")
    for model, gpus in fleet.items():
        if not 0 <= gpus.count <= _COUNT_MOST:
            raise Unusable(f"fleet {model}", f"{gpus.count} GPUs", f"give 0 to {_COUNT_MOST}")
        if gpus.idle_w < 0.0:
            raise Unusable(f"fleet {model}", f"{gpus.idle_w:g} W idle", "give 0 or more")
    flaws = [_flaw(point, {service.workload for service in services}, fleet) for point in points]
    passed = Counter(flaw for flaw in flaws if flaw is not None)
    sound = [point for point, flaw in zip(points, flaws, strict=True) if flaw is None]
    found = []
    for service in services:
        mine = tuple(p for p in sound if p.workload == service.workload)
        timed = tuple(p for p in mine if p.latency_s.get(service.quantile) is not None)
        if not timed:
            raise NothingFits(
                f"service {service.name}",
                f"no point of {service.workload} on a model of the fleet"
                + (f" has its latency at quantile {service.quantile:g}" if mine else " with watts on whole GPUs"),
                "measure one, or correct the workload, the quantile or the fleet",
            )
        if len(mine) > len(timed):
            passed[f"{service.name}: latency at quantile {service.quantile:g} not measured"] = len(mine) - len(timed)
        found.append(timed)
    return Usable(tuple(found), dict(passed))
