"""From a station and a stream of requests to the time a request takes, at a quantile.

Owns the approximations and their errors. Must not know objectives, replicas to
choose, engines or tokens.

Theory. c servers, mean time s, offered load a = rate s, rho = a / c:
    C(c, a)   Erlang: the share of requests that wait in M/M/c
    V         (cv2 of arrivals + cv2 of service) / 2
    K(rho)    Kraemer and Langenbach-Belz: the share that waits in GI/G/1, rho for Poisson arrivals
    P(W > t)  = min(1, C K(rho) / rho) exp(-theta t),  theta = c (1 - rho) / (s V)
With Poisson arrivals the mean wait is that of Allen and Cunneen, C s V / (c (1 - rho)),
and for one server that of Kingman. M/M/c is exact, and its response time has a closed
form. Otherwise the response is W + S with S lognormal by its mean and variation,
or through the measured quantiles; the sum is taken over PARTS equal shares of S.

No closed form that was tried comes within a third for batches that form while others
run, so these are played: CUSTOMERS with drawn times that are the same for every load
(a fixed seed), through `eelgrid_kernels.played`.

ERROR is what the model may miss the simulated p50 to p99 by: 95 of 100 points of
the grid of `python -m bench.llm.queues` lie within it.

Sources: Allen, Probability, Statistics and Queueing Theory, 2nd ed., 5.3 (mean wait);
Kingman 1961; Kraemer and Langenbach-Belz, ITC 8, 1976 (who waits); Whitt,
Approximations for the GI/G/m queue, POM 1993 (the tail); Inoue, Performance
Evaluation 2021, arXiv 1912.06322 (batches that form while one runs).
"""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from eelgrid_controller.serving.errors import Unusable
from eelgrid_controller.serving.stations import Arrivals, Station
from eelgrid_kernels.arrays import Floats
from eelgrid_kernels.played import play

__all__ = ["ERROR", "Estimate", "erlang_c", "error_of", "latency", "mean_wait_s", "response_tail", "wait_and"]

PARTS = 400
CUSTOMERS, WARMING = 240_000, 16_000  # played; those before are not counted
_SEED = 20231116
_TOGETHER = 1e-9  # of the mean time between arrivals
_STEPS = 60  # of a bisection: 1e-18 of the bracket
_GROWTH_MOST = 200  # doublings until a bracket holds the quantile


class _Errors(NamedTuple):
    exact: float
    simple: float
    batched: float


ERROR = _Errors(exact=0.0, simple=0.20, batched=0.12)  # relative


class Estimate(NamedTuple):
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


def _delayed(rho: float, arrival_cv2: float, service_cv2: float) -> float:
    """The share that waits in GI/G/1 over that in M/G/1 (Kraemer and Langenbach-Belz)."""
    squared = rho * rho * (4.0 * arrival_cv2 + service_cv2)
    if arrival_cv2 <= 1.0:
        bend = (1.0 + arrival_cv2 + rho * service_cv2) / (1.0 + rho * (service_cv2 - 1.0) + squared)
    else:
        bend = 4.0 * rho / (arrival_cv2 + squared)
    return max(0.0, 1.0 + (arrival_cv2 - 1.0) * (1.0 - rho) * bend)


def _wait(station: Station, arrivals: Arrivals) -> _Wait | None:
    """The wait before service, request by request; None where the queue has no end."""
    rho = arrivals.rate_hz * station.service_s / station.servers
    if rho >= 1.0:
        return None
    variation = (arrivals.cv2 + station.service_cv2) / 2.0
    share = erlang_c(station.servers, arrivals.rate_hz * station.service_s)
    if variation == 0.0 or arrivals.rate_hz == 0.0:
        return _Wait(0.0, math.inf)
    share = min(1.0, share * _delayed(rho, arrivals.cv2, station.service_cv2))
    return _Wait(share, station.servers * (1.0 - rho) / (station.service_s * variation))


def mean_wait_s(station: Station, arrivals: Arrivals) -> float:
    """Mean wait before service, batches of one; infinite at and past saturation."""
    if station.batch > 1:
        raise Unusable("batch", f"{station.batch}", "only batches of one have a formula; ask for a latency")
    wait = _wait(station, arrivals.checked())
    return math.inf if wait is None else wait.share / wait.decay_hz


@lru_cache(maxsize=64)
def _shape(cv2: float, quantiles_s: tuple[tuple[float, float], ...]) -> Floats:
    """PARTS equal shares of a time with mean 1: lognormal, or straight through what was measured; shape (PARTS,)."""
    return _times((np.arange(PARTS) + 0.5) / PARTS, cv2, quantiles_s)


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
        grid = np.linspace(0.0, 1.0, 4 * PARTS + 1)[1:-1]
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
def _played(station: Station, arrivals: Arrivals) -> Floats:
    """Response times in s; shape (CUSTOMERS,)."""
    arrived, works = _drawn(arrivals.cv2, station.service_cv2, station.quantiles_s)
    took = np.empty(len(arrived))
    alone = station.batch_s(1) / station.service_s
    play(arrived / arrivals.rate_hz, works * station.service_s, station.servers, station.batch, alone, took)
    counted = took[WARMING:]
    counted.flags.writeable = False
    return counted


def _is_exact(station: Station, arrivals: Arrivals) -> bool:
    return station.batch == 1 and station.service_cv2 == arrivals.cv2 == 1.0 and not station.quantiles_s


def error_of(station: Station, arrivals: Arrivals) -> float:
    """What the model may miss a quantile by here; relative."""
    if _is_exact(station, arrivals):
        return ERROR.exact
    return ERROR.simple if station.batch == 1 else ERROR.batched


def response_tail(station: Station, arrivals: Arrivals, time_s: float) -> float:
    """P(wait + service > time_s); 1 at and past saturation."""
    arrivals.checked()
    if time_s < 0.0 or arrivals.rate_hz >= station.capacity_hz:
        return 1.0
    if station.batch > 1 and arrivals.rate_hz > 0.0:
        times = _played(station, arrivals)
        return float(np.count_nonzero(times > time_s)) / len(times)
    wait = _wait(station, arrivals)
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


def _checked(quantile: float) -> float:
    if not 0.0 < quantile < 1.0:
        raise Unusable("quantile", f"{quantile}", "give a share between 0 and 1, 0.95 for p95")
    return 1.0 - quantile


def latency(station: Station, arrivals: Arrivals, quantile: float) -> Estimate:
    """The time that a share `quantile` of requests does not exceed; infinite where the queue has no end."""
    beyond = _checked(quantile)
    arrivals.checked()
    error = error_of(station, arrivals)
    if arrivals.rate_hz >= station.capacity_hz:
        return Estimate(math.inf, error)
    if station.batch > 1 and arrivals.rate_hz > 0.0:
        times = _played(station, arrivals)
        rank = min(len(times) - 1, math.ceil(quantile * len(times)) - 1)
        return Estimate(float(np.partition(times, rank)[rank]), error)
    return Estimate(_least(lambda time_s: response_tail(station, arrivals, time_s), beyond, station.service_s), error)


def wait_and(station: Station, arrivals: Arrivals, mean_s: float, cv2: float, quantile: float) -> Estimate:
    """The quantile of the wait for a server and a lognormal time after it, batches of one.

    For an answer that begins before its server is done with it: the first token of many.
    """
    beyond = _checked(quantile)
    if station.batch > 1:
        raise Unusable("batch", f"{station.batch}", "count each place of a batch as a server")
    wait = _wait(station, arrivals.checked())
    if wait is None:
        return Estimate(math.inf, ERROR.simple)
    then = mean_s * _shape(cv2, ())
    return Estimate(_least(lambda time_s: _after(wait, time_s - then), beyond, max(mean_s, 1e-9)), ERROR.simple)
