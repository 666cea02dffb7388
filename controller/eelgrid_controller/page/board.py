"""The board: one picture of the cluster that all viewers share, told whole once and then as what changed.

Owns the numbering of frames and what stands in them. Must not know viewers, bytes or clocks.
A frame is made of plain values: dicts, lists, numbers and texts.

    board.step(state)              whether cells or the state's history are no longer the same: tell all anew
    board.look(records, ticks)     some nodes at a time, so that a loop can rest in between
    board.delta(...)               the next frame; `whole` is the picture after it
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from eelgrid_controller.events import Event
from eelgrid_controller.ledger import NodeRecord
from eelgrid_controller.page.fleet import Fleet
from eelgrid_controller.page.glance import Budgets, counts, queue
from eelgrid_controller.page.history import Change, History
from eelgrid_controller.state import ClusterState
from eelgrid_controller.telemetry import PowerSums, Tick

__all__ = ["POWER_POINTS_MOST", "Board"]

# Ten minutes by the second.
POWER_POINTS_MOST = 600


class Board:
    """The picture and its frames."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.history = History()
        self.frame = 0
        self._budgets = Budgets()
        self._power: deque[list[float]] = deque(maxlen=POWER_POINTS_MOST)
        self._state: ClusterState | None = None
        self._told_number = 0
        self._glance: dict[str, Any] = {}

    def step(self, state: ClusterState) -> bool:
        """Brings cells and history up to a state; whether viewers need the whole picture for it."""
        if self._state is not state:
            self._state = state
            self.history.begin(state.workloads, state.revision)
            self.fleet.build(state.nodes)
            return True
        if self.fleet.fits(state.nodes):
            return False
        self.fleet.build(state.nodes)
        return True

    def committed(self, events: Sequence[Event], state: ClusterState, revision: int) -> None:
        """Takes a commit into the history; the state is as it is after it, at this revision."""
        if self._state is state:
            self.history.take(events, state.workloads, revision)

    def look(self, seen: Iterable[tuple[NodeRecord, Tick | None]]) -> None:
        """Takes some nodes in, each with its fresh tick."""
        for record, tick in seen:
            self.fleet.look(record, tick)

    def measured(self, power: PowerSums, *, now_ns: int) -> None:
        """One more point of the line of power: (ms since 1970, W); nothing where nothing was read."""
        if power.gpus:
            self._power.append([now_ns // 1_000_000, round(power.power_w)])

    def delta(self, state: ClusterState, *, now_ns: int) -> dict[str, Any]:
        """The next frame: what changed since the one before, and the glance where it did."""
        self.frame += 1
        new = self.history.after(self._told_number)
        self._told_number = self.history.number
        glance = self._glanced(state)
        changed = {key: value for key, value in glance.items() if self._glance.get(key) != value}
        self._glance = glance
        frame: dict[str, Any] = {"frame": self.frame, "at_ms": now_ns // 1_000_000, **changed, **self.fleet.delta()}
        if self._power:
            frame["power"] = self._power[-1]
        if new:
            frame["changes"] = self.rows(new)
            frame["changes_from"] = self.history.oldest
        return frame

    def whole(self, *, now_ns: int) -> dict[str, Any]:
        """The picture as of the last frame."""
        return {
            "frame": self.frame,
            "at_ms": now_ns // 1_000_000,
            **self.fleet.whole(),
            **self._glance,
            "power_line": list(self._power),
            "changes": self.rows(change for change in self.history.changes if change.number <= self._told_number),
            "changes_from": self.history.oldest,
        }

    def _glanced(self, state: ClusterState) -> dict[str, Any]:
        return {"counts": counts(state), "queue": queue(state), "budgets": self._budgets.rows(state, self.fleet)}

    def rows(self, changes: Iterable[Change]) -> list[list[Any]]:
        """[number, ms, kind, workload, words, [cell, milli, cell, milli, ...]]; GPUs that are gone are left out."""
        rows: list[list[Any]] = []
        for one in changes:
            pairs: list[int] = []
            for node_name, uuid, milli in one.milli:
                if (cell := self.fleet.cell(node_name, uuid)) is not None:
                    pairs += [cell, milli]
            rows.append([one.number, one.time_ns // 1_000_000, one.kind, one.workload_id, one.words, pairs])
        return rows
