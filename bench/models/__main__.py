"""Profiles on measured data sets: python -m bench.models --data DIR --out DIR.

Owns the command. Writes summary.csv (its columns: bench/models/report.py), drift.csv, costs.csv,
summary.png and calibration.png. Configurations, workloads and GPU models are held out
(bench/models/splits.py); peers (bench/models/peers.py) are fitted on the same points.

Rows with a target run first, then their peers, then whole workloads and GPU models. After --minutes
no further run starts: skipped runs are reported, and the column `runs` gives the number behind each row.
"""

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
from joblib import Parallel, delayed

from bench.models import costs, drifts, report
from bench.models.peers import PEERS
from bench.models.runs import OURS, Job, Result, run
from bench.models.splits import GIVEN, by_configuration, by_gpu, by_workload
from bench.models.tables import DATA_SETS, DataSet, Unreadable, load
from bench.runner import Options, Progress, benchmark, data_option, plots_option, processes_option, seeds_option
from bench.tables import format_table, write_csv

_SEEDS_MOST = 100
_SMALL = 300  # points; smaller data sets get more seeds: the coverage of 29 held-out points scatters by 6 %
_MORE = 10
_USUAL = ("nearest", "linear", "gbm")  # peers of a run of minutes; the others take an hour
_GIVEN_BACK = ("nearest", "linear", "gp")  # peers that also see whole workloads held out


def _chosen(asked: str, known: Sequence[str], flag: str) -> list[str]:
    names = list(known) if asked == "all" else [one for one in asked.split(",") if one and one != "none"]
    for name in names:
        if name not in known:
            raise Unreadable(f"{flag}: {name!r} is none of {', '.join(known)}")
    return names


def _shares(asked: str) -> list[float]:
    try:
        found = [float(one) for one in asked.split(",")]
    except ValueError:
        found = []
    if not found or not all(0.0 < one < 1.0 for one in found):
        raise Unreadable(f"--held-out: {asked!r} are no shares between 0 and 1; write 0.2,0.8")
    return found


def _jobs(data_set: DataSet, options: Options, peers: Sequence[str], shares: Sequence[float]) -> list[Job]:
    more = _MORE if len(data_set.cells) < _SMALL else 1
    jobs = []
    for share in shares:
        for method in (OURS, *peers):
            seeds = more * (options.seeds if method == OURS else options.peer_seeds)
            splits = (by_configuration(data_set.cells, share, seed) for seed in range(seeds))
            jobs += [Job(data_set, (split,), method, seed) for seed, split in enumerate(splits)]
    if options.only_configurations:
        return jobs
    folds = by_workload(data_set, 0)
    together = [tuple(folds[begin : begin + len(GIVEN)]) for begin in range(0, len(folds), len(GIVEN))]
    whole = (OURS, *(peer for peer in peers if peer in _GIVEN_BACK))
    jobs += [Job(data_set, splits, method, seed) for method in whole for seed, splits in enumerate(together)]
    jobs += [Job(data_set, (split,), OURS, seed) for seed, split in enumerate(by_gpu(data_set, 0))]
    return jobs


def _turn(job: Job) -> tuple[int, float]:
    """What has a target first; of equals the longest."""
    first = job.splits[0].name
    place = 0 if first == "configuration 0.2" else 1 if first.startswith("configuration") else 2
    return 2 * place + (job.method != OURS), -float(len(job.data_set.cells) * len(job.data_set.told))


class _Done(NamedTuple):
    """A job's results, and the most memory that its process ever had."""

    results: list[Result]
    resident_bytes: int


def _one_thread(job: Job) -> _Done:
    """Processes share the cores already."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        return _Done(run(job), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)


def _run(options: Options) -> tuple[list[DataSet], list[Result]]:
    peers = _chosen(options.peers, list(PEERS), "--peers")
    shares = _shares(options.held_out)
    if not 1 <= options.seeds <= _SEEDS_MOST or not 1 <= options.peer_seeds <= _SEEDS_MOST:
        raise Unreadable(f"take 1 to {_SEEDS_MOST} seeds")
    sets = [one for name in _chosen(options.sets, list(DATA_SETS), "--sets") for one in load(options.data, name)]
    jobs = [job for one in sets for job in _jobs(one, options, peers, shares)]
    jobs.sort(key=_turn)
    results: list[Result] = []
    begin_s, resident_bytes = time.monotonic(), 0
    until_s = begin_s + 60.0 * options.minutes
    started = (delayed(_one_thread)(job) for job in jobs if time.monotonic() < until_s)
    done = Parallel(n_jobs=max(1, options.processes), return_as="generator", pre_dispatch="n_jobs")(started)
    count, progress = 0, Progress("runs")
    for count, found in enumerate(done, 1):
        results += found.results
        resident_bytes = max(resident_bytes, found.resident_bytes)
        progress.show(count, len(jobs))
    if not results:
        raise Unreadable(f"--minutes {options.minutes:g}: nothing ran in so little time; give it an hour")
    spent_s = time.monotonic() - begin_s
    print(
        f"{count} of {len(jobs)} runs in {spent_s:.0f} s, {options.processes} at a time, "
        f"at most {resident_bytes >> 20} MiB in one"
    )
    return sets, results


def _told_costs(sets: Sequence[DataSet], out: Path) -> None:
    for name, columns, rows in (
        ("drift.csv", drifts.COLUMNS, [tuple(row) for row in drifts.measured(20)]),
        ("costs.csv", costs.COLUMNS, [tuple(row) for row in costs.measured(sets[0])]),
    ):
        text = [
            tuple("" if cell is None else cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row)
            for row in rows
        ]
        write_csv(out / name, columns, text)
        print(f"\n{format_table(columns, text, 1)}")


@benchmark(out="bench-out/models", refused=(Unreadable, OSError))
@data_option()
@click.option("--sets", default="all", help=f"with commas: {', '.join(DATA_SETS)}")
@seeds_option(5, "folds of configurations held out")
@click.option("--peers", default=",".join(_USUAL), help=f"with commas: {', '.join(PEERS)}; all, or none")
@click.option("--peer-seeds", default=1)
@click.option("--held-out", default="0.2,0.8", help="shares of configurations, with commas")
@click.option("--only-configurations", is_flag=True, help="no whole workloads, no GPU models")
@click.option("--no-costs", is_flag=True, help="neither drift.csv nor costs.csv")
@click.option("--minutes", default=60.0, help="no run starts after this time")
@processes_option
@plots_option
def main(options: Options) -> int:
    """Runs the comparison; 2 if what was asked for is not there."""
    sets, results = _run(options)
    order = {one.name: index for index, one in enumerate(sets)}
    rows = sorted(report.rows(results), key=lambda row: (row.split, order[row.data_set]))
    write_csv(options.out / "summary.csv", report.COLUMNS, report.csv_rows(rows))
    print(report.table(rows))
    for one in sets:
        if one.refused:
            print(f"{one.name}: {one.refused} rows say that a configuration did not run; they are not in the figures")
    if not options.no_costs:
        _told_costs(sets, options.out)
    if not options.no_plots:
        from bench.models import plots  # a second to import

        plots.draw_summary(options.out / "summary.png", rows)
        plots.draw_calibration(options.out / "calibration.png", results)
    print(f"\nwritten to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
