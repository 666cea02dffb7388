"""How many requests will come while a replica starts.

Owns the forecast of a rate from its recent windows. Must not know replicas or
objectives.

Theory. Level and slope by Holt's double smoothing over windows of unequal length,
the scatter of one-step errors upward beside them: a rate that fell is no reason to
expect more. What is expected at the horizon is
level + slope x horizon, never below the level for a falling slope: capacity that
was just needed is not given away on a trend. `upper_hz` adds SIGMAS of the scatter
and is never below the newest window, so that a step is seen when it comes; nor is it
more than AHEAD_MOST of what was seen, so that a step is not taken for the first of many.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Forecast", "Trend", "ahead", "seen"]

_LEVEL_S, _SLOPE_S = 60.0, 300.0  # times in which the past counts 1 / e
SIGMAS = 1.5
AHEAD_MOST = 1.5


@dataclass(frozen=True, slots=True)
class Trend:
    """What is known after the last window."""

    at_s: float | None = None
    level_hz: float = 0.0
    slope: float = 0.0  # Hz a second
    variance: float = 0.0  # mean square of one-step errors upward, Hz^2
    newest_hz: float = 0.0


class Forecast(NamedTuple):
    """The rate at the horizon."""

    rate_hz: float
    upper_hz: float


def seen(trend: Trend, rate_hz: float, at_s: float) -> Trend:
    """The trend after a window that ends at `at_s`; a window of the past changes nothing."""
    if trend.at_s is None:
        return Trend(at_s, rate_hz, 0.0, 0.0, rate_hz)
    gap_s = at_s - trend.at_s
    if gap_s <= 0.0:
        return trend
    expected = trend.level_hz + trend.slope * gap_s
    missed = rate_hz - expected
    short = max(0.0, missed)
    level_gain, slope_gain = 1.0 - math.exp(-gap_s / _LEVEL_S), 1.0 - math.exp(-gap_s / _SLOPE_S)
    level_hz = max(0.0, expected + level_gain * missed)
    slope = trend.slope + slope_gain * ((level_hz - trend.level_hz) / gap_s - trend.slope)
    variance = trend.variance + slope_gain * (short * short - trend.variance)
    return Trend(at_s, level_hz, slope, variance, rate_hz)


def ahead(trend: Trend, horizon_s: float) -> Forecast:
    """The forecast for `horizon_s` after the last window; 0 before the first."""
    most_hz = AHEAD_MOST * max(trend.level_hz, trend.newest_hz)
    rate_hz = min(most_hz, trend.level_hz + max(0.0, trend.slope * horizon_s))
    upper_hz = min(most_hz, rate_hz + SIGMAS * math.sqrt(trend.variance))
    return Forecast(rate_hz, max(trend.newest_hz, upper_hz))
