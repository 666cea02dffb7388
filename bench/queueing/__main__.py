"""Queueing on published loads, peers recomputed first: python -m bench.queueing [SET...] --data DIR --out DIR.

Owns the command. Without a SET all run, in this order; each needs its folder in DIR:
  muri         400 jobs on 64 GPUs and its simulator's traces (SIGCOMM'22)
  shockwave    120 jobs whose batch sizes change (NSDI'23)
  elasticflow  deadlines on six clusters and Philly (ASPLOS'23); the two largest take most of the time
  philly       quotas by virtual cluster
  pai          what run-time estimates are worth: published rows only
  oscillation  KAI's two queues that alternate
  hierarchy    Gavel's fair shares of a tree
  kueue        Kueue's own load of 15,000 workloads on a core of ours
Writes summary.csv (set, policy, metric, ours, published, bound, seeds) and a picture for each set. The exit status is 1
if a target is missed.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click

from bench.queueing import elasticflow, estimates, hierarchy, kueue, loans, muri, oscillation, philly, shockwave
from bench.queueing.summary import SetResult, SummaryRow, find_folder, format_rows, write_summary
from bench.runner import Options, benchmark, data_option, plots_option

# By name: the folder of its data, and the module with run_set(folder, quick=...) and draw(path, result).
SETS: dict[str, tuple[str, ModuleType]] = {
    "muri": ("muri", muri),
    "shockwave": ("shockwave", shockwave),
    "elasticflow": ("elasticflow", elasticflow),
    "philly": ("philly", philly),
    "loans": ("philly", loans),
    "pai": ("pai", estimates),
    "oscillation": ("kai_kueue", oscillation),
    "hierarchy": ("gavel", hierarchy),
}


def _run_one(name: str, options: Options) -> SetResult:
    if name == "kueue":
        return kueue.run_set(find_folder(options.data, "kai_kueue"), options.size, options.out)
    folder, module = SETS[name]
    run_set: Callable[..., SetResult] = module.run_set
    result = run_set(find_folder(options.data, folder), quick=options.quick)
    if not options.no_plots:
        module.draw(options.out / f"{name}.png", result)
    return result


def _check_data(names: tuple[str, ...], data: Path) -> None:
    """Raises Unusable before anything runs if a set's folder is missing."""
    for name in names:
        find_folder(data, SETS[name][0] if name in SETS else "kai_kueue")


@benchmark(out="bench-out/queueing", refused=(OSError,))
@click.argument("sets", nargs=-1, type=click.Choice([*SETS, "kueue"]))
@click.option("--quick", is_flag=True, help="Small traces and few seeds: about a minute, without kueue unless named.")
@click.option("--size", type=click.Choice(["baseline", "large_scale"]), default="baseline", help="Of kueue's load.")
@data_option()
@plots_option
def main(options: Options) -> int:
    """Runs the sets and writes summary.csv."""
    names = tuple(dict.fromkeys(options.sets)) or (tuple(SETS) if options.quick else (*SETS, "kueue"))
    _check_data(names, options.data)
    rows, missed = list[SummaryRow](), 0
    for name in names:
        begin_s = time.monotonic()
        result = _run_one(name, options)
        rows.extend(result.rows)
        write_summary(options.out / "summary.csv", rows)
        print(f"\n== {name} ({time.monotonic() - begin_s:.0f} s)\n{format_rows(result.rows)}", flush=True)
        for what, is_met in result.targets:
            print(f"target ({what}): {'met' if is_met else 'MISSED'}", flush=True)
            missed += not is_met
    print(f"\nwritten to {options.out}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
