"""A public trace through the core by mode of backfill: how long work waits, how busy GPUs are, and which promises move.

Plays jobs of Philly (DATA/philly, CC-BY-4.0) in simulated time, each with its true run time, on nodes of 8 GPUs of which there
are so many that work must wait. The decisions are those of the product: places, reserved starts and promises. A job of more
than 8 GPUs is a gang of nodes. Without backfill whatever fits starts, so large jobs wait for as long as small ones go on.

With `--overstated F` users state 1 to 2 F - 1 times what their jobs take, as they do where a job is ended at its stated time
(Mu'alem and Feitelson, IEEE TPDS 12(6), 2001, found factors up to hundreds), and the same is played once more with jobs that
are processes and report their progress, a minute after their start.
"""

import heapq
import random
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
    AttemptState,
    AttemptStatus,
    BackfillMode,
    JobProgress,
    Mobility,
    ProcessSpec,
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
# When a job reports its progress after its start, in seconds: twice, for a pace.
_REPORTED_S = (1, 63)
_SEED = 7


class TraceJob(NamedTuple):
    """A job of the trace, in whole seconds from its beginning."""

    submit_s: int
    run_s: int
    gpus: int
    # What its user expects; 0 for what it takes.
    stated_s: int = 0


def overstate_jobs(jobs: list[TraceJob], factor: float) -> list[TraceJob]:
    """Returns the jobs with what their users state: 1 to 2 F - 1 times the true run time, F times in the mean."""
    chance = random.Random(_SEED)
    return [job._replace(stated_s=max(1, int(job.run_s * chance.uniform(1.0, 2.0 * factor - 1.0)))) for job in jobs]


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


def build_request(number: int, job: TraceJob, *, is_process: bool = False) -> SubmitWorkloadRequest:
    """Builds the submission of a job: up to 8 GPUs on one node, else equal parts of as few nodes as are needed."""
    replicas = next(count for count in range(1, job.gpus + 1) if job.gpus % count == 0 and job.gpus // count <= 8)
    request = ResourceRequest(cpu_milli=0, memory_bytes=0, gpu_count=job.gpus // replicas, gpu_milli=1000)
    spec = WorkloadSpec(
        name=f"j{number}",
        request=request,
        replicas=replicas,
        expected_runtime_s=float(job.stated_s or job.run_s),
        process=ProcessSpec(argv=("true",), working_directory="/") if is_process else None,
        mobility=Mobility.FIXED if is_process else Mobility.UNSPECIFIED,
    )
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
    # By how much starts were off what they were promised at first, in seconds.
    off_s: list[float] = field(default_factory=list)
    first_ns: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0
    end_s: int = 0


class TraceSimulation:
    """Plays jobs against a core in simulated time."""

    def __init__(self, jobs: list[TraceJob], nodes: int, mode: BackfillMode, *, reports: bool = False) -> None:
        """With `reports` jobs are processes that report their progress."""
        self._jobs, self._now_s, self._reports = jobs, 0, reports
        self._core = build_empty_cluster(
            nodes, mode, model="V100", cpu_milli=96_000, memory_bytes=2**39, runs_processes=reports
        )
        # When, whose, and the step that it reports, 0 for its end.
        self._ends: list[tuple[int, int, int]] = []
        self.run = TraceRun()

    def play(self, progress: Progress | None = None) -> TraceRun:
        """Plays all jobs to their end."""
        begin_s = time.process_time()
        for number, job in enumerate(self._jobs):
            self._advance(job.submit_s + 1)
            request = build_request(number, job, is_process=self._reports)
            self._apply(self._core.submit(request, now_ns=self._now_s * _NS))
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
        self._now_s, number, step = heapq.heappop(self._ends)
        if self._reports:
            self._report(number, step)
        else:
            self._apply(self._core.cancel(f"j{number}", now_ns=self._now_s * _NS))
        self._wake()

    def _report(self, number: int, step: int) -> None:
        """Tells what the nodes of a job say of its processes: the step of the first one, or that all have ended."""
        key, now_ns = f"j{number}", self._now_s * _NS
        progress = JobProgress(step=step, total=self._jobs[number].run_s, time_ns=now_ns)
        for place in self._core.workload(key).placements:
            if step and place.replica:
                break
            status = AttemptStatus(
                workload_id=key,
                replica=place.replica,
                attempt=1,
                state=AttemptState.RUNNING if step else AttemptState.ENDED,
                exit_code=None if step else 0,
                started_ns=self.run.starts_s[number] * _NS,
                ended_ns=0 if step else now_ns,
                progress=progress if step else None,
            )
            self._apply(self._core.record_attempts(place.node_name, (status,), now_ns=now_ns))

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
                run_s = self._jobs[number].run_s
                heapq.heappush(self._ends, (self._now_s + run_s, number, 0))
                for after_s in _REPORTED_S if self._reports and run_s > _REPORTED_S[-1] else ():
                    heapq.heappush(self._ends, (self._now_s + after_s, number, after_s))
                promised_ns = run.promises_ns.get(event.workload_id)
                if event.workload_id in run.first_ns:
                    run.off_s.append(abs(run.first_ns[event.workload_id] / _NS - self._now_s))
                run.late += promised_ns is not None and self._now_s * _NS > promised_ns + OVERRUN_TOLERANCE_NS
            elif isinstance(event, WorkloadPromised) and event.promise is not None:
                before_ns = run.promises_ns.get(event.workload_id)
                run.promised += before_ns is None
                run.first_ns.setdefault(event.workload_id, event.promise.start_ns)
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
        "first_promise_off_s": float(np.mean(run.off_s)) if run.off_s else 0.0,
        "cpu_s": run.cpu_s,
    }


@benchmark()
@click.option("--data", type=click.Path(path_type=Path), default=default_data, help="Folder of public data sets.")
@click.option("--jobs", type=click.IntRange(2), default=2000, show_default=True, help="Jobs of the trace.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes of 8 GPUs. Default: so many that work waits.")
@click.option("--overstated", type=click.FloatRange(1.0), help="Users state so many times the run time, in the mean.")
def main(options: Options) -> int:
    """Plays Philly by mode of backfill and writes backfill_trace.csv."""
    jobs = read_jobs(options.data / "philly", options.jobs)
    nodes = options.nodes or choose_nodes_count(jobs)
    span_h = (jobs[-1].submit_s - jobs[0].submit_s) / 3600
    print(f"{len(jobs):,} jobs of {span_h:.1f} h on {nodes} nodes of {NODE_GPUS} GPUs")
    rows, is_kept = [], True
    played = [(mode.name.lower(), jobs, mode, False) for mode in MODES]
    if options.overstated:
        stated = overstate_jobs(jobs, options.overstated)
        for mode in MODES[1:]:
            name = mode.name.lower()
            played += [(f"{name}, overstated", stated, mode, False), (f"{name}, progress", stated, mode, True)]
    for name, some, mode, reports in played:
        run = TraceSimulation(some, nodes, mode, reports=reports).play(Progress(f"jobs, {name}"))
        figures = summarize_run(jobs, nodes, run)
        rows += [[name, metric, value] for metric, value in figures.items()]
        is_kept &= mode is BackfillMode.NONE or reports or not (run.later or run.late)
        print(
            f"{name:<24} wait mean {figures['wait_mean_s']:,.0f} s, p99 {figures['wait_p99_s']:,.0f} s, of {_LARGE_GPUS} GPUs "
            f"and more {figures['wait_mean_large_s']:,.0f} s; busy {100 * figures['utilisation']:.1f} %; "
            f"{run.promised:,} promised, {run.later} later, {run.late} late, off by "
            f"{figures['first_promise_off_s']:,.0f} s at first; {figures['cpu_s']:.0f} s CPU"
        )
    write_csv(options.out / "backfill_trace.csv", ("mode", "metric", "value"), rows)
    return report_promise("no promised start becomes later, and no start is after its promise", kept=is_kept)


if __name__ == "__main__":
    sys.exit(main())
