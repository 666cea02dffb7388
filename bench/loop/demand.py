"""Demand of a service in every step of a day: an hour of the Azure traces, repeated and scaled by a daily curve.

Owns the course of arrivals. Must not know engines, replicas or policies.

A trace of an hour is asked for many times over: `times` copies of it, each shifted by
up to SHIFT_S, so that seconds differ between the copies as they do between users and
minutes rise and fall together as the trace does. The hour is repeated, begun at a
moment of its own, and multiplied by a factor between `least` and 1 that is smallest at
the hour `night_s` of the day and largest half a day later.
"""

import csv
import math
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.llm.data import Missing

__all__ = ["DAY_S", "Course", "Requests", "course", "requests"]

DAY_S = 86_400.0
SHIFT_S = 90.0
Floats = NDArray[np.float64]


class Requests(NamedTuple):
    """A trace."""

    arrived_s: Floats  # (N,) since the first
    output_tokens: Floats  # (N,)
    seconds: float  # whole minutes that it lasts

    @property
    def mean_tokens(self) -> float:
        """Output tokens of a request, in the mean."""
        return float(self.output_tokens.mean())


class Course(NamedTuple):
    """How one service's rate is made of the trace."""

    times: float
    begins: float  # share of the trace that is over when the day begins
    least: float  # of the day's most
    night_s: float
    day_s: float = DAY_S


def requests(data: Path, trace: str) -> Requests:
    """A trace of Azure 2023, `conv` or `code`; Missing where its file is not there."""
    path = data / "azure_llm_2023" / f"AzureLLMInferenceTrace_{trace}.csv"
    if not path.is_file():
        raise Missing(f"no {path}")
    with path.open(newline="", encoding="utf-8") as file:
        lines = [
            (datetime.fromisoformat(line["TIMESTAMP"][:26]).timestamp(), float(line["GeneratedTokens"]))
            for line in csv.DictReader(file)
        ]
    arrived_s, tokens = (np.array(column) for column in zip(*lines, strict=True))
    arrived_s -= arrived_s[0]
    seconds = 60.0 * math.floor(arrived_s[-1] / 60.0)
    inside = arrived_s < seconds
    return Requests(arrived_s[inside], tokens[inside], seconds)


def _hour(trace: Requests, times: float, step_s: float, rng: np.random.Generator) -> Floats:
    """Tokens a second in each step of the hour, copies laid over each other."""
    copies = max(1, math.ceil(times))
    bins = round(trace.seconds / step_s)
    total = np.zeros(bins)
    for shift_s in rng.uniform(-SHIFT_S, SHIFT_S, copies):
        places = ((trace.arrived_s + shift_s) % trace.seconds / step_s).astype(int) % bins
        total += np.bincount(places, weights=trace.output_tokens, minlength=bins)
    return total * (times / copies / step_s)


def course(trace: Requests, made: Course, steps: int, step_s: float, rng: np.random.Generator) -> Floats:
    """Output tokens a second that are asked for in each step, (steps,)."""
    hour = _hour(trace, made.times, step_s, rng)
    at = (np.arange(steps) + int(made.begins * len(hour))) % len(hour)
    day = (1.0 - np.cos(2.0 * math.pi * (np.arange(steps) * step_s - made.night_s) / made.day_s)) / 2.0
    return hour[at] * (made.least + (1.0 - made.least) * day)
