"""MIG partitions under latency objectives: python -m bench.mig --data DIR --out DIR.

Owns the command. Reads every row of SLO_latency.csv and SLO_req_rate.csv in DIR or
below it, and prof_data in DIR, beside it or with --prof. Writes summary.csv (ours),
peers.csv, plans.csv (our plans, a line a replica) and mig.png; with --random N
random.csv and random.png; with --fleet fleet.csv.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.mig import fleet, report, scenes
from bench.mig.runs import Result, run
from bench.mig.tables import Scenario, TableError, folders, points, scenarios
from eelgrid_controller.partition.problem import PartitionError
from eelgrid_controller.profiles.points import Point


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.mig", description=__doc__)
    shared = Path(os.environ.get("EELGRID_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=shared / "parvagpu", help="the scenarios")
    parser.add_argument("--prof", type=Path, default=None, help="the profile tables, if they lie elsewhere")
    parser.add_argument("--out", type=Path, default=Path("bench-out/mig"))
    parser.add_argument("--random", type=int, default=0, metavar="N", help="draw N scenarios, too")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--fleet", action="store_true", help="plan a whole fleet, too")
    parser.add_argument("--services", type=int, default=2000, help="of the fleet")
    parser.add_argument("--gpus", type=int, default=10_000, help="of the fleet")
    parser.add_argument("--no-plots", action="store_true")
    return parser


def _published(options: argparse.Namespace, found: Sequence[Point], slo: Path, profiles: Path) -> None:
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


def _random(options: argparse.Namespace, found: Sequence[Point], profiles: Path) -> None:
    results = []
    for scenario in scenes.drawn(found, options.random, options.seed):
        results.append(run(scenario, found, profiles))
        if sys.stderr.isatty():
            print(f"\r{len(results)} of {options.random} scenarios\033[K", end="", file=sys.stderr, flush=True)
    report.write_random(options.out / "random.csv", results)
    print(f"\n{options.random} scenarios drawn with seed {options.seed}:\n{report.random_table(results)}")
    if not options.no_plots:
        from bench.mig import plots  # a second to import

        plots.draw_random(options.out / "random.png", results)


def _fleet(options: argparse.Namespace, found: Sequence[Point]) -> None:
    rows = list(fleet.measured(found, options.services, options.gpus, options.seed))
    report.write_fleet(options.out / "fleet.csv", rows)
    print(f"\nfleets drawn with seed {options.seed}:\n{report.fleet_table(rows)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; 2 if what was asked for is not there."""
    options = _parser().parse_args(arguments)
    try:
        slo, profiles = folders(options.data, options.prof)
        found = points(profiles)
        options.out.mkdir(parents=True, exist_ok=True)
        _published(options, found, slo, profiles)
        if options.random > 0:
            _random(options, found, profiles)
        if options.fleet:
            _fleet(options, found)
    except (TableError, PartitionError, OSError) as error:
        print(f"bench.mig: {error}", file=sys.stderr)
        return 2
    print(f"\nwritten to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
