"""The drift test on made-up readings: false alarms a thousand readings, and readings until a change is seen.

Owns the worlds and the counting. Must not know the data sets.

A world is a workload with eight configurations, whose readings scatter around their levels with the noise
given, normal, with tails (Student's t with 4 degrees of freedom) or in runs (each error keeps 0.3 of the one
before, against what the test assumes); at `CHANGE` all levels shift.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.profiles.store import ProfiledWorkload, ProfileReading, ProfileStore

__all__ = ["CHANGE", "COLUMNS", "Row", "measured"]

CHANGE = 400
_AFTER = 300
_CONFIGURATIONS = 8
_KEPT = 0.3
_QUIET_SEEDS = 4
_NOISES = (0.005, 0.01, 0.03)
_SHIFTS = (0.01, 0.02, 0.05, 0.1, 0.2)
COLUMNS = (
    "noise_pct",
    "errors",
    "shift_pct",
    "seeds",
    "false_alarms_per_1000",
    "delay_median",
    "delay_p90",
    "missed",
)


class Row(NamedTuple):
    """One world over all seeds; delays are readings after the change, None where there was none."""

    noise_pct: float
    errors: str
    shift_pct: float
    seeds: int
    false_alarms_per_1000: float
    delay_median: float | None
    delay_p90: float | None
    missed: int


def _alarms(seed: int, noise: float, errors: str, shift: float) -> list[int]:
    """Readings at which an alarm was raised."""
    rng = np.random.default_rng(seed)
    levels = rng.normal(0.0, 0.5, _CONFIGURATIONS)
    profiles = ProfileStore().with_workload(ProfiledWorkload("made up"))
    found: list[int] = []
    error = 0.0
    for index in range(CHANGE + _AFTER):
        which = int(rng.integers(_CONFIGURATIONS))
        fresh = float(rng.standard_t(4)) / math.sqrt(2.0) if errors == "tails" else float(rng.normal())
        error = _KEPT * error + math.sqrt(1.0 - _KEPT**2) * fresh if errors == "runs" else fresh
        value = levels[which] + noise * error + (shift if index >= CHANGE else 0.0)
        point = Point("made up", Configuration("a40", batch=2**which), math.exp(value))
        profiles = profiles.with_reading(ProfileReading(point, float(index)))
        if len(profiles.profiles["made up"].drifts) > len(found):
            found.append(index)
    return found


def measured(seeds: int) -> Iterator[Row]:
    """Every world; without a shift first."""
    worlds = [(noise, errors, 0.0) for noise in _NOISES for errors in ("normal", "tails", "runs")]
    worlds += [(noise, "normal", shift) for noise in _NOISES for shift in _SHIFTS]
    for noise, errors, shift in worlds:
        many = seeds if shift else _QUIET_SEEDS * seeds  # false alarms are rare
        alarms = [_alarms(seed, noise, errors, shift) for seed in range(many)]
        quiet = CHANGE if shift else CHANGE + _AFTER
        false = sum(index < quiet for one in alarms for index in one)
        delays = [min(late) - CHANGE + 1 for one in alarms if (late := [index for index in one if index >= CHANGE])]
        seen = bool(shift and delays)
        yield Row(
            100.0 * noise,
            errors,
            100.0 * shift,
            many,
            1000.0 * false / (quiet * many),
            float(np.median(delays)) if seen else None,
            float(np.quantile(delays, 0.9)) if seen else None,
            many - len(delays) if shift else 0,
        )
