"""The way to the disk: in place while the disk is quick, in a thread of its own while it is not.

Owns that choice and the thread. Must not know what is written.

Theory: handing a commit to a thread and being woken costs more than a quick
disk's commit itself (measured over 2,000 submissions, one at a time: median
4.0 ms from call to answer through a thread, 2.7 ms in place). But a disk that
stalls must not hold up agents' streams and readers, so a disk is taken for slow
at the start and after each slow commit, until a few quick ones in a row.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from eelgrid_controller.clock import Clock
from eelgrid_controller.errors import JournalError, JournalFull
from eelgrid_controller.events import Event
from eelgrid_controller.journal import Journal
from eelgrid_controller.recovery import entries_of
from eelgrid_protos.faults import Fault, ResourceExhausted, Unavailable
from eelgrid_protos.messages import AuditEntry

__all__ = ["JournalWriter", "fault_of"]

_Result = TypeVar("_Result")
_SLOW_COMMIT_S = 0.010
_QUICK_IN_A_ROW = 3


class JournalWriter:
    """Calls a journal from one event loop; one call at a time."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._quick = 0

    async def append(self, events: tuple[Event, ...], audited: tuple[AuditEntry, ...] = ()) -> tuple[int, float]:
        """Put events and the audit log's entries on disk; the number of the last event and the seconds taken.

        Raises JournalError.
        """

        def write() -> int:
            entries = entries_of(events)
            return self._journal.append(entries, audited) if audited else self._journal.append(entries)

        start_s = self._clock.perf_s()
        last = write() if self._quick >= _QUICK_IN_A_ROW else await self.in_thread(write)
        taken_s = self._clock.perf_s() - start_s
        self._quick = self._quick + 1 if taken_s <= _SLOW_COMMIT_S else 0
        return last, taken_s

    async def in_thread(self, call: Callable[[], _Result]) -> _Result:
        """What `call` returns: for anything that takes longer than a commit."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """End the thread; the journal stays open."""
        self._thread.shutdown()


def fault_of(error: JournalError) -> Fault:
    """What callers hear of a disk that takes nothing."""
    return ResourceExhausted(str(error)) if isinstance(error, JournalFull) else Unavailable(str(error))
