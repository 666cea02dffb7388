"""The closed loop in simulation: python -m bench.loop --data DIR --out DIR.

Owns the command. A day of a cluster with services under the Azure 2023 traces, training
jobs of Zeus's tables, a tariff, budgets of racks and cluster and two nodes that fail,
under the real Core and Steering and under today's common policies. Writes summary.csv (columns
in report.py), day.png, policies.png and front.png.
"""

import sys
from collections.abc import Sequence

import click

from bench.llm.data import Missing
from bench.loop import report
from bench.loop.runs import COMPARED, POLICIES, Run, differences, everything
from bench.loop.scene import Size
from bench.powercap.zeus import NotThere
from bench.runner import (
    Options,
    Progress,
    Unusable,
    benchmark,
    data_option,
    plots_option,
    processes_option,
    seeds_option,
    split_names,
)

__all__ = ["SMALL", "main"]

SMALL = Size(
    hours=4.0,
    services=5,
    jobs=24,
    racks=(("h100", 1, 6, 8), ("v100", 1, 5, 8), ("a40", 1, 2, 8)),
    job_hours=(0.7, 1.2),
    day_hours=8.0,
)
_HOURS_LEAST = 1.0
_ERROR_MOST = 0.5


@benchmark(out="bench-out/loop", refused=(Missing, NotThere, OSError))
@data_option()
@seeds_option(5)
@click.option("--hours", type=float, help="24, or 4 with --small")
@click.option("--small", is_flag=True, help="a small cluster, for a quick run")
@click.option("--policies", default=",".join(COMPARED))
@click.option("--services", type=int, help="22, or 5 with --small; few for training alone")
@click.option("--jobs", type=int, help="training jobs: 140, or 24 with --small; 0 for services alone")
@click.option("--first-seed", type=int, default=0, help="the least seed; the figures of the page are of 0 to 4")
@click.option(
    "--profile-error",
    type=float,
    default=0.0,
    help="of each point of a profile, tokens and latency apart: 0.05 for 5 %",
)
@click.option("--rack-share", type=float, default=Size().rack_share, help="budget of a rack for training")
@click.option("--cluster-share", type=float, default=Size().cluster_share, help="of all training together")
@processes_option
@plots_option
def main(options: Options) -> int:
    """Runs the comparison; 2 if what was asked for is not there."""
    size = SMALL if options.small else Size()
    size = size if options.hours is None else size._replace(hours=options.hours)
    size = size if options.services is None else size._replace(services=options.services)
    size = size._replace(rack_share=options.rack_share, cluster_share=options.cluster_share)
    size = size if options.jobs is None else size._replace(jobs=options.jobs)
    size = size._replace(profile_error=options.profile_error)
    policies = split_names(options.policies, POLICIES)
    if options.seeds < 1 or options.processes < 1 or size.services < 1 or size.hours < _HOURS_LEAST:
        raise Unusable(f"take a seed, a process and a service or more, and {_HOURS_LEAST:g} hours or more")
    if size.jobs < 0 or not 0.0 <= size.profile_error <= _ERROR_MOST or options.first_seed < 0:
        raise Unusable(f"take 0 jobs or more, a profile error of 0 to {_ERROR_MOST:g} and a seed of 0 or more")
    progress = Progress("days")

    def keep(done: Sequence[Run], total: int) -> None:
        report.write_summary(options.out / "summary.csv", done)
        report.write_services(options.out / "services.csv", done)
        progress.show(len(done), total)

    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = everything(options.data, policies, seeds, size, processes=options.processes, tell=keep)
    found = differences(runs)
    print(f"{report.policy_table(runs)}\n\n{report.difference_table(found)}")
    for line in report.shortfalls(runs, found):
        print(f"shortfall: {line}")
    if not options.no_plots:
        from bench.loop import plots  # a second to import

        plots.draw_day(options.out / "day.png", runs)
        plots.draw_policies(options.out / "policies.png", runs)
        plots.draw_front(options.out / "front.png", runs)
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
