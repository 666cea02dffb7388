"""How long the driver takes, by call: counts in buckets that a histogram can show as they are.

Owns the counting. Time is measured in the child around each call, so that the
way there and back is not in it; a call that never came back counts with its
deadline.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

__all__ = ["BOUNDS_S", "Latencies"]

# Cached fields take microseconds, sensors a millisecond, the first contact with a device seconds.
BOUNDS_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_CALLS_MOST = 64


class Latencies:
    """Seconds spent in the driver."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums_s: dict[str, float] = {}

    def add(self, call: str, elapsed_s: float) -> None:
        """One call."""
        counts = self._counts.get(call)
        if counts is None:
            if len(self._counts) >= _CALLS_MOST:
                return
            # In this order, for the thread of a scrape reads both.
            self._sums_s[call] = 0.0
            counts = self._counts[call] = [0] * (len(BOUNDS_S) + 1)
        counts[bisect_left(BOUNDS_S, elapsed_s)] += 1
        self._sums_s[call] += elapsed_s

    def __iter__(self) -> Iterator[tuple[str, int, float, tuple[tuple[float, int], ...]]]:
        """(call, count, sum_s, ((upper bound, count at or below), ...)) by call; the last bound is infinity."""
        for call, counts in sorted(self._counts.items()):
            below = tuple(zip((*BOUNDS_S, float("inf")), accumulate(counts), strict=True))
            yield call, below[-1][1], self._sums_s[call], below
