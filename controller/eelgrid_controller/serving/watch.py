"""One service watched: from a window of its metrics to the replicas that it should have.

Owns how the parts meet: live window, correction, model, scaler. Must not know how pages
are scraped, how replicas are made, or what kind of service it is.

Theory. A window is steady or overloaded: overloaded if what waits grew by more than GROWN
of what came, and there is more of it than is served at once. Its live quantile, or its
output, is compared with the model at the rate and the replicas of the same window; the
slowness that is learned corrects the model that the scaler asks. A window in which replicas
came or went says nothing of the profile, since nobody knows who served how much of it.
One that ended shortly before replicas were found to be lost is unlearned: they may have
been lost already, and the others seemed that much slower. A promise that is broken
is told to the scaler where a replica more could mend it.
"""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from eelgrid_controller.serving.correction import Correction, Sample, factor, is_at_bound, learned
from eelgrid_controller.serving.live import LiveQuantile, Window
from eelgrid_controller.serving.models import Model
from eelgrid_controller.serving.scaler import Decision, Limits, Observed, Ready, Scaler, State, Tick

__all__ = ["Advice", "Promised", "Watch", "begin", "looked", "passed", "served"]

GROWN = 0.05
SEEN_S = 60.0  # within which the loss of a replica is seen
_HAIR_S = 1.0  # by which clocks of a node and of the controller may differ


@dataclass(frozen=True, slots=True)
class Promised:
    """What a service is, what it promised, and what may be done."""

    model: Model
    limits: Limits


@dataclass(frozen=True, slots=True)
class Watch:
    """All that is remembered of a service."""

    state: State
    correction: Correction = field(default_factory=Correction)
    since_s: float = -math.inf  # when another number of replicas began to serve
    before: Correction | None = None  # what was known before the newest window; None where nothing is to be unlearned


class Advice(NamedTuple):
    """What should be, why, and what the live quantile was."""

    decision: Decision
    live: LiveQuantile | None
    model_s: float | None  # by the profile alone, at the replicas that served
    is_profile_wrong: bool  # the correction is at its bound: measure the service anew


def _scaler(promised: Promised, correction: Correction, now_s: float) -> Scaler:
    known, most = factor(correction, now_s), promised.limits.most
    return Scaler(promised.limits, lambda rate_hz: promised.model.needed(rate_hz, known, most))


def _sample(model: Model, replicas: int, window: Window) -> Sample | None:
    """What the window says of the profile."""
    grown_hz = (window.waiting_growth or 0.0) / window.seconds
    overloaded = grown_hz > GROWN * (window.arrived_hz or 0.0) and (window.waiting or 0.0) > model.places(replicas)
    return model.overloaded(window, replicas) if overloaded else model.steady(window, replicas)


def begin(promised: Promised, replicas: int) -> Watch:
    """The watch before the first window."""
    return Watch(_scaler(promised, Correction(), 0.0).begin(replicas))


def looked(promised: Promised, watch: Watch, window: Window, at_s: float) -> tuple[Watch, Advice]:
    """The watch after a window that ends at `at_s`."""
    model, correction, ready = promised.model, watch.correction, watch.state.ready
    live = model.live(window)
    if window.arrived_hz is None:
        _, decision = _scaler(promised, correction, at_s).step(watch.state, Tick(at_s))
        unread = Decision(decision.replicas, f"no arrivals in the metrics; {decision.reason}")
        return watch, Advice(unread, live, None, is_at_bound(correction))
    model_s = None
    if ready > 0:
        model_s = model.expected_s(window, ready)
        if at_s - window.seconds >= watch.since_s - _HAIR_S:
            correction = learned(correction, _sample(model, ready, window), at_s)
    late = model.is_late(window) and not model.is_hopeless(factor(correction, at_s))
    seen = Observed(at_s, window.arrived_hz, window.waiting, window.waiting_growth, late)
    state, decision = _scaler(promised, correction, at_s).step(watch.state, seen)
    seen_now = replace(watch, state=state, correction=correction, before=watch.correction)
    return seen_now, Advice(decision, live, model_s, is_at_bound(correction))


def served(promised: Promised, watch: Watch, replicas: int, at_s: float) -> Watch:
    """The watch after so many replicas began, or ceased, to serve."""
    state, _ = _scaler(promised, watch.correction, at_s).step(watch.state, Ready(at_s, replicas))
    if replicas == watch.state.ready:
        return replace(watch, state=state)
    correction, newest_s = watch.correction, watch.state.trend.at_s
    lost = replicas < min(watch.state.ready, watch.state.target)
    if lost and watch.before is not None and newest_s is not None and at_s - newest_s <= SEEN_S:
        correction = watch.before
    return replace(watch, state=state, correction=correction, since_s=at_s, before=None)


def passed(promised: Promised, watch: Watch, at_s: float) -> tuple[Watch, Advice]:
    """The watch after time without a window."""
    state, decision = _scaler(promised, watch.correction, at_s).step(watch.state, Tick(at_s))
    return replace(watch, state=state), Advice(decision, None, None, is_at_bound(watch.correction))
