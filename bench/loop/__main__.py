"""The closed loop in simulation: python -m bench.loop --data DIR --out DIR.

Owns the command. A day of a cluster with services under the Azure 2023 traces, training
jobs of Zeus's tables, a tariff, budgets of racks and cluster and two nodes that fail,
under the real Core and Steering and under what is run today. Writes summary.csv (columns
in report.py), day.png, policies.png and front.png.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.llm.data import Missing
from bench.loop import report
from bench.loop.runs import COMPARED, POLICIES, differences, everything
from bench.loop.scene import Size
from bench.powercap.zeus import NotThere

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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.loop", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("EELGRID_DATA", "../shared/data")))
    parser.add_argument("--out", type=Path, default=Path("bench-out/loop"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hours", type=float, default=None, help="24, or 4 with --small")
    parser.add_argument("--small", action="store_true", help="a small cluster, for a look")
    parser.add_argument("--policies", default=",".join(COMPARED))
    parser.add_argument("--services", type=int, default=None, help="22, or 5 with --small; few for training alone")
    parser.add_argument("--rack-share", type=float, default=Size().rack_share, help="budget of a rack for training")
    parser.add_argument("--cluster-share", type=float, default=Size().cluster_share, help="of all training together")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-plots", action="store_true")
    return parser


def _tell(done: int, total: int) -> None:
    print(f"{done}/{total}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; 2 if what was asked for is not there."""
    options = _parser().parse_args(arguments)
    size = SMALL if options.small else Size()
    size = size if options.hours is None else size._replace(hours=options.hours)
    size = size if options.services is None else size._replace(services=options.services)
    size = size._replace(rack_share=options.rack_share, cluster_share=options.cluster_share)
    policies = [one.strip() for one in options.policies.split(",") if one.strip()]
    unknown = [one for one in policies if one not in POLICIES]
    if (
        unknown
        or not policies
        or options.seeds < 1
        or options.processes < 1
        or size.services < 1
        or size.hours < _HOURS_LEAST
    ):
        print(
            f"bench.loop: take policies of {', '.join(POLICIES)}, a seed or more, {_HOURS_LEAST:g} hours or more",
            file=sys.stderr,
        )
        return 2
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        runs = everything(options.data, policies, options.seeds, size, processes=options.processes, tell=_tell)
    except (Missing, NotThere, OSError) as error:
        print(f"bench.loop: {error}", file=sys.stderr)
        return 2
    found = differences(runs)
    report.write_summary(options.out / "summary.csv", runs)
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
