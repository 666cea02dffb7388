"""Simulated time: one queue of what happens when, one source of chance, one trace.

Owns the order of everything: by true time, then by when it was put in. Must
not know what happens. The trace is a hash over every noted fact in order, so
that two runs were the same if and only if their traces are.
"""

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable

from tests.sim.clock import SECOND_NS

__all__ = ["Timeline"]

_RECENT_MOST = 60


class Timeline:
    """See the module."""

    def __init__(self, seed: int) -> None:
        self.now_ns = 0
        self.steps = 0
        # What comes out decides everything, so everyone draws from this one.
        self.seed = seed
        self.rng = random.Random(seed)
        self.recent: deque[str] = deque(maxlen=_RECENT_MOST)
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Runs the action after a delay of true time."""
        self._count += 1
        heapq.heappush(self._queue, (self.now_ns + max(0, delay_ns), self._count, action))

    def step(self) -> None:
        """The next thing happens."""
        self.now_ns, _, action = heapq.heappop(self._queue)
        self.steps += 1
        action()

    def chance(self, probability: float) -> bool:
        """True that often."""
        return self.rng.random() < probability

    def draw_ns(self, most_ns: int) -> int:
        """A span up to `most_ns`."""
        return self.rng.randrange(most_ns + 1)

    def note(self, text: str) -> None:
        """Puts a fact into the trace and among the recent ones."""
        self.recent.append(f"{self.now_ns / SECOND_NS:11.6f} {text}")
        self.mark(text.encode())

    def mark(self, data: bytes) -> None:
        """Puts bytes into the trace alone."""
        self._hash.update(b"%d %d " % (self.now_ns, len(data)))
        self._hash.update(data)

    @property
    def trace(self) -> str:
        """The hash so far."""
        return self._hash.hexdigest()
