"""eelctl replay: a trace's tasks into a running controller, or under several policies without one.

Owns the options, and the half that submits; the half that compares policies is
cli.simulate. Finding, reading and submitting are replay/'s. Ids are the tasks'
names behind a prefix, so that submitting can be repeated after any interruption
and places nothing twice.
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

from eelgrid_controller.cli.connection import tls_files
from eelgrid_controller.cli.errors import CliError, NameNotFound, UsageMismatch
from eelgrid_controller.cli.output import ProgressBar, echo
from eelgrid_controller.cli.settings import CliSettings
from eelgrid_controller.formatting import format_milliseconds
from eelgrid_protos.messages import ListNodesRequest, Workload

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SHARED = ("trace", "task_list", "nodes", "pods", "limit", "output")
_SUBMITTING = ("prefix", "in_flight", "fleet_out")


class _TwoFold(click.Command):
    """Its options in three groups: the trace, comparing policies, submitting."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {
            "The trace": [],
            "With --policies: compare them on this machine, no controller needed": [],
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
    """Nodes of the trace that the controller does not have."""
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
                f"the controller lacks {len(absent)} of the trace's {len(nodes)} nodes, such as {min(absent)}",
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
    "--trace", default="auto", show_default=True, help="auto, generated, or the folder or task list of a trace."
)
@click.option(
    "--list", "task_list", default="default", show_default=True, help="The openb trace's task list: gpushare40, ..."
)
@click.option("--nodes", type=_FILE, help="Node list; a controller must have these nodes.")
@click.option("--pods", type=_FILE, help="Task list; without it the trace is looked for.")
@click.option("--limit", type=click.IntRange(1), help="Only the first tasks.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default=None, help="How to print.")
@click.option(
    "--policies",
    metavar="NAME,...",
    help="fgd, pwr, pwr200, eelgrid, ... or all; savings are against the first, of all against fgd.",
)
@click.option("--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="Runs of each policy.")
@click.option(
    "--mode",
    type=click.Choice(["times", "arrivals"]),
    help="times: tasks come and go at their times; arrivals: the published protocol, nothing leaves. "
    "[default: times where the trace has them]",
)
@click.option(
    "--fleet", type=click.IntRange(1), metavar="NODES", help="Only so many nodes, taken evenly over the list."
)
@click.option(
    "--until",
    type=click.FloatRange(0.0, 1e6, min_open=True),
    metavar="HOURS",
    help="End so long after the first arrival. [default: when the last task would be gone if none waited]",
)
@click.option("--failures", type=_FILE, help="CSV: node,down_s,up_s.")
@click.option(
    "--mtbf",
    type=click.FloatRange(0.001, 1e9),
    metavar="HOURS",
    help="Draw failures: how long a node is up, in the mean.",
)
@click.option(
    "--mttr",
    type=click.FloatRange(0.001, 1e9),
    default=4.0,
    show_default=True,
    metavar="HOURS",
    help="How long it is down then.",
)
@click.option("--tariff", type=_FILE, help="CSV: from_s,price_per_kwh,carbon_g_per_kwh.")
@click.option(
    "--tariff-repeat",
    type=click.FloatRange(0.001, 1e6),
    metavar="HOURS",
    help="Let the tariff begin anew after so long, such as 24.",
)
@click.option(
    "--pue",
    type=click.FloatRange(1.0, 10.0),
    default=1.0,
    show_default=True,
    help="What the facility draws over what its machines draw.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("replay-out"),
    show_default=True,
    help="Folder for summary, series and picture.",
)
@click.option(
    "--format", type=click.Choice(["csv", "parquet"]), default="csv", show_default=True, help="Of the tables."
)
@click.option("--plots/--no-plots", default=True, show_default=True, help="Draw a picture, where matplotlib is.")
@click.option("--processes", type=click.IntRange(1, 4096), help="[default: one for each CPU]")
@click.option(
    "--backend",
    type=click.Choice(["processes", "ray"]),
    default="processes",
    show_default=True,
    help="Where runs are made: here, or on your Ray cluster.",
)
@click.option("--prefix", default="", help="Put before every id, to replay once more.")
@click.option(
    "--in-flight", type=click.IntRange(1, 1024), default=8, show_default=True, help="Calls under way at once."
)
@click.option(
    "--fleet-out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the nodes as a fleet file for `eelgrid-agent --simulate`, and submit nothing.",
)
@click.pass_context
def replay(context: click.Context, /, **options: Any) -> None:
    """Replay a trace: compare policies on it, or submit it to a running controller.

    The trace is Alibaba's openb 2023, or one of your own (docs/reference/trace-format.md).

    With --policies it is simulated on this machine under each policy, with departures, failures
    and tariffs, and energy, cost, waiting and use are compared.

    Without, its tasks are submitted to the controller, in order and each once. Interrupt and repeat
    the command as you like: a task that the controller has already is not placed again.
    """
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
                f"--{option} is for a controller, and --policies needs none", "leave out one of the two"
            )
        raise UsageMismatch(
            f"--{option} is for a comparison", "say with --policies what to compare, such as fgd,eelgrid"
        )
    if options["policies"]:
        from eelgrid_controller.cli.policy_comparison import compare_policies

        compare_policies(settings, asked, **options)
    else:
        _submit(settings, options)


def _submit(settings: CliSettings, options: dict[str, Any]) -> None:
    """The half that needs a controller."""
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
        raise CliError(f"cannot write {path}: {error.strerror}", "choose another place with --fleet-out") from None
    click.echo(f"{len(rows)} nodes in {path}; start them with: eelgrid-agent --simulate {path}")
