"""Parses metrics pages in the Prometheus text format (0.0.4) and the OpenMetrics additions that servers write.

`ScrapeTarget` says which pages of a workload are wanted, `ScrapeRound` what its replicas answered.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.profiles.points import MetricsUnreadable

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
