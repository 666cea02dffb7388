"""Detects that a workload has changed, by a two-sided CUSUM test on recursive residuals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

CUSUM_SLACK = 0.5
CUSUM_THRESHOLD = 8.0
RESIDUAL_CLIP = 3.0
PRIOR_NOISE = 0.005  # log units: half a per cent between readings that are means over some seconds
PRIOR_READINGS = 4.0
WARM_UP = 16


class ReadingNoise(NamedTuple):
    """The spread of readings of one configuration around their mean, log units."""

    squares: float = 0.0  # sum of squared residuals, each as a single reading's
    readings: float = 0.0  # behind it

    @property
    def variance(self) -> float:
        """Of one reading."""
        return (PRIOR_NOISE**2 * PRIOR_READINGS + self.squares) / (PRIOR_READINGS + self.readings)

    def with_residual(self, score: float) -> "ReadingNoise":
        """With one more residual, standardised."""
        square = score * score if self.readings < WARM_UP else min(score * score, RESIDUAL_CLIP * RESIDUAL_CLIP)
        return ReadingNoise(self.squares + self.variance * square, self.readings + 1.0)


class DriftTest(NamedTuple):
    """The two sums, and how many readings ago each was zero."""

    up: float = 0.0
    up_run: int = 0
    down: float = 0.0
    down_run: int = 0

    @property
    def changed(self) -> bool:
        """Whether the level has changed."""
        return max(self.up, self.down) > CUSUM_THRESHOLD

    @property
    def change_length(self) -> int:
        """How many readings, the last included, speak for the change."""
        return self.up_run if self.up >= self.down else self.down_run


def recursive_residual(value: float, mean: float, count: int, variance: float) -> float:
    """The standardised residual of a reading after `count` others of the same configuration."""
    return (value - mean) / math.sqrt(variance * (1.0 + 1.0 / count))


def since_change(scores: Sequence[float]) -> int:
    """How many of the last of these residuals, none or more of them from before the change, are from after it.

    The most probable number for a shift of unknown size: the largest (sum of the last k)^2 / k. At least 1.
    """
    best, found, total = -1.0, 1, 0.0
    for count, score in enumerate(reversed(scores), 1):
        total += max(-RESIDUAL_CLIP, min(RESIDUAL_CLIP, score))
        if total * total / count > best:
            best, found = total * total / count, count
    return found


def update_drift_test(watch: DriftTest, score: float) -> DriftTest:
    """After one more residual."""
    bounded = max(-RESIDUAL_CLIP, min(RESIDUAL_CLIP, score))
    up = max(0.0, watch.up + bounded - CUSUM_SLACK)
    down = max(0.0, watch.down - bounded - CUSUM_SLACK)
    return DriftTest(up, watch.up_run + 1 if up else 0, down, watch.down_run + 1 if down else 0)
