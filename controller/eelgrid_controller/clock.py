"""Clocks and durations: the daemon's clocks as one argument, a wall clock that ignores short jumps, latency quantiles.

Wall time is for people and the journal, monotonic time for waiting and ages, performance time for durations. The core
gets no Clock; it gets times. Order is a matter of sequence numbers, never of times.

`WallClock` reads wall time anew each time and keeps no maximum: a clock that was ten years ahead for a moment
would leave everything after it there. Between two reads the wall clock advances as the monotonic clock does,
but for what NTP slews (half a millisecond a second). More than `JUMP_S` is a jump:
somebody set the clock, or it failed. A jump is followed when it has lasted `FOLLOWED_S`, in either direction; until
then time goes on by the monotonic clock. Both are logged.

`RecentLatencies` keeps a window of durations rather than buckets, because the p99 of a 5 ms objective needs better
resolution than the width of a bucket; Prometheus gets buckets besides.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

JUMP_S = 1.0
# A clock that is set right is set once; whatever is undone within a minute was wrong.
FOLLOWED_S = 60.0


@dataclass(frozen=True, slots=True)
class Clock:
    """The sources of times, as one argument."""

    now_ns: Callable[[], int] = time.time_ns
    monotonic_s: Callable[[], float] = time.monotonic
    perf_s: Callable[[], float] = time.perf_counter


class WallClock:
    """Unix time without short jumps; may be read from any thread."""

    def __init__(self, clock: Clock, *, log: logging.Logger) -> None:
        self.jumps = 0  # seen so far
        self.jump_s = 0.0  # the last one: how far it went ahead, or back
        self._clock, self._log = clock, log
        self._lock = threading.Lock()
        # When wall and monotonic clock were last believed together.
        self._wall_ns, self._monotonic_s = clock.now_ns(), clock.monotonic_s()
        self._doubted_ns: int | None = None  # the jump that is not followed yet
        self._doubted_since_s = 0.0

    @property
    def steady(self) -> Clock:
        """A Clock whose wall time is this one's."""
        return replace(self._clock, now_ns=self.now_ns)

    def now_ns(self) -> int:
        """Returns nanoseconds since 1970."""
        with self._lock:
            wall_ns, now_s = self._clock.now_ns(), self._clock.monotonic_s()
            expected_ns = self._wall_ns + int((now_s - self._monotonic_s) * 1e9)
            off_ns = wall_ns - expected_ns
            if abs(off_ns) <= JUMP_S * 1e9:
                if self._doubted_ns is not None:
                    self._doubted_ns = None
                    self._log.warning("clock=back jump_s=%.3f followed=no", self.jump_s)
            elif self._doubted_ns is None or abs(off_ns - self._doubted_ns) > JUMP_S * 1e9:
                self._doubted_ns, self._doubted_since_s = off_ns, now_s
                self.jumps += 1
                self.jump_s = off_ns / 1e9
                self._log.warning("clock=jumped jump_s=%.3f followed_in_s=%g", self.jump_s, FOLLOWED_S)
                return expected_ns
            elif now_s - self._doubted_since_s < FOLLOWED_S:
                return expected_ns
            else:
                self._doubted_ns = None
                self._log.warning("clock=followed jump_s=%.3f", self.jump_s)
            self._wall_ns, self._monotonic_s = wall_ns, now_s
            return wall_ns


class RecentLatencies:
    """The last `most` durations."""

    def __init__(self, most: int) -> None:
        self._window: deque[float] = deque(maxlen=most)
        self._sorted: list[float] | None = None
        self.count = 0

    def add(self, latency_s: float) -> None:
        """Adds one duration, which replaces the oldest."""
        self._window.append(latency_s)
        self._sorted = None
        self.count += 1

    def quantile(self, q: float) -> float:
        """Returns the smallest duration that a share `q` of the window does not exceed; 0 if the window is empty."""
        if not self._window:
            return 0.0
        if self._sorted is None:
            self._sorted = sorted(self._window)
        rank = -(-q * len(self._sorted) // 1)
        return self._sorted[max(0, int(rank) - 1)]
