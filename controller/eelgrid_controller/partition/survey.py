"""The partitioned GPUs of the cluster state: a copy for the planner, and their status for operators.

Theory: a GPU counts as it is wanted, not as it is: a planned layout is on its way, and an
agent that could not apply it yet is asked again. Held, and left as they are, are GPUs with
other work on them, cordoned GPUs, and those with instances although no layout was ever wanted:
somebody else made them and may use them. Lost nodes and lost GPUs are left out: what ran there
serves nobody and is released once replacements run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from eelgrid_controller.partition.plan import PartitionReplica, RunningGpu, RunningInstance
from eelgrid_controller.partition.problem import PartitionPool
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.mig_layouts import find_mig_geometry, is_layout_complete, list_slice_positions
from eelgrid_controller.state.node_allocations import NodeRecord, is_sliced
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import (
    ApplyStatus,
    Assignment,
    Gpu,
    GpuLayout,
    PartitionStatus,
    PlanApplied,
    Resident,
    ServicePromise,
    Slice,
    WantedInstance,
    Workload,
    WorkloadPhase,
)
from eelgrid_protos.quantities import SENTENCE_LETTERS_MOST


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedGpu:
    """One partitioned GPU: where it is, what is wanted of it, and as the planner sees it."""

    node_name: str
    index: int
    geometry: MigGeometry
    running: RunningGpu
    layout: GpuLayout
    held: str = ""  # why it stays as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedService:
    """One service with slices, and the points of its profile on models that it allows."""

    workload: Workload
    promise: ServicePromise
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSurvey:
    """Partitioned GPUs by node and index, and services by the order of their submission."""

    revision: int
    seats: tuple[SurveyedGpu, ...]
    services: tuple[SurveyedService, ...]

    @property
    def geometries(self) -> dict[str, MigGeometry | None]:
        """By model."""
        return {seat.running.model: seat.geometry for seat in reversed(self.seats)}

    @property
    def pools(self) -> tuple[PartitionPool, ...]:
        """The models that there are; a GPU costs one."""
        found = self.geometries
        return tuple(PartitionPool(model=model, count=None, geometry=found[model]) for model in sorted(found))


def survey_gpus(state: ClusterState) -> PartitionSurvey:
    """Copies what a plan needs."""
    seats = tuple(_seats(state))
    return PartitionSurvey(revision=state.revision, seats=seats, services=tuple(_services(state)))


def _seats(state: ClusterState) -> Iterator[SurveyedGpu]:
    first: dict[str, str] = {}
    for name in sorted(state.nodes):
        record = state.nodes[name]
        for gpu in sorted(record.inventory.gpus, key=lambda gpu: gpu.index):
            geometry = find_mig_geometry(gpu)
            if geometry is None or not is_usable(record, gpu):
                continue
            held = _held(record, gpu)
            if first.setdefault(gpu.model, geometry.key) != geometry.key:
                held = f"{gpu.model} is the name of another part, too"
            yield SurveyedGpu(
                node_name=name,
                index=gpu.index,
                geometry=geometry,
                running=running_gpu(record, gpu, geometry)._replace(held=bool(held)),
                layout=wanted_layout(record, gpu),
                held=held,
            )


def is_usable(record: NodeRecord, gpu: Gpu) -> bool:
    """Whether replicas on a GPU count: it is the planner's, its node is ready and it answers."""
    return (
        record.partitioned
        and record.is_partition_managed(gpu)
        and record.is_ready
        and record.ahead is None
        and record.is_reported
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
    if gpu.uuid in record.externally_used_gpus():
        return "others run on it"
    if gpu.uuid not in record.layouts and gpu.gpu_instances:
        return "somebody else cut it; remove its instances to hand it over"
    if gpu.cordon:
        return f"cordoned: {gpu.cordon}"
    return record.cordon_reason(gpu)


def wanted_layout(record: NodeRecord, gpu: Gpu) -> GpuLayout:
    """What is wanted; what stands where nothing is."""
    there = sorted((one.start, one.profile) for one in gpu.gpu_instances)
    instances = tuple(WantedInstance(profile=profile, start=start) for start, profile in there)
    standing = GpuLayout(gpu_uuid=gpu.uuid, mig_enabled=gpu.mig_enabled, instances=instances if gpu.mig_enabled else ())
    return record.layouts.get(gpu.uuid, standing)


def running_gpu(record: NodeRecord, gpu: Gpu, geometry: MigGeometry) -> RunningGpu:
    """The planner's view; profiles by their keys, throughputs left to be looked up."""
    mine = {
        (item.gpu_instance.profile, item.gpu_instance.start): _replica(item, item.gpu_instance, gpu, geometry)
        for item in record.assignments.values()
        if item.gpu_instance is not None and gpu.uuid in item.gpu_uuids
    }
    wanted = record.layouts.get(gpu.uuid)
    spelled = (
        (geometry.profile(name), name, start) for name, start in (list_slice_positions(wanted) if wanted else ())
    )
    instances = tuple(
        RunningInstance(one.key, at, mine.get((name, at))) for one, name, at in spelled if one is not None
    )
    return RunningGpu(
        uuid=gpu.uuid,
        node=record.inventory.node_name,
        model=gpu.model,
        mig_enabled=gpu.mig_enabled if wanted is None else wanted.mig_enabled,
        instances=tuple(sorted(instances, key=lambda one: one.start)),
        whole=mine.get(("", 0)),
        held=False,
    )


def _replica(item: Assignment, where: Slice, gpu: Gpu, geometry: MigGeometry) -> PartitionReplica:
    profile = geometry.profile(where.profile) if where.profile else None
    how = Configuration(
        gpu_model=gpu.model,
        mig_profile="" if profile is None else profile.key,
        batch=where.batch,
        processes=where.processes,
        label=where.label,
    )
    return PartitionReplica(item.workload_id, item.replica, 0.0, 0.0, how)


def _services(state: ClusterState) -> Iterator[SurveyedService]:
    for workload in state.workloads.values():
        promise = workload.spec.service
        if workload.phase.is_ended or promise is None or not is_sliced(workload):
            continue
        if state.pending.is_parked(workload.workload_id):
            continue
        if workload.phase is WorkloadPhase.PENDING and state.spending.blocking_limit(workload.spec) is not None:
            continue
        allowed: Sequence[str] = workload.spec.request.gpu_models
        points = (point for point in state.points.get(promise.profile, ()) if _counts(point, allowed))
        yield SurveyedService(workload=workload, promise=promise, points=tuple(points))


def _counts(point: Point, allowed: Sequence[str]) -> bool:
    """Whether a point is of one GPU or slice that may be used, as it runs without limits of its own."""
    how = point.configuration
    free = how.power_limit_w is None and how.clock_mhz is None
    return free and how.gpus == 1 and (not allowed or how.gpu_model in allowed)


_PROBLEMS = frozenset({ApplyStatus.REFUSED, ApplyStatus.FAILED})


class AppliedPlans(Protocol):
    """What agents said of their plans."""

    def plan_applied(self, node_name: str) -> PlanApplied | None:
        """The newest word of a node."""


def apply_problem(answers: AppliedPlans, seat: SurveyedGpu) -> str:
    """Why the agent did not do what is wanted of a GPU; nothing where it did, or is at it."""
    return _problem(answers, seat.node_name, seat.running.uuid)


def _problem(answers: AppliedPlans, node_name: str, uuid: str) -> str:
    applied = answers.plan_applied(node_name)
    said = [one for one in (applied.results if applied else ()) if one.subject == uuid and one.status in _PROBLEMS]
    # An agent's longest sentence and a word before it are longer than a sentence may be.
    return f"{said[0].rule or said[0].status.name.lower()}: {said[0].detail}"[:SENTENCE_LETTERS_MOST] if said else ""


def partition_statuses(state: ClusterState, answers: AppliedPlans) -> Iterator[PartitionStatus]:
    """Every GPU that is the planner's, by node and index."""
    for name in sorted(state.nodes):
        record = state.nodes[name]
        for gpu in sorted(record.inventory.gpus, key=lambda gpu: gpu.index):
            if record.is_partition_managed(gpu):
                layout = record.layouts.get(gpu.uuid)
                is_there = layout is not None and is_layout_complete(gpu, layout)
                yield PartitionStatus(
                    node_name=name,
                    gpu_index=gpu.index,
                    model=gpu.model,
                    wanted=layout,
                    stands=is_there,
                    residents=tuple(_residents(record, gpu, state.workloads)),
                    problem="" if is_there else _problem(answers, name, gpu.uuid),
                )


def _residents(record: NodeRecord, gpu: Gpu, workloads: Mapping[str, Workload]) -> Iterator[Resident]:
    held = [item for item in record.assignments.values() if item.gpu_instance and gpu.uuid in item.gpu_uuids]
    for item in sorted(held, key=lambda one: one.gpu_instance.start if one.gpu_instance else 0):
        if item.gpu_instance is not None:
            name = workloads[item.workload_id].spec.name
            yield Resident(workload_id=item.workload_id, name=name, replica=item.replica, slice=item.gpu_instance)
