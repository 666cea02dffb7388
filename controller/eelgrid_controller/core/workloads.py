"""Changes to workloads as events: admission, adoption, scaling, migration, and what is measured of them.

Each `plan_*` function checks a request against the state and returns the event or events; the core applies them. Must
not know which engine found work, why a number of replicas is wanted, or how places and moves are found (placement).

Adoption. Work that an engine runs and that the journal does not know is part of the external usage of its nodes.
Adopting it allocates its places under its own id and subtracts what it counted for there, in one step: in between,
its capacity would appear free. A node that accepts nothing new keeps what runs on it, and which devices are used
externally is a guess from their number; so neither is checked while places are allocated, and the external usage is
reported again at the end of the step. A place whose devices are named is allocated on exactly these; where none are
named, any free device that no external user names will do. All places are adopted or none, or, for work whose
replicas are independent, each for itself. Places are numbered by the caller: numbers that are no longer the next ones
mean that something came in between, and nothing is done. Work that waits here and that its engine has begun already, since
it may start some ahead of capacity, is placed where it runs (`begins_pending`). Replicas that hold other devices than planned are corrected
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from eelgrid_controller.placement.explanations import (
    describe_infeasibility,
)
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.placement.power import PowerAdmission, PowerTrial
from eelgrid_controller.placement.snapshot import Snapshot
from eelgrid_controller.queueing.elastic_shares import advance_share
from eelgrid_controller.queueing.reservations import list_held_nodes
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.drawn_ids import DRAWN_ONLY, read_drawn_number
from eelgrid_controller.state.engine_reports import NO_EXTERNAL_USAGE, Adoption, ExternalUsage, RunningReplica
from eelgrid_controller.state.events import (
    EXPLAINED_REPLICAS_MOST,
    Event,
    NodeOccupied,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadScaled,
    WorkloadSubmitted,
)
from eelgrid_controller.state.interference import InterferenceRules
from eelgrid_controller.state.measurement_events import PointsMeasured, StartsMeasured
from eelgrid_controller.state.measurements import MeasuredStart
from eelgrid_controller.state.node_allocations import ContradictoryEvent, NodeRecord, is_sliced, make_assignment
from eelgrid_kernels.arrays import Task
from eelgrid_kernels.node_cost import node_power
from eelgrid_protos.catalogue import GpuNameError, is_canonical_model, resolve_gpu_models
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from eelgrid_protos.messages import (
    Gpu,
    MeasuredPoint,
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


def get_workload(state: ClusterState, workload_id: str) -> Workload:
    """Returns one workload; raises NotFound, and FailedPrecondition for an array."""
    elements = state.arrays.list_elements(workload_id)
    if elements:
        raise FailedPrecondition(f"{workload_id} is an array; name an element of it, such as {elements[0]}")
    return get_workload_or_array(state, workload_id)


def get_workload_or_array(state: ClusterState, workload_id: str) -> Workload:
    """Returns one workload, or an array as a whole; raises NotFound."""
    workload = state.find_workload(workload_id)
    if workload is None:
        raise NotFound(f"no workload has the id {workload_id!r}; list workloads to see the ids")
    return workload


def check_live_room(state: ClusterState, count: int, live_most: int) -> None:
    """Checks that so many more workloads may wait or run; raises ResourceExhausted."""
    live = state.live_workloads
    if live + count <= live_most:
        return
    if count == 1:
        raise ResourceExhausted(f"{live} workloads wait or run, which is the limit; cancel some and submit again")
    raise ResourceExhausted(
        f"{live} workloads wait or run, and {count} more are above the limit of {live_most}; cancel some, or submit fewer "
        "elements"
    )


def find_existing_workload(state: ClusterState, request: SubmitWorkloadRequest) -> Workload | None:
    """Returns the workload that this request submitted before, if any; raises AlreadyExists if another has its id."""
    found = state.workloads.get(request.workload_id)
    if request.workload_id in state.arrays:
        raise AlreadyExists(f"an array has the id {request.workload_id}; choose another id, or leave it empty")
    if found is None:
        check_chosen_id(request.workload_id)
        return None
    # An operator may have moved it to another queue since.
    begun = replace(_get_asked_spec(found), queue=request.spec.queue)
    if begun == request.spec:
        return found
    raise AlreadyExists(
        f"workload {found.workload_id} exists with another spec; choose another id, leave the id empty to "
        "have one drawn, or cancel it first"
    )


def check_chosen_id(workload_id: str) -> None:
    """Checks the id that a new submission chooses, if any; raises InvalidArgument for one that is left to be drawn."""
    if read_drawn_number(workload_id) in DRAWN_ONLY:
        violation = Violation(
            "workload_id",
            f"is {workload_id}, which is left to be drawn",
            "choose another, or leave it empty to have one drawn",
        )
        raise InvalidArgument("the id cannot be chosen", (violation,))


def _get_asked_spec(workload: Workload) -> WorkloadSpec:
    """Returns the spec of a workload as it was submitted, whatever replicas and model it was given since."""
    spec, share = workload.spec, workload.share
    if share is None:
        return replace(spec, replicas=workload.replicas_begun or spec.replicas)
    request = replace(spec.request, gpu_models=share.gpu_models_asked)
    return replace(spec, replicas=share.replicas_asked, request=request)


def resolve_models(
    state: ClusterState, snapshot: Callable[[], Snapshot], request: SubmitWorkloadRequest
) -> SubmitWorkloadRequest:
    """Returns the request with the catalogue's names of its GPU models; raises InvalidArgument for a name without one.

    A repeated request gets the names that it got at first. Without a node, a name that the catalogue lacks stays.
    """
    preference = request.spec.gpu_preference
    names, preferred = request.spec.request.gpu_models, () if preference is None else preference.models
    if all(map(is_canonical_model, (*names, *preferred))):
        return request
    known = state.workloads.get(request.workload_id)
    reported = rather_reported = tuple(snapshot().models) if known is None and state.nodes else ()
    if known is not None:
        reported = known.spec.request.gpu_models
        rather_reported = () if known.spec.gpu_preference is None else known.spec.gpu_preference.models
    keeps = known is not None or not state.nodes
    models = resolve_reported_models(names, "spec.request.gpu_models", reported, keeps_unknown=keeps)
    spec = replace(request.spec, request=replace(request.spec.request, gpu_models=models))
    if preference is not None:
        field = "spec.gpu_preference.models"
        rather = resolve_reported_models(preferred, field, rather_reported, keeps_unknown=keeps)
        spec = replace(spec, gpu_preference=replace(preference, models=rather))
    return replace(request, spec=spec)


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
    allowed, preference = spec.request.gpu_models, spec.gpu_preference
    if preference is not None and allowed and set(allowed).isdisjoint(preference.models):
        problem = f"has none of the models that the request allows, which are {', '.join(allowed)}"
        broken += (Violation("spec.gpu_preference.models", problem, "prefer some of spec.request.gpu_models"),)
    if spec.array is not None:
        broken += (Violation("spec.array", "is set, which the controller does", "leave it out, and set array"),)
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
    if adoption.begins_pending:
        if len(new) != workload.spec.replicas:
            raise AdoptionRefused(
                key, len(new), f"it waits with {workload.spec.replicas} replicas, and runs {len(new)}"
            )
        placed = WorkloadPlaced(time_ns=now_ns, workload_id=key, placements=tuple(new))
        return trial.wrap_events((placed,), now_ns)
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
    if adoption.begins_pending:
        # Placed or ended in between, it is no more what the report is about.
        return before if before is not None and before.phase is WorkloadPhase.PENDING else None
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


def _bounds(workload: Workload, floor: int) -> tuple[int, int]:
    """Returns the minimum and maximum number of replicas of the workload's objective, and of its promised deadline."""
    spec = workload.spec
    if spec.service is not None:
        return spec.service.replicas_least, spec.service.replicas_most
    if spec.training is not None:
        # A gang that is not elastic keeps the size that it was submitted with.
        least, most = spec.training.replicas_least or spec.replicas, spec.training.replicas_most or spec.replicas
        return max(least, min(floor, most)), most
    return 1, 10_000


def _list_numbers(used: Collection[int], count: int) -> list[int]:
    """Returns numbers of new replicas: the next ones, or the lowest unused if a plan cannot express these."""
    first = 1 + max(used)
    if first + count <= _NUMBER_MOST:
        return list(range(first, first + count))
    return list(itertools.islice((number for number in range(_NUMBER_MOST) if number not in used), count))


def number_replicas(
    workload: Workload, decision: PlacementDecision, coming: frozenset[int] = frozenset()
) -> PlacementDecision:
    """Numbers a decision about more replicas of a running workload after those that it has and those that are `coming`."""
    used = coming.union(item.replica for item in workload.placements)
    numbers = _list_numbers(used, len(decision.placements))
    return replace(
        decision,
        placements=tuple(replace(item, replica=numbers[item.replica]) for item in decision.placements),
        explanation=tuple(
            replace(item, replica=numbers[item.replica]) for item in decision.explanation if decision.placements
        ),
    )


def plan_scaling(
    state: ClusterState,
    snapshot: Snapshot,
    workload: Workload,
    replicas: int,
    decide: DecideReplicas,
    *,
    floor: int = 0,
    now_ns: int,
) -> WorkloadScaled | None:
    """Returns the event that scales a workload to `replicas`, or as close as capacity allows; None if nothing changes.

    A job keeps at least `floor` replicas for its promised deadline, of those that it has. Replicas for which others make room
    already count as if they were there, unless fewer are wanted: then nobody makes room any more.

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
    least, most = _bounds(workload, floor)
    if not least <= replicas <= most:
        bounds = f"{least} to {most}"
        raise InvalidArgument(
            "the workload was promised otherwise",
            (Violation("replicas", f"is {replicas}, outside of {bounds}", "ask for a number within"),),
        )
    stand, coming = list_healthy_replicas(state, workload), state.nominations.list_coming(workload.workload_id)
    is_enough = replicas <= len(stand)
    target = replicas if is_enough else max(len(stand), replicas - len(coming))
    alive = {item.replica for item in stand}
    fallen = [item for item in workload.placements if item.replica not in alive]
    gone, new = list[Placement](), tuple[Placement, ...]()
    explanation = tuple[ReplicaExplanation, ...]()
    if len(stand) < target:
        wanted = replace(workload.spec, replicas=target - len(stand))
        decision = decide(wanted)
        if not decision.placements and decision.room:
            decision = decide(replace(wanted, replicas=decision.room))
        numbered = number_replicas(workload, decision, coming)
        new, explanation = numbered.placements, numbered.explanation
    else:
        is_job = workload.spec.kind is WorkloadKind.TRAINING_JOB
        among = [item for item in stand if not (is_job and item is stand[0])]
        gone = _dearest(snapshot, workload, among, len(stand) - target)
    # Enough others are healthy, or so many that those on lost nodes would exceed the maximum.
    over = len(stand) + len(new) + len(fallen) - most
    gone += fallen if len(stand) + len(new) >= replicas else fallen[: max(0, over)]
    if not gone and not new and not (is_enough and coming):
        return None
    return WorkloadScaled(
        time_ns=now_ns,
        workload_id=workload.workload_id,
        released=tuple(sorted(item.replica for item in gone)),
        placements=new,
        explanation=explanation,
        share=advance_share(workload, now_ns),
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
    state: ClusterState,
    allowance: PowerAdmission,
    moves: Sequence[Move],
    *,
    now_ns: int,
    is_back: bool = False,
    held: frozenset[str] | None = None,
) -> tuple[NodeOccupied | WorkloadMoved, ...]:
    """Returns the events of all moves in order; changes nothing. Raises MoveRefused.

    Nothing moves onto nodes that are `held`; None for those that reservations hold now.
    """
    held = list_held_nodes(state, now_ns) if held is None else held
    ledgers: dict[str, NodeRecord] = {}
    # What moves back draws its power there already.
    power = None if is_back or not allowance.has_budgets else PowerTrial(allowance)
    rules = InterferenceRules(state.policy)
    before, events = _lingering(state, moves, now_ns, is_back=is_back), []
    if is_back:
        for event in before:
            ledgers[event.node_name] = state.nodes[event.node_name].copy()
            ledgers[event.node_name].others = event.others
    seen: set[tuple[str, int]] = set()
    for number, move in enumerate(moves, start=1):
        problem = _standing_problem(state, move, seen)
        # A move that an engine could not make goes back to where the replica runs, cordoned or not.
        problem = problem or ("" if is_back else _closed_problem(state, move, held))
        problem = problem or _room_problem(state, ledgers, move, power)
        problem = problem or ("" if is_back else _sharing_problem(state, ledgers, move, rules))
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


def _closed_problem(state: ClusterState, move: Move, held: frozenset[str]) -> str:
    """Returns which target is closed: reserved, cordoned, by whom and why, or what it holds is not known; else empty."""
    for item in move.replicas:
        if item.target.node_name in held and item.target.node_name != item.source.node_name:
            return f"node {item.target.node_name} is reserved"
        record = state.nodes.get(item.target.node_name)
        if record is not None and (record.withheld or not record.is_reported):
            return f"what node {item.target.node_name} holds is not known yet"
        gpus = () if record is None else tuple(map(record.gpu, item.target.gpu_uuids))
        reasons = (record.cordon_reason(gpu) for gpu in (None, *gpus)) if record is not None else ()
        reason = next(filter(None, reasons), "")
        if reason:
            return f"node {item.target.node_name}, or a GPU of it, is {reason}"
    return ""


def _room_problem(state: ClusterState, ledgers: dict[str, NodeRecord], move: Move, power: PowerTrial | None) -> str:
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
    if power is not None:
        # At its peak, and with default limits until those of the workload are set.
        power.alter([ledgers[name] for name in names], ((item.workload_id, item.replica) for _, item in beside))
        if problem := power.describe_problem():
            return problem
    if not is_released_first:
        release()
    for name, assignment in beside:
        ledgers[name].release(assignment.workload_id, assignment.replica)
        ledgers[name].allocate_unchecked(replace(assignment, workload_id=move.workload_id))
    if power is not None:
        came = ((move.workload_id, item.source.replica) for item in move.replicas)
        power.alter([ledgers[name] for name in names], came)
    return ""


def _sharing_problem(
    state: ClusterState, ledgers: Mapping[str, NodeRecord], move: Move, rules: InterferenceRules
) -> str:
    """Returns which GPU work would share that does not bear it; empty if there is none."""
    workload = state.workloads[move.workload_id]
    if not workload.spec.request.is_share:
        return ""
    nominated = state.nominations.list_loads(state.workloads)
    for item in move.replicas:
        name, coming = item.target.node_name, (make_assignment(workload, item.target),)
        uuid = rules.describe_unbearable(ledgers[name], coming, state.workloads, more=nominated)
        if uuid:
            return f"work on GPU {uuid} of {name} would be slowed down beyond its limit on interference"
    return ""


def plan_measurements(
    state: ClusterState, points: Sequence[MeasuredPoint], starts: Sequence[MeasuredStart], *, now_ns: int
) -> tuple[PointsMeasured | StartsMeasured, ...]:
    """Returns the events that store what is new or changed of points, and the starts of live services.

    Raises ResourceExhausted.
    """
    events: list[PointsMeasured | StartsMeasured] = []
    news = state.points.select_changed(points)
    if news and not state.points.has_room_for(news):
        raise ResourceExhausted(f"{state.points.most} points are kept at the most; measure fewer configurations")
    if news:
        events.append(PointsMeasured(time_ns=now_ns, points=news))
    live = tuple(start for start in starts if start.workload_id in state.live_ids)
    if live:
        events.append(StartsMeasured(time_ns=now_ns, starts=live))
    return tuple(events)
