"""Power limits for training on Zeus's data (E4): python -m bench.powercap --data DIR --out DIR.

Owns the command. Writes summary.csv (a row a GPU model, workload and policy, and
one for the mean of each model), cluster.csv, transitions.csv, batch.csv,
sweeps.csv, held_out.csv, sensitivity.csv and two pictures. Stops with an error if
anything is above the oracle: that would be a fault of the bench.
"""

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from joblib import Parallel, delayed

from bench.powercap import report
from bench.powercap.batch import Together, together
from bench.powercap.bound import most_throughput
from bench.powercap.certified import allocate_certified
from bench.powercap.fleet import draw
from bench.powercap.peers import PEERS, exceeded, throughput
from bench.powercap.single import NOISE, POLICIES, Noise, Outcome, carried_out, ceiling
from bench.powercap.sweeps import held_out, scatter
from bench.powercap.transitions import Counted, lived_through
from bench.powercap.zeus import MODELS, Data, NotThere, Run, baseline_runs, load, relatives
from bench.runner import Options, benchmark, data_option, plots_option, processes_option, seeds_option
from eelgrid_controller.objectives.power.limit_allocation import AllocationGoal

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)
OURS = "eelgrid"
RUNS = (OURS, "eelgrid_second_run", "eelgrid_fifth_run")
SENSITIVITY = {
    "none": Noise(0.0, 0.0),
    "1 % time, 0.5 % power": Noise(0.01, 0.005),
    "2 %, 1 % (the headline)": NOISE,
    "2 %, 1 % at 10 s, white": Noise(0.02, 0.01, white=True),
    "4 %, 2 %": Noise(0.04, 0.02),
}


class AboveOracle(RuntimeError):
    """A saving that cannot be: a fault of the bench."""


def checked(run: Run, policy: str, outcomes: Sequence[Outcome]) -> report.Row:
    """The row of a policy. Raises AboveOracle for a claim above the oracle, or a draw below any limits in turn."""
    most = ceiling(run.curve)
    for one in outcomes:
        if one.claimed > most.oracle + 1e-9:
            raise AboveOracle(f"{run.model} {run.key.workload} {policy}: claims {one.claimed}, oracle {most.oracle}")
        if one.kept and one.drawn > most.in_turn + 1e-9:
            raise AboveOracle(f"{run.model} {run.key.workload} {policy}: drew {one.drawn}, bound {most.in_turn}")
    return report.row(run, policy, outcomes, most)


def single(runs: Sequence[Run], policies: Iterable[str], seeds: int, noise: Noise, pool: Parallel) -> list[report.Row]:
    """Every policy on every run, over the seeds."""
    asked = [(run, policy) for run in runs for policy in policies]
    done = pool(
        delayed(carried_out)(run, policy, seed, relatives(runs, run), noise)
        for run, policy in asked
        for seed in range(seeds)
    )
    return [
        checked(run, policy, done[place * seeds : (place + 1) * seeds]) for place, (run, policy) in enumerate(asked)
    ]


class _Try(NamedTuple):
    """One policy on one fleet."""

    kept: float  # throughput, as a share of the largest limits'
    bound: float
    over: int
    seconds: float


def _fleet_tries(data: Data, seed: int, level: float, nodes: int, *, tree: bool) -> dict[str, _Try]:
    """All policies on one fleet; the bound is the second linear program, with code of its own."""
    fleet = draw(data, seed, level, nodes=nodes, tree=tree)
    bound = most_throughput(fleet.jobs, fleet.budgets) / len(fleet.jobs)
    tries = {}
    for name in (OURS, *PEERS):
        began = time.perf_counter()
        if name == OURS:
            given = allocate_certified(fleet.jobs, fleet.budgets, AllocationGoal.THROUGHPUT).found.given
            limits = {one.job: one.limit_w for one in given}
        else:
            limits = PEERS[name](fleet.jobs, fleet.budgets)
        seconds = time.perf_counter() - began
        kept = throughput(fleet.jobs, limits) / len(fleet.jobs)
        over = len(exceeded(fleet.jobs, fleet.budgets, limits))
        if not over and kept > bound + 1e-6:
            raise AboveOracle(f"{name} at level {level}, seed {seed}: {kept} is above the bound {bound}")
        tries[name] = _Try(kept, bound, over, seconds)
    return tries


def cluster(data: Data, seeds: int, nodes: int, pool: Parallel) -> list[report.ClusterRow]:
    """All policies at all levels, under one budget and under a tree."""
    asked = [(tree, level) for tree in (False, True) for level in LEVELS]
    done = pool(
        delayed(_fleet_tries)(data, seed, level, nodes, tree=tree) for tree, level in asked for seed in range(seeds)
    )
    rows = []
    for place, (tree, level) in enumerate(asked):
        group = done[place * seeds : (place + 1) * seeds]
        for name in (OURS, *PEERS):
            tries = [one[name] for one in group]
            gaps = [100.0 * (1.0 - one.kept / one.bound) for one in tries]
            rows.append(
                report.ClusterRow(
                    "cluster, rack, node, feed" if tree else "cluster",
                    100.0 * level,
                    name,
                    seeds,
                    100.0 * float(np.mean([one.kept for one in tries])),
                    100.0 * float(np.mean([one.bound for one in tries])),
                    float(np.mean(gaps)),
                    max(gaps),
                    sum(one.over for one in tries),
                    float(np.mean([one.seconds for one in tries])),
                )
            )
    return rows


class _Day(NamedTuple):
    """A course of budgets, with the order kept or not."""

    order: str
    seed: int
    counted: Counted


def _days(data: Data, seeds: int, nodes: int, pool: Parallel) -> list[_Day]:
    asked = [(order, seed) for order in (OURS, "at_once") for seed in range(seeds)]
    fleets = [draw(data, seed, LEVELS[2], nodes=nodes, tree=True) for seed in range(seeds)]
    done = pool(delayed(lived_through)(fleets[seed], seed, at_once=order == "at_once") for order, seed in asked)
    return [_Day(order, seed, counted) for (order, seed), counted in zip(asked, done, strict=True)]


class _DayRow(NamedTuple):
    order: str
    seed: int
    moments: int
    exceeded: int
    commands: int
    failures: int
    losses: int
    refused: int
    unfinished: int


def _single_part(data: Data, options: Options, pool: Parallel) -> list[report.Row]:
    runs = baseline_runs(data)
    rows = single(runs, POLICIES, options.seeds, NOISE, pool)
    mean = report.means(rows)
    report.write(options.out / "summary.csv", [*rows, *mean])
    print(f"{report.rows_table(rows, OURS)}\n\n{report.models_table(mean)}\n")
    if options.sensitivity_seeds:
        tried = {
            name: single(runs, RUNS, options.sensitivity_seeds, noise, pool) for name, noise in SENSITIVITY.items()
        }
        for policy in RUNS:
            print(f"{policy}, share of the oracle in %:\n{report.sensitivity(tried, policy)}\n")
        report.write(
            options.out / "sensitivity.csv",
            [one._replace(network=name) for name, group in tried.items() for one in report.means(group)],
        )
    return rows


def _data_part(data: Data, out: Path) -> None:
    """What the data says about the model itself, and Zeus's own question."""
    runs = baseline_runs(data)
    report.write(out / "sweeps.csv", scatter(data.sweeps))
    left_out = held_out(curve for curves in data.curves.values() for curve in curves.values())
    report.write(out / "held_out.csv", [left_out])
    print(
        f"{left_out.points} measured limits left out: time off by {100 * left_out.time_median:.1f} % (median; a straight "
        f"line {100 * left_out.line_time_median:.1f} %), power by {100 * left_out.power_median:.1f} %"
    )
    found: list[Together] = together(data, runs)
    report.write(out / "batch.csv", found)
    for model in data.curves:
        mine = [one for one in found if one.model == model]
        names = ("limit_alone", "batch_alone", "both_within", "both")
        shares = [100.0 * float(np.mean([getattr(one, name) for one in mine])) for name in names]
        print(
            f"{model}, oracle to the target: limit alone {shares[0]:.1f} %, batch alone {shares[1]:.1f} %, both within "
            f"5 % {shares[2]:.1f} %, both at any time {shares[3]:.1f} % (Zeus publishes 15.3 to 75.8 % for both)"
        )


def _cluster_part(data: Data, options: Options, pool: Parallel) -> list[report.ClusterRow]:
    rows = cluster(data, options.seeds, options.nodes, pool)
    report.write(options.out / "cluster.csv", rows)
    days = _days(data, options.seeds, options.nodes, pool)
    report.write(options.out / "transitions.csv", [_DayRow(one.order, one.seed, *one.counted) for one in days])
    print(f"\n{report.cluster_table(rows)}\n")
    for order in (OURS, "at_once"):
        mine = [one.counted for one in days if one.order == order]
        print(
            f"{order}: {sum(one.exceeded for one in mine)} budgets exceeded at {sum(one.moments for one in mine)} moments of "
            f"{sum(one.commands for one in mine)} commands, {sum(one.failures for one in mine)} of them failed, "
            f"{sum(one.losses for one in mine)} nodes lost; {sum(one.unfinished for one in mine)} limits left wrong"
        )
    return rows


def _chosen(options: Options) -> Data:
    """The data of the models that were asked for. Raises NotThere."""
    data = load(options.data)
    models = [name.strip() for name in options.models.split(",") if name.strip()]
    unknown = sorted(set(models) - set(data.curves))
    if unknown or not models:
        raise NotThere(f"no measurements of {', '.join(unknown) or 'nothing'}; there are {', '.join(data.curves)}")
    if options.seeds < 1 or options.nodes < 1 or options.processes < 1:
        raise NotThere("take 1 seed, 1 node and 1 process or more")
    return data._replace(curves={name: data.curves[name] for name in models})


@benchmark(out="bench-out/powercap", refused=(NotThere, OSError))
@data_option()
@click.option("--models", default=",".join(MODELS), help="GPU models, with commas")
@seeds_option(5)
@click.option("--sensitivity-seeds", type=int, default=2, help="for other scatter of windows; 0 for none")
@click.option("--nodes", default=64, help="of eight GPUs, in the cluster version")
@processes_option
@plots_option
def main(options: Options) -> int:
    """Runs everything; 2 if what was asked for is not there."""
    data = _chosen(options)
    with Parallel(n_jobs=options.processes) as pool:
        rows = _single_part(data, options, pool)
        _data_part(data, options.out)
        fleets = _cluster_part(data, options, pool)
    if not options.no_plots:
        from bench.powercap import plots  # a second to import

        plots.draw_savings(options.out / "savings.png", rows)
        plots.draw_cluster(options.out / "cluster.png", fleets)
    print(f"\nwritten to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
