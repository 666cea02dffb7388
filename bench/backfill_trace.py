"""A public trace through the core by mode of backfill: how long work waits, how busy GPUs are, and which promises move.

Plays jobs of Philly (DATA/philly, CC-BY-4.0) in simulated time, each with its true run time, on nodes of 8 GPUs of which there
are so many that work must wait. The decisions are those of the product: places, reserved starts and promises. A job of more
than 8 GPUs is a gang of nodes. Without backfill whatever fits starts, so large jobs wait for as long as small ones go on.
"""

import heapq
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import pandas as pd

from bench.backfill import NODE_GPUS, build_empty_cluster
from bench.runner import Options, Progress, Unusable, benchmark, default_data, report_promise
from bench.tables import write_csv
from eelgrid_controller.core.steps import CoreStep
from eelgrid_controller.queueing.runtime_estimates import OVERRUN_TOLERANCE_NS
from eelgrid_controller.state.events import WorkloadPlaced, WorkloadPromised
from eelgrid_protos.messages import (
    BackfillMode,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadSpec,
)

_NS = 10**9
_LARGE_GPUS = 8
_BEGIN = "2017-10-10"
# More work than GPUs, so that a queue builds up and drains again.
_LOAD = 1.1
MODES = (BackfillMode.NONE, BackfillMode.EASY, BackfillMode.CONSERVATIVE)


class TraceJob(NamedTuple):
    """A job of the trace, in whole seconds from its beginning."""

    submit_s: int
    run_s: int
    gpus: int


def read_jobs(folder: Path, count: int) -> list[TraceJob]:
    """Reads the first jobs of Philly's busiest days; raises Unusable without the data."""
    path = folder / "philly.csv"
    if not path.is_file():
        raise Unusable(f"{path} is not there; name the folder of public data with --data or EELGRID_DATA")
    table = pd.read_csv(path, parse_dates=["timestamp"])
    begin = pd.Timestamp(_BEGIN)
    chosen = table[table.timestamp >= begin].sort_values("timestamp", kind="stable").head(count)
    seconds = (chosen.timestamp - begin).dt.total_seconds()
    return [
        TraceJob(int(submit_s), max(1, int(run_s)), gpus)
        for submit_s, run_s, gpus in zip(
            seconds.tolist(), chosen.duration.tolist(), chosen.num_gpus.tolist(), strict=True
        )
    ]


def choose_nodes_count(jobs: list[TraceJob]) -> int:
    """Returns how many nodes the jobs keep busy beyond what they have, but as many as the largest needs."""
    span_s = max(1, jobs[-1].submit_s - jobs[0].submit_s)
    # What runs on after the last submission does not make anybody wait.
    used_gpu_s = sum(min(job.run_s, max(1, jobs[-1].submit_s - job.submit_s)) * job.gpus for job in jobs)
    return max(1, int(used_gpu_s / span_s / _LOAD / NODE_GPUS), -(-max(job.gpus for job in jobs) // NODE_GPUS))


def build_request(number: int, job: TraceJob) -> SubmitWorkloadRequest:
    """Builds the submission of a job: up to 8 GPUs on one node, else equal parts of as few nodes as are needed."""
    replicas = next(count for count in range(1, job.gpus + 1) if job.gpus % count == 0 and job.gpus // count <= 8)
    request = ResourceRequest(cpu_milli=0, memory_bytes=0, gpu_count=job.gpus // replicas, gpu_milli=1000)
    spec = WorkloadSpec(name=f"j{number}", request=request, replicas=replicas, expected_runtime_s=float(job.run_s))
    return SubmitWorkloadRequest(spec=spec, workload_id=f"j{number}")


@dataclass(slots=True)
class TraceRun:
    """What became of the jobs of a trace under one mode."""

    starts_s: dict[int, int] = field(default_factory=dict)
    promises_ns: dict[str, int] = field(default_factory=dict)
    promised: int = 0
    # Promises that became later, and starts after the promise.
    later: int = 0
    late: int = 0
    cpu_s: float = 0.0
    end_s: int = 0


class TraceSimulation:
    """Plays jobs against a core in simulated time."""

    def __init__(self, jobs: list[TraceJob], nodes: int, mode: BackfillMode) -> None:
        self._jobs, self._now_s = jobs, 0
        self._core = build_empty_cluster(nodes, mode, model="V100", cpu_milli=96_000, memory_bytes=2**39)
        self._ends: list[tuple[int, int]] = []
        self.run = TraceRun()

    def play(self, progress: Progress | None = None) -> TraceRun:
        """Plays all jobs to their end."""
        begin_s = time.process_time()
        for number, job in enumerate(self._jobs):
            self._advance(job.submit_s + 1)
            self._apply(self._core.submit(build_request(number, job), now_ns=self._now_s * _NS))
            if progress is not None:
                progress.show(number + 1, len(self._jobs))
        while self._ends:
            self._end_next()
        self.run.cpu_s, self.run.end_s = time.process_time() - begin_s, self._now_s
        return self.run

    def _advance(self, until_s: int) -> None:
        while self._ends and self._ends[0][0] <= until_s:
            self._end_next()
        self._now_s = max(self._now_s, until_s)
        self._wake()

    def _end_next(self) -> None:
        self._now_s, number = heapq.heappop(self._ends)
        self._apply(self._core.cancel(f"j{number}", now_ns=self._now_s * _NS))
        self._wake()

    def _wake(self) -> None:
        if self._core.is_round_due(self._now_s * _NS):
            self._apply(self._core.retry_waiting(now_ns=self._now_s * _NS))

    def _apply(self, step: CoreStep[object]) -> None:
        events = list(step.events)
        while self._core.has_backlog:
            events += self._core.retry(now_ns=self._now_s * _NS).events
        run = self.run
        for event in events:
            if isinstance(event, WorkloadPlaced):
                number = int(event.workload_id[1:])
                run.starts_s[number] = self._now_s
                heapq.heappush(self._ends, (self._now_s + self._jobs[number].run_s, number))
                promised_ns = run.promises_ns.get(event.workload_id)
                run.late += promised_ns is not None and self._now_s * _NS > promised_ns + OVERRUN_TOLERANCE_NS
            elif isinstance(event, WorkloadPromised) and event.promise is not None:
                before_ns = run.promises_ns.get(event.workload_id)
                run.promised += before_ns is None
                run.later += before_ns is not None and event.promise.start_ns > before_ns
                run.promises_ns[event.workload_id] = event.promise.start_ns


def summarize_run(jobs: list[TraceJob], nodes: int, run: TraceRun) -> dict[str, float]:
    """Returns the figures of a run; waits in seconds, utilisation over the whole run."""
    waits_s = np.array([run.starts_s[number] - job.submit_s - 1 for number, job in enumerate(jobs)], np.float64)
    large = np.array([job.gpus >= _LARGE_GPUS for job in jobs])
    used_gpu_s = sum(job.run_s * job.gpus for job in jobs)
    # While work arrives: what runs on alone afterwards says nothing of the queue.
    last_s = jobs[-1].submit_s
    busy_gpu_s = sum(
        job.gpus * max(0, min(last_s, run.starts_s[number] + job.run_s) - min(last_s, run.starts_s[number]))
        for number, job in enumerate(jobs)
    )
    gpus = nodes * NODE_GPUS
    return {
        "wait_mean_s": float(waits_s.mean()),
        "wait_p99_s": float(np.quantile(waits_s, 0.99)),
        "wait_mean_large_s": float(waits_s[large].mean()) if large.any() else 0.0,
        "wait_most_s": float(waits_s.max()),
        "utilisation": busy_gpu_s / (gpus * max(1, last_s)),
        "utilisation_to_the_end": used_gpu_s / (gpus * run.end_s),
        "promised": float(run.promised),
        "promises_later": float(run.later),
        "starts_late": float(run.late),
        "cpu_s": run.cpu_s,
    }


@benchmark()
@click.option("--data", type=click.Path(path_type=Path), default=default_data, help="Folder of public data sets.")
@click.option("--jobs", type=click.IntRange(2), default=2000, show_default=True, help="Jobs of the trace.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes of 8 GPUs. Default: so many that work waits.")
def main(options: Options) -> int:
    """Plays Philly by mode of backfill and writes backfill_trace.csv."""
    jobs = read_jobs(options.data / "philly", options.jobs)
    nodes = options.nodes or choose_nodes_count(jobs)
    span_h = (jobs[-1].submit_s - jobs[0].submit_s) / 3600
    print(f"{len(jobs):,} jobs of {span_h:.1f} h on {nodes} nodes of {NODE_GPUS} GPUs")
    rows, is_kept = [], True
    for mode in MODES:
        name = mode.name.lower()
        run = TraceSimulation(jobs, nodes, mode).play(Progress(f"jobs, {name}"))
        figures = summarize_run(jobs, nodes, run)
        rows += [[name, metric, value] for metric, value in figures.items()]
        is_kept &= mode is BackfillMode.NONE or not (run.later or run.late)
        print(
            f"{name:<14} wait mean {figures['wait_mean_s']:,.0f} s, p99 {figures['wait_p99_s']:,.0f} s, of {_LARGE_GPUS} GPUs "
            f"and more {figures['wait_mean_large_s']:,.0f} s; busy {100 * figures['utilisation']:.1f} %; "
            f"{run.promised:,} promised, {run.later} later, {run.late} late; {figures['cpu_s']:.0f} s CPU"
        )
    write_csv(options.out / "backfill_trace.csv", ("mode", "metric", "value"), rows)
    return report_promise("no promised start becomes later, and no start is after its promise", kept=is_kept)


if __name__ == "__main__":
    sys.exit(main())
