"""Steering: events of a fleet in, instructions out.

Owns which part an event goes to, and what is counted as ignored. Must not know how
services scale, jobs search or watts are shared: its parts do.

Synchronous, deterministic and bounded: the same events give the same instructions.
Nothing is raised for an event that is old, unknown, twice or impossible.

A steering that is made in the middle of life is told budgets and prices first, then what
there is: services with their replicas, jobs with the limits that were read back. It takes
nothing away before it has measured.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from eelgrid_controller.power.budgets import Budgets
from eelgrid_controller.power.changes import Holding
from eelgrid_controller.power.evidence import Shown
from eelgrid_controller.power.picking import Why
from eelgrid_controller.steering.events import (
    BudgetsSet,
    Divided,
    Ended,
    Event,
    Instruction,
    JobBegan,
    JobForeseen,
    JobMeasured,
    JobMissed,
    LimitConfirmed,
    LimitFailed,
    NodeBack,
    NodeLeaseEnded,
    NodeLost,
    PricesSet,
    ServiceBegan,
    ServiceServing,
    ServiceWindow,
    Ticked,
)  # fmt: skip
from eelgrid_controller.steering.jobs import Job
from eelgrid_controller.steering.limits import Jobs
from eelgrid_controller.steering.services import Services
from eelgrid_controller.steering.settings import Settings
from eelgrid_controller.steering.standing import (
    BudgetStanding,
    Imagined,
    ImaginedJob,
    JobPhase,
    JobStanding,
    Standing,
)
from eelgrid_controller.steering.wishes import same_w

__all__ = ["Steering"]

_Made = Sequence[Instruction] | str  # or why nothing was changed


class Steering:
    """One fleet's services and jobs."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._now_s = -math.inf
        self._services = Services(self.settings)
        self._jobs = Jobs(self.settings)
        self._ignored: Counter[str] = Counter()

    def on(self, event: Event) -> list[Instruction]:
        """What should be done after an event."""
        if not math.isfinite(event.at_s):
            self._ignored["a time that is none"] += 1
            return []
        self._now_s = max(self._now_s, event.at_s)
        made = self._told(event)
        if isinstance(made, str):
            self._ignored[made] += 1
            made = []
        return [*made, *self._jobs.shared(self._now_s)]

    def opening_w(self, limits_w: Iterable[float], holdings: Iterable[Holding]) -> float | None:
        """The largest limit that a new job could begin with within the budgets; None where not even the least fits."""
        return self._jobs.opening_w(limits_w, holdings)

    def shown(self) -> dict[str, Shown]:
        """What jobs whose search has settled did at each limit."""
        return {
            name: Shown(tuple(arm for arm in job.search.arms if arm.windows), job.search.noise)
            for name, job in self._jobs.jobs.items()
            if job.decision.settled
        }

    def imagined(self, budgets: Budgets, lowest: Mapping[str, tuple[str, ...]]) -> Imagined:
        """The limits that jobs would have under other budgets; `lowest` names the nearest budget of each node.

        Changes nothing, and takes as long as a division does.
        """
        found = self._jobs.imagined(self._now_s, budgets, lowest)
        jobs = []
        for name in sorted(self._jobs.jobs):
            curve, limit_w = self._jobs.jobs[name].curve, found.ceilings_w[name]
            assert limit_w is not None, "every job is given a limit"
            at = None if curve is None else curve.at(min(max(limit_w, curve.limits_w[0]), curve.limits_w[-1]))
            jobs.append(
                ImaginedJob(
                    name,
                    limit_w,
                    None if at is None or curve is None else at.time_s / curve.largest.time_s - 1.0,
                    None if at is None or curve is None else 1.0 - at.energy_j / curve.largest.energy_j,
                )
            )
        return Imagined(tuple(jobs), {name: (one.watts, one.reason) for name, one in found.shortfalls.items()})

    def standing(self) -> Standing:
        """How everything stands."""
        jobs, now_s = self._jobs, self._now_s
        return Standing(
            at_s=now_s,
            services=tuple(self._services.standing(now_s)),
            jobs=tuple(self._job(jobs.jobs[name]) for name in sorted(jobs.jobs)),
            budgets=tuple(self._budgets()),
            price_per_j=jobs.prices.per_j(now_s) if math.isfinite(now_s) else None,
            price_weight=jobs.prices.weight(now_s) if math.isfinite(now_s) else 1.0,
            ignored=dict(sorted(self._ignored.items())),
        )

    def _told(self, event: Event) -> _Made:
        """The part that an event is for."""
        match event:
            case ServiceBegan():
                if event.name in self._jobs.jobs:
                    return "a service with the name of a job"
                return self._services.began(event)
            case ServiceWindow():
                return self._services.window(event)
            case ServiceServing():
                return self._services.serving(event)
            case Ended():
                return [] if self._services.ended(event.name) else self._jobs.ended(event.name)
            case Ticked():
                return [*self._services.ticked(self._now_s), *self._jobs.ticked(self._now_s)]
            case _:
                return self._told_of_jobs(event)

    def _told_of_jobs(self, event: Event) -> _Made:
        jobs = self._jobs
        match event:
            case JobBegan():
                return "a job with the name of a service" if event.name in self._services else jobs.began(event)
            case JobMeasured():
                return jobs.measured(event)
            case JobForeseen(_, name, prior):
                known = jobs.jobs.get(name)
                if known is None:
                    return "a prediction of what is not known"
                known.foreseen(prior)
                return []
            case JobMissed(at_s, name, reason):
                return jobs.missed(at_s, name, reason)
            case BudgetsSet(_, budgets):
                return jobs.rebudgeted(self._now_s, budgets)
            case PricesSet(_, tariff):
                return jobs.repriced(self._now_s, tariff)
            case LimitConfirmed(at_s, number, limit_w):
                return jobs.answered(at_s, number, limit_w, done=True)
            case LimitFailed(at_s, number, limit_w):
                return jobs.answered(at_s, number, limit_w, done=False)
            case Divided(at_s, number, shared):
                return jobs.divided(at_s, number, shared)
            case NodeLost(_, node):
                return jobs.node_lost(node)
            case NodeLeaseEnded(at_s, node):
                return jobs.lease_ended(at_s, node)
            case NodeBack(at_s, node, limits_w):
                return jobs.node_back(at_s, node, limits_w)
            case _:
                return "an event that is none"

    def _job(self, job: Job) -> JobStanding:
        known = self._jobs.known(job).values()
        limits_w = [one.limit_w for one in known]
        if any(one.lost for one in known):
            phase = JobPhase.LOST
        elif job.pinned_w is not None:
            phase = JobPhase.STUCK
        elif job.decision.why is Why.BLIND:
            phase = JobPhase.BLIND
        else:
            phase = JobPhase.SETTLED if job.decision.settled else JobPhase.SEARCHING
        return JobStanding(
            name=job.began.name,
            phase=phase,
            limit_w=limits_w[0] if all(same_w(limit_w, limits_w[0]) for limit_w in limits_w) else None,
            target_w=job.target_w,
            ceiling_w=job.ceiling_w,
            slowdown=job.slowdown(),
            earned_s=job.earned_s(),
            saving=job.saving(),
            reason=job.reason,
            back_w=job.back_w(),
        )

    def _budgets(self) -> Iterable[BudgetStanding]:
        jobs = self._jobs
        claims, lacks = jobs.changes.claims_w(), jobs.changes.shortfalls()
        for budget, room_w in zip(jobs.budgets.all, jobs.budgets.room_w(), strict=True):
            lack, short = lacks.get(budget.name, 0.0), jobs.shortfalls.get(budget.name)
            reason = "claims, and limits that leases will put back, are more" if lack > 0.0 else ""
            if short is not None and short.watts >= lack:
                lack, reason = short.watts, short.reason
            yield BudgetStanding(budget.name, room_w, claims[budget.name], lack, reason, budget.other_w)
