"""Processor time of the controller with agents that connect directly, and behind ingest processes.

Each number of agents is measured directly and behind each number of ingest processes, one after the other, so that a
figure is compared with its neighbour on the same machine. Half of the agents are at each of two ingest processes.
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click

from bench.processes import cores, cpu_s, fleet_file, free_port, metric, running, spread
from bench.runner import Options, benchmark, split_numbers
from bench.tables import write_csv

_WITHIN_S = 240.0
_SETTLE_S = 5.0


def _set_interval(address: str, interval_s: float) -> None:
    from eelgrid_protos import messages, rpc, transport

    with transport.open_blocking_channel(address, tls=None) as channel:
        operators = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
        policy = operators.get_policy(messages.GetPolicyRequest()).policy
        wanted = replace(policy, send_interval_s=interval_s)
        operators.update_policy(messages.UpdatePolicyRequest(policy=wanted))


def _run(options: Options, agents: int, ingests: int, folder: Path) -> list[tuple[float, float, float, float]]:
    """Windows of one layout: shares of a core of the controller, all ingest processes and all fleets, batches lost."""
    name = f"{agents}-{ingests}"
    address, metrics = f"127.0.0.1:{free_port()}", free_port()
    flags = ["--listen", address, "--metrics", f"127.0.0.1:{metrics}", "--data", str(folder / name)]
    with ExitStack() as stack:
        controller = stack.enter_context(running("eelgrid_controller", flags, options.out / f"controller-{name}.log"))
        relays, targets = [], [address]
        if ingests:
            targets = [f"127.0.0.1:{free_port()}" for _ in range(ingests)]
            for at, target in enumerate(targets):
                own = ["--ingest", address, "--listen", target, "--metrics", f"127.0.0.1:{free_port()}"]
                log = options.out / f"ingest-{name}-{at}.log"
                relays.append(stack.enter_context(running("eelgrid_controller", own, log)))
        fleets = []
        for at, target in enumerate(targets):
            fleet = fleet_file(folder / f"fleet-{name}-{at}.json", nodes=agents // len(targets), gpus=options.gpus)
            fleet.write_text(fleet.read_text().replace("node-{index}", f"node-{at}-{{index}}"))
            own = ["--controller", target, "--simulate", str(fleet), "--listen", f"127.0.0.1:{free_port()}"]
            own += ["--metrics", f"127.0.0.1:{free_port()}"]
            fleets.append(stack.enter_context(running("eelgrid_agent", own, options.out / f"fleet-{name}-{at}.log")))
        wanted, deadline_s = len(targets) * (agents // len(targets)), time.monotonic() + _WITHIN_S
        while (metric(metrics, "eelgrid_agents_connected") or 0) < wanted:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{metric(metrics, 'eelgrid_agents_connected')} of {wanted} agents; see {options.out}")
            time.sleep(0.5)
        _set_interval(address, options.interval)
        time.sleep(_SETTLE_S)
        rows = []
        for _ in range(options.windows):
            groups = ([controller], relays, fleets)
            begun_s, before = time.monotonic(), [sum(map(cpu_s, group)) for group in groups]
            time.sleep(options.seconds)
            passed_s = time.monotonic() - begun_s
            used = [(sum(map(cpu_s, group)) - was) / passed_s for group, was in zip(groups, before, strict=True)]
            rows.append((used[0], used[1], used[2], metric(metrics, "eelgrid_samples_lost_total") or 0.0))
        return rows


@benchmark()
@click.option("--agents", default="500,1000")
@click.option("--ingests", default="0,1,2", help="Numbers of ingest processes; 0 for agents that connect directly.")
@click.option("--gpus", default=8)
@click.option("--interval", default=1.0, help="Seconds between two batches of an agent.")
@click.option("--windows", default=5)
@click.option("--seconds", default=5.0)
def main(options: Options) -> int:
    """Measures every layout and writes a CSV."""
    rows: list[tuple[float, ...]] = []
    layouts = sorted({int(one) for one in options.ingests.split(",")})
    with tempfile.TemporaryDirectory() as scratch:
        for agents in map(int, split_numbers(options.agents)):
            for ingests in layouts:
                found = _run(options, agents, ingests, Path(scratch))
                rows += [(agents, ingests, index, *one) for index, one in enumerate(found)]
                shares = [spread([100.0 * one[at] for one in found]) for at in range(3)]
                print(
                    f"{agents} agents x {options.gpus} GPUs, sent every {options.interval:g} s, {ingests} ingest "
                    f"processes, {cores()} cores: controller {shares[0]} % of a core, ingest {shares[1]} %, "
                    f"fleet {shares[2]} %, ticks lost {found[-1][3]:.0f}",
                    flush=True,
                )
    columns = ("agents", "ingests", "window", "controller_cpu", "ingest_cpu", "fleet_cpu", "lost")
    write_csv(options.out / "ingest.csv", columns, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
