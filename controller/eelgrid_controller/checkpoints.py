"""Checkpoints: when the state is copied to disk, and how.

Owns how many events came since the last one, and the pause after one that failed. Must not
know who waits meanwhile, nor what is in a state.
"""

import logging

from eelgrid_controller.clock import Clock
from eelgrid_controller.config import ControllerConfig
from eelgrid_controller.errors import JournalError
from eelgrid_controller.journal import Checkpoint, Journal, digest_of
from eelgrid_controller.state import ClusterState
from eelgrid_controller.writer import JournalWriter

__all__ = ["Checkpoints"]

_AGAIN_S = 30.0


class Checkpoints:
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
            self._journal.checkpoint(Checkpoint(state.revision, plain, digest_of(plain)))

        start_s = self._clock.perf_s()
        try:
            await self._writer.in_thread(write)
        except JournalError as error:
            # Entries are still there; only the next start is slower.
            self._log.warning("checkpoint=failed error=%s", error)
            self._not_before_s = self._clock.monotonic_s() + _AGAIN_S
            return
        self._log.info(
            "checkpoint=written revision=%d events=%d seconds=%.3f",
            state.revision, self.events, self._clock.perf_s() - start_s,
        )  # fmt: skip
        self.events = 0
