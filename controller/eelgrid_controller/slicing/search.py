"""From a survey to a change of partitioned GPUs in stages, and to the words for operators.

Owns the search and the cut into stages. Must not know the state, nor carry out anything
(execution.py makes the events).

Theory: the planner's course is an order of steps on GPUs (partition/steps.py): what needs
no draining comes first, then one GPU after another whose draining hurts least. A stage is
one event: the leading steps that drain nothing, or one GPU that drains with all that
follows it without draining. The next stage is for when this one stands, so that a
service's new replicas serve before old ones go. Where two services trade places and one
would be left without any replica, the stages are one.

What lost nodes and GPUs still hold is let go by the last stage.

A change that is only a gain, since every service has its rate already, is not worth a
promise: if one would fall below its rate on the way, all stays as it is. Where a service
waits or falls short, the change is recommended and says who falls how far.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from eelgrid_controller.partition.change import Change, Costs, change
from eelgrid_controller.partition.errors import BadProblem, FleetTooSmall, Unservable
from eelgrid_controller.partition.plan import Replica
from eelgrid_controller.partition.problem import Problem
from eelgrid_controller.partition.programme import EXACT
from eelgrid_controller.partition.running import RunningGpu, layout_of
from eelgrid_controller.partition.steps import Course, Drain, Step, applied
from eelgrid_controller.slices import share_milli
from eelgrid_controller.slicing.demand import problem_of
from eelgrid_controller.slicing.survey import Seat, Survey
from eelgrid_protos.catalogue import MigGeometry
from eelgrid_protos.messages import (
    GpuLayout,
    PartitionedGpu,
    PartitionedService,
    PartitionRecommendation,
    Resident,
    Slice,
    WorkloadPhase,
)

__all__ = ["HORIZON_S", "Found", "Stage", "Turn", "bare", "place_of", "recommend"]

HORIZON_S = 3600.0


class Turn(NamedTuple):
    """One GPU from what it is to what it is wanted to be."""

    seat: Seat
    before: RunningGpu
    after: RunningGpu


class Stage(NamedTuple):
    """What is done in one event; `start_s`: how long replicas that it begins take until they serve."""

    turns: tuple[Turn, ...]
    drains: bool
    start_s: float
    lets_go: bool = False  # of what is on lost nodes and GPUs


@dataclass(frozen=True, slots=True)
class Found:
    """What is told, and what would be done."""

    recommendation: PartitionRecommendation
    stages: tuple[Stage, ...]


def recommend(found: Survey, horizon_s: float | None = None) -> Found:
    """The best change, which may be none; equal surveys have equal answers. Raises PartitionError, Unusable."""
    gpus = [seat.running for seat in found.seats]
    problems = dict[str, str]()
    while True:
        problem = problem_of(found, problems)
        try:
            changed = _harmless(problem, gpus, _changed(problem, gpus, Costs(horizon_s=horizon_s or HORIZON_S)))
            break
        except Unservable as error:
            # One service that nothing can serve must not keep all others waiting.
            if error.service not in _waiting(found):
                raise
            problems[error.service] = str(error)
    _check(found, changed)
    stages = tuple(_stages(found, changed))
    told = _told(found, problem, changed, problems)
    digest = hashlib.sha256(f"{found.revision} {told.gpus} {horizon_s}".encode()).hexdigest()[:8]
    named = replace(
        told,
        recommendation_id=f"partitions-{found.revision}-{digest}",
        stages=len(stages),
        horizon_s=horizon_s or HORIZON_S,
    )
    return Found(named, stages)


def _waiting(found: Survey) -> set[str]:
    return {asked.workload.workload_id for asked in found.services if asked.workload.phase is WorkloadPhase.PENDING}


def _changed(problem: Problem, gpus: Sequence[RunningGpu], costs: Costs) -> Change:
    if not gpus and problem.services:
        raise FleetTooSmall({"partitioned GPU": 1}, "switch a pool with MIG GPUs to the partition planner")
    return change(problem, gpus, costs)


def _harmless(problem: Problem, gpus: Sequence[RunningGpu], changed: Change) -> Change:
    """The change; none at all where it would break a promise for nothing but a gain."""
    if not changed.course.lowest:
        return changed
    now_hz = _served_hz(problem, gpus)
    if any(now_hz.get(service.name, 0.0) < service.rate_hz * (1.0 - EXACT) for service in problem.services):
        return changed
    return changed._replace(gpus=tuple(gpus), course=Course((), {}), cost=0.0, gain=0.0, after=changed.before)


def _served_hz(problem: Problem, gpus: Sequence[RunningGpu]) -> dict[str, float]:
    """What the replicas of each service carry by the points that are known now."""
    known_hz = {(point.workload, point.configuration): point.throughput_hz for point in problem.points}
    total_hz: dict[str, float] = {}
    for replica in (one for gpu in gpus for one in gpu.replicas()):
        assert replica.configuration is not None  # no jobs here
        hz = known_hz.get((replica.owner, replica.configuration), 0.0)
        total_hz[replica.owner] = total_hz.get(replica.owner, 0.0) + hz
    return total_hz


def _check(found: Survey, changed: Change) -> None:
    counts = Counter(replica.owner for gpu in changed.gpus for replica in gpu.replicas())
    for asked in found.services:
        key, most = asked.workload.workload_id, asked.promise.replicas_most
        if counts[key] > most:
            problem = f"needs {counts[key]} replicas and may have {most}"
            raise BadProblem(f"services[{key}].replicas_most", problem, "allow more replicas, or larger slices")


# Stages


def _stages(found: Survey, changed: Change) -> Iterator[Stage]:
    seats = {seat.running.uuid: seat for seat in found.seats}
    start_s = {asked.workload.workload_id: asked.promise.start_s for asked in found.services}
    now = {seat.running.uuid: seat.running for seat in found.seats}
    counts = Counter(replica.owner for gpu in now.values() for replica in gpu.replicas())
    wanted = {replica.owner for gpu in changed.gpus for replica in gpu.replicas()}
    served = wanted & counts.keys()
    groups = list(_groups(changed))
    while groups:
        steps, drains = list[Step](), False
        after: dict[str, RunningGpu] = {}
        while groups and (not steps or not all(counts[owner] for owner in served)):
            group = groups.pop(0)
            drains = drains or any(isinstance(step, Drain) for step in group)
            steps += group
            after.update({gpu.uuid: gpu for _, gpu in applied([after.get(u, now[u]) for u in now], group)})
            there = [after.get(uuid, gpu) for uuid, gpu in now.items()]
            counts = Counter(replica.owner for gpu in there for replica in gpu.replicas())
        new = [one for uuid, gpu in after.items() for one in gpu.replicas() if one not in now[uuid].replicas()]
        turns = tuple(Turn(seats[uuid], now[uuid], gpu) for uuid, gpu in after.items())
        now |= after
        served |= {replica.owner for replica in new}
        longest_s = max((start_s.get(replica.owner, 0.0) for replica in new), default=0.0)
        yield Stage(turns, drains, longest_s, lets_go=not groups)


def _groups(changed: Change) -> Iterator[list[Step]]:
    """Steps of the course: those before any drain, then each GPU that drains with what follows it."""
    group = list[Step]()
    last = ""
    for step in changed.course.steps:
        if isinstance(step, Drain) and group and step.uuid != last:
            yield group
            group = []
        if isinstance(step, Drain):
            last = step.uuid
        group.append(step)
    if group:
        yield group


# What is told


def place_of(geometry: MigGeometry, profile_key: str, start: int, replica: Replica) -> Slice:
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
        **({} if profile is None else {"gpu_milli": share_milli(geometry, profile)}),
    )


def _residents(gpu: RunningGpu, geometry: MigGeometry, names: Mapping[str, str]) -> tuple[Resident, ...]:
    sitting = [(one.profile, one.start, one.replica) for one in gpu.instances if one.replica is not None]
    sitting += [("", 0, gpu.whole)] if gpu.whole is not None else []
    return tuple(
        Resident(
            workload_id=replica.owner,
            name=names.get(replica.owner, ""),
            replica=replica.number,
            slice=place_of(geometry, profile, start, replica),
        )
        for profile, start, replica in sitting
    )


def _told(found: Survey, problem: Problem, changed: Change, problems: Mapping[str, str]) -> PartitionRecommendation:
    names = {asked.workload.workload_id: asked.workload.spec.name for asked in found.services}
    gpus = []
    for seat, after in zip(found.seats, changed.gpus, strict=True):
        is_changed = bare(seat.running) != bare(after)
        if not (is_changed or seat.held or any(True for _ in after.replicas())):
            continue
        layout: GpuLayout = layout_of(after, seat.geometry) if is_changed else seat.layout
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


def bare(gpu: RunningGpu) -> RunningGpu:
    """Without throughputs, which are looked up anew each time, and numbers, which only tell replicas apart."""

    def bare(replica: Replica | None) -> Replica | None:
        return None if replica is None else replica._replace(number=0, throughput_hz=0.0, added_w=0.0)

    instances = tuple(one._replace(replica=bare(one.replica)) for one in gpu.instances)
    return gpu._replace(instances=instances, whole=bare(gpu.whole))


def _services(
    found: Survey, problem: Problem, changed: Change, problems: Mapping[str, str]
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
