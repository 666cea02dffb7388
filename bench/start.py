"""Start time of eelctl: whole processes, `--help` and `--version`.

Target: under 0.3 s.
"""

import subprocess
import sys
import time
from pathlib import Path

import click

from bench.processes import spread
from bench.runner import Options, benchmark, report_promise
from bench.tables import write_csv

SECONDS_MOST = 0.3


@benchmark()
@click.option("--runs", default=15)
def main(options: Options) -> int:
    """Times whole processes after one warm-up."""
    program = Path(sys.executable).parent / "eelctl"
    kept = True
    rows = []
    for flag in ("--help", "--version"):
        taken = []
        for _ in range(options.runs + 1):
            begun = time.perf_counter()
            subprocess.run([program, flag], stdout=subprocess.DEVNULL, check=True)
            taken.append(time.perf_counter() - begun)
        rows += [(f"eelctl {flag}", seconds) for seconds in taken]
        print(f"eelctl {flag:10} {spread(taken[1:])} s")
        kept &= sorted(taken[1:])[options.runs // 2] < SECONDS_MOST
    write_csv(options.out / "start.csv", ("command", "seconds"), rows)
    return report_promise("0.3 s", kept=kept)


if __name__ == "__main__":
    sys.exit(main())
