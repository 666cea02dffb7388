"""The view of the cluster that all viewers share: sent whole once and then as deltas.

`FleetCells` holds one cell for each GPU; counts, the queue and power by budget complete it.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.server.http.live_model.change_history import ChangeHistory, FleetChange
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import BudgetHierarchy
from eelgrid_controller.state.telemetry import NodeTick, PowerSums
from eelgrid_protos.messages import Gpu, Inventory, NodeState, Policy, Reading, WorkloadPhase

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
    tick: NodeTick | None = None
    seen: tuple[object, ...] | None = None


class FleetCells:
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

    def has_nodes(self, nodes: Mapping[str, NodeRecord]) -> bool:
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

    def update_node(self, record: NodeRecord, tick: NodeTick | None) -> None:
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

    def full_columns(self) -> dict[str, Any]:
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

    def changed_columns(self) -> dict[str, Any]:
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


def _powers(tick: NodeTick | None, count: int) -> NDArray[np.int32]:
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


QUEUE_MOST = 200
REASONS_MOST = 64
BUDGETS_MOST = 50


def count_cluster(state: ClusterState) -> dict[str, int]:
    """How many there are of what."""
    phases = state.phases
    lost = sum(record.state is NodeState.LOST for record in state.nodes.values())
    return {
        "revision": state.revision,
        "nodes": len(state.nodes),
        "nodes_lost": lost,
        "placed": phases[WorkloadPhase.PLACED],
        "pending": phases[WorkloadPhase.PENDING],
    }


def list_queue(state: ClusterState) -> dict[str, Any]:
    """Waiting work in the order in which it is tried, the first of it; and how much waits for which reason."""
    reasons: Counter[str] = Counter()
    rows: list[list[Any]] = []
    for workload_id in state.pending:
        workload = state.workloads[workload_id]
        reasons[workload.reason] += 1
        if len(rows) < QUEUE_MOST:
            spec = workload.spec
            rows.append(
                [
                    workload_id,
                    spec.name,
                    spec.namespace,
                    spec.priority,
                    spec.replicas,
                    spec.request.gpu_count,
                    spec.request.gpu_milli,
                    workload.submitted_ns // 1_000_000,
                    workload.reason,
                ]
            )
    return {"rows": rows, "reasons": [list(pair) for pair in reasons.most_common(REASONS_MOST)]}


class BudgetRows:
    """Measured power of each budget; the places of budgets are found anew only when policy or fleet change."""

    def __init__(self) -> None:
        self._policy: Policy | None = None
        self._era = 0
        self._limits_w: Mapping[str, float] = {}
        self._cells: dict[str, NDArray[np.int64]] = {}

    def rows(self, state: ClusterState, fleet: FleetCells) -> list[list[Any]]:
        """[name, limit in W, measured W, GPUs with a reading, GPUs], the fullest first; the cluster's before all."""
        if self._policy is not state.policy or self._era != fleet.era:
            self._index_budgets(state, fleet)
        power_w = fleet.power_w
        found: list[tuple[str, float, int, int, int]] = []
        for name, cells in self._cells.items():
            read = power_w[cells]
            known = read >= 0
            found.append((name, self._limits_w[name], int(read[known].sum()), int(known.sum()), len(cells)))
        found.sort(key=lambda row: (row[0] != "cluster", -row[2] / max(row[1], 1.0), row[0]))
        return [list(row) for row in found[:BUDGETS_MOST]]

    def _index_budgets(self, state: ClusterState, fleet: FleetCells) -> None:
        self._policy, self._era = state.policy, fleet.era
        places = BudgetHierarchy(state.policy)
        self._limits_w = places.limits_w
        cells: dict[str, list[int]] = {name: [] for name in places.limits_w}
        for name, record in state.nodes.items() if cells else ():
            span = fleet.span(name)
            for key in places.budgets_above(record.inventory):
                cells[key].extend(range(span.start, span.stop))
        self._cells = {name: np.array(found, np.int64) for name, found in cells.items()}


# Ten minutes by the second.
POWER_POINTS_MOST = 600


class LiveView:
    """The picture and its frames."""

    def __init__(self) -> None:
        self.fleet = FleetCells()
        self.history = ChangeHistory()
        self.frame = 0
        self._budgets = BudgetRows()
        self._power: deque[list[float]] = deque(maxlen=POWER_POINTS_MOST)
        self._state: ClusterState | None = None
        self._told_number = 0
        self._glance: dict[str, Any] = {}

    def sync_nodes(self, state: ClusterState) -> bool:
        """Brings cells and history up to a state; whether viewers need the whole picture for it."""
        if self._state is not state:
            self._state = state
            self.history.reset_history(state.workloads, state.revision)
            self.fleet.build(state.nodes)
            return True
        if self.fleet.has_nodes(state.nodes):
            return False
        self.fleet.build(state.nodes)
        return True

    def on_commit(self, events: Sequence[Event], state: ClusterState, revision: int) -> None:
        """Takes a commit into the history; the state is as it is after it, at this revision."""
        if self._state is state:
            self.history.on_commit(events, state.workloads, revision)

    def update_nodes(self, seen: Iterable[tuple[NodeRecord, NodeTick | None]]) -> None:
        """Takes some nodes in, each with its fresh tick."""
        for record, tick in seen:
            self.fleet.update_node(record, tick)

    def add_power_point(self, power: PowerSums, *, now_ns: int) -> None:
        """One more point of the line of power: (ms since 1970, W); nothing where nothing was read."""
        if power.gpus:
            self._power.append([now_ns // 1_000_000, round(power.power_w)])

    def delta_frame(self, state: ClusterState, *, now_ns: int) -> dict[str, Any]:
        """The next frame: what changed since the one before, and the glance where it did."""
        self.frame += 1
        new = self.history.changes_after(self._told_number)
        self._told_number = self.history.number
        glance = self._summary_fields(state)
        changed = {key: value for key, value in glance.items() if self._glance.get(key) != value}
        self._glance = glance
        frame: dict[str, Any] = {
            "frame": self.frame,
            "at_ms": now_ns // 1_000_000,
            **changed,
            **self.fleet.changed_columns(),
        }
        if self._power:
            frame["power"] = self._power[-1]
        if new:
            frame["changes"] = self.change_rows(new)
            frame["changes_from"] = self.history.oldest
        return frame

    def full_frame(self, *, now_ns: int) -> dict[str, Any]:
        """The picture as of the last frame."""
        return {
            "frame": self.frame,
            "at_ms": now_ns // 1_000_000,
            **self.fleet.full_columns(),
            **self._glance,
            "power_line": list(self._power),
            "changes": self.change_rows(
                change for change in self.history.changes if change.number <= self._told_number
            ),
            "changes_from": self.history.oldest,
        }

    def _summary_fields(self, state: ClusterState) -> dict[str, Any]:
        return {
            "counts": count_cluster(state),
            "queue": list_queue(state),
            "budgets": self._budgets.rows(state, self.fleet),
        }

    def change_rows(self, changes: Iterable[FleetChange]) -> list[list[Any]]:
        """[number, ms, kind, workload, words, [cell, milli, cell, milli, ...]]; GPUs that are gone are left out."""
        rows: list[list[Any]] = []
        for one in changes:
            pairs: list[int] = []
            for node_name, uuid, milli in one.milli:
                if (cell := self.fleet.cell(node_name, uuid)) is not None:
                    pairs += [cell, milli]
            rows.append([one.number, one.time_ns // 1_000_000, one.kind, one.workload_id, one.words, pairs])
        return rows
