"""Measured points, predicted estimates, the names of the quantities that a profile holds, and errors about them.

Quantities are positive and are learned as natural logarithms. ProfileError is raised for readings and questions that
cannot stand, ServingError for services that cannot be planned as described; `field` names what is at fault.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from eelgrid_controller.errors import ControllerError


class ProfileError(ControllerError):
    """What is wrong with which field, and the remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {problem}", remedy)


class ImpossibleReading(ProfileError):
    """A value that no measurement gives: not finite, or negative."""


class UnknownSlice(ProfileError):
    """A MIG profile that the GPU model does not have."""


class NothingToLearnFrom(ProfileError):
    """A family with too few measured configurations."""


class UnreadableRecord(ProfileError):
    """A journalled record that this release cannot read."""


class ServingError(ControllerError):
    """A service that cannot be planned as it is described; `field` is what is at fault."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        self._given = (field, problem, remedy)
        super().__init__(f"{field}: {problem}", remedy)

    def __reduce__(self) -> tuple[type["ServingError"], tuple[str, str, str]]:
        """What it is made of, for another process."""
        return type(self), self._given


class InvalidServingValue(ServingError):
    """A value that is none."""


class MetricsUnreadable(ServingError):
    """A page of metrics that breaks the text format; `field` is the line."""


class NoFeasibleConfiguration(ServingError):
    """No configuration keeps the objective, or none fits into the pool."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """How one replica, or one worker, runs."""

    gpu_model: str  # as the catalogue spells it
    mig_profile: str = ""  # "" for whole GPUs
    gpus: int = 1  # of one replica
    batch: int = 1  # samples, or the most sequences at once
    processes: int = 1  # that share the GPU or slice
    power_limit_w: float | None = None  # of each GPU; None for its default
    clock_mhz: int | None = None  # locked; None for free
    label: str = ""  # what else tells two configurations apart, e.g. a parallelism


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured; None where it was not."""

    workload: str
    configuration: Configuration
    throughput_hz: float  # of the whole replica: requests, tokens or steps a second
    latency_s: Mapping[float, float] = field(default_factory=dict)  # by quantile, 0.5 the median
    power_w: float | None = None  # of all its GPUs
    memory_bytes: int | None = None
    source: str = ""


class EstimateBasis(IntEnum):
    """What an estimate rests on, from the least to the most."""

    PRIOR = 1  # the catalogue and published sweeps
    BORROWED = 2  # other workloads of the family
    INTERPOLATED = 3  # other configurations of the workload, too
    MEASURED = 4  # readings of this configuration since the last drift


class ProfileEstimate(NamedTuple):
    """A middle and the 90 % interval of one more reading, in the unit of the quantity."""

    median: float
    lower: float
    upper: float
    basis: EstimateBasis


class LogRatio(NamedTuple):
    """A quantity in one configuration over that in another, as a logarithm: the middle, and 90 % lie within `half`."""

    mean: float
    half: float


@dataclass(frozen=True, slots=True)
class ProfilePrediction:
    """What a workload does in a configuration; None, or absent, where `missing` says why by quantity."""

    configuration: Configuration
    throughput_hz: ProfileEstimate | None
    power_w: ProfileEstimate | None
    memory_bytes: ProfileEstimate | None
    latency_s: Mapping[float, ProfileEstimate]  # by quantile
    fits: bool | None  # False: it did not run where it had no less room; True: it ran; None: not known
    missing: Mapping[str, str] = field(default_factory=dict)


POWER = "power_w"
THROUGHPUT = "throughput_hz"
MEMORY = "memory_bytes"
_LATENCY = "latency_s@"
_QUANTILES_MOST = 8


def latency_quantity(quantile: float) -> str:
    """The name of the latency at a quantile between 0 and 1: latency_s@0.99."""
    if not 0.0 < quantile < 1.0:
        raise ImpossibleReading(
            "latency_s", f"the quantile {quantile} is not between 0 and 1", "write 0.99 for the p99"
        )
    return f"{_LATENCY}{quantile:g}"


def latency_quantile_of(quantity: str) -> float | None:
    """The quantile of a latency's name; None for what is no latency."""
    return float(quantity.removeprefix(_LATENCY)) if quantity.startswith(_LATENCY) else None


def log_quantities(point: Point) -> Mapping[str, float]:
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
    named.update({latency_quantity(quantile): value for quantile, value in point.latency_s.items()})
    for name, value in named.items():
        if value is not None and not (math.isfinite(value) and value >= 0.0):
            raise ImpossibleReading(name, f"{value} is no measurement", "leave out what was not measured")
    if not point.throughput_hz:
        return {}
    for name, value in named.items():
        if value == 0.0:
            raise ImpossibleReading(name, "is zero although work was done", "leave out what was not measured")
    return {name: math.log(value) for name, value in named.items() if value is not None}
