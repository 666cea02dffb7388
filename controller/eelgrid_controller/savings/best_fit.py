"""The cluster as plain best fit would have filled it: the same nodes and the same work, other places.

Owns what is held there and what waits. Must not know what the real plan is, nor watts but as
the arrays want them. The score is the published one (`BEST_FIT` in eelgrid_kernels.peers), found
by the planner's own engine.

Theory. Work is placed when it comes, all its replicas or none, and stays where it is until
it ends: best fit moves nothing, knows no budgets and no quotes. What finds no room waits and is
tried when a node gains room, the highest priority first; smaller work may overtake, as in
the cluster. What only an engine decides is taken as it is: slices of GPUs stand where they
stand, and what others hold on a node is held here, too.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from eelgrid_controller.demand import Demand
from eelgrid_controller.ledger import NodeRecord
from eelgrid_controller.occupancy import Others
from eelgrid_controller.planner import Planner, task_of
from eelgrid_controller.quotes import Market
from eelgrid_controller.savings.draw import Place
from eelgrid_controller.savings.waiting import Entry, Kind, Room, Waiting
from eelgrid_controller.snapshot import Mirror, Snapshot, WattsOf, plan_limited
from eelgrid_kernels import GPU_PLACEABLE, Found, replica_room
from eelgrid_protos.messages import Assignment, GpuLayout, Inventory, NodeState, WorkloadSpec

__all__ = ["BestFit"]

POLICY = "bestfit"
# Where a node must have traits, so many of the best are looked at first, then eight times as many.
_LOOKED_AT = 8
# With more nodes changed at once, every kind of waiting work is tried instead of looking at each of them.
_ROOMS_MOST = 16


@dataclass(slots=True)
class _Ground:
    """What a mirror reads: nodes; best fit knows neither a mix nor quotes."""

    nodes: dict[str, NodeRecord]
    demand: Demand = field(default_factory=Demand)
    market: Market = field(default_factory=Market)


@dataclass(slots=True)
class _Job:
    spec: WorkloadSpec
    number: int
    places: dict[int, Place] = field(default_factory=dict)
    waits: dict[int, Entry] = field(default_factory=dict)  # by replica; a gang's share one

    def kind(self, replicas: Sequence[int]) -> Kind:
        return Kind(self.spec.request, self.spec.required_traits, len(replicas))


class BestFit:
    """One cluster under best fit."""

    def __init__(self, records: Iterable[NodeRecord], watts: WattsOf) -> None:
        self.nodes = {record.inventory.node_name: record for record in records}
        self.mirror = Mirror(_Ground(self.nodes), watts)
        self.waiting = Waiting()
        # Replicas that found a place or left it; who read the list clears it.
        self.changed: list[tuple[str, int]] = []
        self._planner = Planner()
        self._jobs: dict[str, _Job] = {}
        self._arrivals = 0
        self._roomier: set[str] = set()
        self._stale: set[str] = set()  # what the mirror does not show yet

    def place(self, key: str, replica: int) -> Place | None:
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

    def joined(self, inventory: Inventory, *, partitioned: bool) -> None:
        """A node came, came back or changed."""
        name = inventory.node_name
        record = self.nodes.get(name)
        if record is None:
            record = self.nodes[name] = NodeRecord(inventory=inventory)
        record.has(inventory)
        record.turn(partitioned=partitioned)
        self._turned(name)

    def lost(self, name: str) -> None:
        """A node fell silent; what it holds stays."""
        self.nodes[name].state = NodeState.LOST
        self._turned(name)

    def occupied(self, name: str, others: Others) -> None:
        """What others hold on a node."""
        self.nodes[name].others = others
        self._turned(name)

    def gpu_turned(self, name: str, uuid: str, *, is_lost: bool) -> None:
        """A device answers nothing any more, or answers again."""
        lost = self.nodes[name].lost_gpus
        (lost.add if is_lost else lost.discard)(uuid)
        self._turned(name)

    def turn(self, is_partitioned: Callable[[str], bool]) -> None:
        """Pools are the partition planner's, or not."""
        for name, record in self.nodes.items():
            wanted = is_partitioned(record.inventory.pool)
            if wanted != record.partitioned:
                record.turn(partitioned=wanted)
                self._turned(name)

    def laid_out(self, name: str, layout: GpuLayout) -> None:
        """The partition planner has a GPU; what stands there stays."""
        self.nodes[name].layouts[layout.gpu_uuid] = layout
        self._turned(name)

    def _turned(self, name: str) -> None:
        self._stale.add(name)
        self._roomier.add(name)

    # Work

    def arrive(self, key: str, spec: WorkloadSpec, replicas: tuple[int, ...]) -> None:
        """New work, which is placed or waits."""
        self._arrivals += 1
        self._jobs[key] = _Job(spec, self._arrivals)
        self._begin(key, replicas)

    def grow(self, key: str, replicas: Iterable[int]) -> None:
        """More replicas of work that is here, each for itself."""
        for replica in replicas:
            self._begin(key, (replica,))

    def pin(self, key: str, spec: WorkloadSpec, places: Mapping[int, Place]) -> None:
        """Work that is not best fit's to place stands here, in the stead of where it stood."""
        self.leave(key)
        self._arrivals += 1
        job = self._jobs[key] = _Job(spec, self._arrivals)
        for replica, place in places.items():
            self._hold(key, job, replica, place)

    def leave(self, key: str, replicas: Iterable[int] | None = None) -> None:
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
                    self._wait(job, entry._replace(replicas=left))
                    self._roomier.update(self.nodes)  # a smaller gang may fit anywhere
            place = job.places.pop(replica, None)
            if place is not None:
                self.nodes[place.node_name].release(key, replica)
                self._stale.add(place.node_name)
                self._roomier.add(place.node_name)
                self.changed.append((key, replica))
        if replicas is None:
            del self._jobs[key]

    def try_waiting(self) -> None:
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

    def _begin(self, key: str, replicas: tuple[int, ...]) -> None:
        job = self._jobs[key]
        # What waits fits nowhere, and so does what is like it.
        if job.kind(replicas) in self.waiting or not self._put(key, job, replicas):
            self._wait(job, Entry(-job.spec.priority, job.number, replicas, key))

    def _wait(self, job: _Job, entry: Entry) -> None:
        self.waiting.add(job.kind(entry.replicas), entry)
        job.waits.update(dict.fromkeys(entry.replicas, entry))

    def _stop_waiting(self, job: _Job, entry: Entry) -> None:
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
            task, allows = task_of(request), snapshot.allows(request.gpu_models)
            if snapshot.assignments_left is not None and snapshot.plans_bind(task, allows, len(replicas)):
                nodes, task = plan_limited(nodes, task, snapshot.assignments_left)
            if replica_room(nodes, task, allows, len(replicas)) < len(replicas):
                return False
        for replica in replicas:
            snapshot = self._snapshot()
            found = self._find(snapshot, job.spec, traits)
            if found is None:
                assert len(replicas) == 1, "replica_room is exact"
                return False
            uuids = snapshot.devices[found.node].uuids
            place = Place(snapshot.names[found.node], tuple(uuids[slot] for slot in found.slots), request.gpu_milli)
            self._hold(key, job, replica, place)
        return True

    def _find(self, snapshot: Snapshot, spec: WorkloadSpec, traits: set[str]) -> Found | None:
        most = _LOOKED_AT if traits else 1
        while True:
            found = self._planner.best(snapshot, spec.request, POLICY, most)
            for one in found:
                if traits <= set(self.nodes[snapshot.names[one.node]].others.traits):
                    return one
            if len(found) < most:
                return None
            most *= _LOOKED_AT

    def _hold(self, key: str, job: _Job, replica: int, place: Place) -> None:
        request = job.spec.request
        assignment = Assignment(
            workload_id=key, replica=replica, gpu_uuids=place.gpu_uuids,
            gpu_milli=place.gpu_milli if place.gpu_uuids else 0,
            cpu_milli=request.cpu_milli, memory_bytes=request.memory_bytes,
        )  # fmt: skip
        self.nodes[place.node_name].book(assignment)
        self._stale.add(place.node_name)
        job.places[replica] = place
        self.changed.append((key, replica))

    def _room(self, name: str) -> Room | None:
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
        return Room(int(nodes.cpu_free[row]), int(nodes.memory_free[row]), gpus, frozenset(record.others.traits))
