"""Models of services: replicas that a load needs, and what a window says of the profile, of those that have one.

Token services are modelled by a measured curve of concurrency, token rate and inter-token latency. A profile is
calibrated by the service's own metrics: a slowness factor with its error, which decays over time; and where servers
tell the mean inter-token latency, the whole curve (`live_curve`). A service with a load target has no profile: its
replicas carry so much each.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from eelgrid_controller.objectives.services.live_curve import (
    LOG_BOUND,
    SLOWNESS_HALF_LIFE_S,
    CurvePosterior,
    CurveReading,
    condition_curve,
    curve_departure,
    curve_knots,
    start_posterior,
)
from eelgrid_controller.objectives.services.service_metrics import LiveDistribution, LiveQuantile, MetricsWindow
from eelgrid_controller.profiles.points import InvalidServingValue, NoFeasibleConfiguration, Point
from eelgrid_controller.profiles.queueing_model import (
    UNCORRECTED,
    ArrivalProcess,
    LatencyEstimate,
    QuantileObjective,
    ServiceStation,
    SlownessFactor,
    corrected_latency,
    latency_quantile,
    least_replicas,
    response_tail,
)
from eelgrid_protos.messages import LoadMetric

FACTOR_BOUND = 4.0
CORRECTION_GAIN = 0.5
HALF_LIFE_S = 600.0
PRIOR_ERROR = 0.15  # of a profile that nobody has compared with the service
_SURE = 0.10  # an own error at which a sample counts half
_OUTPUT_ERROR = 0.05  # of a capacity that is read off an output rate
_LOG_BOUND = math.log(FACTOR_BOUND)
_ROUNDING = 1e-9  # relative, of a load that is a multiple of what a replica carries
SEARCH_STEPS = 12  # of a bisection over the logarithm: 0.07 %


@dataclass(frozen=True, slots=True)
class ServiceCalibration:
    """What is known at `at_s`; a new one knows nothing."""

    at_s: float = 0.0
    log_factor: float = 0.0
    scatter: float = PRIOR_ERROR  # relative, of the samples about the factor
    samples: int = 0
    curve: CurvePosterior | None = None  # of an engine that tells its mean latency; then the factor is its slowness


class SlownessSample(NamedTuple):
    """How much slower than its profile a service was in a window."""

    factor: float  # within the bounds
    error: float  # relative, its own
    is_least: bool = False
    most: float | None = None  # any factor from `factor` to this explains it as well; None for that one alone


def quantile_error(quantile: float, live: LiveQuantile) -> float:
    """Relative error of a live quantile: how few it is taken of, and how wide its bucket."""
    few = 0.0
    if math.isfinite(live.of):
        few = math.sqrt(quantile / ((1.0 - quantile) * live.of)) / -math.log1p(-quantile)
    return few + live.resolution


def sample_quantile(
    find: Callable[[float], float], quantile: float, live: LiveQuantile | None
) -> SlownessSample | None:
    """The sample that a live quantile is, where `find` gives the factor of a latency in s; None without one."""
    if live is None or live.value_s <= 0.0:
        return None
    if live.bucket_s is None:
        return SlownessSample(find(live.value_s), quantile_error(quantile, live), live.is_least)
    low_s, high_s = live.bucket_s
    few = quantile_error(quantile, live._replace(resolution=0.0))
    return SlownessSample(find(low_s), few, live.is_least, find(high_s))


def sample_slowness(
    station: ServiceStation, arrivals: ArrivalProcess, quantile: float, live: LiveQuantile | None
) -> SlownessSample | None:
    """The sample that a live quantile of a steady window is; None without one."""

    def find(latency_s: float) -> float:
        low, high = -_LOG_BOUND, _LOG_BOUND
        for _ in range(SEARCH_STEPS):
            middle = (low + high) / 2.0
            if response_tail(station.slowed(math.exp(middle)), arrivals, latency_s) > 1.0 - quantile:
                high = middle  # so slow a service would have taken longer
            else:
                low = middle
        return math.exp((low + high) / 2.0)

    return sample_quantile(find, quantile, live)


def sample_saturation(capacity_hz: float, finished_hz: float) -> SlownessSample | None:
    """The sample that the output of a window is in which all servers were busy; None if nothing finished."""
    if finished_hz <= 0.0:
        return None
    return SlownessSample(min(FACTOR_BOUND, max(1.0 / FACTOR_BOUND, capacity_hz / finished_hz)), _OUTPUT_ERROR)


def _decay_calibration(correction: ServiceCalibration, now_s: float) -> tuple[float, float]:
    """The log factor and the error now."""
    half_life_s = HALF_LIFE_S if correction.curve is None else SLOWNESS_HALF_LIFE_S
    kept = 0.5 ** (max(0.0, now_s - correction.at_s) / half_life_s)
    return correction.log_factor * kept, correction.scatter * kept + PRIOR_ERROR * (1.0 - kept)


def _log(value: float) -> float:
    return min(_LOG_BOUND, max(-_LOG_BOUND, math.log(value)))


def update_calibration(
    correction: ServiceCalibration, sample: SlownessSample | None, at_s: float
) -> ServiceCalibration:
    """The correction after one more sample; the same without one."""
    if sample is None or not 0.0 < sample.factor < math.inf:
        return correction
    log_factor, scatter = _decay_calibration(correction, at_s)
    seen = _log(sample.factor)
    if sample.most is not None and sample.most >= sample.factor:
        log_factor = correction.log_factor
        most = _log(sample.most)
        seen = max(seen, min(log_factor, most))
        if seen == log_factor:
            gain = CORRECTION_GAIN / (1.0 + (sample.error / _SURE) ** 2)
            scatter += gain * (min(scatter, most - log_factor) - scatter)
            return replace(correction, at_s=at_s, scatter=scatter, samples=correction.samples + 1)
    if sample.is_least and seen <= log_factor:
        return correction
    gain = CORRECTION_GAIN / (1.0 + (sample.error / _SURE) ** 2)
    missed = abs(seen - log_factor)
    return ServiceCalibration(
        at_s=at_s,
        log_factor=log_factor + gain * (seen - log_factor),
        scatter=min(1.0, scatter + gain * (min(1.0, missed) - scatter)),
        samples=correction.samples + 1,
    )


def calibration_factor(correction: ServiceCalibration, now_s: float) -> SlownessFactor:
    """How much slower than its profile the service is taken to be now, and the relative error."""
    log_factor, error = _decay_calibration(correction, now_s)
    return SlownessFactor(math.exp(log_factor), error)


def is_at_bound(correction: ServiceCalibration) -> bool:
    """Whether the service is further from its profile than a correction may go: the profile is wrong."""
    return abs(correction.log_factor) >= 0.95 * _LOG_BOUND


CURVE_ERROR = 0.10  # relative; what a point read between two measured ones may miss
_QUANTILE_ROUND = 6


class TokenDemand(NamedTuple):
    """What is asked of a whole service."""

    request_hz: float
    output_tokens: float  # mean of a request
    cv2: float = 1.0  # of the times between requests

    @property
    def token_hz(self) -> float:
        """Output tokens a second."""
        return self.request_hz * self.output_tokens


@dataclass(frozen=True, slots=True)
class TokenCurve:
    """Measured points of one instance, concurrency rising; quantiles never fall with it."""

    sequences: tuple[float, ...]
    token_hz: tuple[float, ...]  # rising
    inter_token_s: dict[float, tuple[float, ...]]  # by quantile
    error: float = CURVE_ERROR  # relative, of a quantile


def token_curve(points: Iterable[Point]) -> TokenCurve:
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
        raise InvalidServingValue("points", "none", "give at least one measured point")
    known = set(kept[0].latency_s).intersection(*(point.latency_s for point in kept))
    if not known:
        raise InvalidServingValue(
            "latency_s", "no quantile that every point has", "measure the same quantiles everywhere"
        )
    highest = {
        level: tuple(float(value) for value in np.maximum.accumulate([point.latency_s[level] for point in kept]))
        for level in sorted(known)
    }
    return TokenCurve(
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


def _measured_times(curve: TokenCurve, quantile: float) -> tuple[float, ...]:
    exact = curve.inter_token_s.get(quantile)
    if exact is not None:
        return exact
    for level, times in curve.inter_token_s.items():
        if round(level, _QUANTILE_ROUND) == round(quantile, _QUANTILE_ROUND):
            return times
    known = ", ".join(f"{level:g}" for level in curve.inter_token_s)
    raise InvalidServingValue("quantile", f"{quantile:g} was not measured", f"take one of {known}")


def token_rate_hz(curve: TokenCurve, sequences: float) -> float:
    """Tokens a second of an instance that holds so many sequences; in proportion below the fewest measured."""
    return min(1.0, sequences / curve.sequences[0]) * _between(sequences, curve.sequences, curve.token_hz)


def _crowded(curve: TokenCurve, held: float) -> float:
    """The sequences at which a quantile is read: a deviation more than the mean; the engine admits no more than the last."""
    return min(curve.sequences[-1], held + math.sqrt(held))


def inter_token_latency(curve: TokenCurve, token_hz: float, quantile: float) -> LatencyEstimate:
    """Inter-token latency of an instance that gives `token_hz`; infinite where it cannot."""
    times = _measured_times(curve, quantile)
    if token_hz > curve.token_hz[-1]:
        return LatencyEstimate(math.inf, curve.error)
    held = _between(token_hz, curve.token_hz, curve.sequences)
    return LatencyEstimate(_between(_crowded(curve, held), curve.sequences, times), curve.error)


def least_instances(
    curve: TokenCurve,
    demand: TokenDemand,
    inter_token_objective: QuantileObjective,
    *,
    most: int,
    factor: SlownessFactor = UNCORRECTED,
) -> int:
    """The least instances that keep the objective, uncertainty added; NoFeasibleConfiguration if `most` do not.

    `factor` corrects the curve.
    """

    def kept(instances: int) -> bool:
        asked_hz = demand.token_hz / instances
        # An engine so much slower gives the same tokens where the profile would give more.
        between = inter_token_latency(curve, asked_hz * factor.value, inter_token_objective.quantile)
        upper_s = factor.value * between.value_s * (1.0 + math.hypot(between.error, factor.error))
        return not upper_s > inter_token_objective.latency_s

    enough = 1
    while not kept(min(enough, most)):
        if enough >= most:
            raise NoFeasibleConfiguration(
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


QUEUE_WAIT_SHARE = 0.10
QUEUE_GROWTH_SHARE = 0.05
_MEAN_ERROR = 0.03  # of a token rate at its mean latency: replicas are not scraped at one moment
_TAIL_ERROR = 0.02  # of a quantile that is told by the share of another level
_TAIL_SLOPE = 0.2  # and what is added for each share that lies between the two levels
CURVE_SDS = 1.5  # that a conditioned curve is taken to be worse than its mean
CURVE_ERROR_LEAST = 0.05  # of a latency, however well the curve is known: what lies between the points is not measured


def _is_overloaded(window: MetricsWindow, concurrent: int) -> bool:
    """Whether all servers were busy: more waits than they hold, and it grows."""
    grown_hz = (window.waiting_growth or 0.0) / window.seconds
    return grown_hz > QUEUE_GROWTH_SHARE * (window.arrived_hz or 0.0) and (window.waiting or 0.0) > concurrent


def _calibrate_factor(
    model: "RequestService | TokenService",
    correction: ServiceCalibration,
    window: MetricsWindow,
    replicas: int,
    at_s: float,
) -> ServiceCalibration:
    is_full = _is_overloaded(window, model.concurrent_requests(replicas))
    sample = model.sample_overload(window, replicas) if is_full else model.sample_steady(window, replicas)
    return update_calibration(correction, sample, at_s)


def _quantile(live: LiveDistribution | None, objective: QuantileObjective | None) -> LiveQuantile | None:
    return None if live is None or objective is None else live.quantile(objective.quantile)


def _late(found: LiveQuantile | None, objective: QuantileObjective | None) -> bool:
    if found is None or objective is None:
        return False
    if found.bucket_s is not None and found.bucket_s[0] >= objective.latency_s:
        return True
    return found.value_s * (1.0 - found.resolution) > objective.latency_s


@dataclass(frozen=True, slots=True)
class RequestService:
    """A service with an objective on the response time of requests."""

    replica: ServiceStation
    objective: QuantileObjective
    arrival_cv2: float = 1.0

    def needed_replicas(self, rate_hz: float, known: SlownessFactor, most: int) -> int:
        """The replicas that keep the promise."""
        arrivals = ArrivalProcess(rate_hz, self.arrival_cv2)
        for objective in (self.objective, self._unkept(known)) if most > 0 else ():
            try:
                return least_replicas(self.replica, arrivals, objective, most=most, factor=known)
            except NoFeasibleConfiguration:
                continue
        return most

    def _unkept(self, known: SlownessFactor) -> QuantileObjective:
        """What stands for an objective that nothing keeps: an idle replica's latency and a tenth."""
        idle = corrected_latency(self.replica, ArrivalProcess(0.0, self.arrival_cv2), self.objective.quantile, known)
        return replace(self.objective, latency_s=max(self.objective.latency_s, (1.0 + QUEUE_WAIT_SHARE) * idle.upper_s))

    def is_hopeless(self, known: SlownessFactor) -> bool:
        """Whether even an idle replica is too slow, or nearly."""
        return self._unkept(known).latency_s > self.objective.latency_s

    def expected_s(self, window: MetricsWindow, replicas: int) -> float:
        """The quantile of the response by the profile alone."""
        arrivals = ArrivalProcess(window.arrived_hz or 0.0, self.arrival_cv2)
        return latency_quantile(self.replica.replicated(replicas), arrivals, self.objective.quantile).value_s

    def live_quantile(self, window: MetricsWindow) -> LiveQuantile | None:
        """The quantile of the response."""
        return _quantile(window.response, self.objective)

    def sample_steady(self, window: MetricsWindow, replicas: int) -> SlownessSample | None:
        """The slowness at which the model gives the live quantile."""
        arrivals = ArrivalProcess(window.arrived_hz or 0.0, self.arrival_cv2)
        return sample_slowness(
            self.replica.replicated(replicas), arrivals, self.objective.quantile, self.live_quantile(window)
        )

    def sample_overload(self, window: MetricsWindow, replicas: int) -> SlownessSample | None:
        """The output is the capacity."""
        return sample_saturation(self.replica.replicated(replicas).capacity_hz, window.finished_hz or 0.0)

    def is_late(self, window: MetricsWindow) -> bool:
        """Whether the response is too slow now."""
        return _late(self.live_quantile(window), self.objective)

    def calibrate(
        self, correction: ServiceCalibration, window: MetricsWindow, replicas: int, at_s: float
    ) -> ServiceCalibration:
        """What is known after a window."""
        return _calibrate_factor(self, correction, window, replicas, at_s)

    def calibrated(self, correction: ServiceCalibration, now_s: float) -> tuple["RequestService", SlownessFactor]:
        """The model and the factor to plan with."""
        return self, calibration_factor(correction, now_s)

    def concurrent_requests(self, replicas: int) -> int:
        """Servers times the batch."""
        return self.replica.servers * self.replica.batch * replicas


@dataclass(frozen=True, slots=True)
class TokenService:
    """A service with an objective on inter-token latency; one on the time to first token is watched, not planned."""

    curve: TokenCurve
    usual: TokenDemand  # its request_hz is not used
    inter_token: QuantileObjective
    watched_first: QuantileObjective | None = None

    def needed_replicas(self, rate_hz: float, known: SlownessFactor, most: int) -> int:
        """The instances that keep the promise; if `most` do not, those that hold as few sequences at once as were measured."""
        if most < 1:
            return 0
        demand = self.usual._replace(request_hz=rate_hz)
        try:
            return least_instances(self.curve, demand, self.inter_token, most=most, factor=known)
        except NoFeasibleConfiguration:
            wanted_hz = demand.token_hz * known.value * (1.0 + known.error)
            return min(most, max(1, math.ceil(wanted_hz / self.curve.token_hz[0])))

    def is_hopeless(self, known: SlownessFactor) -> bool:
        """Whether even the fewest sequences at once are too slow."""
        least = inter_token_latency(self.curve, 0.0, self.inter_token.quantile)
        return least.value_s * known.value * (1.0 + math.hypot(least.error, known.error)) > self.inter_token.latency_s

    def _each_hz(self, window: MetricsWindow, replicas: int) -> float:
        return (window.output_token_hz or 0.0) / replicas

    def expected_s(self, window: MetricsWindow, replicas: int) -> float:
        """The quantile of the inter-token latency by the profile alone."""
        return inter_token_latency(self.curve, self._each_hz(window, replicas), self.inter_token.quantile).value_s

    def live_quantile(self, window: MetricsWindow) -> LiveQuantile | None:
        """The quantile of the inter-token latency."""
        return _quantile(window.inter_token, self.inter_token)

    def sample_steady(self, window: MetricsWindow, replicas: int) -> SlownessSample | None:
        """The slowness at which the curve gives the live quantile, f x ITL(f x tokens of each)."""
        each_hz, quantile = self._each_hz(window, replicas), self.inter_token.quantile

        def find(latency_s: float) -> float:
            low, high = -math.log(FACTOR_BOUND), math.log(FACTOR_BOUND)
            for _ in range(SEARCH_STEPS):
                middle = math.exp((low + high) / 2.0)
                if middle * inter_token_latency(self.curve, middle * each_hz, quantile).value_s > latency_s:
                    high = math.log(middle)
                else:
                    low = math.log(middle)
            return math.exp((low + high) / 2.0)

        return sample_quantile(find, quantile, self.live_quantile(window))

    def read_curve(self, window: MetricsWindow, replicas: int) -> CurveReading | None:
        """What the window says of the curve; None where servers tell no mean latency.

        By Little's law an instance whose tokens are `mean_s` apart holds mean_s x tokens sequences.
        """
        live, each_hz, curve = window.inter_token, self._each_hz(window, replicas), self.curve
        mean_s = None if live is None else live.mean_s
        if live is None or mean_s is None or mean_s <= 0.0 or each_hz <= 0.0:
            return None
        if _is_overloaded(window, self.concurrent_requests(replicas)):
            return CurveReading(curve.sequences[-1], _log(each_hz / curve.token_hz[-1]), _OUTPUT_ERROR)
        held = min(mean_s * each_hz, curve.sequences[-1])
        log_rate = _log(each_hz / token_rate_hz(curve, mean_s * each_hz))
        crowded = _crowded(curve, held)
        return CurveReading(held, log_rate, _MEAN_ERROR, crowded, *self._read_tail(live, crowded))

    def _read_tail(self, live: LiveDistribution, crowded: float) -> tuple[tuple[float, float], float]:
        """Between which logarithms the promised quantile is over that of the curve, and the error.

        A border of the histogram up to which a share of the tokens came is a quantile of that level, and the
        measured levels say how far it is from the promised one. Without a border among the measured levels the
        quantile lies between the nearest ones outside.
        """
        levels, wanted = sorted(self.curve.inter_token_s), self.inter_token.quantile
        times_s = [_between(crowded, self.curve.sequences, self.curve.inter_token_s[level]) for level in levels]
        shares = [(count / live.count, border_s) for border_s, count in zip(live.borders_s, live.counts, strict=True)]
        finite = [(share, border_s) for share, border_s in shares if 0.0 < border_s < math.inf]
        known = [one for one in finite if levels[0] <= one[0] <= levels[-1]]
        few = quantile_error(wanted, LiveQuantile(1.0, live.count, 0.0))
        if known:
            share, border_s = min(known, key=lambda one: abs(one[0] - wanted))
            off = _log(border_s / _between(share, tuple(levels), tuple(times_s)))
            return (off, off), few + _TAIL_ERROR + _TAIL_SLOPE * abs(share - wanted)
        low = max((border_s for share, border_s in finite if share < levels[0]), default=None)
        high = min((border_s for share, border_s in finite if share > levels[-1]), default=None)
        return (
            -LOG_BOUND if low is None else _log(low / times_s[0]),
            LOG_BOUND if high is None else _log(high / times_s[-1]),
        ), few + _TAIL_ERROR

    def calibrate(
        self, correction: ServiceCalibration, window: MetricsWindow, replicas: int, at_s: float
    ) -> ServiceCalibration:
        """What is known after a window: the curve where servers tell their mean latency, else a factor."""
        reading = self.read_curve(window, replicas)
        if reading is not None:
            knots = curve_knots(self.curve.sequences)
            before = correction.curve
            if before is None or before.knots != knots:
                before = start_posterior(knots, at_s)
            known = condition_curve(before, reading, at_s)
            return ServiceCalibration(
                known.at_s, known.log_factor, min(1.0, known.error), correction.samples + 1, known
            )
        if correction.curve is not None:
            return correction
        return _calibrate_factor(self, correction, window, replicas, at_s)

    def calibrated(self, correction: ServiceCalibration, now_s: float) -> tuple["TokenService", SlownessFactor]:
        """The model and the factor to plan with: the conditioned curve, CURVE_SDS worse than its mean, needs none."""
        known, curve = correction.curve, self.curve
        if known is None or known.knots != curve_knots(curve.sequences):
            return self, calibration_factor(correction, now_s)
        live = curve_departure(known, curve.sequences, now_s)
        # More sequences never give fewer tokens, nor a lower quantile.
        rates_hz = np.maximum.accumulate(np.array(curve.token_hz) * np.exp(live.log_rate - CURVE_SDS * live.rate_sd))
        slower = np.exp(live.log_latency + np.hypot(CURVE_SDS * live.latency_sd, CURVE_ERROR_LEAST))
        times_s = {
            level: tuple(np.maximum.accumulate(np.array(times) * slower).tolist())
            for level, times in curve.inter_token_s.items()
        }
        return replace(self, curve=TokenCurve(curve.sequences, tuple(rates_hz.tolist()), times_s, 0.0)), UNCORRECTED

    def sample_overload(self, window: MetricsWindow, replicas: int) -> SlownessSample | None:
        """The output tokens are the capacity."""
        return sample_saturation(self.curve.token_hz[-1] * replicas, window.output_token_hz or 0.0)

    def is_late(self, window: MetricsWindow) -> bool:
        """Whether a token, or the first one, is too slow now."""
        objective, first = self.watched_first, _quantile(window.first_token, self.watched_first)
        if (
            first is not None
            and objective is not None
            and first.value_s * (1.0 - first.resolution) > objective.latency_s
        ):
            return True
        return _late(self.live_quantile(window), self.inter_token)

    def concurrent_requests(self, replicas: int) -> int:
        """Sequences at once."""
        return int(self.curve.sequences[-1]) * replicas


class ObservedLoad(NamedTuple):
    """What a service has to carry: per second, or, of requests in flight, at once."""

    amount: float
    of_waiting: float  # what each waiting request is beside it
    unit: str


_SEEN_QUANTILE = 0.95
# The tokens of fewer answers say little of the next, and those of answers that go on count as theirs.
_FINISHED_LEAST = 20


@dataclass(frozen=True, slots=True)
class LoadService:
    """A service of which each replica carries so much of a load; no latency is promised, and none is known."""

    metric: LoadMetric
    per_replica: float
    # Of a usual answer, as its owner says; 0 if that is unknown.
    output_tokens: float = 0.0

    def needed_replicas(self, rate_hz: float, _known: SlownessFactor, most: int) -> int:
        """The replicas that carry a load, `most` where more would, or where the load is no number."""
        if not rate_hz < most * self.per_replica:
            return most
        return math.ceil(max(0.0, rate_hz) / self.per_replica * (1.0 - _ROUNDING))

    def is_hopeless(self, _known: SlownessFactor) -> bool:
        """Never: nothing is promised."""
        return False

    def expected_s(self, _window: MetricsWindow, _replicas: int) -> None:
        """No latency is known."""

    def live_quantile(self, window: MetricsWindow) -> LiveQuantile | None:
        """The 95th percentile of the response, which is not promised."""
        return None if window.response is None else window.response.quantile(_SEEN_QUANTILE)

    def is_late(self, _window: MetricsWindow) -> bool:
        """Never: nothing is promised."""
        return False

    def calibrate(
        self, correction: ServiceCalibration, _window: MetricsWindow, _replicas: int, _at_s: float
    ) -> ServiceCalibration:
        """Nothing is corrected."""
        return correction

    def calibrated(self, _correction: ServiceCalibration, _now_s: float) -> tuple["LoadService", SlownessFactor]:
        """The model itself."""
        return self, UNCORRECTED

    def read_load(self, window: MetricsWindow) -> ObservedLoad | None:
        """The load of a window.

        Replicas that are full give no more tokens, however many requests come: so tokens are those that were given, and
        those that requests which came to wait would be given, each as many as the others. Where too few have finished to
        say how many that is, as at the start of a burst, it is what their owner says, or what those inside have got by now.
        """
        unit = self.metric.unit
        if self.metric is LoadMetric.IN_FLIGHT:
            inside = [value for value in (window.running, window.waiting) if value is not None]
            return ObservedLoad(sum(inside), 0.0, unit) if inside else None
        if self.metric is LoadMetric.REQUESTS:
            return None if window.arrived_hz is None else ObservedLoad(window.arrived_hz, 1.0, unit)
        if window.output_token_hz is None:
            return None
        given, finished = window.output_token_hz * window.seconds, (window.finished_hz or 0.0) * window.seconds
        if finished >= _FINISHED_LEAST:
            each = given / finished
        else:
            each = self.output_tokens or given / max(1.0, finished + (window.running or 0.0))
        waiting_hz = max(0.0, window.waiting_growth or 0.0) / window.seconds
        return ObservedLoad(window.output_token_hz + each * waiting_hz, each, unit)


ServiceModel: TypeAlias = RequestService | TokenService | LoadService


def read_load(model: ServiceModel, window: MetricsWindow) -> ObservedLoad | None:
    """What a window says that a service has to carry; None where its servers do not tell."""
    if isinstance(model, LoadService):
        return model.read_load(window)
    arrived_hz = window.arrived_hz
    return None if arrived_hz is None else ObservedLoad(arrived_hz, 1.0, LoadMetric.REQUESTS.unit)
