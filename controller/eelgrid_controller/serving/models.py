"""The two kinds of service that are watched: those that answer requests, and those that answer token by token.

Owns what the watch asks of a service: how many replicas a rate needs, what a window says
of its profile, and whether a promise is broken. Must not know scrapes, state or time.

A promise is broken if its live quantile, of enough requests, lies in a bucket above the
objective, or is above it by more than half the bucket that it was read from. Where no number of replicas keeps an
objective with the uncertainty added, more of them help no one: then as many are asked
for as keep the wait from adding more than WAIT, or the engines at their first point.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol

from eelgrid_controller.serving.correction import BOUND, STEPS, Sample, sampled, saturated, slowness
from eelgrid_controller.serving.errors import NothingFits
from eelgrid_controller.serving.live import Live, LiveQuantile, Window
from eelgrid_controller.serving.queueing import latency
from eelgrid_controller.serving.sizing import Factor, Objective, corrected, least_replicas
from eelgrid_controller.serving.stations import Arrivals, Station
from eelgrid_controller.serving.tokens import Curve, Prefill, TokenDemand, given_hz, inter_token, least_instances

__all__ = ["Model", "Requests", "Tokens"]

WAIT = 0.10
_MEAN_ERROR = 0.03  # of a slowness by the mean: replicas are not scraped at one moment


class Model(Protocol):
    """What the watch asks."""

    def needed(self, rate_hz: float, known: Factor, most: int) -> int:
        """The replicas that keep every promise at a rate of requests, uncertainty added; `most` at most."""

    def is_hopeless(self, known: Factor) -> bool:
        """Whether no number of replicas keeps the promises."""

    def expected_s(self, window: Window, replicas: int) -> float:
        """The promised quantile by the profile alone."""

    def live(self, window: Window) -> LiveQuantile | None:
        """The promised quantile as it was served."""

    def steady(self, window: Window, replicas: int) -> Sample | None:
        """What a window without a growing queue says of the profile."""

    def overloaded(self, window: Window, replicas: int) -> Sample | None:
        """What a window says in which all replicas were busy."""

    def is_late(self, window: Window) -> bool:
        """Whether a promise is broken now."""

    def places(self, replicas: int) -> int:
        """Requests that are served at once."""


def _quantile(live: Live | None, objective: Objective | None) -> LiveQuantile | None:
    return None if live is None or objective is None else live.quantile(objective.quantile)


def _late(found: LiveQuantile | None, objective: Objective | None) -> bool:
    if found is None or objective is None:
        return False
    if found.bucket_s is not None and found.bucket_s[0] >= objective.latency_s:
        return True
    return found.value_s * (1.0 - found.resolution) > objective.latency_s


@dataclass(frozen=True, slots=True)
class Requests:
    """A service with an objective on the response time of requests."""

    replica: Station
    objective: Objective
    arrival_cv2: float = 1.0

    def needed(self, rate_hz: float, known: Factor, most: int) -> int:
        """The replicas that keep the promise."""
        arrivals = Arrivals(rate_hz, self.arrival_cv2)
        for objective in (self.objective, self._unkept(known)) if most > 0 else ():
            try:
                return least_replicas(self.replica, arrivals, objective, most=most, factor=known)
            except NothingFits:
                continue
        return most

    def _unkept(self, known: Factor) -> Objective:
        """What stands for an objective that nothing keeps: an idle replica's latency and a tenth."""
        idle = corrected(self.replica, Arrivals(0.0, self.arrival_cv2), self.objective.quantile, known)
        return replace(self.objective, latency_s=max(self.objective.latency_s, (1.0 + WAIT) * idle.upper_s))

    def is_hopeless(self, known: Factor) -> bool:
        """Whether even an idle replica is too slow, or nearly."""
        return self._unkept(known).latency_s > self.objective.latency_s

    def expected_s(self, window: Window, replicas: int) -> float:
        """The quantile of the response by the profile alone."""
        arrivals = Arrivals(window.arrived_hz or 0.0, self.arrival_cv2)
        return latency(self.replica.times(replicas), arrivals, self.objective.quantile).value_s

    def live(self, window: Window) -> LiveQuantile | None:
        """The quantile of the response."""
        return _quantile(window.response, self.objective)

    def steady(self, window: Window, replicas: int) -> Sample | None:
        """The slowness at which the model gives the live quantile."""
        arrivals = Arrivals(window.arrived_hz or 0.0, self.arrival_cv2)
        return slowness(self.replica.times(replicas), arrivals, self.objective.quantile, self.live(window))

    def overloaded(self, window: Window, replicas: int) -> Sample | None:
        """The output is the capacity."""
        return saturated(self.replica.times(replicas).capacity_hz, window.finished_hz or 0.0)

    def is_late(self, window: Window) -> bool:
        """Whether the response is too slow now."""
        return _late(self.live(window), self.objective)

    def places(self, replicas: int) -> int:
        """Servers times the batch."""
        return self.replica.servers * self.replica.batch * replicas


@dataclass(frozen=True, slots=True)
class Tokens:
    """A service with objectives on inter-token latency and, where a prompt's cost is known, time to first token."""

    curve: Curve
    usual: TokenDemand  # its request_hz is not used
    inter_token: Objective
    first_token: Objective | None = None
    prefill: Prefill | None = None

    def needed(self, rate_hz: float, known: Factor, most: int) -> int:
        """The instances that keep both promises; those that can give the tokens at all, if none do."""
        if most < 1:
            return 0
        demand = self.usual._replace(request_hz=rate_hz)
        try:
            return least_instances(
                self.curve,
                demand,
                self.inter_token,
                most=most,
                first_token_objective=self.first_token,
                prefill=self.prefill,
                factor=known,
            )
        except NothingFits:
            wanted_hz = demand.token_hz * known.value * (1.0 + known.error)
            at_hz = self.curve.token_hz[0] if self.is_hopeless(known) else self.curve.token_hz[-1]
            return min(most, max(1, math.ceil(wanted_hz / at_hz)))

    def is_hopeless(self, known: Factor) -> bool:
        """Whether even the fewest sequences at once are too slow."""
        least = inter_token(self.curve, 0.0, self.inter_token.quantile)
        return (
            least.value_s * known.value * (1.0 + math.hypot(least.error * known.doubt, known.error))
            > self.inter_token.latency_s
        )

    def _each_hz(self, window: Window, replicas: int) -> float:
        return (window.output_token_hz or 0.0) / replicas

    def expected_s(self, window: Window, replicas: int) -> float:
        """The quantile of the inter-token latency by the profile alone."""
        return inter_token(self.curve, self._each_hz(window, replicas), self.inter_token.quantile).value_s

    def live(self, window: Window) -> LiveQuantile | None:
        """The quantile of the inter-token latency."""
        return _quantile(window.inter_token, self.inter_token)

    def steady(self, window: Window, replicas: int) -> Sample | None:
        """The slowness at which the curve gives the live quantile, f x ITL(f x tokens of each), and the mean."""
        each_hz, quantile = self._each_hz(window, replicas), self.inter_token.quantile

        def find(latency_s: float) -> float:
            low, high = -math.log(BOUND), math.log(BOUND)
            for _ in range(STEPS):
                middle = math.exp((low + high) / 2.0)
                if middle * inter_token(self.curve, middle * each_hz, quantile).value_s > latency_s:
                    high = math.log(middle)
                else:
                    low = math.log(middle)
            return math.exp((low + high) / 2.0)

        sample, slow = sampled(find, quantile, self.live(window)), self._by_mean(window, each_hz)
        if sample is None or sample.is_least or slow is None:
            return sample
        # A quantile may say that it is slower than its mean tells, never that it is faster: that the
        # curve is cautious at this load says nothing of the next.
        return Sample(max(slow, sample.factor), _MEAN_ERROR, is_mean=True)

    def _by_mean(self, window: Window, each_hz: float) -> float | None:
        """What the mean latency says: by Little's law so many sequences were held, and the curve gives them T tokens."""
        mean_s = None if window.inter_token is None else window.inter_token.mean_s
        if mean_s is None or mean_s <= 0.0 or each_hz <= 0.0:
            return None
        return min(BOUND, max(1.0 / BOUND, given_hz(self.curve, mean_s * each_hz) / each_hz))

    def overloaded(self, window: Window, replicas: int) -> Sample | None:
        """The output tokens are the capacity."""
        return saturated(self.curve.token_hz[-1] * replicas, window.output_token_hz or 0.0)

    def is_late(self, window: Window) -> bool:
        """Whether a token, or the first one, is too slow now."""
        first = _quantile(window.first_token, self.first_token)
        return _late(self.live(window), self.inter_token) or _late(first, self.first_token)

    def places(self, replicas: int) -> int:
        """Sequences at once."""
        return int(self.curve.sequences[-1]) * replicas
