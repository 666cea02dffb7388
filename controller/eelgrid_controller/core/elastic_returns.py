"""Returns of elastic jobs: what a job has grown by is free for whoever waits.

A job that may run on more replicas than it was submitted with grows while GPUs are free (objectives.elastic). It owes those
replicas nothing: when work waits for capacity, or a service lacks replicas, the job shrinks again, down to the size that it
was submitted with, and no further than its promised deadline allows. Nobody is stopped for it, so no queue has to permit it.
`ElasticReturns` finds the replicas whose return makes room, in the same decision in which the work starts. Must not know why
jobs grow, nor who is waiting before whom.

Theory. All that may be returned is thought gone, and the work placed on the nodes as they are then, within quotas, reserved
starts and held capacity. Where it has a place, everything is put back that the place and the quota do not need, job by job:
so no job shrinks that would not have to. A job keeps a size that was measured, since only between such sizes it grows again,
and its first replica, where the others rendezvous.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from eelgrid_controller.core.backfill import BackfillPlanner
from eelgrid_controller.core.capacity_holds import CapacityHolds
from eelgrid_controller.core.workloads import list_healthy_replicas
from eelgrid_controller.placement.placer import AlteredNodes, WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.queueing.admission import QueueHold, QueueIndex
from eelgrid_controller.queueing.elastic_shares import advance_share, measure_scaling
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event, WorkloadScaled
from eelgrid_controller.state.node_allocations import (
    ContradictoryEvent,
    NodeRecord,
    is_sliced,
    list_affected_workloads,
    make_assignment,
)
from eelgrid_protos.messages import Placement, Workload, WorkloadPhase, WorkloadSpec

# By job, the replicas that go.
_Released: TypeAlias = Mapping[str, tuple[Placement, ...]]
# Jobs that are asked, those that have grown by the most first.
_JOBS_MOST = 256


@dataclass(frozen=True, slots=True)
class _Return:
    """A job that may shrink: the smaller sizes that it may have, falling, and the replicas that it has not at the least."""

    job: Workload
    sizes: tuple[int, ...]
    going: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class ReturnedPlace:
    """Where work goes, and how jobs shrink for it."""

    decision: PlacementDecision
    shrinks: tuple[WorkloadScaled, ...]


class ElasticReturns:
    """What elastic jobs of one state have grown by."""

    def __init__(
        self,
        state: ClusterState,
        placer: WorkloadPlacer,
        queues: QueueIndex,
        backfill: BackfillPlanner,
        *,
        holds: CapacityHolds,
        find_floor: Callable[[Workload, int], int],
    ) -> None:
        self._state, self._placer, self._queues = state, placer, queues
        self._backfill, self._holds, self._find_floor = backfill, holds, find_floor
        self._grown = {key for key, one in state.workloads.items() if _count_grown(one)}

    def __bool__(self) -> bool:
        return bool(self._grown)

    def refresh(self, event: Event) -> None:
        """Follows an event that was applied."""
        for key in list_affected_workloads(event):
            workload = self._state.workloads.get(key)
            (self._grown.add if workload is not None and _count_grown(workload) else self._grown.discard)(key)

    def find_start(self, workload: Workload, now_ns: int) -> ReturnedPlace | None:
        """Returns where waiting work starts if jobs shrink, and how; None if that does not help."""

        def decide(spec: WorkloadSpec, records: Mapping[str, NodeRecord]) -> PlacementDecision:
            closed = self._backfill.list_closed_nodes(workload, now_ns)
            return self._holds.decide(workload, spec, now_ns, closed=closed, is_round=True, altered=records)

        return self._find(workload, workload.spec, decide, now_ns)

    def find_growth(self, workload: Workload, missing: int, now_ns: int) -> ReturnedPlace | None:
        """Returns where missing replicas of a running service go if jobs shrink, as many as can; None if none can."""

        def decide(spec: WorkloadSpec, records: Mapping[str, NodeRecord]) -> PlacementDecision:
            closed = self._backfill.list_closed_nodes(workload, now_ns)
            found = self._placer.decide_on_altered(AlteredNodes(records), spec, workload.workload_id, closed)
            if found.placements or not found.room:
                return found
            fewer = replace(spec, replicas=found.room)
            return self._placer.decide_on_altered(AlteredNodes(records), fewer, workload.workload_id, closed)

        return self._find(workload, replace(workload.spec, replicas=missing), decide, now_ns)

    def _find(
        self,
        workload: Workload,
        spec: WorkloadSpec,
        decide: Callable[[WorkloadSpec, Mapping[str, NodeRecord]], PlacementDecision],
        now_ns: int,
    ) -> ReturnedPlace | None:
        returns = self._list_returns(workload, now_ns)
        if not returns or is_sliced(workload) or self._placer.uses_engine_rules(workload.workload_id):
            return None
        released: _Released = {one.job.workload_id: one.going for one in returns}
        admitted = self._admit(workload, spec, released)
        if admitted is None:
            return None
        decision = decide(admitted, self._copy_nodes(released))
        if not decision.placements:
            return None
        placed = replace(workload, spec=replace(spec, replicas=len(decision.placements)))
        released = self._put_back(placed, decision, returns, released)
        shrinks = (self._shrink(one.job, released.get(one.job.workload_id, ()), now_ns) for one in returns)
        return ReturnedPlace(decision, tuple(event for event in shrinks if event.released))

    def _list_returns(self, workload: Workload, now_ns: int) -> list[_Return]:
        found = []
        for key in sorted(self._grown, key=lambda one: (-_count_grown(self._state.workloads[one]), one))[:_JOBS_MOST]:
            job = self._state.workloads[key]
            sizes = self._list_sizes(job, now_ns)
            # Of jobs on lost nodes nobody knows what still runs.
            if (
                sizes
                and key != workload.workload_id
                and len(list_healthy_replicas(self._state, job)) == len(job.placements)
            ):
                found.append(_Return(job, sizes, job.placements[sizes[-1] :]))
        return found

    def _list_sizes(self, job: Workload, now_ns: int) -> tuple[int, ...]:
        """Returns the smaller sizes that a job may have, falling."""
        training, count = job.spec.training, len(job.placements)
        assert training is not None, "elastic jobs have a promise"
        floor = max(1, job.replicas_begun, training.replicas_least, self._find_floor(job, now_ns))
        gpu = next((uuid for place in job.placements for uuid in place.gpu_uuids), "")
        device = self._state.nodes[job.placements[0].node_name].gpu(gpu)
        rates: Mapping[int, float] = {}
        if device is not None:
            points, each = self._state.points.get(training.profile, ()), job.spec.request.gpu_count
            rates, _ = measure_scaling(
                points, device.model, each, least=training.replicas_least, most=training.replicas_most
            )
        return tuple(sorted({size for size in (*rates, floor) if floor <= size < count}, reverse=True))

    def _admit(self, workload: Workload, spec: WorkloadSpec, released: _Released) -> WorkloadSpec | None:
        if not self._queues.is_active:
            return spec
        admitted = self._queues.admit_without(
            spec,
            lambda: self._placer.snapshot().models,
            workload_id=workload.workload_id,
            released=released.items(),
        )
        return None if isinstance(admitted, QueueHold) else admitted

    def _copy_nodes(self, released: _Released) -> dict[str, NodeRecord]:
        """Returns the nodes as other work sees them once these replicas are gone, as copies."""
        records = self._state.nominations.hold_on(self._state.nodes, self._state.workloads)
        for key, places in released.items():
            for place in places:
                if place.node_name not in records:
                    records[place.node_name] = self._state.nodes[place.node_name].copy()
                records[place.node_name].release(key, place.replica)
        return records

    def _put_back(
        self, workload: Workload, decision: PlacementDecision, returns: Iterable[_Return], released: _Released
    ) -> _Released:
        """Has jobs keep as much as they can of what they were thought to release."""
        names = {place.node_name for place in decision.placements}
        near = {key: places for key, places in released.items() if any(one.node_name in names for one in places)}
        if self._suffices(workload, decision, near):
            released = near
        gpus = {uuid for place in decision.placements for uuid in place.gpu_uuids}
        for one in returns:
            key, count = one.job.workload_id, len(one.job.placements)
            # What holds the GPUs of the place goes first, then what else is on its nodes.
            order = sorted(
                released.get(key, ()), key=lambda item: (gpus.isdisjoint(item.gpu_uuids), item.node_name not in names)
            )
            for size in (count, *one.sizes) if order else ():
                trial = {**released, key: tuple(order[: count - size])}
                if self._suffices(workload, decision, trial):
                    released = trial
                    break
        return released

    def _suffices(self, workload: Workload, decision: PlacementDecision, released: _Released) -> bool:
        """Whether work may start on the models of its places, and has these and their watts, once these replicas are gone."""
        admitted = self._admit(workload, workload.spec, released)
        if admitted is None or not self._placer.is_open_to(admitted, workload.workload_id, decision.placements):
            return False
        names = {place.node_name for place in decision.placements}
        near = {key: tuple(one for one in places if one.node_name in names) for key, places in released.items()}
        records = self._copy_nodes(released if self._placer.allowance.has_budgets else near)
        if not self._placer.allowance.holds(decision.placements, decision.power_limit_w, records):
            return False
        for place in decision.placements:
            record = records.get(place.node_name) or self._state.nodes[place.node_name].copy()
            records[place.node_name] = record
            # Under a key of its own, since a running service may have a replica of this number there.
            held = replace(make_assignment(workload, place), workload_id=f" {workload.workload_id}")
            try:
                record.allocate(held)
            except ContradictoryEvent:
                return False
        return True

    def _shrink(self, job: Workload, going: tuple[Placement, ...], now_ns: int) -> WorkloadScaled:
        return WorkloadScaled(
            time_ns=now_ns,
            workload_id=job.workload_id,
            released=tuple(sorted(place.replica for place in going)),
            share=advance_share(job, now_ns),
        )


def _count_grown(workload: Workload) -> int:
    """Returns how many replicas a running elastic job has beyond those that it was submitted with."""
    training = workload.spec.training
    if workload.phase is not WorkloadPhase.PLACED or training is None or not training.is_elastic:
        return 0
    return max(0, len(workload.placements) - (workload.replicas_begun or workload.spec.replicas))
