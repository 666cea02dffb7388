"""The core: turns every call and every message of the cluster into events and applies them at once.

Owns the ClusterState, the order of one step (validate, decide, apply) and the plan of each node, which is
derived from its allocations and the policy. Must not know of journals, sockets or clocks: `now_ns` is an
argument, and the events go back to the caller, who makes them durable before anybody sees the result.

Theory: each method returns a `CoreStep` whose events are already applied. Replaying them on the state before
gives the state after; the same calls to a new core give the same events. Pending work is tried when capacity
appears, the highest priority first, up to a bound for each step; `retry` continues from there. Plan epochs
belong to the state: they rise in `ClusterState.apply`. A replica in a MIG slice enters a plan only when its
slice exists, with the device to open.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from eelgrid_controller.core.admission import check_feasibility, find_existing_workload, plan_adoption, validate_spec
from eelgrid_controller.core.device_correction import plan_device_correction, plan_device_renaming
from eelgrid_controller.core.migration import plan_migration
from eelgrid_controller.core.node_removal import (
    NodeRemoval,
    plan_node_removal,
    select_forgettable_nodes,
    select_longest_lost_nodes,
)
from eelgrid_controller.core.plan_claims import PlanClaim, compare_claim
from eelgrid_controller.core.retry_rounds import RetryRounds
from eelgrid_controller.core.scaling import plan_scaling
from eelgrid_controller.errors import LostEntries
from eelgrid_controller.partition.execution import partition_event
from eelgrid_controller.partition.recommendation import PartitionStage
from eelgrid_controller.partition.survey import PartitionSurvey, SurveyedGpu, survey_gpus
from eelgrid_controller.placement.explanations import (
    CONTRADICTED_REASON,
    SLICES_REASON,
    explain_workload,
    make_outcome_event,
    preview_workload,
)
from eelgrid_controller.placement.gpu_power import compute_modelled_power_w
from eelgrid_controller.placement.migration_planner import MigrationProblem, build_migration_problem
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.placement.snapshot import Snapshot
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import UNREPORTED_USAGE, Adoption, Eligibility, ExternalUsage
from eelgrid_controller.state.events import (
    ControllerStarted,
    Event,
    GpuLost,
    GpuReturned,
    JournalRolledBack,
    NodeHeard,
    NodeJoined,
    NodeLost,
    NodeOccupied,
    NodeReconciled,
    NodesRemoved,
    PointsMeasured,
    PolicyChanged,
    PricesQuoted,
    SpendingJudged,
    WorkloadCancelled,
    WorkloadDeferred,
    WorkloadLimited,
    WorkloadPlaced,
    WorkloadSubmitted,
    check_readable,
)
from eelgrid_controller.state.node_allocations import ContradictoryEvent, NodeRecord
from eelgrid_controller.state.policy import get_node_budgets_w, is_pool_enforced
from eelgrid_controller.state.policy_validation import revise_policy
from eelgrid_controller.state.replica_changes import is_sliced
from eelgrid_controller.state.spending import OverspentLimit
from eelgrid_controller.state.spending_limits import spending_key
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from eelgrid_protos.messages import (
    Assignment,
    Explanation,
    GpuSetting,
    Inventory,
    MeasuredPoint,
    Move,
    NodePlan,
    NodeState,
    Policy,
    RecommendMovesRequest,
    SubmitWorkloadRequest,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# The bound of quantities.Watts.
_NODE_MOST_W = 1e6


def build_node_plan(record: NodeRecord, policy: Policy, workloads: Mapping[str, Workload]) -> NodePlan:
    """The desired state; equal records, policies and limits give equal plans, whatever the order of placing."""
    assignments = tuple(_assignments(record))
    known = {gpu.uuid for gpu in record.inventory.gpus}
    limits_w = {
        uuid: limit_w
        for assignment in assignments
        if (limit_w := workloads[assignment.workload_id].power_limit_w) is not None
        for uuid in assignment.gpu_uuids
    }
    return NodePlan(
        node_name=record.inventory.node_name,
        epoch=record.plan_epoch,
        lease_s=policy.lease_s,
        enforce=is_pool_enforced(policy, record.inventory.pool),
        assignments=assignments,
        gpu_settings=tuple(GpuSetting(gpu_uuid=uuid, power_limit_w=limits_w[uuid]) for uuid in sorted(limits_w)),
        power_budget_w=_budget_w(get_node_budgets_w(policy).get(record.inventory.node_name)),
        gpu_layouts=tuple(record.layouts[uuid] for uuid in sorted(record.layouts.keys() & known)),
    )


def _budget_w(limit_w: float | None) -> float | None:
    """A node's budget as a plan can say it: what is more than any node draws binds nothing."""
    return None if limit_w is None else min(limit_w, _NODE_MOST_W)


def _assignments(record: NodeRecord) -> Iterator[Assignment]:
    """What can begin: replicas in slices with the device that stands there, which is theirs whole."""
    opened = record.slice_devices()
    for key in sorted(record.assignments):
        item = record.assignments[key]
        if item.gpu_instance is None:
            yield item
        elif key in opened:
            yield replace(item, gpu_uuids=(opened[key],), gpu_milli=GPU_MILLI_WHOLE)


_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class CoreStep(Generic[_Result]):
    """Events to make durable, in order; the answer; and the nodes whose plan changed."""

    events: tuple[Event, ...]
    result: _Result
    nodes: frozenset[str]


LIVE_WORKLOADS_MOST = 1_000_000
# A thousand plans a second for nine thousand years: what an agent says it holds and we never gave is no higher.
REPORTED_EPOCH_MOST = 2**48
NODES_MOST = 100_000


class Core:
    """One owner of one state; synchronous, deterministic, bounded."""

    def __init__(
        self,
        state: ClusterState,
        catalogue: Catalogue,
        *,
        live_most: int = LIVE_WORKLOADS_MOST,
        nodes_most: int = NODES_MOST,
        joins_closed: bool = False,
    ) -> None:
        """Where a node `joins_closed`, an engine runs work there: nothing is placed before it is `occupied`."""
        self.state = state
        self._nodes_most = nodes_most
        self._joins_closed = joins_closed
        self._chooser = WorkloadPlacer(state, catalogue)
        self._live_most = live_most
        self._retrying = RetryRounds(state, self._chooser)

    @property
    def has_backlog(self) -> bool:
        """Whether a round of tries over the waiting work was cut short; `retry` goes on."""
        return self._retrying.is_due

    def snapshot(self) -> Snapshot:
        """The cluster as arrays, read-only, until the next step."""
        return self._chooser.snapshot()

    def modelled_power_w(self) -> float:
        """Watts of the whole cluster by the planner's model."""
        return compute_modelled_power_w(self.snapshot().nodes)

    def workload(self, workload_id: str) -> Workload:
        """One workload; raises NotFound."""
        workload = self.state.workloads.get(workload_id)
        if workload is None:
            raise NotFound(f"no workload has the id {workload_id!r}; list workloads to see the ids")
        return workload

    def _node(self, node_name: str) -> NodeRecord:
        record = self.state.nodes.get(node_name)
        if record is None:
            raise NotFound(f"no node is called {node_name!r}; list nodes to see the names")
        return record

    def explain_workload(self, workload_id: str) -> Explanation:
        """Why a workload stands where it stands; raises NotFound."""
        self.workload(workload_id)
        return explain_workload(self.state, workload_id, self._chooser)

    def node_plan(self, node_name: str) -> NodePlan:
        """The whole of what a node should hold; raises NotFound."""
        return build_node_plan(self._node(node_name), self.state.policy, self.state.workloads)

    def plan_to_send(self, node_name: str) -> NodePlan | None:
        """The same for the node itself; None while it holds more than the journal knows, which the plan would end."""
        return None if self._node(node_name).ahead is not None else self.node_plan(node_name)

    def submit(self, request: SubmitWorkloadRequest, *, now_ns: int, owner: str = "") -> CoreStep[Workload]:
        """Accepts and places a workload, or lets it wait; repeating the call with the same id is harmless."""
        spec = request.spec
        before = find_existing_workload(self.state, request)
        if before is not None:
            return CoreStep((), before, frozenset())
        validate_spec(spec)
        self._refuse_too_many()
        # Numbers only rise, past every id of this form that was ever used.
        key = request.workload_id or f"w-{self.state.next_number}"
        waiting = Workload(workload_id=key, spec=spec, phase=WorkloadPhase.PENDING, submitted_ns=now_ns, owner=owner)
        if is_sliced(waiting):
            return self._submit_sliced(waiting, now_ns, dry_run=request.dry_run)
        quoted = self._quote_if_due(now_ns)
        decision = self._chooser.decide_start(
            spec, quoted[0].quotes if quoted else None, workload_id=request.workload_id
        )
        if not decision.placements:
            check_feasibility(self.state, self._chooser, spec)
        if request.dry_run:
            return CoreStep((), replace(preview_workload(key, spec, decision, now_ns), owner=owner), frozenset())
        submitted = WorkloadSubmitted(time_ns=now_ns, workload_id=key, spec=spec, owner=owner)
        return self._finish_step((*quoted, submitted), key, now_ns, last=make_outcome_event(key, decision, now_ns))

    def adopt(self, request: SubmitWorkloadRequest, adoption: Adoption, *, now_ns: int) -> CoreStep[Workload]:
        """Work stands so, as its engine says; see admission.py. Saying it again is harmless. Raises AdoptionRefused."""
        if request.workload_id not in self.state.workloads:
            self._refuse_too_many()
        events = plan_adoption(self.state, request, adoption, now_ns=now_ns)
        frees = bool(events) and adoption.frees_capacity(request.spec.request)
        return self._finish_step(events, request.workload_id, now_ns, frees=frees)

    def _refuse_too_many(self) -> None:
        if self.state.live_workloads >= self._live_most:
            raise ResourceExhausted(
                f"{self.state.live_workloads} workloads wait or run, which is the limit; cancel some and submit again"
            )

    def _submit_sliced(self, workload: Workload, now_ns: int, *, dry_run: bool) -> CoreStep[Workload]:
        """Accepts what waits for the partition planner."""
        if dry_run:
            return CoreStep((), replace(workload, reason=SLICES_REASON), frozenset())
        key = workload.workload_id
        submitted = WorkloadSubmitted(time_ns=now_ns, workload_id=key, spec=workload.spec, owner=workload.owner)
        deferred = WorkloadDeferred(time_ns=now_ns, workload_id=key, reason=SLICES_REASON)
        return self._finish_step((submitted, deferred), key, now_ns)

    def _quote_if_due(self, now_ns: int) -> tuple[PricesQuoted, ...]:
        """New quotes where they are due, not yet applied."""
        quotes = self._chooser.quote_prices()
        if quotes is None:
            return ()
        return (
            PricesQuoted(
                time_ns=now_ns,
                offers_w=quotes.offers_w,
                scarce_models=quotes.scarce_models,
                load_permille=quotes.load_permille,
            ),
        )

    def _decide_placement(
        self, spec: WorkloadSpec, workload_id: str, quoted: tuple[PricesQuoted, ...] = ()
    ) -> PlacementDecision:
        """Where a workload goes, by quotes that are about to be in force."""
        return self._chooser.decide_placement(spec, quoted[0].quotes if quoted else None, workload_id=workload_id)

    def cancel(self, workload_id: str, *, now_ns: int) -> CoreStep[Workload]:
        """Ends a workload; ending it again is harmless. Raises NotFound."""
        workload = self.workload(workload_id)
        if workload.phase is WorkloadPhase.CANCELLED:
            return CoreStep((), workload, frozenset())
        event = WorkloadCancelled(time_ns=now_ns, workload_id=workload_id)
        nodes = self._apply(event)
        # The list of ended workloads may be of length 0: then it is gone already.
        fallback = replace(workload, phase=WorkloadPhase.CANCELLED, reason="", ended_ns=now_ns)
        ended = self.state.workloads.get(workload_id, fallback)
        if not workload.placements:
            return CoreStep((event,), ended, nodes)
        return self._with_retry(event, ended, nodes, now_ns)

    def scale(self, workload_id: str, replicas: int, *, now_ns: int) -> CoreStep[Workload]:
        """Brings running work to so many standing replicas, or as near as there is room; see scaling.py."""
        workload = self.workload(workload_id)
        quoted: tuple[PricesQuoted, ...] = ()

        def decided(spec: WorkloadSpec) -> PlacementDecision:
            nonlocal quoted
            quoted = quoted or self._quote_if_due(now_ns)
            return self._decide_placement(spec, workload_id, quoted)

        event = plan_scaling(self.state, self.snapshot(), workload, replicas, decided, now_ns=now_ns)
        if event is None:
            return CoreStep((), workload, frozenset())
        events: tuple[Event, ...] = (*quoted, event) if event.placements else (event,)
        return self._finish_step(events, workload_id, now_ns, frees=bool(event.released))

    def set_limit(self, workload_id: str, power_limit_w: float | None, *, now_ns: int) -> CoreStep[Workload]:
        """Asks each GPU of running work to keep a limit, or its default; raises FailedPrecondition where it cannot."""
        workload = self.workload(workload_id)
        if workload.power_limit_w == power_limit_w:
            return CoreStep((), workload, frozenset())
        whole = workload.spec.request.gpu_milli == GPU_MILLI_WHOLE and not is_sliced(workload)
        if workload.phase is not WorkloadPhase.PLACED or not whole:
            raise FailedPrecondition(
                f"workload {workload_id} does not run on whole GPUs; a power limit is of a GPU, so place it on whole ones"
            )
        event = WorkloadLimited(time_ns=now_ns, workload_id=workload_id, power_limit_w=power_limit_w)
        # Lowered or raised: until it is read from the GPUs, what was before may be in force.
        self._chooser.allowance.record_lowered_limit(workload_id, workload.power_limit_w)
        return self._finish_step((event,), workload_id, now_ns)

    def record_points(self, points: Sequence[MeasuredPoint], *, now_ns: int) -> CoreStep[int]:
        """Keeps measured points; how many are new or changed. Raises ResourceExhausted."""
        news = self.state.points.select_changed(points)
        if not news:
            return CoreStep((), 0, frozenset())
        if not self.state.points.has_room_for(news):
            raise ResourceExhausted(
                f"{self.state.points.most} points are kept at the most; measure fewer configurations"
            )
        event = PointsMeasured(time_ns=now_ns, points=news)
        self._apply(event)
        return CoreStep((event,), len(news), frozenset())

    def register_node(
        self, inventory: Inventory, *, now_ns: int, plan_epoch: int = 0, claim: PlanClaim | None = None
    ) -> CoreStep[None]:
        """Takes a new node, a changed one or one that came back; then waiting work is tried again.

        A node that is ready and sends what it sent before changes nothing. Plans
        go on above `plan_epoch`, the one that its agent holds. What it holds by that
        plan is its `claim`, where that must be compared with the journal.
        Raises InvalidArgument for an epoch that is nobody's.
        """
        self.check_plan_epoch(inventory.node_name, plan_epoch)
        record = self.state.nodes.get(inventory.node_name)
        gone = self._make_room_for_a_node(now_ns) if record is None else ()
        name = inventory.node_name
        before = None if record is None else record.inventory
        compared = compare_claim(record, name, claim, now_ns=now_ns)
        events: list[Event] = []
        nodes = frozenset((name,))
        if record is None or not record.matches_inventory(inventory) or plan_epoch > record.plan_epoch:
            joined = NodeJoined(time_ns=now_ns, inventory=inventory, plan_epoch=plan_epoch)
            nodes |= self._apply(joined)
            events += [joined, *self._node_joined_events(name, before, now_ns)]
        events += compared
        for event in events:
            if not isinstance(event, NodeJoined):
                nodes |= self._apply(event)
        if all(isinstance(event, NodeHeard) for event in events):
            # After a start every agent says Hello: what waits is tried in its turn, and Hello is answered at once.
            if events:
                self._retrying.on_capacity_freed()
            return CoreStep(tuple(events), None, frozenset())
        more, touched = self._on_capacity_freed(now_ns)
        return CoreStep((*gone, *events, *more), None, nodes | touched)

    def _node_joined_events(self, node_name: str, before: Inventory | None, now_ns: int) -> list[Event]:
        """What goes with a node's joining, not yet applied: so that nothing is placed there in between."""
        if before is None:
            closed = NodeOccupied(time_ns=now_ns, node_name=node_name, others=UNREPORTED_USAGE)
            return [closed] if self._joins_closed else []
        renamed = plan_device_renaming(self.state, self.state.nodes[node_name], before, now_ns=now_ns)
        return [] if renamed is None else [renamed]

    def expect_reports(self, *, now_ns: int) -> CoreStep[None]:
        """Places nothing on any node before its engine has reported anew what stands there."""
        events = [
            NodeOccupied(time_ns=now_ns, node_name=name, others=replace(record.others, closed=UNREPORTED_USAGE.closed))
            for name, record in self.state.nodes.items()
            if record.others.closed != UNREPORTED_USAGE.closed
        ]
        return CoreStep(tuple(events), None, frozenset[str]().union(*map(self._apply, events)))

    def reconcile_node(self, node_name: str, *, now_ns: int) -> CoreStep[NodeRecord]:
        """Gives up what a node holds beyond the journal: its next plan is without; then waiting work is tried."""
        record = self._node(node_name)
        if record.ahead is None:
            return CoreStep((), record, frozenset())
        event = NodeReconciled(time_ns=now_ns, node_name=node_name, plan_epoch=record.ahead.plan_epoch)
        return self._with_retry(event, record, self._apply(event), now_ns)

    def record_controller_start(
        self, *, now_ns: int, lost: LostEntries | None = None, asks_agents: bool = True
    ) -> CoreStep[None]:
        """A controller begins; `lost` is what an operator accepted as gone. Without agents to ask nothing is doubted."""
        events: list[Event] = []
        if lost is not None:
            events.append(JournalRolledBack(time_ns=now_ns, first=lost.first, last=lost.last))
        if asks_agents and any(record.inventory.agent_version for record in self.state.nodes.values()):
            events.append(ControllerStarted(time_ns=now_ns))
        for event in events:
            self._apply(event)
        return CoreStep(tuple(events), None, frozenset())

    def check_plan_epoch(self, node_name: str, plan_epoch: int) -> None:
        """Raises InvalidArgument for an epoch that neither we nor a controller before us can have given a node."""
        record = self.state.nodes.get(node_name)
        most = max(REPORTED_EPOCH_MOST, record.plan_epoch if record else 0)
        if plan_epoch > most:
            remedy = "remove the plan that the agent keeps in its state directory, and start it again"
            violation = Violation("hello.plan_epoch", f"is {plan_epoch}, and plans went no further than {most}", remedy)
            raise InvalidArgument(f"node {node_name} says that it holds a plan that nobody made", (violation,))

    def _make_room_for_a_node(self, now_ns: int) -> tuple[Event, ...]:
        """Forgets empty nodes that are lost for longest where no further one has room; raises ResourceExhausted."""
        if len(self.state.nodes) < self._nodes_most:
            return ()
        names = tuple(name for _, name in select_longest_lost_nodes(self.state, max(1, self._nodes_most // 100)))
        if not names:
            raise ResourceExhausted(
                f"{self._nodes_most} nodes are registered, which is the limit of one controller, and none of them is "
                "lost and empty; remove some with `eelctl node remove`"
            )
        event = NodesRemoved(time_ns=now_ns, node_names=names, reason="made room for nodes that are there")
        self._apply(event)
        return (event,)

    def remove_node(self, node_name: str, *, force: bool, is_connected: bool, now_ns: int) -> CoreStep[NodeRemoval]:
        """Forgets a node, and ends what it holds if forced; raises NotFound and FailedPrecondition."""
        removal = self.preview_node_removal(node_name, force=force, is_connected=is_connected, now_ns=now_ns)
        nodes = frozenset[str]().union(*map(self._apply, removal.events))
        more, touched = self._on_capacity_freed(now_ns) if removal.ended or removal.shrunk else ([], frozenset[str]())
        return CoreStep((*removal.events, *more), removal, (nodes | touched) - {node_name})

    def preview_node_removal(self, node_name: str, *, force: bool, is_connected: bool, now_ns: int) -> NodeRemoval:
        """What `remove_node` would do; raises as it does."""
        record = self._node(node_name)
        return plan_node_removal(self.state, record, force=force, is_connected=is_connected, now_ns=now_ns)

    def forget_lost_nodes(self, expired: Sequence[str], *, now_ns: int) -> CoreStep[tuple[str, ...]]:
        """Forgets those of these nodes that are lost and hold nothing, some at a time; their names."""
        names = select_forgettable_nodes(self.state, expired)
        if not names:
            return CoreStep((), (), frozenset())
        event = NodesRemoved(time_ns=now_ns, node_names=names, reason="lost for longer than is kept")
        self._apply(event)
        return CoreStep((event,), names, frozenset())

    def update_external_usage(self, node_name: str, others: ExternalUsage, *, now_ns: int) -> CoreStep[None]:
        """What others hold on a node from now on; then waiting work is tried, if that leaves it more. Raises NotFound."""
        before = self._node(node_name).others
        if others == before:
            return CoreStep((), None, frozenset())
        event = NodeOccupied(time_ns=now_ns, node_name=node_name, others=others)
        self._apply(event)
        if not len(self.state.pending) or not others.frees_capacity_since(before):
            return CoreStep((event,), None, frozenset())
        return self._with_retry(event, None, frozenset(), now_ns)

    def mark_node_lost(self, node_name: str, *, now_ns: int) -> CoreStep[None]:
        """Places nothing more on a node; what it holds stays. Raises NotFound."""
        if self._node(node_name).state is NodeState.LOST:
            return CoreStep((), None, frozenset())
        event = NodeLost(time_ns=now_ns, node_name=node_name)
        self._apply(event)
        return CoreStep((event,), None, frozenset())

    def mark_gpu_lost(self, node_name: str, gpu_uuid: str, *, now_ns: int) -> CoreStep[None]:
        """Places nothing more on a device; what it holds stays. Raises NotFound."""
        record = self._device(node_name, gpu_uuid)
        if gpu_uuid in record.lost_gpus:
            return CoreStep((), None, frozenset())
        event = GpuLost(time_ns=now_ns, node_name=node_name, gpu_uuid=gpu_uuid)
        self._apply(event)
        # What it drew is left to others.
        binds = self._chooser.allowance.has_budgets
        return self._with_retry(event, None, frozenset(), now_ns) if binds else CoreStep((event,), None, frozenset())

    def mark_gpu_returned(self, node_name: str, gpu_uuid: str, *, now_ns: int) -> CoreStep[None]:
        """Uses a device again; then waiting work is tried. Raises NotFound."""
        if gpu_uuid not in self._device(node_name, gpu_uuid).lost_gpus:
            return CoreStep((), None, frozenset())
        event = GpuReturned(time_ns=now_ns, node_name=node_name, gpu_uuid=gpu_uuid)
        self._apply(event)
        return self._with_retry(event, None, frozenset(), now_ns)

    def _device(self, node_name: str, gpu_uuid: str) -> NodeRecord:
        record = self._node(node_name)
        if record.gpu(gpu_uuid) is None:
            raise NotFound(f"node {node_name} has no GPU {gpu_uuid!r}; its inventory must name it first")
        return record

    def update_policy(self, policy: Policy, *, now_ns: int) -> CoreStep[Policy]:
        """Puts a policy in force; raises Aborted unless it names the revision in force."""
        current, over = self.state.policy, self.state.spending.over
        event = PolicyChanged(time_ns=now_ns, policy=revise_policy(current, policy))
        nodes = self._apply(event)
        is_other = event.policy.budgets != current.budgets or self.state.spending.over != over
        if not is_other or not len(self.state.pending):
            return CoreStep((event,), self.state.policy, nodes)
        return self._with_retry(event, self.state.policy, nodes, now_ns)

    def set_exhausted_spending(self, over: tuple[OverspentLimit, ...], *, now_ns: int) -> CoreStep[None]:
        """These spending limits are spent, and no others; then waiting work is tried, or told what it waits for."""
        before = self.state.spending.over
        if over == before:
            return CoreStep((), None, frozenset())
        event = SpendingJudged(time_ns=now_ns, over=over)
        self._apply(event)
        is_same = {spending_key(one.limit) for one in over} == {spending_key(one.limit) for one in before}
        return CoreStep((event,), None, frozenset()) if is_same else self._with_retry(event, None, frozenset(), now_ns)

    def report_limits(self, highest_w: Mapping[str, float], *, now_ns: int) -> CoreStep[None]:
        """The highest limits that GPUs were read to have, by workload, where above the journal's; no event of its own.

        Watts that come free may let waiting work begin.
        """
        if self._chooser.allowance.report_limits(highest_w) and len(self.state.pending):
            self._retrying.on_capacity_freed()
        return self.retry(now_ns=now_ns)

    def survey_moves(self, asked: RecommendMovesRequest) -> MigrationProblem:
        """What a search for moves needs, copied; the search may take its time elsewhere."""
        return build_migration_problem(self.state, self.snapshot(), asked)

    def apply_moves(self, moves: Sequence[Move], *, now_ns: int, is_back: bool = False) -> CoreStep[int]:
        """Moves running work, or takes moves back, all or nothing; then waiting work is tried. Raises MoveRefused."""
        events = plan_migration(self.state, moves, now_ns=now_ns, is_back=is_back)
        nodes = frozenset[str]().union(*map(self._apply, events))
        more, touched = self._on_capacity_freed(now_ns) if events else ([], frozenset[str]())
        return CoreStep((*events, *more), sum(len(move.replicas) for move in moves), nodes | touched)

    def correct_devices(
        self, node_name: str, held: Mapping[tuple[str, int], tuple[str, ...]], *, now_ns: int
    ) -> CoreStep[None]:
        """Replicas, by workload and number, hold these GPUs of their node; raises NotFound and CorrectionRefused."""
        event = plan_device_correction(self.state, node_name, held, now_ns=now_ns)
        return CoreStep((), None, frozenset()) if event is None else CoreStep((event,), None, self._apply(event))

    def survey_partitions(self) -> PartitionSurvey:
        """What a search for partitions needs, copied; the search may take its time elsewhere."""
        return survey_gpus(self.state)

    def apply_partitions(self, change: PartitionStage | Sequence[SurveyedGpu], *, now_ns: int) -> CoreStep[None]:
        """Wants other layouts and takes services to other slices, all or nothing; raises PartitionsRefused.

        Of GPUs alone: their agents are to try again what is wanted and does not stand.
        """
        event = partition_event(self.state, change, now_ns=now_ns)
        nodes = self._apply(event)
        return self._with_retry(event, None, nodes, now_ns) if event.services else CoreStep((event,), None, nodes)

    def set_eligibility(self, eligibility: Eligibility) -> None:
        """From now on the rules that an engine leaves there decide which nodes will do for the work that they judge."""
        self._chooser.eligibility = eligibility

    def retry_waiting(self, *, now_ns: int) -> CoreStep[None]:
        """What waits is tried again, since an engine's rules may answer otherwise by now."""
        if len(self.state.pending):
            self._retrying.on_capacity_freed()
        return self.retry(now_ns=now_ns)

    def retry(self, *, now_ns: int) -> CoreStep[None]:
        """Goes on with a round of tries that was cut short."""
        events, nodes = self._retry(now_ns) if self.has_backlog else ([], frozenset[str]())
        return CoreStep(tuple(events), None, nodes)

    def _apply(self, event: Event) -> frozenset[str]:
        check_readable(event)
        return self._apply_event(event)

    def _apply_event(self, event: Event) -> frozenset[str]:
        touched = self.state.apply(event)
        self._chooser.refresh(touched)
        return touched

    def _apply_outcome(self, event: WorkloadPlaced | WorkloadDeferred) -> tuple[Event, frozenset[str]]:
        """Applies an outcome; where the ledger refuses the place that the planner found, the workload waits."""
        check_readable(event)
        try:
            return event, self._apply_event(event)
        except ContradictoryEvent:
            # A fault of ours, and nothing has changed: it must not cost anybody else anything.
            waits = WorkloadDeferred(time_ns=event.time_ns, workload_id=event.workload_id, reason=CONTRADICTED_REASON)
            return waits, self._apply_event(waits)

    def _finish_step(
        self,
        events: Sequence[Event],
        workload_id: str,
        now_ns: int,
        *,
        frees: bool = False,
        last: WorkloadPlaced | WorkloadDeferred | None = None,
    ) -> CoreStep[Workload]:
        """Applies events of one workload, and what was decided on it; where they free room, what waits is tried."""
        for event in events if last is None else (*events, last):
            # All before the first: one that may not happen leaves no half of a step behind.
            check_readable(event)
        nodes = frozenset[str]().union(*map(self._apply_event, events))
        if last is not None:
            settled, touched = self._apply_outcome(last)
            events, nodes = (*events, settled), nodes | touched
        result = self.state.workloads[workload_id]
        more, touched = self._on_capacity_freed(now_ns) if frees else ([], frozenset[str]())
        return CoreStep((*events, *more), result, nodes | touched)

    def _with_retry(self, event: Event, result: _Result, nodes: frozenset[str], now_ns: int) -> CoreStep[_Result]:
        events, more = self._on_capacity_freed(now_ns)
        return CoreStep((event, *events), result, nodes | more)

    def _on_capacity_freed(self, now_ns: int) -> tuple[list[Event], frozenset[str]]:
        self._retrying.on_capacity_freed()
        return self._retry(now_ns)

    def _retry(self, now_ns: int) -> tuple[list[Event], frozenset[str]]:
        return self._retrying.retry_step(self._apply, self._apply_outcome, self._quote_if_due, now_ns)
