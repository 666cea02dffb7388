"""The half of eelctl replay that needs no controller: a trace under several policies, compared.

Owns what the options mean, what is refused before any work, and the table.
Runs, sums, files and pictures are replay/'s. Libraries that only this needs are
imported when they are needed.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.failure import Misused, Stop
from eelgrid_controller.cli.progress import Progress
from eelgrid_controller.cli.settings import Settings
from eelgrid_controller.replay import results
from eelgrid_controller.replay.accounts import tariff
from eelgrid_controller.replay.comparison import (
    Arrivals,
    ArrivalsResult,
    Backend,
    Breakdowns,
    Result,
    Times,
    TimesResult,
    everything,
    jobs,
)
from eelgrid_controller.replay.libraries import LibraryMissing
from eelgrid_controller.replay.locate import Surroundings
from eelgrid_controller.replay.protocol import SEEDS, arrivals, build
from eelgrid_controller.replay.schedule import outages_of, schedule
from eelgrid_controller.replay.site_csv import read_failures, read_tariffs
from eelgrid_controller.replay.traces import Found, evenly, find

__all__ = ["simulate"]

_POLICIES_MOST = 100
_REFERENCE = "fgd"  # of all, as in the bench
_HOUR_S = 3600.0
_TIMES_ONLY = ("until", "failures", "mtbf", "mttr", "tariff", "tariff_repeat", "pue")


def simulate(settings: Settings, asked: frozenset[str], **options: Any) -> None:
    """Compares the policies; `asked` are the options that the user wrote."""
    names = _policies(options["policies"])
    seeds = range(SEEDS[0], SEEDS[0] + options["seeds"])
    found = find(
        str(options["pods"] or options["trace"]), options["task_list"], options["nodes"],
        Surroundings.real(os.environ),
    )  # fmt: skip
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    found = found._replace(nodes=evenly(found.nodes, options["fleet"]), tasks=found.tasks[: options["limit"]])
    how = _how(found, asked, options)
    if isinstance(how, Arrivals):
        for seed in seeds:
            arrivals(how.trace, seed)  # says now what it would say in the middle of the work
    write = results.writer(results.Format(options["format"]))
    out: Path = options["out"]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Stop(f"cannot write to {out}: {error.strerror}", "choose another folder with --out") from None
    runs = _run(how, names, seeds, options)
    paths = _write(found.name, runs, write, out)
    if options["plots"]:
        paths += _draw(found.name, runs, out)
    _print(settings, found, how, runs, paths)


def _policies(asked: str) -> tuple[str, ...]:
    from eelgrid_kernels.policies import names, policy

    chosen = tuple(dict.fromkeys(name.strip() for name in asked.split(",") if name.strip()))
    if chosen == ("all",):
        return tuple(dict.fromkeys((_REFERENCE, *names())))
    if not 1 <= len(chosen) <= _POLICIES_MOST:
        raise Misused(f"--policies names {len(chosen)} policies", f"write 1 to {_POLICIES_MOST}, or all")
    for name in chosen:
        try:
            policy(name)
        except ValueError as unknown:
            what, _, remedy = str(unknown).partition("; ")
            raise Misused(what, remedy) from None
    return chosen


def _how(found: Found, asked: frozenset[str], options: dict[str, Any]) -> Arrivals | Times:
    """What every run is made of; the mode is that of the trace unless it was asked for."""
    trace = build(found.name, found.nodes, found.tasks)
    mode = options["mode"] or ("times" if found.timed else "arrivals")
    if mode == "arrivals":
        if of_times := [name for name in _TIMES_ONLY if name in asked]:
            option = of_times[0].replace("_", "-")
            raise Misused(f"--{option} says nothing in the mode of arrivals", "give a list with times, or leave it out")
        return Arrivals(trace)
    coming = schedule(trace, found.tasks)
    end_s = coming.begin_s + options["until"] * _HOUR_S if options["until"] else coming.end_s
    failures: Any = ()
    if options["failures"]:
        if options["mtbf"]:
            raise Misused("--failures and --mtbf both say when nodes fail", "leave out one of the two")
        failures = outages_of(read_failures(options["failures"], found.nodes), found.nodes)
    elif options["mtbf"]:
        failures = Breakdowns(options["mtbf"] * _HOUR_S, options["mttr"] * _HOUR_S)
    elif "mttr" in asked:
        raise Misused("--mttr alone draws no failures", "say with --mtbf how long a node is up")
    prices = None
    if options["tariff"]:
        repeat_s = options["tariff_repeat"] * _HOUR_S if options["tariff_repeat"] else None
        rows = read_tariffs(options["tariff"], None if repeat_s else coming.begin_s)
        try:
            prices = tariff(rows, repeat_s=repeat_s, begin_s=coming.begin_s, end_s=end_s)
        except ValueError as error:
            raise Misused(str(error), "change --tariff-repeat or the file") from None
    elif "tariff_repeat" in asked:
        raise Misused("--tariff-repeat repeats nothing", "name the prices with --tariff")
    return Times(trace, coming, end_s, failures, prices, options["pue"])


def _run(how: Arrivals | Times, names: Iterable[str], seeds: Iterable[int], options: dict[str, Any]) -> list[Result]:
    wanted = jobs(how, names, seeds)
    progress = Progress("simulating", "runs", len(wanted))
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done = count
        progress(count)

    try:
        return everything(wanted, Backend(options["backend"]), options["processes"], tell)
    except KeyboardInterrupt:
        what = f"interrupted after {done} of {len(wanted)} runs; nothing was written"
        raise Stop(what, "run the command again: the same seeds give the same results") from None
    finally:
        progress.stop()


def _timed(runs: Sequence[Result]) -> list[TimesResult]:
    return [run for run in runs if isinstance(run, TimesResult)]


def _arriving(runs: Sequence[Result]) -> list[ArrivalsResult]:
    return [run for run in runs if isinstance(run, ArrivalsResult)]


def _summary(name: str, runs: Sequence[Result]) -> results.Table:
    timed = _timed(runs)
    return results.times_summary(name, timed) if timed else results.arrivals_summary(name, _arriving(runs))


def _write(name: str, runs: Sequence[Result], write: Any, out: Path) -> list[Path]:
    timed = _timed(runs)
    series = results.times_series(timed) if timed else results.arrivals_series(_arriving(runs))
    try:
        return [write(out, _summary(name, runs)), write(out, series)]
    except OSError as error:
        raise Stop(f"cannot write to {out}: {error.strerror}", "choose another folder with --out") from None


def _draw(name: str, runs: Sequence[Result], out: Path) -> list[Path]:
    """The picture, or a note where there is nothing to draw with."""
    from eelgrid_controller.replay import pictures

    path = out / "comparison.png"
    try:
        timed = _timed(runs)
        if timed:
            pictures.draw_times(path, name, timed)
        else:
            pictures.draw_arrivals(path, name, _arriving(runs))
    except LibraryMissing as missing:
        click.echo(f"note: no picture: {missing.problem}; {missing.remedy}", err=True)
        return []
    return [path]


def _print(settings: Settings, found: Found, how: Arrivals | Times, runs: Sequence[Result], paths: list[Path]) -> None:
    from eelgrid_controller.cli.comparison_table import means, show

    if settings.output in {"json", "yaml"}:
        import json

        click.echo(json.dumps(means(_summary(found.name, runs)), indent=2))  # JSON is YAML too
        return
    show(found, how, _summary(found.name, runs))
    click.echo(f"written    {', '.join(str(path) for path in paths)}")
