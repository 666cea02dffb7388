"""eelctl replay: a public trace's tasks into a running controller.

Owns the options and the progress; finding, reading and submitting are
replay/'s. Ids are the tasks' names behind a prefix, so the command can be
repeated after any interruption and places nothing twice.
"""

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.connection import tls_files
from eelgrid_controller.cli.failure import Stop, Unknown
from eelgrid_controller.cli.settings import Settings
from eelgrid_controller.spelling import milliseconds_text
from eelgrid_protos.messages import ListNodesRequest, Workload

__all__ = ["replay"]

_LINE_EVERY_S = 2.0
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class _Progress:
    """A bar on a terminal, on stderr; a line now and then where stderr is none."""

    def __init__(self, total: int) -> None:
        self._live: Any = None
        self._printed_s = time.monotonic()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._live = Progress(
                TextColumn("submitting"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR"))),
            )
            self._task = self._live.add_task("submitting", total=total, rate="")
            self._live.start()

    def __call__(self, report: Any, workload: Workload | None) -> None:  # noqa: ARG002
        if self._live:
            self._live.update(self._task, completed=report.done, rate=f"{report.rate_hz:,.0f}/s")
        elif time.monotonic() - self._printed_s >= _LINE_EVERY_S:
            self._printed_s = time.monotonic()
            click.echo(f"{report.done}/{report.total} submitted, {report.rate_hz:.0f}/s", err=True)

    def stop(self) -> None:
        if self._live:
            self._live.stop()


async def _absent(client: Any, wanted: set[str], timeout_s: float) -> set[str]:
    """Nodes of the trace that the controller does not have."""
    token = ""
    while wanted:
        answer = await client.list_nodes(ListNodesRequest(page_size=1000, page_token=token), timeout=timeout_s)
        wanted = wanted - {node.inventory.node_name for node in answer.nodes}
        if answer.next_page_token in {"", token}:
            break
        token = answer.next_page_token
    return wanted


async def _run(settings: Settings, requests: list[Any], nodes: set[str], in_flight: int) -> Any:
    from eelgrid_controller.replay.submit import Rules, Submitter
    from eelgrid_protos import rpc, transport

    channel = transport.channel(settings.controller, tls=tls_files(settings), insecure=settings.insecure)
    async with channel:
        client = rpc.client(rpc.OPERATOR_SERVICE, channel)
        if absent := await _absent(client, nodes, settings.timeout_s):
            raise Unknown(
                f"the controller lacks {len(absent)} of the trace's {len(nodes)} nodes, such as {min(absent)}",
                "write a fleet file with --fleet-out and start `eelgrid-agent --simulate` on it, or leave out --nodes",
            )
        submitter = Submitter(
            operators=client,
            clock=time.monotonic,
            sleep=asyncio.sleep,
            jitter=random.random,
            rules=Rules(in_flight=in_flight, call_timeout_s=settings.timeout_s),
        )
        progress = _Progress(len(requests))
        try:
            return await submitter.run(requests, progress)
        finally:
            progress.stop()


def _print(settings: Settings, report: Any, source: str) -> None:
    figures = {
        "trace": source,
        "tasks": report.total,
        "placed": report.placed,
        "pending": report.pending,
        "refused": report.refused,
        "repeats": report.repeats,
        "elapsed_s": round(report.elapsed_s, 3),
        "rate_hz": round(report.rate_hz, 1),
        "submit_p50_s": report.latency.quantile(0.5),
        "submit_p99_s": report.latency.quantile(0.99),
    }
    if settings.output in {"json", "yaml"}:
        # JSON is YAML too, and this is one flat object.
        click.echo(json.dumps(figures, indent=2))
        return
    latencies = f"p50 {milliseconds_text(figures['submit_p50_s'])}, p99 {milliseconds_text(figures['submit_p99_s'])}"
    click.echo(f"trace      {source}")
    click.echo(f"answered   {report.done} of {report.total} in {report.elapsed_s:.1f} s ({report.rate_hz:,.0f}/s)")
    click.echo(f"placed     {report.placed}, waiting {report.pending}, refused {report.refused}")
    click.echo(f"latency    {latencies}; {report.repeats} repeats")
    for refusal in report.refusals[:10]:
        click.echo(f"  refused {refusal.workload_id}: {refusal.reason}", err=True)


@click.command()
@click.option("--nodes", type=_FILE, help="Node list; the controller must have these nodes.")
@click.option("--pods", type=_FILE, help="Task list; without it the trace is looked for.")
@click.option("--trace", default="auto", show_default=True, help="auto, generated, or the folder of the trace.")
@click.option(
    "--list", "task_list", default="default", show_default=True, help="The trace's task list: gpushare40, ..."
)
@click.option("--limit", type=click.IntRange(1), help="Only the first tasks.")
@click.option("--prefix", default="", help="Put before every id, to replay once more.")
@click.option(
    "--in-flight", type=click.IntRange(1, 1024), default=8, show_default=True, help="Calls under way at once."
)
@click.option(
    "--fleet-out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the nodes as a fleet file for `eelgrid-agent --simulate`, and submit nothing.",
)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default=None, help="How to print.")
@click.pass_obj
def replay(
    settings: Settings,
    /,
    nodes: Path | None,
    pods: Path | None,
    limit: int | None,
    fleet_out: Path | None,
    **options: Any,
) -> None:
    """Submit a public trace to a running controller, in order and each task once.

    The trace is Alibaba's openb 2023. Interrupt and repeat the command as you like: a task that
    the controller has already is not placed again.
    """
    from dataclasses import replace

    from eelgrid_controller.replay.locate import Surroundings, locate
    from eelgrid_controller.replay.openb import read_nodes, read_tasks, submission

    if options["output"]:
        settings = replace(settings, output=options["output"])
    found = None
    if (pods is None and not fleet_out) or (fleet_out and nodes is None):
        found = locate(options["trace"], Surroundings.real(os.environ), tasks=options["task_list"])
        for note in found.notes:
            click.echo(f"note: {note}", err=True)
    rows = read_nodes(nodes) if nodes else (found.nodes if found and fleet_out else ())
    if fleet_out:
        _write_fleet(fleet_out, rows)
        return
    tasks = read_tasks(pods) if pods else found.tasks if found else ()
    requests = [submission(task, prefix=options["prefix"]) for task in tasks[:limit]]
    source = str(pods) if pods else f"{found.source.value} ({found.where})" if found else ""
    report = asyncio.run(_run(settings, requests, {row.name for row in rows}, options["in_flight"]))
    _print(settings, report, source)
    if report.refused:
        raise Stop(f"{report.refused} tasks were refused", "see the reasons above")


def _write_fleet(path: Path, rows: Any) -> None:
    from eelgrid_controller.replay.fleet import write_fleet
    from eelgrid_protos import catalogue

    try:
        write_fleet(path, rows, catalogue.load().products)
    except OSError as error:
        raise Stop(f"cannot write {path}: {error.strerror}", "choose another place with --fleet-out") from None
    click.echo(f"{len(rows)} nodes in {path}; start them with: eelgrid-agent --simulate {path}")
