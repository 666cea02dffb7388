"""Writing to the journal from the event loop: commits and checkpoints.

`JournalWriter` writes in place while the disk is fast and in its own thread while it is slow; `CheckpointWriter`
decides when the state is copied to disk.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.recovery import encode_entries
from eelgrid_controller.errors import JournalError, JournalFull
from eelgrid_controller.runtime.config import ControllerConfig
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event
from eelgrid_controller.state.journal import Checkpoint, Journal, digest_of
from eelgrid_protos.faults import Fault, ResourceExhausted, Unavailable
from eelgrid_protos.messages import AuditEntry

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
            entries = encode_entries(events)
            return self._journal.append(entries, audited) if audited else self._journal.append(entries)

        start_s = self._clock.perf_s()
        last = write() if self._quick >= _QUICK_IN_A_ROW else await self.run_in_thread(write)
        taken_s = self._clock.perf_s() - start_s
        self._quick = self._quick + 1 if taken_s <= _SLOW_COMMIT_S else 0
        return last, taken_s

    async def run_in_thread(self, call: Callable[[], _Result]) -> _Result:
        """What `call` returns: for anything that takes longer than a commit."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """End the thread; the journal stays open."""
        self._thread.shutdown()


def journal_fault(error: JournalError) -> Fault:
    """What callers hear of a disk that takes nothing."""
    return ResourceExhausted(str(error)) if isinstance(error, JournalFull) else Unavailable(str(error))


_AGAIN_S = 30.0


class CheckpointWriter:
    """Of one journal."""

    def __init__(
        self, journal: Journal, writer: JournalWriter, *, config: ControllerConfig, clock: Clock, log: logging.Logger
    ) -> None:
        self.events = 0  # since the last one
        self._journal = journal
        self._writer = writer
        self._config = config
        self._clock = clock
        self._log = log
        self._not_before_s = 0.0

    def is_due(self, *, idle_s: float) -> bool:
        """At the hard bound, or when enough has gathered and nobody has waited for so long."""
        if self._clock.monotonic_s() < self._not_before_s or self.events < self._config.checkpoint_events:
            return False
        return idle_s >= self._config.checkpoint_idle_s or self.events >= self._config.checkpoint_events_most

    async def write(self, state: ClusterState) -> None:
        """Copy the state to disk; the owner waits here, so the state stands still, while readers go on."""

        def write() -> None:
            plain = state.dump()
            self._journal.write_checkpoint(Checkpoint(state.revision, plain, digest_of(plain)))

        start_s = self._clock.perf_s()
        try:
            await self._writer.run_in_thread(write)
        except JournalError as error:
            # Entries are still there; only the next start is slower.
            self._log.warning("checkpoint=failed error=%s", error)
            self._not_before_s = self._clock.monotonic_s() + _AGAIN_S
            return
        self._log.info(
            "checkpoint=written revision=%d events=%d seconds=%.3f",
            state.revision,
            self.events,
            self._clock.perf_s() - start_s,
        )
        self.events = 0
