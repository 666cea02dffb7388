"""How promises are kept, as operators are told it.

Owns the translation of the steward's standing into the contract's words. Must not know
how it came to be.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from eelgrid_controller.budget_places import budget_name
from eelgrid_controller.steering.standing import BudgetStanding, JobStanding, ServiceStanding
from eelgrid_controller.steward.desk import StewardStanding
from eelgrid_controller.steward.service_desk import ServiceSeen
from eelgrid_protos.messages import (
    BudgetStatus,
    JobStatus,
    LatencyMetric,
    ListPromisesResponse,
    Policy,
    ServicePromise,
    ServiceStatus,
    Workload,
    WorkloadPhase,
)

__all__ = ["objective_s", "promises_of"]

_UNSTEERED = "unsteered"
_REASON_MOST = 1000
_NOTHING_SEEN = ServiceSeen()
_Status = TypeVar("_Status", ServiceStatus, JobStatus)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def objective_s(promise: ServicePromise | None) -> float:
    """The latency that live quantiles are compared with: of the response, or of a token."""
    found = () if promise is None else promise.objectives
    watched = [one.latency_s for one in found if one.metric is not LatencyMetric.FIRST_TOKEN]
    return watched[0] if watched else 0.0


def _service(one: ServiceStanding, workload: Workload, seen: ServiceSeen, *, is_advice: bool) -> ServiceStatus:
    reason = f"{one.reason}; {seen.reason}" if seen.reason else one.reason
    if one.is_profile_wrong:
        reason = f"its profile is far off, measure it anew; {reason}"
    return ServiceStatus(
        workload_id=one.name,
        name=workload.spec.name,
        replicas_serving=one.serving,
        replicas_wanted=one.target,
        phase=one.phase.value,
        arrived_hz=_finite(seen.arrived_hz),
        objective_s=objective_s(workload.spec.service),
        live_s=_finite(one.live_s),
        modelled_s=_finite(one.model_s),
        slowness=one.factor,
        slowness_error=_finite(one.factor_error) or 0.0,
        reason=reason[:_REASON_MOST],
        is_advice=is_advice,
    )


def _job(one: JobStanding, workload: Workload, *, is_advice: bool) -> JobStatus:
    return JobStatus(
        workload_id=one.name,
        name=workload.spec.name,
        phase=one.phase.value,
        power_limit_w=one.target_w if is_advice else one.limit_w,
        slowdown=_finite(one.slowdown),
        saving=_finite(one.saving),
        reason=one.reason[:_REASON_MOST],
        is_advice=is_advice,
    )


def _unsteered(workload: Workload, reason: str) -> ServiceStatus | JobStatus:
    key, name, said = workload.workload_id, workload.spec.name, reason[:_REASON_MOST]
    if workload.spec.service is None:
        return JobStatus(workload_id=key, name=name, phase=_UNSTEERED, reason=said)
    placed = len(workload.placements)
    return ServiceStatus(
        workload_id=key, name=name, phase=_UNSTEERED, reason=said, replicas_serving=placed, replicas_wanted=placed,
        objective_s=objective_s(workload.spec.service),
    )  # fmt: skip


def _told(status: _Status, basis: str) -> _Status:
    """With where its numbers come from."""
    return replace(status, reason=f"{status.reason}; {basis}"[:_REASON_MOST]) if basis else status


def promises_of(standing: StewardStanding, workloads: Mapping[str, Workload], policy: Policy) -> ListPromisesResponse:
    """How all promises stand; what ended since is left out."""
    steering, advice = standing.steering, standing.advice
    told = [
        *(service.name for service in steering.services),
        *(job.name for job in steering.jobs),
        *standing.unsteered,
    ]
    running = {
        name: workloads[name] for name in told if name in workloads and workloads[name].phase is WorkloadPhase.PLACED
    }
    services = [
        _service(one, running[one.name], standing.services.get(one.name, _NOTHING_SEEN), is_advice=one.name in advice)
        for one in steering.services
        if one.name in running
    ]
    jobs = [_job(one, running[one.name], is_advice=one.name in advice) for one in steering.jobs if one.name in running]
    for name, reason in standing.unsteered.items():
        if name in running:
            left = _unsteered(running[name], reason)
            if isinstance(left, ServiceStatus):
                services.append(left)
            else:
                jobs.append(left)
    services = [_told(one, standing.bases.get(one.workload_id, "")) for one in services]
    jobs = [_told(one, standing.bases.get(one.workload_id, "")) for one in jobs]
    known: Mapping[str, BudgetStanding] = {one.name: one for one in steering.budgets}
    budgets = [
        BudgetStatus(
            budget=budget,
            claimed_w=0.0 if found is None else found.claim_w,
            shortfall_w=0.0 if found is None else found.shortfall_w,
        )
        for budget in policy.budgets
        for found in (known.get(budget_name(budget.scope, budget.name)),)
    ]
    return ListPromisesResponse(
        services=tuple(sorted(services, key=lambda one: one.workload_id)),
        jobs=tuple(sorted(jobs, key=lambda one: one.workload_id)),
        budgets=tuple(budgets),
        price_ratio=max(0.0, steering.price_weight),
    )
