"""Cost of a thousand agent streams: controller and fleet process, at each send interval.

Target: 1,213 agents sampling and streaming at 1 Hz cost the controller at most
40 % of one core and 300 MB; the fleet process is reported as well.
"""

import sys
import tempfile
import time
from pathlib import Path

import click

from bench.processes import Usage, cores, fleet_file, free_port, measure, metric, running, spread
from bench.runner import Options, benchmark, report_promise
from bench.tables import write_csv

CPU_RATIO_MOST, RSS_BYTES_MOST = 0.40, 300_000_000


def _run(options: Options, interval_s: float, folder: Path) -> tuple[list[Usage], list[Usage], float, float]:
    from eelgrid_protos import messages, rpc, transport

    address, metrics = f"127.0.0.1:{free_port()}", free_port()
    controller = ["--listen", address, "--metrics", f"127.0.0.1:{metrics}", "--data", str(folder / f"j{interval_s}")]
    fleet = fleet_file(folder / "fleet.json", nodes=options.nodes, gpus=options.gpus)
    agent = ["--controller", address, "--simulate", str(fleet), "--listen", f"127.0.0.1:{free_port()}"]
    agent += ["--metrics", f"127.0.0.1:{free_port()}"]
    with (
        running("eelgrid_controller", controller, options.out / "controller.log") as master,
        running("eelgrid_agent", agent, options.out / "fleet.log") as fleet_process,
    ):
        deadline = time.monotonic() + 120
        while (metric(metrics, "eelgrid_agents_connected") or 0) < options.nodes:
            if time.monotonic() > deadline:
                raise SystemExit(f"only {metric(metrics, 'eelgrid_agents_connected')} agents; see {options.out}")
            time.sleep(0.5)
        with transport.open_blocking_channel(address, tls=None) as channel:
            operators = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
            policy = operators.get_policy(messages.GetPolicyRequest()).policy
            from dataclasses import replace

            operators.update_policy(messages.UpdatePolicyRequest(policy=replace(policy, send_interval_s=interval_s)))
        time.sleep(10)
        rows = []
        for _ in range(options.windows):
            begun = master.cpu_times()
            other = measure(fleet_process, options.seconds)
            ended = master.cpu_times()
            used = (ended.user + ended.system - begun.user - begun.system) / other.seconds
            rows.append((Usage(used, master.memory_info().rss, other.seconds), other))
        received = metric(metrics, "eelgrid_samples_received_total") or 0.0
        lost = metric(metrics, "eelgrid_samples_lost_total") or 0.0
    return [row[0] for row in rows], [row[1] for row in rows], received, lost


@benchmark()
@click.option("--nodes", default=1213)
@click.option("--gpus", default=5)
@click.option("--windows", default=5)
@click.option("--seconds", default=10.0)
@click.option("--intervals", default="1,5")
def main(options: Options) -> int:
    """Measures both send intervals and writes a CSV."""
    kept = True
    columns = ("send_interval_s", "window", "controller_cpu", "controller_rss", "fleet_cpu", "fleet_rss")
    rows: list[tuple[float, ...]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for interval_s in map(float, options.intervals.split(",")):
            master, fleet, received, lost = _run(options, interval_s, Path(scratch))
            for index, (one, two) in enumerate(zip(master, fleet, strict=True)):
                rows.append((interval_s, index, one.cpu_ratio, one.rss_bytes, two.cpu_ratio, two.rss_bytes))
            write_csv(options.out / "streams.csv", columns, rows)
            cpu = [usage.cpu_ratio for usage in master]
            rss = [usage.rss_bytes / 1e6 for usage in master]
            print(f"{options.nodes} agents x {options.gpus} GPUs at 1 Hz, sent every {interval_s:g} s, {cores()} cores")
            print(f"  controller {spread([100 * value for value in cpu])} % of a core, {spread(rss)} MB")
            print(
                f"  fleet process {spread([100 * usage.cpu_ratio for usage in fleet])} % of a core, "
                f"{spread([usage.rss_bytes / 1e6 for usage in fleet])} MB"
            )
            print(f"  ticks received {received:.0f}, lost {lost:.0f}")
            kept &= sorted(cpu)[len(cpu) // 2] <= CPU_RATIO_MOST and max(rss) * 1e6 <= RSS_BYTES_MOST and not lost
    return report_promise("40 % of a core, 300 MB, nothing lost", kept=kept)


if __name__ == "__main__":
    sys.exit(main())
