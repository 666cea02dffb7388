"""Savings: what placement saves against plain best fit, in watts and joules, from the cluster's events.

Theory (docs/explanation/savings.md). Both plans are weighed by the planner's model, so that its error is in both and mostly
cancels. Only replicas that run in both plans are weighed: work that one plan has no room for draws nothing
there, and would appear as saved. Replicas that run in one plan alone are counted separately. The model takes a
GPU in use at its default limit in both plans; what lowered limits save is reported apart, since limited work
runs longer. Threads, metrics and the time of day are others'; events carry their times.

Best fit (`BestFitCluster`) has the same nodes and the same work, and does not know the real plan. The score is the
published one (`BEST_FIT` in eelgrid_kernels), found by the planner's own engine. Work is placed when it arrives, all its
replicas or none, and stays until it ends: best fit moves nothing, knows no budgets and no opportunity prices. What finds
no room waits and is tried when a node gains room, the highest priority first; smaller work may overtake. Replicas that
ask for the same fit or fail together, so a node is evaluated once for each kind of request. What only an engine decides
is taken as it is: slices of GPUs stay where they are.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from eelgrid_controller.placement.planner import Planner, make_task
from eelgrid_controller.placement.snapshot import Snapshot, SnapshotMirror, WattsOf, limit_to_plan_size
from eelgrid_controller.state.array_elements import list_submitted
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.cordons import OperatorCordon
from eelgrid_controller.state.demand import Demand, PriceMarket
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.events import (
    ArraySubmitted,
    DevicesCorrected,
    Event,
    GpuLost,
    GpuReturned,
    NodeCordoned,
    NodeJoined,
    NodeLost,
    NodeOccupied,
    NodesRemoved,
    NodeUncordoned,
    PartitionsPlanned,
    PolicyChanged,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadEvicted,
    WorkloadLimited,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadRetried,
    WorkloadScaled,
    WorkloadSubmitted,
)
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import is_pool_partitioned
from eelgrid_kernels.arrays import Nodes
from eelgrid_kernels.candidates import NodeCandidate
from eelgrid_kernels.node_cost import GPU_ABSENT, GPU_PLACEABLE, GPU_WHOLE_MILLI, node_power, replica_room
from eelgrid_protos.messages import (
    Assignment,
    GpuLayout,
    Inventory,
    NodeState,
    Placement,
    Policy,
    ResourceRequest,
    Workload,
    WorkloadSpec,
)


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
        record.update_inventory(inventory, 0)
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

    def set_cordon(self, event: NodeCordoned | NodeUncordoned) -> None:
        """An operator closed a node or GPUs of it to new work, or opened them."""
        is_closed = isinstance(event, NodeCordoned)
        cordon = OperatorCordon(since_ns=event.time_ns) if is_closed else None
        self.nodes[event.node_name].set_cordon(event.gpu_uuids, cordon)
        self._mark_stale(event.node_name)

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


# Plans, and where a replica stands.
BEST_FIT, EELGRID, BOTH = "best_fit", "eelgrid", "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialCluster:
    """A cluster to begin with: what cannot change under us is shared, records are our own."""

    policy: Policy
    nodes: tuple[NodeRecord, ...]
    # Those that live, in the order of submission.
    workloads: tuple[Workload, ...]
    now_ns: int

    @classmethod
    def from_state(cls, state: ClusterState, now_ns: int) -> "InitialCluster":
        """The state of this moment."""
        records = (
            NodeRecord(
                inventory=record.inventory,
                state=record.state,
                lost_gpus=record.lost_gpus.copy(),
                others=record.others,
                partitioned=record.partitioned,
                layouts=record.layouts.copy(),
            )
            for record in state.nodes.values()
        )
        live = (one for one in state.workloads.values() if not one.phase.is_ended)
        return cls(policy=state.policy, nodes=tuple(records), workloads=tuple(live), now_ns=now_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingsFigures:
    """Both plans at one moment. Watts and joules are of nodes with the replicas that stand in both plans."""

    began_ns: int
    power_w: Mapping[str, float]  # by plan
    energy_j: Mapping[str, float]  # since the beginning
    # Less than the model takes, for lowered limits of the real plan.
    limits_w: float
    # By BOTH, or by the plan in which alone they stand.
    replicas: Mapping[str, int]
    gpu_milli: Mapping[str, int]

    @property
    def saved_w(self) -> float:
        """What the choice of places saves; below 0 where best fit would draw less."""
        return self.power_w[BEST_FIT] - self.power_w[EELGRID]


@dataclass(slots=True)
class _Work:
    spec: WorkloadSpec
    limit_w: float | None = None
    # Where the real plan has its replicas.
    places: dict[int, ReplicaLocation] = field(default_factory=dict)

    @property
    def is_sliced(self) -> bool:
        return self.spec.service is not None and self.spec.service.slices


class _Counted(NamedTuple):
    """A replica as it was counted in, to be counted out alike."""

    there: ReplicaLocation | None  # under best fit
    here: ReplicaLocation | None
    cpu_milli: int


class PlacementSavings:
    """Follows the events of one cluster; synchronous and deterministic."""

    def __init__(self, beginning: InitialCluster, watts: WattsOf) -> None:
        self._policy = beginning.policy
        self._best_fit = BestFitCluster(beginning.nodes, watts)
        self._draws = {plan: PlanPowerDraw(self._best_fit.mirror, self._best_fit.nodes) for plan in (BEST_FIT, EELGRID)}
        self._energy_j = dict.fromkeys(self._draws, 0.0)
        self._works: dict[str, _Work] = {}
        self._counted: dict[tuple[str, int], _Counted] = {}
        self._changed: list[tuple[str, int]] = []
        self._replicas, self._gpu_milli = (dict.fromkeys((BOTH, EELGRID, BEST_FIT), 0) for _ in range(2))
        self._limited: set[str] = set()
        self._began_ns = self._now_ns = beginning.now_ns
        for workload in beginning.workloads:
            key, spec = workload.workload_id, workload.spec
            standing = tuple(one.replica for one in workload.placements)
            self._on_submitted(key, spec, standing or tuple(range(spec.replicas)))
            self._on_placed(key, workload.placements)
            self._limit(key, workload.power_limit_w)
        self._best_fit.place_waiting()
        self.advance_to(beginning.now_ns)

    def follow_event(self, event: Event) -> None:
        """Takes in what happened, and lets best fit decide what there is to decide; `advance` weighs it."""
        match event:
            case WorkloadSubmitted() | ArraySubmitted():
                for workload in list_submitted(event):
                    self._on_submitted(workload.workload_id, workload.spec, tuple(range(workload.spec.replicas)))
            case WorkloadPlaced():
                self._on_placed(event.workload_id, event.placements)
                self._limit(event.workload_id, event.power_limit_w)
            case WorkloadMoved():
                self._on_placed(event.workload_id, event.placements)
            case WorkloadScaled():
                self._on_scaled(event)
            case WorkloadCancelled(workload_id=key) | WorkloadCompleted(workload_id=key):
                self._on_ended(key)
            case WorkloadEvicted(workload_id=key) | WorkloadRetried(workload_id=key):
                # It begins anew under both plans; what waits was placed under neither.
                spec, replicas = self._works[key].spec, tuple(range(self._works[key].spec.replicas))
                self._on_ended(key)
                self._on_submitted(key, spec, replicas)
            case WorkloadLimited(workload_id=key, power_limit_w=limit_w):
                self._limit(key, limit_w)
            case PartitionsPlanned():
                self._on_partitioned(event)
            case DevicesCorrected(replicas=replicas):
                for one in replicas:
                    self._on_placed(one.workload_id, (one.placement,))
            case _:
                self._of_nodes(event)
        self._best_fit.place_waiting()

    def advance_to(self, now_ns: int) -> None:
        """A turn ends: what passed since the last one was at the watts of then, what was followed counts from now on."""
        passed_s = max(0, now_ns - self._now_ns) / 1e9
        self._now_ns = max(self._now_ns, now_ns)
        for plan, draw in self._draws.items():
            self._energy_j[plan] += draw.power_w * passed_s
        best_fit = self._best_fit
        for key, replica in dict.fromkeys((*self._changed, *best_fit.changed)):
            self._recount(key, replica)
        self._changed.clear()
        best_fit.changed.clear()
        best_fit.refresh()
        for draw in self._draws.values():
            draw.refresh_power()

    def figures(self) -> SavingsFigures:
        """As the last turn left it."""
        return SavingsFigures(
            began_ns=self._began_ns,
            power_w={plan: draw.power_w for plan, draw in self._draws.items()},
            energy_j=self._energy_j.copy(),
            limits_w=sum(map(self._off_by_limit, self._limited)),
            replicas=self._replicas.copy(),
            gpu_milli=self._gpu_milli.copy(),
        )

    def _of_nodes(self, event: Event) -> None:
        best_fit = self._best_fit
        match event:
            case NodeJoined(inventory=inventory):
                name = inventory.node_name
                best_fit.join_node(inventory, partitioned=is_pool_partitioned(self._policy, inventory.pool))
            case NodeLost(node_name=name):
                best_fit.mark_node_lost(name)
            case NodesRemoved(node_names=names):
                # Work of best fit's may stand there, which the cluster's did not.
                for name in names:
                    best_fit.mark_node_lost(name)
                    for draw in self._draws.values():
                        draw.mark_node_changed(name)
                return
            case NodeOccupied(node_name=name, others=others):
                best_fit.update_external_usage(name, others)
            case GpuLost(node_name=name, gpu_uuid=uuid) | GpuReturned(node_name=name, gpu_uuid=uuid):
                best_fit.set_gpu_lost(name, uuid, is_lost=isinstance(event, GpuLost))
            case NodeCordoned(node_name=name) | NodeUncordoned(node_name=name):
                best_fit.set_cordon(event)
            case PolicyChanged(policy=policy):
                self._policy = policy
                best_fit.set_partitioned_pools(lambda pool: is_pool_partitioned(policy, pool))
                return
            case _:
                return
        for draw in self._draws.values():
            draw.mark_node_changed(name)

    def _on_submitted(self, key: str, spec: WorkloadSpec, replicas: tuple[int, ...]) -> None:
        work = self._works[key] = _Work(spec)
        if not work.is_sliced:
            self._best_fit.add_workload(key, spec, replicas)

    def _on_placed(self, key: str, placements: Iterable[Placement]) -> None:
        """Replicas of the real plan stand here, in the stead of where they stood."""
        work = self._works[key]
        for one in placements:
            work.places[one.replica] = _replica_location(work.spec, one)
            self._changed.append((key, one.replica))
        if work.is_sliced:
            self._best_fit.pin_replicas(key, work.spec, work.places)

    def _on_scaled(self, event: WorkloadScaled) -> None:
        key = event.workload_id
        work = self._works[key]
        for replica in event.released:
            del work.places[replica]
            self._changed.append((key, replica))
        if not work.is_sliced:
            self._best_fit.remove_replicas(key, event.released)
            self._best_fit.add_replicas(key, [one.replica for one in event.placements])
        self._on_placed(key, event.placements)

    def _on_ended(self, key: str) -> None:
        work = self._works.pop(key)
        self._limited.discard(key)
        self._changed.extend((key, replica) for replica in work.places)
        self._best_fit.remove_replicas(key)

    def _limit(self, key: str, limit_w: float | None) -> None:
        self._works[key].limit_w = limit_w
        (self._limited.discard if limit_w is None else self._limited.add)(key)

    def _on_partitioned(self, event: PartitionsPlanned) -> None:
        for planned in event.layouts:
            self._best_fit.set_layout(planned.node_name, planned.layout)
        for service in event.services:
            work = self._works[service.workload_id]
            self._changed.extend((service.workload_id, replica) for replica in work.places)
            work.places.clear()
            self._on_placed(service.workload_id, service.placements)

    def _recount(self, key: str, replica: int) -> None:
        was = self._counted.pop((key, replica), None)
        if was is not None:
            self._count(was, -1)
        work = self._works.get(key)
        if work is None:
            return
        now = _Counted(self._best_fit.get_place(key, replica), work.places.get(replica), work.spec.request.cpu_milli)
        if now.here or now.there:
            self._counted[key, replica] = now
            self._count(now, 1)

    def _count(self, one: _Counted, sign: int) -> None:
        there, here, cpu_milli = one
        place = here or there
        assert place is not None
        where = BEST_FIT if here is None else EELGRID if there is None else BOTH
        self._replicas[where] += sign
        self._gpu_milli[where] += sign * len(place.gpu_uuids) * place.gpu_milli
        if here is not None and there is not None:
            self._draws[BEST_FIT].count_replica(there, cpu_milli, sign)
            self._draws[EELGRID].count_replica(here, cpu_milli, sign)

    def _off_by_limit(self, key: str) -> float:
        """Watts that a limit keeps compared replicas of one workload from, at the most."""
        work = self._works[key]
        assert work.limit_w is not None
        # What was placed since the last turn is not counted yet.
        counted = {replica: self._counted.get((key, replica)) for replica in work.places}
        compared = [work.places[replica] for replica, found in counted.items() if found is not None and found.there]
        watts = (pair for place in compared for pair in self._draws[EELGRID].gpus_w(place))
        return sum(max(0.0, busy_w - max(work.limit_w, idle_w)) for idle_w, busy_w in watts)


def _replica_location(spec: WorkloadSpec, placement: Placement) -> ReplicaLocation:
    part = placement.gpu_instance
    milli = spec.request.gpu_milli if part is None else part.gpu_milli
    return ReplicaLocation(placement.node_name, placement.gpu_uuids, milli)
