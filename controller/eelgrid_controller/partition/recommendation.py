"""Recommends a change of the partitioned GPUs, and turns its stages into events for the journal.

Sustainable rates. A measured throughput is that of a replica under full load, and its latency contains no queueing. A
service with random arrivals at that rate would queue without bound. So the planner gets for each point the largest rate
at which the quantile of the response time, including queueing and the model's error, keeps the objective; each replica
has a queue of its own, and requests are distributed by these rates. A point that keeps the objective at no rate stays
in, too slow, so that the error can name the tightest objective that could be kept.

Stages. The planner orders steps on GPUs (transition.py): what needs no draining comes first, then one GPU after another
whose draining hurts least. A stage is one event: the leading steps that drain nothing, or one GPU that drains with all
that follows it without draining. The next stage waits until this one is in place, so that a service's new replicas
serve before old ones go. Where two services trade places and one would be left without any replica, their stages are
one. What lost nodes and GPUs still hold is released by the last stage.

A change that is only a gain, since every service has its rate already, does not justify a broken promise: if a service
would fall below its rate on the way, everything stays. Where a service waits or falls short, the change is recommended
and states which service falls how far.

Execution. A plan is made from one revision of the state and carried out at later ones. `partition_event` checks a stage
against the state of the moment: each GPU must be as the stage found it, and the event is tried on copies of the
allocations of the nodes it touches. The first thing that no longer holds refuses the whole stage, and so does a power
budget that its GPUs would exceed. A replica moves from
its old slice to the new one within the event: it holds the new slice from then on, and its agent hears of it when the
slice exists. Nothing busy is ever destroyed: the agent refuses while anything runs in an instance, and reports why.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from eelgrid_controller.partition.change_program import TransitionCosts
from eelgrid_controller.partition.integer_program import RATE_TOLERANCE
from eelgrid_controller.partition.plan import PartitionReplica, RunningGpu, layout_message
from eelgrid_controller.partition.problem import (
    FleetTooSmall,
    InferenceDemand,
    InvalidProblem,
    PartitionProblem,
    UnservableService,
)
from eelgrid_controller.partition.repartition import PartitionChange, plan_change
from eelgrid_controller.partition.survey import PartitionSurvey, SurveyedGpu, is_usable, running_gpu, wanted_layout
from eelgrid_controller.partition.transition import DrainStep, PartitionStep, StepSequence, apply_steps
from eelgrid_controller.placement.power import PowerAdmission, PowerTrial
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.profiles.queueing_model import (
    ArrivalProcess,
    QuantileObjective,
    largest_rate_hz,
    latency_quantile,
    station_from_point,
)
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import PartitionsPlanned, PlannedLayout, SlicedService
from eelgrid_controller.state.mig_layouts import compute_share_milli, find_mig_geometry, is_layout_complete
from eelgrid_controller.state.node_allocations import (
    ContradictoryEvent,
    apply_partition_plan,
    is_sliced,
    list_involved_nodes,
    reallocate_slices,
)
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import (
    GpuLayout,
    PartitionedGpu,
    PartitionedService,
    PartitionRecommendation,
    Placement,
    Resident,
    ServicePromise,
    Slice,
    WorkloadPhase,
)

# A service that is asked for nothing yet has a replica all the same.
RATE_LEAST_HZ = 1e-6


def build_problem(found: PartitionSurvey, without: Collection[str] = ()) -> PartitionProblem:
    """The partition problem of a moment, without some of its services; raises InvalidProblem, InvalidServingValue."""
    memory: dict[tuple[object, ...], tuple[Point, ...]] = {}
    held: dict[str, set[Configuration]] = {}
    for replica in (one for seat in found.seats for one in seat.running.replicas()):
        if replica.configuration is not None:
            held.setdefault(replica.owner, set()).add(replica.configuration)
    services, points = [], list[Point]()
    for asked in found.services:
        key, promise = asked.workload.workload_id, asked.promise
        if key in without:
            continue
        (objective,) = promise.objectives
        rate_hz = max(RATE_LEAST_HZ, promise.rate_hz)
        services.append(
            InferenceDemand(
                name=key, workload=key, rate_hz=rate_hz, latency_s=objective.latency_s, quantile=objective.quantile
            )
        )
        # Many services share a profile and an objective, and to ask the queueing model takes a tenth of a second.
        stays = frozenset(held.get(key, ()))
        same = promise.profile, promise.objectives, promise.arrival_cv2, asked.workload.spec.request.gpu_models, stays
        if same not in memory:
            memory[same] = sustainable_points(_normalize_points(asked.points, found.geometries), promise, stays)
        points += (replace(point, workload=key) for point in memory[same])
    return PartitionProblem(services=tuple(services), points=tuple(points), pools=found.pools)


def _normalize_points(points: Iterable[Point], geometries: Mapping[str, MigGeometry | None]) -> Iterator[Point]:
    """Points on models that are there, profiles by their keys; one that a model lacks is left for the planner to tell."""
    for point in points:
        how = point.configuration
        geometry = geometries.get(how.gpu_model)
        if geometry is None:
            continue
        profile = geometry.profile(how.mig_profile) if how.mig_profile else None
        yield point if profile is None else replace(point, configuration=replace(how, mig_profile=profile.key))


def sustainable_points(
    points: Iterable[Point], promise: ServicePromise, held: Collection[Configuration] = ()
) -> tuple[Point, ...]:
    """Points at the largest rate that keeps the promise: of each place the best, and what replicas run as now.

    No rate exceeds the measured throughput, so of each place the points are tried by falling throughput, until the
    next could not be better.
    """
    (asked,) = promise.objectives
    objective = QuantileObjective(asked.quantile, asked.latency_s)
    best_hz: dict[tuple[str, str], float] = {}
    found = []
    for point in sorted(points, key=lambda one: -one.throughput_hz):
        how = point.configuration
        place = how.gpu_model, how.mig_profile
        if point.throughput_hz <= 0.0 or (point.throughput_hz <= best_hz.get(place, 0.0) and how not in held):
            continue
        station = station_from_point(point)
        idle_s = latency_quantile(station, ArrivalProcess(0.0, promise.arrival_cv2), asked.quantile).upper_s
        rate_hz = largest_rate_hz(station, objective, cv2=promise.arrival_cv2) if idle_s < asked.latency_s else 0.0
        if rate_hz > 0.0:
            best_hz[place] = max(rate_hz, best_hz.get(place, 0.0))
            found.append(replace(point, throughput_hz=rate_hz, latency_s={asked.quantile: idle_s}))
        else:
            # Too slow even idle: by how much is told, and it is never chosen.
            found.append(replace(point, latency_s={asked.quantile: max(idle_s, asked.latency_s)}))
    return tuple(found)


HORIZON_S = 3600.0


class GpuChange(NamedTuple):
    """One GPU from what it is to what it is wanted to be."""

    seat: SurveyedGpu
    before: RunningGpu
    after: RunningGpu


class PartitionStage(NamedTuple):
    """What is done in one event; `start_s`: how long replicas that it begins take until they serve."""

    turns: tuple[GpuChange, ...]
    drains: bool
    start_s: float
    lets_go: bool = False  # of what is on lost nodes and GPUs


@dataclass(frozen=True, slots=True)
class PartitionSearchResult:
    """What is told, and what would be done."""

    recommendation: PartitionRecommendation
    stages: tuple[PartitionStage, ...]


def recommend_partitions(found: PartitionSurvey, horizon_s: float | None = None) -> PartitionSearchResult:
    """The best change, which may be none; equal surveys have equal answers. Raises PartitionError, InvalidServingValue."""
    gpus = [seat.running for seat in found.seats]
    problems = dict[str, str]()
    while True:
        problem = build_problem(found, problems)
        try:
            changed = _harmless(
                problem, gpus, _plan_change(problem, gpus, TransitionCosts(horizon_s=horizon_s or HORIZON_S))
            )
            break
        except UnservableService as error:
            # One service that nothing can serve must not keep all others waiting.
            if error.service not in _waiting(found):
                raise
            problems[error.service] = str(error)
    _check(found, changed)
    stages = tuple(_stages(found, changed))
    told = _recommendation(found, problem, changed, problems)
    digest = hashlib.sha256(f"{found.revision} {told.gpus} {horizon_s}".encode()).hexdigest()[:8]
    named = replace(
        told,
        recommendation_id=f"partitions-{found.revision}-{digest}",
        stages=len(stages),
        horizon_s=horizon_s or HORIZON_S,
    )
    return PartitionSearchResult(named, stages)


def _waiting(found: PartitionSurvey) -> set[str]:
    return {asked.workload.workload_id for asked in found.services if asked.workload.phase is WorkloadPhase.PENDING}


def _plan_change(problem: PartitionProblem, gpus: Sequence[RunningGpu], costs: TransitionCosts) -> PartitionChange:
    if not gpus and problem.services:
        raise FleetTooSmall({"partitioned GPU": 1}, "switch a pool with MIG GPUs to the partition planner")
    return plan_change(problem, gpus, costs)


def _harmless(problem: PartitionProblem, gpus: Sequence[RunningGpu], changed: PartitionChange) -> PartitionChange:
    """The change; none at all where it would break a promise for nothing but a gain."""
    if not changed.course.lowest:
        return changed
    now_hz = _served_hz(problem, gpus)
    if any(now_hz.get(service.name, 0.0) < service.rate_hz * (1.0 - RATE_TOLERANCE) for service in problem.services):
        return changed
    return changed._replace(gpus=tuple(gpus), course=StepSequence((), {}), cost=0.0, gain=0.0, after=changed.before)


def _served_hz(problem: PartitionProblem, gpus: Sequence[RunningGpu]) -> dict[str, float]:
    """What the replicas of each service carry by the points that are known now."""
    known_hz = {(point.workload, point.configuration): point.throughput_hz for point in problem.points}
    total_hz: dict[str, float] = {}
    for replica in (one for gpu in gpus for one in gpu.replicas()):
        assert replica.configuration is not None  # no jobs here
        hz = known_hz.get((replica.owner, replica.configuration), 0.0)
        total_hz[replica.owner] = total_hz.get(replica.owner, 0.0) + hz
    return total_hz


def _check(found: PartitionSurvey, changed: PartitionChange) -> None:
    counts = Counter(replica.owner for gpu in changed.gpus for replica in gpu.replicas())
    for asked in found.services:
        key, most = asked.workload.workload_id, asked.promise.replicas_most
        if counts[key] > most:
            problem = f"needs {counts[key]} replicas, of which it may have {most}"
            raise InvalidProblem(f"services[{key}].replicas_most", problem, "allow more replicas, or larger slices")


# Stages


def _stages(found: PartitionSurvey, changed: PartitionChange) -> Iterator[PartitionStage]:
    seats = {seat.running.uuid: seat for seat in found.seats}
    start_s = {asked.workload.workload_id: asked.promise.start_s for asked in found.services}
    now = {seat.running.uuid: seat.running for seat in found.seats}
    counts = Counter(replica.owner for gpu in now.values() for replica in gpu.replicas())
    wanted = {replica.owner for gpu in changed.gpus for replica in gpu.replicas()}
    served = wanted & counts.keys()
    groups = list(_groups(changed))
    while groups:
        steps, drains = list[PartitionStep](), False
        after: dict[str, RunningGpu] = {}
        while groups and (not steps or not all(counts[owner] for owner in served)):
            group = groups.pop(0)
            drains = drains or any(isinstance(step, DrainStep) for step in group)
            steps += group
            after.update({gpu.uuid: gpu for _, gpu in apply_steps([after.get(u, now[u]) for u in now], group)})
            there = [after.get(uuid, gpu) for uuid, gpu in now.items()]
            counts = Counter(replica.owner for gpu in there for replica in gpu.replicas())
        new = [one for uuid, gpu in after.items() for one in gpu.replicas() if one not in now[uuid].replicas()]
        turns = tuple(GpuChange(seats[uuid], now[uuid], gpu) for uuid, gpu in after.items())
        now |= after
        served |= {replica.owner for replica in new}
        longest_s = max((start_s.get(replica.owner, 0.0) for replica in new), default=0.0)
        yield PartitionStage(turns, drains, longest_s, lets_go=not groups)


def _groups(changed: PartitionChange) -> Iterator[list[PartitionStep]]:
    """Steps of the course: those before any drain, then each GPU that drains with what follows it."""
    group = list[PartitionStep]()
    last = ""
    for step in changed.course.steps:
        if isinstance(step, DrainStep) and group and step.uuid != last:
            yield group
            group = []
        if isinstance(step, DrainStep):
            last = step.uuid
        group.append(step)
    if group:
        yield group


# What is told


def replica_slice(geometry: MigGeometry, profile_key: str, start: int, replica: PartitionReplica) -> Slice:
    """A replica's place in the contract's words; an empty key is the whole GPU."""
    how = replica.configuration
    assert how is not None  # services only: jobs are the online engine's
    profile = geometry.profiles[profile_key] if profile_key else None
    return Slice(
        profile="" if profile is None else profile.name,
        start=start,
        batch=how.batch,
        processes=how.processes,
        label=how.label,
        **({} if profile is None else {"gpu_milli": compute_share_milli(geometry, profile)}),
    )


def _residents(gpu: RunningGpu, geometry: MigGeometry, names: Mapping[str, str]) -> tuple[Resident, ...]:
    sitting = [(one.profile, one.start, one.replica) for one in gpu.instances if one.replica is not None]
    sitting += [("", 0, gpu.whole)] if gpu.whole is not None else []
    return tuple(
        Resident(
            workload_id=replica.owner,
            name=names.get(replica.owner, ""),
            replica=replica.number,
            slice=replica_slice(geometry, profile, start, replica),
        )
        for profile, start, replica in sitting
    )


def _recommendation(
    found: PartitionSurvey, problem: PartitionProblem, changed: PartitionChange, problems: Mapping[str, str]
) -> PartitionRecommendation:
    names = {asked.workload.workload_id: asked.workload.spec.name for asked in found.services}
    gpus = []
    for seat, after in zip(found.seats, changed.gpus, strict=True):
        is_changed = strip_throughputs(seat.running) != strip_throughputs(after)
        if not (is_changed or seat.held or any(True for _ in after.replicas())):
            continue
        layout: GpuLayout = layout_message(after, seat.geometry) if is_changed else seat.layout
        gpus.append(
            PartitionedGpu(
                node_name=seat.node_name,
                gpu_index=seat.index,
                model=after.model,
                before=seat.layout,
                after=layout,
                residents_before=_residents(seat.running, seat.geometry, names),
                residents=_residents(after, seat.geometry, names),
                held=seat.held,
            )
        )
    return PartitionRecommendation(
        recommendation_id="-",
        revision=found.revision,
        gpus=tuple(gpus),
        services=tuple(_services(found, problem, changed, problems)),
        gpus_before=changed.before,
        gpus_after=changed.after,
        gain=changed.gain,
        cost=changed.cost,
        horizon_s=HORIZON_S,
        gpus_ready=len(found.seats),
    )


def strip_throughputs(gpu: RunningGpu) -> RunningGpu:
    """Without throughputs, which are looked up anew each time, and numbers, which only tell replicas apart."""

    def bare(replica: PartitionReplica | None) -> PartitionReplica | None:
        return None if replica is None else replica._replace(number=0, throughput_hz=0.0, added_w=0.0)

    instances = tuple(one._replace(replica=bare(one.replica)) for one in gpu.instances)
    return gpu._replace(instances=instances, whole=bare(gpu.whole))


def _services(
    found: PartitionSurvey, problem: PartitionProblem, changed: PartitionChange, problems: Mapping[str, str]
) -> Iterator[PartitionedService]:
    gpus = [seat.running for seat in found.seats]
    before_hz, after_hz = _served_hz(problem, gpus), _served_hz(problem, changed.gpus)
    before, after = (Counter(one.owner for gpu in here for one in gpu.replicas()) for here in (gpus, changed.gpus))
    for asked in found.services:
        key = asked.workload.workload_id
        yield PartitionedService(
            workload_id=key,
            name=asked.workload.spec.name,
            rate_hz=asked.promise.rate_hz,
            before_hz=before_hz.get(key, 0.0),
            after_hz=after_hz.get(key, 0.0),
            replicas_before=before[key],
            replicas=after[key],
            lowest_share=min(1.0, changed.course.lowest.get(key, 1.0)),
            problem=problems.get(key, ""),
        )


class PartitionsRefused(FailedPrecondition):
    """A stage that no longer holds."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the partition plan no longer holds: {problem}; nothing was changed, ask for a new plan")


def partition_event(
    state: ClusterState, allowance: PowerAdmission, change: PartitionStage | Sequence[SurveyedGpu], *, now_ns: int
) -> PartitionsPlanned:
    """The event of a stage, or the one that has the agents of these GPUs try again what does not stand.

    Raises PartitionsRefused, and changes nothing either way.
    """
    if isinstance(change, PartitionStage):
        return _staged(state, allowance, change, now_ns=now_ns)
    return _retry_event(state, change, now_ns=now_ns)


def _staged(state: ClusterState, allowance: PowerAdmission, stage: PartitionStage, *, now_ns: int) -> PartitionsPlanned:
    for turn in stage.turns:
        problem = _turn_problem(state, turn)
        if problem:
            where = f"GPU {turn.seat.index} of node {turn.seat.node_name}"
            raise PartitionsRefused(f"{where} {problem}")
    owners = {replica.owner for turn in stage.turns for gpu in (turn.before, turn.after) for replica in gpu.replicas()}
    if stage.lets_go:
        owners |= _fallen(state)
    for owner in sorted(owners):
        workload = state.workloads.get(owner)
        if workload is None or workload.phase.is_ended:
            raise PartitionsRefused(f"workload {owner} is gone")
    event = PartitionsPlanned(
        time_ns=now_ns,
        layouts=tuple(
            PlannedLayout(node_name=turn.seat.node_name, layout=layout_message(turn.after, turn.seat.geometry))
            for turn in stage.turns
        ),
        services=tuple(
            SlicedService(workload_id=owner, placements=placements)
            for owner in sorted(owners)
            if (placements := tuple(_placements(state, owner, stage))) != state.workloads[owner].placements
        ),
    )
    try:
        after = apply_partition_plan(state.workloads, event)
        copies = {name: state.nodes[name].copy() for name in list_involved_nodes(state.workloads, after, event)}
        reallocate_slices(copies, state.workloads, after, event)
    except ContradictoryEvent as error:
        raise PartitionsRefused(str(error)) from None
    trial = PowerTrial(allowance)
    trial.alter(copies.values())
    if problem := trial.describe_problem():
        raise PartitionsRefused(problem)
    return event


def _turn_problem(state: ClusterState, turn: GpuChange) -> str:
    record = state.nodes.get(turn.seat.node_name)
    gpu = None if record is None else record.gpu(turn.seat.running.uuid)
    if record is None or gpu is None or not is_usable(record, gpu):
        return "is lost, or no longer managed by the partition planner"
    if gpu.cordon:
        return f"is cordoned: {gpu.cordon}"
    if reason := record.cordon_reason(gpu):
        return f"is {reason}"
    geometry = find_mig_geometry(gpu)
    if geometry is None or strip_throughputs(running_gpu(record, gpu, geometry)) != strip_throughputs(turn.before):
        return "has been given another layout since"
    if wanted_layout(record, gpu).instances and gpu.uuid not in record.layouts:
        return "was cut by somebody else"
    return ""


def _placements(state: ClusterState, owner: str, stage: PartitionStage) -> Iterator[Placement]:
    """Every place of a service after the stage, by replica."""
    turned = {turn.seat.running.uuid: turn for turn in stage.turns}
    before = state.workloads[owner].placements
    found = [place for place in before if place.gpu_uuids[0] not in turned]
    if stage.lets_go:
        found = [place for place in found if _serves(state, place)]
    sitting = {(place.gpu_uuids[0], place.gpu_instance): place for place in before}
    # Numbers of replicas that stay are kept, and none is given twice, also of those on nodes that are lost.
    number = 1 + max((place.replica for place in before), default=-1)
    for uuid, turn in turned.items():
        for profile, start, replica in _sitting(turn.after):
            if replica.owner != owner:
                continue
            there = replica_slice(turn.seat.geometry, profile, start, replica)
            stays = sitting.get((uuid, there))
            found.append(
                stays
                or Placement(
                    replica=number,
                    node_name=turn.seat.node_name,
                    gpu_uuids=(uuid,),
                    gpu_indexes=(turn.seat.index,),
                    gpu_instance=there,
                )
            )
            number += stays is None
    yield from sorted(found, key=lambda place: place.replica)


def _fallen(state: ClusterState) -> set[str]:
    """Services of which some replicas serve and some are on what is lost."""
    found = set()
    for key, workload in state.workloads.items():
        if workload.phase is WorkloadPhase.PLACED and is_sliced(workload):
            serving = [_serves(state, place) for place in workload.placements]
            found |= {key} if any(serving) and not all(serving) else set()
    return found


def _serves(state: ClusterState, place: Placement) -> bool:
    record = state.nodes[place.node_name]
    gpu = record.gpu(place.gpu_uuids[0])
    return gpu is not None and is_usable(record, gpu)


def _sitting(gpu: RunningGpu) -> Iterator[tuple[str, int, PartitionReplica]]:
    yield from ((one.profile, one.start, one.replica) for one in gpu.instances if one.replica is not None)
    if gpu.whole is not None:
        yield "", 0, gpu.whole


def unfinished_gpus(state: ClusterState, seats: Iterable[SurveyedGpu]) -> tuple[SurveyedGpu, ...]:
    """Those of these GPUs that do not stand as they are wanted."""
    return tuple(seat for seat in seats if not _stands(state, seat))


def _stands(state: ClusterState, seat: SurveyedGpu) -> bool:
    record = state.nodes.get(seat.node_name)
    gpu = None if record is None else record.gpu(seat.running.uuid)
    if record is None or gpu is None:
        return False
    layout = record.layouts.get(gpu.uuid)
    return layout is None or is_layout_complete(gpu, layout)


def _retry_event(state: ClusterState, seats: Sequence[SurveyedGpu], *, now_ns: int) -> PartitionsPlanned:
    wanted = [
        PlannedLayout(node_name=seat.node_name, layout=layout)
        for seat in unfinished_gpus(state, seats)
        if (record := state.nodes.get(seat.node_name)) is not None
        and (gpu := record.gpu(seat.running.uuid)) is not None
        and is_usable(record, gpu)
        and (layout := record.layouts.get(gpu.uuid)) is not None
    ]
    if not wanted:
        raise PartitionsRefused("all GPUs that it names have their layouts already")
    return PartitionsPlanned(time_ns=now_ns, layouts=tuple(wanted))
