"""Time until a fleet is ready, and until it is back after its controller was killed.

Owns the scene and its clock: one controller, one fleet process, SIGKILL, the same data again. Prints seconds
until each share of the fleet is there, so that a queue that starves its tail shows.
"""

import signal
import sys
import tempfile
import time
from pathlib import Path

import click

from bench.processes import cores, cpu_s, fleet_file, free_port, metric, running
from bench.runner import Options, benchmark
from bench.tables import write_csv

SHARES = (0.5, 0.9, 0.99, 1.0)


def _climb(port: int, name: str, nodes: int, within_s: float) -> tuple[dict[float, float], float]:
    """Seconds until each share of the nodes counts, and how many did in the end."""
    begun_s, found, value = time.monotonic(), {}, 0.0
    while len(found) < len(SHARES) and time.monotonic() - begun_s < within_s:
        value = metric(port, name) or 0.0
        for share in SHARES:
            if value >= share * nodes:
                found.setdefault(share, time.monotonic() - begun_s)
        time.sleep(0.25)
    return found, value


@benchmark()
@click.option("--nodes", default=2000)
@click.option("--gpus", default=8)
@click.option("--kills", default=1)
@click.option("--within", default=300.0)
def main(options: Options) -> int:
    """Measures both climbs and writes a CSV."""
    address, metrics = f"127.0.0.1:{free_port()}", free_port()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        fleet = fleet_file(Path(scratch) / "fleet.json", nodes=options.nodes, gpus=options.gpus)
        master = ["--listen", address, "--metrics", f"127.0.0.1:{metrics}", "--data", str(Path(scratch) / "data")]
        agent = ["--controller", address, "--simulate", str(fleet), "--listen", f"127.0.0.1:{free_port()}"]
        agent += ["--metrics", f"127.0.0.1:{free_port()}"]
        with running("eelgrid_agent", agent, options.out / "fleet.log") as process:
            for number in range(options.kills + 1):
                with running("eelgrid_controller", master, options.out / f"controller-{number}.log") as controller:
                    while metric(metrics, "eelgrid_agents_connected") is None:
                        time.sleep(0.1)
                    begun = cpu_s(controller), cpu_s(process)
                    found, last = _climb(metrics, "eelgrid_agents_connected", options.nodes, options.within)
                    used = cpu_s(controller) - begun[0], cpu_s(process) - begun[1]
                    rows.append([number, last, *(found.get(share) for share in SHARES), *used])
                    told = ", ".join(f"{share:.0%} {found[share]:.1f} s" for share in SHARES if share in found)
                    print(
                        f"{'back' if number else 'ready'}: {told}; {last:.0f} of {options.nodes} nodes x {options.gpus} "
                        f"GPUs, {cores()} cores; controller {used[0]:.1f}, fleet {used[1]:.1f} s of processor",
                        flush=True,
                    )
                    controller.send_signal(signal.SIGKILL)
    columns = ("kills", "connected", *(f"s_{share:g}" for share in SHARES), "controller_cpu_s", "fleet_cpu_s")
    write_csv(options.out / "reconnects.csv", columns, rows)
    return 0 if all(row[1] >= options.nodes for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
