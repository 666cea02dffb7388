"""What-if scenarios: changes tried on a copy of the cluster by the code that would carry them out.

Owns the changes and the search for the number of nodes that suffices. Must not know the live cluster: it gets
a copy to use up, and nothing that happens here is an event of any journal.

Theory: a copy of the state is edited through its own events (a node joins, is lost, the policy changes), work
that lost its place is pending again, and a core on the copy does what the live one would do: it tries pending
work by priority, then by age. So a what-if is the real planner on an imagined cluster, deterministic like it.
Work that ran goes before work of its priority that never did. The number of nodes that suffices is found by
doubling and then by bisection. More nodes could in principle place less (the planner looks at one workload at a
time), so what is reported is what was tried: the count suffices, one less does not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import NodeJoined, NodeLost, PolicyChanged
from eelgrid_controller.state.replica_changes import is_sliced
from eelgrid_controller.whatif.comparison import (
    ROOMS_MOST,
    compare_class_room,
    compute_cluster_figures,
    count_class_room,
    count_outcomes,
    find_workload_differences,
    sort_by_severity,
)
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.catalogue.products import Product
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import DeadlineExceeded, InvalidArgument, NotFound
from eelgrid_protos.messages import (
    COPIES_MOST,
    IMAGINED_NODES_MOST,
    OBJECTIVES,
    AddNodes,
    CancelWorkloads,
    DrainNodes,
    Gpu,
    ImaginedOutcome,
    Inventory,
    NodeShape,
    NodeState,
    PlaceAnew,
    PlanCapacityRequest,
    PlanCapacityResponse,
    SetWeights,
    SubmitCopies,
    SubmitWorkloadRequest,
    WhatIfChange,
    WhatIfRequest,
    WhatIfResponse,
    WorkloadDifference,
    WorkloadPhase,
)

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
            case PlaceAnew():
                self._core = None
                # Work that runs may run on whatever is spent: here it is not to wait for that.
                self.state.spending.set_overspent(())
                for number, (key, workload) in enumerate(list(self.state.workloads.items())):
                    if workload.phase is not WorkloadPhase.CANCELLED and not is_sliced(workload):
                        self.state.requeue_workload(key, number=number - 2**61)
            case SubmitCopies():
                self._submit(change.change)
            case CancelWorkloads(workload_ids=keys):
                for key in keys:
                    self.core.cancel(key, now_ns=self.bench.now_ns)
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
        policy = self.state.policy
        weights = change.weights or OBJECTIVES[change.objective]
        wanted = replace(policy, objective=change.objective or "custom", weights=weights, revision=policy.revision + 1)
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
        return replace(record.inventory, gpus=healthy)
    gpus: tuple[Gpu, ...] = ()
    if shape.gpu:
        product = _product(shape.gpu, catalogue)
        one = Gpu(
            uuid="new",
            index=0,
            product=product.nvml_names[0],
            model=product.model,
            catalogue_key=product.key,
            memory_bytes=product.memory_bytes,
            power_limit_default_w=product.power_default_w,
            mig_capable=product.mig is not None,
        )
        gpus = tuple(replace(one, index=index) for index in range(shape.gpu_count))
    return Inventory(
        node_name="new",
        cpu_milli=shape.cpu_milli or _CPU_MILLI_PER_GPU * len(gpus),
        memory_bytes=shape.memory_bytes or _MEMORY_PER_GPU_MEMORY * sum(gpu.memory_bytes for gpu in gpus),
        gpus=gpus,
    )


def _product(name: str, catalogue: Catalogue) -> Product:
    wanted = name.lower()
    found = [product for product in catalogue.products.values() if wanted in {product.key, product.model.lower()}]
    if not found:
        known = ", ".join(sorted(catalogue.products))
        raise InvalidArgument(
            f"the catalogue has no GPU {name!r}", (Violation("shape.gpu", f"is {name!r}", f"use one of {known}"),)
        )
    return found[0]


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
