"""Best-fit baseline: the same nodes and the same work as plain best fit would have placed them.

Owns what is allocated there, what waits, and the power that certain work draws on nodes. Must not know what
the real plan is. The score is the published one (`BEST_FIT` in eelgrid_kernels), found by the planner's own
engine; the power model is the planner's, too (docs/model.md).

Theory. Work is placed when it arrives, all its replicas or none, and stays until it ends: best fit moves
nothing, knows no budgets and no opportunity prices. What finds no room waits and is tried when a node gains
room, the highest priority first; smaller work may overtake. Replicas that ask for the same fit or fail
together, so a node is evaluated once for each kind of request. What only an engine decides is taken as it is:
slices of GPUs stay where they are.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from eelgrid_controller.placement.planner import Planner, make_task
from eelgrid_controller.placement.snapshot import Snapshot, SnapshotMirror, WattsOf, limit_to_plan_size
from eelgrid_controller.state.demand import Demand, PriceMarket
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_kernels.arrays import Nodes
from eelgrid_kernels.candidates import NodeCandidate
from eelgrid_kernels.node_cost import GPU_ABSENT, GPU_PLACEABLE, GPU_WHOLE_MILLI, node_power, replica_room
from eelgrid_protos.messages import Assignment, GpuLayout, Inventory, NodeState, ResourceRequest, WorkloadSpec


class ReplicaLocation(NamedTuple):
    """Where a replica stands and what it holds of each GPU there."""

    node_name: str
    gpu_uuids: tuple[str, ...]
    gpu_milli: int


class PlanPowerDraw:
    """Of the nodes of a mirror; their records say what others hold."""

    def __init__(self, mirror: SnapshotMirror, records: Mapping[str, NodeRecord]) -> None:
        self.power_w = 0.0
        self._mirror, self._records = mirror, records
        # Milli-CPU, and thousandths by UUID, never 0.
        self._cpu_milli: dict[str, int] = {}
        self._gpu_milli: dict[str, dict[str, int]] = {}
        self._node_w = np.zeros(0)
        self._snapshot: Snapshot | None = None
        self._arrays = (np.zeros(0, np.int64), np.zeros((0, 0), np.int64))
        self._nodes: Nodes
        self._stale: set[str] = set()
        self.refresh_power()

    def count_replica(self, place: ReplicaLocation, cpu_milli: int, sign: int) -> None:
        """Counts a replica in or out, by the sign."""
        name = place.node_name
        self._stale.add(name)
        self._cpu_milli[name] = self._cpu_milli.get(name, 0) + sign * cpu_milli
        held = self._gpu_milli.setdefault(name, {})
        for uuid in place.gpu_uuids:
            left = held.get(uuid, 0) + sign * place.gpu_milli
            if left:
                held[uuid] = left
            else:
                held.pop(uuid, None)

    def mark_node_changed(self, name: str) -> None:
        """A node is another than it was."""
        self._stale.add(name)

    def gpus_w(self, place: ReplicaLocation) -> Iterator[tuple[float, float]]:
        """Idle and full watts of each GPU of a place that is still there."""
        snapshot, row = self._mirror.snapshot(), self._mirror.row(place.node_name)
        uuids, nodes = snapshot.devices[row].uuids, snapshot.nodes
        for slot in [uuids.index(uuid) for uuid in place.gpu_uuids if uuid in uuids]:
            if nodes.gpu_state[row, slot] != GPU_ABSENT:
                yield float(nodes.gpu_idle_w[row, slot]), float(nodes.gpu_busy_w[row, slot])

    def refresh_power(self) -> None:
        """Brings `power_w` up to date, after the mirror."""
        snapshot = self._mirror.snapshot()
        if snapshot is not self._snapshot:
            self._read_snapshot(snapshot)
        for name in self._stale:
            self._update_node(name, snapshot)
        self._stale.clear()
        self.power_w = float(self._node_w.sum())

    def _read_snapshot(self, snapshot: Snapshot) -> None:
        shape = snapshot.nodes.gpu_free.shape
        cpu_free, gpu_free = self._arrays
        if gpu_free.shape != shape:
            # Only by nodes that come: whole blocks at a time are not worth the words.
            rows = len(self._node_w)
            cpu_free, gpu_free = np.zeros(shape[0], np.int64), np.zeros(shape, np.int64)
            cpu_free[:rows] = self._arrays[0]
            gpu_free[:rows, : self._arrays[1].shape[1]] = self._arrays[1]
            self._node_w = np.concatenate([self._node_w, np.zeros(shape[0] - rows)])
            self._arrays = cpu_free, gpu_free
            self._stale.update(snapshot.names[rows:])
        views = cpu_free.view(), gpu_free.view()
        for view in views:
            view.flags.writeable = False  # as the kernel was compiled for
        self._nodes = snapshot.nodes._replace(cpu_free=views[0], gpu_free=views[1])
        self._snapshot = snapshot

    def _update_node(self, name: str, snapshot: Snapshot) -> None:
        record, row = self._records[name], self._mirror.row(name)
        others, held = record.others, self._gpu_milli.get(name, {})
        cpu_free, gpu_free = self._arrays
        cpu_free[row] = max(0, record.inventory.cpu_milli - others.cpu_milli - self._cpu_milli.get(name, 0))
        free = [GPU_WHOLE_MILLI - held.get(uuid, 0) for uuid in snapshot.devices[row].uuids]
        if others.gpu_count:  # the highest indexes of what is not held, as the ledger takes it
            for slot in [slot for slot, milli in enumerate(free) if milli == GPU_WHOLE_MILLI][-others.gpu_count :]:
                free[slot] = 0
        gpu_free[row, : len(free)] = free
        self._node_w[row] = node_power(self._nodes, row)


class RequestKind(NamedTuple):
    """Equal work: where one entry of a kind finds no room, none does."""

    request: ResourceRequest
    traits: tuple[str, ...]
    replicas: int


class WaitingEntry(NamedTuple):
    """Replicas of one workload that begin together; sorts by falling priority, then by arrival."""

    rank: int  # minus the priority
    number: int
    replicas: tuple[int, ...]
    key: str


class FreeCapacity(NamedTuple):
    """What is free on one node."""

    cpu_milli: int
    memory_bytes: int
    gpus: tuple[tuple[str, int], ...]  # model and free thousandths of each that takes work
    traits: frozenset[str]

    def fits(self, kind: RequestKind) -> bool:
        """Whether one replica fits."""
        asked = kind.request
        if asked.cpu_milli > self.cpu_milli or asked.memory_bytes > self.memory_bytes:
            return False
        if not self.traits.issuperset(kind.traits):
            return False
        if not asked.gpu_count:
            return True
        models, share = asked.gpu_models, asked.gpu_milli
        fitting = sum(free >= share and (not models or model in models) for model, free in self.gpus)
        return fitting >= asked.gpu_count


class WaitingQueues:
    """The entries, each kind in its order."""

    def __init__(self) -> None:
        self._queues: dict[RequestKind, list[WaitingEntry]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, kind: RequestKind) -> bool:
        return kind in self._queues

    def add(self, kind: RequestKind, entry: WaitingEntry) -> None:
        """Begins to wait."""
        insort(self._queues.setdefault(kind, []), entry)

    def discard(self, kind: RequestKind, entry: WaitingEntry) -> None:
        """Waits no more."""
        queue = self._queues[kind]
        del queue[bisect_left(queue, entry)]
        if not queue:
            del self._queues[kind]

    def first(self, kind: RequestKind) -> WaitingEntry | None:
        """The next of a kind."""
        queue = self._queues.get(kind)
        return queue[0] if queue else None

    def heads(self, rooms: Iterable[FreeCapacity] | None) -> Iterator[tuple[WaitingEntry, RequestKind]]:
        """The next of each kind of which one replica fits in any of the rooms; of all kinds for None."""
        known = None if rooms is None else list(rooms)
        for kind, queue in self._queues.items():
            if known is None or any(room.fits(kind) for room in known):
                yield queue[0], kind


BEST_FIT_POLICY = "bestfit"
# Where a node must have traits, so many of the best are looked at first, then eight times as many.
_LOOKED_AT = 8
# With more nodes changed at once, every kind of waiting work is tried instead of looking at each of them.
_ROOMS_MOST = 16


@dataclass(slots=True)
class _Ground:
    """What a mirror reads: nodes; best fit knows neither a mix nor quotes."""

    nodes: dict[str, NodeRecord]
    demand: Demand = field(default_factory=Demand)
    market: PriceMarket = field(default_factory=PriceMarket)


@dataclass(slots=True)
class _Job:
    spec: WorkloadSpec
    number: int
    places: dict[int, ReplicaLocation] = field(default_factory=dict)
    waits: dict[int, WaitingEntry] = field(default_factory=dict)  # by replica; a gang's share one

    def kind(self, replicas: Sequence[int]) -> RequestKind:
        return RequestKind(self.spec.request, self.spec.required_traits, len(replicas))


class BestFitCluster:
    """One cluster under best fit."""

    def __init__(self, records: Iterable[NodeRecord], watts: WattsOf) -> None:
        self.nodes = {record.inventory.node_name: record for record in records}
        self.mirror = SnapshotMirror(_Ground(self.nodes), watts)
        self.waiting = WaitingQueues()
        # Replicas that found a place or left it; who read the list clears it.
        self.changed: list[tuple[str, int]] = []
        self._planner = Planner()
        self._jobs: dict[str, _Job] = {}
        self._arrivals = 0
        self._roomier: set[str] = set()
        self._stale: set[str] = set()  # what the mirror does not show yet

    def get_place(self, key: str, replica: int) -> ReplicaLocation | None:
        """Where a replica stands; None if it does not."""
        job = self._jobs.get(key)
        return job.places.get(replica) if job else None

    def refresh(self) -> None:
        """Brings the mirror up to date."""
        if self._stale:
            self.mirror.refresh(self._stale)
            self._stale = set()

    def _snapshot(self) -> Snapshot:
        self.refresh()
        return self.mirror.snapshot()

    # Nodes

    def join_node(self, inventory: Inventory, *, partitioned: bool) -> None:
        """A node came, came back or changed."""
        name = inventory.node_name
        record = self.nodes.get(name)
        if record is None:
            record = self.nodes[name] = NodeRecord(inventory=inventory)
        record.update_inventory(inventory)
        record.set_partitioned(partitioned=partitioned)
        self._mark_stale(name)

    def mark_node_lost(self, name: str) -> None:
        """A node fell silent; what it holds stays."""
        self.nodes[name].state = NodeState.LOST
        self._mark_stale(name)

    def update_external_usage(self, name: str, others: ExternalUsage) -> None:
        """What others hold on a node."""
        self.nodes[name].others = others
        self._mark_stale(name)

    def set_gpu_lost(self, name: str, uuid: str, *, is_lost: bool) -> None:
        """A device answers nothing any more, or answers again."""
        lost = self.nodes[name].lost_gpus
        (lost.add if is_lost else lost.discard)(uuid)
        self._mark_stale(name)

    def set_partitioned_pools(self, is_partitioned: Callable[[str], bool]) -> None:
        """Pools are the partition planner's, or not."""
        for name, record in self.nodes.items():
            wanted = is_partitioned(record.inventory.pool)
            if wanted != record.partitioned:
                record.set_partitioned(partitioned=wanted)
                self._mark_stale(name)

    def set_layout(self, name: str, layout: GpuLayout) -> None:
        """The partition planner has a GPU; what stands there stays."""
        self.nodes[name].layouts[layout.gpu_uuid] = layout
        self._mark_stale(name)

    def _mark_stale(self, name: str) -> None:
        self._stale.add(name)
        self._roomier.add(name)

    # Work

    def add_workload(self, key: str, spec: WorkloadSpec, replicas: tuple[int, ...]) -> None:
        """New work, which is placed or waits."""
        self._arrivals += 1
        self._jobs[key] = _Job(spec, self._arrivals)
        self._place_or_wait(key, replicas)

    def add_replicas(self, key: str, replicas: Iterable[int]) -> None:
        """More replicas of work that is here, each for itself."""
        for replica in replicas:
            self._place_or_wait(key, (replica,))

    def pin_replicas(self, key: str, spec: WorkloadSpec, places: Mapping[int, ReplicaLocation]) -> None:
        """Work that is not best fit's to place stands here, in the stead of where it stood."""
        self.remove_replicas(key)
        self._arrivals += 1
        job = self._jobs[key] = _Job(spec, self._arrivals)
        for replica, place in places.items():
            self._allocate(key, job, replica, place)

    def remove_replicas(self, key: str, replicas: Iterable[int] | None = None) -> None:
        """Work ends, or some replicas of it."""
        job = self._jobs.get(key)
        if job is None:
            return  # in slices, and not placed yet
        gone = [*job.places, *job.waits] if replicas is None else list(replicas)
        for replica in gone:
            entry = job.waits.get(replica)
            if entry is not None:
                self._stop_waiting(job, entry)
                left = tuple(other for other in entry.replicas if other not in gone)
                if left:
                    self._enqueue(job, entry._replace(replicas=left))
                    self._roomier.update(self.nodes)  # a smaller gang may fit anywhere
            place = job.places.pop(replica, None)
            if place is not None:
                self.nodes[place.node_name].release(key, replica)
                self._stale.add(place.node_name)
                self._roomier.add(place.node_name)
                self.changed.append((key, replica))
        if replicas is None:
            del self._jobs[key]

    def place_waiting(self) -> None:
        """Begins what waits and fits now, the highest priority first."""
        names, self._roomier = self._roomier, set()
        if not len(self.waiting):
            return
        rooms = None if len(names) > _ROOMS_MOST else {name: self._room(name) for name in names}
        tries = list(self.waiting.heads(None if rooms is None else filter(None, rooms.values())))
        heapq.heapify(tries)
        while tries:
            entry, kind = heapq.heappop(tries)
            job = self._jobs[entry.key]
            if not self._put(entry.key, job, entry.replicas):
                continue  # and so would all of its kind
            self._stop_waiting(job, entry)
            if rooms is not None:
                rooms = {name: self._room(name) for name in names}
            following = self.waiting.first(kind)
            if following and (rooms is None or any(room and room.fits(kind) for room in rooms.values())):
                heapq.heappush(tries, (following, kind))

    def _place_or_wait(self, key: str, replicas: tuple[int, ...]) -> None:
        job = self._jobs[key]
        # What waits fits nowhere, and so does what is like it.
        if job.kind(replicas) in self.waiting or not self._put(key, job, replicas):
            self._enqueue(job, WaitingEntry(-job.spec.priority, job.number, replicas, key))

    def _enqueue(self, job: _Job, entry: WaitingEntry) -> None:
        self.waiting.add(job.kind(entry.replicas), entry)
        job.waits.update(dict.fromkeys(entry.replicas, entry))

    def _stop_waiting(self, job: _Job, entry: WaitingEntry) -> None:
        self.waiting.discard(job.kind(entry.replicas), entry)
        for replica in entry.replicas:
            del job.waits[replica]

    # Places

    def _put(self, key: str, job: _Job, replicas: tuple[int, ...]) -> bool:
        """All of these or none."""
        request, traits = job.spec.request, set(job.spec.required_traits)
        if len(replicas) > 1:
            snapshot = self._snapshot()
            nodes = snapshot.nodes
            if traits:
                is_open = [traits <= set(self.nodes[name].others.traits) for name in snapshot.names]
                nodes = snapshot.with_open(np.array(is_open, np.bool_)).nodes
            task, allows = make_task(request), snapshot.allowed_models(request.gpu_models)
            if snapshot.assignments_left is not None and snapshot.is_plan_limited(task, allows, len(replicas)):
                nodes, task = limit_to_plan_size(nodes, task, snapshot.assignments_left)
            if replica_room(nodes, task, allows, len(replicas)) < len(replicas):
                return False
        for replica in replicas:
            snapshot = self._snapshot()
            found = self._find_candidate(snapshot, job.spec, traits)
            if found is None:
                assert len(replicas) == 1, "replica_room is exact"
                return False
            uuids = snapshot.devices[found.node].uuids
            place = ReplicaLocation(
                snapshot.names[found.node], tuple(uuids[slot] for slot in found.slots), request.gpu_milli
            )
            self._allocate(key, job, replica, place)
        return True

    def _find_candidate(self, snapshot: Snapshot, spec: WorkloadSpec, traits: set[str]) -> NodeCandidate | None:
        most = _LOOKED_AT if traits else 1
        while True:
            found = self._planner.rank_places(snapshot, spec.request, BEST_FIT_POLICY, most)
            for one in found:
                if traits <= set(self.nodes[snapshot.names[one.node]].others.traits):
                    return one
            if len(found) < most:
                return None
            most *= _LOOKED_AT

    def _allocate(self, key: str, job: _Job, replica: int, place: ReplicaLocation) -> None:
        request = job.spec.request
        assignment = Assignment(
            workload_id=key,
            replica=replica,
            gpu_uuids=place.gpu_uuids,
            gpu_milli=place.gpu_milli if place.gpu_uuids else 0,
            cpu_milli=request.cpu_milli,
            memory_bytes=request.memory_bytes,
        )
        self.nodes[place.node_name].allocate_unchecked(assignment)
        self._stale.add(place.node_name)
        job.places[replica] = place
        self.changed.append((key, replica))

    def _room(self, name: str) -> FreeCapacity | None:
        """What is free on a node; None where it takes nothing new."""
        snapshot, row = self._snapshot(), self.mirror.row(name)
        nodes, record = snapshot.nodes, self.nodes[name]
        if record.state is not NodeState.READY or not nodes.available[row]:
            return None
        models = list(snapshot.models)
        there = zip(
            nodes.gpu_state[row].tolist(), nodes.gpu_model[row].tolist(), nodes.gpu_free[row].tolist(), strict=True
        )
        gpus = tuple((models[model], free) for state, model, free in there if state == GPU_PLACEABLE)
        return FreeCapacity(
            int(nodes.cpu_free[row]), int(nodes.memory_free[row]), gpus, frozenset(record.others.traits)
        )
