"""A swarm of seeds from the command line: prints each seed that fails and how to see it again.

python -m tests.sim --seeds 0:1000 --steps 2000 [--pair] [--ingest 2]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.sim.pair_ingest import run_pair_ingest
from tests.sim.pair_world import PairWorld, run_pair
from tests.sim.world import Failure, World, run


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


def main() -> int:
    """0 when no seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, default=range(100), metavar="A:B", help="first seed and end (0:100)")
    parser.add_argument("--steps", type=int, default=2000, help="events under faults (default %(default)s)")
    parser.add_argument("--disk", action="store_true", help="with the controller's own journal file")
    parser.add_argument("--traces", action="store_true", help="print the trace of each seed")
    parser.add_argument("--pair", action="store_true", help="two controllers over one store (pair_world.py)")
    parser.add_argument("--ingest", type=int, default=0, metavar="N", help="agents are behind N ingest processes")
    parser.add_argument("--unhealed", action="store_true", help="end with the faults")
    flags = parser.parse_args()
    failed: list[int] = []
    began_s, simulated_s, steps = time.perf_counter(), 0.0, 0
    for seed in flags.seeds:
        try:
            world: World | PairWorld
            if flags.pair and flags.ingest:
                world = run_pair_ingest(seed, flags.steps, ingests=flags.ingest, heals=not flags.unhealed)
            elif flags.pair:
                world = run_pair(seed, flags.steps, heals=not flags.unhealed)
            else:
                with tempfile.TemporaryDirectory() as directory:
                    folder = Path(directory) if flags.disk else None
                    world = run(seed, flags.steps, directory=folder, heals=not flags.unhealed, ingests=flags.ingest)
        except Failure as failure:
            failed.append(seed)
            print(failure)
            continue
        simulated_s += world.timeline.now_ns / 1e9
        steps += world.timeline.steps
        if flags.traces:
            print(f"seed={seed} steps={world.timeline.steps} trace={world.timeline.trace}")
    took_s = time.perf_counter() - began_s
    print(
        f"seeds={len(flags.seeds)} failed={len(failed)} steps={steps} simulated_s={simulated_s:.0f} took_s={took_s:.1f}"
    )
    if failed:
        print("failed seeds:", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
