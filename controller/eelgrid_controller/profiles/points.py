"""Measured points: one workload in one configuration.

Owns the two values that every planner of services and jobs shares. Must not know
models that go through points, nor where a file lies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Configuration", "Point"]


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
