"""eelctl energy: energy, cost and carbon by owner and time; `energy_exports` writes and confirms its files."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from eelgrid_controller.cli.completion import complete_exporters
from eelgrid_controller.cli.connection import (
    AmountType,
    CliSettings,
    connect_operators,
    output_option,
)
from eelgrid_controller.cli.energy_exports import (
    confirm_export,
    export_period,
    parquet_library,
    refuse_incomplete_export,
    write_csv,
    write_groups,
    write_parquet,
)
from eelgrid_controller.cli.output import (
    TableColumn,
    arrange_rows,
    list_options,
    print_plain,
    share_of,
    table_lines,
)
from eelgrid_controller.formatting import format_carbon, format_energies, format_energy, format_money
from eelgrid_controller.state.spending import day_bounds, utc_offset_minutes_of
from eelgrid_protos.messages import (
    EnergySpent,
    EnergyWork,
    GetPolicyRequest,
    GetSummaryRequest,
    QueryEnergyRequest,
    QueryEnergyResponse,
)

_NANO = 10**9

_SPAN = re.compile(r"(\d{1,5}) ?(h|d|w)")
_HOURS = {"h": 1, "d": 24, "w": 168}
_MONTH = re.compile(r"(\d{4})-(\d{2})")


def parse_span_h(text: str) -> int:
    """Parses a time span back from now, such as `24h`, `7d` or `4w`, into hours; raises ValueError."""
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a time span: write for example 24h, 7d or 4w")
    return int(found[1]) * _HOURS[found[2]]


SPAN = AmountType("span", parse_span_h)
# Hours that stand for the day so far.
_TODAY_H = 0


def _parse_since_h(text: str) -> int:
    """Parses a time span, or `today`, into hours."""
    return _TODAY_H if text.strip() == "today" else parse_span_h(text)


def period_ns(since_h: int, month: str | None, *, now_ns: int, utc_offset_minutes: int = 0) -> tuple[int, int]:
    """Returns begin and end of the hours before now, of today or of a calendar month in UTC; raises BadParameter.

    Today begins at midnight by the offset from UTC that the prices have.
    """
    if month is None and since_h == _TODAY_H:
        return day_bounds(now_ns, utc_offset_minutes).begin_s * _NANO, now_ns
    if month is None:
        return now_ns - since_h * 3600 * _NANO, now_ns
    found = _MONTH.fullmatch(month)
    if found is None or not 1 <= int(found[2]) <= 12:
        raise click.BadParameter(f"{month!r} is not a month: write for example 2026-10", param_hint="--month")
    year, number = int(found[1]), int(found[2])
    first = datetime(year, number, 1, tzinfo=UTC)
    after = datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)
    return int(first.timestamp()) * _NANO, int(after.timestamp()) * _NANO


def _filters(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise click.BadParameter(
                f"{pair!r} is not NAME=VALUE: write for example namespace=ml", param_hint="--where"
            )
        found[name] = value
    return found


def _resolve_filters(client: Any, settings: CliSettings, pairs: Sequence[str]) -> dict[str, str]:
    """Reads the filters; a GPU model goes by any of its names, and by its own where only the ledger knows it."""
    found = _filters(pairs)
    if "gpu_model" in found:
        # The catalogue is for this filter alone, and `eelctl version` loads this module for its spans.
        from eelgrid_protos.catalogue import GpuNameError, resolve_gpu_model

        summary = client.get_summary(GetSummaryRequest(), timeout=settings.timeout_s).summary
        try:
            found["gpu_model"] = resolve_gpu_model(
                found["gpu_model"], "gpu_model", reported=[one.model for one in summary.models], keeps_unknown=True
            )
        except GpuNameError as error:
            raise click.BadParameter(str(error), param_hint="--where") from None
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


def group_rows(found: QueryEnergyResponse, by: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the groups as rows, with their names and joules."""
    return [
        {name: _shown(name, value) for name, value in zip(by, group.values, strict=True)}
        | _amounts(group.spent, found.currency)
        | {"work": [_work(one) for one in group.work]}
        for group in found.groups
    ]


def _work(done: EnergyWork) -> dict[str, Any]:
    return {
        "unit": done.unit,
        "amount": done.amount,
        "energy_per_unit_j": done.energy_per_unit_j,
        "counted_s": done.counted_s,
        "missed_s": done.missed_s,
    }


def _unit(one: dict[str, Any]) -> str:
    return "unit" if one["unit"] == "work" else str(one["unit"])


def _number(value: float) -> str:
    for border, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if value >= border:
            return f"{value / border:,.2f}{letter}"
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def _joules(value_j: float, largest_j: float) -> str:
    units = ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"))
    size, letter = next((unit for unit in units if largest_j >= unit[0]), (1e-3, "mJ"))
    return f"{value_j / size:.3g} {letter}"


def format_work(work: Sequence[dict[str, Any]]) -> str:
    """Formats how much work was done, as a lower bound where not all was counted."""
    return ", ".join(f"{'>= ' if one['missed_s'] else ''}{_number(one['amount'])} {_unit(one)}s" for one in work)


def largest_per_unit(rows: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """Returns the most joules per unit of work in all rows, by the unit: a column has one multiple of a joule for each."""
    largest_j: dict[str, float] = {}
    for one in (one for work in rows for one in work):
        if one["energy_per_unit_j"] is not None:
            largest_j[one["unit"]] = max(largest_j.get(one["unit"], 0.0), one["energy_per_unit_j"])
    return largest_j


def format_per_unit(work: Sequence[dict[str, Any]], largest_j: Mapping[str, float]) -> str:
    """Formats joules per unit of work, as an upper bound where not all was counted."""
    return ", ".join(
        f"{'<= ' if one['missed_s'] else ''}{_joules(one['energy_per_unit_j'], largest_j[one['unit']])}/{_unit(one)}"
        for one in work
        if one["energy_per_unit_j"] is not None
    )


def _amounts(spent: EnergySpent, currency: str) -> dict[str, Any]:
    """Returns joules, money and grams; None where no price or no carbon intensity is known."""
    total_mj = spent.bare_idle_mj + spent.context_idle_mj + spent.active_mj
    return {
        "energy_j": total_mj / 1000.0,
        "idle_j": (spent.bare_idle_mj + spent.context_idle_mj) / 1000.0,
        "active_j": spent.active_mj / 1000.0,
        "cost": spent.cost if currency and (spent.cost or not total_mj) else None,
        "carbon_g": spent.carbon_g if currency and (spent.carbon_g or not total_mj) else None,
    }


def energy_document(found: QueryEnergyResponse, by: Sequence[str]) -> dict[str, Any]:
    """Returns the answer in joules, as it is printed."""
    owned = _sum(found.left_out, *(group.spent for group in found.groups))
    return {
        "begin": datetime.fromtimestamp(found.begin_ns / _NANO, UTC).isoformat(),
        "end": datetime.fromtimestamp(found.end_ns / _NANO, UTC).isoformat(),
        "currency": found.currency,
        "groups": group_rows(found, by),
        "left_out": {"groups": found.left_out_groups} | _amounts(found.left_out, found.currency),
        "unallocated": _amounts(found.unallocated, found.currency),
        "unattributed": _amounts(found.unattributed, found.currency),
        "total": _amounts(_sum(owned, found.unallocated, found.unattributed), found.currency),
        "measured_j": found.measured_mj / 1000.0,
        "uncertainty_j": found.uncertainty_mj / 1000.0,
        "uncounted_s": found.uncounted_s,
        "damaged": list(found.damaged),
    }


def _cell(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: str(row.get(name, ""))


def _energy_column(title: str, name: str, *, largest_j: float) -> TableColumn[dict[str, Any]]:
    return TableColumn(
        title,
        lambda row: format_energy(row[name]),
        right=True,
        texts=lambda rows: format_energies([row[name] for row in rows], largest_j=largest_j),
    )


def format_minute(stamp: str) -> str:
    """Returns a time of a document (ISO 8601) to the minute, as people write it."""
    return stamp[:16].replace("T", " ")


_GROUP_KEYS = (
    "kind", "namespace", "name", "workload", "title", "user", "queue", "node", "pool", "gpu_model", "hour", "day",
)  # fmt: skip


def _energy_columns(document: dict[str, Any], by: Sequence[str]) -> list[TableColumn[dict[str, Any]]]:
    total_j, currency = document["total"]["energy_j"], document["currency"]
    is_told = any(row["work"] for row in document["groups"])
    largest_j = largest_per_unit([row["work"] for row in document["groups"]])
    work_columns = [
        TableColumn[dict[str, Any]]("WORK", lambda row: format_work(row.get("work", ())), right=True),
        TableColumn[dict[str, Any]](
            "FOR EACH", lambda row: format_per_unit(row.get("work", ()), largest_j), right=True
        ),
    ]
    return [
        *(TableColumn[dict[str, Any]](name.upper(), _cell(name)) for name in by),
        _energy_column("ENERGY", "energy_j", largest_j=total_j),
        TableColumn(
            "SHARE",
            lambda row: f"{100.0 * row['energy_j'] / total_j:.1f} %" if total_j else "",
            right=True,
            share=lambda row: share_of(row["energy_j"], total_j),
        ),
        _energy_column("IDLE", "idle_j", largest_j=total_j),
        TableColumn("COST", lambda row: format_money(row["cost"], currency), right=True),
        *(work_columns if is_told else []),
        TableColumn("CO2", lambda row: format_carbon(row["carbon_g"]), right=True),
    ]


def _lines(
    settings: CliSettings, document: dict[str, Any], columns: Sequence[TableColumn[dict[str, Any]]], first: str
) -> Iterator[str]:
    nobody = [
        {first: title} | document[part]
        for title, part in (
            ("(others)", "left_out"),
            ("(unallocated)", "unallocated"),
            ("(unattributed)", "unattributed"),
            ("TOTAL", "total"),
        )
        if document[part]["energy_j"] or part == "total"
    ]
    # With a filter, what belongs to nobody and the total would not be of the rows above them.
    others = [] if settings.filters else nobody
    yield from table_lines(settings, columns, [*document["groups"], *others])
    yield ""
    yield (
        f"{format_minute(document['begin'])} to {format_minute(document['end'])} UTC; measured {format_energy(document['measured_j'])} "
        f"± {format_energy(document['uncertainty_j'])}"
        + (f"; {document['uncounted_s']:,.0f} device-seconds not measured" if document["uncounted_s"] else "")
    )
    for part in document["damaged"]:
        yield f"DAMAGED, not counted: {part}"


@click.command()
@click.option(
    "--since",
    type=AmountType("span", _parse_since_h),
    default="24h",
    show_default=True,
    help="How far to look back: today (since midnight, by the prices' offset from UTC), 24h, 7d, 4w.",
)
@click.option("--month", metavar="YYYY-MM", help="A calendar month (UTC) instead of --since.")
@click.option(
    "--by",
    default="title,namespace",
    show_default=True,
    metavar="NAMES",
    help=f"Group by one or more of {', '.join(_GROUP_KEYS)}, label:KEY.",
)
@click.option(
    "--where",
    multiple=True,
    metavar="NAME=VALUE",
    help="Count only matching rows, for example namespace=ml; NAME as for --by. Repeatable.",
)
@click.option(
    "--rows",
    type=click.IntRange(1, 10_000),
    default=50,
    show_default=True,
    help="Show this many groups, the largest first.",
)
@click.option(
    "--csv", "csv_path", type=click.Path(path_type=Path, dir_okay=False), help="Also write the groups to a CSV file."
)
@click.option(
    "--parquet",
    "parquet_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the groups to a Parquet file.",
)
@click.option(
    "--confirm-export",
    "exporter",
    metavar="NAME",
    shell_complete=complete_exporters,
    help="Once the file is on disk, confirm to the controller that NAME has these rows, which it may then delete by "
    "age. Without --since and --month: export the rows that NAME lacks.",
)
@list_options(*_energy_columns({"total": {"energy_j": 0.0}, "currency": "EUR", "groups": []}, _GROUP_KEYS))
@output_option
@click.pass_context
def energy(
    context: click.Context,
    *,
    since: int,
    month: str | None,
    by: str,
    where: tuple[str, ...],
    rows: int,
    csv_path: Path | None,
    parquet_path: Path | None,
    exporter: str | None,
) -> None:
    """Show energy, cost and carbon by owner.

    The rows, the unallocated energy and the energy that could not be attributed to an owner add up to what the devices
    measured. Times are whole hours in UTC.

    \b
    eelctl energy --since 7d --by namespace,day
    eelctl energy --month 2026-10 --by user --csv october.csv
    """  # noqa: D301
    names = tuple(filter(None, by.replace(" ", "").split(",")))
    if not names:
        raise click.BadParameter("names nothing to group by; write for example workload", param_hint="--by")
    if parquet_path is not None:
        parquet_library()
    settings: CliSettings = context.obj
    with connect_operators(settings) as client:
        offset_minutes = 0
        if month is None and since == _TODAY_H:
            policy = client.get_policy(GetPolicyRequest(), timeout=settings.timeout_s).policy
            offset_minutes = utc_offset_minutes_of(policy)
        begin_ns, end_ns = period_ns(since, month, now_ns=time.time_ns(), utc_offset_minutes=offset_minutes)
        if exporter is not None:
            is_said = month is not None or context.get_parameter_source("since") is not ParameterSource.DEFAULT
            begin_ns, end_ns = export_period(
                client,
                settings,
                exporter,
                (begin_ns, end_ns) if is_said else None,
                is_month=month is not None,
                paths=(csv_path, parquet_path),
                is_filtered=bool(where),
            )
        request = QueryEnergyRequest(
            begin_ns=begin_ns,
            end_ns=end_ns,
            group_by=names,
            filters=_resolve_filters(client, settings, where),
            rows_most=rows,
            with_nobody=exporter is not None,
        )
        found = client.query_energy(request, timeout=settings.timeout_s)
        if exporter is not None:
            refuse_incomplete_export(exporter, found)
        document = energy_document(found, names)
        write_groups("--csv", csv_path, write_csv, document, names)
        write_groups("--parquet", parquet_path, write_parquet, document, names)
        if exporter is not None:
            confirm_export(client, settings, exporter, found)
    columns = _energy_columns(document, names)
    shown = document | {"groups": arrange_rows(settings, columns, document["groups"])}
    print_plain(settings, shown, _lines(settings, shown, columns, names[0]))
