"""Metric families as text: Prometheus format 0.0.4 and OpenMetrics 1.0.0."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from prometheus_client.core import Exemplar, Metric
from prometheus_client.samples import Sample

from eelgrid_controller.server.metrics.catalogue import MetricDescription, MetricFamily

CONTENT_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
CONTENT_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ODD = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


def render_prometheus(families: Iterable[MetricFamily | Metric]) -> bytes:
    """The text format; it has no exemplars."""
    lines: list[str] = []
    for one in families:
        if isinstance(one, MetricFamily):
            lines.append(_heads(one.about)[0])
            lines += _lines(one)
            continue
        name = one.name + {"counter": "_total", "info": "_info"}.get(one.type, "")
        kind = "gauge" if one.type == "info" else one.type
        said = one.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {said}\n# TYPE {name} {kind}\n")
        lines += [f"{_series(sample)} {_number(sample.value)}\n" for sample in one.samples]
    return "".join(lines).encode()


def render_openmetrics(families: Iterable[MetricFamily | Metric]) -> bytes:
    """OpenMetrics, with exemplars where there are some."""
    lines: list[str] = []
    for one in families:
        if isinstance(one, MetricFamily):
            lines.append(_heads(one.about)[1])
            lines += _lines(one)
            continue
        lines.append(f"# HELP {one.name} {_escape_value(one.documentation)}\n# TYPE {one.name} {one.type}\n")
        lines += [f"{_series(sample)} {_number(sample.value)}{_exemplar(sample.exemplar)}\n" for sample in one.samples]
    lines.append("# EOF\n")
    return "".join(lines).encode()


@lru_cache(maxsize=1024)
def _heads(about: MetricDescription) -> tuple[str, str]:
    """In the text format, which knows no infos, and in OpenMetrics, whose families are named without a suffix."""
    name, kind = about.name, about.kind.value
    told = name.removesuffix("_total").removesuffix("_info")
    said = about.help.replace("\\", r"\\").replace("\n", r"\n")
    return (
        f"# HELP {name} {said}\n# TYPE {name} {'gauge' if kind == 'info' else kind}\n",
        f"# HELP {told} {_escape_value(about.help)}\n# TYPE {told} {kind}\n",
    )


@lru_cache(maxsize=1024)
def _label_order(labels: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Labels as they are written, by their names, and where the value of each stands."""
    return tuple(sorted((label, at) for at, label in enumerate(labels)))


def _lines(one: MetricFamily) -> Iterator[str]:
    """A line for each series, of families with their few labels; the same in both formats."""
    name, placed = one.about.name, _label_order(one.about.labels)
    if not placed:
        return (f"{name} {_number(value)}\n" for value in one.values.values())
    (label, at), rest = placed[0], placed[1:]
    begin = f'{name}{{{label}="'
    if not rest:
        return (f'{begin}{_escape_value(key[0])}"}} {_number(value)}\n' for key, value in one.values.items())
    return (
        begin
        + _escape_value(key[at])
        + "".join([f'",{other}="{_escape_value(key[place])}' for other, place in rest])
        + f'"}} {_number(value)}\n'
        for key, value in one.values.items()
    )


def _series(sample: Sample) -> str:
    return f"{sample.name}{_format_labels(sample.labels)}" if sample.labels else sample.name


def _format_labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join([f'{name}="{_escape_value(value)}"' for name, value in sorted(labels.items())])
    return f"{{{pairs}}}"


def _exemplar(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    moment = "" if exemplar.timestamp is None else f" {_number(float(exemplar.timestamp))}"
    return f" # {_format_labels(exemplar.labels)} {_number(exemplar.value)}{moment}"


def _escape_value(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    text = repr(float(value))
    return _ODD.get(text, text)
