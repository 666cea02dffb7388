"""What-if scenarios and shadow policies: changes and other policies tried on a copy of the cluster by the code that runs it.

Owns the changes, the search for the number of nodes that suffices, the shadow policy, and the comparison of two
clusters: totals, room for typical work, and the workloads that fare differently. Must not know the live cluster: it
gets a copy to use up, and nothing that happens here is an event of any journal.

Scenarios. A copy of the state is edited through its own events (a node joins, is lost, the policy changes), work
that lost its place is pending again, and a core on the copy does what the live one would do: it tries pending
work by priority, then by age. So a what-if is the real planner on an imagined cluster, deterministic like it.
Work that ran goes before work of its priority that never did. The number of nodes that suffices is found by
doubling and then by bisection. More nodes could in principle place less (the planner looks at one workload at a
time), so what is reported is what was tried: the count suffices, one less does not.

Shadow policy. A second policy follows the cluster's events on a copy and decides for itself. What the cluster decided
(placed, deferred, its policy) is not followed; what happened to it (work, nodes and devices came and went) is. With the
weights in force a shadow decides as the cluster does, so that every difference is the policy's. A cluster that cut a
round of tries short continues it between other calls, and the shadow at once: then, and only then, the order of trying
may differ, too.

Comparison. Values that no event touched are shared between a state and its copy, so that "is the same object" is
"nothing changed", and a comparison costs what the changes touched. Memory is no part of a class of the mix, so the
room leaves it out.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.workloads import resolve_reported_models
from eelgrid_controller.placement.planner import count_fitting_tasks
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.demand import TaskClass
from eelgrid_controller.state.events import (
    ArraySubmitted,
    Event,
    GpuLost,
    GpuReturned,
    NodeCordoned,
    NodeJoined,
    NodeLost,
    NodesRemoved,
    NodeUncordoned,
    PolicyChanged,
    SpendingJudged,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadHeld,
    WorkloadReleased,
    WorkloadSubmitted,
)
from eelgrid_controller.state.node_allocations import is_sliced
from eelgrid_controller.state.takeover_events import NodeHeard, NodeReconciled, StartsResumed
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import DeadlineExceeded, Fault, InvalidArgument, NotFound
from eelgrid_protos.messages import (
    COPIES_MOST,
    IMAGINED_NODES_MOST,
    OBJECTIVES,
    AddNodes,
    CancelWorkloads,
    Candidate,
    ClassRoom,
    ClusterFigures,
    DependencyCondition,
    DrainNodes,
    Gpu,
    ImaginedOutcome,
    Inventory,
    JobArrayRequest,
    NodeShape,
    NodeState,
    OutcomeCount,
    PlaceAnew,
    PlanCapacityRequest,
    PlanCapacityResponse,
    Policy,
    SetPowerBudgets,
    SetWeights,
    ShadowReport,
    SubmitCopies,
    SubmitWorkloadRequest,
    WhatIfChange,
    WhatIfRequest,
    WhatIfResponse,
    Workload,
    WorkloadDifference,
    WorkloadPhase,
    WorkloadSpec,
)

# Classes of the mix that room is counted for, the most frequent first.
ROOMS_MOST = 16
# Replicas asked for when the question is how many there is room for.
_WITHOUT_END = 1_000_000_000
_NODES_NAMED = 8
# Bad news first.
_ORDER = (
    ImaginedOutcome.DISPLACED,
    ImaginedOutcome.REFUSED,
    ImaginedOutcome.WAITS,
    ImaginedOutcome.MOVED,
    ImaginedOutcome.PLACED,
    ImaginedOutcome.CANCELLED,
)


def compute_cluster_figures(core: Core) -> ClusterFigures:
    """The totals of a cluster."""
    state, snapshot = core.state, core.snapshot()
    ready = [record for record in state.nodes.values() if record.state is NodeState.READY]
    phases = state.phases
    return ClusterFigures(
        nodes_ready=len(ready),
        gpus=sum(len(record.inventory.gpus) for record in ready),
        allocated_gpu_milli=sum(record.allocated_gpu_milli for record in state.nodes.values()),
        cpu_milli=sum(record.inventory.cpu_milli for record in ready),
        allocated_cpu_milli=sum(record.allocated_cpu_milli for record in state.nodes.values()),
        placed=phases[WorkloadPhase.PLACED],
        pending=phases[WorkloadPhase.PENDING],
        modelled_power_w=core.modelled_power_w(),
        # Lost nodes take no work, so that nothing free on them counts as fragmented.
        fragmented_gpu_milli=round(
            int(snapshot.measure_fragments()[snapshot.nodes.available].sum()) / snapshot.mix.total
        ),
    )


def count_class_room(core: Core, classes: Iterable[TaskClass]) -> tuple[int, ...]:
    """How many more tasks of each class fit."""
    snapshot = core.snapshot()
    return tuple(count_fitting_tasks(snapshot.nodes, snapshot.models, entry, _WITHOUT_END) for entry in classes)


def compare_class_room(
    mix: Sequence[tuple[TaskClass, int]], before: Sequence[int], after: Sequence[int]
) -> tuple[ClassRoom, ...]:
    """The room for each class, before and after; at most ROOMS_MOST."""
    total = sum(weight for _, weight in mix) or 1
    return tuple(
        ClassRoom(**entry._asdict(), share=weight / total, before=was, after=now)
        for (entry, weight), was, now in zip(mix, before, after, strict=False)
    )


def _nodes(workload: Workload) -> tuple[str, ...]:
    return tuple(dict.fromkeys(placement.node_name for placement in workload.placements))


def _outcome(was: Workload | None, now: Workload) -> ImaginedOutcome | None:
    """What became of a workload; None for nothing."""
    if now.phase.is_ended:
        return ImaginedOutcome.CANCELLED if was and not was.phase.is_ended else None
    if now.phase is WorkloadPhase.PENDING:
        if was is None:
            return ImaginedOutcome.WAITS
        return ImaginedOutcome.DISPLACED if was.phase is WorkloadPhase.PLACED else None
    if was is None or was.phase is WorkloadPhase.PENDING:
        return ImaginedOutcome.PLACED
    return ImaginedOutcome.MOVED if was.placements != now.placements else None


def _why(was: Workload | None, now: Workload, outcome: ImaginedOutcome, drained: frozenset[str]) -> str:
    match outcome:
        case ImaginedOutcome.DISPLACED | ImaginedOutcome.WAITS:
            return now.reason
        case ImaginedOutcome.MOVED if was is not None:
            left = [name for name in _nodes(was) if name in drained]
            return f"{', '.join(left[:_NODES_NAMED])} taken out of use" if left else "placed anew"
        case ImaginedOutcome.PLACED if was is not None:
            return f"waited for {was.reason}" if was.reason else "waited"
        case _:
            return ""


def _first_candidate(state: ClusterState, key: str) -> Candidate | None:
    """The place that was chosen for a workload's first replica, with its costs."""
    explanation = state.explanations.get(key)
    return explanation[0].candidates[0] if explanation and explanation[0].candidates else None


def find_workload_differences(
    before: Mapping[str, Workload], state: ClusterState, drained: frozenset[str]
) -> Iterator[WorkloadDifference]:
    """Every workload that fares differently, in the order of submission."""
    for key, now in state.workloads.items():
        was = before.get(key)
        outcome = None if was is now else _outcome(was, now)
        if outcome is None:
            continue
        yield WorkloadDifference(
            workload_id=now.workload_id,
            name=now.spec.name,
            outcome=outcome,
            nodes_before=_nodes(was)[:_NODES_NAMED] if was else (),
            nodes_after=_nodes(now)[:_NODES_NAMED],
            reason=_why(was, now, outcome, drained),
            candidate=_first_candidate(state, key) if now.placements else None,
        )


def sort_by_severity(found: Iterable[WorkloadDifference]) -> list[WorkloadDifference]:
    """By outcome; those of one outcome stay in their order."""
    return sorted(found, key=lambda difference: _ORDER.index(difference.outcome))


def count_outcomes(found: Iterable[WorkloadDifference]) -> tuple[OutcomeCount, ...]:
    """How many workloads have each outcome, the bad news first."""
    counts = Counter(difference.outcome for difference in found)
    return tuple(OutcomeCount(outcome=outcome, workloads=counts[outcome]) for outcome in _ORDER if counts[outcome])


def compare_placements(
    live: Mapping[str, Workload], shadow: ClusterState, keys: Iterable[str], most: int
) -> tuple[dict[str, int], tuple[WorkloadDifference, ...]]:
    """How two clusters placed the same workloads, by count, and the first `most` that differ."""
    counts = dict.fromkeys(("alike", "elsewhere", "live_alone", "shadow_alone", "neither"), 0)
    found: list[WorkloadDifference] = []
    for key in keys:
        here, there = live.get(key), shadow.workloads.get(key)
        if here is None or here.phase.is_ended:
            continue
        was, now = here.placements, there.placements if there else ()
        name = "live_alone" if was and not now else "shadow_alone" if now and not was else ""
        name = name or ("neither" if not was else "alike" if was == now else "elsewhere")
        counts[name] += 1
        if name in {"alike", "neither"} or len(found) == most:
            continue
        outcomes = {
            "live_alone": ImaginedOutcome.WAITS,
            "shadow_alone": ImaginedOutcome.PLACED,
            "elsewhere": ImaginedOutcome.MOVED,
        }
        found.append(
            WorkloadDifference(
                workload_id=key,
                name=here.spec.name,
                outcome=outcomes[name],
                nodes_before=_nodes(here)[:_NODES_NAMED],
                nodes_after=_nodes(there)[:_NODES_NAMED] if there else (),
                reason=there.reason if there else "refused",
                candidate=_first_candidate(shadow, key),
            )
        )
    return counts, tuple(found)


# Rounds of tries (core.py bounds each): a hundred thousand decisions, a minute or so.
_ROUNDS_MOST = 400
_DIFFERENCES_SHOWN = 100
_NODES_TRIED = 1000
# What clouds sell with a data-centre GPU: p5, p4d and g5 have 24, 12 and 24 CPUs, and 3.2, 3.6 and 4 times its memory.
_CPU_MILLI_PER_GPU = 24_000
_MEMORY_PER_GPU_MEMORY = 3


@dataclass(frozen=True, slots=True)
class ScenarioContext:
    """What a trial needs beside the copy: how to make a core on it, products, the time, and whether to go on."""

    make_core: Callable[[ClusterState], Core]
    catalogue: Catalogue
    now_ns: int
    proceed: Callable[[], bool] = lambda: True

    def check_deadline(self) -> None:
        """Raises DeadlineExceeded where nobody waits for the answer: what was asked may take minutes."""
        if not self.proceed():
            raise DeadlineExceeded("nobody waits for the answer any more")


class _Trial:
    """One copy, used up by one sequence of changes."""

    def __init__(self, state: ClusterState, bench: ScenarioContext) -> None:
        self.state = state
        self.bench = bench
        self.before = dict(state.workloads)
        self.drained: set[str] = set()
        self.submitted: list[str] = []
        self.refused: list[WorkloadDifference] = []
        self.complete = True
        self._core: Core | None = None
        self._rounds = 0
        self._added = 0
        # Work that ran goes before work that waits, whose numbers begin at 1.
        self._number = -(2**62)

    @property
    def core(self) -> Core:
        """A core on the state as edited so far, with nothing left to try."""
        if self._core is None:
            self._core = self.bench.make_core(self.state)
        while self._core.has_backlog:
            self.bench.check_deadline()
            if self._rounds == _ROUNDS_MOST:
                self.complete = False
                break
            self._rounds += 1
            self._core.retry(now_ns=self.bench.now_ns)
        return self._core

    def apply(self, change: WhatIfChange) -> None:
        match change.change:
            case DrainNodes(node_names=names, remove=remove):
                self._drain(names, remove=remove)
            case AddNodes(shape=shape, count=count):
                self._add(shape, count)
            case SetWeights():
                self._set_weights(change.change)
            case SetPowerBudgets(budgets=budgets):
                # Work that waits for watts is tried again.
                self._core = None
                self._set_policy(budgets=budgets)
            case PlaceAnew():
                self._core = None
                # Work that runs may run on whatever is spent: here it is not to wait for that.
                self.state.spending.set_overspent(())
                for number, (key, workload) in enumerate(list(self.state.workloads.items())):
                    if not workload.phase.is_ended and not is_sliced(workload):
                        self.state.requeue_workload(key, number=number - 2**61)
            case SubmitCopies():
                self._submit(change.change)
            case CancelWorkloads(workload_ids=keys):
                for key in keys:
                    self.core.cancel(key, now_ns=self.bench.now_ns, is_immediate=True)
            case None:
                raise InvalidArgument(
                    "this controller does not know one of the changes",
                    (Violation("change", "is missing or newer than this controller", "use a change that it knows"),),
                )
            case _:
                assert_never(change.change)

    def _drain(self, names: tuple[str, ...], *, remove: bool) -> None:
        self._core = None
        for name in dict.fromkeys(names):
            record = self.state.nodes.get(name)
            if record is None:
                raise NotFound(f"no node is called {name!r}; list nodes to see the names")
            for key in dict.fromkeys(key for key, _ in record.assignments):
                self.state.requeue_workload(key, number=self._number)
                self._number += 1
            if record.state is NodeState.READY:
                self.state.apply(NodeLost(time_ns=self.bench.now_ns, node_name=name))
            self.drained.add(name)
            if remove:
                del self.state.nodes[name]

    def _add(self, shape: NodeShape, count: int) -> None:
        self._core = None
        if self._added + count > IMAGINED_NODES_MOST:
            raise InvalidArgument(
                "these are too many nodes",
                (Violation("count", f"makes {self._added + count} added nodes", f"add at most {IMAGINED_NODES_MOST}"),),
            )
        template = _template(shape, self.state, self.bench.catalogue)
        for _ in range(count):
            self.bench.check_deadline()
            self._added += 1
            name = f"added-{self._added}"
            while name in self.state.nodes:
                name = f"{name}-new"
            gpus = tuple(replace(gpu, uuid=f"{name}.{gpu.index}") for gpu in template.gpus)
            inventory = replace(template, node_name=name, gpus=gpus)
            self.state.apply(NodeJoined(time_ns=self.bench.now_ns, inventory=inventory))

    def _set_weights(self, change: SetWeights) -> None:
        weights = change.weights or OBJECTIVES[change.objective]
        self._set_policy(objective=change.objective or "custom", weights=weights)

    def _set_policy(self, **changes: Any) -> None:
        policy = self.state.policy
        wanted = replace(policy, **changes, revision=policy.revision + 1)
        self.state.apply(PolicyChanged(time_ns=self.bench.now_ns, policy=wanted))

    def _submit(self, change: SubmitCopies) -> None:
        if len(self.submitted) + change.copies > COPIES_MOST:
            problem = f"makes {len(self.submitted) + change.copies} workloads"
            raise InvalidArgument(
                "these are too many workloads", (Violation("copies", problem, f"submit at most {COPIES_MOST}"),)
            )
        for _ in range(change.copies):
            self.bench.check_deadline()
            key = f"new-{len(self.submitted) + 1}"
            while key in self.state.workloads:
                key = f"{key}-if"
            self.submitted.append(key)
            request = SubmitWorkloadRequest(spec=change.spec, workload_id=key)
            try:
                self.core.submit(request, now_ns=self.bench.now_ns)
            except InvalidArgument as fault:
                found = "; ".join(f"{item.field} {item.problem}; {item.remedy}" for item in fault.violations)
                self.refused.append(
                    WorkloadDifference(
                        workload_id=key,
                        name=change.spec.name,
                        outcome=ImaginedOutcome.REFUSED,
                        reason=(found or fault.message)[:2000],
                    )
                )

    def waiting(self) -> int:
        """Workloads without a place: those that were submitted here, or all where nothing was."""
        pending = self.core.state.pending
        if not self.submitted:
            return len(pending)
        return sum(key in pending for key in self.submitted) + len(self.refused)

    def differences(self) -> list[WorkloadDifference]:
        return sort_by_severity(
            (*self.refused, *find_workload_differences(self.before, self.core.state, frozenset(self.drained)))
        )


def _template(shape: NodeShape, state: ClusterState, catalogue: Catalogue) -> Inventory:
    """A node of the shape, healthy and empty; its names are given to each that is added."""
    if shape.like_node:
        record = state.nodes.get(shape.like_node)
        if record is None:
            raise NotFound(f"no node is called {shape.like_node!r}; list nodes to see the names")
        healthy = tuple(replace(gpu, lost=False, cordon="") for gpu in record.inventory.gpus)
        # What lies on its disks is not on those of a new node.
        return replace(record.inventory, gpus=healthy, model_data=())
    gpus: tuple[Gpu, ...] = ()
    if shape.gpu:
        one = _describe_gpu(shape.gpu, state, catalogue)
        gpus = tuple(replace(one, index=index) for index in range(shape.gpu_count))
    return Inventory(
        node_name="new",
        cpu_milli=shape.cpu_milli or _CPU_MILLI_PER_GPU * len(gpus),
        memory_bytes=shape.memory_bytes or _MEMORY_PER_GPU_MEMORY * sum(gpu.memory_bytes for gpu in gpus),
        gpus=gpus,
    )


def _describe_gpu(name: str, state: ClusterState, catalogue: Catalogue) -> Gpu:
    """A GPU of this name: of the catalogue, or like one that a node reports and the catalogue does not know."""
    reported = {gpu.model: gpu for record in state.nodes.values() for gpu in record.inventory.gpus}
    (model,) = resolve_reported_models((name,), "shape.gpu", reported)
    # A key names one product, where several share a model.
    product = catalogue.products.get(name.lower())
    if product is None or product.model != model:
        product = next((one for one in catalogue.products.values() if one.model == model), None)
    if product is None:
        return replace(reported[model], lost=False, cordon="", mig_enabled=False, mig_pending=False)
    return Gpu(
        uuid="new",
        index=0,
        product=product.nvml_names[0],
        model=product.model,
        catalogue_key=product.key,
        memory_bytes=product.memory_bytes,
        power_limit_default_w=product.power_default_w,
        mig_capable=product.mig is not None,
    )


def run_what_if(state: ClusterState, request: WhatIfRequest, bench: ScenarioContext) -> WhatIfResponse:
    """What the changes would do to `state`, a copy that is used up. Raises Fault."""
    live = bench.make_core(state)
    mix = state.demand.mix[:ROOMS_MOST]
    classes = [entry for entry, _ in mix]
    revision, was, room_was = state.revision, compute_cluster_figures(live), count_class_room(live, classes)
    trial = _Trial(state, bench)
    for change in request.changes:
        trial.apply(change)
    core = trial.core
    found = trial.differences()
    return WhatIfResponse(
        before=was,
        after=compute_cluster_figures(core),
        rooms=compare_class_room(mix, room_was, count_class_room(core, classes)),
        counts=count_outcomes(found),
        differences=tuple(found[: request.differences_most or _DIFFERENCES_SHOWN]),
        revision=revision,
        complete=trial.complete,
    )


def plan_capacity(state: ClusterState, request: PlanCapacityRequest, bench: ScenarioContext) -> PlanCapacityResponse:
    """How many nodes of the shape are needed on `state`, which is copied for each trial. Raises Fault."""
    most = request.nodes_most or _NODES_TRIED
    waiting: dict[int, int] = {}
    wanted = 0

    def changes(nodes: int) -> tuple[WhatIfChange, ...]:
        # The nodes are there first, so that work too large for the others is not refused.
        more = (WhatIfChange(change=AddNodes(shape=request.shape, count=nodes)),) if nodes else ()
        return (*more, *request.changes)

    def suffices(nodes: int) -> bool:
        nonlocal wanted
        if nodes not in waiting:
            trial = _Trial(state.copy(), bench)
            for change in changes(nodes):
                trial.apply(change)
            waiting[nodes] = trial.waiting()
            wanted = len(trial.submitted) or wanted or waiting[nodes]
        return waiting[nodes] == 0

    # A shape that nobody can build is refused even where no node is needed.
    _template(request.shape, state, bench.catalogue)
    low, high = -1, 0
    while high <= most and not suffices(high):
        low, high = high, min(2 * high or 1, most) if high < most else most + 1
    if high <= most:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if suffices(middle) else (middle, high)
    nodes = high if high <= most else None
    outcome = run_what_if(state.copy(), WhatIfRequest(changes=changes(most if nodes is None else nodes)), bench)
    return PlanCapacityResponse(
        nodes=nodes,
        outcome=outcome,
        wanted=wanted,
        waiting_with_one_less=waiting.get(nodes - 1, 0) if nodes else 0,
        trials=len(waiting),
    )


# Workloads that are compared, the newest.
_COMPARED_MOST = 100_000
_DIFFERENCES_MOST = 100
# A round is some hundred tries; what is left is gone on with after the next event.
_SHADOW_ROUNDS_MOST = 16


def _follow_ends(spec: WorkloadSpec) -> WorkloadSpec:
    """Returns a specification whose dependencies are met by any end: the cluster decides which of them fail."""
    if spec.schedule is None or not spec.schedule.after:
        return spec
    after = tuple(replace(one, condition=DependencyCondition.ENDED) for one in spec.schedule.after)
    return replace(spec, schedule=replace(spec.schedule, after=after))


def _repeat_array(event: ArraySubmitted) -> SubmitWorkloadRequest:
    """Returns the submission of an array; what its elements run makes no difference to where they are placed."""
    indexes = ",".join(str(element.index) for element in event.elements)
    limit = f"%{event.running_most}" if event.running_most else ""
    return SubmitWorkloadRequest(
        spec=_follow_ends(event.spec),
        workload_id=event.array_id,
        hold=bool(event.held_by),
        array=JobArrayRequest(indexes=indexes + limit),
    )


class ShadowPolicy:
    """One policy beside the one in force, on a copy that is handed over."""

    def __init__(
        self, state: ClusterState, policy: Policy, make_core: Callable[[ClusterState], Core], *, now_ns: int
    ) -> None:
        self._began = (now_ns, state.revision)
        self._policy = policy
        state.apply(PolicyChanged(time_ns=now_ns, policy=policy))
        self.core = make_core(state)
        self._since: deque[str] = deque(maxlen=_COMPARED_MOST)
        self._events = 0

    def follow_event(self, event: Event) -> None:
        """Takes in what happened, and decides what there is to decide."""
        self._events += 1
        try:
            self._follow(event)
        except Fault:
            # What the cluster took and the shadow cannot: it was refused here, and shows as not placed.
            return
        for _ in range(_SHADOW_ROUNDS_MOST):
            if not self.core.has_backlog:
                return
            self.core.retry(now_ns=event.time_ns)

    def _follow(self, event: Event) -> None:
        core, now_ns = self.core, event.time_ns
        match event:
            case WorkloadSubmitted(workload_id=key, spec=spec):
                self._since.append(key)
                request = SubmitWorkloadRequest(spec=_follow_ends(spec), workload_id=key)
                core.submit(request, now_ns=now_ns)
            case ArraySubmitted():
                self._since += event.workload_ids
                core.submit(_repeat_array(event), now_ns=now_ns)
            case WorkloadHeld(workload_id=key, user=user):
                core.hold(key, user=user, now_ns=now_ns)
            case WorkloadReleased(workload_id=key):
                core.release(key, now_ns=now_ns)
            case WorkloadCancelled(workload_id=key) | WorkloadCompleted(workload_id=key):
                core.cancel(key, now_ns=now_ns, is_immediate=True)
            case NodeJoined(inventory=inventory, plan_epoch=epoch):
                core.register_node(inventory, now_ns=now_ns, plan_epoch=epoch)
            case NodeHeard(node_name=name) | NodeReconciled(node_name=name):
                core.register_node(core.state.nodes[name].inventory, now_ns=now_ns)
            case StartsResumed():
                core.resume_starts(now_ns=now_ns, awaits_agents=False)
            case NodeLost(node_name=name):
                core.mark_node_lost(name, now_ns=now_ns)
            case NodesRemoved(node_names=names):
                # Work of its own may stand there, which the cluster's did not.
                for name in names:
                    core.mark_node_lost(name, now_ns=now_ns)
            case GpuLost(node_name=name, gpu_uuid=uuid):
                core.mark_gpu_lost(name, uuid, now_ns=now_ns)
            case GpuReturned(node_name=name, gpu_uuid=uuid):
                core.mark_gpu_returned(name, uuid, now_ns=now_ns)
            case NodeCordoned() | NodeUncordoned():
                core.apply_cordon(event)
            case SpendingJudged(over=over):
                # What is spent is the cluster's, not what the shadow would spend.
                core.set_exhausted_spending(over, now_ns=now_ns)
            case _:
                return

    def build_report(self, live: ClusterFigures, workloads: Mapping[str, Workload], revision: int) -> ShadowReport:
        """The cluster at `revision` beside this."""
        counts, different = compare_placements(workloads, self.core.state, reversed(self._since), _DIFFERENCES_MOST)
        started_ns, started_revision = self._began
        return ShadowReport(
            objective=self._policy.objective,
            weights=self._policy.weights,
            started_ns=started_ns,
            started_revision=started_revision,
            revision=revision,
            events=self._events,
            live=live,
            shadow=compute_cluster_figures(self.core),
            differences=different,
            **counts,
        )
