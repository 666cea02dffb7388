"""What a look at a Slurm costs the controller, by how many jobs have ended: processor time of the engine and its core.

A Slurm in memory, whose answers are made before the clock starts, so that nothing but the engine and a core without a journal
is timed. Jobs of minutes run on all GPUs and as many others wait as asked; before each look one job ends, and the core starts the next. Jobs that ended
before are still in Slurm's answers (MinJobAge) and in the core. Looks with columns and those with a full answer are told apart.

Target: with 10,000 jobs that have ended a look takes at most twice as long as with none, full answers aside.
"""

import asyncio
import gc
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
from tests.fakes.core_port import CorePort, SlurmClock
from tests.fakes.slurm_cluster import GPUS, SlurmInMemory

from bench.runner import Options, benchmark, report_promise
from bench.tables import format_table, write_csv
from eelgrid_controller.engines.slurm.answers import SlurmJob
from eelgrid_controller.engines.slurm.engine import SlurmEngine, SlurmSettings
from eelgrid_controller.engines.slurm.steering import SteeringSettings, build_request

_RATIO_MOST = 2.0
# Looks in a second, as while jobs come and go.
_LOOK_S = 0.05
_RUNS_S, _SHORT_S, _BEFORE_S = 7_200.0, 0.01, 600.0
_COLUMNS, _FULL = "columns", "full answer"


class _PreparedSlurm(SlurmInMemory):
    """A Slurm in memory that gives the answers that were made last."""

    columns = full = b""

    async def prepare(self) -> None:
        """Makes the answers of the next look."""
        self.columns, self.full = await super().read_columns(), await super().read_jobs()

    async def read_columns(self) -> bytes:
        """Returns what was made."""
        return self.columns

    async def read_jobs(self) -> bytes:
        """Returns what was made."""
        self.full_answers += 1
        return self.full

    def _schedule(self) -> None:
        """Starts nothing while the clock runs."""

    def start_jobs(self) -> None:
        """Starts what fits."""
        super()._schedule()


@dataclass(frozen=True, slots=True, kw_only=True)
class LookCosts:
    """Milliseconds of each look with so many ended jobs, by what it read."""

    ended: int
    waiting: int
    spans_ms: dict[str, list[float]]

    def median_ms(self, kind: str) -> float:
        """Returns the median of one kind of looks."""
        return statistics.median(self.spans_ms[kind])


def _make(slurm: Any, clock: Any) -> tuple[CorePort, SlurmEngine]:
    port = CorePort(clock)
    engine = SlurmEngine(
        slurm, loop=port, has_agent=lambda _: False, settings=SlurmSettings(), clock=clock, log=logging.getLogger("bench")
    )  # fmt: skip
    return port, engine


def _end_some(slurm: Any, port: Any, ended: int) -> None:
    """Adds jobs that have ended, in Slurm and in the core."""
    for _ in range(ended):
        number = slurm.submit(runs_s=_SHORT_S)
        job = slurm.jobs[int(number)]
        job.state, job.node, job.is_held, job.comment = "COMPLETED", "n0", False, "eelgrid:placed:n0"
        job.started_s, job.ended_s = slurm.now_s - _BEFORE_S, slurm.now_s - _BEFORE_S
        request = build_request(SlurmJob(job_id=number, user="alice", partition="main", cpus=1), SteeringSettings())
        port.core.submit(request, now_ns=int(slurm.now_s * 1e9))
        port.core.cancel(request.workload_id, reason="it has ended", now_ns=int(slurm.now_s * 1e9))


async def measure_looks(*, ended: int, waiting: int, looks: int) -> LookCosts:
    """Measures looks of one engine."""
    slurm = _PreparedSlurm()
    clock = SlurmClock(slurm)
    port, engine = _make(slurm, clock)
    await slurm.prepare()
    await engine.look()
    _end_some(slurm, port, ended)
    running = len(slurm.names) * GPUS
    for _ in range(running + waiting + looks):
        slurm.submit(runs_s=_RUNS_S)
    while sum(job.state == "RUNNING" for job in slurm.jobs.values()) < running:
        await slurm.prepare()
        await engine.look()
        slurm.start_jobs()
        slurm.now_s += _LOOK_S
    spans: dict[str, list[float]] = {_COLUMNS: [], _FULL: []}
    gc.collect()
    for _ in range(looks):
        ending = next(job for job in slurm.jobs.values() if job.state == "RUNNING")
        ending.state, ending.ended_s = "COMPLETED", slurm.now_s
        slurm.start_jobs()
        slurm.now_s += _LOOK_S
        await slurm.prepare()
        full, begun_s = slurm.full_answers, time.process_time()
        await engine.look()
        took_ms = 1e3 * (time.process_time() - begun_s)
        spans[_FULL if slurm.full_answers > full else _COLUMNS].append(took_ms)
    slurm.start_jobs()
    started = sum(job.state == "RUNNING" for job in slurm.jobs.values())
    assert started == running, f"{started} of {running} jobs run after {looks} looks"
    return LookCosts(ended=ended, waiting=waiting, spans_ms=spans)


def _tabulate(costs: Sequence[LookCosts]) -> list[tuple[Any, ...]]:
    return [
        (one.ended, one.waiting, kind, len(spans), f"{statistics.median(spans):.2f}", f"{max(spans):.2f}")
        for one in costs
        for kind, spans in one.spans_ms.items()
        if spans
    ]


@benchmark()
@click.option("--ended", multiple=True, type=click.IntRange(0, 100_000), default=(0, 1_000, 10_000), help="Ended jobs.")
@click.option("--waiting", multiple=True, type=click.IntRange(0, 10_000), default=(100, 1_000), help="Waiting jobs.")
@click.option("--looks", type=click.IntRange(10, 10_000), default=100, help="Looks of each.")
def main(options: Options) -> int:
    """Measures each number of ended jobs beside each number of waiting ones."""
    logging.getLogger("bench").setLevel(logging.ERROR)
    costs = [
        asyncio.run(measure_looks(ended=ended, waiting=waiting, looks=options.looks))
        for waiting in options.waiting
        for ended in sorted(options.ended)
    ]
    header = ("ended", "waiting", "looks with", "looks", "median ms", "longest ms")
    print(format_table(header, _tabulate(costs), words=3))
    rows = [(one.ended, one.waiting, kind, ms) for one in costs for kind, spans in one.spans_ms.items() for ms in spans]
    write_csv(options.out / "looks.csv", ("ended", "waiting", "kind", "ms"), rows)
    ratios = list[float]()
    for waiting in options.waiting:
        found = [one.median_ms(_COLUMNS) for one in costs if one.waiting == waiting]
        ratios.append(found[-1] / found[0])
        print(
            f"{waiting} waiting: {max(options.ended)} ended take {ratios[-1]:.2f} times what {min(options.ended)} take"
        )
    return report_promise(
        f"at most {_RATIO_MOST:g} times as long with the most ended jobs", kept=max(ratios) <= _RATIO_MOST
    )


if __name__ == "__main__":
    raise SystemExit(main())
