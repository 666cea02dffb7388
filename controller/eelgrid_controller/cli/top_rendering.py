"""The parts of the screen of eelctl top that are not tables: figures, the power graph, what waits and who consumes.

Pure: from messages to text with styles, in as many columns and lines as there are. Colours are the sixteen of a
terminal, so that its own palette decides how they look.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eelgrid_controller.cli.output import share_colour, shorten_text
from eelgrid_controller.cli.top_views import PowerHistory, TopTab
from eelgrid_controller.formatting import (
    format_energy,
    format_gpu,
    format_milliseconds,
    format_percent,
    format_power,
)
from eelgrid_protos.messages import Overview, Summary
from eelgrid_protos.safe_text import escape_text, escape_text_line

_BLOCKS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = "▏▎▍▌▋▊▉"
LABEL = "grey62"
_GRAPH_SPAN_S = 300.0
# Figures and graph stand side by side from here on.
_WIDE = 76
_GRAPH_LINES = 7
_GRAPH_LINES_NARROW = 3
# A tall screen has a higher graph, and more lines of what waits and who consumes.
_TALL = 32
_GRAPH_LINES_TALL = 11
_BELOW_LINES = 4
# Of a low screen these are left to the tabs, the table and the two lines at the bottom.
_OTHER_LINES = 8
# A narrow screen has the graph below the figures if it has so many lines.
_GRAPH_FROM = 20
_LABEL_WIDE = 8
# What stands between two cells of a row.
_CELLS = re.compile(r"(?<=\S) {2,}(?=\S)")


def draw_bar(share: float | None, width: int, *, style: str = "") -> Text:
    """Draws a bar of `width` cells, with a resolution of an eighth of a cell; blank without a share."""
    if share is None:
        return Text(" " * width)
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    text = Text().append("█" * full + (_EIGHTHS[rest - 1] if rest else ""), style=style or share_colour(share) or "")
    return text.append("·" * (width - len(text)), style=LABEL)


def draw_graph(samples: Sequence[float | None], limit: float | None, height: int) -> list[Text]:
    """Draws columns from 0 up, and the limit as a line across what they leave free; a column above it is red."""
    known = [value for value in samples if value is not None]
    top = max([*known, limit or 0.0], default=0.0) or 1.0
    # The line is inside the row of the limit; without one there is none.
    limit_row = None if not limit else min(height - 1, int(limit / top * height))
    lines = []
    for row in range(height - 1, -1, -1):
        line = Text()
        for value in samples:
            eighths = 0 if value is None else max(0, min(8, round((value / top * height - row) * 8)))
            is_over = limit is not None and value is not None and value > limit
            if eighths:
                line.append(_BLOCKS[eighths], style="red" if is_over else "cyan")
            elif row == limit_row:
                line.append("╌", style="yellow")
            else:
                line.append(" ")
        lines.append(line)
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewSnapshot:
    """What the overview shows; None for what has not been read yet, or cannot be."""

    summary: Summary | None
    overview: Overview | None
    history: PowerHistory
    now_s: float


def _join(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts)


def _nodes_text(summary: Summary) -> Text:
    text = _join((f"{summary.nodes_ready:,}", "bold"), " ready")
    if summary.nodes_lost:
        text.append(f", {summary.nodes_lost:,} lost", style="red")
    text.append(f"; {summary.gpus:,} GPUs")
    if summary.gpus_lost:
        text.append(f", {summary.gpus_lost:,} lost", style="red")
    return text


def _power_text(seen: OverviewSnapshot, summary: Summary) -> Text:
    power = seen.overview.power if seen.overview else None
    measured_w = summary.measured_power_w
    if power is None or power.budget_w is None:
        text = _join((format_power(measured_w), "bold"), " measured")
        text.append(f", {summary.measured_gpus:,}/{summary.gpus:,} GPUs", style=LABEL)
        return text
    share = measured_w / power.budget_w if power.budget_w else 0.0
    text = draw_bar(share, 8)
    text.append(f" {format_power(measured_w)}", style="bold")
    return text.append(f" of {format_power(power.budget_w)}", style="red" if share > 1.0 else "")


def _energy_text(overview: Overview | None) -> Text:
    today = overview.today if overview else None
    if today is None:
        return Text("not known yet", style=LABEL)
    text = _join((format_energy(today.energy_j), "bold"))
    if today.cost is not None:
        text.append(f", {today.cost:,.2f} {escape_text(today.currency)}")
    idle = f"; {format_percent(today.idle_j, today.energy_j)} idle" if today.energy_j else ""
    return text.append(idle, style=LABEL)


def _promises_text(overview: Overview | None) -> Text:
    if overview is None:
        return Text("not known yet", style=LABEL)
    counts = overview.promises
    text = Text()
    for number, word, style in (
        (counts.kept, "kept", "green"),
        (counts.at_risk, "at risk", "yellow"),
        (counts.broken, "broken", "red"),
        (counts.unknown, "unknown", LABEL),
    ):
        if number:
            text.append(", " if text else "")
            text.append(f"{number:,} {word}", style=style)
    return text or Text("nothing has an objective", style=LABEL)


def list_figures(seen: OverviewSnapshot) -> list[tuple[str, Text]]:
    """Returns the figures of the overview with their names."""
    summary = seen.summary
    if summary is None:
        return [("", Text("waiting for the controller", style=LABEL))]
    allocated, capacity = summary.allocated_gpu_milli, 1000 * summary.gpus
    gpus = draw_bar(allocated / capacity if capacity else 0.0, 8, style="cyan")
    gpus.append(f" {format_percent(allocated, capacity)}", style="bold")
    gpus.append(f" held, {format_gpu(allocated)} GPUs")
    work = _join((f"{summary.placed:,} placed", "green"))
    work.append(f", {summary.pending:,} waiting", style="yellow" if summary.pending else LABEL)
    decision = f"p50 {format_milliseconds(summary.decision_p50_s)}, p99 {format_milliseconds(summary.decision_p99_s)}"
    return [
        ("nodes", _nodes_text(summary)),
        ("GPUs", gpus),
        ("power", _power_text(seen, summary)),
        ("today", _energy_text(seen.overview)),
        ("promises", _promises_text(seen.overview)),
        ("work", work),
        ("decision", Text(decision)),
    ]


def _figures_grid(seen: OverviewSnapshot, lines: int) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style=LABEL, no_wrap=True, min_width=_LABEL_WIDE)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for row in list_figures(seen)[:lines]:
        grid.add_row(*row)
    return grid


def _draw_power(seen: OverviewSnapshot, width: int, height: int) -> Group:
    """Draws the last five minutes of power under a line that says the scale."""
    samples = seen.history.sample(seen.now_s, width, _GRAPH_SPAN_S / width)
    limit = seen.overview.power.budget_w if seen.overview else None
    known = [value for value in samples if value is not None]
    title = Text()
    title.append("5 min" if limit else "power, 5 min", style=LABEL)
    if limit:
        title.append(f"  ╌ budget {format_power(limit)}", style="yellow")
    if known:
        title.append(f"  max {format_power(max(known))}", style=LABEL)
    title.truncate(width, overflow="ellipsis")
    return Group(title, *draw_graph(samples, limit, height - 1))


def render_head(seen: OverviewSnapshot, width: int, height: int) -> RenderableType:
    """Draws figures beside the power graph, or above a low one on a narrow screen; `height` is the screen's."""
    lines = max(2, min(height - _OTHER_LINES, _GRAPH_LINES if height < _TALL else _GRAPH_LINES_TALL))
    if width >= _WIDE:
        grid = Table.grid(expand=True, padding=(0, 2))
        left = 44 if width < 100 else width // 2
        grid.add_column(width=left - 2)
        grid.add_column()
        grid.add_row(_figures_grid(seen, lines), _draw_power(seen, width - left - 2, lines))
        return grid
    if height < _GRAPH_FROM:
        return _figures_grid(seen, lines)
    return Group(_figures_grid(seen, lines), _draw_power(seen, width, _GRAPH_LINES_NARROW))


def _list_waiting(seen: OverviewSnapshot) -> list[tuple[str, str]]:
    if seen.overview is not None and seen.overview.waiting:
        return [
            (
                f"{one.workloads:,}",
                f"{one.example_reason or one.reason} ({format_gpu(one.gpu_milli)} GPUs)",
            )
            for one in seen.overview.waiting
        ]
    reasons = seen.summary.pending_reasons if seen.summary else ()
    return [(f"{one.workloads:,}", one.reason) for one in sorted(reasons, key=lambda one: -one.workloads)]


def _short_grid(title: str, rows: Sequence[tuple[str, str]], empty: str, width: int, lines: int) -> Group:
    """Draws a title over pairs of a number and a text; the last line counts what does not fit."""
    shown = list(rows[: lines - 1])
    if len(rows) > len(shown):
        shown = [*rows[: lines - 2], ("", f"and {len(rows) - lines + 2} more")]
    wide = max((len(number) for number, _ in shown), default=0)
    body = [
        _join(
            (f"{number:>{wide}} ", "bold"),
            shorten_text(escape_text(text), max(4, width - wide - 1)),
        )
        for number, text in shown
    ]
    return Group(Text(title, style=LABEL), *(body or [Text(empty, style=LABEL)]))


def count_below_lines(height: int) -> int:
    """Returns how many lines of the screen are for what waits and who consumes."""
    return _BELOW_LINES if height < _TALL else height // 4


def render_below(seen: OverviewSnapshot, width: int, lines: int) -> RenderableType:
    """Draws what workloads wait for beside the consumers with the highest power."""
    consumers = [
        (
            format_power(one.power_w),
            f"{one.namespace or '(none)'}/{one.user or '(none)'}, {format_gpu(one.held_milli)} GPUs"
            + (f", {one.gpus_idle:,} idle" if one.gpus_idle else ""),
        )
        for one in (seen.overview.consumers if seen.overview else ())
    ]
    half = (width - 2) // 2 if width >= _WIDE else width
    waiting = _short_grid("waiting for", _list_waiting(seen), "nothing waits", half, lines)
    if width < _WIDE:
        return waiting
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=half)
    grid.add_column(width=half)
    grid.add_row(waiting, _short_grid("consumers by power", consumers, "no work draws power", half, lines))
    return grid


def render_description(lines: Sequence[str]) -> RenderableType:
    """Draws lines with our own colours: a row of a table is cut at the width, a sentence is wrapped."""
    texts = []
    for line in lines:
        text = Text.from_ansi(escape_text_line(line))
        if len(_CELLS.findall(text.plain)) > 1:
            text.no_wrap, text.overflow = True, "ellipsis"
        texts.append(text)
    return Group(*texts)


def render_tabs(tabs: Sequence[TopTab[object]], chosen: str, width: int) -> tuple[Text, list[tuple[int, int, str]]]:
    """Draws the line of tabs; returns it with the columns of each tab, for the mouse.

    Full names if they fit, short ones otherwise, and on a narrow screen the name of the chosen tab alone.
    """
    for names in (
        [f" {number} {tab.title} " for number, tab in enumerate(tabs, 1)],
        [f" {number} {tab.short} " for number, tab in enumerate(tabs, 1)],
        [f" {number} {tab.short} " if tab.key == chosen else f" {number} " for number, tab in enumerate(tabs, 1)],
    ):
        if sum(map(len, names)) <= width:
            break
    line, spans, at = Text(no_wrap=True), [], 0
    for tab, name in zip(tabs, names, strict=True):
        line.append(name, style="bold reverse" if tab.key == chosen else "")
        spans.append((at, at + len(name), tab.key))
        at += len(name)
    return line, spans
