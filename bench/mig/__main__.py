"""MIG partitions under latency objectives: python -m bench.mig --data DIR --out DIR.

Owns the command. Reads every row of SLO_latency.csv and SLO_req_rate.csv in DIR or
below it, and prof_data in DIR, beside it or with --prof. Writes summary.csv (ours),
peers.csv, plans.csv (our plans, a line a replica) and mig.png; with --random N
random.csv and random.png; with --changes changes.csv; with --fleet fleet.csv.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from bench.mig import changes, fleet, report, scenes
from bench.mig.runs import Result, run
from bench.mig.tables import Scenario, TableError, folders, points, scenarios
from bench.runner import Options, Progress, benchmark, data_option, plots_option
from eelgrid_controller.partition.problem import PartitionError
from eelgrid_controller.profiles.points import Point


def _published(options: Options, found: Sequence[Point], slo: Path, profiles: Path) -> None:
    rows = scenarios(slo, sorted({point.workload for point in found}))
    pairs: list[tuple[Scenario, Result]] = [(scenario, run(scenario, found, profiles)) for scenario in rows]
    results = [result for _, result in pairs]
    report.write_summary(options.out / "summary.csv", results)
    report.write_peers(options.out / "peers.csv", results)
    report.write_plans(options.out / "plans.csv", results)
    print(report.table(pairs))
    print("GPUs / compute slices; the bound is what no plan can go below; violations are counted from the raw tables")
    for result in results:
        for line in result.told:
            print(f"{result.scenario}: {line}")
    if not options.no_plots:
        from bench.mig import plots  # a second to import

        plots.draw(options.out / "mig.png", pairs)


def _random(options: Options, found: Sequence[Point], profiles: Path) -> None:
    results, progress = [], Progress("scenarios")
    for scenario in scenes.drawn(found, options.random, options.seed):
        results.append(run(scenario, found, profiles))
        progress.show(len(results), options.random)
    report.write_random(options.out / "random.csv", results)
    print(f"\n{options.random} scenarios drawn with seed {options.seed}:\n{report.random_table(results)}")
    if not options.no_plots:
        from bench.mig import plots  # a second to import

        plots.draw_random(options.out / "random.png", results)


def _changes(options: Options, found: Sequence[Point], slo: Path) -> None:
    rows = list(scenarios(slo, sorted({point.workload for point in found})))
    rows += scenes.drawn(found, options.random, options.seed)
    measured = list(changes.measure_changes(rows, found, options.seed))
    report.write_changes(options.out / "changes.csv", measured)
    print(
        f"\none service's rate changed against the running plan, in each of {len(rows)} scenarios, drawn with seed "
        f"{options.seed}:\n{report.changes_table(measured)}"
    )


def _fleet(options: Options, found: Sequence[Point]) -> None:
    rows = list(fleet.measured(found, options.services, options.gpus, options.seed))
    report.write_fleet(options.out / "fleet.csv", rows)
    print(f"\nfleets drawn with seed {options.seed}:\n{report.fleet_table(rows)}")


@benchmark(out="bench-out/mig", refused=(TableError, PartitionError, OSError))
@data_option("parvagpu")
@click.option("--prof", type=click.Path(path_type=Path), help="the profile tables, if they lie elsewhere")
@click.option("--random", default=0, metavar="N", help="draw N scenarios, too")
@click.option("--seed", default=1, help="of what is drawn")
@click.option("--changes", is_flag=True, help="change the rate of each service of a running plan, too")
@click.option("--fleet", is_flag=True, help="plan a whole fleet, too")
@click.option("--services", default=2000, help="of the fleet")
@click.option("--gpus", default=10000, help="of the fleet")
@plots_option
def main(options: Options) -> int:
    """Runs the comparison; 2 if what was asked for is not there."""
    slo, profiles = folders(options.data, options.prof)
    found = points(profiles)
    _published(options, found, slo, profiles)
    if options.random > 0:
        _random(options, found, profiles)
    if options.changes:
        _changes(options, found, slo)
    if options.fleet:
        _fleet(options, found)
    print(f"\nwritten to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
