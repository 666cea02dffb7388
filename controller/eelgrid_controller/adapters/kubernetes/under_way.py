"""Work beside a loop: begun and forgotten, unless it fails, and ended with the loop.

Owns the tasks. Must not know what they do. asyncio holds its tasks weakly, so somebody has to
hold them; an error that nobody awaits is logged when its task ends.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

__all__ = ["UnderWay"]


class UnderWay:
    """The tasks of one loop."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        """`what` is how the log names the loop."""
        self._log = log
        self._what = what
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Go on without it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def end(self) -> None:
        """Cancel all, and wait until they are gone."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error("%s=task_failed", self._what, exc_info=task.exception())
