"""What a service's own metrics say of its profile: how much slower it is, how sure that is, and how both fade.

Owns the correction as a value, and how a window becomes a sample of it. Must not know
how a live quantile was read or what is decided with the factor.

Theory. The slowness f is the factor on all service times at which the model gives what
was seen. Two things show it. A live quantile: f with model(quantile; f) = live, by
bisection, since the quantile rises with f. Overload: while the queue grows all servers
are busy, and the rate at which requests finish is the capacity, so f = modelled capacity
/ finished; a quantile of such a window is that of no steady state and is not used.

A quantile read from a histogram lies anywhere in its bucket, and where in it is no noise
that a mean takes away: vLLM's buckets are 10 to 25 and 25 to 50 ms, so that 11 ms read in a
straight line are 20. So such a sample is a range of factors, from that of the lower border
to that of the upper. A factor in the range explains what was seen: it stays as it is, and
does not fade, and its error shrinks to what the range leaves above it. One outside goes to the
nearer end.

The mean latency is exact where a quantile is a bucket: a histogram tells its sum. For engines
it says the slowness without a model of quantiles (models.py). Such a sample compares the
service with its profile at the load that it has, so what reading the profile between
measured points may miss shrinks with them: from all of it to DOUBT_LEAST, which is left
for loads that the service has not had yet.

Samples are followed in logarithms by a mean that forgets: log f <- log f + g (log f' -
log f). The gain g is GAIN for a sample that is sure of itself and falls with its own
error: that of a quantile of n times with an exponential tail, sqrt(q / ((1 - q) n)) /
ln(1 / (1 - q)). What the samples scatter by is
the factor's error. The factor stays between 1 / BOUND and BOUND: a profile that is further
off is wrong, not to be corrected, and `is_at_bound` says so. Without samples all fade by
half every HALF_LIFE_S: the factor to 1, the error to PRIOR_ERROR, the doubt to 1. A live quantile of which
only a least value is known (the open bucket) may raise the factor, never lower it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from eelgrid_controller.serving.live import LiveQuantile
from eelgrid_controller.serving.queueing import response_tail
from eelgrid_controller.serving.sizing import Factor
from eelgrid_controller.serving.stations import Arrivals, Station

__all__ = [
    "BOUND", "DOUBT_LEAST", "HALF_LIFE_S", "PRIOR_ERROR", "STEPS", "Correction", "Sample", "factor", "is_at_bound", "learned",
    "own_error", "sampled", "saturated", "slowness",
]  # fmt: skip

BOUND = 4.0
GAIN = 0.5
HALF_LIFE_S = 600.0
PRIOR_ERROR = 0.15  # of a profile that nobody has compared with the service
DOUBT_LEAST = 0.3  # of the profile's error, once the service was compared with it: 3 of 10 %
_SURE = 0.10  # an own error at which a sample counts half
_OUTPUT_ERROR = 0.05  # of a capacity that is read off an output rate
_LOG_BOUND = math.log(BOUND)
STEPS = 12  # of a bisection over the logarithm: 0.07 %


@dataclass(frozen=True, slots=True)
class Correction:
    """What is known at `at_s`; a new one knows nothing."""

    at_s: float = 0.0
    log_factor: float = 0.0
    scatter: float = PRIOR_ERROR  # relative, of the samples about the factor
    samples: int = 0
    doubt: float = 1.0  # share of the profile's own error that is left


class Sample(NamedTuple):
    """How much slower than its profile a service was in a window."""

    factor: float  # within the bounds
    error: float  # relative, its own
    is_least: bool = False
    most: float | None = None  # any factor from `factor` to this explains it as well; None for that one alone
    is_mean: bool = False  # the mean told it, which no bucket hides


def own_error(quantile: float, live: LiveQuantile) -> float:
    """Relative error of a live quantile: how few it is taken of, and how wide its bucket."""
    few = 0.0
    if math.isfinite(live.of):
        few = math.sqrt(quantile / ((1.0 - quantile) * live.of)) / -math.log1p(-quantile)
    return few + live.resolution


def sampled(find: Callable[[float], float], quantile: float, live: LiveQuantile | None) -> Sample | None:
    """The sample that a live quantile is, where `find` gives the factor of a latency in s; None without one."""
    if live is None or live.value_s <= 0.0:
        return None
    if live.bucket_s is None:
        return Sample(find(live.value_s), own_error(quantile, live), live.is_least)
    low_s, high_s = live.bucket_s
    few = own_error(quantile, live._replace(resolution=0.0))
    return Sample(find(low_s), few, live.is_least, find(high_s))


def slowness(station: Station, arrivals: Arrivals, quantile: float, live: LiveQuantile | None) -> Sample | None:
    """The sample that a live quantile of a steady window is; None without one."""

    def find(latency_s: float) -> float:
        low, high = -_LOG_BOUND, _LOG_BOUND
        for _ in range(STEPS):
            middle = (low + high) / 2.0
            if response_tail(station.slowed(math.exp(middle)), arrivals, latency_s) > 1.0 - quantile:
                high = middle  # so slow a service would have taken longer
            else:
                low = middle
        return math.exp((low + high) / 2.0)

    return sampled(find, quantile, live)


def saturated(capacity_hz: float, finished_hz: float) -> Sample | None:
    """The sample that the output of a window is in which all servers were busy; None if nothing finished."""
    if finished_hz <= 0.0:
        return None
    return Sample(min(BOUND, max(1.0 / BOUND, capacity_hz / finished_hz)), _OUTPUT_ERROR)


def _faded(correction: Correction, now_s: float) -> tuple[float, float, float]:
    """The log factor, the error and the doubt now."""
    kept = 0.5 ** (max(0.0, now_s - correction.at_s) / HALF_LIFE_S)
    error = correction.scatter * kept + PRIOR_ERROR * (1.0 - kept)
    return correction.log_factor * kept, error, correction.doubt * kept + (1.0 - kept)


def _log(value: float) -> float:
    return min(_LOG_BOUND, max(-_LOG_BOUND, math.log(value)))


def learned(correction: Correction, sample: Sample | None, at_s: float) -> Correction:
    """The correction after one more sample; the same without one."""
    if sample is None or not 0.0 < sample.factor < math.inf:
        return correction
    log_factor, scatter, doubt = _faded(correction, at_s)
    seen = _log(sample.factor)
    if sample.most is not None and sample.most >= sample.factor:
        log_factor = correction.log_factor
        most = _log(sample.most)
        seen = max(seen, min(log_factor, most))
        if seen == log_factor:
            gain = GAIN / (1.0 + (sample.error / _SURE) ** 2)
            scatter += gain * (min(scatter, most - log_factor) - scatter)
            return replace(correction, at_s=at_s, scatter=scatter, samples=correction.samples + 1, doubt=doubt)
    if sample.is_least and seen <= log_factor:
        return correction
    gain = GAIN / (1.0 + (sample.error / _SURE) ** 2)
    missed = abs(seen - log_factor)
    return Correction(
        at_s=at_s,
        log_factor=log_factor + gain * (seen - log_factor),
        scatter=min(1.0, scatter + gain * (min(1.0, missed) - scatter)),
        samples=correction.samples + 1,
        doubt=doubt + gain * (DOUBT_LEAST - doubt) if sample.is_mean else doubt,
    )


def factor(correction: Correction, now_s: float) -> Factor:
    """How much slower than its profile the service is taken to be now, and the relative error."""
    log_factor, error, doubt = _faded(correction, now_s)
    return Factor(math.exp(log_factor), error, doubt)


def is_at_bound(correction: Correction) -> bool:
    """Whether the service is further from its profile than a correction may go: the profile is wrong."""
    return abs(correction.log_factor) >= 0.95 * _LOG_BOUND
