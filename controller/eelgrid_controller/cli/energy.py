"""eelctl energy and exporters: energy by owner and time, CSV and Parquet exports, and who has confirmed them.

An export file is complete and on disk, or does not exist. `energy --confirm-export` reports an exported interval to
the controller, which may then delete rows by age.
"""

import csv
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from eelgrid_controller.cli.connection import AmountType, CliSettings, RequestRefused, connect_operators, output_option
from eelgrid_controller.cli.output import TableColumn, print_list, print_plain, text_table, use_colour
from eelgrid_controller.formatting import format_energy
from eelgrid_protos.catalogue import GpuNameError, resolve_gpu_model
from eelgrid_protos.messages import (
    ConfirmEnergyExportRequest,
    EnergyExporter,
    EnergySpent,
    EnergyWork,
    GetSummaryRequest,
    ListEnergyExportersRequest,
    QueryEnergyRequest,
    QueryEnergyResponse,
    RemoveEnergyExporterRequest,
)
from eelgrid_protos.safe_text import escape_csv_cell


def flatten_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Flattens rows for files: each unit of work gets its own columns; None where a row does not report the unit."""
    units = sorted({one["unit"] for row in rows for one in row["work"]})
    found = []
    for row in rows:
        told = {one["unit"]: one for one in row["work"]}
        found.append(
            {name: value for name, value in row.items() if name != "work"}
            | {
                f"{unit}_{name}": told[unit][name] if unit in told else None
                for unit in units
                for name in ("amount", "energy_per_unit_j", "missed_s")
            }
        )
    return found


def _columns(rows: Sequence[dict[str, Any]], by: Sequence[str]) -> list[str]:
    return list(rows[0]) if rows else [*by, "energy_j", "idle_j", "active_j", "cost", "carbon_g"]


def write_csv(path: Path, rows: Sequence[dict[str, Any]], by: Sequence[str]) -> None:
    """Writes rows to a CSV file with a header line."""
    rows = flatten_rows(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, _columns(rows, by))
        writer.writerow({name: escape_csv_cell(name) for name in writer.fieldnames})
        writer.writerows([{name: escape_csv_cell(value) for name, value in row.items()} for row in rows])


def parquet_library() -> tuple[Any, Any]:
    """Imports pyarrow; called before anything else, since it may be missing. Raises UsageError."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise click.UsageError("--parquet needs pyarrow: pip install 'eelgrid[parquet]', or write --csv") from None
    return pa, parquet


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], by: Sequence[str]) -> None:
    """Writes rows to a Parquet file, in columns of text and of 64-bit floats."""
    arrow, parquet = parquet_library()
    rows = flatten_rows(rows)
    names = _columns(rows, by)
    # Declared, not inferred from the values, of which there may be none.
    kinds = arrow.schema([(name, arrow.string() if name in by else arrow.float64()) for name in names])
    parquet.write_table(arrow.table({name: [row[name] for row in rows] for name in names}, schema=kinds), path)


def write_groups(
    option: str, path: Path | None, write: Callable[..., None], document: dict[str, Any], by: Sequence[str]
) -> None:
    """Writes the groups with `write` if a path was given; on return the file is complete and on disk."""
    if path is None:
        return
    try:
        if is_durable(path):
            with _replacing(path.resolve()) as draft:
                write(draft, document["groups"], by)
        else:
            write(path, document["groups"], by)
    except OSError as error:
        raise click.UsageError(f"{option}: {path}: {error.strerror or error}; name a writable file") from None


def is_durable(path: Path) -> bool:
    """Returns whether the path is or can become a regular file: a pipe or a device cannot be replaced."""
    return path.is_file() or not path.exists()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yields a draft path beside `path`; on success the draft replaces it, synced to disk; otherwise it is removed."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


_NANO = 10**9
_HOUR_NS = 3600 * _NANO


def _time(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / _NANO, UTC).strftime("%Y-%m-%d %H:%M")


def _format_changed_hours(one: EnergyExporter) -> str:
    if not one.changed_hours:
        return ""
    return f"{one.changed_hours}, {_time(one.changed_first_ns)} to {_time(one.changed_last_ns)}"


def export_period(
    client: Any,
    settings: CliSettings,
    name: str,
    said_ns: tuple[int, int] | None,
    *,
    is_month: bool,
    paths: Sequence[Path | None],
    is_filtered: bool,
) -> tuple[int, int]:
    """Returns begin and end of the export: the given period as far as it is settled, or all that the exporter lacks.

    Raises UsageError and RequestRefused; ends the command if there is nothing to export.
    """
    if not any(paths):
        raise click.UsageError("--confirm-export needs an export: add --csv FILE or --parquet FILE")
    if is_filtered:
        raise click.UsageError(
            "--confirm-export cannot be combined with --where, which would omit rows; leave one of them out"
        )
    for path in filter(None, paths):
        if not is_durable(path):
            raise click.UsageError(f"--confirm-export: {path} is not a regular file; name one")
    found = client.list_energy_exporters(ListEnergyExportersRequest(), timeout=settings.timeout_s)
    settled_ns = found.settled_ns
    marks = {one.name: one.until_ns for one in found.exporters}
    if said_ns is not None:
        begin_ns, end_ns = said_ns
        if begin_ns // _HOUR_NS * _HOUR_NS > marks.get(name, begin_ns):
            raise RequestRefused(
                f"{name} has rows up to {_time(marks[name])} UTC and would lack those until {_time(begin_ns)}",
                "begin there, or leave out --since and --month to export everything new",
            )
        if is_month and end_ns > settled_ns:
            raise RequestRefused(
                f"--month: not all nodes have reported that month; hours are settled until {_time(settled_ns)} UTC",
                "repeat it later, or use --since",
            )
    else:
        if name not in marks:
            raise click.UsageError(
                f"--confirm-export: {name} has confirmed nothing yet; give the start with --since or --month"
            )
        begin_ns, end_ns = marks[name], settled_ns
    end_ns = min(end_ns, settled_ns)
    if end_ns <= begin_ns:
        click.echo(
            f"nothing after {_time(begin_ns)} UTC is settled that {name} could export; nothing was written", err=True
        )
        raise click.exceptions.Exit(0)
    return begin_ns, end_ns


def confirm_export(client: Any, settings: CliSettings, name: str, found: QueryEnergyResponse) -> None:
    """Confirms an export to the controller and prints what the exporter has now."""
    request = ConfirmEnergyExportRequest(
        name=name, begin_ns=found.begin_ns, end_ns=found.end_ns, revision=found.revision
    )
    mark = client.confirm_energy_export(request, timeout=settings.timeout_s).exporter
    click.echo(f"confirmed: {name} has everything from {_time(mark.since_ns)} to {_time(mark.until_ns)} UTC", err=True)
    if mark.changed_hours:
        click.echo(
            f"  except hours that changed since: {_format_changed_hours(mark)}; export that period again", err=True
        )


_COLUMNS = (
    TableColumn[EnergyExporter]("EXPORTER", lambda one: one.name),
    TableColumn[EnergyExporter]("SINCE", lambda one: _time(one.since_ns)),
    TableColumn[EnergyExporter]("UNTIL", lambda one: _time(one.until_ns)),
    TableColumn[EnergyExporter]("BEHIND", lambda one: f"{one.lag_s / 3600.0:,.0f} h", right=True),
    TableColumn[EnergyExporter]("CHANGED HOURS", _format_changed_hours),
)


@click.group(invoke_without_command=True)
@output_option
@click.pass_context
def exporters(context: click.Context) -> None:
    """Show who exports energy rows, and up to when they have confirmed them (UTC).

    The controller keeps rows that an exporter lacks, whatever their age. Hours that changed after they were confirmed
    must be exported again; the new rows replace the old ones.
    """
    if context.invoked_subcommand is not None:
        return
    settings: CliSettings = context.obj
    with connect_operators(settings) as client:
        found = client.list_energy_exporters(ListEnergyExportersRequest(), timeout=settings.timeout_s)
    print_list(
        settings,
        _COLUMNS,
        found.exporters,
        empty="no exporter; add one with `eelctl energy --csv FILE --confirm-export NAME --since 7d`",
    )


@exporters.command()
@click.argument("name")
@click.pass_obj
def remove(settings: CliSettings, name: str) -> None:
    """Remove an exporter; rows that it lacks are deleted by age again."""
    with connect_operators(settings) as client:
        client.remove_energy_exporter(RemoveEnergyExporterRequest(name=name), timeout=settings.timeout_s)
    click.echo(f"{name} is removed from the exporters")


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


def period_ns(since_h: int, month: str | None, *, now_ns: int) -> tuple[int, int]:
    """Returns begin and end of the hours before now, or of a calendar month in UTC; raises BadParameter."""
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
        | _amounts(group.spent)
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


def _joules(value_j: float) -> str:
    for border, letter in ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J")):
        if value_j >= border:
            return f"{value_j / border:.3g} {letter}"
    return f"{1000.0 * value_j:.3g} mJ"


def format_work(work: Sequence[dict[str, Any]]) -> str:
    """Formats how much work was done, as a lower bound where not all was counted."""
    return ", ".join(f"{'>= ' if one['missed_s'] else ''}{_number(one['amount'])} {_unit(one)}s" for one in work)


def format_per_unit(work: Sequence[dict[str, Any]]) -> str:
    """Formats joules per unit of work, as an upper bound where not all was counted."""
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


def energy_document(found: QueryEnergyResponse, by: Sequence[str]) -> dict[str, Any]:
    """Returns the answer in joules, as it is printed."""
    owned = _sum(found.left_out, *(group.spent for group in found.groups))
    return {
        "begin": datetime.fromtimestamp(found.begin_ns / _NANO, UTC).isoformat(),
        "end": datetime.fromtimestamp(found.end_ns / _NANO, UTC).isoformat(),
        "currency": found.currency,
        "groups": group_rows(found, by),
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


def format_minute(stamp: str) -> str:
    """Returns a time of a document (ISO 8601) to the minute, as people write it."""
    return stamp[:16].replace("T", " ")


def _lines(settings: CliSettings, document: dict[str, Any], by: Sequence[str]) -> Iterator[str]:
    nobody = [
        {by[0]: title} | document[part]
        for title, part in (
            ("(others)", "left_out"),
            ("(unallocated)", "unallocated"),
            ("(unattributed)", "unattributed"),
            ("TOTAL", "total"),
        )
        if document[part]["energy_j"] or part == "total"
    ]
    total_j = document["total"]["energy_j"]
    currency = document["currency"]
    is_told = any(row["work"] for row in document["groups"])
    columns = [
        *(TableColumn[dict[str, Any]](name.upper(), _cell(name)) for name in by),
        TableColumn("ENERGY", lambda row: format_energy(row["energy_j"]), right=True),
        TableColumn("SHARE", lambda row: f"{100.0 * row['energy_j'] / total_j:.1f} %" if total_j else "", right=True),
        TableColumn("IDLE", lambda row: format_energy(row["idle_j"]), right=True),
        *([TableColumn("COST", lambda row: f"{row['cost']:,.2f} {currency}", right=True)] if currency else []),
        *([TableColumn("WORK", lambda row: format_work(row.get("work", ())), right=True)] if is_told else []),
        *([TableColumn("FOR EACH", lambda row: format_per_unit(row.get("work", ())), right=True)] if is_told else []),
        *([TableColumn("CO2", lambda row: f"{row['carbon_g'] / 1000.0:,.3g} kg", right=True)] if currency else []),
    ]
    yield from text_table(columns, [*document["groups"], *nobody], headers=settings.headers, colour=use_colour())
    yield ""
    yield (
        f"{format_minute(document['begin'])} to {format_minute(document['end'])} UTC; measured {format_energy(document['measured_j'])} "
        f"± {format_energy(document['uncertainty_j'])}"
        + (f"; {document['uncounted_s']:,.0f} device-seconds not measured" if document["uncounted_s"] else "")
    )
    for part in document["damaged"]:
        yield f"DAMAGED, not counted: {part}"


@click.command()
@click.option("--since", type=SPAN, default="24h", show_default=True, help="How far to look back: 24h, 7d, 4w.")
@click.option("--month", metavar="YYYY-MM", help="A calendar month (UTC) instead of --since.")
@click.option(
    "--by",
    default="title,namespace",
    show_default=True,
    metavar="NAMES",
    help="Group by one or more of kind, namespace, name, workload, title, user, queue, node, pool, gpu_model, "
    "hour, day, label:KEY.",
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
    help="Once the file is on disk, confirm to the controller that NAME has these rows, which it may then delete by "
    "age. Without --since and --month: export the rows that NAME lacks.",
)
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
    begin_ns, end_ns = period_ns(since, month, now_ns=time.time_ns())
    with connect_operators(settings) as client:
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
        if exporter is not None and found.left_out_groups:
            raise RequestRefused(
                f"{found.left_out_groups} rows exceed the limit, so the export for {exporter} would be incomplete",
                "give --rows 10000, or a shorter period; nothing was written or confirmed",
            )
        if exporter is not None and found.damaged:
            raise RequestRefused(
                f"parts of the ledger are damaged, so the export for {exporter} would be incomplete: {found.damaged[0]}",
                "restore a backup (docs/how-to/runbooks/EelgridLedgerFailing.md); nothing was written or confirmed",
            )
        document = energy_document(found, names)
        write_groups("--csv", csv_path, write_csv, document, names)
        write_groups("--parquet", parquet_path, write_parquet, document, names)
        if exporter is not None:
            confirm_export(client, settings, exporter, found)
    print_plain(settings, document, _lines(settings, document, names))
