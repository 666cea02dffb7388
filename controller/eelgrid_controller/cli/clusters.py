"""eelctl clusters: the clusters behind a front, and in which of them a workload is."""

from collections.abc import Iterator
from dataclasses import asdict

import click

from eelgrid_controller.cli.connection import CliSettings, connect_operators, explain_lone_controller, output_option
from eelgrid_controller.cli.output import TableColumn, list_options, print_list, print_plain
from eelgrid_controller.formatting import format_age
from eelgrid_protos.messages import (
    ClusterStatus,
    GetDispatchRequest,
    GetDispatchResponse,
    ListClustersRequest,
    Summary,
)
from eelgrid_protos.rpc import FEDERATION_SERVICE

_NOTHING = Summary(time_ns=0)


def _count(status: ClusterStatus, number: float) -> str:
    return "-" if status.summary is None else f"{number:g}"


def _gpus(status: ClusterStatus) -> str:
    summary = status.summary or _NOTHING
    return "-" if status.summary is None else f"{summary.allocated_gpu_milli / 1000:g}/{summary.gpus}"


def _oldest(status: ClusterStatus) -> str:
    summary = status.summary or _NOTHING
    return format_age((summary.time_ns - summary.oldest_pending_ns) / 1e9) if summary.oldest_pending_ns else "-"


def _price(status: ClusterStatus) -> str:
    return "-" if status.price_per_kwh is None else f"{status.price_per_kwh:.3g} {status.currency}"


CLUSTER_COLUMNS: tuple[TableColumn[ClusterStatus], ...] = (
    TableColumn("NAME", lambda c: c.name),
    TableColumn("STATE", lambda c: "silent" if c.problem else "ready", colour=lambda c: "red" if c.problem else None),
    TableColumn("NODES", lambda c: _count(c, (c.summary or _NOTHING).nodes_ready), right=True),
    TableColumn("LOST", lambda c: _count(c, (c.summary or _NOTHING).nodes_lost), right=True),
    TableColumn("GPUS", _gpus, right=True),
    TableColumn("WATTS", lambda c: _count(c, round((c.summary or _NOTHING).measured_power_w)), right=True),
    TableColumn(
        "BUDGET", lambda c: "-" if c.power_budget_w is None else f"{c.power_budget_w:.0f}", right=True, wide=True
    ),
    TableColumn("PENDING", lambda c: _count(c, (c.summary or _NOTHING).pending), right=True),
    TableColumn("OLDEST", _oldest, right=True),
    TableColumn("PLACED", lambda c: _count(c, (c.summary or _NOTHING).placed), right=True),
    TableColumn("FROM FRONT", lambda c: str(c.workloads), right=True),
    TableColumn("PRICE/KWH", _price, right=True),
    TableColumn(
        "KG CO2/KWH", lambda c: "-" if c.carbon_kg_per_kwh is None else f"{c.carbon_kg_per_kwh:.3g}", right=True
    ),
    TableColumn("LEFT OUT", lambda c: str(c.left_out), right=True, wide=True),
    TableColumn("ADDRESSES", lambda c: ",".join(c.addresses), wide=True),
    TableColumn("PROBLEM", lambda c: c.problem),
)


@click.command()
@click.argument("workload", required=False, default="")
@list_options(*CLUSTER_COLUMNS)
@output_option
@click.pass_obj
def clusters(settings: CliSettings, /, workload: str) -> None:
    """List the clusters behind a front, or show in which of them WORKLOAD is and why.

    A cluster that does not answer is listed as silent; what it runs, it keeps.

    \b
    eelctl clusters
    eelctl clusters f-0123456789abcdef
    """  # noqa: D301
    with connect_operators(settings) as client:
        front = client.build_client(FEDERATION_SERVICE)
        with explain_lone_controller(settings):
            if workload:
                found = front.get_dispatch(GetDispatchRequest(workload_id=workload), timeout=settings.timeout_s)
                print_plain(settings, asdict(found), _lines(found))
                return
            listed = front.list_clusters(ListClustersRequest(), timeout=settings.timeout_s).clusters
        print_list(settings, CLUSTER_COLUMNS, iter(listed), empty="the front has no cluster")


def _lines(found: GetDispatchResponse) -> Iterator[str]:
    state = "failed: no cluster took it" if found.failed else found.chosen or "none yet"
    yield f"cluster    {state}{' (is being cancelled)' if found.cancelled else ''}"
    if found.moving_to:
        yield f"moving to  {found.moving_to}"
    for copy in found.copies:
        started = ", started" if copy.started else ""
        problem = f" ({copy.problem})" if copy.problem else ""
        yield f"copy       {copy.cluster}: {copy.phase}{started}{problem}"
    for line in found.decision:
        yield f"decision   {line}"
