"""Nominations: workloads for which others make room, and the places where they are to go.

That of a waiting workload has the places of all its replicas, that of a running service those of more replicas. A nomination
begins with `PreemptionStarted` and lasts until its workload is placed, deferred, moved to another queue or cancelled, a
service until it has these replicas, is scaled down or ends, or until a node or GPU on which it counts is lost. Changed by
events only, through `ClusterState.apply`. Must not know who is chosen as a victim, nor how the victims are stopped.

What other work may use meanwhile (`hold_on`): the nominated devices that are free already, and of CPU and memory what the
victims on a node will not cover; what the victims hold is allocated to them until they have ended.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Self

from eelgrid_controller.state.events import PreemptionStarted, WorkloadScaled
from eelgrid_controller.state.node_allocations import ContradictoryEvent, NodeRecord
from eelgrid_protos.messages import Assignment, GpuSharing, Placement, Workload, WorkloadPhase
from eelgrid_protos.plain_messages import from_plain, to_plain

_GAINING = (WorkloadPhase.PENDING, WorkloadPhase.PLACED)


class Nominations:
    """The nominations of one state, in the order in which they began."""

    def __init__(self, begun: Iterable[PreemptionStarted] = ()) -> None:
        self._by_gainer: dict[str, PreemptionStarted] = {}
        # The workload for which each victim makes room.
        self._gainers: dict[str, str] = {}
        for event in begun:
            self.begin(event)

    def __len__(self) -> int:
        return len(self._by_gainer)

    def __iter__(self) -> Iterator[PreemptionStarted]:
        return iter(tuple(self._by_gainer.values()))

    def __contains__(self, workload_id: object) -> bool:
        return workload_id in self._by_gainer

    def get(self, workload_id: str) -> PreemptionStarted | None:
        """Returns the nomination of a workload."""
        return self._by_gainer.get(workload_id)

    def find_by_victim(self, workload_id: str) -> PreemptionStarted | None:
        """Returns the nomination for which a workload makes room."""
        return self._by_gainer.get(self._gainers.get(workload_id, ""))

    def check(self, event: PreemptionStarted, workloads: Mapping[str, Workload]) -> Workload:
        """Returns the workload for which others are to make room.

        Raises ContradictoryEvent if they do already, if it neither waits nor gets more replicas, or if a victim does not run.
        """
        gainer, victims = workloads.get(event.workload_id), map(workloads.get, event.victims)
        numbers = {place.replica for place in event.placements}
        if gainer is None or gainer.phase not in _GAINING or any(one.replica in numbers for one in gainer.placements):
            raise ContradictoryEvent(f"workload {event.workload_id} neither waits nor gets more replicas")
        if event.workload_id in self._by_gainer or not all(
            one is not None and one.phase is WorkloadPhase.PLACED and not one.stopping_ns for one in victims
        ):
            raise ContradictoryEvent(f"workload {event.workload_id} is nominated, or a victim of it does not run")
        return gainer

    def begin(self, event: PreemptionStarted) -> None:
        """Adds a nomination."""
        self.end(event.workload_id)
        self._by_gainer[event.workload_id] = event
        self._gainers.update(dict.fromkeys(event.victims, event.workload_id))

    def end(self, workload_id: str) -> None:
        """Ends the nomination of a workload, if there is one."""
        event = self._by_gainer.pop(workload_id, None)
        for victim in () if event is None else event.victims:
            if self._gainers.get(victim) == workload_id:
                del self._gainers[victim]

    def list_coming(self, workload_id: str) -> frozenset[int]:
        """Returns the numbers of the replicas for which others make room."""
        event = self._by_gainer.get(workload_id)
        return frozenset() if event is None else frozenset(place.replica for place in event.placements)

    def note_scaling(self, event: WorkloadScaled) -> None:
        """Ends the nomination of a service unless it got other replicas beside those."""
        coming = self.list_coming(event.workload_id)
        if event.released or not event.placements or any(place.replica in coming for place in event.placements):
            self.end(event.workload_id)

    def end_on(self, node_names: Collection[str], gpu_uuid: str = "") -> None:
        """Ends the nominations that count on nodes, or on one GPU."""
        for event in self:
            if any(
                place.node_name in node_names and (not gpu_uuid or gpu_uuid in place.gpu_uuids)
                for place in event.placements
            ):
                self.end(event.workload_id)

    def copy(self) -> Self:
        """Returns an independent copy; events are values."""
        return type(self)(self._by_gainer.values())

    def dump(self) -> list[Any]:
        """Dumps everything as plain values."""
        return [to_plain(event) for event in self]

    @classmethod
    def load(cls, plain: Iterable[Any]) -> Self:
        """Loads what `dump` has dumped."""
        return cls(from_plain(PreemptionStarted, row, trusted=True) for row in plain)

    def list_loads(self, workloads: Mapping[str, Workload], but: str = "") -> dict[str, tuple[GpuSharing, ...]]:
        """Returns the loads that nominated work, but for one, will put on GPUs that it shares, by UUID."""
        found: dict[str, tuple[GpuSharing, ...]] = {}
        for event in self:
            load = workloads[event.workload_id].spec.shared_load
            if load is None or event.workload_id == but:
                continue
            for place in event.placements:
                for uuid in place.gpu_uuids:
                    found[uuid] = (*found.get(uuid, ()), load)
        return found

    def hold_on(self, nodes: Mapping[str, NodeRecord], workloads: Mapping[str, Workload]) -> dict[str, NodeRecord]:
        """Returns the nodes of nominations as all other work must see them, as copies."""
        found: dict[str, NodeRecord] = {}
        for event in self:
            workload = workloads[event.workload_id]
            by_node: dict[str, list[Placement]] = {}
            for place in event.placements:
                by_node.setdefault(place.node_name, []).append(place)
            for name, places in by_node.items():
                record = found.get(name) or nodes[name].copy()
                found[name] = record
                _hold(record, workload, places, event.victims)
        return found


def _hold(record: NodeRecord, workload: Workload, places: Iterable[Placement], victims: Collection[str]) -> None:
    """Allocates on a copy what a nominated workload needs of a node beyond what its victims hold there."""
    request = workload.spec.request
    leaving = [item for item in record.assignments.values() if item.workload_id in victims]
    cpu_milli = sum(item.cpu_milli for item in leaving)
    memory_bytes = sum(item.memory_bytes for item in leaving)
    for place in places:
        held = Assignment(
            workload_id=workload.workload_id,
            replica=place.replica,
            cpu_milli=max(0, request.cpu_milli - cpu_milli),
            memory_bytes=max(0, request.memory_bytes - memory_bytes),
        )
        cpu_milli, memory_bytes = max(0, cpu_milli - request.cpu_milli), max(0, memory_bytes - request.memory_bytes)
        record.allocate_unchecked(held)
        for uuid in place.gpu_uuids:
            covered_milli = sum(item.gpu_milli for item in leaving if uuid in item.gpu_uuids)
            more_milli = max(0, request.gpu_milli - covered_milli)
            if more_milli:
                # Under a key of its own, since each device may lack another share.
                key = f"{workload.workload_id} {uuid}"
                record.allocate_unchecked(
                    Assignment(workload_id=key, replica=place.replica, gpu_uuids=(uuid,), gpu_milli=more_milli)
                )
