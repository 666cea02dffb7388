"""Draws the dashboards' data from a Prometheus, so that a reader sees what to expect.

Owns pictures of the shipped JSON: each panel at its place of the grid, with what its own
queries answer. It is no Grafana: colours, ticks and tables are matplotlib's. Must not know
where the data come from.

    python deploy/dashboards/draw.py --prometheus http://localhost:9090 --minutes 60 --out pictures
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deploy.dashboards.reading import FOLDER, Series, Shown, ask, filled, panels
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

__all__ = ["draw_all", "main", "text_of"]

_WIDTH_IN, _UNIT_IN = 15.0, 0.38
_COLUMNS = 24
_DPI = 92
# Points of a line, and series and rows of a panel; more would not be read.
_POINTS, _SERIES_MOST, _ROWS_MOST = 240, 12, 9
_LEGEND_CHARACTERS = 34
_LEGEND_MOST, _LEGEND_ROW = 8, 50
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SUFFIX = {"watt": "W", "joule": "J", "kwatth": "kWh", "rothz": "Hz", "bytes": "B", "Bps": "B/s", "ops": "/s"}
_SMALL_S = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))
_LARGE_S = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))
_HIDDEN = ("__name__", "job", "instance", "gpu")


def _seconds(value: float) -> str:
    size = abs(value)
    for least, unit in _LARGE_S:
        if size >= 2 * least:
            return f"{value / least:.3g} {unit}"
    scale, unit = next((scale, unit) for least, scale, unit in _SMALL_S if size >= least)
    return f"{value * scale:.3g} {unit}" if value else "0 s"


def text_of(value: float, unit: str) -> str:
    """A value in a unit of Grafana's, in a few characters."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "celsius":
        return f"{value:.3g} °C"
    if unit == "s":
        return _seconds(value)
    if unit == "dateTimeFromNow":
        return f"{_seconds(time.time() - value / 1000)} ago"
    for scale, letter in _SCALES:
        if abs(value) >= scale:
            return f"{value / scale:.4g} {letter}{_SUFFIX.get(unit, '')}"
    return f"{value:.3g} {_SUFFIX.get(unit, '')}".strip()


def _name(series: Series, legend: str) -> str:
    if legend and legend != "__auto":
        found = re.sub(r"\{\{(\w+)\}\}", lambda one: series.labels.get(one[1], ""), legend).strip()
    else:
        found = ", ".join(value for key, value in sorted(series.labels.items()) if key not in _HIDDEN)
    return found if len(found) <= _LEGEND_CHARACTERS else found[: _LEGEND_CHARACTERS - 1] + "…"


Answers = Sequence[tuple[str, Sequence[Series]]]


def _flat(answers: Answers) -> list[tuple[str, Series]]:
    return [(_name(one, legend), one) for legend, found in answers for one in found]


def _overrides(shown: Shown, kind: str) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """What the panel says of some series or columns: what matches them, and their properties."""
    for one in shown.panel["fieldConfig"]["overrides"]:
        if one["matcher"]["id"] == kind:
            yield one["matcher"]["options"], {rule["id"]: rule["value"] for rule in one["properties"]}


def _bounds(axes: Axes, found: Sequence[tuple[str, Series]], *, is_stacked: bool) -> None:
    """From zero, or below it, with room for the legend above."""
    values = [value for _, one in found for value in one.values]
    low, high = min([0.0, *values]), max([0.0, *values])
    if is_stacked:
        high = max(axes.get_ylim()[1], high)
    size = (high - low) or 1.0
    axes.set_ylim(low - (0.05 * size if low < 0 else 0.0), low + size * 1.3)


def _name_series(axes: Axes, found: Sequence[tuple[str, Series]]) -> None:
    """A legend of the series that say something: of many, those that are not zero throughout."""
    handles, names = axes.get_legend_handles_labels()
    moved = {name for name, one in found if any(one.values)}
    kept = [(handle, name) for handle, name in zip(handles, names, strict=True) if name]
    if len(kept) > _LEGEND_MOST:
        kept = [(handle, name) for handle, name in kept if name in moved][:_LEGEND_MOST]
    left_out = len({name for name, _ in found if name}) - len(kept)
    if kept:
        columns = max(1, min(len(kept), _LEGEND_ROW // (max(len(name) for _, name in kept) + 5)))
        more = f"and {left_out} more" if left_out else None
        axes.legend(
            *zip(*kept, strict=True),
            fontsize=7,
            loc="upper left",
            ncols=columns,
            framealpha=0.75,
            title=more,
            title_fontsize=7,
            columnspacing=1.0,
            handlelength=1.2,
            borderaxespad=0.1,
        )


def _timeseries(axes: Axes, shown: Shown, answers: Answers, span: tuple[float, float]) -> None:
    begin_s, end_s = span
    found = _flat(answers)
    unit = shown.panel["fieldConfig"]["defaults"]["unit"]
    stacked = shown.panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
    if stacked:
        times_s = sorted({at for _, one in found for at in one.times_s})
        rows = [dict(zip(one.times_s, one.values, strict=True)) for _, one in found]
        layers = [[row.get(at, 0.0) for at in times_s] for row in rows]
        axes.stackplot([at - begin_s for at in times_s], layers, labels=[name for name, _ in found], alpha=0.75)
    else:
        dashed = [re.compile(str(one).strip("/")) for one, _ in _overrides(shown, "byRegexp")]
        for name, one in found[:_SERIES_MOST]:
            style = "--" if any(bound.search(name) for bound in dashed) else "-"
            marker = "." if len(one.values) == 1 else ""
            axes.plot([at - begin_s for at in one.times_s], one.values, style, marker=marker, linewidth=1.2, label=name)
    _bounds(axes, found, is_stacked=stacked)
    axes.set_xlim(0.0, end_s - begin_s)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text_of(value, unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{int(value) // 60}:{int(value) % 60:02d}"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(visible=True, linewidth=0.4, alpha=0.5)
    _name_series(axes, found)


def _blank(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])


def _stat(axes: Axes, shown: Shown, answers: Answers, _span: tuple[float, float]) -> None:
    _blank(axes)
    unit = shown.panel["fieldConfig"]["defaults"]["unit"]
    found = _flat(answers)
    text = "\n".join(f"{text_of(one.values[-1], unit)} {name}".strip() for name, one in found[:2])
    axes.text(
        0.5, 0.45, text, ha="center", va="center", fontsize=17 if len(text) < 16 else 12, transform=axes.transAxes
    )


def _bars(axes: Axes, shown: Shown, answers: Answers, _span: tuple[float, float]) -> None:
    unit = shown.panel["fieldConfig"]["defaults"]["unit"]
    found = sorted(_flat(answers), key=lambda one: one[1].values[-1])[-_SERIES_MOST:]
    values = [one.values[-1] for _, one in found]
    axes.barh(range(len(found)), values, color="tab:blue", alpha=0.75, height=0.7)
    axes.set_yticks(range(len(found)), [name for name, _ in found], fontsize=7)
    axes.set_ylim(-0.6, max(len(found), 4) - 0.4)
    axes.set_xlim(0.0, max([*values, 0.0]) * 1.25 or 1.0)
    axes.set_xticks([])
    for at, value in enumerate(values):
        axes.text(value, at, " " + text_of(value, unit), va="center", fontsize=8)


def _states(axes: Axes, _shown: Shown, answers: Answers, span: tuple[float, float]) -> None:
    begin_s, end_s = span
    found = sorted(_flat(answers), key=lambda one: (-max(one[1].values), one[0]))[:_ROWS_MOST]
    for at, (_, one) in enumerate(reversed(found)):
        step_s = max(1.0, (end_s - begin_s) / _POINTS)
        on = [(moment - begin_s, step_s * 1.1) for moment, value in zip(one.times_s, one.values, strict=True) if value]
        axes.barh(at, end_s - begin_s, color="0.93", height=0.7)
        axes.broken_barh(on, (at - 0.35, 0.7), color="tab:orange")
    axes.set_yticks(range(len(found)), [name for name, _ in reversed(found)], fontsize=7)
    axes.set_ylim(-0.6, max(len(found), 3) - 0.4)
    axes.set_xlim(0.0, end_s - begin_s)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{int(value) // 60}:{int(value) % 60:02d}"))


def _table(axes: Axes, shown: Shown, answers: Answers, _span: tuple[float, float]) -> None:
    _blank(axes)
    rules = dict(_overrides(shown, "byName"))
    hidden = {*_HIDDEN, *shown.panel["transformations"][1]["options"]["excludeByName"]}
    renamed = shown.panel["transformations"][1]["options"]["renameByName"]
    first = shown.panel["transformations"][1]["options"]["indexByName"]
    columns = [name for name in renamed.values() if name]
    rows: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for column, (_, found) in zip(renamed.values(), answers, strict=True):
        for one in found:
            key = tuple(sorted((name, value) for name, value in one.labels.items() if name not in hidden))
            row = rows.setdefault(key, {})
            if column:
                told = text_of(one.values[-1], rules[column]["unit"])
                (words,) = rules[column].get("mappings", [{"options": {}}])
                row[column] = words["options"].get(told, {"text": told})["text"]
    labels = sorted({name for key in rows for name, _ in key}, key=lambda name: (first.get(name, len(first)), name))
    head = [*labels, *columns]
    body = [
        [dict(key).get(name, "") for name in labels] + [cells.get(name, "") for name in columns]
        for key, cells in list(rows.items())[:_ROWS_MOST]
    ]
    if body:
        table = axes.table(body, colLabels=head, loc="upper center", cellLoc="left", edges="horizontal")
        table.auto_set_font_size(value=False)
        table.set_fontsize(7.5)
        table.scale(1.0, 1.15)


_KINDS: Mapping[str, Callable[[Axes, Shown, Answers, tuple[float, float]], None]] = {
    "timeseries": _timeseries,
    "stat": _stat,
    "bargauge": _bars,
    "state-timeline": _states,
    "table": _table,
}


def _draw(
    document: Mapping[str, Any], name: str, query: Callable[[str, str], list[Series]], span: tuple[float, float]
) -> Any:
    every = document["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in every)
    figure = plt.figure(figsize=(_WIDTH_IN, height * _UNIT_IN + 0.6), layout="none")
    rows = height + 1.5
    figure.text(0.012, 1 - 0.55 / rows, document["title"], fontsize=17, weight="bold", va="center")

    def box(place: Mapping[str, int], pad: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
        left, right, above, below = pad
        return (
            (place["x"] + left) / _COLUMNS,
            1 - (place["y"] + 1.5 + place["h"] - below) / rows,
            (place["w"] - left - right) / _COLUMNS,
            (place["h"] - above - below) / rows,
        )

    for panel in every:
        if panel["type"] == "row":
            y = 1 - (panel["gridPos"]["y"] + 1.5 + 0.65) / rows
            figure.text(0.012, y, panel["title"], fontsize=12.5, weight="bold", va="center", color="tab:blue")
    for shown in panels(document, name):
        kind = shown.panel["type"]
        left = {"timeseries": 0.95, "bargauge": 2.2, "state-timeline": 4.2}.get(kind, 0.3)
        axes = figure.add_axes(
            box(shown.panel["gridPos"], (left, 0.3, 1.05, 0.3 if kind in {"stat", "table"} else 0.8))
        )
        answers = [(legend, query(expression, kind)) for expression, legend in shown.queries]
        axes.set_title(shown.title, fontsize=9.5, loc="left", pad=4, weight="bold")
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"] if kind not in {"stat", "table"} else list(axes.spines)].set_visible(False)
        if any(found for _, found in answers):
            _KINDS[kind](axes, shown, answers, span)
        else:
            _blank(axes)
            axes.text(0.5, 0.5, "no data", ha="center", va="center", color="0.6", fontsize=10, transform=axes.transAxes)
    return figure


def draw_all(address: str, out: Path, *, begin_s: float, end_s: float, rate_interval: str = "1m") -> None:
    """One PNG for each dashboard. Raises OSError and ValueError as Prometheus' answers do."""
    mpl.use("Agg")
    out.mkdir(parents=True, exist_ok=True)
    step_s = max(1.0, (end_s - begin_s) / _POINTS)
    for path in sorted(FOLDER.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))

        def query(expression: str, kind: str, document: Mapping[str, Any] = document) -> list[Series]:
            text = filled(expression, document, rate_interval=rate_interval)
            first_s = begin_s if kind in {"timeseries", "state-timeline"} else end_s - step_s
            return ask(address, text, begin_s=first_s, end_s=end_s, step_s=step_s)

        figure = _draw(document, path.stem, query, (begin_s, end_s))
        figure.savefig(out / f"{path.stem}.png", dpi=_DPI)
        plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Draws the last minutes; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://localhost:9090", help="its address")
    parser.add_argument("--minutes", type=float, default=60.0, help="how far back")
    parser.add_argument("--rate-interval", default="1m", help="for rates; four scrapes at least")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder of the pictures")
    given = parser.parse_args(arguments)
    end_s = time.time()
    draw_all(
        given.prometheus,
        given.out,
        begin_s=end_s - 60.0 * given.minutes,
        end_s=end_s,
        rate_interval=given.rate_interval,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
