"""The services at the desk: each cycle's view becomes events of the steering, and what operators see beside them.

Owns which services are steered, and why others are not. Must not know targets.

An address without a placeholder is one page for all replicas, as Ray Serve and gateways
have it: it is asked once, and how many serve is told by where they stand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from eelgrid_controller.energy_ledger.working import REQUEST, TOKEN, Worked
from eelgrid_controller.errors import ControllerError
from eelgrid_controller.outside import Bounds
from eelgrid_controller.profiles.points import Point
from eelgrid_controller.serving.watch import Promised
from eelgrid_controller.steering.events import Ended, Event, ServiceBegan, ServiceServing, ServiceWindow
from eelgrid_controller.steward.foreseen import Foreseen, Planned
from eelgrid_controller.steward.rounds import Asked, Outcome, Rounds, names_read
from eelgrid_controller.steward.services import promised_of, server_names, urls_of
from eelgrid_controller.steward.settings import StewardSettings
from eelgrid_controller.steward.world import World, models_of
from eelgrid_protos.messages import MetricsSource, ServicePromise, Workload

__all__ = ["ServiceDesk", "ServiceSeen"]


class ServiceSeen(NamedTuple):
    """What operators see of a service beside the steering's word."""

    arrived_hz: float | None = None
    answered: int = 0  # replicas in the last round
    expected: int = 0
    reason: str = ""  # what is missing of its metrics


_NOTHING = Planned(())


class _Made(NamedTuple):
    """What a Promised was made of."""

    promise: ServicePromise
    models: tuple[str, ...]
    points: tuple[Point, ...]
    power_limit_w: float | None
    bounds: Bounds | None


@dataclass(slots=True)
class _Service:
    made: _Made | None = None
    planned: Planned = _NOTHING
    promised: Promised | str = ""
    source: MetricsSource | None = None
    rounds: Rounds | None = None
    asked: Asked | None = None
    serving: int | None = None  # as the steering was told
    seen: ServiceSeen = field(default_factory=ServiceSeen)


_OUTSIDE = "://{replica}."


def _is_shared(source: MetricsSource | None) -> bool:
    """Whether all replicas have one page."""
    return source is not None and "{" not in source.url


class ServiceDesk:
    """All services with a promise."""

    def __init__(self, settings: StewardSettings, foreseen: Foreseen | None = None) -> None:
        self._settings = settings
        self._foreseen = foreseen or Foreseen()
        self._services: dict[str, _Service] = {}
        self._worked: list[Worked] = []

    def worked(self) -> list[Worked]:
        """What services have done since the last time."""
        found, self._worked = self._worked, []
        return found

    def asked(self) -> dict[str, Asked]:
        """Whose pages are wanted."""
        return {name: service.asked for name, service in self._services.items() if service.asked is not None}

    def seen(self) -> dict[str, ServiceSeen]:
        """What operators see of each that is steered."""
        return {name: one.seen for name, one in self._services.items() if isinstance(one.promised, Promised)}

    def unsteered(self) -> dict[str, str]:
        """Why some are not steered."""
        return {
            name: f"{one.promised}; {one.planned.why_none}" if one.planned.why_none else one.promised
            for name, one in self._services.items()
            if isinstance(one.promised, str)
        }

    def planned(self) -> dict[str, Planned]:
        """What each that is steered is planned with."""
        return {name: one.planned for name, one in self._services.items() if isinstance(one.promised, Promised)}

    def gone(self, kept: Mapping[str, Workload], at_s: float) -> list[Event]:
        """What is to be told of services that are no more."""
        left = sorted(self._services.keys() - kept.keys())
        return [Ended(at_s, name) for name in left if isinstance(self._services.pop(name).promised, Promised)]

    def look(self, name: str, workload: Workload, world: World) -> list[Event]:
        """What is to be told of one service in this cycle."""
        service = self._services.setdefault(name, _Service())
        made = self._promised(name, service, workload, world)
        self._metrics(service, workload, world.pages.get(name))
        if isinstance(service.promised, str):
            return made
        ready = self._standing(workload, world)
        taken = world.rounds.get(name)
        if service.rounds is None:
            service.seen = ServiceSeen(reason="its promise names no metrics: its load is not seen")
            return [*made, *self._serving(name, service, len(ready), world.at_s)]
        if taken is None:
            return made
        if _is_shared(service.source):
            outcome = service.rounds.took(taken)._replace(serving=len(ready))
        else:
            doubtful = frozenset(placement.replica for placement in workload.placements) - ready
            outcome = service.rounds.took(taken, doubtful, world.grown.get(name, frozenset()))
        if (counted := outcome.counted) is not None:
            begin_s = world.at_s - counted.seconds
            self._worked += [
                Worked(name, unit, amount, begin_s, world.at_s, counted.is_whole)
                for unit, amount in ((REQUEST, counted.requests), (TOKEN, counted.tokens))
                if amount is not None
            ]
        made += self._serving(name, service, outcome.serving, world.at_s)
        made += self._window(name, service, outcome, world.at_s)
        return made

    def _promised(self, name: str, service: _Service, workload: Workload, world: World) -> list[Event]:
        promise = workload.spec.service
        assert promise is not None, "services have a promise"
        models = tuple(sorted(models_of(workload, world)))
        points = world.points.get(promise.profile, ())
        service.planned = self._foreseen.service(name, workload, models, points)
        bounds = world.bounds.get(name)
        made = _Made(promise, models, service.planned.points, workload.power_limit_w, bounds)
        if made == service.made:
            return []
        before, service.made = service.promised, made
        service.promised = promised_of(workload, models, made.points, self._settings, bounds)
        if isinstance(service.promised, str):
            return [Ended(world.at_s, name)] if isinstance(before, Promised) else []
        replicas = len(self._standing(workload, world))
        if not isinstance(before, Promised):
            service.serving = replicas
        return [ServiceBegan(world.at_s, name, service.promised, replicas)]

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
                    service.seen = ServiceSeen(reason=str(error))
                    return
                settings = self._settings
                service.rounds = Rounds(
                    names,
                    source.model,
                    grace_s=2.0 * max(promise.start_s, settings.scrape_s),
                    age_most_s=settings.stale_rounds * settings.scrape_s,
                )
                service.asked = Asked({}, names_read(names))
        if source is not None and service.asked is not None:
            if pages is None and _OUTSIDE in source.url:
                pages = {}  # addresses that only somebody outside knows, who has not told them yet
            urls = {0: source.url} if _is_shared(source) else urls_of(source, workload) if pages is None else pages
            service.asked = service.asked._replace(urls=urls)

    @staticmethod
    def _standing(workload: Workload, world: World) -> frozenset[int]:
        """The replicas whose nodes are ready and whose GPUs are there."""
        return frozenset(
            placement.replica
            for placement in workload.placements
            if (node := world.nodes.get(placement.node_name)) is not None
            and node.is_ready
            and node.lost_gpus.isdisjoint(placement.gpu_uuids)
        )

    @staticmethod
    def _serving(name: str, service: _Service, serving: int, at_s: float) -> list[Event]:
        if serving == service.serving:
            return []
        service.serving = serving
        return [ServiceServing(at_s, name, serving)]

    @staticmethod
    def _window(name: str, service: _Service, outcome: Outcome, at_s: float) -> list[Event]:
        window = outcome.window
        service.seen = ServiceSeen(
            None if window is None else window.arrived_hz, outcome.answered, outcome.expected, outcome.reason
        )
        return [] if window is None else [ServiceWindow(at_s, name, window)]
