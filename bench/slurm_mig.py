"""Re-layout of a Slurm node with MIG: seconds out of service, while jobs on other nodes run and are watched.

A real Slurm on loopback (tests/slurm_rig.py) with two nodes that work and a dynamic one with simulated GPUs, whose layout changes
from one to another and back by `eelgrid-agent mig apply --slurm`. One job beats twenty times a second all the time, others follow
one another. Measured: how long the node is out of service, by the agent; the whole command, with Python's start; how long
slurmctld shows no idle node, asked ten times a second; and the longest silence of the job that beats.

Target: out of service for at most 2 s as the median, and no job of another node requeued, ended or failed.
"""

import io
import itertools
import re
import statistics
import tempfile
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click
from tests.slurm_mig_rig import HALVES, MIXED, DynamicNode, format_cluster_settings
from tests.slurm_rig import SlurmCluster, find_missing
from tests.waiting import poll_until

from bench.processes import spread
from bench.runner import Options, Progress, Unusable, benchmark, report_promise
from bench.tables import write_csv

_OUTAGE_MOST_S = 2.0
# Each question is a process, and must not take the machine from what is measured.
_ASKED_S = 0.1
_WITHIN_S = 120.0
_OUTAGE = re.compile(r"out of service in Slurm for ([0-9.]+) s")


class _Watch(threading.Thread):
    """Asks slurmctld about the node again and again, and counts for how long it was not idle."""

    def __init__(self, node: Any) -> None:
        super().__init__(daemon=True)
        self.node, self.gone_s, self.is_over = node, 0.0, threading.Event()

    def run(self) -> None:
        last_s = time.monotonic()
        while not self.is_over.wait(_ASKED_S):
            is_idle = self.node.show().get("State") == "IDLE+DYNAMIC_NORM"
            now_s = time.monotonic()
            self.gone_s += 0.0 if is_idle else now_s - last_s
            last_s = now_s


def _change(node: Any, layout: str) -> tuple[float, float, float]:
    """Changes the layout; returns the seconds out of service by the agent, by slurmctld, and of the whole command."""
    watch, begun_s = _Watch(node), time.monotonic()
    watch.start()
    try:
        said = node.apply(layout)
        took_s = time.monotonic() - begun_s
    finally:
        watch.is_over.set()
        watch.join()
    found = _OUTAGE.search(said)
    assert found, said
    return float(found[1]), watch.gone_s, took_s


def _run(options: Options, folder: Path) -> tuple[list[tuple[float, ...]], float, int, list[str]]:
    """Returns the changes, the longest silence of the job that beats, how many others completed, and what was not kept."""
    with redirect_stdout(io.StringIO()), SlurmCluster(types=("a100", "a100"), extra=format_cluster_settings()) as slurm:
        node = DynamicNode(slurm, folder)
        node.resume()
        beat = slurm.submit("while :; do date +%s.%N; sleep 0.05; done", "--nodelist=n0", steered=False)
        others = [slurm.submit("sleep 0.2", "--nodelist=n1", "--exclusive", steered=False) for _ in range(options.jobs)]
        poll_until(lambda: slurm.output(beat), "the job beats", within_s=_WITHIN_S)
        progress, changes = Progress("changes"), list[tuple[float, ...]]()
        for number, layout in zip(range(options.rounds), itertools.cycle((MIXED, HALVES)), strict=False):
            changes.append(_change(node, layout))
            progress.show(number + 1, options.rounds, f"{changes[-1][0]:.2f} s")
        jobs = slurm.jobs()
        beats = [float(line) for line in slurm.output(beat).split()]
        silent_s = max(later - sooner for sooner, later in itertools.pairwise(beats))
        # One that ends completes first.
        sound = {"COMPLETED", "COMPLETING", "RUNNING", "PENDING"}
        broken = [job for job in (beat, *others) if jobs[job]["job_state"] not in sound or jobs[job]["restart_cnt"]]
        broken += [beat] if jobs[beat]["job_state"] != "RUNNING" else []
        return changes, silent_s, sum(jobs[job]["job_state"] == "COMPLETED" for job in others), broken


@benchmark()
@click.option("--rounds", type=click.IntRange(1, 1000), default=20, help="Changes of the layout.")
@click.option(
    "--jobs", type=click.IntRange(0, 10_000), default=200, help="Jobs that follow one another on another node."
)
def main(options: Options) -> int:
    """Changes the layout again and again, writes how long each change took, and compares."""
    missing = find_missing()
    if missing:
        raise Unusable(f"no Slurm here: {missing}; make test-slurm installs it")
    with tempfile.TemporaryDirectory() as folder:
        changes, silent_s, completed, broken = _run(options, Path(folder))
    outages, gone, commands = ([change[column] for change in changes] for column in range(3))
    print(
        f"out of service, by the agent: {spread(outages)} s; by slurmctld: {spread(gone)} s; command: {spread(commands)} s"
    )
    print(
        f"other nodes: longest silence of the job that beats {silent_s:.2f} s; {completed} jobs completed, {len(broken)} broken"
    )
    write_csv(
        options.out / "changes.csv",
        ("change", "outage_s", "not_idle_s", "command_s"),
        [(n, *one) for n, one in enumerate(changes)],
    )
    kept = statistics.median(outages) <= _OUTAGE_MOST_S and not broken
    return report_promise(f"out of service for at most {_OUTAGE_MOST_S:g} s, and other jobs untouched", kept=kept)


if __name__ == "__main__":
    raise SystemExit(main())
