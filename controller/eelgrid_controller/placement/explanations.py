"""Explanations: why work is pending, what would help, what can never run, and the event of each decision.

Owns every sentence about placement that users read, and which constraint is named. Must not decide, nor search for
what would help (`remedies`): it describes a `PlacementDecision`, the counts of nodes that each constraint removed, and
the steps of remedies. A reason is short and identical for similar cases, so that reasons can be counted; the numbers
are in the explanation.

Theory of the constraint that is named: the nearest to a fit, not the one that removed most nodes. A node counts under
the first test that it fails, and the tests of CPU and memory come last: nodes that fail only these are named first,
then those that fail a test of their GPUs, then what no free capacity would lift.
"""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from eelgrid_controller.formatting import format_cpu, format_gpu, format_memory, format_time
from eelgrid_controller.placement.placer import AlteredNodes, WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.placement.power import ExceededBudget
from eelgrid_controller.placement.remedies import (
    AllowModels,
    AskForLess,
    BearSlowdown,
    EndWorkloads,
    EnforcePools,
    MeasureLoads,
    NodeGaps,
    NodeShortage,
    OpenNodes,
    PendingCase,
    ProvisionNodes,
    RaiseBudgets,
    Remedy,
    RemedyStep,
    SwitchMigOff,
    UncordonGpus,
    list_remedies,
    measure_gaps,
)
from eelgrid_controller.queueing.admission import QueueHold, QueueIndex, describe_queue_hold, describe_queue_remedy
from eelgrid_controller.queueing.job_conditions import UnmetCondition, describe_condition_remedy
from eelgrid_controller.queueing.reservations import list_closed_nodes
from eelgrid_controller.queueing.runtime_estimates import SOURCE_NAMES, estimate_runtime
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadDeferred, WorkloadPlaced
from eelgrid_controller.state.node_allocations import is_sliced
from eelgrid_controller.state.pending_reasons import PendingConstraint, describe_hint, find_constraint
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
from eelgrid_protos.quantities import GPU_MILLI_WHOLE, MIB, SENTENCE_LETTERS_MOST

_NAMED = 8
_SHORTAGES_NAMED = 4
_WAYS_LETTERS_MOST = SENTENCE_LETTERS_MOST - 500
# By nearness to a fit: what CPU or memory removed, what the GPUs did, and what no free capacity would lift.
_AMOUNTS = ("cpu", "memory")
_STANDING = ("gpu_model", "unavailable", "traits", "processes", "reservation")


def select_binding_constraint(removals: Iterable[Removal], room: int) -> str:
    """Returns the constraint to name: CPU, memory or both where only they lack, else the one that removed most nodes.

    Of equals it is the later, as it is nearer to a fit. That no node has an allowed model is said only of nodes that are all
    in service: one that is not may have it, and does where work could be submitted.
    """
    found = list(removals)
    if room > 0:
        is_limited = any(removal.constraint == "interference" for removal in found)
        return "interference" if is_limited else "replicas"
    amounts = [removal.constraint for removal in found if removal.constraint in _AMOUNTS]
    if amounts:
        return "+".join(amounts)
    lifting = [removal for removal in found if removal.constraint not in _STANDING]
    if any(removal.constraint == "unavailable" for removal in found):
        found = [removal for removal in found if removal.constraint != "gpu_model"]
    chosen = max(reversed(lifting or found), key=lambda removal: removal.nodes, default=None)
    return chosen.constraint if chosen else "no_nodes"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _join(items: Sequence[str]) -> str:
    return " and ".join((", ".join(items[:-1]), items[-1])) if len(items) > 1 else "".join(items)


def _format_names(names: Sequence[str], most: int = _NAMED) -> str:
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return _join([*names[:most], *more])


def _format_memory_up(amount_bytes: int) -> str:
    """Formats bytes, rounded up to what is shown of them."""
    unit = 1 << 10 * min(4, int(math.log2(amount_bytes) // 10))
    digits = max(0, 3 - int(math.log10(amount_bytes / unit)))
    return format_memory(math.ceil(math.ceil(amount_bytes / unit * 10**digits - 1e-9) / 10**digits * unit))


def _describe_shortage(one: NodeShortage) -> str:
    """Names the GPUs, CPU and memory to free on a node."""
    whole = [str(index) for index, milli in one.gpus if milli == GPU_MILLI_WHOLE]
    amounts = [f"GPU{'' if len(whole) == 1 else 's'} {_join(whole)}"] if whole else []
    amounts += [f"{format_gpu(milli)} of GPU {index}" for index, milli in one.gpus if milli < GPU_MILLI_WHOLE]
    amounts += [f"{format_cpu(one.cpu_milli)} CPU{'' if one.cpu_milli == 1000 else 's'}"] if one.cpu_milli else []
    amounts += [f"{_format_memory_up(one.memory_bytes)} of memory"] if one.memory_bytes else []
    return f"{_join(amounts)} on node {one.node_name}"


def _describe_smaller(before: WorkloadSpec, after: WorkloadSpec) -> str:
    old, new = before.request, after.request
    amounts = []
    if new.gpu_count < old.gpu_count:
        amounts.append(_count(new.gpu_count, "GPU"))
    if new.gpu_milli < old.gpu_milli:
        amounts.append(f"{format_gpu(new.gpu_milli)} of a GPU")
    if new.cpu_milli < old.cpu_milli:
        amounts.append(f"{format_cpu(new.cpu_milli)} CPU{'' if new.cpu_milli == 1000 else 's'}")
    if new.memory_bytes < old.memory_bytes:
        amounts.append(f"{format_memory(new.memory_bytes)} of memory")
    if amounts and before.replicas > 1:
        amounts[-1] += " for each replica"
    if after.replicas < before.replicas:
        amounts.append(_count(after.replicas, "replica"))
    return f"ask for at most {_join(amounts)}"


def _describe_request(request: ResourceRequest) -> str:
    """Names what one replica asks for."""
    amounts = []
    if request.gpu_count:
        models = f" of model {' or '.join(request.gpu_models[:_NAMED])}" if request.gpu_models else ""
        share = request.gpu_milli < GPU_MILLI_WHOLE
        amounts.append(
            (f"{format_gpu(request.gpu_milli)} of a GPU" if share else _count(request.gpu_count, "GPU")) + models
        )
    amounts += (
        [f"{format_cpu(request.cpu_milli)} CPU{'' if request.cpu_milli == 1000 else 's'}"] if request.cpu_milli else []
    )
    amounts += [f"{_format_memory_up(request.memory_bytes)} of memory"] if request.memory_bytes else []
    return _join(amounts)


def _format_budget(key: str, limit_w: float) -> str:
    place = "cluster" if key == CLUSTER_BUDGET else key.replace("/", ":", 1)
    return f"--budget {place}={limit_w:.0f}W"


_OPENINGS: Mapping[str, str] = {
    "lost": "bring back the agent of {names}: there is room for it",
    "cordoned": "{uncordon}: there is room for it on {names}, which an operator cordoned",
    "closed": "let {names} accept work again: there is room for it, but the engine has closed it to new work",
    "unreported": "wait for the agent of {names}, which has not come back since the controller began",
    "withheld": "wait until all agents have said what they hold, since the journal may lack its last entries: work starts then",
    "ahead": "look at what {names} holds beyond the journal, then eelctl reconcile it: there is room for the work",
}


def _describe_step(spec: WorkloadSpec, step: RemedyStep) -> str:
    """Describes one step of a remedy, as the middle of a sentence."""
    match step:
        case EndWorkloads():
            shortages = _format_names([_describe_shortage(one) for one in step.shortages], _SHORTAGES_NAMED)
            free = f"free {shortages}: " if shortages else ""
            return f"{free}wait for or cancel {_format_names(step.workload_ids)}"
        case AskForLess():
            return _describe_smaller(spec, step.spec)
        case AllowModels():
            return f"allow {_join(step.models)}: it would then go to node {step.node_name}"
        case SwitchMigOff():
            gpus = [
                f"{_count(len(indexes), 'GPU')} of node {name}: GPU {_join([str(index) for index in indexes])}"
                for name, indexes in step.gpus
            ]
            return f"switch MIG off on {'; and on '.join(gpus)}"
        case OpenNodes():
            names = _format_names([f"node {name}" for name in step.node_names])
            return _OPENINGS[step.obstacle].format(names=names, uncordon=f"eelctl uncordon {' '.join(step.node_names)}")
        case UncordonGpus():
            targets = " ".join(f"{name}/{index}" for name, indexes in step.gpus for index in indexes)
            return f"eelctl uncordon {targets}: there is room for it on GPUs that an operator cordoned"
        case RaiseBudgets():
            return f"eelctl policy set {' '.join(_format_budget(key, limit_w) for key, limit_w in step.limits_w)}"
        case EnforcePools():
            names = _format_names([f"node {name}" for name in step.node_names])
            modes = " ".join(f"--pool-mode {pool}=enforce" for pool in step.pools)
            return f"eelctl policy set {modes}: the agent of {names} then keeps the budget there by itself"
        case BearSlowdown():
            return f"bear more with --gpu-slowdown {math.ceil(100 * step.slowdown_most - 1e-6)}%"
        case MeasureLoads():
            pairs = _join([f"{load} beside {beside}" for load, beside in step.pairs])
            first = " ".join(map(shlex.quote, step.pairs[0]))
            return f"measure {pairs}, and tell how much that slows down: eelctl interference set {first} SLOWDOWN"
        case ProvisionNodes():
            each = "" if step.count == 1 else ", each"
            return (
                f"start eelgrid-agent on {_count(step.count, 'node')}{each} with {_describe_request(step.request)} free"
            )


def _describe_remedy(spec: WorkloadSpec, remedy: Remedy) -> str:
    return ", and ".join(_describe_step(spec, step) for step in remedy)


def _lack(count: int) -> str:
    return "lacks" if count == 1 else "lack"


def _join_ways(ways: Sequence[str]) -> str:
    """Joins as many ways as a sentence can carry beside what was found, the first of them always."""
    said = ways[0][:_WAYS_LETTERS_MOST]
    for way in ways[1:]:
        if len(said) + len(way) < _WAYS_LETTERS_MOST:
            said += f". Or {way}"
    return said


def _describe_lack(gaps: NodeGaps, request: ResourceRequest) -> str:
    """Counts the nodes that pass the tests of their GPUs, and what they lack; empty if there are none."""
    near = gaps.is_open & (gaps.gpus == 0) & ((gaps.cpu_milli > 0) | (gaps.memory_bytes > 0))
    cpu, memory = near & (gaps.cpu_milli > 0), near & (gaps.memory_bytes > 0)
    counted = {
        "CPU": int((cpu & ~memory).sum()),
        "memory": int((memory & ~cpu).sum()),
        "CPU and memory": int((cpu & memory).sum()),
    }
    lacks = {what: count for what, count in counted.items() if count}
    total = sum(lacks.values())
    if not total:
        return ""
    if not request.gpu_count:
        return ", ".join(f"{_count(count, 'node')} {_lack(count)} {what}" for what, count in lacks.items())
    free = f"{request.gpu_count} GPUs are" if request.gpu_count > 1 else "a GPU is"
    if request.gpu_milli < GPU_MILLI_WHOLE:
        free = f"{format_gpu(request.gpu_milli)} of a GPU is"
    said = "; " + ", ".join(f"{count:,} {_lack(count)} {what}" for what, count in lacks.items())
    if len(lacks) == 1:
        said = f", which {_lack(total)} {next(iter(lacks))}"
    return f"{free} free on {_count(total, 'node')}{said}"


def _describe_removals(removals: Sequence[Removal], nodes: int) -> str:
    """Counts the nodes by the constraint that ruled them out."""

    def by(constraint: str) -> str:
        return "as unavailable" if constraint == "unavailable" else f"by {constraint}"

    first, *rest = removals
    if not rest and first.nodes == nodes:
        every = "The only node is" if nodes == 1 else f"All {nodes:,} nodes are"
        return f"{every} ruled out {by(first.constraint)}"
    parts = [f"{first.nodes:,} {'is' if first.nodes == 1 else 'are'} ruled out {by(first.constraint)}"]
    parts += [f"{item.nodes:,} {by(item.constraint)}" for item in rest]
    return f"Of {_count(nodes, 'node')}, {_join(parts)}"


def _describe_found(decision: PlacementDecision, gaps: NodeGaps, spec: WorkloadSpec) -> str:
    """Describes what stands in the way of a pending workload, with the numbers of nodes."""
    if not gaps.snapshot.names:
        return "No node has joined"
    said = []
    if decision.room:
        said.append(f"There is room for {decision.room} of {spec.replicas} replicas")
    near = _describe_lack(gaps, spec.request)
    if near:
        said.append(f"For one more, {near}" if decision.room else near[:1].upper() + near[1:])
    others = [item for item in decision.removals if not (near and item.constraint in _AMOUNTS)]
    if others and not decision.room:
        said.append(_describe_removals(others, len(gaps.snapshot.names)))
    return ". ".join(said) or "No node has room"


PREEMPTING_REMEDY = "Its place is reserved, and it is placed when those have stopped, at the latest after their grace."


def describe_pending_reason(request: ResourceRequest, decision: PlacementDecision) -> str:
    """Returns why a workload is pending: the constraint's name, a colon and a sentence without numbers."""
    if decision.queue_hold is not None:
        return describe_queue_hold(decision.queue_hold)
    if decision.hold is not None:
        return spending_reason(decision.hold)
    if decision.withheld:
        return decision.withheld
    if decision.lack is not None:
        return PendingConstraint.BUDGET.describe(budget=describe_budget(decision.lack.budget))
    constraint = find_constraint(select_binding_constraint(decision.removals, decision.room))
    return constraint.describe("no_gpu" if not request.gpu_count and "no_gpu" in constraint.sentences else "")


def explain_workload(
    state: ClusterState,
    workload_id: str,
    placer: WorkloadPlacer,
    queues: QueueIndex,
    unmet: UnmetCondition | None = None,
    *,
    now_ns: int,
) -> Explanation:
    """Explains a workload: the candidates of its placement, or, if it is pending, what currently prevents one.

    `unmet` is the condition that keeps it from starting whatever the capacity. With it, how long it is expected to run, and
    what it was promised.
    """
    workload = state.workloads[workload_id]
    if unmet is not None:
        remedy = describe_condition_remedy(workload, unmet)
        found = Explanation(workload=workload, remedy=remedy, constraint=unmet.constraint)
    else:
        found = _explain_placement(state, workload, placer, queues, now_ns)
    remedy = f"{found.remedy}{_describe_promise(workload)}".strip()
    if not workload.phase.is_ended:
        found = replace(found, runtime=estimate_runtime(workload, state))
    return replace(found, remedy=remedy[:SENTENCE_LETTERS_MOST])


_ASSUMED: Mapping[str, str] = {"quota": "the quota of its queue", "power": "the watts of its budgets"}


def _describe_promise(workload: Workload) -> str:
    """Describes by when a pending workload starts, and what ends before; empty without a promise."""
    promise = workload.promise
    if promise is None or workload.phase is not WorkloadPhase.PENDING:
        return ""
    said = f" Promised to start by {format_time(promise.start_ns)}"
    if promise.waits_for:
        more = promise.ends - len(promise.waits_for)
        names = [*promise.waits_for, *([f"{more} more"] if more > 0 else [])]
        said += f", when {_join(names)} end{'s' if len(names) == 1 else ''}"
        said += f"; the last of these ends by {SOURCE_NAMES.get(promise.source, 'what is expected')}"
    if promise.assumes:
        limits = [_ASSUMED.get(one, one) for one in promise.assumes]
        said += f". It takes for granted that no other work takes {_join(limits)} that is free then"
    return said + (f". It is later than promised before: {promise.cause}." if promise.cause else ".")


def _describe_withheld(state: ClusterState, workload: Workload) -> Explanation | None:
    """Explains work that waits though there is room: for a reservation, or for work that goes before it."""
    constraint = workload.reason.partition(":")[0]
    estimate = estimate_runtime(workload, state)
    hint = (
        "" if estimate is not None else " Nothing says how long it runs. To help: submit it with --expect, or --time."
    )
    if constraint == "reservation":
        name = workload.reason.rpartition("reservation ")[2].removesuffix(" holds")
        held = next((one for one in state.policy.reservations if one.name == name), None)
        if held is None:
            return None
        span = f"{format_time(held.start_ns)} to {format_time(held.end_ns)}"
        remedy = f"Reservation {name} holds nodes from {span}, and it would not have ended before.{hint}"
        return Explanation(workload=workload, remedy=remedy, constraint=constraint)
    if constraint == PendingConstraint.FAIR_SHARE.value:
        queue = workload.reason.partition("queue ")[2].partition(",")[0]
        remedy = (
            f"Queue {queue} has used less than its share, and freed capacity is held for its work. To help: wait, which "
            "is bounded, or have capacity_hold lowered with eelctl queue apply."
        )
        return Explanation(workload=workload, remedy=remedy, constraint=constraint)
    if constraint != "backfill":
        return None
    first = next((one for key in state.pending if (one := state.workloads[key]).promise is not None), None)
    if first is None or first.promise is None:
        return None
    remedy = (
        f"There is room, but it would still run when {first.workload_id} starts, which is promised a start by "
        f"{format_time(first.promise.start_ns)}.{hint or ' It starts once it delays nothing.'}"
    )
    return Explanation(workload=workload, remedy=remedy, constraint=constraint)


def _explain_placement(
    state: ClusterState, workload: Workload, placer: WorkloadPlacer, queues: QueueIndex, now_ns: int
) -> Explanation:
    workload_id, spec = workload.workload_id, workload.spec
    if workload.phase is not WorkloadPhase.PENDING:
        return Explanation(workload=workload, replicas=state.explanations.get(workload_id))
    if workload_id in state.nominations:
        return Explanation(workload=workload, remedy=PREEMPTING_REMEDY, constraint=PendingConstraint.PREEMPTING.value)
    hold = state.spending.blocking_limit(spec)
    if hold is not None:
        return Explanation(
            workload=workload, remedy=spending_remedy(hold, state.policy), constraint=PendingConstraint.SPENDING.value
        )
    if is_sliced(workload):
        return Explanation(
            workload=workload, remedy=_slices_remedy(state), constraint=PendingConstraint.PARTITIONS.value
        )
    if queues.is_active:
        admitted = queues.admit(spec, lambda: placer.snapshot().models)
        if isinstance(admitted, QueueHold):
            remedy = describe_queue_remedy(admitted, queues.tree)
            return Explanation(workload=workload, remedy=remedy, constraint=admitted.constraint.value)
        # What has no quota left is no way to help.
        spec = admitted
    closed = list_closed_nodes(state, workload, now_ns)
    decision = placer.decide_placement(spec, workload_id=workload_id, closed=closed, is_start=True)
    free = decision
    if closed and not decision.placements:
        free = placer.decide_placement(spec, workload_id=workload_id, is_start=True)
    if free.placements:
        withheld = _describe_withheld(state, workload)
        if withheld is not None:
            return withheld
        return Explanation(
            workload=workload,
            replicas=free.explanation,
            remedy="There is room by now; it is placed when waiting work is next tried.",
        )
    case = PendingCase(workload_id, spec, state, placer, closed, _list_refused_models(spec, placer, queues))
    ways = [_describe_remedy(spec, remedy) for remedy in list_remedies(case, decision)]
    if decision.lack is not None:
        found, constraint = _describe_watts(decision.lack), "budget"
    else:
        gaps = measure_gaps(placer.list_permitted_nodes(AlteredNodes(), spec, workload_id, closed), spec)
        found, constraint = (
            _describe_found(decision, gaps, spec),
            select_binding_constraint(decision.removals, decision.room),
        )
    remedy = f"{found}. To help: {_join_ways(ways) if ways else describe_hint(constraint)}."
    before = 0 if queues.is_active else state.pending.count_before(workload_id)
    if before:
        remedy += f" {_count(before, 'workload')} that wait{'s' if before == 1 else ''} {'is' if before == 1 else 'are'} tried before it."
    replicas = () if decision.lack is not None else decision.explanation
    return Explanation(workload=workload, replicas=replicas, remedy=remedy, constraint=constraint)


def _list_refused_models(spec: WorkloadSpec, placer: WorkloadPlacer, queues: QueueIndex) -> frozenset[str]:
    """Lists the GPU models beyond those of a request on which its queue lets it start as little."""
    models = list(placer.snapshot().models) if queues.is_active and spec.request.gpu_models else []

    def admit(model: str) -> WorkloadSpec | QueueHold:
        return queues.admit(replace(spec, request=replace(spec.request, gpu_models=(model,))), lambda: models)

    return frozenset(model for model in models if isinstance(admit(model), QueueHold))


def _slices_remedy(state: ClusterState) -> str:
    count = sum(record.partitioned for record in state.nodes.values())
    if not count:
        return "No pool is the partition planner's. To help: eelctl policy set --partition POOL=on."
    return "It is placed when a plan is applied. To help: eelctl partition plan, and apply what it finds."


def _describe_watts(lack: ExceededBudget) -> str:
    """Describes by how much a power budget would be exceeded."""
    return (
        f"There is room, but {describe_budget(lack.budget)} has {max(0.0, lack.left_w):,.0f} of its {lack.limit_w:,.0f} W "
        f"left, and this would draw {lack.more_w:,.0f} W more there at the GPUs' default limits"
    )


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
    # A node that lacks CPU may lack memory as well; what is asked for first is said first.
    constraint = select_binding_constraint(removals, room).partition("+")[0]
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
    if not most:
        return (
            f"is {request.gpu_count}; no registered node has a GPU",
            "ask for 0, or start an agent on a node with GPUs",
        )
    return (
        f"is {request.gpu_count}; no registered node has more than {most} such GPUs",
        f"ask for at most {most} on one node, and use replicas for more",
    )


def make_outcome_event(
    workload_id: str, request: ResourceRequest, decision: PlacementDecision, now_ns: int
) -> WorkloadPlaced | WorkloadDeferred:
    """Builds the event of a placement attempt."""
    if not decision.placements:
        reason = describe_pending_reason(request, decision)
        return WorkloadDeferred(time_ns=now_ns, workload_id=workload_id, reason=reason)
    return WorkloadPlaced(
        time_ns=now_ns,
        workload_id=workload_id,
        placements=decision.placements,
        explanation=decision.explanation,
        power_limit_w=decision.power_limit_w,
    )


def preview_workload(workload_id: str, spec: WorkloadSpec, decision: PlacementDecision, now_ns: int) -> Workload:
    """Returns the workload as it would be accepted now."""
    placed = bool(decision.placements)
    return Workload(
        workload_id=workload_id,
        spec=spec,
        phase=WorkloadPhase.PLACED if placed else WorkloadPhase.PENDING,
        reason="" if placed else describe_pending_reason(spec.request, decision),
        placements=decision.placements,
        submitted_ns=now_ns,
        placed_ns=now_ns if placed else 0,
        power_limit_w=decision.power_limit_w,
        limit_before_start=decision.power_limit_w is not None,
    )
