"""What sharing GPUs gains and costs, with limits on interference and without, by measured pairs of training jobs.

Jobs of one V100 come to 32 of them and leave when their work is done. On a GPU of its own a job runs at its rate alone; beside
another one at the rate that was measured for that pair (Gavel, OSDI 2020), or not at all where the two do not fit into its
memory. The same arrivals are played through the core on whole GPUs, on halves beside any job that fits into memory, and on
halves where Eelgrid knows the pairs, without limits and within some, once with only half of the pairs known.
"""

import csv
import heapq
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click

from bench.backfill import build_empty_cluster
from bench.runner import Options, Progress, Unusable, benchmark, data_option, report_promise
from bench.tables import write_csv
from eelgrid_protos.messages import (
    BackfillMode,
    GpuSharing,
    Interference,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadSpec,
)

_NS = 10**9
_NODES, _NODE_GPUS = 8, 4
_GPU = "v100"
# Slowdowns are infinite beside whatever does not fit into memory, and below this beside anything else.
_NO_LIMIT = 100.0
# Work alone, in seconds: as Gavel draws it, but at the most so many hours.
_NEARLY = 1e-6
_DECISIONS = 60
_WORK_S = 1800.0, 36_000.0
Pairs = Mapping[tuple[str, str], float]


class Outcome(NamedTuple):
    """Of the jobs that were done: times in hours, slowdowns as parts of the time alone, and GPU-hours that were held by any."""

    done: int
    mean_h: float
    p95_h: float
    slowdown: float
    slowest: float
    held_gpu_h: float


def read_slowdowns(path: Path) -> dict[tuple[str, str], float]:
    """Returns by how much the first job of a pair is slowed down by the second, of those that fit into memory together."""
    if not path.exists():
        raise Unusable(f"{path} is not there; name the folder of public data with --data or EELGRID_DATA")
    found = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rates = row["rel_a"], row["rel_b"]
            if row["gpu"] == _GPU and all(rates) and all(float(rate) > 0.0 for rate in rates):
                for one, other, rate in (
                    (row["job_a"], row["job_b"], rates[0]),
                    (row["job_b"], row["job_a"], rates[1]),
                ):
                    found[one, other] = max(0.0, 1.0 / float(rate) - 1.0)
    return found


class Job(NamedTuple):
    """A job that comes."""

    at_s: float
    load: str
    work_s: float


class Cluster:
    """One run: the core, and what its jobs have done so far."""

    def __init__(self, slowdowns: Pairs, known: Pairs, limit: float | None) -> None:
        self._slowdowns, self._limit = slowdowns, limit
        self._core = build_empty_cluster(
            _NODES, BackfillMode.NONE, model="V100", cpu_milli=64_000, memory_bytes=2**38, node_gpus=_NODE_GPUS
        )
        pairs = tuple(Interference(load=one, beside=other, slowdown=value) for (one, other), value in known.items())
        policy = replace(self._core.state.policy, interference=pairs, shared_slowdown_most=limit)
        self._core.update_policy(policy, now_ns=2)
        # Of each job that runs: work left at the moment of the last change, its rate since then, and its GPU.
        self._left_s: dict[str, float] = {}
        self._rate: dict[str, float] = {}
        self._gpu: dict[str, str] = {}
        self._on_gpu: dict[str, list[str]] = {}
        self._begun_s: dict[str, float] = {}
        self._now_s = self._held_s = 0.0

    def play(self, jobs: list[Job]) -> Outcome:
        """Plays all jobs to their end."""
        self._jobs = {f"w{number}": job for number, job in enumerate(jobs)}
        arrivals = [(job.at_s, key) for key, job in self._jobs.items()]
        heapq.heapify(arrivals)
        times, slowdowns = [], []
        while arrivals or self._left_s:
            ends = min(
                ((self._now_s + left / self._rate[key], key) for key, left in self._left_s.items()), default=None
            )
            if ends is None or (arrivals and arrivals[0][0] <= ends[0]):
                at_s, key = heapq.heappop(arrivals)
                self._advance(at_s)
                self._submit(key)
            else:
                at_s, key = ends
                self._advance(at_s)
                times.append(at_s - self._jobs[key].at_s)
                slowdowns.append((at_s - self._begun_s[key]) / self._jobs[key].work_s - 1.0)
                self._end(key)
            while self._core.has_backlog:
                self._core.retry(now_ns=int(self._now_s * _NS) + 3)
            self._begin()
        times.sort()
        return Outcome(
            done=len(times),
            mean_h=statistics.fmean(times) / 3600.0,
            p95_h=times[int(0.95 * len(times))] / 3600.0,
            slowdown=statistics.fmean(slowdowns),
            slowest=max(slowdowns),
            held_gpu_h=self._held_s / 3600.0,
        )

    def _advance(self, at_s: float) -> None:
        passed_s, self._now_s = at_s - self._now_s, at_s
        self._held_s += passed_s * len(self._on_gpu)
        for key in self._left_s:
            self._left_s[key] = max(0.0, self._left_s[key] - passed_s * self._rate[key])

    def _submit(self, key: str) -> None:
        is_whole = self._limit is None
        request = ResourceRequest(cpu_milli=1000, memory_bytes=2**30, gpu_count=1, gpu_milli=1000 if is_whole else 500)
        sharing = None if is_whole else GpuSharing(load=self._jobs[key].load)
        spec = WorkloadSpec(name="train", request=request, gpu_sharing=sharing)
        asked = SubmitWorkloadRequest(spec=spec, workload_id=key)
        self._core.submit(asked, now_ns=int(self._now_s * _NS) + 3)

    def _end(self, key: str) -> None:
        self._core.cancel(key, now_ns=int(self._now_s * _NS) + 3)
        del self._left_s[key], self._rate[key]
        uuid = self._gpu.pop(key)
        self._on_gpu[uuid].remove(key)
        if self._on_gpu[uuid]:
            self._set_rates(uuid)
        else:
            del self._on_gpu[uuid]

    def _begin(self) -> None:
        workloads = self._core.state.workloads
        for key in [key for key in self._core.state.live_ids if key not in self._left_s]:
            if workloads[key].placements:
                (uuid,) = workloads[key].placements[0].gpu_uuids
                self._left_s[key], self._gpu[key], self._begun_s[key] = self._jobs[key].work_s, uuid, self._now_s
                self._on_gpu.setdefault(uuid, []).append(key)
                self._set_rates(uuid)

    def _set_rates(self, uuid: str) -> None:
        here = self._on_gpu[uuid]
        for key in here:
            beside = (self._jobs[other].load for other in here if other != key)
            # A pair that does not fit into memory never gets there: no known pair has it.
            self._rate[key] = 1.0 / (1.0 + sum(self._slowdowns[self._jobs[key].load, other] for other in beside))


def draw_jobs(chance: random.Random, loads: list[str], count: int, load: float) -> list[Job]:
    """Draws arrivals that need so much of all GPUs alone."""
    low, high = _WORK_S
    works = [low * (high / low) ** chance.random() for _ in range(count)]
    apart_s = statistics.fmean(works) / (load * _NODES * _NODE_GPUS)
    at_s, found = 0.0, []
    for work_s in works:
        at_s += chance.expovariate(1.0 / apart_s)
        found.append(Job(at_s, chance.choice(loads), work_s))
    return found


def choose_half(chance: random.Random, slowdowns: Pairs) -> dict[tuple[str, str], float]:
    """Chooses half of the pairs, each with both of its halves."""
    pairs = sorted({tuple(sorted(pair)) for pair in slowdowns})
    chosen = set(chance.sample(pairs, len(pairs) // 2))
    return {pair: value for pair, value in slowdowns.items() if tuple(sorted(pair)) in chosen}


def describe(rows: Iterable[Outcome]) -> str:
    """Formats the medians of some runs, with the spread of the mean time."""
    found = list(rows)
    times = sorted(one.mean_h for one in found)
    slowdown, slowest, held = (
        statistics.median(values)
        for values in ([r.slowdown for r in found], [r.slowest for r in found], [r.held_gpu_h / r.done for r in found])
    )
    return (
        f"{statistics.median(times):6.2f} h ({times[0]:.2f} to {times[-1]:.2f}), slower by {abs(100 * slowdown):5.1f} %, "
        f"the slowest by {abs(100 * slowest):5.1f} %, {held:.2f} GPU-hours a job"
    )


def measure_decision_ms(loads: list[str], slowdowns: Pairs, nodes: int, limit: float | None) -> list[float]:
    """Returns the processor time of decisions about a quarter of a GPU, on nodes of 8 GPUs that are half full of others, sorted."""
    chance = random.Random(0)
    core = build_empty_cluster(
        nodes, BackfillMode.NONE, model="V100", cpu_milli=64_000, memory_bytes=2**38, node_gpus=8
    )

    def submit(key: str) -> None:
        request = ResourceRequest(cpu_milli=100, memory_bytes=2**20, gpu_count=1, gpu_milli=250)
        spec = WorkloadSpec(name="train", request=request, gpu_sharing=GpuSharing(load=chance.choice(loads)))
        core.submit(SubmitWorkloadRequest(spec=spec, workload_id=key), now_ns=3)

    for number in range(16 * nodes):
        submit(f"w{number}")
    pairs = tuple(Interference(load=one, beside=other, slowdown=value) for (one, other), value in slowdowns.items())
    core.update_policy(replace(core.state.policy, interference=pairs, shared_slowdown_most=limit), now_ns=4)
    found = []
    for number in range(_DECISIONS):
        begun_s = time.process_time()
        submit(f"d{number}")
        found.append(1e3 * (time.process_time() - begun_s))
    return sorted(found)


@benchmark()
@data_option()
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True, help="Runs of each kind.")
@click.option(
    "--jobs", "jobs_of_run", type=click.IntRange(20), default=600, show_default=True, help="Jobs of each run."
)
@click.option(
    "--nodes", type=click.IntRange(1), default=1000, show_default=True, help="Nodes for the time of a decision."
)
def main(options: Options) -> int:
    """Plays all runs and writes interference.csv."""
    slowdowns = read_slowdowns(options.data / "gavel" / "pairs.csv")
    loads = sorted({one for one, _ in slowdowns})
    limits = (0.25, 0.5, 1.0)
    # Beside any job that fits, whatever that costs: all that is known is what fits.
    fits = dict.fromkeys(slowdowns, 0.0)
    kinds = ["whole GPUs", "any that fits", "no limit", *(f"at most {limit:.0%}" for limit in limits)]
    kinds.append("at most 50%, half known")
    amounts = (0.7, 1.0, 1.2)
    progress, rows = Progress("runs"), []
    for amount in amounts:
        for seed in range(options.seeds):
            jobs = draw_jobs(random.Random(f"{seed}/{amount}"), loads, options.jobs_of_run, amount)
            half = choose_half(random.Random(seed), slowdowns)
            plans = [
                (slowdowns, None),
                (fits, _NO_LIMIT),
                (slowdowns, _NO_LIMIT),
                *((slowdowns, limit) for limit in limits),
                (half, 0.5),
            ]
            for kind, (known, limit) in zip(kinds, plans, strict=True):
                rows.append((kind, amount, seed, Cluster(slowdowns, known, limit).play(jobs)))
                progress.show(len(rows), len(amounts) * options.seeds * len(kinds))
    for amount in amounts:
        print(f"work for {amount:.0%} of the GPUs alone:")
        for kind in kinds:
            print(f"  {kind:<24}{describe(one for name, load, _, one in rows if (name, load) == (kind, amount))}")
    write_csv(
        options.out / "interference.csv",
        ("kind", "load", "seed", *Outcome._fields),
        [[kind, amount, seed, *one] for kind, amount, seed, one in rows],
    )
    for name, known, limit in (("unlimited", {}, None), ("limited", {}, 0.5), ("with pairs", slowdowns, None)):
        taken_ms = measure_decision_ms(loads, known, options.nodes, limit)
        median_ms, p95_ms = taken_ms[len(taken_ms) // 2], taken_ms[int(0.95 * len(taken_ms))]
        print(f"a decision on {options.nodes} nodes, {name}: {median_ms:.1f} ms of processor time, {p95_ms:.1f} at p95")
    over = [
        one.slowest - limit for limit in limits for kind, _, _, one in rows if kind.startswith(f"at most {limit:.0%}")
    ]
    return report_promise("no job is slowed down beyond its limit", kept=max(over) <= _NEARLY)


if __name__ == "__main__":
    sys.exit(main())
