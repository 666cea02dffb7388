"""Queueing model of a service: stations and arrivals to latency quantiles, and the replicas that keep an objective.

M/M/c waiting (Erlang C) with the Allen-Cunneen and Kraemer-Langenbach-Belz corrections for variability;
where no approximation holds, the queue is simulated. Model errors are added before an objective is checked.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles.points import InvalidServingValue, NoFeasibleConfiguration, Point
from eelgrid_kernels.arrays import Floats
from eelgrid_kernels.simulation import BatchServers, simulate_queue

SERVERS_MOST = 100_000  # of one station; Erlang's recursion is linear in them
_CV2_MOST = 1e4


class ArrivalProcess(NamedTuple):
    """A stationary stream of requests."""

    rate_hz: float
    cv2: float = 1.0  # of the times between arrivals

    def validated(self) -> "ArrivalProcess":
        """Itself; an error that names the field if it is no stream."""
        if not (math.isfinite(self.rate_hz) and self.rate_hz >= 0.0):
            raise InvalidServingValue("rate_hz", f"{self.rate_hz} is no rate", "give requests a second, 0 or more")
        _check_cv2("cv2", self.cv2)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStation:
    """Servers that are alike, before them one queue, first come first served."""

    servers: int  # processes x replicas, or sequence slots x instances
    service_s: float  # mean time of a full batch
    service_cv2: float = 0.0  # of the time of a batch
    batch: int = 1  # the most requests in a batch; a server takes what waits and never waits for more
    alone_s: float | None = None  # mean time of a batch of one; None for as long as a full one
    quantiles_s: tuple[tuple[float, float], ...] = field(default=())  # measured (quantile, seconds) of a full batch

    def __post_init__(self) -> None:
        if not 1 <= self.servers <= SERVERS_MOST:
            raise InvalidServingValue("servers", f"{self.servers} servers", f"give 1 to {SERVERS_MOST}")
        if self.batch < 1:
            raise InvalidServingValue("batch", f"a batch of {self.batch}", "give 1 or more")
        if not (math.isfinite(self.service_s) and self.service_s > 0.0):
            raise InvalidServingValue("service_s", f"{self.service_s} s", "give the mean time of a full batch, above 0")
        if self.alone_s is not None and not 0.0 < self.alone_s <= self.service_s:
            raise InvalidServingValue("alone_s", f"{self.alone_s} s", "a batch of one takes no longer than a full one")
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

    def slowed(self, factor: float) -> "ServiceStation":
        """The same with every time `factor` times as long."""
        if factor == 1.0:
            return self
        # Of the quantiles the shape counts, not the size.
        alone_s = None if self.alone_s is None else self.alone_s * factor
        return replace(self, service_s=self.service_s * factor, alone_s=alone_s)

    def replicated(self, replicas: int) -> "ServiceStation":
        """`replicas` of it behind one queue."""
        return replace(self, servers=self.servers * replicas)


def _check_cv2(name: str, cv2: float) -> None:
    if not 0.0 <= cv2 <= _CV2_MOST:
        raise InvalidServingValue(name, f"{cv2}", f"give variance over squared mean, 0 to {_CV2_MOST:g}")


def station_from_point(point: Point, *, service_cv2: float | None = None) -> ServiceStation:
    """One replica of a measured point.

    Each of `processes` servers works on a batch for batch x processes / throughput
    seconds. Its variability is what was measured apart, else what the spread between
    the median and the highest measured quantile says of a lognormal time, else 0.
    """
    running = point.configuration
    if not point.throughput_hz > 0.0:
        raise InvalidServingValue(
            "throughput_hz", f"{point.throughput_hz} a second", "a point that serves nothing is no station"
        )
    measured = tuple(sorted(point.latency_s.items()))
    mean_s = running.batch * running.processes / point.throughput_hz
    return ServiceStation(
        servers=running.processes,
        service_s=mean_s,
        service_cv2=_spread_cv2(measured) if service_cv2 is None else service_cv2,
        batch=running.batch,
        quantiles_s=measured if len(measured) > 1 else (),
    )


def _spread_cv2(measured: tuple[tuple[float, float], ...]) -> float:
    """Squared variation of a lognormal time through the lowest and the highest of its measured quantiles."""
    if len(measured) < 2 or measured[0][1] <= 0.0:
        return 0.0
    (low, low_s), (high, high_s) = measured[0], measured[-1]
    normal = NormalDist()
    sigma = math.log(high_s / low_s) / (normal.inv_cdf(high) - normal.inv_cdf(low))
    return min(_CV2_MOST, math.expm1(sigma * sigma))


DISTRIBUTION_PARTS = 400
CUSTOMERS, WARMING = 240_000, 16_000  # played; those before are not counted
_SEED = 20231116
_TOGETHER = 1e-9  # of the mean time between arrivals
_STEPS = 60  # of a bisection: 1e-18 of the bracket
_GROWTH_MOST = 200  # doublings until a bracket holds the quantile


class _Errors(NamedTuple):
    exact: float
    simple: float
    batched: float


MODEL_ERROR = _Errors(exact=0.0, simple=0.20, batched=0.12)  # relative


class LatencyEstimate(NamedTuple):
    """A quantity with what its model may miss it by."""

    value_s: float  # infinite where the queue grows without end
    error: float  # relative

    @property
    def upper_s(self) -> float:
        """What an objective is checked against."""
        return self.value_s * (1.0 + self.error)


@lru_cache(maxsize=8192)
def erlang_c(servers: int, load: float) -> float:
    """The share of requests that wait in M/M/c; 1 at and past saturation."""
    if load >= servers:
        return 1.0
    blocked = 1.0  # Erlang B by its recursion, stable for any number of servers
    for server in range(1, servers + 1):
        blocked = load * blocked / (server + load * blocked)
    rho = load / servers
    return blocked / (1.0 - rho + rho * blocked)


class _Wait(NamedTuple):
    """P(W > t) = share x exp(-decay t)."""

    share: float
    decay_hz: float  # infinite where nothing varies


def _delay_ratio(rho: float, arrival_cv2: float, service_cv2: float) -> float:
    """The share that waits in GI/G/1 over that in M/G/1 (Kraemer and Langenbach-Belz)."""
    squared = rho * rho * (4.0 * arrival_cv2 + service_cv2)
    if arrival_cv2 <= 1.0:
        bend = (1.0 + arrival_cv2 + rho * service_cv2) / (1.0 + rho * (service_cv2 - 1.0) + squared)
    else:
        bend = 4.0 * rho / (arrival_cv2 + squared)
    return max(0.0, 1.0 + (arrival_cv2 - 1.0) * (1.0 - rho) * bend)


def _waiting_time(station: ServiceStation, arrivals: ArrivalProcess) -> _Wait | None:
    """The wait before service, request by request; None where the queue has no end."""
    rho = arrivals.rate_hz * station.service_s / station.servers
    if rho >= 1.0:
        return None
    variation = (arrivals.cv2 + station.service_cv2) / 2.0
    share = erlang_c(station.servers, arrivals.rate_hz * station.service_s)
    if variation == 0.0 or arrivals.rate_hz == 0.0:
        return _Wait(0.0, math.inf)
    share = min(1.0, share * _delay_ratio(rho, arrivals.cv2, station.service_cv2))
    return _Wait(share, station.servers * (1.0 - rho) / (station.service_s * variation))


@lru_cache(maxsize=64)
def _shape(cv2: float, quantiles_s: tuple[tuple[float, float], ...]) -> Floats:
    """PARTS equal shares of a time with mean 1: lognormal, or straight through what was measured; shape (PARTS,)."""
    return _times((np.arange(DISTRIBUTION_PARTS) + 0.5) / DISTRIBUTION_PARTS, cv2, quantiles_s)


def _times(shares: Floats, cv2: float, quantiles_s: tuple[tuple[float, float], ...]) -> Floats:
    """The time at each share of a distribution, scaled to the mean 1; same shape."""
    if len(quantiles_s) > 1:
        levels, times = [level for level, _ in quantiles_s], [time_s for _, time_s in quantiles_s]
        # Below the lowest measured quantile a time is constant; above the highest its slope goes on.
        slope = (times[-1] - times[-2]) / (levels[-1] - levels[-2])
        past = times[-1] + slope * (1.0 - levels[-1])
        drawn = np.interp(shares, [0.0, *levels, 1.0], [times[0], *times, past])
    elif cv2 == 0.0:
        drawn = np.ones(len(shares))
    else:
        sigma, normal = math.sqrt(math.log1p(cv2)), NormalDist()
        grid = np.linspace(0.0, 1.0, 4 * DISTRIBUTION_PARTS + 1)[1:-1]
        bent = np.array([normal.inv_cdf(float(share)) for share in grid])
        drawn = np.exp(sigma * np.interp(shares, grid, bent))
    drawn = np.asarray(drawn / drawn.mean(), np.float64)
    drawn.flags.writeable = False
    return drawn


@lru_cache(maxsize=8)
def _drawn(arrival_cv2: float, cv2: float, quantiles_s: tuple[tuple[float, float], ...]) -> tuple[Floats, Floats]:
    """When customers come at one a second, and the time of a batch with mean 1; shapes (WARMING + CUSTOMERS,)."""
    rng = np.random.default_rng(_SEED)
    count = WARMING + CUSTOMERS
    gaps = np.ones(count) if arrival_cv2 == 0.0 else rng.gamma(1.0 / arrival_cv2, arrival_cv2, count)
    works = _times(rng.random(count), cv2, quantiles_s)
    gaps[gaps < _TOGETHER] = 0.0  # else rounding would decide who still catches a batch
    arrived = np.cumsum(gaps / gaps.mean())
    arrived.flags.writeable = False
    return arrived, works


@lru_cache(maxsize=32)
def _simulate_queue(station: ServiceStation, arrivals: ArrivalProcess) -> Floats:
    """Response times in s; shape (CUSTOMERS,)."""
    arrived, works = _drawn(arrivals.cv2, station.service_cv2, station.quantiles_s)
    took = np.empty(len(arrived))
    alone = station.batch_s(1) / station.service_s
    servers = BatchServers(station.servers, station.batch, alone)
    simulate_queue(arrived / arrivals.rate_hz, works * station.service_s, servers, took)
    counted = took[WARMING:]
    counted.flags.writeable = False
    return counted


def _is_exact(station: ServiceStation, arrivals: ArrivalProcess) -> bool:
    return station.batch == 1 and station.service_cv2 == arrivals.cv2 == 1.0 and not station.quantiles_s


def model_error(station: ServiceStation, arrivals: ArrivalProcess) -> float:
    """What the model may miss a quantile by here; relative."""
    if _is_exact(station, arrivals):
        return MODEL_ERROR.exact
    return MODEL_ERROR.simple if station.batch == 1 else MODEL_ERROR.batched


def response_tail(station: ServiceStation, arrivals: ArrivalProcess, time_s: float) -> float:
    """P(wait + service > time_s); 1 at and past saturation."""
    arrivals.validated()
    if time_s < 0.0 or arrivals.rate_hz >= station.capacity_hz:
        return 1.0
    if station.batch > 1 and arrivals.rate_hz > 0.0:
        times = _simulate_queue(station, arrivals)
        return float(np.count_nonzero(times > time_s)) / len(times)
    wait = _waiting_time(station, arrivals)
    if wait is None:
        return 1.0
    if _is_exact(station, arrivals):
        mu_hz, theta_hz, share = 1.0 / station.service_s, wait.decay_hz, wait.share
        own = math.exp(-mu_hz * time_s)
        if math.isclose(theta_hz, mu_hz, rel_tol=1e-9):
            return own * (1.0 + share * mu_hz * time_s)
        if theta_hz == math.inf:
            return own
        both = (theta_hz * own - mu_hz * math.exp(-theta_hz * time_s)) / (theta_hz - mu_hz)
        return (1.0 - share) * own + share * both
    served = station.batch_s(1) if arrivals.rate_hz == 0.0 else station.service_s
    return _after(wait, time_s - served * _shape(station.service_cv2, station.quantiles_s))


def _after(wait: _Wait, left_s: Floats) -> float:
    """P(W > what is left), the mean over equal shares (PARTS,)."""
    waiting = 0.0 if wait.share == 0.0 else wait.share * np.exp(-wait.decay_hz * np.maximum(left_s, 0.0))
    return float(np.where(left_s < 0.0, 1.0, waiting).mean())


def _least(tail: Callable[[float], float], beyond: float, start_s: float) -> float:
    """The least time whose tail is no more than `beyond`."""
    low_s, high_s = 0.0, start_s
    for _ in range(_GROWTH_MOST):
        if tail(high_s) <= beyond:
            break
        low_s, high_s = high_s, 2.0 * high_s
    for _ in range(_STEPS):
        middle_s = (low_s + high_s) / 2.0
        if tail(middle_s) <= beyond:
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


def _check_quantile(quantile: float) -> float:
    if not 0.0 < quantile < 1.0:
        raise InvalidServingValue("quantile", f"{quantile}", "give a share between 0 and 1, 0.95 for p95")
    return 1.0 - quantile


def latency_quantile(station: ServiceStation, arrivals: ArrivalProcess, quantile: float) -> LatencyEstimate:
    """The time that a share `quantile` of requests does not exceed; infinite where the queue has no end."""
    beyond = _check_quantile(quantile)
    arrivals.validated()
    error = model_error(station, arrivals)
    if arrivals.rate_hz >= station.capacity_hz:
        return LatencyEstimate(math.inf, error)
    if station.batch > 1 and arrivals.rate_hz > 0.0:
        times = _simulate_queue(station, arrivals)
        rank = min(len(times) - 1, math.ceil(quantile * len(times)) - 1)
        return LatencyEstimate(float(np.partition(times, rank)[rank]), error)
    return LatencyEstimate(
        _least(lambda time_s: response_tail(station, arrivals, time_s), beyond, station.service_s), error
    )


_RATE_STEPS = 26  # 1e-8 of the capacity


@dataclass(frozen=True, slots=True)
class QuantileObjective:
    """A promise: a share `quantile` of requests, or of tokens, takes no longer than `latency_s`."""

    quantile: float
    latency_s: float

    def __post_init__(self) -> None:
        if not 0.0 < self.quantile < 1.0:
            raise InvalidServingValue("quantile", f"{self.quantile}", "give a share between 0 and 1, 0.95 for p95")
        if not self.latency_s > 0.0:
            raise InvalidServingValue("latency_s", f"{self.latency_s} s", "give the seconds that were promised")


class SlownessFactor(NamedTuple):
    """What a service says of its profile: all times are `value` times as long, give or take `error`, relative."""

    value: float
    error: float


UNCORRECTED = SlownessFactor(1.0, 0.0)


def corrected_latency(
    station: ServiceStation, arrivals: ArrivalProcess, quantile: float, factor: SlownessFactor
) -> LatencyEstimate:
    """The quantile of a service so much slower; the errors add up, as if they always met."""
    estimate = latency_quantile(station.slowed(factor.value), arrivals, quantile)
    return LatencyEstimate(estimate.value_s, estimate.error + factor.error)


def keeps_objective(
    station: ServiceStation,
    arrivals: ArrivalProcess,
    objective: QuantileObjective,
    factor: SlownessFactor = UNCORRECTED,
) -> bool:
    """Whether the objective is kept with the uncertainty added.

    Asked of the tail, which is one evaluation where the quantile takes a bisection.
    """
    allowed_s = objective.latency_s / (1.0 + model_error(station, arrivals) + factor.error)
    return response_tail(station.slowed(factor.value), arrivals, allowed_s) <= 1.0 - objective.quantile


def least_replicas(
    replica: ServiceStation,
    arrivals: ArrivalProcess,
    objective: QuantileObjective,
    *,
    most: int,
    factor: SlownessFactor = UNCORRECTED,
) -> int:
    """The least replicas behind one queue that keep the objective; NoFeasibleConfiguration if `most` do not."""
    most = min(most, SERVERS_MOST // replica.servers)
    enough = 1
    while not keeps_objective(replica.replicated(min(enough, most)), arrivals, objective, factor):
        if enough >= most:
            alone = corrected_latency(replica.replicated(most), ArrivalProcess(0.0), objective.quantile, factor).upper_s
            raise NoFeasibleConfiguration(
                "latency_s",
                f"{most} replicas do not keep {objective.latency_s:g} s at {arrivals.rate_hz:g} requests a second",
                "take a faster configuration: an idle one takes longer than that"
                if alone > objective.latency_s
                else "allow more replicas, or admit fewer requests",
            )
        enough *= 2
    few, enough = enough // 2, min(enough, most)
    while enough - few > 1:
        middle = (few + enough) // 2
        if keeps_objective(replica.replicated(middle), arrivals, objective, factor):
            enough = middle
        else:
            few = middle
    return enough


def largest_rate_hz(
    station: ServiceStation, objective: QuantileObjective, *, cv2: float = 1.0, factor: SlownessFactor = UNCORRECTED
) -> float:
    """The largest rate that keeps the objective, in requests a second; 0 if even an idle station does not."""
    if not keeps_objective(station, ArrivalProcess(0.0, cv2), objective, factor):
        return 0.0
    low_hz, high_hz = 0.0, station.capacity_hz
    for _ in range(_RATE_STEPS):
        middle_hz = (low_hz + high_hz) / 2.0
        if keeps_objective(station, ArrivalProcess(middle_hz, cv2), objective, factor):
            low_hz = middle_hz
        else:
            high_hz = middle_hz
    return low_hz
