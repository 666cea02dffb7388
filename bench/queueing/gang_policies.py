"""Peers' orders of gangs: shortest remaining time and service, least attained service in queues, finish-time fairness.

Owns the rules of SRTF, SRSF, Tiresias (Gu et al., NSDI 2019) and Themis (Mahajan et al., NSDI 2020) as Muri's
simulator states them, ties and their order included. Must not know the cluster beyond its number of GPUs.
"""

from math import ceil, inf

import numpy as np

from bench.queueing.gangs import GangPolicy, GangSimulation, Numbers

_ROUNDED = 1e-6  # GPU-seconds; sums of intervals stop short of a limit by some 1e-12


class ShortestRemaining(GangPolicy):
    """SRTF, or SRSF if the remaining time is weighted by GPUs. Both know the true remaining time."""

    def __init__(self, *, by_gpus: bool) -> None:
        super().__init__()
        self._by_gpus = by_gpus

    def rank(self, simulation: GangSimulation) -> list[int]:
        """Ranks by the remaining time; ties stay in the order of the last decision."""
        order = np.array(self.order, dtype=np.int64)
        key = simulation.remaining[order] * simulation.trace.iteration_s[order]
        if self._by_gpus:
            key = key * simulation.trace.gpus[order]
        self.order = [self.order[place] for place in np.argsort(key, kind="stable").tolist()]
        return self.order


class LeastAttained(GangPolicy):
    """Tiresias without knowledge: a queue for each limit of attained GPU-seconds, no promotion.

    Within a queue the order is first in, first out, with what runs in front. `counts_only` is the rule of the
    simulator, which places this policy by the number of GPUs.
    """

    def __init__(self, limits: tuple[float, ...] = (3250.0, 7200.0), *, counts_only: bool) -> None:
        super().__init__()
        self.counts_only = counts_only
        self._limits = limits
        self._queues: list[list[int]] = [[] for _ in range(len(limits) + 1)]
        self._level: dict[int, int] = {}

    def submit(self, job: int) -> None:
        """A job enters the first queue."""
        self._level[job] = 0
        self._queues[0].append(job)

    def finish(self, job: int) -> None:
        """A job leaves its queue."""
        self._queues[self._level.pop(job)].remove(job)

    def rank(self, simulation: GangSimulation) -> list[int]:
        """Ranks queue by queue, after what ran has entered the queue of its attained service."""
        is_running, gpus = simulation.is_running, simulation.trace.gpus
        for queue in self._queues:
            pending = [job for job in queue if not is_running[job]]
            queue[:] = [job for job in queue if is_running[job]] + pending
        for job in np.flatnonzero(is_running).tolist():
            attained = simulation.attained_s[job] * gpus[job] + _ROUNDED
            level = before = self._level[job]
            while level < len(self._limits) and attained >= self._limits[level]:
                level += 1
            if level != before:
                self._queues[before].remove(job)
                self._queues[level].append(job)
                self._level[job] = level
        return [job for queue in self._queues for job in queue]

    def next_change_s(self, simulation: GangSimulation) -> float:
        """Returns when the first running job reaches the limit of its queue."""
        found = inf
        for job in np.flatnonzero(simulation.is_running).tolist():
            level = self._level[job]
            if level < len(self._limits):
                left_s = ceil(self._limits[level] / int(simulation.trace.gpus[job])) - simulation.attained_s[job]
                found = min(found, left_s + simulation.now_s)
        return found


class FinishTimeFairness(GangPolicy):
    """Themis as Muri plays it: shares that minimise the largest ratio of finish times, then the most owed first.

    A job of n active ones would alone have the share min(1, ceil(GPUs / n) / its GPUs); its ratio compares the time
    since submission and the rest at the share x with the time at that share, which is added up in iterations, as there.
    For a ratio r the least shares follow in closed form, so the least feasible r is found by bisection.
    """

    counts_only = True  # what is chosen by counts is placed in the order of size, which always fits powers of two

    def __init__(self, round_s: float = 0.0) -> None:
        super().__init__()
        self._round_s = round_s
        self._alone: dict[int, float] = {}  # iterations over the share, until the last decision
        self._before: dict[int, tuple[float, float]] = {}  # iterations that were left, and the share
        self._owed_s: dict[int, float] = {}
        self._rounds: dict[int, int] = {}  # decisions by which it ran
        self._last_s = 0.0

    def submit(self, job: int) -> None:
        """A job arrives that is owed nothing."""
        super().submit(job)
        self._alone[job] = self._owed_s[job] = 0.0
        self._rounds[job] = 0

    def rank(self, simulation: GangSimulation) -> list[int]:
        """Ranks by the share over what was received, then by what is owed."""
        if not self.order:
            return []
        jobs, trace = np.array(self.order), simulation.trace
        gpus, left = trace.gpus[jobs], simulation.remaining[jobs]
        total = simulation.nodes * simulation.gpus_per_node
        share = np.minimum(1.0, ceil(total / len(jobs)) / gpus)
        for job, one_left, one_share in zip(self.order, left.tolist(), share.tolist(), strict=True):
            if job in self._before:
                was_left, was_share = self._before[job]
                self._alone[job] += (was_left - one_left) / was_share
            self._before[job] = one_left, one_share
        alone = np.array([self._alone[job] for job in self.order]) + left / share
        age_s = simulation.now_s - trace.submit_s[jobs]
        shares = minimise_ratio(age_s, left * trace.iteration_s[jobs], alone, gpus, total)
        attained_s = simulation.attained_s[jobs]
        for job in np.flatnonzero(simulation.is_running).tolist():
            self._rounds[job] += 1
        # The testbed divides by the decisions by which a job ran, the simulator by the time.
        received = (
            np.array([self._rounds[job] for job in self.order], dtype=np.float64) if self._round_s else attained_s
        )
        urgency = np.where(received == 0.0, shares * 1e9, shares / np.maximum(received, 1e-12))
        deficit_s = np.array([self._owed_s[job] for job in self.order]) - attained_s
        passed_s = self._round_s or simulation.now_s - self._last_s
        for job, one in zip(self.order, shares.tolist(), strict=True):
            self._owed_s[job] += one * passed_s
        self._last_s = simulation.now_s
        ranked = jobs[np.lexsort((-shares, -deficit_s, -urgency))]
        self.order = ranked[np.argsort(-trace.gpus[ranked], kind="stable")].tolist()
        return [int(job) for job in ranked]


def minimise_ratio(age_s: Numbers, rest_s: Numbers, alone: Numbers, gpus: Numbers, total: int) -> Numbers:
    """Returns the shares x in [0, 1] with sum(gpus x) <= total that minimise max((age + rest / x) / alone)."""
    if gpus.sum() <= total:
        return np.ones(len(gpus))
    low, high = float(((age_s + rest_s) / alone).max()), 0.0
    high = max(low, 1e-12)
    while float((gpus * rest_s / np.maximum(high * alone - age_s, rest_s)).sum()) > total:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = 0.5 * (low + high)
        if float((gpus * rest_s / np.maximum(middle * alone - age_s, rest_s)).sum()) > total:
            low = middle
        else:
            high = middle
    return rest_s / np.maximum(high * alone - age_s, rest_s)
