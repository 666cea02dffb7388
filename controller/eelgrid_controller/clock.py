"""The times that the shell goes by, as one argument.

Owns nothing but the names: wall time is for people and the journal, monotonic
time for waiting and ages, performance time for durations. Only the shell takes
a Clock; the core gets times.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Clock"]


@dataclass(frozen=True, slots=True)
class Clock:
    """Where times come from."""

    now_ns: Callable[[], int] = time.time_ns
    monotonic_s: Callable[[], float] = time.monotonic
    perf_s: Callable[[], float] = time.perf_counter
