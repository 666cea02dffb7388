"""eelctl whoami: whose our certificate is and what the controller lets it do.

Owns how the answer is printed. Must not read certificates: what counts is what
the controller sees.
"""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime

import click

from eelgrid_controller.cli.connection import operators
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import printed
from eelgrid_protos.messages import WhoAmIRequest, WhoAmIResponse

__all__ = ["whoami"]

# The end of the calendar; a certificate that never ends is told as the last nanosecond of the contract.
_SECONDS_MOST = 9_223_372_036


@click.command()
@printing
@click.pass_obj
def whoami(settings: Settings, /) -> None:
    """Say whose our certificate is and what it may here."""
    with operators(settings) as client:
        found: WhoAmIResponse = client.who_am_i(WhoAmIRequest(), timeout=settings.timeout_s)
    printed(settings, asdict(found), _lines(found))


def _lines(found: WhoAmIResponse) -> Iterator[str]:
    if not found.not_after_ns:
        yield "certificate  none: without TLS everybody may everything"
        return
    yield f"certificate  {found.subject or '(no name)'}"
    yield f"roles        {_roles(found)}"
    if found.user:
        yield f"user         {found.user}"
    if found.rights:
        yield f"may submit   {', '.join(right.replace(':', ' ', 1) for right in found.rights)}"
    if found.node_names:
        yield f"nodes        {', '.join(found.node_names)}"
    ends_s = found.not_after_ns // 10**9
    yield (
        f"holds until  {datetime.fromtimestamp(ends_s, UTC):%Y-%m-%d %H:%M} UTC"
        if ends_s < _SECONDS_MOST
        else ("holds until  for ever")
    )


def _roles(found: WhoAmIResponse) -> str:
    if found.roles:
        return ", ".join(found.roles)
    return "none: nothing is allowed" if found.roles_demanded else "none: everything is allowed (--roles permit)"
