"""Jobs whose promise is nearly what a limit costs: python -m bench.powercap.near_promise --data DIR --out DIR.

Owns the jobs and the count of broken promises. Every curve of Zeus's tables on which some limit takes 4 to 9 %
more time than the largest is one job: the larger of these limits break the promise of 5 % by so little that noise
can hide it, the smaller keep it by as little. A job lasts 1.5 to 6 hours, and its windows are of 30 s. Jobs of
bench.powercap's own runs are left out on request, so that a search can be developed on others. With --former each
job is the last of several runs, which may differ at each limit (--differ) more than the search expects.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import click
import numpy as np
from joblib import Parallel, delayed

from bench.powercap import report
from bench.powercap.single import SLOWDOWN, FormerRuns, Noise, Outcome, ceiling, search_limit
from bench.powercap.zeus import Data, NotThere, Run, baseline_runs, load
from bench.runner import Options, benchmark, data_option, processes_option, seeds_option

__all__ = ["NOISES", "main", "near_runs"]

WINDOW_S = 30.0
_HOURS = (1.5, 6.0)
_NEAR = (0.04, 0.09)  # more time at some limit
NOISES = {"2 %, 1 %": Noise(0.02, 0.01), "4 %, 2 %": Noise(0.04, 0.02)}


class NearRow(NamedTuple):
    """All jobs under one noise."""

    noise: str
    jobs: int
    broken: int
    slowdown_most_pct: float
    saving_pct: float  # of the energy at the largest limit, as claimed
    drawn_pct: float  # as drawn
    oracle_pct: float  # by the best single limit
    saving_error_pct: float  # standard error over seeds


def near_runs(data: Data, seed: int, *, others_only: bool) -> list[Run]:
    """A job for each curve near the promise, of random length."""
    rng = np.random.default_rng([seed, 23])
    known = {(run.model, run.key) for run in baseline_runs(data)} if others_only else set()
    runs = []
    for model, curves in data.curves.items():
        for key, curve in curves.items():
            hours, base_s = rng.uniform(*_HOURS), curve.largest.time_s
            more = [at.time_s / base_s - 1.0 for at in curve.points]
            if any(_NEAR[0] <= one <= _NEAR[1] for one in more) and (model, key) not in known:
                runs.append(Run(model, key, curve, 3600.0 * hours / base_s))
    return runs


def _row(name: str, runs: Sequence[Sequence[Run]], outcomes: Sequence[Outcome]) -> NearRow:
    flat = [run for group in runs for run in group]
    saved, ends = [one.claimed for one in outcomes], np.cumsum([len(group) for group in runs])[:-1]
    means = [float(np.mean(part)) for part in np.split(np.array(saved), ends)]
    return NearRow(
        name,
        len(outcomes),
        sum(not one.kept for one in outcomes),
        100.0 * max(one.slowdown for one in outcomes),
        100.0 * float(np.mean(saved)),
        100.0 * float(np.mean([one.drawn for one in outcomes])),
        100.0 * float(np.mean([ceiling(run.curve).oracle for run in flat])),
        100.0 * float(np.std(means, ddof=1)) / len(means) ** 0.5 if len(means) > 1 else 0.0,
    )


@benchmark(out="bench-out/powercap", refused=(NotThere, OSError))
@data_option()
@seeds_option(4)
@click.option("--first-seed", type=int, default=0)
@click.option("--others-only", is_flag=True, help="Without the jobs that bench.powercap reports.")
@click.option("--former", type=int, default=0, help="Runs of each job before the one that counts.")
@click.option("--differ", type=float, default=0.0, help="Relative scatter of their time at each limit, e.g. 0.02.")
@processes_option
def main(options: Options) -> int:
    """Writes near_promise.csv; 2 if the data is not there. Jobs may break their promise: the count is the result."""
    data = load(options.data)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = [near_runs(data, seed, others_only=options.others_only) for seed in seeds]
    rows, former = [], FormerRuns(options.former, options.differ)
    with Parallel(n_jobs=options.processes) as pool:
        for name, noise in NOISES.items():
            done = pool(
                delayed(search_limit)(run, seed, noise, WINDOW_S, former)
                for seed, group in zip(seeds, runs, strict=True)
                for run in group
            )
            rows.append(_row(name, runs, done))
            one = rows[-1]
            print(
                f"{name}: {one.broken} of {one.jobs} jobs took over {100 * SLOWDOWN:.0f} % more time, {one.slowdown_most_pct:.2f} % "
                f"at most; saved {one.saving_pct:.2f} +- {one.saving_error_pct:.2f} % of {one.oracle_pct:.2f} %, "
                f"drew {one.drawn_pct:.2f} % less",
                flush=True,
            )
    report.write(options.out / "near_promise.csv", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
