"""Families of metrics as text: Prometheus' format 0.0.4 and OpenMetrics 1.0.0.

Owns both formats, for the kinds that the controller has: counters, gauges, histograms and
infos. Must not know a metric. The client library's own writer is the twin in the tests; it
takes some 20 us a sample where this takes 2 (bench/scrape.py), which are 40 ms of a page with
as many promises as may have series.

Sources: "Exposition formats" of Prometheus' documentation; OpenMetrics 1.0.0, section 4.
"""

from collections.abc import Iterable, Mapping

from prometheus_client.core import Exemplar, Metric
from prometheus_client.samples import Sample

__all__ = ["CONTENT_OPENMETRICS", "CONTENT_PROMETHEUS", "as_openmetrics", "as_prometheus"]

CONTENT_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
CONTENT_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ODD = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


def as_prometheus(families: Iterable[Metric]) -> bytes:
    """The text format; it has no exemplars."""
    lines: list[str] = []
    for one in families:
        name = one.name + {"counter": "_total", "info": "_info"}.get(one.type, "")
        kind = "gauge" if one.type == "info" else one.type
        said = one.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {said}\n# TYPE {name} {kind}\n")
        lines += [f"{_series(sample)} {_number(sample.value)}\n" for sample in one.samples]
    return "".join(lines).encode()


def as_openmetrics(families: Iterable[Metric]) -> bytes:
    """OpenMetrics, with exemplars where there are some."""
    lines: list[str] = []
    for one in families:
        lines.append(f"# HELP {one.name} {_escaped(one.documentation)}\n# TYPE {one.name} {one.type}\n")
        lines += [f"{_series(sample)} {_number(sample.value)}{_exemplar(sample.exemplar)}\n" for sample in one.samples]
    lines.append("# EOF\n")
    return "".join(lines).encode()


def _series(sample: Sample) -> str:
    return f"{sample.name}{_braced(sample.labels)}" if sample.labels else sample.name


def _braced(labels: Mapping[str, str]) -> str:
    pairs = ",".join([f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())])
    return f"{{{pairs}}}"


def _exemplar(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    moment = "" if exemplar.timestamp is None else f" {_number(float(exemplar.timestamp))}"
    return f" # {_braced(exemplar.labels)} {_number(exemplar.value)}{moment}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    text = repr(float(value))
    return _ODD.get(text, text)
