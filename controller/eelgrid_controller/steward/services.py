"""From a service's promise and the points of its profile to what the steering watches; or why it cannot.

Owns which points stand for the replicas that run, and where their metrics are. Must not
know windows, targets or how points were measured.

Theory. Replicas differ in GPU model at most; the model with the least throughput at its
best point stands for all, so that a mixture is not taken for faster than what is known of
it; a model without points is left to what the live quantiles teach. Points
must be of the same slice and number of GPUs as a replica, and of the power limit that it
runs at, the default where it has none. A promise on the response takes the point of most
throughput that keeps the objective alone, as whoever set the batch would; a promise on
tokens takes the curve through all points that differ in the most sequences at once. The
time to first token is watched but not planned with: its cost, the prompt's, is in no point.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.outside import Bounds
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.serving.live import Window
from eelgrid_controller.serving.metric_names import ServerNames, generic, names_of
from eelgrid_controller.serving.models import Requests, Tokens
from eelgrid_controller.serving.scaler import Limits
from eelgrid_controller.serving.sizing import UNCORRECTED, Objective
from eelgrid_controller.serving.stations import station_of
from eelgrid_controller.serving.tokens import TokenDemand, curve_of
from eelgrid_controller.serving.watch import Promised
from eelgrid_controller.steward.settings import StewardSettings
from eelgrid_protos.messages import (
    LatencyMetric,
    LatencyObjective,
    MetricsServer,
    MetricsSource,
    ServicePromise,
    Workload,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

__all__ = ["TokensAndFirst", "fits", "limits_of", "promised_of", "server_names", "slowest", "urls_of"]


@dataclass(frozen=True, slots=True)
class TokensAndFirst(Tokens):
    """A service with a promise on the first token whose prompts were never measured: it is watched, not planned."""

    watched_first: Objective | None = None

    def is_late(self, window: Window) -> bool:
        """Whether a token, or the first one, is too slow now."""
        objective, live = self.watched_first, window.first_token
        first = None if objective is None or live is None else live.quantile(objective.quantile)
        late = (
            first is not None
            and objective is not None
            and first.value_s * (1.0 - first.resolution) > objective.latency_s
        )
        return late or Tokens.is_late(self, window)


def server_names(source: MetricsSource) -> ServerNames:
    """How the source's server spells its metrics."""
    if source.server is MetricsServer.GENERIC:
        return generic(source.latency_histogram, waiting=source.waiting_gauge)
    return names_of(source.server.name.lower().replace("_", "-"))


def urls_of(source: MetricsSource, workload: Workload) -> dict[int, str]:
    """Where each replica's page is, by replica."""
    return {
        placement.replica: source.url.replace("{node}", placement.node_name).replace(
            "{replica}", str(placement.replica)
        )
        for placement in workload.placements
    }


def limits_of(promise: ServicePromise, settings: StewardSettings, bounds: Bounds | None = None) -> Limits:
    """What the scaler may do, within the promise and what was said outside of it."""
    least, most = bounds or (promise.replicas_least, promise.replicas_most)
    return Limits(
        least=max(least, promise.replicas_least),
        most=min(most, promise.replicas_most),
        start_s=promise.start_s,
        hold_s=settings.hold_s,
        cool_s=settings.cool_s,
        stale_after_s=settings.stale_rounds * settings.scrape_s,
        drain_s=max(settings.scrape_s, Limits().drain_s),
    )


def promised_of(
    workload: Workload,
    models: Iterable[str],
    points: Sequence[Point],
    settings: StewardSettings,
    bounds: Bounds | None = None,
) -> Promised | str:
    """What the steering watches; a text says why nothing can be watched, and the remedy.

    `models` are the GPU models that its replicas run on, `points` those of its profile.
    """
    promise = workload.spec.service
    assert promise is not None, "only services with a promise are watched"
    if not points:
        return f"profile {promise.profile} has no points; measure it and run eelctl profile import"
    on = sorted(set(models))
    found = slowest(workload, on, points)
    if not on:
        return "no replica is placed on a GPU; a profile is of GPUs"
    if found is None:
        return (
            f"profile {promise.profile} has no point of {_asked(workload)} {on[0]} at its power limit; "
            "measure it there and run eelctl profile import"
        )
    try:
        made, limits = _model(promise, found[1]), limits_of(promise, settings, bounds)
        made.needed(max(promise.rate_hz, 1.0), UNCORRECTED, limits.most)
        return Promised(made, limits)
    except ControllerError as error:
        return f"profile {promise.profile} cannot be used: {error}"


def slowest(workload: Workload, models: Iterable[str], points: Sequence[Point]) -> tuple[str, tuple[Point, ...]] | None:
    """The GPU model that stands for all, and its points that fit; None where none has any."""
    by_model = {
        model: of
        for model in models
        if (of := tuple(one for one in points if fits(one.configuration, model, workload)))
    }
    return min(by_model.items(), key=lambda one: max(point.throughput_hz for point in one[1]), default=None)


def _asked(workload: Workload) -> str:
    request = workload.spec.request
    return f"{request.gpu_count} x" if request.gpu_milli == GPU_MILLI_WHOLE else "a share of"


def fits(running: Configuration, model: str, workload: Workload) -> bool:
    """Whether a point is of replicas such as the workload's on this GPU model."""
    request, limit_w = workload.spec.request, workload.power_limit_w
    at_limit = running.power_limit_w is None if limit_w is None else _near(running.power_limit_w, limit_w)
    return (
        running.gpu_model == model
        and not running.mig_profile
        and request.gpu_milli == GPU_MILLI_WHOLE
        and running.gpus == request.gpu_count
        and at_limit
    )


def _near(one_w: float | None, other_w: float) -> bool:
    return one_w is not None and abs(one_w - other_w) <= 1.0


def _objective(promised: LatencyObjective) -> Objective:
    return Objective(promised.quantile, promised.latency_s)


def _model(promise: ServicePromise, points: Sequence[Point]) -> Requests | Tokens:
    wanted: Mapping[LatencyMetric, Objective] = {one.metric: _objective(one) for one in promise.objectives}
    response = wanted.get(LatencyMetric.RESPONSE)
    if response is not None:
        return Requests(station_of(_usual(points, response)), response, promise.arrival_cv2)
    usual = TokenDemand(promise.rate_hz, promise.output_tokens, promise.arrival_cv2)
    return TokensAndFirst(
        curve_of(_alike(points)), usual, wanted[LatencyMetric.INTER_TOKEN], watched_first=wanted.get(LatencyMetric.FIRST_TOKEN)
    )  # fmt: skip


def _usual(points: Sequence[Point], objective: Objective) -> Point:
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
