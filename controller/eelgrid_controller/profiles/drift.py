"""Whether a workload still does what it did: a running test on what each reading adds.

Owns the test of one quantity of one workload. Must not know what a reading is of.

Theory: the n-th reading of a configuration, as a logarithm, is off from the mean of those before by
    z = (y - mean) / (noise sqrt(1 + 1/(n - 1)))
These recursive residuals are independent with unit variance while nothing changes, although the
mean is estimated from the same readings; the first reading of a configuration has the same
property against what the model predicted. Two sums watch them,
    up = max(0, up + z - SLACK)        down = max(0, down - z - SLACK)
and one of them past THRESHOLD says that the level has changed, `run` readings ago at the most. A residual
counts as at most CLIP, so that no single reading can raise an alarm. The noise is pooled over the
configurations of the workload: a mean of a stated variance, worth PRIOR_READINGS, and of the
squared residuals so far. The first WARM_UP residuals teach the noise alone; from then on they are
clipped before they count, so that a change does not pass for noise.

At THRESHOLD 8 and SLACK 1/2 the expected run without change is some 19,000 readings a side for
normal residuals (Siegmund's approximation), and a shift of one (two) deviations is found after
some 18 (6) readings.

Source: Page, Biometrika 1954; Hawkins, "Self-starting CUSUM charts for location and scale", The
Statistician 1987; Siegmund, "Sequential Analysis", 1985, for the run lengths; Brown, Durbin and
Evans, JRSS B 1975, for recursive residuals.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "CLIP", "NOISE", "PRIOR_READINGS", "SLACK", "THRESHOLD", "WARM_UP", "Noise", "Watch", "residual",
    "since_change", "watched",
]  # fmt: skip

SLACK = 0.5
THRESHOLD = 8.0
CLIP = 3.0
NOISE = 0.005  # log units: half a per cent between readings that are means over some seconds
PRIOR_READINGS = 4.0
WARM_UP = 16


class Noise(NamedTuple):
    """The spread of readings of one configuration around their mean, log units."""

    squares: float = 0.0  # sum of squared residuals, each as a single reading's
    readings: float = 0.0  # behind it

    @property
    def variance(self) -> float:
        """Of one reading."""
        return (NOISE**2 * PRIOR_READINGS + self.squares) / (PRIOR_READINGS + self.readings)

    def after(self, score: float) -> "Noise":
        """With one more residual, standardised."""
        square = score * score if self.readings < WARM_UP else min(score * score, CLIP * CLIP)
        return Noise(self.squares + self.variance * square, self.readings + 1.0)


class Watch(NamedTuple):
    """The two sums, and how many readings ago each was zero."""

    up: float = 0.0
    up_run: int = 0
    down: float = 0.0
    down_run: int = 0

    @property
    def changed(self) -> bool:
        """Whether the level has changed."""
        return max(self.up, self.down) > THRESHOLD

    @property
    def run(self) -> int:
        """How many readings, the last included, speak for the change."""
        return self.up_run if self.up >= self.down else self.down_run


def residual(value: float, mean: float, count: int, variance: float) -> float:
    """The standardised residual of a reading after `count` others of the same configuration."""
    return (value - mean) / math.sqrt(variance * (1.0 + 1.0 / count))


def since_change(scores: Sequence[float]) -> int:
    """How many of the last of these residuals, none or more of them from before the change, are from after it.

    The most probable number for a shift of unknown size: the largest (sum of the last k)^2 / k. At least 1.
    """
    best, found, total = -1.0, 1, 0.0
    for count, score in enumerate(reversed(scores), 1):
        total += max(-CLIP, min(CLIP, score))
        if total * total / count > best:
            best, found = total * total / count, count
    return found


def watched(watch: Watch, score: float) -> Watch:
    """After one more residual."""
    bounded = max(-CLIP, min(CLIP, score))
    up = max(0.0, watch.up + bounded - SLACK)
    down = max(0.0, watch.down - bounded - SLACK)
    return Watch(up, watch.up_run + 1 if up else 0, down, watch.down_run + 1 if down else 0)
