"""Conditions an engine's measured curve on what it does live: a Gaussian process over concurrency. Pure.

An engine is described by the logarithms of its token rate T(n) and of a latency quantile Q(n) at n sequences in
flight. The prior mean is the profile, and the departure from it is

    log T_live(n) = log T(n) - s - a(n),    log Q_live(n) = log Q(n) + s + b(n)

with one slowness s, which changes within hours, and two independent Gaussian processes a and b over log n: each the
sum of a squared exponential of a long length scale (the engine behaves differently altogether) and of a short one
(a measured point was off). Both are known at no more than KNOTS_MOST measured concurrencies and read in straight
lines between, as the curve is. Windows are conditioned on one at a time (a Kalman filter), which gives the posterior
of all of them together in closed form and a state whose size does not grow. Between windows what is known returns
to the prior (Ornstein-Uhlenbeck). Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, ch. 2;
Sarkka, Bayesian Filtering and Smoothing, 2013, ch. 4.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KNOTS_MOST = 16
SLOWNESS_SD = 0.15  # of a service that nobody has compared with its profile
LONG_SD, LONG_SCALE = 0.05, 1.5  # of log n: e^1.5 times the sequences
SHORT_SD, SHORT_SCALE = 0.05, 0.2
SLOWNESS_HALF_LIFE_S = 6.0 * 3600.0
SHAPE_HALF_LIFE_S = 48.0 * 3600.0
LOG_BOUND = math.log(4.0)  # beyond, the profile is of something else
_SURPRISE = 3.0  # deviations beyond which the slowness has changed rather than wandered
_VARIANCE_LEAST = 1e-8
Floats = NDArray[np.float64]


class CurveReading(NamedTuple):
    """What a window says of the curve; logarithms of what was seen over what the profile says."""

    sequences: float  # in flight in one instance
    log_rate: float | None  # of the token rate; None where it is not known
    rate_error: float
    latency_at: float = 1.0  # the sequences at which the profile's quantile is read
    log_latency: tuple[float, float] | None = None  # between these; equal where it is known
    latency_error: float = 0.0


@dataclass(frozen=True, slots=True)
class CurvePosterior:
    """What is known at `at_s`: the state is (s, a at the knots, b at the knots)."""

    knots: tuple[float, ...]  # sequences, rising
    at_s: float
    mean: tuple[float, ...]
    covariance: tuple[float, ...]  # by rows

    @property
    def log_factor(self) -> float:
        """The slowness."""
        return self.mean[0]

    @property
    def error(self) -> float:
        """The standard deviation of the slowness."""
        return math.sqrt(max(0.0, self.covariance[0]))


def curve_knots(sequences: Sequence[float]) -> tuple[float, ...]:
    """The concurrencies at which departures are known: the measured ones, or KNOTS_MOST of them evenly by rank."""
    if len(sequences) <= KNOTS_MOST:
        return tuple(sequences)
    return tuple(sequences[round(at)] for at in np.linspace(0, len(sequences) - 1, KNOTS_MOST))


@cache
def _prior(knots: tuple[float, ...]) -> Floats:
    away = np.subtract.outer(np.log(knots), np.log(knots)) ** 2
    kernel = LONG_SD**2 * np.exp(-0.5 * away / LONG_SCALE**2) + SHORT_SD**2 * np.exp(-0.5 * away / SHORT_SCALE**2)
    count = len(knots)
    found = np.zeros((1 + 2 * count, 1 + 2 * count))
    found[0, 0] = SLOWNESS_SD**2
    found[1 : 1 + count, 1 : 1 + count] = found[1 + count :, 1 + count :] = kernel
    found.flags.writeable = False
    return found


def start_posterior(knots: tuple[float, ...], at_s: float) -> CurvePosterior:
    """The profile itself, and how far a service may be from it."""
    return CurvePosterior(knots, at_s, (0.0,) * (1 + 2 * len(knots)), tuple(_prior(knots).ravel().tolist()))


def _weights(knots: tuple[float, ...], sequences: float) -> Floats:
    """Shares of the knots in a straight line at `sequences`; level outside."""
    found = np.zeros(len(knots))
    above = bisect_right(knots, sequences)
    if above == 0 or above == len(knots):
        found[min(above, len(knots) - 1)] = 1.0
        return found
    low, high = knots[above - 1], knots[above]
    found[above] = (sequences - low) / (high - low)
    found[above - 1] = 1.0 - found[above]
    return found


@lru_cache(maxsize=256)  # a curve is asked at its own concurrencies, window after window
def _weight_rows(knots: tuple[float, ...], sequences: tuple[float, ...]) -> Floats:
    found = np.stack([_weights(knots, one) for one in sequences])
    found.flags.writeable = False
    return found


def _at(posterior: CurvePosterior, now_s: float) -> tuple[Floats, Floats]:
    """Mean and covariance now: returned towards the prior for the time since."""
    prior = _prior(posterior.knots)
    gap_s = max(0.0, now_s - posterior.at_s)
    kept = np.full(len(prior), 0.5 ** (gap_s / SHAPE_HALF_LIFE_S))
    kept[0] = 0.5 ** (gap_s / SLOWNESS_HALF_LIFE_S)
    covariance = np.array(posterior.covariance).reshape(prior.shape)
    return np.array(posterior.mean) * kept, (covariance - prior) * np.outer(kept, kept) + prior


def _condition(mean: Floats, covariance: Floats, row: Floats, value: float, error: float) -> None:
    """Conditions on one value of `row @ state` with an error of its own, in place."""
    along = covariance @ row
    variance = float(row @ along) + error**2
    gain = along / variance
    mean += gain * (value - float(row @ mean))
    covariance -= np.outer(gain, along)


def _narrow(mean: Floats, covariance: Floats, row: Floats, between: tuple[float, float], error: float) -> None:
    """Conditions on `row @ state` being in a range, in place.

    A mean outside goes to the nearer end. One inside stays, and is no less sure than the nearer end is far; so a
    range that is seen again says nothing new.
    """
    low, high = between
    expected = float(row @ mean)
    if not low <= expected <= high:
        _condition(mean, covariance, row, min(high, max(low, expected)), error)
        return
    along = covariance @ row
    variance = float(row @ along)
    allowed = (min(high - expected, expected - low) + error) ** 2
    if variance > allowed:
        covariance -= np.outer(along, along) * ((variance - allowed) / variance**2)


def condition_curve(posterior: CurvePosterior, reading: CurveReading, at_s: float) -> CurvePosterior:
    """The posterior after one more window; the one before where the numbers are of no use."""
    count = len(posterior.knots)
    mean, covariance = _at(posterior, at_s)
    if reading.log_rate is not None:
        row = np.zeros(1 + 2 * count)
        row[0], row[1 : 1 + count] = 1.0, _weights(posterior.knots, reading.sequences)
        missed = -reading.log_rate - float(row @ mean)
        variance = float(row @ covariance @ row) + reading.rate_error**2
        if missed**2 > _SURPRISE**2 * variance:
            covariance[0, 0] += missed**2 / _SURPRISE**2 - variance
        _condition(mean, covariance, row, -reading.log_rate, reading.rate_error)
    if reading.log_latency is not None:
        row = np.zeros(1 + 2 * count)
        row[0], row[1 + count :] = 1.0, _weights(posterior.knots, reading.latency_at)
        low, high = reading.log_latency
        if low == high:
            _condition(mean, covariance, row, low, reading.latency_error)
        else:
            _narrow(mean, covariance, row, (low, high), reading.latency_error)
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        return posterior
    mean[0] = min(LOG_BOUND, max(-LOG_BOUND, mean[0]))
    covariance = (covariance + covariance.T) / 2.0
    np.fill_diagonal(covariance, np.maximum(covariance.diagonal(), _VARIANCE_LEAST))
    later_s = max(posterior.at_s, at_s)
    return CurvePosterior(posterior.knots, later_s, tuple(mean.tolist()), tuple(covariance.ravel().tolist()))


class CurveDeparture(NamedTuple):
    """Logarithms of what is live over the profile, and their standard deviations; one for each concurrency asked."""

    log_rate: Floats
    rate_sd: Floats
    log_latency: Floats
    latency_sd: Floats


def curve_departure(posterior: CurvePosterior, sequences: Sequence[float], now_s: float) -> CurveDeparture:
    """How far the live curve is from the profile."""
    mean, covariance = _at(posterior, now_s)
    count = len(posterior.knots)
    weights = _weight_rows(posterior.knots, tuple(sequences))
    rows = np.zeros((2, len(sequences), 1 + 2 * count))
    rows[:, :, 0] = 1.0
    rows[0, :, 1 : 1 + count], rows[1, :, 1 + count :] = weights, weights
    deviations = np.sqrt(np.maximum(np.einsum("kij,jl,kil->ki", rows, covariance, rows), 0.0))
    return CurveDeparture(-(rows[0] @ mean), deviations[0], rows[1] @ mean, deviations[1])
