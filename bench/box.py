"""One box: idle gaps of GPUs between short jobs, `eelctl run` to its first output, a list of many queued jobs.

A controller and an agent with 8 simulated GPUs run real processes. The gap of a GPU is the time from the end of one
job's process to the start of the next job's on it, by the agent's clock. `run` is measured by its client's calls, from
the submission to the first output, and as a whole process of eelctl. Then every GPU is held and jobs are queued.

Targets: no device held twice, every exit code right, a gap of 50 ms at p99, 150 ms to the first output, and a list in
0.3 s as the client receives it.
"""

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import click

from bench.processes import fleet_file, free_port, running, spread
from bench.runner import Options, Progress, benchmark, report_promise
from bench.tables import write_csv
from eelgrid import Client, Mobility, ProcessSpec, ResourceRequest, Workload, WorkloadPhase, WorkloadSpec, errors

GPUS = 8
_GAP_P99_MOST_S, _FIRST_OUTPUT_MOST_S, _LIST_MOST_S = 0.050, 0.150, 0.300
_START_S = 120.0
_CODES = 5


@contextmanager
def _box(folder: Path) -> Iterator[Client]:
    """A controller and an agent over simulated GPUs, which run processes."""
    port = free_port()
    fleet = fleet_file(folder / "fleet.json", 1, GPUS)
    controller = ["--listen", f"127.0.0.1:{port}", "--metrics", "127.0.0.1:0", "--data", str(folder / "data")]
    agent = [
        "--controller", f"127.0.0.1:{port}", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0",
        "--simulate", str(fleet), "--run-processes", "--state", str(folder / "agent"),
    ]  # fmt: skip
    if Path("/proc/self").stat().st_uid == 0:
        agent.append("--allow-root")
    with (
        running("eelgrid_controller", controller, folder / "controller.log"),
        running("eelgrid_agent", agent, folder / "agent.log"),
        Client(f"127.0.0.1:{port}", timeout_s=30.0) as client,
    ):
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                if client.get_summary().nodes_ready:
                    break
            except errors.EelgridError:
                pass
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no node is ready; see {folder}")
            time.sleep(0.1)
        yield client


def _spec(folder: Path, *argv: str, gpus: int = 1, name: str = "job") -> WorkloadSpec:
    return WorkloadSpec(
        name=name,
        request=ResourceRequest(cpu_milli=10, gpu_count=gpus, gpu_milli=1000 if gpus else 0),
        mobility=Mobility.FIXED,
        process=ProcessSpec(argv=argv, working_directory=str(folder), environment={"PATH": "/usr/bin:/bin"}),
    )


def _run_jobs(client: Client, folder: Path, count: int, seconds: float) -> list[Workload]:
    """Queues short jobs, and returns them when all have ended."""
    for n in range(count):
        command = f"sleep {seconds:g}; exit {n % _CODES}"
        client.submit_workload(_spec(folder, "/bin/sh", "-c", command), workload_id=f"j-{n}")
    progress = Progress("jobs")
    while True:
        found = client.get_summary()
        left = found.pending + found.placed
        progress.show(count - left, count)
        if not left:
            break
        time.sleep(0.2)
    return [client.get_workload(f"j-{n}") for n in range(count)]


def _find_gaps(jobs: list[Workload]) -> tuple[list[float], int]:
    """Returns the gaps of all GPUs in seconds, and how often one was held twice."""
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for job in jobs:
        (attempt,) = job.attempts
        spans[job.placements[0].gpu_uuids[0]].append((attempt.started_ns, attempt.ended_ns))
    gaps = [(after[0] - before[1]) / 1e9 for held in spans.values() for before, after in pairwise(sorted(held))]
    return gaps, sum(gap < 0.0 for gap in gaps)


def _time_first_output(client: Client, folder: Path, runs: int) -> list[float]:
    taken = []
    for _ in range(runs + 1):
        begun = time.perf_counter()
        job = client.submit_workload(_spec(folder, "/bin/echo", "hello"))
        assert next(client.read_logs(job.workload_id, follow=True)) == "hello\n"
        taken.append(time.perf_counter() - begun)
        client.wait(job.workload_id, until=lambda found: found.phase.is_ended)
    return taken[1:]


def _time_list(client: Client, folder: Path, queued: int) -> list[float]:
    """Holds every GPU, queues jobs, and lists those that wait."""
    client.submit_workload(_spec(folder, "sleep", "3600", gpus=GPUS), workload_id="holder")
    progress = Progress("queued jobs")
    for n in range(queued):
        client.submit_workload(_spec(folder, "true", name=f"q-{n}"), workload_id=f"q-{n}")
        progress.show(n + 1, queued)
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        assert sum(1 for _ in client.list_workloads(phases=[WorkloadPhase.PENDING])) == queued
        taken.append(time.perf_counter() - begun)
    client.cancel_workload("holder")
    return taken


@benchmark()
@click.option("--jobs", default=1000, help="Short jobs for the gaps.")
@click.option("--seconds", default=0.1, help="How long each of them takes.")
@click.option("--queued", default=10_000, help="Queued jobs for the list; 0 for none.")
@click.option("--runs", default=20, help="Runs to the first output.")
def main(options: Options) -> int:
    """Measures one box after another, each with an empty state."""
    rows: list[tuple[str, float, float]] = []
    kept = True
    with tempfile.TemporaryDirectory(prefix="box") as name:
        folder = Path(name)
        with _box(folder) as client:
            jobs = _run_jobs(client, folder, options.jobs, options.seconds)
            gaps, twice = _find_gaps(jobs)
            wrong = sum(job.exit_code != n % _CODES for n, job in enumerate(jobs))
            first = _time_first_output(client, folder, options.runs)
            listed = _time_list(client, folder, options.queued) if options.queued else []
    p99_s = statistics.quantiles(gaps, n=100)[98]
    begun_ns = min(job.attempts[0].started_ns for job in jobs)
    makespan_s = (max(job.attempts[0].ended_ns for job in jobs) - begun_ns) / 1e9
    print(f"{len(jobs)} jobs of {options.seconds:g} s on {GPUS} GPUs: {makespan_s:.1f} s from first start to last end")
    print(f"held twice {twice}, wrong exit codes {wrong}")
    print(f"idle gap   median {statistics.median(gaps) * 1e3:.1f} ms, p99 {p99_s * 1e3:.1f} ms")
    print(f"to output  {spread(first)} s")
    rows += [("gap_p50_s", statistics.median(gaps), 0.0), ("gap_p99_s", p99_s, _GAP_P99_MOST_S)]
    rows += [("held_twice", twice, 0.0), ("wrong_exit_codes", wrong, 0.0), ("makespan_s", makespan_s, 0.0)]
    rows += [("first_output_s", statistics.median(first), _FIRST_OUTPUT_MOST_S)]
    kept = not twice and not wrong and p99_s <= _GAP_P99_MOST_S and statistics.median(first) <= _FIRST_OUTPUT_MOST_S
    if listed:
        print(f"list of {options.queued} queued jobs {spread(listed)} s")
        rows += [("list_s", statistics.median(listed), _LIST_MOST_S)]
        kept = kept and statistics.median(listed) <= _LIST_MOST_S
    write_csv(options.out / "box.csv", ("metric", "value", "target"), rows)
    return report_promise("none held twice, gap p99 50 ms, first output 150 ms, list 0.3 s", kept=kept)


if __name__ == "__main__":
    sys.exit(main())
