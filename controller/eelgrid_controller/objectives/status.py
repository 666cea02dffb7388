"""Reports how promises are kept: status messages for operators and counters of attainment and commands."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from eelgrid_controller.objectives.control_cycle import ObjectivesStatus
from eelgrid_controller.objectives.power.control_events import (
    ControllerStatus,
    JobControlStatus,
    ServiceControlStatus,
)
from eelgrid_controller.objectives.service_observer import ServiceObservation
from eelgrid_controller.state.budget_power import NO_BUDGET_POWER, BudgetPower
from eelgrid_controller.state.policy import make_budget_key
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault
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


class AttainmentVerdict(Enum):
    """What a window says of a promise."""

    KEPT = "kept"
    MISSED = "missed"
    UNJUDGED = "unjudged"


def refusal_rule(error: Exception) -> str:
    """Which rule refused a command: its gRPC status, or a fault of ours."""
    if isinstance(error, Fault):
        return error.code.name.lower()
    return "invalid_argument" if isinstance(error, ContractError) else "internal"


class Attainment:
    """Windows of each service by verdict."""

    def __init__(self) -> None:
        self.total: Counter[AttainmentVerdict] = Counter()
        self._services: dict[str, Counter[AttainmentVerdict]] = {}
        self._heard_s: dict[str, float] = {}

    def window_counts(self, name: str) -> Mapping[AttainmentVerdict, int]:
        """A service's own."""
        return self._services.get(name, {})

    def count_windows(self, services: Iterable[ServiceControlStatus], objectives_s: Mapping[str, float]) -> None:
        """Counts each window once; services that are not there any more are forgotten."""
        known, heard_s = self._services, self._heard_s
        self._services, self._heard_s = {}, {}
        for one in services:
            counted = self._services[one.name] = known.get(one.name) or Counter()
            if one.at_s is None:
                continue
            self._heard_s[one.name] = one.at_s
            if heard_s.get(one.name) == one.at_s:
                continue
            objective_s = objectives_s.get(one.name, 0.0)
            verdict = AttainmentVerdict.UNJUDGED
            if one.live_s is not None and objective_s > 0.0:
                verdict = AttainmentVerdict.KEPT if one.live_s <= objective_s else AttainmentVerdict.MISSED
            counted[verdict] += 1
            self.total[verdict] += 1


@dataclass(slots=True)
class ControlCounts:
    """Since the start of this process."""

    faults: int = 0  # workloads that were passed over in a turn, for an error
    done: Counter[str] = field(default_factory=Counter)  # commands that were carried out
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # commands, by the rule that refused them
    answered: Counter[str] = field(default_factory=Counter)  # limits that nodes confirmed, or failed at
    attainment: Attainment = field(default_factory=Attainment)


_UNSTEERED = "unsteered"
_REASON_MOST = 1000
_NO_OBSERVATION = ServiceObservation()
_Status = TypeVar("_Status", ServiceStatus, JobStatus)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def objective_latency_s(promise: ServicePromise | None) -> float:
    """The latency that live quantiles are compared with: of the response, or of a token."""
    found = () if promise is None else promise.objectives
    watched = [one.latency_s for one in found if one.metric is not LatencyMetric.FIRST_TOKEN]
    return watched[0] if watched else 0.0


def _service(
    one: ServiceControlStatus, workload: Workload, seen: ServiceObservation, *, is_advice: bool
) -> ServiceStatus:
    promise = workload.spec.service
    load = None if promise is None else promise.load_target
    reason = f"{one.reason}; {seen.reason}" if seen.reason else one.reason
    if one.is_profile_wrong:
        reason = f"its profile is far off: measure it again; {reason}"
    return ServiceStatus(
        workload_id=one.name,
        name=workload.spec.name,
        replicas_serving=one.serving,
        replicas_wanted=one.target,
        phase=one.phase.value,
        arrived_hz=_finite(seen.arrived_hz),
        objective_s=objective_latency_s(promise),
        live_s=_finite(one.live_s),
        modelled_s=_finite(one.model_s),
        slowness=one.factor,
        slowness_error=0.0 if load is not None else _finite(one.factor_error) or 0.0,
        reason=reason[:_REASON_MOST],
        is_advice=is_advice,
        start_s=0.0 if seen.start is None else seen.start.seconds,
        is_start_measured=seen.start is not None and seen.start.is_measured,
        load_target=load,
    )


def _job(one: JobControlStatus, workload: Workload, *, is_advice: bool) -> JobStatus:
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


def _unmanaged_status(workload: Workload, reason: str) -> ServiceStatus | JobStatus:
    key, name, said = workload.workload_id, workload.spec.name, reason[:_REASON_MOST]
    if workload.spec.service is None:
        return JobStatus(workload_id=key, name=name, phase=_UNSTEERED, reason=said)
    placed = len(workload.placements)
    return ServiceStatus(
        workload_id=key,
        name=name,
        phase=_UNSTEERED,
        reason=said,
        replicas_serving=placed,
        replicas_wanted=placed,
        objective_s=objective_latency_s(workload.spec.service),
        load_target=workload.spec.service.load_target,
    )


def _reason_text(status: _Status, basis: str) -> _Status:
    """With where its numbers come from."""
    return replace(status, reason=f"{status.reason}; {basis}"[:_REASON_MOST]) if basis else status


def budget_statuses(
    steering: ControllerStatus, policy: Policy, measured: Mapping[str, BudgetPower]
) -> tuple[BudgetStatus, ...]:
    """How the policy's budgets stand, in its order: the one source of what is measured, claimed and short of each."""
    known = {one.name: one for one in steering.budgets}
    found = []
    for budget in policy.budgets:
        key = make_budget_key(budget.scope, budget.name)
        steered, read = known.get(key), measured.get(key, NO_BUDGET_POWER)
        found.append(
            BudgetStatus(
                budget=budget,
                # What is not steered draws from the budget, too.
                claimed_w=0.0 if steered is None else steered.claim_w + steered.other_w,
                shortfall_w=0.0 if steered is None else steered.shortfall_w,
                **read._asdict(),
            )
        )
    return tuple(found)


def promise_statuses(
    standing: ObjectivesStatus,
    workloads: Mapping[str, Workload],
    policy: Policy,
    measured: Mapping[str, BudgetPower],
) -> ListPromisesResponse:
    """How all promises stand; what ended since is left out. `measured` is the power of each budget."""
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
        _service(one, running[one.name], standing.services.get(one.name, _NO_OBSERVATION), is_advice=one.name in advice)
        for one in steering.services
        if one.name in running
    ]
    jobs = [_job(one, running[one.name], is_advice=one.name in advice) for one in steering.jobs if one.name in running]
    for name, reason in standing.unsteered.items():
        if name in running:
            left = _unmanaged_status(running[name], reason)
            if isinstance(left, ServiceStatus):
                services.append(left)
            else:
                jobs.append(left)
    services = [_reason_text(one, standing.bases.get(one.workload_id, "")) for one in services]
    jobs = [_reason_text(one, standing.bases.get(one.workload_id, "")) for one in jobs]
    return ListPromisesResponse(
        services=tuple(sorted(services, key=lambda one: one.workload_id)),
        jobs=tuple(sorted(jobs, key=lambda one: one.workload_id)),
        budgets=budget_statuses(steering, policy, measured),
        price_ratio=max(0.0, steering.price_weight),
    )
