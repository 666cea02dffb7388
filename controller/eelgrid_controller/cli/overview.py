"""eelctl overview: what is going on and what needs attention, on one screen of 80 columns.

Owns the layout; the controller decides and counts everything that is shown.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from textwrap import wrap

import click

from eelgrid_controller.cli.connection import CliSettings, connect_operators, output_option
from eelgrid_controller.cli.output import (
    TableColumn,
    print_document,
    shorten_text,
    terminal_width,
    text_table,
    use_colour,
)
from eelgrid_controller.formatting import format_age, format_energy, format_gpu, format_power
from eelgrid_protos.messages import (
    AttentionItem,
    AttentionSeverity,
    BudgetScope,
    BudgetStatus,
    Consumer,
    GetOverviewRequest,
    Overview,
    PowerOverview,
    TodayEnergy,
    WaitingReason,
)

_WIDTH = 80
_BAR_CELLS = 24
# Rows of each list unless -o wide is given: together with the rest they fit a screen.
_SHOWN = 8
_COLOURS = {AttentionSeverity.CRITICAL: "red", AttentionSeverity.WARNING: "yellow"}


def format_bar(part: float, whole: float, cells: int = _BAR_CELLS) -> str:
    """Formats a share as a bar; a bar that is exceeded is full and ends with `!`."""
    share = part / whole if whole > 0.0 else 0.0
    filled = min(cells, max(0, round(cells * share)))
    return "[" + "#" * filled + "-" * (cells - filled) + ("!" if share > 1.0 else "]")


def _power_lines(power: PowerOverview) -> Iterator[str]:
    if power.measured_w is None:
        yield f"POWER      no fresh reading of {power.gpus:,} GPUs"
    else:
        read = (
            f"{power.measured_gpus:,} of {power.gpus:,} GPUs read, {power.nodes_reporting:,} of {power.nodes:,} nodes"
        )
        if power.budget_w is None:
            yield f"POWER      {format_power(power.measured_w)}; no cluster budget; {read}"
        else:
            share = f"{100.0 * power.measured_w / power.budget_w:.0f} %" if power.budget_w else "-"
            bar = format_bar(power.measured_w, power.budget_w)
            yield f"POWER      {bar} {format_power(power.measured_w)} of {format_power(power.budget_w)}, {share}"
            over = f", {format_power(power.over_w)} OVER" if power.over_w else ""
            short = f", {format_power(power.shortfall_w)} short" if power.shortfall_w else ""
            yield f"           {format_power(power.claimed_w)} claimed{over}{short}; {read}"
    for one in power.budgets:
        if one.budget.scope is not BudgetScope.CLUSTER and _is_notable(one):
            name = f"{one.budget.scope.name.lower()} {one.budget.name}"
            bar = format_bar(one.measured_w or 0.0, one.budget.limit_w, 10)
            over = f", {format_power(one.over_w)} OVER" if one.over_w > 0 else ""
            yield f"           {name} {bar} {format_power(one.measured_w)} of {format_power(one.budget.limit_w)}{over}"


def _is_notable(one: BudgetStatus) -> bool:
    return one.over_w > 0 or one.shortfall_w > 0


def _money(amount: float | None, currency: str) -> str:
    return "" if amount is None else f", {amount:,.2f} {currency}".rstrip()


def _today_lines(today: TodayEnergy | None) -> Iterator[str]:
    if today is None:
        yield "TODAY      not known: the energy ledger has not answered"
        return
    carbon = "" if today.carbon_g is None else f", {today.carbon_g / 1000.0:,.3g} kg CO2"
    yield f"TODAY      {format_energy(today.energy_j)}{_money(today.cost, today.currency)}{carbon}"
    share = f" ({100.0 * today.idle_j / today.energy_j:.0f} %)" if today.energy_j else ""
    yield f"           idle {format_energy(today.idle_j)}{share}{_money(today.idle_cost, today.currency)}"


def _capacity_lines(found: Overview) -> Iterator[str]:
    one = found.capacity
    lost = [
        f"{number:,} {noun}"
        for number, noun in (
            (one.gpus_idle, "held but idle"),
            (one.gpus_lost, "lost"),
            (one.gpus_unreachable, "on lost nodes"),
            (one.gpus_cordoned, "cordoned"),
        )
        if number
    ]
    held, free = format_gpu(one.held_milli), format_gpu(one.free_milli)
    yield f"GPUS       {one.gpus:,}: {', '.join([f'{held} held', f'{free} free', *lost])}"
    nodes = [f"{one.nodes_lost:,} lost"] * bool(one.nodes_lost) + [f"{one.nodes_cordoned:,} cordoned"] * bool(
        one.nodes_cordoned
    )
    yield f"NODES      {one.nodes:,}" + (f": {', '.join(nodes)}" if nodes else "")
    yield f"WORKLOADS  {found.workloads_placed:,} placed, {found.workloads_waiting:,} waiting"
    told = found.promises
    counts = ((told.kept, "kept"), (told.at_risk, "at risk"), (told.broken, "broken"), (told.unknown, "not measured"))
    shown = [f"{number:,} {name}" for number, name in counts if number]
    yield f"PROMISES   {', '.join(shown) or 'none'}"


def _attention_lines(found: Overview, shown: int, width: int) -> Iterator[str]:
    yield ""
    if not found.attention_total:
        yield "NEEDS ATTENTION: nothing"
        return
    yield f"NEEDS ATTENTION ({found.attention_total:,})"
    for item in found.attention[:shown]:
        yield from _item_lines(item, found.time_ns, width)
    left = found.attention_total - min(shown, len(found.attention))
    if left:
        yield f"  and {left:,} more: eelctl overview -o wide"


def _item_lines(item: AttentionItem, now_ns: int, width: int) -> Iterator[str]:
    age = f", {format_age(max(0, now_ns - item.since_ns) / 1e9)}" if item.since_ns else ""
    label = item.severity.name.lower()
    text = shorten_text(f"  {label:<8}  {item.subject}: {item.message.rstrip('.')}{age}", width)
    colour = _COLOURS.get(item.severity)
    yield click.style(text, fg=colour) if colour and use_colour() else text
    yield f"            {item.command}"


_WAITING_COLUMNS = (
    TableColumn[tuple[WaitingReason, int]]("WAITS FOR", lambda row: row[0].reason or "(none)"),
    TableColumn[tuple[WaitingReason, int]]("WORKLOADS", lambda row: f"{row[0].workloads:,}", right=True),
    TableColumn[tuple[WaitingReason, int]]("GPUS", lambda row: format_gpu(row[0].gpu_milli), right=True),
    TableColumn[tuple[WaitingReason, int]](
        "LONGEST", lambda row: format_age(max(0, row[1] - row[0].oldest_since_ns) / 1e9), right=True
    ),
    TableColumn[tuple[WaitingReason, int]]("FIRST", lambda row: row[0].example_workload_id),
)


def _consumer_columns(currency: str) -> tuple[TableColumn[Consumer], ...]:
    return (
        TableColumn("NAMESPACE", lambda one: one.namespace or "-"),
        TableColumn("USER", lambda one: one.user or "-"),
        TableColumn("WORKLOADS", lambda one: f"{one.workloads:,}", right=True),
        TableColumn("GPUS", lambda one: format_gpu(one.held_milli), right=True),
        TableColumn("IDLE", lambda one: f"{one.gpus_idle:,}", right=True),
        TableColumn("POWER", lambda one: format_power(one.power_w), right=True),
        TableColumn("TODAY", lambda one: format_energy(one.energy_j), right=True),
        *([TableColumn[Consumer]("COST", lambda one: f"{one.cost or 0.0:,.2f}", right=True)] if currency else []),
    )


def overview_lines(found: Overview, *, shown: int = _SHOWN, width: int = _WIDTH) -> Iterator[str]:
    """Formats an overview; `shown` is the most rows of each list."""
    yield f"{datetime.fromtimestamp(found.time_ns / 1e9, UTC):%F %T} UTC"
    for line in chain(_power_lines(found.power), _today_lines(found.today), _capacity_lines(found)):
        yield from wrap(line, width, subsequent_indent=" " * 11)
    yield from _attention_lines(found, shown, width)
    if found.waiting:
        rows = [(one, found.time_ns) for one in found.waiting[:shown]]
        yield ""
        yield from text_table(_WAITING_COLUMNS, rows, colour=use_colour(), width=width)
        first = rows[0][0]
        yield from wrap(
            f"{first.example_reason or first.reason}. To help: {first.remedy}", width, subsequent_indent="  "
        )
    if found.consumers:
        yield ""
        columns: Sequence[TableColumn[Consumer]] = _consumer_columns(found.today.currency if found.today else "")
        yield from text_table(columns, found.consumers[:shown], colour=use_colour(), width=width)
        left = found.consumers_total - min(shown, len(found.consumers))
        if left:
            held = sum(one.held_milli for one in found.consumers[shown:]) + found.consumers_left_out_milli
            yield f"and {left:,} more with {format_gpu(held)} GPUs"


@click.command()
@output_option
@click.pass_obj
def overview(settings: CliSettings) -> None:
    """Show what is going on and what needs attention.

    Power against the budget, today's energy and what of it was idle, GPUs and nodes, promises, what needs attention with
    the command that helps, what waits and why, and who uses most. -o wide shows up to 100 rows of each list.

    \b
    eelctl overview
    eelctl overview -o json | jq '.attention[] | select(.severity == "critical")'
    """  # noqa: D301
    with connect_operators(settings) as client:
        found = client.get_overview(GetOverviewRequest(), timeout=settings.timeout_s).overview
    shown = len(found.attention) + len(found.consumers) if settings.output == "wide" else _SHOWN
    width = terminal_width() or _WIDTH
    print_document(settings, found, overview_lines(found, shown=max(1, shown), width=width))
