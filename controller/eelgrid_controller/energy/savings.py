"""Savings: what placement saves against plain best fit, in watts and joules, from the cluster's events.

Owns which replicas are compared, the watts of both plans and their joules. Must not know threads, metrics or
what time it is; events carry theirs.

Theory (docs/explanation/savings.md). Both plans are weighed by the planner's model, so that its error is in both and mostly
cancels. Only replicas that run in both plans are weighed: work that one plan has no room for draws nothing
there, and would appear as saved. Replicas that run in one plan alone are counted separately. The model takes a
GPU in use at its default limit in both plans; what lowered limits save is reported apart, since limited work
runs longer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from eelgrid_controller.energy.best_fit_baseline import BestFitCluster, PlanPowerDraw, ReplicaLocation
from eelgrid_controller.placement.snapshot import WattsOf
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    DevicesCorrected,
    Event,
    GpuLost,
    GpuReturned,
    NodeJoined,
    NodeLost,
    NodeOccupied,
    NodesRemoved,
    PartitionsPlanned,
    PolicyChanged,
    WorkloadCancelled,
    WorkloadLimited,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadScaled,
    WorkloadSubmitted,
)
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import is_pool_partitioned
from eelgrid_protos.messages import Placement, Policy, Workload, WorkloadPhase, WorkloadSpec

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
        live = (one for one in state.workloads.values() if one.phase is not WorkloadPhase.CANCELLED)
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
            case WorkloadSubmitted(workload_id=key, spec=spec):
                self._on_submitted(key, spec, tuple(range(spec.replicas)))
            case WorkloadPlaced() | WorkloadMoved():
                self._on_placed(event.workload_id, event.placements)
            case WorkloadScaled():
                self._on_scaled(event)
            case WorkloadCancelled(workload_id=key):
                self._on_ended(key)
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
