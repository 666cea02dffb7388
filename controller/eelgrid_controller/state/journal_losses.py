"""Journal losses: what follows from entries that were lost, or may be, and from writes that were withdrawn.

Theory. A journal goes back when its files are restored from a copy, and when an asynchronous standby of its database is
promoted; the second shows by the timeline of the database's log, which each promotion raises. Work that waits in such a
journal may have been started by the entries that it lacks, and may run or have ended since. Only agents know, also those
of nodes that joined in these entries. So nothing starts until all of them have had the time to come back, and what they
tell meanwhile is believed (core/nodes.py). Until then starts are withheld, across restarts of the controller. Must not
know when agents have come back.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, Self

from eelgrid_controller.state.takeover_events import (
    ControllerStarted,
    JournalRolledBack,
    LossEvent,
    PlansWithdrawn,
    StartsResumed,
)

# Number of entries that a lost tail is assumed to have had if it is unknown.
_LOST_MOST = 1_000_000
_KEPT = ("rollbacks", "withdrawn_epoch", "timeline", "withheld_ns")


class JournalLosses:
    """What one journal has lost, or may have."""

    def __init__(self) -> None:
        # How often the loss of acknowledged entries was accepted.
        self.rollbacks = 0
        # The highest plan epoch of a write that was withdrawn; later plans have higher ones.
        self.withdrawn_epoch = 0
        # Of the database's log, in the term of the last controller that started; 0 without one.
        self.timeline = 0
        # Since when nothing starts, since entries may be lost; 0 if work may start.
        self.withheld_ns = 0
        # By workload, the nodes that are ahead of the journal with it; follows from the nodes.
        self.nodes_ahead: dict[str, tuple[str, ...]] = {}

    @property
    def withholds_starts(self) -> bool:
        """Whether nothing starts, since agents may hold work that waits here."""
        return self.withheld_ns > 0

    def is_replaced_by(self, timeline: int) -> bool:
        """Returns whether a database on this timeline replaced the one that had this journal; it may lack entries."""
        # The first timeline has no standby before it.
        return timeline > max(1, self.timeline)

    def apply(self, event: LossEvent) -> int:
        """Follows an event; returns how many ids of workloads may be in use beyond those that this journal gave."""
        match event:
            case PlansWithdrawn():
                self.withdrawn_epoch = max(self.withdrawn_epoch, event.plan_epoch)
            case StartsResumed():
                self.withheld_ns = 0
            case JournalRolledBack():
                self.rollbacks += 1
                # Each entry gave one at most.
                lost = _LOST_MOST if event.last is None else event.last - event.first + 1
                return max(0, min(lost, _LOST_MOST))
            case ControllerStarted():
                is_replaced, self.timeline = self.is_replaced_by(event.timeline), max(self.timeline, event.timeline)
                if event.withholds_starts:
                    self.withheld_ns = max(1, event.time_ns)
                    return _LOST_MOST if is_replaced else 0
        return 0

    def change_unknown_runs(self, node_name: str, before: Iterable[str], now: Iterable[str]) -> None:
        """Changes which workloads a node runs that is ahead of the journal; none for any other node."""
        for key in before:
            left = tuple(name for name in self.nodes_ahead.pop(key) if name != node_name)
            if left:
                self.nodes_ahead[key] = left
        for key in now:
            self.nodes_ahead[key] = (*self.nodes_ahead.get(key, ()), node_name)

    def copy(self) -> Self:
        """Returns an independent copy."""
        twin = copy(self)
        twin.nodes_ahead = self.nodes_ahead.copy()
        return twin

    def dump(self) -> dict[str, int]:
        """Returns what is not 0, as plain JSON values."""
        return {name: value for name in _KEPT if (value := getattr(self, name))}

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Self:
        """Loads it from a checkpoint."""
        losses = cls()
        for name in _KEPT:
            setattr(losses, name, plain.get(name, 0))
        return losses
