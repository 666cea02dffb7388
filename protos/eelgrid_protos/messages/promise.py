"""Promises: objectives of services and jobs, and how they are measured; mirrored by promise.proto."""

import re
from collections.abc import Iterator
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.quantities import (
    Label,
    Many,
    Nanoseconds,
    OpenEnum,
    Range,
    Seconds,
    Text,
)
from eelgrid_protos.values import dataclass

RateHz = Annotated[float, Range(0.0, 1e9, "Hz")]
_URL = re.compile(r"(https?://[^\s\x00-\x1f]+)?")
Url = Annotated[str, Text(2000, False, _URL, "an http or https URL")]
_UNIT = re.compile(r"([a-z][a-z_]{0,23})?")
WorkUnit = Annotated[str, Text(24, False, _UNIT, "one lower-case word in the singular, such as step or image")]
# Units of services: sums over a group must not mix them with those of jobs.
_SERVED_UNITS = ("request", "token", "work")
_FIELDS = ("node", "replica")


class LatencyMetric(OpenEnum):
    """The time of a request that an objective bounds."""

    UNSPECIFIED = 0
    RESPONSE = 1
    FIRST_TOKEN = 2
    INTER_TOKEN = 3


class LoadMetric(OpenEnum):
    """A load of which each replica of a service carries a part."""

    UNSPECIFIED = 0
    REQUESTS = 1
    TOKENS = 2
    IN_FLIGHT = 3

    @property
    def unit(self) -> str:
        """What the load is counted in."""
        return "requests in flight" if self is LoadMetric.IN_FLIGHT else f"{self.name.lower()} a second"


class MetricsServer(OpenEnum):
    """The serving program whose metric names a page uses."""

    UNSPECIFIED = 0
    VLLM = 1
    SGLANG = 2
    TGI = 3
    TRITON = 4
    RAY_SERVE = 5
    GENERIC = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyObjective:
    """Met when this quantile is at most latency_s."""

    metric: LatencyMetric
    latency_s: Annotated[float, Range(1e-6, 1e6, "s")]
    quantile: Annotated[float, Range(0.5, 0.99)] = 0.95

    def violations(self) -> Iterator[Violation]:
        """Checks that the metric is set explicitly."""
        if self.metric is LatencyMetric.UNSPECIFIED:
            yield Violation("metric", "is not set or not known here", "choose response, first_token or inter_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSource:
    """Where a replica's own metrics are, in Prometheus' text format; {node} and {replica} are substituted."""

    server: MetricsServer
    url: Url
    model: Label = ""
    latency_histogram: Label = ""
    waiting_gauge: Label = ""
    work_counter: Label = ""

    def violations(self) -> Iterator[Violation]:
        """Checks that placeholders are known, and that the generic server has a metric name."""
        if self.server is MetricsServer.UNSPECIFIED:
            names = ", ".join(server.name.lower() for server in MetricsServer if server)
            yield Violation("server", "is not set or not known here", f"choose one of {names}")
        if not self.url:
            yield Violation("url", "is empty", "give the page, such as http://{node}:8000/metrics")
        strange = [name for name in re.findall(r"{([^{}]*)}", self.url) if name not in _FIELDS]
        if strange:
            yield Violation("url", f"holds {{{strange[0]}}}", "use {node} and {replica} only")
        if self.server is MetricsServer.GENERIC and not (self.latency_histogram or self.work_counter):
            yield Violation("latency_histogram", "is empty", "name a histogram of seconds, or work_counter for a job")


_TELL_TOKENS = (MetricsServer.VLLM, MetricsServer.SGLANG, MetricsServer.TGI)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """How much each replica should carry: requests or output tokens per second, or requests that run or wait."""

    metric: LoadMetric
    per_replica: Annotated[float, Range(1e-6, 1e9)]

    def violations(self) -> Iterator[Violation]:
        """Checks that the metric is set explicitly."""
        if self.metric is LoadMetric.UNSPECIFIED:
            yield Violation("metric", "is not set or not known here", "choose requests, tokens or in_flight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePromise:
    """The expected load of an inference service, and its objectives or how much each replica should carry."""

    profile: Label = ""
    objectives: Annotated[tuple[LatencyObjective, ...], Many(3)] = ()
    rate_hz: RateHz = 0.0
    replicas_least: Annotated[int, Range(1, 10_000)] = 1
    replicas_most: Annotated[int, Range(1, 10_000)] = 64
    start_s: Seconds = 60.0
    metrics: MetricsSource | None = None
    output_tokens: Annotated[float, Range(0.0, 1e7)] = 0.0
    arrival_cv2: Annotated[float, Range(0.0, 100.0)] = 1.0
    slices: bool = False
    load_target: LoadTarget | None = None

    def violations(self) -> Iterator[Violation]:
        """Checks that objectives are for the whole answer or for its tokens, each once, or that there is a load target."""
        if self.replicas_least > self.replicas_most:
            yield Violation("replicas_least", f"is above replicas_most {self.replicas_most}", "give least <= most")
        if self.load_target is not None:
            yield from self._load_violations(self.load_target)
            return
        metrics = [objective.metric for objective in self.objectives]
        if not metrics:
            yield Violation("objectives", "are empty", "promise a latency, or give load_target in their place")
        if not self.profile:
            yield Violation("profile", "is empty", "name the one that says how fast it is, or give load_target instead")
        if len(set(metrics)) < len(metrics):
            yield Violation("objectives", "name one metric twice", "give each metric one objective")
        if LatencyMetric.RESPONSE in metrics and len(metrics) > 1:
            yield Violation("objectives", "mix the response with tokens", "promise the response, or its tokens")
        if LatencyMetric.FIRST_TOKEN in metrics and LatencyMetric.INTER_TOKEN not in metrics:
            yield Violation("objectives", "have first_token alone", "promise inter_token beside it")
        if LatencyMetric.INTER_TOKEN in metrics and self.output_tokens <= 0.0:
            yield Violation("output_tokens", "is 0 with an objective on tokens", "give the tokens of a usual answer")
        if self.slices and metrics != [LatencyMetric.RESPONSE]:
            yield Violation("slices", "need one objective, on the response", "promise it, or serve from whole GPUs")
        if self.slices and self.replicas_least > 1:
            yield Violation("replicas_least", f"is {self.replicas_least} with slices", "leave it 1: the planner counts")

    def _load_violations(self, target: LoadTarget) -> Iterator[Violation]:
        for name in ("objectives", "profile", "slices", "rate_hz"):
            if getattr(self, name):
                yield Violation(name, "is given beside load_target", "give objectives with a profile, or load_target")
        server = MetricsServer.UNSPECIFIED if self.metrics is None else self.metrics.server
        if self.metrics is None:
            yield Violation("metrics", "are missing", "say where each replica's page is: the load is read from it")
        elif target.metric is LoadMetric.TOKENS and server not in _TELL_TOKENS:
            told = ", ".join(one.name.lower() for one in _TELL_TOKENS)
            yield Violation(
                "load_target.metric",
                f"is tokens, which {server.name.lower()} does not tell ({told} do)",
                "choose requests or in_flight",
            )
        elif target.metric is LoadMetric.IN_FLIGHT and server is MetricsServer.TRITON:
            yield Violation(
                "load_target.metric", "is in_flight, of which triton tells what waits alone", "choose requests"
            )
        elif server is MetricsServer.GENERIC:
            yield from _generic_violations(target, self.metrics)


def _generic_violations(target: LoadTarget, metrics: MetricsSource) -> Iterator[Violation]:
    if target.metric is LoadMetric.IN_FLIGHT and not metrics.waiting_gauge:
        yield Violation("metrics.waiting_gauge", "is empty", "name the gauge of requests inside, or choose requests")
    if target.metric is LoadMetric.REQUESTS and not metrics.latency_histogram:
        yield Violation("metrics.latency_histogram", "is empty", "name the histogram that counts the requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPromise:
    """What a job may lose to a power limit: a maximum slowdown, a deadline, or best effort."""

    profile: Label = ""
    slowdown_most: Annotated[float, Range(0.0, 10.0)] | None = None
    work: Annotated[float, Range(0.0, 1e18)] = 0.0
    deadline_ns: Nanoseconds = 0
    energy_weight: Annotated[float, Range(0.0, 1.0)] | None = None
    metrics: MetricsSource | None = None
    replicas_least: Annotated[int, Range(0, 10_000)] = 0
    replicas_most: Annotated[int, Range(0, 10_000)] = 0
    restart_s: Seconds = 0.0
    work_unit: WorkUnit = ""

    @property
    def is_elastic(self) -> bool:
        """Returns whether its replicas may change while it runs."""
        return self.replicas_most > 0

    def violations(self) -> Iterator[Violation]:
        """Checks that exactly one objective is set; a deadline needs the amount of work."""
        given = [self.slowdown_most is not None, self.deadline_ns > 0, self.energy_weight is not None]
        if sum(given) != 1:
            yield Violation(
                "slowdown_most",
                "is one of several promises" if any(given) else "is not set, nor is another promise",
                "give one of slowdown_most, deadline_ns with work, and energy_weight",
            )
        if self.work_unit in _SERVED_UNITS:
            yield Violation(
                "work_unit", f"is {self.work_unit}, which others are counted by", "write such as trained_token"
            )
        # The work of an elastic job may be due by the deadline of the workload instead.
        if (self.deadline_ns > 0) > (self.work > 0.0) or (self.work > 0.0) > (self.deadline_ns > 0 or self.is_elastic):
            yield Violation("work", "and deadline_ns go together", "give both or neither")
        if (self.replicas_least > 0) != self.is_elastic or self.replicas_least > self.replicas_most:
            yield Violation(
                "replicas_least",
                f"is {self.replicas_least} of at most {self.replicas_most}",
                "give 1 <= replicas_least <= replicas_most, or neither",
            )
        if self.is_elastic and not self.profile:
            yield Violation("profile", "is empty for an elastic job", "name the profile with a point for each number")
        if self.metrics is not None and not self.metrics.work_counter:
            yield Violation("metrics.work_counter", "is empty", "name the counter of units of work done")
