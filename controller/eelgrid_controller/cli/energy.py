"""eelctl energy: who spent how many joules, when, and what they cost.

Owns the options, the table and the files. Must not know how the ledger is kept.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from eelgrid_controller.cli.connection import operators
from eelgrid_controller.cli.energy_files import filed, parquet_library, write_csv, write_parquet
from eelgrid_controller.cli.exporters import confirm_export, export_stretch
from eelgrid_controller.cli.failure import Refused
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import Column, coloured, printed, text_table
from eelgrid_controller.spelling import energy_text
from eelgrid_protos.messages import EnergySpent, EnergyWork, QueryEnergyRequest, QueryEnergyResponse

__all__ = ["SPAN", "document_of", "energy", "per_unit_text", "rows_of", "stretch_ns", "work_text"]

# click's ParamType takes a type argument for the checker alone; older releases refuse one when run.
if TYPE_CHECKING:
    _IntType = click.ParamType[int]
else:
    _IntType = click.ParamType
_SPAN = re.compile(r"(\d{1,5}) ?(h|d|w)")
_HOURS = {"h": 1, "d": 24, "w": 168}
_MONTH = re.compile(r"(\d{4})-(\d{2})")
_NANO = 10**9


class _Span(_IntType):
    """A stretch back from now, in hours."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _SPAN.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no stretch of time: write one such as 24h, 7d or 4w", param, ctx)
        return int(found[1]) * _HOURS[found[2]]


SPAN = _Span()


def stretch_ns(since_h: int, month: str | None, *, now_ns: int) -> tuple[int, int]:
    """Begin and end of what is asked for: the hours before now, or a calendar month in UTC."""
    if month is None:
        return now_ns - since_h * 3600 * _NANO, now_ns
    found = _MONTH.fullmatch(month)
    if found is None or not 1 <= int(found[2]) <= 12:
        raise click.BadParameter(f"{month!r} is no month: write one such as 2026-10", param_hint="--month")
    year, number = int(found[1]), int(found[2])
    first = datetime(year, number, 1, tzinfo=UTC)
    after = datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)
    return int(first.timestamp()) * _NANO, int(after.timestamp()) * _NANO


def _filters(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{pair!r} is no NAME=VALUE, such as namespace=ml", param_hint="--where")
        found[name] = value
    return found


def _sum(*parts: EnergySpent) -> EnergySpent:
    return EnergySpent(
        bare_idle_mj=sum(part.bare_idle_mj for part in parts),
        context_idle_mj=sum(part.context_idle_mj for part in parts),
        active_mj=sum(part.active_mj for part in parts),
        cost=sum(part.cost for part in parts),
        carbon_g=sum(part.carbon_g for part in parts),
    )


def _shown(name: str, value: str) -> str:
    if name in ("hour", "day") and value.isdigit():
        return datetime.fromtimestamp(int(value), UTC).strftime("%Y-%m-%d %H:%M" if name == "hour" else "%Y-%m-%d")
    return value


def rows_of(found: QueryEnergyResponse, by: Sequence[str]) -> list[dict[str, Any]]:
    """The groups with their names, in joules."""
    return [
        {name: _shown(name, value) for name, value in zip(by, group.values, strict=True)}
        | _amounts(group.spent)
        | {"work": [_work(one) for one in group.work]}
        for group in found.groups
    ]


def _work(done: EnergyWork) -> dict[str, Any]:
    return {
        "unit": done.unit, "amount": done.amount, "energy_per_unit_j": done.energy_per_unit_j,
        "counted_s": done.counted_s, "missed_s": done.missed_s,
    }  # fmt: skip


def _unit(one: dict[str, Any]) -> str:
    return "unit" if one["unit"] == "work" else str(one["unit"])


def _number(value: float) -> str:
    for border, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if value >= border:
            return f"{value / border:,.2f}{letter}"
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def _joules(value_j: float) -> str:
    for border, letter in ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J")):
        if value_j >= border:
            return f"{value_j / border:.3g} {letter}"
    return f"{1000.0 * value_j:.3g} mJ"


def work_text(work: Sequence[dict[str, Any]]) -> str:
    """How much was done; at least so much where not all was counted."""
    return ", ".join(f"{'>= ' if one['missed_s'] else ''}{_number(one['amount'])} {_unit(one)}s" for one in work)


def per_unit_text(work: Sequence[dict[str, Any]]) -> str:
    """Joules for each unit; at most so many where not all was counted."""
    return ", ".join(
        f"{'<= ' if one['missed_s'] else ''}{_joules(one['energy_per_unit_j'])}/{_unit(one)}"
        for one in work
        if one["energy_per_unit_j"] is not None
    )


def _amounts(spent: EnergySpent) -> dict[str, Any]:
    total_mj = spent.bare_idle_mj + spent.context_idle_mj + spent.active_mj
    return {
        "energy_j": total_mj / 1000.0,
        "idle_j": (spent.bare_idle_mj + spent.context_idle_mj) / 1000.0,
        "active_j": spent.active_mj / 1000.0,
        "cost": spent.cost,
        "carbon_g": spent.carbon_g,
    }


def document_of(found: QueryEnergyResponse, by: Sequence[str]) -> dict[str, Any]:
    """The answer in joules, as it is printed."""
    owned = _sum(found.left_out, *(group.spent for group in found.groups))
    return {
        "begin": datetime.fromtimestamp(found.begin_ns / _NANO, UTC).isoformat(),
        "end": datetime.fromtimestamp(found.end_ns / _NANO, UTC).isoformat(),
        "currency": found.currency,
        "groups": rows_of(found, by),
        "left_out": {"groups": found.left_out_groups} | _amounts(found.left_out),
        "unallocated": _amounts(found.unallocated),
        "unattributed": _amounts(found.unattributed),
        "total": _amounts(_sum(owned, found.unallocated, found.unattributed)),
        "measured_j": found.measured_mj / 1000.0,
        "uncertainty_j": found.uncertainty_mj / 1000.0,
        "uncounted_s": found.uncounted_s,
        "damaged": list(found.damaged),
    }


def _cell(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: str(row.get(name, ""))


def _minute(stamp: str) -> str:
    return stamp[:16].replace("T", " ")


def _lines(settings: Settings, document: dict[str, Any], by: Sequence[str]) -> Iterator[str]:
    nobody = [
        {by[0]: title} | document[part]
        for title, part in (
            ("(others)", "left_out"), ("(held by nobody)", "unallocated"), ("(nobody known)", "unattributed"),
            ("TOTAL", "total"),
        )
        if document[part]["energy_j"] or part == "total"
    ]  # fmt: skip
    total_j = document["total"]["energy_j"]
    currency = document["currency"]
    is_told = any(row["work"] for row in document["groups"])
    columns = [
        *(Column[dict[str, Any]](name.upper(), _cell(name)) for name in by),
        Column("ENERGY", lambda row: energy_text(row["energy_j"]), right=True),
        Column("SHARE", lambda row: f"{100.0 * row['energy_j'] / total_j:.1f} %" if total_j else "", right=True),
        Column("IDLE", lambda row: energy_text(row["idle_j"]), right=True),
        *([Column("COST", lambda row: f"{row['cost']:,.2f} {currency}", right=True)] if currency else []),
        *([Column("WORK", lambda row: work_text(row.get("work", ())), right=True)] if is_told else []),
        *([Column("FOR EACH", lambda row: per_unit_text(row.get("work", ())), right=True)] if is_told else []),
        *([Column("CO2", lambda row: f"{row['carbon_g'] / 1000.0:,.3g} kg", right=True)] if currency else []),
    ]  # fmt: skip
    yield from text_table(columns, [*document["groups"], *nobody], headers=settings.headers, colour=coloured())
    yield ""
    yield (
        f"{_minute(document['begin'])} to {_minute(document['end'])} UTC; measured {energy_text(document['measured_j'])} "
        f"± {energy_text(document['uncertainty_j'])}"
        + (f"; {document['uncounted_s']:,.0f} device-seconds nobody measured" if document["uncounted_s"] else "")
    )
    for part in document["damaged"]:
        yield f"DAMAGED, in no sum: {part}"


@click.command()
@click.option("--since", type=SPAN, default="24h", show_default=True, help="How far back: 24h, 7d, 4w.")
@click.option("--month", metavar="YYYY-MM", help="A calendar month (UTC) instead.")
@click.option("--by", default="title,namespace", show_default=True, metavar="NAMES",
              help="Grouped by some of kind, namespace, name, workload, title, user, queue, node, pool, gpu_model, "
                   "hour, day, label:KEY.")  # fmt: skip
@click.option("--where", multiple=True, metavar="NAME=VALUE", help="Only these; NAME as for --by.")
@click.option("--rows", type=click.IntRange(1, 10_000), default=50, show_default=True, help="The largest groups.")
@click.option("--csv", "csv_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the groups there, too.")
@click.option("--parquet", "parquet_path", type=click.Path(path_type=Path, dir_okay=False), help="The same as Parquet.")
@click.option("--confirm-export", "exporter", metavar="NAME",
              help="When the file is on the disk, tell the controller that NAME has these rows, which may then go for their "
                   "age. Without --since and --month: the rows that NAME does not have yet.")  # fmt: skip
@printing
@click.pass_context
def energy(
    context: click.Context, *, since: int, month: str | None, by: str, where: tuple[str, ...], rows: int,
    csv_path: Path | None, parquet_path: Path | None, exporter: str | None,
) -> None:  # fmt: skip
    """Say who spent how many joules, and what they cost.

    The rows, what nobody held, and what was used by somebody who could not be named add up to what the devices
    measured. Times are whole hours in UTC.
    """
    names = tuple(filter(None, by.replace(" ", "").split(",")))
    if not names:
        raise click.BadParameter("names nothing to group by; write one such as workload", param_hint="--by")
    if parquet_path is not None:
        parquet_library()
    settings: Settings = context.obj
    begin_ns, end_ns = stretch_ns(since, month, now_ns=time.time_ns())
    with operators(settings) as client:
        if exporter is not None:
            is_said = month is not None or context.get_parameter_source("since") is not ParameterSource.DEFAULT
            begin_ns, end_ns = export_stretch(
                client, settings, exporter, (begin_ns, end_ns) if is_said else None, is_month=month is not None,
                paths=(csv_path, parquet_path), is_filtered=bool(where),
            )  # fmt: skip
        request = QueryEnergyRequest(
            begin_ns=begin_ns, end_ns=end_ns, group_by=names, filters=_filters(where), rows_most=rows,
            with_nobody=exporter is not None,
        )  # fmt: skip
        found = client.query_energy(request, timeout=settings.timeout_s)
        if exporter is not None and found.left_out_groups:
            raise Refused(
                f"{found.left_out_groups} rows found no room, so {exporter} would not have everything",
                "give --rows 10000, or take a shorter stretch; nothing was written nor confirmed",
            )
        if exporter is not None and found.damaged:
            raise Refused(
                f"parts of the ledger are damaged, so {exporter} would not have everything: {found.damaged[0]}",
                "put a backup back (docs/how-to/runbooks/EelgridLedgerFailing.md); nothing was written nor confirmed",
            )
        document = document_of(found, names)
        filed("--csv", csv_path, write_csv, document, names)
        filed("--parquet", parquet_path, write_parquet, document, names)
        if exporter is not None:
            confirm_export(client, settings, exporter, found)
    printed(settings, document, _lines(settings, document, names))
