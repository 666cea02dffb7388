"""Reads what a service did between two scrapes: latency distributions, rates and queue lengths.

Parses metrics pages in the Prometheus text format (0.0.4) and the OpenMetrics additions that servers write, and has the
metric names of each supported inference server. Counters that fell were reset. `ScrapeTarget` says which pages of a
workload are wanted, `ScrapeRound` what its replicas answered.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.profiles.points import InvalidServingValue, MetricsUnreadable

BYTES_MOST = 16 * 1024 * 1024
SAMPLES_MOST = 200_000

SampleLabels = tuple[tuple[str, str], ...]  # sorted by name

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*(?:\{(.*)\})?[ \t]*([^\s{}]+)(?:[ \t]+(-?[0-9.eE+]+))?[ \t]*\Z")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|\Z)')
_ESCAPED = re.compile(r"\\(.)")
_EXEMPLAR = re.compile(r"(\}|\s)\s*[^\s{}#]+(?:\s+[0-9.eE+-]+)?\s+#\s*\{")
_WORDS = {"+Inf": math.inf, "-Inf": -math.inf, "Inf": math.inf, "NaN": math.nan, "Nan": math.nan}


class MetricSample(NamedTuple):
    """One line."""

    name: str
    labels: SampleLabels
    value: float

    def label(self, name: str) -> str | None:
        """The value of a label; None without it."""
        return next((value for key, value in self.labels if key == name), None)


@dataclass(frozen=True, slots=True)
class ExpositionPage:
    """All samples of a page and when they were read."""

    at_s: float  # of a clock that does not jump
    samples: Mapping[str, tuple[MetricSample, ...]]  # by name

    def samples_of(self, name: str) -> tuple[MetricSample, ...]:
        """The samples of a name; empty without any."""
        return self.samples.get(name, ())


class ScrapeTarget(NamedTuple):
    """Whose pages are wanted: where, by replica, and which metrics of them."""

    urls: Mapping[int, str]
    names: frozenset[str]  # all that is kept of a page


class ScrapeRound(NamedTuple):
    """What all replicas of one workload answered; a text says why there is no page."""

    at_s: float  # when it began
    pages: Mapping[tuple[int, str], ExpositionPage | str]  # by replica and address


def _number(text: str, line: int) -> float:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return float(text)
    except ValueError:
        raise MetricsUnreadable(f"line {line}", f"{text[:40]!r} is no number", "scrape the text format") from None


def _labels(text: str, line: int) -> SampleLabels:
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(text.rstrip()):
        match = _LABEL.match(text, at)
        if match is None:
            raise MetricsUnreadable(f"line {line}", f"labels {text[:60]!r}", "scrape the text format")
        value = match[2]
        if "\\" in value:
            value = _ESCAPED.sub(lambda escaped: "\n" if escaped[1] == "n" else escaped[1], value)
        found.append((match[1], value))
        at = match.end()
    return tuple(sorted(found))


def parse_exposition(text: str, at_s: float) -> ExpositionPage:
    """The samples of a page; raises MetricsUnreadable, which names the first line that cannot be parsed."""
    if len(text) > BYTES_MOST:
        raise MetricsUnreadable("page", f"{len(text)} bytes", f"scrape a page of at most {BYTES_MOST}")
    found: dict[str, list[MetricSample]] = {}
    count = 0
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if " # " in line and _EXEMPLAR.search(line):
            line = line[: line.rindex(" # ")].rstrip()
        match = _SAMPLE.match(line)
        if match is None:
            raise MetricsUnreadable(f"line {number}", f"{line[:60]!r} is no sample", "scrape the text format")
        count += 1
        if count > SAMPLES_MOST:
            raise MetricsUnreadable("page", f"more than {SAMPLES_MOST} samples", "scrape one server at a time")
        sample = MetricSample(match[1], _labels(match[2] or "", number), _number(match[3], number))
        found.setdefault(sample.name, []).append(sample)
    return ExpositionPage(at_s, {name: tuple(samples) for name, samples in found.items()})


_MILLI, _MICRO = 1e-3, 1e-6


@dataclass(frozen=True, slots=True)
class DistributionNames:
    """A histogram or a summary by its name without _bucket, _sum and _count."""

    names: tuple[str, ...] = ()
    factor: float = 1.0  # to seconds
    summaries: tuple[str, ...] = ()  # quantiles of a sliding window that the server made itself
    summary_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class SumNames:
    """Counters or gauges; of a quotient of two counters `over` is the lower one."""

    names: tuple[str, ...] = ()
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNames:
    """What one kind of server tells."""

    response: DistributionNames = DistributionNames()  # a whole request, waiting included
    first_token: DistributionNames = DistributionNames()
    inter_token: DistributionNames = DistributionNames()
    waiting_time: DistributionNames = DistributionNames()
    response_time_sum: SumNames = SumNames()  # seconds of all requests, where there is no distribution
    arrived: SumNames = SumNames()  # requests that came; empty: finished and the growth of what is inside
    finished: SumNames = SumNames()
    waiting: SumNames = SumNames()  # gauge
    running: SumNames = SumNames()  # gauge
    output_tokens: SumNames = SumNames()
    context_tokens: SumNames = SumNames()
    model_label: str = "model_name"
    notes: str = ""


SERVER_NAMES: Mapping[str, ServerNames] = {
    "vllm": ServerNames(
        response=DistributionNames(("vllm:e2e_request_latency_seconds",)),
        first_token=DistributionNames(("vllm:time_to_first_token_seconds",)),
        inter_token=DistributionNames(("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")),
        waiting_time=DistributionNames(("vllm:request_queue_time_seconds",)),
        finished=SumNames(("vllm:request_success_total",)),
        waiting=SumNames(("vllm:num_requests_waiting",)),
        running=SumNames(("vllm:num_requests_running",)),
        output_tokens=SumNames(("vllm:generation_tokens_total",)),
        context_tokens=SumNames(("vllm:prompt_tokens_total",)),
        notes="counts what finished, not what came: arrivals are finished plus growth of waiting and running",
    ),
    "sglang": ServerNames(
        response=DistributionNames(("sglang:e2e_request_latency_seconds",)),
        first_token=DistributionNames(("sglang:time_to_first_token_seconds",)),
        inter_token=DistributionNames(("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds")),
        waiting_time=DistributionNames(("sglang:queue_time_seconds",)),
        finished=SumNames(("sglang:num_requests_total", "sglang:e2e_request_latency_seconds_count")),
        waiting=SumNames(("sglang:num_queue_reqs",)),
        running=SumNames(("sglang:num_running_reqs",)),
        output_tokens=SumNames(("sglang:generation_tokens_total",)),
        context_tokens=SumNames(("sglang:prompt_tokens_total",)),
        notes="gen_throughput is a gauge of output alone and is not read: it falls in overload as in idleness",
    ),
    "tgi": ServerNames(
        response=DistributionNames(("tgi_request_duration",)),
        waiting_time=DistributionNames(("tgi_request_queue_duration",)),
        inter_token=DistributionNames(("tgi_request_mean_time_per_token_duration",)),
        arrived=SumNames(("tgi_request_count",)),
        finished=SumNames(("tgi_request_success",)),
        waiting=SumNames(("tgi_queue_size",)),
        running=SumNames(("tgi_batch_current_size",)),
        output_tokens=SumNames(("tgi_request_generated_tokens_sum",)),
        context_tokens=SumNames(("tgi_request_input_length_sum",)),
        model_label="",
        notes="no time to first token; the inter-token latency is a mean of each request with its prompt in it",
    ),
    "triton": ServerNames(
        response=DistributionNames((), summaries=("nv_inference_request_summary_us",), summary_factor=_MICRO),
        first_token=DistributionNames(("nv_inference_first_response_histogram_ms",), _MILLI),
        waiting_time=DistributionNames((), summaries=("nv_inference_queue_summary_us",), summary_factor=_MICRO),
        response_time_sum=SumNames(("nv_inference_request_duration_us",), _MICRO),
        finished=SumNames(("nv_inference_request_success",)),
        waiting=SumNames(("nv_inference_pending_request_count",)),
        model_label="model",
        notes="quantiles only with --metrics-config summary_latencies=true, else a mean; the first response is the"
        " first token only of a backend that streams; pending requests are those that wait",
    ),
    "ray-serve": ServerNames(
        response=DistributionNames(
            ("ray_serve_http_request_latency_ms", "ray_serve_deployment_processing_latency_ms"), _MILLI
        ),
        arrived=SumNames(("ray_serve_num_router_requests_total", "ray_serve_num_router_requests")),
        finished=SumNames(("ray_serve_deployment_request_counter_total", "ray_serve_deployment_request_counter")),
        waiting=SumNames(("ray_serve_deployment_queued_queries",)),
        running=SumNames(("ray_serve_replica_processing_queries",)),
        model_label="deployment",
        notes="the processing latency leaves the queue out; it stands in where the HTTP latency is missing",
    ),
}


def generic_names(
    name: str, *, factor: float = 1.0, waiting: str = "", running: str = "", label: str = ""
) -> ServerNames:
    """Any server with a histogram of response times; its _count tells what finished."""
    return ServerNames(
        response=DistributionNames((name,), factor),
        finished=SumNames((f"{name}_count",)),
        waiting=SumNames((waiting,) if waiting else ()),
        running=SumNames((running,) if running else ()),
        model_label=label,
        notes="without gauges of what waits and runs, arrivals are what finished: overload shows late",
    )


def server_metric_names(server: str) -> ServerNames:
    """The names of a kind of server; InvalidServingValue names those that there are."""
    if server not in SERVER_NAMES:
        raise InvalidServingValue(
            "server", f"{server!r} is unknown", f"take one of {', '.join(SERVER_NAMES)}, or name a histogram"
        )
    return SERVER_NAMES[server]


_STARTED = "process_start_time_seconds"
_COUNT_LEAST = 20  # a p95 of fewer says nothing


class ScrapePair(NamedTuple):
    """Two pages of one replica."""

    before: ExpositionPage
    after: ExpositionPage


class LiveQuantile(NamedTuple):
    """A quantile that was served."""

    value_s: float
    of: float  # how many it is taken of; infinite where the server does not say
    resolution: float  # relative: half the bucket that it lies in
    is_least: bool = False  # the true one is in the open bucket above
    bucket_s: tuple[float, float] | None = None  # it lies between these; None where it was not read from a bucket


@dataclass(frozen=True, slots=True)
class LiveDistribution:
    """A distribution of the window: bucket borders in s with the count up to each, or quantiles made by the server."""

    borders_s: tuple[float, ...] = ()  # rising, the last infinite
    counts: tuple[float, ...] = ()  # cumulative
    made_s: tuple[tuple[float, float], ...] = ()
    sum_s: float | None = None  # of all of them; None where the server does not tell

    @property
    def mean_s(self) -> float | None:
        """The mean; None where the server tells no sum, or too few were served."""
        if self.sum_s is None or not _COUNT_LEAST <= self.count < math.inf:
            return None
        return self.sum_s / self.count

    @property
    def count(self) -> float:
        """How many there were; infinite where only quantiles are known."""
        return self.counts[-1] if self.counts else math.inf if self.made_s else 0.0

    def quantile(self, level: float) -> LiveQuantile | None:
        """The quantile; None where too few were served, or the server did not make this one."""
        if self.made_s:
            exact = [value for known, value in self.made_s if abs(known - level) < 1e-9 and math.isfinite(value)]
            return LiveQuantile(exact[0], math.inf, 0.0) if exact else None
        if self.count < max(_COUNT_LEAST, 1.0 / (1.0 - level)):
            return None
        rank = level * self.counts[-1]
        at = next(index for index, count in enumerate(self.counts) if count >= rank)
        low_s, high_s = self.borders_s[at - 1] if at else 0.0, self.borders_s[at]
        if math.isinf(high_s):
            return LiveQuantile(low_s, self.count, 0.0, is_least=True)
        below = self.counts[at - 1] if at else 0.0
        value_s = min(high_s, low_s + (high_s - low_s) * (rank - below) / (self.counts[at] - below))
        resolution = (high_s - low_s) / 2.0 / value_s if value_s > 0.0 else 0.0
        return LiveQuantile(value_s, self.count, resolution, bucket_s=(low_s, high_s))


@dataclass(frozen=True, slots=True)
class MetricsWindow:
    """What a service did; None where its servers do not tell."""

    seconds: float
    response: LiveDistribution | None
    first_token: LiveDistribution | None
    inter_token: LiveDistribution | None
    waiting_time: LiveDistribution | None
    mean_response_s: float | None
    arrived_hz: float | None
    finished_hz: float | None
    waiting: float | None  # at the end
    waiting_growth: float | None  # over the window
    running: float | None
    output_token_hz: float | None
    context_token_hz: float | None


def _mine(samples: Iterable[MetricSample], label: str, model: str) -> Iterable[MetricSample]:
    """Samples of the model; all where servers do not label them or no model is asked for."""
    return (sample for sample in samples if not label or not model or sample.label(label) in {model, None})


def _has_restarted(pair: ScrapePair) -> bool:
    """Whether the page's one process restarted in between."""
    before, after = pair.before.samples_of(_STARTED), pair.after.samples_of(_STARTED)
    return len(before) == len(after) == 1 and before[0].value != after[0].value


def _grown(
    before: Sequence[MetricSample], after: Sequence[MetricSample], *, restarted: bool
) -> dict[SampleLabels, float]:
    """What each counter gained; after a reset, all that it shows."""
    held = {} if restarted else {sample.labels: sample.value for sample in before}
    fallen = {_apart_from_border(one.labels) for one in after if one.value < held.get(one.labels, 0.0)}
    return {
        one.labels: one.value - (0.0 if _apart_from_border(one.labels) in fallen else held.get(one.labels, 0.0))
        for one in after
    }


def _apart_from_border(labels: SampleLabels) -> SampleLabels:
    """What the buckets of one histogram share."""
    return tuple(label for label in labels if label[0] != "le")


class _Reader(NamedTuple):
    names: ServerNames
    pairs: Sequence[ScrapePair]
    model: str

    def find_name(self, names: Iterable[str]) -> str | None:
        """The first name that a page has; a counter may lack or have _total."""
        for name in names:
            other = name.removesuffix("_total") if name.endswith("_total") else f"{name}_total"
            for spelling in (name, other):
                if any(pair.after.samples_of(spelling) for pair in self.pairs):
                    return spelling
        return None

    def _series(self, scrape: ExpositionPage, name: str) -> list[MetricSample]:
        return list(_mine(scrape.samples_of(name), self.names.model_label, self.model))

    def counter_gain(self, wanted: SumNames) -> float | None:
        """What the counters gained, over all replicas."""
        name = self.find_name(wanted.names)
        if name is None:
            return None
        return wanted.factor * sum(sum(self._series_gain(pair, name).values()) for pair in self.pairs)

    def has_fallen(self, wanted: SumNames) -> bool:
        """Whether a counter shows less than before."""
        name = self.find_name(wanted.names)
        if name is None:
            return False
        for pair in self.pairs:
            held = {one.labels: one.value for one in self._series(pair.before, name)}
            if any(one.value < held.get(one.labels, 0.0) for one in self._series(pair.after, name)):
                return True
        return False

    def _series_gain(self, pair: ScrapePair, name: str) -> dict[SampleLabels, float]:
        before, after = self._series(pair.before, name), self._series(pair.after, name)
        return _grown(before, after, restarted=_has_restarted(pair))

    def gauge_sum(self, wanted: SumNames, *, growth: bool = False) -> float | None:
        """The gauges' sum at the end, or what it grew by, over all replicas."""
        name = self.find_name(wanted.names)
        if name is None:
            return None
        total = 0.0
        for pair in self.pairs:
            total += sum(sample.value for sample in self._series(pair.after, name))
            if growth:
                total -= sum(sample.value for sample in self._series(pair.before, name))
        return wanted.factor * total

    def distribution(self, wanted: DistributionNames) -> LiveDistribution | None:
        """The distribution of the window, over all replicas."""
        buckets = self.find_name(f"{one}_bucket" for one in wanted.names)
        if buckets is not None:
            return self._histogram(buckets, wanted.factor)
        summary = self.find_name(wanted.summaries)
        return None if summary is None else self._summary(summary, wanted.summary_factor)

    def _histogram(self, name: str, factor: float) -> LiveDistribution:
        counts: dict[float, float] = {}
        for pair in self.pairs:
            for labels, value in self._series_gain(pair, name).items():
                upto = dict(labels).get("le")
                if upto is not None:
                    counts[float(upto)] = counts.get(float(upto), 0.0) + value
        counts.setdefault(math.inf, max(counts.values(), default=0.0))
        borders = sorted(counts)
        risen, highest = [], 0.0  # a restart between the lines of a page could make one fall
        for border in borders:
            highest = max(highest, counts[border])
            risen.append(highest)
        total = self._total(f"{name.removesuffix('_bucket')}_sum")
        return LiveDistribution(
            tuple(border * factor for border in borders), tuple(risen), sum_s=None if total is None else total * factor
        )

    def _total(self, name: str) -> float | None:
        """What the sums of a histogram gained; None where a page has none."""
        if not all(self._series(pair.after, name) for pair in self.pairs):
            return None
        return sum(sum(self._series_gain(pair, name).values()) for pair in self.pairs)

    def _summary(self, name: str, factor: float) -> LiveDistribution:
        """The worst replica's quantile at each level: quantiles cannot be added up."""
        made: dict[float, float] = {}
        for pair in self.pairs:
            for sample in self._series(pair.after, name):
                level = sample.label("quantile")
                if level is not None and math.isfinite(sample.value):
                    made[float(level)] = max(made.get(float(level), 0.0), sample.value * factor)
        return LiveDistribution(made_s=tuple(sorted(made.items())))


def service_window(names: ServerNames, pairs: Sequence[ScrapePair], model: str = "") -> MetricsWindow | None:
    """What a service's replicas did between two scrapes each; None where no time has passed or none was scraped."""
    if not pairs or any(pair.after.at_s <= pair.before.at_s for pair in pairs):
        return None
    seconds = sum(pair.after.at_s - pair.before.at_s for pair in pairs) / len(pairs)
    reader = _Reader(names, pairs, model)
    finished, arrived = reader.counter_gain(names.finished), reader.counter_gain(names.arrived)
    growth = reader.gauge_sum(names.waiting, growth=True)
    if arrived is None and finished is not None:
        inside = (growth or 0.0) + (reader.gauge_sum(names.running, growth=True) or 0.0)
        arrived = max(0.0, finished + inside)
    spent_s = reader.counter_gain(names.response_time_sum)
    output, context = reader.counter_gain(names.output_tokens), reader.counter_gain(names.context_tokens)
    return MetricsWindow(
        seconds=seconds,
        response=reader.distribution(names.response),
        first_token=reader.distribution(names.first_token),
        inter_token=reader.distribution(names.inter_token),
        waiting_time=reader.distribution(names.waiting_time),
        mean_response_s=spent_s / finished if spent_s is not None and finished else None,
        arrived_hz=None if arrived is None else arrived / seconds,
        finished_hz=None if finished is None else finished / seconds,
        waiting=reader.gauge_sum(names.waiting),
        waiting_growth=growth,
        running=reader.gauge_sum(names.running),
        output_token_hz=None if output is None else output / seconds,
        context_token_hz=None if context is None else context / seconds,
    )


class ServedIncrement(NamedTuple):
    """What one replica counted between two pages; None where its server does not tell."""

    requests: float | None  # that were answered, or came where answers are not counted
    tokens: float | None  # that were given
    is_whole: bool  # False where it began anew in between: what it did before that is not known


def served_increment(names: ServerNames, pair: ScrapePair, model: str = "") -> ServedIncrement:
    """The increments themselves, however far the pages are apart."""
    reader = _Reader(names, (pair,), model)
    requests = reader.counter_gain(names.finished)
    if requests is None:
        requests = reader.counter_gain(names.arrived)
    is_whole = not _has_restarted(pair) and not any(
        reader.has_fallen(one) for one in (names.finished, names.output_tokens)
    )
    return ServedIncrement(requests, reader.counter_gain(names.output_tokens), is_whole)
