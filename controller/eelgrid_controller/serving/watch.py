"""One service watched: from a window of its metrics to the replicas that it should have.

Owns how the parts meet: live window, correction, queueing model, scaler. Must not know
how pages are scraped, or how replicas are made.

Theory. A window is steady or overloaded: overloaded if what waits grew by more than GROWN
of what came, and there is more of it than servers. Its live quantile, or its output, is
compared with the model at the rate and the replicas of the same window; the slowness
that is learned corrects the model that the scaler asks. Where no number of replicas keeps
the objective with the uncertainty added, more of them help no one: then as many are asked
for as keep the wait from adding more than a tenth. A promise is broken if the live quantile, of enough requests, is above
the objective by more than half its bucket, and a replica more could mend it.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from eelgrid_controller.serving.correction import Correction, Sample, factor, is_at_bound, learned, saturated, slowness
from eelgrid_controller.serving.errors import NothingFits
from eelgrid_controller.serving.live import LiveQuantile, Window
from eelgrid_controller.serving.queueing import latency
from eelgrid_controller.serving.scaler import Decision, Limits, Observed, Ready, Scaler, State, Tick
from eelgrid_controller.serving.sizing import Factor, Objective, corrected, least_replicas
from eelgrid_controller.serving.stations import Arrivals, Station

__all__ = ["Advice", "Promised", "Watch", "begin", "looked", "passed", "served"]

GROWN = 0.05
WAIT = 0.10


@dataclass(frozen=True, slots=True)
class Promised:
    """What a service is and what it promised."""

    replica: Station
    objective: Objective  # of the response time of requests
    limits: Limits
    arrival_cv2: float = 1.0


@dataclass(frozen=True, slots=True)
class Watch:
    """All that is remembered of a service."""

    state: State
    correction: Correction = Correction()  # noqa: RUF009 (frozen)


class Advice(NamedTuple):
    """What should be, why, and what the live quantile was."""

    decision: Decision
    live: LiveQuantile | None
    model_s: float | None  # at the replicas that served
    is_profile_wrong: bool  # the correction is at its bound: measure the service anew


def _scaler(promised: Promised, correction: Correction, now_s: float) -> Scaler:
    known = factor(correction, now_s)

    def needed(rate_hz: float) -> int:
        arrivals, most = Arrivals(rate_hz, promised.arrival_cv2), promised.limits.most
        if most < 1:
            return 0
        for objective in (promised.objective, _unkept(promised, known)):
            try:
                return least_replicas(promised.replica, arrivals, objective, most=most, factor=known)
            except NothingFits:
                continue
        return most

    return Scaler(promised.limits, needed)


def _unkept(promised: Promised, known: Factor) -> Objective:
    """What stands for an objective that nothing keeps: an idle replica's latency and a tenth."""
    quantile = promised.objective.quantile
    idle = corrected(promised.replica, Arrivals(0.0, promised.arrival_cv2), quantile, known)
    return Objective(quantile, max(promised.objective.latency_s, (1.0 + WAIT) * idle.upper_s))


def _sample(promised: Promised, ready: int, window: Window, live: LiveQuantile | None) -> Sample | None:
    """What the window says of the profile."""
    arrived_hz, station = window.arrived_hz or 0.0, promised.replica.times(ready)
    grown_hz = (window.waiting_growth or 0.0) / window.seconds
    if grown_hz > GROWN * arrived_hz and (window.waiting or 0.0) > station.servers * station.batch:
        return saturated(station, window.finished_hz or 0.0)
    return slowness(station, Arrivals(arrived_hz, promised.arrival_cv2), promised.objective.quantile, live)


def begin(promised: Promised, replicas: int) -> Watch:
    """The watch before the first window."""
    return Watch(_scaler(promised, Correction(), 0.0).begin(replicas))


def looked(promised: Promised, watch: Watch, window: Window, at_s: float) -> tuple[Watch, Advice]:
    """The watch after a window that ends at `at_s`."""
    live = window.response.quantile(promised.objective.quantile) if window.response is not None else None
    model_s, correction = None, watch.correction
    if window.arrived_hz is not None and watch.state.ready > 0:
        arrivals = Arrivals(window.arrived_hz, promised.arrival_cv2)
        model_s = latency(promised.replica.times(watch.state.ready), arrivals, promised.objective.quantile).value_s
        correction = learned(correction, _sample(promised, watch.state.ready, window, live), at_s)
    if window.arrived_hz is None:
        _, decision = _scaler(promised, correction, at_s).step(watch.state, Tick(at_s))
        unread = Decision(decision.replicas, f"no arrivals in the metrics; {decision.reason}")
        return watch, Advice(unread, live, model_s, is_at_bound(correction))
    late = live is not None and live.value_s * (1.0 - live.resolution) > promised.objective.latency_s
    hopeless = _unkept(promised, factor(correction, at_s)).latency_s > promised.objective.latency_s
    seen = Observed(at_s, window.arrived_hz, window.waiting, window.waiting_growth, late and not hopeless)
    state, decision = _scaler(promised, correction, at_s).step(watch.state, seen)
    return Watch(state, correction), Advice(decision, live, model_s, is_at_bound(correction))


def served(promised: Promised, watch: Watch, replicas: int, at_s: float) -> Watch:
    """The watch after so many replicas began, or ceased, to serve."""
    state, _ = _scaler(promised, watch.correction, at_s).step(watch.state, Ready(at_s, replicas))
    return replace(watch, state=state)


def passed(promised: Promised, watch: Watch, at_s: float) -> tuple[Watch, Advice]:
    """The watch after time without a window."""
    state, decision = _scaler(promised, watch.correction, at_s).step(watch.state, Tick(at_s))
    return replace(watch, state=state), Advice(decision, None, None, is_at_bound(watch.correction))
