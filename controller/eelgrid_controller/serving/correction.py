"""What live quantiles say of the model: a factor, its uncertainty, and how both fade.

Owns the correction as a value. Must not know how a live quantile was read or what
is decided with the factor.

Theory. r = live / model at the same load is followed in logarithms, by a mean that
forgets: log f <- log f + g (log r - log f). The gain g is GAIN for a sample that is
sure of itself and falls with its own error: that of a quantile of n times with an
exponential tail, sqrt(q / ((1 - q) n)) / ln(1 / (1 - q)), and half the bucket that it
was read from. What the samples still scatter by is the factor's error. The factor
stays between 1 / BOUND and BOUND: a model that is further off is wrong, not to be
corrected, and `is_at_bound` says so. Without samples both fade by half every
HALF_LIFE_S: the factor to 1, the error to PRIOR_ERROR. A live quantile that is only
known to be at least something (the open bucket) may raise the factor, never lower it.
"""

import math
from dataclasses import dataclass

from eelgrid_controller.serving.live import LiveQuantile
from eelgrid_controller.serving.sizing import Factor

__all__ = ["BOUND", "HALF_LIFE_S", "PRIOR_ERROR", "Correction", "factor", "is_at_bound", "learned"]

BOUND = 4.0
GAIN = 0.3
HALF_LIFE_S = 600.0
PRIOR_ERROR = 0.15  # of a model that nobody has compared with the service
_SURE = 0.10  # an own error at which a sample counts half
_LOG_BOUND = math.log(BOUND)


@dataclass(frozen=True, slots=True)
class Correction:
    """What is known at `at_s`; a new one knows nothing."""

    at_s: float = 0.0
    log_factor: float = 0.0
    scatter: float = PRIOR_ERROR  # relative, of the samples about the factor
    samples: int = 0


def _own_error(quantile: float, live: LiveQuantile) -> float:
    """Relative error of a live quantile: how few it is taken of, and how wide its bucket."""
    few = 0.0
    if math.isfinite(live.of):
        few = math.sqrt(quantile / ((1.0 - quantile) * live.of)) / -math.log1p(-quantile)
    return few + live.resolution


def _faded(correction: Correction, now_s: float) -> tuple[float, float]:
    """The log factor and the error now."""
    kept = 0.5 ** (max(0.0, now_s - correction.at_s) / HALF_LIFE_S)
    return correction.log_factor * kept, correction.scatter * kept + PRIOR_ERROR * (1.0 - kept)


def learned(
    correction: Correction, live: LiveQuantile | None, model_s: float, *, quantile: float, at_s: float
) -> Correction:
    """The correction after one more live quantile; the same where there is nothing to compare."""
    if live is None or not (0.0 < model_s < math.inf) or live.value_s <= 0.0:
        return correction
    log_factor, scatter = _faded(correction, at_s)
    ratio = math.log(live.value_s / model_s)
    if live.is_least and ratio <= log_factor:
        return correction
    gain = GAIN / (1.0 + (_own_error(quantile, live) / _SURE) ** 2)
    moved = log_factor + gain * (ratio - log_factor)
    missed = abs(ratio - log_factor)
    return Correction(
        at_s=at_s,
        log_factor=min(_LOG_BOUND, max(-_LOG_BOUND, moved)),
        scatter=min(1.0, scatter + gain * (min(1.0, missed) - scatter)),
        samples=correction.samples + 1,
    )


def factor(correction: Correction, now_s: float) -> Factor:
    """What the model is multiplied by now, and its relative error."""
    log_factor, error = _faded(correction, now_s)
    return Factor(math.exp(log_factor), error)


def is_at_bound(correction: Correction) -> bool:
    """Whether the service is further from the model than a correction may go: the profile is wrong."""
    return abs(correction.log_factor) >= 0.95 * _LOG_BOUND
