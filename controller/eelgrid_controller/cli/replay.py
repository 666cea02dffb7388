"""eelctl replay: submits a trace to a running controller, or compares policies on it without one.

Owns the options, and the part that submits; policy_comparison compares policies.
The package replay finds, reads and submits traces. Ids are the tasks' names behind
a prefix, so that submitting can be repeated after any interruption and places
nothing twice.
"""

import asyncio
import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.connection import CliError, CliSettings, NameNotFound, UsageMismatch, tls_files
from eelgrid_controller.cli.output import ProgressBar, echo
from eelgrid_controller.formatting import format_milliseconds
from eelgrid_protos.messages import ListNodesRequest, Workload

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SHARED = ("trace", "task_list", "nodes", "pods", "limit", "output")
_SUBMITTING = ("prefix", "in_flight", "fleet_out")


class _TwoFold(click.Command):
    """Lists its options in three groups: the trace, comparing policies, submitting."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {
            "The trace": [],
            "With --policies: compare policies on this machine, without a controller": [],
            "Without --policies: submit the tasks to a controller": [],
        }
        shared, comparing, submitting = groups.values()
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                group = shared if parameter.name in _SHARED or "--help" in parameter.opts else comparing
                (submitting if parameter.name in _SUBMITTING else group).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


async def _absent(client: Any, wanted: set[str], timeout_s: float) -> set[str]:
    """Returns the nodes of the trace that the controller lacks."""
    token = ""
    while wanted:
        answer = await client.list_nodes(ListNodesRequest(page_size=1000, page_token=token), timeout=timeout_s)
        wanted = wanted - {node.inventory.node_name for node in answer.nodes}
        if answer.next_page_token in {"", token}:
            break
        token = answer.next_page_token
    return wanted


async def _run(settings: CliSettings, requests: list[Any], nodes: set[str], in_flight: int) -> Any:
    from eelgrid_controller.replay.submitter import SubmitLimits, Submitter
    from eelgrid_protos import rpc, transport

    channel = transport.open_channel(settings.controller, tls=tls_files(settings), insecure=settings.insecure)
    async with channel:
        client = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
        if absent := await _absent(client, nodes, settings.timeout_s):
            raise NameNotFound(
                f"the controller lacks {len(absent)} of the trace's {len(nodes)} nodes, for example {min(absent)}",
                "write a fleet file with --fleet-out and start `eelgrid-agent --simulate` on it, or leave out --nodes",
            )
        submitter = Submitter(
            operators=client,
            clock=time.monotonic,
            sleep=asyncio.sleep,
            jitter=random.random,
            rules=SubmitLimits(in_flight=in_flight, call_timeout_s=settings.timeout_s),
        )
        progress = ProgressBar("submitting", "submitted", len(requests))

        def tell(report: Any, _: Workload | None) -> None:
            progress(report.done, f"{report.rate_hz:,.0f}/s")

        try:
            return await submitter.run(requests, tell)
        finally:
            progress.stop()


def _print(settings: CliSettings, report: Any, source: str) -> None:
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
    latencies = (
        f"p50 {format_milliseconds(figures['submit_p50_s'])}, p99 {format_milliseconds(figures['submit_p99_s'])}"
    )
    click.echo(f"trace      {source}")
    click.echo(f"answered   {report.done} of {report.total} in {report.elapsed_s:.1f} s ({report.rate_hz:,.0f}/s)")
    click.echo(f"placed     {report.placed}, waiting {report.pending}, refused {report.refused}")
    click.echo(f"latency    {latencies}; {report.repeats} repeats")
    for refusal in report.refusals[:10]:
        echo(f"  refused {refusal.workload_id}: {refusal.reason}", err=True)


@click.command(cls=_TwoFold)
@click.option(
    "--trace",
    default="auto",
    show_default=True,
    help="Trace to replay: auto, generated, or the folder or task list of a trace.",
)
@click.option(
    "--list", "task_list", default="default", show_default=True, help="Task list of the openb trace: gpushare40, ..."
)
@click.option("--nodes", type=_FILE, help="CSV file of nodes; a controller must have these nodes.")
@click.option("--pods", type=_FILE, help="CSV file of tasks, instead of --trace.")
@click.option("--limit", type=click.IntRange(1), help="Use only the first tasks.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default=None, help="Output format.")
@click.option(
    "--policies",
    metavar="NAME,...",
    help="Policies to compare: fgd, pwr, pwr200, eelgrid, ... or all. Savings are relative to the first, with all to fgd.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Number of runs per policy, each with its own seed.",
)
@click.option(
    "--mode",
    type=click.Choice(["times", "arrivals"]),
    help="times: tasks arrive and end at their times; arrivals: the published protocol, in which nothing ends. "
    "[default: times where the trace has them]",
)
@click.option(
    "--fleet", type=click.IntRange(1), metavar="NODES", help="Use only this many nodes, evenly spaced over the list."
)
@click.option(
    "--until",
    type=click.FloatRange(0.0, 1e6, min_open=True),
    metavar="HOURS",
    help="End this long after the first arrival. [default: when the last task would end if none waited]",
)
@click.option("--failures", type=_FILE, help="CSV file of node failures: node,down_s,up_s.")
@click.option(
    "--mtbf",
    type=click.FloatRange(0.001, 1e9),
    metavar="HOURS",
    help="Simulate random failures with this mean time between failures of a node.",
)
@click.option(
    "--mttr",
    type=click.FloatRange(0.001, 1e9),
    default=4.0,
    show_default=True,
    metavar="HOURS",
    help="Mean time to repair of a failed node.",
)
@click.option("--tariff", type=_FILE, help="CSV file of prices: from_s,price_per_kwh,carbon_g_per_kwh.")
@click.option(
    "--tariff-repeat",
    type=click.FloatRange(0.001, 1e6),
    metavar="HOURS",
    help="Repeat the tariff after this long, for example 24.",
)
@click.option(
    "--pue",
    type=click.FloatRange(1.0, 10.0),
    default=1.0,
    show_default=True,
    help="Power usage effectiveness: facility power over IT power.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("replay-out"),
    show_default=True,
    help="Folder for the summary, the time series and the plot.",
)
@click.option(
    "--format", type=click.Choice(["csv", "parquet"]), default="csv", show_default=True, help="Format of the tables."
)
@click.option("--plots/--no-plots", default=True, show_default=True, help="Draw a plot if matplotlib is installed.")
@click.option("--processes", type=click.IntRange(1, 4096), help="Number of processes. [default: one per CPU]")
@click.option(
    "--backend",
    type=click.Choice(["processes", "ray"]),
    default="processes",
    show_default=True,
    help="Run in processes on this machine, or on your Ray cluster.",
)
@click.option("--prefix", default="", help="Prefix of every workload id; another prefix submits the trace again.")
@click.option(
    "--in-flight", type=click.IntRange(1, 1024), default=8, show_default=True, help="Number of concurrent calls."
)
@click.option(
    "--fleet-out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the nodes to a fleet file for `eelgrid-agent --simulate`, and submit nothing.",
)
@click.pass_context
def replay(context: click.Context, /, **options: Any) -> None:
    """Replay a trace: compare policies on it, or submit it to a running controller.

    The trace is Alibaba's openb 2023, or one of your own (docs/reference/trace-format.md).

    With --policies, simulates the trace on this machine under each policy, with departures, failures and tariffs, and
    compares energy, cost, waiting and utilization.

    Without --policies, submits the tasks to the controller, in order and each once. You can interrupt and repeat the
    command: a task that the controller already has is not placed again.

    \b
    eelctl replay --policies fgd,eelgrid --seeds 3
    eelctl replay --limit 500
    """  # noqa: D301
    source, given = context.get_parameter_source, click.core.ParameterSource.COMMANDLINE
    asked = frozenset(name for name in options if source(name) is given)
    settings: CliSettings = context.obj
    if options["output"]:
        settings = replace(settings, output=options["output"])
    misfit = _SUBMITTING if options["policies"] else tuple(options.keys() - {*_SUBMITTING, *_SHARED, "policies"})
    if wrong := sorted(asked.intersection(misfit)):
        option = wrong[0].replace("_", "-")
        if options["policies"]:
            raise UsageMismatch(
                f"--{option} is for submitting to a controller, not for --policies", "leave out one of the two"
            )
        raise UsageMismatch(
            f"--{option} is for comparing policies", "name them with --policies, for example fgd,eelgrid"
        )
    if options["policies"]:
        from eelgrid_controller.cli.policy_comparison import compare_policies

        compare_policies(settings, asked, **options)
    else:
        _submit(settings, options)


def _submit(settings: CliSettings, options: dict[str, Any]) -> None:
    """Submits the trace to the controller, or writes its fleet file."""
    from eelgrid_controller.replay.openb import submission_of_task
    from eelgrid_controller.replay.openb_source import TraceSearch
    from eelgrid_controller.replay.trace_loading import find_trace, read_nodes, read_tasks

    nodes, pods, fleet_out = options["nodes"], options["pods"], options["fleet_out"]
    found = None
    if (pods is None and not fleet_out) or (fleet_out and nodes is None):
        found = find_trace(options["trace"], options["task_list"], nodes, TraceSearch.from_environment(os.environ))
        for note in found.notes:
            click.echo(f"note: {note}", err=True)
    rows = read_nodes(nodes) if nodes else (found.nodes if found and fleet_out else ())
    if fleet_out:
        _write_fleet(fleet_out, rows)
        return
    tasks = read_tasks(pods) if pods else found.tasks if found else ()
    requests = [submission_of_task(task, prefix=options["prefix"]) for task in tasks[: options["limit"]]]
    source = str(pods) if pods else found.where if found else ""
    report = asyncio.run(_run(settings, requests, {row.name for row in rows}, options["in_flight"]))
    _print(settings, report, source)
    if report.refused:
        raise CliError(f"{report.refused} tasks were refused", "see the reasons above")


def _write_fleet(path: Path, rows: Any) -> None:
    from eelgrid_controller.replay.openb import write_fleet_file
    from eelgrid_protos import catalogue

    try:
        write_fleet_file(path, rows, catalogue.load_catalogue().products)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}", "choose another file with --fleet-out") from None
    click.echo(f"wrote {len(rows)} nodes to {path}; start them with: eelgrid-agent --simulate {path}")
