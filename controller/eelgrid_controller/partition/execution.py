"""Carrying a partition plan out: one stage, checked against the state as it is now, as one event.

Owns the check and the event, and when a stage stands. Must not know how a plan was
found, nor apply anything: core.py does.

Theory: a plan is made from one revision and carried out at later ones. Each GPU of a
stage must be as the stage found it, and the event is tried on copies of the ledgers of
the nodes that it touches; the first thing that no longer holds refuses the whole stage.
A replica goes from its old slice to a new one within the event: it holds the new slice
from then on, and its agent is told of it when the slice stands. Nothing busy is ever
destroyed: the agent refuses as long as anything runs in an instance, and says so.
"""

from collections.abc import Iterable, Iterator, Sequence

from eelgrid_controller.partition.plan import PartitionReplica
from eelgrid_controller.partition.recommendation import GpuChange, PartitionStage, replica_slice, strip_throughputs
from eelgrid_controller.partition.running import RunningGpu, layout_message
from eelgrid_controller.partition.survey import SurveyedGpu, is_usable, running_gpu, wanted_layout
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import PartitionsPlanned, PlannedLayout, SlicedService
from eelgrid_controller.state.mig_layouts import find_mig_geometry, is_layout_complete
from eelgrid_controller.state.node_allocations import ContradictoryEvent
from eelgrid_controller.state.replica_changes import (
    apply_partition_plan,
    is_sliced,
    list_involved_nodes,
    reallocate_slices,
)
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import Placement, WorkloadPhase


class PartitionsRefused(FailedPrecondition):
    """A stage that no longer holds."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the partition plan no longer holds: {problem}; nothing was changed, ask for a new plan")


def partition_event(
    state: ClusterState, change: PartitionStage | Sequence[SurveyedGpu], *, now_ns: int
) -> PartitionsPlanned:
    """The event of a stage, or the one that has the agents of these GPUs try again what does not stand.

    Raises PartitionsRefused, and changes nothing either way.
    """
    if isinstance(change, PartitionStage):
        return _stage_event(state, change, now_ns=now_ns)
    return _retry_event(state, change, now_ns=now_ns)


def _stage_event(state: ClusterState, stage: PartitionStage, *, now_ns: int) -> PartitionsPlanned:
    for turn in stage.turns:
        problem = _change_problem(state, turn)
        if problem:
            where = f"GPU {turn.seat.index} of node {turn.seat.node_name}"
            raise PartitionsRefused(f"{where} {problem}")
    owners = {replica.owner for turn in stage.turns for gpu in (turn.before, turn.after) for replica in gpu.replicas()}
    if stage.lets_go:
        owners |= _fallen(state)
    for owner in sorted(owners):
        workload = state.workloads.get(owner)
        if workload is None or workload.phase is WorkloadPhase.CANCELLED:
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
    return event


def _change_problem(state: ClusterState, turn: GpuChange) -> str:
    record = state.nodes.get(turn.seat.node_name)
    gpu = None if record is None else record.gpu(turn.seat.running.uuid)
    if record is None or gpu is None or not is_usable(record, gpu):
        return "is lost, or no longer the partition planner's"
    if gpu.cordon:
        return f"is cordoned: {gpu.cordon}"
    geometry = find_mig_geometry(gpu)
    if geometry is None or strip_throughputs(running_gpu(record, gpu, geometry)) != strip_throughputs(turn.before):
        return "is wanted otherwise by now"
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
        raise PartitionsRefused("nothing is wanted there that does not stand")
    return PartitionsPlanned(time_ns=now_ns, layouts=tuple(wanted))
