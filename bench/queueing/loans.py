"""Capacity of inference services lent to training jobs by day and night: Lyra's setting (EuroSys 2023), rebuilt.

Plays Philly's busiest days (DATA/philly) and services whose need follows the Azure traces (DATA/azure_llm_2023) on the
product's core. Two halves of a fleet of nodes with 8 GPUs, each of a model of its own: one belongs to a queue of jobs, one to
a queue of services, which run nowhere else. A service needs a replica for each part of its rate, and is scaled every five
minutes to the most of the last and the next ten, as an autoscaler that is stabilised does. Lyra's own traces and its code are
not public: its figures stand beside ours as `published`, from other jobs and services.

    no loans               each half for itself
    loans until jobs end   jobs borrow from services; a service takes what is free
    loans, reclaimed       in addition a service reclaims the quota of its queue: jobs are preempted, and begin anew

Jobs run as fast on either half, and a preempted job loses all that it has run. In Lyra a fifth of the jobs can use
lent servers, and some of them are elastic, which is most of what its jobs gain. Bounds: nobody waits; and of the part of GPUs in
use, that none idles while work waits that was submitted, were it divisible. Lost work is no use.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from bench.loop.demand import DAY_S, Course, course, requests
from bench.queueing.summary import SetResult, SummaryRow
from bench.runner import Progress
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CoreStep
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadEvicted, WorkloadPlaced
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    MODEL_PREFIX,
    Gpu,
    Inventory,
    Mobility,
    PreemptionReclaim,
    Queue,
    QueuePreemption,
    QueueQuota,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
)

BEGIN, DAYS = "2017-10-10", 15
NODES, GPUS_OF_NODE = 72, 8  # of each half
# A small fleet that is full sooner, for a look: two days of every fourth job.
QUICK_NODES, QUICK_DAYS, QUICK_STEP = 8, 2, 4
OF_SERVICES, OF_JOBS = "V100-SXM2-32GB", "V100-SXM2-16GB"
LOOK_S, STABLE_S = 300.0, 600.0
# GPUs of a replica, by service; and of their half, the part that all services need at the most, and at night.
SERVICES = (1, 1, 1, 1, 2, 2, 4, 8)
PEAK, NIGHT = 0.95, 0.42
# Of what services need, what they may lack: replicas of others that lie about a node keep large ones away.
SHORT_MOST = 0.001
# Victims are chosen by what each loses, and so may lose more together than others on another node.
OVER_MOST = 1.1
_NS = 1_000_000_000
_ENDS, _SCALES, _SUBMITTED = 0, 1, 2
# Queueing time, time to completion, and use, each without loans over with them (from the abstract).
PUBLISHED = {"wait_ratio": 1.53, "completion_ratio": 1.48, "use_ratio": 1.25}
POLICIES = ("no loans", "loans until jobs end", "loans, reclaimed")


@dataclass(frozen=True)
class LentJob:
    """A job that may run on lent GPUs; times in seconds."""

    submit_s: float
    run_s: float
    gpus: int


@dataclass
class LoanRun:
    """What came out of a policy."""

    waits_s: list[float]
    ends_s: list[float]
    preemptions: int = 0
    lost_gpu_s: float = 0.0
    # Of services: GPU-seconds that they needed and had not, and how long the longest lack of one lasted.
    short_gpu_s: float = 0.0
    needed_gpu_s: float = 0.0
    longest_lack_s: float = 0.0
    # Where one replica lacked: what its victims lost, and the least that any would lose that make room on one node.
    single_lost_gpu_s: float = 0.0
    single_least_gpu_s: float = 0.0
    # Over time, at each look: GPUs that services hold, and that jobs hold.
    services: list[int] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)


def read_jobs(folder: Path, days: float, nodes: int = NODES, step: int = 1) -> list[LentJob]:
    """Reads every job of the days, or one of `step`, without those that no half has room for."""
    table = pd.read_csv(folder / "philly.csv", parse_dates=["timestamp"])
    begin = pd.Timestamp(BEGIN)
    within = (table.timestamp >= begin) & (table.timestamp < begin + pd.Timedelta(days=days))
    chosen = table[within].sort_values("timestamp", kind="stable")
    seconds = (chosen.timestamp - begin).dt.total_seconds()
    rows = zip(seconds.tolist(), chosen.duration.tolist(), chosen.num_gpus.tolist(), strict=True)
    jobs = [LentJob(submit_s, max(run_s, 1.0), gpus) for submit_s, run_s, gpus in rows]
    return [job for job in jobs[::step] if job.gpus <= nodes * GPUS_OF_NODE]


def draw_needs(data: Path, days: float, nodes: int = NODES, seed: int = 1) -> np.ndarray:
    """Draws the replicas that each service needs at each look, (services, looks)."""
    rng, looks = np.random.default_rng(seed), int(days * DAY_S / LOOK_S)
    traces = [requests(data, name) for name in ("conv", "code")]
    rates = []
    for number in range(len(SERVICES)):
        # In one time zone, give or take two hours.
        made = Course(20.0, rng.uniform(), NIGHT / PEAK, night_s=3600.0 * (4.0 + rng.uniform(-2.0, 2.0)))
        fine = course(traces[number % 2], made, looks * 5, LOOK_S / 5, rng).reshape(looks, 5).mean(axis=1)
        rates.append(fine / fine.max())
    most, factor = PEAK * nodes * GPUS_OF_NODE, 1.0
    while True:
        needs = _count_replicas(factor * most / len(SERVICES) * np.array(rates))
        asked = (needs * np.array(SERVICES)[:, None]).sum(axis=0).max()
        if asked <= most:
            return needs
        factor *= 0.99 * min(1.0, most / asked)


def _count_replicas(gpus: np.ndarray) -> np.ndarray:
    """Returns the replicas for so many GPUs of each service at each look, (services, looks), stabilised."""
    wanted = np.maximum(1, np.ceil(gpus / np.array(SERVICES)[:, None])).astype(np.int64)
    width = int(STABLE_S / LOOK_S)
    looks = wanted.shape[1]
    return np.stack([wanted[:, max(0, at - width) : at + width + 1].max(axis=1) for at in range(looks)], axis=1)


def build_core(policy: str, nodes: int) -> Core:
    """Builds a core with both halves, and their queues by the policy."""
    core = Core(ClusterState(ended_most=1000), catalogue.load_catalogue())
    for number in range(2 * nodes):
        name, model = f"n{number}", OF_SERVICES if number < nodes else OF_JOBS
        gpus = tuple(
            Gpu(uuid=f"GPU-{name}-{n}", index=n, model=model, product=f"Tesla {model}") for n in range(GPUS_OF_NODE)
        )
        node = Inventory(node_name=name, cpu_milli=96_000, memory_bytes=2**40, gpus=gpus)
        core.register_node(node, now_ns=1)
    lends = None if policy != POLICIES[0] else 0
    most = 1000 * nodes * GPUS_OF_NODE
    of_services = QueueQuota(resource=f"{MODEL_PREFIX}{OF_SERVICES}", nominal=most, lending_limit=lends)
    # Services run on GPUs of their own alone, so that what jobs own is never lent.
    of_jobs = QueueQuota(resource=f"{MODEL_PREFIX}{OF_JOBS}", nominal=most, lending_limit=0)
    reclaim = QueuePreemption(reclaim=PreemptionReclaim.NOMINAL) if policy == POLICIES[2] else None
    queues = (
        Queue(name="fleet"),
        Queue(name="services", parent="fleet", quotas=(of_services,), preemption=reclaim),
        Queue(name="jobs", parent="fleet", quotas=(of_jobs,)),
    )
    core.update_policy(replace(core.state.policy, queues=queues), now_ns=1)
    return core


class LoanSimulation:
    """Jobs and services on a core by one policy."""

    def __init__(self, policy: str, jobs: Sequence[LentJob], needs: np.ndarray, nodes: int = NODES) -> None:
        self._core, self._jobs, self._needs = build_core(policy, nodes), jobs, needs
        self._names = [f"service-{number}" for number in range(len(SERVICES))]
        self._runs, self._began_s = [0] * len(jobs), [0.0] * len(jobs)
        self.found = LoanRun([0.0] * len(jobs), [math.nan] * len(jobs))
        self._lacks_s = [0.0] * len(SERVICES)
        self._held = 0  # GPUs of jobs
        self._now_s = 0.0
        self._events = [(job.submit_s, _SUBMITTED, number, 0) for number, job in enumerate(jobs)]
        self._events += [(LOOK_S * at, _SCALES, at, 0) for at in range(1, needs.shape[1])]
        heapq.heapify(self._events)

    def run(self, progress: Progress, total: int, done: int) -> LoanRun:
        """Plays all looks; jobs that have not ended by then are left."""
        for name, gpus, count in zip(self._names, SERVICES, self._needs[:, 0].tolist(), strict=True):
            self._submit(name, "services", WorkloadKind.INFERENCE_SERVICE, gpus, count)
        end_s = LOOK_S * self._needs.shape[1]
        while self._events and self._events[0][0] < end_s:
            self._now_s, kind, number, run = heapq.heappop(self._events)
            if kind == _SUBMITTED:
                gpus = self._jobs[number].gpus
                replicas = -(-gpus // GPUS_OF_NODE)
                self._submit(f"job-{number}", "jobs", WorkloadKind.BATCH_JOB, gpus // replicas, replicas)
            elif kind == _ENDS and run == self._runs[number]:
                self.found.ends_s[number] = self._now_s
                self._held -= self._jobs[number].gpus
                self._follow(self._core.cancel(f"job-{number}", now_ns=self._now_ns))
            elif kind == _SCALES:
                self._look(number)
                progress.show(done + number, total, f"day {self._now_s / DAY_S:.1f}")
            if self._core.is_drain_due(self._now_ns):
                self._follow(self._core.continue_drains(now_ns=self._now_ns))
        return self.found

    @property
    def _now_ns(self) -> int:
        return 2 + int(self._now_s * _NS)

    def _submit(self, name: str, queue: str, kind: WorkloadKind, gpus: int, replicas: int) -> None:
        models = (OF_JOBS, OF_SERVICES) if queue == "jobs" else (OF_SERVICES,)
        request = ResourceRequest(cpu_milli=1000 * gpus, gpu_count=gpus, gpu_milli=1000, gpu_models=models)
        mobility = Mobility.RESTARTABLE if kind is WorkloadKind.BATCH_JOB else Mobility.FIXED
        spec = WorkloadSpec(name=name, queue=queue, kind=kind, request=request, replicas=replicas, mobility=mobility)
        self._follow(self._core.submit(SubmitWorkloadRequest(spec=spec, workload_id=name), now_ns=self._now_ns))

    def _look(self, at: int) -> None:
        """Counts what services lack since the last look, and scales them, those that shrink first."""
        found, holding = self.found, 0
        wanted = self._needs[:, at].tolist()
        held = [len(self._core.workload(name).placements) for name in self._names]
        # What is given back first, then the largest replicas, which need a node almost alone.
        for number in sorted(range(len(held)), key=lambda one: (wanted[one] > held[one], -SERVICES[one])):
            if wanted[number] == held[number]:
                continue
            least_gpu_s = self._find_least_loss(SERVICES[number]) if wanted[number] == held[number] + 1 else None
            before_gpu_s = found.lost_gpu_s
            self._follow(self._core.scale(self._names[number], wanted[number], now_ns=self._now_ns))
            if least_gpu_s is not None and found.lost_gpu_s > before_gpu_s:
                found.single_lost_gpu_s += found.lost_gpu_s - before_gpu_s
                found.single_least_gpu_s += least_gpu_s
        for number, name in enumerate(self._names):
            count = len(self._core.workload(name).placements)
            lack = max(0, wanted[number] - count)
            found.needed_gpu_s += wanted[number] * SERVICES[number] * LOOK_S
            found.short_gpu_s += lack * SERVICES[number] * LOOK_S
            self._lacks_s[number] = self._lacks_s[number] + LOOK_S if lack else 0.0
            found.longest_lack_s = max(found.longest_lack_s, self._lacks_s[number])
            holding += count * SERVICES[number]
        found.services.append(holding)
        found.jobs.append(self._held)

    def _find_least_loss(self, gpus: int) -> float | None:
        """Returns the least GPU-seconds lost by jobs whose end makes so many GPUs free on a node of services, by all subsets."""
        least: float | None = None
        for record in self._core.state.nodes.values():
            lost: dict[int, float] = {}
            held: dict[int, int] = {}
            free = GPUS_OF_NODE
            for (key, _), assignment in record.assignments.items():
                free -= len(assignment.gpu_uuids)
                if key.startswith("job-"):
                    number = int(key.removeprefix("job-"))
                    held[number] = held.get(number, 0) + len(assignment.gpu_uuids)
                    lost[number] = (self._now_s - self._began_s[number]) * self._jobs[number].gpus
            lacks = max(0, gpus - free)
            if record.inventory.gpus[0].model != OF_SERVICES or sum(held.values()) < lacks:
                continue
            # The least that frees at least so many of them.
            best = [0.0] + [math.inf] * lacks
            for number, count in held.items():
                for wanted in range(lacks, 0, -1):
                    best[wanted] = min(best[wanted], best[max(0, wanted - count)] + lost[number])
            least = best[lacks] if least is None else min(least, best[lacks])
        return least

    def _follow(self, step: CoreStep[object]) -> None:
        """Follows a step of the core and all that it leaves to do."""
        self._note(step)
        while self._core.has_backlog:
            self._note(self._core.retry(now_ns=self._now_ns))

    def _note(self, step: CoreStep[object]) -> None:
        found = self.found
        for event in step.events:
            if not isinstance(event, WorkloadPlaced | WorkloadEvicted) or not event.workload_id.startswith("job-"):
                continue
            number = int(event.workload_id.removeprefix("job-"))
            job, sign = self._jobs[number], 1 if isinstance(event, WorkloadPlaced) else -1
            self._held += sign * job.gpus
            self._runs[number] += 1
            if sign > 0:
                self._began_s[number] = self._now_s
                heapq.heappush(self._events, (self._now_s + job.run_s, _ENDS, number, self._runs[number]))
            else:
                found.preemptions += 1
                found.lost_gpu_s += (self._now_s - self._began_s[number]) * job.gpus

    def waits_s(self, end_s: float) -> list[float]:
        """Returns how long each job has waited or was lost until its last start, or until the end if it has none."""
        state = self._core.state.workloads
        waits = []
        for number, job in enumerate(self._jobs):
            workload = state.get(f"job-{number}")
            runs = not math.isnan(self.found.ends_s[number]) or (
                workload is not None and workload.phase is WorkloadPhase.PLACED
            )
            waits.append((self._began_s[number] if runs else end_s) - job.submit_s)
        return waits


def bound_use(jobs: Sequence[LentJob], needs: np.ndarray, nodes: int = NODES) -> float:
    """Returns the most of the fleet that could be in use: work is divisible, and no GPU idles while any waits."""
    looks = needs.shape[1]
    arrived = np.zeros(looks)
    for job in jobs:
        arrived[min(looks - 1, int(job.submit_s / LOOK_S))] += job.gpus * job.run_s
    fleet, waiting, used = 2 * nodes * GPUS_OF_NODE * LOOK_S, 0.0, 0.0
    served = (needs * np.array(SERVICES)[:, None]).sum(axis=0) * LOOK_S
    for at in range(looks):
        waiting += arrived[at]
        done = min(waiting, fleet - served[at])
        waiting -= done
        used += done + served[at]
    return used / (fleet * looks)


def describe_run(jobs: Sequence[LentJob], run: LoanRun, nodes: int = NODES) -> dict[str, float]:
    """Returns the figures of a run."""
    end_s, fleet = LOOK_S * (1 + len(run.jobs)), 2 * nodes * GPUS_OF_NODE
    ended = np.array([not math.isnan(end) for end in run.ends_s])
    completion = [
        (end if not math.isnan(end) else end_s) - job.submit_s for job, end in zip(jobs, run.ends_s, strict=True)
    ]
    return {
        "wait_mean_s": float(np.mean(run.waits_s)),
        "wait_p99_s": float(np.quantile(run.waits_s, 0.99)),
        "completion_mean_s": float(np.mean(completion)),
        "ended": float(ended.mean()),
        "use": (float(np.mean(np.array(run.services) + np.array(run.jobs))) - run.lost_gpu_s / end_s) / fleet,
        "preemptions": float(run.preemptions),
        "lost_gpu_h": run.lost_gpu_s / 3600.0,
        "loss_over_least": run.single_lost_gpu_s / run.single_least_gpu_s if run.single_least_gpu_s else 1.0,
        "services_short": run.short_gpu_s / run.needed_gpu_s,
        "longest_lack_s": run.longest_lack_s,
    }


def run_set(folder: Path, *, quick: bool) -> SetResult:
    """Runs the set; quick takes a small fleet and two days."""
    days, nodes, step = (QUICK_DAYS, QUICK_NODES, QUICK_STEP) if quick else (DAYS, NODES, 1)
    jobs, needs = read_jobs(folder, days, nodes, step), draw_needs(folder.parent, days, nodes)
    looks = needs.shape[1]
    progress = Progress("looks at jobs and services")
    figures: dict[str, dict[str, float]] = {}
    curves: dict[str, list[float]] = {
        "need": (needs * np.array(SERVICES)[:, None]).sum(axis=0).astype(float).tolist(),
        "fleet": [2.0 * nodes * GPUS_OF_NODE],
    }
    for done, policy in enumerate(POLICIES):
        simulation = LoanSimulation(policy, jobs, needs, nodes)
        run = simulation.run(progress, looks * len(POLICIES), looks * done)
        run.waits_s = simulation.waits_s(LOOK_S * looks)
        figures[policy] = describe_run(jobs, run, nodes)
        curves[f"{policy}: services"] = [float(value) for value in run.services]
        curves[f"{policy}: jobs"] = [float(value) for value in run.jobs]
    run_mean_s = float(np.mean([min(job.run_s, LOOK_S * looks - job.submit_s) for job in jobs]))
    bounds = {
        "wait_mean_s": 0.0,
        "completion_mean_s": run_mean_s,
        "use": bound_use(jobs, needs, nodes),
        "loss_over_least": 1.0,
        "services_short": 0.0,
        "longest_lack_s": 0.0,
    }
    rows = [
        SummaryRow("loans", policy, metric, value, None, bounds.get(metric))
        for policy, values in figures.items()
        for metric, value in values.items()
    ]
    without, reclaimed = figures[POLICIES[0]], figures[POLICIES[2]]
    ratios = {
        "wait_ratio": (without["wait_mean_s"] / max(1.0, reclaimed["wait_mean_s"]), None),
        "completion_ratio": (
            without["completion_mean_s"] / reclaimed["completion_mean_s"],
            without["completion_mean_s"] / run_mean_s,
        ),
        "use_ratio": (reclaimed["use"] / without["use"], bounds["use"] / without["use"]),
    }
    rows += [
        SummaryRow("loans", POLICIES[2], name, value, PUBLISHED[name], bound) for name, (value, bound) in ratios.items()
    ]
    over = reclaimed["loss_over_least"]
    wait_ratio, short = ratios["wait_ratio"][0], reclaimed["services_short"]
    targets = (
        (f"services lack {short:.5f} of what they need, at most {SHORT_MOST}", short <= SHORT_MOST),
        (
            f"jobs wait 1/{wait_ratio:.2f} of the time without loans, at most 1/{PUBLISHED['wait_ratio']}",
            wait_ratio >= PUBLISHED["wait_ratio"],
        ),
        (
            f"victims for one replica lose {over:.3f} times the least that any lose, at most {OVER_MOST}",
            over <= OVER_MOST,
        ),
    )
    return SetResult(tuple(rows), targets, curves)


def draw(path: Path, result: SetResult) -> None:
    """Draws what jobs and services hold over time, and what services need."""
    from bench.plotting import draw_figure  # a second to import

    needs = np.array(result.curves["need"])[1:]
    hours = np.arange(1, len(needs) + 1) * LOOK_S / 3600.0
    with draw_figure(path, len(POLICIES), size=(11, 8)) as panels:
        for panel, policy in zip(panels, POLICIES, strict=True):
            services, held = (np.array(result.curves[f"{policy}: {name}"]) for name in ("services", "jobs"))
            panel.stackplot(hours, services, held, labels=("services", "jobs"))
            panel.plot(hours, needs, color="black", linewidth=0.8, label="services need")
            panel.set_ylim(0.0, result.curves["fleet"][0])
            panel.set_title(f"{policy}: GPUs held")
        panels[0].legend(loc="upper left")
        panels[-1].set_xlabel("hours")
