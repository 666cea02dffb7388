"""What a planner is told of a configuration: intervals, where they come from, and why one is missing.

Owns the values. Must not know how they are made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from eelgrid_controller.profiles.points import Configuration

__all__ = ["Basis", "Estimate", "Prediction", "Ratio"]


class Basis(IntEnum):
    """What an estimate rests on, from the least to the most."""

    PRIOR = 1  # the catalogue and published sweeps
    BORROWED = 2  # other workloads of the family
    INTERPOLATED = 3  # other configurations of the workload, too
    MEASURED = 4  # readings of this configuration since the last drift


class Estimate(NamedTuple):
    """A middle and the 90 % interval of one more reading, in the unit of the quantity."""

    median: float
    lower: float
    upper: float
    basis: Basis


class Ratio(NamedTuple):
    """A quantity in one configuration over that in another, as a logarithm: the middle, and 90 % lie within `half`."""

    mean: float
    half: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a workload does in a configuration; None, or absent, where `missing` says why by quantity."""

    configuration: Configuration
    throughput_hz: Estimate | None
    power_w: Estimate | None
    memory_bytes: Estimate | None
    latency_s: Mapping[float, Estimate]  # by quantile
    fits: bool | None  # False: it did not run where it had no less room; True: it ran; None: not known
    missing: Mapping[str, str] = field(default_factory=dict)
