"""The objective controller: handles events of services and jobs and returns scaling and power-limit instructions.

Synchronous, deterministic and bounded. Scaling instructions are repeated while the ready replicas differ
from the target, because an instruction may have been lost.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.objectives.power.bandit import PickReason
from eelgrid_controller.objectives.power.budget_allocation import is_same_limit
from eelgrid_controller.objectives.power.budgets import BudgetTree
from eelgrid_controller.objectives.power.control_events import (
    AllocationSolved,
    BudgetControlStatus,
    BudgetPreview,
    BudgetsSet,
    ControlEvent,
    ControlInstruction,
    ControllerStatus,
    ControlNodeLeaseEnded,
    ControlNodeLost,
    ControlNodeReturned,
    ControlTick,
    JobControlStatus,
    JobMeasured,
    JobMissed,
    JobPredicted,
    JobStarted,
    LimitConfirmed,
    LimitFailed,
    LimitPhase,
    PreviewedJob,
    PricesSet,
    ScaleService,
    ServiceControlStatus,
    ServiceReady,
    ServiceStarted,
    ServiceWindow,
    WorkloadEnded,
)
from eelgrid_controller.objectives.power.estimates import LimitHistory
from eelgrid_controller.objectives.power.job_controller import JobController
from eelgrid_controller.objectives.power.limit_rollout import Holding
from eelgrid_controller.objectives.power.power_cap_controller import PowerCapController
from eelgrid_controller.objectives.power.settings import ControlSettings
from eelgrid_controller.objectives.services.autoscaler import (
    AutoscalerAdvice,
    AutoscalerState,
    AutoscalerTarget,
    ReplicaDecision,
    on_ready_replicas,
    on_tick,
    on_window,
    start_autoscaler,
)
from eelgrid_controller.objectives.services.calibration import calibration_factor


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
    """All services, by name. Methods answer with what to say, or why the event changes nothing."""

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
            # A correction is of a profile; a new profile has none yet.
            same = known.promised.model == event.promised.model
            watch = replace(known.watch, state=replace(state, target=target))
            known.watch = watch if same else AutoscalerState(watch.state)
            known.promised = event.promised
            known.decision = ReplicaDecision(target, "it promises something else now")
            return self._due_instructions(event.name, known, event.at_s)
        if event.replicas < 0 or len(self._services) >= self._settings.services_most:
            return "more services than are steered, or impossible replicas"
        watch = start_autoscaler(event.promised, event.replicas)
        reason = "as it was found" if watch.state.target == event.replicas else "its least or most"
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
            case PricesSet(_, tariff):
                return jobs.set_tariff(self._now_s, tariff)
            case LimitConfirmed(at_s, number, limit_w):
                return jobs.confirm_command(at_s, number, limit_w, done=True)
            case LimitFailed(at_s, number, limit_w):
                return jobs.confirm_command(at_s, number, limit_w, done=False)
            case AllocationSolved(at_s, number, shared):
                return jobs.apply_allocation(at_s, number, shared)
            case ControlNodeLost(_, node):
                return jobs.mark_node_lost(node)
            case ControlNodeLeaseEnded(at_s, node):
                return jobs.mark_lease_ended(at_s, node)
            case ControlNodeReturned(at_s, node, limits_w):
                return jobs.mark_node_returned(at_s, node, limits_w)
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
            reason = "claims, and limits that leases will put back, are more" if lack > 0.0 else ""
            if short is not None and short.watts >= lack:
                lack, reason = short.watts, short.reason
            yield BudgetControlStatus(budget.name, room_w, claims[budget.name], lack, reason, budget.other_w)
