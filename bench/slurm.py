"""Slurm by itself against Slurm steered by a controller: jobs a second, submission to start, held to released.

A real Slurm on loopback (tests/slurm_rig.py), new for each round, with the rounds of both in turn: the same jobs are submitted
by the same commands, by itself without a controller and steered with one. First some jobs one after another on an empty cluster,
then all at once. Every moment is one that slurmctld writes to its log: submitted, released, allocated, completed.

Target: at least 0.9 of the jobs a second of Slurm by itself, as the median of the rounds' ratios.
"""

import io
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from tests.slurm_rig import SlurmCluster, find_missing
from tests.waiting import poll_until

from bench.processes import cpu_s, free_port, running, spread
from bench.runner import Options, Progress, Unusable, benchmark, report_promise
from bench.tables import write_csv

_RATIO_LEAST = 0.9
_SUBMITTERS = 2
_START_S, _ROUND_S = 60.0, 1800.0
_MOMENT = re.compile(r"\[([0-9T:.-]+)\] (.*)")
# What slurmctld writes of a job, by what it means.
_LINES = {
    "submitted": re.compile(r"_slurm_rpc_submit_batch_job: JobId=(\d+) "),
    "released": re.compile(r"sched: _release_job_rec: release hold on JobId=(\d+) "),
    "allocated": re.compile(r"sched(?:/backfill: _start_job)?: (?:Allocate|Started) JobId=(\d+) "),
    "completed": re.compile(r"_job_complete: JobId=(\d+) done"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRound:
    """One round: by job, when it was submitted, released, allocated and completed, in seconds since 1970."""

    is_steered: bool
    moments: dict[str, dict[int, float]]
    # Those that ran one after another; a dry run of Slurm takes a number, too, so that these have gaps.
    singles: frozenset[int]
    controller_cpu_s: float

    def list_spans(self, begin: str, end: str) -> list[float]:
        """Returns by job the seconds between two moments, of those jobs that ran one after another."""
        first, last = self.moments[begin], self.moments[end]
        return [last[job] - first[job] for job in sorted(last.keys() & first.keys()) if job in self.singles]

    @property
    def rate_hz(self) -> float:
        """Jobs a second of those that were submitted at once, from the first submission to the last completion."""
        many = [job for job in self.moments["completed"] if job not in self.singles]
        begun = min(self.moments["submitted"][job] for job in many)
        return len(many) / (max(self.moments["completed"][job] for job in many) - begun)


def parse_moments(log: str) -> dict[str, dict[int, float]]:
    """Parses slurmctld's log: by what it means and by job, the first moment of it in seconds since 1970."""
    found: dict[str, dict[int, float]] = {name: {} for name in _LINES}
    for line in log.splitlines():
        matched = _MOMENT.match(line)
        if matched is None:
            continue
        for name, pattern in _LINES.items():
            if job := pattern.match(matched[2]):
                found[name].setdefault(int(job[1]), datetime.fromisoformat(matched[1]).timestamp())
    return found


@contextmanager
def steer_slurm(slurm: SlurmCluster, folder: Path, poll_s: float) -> Iterator[Any]:
    """A controller that steers, once it holds the lease."""
    arguments = [
        "--listen", f"127.0.0.1:{free_port()}", "--metrics", "127.0.0.1:0", "--data", str(folder / "data"),
        "--slurm", "--slurm-conf", str(slurm.conf), "--slurm-lease", str(slurm.lease), "--slurm-poll", str(poll_s),
    ]  # fmt: skip
    with running("eelgrid_controller", arguments, folder / "controller.log") as process:
        poll_until(slurm.lease.exists, "the controller holds the lease", within_s=_START_S)
        yield process


def submit_job(slurm: SlurmCluster, script: Path, gpus: int) -> int:
    """Submits a script that opted in; returns the number of its job."""
    asked = (f"--gres=gpu:{gpus}",) if gpus else ()
    command = ["sbatch", "--parsable", "--comment=eelgrid", "--output=/dev/null", *asked, str(script)]
    done = subprocess.run(command, env=slurm.environment, check=True, capture_output=True, text=True, timeout=60)
    return int(done.stdout)


def read_log(slurm: SlurmCluster) -> str:
    """Returns what slurmctld has logged so far."""
    return (slurm.folder / "log" / "slurmctld.log").read_text(errors="replace")


def wait_completed(slurm: SlurmCluster, jobs: int) -> dict[str, dict[int, float]]:
    """Waits until so many jobs have completed, by the log: Slurm has enough to answer."""
    deadline_s = time.monotonic() + _ROUND_S
    while True:
        found = parse_moments(read_log(slurm))
        done = len(found["completed"])
        if done >= jobs:
            return found
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{done} of {jobs} jobs have completed within {_ROUND_S:g} s; the rest: {slurm.jobs()}")
        time.sleep(0.2 if jobs - done > _SUBMITTERS else 0.02)


def _run_round(options: Options, folder: Path, *, is_steered: bool) -> SlurmRound:
    # The rig shows its logs in the end, for tests.
    with redirect_stdout(io.StringIO()), SlurmCluster() as slurm:
        script = slurm.folder / "job.sh"
        script.write_text(f"#!/bin/sh\n{options.script}\n")
        if not is_steered:
            return _submit_all(options, slurm, script, None)
        with steer_slurm(slurm, folder, options.poll) as controller:
            return _submit_all(options, slurm, script, controller)


def _submit_all(options: Options, slurm: SlurmCluster, script: Path, controller: Any) -> SlurmRound:
    singles = list[int]()
    for _ in range(options.singles):
        singles.append(submit_job(slurm, script, options.gpus))
        wait_completed(slurm, len(singles))
        time.sleep(0.3)  # out of step with the controller's looks
    before_s = 0.0 if controller is None else cpu_s(controller)
    with ThreadPoolExecutor(_SUBMITTERS) as pool:
        list(pool.map(lambda _: submit_job(slurm, script, options.gpus), range(options.jobs)))
    jobs = options.singles + options.jobs
    found = SlurmRound(
        is_steered=controller is not None,
        moments=wait_completed(slurm, jobs),
        singles=frozenset(singles),
        controller_cpu_s=0.0,
    )
    used_s = 0.0 if controller is None else cpu_s(controller) - before_s
    held = len(found.moments["released"])
    assert held == (jobs if controller is not None else 0), f"{held} of {jobs} jobs were held and released"
    return replace(found, controller_cpu_s=used_s)


def _report(rounds: list[SlurmRound], ratios: list[float]) -> None:
    for is_steered, name in ((False, "Slurm by itself"), (True, "steered")):
        mine = [one for one in rounds if one.is_steered == is_steered]
        starts = [span for one in mine for span in one.list_spans("submitted", "allocated")]
        print(f"{name}: {spread([one.rate_hz for one in mine])} jobs/s; submission to start {spread(starts)} s")
    steered = [one for one in rounds if one.is_steered]
    held = [span for one in steered for span in one.list_spans("submitted", "released")]
    jobs = [len(one.moments["completed"]) - len(one.singles) for one in steered]
    costs = [1e3 * one.controller_cpu_s / count for one, count in zip(steered, jobs, strict=True)]
    print(f"held to released {spread(held)} s; the controller, without Slurm's commands, uses {spread(costs)} ms a job")
    print(f"jobs a second, steered by Slurm by itself: {spread(ratios)}")


@benchmark()
@click.option("--jobs", type=click.IntRange(1, 20_000), default=1000, help="Jobs that are submitted at once.")
@click.option("--singles", type=click.IntRange(1, 1000), default=10, help="Jobs one after another before.")
@click.option("--rounds", type=click.IntRange(1, 50), default=3, help="Rounds of each, in turn.")
@click.option("--gpus", type=click.IntRange(0, 4), default=1, help="GPUs of a job; the cluster has 12.")
@click.option("--script", default="true", help="What a job does.")
@click.option("--poll", type=float, default=1.0, help="Seconds between looks of an idle controller.")
def main(options: Options) -> int:
    """Runs the rounds in turn, writes them and compares."""
    missing = find_missing()
    if missing:
        raise Unusable(f"no Slurm here: {missing}; make test-slurm installs it")
    rounds, progress = list[SlurmRound](), Progress("rounds")
    for number in range(2 * options.rounds):
        # Each goes first in every second pair.
        is_steered = number % 4 in (1, 2)
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(_run_round(options, Path(folder), is_steered=is_steered))
        progress.show(number + 1, 2 * options.rounds, f"{rounds[-1].rate_hz:.1f} jobs/s")
    pairs = [sorted(rounds[n : n + 2], key=lambda one: one.is_steered) for n in range(0, len(rounds), 2)]
    ratios = [steered.rate_hz / plain.rate_hz for plain, steered in pairs]
    _report(rounds, ratios)
    rows = [
        (n, "steered" if one.is_steered else "plain", job, *(one.moments[name].get(job, "") for name in _LINES))
        for n, one in enumerate(rounds)
        for job in sorted(one.moments["submitted"])
    ]
    write_csv(options.out / "jobs.csv", ("round", "mode", "job", *_LINES), rows)
    kept = statistics.median(ratios) >= _RATIO_LEAST
    return report_promise(f"{_RATIO_LEAST:g} of the jobs a second of Slurm by itself", kept=kept)


if __name__ == "__main__":
    raise SystemExit(main())
