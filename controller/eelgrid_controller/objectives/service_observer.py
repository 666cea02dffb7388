"""Observes inference services: turns each cycle's scrapes into controller events and operator views."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.objectives.observation import ClusterObservation, gpu_models_of
from eelgrid_controller.objectives.power.control_events import (
    ControlEvent,
    ServiceReady,
    ServiceStarted,
    ServiceWindow,
    WorkloadEnded,
)
from eelgrid_controller.objectives.predicted_plans import PredictedPlans, ServicePlan
from eelgrid_controller.objectives.promises import metric_urls, server_names, service_target
from eelgrid_controller.objectives.scrape_windows import ScrapeOutcome, ScrapeTarget, ScrapeWindows, required_names
from eelgrid_controller.objectives.services.autoscaler import AutoscalerTarget
from eelgrid_controller.objectives.settings import ObjectiveSettings
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.state.engine_reports import ReplicaBounds
from eelgrid_controller.state.work_intervals import REQUEST, TOKEN, WorkInterval
from eelgrid_protos.messages import MetricsSource, ServicePromise, Workload


class ServiceObservation(NamedTuple):
    """What operators see of a service beside the steering's word."""

    arrived_hz: float | None = None
    answered: int = 0  # replicas in the last round
    expected: int = 0
    reason: str = ""  # what is missing of its metrics


_NOTHING = ServicePlan(())


class _PromiseInputs(NamedTuple):
    """What a Promised was made of."""

    promise: ServicePromise
    models: tuple[str, ...]
    points: tuple[Point, ...]
    power_limit_w: float | None
    bounds: ReplicaBounds | None


@dataclass(slots=True)
class _Service:
    made: _PromiseInputs | None = None
    planned: ServicePlan = _NOTHING
    promised: AutoscalerTarget | str = ""
    source: MetricsSource | None = None
    rounds: ScrapeWindows | None = None
    asked: ScrapeTarget | None = None
    serving: int | None = None  # as the steering was told
    seen: ServiceObservation = field(default_factory=ServiceObservation)


_OUTSIDE = "://{replica}."


def _is_shared(source: MetricsSource | None) -> bool:
    """Whether all replicas have one page."""
    return source is not None and "{" not in source.url


class ServiceObserver:
    """All services with a promise."""

    def __init__(self, settings: ObjectiveSettings, foreseen: PredictedPlans | None = None) -> None:
        self._settings = settings
        self._foreseen = foreseen or PredictedPlans()
        self._services: dict[str, _Service] = {}
        self._worked: list[WorkInterval] = []

    def collect_work(self) -> list[WorkInterval]:
        """What services have done since the last time."""
        found, self._worked = self._worked, []
        return found

    def scrape_requests(self) -> dict[str, ScrapeTarget]:
        """Whose pages are wanted."""
        return {name: service.asked for name, service in self._services.items() if service.asked is not None}

    def observations(self) -> dict[str, ServiceObservation]:
        """What operators see of each that is steered."""
        return {name: one.seen for name, one in self._services.items() if isinstance(one.promised, AutoscalerTarget)}

    def unmanaged_reasons(self) -> dict[str, str]:
        """Why some are not steered."""
        return {
            name: f"{one.promised}; {one.planned.why_none}" if one.planned.why_none else one.promised
            for name, one in self._services.items()
            if isinstance(one.promised, str)
        }

    def service_plans(self) -> dict[str, ServicePlan]:
        """What each that is steered is planned with."""
        return {name: one.planned for name, one in self._services.items() if isinstance(one.promised, AutoscalerTarget)}

    def end_missing(self, kept: Mapping[str, Workload], at_s: float) -> list[ControlEvent]:
        """What is to be told of services that are no more."""
        left = sorted(self._services.keys() - kept.keys())
        return [
            WorkloadEnded(at_s, name)
            for name in left
            if isinstance(self._services.pop(name).promised, AutoscalerTarget)
        ]

    def observe_service(self, name: str, workload: Workload, world: ClusterObservation) -> list[ControlEvent]:
        """What is to be told of one service in this cycle."""
        service = self._services.setdefault(name, _Service())
        made = self._start_events(name, service, workload, world)
        self._metrics(service, workload, world.pages.get(name))
        if isinstance(service.promised, str):
            return made
        ready = self._standing(workload, world)
        taken = world.rounds.get(name)
        if service.rounds is None:
            service.seen = ServiceObservation(reason="its promise names no metrics: its load is not seen")
            return [*made, *self._serving(name, service, len(ready), world.at_s)]
        if taken is None:
            return made
        if _is_shared(service.source):
            outcome = service.rounds.add_round(taken)._replace(serving=len(ready))
        else:
            doubtful = frozenset(placement.replica for placement in workload.placements) - ready
            outcome = service.rounds.add_round(taken, doubtful, world.grown.get(name, frozenset()))
        if (counted := outcome.counted) is not None:
            begin_s = world.at_s - counted.seconds
            self._worked += [
                WorkInterval(name, unit, amount, begin_s, world.at_s, counted.is_whole)
                for unit, amount in ((REQUEST, counted.requests), (TOKEN, counted.tokens))
                if amount is not None
            ]
        made += self._serving(name, service, outcome.serving, world.at_s)
        made += self._window(name, service, outcome, world.at_s)
        return made

    def _start_events(
        self, name: str, service: _Service, workload: Workload, world: ClusterObservation
    ) -> list[ControlEvent]:
        promise = workload.spec.service
        assert promise is not None, "services have a promise"
        models = tuple(sorted(gpu_models_of(workload, world)))
        points = world.points.get(promise.profile, ())
        service.planned = self._foreseen.plan_service(name, workload, models, points)
        bounds = world.bounds.get(name)
        made = _PromiseInputs(promise, models, service.planned.points, workload.power_limit_w, bounds)
        if made == service.made:
            return []
        before, service.made = service.promised, made
        service.promised = service_target(workload, models, made.points, self._settings, bounds)
        if isinstance(service.promised, str):
            return [WorkloadEnded(world.at_s, name)] if isinstance(before, AutoscalerTarget) else []
        replicas = len(self._standing(workload, world))
        if not isinstance(before, AutoscalerTarget):
            service.serving = replicas
        return [ServiceStarted(world.at_s, name, service.promised, replicas)]

    def _metrics(self, service: _Service, workload: Workload, pages: Mapping[int, str] | None) -> None:
        """Where its pages are now, and the rounds that they are taken in."""
        promise = workload.spec.service
        assert promise is not None, "services have a promise"
        source = promise.metrics
        if source != service.source:
            service.source, service.rounds, service.asked = source, None, None
            if source is not None:
                try:
                    names = server_names(source)
                except ControllerError as error:
                    service.seen = ServiceObservation(reason=str(error))
                    return
                settings = self._settings
                service.rounds = ScrapeWindows(
                    names,
                    source.model,
                    grace_s=2.0 * max(promise.start_s, settings.scrape_s),
                    age_most_s=settings.stale_rounds * settings.scrape_s,
                )
                service.asked = ScrapeTarget({}, required_names(names))
        if source is not None and service.asked is not None:
            if pages is None and _OUTSIDE in source.url:
                pages = {}  # addresses that only somebody outside knows, who has not told them yet
            urls = {0: source.url} if _is_shared(source) else metric_urls(source, workload) if pages is None else pages
            service.asked = service.asked._replace(urls=urls)

    @staticmethod
    def _standing(workload: Workload, world: ClusterObservation) -> frozenset[int]:
        """The replicas whose nodes are ready and whose GPUs are there."""
        return frozenset(
            placement.replica
            for placement in workload.placements
            if (node := world.nodes.get(placement.node_name)) is not None
            and node.is_ready
            and node.lost_gpus.isdisjoint(placement.gpu_uuids)
        )

    @staticmethod
    def _serving(name: str, service: _Service, serving: int, at_s: float) -> list[ControlEvent]:
        if serving == service.serving:
            return []
        service.serving = serving
        return [ServiceReady(at_s, name, serving)]

    @staticmethod
    def _window(name: str, service: _Service, outcome: ScrapeOutcome, at_s: float) -> list[ControlEvent]:
        window = outcome.window
        service.seen = ServiceObservation(
            None if window is None else window.arrived_hz, outcome.answered, outcome.expected, outcome.reason
        )
        return [] if window is None else [ServiceWindow(at_s, name, window)]
