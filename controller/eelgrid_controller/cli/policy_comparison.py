"""Policy comparison of `eelctl replay`, without a controller: runs, files, plots and the table.

Imported when it is needed, since numpy and the kernels load slowly. Each row of the table has the means over the seeds;
a column in which nothing happened (no restart, no tariff) is left out.
"""

import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.connection import CliError, CliSettings, UsageMismatch
from eelgrid_controller.cli.output import ProgressBar
from eelgrid_controller.errors import LibraryMissing
from eelgrid_controller.replay import results
from eelgrid_controller.replay.openb_protocol import SEEDS, arrival_order, build_trace
from eelgrid_controller.replay.openb_source import TraceSearch
from eelgrid_controller.replay.policy_comparison import (
    ArrivalRunResult,
    ArrivalScenario,
    RandomFailures,
    RunBackend,
    RunResult,
    TimedRunResult,
    TimedScenario,
    execute_runs,
    list_runs,
)
from eelgrid_controller.replay.results import ResultTable, TableCell
from eelgrid_controller.replay.run_statistics import expand_tariff
from eelgrid_controller.replay.simulation import build_schedule, outages_from_rows
from eelgrid_controller.replay.site_csv import read_failures, read_tariffs
from eelgrid_controller.replay.trace_loading import LoadedTrace, find_trace, sample_nodes_evenly

_PIPE_WIDTH = 200
_UNBOUND = 10_000


def policy_means(table: ResultTable) -> list[dict[str, Any]]:
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


def _facts(found: LoadedTrace, how: ArrivalScenario | TimedScenario, rows: list[dict[str, Any]]) -> Mapping[str, str]:
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
    facts["rows"] = f"means over {rows[0]['seeds']} seed{'s' if rows[0]['seeds'] > 1 else ''}; saved against "
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
    found: LoadedTrace, how: ArrivalScenario | TimedScenario, summary: ResultTable, width: int | None = None
) -> None:
    """Prints a line per policy to stdout, or a column per policy where lines do not fit; never truncates a number."""
    from rich.console import Console
    from rich.measure import Measurement

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
    write = results.table_writer(results.TableFormat(options["format"]))
    out: Path = options["out"]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"cannot write to {out}: {error.strerror}", "choose another folder with --out") from None
    runs = _run(how, names, seeds, options)
    paths = _write(found.name, runs, write, out)
    if options["plots"]:
        paths += _draw(found.name, runs, out)
    _print(settings, found, how, runs, paths)


def _policies(asked: str) -> tuple[str, ...]:
    from eelgrid_kernels.baselines import find_policy, policy_names

    chosen = tuple(dict.fromkeys(name.strip() for name in asked.split(",") if name.strip()))
    if chosen == ("all",):
        return tuple(dict.fromkeys((_REFERENCE, *policy_names())))
    if not 1 <= len(chosen) <= _POLICIES_MOST:
        raise UsageMismatch(f"--policies names {len(chosen)} policies", f"name 1 to {_POLICIES_MOST}, or all")
    for name in chosen:
        try:
            find_policy(name)
        except ValueError as unknown:
            what, _, remedy = str(unknown).partition("; ")
            raise UsageMismatch(what, remedy) from None
    return chosen


def _how(found: LoadedTrace, asked: frozenset[str], options: dict[str, Any]) -> ArrivalScenario | TimedScenario:
    """Returns the scenario of all runs; the mode is that of the trace unless given."""
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


def _run(
    how: ArrivalScenario | TimedScenario, names: Iterable[str], seeds: Iterable[int], options: dict[str, Any]
) -> list[RunResult]:
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


def _timed_runs(runs: Sequence[RunResult]) -> list[TimedRunResult]:
    return [run for run in runs if isinstance(run, TimedRunResult)]


def _arriving(runs: Sequence[RunResult]) -> list[ArrivalRunResult]:
    return [run for run in runs if isinstance(run, ArrivalRunResult)]


def _summary(name: str, runs: Sequence[RunResult]) -> results.ResultTable:
    timed = _timed_runs(runs)
    return results.times_summary(name, timed) if timed else results.arrivals_summary(name, _arriving(runs))


def _write(name: str, runs: Sequence[RunResult], write: Any, out: Path) -> list[Path]:
    timed = _timed_runs(runs)
    series = results.times_series(timed) if timed else results.arrivals_series(_arriving(runs))
    try:
        return [write(out, _summary(name, runs)), write(out, series)]
    except OSError as error:
        raise CliError(f"cannot write to {out}: {error.strerror}", "choose another folder with --out") from None


def _draw(name: str, runs: Sequence[RunResult], out: Path) -> list[Path]:
    """Draws the plots, or prints a note if the library is missing."""
    path = out / "comparison.png"
    try:
        timed = _timed_runs(runs)
        if timed:
            results.plot_times(path, name, timed)
        else:
            results.plot_arrivals(path, name, _arriving(runs))
    except LibraryMissing as missing:
        click.echo(f"note: no plot: {missing.problem}; {missing.remedy}", err=True)
        return []
    return [path]


def _print(
    settings: CliSettings,
    found: LoadedTrace,
    how: ArrivalScenario | TimedScenario,
    runs: Sequence[RunResult],
    paths: list[Path],
) -> None:

    if settings.output in {"json", "yaml"}:
        import json

        click.echo(json.dumps(policy_means(_summary(found.name, runs)), indent=2))  # JSON is YAML too
        return
    print_comparison(found, how, _summary(found.name, runs))
    click.echo(f"written    {', '.join(str(path) for path in paths)}")
