"""The fleet as columns: one cell for each GPU, in the order in which nodes joined.

Owns which GPU is which cell, and which cells changed since the last frame. Must not know
how frames are sent, nor clocks: a node is looked at with the tick that is fresh, or with none.

Theory. A cell number stays as long as no node comes or changes its GPUs; then `era` rises and
all is told anew. Looking at a node whose inventory, tick and plan are the same values as
before costs a few comparisons, so a quiet fleet costs next to nothing. Power is in whole
watts: a change below one is told to nobody.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.ledger import NodeRecord
from eelgrid_controller.telemetry import Tick
from eelgrid_protos.messages import Gpu, Inventory, NodeState, Reading

__all__ = ["NO_READING", "CellState", "Fleet"]

NO_READING = -1
# Above this share of changed cells the whole column is shorter than numbers and values.
_WHOLE_ABOVE = 0.4
_GPU_COLUMNS = ("power_w", "held_milli", "state")


class CellState(IntEnum):
    """What to know of a GPU beside its power; the last that holds."""

    OPEN = 0
    CUT = 1  # by MIG
    CORDONED = 2
    GPU_LOST = 3
    NODE_LOST = 4


@dataclass(slots=True)
class _Slot:
    """One node's cells, and what was seen of it last."""

    first: int
    inventory: Inventory
    uuids: tuple[str, ...]
    tick: Tick | None = None
    seen: tuple[object, ...] | None = None


class Fleet:
    """The columns; `look` at each node, then take a `delta`, or everything."""

    def __init__(self) -> None:
        self.era = 0
        self._slots: dict[str, _Slot] = {}
        self._cells: dict[tuple[str, str], int] = {}
        self._columns: dict[str, NDArray[np.int32]] = {}
        self._told: dict[str, NDArray[np.int32]] = {}
        self._slices: dict[int, list[list[Any]]] = {}
        self._sliced: set[int] = set()  # whose slices changed
        self.build({})

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def power_w(self) -> NDArray[np.int32]:
        """(C,) watts of each cell; `NO_READING` where none is fresh."""
        return self._columns["power_w"]

    def fits(self, nodes: Mapping[str, NodeRecord]) -> bool:
        """Whether the cells are still those of these nodes."""
        if len(nodes) != len(self._slots):
            return False
        for name, record in nodes.items():
            slot = self._slots.get(name)
            if slot is None:
                return False
            if slot.inventory is not record.inventory:
                if slot.uuids != tuple(gpu.uuid for gpu in record.inventory.gpus):
                    return False
                # The same GPUs, cut or cordoned otherwise: all of it is looked at anew.
                slot.inventory, slot.seen = record.inventory, None
        return True

    def build(self, nodes: Mapping[str, NodeRecord]) -> None:
        """Cells for these nodes; every node is then to be looked at."""
        self.era += 1
        before = dict(self._cells), self._columns
        self._slots, self._cells, self._slices, self._sliced = {}, {}, {}, set()
        for name, record in nodes.items():
            uuids = tuple(gpu.uuid for gpu in record.inventory.gpus)
            self._slots[name] = _Slot(len(self._cells), record.inventory, uuids)
            for uuid in uuids:
                self._cells[name, uuid] = len(self._cells)
        fresh = {"power_w": NO_READING, "held_milli": 0, "state": int(CellState.OPEN)}
        self._columns = {name: np.full(len(self._cells), fresh[name], np.int32) for name in _GPU_COLUMNS}
        for key, cell in before[0].items():
            if (now := self._cells.get(key)) is not None:
                for name in _GPU_COLUMNS:
                    self._columns[name][now] = before[1][name][cell]
        self._told = {name: column.copy() for name, column in self._columns.items()}

    def cell(self, node_name: str, uuid: str) -> int | None:
        """The number of a GPU; None for one that is not there."""
        return self._cells.get((node_name, uuid))

    def span(self, node_name: str) -> slice:
        """The cells of a node."""
        slot = self._slots[node_name]
        return slice(slot.first, slot.first + len(slot.uuids))

    def look(self, record: NodeRecord, tick: Tick | None) -> None:
        """Takes a node in as it is now; a node that is not `built` yet is passed over."""
        slot = self._slots.get(record.inventory.node_name)
        if slot is None:
            return
        seen = (record.plan_epoch, record.state, tuple(record.lost_gpus), tuple(record.layouts))
        is_same = slot.seen == seen and slot.inventory is record.inventory
        if is_same and slot.tick is tick:
            return
        span = slice(slot.first, slot.first + len(slot.uuids))
        if slot.tick is not tick or not is_same:
            slot.tick = tick
            self.power_w[span] = _powers(tick, len(slot.uuids))
        if is_same:
            return
        if record.inventory is slot.inventory:
            slot.seen = seen
        held, state = self._columns["held_milli"], self._columns["state"]
        for cell, gpu in enumerate(record.inventory.gpus[: len(slot.uuids)], slot.first):
            held[cell] = record.gpu_milli.get(gpu.uuid, 0)
            state[cell] = _state(record, gpu)
            self._cut(cell, _slices(record, gpu))

    def _cut(self, cell: int, slices: list[list[Any]]) -> None:
        if self._slices.get(cell, []) != slices:
            self._slices[cell] = slices
            self._sliced.add(cell)

    def whole(self) -> dict[str, Any]:
        """Everything that a page needs to begin; see docs/explanation/live-page.md. Does not count as told."""
        models: dict[str, int] = {}
        nodes: dict[str, list[Any]] = {"name": [], "rack": [], "pool": [], "first": []}
        gpus: dict[str, list[Any]] = {"model": [], "index": [], "limit_w": []}
        for name, slot in self._slots.items():
            nodes["name"].append(name)
            nodes["rack"].append("/".join(slot.inventory.topology))
            nodes["pool"].append(slot.inventory.pool)
            nodes["first"].append(slot.first)
            for gpu in slot.inventory.gpus[: len(slot.uuids)]:
                gpus["model"].append(models.setdefault(gpu.model, len(models)))
                gpus["index"].append(gpu.index)
                gpus["limit_w"].append(round(gpu.power_limit_default_w or 0.0))
        gpus |= {name: self._told[name].tolist() for name in _GPU_COLUMNS}
        slices = {str(cell): cut for cell, cut in self._slices.items() if cut}
        return {"era": self.era, "models": list(models), "nodes": nodes, "gpus": gpus, "slices": slices}

    def delta(self) -> dict[str, Any]:
        """What changed since the delta before, which is then told: {} for nothing."""
        changed: dict[str, Any] = {}
        for name in _GPU_COLUMNS:
            column, told = self._columns[name], self._told[name]
            (cells,) = np.nonzero(column != told)
            if len(cells) > _WHOLE_ABOVE * len(column):
                changed[name] = {"all": column.tolist()}
            elif len(cells):
                changed[name] = {"at": cells.tolist(), "to": column[cells].tolist()}
            else:
                continue
            told[:] = column
        if self._sliced:
            changed["slices"] = {str(cell): self._slices[cell] for cell in sorted(self._sliced)}
            self._sliced = set()
        return changed


def _powers(tick: Tick | None, count: int) -> NDArray[np.int32]:
    """Whole watts of a node's GPUs."""
    read = () if tick is None else tick.gpus.get(Reading.POWER_W, ())
    found = np.full(count, NO_READING, np.int32)
    for position, power_w in enumerate(read[:count]):
        if power_w is not None:
            found[position] = round(power_w)
    return found


def _state(record: NodeRecord, gpu: Gpu) -> CellState:
    if record.state is NodeState.LOST:
        return CellState.NODE_LOST
    if gpu.uuid in record.lost_gpus:
        return CellState.GPU_LOST
    if gpu.cordon:
        return CellState.CORDONED
    return CellState.CUT if gpu.mig_enabled else CellState.OPEN


def _slices(record: NodeRecord, gpu: Gpu) -> list[list[Any]]:
    """[start, size, profile, whether a replica holds it] of each slice that is there."""
    if not gpu.gpu_instances:
        return []
    held = {(part.profile, part.start) for part in record.slices(gpu.uuid)}
    return [
        [one.start, one.size, one.profile, int((one.profile, one.start) in held)]
        for one in sorted(gpu.gpu_instances, key=lambda one: one.start)
    ]
