"""Pure model of the live page: the state and telemetry of one moment as small columns, and the changes since.

`ChangeHistory` keeps the last changes to the fleet; `LiveView` makes frames of columns, queue and budgets; the functions
after it give the details that a viewer opens: a GPU, a workload, a search, objectives and measured points.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.formatting import format_load_target, format_phase
from eelgrid_controller.state import events
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event, event_from_plain
from eelgrid_controller.state.journal import JournalHistory
from eelgrid_controller.state.measurements import JOB_PROFILE_PREFIX, MeasuredPoints
from eelgrid_controller.state.node_allocations import NodeRecord, make_assignment
from eelgrid_controller.state.node_changes import NodeChanges, count_lost_gpus
from eelgrid_controller.state.policy import CLUSTER_BUDGET, make_budget_key
from eelgrid_controller.state.telemetry import GpuReadings, NodeTick, PowerSums
from eelgrid_protos.messages import (
    BudgetStatus,
    Explanation,
    Gpu,
    Inventory,
    ListPromisesResponse,
    NodeState,
    Reading,
    ServiceStatus,
    Workload,
    WorkloadPhase,
    resolve_pool,
)

HeldMilli = Mapping[tuple[str, str], int]

_WORDS: Mapping[type[Any], str] = {
    events.WorkloadPlaced: "placed",
    events.WorkloadMoved: "moved",
    events.WorkloadScaled: "scaled",
    events.WorkloadLimited: "limited",
    events.WorkloadCancelled: "ended",
    events.WorkloadEvicted: "evicted",
    events.WorkloadRetried: "retried",
    events.WorkloadCompleted: "ended",
    events.WorkloadDeferred: "waits",
    events.PartitionsPlanned: "sliced",
    events.DevicesCorrected: "corrected",
    events.PolicyChanged: "policy",
}


@dataclass(frozen=True, slots=True)
class FleetChange:
    """One decision, or one thing that happened to the fleet; `milli` is more (or less) held by (node, GPU).

    `number` is its event's, which several workloads may share; `commit` that of the last event of its commit.
    """

    number: int
    commit: int
    time_ns: int
    kind: str
    workload_id: str
    words: str
    milli: tuple[tuple[str, str, int], ...]


class ChangeHistory:
    """The last changes; at most `most` of them, and so many differences in all."""

    def __init__(self, *, most: int = 500, differences_most: int = 50_000) -> None:
        self.number = 0  # of the last event that was taken
        self._begun = 0
        self.is_cut = False  # whether rows were forgotten for want of room
        self.changes: deque[FleetChange] = deque()
        self._most, self._differences_most = most, differences_most
        self._differences = 0
        self._held: dict[str, HeldMilli] = {}
        self._nodes = NodeChanges()

    def reset_history(
        self, workloads: Mapping[str, Workload], revision: int, nodes: Mapping[str, NodeRecord] = MappingProxyType({})
    ) -> None:
        """Where everything stands at a revision; what was before is forgotten."""
        self.changes.clear()
        self._nodes.reset(nodes)
        self.number = self._begun = revision
        self.is_cut = False
        self._differences = 0
        self._held = {
            key: held for key, one in workloads.items() if one.phase is WorkloadPhase.PLACED and (held := _held(one))
        }

    @property
    def oldest(self) -> int:
        """The number from which on everything is here."""
        return self.changes[0].number if self.is_cut else self._begun + 1

    def on_commit(self, events: Sequence[Event], workloads: Mapping[str, Workload], revision: int) -> None:
        """The events of a commit, and all workloads as they are after it, which is at this revision."""
        first = revision - len(events) + 1
        rows = [(number, *row) for number, event in enumerate(events, first) for row in self._rows(event)]
        last = {key: position for position, (_, _, _, key, _) in enumerate(rows) if key}
        for position, (number, time_ns, kind, key, words) in enumerate(rows):
            milli = self._difference(key, workloads.get(key)) if last.get(key) == position else ()
            name = workloads[key].spec.name if key in workloads else ""
            told = ": ".join(filter(None, (name, words)))
            self._add(FleetChange(number, revision, time_ns, kind, key, told, milli))
        self.number = revision

    def _rows(self, event: Event) -> Iterator[tuple[int, str, str, str]]:
        """(time, kind, workload, words) of what an event says, of nodes only what is new."""
        for change in self._nodes.observe(event):
            yield event.time_ns, change.kind.value, "", change.subject
        yield from _rows(event)

    def changes_after(self, number: int) -> list[FleetChange]:
        """Changes that came after this one."""
        return [change for change in self.changes if change.number > number]

    def _difference(self, key: str, workload: Workload | None) -> tuple[tuple[str, str, int], ...]:
        before = self._held.pop(key, {})
        now = _held(workload) if workload is not None and workload.phase is WorkloadPhase.PLACED else {}
        if now:
            self._held[key] = now
        found = {place: now.get(place, 0) - before.get(place, 0) for place in {**before, **now}}
        return tuple((*place, milli) for place, milli in found.items() if milli)

    def _add(self, change: FleetChange) -> None:
        changes = self.changes
        changes.append(change)
        self._differences += len(change.milli)
        while len(changes) > 1 and (len(changes) > self._most or self._differences > self._differences_most):
            self.is_cut = True
            gone = changes.popleft()
            self._differences -= len(gone.milli)
            while len(changes) > 1 and changes[0].commit == gone.commit:
                self._differences -= len(changes.popleft().milli)


def read_earlier_changes(
    past: JournalHistory, before: int, *, most: int = 2000, differences_most: int = 50_000
) -> tuple[list[FleetChange], bool]:
    """The last changes before the one with this number as the journal tells them, and whether it tells of more.

    Every entry since the older checkpoint is replayed: seconds with tens of thousands of them.
    """
    history = ChangeHistory(most=most, differences_most=differences_most)
    state = ClusterState.load(past.checkpoint.state) if past.checkpoint else ClusterState()
    history.reset_history(state.workloads, state.revision, state.nodes)
    for number, entry in past.entries:
        if number >= before:
            break
        event = event_from_plain(entry.kind, entry.body)
        state.apply(event)
        history.on_commit((event,), state.workloads, number)
    return list(history.changes), history.is_cut


def _held(workload: Workload) -> dict[tuple[str, str], int]:
    """Milli-GPUs by (node, GPU)."""
    found: dict[tuple[str, str], int] = {}
    for placement in workload.placements:
        item = make_assignment(workload, placement)
        for uuid in item.gpu_uuids:
            place = (placement.node_name, uuid)
            found[place] = found.get(place, 0) + item.gpu_milli
    return found


def _rows(event: Event) -> Iterator[tuple[int, str, str, str]]:
    """(time, kind, workload, words) of what an event says; nothing of one that changes no plan."""
    kind = _WORDS.get(type(event), "")
    match event:
        case events.PartitionsPlanned() | events.DevicesCorrected():
            for key in event.workload_ids:
                yield event.time_ns, kind, key, ""
        case events.WorkloadDeferred():
            # The constraint; the queue has the sentence.
            yield event.time_ns, kind, event.workload_id, event.reason.partition(":")[0]
        case events.WorkloadLimited():
            limit_w = event.power_limit_w
            words = "to the default" if limit_w is None else f"to {limit_w:.0f} W a GPU"
            yield event.time_ns, kind, event.workload_id, words
        case events.WorkloadEvicted() | events.WorkloadRetried():
            yield event.time_ns, kind, event.workload_id, event.reason.partition(":")[0]
        case events.WorkloadCompleted():
            yield event.time_ns, kind, event.workload_id, event.phase.name.lower()
        case events.WorkloadPlaced(power_limit_w=limit_w) if limit_w is not None:
            yield event.time_ns, kind, event.workload_id, f"at {limit_w:.0f} W a GPU"
        case events.WorkloadPlaced() | events.WorkloadMoved() | events.WorkloadScaled() | events.WorkloadCancelled():
            yield event.time_ns, kind, event.workload_id, ""
        case events.PolicyChanged():
            yield event.time_ns, kind, "", f"revision {event.policy.revision}"
        case _:
            return


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
        cordons = record.cordon is None, tuple(record.gpu_cordons)
        seen = (record.plan_epoch, record.state, tuple(record.lost_gpus), tuple(record.layouts), cordons)
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
            nodes["pool"].append(resolve_pool(slot.inventory.pool))
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
    if record.cordon_reason(gpu):
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
        "gpus_lost": sum(map(count_lost_gpus, state.nodes.values())),
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


def budget_rows(found: Iterable[BudgetStatus]) -> list[list[Any]]:
    """[name, limit in W, measured W, GPUs with a reading, GPUs, claimed W], the fullest first; the cluster's before all."""
    rows = [
        (
            make_budget_key(one.budget.scope, one.budget.name),
            one.budget.limit_w,
            round(one.measured_w or 0.0),
            one.measured_gpus,
            one.gpus,
            round(one.claimed_w),
        )
        for one in found
    ]
    rows.sort(key=lambda row: (row[0] != CLUSTER_BUDGET, -row[2] / max(row[1], 1.0), row[0]))
    return [list(row) for row in rows[:BUDGETS_MOST]]


# Ten minutes by the second.
POWER_POINTS_MOST = 600


class LiveView:
    """The picture and its frames."""

    def __init__(self) -> None:
        self.fleet = FleetCells()
        self.history = ChangeHistory()
        self.frame = 0
        self._power: deque[list[float]] = deque(maxlen=POWER_POINTS_MOST)
        self._state: ClusterState | None = None
        self._told_number = 0
        self._glance: dict[str, Any] = {}

    def sync_nodes(self, state: ClusterState) -> bool:
        """Brings cells and history up to a state; whether viewers need the whole picture for it."""
        if self._state is not state:
            self._state = state
            self.history.reset_history(state.workloads, state.revision, state.nodes)
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

    def add_power_point(self, power: PowerSums, *, now_ns: int) -> None:
        """One more point of the line of power: (ms since 1970, W); nothing where nothing was read."""
        if power.gpus:
            self._power.append([now_ns // 1_000_000, round(power.power_w)])

    def delta_frame(self, state: ClusterState, budgets: Iterable[BudgetStatus], *, now_ns: int) -> dict[str, Any]:
        """The next frame: what changed since the one before, and the glance where it did."""
        self.frame += 1
        new = self.history.changes_after(self._told_number)
        self._told_number = self.history.number
        glance = {
            "counts": count_cluster(state),
            "queue": list_queue(state),
            "budgets": budget_rows(budgets),
        }
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


HOLDERS_MOST = 256
REPLICAS_MOST = 256
FOUND_MOST = 200
SEARCHED_MOST = 100_000
PROFILES_MOST = 200
MODELS_MOST = 100
POINTS_MOST = 500
PROMISES_MOST = 500


def gpu_details(state: ClusterState, record: NodeRecord, gpu: Gpu, readings: GpuReadings, age_s: float | None) -> Any:
    """One GPU: what it is, what it reads, who holds it."""
    holders: list[dict[str, Any]] = []
    for item in record.assignments.values():
        if gpu.uuid in item.gpu_uuids and len(holders) < HOLDERS_MOST:
            part = item.gpu_instance
            workload = state.workloads[item.workload_id]
            holders.append(
                {
                    "workload_id": item.workload_id,
                    "name": workload.spec.name,
                    "replica": item.replica,
                    "milli": item.gpu_milli,
                    "slice": f"{part.profile or 'whole'} at {part.start}" if part else "",
                }
            )
    return {
        "node": record.inventory.node_name,
        "node_state": record.state.name.lower(),
        "pool": resolve_pool(record.inventory.pool),
        "topology": list(record.inventory.topology),
        "index": gpu.index,
        "uuid": gpu.uuid,
        "model": gpu.model,
        "product": gpu.product,
        "memory_bytes": gpu.memory_bytes,
        "limit_default_w": gpu.power_limit_default_w,
        "limit_min_w": gpu.power_limit_min_w,
        "limit_max_w": gpu.power_limit_max_w,
        "cordon": record.cordon_reason(gpu),
        "lost": gpu.uuid in record.lost_gpus,
        "mig": gpu.mig_enabled,
        "planner_keeps": record.is_partition_managed(gpu),
        "held_milli": record.gpu_milli.get(gpu.uuid, 0),
        "power_w": readings.power_w,
        "energy_j": readings.energy_j,
        "utilization": readings.utilization_ratio,
        "memory_used_bytes": readings.memory_used_bytes,
        "temperature_c": readings.temperature_c,
        "age_s": age_s,
        "holders": holders,
        "slices": [{"profile": one.profile, "start": one.start, "size": one.size} for one in gpu.gpu_instances],
        "wanted": [
            {"profile": one.profile, "start": one.start}
            for one in (record.layouts[gpu.uuid].instances if gpu.uuid in record.layouts else ())
        ],
    }


def workload_details(explanation: Explanation, fleet: FleetCells) -> Any:
    """One workload: what was asked, where it stands, and why, with each cost in watts."""
    workload = explanation.workload
    spec = workload.spec
    return {
        **_row(workload),
        "user": spec.user,
        "queue": spec.queue,
        "priority": spec.priority,
        "labels": dict(spec.labels),
        "cpu_milli": spec.request.cpu_milli,
        "memory_bytes": spec.request.memory_bytes,
        "gpu_models": list(spec.request.gpu_models),
        "submitted_ms": workload.submitted_ns // 1_000_000,
        "placed_ms": workload.placed_ns // 1_000_000 or None,
        "ended_ms": workload.ended_ns // 1_000_000 or None,
        "power_limit_w": workload.power_limit_w,
        "decision": workload.revision,
        "promise": _promise(workload),
        "placements": [
            {
                "replica": one.replica,
                "node": one.node_name,
                "gpus": list(one.gpu_indexes),
                "cells": [cell for uuid in one.gpu_uuids if (cell := fleet.cell(one.node_name, uuid)) is not None],
                "slice": one.gpu_instance.profile if one.gpu_instance else "",
                "lost": one.replica in workload.lost_replicas,
            }
            for one in workload.placements[:REPLICAS_MOST]
        ],
        "placements_in_all": len(workload.placements),
        "remedy": explanation.remedy,
        "constraint": explanation.constraint,
        "explained": [
            {
                "replica": one.replica,
                "feasible_nodes": one.feasible_nodes,
                "removals": [[removal.constraint, removal.nodes] for removal in one.removals],
                "candidates": [
                    {
                        "node": candidate.node_name,
                        "gpus": list(candidate.gpu_indexes),
                        "cost_w": candidate.cost_w,
                        "terms": [[term.name, term.cost_w] for term in candidate.terms],
                    }
                    for candidate in one.candidates
                ],
            }
            for one in explanation.replicas[:REPLICAS_MOST]
        ],
    }


def _promise(workload: Workload) -> str:
    """Whether it was promised something, in words."""
    if workload.spec.service is not None and workload.spec.service.load_target is not None:
        return f"a service of {format_load_target(workload.spec.service.load_target)} for each replica"
    if workload.spec.service is not None:
        return f"a service of profile {workload.spec.service.profile or 'its own'}"
    if workload.spec.training is not None:
        return f"a training job of profile {workload.spec.training.profile or 'its own'}"
    return ""


def _row(workload: Workload) -> dict[str, Any]:
    spec = workload.spec
    return {
        "id": workload.workload_id,
        "name": spec.name,
        "namespace": spec.namespace,
        "kind": spec.kind.name.lower(),
        "phase": format_phase(workload),
        "replicas": spec.replicas,
        "gpus": spec.request.gpu_count,
        "milli": spec.request.gpu_milli,
        "reason": workload.reason,
    }


def search_workloads(state: ClusterState, text: str) -> Any:
    """Live workloads whose id, name or namespace has this text, the newest first."""
    text = text.strip().lower()
    found: list[dict[str, Any]] = []
    left_out = False
    for looked, workload in enumerate(reversed(state.workloads.values())):
        if len(found) >= FOUND_MOST or looked >= SEARCHED_MOST:
            left_out = True
            break
        spec = workload.spec
        if not workload.phase.is_ended and (
            not text or text in f"{workload.workload_id} {spec.name} {spec.namespace}".lower()
        ):
            found.append(_row(workload))
    return {"rows": found, "left_out": left_out}


def list_objectives(found: ListPromisesResponse) -> Any:
    """How services and jobs keep what they were promised, the latest first."""

    def urgency(one: ServiceStatus) -> float:
        return -(one.live_s / one.objective_s) if one.live_s is not None and one.objective_s else 0.0

    services = sorted(found.services, key=urgency)
    return {
        "services": [
            {
                "id": one.workload_id,
                "name": one.name,
                "phase": one.phase,
                "serving": one.replicas_serving,
                "wanted": one.replicas_wanted,
                "arrived_hz": one.arrived_hz,
                "live_s": one.live_s,
                "objective_s": one.objective_s,
                "reason": one.reason,
                "is_advice": one.is_advice,
            }
            for one in services[:PROMISES_MOST]
        ],
        "jobs": [
            {
                "id": one.workload_id,
                "name": one.name,
                "phase": one.phase,
                "limit_w": one.power_limit_w,
                "slowdown": one.slowdown,
                "saving": one.saving,
                "reason": one.reason,
                "is_advice": one.is_advice,
            }
            for one in found.jobs[:PROMISES_MOST]
        ],
        "left_out": sum(max(0, len(rows) - PROMISES_MOST) for rows in (found.services, found.jobs)),
    }


def list_points(points: MeasuredPoints, profile: str, model: str = "") -> Any:
    """Measured points of one profile on one GPU model, and which profiles and models there are."""
    names = [name for name in points if not name.startswith(JOB_PROFILE_PREFIX)]
    names += [name for name in points if name.startswith(JOB_PROFILE_PREFIX)]
    chosen = profile if profile in points else (names[0] if names else "")
    kept = points[chosen] if chosen else ()
    models = list(dict.fromkeys(one.configuration.gpu_model for one in kept))
    on = model if model in models else (models[0] if models else "")
    here = [one for one in kept if one.configuration.gpu_model == on]
    rows = [
        {
            "model": one.configuration.gpu_model,
            "mig": one.configuration.mig_profile,
            "gpus": one.configuration.gpus,
            "batch": one.configuration.batch,
            "limit_w": one.configuration.power_limit_w,
            "rate_hz": one.throughput_hz,
            "power_w": one.power_w,
            "source": one.source,
            "latency_s": one.latency_s.get(0.95) or one.latency_s.get(0.99),
        }
        for one in here[:POINTS_MOST]
    ]
    return {
        "profiles": names[:PROFILES_MOST],
        "profile": chosen,
        "models": models[:MODELS_MOST],
        "model": on,
        "points": rows,
        "points_in_all": len(here),
    }
