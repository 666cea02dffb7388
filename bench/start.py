"""How long a person waits for eelctl to begin: whole processes, `--help` and `--version`.

Promise: under 0.3 s.
"""

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

from bench.processes import spread

SECONDS_MOST = 0.3


def main() -> int:
    """Times whole processes after one warm-up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    program = Path(sys.executable).parent / "eelctl"
    kept = True
    with (options.out / "start.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["command", "seconds"])
        for flag in ("--help", "--version"):
            taken = []
            for _ in range(options.runs + 1):
                begun = time.perf_counter()
                subprocess.run([program, flag], stdout=subprocess.DEVNULL, check=True)
                taken.append(time.perf_counter() - begun)
                writer.writerow([f"eelctl {flag}", taken[-1]])
            print(f"eelctl {flag:10} {spread(taken[1:])} s")
            kept &= sorted(taken[1:])[options.runs // 2] < SECONDS_MOST
    print(f"promise (0.3 s): {'kept' if kept else 'NOT KEPT'}")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
