"""Decision records: one placement decision as a file with all its inputs, and its replay.

Owns the file's format, finding the decision in the journal's past and replaying it. Must not know where files
or journals are.

Theory: a decision is a function of the nodes, their allocations, the typical mix, the weights, the watts of
the GPUs and the request; of a share of a GPU also of the limits on interference. The state just before it comes back
from the journal (the oldest checkpoint that is kept and the entries since then). The file holds these inputs, not the
planner's arrays: a newer planner reads an old file and shows where it would decide otherwise. It holds nothing else, since
it is sent to others: of the work its sizes and places, of loads that share GPUs numbers in the order of their names, of a
closed node or GPU that it is closed. Where power budgets had closed nodes, these are named as they follow from the journal:
a limit that was still being lowered then is not included. Floats are written so that they are read back to the last bit.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from eelgrid_controller.placement.explanations import describe_pending_reason
from eelgrid_controller.placement.placer import WorkloadPlacer, count_apart, restrict_to_data, restrict_to_preferred
from eelgrid_controller.placement.power import GpuPowerPrior, PriorPowerModel
from eelgrid_controller.queueing.admission import QueueHold, QueueIndex
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadDeferred, WorkloadPlaced, event_from_plain
from eelgrid_controller.state.journal import JournalEntry, JournalHistory, decode_explanation, encode_explanation
from eelgrid_protos import __version__
from eelgrid_protos.catalogue import load_catalogue
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import (
    ANY_LOAD,
    Gpu,
    Placement,
    Policy,
    ReplicaExplanation,
    ResourceRequest,
    Weights,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.plain_messages import from_plain, to_plain

DECISION_FORMAT = "eelgrid decision"
# Files without limits on interference are of the first version, which earlier versions read as well.
DECISION_VERSIONS = (1, 2)
# Constraints of nodes that a file says are closed.
_TRAITS = ("traits", "processes")
_OUTCOMES = ("workload_placed", "workload_deferred")


class DecisionUnreadable(ValueError):
    """The file is none of ours, or of a newer version."""


@dataclass(frozen=True, slots=True)
class DecisionReplay:
    """What was recorded, what comes out now, and each difference in words; none where the two are equal."""

    workload_id: str
    revision: int
    made_by: str
    recorded: Mapping[str, Any]
    now: Mapping[str, Any]
    differences: tuple[str, ...]


def _board(gpu: Gpu) -> tuple[Any, ...]:
    """What the watts of a board are a function of."""
    limits = (gpu.power_limit_default_w, gpu.power_limit_max_w)
    return (gpu.catalogue_key, gpu.product, gpu.memory_bytes, *limits)


def _found(past: JournalHistory, workload_id: str) -> int:
    """The index of the last outcome for a workload among the entries."""
    for index in range(len(past.entries) - 1, -1, -1):
        entry = past.entries[index][1]
        if entry.kind in _OUTCOMES and entry.body.get("workload_id") == workload_id:
            return index
    start = past.checkpoint.seq + 1 if past.checkpoint else 1
    raise FailedPrecondition(
        f"the decision on {workload_id} is no longer at hand: the journal reaches back to entry {start}; "
        "export decisions soon after they are made, or explain the workload"
    )


def _before(past: JournalHistory, index: int, workload_id: str) -> ClusterState:
    """The state on which the outcome at `index` was decided: before its submission if that came right before it."""
    entries = past.entries[:index]
    if entries and _submits(entries[-1][1], workload_id):
        entries = entries[:-1]
    state = ClusterState.load(past.checkpoint.state) if past.checkpoint else ClusterState()
    for _, entry in entries:
        state.apply(event_from_plain(entry.kind, entry.body))
    return state


def _submits(entry: JournalEntry, workload_id: str) -> bool:
    return entry.kind == "workload_submitted" and entry.body.get("workload_id") == workload_id


def _is_on(event: WorkloadPlaced | WorkloadDeferred, spec: WorkloadSpec, state: ClusterState) -> bool:
    """Whether work was placed on GPUs of these models alone."""
    if isinstance(event, WorkloadDeferred):
        return False
    found = ((state.nodes[place.node_name], uuid) for place in event.placements for uuid in place.gpu_uuids)
    gpus = (record.gpu(uuid) for record, uuid in found)
    return all(gpu is not None and gpu.model in spec.request.gpu_models for gpu in gpus)


def _has_traits(event: WorkloadPlaced | WorkloadDeferred, spec: WorkloadSpec, chooser: WorkloadPlacer) -> bool:
    """Whether work was placed on nodes that have every trait."""
    places = () if isinstance(event, WorkloadDeferred) else event.placements
    return bool(places) and all(chooser.has_required_traits(spec, place.node_name) for place in places)


def record_decision(past: JournalHistory, spec: WorkloadSpec, workload_id: str, catalogue: Catalogue) -> dict[str, Any]:
    """The last decision on a workload as a document for JSON.

    Raises FailedPrecondition if it is too long ago, or followed from more than a document holds.
    """
    index = _found(past, workload_id)
    seq, entry = past.entries[index]
    event = event_from_plain(entry.kind, entry.body)
    assert isinstance(event, WorkloadPlaced | WorkloadDeferred)
    state, is_start = _before(past, index, workload_id), isinstance(event, WorkloadPlaced)
    if is_start and workload_id in state.nominations:
        raise FailedPrecondition(
            f"the places of {workload_id} were chosen when other work began to make room for it, and decision files do "
            "not hold such a search; see the decision with eelctl explain"
        )
    document = _build_document(state, seq, event, spec, catalogue)
    has_others = len(state.pending) > (workload_id in state.pending) or bool(state.policy.reservations)
    if is_start and has_others and replay_decision(document).differences:
        raise FailedPrecondition(
            f"{workload_id} started beside work that waits (promised starts, held capacity) or reservations, and decision "
            "files do not hold what these close to others; see the decision with eelctl explain"
        )
    return document


def _build_document(
    state: ClusterState, seq: int, event: WorkloadPlaced | WorkloadDeferred, spec: WorkloadSpec, catalogue: Catalogue
) -> dict[str, Any]:
    watts = PriorPowerModel(catalogue).gpu
    chooser = WorkloadPlacer(state, catalogue)
    is_limited = chooser.is_limited_by_interference(spec)
    within = chooser.decide_start(spec)
    queues = QueueIndex(state)
    if queues.is_active and within.hold is None:
        # A quota holds work as a spending limit does, or leaves it fewer models.
        admitted = queues.admit(spec, lambda: chooser.snapshot().models)
        if isinstance(admitted, QueueHold):
            within = replace(within, queue_hold=admitted)
        else:
            own = queues.prefer_own_models(admitted, lambda: chooser.snapshot().models)
            spec = admitted if own is None or not _is_on(event, own, state) else own
    preferred = restrict_to_preferred(spec)
    spec = spec if preferred is None or not _is_on(event, preferred, state) else preferred
    near, far = restrict_to_data(spec), 0
    if near is not None and _has_traits(event, near, chooser):
        spec, far = near, chooser.count_nodes_without_data(spec, near) or 0
    loads = _number_loads(state, spec) if is_limited else None
    boards = {_board(gpu): watts(gpu) for record in state.nodes.values() for gpu in record.inventory.gpus}
    return {
        "format": DECISION_FORMAT,
        "version": DECISION_VERSIONS[is_limited],
        "made_by": __version__,
        "workload_id": event.workload_id,
        "revision": seq,
        "time_ns": event.time_ns,
        "spec": to_plain(_anonymize_spec(spec, "decided", loads)),
        "weights": to_plain(state.policy.weights),
        "placement": state.policy.placement,
        "watts": [[*board, *found] for board, found in boards.items()],
        "cluster": _bare(state, loads),
        "closed": sorted(
            name
            for name in state.nodes
            if name in within.closed_nodes
            or within.closed.intersection(chooser.allowance.budgets_above(name))
            or not chooser.has_required_traits(spec, name)
        ),
        "without_data": far,
        "without_traits": {one.constraint: one.nodes for one in within.removals if one.constraint in _TRAITS},
        "budget": describe_pending_reason(spec.request, within) if within.lack else "",
        "held": describe_pending_reason(spec.request, within) if within.hold or within.queue_hold else "",
        "outcome": (
            _outcome(event.placements, event.explanation, "")
            if isinstance(event, WorkloadPlaced)
            else _outcome((), (), event.reason)
        ),
    }


# The numbers of loads by their names; None where no limit on interference matters.
_LoadNumbers = Mapping[str, str] | None


def _number_loads(state: ClusterState, spec: WorkloadSpec) -> Mapping[str, str]:
    """Returns what stands for the name of each load: sums over several loads are made in the order of their names."""
    pairs = state.policy.interference
    shared = (one.shared_load for one in (spec, *(workload.spec for workload in state.workloads.values())))
    names = {name for pair in pairs for name in (pair.load, pair.beside)} | {one.load for one in shared if one}
    numbered = enumerate(sorted(names - {"", ANY_LOAD}))
    return {"": "", ANY_LOAD: ANY_LOAD, **{name: f"load-{number:06}" for number, name in numbered}}


def _bare(state: ClusterState, loads: _LoadNumbers) -> dict[str, Any]:
    """The dump of a state with what decisions look at, and nothing else."""
    dump = state.dump()
    placed = (workload for workload in state.workloads.values() if workload.phase is WorkloadPhase.PLACED)
    held = (*(_anonymize_workload(workload, loads) for workload in placed), *_list_nominated(state))
    policy = Policy()
    if loads is not None:
        pairs = tuple(
            replace(pair, load=loads[pair.load], beside=loads[pair.beside]) for pair in state.policy.interference
        )
        policy = replace(policy, interference=pairs, shared_slowdown_most=state.policy.shared_slowdown_most)
    return ClusterState().dump() | {
        "demand": dump["demand"] | {"counts": []},
        "market": dump["market"],
        "nodes": [_anonymize_node(row) for row in dump["nodes"]],
        "policy": to_plain(policy, brief=True),
        "revision": state.revision,
        "workloads": [
            to_plain(replace(workload, workload_id=f"held-{number:06}"), brief=True)
            for number, workload in enumerate(held)
        ],
    }


def _anonymize_workload(workload: Workload, loads: _LoadNumbers) -> Workload:
    spec = _anonymize_spec(workload.spec, "held", loads)
    return Workload(workload_id="held", spec=spec, phase=workload.phase, placements=workload.placements)


def _list_nominated(state: ClusterState) -> Iterator[Workload]:
    """Yields what is kept for work for which others make room, each as work of its own."""
    for name, record in state.nominations.hold_on(state.nodes, state.workloads).items():
        for key, held in record.assignments.items():
            if key in state.nodes[name].assignments:
                continue
            request = ResourceRequest(
                cpu_milli=held.cpu_milli,
                memory_bytes=held.memory_bytes,
                gpu_count=len(held.gpu_uuids),
                gpu_milli=held.gpu_milli,
            )
            indexes = tuple(gpu.index for uuid in held.gpu_uuids if (gpu := record.gpu(uuid)) is not None)
            place = Placement(replica=0, node_name=name, gpu_uuids=held.gpu_uuids, gpu_indexes=indexes)
            spec = WorkloadSpec(name="held", request=request)
            yield Workload(workload_id="held", spec=spec, phase=WorkloadPhase.PLACED, placements=(place,))


def _anonymize_spec(spec: WorkloadSpec, name: str, loads: _LoadNumbers) -> WorkloadSpec:
    load = None if loads is None else spec.shared_load
    return WorkloadSpec(
        name=name,
        request=spec.request,
        replicas=spec.replicas,
        locality=spec.locality,
        gpu_sharing=None if load is None or loads is None else replace(load, load=loads[load.load]),
    )


def _anonymize_node(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row of a node in a dump without what people and engines wrote there."""
    inventory = {key: value for key, value in row["inventory"].items() if key not in {"labels", "model_data"}}
    gpus = [
        gpu
        | ({"cordon": "cordoned"} if gpu.get("cordon") else {})
        | ({"leases": [lease | {"owner": "job", "unknown": ""} for lease in gpu["leases"]]} if "leases" in gpu else {})
        for gpu in inventory.get("gpus", ())
    ]
    found = {**row, "inventory": inventory | ({"gpus": gpus} if gpus else {})}
    if "others" in row:
        others = {key: value for key, value in row["others"].items() if key != "traits"}
        found["others"] = others | ({"closed": "closed"} if others.get("closed") else {})
    if "cordons" in row:
        found["cordons"] = [
            {key: value for key, value in one.items() if key not in {"user", "reason"}} for one in row["cordons"]
        ]
    if "ahead" in row:
        found["ahead"] = row["ahead"] | {"workload_ids": []}
    return found


def _outcome(placements: Iterable[Placement], explanation: tuple[ReplicaExplanation, ...], said: str) -> dict[str, Any]:
    placed = [to_plain(placement) for placement in placements]
    return {"placements": placed, "explanation": encode_explanation(explanation), "reason": said}


def replay_decision(document: Mapping[str, Any]) -> DecisionReplay:
    """Decides anew on what the document holds; raises DecisionUnreadable."""
    if not isinstance(document, Mapping) or document.get("format") != DECISION_FORMAT:
        raise DecisionUnreadable("this is no decision: export one with `eelctl decision export WORKLOAD`")
    if document.get("version") not in DECISION_VERSIONS:
        raise DecisionUnreadable(
            f"its version is {document.get('version')!r}, this eelctl reads versions up to {DECISION_VERSIONS[-1]}"
        )
    try:
        return _replay_document(document)
    except (ContractError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise DecisionUnreadable(f"it cannot be read ({type(error).__name__}: {error})") from error


def _replay_document(document: Mapping[str, Any]) -> DecisionReplay:
    spec = from_plain(WorkloadSpec, document["spec"])
    weights = from_plain(Weights, document["weights"])
    boards = {tuple(row[:5]): GpuPowerPrior(*row[5:]) for row in document["watts"]}
    state = ClusterState.load(document["cluster"])
    state.policy = replace(state.policy, weights=weights, placement=document["placement"])
    placer = WorkloadPlacer(state, load_catalogue(), watts=lambda gpu: boards[_board(gpu)])
    decision = placer.decide_on_open(spec, closed=frozenset(document.get("closed", ())))
    if not decision.placements:
        for constraint, nodes in document.get("without_traits", {}).items():
            decision = count_apart(decision, nodes, constraint)
    decision = count_apart(decision, document.get("without_data", 0), "model_data")
    recorded: Mapping[str, Any] = document["outcome"]
    # What a spent limit holds is not decided on.
    said = document.get("held") or (
        "" if decision.placements else document.get("budget") or describe_pending_reason(spec.request, decision)
    )
    now = _outcome((), (), said) if said else _outcome(decision.placements, decision.explanation, "")
    return DecisionReplay(
        workload_id=document["workload_id"],
        revision=document["revision"],
        made_by=document["made_by"],
        recorded=recorded,
        now=now,
        differences=tuple(_differences(recorded, now)),
    )


def _format_place(plain: Mapping[str, Any]) -> str:
    indexes = ",".join(map(str, plain.get("gpu_indexes", ())))
    return f"{plain['node_name']} GPU {indexes}" if indexes else str(plain["node_name"])


def _differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What is not the same, the places first, then what the candidates cost."""
    if recorded["reason"] != now["reason"]:
        yield f"outcome: {recorded['reason'] or 'placed'} -> {now['reason'] or 'placed'}"
    before, after = ({plain["replica"]: plain for plain in side["placements"]} for side in (recorded, now))
    for replica in sorted(before.keys() | after.keys()):
        was, is_ = before.get(replica), after.get(replica)
        if was != is_:
            yield f"replica {replica}: {_format_place(was) if was else 'no place'} -> {_format_place(is_) if is_ else 'no place'}"
    was_told, told = (decode_explanation(side["explanation"]) for side in (recorded, now))
    for was_replica, replica_now in zip(was_told, told, strict=False):
        yield from _costs(was_replica, replica_now)
    if (
        not recorded["reason"]
        and not now["reason"]
        and recorded["explanation"] != now["explanation"]
        and was_told == told
    ):
        yield "the explanation is told otherwise"


def _costs(was: ReplicaExplanation, now: ReplicaExplanation) -> Iterator[str]:
    here = f"replica {was.replica}"
    if (was.feasible_nodes, was.removals) != (now.feasible_nodes, now.removals):
        yield f"{here}: fitted on {was.feasible_nodes} nodes -> {now.feasible_nodes}"
    for rank, (one, other) in enumerate(zip(was.candidates, now.candidates, strict=False), start=1):
        if one == other:
            continue
        terms = {term.name: term.cost_w for term in one.terms}
        changed = ", ".join(
            f"{term.name} {terms.get(term.name, 0.0)!r} -> {term.cost_w!r}"
            for term in other.terms
            if terms.get(term.name) != term.cost_w
        )
        places = one.node_name if one.node_name == other.node_name else f"{one.node_name} -> {other.node_name}"
        yield f"{here}, candidate {rank} ({places}): cost {one.cost_w!r} -> {other.cost_w!r} W" + (
            f" ({changed})" if changed else ""
        )
    if len(was.candidates) != len(now.candidates):
        yield f"{here}: {len(was.candidates)} candidates -> {len(now.candidates)}"
