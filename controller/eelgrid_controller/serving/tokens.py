"""Engines that answer token by token: inter-token latency and time to first token.

Owns how a measured curve of concurrency becomes the two promises of an LLM
service, and the least instances that keep them. Must not know watts, pools or
which engine it is.

Theory. An instance that holds n sequences at once gives T(n) tokens a second; both
it and the inter-token latency were measured at constant n. A service that asks for
t tokens a second of an instance runs where T(n) = t, by Little's law. In service
sequences come and go, so n wanders about its mean as a Poisson number does: the
inter-token latency is read at n + sqrt(n), not at n. The first token waits for a
free place among all sequences (a queue with places x instances servers, each held
for output tokens x inter-token latency), then for its prompt. How long a prompt
takes is often not measured: then the time to first token is None, with the reason.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eelgrid_controller.profiles.points import Point
from eelgrid_controller.serving.errors import NothingFits, Unusable
from eelgrid_controller.serving.queueing import Estimate, wait_and
from eelgrid_controller.serving.sizing import UNCORRECTED, Factor, Objective
from eelgrid_controller.serving.stations import SERVERS_MOST, Arrivals, Station

__all__ = [
    "Curve",
    "FirstToken",
    "Prefill",
    "TokenDemand",
    "curve_of",
    "first_token",
    "given_hz",
    "inter_token",
    "least_instances",
]

CURVE_ERROR = 0.10  # relative; what a point read between two measured ones may miss
_QUANTILE_ROUND = 6


class TokenDemand(NamedTuple):
    """What is asked of a whole service."""

    request_hz: float
    output_tokens: float  # mean of a request
    cv2: float = 1.0  # of the times between requests
    output_cv2: float = 1.0
    context_tokens: float = 0.0
    context_cv2: float = 1.0

    @property
    def token_hz(self) -> float:
        """Output tokens a second."""
        return self.request_hz * self.output_tokens


class Prefill(NamedTuple):
    """What a prompt costs."""

    token_s: float  # a token of the context
    fixed_s: float = 0.0


class FirstToken(NamedTuple):
    """Time to first token, or why there is none."""

    estimate: Estimate | None
    why_none: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured points of one instance, concurrency rising; quantiles never fall with it."""

    sequences: tuple[float, ...]
    token_hz: tuple[float, ...]  # rising
    inter_token_s: dict[float, tuple[float, ...]]  # by quantile


def curve_of(points: Iterable[Point]) -> Curve:
    """The curve through points that differ in `batch` alone, the most sequences at once.

    A point that gives no more tokens than one with fewer sequences is left out: nobody
    would run there. A quantile that falls with concurrency is measuring noise and is
    raised to the highest before it.
    """
    kept: list[Point] = []
    for point in sorted(points, key=lambda one: (one.configuration.batch, -one.throughput_hz)):
        if not kept or point.throughput_hz > kept[-1].throughput_hz:
            kept.append(point)
    if not kept:
        raise Unusable("points", "none", "give at least one measured point")
    known = set(kept[0].latency_s).intersection(*(point.latency_s for point in kept))
    if not known:
        raise Unusable("latency_s", "no quantile that every point has", "measure the same quantiles everywhere")
    highest = {
        level: tuple(float(value) for value in np.maximum.accumulate([point.latency_s[level] for point in kept]))
        for level in sorted(known)
    }
    return Curve(
        tuple(float(point.configuration.batch) for point in kept),
        tuple(point.throughput_hz for point in kept),
        highest,
    )


def _between(at: float, places: tuple[float, ...], values: tuple[float, ...]) -> float:
    """A straight line between neighbours, level outside: np.interp of one number, at a tenth of its time."""
    above = bisect_right(places, at)
    if above == 0:
        return values[0]
    if above == len(places):
        return values[-1]
    low, high = places[above - 1], places[above]
    return values[above - 1] + (at - low) / (high - low) * (values[above] - values[above - 1])


def _measured(curve: Curve, quantile: float) -> tuple[float, ...]:
    exact = curve.inter_token_s.get(quantile)
    if exact is not None:
        return exact
    for level, times in curve.inter_token_s.items():
        if round(level, _QUANTILE_ROUND) == round(quantile, _QUANTILE_ROUND):
            return times
    known = ", ".join(f"{level:g}" for level in curve.inter_token_s)
    raise Unusable("quantile", f"{quantile:g} was not measured", f"take one of {known}")


def given_hz(curve: Curve, sequences: float) -> float:
    """Tokens a second of an instance that holds so many sequences; in proportion below the fewest measured."""
    return min(1.0, sequences / curve.sequences[0]) * _between(sequences, curve.sequences, curve.token_hz)


def inter_token(curve: Curve, token_hz: float, quantile: float) -> Estimate:
    """Inter-token latency of an instance that gives `token_hz`; infinite where it cannot."""
    times = _measured(curve, quantile)
    if token_hz > curve.token_hz[-1]:
        return Estimate(math.inf, CURVE_ERROR)
    held = _between(token_hz, curve.token_hz, curve.sequences)
    crowded = min(curve.sequences[-1], held + math.sqrt(held))  # the engine admits no more than the last
    return Estimate(_between(crowded, curve.sequences, times), CURVE_ERROR)


def first_token(
    curve: Curve, demand: TokenDemand, instances: int, quantile: float, prefill: Prefill | None
) -> FirstToken:
    """Time to first token of a service on `instances`; no estimate where the prompt's cost is unknown."""
    if prefill is None:
        return FirstToken(None, "how long a prompt takes was not measured")
    each_hz = demand.token_hz / instances
    if each_hz > curve.token_hz[-1]:
        return FirstToken(Estimate(math.inf, CURVE_ERROR))
    held = float(np.interp(each_hz, curve.token_hz, curve.sequences))
    # By Little's law n sequences at T(n) tokens a second: each waits n / T(n) for a token, in the mean.
    step_s = held / float(np.interp(held, curve.sequences, curve.token_hz))
    places = min(SERVERS_MOST, int(curve.sequences[-1]) * instances)
    station = Station(servers=places, service_s=demand.output_tokens * step_s, service_cv2=demand.output_cv2)
    mean_s = prefill.fixed_s + prefill.token_s * demand.context_tokens + step_s
    varying = prefill.token_s * demand.context_tokens / mean_s
    cv2 = demand.context_cv2 * varying * varying
    return FirstToken(wait_and(station, Arrivals(demand.request_hz, demand.cv2), mean_s, cv2, quantile))


def least_instances(
    curve: Curve,
    demand: TokenDemand,
    inter_token_objective: Objective,
    *,
    most: int,
    first_token_objective: Objective | None = None,
    prefill: Prefill | None = None,
    factor: Factor = UNCORRECTED,
) -> int:
    """The least instances that keep both objectives, uncertainty added; NothingFits if `most` do not.

    `factor` corrects the curve. An objective for the first token without
    the prompt's cost cannot be checked: that is Unusable, not kept.
    """
    if first_token_objective is not None and prefill is None:
        raise Unusable("prefill", "not measured", "measure it, or promise no time to first token")

    def kept(instances: int) -> bool:
        asked_hz = demand.token_hz / instances
        # An engine so much slower gives the same tokens where the profile would give more.
        between = inter_token(curve, asked_hz * factor.value, inter_token_objective.quantile)
        if (
            factor.value * between.value_s * (1.0 + math.hypot(between.error * factor.doubt, factor.error))
            > inter_token_objective.latency_s
        ):
            return False
        if first_token_objective is None:
            return True
        first = first_token(curve, demand, instances, first_token_objective.quantile, prefill)
        return first.estimate is not None and first.estimate.upper_s <= first_token_objective.latency_s

    enough = 1
    while not kept(min(enough, most)):
        if enough >= most:
            raise NothingFits(
                "latency_s",
                f"{most} instances do not keep it at {demand.token_hz:g} tokens a second",
                "take a faster configuration, or allow more",
            )
        enough *= 2
    few, enough = enough // 2, min(enough, most)
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if kept(middle) else (middle, enough)
    return enough
