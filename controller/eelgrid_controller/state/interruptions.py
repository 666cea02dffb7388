"""Interruptions: how often the work of a queue is interrupted, what its checkpoints cost, and where it fails at once.

Learned from the events of jobs whose processes agents run, so that replays are equal; bounded. Must not know what is advised
from it (queueing.checkpoint_interval), nor who is preempted or retried.

Two causes scale differently, and are counted apart. A job is preempted, drained or fails as one, whatever its size: these
are counted by queue, over the time for which its jobs run. A GPU, and the machine with it, is lost whoever uses it: losses
are counted by pool, over the time for which its GPUs are used. A job on g GPUs is then interrupted at the rate
queue + g x pool.

Estimate. Interruptions are a Poisson process, so with a gamma prior of n0 interruptions in the time T0 the mean of the
posterior is (n0 + n) / (T0 + T): with few data it is the prior. Both n and T lose half of their weight in each half-life;
T grows in closed form with the number of running jobs (GPUs), so time without interruptions counts as it passes,
reading changes nothing, and a restart neither.

What it counts. One interruption for each time that a job has to begin again: WorkloadEvicted (a preemption, a drain) and
WorkloadRetried count for the queue, unless an attempt of it was LOST or one of its GPUs was lost before, which count for the
pool. The user's own cancels, and failures that are not retried, are none.
"""

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from eelgrid_controller.state.attempts import has_stopped
from eelgrid_controller.state.events import (
    AttemptEnded,
    Event,
    GpuLost,
    PartitionsPlanned,
    PolicyChanged,
    WorkloadCancelled,
    WorkloadCompleted,
    WorkloadEvicted,
    WorkloadPlaced,
    WorkloadRetried,
    WorkloadScaled,
)
from eelgrid_controller.state.failure_streaks import FailureStreaks
from eelgrid_controller.state.node_allocations import NodeRecord, list_affected_workloads
from eelgrid_controller.state.queue_usage import resolve_queue, resolve_user
from eelgrid_protos.messages import AttemptState, Policy, Workload, WorkloadPhase

_NS = 1e9
_LN2 = math.log(2.0)
HALF_LIFE_S = 30 * 86_400.0
# One interruption in a day of a job: what a job is worth that nothing is known of.
PRIOR_JOB_S = 86_400.0
# One loss in 50,000 h of a GPU: 419 in 54 days on 16,384 H100 (Llama 3, arXiv 2407.21783, table 5).
PRIOR_GPU_S = 50_000 * 3600.0
_PRIOR_EVENTS = 1.0
# The cost of a job's checkpoints is followed over about so many of its runs.
_COST_WEIGHT = 0.25
GROUPS_MOST = 10_000
_RATES_MOST = 10_000
_QUEUE, _POOL = "queue", "pool"
_LEAVES = (WorkloadEvicted, WorkloadRetried, WorkloadCompleted, WorkloadCancelled)
_FOLLOWED = (*_LEAVES, AttemptEnded, GpuLost, PartitionsPlanned, PolicyChanged, WorkloadPlaced, WorkloadScaled)
_RateKey = tuple[str, str]
_Group = tuple[str, str]


@dataclass(frozen=True, slots=True)
class InterruptionCount:
    """Interruptions and the running time in which they happened, both weighted by age; `running` grows per second."""

    at_ns: int
    events: float = 0.0
    exposure_s: float = 0.0
    running: float = 0.0

    def advance(self, now_ns: int) -> "InterruptionCount":
        """Returns the counts as of a moment; a moment before the last change counts as that one."""
        passed_s = max(0, now_ns - self.at_ns) / _NS
        left = 2.0 ** (-passed_s / HALF_LIFE_S)
        # For short times the difference to 1 would lose digits.
        more_s = self.running * HALF_LIFE_S / _LN2 * -math.expm1(-passed_s / HALF_LIFE_S * _LN2)
        return replace(
            self,
            at_ns=max(now_ns, self.at_ns),
            events=self.events * left,
            exposure_s=self.exposure_s * left + more_s,
        )

    def estimate_rate_hz(self, prior_s: float) -> float:
        """Returns the expected interruptions per second of running time."""
        return (_PRIOR_EVENTS + self.events) / (prior_s + self.exposure_s)


class RunningJob(NamedTuple):
    """To what a running job counts: its queue, the pool of its first node, and how many GPUs it uses."""

    queue: str
    pool: str
    gpus: float


@dataclass(frozen=True, slots=True)
class CheckpointInputs:
    """What a checkpoint interval is computed from, with the counts that it comes from."""

    # 0 if no checkpoint of a job of this user and name is known.
    cost_s: float
    mean_between_s: float
    queue: str
    queue_count: InterruptionCount
    pool: str
    pool_count: InterruptionCount


class InterruptionHistory:
    """The part of the state that learns interruptions and costs of checkpoints."""

    def __init__(self) -> None:
        self._counts: dict[_RateKey, InterruptionCount] = {}
        # Seconds of one checkpoint by user and name of jobs; the group that was extended last is last.
        self._costs: dict[_Group, float] = {}
        self._running: dict[str, RunningJob] = {}
        # Running jobs of which a loss was counted already.
        self._lost: set[str] = set()
        # What a running job was told at its start: the cost of a checkpoint, and the time between interruptions.
        self._told: dict[str, tuple[float, float]] = {}
        self.streaks = FailureStreaks()

    def observe(
        self, event: Event, policy: Policy, workloads: Mapping[str, Workload], nodes: Mapping[str, NodeRecord]
    ) -> None:
        """Follows an event that was applied to these."""
        self.streaks.observe(event, workloads)
        if not isinstance(event, _FOLLOWED):
            return
        match event:
            case WorkloadEvicted() | WorkloadRetried():
                job = self._running.get(event.workload_id)
                if job is not None and event.workload_id not in self._lost:
                    self._count((_QUEUE, job.queue), event.time_ns, events=1.0)
            case AttemptEnded():
                self._observe_attempt(event, workloads[event.workload_id])
            case GpuLost():
                for item in nodes[event.node_name].assignments.values():
                    if event.gpu_uuid in item.gpu_uuids:
                        self._count_loss(item.workload_id, event.time_ns)
            case PolicyChanged():
                for key in tuple(self._running):
                    self._update_running(key, policy, workloads, nodes, event.time_ns)
        for key in list_affected_workloads(event):
            self._update_running(key, policy, workloads, nodes, event.time_ns)
        if isinstance(event, WorkloadPlaced) and event.workload_id in self._running:
            inputs = self.find_inputs(workloads[event.workload_id], event.time_ns)
            self._told[event.workload_id] = inputs.cost_s, inputs.mean_between_s

    def _observe_attempt(self, event: AttemptEnded, workload: Workload) -> None:
        if event.status.state is AttemptState.LOST or event.status.node_fault:
            self._count_loss(workload.workload_id, event.time_ns)
        if has_stopped(workload):
            # All replicas wait for the slowest.
            cost_s = max(one.checkpoint_s for one in workload.attempts)
            if cost_s > 0.0:
                group = resolve_user(workload), workload.spec.name
                before_s = self._costs.pop(group, cost_s)
                self._costs[group] = before_s + _COST_WEIGHT * (cost_s - before_s)
                if len(self._costs) > GROUPS_MOST:
                    del self._costs[next(iter(self._costs))]

    def _count_loss(self, workload_id: str, now_ns: int) -> None:
        job = self._running.get(workload_id)
        if job is not None and workload_id not in self._lost:
            self._lost.add(workload_id)
            self._count((_POOL, job.pool), now_ns, events=1.0)

    def _update_running(
        self,
        workload_id: str,
        policy: Policy,
        workloads: Mapping[str, Workload],
        nodes: Mapping[str, NodeRecord],
        now_ns: int,
    ) -> None:
        workload = workloads.get(workload_id)
        before, after = self._running.get(workload_id), None
        if workload is not None and workload.phase is WorkloadPhase.PLACED and workload.spec.process is not None:
            record = nodes.get(workload.placements[0].node_name) if workload.placements else None
            request = workload.spec.request
            gpus = len(workload.placements) * request.gpu_count * request.gpu_milli / 1000.0
            pool = "" if record is None else record.inventory.pool
            after = RunningJob(resolve_queue(policy.queues, workload.spec.queue) or "", pool, gpus)
        if before == after:
            return
        for job, sign in ((before, -1.0), (after, 1.0)):
            if job is not None:
                self._count((_QUEUE, job.queue), now_ns, running=sign)
                self._count((_POOL, job.pool), now_ns, running=sign * job.gpus)
        if after is not None:
            self._running[workload_id] = after
            return
        del self._running[workload_id]
        self._lost.discard(workload_id)
        self._told.pop(workload_id, None)

    def _count(self, key: _RateKey, now_ns: int, *, events: float = 0.0, running: float = 0.0) -> None:
        known = self._counts.get(key) or InterruptionCount(now_ns)
        one = known.advance(now_ns)
        self._counts[key] = replace(one, events=one.events + events, running=max(0.0, one.running + running))
        if len(self._counts) > _RATES_MOST:
            self._prune()

    def _prune(self) -> None:
        """Forgets the half without running work that has the least time."""
        idle = sorted((one.exposure_s, key) for key, one in self._counts.items() if not one.running)
        for _, key in idle[: max(1, len(idle) // 2)]:
            del self._counts[key]

    def find_inputs(self, workload: Workload, now_ns: int) -> CheckpointInputs:
        """Returns what is known of a running job's checkpoints and interruptions, the latter as of now."""
        job = self._running.get(workload.workload_id) or RunningJob("", "", 0.0)
        queue = (self._counts.get((_QUEUE, job.queue)) or InterruptionCount(now_ns)).advance(now_ns)
        pool = (self._counts.get((_POOL, job.pool)) or InterruptionCount(now_ns)).advance(now_ns)
        rate_hz = queue.estimate_rate_hz(PRIOR_JOB_S) + job.gpus * pool.estimate_rate_hz(PRIOR_GPU_S)
        cost_s = self._costs.get((resolve_user(workload), workload.spec.name), 0.0)
        return CheckpointInputs(cost_s, 1.0 / rate_hz, job.queue, queue, job.pool, pool)

    def get_told(self, workload_id: str) -> tuple[float, float]:
        """Returns the cost of a checkpoint (0: unknown) and the mean time between interruptions as of a job's start."""
        return self._told.get(workload_id, (0.0, 0.0))

    def copy(self) -> Self:
        """Returns an independent copy; counts are values."""
        twin: Self = copy(self)
        twin._counts, twin._costs = self._counts.copy(), self._costs.copy()
        twin._running, twin._lost, twin._told = self._running.copy(), self._lost.copy(), self._told.copy()
        twin.streaks = self.streaks.copy()
        return twin

    def dump(self) -> dict[str, Any]:
        """Dumps everything as plain JSON values; empty without any."""
        found: dict[str, Any] = {
            "counts": [
                [*key, one.at_ns, one.events, one.exposure_s, one.running] for key, one in sorted(self._counts.items())
            ],
            "costs": [[*group, cost_s] for group, cost_s in self._costs.items()],
            "running": [[key, *job] for key, job in sorted(self._running.items())],
            "lost": sorted(self._lost),
            "told": [[key, *told] for key, told in sorted(self._told.items())],
            "streaks": self.streaks.dump(),
        }
        return {name: rows for name, rows in found.items() if rows}

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Self:
        """Loads this part from a checkpoint."""
        found = cls()
        found._counts = {(kind, name): InterruptionCount(*row) for kind, name, *row in plain.get("counts", ())}
        found._costs = {(user, name): cost_s for user, name, cost_s in plain.get("costs", ())}
        found._running = {key: RunningJob(*job) for key, *job in plain.get("running", ())}
        found._lost = set(plain.get("lost", ()))
        found._told = {key: (cost_s, mean_s) for key, cost_s, mean_s in plain.get("told", ())}
        found.streaks = FailureStreaks.load(plain.get("streaks", {}))
        return found
