"""Withheld starts: when pending work may start again on a journal that may lack its last entries.

Owns the wait of one controller: as long as agents may take to come back after a start, and until those of all nodes that
are there have said what they hold. Must not know how entries are lost (state/journal_losses.py), nor what agents tell.
"""

import asyncio
import logging
from typing import Any

from eelgrid_controller.state.cluster_state import ClusterState

# A resumption that could not be written is tried again.
_AGAIN_S = 2.0


class WithheldStarts:
    """The wait until withheld work may start."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._resume_at_s = 0.0
        self._is_logged = False

    def begin(self, resume_at_s: float) -> None:
        """Begins the wait with the controller, until this time of its monotonic clock at the least."""
        self._resume_at_s = resume_at_s

    def is_resumption_due(self, state: ClusterState, now_s: float) -> bool:
        """Returns whether withheld work may start now, as far as is known; then it is no more due for a while."""
        if not state.losses.withholds_starts:
            return False
        if not self._is_logged:
            self._is_logged = True
            self._log.warning(
                "starts=withheld seconds=%.0f reason='the journal may lack its last entries' remedy='none is needed: "
                "agents are to say what they hold'",
                max(0.0, self._resume_at_s - now_s),
            )
        if now_s < self._resume_at_s or state.awaits_known_agents:
            return False
        self._resume_at_s = now_s + _AGAIN_S
        return True

    def on_resumed(self, answer: asyncio.Future[Any]) -> None:
        """Takes the answer of the resumption."""
        if not answer.cancelled() and answer.exception() is None:
            self._is_logged = False
            self._log.info("starts=resumed")
