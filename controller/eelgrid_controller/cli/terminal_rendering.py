"""The cluster drawn on a terminal: figures, bars, the map of nodes, and the screen of `eelctl top`.

`eelctl top` and the demo share the parts. The screen of `eelctl top` fits from 80 columns and 24 lines on: figures
always, then waiting work, then consumers and nodes as far as the lines go. A missing value is reported as missing,
never as a number.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from eelgrid_controller.formatting import (
    count_noun,
    format_energies,
    format_energy,
    format_milliseconds,
    format_money,
    format_percent,
    format_power,
    format_powers,
)
from eelgrid_protos.messages import (
    BudgetStatus,
    EnergySpent,
    ListPromisesResponse,
    Node,
    NodeState,
    QueryEnergyResponse,
    Summary,
)
from eelgrid_protos.safe_text import escape_text

_BLOCKS = "·░▒▓█"
_COLOURS = ((74, 74, 106), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))
_COLOUR_STEPS = 20
_REASONS_SHOWN = 5
# Of the screen of eelctl top.
_WIDE = 130
_BAR_WIDE = 8
_MODELS_BELOW = 3
_REASONS_BELOW = 3
_UNSTEERED = "unsteered"
_GREY = "grey62"


def _level(share: float) -> int:
    """Returns the shade of a share: 0 for none, the last for all, equal steps between."""
    if share <= 0.0:
        return 0
    return min(len(_BLOCKS) - 1, 1 + int(min(share, 1.0) * (len(_BLOCKS) - 2) + 1e-9))


def _colour(share: float) -> str:
    """Returns the colour of a share, in steps, so that similar neighbours are drawn as one span."""
    place = round(max(0.0, min(1.0, share)) * _COLOUR_STEPS) / _COLOUR_STEPS * (len(_COLOURS) - 1)
    low = min(int(place), len(_COLOURS) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(_COLOURS[low], _COLOURS[low + 1], strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def render_bar(share: float, width: int) -> Text:
    """Draws a bar of `width` cells, with a resolution of an eighth of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    text = Text("█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else ""), style=_colour(share))
    text.append("·" * (width - len(text)), style="grey35")
    return text


def _format_lost(summary: Summary) -> tuple[str, str]:
    """Formats lost nodes and lost GPUs, each empty where there are none."""
    nodes = f", [red]{summary.nodes_lost:,} lost[/]" if summary.nodes_lost else ""
    return nodes, f", [red]{count_noun(summary.gpus_lost, 'GPU')} lost[/]" if summary.gpus_lost else ""


def render_figures(summary: Summary) -> RenderableType:
    """Draws a table of capacity, allocation and power."""
    capacity_milli = summary.gpus * 1000
    allocated = summary.allocated_gpu_milli / 1000
    per_gpu_w = summary.modelled_power_w / allocated if allocated else None
    coverage = f" of {summary.measured_gpus:,} GPUs" if summary.measured_gpus else ""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="grey62")
    grid.add_column(justify="left")
    lost, gpus_lost = _format_lost(summary)
    for name, value in (
        ("nodes", f"{summary.nodes_ready:,} ready{lost}, {summary.gpus:,} GPUs{gpus_lost}"),
        (
            "GPUs allocated",
            f"[bold]{format_percent(summary.allocated_gpu_milli, capacity_milli)}[/]  ({allocated:,.1f})",
        ),
        ("CPUs allocated", format_percent(summary.allocated_cpu_milli, summary.cpu_milli)),
        (
            "power, modelled",
            f"[bold]{format_power(summary.modelled_power_w)}[/], {format_power(per_gpu_w)} per GPU in use",
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
    """Draws a bar for each GPU model, the largest fleet first."""
    grid = Table.grid(padding=(0, 1))
    for right in (False, True, False, True, True):
        grid.add_column(justify="right" if right else "left")
    models = sorted(summary.models, key=lambda m: (-m.gpus, m.model))
    powers = format_powers([model.measured_power_w for model in models])
    for model, power in zip(models, powers, strict=True):
        share = model.allocated_gpu_milli / (1000 * model.gpus) if model.gpus else 0.0
        grid.add_row(
            Text(escape_text(model.model), style="bold"),
            Text(f"{model.gpus:,}", style="grey62"),
            render_bar(share, width),
            f"{100 * share:.0f} %",
            Text(power, style="grey62"),
        )
    return grid


def render_pending_reasons(summary: Summary) -> RenderableType:
    """Draws why workloads wait, the most frequent reason first."""
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
    """Draws a table of the nodes with the highest power draw, or the most allocated where nothing is measured."""
    table = Table(box=None, padding=(0, 1), header_style="grey62", pad_edge=False)
    for title, right in (("NODE", False), ("MODEL", False), ("GPUS", True), ("", False), ("POWER", True)):
        table.add_column(title, justify="right" if right else "left")
    ranked = sorted(nodes, key=lambda n: (-(n.power_w or 0.0), -n.allocated_gpu_milli, n.inventory.node_name))
    powers = format_powers([node.power_w for node in ranked[:most]])
    for node, power in zip(ranked[:most], powers, strict=True):
        gpus = node.inventory.gpus
        share = node.allocated_gpu_milli / (1000 * len(gpus)) if gpus else 0.0
        held = f"{node.allocated_gpu_milli / 1000:g}/{len(gpus)}" if gpus else "-"
        model = gpus[0].model if gpus else "-"
        table.add_row(
            Text(escape_text(node.inventory.node_name)),
            Text(escape_text(model)),
            held,
            render_bar(share, 12),
            power,
        )
    return table


def render_summary(summary: Summary, title: str, *others: RenderableType) -> RenderableType:
    """Draws figures beside bars, and below them the other parts."""
    top = Table.grid(expand=True, padding=(0, 3))
    top.add_column(ratio=3)
    top.add_column(ratio=2)
    top.add_row(render_figures(summary), render_models(summary))
    return Panel(Group(top, *others), title=title, title_align="left", border_style="grey37", padding=(0, 1))


def _cells(shares: Sequence[float], nodes_each: int) -> Text:
    """Draws the cells of one model; similar neighbours share a span."""
    groups = (shares[start : start + nodes_each] for start in range(0, len(shares), nodes_each))
    means = (sum(group) / len(group) for group in groups)
    text = Text()
    for (block, colour), run in groupby((_BLOCKS[_level(mean)], _colour(mean)) for mean in means):
        text.append(block * sum(1 for _ in run), style=colour)
    return text


def render_fleet_map(shares: Mapping[str, Sequence[float]], *, width: int, rows_most: int) -> RenderableType:
    """Draws the allocation of every node by model; a cell stands for as many nodes as the rows require."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSnapshot:
    """What the screen shows; a part that is None has its reason in `missing`."""

    summary: Summary
    nodes: Sequence[Node]
    promises: ListPromisesResponse | None = None
    # From midnight in UTC, by namespace and title.
    energy: QueryEnergyResponse | None = None
    missing: str = ""


def render_top(seen: TopSnapshot, title: str, *, nodes_most: int, width: int, height: int) -> RenderableType:
    """Draws the whole screen; `height` is its maximum number of lines, 0 for no limit."""
    summary = seen.summary
    is_wide = width >= _WIDE
    models = sorted(summary.models, key=lambda model: (-model.gpus, model.model))
    reasons = _reasons(summary)
    rows = len(_figures(seen))
    # Two lines of frame, one of the title of the reasons, two above the tables.
    left = (
        height
        - 2
        - 1
        - len(reasons)
        - 2
        - (max(rows, len(models)) if is_wide else rows + min(len(models), _MODELS_BELOW + 1))
    )
    shown = nodes_most if not height else max(1, min(nodes_most, left))
    parts: list[RenderableType] = []
    if is_wide:
        head = Table.grid(expand=True, padding=(0, 3))
        head.add_column(ratio=1)
        head.add_column()
        head.add_row(_grid(_figures(seen)), render_models(summary, width=_BAR_WIDE))
        parts.append(head)
    else:
        few = Summary(time_ns=summary.time_ns, models=tuple(models[:_MODELS_BELOW]))
        parts += [_grid(_figures(seen)), render_models(few, width=32)]
        if others := models[_MODELS_BELOW:]:
            gpus = sum(model.gpus for model in others)
            parts.append(
                Text(f"and {count_noun(len(others), 'model')} more with {count_noun(gpus, 'GPU')}", style=_GREY)
            )
    parts += [Text("waiting for", style=_GREY), _lines(reasons), _tables(seen, shown)]
    return Panel(Group(*parts), title=title, title_align="left", border_style="grey37", padding=(0, 1))


def _grid(rows: Sequence[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=_GREY, no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for row in rows:
        grid.add_row(*row)
    return grid


def _lines(rows: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    widest = max(len(number) for number, _ in rows)
    grid.add_column(justify="right", style="yellow", no_wrap=True, min_width=widest)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for number, text in rows:
        grid.add_row(number, Text(escape_text(text)))
    return grid


def _figures(seen: TopSnapshot) -> list[tuple[str, Text]]:
    summary = seen.summary
    allocated = summary.allocated_gpu_milli / 1000
    per_gpu_w = summary.modelled_power_w / allocated if allocated else None
    lost, gpus_lost = _format_lost(summary)
    coverage = f" ({summary.measured_gpus:,} of {summary.gpus:,} GPUs)" if summary.measured_gpus < summary.gpus else ""
    rows = [
        (
            "nodes",
            f"{summary.nodes_ready:,} ready{lost}, {summary.gpus:,} GPUs{gpus_lost}; oldest sample {_oldest(seen.nodes)}",
        ),
        (
            "GPUs allocated",
            (
                f"[bold]{format_percent(summary.allocated_gpu_milli, summary.gpus * 1000)}[/] ({allocated:,.1f}), "
                f"CPUs {format_percent(summary.allocated_cpu_milli, summary.cpu_milli)}"
            ),
        ),
        (
            "power",
            (
                f"[bold]{format_power(summary.measured_power_w)}[/] measured{coverage}, "
                f"{format_power(summary.modelled_power_w)} modelled"
            ),
        ),
        ("", f"{format_power(per_gpu_w)} modelled per GPU in use"),
        ("energy today", _energy(seen)),
        ("promises", _promises(seen)),
        (
            "workloads",
            f"[green]{summary.placed:,} placed[/], [yellow]{summary.pending:,} waiting[/], {summary.refused:,} refused",
        ),
        (
            "decision",
            (
                f"p50 {format_milliseconds(summary.decision_p50_s)}, p99 {format_milliseconds(summary.decision_p99_s)}; "
                f"samples {summary.samples_received:,}, {summary.samples_lost:,} lost"
            ),
        ),
    ]
    found = [(name, Text.from_markup(value)) for name, value in rows]
    found[3] = ("budget", _budget(seen)) if seen.promises and seen.promises.budgets else found[3]
    return found


def _oldest(nodes: Sequence[Node]) -> str:
    ages = [node.sample_age_s for node in nodes if node.state is NodeState.READY and node.sample_age_s is not None]
    return f"{max(ages):,.0f} s" if ages else "-"


def _spent_mj(spent: EnergySpent) -> int:
    return spent.bare_idle_mj + spent.context_idle_mj + spent.active_mj


def _energy(seen: TopSnapshot) -> str:
    if seen.energy is None:
        return f"not known ({escape(escape_text(seen.missing)) or 'not asked yet'})"
    found = seen.energy
    parts = (found.left_out, found.unallocated, found.unattributed, *(group.spent for group in found.groups))
    total_mj, cost = sum(_spent_mj(part) for part in parts), sum(part.cost for part in parts)
    idle_mj = sum(part.bare_idle_mj + part.context_idle_mj for part in parts)
    money = f", {format_money(cost, escape(escape_text(found.currency)))}" if found.currency and cost else ""
    return f"[bold]{format_energy(total_mj / 1000.0)}[/]{money}, {format_percent(idle_mj, total_mj)} of it idle"


def _worst(budgets: Sequence[BudgetStatus]) -> BudgetStatus:
    """Returns the cluster's budget, or any that is further over; without the cluster's, the fullest."""
    whole = [one for one in budgets if one.budget.scope.name == "CLUSTER"]
    over = [one for one in budgets if one.over_w > 0.0]
    return max(over or whole or budgets, key=_used_share)


def _used_w(one: BudgetStatus) -> float:
    return one.claimed_w if one.measured_w is None else one.measured_w


def _used_share(one: BudgetStatus) -> float:
    return _used_w(one) / one.budget.limit_w if one.budget.limit_w else 0.0


def _budget(seen: TopSnapshot) -> Text:
    assert seen.promises is not None
    one = _worst(seen.promises.budgets)
    share = _used_share(one)
    text = render_bar(share, 16)
    name = " claimed" if one.measured_w is None else ""
    if one.budget.scope.name != "CLUSTER":
        name += f", {one.budget.scope.name.lower()} {escape_text(one.budget.name)}"
    text.append(f" {100 * share:.0f} % of {format_power(one.budget.limit_w)}{name}", style="red" if share > 1.0 else "")
    more = len(seen.promises.budgets) - 1
    text.append(f", and {more} more" if more else "", style=_GREY)
    return text


def _promises(seen: TopSnapshot) -> str:
    if seen.promises is None:
        return f"not known ({escape(escape_text(seen.missing)) or 'not asked yet'})"
    services, jobs = seen.promises.services, seen.promises.jobs
    if not services and not jobs:
        return "nothing has an objective"
    told = [one for one in services if one.live_s is not None and one.objective_s]
    late = sum(one.live_s is not None and one.live_s > one.objective_s for one in told)
    phases = [*(one.phase for one in services), *(one.phase for one in jobs)]
    unsteered = phases.count(_UNSTEERED)
    said = f"[green]{len(told) - late:,}[/] of {len(services):,} services kept"
    said += f", [red]{late:,} late[/]" if late else ""
    said += f", {count_noun(len(jobs), 'job')}" if jobs else ""
    return said + (f", [yellow]{unsteered:,} unsteered[/]" if unsteered else "")


def _reasons(summary: Summary) -> list[tuple[str, str]]:
    every = sorted(summary.pending_reasons, key=lambda reason: (-reason.workloads, reason.reason))
    if not every:
        return [("", "nothing waits")]
    rows = [(f"{reason.workloads:,}", reason.reason) for reason in every]
    if len(rows) <= _REASONS_BELOW:
        return rows
    more = sum(reason.workloads for reason in every[_REASONS_BELOW - 1 :])
    return [*rows[: _REASONS_BELOW - 1], (f"{more:,}", "for other reasons")]


def _tables(seen: TopSnapshot, shown: int) -> Table:
    """Draws the owners with the most energy today beside the nodes with the highest power draw now."""
    grid = Table.grid(expand=True, padding=(0, 2))
    grid.add_column(ratio=1)
    grid.add_column()
    grid.add_row(Text("most energy today", style=_GREY), Text("busiest nodes", style=_GREY))
    grid.add_row(_consumers(seen.energy, shown), select_busiest_nodes(seen.nodes, shown))
    return grid


def _consumers(found: QueryEnergyResponse | None, most: int) -> Table:
    table = Table(box=None, padding=(0, 1), header_style=_GREY, pad_edge=False, expand=True)
    table.add_column("WORKLOAD", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("ENERGY", justify="right", no_wrap=True)
    groups = () if found is None else sorted(found.groups, key=lambda group: -_spent_mj(group.spent))
    energies = format_energies([_spent_mj(group.spent) / 1000.0 for group in groups[:most]])
    for group, energy in zip(groups[:most], energies, strict=True):
        title = "/".join(value for value in group.values if value) or "(no name)"
        table.add_row(Text(escape_text(title)), energy)
    return table
