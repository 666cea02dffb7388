"""What the dashboards' JSON asks for: panels with their queries, and variables put into them.

Owns reading the files back, as Grafana would, and asking a Prometheus. Must not know how they
were made: tests and pictures stand on what is shipped.
"""

import json
import math
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["FOLDER", "Series", "Shown", "ask", "filled", "names", "panels"]

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "eelgrid" / "files" / "dashboards"
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_TIMEOUT_S = 30.0
# Words of PromQL that look like names of metrics.
_NAME = re.compile(r"(?<![\w:$\"])[a-zA-Z_:][\w:]*(?=\s*\{)")


class Shown(NamedTuple):
    """One panel of a file."""

    dashboard: str
    row: str
    panel: Mapping[str, Any]

    @property
    def title(self) -> str:
        """As people see it."""
        return str(self.panel["title"])

    @property
    def queries(self) -> list[tuple[str, str]]:
        """Expressions and legends."""
        return [(target["expr"], target.get("legendFormat", "")) for target in self.panel["targets"]]


class Series(NamedTuple):
    """One series of an answer; times in seconds since 1970."""

    labels: Mapping[str, str]
    times_s: tuple[float, ...]
    values: tuple[float, ...]


def panels(document: Mapping[str, Any], name: str) -> Iterator[Shown]:
    """Every panel that is not a row, with the title of its row."""
    row = ""
    for panel in document["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        else:
            yield Shown(name, row, panel)


def filled(expression: str, document: Mapping[str, Any], *, rate_interval: str = "1m") -> str:
    """The expression with every variable at the value that it has when the dashboard is opened."""
    values = {"__rate_interval": rate_interval}
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            values[variable["name"]] = variable["allValue"]
        elif variable["type"] != "datasource":
            values[variable["name"]] = variable["current"]["value"]
    return _VARIABLE.sub(lambda found: values[found[1]], expression)


def names(expression: str) -> set[str]:
    """The metrics that an expression names; ours always have a selector."""
    return set(_NAME.findall(expression))


def ask(address: str, expression: str, *, begin_s: float, end_s: float, step_s: float) -> list[Series]:
    """What a Prometheus answers over a range, less what is no number: the quantile of nothing is no data.

    Raises OSError, and ValueError with its words for a bad query.
    """
    wanted = {"query": expression, "start": begin_s, "end": end_s, "step": step_s}
    url = f"{address.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(wanted)}"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the operator names it
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code not in {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY}:
            raise  # a Prometheus that starts answers 503
        raise ValueError(f"{expression}: {json.load(error).get('error', error)}") from None
    series = []
    for one in found["data"]["result"]:
        pairs = [(float(at), float(value)) for at, value in one["values"] if not math.isnan(float(value))]
        if pairs:
            series.append(Series(one["metric"], tuple(at for at, _ in pairs), tuple(value for _, value in pairs)))
    return series
