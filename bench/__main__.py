"""Every benchmark in turn, each in its own process; the exit status counts the promises not kept."""

import argparse
import subprocess
import sys
from pathlib import Path

NAMES = ("start", "agent_overhead", "streams", "latency", "replay", "node")


def main() -> int:
    """Runs each benchmark and says which promise was not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    options = parser.parse_args()
    broken = []
    for name in NAMES:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"bench.{name}", "--out", str(options.out)], check=False).returncode:
            broken.append(name)
    print(f"not kept: {', '.join(broken)}" if broken else "every promise kept")
    return len(broken)


if __name__ == "__main__":
    sys.exit(main())
