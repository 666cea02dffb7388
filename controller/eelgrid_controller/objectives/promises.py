"""Translates promises, placements and profile points into autoscaler targets and power-controller inputs.

When it cannot, it returns the reason and the remedy. Mixed replicas are modelled by their slowest GPU model.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.objectives.observation import ObjectiveSettings
from eelgrid_controller.objectives.power.budgets import Holding
from eelgrid_controller.objectives.power.power_model import (
    BestEffort,
    Deadline,
    MaxSlowdown,
    PowerCurve,
    PowerPlanError,
    TrainingPromise,
    fit_power_curve,
    is_same_limit,
)
from eelgrid_controller.objectives.services.autoscaler import AutoscalerTarget, ScalingLimits
from eelgrid_controller.objectives.services.service_metrics import (
    ServerNames,
    generic_names,
    server_metric_names,
)
from eelgrid_controller.objectives.services.service_model import (
    LoadService,
    RequestService,
    TokenDemand,
    TokenService,
    token_curve,
)
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.profiles.queueing_model import UNCORRECTED, QuantileObjective, station_from_point
from eelgrid_controller.state.engine_reports import ReplicaBounds
from eelgrid_protos.messages import (
    LatencyMetric,
    LatencyObjective,
    MetricsServer,
    MetricsSource,
    ServicePromise,
    Workload,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

_RELATIVES_MOST = 256


def gpus_by_node(workload: Workload) -> dict[str, tuple[str, ...]]:
    """The GPUs of a job on each of its nodes, by UUID; in order of nodes."""
    found: dict[str, list[str]] = {}
    for placement in workload.placements:
        found.setdefault(placement.node_name, []).extend(placement.gpu_uuids)
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def job_holdings(
    workload: Workload, restored_w: Mapping[str, float], budgets: Mapping[str, tuple[str, ...]]
) -> tuple[Holding, ...]:
    """One for each node; `restored_w` is the sum of the defaults of its GPUs there, `budgets` the lowest by node."""
    return tuple(
        Holding(f"{workload.workload_id}/{node}", node, len(uuids), budgets.get(node, ()), restored_w.get(node))
        for node, uuids in gpus_by_node(workload).items()
    )


def job_promise(workload: Workload) -> TrainingPromise:
    """The promise as the power planner has it; a deadline counts from when the job was placed."""
    training = workload.spec.training
    assert training is not None, "only jobs with a promise are steered"
    if training.slowdown_most is not None:
        return MaxSlowdown(training.slowdown_most)
    if training.deadline_ns:
        # One that has passed already is told from what the job then cannot keep, not refused here.
        return Deadline(training.work, max(1.0, (training.deadline_ns - workload.placed_ns) / 1e9))
    return BestEffort(training.energy_weight or 0.0)


def related_curves(points: Iterable[Point], gpu_model: str) -> tuple[PowerCurve, ...]:
    """Curves of jobs that were measured at several limits of this GPU model; what makes no curve is left out."""

    def apart(point: Point) -> tuple[str, Configuration]:
        running = point.configuration
        return point.workload, Configuration(
            running.gpu_model,
            running.mig_profile,
            running.gpus,
            running.batch,
            running.processes,
            None,
            running.clock_mhz,
            running.label,
        )

    fit = [
        point
        for point in points
        if point.configuration.gpu_model == gpu_model
        and not point.configuration.mig_profile
        and point.configuration.power_limit_w is not None
        and point.power_w is not None
    ]
    made: list[PowerCurve] = []
    for _, group in itertools.groupby(sorted(fit, key=lambda point: _sort_key(*apart(point))), key=apart):
        curve = _curve(list(group))
        if curve is not None and len(made) < _RELATIVES_MOST:
            made.append(curve)
    return tuple(made)


def _sort_key(name: str, running: Configuration) -> tuple[str, int, int, int, int, str]:
    return name, running.gpus, running.batch, running.processes, running.clock_mhz or 0, running.label


def _curve(points: Sequence[Point]) -> PowerCurve | None:
    try:
        curve = fit_power_curve(points)
    except PowerPlanError:
        return None
    return curve if len(curve.points) > 1 else None


def server_names(source: MetricsSource) -> ServerNames:
    """How the source's server spells its metrics."""
    if source.server is MetricsServer.GENERIC:
        return generic_names(source.latency_histogram, waiting=source.waiting_gauge)
    return server_metric_names(source.server.name.lower().replace("_", "-"))


def metric_urls(source: MetricsSource, workload: Workload) -> dict[int, str]:
    """Where each replica's page is, by replica."""
    return {
        placement.replica: source.url.replace("{node}", placement.node_name).replace(
            "{replica}", str(placement.replica)
        )
        for placement in workload.placements
    }


def scaling_limits(
    promise: ServicePromise, settings: ObjectiveSettings, bounds: ReplicaBounds | None = None
) -> ScalingLimits:
    """What the scaler may do, within the promise and what was said outside of it."""
    least, most = bounds or (promise.replicas_least, promise.replicas_most)
    return ScalingLimits(
        least=max(least, promise.replicas_least),
        most=min(most, promise.replicas_most),
        start_s=promise.start_s,
        hold_s=settings.hold_s,
        cool_s=settings.cool_s,
        stale_after_s=settings.stale_rounds * settings.scrape_s,
        drain_s=max(settings.scrape_s, ScalingLimits().drain_s),
    )


def service_target(
    workload: Workload,
    models: Iterable[str],
    points: Sequence[Point],
    settings: ObjectiveSettings,
    bounds: ReplicaBounds | None = None,
) -> AutoscalerTarget | str:
    """The autoscaler's target for a service; a text says why there is none, and the remedy.

    `models` are the GPU models that its replicas run on, `points` those of its profile.
    """
    promise = workload.spec.service
    assert promise is not None, "only services with a promise are watched"
    if promise.load_target is not None:
        target = promise.load_target
        return AutoscalerTarget(
            LoadService(target.metric, target.per_replica, promise.output_tokens),
            scaling_limits(promise, settings, bounds),
        )
    if not points:
        return f"profile {promise.profile} has no points; measure it and run eelctl profile import"
    on = sorted(set(models))
    found = slowest_gpu_model(workload, on, points)
    if not on:
        return "no replica is placed on a GPU, and profiles are of GPUs"
    if found is None:
        return (
            f"profile {promise.profile} has no point of {_promise_problem(workload)} {on[0]} at its power limit; "
            "measure it there and run eelctl profile import"
        )
    try:
        made, limits = _model(promise, found[1]), scaling_limits(promise, settings, bounds)
        made.needed_replicas(max(promise.rate_hz, 1.0), UNCORRECTED, limits.most)
        return AutoscalerTarget(made, limits)
    except ControllerError as error:
        return f"profile {promise.profile} cannot be used: {error}"


def slowest_gpu_model(
    workload: Workload, models: Iterable[str], points: Sequence[Point]
) -> tuple[str, tuple[Point, ...]] | None:
    """The GPU model that stands for all, and its points that fit; None where none has any."""
    by_model = {
        model: of
        for model in models
        if (of := tuple(one for one in points if matches_workload(one.configuration, model, workload)))
    }
    return min(by_model.items(), key=lambda one: max(point.throughput_hz for point in one[1]), default=None)


def _promise_problem(workload: Workload) -> str:
    request = workload.spec.request
    return f"{request.gpu_count} x" if request.gpu_milli == GPU_MILLI_WHOLE else "a share of"


def matches_workload(running: Configuration, model: str, workload: Workload) -> bool:
    """Whether a point is of replicas such as the workload's on this GPU model."""
    request, limit_w = workload.spec.request, workload.power_limit_w
    measured_w = running.power_limit_w
    is_at_limit = (
        measured_w is None if limit_w is None else measured_w is not None and is_same_limit(measured_w, limit_w)
    )
    return (
        running.gpu_model == model
        and not running.mig_profile
        and request.gpu_milli == GPU_MILLI_WHOLE
        and running.gpus == request.gpu_count
        and is_at_limit
    )


def _objective(promised: LatencyObjective) -> QuantileObjective:
    return QuantileObjective(promised.quantile, promised.latency_s)


def _model(promise: ServicePromise, points: Sequence[Point]) -> RequestService | TokenService:
    wanted: Mapping[LatencyMetric, QuantileObjective] = {one.metric: _objective(one) for one in promise.objectives}
    response = wanted.get(LatencyMetric.RESPONSE)
    if response is not None:
        return RequestService(station_from_point(_usual(points, response)), response, promise.arrival_cv2)
    usual = TokenDemand(promise.rate_hz, promise.output_tokens, promise.arrival_cv2)
    return TokenService(
        token_curve(_alike(points)),
        usual,
        wanted[LatencyMetric.INTER_TOKEN],
        watched_first=wanted.get(LatencyMetric.FIRST_TOKEN),
    )


def _usual(points: Sequence[Point], objective: QuantileObjective) -> Point:
    """The point of most throughput whose service alone leaves room for the objective; the quickest where none does."""

    def alone_s(point: Point) -> float:
        higher = [value for quantile, value in point.latency_s.items() if quantile >= objective.quantile - 1e-9]
        if higher:
            return min(higher)
        running = point.configuration
        return running.batch * running.processes / point.throughput_hz

    kept = [point for point in points if alone_s(point) <= objective.latency_s]
    if kept:
        return max(kept, key=lambda point: point.throughput_hz)
    return min(points, key=alone_s)


def _alike(points: Sequence[Point]) -> list[Point]:
    """The points that differ in their batch alone; of several such sets the largest."""
    sets: dict[Configuration, list[Point]] = {}
    for point in points:
        sets.setdefault(replace(point.configuration, batch=1), []).append(point)
    return max(sets.values(), key=len)
