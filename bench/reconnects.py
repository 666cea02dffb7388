"""Time until agents are back after the controller was killed: connected directly, and behind ingest processes.

The controller is killed (SIGKILL) and started again from its journal, as often as asked. Agents are replayed
(bench/agent_replay.py) over a connection and a stream each, with the retries of real ones, and go on sending. Behind ingest
processes they keep their streams; with `--older` agents of the version before, whose streams end, come first. An agent is
back when a leader has welcomed it; its node takes work again when it has said something after that. Printed are seconds
since the kill, and since the new process serves, until shares of the agents were back and until all nodes take work, and
processor time for each of them.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bench.agent_layout import AgentLayout
from bench.agent_replay import record_agent
from bench.processes import cores, metric, own_cpu_s, spread, sum_cpu_s
from bench.runner import Options, benchmark, report_promise, split_numbers
from bench.tables import write_csv

_BACK_S_MOST = 30.0
_SHARES = (0.5, 0.99, 1.0)
_COLUMNS = (
    "agents",
    "ingests",
    "older",
    "kill",
    "serves_s",
    "p50_s",
    "p99_s",
    "all_s",
    "open_s",
    "controller_ms",
    "ingest_ms",
    "load_ms",
)


@dataclass(frozen=True, slots=True)
class _Return:
    """One kill: seconds since it, and milliseconds of processor time for each agent until all were back."""

    serves_s: float
    back_s: tuple[float, ...]
    open_s: float
    controller_ms: float
    ingest_ms: float
    load_ms: float


def _kill(layout: AgentLayout, within_s: float) -> _Return:
    """Kills the controller, starts it again and waits for all agents."""
    others = (layout.relays, layout.loads)
    before = [sum_cpu_s(group) for group in others]
    begun_s = time.monotonic()
    layout.end_controller(signal.SIGKILL)
    layout.start_controller()
    while metric(layout.metrics, "eelgrid_agents_connected") is None:
        time.sleep(0.05)
    # Without a compilation of kernels, which may end meanwhile.
    serves_s, started_s = time.monotonic() - begun_s, own_cpu_s(layout.controller)
    while len(found := layout.read_welcomes(begun_s)) < layout.agents and time.monotonic() - begun_s < within_s:
        time.sleep(0.25)
    while (closed := metric(layout.metrics, "eelgrid_unreported_nodes")) and time.monotonic() - begun_s < within_s:
        time.sleep(0.25)
    open_s = float("inf") if closed else time.monotonic() - begun_s
    used = (
        own_cpu_s(layout.controller) - started_s,
        *(sum_cpu_s(g) - was for g, was in zip(others, before, strict=True)),
    )
    ordered = sorted(at - begun_s for at in found.values())
    back_s = tuple(
        ordered[wanted - 1] if len(ordered) >= (wanted := max(1, round(share * layout.agents))) else float("inf")
        for share in _SHARES
    )
    return _Return(serves_s, back_s, open_s, *(1e3 * one / layout.agents for one in used))


def _describe(layout: AgentLayout, options: Options, found: Sequence[_Return], *, is_older: bool) -> str:
    shares = ", ".join(f"{share:.0%} {spread([one.back_s[at] for one in found])}" for at, share in enumerate(_SHARES))
    since = spread([one.back_s[-1] - one.serves_s for one in found])
    cost = [spread([getattr(one, name) for one in found]) for name in ("controller_ms", "ingest_ms", "load_ms")]
    return (
        f"{layout.agents} {'older ' if is_older else ''}agents x {options.gpus} GPUs, sent every {options.interval:g} s, {layout.ingests} ingest "
        f"processes, {cores()} cores: seconds since the kill: serves {spread([one.serves_s for one in found])}, back "
        f"{shares}, {since} after it serves; all nodes open {spread([one.open_s for one in found])}; processor ms an agent: controller {cost[0]}, ingest {cost[1]}, load {cost[2]}"
    )


@benchmark()
@click.option("--agents", default="1000,4000")
@click.option("--ingests", default="0,2", help="Numbers of ingest processes; 0 for agents that connect directly.")
@click.option("--older", is_flag=True, help="Also with agents whose streams end with the leader.")
@click.option("--gpus", default=8)
@click.option("--interval", default=5.0, help="Seconds between two batches of an agent.")
@click.option("--kills", default=3)
@click.option("--pause", default=10.0, help="Seconds from the last return to the next kill.")
@click.option("--within", default=300.0, help="Seconds after which a return is given up.")
def main(options: Options) -> int:
    """Measures every layout and writes a CSV."""
    rows: list[tuple[float, ...]] = []
    is_met = True
    with tempfile.TemporaryDirectory() as scratch:
        frames = Path(scratch) / "frames"
        record_agent(frames, gpus=options.gpus, interval_s=options.interval)
        for agents in map(int, split_numbers(options.agents)):
            for ingests in sorted({int(one) for one in options.ingests.split(",")}):
                for is_older in (True, False) if options.older and ingests else (False,):
                    layout = AgentLayout(options, Path(scratch), agents, ingests, frames, is_older=is_older)
                    found = list[_Return]()
                    with layout.run():
                        for kill in range(options.kills):
                            time.sleep(options.pause)
                            one = _kill(layout, options.within)
                            found.append(one)
                            own = (one.controller_ms, one.ingest_ms, one.load_ms)
                            rows.append((agents, ingests, is_older, kill, one.serves_s, *one.back_s, one.open_s, *own))
                            write_csv(options.out / "reconnects.csv", _COLUMNS, rows)
                    is_met &= is_older or max(max(one.back_s[-1], one.open_s) for one in found) <= _BACK_S_MOST
                    print(_describe(layout, options, found, is_older=is_older), flush=True)
    return report_promise(f"all back within {_BACK_S_MOST:g} s of each kill", kept=is_met)


if __name__ == "__main__":
    sys.exit(main())
