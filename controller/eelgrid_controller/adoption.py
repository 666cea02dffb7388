"""Taking over work that stands already: given places, checked against the ledger, as events.

Owns the check, which devices are meant, and the order of the events. Must not know which engine
found the work, nor apply anything: core.py does.

Theory. Work that an engine runs and that this journal does not know is among what others hold.
To take it over is to hold its places in its own name and to subtract what it counted for
there, in one step: in between, its room would look free. A node that takes nothing new keeps
what stands on it, and which devices others hold is a guess from their number; so neither is
asked while places are held, and both are told again at the end of the step. A place whose devices
are named is held at these and no others, however many GPUs others are said to hold beside it: it
stands there already. Where none are named, any free one that nobody else's name is on is as good
as another, and what is left must be enough for all others.

What is not known yet begins with these places; what runs gains them, and lets go in the same
step those that its engine runs no more. All stands or falls together, or, for work whose
replicas do, each for itself. Places of running work are numbered by who names them: numbers
that are no longer the next ones say that something came in between, and nothing is done.
Everything is tried on copies first: a step that cannot be changes nothing.

Not this: replicas that hold other devices than planned. They are corrected, whatever a cordon,
a loss or a guess at others says, and swap all at once; see repointing.py.
"""

from dataclasses import replace

from eelgrid_controller.admission import known, refuse_nonsense
from eelgrid_controller.events import Event, NodeOccupied, WorkloadPlaced, WorkloadScaled, WorkloadSubmitted
from eelgrid_controller.ledger import ContradictoryEvent, NodeRecord, assignment_of
from eelgrid_controller.occupancy import NOBODY, Adoption, Others, Standing
from eelgrid_controller.state import ClusterState
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import Gpu, Placement, SubmitWorkloadRequest, Workload, WorkloadPhase

__all__ = ["AdoptionRefused", "adopted"]


class AdoptionRefused(FailedPrecondition):
    """A place that cannot be held, or let go; `replica` stands there."""

    def __init__(self, workload_id: str, replica: int, problem: str) -> None:
        self.replica = replica
        super().__init__(
            f"replica {replica} of {workload_id} cannot be taken over: {problem}; nothing was taken over, it stays "
            "counted as what others hold"
        )


def adopted(
    state: ClusterState, request: SubmitWorkloadRequest, adoption: Adoption, *, now_ns: int
) -> tuple[Event, ...]:
    """The events after which a workload stands so; none where it is done already. A new one has a replica for each.

    Raises AdoptionRefused, AlreadyExists where another has its id, InvalidArgument for nonsense; then nothing changed.
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
        taken = trial.take(workload, adoption.first + len(new), one)
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
        return trial.around((scaled,), now_ns)
    begun = WorkloadSubmitted(time_ns=now_ns, workload_id=key, spec=replace(request.spec, replicas=len(new)))
    return trial.around((begun, WorkloadPlaced(time_ns=now_ns, workload_id=key, placements=tuple(new))), now_ns)


def _workload(state: ClusterState, request: SubmitWorkloadRequest, adoption: Adoption, now_ns: int) -> Workload | None:
    """The workload as it is, or as it begins; None where nothing is to be done about it."""
    before = state.workloads.get(request.workload_id)
    if adoption.first:
        if before is None or before.phase is not WorkloadPhase.PLACED:
            raise AdoptionRefused(request.workload_id, adoption.first, "the workload does not run")
        return before if adoption.first == 1 + max(item.replica for item in before.placements) else None
    if before is not None:
        # With as many replicas as it was begun with: what could not be held was left out then.
        begun = replace(request.spec, replicas=before.replicas_begun or before.spec.replicas)
        known(state, replace(request, spec=begun))
        return None
    refuse_nonsense(request.spec)
    return Workload(
        workload_id=request.workload_id, spec=request.spec, phase=WorkloadPhase.PENDING, submitted_ns=now_ns
    )


class _Trial:
    """Copies of the ledgers that are involved, and what others will hold where something is taken over."""

    def __init__(self, state: ClusterState) -> None:
        self._nodes = state.nodes
        self._records: dict[str, NodeRecord] = {}
        self._left: dict[str, Others] = {}

    def record(self, name: str) -> NodeRecord:
        """The copy of a node's ledger."""
        if name not in self._records:
            self._records[name] = self._nodes[name].copy()
        return self._records[name]

    def take(self, workload: Workload, replica: int, one: Standing) -> Placement | str:
        """Holds a place; or why it cannot be, and then nothing has changed."""
        name, count = one.node_name, workload.spec.request.gpu_count
        if name not in self._nodes or not self._nodes[name].is_ready:
            return f"node {name} is not there"
        record = self.record(name)
        left = self._left.get(name, self._nodes[name].others).less(one.counted)
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
            record.hold(assignment_of(workload, placement))
        except ContradictoryEvent as error:
            return f"node {name} beside what others hold: {str(error).partition(': ')[2]}"
        self._left[name] = left
        return placement

    def around(self, events: tuple[Event, ...], now_ns: int) -> tuple[Event, ...]:
        """The events, and what others hold while they happen and afterwards."""
        return (
            *(NodeOccupied(time_ns=now_ns, node_name=name, others=NOBODY) for name in self._left),
            *events,
            *(NodeOccupied(time_ns=now_ns, node_name=name, others=others) for name, others in self._left.items()),
        )


def _devices(record: NodeRecord, count: int, one: Standing, left: Others) -> list[Gpu]:
    """The devices that are meant, or others that are free where those are but counts; fewer where there are too few."""
    ordered = sorted(record.inventory.gpus, key=lambda gpu: gpu.index)
    free = {gpu.index: gpu for gpu in ordered if gpu.index not in left.gpu_indexes and _is_free(record, gpu)}
    meant = [free.pop(index) for index in dict.fromkeys(one.gpu_indexes) if index in free][:count]
    if not one.is_exact:
        meant += list(free.values())[: count - len(meant)]
    return sorted(meant, key=lambda gpu: gpu.index)


def _is_free(record: NodeRecord, gpu: Gpu) -> bool:
    is_there = not (gpu.lost or gpu.uuid in record.lost_gpus or gpu.cordon or gpu.mig_enabled)
    return is_there and gpu.uuid not in record.gpu_milli and not record.keeps(gpu)
