"""Snapshots: the cluster state as arrays, updated row by row and lent out read-only for one decision.

Owns the translation from node records to the arrays of eelgrid_kernels, and their growth; with it the GPU links of a
node as a bandwidth matrix, and network locations of nodes as integer codes. Must not know what is decided on them.
Everything here is derived: it is in no checkpoint, and a mirror rebuilt from the state gives the same decisions.

Theory: a placement changes one row, so `refresh` rewrites rows by name instead of building arrays for each decision.
Node arrays double when full; GPU slots widen to the widest node. A `Snapshot` is a read-only view for one decision,
and `Snapshot.copy` returns a `SnapshotTrial` that is used and dropped, never merged. `changes` lists the rows that
changed, in order, so that a planner can update its cache.

A link is worth about its bandwidth one way, in whole GB/s: 25 for each NVLink lane, about 12 for PCIe 3.0 x16, less
with every bridge, and least between processors. Only the order matters, and it is NVML's; single machines may measure
otherwise (Li et al., "Evaluating Modern GPU Interconnect", IEEE TPDS 31, 2020). A link that the driver does not
report is worth nothing, unless both GPUs name their NUMA node.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.state.demand import NO_OPPORTUNITY_PRICES, Demand, OpportunityPrices, PriceMarket, TaskClass
from eelgrid_controller.state.node_allocations import ASSIGNMENTS_MOST, NodeRecord
from eelgrid_kernels.arrays import Mix, Nodes, Task
from eelgrid_kernels.engine_setup import sort_bit
from eelgrid_kernels.node_cost import GPU_ABSENT, GPU_PARTITIONED, GPU_PLACEABLE, GPU_WHOLE_MILLI, refresh_fragmentation
from eelgrid_protos.messages import Gpu, GpuLink, Inventory, WorkloadSpec

Ints = NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)
# Idle watts, full watts and their source.
WattsOf = Callable[[Gpu], tuple[float, float, str]]
_CHANGES_MOST = 65_536
_ROWS_LEAST = 64
_LANE_GB_S = 25
# By NVML's nearest common ancestor: board, PCIe switch, several switches, host bridge, processor, machine.
_PCIE_GB_S = {0: 13, 10: 12, 20: 11, 30: 10, 40: 9, 50: 6}
_SAME_NUMA, _OTHER_NUMA = 40, 50


def _ancestor_gb_s(ancestor: int) -> int:
    """Returns the bandwidth of a common ancestor in GB/s; an unknown level counts as the next nearer one."""
    return _PCIE_GB_S[max((level for level in _PCIE_GB_S if level <= ancestor), default=_OTHER_NUMA)]


def build_link_matrix(gpus: Sequence[Gpu], links: Iterable[GpuLink]) -> Ints | None:
    """Returns bandwidths (G, G) in the order of `gpus`, in GB/s; None if they could not affect a choice."""
    told = {frozenset((link.one, link.other)): link for link in links}
    matrix = np.zeros((len(gpus), len(gpus)), np.int64)
    values = set()
    for (row, one), (column, other) in combinations(enumerate(gpus), 2):
        link = told.get(frozenset((one.index, other.index)))
        if link is not None:
            value = _LANE_GB_S * link.nvlinks + _ancestor_gb_s(link.ancestor)
        elif one.numa_node is not None and other.numa_node is not None:
            value = _ancestor_gb_s(_SAME_NUMA if one.numa_node == other.numa_node else _OTHER_NUMA)
        else:
            continue
        matrix[row, column] = matrix[column, row] = value
        values.add(value)
    if len(values) <= 1:
        return None
    matrix.flags.writeable = False
    return matrix


class NetworkLocations:
    """Network path of each row, and codes of shared places; rows without a path share one place."""

    def __init__(self) -> None:
        self._paths: list[tuple[str, ...]] = []
        self._codes: Ints | None = None

    def add_path(self, row: int, path: tuple[str, ...]) -> None:
        """Sets the path of a row, outermost place first; rows are added in order."""
        if row == len(self._paths):
            self._paths.append(path)
        elif self._paths[row] != path:
            self._paths[row] = path
        else:
            return
        self._codes = None

    def codes(self) -> Ints:
        """Returns codes (N, L), equal at a level for rows in the same place there, in the order of the paths' names."""
        if self._codes is None:
            levels = max(map(len, self._paths), default=0)
            columns = []
            for level in range(levels):
                prefixes = [path[: level + 1] for path in self._paths]
                code = {prefix: number for number, prefix in enumerate(sorted(set(prefixes)))}
                columns.append([code[prefix] for prefix in prefixes])
            self._codes = np.array(columns, np.int64).reshape(levels, len(self._paths)).T.copy()
            self._codes.flags.writeable = False
        return self._codes


def _read_only(array: NDArray[_Scalar]) -> NDArray[_Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view


def _frozen(nodes: Nodes) -> Nodes:
    return Nodes._make(map(_read_only, nodes))


@dataclass(frozen=True, slots=True)
class GpuSlots:
    """A node's GPUs by slot, in the order of their index."""

    uuids: tuple[str, ...]
    indexes: tuple[int, ...]
    # Bandwidths (G, G), slot by slot; None if they are unknown or all the same.
    links: Ints | None = field(default=None, compare=False)


def limit_to_plan_size(nodes: Nodes, task: Task, assignments_left: Ints | int) -> tuple[Nodes, Task]:
    """Returns nodes and a task whose memory bounds the tasks of each node by what its plan can express.

    Memory costs nothing in the model.
    """
    limited = task if task.memory_bytes else task._replace(memory_bytes=1)
    most = np.full(len(nodes.memory_free), assignments_left, np.int64) * limited.memory_bytes
    memory_free = np.minimum(nodes.memory_free, most) if task.memory_bytes else most
    return nodes._replace(memory_free=_read_only(memory_free)), limited


def count_room(nodes: Nodes, rows: Ints, task: Task, allows: Ints, most: int) -> tuple[Ints, Ints]:
    """Returns how many such tasks each of these rows can hold, up to `most`: ignoring memory, and with it."""
    room = np.full(len(rows), most, np.int64)
    if task.gpu_count > 0:
        usable = (nodes.gpu_state[rows] == GPU_PLACEABLE) & (allows[nodes.gpu_model[rows]] != 0)
        shares = np.where(usable, nodes.gpu_free[rows] // task.gpu_milli, 0).sum(axis=1)
        room = np.minimum(room, shares // task.gpu_count)
    if task.cpu_milli > 0:
        room = np.minimum(room, nodes.cpu_free[rows] // task.cpu_milli)
    by_memory = nodes.memory_free[rows] // task.memory_bytes if task.memory_bytes > 0 else room
    return room, np.minimum(room, by_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The cluster for one decision, as read-only arrays."""

    nodes: Nodes
    mix: Mix
    # Bits of the kinds of GPU task held (N,), as defined by eelgrid_kernels.engine_setup.sort_bit.
    sorts: Ints
    names: Sequence[str]
    devices: Sequence[GpuSlots]
    models: Mapping[str, int]
    changes: Sequence[int]
    era: int
    places: NetworkLocations
    quotes: OpportunityPrices = NO_OPPORTUNITY_PRICES
    # How many more assignments each node's plan can express (N,); None if that is no limit.
    assignments_left: Ints | None = None
    # Whether each node is ready, and the traits of those that take new work, None of others.
    is_ready: Sequence[bool] = ()
    traits: Sequence[tuple[str, ...] | None] = ()

    def allowed_models(self, models: tuple[str, ...]) -> Ints:
        """Returns 1 for each model that a request may use (M,); all if the request names none."""
        allowed = np.full(max(1, len(self.models)), not models, np.int64)
        for model in models:
            if model in self.models:
                allowed[self.models[model]] = 1
        return _read_only(allowed)

    def measure_fragments(self) -> Ints:
        """Returns the fragmentation of each node (N,), in milli-GPU by the weights of the mix; takes a look at all nodes."""
        fragments = np.zeros(len(self.names), np.int64)
        refresh_fragmentation(self.nodes, self.mix, np.arange(len(fragments)), fragments)
        return fragments

    def copy(self) -> "SnapshotTrial":
        """Returns a copy of what a placement changes, for trials."""
        return SnapshotTrial(self)

    def with_open(self, is_open: NDArray[np.bool_], *, is_lasting: bool = False) -> "Snapshot":
        """Returns the snapshot with only those of its nodes available that are open (N,).

        `is_lasting` is for callers that always pass the same open nodes: their caches follow the cluster's changes.
        """
        available = _read_only(self.nodes.available & is_open)
        # Otherwise the list is separate: a cache of this snapshot must not be mistaken for one of the cluster's.
        changes = self.changes if is_lasting else []
        return replace(self, nodes=self.nodes._replace(available=available), changes=changes)

    def is_plan_limited(self, task: Task, allows: Ints, replicas: int) -> bool:
        """Returns whether some node fits more such tasks than its plan can express, counted up to `replicas`."""
        left, nodes = self.assignments_left, self.nodes
        if left is None:
            return False
        rows = np.flatnonzero((left < replicas) & nodes.available)
        return len(rows) > 0 and bool((count_room(nodes, rows, task, allows, replicas)[1] > left[rows]).any())

    def emptied_nodes(self, memory_bytes: Ints) -> Nodes:
        """Returns the nodes as if nothing ran, nothing were lost and no GPU were partitioned."""
        there = self.nodes.gpu_model >= 0
        return _frozen(
            self.nodes._replace(
                available=np.ones_like(self.nodes.available),
                cpu_free=self.nodes.cpu_capacity,
                memory_free=memory_bytes,
                gpu_state=np.where(there, GPU_PLACEABLE, GPU_ABSENT).astype(np.uint8),
                gpu_free=np.where(there, GPU_WHOLE_MILLI, 0),
            )
        )


class SnapshotTrial:
    """A copy of a snapshot on which replicas are placed one after another."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._nodes = snapshot.nodes._replace(
            cpu_free=snapshot.nodes.cpu_free.copy(),
            memory_free=snapshot.nodes.memory_free.copy(),
            gpu_free=snapshot.nodes.gpu_free.copy(),
        )
        self._sorts = snapshot.sorts.copy()
        # A separate list: a cache of the cluster's changes must not be mistaken for one of this trial's.
        self._changes: list[int] = []
        self.snapshot = replace(
            snapshot,
            nodes=_frozen(self._nodes),
            sorts=_read_only(self._sorts),
            changes=self._changes,
        )

    def place_task(self, row: int, slots: Sequence[int], task: Task) -> None:
        """Places a task."""
        self._sorts[row] |= sort_bit(task.gpu_count, task.gpu_milli)
        self._shift(row, slots, task, 1)

    def remove_task(self, row: int, slots: Sequence[int], task: Task) -> None:
        """Removes a task. The kinds of task held there stay as they were."""
        self._shift(row, slots, task, -1)

    def _shift(self, row: int, slots: Sequence[int], task: Task, sign: int) -> None:
        self._nodes.cpu_free[row] -= sign * task.cpu_milli
        self._nodes.memory_free[row] -= sign * task.memory_bytes
        for slot in slots:
            self._nodes.gpu_free[row, slot] -= sign * task.gpu_milli
        self._changes.append(row)


# Takes from the free shares (G,) of a node's GPUs, by UUID, what may not be joined there.
LimitRow = Callable[[Ints, Iterable[str], NodeRecord], None]


class RoomCount:
    """How many replicas of one request fit on open nodes, by counts alone, as the records of nodes change.

    An upper bound: budgets and the size of a plan are left to the search for places.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        row_of: Callable[[str], int],
        task: Task,
        spec: WorkloadSpec,
        limit_row: LimitRow | None = None,
    ) -> None:
        self._snapshot, self._row_of, self._task, self._most = snapshot, row_of, task, spec.replicas
        self._limit_row = limit_row
        self._allows = snapshot.allowed_models(spec.request.gpu_models)
        self._nodes = snapshot.nodes._replace(
            available=snapshot.nodes.available.copy(),
            cpu_free=snapshot.nodes.cpu_free.copy(),
            memory_free=snapshot.nodes.memory_free.copy(),
            gpu_free=snapshot.nodes.gpu_free.copy(),
        )
        rows = np.arange(len(snapshot.names))
        self._room = np.where(self._nodes.available, self._count(rows), 0)
        self._total = int(self._room.sum())

    def _count(self, rows: Ints) -> Ints:
        return count_room(self._nodes, rows, self._task, self._allows, self._most)[1]

    def update_node(self, name: str, record: NodeRecord) -> None:
        """Counts a node anew."""
        row = self._row_of(name)
        if not self._snapshot.nodes.available[row]:
            return
        uuids = self._snapshot.devices[row].uuids
        _write_free_amounts(self._nodes, row, uuids, record)
        if self._limit_row is not None:
            self._limit_row(self._nodes.gpu_free[row], uuids, record)
        room = int(self._count(np.array([row]))[0]) if self._nodes.available[row] else 0
        self._total += room - int(self._room[row])
        self._room[row] = room

    def has_room(self, name: str) -> bool:
        """Returns whether one fits on a node."""
        return bool(self._room[self._row_of(name)])

    def count(self, closed: Collection[str] = ()) -> int:
        """Returns how many fit in all, on none of the closed nodes."""
        return self._total - sum(int(self._room[self._row_of(name)]) for name in closed)


def _gpu_state(record: NodeRecord, gpu: Gpu) -> int:
    """Returns what a GPU slot holds: nothing for a GPU that is lost or cordoned; a cordoned node is not available."""
    if record.gpu_cordon_reason(gpu) or gpu.uuid in record.lost_gpus:
        return GPU_ABSENT
    cut = gpu.mig_enabled or gpu.mig_pending or record.is_partition_managed(gpu)
    return GPU_PARTITIONED if cut else GPU_PLACEABLE


def _sorts_held(record: NodeRecord) -> int:
    """Returns the bits of the kinds of GPU task that a node holds."""
    bits = 0
    for gpu_count, gpu_milli in record.shares_held:
        bits |= sort_bit(gpu_count, gpu_milli)
    return bits


def _write_free_amounts(nodes: Nodes, row: int, uuids: Sequence[str], record: NodeRecord) -> None:
    """Writes the free amounts of a row, which change with every placement."""
    held, taken = record.gpu_milli, record.externally_used_gpus()
    nodes.available[row] = record.is_schedulable and len(record.assignments) < ASSIGNMENTS_MOST
    # A node that returned smaller than what runs on it has nothing free, not a negative amount.
    nodes.cpu_free[row] = max(0, record.cpu_left_milli)
    nodes.memory_free[row] = max(0, record.memory_left_bytes)
    if uuids:
        nodes.gpu_free[row, : len(uuids)] = [
            0 if uuid in taken else max(0, GPU_WHOLE_MILLI - held.get(uuid, 0)) for uuid in uuids
        ]


def _empty(rows: int, width: int) -> Nodes:
    return Nodes(
        available=np.zeros(rows, np.bool_),
        cpu_capacity=np.zeros(rows, np.int64),
        cpu_free=np.zeros(rows, np.int64),
        memory_free=np.zeros(rows, np.int64),
        gpu_state=np.full((rows, width), GPU_ABSENT, np.uint8),
        gpu_model=np.full((rows, width), -1, np.int64),
        gpu_free=np.zeros((rows, width), np.int64),
        gpu_idle_w=np.zeros((rows, width)),
        gpu_busy_w=np.zeros((rows, width)),
        rank=np.zeros(rows, np.int64),
    )


def _mix(learned: Sequence[tuple[TaskClass, int]], models: Iterable[str]) -> Mix:
    """Returns the classes of the state's mix as arrays; with one row of models even if no GPU is known."""
    tasks = [task for task, _ in learned]
    allows = [[not task.gpu_models or model in task.gpu_models for task in tasks] for model in models]
    return Mix(
        cpu_milli=_read_only(np.array([task.cpu_milli for task in tasks], np.int64)),
        gpu_count=_read_only(np.array([task.gpu_count for task in tasks], np.int64)),
        gpu_milli=_read_only(np.array([task.gpu_milli for task in tasks], np.int64)),
        allows=_read_only(np.array(allows or [[True] * len(tasks)], np.int64)),
        weight=_read_only(np.array([weight for _, weight in learned], np.int64)),
        total=max(1, sum(weight for _, weight in learned)),
    )


class MirroredState(Protocol):
    """What the mirror reads of a state."""

    nodes: dict[str, NodeRecord]
    demand: Demand
    market: PriceMarket


class SnapshotMirror:
    """The arrays behind snapshots; has one owner, who calls `refresh` after each event."""

    def __init__(self, state: MirroredState, watts: WattsOf) -> None:
        self._state = state
        self._watts = watts
        self._arrays = _empty(_ROWS_LEAST, 1)
        self._memory = np.zeros(_ROWS_LEAST, np.int64)
        self._sorts = np.zeros(_ROWS_LEAST, np.int64)
        self._assignments_left = np.zeros(_ROWS_LEAST, np.int64)
        self._names: list[str] = []
        self._sorted: list[str] = []
        self._rows: dict[str, int] = {}
        self._devices: list[GpuSlots] = []
        # The inventory from which each row was laid out.
        self._inventories: list[Inventory | None] = []
        # Its lost GPUs, and those that an operator cordoned.
        self._absent: list[tuple[frozenset[str], frozenset[str]]] = []
        # Whether the partition planner owns a node, and for which of its GPUs a layout is desired.
        self._kept: list[tuple[bool, frozenset[str]]] = []
        self._is_ready: list[bool] = []
        self._traits: list[tuple[str, ...] | None] = []
        self._models: dict[str, int] = {}
        self._places = NetworkLocations()
        self._changes: list[int] = []
        self._era = 0
        self._learned: tuple[tuple[TaskClass, int], ...] | None = None
        self._mix = _mix((), ())
        self._snapshot: Snapshot | None = None
        self.refresh(state.nodes)

    @property
    def memory_bytes(self) -> Ints:
        """Memory capacity of each node (N,), in bytes."""
        return _read_only(self._memory[: len(self._names)])

    def row(self, name: str) -> int:
        """Returns the row of a node."""
        return self._rows[name]

    def refresh(self, names: Iterable[str]) -> None:
        """Rewrites the rows of these nodes, and what is derived from them."""
        models = len(self._models)
        changed = [self._refresh_row(name) for name in names]
        self._changes.extend(changed)
        if len(self._models) != models or len(self._changes) > _CHANGES_MOST:
            self._renew()
        if self._learned is not self._state.demand.mix or len(self._models) != models:
            self._learned = self._state.demand.mix
            self._mix, self._snapshot = _mix(self._learned, self._models), None

    def snapshot(self) -> Snapshot:
        """Returns a read-only view for one decision; it must not be kept beyond the next event."""
        quotes = self._state.market.quotes
        if self._snapshot is None or self._snapshot.quotes is not quotes:
            count = len(self._names)
            self._snapshot = Snapshot(
                nodes=_frozen(Nodes._make(array[:count] for array in self._arrays)),
                mix=self._mix,
                sorts=_read_only(self._sorts[:count]),
                names=self._names,
                devices=self._devices,
                models=self._models,
                changes=self._changes,
                era=self._era,
                places=self._places,
                quotes=quotes,
                assignments_left=_read_only(self._assignments_left[:count]),
                is_ready=self._is_ready,
                traits=self._traits,
            )
        return self._snapshot

    def altered_snapshot(self, records: Mapping[str, NodeRecord]) -> Snapshot:
        """Returns the cluster as it would be with these records, whose nodes and GPUs are those that are known."""
        snapshot = self.snapshot()
        nodes = snapshot.nodes._replace(
            available=snapshot.nodes.available.copy(),
            cpu_free=snapshot.nodes.cpu_free.copy(),
            memory_free=snapshot.nodes.memory_free.copy(),
            gpu_state=snapshot.nodes.gpu_state.copy(),
            gpu_free=snapshot.nodes.gpu_free.copy(),
        )
        sorts = snapshot.sorts.copy()
        left = self._assignments_left[: len(self._names)].copy()
        for name, record in records.items():
            row, gpus = self._rows[name], {gpu.uuid: gpu for gpu in record.inventory.gpus}
            for slot, uuid in enumerate(self._devices[row].uuids):
                nodes.gpu_state[row, slot] = _gpu_state(record, gpus[uuid])
            _write_free_amounts(nodes, row, self._devices[row].uuids, record)
            sorts[row], left[row] = _sorts_held(record), max(0, ASSIGNMENTS_MOST - len(record.assignments))
        return replace(
            snapshot,
            nodes=_frozen(nodes),
            sorts=_read_only(sorts),
            # A separate list: a cache of the cluster's changes must not be mistaken for one of this snapshot's.
            changes=[],
            assignments_left=_read_only(left),
        )

    def _renew(self) -> None:
        """Invalidates every cache of earlier snapshots."""
        self._era += 1
        self._changes = []
        self._snapshot = None

    def _refresh_row(self, name: str) -> int:
        record = self._state.nodes[name]
        row = self._rows.get(name)
        known = row is not None
        if row is None:
            row = self._add_row(name)
        self._make_room(row, len(record.inventory.gpus))
        if not known:
            self._enter_rank(row, name)
        kept = record.partitioned, frozenset(record.layouts)
        same = self._inventories[row] is record.inventory and self._kept[row] == kept
        if not same or self._absent[row] != (frozenset(record.lost_gpus), frozenset(record.gpu_cordons)):
            self._lay_out(row, record)
        self._book(row, record)
        return row

    def _add_row(self, name: str) -> int:
        row = len(self._names)
        self._rows[name] = row
        self._names.append(name)
        self._devices.append(GpuSlots((), ()))
        self._inventories.append(None)
        self._absent.append((frozenset(), frozenset()))
        self._kept.append((False, frozenset()))
        self._is_ready.append(False)
        self._traits.append(None)
        self._renew()
        return row

    def _enter_rank(self, row: int, name: str) -> None:
        """Inserts a node into the ranks; they follow names, so that ties do not depend on the order of joining."""
        place = bisect_left(self._sorted, name)
        self._sorted.insert(place, name)
        ranks = self._arrays.rank
        ranks[:row] += ranks[:row] >= place
        ranks[row] = place

    def _make_room(self, row: int, width: int) -> None:
        rows, slots = self._arrays.gpu_state.shape
        if row < rows and width <= slots:
            return
        taller = rows if row < rows else 2 * rows
        grown = _empty(taller, max(width, slots))
        pairs: Iterable[tuple[NDArray[Any], NDArray[Any]]] = zip(self._arrays, grown, strict=True)
        for old, new in pairs:
            new[tuple(map(slice, old.shape))] = old
        self._arrays = grown
        self._memory = np.concatenate([self._memory, np.zeros(taller - rows, np.int64)])
        self._sorts = np.concatenate([self._sorts, np.zeros(taller - rows, np.int64)])
        self._assignments_left = np.concatenate([self._assignments_left, np.zeros(taller - rows, np.int64)])
        self._renew()

    def _lay_out(self, row: int, record: NodeRecord) -> None:
        """Writes capacity and devices of a row, which change only with the inventory."""
        inventory = record.inventory
        gpus = sorted(inventory.gpus, key=lambda gpu: gpu.index)
        self._inventories[row] = inventory
        self._absent[row] = frozenset(record.lost_gpus), frozenset(record.gpu_cordons)
        self._kept[row] = record.partitioned, frozenset(record.layouts)
        self._devices[row] = GpuSlots(
            tuple(gpu.uuid for gpu in gpus), tuple(gpu.index for gpu in gpus), build_link_matrix(gpus, inventory.links)
        )
        self._places.add_path(row, inventory.topology)
        arrays = self._arrays
        arrays.cpu_capacity[row] = inventory.cpu_milli
        self._memory[row] = inventory.memory_bytes
        arrays.gpu_state[row] = GPU_ABSENT
        arrays.gpu_model[row] = -1
        arrays.gpu_free[row] = 0
        arrays.gpu_idle_w[row] = 0.0
        arrays.gpu_busy_w[row] = 0.0
        for slot, gpu in enumerate(gpus):
            arrays.gpu_model[row, slot] = self._models.setdefault(gpu.model, len(self._models))
            arrays.gpu_idle_w[row, slot], arrays.gpu_busy_w[row, slot] = self._watts(gpu)[:2]
            arrays.gpu_state[row, slot] = _gpu_state(record, gpu)

    def _book(self, row: int, record: NodeRecord) -> None:
        """Writes what changes with every placement."""
        _write_free_amounts(self._arrays, row, self._devices[row].uuids, record)
        self._assignments_left[row] = max(0, ASSIGNMENTS_MOST - len(record.assignments))
        self._sorts[row] = _sorts_held(record)
        self._is_ready[row] = record.is_ready
        self._traits[row] = record.traits if record.is_schedulable else None
