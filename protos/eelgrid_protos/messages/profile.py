"""What was measured of workloads in configurations: mirrored by profile.proto."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.quantities import Bytes, Label, Many, Megahertz, Range, RequiredLabel, Watts

__all__ = ["POINTS_A_CALL_MOST", "MeasuredPoint", "QuantileLatency"]

POINTS_A_CALL_MOST = 1000

Whole = Annotated[int, Range(1, 100_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileLatency:
    """One quantile of a measured latency."""

    quantile: Annotated[float, Range(0.0, 1.0)]
    latency_s: Annotated[float, Range(0.0, 1e6, "s")]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    """One workload in one configuration; None where something was not measured."""

    profile: RequiredLabel
    gpu_model: RequiredLabel
    throughput_hz: Annotated[float, Range(0.0, 1e12, "Hz")]
    mig_profile: Label = ""
    gpus: Whole = 1
    batch: Whole = 1
    processes: Whole = 1
    power_limit_w: Watts | None = None
    clock_mhz: Megahertz | None = None
    label: Label = ""
    latencies: Annotated[tuple[QuantileLatency, ...], Many(16)] = ()
    power_w: Watts | None = None
    memory_bytes: Bytes | None = None
    source: Label = ""

    def violations(self) -> Iterator[Violation]:
        """Quantiles rise with their level."""
        if self.throughput_hz <= 0.0:
            yield Violation("throughput_hz", "is 0", "leave out points that did not run")
        ordered = sorted(self.latencies, key=lambda one: one.quantile)
        pairs = list(itertools.pairwise(ordered))
        if any(low.quantile == high.quantile for low, high in pairs):
            yield Violation("latencies", "name one quantile twice", "give each quantile once")
        if any(low.latency_s > high.latency_s for low, high in pairs):
            yield Violation("latencies", "fall with the quantile", "a higher quantile is no lower latency")
