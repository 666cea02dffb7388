"""Explanations: why work is pending, what would help, what can never run, and the event of each decision.

Owns every sentence about placement that users read, which constraint is named, and the search for the node that is
nearest to fitting a pending workload. Must not decide: it describes a `PlacementDecision`, or the counts of nodes that
each constraint removed. A reason is short and identical for similar cases, so that reasons can be counted; the
numbers are in the explanation.

Theory of the nearest node: missing amounts are whole GPUs, a share of one, CPU and memory, compared in this order,
since GPUs cost more than CPUs and CPUs more than memory; of nodes that miss as much, the first by name is chosen. The
workloads that hold what is missing are named, too: freeing it is the one remedy that needs no other machine.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_controller.formatting import format_cpu, format_gpu, format_memory
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision, Planner, make_task
from eelgrid_controller.placement.power import ExceededBudget
from eelgrid_controller.placement.snapshot import Snapshot
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadDeferred, WorkloadPlaced
from eelgrid_controller.state.node_allocations import ASSIGNMENTS_MOST, NodeRecord, is_sliced
from eelgrid_controller.state.policy import CLUSTER_BUDGET, describe_budget
from eelgrid_controller.state.spending import spending_reason, spending_remedy
from eelgrid_kernels.node_cost import GPU_ABSENT, GPU_PARTITIONED, GPU_PLACEABLE
from eelgrid_protos.errors import Violation
from eelgrid_protos.messages import (
    Explanation,
    Inventory,
    NodeState,
    Removal,
    ResourceRequest,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE, MIB

_NAMED = 3
# Constraints that no free capacity would lift: they are the reason only if there is no other.
_STANDING = ("gpu_model", "unavailable", "traits")
Ints = NDArray[np.int64]
Marks = NDArray[np.bool_]


class PendingCase(NamedTuple):
    """A pending workload, and the state and snapshot in which it is pending."""

    spec: WorkloadSpec
    state: ClusterState
    snapshot: Snapshot
    planner: Planner


class _NodeGaps(NamedTuple):
    """What every node lacks for one replica; usable, partitioned, fitting are (N, G), the others (N,)."""

    snapshot: Snapshot
    request: ResourceRequest
    usable: Marks
    partitioned: Marks
    fitting: Marks
    gpus_short: Ints
    cpu_short: Ints
    memory_short: Ints

    def find_first_row(self, among: Marks, *keys: Ints) -> int | None:
        """Returns the row among these with the least keys, of equals the first by name; None if there is none."""
        rows = np.flatnonzero(among)
        if not len(rows):
            return None
        order = np.lexsort([self.snapshot.nodes.rank[rows], *(key[rows] for key in reversed(keys))])
        return int(rows[order[0]])


def _compare_nodes(snapshot: Snapshot, request: ResourceRequest) -> _NodeGaps:
    nodes = snapshot.nodes
    there = nodes.gpu_state != GPU_ABSENT
    allowed = there & (snapshot.allowed_models(request.gpu_models)[np.maximum(nodes.gpu_model, 0)] != 0)
    usable = allowed & (nodes.gpu_state == GPU_PLACEABLE)
    fitting = usable & (nodes.gpu_free >= request.gpu_milli)
    return _NodeGaps(
        snapshot,
        request,
        usable,
        allowed & (nodes.gpu_state == GPU_PARTITIONED),
        fitting,
        np.maximum(0, request.gpu_count - fitting.sum(axis=1)),
        np.maximum(0, request.cpu_milli - nodes.cpu_free),
        np.maximum(0, request.memory_bytes - nodes.memory_free),
    )


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _format_names(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def _also(look: _NodeGaps, row: int, record: NodeRecord, freed: Iterable[str]) -> str:
    """Describes the CPU and memory that the node would still lack without the `freed` workloads."""
    gone = set(freed)
    held = [item for (key, _), item in record.assignments.items() if key in gone]
    cpu_milli = int(look.cpu_short[row]) - sum(item.cpu_milli for item in held)
    memory_bytes = int(look.memory_short[row]) - sum(item.memory_bytes for item in held)
    lacks = [f"{format_cpu(cpu_milli)} more CPUs"] if cpu_milli > 0 else []
    lacks += [f"{format_memory(memory_bytes)} more memory"] if memory_bytes > 0 else []
    return f"; it also needs {' and '.join(lacks)} there" if lacks else ""


def _whole_gpus(look: _NodeGaps, case: PendingCase) -> str:
    asked = look.request.gpu_count
    row = look.find_first_row(
        look.snapshot.nodes.available & (look.usable.sum(axis=1) >= asked),
        look.gpus_short,
        look.cpu_short,
        look.memory_short,
    )
    if row is None:
        most = int(look.usable[look.snapshot.nodes.available].sum(axis=1).max(initial=0))
        return f"no node that is ready has more than {most} such GPUs, held or free; add one with {asked}"
    name, short = look.snapshot.names[row], int(look.gpus_short[row])
    record = case.state.nodes[name]
    held = np.flatnonzero(look.usable[row] & ~look.fitting[row])
    # Freeing the GPUs with the smallest allocations disturbs the least.
    held = np.sort(held[np.argsort(-look.snapshot.nodes.gpu_free[row, held], kind="stable")][:short])
    devices = look.snapshot.devices[row]
    holders = list(dict.fromkeys(key for slot in held for key in record.holders(devices.uuids[slot])))
    indexes = ", ".join(str(devices.indexes[slot]) for slot in held)
    free = f"{asked - short or 'none'} of {asked} {'is' if asked - short < 2 else 'are'} free"
    return (
        f"free {_gpus(short)} on node {name}, where {free}: GPU {indexes} {'is' if short == 1 else 'are'} held by "
        f"{_format_names(holders) or 'the replicas before it'}{_also(look, row, record, holders)}"
    )


def _describe_share_gap(look: _NodeGaps, case: PendingCase) -> str:
    nodes, asked = look.snapshot.nodes, look.request.gpu_milli
    free = np.where(look.usable, nodes.gpu_free, -1)
    best = free.max(axis=1, initial=-1)
    row = look.find_first_row(nodes.available & (best >= 0), -best, look.cpu_short, look.memory_short)
    if row is None:
        return ""
    name, slot = look.snapshot.names[row], int(free[row].argmax())
    record, devices = case.state.nodes[name], look.snapshot.devices[row]
    holders = list(record.holders(devices.uuids[slot]))
    return (
        f"free {format_gpu(asked - int(best[row]))} more of GPU {devices.indexes[slot]} of node {name}, where "
        f"{format_gpu(int(best[row]))} of the {format_gpu(asked)} asked for is free and {_format_names(holders) or 'the replicas before it'} "
        f"hold{'s' if len(holders) == 1 else ''} the rest{_also(look, row, record, holders)}"
    )


def _with_gpus(look: _NodeGaps, row: int) -> str:
    count, milli = look.request.gpu_count, look.request.gpu_milli
    if not count:
        return ""
    if milli < GPU_MILLI_WHOLE:
        return f", which has {format_gpu(milli)} of a GPU free"
    return f", which has {_gpus(int(look.fitting[row].sum()))} free"


def _cpu(look: _NodeGaps, _case: PendingCase) -> str:
    nodes = look.snapshot.nodes
    row = look.find_first_row(nodes.available & (look.gpus_short == 0), look.cpu_short, look.memory_short)
    if row is None:
        return ""
    short = int(look.cpu_short[row])
    memory = int(look.memory_short[row])
    also = f", and {format_memory(memory)} of memory," if memory else ""
    return (
        f"{short:,} more milli-CPU{also} are needed on node {look.snapshot.names[row]}{_with_gpus(look, row)}: ask for at "
        f"most {format_cpu(look.request.cpu_milli - short)} CPUs, or free {format_cpu(short)} there"
    )


def _memory(look: _NodeGaps, _case: PendingCase) -> str:
    nodes = look.snapshot.nodes
    row = look.find_first_row(nodes.available & (look.gpus_short == 0) & (look.cpu_short == 0), look.memory_short)
    if row is None:
        return ""
    short = int(look.memory_short[row])
    return (
        f"{format_memory(short)} more memory is needed on node {look.snapshot.names[row]}{_with_gpus(look, row)}: ask for "
        f"at most {format_memory(look.request.memory_bytes - short)}, or free {format_memory(short)} there"
    )


def _mig(look: _NodeGaps, _case: PendingCase) -> str:
    nodes, asked = look.snapshot.nodes, look.request.gpu_count
    could = look.fitting.sum(axis=1) + look.partitioned.sum(axis=1) >= asked
    row = look.find_first_row(nodes.available & could & (look.gpus_short > 0), look.gpus_short, look.cpu_short)
    if row is None:
        return ""
    short, devices = int(look.gpus_short[row]), look.snapshot.devices[row]
    slots = np.flatnonzero(look.partitioned[row])[:short]
    indexes = ", ".join(str(devices.indexes[slot]) for slot in slots)
    return f"switch MIG off on {_gpus(short)} of node {look.snapshot.names[row]}: GPU {indexes}"


def _model(look: _NodeGaps, case: PendingCase) -> str:
    free = replace(case.spec, request=replace(look.request, gpu_models=()))
    decision = case.planner.decide_placement(look.snapshot, free, case.state.policy.weights)
    if not decision.placements:
        return "allow further models and make room for it, for with every model allowed it would wait all the same"
    models = {code: model for model, code in look.snapshot.models.items()}
    rows = {name: row for row, name in enumerate(look.snapshot.names)}
    found = dict.fromkeys(
        models[int(look.snapshot.nodes.gpu_model[rows[at.node_name], 0])] for at in decision.placements
    )
    return (
        f"allow {_format_names(found)}: with every model allowed it would go to node {decision.placements[0].node_name}"
    )


def _unavailable(look: _NodeGaps, case: PendingCase) -> str:
    nodes, state = look.snapshot.nodes, case.state
    would = ~nodes.available & (look.gpus_short == 0) & (look.cpu_short == 0) & (look.memory_short == 0)
    names = [look.snapshot.names[int(row)] for row in np.flatnonzero(would)]
    lost = sorted(name for name in names if state.nodes[name].state is NodeState.LOST)
    ahead = sorted(name for name in names if state.nodes[name].ahead is not None)
    unheard = sorted(name for name in names if not state.nodes[name].is_reported)
    full = sorted(set(names) - set(lost) - set(ahead) - set(unheard))
    if ahead:
        return f"node {_format_names(ahead)} has room but holds more than the journal knows: look, then eelctl reconcile it"
    if unheard and not lost:
        return f"wait for the agent of {_format_names(unheard)}, which has not come back since the controller began"
    if lost:
        return f"bring back the agent of {_format_names(lost)}: there is room for it"
    if full:
        return (
            f"node {_format_names(full)} has room but holds {ASSIGNMENTS_MOST} workloads, the most that a plan carries"
        )
    return "none of the lost nodes has room for it as they stand, so that bringing them back is not enough"


_NEAREST_FITS: Mapping[str, Callable[[_NodeGaps, PendingCase], str]] = {
    "gpu_count": _whole_gpus,
    "gpu_share": _describe_share_gap,
    "cpu": _cpu,
    "memory": _memory,
    "gpu_mig": _mig,
    "gpu_model": _model,
    "unavailable": _unavailable,
}


def _next_replica(case: PendingCase, room: int) -> str:
    """Describes what the first replica that does not fit lacks, once `room` replicas are placed."""
    snapshot, weights, task = case.snapshot, case.state.policy.weights, make_task(case.spec.request)
    rows = {name: row for row, name in enumerate(snapshot.names)}
    trial = snapshot.copy()
    for placement in case.planner.decide_placement(snapshot, replace(case.spec, replicas=room), weights).placements:
        row = rows[placement.node_name]
        uuids = snapshot.devices[row].uuids
        trial.place_task(row, [uuids.index(uuid) for uuid in placement.gpu_uuids], task)
    one = replace(case.spec, replicas=1)
    # Uses a separate planner, since the trial's rows are not those of the cluster.
    planner = Planner()
    missing = planner.decide_placement(trial.snapshot, one, weights)
    sentence = describe_nearest_fit(
        PendingCase(one, case.state, trial.snapshot, planner), select_binding_constraint(missing.removals, 0), 0
    )
    return f"for the next replica, {sentence}" if sentence else ""


def describe_nearest_fit(case: PendingCase, constraint: str, room: int) -> str:
    """Describes what would help, with names and amounts, as the middle of a sentence; empty if nothing can be added."""
    if constraint == "replicas":
        return _next_replica(case, room)
    describe = _NEAREST_FITS.get(constraint)
    return describe(_compare_nodes(case.snapshot, case.spec.request), case) if describe is not None else ""


def select_binding_constraint(removals: Iterable[Removal], room: int) -> str:
    """Returns the constraint to name: the one that removed most nodes; of equals the later, as it is nearer to a fit."""
    if room > 0:
        return "replicas"
    found = list(removals)
    lifting = [removal for removal in found if removal.constraint not in _STANDING]
    chosen = max(reversed(lifting or found), key=lambda removal: removal.nodes, default=None)
    return chosen.constraint if chosen else "no_nodes"


SLICES_REASON = "partitions: waits for the partition planner"
CONTRADICTED_REASON = "unavailable: the node that was chosen refuses it, which is a fault of the controller: report it"

# By constraint: the reason, and the remedy.
_WORDS: Mapping[str, tuple[str, str]] = {
    "no_nodes": ("no node has joined yet", "start eelgrid-agent on a node; the workload is tried as soon as it joins"),
    "unavailable": (
        "the nodes that would do are lost or ahead of the journal, or hold as many workloads as a plan carries",
        "bring the agents of these nodes back, eelctl reconcile those that are ahead, or cancel small workloads there",
    ),
    "traits": (
        "no node that would do has every trait that it requires",
        "label nodes or take taints away, or ask for less in its node selector, affinity and tolerations",
    ),
    "gpu_model": ("no node has a GPU of an allowed model", "name further models, or leave gpu_models empty"),
    "gpu_mig": (
        "the GPUs that would do are cut by MIG, or the partition planner's",
        "switch MIG off on some of them, take a pool from the partition planner, or name other models",
    ),
    "gpu_count": (
        "no node has enough whole GPUs free",
        "wait for or cancel work that holds whole GPUs, ask for fewer GPUs, or allow further models",
    ),
    "gpu_share": (
        "no GPU has so large a share free",
        "wait for or cancel work that shares GPUs, ask for a smaller gpu_milli, or allow further models",
    ),
    "cpu": (
        "nodes with room on their GPUs lack CPU",
        "ask for less cpu_milli, or wait for or cancel work that holds much CPU",
    ),
    "memory": (
        "nodes with room on their GPUs and CPUs lack memory",
        "ask for less memory_bytes, or wait for or cancel work that holds much memory",
    ),
    "replicas": (
        "there is room for some replicas, not for all",
        "ask for fewer replicas, or submit them as workloads of their own",
    ),
}
# Constraints for which the nearest node is remedy enough; for others the general remedy is added.
_SAID = frozenset({"unavailable", "gpu_model", "gpu_mig", "cpu", "memory"})


def describe_pending_reason(decision: PlacementDecision) -> str:
    """Returns why a workload is pending: the constraint's name, a colon and a sentence without numbers."""
    if decision.hold is not None:
        return spending_reason(decision.hold)
    if decision.lack is not None:
        return f"budget: waits for watts of {describe_budget(decision.lack.budget)}"
    constraint = select_binding_constraint(decision.removals, decision.room)
    return f"{constraint}: {_WORDS[constraint][0]}"


def explain_workload(state: ClusterState, workload_id: str, chooser: WorkloadPlacer) -> Explanation:
    """Explains a workload: the candidates of its placement, or, if it is pending, what currently prevents one."""
    workload = state.workloads[workload_id]
    if workload.phase is not WorkloadPhase.PENDING:
        return Explanation(workload=workload, replicas=state.explanations.get(workload_id))
    hold = state.spending.blocking_limit(workload.spec)
    if hold is not None:
        return Explanation(workload=workload, remedy=spending_remedy(hold, state.policy), constraint="spending")
    if is_sliced(workload):
        return Explanation(workload=workload, remedy=_slices_remedy(state), constraint="partitions")
    decision, snapshot = chooser.decide_placement(workload.spec, workload_id=workload_id), chooser.snapshot()
    if decision.lack is not None:
        return Explanation(workload=workload, remedy=_watts_remedy(decision.lack), constraint="budget")
    if decision.placements:
        return Explanation(
            workload=workload,
            replicas=decision.explanation,
            remedy="There is room by now; it is placed when waiting work is next tried.",
        )
    constraint = select_binding_constraint(decision.removals, decision.room)
    count = len(snapshot.names)
    counts = ", ".join(f"{item.nodes:,} by {item.constraint}" for item in decision.removals)
    found = (
        f"Of {count:,} node{'' if count == 1 else 's'} {counts or 'none'} ruled out"
        if snapshot.names
        else "No node has joined"
    )
    if decision.room:
        found = f"There is room for {decision.room} of {workload.spec.replicas} replicas"
    concrete = describe_nearest_fit(
        PendingCase(workload.spec, state, snapshot, chooser.planner), constraint, decision.room
    )
    ways = [] if concrete and constraint in _SAID else [_WORDS[constraint][1]]
    remedy = f"{found}. To help: {'. Or '.join([concrete, *ways] if concrete else ways)}."
    return Explanation(workload=workload, replicas=decision.explanation, remedy=remedy, constraint=constraint)


def _slices_remedy(state: ClusterState) -> str:
    count = sum(record.partitioned for record in state.nodes.values())
    if not count:
        return "No pool is the partition planner's. To help: eelctl policy set --partition POOL=on."
    return "It is placed when a plan is applied. To help: eelctl partition plan, and apply what it finds."


def _watts_remedy(lack: ExceededBudget) -> str:
    """Returns the remedy for an exceeded power budget."""
    where, least_w = describe_budget(lack.budget), lack.limit_w - lack.left_w + lack.more_w
    found = (
        f"There is room, but {where} has {max(0.0, lack.left_w):,.0f} of its {lack.limit_w:,.0f} W left, and this "
        f"would draw {lack.more_w:,.0f} W more there at the GPUs' default limits"
    )
    place = "cluster" if lack.budget == CLUSTER_BUDGET else lack.budget.replace("/", ":", 1)
    ways = f"wait for or cancel work there, ask for fewer GPUs, or eelctl policy set --budget {place}={least_w:.0f}W"
    return f"{found}. To help: {ways}."


def describe_infeasibility(
    spec: WorkloadSpec, inventories: Iterable[Inventory], removals: Iterable[Removal], room: int
) -> Violation:
    """Returns the violation by which a workload could not run on these nodes even if they were empty, by field."""
    request = spec.request
    nodes = list(inventories)
    allowed = set(request.gpu_models)
    gpus = Counter(gpu.model for node in nodes for gpu in node.gpus)
    if allowed and not allowed & gpus.keys():
        have = ", ".join(f"{model} ({count})" for model, count in sorted(gpus.items())[:32]) or "no GPU"
        return Violation(
            "spec.request.gpu_models",
            f"no registered GPU is of model {' or '.join(request.gpu_models)}; the cluster has {have}",
            "name one of these, or leave gpu_models empty for any",
        )
    fields = {"gpu_model": "gpu_models", "gpu_share": "gpu_milli", "cpu": "cpu_milli", "memory": "memory_bytes"}
    constraint = select_binding_constraint(removals, room)
    if constraint == "replicas":
        return Violation(
            "spec.replicas",
            f"is {spec.replicas}; the whole cluster, empty, holds {room} such replicas",
            f"ask for at most {room}, or for less in each",
        )
    return Violation(f"spec.request.{fields.get(constraint, constraint)}", *_beyond(constraint, request, nodes))


def _beyond(constraint: str, request: ResourceRequest, nodes: list[Inventory]) -> tuple[str, str]:
    """Returns the problem and the remedy, with the largest capacity of any one node."""

    def usable(node: Inventory) -> int:
        return sum(not request.gpu_models or gpu.model in request.gpu_models for gpu in node.gpus)

    most = max(map(usable, nodes), default=0)
    fit = [node for node in nodes if usable(node) >= request.gpu_count]
    if constraint == "cpu":
        cpu_milli = max((node.cpu_milli for node in fit), default=0)
        with_gpus = f" with {request.gpu_count} such GPUs" if request.gpu_count else ""
        return (
            f"is {request.cpu_milli}; the largest node{with_gpus} has {cpu_milli}",
            f"ask for at most {cpu_milli} on one node, and use replicas for more",
        )
    if constraint == "memory":
        fit = [node for node in fit if node.cpu_milli >= request.cpu_milli]
        memory_bytes = max((node.memory_bytes for node in fit), default=0)
        return (
            f"is {request.memory_bytes}; the largest node with the GPUs and CPUs asked for has {memory_bytes}",
            f"ask for at most {memory_bytes // MIB} MiB on one node, and use replicas for more",
        )
    return (
        f"is {request.gpu_count}; no registered node has more than {most} such GPUs",
        f"ask for at most {most} on one node, and use replicas for more",
    )


def make_outcome_event(workload_id: str, decision: PlacementDecision, now_ns: int) -> WorkloadPlaced | WorkloadDeferred:
    """Builds the event of a placement attempt."""
    if not decision.placements:
        return WorkloadDeferred(time_ns=now_ns, workload_id=workload_id, reason=describe_pending_reason(decision))
    return WorkloadPlaced(
        time_ns=now_ns,
        workload_id=workload_id,
        placements=decision.placements,
        explanation=decision.explanation,
    )


def preview_workload(workload_id: str, spec: WorkloadSpec, decision: PlacementDecision, now_ns: int) -> Workload:
    """Returns the workload as it would be accepted now."""
    placed = bool(decision.placements)
    return Workload(
        workload_id=workload_id,
        spec=spec,
        phase=WorkloadPhase.PLACED if placed else WorkloadPhase.PENDING,
        reason="" if placed else describe_pending_reason(decision),
        placements=decision.placements,
        submitted_ns=now_ns,
        placed_ns=now_ns if placed else 0,
    )
