"""Processor time and memory of the controller by agents: connected directly, and behind ingest processes.

Each number of agents is measured directly and behind each number of ingest processes, one after the other, so that a
figure is compared with its neighbour on the same machine. Agents are replayed (bench/agent_replay.py): what a real one
sends, each over a connection and a stream of its own. In the end every tick that was sent has to be counted.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bench.agent_layout import AgentLayout
from bench.agent_replay import record_agent
from bench.processes import cores, metric, spread, sum_cpu_s
from bench.runner import Options, benchmark, report_promise, split_numbers
from bench.tables import write_csv

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


class _Measurement:
    """Windows of one layout that runs."""

    def __init__(self, layout: AgentLayout, ticks: int) -> None:
        """`ticks` are those of a batch."""
        self._layout, self._ticks = layout, ticks

    def measure(self, seconds: float) -> _Row:
        """Measures one window."""
        layout = self._layout
        groups = ([layout.controller], layout.relays, layout.loads)
        begun_s, before, ticks = (
            time.monotonic(),
            [sum_cpu_s(group) for group in groups],
            metric(layout.metrics, _TICKS),
        )
        time.sleep(seconds)
        passed_s = time.monotonic() - begun_s
        shares = [(sum_cpu_s(group) - was) / passed_s for group, was in zip(groups, before, strict=True)]
        counted = (metric(layout.metrics, _TICKS) or 0.0) - (ticks or 0.0)
        rss = [sum(one.memory_info().rss for one in group) for group in groups]
        return _Row(*shares, rss[0], rss[1], counted / self._ticks / passed_s)

    def finish(self) -> tuple[int, float, float]:
        """Stops the load; returns the ticks that were sent, how many of them are not counted, and streams that ended."""
        said = self._layout.finish()
        sent = sum(one["ticks"] for one in said)
        deadline_s = time.monotonic() + 60.0
        while (missing := sent - (metric(self._layout.metrics, _TICKS) or 0.0)) and time.monotonic() < deadline_s:
            time.sleep(0.5)
        return sent, missing, sum(one["ended"] for one in said)


def _describe(layout: AgentLayout, options: Options, rows: Sequence[_Row], end: tuple[int, float, float]) -> str:
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
                layout = AgentLayout(options, Path(scratch), agents, ingests, frames)
                with layout.run():
                    measurement = _Measurement(layout, ticks)
                    found = [measurement.measure(options.seconds) for _ in range(options.windows)]
                    end = measurement.finish()
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
