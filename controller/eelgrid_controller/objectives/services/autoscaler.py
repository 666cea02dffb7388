"""Autoscales one service: a window of metrics in, a replica target and its reason out.

The load, the arrival rate unless a load target names another, is forecast over the start time of a replica (Holt's double
exponential smoothing); the calibrated service model says how many replicas it needs; a state machine with hold and
cool-down times applies it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import NamedTuple

from eelgrid_controller.objectives.services.service_metrics import LiveQuantile, MetricsWindow
from eelgrid_controller.objectives.services.service_model import (
    LoadService,
    ServiceCalibration,
    ServiceModel,
    is_at_bound,
    read_load,
)
from eelgrid_controller.profiles.points import InvalidServingValue
from eelgrid_controller.profiles.queueing_model import SlownessFactor

_LEVEL_S, _SLOPE_S = 60.0, 300.0  # times in which the past counts 1 / e
FORECAST_SIGMAS = 1.5
FORECAST_RATIO_MOST = 1.5


@dataclass(frozen=True, slots=True)
class RateTrend:
    """What is known after the last window."""

    at_s: float | None = None
    level_hz: float = 0.0
    slope: float = 0.0  # Hz a second
    variance: float = 0.0  # mean square of one-step errors upward, Hz^2
    newest_hz: float = 0.0


class RateForecast(NamedTuple):
    """The rate at the horizon."""

    rate_hz: float
    upper_hz: float


def update_trend(trend: RateTrend, rate_hz: float, at_s: float) -> RateTrend:
    """The trend after a window that ends at `at_s`; a window of the past changes nothing."""
    if trend.at_s is None:
        return RateTrend(at_s, rate_hz, 0.0, 0.0, rate_hz)
    gap_s = at_s - trend.at_s
    if gap_s <= 0.0:
        return trend
    expected = trend.level_hz + trend.slope * gap_s
    missed = rate_hz - expected
    short = max(0.0, missed)
    level_gain, slope_gain = 1.0 - math.exp(-gap_s / _LEVEL_S), 1.0 - math.exp(-gap_s / _SLOPE_S)
    level_hz = max(0.0, expected + level_gain * missed)
    slope = trend.slope + slope_gain * ((level_hz - trend.level_hz) / gap_s - trend.slope)
    variance = trend.variance + slope_gain * (short * short - trend.variance)
    return RateTrend(at_s, level_hz, slope, variance, rate_hz)


def forecast_rate(trend: RateTrend, horizon_s: float) -> RateForecast:
    """The forecast for `horizon_s` after the last window; 0 before the first."""
    most_hz = FORECAST_RATIO_MOST * max(trend.level_hz, trend.newest_hz)
    rate_hz = min(most_hz, trend.level_hz + max(0.0, trend.slope * horizon_s))
    upper_hz = min(most_hz, rate_hz + FORECAST_SIGMAS * math.sqrt(trend.variance))
    return RateForecast(rate_hz, max(trend.newest_hz, upper_hz))


RESERVE_STEP = 0.05  # of the rate, for a broken promise; chosen on whole days by `bench.loop.margins`
RESERVE_MOST = 0.25
RESERVE_PERIOD_S = 3 * 86_400.0  # one broken promise in it is what the reserve settles at
_RESERVE_TOLD = 0.005
OVERLOAD_QUEUE_S = 60.0  # within which the loss of a replica is seen


class RateReserve(NamedTuple):
    """What is planned for above the forecast, as a share of it, because the promise was broken: integral action.

    A broken promise adds RESERVE_STEP, and RESERVE_PERIOD_S without one takes it away again, evenly. So a load that
    a reserve of RESERVE_MOST - RESERVE_STEP is enough for breaks promises RESERVE_MOST / RESERVE_STEP times at
    first and once in each period from then on, at most, whatever it does: adaptive conformal inference (Gibbs and
    Candes 2021) with the margin in place of the quantile.
    """

    share: float = 0.0
    at_s: float = 0.0
    broken_at_s: float = -math.inf  # of the last broken promise that counted


def decay_reserve(reserve: RateReserve, at_s: float) -> RateReserve:
    """The reserve at a later time."""
    gap_s = max(0.0, at_s - reserve.at_s)
    left = max(0.0, reserve.share - RESERVE_STEP * gap_s / RESERVE_PERIOD_S)
    return reserve._replace(share=left, at_s=max(at_s, reserve.at_s))


def raise_reserve(reserve: RateReserve, at_s: float) -> RateReserve:
    """The reserve after a promise was broken in the window that ended at `at_s`."""
    now = decay_reserve(reserve, at_s)
    return RateReserve(min(RESERVE_MOST, now.share + RESERVE_STEP), now.at_s, at_s)


_KEPT_MOST = 512  # windows that a state remembers


class ScalerPhase(Enum):
    """What the scaler waits for."""

    STEADY = "steady"
    RISING = "rising"
    BLIND = "blind"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """Bounds on what a scaler may do."""

    least: int = 1
    most: int = 64
    start_s: float = 60.0  # until a replica serves
    hold_s: float = 300.0  # a fall looks back so far
    cool_s: float = 60.0  # between two falls
    stale_after_s: float = 60.0
    drain_s: float = 30.0  # in which a queue should be gone
    band: float = 0.08  # of the rate, within which nothing moves
    rise: float = 2.0  # fold, in one start
    fall: float = 0.25  # of the target, in one cooling

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise InvalidServingValue("least", f"{self.least} of at most {self.most}", "give 0 <= least <= most")
        if min(self.hold_s, self.stale_after_s, self.drain_s) <= 0.0 or min(self.start_s, self.cool_s) < 0.0:
            raise InvalidServingValue("hold_s", "a time that is not above 0", "give seconds")
        if self.rise < 1.0 or not 0.0 < self.fall <= 1.0 or self.band < 0.0:
            raise InvalidServingValue(
                "rise", "a bound that forbids all change", "give rise >= 1, 0 < fall <= 1, band >= 0"
            )


class LoadObserved(NamedTuple):
    """A window of all replicas that ends at `at_s`."""

    at_s: float
    arrived_hz: float
    waiting: float | None = None  # at the end; None where the servers do not tell
    waiting_growth: float | None = None
    is_promise_broken: bool = False  # the live quantile is above the objective
    of_waiting: float = 1.0  # the load of each waiting request
    unit: str = "requests a second"


class ReplicasReady(NamedTuple):
    """How many replicas serve now."""

    at_s: float
    replicas: int


class ScalerTick(NamedTuple):
    """Time passed."""

    at_s: float


class _Need(NamedTuple):
    at_s: float
    replicas: int


@dataclass(frozen=True, slots=True)
class ScalerState:
    """All that a scaler remembers."""

    target: int
    ready: int
    phase: ScalerPhase = ScalerPhase.STEADY
    trend: RateTrend = field(default_factory=RateTrend)
    needs: tuple[_Need, ...] = ()  # of the last hold_s, band added; the oldest first
    began_s: float | None = None  # of the first observation
    rose_at_s: float = -math.inf
    fell_at_s: float = -math.inf
    risen_from: int = 0  # what a rise of this start is a multiple of
    reserve: RateReserve = field(default_factory=RateReserve)
    is_short: bool = False  # replicas were lost and others do not serve yet


class ReplicaDecision(NamedTuple):
    """What should be, and why."""

    replicas: int
    reason: str


class ReplicaScaler:
    """The transitions; holds nothing but its limits and the model."""

    def __init__(self, limits: ScalingLimits, needed: Callable[[float], int]) -> None:
        """`needed` is how many replicas keep the objective at a rate in Hz, uncertainty added; it never falls with it."""
        self.limits = limits
        self._needed = needed

    def initial_state(self, replicas: int) -> ScalerState:
        """The state before the first event."""
        return ScalerState(target=self._clamp_replicas(replicas), ready=replicas)

    def scale_replicas(
        self, state: ScalerState, event: LoadObserved | ReplicasReady | ScalerTick
    ) -> tuple[ScalerState, ReplicaDecision]:
        """The state after an event, and what should be."""
        match event:
            case LoadObserved():
                return self._on_load(state, event)
            case ReplicasReady():
                return self._on_ready(state, event)
            case ScalerTick():
                return self._on_tick(state, event.at_s)

    def _on_ready(self, state: ScalerState, event: ReplicasReady) -> tuple[ScalerState, ReplicaDecision]:
        ready = replace(state, ready=event.replicas, is_short=state.is_short and event.replicas < state.target)
        if ready.phase is ScalerPhase.RISING and event.replicas >= state.target:
            ready = replace(ready, phase=ScalerPhase.STEADY)
        if event.replicas < min(state.ready, state.target):
            # More rate in reserve would not have kept what a loss broke, before it was seen or after.
            reserve = state.reserve
            if event.at_s - reserve.broken_at_s <= OVERLOAD_QUEUE_S:
                reserve = reserve._replace(share=max(0.0, reserve.share - RESERVE_STEP))
            ready = replace(ready, is_short=True, reserve=reserve)
        return ready, ReplicaDecision(ready.target, f"{event.replicas} of {ready.target} serve")

    def _reserve(self, state: ScalerState, event: LoadObserved) -> RateReserve:
        """The reserve after a window; what a burst breaks while replicas start counts once."""
        is_one_burst = event.at_s - state.reserve.broken_at_s <= self.limits.start_s
        is_futile = state.is_short or state.target >= self.limits.most
        if not event.is_promise_broken or is_one_burst or is_futile:
            return decay_reserve(state.reserve, event.at_s)
        return raise_reserve(state.reserve, event.at_s)

    def _on_tick(self, state: ScalerState, at_s: float) -> tuple[ScalerState, ReplicaDecision]:
        last_s = state.trend.at_s
        if last_s is None or at_s - last_s <= self.limits.stale_after_s:
            return state, ReplicaDecision(state.target, "nothing new")
        blind = replace(state, phase=ScalerPhase.BLIND)
        return blind, ReplicaDecision(state.target, f"blind for {at_s - last_s:.0f} s: no replica is removed")

    def _on_load(self, state: ScalerState, event: LoadObserved) -> tuple[ScalerState, ReplicaDecision]:
        limits = self.limits
        last_s = state.trend.at_s
        if not (math.isfinite(event.arrived_hz) and event.arrived_hz >= 0.0) or (
            last_s is not None and event.at_s <= last_s
        ):
            return state, ReplicaDecision(state.target, "an invalid or old window: nothing changes")
        was_blind = last_s is not None and event.at_s - last_s > limits.stale_after_s
        # What was seen before a blind time says nothing of now: the look-back begins anew.
        trend = update_trend(RateTrend() if was_blind else state.trend, event.arrived_hz, event.at_s)
        began_s = event.at_s if was_blind or state.began_s is None else state.began_s
        reserve = self._reserve(state, event)
        upper_hz = forecast_rate(trend, limits.start_s).upper_hz * (1.0 + reserve.share)
        backlog_hz = max(0.0, event.waiting or 0.0) * event.of_waiting / limits.drain_s
        up = self._clamp_replicas(self._needed(upper_hz + backlog_hz))
        keep_hz = max(upper_hz, event.arrived_hz * (1.0 + limits.band))
        keep = max(up, self._clamp_replicas(self._needed(keep_hz + backlog_hz)))
        reason = f"{_format_load(upper_hz)} {event.unit} in {limits.start_s:g} s need {up}"
        if backlog_hz > 0.0:
            reason = f"{event.waiting:g} wait; {reason}"
        if event.is_promise_broken and event.at_s - state.rose_at_s >= limits.start_s:
            up, reason = max(up, self._clamp_replicas(state.target + 1)), f"the promise is broken; {reason}"
        fresh = (need for need in state.needs if not was_blind and event.at_s - need.at_s < limits.hold_s)
        needs = (*fresh, _Need(event.at_s, max(keep, up)))[-_KEPT_MOST:]
        known = replace(state, phase=ScalerPhase.STEADY, trend=trend, needs=needs, began_s=began_s, reserve=reserve)
        after, decision = (
            self._rise(known, event.at_s, up, reason) if up > state.target else self._fall(known, event, reason)
        )
        if reserve.share >= _RESERVE_TOLD:
            told = f"{decision.reason}; {100.0 * reserve.share:.0f} % in reserve, as its promise was broken"
            decision = decision._replace(reason=told)
        return after, decision

    def _rise(self, state: ScalerState, at_s: float, up: int, reason: str) -> tuple[ScalerState, ReplicaDecision]:
        limits = self.limits
        anew = at_s - state.rose_at_s >= limits.start_s
        origin = state.target if anew else state.risen_from
        most = math.ceil(limits.rise * origin) + 2
        target = max(state.target, min(up, most))
        risen = replace(
            state,
            target=target,
            phase=ScalerPhase.RISING if target > state.ready else ScalerPhase.STEADY,
            rose_at_s=at_s if anew else state.rose_at_s,
            risen_from=origin,
        )
        held = f", {most} at most for now" if most < up else ""
        return risen, ReplicaDecision(target, f"up: {reason}{held}")

    def _fall(self, state: ScalerState, event: LoadObserved, reason: str) -> tuple[ScalerState, ReplicaDecision]:
        limits = self.limits
        worst = max(need.replicas for need in state.needs)
        rising = replace(state, phase=ScalerPhase.RISING if state.ready < state.target else ScalerPhase.STEADY)
        if worst >= state.target:
            return rising, ReplicaDecision(state.target, reason)
        growing = (event.waiting_growth or 0.0) > 0.0 and (event.waiting or 0.0) > 0.0
        looked_back = state.began_s is not None and event.at_s - state.began_s >= limits.hold_s
        if growing or event.is_promise_broken or not looked_back:
            why = "a queue grows" if growing else "the promise is broken" if event.is_promise_broken else "too early"
            return rising, ReplicaDecision(state.target, f"kept, {why}: {reason}")
        if event.at_s - max(state.fell_at_s, state.rose_at_s) < limits.cool_s:
            return rising, ReplicaDecision(state.target, f"kept, cooling down: {reason}")
        target = max(worst, state.target - max(1, math.floor(limits.fall * state.target)))
        fallen = replace(state, target=target, fell_at_s=event.at_s)
        return fallen, ReplicaDecision(
            target, f"down: the highest demand of the last {limits.hold_s:g} s needs {worst}"
        )

    def _clamp_replicas(self, replicas: int) -> int:
        return min(self.limits.most, max(self.limits.least, replicas))


def _format_load(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 1000.0 else f"{amount:.3g}"


_HAIR_S = 1.0  # by which clocks of a node and of the controller may differ


@dataclass(frozen=True, slots=True)
class AutoscalerTarget:
    """What a service is, what it promised, and what may be done."""

    model: ServiceModel
    limits: ScalingLimits


@dataclass(frozen=True, slots=True)
class AutoscalerState:
    """All that is remembered of a service."""

    state: ScalerState
    correction: ServiceCalibration = field(default_factory=ServiceCalibration)
    since_s: float = -math.inf  # when another number of replicas began to serve
    before: ServiceCalibration | None = (
        None  # what was known before the newest window; None where nothing is to be unlearned
    )


class AutoscalerAdvice(NamedTuple):
    """What should be, why, and what the live quantile was."""

    decision: ReplicaDecision
    live: LiveQuantile | None
    model_s: float | None  # by the profile alone, at the replicas that served
    is_profile_wrong: bool  # the correction is at its bound: measure the service anew


def _scaler(promised: AutoscalerTarget, correction: ServiceCalibration, now_s: float) -> ReplicaScaler:
    @cache
    def calibrated() -> tuple[ServiceModel, SlownessFactor]:
        return promised.model.calibrated(correction, now_s)

    def needed(rate_hz: float) -> int:
        model, known = calibrated()
        return model.needed_replicas(rate_hz, known, promised.limits.most)

    return ReplicaScaler(promised.limits, needed)


def start_autoscaler(promised: AutoscalerTarget, replicas: int) -> AutoscalerState:
    """The watch before the first window."""
    return AutoscalerState(_scaler(promised, ServiceCalibration(), 0.0).initial_state(replicas))


def on_window(
    promised: AutoscalerTarget, watch: AutoscalerState, window: MetricsWindow, at_s: float
) -> tuple[AutoscalerState, AutoscalerAdvice]:
    """The watch after a window that ends at `at_s`."""
    model, correction, ready = promised.model, watch.correction, watch.state.ready
    live = model.live_quantile(window)
    load = read_load(model, window)
    if load is None:
        _, decision = _scaler(promised, correction, at_s).scale_replicas(watch.state, ScalerTick(at_s))
        missing = model.metric.unit if isinstance(model, LoadService) else "arrivals"
        unread = ReplicaDecision(decision.replicas, f"no {missing} in the metrics; {decision.reason}")
        return watch, AutoscalerAdvice(unread, live, None, is_at_bound(correction))
    model_s = None
    if ready > 0:
        model_s = model.expected_s(window, ready)
        if at_s - window.seconds >= watch.since_s - _HAIR_S:
            correction = model.calibrate(correction, window, ready, at_s)
    late = model.is_late(window)
    if late:
        planned, known = model.calibrated(correction, at_s)
        late = not planned.is_hopeless(known)
    seen = LoadObserved(
        at_s, load.amount, window.waiting, window.waiting_growth, late, of_waiting=load.of_waiting, unit=load.unit
    )
    state, decision = _scaler(promised, correction, at_s).scale_replicas(watch.state, seen)
    seen_now = replace(watch, state=state, correction=correction, before=watch.correction)
    return seen_now, AutoscalerAdvice(decision, live, model_s, is_at_bound(correction))


def on_ready_replicas(
    promised: AutoscalerTarget, watch: AutoscalerState, replicas: int, at_s: float
) -> AutoscalerState:
    """The watch after so many replicas began, or ceased, to serve."""
    state, _ = _scaler(promised, watch.correction, at_s).scale_replicas(watch.state, ReplicasReady(at_s, replicas))
    if replicas == watch.state.ready:
        return replace(watch, state=state)
    correction, newest_s = watch.correction, watch.state.trend.at_s
    lost = replicas < min(watch.state.ready, watch.state.target)
    if lost and watch.before is not None and newest_s is not None and at_s - newest_s <= OVERLOAD_QUEUE_S:
        correction = watch.before
    return replace(watch, state=state, correction=correction, since_s=at_s, before=None)


def on_tick(
    promised: AutoscalerTarget, watch: AutoscalerState, at_s: float
) -> tuple[AutoscalerState, AutoscalerAdvice]:
    """The watch after time without a window."""
    state, decision = _scaler(promised, watch.correction, at_s).scale_replicas(watch.state, ScalerTick(at_s))
    return replace(watch, state=state), AutoscalerAdvice(decision, None, None, is_at_bound(watch.correction))
