"""Columns of the live page's map that only some viewers need: readings, idle GPUs and who holds them.

A page requests them while its map shows them, so that the stream of frames, which every viewer gets, stays small.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from eelgrid_controller.server.grpc.overview import consumer_key
from eelgrid_controller.server.http.live_model import FleetCells
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.telemetry import NodeTick
from eelgrid_protos.messages import Reading

# Of a cell: nothing is read there, or nobody holds it.
UNKNOWN = -1
# Named in a legend or in a table; the rest are counted as others.
NAMES_MOST = 1000

_READINGS: Mapping[str, tuple[Reading, float]] = {
    "utilization": (Reading.UTILIZATION_RATIO, 100.0),
    "temperature": (Reading.TEMPERATURE_C, 1.0),
}
# By its place in a consumer's key.
_OWNERS: Mapping[str, int] = {"namespace": 0, "user": 1}
COLUMNS = frozenset({*_READINGS, *_OWNERS, "idle"})


class GpuColumn:
    """One column over all GPUs, filled node by node.

    `utilization` is in per cent and `temperature` in °C. `namespace` and `user` are indexes into `names` of who holds
    most of the GPU. `idle` is 0 for a GPU that nobody holds, 1 for one that works and 2 for one that is held but idle
    as the overview counts it.
    """

    def __init__(self, name: str, fleet: FleetCells, idle: frozenset[tuple[str, int]] = frozenset()) -> None:
        self.era = fleet.era
        self._name = name
        self._fleet = fleet
        # Node and index of each.
        self._idle = idle
        self._values = np.full(len(fleet), UNKNOWN, np.int32)
        self._names: dict[str, int] = {}
        self._held: Counter[str] = Counter()

    def add_node(self, state: ClusterState, record: NodeRecord, tick: NodeTick | None) -> None:
        """Fills the cells of a node; `tick` is its fresh one."""
        if self._fleet.era != self.era:  # the cells have been numbered anew: the page asks again
            return
        span = self._fleet.span(record.inventory.node_name)
        if (place := _OWNERS.get(self._name)) is not None:
            self._add_owners(state, record, place)
        elif self._name == "idle":
            self._add_idle(record, span)
        elif tick is not None:
            reading, factor = _READINGS[self._name]
            values = tick.gpus.get(reading, ())[: span.stop - span.start]
            self._values[span.start : span.start + len(values)] = [
                UNKNOWN if value is None else round(factor * value) for value in values
            ]

    def _add_owners(self, state: ClusterState, record: NodeRecord, place: int) -> None:
        most: dict[str, int] = {}
        for item in record.assignments.values():
            owner = consumer_key(state.workloads[item.workload_id])[place]
            for uuid in item.gpu_uuids:
                self._held[owner] += item.gpu_milli
                cell = self._fleet.cell(record.inventory.node_name, uuid)
                if cell is not None and item.gpu_milli > most.get(uuid, 0):
                    most[uuid] = item.gpu_milli
                    self._values[cell] = self._names.setdefault(owner, len(self._names))

    def _add_idle(self, record: NodeRecord, span: slice) -> None:
        name = record.inventory.node_name
        for cell, gpu in enumerate(record.inventory.gpus[: span.stop - span.start], span.start):
            is_held = bool(record.gpu_milli.get(gpu.uuid))
            self._values[cell] = is_held + ((name, gpu.index) in self._idle and is_held)

    def finish(self) -> dict[str, Any]:
        """Returns the column as the page reads it; who holds most GPUs is the first of `names`."""
        order = [name for name, _ in self._held.most_common(NAMES_MOST)]
        rank = {name: place for place, name in enumerate(order)}
        if self._names:
            ranks = np.array([rank.get(name, len(order)) for name in self._names], np.int32)
            held = self._values >= 0
            self._values[held] = ranks[self._values[held]]
        return {"era": self.era, "names": order, "values": self._values.tolist()}


def list_held_cells(
    state: ClusterState, record: NodeRecord, fleet: FleetCells, *, namespace: str, user: str
) -> list[int]:
    """Lists the GPUs of a node on which work of this user in this namespace is placed."""
    found: set[int] = set()
    for item in record.assignments.values():
        if consumer_key(state.workloads[item.workload_id]) == (namespace, user):
            cells = (fleet.cell(record.inventory.node_name, uuid) for uuid in item.gpu_uuids)
            found.update(cell for cell in cells if cell is not None)
    return sorted(found)
