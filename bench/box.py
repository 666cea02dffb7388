"""One box: idle gaps of GPUs between short jobs, `eelctl run` to its first output, a list of many queued jobs.

A controller and an agent with 8 simulated GPUs run real processes. The gap of a GPU is the time from the end of one
job's process to the start of the next job's on it, by the launcher's clock, while the next one waited, as
`eelgrid_gpu_idle_gap_seconds` has it: one client submits the jobs while they run, and a GPU for which no job has been
submitted yet is not idle for the controller's sake. Each hand-over waits for flushes of the journal and of attempts'
records, so a block of the same disk is flushed every 20 ms beside it: gaps during which the disk itself took more than
20 ms are counted apart, and the same jobs run once more in memory. `run` is measured by its client's calls, from the
submission to the first output, and as a whole process of eelctl. Then every GPU is held and jobs are queued.

Trees of processes that ignore TERM are stopped; a daemon is killed at random moments while jobs run; and the same jobs
go through gflow and task-spooler (`box_peers`).

Targets: no device held twice, every exit code right, a gap of 50 ms at p99 while the disk flushes a block within 20 ms,
150 ms to the first output, and a list in 0.3 s as the client receives the summaries that a table needs.
"""

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random

import click
import psutil

from bench.box_peers import EelgridBox, RunLog, open_queues
from bench.disk_watch import DiskWatch
from bench.processes import spread
from bench.runner import Options, Progress, benchmark, report_promise
from bench.tables import write_csv
from eelgrid import Client, Mobility, ProcessSpec, ResourceRequest, Workload, WorkloadPhase, WorkloadSpec

GPUS = 8
_GAP_P99_MOST_S, _FIRST_OUTPUT_MOST_S, _LIST_MOST_S = 0.050, 0.150, 0.300
_SLOW_FLUSH_S = 0.020
_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of ours is made in it
_CODES = 5
_LISTS = 11


@contextmanager
def _box(folder: Path) -> Iterator[EelgridBox]:
    """A controller and an agent over simulated GPUs, which run processes."""
    box = EelgridBox(folder, GPUS)
    box.start()
    try:
        yield box
    finally:
        box.close()


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


@dataclass(frozen=True)
class _Handovers:
    """What short jobs on one box gave: gaps in seconds, those of them while the disk was quick, and what went wrong."""

    gaps: list[float]
    quick_gaps: list[float]
    flushes: list[float]
    held_twice: int
    wrong_codes: int
    makespan_s: float

    @property
    def quick_p99_s(self) -> float:
        return _find_p99(self.quick_gaps)

    def report(self, medium: str) -> None:
        print(f"{len(self.gaps)} gaps of {GPUS} GPUs, {medium}: {self.makespan_s:.1f} s from first start to last end")
        print(f"  held twice {self.held_twice}, wrong exit codes {self.wrong_codes}")
        slow = sum(taken > _SLOW_FLUSH_S for taken in self.flushes)
        for name, values in (
            ("idle gap", self.gaps),
            ("idle gap while the disk was quick", self.quick_gaps),
            (f"a flush beside them ({slow} slow of {len(self.flushes)})", self.flushes),
        ):
            median, p99, most = statistics.median(values), _find_p99(values), max(values)
            print(f"  {name}: median {median * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, most {most * 1e3:.1f} ms")

    def list_rows(self, prefix: str) -> list[tuple[str, float, float]]:
        return [
            (f"{prefix}gap_p50_s", statistics.median(self.gaps), 0.0),
            (f"{prefix}gap_p99_s", _find_p99(self.gaps), 0.0),
            (f"{prefix}quick_disk_gaps", float(len(self.quick_gaps)), 0.0),
            (f"{prefix}quick_disk_gap_p99_s", self.quick_p99_s, _GAP_P99_MOST_S),
            (f"{prefix}flush_p50_s", statistics.median(self.flushes), 0.0),
            (f"{prefix}flush_p99_s", _find_p99(self.flushes), 0.0),
            (f"{prefix}held_twice", float(self.held_twice), 0.0),
            (f"{prefix}wrong_exit_codes", float(self.wrong_codes), 0.0),
            (f"{prefix}makespan_s", self.makespan_s, 0.0),
        ]

    @property
    def is_kept(self) -> bool:
        return not self.held_twice and not self.wrong_codes and self.quick_p99_s <= _GAP_P99_MOST_S


def _find_p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def _measure_handovers(client: Client, folder: Path, count: int, seconds: float) -> _Handovers:
    """Runs short jobs, and returns each GPU's gaps from when its next job waited, beside what the disk did."""
    with DiskWatch(folder) as disk:
        jobs = _run_jobs(client, folder, count, seconds)
    spans: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for job in jobs:
        (attempt,) = job.attempts
        spans[job.placements[0].gpu_uuids[0]].append((attempt.started_ns, attempt.ended_ns, job.submitted_ns))
    pairs = [pair for held in spans.values() for pair in pairwise(sorted(held))]
    waits = [(max(before[1], after[2]), after[0]) for before, after in pairs]
    quick = [wait for wait in waits if not disk.is_slow_within(*wait, _SLOW_FLUSH_S)]
    begun_ns = min(job.attempts[0].started_ns for job in jobs)
    return _Handovers(
        [(start - waited) / 1e9 for waited, start in waits],
        [(start - waited) / 1e9 for waited, start in quick],
        disk.list_flush_seconds(),
        sum(after[0] < before[1] for before, after in pairs),
        sum(job.exit_code != n % _CODES for n, job in enumerate(jobs)),
        (max(job.attempts[0].ended_ns for job in jobs) - begun_ns) / 1e9,
    )


def _measure_in_memory(count: int, seconds: float) -> _Handovers | None:
    """Runs the same jobs with all that is kept in memory, where there is such a folder."""
    if not _MEMORY.is_dir():
        return None
    with tempfile.TemporaryDirectory(prefix="box", dir=_MEMORY) as name:
        own = Path(name) / "box"
        own.mkdir()
        with _box(own) as box:
            return _measure_handovers(box.client, Path(name), count, seconds)


def _time_first_output(client: Client, folder: Path, runs: int) -> list[float]:
    taken = []
    for _ in range(runs + 1):
        begun = time.perf_counter()
        job = client.submit_workload(_spec(folder, "/bin/echo", "hello"))
        assert next(client.read_logs(job.workload_id, follow=True)) == "hello\n"
        taken.append(time.perf_counter() - begun)
        client.wait(job.workload_id, until=lambda found: found.phase.is_ended)
    return taken[1:]


def _time_list(client: Client, folder: Path, queued: int) -> tuple[list[float], list[float]]:
    """Holds every GPU, queues jobs, and lists those that wait: their summaries, and the whole workloads."""
    client.submit_workload(_spec(folder, "sleep", "3600", gpus=GPUS), workload_id="holder")
    progress = Progress("queued jobs")
    for n in range(queued):
        client.submit_workload(_spec(folder, "true", name=f"q-{n}"), workload_id=f"q-{n}")
        progress.show(n + 1, queued)
    brief, whole = list[float](), list[float]()
    for _ in range(_LISTS):
        for list_queued, taken in ((client.list_workload_summaries, brief), (client.list_workloads, whole)):
            begun = time.perf_counter()
            assert sum(1 for _ in list_queued(phases=[WorkloadPhase.PENDING])) == queued
            taken.append(time.perf_counter() - begun)
    client.cancel_workload("holder")
    return brief, whole


def _time_command(box: EelgridBox, *words: str) -> float:
    """Times eelctl as a whole process."""
    begun = time.perf_counter()
    environment = os.environ | {"EELGRID_CONTROLLER": box.address}
    subprocess.run(
        [sys.executable, "-m", "eelgrid_controller.cli", *words], env=environment, check=True, capture_output=True
    )
    return time.perf_counter() - begun


_STUBBORN = """
import os, signal, time
def child(level):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("pid", os.getpid(), flush=True)
        if level:
            child(level - 1)
            os._exit(0)
        time.sleep(600)
child(1); child(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""


def _stop_trees(client: Client, folder: Path, count: int) -> tuple[list[float], int]:
    """Stops trees that ignore TERM and left their session; returns seconds beyond the grace, and processes left."""
    beyond, left = [], 0
    for _ in range(count):
        spec = _spec(folder, sys.executable, "-I", "-S", "-c", _STUBBORN)
        assert spec.process is not None
        job = client.submit_workload(replace(spec, process=replace(spec.process, grace_s=0.5)))
        pids: list[int] = []
        for text in client.read_logs(job.workload_id, follow=True):
            pids += [int(line.split()[1]) for line in text.splitlines() if line.startswith("pid")]
            if len(pids) == 4:
                break
        begun = time.perf_counter()
        client.cancel_workload(job.workload_id)
        client.wait(job.workload_id, until=lambda found: found.phase.is_ended)
        beyond.append(time.perf_counter() - begun - 0.5)
        left += sum(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    return beyond, left


def _kill_daemons(folder: Path, kills: int) -> tuple[int, int, int]:
    """Kills a daemon at random moments while jobs run; returns jobs lost, started twice, and with a wrong code."""
    log, random = RunLog(folder / "runs"), Random(1)
    submitted: list[str] = []
    with _box(folder) as box:
        progress = Progress("kills")
        for n in range(kills):
            for _ in range(4):
                tag = f"k-{len(submitted)}"
                code = len(submitted) % _CODES
                command = f"{log.command(tag, random.uniform(0.0, 1.0))}; exit {code}"
                box.client.submit_workload(_spec(folder, "/bin/sh", "-c", command), workload_id=tag)
                submitted.append(tag)
            time.sleep(random.uniform(0.0, 0.5))
            box.kill((box.daemons[n % 2],))
            box.start()
            progress.show(n + 1, kills)
        for tag in submitted:
            box.client.wait(tag, until=lambda found: found.phase.is_ended, timeout_s=120.0)
        codes = [box.client.get_workload(tag).exit_code for tag in submitted]
    starts = log.count_starts()
    wrong = sum(code != n % _CODES for n, code in enumerate(codes))
    return sum(tag not in starts for tag in submitted), sum(count > 1 for count in starts.values()), wrong


def _compare_queues(folder: Path, installed: Path, jobs: int, real_gpus: int) -> list[tuple[str, str, float]]:
    """The same jobs through each scheduler: submission, makespan, and what is left after a kill."""
    random = Random(2)
    lengths_s = [random.choice((0.05, 0.1, 0.2, 0.5, 1.0)) for _ in range(jobs)]
    ideal_s = sum(lengths_s) / (real_gpus or GPUS)
    rows: list[tuple[str, str, float]] = []
    for queue in open_queues(folder, installed, real_gpus):
        log = RunLog(folder / f"{queue.name}.runs")
        queue.start()
        try:
            taken, begun_s = [], time.time()
            for n, seconds in enumerate(lengths_s):
                one_s = time.perf_counter()
                queue.submit(log.command(f"m-{n}", seconds))
                taken.append(time.perf_counter() - one_s)
            is_whole = log.wait_ended(jobs, idle_s=30.0)
            last_s = max((at for kind, _, at in log.read() if kind == "e"), default=begun_s)
            kept = RunLog(folder / f"{queue.name}.kept")
            for n in range(jobs):
                queue.submit(kept.command(f"k-{n}", 0.3))
            kept.wait_ended(3, idle_s=30.0)
            killed_s = time.time()
            queue.kill()
            queue.start()
            kept.wait_ended(jobs, idle_s=20.0)
            starts = kept.count_starts()
            after = [at for kind, _, at in kept.read() if kind == "s" and at > killed_s + 0.3]
            found = {
                "submit_s": statistics.median(taken),
                "makespan_s": last_s - begun_s if is_whole else math.nan,
                "ideal_makespan_s": ideal_s,
                "lost_after_kill": float(jobs - len(starts)),
                "twice_after_kill": float(sum(count > 1 for count in starts.values())),
                "first_start_after_kill_s": min(after) - killed_s if after else math.nan,
            }
        finally:
            queue.close()
        rows += [(queue.name, metric, value) for metric, value in found.items()]
        print(f"{queue.name:>13}  " + ", ".join(f"{metric} {value:.3g}" for metric, value in found.items()))
    return rows


@benchmark()
@click.option("--jobs", default=1000, help="Short jobs for the gaps.")
@click.option("--seconds", default=0.1, help="How long each of them takes.")
@click.option("--queued", default=10_000, help="Queued jobs for the list; 0 for none.")
@click.option("--runs", default=20, help="Runs to the first output.")
@click.option("--trees", default=5, help="Trees of processes to stop.")
@click.option("--kills", default=200, help="Kills of a daemon at random moments; 0 for none.")
@click.option("--compared", default=60, help="Jobs through each scheduler of the comparison; 0 for none.")
@click.option(
    "--real-gpus", default=0, help="Compare on so many GPUs of this machine, all it has; 0 for simulated ones."
)
def main(options: Options) -> int:
    """Measures one box after another, each with an empty state."""
    rows: list[tuple[str, float, float]] = []
    kept = True
    with tempfile.TemporaryDirectory(prefix="box") as name:
        folder = Path(name)
        own = folder / "box"
        own.mkdir()
        in_memory = _measure_in_memory(options.jobs, options.seconds)
        with _box(own) as box:
            client = box.client
            on_disk = _measure_handovers(client, folder, options.jobs, options.seconds)
            first = _time_first_output(client, folder, options.runs)
            commands = [_time_command(box, "run", "--cpus", "10m", "--", "echo", "hello") for _ in range(5)]
            beyond, left = _stop_trees(client, folder, options.trees) if options.trees else ([], 0)
            listed, listed_whole = _time_list(client, folder, options.queued) if options.queued else ([], [])
            list_commands = [_time_command(box, "jobs") for _ in range(5)]
            memory = box.read_memory_bytes()
        lost, again, wrong_codes = 0, 0, 0
        if options.kills:
            (folder / "kills").mkdir()
            lost, again, wrong_codes = _kill_daemons(folder / "kills", options.kills)
        peers = (
            _compare_queues(folder, options.out / "gflow", options.compared, options.real_gpus)
            if options.compared
            else []
        )
    for medium, prefix, found in (("on the disk", "", on_disk), ("in memory", "memory_", in_memory)):
        if found is not None:
            found.report(medium)
            rows += found.list_rows(prefix)
            kept = kept and found.is_kept
    print(f"to output  {spread(first)} s")
    rows += [("first_output_s", statistics.median(first), _FIRST_OUTPUT_MOST_S)]
    kept = kept and statistics.median(first) <= _FIRST_OUTPUT_MOST_S
    if listed:
        print(f"list of {options.queued} queued jobs {spread(listed)} s, as whole workloads {spread(listed_whole)} s")
        rows += [("list_s", statistics.median(listed), _LIST_MOST_S)]
        rows += [("list_whole_s", statistics.median(listed_whole), 0.0)]
        kept = kept and statistics.median(listed) <= _LIST_MOST_S
    print(f"eelctl run {spread(commands)} s, eelctl jobs {spread(list_commands)} s as whole processes")
    print("memory with them: " + ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in memory.items()))
    rows += [
        ("run_command_s", statistics.median(commands), 0.0),
        ("jobs_command_s", statistics.median(list_commands), 0.0),
    ]
    rows += [(f"memory_{name}_bytes", float(size), 0.0) for name, size in memory.items()]
    if beyond:
        print(f"trees gone {max(beyond):.2f} s after the grace at the latest; processes left {left}")
        rows += [("tree_beyond_grace_s", max(beyond), 1.0), ("tree_processes_left", float(left), 0.0)]
        kept = kept and max(beyond) <= 1.0 and not left
    if options.kills:
        print(f"{options.kills} kills: jobs lost {lost}, started twice {again}, wrong exit codes {wrong_codes}")
        rows += [("kills", float(options.kills), 0.0), ("kills_lost", float(lost), 0.0)]
        rows += [("kills_twice", float(again), 0.0), ("kills_wrong_codes", float(wrong_codes), 0.0)]
        kept = kept and not (lost or again or wrong_codes)
    if peers:
        write_csv(options.out / "box_peers.csv", ("scheduler", "metric", "value"), peers)
    write_csv(options.out / "box.csv", ("metric", "value", "target"), rows)
    return report_promise(
        "none held twice, gap p99 50 ms while the disk is quick, first output 150 ms, list 0.3 s", kept=kept
    )


if __name__ == "__main__":
    sys.exit(main())
