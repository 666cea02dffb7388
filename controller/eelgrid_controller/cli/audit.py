"""eelctl audit: who asked to change what, when, and what came of it.

Owns the options and the columns; must not know how entries are kept.
"""

import time
from datetime import UTC, datetime

import click

from eelgrid_controller.cli.connection import operators, pages
from eelgrid_controller.cli.energy import SPAN
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import Column, listing
from eelgrid_protos.messages import AuditEntry, ListAuditEntriesRequest

__all__ = ["audit"]

_HOUR_NS = 3600 * 10**9
_SHOWN_MOST = 80


def _time(entry: AuditEntry) -> str:
    return f"{datetime.fromtimestamp(entry.time_ns // 10**9, UTC):%FT%TZ}"


def _who(entry: AuditEntry) -> str:
    return entry.user or entry.subject or entry.peer


def _what(entry: AuditEntry) -> str:
    text = entry.arguments
    return text if len(text) <= _SHOWN_MOST else f"{text[: _SHOWN_MOST - 3]}..."


def _answer_colour(entry: AuditEntry) -> str | None:
    return None if entry.code == "OK" else "red"


_COLUMNS: tuple[Column[AuditEntry], ...] = (
    Column("NUMBER", lambda e: str(e.number), right=True, wide=True),
    Column("TIME", _time),
    Column("WHO", _who),
    Column("ROLE", lambda e: e.role or "-"),
    Column("CALL", lambda e: e.call),
    Column("ANSWER", lambda e: e.code, colour=_answer_colour),
    Column("CALLS", lambda e: str(e.calls), right=True),
    Column("FROM", lambda e: e.peer, wide=True),
    Column("CERTIFICATE", lambda e: e.subject or "-", wide=True),
    Column("REVISION", lambda e: str(e.revision) if e.revision else "-", right=True, wide=True),
    Column("WHAT", _what),
    Column("REASON", lambda e: e.reason, wide=True),
)


@click.command()
@click.option("--since", type=SPAN, default="24h", show_default=True, help="How far back: 24h, 7d, 4w.")
@click.option("--user", default="", help="Only calls of this user.")
@click.option("--call", default="", help="Only this call, as in CancelWorkload.")
@click.option("--denied", is_flag=True, help="Only calls that were refused for their caller's rights.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Entries to show at most.")
@printing
@click.pass_obj
def audit(settings: Settings, /, since: int, limit: int, **filters: str | bool) -> None:
    """Show who asked to change what, newest first (UTC); needs the role admin.

    An entry with more than one call stands for refused calls that were alike, or for reports, within a minute.
    """
    request = ListAuditEntriesRequest(since_ns=max(0, time.time_ns() - since * _HOUR_NS), **filters)  # type: ignore[arg-type]
    with operators(settings) as client:
        found = pages(client.list_audit_entries, request, "entries", timeout_s=settings.timeout_s, limit=limit)
        listing(settings, _COLUMNS, found, empty="nobody asked to change anything; look further back with --since")
