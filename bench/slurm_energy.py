"""Joules of a replayed hour on a real Slurm: its own placement and power save beside the steered one and ours.

An hour of a public trace is submitted to a real Slurm on loopback, so many times faster than it was, once to Slurm by itself and
once to Slurm steered by a controller: who runs where and when is what slurmctld's log says. Nothing measures watts here: a node
that is awake draws its idle watts, one that sleeps those of its BMC, and a GPU that a job holds adds what our power model says
of its full load. Sleep is played over what was recorded: never; by Slurm's timer (SuspendTime), a node each; and by the
decisions of our power saving. A job that begins on a node that sleeps wakes it: its wait is counted, and not played.

Target: the steered hour with our power saving draws no more than Slurm's own placement with its own.
"""

import io
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import click
import pandas as pd
from tests.slurm_rig import GPUS, SlurmCluster, find_missing

from bench.runner import Options, Unusable, benchmark, data_option, report_promise
from bench.slurm import parse_moments, read_log, steer_slurm, submit_job, wait_completed
from bench.tables import format_table, write_csv
from eelgrid_controller.engines.slurm.answers import SlurmJob, SlurmNode
from eelgrid_controller.engines.slurm.power_saving import PowerSavingSettings, SlurmPowerSaving
from eelgrid_controller.objectives.power.power_save import SleepCosts
from eelgrid_controller.placement.power import PriorPowerModel
from eelgrid_protos.catalogue import load_catalogue
from eelgrid_protos.messages import Gpu

_HOUR_S, _SUBMITTERS = 3600.0, 2
# Jobs that would run longer are cut, so that the hour has an end.
_RUN_MOST_S, _JOBS_MOST = 1200.0, 120
# How often our power saving looks, in seconds of the trace.
_LOOK_S = 10.0
_STARTED = re.compile(
    r"\[[0-9T:.-]+\] sched(?:/backfill: _start_job)?: (?:Allocate|Started) JobId=(\d+) (?:NodeList=|in \S+ on )(\S+)"
)
_MODEL, _PRODUCT = "a100", "NVIDIA A100-SXM4-40GB"


@dataclass(frozen=True, slots=True)
class HourJob:
    """A job of the hour; seconds since its begin."""

    submit_s: float
    run_s: float
    gpus: int


@dataclass(frozen=True, slots=True)
class JobRun:
    """Where a job ran and when, in seconds of the trace since the first submission."""

    node: str
    gpus: int
    submit_s: float
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HourEnergy:
    """What one placement draws with one way to sleep."""

    placement: str
    sleep: str
    joules: float
    sleeps: int
    woken_jobs: int


def choose_hour(data: Path, cluster: str, *, gpus: int, share: float) -> list[HourJob]:
    """Returns the hour of a cluster of Philly that comes nearest to a share of these GPUs, of jobs that fit on one node."""
    table = pd.read_csv(data / "philly" / "philly.csv", parse_dates=["timestamp"])
    table = table[(table.cluster == cluster) & (table.num_gpus <= GPUS) & (table.num_gpus > 0)]
    seconds = (table.timestamp - table.timestamp.min()).dt.total_seconds()
    hours = table.assign(hour=(seconds // _HOUR_S).astype(int), at_s=seconds % _HOUR_S)
    hours["run_s"] = hours.duration.clip(30.0, _RUN_MOST_S)
    load = (hours.num_gpus * hours.run_s).groupby(hours.hour).sum() / (gpus * _HOUR_S)
    counts = hours.hour.value_counts()
    load = load[counts.reindex(load.index) <= _JOBS_MOST]
    chosen = hours[hours.hour == (load - share).abs().idxmin()].sort_values("at_s")
    return [HourJob(*row) for row in zip(chosen.at_s, chosen.run_s, chosen.num_gpus.astype(int), strict=True)]


def parse_nodes_of_jobs(log: str) -> dict[int, str]:
    """Parses slurmctld's log: on which node each job was started."""
    return {int(found[1]): found[2] for line in log.splitlines() if (found := _STARTED.match(line))}


def play_hour(slurm: SlurmCluster, jobs: Sequence[HourJob], speed: float) -> list[JobRun]:
    """Submits the jobs at their times, so many times faster, and returns how they ran."""
    begun_s, begun_wall_s = time.monotonic(), time.time()

    def submit(place: int, job: HourJob) -> int:
        script = slurm.folder / f"job-{place}.sh"
        script.write_text(f"#!/bin/sh\nsleep {job.run_s / speed:.2f}\n")
        time.sleep(max(0.0, begun_s + job.submit_s / speed - time.monotonic()))
        return submit_job(slurm, script, job.gpus)

    with ThreadPoolExecutor(_SUBMITTERS) as pool:
        numbers = list(pool.map(submit, range(len(jobs)), jobs))
    wait_completed(slurm, len(jobs))
    log = read_log(slurm)
    moments, nodes = parse_moments(log), parse_nodes_of_jobs(log)

    def scale(name: str, number: int) -> float:
        return (moments[name][number] - begun_wall_s) * speed

    return [
        JobRun(nodes[number], job.gpus, *(scale(name, number) for name in ("submitted", "allocated", "completed")))
        for number, job in zip(numbers, jobs, strict=True)
    ]


class NodeActivity:
    """When each node is in use, from what was recorded."""

    def __init__(self, runs: Iterable[JobRun], names: Sequence[str], end_s: float) -> None:
        self.names, self.end_s = tuple(names), end_s
        self.runs = sorted(runs, key=lambda run: run.begin_s)

    def list_idle(self, name: str) -> list[tuple[float, float]]:
        """Returns the spans in which a node has no job, of the whole time."""
        idle, free_s = list[tuple[float, float]](), 0.0
        for run in self.runs:
            if run.node == name:
                if run.begin_s > free_s:
                    idle.append((free_s, run.begin_s))
                free_s = max(free_s, run.end_s)
        return [*idle, (free_s, self.end_s)] if free_s < self.end_s else idle

    def list_running(self, at_s: float) -> list[JobRun]:
        """Returns the jobs that run at a time."""
        return [run for run in self.runs if run.begin_s <= at_s < run.end_s]


Sleeps = list[tuple[str, float, float]]


def sleep_by_timer(activity: NodeActivity, timer_s: float) -> Sleeps:
    """Returns by node when it sleeps by Slurm's rule: once it was idle for so long, until its next job."""
    return [
        (name, since_s + timer_s, until_s)
        for name in activity.names
        for since_s, until_s in activity.list_idle(name)
        if until_s - since_s > timer_s
    ]


def sleep_by_decisions(activity: NodeActivity, costs: SleepCosts) -> Sleeps:
    """Returns by node when it sleeps by the decisions of our power saving, which sees what Slurm would show it."""
    saving, asleep = SlurmPowerSaving(PowerSavingSettings(costs=costs)), dict[str, float]()
    moments = {run.begin_s for run in activity.runs} | {run.end_s for run in activity.runs}
    moments |= {_LOOK_S * number for number in range(int(activity.end_s / _LOOK_S) + 1)}
    sleeps = Sleeps()
    for now_s in sorted(moment for moment in moments if 0.0 <= moment < activity.end_s):
        running = activity.list_running(now_s)
        for run in running:
            if run.node in asleep:
                sleeps.append((run.node, asleep.pop(run.node), now_s))
        nodes = [_show_node(name, is_asleep=name in asleep) for name in activity.names]
        jobs = [SlurmJob(job_id=str(number), state="RUNNING", nodes=(run.node,)) for number, run in enumerate(running)]
        for order in saving.decide(jobs, nodes, now_s=now_s):
            for name in order.names:
                if not order.on:
                    asleep[name] = now_s
                elif name in asleep:
                    sleeps.append((name, asleep.pop(name), now_s))
    return sleeps + [(name, since_s, activity.end_s) for name, since_s in asleep.items()]


def _show_node(name: str, *, is_asleep: bool) -> SlurmNode:
    states = {"IDLE", "POWERED_DOWN"} if is_asleep else {"IDLE"}
    return SlurmNode(name=name, partitions=frozenset({"main"}), states=frozenset(states))


def count_energy(
    activity: NodeActivity, sleeps: Sleeps, costs: SleepCosts, gpu_w: float, *, placement: str, sleep: str
) -> HourEnergy:
    """Counts joules: idle and sleeping nodes, transitions, and what held GPUs add (`gpu_w`, watts each)."""
    slept_s = sum(until_s - since_s for _, since_s, until_s in sleeps)
    awake_s = len(activity.names) * activity.end_s - slept_s
    held_s = sum(run.gpus * (run.end_s - run.begin_s) for run in activity.runs)
    joules = awake_s * costs.idle_w + slept_s * costs.sleep_w + len(sleeps) * costs.transition_j + held_s * gpu_w
    ends = {(name, until_s) for name, _, until_s in sleeps}
    woken = len({(run.node, run.begin_s) for run in activity.runs} & ends)
    return HourEnergy(placement=placement, sleep=sleep, joules=joules, sleeps=len(sleeps), woken_jobs=woken)


@contextmanager
def _open_slurm(nodes: int) -> Iterator[SlurmCluster]:
    # The rig shows its logs in the end, for tests.
    with redirect_stdout(io.StringIO()), SlurmCluster(types=(_MODEL,) * nodes) as slurm:
        yield slurm


def _record(options: Options, jobs: Sequence[HourJob], *, is_steered: bool) -> list[JobRun]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        slurm = stack.enter_context(_open_slurm(options.nodes))
        if is_steered:
            stack.enter_context(steer_slurm(slurm, folder, options.poll))
        return play_hour(slurm, jobs, options.speed)


def _compare(
    recorded: dict[str, list[JobRun]], names: Sequence[str], costs: SleepCosts, gpu_w: float, timer_s: float
) -> list[HourEnergy]:
    end_s = max(_HOUR_S, *(run.end_s for runs in recorded.values() for run in runs))
    ways: dict[str, Callable[[NodeActivity], Sleeps]] = {
        "never": lambda _: [],
        f"SuspendTime={timer_s:g}": lambda activity: sleep_by_timer(activity, timer_s),
        "ours": lambda activity: sleep_by_decisions(activity, costs),
    }
    found = list[HourEnergy]()
    for placement, runs in recorded.items():
        activity = NodeActivity(runs, names, end_s)
        for sleep, choose in ways.items():
            found.append(count_energy(activity, choose(activity), costs, gpu_w, placement=placement, sleep=sleep))
    return found


@benchmark()
@data_option()
@click.option("--cluster", default="6214e9", show_default=True, help="Which virtual cluster of Philly.")
@click.option("--nodes", type=click.IntRange(2, 16), default=5, show_default=True, help="Nodes of 4 GPUs.")
@click.option("--share", type=click.FloatRange(0.05, 1.0), default=0.3, show_default=True, help="Of the GPUs in use.")
@click.option("--speed", type=click.FloatRange(1.0, 120.0), default=30.0, show_default=True, help="Times faster.")
@click.option("--poll", type=float, default=0.5, help="Seconds between looks of an idle controller.")
@click.option("--suspend-time", type=float, default=600.0, show_default=True, help="Slurm's own timer in seconds.")
@click.option("--idle-w", default=800.0, show_default=True, help="Watts of an idle node.")
@click.option("--sleep-w", default=15.0, show_default=True, help="Watts of a sleeping node: its BMC.")
@click.option("--wake-s", default=300.0, show_default=True, help="Seconds from the order until a node takes work.")
def main(options: Options) -> int:
    """Plays the hour on both, counts joules and compares."""
    missing = find_missing()
    if missing:
        raise Unusable(f"no Slurm here: {missing}; make test-slurm installs it")
    transition_j = 1.2 * options.wake_s * (options.idle_w - options.sleep_w)
    costs = SleepCosts(idle_w=options.idle_w, sleep_w=options.sleep_w, transition_j=transition_j, wake_s=options.wake_s)
    prior = PriorPowerModel(load_catalogue()).gpu(Gpu(uuid="gpu", index=0, product=_PRODUCT, model=_MODEL))
    jobs = choose_hour(options.data, options.cluster, gpus=GPUS * options.nodes, share=options.share)
    held_s = sum(job.gpus * job.run_s for job in jobs)
    used = held_s / (GPUS * options.nodes * _HOUR_S)
    print(f"{len(jobs)} jobs, {used:.0%} of {GPUS * options.nodes} GPUs of {prior.idle_w:g} to {prior.busy_w:g} W")
    recorded = dict[str, list[JobRun]]()
    for name, is_steered in (("Slurm", False), ("steered", True)):
        recorded[name] = _record(options, jobs, is_steered=is_steered)
        waits_s = [run.begin_s - run.submit_s for run in recorded[name]]
        print(f"{name}: mean wait {sum(waits_s) / len(waits_s):.0f} s of the trace", file=sys.stderr)
    names = [f"n{number}" for number in range(options.nodes)]
    found = _compare(recorded, names, costs, prior.busy_w - prior.idle_w, options.suspend_time)
    rows = [(one.placement, one.sleep, f"{one.joules / 1e6:.3f}", one.sleeps, one.woken_jobs) for one in found]
    header = ("placement", "sleep", "megajoules", "sleeps", "jobs that wake a node")
    print(format_table(header, rows, words=2))
    write_csv(options.out / "energy.csv", header, rows)
    runs = [(name, *(getattr(run, field) for field in JobRun.__slots__)) for name in recorded for run in recorded[name]]
    write_csv(options.out / "runs.csv", ("placement", *JobRun.__slots__), runs)
    return _judge(found)


def _judge(found: Sequence[HourEnergy]) -> int:
    (own,) = (one for one in found if one.placement == "Slurm" and one.sleep.startswith("SuspendTime"))
    ours, never = found[-1], found[0]
    for words, other in (("with its own power save", own), ("without power save", never)):
        saved_j = other.joules - ours.joules
        print(f"saved against Slurm {words}: {saved_j / 1e6:.2f} MJ, {saved_j / other.joules:.1%}")
    return report_promise("no more joules than Slurm with its own power save", kept=ours.joules <= own.joules)


if __name__ == "__main__":
    raise SystemExit(main())
