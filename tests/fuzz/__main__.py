"""`python -m tests.fuzz`: scene after scene until the time is over; a finding prints its seed and ends the run."""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.scene import Finding, open_scene

_SCENE_MESSAGES = 2000
_BATCH = 40


async def run_scene(seed: int, messages: int, until_s: float = float("inf")) -> int:
    """One scene; how many calls were made. Raises Finding."""
    with tempfile.TemporaryDirectory(prefix="eelgrid-fuzz-") as folder:
        async with open_scene(Path(folder), seed) as scene:
            done = 0
            while done < messages and time.monotonic() < until_s:
                await scene.attack(_BATCH)
                done += _BATCH
                await scene.check(with_energy=done % (5 * _BATCH) == 0)
            await scene.check(with_energy=True)
            return scene.calls


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("EELGRID_FUZZ_SECONDS", "3600")))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("EELGRID_FUZZ_SEED", "0")))
    asked = parser.parse_args()
    until_s = time.monotonic() + asked.seconds
    seed, calls = asked.seed or time.time_ns() % 10**9, 0
    while time.monotonic() < until_s:
        try:
            calls += asyncio.run(run_scene(seed, _SCENE_MESSAGES, until_s))
        except Finding as finding:
            print(f"seed {seed}: {finding}", file=sys.stderr)
            print(f"again with: python -m tests.fuzz --seed {seed}", file=sys.stderr)
            return 1
        print(f"seed {seed}: held, {calls} calls so far", flush=True)
        seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
