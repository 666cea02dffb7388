"""eelctl exporters, and the files of `eelctl energy`: CSV and Parquet exports, and who has confirmed them.

An export file is complete and on disk, or does not exist. `energy --confirm-export` reports an exported interval to
the controller, which may then delete rows by age. Must not know how energy is queried or printed.
"""

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.completion import complete_exporters
from eelgrid_controller.cli.confirmation import confirm_change, yes_option
from eelgrid_controller.cli.connection import (
    CliSettings,
    NameNotFound,
    RequestRefused,
    connect_operators,
    output_option,
    remedy_if_not_found,
)
from eelgrid_controller.cli.output import TableColumn, list_options, print_list
from eelgrid_controller.formatting import count_noun
from eelgrid_protos.messages import (
    ConfirmEnergyExportRequest,
    EnergyExporter,
    ListEnergyExportersRequest,
    QueryEnergyResponse,
    RemoveEnergyExporterRequest,
)
from eelgrid_protos.safe_text import escape_csv_cell

_NANO = 10**9
_HOUR_NS = 3600 * _NANO


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


def refuse_incomplete_export(name: str, found: QueryEnergyResponse) -> None:
    """Raises RequestRefused if the answer lacks rows, so that an exporter would confirm what it does not have."""
    if found.left_out_groups:
        raise RequestRefused(
            f"{count_noun(found.left_out_groups, 'row exceeds', 'rows exceed')} the limit, so the export for {name} "
            "would be incomplete",
            "give --rows 10000, or a shorter period; nothing was written or confirmed",
        )
    if found.damaged:
        raise RequestRefused(
            f"parts of the ledger are damaged, so the export for {name} would be incomplete: {found.damaged[0]}",
            "restore a backup (docs/how-to/runbooks/EelgridLedgerFailing.md); nothing was written or confirmed",
        )


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
@list_options(*_COLUMNS)
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
@click.argument("name", shell_complete=complete_exporters)
@yes_option
@click.pass_obj
def remove(settings: CliSettings, name: str, *, yes: bool) -> None:
    """Remove an exporter, after a question; rows that it lacks are deleted by age again."""
    remedy = "list exporters with `eelctl exporters`"
    with connect_operators(settings) as client:
        # Nobody is asked about an exporter that does not exist.
        known = client.list_energy_exporters(ListEnergyExportersRequest(), timeout=settings.timeout_s).exporters
        if name not in {one.name for one in known}:
            raise NameNotFound(f"there is no exporter {name!r}", remedy)
        confirm_change(
            f"Removing the exporter {name}", yes=yes, effects=("rows that it lacks may then be deleted by age",)
        )
        with remedy_if_not_found(remedy):
            client.remove_energy_exporter(RemoveEnergyExporterRequest(name=name), timeout=settings.timeout_s)
    click.echo(f"{name} is removed from the exporters")
