"""Placement policies on openb traces: python -m bench.openb --data DIR --traces ... --policies ... --out DIR.

Owns the command. Writes summary.csv, savings.csv, runs.csv, curves.csv, bounds.csv
and, where published results lie beside the lists, published.csv; pictures too.
FGD is what savings are measured against: it runs even if it was not asked for.
With --mixes N, mixes drawn from the lists (bench.openb.mixes) take the place of the traces: ours beside FGD and the
best mix of PWR on each, in mixes.csv.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from bench.openb import report
from bench.openb.measure import Bounds, figures, mean_bounds
from bench.openb.mix_comparison import compare_mixes
from bench.openb.published import distances, plain_policy, results_folder
from bench.openb.runs import BoundJob, BoundResult, Job, Result, everything
from bench.openb.traces import load_trace, trace_names
from bench.runner import (
    Options,
    Progress,
    Unusable,
    benchmark,
    data_option,
    plots_option,
    processes_option,
    seeds_option,
)
from eelgrid_controller.replay.csv_reader import TraceError
from eelgrid_controller.replay.openb_protocol import SEEDS, TraceArrays, arrival_order
from eelgrid_controller.replay.run_statistics import ArrivalCurves, mean_curves
from eelgrid_kernels.baselines import find_policy, policy_names

REFERENCE = "fgd"
_SEEDS_MOST = 1000


class Outcome(NamedTuple):
    """What came of all runs."""

    traces: tuple[TraceArrays, ...]
    policies: tuple[str, ...]
    results: Mapping[tuple[str, str], list[Result]]  # by trace and policy, one a seed
    bounds: Mapping[str, list[BoundResult]]  # by trace, one for each of the first seeds

    def mean(self, trace: str, policy: str, seeds: Iterable[int] | None = None) -> ArrivalCurves:
        """The mean curves over the seeds, over all of them by default."""
        kept = None if seeds is None else set(seeds)
        return mean_curves([run.curves for run in self.results[trace, policy] if kept is None or run.seed in kept])

    def bound(self, trace: str) -> Bounds | None:
        """The mean bounds, if they were asked for."""
        found = self.bounds.get(trace)
        return mean_bounds([one.bounds for one in found]) if found else None


def _chosen(asked: str, every: Sequence[str]) -> tuple[str, ...]:
    """The names in a list with commas, each once; every one there is for `all`."""
    wanted = tuple(dict.fromkeys(name.strip() for name in asked.split(",") if name.strip()))
    if not wanted:
        raise Unusable(f"an empty list of names; write all, or some of {', '.join(every)}")
    return tuple(every) if wanted == ("all",) else wanted


def chosen_policies(asked: str) -> tuple[str, ...]:
    """What was asked for; what a name may be is for eelgrid_kernels.baselines to say."""
    chosen = _chosen(asked, policy_names())
    for name in chosen:
        try:
            find_policy(name)
        except ValueError as unknown:
            raise Unusable(str(unknown)) from None
    return chosen


def _work(options: Options) -> Outcome:
    """Makes every run; all that can be refused is refused before the first."""
    if not 1 <= options.seeds <= _SEEDS_MOST or options.processes < 1 or options.bound_seeds < 0:
        raise Unusable(f"take 1 to {_SEEDS_MOST} seeds, at least one process and no negative number of bounds")
    policies = chosen_policies(options.policies)
    traces = tuple(load_trace(options.data, name) for name in _chosen(options.traces, trace_names(options.data)))
    seeds = range(SEEDS[0], SEEDS[0] + options.seeds)
    for trace in traces:
        for seed in seeds:
            arrival_order(trace, seed)  # says now what it would say in the middle of the work
    options.out.mkdir(parents=True, exist_ok=True)
    jobs: list[Job | BoundJob] = [
        BoundJob(trace, seed) for trace in traces for seed in seeds[: options.bound_seeds]
    ]  # the longest first, so that no process waits for them in the end
    needed = dict.fromkeys((REFERENCE, *policies))
    jobs += [Job(trace, policy, seed) for trace in traces for policy in needed for seed in seeds]
    runs, bounded = everything(jobs, options.processes, Progress("jobs").show)
    results: dict[tuple[str, str], list[Result]] = {}
    for one in runs:
        results.setdefault((one.trace, one.policy), []).append(one)
    bounds: dict[str, list[BoundResult]] = {}
    for found in bounded:
        bounds.setdefault(found.trace, []).append(found)
    return Outcome(traces, policies, results, bounds)


def _row(outcome: Outcome, trace: TraceArrays, policy: str) -> report.Row:
    runs = outcome.results[trace.name, policy]
    bounds = outcome.bound(trace.name)
    bounded = None
    if bounds is not None:
        bounded = outcome.mean(trace.name, policy, (one.seed for one in outcome.bounds[trace.name])), bounds
    judged = figures(
        outcome.mean(trace.name, policy),
        outcome.mean(trace.name, REFERENCE),
        trace.fleet.gpu_milli // 1000,
        bounded,
    )
    p50_ns, p99_ns = np.percentile(np.concatenate([run.decision_ns for run in runs]), (50, 99))
    return report.Row(trace.name, policy, len(runs), judged, float(p50_ns) / 1e3, float(p99_ns) / 1e3)


def _run_row(outcome: Outcome, trace: TraceArrays, run: Result) -> report.RunRow:
    judged = figures(run.curves, outcome.mean(run.trace, REFERENCE), trace.fleet.gpu_milli // 1000)
    return report.RunRow(
        run.trace,
        run.policy,
        run.seed,
        judged.saving_mean_pct,
        judged.saving_per_gpu_pct,
        judged.alloc_100_pct,
        judged.alloc_130_pct,
        run.placed,
        len(run.decision_ns),
        run.run_s,
        float(run.idle_ns.mean()) / 1e3,
    )


def _write(outcome: Outcome, out: Path) -> list[report.Row]:
    """All tables that every comparison has; returns the rows of the summary."""
    pairs = [(trace, policy) for trace in outcome.traces for policy in outcome.policies]
    rows = [_row(outcome, trace, policy) for trace, policy in pairs]
    report.write_summary(out / "summary.csv", rows)
    report.write_savings(out / "savings.csv", rows)
    report.write_runs(
        out / "runs.csv",
        (_run_row(outcome, trace, run) for trace, policy in pairs for run in outcome.results[trace.name, policy]),
    )
    report.write_curves(
        out / "curves.csv", ((trace.name, policy, outcome.mean(trace.name, policy)) for trace, policy in pairs)
    )
    report.write_bounds(
        out / "bounds.csv",
        ((one.trace, one.seed, one.bounds) for found in outcome.bounds.values() for one in found),
    )
    return rows


def _compare(outcome: Outcome, data: Path, out: Path) -> str:
    """How far our peers are from what was published."""
    folder = results_folder(data)
    if folder is None:
        return "no folder `published` beside the lists: our peers were not compared with published results"
    spelled = {(trace, plain_policy(policy)): policy for trace, policy in outcome.results}

    def ours(trace: str, plain: str) -> ArrivalCurves | None:
        policy = spelled.get((trace, plain))
        return None if policy is None else outcome.mean(trace, policy)

    found = distances(folder, ours)
    report.write_published(out / "published.csv", found)
    seeds = min(len(runs) for runs in outcome.results.values())
    few = f"; they are means over {len(SEEDS)} seeds, ours over {seeds}" if seeds < len(SEEDS) else ""
    return f"{report.published_table(found)}{few}"


def _draw(outcome: Outcome, rows: Sequence[report.Row], out: Path) -> None:
    from bench.openb import plots  # a second to import

    for trace in outcome.traces:
        plots.draw_trace(
            out / f"{trace.name}.png",
            trace.name,
            {policy: outcome.mean(trace.name, policy) for policy in outcome.policies},
            reference=outcome.mean(trace.name, REFERENCE),
            bounds=outcome.bound(trace.name),
            gpus=trace.fleet.gpu_milli // 1000,
        )
    plots.draw_points(out / "saving_and_grar.png", rows)


@benchmark(out="bench-out/openb", refused=(TraceError, OSError))
@data_option()
@click.option("--traces", default="all", help="suffixes of the task lists, with commas")
@click.option("--policies", default="all", help="names of policies, with commas")
@seeds_option(len(SEEDS), f"how many, from {SEEDS[0]} up")
@click.option("--bound-seeds", default=2, help="how many of them get bounds; 0 for none")
@click.option("--mixes", default=0, help="how many mixes to draw in place of the traces")
@click.option("--seed", default=1, help="of the mixes")
@processes_option
@plots_option
def main(options: Options) -> int:
    """Runs the comparison; 2 if what was asked for is not there."""
    if options.mixes:
        if (
            not (0 < options.mixes <= _SEEDS_MOST and 0 <= options.seed <= _SEEDS_MOST)
            or options.seeds < 1
            or options.processes < 1
        ):
            raise Unusable(
                f"draw 1 to {_SEEDS_MOST} mixes by a seed from 0 to {_SEEDS_MOST}, with at least one order of arrival"
            )
        return compare_mixes(options)
    outcome = _work(options)
    rows = _write(outcome, options.out)
    print(f"{report.table(rows)}\n\n{_compare(outcome, options.data, options.out)}")
    if not options.no_plots:
        _draw(outcome, rows, options.out)
    print(f"\nwritten to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
