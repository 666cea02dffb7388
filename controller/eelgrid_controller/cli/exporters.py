"""eelctl exporters: who takes the energy ledger's rows elsewhere, and until when he has them.

Owns the list, and what `eelctl energy --confirm-export` asks and tells. Must not know the files.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.connection import operators
from eelgrid_controller.cli.energy_files import is_durable
from eelgrid_controller.cli.failure import Refused
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import Column, listing
from eelgrid_protos.messages import (
    ConfirmEnergyExportRequest,
    EnergyExporter,
    ListEnergyExportersRequest,
    QueryEnergyResponse,
    RemoveEnergyExporterRequest,
)

__all__ = ["confirm_export", "export_stretch", "exporters"]

_NANO = 10**9
_HOUR_NS = 3600 * _NANO


def _time(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / _NANO, UTC).strftime("%Y-%m-%d %H:%M")


def _changed(one: EnergyExporter) -> str:
    if not one.changed_hours:
        return ""
    return f"{one.changed_hours}, {_time(one.changed_first_ns)} to {_time(one.changed_last_ns)}"


def export_stretch(
    client: Any, settings: Settings, name: str, said_ns: tuple[int, int] | None, *, is_month: bool,
    paths: Sequence[Path | None], is_filtered: bool,
) -> tuple[int, int]:  # fmt: skip
    """What is to be exported: what was said, as far as it is settled, else what the exporter does not have yet.

    Raises UsageError and Refused; ends the command where there is nothing.
    """
    if not any(paths):
        raise click.UsageError("--confirm-export: nothing is exported; add --csv FILE or --parquet FILE")
    if is_filtered:
        raise click.UsageError("--confirm-export: with --where some rows would be nowhere; leave one of them out")
    for path in filter(None, paths):
        if not is_durable(path):
            raise click.UsageError(f"--confirm-export: {path} is no file on a disk; name one")
    found = client.list_energy_exporters(ListEnergyExportersRequest(), timeout=settings.timeout_s)
    settled_ns = found.settled_ns
    marks = {one.name: one.until_ns for one in found.exporters}
    if said_ns is not None:
        begin_ns, end_ns = said_ns
        if begin_ns // _HOUR_NS * _HOUR_NS > marks.get(name, begin_ns):
            raise Refused(
                f"{name} has rows until {_time(marks[name])} UTC, and would lack those up to {_time(begin_ns)}",
                "begin there, or leave --since and --month out, which takes all that is new",
            )
        if is_month and end_ns > settled_ns:
            raise Refused(
                f"--month: not all nodes have told that month; hours are settled until {_time(settled_ns)} UTC",
                "repeat it later, or take --since",
            )
    else:
        if name not in marks:
            raise click.UsageError(f"--confirm-export: {name} has no mark yet; say from when, with --since or --month")
        begin_ns, end_ns = marks[name], settled_ns
    end_ns = min(end_ns, settled_ns)
    if end_ns <= begin_ns:
        click.echo(
            f"nothing is settled after {_time(begin_ns)} UTC that {name} could have; nothing was written", err=True
        )
        raise click.exceptions.Exit(0)
    return begin_ns, end_ns


def confirm_export(client: Any, settings: Settings, name: str, found: QueryEnergyResponse) -> None:
    """Tells the controller that an answer is on the disk, and a person what follows."""
    request = ConfirmEnergyExportRequest(
        name=name, begin_ns=found.begin_ns, end_ns=found.end_ns, revision=found.revision
    )
    mark = client.confirm_energy_export(request, timeout=settings.timeout_s).exporter
    click.echo(f"confirmed: {name} has everything from {_time(mark.since_ns)} to {_time(mark.until_ns)} UTC", err=True)
    if mark.changed_hours:
        click.echo(f"  but for hours that changed since: {_changed(mark)}; export their stretch again", err=True)


_COLUMNS = (
    Column[EnergyExporter]("EXPORTER", lambda one: one.name),
    Column[EnergyExporter]("SINCE", lambda one: _time(one.since_ns)),
    Column[EnergyExporter]("UNTIL", lambda one: _time(one.until_ns)),
    Column[EnergyExporter]("BEHIND", lambda one: f"{one.lag_s / 3600.0:,.0f} h", right=True),
    Column[EnergyExporter]("CHANGED HOURS", _changed),
)


@click.group(invoke_without_command=True)
@printing
@click.pass_context
def exporters(context: click.Context) -> None:
    """Show who takes energy's rows elsewhere, and until when they have them (UTC).

    Rows that one of them does not have stay, whatever their age. Hours that changed after they were confirmed have to
    be exported again; what is exported then replaces what was.
    """
    if context.invoked_subcommand is not None:
        return
    settings: Settings = context.obj
    with operators(settings) as client:
        found = client.list_energy_exporters(ListEnergyExportersRequest(), timeout=settings.timeout_s)
    listing(
        settings, _COLUMNS, found.exporters,
        empty="no exporter; `eelctl energy --csv FILE --confirm-export NAME --since 7d` makes one",
    )  # fmt: skip


@exporters.command()
@click.argument("name")
@click.pass_obj
def remove(settings: Settings, name: str) -> None:
    """Forget an exporter: rows that it does not have go for their age again."""
    with operators(settings) as client:
        client.remove_energy_exporter(RemoveEnergyExporterRequest(name=name), timeout=settings.timeout_s)
    click.echo(f"{name} is no exporter any more")
