"""Whether and where work starts, and where more replicas of it go: spending limits, its queue, and capacity, in this order.

Decides on the state as it is and changes nothing. Must not know how a decision becomes an event, nor in which order
pending work is tried.

A queue that is filled is submitted job by job, and after the first that finds no room each equal one behind it finds none
either, as long as nothing else has happened: the decision of the one before is theirs, too.
"""

from collections.abc import Iterable
from dataclasses import replace

from eelgrid_controller.core.backfill import BackfillPlanner
from eelgrid_controller.core.capacity_holds import CapacityHolds
from eelgrid_controller.placement.explanations import make_outcome_event
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.queueing.admission import QueueHold, QueueIndex
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event, PricesQuoted, WorkloadQueueChanged
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import ResourceRequest, Workload, WorkloadKind, WorkloadPhase, WorkloadSpec

# By the queue that work is in.
_OF_QUEUES = frozenset({PendingConstraint.QUEUE, PendingConstraint.QUOTA, PendingConstraint.MAX_QUOTA})


class StartDecider:
    """Decides starts and growth on one state."""

    def __init__(
        self,
        state: ClusterState,
        placer: WorkloadPlacer,
        queues: QueueIndex,
        backfill: BackfillPlanner,
        holds: CapacityHolds,
    ) -> None:
        self._state, self._placer, self._queues = state, placer, queues
        self._backfill, self._holds = backfill, holds
        # The last submission that waits for capacity: the revision after it, its spec, and what was decided.
        self._refused: tuple[int, WorkloadSpec, PlacementDecision] | None = None

    def note_refusal(self, workload: Workload, decision: PlacementDecision) -> None:
        """Notes that new work waits for capacity, once all events of its submission are applied."""
        spec = workload.spec
        is_alone = spec.gang is None and spec.deadline is None and workload.share is None
        if is_alone and not self._placer.uses_engine_rules(workload.workload_id):
            self._refused = self._state.revision, spec, decision

    def find_refusal(self, workload: Workload) -> PlacementDecision | None:
        """Returns what was decided of the submission before, if it waits for capacity, is equal, and nothing came since."""
        if self._refused is None or self._refused[0] != self._state.revision:
            return None
        _, spec, decision = self._refused
        is_equal = replace(workload.spec, name=spec.name, labels=spec.labels) == spec
        return decision if is_equal and not self._placer.uses_engine_rules(workload.workload_id) else None

    def list_models(self) -> Iterable[str]:
        """Lists the GPU models of the cluster."""
        return self._placer.snapshot().models

    def quote_prices(self, now_ns: int, request: ResourceRequest | None = None) -> tuple[PricesQuoted, ...]:
        """Returns new quotes if they are due, not yet applied; for a request, only if a node has room for it."""
        quotes = self._placer.quote_prices(request)
        if quotes is None:
            return ()
        return (
            PricesQuoted(
                time_ns=now_ns,
                offers_w=quotes.offers_w,
                scarce_models=quotes.scarce_models,
                load_permille=quotes.load_permille,
                turnover_permille=quotes.turnover_permille,
                stockout_permille=quotes.stockout_permille,
            ),
        )

    def quote_for_submission(self, spec: WorkloadSpec, now_ns: int) -> tuple[PricesQuoted, ...]:
        """Returns new quotes if they are due; for work that waits behind other work, only if a node has room for it.

        Work that goes first may get a reserved start, and work of a queue may preempt, by the same prices.
        """
        has_sequel = (
            self._queues.is_active or spec.has_promised_deadline or self._state.pending.goes_first(spec.priority)
        )
        return self.quote_prices(now_ns, None if has_sequel else spec.request)

    def decide_submission(
        self, workload: Workload, early: str, quoted: tuple[PricesQuoted, ...], now_ns: int
    ) -> PlacementDecision:
        """Decides whether and where work starts that is being submitted; `early` is why it may not, whatever the capacity."""
        if early:
            return PlacementDecision(placements=(), explanation=(), room=0, withheld=early)
        return self.decide_start(workload, quoted, now_ns)

    def decide_start(self, workload: Workload, quoted: tuple[PricesQuoted, ...], now_ns: int) -> PlacementDecision:
        """Decides whether and where new work starts; `quoted` are prices that are not yet in force."""
        hold = self._state.spending.blocking_limit(workload.spec)
        if hold is not None:
            return PlacementDecision(placements=(), explanation=(), room=0, hold=hold)
        admitted: WorkloadSpec | QueueHold = workload.spec
        if self._queues.is_active:
            admitted = self._queues.admit(workload.spec, self.list_models)
        if isinstance(admitted, QueueHold):
            return PlacementDecision(placements=(), explanation=(), room=0, queue_hold=admitted)
        quotes = quoted[0].quotes if quoted else None
        closed = self._backfill.list_closed_nodes(workload, now_ns)
        return self._holds.decide(workload, admitted, now_ns, quotes, closed=closed)

    def plan_queue_change(self, workload: Workload, queue: str, now_ns: int) -> tuple[Event, ...]:
        """Returns the events that move a pending workload to another queue; none if it waits there.

        Raises InvalidArgument for an unknown queue, PermissionDenied, and FailedPrecondition if it does not wait.
        """
        if not self._queues.is_active:
            raise FailedPrecondition("the policy declares no queues; declare them with eelctl queue apply")
        if workload.phase is not WorkloadPhase.PENDING:
            raise FailedPrecondition(
                f"workload {workload.workload_id} does not wait; only pending work moves between queues: cancel it and "
                "submit it to the other queue"
            )
        spec = self._queues.check_submission(replace(workload.spec, queue=queue), workload.owner, self.list_models)
        if spec.queue == workload.spec.queue:
            return ()
        changed = WorkloadQueueChanged(time_ns=now_ns, workload_id=workload.workload_id, queue=spec.queue)
        if workload.reason.partition(":")[0] not in _OF_QUEUES:
            return (changed,)
        # What held it was of the queue before, and the round that follows writes no reasons while nodes have not reported.
        decision = self.decide_start(replace(workload, spec=spec), (), now_ns)
        if decision.placements:
            return (changed,)
        return changed, make_outcome_event(workload.workload_id, spec.request, decision, now_ns)

    def decide_growth(
        self, workload: Workload, spec: WorkloadSpec, quoted: tuple[PricesQuoted, ...], now_ns: int
    ) -> PlacementDecision:
        """Decides where more replicas of running work go, as many as its queue allows; room if it does not allow all."""
        quotes = quoted[0].quotes if quoted else None
        closed = self._backfill.list_closed_nodes(workload, now_ns)
        if workload.spec.kind is WorkloadKind.TRAINING_JOB:
            # A job that grows to be done sooner takes no place that was promised.
            closed |= self._backfill.list_reserved_nodes()
        closed = closed.union(*(hold.node_names for hold in self._holds.list_binding(workload, is_round=False)))
        admitted: WorkloadSpec | QueueHold = spec
        count = spec.replicas
        if self._queues.is_active:
            count = self._queues.count_admitted(spec, self.list_models)
            if not count:
                return PlacementDecision(placements=(), explanation=(), room=0)
            admitted = self._queues.admit(replace(spec, replicas=count), self.list_models)
        assert isinstance(admitted, WorkloadSpec)
        decision = self._placer.decide_placement(admitted, quotes, workload_id=workload.workload_id, closed=closed)
        if count == spec.replicas:
            return decision
        room = count if decision.placements else decision.room
        return PlacementDecision(placements=(), explanation=(), room=room)
