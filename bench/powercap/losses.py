"""Where a search saves less than the oracle: python -m bench.powercap.losses --data DIR --out DIR.

Owns the account of losses. Every window of a cold search is compared with one at the oracle's limit; what it saved
less is booked by the reason for which its limit was picked. Long jobs lose little and are left out by default.
"""

import sys
from typing import NamedTuple

import click
from joblib import Parallel, delayed

from bench.powercap import report
from bench.powercap.__main__ import SENSITIVITY
from bench.powercap.single import ceiling, search_losses, window_count
from bench.powercap.zeus import MODELS, NotThere, baseline_runs, load
from bench.runner import Options, benchmark, data_option, processes_option, seeds_option
from eelgrid_controller.objectives.power.bandit import PickReason

__all__ = ["LossRow", "main"]

_REASONS = (
    PickReason.REFERENCE,
    PickReason.COMPARE,
    PickReason.REPAY,
    PickReason.UNTRIED,
    PickReason.HOPE,
    PickReason.KEEP,
)


class LossRow(NamedTuple):
    """One job under one noise: means over seeds, in per cent of the energy at the largest limit."""

    noise: str
    model: str
    workload: str
    windows: int
    oracle_pct: float
    saving_pct: float
    reference_pct: float  # lost at the largest limit in the first windows
    compare_pct: float  # lost there to measure it better
    repay_pct: float  # lost there to make up time, or until its error is small enough
    untried_pct: float  # lost in the first window of each other limit
    hope_pct: float  # lost at limits that might have been the best
    keep_pct: float  # lost at a limit settled on
    broken: int


@benchmark(out="bench-out/powercap", refused=(NotThere, OSError))
@data_option()
@seeds_option(16)
@click.option("--first-seed", type=int, default=0)
@click.option("--most-windows", type=int, default=2500, help="Jobs of more are left out.")
@processes_option
def main(options: Options) -> int:
    """Writes losses.csv, a row for each noise and job; 2 if the data is not there."""
    runs = baseline_runs(load(options.data))
    oracle = {model: sum(ceiling(run.curve).oracle for run in runs if run.model == model) for model in MODELS}
    short = [run for run in runs if window_count(run) <= options.most_windows]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    rows = []
    with Parallel(n_jobs=options.processes) as pool:
        for name, noise in SENSITIVITY.items():
            for run in short:
                done = pool(delayed(search_losses)(run, seed, noise) for seed in seeds)
                lost = {why: sum(one[why] for _, one in done) for why in _REASONS}
                each = [100.0 * lost[why] / len(done) for why in _REASONS]
                saved = 100.0 * sum(one.claimed for one, _ in done) / len(done)
                broken = sum(not one.kept for one, _ in done)
                windows, best = round(window_count(run)), 100.0 * ceiling(run.curve).oracle
                rows.append(LossRow(name, run.model, run.key.workload, windows, best, saved, *each, broken))
            for model in dict.fromkeys(run.model for run in short):
                mine = [one for one in rows if (one.noise, one.model) == (name, model)]
                parts = "; ".join(
                    f"{part.removesuffix('_pct')} {sum(getattr(one, part) for one in mine) / oracle[model]:.1f}"
                    for part in LossRow._fields[6:12]
                )
                jobs = "; ".join(
                    f"{one.workload} {(one.oracle_pct - one.saving_pct) / oracle[model]:.1f}" for one in mine
                )
                print(f"{name}, {model}, points of the oracle's saving lost: {parts} | {jobs}", flush=True)
    report.write(options.out / "losses.csv", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
