"""What the partition planner is told: one moment of the partitioned pools, copied for a search that takes its time.

Owns the way from nodes and workloads to GPUs as they run. Must not know what is
planned, nor services' latencies (demand.py does).

Theory: a GPU counts as it is wanted, not as it stands: what was planned is on its way,
and what an agent could not do yet it is asked again. Held, and left as they are, are
GPUs with other work on them, with a cordon, and those on which instances stand though
nothing was ever wanted: somebody else made them, and may use them. GPUs of lost nodes, and lost GPUs, are no part of it: what ran there
serves nobody, and is let go when others stand in its stead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eelgrid_controller.ledger import NodeRecord
from eelgrid_controller.partition.plan import Replica
from eelgrid_controller.partition.problem import Pool
from eelgrid_controller.partition.running import RunningGpu, Standing
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.replicas import sliced
from eelgrid_controller.slices import geometry_of, places
from eelgrid_controller.state import ClusterState
from eelgrid_protos.catalogue import MigGeometry
from eelgrid_protos.messages import (
    Assignment,
    Gpu,
    GpuLayout,
    ServicePromise,
    Slice,
    WantedInstance,
    Workload,
    WorkloadPhase,
)

__all__ = ["Asked", "Seat", "Survey", "gpu_as_it_runs", "layout_now", "survey_gpus", "usable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One partitioned GPU: where it is, what is wanted of it, and as the planner sees it."""

    node_name: str
    index: int
    geometry: MigGeometry
    running: RunningGpu
    layout: GpuLayout
    held: str = ""  # why it stays as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One service with slices, and the points of its profile on models that it allows."""

    workload: Workload
    promise: ServicePromise
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Partitioned GPUs by node and index, and services by the order of their submission."""

    revision: int
    seats: tuple[Seat, ...]
    services: tuple[Asked, ...]

    @property
    def geometries(self) -> dict[str, MigGeometry | None]:
        """By model."""
        return {seat.running.model: seat.geometry for seat in reversed(self.seats)}

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The models that there are; a GPU costs one."""
        found = self.geometries
        return tuple(Pool(model=model, count=None, geometry=found[model]) for model in sorted(found))


def survey_gpus(state: ClusterState) -> Survey:
    """Copies what a plan needs."""
    seats = tuple(_seats(state))
    return Survey(revision=state.revision, seats=seats, services=tuple(_services(state)))


def _seats(state: ClusterState) -> Iterator[Seat]:
    first: dict[str, str] = {}
    for name in sorted(state.nodes):
        record = state.nodes[name]
        for gpu in sorted(record.inventory.gpus, key=lambda gpu: gpu.index):
            geometry = geometry_of(gpu)
            if geometry is None or not usable(record, gpu):
                continue
            held = _held(record, gpu)
            if first.setdefault(gpu.model, geometry.key) != geometry.key:
                held = f"{gpu.model} is the name of another part, too"
            yield Seat(
                node_name=name,
                index=gpu.index,
                geometry=geometry,
                running=gpu_as_it_runs(record, gpu, geometry)._replace(held=bool(held)),
                layout=layout_now(record, gpu),
                held=held,
            )


def usable(record: NodeRecord, gpu: Gpu) -> bool:
    """Whether replicas on a GPU count: it is the planner's, its node is ready and it answers."""
    return (
        record.partitioned
        and record.keeps(gpu)
        and record.is_ready
        and record.ahead is None
        and record.is_heard
        and gpu.uuid not in record.lost_gpus
    )


def _held(record: NodeRecord, gpu: Gpu) -> str:
    others = [
        item.workload_id
        for item in record.assignments.values()
        if gpu.uuid in item.gpu_uuids and item.gpu_instance is None
    ]
    if others:
        return f"{others[0]} runs on it"
    if gpu.uuid in record.taken_by_others():
        return "others run on it"
    if gpu.uuid not in record.layouts and gpu.gpu_instances:
        return "somebody else cut it; remove its instances to hand it over"
    return f"cordoned: {gpu.cordon}" if gpu.cordon else ""


def layout_now(record: NodeRecord, gpu: Gpu) -> GpuLayout:
    """What is wanted; what stands where nothing is."""
    there = sorted((one.start, one.profile) for one in gpu.gpu_instances)
    instances = tuple(WantedInstance(profile=profile, start=start) for start, profile in there)
    standing = GpuLayout(gpu_uuid=gpu.uuid, mig_enabled=gpu.mig_enabled, instances=instances if gpu.mig_enabled else ())
    return record.layouts.get(gpu.uuid, standing)


def gpu_as_it_runs(record: NodeRecord, gpu: Gpu, geometry: MigGeometry) -> RunningGpu:
    """The planner's view; profiles by their keys, throughputs left to be looked up."""
    mine = {
        (item.gpu_instance.profile, item.gpu_instance.start): _replica(item, item.gpu_instance, gpu, geometry)
        for item in record.assignments.values()
        if item.gpu_instance is not None and gpu.uuid in item.gpu_uuids
    }
    wanted = record.layouts.get(gpu.uuid)
    spelled = ((geometry.profile(name), name, start) for name, start in (places(wanted) if wanted else ()))
    instances = tuple(Standing(one.key, at, mine.get((name, at))) for one, name, at in spelled if one is not None)
    return RunningGpu(
        uuid=gpu.uuid,
        node=record.inventory.node_name,
        model=gpu.model,
        mig_enabled=gpu.mig_enabled if wanted is None else wanted.mig_enabled,
        instances=tuple(sorted(instances, key=lambda one: one.start)),
        whole=mine.get(("", 0)),
        held=False,
    )


def _replica(item: Assignment, where: Slice, gpu: Gpu, geometry: MigGeometry) -> Replica:
    profile = geometry.profile(where.profile) if where.profile else None
    how = Configuration(
        gpu_model=gpu.model,
        mig_profile="" if profile is None else profile.key,
        batch=where.batch,
        processes=where.processes,
        label=where.label,
    )
    return Replica(item.workload_id, item.replica, 0.0, 0.0, how)


def _services(state: ClusterState) -> Iterator[Asked]:
    for workload in state.workloads.values():
        promise = workload.spec.service
        if workload.phase is WorkloadPhase.CANCELLED or promise is None or not sliced(workload):
            continue
        if workload.phase is WorkloadPhase.PENDING and state.spending.holds(workload.spec) is not None:
            continue
        allowed: Sequence[str] = workload.spec.request.gpu_models
        points = (point for point in state.points.get(promise.profile, ()) if _counts(point, allowed))
        yield Asked(workload=workload, promise=promise, points=tuple(points))


def _counts(point: Point, allowed: Sequence[str]) -> bool:
    """Whether a point is of one GPU or slice that may be used, as it runs without limits of its own."""
    how = point.configuration
    free = how.power_limit_w is None and how.clock_mhz is None
    return free and how.gpus == 1 and (not allowed or how.gpu_model in allowed)
