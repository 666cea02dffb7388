"""Processor time and memory of the controller by agents: connected directly, and behind ingest processes.

Each number of agents is measured directly and behind each number of ingest processes, one after the other, so that a
figure is compared with its neighbour on the same machine. Agents are replayed (bench/agent_replay.py): what a real one
sends, each over a connection and a stream of its own. In the end every tick that was sent has to be counted.
"""

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click
import psutil

from bench.agent_replay import record_agent
from bench.processes import cores, cpu_s, free_port, metric, running, spread
from bench.runner import Options, benchmark, report_promise, split_numbers
from bench.tables import write_csv

_WITHIN_S = 600.0
# Agents of one replaying process.
_REPLAYED_MOST = 5_000
_COLUMNS = (
    "agents",
    "ingests",
    "window",
    "controller_cpu",
    "ingest_cpu",
    "replay_cpu",
    "controller_rss",
    "ingest_rss",
    "batches_per_s",
)
_TICKS = "eelgrid_samples_received_total"


@dataclass(frozen=True, slots=True)
class _Row:
    """A window: shares of a core of the controller, of all ingest processes and of all load; bytes; batches a second."""

    controller: float
    ingest: float
    replay: float
    controller_rss: int
    ingest_rss: int
    batches_per_s: float


def _set_interval(address: str, interval_s: float) -> None:
    from eelgrid_protos import messages, rpc, transport

    with transport.open_blocking_channel(address, tls=None) as channel:
        operators = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
        policy = operators.get_policy(messages.GetPolicyRequest()).policy
        wanted = replace(policy, send_interval_s=interval_s)
        operators.update_policy(messages.UpdatePolicyRequest(policy=wanted))


class _Layout:
    """A controller, ingest processes and load that runs."""

    def __init__(self, options: Options, agents: int, ingests: int, frames: Path, ticks: int) -> None:
        self.agents, self.ingests = agents, ingests
        self._options, self._frames, self._ticks = options, frames, ticks
        self._name = f"{agents}-{ingests}"
        self._address, self._metrics = f"127.0.0.1:{free_port()}", free_port()
        self._relays: list[psutil.Process] = []
        self._loads: list[psutil.Process] = []
        self._logs: list[Path] = []

    @contextmanager
    def run(self, folder: Path) -> Iterator[None]:
        """Starts all of it, until every agent is connected and sends."""
        out, options = self._options.out, self._options
        flags = ["--listen", self._address, "--metrics", f"127.0.0.1:{self._metrics}", "--no-savings"]
        flags += ["--data", str(folder / self._name)]
        with ExitStack() as stack:
            log = out / f"controller-{self._name}.log"
            self._controller = stack.enter_context(running("eelgrid_controller", flags, log))
            self._wait_for("eelgrid_agents_connected", 0)
            _set_interval(self._address, options.interval)
            targets = [self._address]
            if self.ingests:
                targets = [f"127.0.0.1:{free_port()}" for _ in range(self.ingests)]
            for at, target in enumerate(targets[: self.ingests]):
                own = ["--ingest", self._address, "--listen", target, "--metrics", f"127.0.0.1:{free_port()}"]
                log = out / f"ingest-{self._name}-{at}.log"
                self._relays.append(stack.enter_context(running("eelgrid_controller", own, log)))
            if self.ingests:
                self._wait_for("eelgrid_ingest_processes", self.ingests)
            for first in range(0, self.agents, _REPLAYED_MOST):
                own = ["--frames", str(self._frames), "--controller", ",".join(targets), "--first", str(first)]
                own += ["--agents", str(min(_REPLAYED_MOST, self.agents - first)), "--interval", str(options.interval)]
                self._logs.append(out / f"replay-{self._name}-{first}.log")
                self._loads.append(stack.enter_context(running("bench.agent_replay", own, self._logs[-1])))
            began_s = time.monotonic()
            self._wait_for("eelgrid_agents_connected", self.agents)
            self.joined_s = time.monotonic() - began_s
            for load in self._loads:
                load.send_signal(signal.SIGUSR2)
            time.sleep(2.0 * options.interval)
            yield

    def _wait_for(self, name: str, value: float) -> None:
        deadline_s = time.monotonic() + _WITHIN_S
        while metric(self._metrics, name) != value:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{name} is {metric(self._metrics, name)}, not {value}; see {self._options.out}")
            time.sleep(0.25)

    def measure(self) -> _Row:
        """Measures one window."""
        groups = ([self._controller], self._relays, self._loads)
        begun_s, before, ticks = time.monotonic(), [_used_s(group) for group in groups], metric(self._metrics, _TICKS)
        time.sleep(self._options.seconds)
        passed_s = time.monotonic() - begun_s
        shares = [(_used_s(group) - was) / passed_s for group, was in zip(groups, before, strict=True)]
        counted = (metric(self._metrics, _TICKS) or 0.0) - (ticks or 0.0)
        rss = [sum(one.memory_info().rss for one in group) for group in groups]
        return _Row(*shares, rss[0], rss[1], counted / self._ticks / passed_s)

    def finish(self) -> tuple[int, float, float]:
        """Stops the load; returns the ticks that were sent, how many of them are not counted, and streams that ended."""
        for load in self._loads:
            load.send_signal(signal.SIGUSR1)
        said = [_read_summary(log) for log in self._logs]
        sent = sum(one["ticks"] for one in said)
        deadline_s = time.monotonic() + 60.0
        while (missing := sent - (metric(self._metrics, _TICKS) or 0.0)) and time.monotonic() < deadline_s:
            time.sleep(0.5)
        return sent, missing, sum(one["ended"] for one in said)


def _used_s(group: Sequence[psutil.Process]) -> float:
    return sum(map(cpu_s, group))


def _read_summary(log: Path) -> dict[str, int]:
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s:
        for line in log.read_text().splitlines():
            if line.startswith('{"batches"') and line.endswith("}"):
                found: dict[str, int] = json.loads(line)
                return found
        time.sleep(0.2)
    raise SystemExit(f"the load said nothing; see {log}")


def _describe(layout: _Layout, options: Options, rows: Sequence[_Row], end: tuple[int, float, float]) -> str:
    percent = [spread([100.0 * getattr(row, name) for row in rows]) for name in ("controller", "ingest", "replay")]
    cost = spread([1e6 * row.controller / max(row.batches_per_s, 1e-9) for row in rows])
    sent, missing, ended = end
    return (
        f"{layout.agents} agents x {options.gpus} GPUs, sent every {options.interval:g} s, {layout.ingests} ingest "
        f"processes, {cores()} cores: connected in {layout.joined_s:.0f} s; "
        f"{spread([row.batches_per_s for row in rows])} batches a second; controller {percent[0]} % of a core, {cost} "
        f"us a batch, {rows[-1].controller_rss / 1e6:.0f} MB; ingest {percent[1]} %, {rows[-1].ingest_rss / 1e6:.0f} MB; "
        f"load {percent[2]} %; of {sent} ticks sent {missing:.0f} not counted, {ended:.0f} streams ended"
    )


@benchmark()
@click.option("--agents", default="1000,4000,10000")
@click.option("--ingests", default="0,1,2", help="Numbers of ingest processes; 0 for agents that connect directly.")
@click.option("--gpus", default=8)
@click.option("--interval", default=5.0, help="Seconds between two batches of an agent.")
@click.option("--windows", default=4)
@click.option("--seconds", default=5.0)
def main(options: Options) -> int:
    """Measures every layout and writes a CSV."""
    rows: list[tuple[float, ...]] = []
    layouts, is_complete = sorted({int(one) for one in options.ingests.split(",")}), True
    with tempfile.TemporaryDirectory() as scratch:
        frames = Path(scratch) / "frames"
        ticks = record_agent(frames, gpus=options.gpus, interval_s=options.interval)
        for agents in map(int, split_numbers(options.agents)):
            for ingests in layouts:
                layout = _Layout(options, agents, ingests, frames, ticks)
                with layout.run(Path(scratch)):
                    found = [layout.measure() for _ in range(options.windows)]
                    end = layout.finish()
                rows += [
                    (agents, ingests, index, *(getattr(one, name) for name in _Row.__slots__))
                    for index, one in enumerate(found)
                ]
                is_complete &= not end[1] and not end[2]
                print(_describe(layout, options, found, end), flush=True)
                write_csv(options.out / "ingest.csv", _COLUMNS, rows)
    return report_promise("every tick counted, no stream ended", kept=is_complete)


if __name__ == "__main__":
    sys.exit(main())
