"""The table of a comparison on the terminal, the mean over seeds in each row.

Owns its columns and their spelling; must not know how a run was made. A column
in which nothing ever happened (no restart, no tariff) is left out.
"""

import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

from eelgrid_controller.replay.comparison import Arrivals, Times
from eelgrid_controller.replay.results import Cell, Table
from eelgrid_controller.replay.traces import Found

__all__ = ["means", "show"]

_PIPE_WIDTH = 200
_UNBOUND = 10_000


def means(table: Table) -> list[dict[str, Any]]:
    """A row for each policy: the mean of what is a number, and how many seeds it is of."""
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    found = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = [row for row in rows if row["policy"] == policy]
        mean: dict[str, Any] = {"trace": mine[0]["trace"], "policy": policy, "seeds": len(mine)}
        for column in table.columns:
            values: list[Cell] = [row[column] for row in mine]
            if column not in {"trace", "policy", "seed"}:
                mean[column] = values[0] if isinstance(values[0], str) else statistics.fmean(map(float, values))
        found.append(mean)
    return found


def _amount(value: float) -> str:
    """Four digits at least, and no more after the point than tell something."""
    return f"{value:,.{max(0, min(2, 3 - math.floor(math.log10(abs(value)))))}f}" if value else "0"


def _count(value: float) -> str:
    """A mean of whole numbers."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def _wait(value_s: float) -> str:
    if value_s < 60.0:
        return f"{value_s:.1f} s"
    return f"{value_s / 60.0:.1f} min" if value_s < 3600.0 else f"{value_s / 3600.0:.1f} h"


_Column = tuple[str, str, Callable[[float], str], bool]
# Title, key, spelling, and whether it is shown even where it is 0 all over.
_TIMES: tuple[_Column, ...] = (
    ("energy\nkWh", "energy_kwh", _amount, True),
    ("saved\n%", "saved_pct", "{:.2f}".format, True),
    ("over idle\nkWh", "energy_over_idle_kwh", _amount, True),
    ("cost\n", "cost", _amount, False),
    ("carbon\nkg", "carbon_kg", _amount, False),
    ("wait\nmean", "wait_mean_s", _wait, True),
    ("wait\np95", "wait_p95_s", _wait, True),
    ("GPUs\nmean", "gpus_allocated_mean", _amount, True),
    ("finished\n", "finished", _count, True),
    ("running\nat the end", "running", _count, False),
    ("waiting\nat the end", "waiting", _count, False),
    ("refused\n", "refused", _count, True),
    ("restarts\n", "restarts", _count, False),
    ("lost\nGPU h", "lost_gpu_h", _amount, False),
)
_ARRIVALS: tuple[_Column, ...] = (
    ("saved 0.1-0.8\n%", "saving_mean_pct", "{:.2f}".format, True),
    ("GRAR\nat 1.0", "grar_1", "{:.4f}".format, True),
    ("allocated at\n100 % arrived", "alloc_100_pct", "{:.2f} %".format, True),
    ("allocated at\n130 % arrived", "alloc_130_pct", "{:.2f} %".format, True),
    ("power at 0.5\nkW", "power_half_w", lambda value: f"{value / 1e3:,.1f}", True),
    ("power at 1.0\nkW", "power_full_w", lambda value: f"{value / 1e3:,.1f}", True),
    ("placed\n", "placed", _count, True),
    ("refused\n", "refused", _count, True),
)


def _facts(found: Found, how: Arrivals | Times, rows: list[dict[str, Any]]) -> Mapping[str, str]:
    gpus = how.trace.fleet.gpu_milli // 1000
    facts = {
        "trace": f"{found.name}: {len(found.tasks):,} tasks; {found.where}",
        "fleet": f"{len(found.nodes):,} nodes, {gpus:,} GPUs",
        "mode": "arrivals only, drawn to 1.3 times the GPUs; nothing leaves",
    }
    if isinstance(how, Times):
        hours = (how.end_s - how.schedule.begin_s) / 3600.0
        facts["mode"] = f"arrivals and departures at their times, {hours:,.1f} h"
        facts["mode"] += f", PUE {how.pue:g}" if how.pue != 1.0 else ""
    facts["rows"] = f"means over {rows[0]['seeds']} seed{'s' if rows[0]['seeds'] > 1 else ''}; saved against "
    facts["rows"] += str(rows[0]["policy"])
    return facts


def _laid(titles: list[str], lines: list[list[str]]) -> Any:
    """A table whose first column are names and all others numbers."""
    from rich import box
    from rich.table import Table as RichTable

    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def show(found: Found, how: Arrivals | Times, summary: Table, width: int | None = None) -> None:
    """Prints it to stdout: a line for each policy, or a column where that does not fit; never a number cut short."""
    from rich.console import Console
    from rich.measure import Measurement

    rows = means(summary)
    columns = _ARRIVALS if isinstance(how, Arrivals) else _TIMES
    for row in rows:
        if isinstance(how, Times):
            reference = rows[0]["energy_kwh"]
            row["saved_pct"] = 100.0 * (reference - row["energy_kwh"]) / reference if reference else 0.0
    shown = [column for column in columns if column[3] or any(row[column[1]] for row in rows)]
    cells = [[row["policy"], *(spelled(row[key]) for _, key, spelled, _ in shown)] for row in rows]
    titles = ["policy\n", *(title for title, *_ in shown)]
    flat = [title.replace("\n", " ").strip() for title in titles]
    across = [[title, *(line[index] for line in cells)] for index, title in enumerate(flat)]
    given = width or (None if sys.stdout.isatty() else _PIPE_WIDTH)
    console = Console(no_color=bool(os.environ.get("NO_COLOR")), width=given)
    for name, text in _facts(found, how, rows).items():
        console.print(f"{name:10} {text}", highlight=False, markup=False, soft_wrap=True)

    unbound = console.options.update_width(_UNBOUND)
    tables = _laid(titles, cells), _laid(across[0], across[1:])
    widths = [Measurement.get(console, unbound, table).maximum for table in tables]
    best = 0 if widths[0] <= max(console.width, widths[1]) else 1
    console.width = max(console.width, widths[best])
    console.print(tables[best])
