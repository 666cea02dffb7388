"""The cluster drawn on a terminal: figures, bars and the map of nodes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from eelgrid_controller.formatting import format_milliseconds, format_percent, format_power
from eelgrid_protos.messages import Node, Summary
from eelgrid_protos.safe_text import escape_text

_BLOCKS = "·░▒▓█"
_COLOURS = ((74, 74, 106), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))
_COLOUR_STEPS = 20
_REASONS_SHOWN = 5


def _level(share: float) -> int:
    """0 for nothing at all, the last for all; what lies between is in equal steps."""
    if share <= 0.0:
        return 0
    return min(len(_BLOCKS) - 1, 1 + int(min(share, 1.0) * (len(_BLOCKS) - 2) + 1e-9))


def _colour(share: float) -> str:
    """The colour of a share, in steps, so that neighbours that look alike are drawn as one."""
    place = round(max(0.0, min(1.0, share)) * _COLOUR_STEPS) / _COLOUR_STEPS * (len(_COLOURS) - 1)
    low = min(int(place), len(_COLOURS) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(_COLOURS[low], _COLOURS[low + 1], strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def render_bar(share: float, width: int) -> Text:
    """A bar of `width` cells with eighths of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    text = Text("█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else ""), style=_colour(share))
    text.append("·" * (width - len(text)), style="grey35")
    return text


def render_figures(summary: Summary) -> RenderableType:
    """What there is, what is allocated and what it draws."""
    capacity_milli = summary.gpus * 1000
    allocated = summary.allocated_gpu_milli / 1000
    per_gpu_w = summary.modelled_power_w / allocated if allocated else None
    coverage = f" of {summary.measured_gpus:,} GPUs" if summary.measured_gpus else ""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="grey62")
    grid.add_column(justify="left")
    lost = f", [red]{summary.nodes_lost:,} lost[/]" if summary.nodes_lost else ""
    for name, value in (
        ("nodes", f"{summary.nodes_ready:,} ready{lost}, {summary.gpus:,} GPUs"),
        (
            "GPUs allocated",
            f"[bold]{format_percent(summary.allocated_gpu_milli, capacity_milli)}[/]  ({allocated:,.1f})",
        ),
        ("CPUs allocated", format_percent(summary.allocated_cpu_milli, summary.cpu_milli)),
        (
            "power, modelled",
            f"[bold]{format_power(summary.modelled_power_w)}[/], {format_power(per_gpu_w)} a GPU in use",
        ),
        ("power, measured", f"{format_power(summary.measured_power_w)}{coverage}"),
        (
            "workloads",
            f"[green]{summary.placed:,} placed[/], [yellow]{summary.pending:,} waiting[/], {summary.refused:,} refused",
        ),
        (
            "decision",
            f"p50 {format_milliseconds(summary.decision_p50_s)}, p99 {format_milliseconds(summary.decision_p99_s)}",
        ),
        ("samples", f"{summary.samples_received:,} received, {summary.samples_lost:,} lost"),
    ):
        grid.add_row(name, value)
    return grid


def render_models(summary: Summary, width: int = 16) -> RenderableType:
    """A bar for each GPU model, the largest fleet first."""
    grid = Table.grid(padding=(0, 1))
    for right in (False, True, False, True, True):
        grid.add_column(justify="right" if right else "left")
    for model in sorted(summary.models, key=lambda m: (-m.gpus, m.model)):
        share = model.allocated_gpu_milli / (1000 * model.gpus) if model.gpus else 0.0
        grid.add_row(
            Text(escape_text(model.model), style="bold"),
            Text(f"{model.gpus:,}", style="grey62"),
            render_bar(share, width),
            f"{100 * share:.0f} %",
            Text(format_power(model.measured_power_w), style="grey62"),
        )
    return grid


def render_pending_reasons(summary: Summary) -> RenderableType:
    """Why workloads wait, the most frequent first; nothing where none waits."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="yellow")
    grid.add_column()
    every = sorted(summary.pending_reasons, key=lambda r: (-r.workloads, r.reason))
    for reason in every[:_REASONS_SHOWN]:
        grid.add_row(f"{reason.workloads:,}", Text(escape_text(reason.reason)))
    if not every:
        grid.add_row("", Text("nothing waits", style="grey62"))
    elif len(every) > _REASONS_SHOWN:
        more = sum(reason.workloads for reason in every[_REASONS_SHOWN:])
        grid.add_row(f"{more:,}", Text("for other reasons", style="grey62"))
    return grid


def select_busiest_nodes(nodes: Iterable[Node], most: int) -> RenderableType:
    """The nodes that draw most, or hold most where nothing is measured."""
    table = Table(box=None, padding=(0, 1), header_style="grey62", pad_edge=False)
    for title, right in (("NODE", False), ("MODEL", False), ("GPUS", True), ("", False), ("POWER", True)):
        table.add_column(title, justify="right" if right else "left")
    ranked = sorted(nodes, key=lambda n: (-(n.power_w or 0.0), -n.allocated_gpu_milli, n.inventory.node_name))
    for node in ranked[:most]:
        gpus = node.inventory.gpus
        share = node.allocated_gpu_milli / (1000 * len(gpus)) if gpus else 0.0
        held = f"{node.allocated_gpu_milli / 1000:g}/{len(gpus)}" if gpus else "-"
        model = gpus[0].model if gpus else "-"
        table.add_row(
            Text(escape_text(node.inventory.node_name)),
            Text(escape_text(model)),
            held,
            render_bar(share, 12),
            format_power(node.power_w),
        )
    return table


def render_summary(summary: Summary, title: str, *others: RenderableType) -> RenderableType:
    """Figures beside bars, and below them whatever else there is."""
    top = Table.grid(expand=True, padding=(0, 3))
    top.add_column(ratio=3)
    top.add_column(ratio=2)
    top.add_row(render_figures(summary), render_models(summary))
    return Panel(Group(top, *others), title=title, title_align="left", border_style="grey37", padding=(0, 1))


def _cells(shares: Sequence[float], nodes_each: int) -> Text:
    """The shaded cells of one model; neighbours that look alike share a span."""
    groups = (shares[start : start + nodes_each] for start in range(0, len(shares), nodes_each))
    means = (sum(group) / len(group) for group in groups)
    text = Text()
    for (block, colour), run in groupby((_BLOCKS[_level(mean)], _colour(mean)) for mean in means):
        text.append(block * sum(1 for _ in run), style=colour)
    return text


def render_fleet_map(shares: Mapping[str, Sequence[float]], *, width: int, rows_most: int) -> RenderableType:
    """Allocation of every node, model by model; each cell is as many nodes as the rows allow."""
    label = max([len(model) for model in shares], default=0) + 6
    across = max(8, width - label - 1)

    def rows(nodes_each: int) -> int:
        return sum(math.ceil(math.ceil(len(values) / nodes_each) / across) for values in shares.values())

    nodes_each = next((n for n in range(1, 1000) if rows(n) <= max(rows_most, len(shares))), 1000)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=label, no_wrap=True)
    grid.add_column(width=across)
    for model, values in shares.items():
        title = Text.assemble((escape_text(model), "bold"), (f" {len(values):,}", "grey62"))
        cells = _cells(values, nodes_each)
        lines = [cells[start : start + across] for start in range(0, len(cells), across)]
        grid.add_row(title, Text("\n").join(lines))
    each = "a node" if nodes_each == 1 else f"{nodes_each} nodes"
    key = Text.assemble(("each cell is ", "grey62"), (each, "bold"), ("; GPUs allocated: ", "grey62"))
    key.append("none ", style="grey62")
    for level, block in enumerate(_BLOCKS):
        key.append(block, style=_colour(level / (len(_BLOCKS) - 1)))
    key.append(" all", style="grey62")
    return Group(grid, key)
