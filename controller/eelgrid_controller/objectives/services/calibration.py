"""Calibrates a service's profile by its own metrics: a slowness factor with its error, which decays over time."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from eelgrid_controller.objectives.services.service_metrics import LiveQuantile
from eelgrid_controller.profiles.queueing_model import ArrivalProcess, ServiceStation, SlownessFactor, response_tail

FACTOR_BOUND = 4.0
CORRECTION_GAIN = 0.5
HALF_LIFE_S = 600.0
PRIOR_ERROR = 0.15  # of a profile that nobody has compared with the service
DOUBT_LEAST = 0.3  # of the profile's error, once the service was compared with it: 3 of 10 %
_SURE = 0.10  # an own error at which a sample counts half
_OUTPUT_ERROR = 0.05  # of a capacity that is read off an output rate
_LOG_BOUND = math.log(FACTOR_BOUND)
SEARCH_STEPS = 12  # of a bisection over the logarithm: 0.07 %


@dataclass(frozen=True, slots=True)
class ServiceCalibration:
    """What is known at `at_s`; a new one knows nothing."""

    at_s: float = 0.0
    log_factor: float = 0.0
    scatter: float = PRIOR_ERROR  # relative, of the samples about the factor
    samples: int = 0
    doubt: float = 1.0  # share of the profile's own error that is left


class SlownessSample(NamedTuple):
    """How much slower than its profile a service was in a window."""

    factor: float  # within the bounds
    error: float  # relative, its own
    is_least: bool = False
    most: float | None = None  # any factor from `factor` to this explains it as well; None for that one alone
    is_mean: bool = False  # the mean told it, which no bucket hides


def quantile_error(quantile: float, live: LiveQuantile) -> float:
    """Relative error of a live quantile: how few it is taken of, and how wide its bucket."""
    few = 0.0
    if math.isfinite(live.of):
        few = math.sqrt(quantile / ((1.0 - quantile) * live.of)) / -math.log1p(-quantile)
    return few + live.resolution


def sample_quantile(
    find: Callable[[float], float], quantile: float, live: LiveQuantile | None
) -> SlownessSample | None:
    """The sample that a live quantile is, where `find` gives the factor of a latency in s; None without one."""
    if live is None or live.value_s <= 0.0:
        return None
    if live.bucket_s is None:
        return SlownessSample(find(live.value_s), quantile_error(quantile, live), live.is_least)
    low_s, high_s = live.bucket_s
    few = quantile_error(quantile, live._replace(resolution=0.0))
    return SlownessSample(find(low_s), few, live.is_least, find(high_s))


def sample_slowness(
    station: ServiceStation, arrivals: ArrivalProcess, quantile: float, live: LiveQuantile | None
) -> SlownessSample | None:
    """The sample that a live quantile of a steady window is; None without one."""

    def find(latency_s: float) -> float:
        low, high = -_LOG_BOUND, _LOG_BOUND
        for _ in range(SEARCH_STEPS):
            middle = (low + high) / 2.0
            if response_tail(station.slowed(math.exp(middle)), arrivals, latency_s) > 1.0 - quantile:
                high = middle  # so slow a service would have taken longer
            else:
                low = middle
        return math.exp((low + high) / 2.0)

    return sample_quantile(find, quantile, live)


def sample_saturation(capacity_hz: float, finished_hz: float) -> SlownessSample | None:
    """The sample that the output of a window is in which all servers were busy; None if nothing finished."""
    if finished_hz <= 0.0:
        return None
    return SlownessSample(min(FACTOR_BOUND, max(1.0 / FACTOR_BOUND, capacity_hz / finished_hz)), _OUTPUT_ERROR)


def _decay_calibration(correction: ServiceCalibration, now_s: float) -> tuple[float, float, float]:
    """The log factor, the error and the doubt now."""
    kept = 0.5 ** (max(0.0, now_s - correction.at_s) / HALF_LIFE_S)
    error = correction.scatter * kept + PRIOR_ERROR * (1.0 - kept)
    return correction.log_factor * kept, error, correction.doubt * kept + (1.0 - kept)


def _log(value: float) -> float:
    return min(_LOG_BOUND, max(-_LOG_BOUND, math.log(value)))


def update_calibration(
    correction: ServiceCalibration, sample: SlownessSample | None, at_s: float
) -> ServiceCalibration:
    """The correction after one more sample; the same without one."""
    if sample is None or not 0.0 < sample.factor < math.inf:
        return correction
    log_factor, scatter, doubt = _decay_calibration(correction, at_s)
    seen = _log(sample.factor)
    if sample.most is not None and sample.most >= sample.factor:
        log_factor = correction.log_factor
        most = _log(sample.most)
        seen = max(seen, min(log_factor, most))
        if seen == log_factor:
            gain = CORRECTION_GAIN / (1.0 + (sample.error / _SURE) ** 2)
            scatter += gain * (min(scatter, most - log_factor) - scatter)
            return replace(correction, at_s=at_s, scatter=scatter, samples=correction.samples + 1, doubt=doubt)
    if sample.is_least and seen <= log_factor:
        return correction
    gain = CORRECTION_GAIN / (1.0 + (sample.error / _SURE) ** 2)
    missed = abs(seen - log_factor)
    return ServiceCalibration(
        at_s=at_s,
        log_factor=log_factor + gain * (seen - log_factor),
        scatter=min(1.0, scatter + gain * (min(1.0, missed) - scatter)),
        samples=correction.samples + 1,
        doubt=doubt + gain * (DOUBT_LEAST - doubt) if sample.is_mean else doubt,
    )


def calibration_factor(correction: ServiceCalibration, now_s: float) -> SlownessFactor:
    """How much slower than its profile the service is taken to be now, and the relative error."""
    log_factor, error, doubt = _decay_calibration(correction, now_s)
    return SlownessFactor(math.exp(log_factor), error, doubt)


def is_at_bound(correction: ServiceCalibration) -> bool:
    """Whether the service is further from its profile than a correction may go: the profile is wrong."""
    return abs(correction.log_factor) >= 0.95 * _LOG_BOUND
