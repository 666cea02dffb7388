"""Metrics: how both daemons describe them, and their text in Prometheus' format 0.0.4 and OpenMetrics 1.0.0.

Each daemon has a catalogue of `MetricDescription`s. The controller gathers `MetricFamily` and writes pages with
`render_prometheus` and `render_openmetrics`. The agent, which shows thousands of series of few devices each second,
keeps its lines and builds them from the same heads, labels and numbers.

Both formats write samples alike. They differ in the heads of families, in exemplars, which OpenMetrics alone has, and
in its last line. An info metric is a gauge to the text format, and OpenMetrics names a family without the suffix of
its samples (`_total`, `_info`).

Sources: Prometheus, "Exposition formats"; OpenMetrics 1.0.0, "Text format"; RFC 9110, 12.5 (content negotiation).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.core import Exemplar
    from prometheus_client.core import Metric as ClientFamily
    from prometheus_client.samples import Sample

CONTENT_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
CONTENT_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# Units that OpenMetrics' UNIT line names; a count has none.
UNITS = ("watts", "joules", "bytes", "seconds", "hertz", "celsius", "ratio")

_ODD_NUMBERS = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
_OPENMETRICS_TYPE = "application/openmetrics-text"
_OPENMETRICS_VERSIONS = ("", "0.0.1", "1.0.0")
# A header that lists more than any client does is not read to its end.
_CHOICES_MOST = 32


class MetricType(Enum):
    """What a metric is to Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class MetricDescription:
    """One metric; `name` is that of its samples, so a counter's ends in `_total` and an info's in `_info`."""

    name: str
    kind: MetricType
    help: str
    labels: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The name that OpenMetrics gives the family: without the suffix of its samples."""
        if self.kind is MetricType.COUNTER:
            return self.name.removesuffix("_total")
        return self.name.removesuffix("_info") if self.kind is MetricType.INFO else self.name

    @property
    def unit(self) -> str:
        """The unit at the end of the family's name; empty for a count and an info."""
        unit = self.family.rpartition("_")[2]
        return unit if unit in UNITS and self.kind is not MetricType.INFO else ""


class MetricFamily(NamedTuple):
    """A metric and its numbers, by the values of its labels in the order in which they are described.

    Only numbers change between scrapes, so no object is made of a series: a page is written from these. Readers that
    want the client library's shape (its registry, its writers) find it in the properties.
    """

    about: MetricDescription
    values: Mapping[tuple[str, ...], float]

    @property
    def name(self) -> str:
        """The name that OpenMetrics gives the family."""
        return self.about.family

    @property
    def type(self) -> str:
        """The kind, in OpenMetrics' word."""
        return self.about.kind.value

    @property
    def documentation(self) -> str:
        """What the metric means."""
        return self.about.help

    @property
    def unit(self) -> str:
        """Empty: the client library would add it to the name, which has it already."""
        return ""

    @property
    def samples(self) -> "Iterator[Sample]":
        """Each series by itself."""
        from prometheus_client.samples import Sample

        for key, value in self.values.items():
            yield Sample(self.about.name, dict(zip(self.about.labels, key, strict=True)), value)


# Parts of both formats


def escape_label(value: str) -> str:
    """Escapes the value of a label, and OpenMetrics' help."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def format_number(value: float) -> str:
    """Writes a number: the shortest decimal that reads back as the same float."""
    text = repr(float(value))
    return _ODD_NUMBERS.get(text, text)


def format_labels(labels: Iterable[str], values: Iterable[str]) -> str:
    """Writes labels and their values without braces; raises ValueError where there are more of one than of the other."""
    return ",".join([f'{label}="{escape_label(value)}"' for label, value in zip(labels, values, strict=True)])


def prometheus_head(metric: MetricDescription) -> str:
    """HELP and TYPE in the text format."""
    return _prometheus_head(metric.name, metric.kind.value, metric.help)


def openmetrics_head(metric: MetricDescription, *, has_unit: bool) -> str:
    """HELP and TYPE in OpenMetrics, and UNIT where it has one and `has_unit` asks for it."""
    head = _openmetrics_head(metric.family, metric.kind.value, metric.help)
    return f"{head}# UNIT {metric.family} {metric.unit}\n" if has_unit and metric.unit else head


def _prometheus_head(name: str, kind: str, text: str) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {escaped}\n# TYPE {name} {'gauge' if kind == 'info' else kind}\n"


def _openmetrics_head(family: str, kind: str, text: str) -> str:
    return f"# HELP {family} {escape_label(text)}\n# TYPE {family} {kind}\n"


# Pages of families


def render_prometheus(families: "Iterable[MetricFamily | ClientFamily]") -> bytes:
    """Writes a page in the text format, which has no exemplars; families are ours or the client library's."""
    lines: list[str] = []
    for one in families:
        if isinstance(one, MetricFamily):
            lines.append(_heads(one.about)[0])
            lines += _lines(one)
            continue
        name = one.name + {"counter": "_total", "info": "_info"}.get(one.type, "")
        lines.append(_prometheus_head(name, one.type, one.documentation))
        lines += [f"{_series(sample)} {format_number(sample.value)}\n" for sample in one.samples]
    return "".join(lines).encode()


def render_openmetrics(families: "Iterable[MetricFamily | ClientFamily]") -> bytes:
    """Writes a page in OpenMetrics, with exemplars where there are some; families are ours or the client library's."""
    lines: list[str] = []
    for one in families:
        if isinstance(one, MetricFamily):
            lines.append(_heads(one.about)[1])
            lines += _lines(one)
            continue
        lines.append(_openmetrics_head(one.name, one.type, one.documentation))
        lines += [
            f"{_series(sample)} {format_number(sample.value)}{_exemplar(sample.exemplar)}\n" for sample in one.samples
        ]
    lines.append("# EOF\n")
    return "".join(lines).encode()


@lru_cache(maxsize=1024)
def _heads(about: MetricDescription) -> tuple[str, str]:
    return prometheus_head(about), openmetrics_head(about, has_unit=False)


@lru_cache(maxsize=1024)
def _order(labels: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Labels as they are written, by their names, and where the value of each stands."""
    return tuple(sorted((label, at) for at, label in enumerate(labels)))


def _lines(one: MetricFamily) -> Iterator[str]:
    """A line for each series, of families with their few labels; the same in both formats."""
    name, placed = one.about.name, _order(one.about.labels)
    if not placed:
        return (f"{name} {format_number(value)}\n" for value in one.values.values())
    (label, at), rest = placed[0], placed[1:]
    begin = f'{name}{{{label}="'
    if not rest:
        return (f'{begin}{escape_label(key[0])}"}} {format_number(value)}\n' for key, value in one.values.items())
    return (
        begin
        + escape_label(key[at])
        + "".join([f'",{other}="{escape_label(key[place])}' for other, place in rest])
        + f'"}} {format_number(value)}\n'
        for key, value in one.values.items()
    )


def _series(sample: "Sample") -> str:
    return f"{sample.name}{_braced(sample.labels)}" if sample.labels else sample.name


def _braced(labels: Mapping[str, str]) -> str:
    names = sorted(labels)
    return f"{{{format_labels(names, [labels[name] for name in names])}}}"


def _exemplar(exemplar: "Exemplar | None") -> str:
    if exemplar is None:
        return ""
    moment = "" if exemplar.timestamp is None else f" {format_number(float(exemplar.timestamp))}"
    return f" # {_braced(exemplar.labels)} {format_number(exemplar.value)}{moment}"


# What a client takes


def prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept header likes OpenMetrics at least as well as plain text."""
    liked, plain = 0.0, 0.0
    for name, parameters, quality in _choices(accept):
        if name == _OPENMETRICS_TYPE and parameters.get("version", "") in _OPENMETRICS_VERSIONS:
            liked = max(liked, quality)
        elif name == "text/plain":
            plain = max(plain, quality)
    return liked > 0.0 and liked >= plain


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header takes gzip."""
    qualities = {name: quality for name, _, quality in _choices(accept_encoding)}
    return qualities.get("gzip", qualities.get("*", 0.0)) > 0.0


def _choices(header: str) -> list[tuple[str, dict[str, str], float]]:
    """The choices of a header: name, parameters and quality, 0 where the quality is no number."""
    choices = []
    for choice in header.split(",")[:_CHOICES_MOST]:
        name, *rest = (part.strip() for part in choice.split(";"))
        parameters = {
            key.strip().lower(): value.strip(' "') for key, _, value in (part.partition("=") for part in rest)
        }
        try:
            quality = float(parameters.get("q", "1"))
        except ValueError:
            quality = 0.0
        choices.append((name.lower(), parameters, quality if 0.0 <= quality <= 1.0 else 0.0))
    return choices
