"""Preemptions: running work makes room for waiting work, and for more replicas of services, that their queue entitles to it.

Carries out what `queueing.preemption` finds: who is a candidate in this state, whether the waiting work could start without
some of them (quota and placement in one check, on nodes as they would be), and the events. Must not know who is waiting
before whom (core.workloads), nor how agents stop processes.

Work without processes is evicted at once, and the waiting work is placed in the same step on exactly the devices that were
found. Processes are told to stop, and engines evict what they run and its owner submits anew; until all of them have
ended, every victim keeps its devices, and the waiting work is nominated
for its place, so that nobody else gets what is free of it, nor the quota. Then all victims return to the queue and it is
placed, in one step. If it no longer fits, as after the loss of a node, the nomination ends, and what was stopped returns to
the queue all the same. Many victims without processes make room in the same way, some hundreds in a step; until the work is
placed they are not tried.

What elastic jobs have grown by goes first (core.elastic_returns): then nobody is preempted.

A service that is to have more replicas than fit takes part with what is missing, as if that were waiting work of its queue:
so capacity that a queue of services has lent to jobs returns when it is needed. If not all can have room, as many as can get it.
It is scaled instead of placed, and goes on with what it has meanwhile.

Steps. A search stops when it has done the work of a step, and goes on in the next; if anything has changed meanwhile that could
change its result it begins anew, and after a few such changes it is finished in one step, so that every search ends.

Why preemptions end. A victim must have been placed before the last change from outside (a submission, an end, a node, a
policy, the end of a minimum run time), or a second ago, so each such change causes no more preemptions than work was running
then.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from eelgrid_controller.core.backfill import BackfillPlanner
from eelgrid_controller.core.elastic_returns import ElasticReturns, ReturnedPlace
from eelgrid_controller.core.workloads import list_healthy_replicas, number_replicas
from eelgrid_controller.formatting import count_noun
from eelgrid_controller.placement.explanations import make_outcome_event
from eelgrid_controller.placement.placer import AlteredNodes, WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.queueing.admission import QueueHold, QueueIndex
from eelgrid_controller.queueing.past_use import UseExchange
from eelgrid_controller.queueing.preemption import (
    FEW_MOST,
    FoundPlace,
    PreemptionCandidate,
    PreemptionGainer,
    PreemptionPlan,
    PreemptionRules,
    SearchSteps,
    VictimSearch,
    compute_lost_gpu_s,
    finish_search,
    is_protected,
    list_victim_queues,
    order_candidates,
    resolve_preemption,
)
from eelgrid_controller.queueing.reservations import list_closed_nodes
from eelgrid_controller.state.attempts import has_stopped, holds_until_stopped, must_stop
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    PREEMPTED_MOST,
    AttemptEnded,
    AttemptStarted,
    Event,
    PreemptionRefused,
    PreemptionStarted,
    PricesQuoted,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadDeferred,
    WorkloadEvicted,
    WorkloadPlaced,
    WorkloadPromised,
    WorkloadScaled,
)
from eelgrid_controller.state.node_allocations import ContradictoryEvent, is_sliced, make_assignment
from eelgrid_controller.state.pending_reasons import PendingConstraint
from eelgrid_controller.state.policy import is_pool_enforced
from eelgrid_controller.state.queue_usage import QueueCharge, count_charge
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    Assignment,
    AttemptStatus,
    Mobility,
    PreemptionReclaim,
    QueuePreemption,
    SubmitWorkloadRequest,
    Workload,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
)

_NS = 10**9
_NAMED = 4
# After so long without a change, work that was placed by the last one may be a victim, too.
_FRESH_NS = _NS
# Victims that are evicted in a step, each an event of a quarter of a millisecond.
_EVICTED_MOST = 256
# The work of a search in a step, in units of about 25 µs, so that a step takes about a tenth of a second unless a single check
# takes longer; and the units of a check, of a node that is altered for it, and of a replica that is placed.
_WORK_MOST = 3000
_CHECK_WORK, _NODE_WORK, _REPLICA_WORK = 40, 4, 10
# After so many changes underneath, a search is finished in one step.
_RESTARTS_MOST = 3
_PAUSED_MOST = 16
# Changes that follow from decisions: what is placed by them is not preempted before something else has changed.
_OWN_CHANGES = (
    PricesQuoted, WorkloadDeferred, WorkloadEvicted, WorkloadPlaced, PreemptionStarted, AttemptStarted, AttemptEnded,
)  # fmt: skip

ApplyEvent = Callable[[Event], frozenset[str]]
# Applies an outcome, or defers the workload instead; returns the event that was applied.
SettleDecision = Callable[[WorkloadPlaced | WorkloadDeferred], tuple[Event, frozenset[str]]]
Plan = PreemptionPlan[PlacementDecision]


@dataclass(frozen=True, slots=True)
class PreemptionStep:
    """Events of a preemption, already applied, and their nodes."""

    events: tuple[Event, ...]
    nodes: frozenset[str]
    # Without events: the search goes on in the next step, or a nomination has ended.
    is_unfinished: bool = False

    @property
    def needs_round(self) -> bool:
        """Whether pending work is to be tried after it."""
        return bool(self.events) or self.is_unfinished


@dataclass(slots=True)
class _PausedSearch:
    """A search that goes on in a later step, if nothing has changed since it began."""

    generation: int
    restarts: int
    steps: SearchSteps[Plan]


def is_requeueable_job(spec: WorkloadSpec) -> bool:
    """Returns whether work may be requeued unless its queue says otherwise.

    That is a process, a job that its owner submits anew, or one that is not fixed.
    """
    if spec.process is not None:
        return spec.may_run_again
    is_requeued = spec.evicted_by_engine or spec.mobility is not Mobility.FIXED
    return spec.kind is not WorkloadKind.INFERENCE_SERVICE and is_requeued


def resolve_priority_class(state: ClusterState, request: SubmitWorkloadRequest) -> SubmitWorkloadRequest:
    """Returns the request with the priority of the class that it names; raises InvalidArgument.

    A repeated request gets the priority that it got at first.
    """
    spec, known = request.spec, state.workloads.get(request.workload_id)
    if not spec.priority_class:
        return request
    if known is not None and known.spec.priority_class == spec.priority_class:
        given = known.spec.priority, known.spec.never_preempts
        return replace(request, spec=replace(spec, priority=given[0], never_preempts=given[1]))
    classes = {one.name: one for one in state.policy.priority_classes}
    found = classes.get(spec.priority_class)
    if found is None:
        names = ", ".join(list(classes)[:_NAMED]) or "none is declared: eelctl queue apply"
        problem = f"is {spec.priority_class!r}, and there is no such class"
        raise InvalidArgument("the priority class is not known", (Violation("spec.priority_class", problem, names),))
    if spec.priority not in (0, found.priority):
        problem = f"is {spec.priority}, and that of the class {found.name} is {found.priority}"
        violation = Violation("spec.priority", problem, "give the class or the priority")
        raise InvalidArgument("the priority is given twice", (violation,))
    never = spec.never_preempts or found.never_preempts
    return replace(request, spec=replace(spec, priority=found.priority, never_preempts=never))


class Preemptions:
    """Decides and carries out preemptions on one state."""

    def __init__(
        self, state: ClusterState, placer: WorkloadPlacer, queues: QueueIndex, backfill: BackfillPlanner
    ) -> None:
        self._state, self._placer, self._queues, self._backfill = state, placer, queues, backfill
        # What elastic jobs have grown by, which goes before anybody is preempted; None where nobody does.
        self.returns: ElasticReturns | None = None
        # Placements that were searched so far.
        self.checks = 0
        # By workload: its attempt, and when that last reported a checkpoint; agents report it again after a restart.
        self._checkpoints: dict[str, tuple[int, int]] = {}
        # Placed since the last change from outside.
        self._fresh: set[str] = set()
        # Work that makes room and has to end first, until it has returned to the queue.
        self._stopping = {key for key, one in state.workloads.items() if one.preempted_for}
        # When the first workload becomes a candidate that was none because it has not run long enough.
        self._next_ns: int | None = None
        # Until when work that an engine could not stop is no candidate.
        self._refused: dict[str, int] = {}
        # Why nothing was found for work of a shape, until anything changes.
        self._in_vain: dict[tuple[object, ...], str] = {}
        # Shapes of work for which no shrinking of elastic jobs makes room, until anything changes.
        self._not_returned: set[tuple[object, ...]] = set()
        # By workload; and what has changed since a search began would change this.
        self._paused: dict[str, _PausedSearch] = {}
        self._generation = 0
        # Services that have fewer replicas than they are to have: since when, and how many while the search goes on.
        self._short_since_ns: dict[str, int] = {}
        self._growing: dict[str, int] = {}
        # Of the search in this step; and the most, in units of about 25 µs.
        self._work = 0
        # When the last event was.
        self._last_ns = 0
        # How many nominations there were after the last event, and whether one has ended since the last round was asked for.
        self._nominated, self._has_ended = len(state.nominations), False
        self.work_most = _WORK_MOST

    def refresh(self, event: Event) -> None:
        """Follows an event that was applied."""
        if isinstance(event, WorkloadPlaced):
            self._fresh.add(event.workload_id)
        elif isinstance(event, PreemptionStarted):
            self._stopping |= {key for key in event.victims if self._state.workloads[key].preempted_for}
        elif isinstance(event, WorkloadEvicted | WorkloadCompleted | WorkloadCancelled):
            self._checkpoints.pop(event.workload_id, None)
            self._refused.pop(event.workload_id, None)
        if self.returns is not None:
            self.returns.refresh(event)
        if not isinstance(event, WorkloadDeferred | PricesQuoted | WorkloadPromised):
            self._in_vain.clear()
            self._not_returned.clear()
            self._generation += 1
        self._last_ns = max(self._last_ns, event.time_ns)
        self._has_ended |= len(self._state.nominations) < self._nominated
        self._nominated = len(self._state.nominations)
        if isinstance(event, WorkloadPlaced | WorkloadCancelled | PreemptionStarted):
            self._paused.pop(event.workload_id, None)
        if not isinstance(event, _OWN_CHANGES):
            self._fresh.clear()

    def record_checkpoint(self, status: AttemptStatus) -> None:
        """Notes when a running attempt last reported a checkpoint; of several replicas, the latest."""
        if status.checkpointed_ns:
            attempt, before_ns = self._checkpoints.get(status.workload_id, (status.attempt, 0))
            latest_ns = max(before_ns, status.checkpointed_ns) if attempt == status.attempt else status.checkpointed_ns
            self._checkpoints[status.workload_id] = status.attempt, latest_ns

    def is_nominated(self, workload_id: str) -> bool:
        """Returns whether others make room for a waiting workload."""
        return workload_id in self._state.nominations

    def makes_room(self, workload_id: str) -> bool:
        """Returns whether a workload is a victim of work that is not placed yet, and so is not to start before it."""
        return self._state.nominations.find_by_victim(workload_id) is not None

    def is_searching(self, workload_id: str) -> bool:
        """Returns whether the search for a workload goes on in the next step."""
        return workload_id in self._paused

    def is_due(self, now_ns: int) -> bool:
        """Returns whether a workload may be a victim now that could not before."""
        return self._next_ns is not None and now_ns >= self._next_ns

    def begin_due(self) -> None:
        """Lets waiting work be tried anew after time has made a workload a candidate."""
        self._next_ns = None
        self._fresh.clear()
        self._in_vain.clear()
        self._generation += 1

    def try_start(self, workload: Workload, apply: ApplyEvent, settle: SettleDecision, now_ns: int) -> PreemptionStep:
        """Makes room for a waiting workload if its queue entitles it to; without events if not, or not yet."""
        found = self._find_return(workload, lambda returns: returns.find_start(workload, now_ns), now_ns)
        if found is not None:
            shrunk = _apply_all(apply, *found.shrinks)
            return _place(workload, found.decision, shrunk, settle, now_ns)
        plan = self._continue_search(workload.workload_id, lambda: self._search_if_entitled(workload, now_ns))
        decision = None if plan is None else plan.place
        if plan is None or decision is None:
            return PreemptionStep((), frozenset(), is_unfinished=plan is None)
        begun = self._begin(workload, plan, decision, apply, now_ns)
        if workload.workload_id in self._state.nominations:
            return begun
        return _place(workload, decision, begun, settle, now_ns)

    def try_growth(self, workload: Workload, replicas: int, apply: ApplyEvent, now_ns: int) -> PreemptionStep:
        """Makes room for what a running service lacks of `replicas`, or for a part of it, if its queue entitles it to."""
        key = workload.workload_id
        missing = replicas - len(list_healthy_replicas(self._state, workload))
        self._growing.pop(key, None)
        is_running_service = workload.spec.kind is WorkloadKind.INFERENCE_SERVICE and bool(workload.placements)
        if missing <= 0 or not is_running_service or self.is_nominated(key):
            self._short_since_ns.pop(key, None)
            return PreemptionStep((), frozenset())
        if key not in self._short_since_ns:
            # A change from outside: it waits for the delay of its queue from now on.
            self._fresh.clear()
        short = replace(workload, submitted_ns=self._short_since_ns.setdefault(key, now_ns))
        wanted = replace(short, spec=replace(short.spec, replicas=missing))
        found = self._find_return(wanted, lambda returns: returns.find_growth(workload, missing, now_ns), now_ns)
        if found is not None:
            if len(found.decision.placements) < missing:
                # For the rest others make room in the next step.
                self._growing[key] = replicas
            return _grow(workload, found.decision, _apply_all(apply, *found.shrinks), apply, now_ns)
        plan = self._continue_search(key, lambda: self._search_growth(short, missing, now_ns))
        if plan is None:
            self._growing[key] = replicas
        if plan is None or plan.place is None:
            return PreemptionStep((), frozenset(), is_unfinished=plan is None)
        decision = number_replicas(workload, plan.place)
        if len(decision.placements) == missing:
            del self._short_since_ns[key]
        begun = self._begin(workload, plan, decision, apply, now_ns)
        if self.is_nominated(key):
            return begun
        return _grow(workload, plan.place, begun, apply, now_ns)

    def _find_return(
        self, workload: Workload, find: Callable[[ElasticReturns], ReturnedPlace | None], now_ns: int
    ) -> ReturnedPlace | None:
        """Returns where work goes if elastic jobs shrink, unless that is known not to help since nothing has changed."""
        shape = self._shape_of(workload, workload.spec.queue, now_ns)
        is_bound = self._state.gangs.find_bound(workload, self._state.workloads) is not None
        if not self.returns or is_bound or shape in self._not_returned:
            return None
        found = find(self.returns)
        self.checks += 1
        if found is None:
            self._not_returned.add(shape)
        return found

    def _search_growth(self, workload: Workload, missing: int, now_ns: int) -> SearchSteps[Plan]:
        """Searches for room for all missing replicas, else for as many of them as can have it, by bisection."""
        best, low, high, count = None, 0, missing + 1, missing
        while high - low > 1:
            wanted = replace(workload, spec=replace(workload.spec, replicas=count))
            plan = yield from self._search_if_entitled(wanted, now_ns)
            best, low, high = (best, low, count) if plan.place is None else (plan, count, high)
            count = (low + high) // 2
        return best or plan

    def _begin(
        self, workload: Workload, plan: Plan, decision: PlacementDecision, apply: ApplyEvent, now_ns: int
    ) -> PreemptionStep:
        """Evicts the victims at once, or tells them to stop, and nominates the workload meanwhile."""
        key, queue = workload.workload_id, self._queues.find_leaf(workload.spec)
        reason = PendingConstraint.PREEMPTED.describe(gainer=key, queue=queue or "")
        victims = tuple(one.workload_id for one in plan.victims)
        stopping = [name for name in victims if holds_until_stopped(self._state.workloads[name].spec)]
        if stopping or len(victims) > _EVICTED_MOST:
            return _apply_all(
                apply,
                PreemptionStarted(
                    time_ns=now_ns,
                    workload_id=key,
                    placements=decision.placements,
                    victims=victims,
                    reason=reason,
                    waits=_describe_wait(stopping or victims),
                ),
            )
        return _apply_all(apply, *self._evict(victims, key, reason, now_ns))

    def _evict(self, victims: Sequence[str], gainer: str, reason: str, now_ns: int) -> list[Event]:
        return [
            WorkloadEvicted(time_ns=now_ns, workload_id=key, reason=reason, preempted_for=gainer) for key in victims
        ]

    def may_preempt(self, workload: Workload) -> bool:
        """Returns whether a waiting workload is one for which others may have to make room."""
        spec = workload.spec
        queue = self._queues.find_leaf(spec) if self._queues.is_active else None
        if queue is None or spec.never_preempts or is_sliced(workload):
            return False
        if self._placer.uses_engine_rules(workload.workload_id):
            return False
        if self._state.gangs.find_bound(workload, self._state.workloads) is not None:
            return False
        rules = resolve_preemption(self._state.policy.queues)[queue]
        return bool(rules.within or rules.reclaim) and not self.is_nominated(workload.workload_id)

    def may_get_room(self, workload: Workload) -> bool:
        """Returns whether elastic jobs or work that may be preempted may have to make room for a waiting workload."""
        return bool(self.returns) or self.may_preempt(workload)

    def find_plan(self, workload: Workload, now_ns: int) -> Plan:
        """Returns the victims and the place of a waiting workload, or why there are none; changes nothing."""
        return finish_search(self._search_if_entitled(workload, now_ns))

    def _continue_search(self, key: str, begin: Callable[[], SearchSteps[Plan]]) -> Plan | None:
        """Begins the search for a workload, or goes on with it, by the work of a step; None if it is unfinished then."""
        paused = self._paused.pop(key, None)
        if paused is None or paused.generation != self._generation:
            restarts = 0 if paused is None else paused.restarts + 1
            paused = _PausedSearch(self._generation, restarts, begin())
        self._work = 0
        while self._work < self.work_most or paused.restarts >= _RESTARTS_MOST:
            try:
                next(paused.steps)
            except StopIteration as ended:
                plan: Plan = ended.value
                return plan
        while len(self._paused) >= _PAUSED_MOST:
            del self._paused[next(iter(self._paused))]
        self._paused[key] = paused
        return None

    def _search_if_entitled(self, workload: Workload, now_ns: int) -> SearchSteps[Plan]:
        queue = self._queues.find_leaf(workload.spec) if self.may_preempt(workload) else None
        if queue is None:
            return PreemptionPlan(problem="it preempts nothing")
        rules = resolve_preemption(self._state.policy.queues)[queue]
        begins_ns = workload.submitted_ns + int(rules.delay_s * _NS)
        if now_ns < begins_ns:
            # Not kept for others of its shape, which may have waited for longer.
            self._note_next(begins_ns)
            return PreemptionPlan(problem="nobody makes room before it has waited for the delay of its queue")
        shape = self._shape_of(workload, queue, now_ns)
        if shape in self._in_vain:
            return PreemptionPlan(problem=self._in_vain[shape])
        plan = yield from self._search(workload, queue, rules, now_ns)
        self.checks += plan.checks
        # A part of a gang has fewer to choose from than others of its shape.
        if plan.place is None and self._state.gangs.find(workload) is None:
            self._in_vain[shape] = plan.problem
        return plan

    def _shape_of(self, workload: Workload, queue: str, now_ns: int) -> tuple[object, ...]:
        """Returns what work has in common of which none can start by preemption if one cannot."""
        spec, closed = workload.spec, list_closed_nodes(self._state, workload, now_ns)
        of_nodes = spec.process is not None, spec.required_traits, spec.shared_load, closed
        return queue, spec.priority, spec.request, spec.replicas, *of_nodes

    def describe_problem(self, workload: Workload) -> str:
        """Says why nobody makes room for a waiting workload that its queue lets preempt; empty if that is not known."""
        queue = self._queues.find_leaf(workload.spec) if self._queues.is_active else None
        problem = "" if queue is None else self._in_vain.get(self._shape_of(workload, queue, self._last_ns), "")
        is_waiting = workload.phase is WorkloadPhase.PENDING
        return f"Preemption does not help: {problem}." if problem and is_waiting else ""

    def describe_cost(self, workload: Workload) -> str:
        """Says what making room for a waiting workload costs, or would if it might preempt, or why nobody does.

        Empty if it preempts nothing, or if that is not known after the work of a step.
        """
        nomination = self._state.nominations.get(workload.workload_id)
        if nomination is not None:
            charges, workloads = self._state.queue_usage.charges, self._state.workloads
            victims = [
                self._make_candidate(workloads[key], charges[key]) for key in nomination.victims if key in charges
            ]
            return f"It preempts {_describe_loss(victims, nomination.time_ns)}." if victims else ""
        if workload.phase is not WorkloadPhase.PENDING or not workload.spec.never_preempts:
            return self.describe_problem(workload)
        allowed = replace(workload, spec=replace(workload.spec, never_preempts=False))
        next_ns, steps = self._next_ns, self._search_if_entitled(allowed, self._last_ns)
        self._work = 0
        try:
            while self._work < self.work_most:
                next(steps)
        except StopIteration as ended:
            plan: Plan = ended.value
            if plan.place is not None:
                return f"If it were allowed to preempt, it would start now, and stop {_describe_loss(plan.victims, self._last_ns)}."
        finally:
            # Nothing is to be tried anew for the sake of a question.
            self._next_ns = next_ns
        return ""

    def _search(self, workload: Workload, queue: str, rules: QueuePreemption, now_ns: int) -> SearchSteps[Plan]:
        spec = workload.spec
        gainer = PreemptionGainer(queue=queue, priority=spec.priority, amounts=count_charge(self._state.policy, spec))
        permitted = PreemptionRules(self._queues.tree, gainer, rules, self._make_exchange(rules, now_ns))
        candidates, ending = self._list_candidates(gainer, rules, now_ns)
        own = self._state.gangs.find(workload)
        if own is not None:
            # A part that its gang has started without makes none of it end.
            candidates = [one for one in candidates if one.workload_id not in own.live]
        ordered = order_candidates(candidates, now_ns)
        self._work += 2 * len(candidates)
        yield
        closed = list_closed_nodes(self._state, workload, now_ns)
        search = VictimSearch[PlacementDecision](lambda victims: self._find_place(workload, victims, closed, now_ns))
        if ending and search.check(ending) is not None:
            return PreemptionPlan(problem="work that makes enough room is ending", checks=search.checks)
        # Which of thousands may be victims takes longer than the search with a few of them.
        selected = permitted.select(ordered, most=FEW_MOST)
        few = self._keep_whole_gangs(selected)
        plan = yield from search.run(few)
        if plan.place is None and len(selected) == FEW_MOST:
            everybody = self._keep_whole_gangs(permitted.select(ordered))
            self._work += 2 * len(everybody)
            yield
            plan = yield from search.run(everybody, failed=FEW_MOST if len(few) == FEW_MOST else 0)
        if plan.place is None and rules.reclaim is PreemptionReclaim.FAIR_SHARE:
            lenient = self._keep_whole_gangs(permitted.select(ordered, is_lenient=True))
            plan = (yield from search.run(lenient)) if lenient else plan
        plan = self._add_gangs(plan, candidates, search)
        if plan.place is None and permitted.wait_s is not None:
            self._note_next(now_ns + int(permitted.wait_s * _NS))
        if len(plan.victims) > PREEMPTED_MOST:
            return PreemptionPlan(problem=f"it would preempt more than {PREEMPTED_MOST} workloads", checks=plan.checks)
        return plan

    def _list_gang(self, workload_id: str) -> set[str]:
        """Returns what ends with a victim: the running parts of its gang, if it is one of those that must start together."""
        workload = self._state.workloads[workload_id]
        gang = self._state.gangs.find(workload)
        if gang is None or gang.ended or must_stop(workload) or workload_id not in gang.list_required():
            return {workload_id}
        return {key for key in gang.live if self._state.workloads[key].phase is WorkloadPhase.PLACED}

    def _keep_whole_gangs(self, selected: list[PreemptionCandidate]) -> list[PreemptionCandidate]:
        """Returns the candidates without parts of gangs of which others that would end with them are none."""
        keys = {one.workload_id for one in selected}
        return [one for one in selected if self._list_gang(one.workload_id) <= keys]

    def _add_gangs(
        self, plan: Plan, candidates: Iterable[PreemptionCandidate], search: VictimSearch[PlacementDecision]
    ) -> Plan:
        """Returns a plan with everything that ends with its victims, unless parts that may end alone make enough room."""
        keys = set[str]().union(*(self._list_gang(one.workload_id) for one in plan.victims))
        if len(keys) == len(plan.victims):
            return plan
        whole = tuple(one for one in candidates if one.workload_id in keys)
        alone = [one for one in whole if len(self._list_gang(one.workload_id)) == 1]
        found = search.check(alone) if alone else None
        if found is not None:
            return replace(plan, victims=tuple(alone), place=found.place, checks=search.checks)
        return replace(plan, victims=whole, checks=search.checks)

    def _make_exchange(self, rules: QueuePreemption, now_ns: int) -> UseExchange | None:
        if rules.reclaim is not PreemptionReclaim.PAST_USE:
            return None
        half_life_s = self._state.policy.queue_half_life_s
        return UseExchange(self._queues.sum_past_use(now_ns), half_life_s=half_life_s, horizon_s=rules.horizon_s)

    def _note_next(self, time_ns: int) -> None:
        self._next_ns = time_ns if self._next_ns is None else min(time_ns, self._next_ns)

    def _find_place(
        self, workload: Workload, victims: Sequence[PreemptionCandidate], closed: frozenset[str], now_ns: int
    ) -> FoundPlace[PlacementDecision] | None:
        """Returns where a workload would start without these victims, by quota and on no closed node; None if nowhere.

        Nowhere either where it would delay work of its queue that goes before it, and waits for these victims itself.
        """
        state, key = self._state, workload.workload_id
        leaving = set[str]().union(*(self._list_gang(one.workload_id) for one in victims))
        self._work += _CHECK_WORK + len(victims) // 10
        admitted = self._queues.admit_without(workload.spec, self._list_models, leaving, workload_id=key)
        if isinstance(admitted, QueueHold):
            return None
        records = state.nominations.hold_on(state.nodes, state.workloads)
        names = {place.node_name for one in leaving for place in state.workloads[one].placements}
        for name in sorted(names):
            records[name] = (records.get(name) or state.nodes[name]).copy_without(leaving)
        self._work += _NODE_WORK * len(records)
        decision = self._placer.decide_on_altered(AlteredNodes(records, frozenset(leaving)), admitted, key, closed)
        self._work += _REPLICA_WORK * min(decision.room, workload.spec.replicas)
        if not decision.placements or self._backfill.delays_first(workload, decision, records, now_ns):
            return None
        return FoundPlace(decision, frozenset(place.node_name for place in decision.placements))

    def _list_models(self) -> Iterable[str]:
        return self._placer.snapshot().models

    def _list_candidates(
        self, gainer: PreemptionGainer, rules: QueuePreemption, now_ns: int
    ) -> tuple[list[PreemptionCandidate], list[PreemptionCandidate]]:
        """Returns the work that may be victims, and the work that is ending anyway."""
        candidates, ending = list[PreemptionCandidate](), list[PreemptionCandidate]()
        by_queue = resolve_preemption(self._state.policy.queues)
        for queue in list_victim_queues(self._queues.tree, gainer, rules):
            for key, charge in self._queues.list_charged(queue).items():
                workload = self._state.workloads[key]
                if holds_until_stopped(workload.spec) and must_stop(workload):
                    if not workload.preempted_for:
                        ending.append(self._make_candidate(workload, charge))
                elif self._may_end(workload, by_queue[queue], now_ns):
                    candidates.append(self._make_candidate(workload, charge))
        return candidates, ending

    def _make_candidate(self, workload: Workload, charge: QueueCharge) -> PreemptionCandidate:
        key = workload.workload_id
        attempt, checkpointed_ns = self._checkpoints.get(key, (0, 0))
        return PreemptionCandidate(
            workload_id=key,
            queue=charge.queue,
            priority=workload.spec.priority,
            amounts=charge.amounts,
            node_names=frozenset(place.node_name for place in workload.placements),
            started_ns=_find_start_ns(workload),
            checkpointed_ns=checkpointed_ns if attempt == workload.attempt else 0,
        )

    def _may_end(self, workload: Workload, rules: QueuePreemption, now_ns: int) -> bool:
        """Returns whether running work may be a victim of anybody."""
        key, spec = workload.workload_id, workload.spec
        if is_protected(rules, is_job=is_requeueable_job(spec)) or not spec.may_run_again:
            return False
        is_of_engine = bool(spec.required_traits) or self._placer.uses_engine_rules(key)
        if is_sliced(workload) or (is_of_engine and not spec.evicted_by_engine):
            return False
        if self._state.nominations.find_by_victim(key) is not None or (spec.process and has_stopped(workload)):
            return False
        for place in workload.placements:
            record = self._state.nodes[place.node_name]
            if not record.is_ready or record.ahead is not None or not record.is_reported:
                # It cannot be told to stop there.
                return False
            if spec.evicted_by_engine and not is_pool_enforced(self._state.policy, record.inventory.pool):
                return False
        ends_ns = _find_start_ns(workload) + int(rules.min_runtime_s * _NS) if rules.min_runtime_s else 0
        ends_ns = max(ends_ns, self._refused.get(key, 0))
        if key in self._fresh:
            ends_ns = max(ends_ns, now_ns + _FRESH_NS)
        if now_ns < ends_ns:
            self._note_next(ends_ns)
            return False
        return True

    @property
    def is_ready(self) -> bool:
        """Whether all victims of a nomination have stopped, one that has stopped may return to the queue, or one has ended."""
        if self._has_ended or self._growing:
            return True
        if not self._stopping and not len(self._state.nominations):
            return False
        return any(map(self._is_complete, self._state.nominations)) or any(map(self._may_return, self._stopping))

    def list_evictions(self) -> list[Workload]:
        """Returns the victims that their engine has to stop, by id; also those that nobody waits for any more."""
        found = (self._state.workloads.get(key) for key in sorted(self._stopping))
        return [one for one in found if one is not None and one.preempted_for and one.spec.evicted_by_engine]

    def refuse(
        self, workload_id: str, reason: str, apply: ApplyEvent, now_ns: int, *, again_s: float
    ) -> PreemptionStep:
        """Lets a victim run on that its engine does not stop; it is no candidate for a while."""
        workload = self._state.workloads.get(workload_id)
        if workload is None or not workload.preempted_for or not workload.spec.evicted_by_engine:
            return PreemptionStep((), frozenset())
        gainer = workload.preempted_for
        events: list[Event] = [PreemptionRefused(time_ns=now_ns, workload_id=workload_id, reason=reason)]
        if self.is_nominated(gainer) and self._state.workloads[gainer].phase is WorkloadPhase.PENDING:
            gone = PendingConstraint.PREEMPTED.describe("gone")
            events.append(WorkloadDeferred(time_ns=now_ns, workload_id=gainer, reason=gone))
        self._stopping.discard(workload_id)
        self._refused[workload_id] = now_ns + int(again_s * _NS)
        return _apply_all(apply, *events)

    def _is_complete(self, nomination: PreemptionStarted) -> bool:
        return not any(map(self._still_runs, nomination.victims))

    def _still_runs(self, key: str) -> bool:
        workload = self._state.workloads.get(key)
        if workload is None or workload.phase is not WorkloadPhase.PLACED:
            return False
        return holds_until_stopped(workload.spec) and not has_stopped(workload)

    def _may_return(self, key: str) -> bool:
        """Returns whether a victim no longer makes room for anybody, or has stopped and is not waited with."""
        workload = self._state.workloads.get(key)
        if workload is None or not workload.preempted_for:
            return True
        return has_stopped(workload) and self._state.nominations.find_by_victim(key) is None

    def continue_started(self, apply: ApplyEvent, settle: SettleDecision, now_ns: int) -> PreemptionStep:
        """Places what is nominated and whose victims have stopped, and returns these to the queue."""
        events, nodes = list[Event](), frozenset[str]()
        for nomination in self._state.nominations if self.is_ready else ():
            if self._is_complete(nomination):
                step = self._complete(nomination, apply, settle, now_ns)
                events, nodes = [*events, *step.events], nodes | step.nodes
        for key in sorted(filter(self._may_return, self._stopping)):
            self._stopping.discard(key)
            workload = self._state.workloads.get(key)
            if workload is not None and workload.preempted_for:
                step = _apply_all(apply, *self._evict((key,), workload.preempted_for, workload.reason, now_ns))
                events, nodes = [*events, *step.events], nodes | step.nodes
        for key, replicas in tuple(self._growing.items()):
            del self._growing[key]
            workload = self._state.workloads.get(key)
            if workload is not None and workload.phase is WorkloadPhase.PLACED:
                step = self.try_growth(workload, replicas, apply, now_ns)
                events, nodes = [*events, *step.events], nodes | step.nodes
        # What was held for it is free for others, and its victims may start again.
        has_ended, self._has_ended = self._has_ended, False
        return PreemptionStep(tuple(events), nodes, is_unfinished=has_ended)

    def _complete(
        self, nomination: PreemptionStarted, apply: ApplyEvent, settle: SettleDecision, now_ns: int
    ) -> PreemptionStep:
        key, workloads = nomination.workload_id, self._state.workloads
        is_running = workloads[key].phase is WorkloadPhase.PLACED
        victims = [
            name
            for name in nomination.victims
            if (one := workloads.get(name)) is not None and one.phase is WorkloadPhase.PLACED
        ]
        # What is evicted already was found to make room when the first of them were.
        is_begun = len(victims) < len(nomination.victims)
        if (len(victims) <= _EVICTED_MOST or not is_begun) and not self._still_fits(nomination, victims, now_ns):
            victims = [name for name in victims if workloads[name].preempted_for == key]
            waits = WorkloadDeferred(
                time_ns=now_ns, workload_id=key, reason=PendingConstraint.PREEMPTED.describe("gone")
            )
            stays = WorkloadScaled(time_ns=now_ns, workload_id=key)
            ends = stays if is_running else waits
            return _apply_all(apply, ends, *self._evict(victims, key, nomination.reason, now_ns))
        evicted = _apply_all(apply, *self._evict(victims[:_EVICTED_MOST], key, nomination.reason, now_ns))
        if len(victims) > _EVICTED_MOST:
            return evicted
        if is_running:
            grown = WorkloadScaled(time_ns=now_ns, workload_id=key, placements=nomination.placements)
            return PreemptionStep((*evicted.events, grown), evicted.nodes | apply(grown))
        placed, nodes = settle(WorkloadPlaced(time_ns=now_ns, workload_id=key, placements=nomination.placements))
        return PreemptionStep((*evicted.events, placed), evicted.nodes | nodes)

    def _still_fits(self, nomination: PreemptionStarted, victims: Sequence[str], now_ns: int) -> bool:
        """Tries the nominated place on copies of its nodes without the victims, and all else that a start there has to meet."""
        workload = self._state.workloads[nomination.workload_id]
        if self._state.gangs.find_bound(workload, self._state.workloads) is not None:
            # Meanwhile all other parts of its gang wait, with which it starts.
            return False
        is_spent = not workload.placements and self._state.spending.blocking_limit(workload.spec) is not None
        names = dict.fromkeys(place.node_name for place in nomination.placements)
        if is_spent or not list_closed_nodes(self._state, workload, now_ns).isdisjoint(names):
            return False
        spec, key = replace(workload.spec, replicas=len(nomination.placements)), workload.workload_id
        admitted: WorkloadSpec | QueueHold = spec
        if self._queues.is_active:
            admitted = self._queues.admit_without(spec, self._list_models, set(victims), workload_id=key)
        if isinstance(admitted, QueueHold) or not self._placer.is_open_to(admitted, key, nomination.placements):
            return False
        records = {name: self._state.nodes[name].copy_without(victims) for name in names}
        allowance = self._placer.allowance
        if allowance.has_budgets and allowance.list_exceeded_budgets(nomination.placements, records):
            return False
        coming: dict[str, list[Assignment]] = {}
        try:
            for place in nomination.placements:
                assignment = make_assignment(workload, place)
                records[place.node_name].allocate(assignment)
                coming.setdefault(place.node_name, []).append(assignment)
        except ContradictoryEvent:
            return False
        return not any(self._placer.describe_unbearable(records[name], coming[name]) for name in names)


def _place(
    workload: Workload, decision: PlacementDecision, before: PreemptionStep, settle: SettleDecision, now_ns: int
) -> PreemptionStep:
    """Places waiting work once a step has made room for it."""
    placed, nodes = settle(make_outcome_event(workload.workload_id, workload.spec.request, decision, now_ns))
    return PreemptionStep((*before.events, placed), before.nodes | nodes)


def _grow(
    workload: Workload, decision: PlacementDecision, before: PreemptionStep, apply: ApplyEvent, now_ns: int
) -> PreemptionStep:
    """Adds replicas to a running service once a step has made room for them."""
    numbered = number_replicas(workload, decision)
    grown = WorkloadScaled(
        time_ns=now_ns,
        workload_id=workload.workload_id,
        placements=numbered.placements,
        explanation=numbered.explanation,
    )
    return PreemptionStep((*before.events, grown), before.nodes | apply(grown))


def _apply_all(apply: ApplyEvent, *events: Event) -> PreemptionStep:
    return PreemptionStep(events, frozenset[str]().union(*map(apply, events)))


def _find_start_ns(workload: Workload) -> int:
    """Returns when work began to run: when it was placed, or when the last of its processes started."""
    return max((workload.placed_ns, *(one.started_ns for one in workload.attempts)))


def _describe_loss(victims: Sequence[PreemptionCandidate], now_ns: int) -> str:
    """Names victims, and the work that they lose."""
    names = [one.workload_id for one in victims]
    shown = ", ".join(names[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    hours = sum(compute_lost_gpu_s(one, now_ns) for one in victims) / 3600.0
    return f"{count_noun(len(names), 'workload')} ({shown}{more}), at the loss of {hours:.1f} GPU hours since their last checkpoints or starts"


def _describe_wait(victims: Sequence[str]) -> str:
    shown = ", ".join(victims[:_NAMED])
    more = f" and {len(victims) - _NAMED} more" if len(victims) > _NAMED else ""
    return PendingConstraint.PREEMPTING.describe(victims=f"{shown}{more}")
