"""Divisions of watts, worked out one at a time in a thread of their own, beside the turns.

Owns that thread and the answers that wait to be heard. Must not know how watts are divided.

Only the newest question waits: an older one is void. A question that cannot be answered is
told as such, and asked again when it is due.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from eelgrid_controller.steering.dividing import solved
from eelgrid_controller.steering.events import Divide
from eelgrid_controller.steering.sharing import Shared

__all__ = ["Divisions"]


class Divisions:
    """Questions in, answers out; used from one event loop."""

    def __init__(
        self, *, answered: asyncio.Event, seconds: Callable[[float], None], perf_s: Callable[[], float],
        log: logging.Logger,
    ) -> None:  # fmt: skip
        """`answered` is set with each answer, `seconds` hears how long it took."""
        self._answered, self._seconds, self._perf_s, self._log = answered, seconds, perf_s, log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dividing")
        self._next: Divide | None = None
        self._working: asyncio.Task[None] | None = None
        self._found: list[tuple[int, Shared | None]] = []

    def ask(self, division: Divide) -> None:
        """Work this out next."""
        self._next = division
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())

    def take(self) -> tuple[tuple[int, Shared | None], ...]:
        """The answers since the last time, by number."""
        taken, self._found = tuple(self._found), []
        return taken

    async def idle(self) -> None:
        """Until nothing is asked."""
        if self._working is not None:
            await self._working

    def stop(self) -> None:
        """Hear of nothing more."""
        if self._working is not None:
            self._working.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        while (division := self._next) is not None:
            self._next = None
            shared: Shared | None = None
            start_s = self._perf_s()
            try:
                shared = await asyncio.get_running_loop().run_in_executor(self._thread, solved, division.problem)
            except Exception:  # noqa: BLE001  # watts stay shared as they are until the next
                self._log.exception("division=failed number=%d", division.number)
            self._seconds(self._perf_s() - start_s)
            self._found.append((division.number, shared))
            self._answered.set()
