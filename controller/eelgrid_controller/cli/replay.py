"""eelctl replay: submits a trace to a running controller, or compares policies on it without one.

The package replay loads and submits traces and runs policies; it is imported when the command runs, since numpy and the
kernels load slowly. Ids are the tasks' names behind a prefix, so that submitting can be repeated after any interruption
and places nothing twice. A comparison is a table with a row per policy, the means over the seeds; a column in which
nothing happened (no restart, no tariff) is left out.
"""

import asyncio
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eelgrid_controller.cli.confirmation import confirm_change, yes_option
from eelgrid_controller.cli.connection import (
    CliError,
    CliSettings,
    FiniteRange,
    NameNotFound,
    UsageMismatch,
    connect_operators,
    iterate_pages,
    tls_files,
)
from eelgrid_controller.cli.output import ProgressBar, echo
from eelgrid_controller.errors import LibraryMissing
from eelgrid_controller.formatting import count_noun, format_milliseconds
from eelgrid_protos.messages import GetSummaryRequest, ListNodesRequest, Workload

if TYPE_CHECKING:
    from eelgrid_controller.replay.policy_comparison import (
        ArrivalRunResult,
        ArrivalScenario,
        ResultTable,
        RunResult,
        TableCell,
        TimedRunResult,
        TimedScenario,
    )
    from eelgrid_controller.replay.trace_loading import LoadedTrace

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SHARED = ("trace", "task_list", "nodes", "pods", "limit", "output")
_SUBMITTING = ("prefix", "queue", "in_flight", "fleet_out", "yes")


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


def _refuse_absent_nodes(client: Any, settings: CliSettings, wanted: set[str]) -> None:
    """Raises NameNotFound if the controller lacks nodes of the trace."""
    if not wanted:
        return
    listed = iterate_pages(client.list_nodes, ListNodesRequest(), "nodes", timeout_s=settings.timeout_s)
    if absent := wanted - {node.inventory.node_name for node in listed}:
        raise NameNotFound(
            f"the controller lacks {len(absent)} of the trace's {len(wanted)} nodes, for example {min(absent)}",
            "write a fleet file with --fleet-out and start `eelgrid-agent --simulate` on it, or leave out --nodes",
        )


def _confirm_submission(
    settings: CliSettings, requests: Sequence[Any], nodes: set[str], source: str, yes: bool
) -> None:
    """Asks before several tasks are submitted; raises ControllerUnreachable at once where nobody answers."""
    with connect_operators(settings) as client:
        summary = client.get_summary(GetSummaryRequest(), timeout=settings.timeout_s).summary
        _refuse_absent_nodes(client, settings, nodes)
    if len(requests) < 2:
        return
    fleet = f"{count_noun(summary.nodes_ready, 'node')}, {count_noun(summary.gpus, 'GPU')}"
    confirm_change(
        f"Submitting {count_noun(len(requests), 'task')} to {settings.controller} ({fleet})",
        yes=yes,
        effects=(
            f"trace: {source}",
            "each task becomes a workload that stays until somebody cancels it",
        ),
        remedy="submit fewer with --limit, or compare policies without a controller with --policies",
    )


async def _run(settings: CliSettings, requests: list[Any], in_flight: int) -> Any:
    from eelgrid_controller.replay.submitter import SubmitLimits, Submitter
    from eelgrid_protos import rpc, transport

    with connect_operators(settings) as client:
        leader = client.find_leader(settings.timeout_s)
    channel = transport.open_channel(leader, tls=tls_files(settings), insecure=settings.insecure)
    async with channel:
        submitter = Submitter(
            operators=rpc.build_client(rpc.OPERATOR_SERVICE, channel),
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


_PIPE_WIDTH = 200
_UNBOUND = 10_000


def policy_means(table: "ResultTable") -> list[dict[str, Any]]:
    """Returns a row per policy: the means of its numbers, and the number of seeds."""
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    found = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = [row for row in rows if row["policy"] == policy]
        mean: dict[str, Any] = {"trace": mine[0]["trace"], "policy": policy, "seeds": len(mine)}
        for column in table.columns:
            values: list[TableCell] = [row[column] for row in mine]
            if column not in {"trace", "policy", "seed"}:
                mean[column] = values[0] if isinstance(values[0], str) else statistics.fmean(map(float, values))
        found.append(mean)
    return found


def _amount(value: float) -> str:
    """Formats a number with four significant digits, and at most two decimals."""
    return f"{value:,.{max(0, min(2, 3 - math.floor(math.log10(abs(value)))))}f}" if value else "0"


def _count(value: float) -> str:
    """Formats a mean of whole numbers."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def _format_wait(value_s: float) -> str:
    if value_s < 60.0:
        return f"{value_s:.1f} s"
    return f"{value_s / 60.0:.1f} min" if value_s < 3600.0 else f"{value_s / 3600.0:.1f} h"


_Column = tuple[str, str, Callable[[float], str], bool]
# Title, key, format, and whether it is shown even if all values are 0.
_TIMES: tuple[_Column, ...] = (
    ("energy\nkWh", "energy_kwh", _amount, True),
    ("saved\n%", "saved_pct", "{:.2f}".format, True),
    ("over idle\nkWh", "energy_over_idle_kwh", _amount, True),
    ("cost\n", "cost", _amount, False),
    ("carbon\nkg", "carbon_kg", _amount, False),
    ("wait\nmean", "wait_mean_s", _format_wait, True),
    ("wait\np95", "wait_p95_s", _format_wait, True),
    ("GPUs\nmean", "gpus_allocated_mean", _amount, True),
    ("finished\n", "finished", _count, True),
    ("running\nat the end", "running", _count, False),
    ("waiting\nat the end", "waiting", _count, False),
    ("refused\n", "refused", _count, True),
    ("restarts\n", "restarts", _count, False),
    ("lost\nGPU h", "lost_gpu_h", _amount, False),
)
_ARRIVALS: tuple[_Column, ...] = (
    ("saved 0.1-0.8\n%", "saving_mean_pct", "{:.2f}".format, True),
    ("GRAR\nat 1.0", "grar_1", "{:.4f}".format, True),
    ("allocated at\n100 % arrived", "alloc_100_pct", "{:.2f} %".format, True),
    ("allocated at\n130 % arrived", "alloc_130_pct", "{:.2f} %".format, True),
    ("power at 0.5\nkW", "power_half_w", lambda value: f"{value / 1e3:,.1f}", True),
    ("power at 1.0\nkW", "power_full_w", lambda value: f"{value / 1e3:,.1f}", True),
    ("placed\n", "placed", _count, True),
    ("refused\n", "refused", _count, True),
)


def _facts(
    found: "LoadedTrace", how: "ArrivalScenario | TimedScenario", rows: list[dict[str, Any]]
) -> Mapping[str, str]:
    from eelgrid_controller.replay.policy_comparison import TimedScenario

    gpus = how.trace.fleet.gpu_milli // 1000
    facts = {
        "trace": f"{found.name}: {len(found.tasks):,} tasks; {found.where}",
        "fleet": f"{len(found.nodes):,} nodes, {gpus:,} GPUs",
        "mode": "arrivals only, sampled up to 1.3 times the GPUs; nothing ends",
    }
    if isinstance(how, TimedScenario):
        hours = (how.end_s - how.schedule.begin_s) / 3600.0
        facts["mode"] = f"arrivals and departures at their times, {hours:,.1f} h"
        facts["mode"] += f", PUE {how.pue:g}" if how.pue != 1.0 else ""
    facts["rows"] = f"means over {rows[0]['seeds']} seed{'' if rows[0]['seeds'] == 1 else 's'}; saved against "
    facts["rows"] += str(rows[0]["policy"])
    return facts


def _laid(titles: list[str], lines: list[list[str]]) -> Any:
    """Builds a table whose first column has names and whose other columns have numbers."""
    from rich import box
    from rich.table import Table as RichTable

    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def print_comparison(
    found: "LoadedTrace", how: "ArrivalScenario | TimedScenario", summary: "ResultTable", width: int | None = None
) -> None:
    """Prints a line per policy to stdout, or a column per policy where lines do not fit; never truncates a number."""
    from rich.console import Console
    from rich.measure import Measurement

    from eelgrid_controller.replay.policy_comparison import ArrivalScenario, TimedScenario

    rows = policy_means(summary)
    columns = _ARRIVALS if isinstance(how, ArrivalScenario) else _TIMES
    for row in rows:
        if isinstance(how, TimedScenario):
            reference = rows[0]["energy_kwh"]
            row["saved_pct"] = 100.0 * (reference - row["energy_kwh"]) / reference if reference else 0.0
    shown = [column for column in columns if column[3] or any(row[column[1]] for row in rows)]
    cells = [[row["policy"], *(spelled(row[key]) for _, key, spelled, _ in shown)] for row in rows]
    titles = ["policy\n", *(title for title, *_ in shown)]
    flat = [title.replace("\n", " ").strip() for title in titles]
    across = [[title, *(line[index] for line in cells)] for index, title in enumerate(flat)]
    given = width or (None if sys.stdout.isatty() else _PIPE_WIDTH)
    console = Console(no_color=bool(os.environ.get("NO_COLOR")), width=given)
    for name, text in _facts(found, how, rows).items():
        console.print(f"{name:10} {text}", highlight=False, markup=False, soft_wrap=True)

    unbound = console.options.update_width(_UNBOUND)
    tables = _laid(titles, cells), _laid(across[0], across[1:])
    widths = [Measurement.get(console, unbound, table).maximum for table in tables]
    best = 0 if widths[0] <= max(console.width, widths[1]) else 1
    console.width = max(console.width, widths[best])
    console.print(tables[best])


_POLICIES_MOST = 100
_REFERENCE = "fgd"  # of all, as in the bench
_HOUR_S = 3600.0
_TIMES_ONLY = ("until", "failures", "mtbf", "mttr", "tariff", "tariff_repeat", "pue")


def compare_policies(settings: CliSettings, asked: frozenset[str], **options: Any) -> None:
    """Compares the policies and prints the table; `asked` are the options that the user gave."""
    from eelgrid_controller.replay.openb_protocol import SEEDS, arrival_order
    from eelgrid_controller.replay.policy_comparison import (
        ArrivalRunResult,
        ArrivalScenario,
        TableFormat,
        TimedRunResult,
        table_writer,
    )
    from eelgrid_controller.replay.trace_loading import TraceSearch, find_trace, sample_nodes_evenly

    names = _policies(options["policies"])
    seeds = range(SEEDS[0], SEEDS[0] + options["seeds"])
    found = find_trace(
        str(options["pods"] or options["trace"]),
        options["task_list"],
        options["nodes"],
        TraceSearch.from_environment(os.environ),
    )
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    found = found._replace(
        nodes=sample_nodes_evenly(found.nodes, options["fleet"]), tasks=found.tasks[: options["limit"]]
    )
    how = _how(found, asked, options)
    if isinstance(how, ArrivalScenario):
        for seed in seeds:
            arrival_order(how.trace, seed)  # says now what it would say in the middle of the work
    write = table_writer(TableFormat(options["format"]))
    out: Path = options["out"]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"cannot write to {out}: {error.strerror}", "choose another folder with --out") from None
    runs = _execute(how, names, seeds, options)
    timed = [run for run in runs if isinstance(run, TimedRunResult)]
    arrivals = [run for run in runs if isinstance(run, ArrivalRunResult)]
    tables = _tables(found.name, timed, arrivals)
    try:
        paths = [write(out, table) for table in tables]
    except OSError as error:
        raise CliError(f"cannot write to {out}: {error.strerror}", "choose another folder with --out") from None
    if options["plots"]:
        paths += _draw(found.name, timed, arrivals, out)
    if settings.output in {"json", "yaml"}:
        click.echo(json.dumps(policy_means(tables[0]), indent=2))  # JSON is YAML too
        return
    print_comparison(found, how, tables[0])
    click.echo(f"written    {', '.join(str(path) for path in paths)}")


def _policies(asked: str) -> tuple[str, ...]:
    from eelgrid_controller.replay.policy_comparison import find_replayed_policy
    from eelgrid_kernels.baselines import policy_names

    chosen = tuple(dict.fromkeys(name.strip() for name in asked.split(",") if name.strip()))
    if chosen == ("all",):
        return tuple(dict.fromkeys((_REFERENCE, *policy_names())))
    if not 1 <= len(chosen) <= _POLICIES_MOST:
        raise UsageMismatch(f"--policies names {len(chosen)} policies", f"name 1 to {_POLICIES_MOST}, or all")
    for name in chosen:
        try:
            find_replayed_policy(name)
        except ValueError as unknown:
            what, _, remedy = str(unknown).partition("; ")
            raise UsageMismatch(what, remedy) from None
    return chosen


def _how(found: "LoadedTrace", asked: frozenset[str], options: dict[str, Any]) -> "ArrivalScenario | TimedScenario":
    """Returns the scenario of all runs; the mode is that of the trace unless given."""
    from eelgrid_controller.replay.openb_protocol import build_trace
    from eelgrid_controller.replay.policy_comparison import ArrivalScenario, RandomFailures, TimedScenario
    from eelgrid_controller.replay.run_statistics import expand_tariff
    from eelgrid_controller.replay.simulation import build_schedule, outages_from_rows
    from eelgrid_controller.replay.site_csv import read_failures, read_tariffs

    trace = build_trace(found.name, found.nodes, found.tasks)
    mode = options["mode"] or ("times" if found.timed else "arrivals")
    if mode == "arrivals":
        if of_times := [name for name in _TIMES_ONLY if name in asked]:
            option = of_times[0].replace("_", "-")
            raise UsageMismatch(
                f"--{option} has no effect with --mode arrivals", "use a trace with times, or leave it out"
            )
        return ArrivalScenario(trace)
    coming = build_schedule(trace, found.tasks)
    end_s = coming.begin_s + options["until"] * _HOUR_S if options["until"] else coming.end_s
    failures: Any = ()
    if options["failures"]:
        if options["mtbf"]:
            raise UsageMismatch("--failures and --mtbf both define when nodes fail", "leave out one of the two")
        failures = outages_from_rows(read_failures(options["failures"], found.nodes), found.nodes)
    elif options["mtbf"]:
        failures = RandomFailures(options["mtbf"] * _HOUR_S, options["mttr"] * _HOUR_S)
    elif "mttr" in asked:
        raise UsageMismatch("--mttr needs --mtbf", "give the mean time between failures with --mtbf")
    prices = None
    if options["tariff"]:
        repeat_s = options["tariff_repeat"] * _HOUR_S if options["tariff_repeat"] else None
        rows = read_tariffs(options["tariff"], None if repeat_s else coming.begin_s)
        try:
            prices = expand_tariff(rows, repeat_s=repeat_s, begin_s=coming.begin_s, end_s=end_s)
        except ValueError as error:
            raise UsageMismatch(str(error), "change --tariff-repeat or the file") from None
    elif "tariff_repeat" in asked:
        raise UsageMismatch("--tariff-repeat needs --tariff", "name the price file with --tariff")
    return TimedScenario(trace, coming, end_s, failures, prices, options["pue"])


def _execute(
    how: "ArrivalScenario | TimedScenario", names: Iterable[str], seeds: Iterable[int], options: dict[str, Any]
) -> "list[RunResult]":
    from eelgrid_controller.replay.policy_comparison import RunBackend, execute_runs, list_runs

    wanted = list_runs(how, names, seeds)
    progress = ProgressBar("simulating", "runs", len(wanted))
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done = count
        progress(count)

    try:
        return execute_runs(wanted, RunBackend(options["backend"]), options["processes"], tell)
    except KeyboardInterrupt:
        what = f"interrupted after {done} of {len(wanted)} runs; nothing was written"
        raise CliError(what, "run the command again: the same seeds give the same results") from None
    finally:
        progress.stop()


def _tables(
    name: str, timed: "Sequence[TimedRunResult]", arrivals: "Sequence[ArrivalRunResult]"
) -> "tuple[ResultTable, ResultTable]":
    """The summary and the series of the runs, which are of one kind."""
    from eelgrid_controller.replay.policy_comparison import (
        arrivals_series,
        arrivals_summary,
        times_series,
        times_summary,
    )

    if timed:
        return times_summary(name, timed), times_series(timed)
    return arrivals_summary(name, arrivals), arrivals_series(arrivals)


def _draw(
    name: str, timed: "Sequence[TimedRunResult]", arrivals: "Sequence[ArrivalRunResult]", out: Path
) -> list[Path]:
    """Draws the plots, or prints a note if the library is missing."""
    from eelgrid_controller.replay.policy_comparison import plot_arrivals, plot_times

    path = out / "comparison.png"
    try:
        if timed:
            plot_times(path, name, timed)
        else:
            plot_arrivals(path, name, arrivals)
    except LibraryMissing as missing:
        click.echo(f"note: no plot: {missing.problem}; {missing.remedy}", err=True)
        return []
    return [path]


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
    help="Policies to compare: fgd, pwr, pwr200, eelgrid, eelgrid-energy, eelgrid-performance, ... or all. Savings are relative to the first, with all to fgd.",
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
    type=FiniteRange(0.0, 1e6, min_open=True),
    metavar="HOURS",
    help="End this long after the first arrival. [default: when the last task would end if none waited]",
)
@click.option("--failures", type=_FILE, help="CSV file of node failures: node,down_s,up_s.")
@click.option(
    "--mtbf",
    type=FiniteRange(0.001, 1e9),
    metavar="HOURS",
    help="Simulate random failures with this mean time between failures of a node.",
)
@click.option(
    "--mttr",
    type=FiniteRange(0.001, 1e9),
    default=4.0,
    show_default=True,
    metavar="HOURS",
    help="Mean time to repair of a failed node.",
)
@click.option("--tariff", type=_FILE, help="CSV file of prices: from_s,price_per_kwh,carbon_g_per_kwh.")
@click.option(
    "--tariff-repeat",
    type=FiniteRange(0.001, 1e6),
    metavar="HOURS",
    help="Repeat the tariff after this long, for example 24.",
)
@click.option(
    "--pue",
    type=FiniteRange(1.0, 10.0),
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
@click.option("--queue", help="Queue of every workload. [default: the task's quality of service, such as ls]")
@click.option(
    "--in-flight", type=click.IntRange(1, 1024), default=8, show_default=True, help="Number of concurrent calls."
)
@click.option(
    "--fleet-out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the nodes to a fleet file for `eelgrid-agent --simulate`, and submit nothing.",
)
@yes_option
@click.pass_context
def replay(context: click.Context, /, **options: Any) -> None:
    """Replay a trace: compare policies on it, or submit it to a running controller.

    The trace is Alibaba's openb 2023, or one of your own (docs/reference/trace-format.md).

    With --policies, simulates the trace on this machine under each policy, with departures, failures and tariffs, and
    compares energy, cost, waiting and utilization.

    Without --policies, submits the tasks to the controller, after a question, in order and each once. You can interrupt
    and repeat the command: a task that the controller already has is not placed again.

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
        compare_policies(settings, asked, **options)
    else:
        _submit(settings, options)


def _submit(settings: CliSettings, options: dict[str, Any]) -> None:
    """Submits the trace to the controller, or writes its fleet file."""
    from eelgrid_controller.replay.openb import submission_of_task
    from eelgrid_controller.replay.trace_loading import TraceSearch, find_trace, read_nodes, read_tasks

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
    requests = [
        submission_of_task(task, prefix=options["prefix"], queue=options["queue"]) for task in tasks[: options["limit"]]
    ]
    source = str(pods) if pods else found.where if found else ""
    _confirm_submission(settings, requests, {row.name for row in rows}, source, options["yes"])
    report = asyncio.run(_run(settings, requests, options["in_flight"]))
    _print(settings, report, source)
    if report.refused:
        raise CliError(f"{count_noun(report.refused, 'task was', 'tasks were')} refused", "see the reasons above")


def _write_fleet(path: Path, rows: Any) -> None:
    from eelgrid_controller.replay.openb import write_fleet_file
    from eelgrid_protos import catalogue

    try:
        write_fleet_file(path, rows, catalogue.load_catalogue().products)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}", "choose another file with --fleet-out") from None
    click.echo(f"wrote {count_noun(len(rows), 'node')} to {path}; start them with: eelgrid-agent --simulate {path}")
