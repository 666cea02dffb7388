"""eelctl flux: which jobs of a Flux instance held which GPUs from when to when, and the energy that they took.

The spans are those of Flux's job manager, the energy is the ledger's of the job's workloads on that node.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import click

from eelgrid_controller.cli.completion import complete_users
from eelgrid_controller.cli.connection import CliSettings, RequestRefused, connect_operators, output_option
from eelgrid_controller.cli.energy import SPAN
from eelgrid_controller.cli.output import TableColumn, list_options, print_list
from eelgrid_controller.formatting import format_energy
from eelgrid_protos.messages import FluxSpan, ListFluxSpansRequest, ListFluxSpansResponse, QueryEnergyRequest
from eelgrid_protos.plain_messages import to_plain

_HOUR_NS = 3600 * 10**9
_ROWS_MOST = 10_000


@dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """A span, and the joules of its job on its node in the whole hours that are shown; None if none were measured."""

    span: FluxSpan
    energy_j: float | None


def _format_time(time_ns: int) -> str:
    return f"{datetime.fromtimestamp(time_ns / 1e9, UTC):%FT%TZ}" if time_ns else "-"


def _format_indexes(gpus: tuple[int, ...]) -> str:
    return ",".join(map(str, gpus)) or "-"


def _format_held(one: MeasuredSpan) -> str:
    return f"{((one.span.end_ns or time.time_ns()) - one.span.begin_ns) / 1e9:,.1f} s"


SPAN_COLUMNS: tuple[TableColumn[MeasuredSpan], ...] = (
    TableColumn("JOB", lambda one: one.span.job),
    TableColumn("USER", lambda one: one.span.user or "-"),
    TableColumn("NODE", lambda one: one.span.hostname),
    TableColumn("GPUS", lambda one: _format_indexes(one.span.gpus)),
    TableColumn("CORES", lambda one: str(one.span.cores), right=True),
    TableColumn("BEGIN", lambda one: _format_time(one.span.begin_ns)),
    TableColumn("END", lambda one: _format_time(one.span.end_ns), wide=True),
    TableColumn("HELD", _format_held, right=True),
    TableColumn("WAITED", lambda one: f"{one.span.wait_s:,.1f} s", right=True),
    TableColumn("ENERGY", lambda one: "-" if one.energy_j is None else format_energy(one.energy_j), right=True),
)


@click.group()
def flux() -> None:
    """Show the jobs of a Flux instance as Flux has run them."""


@flux.command()
@click.option("--since", type=SPAN, default="24h", show_default=True, help="How far to look back: 24h, 7d, 4w.")
@click.option("--job", default="", metavar="JOBID", help="Only this job, as Flux writes it with f: f3B1wxK1.")
@click.option("--user", default="", help="Only jobs of this user.", shell_complete=complete_users)
@click.option(
    "--limit", type=click.IntRange(1), default=100, show_default=True, help="Maximum number of spans to show."
)
@list_options(*SPAN_COLUMNS)
@output_option
@click.pass_obj
def spans(settings: CliSettings, /, since: int, job: str, user: str, limit: int) -> None:
    """Show which jobs held which GPUs from when to when, newest first (UTC).

    WAITED is the time from submission to allocation. ENERGY is what the ledger has of the job on that node in these hours.

    \b
    eelctl flux spans --since 7d --user ann
    """  # noqa: D301
    from eelgrid_protos import rpc

    end_ns = time.time_ns()
    begin_ns = max(0, end_ns - since * _HOUR_NS)
    with connect_operators(settings) as client:
        found = _list_spans(
            client.build_client(rpc.FLUX_SERVICE), ListFluxSpansRequest(begin_ns=begin_ns, end_ns=end_ns), settings
        )
        chosen = [one for one in found.spans if job in ("", one.job) and user in ("", one.user)]
        energy = _query_energy(client, begin_ns, end_ns, settings) if chosen else {}
    if found.omitted:
        click.echo(f"warning: {found.omitted} older spans omitted; look back less far with --since", err=True)
    rows = [MeasuredSpan(one, energy.get((one.job, one.hostname))) for one in reversed(chosen)]
    print_list(
        settings,
        SPAN_COLUMNS,
        rows,
        empty="no job held anything in this time; look further back with --since",
        limit=limit,
        plain=lambda one: {**to_plain(one.span), "energy_j": one.energy_j},
    )


def _list_spans(client: Any, request: ListFluxSpansRequest, settings: CliSettings) -> ListFluxSpansResponse:
    from eelgrid_protos import faults

    try:
        answer: ListFluxSpansResponse = client.list_flux_spans(request, timeout=settings.timeout_s)
    except faults.Internal as error:
        if not error.message.startswith("UNIMPLEMENTED"):
            raise
        raise RequestRefused(
            "this controller follows no Flux instance", "start it with --flux, and load its module in Flux"
        ) from None
    return answer


def _query_energy(client: Any, begin_ns: int, end_ns: int, settings: CliSettings) -> Mapping[tuple[str, str], float]:
    """Returns joules by job and node; a job may have been several workloads, flux-JOB, flux-JOB.1 and so on."""
    request = QueryEnergyRequest(begin_ns=begin_ns, end_ns=end_ns, group_by=("workload", "node"), rows_most=_ROWS_MOST)
    found: dict[tuple[str, str], float] = defaultdict(float)
    for group in client.query_energy(request, timeout=settings.timeout_s).groups:
        workload_id, node_name = group.values
        if workload_id.startswith("flux-"):
            spent = group.spent
            job = workload_id.removeprefix("flux-").partition(".")[0]
            found[job, node_name] += (spent.bare_idle_mj + spent.context_idle_mj + spent.active_mj) / 1e3
    return found
