"""One control cycle: an observation in, instructions out; synchronous, without clock or I/O.

`ObjectiveController` answers events of services and jobs with instructions, and says how everything stands.
`ControlCycle` makes the events from an observation, in this order: answers to pending limits and node liveness, ended
workloads, budgets and prices, then services and jobs.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.objectives.elastic import ElasticObserver
from eelgrid_controller.objectives.job_history import JobHistories, ProfileUpdates
from eelgrid_controller.objectives.job_observer import JobObserver
from eelgrid_controller.objectives.observation import (
    ClusterObservation,
    NodeLiveness,
    NodeLivenessTracker,
    ObjectiveSettings,
    PendingLimits,
    ProgressReading,
    allows_enforcement,
    highest_limit_w,
)
from eelgrid_controller.objectives.power.bandit import PickReason, measured_estimates
from eelgrid_controller.objectives.power.budgets import (
    BudgetTree,
    Holding,
    NodePowerDraw,
    PowerBudgetNode,
    nearest_budgets,
    policy_budgets,
)
from eelgrid_controller.objectives.power.control_events import (
    AllocationSolved,
    BudgetControlStatus,
    BudgetPreview,
    BudgetsSet,
    ControlEvent,
    ControlInstruction,
    ControllerStatus,
    ControlSettings,
    ControlTick,
    JobControlStatus,
    JobMeasured,
    JobMissed,
    JobPredicted,
    JobStarted,
    LimitChange,
    LimitConfirmed,
    LimitFailed,
    LimitPhase,
    NodeLeaseExpired,
    NodeLimitReport,
    NodeReachable,
    NodeUnreachable,
    PendingLimit,
    PreviewedJob,
    PricesSet,
    ScaleService,
    ServiceControlStatus,
    ServiceReady,
    ServiceStarted,
    ServiceWindow,
    SetPowerLimit,
    SolveAllocation,
    UncountedSet,
    WorkloadEnded,
)
from eelgrid_controller.objectives.power.estimates import LimitEstimate, LimitHistory
from eelgrid_controller.objectives.power.job_controller import JobController
from eelgrid_controller.objectives.power.power_cap_controller import PowerCapController
from eelgrid_controller.objectives.power.power_model import is_same_limit
from eelgrid_controller.objectives.power.tariffs import policy_tariff
from eelgrid_controller.objectives.predicted_plans import PredictedPlans
from eelgrid_controller.objectives.service_observer import ServiceObservation, ServiceObserver
from eelgrid_controller.objectives.services.autoscaler import (
    AutoscalerAdvice,
    AutoscalerState,
    AutoscalerTarget,
    RateReserve,
    ReplicaDecision,
    decay_reserve,
    on_ready_replicas,
    on_tick,
    on_window,
    start_autoscaler,
)
from eelgrid_controller.objectives.services.service_metrics import ScrapeTarget
from eelgrid_controller.objectives.services.service_model import calibration_factor
from eelgrid_controller.state.measurements import MeasuredStart, WorkInterval
from eelgrid_controller.state.node_allocations import is_sliced
from eelgrid_controller.state.policy import BudgetHierarchy, make_budget_key
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.messages import (
    BudgetStatus,
    EnergyPrices,
    ImagineBudgetsResponse,
    JobStatus,
    MeasuredPoint,
    Policy,
    Workload,
)


@dataclass(slots=True)
class _ServiceController:
    """One service; `said_s` is when its target was last said, or began to be what it has."""

    promised: AutoscalerTarget
    watch: AutoscalerState
    decision: ReplicaDecision
    said_s: float
    told: int  # the replicas that whoever carries out was last told, or had
    window_s: float | None = None
    serving_s: float = -math.inf  # when it was last told how many serve
    advice: AutoscalerAdvice | None = None  # of the last window


class ServiceControllers:
    """All services, by name. Methods answer with what to say, or why the event changes nothing.

    An instruction is repeated while the ready replicas differ from the target: it may have been lost.
    """

    def __init__(self, settings: ControlSettings) -> None:
        self._settings = settings
        self._services: dict[str, _ServiceController] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._services

    def __len__(self) -> int:
        return len(self._services)

    def start_service(self, event: ServiceStarted) -> list[ScaleService] | str:
        """A new service; or a known one that promises something else, whose past stays."""
        known = self._services.get(event.name)
        if known is not None:
            if known.promised == event.promised:
                return "a service that came twice"
            limits = event.promised.limits
            state = known.watch.state
            target = min(limits.most, max(limits.least, state.target))
            state = replace(state, target=target)
            # A correction and a reserve are of a profile; a new profile has none yet.
            same = known.promised.model == event.promised.model
            fresh = AutoscalerState(replace(state, reserve=RateReserve()))
            known.watch = replace(known.watch, state=state) if same else fresh
            known.promised = event.promised
            known.decision = ReplicaDecision(target, "its promise has changed")
            return self._due_instructions(event.name, known, event.at_s)
        if event.replicas < 0 or len(self._services) >= self._settings.services_most:
            return "more services than are steered, or impossible replicas"
        watch = start_autoscaler(event.promised, event.replicas)
        reason = (
            "as it was found" if watch.state.target == event.replicas else "the least or most replicas of its promise"
        )
        service = _ServiceController(
            event.promised, watch, ReplicaDecision(watch.state.target, reason), event.at_s, event.replicas
        )
        self._services[event.name] = service
        return self._due_instructions(event.name, service, event.at_s)

    def add_window(self, event: ServiceWindow) -> list[ScaleService] | str:
        """What the window asks for; None for one that is old or that the model cannot read."""
        service = self._services.get(event.name)
        if service is None or (service.window_s is not None and event.at_s <= service.window_s):
            return "a window that is old, or of what is not known"
        try:
            watch, advice = on_window(service.promised, service.watch, event.window, event.at_s)
        except ControllerError:
            return "a window that no model explains"
        service.watch, service.advice, service.window_s = watch, advice, event.at_s
        service.decision = advice.decision
        return self._due_instructions(event.name, service, event.at_s)

    def set_ready_replicas(self, event: ServiceReady) -> list[ScaleService] | str:
        """What is known once so many replicas serve."""
        service = self._services.get(event.name)
        if service is None or event.replicas < 0 or event.at_s < service.serving_s:
            return "replicas that are old, impossible, or of what is not known"
        service.serving_s = event.at_s
        service.watch = on_ready_replicas(service.promised, service.watch, event.replicas, event.at_s)
        return []

    def end_service(self, name: str) -> bool:
        """Forgets a service; whether there was one."""
        return self._services.pop(name, None) is not None

    def on_tick(self, at_s: float) -> list[ScaleService]:
        """What is said again, and what time alone changes: a service may be blind now."""
        made = []
        for name, service in self._services.items():
            service.watch, advice = on_tick(service.promised, service.watch, at_s)
            if advice.decision.reason != "nothing new":
                service.decision = advice.decision
            made += self._due_instructions(name, service, at_s)
        return made

    def service_statuses(self, now_s: float) -> list[ServiceControlStatus]:
        """How each stands, in order of names."""
        return [self._standing(name, self._services[name], now_s) for name in sorted(self._services)]

    def _standing(self, name: str, service: _ServiceController, now_s: float) -> ServiceControlStatus:
        slow, advice, state = calibration_factor(service.watch.correction, now_s), service.advice, service.watch.state
        live = None if advice is None else advice.live
        return ServiceControlStatus(
            name=name,
            at_s=service.window_s,
            live_s=None if live is None else live.value_s,
            model_s=None if advice is None else advice.model_s,
            factor=slow.value,
            factor_error=slow.error,
            is_profile_wrong=advice is not None and advice.is_profile_wrong,
            phase=state.phase,
            serving=state.ready,
            target=state.target,
            reason=service.decision.reason,
            reserve=decay_reserve(state.reserve, now_s).share,
        )

    def _due_instructions(self, name: str, service: _ServiceController, at_s: float) -> list[ScaleService]:
        """The Scale that is due: the target is another, or was said long ago and has not come."""
        target = service.decision.replicas
        repeated = service.watch.state.ready != target and at_s - service.said_s >= self._settings.repeat_s
        if target == service.told and not repeated:
            return []
        service.told, service.said_s = target, at_s
        return [ScaleService(name, target, service.decision.reason)]


_Made = Sequence[ControlInstruction] | str  # or why nothing was changed


class ObjectiveController:
    """One fleet's services and jobs."""

    def __init__(self, settings: ControlSettings | None = None) -> None:
        self.settings = settings or ControlSettings()
        self._now_s = -math.inf
        self._services = ServiceControllers(self.settings)
        self._jobs = PowerCapController(self.settings)
        self._ignored: Counter[str] = Counter()

    def handle_event(self, event: ControlEvent) -> list[ControlInstruction]:
        """What should be done after an event."""
        if not math.isfinite(event.at_s):
            self._ignored["a time that is none"] += 1
            return []
        self._now_s = max(self._now_s, event.at_s)
        made = self._dispatch(event)
        if isinstance(made, str):
            self._ignored[made] += 1
            made = []
        return [*made, *self._jobs.allocate_if_due(self._now_s)]

    def initial_limit_w(self, limits_w: Iterable[float], holdings: Iterable[Holding]) -> float | None:
        """The largest limit that a new job could begin with within the budgets; None where not even the least fits."""
        return self._jobs.initial_limit_w(limits_w, holdings)

    def limit_histories(self) -> dict[str, LimitHistory]:
        """What jobs whose search has settled did at each limit."""
        return {
            name: LimitHistory(tuple(arm for arm in job.search.arms if arm.windows), job.search.noise)
            for name, job in self._jobs.jobs.items()
            if job.decision.settled
        }

    def measured_estimates(self, name: str) -> tuple[LimitEstimate, ...]:
        """What a job and its former runs measured, limits falling; empty for a job that is not known."""
        job = self._jobs.jobs.get(name)
        return () if job is None else tuple(one for one in measured_estimates(job.search) if one is not None)

    def evaluate_budgets(self, budgets: BudgetTree, lowest: Mapping[str, tuple[str, ...]]) -> BudgetPreview:
        """The limits that jobs would have under other budgets; `lowest` names the nearest budget of each node.

        Changes nothing, and takes as long as a division does.
        """
        found = self._jobs.preview_budgets(self._now_s, budgets, lowest)
        jobs = []
        for name in sorted(self._jobs.jobs):
            curve, limit_w = self._jobs.jobs[name].curve, found.ceilings_w[name]
            assert limit_w is not None, "every job is given a limit"
            at = None if curve is None else curve.interpolate(min(max(limit_w, curve.limits_w[0]), curve.limits_w[-1]))
            jobs.append(
                PreviewedJob(
                    name,
                    limit_w,
                    None if at is None or curve is None else at.time_s / curve.largest.time_s - 1.0,
                    None if at is None or curve is None else 1.0 - at.energy_j / curve.largest.energy_j,
                )
            )
        return BudgetPreview(tuple(jobs), {name: (one.watts, one.reason) for name, one in found.shortfalls.items()})

    def controller_status(self) -> ControllerStatus:
        """How everything stands."""
        jobs, now_s = self._jobs, self._now_s
        return ControllerStatus(
            at_s=now_s,
            services=tuple(self._services.service_statuses(now_s)),
            jobs=tuple(self._job(jobs.jobs[name]) for name in sorted(jobs.jobs)),
            budgets=tuple(self._budgets()),
            price_per_j=jobs.prices.price_per_j(now_s) if math.isfinite(now_s) else None,
            price_weight=jobs.prices.price_weight(now_s) if math.isfinite(now_s) else 1.0,
            ignored=dict(sorted(self._ignored.items())),
        )

    def _dispatch(self, event: ControlEvent) -> _Made:
        """The part that an event is for."""
        match event:
            case ServiceStarted():
                if event.name in self._jobs.jobs:
                    return "a service with the name of a job"
                return self._services.start_service(event)
            case ServiceWindow():
                return self._services.add_window(event)
            case ServiceReady():
                return self._services.set_ready_replicas(event)
            case WorkloadEnded():
                return [] if self._services.end_service(event.name) else self._jobs.end_job(event.name)
            case ControlTick():
                return [*self._services.on_tick(self._now_s), *self._jobs.on_tick(self._now_s)]
            case _:
                return self._dispatch_job_event(event)

    def _dispatch_job_event(self, event: ControlEvent) -> _Made:
        jobs = self._jobs
        match event:
            case JobStarted():
                return "a job with the name of a service" if event.name in self._services else jobs.start_job(event)
            case JobMeasured():
                return jobs.add_window(event)
            case JobPredicted(_, name, prior):
                known = jobs.jobs.get(name)
                if known is None:
                    return "a prediction of what is not known"
                known.set_prior(prior)
                return []
            case JobMissed(at_s, name, reason):
                return jobs.add_missed_window(at_s, name, reason)
            case BudgetsSet(_, budgets):
                return jobs.set_budgets(self._now_s, budgets)
            case UncountedSet(_, watts):
                return jobs.set_uncounted(watts)
            case PricesSet(_, tariff):
                return jobs.set_tariff(self._now_s, tariff)
            case LimitConfirmed() | LimitFailed():
                return jobs.confirm_command(event)
            case AllocationSolved(at_s, number, shared):
                return jobs.apply_allocation(at_s, number, shared)
            case NodeUnreachable():
                return jobs.mark_node_lost(event)
            case NodeLeaseExpired():
                return jobs.mark_lease_ended(event)
            case NodeReachable():
                return jobs.mark_node_returned(event)
            case _:
                return "an event that is none"

    def _job(self, job: JobController) -> JobControlStatus:
        known = self._jobs.holding_statuses(job).values()
        limits_w = [one.limit_w for one in known]
        if any(one.lost for one in known):
            phase = LimitPhase.LOST
        elif job.pinned_w is not None:
            phase = LimitPhase.STUCK
        elif job.decision.why is PickReason.BLIND:
            phase = LimitPhase.BLIND
        else:
            phase = LimitPhase.SETTLED if job.decision.settled else LimitPhase.SEARCHING
        return JobControlStatus(
            name=job.began.name,
            phase=phase,
            limit_w=limits_w[0] if all(is_same_limit(limit_w, limits_w[0]) for limit_w in limits_w) else None,
            target_w=job.target_w,
            ceiling_w=job.ceiling_w,
            slowdown=job.slowdown(),
            earned_s=job.earned_s(),
            saving=job.saving(),
            reason=job.reason,
            back_w=job.reclaimable_w(),
        )

    def _budgets(self) -> Iterable[BudgetControlStatus]:
        jobs = self._jobs
        claims, lacks = jobs.changes.claims_w(), jobs.changes.shortfalls()
        for budget, room_w in zip(jobs.budgets.all, jobs.budgets.available_w(), strict=True):
            lack, short = lacks.get(budget.name, 0.0), jobs.shortfalls.get(budget.name)
            reason = "limits in force, and those that expiring leases restore, exceed the budget" if lack > 0.0 else ""
            if short is not None and short.watts >= lack:
                lack, reason = short.watts, short.reason
            yield BudgetControlStatus(budget.name, room_w, claims[budget.name], lack, reason, budget.other_w)


@dataclass(frozen=True, slots=True)
class ObjectivesStatus:
    """How everything stands, for operators."""

    steering: ControllerStatus
    services: dict[str, ServiceObservation] = field(default_factory=dict)
    unsteered: dict[str, str] = field(default_factory=dict)  # promised workloads that are not, and why
    bases: dict[str, str] = field(default_factory=dict)  # where what is known of a workload comes from
    advice: frozenset[str] = frozenset()  # workloads of which nothing is carried out: their pools are only observed


class CycleResult(NamedTuple):
    """What one cycle asks for."""

    scales: tuple[ScaleService, ...]
    limits: tuple[LimitChange, ...]
    asked: dict[str, ScrapeTarget]
    standing: ObjectivesStatus
    faults: tuple[tuple[str, Exception], ...]  # by workload; what was passed over
    points: tuple[MeasuredPoint, ...] = ()  # that windows taught
    division: SolveAllocation | None = None  # to be worked out apart
    answers: tuple[LimitConfirmed | LimitFailed, ...] = ()  # to limits, as the steering was told
    said: tuple[tuple[str, str], ...] = ()  # for the log, by workload
    worked: tuple[WorkInterval, ...] = ()  # by workloads, since the turn before
    progress: Mapping[str, ProgressReading] = MappingProxyType({})  # of jobs with an elastic deadline
    starts: tuple[MeasuredStart, ...] = ()  # of services' replicas


class ControlCycle:
    """Runs the objective controller on observations, one cycle at a time."""

    def __init__(
        self,
        settings: ObjectiveSettings,
        catalogue: Catalogue,
        *,
        foreseen: PredictedPlans | None = None,
    ) -> None:
        self.settings = settings
        self.steering = ObjectiveController(settings.steering)
        self._foreseen = foreseen or PredictedPlans()
        self._services = ServiceObserver(settings, self._foreseen)
        self._jobs = JobObserver(settings, catalogue)
        self._limits = PendingLimits(confirm_s=settings.confirm_s)
        self._watched = NodeLivenessTracker(grace_s=settings.away_grace_s)
        self._budgets: tuple[PowerBudgetNode, ...] = ()
        self._prices: EnergyPrices | None = None
        self._lessons = ProfileUpdates()
        self._keepsakes = JobHistories()
        self._elastic = ElasticObserver(horizon_s=settings.elastic_s)
        self._numbers: dict[int, str] = {}  # jobs of the numbers that are to be answered
        self._refused: list[LimitFailed] = []  # to be told in the next turn
        self._advised: dict[str, dict[str, SetPowerLimit]] = {}  # limits that wait for their pools, by job and holding

    def run_cycle(self, world: ClusterObservation) -> CycleResult:
        """One cycle."""
        faults: list[tuple[str, Exception]] = []
        told: list[tuple[str, str]] = []
        services = {name: one for name, one in world.workloads.items() if one.spec.service and not is_sliced(one)}
        jobs = {name: one for name, one in world.workloads.items() if one.spec.training is not None}
        earned = {job.name: job.earned_s or 0.0 for job in self.steering.controller_status().jobs}
        of_nodes = self._of_nodes(world)
        ending = self._jobs.end_missing(jobs, world)
        # First, so that nothing in this cycle raises a limit by watts that others may draw already.
        said = self._observe_nodes([self._of_uncounted(world, world.risen)])
        said += self._observe_nodes(of_nodes)
        said += self._observe_nodes(self._services.end_missing(services, world.at_s))
        self._lessons.end_runs(
            (one.name for one in ending if isinstance(one, WorkloadEnded)), world.at_s, self.steering.measured_estimates
        )
        said += self._observe_nodes(ending)
        said += self._observe_nodes(self._of_policy(world, faults))
        said += self._observe_nodes(AllocationSolved(world.at_s, number, shared) for number, shared in world.divided)
        for name, workload in services.items():
            try:
                said += self._observe_nodes(self._services.observe_service(name, workload, world))
            except Exception as error:  # noqa: BLE001  # one service's fault stops no other
                faults.append((name, error))
        for name, workload in jobs.items():
            try:
                events = self._jobs.observe_job(name, workload, world, earned.get(name, 0.0))
                events += self._of_predictions(name, world, events, told)
                said += self._observe_nodes(events)
            except Exception as error:  # noqa: BLE001
                faults.append((name, error))
        risen = world.risen if world.draws is None else ()
        said += self._observe_nodes([self._of_uncounted(world, risen), ControlTick(world.at_s)])
        advice = frozenset(name for name, one in world.workloads.items() if not allows_enforcement(world, one))
        scales = [one for one in said if isinstance(one, ScaleService) and one.name in services]
        scales += self._elastic.plan_resizes(jobs, world)
        limits = self._to_set([one for one in said if isinstance(one, SetPowerLimit)], advice)
        self._foreseen.retain(services, jobs)
        standing = self._standing(advice)
        told += self._foreseen.check_services(standing.steering.services, self._services.service_plans())
        return CycleResult(
            tuple(one for one in scales if one.name not in advice),
            limits,
            self._services.scrape_requests() | self._jobs.scrape_requests(),
            standing,
            tuple(faults),
            self._lessons.collect_points(jobs, world, self.steering.measured_estimates)
            + self._keepsakes.collect_points(self.steering.limit_histories(), jobs, world),
            next((one for one in reversed(said) if isinstance(one, SolveAllocation)), None),
            tuple(one for one in of_nodes if isinstance(one, LimitConfirmed | LimitFailed)),
            tuple(told),
            (*self._services.collect_work(), *self._jobs.collect_work()),
            self._jobs.collect_progress(),
            self._services.collect_starts(),
        )

    def record_request(self, limit: LimitChange, epochs: dict[str, int], at_s: float) -> None:
        """Records that a limit is in the journal; its nodes' plans have it from these epochs on."""
        self._jobs.restart_window(limit.name)
        for number, node, uuids in limit.numbers:
            self._limits.add_request(PendingLimit(number, node, uuids, limit.limit_w, epochs.get(node, 0), at_s))

    def record_refusal(self, limit: LimitChange, at_s: float) -> None:
        """Records that the core refused a limit, so that its GPUs keep what they had; reported with the next cycle."""
        self._refused += [LimitFailed(at_s, number, None) for number, _, _ in limit.numbers]

    @property
    def needs_related_points(self) -> bool:
        """Whether a job is to be taken up, which may learn from the points of other profiles."""
        return self._jobs.has_unstarted

    def unmanaged_reasons(self) -> dict[str, str]:
        """Workloads with a promise that are not managed, and why."""
        return self._services.unmanaged_reasons() | self._jobs.unmanaged_reasons()

    def evaluate_policy(
        self, policy: Policy, draws: Sequence[NodePowerDraw], workloads: Mapping[str, Workload]
    ) -> ImagineBudgetsResponse:
        """What jobs would have under a policy's budgets; nothing changes. Raises InvalidBudget."""
        begun, budgets = self._jobs.managed_jobs(), policy_budgets(policy, draws)
        lowest = {one.inventory.node_name: nearest_budgets(policy, one.inventory) for one in draws}
        found = self.steering.evaluate_budgets(budgets, lowest)
        claimed = {one.name: one.other_w for one in budgets.all}
        for job in found.jobs:
            for node, uuids in begun.get(job.name, {}).items():
                for place in budgets.chain_indices(lowest.get(node, ())):
                    claimed[budgets.all[place].name] += len(uuids) * job.limit_w
        return ImagineBudgetsResponse(
            jobs=tuple(_imagined_status(job, workloads[job.name]) for job in found.jobs if job.name in workloads),
            budgets=tuple(
                BudgetStatus(
                    budget=budget,
                    claimed_w=claimed[make_budget_key(budget.scope, budget.name)],
                    shortfall_w=found.shortfalls.get(make_budget_key(budget.scope, budget.name), (0.0, ""))[0],
                )
                for budget in policy.budgets
            ),
        )

    def _observe_nodes(self, events: Iterable[ControlEvent]) -> list[ControlInstruction]:
        return [instruction for event in events for instruction in self.steering.handle_event(event)]

    def _of_nodes(self, world: ClusterObservation) -> list[ControlEvent]:
        """Answers to limits, and nodes that went or came back."""
        seen: dict[str, NodeLiveness] = {}
        begun = self._jobs.managed_jobs()
        for job, uuids in begun.items():
            for name, held in uuids.items():
                limit_w = highest_limit_w(world, name, held)
                view, before = world.nodes.get(name), seen.get(name)
                known = {} if before is None else before.limits_w
                whole = None if known is None or limit_w is None else {**known, f"{job}/{name}": limit_w}
                seen[name] = NodeLiveness(view is not None and view.is_ready, whole)
        words = {
            name: NodeLimitReport(look.applied, look.limits_w, look.age_s)
            for name in self._limits.nodes
            if (look := world.looks.get(name)) is not None
        }
        answers: list[LimitConfirmed | LimitFailed] = [*self._refused, *self._limits.collect_answers(words, world.at_s)]
        self._refused = []
        for answer in answers:
            self._jobs.restart_window(self._numbers.pop(answer.number, ""))
        changes = self._watched.observe_nodes(seen, world.at_s, lease_s=world.policy.lease_s)
        for change in changes:
            if isinstance(change, NodeUnreachable):
                self._limits.forget_node(change.node)
        return [*answers, *changes]

    def _of_predictions(
        self, name: str, world: ClusterObservation, heard: Sequence[ControlEvent], told: list[tuple[str, str]]
    ) -> list[ControlEvent]:
        """A job's predicted curve, once; or that its prediction is wrong."""
        question = self._jobs.forecast_question(name)
        if question is None:
            return []
        made: list[ControlEvent] = []
        started = next((event for event in heard if isinstance(event, JobStarted)), None)
        prior = self._foreseen.predict_job(
            name,
            question,
            world.points.get(question.profile, ()),
            is_new=started is not None,
            is_resumed=started is not None and bool(started.shown.arms),
        )
        if prior is not None:
            made.append(JobPredicted(world.at_s, name, prior))
        for event in heard:
            if (
                isinstance(event, JobMeasured)
                and (words := self._foreseen.check_job_window(name, event.window)) is not None
            ):
                told.append((name, words))
                made.append(JobPredicted(world.at_s, name, None))
        return made

    def _of_uncounted(self, world: ClusterObservation, risen: Iterable[NodePowerDraw]) -> UncountedSet:
        """What others draw more than at the last sum, and what jobs may draw that are not managed yet."""
        places, watts = BudgetHierarchy(world.policy), dict[str, float]()
        for node in (*risen, *self._jobs.unstarted_draws(world)):
            for key in places.budgets_above(node.inventory):
                watts[key] = watts.get(key, 0.0) + node.other_w
        return UncountedSet(world.at_s, watts)

    def _of_policy(self, world: ClusterObservation, faults: list[tuple[str, Exception]]) -> list[ControlEvent]:
        """Budgets and prices where they are others than before."""
        made: list[ControlEvent] = []
        try:
            if world.draws is not None and (budgets := policy_budgets(world.policy, world.draws)).all != self._budgets:
                self._budgets = budgets.all
                made.append(BudgetsSet(world.at_s, budgets))
            if world.policy.prices != self._prices:
                tariff = policy_tariff(world.policy.prices)
                self._prices = world.policy.prices
                made.append(PricesSet(world.at_s, tariff))
        except ControllerError as error:
            faults.append(("policy", error))
        return made

    def _to_set(self, said: Iterable[SetPowerLimit], advice: frozenset[str]) -> tuple[LimitChange, ...]:
        """One command for each job; those of pools that are only observed are kept until they may be enforced."""
        begun = self._jobs.managed_jobs()
        self._advised = {job: kept for job, kept in self._advised.items() if job in begun}
        for one in said:
            self._advised.setdefault(one.job, {})[one.holding] = one
        made = []
        for job in [job for job in self._advised if job not in advice and job in begun]:
            wanted = list(self._advised.pop(job).values())
            last = wanted[-1]
            numbers = tuple((one.number, one.node, begun[job].get(one.node, ())) for one in wanted)
            self._numbers.update(dict.fromkeys((one.number for one in wanted), job))
            made.append(LimitChange(job, last.limit_w, last.reason, numbers))
        return tuple(made)

    def _standing(self, advice: frozenset[str]) -> ObjectivesStatus:
        bases = {name: one.basis for name, one in self._services.service_plans().items() if one.basis}
        return ObjectivesStatus(
            self.steering.controller_status(),
            self._services.observations(),
            self.unmanaged_reasons(),
            bases | self._foreseen.job_bases(),
            advice,
        )


_UNKNOWN = "its power curve is not known yet, nor what it would lose"


def _imagined_status(job: PreviewedJob, workload: Workload) -> JobStatus:
    return JobStatus(
        workload_id=job.name,
        name=workload.spec.name,
        phase="imagined",
        power_limit_w=job.limit_w,
        slowdown=job.slowdown,
        saving=job.saving,
        reason=_UNKNOWN if job.slowdown is None else "",
        is_advice=True,
    )
