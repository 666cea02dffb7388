"""eelctl audit, whoami and version: who requested which change, what the caller's certificate permits, and who answers.

whoami does not read the certificate files: what counts is how the controller sees the caller.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime

import click

from eelgrid_controller.cli.completion import complete_users
from eelgrid_controller.cli.connection import CliSettings, connect_operators, iterate_pages, output_option
from eelgrid_controller.cli.energy import SPAN
from eelgrid_controller.cli.output import TableColumn, list_options, print_list, print_plain
from eelgrid_protos import __version__
from eelgrid_protos.messages import AuditEntry, ListAuditEntriesRequest, WhoAmIRequest, WhoAmIResponse

_HOUR_NS = 3600 * 10**9
_SHOWN_MOST = 80


def _what(entry: AuditEntry) -> str:
    text = entry.arguments
    return text if len(text) <= _SHOWN_MOST else f"{text[: _SHOWN_MOST - 3]}..."


AUDIT_COLUMNS: tuple[TableColumn[AuditEntry], ...] = (
    TableColumn("NUMBER", lambda e: str(e.number), right=True, wide=True),
    TableColumn("TIME", lambda e: f"{datetime.fromtimestamp(e.time_ns // 10**9, UTC):%FT%TZ}"),
    TableColumn("WHO", lambda e: e.user or e.subject or e.peer),
    TableColumn("ROLE", lambda e: e.role or "-"),
    TableColumn("CALL", lambda e: e.call),
    TableColumn("ANSWER", lambda e: e.code, colour=lambda e: None if e.code == "OK" else "red"),
    TableColumn("CALLS", lambda e: str(e.calls), right=True),
    TableColumn("FROM", lambda e: e.peer, wide=True),
    TableColumn("CERTIFICATE", lambda e: e.subject or "-", wide=True),
    TableColumn("REVISION", lambda e: str(e.revision) if e.revision else "-", right=True, wide=True),
    TableColumn("WHAT", _what),
    TableColumn("REASON", lambda e: e.reason, wide=True),
)


@click.command()
@click.option("--since", type=SPAN, default="24h", show_default=True, help="How far to look back: 24h, 7d, 4w.")
@click.option("--user", default="", help="Only calls by this user.", shell_complete=complete_users)
@click.option("--call", default="", help="Only this call, for example CancelWorkload.")
@click.option("--denied", is_flag=True, help="Only calls that were denied because the caller lacked the right.")
@click.option(
    "--limit", type=click.IntRange(1), default=100, show_default=True, help="Maximum number of entries to show."
)
@list_options(*AUDIT_COLUMNS)
@output_option
@click.pass_obj
def audit(settings: CliSettings, /, since: int, limit: int, **filters: str | bool) -> None:
    """Show who requested which change and with what result, newest first (UTC); requires the role admin.

    An entry with more than one call sums up identical denied calls, or reports, within a minute.

    \b
    eelctl audit --since 7d --denied
    """  # noqa: D301
    request = ListAuditEntriesRequest(since_ns=max(0, time.time_ns() - since * _HOUR_NS), **filters)  # type: ignore[arg-type]
    with connect_operators(settings) as client:
        found = iterate_pages(
            client.list_audit_entries,
            request,
            "entries",
            timeout_s=settings.timeout_s,
            limit=settings.fetch_limit(limit),
        )
        print_list(
            settings,
            AUDIT_COLUMNS,
            found,
            empty="no change was requested in this time; look further back with --since",
            limit=limit,
        )


# The last nanosecond of the contract: whoever is known without a certificate.
_SECONDS_MOST = 9_223_372_036


@click.command()
@output_option
@click.pass_obj
def whoami(settings: CliSettings, /) -> None:
    """Show who you are to the controller, with your roles and rights."""
    with connect_operators(settings) as client:
        found: WhoAmIResponse = client.who_am_i(WhoAmIRequest(), timeout=settings.timeout_s)
    print_plain(settings, asdict(found), _lines(found))


def _lines(found: WhoAmIResponse) -> Iterator[str]:
    if not found.not_after_ns:
        yield "certificate  none: without TLS every caller may do everything"
        return
    ends_s = found.not_after_ns // 10**9
    is_certified = ends_s < _SECONDS_MOST
    yield (
        f"certificate  {found.subject or '(no name)'}" if is_certified else "certificate  none: a user of this machine"
    )
    yield f"roles        {_roles(found)}"
    if found.user:
        yield f"user         {found.user}"
    if found.rights:
        yield f"may submit   {', '.join(right.replace(':', ' ', 1) for right in found.rights)}"
    if found.node_names:
        yield f"nodes        {', '.join(found.node_names)}"
    if is_certified:
        yield f"valid until  {datetime.fromtimestamp(ends_s, UTC):%Y-%m-%d %H:%M} UTC"


def _roles(found: WhoAmIResponse) -> str:
    if found.roles:
        return ", ".join(found.roles)
    return "none: nothing is allowed" if found.roles_demanded else "none: everything is allowed (--roles permit)"


@click.command()
@output_option
@click.pass_obj
def version(settings: CliSettings, /) -> None:
    """Show the versions of eelctl and of the controller; exit code 3 if no controller answers."""
    from eelgrid_protos import faults

    found, fault = "", None
    try:
        with connect_operators(settings) as client:
            answer: WhoAmIResponse = client.who_am_i(WhoAmIRequest(), timeout=settings.timeout_s)
            found = answer.controller_version or "unknown: it does not say"
    except faults.Fault as error:
        fault = error
    lines = [f"eelctl      {__version__}", *([f"controller  {found}"] if found else [])]
    print_plain(settings, {"eelctl": __version__, "controller": found or None}, lines)
    if fault:
        raise fault
