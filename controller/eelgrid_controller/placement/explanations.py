"""Explanations: why work is pending, what would help, what can never run, and the event of each decision.

Owns every sentence about placement that users read. Must not decide: it describes a `PlacementDecision`, or the
counts of nodes that each constraint removed. A reason is short and identical for similar cases, so that reasons can
be counted; the numbers are in the explanation.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from eelgrid_controller.placement.pending_diagnosis import PendingCase, describe_nearest_fit, select_binding_constraint
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.placement.power_admission import ExceededBudget
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadDeferred, WorkloadPlaced
from eelgrid_controller.state.node_allocations import is_sliced
from eelgrid_controller.state.policy import CLUSTER_BUDGET, describe_budget
from eelgrid_controller.state.spending import spending_reason, spending_remedy
from eelgrid_protos.errors import Violation
from eelgrid_protos.messages import (
    Explanation,
    Inventory,
    Removal,
    ResourceRequest,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.quantities import MIB

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
    decision, snapshot, planner = (
        chooser.decide_placement(workload.spec, workload_id=workload_id),
        chooser.snapshot(),
        chooser.planner,
    )
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
    concrete = describe_nearest_fit(PendingCase(workload.spec, state, snapshot, planner), constraint, decision.room)
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
