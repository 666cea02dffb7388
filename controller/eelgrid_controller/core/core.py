"""The core: turns every call and every message of the cluster into events and applies them at once.

Owns the ClusterState, the order of one step (validate, decide, apply) and the plan of each node, which is derived
from its allocations and the policy. Must not know of journals, sockets or clocks: `now_ns` is an argument, and the
events are returned to the caller, who makes them durable before anybody sees the result.

Theory: each method returns a `CoreStep` whose events are already applied. Replaying them on the state before gives
the state after; the same calls to a new core give the same events. Pending work is tried when capacity appears, the
highest priority first, up to a bound for each step; `retry` continues from there. With queues, their quotas and
fair share decide with the placement, on the same state. Plan epochs belong to the state:
they rise in `ClusterState.apply`. A replica in a MIG slice enters a plan only when its slice exists, with the device
to open.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from eelgrid_controller.core.attempt_reports import AttemptReports
from eelgrid_controller.core.backfill import BackfillPlanner
from eelgrid_controller.core.capacity_holds import CapacityHolds
from eelgrid_controller.core.drains import LOST_GPU_GRACE_S, DrainRounds, find_node, preview_drain, resolve_gpus
from eelgrid_controller.core.elastic_deadlines import ElasticDeadlines
from eelgrid_controller.core.elastic_returns import ElasticReturns
from eelgrid_controller.core.expected_starts import StartEstimator
from eelgrid_controller.core.gang_starts import GangStarts, check_gang
from eelgrid_controller.core.job_arrays import ArrayPlanner, ElementChange
from eelgrid_controller.core.job_control import (
    ON_SUBMISSION,
    JobControl,
    begin_workload,
    check_dependencies,
    make_waiting,
    plan_cancel,
    plan_cancelled_submission,
    plan_hold,
    plan_release,
    plan_requeue,
)
from eelgrid_controller.core.node_plans import build_node_plan
from eelgrid_controller.core.nodes import (
    NodeRemoval,
    PlanClaim,
    check_plan_epoch,
    may_be_old,
    plan_controller_start,
    plan_device_correction,
    plan_device_renaming,
    plan_node_removal,
    plan_reconciliation,
    plan_registration,
    plan_room_for_node,
    plan_starts_resumption,
    plan_unreported_usage,
    select_forgettable_nodes,
)
from eelgrid_controller.core.preemptions import Preemptions, PreemptionStep, resolve_priority_class
from eelgrid_controller.core.quarantine import Quarantine
from eelgrid_controller.core.retry_rounds import RetryRounds
from eelgrid_controller.core.start_decision import StartDecider
from eelgrid_controller.core.steps import CoreStep
from eelgrid_controller.core.takeover import Takeover
from eelgrid_controller.core.workloads import (
    check_feasibility,
    check_live_room,
    find_existing_workload,
    get_workload,
    get_workload_or_array,
    plan_adoption,
    plan_measurements,
    plan_migration,
    plan_scaling,
    resolve_models,
    validate_spec,
)
from eelgrid_controller.errors import LostEntries
from eelgrid_controller.partition.recommendation import PartitionStage, partition_event
from eelgrid_controller.partition.survey import PartitionSurvey, SurveyedGpu, survey_gpus
from eelgrid_controller.placement.explanations import explain_workload, make_outcome_event
from eelgrid_controller.placement.migration_survey import MigrationSurvey, survey_for_moves
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.placement.snapshot import Snapshot
from eelgrid_controller.queueing.admission import QueueIndex
from eelgrid_controller.queueing.checkpoint_interval import CheckpointAdvisor
from eelgrid_controller.queueing.job_conditions import JobConditionIndex
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.cordons import DrainTerms, OperatorCordon
from eelgrid_controller.state.engine_reports import UNREPORTED_USAGE, Adoption, Eligibility, ExternalUsage
from eelgrid_controller.state.events import (
    Event,
    GpuLost,
    GpuReturned,
    NodeCordoned,
    NodeLost,
    NodeOccupied,
    NodesRemoved,
    NodeUncordoned,
    PolicyChanged,
    SpendingJudged,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadDeferred,
    WorkloadEvicted,
    WorkloadLimited,
    WorkloadPlaced,
    WorkloadRetried,
    check_readable,
)
from eelgrid_controller.state.measurement_events import PointsMeasured
from eelgrid_controller.state.measurements import MeasuredStart
from eelgrid_controller.state.node_allocations import ContradictoryEvent, NodeRecord, is_sliced
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_controller.state.policy import changes_starts, revise_policy
from eelgrid_controller.state.spending import OverspentLimit, spending_key
from eelgrid_controller.state.takeover_events import NodeHeard, PlansWithdrawn
from eelgrid_kernels.node_cost import cluster_power
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument, NotFound
from eelgrid_protos.messages import (
    AttemptStatus,
    DrainedWorkload,
    Explanation,
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

_Result = TypeVar("_Result")

LIVE_WORKLOADS_MOST = 1_000_000
NODES_MOST = 100_000


class Core:
    """Decides every change of one cluster state; synchronous, deterministic and bounded in time."""

    def __init__(
        self,
        state: ClusterState,
        catalogue: Catalogue,
        *,
        live_most: int = LIVE_WORKLOADS_MOST,
        nodes_most: int = NODES_MOST,
        joins_closed: bool = False,
        joins_doubted: bool = False,
        lost_gpu_grace_s: float | None = LOST_GPU_GRACE_S,
        quarantines: bool = True,
    ) -> None:
        """Creates a core; nodes that `joins_closed` wait for an engine's report, those `joins_doubted` for their agents."""
        self.state = state
        self._nodes_most, self._live_most = nodes_most, live_most
        self._joins_closed, self._joins_doubted = joins_closed, joins_doubted
        self._chooser = WorkloadPlacer(state, catalogue)
        # Parks what may not start, before the queues read what waits.
        self._conditions = JobConditionIndex(state)
        self.queues = QueueIndex(state)
        self.checkpoints = CheckpointAdvisor(state)
        self._backfill = BackfillPlanner(state, self._chooser, self.queues)
        self._preemptions = Preemptions(state, self._chooser, self.queues, self._backfill)
        self.list_evictions = self._preemptions.list_evictions
        observers = self._preemptions.record_checkpoint, self.checkpoints.record
        self._reports = AttemptReports(state, Quarantine(state, is_on=quarantines), observers)
        self.list_interference = self._reports.interference.list_measured
        self._takeover = Takeover(state, self._reports)
        self._holds = CapacityHolds(state, self._chooser, self.queues, self._backfill)
        self._starts = StartDecider(state, self._chooser, self.queues, self._backfill, self._holds)
        self._elastic = ElasticDeadlines(state, self._chooser, self._backfill, self._starts)
        self._preemptions.returns = ElasticReturns(
            state, self._chooser, self.queues, self._backfill, holds=self._holds, find_floor=self._elastic.find_floor
        )
        self._jobs = JobControl(state, self.queues, self._conditions)
        self._estimator = StartEstimator(state, self._backfill)
        self._arrays = ArrayPlanner(
            state,
            self._chooser,
            self.queues,
            self._jobs,
            self._starts,
            backfill=self._backfill,
            estimator=self._estimator,
        )
        self._gangs = GangStarts(state, self._chooser, self.queues, self._backfill, self._holds)
        self._retrying = RetryRounds(
            state, self._chooser, self.queues, self._backfill, self._preemptions, holds=self._holds, gangs=self._gangs
        )
        self._drains = DrainRounds(state, self._chooser, self._reports, lost_gpu_grace_s=lost_gpu_grace_s)

    @property
    def has_backlog(self) -> bool:
        """Whether a round, a preemption or changed conditions of pending work are unfinished; `retry` continues them."""
        return self._retrying.is_due or self._preemptions.is_ready or self._conditions.has_due

    def snapshot(self) -> Snapshot:
        """Returns the cluster as arrays, read-only, valid until the next step."""
        return self._chooser.snapshot()

    def modelled_power_w(self) -> float:
        """Computes the modelled power of the whole cluster, in watts; lost nodes count, since their work may still run."""
        return float(cluster_power(self.snapshot().nodes))

    def workload(self, workload_id: str) -> Workload:
        """Returns one workload; raises NotFound, and FailedPrecondition for an array, whose elements are workloads."""
        return get_workload(self.state, workload_id)

    def workload_or_array(self, workload_id: str) -> Workload:
        """Returns one workload, or an array as a whole; raises NotFound."""
        return get_workload_or_array(self.state, workload_id)

    def _node(self, node_name: str) -> NodeRecord:
        record = self.state.nodes.get(node_name)
        if record is None:
            raise NotFound(f"no node is called {node_name!r}; list nodes to see the names")
        return record

    def explain_workload(self, workload_id: str) -> Explanation:
        """Explains the placement of a workload, or of the element of an array that is next; raises NotFound."""
        workload_id = self.state.arrays.pick_element(workload_id, self.state.workloads)
        workload = self.workload(workload_id)
        unmet = self._conditions.find_unmet(workload, 0) if self.state.pending.is_parked(workload_id) else None
        gang, now_ns = self._gangs.find_bound(workload), self._conditions.latest_ns
        if gang is not None and unmet is None and workload_id in self.state.pending:
            return self._gangs.explain(workload, gang, now_ns)
        found = explain_workload(self.state, workload_id, self._chooser, self.queues, unmet, now_ns=now_ns)
        problem = "" if unmet is not None else self._preemptions.describe_cost(workload)
        return replace(found, remedy=f"{found.remedy} {problem}".lstrip()) if problem else found

    def node_plan(self, node_name: str) -> NodePlan:
        """Returns the plan of a node: everything that it should hold; raises NotFound."""
        return build_node_plan(self._node(node_name), self.state)

    def plan_to_send(self, node_name: str) -> NodePlan | None:
        """Returns the plan to send to the node; None while it could end, or start again, what lost entries have started."""
        record = self._node(node_name)
        may_end = record.ahead is not None or not record.is_reported
        return None if may_end or self._takeover.blocks_plan(node_name) else self.node_plan(node_name)

    def submit(self, request: SubmitWorkloadRequest, *, now_ns: int, owner: str = "") -> CoreStep[Workload]:
        """Accepts a workload, or an array of them, and places it or lets it wait; repeating it with its id changes nothing."""
        begun = plan_cancelled_submission(self.state, request, owner, now_ns=now_ns) if request.cancelled else None
        if begun is not None:
            nodes, ended = self._apply_all(begun), self.cancel(request.workload_id, now_ns=now_ns, reason=ON_SUBMISSION)
            return replace(ended, events=(*begun, *ended.events), nodes=nodes | ended.nodes)
        if request.array is not None:
            return self._submit_array(request, owner, now_ns)
        request = resolve_priority_class(self.state, resolve_models(self.state, self.snapshot, request))
        spec = request.spec
        before = find_existing_workload(self.state, request)
        if before is not None:
            return CoreStep((), before, frozenset())
        validate_spec(spec)
        if self.queues.is_active:
            spec = self.queues.check_submission(spec, owner, self._starts.list_models)
        check_dependencies(self.state, spec)
        check_live_room(self.state, 1, self._live_most)
        # Numbers only rise, past every generated id that was ever used.
        key = request.workload_id or f"w-{self.state.next_number}"
        waiting = make_waiting(key, spec, owner, is_held=request.hold, now_ns=now_ns)
        check_gang(self.state, waiting)
        early = self._jobs.find_reason(waiting, now_ns)
        if is_sliced(waiting):
            return self._submit_sliced(
                waiting, early or PendingConstraint.PARTITIONS.describe(), now_ns, dry_run=request.dry_run
            )
        known = None if early else self._starts.find_refusal(waiting)
        quoted = self._starts.quote_for_submission(spec, now_ns)
        waiting = self._elastic.choose_share(waiting, early, quoted, now_ns)
        spec = waiting.spec
        decision = known or self._starts.decide_submission(waiting, early, quoted, now_ns)
        if not (decision.placements or known):
            check_feasibility(self.state, self._chooser, spec)
        promised = self._backfill.admit_deadline(waiting, decision, now_ns)
        if request.dry_run:
            return CoreStep((), self._estimator.preview(waiting, decision, promised, now_ns), frozenset())
        outcome = make_outcome_event(key, spec.request, decision, now_ns)
        begun, frees = (*quoted, *begin_workload(waiting), *promised), len(promised) > 1
        step = self._finish_step(begun, key, now_ns, frees=frees, last=outcome)
        if early or frees or decision.hold is not None or key not in self.state.pending:
            return replace(step, result=self.state.workloads[key])
        more = self._preemptions.try_start(step.result, self._apply, self._apply_outcome, now_ns)
        if more.needs_round or not decision.is_blocked:
            return self._join_preemption(step, more)
        first = self._backfill.reserve_first(step.result, now_ns)
        self._apply_all(first)
        self._starts.note_refusal(waiting, decision)
        return replace(step, events=(*step.events, *first), result=self.state.workloads[key])

    def _submit_array(self, request: SubmitWorkloadRequest, owner: str, now_ns: int) -> CoreStep[Workload]:
        event = self._arrays.plan_submission(request, owner=owner, live_most=self._live_most, now_ns=now_ns)
        promised = () if event is None else self._arrays.admit_deadline(event, now_ns)
        if event is None or request.dry_run:
            return CoreStep((), self._arrays.preview(request, event, now_ns), frozenset())
        return self._finish_step((event, *promised), event.array_id, now_ns, frees=True)

    def change_elements(
        self, change: ElementChange, workload_ids: Iterable[str], word: str = "", *, held_by: str = "", now_ns: int
    ) -> CoreStep[int]:
        """Changes elements of arrays, with the user or queue that this is about; returns how many. Raises PermissionDenied."""
        events = [one for key in workload_ids for one in self._arrays.plan_change(change, key, word, now_ns, held_by)]
        return self._with_retry(events, len(events), self._apply_all(events), now_ns, frees=bool(events))

    def adopt(self, request: SubmitWorkloadRequest, adoption: Adoption, *, now_ns: int) -> CoreStep[Workload]:
        """Adopts work that an engine reports as running (admission.py); idempotent. Raises AdoptionRefused."""
        if request.workload_id not in self.state.workloads:
            check_live_room(self.state, 1, self._live_most)
        with suppress(InvalidArgument):  # it runs, whatever GPU it names
            request = resolve_models(self.state, self.snapshot, request)
        request = replace(request, spec=self.queues.qualify(request.spec))
        events = plan_adoption(self.state, request, adoption, now_ns=now_ns)
        frees = bool(events) and adoption.frees_capacity(request.spec.request)
        return self._finish_step(events, request.workload_id, now_ns, frees=frees)

    def _submit_sliced(self, workload: Workload, reason: str, now_ns: int, *, dry_run: bool) -> CoreStep[Workload]:
        """Accepts a workload that waits for the partition planner, or before that for what keeps it from starting."""
        if dry_run:
            return CoreStep((), replace(workload, reason=reason), frozenset())
        key = workload.workload_id
        deferred = WorkloadDeferred(time_ns=now_ns, workload_id=key, reason=reason)
        return self._finish_step((*begin_workload(workload), deferred), key, now_ns)

    def cancel(
        self, workload_id: str, *, now_ns: int, reason: str = "", is_immediate: bool = False
    ) -> CoreStep[Workload]:
        """Cancels a workload, for its owner or for an engine's reason; idempotent. Raises NotFound.

        Processes are told to end, and hold their devices until they have; on a copy, `is_immediate` frees these now.
        """
        workload = self.workload(workload_id)
        event = plan_cancel(workload, reason, now_ns=now_ns, is_immediate=is_immediate)
        if not isinstance(event, WorkloadCancelled):
            return self._finish_step(() if event is None else (event,), workload_id, now_ns)
        nodes = self._apply(event)
        # The ended workload may be gone already, if the number of ended workloads that are kept is 0.
        fallback = replace(workload, phase=WorkloadPhase.CANCELLED, reason=reason, ended_ns=now_ns)
        ended = self.state.workloads.get(workload_id, fallback)
        return self._with_retry((event,), ended, nodes, now_ns, frees=bool(workload.placements or workload.promise))

    def record_attempts(
        self, node_name: str | None, statuses: Sequence[AttemptStatus], *, now_ns: int, more_follow: bool = False
    ) -> CoreStep[int]:
        """Records what the agent of a node, or with None an engine, reports; returns how many are about earlier attempts.

        The end of the last process of a workload ends the workload, or lets it wait for another attempt; then pending work
        is tried, unless `more_follow`: an engine that has begun other work there adopts that first, and then has it tried.
        """
        events, nodes, stale = self._reports.record(node_name, statuses, self._apply, now_ns)
        if events and node_name is not None:
            taken, touched = self._takeover.take_over(node_name, self._apply, now_ns)
            events, nodes = [*events, *taken], nodes | touched
        frees = any(isinstance(event, WorkloadCompleted | WorkloadRetried | WorkloadEvicted) for event in events)
        frees = (frees or self._preemptions.is_ready) and not more_follow
        return self._with_retry(events, stale, nodes, now_ns, frees=frees)

    def refuse_preemption(self, workload_id: str, reason: str, *, again_s: float, now_ns: int) -> CoreStep[None]:
        """Lets a victim run on that its engine does not stop; then pending work is tried. `again_s` as for `refuse`."""
        step = self._preemptions.refuse(workload_id, reason, self._apply, now_ns, again_s=again_s)
        return self._with_retry(step.events, None, step.nodes, now_ns, frees=bool(step.events))

    def scale(self, workload_id: str, replicas: int, *, now_ns: int) -> CoreStep[Workload]:
        """Scales a running workload to a number of replicas, or as close as capacity and queues allow (core.workloads)."""
        workload, quoted = self.workload(workload_id), self._starts.quote_prices(now_ns)

        def decided(spec: WorkloadSpec) -> PlacementDecision:
            return self._starts.decide_growth(workload, spec, quoted, now_ns)

        floor = self._elastic.find_floor(workload, now_ns)
        event = plan_scaling(self.state, self.snapshot(), workload, replicas, decided, floor=floor, now_ns=now_ns)
        step: CoreStep[Workload] = CoreStep((), workload, frozenset())
        if event is not None:
            events: tuple[Event, ...] = (*quoted, event) if event.placements else (event,)
            step = self._finish_step(events, workload_id, now_ns, frees=bool(event.released))
        more = self._preemptions.try_growth(step.result, replicas, self._apply, now_ns)
        return self._join_preemption(step, more)

    def record_progress(self, workload_id: str, work_done: float, *, at_ns: int, now_ns: int) -> CoreStep[None]:
        """Records how much a job with an elastic deadline had done at a time; one that would be late grows. Raises NotFound."""
        workload, quoted = self.workload(workload_id), self._starts.quote_prices(now_ns)
        events = self._elastic.record_progress(workload, work_done, quoted, at_ns=at_ns, now_ns=now_ns)
        return self._with_retry(events, None, self._apply_all(events), now_ns, frees=bool(events))

    def move_to_queue(self, workload_id: str, queue: str, *, now_ns: int) -> CoreStep[Workload]:
        """Moves a pending workload to another queue, where it keeps its time of submission; then it is tried.

        Raises NotFound, InvalidArgument for an unknown queue, PermissionDenied, and FailedPrecondition if it does not wait.
        """
        events = self._starts.plan_queue_change(self.workload(workload_id), queue, now_ns)
        return self._finish_step(events, workload_id, now_ns, frees=bool(events))

    def hold(self, workload_id: str, *, user: str = "", now_ns: int) -> CoreStep[Workload]:
        """Keeps pending work from starting until it is released; idempotent. Raises NotFound and FailedPrecondition."""
        workload = self.workload(workload_id)
        events = plan_hold(workload, user, now_ns=now_ns)
        return self._finish_step(events, workload_id, now_ns, frees=bool(events) and workload.promise is not None)

    def release(self, workload_id: str, *, now_ns: int) -> CoreStep[Workload]:
        """Lets held work start again, and tries it; idempotent. Raises NotFound."""
        return self._finish_step(plan_release(self.workload(workload_id), now_ns=now_ns), workload_id, now_ns)

    def requeue(self, workload_id: str, cause: str = "", *, held_by: str = "", now_ns: int) -> CoreStep[Workload]:
        """Stops a running job, which then waits again; idempotent. Raises NotFound and FailedPrecondition."""
        return self._finish_step(plan_requeue(self.workload(workload_id), cause, now_ns, held_by), workload_id, now_ns)

    def set_limit(self, workload_id: str, power_limit_w: float | None, *, now_ns: int) -> CoreStep[Workload]:
        """Sets the power limit of each GPU of a running workload, None for the default; raises FailedPrecondition."""
        workload = self.workload(workload_id)
        if workload.power_limit_w == power_limit_w:
            return CoreStep((), workload, frozenset())
        whole = workload.spec.request.gpu_milli == GPU_MILLI_WHOLE and not is_sliced(workload)
        if workload.phase is not WorkloadPhase.PLACED or not whole:
            raise FailedPrecondition(
                f"workload {workload_id} does not run on whole GPUs; a power limit is of a GPU, so place it on whole ones"
            )
        event = WorkloadLimited(time_ns=now_ns, workload_id=workload_id, power_limit_w=power_limit_w)
        # Lowered or raised: until the new limit is read back from the GPUs, the previous one may be in force.
        self._chooser.allowance.record_lowered_limit(workload_id, workload.power_limit_w)
        return self._finish_step((event,), workload_id, now_ns)

    def record_measurements(
        self, points: Sequence[MeasuredPoint], starts: Sequence[MeasuredStart] = (), *, now_ns: int
    ) -> CoreStep[int]:
        """Stores measured points, and starts of live services; returns how many are new or changed. Raises ResourceExhausted."""
        events = plan_measurements(self.state, points, starts, now_ns=now_ns)
        count = sum(len(one.points if isinstance(one, PointsMeasured) else one.starts) for one in events)
        return CoreStep(events, count, self._apply_all(events))

    def register_node(
        self, inventory: Inventory, *, now_ns: int, plan_epoch: int = 0, claim: PlanClaim | None = None
    ) -> CoreStep[None]:
        """Registers a node that is new, changed or back; then pending work is tried again.

        Later plans have epochs above `plan_epoch`, which its agent holds; raises InvalidArgument for one that no
        controller can have sent. `claim` is what it holds under that plan, if that must be compared with the journal; of
        a doubted node it is compared when its agent has answered Welcome (`confirm_claim`).
        """
        name = inventory.node_name
        check_plan_epoch(self.state, name, plan_epoch)
        record = self.state.nodes.get(name)
        before = None if record is None else record.inventory
        gone = plan_room_for_node(self.state, self._nodes_most, now_ns=now_ns) if record is None else ()
        self._apply_all(gone)
        joins, compared = plan_registration(
            self.state, inventory, plan_epoch, claim, is_doubted=self._joins_doubted, now_ns=now_ns
        )
        nodes = frozenset((name,)) | self._apply_all(joins)
        if joins and before is not None:
            joins += plan_device_renaming(self.state, self.state.nodes[name], before, now_ns=now_ns)
        elif joins and self._joins_closed:
            joins += (NodeOccupied(time_ns=now_ns, node_name=name, others=UNREPORTED_USAGE),)
        nodes |= self._apply_all((*joins[1:], *compared))
        return self._finish_registration((*gone, *joins, *compared), nodes, now_ns)

    def confirm_claim(self, node_name: str, claim: PlanClaim, *, now_ns: int) -> CoreStep[None]:
        """Compares what an agent that has answered Welcome holds with the journal; then pending work is tried."""
        events: tuple[Event, ...] = ()
        nodes = frozenset[str]()
        if may_be_old(self.state.nodes.get(node_name), claim):
            events, nodes = self._takeover.compare_claim(node_name, claim, self._apply, now_ns)
        return self._finish_registration(events, nodes, now_ns)

    def _finish_registration(self, events: tuple[Event, ...], nodes: frozenset[str], now_ns: int) -> CoreStep[None]:
        if all(isinstance(event, NodeHeard) for event in events):
            # After a start every agent comes: pending work is tried in later steps, so that each is answered at once.
            if events:
                self._retrying.on_capacity_freed()
            return CoreStep(events, None, frozenset())
        return self._with_retry(events, None, nodes, now_ns)

    def expect_reports(self, *, now_ns: int) -> CoreStep[None]:
        """Blocks placement on every node until its engine has reported again what runs there."""
        events = plan_unreported_usage(self.state, now_ns=now_ns)
        return CoreStep(events, None, self._apply_all(events))

    def reconcile_node(self, node_name: str, *, now_ns: int) -> CoreStep[NodeRecord]:
        """Releases what a node holds beyond the journal: its next plan omits it; raises FailedPrecondition if doubted."""
        record = self._node(node_name)
        if record.ahead is None:
            return CoreStep((), record, frozenset())
        event = plan_reconciliation(record, now_ns=now_ns)
        return self._with_retry((event,), record, self._apply(event), now_ns)

    def record_controller_start(
        self, *, now_ns: int, lost: LostEntries | None = None, timeline: int = 0, asks_agents: bool = True
    ) -> CoreStep[None]:
        """Records the start of a controller, on a timeline of its database; an operator accepted that `lost` are gone."""
        events = plan_controller_start(self.state, lost, timeline=timeline, asks_agents=asks_agents, now_ns=now_ns)
        self._apply_all(events)
        return CoreStep(events, None, frozenset())

    def resume_starts(self, *, now_ns: int, awaits_agents: bool = True) -> CoreStep[None]:
        """Lets pending work start again, which was withheld, if every agent of a ready node was heard; on a copy, anyway."""
        resumed = plan_starts_resumption(self.state, awaits_agents=awaits_agents, now_ns=now_ns)
        if not resumed:
            return CoreStep((), None, frozenset())
        events, nodes = self._takeover.settle(self._apply, now_ns)
        nodes |= self._apply_all(resumed)
        return self._with_retry((*events, *resumed), None, nodes, now_ns, frees=True)

    def withdraw_plans(self, plan_epoch: int, *, now_ns: int) -> CoreStep[None]:
        """Gives later plans higher epochs than this one, the highest of a write that may have been stored; see WithdrawnPlans."""
        event = PlansWithdrawn(time_ns=now_ns, plan_epoch=plan_epoch)
        return CoreStep((event,), None, self._apply(event))

    def remove_node(self, node_name: str, *, force: bool, is_connected: bool, now_ns: int) -> CoreStep[NodeRemoval]:
        """Removes a node, and ends the work on it if forced; raises NotFound and FailedPrecondition."""
        removal = self.preview_node_removal(node_name, force=force, is_connected=is_connected, now_ns=now_ns)
        nodes = self._apply_all(removal.events)
        frees = bool(removal.ended or removal.shrunk)
        step = self._with_retry(removal.events, removal, nodes, now_ns, frees=frees)
        return replace(step, nodes=step.nodes - {node_name})

    def preview_node_removal(self, node_name: str, *, force: bool, is_connected: bool, now_ns: int) -> NodeRemoval:
        """Returns what `remove_node` would do; raises what it raises."""
        record = self._node(node_name)
        return plan_node_removal(self.state, record, force=force, is_connected=is_connected, now_ns=now_ns)

    def cordon_node(
        self,
        node_name: str,
        gpus: tuple[str, ...] = (),
        *,
        reason: str = "",
        user: str = "",
        drain: DrainTerms | None = None,
        now_ns: int,
    ) -> CoreStep[NodeRecord]:
        """Closes a node, or GPUs of it by index or UUID, to new work; with `drain` they are emptied. Raises NotFound."""
        record = find_node(self.state, node_name)
        uuids = resolve_gpus(record, gpus)
        return self.apply_cordon(
            NodeCordoned(time_ns=now_ns, node_name=node_name, gpu_uuids=uuids, reason=reason, user=user, drain=drain)
        )

    def uncordon_node(
        self, node_name: str, gpus: tuple[str, ...] = (), *, user: str = "", now_ns: int
    ) -> CoreStep[NodeRecord]:
        """Opens a node, or GPUs of it, that an operator cordoned; then pending work is tried. Raises NotFound."""
        record = find_node(self.state, node_name)
        uuids = resolve_gpus(record, gpus)
        cordoned = tuple(uuid for uuid in uuids if uuid in record.gpu_cordons)
        if not (cordoned if uuids else record.cordon):
            return CoreStep((), record, frozenset())
        return self.apply_cordon(NodeUncordoned(time_ns=now_ns, node_name=node_name, gpu_uuids=cordoned, user=user))

    def apply_cordon(self, event: NodeCordoned | NodeUncordoned) -> CoreStep[NodeRecord]:
        """Applies an operator's cordon, or lifts it."""
        self._apply(event)
        frees = isinstance(event, NodeUncordoned) and len(self.state.pending) > 0
        record = self.state.nodes[event.node_name]
        return self._with_retry((event,), record, frozenset(), event.time_ns, frees=frees)

    def preview_drain(
        self, node_name: str, gpus: tuple[str, ...], drain: DrainTerms, *, now_ns: int
    ) -> tuple[DrainedWorkload, ...]:
        """Returns what a drain would do with the work there; raises NotFound."""
        return preview_drain(self.state, self._chooser, node_name, gpus, OperatorCordon(since_ns=now_ns, drain=drain))

    def is_drain_due(self, now_ns: int) -> bool:
        """Returns whether work may leave drained nodes, or be preempted, now that could not before."""
        return self._drains.is_due(now_ns) or self._preemptions.is_due(now_ns)

    def continue_drains(self, *, now_ns: int) -> CoreStep[None]:
        """Moves or evicts work from drained nodes, a bounded number per step; then pending work is tried."""
        if self._preemptions.is_due(now_ns):
            self._preemptions.begin_due()
            return self.retry_waiting(now_ns=now_ns)
        if not self._drains.is_due(now_ns):
            return CoreStep((), None, frozenset())
        events, nodes = self._drains.step(self._apply, now_ns)
        return self._with_retry(events, None, nodes, now_ns, frees=bool(events))

    def forget_lost_nodes(self, expired: Sequence[str], *, now_ns: int) -> CoreStep[tuple[str, ...]]:
        """Removes expired nodes that are lost and empty, a bounded number per step; returns their names."""
        names = select_forgettable_nodes(self.state, expired)
        if not names:
            return CoreStep((), (), frozenset())
        event = NodesRemoved(time_ns=now_ns, node_names=names, reason="lost for longer than is kept")
        self._apply(event)
        return CoreStep((event,), names, frozenset())

    def update_external_usage(self, node_name: str, others: ExternalUsage, *, now_ns: int) -> CoreStep[None]:
        """Sets the external usage of a node; if that frees capacity, pending work is tried. Raises NotFound."""
        before = self._node(node_name).others
        if others == before:
            return CoreStep((), None, frozenset())
        event = NodeOccupied(time_ns=now_ns, node_name=node_name, others=others)
        self._apply(event)
        frees = len(self.state.pending) > 0 and others.frees_capacity_since(before)
        return self._with_retry((event,), None, frozenset(), now_ns, frees=frees)

    def mark_node_lost(self, node_name: str, *, now_ns: int) -> CoreStep[None]:
        """Marks a node as lost: it gets no new work and keeps what it holds. Raises NotFound."""
        if self._node(node_name).state is NodeState.LOST:
            return CoreStep((), None, frozenset())
        event = NodeLost(time_ns=now_ns, node_name=node_name)
        self._apply(event)
        return self._with_retry((event,), None, frozenset(), now_ns, frees=False)

    def mark_gpu_lost(self, node_name: str, gpu_uuid: str, *, now_ns: int) -> CoreStep[None]:
        """Marks a device as lost: it gets no new work and keeps what it holds. Raises NotFound."""
        record = self._device(node_name, gpu_uuid)
        if gpu_uuid in record.lost_gpus:
            return CoreStep((), None, frozenset())
        event = GpuLost(time_ns=now_ns, node_name=node_name, gpu_uuid=gpu_uuid)
        self._apply(event)
        # The watts of a lost device become available to others.
        return self._with_retry((event,), None, frozenset(), now_ns, frees=self._chooser.allowance.has_budgets)

    def mark_gpu_returned(self, node_name: str, gpu_uuid: str, *, now_ns: int) -> CoreStep[None]:
        """Returns a device to use; then pending work is tried. Raises NotFound."""
        if gpu_uuid not in self._device(node_name, gpu_uuid).lost_gpus:
            return CoreStep((), None, frozenset())
        event = GpuReturned(time_ns=now_ns, node_name=node_name, gpu_uuid=gpu_uuid)
        self._apply(event)
        return self._with_retry((event,), None, frozenset(), now_ns)

    def _device(self, node_name: str, gpu_uuid: str) -> NodeRecord:
        record = self._node(node_name)
        if record.gpu(gpu_uuid) is None:
            raise NotFound(f"node {node_name} has no GPU {gpu_uuid!r}; its inventory must name it first")
        return record

    def update_policy(self, policy: Policy, *, now_ns: int) -> CoreStep[Policy]:
        """Puts a policy in force; raises Aborted unless it names the current revision."""
        current, over = self.state.policy, self.state.spending.over
        policy = self._backfill.choose_reserved_nodes(policy, now_ns)
        event = PolicyChanged(time_ns=now_ns, policy=revise_policy(current, policy))
        nodes = self._apply(event)
        is_other = self.state.spending.over != over or changes_starts(current, event.policy)
        frees = is_other and len(self.state.pending) > 0
        return self._with_retry((event,), self.state.policy, nodes, now_ns, frees=frees)

    def set_exhausted_spending(self, over: tuple[OverspentLimit, ...], *, now_ns: int) -> CoreStep[None]:
        """Sets which spending limits are exceeded; then pending work is tried, or gets its new reason."""
        before = self.state.spending.over
        if over == before:
            return CoreStep((), None, frozenset())
        event = SpendingJudged(time_ns=now_ns, over=over)
        self._apply(event)
        is_same = {spending_key(one.limit) for one in over} == {spending_key(one.limit) for one in before}
        return self._with_retry((event,), None, frozenset(), now_ns, frees=not is_same)

    def report_limits(self, highest_w: Mapping[str, float], *, now_ns: int) -> CoreStep[None]:
        """Sets the highest power limits read back from GPUs, by workload, where above the journal's; makes no event.

        Watts that become available may let pending work start.
        """
        freed = self._chooser.allowance.report_limits(highest_w)
        return self.retry_waiting(now_ns=now_ns) if freed else self.retry(now_ns=now_ns)

    def survey_moves(self, asked: RecommendMovesRequest) -> MigrationSurvey:
        """Copies what a search for moves needs; the problem is built and searched in another thread."""
        return survey_for_moves(self.state, self._chooser, asked, self._conditions.latest_ns)

    def work_ahead(self) -> bool:
        """Does a bounded part of the next decisions' work between calls; false if nothing is left. It changes none."""
        return self._chooser.work_ahead()

    def apply_moves(self, moves: Sequence[Move], *, now_ns: int, is_back: bool = False) -> CoreStep[int]:
        """Moves running work, or undoes moves, all or nothing; then pending work is tried. Raises MoveRefused."""
        events = plan_migration(self.state, self._chooser.allowance, moves, now_ns=now_ns, is_back=is_back)
        moved = sum(len(move.replicas) for move in moves)
        return self._with_retry(events, moved, self._apply_all(events), now_ns, frees=bool(events))

    def correct_devices(
        self, node_name: str, held: Mapping[tuple[str, int], tuple[str, ...]], *, now_ns: int
    ) -> CoreStep[None]:
        """Records which GPUs replicas hold on a node, by workload and number; raises NotFound and CorrectionRefused."""
        event = plan_device_correction(self.state, self._node(node_name), held, now_ns=now_ns)
        return CoreStep((), None, frozenset()) if event is None else CoreStep((event,), None, self._apply(event))

    def survey_partitions(self) -> PartitionSurvey:
        """Copies what a search for partitions needs; the search may run in another thread."""
        return survey_gpus(self.state)

    def apply_partitions(self, change: PartitionStage | Sequence[SurveyedGpu], *, now_ns: int) -> CoreStep[None]:
        """Changes MIG layouts and moves services to other slices, all or nothing; raises PartitionsRefused.

        If `change` is GPUs alone, their agents try desired layouts again that were not applied.
        """
        event = partition_event(self.state, self._chooser.allowance, change, now_ns=now_ns)
        return self._with_retry((event,), None, self._apply(event), now_ns, frees=bool(event.services))

    def set_eligibility(self, eligibility: Eligibility) -> None:
        """Uses the eligibility rules of an engine from now on, for the work that they cover."""
        self._chooser.eligibility = eligibility

    def is_round_due(self, now_ns: int) -> bool:
        """Returns whether pending work must be tried again because time has passed; `retry_waiting` does so."""
        return self._backfill.is_round_due(now_ns) or self._conditions.is_due(now_ns) or self._holds.is_due(now_ns)

    def retry_waiting(self, *, now_ns: int) -> CoreStep[None]:
        """Tries pending work again, since the rules of an engine may have changed."""
        if len(self.state.pending) or self._backfill.deadlines.is_due(now_ns):
            self._retrying.on_capacity_freed()
        return self.retry(now_ns=now_ns)

    def retry(self, *, now_ns: int) -> CoreStep[None]:
        """Continues an unfinished round over the pending work."""
        is_due = self._retrying.is_due or self._preemptions.is_ready
        return self._with_retry((), None, frozenset(), now_ns, frees=is_due, is_new=False)

    def _apply(self, event: Event) -> frozenset[str]:
        check_readable(event)
        return self._apply_event(event)

    def _apply_all(self, events: Iterable[Event]) -> frozenset[str]:
        return frozenset[str]().union(*map(self._apply, events))

    def _apply_event(self, event: Event) -> frozenset[str]:
        touched = self.state.apply(event)
        self._chooser.refresh(touched)
        self._backfill.refresh(event)
        self._conditions.refresh(event)
        if self.queues.is_active or isinstance(event, PolicyChanged):
            self.queues.refresh(event, touched)
        self._preemptions.refresh(event)
        return touched

    def _apply_outcome(
        self, event: WorkloadPlaced | WorkloadDeferred, *, is_checked: bool = False
    ) -> tuple[Event, frozenset[str]]:
        """Applies an outcome; if the state refuses the planner's place, the workload is deferred instead."""
        if not is_checked:
            check_readable(event)
        try:
            return event, self._apply_event(event)
        except ContradictoryEvent:
            # This is a bug of ours, and nothing has changed: it must not affect other work.
            reason = PendingConstraint.UNAVAILABLE.describe("refused")
            waits = WorkloadDeferred(time_ns=event.time_ns, workload_id=event.workload_id, reason=reason)
            return waits, self._apply_event(waits)

    def _join_preemption(self, step: CoreStep[Workload], more: PreemptionStep) -> CoreStep[Workload]:
        if more.needs_round:  # what fits now beside it is tried in the next steps, or the search goes on
            self._retrying.on_capacity_freed()
        return CoreStep((*step.events, *more.events), self.workload(step.result.workload_id), step.nodes | more.nodes)

    def _finish_step(
        self,
        events: Sequence[Event],
        workload_id: str,
        now_ns: int,
        *,
        frees: bool = False,
        last: WorkloadPlaced | WorkloadDeferred | None = None,
    ) -> CoreStep[Workload]:
        """Applies the events of one workload and its outcome; tries pending work if they free capacity."""
        for event in events if last is None else (*events, last):
            # All are checked before the first is applied, so that a failure leaves no half of a step behind.
            check_readable(event)
        nodes = frozenset[str]().union(*map(self._apply_event, events))
        if last is not None:
            settled, touched = self._apply_outcome(last, is_checked=True)
            events, nodes = (*events, settled), nodes | touched
        step = self._with_retry(events, self.workload_or_array(workload_id), nodes, now_ns, frees=frees)
        # It may have been placed by the retry, or have ended, and be gone, if it can never start.
        return replace(step, result=self.state.find_workload(workload_id) or step.result)

    def _with_retry(
        self,
        events: Sequence[Event],
        result: _Result,
        nodes: frozenset[str],
        now_ns: int,
        *,
        frees: bool = True,
        is_new: bool = True,
    ) -> CoreStep[_Result]:
        """Ends a step whose events are applied; tries pending work if they free capacity, or if work became ready.

        Without `is_new` the round that is under way goes on, and no other follows.
        """
        settled, is_ready = self._jobs.settle(self._apply, now_ns)
        renewed = self._backfill.renew_reserved_nodes(now_ns)
        self._apply_all(renewed)
        events = (*events, *settled, *renewed)
        if is_ready or renewed or (frees and is_new):
            self._retrying.on_capacity_freed()
        elif not frees:
            return CoreStep(events, result, nodes)
        more, touched = self._retry(now_ns)
        return CoreStep((*events, *more), result, nodes | touched)

    def _retry(self, now_ns: int) -> tuple[list[Event], frozenset[str]]:
        begun = self._preemptions.continue_started(self._apply, self._apply_outcome, now_ns)
        if begun.needs_round:
            self._retrying.on_capacity_freed()
        more, nodes = self._retrying.retry_step(self._apply, self._apply_outcome, self._starts.quote_prices, now_ns)
        return [*begun.events, *more], begun.nodes | nodes
