"""Placement policies on openb traces: python -m bench.openb --data DIR --traces ... --policies ... --out DIR.

Owns the command. Writes summary.csv, savings.csv, runs.csv, curves.csv, bounds.csv
and, where published results lie beside the lists, published.csv; pictures too.
In the same table stand the distance to the joint LP of saving and allocation without migration (--joint-seeds,
bench.openb.joint), ours with migration (--move-seeds, --moves) and energy with departures (--times-seeds,
--times-nodes; bench.openb.times). 0 seeds leave one out.
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
from bench.openb.joint import JointGap, JointJob, bound_jointly
from bench.openb.lines import Moved, Timed, measure_moves, measure_times
from bench.openb.measure import Bounds, figures, mean_bounds
from bench.openb.mix_comparison import compare_mixes
from bench.openb.policies import OURS, REFERENCE, choose_names, chosen_policies
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

_SEEDS_MOST = 1000


class Outcome(NamedTuple):
    """What came of all runs."""

    traces: tuple[TraceArrays, ...]
    policies: tuple[str, ...]
    results: Mapping[tuple[str, str], list[Result]]  # by trace and policy, one a seed
    bounds: Mapping[str, list[BoundResult]]  # by trace, one for each of the first seeds
    gaps: Sequence[JointGap] = ()
    moved: Mapping[str, Moved] = {}  # by trace, of ours
    timed: Mapping[str, Mapping[str, Timed]] = {}  # by trace and policy

    def mean(self, trace: str, policy: str, seeds: Iterable[int] | None = None) -> ArrivalCurves:
        """The mean curves over the seeds, over all of them by default."""
        kept = None if seeds is None else set(seeds)
        return mean_curves([run.curves for run in self.results[trace, policy] if kept is None or run.seed in kept])

    def bound(self, trace: str) -> Bounds | None:
        """The mean bounds, if they were asked for."""
        found = self.bounds.get(trace)
        return mean_bounds([one.bounds for one in found]) if found else None


def _work(options: Options) -> Outcome:
    """Makes every run; all that can be refused is refused before the first."""
    some = min(options.bound_seeds, options.joint_seeds, options.move_seeds, options.times_seeds)
    if not 1 <= options.seeds <= _SEEDS_MOST or options.processes < 1 or some < 0:
        raise Unusable(
            f"take 1 to {_SEEDS_MOST} seeds, at least one process and no negative number of seeds for a line"
        )
    if not (0.0 <= options.moves <= 100.0 and options.times_nodes >= 1):
        raise Unusable("--moves is 0 to 100 per cent of the running tasks, --times-nodes at least 1")
    policies = chosen_policies(options.policies)
    traces = tuple(load_trace(options.data, name) for name in choose_names(options.traces, trace_names(options.data)))
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
    return _add_lines(options, Outcome(traces, policies, results, bounds))


def _add_lines(options: Options, outcome: Outcome) -> Outcome:
    """The joint bound, migration and departures, each for its first seeds."""
    seeds = range(SEEDS[0], SEEDS[0] + options.seeds)
    jobs = [
        JointJob(
            trace, seed, tuple((name, _run_of(outcome, trace.name, name, seed).course) for name in outcome.policies)
        )
        for trace in outcome.traces
        for seed in seeds[: options.joint_seeds]
    ]
    gaps = bound_jointly(jobs, options.processes, Progress("joint bounds").show) if jobs else []
    moved, timed = {}, {}
    for trace in outcome.traces:
        if options.move_seeds and OURS in outcome.policies:
            reference = outcome.mean(trace.name, REFERENCE)
            moved[trace.name] = measure_moves(trace, seeds[: options.move_seeds], options.moves / 100.0, reference)
        if options.times_seeds:
            names = tuple(dict.fromkeys((REFERENCE, *outcome.policies)))
            fleet, first = options.times_nodes, seeds[: options.times_seeds]
            timed[trace.name] = measure_times(
                options.data, trace.name, fleet, names, seeds=first, processes=options.processes
            )
    return outcome._replace(gaps=gaps, moved=moved, timed=timed)


def _run_of(outcome: Outcome, trace: str, policy: str, seed: int) -> Result:
    return next(run for run in outcome.results[trace, policy] if run.seed == seed)


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
    gaps = [gap.gap_pct for gap in outcome.gaps if (gap.trace, gap.policy) == (trace.name, policy)]
    return report.Row(
        trace.name,
        policy,
        len(runs),
        judged,
        float(p50_ns) / 1e3,
        float(p99_ns) / 1e3,
        float(np.mean(gaps)) if gaps else None,
        outcome.moved.get(trace.name) if policy == OURS else None,
        outcome.timed.get(trace.name, {}).get(policy),
    )


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
    report.write_joint(out / "joint.csv", outcome.gaps)
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
@click.option("--joint-seeds", default=1, help="how many of them get the joint bound, for each policy; 0 for none")
@click.option("--move-seeds", default=1, help="how many of them are moved; 0 for none")
@click.option("--moves", default=5.0, help="most moves, in per cent of the running tasks")
@click.option("--times-seeds", default=1, help="how many of them are played with departures; 0 for none")
@click.option("--times-nodes", default=60, help="nodes of the fleet that is played with departures")
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
