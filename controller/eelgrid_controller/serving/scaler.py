"""How many replicas a service should have: events in, a target and its reason out.

Owns the state machine. Must not know how replicas are made, what they cost or how
many a rate needs: it is given that as a function.

    STEADY   the target is reached and is what is needed
    RISING   replicas were asked for and are not ready yet
    BLIND    what is known is older than `stale_after_s`

Theory. Two questions with two answers, so that noise moves nothing:
    up    how many does the forecast need?            asked of the newest window alone
    down  how many did the worst of the last `hold_s` need, `band` of rate added?
The second is never less than the first was in that time, so a fall is followed by no
rise unless the rate leaves what was seen: noise within the band settles once. What
waits must be served beside what comes: `waiting / drain_s` is added to the rate, so
that a queue that grows is overload whatever the output rate says. A promise that is
broken now asks for one more than there is, once for each start. A rise is at most
`rise` fold (and two more) of what is ready or was asked for before, a fall at most
`fall` of it (at least one) each `cool_s`. Old data, or none, never lower the target.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from eelgrid_controller.serving.errors import Unusable
from eelgrid_controller.serving.forecast import Trend, ahead, seen

__all__ = ["Decision", "Limits", "Observed", "Phase", "Ready", "Scaler", "State", "Tick"]

_KEPT_MOST = 512  # windows that a state remembers


class Phase(Enum):
    """What the scaler waits for."""

    STEADY = "steady"
    RISING = "rising"
    BLIND = "blind"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
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
            raise Unusable("least", f"{self.least} of at most {self.most}", "give 0 <= least <= most")
        if min(self.hold_s, self.stale_after_s, self.drain_s) <= 0.0 or min(self.start_s, self.cool_s) < 0.0:
            raise Unusable("hold_s", "a time that is not above 0", "give seconds")
        if self.rise < 1.0 or not 0.0 < self.fall <= 1.0 or self.band < 0.0:
            raise Unusable("rise", "a bound that forbids all change", "give rise >= 1, 0 < fall <= 1, band >= 0")


class Observed(NamedTuple):
    """A window of all replicas that ends at `at_s`."""

    at_s: float
    arrived_hz: float
    waiting: float | None = None  # at the end; None where the servers do not tell
    waiting_growth: float | None = None
    is_promise_broken: bool = False  # the live quantile is above the objective


class Ready(NamedTuple):
    """How many replicas serve now."""

    at_s: float
    replicas: int


class Tick(NamedTuple):
    """Time passed."""

    at_s: float


class _Need(NamedTuple):
    at_s: float
    replicas: int


@dataclass(frozen=True, slots=True)
class State:
    """All that a scaler remembers."""

    target: int
    ready: int
    phase: Phase = Phase.STEADY
    trend: Trend = field(default_factory=Trend)
    needs: tuple[_Need, ...] = ()  # of the last hold_s, band added; the oldest first
    began_s: float | None = None  # of the first observation
    rose_at_s: float = -math.inf
    fell_at_s: float = -math.inf
    risen_from: int = 0  # what a rise of this start is a multiple of


class Decision(NamedTuple):
    """What should be, and why."""

    replicas: int
    reason: str


class Scaler:
    """The transitions; holds nothing but its limits and the model."""

    def __init__(self, limits: Limits, needed: Callable[[float], int]) -> None:
        """`needed` is how many replicas keep the objective at a rate in Hz, uncertainty added; it never falls with it."""
        self.limits = limits
        self._needed = needed

    def begin(self, replicas: int) -> State:
        """The state before the first event."""
        return State(target=self._bounded(replicas), ready=replicas)

    def step(self, state: State, event: Observed | Ready | Tick) -> tuple[State, Decision]:
        """The state after an event, and what should be."""
        match event:
            case Observed():
                return self._observed(state, event)
            case Ready():
                ready = replace(state, ready=event.replicas)
                if ready.phase is Phase.RISING and event.replicas >= state.target:
                    ready = replace(ready, phase=Phase.STEADY)
                return ready, Decision(ready.target, f"{event.replicas} of {ready.target} serve")
            case Tick():
                return self._ticked(state, event.at_s)

    def _ticked(self, state: State, at_s: float) -> tuple[State, Decision]:
        last_s = state.trend.at_s
        if last_s is None or at_s - last_s <= self.limits.stale_after_s:
            return state, Decision(state.target, "nothing new")
        blind = replace(state, phase=Phase.BLIND)
        return blind, Decision(state.target, f"blind for {at_s - last_s:.0f} s: nothing is taken away")

    def _observed(self, state: State, event: Observed) -> tuple[State, Decision]:
        limits = self.limits
        last_s = state.trend.at_s
        if not (math.isfinite(event.arrived_hz) and event.arrived_hz >= 0.0) or (
            last_s is not None and event.at_s <= last_s
        ):
            return state, Decision(state.target, "a window that is none, or old: nothing changes")
        was_blind = last_s is not None and event.at_s - last_s > limits.stale_after_s
        # What was seen before a blind time says nothing of now: the look-back begins anew.
        trend = seen(Trend() if was_blind else state.trend, event.arrived_hz, event.at_s)
        began_s = event.at_s if was_blind or state.began_s is None else state.began_s
        expected = ahead(trend, limits.start_s)
        backlog_hz = max(0.0, event.waiting or 0.0) / limits.drain_s
        up = self._bounded(self._needed(expected.upper_hz + backlog_hz))
        keep_hz = max(expected.upper_hz, event.arrived_hz * (1.0 + limits.band))
        keep = max(up, self._bounded(self._needed(keep_hz + backlog_hz)))
        reason = f"{expected.upper_hz:.3g} requests a second in {limits.start_s:g} s need {up}"
        if backlog_hz > 0.0:
            reason = f"{event.waiting:g} wait; {reason}"
        if event.is_promise_broken and event.at_s - state.rose_at_s >= limits.start_s:
            up, reason = max(up, self._bounded(state.target + 1)), f"the promise is broken; {reason}"
        fresh = (need for need in state.needs if not was_blind and event.at_s - need.at_s < limits.hold_s)
        needs = (*fresh, _Need(event.at_s, max(keep, up)))[-_KEPT_MOST:]
        known = replace(state, phase=Phase.STEADY, trend=trend, needs=needs, began_s=began_s)
        if up > state.target:
            return self._rise(known, event.at_s, up, reason)
        return self._fall(known, event, reason)

    def _rise(self, state: State, at_s: float, up: int, reason: str) -> tuple[State, Decision]:
        limits = self.limits
        anew = at_s - state.rose_at_s >= limits.start_s
        origin = state.target if anew else state.risen_from
        most = math.ceil(limits.rise * origin) + 2
        target = max(state.target, min(up, most))
        risen = replace(
            state,
            target=target,
            phase=Phase.RISING if target > state.ready else Phase.STEADY,
            rose_at_s=at_s if anew else state.rose_at_s,
            risen_from=origin,
        )
        held = f", {most} at most for now" if most < up else ""
        return risen, Decision(target, f"up: {reason}{held}")

    def _fall(self, state: State, event: Observed, reason: str) -> tuple[State, Decision]:
        limits = self.limits
        worst = max(need.replicas for need in state.needs)
        rising = replace(state, phase=Phase.RISING if state.ready < state.target else Phase.STEADY)
        if worst >= state.target:
            return rising, Decision(state.target, reason)
        growing = (event.waiting_growth or 0.0) > 0.0 and (event.waiting or 0.0) > 0.0
        looked_back = state.began_s is not None and event.at_s - state.began_s >= limits.hold_s
        if growing or event.is_promise_broken or not looked_back:
            why = "a queue grows" if growing else "the promise is broken" if event.is_promise_broken else "too early"
            return rising, Decision(state.target, f"kept, {why}: {reason}")
        if event.at_s - max(state.fell_at_s, state.rose_at_s) < limits.cool_s:
            return rising, Decision(state.target, f"kept, cooling: {reason}")
        target = max(worst, state.target - max(1, math.floor(limits.fall * state.target)))
        fallen = replace(state, target=target, fell_at_s=event.at_s)
        return fallen, Decision(target, f"down: the worst of {limits.hold_s:g} s needs {worst}")

    def _bounded(self, replicas: int) -> int:
        return min(self.limits.most, max(self.limits.least, replicas))
