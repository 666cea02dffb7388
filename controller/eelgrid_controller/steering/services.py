"""The services that are steered: a watch for each, and what was last said of it.

Owns when a Scale is said. Must not know jobs, power or how a service is measured.

Theory. eelgrid_controller.serving.watch says how many replicas should be. A Scale is said
when that changes, and again every `repeat_s` while the replicas that serve are others: it
may have been lost. A service that is taken up in the middle of life begins with the
replicas that it has; the scaler takes nothing away before it has looked back in full.
"""

import math
from dataclasses import dataclass, replace

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.serving.correction import factor
from eelgrid_controller.serving.scaler import Decision
from eelgrid_controller.serving.watch import Advice, Promised, Watch, begin, looked, passed, served
from eelgrid_controller.steering.events import Scale, ServiceBegan, ServiceServing, ServiceWindow
from eelgrid_controller.steering.settings import Settings
from eelgrid_controller.steering.standing import ServiceStanding

__all__ = ["Services"]


@dataclass(slots=True)
class _Service:
    """One service; `said_s` is when its target was last said, or began to be what it has."""

    promised: Promised
    watch: Watch
    decision: Decision
    said_s: float
    told: int  # the replicas that whoever carries out was last told, or had
    window_s: float | None = None
    serving_s: float = -math.inf  # when it was last told how many serve
    advice: Advice | None = None  # of the last window


class Services:
    """All services, by name. Methods answer with what to say, or why the event changes nothing."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._services: dict[str, _Service] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._services

    def __len__(self) -> int:
        return len(self._services)

    def began(self, event: ServiceBegan) -> list[Scale] | str:
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
            known.watch = watch if same else Watch(watch.state)
            known.promised = event.promised
            known.decision = Decision(target, "it promises something else now")
            return self._said(event.name, known, event.at_s)
        if event.replicas < 0 or len(self._services) >= self._settings.services_most:
            return "more services than are steered, or impossible replicas"
        watch = begin(event.promised, event.replicas)
        reason = "as it was found" if watch.state.target == event.replicas else "its least or most"
        service = _Service(
            event.promised, watch, Decision(watch.state.target, reason), event.at_s, event.replicas
        )  # fmt: skip
        self._services[event.name] = service
        return self._said(event.name, service, event.at_s)

    def window(self, event: ServiceWindow) -> list[Scale] | str:
        """What the window asks for; None for one that is old or that the model cannot read."""
        service = self._services.get(event.name)
        if service is None or (service.window_s is not None and event.at_s <= service.window_s):
            return "a window that is old, or of what is not known"
        try:
            watch, advice = looked(service.promised, service.watch, event.window, event.at_s)
        except ControllerError:
            return "a window that no model explains"
        service.watch, service.advice, service.window_s = watch, advice, event.at_s
        service.decision = advice.decision
        return self._said(event.name, service, event.at_s)

    def serving(self, event: ServiceServing) -> list[Scale] | str:
        """What is known once so many replicas serve."""
        service = self._services.get(event.name)
        if service is None or event.replicas < 0 or event.at_s < service.serving_s:
            return "replicas that are old, impossible, or of what is not known"
        service.serving_s = event.at_s
        service.watch = served(service.promised, service.watch, event.replicas, event.at_s)
        return []

    def ended(self, name: str) -> bool:
        """Forgets a service; whether there was one."""
        return self._services.pop(name, None) is not None

    def ticked(self, at_s: float) -> list[Scale]:
        """What is said again, and what time alone changes: a service may be blind now."""
        made = []
        for name, service in self._services.items():
            service.watch, advice = passed(service.promised, service.watch, at_s)
            if advice.decision.reason != "nothing new":
                service.decision = advice.decision
            made += self._said(name, service, at_s)
        return made

    def standing(self, now_s: float) -> list[ServiceStanding]:
        """How each stands, in order of names."""
        return [self._standing(name, self._services[name], now_s) for name in sorted(self._services)]

    def _standing(self, name: str, service: _Service, now_s: float) -> ServiceStanding:
        slow, advice, state = factor(service.watch.correction, now_s), service.advice, service.watch.state
        live = None if advice is None else advice.live
        return ServiceStanding(
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

    def _said(self, name: str, service: _Service, at_s: float) -> list[Scale]:
        """The Scale that is due: the target is another, or was said long ago and has not come."""
        target = service.decision.replicas
        repeated = service.watch.state.ready != target and at_s - service.said_s >= self._settings.repeat_s
        if target == service.told and not repeated:
            return []
        service.told, service.said_s = target, at_s
        return [Scale(name, target, service.decision.reason)]
