"""Observes services with a promise: turns each cycle's view and rounds of metrics pages into controller events.

`ScrapeWindows` builds the window of one service from the pages that its replicas answered, also where some did not:
what is missing counts as if all had answered alike, and too few pages make no window.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.objectives.observation import ClusterObservation, ObjectiveSettings, gpu_models_of
from eelgrid_controller.objectives.power.control_events import (
    ControlEvent,
    ServiceReady,
    ServiceStarted,
    ServiceWindow,
    WorkloadEnded,
)
from eelgrid_controller.objectives.predicted_plans import PredictedPlans, ServicePlan
from eelgrid_controller.objectives.promises import metric_urls, server_names, service_target
from eelgrid_controller.objectives.services.autoscaler import AutoscalerTarget
from eelgrid_controller.objectives.services.service_metrics import (
    DistributionNames,
    ExpositionPage,
    MetricsWindow,
    ScrapePair,
    ScrapeRound,
    ScrapeTarget,
    ServerNames,
    SumNames,
    served_increment,
    service_window,
)
from eelgrid_controller.objectives.start_times import StartTime, StartTimes, find_start_time
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.state.engine_reports import ReplicaBounds
from eelgrid_controller.state.events import (
    Event,
    PreemptionStarted,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadEvicted,
    WorkloadPlaced,
    WorkloadScaled,
)
from eelgrid_controller.state.measurements import REQUEST, TOKEN, MeasuredStart, WorkInterval
from eelgrid_protos.messages import MetricsSource, ServicePromise, Workload

_STARTED = "process_start_time_seconds"  # tells that a process began anew
_SHARE_LEAST = 0.5  # of the expected replicas that must be paired


# Growths of a service that are remembered, and steps to which the time they took is rounded up, in seconds.
_GROWTHS_MOST = 4
_ROOM_STEPS_S = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class RoomTimes:
    """How long others took to make room for more replicas of services: processes stop first, and pods are evicted.

    A service is planned that much further ahead, so that what its queue has lent returns in time. Of the last growths the
    longest counts; one for which there was room counts as none.
    """

    def __init__(self) -> None:
        # Since when, and the numbers of the replicas that are to come.
        self._asked: dict[str, tuple[int, frozenset[int]]] = {}
        self._took_s: dict[str, deque[float]] = {}

    def observe(self, event: Event) -> None:
        """Follows an event of the journal."""
        if isinstance(event, PreemptionStarted):
            self._asked[event.workload_id] = event.time_ns, frozenset(one.replica for one in event.placements)
        elif isinstance(event, WorkloadScaled) and event.placements:
            asked_ns, coming = self._asked.get(event.workload_id, (event.time_ns, frozenset()))
            is_other = coming.isdisjoint(one.replica for one in event.placements)
            if not is_other:
                del self._asked[event.workload_id]
            took_s = 0.0 if is_other else (event.time_ns - asked_ns) / 1e9
            self._took_s.setdefault(event.workload_id, deque(maxlen=_GROWTHS_MOST)).append(took_s)
        elif isinstance(event, WorkloadPlaced | WorkloadCancelled | WorkloadCompleted | WorkloadEvicted):
            self._asked.pop(event.workload_id, None)
            self._took_s.pop(event.workload_id, None)

    def list_times_s(self) -> dict[str, float]:
        """Returns the seconds by service, rounded up, of those for which others made room of late."""
        longest = {name: max(took) for name, took in self._took_s.items()}
        return {
            name: next((step_s for step_s in _ROOM_STEPS_S if took_s <= step_s), _ROOM_STEPS_S[-1])
            for name, took_s in longest.items()
            if took_s > 0.0
        }


class WorkIncrement(NamedTuple):
    """What all replicas of a round have done since their pages before, at least; None where no server tells."""

    seconds: float  # since the oldest of those pages
    requests: float | None
    tokens: float | None
    is_whole: bool  # False where some of it is not known


class ScrapeOutcome(NamedTuple):
    """What a round says of a service."""

    window: MetricsWindow | None
    serving: int  # replicas that serve, as far as is known
    answered: int
    expected: int  # of which a page was to be had
    reason: str  # what is missing; "" when nothing is
    counted: WorkIncrement | None = None


@dataclass(slots=True)
class _Replica:
    since_s: float  # first asked
    page: ExpositionPage | None = None


def required_names(names: ServerNames) -> frozenset[str]:
    """Every name on a page that a window is read from."""
    found = {_STARTED}
    for metric in (getattr(names, slot) for slot in names.__slots__):
        if isinstance(metric, DistributionNames):
            found.update(f"{name}_bucket" for name in metric.names)
            found.update(metric.summaries)
        elif isinstance(metric, SumNames):
            for name in metric.names:
                found.update((name, name.removesuffix("_total"), f"{name.removesuffix('_total')}_total"))
    return frozenset(found)


class ScrapeWindows:
    """The pages of one service's replicas; one round in, one outcome out."""

    def __init__(self, names: ServerNames, model: str, *, grace_s: float, age_most_s: float) -> None:
        """`grace_s` is how long a replica may take to its first page, `age_most_s` how old a pair's first may be."""
        self._names = names
        self._model = model
        self.grace_s = grace_s
        self._age_most_s = age_most_s
        self._replicas: dict[tuple[int, str], _Replica] = {}
        self._round_s: float | None = None  # of the round before

    def add_round(
        self, taken: ScrapeRound, doubtful: frozenset[int] = frozenset(), grown: frozenset[int] = frozenset()
    ) -> ScrapeOutcome:
        """What the round says; replicas that were not asked are forgotten.

        `doubtful` replicas stand on lost nodes: without a page, too, nothing is expected of them. `grown` ones
        served before they were asked: what they have counted is not of this window.
        """
        known = self._replicas
        self._replicas = {key: known.get(key) or _Replica(taken.at_s) for key in taken.pages}
        pairs, every = list[ScrapePair](), list[ScrapePair]()
        answered = missing = strangers = 0
        why = ""
        for key, page in taken.pages.items():
            replica = self._replicas[key]
            if isinstance(page, str):
                is_due = replica.page is not None or taken.at_s - replica.since_s >= self.grace_s
                missing += is_due and key[0] not in doubtful
                why = why or f"replica {key[0]}: {page}"
                continue
            answered += 1
            nothing = None if key[0] in grown else self._nothing(replica, taken.at_s)
            before, replica.page = replica.page or nothing, page
            strangers += before is None
            if before is not None and page.at_s > before.at_s:
                every.append(ScrapePair(before, page))
            if before is not None and page.at_s - before.at_s <= self._age_most_s:
                pairs.append(ScrapePair(before, page))
        self._round_s = taken.at_s if taken.pages else self._round_s
        counted = self._count_work(every, strangers)
        expected = len(pairs) + missing
        said = _reason_text(answered, answered + missing, why)
        told = ScrapeOutcome(None, answered + missing, answered, answered + missing, said, counted)
        if not pairs:
            return told._replace(reason=told.reason or ("no second page yet" if answered else "no replica yet"))
        if len(pairs) < _SHARE_LEAST * expected:
            return told._replace(reason=f"{told.reason}: too few to rely on")
        seen = service_window(self._names, pairs, self._model)
        return told if seen is None else told._replace(window=_scaled(seen, expected / len(pairs)))

    def _count_work(self, pairs: Sequence[ScrapePair], strangers: int) -> WorkIncrement | None:
        found = [served_increment(self._names, pair, self._model) for pair in pairs]
        requests = [one.requests for one in found if one.requests is not None]
        tokens = [one.tokens for one in found if one.tokens is not None]
        if not requests and not tokens:
            return None
        return WorkIncrement(
            max(pair.after.at_s - pair.before.at_s for pair in pairs),
            sum(requests) if requests else None,
            sum(tokens) if tokens else None,
            not strangers and all(one.is_whole for one in found),
        )

    def _nothing(self, replica: _Replica, at_s: float) -> ExpositionPage | None:
        """The page that a replica which has just begun had in the round before: all counters at 0."""
        if self._round_s is None or at_s - replica.since_s >= self.grace_s:
            return None
        return ExpositionPage(self._round_s, {})


def _reason_text(answered: int, expected: int, why: str) -> str:
    if answered == expected:
        return why  # of replicas that are starting
    return f"{answered} of {expected} replicas answered ({why})"


def _scaled(seen: MetricsWindow, factor: float) -> MetricsWindow:
    """The window as if all had answered alike."""
    if factor == 1.0:
        return seen

    def all_of(value: float | None) -> float | None:
        return None if value is None else value * factor

    return replace(
        seen,
        arrived_hz=all_of(seen.arrived_hz),
        finished_hz=all_of(seen.finished_hz),
        waiting=all_of(seen.waiting),
        waiting_growth=all_of(seen.waiting_growth),
        running=all_of(seen.running),
        output_token_hz=all_of(seen.output_token_hz),
        context_token_hz=all_of(seen.context_token_hz),
    )


class ServiceObservation(NamedTuple):
    """What operators see of a service beside its controller's status."""

    arrived_hz: float | None = None
    answered: int = 0  # replicas in the last round
    expected: int = 0
    reason: str = ""  # what is missing of its metrics
    start: StartTime | None = None  # of its next replica


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
    start: StartTime | None = None
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
        self._starts = StartTimes()

    def collect_work(self) -> list[WorkInterval]:
        """What services have done since the last time."""
        found, self._worked = self._worked, []
        return found

    def scrape_requests(self) -> dict[str, ScrapeTarget]:
        """Whose pages are wanted."""
        return {name: service.asked for name, service in self._services.items() if service.asked is not None}

    def observations(self) -> dict[str, ServiceObservation]:
        """What operators see of each managed service."""
        managed = {name: one for name, one in self._services.items() if isinstance(one.promised, AutoscalerTarget)}
        return {name: one.seen._replace(start=one.start) for name, one in managed.items()}

    def collect_starts(self) -> tuple[MeasuredStart, ...]:
        """The starts of replicas that were measured since the last time."""
        return self._starts.collect_measured()

    def unmanaged_reasons(self) -> dict[str, str]:
        """Services that are not managed, and why."""
        return {
            name: f"{one.promised}; {one.planned.why_none}" if one.planned.why_none else one.promised
            for name, one in self._services.items()
            if isinstance(one.promised, str)
        }

    def service_plans(self) -> dict[str, ServicePlan]:
        """What each managed service is planned with."""
        return {name: one.planned for name, one in self._services.items() if isinstance(one.promised, AutoscalerTarget)}

    def end_missing(self, kept: Mapping[str, Workload], at_s: float) -> list[ControlEvent]:
        """Events of services that ended."""
        left = sorted(self._services.keys() - kept.keys())
        for name in left:
            self._starts.forget(name)
        return [
            WorkloadEnded(at_s, name)
            for name in left
            if isinstance(self._services.pop(name).promised, AutoscalerTarget)
        ]

    def observe_service(self, name: str, workload: Workload, world: ClusterObservation) -> list[ControlEvent]:
        """Events of one service in this cycle."""
        service = self._services.setdefault(name, _Service())
        self._starts.observe_places(name, workload, world)
        made = self._start_events(name, service, workload, world)
        self._metrics(service, workload, world.pages.get(name))
        if isinstance(service.promised, str):
            return made
        ready = self._standing(workload, world)
        taken = world.rounds.get(name)
        if service.rounds is None:
            service.seen = ServiceObservation(reason="its promise names no metrics, so its load is not known")
            return [*made, *self._serving(name, service, len(ready), world.at_s)]
        if taken is None:
            return made
        grown, serving = world.grown.get(name, frozenset()), world.serving.get(name)
        if serving is None and not _is_shared(service.source):
            answered = {number for (number, _), page in taken.pages.items() if not isinstance(page, str)}
            self._starts.observe_pages(name, answered, grown, world)
        if _is_shared(service.source):
            outcome = service.rounds.add_round(taken)._replace(serving=len(ready))
        elif serving is not None:
            outcome = service.rounds.add_round(taken, grown=grown)._replace(serving=serving)
        else:
            doubtful = frozenset(placement.replica for placement in workload.placements) - ready
            outcome = service.rounds.add_round(taken, doubtful, grown)
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
        stated = workload.spec.service
        assert stated is not None, "services have a promise"
        service.start = find_start_time(world.starts.get(name, ()), stated.start_s, world.near.get(name))
        promise = replace(stated, start_s=service.start.seconds + world.room_s.get(name, 0.0))
        workload = replace(workload, spec=replace(workload.spec, service=promise))
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
        assert service.start is not None, "_start_events finds it first"
        settings = self._settings
        # A replica that is known to start slowly is not missing meanwhile.
        grace_s = 2.0 * max(service.start.seconds, settings.scrape_s)
        source = promise.metrics
        if source != service.source:
            service.source, service.rounds, service.asked = source, None, None
            if source is not None:
                try:
                    names = server_names(source)
                except ControllerError as error:
                    service.seen = ServiceObservation(reason=str(error))
                    return
                service.rounds = ScrapeWindows(
                    names,
                    source.model,
                    grace_s=grace_s,
                    age_most_s=settings.stale_rounds * settings.scrape_s,
                )
                service.asked = ScrapeTarget({}, required_names(names))
        if service.rounds is not None:
            service.rounds.grace_s = grace_s
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
