"""Quantiles of the most recent durations.

Owns a bounded window; must not know what was timed or with which clock. A window rather than buckets, because
the p99 of a 5 ms objective needs better than a bucket's width; Prometheus gets buckets besides.
"""

from collections import deque


class RecentLatencies:
    """The last `most` durations."""

    def __init__(self, most: int) -> None:
        self._window: deque[float] = deque(maxlen=most)
        self._sorted: list[float] | None = None
        self.count = 0

    def add(self, latency_s: float) -> None:
        """Take one duration; the oldest gives way."""
        self._window.append(latency_s)
        self._sorted = None
        self.count += 1

    def quantile(self, q: float) -> float:
        """The smallest duration that a share `q` of the window does not exceed; 0 without any."""
        if not self._window:
            return 0.0
        if self._sorted is None:
            self._sorted = sorted(self._window)
        rank = -(-q * len(self._sorted) // 1)
        return self._sorted[max(0, int(rank) - 1)]
