"""The live page's hub: one view for all viewers, updated once a second, with frames encoded once.

`LoopSource` feeds it from a running controller.
"""

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.server.http.live_columns import GpuColumn, list_held_cells
from eelgrid_controller.server.http.live_model import FleetChange, LiveView, read_earlier_changes
from eelgrid_controller.server.http.live_overview import overview_details
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.journal import JournalHistory
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.node_changes import mark_lost_replicas
from eelgrid_controller.state.telemetry import NodeTick, Telemetry
from eelgrid_protos.faults import NotFound
from eelgrid_protos.messages import BudgetStatus, Explanation, ListPromisesResponse, Overview

_Result = TypeVar("_Result")
FRAME_INTERVAL_S = 1.0
FRAMES_KEPT = 16
_NODES_A_SLICE = 100
# A gzip member's header: deflate, no name, no time, an unknown system.
PACKED_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
# A whole picture of 10,000 GPUs: 259 kB become 30 kB in 1.4 ms; level 6 saves another 7 kB in thrice the time.
_PACKED_LEVEL = 1


class ViewerBehind(Exception):
    """A viewer is too far behind, or the hub has closed; it may come again."""


@dataclass(frozen=True)
class EventBytes:
    """Some events of the stream, as they are and packed; the packing is done when somebody first takes it."""

    plain: bytes

    @cached_property
    def packed(self) -> bytes:
        """Deflate blocks that may follow `PACKED_HEAD` or one another."""
        packer = zlib.compressobj(_PACKED_LEVEL, wbits=-zlib.MAX_WBITS)
        return packer.compress(self.plain) + packer.flush(zlib.Z_SYNC_FLUSH)


class LoopSource:
    """Where the page's numbers come from: a running controller."""

    def __init__(
        self,
        loop: ControllerLoop,
        telemetry: Telemetry,
        *,
        promises: Callable[[], ListPromisesResponse],
        budgets: Callable[[], Sequence[BudgetStatus]],
        overview: Callable[[], Awaitable[Overview]],
        idle_gpus: Callable[[], Awaitable[frozenset[tuple[str, int]]]],
        clock: Clock,
    ) -> None:
        self.telemetry = telemetry
        # How promises are kept now.
        self.promises = promises
        # The budgets alone, since every frame has them.
        self.budgets = budgets
        # What GetOverview answers.
        self.overview = overview
        # Node and index of each held GPU that the overview counts as idle.
        self.idle_gpus = idle_gpus
        self._loop = loop
        self._clock = clock

    def read(self, view: Callable[[ClusterState], _Result]) -> Awaitable[_Result]:
        """What a view makes of the state when all of it is on disk."""
        return self._loop.read(lambda core: view(core.state))

    async def explain_workload(self, workload_id: str) -> Explanation | None:
        """Why a workload stands where it stands; None for one that is not known."""

        def view(core: Core) -> Explanation:
            explanation = core.explain_workload(workload_id)
            return replace(explanation, workload=mark_lost_replicas(explanation.workload, core.state.nodes))

        try:
            return await self._loop.read(view)
        except NotFound:
            return None

    def read_history(self) -> JournalHistory:
        """What the journal tells of before now; for any thread. Raises JournalError."""
        return self._loop.journal.read_history()

    def current_state(self) -> ClusterState:
        """The state at this moment, for a listener of commits."""
        return self._loop.core.state

    def now_s(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic_s()

    def now_ns(self) -> int:
        """Nanoseconds since 1970."""
        return self._clock.now_ns()


class LiveHub:
    """Moves the board on and holds its frames; used from one event loop."""

    def __init__(self, source: LoopSource, *, log: logging.Logger, every_s: float = FRAME_INTERVAL_S) -> None:
        self.board = LiveView()
        self.viewers = 0
        self._source = source
        self._log = log
        self._every_s = every_s
        self._frames: deque[tuple[int, EventBytes]] = deque(maxlen=FRAMES_KEPT)
        self._whole: tuple[tuple[int, int], EventBytes] = ((-1, -1), EventBytes(b""))
        self._news = asyncio.Event()
        self._turning = asyncio.Lock()
        self._turned_s = float("-inf")
        self._closed = False
        self._reading = asyncio.Lock()
        self._earlier: tuple[int, list[FleetChange], bool] = (-1, [], False)
        self._columns: dict[str, tuple[float, msgspec.Raw]] = {}
        self._column_lock = asyncio.Lock()
        self._overview: tuple[Overview | None, msgspec.Raw] = (None, msgspec.Raw())

    def on_commit(self, committed: CommitResult) -> None:
        """A commit is on disk."""
        self.board.on_commit(committed.events, self._source.current_state(), committed.revision)

    async def run(self) -> None:
        """Move on until cancelled."""
        while True:
            start_s = self._source.now_s()
            try:
                await self._beat()
            except Exception:  # noqa: BLE001  # a fault in one frame must not end the page for good
                self._log.exception("page=failed frame=%d", self.board.frame)
            await asyncio.sleep(max(0.05, self._every_s - (self._source.now_s() - start_s)))

    def close(self) -> None:
        """Let every viewer go."""
        self._closed = True
        self._notify_viewers()

    async def _beat(self) -> None:
        source = self._source
        power = source.telemetry.fresh_power(now_s=source.now_s(), now_ns=source.now_ns())
        self.board.add_power_point(power, now_ns=source.now_ns())
        if self.viewers:
            await self._refresh()
        else:
            await source.read(self.board.sync_nodes)

    async def _refresh(self, *, unless_s: float = 0.0) -> None:
        """Look at every node, and tell what changed; not if that was done less than so many seconds ago."""
        async with self._turning:
            source, board = self._source, self.board
            if source.now_s() - self._turned_s < unless_s:
                return
            era = board.fleet.era
            await source.read(board.sync_nodes)
            await self._visit_nodes(lambda _state, record: board.fleet.update_node(record, self._fresh_tick(record)))
            # Nothing may come between: viewers number their frames by this.
            frame = await source.read(lambda state: board.delta_frame(state, source.budgets(), now_ns=source.now_ns()))
            is_whole = board.fleet.era != era
            body = self._whole_now() if is_whole else _event("delta", board.frame, frame)
            self._frames.append((board.frame, body))
            self._turned_s = source.now_s()
            self._notify_viewers()

    def _fresh_tick(self, record: NodeRecord) -> NodeTick | None:
        source = self._source
        return source.telemetry.fresh_tick(record.inventory.node_name, now_s=source.now_s(), now_ns=source.now_ns())

    def _notify_viewers(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _whole_now(self) -> EventBytes:
        # Without viewers cells may be numbered anew between two frames.
        mark = (self.board.frame, self.board.fleet.era)
        if self._whole[0] != mark:
            whole = self.board.full_frame(now_ns=self._source.now_ns())
            self._whole = (mark, _event("whole", self.board.frame, whole))
        return self._whole[1]

    async def full_frame(self) -> tuple[int, EventBytes]:
        """Everything, and the number of the frame that it is; as of a second ago at most."""
        # Many may come at once, as after a restart: one of them looks for all.
        await self._refresh(unless_s=2.0 * self._every_s)
        return self.board.frame, self._whole_now()

    async def read_earlier_changes(self, before: int) -> dict[str, Any]:
        """Rows of changes before the one of this number, from the journal, and whether it has more. Raises JournalError.

        Read by one thread at a time; what was read last is kept, for many ask for the same after a restart.
        """
        async with self._reading:
            if self._earlier[0] != before:
                found, has_more = await asyncio.to_thread(
                    lambda: read_earlier_changes(self._source.read_history(), before)
                )
                self._earlier = before, found, has_more
            _, changes, has_more = self._earlier
        return {"era": self.board.fleet.era, "changes": self.board.change_rows(changes), "has_more": has_more}

    async def read_overview(self) -> msgspec.Raw:
        """Returns the overview as JSON, encoded once for all viewers."""
        found = await self._source.overview()
        if self._overview[0] is not found:
            self._overview = found, msgspec.Raw(msgspec.json.encode(overview_details(found)))
        return self._overview[1]

    async def read_column(self, name: str) -> msgspec.Raw:
        """Returns a column of the map as JSON, as of a frame's interval ago at most."""
        source, fleet = self._source, self.board.fleet
        async with self._column_lock:
            read_s, body = self._columns.get(name, (float("-inf"), msgspec.Raw()))
            if source.now_s() - read_s < self._every_s:
                return body
            await source.read(self.board.sync_nodes)
            idle = await source.idle_gpus() if name == "idle" else frozenset[tuple[str, int]]()
            column = GpuColumn(name, fleet, idle)

            await self._visit_nodes(lambda state, record: column.add_node(state, record, self._fresh_tick(record)))
            body = msgspec.Raw(msgspec.json.encode(column.finish()))
            self._columns[name] = source.now_s(), body
            return body

    async def list_held_cells(self, namespace: str, user: str) -> dict[str, Any]:
        """Lists the GPUs that work of a user in a namespace holds."""
        fleet = self.board.fleet
        await self._source.read(self.board.sync_nodes)
        era, cells = fleet.era, list[int]()
        await self._visit_nodes(
            lambda state, record: cells.extend(list_held_cells(state, record, fleet, namespace=namespace, user=user))
        )
        return {"era": era, "cells": cells}

    async def _visit_nodes(self, visit: Callable[[ClusterState, NodeRecord], None]) -> None:
        """Visits all nodes, some at a time, so that everything else goes on in between."""
        names = await self._source.read(lambda state: list(state.nodes))

        def visit_part(state: ClusterState, part: Sequence[str]) -> None:
            for name in part:
                if (record := state.nodes.get(name)) is not None:
                    visit(state, record)

        for start in range(0, len(names), _NODES_A_SLICE):
            part = names[start : start + _NODES_A_SLICE]
            await self._source.read(lambda state, part=part: visit_part(state, part))  # type: ignore[misc]
            await asyncio.sleep(0)

    async def frames_after(self, frame: int) -> tuple[int, Sequence[EventBytes]]:
        """The frames after this one, once there are some; raises Behind."""
        while not self._closed and self.board.frame <= frame:
            await self._news.wait()
        kept = [(number, body) for number, body in self._frames if number > frame]
        if self._closed or not kept or kept[0][0] != frame + 1:
            raise ViewerBehind
        return kept[-1][0], [body for _, body in kept]


def _event(kind: str, frame: int, body: dict[str, Any]) -> EventBytes:
    """One server-sent event; the body's JSON has no line breaks."""
    return EventBytes(b"id: %d\nevent: %s\ndata: %s\n\n" % (frame, kind.encode(), msgspec.json.encode(body)))
