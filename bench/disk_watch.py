"""When a disk was slow: a thread that flushes a block beside a measurement, as a journal does.

A machine's disk may take a quarter of a second for a flush that takes it 2 ms otherwise, while other machines use it.
Whatever waits for the disk waits then, so a tail that is measured beside such flushes is the disk's.
"""

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_PERIOD_S = 0.02
_BLOCK = b"\0" * 4096


class DiskWatch:
    """Flushes one block of a file in `folder` every 20 ms while it is entered, and keeps when each began and ended."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "disk-watch"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._flush, name="disk watch", daemon=True)
        self.flushes: list[tuple[int, int]] = []
        """Begin and end of each, in nanoseconds since the epoch."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            while not self._stop.wait(_PERIOD_S):
                begun_ns = time.time_ns()
                os.pwrite(file, _BLOCK, 0)
                os.fdatasync(file)
                self.flushes.append((begun_ns, time.time_ns()))
        finally:
            os.close(file)

    def list_flush_seconds(self) -> list[float]:
        """Returns how long each flush took."""
        return [(ended - begun) / 1e9 for begun, ended in self.flushes]

    def is_slow_within(self, begun_ns: int, ended_ns: int, slow_s: float) -> bool:
        """Tells whether a flush of more than `slow_s` overlaps these moments."""
        return any(
            (ended - begun) / 1e9 > slow_s and begun < ended_ns and ended > begun_ns for begun, ended in self.flushes
        )
