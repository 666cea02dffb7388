"""Calls of a journal from the event loop: where a commit runs, and when a checkpoint is written.

`JournalWriter` commits in the event loop's own thread while a disk of ours is fast, and in a thread of its own while it is
slow or where the journal is on another machine; `CheckpointWriter` decides when a checkpoint is written, and makes it in
steps between batches of commands. Must not know commands.

Theory: the state of one revision is taken over at once, ten milliseconds for 10,000 nodes, and then encoded in steps of at
most STEP_S while commands go on. Only what is written at the end holds them up. Until then nothing is stored: a crash leaves
the checkpoint before.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.recovery import encode_entries
from eelgrid_controller.errors import JournalError, JournalFull
from eelgrid_controller.runtime.config import ControllerConfig
from eelgrid_controller.runtime.journal_rows import CheckpointEncoder
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event
from eelgrid_controller.state.journal import CheckpointRow, Journal
from eelgrid_controller.state.state_dump import DumpPart
from eelgrid_protos.faults import Fault, ResourceExhausted, Unavailable
from eelgrid_protos.messages import AuditEntry

_Result = TypeVar("_Result")
# A commit that takes longer moves commits to the thread, until a number in a row were quick.
_SLOW_COMMIT_S = 0.010
_QUICK_IN_A_ROW = 3
# Delay after a failed checkpoint.
_CHECKPOINT_AGAIN_S = 30.0
# How long a step of a checkpoint holds commands up, and the pause after one while none waits.
STEP_S = 0.002
STEP_PAUSE_S = 0.004


class JournalWriter:
    """Calls a journal from one event loop, one call at a time."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._quick = 0

    async def append(self, events: tuple[Event, ...], audited: tuple[AuditEntry, ...] = ()) -> tuple[int, float]:
        """Writes events and audit entries to disk; returns the number of the last event and the seconds taken.

        Raises JournalError.
        """

        def write() -> int:
            entries = encode_entries(events)
            return self._journal.append(entries, audited) if audited else self._journal.append(entries)

        start_s = self._clock.perf_s()
        last = write() if self._quick >= _QUICK_IN_A_ROW else await self.run_in_thread(write)
        taken_s = self._clock.perf_s() - start_s
        self._quick = self._quick + 1 if taken_s <= _SLOW_COMMIT_S and not self._journal.is_remote else 0
        return last, taken_s

    async def run_in_thread(self, call: Callable[[], _Result]) -> _Result:
        """Runs `call` in the journal's thread and returns its result: for anything longer than a commit."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """Ends the thread; the journal stays open."""
        self._thread.shutdown()


def journal_fault(error: JournalError) -> Fault:
    """Converts a journal error into the fault that callers get."""
    return ResourceExhausted(str(error)) if isinstance(error, JournalFull) else Unavailable(str(error))


class _Encoding:
    """A checkpoint that is being encoded."""

    def __init__(self, state: ClusterState, events: int, now_s: float) -> None:
        self.events, self.began_s, self.revision = events, now_s, state.revision
        self._parts: Iterator[DumpPart] = state.begin_dump().parts()
        self._encoder = CheckpointEncoder(state.revision)

    def advance(self, now_s: Callable[[], float], budget_s: float) -> CheckpointRow | None:
        """Encodes for about `budget_s`; returns the row once it is complete."""
        until_s = now_s() + budget_s
        for part in self._parts:
            self._encoder.add_part(part)
            if now_s() >= until_s:
                return None
        return self._encoder.finish()


class CheckpointWriter:
    """Decides when to write a checkpoint of one journal, and writes it step by step."""

    def __init__(
        self, journal: Journal, writer: JournalWriter, *, config: ControllerConfig, clock: Clock, log: logging.Logger
    ) -> None:
        self.events = 0  # since the last checkpoint
        self._journal = journal
        self._writer = writer
        self._config = config
        self._clock = clock
        self._log = log
        self._not_before_s = 0.0
        self._encoding: _Encoding | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint is begun and not yet stored."""
        return self._encoding is not None

    def is_due(self, *, idle_s: float) -> bool:
        """Returns whether to go on now, or to begin.

        One begins at the hard bound, or after enough events once the loop has been idle this long.
        """
        if self._encoding is not None:
            return True
        if self._clock.monotonic_s() < self._not_before_s or self.events < self._config.checkpoint_events:
            return False
        return idle_s >= self._config.checkpoint_idle_s or self.events >= self._config.checkpoint_events_most

    async def advance(self, state: ClusterState, budget_s: float = STEP_S) -> None:
        """Takes a step towards a checkpoint of the state as it was at the first step; the last one stores it.

        The state must be that of the journal's last entry at the first step. Raises JournalFenced.
        """
        encoding = self._encoding = self._encoding or _Encoding(state, self.events, self._clock.perf_s())
        row = encoding.advance(self._clock.perf_s, budget_s)
        if row is not None:
            self._encoding = None
            await self._store(row, encoding)

    async def write(self, state: ClusterState) -> None:
        """Writes a checkpoint of the state at once; one under way is given up."""
        self._encoding = None
        await self.advance(state, float("inf"))

    async def _store(self, row: CheckpointRow, done: _Encoding) -> None:
        try:
            await self._writer.run_in_thread(lambda: self._journal.write_checkpoint(row))
        except JournalError as error:
            # The entries are still in the journal; only the next start is slower.
            self._log.warning("checkpoint=failed error=%s", error)
            self._not_before_s = self._clock.monotonic_s() + _CHECKPOINT_AGAIN_S
            return
        self._log.info(
            "checkpoint=written revision=%d events=%d seconds=%.3f",
            done.revision,
            done.events,
            self._clock.perf_s() - done.began_s,
        )
        self.events = max(0, self.events - done.events)
