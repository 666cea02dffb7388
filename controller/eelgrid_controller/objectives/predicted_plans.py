"""Plans services and jobs from conservative predictions, or from former runs, until observations contradict them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from eelgrid_controller.objectives.forecasts import (
    ConservativePoint,
    ForecastQuestion,
    JobQuestion,
    ProfileForecast,
    ServiceQuestion,
)
from eelgrid_controller.objectives.job_history import former_curve
from eelgrid_controller.objectives.power.control_events import ServiceControlStatus
from eelgrid_controller.objectives.power.estimates import RUNS_DIFFER, LimitPrior, LimitRatio, MeasurementWindow
from eelgrid_controller.objectives.promises import matches_workload, related_curves, slowest_gpu_model
from eelgrid_controller.profiles.points import Point
from eelgrid_protos.messages import LatencyMetric, ServicePromise, Workload
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

CURVE_POINTS = 3  # points of a service with a promise on tokens, from which on nothing is predicted
OUTSIDE_WINDOWS = 8  # windows in a row
_NORMAL_90 = 1.6448536269514722
_FLOOR = 0.02  # scatter of a ratio beside what a model knows
_HAIR = 0.03  # of a window's time, beside the interval
_WITHDRAWN_MOST = 4096


class ForecastSource(Protocol):
    """What is needed of forecasts."""

    def request_forecast(self, question: ForecastQuestion) -> ProfileForecast | None:
        """The newest answer; None until there is one."""


class ServicePlan(NamedTuple):
    """What a service is planned with."""

    points: tuple[Point, ...]
    basis: str = ""  # where the numbers come from; empty where nothing can be planned
    why_none: str = ""  # why there is no prediction where one is needed
    in_use: ServiceQuestion | None = None  # the prediction that the plan rests on, while it stands
    fastest: float = 1.0  # factor at the favourable end of its interval


@dataclass(slots=True)
class _ServiceCheck:
    """A service's windows against its interval."""

    in_use: ServiceQuestion
    at_s: float | None = None
    outside: int = 0


@dataclass(slots=True)
class _JobCheck:
    """A job's prediction, and its windows against it."""

    question: JobQuestion
    expected: LimitPrior | None = None  # scatters without what two runs may differ by
    basis: str = ""
    is_over: bool = False  # nothing is to be predicted, or no longer
    work: float = 0.0  # at the largest limit
    time_s: float = 0.0
    outside: int = 0


@dataclass(slots=True)
class PredictedPlans:
    """Plans from predictions, and what became of them; used from the thread of the control cycle."""

    forecasts: ForecastSource | None = None
    _withdrawn: dict[ServiceQuestion, float] = field(default_factory=dict)  # factor of what was served
    _services: dict[str, _ServiceCheck] = field(default_factory=dict)
    _jobs: dict[str, _JobCheck] = field(default_factory=dict)

    def plan_service(
        self, name: str, workload: Workload, models: Iterable[str], points: tuple[Point, ...]
    ) -> ServicePlan:
        """The points that a service is planned with: its measured ones, and predicted ones where these lack."""
        promise, on = workload.spec.service, sorted(set(models))
        assert promise is not None, "only services with a promise are planned"
        made: dict[str, tuple[ServiceQuestion, tuple[ConservativePoint, ...], int]] = {}
        why_none = ""
        for model in on:
            mine = [point for point in points if matches_workload(point.configuration, model, workload)]
            if self.forecasts is None or not points or len(mine) >= _enough(promise) or not _is_whole(workload):
                continue
            request = workload.spec.request
            question = ServiceQuestion(promise.profile, model, request.gpu_count, workload.power_limit_w)
            found = self.forecasts.request_forecast(question)
            if found is None:
                why_none = "a prediction is being made"
            elif found.points:
                made[model] = question, found.points, found.learned_from
            else:
                why_none = f"no prediction: {found.why_none}"
        scaled = (_scale_point(one, self._withdrawn.get(question)) for question, of, _ in made.values() for one in of)
        whole = (*points, *scaled)
        stands = slowest_gpu_model(workload, on, whole)
        planned = self._build_plan(promise, whole, stands, made)._replace(why_none=why_none)
        if planned.in_use is None:
            self._services.pop(name, None)
        elif name not in self._services or self._services[name].in_use != planned.in_use:
            self._services[name] = _ServiceCheck(planned.in_use)
        return planned

    def _build_plan(
        self,
        promise: ServicePromise,
        points: tuple[Point, ...],
        stands: tuple[str, tuple[Point, ...]] | None,
        made: Mapping[str, tuple[ServiceQuestion, tuple[ConservativePoint, ...], int]],
    ) -> ServicePlan:
        if stands is None:
            return ServicePlan(points)
        model, of = stands
        if model not in made:
            return ServicePlan(points, f"measured on {model}")
        question, predicted, count = made[model]
        before = f"measured on {model}, and " if len(of) > len(predicted) else ""
        factor = self._withdrawn.get(question)
        if factor is not None:
            said = (
                f"{before}its prediction for {model} is withdrawn: what was served is {factor:.2f} times as slow as its "
                f"conservative estimate, outside the 90 % interval {OUTSIDE_WINDOWS} windows in a row; planned from what was served "
                "until it is measured there"
            )
            return ServicePlan(points, said)
        said = f"{before}predicted for {model} from {count} points: {_describe_prediction(predicted[-1], promise)}"
        return ServicePlan(points, said, "", question, min(map(_fastest, predicted)))

    def check_services(
        self, standings: Iterable[ServiceControlStatus], planned: Mapping[str, ServicePlan]
    ) -> list[tuple[str, str]]:
        """What is said of services whose predictions are withdrawn now, after their windows."""
        said = []
        for one in standings:
            seen, plan = self._services.get(one.name), planned.get(one.name)
            if seen is None or plan is None or plan.in_use != seen.in_use or one.at_s in (None, seen.at_s):
                continue
            seen.at_s = one.at_s
            low, high = one.factor * (1.0 - one.factor_error), one.factor * (1.0 + one.factor_error)
            seen.outside = 0 if low <= 1.0 and high >= plan.fastest else seen.outside + 1
            if seen.outside < OUTSIDE_WINDOWS:
                continue
            if len(self._withdrawn) >= _WITHDRAWN_MOST:
                del self._withdrawn[next(iter(self._withdrawn))]
            self._withdrawn[seen.in_use] = one.factor
            del self._services[one.name]
            said.append((one.name, f"prediction=withdrawn factor={one.factor:.2f} fastest={plan.fastest:.2f}"))
        return said

    # Jobs

    def predict_job(
        self, name: str, question: JobQuestion, own: Iterable[Point], *, is_new: bool = False, is_resumed: bool = False
    ) -> LimitPrior | None:
        """The prior that a managed job gets now; None where there is none, or not yet.

        own: points of its profile; is_new: it begins, or begins anew; is_resumed: with windows of its own from before.
        """
        known = self._jobs.get(name)
        if known is None or known.question != question or (is_new and not known.is_over):
            known = self._jobs[name] = _JobCheck(question)
            if is_resumed:
                known.is_over, known.basis = True, "it goes on from what it measured itself"
            elif (former := former_curve(own, question)) is not None:
                known.expected = former
                known.basis = f"measured on former runs: {_describe_limits(former, question.limits_w)}"
                return _add_scatter(former, RUNS_DIFFER)
            elif related_curves(own, question.gpu_model):
                known.is_over, known.basis = True, "its curve was measured before"
        if known.is_over or known.expected is not None or self.forecasts is None or not question.profile:
            return None
        found = self.forecasts.request_forecast(question)
        if found is None or found.bend is None:
            return None
        known.expected = LimitPrior(
            tuple(LimitRatio(one.mean, one.half / _NORMAL_90) for one in found.bend.time),
            tuple(LimitRatio(one.mean, one.half / _NORMAL_90) for one in found.bend.energy),
        )
        known.basis = (
            f"predicted from {found.learned_from} points before it was measured: "
            f"{_describe_limits(known.expected, question.limits_w)}"
        )
        return _add_scatter(known.expected, _FLOOR)

    def check_job_window(self, name: str, window: MeasurementWindow) -> str | None:
        """The log text where this window withdraws a job's prediction, which the controller has to hear, too; else None."""
        known = self._jobs.get(name)
        if known is None or known.expected is None or known.is_over or not (window.work > 0.0 and window.time_s > 0.0):
            return None
        limits_w = known.question.limits_w
        place = min(range(len(limits_w)), key=lambda index: abs(limits_w[index] - window.limit_w))
        if place == 0:
            known.work, known.time_s = known.work + window.work, known.time_s + window.time_s
            return None
        expected = known.expected.time[place]
        if known.work <= 0.0 or expected is None:
            return None
        off = abs(math.log(window.time_s / window.work * known.work / known.time_s) - expected.mean)
        known.outside = 0 if off <= _NORMAL_90 * expected.scatter + _HAIR else known.outside + 1
        if known.outside < OUTSIDE_WINDOWS:
            return None
        known.is_over = True
        known.basis = (
            f"its prediction is withdrawn: its windows were outside the 90 % interval {OUTSIDE_WINDOWS} times in a row; "
            "what they measured stands"
        )
        return f"prediction=withdrawn limit_w={window.limit_w:g}"

    def retain(self, services: Iterable[str], jobs: Iterable[str]) -> None:
        """Forgets all but these."""
        for name in self._services.keys() - set(services):
            del self._services[name]
        for name in self._jobs.keys() - set(jobs):
            del self._jobs[name]

    def job_bases(self) -> dict[str, str]:
        """Where what is known of each job comes from."""
        return {name: one.basis for name, one in self._jobs.items() if one.basis}


def _enough(promise: ServicePromise) -> int:
    """Points of a GPU model that a service needs."""
    return 1 if any(one.metric is LatencyMetric.RESPONSE for one in promise.objectives) else CURVE_POINTS


def _is_whole(workload: Workload) -> bool:
    return workload.spec.request.gpu_milli == GPU_MILLI_WHOLE


def _scale_point(one: ConservativePoint, factor: float | None) -> Point:
    """The point on the safe side; once withdrawn as slow as what was served."""
    if factor is None:
        return one.point
    return replace(
        one.point,
        throughput_hz=one.point.throughput_hz / factor,
        latency_s={quantile: factor * value for quantile, value in one.point.latency_s.items()},
        source="predicted, scaled to what was served",
    )


def _fastest(one: ConservativePoint) -> float:
    """Slowness at the favourable end, over that on the safe side."""
    return min(span.lower / span.upper for span in (one.throughput_hz, *one.latency_s.values()))


def _describe_prediction(one: ConservativePoint, promise: ServicePromise) -> str:
    """The prediction at its most sequences or batch, where its capacity is."""
    rate = one.throughput_hz
    said = f"{_number(rate.median)}/s, 90 % within {_number(rate.lower)} to {_number(rate.upper)}"
    wanted = [each.quantile for each in promise.objectives if each.metric is not LatencyMetric.FIRST_TOKEN]
    nearest = min(one.latency_s, key=lambda quantile: abs(quantile - wanted[0])) if wanted else 0.0
    if nearest:
        middle, low, high = (1e3 * value for value in one.latency_s[nearest][:3])
        said += f"; p{100 * nearest:g} {_number(middle)} ms, 90 % within {_number(low)} to {_number(high)}"
    return f"{said} at batch {one.point.configuration.batch}"


def _add_scatter(prior: LimitPrior, scatter: float) -> LimitPrior:
    """The prior with ratios that may differ by so much more."""

    def widen(of: Iterable[LimitRatio | None]) -> tuple[LimitRatio | None, ...]:
        return tuple(None if one is None else LimitRatio(one.mean, math.hypot(one.scatter, scatter)) for one in of)

    return LimitPrior(widen(prior.time), widen(prior.energy), prior.is_measured)


def _describe_limits(prior: LimitPrior, limits_w: Sequence[float]) -> str:
    """What the lowest limit costs that anything is known of."""
    place = max(place for place, one in enumerate(prior.time) if one is not None)
    most = prior.time[place]
    assert most is not None, "it was chosen so"
    half = _NORMAL_90 * most.scatter
    return (
        f"{limits_w[place]:g} W costs {_percent(most.mean)} of time, 90 % within {_percent(max(0.0, most.mean - half))} to "
        f"{_percent(most.mean + half)}"
    )


def _number(value: float) -> str:
    """Three digits, and whole numbers above them."""
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def _percent(log_ratio: float) -> str:
    return f"{100.0 * math.expm1(log_ratio):+.1f} %"
