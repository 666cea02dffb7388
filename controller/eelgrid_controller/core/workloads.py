"""Changes to workloads as events: admission, adoption, scaling, migration, and retries of pending work.

Each `plan_*` function checks a request against the state and returns the event or events; the core applies them. Must
not know which engine found work, why a number of replicas is wanted, or how places and moves are found (placement).

Adoption. Work that an engine runs and that the journal does not know is part of the external usage of its nodes.
Adopting it allocates its places under its own id and subtracts what it counted for there, in one step: in between,
its capacity would appear free. A node that accepts nothing new keeps what runs on it, and which devices are used
externally is a guess from their number; so neither is checked while places are allocated, and the external usage is
reported again at the end of the step. A place whose devices are named is allocated on exactly these; where none are
named, any free device that no external user names will do. All places are adopted or none, or, for work whose
replicas are independent, each for itself. Places are numbered by the caller: numbers that are no longer the next ones
mean that something came in between, and nothing is done. Replicas that hold other devices than planned are corrected
instead (core.nodes).

Scaling. A replica counts if its node is ready and none of its GPUs is lost. New replicas are placed like those of a
new workload, as many as fit. Of those that count, the ones are removed that save the most modelled watts, one after
another on a copy; of equals the youngest. The first replica of a training job stays, since the others rendezvous
there. Replicas on lost nodes may still run and come back: they are released once enough others run, or where they
would exceed the objective's maximum, so that a node that returns is told to stop them.

Migration. A recommendation is made from one revision and executed at a later one. So every move is tried, in order,
on copies of the allocations of the nodes that it touches, with both places held where the workload asks for that. The
first move that is no longer possible refuses all of them, by number and name. Each move becomes one event, so that
wherever a journal ends, every replica has one place. Replicas that an engine runs leave their old place only when
that engine moves them; until it reports so, what they use there counts as external usage, from the same step as the
move. If the engine could not make a move, it is undone (`is_back`): that count is subtracted first.
"""

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from eelgrid_controller.core.backfill import BackfillPlanner
from eelgrid_controller.placement.explanations import (
    describe_infeasibility,
    describe_pending_reason,
    make_outcome_event,
)
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.placement.snapshot import Snapshot
from eelgrid_controller.queueing.admission import QueueHold, QueueIndex, describe_queue_hold
from eelgrid_controller.queueing.fair_share import FairRound
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import NO_EXTERNAL_USAGE, Adoption, ExternalUsage, RunningReplica
from eelgrid_controller.state.events import (
    EXPLAINED_REPLICAS_MOST,
    Event,
    NodeOccupied,
    PricesQuoted,
    WorkloadDeferred,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadScaled,
    WorkloadSubmitted,
)
from eelgrid_controller.state.node_allocations import ContradictoryEvent, NodeRecord, is_sliced, make_assignment
from eelgrid_controller.state.pending_queue import PendingTicket
from eelgrid_controller.state.spending import spending_reason
from eelgrid_kernels.arrays import Task
from eelgrid_kernels.node_cost import node_power
from eelgrid_protos.catalogue import GpuNameError, is_canonical_model, resolve_gpu_models
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import AlreadyExists, FailedPrecondition, InvalidArgument
from eelgrid_protos.messages import (
    Gpu,
    Mobility,
    Move,
    Placement,
    ReplicaExplanation,
    SubmitWorkloadRequest,
    Workload,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
)


def find_existing_workload(state: ClusterState, request: SubmitWorkloadRequest) -> Workload | None:
    """Returns the workload that this request submitted before, if any; raises AlreadyExists if another has its id."""
    found = state.workloads.get(request.workload_id)
    if found is None:
        return None
    # An operator may have moved it to another queue since.
    begun = replace(found.spec, replicas=found.replicas_begun or found.spec.replicas, queue=request.spec.queue)
    if begun == request.spec:
        return found
    raise AlreadyExists(
        f"workload {found.workload_id} exists with another spec; choose another id, leave the id empty to "
        "have one drawn, or cancel it first"
    )


def resolve_models(
    state: ClusterState, snapshot: Callable[[], Snapshot], request: SubmitWorkloadRequest
) -> SubmitWorkloadRequest:
    """Returns the request with the catalogue's names of its GPU models; raises InvalidArgument for a name without one.

    A repeated request gets the names that it got at first. Without a node, a name that the catalogue lacks stays.
    """
    names = request.spec.request.gpu_models
    if all(map(is_canonical_model, names)):
        return request
    known = state.workloads.get(request.workload_id)
    if known is not None:
        reported: Iterable[str] = known.spec.request.gpu_models
    else:
        reported = snapshot().models if state.nodes else ()
    keeps = known is not None or not state.nodes
    models = resolve_reported_models(names, "spec.request.gpu_models", reported, keeps_unknown=keeps)
    if models == names:
        return request
    return replace(request, spec=replace(request.spec, request=replace(request.spec.request, gpu_models=models)))


def resolve_reported_models(
    names: Iterable[str], field: str, reported: Iterable[str], *, keeps_unknown: bool = False
) -> tuple[str, ...]:
    """Returns the catalogue's names of GPU models; raises InvalidArgument, which names the field."""
    try:
        return resolve_gpu_models(names, field, reported=reported, keeps_unknown=keeps_unknown)
    except GpuNameError as error:
        violation = Violation(error.field, error.problem, error.remedy)
        raise InvalidArgument("a GPU model is not known by this name", (violation,)) from None


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


# The bound of quantities.Count: a workload that is scaled up and down for a long time exhausts its numbers.
_NUMBER_MOST = 1_000_000
DecideReplicas = Callable[[WorkloadSpec], PlacementDecision]


def list_healthy_replicas(state: ClusterState, workload: Workload) -> tuple[Placement, ...]:
    """Returns the replicas that can serve: their nodes are ready and their GPUs are not lost."""
    return tuple(
        placement for placement in workload.placements if _is_healthy(state.nodes[placement.node_name], placement)
    )


def _is_healthy(record: NodeRecord, placement: Placement) -> bool:
    there = {gpu.uuid for gpu in record.inventory.gpus} - record.lost_gpus
    return record.is_ready and there.issuperset(placement.gpu_uuids)


class _Row:
    """The replicas on one node by the GPUs held: those of one kind save alike, the youngest is removed first."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.kinds: dict[tuple[int, ...], list[Placement]] = {}
        # Rises with each change, so that savings computed before it are known to be stale.
        self.era = 0


def _dearest(snapshot: Snapshot, workload: Workload, among: Sequence[Placement], count: int) -> list[Placement]:
    """Selects `count` replicas, each of them the one that saves the most modelled watts after the previous ones.

    What a replica saves depends on its own node alone, so only that node's savings are computed again after a
    removal.
    """
    trial, request = snapshot.copy(), workload.spec.request
    task = Task(request.cpu_milli, request.memory_bytes, request.gpu_count, request.gpu_milli)
    wanted = {placement.node_name for placement in among}
    rows = {name: _Row(row) for row, name in enumerate(snapshot.names) if name in wanted}
    slots_of = {
        name: {uuid: slot for slot, uuid in enumerate(snapshot.devices[at.row].uuids)} for name, at in rows.items()
    }
    for placement in sorted(among, key=lambda item: item.replica):
        slots = tuple(slots_of[placement.node_name][uuid] for uuid in placement.gpu_uuids)
        rows[placement.node_name].kinds.setdefault(slots, []).append(placement)

    def saved_w(row: int, slots: tuple[int, ...]) -> float:
        before_w = float(node_power(trial.snapshot.nodes, row))
        trial.remove_task(row, slots, task)
        after_w = float(node_power(trial.snapshot.nodes, row))
        trial.place_task(row, slots, task)
        return before_w - after_w

    best: list[tuple[float, int, str, int, tuple[int, ...]]] = []

    def weigh(name: str) -> None:
        at = rows[name]
        for slots, there in at.kinds.items():
            if there:
                heapq.heappush(best, (-saved_w(at.row, slots), -there[-1].replica, name, at.era, slots))

    for name in rows:
        weigh(name)
    gone = list[Placement]()
    while len(gone) < count:
        _, _, name, era, slots = heapq.heappop(best)
        at = rows[name]
        if era != at.era:
            continue
        gone.append(at.kinds[slots].pop())
        trial.remove_task(at.row, slots, task)
        at.era += 1
        weigh(name)
    return gone


def _bounds(spec: WorkloadSpec) -> tuple[int, int]:
    """Returns the minimum and maximum number of replicas of the workload's objective."""
    if spec.service is not None:
        return spec.service.replicas_least, spec.service.replicas_most
    if spec.training is not None:
        # A gang that is not elastic keeps the size that it was submitted with.
        return spec.training.replicas_least or spec.replicas, spec.training.replicas_most or spec.replicas
    return 1, 10_000


def _numbers(workload: Workload, count: int) -> list[int]:
    """Returns numbers of new replicas: the next ones, or the lowest unused if a plan cannot express these."""
    used = {item.replica for item in workload.placements}
    first = 1 + max(used)
    if first + count <= _NUMBER_MOST:
        return list(range(first, first + count))
    return list(itertools.islice((number for number in range(_NUMBER_MOST) if number not in used), count))


def plan_scaling(
    state: ClusterState, snapshot: Snapshot, workload: Workload, replicas: int, decide: DecideReplicas, *, now_ns: int
) -> WorkloadScaled | None:
    """Returns the event that scales a workload to `replicas`, or as close as capacity allows; None if nothing changes.

    Raises FailedPrecondition for a workload that does not run, InvalidArgument for a number outside its objective.
    """
    if workload.phase is not WorkloadPhase.PLACED:
        raise FailedPrecondition(
            f"workload {workload.workload_id} does not run; wait until it is placed, or submit it with more replicas"
        )
    if workload.spec.process is not None:
        raise FailedPrecondition(
            f"workload {workload.workload_id} runs processes, whose number does not change; submit it again"
        )
    if is_sliced(workload):
        raise FailedPrecondition(
            f"workload {workload.workload_id} is served by slices, which the partition planner counts; make a plan: "
            "eelctl partition plan"
        )
    least, most = _bounds(workload.spec)
    if not least <= replicas <= most:
        bounds = f"{least} to {most}"
        raise InvalidArgument(
            "the workload was promised otherwise",
            (Violation("replicas", f"is {replicas}, outside of {bounds}", "ask for a number within"),),
        )
    stand = list_healthy_replicas(state, workload)
    alive = {item.replica for item in stand}
    fallen = [item for item in workload.placements if item.replica not in alive]
    gone, new = list[Placement](), tuple[Placement, ...]()
    explanation = tuple[ReplicaExplanation, ...]()
    if len(stand) < replicas:
        wanted = replace(workload.spec, replicas=replicas - len(stand))
        decision = decide(wanted)
        if not decision.placements and decision.room:
            decision = decide(replace(wanted, replicas=decision.room))
        numbers = _numbers(workload, len(decision.placements))
        new = tuple(replace(item, replica=numbers[item.replica]) for item in decision.placements)
        explanation = tuple(
            replace(item, replica=numbers[item.replica]) for item in decision.explanation if decision.placements
        )
    else:
        is_job = workload.spec.kind is WorkloadKind.TRAINING_JOB
        among = [item for item in stand if not (is_job and item is stand[0])]
        gone = _dearest(snapshot, workload, among, len(stand) - replicas)
    # Enough others are healthy, or so many that those on lost nodes would exceed the maximum.
    over = len(stand) + len(new) + len(fallen) - most
    gone += fallen if len(stand) + len(new) >= replicas else fallen[: max(0, over)]
    if not gone and not new:
        return None
    return WorkloadScaled(
        time_ns=now_ns,
        workload_id=workload.workload_id,
        released=tuple(sorted(item.replica for item in gone)),
        placements=new,
        explanation=explanation,
    )


class MoveRefused(FailedPrecondition):
    """A recommended move is no longer possible; `number` counts from 1, `move` is the move."""

    def __init__(self, number: int, moves: Sequence[Move], problem: str) -> None:
        self.number = number
        self.move = moves[number - 1]
        first = self.move.replicas[0]
        super().__init__(
            f"move {number} of {len(moves)} ({self.move.workload_id} from {first.source.node_name} to "
            f"{first.target.node_name}) no longer holds: {problem}; nothing was moved, ask for new moves"
        )


def plan_migration(
    state: ClusterState, moves: Sequence[Move], *, now_ns: int, is_back: bool = False
) -> tuple[NodeOccupied | WorkloadMoved, ...]:
    """Returns the events of all moves in order; changes nothing. Raises MoveRefused."""
    ledgers: dict[str, NodeRecord] = {}
    before, events = _lingering(state, moves, now_ns, is_back=is_back), []
    if is_back:
        for event in before:
            ledgers[event.node_name] = state.nodes[event.node_name].copy()
            ledgers[event.node_name].others = event.others
    seen: set[tuple[str, int]] = set()
    for number, move in enumerate(moves, start=1):
        problem = _standing_problem(state, move, seen)
        # A move that an engine could not make goes back to where the replica runs, cordoned or not.
        problem = problem or ("" if is_back else _cordon_problem(state, move)) or _room_problem(state, ledgers, move)
        if problem:
            raise MoveRefused(number, moves, problem)
        seen |= {(move.workload_id, item.source.replica) for item in move.replicas}
        events.append(
            WorkloadMoved(
                time_ns=now_ns,
                workload_id=move.workload_id,
                placements=tuple(item.target for item in move.replicas),
                explanation=tuple(
                    ReplicaExplanation(
                        replica=item.target.replica, candidates=item.candidates, feasible_nodes=1, removals=()
                    )
                    for item in move.replicas[:EXPLAINED_REPLICAS_MOST]
                ),
            )
        )
    return (*before, *events) if is_back else (*events, *before)


def _lingering(state: ClusterState, moves: Sequence[Move], now_ns: int, *, is_back: bool) -> list[NodeOccupied]:
    """Returns the external usage of each node on which an engine still runs replicas whose places have moved."""
    found: dict[str, ExternalUsage] = {}
    for move in moves:
        workload = state.workloads.get(move.workload_id)
        if workload is None or not workload.spec.required_traits:
            continue
        for item in move.replicas:
            name = (item.target if is_back else item.source).node_name
            record = state.nodes.get(name)
            if record is not None and item.source.node_name != item.target.node_name:
                others = found.get(name, record.others)
                found[name] = (others.subtract if is_back else others.add)(workload.spec.request)
    return [NodeOccupied(time_ns=now_ns, node_name=name, others=others) for name, others in found.items()]


def _standing_problem(state: ClusterState, move: Move, seen: set[tuple[str, int]]) -> str:
    """Returns why the replicas cannot be moved from their recorded places; empty if they can."""
    workload = state.workloads.get(move.workload_id)
    if workload is None or workload.phase is not WorkloadPhase.PLACED:
        return "the workload does not run"
    if workload.spec.mobility is Mobility.FIXED:
        return "the workload is fixed"
    places = {placement.replica: placement for placement in workload.placements}
    for item in move.replicas:
        replica = item.source.replica
        if item.target.replica != replica or (move.workload_id, replica) in seen:
            return f"replica {replica} is moved twice"
        if places.get(replica) != item.source:
            return f"replica {replica} stands elsewhere"
        if len(item.target.gpu_uuids) != len(item.source.gpu_uuids):
            return f"replica {replica} is given another number of GPUs"
    return ""


def _cordon_problem(state: ClusterState, move: Move) -> str:
    """Returns which target is cordoned, by whom and why; empty if none is."""
    for item in move.replicas:
        record = state.nodes.get(item.target.node_name)
        gpus = () if record is None else tuple(map(record.gpu, item.target.gpu_uuids))
        reasons = (record.cordon_reason(gpu) for gpu in (None, *gpus)) if record is not None else ()
        reason = next(filter(None, reasons), "")
        if reason:
            return f"node {item.target.node_name}, or a GPU of it, is {reason}"
    return ""


def _room_problem(state: ClusterState, ledgers: dict[str, NodeRecord], move: Move) -> str:
    """Tries the move on the copies in `ledgers` and updates them; returns why it is impossible, empty if it is not."""
    workload = state.workloads[move.workload_id]
    is_released_first = workload.spec.mobility is Mobility.RESTARTABLE
    names = {place.node_name for item in move.replicas for place in (item.source, item.target)}
    for name in names - ledgers.keys():
        record = state.nodes.get(name)
        if record is None:
            return f"node {name} is gone"
        ledgers[name] = record.copy()

    def release() -> None:
        for item in move.replicas:
            ledgers[item.source.node_name].release(move.workload_id, item.source.replica)

    # Under a temporary key, since both places of a replica may be on one node.
    beside = [
        (item.target.node_name, replace(make_assignment(workload, item.target), workload_id=f" {move.workload_id}"))
        for item in move.replicas
    ]
    try:
        if is_released_first:
            release()
        for name, assignment in beside:
            ledgers[name].allocate(assignment)
    except ContradictoryEvent as error:
        return str(error).partition(": ")[2]
    if not is_released_first:
        release()
    for name, assignment in beside:
        ledgers[name].release(assignment.workload_id, assignment.replica)
        ledgers[name].allocate_unchecked(replace(assignment, workload_id=move.workload_id))
    return ""


# An attempt costs 10 to 300 µs, so that a step with a full round stays under a tenth of a second.
_TRIES_MOST = 256
# A search with closed nodes (placer.py) takes milliseconds: it counts as this many attempts.
_SEARCH_TRIES = 32
# Tickets skipped because an equal request has just failed.
_SCANNED_MOST = 4096
# With queues the next of them costs 20 to 40 µs.
_FAIR_SCANNED_MOST = 1024

ApplyEvent = Callable[[Event], frozenset[str]]
# Applies an outcome, or defers the workload instead; returns the event that was applied.
SettleDecision = Callable[[WorkloadPlaced | WorkloadDeferred], tuple[Event, frozenset[str]]]
QuotePrices = Callable[[int], tuple[PricesQuoted, ...]]


class RetryRounds:
    """Tries pending work in rounds, a bounded number of attempts per step; with queues, in the order of fair share."""

    def __init__(
        self, state: ClusterState, chooser: WorkloadPlacer, queues: QueueIndex, backfill: BackfillPlanner
    ) -> None:
        self._state, self._chooser, self._queues, self._backfill = state, chooser, queues, backfill
        # Where the round continues; None between rounds.
        self._resume: PendingTicket | None = None
        # With queues the round itself, and the queues that it is over.
        self._fair_round: FairRound | None = None
        self._generation = queues.generation
        # What the last step has learned, at which revision of the state: the next one of the round begins with it.
        self._learned: tuple[int, dict[Hashable, tuple[int, str]]] = (-1, {})
        # Capacity was freed in the middle of a round: another round follows. A new core cannot know whether the last
        # round was cut short.
        self._again = len(state.pending) > 0

    @property
    def is_due(self) -> bool:
        """Whether a round is unfinished or due."""
        return self._resume is not None or self._fair_round is not None or self._again

    def on_capacity_freed(self) -> None:
        """Requests another round over all pending work."""
        self._again = True

    def retry_step(
        self, apply: ApplyEvent, settle: SettleDecision, quoted: QuotePrices, now_ns: int
    ) -> tuple[list[Event], frozenset[str]]:
        """Continues the round, up to the bounds; returns the events, already applied, and their nodes."""
        if self._generation != self._queues.generation:
            # Other queues are in force: what is left of a round is part of the next.
            self._generation = self._queues.generation
            self._again |= self._resume is not None or self._fair_round is not None
            self._resume = self._fair_round = None
        step = _RetryStep(
            self._state,
            self._chooser,
            self._queues,
            self._backfill,
            apply=apply,
            settle=settle,
            quoted=quoted,
            now_ns=now_ns,
        )
        if self._resume is None and self._fair_round is None:
            self._backfill.begin_round(now_ns)
        elif self._learned[0] == self._state.revision:
            step.failed = self._learned[1]
        self._continue_round(step, now_ns)
        self._learned = self._state.revision, step.failed
        if self._resume is None and self._fair_round is None:
            step.apply_all(self._backfill.end_round(now_ns))
        return step.events, step.nodes

    def _continue_round(self, step: "_RetryStep", now_ns: int) -> None:
        if self._queues.is_active:
            self._continue_fair_round(step, now_ns)
            return
        if self._resume is None:
            self._again = False
        tickets = self._state.pending.next_tickets(self._resume, _SCANNED_MOST)
        untried = step.try_all(tickets)
        if untried is not None:
            # The round continues after the ticket before it; the first is always tried.
            self._resume = tickets[tickets.index(untried) - 1]
        else:
            self._resume = tickets[-1] if len(tickets) == _SCANNED_MOST else None

    def _continue_fair_round(self, step: "_RetryStep", now_ns: int) -> None:
        if self._fair_round is None:
            self._again = False
            self._fair_round = self._queues.begin_round(now_ns)
        step.fair_round = self._fair_round
        untried = step.try_all(itertools.islice(self._fair_round, _FAIR_SCANNED_MOST))
        if untried is not None:
            self._fair_round.push_back(untried)
        elif self._fair_round.is_over:
            self._fair_round = None


class _RetryStep:
    """One step over pending work: what it has learned, and the events that it has applied."""

    def __init__(
        self,
        state: ClusterState,
        chooser: WorkloadPlacer,
        queues: QueueIndex,
        backfill: BackfillPlanner,
        *,
        apply: ApplyEvent,
        settle: SettleDecision,
        quoted: QuotePrices,
        now_ns: int,
    ) -> None:
        self.events: list[Event] = []
        self.nodes: frozenset[str] = frozenset()
        self.fair_round: FairRound | None = None
        self._state, self._chooser, self._queues, self._workloads = state, chooser, queues, state.workloads
        self._apply, self._settle, self._quoted, self._now_ns = apply, settle, quoted, now_ns
        self._backfill = backfill
        # By request, traits and closed nodes: the smallest number of replicas that did not fit, and why; of work that
        # would delay other work, also by what is expected of it.
        self.failed: dict[Hashable, tuple[int, str]] = {}
        self._tries = 0
        # After a start all work waits some seconds for agents: that is not written as a new reason of each workload.
        self._has_news = all(record.is_reported or not record.is_ready for record in state.nodes.values())

    def try_all(self, tickets: Iterable[PendingTicket]) -> PendingTicket | None:
        """Tries each workload, or gives it its new reason; returns the one at which the bound of attempts is reached."""
        workloads, failed, find_hold = self._workloads, self.failed, self._state.spending.blocking_limit
        has_rules, has_queues, has_news = self._chooser.uses_engine_rules, self._queues.is_active, self._has_news
        # An engine's rules and spending limits are of single workloads.
        has_equals = self._chooser.eligibility.rules is None and not self._state.spending.over
        for ticket in tickets:
            workload = workloads[ticket[2]]
            if is_sliced(workload):
                continue
            spec = workload.spec
            # What holds work whatever the capacity costs no attempt.
            hold = find_hold(spec)
            reason = "" if hold is None else spending_reason(hold)
            if has_queues and not reason:
                spec, reason = self._admit(spec)
            if not reason:
                closed = self._backfill.list_closed_nodes(workload, self._now_ns)
                kind: Hashable = (spec.request, spec.required_traits, spec.process is not None, closed)
                # An engine's rules apply to this workload only.
                is_judged = has_rules(ticket[2])
                why = None if is_judged else failed.get(kind) or failed.get(self._backfill.get_term(kind, workload))
                is_blocked = True
                if why is None or spec.replicas < why[0]:
                    if self._tries >= _TRIES_MOST:
                        return ticket
                    decision = self._decide(workload, spec, closed)
                    if decision.placements:
                        self._place(workload, spec, decision)
                        continue
                    why = (spec.replicas, describe_pending_reason(spec.request, decision))
                    is_blocked = decision.is_blocked
                    if not is_judged:
                        failed[self._backfill.get_term(kind, workload) if decision.withheld else kind] = why
                reason = why[1]
                if is_blocked and self._backfill.reserves_more:
                    searches = self._chooser.searches
                    self.apply_all(self._backfill.reserve_start(workload, self._now_ns))
                    self._tries += _SEARCH_TRIES * (self._chooser.searches - searches)
            if has_news and workload.reason != reason and len(self.events) < 2 * _TRIES_MOST:
                self._defer(ticket[2], reason)
            if self.fair_round is not None and has_equals and self._backfill.may_skip_equals(workload):
                self._skip_equals(self.fair_round, reason)
        return None

    def _skip_equals(self, fair_round: FairRound, reason: str) -> None:
        """Skips work of the same shape, user and queue, which waits for the same reason."""
        others = [key for _, _, key in fair_round.skip_equals(reason) if self._workloads[key].reason != reason]
        if not self._has_news or len(self.events) + len(others) > 2 * _TRIES_MOST:
            return
        for key in others:
            self._defer(key, reason)
        fair_round.note_reason(reason)

    def _defer(self, workload_id: str, reason: str) -> None:
        """Gives work its new reason for waiting."""
        deferred = WorkloadDeferred(time_ns=self._now_ns, workload_id=workload_id, reason=reason)
        self._apply(deferred)
        self.events.append(deferred)

    def _admit(self, spec: WorkloadSpec) -> tuple[WorkloadSpec, str]:
        """Returns what the workload's queue lets start, or why it lets nothing."""
        admitted = self._queues.admit(spec, self._list_models)
        return (spec, describe_queue_hold(admitted)) if isinstance(admitted, QueueHold) else (admitted, "")

    def _place(self, workload: Workload, spec: WorkloadSpec, decision: PlacementDecision) -> None:
        event, touched = self._settle(make_outcome_event(workload.workload_id, spec.request, decision, self._now_ns))
        self.nodes |= touched
        self.events.append(event)
        if self.fair_round is not None:
            self._queues.note_start(self.fair_round, workload)

    def _list_models(self) -> Iterable[str]:
        return self._chooser.snapshot().models

    def apply_all(self, events: Iterable[Event]) -> None:
        """Applies events that follow from the step."""
        for event in events:
            self._apply(event)
            self.events.append(event)

    def _decide(self, workload: Workload, spec: WorkloadSpec, closed: frozenset[str]) -> PlacementDecision:
        for quotes in self._quoted(self._now_ns):
            self._apply(quotes)
            self.events.append(quotes)
        searches = self._chooser.searches
        decision = self._backfill.decide(workload, spec, self._now_ns, closed=closed, is_round=True)
        self._tries += 1 + _SEARCH_TRIES * (self._chooser.searches - searches)
        return decision
