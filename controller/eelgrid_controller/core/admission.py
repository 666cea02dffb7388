"""Admission: whether a submission is accepted, and adoption of work that an engine runs already.

Owns the refusal of submissions that repeat another id, contradict themselves or could never run, and the check of
adopted replicas against the node allocations. Must not know where work goes or which engine found it, and applies
nothing: the core does.

Theory. Work that an engine runs and that the journal does not know is part of the external usage of its nodes.
Adopting it allocates its places under its own id and subtracts what it counted for there, in one step: in between,
its capacity would appear free. A node that accepts nothing new keeps what runs on it, and which devices are used
externally is a guess from their number; so neither is checked while places are allocated, and the external usage is
reported again at the end of the step. A place whose devices are named is allocated on exactly these; where none are
named, any free device that no external user names will do. All places are adopted or none, or, for work whose
replicas are independent, each for itself. Places are numbered by the caller: numbers that are no longer the next ones
mean that something came in between, and nothing is done. Everything is tried on copies first: a step that is
impossible changes nothing. Replicas that hold other devices than planned are corrected instead (core.nodes).
"""

from dataclasses import replace

from eelgrid_controller.placement.explanations import describe_infeasibility
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import NO_EXTERNAL_USAGE, Adoption, ExternalUsage, RunningReplica
from eelgrid_controller.state.events import Event, NodeOccupied, WorkloadPlaced, WorkloadScaled, WorkloadSubmitted
from eelgrid_controller.state.node_allocations import ContradictoryEvent, NodeRecord, make_assignment
from eelgrid_protos.faults import AlreadyExists, FailedPrecondition, InvalidArgument
from eelgrid_protos.messages import Gpu, Placement, SubmitWorkloadRequest, Workload, WorkloadPhase, WorkloadSpec


def find_existing_workload(state: ClusterState, request: SubmitWorkloadRequest) -> Workload | None:
    """Returns the workload that this request submitted before, if any; raises AlreadyExists if another has its id."""
    found = state.workloads.get(request.workload_id)
    if found is None or replace(found.spec, replicas=found.replicas_begun or found.spec.replicas) == request.spec:
        return found
    raise AlreadyExists(
        f"workload {found.workload_id} exists with another spec; choose another id, leave the id empty to "
        "have one drawn, or cancel it first"
    )


def validate_spec(spec: WorkloadSpec) -> None:
    """Checks a request for contradictions; raises InvalidArgument."""
    broken = tuple(found.under("spec.request") for found in spec.request.violations())
    if broken:
        raise InvalidArgument("the request contradicts itself", broken)


def check_feasibility(state: ClusterState, chooser: WorkloadPlacer, spec: WorkloadSpec) -> None:
    """Checks that the nodes could hold the work if they were empty; raises InvalidArgument."""
    if not state.nodes:
        return
    snapshot = chooser.snapshot()
    emptied = snapshot.emptied_nodes(chooser.mirror.memory_bytes)
    room, removals = chooser.planner.count_room_when_empty(emptied, snapshot, spec)
    if room < spec.replicas:
        inventories = (record.inventory for record in state.nodes.values())
        violation = describe_infeasibility(spec, inventories, removals, room)
        raise InvalidArgument("no registered node could ever hold this, even with nothing else on it", (violation,))


class AdoptionRefused(FailedPrecondition):
    """A place cannot be adopted or released; `replica` runs there."""

    def __init__(self, workload_id: str, replica: int, problem: str) -> None:
        self.replica = replica
        super().__init__(
            f"replica {replica} of {workload_id} cannot be taken over: {problem}; nothing was taken over, it stays "
            "counted as what others hold"
        )


def plan_adoption(
    state: ClusterState, request: SubmitWorkloadRequest, adoption: Adoption, *, now_ns: int
) -> tuple[Event, ...]:
    """Returns the events that adopt running replicas; none if they are known. A new workload has one replica for each.

    Raises AdoptionRefused, AlreadyExists if another workload has its id, InvalidArgument for an invalid request; then
    nothing has changed.
    """
    workload = _workload(state, request, adoption, now_ns)
    if workload is None:
        return ()
    key, trial = workload.workload_id, _Trial(state)
    gone = [item for item in workload.placements if item.replica in adoption.released]
    for item in gone:
        trial.record(item.node_name).release(key, item.replica)
    new: list[Placement] = []
    refusals = []
    for number, one in enumerate(adoption.standing, start=adoption.first):
        taken = trial.allocate_replica(workload, adoption.first + len(new), one)
        if isinstance(taken, Placement):
            new.append(taken)
        else:
            refusals.append(AdoptionRefused(key, number, taken))
    if refusals and not (adoption.in_parts and (new or gone)):
        raise refusals[0]
    if len(gone) == len(workload.placements) and not new:
        raise AdoptionRefused(key, adoption.first, "the workload would stand nowhere; cancel it instead")
    if not gone and not new:
        return ()
    if workload.placements:
        scaled = WorkloadScaled(
            time_ns=now_ns,
            workload_id=key,
            released=tuple(item.replica for item in gone),
            placements=tuple(new),
        )
        return trial.wrap_events((scaled,), now_ns)
    begun = WorkloadSubmitted(time_ns=now_ns, workload_id=key, spec=replace(request.spec, replicas=len(new)))
    return trial.wrap_events((begun, WorkloadPlaced(time_ns=now_ns, workload_id=key, placements=tuple(new))), now_ns)


def _workload(state: ClusterState, request: SubmitWorkloadRequest, adoption: Adoption, now_ns: int) -> Workload | None:
    """Returns the workload as it is, or a new one; None if there is nothing to do."""
    before = state.workloads.get(request.workload_id)
    if adoption.first:
        if before is None or before.phase is not WorkloadPhase.PLACED:
            raise AdoptionRefused(request.workload_id, adoption.first, "the workload does not run")
        return before if adoption.first == 1 + max(item.replica for item in before.placements) else None
    if before is not None:
        # Checked with its original number of replicas: those that could not be allocated were left out then.
        begun = replace(request.spec, replicas=before.replicas_begun or before.spec.replicas)
        find_existing_workload(state, replace(request, spec=begun))
        return None
    validate_spec(request.spec)
    return Workload(
        workload_id=request.workload_id, spec=request.spec, phase=WorkloadPhase.PENDING, submitted_ns=now_ns
    )


class _Trial:
    """Copies of the node records involved, and their external usage after the adoption."""

    def __init__(self, state: ClusterState) -> None:
        self._nodes = state.nodes
        self._records: dict[str, NodeRecord] = {}
        self._left: dict[str, ExternalUsage] = {}

    def record(self, name: str) -> NodeRecord:
        """Returns the copy of a node's record."""
        if name not in self._records:
            self._records[name] = self._nodes[name].copy()
        return self._records[name]

    def allocate_replica(self, workload: Workload, replica: int, one: RunningReplica) -> Placement | str:
        """Allocates a place; returns why that is impossible, in which case nothing has changed."""
        name, count = one.node_name, workload.spec.request.gpu_count
        if name not in self._nodes or not self._nodes[name].is_ready:
            return f"node {name} is not there"
        record = self.record(name)
        left = self._left.get(name, self._nodes[name].others).subtract(one.counted)
        gpus = _devices(record, count, one, left)
        if len(gpus) < count:
            meant = f"devices {', '.join(map(str, one.gpu_indexes))}" if one.is_exact else f"{count} devices"
            return f"{meant} of node {name} are not free, or not there"
        unheld = sum(gpu.uuid not in record.gpu_milli for gpu in record.inventory.gpus) - len(gpus)
        if unheld < left.gpu_count and not one.is_exact:
            return f"node {name} would have {unheld} GPUs left, and others hold {left.gpu_count}"
        placement = Placement(
            replica=replica,
            node_name=name,
            gpu_uuids=tuple(gpu.uuid for gpu in gpus),
            gpu_indexes=tuple(gpu.index for gpu in gpus),
        )
        record.others = replace(left, closed="", gpu_count=0)
        try:
            record.allocate(make_assignment(workload, placement))
        except ContradictoryEvent as error:
            return f"node {name} beside what others hold: {str(error).partition(': ')[2]}"
        self._left[name] = left
        return placement

    def wrap_events(self, events: tuple[Event, ...], now_ns: int) -> tuple[Event, ...]:
        """Returns the events framed by the external usage during and after them."""
        return (
            *(NodeOccupied(time_ns=now_ns, node_name=name, others=NO_EXTERNAL_USAGE) for name in self._left),
            *events,
            *(NodeOccupied(time_ns=now_ns, node_name=name, others=others) for name, others in self._left.items()),
        )


def _devices(record: NodeRecord, count: int, one: RunningReplica, left: ExternalUsage) -> list[Gpu]:
    """Returns the named devices, or free ones where only a count is given; fewer if there are too few."""
    ordered = sorted(record.inventory.gpus, key=lambda gpu: gpu.index)
    free = {gpu.index: gpu for gpu in ordered if gpu.index not in left.gpu_indexes and _is_free(record, gpu)}
    meant = [free.pop(index) for index in dict.fromkeys(one.gpu_indexes) if index in free][:count]
    if not one.is_exact:
        meant += list(free.values())[: count - len(meant)]
    return sorted(meant, key=lambda gpu: gpu.index)


def _is_free(record: NodeRecord, gpu: Gpu) -> bool:
    is_there = not (gpu.lost or gpu.uuid in record.lost_gpus or gpu.cordon or gpu.mig_enabled)
    return is_there and gpu.uuid not in record.gpu_milli and not record.is_partition_managed(gpu)
