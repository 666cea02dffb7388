"""What a service is to a queue: servers, batches, times, and how variable they are.

Owns the values that queueing takes and their making from a measured point. Must
not know objectives, replicas to choose or where a measurement came from.

A server here is whatever works on one batch at a time: a process on a slice, a
whole replica, or one sequence slot of an LLM engine. Variability is the squared
coefficient of variation (variance over squared mean): 0 for a metronome, 1 for
Poisson arrivals or exponential times, more for bursts.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from eelgrid_controller.profiles.points import Point
from eelgrid_controller.serving.errors import Unusable

__all__ = ["SERVERS_MOST", "Arrivals", "Station", "station_of"]

SERVERS_MOST = 100_000  # of one station; Erlang's recursion is linear in them
_CV2_MOST = 1e4


class Arrivals(NamedTuple):
    """A stationary stream of requests."""

    rate_hz: float
    cv2: float = 1.0  # of the times between arrivals

    def checked(self) -> "Arrivals":
        """Itself; an error that names the field if it is no stream."""
        if not (math.isfinite(self.rate_hz) and self.rate_hz >= 0.0):
            raise Unusable("rate_hz", f"{self.rate_hz} is no rate", "give requests a second, 0 or more")
        _check_cv2("cv2", self.cv2)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """Servers that are alike, before them one queue, first come first served."""

    servers: int  # processes x replicas, or sequence slots x instances
    service_s: float  # mean time of a full batch
    service_cv2: float = 0.0  # of the time of a batch
    batch: int = 1  # the most requests in a batch; a server takes what waits and never waits for more
    alone_s: float | None = None  # mean time of a batch of one; None for as long as a full one
    quantiles_s: tuple[tuple[float, float], ...] = field(default=())  # measured (quantile, seconds) of a full batch

    def __post_init__(self) -> None:
        if not 1 <= self.servers <= SERVERS_MOST:
            raise Unusable("servers", f"{self.servers} servers", f"give 1 to {SERVERS_MOST}")
        if self.batch < 1:
            raise Unusable("batch", f"a batch of {self.batch}", "give 1 or more")
        if not (math.isfinite(self.service_s) and self.service_s > 0.0):
            raise Unusable("service_s", f"{self.service_s} s", "give the mean time of a full batch, above 0")
        if self.alone_s is not None and not 0.0 < self.alone_s <= self.service_s:
            raise Unusable("alone_s", f"{self.alone_s} s", "a batch of one takes no longer than a full one")
        _check_cv2("service_cv2", self.service_cv2)

    @property
    def capacity_hz(self) -> float:
        """Requests a second with every server on full batches."""
        return self.servers * self.batch / self.service_s

    def batch_s(self, size: float) -> float:
        """Mean time of a batch of `size` requests: straight between one and a full batch."""
        if self.alone_s is None or self.batch == 1:
            return self.service_s
        share = (min(max(size, 1.0), self.batch) - 1.0) / (self.batch - 1.0)
        return self.alone_s + share * (self.service_s - self.alone_s)

    def slowed(self, factor: float) -> "Station":
        """The same with every time `factor` times as long."""
        if factor == 1.0:
            return self
        return Station(
            servers=self.servers,
            service_s=self.service_s * factor,
            service_cv2=self.service_cv2,
            batch=self.batch,
            alone_s=None if self.alone_s is None else self.alone_s * factor,
            quantiles_s=self.quantiles_s,  # their shape counts, not their size
        )

    def times(self, replicas: int) -> "Station":
        """`replicas` of it behind one queue."""
        return Station(
            servers=self.servers * replicas,
            service_s=self.service_s,
            service_cv2=self.service_cv2,
            batch=self.batch,
            alone_s=self.alone_s,
            quantiles_s=self.quantiles_s,
        )


def _check_cv2(name: str, cv2: float) -> None:
    if not 0.0 <= cv2 <= _CV2_MOST:
        raise Unusable(name, f"{cv2}", f"give variance over squared mean, 0 to {_CV2_MOST:g}")


def station_of(point: Point, *, service_cv2: float | None = None) -> Station:
    """One replica of a measured point.

    Each of `processes` servers works on a batch for batch x processes / throughput
    seconds. Its variability is what was measured apart, else what the spread between
    the median and the highest measured quantile says of a lognormal time, else 0.
    """
    running = point.configuration
    if not point.throughput_hz > 0.0:
        raise Unusable("throughput_hz", f"{point.throughput_hz} a second", "a point that serves nothing is no station")
    measured = tuple(sorted(point.latency_s.items()))
    mean_s = running.batch * running.processes / point.throughput_hz
    return Station(
        servers=running.processes,
        service_s=mean_s,
        service_cv2=_spread_cv2(measured) if service_cv2 is None else service_cv2,
        batch=running.batch,
        quantiles_s=measured if len(measured) > 1 else (),
    )


def _spread_cv2(measured: tuple[tuple[float, float], ...]) -> float:
    """Squared variation of a lognormal time through the lowest and the highest of its measured quantiles."""
    from statistics import NormalDist

    if len(measured) < 2 or measured[0][1] <= 0.0:
        return 0.0
    (low, low_s), (high, high_s) = measured[0], measured[-1]
    normal = NormalDist()
    sigma = math.log(high_s / low_s) / (normal.inv_cdf(high) - normal.inv_cdf(low))
    return min(_CV2_MOST, math.expm1(sigma * sigma))
