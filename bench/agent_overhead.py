"""What one agent costs its node: 8 simulated GPUs read through the real pynvml once a second.

Promise: under 1 % of a core and under 60 MB resident.
"""

import argparse
import csv
import tempfile
import time
from pathlib import Path

from bench.processes import fleet_file, free_port, measure, metric, running, spread

CPU_RATIO_MOST, RSS_BYTES_MOST = 0.01, 60_000_000


def main() -> int:
    """Measures several windows of one agent that streams to a real controller."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        address, metrics = f"127.0.0.1:{free_port()}", free_port()
        controller = ["--listen", address, "--metrics", f"127.0.0.1:{metrics}", "--data", str(folder / "journal")]
        fleet = fleet_file(folder / "fleet.json", nodes=1, gpus=8)
        agent = ["--controller", address, "--simulate", str(fleet), "--listen", f"127.0.0.1:{free_port()}"]
        agent += ["--metrics", f"127.0.0.1:{free_port()}"]
        with (
            running("eelgrid_controller", controller, options.out / "controller.log"),
            running("eelgrid_agent", agent, options.out / "agent.log") as process,
        ):
            deadline = time.monotonic() + 60
            while not metric(metrics, "eelgrid_agents_connected") and time.monotonic() < deadline:
                time.sleep(0.2)
            time.sleep(5)  # imports and the first connection are not the steady state
            usages = [measure(process, options.seconds) for _ in range(options.windows)]
    cpu, rss = [usage.cpu_ratio for usage in usages], [usage.rss_bytes / 1e6 for usage in usages]
    with (options.out / "agent_overhead.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["window", "cpu_ratio", "rss_bytes"])
        writer.writerows((index, usage.cpu_ratio, usage.rss_bytes) for index, usage in enumerate(usages))
    print(f"one agent, 8 GPUs at 1 Hz: {spread([100 * value for value in cpu])} % of a core, {spread(rss)} MB resident")
    kept = sorted(cpu)[len(cpu) // 2] <= CPU_RATIO_MOST and max(rss) * 1e6 <= RSS_BYTES_MOST
    print(f"promise (1 % of a core, 60 MB): {'kept' if kept else 'NOT KEPT'}")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
