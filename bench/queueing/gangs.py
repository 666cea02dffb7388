"""Gangs of GPUs on identical nodes: an event simulation in which every decision places all jobs anew.

Owns the traces' jobs, the cluster, time and what a restart costs. A job takes all of its GPUs or none; jobs are
placed in the order of a policy, what does not fit is skipped, and what ran and is not placed is preempted. Jobs of
at most one node go to the first node that has room; larger ones take idle nodes, and the rest on one node. Decisions
fall at every event, or at the ends of rounds in which something happened. Must not know how a policy ranks jobs.

The rules are those of the simulator and the testbed of Muri (Zhao et al., SIGCOMM 2022), so that published averages
can be recomputed: `EVERY_EVENT` lets each running job lose its overhead at every event, as that simulator does;
`ON_START` charges it when a job starts or resumes, as a cluster does.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from math import inf

import numpy as np

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]


class RestartCost(Enum):
    """When a job loses its overhead."""

    NEVER = "never"
    ON_START = "on start"
    EVERY_EVENT = "every event"


@dataclass(frozen=True)
class GangTrace:
    """Jobs by index, in the order of their submission; times in seconds."""

    name: str
    job_ids: np.ndarray[tuple[int], np.dtype[np.int64]]
    gpus: np.ndarray[tuple[int], np.dtype[np.int64]]
    submit_s: Numbers
    iterations: Numbers
    iteration_s: Numbers  # on all GPUs of the job
    restart_s: Numbers  # what a start or resume costs
    models: tuple[str, ...]

    @property
    def gpu_seconds(self) -> float:
        """The work of all jobs."""
        return float(np.sum(self.iterations * self.iteration_s * self.gpus))


@dataclass(frozen=True)
class GangRun:
    """When each job started first and ended, and how often jobs started or resumed."""

    start_s: Numbers
    end_s: Numbers
    jct_s: Numbers
    starts: int

    @property
    def average_jct_s(self) -> float:
        """The mean time from submission to end."""
        return float(self.jct_s.mean())

    @property
    def makespan_s(self) -> float:
        """When the last job ends."""
        return float(self.end_s.max())

    @property
    def p99_jct_s(self) -> float:
        """As the publication counts it: the sorted value at the index 0.99 n, rounded down."""
        return float(np.sort(self.jct_s)[int(0.99 * len(self.jct_s))])


class GangPolicy(ABC):
    """Ranks the jobs that have arrived and not ended; `order` is where the last decision left them."""

    counts_only = False  # places by the number of GPUs, without nodes

    def __init__(self) -> None:
        self.order: list[int] = []

    def submit(self, job: int) -> None:
        """A job has arrived."""
        self.order.append(job)

    def finish(self, job: int) -> None:
        """A job has ended."""
        self.order.remove(job)

    @abstractmethod
    def rank(self, simulation: "GangSimulation") -> list[int]:
        """Returns the active jobs, those to place first in front."""

    def next_change_s(self, _simulation: "GangSimulation") -> float:
        """Returns when the order may change by itself, at the earliest; inf for never."""
        return inf


class NodePacking:
    """The GPUs that are free while a decision places jobs."""

    def __init__(self, nodes: int, gpus_per_node: int, *, counts_only: bool) -> None:
        self.free = [nodes * gpus_per_node] if counts_only else [gpus_per_node] * nodes
        self._size = nodes * gpus_per_node if counts_only else gpus_per_node

    def place(self, gpus: int) -> bool:
        """Takes GPUs by the rules of this module; False if they do not fit."""
        free = self.free
        if gpus <= self._size:
            for node, count in enumerate(free):
                if count >= gpus:
                    free[node] = count - gpus
                    return True
            return False
        whole, rest = divmod(gpus, self._size)
        idle = [node for node, count in enumerate(free) if count == self._size][:whole]
        if len(idle) < whole:
            return False
        if rest:
            last = next((node for node, count in enumerate(free) if count >= rest and node not in idle), None)
            if last is None:
                return False
            free[last] -= rest
        for node in idle:
            free[node] = 0
        return True


class GangSimulation:
    """A trace on a cluster under a policy."""

    def __init__(
        self,
        trace: GangTrace,
        policy: GangPolicy,
        *,
        nodes: int = 8,
        gpus_per_node: int = 8,
        round_s: float = 0.0,
        restart: RestartCost = RestartCost.NEVER,
    ) -> None:
        self.trace, self.policy, self.restart, self.round_s = trace, policy, restart, round_s
        self.nodes, self.gpus_per_node = nodes, gpus_per_node
        count = len(trace.gpus)
        self.now_s = -round_s  # the first round begins at 0
        self.remaining = trace.iterations.copy()  # iterations
        self.attained_s = np.zeros(count)  # of running, with what restarts cost
        self.is_running = np.zeros(count, dtype=bool)
        self.is_active = np.zeros(count, dtype=bool)
        self.start_s, self.end_s = np.full(count, inf), np.full(count, inf)
        self.starts = 0
        self._gpus: list[int] = trace.gpus.tolist()
        self._checked_s = np.zeros(count)
        self._ready_s = np.zeros(count)  # when what the last restart costs is over
        self._ends_s = np.full(count, inf)
        self._arrived = 0

    def run(self) -> GangRun:
        """Simulates until every job has ended."""
        count, submit_s = len(self._gpus), self.trace.submit_s
        left = count
        while left:
            arrival_s = float(submit_s[self._arrived]) if self._arrived < count else inf
            end_s = float(self._ends_s.min())
            change_s = self.policy.next_change_s(self)
            event_s = min(arrival_s, end_s, change_s)
            if event_s == inf:
                raise ValueError(f"{self.trace.name}: a job fits no empty cluster of {self.nodes} nodes")
            if self.round_s:
                # Everything until the end of a round is decided there; a round in which nothing happens changes nothing.
                event_s = max(self.now_s + self.round_s, -(-event_s // self.round_s) * self.round_s)
            self.now_s = event_s
            for job in np.flatnonzero(self._ends_s <= event_s).tolist():
                self._finish(job)
                left -= 1
            while self._arrived < count and submit_s[self._arrived] <= event_s:
                self.is_active[self._arrived] = True
                self._checked_s[self._arrived] = submit_s[self._arrived]
                self.policy.submit(self._arrived)
                self._arrived += 1
            self._advance()
            self._place()
        return GangRun(self.start_s, self.end_s, self.end_s - self.trace.submit_s, self.starts)

    def remaining_s(self) -> Numbers:
        """The time that each job still has to run, on all of its GPUs."""
        return self.remaining * self.trace.iteration_s

    def _finish(self, job: int) -> None:
        self.end_s[job] = self._ends_s[job]
        self.attained_s[job] += self._ends_s[job] - self._checked_s[job]
        self._ends_s[job] = inf
        self.is_active[job] = self.is_running[job] = False
        self.policy.finish(job)

    def _advance(self) -> None:
        """Brings the work of running jobs up to now."""
        running = np.flatnonzero(self.is_running)
        begin_s = self._checked_s[running]
        self.attained_s[running] += self.now_s - begin_s
        if self.restart is RestartCost.EVERY_EVENT:
            done_s = np.maximum(self.now_s - begin_s - self.trace.restart_s[running], 0.0)
        else:
            done_s = np.maximum(self.now_s - np.maximum(begin_s, self._ready_s[running]), 0.0)
        self.remaining[running] -= done_s / self.trace.iteration_s[running]
        self._checked_s[self.is_active] = self.now_s

    def _place(self) -> None:
        """Places all active jobs anew, and finds when the placed ones end."""
        packing = NodePacking(self.nodes, self.gpus_per_node, counts_only=self.policy.counts_only)
        gpus, placed = self._gpus, list[int]()
        refused = self.nodes * self.gpus_per_node + 1  # what was refused once fits no better later
        for job in self.policy.rank(self):
            if gpus[job] >= refused:
                continue
            if packing.place(gpus[job]):
                placed.append(job)
            else:
                refused = gpus[job]
                if refused == 1:
                    break
        was_running = self.is_running.copy()
        self.is_running[:] = False
        self.is_running[placed] = True
        started = np.flatnonzero(self.is_running & ~was_running)
        self.starts += len(started)
        self.start_s[started] = np.minimum(self.start_s[started], self.now_s)
        self._ends_s[was_running & ~self.is_running] = inf
        chosen = np.array(placed, dtype=np.int64)
        ready_s = np.full(len(chosen), self.now_s)
        if self.restart is RestartCost.ON_START:
            self._ready_s[started] = self.now_s + self.trace.restart_s[started]
            ready_s = np.maximum(ready_s, self._ready_s[chosen])
        self._ends_s[chosen] = ready_s + self.remaining[chosen] * self.trace.iteration_s[chosen]
