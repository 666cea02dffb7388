"""From an objective to the least replicas, or the largest rate, that keep it.

Owns the inversion of the queueing model with its uncertainty added. Must not know
engines, watts or plans.

Theory: a configuration keeps an objective if
    model(quantile, all service times x slowness) x (1 + error) <= objective
where the error holds that of the model and that of the slowness (correction.py). A
service that is slower than its profile has less capacity too: a factor on the latency
alone would call two replicas enough where three are saturated.
The latency falls with every replica and grows with the rate, so both inversions are
bisections: doubling to a bracket, then halving.
"""

from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.serving.errors import NothingFits, Unusable
from eelgrid_controller.serving.queueing import Estimate, error_of, latency, response_tail
from eelgrid_controller.serving.stations import SERVERS_MOST, Arrivals, Station

__all__ = ["UNCORRECTED", "Factor", "Objective", "corrected", "keeps", "largest_rate_hz", "least_replicas"]

_RATE_STEPS = 26  # 1e-8 of the capacity


@dataclass(frozen=True, slots=True)
class Objective:
    """A promise: a share `quantile` of requests, or of tokens, takes no longer than `latency_s`."""

    quantile: float
    latency_s: float

    def __post_init__(self) -> None:
        if not 0.0 < self.quantile < 1.0:
            raise Unusable("quantile", f"{self.quantile}", "give a share between 0 and 1, 0.95 for p95")
        if not self.latency_s > 0.0:
            raise Unusable("latency_s", f"{self.latency_s} s", "give the seconds that were promised")


class Factor(NamedTuple):
    """What a service says of its profile: all times are `value` times as long, give or take `error`, relative."""

    value: float
    error: float
    doubt: float = 1.0  # share of an engine's error of reading between points that is left


UNCORRECTED = Factor(1.0, 0.0)


def corrected(station: Station, arrivals: Arrivals, quantile: float, factor: Factor) -> Estimate:
    """The quantile of a service so much slower; the errors add up, as if they always met."""
    estimate = latency(station.slowed(factor.value), arrivals, quantile)
    return Estimate(estimate.value_s, estimate.error + factor.error)


def keeps(station: Station, arrivals: Arrivals, objective: Objective, factor: Factor = UNCORRECTED) -> bool:
    """Whether the objective is kept with the uncertainty added.

    Asked of the tail, which is one evaluation where the quantile takes a bisection.
    """
    allowed_s = objective.latency_s / (1.0 + error_of(station, arrivals) + factor.error)
    return response_tail(station.slowed(factor.value), arrivals, allowed_s) <= 1.0 - objective.quantile


def least_replicas(
    replica: Station, arrivals: Arrivals, objective: Objective, *, most: int, factor: Factor = UNCORRECTED
) -> int:
    """The least replicas behind one queue that keep the objective; NothingFits if `most` do not."""
    most = min(most, SERVERS_MOST // replica.servers)
    enough = 1
    while not keeps(replica.times(min(enough, most)), arrivals, objective, factor):
        if enough >= most:
            alone = corrected(replica.times(most), Arrivals(0.0), objective.quantile, factor).upper_s
            raise NothingFits(
                "latency_s",
                f"{most} replicas do not keep {objective.latency_s:g} s at {arrivals.rate_hz:g} requests a second",
                "take a faster configuration: an idle one takes longer than that"
                if alone > objective.latency_s
                else "allow more replicas, or admit fewer requests",
            )
        enough *= 2
    few, enough = enough // 2, min(enough, most)
    while enough - few > 1:
        middle = (few + enough) // 2
        if keeps(replica.times(middle), arrivals, objective, factor):
            enough = middle
        else:
            few = middle
    return enough


def largest_rate_hz(station: Station, objective: Objective, *, cv2: float = 1.0, factor: Factor = UNCORRECTED) -> float:
    """The largest rate that keeps the objective, in requests a second; 0 if even an idle station does not."""
    if not keeps(station, Arrivals(0.0, cv2), objective, factor):
        return 0.0
    low_hz, high_hz = 0.0, station.capacity_hz
    for _ in range(_RATE_STEPS):
        middle_hz = (low_hz + high_hz) / 2.0
        if keeps(station, Arrivals(middle_hz, cv2), objective, factor):
            low_hz = middle_hz
        else:
            high_hz = middle_hz
    return low_hz
