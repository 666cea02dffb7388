"""Submissions to a front of two clusters: how many a second, and what each costs the front and a controller.

Two controllers with an agent each and a front run on this machine; `--clients` submit equal small jobs at once, each waiting
for its answer. Processor time is that of the processes, so that a figure holds on a loaded machine too, where the rate does not.

    python -m bench.front [--jobs 300] [--clients 16] [--rounds 3] [--out bench-out]
"""

import asyncio
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click
import psutil

from bench.processes import cpu_s, sum_cpu_s
from bench.runner import Options, benchmark
from bench.submissions import submit_all
from bench.tables import write_csv

_COLUMNS = ("round", "submissions_per_s", "front_cpu_ms", "controllers_cpu_ms")


@benchmark()
@click.option("--jobs", default=300)
@click.option("--clients", default=16)
@click.option("--rounds", default=3)
def main(options: Options) -> int:
    """Runs the rounds and writes a CSV."""
    from tests.e2e.several_clusters_test import Front, Site

    rows: list[tuple[float, ...]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sites = [
            stack.enter_context(Site(folder / name, name, price)) for name, price in (("cheap", 0.1), ("dear", 0.4))
        ]
        for site in sites:
            site.begin()
        (folder / "front").mkdir()
        front = stack.enter_context(Front(folder / "front"))
        front.begin(sites)
        own = psutil.Process(front.process.process.pid)
        others = [psutil.Process(site.process.process.pid) for site in sites]
        asyncio.run(submit_all(front.address, options.clients, options.clients, "job-0"))
        for number in range(1, options.rounds + 1):
            before = cpu_s(own), sum_cpu_s(others)
            taken_s, _ = asyncio.run(submit_all(front.address, options.jobs, options.clients, f"job-{number}"))
            spent = [
                1000 * (now - then) / options.jobs
                for now, then in zip((cpu_s(own), sum_cpu_s(others)), before, strict=True)
            ]
            rows.append((number, options.jobs / taken_s, *spent))
            print(
                f"round {number}: {options.jobs / taken_s:.0f} a second, front {spent[0]:.1f} ms, controllers {spent[1]:.1f} ms of a processor each"
            )
    medians = [statistics.median(row[at] for row in rows) for at in (1, 2, 3)]
    print("median: {:.0f} a second, front {:.1f} ms, controllers {:.1f} ms".format(*medians))
    if options.out is not None:
        write_csv(options.out / "front.csv", _COLUMNS, rows)
    return 0


if __name__ == "__main__":
    main()
