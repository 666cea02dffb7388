"""What a service did between two scrapes: quantiles, rates, and what waits.

Owns the difference of two pages. Must not know models, objectives or replicas.

Theory. Counters only grow; one that fell was reset by a restart, and what it
shows now has come since. A histogram of which one bucket fell was reset as a whole,
and a page whose process started anew was reset in all. A series that was not there
before began at 0, one that vanished says nothing. Histograms are cumulative over `le`: the difference of two
is the distribution of the window, read between bucket borders in a straight line,
as Prometheus does; its sum over its count is the mean, exactly. A quantile in the last, open bucket is at least its lower border
and is marked so. Arrivals are the server's own count, or, where it has none,
    arrived = finished + growth of waiting + growth of running
because requests are conserved; so overload shows in a queue that grows even while
the output rate stands still. Replicas are added up over all pages.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.serving.exposition import Labels, Sample, Scrape
from eelgrid_controller.serving.metric_names import Distribution, ServerNames, Sum

__all__ = ["Live", "LiveQuantile", "Pair", "Window", "window"]

_STARTED = "process_start_time_seconds"
_COUNT_LEAST = 20  # a p95 of fewer says nothing


class Pair(NamedTuple):
    """Two pages of one replica."""

    before: Scrape
    after: Scrape


class LiveQuantile(NamedTuple):
    """A quantile that was served."""

    value_s: float
    of: float  # how many it is taken of; infinite where the server does not say
    resolution: float  # relative: half the bucket that it lies in
    is_least: bool = False  # the true one is in the open bucket above
    bucket_s: tuple[float, float] | None = None  # it lies between these; None where it was not read from a bucket


@dataclass(frozen=True, slots=True)
class Live:
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
class Window:
    """What a service did; None where its servers do not tell."""

    seconds: float
    response: Live | None
    first_token: Live | None
    inter_token: Live | None
    waiting_time: Live | None
    mean_response_s: float | None
    arrived_hz: float | None
    finished_hz: float | None
    waiting: float | None  # at the end
    waiting_growth: float | None  # over the window
    running: float | None
    output_token_hz: float | None
    context_token_hz: float | None


def _mine(samples: Iterable[Sample], label: str, model: str) -> Iterable[Sample]:
    """Samples of the model; all where servers do not label them or no model is asked for."""
    return (sample for sample in samples if not label or not model or sample.label(label) in {model, None})


def _restarted(pair: Pair) -> bool:
    """Whether the page's one process started anew in between."""
    before, after = pair.before.named(_STARTED), pair.after.named(_STARTED)
    return len(before) == len(after) == 1 and before[0].value != after[0].value


def _grown(before: Sequence[Sample], after: Sequence[Sample], *, restarted: bool) -> dict[Labels, float]:
    """What each counter gained; after a reset, all that it shows."""
    held = {} if restarted else {sample.labels: sample.value for sample in before}
    fallen = {_apart_from_border(one.labels) for one in after if one.value < held.get(one.labels, 0.0)}
    return {
        one.labels: one.value - (0.0 if _apart_from_border(one.labels) in fallen else held.get(one.labels, 0.0))
        for one in after
    }


def _apart_from_border(labels: Labels) -> Labels:
    """What the buckets of one histogram share."""
    return tuple(label for label in labels if label[0] != "le")


class _Reader(NamedTuple):
    names: ServerNames
    pairs: Sequence[Pair]
    model: str

    def spelled(self, names: Iterable[str]) -> str | None:
        """The first name that a page has; a counter may lack or have _total."""
        for name in names:
            other = name.removesuffix("_total") if name.endswith("_total") else f"{name}_total"
            for spelling in (name, other):
                if any(pair.after.named(spelling) for pair in self.pairs):
                    return spelling
        return None

    def _series(self, scrape: Scrape, name: str) -> list[Sample]:
        return list(_mine(scrape.named(name), self.names.model_label, self.model))

    def grown(self, wanted: Sum) -> float | None:
        """What the counters gained, over all replicas."""
        name = self.spelled(wanted.names)
        if name is None:
            return None
        return wanted.factor * sum(sum(self._gained(pair, name).values()) for pair in self.pairs)

    def has_fallen(self, wanted: Sum) -> bool:
        """Whether a counter shows less than before."""
        name = self.spelled(wanted.names)
        if name is None:
            return False
        for pair in self.pairs:
            held = {one.labels: one.value for one in self._series(pair.before, name)}
            if any(one.value < held.get(one.labels, 0.0) for one in self._series(pair.after, name)):
                return True
        return False

    def _gained(self, pair: Pair, name: str) -> dict[Labels, float]:
        before, after = self._series(pair.before, name), self._series(pair.after, name)
        return _grown(before, after, restarted=_restarted(pair))

    def gauge(self, wanted: Sum, *, growth: bool = False) -> float | None:
        """The gauges' sum at the end, or what it grew by, over all replicas."""
        name = self.spelled(wanted.names)
        if name is None:
            return None
        total = 0.0
        for pair in self.pairs:
            total += sum(sample.value for sample in self._series(pair.after, name))
            if growth:
                total -= sum(sample.value for sample in self._series(pair.before, name))
        return wanted.factor * total

    def live(self, wanted: Distribution) -> Live | None:
        """The distribution of the window, over all replicas."""
        buckets = self.spelled(f"{one}_bucket" for one in wanted.names)
        if buckets is not None:
            return self._histogram(buckets, wanted.factor)
        summary = self.spelled(wanted.summaries)
        return None if summary is None else self._summary(summary, wanted.summary_factor)

    def _histogram(self, name: str, factor: float) -> Live:
        counts: dict[float, float] = {}
        for pair in self.pairs:
            for labels, value in self._gained(pair, name).items():
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
        return Live(
            tuple(border * factor for border in borders), tuple(risen), sum_s=None if total is None else total * factor
        )

    def _total(self, name: str) -> float | None:
        """What the sums of a histogram gained; None where a page has none."""
        if not all(self._series(pair.after, name) for pair in self.pairs):
            return None
        return sum(sum(self._gained(pair, name).values()) for pair in self.pairs)

    def _summary(self, name: str, factor: float) -> Live:
        """The worst replica's quantile at each level: quantiles cannot be added up."""
        made: dict[float, float] = {}
        for pair in self.pairs:
            for sample in self._series(pair.after, name):
                level = sample.label("quantile")
                if level is not None and math.isfinite(sample.value):
                    made[float(level)] = max(made.get(float(level), 0.0), sample.value * factor)
        return Live(made_s=tuple(sorted(made.items())))


def window(names: ServerNames, pairs: Sequence[Pair], model: str = "") -> Window | None:
    """What a service's replicas did between two scrapes each; None where no time has passed or none was scraped."""
    if not pairs or any(pair.after.at_s <= pair.before.at_s for pair in pairs):
        return None
    seconds = sum(pair.after.at_s - pair.before.at_s for pair in pairs) / len(pairs)
    reader = _Reader(names, pairs, model)
    finished, arrived = reader.grown(names.finished), reader.grown(names.arrived)
    growth = reader.gauge(names.waiting, growth=True)
    if arrived is None and finished is not None:
        inside = (growth or 0.0) + (reader.gauge(names.running, growth=True) or 0.0)
        arrived = max(0.0, finished + inside)
    spent_s = reader.grown(names.response_time_sum)
    output, context = reader.grown(names.output_tokens), reader.grown(names.context_tokens)
    return Window(
        seconds=seconds,
        response=reader.live(names.response),
        first_token=reader.live(names.first_token),
        inter_token=reader.live(names.inter_token),
        waiting_time=reader.live(names.waiting_time),
        mean_response_s=spent_s / finished if spent_s is not None and finished else None,
        arrived_hz=None if arrived is None else arrived / seconds,
        finished_hz=None if finished is None else finished / seconds,
        waiting=reader.gauge(names.waiting),
        waiting_growth=growth,
        running=reader.gauge(names.running),
        output_token_hz=None if output is None else output / seconds,
        context_token_hz=None if context is None else context / seconds,
    )


class Gained(NamedTuple):
    """What one replica counted between two pages; None where its server does not tell."""

    requests: float | None  # that were answered, or came where answers are not counted
    tokens: float | None  # that were given
    is_whole: bool  # False where it began anew in between: what it did before that is not known


def gained(names: ServerNames, pair: Pair, model: str = "") -> Gained:
    """The increments themselves, however far the pages are apart."""
    reader = _Reader(names, (pair,), model)
    requests = reader.grown(names.finished)
    if requests is None:
        requests = reader.grown(names.arrived)
    is_whole = not _restarted(pair) and not any(reader.has_fallen(one) for one in (names.finished, names.output_tokens))
    return Gained(requests, reader.grown(names.output_tokens), is_whole)
