"""eelctl describe: what is known of one node, GPU or workload, joined from the calls of other commands.

Owns the order of the parts. What a part looks like belongs to the commands that show it alone: get, explain, plan, gpus
and workloads. A GPU is named by its node and index, as `gpu-1/3`, or by its UUID.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import click

from eelgrid_controller.cli.completion import complete_kind_names
from eelgrid_controller.cli.connection import (
    CliSettings,
    NameNotFound,
    connect_operators,
    iterate_pages,
    output_option,
)
from eelgrid_controller.cli.drain import describe_cordon_status
from eelgrid_controller.cli.explain import explanation_lines
from eelgrid_controller.cli.nodes import GPU_COLUMNS, NODE_COLUMNS, PLAN_COLUMNS, find_node
from eelgrid_controller.cli.output import TableColumn, print_plain, text_table, use_colour
from eelgrid_controller.cli.workload_names import LIVE_PHASES, find_workload
from eelgrid_controller.cli.workloads import build_workload_columns, read_clock, workload_lines
from eelgrid_controller.formatting import format_time
from eelgrid_protos.messages import (
    CordonStatus,
    ExplainWorkloadRequest,
    GetWorkloadRequest,
    Gpu,
    GpuStatus,
    ListGpusRequest,
    ListPlansRequest,
    ListWorkloadsRequest,
)
from eelgrid_protos.plain_messages import to_plain

_REPLICAS_SHOWN = 4
# The plain form and the lines for people.
Description = tuple[dict[str, Any], Iterator[str]]


def _facts(columns: Iterable[TableColumn[Any]], row: Any) -> Iterator[str]:
    """Formats one row as a line for each column that has something to say."""
    cells = [(column.title.lower(), column.cell(row)) for column in columns]
    shown = [(title, text) for title, text in cells if text and text != "-"]
    width = max(len(title) for title, _ in shown)
    for title, text in shown:
        yield f"  {title:<{width}}  {text}"


def _table(title: str, columns: Iterable[TableColumn[Any]], rows: list[Any], empty: str) -> Iterator[str]:
    yield ""
    if not rows:
        yield empty
        return
    yield f"{title}:"
    shown = [column for column in columns if not column.wide]
    for line in text_table(shown, rows, colour=use_colour()):
        yield f"  {line}"


def _pages(client: Any, settings: CliSettings, call: str, request: Any, items: str) -> list[Any]:
    return list(iterate_pages(getattr(client, call), request, items, timeout_s=settings.timeout_s))


def _describe_node(client: Any, settings: CliSettings, name: str) -> Description:
    node = find_node(client, settings, name)
    gpus = _pages(client, settings, "list_gpus", ListGpusRequest(node_name=name), "gpus")
    held = ListWorkloadsRequest(node_name=name, phases=LIVE_PHASES)
    work = _pages(client, settings, "list_workloads", held, "workloads")
    plans = _pages(client, settings, "list_plans", ListPlansRequest(node_name=name), "plans")
    clock = read_clock(client, settings)
    columns = build_workload_columns(clock)

    def lines() -> Iterator[str]:
        yield f"node {name}"
        yield from _facts(NODE_COLUMNS[1:], node)
        yield from _cordon_lines(node.cordons, node.inventory.gpus, clock())
        yield from _table("GPUs", GPU_COLUMNS[1:], gpus, "It has no GPU.")
        yield from _table("Workloads", columns, work, "It holds no work.")
        yield from _table("Plan", PLAN_COLUMNS[1:], plans, "It has no plan yet.")

    plain = {
        "node": to_plain(node),
        "gpus": [to_plain(one) for one in gpus],
        "workloads": [to_plain(one) for one in work],
        "plans": [to_plain(one) for one in plans],
    }
    return plain, lines()


def _cordon_lines(cordons: Iterable[CordonStatus], gpus: Iterable[Gpu], now_ns: int) -> Iterator[str]:
    indexes = {gpu.uuid: gpu.index for gpu in gpus}
    for cordon in cordons:
        yield f"  takes no new work: {describe_cordon_status(cordon, indexes, now_ns)}"


def _find_gpu(client: Any, settings: CliSettings, name: str) -> GpuStatus:
    node, slash, index = name.rpartition("/")
    node_name = node if slash and index.isdecimal() else ""
    rows = iterate_pages(client.list_gpus, ListGpusRequest(node_name=node_name), "gpus", timeout_s=settings.timeout_s)
    found: GpuStatus | None = next(
        (one for one in rows if (one.gpu.index == int(index) if node_name else one.gpu.uuid == name)), None
    )
    if found is None:
        raise NameNotFound(
            f"there is no GPU {name!r}", "name it as NODE/INDEX or by its UUID; `eelctl gpus` lists them"
        )
    return found


def _describe_gpu(client: Any, settings: CliSettings, name: str) -> Description:
    found = _find_gpu(client, settings, name)
    work = [
        client.get_workload(GetWorkloadRequest(workload_id=key), timeout=settings.timeout_s).workload
        for key in found.workload_ids
    ]
    clock = read_clock(client, settings)
    columns = build_workload_columns(clock)

    def lines() -> Iterator[str]:
        yield f"GPU {found.gpu.index} of node {found.node_name}"
        yield from _facts(GPU_COLUMNS[2:], found)
        if found.gpu.cordon:
            yield f"  takes no new work: {found.gpu.cordon}"
        for lease in found.gpu.leases:
            what = "" if lease.device_uuid == found.gpu.uuid else f" {lease.device_uuid or 'a slice to be made'}"
            yield f"  leased{what} to {lease.engine} {lease.owner} since {format_time(lease.since_ns)}"
            if lease.unknown:
                yield f"    whether it still exists is not known: {lease.unknown}"
        yield from _cordon_lines(found.cordons, [found.gpu], clock())
        yield from _table("Workloads", columns, work, "Nothing holds it.")

    return {"gpu": to_plain(found), "workloads": [to_plain(one) for one in work]}, lines()


def _describe_workload(client: Any, settings: CliSettings, name: str) -> Description:
    workload = find_workload(client, settings, name)
    request = ExplainWorkloadRequest(workload_id=workload.workload_id)
    explanation = client.explain_workload(request, timeout=settings.timeout_s).explanation

    def lines() -> Iterator[str]:
        yield from workload_lines(workload)
        yield ""
        yield from explanation_lines(explanation, _REPLICAS_SHOWN, settings.page)

    return {"workload": to_plain(workload), "explanation": to_plain(explanation)}, lines()


_KINDS = {"node": _describe_node, "gpu": _describe_gpu, "workload": _describe_workload}


def build_description(client: Any, settings: CliSettings, kind: str, name: str) -> Description:
    """Fetches everything that is known of a node, GPU or workload; returns its plain form and lines for people.

    Raises NameNotFound, or RequestRefused for a name that several workloads have.
    """
    return _KINDS[kind](client, settings, name)


@click.command()
@click.argument("kind", type=click.Choice(list(_KINDS)))
@click.argument("name", shell_complete=complete_kind_names)
@output_option
@click.pass_obj
def describe(settings: CliSettings, kind: str, name: str) -> None:
    """Show everything that is known of one node, GPU or workload.

    A GPU is named NODE/INDEX or by its UUID, a workload by its id or its name.

    \b
    eelctl describe node gpu-1
    eelctl describe gpu gpu-1/3
    eelctl describe workload train
    """  # noqa: D301
    with connect_operators(settings) as client:
        print_plain(settings, *build_description(client, settings, kind, name))
